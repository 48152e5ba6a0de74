"""Bytes that are predicted equal those of what is really allocated."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_turboquant as tq
from tests.memory.harness import nbytes
from torch_turboquant.memory import AttentionLayer, LatentLayer, packed_memory, plain_memory

layer_sets = st.lists(
    st.none() | st.builds(AttentionLayer, st.integers(1, 3), st.sampled_from([16, 48]), st.just(0)),
    min_size=1,
    max_size=3,
).filter(any)


@given(
    layers=layer_sets,
    name=st.sampled_from(list(tq.PRESETS)),
    context=st.integers(1, 300),
    page_size=st.sampled_from([16, 32, 128]),
    tail=st.sampled_from([(0, 0), (4, 0), (0, 9), (3, 20)]),
    max_q_len=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    center=st.booleans(),
    search=st.sampled_from([1, 8]),
)
def test_prediction_equals_what_is_allocated(
    layers, name, context, page_size, tail, max_q_len, dtype, center, search
):
    """One sequence in its own pages, allocated with the public functions."""
    options = {"page_size": page_size, "search": search}
    options |= {"sink_tokens": tail[0], "recent_window": tail[1]}
    base = tq.preset(name, 64, **options)
    got = packed_memory(
        name,
        layers,
        [base] * len(layers),
        context,
        tail_itemsize=dtype.itemsize,
        max_q_len=max_q_len,
        center=center,
    )
    pages = ring = tables = token = 0
    for layer in filter(None, layers):
        config = tq.preset(name, layer.head_dim, **options)
        count = -(-context // page_size)
        pages += nbytes(tq.allocate_cache(config, count, layer.kv_heads))
        token += layer.kv_heads * config.bytes_per_token
        if any(tail):
            ring += nbytes(tq.allocate_tail(config, 1, layer.kv_heads, dtype, max_q_len))
        ones = torch.ones(layer.kv_heads, layer.head_dim)
        learned = tq.scaled_center(ones, ones) if center else None
        tables += nbytes(*tq.make_tables(config, 0, center=learned))
    assert (got.bytes_per_token, got.pages, got.tail) == (token, pages, ring)
    assert got.constants == tables
    assert got.request == pages + ring


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("name", tq.LATENT_PRESETS)
@pytest.mark.parametrize("options", [
    {},
    {"sink_tokens": 0, "recent_window": 0, "page_size": 128},
    {"transform": False, "search": 1},
])  # fmt: skip
def test_prediction_of_latents_equals_what_is_allocated(name, options, center):
    layers, context = [LatentLayer(256, 32), None, LatentLayer(512, 64)], 300
    configs = [tq.latent_preset(name, 512, 64, **options)] * 3
    got = packed_memory("", layers, configs, context, max_q_len=5, tail_itemsize=4, center=center)
    pages = ring = tables = token = 0
    for layer in filter(None, layers):
        config = tq.latent_preset(name, layer.latent_dim, layer.rope_dim, **options)
        pages += nbytes(tq.allocate_latent_cache(config, -(-context // config.page_size)))
        token += layer.latent_dim * config.bits // 8 + 2 + 2 * layer.rope_dim
        if config.has_tail:
            ring += nbytes(tq.allocate_latent_tail(config, 1, torch.float32, 5))
        ones = torch.ones(layer.latent_dim)
        tables += nbytes(*tq.make_latent_tables(config, 0))
        tables += nbytes(tq.scaled_center(ones, ones)) if center else 0
    assert (got.bytes_per_token, got.pages, got.tail) == (token, pages, ring)
    assert got.constants == tables


def test_a_configuration_of_the_other_kind_is_refused():
    for layer, config in (
        (LatentLayer(512, 64), tq.preset("k4v4", 512)),
        (AttentionLayer(1, 512), tq.latent_preset("k4")),
    ):
        with pytest.raises(ValueError, match="cannot describe a cache of"):
            packed_memory("", [layer], [config], 10)


@given(
    window=st.integers(1, 60),
    context=st.integers(1, 200),
    q=st.integers(1, 20),
    page_size=st.sampled_from([16, 32]),
)
def test_sliding_layers_keep_their_window_in_whole_pages(window, context, q, page_size):
    """The most pages that any q neighbouring queries up to this context touch."""
    got = plain_memory("", [AttentionLayer(1, 16, window)], 1, context, page_size=page_size,
                       max_q_len=q)  # fmt: skip
    most = 0
    for last in range(-page_size, page_size):  # wherever the last query stands in its page
        first_key = last - (q - 1) - (window - 1)
        most = max(most, last // page_size - first_key // page_size + 1)
    assert got.pages == min(most, -(-context // page_size)) * page_size * 32
    whole = plain_memory("", [AttentionLayer(1, 16, window)], 1, context, page_size=page_size,
                         whole_sliding=True)  # fmt: skip
    assert whole.pages == -(-context // page_size) * page_size * 32


def test_layers_without_a_cache_and_boundary_layers():
    layers = [AttentionLayer(2, 64), None, AttentionLayer(2, 64), AttentionLayer(2, 64)]
    low, high = tq.preset("k3v2", 64), tq.preset("k8v8", 64)
    got = packed_memory("", layers, [high, high, low, high], 64)
    assert got.bytes_per_token == 2 * (2 * high.bytes_per_token + low.bytes_per_token)
    assert got.pages == 64 * got.bytes_per_token


def test_requests_in_a_budget():
    memory = packed_memory("", [AttentionLayer(1, 64)], [tq.preset("k4v4", 64)], 100)
    for count in (0, 1, 7):
        exactly = memory.constants + count * memory.request
        assert memory.requests_in(exactly) == count
        assert memory.requests_in(exactly - 1) == max(0, count - 1)
    for options in ({"context": 0}, {"context": 5, "max_q_len": 0}):
        with pytest.raises(ValueError, match="supported: 1 and more"):
            plain_memory("", [AttentionLayer(1, 64)], 2, **options)


def test_contexts_of_numpy():
    """32 layers of 131,072 tokens are more bytes than np.int32 holds."""
    layers, configs = [AttentionLayer(8, 128)] * 32, [tq.preset("k4v4", 128)] * 32
    context = np.int32(131072)
    assert packed_memory("", layers, configs, context) == packed_memory("", layers, configs, 131072)
    assert plain_memory("", layers, 2, context) == plain_memory("", layers, 2, 131072)


@pytest.mark.parametrize("page_size", [0, -1])
def test_plain_pages_without_tokens_are_refused(page_size):
    with pytest.raises(ValueError, match=f"page_size is {page_size}, supported: 1 and more"):
        plain_memory("bf16", [AttentionLayer(1, 64)], 2, 100, page_size=page_size)
