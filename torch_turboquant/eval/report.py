"""How an evaluation shows its results: a table of at most 100 columns, JSON rows, a picture."""

from __future__ import annotations

import itertools
import json
import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_turboquant._files import replacing
from torch_turboquant.eval.tasks import CONVERSATIONS, prompts

Row = dict[str, Any]

WIDTH = 96  # columns of running text
WEIGHTS = "weights"  # kind of the rows of packed weights


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, the first left-aligned, the others right-aligned."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]

    def text(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join([text(header), "  ".join("-" * w for w in widths), *map(text, rows)])


def quality_table(rows: Sequence[Row]) -> str:
    """One line per cache, largest first."""
    header = "cache,bits,B/token,perplexity,change,±,KL,±,top-1,output,K NMSE,V NMSE".split(",")
    lines = []
    caches = [row for row in rows if row["kind"] != WEIGHTS]
    for row in sorted(caches, key=lambda r: -r["bits_per_value_8k"]):
        line = [
            row["cache"],
            f"{row['bits_per_value_8k']:.2f}",
            f"{row['bytes_per_token_8k']:,.0f}",
            _number(row["perplexity"], ".3f"),
        ]
        if row["kind"] == "uncompressed":
            line += ["", _half_width(row["perplexity_interval"], ".2f"), *[""] * 6]
        else:
            line += [
                *_differences(row),
                *(
                    _number(row.get(f"mean_{name}"), form)
                    for name, form in (
                        ("output_error", ".3f"),
                        ("key_nmse", ".1e"),
                        ("value_nmse", ".1e"),
                    )
                ),
            ]
        lines.append(line)
    return table(header, lines)


def weights_table(rows: Sequence[Row]) -> str | None:
    """One line per choice of packed weights; None if no row has any."""
    header = "weights,bits,model MB,B/token,perplexity,change,±,KL,±,top-1".split(",")
    lines = [
        [
            row["cache"],
            f"{row['weight_bits']:.3f}",
            f"{row['model_bytes'] / 1e6:,.0f}",
            f"{row['bytes_per_token_8k']:,.0f}",
            _number(row["perplexity"], ".3f"),
            *_differences(row),
        ]
        for row in rows
        if row["kind"] == WEIGHTS
    ]
    return table(header, lines) if lines else None


def weights_legend(rows: Sequence[Row]) -> str:
    """What the columns of `weights_table` mean."""
    row = next(row for row in rows if row["kind"] == WEIGHTS)
    text = (
        "bits: of a packed weight, scales and padding included; model MB: all parameters, those "
        f"that are not packed in {row['dtype']}. Everything else as above, compared with the model "
        "that has nothing compressed."
    )
    return textwrap.fill(text, WIDTH)


def answers_table(rows: Sequence[Row]) -> str | None:
    """One line per cache with a needle grid or tasks; None if no row has any."""
    header = "cache,bits,needle,first token,whole answer,right,turns: first,whole".split(",")
    lines = []
    for row in sorted(rows, key=lambda r: -r["bits_per_value_8k"]):
        needle, tasks = row.get("needle"), row.get("tasks")
        if not (needle or tasks):
            continue
        line = [row["cache"], f"{row['bits_per_value_8k']:.2f}", ""]
        if needle:
            cells = [cell for found in needle["found"] for cell in found]
            line[2] = f"{sum(cells)} of {len(cells)}"
        names = ("first_token", "whole_answer", "right", "turn_first_token", "turn_whole_answer")
        line += [f"{100 * tasks[name]:.0f}%" if tasks else "" for name in names]
        lines.append(line)
    return table(header, lines) if lines else None


def answers_legend(rows: Sequence[Row]) -> str:
    """What the columns of `answers_table` mean."""
    lengths = next((r["needle"]["lengths"] for r in rows if r.get("needle")), [])
    text = (
        "needle: cells in which the hidden number was found"
        + (
            f" (texts of {', '.join(f'{n:,}' for n in lengths)} tokens, 5 depths)"
            if lengths
            else ""
        )
        + f". first token, whole answer: of {len(prompts())} prompts, how many are as without "
        "compression; right: how many begin with the expected answer. turns: the same for "
        f"{sum(len(questions) for _, questions in CONVERSATIONS)} turns of conversations, every "
        "cache going on from what it said itself."
    )
    return textwrap.fill(text, WIDTH)


def strategies_table(rows: Sequence[Row], memory: int | None = None) -> str:
    """One line per cache in the order of measurement; without the columns that no row has.

    memory: bytes for caches, for the column of requests that fit; None: without it.
    """
    header = ["cache", "bits", "MB", "smaller", "fit", "KL", "±", "top-1", "1st question", "2nd"]
    header.append("ms")
    whole = rows[0]["bytes_8k"]
    lines = []
    for row in rows:
        smaller = whole / row["bytes_8k"]
        line = [row["cache"], f"{16 / smaller:.2f}", f"{row['bytes_8k'] / 1e6:,.1f}"]
        line += [f"{smaller:.2f}x", "" if memory is None else fitting(row, memory)]
        if row["kind"] == "uncompressed":
            line += ["", "", ""]
        else:
            line += _differences(row)[2:]
        found = row.get("synthetic") or {}
        line += [_number(found.get(name), ".0%") for name in ("seen", "unseen")]
        lines.append([*line, step_time(row)])
    absent = {"fit"} if memory is None else set()
    if not any(row.get("step") for row in rows):
        absent.add("ms")
    keep = [i for i, name in enumerate(header) if name not in absent]
    return table([header[i] for i in keep], [[line[i] for i in keep] for line in lines])


def fitting(row: Row, memory: int) -> str:
    """How many requests of 8,192 tokens fit into this memory."""
    return f"{int(memory // row['bytes_8k']):,}"


def step_time(row: Row) -> str:
    """Milliseconds of a decode step; empty: not measured, or a control."""
    return _number((row.get("step") or {}).get("ms"), ".2f")


def strategies_legend(rows: Sequence[Row], memory: int | None = None) -> str:
    """What the columns of `strategies_table` mean, with the numbers of this run."""
    r = rows[0]
    text = (
        "bits: per key or value channel of a prompt of 8,192 tokens, what was evicted counts as 0; "
        "MB: of its cache, everything included; smaller: than 16 bits. "
    )
    if memory is not None:
        text += (
            f"fit: requests of 8,192 tokens into the {memory / 1e9:.1f} GB that 16-bit weights "
            "leave. "
        )
    text += (
        f"KL, top-1: of {r['scored_tokens']:,} tokens predicted behind a context of "
        f"{r['prefill']:,}, from which tokens were evicted. "
    )
    made = next((row["synthetic"] for row in rows if row.get("synthetic")), None)
    if made:
        text += (
            f"1st question: scores of {len(made['scores'])} synthetic tasks of "
            f"{made['length']:,} tokens, over those of the uncompressed cache; the question was "
            "there when tokens were evicted. 2nd: of a question that came afterwards."
        )
    timed = next((row["step"] for row in rows if row.get("step")), None)
    if timed:
        text += (
            f" ms: a decode step of {timed['sequences']} sequences of {timed['context']:,} tokens "
            f"each, in a CUDA graph and {timed['dtype']}."
        )
    return textwrap.fill(text, WIDTH)


def show_strategies(rows: Sequence[Row], memory: int | None = None) -> None:
    """Prints the table of strategies."""
    r = rows[0]
    print(f"\n{r['model']} ({r['dtype']}); {r['device']}\n")
    print(strategies_table(rows, memory) + "\n")
    print(strategies_legend(rows, memory))


def _differences(row: Row) -> list[str]:
    """Cells of a row that compare it with the uncompressed one: change, ±, KL, ±, top-1."""
    return [
        _number(row["perplexity_change"], "+.2%"),
        _half_width(row["perplexity_change_interval"], ".2%").removesuffix("%"),
        _number(row["kl"], ".4f"),
        _half_width(row["kl_interval"], ".4f"),
        _number(row["top1_agreement"], ".1%"),
    ]


def _half_width(interval: Sequence[float | None], form: str) -> str:
    low, high = interval
    return _number((high - low) / 2 if _known(low) and _known(high) else None, form)


def _number(value: float | None, form: str) -> str:
    """A cell: empty where the number is not known."""
    return format(value, form) if _known(value) else ""


def _known(value: float | None) -> bool:
    """Whether there is a number. NaN and infinities are None in rows that were read from a file."""
    return value is not None and math.isfinite(value)


def legend(rows: Sequence[Row]) -> str:
    """What the columns of `quality_table` mean, with the numbers of this run."""
    r = rows[0]
    scored = r["segments"] * r["scored_tokens"]
    text = (
        "bits: per channel of a key or value, and B/token: of all layers, both all in at 8,192 "
        "tokens (scales, padding, exact tokens at 16 bits). "
        f"perplexity, KL (nats) and top-1 agreement: {scored:,} tokens, each predicted through the "
        f"cache ({r['segments']} segments of {r['context']:,}). ±: half of a 95% interval, by "
        "bootstrap over blocks of 32 tokens; of the perplexity itself where nothing is compressed, "
        "else of its change, in percent. output: relative error of the attention output; NMSE: "
        "squared error over squared length; all three the mean over layers."
    )
    return textwrap.fill(text, WIDTH)


def show(rows: Sequence[Row]) -> None:
    """Prints the report."""
    r = rows[0]
    shape = f"{r['layers']} layers, {r['q_heads']}/{r['kv_heads']} heads of {r['head_dim']}"
    print(f"\n{r['model']} ({r['dtype']}): {shape}; {r['device']}\n")
    print(quality_table(rows) + "\n")
    print(legend(rows))
    weights = weights_table(rows)
    if weights:
        print("\n" + weights + "\n")
        print(weights_legend(rows))
    answers = answers_table(rows)
    if answers:
        print("\n" + answers + "\n")
        print(answers_legend(rows))


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """Writes rows as a JSON list, one per line. The file appears complete or not at all."""
    lines = [json.dumps(row, allow_nan=False) for row in finite(rows)]
    with replacing(path) as temporary:
        temporary.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def finite(value: Any) -> Any:
    """The same data with None for infinities and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> list[Row]:
    """The rows that `write_json` wrote; none if there is no file.

    Raises:
        ValueError: the file holds something else.
    """
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON, or of UTF-8
        raise ValueError(f"{path} holds no rows of results: {error}. Name a new file") from error
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise ValueError(f"{path} holds no rows of results: expected a JSON list. Name a new file")
    return found


def picture(path: Path, rows: Sequence[Row], source: str | None = None) -> None:
    """Draws KL divergence over bits per value, one point per cache (needs matplotlib).

    source: what the file says of where the rows come from.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    for kind, colour, marker in (("packed", "tab:blue", "o"), ("control", "tab:orange", "s")):
        points = [r for r in rows if r["kind"] == kind and _known(r["kl"])]
        bits, kl = [r["bits_per_value_8k"] for r in points], [r["kl"] for r in points]
        error = [
            [max(0.0, r["kl"] - r["kl_interval"][0]) for r in points],
            [max(0.0, r["kl_interval"][1] - r["kl"]) for r in points],
        ]
        axes.errorbar(
            bits, kl, error, fmt=marker, color=colour, label=kind, capsize=2, elinewidth=0.8
        )
    axes.set_yscale("log")
    axes.set_xlabel("bits per key or value channel, everything included, at 8,192 tokens")
    axes.set_ylabel("mean KL divergence to the uncompressed model, nats (95% intervals)")
    r = rows[0]
    axes.set_title(f"{r['model']}: {r['segments'] * r['scored_tokens']:,} tokens through the cache")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    compressed = [r for r in rows if r["kind"] in ("packed", "control") and _known(r["kl"])]
    place_labels(axes, [(r["cache"], r["bits_per_value_8k"], r["kl"]) for r in compressed])
    figure.savefig(path, dpi=110, metadata={"Software": None, "Source": source})
    pyplot.close(figure)


def strategies_picture(path: Path, rows: Sequence[Row], source: str | None = None) -> None:
    """Draws KL divergence over the bits that a prompt takes: fewer bits for all tokens beside fewer
    tokens, a line for each policy of eviction (needs matplotlib).

    source: as of `picture`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    whole = rows[0]["bytes_8k"]
    families: dict[str, list[Row]] = {}
    for row in (row for row in rows[1:] if _known(row["kl"])):
        name, _, changes = row["cache"].partition(":")
        policy = changes.partition("evict=")[2]
        family = "controls" if row["kind"] == "control" else f"{name}, {policy}"
        if row["kind"] != "control" and not policy:
            family = "presets"
        families.setdefault(family, []).append(row)
    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    labels = []
    for number, (family, members) in enumerate(families.items()):
        points = sorted((16 * r["bytes_8k"] / whole, r["kl"], r["cache"]) for r in members)
        bits, kl, names = zip(*points, strict=True)
        evicting = family not in ("presets", "controls")
        style = "none" if family == "controls" else "-"
        marker = "oDsv^<>Pp*"[number % 10]
        axes.plot(bits, kl, ls=style, marker=marker, markersize=5, lw=0.9, label=family)
        for x, y, name in zip(bits, kl, names, strict=True):
            share = re.search(r"keep=([\d.]+)", name)
            if not evicting:
                labels.append((name, x, y))
            elif family.startswith("k8v8, snapkv") and share:
                labels.append((f"{float(share[1]):.0%}", x, y))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    axes.set_xlabel("bits per key or value channel of a prompt of 8,192 tokens (evicted tokens: 0)")
    axes.set_ylabel("mean KL divergence to the uncompressed model, nats")
    r = rows[0]
    axes.set_title(f"{r['model']}: text behind a context of {r['prefill']:,} tokens")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)
    place_labels(axes, labels)
    figure.savefig(path, dpi=110, metadata={"Software": None, "Source": source})
    pyplot.close(figure)


# Where a label may stand: right, left, above, below, and between them; first close, then farther.
_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
_DISTANCES = (7, 13, 20, 28, 38, 50, 64)  # points; where it is far, a line leads to its point


def place_labels(axes: Any, points: Sequence[tuple[str, float, float]]) -> list[Any]:
    """Names points so that no label covers a point, a label or the legend, or leaves the axes.

    A label for which there is no such place stands to the right of its point.

    Args:
        axes: with everything else drawn.
        points: (label, x, y).

    Returns:
        The annotations of matplotlib.
    """
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    axes.figure.canvas.draw()
    renderer = axes.figure.canvas.get_renderer()
    inside = axes.get_window_extent(renderer)
    marks = [axes.transData.transform((x, y)) for _, x, y in points]
    taken = [Bbox.from_extents(x - 6, y - 6, x + 6, y + 6) for x, y in marks]
    if axes.get_legend():
        taken.append(axes.get_legend().get_window_extent(renderer))

    def label(text: str, x: float, y: float, distance: int, dx: int, dy: int) -> Any:
        return axes.annotate(
            text,
            (x, y),
            xytext=(distance * dx, distance * dy),
            textcoords="offset points",
            fontsize=7,
            ha=("center", "left", "right")[dx],
            va=("center", "bottom", "top")[dy],
            arrowprops={"arrowstyle": "-", "linewidth": 0.4} if distance > 15 else None,
        )

    def extent(annotation: Any) -> Any:
        annotation.update_positions(renderer)
        return Text.get_window_extent(annotation, renderer)  # without the line

    placed = []
    for point in sorted(points, key=lambda point: point[1:]):
        for distance, (dx, dy) in itertools.product(_DISTANCES, _DIRECTIONS):
            found = label(*point, distance, dx, dy)
            box = extent(found)
            free = not any(box.overlaps(other) for other in taken)
            if free and inside.containsx(box.x0) and inside.containsx(box.x1):
                if inside.containsy(box.y0) and inside.containsy(box.y1):
                    break
            found.remove()
        else:
            found = label(*point, 7, 1, 0)
            box = extent(found)
        taken.append(box)
        placed.append(found)
    return placed
