"""The tables of docs/quality.md, from the result files: what stands between their marks.

--check only says whether they are up to date; --pictures also draws the pictures of the page.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch_turboquant.config import NAMED_PRESETS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "quality.md"
MODELS = {
    "SmolLM2-135M": "smollm2_135m_instruct",
    "Qwen2.5-Coder-1.5B": "qwen2_5_coder_1_5b_instruct",
    "Gemma-3-270M": "gemma_3_270m",
}
SHORT = 2048  # tokens of a segment of the main table
PACKED = "packed"
Row = dict[str, Any]


def read(kind: str, file: str) -> list[Row]:
    """The rows of benchmarks/results/<kind>_<file>.json, nothing if there is none."""
    path = RESULTS / f"{kind}_{file}.json"
    return json.loads(path.read_text()) if path.exists() else []


class Results:
    """All rows of one kind, by model, dtype, length of the segments and cache."""

    def __init__(self, kind: str) -> None:
        self.rows: dict[tuple[str, str, int, str], Row] = {}
        for name, file in MODELS.items():
            for row in read(kind, file):
                if "cache" in row:
                    self.rows[name, row["dtype"], row["context"], row["cache"]] = row

    def of(self, cache: str, dtype: str = "float32", context: int = SHORT) -> list[Row | None]:
        """One row per model, None where there is none."""
        return [self.rows.get((model, dtype, context, cache)) for model in MODELS]

    def names(self, dtype: str = "float32", context: int = SHORT) -> list[str]:
        """Caches that any model has, the largest first."""
        found: dict[str, float] = {}
        for (_, d, c, cache), row in self.rows.items():
            if (d, c) == (dtype, context):
                found[cache] = max(found.get(cache, 0.0), row["bits_per_value_8k"])
        return sorted(found, key=lambda name: -found[name])


# ---------------------------------------------------------------------------------- cells, tables


def lines(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    rows = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def title(cache: str, rows: Sequence[Row | None]) -> str:
    """The name; bold if it is one of the packed caches."""
    packed = any(row and row["kind"] == PACKED for row in rows)
    return f"**{cache}**" if packed else cache


def cell(row: Row | None, show: Callable[[Row], str]) -> str:
    return "" if row is None else show(row)


def bits(row: Row) -> str:
    return f"{row['bits_per_value_8k']:.2f}"


def divergence(row: Row) -> str:
    """KL with half of its interval."""
    if "kl" not in row:
        return ""
    low, high = row["kl_interval"]
    digits = 4 if row["kl"] < 0.1 else 3 if row["kl"] < 1 else 2
    return f"{row['kl']:.{digits}f} ± {(high - low) / 2:.{digits}f}"


def perplexity(row: Row) -> str:
    if "perplexity_change" not in row:
        return f"{row['perplexity']:.2f}"
    change = 100 * row["perplexity_change"]
    return f"{change:+.2f}%" if change < 100 else f"{row['perplexity']:,.0f}"


def agreement(row: Row) -> str:
    return "" if "kl" not in row else f"{100 * row['top1_agreement']:.1f}%"


def per_model(*names: str) -> list[str]:
    """Headers of columns that every model has."""
    return [
        f"{model}: {name}" if i == 0 else name for model in MODELS for i, name in enumerate(names)
    ]


def main_table(results: Results) -> str:
    """Presets and controls, as they are: no changes."""
    body = []
    for cache in results.names():
        if ":" in cache:
            continue
        rows = results.of(cache)
        line = [title(cache, rows), " / ".join(cell(r, bits) for r in rows)]
        for row in rows:
            line += [cell(row, show) for show in (perplexity, divergence, agreement)]
        body.append(line)
    return lines(["cache", "bits", *per_model("perplexity", "KL", "top-1")], body)


def study(results: Results, caches: Sequence[str], **where: Any) -> str:
    """KL of some caches."""
    body = []
    for cache in caches:
        rows = results.of(cache, **where)
        if any(rows):
            sizes = " / ".join(cell(r, bits) for r in rows)
            body.append([title(cache, rows), sizes, *(cell(r, divergence) for r in rows)])
    return lines(["cache", "bits", *MODELS], body)


def long_table(results: Results) -> str:
    """KL at every length."""
    lengths = sorted({context for _, d, context, _ in results.rows if d == "float32"})
    pairs = [
        (i, model, n)
        for i, model in enumerate(MODELS)
        for n in lengths
        if results.of("none", context=n)[i]
    ]
    body = []
    for cache in results.names(context=8192):
        if cache == "none":
            continue
        found = [results.of(cache, context=n)[i] for i, _, n in pairs]
        body.append([title(cache, found), *(cell(row, divergence) for row in found)])
    return lines(["cache", *(f"{model}, {n:,}" for _, model, n in pairs)], body)


def named_table(results: Results) -> str:
    """The presets with a name, at both lengths that all models have."""
    body = []
    for use, cache in NAMED_PRESETS.items():
        for context in (SHORT, 8192):
            rows = results.of(cache, context=context)
            line = [f"**{use}** ({cache})", f"{context:,}", " / ".join(cell(r, bits) for r in rows)]
            for row in rows:
                line += [cell(row, divergence), cell(row, agreement)]
            body.append(line)
    return lines(["preset", "tokens", "bits", *per_model("KL", "top-1")], body)


def memory_table(results: Results) -> str:
    """What 8,192 tokens take."""
    plain = results.of("none")
    body = []
    for cache in ("none", "int8", "kivi4", *NAMED_PRESETS.values(), "k2v2"):
        rows = results.of(cache)
        line = [title(cache, rows)]
        for row, base in zip(rows, plain, strict=True):
            times = "" if row is None else f" ({base['bytes_8k'] / row['bytes_8k']:.2f}x)"
            line.append("" if row is None else f"{row['bytes_8k'] / 2**20:.1f}{times}")
        body.append(line)
    return lines(["MiB at 8,192 tokens", *MODELS], body)


def position_table(results: Results, caches: Sequence[str], context: int) -> str:
    """KL by the eighths of one long segment."""
    body = []
    for cache in caches:
        for model, row in zip(MODELS, results.of(cache, context=context), strict=True):
            if row:
                parts = [f"{x:.4f}" for x in row["kl_by_position"]]
                body.append([model, title(cache, [row]), *parts])
    return lines(["model", "cache", *(f"{i}/8" for i in range(1, 9))], body)


def answers_table(results: Results, model: str) -> str:
    """Needles and tasks of one model."""
    rows = [row for (m, *_), row in results.rows.items() if m == model and row.get("needle")]
    rows.sort(key=lambda row: -row["bits_per_value_8k"])
    body = []
    for row in rows:
        tasks = row.get("tasks")
        cells = [f"{sum(found)}" for found in row["needle"]["found"]]
        names = ("first_token", "whole_answer", "right", "turn_first_token", "turn_whole_answer")
        shares = [f"{100 * tasks[name]:.0f}%" if tasks else "" for name in names]
        body.append([title(row["cache"], [row]), bits(row), *cells, *shares, divergence(row)])
    lengths = [f"needle {n:,}" for n in rows[0]["needle"]["lengths"]] if rows else []
    header = ["cache", "bits", *lengths, "first token", "whole answer", "right"]
    return lines([*header, "turns, first token", "turns, whole answer", "KL"], body)


def spread(ratio: float) -> str:
    """A ratio of variances; channels that are always zero have none."""
    return f"{ratio:,.1f}" if ratio < 1e9 else "zeros"


SPREAD = {
    "key": "keys",
    "key_centered": "keys, centered",
    "key_rotated": "keys, rotated",
    "key_centered_rotated": "keys, centered and rotated",
    "value": "values",
    "value_rotated": "values, rotated",
}


def spread_table(results: Results) -> str:
    """Channel variances: mean of the layers and worst layer."""
    rows = results.of("none")
    body = []
    for key, name in SPREAD.items():
        line = [name]
        for row in rows:
            values = row["channel_spread"][key] if row else []
            line += [spread(sum(values) / len(values)), spread(max(values))] if row else ["", ""]
        body.append(line)
    return lines(["", *per_model("mean of the layers", "worst layer")], body)


def allocation_table(results: Results) -> str:
    """What single layers lose, the most sensitive first, and how many there are."""
    body = []
    for name, file in MODELS.items():
        for row in read("allocation", file):
            if "budget" in row:
                kinds = list(row["layers"].values())
                counts = [f"{kinds.count(k)} x {k}" for k in dict.fromkeys(sorted(kinds))]
                body.append([name, f"{row['bits']:.2f}", ", ".join(counts)])
    return lines(["model", "bits without the tail", "layers"], body)


def search_table() -> str:
    """Nearest neighbours: benchmarks/bench_search.py."""
    ks = (1, 2, 4, 8, 16, 64)
    body = [
        [
            row["method"],
            str(row["bytes"]),
            f"{row['indexing_s']:.2f} s",
            *(f"{100 * row[f'recall_1_at_{k}']:.1f}%" for k in ks),
        ]
        for row in json.loads((RESULTS / "search.json").read_text())
    ]
    return lines(["", "bytes", "indexing", *(f"1@{k}" for k in ks)], body)


CENTERS = [
    *"k4v4 k4v4:center=none k4v4:center=text.safetensors k4v4:center=code.safetensors".split(),
    "k4v4:center=biases.safetensors",
    *"k3v2 k3v2:center=none k3v2:center=text.safetensors k3v2:center=code.safetensors".split(),
    *"k3v2:center=biases.safetensors k5v4u k5v4u:center=none".split(),
]
TAILS = [
    f"{base}{change}"
    for base in ("k4v4", "k3v2")
    for change in (
        "",
        ":sink_tokens=0",
        ":sink_tokens=1",
        ":sink_tokens=16",
        ":recent_window=0",
        ":recent_window=32",
        ":recent_window=128",
        ":sink_tokens=0,recent_window=0",
        ":center=none,sink_tokens=0,recent_window=0",
    )
]
BITS = (
    "k8v4:value_bits=3 k8v4:value_bits=2 k5v3u:value_bits=2,value_grid=lloyd k4v4 k4v3 k4v2 "
    "k4v4:key_bits=3 k4v4:key_bits=2 k3v3 k3v3:key_bits=2 k3v2 k2v2"
).split()
GRIDS = (
    "k5v4u:key_grid=lloyd,value_grid=lloyd k5v4u:key_grid=lloyd k5v4u:value_grid=lloyd k5v4u "
    "k5v3u:key_grid=lloyd,value_grid=lloyd k5v3u:value_grid=lloyd k5v3u k4v4 "
    "k4v4:value_grid=uniform k4v4u k3v3 k3v3:key_grid=uniform,value_grid=uniform k3v2 "
    "k3v2:key_grid=uniform,value_grid=uniform k2v2 k2v2:key_grid=uniform,value_grid=uniform"
).split()
SEARCH = (
    "k4v4:search=1 k4v4 k4v4:search=32 k4v4u:search=1 k4v4u k5v4u:search=1 k5v4u k3v2:search=1 "
    "k3v2 k3v2:search=32"
).split()
SCALES = [
    "k4v4",
    *(f"k4v4:key_scale_mode={mode}" for mode in ("norm", "preserve", "mse")),
    *(f"k4v4:value_scale_mode={mode}" for mode in ("norm", "preserve", "unbiased")),
    "k3v2",
    *(f"k3v2:key_scale_mode={mode}" for mode in ("preserve", "mse")),
    *(f"k3v2:value_scale_mode={mode}" for mode in ("preserve", "unbiased")),
]
BOUNDARY = (
    "k4v4:boundary_layers=2 k3v3 k3v3:boundary_layers=2 "
    "k3v3:boundary_layers=2,boundary_preset=k4v4 k3v2 k3v2:boundary_layers=2 "
    "k3v2:boundary_layers=2,boundary_preset=k4v4 k2v2 k2v2:boundary_layers=2,boundary_preset=k4v4"
).split()
SEEDS = "k4v4 k4v4:seed=1 k4v4:seed=2 k3v2 k3v2:seed=1 k3v2:seed=2".split()


def tables() -> dict[str, str]:
    """Name of a mark -> what stands after it."""
    quality, variants = Results("quality"), Results("variants")
    dims = {"SmolLM2-135M": 64, "Qwen2.5-Coder-1.5B": 128, "Gemma-3-270M": 256}
    budgets = [
        f"k3v2:layers={model.split('-')[0]}-{budget}.json"
        for budget in ("2.7", "3.0", "3.3", "4.0", "4.8")
        for model in dims
    ]
    return {
        "quality": main_table(quality),
        "named": named_table(quality),
        "memory": memory_table(quality),
        "centers": study(quality, CENTERS),
        "tails": study(quality, TAILS),
        "bits": study(quality, BITS),
        "grids": study(quality, GRIDS),
        "steps": study(quality, SEARCH),
        "scales": study(quality, SCALES),
        "boundary": study(quality, BOUNDARY),
        "seeds": study(quality, SEEDS),
        "layers": study(quality, budgets),
        "allocation": allocation_table(quality),
        "variants": study(variants, variants.names()),
        "long": long_table(quality),
        "position": position_table(quality, ["k5v4u", "k4v4", "k3v2"], 8192),
        "spread": spread_table(quality),
        "search": search_table(),
        **{f"answers {model}": answers_table(quality, model) for model in MODELS},
    }


def filled(text: str) -> str:
    """The page with all of its tables up to date.

    Raises:
        KeyError: a mark that is no table's.
    """
    made = tables()
    pattern = re.compile(r"<!-- table (.+?) -->\n.*?<!-- end -->", re.DOTALL)
    return pattern.sub(lambda m: f"<!-- table {m[1]} -->\n{made[m[1]]}\n<!-- end -->", text)


def pictures() -> None:
    """Quality against size, presets and controls as they are, one picture per model."""
    from torch_turboquant.eval import report

    results = Results("quality")
    for number, file in enumerate(MODELS.values()):
        rows = [results.of(cache)[number] for cache in results.names() if ":" not in cache]
        report.picture(RESULTS / f"quality_{file}.png", [row for row in rows if row])


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--check", action="store_true", help="writes nothing")
    options.add_argument("--pictures", action="store_true", help="needs matplotlib")
    arguments = options.parse_args()
    text = PAGE.read_text()
    new = filled(text)
    if arguments.check:
        sys.exit(0 if new == text else f"{PAGE.name}: run benchmarks/quality_tables.py")
    PAGE.write_text(new)
    if arguments.pictures:
        pictures()


if __name__ == "__main__":
    main()
