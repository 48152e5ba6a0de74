"""The exact tail that cache_store writes: which row holds which token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_turboquant as tt
from tests.cache_cases import HEADS, random_kv
from tests.helpers import (
    FLOATS,
    assert_same_bytes,
    garbage_cache,
    generator,
    int32,
    randn,
    to_device,
)
from torch_turboquant.ops.cache import cache_store_reference, tail_row_reference


def check_tail(config, k, v, seq_lens, cu, tail_slots, ring_rows, max_seqs, device="cpu"):
    tables = tt.make_tables(config, 0)
    tokens = k.shape[0]
    slots = torch.randperm(64, generator=generator(3))[:tokens]
    slots[torch.rand(tokens, generator=generator(4)) < 0.1] = -1
    start = randn(max_seqs, HEADS, config.sink_tokens + ring_rows, 2, config.head_dim, seed=9)
    start = start.to(k.dtype)
    expected = tt.Tail(start.clone(), tail_slots)
    actual = to_device(tt.Tail(start.clone(), tail_slots), device)
    cache = garbage_cache(config, 64 // config.page_size, HEADS)
    reference, on_device = cache.clone(), cache.to(device)
    cache_store_reference(
        k,
        v,
        reference,
        slots,
        config,
        tables,
        tail=expected,
        seq_lens=seq_lens,
        cu_seqlens_q=cu,
    )
    tt.cache_store(
        k.to(device),
        v.to(device),
        on_device,
        slots.to(device),
        config,
        to_device(tables, device),
        tail=actual,
        seq_lens=seq_lens.to(device),
        cu_seqlens_q=to_device(cu, device),
    )
    assert_same_bytes(on_device, reference)
    assert_same_bytes(actual.ring, expected.ring)


@pytest.mark.parametrize("dtype", FLOATS)
def test_tail_of_one_token_each(dtype, device):
    config = tt.preset("k4v4", 64, page_size=16, sink_tokens=3, recent_window=4)
    k, v = random_kv(6, 64, dtype=dtype)
    lengths = int32(
        1, 3, 4, 8, 4095, 0
    )  # in sinks, last sink, first of the ring, wrapped, far, none
    check_tail(config, k, v, lengths, None, torch.tensor([5, 0, -1, 2, 3, 1]), 4, 6, device)


@given(
    queries=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    before=st.lists(st.integers(0, 30), min_size=4, max_size=4),
    padding=st.integers(0, 2),
    sinks=st.integers(0, 3),
    window=st.integers(1, 5),
    extra=st.integers(0, 3),
    holes=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_tail_of_many_tokens(queries, before, padding, sinks, window, extra, holes):
    """More new tokens than rows, sequences without a tail, tokens of no sequence."""
    config = tt.preset("k4v4", 16, page_size=16, sink_tokens=sinks, recent_window=window)
    count = len(queries)
    tokens = sum(queries) + padding
    k, v = random_kv(tokens, 16)
    lengths = int32(*(b + n for b, n in zip(before, queries, strict=False)))
    cu = int32(0, *torch.tensor(queries).cumsum(0).tolist())
    slots = torch.randperm(5, generator=generator(1))[:count]
    slots = torch.where(torch.tensor(holes[:count]), -1, slots)
    check_tail(config, k, v, lengths, cu, slots, window + extra, 5)


def test_the_ring_holds_the_last_positions():
    """Spelled out: 2 sinks, a ring of 5, 12 tokens in two calls."""
    config = tt.preset("k4v4", 16, page_size=16, sink_tokens=2, recent_window=3)
    tables = tt.make_tables(config, 0)
    k = torch.arange(12.0)[:, None, None].expand(12, 1, 16).contiguous()
    cache = tt.allocate_cache(config, 1, 1)
    ring = tt.allocate_tail(config, 1, 1, torch.float32, max_q_len=3)
    assert ring.shape == (1, 1, 2 + 5, 2, 16)
    tail = tt.Tail(ring, torch.tensor([0]))
    for start, end in ((0, 9), (9, 12)):
        tt.cache_store(
            k[start:end],
            -k[start:end],
            cache,
            torch.arange(start, end),
            config,
            tables,
            tail=tail,
            seq_lens=int32(end),
            cu_seqlens_q=int32(0, end - start),
        )
    assert ring[0, 0, :, 0, 0].tolist() == [0, 1, 7, 8, 9, 10, 11]
    assert ring[0, 0, :, 1, 5].tolist() == [0, -1, -7, -8, -9, -10, -11]
    assert [tail_row_reference(p, 2, 5) for p in range(12)] == [0, 1, *(2, 3, 4, 5, 6) * 2]
