"""The tables of docs/quality.md and of the pages behind it, docs/measurements/quality_*.md.

They come from the result files; docs/generate.py writes them into the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from common import Row, file_name, markdown, read_rows

from torch_turboquant.config import NAMED_PRESETS, PRESETS

MODELS = {  # as tables name them -> as result files do
    "SmolLM2-135M": "SmolLM2-135M-Instruct",
    "Qwen2.5-Coder-1.5B": "Qwen2.5-Coder-1.5B-Instruct",
    "Gemma-3-270M": "Gemma-3-270M",
}
LENGTHS = SHORT, LONG, FAR = 2048, 8192, 32768  # tokens of a segment; most tables: the first
PACKED = "packed"
MEAN = "center=mean"  # keys relative to their mean, no scales of channels


class Results:
    """All rows of one kind, by model, dtype, length of the segments and cache."""

    def __init__(self, kind: str) -> None:
        self.rows: dict[tuple[str, str, int, str], Row] = {}
        for name, model in MODELS.items():
            for row in read_rows(file_name(kind, model), missing_ok=True):
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


def valued(cache: str, mode: str = "mse") -> str:
    """A cache as rows call it when its values have this scale mode; studies have all "mse"."""
    preset, _, changes = cache.partition(":")
    if PRESETS[preset].value_scale_mode != mode:
        changes = ",".join(filter(None, (f"value_scale_mode={mode}", changes)))
    return f"{preset}:{changes}" if changes else preset


# ---------------------------------------------------------------------------------- cells, tables


def title(cache: str, rows: Sequence[Row | None]) -> str:
    """The name; bold if it is one of the packed caches."""
    packed = any(row and row["kind"] == PACKED for row in rows)
    return f"**{cache}**" if packed else cache


def with_use(cache: str, rows: Sequence[Row | None]) -> str:
    """The title, and the name by its use if it has one."""
    uses = (use for use in NAMED_PRESETS if named(use) == cache)
    return " ".join([title(cache, rows), *uses])


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
    """Headers of the columns that every model has."""
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
    return markdown(["cache", "bits", *per_model("perplexity", "KL", "top-1")], body)


def summary_table(results: Results) -> str:
    """The caches that a choice is between: KL without its interval, and top-1 agreement."""
    body = []
    for cache in SUMMARY:
        rows = results.of(cache)
        line = [with_use(cache, rows), " / ".join(cell(r, bits) for r in rows)]
        for row in rows:
            line += [cell(row, lambda r: divergence(r).split(" ±")[0]), cell(row, agreement)]
        body.append(line)
    return markdown(["cache", "bits", *per_model("KL", "top-1")], body)


def study(results: Results, caches: Sequence[str]) -> str:
    """KL of some caches."""
    body = []
    for cache in caches:
        rows = results.of(cache)
        if any(rows):
            sizes = " / ".join(cell(r, bits) for r in rows)
            body.append([title(cache, rows), sizes, *(cell(r, divergence) for r in rows)])
    return markdown(["cache", "bits", *MODELS], body)


def long_table(results: Results, caches: Sequence[str] = ()) -> str:
    """KL of some caches, or of all, at every length that a model was measured at."""
    measured = {(model, n) for model, _, n, _ in results.rows}
    pairs = [(i, m, n) for i, m in enumerate(MODELS) for n in LENGTHS if (m, n) in measured]
    body = []
    for cache in caches or results.names(context=LONG):
        if cache == "none" or MEAN in cache:
            continue
        found = [results.of(cache, context=n)[i] for i, _, n in pairs]
        label = with_use(cache, found) if caches else title(cache, found)
        body.append([label, *(cell(row, divergence) for row in found)])
    return markdown(["cache", *(f"{model}, {n:,}" for _, model, n in pairs)], body)


def named(use: str) -> str:
    """A preset with a name, as rows call it: "k3v2:recent_window=40"."""
    preset, options = NAMED_PRESETS[use]
    return ":".join([preset, *(f"{field}={value}" for field, value in options.items())])


def named_table(results: Results) -> str:
    """The named presets at every length."""
    lines = [(use, named(use), n) for use in NAMED_PRESETS for n in LENGTHS]
    body = []
    for use, cache, context in lines:
        rows = results.of(cache, context=context)
        if not any(rows):
            continue
        line = [f"**{use}** ({cache})", f"{context:,}", " / ".join(cell(r, bits) for r in rows)]
        for row in rows:
            line += [cell(row, divergence), cell(row, agreement)]
        body.append(line)
    return markdown(["preset", "tokens", "bits", *per_model("KL", "top-1")], body)


def memory_table(results: Results) -> str:
    """The memory of 8,192 tokens."""
    plain = results.of("none")
    body = []
    for cache in ("none", "int8", "kivi4", *map(named, NAMED_PRESETS), "k2v2"):
        rows = results.of(cache)
        line = [title(cache, rows)]
        for row, base in zip(rows, plain, strict=True):
            times = "" if row is None else f" ({base['bytes_8k'] / row['bytes_8k']:.2f}x)"
            line.append("" if row is None else f"{row['bytes_8k'] / 2**20:.1f}{times}")
        body.append(line)
    return markdown(["MiB at 8,192 tokens", *MODELS], body)


def gains_table(results: Results) -> str:
    """KL with the center alone, and with scales of channels as well, at every length."""
    body = []
    for number, model in enumerate(MODELS):
        for cache in ("k5v4u", "k4v4", "k4v2", "k3v3", "k3v2", "k2v2"):
            line = [model, f"**{valued(cache)}**"]
            for n in LENGTHS:
                names = valued(f"{cache}:{MEAN}"), valued(cache)
                both = (results.of(name, context=n)[number] for name in names)
                line += [cell(row, divergence) for row in both]
            body.append(line)
    header = (f"{n:,}: {name}" for n in LENGTHS for name in ("mean", "with scales"))
    return markdown(["model", "cache", *header], body)


def values_table(results: Results) -> str:
    """KL by the scale mode of values, where more than the default was measured."""
    modes, lengths = ("mse", "preserve", "unbiased"), (SHORT, LONG)
    body = []
    for number, model in enumerate(MODELS):
        for cache in ("k5v4u", "k4v4", "k4v3", "k3v3", "k4v2", "k3v2", "k2v2"):
            line = [model, f"**{cache}**"]
            for n in lengths:
                rows = [results.of(valued(cache, mode), context=n)[number] for mode in modes]
                alone = sum(row is not None for row in rows) == 1
                line += ["" if alone else cell(row, divergence) for row in rows]
            body.append(line)
    header = (f"{n:,}: {mode}" for n in lengths for mode in modes)
    return markdown(["model", "cache", *header], body)


def position_table(results: Results, caches: Sequence[str], context: int) -> str:
    """KL by the eighths of one long segment."""
    body = []
    for cache in caches:
        for model, row in zip(MODELS, results.of(cache, context=context), strict=True):
            if row:
                parts = [f"{x:.4f}" for x in row["kl_by_position"]]
                body.append([model, title(cache, [row]), *parts])
    return markdown(["model", "cache", *(f"{i}/8" for i in range(1, 9))], body)


def answers_table(results: Results, model: str) -> str:
    """Needles and tasks of one model."""
    rows = [
        row
        for (m, dtype, _, cache), row in results.rows.items()
        if (m, dtype) == (model, "bfloat16") and row.get("needle") and MEAN not in cache
    ]
    rows.sort(key=lambda row: -row["bits_per_value_8k"])
    body = []
    for row in rows:
        cells = [f"{sum(found)}" for found in row["needle"]["found"]]
        names = ("first_token", "whole_answer", "right", "turn_first_token", "turn_whole_answer")
        shares = [f"{100 * row['tasks'][name]:.0f}%" for name in names]
        body.append([title(row["cache"], [row]), bits(row), *cells, *shares, divergence(row)])
    lengths = [f"needle {n:,}" for n in rows[0]["needle"]["lengths"]] if rows else []
    header = ["cache", "bits", *lengths, "first token", "whole answer", "right"]
    return markdown([*header, "turns, first token", "turns, whole answer", "KL"], body)


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
    return markdown(["", *per_model("mean of the layers", "worst layer")], body)


def allocation_table() -> str:
    """The layers of every budget, and the divergence of the whole model."""
    quality = Results("quality")
    body = []
    for number, (name, model) in enumerate(MODELS.items()):
        found = read_rows(file_name("allocation", model), missing_ok=True)
        rows = [row for row in found if "budget" in row]
        for row in sorted(rows, key=lambda row: -row["budget"]):
            kinds = list(row["layers"].values())
            counts = (f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(sorted(kinds)))
            short = row["model"].split("-")[0]
            measured = quality.of(valued(f"k3v2:layers={short}-{row['budget']}.json"))[number]
            shown = [cell(measured, show) for show in (bits, divergence, agreement)]
            body.append([name, *shown, ", ".join(counts)])
    return markdown(["model", "bits", "KL", "top-1", "layers"], body)


def variants_table() -> str:
    """Formats that were considered: benchmarks/bench_variants.py, its longest run."""
    body = []
    for name, model in MODELS.items():
        found = read_rows(file_name("variants", model), missing_ok=True)
        rows = [row for row in found if "kl" in row]
        longest = max((row["segments"] * row["scored_tokens"] for row in rows), default=0)
        rows = [row for row in rows if row["segments"] * row["scored_tokens"] == longest]
        for row in sorted(rows, key=lambda row: (-row["bits_per_value_8k"], row["kl"])):
            shown = [show(row) for show in (bits, perplexity, divergence, agreement)]
            body.append([name, row["cache"], *shown])
    return markdown(["model", "variant", "bits", "perplexity", "KL", "top-1"], body)


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
        for row in read_rows("search")
    ]
    return markdown(["", "bytes", "indexing", *(f"1@{k}" for k in ks)], body)


SUMMARY = [
    *("k8v8", named("near-lossless"), "k4v4", named("balanced"), named("smallest")),
    *("int8", "fp8s", "fp8", "kivi4", "q4_0h", "int4"),
]
CENTERS = [
    valued(f"{base}{center}")
    for base in ("k5v4u", "k4v4", "k4v2", "k3v3", "k3v2")
    for center in (
        "",
        ":center=mean",
        ":center=none",
        ":center=text.safetensors",
        ":center=code.safetensors",
        ":center=biases.safetensors",
    )
]
TAILS = [
    valued(f"{base}{change}")
    for base in ("k4v4", "k3v3", "k3v2")
    for change in (
        "",
        ":sink_tokens=0",
        ":sink_tokens=1",
        ":sink_tokens=16",
        ":recent_window=0",
        ":recent_window=32",
        ":recent_window=40",
        ":recent_window=48",
        ":recent_window=128",
        ":sink_tokens=0,recent_window=0",
        ":center=none,sink_tokens=0,recent_window=0",
    )
] + ["k3v2", named("smallest")]
BITS = (
    "k8v4:value_bits=3 k8v4:value_bits=2 k5v3u:value_bits=2,value_grid=lloyd k4v4 k4v3 "
    f"{valued('k4v2')} k4v2 k4v4:key_bits=3 k4v4:key_bits=2 k3v3 k3v3:key_bits=2 "
    f"{valued('k3v2')} k3v2 k2v2"
).split()
GRIDS = [
    valued(cache)
    for cache in (
        "k5v4u:key_grid=lloyd,value_grid=lloyd k5v4u:key_grid=lloyd k5v4u:value_grid=lloyd k5v4u "
        "k5v3u:key_grid=lloyd,value_grid=lloyd k5v3u:value_grid=lloyd k5v3u k4v4 "
        "k4v4:value_grid=uniform k4v4u k3v3 k3v3:key_grid=uniform,value_grid=uniform k3v2 "
        "k3v2:key_grid=uniform,value_grid=uniform k2v2 k2v2:key_grid=uniform,value_grid=uniform"
    ).split()
]
STEPS = [
    valued(cache)
    for cache in (
        "k4v4:search=1 k4v4 k4v4:search=32 k4v4u:search=1 k4v4u k5v4u:search=1 k5v4u k3v2:search=1 "
        "k3v2 k3v2:search=32"
    ).split()
]


SCALES = [
    "k4v4",
    *(f"k4v4:key_scale_mode={mode}" for mode in ("norm", "preserve", "mse")),
    "k4v4:value_scale_mode=norm",
    valued("k3v2"),
    *(valued(f"k3v2:key_scale_mode={mode}") for mode in ("preserve", "mse")),
]
BOUNDARY = [
    valued(cache)
    for cache in (
        "k4v4 k4v4:boundary_layers=2 k3v3 k3v3:boundary_layers=2 "
        "k3v3:boundary_layers=1,boundary_preset=k4v4 k3v3:boundary_layers=2,boundary_preset=k4v4 "
        "k3v2 k3v2:boundary_layers=2 k3v2:boundary_layers=2,boundary_preset=k4v4 "
        "k2v2 k2v2:boundary_layers=2,boundary_preset=k4v4"
    ).split()
]
SEEDS = [
    *("k4v4", "k4v4:seed=1", "k4v4:seed=2"),
    *(valued(f"k3v2{seed}") for seed in ("", ":seed=1", ":seed=2")),
]


POSITIONS = (
    f"k5v4u k4v4 {valued('k4v2')} k4v2 k3v3 k3v3:{MEAN} {valued('k3v2')} k3v2 {named('smallest')}"
).split()
FAR_POSITIONS = (
    f"k5v4u k5v4u:{MEAN} k4v4 k4v4:{MEAN} {valued(f'k4v2:{MEAN}')} {valued('k4v2')} k4v2 "
    f"k3v3 k3v3:{MEAN} {valued(f'k3v2:{MEAN}')} {valued('k3v2')} {named('smallest')}"
).split()


def _of_quality(make: Callable[..., str], *args: Any) -> Callable[[], str]:
    return lambda: make(Results("quality"), *args)


TABLES: dict[str, Callable[[], str]] = {
    "summary": _of_quality(summary_table),
    "lengths": _of_quality(long_table, [named(use) for use in NAMED_PRESETS]),
    "quality": _of_quality(main_table),
    "named": _of_quality(named_table),
    "memory": _of_quality(memory_table),
    "centers": _of_quality(study, CENTERS),
    "gains": _of_quality(gains_table),
    "tails": _of_quality(study, TAILS),
    "bits": _of_quality(study, BITS),
    "grids": _of_quality(study, GRIDS),
    "steps": _of_quality(study, STEPS),
    "scales": _of_quality(study, SCALES),
    "values": _of_quality(values_table),
    "seeds": _of_quality(study, SEEDS),
    "boundary": _of_quality(study, BOUNDARY),
    "allocation": allocation_table,
    "long": _of_quality(long_table),
    "position": _of_quality(position_table, POSITIONS, LONG),
    "position 32768": _of_quality(position_table, FAR_POSITIONS, FAR),
    "spread": _of_quality(spread_table),
    "search": search_table,
    "formats": variants_table,
    **{f"answers {model}": _of_quality(answers_table, model) for model in MODELS},
}
PAGES: dict[str, list[str]] = {  # page -> its tables
    "docs/quality.md": ["summary", "lengths"],
    "docs/measurements/quality_presets.md": ["named", "quality", "memory"],
    "docs/measurements/quality_centers.md": ["centers", "gains", "spread"],
    "docs/measurements/quality_exact_tail.md": ["tails"],
    "docs/measurements/quality_codes.md": ["bits", "grids", "steps", "scales", "values", "seeds"],
    "docs/measurements/quality_layers.md": ["boundary", "allocation"],
    "docs/measurements/quality_formats.md": ["formats"],
    "docs/measurements/quality_long_contexts.md": ["long", "position", "position 32768"],
    "docs/measurements/quality_answers.md": [f"answers {model}" for model in MODELS],
    "docs/measurements/quality_vectors.md": ["search"],
}
