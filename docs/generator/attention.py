"""Attention on a GPU: the tables of bench_attention, and the picture of its steps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common import Row, markdown, read_rows

from generator.pictures import DEFAULT, grouped_bars, preset_colors
from generator.results import digest, h200_rows
from generator.words import microseconds, name_of

DECODE = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 32, "q_len": 1, "tail": True}
LARGE = 64, 8192


def table_rows(table: str) -> list[Row]:
    """Rows of one of the tables of bench_attention on the GPU."""
    return [row for row in h200_rows("h200_attention") if row["table"] == table]


def decode_rows(**changes: Any) -> dict[tuple[int, int], dict[str, Row]]:
    """Attention of decode steps on the GPU: (batch, context) -> preset -> row."""
    wanted = {**DECODE, **changes}
    found: dict[tuple[int, int], dict[str, Row]] = {}
    for row in table_rows("steps"):
        if wanted.items() <= row.items():
            found.setdefault((row["batch"], row["context"]), {})[row["preset"]] = row
    return found


CONTENDERS = (
    *("cudnn", "cudnn folded", "flash", "flash folded", "flash varlen", "in parts"),
    *("flashinfer", "flashinfer fa3", "fa3"),
)
"""In bf16, as benchmarks/contenders.py names them."""


def timed(row: Row) -> list[str]:
    """The contenders in bf16 whose times a row has."""
    return [name for name in CONTENDERS if f"{name.replace(' ', '_')}_ms" in row]


def contenders_table() -> str:
    """Which contenders each table's rows have been measured beside."""

    def share(count: int, of: int) -> str:
        return "" if count == of else f" ({count} of {of})"

    lines = []
    for table in dict.fromkeys(row["table"] for row in h200_rows("h200_attention")):
        rows = table_rows(table)
        counts = Counter(name for row in rows for name in timed(row))
        names = [name + share(counts[name], len(rows)) for name in CONTENDERS if counts[name]]
        fp8 = sum(bool(row["fp8_ms"]) for row in rows)
        with_fp8 = "yes" + share(fp8, len(rows)) if fp8 else "no"
        lines.append([f"`{table}`", str(len(rows)), ", ".join(names), with_fp8])
    return markdown(["`--only`", "rows", "contenders in bf16", "fp8"], lines) if lines else ""


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
        "batch": prompt_name if table in ("prompts", "prefixes") else batch_name,
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
    count = f"{row['batch']} x " if row["batch"] > 1 else ""
    return f"{count}{row['q_len']:,} tokens" + (f" behind {older:,}" if older else "")


def mixed_table() -> str:
    def alone(row: Row) -> str:
        return " + ".join(map(microseconds, row["parts_ms"].values()))

    columns = {"its parts alone": alone, "of them": lambda row: f"{row['of_parts']:.2f}"}
    return long_table("mixed", **columns)


def prompt_attention_table() -> str:
    def speed(row: Row) -> str:
        return f"{row['tflop_s']:.0f}" if "tflop_s" in row else ""

    return long_table("prompts", **{"TFLOP/s": speed})


def prefixes_table() -> str:
    return long_table("prefixes")


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


def dims_prompts_table() -> str:
    def cells(row: Row) -> list[str]:
        return [str(row["head_dim"]), prompt_name(row)]

    return wide_table("dims_prompts", ["`head_dim`", "batch"], cells)


def dims_rows_table() -> str:
    def cells(row: Row) -> list[str]:
        return [str(row["head_dim"]), str(row["q_heads"] // row["kv_heads"] * row["q_len"])]

    return wide_table("dims_rows", ["`head_dim`", "rows"], cells)


DRAWN = {
    "steps": "decode steps",
    "drafts": "drafts of 2 to 9 tokens",
    "steps+drafts": "decode steps and drafts",
    "steps+chunks": "decode steps and chunks",
    "prefixes": "short prompts behind a prefix",
    "chunks": "chunks behind older tokens",
    "prompts": "prompts",
}
"""What sequences of a batch drawn at random are, by the name of drawn_batches.py."""


def drawn_table() -> str:
    """Batches drawn at random, by what they hold and the size of the cache in bf16: the median
    speed-up, and how many are at least as fast."""
    limits = {"20 to 60 MB": 60e6, "60 to 200 MB": 200e6, "more": float("inf")}
    found: dict[str, dict[str, list[float]]] = {}
    rows = [row for row in read_rows("h200_attention") if row["table"] == "drawn"]
    for row in rows:
        kind = re.search(r"drawn \d+ (\S+)", row["row"])[1]
        size = next(name for name, most in limits.items() if row["bf16_bytes"] <= most)
        found.setdefault(kind, {}).setdefault(size, []).append(row["speedup_vs_bf16"])

    def cell(ratios: list[float]) -> str:
        fast = sum(ratio >= 1 for ratio in ratios)
        return f"{median(ratios):.2f}x, {fast} of {len(ratios)}" if ratios else ""

    lines = [
        [name, *(cell(found[kind].get(size, [])) for size in limits)]
        for kind, name in DRAWN.items()
        if kind in found
    ]
    devices = " and ".join(sorted({row["device"].removeprefix("NVIDIA ") for row in rows}))
    return markdown([f"batch, on {devices}", *limits], lines) if lines else ""


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
