"""Storing into the packed cache: bytes against the reference, in any order and any chunks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_turboquant as tt
from tests.cache_cases import HEADS, check_store, random_kv
from tests.helpers import (
    FLOATS,
    HEAD_DIMS,
    PeakOfMemory,
    assert_same_bytes,
    entries_apart,
    garbage_cache,
    generator,
    hard_vectors,
    int32,
    paged,
    randn,
    scales,
    to_device,
)
from tests.test_cache_tail import check_tail
from torch_turboquant.format import PAGE_SIZES
from torch_turboquant.ops.cache import cache_store_reference
from torch_turboquant.ops.codec import encode_reference


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("d", [80, 128])
@pytest.mark.parametrize("name", tt.PRESETS)
def test_bytes_of_all_presets(name, d, page_size, device):
    config = tt.preset(name, d, page_size=page_size)
    dtype = FLOATS[PAGE_SIZES.index(page_size) % 3]
    center = 20.0 * (torch.arange(d) % 17 == 3).expand(HEADS, d)
    if page_size > 32:
        center = tt.scaled_center(center, scales(HEADS, d, seed=7))
    tables = tt.make_tables(config, 5, center=center if page_size > 16 else None)
    k, v = random_kv(21, d, dtype=dtype)
    slots = torch.randperm(2 * page_size, generator=generator(1))[:21]
    check_store(config, tables, k, v, slots, 2, device)


@pytest.mark.parametrize("name", ["k4v4", "k5v3u", "k3v2", "k8v8"])
@pytest.mark.parametrize("d", [*HEAD_DIMS, 16, 48, 144, 1024])
def test_bytes_of_all_dimensions(d, name, device):
    config = tt.preset(name, d)
    k, v = random_kv(7, d, seed=d)
    check_store(config, tt.make_tables(config, 0), k, v, torch.arange(7) * 9, 2, device)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["k4v4", "k5v4u", "k3v3", "k2v2", "k8v8"])
@pytest.mark.parametrize("d", [64, 112])
def test_bytes_of_hard_vectors(d, name, dtype, device):
    config = tt.preset(name, d)
    tables = tt.make_tables(config, 1)
    k = torch.stack([hard_vectors(d, tables.key_signs), hard_vectors(d, tables.value_signs)], 1)
    slots = torch.randperm(64, generator=generator(2))[: len(k)]
    check_store(config, tables, k.to(dtype), k.flip(1, 2).to(dtype), slots, 2, device)


@pytest.mark.parametrize("key_mode", tt.SCALE_MODES)
@pytest.mark.parametrize("value_mode", tt.SCALE_MODES)
def test_scale_modes_and_searches(key_mode, value_mode, device):
    for search in (1, 2, 8, 64):
        config = tt.preset(
            "k4v3", 64, key_scale_mode=key_mode, value_scale_mode=value_mode, search=search
        )
        k, v = random_kv(9, 64)
        check_store(config, tt.make_tables(config, 0), k, v, torch.arange(9), 1, device)


@pytest.mark.parametrize("search", [1, 2, 8])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", ["k4v4", "k5v4u", "k3v3", "k2v2"])
def test_bytes_of_few_tokens(name, d, search, device):
    """Those that a GPU has a kernel for: hard vectors, all scale modes, with and without center."""
    modes = list(tt.SCALE_MODES)
    center = 20.0 * (torch.arange(d) % 17 == 3).expand(HEADS, d)
    for case, (dtype, known) in enumerate(
        (
            (torch.bfloat16, None),
            (torch.float16, center),
            (torch.bfloat16, tt.scaled_center(center, scales(HEADS, d, seed=7))),
        )
    ):
        config = tt.preset(
            name,
            d,
            search=search,
            page_size=16 << case,
            key_scale_mode=modes[case],
            value_scale_mode=modes[case + 1],
        )
        tables = tt.make_tables(config, 3, center=known)
        hard = [hard_vectors(d, x) for x in (tables.key_signs, tables.value_signs)]
        k, v = random_kv(20, d, dtype=dtype)
        k = torch.cat([torch.stack(hard, 1).to(dtype), k])
        v = torch.cat([torch.stack(hard[::-1], 1).to(dtype), v])
        pages = 1 + len(k) // config.page_size
        slots = torch.randperm(pages * config.page_size, generator=generator(2))[: len(k)]
        slots[::5] = -1
        check_store(config, tables, k, v, slots, pages, device)


@pytest.mark.parametrize("search", [1, 8])
@pytest.mark.parametrize("name", ["k4v4", "k5v4u", "k3v2"])
def test_tiny_steps(name, search, device):
    """For compute-sanitizer (tests/sanitize_cuda.sh): a decode step, few tokens of a prompt."""
    config = tt.preset(name, 128, search=search, sink_tokens=2, recent_window=3)
    for lengths, cu in ((int32(1, 2, 7), None), (int32(9, 5), int32(0, 6, 8))):
        tokens = len(lengths) if cu is None else int(cu[-1])
        k, v = random_kv(tokens, 128, dtype=torch.bfloat16)
        rows = torch.arange(len(lengths)).flip(0)
        check_tail(config, k, v, lengths, cu, rows, 8, 4, device)


def test_records_hold_what_encode_makes():
    """The cache stores the codes and scales of the codec, whatever their places."""
    config = tt.preset("k4v2", 96, page_size=16)
    tables = tt.make_tables(config, 2, center=randn(HEADS, 96, seed=3))
    k, v = random_kv(5, 96)
    cache = tt.allocate_cache(config, 1, HEADS)
    tt.cache_store(k, v, cache, torch.arange(5), config, tables)
    for head in range(HEADS):
        packed, scale = encode_reference(
            k[:, head],
            tables.key_signs,
            tables.key_levels,
            tables.key_steps,
            4,
            "unbiased",
            tables.center[head],
        )
        assert_same_bytes(cache[0, head, : 5 * 48].view(5, 48), packed)  # 4-bit rows are dense rows
        start = config.record.key_scale(0)
        assert_same_bytes(cache[0, head, start : start + 10].view(torch.float16), scale)
    decoded, values = tt.cache_load(cache, int32([0]), int32(5), config, tables, 5, torch.float32)
    assert (decoded[0] - k).norm() / (k - tables.center).norm() < 0.12
    assert (values[0] - v).norm() / v.norm() < 0.4


def test_minus_one_and_empty_calls_write_nothing(device):
    config = tt.preset("k4v4", 64)
    tables = to_device(tt.make_tables(config, 0), device)
    k, v = (t.to(device) for t in random_kv(4, 64))
    cache = garbage_cache(config, 2, HEADS).to(device)
    before = cache.clone()
    tail = tt.Tail(
        tt.allocate_tail(config, 1, HEADS, torch.float32, 4, device),
        torch.tensor([0], device=device),
    )
    skipped = torch.full((4,), -1, device=device)
    cu = int32(0, 4).to(device)
    tt.cache_store(k, v, cache, skipped, config, tables)
    tt.cache_store(
        k,
        v,
        cache,
        skipped,
        config,
        tables,
        tail=tail,
        seq_lens=int32(4).to(device),
        cu_seqlens_q=cu,
    )
    tt.cache_store(k[:0], v[:0], cache, skipped[:0], config, tables)
    tt.cache_store(
        k[:0],
        v[:0],
        cache,
        skipped[:0],
        config,
        tables,
        tail=tail,
        seq_lens=int32(4).to(device),
        cu_seqlens_q=int32(0, 0).to(device),
    )
    assert_same_bytes(cache, before)
    assert not tail.ring.any()


def test_some_tokens_skipped(device):
    config = tt.preset("k3v3", 80)
    slots = torch.tensor([40, -1, 3, -1, 63, 0, 31, 32])
    k, v = random_kv(8, 80)
    check_store(config, tt.make_tables(config, 0), k, v, slots, 2, device)


def test_a_token_never_touches_anothers_bytes(device):
    """Storing one token again, with other contents, changes only it; storing the old contents
    restores every byte: rolling back needs nothing."""
    for name in ("k5v3u", "k3v2", "k8v4"):
        config = tt.preset(name, 80)
        tables = tt.make_tables(config, 0)
        k, v = random_kv(32, 80)
        cache = check_store(config, tables, k, v, torch.arange(32), 1, device)
        before = cache.clone()
        on = to_device(tables, device)
        slot = torch.tensor([13], device=device)
        new = (100 * randn(1, HEADS, 80, seed=4)).to(device)
        tt.cache_store(new, new, cache, slot, config, on)
        table, lengths = int32([0]).to(device), int32(32).to(device)
        old_k, old_v = tt.cache_load(before, table, lengths, config, on, 32, torch.float32)
        new_k, new_v = tt.cache_load(cache, table, lengths, config, on, 32, torch.float32)
        others = torch.arange(32) != 13
        assert_same_bytes(new_k[:, others], old_k[:, others])
        assert_same_bytes(new_v[:, others], old_v[:, others])
        assert (new_k[:, 13] != old_k[:, 13]).any() and (new_v[:, 13] != old_v[:, 13]).any()
        tt.cache_store(k[13:14].to(device), v[13:14].to(device), cache, slot, config, on)
        assert_same_bytes(cache, before)


@given(
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    name=st.sampled_from(["k4v4", "k3v3", "k5v4u"]),
    page_size=st.sampled_from([16, 32]),
)
def test_any_chunking_leaves_the_same_bytes(chunks, name, page_size):
    config = tt.preset(name, 48, page_size=page_size, sink_tokens=2, recent_window=5)
    tables = tt.make_tables(config, 0)
    total = sum(chunks)
    k, v = random_kv(total, 48)
    num_pages, _, (slots,) = paged([total], page_size)
    results = []
    for split in ([total], chunks, [1] * total):
        cache = garbage_cache(config, num_pages, HEADS)
        tail = tt.Tail(tt.allocate_tail(config, 2, HEADS, torch.float32, 3), torch.tensor([1]))
        end = 0
        for n in split:
            part, end = slice(end, end + n), end + n
            tt.cache_store(
                k[part],
                v[part],
                cache,
                slots[part],
                config,
                tables,
                tail=tail,
                seq_lens=int32(end),
                cu_seqlens_q=int32(0, n),
            )
        results.append((cache, tail.ring))
    for cache, ring in results[1:]:
        assert_same_bytes(cache, results[0][0])
        assert_same_bytes(ring, results[0][1])


@given(
    alignment=st.integers(0, 17),
    gap=st.integers(0, 3),
    dtype=st.sampled_from(FLOATS),
    name=st.sampled_from(["k4v4", "k3v2"]),
    d=st.sampled_from([16, 64, 80]),
)
def test_views_of_a_fused_projection(alignment, gap, dtype, name, d):
    """k and v as slices of one [tokens, (q + k + v heads) d] buffer at any alignment."""
    config = tt.preset(name, d, page_size=16)
    tokens, q_heads, kv = 6, 3, HEADS
    row = (q_heads + 2 * kv) * d + gap
    buffer = randn(alignment + tokens * row, seed=5, dtype=dtype)[alignment:].view(tokens, row)
    heads = buffer[:, : row - gap].unflatten(1, (-1, d))
    k, v = heads[:, q_heads : q_heads + kv], heads[:, q_heads + kv :]
    slots = torch.tensor([15, 2, 7, -1, 0, 31])
    check_store(config, tt.make_tables(config, 0), k, v, slots, 2)


def test_other_layouts():
    config = tt.preset("k4v4", 64)
    tables = tt.make_tables(config, 0)
    by_head = randn(HEADS, 5, 64, seed=6).transpose(0, 1)
    one_token = randn(1, HEADS, 64, seed=7).expand(5, HEADS, 64)
    check_store(config, tables, by_head, one_token, torch.arange(5), 1)
    every_second = randn(10, HEADS, 64, seed=8)[::2]
    check_store(config, tables, every_second, by_head, torch.arange(5), 1)


def test_any_number_of_threads_writes_the_same_bytes():
    config = tt.preset("k4v3", 64)
    tables = tt.make_tables(config, 0)
    k, v = random_kv(700, 64)
    num_pages, table, (slots,) = paged([700], 32)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            cache = garbage_cache(config, num_pages, HEADS)
            tt.cache_store(k, v, cache, slots, config, tables)
            loaded = tt.cache_load(cache, table, int32(700), config, tables, 700, torch.half)
            q = randn(1, 4, 64, seed=1)
            out, lse = tt.paged_attention(q, cache, table, int32(700), config, tables)
            results.append((cache, *loaded, out, lse))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for one, first in zip(other, results[0], strict=True):
            assert_same_bytes(one, first)


@pytest.mark.parametrize("tokens", [3, 700])
@pytest.mark.parametrize(
    ("d", "dtype"), [(64, torch.bfloat16), (128, torch.half), (48, torch.float)]
)
@pytest.mark.parametrize("gap", [16, 64 * 1023])
def test_one_layer_of_an_allocation_for_several(gap, d, dtype, tokens, device):
    """Pages and entries of the tail at any distance, int32 slots: the same bytes, and the rest is
    as it was. Loading finds them, by a table with rows at any distance."""
    config = tt.preset("k5v4u", d, page_size=16, sink_tokens=2, recent_window=3)
    tables = tt.make_tables(config, 3, center=randn(HEADS, d, seed=1))
    k, v = random_kv(tokens, d, dtype=dtype)
    num_pages, table, slots = paged([tokens - 1, 1], 16)
    table, slots = table.clamp(0), torch.cat(slots)
    slots[0] = -1
    ring = torch.full((3, HEADS, 2 + 5, 2, d), 7, dtype=dtype)
    batch = {"seq_lens": int32(tokens - 1, 1), "cu_seqlens_q": int32(0, tokens - 1, tokens)}
    want, want_ring = garbage_cache(config, num_pages, HEADS), ring.clone()
    tail = tt.Tail(want_ring, torch.tensor([2, 0]))
    cache_store_reference(k, v, want, slots, config, tables, tail=tail, **batch)

    memory, cache = entries_apart(garbage_cache(config, num_pages, HEADS), gap, device)
    tail_memory, found_ring = entries_apart(ring, gap // 2, device)
    batch = {name: to_device(x, device) for name, x in batch.items()}
    moved = to_device(tables, device)
    tail = tt.Tail(found_ring, int32(2, 0).to(device))
    given = (k.to(device), v.to(device), cache, slots.int().to(device), config, moved)
    tt.cache_store(*given, tail=tail, **batch)
    assert_same_bytes(memory, entries_apart(want, gap)[0])
    assert_same_bytes(tail_memory, entries_apart(want_ring, gap // 2)[0])

    wide = torch.full((2, table.shape[1] + 3), -(2**31), dtype=torch.int32)
    wide[:, 1 : table.shape[1] + 1] = table
    view = wide.to(device)[:, 1 : table.shape[1] + 1]
    numbers = (config, moved, tokens, dtype)
    loaded = tt.cache_load(cache, view, batch["seq_lens"], *numbers)
    plain = tt.cache_load(want.to(device), table.to(device), batch["seq_lens"], *numbers)
    for one, other in zip(loaded, plain, strict=True):
        assert_same_bytes(one, other)


def test_caches_beyond_4_gib():
    """64-bit offsets: tokens on both sides of 4 GiB. Only touched pages of memory become real."""
    config = tt.preset("k4v4", 128, page_size=128)
    num_pages = 5 * 2**30 // config.record_bytes + 1
    cache = torch.empty(num_pages, 1, config.record_bytes, dtype=torch.uint8)
    peak = PeakOfMemory()
    tables = tt.make_tables(config, 0)
    k, v = random_kv(4, 128, heads=1)
    pages = torch.tensor([num_pages - 1, 0])
    # where a 32-bit offset of the last page would land
    wrapped = (num_pages - 1) * config.record_bytes % 2**32
    alias = cache.flatten()[wrapped : wrapped + 4096]
    alias.fill_(0xAB)
    slots = torch.cat([pages[:1] * 128 + torch.arange(3), pages[1:] * 128])
    tt.cache_store(k, v, cache, slots, config, tables)
    assert (alias == 0xAB).all()
    small = tt.allocate_cache(config, 2, 1)
    tt.cache_store(k, v, small, torch.tensor([0, 1, 2, 128]), config, tables)
    assert_same_bytes(cache[pages[0], 0, : 3 * 64], small[0, 0, : 3 * 64])
    for table, store in ((pages.int()[:, None], cache), (int32(0, 1)[:, None], small)):
        loaded = tt.cache_load(store, table, int32(3, 1), config, tables, 3, torch.float32)
        q = randn(2, 4, 128, seed=1)
        result = (*loaded, *tt.paged_attention(q, store, table, int32(3, 1), config, tables))
        if store is cache:
            big = result
    for one, other in zip(big, result, strict=True):
        assert_same_bytes(one, other)
    assert peak.grown() < 200 * 2**20


# ---- tables and allocation


def test_tables():
    config = tt.preset("k4v3", 96, seed=11)
    tables = tt.make_tables(config, 2, center=randn(3, 96, seed=1, dtype=torch.bfloat16))
    assert_same_bytes(tables.key_signs, tt.random_signs(96, 11, 2, tt.SignKind.KEYS))
    assert_same_bytes(tables.value_signs, tt.random_signs(96, 11, 2, tt.SignKind.VALUES))
    assert not torch.equal(tables.key_signs, tables.value_signs)
    assert not torch.equal(tables.key_signs, tt.make_tables(config, 3).key_signs)
    assert tables.key_levels.shape == (16,) and tables.value_levels.shape == (8,)
    assert tables.key_steps.shape == tables.value_steps.shape == (8,)
    assert tables.center.dtype == torch.float32 and tables.center.shape == (3, 96)
    assert tt.make_tables(tt.preset("k5v4u", 64), 0).key_levels is None
    assert tt.make_tables(tt.preset("k8v8", 64), 0).value_levels is None
    center = tt.scaled_center(randn(5, 96, seed=1), scales(5, 96, seed=2))
    assert_same_bytes(tt.make_tables(config, 2, center=center).center, center)
    rounded = tt.make_tables(config, 2, center=center.bfloat16()).center
    assert torch.equal(rounded[2], 1 / rounded[1])  # not the inverse that was rounded
    for wrong in (torch.zeros(96), torch.zeros(2, 5, 96), torch.zeros(5, 95)):
        with pytest.raises(ValueError, match=r"center has shape .*, expected \[kv_heads, 96\] or"):
            tt.make_tables(config, 2, center=wrong)
    huge = torch.full((2, 64), 1e300, dtype=torch.float64)  # infinite in float32
    with pytest.raises(ValueError, match="center holds NaN or infinity"):
        tt.make_tables(tt.preset("k4v4", 64), 0, center=huge)
    with pytest.raises(ValueError, match="scale must be positive and finite"):
        tt.make_tables(config, 2, center=torch.zeros(3, 5, 96))


def test_allocation():
    config = tt.preset("k4v4", 128)
    cache = tt.allocate_cache(config, 7, 8)
    assert cache.shape == (7, 8, 32 * 132) and cache.dtype == torch.uint8 and not cache.any()
    tail = tt.allocate_tail(config, 5, 8, torch.bfloat16, max_q_len=4)
    assert tail.shape == (5, 8, 4 + 64 + 3, 2, 128) and tail.dtype == torch.bfloat16
    only_sinks = tt.preset("k4v4", 128, recent_window=0)
    assert tt.allocate_tail(only_sinks, 1, 1, torch.float32).shape == (1, 1, 5, 2, 128)
    with pytest.raises(ValueError, match="needs no tail"):
        tt.allocate_tail(tt.preset("k4v4", 128, recent_window=0, sink_tokens=0), 1, 1, torch.half)
    with pytest.raises(ValueError, match="max_q_len is 0"):
        tt.allocate_tail(config, 1, 1, torch.half, max_q_len=0)
    with pytest.raises(TypeError, match=r"dtype is torch\.int8"):
        tt.allocate_tail(config, 1, 1, torch.int8)
    for sizes, match in {
        (-1, 1): "max_seqs is -1",
        (1, -2): "num_kv_heads is -2",
        (True, 1): "max_seqs is True, which is no whole number",
        (1, 2.0): "num_kv_heads is 2.0, which is no whole number",
    }.items():
        with pytest.raises(ValueError, match=match):
            tt.allocate_tail(config, *sizes, torch.half)
    with pytest.raises(TypeError, match="config must be a CacheConfig, got LatentConfig"):
        tt.allocate_tail(tt.latent_preset("k4u", 128, 32), 1, 1, torch.half)
    rows = 4 + 64 + 254  # 8 bits would have 62
    assert tt.allocate_tail(config, 1, 1, torch.half, np.uint8(255)).shape == (1, 1, rows, 2, 128)
