"""Tables and the picture of docs/weights.md and its page of measurements, from bench_weights.py."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import torch
from common import RESULTS, Row, file_name, markdown, read_rows
from weight_rows import all_rows

MODELS = {
    "SmolLM2-135M": "SmolLM2-135M-Instruct",
    "Gemma-3-270M": "Gemma-3-270M",
    "Qwen2.5-Coder-1.5B": "Qwen2.5-Coder-1.5B-Instruct",
}
ENCODER = "all-MiniLM-L6-v2"
COST = {ENCODER: "distance"}  # what rows of a model are compared by; language models: "kl"
NOISE = r" --(commit|cache) \S+"  # of a command: what no number depends on
FREE, CALIBRATED = "4 bit, block 128, sub 32", "4 bit, block 128, sub 32, scales text, rounding"
NAMES = {  # of rows on the short page
    FREE: "**4 bits, as loaded**",
    "4 bit, block 128, sub 32, scales text": "4 bits, factors of channels from a text",
    CALIBRATED: "**4 bits, calibrated**",
    "4 bit, block 128": "4 bits without multipliers, as loaded",
    "4 bit, block 128, scales text, rounding": "4 bits without multipliers, calibrated",
    "8 bit, block 128": "8 bits, as loaded",
    "int4 RTN g128": "int4, groups of 128, rounded to nearest",
    "int4 GPTQ g128": "int4, groups of 128, GPTQ",
    "HIGGS p=2 g256": "HIGGS, pairs of weights",
    "NF4 g64": "NF4, groups of 64",
    "HQQ g64": "HQQ, groups of 64",
    "Q4_K-like": "like Q4_K",
    "Q4_K_M-like": "like Q4_K_M",
    "Q4_K_M-like, importance": "like Q4_K_M, with an importance matrix",
}

THREE = {  # of 3 bits, on the short page for the encoder
    "3 bit, block 128, sub 32": "3 bits, as loaded",
    "3 bit, block 128, sub 32, scales text, rounding": "3 bits, calibrated",
    "HQQ g64, 3 bit": "HQQ, groups of 64, 3 bits",
    "NF3 g64": "NF3, groups of 64",
    "int3 RTN g128": "int3, groups of 128, rounded to nearest",
    "int3 GPTQ g128": "int3, groups of 128, GPTQ",
    "Q3_K-like": "like Q3_K",
    "Q3_K-like, importance": "like Q3_K, with an importance matrix",
    "HIGGS p=2 g256, 3 bit": "HIGGS, pairs of weights, 3 bits",
}


def result_file(model: str) -> str:
    return file_name("weights", MODELS.get(model, model))


def rows_of(model: str) -> dict[str, Row]:
    """The rows of one model by name, in the order of the study; none if it was not measured.

    Of machines that measured the same row, the last in the file counts.
    """
    found = {row["row"]: row for row in read_rows(result_file(model), missing_ok=True)}
    order = [row.name for row in all_rows() if row.name in found]
    return {name: found[name] for name in [*order, *found]}


def with_error(row: Row, entry: str = "kl") -> str:
    return f"{row[entry]:.4f} ± {row[f'{entry}_error']:.4f}"


def is_older(row: Row) -> bool:
    """Whether a row was measured with another encoder than the package's of today.

    It had other signs of the transform, 2 candidate steps with multipliers in place of 4, and for
    rounding less damping and the whole factors of channels.
    """
    rotated = row["family"] == "ours" and row["block"] is not None
    return bool(row["commit"] == "cf59b1b" and (rotated or row["family"] == "mixed"))


def above(row: Row, cost: str, default: Row) -> str:
    """How much more a row costs than the default; no error where another device ran that."""
    if row["device"] != default["device"]:
        return f"{row[cost] - default[cost]:+.4f}"
    return f"{row[f'{cost}_above_default']:+.4f} ± {row['above_error']:.4f}"


def source(models: list[str], folder: str) -> str:
    """Result files and commands of these models."""
    parts = []
    for model in models:
        name = result_file(model)
        commands = dict.fromkeys(
            re.sub(NOISE, "", row["command"].split(" --rows")[0]) for row in rows_of(model).values()
        )
        text = " and ".join(f"`{command}`" for command in commands)
        parts.append(f"[{name}.json]({folder}benchmarks/results/{name}.json): {text}")
    return "\\\n".join(parts)


def overview() -> str:
    """Our formats and controls on all models."""
    found = {model: rows for model in MODELS if (rows := rows_of(model))}
    first, *others = found.values()
    body = []
    for name, label in NAMES.items():
        if name not in first:
            continue
        row = first[name]
        label += " †" if is_older(row) else ""
        cells = [label, f"{row['bits_per_weight']:.2f}", "yes" if row["needs_text"] else "no"]
        cells += [with_error(row), f"{row['perplexity']:.2f}", f"{row['same_token']:.1%}"]
        cells += [with_error(some[name]) if name in some else "" for some in others]
        body.append(cells)
    header = ["weights", "bits", "needs a text", "KL", "perplexity", "same token"]
    header += [f"KL, {model}" for model in list(found)[1:]]
    return f"{markdown(header, body)}\n\n{source(list(found), '../')}"


def on_the_encoder() -> str:
    """Our formats and controls on the encoder."""
    rows = rows_of(ENCODER)
    body = [
        [
            label,
            f"{row['bits_per_weight']:.2f}",
            with_error(row, "distance"),
            f"{row['neighbours']:.1%}",
            f"{row['nearest']:.1%}",
        ]
        for name, label in {**NAMES, **THREE}.items()
        if (row := rows.get(name))
    ]
    header = ["weights", "bits", "1 - cosine", "10 nearest kept", "nearest kept"]
    return f"{markdown(header, body)}\n\n{source([ENCODER], '../')}"


def agreement() -> str:
    """Whether models put formats in the same order: ranks of all rows that two of them share."""
    found = {name: rows for name in [*MODELS, ENCODER] if (rows := rows_of(name))}
    body = []
    for one, other in itertools.combinations(found, 2):
        names = [
            name
            for name, row in found[one].items()
            if name in found[other] and row["family"] in ("ours", "control")
        ]
        ranks = [
            torch.tensor([found[model][name][COST.get(model, "kl")] for name in names])
            .argsort()
            .argsort()
            .double()
            for model in (one, other)
        ]
        correlation = torch.corrcoef(torch.stack(ranks))[0, 1].item()
        body.append([f"{one} and {other}", f"{len(names)}", f"{correlation:.3f}"])
    return markdown(["models", "rows", "correlation of ranks"], body)


def references() -> str:
    """The models that rows are compared with."""
    body = []
    for model in [*MODELS, ENCODER]:
        if not (rows := rows_of(model)):
            continue
        row = next(iter(rows.values()))
        perplexities = [row.get(f"{name}_perplexity") for name in ("stored", "reference")]
        body.append(
            [
                model,
                *(f"{value:.2f}" if value else "in float32" for value in perplexities),
                f"{row['scored_tokens']:,}",
                f"{row['calibration_tokens']:,}",
            ]
        )
    header = ["model", "perplexity as stored", "dithered", "tokens scored", "tokens calibrated on"]
    return markdown(header, body)


def every_row(model: str) -> str:
    """All rows of a model."""
    rows, cost = rows_of(model), COST.get(model, "kl")
    body = []
    for name, row in rows.items():
        predicted = row.get(f"predicted_{cost}")
        name += " †" if is_older(row) else ""
        cells = [name, f"{row['bits_per_weight']:.3f}", with_error(row, cost)]
        cells.append(above(row, cost, rows[FREE]))
        cells.append(f"{predicted:.4f}" if predicted else "")
        if model == ENCODER:
            cells += [f"{row['neighbours']:.2%}", f"{row['nearest']:.1%}", f"{row['article']:.1%}"]
        else:
            cells += [f"{row['perplexity']:.3f}", f"{row['same_token']:.2%}"]
        body.append([*cells, f"{row['output_error']:.5f}"])
    said = {"kl": "KL", "distance": "1 - cosine"}[cost]
    seen = ["perplexity", "same token"]
    if model == ENCODER:
        seen = ["10 nearest kept", "nearest kept", "nearest of the same article"]
    header = ["row", "bits", said, "above the default's", "predicted", *seen, "error of outputs"]
    return f"{markdown(header, body)}\n\n{source([model], '../../')}"


def picture(path: Path) -> None:
    """KL over bits: ours as loaded and calibrated, and the controls."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = rows_of("SmolLM2-135M")
    figure, axes = pyplot.subplots(figsize=(8, 4.6), layout="constrained")
    lines = {
        "ours, as loaded": ("", "o-", "tab:blue"),
        "ours, factors of channels": (", scales text", "s-", "tab:green"),
        "ours, calibrated": (", scales text, rounding", "D-", "tab:red"),
    }
    for label, (suffix, style, color) in lines.items():
        points = []
        for bits in (3, 4):
            names = [f"{bits} bit, block 128{sub}{suffix}" for sub in ("", ", sub 32", ", sub 16")]
            points += [rows[name] for name in names]
        x, y = ([row[key] for row in points] for key in ("bits_per_weight", "kl"))
        axes.plot(x, y, style, color=color, ms=5, lw=1, label=label)
    for name, row in rows.items():
        if row["family"] != "control" or row["bits_per_weight"] > 5:
            continue
        face = "black" if row["needs_text"] else "white"
        axes.plot(row["bits_per_weight"], row["kl"], "k^", mfc=face, ms=6)
        axes.annotate(
            name,
            (row["bits_per_weight"], row["kl"]),
            (6, 3),
            textcoords="offset points",
            fontsize=7,
        )
    axes.plot([], [], "k^", mfc="white", label="others, no text needed")
    axes.plot([], [], "k^", label="others, with a text")
    axes.set_yscale("log")
    axes.set_xlim(3.05, 5.15)
    axes.set_xlabel("bits per weight, scales included")
    axes.set_ylabel("KL divergence from the reference, nats per token")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    axes.set_title("SmolLM2-135M, dithered reference", fontsize=10)
    name = file_name("weights", MODELS["SmolLM2-135M"])
    digest = hashlib.sha256((RESULTS / f"{name}.json").read_bytes()).hexdigest()
    figure.savefig(path, dpi=110, metadata={"Software": None, "Source": digest})
    pyplot.close(figure)


PICTURE = "docs/pictures/weights.png"
TABLES: dict[str, Callable[[], str]] = {
    "weight quality": overview,
    "weight references": references,
    "weights SmolLM2": lambda: every_row("SmolLM2-135M"),
    "weights Gemma": lambda: every_row("Gemma-3-270M"),
    "weights MiniLM": lambda: every_row(ENCODER),
    "weights on an encoder": on_the_encoder,
    "weights agreement": agreement,
}
PAGES = {
    "docs/weights.md": ["weight quality", "weights on an encoder"],
    "docs/measurements/weights.md": [
        "weight references",
        "weights SmolLM2",
        "weights Gemma",
        "weights MiniLM",
        "weights agreement",
    ],
}
