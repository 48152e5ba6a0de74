"""Whole models on a GPU: bench_generate."""

from __future__ import annotations

from common import Row, markdown

from generator.results import h200_rows
from generator.words import name_of


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
    found = generated("step")
    lines = []
    for shape in ((1, 1024), (1, 8192), (1, 32768), (16, 32768), (1, 131072), (8, 131072)):
        times = (milliseconds(found[shape].get(column), "tpot_ms") for column in columns.values())
        lines.append([name_of(shape), *times])
    return markdown(["batch x context", *(column.strip() for column in columns)], lines)


def eager_table() -> str:
    """A whole model without graphs: milliseconds per token."""
    lines = []
    for shape, some in generated("step").items():
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
    for shape, some in generated("step").items():
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


GENERATED = 16, 32768


def token_row(kind: str, mode: str) -> Row:
    """A whole model's decode step at GENERATED."""
    return generated("step")[GENERATED][kind, mode]
