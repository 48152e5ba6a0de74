"""Vectors of any kind in 1 to 8 bits per channel: embeddings, searched without decoding them.

    python examples/vector_compression.py [--device cuda]

A database of unit vectors in clusters is compressed once; queries then take inner products with
the codes. Shown for each width: what a vector takes, its squared error beside the one that theory
gives, and how many of the ten nearest vectors are among the ten best by compressed scores.
TurboQuantMSE has the least error, TurboQuantProd unbiased inner products (paper, Algorithms 1, 2).
"""

from __future__ import annotations

import argparse

import torch

import torch_turboquant as tq
from torch_turboquant.codebook import distortion

DIM, VECTORS, QUERIES, CLUSTERS = 256, 20_000, 200, 500


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> dict[str, tuple[float, float, float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args(arguments).device
    generator = torch.Generator().manual_seed(0)

    centers = torch.randn(CLUSTERS, DIM, generator=generator)
    members = torch.randint(CLUSTERS, (VECTORS,), generator=generator)
    noise = torch.randn(VECTORS, DIM, generator=generator)
    database = torch.nn.functional.normalize(centers[members] + 0.7 * noise, dim=-1).to(device)
    picked = torch.randint(VECTORS, (QUERIES,), generator=generator)
    shift = 2 * torch.randn(QUERIES, DIM, generator=generator) / DIM**0.5
    queries = database[picked.to(device)] + shift.to(device)
    nearest = (queries @ database.T).topk(10).indices

    quantizers = {
        f"MSE, {bits} bits": tq.TurboQuantMSE(DIM, bits, device=device) for bits in (1, 2, 3, 4, 8)
    }
    quantizers["Prod, 4 bits"] = tq.TurboQuantProd(DIM, 4, device=device)
    found = {}
    print("                 bytes   of float32   squared error   by theory   nearest found")
    for name, quantizer in quantizers.items():
        packed = quantizer.quantize(database)
        size = sum(part.nbytes for part in packed) / VECTORS
        error = (quantizer.dequantize(packed) - database).square().sum(-1).mean().item()
        best = quantizer.score(queries, packed).topk(10).indices
        recall = (best[:, None] == nearest[..., None]).any(-1).float().mean().item()
        theory = float("nan")
        if isinstance(quantizer, tq.TurboQuantMSE):
            theory = distortion(quantizer.codebook.values, DIM)
        expected = "" if theory != theory else f"{theory:.5f}"
        print(
            f"{name:<15}{size:7.0f}{4 * DIM / size:11.1f}x{error:16.5f}{expected:>12}"
            f"{100 * recall:15.1f}%"
        )
        found[name] = (error, theory, recall)
    return found


if __name__ == "__main__":
    main()
