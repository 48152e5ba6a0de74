"""Writes the generated blocks and pictures of the documents: `make docs`.

A document has blocks between <!-- name --> and <!-- end -->. The functions below write them: the
pages of ops from schemas and docstrings, tables and numbers from benchmarks/results. The rest of a
document is written by hand. Pictures are drawn from the same result files. The program needs no GPU
and measures nothing.

    python docs/generate.py            writes blocks and pictures
    python docs/generate.py --check    names documents whose blocks differ; writes nothing
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.cuda import is_available as cuda_is_available

import torch_turboquant as tq
from torch_turboquant.integrations.engine import pages

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import quality_tables  # noqa: E402
import weight_tables  # noqa: E402
from common import RESULTS, Row, device_name, file_name, markdown, read_rows  # noqa: E402

# ---- the ops


def op_names() -> list[str]:
    """All ops, in the order of csrc/ops.cpp."""
    return re.findall(r'm\.def\("(\w+)\(', (ROOT / "csrc" / "ops.cpp").read_text())


def ops() -> str:
    """A section per room, with its module's docstring; then its functions with their ops."""
    parts, room = [], None
    names = op_names()
    for name in names:
        function = getattr(tq, name, None)
        if function is None:
            continue  # an op that another one's function calls
        module = inspect.getmodule(function)
        if module.__name__ != room:
            room = module.__name__
            parts += [f"## {room.rpartition('.')[2]}", inspect.getdoc(module)]
        schemas = [schema(op) for op in names if op in (name, f"{name}_out")]
        signature = str(inspect.signature(function, eval_str=True))
        signature = re.sub(r"torch_turboquant\.(?:\w+\.)+|torch\.(?=Tensor)", "", signature)
        parts += [f"### {name}"]
        parts += ["```\n" + "\n\n".join(schemas) + "\n```"]
        parts += ["```python\n" + wrapped(f"torch_turboquant.{name}{signature}") + "\n```"]
        parts += [docstring(inspect.getdoc(function))]
    return "\n\n".join(parts)


def schema(op: str) -> str:
    text = str(getattr(torch.ops.turboquant, op).default._schema)
    return wrapped(text.removeprefix("turboquant::"))


def wrapped(call: str) -> str:
    """A call in lines of at most 110 characters, the arguments aligned."""
    first, *others = call.split(", ")
    indent = " " * (first.index("(") + 1)
    lines = [first]
    for argument in others:
        lines[-1] += ","
        if len(lines[-1]) + len(argument) > 108:
            lines.append(indent + argument)
        else:
            lines[-1] += " " + argument
    return "\n".join(lines)


def docstring(text: str) -> str:
    """The sections of a docstring as paragraphs, its arguments as a list."""
    parts = []
    for part in re.split(r"\n(?=(?:Args|Returns|Raises):\n)", text):
        title, _, body = part.partition(":\n")
        if title not in ("Args", "Returns", "Raises"):
            parts.append(part.strip())
            continue
        body = inspect.cleandoc(body)
        items = re.sub(r"^(\w[\w, ]*): ", r"- `\1`: ", body, flags=re.MULTILINE)
        parts.append(f"{title}:\n\n{items}")
    return "\n\n".join(parts)


# ---- which kernel takes a call

STEP = {"head_dim": 128, "q_heads": 32, "kv_heads": 8, "preset": "k5v4u"}
PAGES = {"head_dim": 128, "kv_heads": 8, "preset": "k5v4u"}
VECTORS = {"head_dim": 128, "vectors": 65536}
# (op, a usual call, what differs in this one)
CALLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("paged_attention", STEP, {}),
    ("paged_attention", STEP, {"max_q_len": 4}),
    ("paged_attention", STEP, {"max_q_len": 5}),
    ("paged_attention", STEP, {"max_q_len": 512, "seqs": 61, "tokens": 572}),
    ("paged_attention", STEP, {"max_q_len": 5, "head_dim": 96}),
    ("paged_attention", STEP, {"max_q_len": 5, "device": "A100"}),
    ("paged_attention", STEP, {"head_dim": 320}),
    ("paged_attention", STEP, {"dtype": "float32", "tail": True}),
    ("paged_attention", STEP, {"device": "T4"}),
    ("mla_attention", {}, {"preset": "k4u"}),
    ("mla_attention", {}, {"preset": "k4"}),
    ("mla_attention", {}, {"preset": "k4u", "device": "A100"}),
    ("cache_store", PAGES, {"tokens": 64}),
    ("cache_store", PAGES, {"tokens": 4096}),
    ("cache_store", PAGES, {"tokens": 4096, "head_dim": 96}),
    ("cache_load", PAGES, {"seqs": 1, "max_seq_len": 4096}),
    ("cache_load", PAGES, {"seqs": 1, "max_seq_len": 4096, "preset": "k8v8"}),
    ("encode", VECTORS, {"bits": 4}),
    ("decode", VECTORS, {}),
    ("decode", VECTORS, {"dtype": "float32"}),
    ("score", {"head_dim": 128, "bits": 4}, {"keys": 4096}),
    ("score", {"head_dim": 128, "bits": 4}, {"keys": 4096, "queries": 2}),
    ("qjl_sketch", VECTORS, {}),
    ("qjl_sketch", VECTORS, {"head_dim": 80}),
]


def kernels() -> str:
    """A row per call, on an H200 unless the row names another GPU."""
    lines = []
    for op, base, changes in CALLS:
        call = {**base, **changes}
        choice = tq.kernel_choice(op, **{"device": "H200", **call})
        text = ", ".join(f"{name} {value}" for name, value in call.items() if value is not True)
        text += "".join(f", {name}" for name, value in call.items() if value is True)
        lines.append([f"`{op}`", text, f"`{choice.kernel}`", choice.reason])
    return markdown(["op", "call", "kernel", "reason"], lines)


# ---- the results


def digest(name: str) -> str:
    """The hash that a picture carries to name the results it shows."""
    return hashlib.sha256((RESULTS / f"{name}.json").read_bytes()).hexdigest()


def source(name: str, some: Iterable[Row], folder: str = "") -> str:
    """The origin of these rows: their file and its commands. folder: of the root, from the page."""
    noise = r" --((commit|caches|cache-dir|only|seconds) ('[^']*'|\S+)|no-picture|no-layers)"
    commands = dict.fromkeys(re.sub(noise, "", row["command"]) for row in some)
    text = " and ".join(f"`{command}`" for command in commands)
    return f"[{name}.json]({folder}benchmarks/results/{name}.json): {text}"


def link(name: str, label: str) -> str:
    """A link of the README to a result file, whose rows name machine, commit and command."""
    return f"[{label}](benchmarks/results/{name}.json)"


DECODE = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 32, "q_len": 1, "tail": True}
LARGE = 64, 8192
QUALITY = file_name("quality", quality_tables.MODELS["SmolLM2-135M"])
OTHERS = {
    "int8": "int8 per token",
    "kivi4": "KIVI, 4 bits",
    "q4_0h": "4-bit blocks, rotated",
    "int4": "int4 per token",
}


def h200_rows(name: str) -> list[Row]:
    """Of the GPU that documents and pictures name; a file may hold rows of others."""
    return [row for row in read_rows(name) if row["device"] == "NVIDIA H200"]


def table_rows(table: str) -> list[Row]:
    """Rows of one of the tables of bench_attention on the GPU; older rows do not name theirs."""
    found = h200_rows("h200_attention")
    unnamed = {False: "steps", True: "prompts"}
    return [row for row in found if row.get("table", unnamed[row["q_len"] > 16]) == table]


def decode_rows(**changes: Any) -> dict[tuple[int, int], dict[str, Row]]:
    """Attention of decode steps on the GPU: (batch, context) -> preset -> row."""
    wanted = {**DECODE, **changes}
    found: dict[tuple[int, int], dict[str, Row]] = {}
    for row in table_rows("steps"):
        if wanted.items() <= row.items():
            found.setdefault((row["batch"], row["context"]), {})[row["preset"]] = row
    return found


def name_of(shape: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]:,}"


def microseconds(ms: float) -> str:
    return f"{1000 * ms:.0f} us" if ms < 1 else f"{ms:.2f} ms"


def best_bf16(row: Row) -> str:
    ms = row["best_bf16_ms"]
    return f"{microseconds(ms)}, {row['best_bf16_name']}" if ms else "-"


def vs_bf16(row: Row) -> str:
    ratio = row["speedup_vs_bf16"]
    return f"{ratio:.2f}x" if ratio else "-"


def us_and_ratio(row: Row) -> str:
    return f"{microseconds(row['ours_ms'])}, {vs_bf16(row)}"


def attention_table() -> str:
    """A row per shape, a column per preset."""
    found = decode_rows()
    presets = list(found[LARGE])
    lines = []
    for shape, row in sorted(found.items(), key=lambda item: -item[0][0] * item[0][1]):
        any_row = next(iter(row.values()))
        lines.append(
            [
                name_of(shape),
                best_bf16(any_row),
                microseconds(any_row["fp8_ms"]) if any_row["fp8_ms"] else "-",
                *(us_and_ratio(row[name]) if name in row else "" for name in presets),
            ]
        )
    return markdown(["batch x context", "best bf16", "fp8", *presets], lines)


VARIANTS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "8 query heads for 8 KV heads": (LARGE, {"q_heads": 8}),
    "64 for 8": (LARGE, {"q_heads": 64}),
    "128 for 8": (LARGE, {"q_heads": 128}),
    "four queries": (LARGE, {"q_len": 4}),
    "`head_dim` 64": (LARGE, {"head_dim": 64}),
    "`head_dim` 256, 64 x 4,096": ((64, 4096), {"head_dim": 256}),
    "`head_dim` 96, 32 for 32, 16 x 8,192": ((16, 8192), {"head_dim": 96, "kv_heads": 32}),
    "`head_dim` 80, 32 for 32, 16 x 8,192": ((16, 8192), {"head_dim": 80, "kv_heads": 32}),
    "`head_dim` 160": (LARGE, {"head_dim": 160}),
    "12 for 2, 128 x 8,192": ((128, 8192), {"q_heads": 12, "kv_heads": 2}),
    "8 for 1, 128 x 8,192": ((128, 8192), {"q_heads": 8, "kv_heads": 1}),
    "pages of 16": (LARGE, {"page_size": 16}),
    "pages of 128": (LARGE, {"page_size": 128}),
    "neither exact tail nor center": (LARGE, {"tail": False}),
}


def variants_table() -> str:
    """Other shapes and arguments of a step, in two presets."""
    lines = []
    for label, (shape, changes) in VARIANTS.items():
        found = decode_rows(**changes)[shape]
        bf16 = microseconds(found["k4v4"]["best_bf16_ms"])
        lines.append([label, bf16, *(us_and_ratio(found[name]) for name in ("k4v4u", "k4v4"))])
    return markdown(["64 x 8,192 but", "best bf16", "k4v4u", "k4v4"], lines)


def shape_of(row: Row) -> str:
    """The batch in the name of a row: "k4v4 2 x 99 heads 32/8 d 128 page 32 tail"."""
    return re.fullmatch(r"\S+ (.*) page \d+.*", row["row"])[1]


def batch_name(row: Row) -> str:
    """The batch without heads, which are 32 for 8 of 128 channels unless it says so."""
    name, heads = re.fullmatch(r"(.*) heads (\S+) d \d+.*", shape_of(row)).groups()
    name = re.sub(r"\d{4,}", lambda number: f"{int(number[0]):,}", name)
    name = re.sub(r" q_len ([\d,]+)", r" (\1 queries)", name).replace("..", " to ")
    name += f", {heads}" if heads != "32/8" else ""
    alike = row["q_len"] > 1 and "queries" not in name
    return name + (f", {row['q_len']} queries" if alike else "")


def preset_name(row: Row) -> str:
    marks = {"exact tail": row["tail"], "own tokens exact": row.get("own")}
    return ", ".join([row["preset"], *(mark for mark, holds in marks.items() if holds)])


def wide_table(table: str, header: list[str], cells: Callable[[Row], list[str]]) -> str:
    """A row per batch, a column per preset; empty before the first measurement."""
    found: dict[str, dict[str, Row]] = {}
    for row in table_rows(table):
        found.setdefault(shape_of(row), {})[preset_name(row)] = row
    presets = list(dict.fromkeys(name for some in found.values() for name in some))
    lines = []
    for some in found.values():
        any_row = next(iter(some.values()))
        ratios = (us_and_ratio(some[name]) if name in some else "" for name in presets)
        lines.append([*cells(any_row), best_bf16(any_row), *ratios])
    return markdown([*header, "best bf16", *presets], lines) if lines else ""


def long_table(table: str, **columns: Callable[[Row], str]) -> str:
    """A row per batch and preset; empty before the first measurement.

    columns: those between time and bf16, by header.
    """
    columns = {
        "batch": prompt_name if table == "prompts" else batch_name,
        "preset": preset_name,
        "time": lambda row: microseconds(row["ours_ms"]),
        **columns,
        "best bf16": best_bf16,
        "vs bf16": vs_bf16,
    }
    lines = [[cell(row) for cell in columns.values()] for row in table_rows(table)]
    return markdown(list(columns), lines) if lines else ""


def query_rows_table() -> str:
    """Several queries of many heads, fewest query rows first."""

    def cells(row: Row) -> list[str]:
        group = row["q_heads"] // row["kv_heads"]
        heads = f"{row['q_heads']}/{row['kv_heads']}, {row['q_len']}"
        return [str(group * row["q_len"]), name_of((row["batch"], row["context"])), heads]

    return wide_table("rows", ["rows", "batch x context", "heads, queries"], cells)


def prompt_name(row: Row) -> str:
    older = row["context"] - row["q_len"]
    return f"{row['q_len']:,} tokens" + (f" behind {older:,}" if older else "")


def mixed_table() -> str:
    def alone(row: Row) -> str:
        return " + ".join(map(microseconds, row["parts_ms"].values()))

    columns = {"its parts alone": alone, "of them": lambda row: f"{row['of_parts']:.2f}"}
    return long_table("mixed", **columns)


def prompt_attention_table() -> str:
    def speed(row: Row) -> str:
        return f"{row['tflop_s']:.0f}" if "tflop_s" in row else ""

    return long_table("prompts", **{"TFLOP/s": speed})


def ragged_table() -> str:
    def uniform(row: Row) -> str:
        batch = row["uniform"].partition(" heads")[0]
        return f"{row['of_uniform']:.0%} of {row['uniform_tb_s']:.2f}, {batch}"

    columns = {"TB/s": lambda row: f"{row['achieved_tb_s']:.2f}", "of the uniform batch": uniform}
    return long_table("ragged", **columns)


def cold_table() -> str:
    return long_table("cold")


def dims_table() -> str:
    return wide_table("dims", ["`head_dim`"], lambda row: [str(row["head_dim"])])


def cpu_attention_table() -> str:
    """A row per context: two presets at the best level, and one at the level below it."""
    found = {
        (row["row"].split()[1], row["level"], row["context"], row["batch"]): row
        for row in read_rows("cpu")
        if row["row"].startswith("attention k")
    }
    lines = []
    for context, batch in ((8192, 1), (32768, 1), (65536, 1), (8192, 4), (32768, 4)):
        line = [f"{context:,} x {batch}"]
        for preset, level in (("k4v4", "avx512"), ("k3v3", "avx512"), ("k4v4", "avx2")):
            row = found[preset, level, context, batch]
            line += [f"{row['ms']:.2f} ms", f"{row['speedup_vs_bf16']:.1f}x"]
            if level == "avx512":
                line.append(f"{row['speedup_vs_float32']:.1f}x")
        lines.append(line)
    header = "context x batch,k4v4,vs bfloat16,vs float32,k3v3,vs bfloat16,vs float32"
    return markdown([*header.split(","), "k4v4, AVX2", "vs bfloat16"], lines)


def generated(part: str) -> dict[tuple[int, int], dict[tuple[str, str], Row]]:
    """Rows of bench_generate on the GPU: (batch, context) -> (kind, mode) -> row."""
    found: dict[tuple[int, int], dict[tuple[str, str], Row]] = {}
    for row in h200_rows("h200_generate"):
        if row["part"] == part:
            shape = row["batch"], row["context"]
            found.setdefault(shape, {})[row["kind"], row["mode"]] = row
    return dict(sorted(found.items(), key=lambda item: item[0][::-1]))


def milliseconds(row: Row | None, key: str) -> str:
    """Empty where nothing was measured."""
    if row is None or "not_run" in row:
        return "no room" if row and row["not_run"] == "out of memory" else ""
    return f"{row[key]:.1f}" if row[key] < 100 else f"{row[key]:,.0f}"


Columns = dict[str, tuple[str, str]]  # header -> kind and mode of bench_generate
EAGER: Columns = {
    "`DynamicCache`": ("dynamic", "eager"),
    "quanto": ("quanto", "eager"),
    "k5v4u": ("k5v4u", "eager"),
    "k4v4": ("k4v4", "eager"),
}
GRAPH: Columns = {
    "`StaticCache`": ("static", "graph"),
    "bf16": ("unmasked", "graph"),
    "k5v4u": ("k5v4u", "graph"),
    "k4v4": ("k4v4", "graph"),
}


def as_is(row: Row | None) -> str:
    """Milliseconds per token with the attention kernel that PyTorch chooses by itself."""
    if row is None or "ways_ms" not in row:
        return milliseconds(row, "tpot_ms")
    return f"{row['ways_ms']['as is']:.1f}"


def models_table() -> str:
    """The rows that the answer needs: milliseconds per token, eager and in graphs."""
    columns = {
        "eager: `DynamicCache`": ("dynamic", "eager"),
        "k5v4u": ("k5v4u", "eager"),
        "in a CUDA graph: bf16": ("unmasked", "graph"),
        "k5v4u ": ("k5v4u", "graph"),
        "k4v4": ("k4v4", "graph"),
    }
    found = generated("decode")
    lines = []
    for shape in ((1, 1024), (1, 8192), (1, 32768), (16, 32768), (1, 131072), (8, 131072)):
        times = (milliseconds(found[shape].get(column), "tpot_ms") for column in columns.values())
        lines.append([name_of(shape), *times])
    return markdown(["batch x context", *(column.strip() for column in columns)], lines)


def eager_table() -> str:
    """A whole model without graphs: milliseconds per token."""
    lines = []
    for shape, some in generated("decode").items():
        if ("k5v4u", "eager") in some:
            times = [milliseconds(some.get(column), "tpot_ms") for column in EAGER.values()]
            dynamic = some.get(("dynamic", "eager"))
            way = dynamic.get("way", "") if dynamic else ""
            lines.append([name_of(shape), as_is(dynamic), f"{times[0]} {way}".strip(), *times[1:]])
    header = ["batch x context", "`DynamicCache` as it is", "with its fastest kernel"]
    return markdown([*header, *list(EAGER)[1:]], lines)


def generation_table() -> str:
    """A whole model in a CUDA graph: milliseconds per token, and how many sequences fit."""
    lines = []
    for shape, some in generated("decode").items():
        if ("k5v4u", "graph") in some:
            times = [milliseconds(some.get(column), "tpot_ms") for column in GRAPH.values()]
            way = some.get(("unmasked", "graph"), {}).get("way", "")
            times[1] = f"{times[1]} {way}".strip()
            rows_of = (some.get((kind, "graph"), {}) for kind in ("unmasked", "k5v4u", "k4v4"))
            fits = (row.get("largest_batch") for row in rows_of)
            text = ", ".join("-" if n is None else f"{n:,}" for n in fits)
            lines.append([name_of(shape), *times, text])
    fits = "largest batch that fits: bf16, k5v4u, k4v4"
    return markdown(["batch x context", *GRAPH, fits], lines)


def vllm_rows(call: str, shape: dict[str, int]) -> dict[str, Row]:
    """Rows of bench_vllm_kernels on the GPU: contender -> row."""
    wanted = {"call": call, **shape}
    return {
        row["name"]: row for row in h200_rows("h200_vllm_kernels") if wanted.items() <= row.items()
    }


VLLM_PRESETS = {  # ours -> vLLM's preset with as many bits
    "k8v4": "turboquant_k8v4",
    "k4v4": "turboquant_4bit_nc",
    "k3v3": "turboquant_3bit_nc",
}


def vllm_table() -> str:
    """vLLM's TurboQuant and FlashAttention 3 beside ours: microseconds of one call."""
    attention = [row for row in h200_rows("h200_vllm_kernels") if row["call"] == "attention"]
    shapes = list(dict.fromkeys((row["batch"], row["context"]) for row in attention))
    calls = [
        (f"attention, {name_of(shape)}", "attention", {"batch": shape[0], "context": shape[1]})
        for shape in sorted(shapes, key=lambda shape: -shape[0] * shape[1])
    ]
    stores = [row for row in h200_rows("h200_vllm_kernels") if row["call"] == "store"]
    for tokens in sorted({row["tokens"] for row in stores}, reverse=True):
        calls.append((f"store, {tokens:,} tokens", "store", {"tokens": tokens}))
    lines = []
    for label, call, shape in calls:
        found = vllm_rows(call, shape)
        line = [
            label,
            *(f"{1000 * found[n]['ms']:.0f}" if n in found else "" for n in ("fa3", "fa3 fp8")),
        ]
        for ours, theirs in VLLM_PRESETS.items():
            a, b = found[theirs]["ms"], found[ours]["ms"]
            line.append(f"{1000 * a:,.0f} / {1000 * b:.1f} = {a / b:.1f}x")
        line.append(f"{1000 * found['k5v4u']['ms']:.1f}")
        lines.append(line)
    header = ["us", "FA3, bf16", "FA3, fp8"]
    pairs = [f"vLLM's {theirs} / {ours}" for ours, theirs in VLLM_PRESETS.items()]
    return markdown([*header, *pairs, "k5v4u"], lines)


ENGINE_MODEL = {"layers": 32, "kv_heads": 8, "head_dim": 128}  # Llama-3.1-8B
ENGINE_GIB = 72  # of bench_vllm
ENGINE_PAGE = 64  # tokens, where the user chooses none


def engine_presets() -> str:
    """What pages of vLLM take in every preset, and how many tokens fit."""

    def tokens(bytes_per_token: int) -> str:
        layers, heads = ENGINE_MODEL["layers"], ENGINE_MODEL["kv_heads"]
        return f"{ENGINE_GIB * 2**30 // (bytes_per_token * layers * heads):,}"

    d = ENGINE_MODEL["head_dim"]
    lines = [
        ["bf16", "16.00", f"{4 * d}", "1.00x", tokens(4 * d)],
        ["fp8", "8.00", f"{2 * d}", "2.00x", tokens(2 * d)],
    ]
    uses = {preset: f"{preset} ({use})" for use, (preset, _) in tq.NAMED_PRESETS.items()}
    for preset in tq.PRESETS:
        config = tq.preset(preset, d, sink_tokens=0, recent_window=0)
        size = pages.bytes_per_token(config, ENGINE_PAGE, torch.bfloat16)
        bits, times = f"{8 * size / (2 * d):.2f}", f"{4 * d / size:.2f}x"
        lines.append([uses.get(preset, preset), bits, str(size), times, tokens(size)])
    fits = f"tokens of Llama-3.1-8B in {ENGINE_GIB} GiB"
    return markdown(["cache", "bits", "bytes per token and KV head", "bf16's tokens", fits], lines)


def engine_latents() -> str:
    """What pages of latents take in vLLM in every preset: a token, and a request of DeepSeek-V3."""
    latent, rope, layers, request = 512, 64, 61, 131072
    plain = 2 * (latent + rope)
    sizes = {"bf16": plain}
    for preset in tq.LATENT_PRESETS:
        config = tq.latent_preset(preset, latent, rope)
        sizes[preset] = pages.bytes_per_token(config, ENGINE_PAGE, torch.bfloat16)
    lines = [
        [name, str(size), f"{plain / size:.2f}x", f"{size * layers * request / 1e9:.1f} GB"]
        for name, size in sizes.items()
    ]
    head = ["cache", "bytes per token and layer", "bf16's tokens", "131,072 tokens of 61 layers"]
    return markdown(head, lines)


def engine_cell(row: Row | None, base: Row | None) -> str:
    """Milliseconds of a step, tokens a second, and how many times bf16's."""
    if row is None:
        return ""
    step = f"{row['step_ms']:.2f} ms, " if "step_ms" in row else ""
    times = f" ({row['tokens_s'] / base['tokens_s']:.2f}x)" if base and base is not row else ""
    return f"{step}{row['tokens_s']:,.0f}/s{times}"


def engine_speed() -> str:
    """Whole engines on the GPU, a table for each version of vLLM that was measured."""
    if not (RESULTS / "h200_vllm.json").exists():
        return paragraph(
            "Whole engines have not been measured at this version: `python "
            "benchmarks/bench_vllm.py` does. The kernels have ([beside vLLM's "
            "own](measurements/performance_vllm.md))."
        )
    rows = h200_rows("h200_vllm")
    shape = {
        "8b": "",
        "70b-cut": ", 16 layers of Llama-3.1-70B's shape",
        "v2-lite-dense": ", DeepSeek-V2-Lite's shape with dense layers in place of experts",
    }
    tables = []
    for version, model, gpus in sorted(
        dict.fromkeys(map(engine_kind, rows)), key=lambda kind: kind[2]
    ):
        own = [row for row in rows if engine_kind(row) == (version, model, gpus)]
        title = f"vLLM {version}{shape[model]}{f', {gpus} GPUs' if gpus > 1 else ''}"
        found = {(row["point"], row["config"]): row for row in own}
        configs = sorted({row["config"] for row in own}, key=engine_order)
        memory = [found.get(("memory", config)) for config in configs]
        lines = [["tokens that fit", *(f"{r['cache_tokens']:,}" if r else "" for r in memory)]]
        points = {row["point"] for row in own if "tokens_s" in row and "clients" not in row}
        for point in sorted(points, key=engine_point_order):
            base = found.get((point, "bf16"))
            cells = (engine_cell(found.get((point, config)), base) for config in configs)
            lines.append([engine_point(point), *cells])
        tables.append(f"{title}:\n\n{markdown(['', *configs], lines)}")
    return "\n\n".join(tables)


def engine_clients() -> str:
    """Engines whose clients ask again as soon as they are answered."""
    rows = [row for row in h200_rows("h200_vllm") if "clients" in row]
    lines = [
        [
            f"{row['clients']} conversations of {row['context']:,} tokens",
            row["config"],
            f"{row['requests_s']:.1f}",
            f"{row['tokens_s']:,.0f}",
            f"{row['first_token_s_median']:.2f} s, {row['first_token_s_p99']:.2f} s",
            f"{row['token_ms_median']:.0f} ms, {row['token_ms_p99']:.0f} ms",
        ]
        for row in sorted(rows, key=lambda row: (row["point"], engine_order(row["config"])))
    ]
    head = ["clients", "cache", "requests/s", "tokens/s", "first token", "time of a token"]
    return markdown(head, lines)


def sglang_speed() -> str:
    """SGLang's engine with several caches, against FlashAttention 3 in bf16."""
    if not (RESULTS / "h200_sglang.json").exists():
        return "Steps have not been measured yet."
    rows = [
        row
        for row in h200_rows("h200_sglang")
        if "clients" not in row and row.get("tensor_parallel", 1) == 1
    ]
    titles = {"fa3": "bf16, FA3", "fa3:fp8": "fp8, FA3", "triton": "bf16, Triton"}
    found = {(row["point"], row["config"]): row for row in rows}
    plain = "fa3" if ("memory", "fa3") in found else "triton"
    ours = [preset for preset in tq.PRESETS if ("memory", preset) in found]
    configs = [config for config in (*titles, *ours) if ("memory", config) in found]
    whole = found["memory", plain]["cache_tokens"]
    cells = []
    for config in configs:
        tokens = found["memory", config]["cache_tokens"]
        cells.append(f"{tokens:,}" + (f" ({tokens / whole:.2f}x)" if config != plain else ""))
    lines = [["tokens that fit", *cells]]
    points = dict.fromkeys(row["point"] for row in rows if "tokens_s" in row)
    for point in sorted(points, key=sglang_point_order):
        base = found.get((point, plain))
        cells = (sglang_cell(found.get((point, config)), base) for config in configs)
        lines.append([sglang_point(point), *cells])
    table = markdown(["", *(titles.get(config, config) for config in configs)], lines)
    origin = source("h200_sglang", rows, "../")
    return f"{table}\n\n{origin}"


def sglang_point_order(point: str) -> tuple[int, int, int]:
    """Decode steps, prompts, prefix hits; fewer sequences before more, few tokens before many."""
    kind, number = re.match(r"(\d+x|prompt|hit)(\d+)", point).groups()
    sequences = int(kind[:-1]) if kind.endswith("x") else 0
    return ("prompt", "hit").index(kind) + 1 if sequences == 0 else 0, sequences, int(number)


def sglang_point(point: str) -> str:
    """A point of bench_sglang in words."""
    kind, number, new = re.fullmatch(r"(\d+x|prompt|hit)(\d+)(?::(\d+))?", point).groups()
    context = f"{int(number):,}"
    words = {"prompt": f"prompt of {context}", "hit": f"{new} tokens behind a prefix of {context}"}
    return words.get(kind) or f"{kind[:-1]} x {context}"


def sglang_cell(row: Row | None, base: Row | None) -> str:
    """Milliseconds of a step or to the first token, and how many times as fast as the base."""
    if row is None:
        return ""
    ms = row["step_ms"] if "step_ms" in row else 1e3 * row["prompt_s"]
    times = f" ({row['tokens_s'] / base['tokens_s']:.2f}x)" if base and base is not row else ""
    return f"{ms:.2f} ms{times}" if ms < 100 else f"{ms:.0f} ms{times}"


def engine_kind(row: Row) -> tuple[str, str, int]:
    """The rows of a table."""
    return row["vllm"], row["shape"], row["tensor_parallel"]


def engine_point_order(point: str) -> tuple[int, int, int, int]:
    """Decode steps, full memories, prompts, drafts; few tokens, then few sequences first."""
    drafts, _, rest = point.rpartition(":")
    kind, number = re.match(r"(\d+x|full|prompt)(\d+)", rest).groups()
    place = {"full": 1, "prompt": 2}.get(kind, 3 if drafts else 0)
    count = int(kind.removesuffix("x")) if kind.endswith("x") else 1
    return place, int(drafts.removeprefix("verify") or 0), count * int(number), count


def engine_order(config: str) -> tuple[int, str]:
    """bf16, fp8, ours, vLLM's own."""
    first = {"bf16": 0, "fp8": 1}
    return first.get(config, 3 if config.startswith("turboquant_") else 2), config


def engine_point(point: str) -> str:
    """A point of bench_vllm in words."""
    drafts, _, rest = point.rpartition(":")
    kind, number = re.match(r"(\d+x|full|prompt)(\d+)", rest).groups()
    context = f"{int(number):,}"
    text = {"full": f"as many as fit x {context}", "prompt": f"prompt of {context}"}.get(kind)
    text = text or f"{kind.removesuffix('x')} x {context}"
    return f"{text}, {drafts.removeprefix('verify')} drafts" if drafts else text


def engine_quality() -> str:
    """Predictions through vLLM's engine, for the models that were measured."""
    found = {
        title: read_rows(name)
        for title, model in quality_tables.MODELS.items()
        if (RESULTS / f"{(name := file_name('vllm_quality', model))}.json").exists()
    }
    if not found:
        return paragraph(
            "Predictions through vLLM's engine have not been measured at this version: `python "
            "benchmarks/bench_vllm_quality.py` does."
        )
    names = dict.fromkeys(
        (row["cache"], row["chunk"]) for rows in found.values() for row in rows if "kl" in row
    )
    lines = []
    for cache, chunk in sorted(names, key=engine_quality_order):
        of_cache = (
            next((r for r in rows if (r["cache"], r["chunk"]) == (cache, chunk)), None)
            for rows in found.values()
        )
        lines.append([cache, str(chunk), *map(engine_difference, of_cache)])
    texts = []
    for title, rows in found.items():
        bases = [row for row in rows if row["cache"] == "uncompressed"]
        counts = [
            f"{row['segments'] * row['score_tokens']:,} in chunks of {row['chunk']}"
            for row in sorted(bases, key=lambda row: -row["chunk"])
        ]
        texts.append(f"{title}: {' and '.join(counts)}, in {bases[0]['dtype']}")
    note = f"Tokens predicted, and the dtype of the model: {'; '.join(texts)}."
    return f"{markdown(['cache', 'chunk', *found], lines)}\n\n{paragraph(note)}"


def engine_quality_order(name: tuple[str, int]) -> tuple[Any, ...]:
    """Large chunks before small ones; with exact first tokens before those from codes."""
    cache, chunk = name
    preset, *variants = cache.split(":")
    presets = list(tq.PRESETS)
    place = presets.index(preset) if preset in presets else len(presets)
    return -chunk, preset not in presets, "codes" in variants, variants, place


def engine_difference(row: Row | None) -> str:
    """A cell: KL, top-1 agreement and change of perplexity."""
    if row is None:
        return ""
    digits = 4 if row["kl"] < 1 else 2
    kl = f"{row['kl']:.{digits}f} ± {half(row['kl_interval']):.{digits}f}"
    factor = 1 + row["perplexity_change"]
    change = f"{factor:,.0f}x" if factor > 10 else f"{row['perplexity_change']:+.2%}"
    return f"{kl}, {row['top1_agreement']:.1%}, {change}"


def first_token(row: Row | None) -> str:
    """As the first prompt of a process and, where it was measured, as a later one."""
    names = ("ttft_ms", "ttft_kept_ms") if row and "ttft_kept_ms" in row else ("ttft_ms",)
    return " / ".join(milliseconds(row, name) for name in names)


def prompts_table() -> str:
    """Milliseconds to the first token."""
    kinds = ("dynamic", "k4v4", "k5v4u")
    lines = [
        [name_of(shape), *(first_token(some.get((k, "eager"))) for k in kinds)]
        for shape, some in generated("prompt").items()
    ]
    return markdown(["batch x context", "`DynamicCache`", *kinds[1:]], lines)


CODEC = {
    "`hadamard` d = 64 / 128 / 256": [f"hadamard d={d} bf16" for d in (64, 128, 256)],
    "`pack` 3 / 4 / 8 bit": [f"pack {bits} bit" for bits in (3, 4, 8)],
    "`unpack` 3 / 4 / 8 bit": [f"unpack {bits} bit" for bits in (3, 4, 8)],
    "`encode` 4 bit, 1 / 8 candidates": ["encode 4 bit S=1", "encode 4 bit S=8"],
    "`decode` 4 / 3 bit": ["decode 4 bit", "decode 3 bit"],
    "PyTorch, 1 byte to 4": ["expand 1:4"],
    "`qjl_sketch` structured": ["qjl_sketch structured"],
    "`score` 4 bit / with a sketch / `qjl_score`, 131,072 keys, of a sum's speed": [
        "score 4 bit 131072 keys",
        "score 4 bit + sketch 131072 keys",
        "qjl_score 131072 keys",
    ],
    "`cache_store` k4v4, 1 / 8 candidates": ["cache_store k4v4 S=1", "cache_store k4v4 S=8"],
    "`cache_store` k3v3, 1 / 8": ["cache_store k3v3 S=1", "cache_store k3v3 S=8"],
    "`cache_store` k5v4u, 1 / 8": ["cache_store k5v4u S=1", "cache_store k5v4u S=8"],
    "`cache_load` k4v4 / k3v3": ["cache_load k4v4", "cache_load k3v3"],
}


def codec_table() -> str:
    found = {row["row"]: row for row in h200_rows("h200_codec")}
    lines = []
    for label, names in CODEC.items():
        some = [found[name] for name in names]
        lines.append(
            [
                label,
                " / ".join(f"{1000 * row['ms']:.0f}" for row in some),
                " / ".join(f"{row['of']:.2f}" for row in some),
            ]
        )
    return markdown(["op", "us", "of a copy's speed"], lines)


def quality_rows(name: str = QUALITY) -> dict[str, Row]:
    """Rows of the shortest segments, computed in float32: cache -> row."""
    wanted = {"dtype": "float32", "context": quality_tables.SHORT}
    return {row["cache"]: row for row in read_rows(name) if wanted.items() <= row.items()}


def paragraph(text: str) -> str:
    """Text in lines of at most 110 characters, code unbroken."""
    text = re.sub(r"`[^`]*`", lambda m: m[0].replace(" ", "\0"), text)
    width = {"width": 110, "break_long_words": False, "break_on_hyphens": False}
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, subsequent_indent=indent, **width).replace("\0", " ")


def half(interval: list[float]) -> float:
    return (interval[1] - interval[0]) / 2


def headline() -> str:
    """The README's first numbers: memory, speed and quality of the default preset."""
    preset = tq.NAMED_PRESETS["near-lossless"][0]
    quality, step = quality_rows()[preset], decode_rows()[LARGE][preset]
    fp8 = quality_rows()["fp8"]
    plain, ours = (token_row(kind, "graph")["tpot_ms"] for kind in ("unmasked", preset))
    items = [
        f"**Memory: a cache {16 / quality['bits_per_value_8k']:.1f} times smaller**, "
        f"{quality['bits_per_value_8k']:.1f} bits per element instead of 16, scales and exact "
        "tokens included.",
        f"**Speed: attention {step['speedup_vs_bf16']:.1f} times as fast** as the fastest of five "
        f"bf16 kernels, for a decode step of {LARGE[0]} sequences of {LARGE[1]:,} tokens on an "
        f"H200; **tokens {plain / ours:.1f} times as fast**: a Llama-3.1-8B-shaped model generates "
        f"one for {GENERATED[0]} sequences of {GENERATED[1]:,} tokens in {ours:.1f} ms instead of "
        f"{plain:.1f} ms.",
        "**Quality: the same most likely next token as with an uncompressed cache in "
        f"{top1(quality)} of all positions** (SmolLM2-135M; fp8: {top1(fp8)}).",
    ]
    lines = [paragraph(f"- {item}") for item in items]
    return "\n".join([*lines, "", "(from [result files](#size-speed-quality) of this repository)"])


def top1(row: Row) -> str:
    """Agreement of the most likely next token, with half of its interval."""
    return f"{100 * row['top1_agreement']:.1f}% ± {100 * half(row['top1_agreement_interval']):.1f}"


def overview() -> str:
    """The README's table: size, speed and quality of presets, bf16, fp8 and other ways."""
    quality = quality_rows()
    speed = decode_rows()[LARGE]
    any_row = next(iter(speed.values()))
    fa3 = vllm_rows("attention", {"batch": LARGE[0], "context": LARGE[1]})["fa3 fp8"]
    lines = []
    for cache in ("none", "fp8", "k8v8", "k5v4u", "k4v4u", "k4v4", "k4v2", *OTHERS):
        row = quality[cache]
        label = {"none": "bf16 (quality: float32)"}.get(cache, OTHERS.get(cache, cache))
        cells = [
            f"**{label}**" if row["kind"] == "packed" else label,
            f"{row['bytes_per_token_8k']:,.0f}",
            f"{16 / row['bits_per_value_8k']:.2f}x",
        ]
        bf16 = any_row["best_bf16_ms"]
        if cache == "none":
            cells += [microseconds(bf16), "", f"{row['perplexity']:.2f}", "", ""]
            lines.append(cells)
            continue
        ms = speed.get(cache, {}).get("ours_ms")
        if cache == "fp8":
            ms = min(any_row["fp8_ms"], fa3["ms"])
        cells += [microseconds(ms), f"{bf16 / ms:.1f}x"] if ms else ["", ""]
        change, around = row["perplexity_change"], half(row["perplexity_change_interval"])
        cells += [
            f"{100 * change:+.2f}% ± {100 * around:.2f}",
            f"{row['kl']:.4f} ± {half(row['kl_interval']):.4f}",
            top1(row),
        ]
        lines.append(cells)
    header = "cache,bytes per token,smaller,attention on an H200,faster,perplexity,KL,same top-1"
    untailed = quality["k4v4:sink_tokens=0,recent_window=0"]
    items = [
        f"{link(QUALITY, 'Size and quality')}: SmolLM2-135M, 2,048 tokens of Wikipedia, ± 95% "
        "intervals; sizes at 8,192 tokens. Among the baselines only KIVI keeps recent tokens "
        "exact, which explains most of its lead over the others; k4v4 without exact tokens has a "
        f"KL of {untailed['kl']:.4f} ([more](docs/quality.md)).",
        f"{link('h200_attention', 'Speed')}: attention of a decode step, {name_of(LARGE)} tokens, "
        "center and exact tail included, against the fastest of five bf16 kernels and the faster "
        "of FlashInfer's and FlashAttention 3's fp8 ([more](docs/performance.md)). Empty cells "
        "were not measured.",
    ]
    notes = "\n".join(paragraph(f"- {item}") for item in items)
    return f"{markdown(header.split(','), lines)}\n\n{notes}"


LATENT_CHANNELS = "none", "mean", "norm", "mean norm", "learned"


def latent_quality() -> str:
    """Divergence of every preset for latents, by what was done to their channels."""
    rows = read_rows("mla_quality")
    found = {(r["latents"], r["cache"], r["transform"], r["channels"]): r for r in rows}
    sets = list(dict.fromkeys(row["latents"] for row in rows))
    lines = []
    for cache, transform in dict.fromkeys((r["cache"], r["transform"]) for r in rows):
        if cache == "uncompressed":
            continue
        cells = [f"`{cache}`", "yes" if transform else "no"]
        for latents in sets:
            kl = [found[latents, cache, transform, name]["kl"] for name in LATENT_CHANNELS]
            cells += [f"{x:.5f}" for x in kl]
        lines.append(cells)
    header = ["preset", "transform"] + [f"{s}: {name}" for s in sets for name in LATENT_CHANNELS]
    origin = source("mla_quality", rows, "../")
    return f"{markdown(header, lines)}\n\n{origin}"


LATENT_PRESETS = "k4u", "k5u", "k8"


def latent_speed() -> str:
    """Times of decode steps over packed latents, a row for each batch and number of heads."""
    rows = h200_rows("h200_mla")
    found: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        key = row["batch"], row["context"], row["heads"], row["q_len"], row["tail"]
        found.setdefault(key, {})[str(row["preset"])] = row
    lines = []
    for (batch, context, heads, q_len, tail), presets in found.items():
        note = f", {q_len} queries" if q_len > 1 else ", exact tail" if tail else ""
        best = presets["k4u"]
        cells = [f"{batch} x {context:,}{note}", str(heads)]
        for name in LATENT_PRESETS:
            row = presets.get(name)
            cells.append(f"{1000 * row['ms']:.0f} ({row['speedup']:.2f}x)" if row else "")
        name = {"flashinfer": "FlashInfer", "flashmla": "FlashMLA"}[best["best_bf16"]]
        lines.append([*cells, f"{1000 * best['best_bf16_ms']:.0f}, {name}"])
    header = ["batch x context", "heads", *(f"`{name}`" for name in LATENT_PRESETS), "best bf16"]
    origin = source("h200_mla", rows, "../../")
    return f"{markdown(header, lines)}\n\n{origin}"


LATENT_CACHES = {"dynamic": "transformers' `DynamicCache`", "uncompressed": "`uncompressed`"}


def latent_steps() -> str:
    """Steps of a model by cache: whole, and the part that grows with the context."""
    rows = h200_rows("h200_latent_steps")
    found = {(row["way"], row["mode"]): row for row in rows}
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        size = found[way, "eager"]["bytes_per_layer"] / 1e6
        cells = [LATENT_CACHES.get(way, f"`{way}`"), f"{size:.0f} MB"]
        for mode in ("eager", "graph"):
            row = found.get((way, mode))
            cells += [f"{row['ms']:.1f} ms ({row['faster']:.1f}x)" if row else ""]
            cells += [f"{row['attention_ms']:.2f} ms" if row else ""]
        lines.append(cells)
    header = ["cache", "bytes a layer", "step, eager", "of it for the context"]
    header += ["step, CUDA graph", "of it for the context"]
    origin = source("h200_latent_steps", rows, "../")
    return f"{markdown(header, lines)}\n\n{origin}"


LINEAR_MATRICES = {
    "layer": "all of a layer",
    "qkv": "qkv, 6144 x 4096",
    "o": "o, 4096 x 4096",
    "gate_up": "gate and up, 28672 x 4096",
    "down": "down, 4096 x 14336",
    "8192": "8192 x 8192",
    "lm_head": "lm_head, 128256 x 4096",
}


def linear_speed() -> str:
    """Times of linear layers with packed weights, a row for each matrix, format and batch."""
    rows = h200_rows("h200_linear")
    lines = [
        [
            LINEAR_MATRICES[str(row["matrix"])],
            f"`{row['format']}`",
            f"{row['tokens']:,}",
            f"{row['us']:.1f}",
            f"{row['of_read']:.0%}",
            f"{row['other_us']['bf16']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['error']:.4f} ({row['w4a16_error']:.4f})",
        ]
        for row in rows
    ]
    header = ["matrices", "format", "tokens", "us", "of read", "bf16, us", "speed-up", "error"]
    origin = source("h200_linear", rows, "../../")
    return f"{markdown(header, lines)}\n\n{origin}"


MODES = {"graph": "CUDA graph", "eager": "eager"}


def packed_model_speed() -> str:
    """Times and memory of a model as it is, with packed weights, a packed cache, and both."""
    rows = h200_rows("h200_weights")
    found = {
        (r["part"], r["mode"], r["batch"], r["context"], r["kind"], r.get("weights", 0)): r
        for r in rows
    }
    lines = []
    for part, mode, batch, context in dict.fromkeys(key[:4] for key in found):
        kinds = ("unmasked" if mode == "graph" else "dynamic", "k5v4u")
        some = [
            found.get((part, mode, batch, context, kind, weights))
            for weights in (0, 4)
            for kind in kinds
        ]
        if not any(some[2:]):  # without packed weights only
            continue
        times = [row and row["ttft_ms" if part == "prompt" else "tpot_ms"] for row in some]
        what = "first token" if part == "prompt" else f"step, {MODES[mode]}"
        lines.append(
            [f"{what}, {batch} x {context:,}"]
            + [
                f"{ms:.2f} ms, {row['peak_bytes'] / 2**30:.1f} GiB" if row else ""
                for row, ms in zip(some, times, strict=True)
            ]
            + [f"{times[0] / ms:.2f}x" if ms else "" for ms in times[2:]]
        )
    header = ["", "bfloat16", "its cache `k5v4u`", "weights of 4 bits", "both"]
    header += ["weights: faster", "both: faster"]
    origin = source("h200_weights", rows, "../")
    return f"{markdown(header, lines)}\n\n{origin}"


def cpu_model_speed() -> str:
    """Times of a model on the CPU, a row for each form of its weights."""
    rows = read_rows("cpu_model")
    rows = [row for row in rows if row["device"] == rows[0]["device"]]
    found = {(row["weights"], row["prompt"]): row for row in rows}
    prompts = list(dict.fromkeys(row["prompt"] for row in rows))
    lines = []
    for weights in dict.fromkeys(row["weights"] for row in rows):
        some = [found[weights, prompt] for prompt in prompts]
        plain = [found["bfloat16", prompt] for prompt in prompts]
        step, plain_step = some[0]["tpot_ms"], plain[0]["tpot_ms"]
        lines.append(
            [
                f"`{weights}`",
                f"{some[0]['weights_bytes'] / 2**30:.2f} GiB",
                f"{1e3 / step:.1f}",
                f"{plain_step / step:.2f}x",
            ]
        )
        for row, other in zip(some, plain, strict=True):
            lines[-1].append(f"{row['ttft_ms']:.0f} ms ({other['ttft_ms'] / row['ttft_ms']:.2f}x)")
    header = ["weights", "bytes", "tokens/s", "of bfloat16"]
    header += [f"first token after {prompt}" for prompt in prompts]
    threads = f"{rows[0]['device']}, {rows[0]['threads']} threads"
    origin = source("cpu_model", rows, "../")
    return f"{markdown(header, lines)}\n\n{threads}; {origin}"


EVICTION_MODELS = ("Qwen2.5-Coder-1.5B-Instruct", "Gemma-3-270M")


def eviction_quality() -> str:
    """Divergence and right answers of every cache, policy and share, by model."""
    files = [file_name("eviction", model) for model in EVICTION_MODELS]
    rows = [
        {(r["cache"], r["keep"], r["policy"]): r for r in read_rows(name) if r["cache"] != "none"}
        for name in files
    ]
    header = ["cache", "keep", "evict"]
    for model in EVICTION_MODELS:
        header += [f"{model}: bytes", "KL", "seen", "unseen"]
    lines = []
    for cache, keep, policy in rows[0]:
        cells = [f"`{cache}`", f"{keep:g}", "" if policy == "-" else f"`{policy}`"]
        whole = [found["k8v8", 1, "-"]["bytes"] for found in rows]
        for found, size in zip(rows, whole, strict=True):
            row = found[cache, keep, policy]
            kl = f"{row['kl']:.4f} ± {row['kl_error']:.4f}"
            answers = [f"{100 * row[name]:.0f}%" for name in ("seen", "unseen")]
            cells += [f"{row['bytes'] / size:.2f}", kl, *answers]
        lines.append(cells)
    origins = [source(name, found.values(), "../") for name, found in zip(files, rows, strict=True)]
    return "\n\n".join([markdown(header, lines), "\\\n".join(origins)])


def eviction_speed() -> str:
    """Bytes and times by share and policy."""
    if not (RESULTS / "h200_eviction.json").exists():
        return "Times have not been measured yet."
    rows = h200_rows("h200_eviction")
    whole = next(row for row in rows if row["keep"] == 1)
    lines = []
    for row in rows:
        cells = [f"{row['keep']:g}", "" if row["policy"] == "-" else f"`{row['policy']}`"]
        cells += [f"{row['bytes'] / 1e9:.2f} GB", f"{row['smaller_than_bf16']:.1f}x"]
        faster = whole["attention_ms"] / row["attention_ms"]
        cells += [f"{1000 * row['attention_ms']:.0f} us ({faster:.2f}x)"]
        cells += [f"{row['step_ms']:.2f} ms" if "step_ms" in row else ""]
        cells += [f"{row['prompt_ms']:.0f} ms", f"{row['peak_bytes'] / 1e9:.1f} GB"]
        lines.append(cells)
    header = ["keep", "evict", "pages", "all against bf16", "attention of a layer", "step"]
    header += ["prompt", "most memory of the prompt"]
    origin = source("h200_eviction", rows, "../")
    return f"{markdown(header, lines)}\n\n{origin}"


def hitters_cost() -> str:
    """What eviction while decoding adds to decode steps."""
    if not (RESULTS / "h200_heavy_hitters.json").exists():
        return "Times have not been measured yet."
    rows, lines = h200_rows("h200_heavy_hitters"), []
    for row in rows:
        parts = row["parts_ms"]
        cells = [f"{row['sequences']} x {row['budget']:,}", str(row["interval"])]
        cells += [str(row["window"]), f"{row['step_ms']:.2f} ms", f"{row['eviction_ms']:.0f} ms"]
        cells += [f"{100 * row['share']:.1f}%"]
        cells += [f"{parts[name]:.0f} ms" for name in ("mass", "choice", "compact")]
        lines.append(cells)
    header = ["sequences x budget", "interval", "window", "step", "an eviction", "share"]
    header += ["mass", "choice", "compaction"]
    origin = source("h200_heavy_hitters", rows, "../")
    return f"{markdown(header, lines)}\n\n{origin}"


STRATEGIES = "strategies_smollm2_135m_instruct"


def strategies_rows() -> str:
    """One line for each strategy: bits, size, divergence, answers, time."""
    if not (RESULTS / f"{STRATEGIES}.json").exists():
        return "Strategies have not been measured yet."
    rows, lines = read_rows(STRATEGIES), []
    whole, base = rows[0]["bytes_8k"], rows[0]["step"]["ms"]
    for row in rows:
        smaller = whole / row["bytes_8k"]
        cells = [f"`{row['cache']}`", f"{16 / smaller:.2f}", f"{smaller:.2f}x"]
        cells.append(f"{int((80e9 - 2 * row['parameters']) // row['bytes_8k']):,}")
        cells += [f"{row['kl']:.4f} ± {half(row['kl_interval']):.4f}" if "kl" in row else ""]
        cells += [f"{100 * row['top1_agreement']:.1f}%" if "kl" in row else ""]
        cells += [f"{100 * row['synthetic'][name]:.0f}%" for name in ("seen", "unseen")]
        ms = row["step"]["ms"]
        cells.append("" if ms is None else f"{ms:.2f} ms ({base / ms:.2f}x)")
        lines.append(cells)
    header = ["cache", "bits", "smaller", "requests in 80 GB", "KL", "top-1", "1st question", "2nd"]
    origin = source(STRATEGIES, rows, "../")
    return f"{markdown([*header, 'step'], lines)}\n\n{origin}"


def strategies_drawn(path: Path) -> None:
    """Divergence over bits, with and without eviction."""
    from torch_turboquant.eval import report  # needs the packages of an extra

    report.strategies_picture(path, read_rows(STRATEGIES))


GENERATED = 16, 32768


def token_row(kind: str, mode: str) -> Row:
    """A whole model's decode step at GENERATED."""
    return generated("decode")[GENERATED][kind, mode]


def generation() -> str:
    """The README's sentences on whole models, and on vLLM's TurboQuant."""
    preset = tq.NAMED_PRESETS["near-lossless"][0]
    rows = {
        name: token_row(*column)
        for name, column in {
            "dynamic": ("dynamic", "eager"),
            "eager": (preset, "eager"),
            "bf16": ("unmasked", "graph"),
            "graph": (preset, "graph"),
        }.items()
    }
    ms = {name: f"{row['tpot_ms']:.1f} ms" for name, row in rows.items()}
    model = paragraph(
        "A Llama-3.1-8B-shaped model with random weights generates a token for "
        f"{GENERATED[0]} sequences of {GENERATED[1]:,} tokens, in CUDA graphs, in {ms['graph']} "
        f"with {preset} and {ms['bf16']} with the fastest bf16 kernel; without graphs in "
        f"{ms['eager']} and {ms['dynamic']} (`DynamicCache` with its fastest kernel). "
        f"({source('h200_generate', rows.values())})"
    )
    engine = engine_sentence(preset)
    large = vllm_rows("attention", {"batch": LARGE[0], "context": LARGE[1]})
    long = vllm_rows("attention", {"batch": 1, "context": 131072})
    store = vllm_rows("store", {"tokens": 65536})
    theirs = VLLM_PRESETS["k4v4"]

    def pair(found: dict[str, Row]) -> str:
        a, b = found[theirs]["ms"], found["k4v4"]["ms"]
        return f"{microseconds(a)} instead of {microseconds(b)} ({a / b:.0f}x)"

    vllm = paragraph(
        f"vLLM's own TurboQuant, Triton kernels of vLLM {large[theirs]['vllm']}, takes for a "
        f"decode step's attention over {name_of(LARGE)} tokens {pair(large)}, over 1 x 131,072 "
        f"{pair(long)}, and to store 65,536 tokens {pair(store)}, with 4-bit keys and values "
        f"([more](docs/measurements/performance_vllm.md); "
        f"{source('h200_vllm_kernels', large.values())})."
    )
    return f"{model}\n\n{engine}\n\n{vllm}"


def engine_sentence(preset: str) -> str:
    """The README's sentence on vLLM's engine."""
    rows = [row for row in h200_rows("h200_vllm") if engine_kind(row)[1:] == ("8b", 1)]
    found = {(row["point"], row["config"]): row for row in rows}

    def times(point: str) -> str:
        ours, bf16 = found[point, preset], found[point, "bf16"]
        return f"{ours['tokens_s'] / bf16['tokens_s']:.1f} times"

    return paragraph(
        f"Inside vLLM {rows[0]['vllm']}, with the same memory for every cache, that model "
        f"generates {times('16x32768')} as many tokens per second with {preset} as with bf16 for "
        f"16 sequences of 32,768 tokens, and {times('full8192')} as many with as many sequences "
        f"of 8,192 tokens as fit ([more](docs/vllm.md#speed); "
        f"{link('h200_vllm', 'h200_vllm.json')}: `python benchmarks/bench_vllm.py`)."
    )


def cpu() -> str:
    """The README's sentences on two cores."""
    row = cpu_attention_rows()[DEFAULT, 32768, 1]
    bf16 = row["ms"] * row["speedup_vs_bf16"]
    speed = {row["preset"]: row for row in demo_rows("speed")}
    plain, ours = speed["uncompressed"], speed[DEFAULT]
    return paragraph(
        f"On two CPU cores attention over 32,768 tokens takes {row['ms']:.1f} ms with {DEFAULT} "
        f"and {bf16:.1f} ms with the fastest bf16 way in PyTorch ({link('cpu', 'cpu.json')}). "
        f"SmolLM2-135M generates {ours['tokens_per_second']:.0f} tokens per second behind "
        f"{ours['context']:,} with {DEFAULT} and {plain['tokens_per_second']:.0f} with "
        f"`DynamicCache`, in bfloat16 ({link('demo_cpu', 'demo_cpu.json')}: `make demo` measures "
        "the same)."
    )


def soak() -> str:
    """The soak runs: one column per device."""
    found = read_rows("soak")
    lines = [
        ["minutes", *(f"{row['minutes']:.0f}" for row in found)],
        ["preset, dtype", *(f"{row['preset']}, {row['dtype']}" for row in found)],
    ]
    counts = (
        "steps,arrive,grow,tokens attended,fork,cut,roll back,move,leave,exhausted,pages checked,"
        "attention checked"
    )
    for name in counts.split(","):
        lines.append([name, *(f"{row[name]:,}" for row in found)])
    lines.append(
        [
            "largest error of attention, of the largest value (limit)",
            *(f"{row['worst_error']:.1e} ({row['tolerance']:.0e})" for row in found),
        ]
    )
    for name, label in (
        ("process_mib", "memory of the process"),
        ("gpu_mib", "tensors on the GPU"),
    ):
        ends = (
            f"{row[name][0]:.1f} MiB after a tenth of the time, at most {max(row[name]):.1f}, "
            f"{row[name][-1]:.1f} at the end"
            if any(row[name])
            else ""
            for row in found
        )
        lines.append([label, *ends])
    return markdown(["", *(row["device"] for row in found)], lines)


def fuzz() -> str:
    """The random cases of one run of the tests, counted in their sources."""
    tests = ROOT / "tests"
    simd = (tests / "test_simd.py").read_text()
    calls = re.findall(r"^    (\w+_call): (\d+),$", simd, re.MULTILINE)
    bodies = dict(re.findall(r"^def (\w+_call)\((.*?)(?=^\S)", simd, re.MULTILINE | re.DOTALL))
    seeds = int(re.search(r"^SEEDS = (\d+)", (tests / "test_sanitizers.py").read_text(), re.M)[1])
    kernels = (tests / "native" / "kernels.cpp").read_text().split("CASES = {")[1].split("};")[0]
    names = re.findall(r'\{"(\w+)"', kernels)
    lines = []
    for call, count in calls:
        called = set(re.findall(r"\btt\.(\w+)\(", bodies[call]))
        ops = ", ".join(f"`{op}`" for op in op_names() if op in called)
        lines.append([ops, f"{int(count):,}"])
    return (
        markdown(["random calls, every level against plain C++", "each"], lines)
        + "\n\n"
        + paragraph(
            f"Under AddressSanitizer and UBSan: {len(names)} kernels ({', '.join(names)}), "
            f"{seeds:,} seeds each at every level: {len(names) * seeds * 3:,} runs on a processor "
            "with AVX-512."
        )
    )


DEFAULT = tq.NAMED_PRESETS["near-lossless"][0]


def preset_colors(presets: Iterable[str]) -> dict[str, Any]:
    """The default preset stands out; the others are shades, lighter the smaller they are."""
    from matplotlib import colormaps

    by_size = sorted(presets, key=lambda name: -tq.preset(name, 128).bytes_per_token)
    shades = {name: colormaps["Blues"](0.75 - 0.09 * i) for i, name in enumerate(by_size)}
    return {name: "tab:orange" if name == DEFAULT else shade for name, shade in shades.items()}


def grouped_bars(
    axes: Any,
    groups: list[str],
    series: dict[str, list[float | None]],
    colors: dict[str, Any],
    text: list[str],
) -> None:
    """Bars side by side in each group, None left out, with texts in those of the default."""
    width = 0.84 / len(series)
    for i, (name, values) in enumerate(series.items()):
        label = f"{name} (default)" if name == DEFAULT else name
        at = [g - 0.42 + (i + 0.5) * width for g, v in enumerate(values) if v is not None]
        heights = [v for v in values if v is not None]
        bars = axes.bar(at, heights, width, color=colors[name], label=label)
        if name == DEFAULT:
            style = {"fontsize": 9, "fontweight": "bold", "color": "white", "rotation": 90}
            axes.bar_label(bars, text, label_type="center", **style)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylim(0, 1.1 * max(v for values in series.values() for v in values if v is not None))
    axes.grid(True, axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def speed_picture(path: Path) -> None:
    """Speed-up of a decode step's attention: a group of bars per batch x context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = sorted(decode_rows().items(), key=lambda item: (item[0][0] * item[0][1], item[0]))
    colors = preset_colors(decode_rows()[LARGE])
    any_rows = [next(iter(row.values())) for _, row in found]
    series = {"fp8": [r["fp8_ms"] and r["best_bf16_ms"] / r["fp8_ms"] for r in any_rows]}
    for preset in colors:
        series[preset] = [
            row[preset]["speedup_vs_bf16"] if preset in row else None for _, row in found
        ]
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    text = [f"{value:.1f}x" for value in series[DEFAULT]]
    shapes = [name_of(shape) for shape, _ in found]
    grouped_bars(axes, shapes, series, {"fp8": "gray", **colors}, text)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xlabel("sequences x context")
    axes.set_ylabel("times as fast as the best bf16 kernel")
    axes.set_title("Attention of a decode step on an H200, 32 query heads, 8 KV heads of 128")
    axes.legend(ncols=2)
    figure.savefig(path, dpi=110, metadata={"Software": None, "Source": digest("h200_attention")})
    pyplot.close(figure)


CPU_SHAPES = ((8192, 1), (32768, 1), (65536, 1), (32768, 4))


def cpu_attention_rows() -> dict[tuple[str, int, int], Row]:
    """Attention at the best level of the CPU: (preset, context, batch) -> row."""
    found = [row for row in read_rows("cpu") if row["row"].startswith("attention k")]
    best = found[0]["levels"].split()[0]
    return {
        (row["row"].split()[1], row["context"], row["batch"]): row
        for row in found
        if row["level"] == best
    }


def demo_rows(part: str) -> list[Row]:
    """Rows of `make demo` on a CPU: "speed" or "quality", the uncompressed cache first."""
    found = [row for row in read_rows("demo_cpu") if row["part"] == part]
    return [row for row in found if row.get("weight_bits") is None]


def cpu_picture(path: Path) -> None:
    """The CPU: speed-up of attention, and tokens per second of a small model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = cpu_attention_rows()
    colors = preset_colors(["k8v8", DEFAULT, "k4v4"])
    series: dict[str, list[float | None]] = {
        preset: [rows[preset, context, batch]["speedup_vs_bf16"] for context, batch in CPU_SHAPES]
        for preset in colors
    }
    text = [f"{value:.1f}x" for value in series[DEFAULT]]
    speeds = demo_rows("speed")
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(9, 3.6), layout="constrained", width_ratios=(3, 2)
    )
    groups = [name_of((batch, context)) for context, batch in CPU_SHAPES]
    grouped_bars(left, groups, series, colors, text)
    left.axhline(1, color="black", linewidth=0.8)
    left.set_xlabel("sequences x context")
    left.set_ylabel("times as fast as the best bf16 way")
    left.set_title("Attention of a decode step, 32 query heads, 8 KV heads of 128", fontsize=9)
    left.legend(fontsize=8, ncols=3, loc="upper center")
    left.set_ylim(0, 1.3 * left.get_ylim()[1] / 1.1)
    plain = "Dynamic-\nCache"
    names = [plain if r["preset"] == "uncompressed" else r["preset"] for r in speeds]
    shades = {plain: "gray", **preset_colors(names[1:])}
    bars = right.bar(names, [r["tokens_per_second"] for r in speeds], 0.7)
    for bar, name in zip(bars, names, strict=True):
        bar.set_color(shades[name])
    right.bar_label(bars, fmt="%.0f", fontsize=9)
    right.set_ylim(0, 1.12 * max(r["tokens_per_second"] for r in speeds))
    right.set_ylabel("tokens per second, more is better")
    first = speeds[0]
    title = (
        f"{first['model'].removesuffix('-Instruct')}, {first['dtype']}, {first['context']:,} tokens"
    )
    right.set_title(title, fontsize=10)
    threads = {row["threads"] for row in (*rows.values(), *speeds)}
    figure.suptitle(f"{first['device']}, {' or '.join(map(str, sorted(threads)))} threads")
    source = f"{digest('cpu')} {digest('demo_cpu')}"
    figure.savefig(path, dpi=110, metadata={"Software": None, "Source": source})
    pyplot.close(figure)


THEORY_DIM = 128
THEORY_KINDS = {  # of rows of bench_distortion: grid, search, scale mode, sketch
    "as in the paper": ("lloyd", 1, "norm", None),
    "best of 8 steps, least squares": ("lloyd", 8, "mse", None),
    "best of 8 steps, unbiased": ("lloyd", 8, "unbiased", None),
    "evenly spaced, best of 8 steps": ("uniform", 8, "mse", None),
    "Gaussian sketch": ("lloyd", 1, "norm", "gaussian"),
    "Hadamard sketch": ("lloyd", 1, "norm", "hadamard"),
}


def theory_rows(kind: str) -> list[Row]:
    """The rows of one way of quantising at THEORY_DIM, by bits, of the last device."""
    keys = ("grid", "search", "scale_mode", "sketch")
    found = {
        row["bits"]: row
        for row in read_rows("distortion")
        if (row["head_dim"], *(row[key] for key in keys)) == (THEORY_DIM, *THEORY_KINDS[kind])
    }
    return [found[bits] for bits in sorted(found)]


def theory_table() -> str:
    """Errors in units of the lower bound 4^-bits, and the slope of estimated inner products."""
    body = []
    for kind in THEORY_KINDS:
        sketch = THEORY_KINDS[kind][3]
        error = "inner" if sketch else "measured"
        by_bits = {row["bits"]: row for row in theory_rows(kind)}
        some = [by_bits.get(bits) for bits in range(1, 6)]
        times = [f"{row[error] * 4 ** row['bits']:.2f}" if row else "" for row in some]
        ratios = [abs(row[error] / row["expected"] - 1) for row in some if row and row["expected"]]
        slopes = [f"{by_bits[bits]['slope']:.3f}" for bits in (2, 4)]
        body.append([kind, *times, f"{100 * max(ratios):.1f}%" if ratios else "", *slopes])
    bits = [f"{n} bits" if n > 1 else "1 bit" for n in range(1, 6)]
    return markdown(["", *bits, "off theory by", "slope, 2 bits", "4 bits"], body)


def theory_picture(path: Path) -> None:
    """Errors of vectors and of inner products in units of the lower bound, against bits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = dict(
        zip(THEORY_KINDS, pyplot.rcParams["axes.prop_cycle"].by_key()["color"], strict=False)
    )
    markers = dict(zip(THEORY_KINDS, "osv^DP", strict=True))
    paper, squares, unbiased, even, *sketches = THEORY_KINDS
    panels = (
        ("squared error of a vector", "measured", math.sqrt(3) * math.pi / 2),
        ("squared error of inner products", "inner", math.sqrt(3) * math.pi**2),
    )
    shown = (paper, squares, unbiased, even), (paper, unbiased, *sketches)
    figure, both = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for axes, (title, error, bound), kinds in zip(both, panels, shown, strict=True):
        axes.axhline(bound, color="black", linewidth=0.9, linestyle="--", label="paper's bound")
        for kind in kinds:
            points = [row for row in theory_rows(kind) if row["bits"] <= 5]
            x, scale = [row["bits"] for row in points], [4 ** row["bits"] for row in points]
            y = [row[error] * n for row, n in zip(points, scale, strict=True)]
            axes.plot(x, y, markers[kind], color=colors[kind], ms=5, label=kind)
            if all(row["expected"] for row in points):
                y = [row["expected"] * n for row, n in zip(points, scale, strict=True)]
                axes.plot(x, y, color=colors[kind], linewidth=0.9)
        axes.axhline(1, color="black", linewidth=0.9, linestyle=":", label="lower bound")
        axes.set_xticks(range(1, 6))
        axes.set_xlabel("bits per coordinate")
        axes.set_title(title, fontsize=10)
        axes.grid(True, axis="y", alpha=0.3)
        axes.legend(fontsize=7, ncols=2, loc="upper center", columnspacing=1, handletextpad=0.4)
    both[0].set_ylim(0.9, 3.5)
    both[0].set_ylabel("times the lower bound, 4^-bits")
    both[1].set_yscale("log")
    both[1].set_ylim(0.9, 60)
    both[1].set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    both[1].set_ylabel("times the lower bound, 4^-bits / 128")
    figure.supxlabel(
        "best of 8 steps: the encoder tries 8 sizes of the step between levels and keeps the best",
        fontsize=8,
    )
    figure.savefig(path, dpi=110, metadata={"Software": None, "Source": digest("distortion")})
    pyplot.close(figure)


def quality_picture(path: Path) -> None:
    """Presets and controls without changes, for which a picture has no room."""
    from torch_turboquant.eval import report  # needs the packages of an extra

    found = quality_rows(path.stem)
    report.picture(path, [row for cache, row in found.items() if ":" not in cache])


# ---- documents

PERFORMANCE = "docs/measurements/performance"
BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"headline": headline, "overview": overview, "generation": generation, "cpu": cpu},
    "docs/ops.md": {"ops": ops},
    "docs/design.md": {"kernels": kernels},
    "docs/reliability.md": {"soak": soak, "fuzz": fuzz},
    "docs/performance.md": {"attention": attention_table, "models": models_table},
    f"{PERFORMANCE}_attention.md": {
        "attention": attention_table,
        "variants": variants_table,
        "rows": query_rows_table,
        "mixed": mixed_table,
        "prompts": prompt_attention_table,
        "ragged": ragged_table,
        "cold": cold_table,
        "dims": dims_table,
    },
    "docs/latent.md": {"latent steps": latent_steps, "latent quality": latent_quality},
    "docs/eviction.md": {
        "eviction quality": eviction_quality,
        "eviction speed": eviction_speed,
    },
    "docs/vllm.md": {
        "engine presets": engine_presets,
        "engine latents": engine_latents,
        "engine quality": engine_quality,
        "engine speed": engine_speed,
        "engine clients": engine_clients,
    },
    "docs/sglang.md": {"sglang speed": sglang_speed},
    "docs/pool.md": {"heavy hitters": hitters_cost},
    "docs/workloads.md": {"strategies": strategies_rows},
    f"{PERFORMANCE}_mla.md": {"latent speed": latent_speed},
    f"{PERFORMANCE}_linear.md": {"linear speed": linear_speed},
    f"{PERFORMANCE}_vllm.md": {"vllm": vllm_table},
    f"{PERFORMANCE}_generation.md": {
        "eager": eager_table,
        "generation": generation_table,
        "prompts": prompts_table,
    },
    f"{PERFORMANCE}_codec.md": {"codec": codec_table},
    f"{PERFORMANCE}_cpu.md": {"cpu attention": cpu_attention_table},
    **{
        page: {name: quality_tables.TABLES[name] for name in names}
        for page, names in quality_tables.PAGES.items()
    },
    **{
        page: {name: weight_tables.TABLES[name] for name in names}
        for page, names in weight_tables.PAGES.items()
    },
}
BLOCKS["docs/measurements/quality_vectors.md"]["theory"] = theory_table
BLOCKS["docs/weights.md"] |= {
    "packed model": packed_model_speed,
    "packed model on a cpu": cpu_model_speed,
}
PICTURES: dict[str, Callable[[Path], None]] = {
    "docs/pictures/attention_h200.png": speed_picture,
    "docs/pictures/cpu.png": cpu_picture,
    "docs/pictures/distortion.png": theory_picture,
    weight_tables.PICTURE: weight_tables.picture,
    "docs/pictures/strategies.png": strategies_drawn,
    **{
        f"benchmarks/results/{file_name('quality', model)}.png": quality_picture
        for model in quality_tables.MODELS.values()
    },
}


def filled(document: str) -> tuple[str, str]:
    """The text of a document as it is, and with its blocks made anew."""
    old = new = (ROOT / document).read_text()
    for name, block in BLOCKS[document].items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        new, count = re.subn(
            pattern, lambda m, b=block: f"{m[1]}{b()}\n{m[2]}", new, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(f"{document} has {count} blocks <!-- {name} -->, expected one")
    return old, new


def outdated() -> Iterator[str]:
    """Documents whose blocks differ from the code and the results."""
    for document in BLOCKS:
        old, new = filled(document)
        if old != new:
            yield document


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        found = list(outdated())
        print("\n".join(f"{document}: run make docs" for document in found) or "all up to date")
        return bool(found)
    for document in BLOCKS:
        old, new = filled(document)
        (ROOT / document).write_text(new)
        print(f"{document}: {'as it was' if old == new else 'written'}")
    for picture, draw in PICTURES.items():
        draw(ROOT / picture)
        print(f"{picture}: drawn")
    here = {device_name(kind) for kind in ("cpu", "cuda") if kind == "cpu" or cuda_is_available()}
    for path in sorted(RESULTS.glob("*.json")):
        for device in sorted({row["device"] for row in read_rows(path.stem)} - here):
            print(
                f"{path.stem}: numbers of {device} come from the result file, not from this machine"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
