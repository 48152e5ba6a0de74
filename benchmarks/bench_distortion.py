"""Distortion: the mean squared error of random unit vectors after encode and decode.

Beside the paper's quantiser (one step, scale mode "norm") stands what theory expects of it, the
integral over the exact marginal (codebook.distortion). The step search with 8 candidates and a
least-squares scale (scale mode "mse", the default for values) has no closed form; its gain over the
paper's quantiser is shown instead.
"""

from __future__ import annotations

import common
import torch

from torch_turboquant import Codebook, decode, encode, random_signs
from torch_turboquant.codebook import distortion

HEAD_DIMS = (64, 128, 256)
CODEBOOKS = [("lloyd", bits) for bits in (1, 2, 3, 4, 5)]
CODEBOOKS += [("uniform", bits) for bits in (2, 3, 4, 5, 8)]
BATCH = 20_000


def unit_vectors(count: int, d: int, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(count, d, generator=generator)
    return torch.nn.functional.normalize(x, dim=-1)


def measure(book: Codebook, search: int, scale_mode: str, vectors: int, device: str) -> float:
    """Mean total squared error of unit vectors; the vectors depend on the dimension only."""
    signs = random_signs(book.head_dim, seed=0).to(device)
    levels, steps = book.levels_tensor(device), book.steps_tensor(search, device)
    generator = torch.Generator().manual_seed(book.head_dim)
    total = 0.0
    for start in range(0, vectors, BATCH):
        count = min(BATCH, vectors - start)
        x = unit_vectors(count, book.head_dim, generator).to(device)
        packed, scale = encode(x, signs, levels, steps, book.bits, scale_mode)
        y = decode(packed, scale, signs, levels, book.bits)
        total += (y - x).square().sum(-1).double().sum().item()
    return total / vectors


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--vectors", type=int, default=100_000, help="default: %(default)s")
    arguments = options.parse_args()
    rows = []
    for d in HEAD_DIMS:
        print(f"\nhead_dim {d}: mean squared error of {arguments.vectors} unit vectors")
        print("grid     bits      paper     theory   ratio   search 8   gain")
        for grid, bits in CODEBOOKS:
            book = Codebook.make(d, bits, grid)
            where = (arguments.vectors, arguments.device)
            expected = distortion(book.values, d)
            paper = measure(book, 1, "norm", *where)
            searched = measure(book, 8, "mse", *where)
            print(
                f"{grid:8} {bits:4} {paper:10.6f} {expected:10.6f} {paper / expected:7.4f} "
                f"{searched:10.6f} {1 - searched / paper:6.1%}"
            )
            row = {"head_dim": d, "bits": bits, "grid": grid, "vectors": arguments.vectors}
            rows.append(
                {**row, "search": 1, "scale_mode": "norm", "measured": paper, "expected": expected}
            )
            rows.append(
                {**row, "search": 8, "scale_mode": "mse", "measured": searched, "expected": None}
            )
    common.write_rows("distortion", rows, arguments)


if __name__ == "__main__":
    main()
