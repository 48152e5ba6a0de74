"""Writes tests/data/*.bin: packed bytes of fixed inputs, as the plain-PyTorch references make them.

The files pin format version 1. They change only with the format version: run this script then
(`.venv/bin/python -I tests/make_golden.py`), with the new package installed.

Inputs come from the counter-based words of signs.py, not from a framework's generator, and are
small multiples of 2^-10, so that every device and release makes the same ones.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import torch_turboquant as tt
from torch_turboquant.ops.cache import cache_store_reference
from torch_turboquant.ops.codec import encode_reference
from torch_turboquant.signs import random_words

DATA = Path(__file__).parent / "data"

# name, head_dim, page_size, tokens: every width of keys and values; both kinds of partial groups
RECORDS = (
    ("k8v8", 64, 16, 16),
    ("k8v4", 128, 16, 16),
    ("k5v4u", 80, 32, 32),
    ("k5v3u", 112, 64, 64),
    ("k4v4", 128, 32, 32),
    ("k4v4u", 96, 16, 16),
    ("k4v3", 80, 16, 16),
    ("k4v2", 48, 16, 16),
    ("k3v3", 128, 32, 32),
    ("k3v3", 144, 16, 11),
    ("k3v2", 80, 128, 128),
    ("k2v2", 192, 16, 16),
)
DENSE_DIMS = (6, 80, 128)
DENSE_CODEBOOKS = (
    *((bits, "lloyd") for bits in range(1, 6)),
    *((bits, "uniform") for bits in (2, 3, 4, 5, 8)),
)
KV_HEADS = 2


def numbers(count: int, stream: int) -> torch.Tensor:
    """float32 [count]: sums of three uniform integers, roughly bell-shaped, times 2^-10."""
    words = random_words(count, seed=2504_19874, layer=stream)
    parts = [(words >> np.uint64(shift)) & np.uint64(0x3FF) for shift in (0, 20, 40)]
    total = sum(part.astype(np.int64) for part in parts) - 3 * 511
    return torch.from_numpy(total.astype(np.float32) * 2.0**-10)


def record_case(name: str, head_dim: int, page_size: int, tokens: int):
    """(config, tables, k, v, slots): one page, filled backwards."""
    # whatever presets choose: these bytes stay
    config = tt.preset(name, head_dim, page_size=page_size, seed=7, value_scale_mode="mse")
    shape = (tokens, KV_HEADS, head_dim)
    count = tokens * KV_HEADS * head_dim
    k, v = numbers(count, 1).view(shape).clone(), numbers(count, 2).view(shape).clone()
    k[3] *= 1000.0
    v[4, 0] = 0.0
    k[5, 1, 2] = torch.inf
    center = numbers(KV_HEADS * head_dim, 3).view(KV_HEADS, head_dim)
    tables = tt.make_tables(config, layer=3, center=center)
    return config, tables, k, v, torch.arange(tokens).flip(0)


def record_file(name: str, head_dim: int, page_size: int, tokens: int) -> Path:
    return DATA / f"record_{name}_d{head_dim}_page{page_size}.bin"


def dense_case(d: int, bits: int, grid: str):
    """(x, signs, levels, steps) of encode; 5 vectors."""
    book = tt.Codebook.make(d, bits, grid)
    x = numbers(5 * d, 4).view(5, d)
    return x, tt.random_signs(d, 7), book.levels_tensor(), book.steps_tensor(8)


def dense_bytes(encode) -> bytes:
    """Packed rows and scales of all dense cases, in order, made by encode or its reference."""
    parts = []
    for d in DENSE_DIMS:
        for bits, grid in DENSE_CODEBOOKS:
            for mode in tt.SCALE_MODES:
                packed, scale = encode(*dense_case(d, bits, grid), bits, mode)
                parts += [packed.numpy().tobytes(), scale.numpy().tobytes()]
    return b"".join(parts)


def main() -> None:
    DATA.mkdir(exist_ok=True)
    for case in RECORDS:
        config, tables, k, v, slots = record_case(*case)
        cache = tt.allocate_cache(config, 1, KV_HEADS)
        cache_store_reference(k, v, cache, slots, config, tables)
        record_file(*case).write_bytes(cache.numpy().tobytes())
    (DATA / "dense_rows.bin").write_bytes(dense_bytes(encode_reference))


if __name__ == "__main__":
    main()
