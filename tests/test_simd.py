"""The CPU kernels at every level that this processor runs: the same bytes as in plain C++, whatever
the shapes, values and number of threads; and what keeps a level's instructions to itself.

Inputs are random bytes and hard values, at odd addresses and strides and where memory ends. What is
right is not asked here: the other tests do, and run at one level with `pytest --cpu-level avx2`.
"""

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import torch_turboquant as tt
from tests.helpers import FLOATS, assert_same_bytes, at_the_end_of_memory, generator, randn
from torch_turboquant import _library
from torch_turboquant.config import CacheConfig
from torch_turboquant.format import PAGE_SIZES, dense_row_bytes, valid_head_dim, valid_vector_dim

ROOT = Path(__file__).resolve().parents[1]
OBJECTS = ROOT / "build" / "native" / "csrc"
LEVELS = _library.cpu_levels()

VECTOR_DIMS = [d for d in range(2, 4097) if valid_vector_dim(d)]
PAGE_DIMS = [d for d in range(16, 1025) if valid_head_dim(d)]
SIZES = (1.0, 1.0, 1.0, 1.0, 1e-30, 1e30, 1e-42, 3e38, 0.0, -0.0)


# ---- values


def vectors(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., d]: random rows, some of them extreme, zero, one-hot, constant, full of ties, or with a
    NaN or an infinity."""
    d, rows = shape[-1], math.prod(shape[:-1])
    g = generator(seed)
    x = torch.randn(rows, d, generator=g)
    x *= torch.tensor(SIZES)[torch.randint(len(SIZES), (rows, 1), generator=g)]
    place = torch.randint(d, (rows,), generator=g)
    for r, kind in enumerate(torch.randint(24, (rows,), generator=g).tolist()):
        if kind < 3:
            x[r, place[r]] = (torch.nan, torch.inf, -torch.inf)[kind]
        elif kind == 3:
            x[r], x[r, place[r]] = 0, -1.5
        elif kind == 4:
            x[r] = x[r, 0].clone()
        elif kind == 5:
            x[r] = (2 * x[r]).round() / 2
    return x.reshape(shape).to(dtype)


def halves(*shape: int, seed: int, finite: bool = False) -> Tensor:
    """float16 scales, one in twenty a zero, a subnormal, large, negative, an infinity or a NaN."""
    g = generator(seed)
    x = torch.rand(shape, generator=g)
    special = torch.tensor([0, 1e-7, 65504, -1] + [torch.inf, torch.nan] * (not finite))
    chosen = special[torch.randint(len(special), shape, generator=g)]
    return torch.where(torch.rand(shape, generator=g) < 0.05, chosen, x).half()


def code_bytes(*shape: int, bits: int, seed: int) -> Tensor:
    """Random bytes; 0x80, which the 8-bit grid never writes, is left out there."""
    x = torch.randint(256, shape, generator=generator(seed), dtype=torch.uint8)
    return torch.where(x == 0x80, 0x81, x) if bits == 8 else x


def random_levels(bits: int, seed: int) -> Tensor:
    """int8 [2^bits], increasing and symmetric."""
    upper = 1 + torch.randperm(127, generator=generator(seed))[: 2 ** (bits - 1)].sort().values
    return last(torch.cat([-upper.flip(0), upper]).to(torch.int8))


def random_steps(count: int, seed: int) -> Tensor:
    """float32 [count], increasing, around the step that fits levels up to 127."""
    steps = torch.rand(count, generator=generator(seed)).sort().values + 0.1 * torch.arange(count)
    return last((steps + 0.05) * (3 / 127))


def signs(d: int, seed: int) -> Tensor:
    return last(tt.random_signs(d, seed))


def last(x: Tensor) -> Tensor:
    """x where memory ends: to read or write behind it would end the process."""
    return at_the_end_of_memory(x) if x.numel() else x


def somewhere(x: Tensor, offset: int, gap: int = 0) -> Tensor:
    """x with its rows `gap` elements apart, `offset` elements before memory ends."""
    d = x.shape[-1]
    rows = x.numel() // d if d else 0
    if rows == 0:
        return x
    memory = last(torch.zeros(rows * (d + gap) - gap + offset, dtype=x.dtype))
    strides = [math.prod(x.shape[i + 1 : -1]) * (d + gap) for i in range(x.dim() - 1)]
    return memory.as_strided(x.shape, (*strides, 1)).copy_(x)


# ---- calls: each draws the arguments of one op and returns it as a function without arguments


COUNTS = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 63, 64, 65, 70)


def rows_of(draw, d: int, counts: tuple[int, ...] = COUNTS) -> int:
    most = max(3, 20000 // d)
    return draw(st.sampled_from([n for n in counts if n <= most]), "rows")


def vector_input(draw, d: int) -> tuple[Tensor, int]:
    """x [rows, d], and a seed for what goes with it."""
    seed, dtype = draw(st.integers(0, 999), "seed"), draw(st.sampled_from(FLOATS), "dtype")
    x = vectors(rows_of(draw, d), d, seed=seed, dtype=dtype)
    return somewhere(x, draw(st.integers(0, 3), "offset"), draw(st.integers(0, 3), "gap")), seed


def codebook(draw, seed: int) -> tuple[int, Tensor | None]:
    bits = draw(st.sampled_from((1, 2, 3, 4, 5, 8)), "bits")
    uniform = bits == 8 or (bits > 1 and draw(st.booleans(), "uniform"))
    return bits, None if uniform else random_levels(bits, seed)


def hadamard_call(draw):
    d = draw(st.sampled_from(VECTOR_DIMS), "d")
    x, seed = vector_input(draw, d)
    inverse = draw(st.booleans(), "inverse")
    return lambda: (tt.hadamard(x, signs(d, seed), inverse),)


def pack_call(draw):
    bits, d = draw(st.integers(1, 8), "bits"), draw(st.integers(1, 300), "d")
    seed, rows = draw(st.integers(0, 999), "seed"), rows_of(draw, d)
    codes = torch.randint(2**bits, (rows, d), generator=generator(seed), dtype=torch.uint8)
    codes = somewhere(codes, draw(st.integers(0, 3), "offset"))
    packed = last(code_bytes(rows, dense_row_bytes(d, bits), bits=bits, seed=seed))
    return lambda: (tt.pack(codes, bits), tt.unpack(packed, bits, d))


def encode_call(draw):
    d = draw(st.sampled_from(VECTOR_DIMS), "d")
    x, seed = vector_input(draw, d)
    bits, levels = codebook(draw, seed)
    count = draw(st.sampled_from((1, 2, 3, 8, 64)), "steps")
    steps = random_steps(count, seed)
    mode = draw(st.sampled_from(list(tt.SCALE_MODES)), "mode")
    center = last(3 * randn(d, seed=seed)) if draw(st.booleans(), "center") else None
    return lambda: tt.encode(x, signs(d, seed), levels, steps, bits, mode, center)


def dense_rows(draw, d: int, keys: int, seed: int):
    """(packed, scale, levels, bits)"""
    bits, levels = codebook(draw, seed)
    packed = code_bytes(keys, dense_row_bytes(d, bits), bits=bits, seed=seed)
    packed = somewhere(packed, draw(st.integers(0, 3), "offset of codes"))
    return packed, last(halves(keys, seed=seed)), levels, bits


def decode_call(draw):
    d = draw(st.sampled_from(VECTOR_DIMS), "d")
    seed, dtype = draw(st.integers(0, 999), "seed"), draw(st.sampled_from(FLOATS), "dtype")
    packed, scale, levels, bits = dense_rows(draw, d, rows_of(draw, d), seed)
    center = last(3 * randn(d, seed=seed)) if draw(st.booleans(), "center") else None
    return lambda: (tt.decode(packed, scale, signs(d, seed), levels, bits, center, dtype),)


def group_call(draw):
    group, bits = draw(st.sampled_from((32, 64)), "group"), draw(st.sampled_from((2, 4)), "bits")
    d = group * draw(st.integers(1, 5), "groups")
    x, seed = vector_input(draw, d)
    rows = x.shape[0]
    packed = last(code_bytes(rows, d * bits // 8, bits=bits, seed=seed))
    scale, zero = (last(halves(rows, d // group, seed=seed + i)) for i in range(2))

    def call():
        decoded = tt.group_decode(packed, scale, zero, group, bits, d, x.dtype)
        return *tt.group_encode(x, group, bits), decoded

    return call


def projection(draw, d: int, seed: int) -> Tensor:
    if d % 8 == 0 and draw(st.booleans(), "structured"):
        return signs(d, seed + 1)
    return last(tt.gaussian_projection(8 * draw(st.integers(1, 6), "eighth of m"), d, seed))


def sketch_call(draw):
    d = draw(st.sampled_from(VECTOR_DIMS), "d")
    x, seed = vector_input(draw, d)
    s = projection(draw, d, seed)
    return lambda: tt.qjl_sketch(x, s)


def score_call(draw):
    """score with and without a sketch, and the sketch's score alone."""
    d = draw(st.sampled_from(VECTOR_DIMS), "d")
    seed, dtype = draw(st.integers(0, 999), "seed"), draw(st.sampled_from(FLOATS), "dtype")
    batch, queries = draw(st.integers(1, 3), "batch"), draw(st.integers(0, 9), "queries")
    keys = rows_of(draw, d, (*COUNTS, 255, 256, 257, 600))
    packed, scale, levels, bits = dense_rows(draw, d, batch * keys, seed)
    packed, scale = packed.view(batch, keys, packed.shape[-1]), scale.view(batch, keys)
    q = vectors(batch, queries, d, seed=seed, dtype=dtype)
    q = somewhere(q, draw(st.integers(0, 3), "offset"), draw(st.integers(0, 3), "gap"))
    center = last(3 * randn(d, seed=seed)) if draw(st.booleans(), "center") else None
    s = projection(draw, d, seed)
    sign_bits = last(code_bytes(batch, keys, s.shape[0] // 8, bits=1, seed=seed))
    norm = last(vectors(batch, keys, 1, seed=seed)[..., 0].abs())
    sketch = (sign_bits, norm, s)
    arguments = (q, packed, scale, signs(d, seed), levels, bits, center)
    return lambda: (
        tt.score(*arguments),
        tt.score(*arguments, *sketch),
        tt.qjl_score(q, *sketch),
    )


def cache_config(draw, **extra) -> CacheConfig:
    d = draw(st.sampled_from(PAGE_DIMS[:-4] * 3 + PAGE_DIMS), "d")
    key_bits = draw(st.sampled_from((2, 3, 4, 5, 8)), "key bits")
    value_bits = draw(st.sampled_from((2, 3, 4, 8)), "value bits")
    return CacheConfig(
        d,
        key_bits,
        value_bits,
        *(draw(st.sampled_from((None, "uniform")), "grid") for _ in range(2)),
        page_size=draw(st.sampled_from(PAGE_SIZES), "page size"),
        **extra,
    )


def cache_tables(draw, config: CacheConfig, heads: int, seed: int, steps: int = 1):
    d = config.head_dim
    key_levels = None if config.key_grid == "uniform" else random_levels(config.key_bits, seed)
    value_levels = (
        None if config.value_grid == "uniform" else random_levels(config.value_bits, seed)
    )
    return tt.CacheTables(
        signs(d, seed),
        signs(d, seed + 1),
        key_levels,
        value_levels,
        random_steps(steps, seed),
        random_steps(steps, seed + 1),
        last(3 * randn(heads, d, seed=seed)) if draw(st.booleans(), "center") else None,
    )


def random_cache(config: CacheConfig, pages: int, heads: int, seed: int, finite=False) -> Tensor:
    """Pages of random codes, and scales of all kinds."""
    widest = max(config.key_bits, config.value_bits)
    cache = code_bytes(pages, heads, config.record_bytes, bits=widest, seed=seed)
    places = [config.record.key_scale(t) for t in range(config.page_size)]
    places += [config.record.value_scale(t) for t in range(config.page_size)]
    scale = halves(pages, heads, len(places), seed=seed, finite=finite) / 16
    scale = scale.view(torch.uint8).unflatten(-1, (-1, 2))
    for i in range(2):
        cache[..., torch.tensor(places) + i] = scale[..., i]
    return last(cache)


def int32(numbers) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32)


def starts(counts: list[int]) -> Tensor:
    return int32([sum(counts[:s]) for s in range(len(counts) + 1)])


def store_call(draw):
    config = cache_config(
        draw,
        key_scale_mode=draw(st.sampled_from(list(tt.SCALE_MODES)), "key mode"),
        value_scale_mode=draw(st.sampled_from(list(tt.SCALE_MODES)), "value mode"),
        sink_tokens=draw(st.integers(0, 3), "sinks"),
        recent_window=draw(st.integers(1, 9), "window"),
    )
    seed, dtype = draw(st.integers(0, 999), "seed"), draw(st.sampled_from(FLOATS), "dtype")
    heads, d = draw(st.integers(1, 3), "heads"), config.head_dim
    tables = cache_tables(draw, config, heads, seed, draw(st.sampled_from((1, 3, 8)), "steps"))
    counts = draw(st.lists(st.integers(0, max(1, min(40, 8000 // d))), min_size=1, max_size=3))
    tokens, pages = sum(counts), 3 + sum(counts) // config.page_size
    slots = torch.randperm(pages * config.page_size, generator=generator(seed))[:tokens]
    slots[torch.rand(tokens, generator=generator(seed)) < 0.1] = -1
    qkv = vectors(tokens, 2 * heads, d, seed=seed, dtype=dtype)
    qkv = somewhere(qkv, draw(st.integers(0, 3), "offset"), draw(st.integers(0, 3), "gap"))
    before = random_cache(config, pages, heads, seed)
    ring = tt.allocate_tail(config, len(counts) + 1, heads, dtype, max(1, *counts))
    table = torch.arange(pages, dtype=torch.int32)[None]
    length = min(draw(st.integers(0, 40), "loaded"), pages * config.page_size)
    g, room = generator(seed), pages * config.page_size
    shuffled = [torch.randperm(room, generator=g)[:20] for _ in range(2 * heads)]
    moves = [last(torch.stack(part)) for part in (shuffled[:heads], shuffled[heads:])]

    def call():
        cache, tail = last(before), tt.Tail(last(ring), torch.arange(len(counts)))
        tt.cache_store(
            qkv[:, :heads],
            qkv[:, heads:],
            cache,
            slots,
            config,
            tables,
            tail=tail,
            seq_lens=int32(counts),
            cu_seqlens_q=starts(counts),
        )
        k, v = tt.cache_load(before, table, int32([length]), config, tables, length, dtype)
        moved = last(before)
        tt.cache_move(moved, *moves, config)
        return cache, tail.ring, k, v, moved

    return call


def attention_call(draw):
    window, sinks = draw(st.integers(0, 20), "window"), draw(st.integers(0, 5), "sink tokens")
    config = cache_config(draw, sink_tokens=sinks, recent_window=window)
    seed, dtype = draw(st.integers(0, 999), "seed"), draw(st.sampled_from(FLOATS), "dtype")
    d, heads = config.head_dim, draw(st.integers(1, 2), "heads")
    group = draw(st.integers(1, 16), "group")
    long = d <= 128 and draw(st.sampled_from((False, False, True)), "long")
    span = st.integers(1900, 4200) if long else st.integers(0, 300)
    lengths = draw(st.lists(span, min_size=1, max_size=3), "lengths")
    most = 2 if long else 4096 // (d * group // 16 + 1)
    queries = st.sampled_from([n for n in (1, 2, 3, 5, 8, 16, 0) if n <= max(1, most)])
    counts = [min(n, draw(queries, "queries")) for n in lengths]
    finite = draw(st.booleans(), "finite")
    tables = cache_tables(draw, config, heads, seed)
    g = generator(seed)
    pages = 1 + sum(lengths) // config.page_size // 2  # fewer than needed: sequences share some
    need = [-(-n // config.page_size) for n in lengths]
    block_table = torch.randint(-(2**31), 0, (len(need), max(need) + 1), generator=g).int()
    for s, n in enumerate(need):
        block_table[s, :n] = torch.randint(pages, (n,), generator=g).int()
    cache = random_cache(config, pages, heads, seed, finite)
    q = vectors(sum(counts) + draw(st.integers(0, 2), "padding"), group * heads, d, seed=seed)
    offset, gap = draw(st.integers(0, 3), "offset"), draw(st.integers(0, 3), "gap")
    q = somewhere(q.to(dtype), offset, gap)
    max_q_len, tail = max(1, *counts), None
    if window + sinks > 0 and draw(st.booleans(), "tail"):
        seqs = len(lengths)
        ring = tt.allocate_tail(config, seqs + 1, heads, dtype, max_q_len)
        ring.copy_(randn(*ring.shape, seed=seed))
        ring[torch.rand(ring.shape[:-2], generator=g) < (0 if finite else 0.01)] = torch.nan
        valid = torch.stack(
            [
                torch.randint(sinks + 1, (seqs + 1,), generator=g),
                torch.randint(300, (seqs + 1,), generator=g),
            ],
            1,
        )
        slots = torch.randperm(seqs + 1, generator=g)[:seqs] - 1
        tail = tt.Tail(
            last(ring), last(slots), valid.int() if draw(st.booleans(), "valid") else None
        )
    options = {
        "softmax_scale": draw(st.sampled_from((None, 0.01, 1.0)), "softmax scale"),
        "sliding_window": draw(st.sampled_from((0, 0, 1, 17, 129, 200)), "sliding window"),
        "soft_cap": draw(st.sampled_from((0.0, 0.0, 0.5, 30.0)), "soft cap"),
        "cu_seqlens_q": last(starts(counts)),
        "max_q_len": max_q_len,
        "tail": tail,
    }
    sink = 2 * randn(group * heads, seed=seed) if draw(st.booleans(), "sink") else None
    of_cache = cache, last(block_table), last(int32(lengths)), config, tables

    def call():
        out, lse = tt.paged_attention(q, *of_cache, **options, sink_logits=sink)
        mass = last(torch.zeros(len(lengths), heads, max(lengths)))
        tt.paged_mass(q, lse, mass, *of_cache, **options)
        return out, lse, mass

    return call


def merge_call(draw):
    seed, d = draw(st.integers(0, 999), "seed"), draw(st.integers(1, 200), "d")
    rows, dtype = rows_of(draw, d, (*COUNTS, 200)), draw(st.sampled_from(FLOATS), "dtype")
    sides = []
    for side in range(2):
        lse = vectors(rows, 1, seed=seed + side)[:, 0].clamp(-1e3, 1e3)
        lse[torch.rand(rows, generator=generator(seed + side)) < 0.2] = -torch.inf
        sides += [last(vectors(rows, d, seed=seed + side, dtype=dtype)), last(lse)]
    return lambda: tt.merge_attention(*sides)


def latents_call(draw):
    config = tt.LatentConfig(
        draw(st.sampled_from((128, 256, 512)), "latent_dim"),
        draw(st.sampled_from((0, 32, 64)), "rope_dim"),
        draw(st.sampled_from((3, 4, 5, 8)), "bits"),
        page_size=draw(st.sampled_from((32, 64, 128)), "page size"),
        sink_tokens=draw(st.integers(0, 3), "sink tokens"),
        recent_window=draw(st.integers(1, 20), "window"),
        rope_dtype=draw(st.sampled_from((torch.bfloat16, torch.float16)), "rope dtype"),
        transform=draw(st.booleans(), "transform"),
    )
    seed, dtype = draw(st.integers(0, 999), "seed"), draw(st.sampled_from(FLOATS), "dtype")
    r, dr = config.latent_dim, config.rope_dim
    length, new = draw(st.integers(1, 200), "length"), draw(st.integers(1, 4), "new tokens")
    heads, rotated = draw(st.integers(1, 20), "heads"), draw(st.booleans(), "rotated")
    center = randn(r, seed=seed) if draw(st.booleans(), "center") else None
    tables = tt.make_latent_tables(config, seed, center=center)
    latent = last(vectors(length, r, seed=seed, dtype=dtype))
    rope = last(randn(length, dr, seed=seed, dtype=dtype))
    need = -(-length // config.page_size)
    table, lens = last(int32([*range(need)])[None].contiguous()), last(int32([length]))
    count = min(new, length)
    q = randn(count, heads, r, seed=seed, dtype=dtype), randn(count, heads, dr, seed=seed + 1)
    q = last(q[0]), last(q[1].to(dtype))

    def call():
        cache = tt.allocate_latent_cache(config, need)
        tail = tt.Tail(tt.allocate_latent_tail(config, 1, dtype, 4), torch.zeros(1).long())
        tt.mla_store(
            latent,
            rope,
            cache,
            torch.arange(length),
            config,
            tables,
            tail=tail,
            seq_lens=lens,
            cu_seqlens_q=starts([length]),
            rotated=rotated,
        )
        result = tt.mla_attention(
            *q,
            cache,
            table,
            lens,
            config,
            tables,
            softmax_scale=0.1,
            cu_seqlens_q=starts([count]),
            max_q_len=count,
            tail=tail,
            rotated=rotated,
        )
        loaded = tt.mla_load(cache, table, lens, config, tables, length, dtype)
        return [cache, tail.ring, *loaded, *result]

    return call


def weight_call(draw):
    """weight_encode, weight_decode and products, with all that a code can be."""
    bits, sub = draw(st.sampled_from(((4, 32), (4, 0), (8, 0))), "bits and sub")
    group = draw(st.sampled_from((64, 128)), "group")
    n, k = draw(st.sampled_from((1, 5, 16, 17, 70)), "n"), group * draw(st.integers(1, 3), "groups")
    seed, dtype = draw(st.integers(0, 999), "seed"), draw(st.sampled_from(FLOATS), "dtype")
    offset, gap = draw(st.integers(0, 3), "offset"), draw(st.integers(0, 3), "gap")
    w = somewhere(vectors(n, k, seed=seed, dtype=dtype), offset, gap)
    levels = None if bits == 8 or draw(st.booleans(), "uniform") else random_levels(bits, seed)
    steps = random_steps(draw(st.sampled_from((1, 2, 5)), "steps"), seed)
    scaled = last(1 + randn(k, seed=seed).abs()) if draw(st.booleans(), "scaled") else None
    rotation = signs(group, seed)
    codes = somewhere(code_bytes(n, k, bits=bits, seed=seed) & 2**bits - 1, offset)
    multipliers = last(code_bytes(n, k // 32, bits=4, seed=seed) & 15) if sub else None
    parts = codes, last(halves(n, k // group, seed=seed)), multipliers, bits
    tokens = draw(st.sampled_from((0, 1, 2, 4, 5, 16, 17, 37)), "tokens")
    x = somewhere(vectors(tokens, k, seed=seed + 1, dtype=dtype), offset, gap)
    bias = last(randn(n, seed=seed, dtype=dtype)) if draw(st.booleans(), "bias") else None
    experts = torch.arange(2 * tokens).view(tokens, 2) % 2  # there is one expert

    def call():
        encoded = tt.weight_encode(w, rotation, levels, steps, bits, sub, scaled)
        packed = last(tt.weight_pack(*parts))
        reading = rotation, levels, n, bits, sub
        return (
            encoded,
            packed,
            *tt.weight_unpack(packed, n, group, bits, sub),
            tt.weight_decode(packed, *reading, dtype, scaled),
            tt.linear_packed(x, packed, *reading, scaled, bias),
            tt.linear_experts(
                x, packed[None], experts, *reading, None if bias is None else bias[None]
            ),
        )

    return call


CALLS = {
    hadamard_call: 200,
    pack_call: 300,
    encode_call: 400,
    decode_call: 200,
    group_call: 150,
    sketch_call: 150,
    score_call: 200,
    store_call: 200,
    attention_call: 300,
    merge_call: 100,
    latents_call: 150,
    weight_call: 300,
}


def comparable(x: Tensor) -> Tensor:
    """x with one kind of NaN: which of two a sum hands on is not defined."""
    return torch.where(x.isnan(), torch.nan, x) if x.is_floating_point() else x


def at(level: str, threads: int, call) -> list[Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with _library.force_cpu_level(level):
            return [comparable(x) for x in call()]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("make", CALLS, ids=lambda make: make.__name__.removesuffix("_call"))
def test_same_bytes_at_every_level(make):
    @settings(max_examples=CALLS[make], suppress_health_check=list(HealthCheck))
    @given(st.data())
    def compare(data):
        call = make(data.draw)
        expected = at("portable", 1, call)
        for level in LEVELS:
            for actual, want in zip(at(level, 1, call), expected, strict=True):
                assert_same_bytes(actual, want)
        for actual, want in zip(at(LEVELS[0], 3, call), expected, strict=True):
            assert_same_bytes(actual, want)

    compare()


# ---- the choice


def test_levels():
    assert LEVELS[-1] == "portable"
    assert LEVELS == [n for n in ("avx512", "avx2", "portable") if n in LEVELS]
    info = tt.build_info()
    assert info["cpu_levels"] == LEVELS and info["cpu_level"] == _library.cpu_level()


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_is_forced_until_the_block_ends(level):
    before = _library.cpu_level()
    with _library.force_cpu_level(level):
        assert _library.cpu_level() == tt.build_info()["cpu_level"] == level
        with _library.force_cpu_level("portable"):
            assert _library.cpu_level() == "portable"
        assert _library.cpu_level() == level
    assert _library.cpu_level() == before


@pytest.mark.parametrize("name", ["", "avx", "AVX2", "avx512 avx2"])
def test_a_level_that_is_not_there_is_refused(name):
    before = _library.cpu_level()
    with pytest.raises(ValueError, match=f"supported: .*{LEVELS[-1]}"):
        with _library.force_cpu_level(name):
            pass
    assert _library.cpu_level() == before


# ---- instructions stay in their level
#
# A function that several files define, such as a template of the standard library, is kept once by
# the linker, from any of them: compiled with AVX-512 it would end processes on other machines.


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def shared_functions(path: Path, level: str) -> list[str]:
    """Weak functions of an object file that do not belong to the level.

    Template parameters that are objects (_ZTA) are constants, equal in every level.
    """
    done = subprocess.run(
        ["nm", "--defined-only", path], capture_output=True, text=True, check=True
    )
    own = f"10turboquant3cpu{len(level)}{level}"
    symbols = [line.split()[-2:] for line in done.stdout.splitlines()]
    weak = [name for kind, name in symbols if kind in "WVu" and not name.startswith("_ZTA")]
    return [name for name in weak if own not in name]


def vector_instructions(path: Path) -> list[str]:
    """AVX instructions of an object file: their names start with v."""
    return re.findall(r"\t(v[a-z0-9]+ .*)", output("objdump", "-d", "--no-show-raw-insn", path))


def objects() -> list[Path]:
    for tool in ("nm", "objdump"):
        shutil.which(tool) or pytest.skip(f"needs {tool}")
    return sorted(OBJECTS.rglob("*.o")) or pytest.skip("needs the objects of build/native")


def test_a_level_shares_no_function():
    found = {
        path.name: shared_functions(path, path.name.split(".")[0])
        for path in objects()
        if path.parent.name == "levels"
    }
    assert len(found) == 3
    assert not any(found.values()), found


def test_other_objects_have_no_vector_instructions():
    found = {
        path.name: vector_instructions(path)[:3]
        for path in objects()
        if path.name not in ("avx2.cpp.o", "avx512.cpp.o")
    }
    assert "portable.cpp.o" in found and "ops.cpp.o" in found
    assert not any(found.values()), found


@pytest.mark.skipif("avx2" not in LEVELS, reason="needs a compiler for AVX2")
def test_the_guards_see(tmp_path):
    compiler = shutil.which("g++") or pytest.skip("needs g++")
    objects()
    (tmp_path / "bad.cpp").write_text(
        "#include <algorithm>\n"
        "namespace turboquant::cpu::avx2 {\n"
        "void f(float* x, int n) { std::sort(x, x + n); }\n"
        "inline __attribute__((noinline)) float mine(float x) { return x * 2; }\n"
        "float g(float x) { return mine(x); }\n"
        "}\n"
    )
    path = tmp_path / "bad.o"
    command = [compiler, "-std=c++20", "-O1", "-mavx2", "-c", tmp_path / "bad.cpp", "-o", path]
    subprocess.run(command, check=True)
    shared = shared_functions(path, "avx2")
    assert shared and not any("4mine" in name for name in shared)
    assert any(instruction.startswith("vaddss") for instruction in vector_instructions(path))
