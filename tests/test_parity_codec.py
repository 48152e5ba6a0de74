"""The codec and the paged cache on CUDA against the CPU: the same bytes, in graphs, on streams.

encode, decode, cache_store and cache_load have two kernels each way, for few and for many vectors;
tests named `many` have enough vectors for the second.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import torch_turboquant as tt
from tests.helpers import (
    CODEBOOKS,
    FLOATS,
    HEAD_DIMS,
    assert_same_bytes,
    busy_gpu,
    codebook_tensors,
    garbage_cache,
    generator,
    hard_vectors,
    multiprocessors,
    randn,
    signs_of,
    to_device,
)
from torch_turboquant.format import PAGE_SIZES, valid_vector_dim
from torch_turboquant.ops.codec import SCALE_MODES

pytestmark = pytest.mark.cuda

HEADS = 2
KEY_BOOKS = tuple((b, g) for b, g in CODEBOOKS if b > 1)
VALUE_BOOKS = tuple((b, g) for b, g in KEY_BOOKS if b != 5)
RECORD_DIMS = tuple(d for d in range(16, 1025, 16) if valid_vector_dim(d))
# 8 x 32 vectors keep a multiprocessor busy.
MANY = multiprocessors() * 16 * 32


def mixed_vectors(n: int, d: int, signs: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    """[n, d]: random directions of many lengths, with everything of hard_vectors among them."""
    x = (
        randn(n, d, seed=seed)
        * torch.logspace(-3, 3, n)[torch.randperm(n, generator=generator(seed))][:, None]
    )
    hard = hard_vectors(d, signs) if d >= 4 else randn(1, d, seed=seed)
    places = torch.randperm(n, generator=generator(seed + 1))[: len(hard)]
    x[places] = hard[: len(places)]
    return x.to(dtype)


def on_cuda(*values) -> list:
    return [to_device(value, "cuda") for value in values]


def assert_same_floats(actual: Tensor, expected: Tensor) -> None:
    """Equal bytes, but any NaN is as good as another."""
    actual = actual.cpu()
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_same_bytes(actual.nan_to_num(), expected.nan_to_num())


# ---- encode, decode


def check_codec(d, bits, grid, search, mode, dtype, center, n=64, seed=0) -> None:
    signs = signs_of(d, seed)
    levels, steps = codebook_tensors(d, bits, grid, search)
    mean = randn(d, seed=seed + 5) if center else None
    x = mixed_vectors(n, d, signs, seed, dtype)
    packed, scale = tt.encode(x, signs, levels, steps, bits, mode, mean)
    on_device = on_cuda(x, signs, levels, steps)
    moved = None if mean is None else mean.cuda()
    actual_packed, actual_scale = tt.encode(*on_device, bits, mode, moved)
    assert_same_bytes(actual_packed, packed)
    assert_same_bytes(actual_scale, scale)
    for out in FLOATS:
        y = tt.decode(packed, scale, signs, levels, bits, mean, out)
        gpu_levels = None if levels is None else levels.cuda()
        z = tt.decode(packed.cuda(), scale.cuda(), signs.cuda(), gpu_levels, bits, moved, out)
        assert_same_floats(z, y)


@pytest.mark.parametrize("bits, grid", CODEBOOKS)
@pytest.mark.parametrize("search", [1, 8])
def test_codec(bits, grid, search):
    """Every scale mode and dtype, with and without a center."""
    for d, mode, dtype, center in itertools.product((64, 128), SCALE_MODES, FLOATS, (False, True)):
        check_codec(d, bits, grid, search, mode, dtype, center)


@pytest.mark.parametrize("d", [d for d in range(2, 4097) if valid_vector_dim(d)])
def test_codec_dims(d):
    for i, (bits, grid) in enumerate(CODEBOOKS):
        if d < 8 and grid == "lloyd":
            continue  # no marginal to speak of
        check_codec(d, bits, grid, (1, 3)[i % 2], "mse", FLOATS[i % 3], i % 4 == 0, n=48, seed=i)


@pytest.mark.parametrize("search", [1, 2, 64])
def test_codec_search(search):
    for bits, grid in CODEBOOKS:
        check_codec(128, bits, grid, search, "unbiased", torch.float32, False, seed=search)


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_codec_many(d):
    for i, (bits, grid) in enumerate(CODEBOOKS):
        signs = signs_of(d, i)
        levels, steps = codebook_tensors(d, bits, grid, (8, 1)[i % 2])
        x = mixed_vectors(MANY // (8 if d > 256 else 1), d, signs, i, FLOATS[i % 3])
        mean = randn(d, seed=i) if i % 3 == 0 else None
        mode = list(SCALE_MODES)[i % 4]
        expected = tt.encode(x, signs, levels, steps, bits, mode, mean)
        actual = tt.encode(*on_cuda(x, signs, levels, steps), bits, mode, to_device(mean, "cuda"))
        for a, e in zip(actual, expected, strict=True):
            assert_same_bytes(a, e)
        # Every row elsewhere, in two dimensions that cannot be merged.
        wide = torch.stack([x[::2], x[1::2], x[::2]], 1).cuda()[:, :2]
        assert not wide.is_contiguous()
        on_device = on_cuda(signs, levels, steps)
        actual = tt.encode(wide, *on_device, bits, mode, to_device(mean, "cuda"))
        for a, e in zip(actual, expected, strict=True):
            assert_same_bytes(a.flatten(0, 1), e)
        for dtype in FLOATS[1:]:
            y = tt.decode(*expected, signs, levels, bits, mean, dtype)
            on_device = on_cuda(*expected, signs, levels)
            moved = to_device(mean, "cuda")
            assert_same_floats(tt.decode(*on_device, bits, moved, dtype), y)


@pytest.mark.parametrize("d", (64, 128, 256))
def test_decode_any_scale(d):
    """Every float16 as a scale of many vectors: the signs of zeros, infinities, NaN."""
    scale = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    signs, center = signs_of(d), randn(d, seed=d)
    channels = torch.stack([center, *(torch.exp2(randn(d, seed=d + i)) for i in (1, 2))])
    for bits in (8, 4):
        draw = generator(bits)
        packed = torch.randint(256, (len(scale), d * bits // 8), generator=draw, dtype=torch.uint8)
        packed[torch.rand(packed.shape, generator=draw) < 0.9] = 0
        for mean, dtype in itertools.product((None, center, channels), FLOATS[1:]):
            expected = tt.decode(packed, scale, signs, None, bits, mean, dtype)
            on_device = on_cuda(packed, scale, signs)
            actual = tt.decode(*on_device, None, bits, to_device(mean, "cuda"), dtype)
            assert_same_floats(actual, expected)


def test_codebooks_of_ones_own():
    """Levels and steps that no table was made for: crowded, far apart, beyond every coordinate."""
    d, bits = 128, 3
    signs = signs_of(d)
    x = mixed_vectors(MANY, d, signs, 3, torch.bfloat16)
    crowded = torch.tensor([-127, -3, -2, -1, 1, 2, 3, 127], dtype=torch.int8)
    even = torch.tensor([-127, -90, -54, -18, 18, 54, 90, 127], dtype=torch.int8)
    for levels in (crowded, even, None):
        for steps in ([1e-6], [1e-4, 1e-3, 1e-2], [0.05, 0.1], [1.0, 2.0, 30.0], [1e20]):
            s = torch.tensor(steps)
            for part in (x[:100], x):
                expected = tt.encode(part, signs, levels, s, bits, "mse")
                actual = tt.encode(*on_cuda(part, signs, levels, s), bits, "mse")
                for a, e in zip(actual, expected, strict=True):
                    assert_same_bytes(a, e)


# Boundaries of 8-bit codes are products of these. In units of 2^-12 they are as usual; in the
# middle between two integers, where they are rounded up and down by turns; 0; out of reach.
BYTE_STEPS = (
    [0.0311],
    [0.02, 0.0254, 0.0275, 0.03, 62.5 / 2048, 0.0338, 0.036, 0.04],
    [1e-4, 0.5 / 2048, 1.5 / 2048],
    [1e-45, 1e-20, 100.0],
    [1e20, 3e38],
)


@pytest.mark.parametrize("d", (64, 128, 256))
def test_steps_of_8_bits_of_ones_own(d):
    """Few vectors and many; some have one coordinate that is larger than 16 bits."""
    signs = signs_of(d)
    x = mixed_vectors(MANY, d, signs, d, torch.bfloat16)
    one_channel = torch.zeros(d)
    one_channel[3] = 1.0
    x[7::100] = (tt.hadamard(one_channel, torch.ones(d)) * signs).to(x.dtype)
    for steps in BYTE_STEPS:
        s = torch.tensor(steps)
        for part in (x[:100], x):
            expected = tt.encode(part, signs, None, s, 8, "mse")
            actual = tt.encode(part.cuda(), signs.cuda(), None, s.cuda(), 8, "mse")
            for a, e in zip(actual, expected, strict=True):
                assert_same_bytes(a, e)


def test_strided_vectors():
    signs, (levels, steps) = signs_of(96), codebook_tensors(96, 4, "lloyd", 8)
    x = randn(40, 3, 7, 2, 96 + 5, seed=1)
    views = [x[..., :96], x[..., 3:99], x.transpose(0, 2)[..., 4:100], x[::2, :, 1::2, :1, :96]]
    for view in views:
        expected = tt.encode(view, signs, levels, steps, 4)
        storage = x.cuda()
        moved = storage.as_strided(view.shape, view.stride(), view.storage_offset())
        actual = tt.encode(moved, *on_cuda(signs, levels, steps), 4)
        for a, e in zip(actual, expected, strict=True):
            assert_same_bytes(a, e)


@pytest.mark.parametrize("shape", [(3, 70000), (15, 40), (16, 40), (40, 16)])
def test_few_tokens_of_many_heads(shape):
    """Two leading dimensions that do not merge, the first smaller than what a block encodes."""
    signs, (levels, steps) = signs_of(16), codebook_tensors(16, 4, "lloyd", 8)
    x = randn(shape[0], shape[1] + 1, 16, seed=1)
    expected = tt.encode(x[:, :-1], signs, levels, steps, 4)
    actual = tt.encode(x.cuda()[:, :-1], *on_cuda(signs, levels, steps), 4)
    for a, e in zip(actual, expected, strict=True):
        assert_same_bytes(a, e)


# ---- the cache


class Call(NamedTuple):
    """Arguments of one cache_store, on the CPU."""

    config: tt.CacheConfig
    tables: object
    k: Tensor
    v: Tensor
    slots: Tensor
    num_pages: int
    tail: tt.Tail | None = None
    seq_lens: Tensor | None = None
    cu_seqlens_q: Tensor | None = None


def fused(tokens: int, heads: int, d: int, tables, seed: int, dtype: torch.dtype) -> Tensor:
    """[tokens, (1 + 2) heads d] as a fused projection makes it: queries, keys, values."""
    rows = mixed_vectors(tokens * heads * 2, d, tables.key_signs, seed, dtype)
    queries = torch.zeros(tokens, heads * d, dtype=dtype)
    return torch.cat([queries, rows.view(tokens, 2 * heads * d)], 1)


def kv_views(qkv: Tensor, heads: int, d: int) -> tuple[Tensor, Tensor]:
    _, k, v = qkv.split(heads * d, 1)
    return k.unflatten(1, (heads, d)), v.unflatten(1, (heads, d))


def slots_of(order: str, tokens: int, page_size: int, seed: int) -> tuple[Tensor, int]:
    """Slots of tokens, and how many pages they need."""
    num_pages = -(-tokens // page_size) + 3
    if order == "aligned":
        return torch.arange(tokens) + page_size, num_pages
    if order == "shifted":
        return torch.arange(tokens) + page_size + 5, num_pages
    if order == "runs":  # sequences from the start of a page: spans of tokens straddle blocks
        run = 2 * page_size + 5
        token = torch.arange(tokens)
        pages = torch.randperm(3 * (tokens // run + 1), generator=generator(seed))
        at = token // run * 3 * page_size + token % run
        slots = pages[at // page_size] * page_size + at % page_size
        return torch.where(token // run % 5 == 3, -1, slots), len(pages)
    slots = torch.randperm(num_pages * page_size, generator=generator(seed))[:tokens]
    slots[tokens // 3] = -1
    return slots, num_pages


def make_call(config, order, tokens, dtype, seed=0, heads=HEADS, center=False, tail=False) -> Call:
    d = config.head_dim
    mean = randn(heads, d, seed=seed) if center else None
    tables = tt.make_tables(config, seed, center=mean)
    k, v = kv_views(fused(tokens, heads, d, tables, seed, dtype), heads, d)
    slots, num_pages = slots_of(order, tokens, config.page_size, seed)
    if not tail:
        return Call(config, tables, k, v, slots, num_pages)
    third = tokens // 3
    ring = tt.allocate_tail(config, 5, heads, dtype, max_q_len=4)
    lens = torch.tensor([third + 2, 0, tokens - third + 9], dtype=torch.int32)
    begins = torch.tensor([0, third, third, tokens], dtype=torch.int32)
    where = tt.Tail(ring, torch.tensor([3, -1, 0]))
    return Call(config, tables, k, v, slots, num_pages, where, lens, begins)


def moved_view(t: Tensor, device: str) -> Tensor:
    """A copy with the same strides over the same storage, elsewhere."""
    size = t.untyped_storage().nbytes() // t.element_size()
    whole = t.new_empty(0).set_(t.untyped_storage(), 0, (size,), (1,))
    return whole.to(device).as_strided(t.shape, t.stride(), t.storage_offset())


def run_store(call: Call, cache: Tensor, ring: Tensor | None) -> None:
    """cache_store on the device of `cache`."""
    tail = None if ring is None else tt.Tail(ring, call.tail.slots.to(cache.device))
    tt.cache_store(
        moved_view(call.k, cache.device),
        moved_view(call.v, cache.device),
        cache,
        call.slots.to(cache.device),
        call.config,
        to_device(call.tables, cache.device),
        tail=tail,
        seq_lens=to_device(call.seq_lens, cache.device),
        cu_seqlens_q=to_device(call.cu_seqlens_q, cache.device),
    )


def stored(call: Call, device: str) -> tuple[Tensor, Tensor | None]:
    """A cache full of stale bytes, and the tail, after the call."""
    cache = garbage_cache(call.config, call.num_pages, call.k.shape[1]).to(device)
    ring = None if call.tail is None else call.tail.ring.clone().to(device)
    run_store(call, cache, ring)
    return cache, ring


def check_store(call: Call) -> Tensor:
    """The bytes of both devices; returns the cache."""
    expected, tail = stored(call, "cpu")
    actual, actual_tail = stored(call, "cuda")
    assert_same_bytes(actual, expected)
    if tail is not None:
        assert_same_bytes(actual_tail, tail)
    return expected


def check_load(config, tables, cache: Tensor, dtype: torch.dtype, seed: int = 0) -> None:
    """Sequences of several lengths over the pages of a cache, in any order."""
    pages = torch.randperm(cache.shape[0], generator=generator(seed)).int()
    room = cache.shape[0] * config.page_size
    lengths = torch.tensor([room, 0, room // 2 + 3, 1], dtype=torch.int32)
    table = torch.stack([pages, pages, pages.flip(0), pages])
    for longest in (room - 5, room, room + 21):
        shown = lengths.clamp(max=longest)
        expected = tt.cache_load(cache, table, shown, config, tables, longest, dtype)
        on_device = on_cuda(cache, table, shown)
        actual = tt.cache_load(*on_device, config, to_device(tables, "cuda"), longest, dtype)
        for a, e in zip(actual, expected, strict=True):
            assert_same_floats(a, e)


def config_of(d, keys, values, i: int, **more) -> tt.CacheConfig:
    """Page sizes, modes and searches by turns."""
    modes = list(SCALE_MODES)
    options = {
        "page_size": PAGE_SIZES[i % 4],
        "key_scale_mode": modes[i % 4],
        "value_scale_mode": modes[(i + 2) % 4],
        "search": (8, 1, 3)[i % 3],
        "sink_tokens": 2,
        "recent_window": 7,
    }
    (kb, kg), (vb, vg) = keys, values
    return tt.CacheConfig(d, kb, vb, key_grid=kg, value_grid=vg, **{**options, **more})


BOOK_PAIRS = list(itertools.product(KEY_BOOKS, VALUE_BOOKS))


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_cache(d):
    """Every pair of codebooks; page sizes, modes, searches, orders, dtypes by turns."""
    for i, (keys, values) in enumerate(BOOK_PAIRS):
        config = config_of(d, keys, values, i)
        order = ("aligned", "shifted", "random")[i // 3 % 3]
        dtype = FLOATS[i // 2 % 3]
        call = make_call(config, order, 53, dtype, i, center=i % 2 == 0, tail=i % 5 == 0)
        cache = check_store(call)
        check_load(config, call.tables, cache, FLOATS[i % 3], i)


@pytest.mark.parametrize("d", [d for d in RECORD_DIMS if d not in HEAD_DIMS])
def test_cache_dims(d):
    for i, (keys, values) in enumerate(BOOK_PAIRS[d // 16 % 3 :: 7]):
        config = config_of(d, keys, values, i)
        call = make_call(config, ("aligned", "random")[i % 2], 21, FLOATS[i % 3], i)
        check_load(config, call.tables, check_store(call), FLOATS[i % 3], i)


@pytest.mark.parametrize("order", ["aligned", "shifted", "random", "runs"])
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_cache_many(d, order):
    heads = 8
    tokens = MANY // heads // (8 if d > 256 else 2) + 3
    turn = HEAD_DIMS.index(d) + len(order)
    for i in range(turn, turn + 3):
        keys, values = BOOK_PAIRS[(5 * i) % len(BOOK_PAIRS)]
        config = config_of(d, keys, values, i)
        call = make_call(config, order, tokens, FLOATS[i % 3], i, heads, i % 2 == 0, i % 3 == 0)
        check_store(call)


@pytest.mark.parametrize("order", ["aligned", "random", "runs"])
@pytest.mark.parametrize("d", (64, 128, 256))
def test_cache_of_8_bits(d, order):
    """Keys, values or both, few tokens and many, with steps that no table was made for."""
    tokens = 2 * FEWEST // (2 * 8 * d) + 3
    byte, table = (8, "uniform"), (4, "lloyd")
    for i, (keys, values) in enumerate(((byte, byte), (byte, table), (table, byte))):
        for j, search in enumerate((8, 1)):
            config = config_of(d, keys, values, i, search=search)
            call = make_call(config, order, tokens, FLOATS[1 + j], i, 8, j == 0, i == 0)
            check_store(call)
            few = call._replace(k=call.k[:77], v=call.v[:77], slots=call.slots[:77], tail=None)
            for steps in BYTE_STEPS:
                tables = call.tables._replace(
                    **{
                        name: torch.tensor(steps)
                        for name, book in (("key_steps", keys), ("value_steps", values))
                        if book == byte
                    }
                )
                check_store(few._replace(tables=tables, seq_lens=None, cu_seqlens_q=None))


@pytest.mark.parametrize("preset", ["k4v4", "k3v3", "k5v4u", "k8v4", "k2v2"])
@pytest.mark.parametrize("search", [1, 8])
def test_presets_many(preset, search):
    config = tt.preset(preset, 128, search=search)
    call = make_call(config, "aligned", 4096, torch.bfloat16, search, 8, tail=True)
    check_load(config, call.tables, check_store(call), torch.bfloat16)


def test_searches_of_two_lengths():
    """Keys and values may come with different numbers of candidates."""
    config = tt.preset("k4v4", 128, search=8)
    call = make_call(config, "aligned", 4224, torch.bfloat16, 1, 8)
    for few in ("key_steps", "value_steps"):
        tables = call.tables._replace(**{few: getattr(call.tables, few)[3:4].clone()})
        for n in (100, 4224):
            part = call._replace(tables=tables, k=call.k[:n], v=call.v[:n], slots=call.slots[:n])
            check_store(part)


def test_any_order_is_the_same():
    """Tokens of a page in any order, one call or many."""
    config = tt.preset("k3v3", 128, page_size=64)
    call = make_call(config, "aligned", 100, torch.bfloat16, 4)
    expected = check_store(call)
    for seed in range(3):
        order = torch.randperm(100, generator=generator(seed))
        shuffled = call._replace(k=call.k[order], v=call.v[order], slots=call.slots[order])
        assert_same_bytes(stored(shuffled, "cuda")[0], expected)
        cache = garbage_cache(config, call.num_pages, HEADS).cuda()
        for part in order.split([1, 40, 59]):
            run_store(
                call._replace(k=call.k[part], v=call.v[part], slots=call.slots[part]), cache, None
            )
        assert_same_bytes(cache, expected)


@pytest.mark.parametrize("tokens", [40, 4224])
def test_slots_out_of_range_do_no_harm(tokens):
    """They cannot be reported without waiting for the device; such tokens are dropped."""
    config = tt.preset("k4v4", 128)
    call = make_call(config, "shifted", tokens, torch.bfloat16, 2, 8)
    room = call.num_pages * config.page_size
    bad = call.slots.clone()
    bad[::5] = torch.tensor([room, -7, 2**40, -(2**62), room + 31] * tokens)[: len(bad[::5])]
    dropped = call.slots.clone()
    dropped[::5] = -1
    assert_same_bytes(
        stored(call._replace(slots=bad), "cuda")[0], stored(call._replace(slots=dropped), "cpu")[0]
    )


@pytest.mark.parametrize("preset", ["k4v4", "k3v3", "k2v2", "k8v8"])
@pytest.mark.parametrize("tokens", [40, 4224])
def test_tokens_that_are_there_twice(tokens, preset):
    """Equal tokens with equal slots, beside each other and far apart, do no harm."""
    config = tt.preset(preset, 128)
    call = make_call(config, "random", tokens, torch.bfloat16, 6, 8)
    twice = torch.arange(tokens)
    twice[1::9] = torch.arange(len(twice[1::9]))
    twice[-3:] = 0
    pick = call._replace(k=call.k[twice], v=call.v[twice], slots=call.slots[twice])
    check_store(pick)


def test_pages_out_of_range_are_empty():
    config = tt.preset("k4v4", 64)
    call = make_call(config, "aligned", 90, torch.float32, 2)
    cache, _ = stored(call, "cuda")
    table = torch.tensor([[1, -1, 2, 2**31 - 1], [1, 2, 3, call.num_pages]], dtype=torch.int32)
    lengths = torch.tensor([100, 128], dtype=torch.int32)
    tables = to_device(call.tables, "cuda")
    k, v = tt.cache_load(cache, table.cuda(), lengths.cuda(), config, tables, 140, torch.float32)
    for out in (k, v):
        assert not out[0, 32:64].any() and not out[0, 96:].any() and not out[1, 96:].any()
        assert out[0, :32].any() and out[0, 64:96].any() and out[1, 32:64].any()


def test_tail_of_decode_steps():
    """One new token per sequence, without cu_seqlens_q; sequences without a row, and padding."""
    config = tt.preset("k4v4", 128, sink_tokens=3, recent_window=4)
    for seed, dtype in enumerate(FLOATS):
        call = make_call(config, "random", 12, dtype, seed)
        ring = tt.allocate_tail(config, 12, HEADS, dtype)
        rows = torch.randperm(12, generator=generator(seed))
        rows[2] = -1
        lens = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 90, 1000, 2**20, 9], dtype=torch.int32)
        check_store(call._replace(tail=tt.Tail(ring, rows), seq_lens=lens))


# ---- streams, graphs, devices


@pytest.mark.parametrize("tokens", [64, 4224])
def test_store_never_waits(tokens):
    config = tt.preset("k4v4", 128)
    call = make_call(config, "aligned", tokens, torch.bfloat16, 1, 8, tail=True)
    cache = garbage_cache(config, call.num_pages, 8).cuda()
    ring = call.tail.ring.cuda()
    k, v = (moved_view(t, "cuda") for t in (call.k, call.v))
    rest = on_cuda(call.slots, call.tables, call.tail.slots, call.seq_lens, call.cu_seqlens_q)
    slots, tables, tail_slots, lens, begins = rest
    tail = tt.Tail(ring, tail_slots)
    table = torch.arange(call.num_pages).int().cuda()[None]
    length = torch.tensor([call.num_pages * config.page_size], dtype=torch.int32).cuda()

    def run():
        tt.cache_store(
            k, v, cache, slots, config, tables, tail=tail, seq_lens=lens, cu_seqlens_q=begins
        )
        room = call.num_pages * config.page_size
        return tt.cache_load(cache, table, length, config, tables, room, torch.bfloat16)

    run()
    with busy_gpu():
        run()


@pytest.mark.parametrize("tokens", [64, 4224])
def test_store_on_a_side_stream(tokens):
    config = tt.preset("k3v3", 128)
    call = make_call(config, "aligned", tokens, torch.bfloat16, 3, 8)
    expected, _ = stored(call, "cpu")
    cache = garbage_cache(config, call.num_pages, 8).cuda()
    k, v = (moved_view(t, "cuda") for t in (call.k, call.v))
    late = torch.full_like(call.slots, -1).cuda()
    slots, tables = call.slots.cuda(), to_device(call.tables, "cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(slots)
        tt.cache_store(k, v, cache, late, config, tables)
    stream.synchronize()
    assert_same_bytes(cache, expected)


@pytest.mark.parametrize("tokens", [64, 4224])
def test_graphs_of_two_codebooks(tokens):
    """One graph with two caches; replays with other vectors and slots equal eager calls."""
    calls = [
        make_call(tt.preset(name, 128, search=s), "random", tokens, torch.bfloat16, i, 8, tail=True)
        for i, (name, s) in enumerate((("k4v4", 8), ("k5v3u", 1)))
    ]
    moved = []
    for call in calls:
        cache = garbage_cache(call.config, call.num_pages, 8).cuda()
        k, v = (moved_view(t, "cuda") for t in (call.k, call.v))
        rest = on_cuda(call.slots, call.tables, call.tail.slots, call.seq_lens, call.cu_seqlens_q)
        moved.append((k, v, cache, call.tail.ring.cuda(), *rest))

    def run():
        for call, (k, v, cache, ring, slots, tables, rows, lens, begins) in zip(
            calls, moved, strict=True
        ):
            tt.cache_store(
                k,
                v,
                cache,
                slots,
                call.config,
                tables,
                tail=tt.Tail(ring, rows),
                seq_lens=lens,
                cu_seqlens_q=begins,
            )

    def reset():
        for call, (_, _, cache, ring, *_) in zip(calls, moved, strict=True):
            cache.copy_(garbage_cache(call.config, call.num_pages, 8))
            ring.copy_(call.tail.ring)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in (7, 8):
        reset()
        fresh = []
        for call, (k, v, _, _, slots, *_) in zip(calls, moved, strict=True):
            new = make_call(call.config, "random", tokens, torch.bfloat16, seed, 8, tail=True)
            fresh.append(new._replace(tables=call.tables))
            for to, source in ((k, new.k), (v, new.v), (slots, new.slots)):
                to.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        for new, (_, _, cache, ring, *_) in zip(fresh, moved, strict=True):
            expected, expected_ring = stored(new, "cpu")
            assert_same_bytes(cache, expected)
            assert_same_bytes(ring, expected_ring)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_cache_on_another_device():
    config = tt.preset("k4v4", 128)
    for tokens in (40, 4224):
        call = make_call(config, "aligned", tokens, torch.bfloat16, 5, 8)
        assert_same_bytes(stored(call, "cuda:1")[0], stored(call, "cpu")[0])
        assert torch.cuda.current_device() == 0


def test_nothing_to_do():
    config = tt.preset("k4v4", 128)
    call = make_call(config, "aligned", 30, torch.bfloat16, 5)
    for part in (
        call._replace(k=call.k[:0], v=call.v[:0], slots=call.slots[:0]),
        call._replace(slots=torch.full_like(call.slots, -1)),
    ):
        untouched = garbage_cache(config, call.num_pages, HEADS)
        assert_same_bytes(stored(part, "cuda")[0], untouched)
    packed, scale = tt.encode(
        torch.empty(0, 3, 128, device="cuda"),
        signs_of(128).cuda(),
        *on_cuda(*codebook_tensors(128, 4, "lloyd", 8)),
        4,
    )
    assert packed.shape == (0, 3, 64) and scale.shape == (0, 3) and packed.is_cuda


# ---- small: for compute-sanitizer (tests/sanitize_cuda.sh)

# Channels of the fewest vectors that the kernels for many take, tail ends apart.
FEWEST = multiprocessors() * 16 * 16 * 64


@pytest.mark.parametrize("bits, grid", CODEBOOKS)
def test_tiny_codec(bits, grid):
    for d, n in ((128, FEWEST // 128 + 3), (128, 20), (96, 20)):
        check_codec(d, bits, grid, (8, 1)[bits % 2], "mse", torch.bfloat16, bits % 2 == 0, n)


@pytest.mark.parametrize(
    "name, search",
    [("k4v4", 1), ("k3v3", 8), ("k5v4u", 1), ("k2v2", 1), ("k8v8", 8), ("k8v4", 1)],
)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_tiny_cache(d, name, search):
    """Many tokens whose value blocks are whole or in pieces, and few."""
    config = tt.preset(name, d, search=search, sink_tokens=2, recent_window=3)
    tokens = FEWEST // (2 * 8 * d) + 3
    for order, some, tail in (
        ("aligned", tokens, True),
        ("random", tokens, False),
        ("random", 21, True),
    ):
        call = make_call(
            config, order, some, torch.bfloat16, d, 8, center=name == "k3v3", tail=tail
        )
        check_load(config, call.tables, check_store(call), torch.bfloat16)
