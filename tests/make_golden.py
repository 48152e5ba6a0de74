"""Writes tests/data/*.bin: packed bytes of fixed inputs, as the plain-PyTorch references make them.

The files pin format version 1: what is written (record_*, dense_rows, constants), and what is read
from bytes that nothing writes (reader_*: the bytes, then keys and values as float32). They change
only with the format version: run this script then (`.venv/bin/python -I tests/make_golden.py`),
with the new package installed.

Inputs come from the counter-based words of signs.py, not from a framework's generator, and are
small multiples of 2^-10, so that every device and release makes the same ones.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import torch_turboquant as tt
from torch_turboquant.format import unused_bits, write_token
from torch_turboquant.ops.cache import cache_load_reference, cache_store_reference
from torch_turboquant.ops.codec import decode_reference, encode_reference
from torch_turboquant.ops.linear_reference import weight_encode_reference
from torch_turboquant.ops.mla import mla_store_reference
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

# name, head_dim: records that no store writes. Every unused bit is 1, every byte of an 8-bit code
# is there once, 0x80 too.
READERS = (
    ("k5v4u", 16),
    ("k5v3u", 112),
    ("k3v3", 16),
    ("k3v3", 80),
    ("k3v3", 96),
    ("k8v8", 16),
)
# preset, latent_dim, rope_dim, dtype of the raw channels, page_size, transform
LATENTS = (
    ("k8", 128, 0, "bfloat16", 32, True),
    ("k5u", 512, 64, "bfloat16", 32, True),
    ("k4", 256, 32, "float16", 64, True),
    ("k4u", 128, 64, "bfloat16", 128, False),
    ("k3", 256, 32, "bfloat16", 32, True),
)

# bits, grid, sub, rows, channels
WEIGHTS = (
    (4, "lloyd", 32, 20, 128),
    (4, "lloyd", 0, 3, 256),
    (4, "uniform", 32, 16, 192),
    (8, "uniform", 0, 17, 128),
)

READER_TOKENS = 16
READER_ROWS = ((2, 1), (2, 3), (6, 5), (12, 1), (20, 5), (16, 8))  # d, bits

# The sizes for which float32(32 / sqrt(d)), rounded once, is another number than 32 divided by a
# root in float32. The vector (1 + n * 2^-18, 0, 0, ..) then has another scale: with the first n in
# the mode "norm", with the second in "mse".
CONSTANTS = {
    6: (127840, 6336),
    18: (16256, 14928),
    24: (114016, 4336),
    28: (4080, 203376),
    72: (29104, 130576),
    96: (39920, 34352),
    112: (226457, 176384),
    288: (180944, 260736),
    384: (80432, 34352),
    448: (70288, 176384),
    1152: (107744, 260736),
    1536: (80416, 34352),
    1792: (98928, 176384),
}


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


def latent_case(
    name: str, latent_dim: int, rope_dim: int, dtype: str, page_size: int, transform: bool
):
    """(config, tables, latent, rope, slots): one page, filled backwards."""
    config = tt.latent_preset(
        name,
        latent_dim,
        rope_dim,
        page_size=page_size,
        seed=7,
        scale_mode="mse",
        rope_dtype=getattr(torch, dtype),
        transform=transform,
    )
    latent = numbers(page_size * latent_dim, 9).view(page_size, latent_dim).clone()
    rope = numbers(page_size * rope_dim, 10).view(page_size, rope_dim)
    latent[3] *= 1000.0
    latent[4] = 0.0
    latent[5, 2] = torch.inf
    center = numbers(latent_dim, 11)
    if latent_dim == 256:  # powers of two, so that their inverses are exact
        scale = 2.0 ** (torch.arange(latent_dim) % 3 - 1)
        center = torch.stack([center, scale, 1 / scale])
    tables = tt.make_latent_tables(config, layer=3, center=center)
    return config, tables, latent, rope, torch.arange(page_size).flip(0)


def latent_file(
    name: str, latent_dim: int, rope_dim: int, dtype: str, page_size: int, transform: bool
) -> Path:
    kind = "" if transform else "_plain"
    return DATA / f"latent_{name}_d{latent_dim}_rope{rope_dim}_{dtype}_page{page_size}{kind}.bin"


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


def reader_record(name: str, head_dim: int):
    """(config, tables, record uint8 [record_bytes])."""
    config = tt.preset(name, head_dim, page_size=READER_TOKENS, seed=7)
    record = config.record
    shape = (READER_TOKENS, head_dim)
    count = READER_TOKENS * head_dim
    if name == "k8v8":
        codes = np.arange(count).astype(np.uint8).reshape(shape)
        keys, values = codes, codes[::-1]
    else:
        words = random_words(count, seed=2504_19874, layer=5)
        codes = words.astype(np.int64).reshape(shape)
        keys = (codes & (1 << config.key_bits) - 1).astype(np.uint8)
        values = (codes >> 8 & (1 << config.value_bits) - 1).astype(np.uint8)
    scales = numbers(2 * READER_TOKENS, 6).numpy().astype(np.float16).reshape(2, -1)
    data = np.zeros(config.record_bytes, dtype=np.uint8)
    for token in range(READER_TOKENS):
        write_token(record, data, token, keys[token], values[token], *scales[:, token])
    return config, tt.make_tables(config, layer=3), data | unused_bits(record)


def reader_file(name: str, head_dim: int) -> Path:
    return DATA / f"reader_{name}_d{head_dim}_page{READER_TOKENS}.bin"


def load_arguments(config: tt.CacheConfig, tables: tt.CacheTables, device: str = "cpu"):
    """Arguments of cache_load after the cache: a sequence that fills page 0."""
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    lens = torch.full((1,), READER_TOKENS, dtype=torch.int32, device=device)
    return table, lens, config, tables, READER_TOKENS, torch.float32


def weight_case(bits: int, grid: str, sub: int, n: int, k: int):
    """(w, signs, levels, steps, bits, sub, channel_scale) of weight_encode."""
    weight_format = tt.WeightFormat(bits, grid, sub)
    w = numbers(n * k, 9).view(n, k).clone()
    w[1] *= 1000.0
    w[2, :64] = 0.0
    w[0, 5] = torch.inf
    group = weight_format.group_of(k)
    constants = (f(group) for f in (weight_format.signs, weight_format.levels, weight_format.steps))
    return w, *constants, bits, sub, 1 + numbers(k, 10).abs()


def weight_file(bits: int, grid: str, sub: int, n: int, k: int) -> Path:
    return DATA / f"weight_{grid}{bits}_sub{sub}_{n}x{k}.bin"


def reader_row_case(d: int, bits: int):
    """(packed, scale, signs, levels, bits) of decode; unused bits are 1."""
    rows, width = 32, (d * bits + 7) // 8
    words = random_words(rows * width, seed=2504_19874, layer=7).astype(np.uint8)
    if bits == 8:
        words[:] = np.arange(96, 96 + rows * width)  # 0x80 is among them
    packed = words.reshape(rows, width)
    packed[:, -1] |= 0xFF << (d * bits - 1) % 8 + 1 & 0xFF
    scale = numbers(rows, 8).half()
    levels = tt.Codebook.make(d, bits).levels_tensor()
    return torch.from_numpy(packed), scale, tt.random_signs(d, 7), levels, bits


def reader_row_bytes(decode) -> bytes:
    """Rows, scales and decoded vectors of all cases, made by decode or its reference."""
    parts = []
    for case in READER_ROWS:
        packed, scale, *others = reader_row_case(*case)
        parts += [packed, scale, decode(packed, scale, *others)]
    return b"".join(part.numpy().tobytes() for part in parts)


def constant_bytes(encode) -> bytes:
    """Packed rows and scales of CONSTANTS, made by encode or its reference."""
    parts = []
    for d, both in CONSTANTS.items():
        book = tt.Codebook.make(d, 4)
        tables = tt.random_signs(d, 7), book.levels_tensor(), book.steps_tensor(1)
        for mode, n in zip(("norm", "mse"), both, strict=True):
            x = torch.zeros(1, d)
            x[0, 0] = 1 + n * 2.0**-18
            packed, scale = encode(x, *tables, 4, mode)
            parts += [packed.numpy().tobytes(), scale.numpy().tobytes()]
    return b"".join(parts)


def main() -> None:
    DATA.mkdir(exist_ok=True)
    for case in RECORDS:
        config, tables, k, v, slots = record_case(*case)
        cache = tt.allocate_cache(config, 1, KV_HEADS)
        cache_store_reference(k, v, cache, slots, config, tables)
        record_file(*case).write_bytes(cache.numpy().tobytes())
    for case in LATENTS:
        config, tables, latent, rope, slots = latent_case(*case)
        cache = tt.allocate_latent_cache(config, 1)
        mla_store_reference(latent, rope, cache, slots, config, tables)
        latent_file(*case).write_bytes(cache.numpy().tobytes())
    for case in WEIGHTS:
        packed = weight_encode_reference(*weight_case(*case))
        weight_file(*case).write_bytes(packed.numpy().tobytes())
    (DATA / "dense_rows.bin").write_bytes(dense_bytes(encode_reference))
    for case in READERS:
        config, tables, data = reader_record(*case)
        cache = torch.from_numpy(data)[None, None]
        loaded = cache_load_reference(cache, *load_arguments(config, tables))
        parts = [part.numpy().tobytes() for part in (cache, *loaded)]
        reader_file(*case).write_bytes(b"".join(parts))
    (DATA / "reader_rows.bin").write_bytes(reader_row_bytes(decode_reference))
    (DATA / "constants.bin").write_bytes(constant_bytes(encode_reference))


if __name__ == "__main__":
    main()
