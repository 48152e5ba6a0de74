"""Instructions per code of the CPU kernels, a measure without noise, for bench_cpu.py.

A child process makes the data and calls an op on one thread; only the call is counted. Up to AVX2,
valgrind's callgrind counts for two sizes, so that the fixed cost of a call cancels. valgrind does
not know AVX-512: there `perf` counts, where the processor allows it, once for one call and once for
many, so that starting the process and making the data cancel.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import torch_turboquant as tt
from torch_turboquant._library import cpu_levels, force_cpu_level

D = 128
HEADS = 2
SIZES = (1024, 2048)
REPEATS = 200

# Tells callgrind when to count; compiled on the fly.
SWITCHES = """
#include <valgrind/callgrind.h>
extern "C" void begin() {
  CALLGRIND_START_INSTRUMENTATION;
  CALLGRIND_ZERO_STATS;
}
extern "C" void end(const char* name) {
  CALLGRIND_DUMP_STATS_AT(name);
  CALLGRIND_STOP_INSTRUMENTATION;
}
"""


# ---- what is counted: for a size, the call and how many codes it reads or writes


def codebook(bits: int, search: int = 1) -> tuple[Tensor, Tensor | None, Tensor]:
    """The constants of the codec: (signs, levels, steps)."""
    book = tt.Codebook.make(D, bits, "lloyd")
    return tt.random_signs(D, 0), book.levels_tensor(), book.steps_tensor(search)


def hadamard(n: int):
    x, signs = torch.randn(n, D), tt.random_signs(D, 0)
    return lambda: tt.hadamard(x, signs), n * D


def encode(n: int, search: int):
    (signs, levels, steps), x = codebook(4, search), torch.randn(n, D)
    return lambda: tt.encode(x, signs, levels, steps, 4), n * D


def decode(n: int):
    signs, levels, steps = codebook(4)
    rows = tt.encode(torch.randn(n, D), signs, levels, steps, 4)
    return lambda: tt.decode(*rows, signs, levels, 4), n * D


def score(n: int, bits: int):
    signs, levels, steps = codebook(bits)
    rows = tt.encode(torch.randn(n, D), signs, levels, steps, bits)
    q = torch.randn(1, D)
    return lambda: tt.score(q, *rows, signs, levels, bits), n * D


def pages(name: str, search: int, n: int):
    """The arguments of cache_store for n tokens."""
    config = tt.preset(name, D, search=search)
    tables, count = tt.make_tables(config, 0), n // config.page_size
    cache = tt.allocate_cache(config, count, HEADS)
    k, v = torch.randn(2, n, HEADS, D, dtype=torch.bfloat16)
    return k, v, cache, torch.arange(n), config, tables


def store(n: int, name: str, search: int):
    arguments = pages(name, search, n)
    return lambda: tt.cache_store(*arguments), 2 * n * HEADS * D


def paged(n: int, name: str):
    """A filled cache of one sequence: (cache, block_table, seq_lens, config, tables)."""
    k, v, cache, slots, config, tables = pages(name, 1, n)
    tt.cache_store(k, v, cache, slots, config, tables)
    table = torch.arange(n // config.page_size, dtype=torch.int32)[None]
    return cache, table, torch.tensor([n], dtype=torch.int32), config, tables


def load(n: int, name: str):
    arguments = paged(n, name)
    return lambda: tt.cache_load(*arguments, n, torch.bfloat16), 2 * n * HEADS * D


def attention(n: int, name: str):
    arguments, q = paged(n, name), torch.randn(1, 4 * HEADS, D, dtype=torch.bfloat16)
    return lambda: tt.paged_attention(q, *arguments), 2 * n * HEADS * D


WORKS: dict[str, Callable[[int], tuple[Callable[[], object], int]]] = {
    "attention k4v4, 4 queries": lambda n: attention(n, "k4v4"),
    "attention k3v3, 4 queries": lambda n: attention(n, "k3v3"),
    "attention k5v4u, 4 queries": lambda n: attention(n, "k5v4u"),
    "attention k8v8, 4 queries": lambda n: attention(n, "k8v8"),
    "score 3 bit": lambda n: score(n, 3),
    "score 4 bit": lambda n: score(n, 4),
    "hadamard fp32": hadamard,
    "encode 4 bit fp32 S=1": lambda n: encode(n, 1),
    "encode 4 bit fp32 S=8": lambda n: encode(n, 8),
    "decode 4 bit fp32": decode,
    "cache_store k4v4 S=1": lambda n: store(n, "k4v4", 1),
    "cache_store k4v4 S=8": lambda n: store(n, "k4v4", 8),
    "cache_load k4v4": lambda n: load(n, "k4v4"),
}


# ---- the child


def count_calls(level: str, library: str, names: list[str]) -> None:
    """Runs under callgrind and makes one dump per work and size, named by both."""
    switches = ctypes.CDLL(library)
    with force_cpu_level(level):
        for name in names:
            for size in SIZES:
                call, _ = WORKS[name](size)
                call()
                switches.begin()
                call()
                switches.end(f"{name} @ {size}".encode())


def repeat_calls(level: str, name: str, repeats: str) -> None:
    """Runs under perf."""
    with force_cpu_level(level):
        call, _ = WORKS[name](SIZES[1])
        for _ in range(int(repeats)):
            call()


# ---- the parent


def child(prefix: list[str | Path], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, Path(__file__), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def by_callgrind(level: str, names: list[str], folder: Path) -> dict[str, float]:
    source, library, out = folder / "switches.cpp", folder / "switches.so", folder / f"{level}.out"
    source.write_text(SWITCHES)
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    tool = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--combine-dumps=yes"]
    done = child([*tool, f"--callgrind-out-file={out}"], "callgrind", level, str(library), *names)
    if done.returncode:
        raise SystemExit(done.stderr)
    counts: dict[str, int] = {}
    for part in out.read_text().split("desc: Trigger: Client Request: ")[1:]:
        (total,) = re.findall(r"^(?:summary|totals): (\d+)", part, re.MULTILINE)[:1]
        counts[part.partition("\n")[0].strip()] = int(total)
    per_code = {}
    for name in names:
        small, large = (counts[f"{name} @ {size}"] for size in SIZES)
        codes = [WORKS[name](size)[1] for size in SIZES]
        per_code[name] = (large - small) / (codes[1] - codes[0])
    return per_code


def by_perf(level: str, names: list[str]) -> dict[str, float] | None:
    """Instructions by perf; None where the processor or its hypervisor does not count them."""

    def count(name: str, repeats: int) -> int | None:
        prefix = ["perf", "stat", "-x,", "-e", "instructions:u", "--"]
        done = child(prefix, "perf", level, name, str(repeats))
        found = re.findall(r"^(\d+),.*instructions:u", done.stderr, re.MULTILINE)
        return int(found[0]) if done.returncode == 0 and found else None

    per_code = {}
    for name in names:
        few, many = count(name, 1), count(name, 1 + REPEATS)
        if few is None or many is None:
            return None
        per_code[name] = (many - few) / (REPEATS * WORKS[name](SIZES[1])[1])
    return per_code


def rows(wanted: re.Pattern, quick: bool = False) -> list[dict[str, object]]:
    """One row per work and level; one without a number where a level cannot be counted."""
    names = [name for name in WORKS if wanted.search(name)][: 2 if quick else None]
    result: list[dict[str, object]] = []
    for level in cpu_levels():
        tool = "perf" if level == "avx512" else "callgrind"
        per_code, reason = None, f"{tool} is not installed"
        if tool == "perf" and shutil.which("perf"):
            per_code, reason = by_perf(level, names), "perf: no instruction counter here"
        elif tool == "callgrind" and shutil.which("valgrind") and shutil.which("g++"):
            with tempfile.TemporaryDirectory() as folder:
                per_code = by_callgrind(level, names, Path(folder))
        found = {f"instructions {name}": round(n, 4) for name, n in (per_code or {}).items()}
        for name, number in (found or {"instructions": None}).items():
            by = tool if found else reason
            result.append({"row": name, "level": level, "per_code": number, "by": by})
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    tool, level, *rest = sys.argv[1:]
    if tool == "callgrind":
        count_calls(level, rest[0], rest[1:])
    else:
        repeat_calls(level, *rest)
