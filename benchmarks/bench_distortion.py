"""Distortion: random unit vectors after encode and decode, and inner products with them.

The paper's quantiser (one step, scale mode "norm") stands beside its expected error, the integral
over the exact marginal (codebook.distortion). The step search with 8 candidates and a least-squares
scale (scale mode "mse", the default for values) has no closed form; its gain over the paper's
quantiser is shown instead. The same search with the scale mode of keys ("unbiased"), and the
paper's second quantiser, which spends a bit of each coordinate on a sketch (paper.py), give
unbiased inner products. The entries of a row:

    measured  the mean squared error of a vector
    inner     the mean squared error of its inner product with random unit queries, times the
              dimension; equal to `measured` but for chance, if errors have no preferred direction
    slope     estimated over true inner products, by least squares: 1 is unbiased
    expected  the theory's value of `measured`, or of `inner` in rows with a sketch; null where
              theory has none
"""

from __future__ import annotations

import math
from collections.abc import Callable

import common
import torch
from torch import Tensor

from torch_turboquant.codebook import Codebook, distortion
from torch_turboquant.paper import SKETCHES, TurboQuantMSE, TurboQuantProd

HEAD_DIMS = (64, 128, 256)
CODEBOOKS = [("lloyd", bits) for bits in (1, 2, 3, 4, 5)]
CODEBOOKS += [("uniform", bits) for bits in (2, 3, 4, 5, 8)]
SKETCH_BITS = (2, 3, 4, 5, 6)  # of them one for the sketch
BATCH = 20_000


def unit_vectors(count: int, d: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(count, d, generator=generator)
    return torch.nn.functional.normalize(x, dim=-1)


def measure(
    there_and_back: Callable[[Tensor], Tensor], d: int, vectors: int, device: str
) -> dict[str, float]:
    """The measured part of a row. Vectors and queries depend on nothing but the dimension."""
    generator, queries = (torch.Generator().manual_seed(seed) for seed in (d, 100_000 + d))
    error = inner = product = energy = 0.0
    for start in range(0, vectors, BATCH):
        count = min(BATCH, vectors - start)
        x = unit_vectors(count, d, generator).to(device)
        q = unit_vectors(count, d, queries).to(device)
        y = there_and_back(x)
        true, found = ((q * z).sum(-1).double() for z in (x, y))
        error += (y - x).square().sum(-1).double().sum().item()
        inner += d * (found - true).square().sum().item()
        product += (found * true).sum().item()
        energy += true.square().sum().item()
    return {"measured": error / vectors, "inner": inner / vectors, "slope": product / energy}


def codes(
    d: int, book: tuple[str, int], search: int, scale_mode: str, device: str
) -> Callable[[Tensor], Tensor]:
    grid, bits = book
    made = TurboQuantMSE(d, bits, grid=grid, search=search, scale_mode=scale_mode, device=device)
    return lambda x: made.dequantize(made.quantize(x))


def two_stages(d: int, bits: int, sketch: str, device: str) -> Callable[[Tensor], Tensor]:
    made = TurboQuantProd(d, bits, sketch=sketch, device=device)
    return lambda x: made.dequantize(made.quantize(x))


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--vectors", type=int, default=100_000, help="default: %(default)s")
    arguments = options.parse_args()
    device, rows = arguments.device, []
    for d in HEAD_DIMS:
        print(f"\nhead_dim {d}: mean squared error of {arguments.vectors} unit vectors")
        print("grid     bits      paper     theory   ratio   search 8   gain   slope, unbiased")
        for book in CODEBOOKS:
            expected = distortion(Codebook.make(d, book[1], book[0]).values, d)
            found = {}
            for search, mode in ((1, "norm"), (8, "mse"), (8, "unbiased")):
                back = codes(d, book, search, mode, device)
                found[mode] = measure(back, d, arguments.vectors, device)
                about = {"head_dim": d, "bits": book[1], "grid": book[0], "sketch": None}
                about |= {"vectors": arguments.vectors, "search": search, "scale_mode": mode}
                about["expected"] = expected if mode == "norm" else None
                rows.append(about | found[mode])
            paper, searched = found["norm"]["measured"], found["mse"]["measured"]
            print(
                f"{book[0]:8} {book[1]:4} {paper:10.6f} {expected:10.6f} {paper / expected:7.4f} "
                f"{searched:10.6f} {1 - searched / paper:6.1%} {found['norm']['slope']:7.4f} "
                f"{found['unbiased']['slope']:9.4f}"
            )
        print("sketch   bits  inner x d    theory   ratio   slope")
        for sketch in SKETCHES:
            # (of the sketch's own error, see paper.TurboQuantProd)
            factor = math.pi / 2 - (1 / d if sketch == "gaussian" else 1 + 1 / (2 * d))
            for bits in SKETCH_BITS:
                first = distortion(Codebook.make(d, bits - 1, "lloyd").values, d)
                row = measure(two_stages(d, bits, sketch, device), d, arguments.vectors, device)
                about = {"head_dim": d, "bits": bits, "grid": "lloyd", "sketch": sketch}
                about |= {"vectors": arguments.vectors, "search": 1, "scale_mode": "norm"}
                rows.append(about | {"expected": factor * first} | row)
                print(
                    f"{sketch:8} {bits:4} {row['inner']:10.6f} {factor * first:10.6f} "
                    f"{row['inner'] / (factor * first):7.4f} {row['slope']:7.4f}"
                )
    common.write_rows("distortion", rows, arguments)


if __name__ == "__main__":
    main()
