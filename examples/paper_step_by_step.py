"""The paper step by step: why a rotation, which codebook, what is biased, and what QJL repairs.

    python examples/paper_step_by_step.py [--out pictures]

Four steps of TurboQuant (arXiv:2504.19874), each measured, each with a picture:

1. After a random rotation every channel of a vector looks alike, whatever the vector was.
2. So one scalar codebook serves all: Lloyd-Max for the known distribution of a channel.
3. Codes of least error shrink inner products: their mean is too small.
4. A bit for the signs of a random projection of the residual (QJL) makes them unbiased, at the
   price of a larger spread. A fitted scale makes them unbiased too, at hardly any price.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

import torch_turboquant as tq
from torch_turboquant.codebook import distortion

D, VECTORS, PAIRS = 128, 4_000, 20_000


def step_1_rotation(axes) -> dict[str, float]:
    """Vectors with a few channels that dwarf the rest, before and after the rotation."""
    x = torch.randn(VECTORS, D)
    x[:, ::32] *= 20
    rotated = tq.hadamard(x, tq.random_signs(D, seed=0))

    def spread(t: torch.Tensor) -> float:
        energy = t.square().mean(0)
        return (energy.max() / energy.min()).item()

    for t, label in ((x, "as it is"), (rotated, "rotated")):
        unit = t / t.square().mean(-1, keepdim=True).sqrt()
        axes.plot(unit.square().mean(0), label=f"{label}: x{spread(t):.1f}")
    axes.set(title="1. Energy of each channel", xlabel="channel", yscale="log")
    return {"spread before": spread(x), "spread after": spread(rotated)}


def step_2_codebook(axes) -> dict[str, float]:
    """The levels beside the distribution of a channel, and the error that they promise."""
    unit = torch.nn.functional.normalize(torch.randn(VECTORS, D), dim=-1)
    rotated = tq.hadamard(unit, tq.random_signs(D, seed=0)) * D**0.5
    axes.hist(rotated.flatten(), bins=200, density=True, color="lightgray")
    for level in tq.Codebook.make(D, 3).values:
        axes.axvline(level, color="tab:red", linewidth=0.8)
    axes.set(title="2. A rotated channel and 8 levels", xlabel="standard deviations", xlim=(-4, 4))
    found = {}
    for bits in (1, 2, 3, 4):
        quantizer = tq.TurboQuantMSE(D, bits)
        decoded = quantizer.dequantize(quantizer.quantize(unit))
        found[f"error at {bits} bits"] = (decoded - unit).square().sum(-1).mean().item()
        found[f"theory at {bits} bits"] = distortion(quantizer.codebook.values, D)
    return found


def slope_and_spread(estimate: torch.Tensor, true: torch.Tensor) -> tuple[float, float]:
    """How much of an inner product is left on average, and the error around that."""
    slope = ((estimate * true).sum() / true.square().sum()).item()
    return slope, (estimate - slope * true).std().item() * D**0.5


def step_3_and_4_inner_products(axes) -> dict[str, float]:
    """Pairs that share a part: estimated against true inner products, at 2 bits in all."""
    x = torch.nn.functional.normalize(torch.randn(PAIRS, D), dim=-1)
    y = torch.nn.functional.normalize(x + torch.randn(PAIRS, D) / D**0.5, dim=-1)
    true = (x * y).sum(-1)
    quantizers = {
        "least error": tq.TurboQuantMSE(D, 2),
        "1 bit + QJL": tq.TurboQuantProd(D, 2),
        "unbiased scale": tq.TurboQuantMSE(D, 2, scale_mode="unbiased"),
    }
    found = {}
    for name, quantizer in quantizers.items():
        keys = quantizer.quantize(x[:, None])
        estimate = quantizer.score(y[:, None], keys)[:, 0, 0]
        slope, spread = slope_and_spread(estimate, true)
        axes.hist(
            estimate / true,
            bins=100,
            range=(0.4, 1.6),
            histtype="step",
            density=True,
            label=f"{name}: mean {slope:.2f}",
        )
        found[f"slope, {name}"], found[f"spread, {name}"] = slope, spread
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(title="3, 4. Estimated over true inner product, 2 bits", xlabel="ratio")
    return found


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> dict[str, float]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="folder of the picture (default: that of temporary files)",
    )
    out = parser.parse_args(arguments).out
    torch.manual_seed(0)
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    found = {}
    steps = (step_1_rotation, step_2_codebook, step_3_and_4_inner_products)
    for step, part in zip(steps, axes, strict=True):
        numbers = step(part)
        found |= numbers
        print(step.__doc__)
        for name, number in numbers.items():
            print(f"    {name:<28}{number:9.4f}")
    axes[0].legend()
    axes[2].legend(loc="upper left")
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "paper_step_by_step.png", dpi=110)
    pyplot.close(figure)
    print(f"picture: {out / 'paper_step_by_step.png'}")
    return found


if __name__ == "__main__":
    main()
