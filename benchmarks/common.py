"""Parts of all benchmarks: options, result files that say where their rows come from, tables.

A result file, benchmarks/results/<name>.json, is a list of rows. Every row carries its device, the
commit and the command that made it. A command that names another commit is as it was given, before
the history was rewritten; tests/test_documents.py lists the commits that this history has not.
Writing replaces the rows of the same device and keeps those of others, so one file collects all
machines.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_turboquant._files import replacing

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

LLAMA_8B = {  # the shape of Llama-3.1-8B, as its configuration names it
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}

Row = dict[str, Any]


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    options.add_argument("--device", default=default, help="default: %(default)s")
    options.add_argument("--commit", help="of the code measured; default: asks git")
    options.add_argument("--dry-run", action="store_true", help="prints, writes no result file")
    return options


def device_name(device: torch.device | str) -> str:
    """The model of the GPU or CPU, as its driver or the kernel names it."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
    return models[0].split(":", 1)[1].strip() if models else "CPU"


def short_name(dtype: torch.dtype) -> str:
    """fp32, fp16 or bf16."""
    return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]


def commit_name() -> str:
    """The short hash of the checkout, with "-dirty" if files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"git cannot name the commit ({error}): give it with --commit") from error


def command_line() -> str:
    """How this process was started, relative to the root of the checkout.

    Of files elsewhere only the name is kept: their folders mean nothing on another machine.
    """
    script = Path(sys.argv[0]).resolve()
    program = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", program, *map(without_folder, sys.argv[1:])])


def without_folder(text: str) -> str:
    """An argument whose value is an absolute path, without its folders: /a/b, --option=/a/b."""
    option, sign, value = text.partition("=") if re.match(r"--[\w-]+=/", text) else ("", "", text)
    return option + sign + (Path(value).name if value.startswith("/") else value)


def file_name(kind: str, model: str) -> str:
    """The result file of one model: quality, Gemma-3-270M -> quality_gemma_3_270m."""
    return f"{kind}_{model}".lower().replace("-", "_").replace(".", "_")


def origin(name: str, arguments: argparse.Namespace) -> Row:
    """The first entries of every row of a result file: name, device, commit and command."""
    return {
        "name": name,
        "device": device_name(arguments.device),
        "commit": arguments.commit or commit_name(),
        "command": command_line(),
    }


def read_rows(name: str, missing_ok: bool = False) -> list[Row]:
    """All rows of a result file; missing_ok: none if there is no file."""
    path = RESULTS / f"{name}.json"
    return [] if missing_ok and not path.exists() else json.loads(path.read_text())


def write_rows(name: str, rows: list[Row], arguments: argparse.Namespace) -> None:
    """Completes rows by their origin, and puts them into the result file.

    Args:
        name: the name of the benchmark and of the file.
        rows: measurements, as numbers and strings by name.
        arguments: the options of `parser`; with --dry-run nothing is written.
    """
    if arguments.dry_run:
        return
    source = origin(name, arguments)
    kept = [row for row in read_rows(name, missing_ok=True) if row["device"] != source["device"]]
    lines = [json.dumps(row) for row in kept + [{**source, **row} for row in rows]]
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as partial:  # an interrupted write leaves the old file
        partial.write_text("[\n" + ",\n".join(lines) + "\n]\n")  # a row per line: readable diffs
    print(f"{len(rows)} rows in {os.path.relpath(path, ROOT)}")


def write_progress(
    name: str,
    rows: list[Row],
    key: str | tuple[str, ...],
    arguments: argparse.Namespace,
    order: Sequence[Any] = (),
) -> None:
    """write_rows for a run of some rows: older rows of this device stay until replaced.

    Args:
        key: the entry that identifies a row, or several that do so together.
        order: of the rows in the file, by key; others follow, new ones first.
    """

    def key_of(row: Row) -> Any:
        return row[key] if isinstance(key, str) else tuple(row.get(entry) for entry in key)

    seen = {key_of(row) for row in rows}
    device = device_name(arguments.device)
    old = [row for row in read_rows(name, missing_ok=True) if row["device"] == device]
    place = {value: i for i, value in enumerate(order)}
    merged = rows + [row for row in old if key_of(row) not in seen]
    merged.sort(key=lambda row: place.get(key_of(row), len(place)))
    write_rows(name, merged, arguments)


def markdown(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
