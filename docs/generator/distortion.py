"""Errors of vectors and of inner products beside the theory's: bench_distortion."""

from __future__ import annotations

import math
from pathlib import Path

from common import Row, markdown

from generator import results
from generator.results import digest

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
        for row in results.read_rows("distortion")
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
