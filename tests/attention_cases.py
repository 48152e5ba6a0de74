"""Calls of paged_attention that several test files make, and how far their results may be off.

All caches start full of stale bytes whose scales are NaN, all tails full of NaN, and block tables
hold garbage where no page is needed: whatever should not be read would show.
"""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import torch_turboquant as tt
from tests.helpers import (
    FLOATS,
    assert_same_bytes,
    garbage_cache,
    int32,
    paged,
    randn,
    scales,
    to_device,
)
from torch_turboquant.config import CacheConfig
from torch_turboquant.ops.attention import paged_attention_reference
from torch_turboquant.ops.codec import Channels
from torch_turboquant.signs import rotation_matrix
from torch_turboquant.tables import CacheTables

EPS = 2.0**-24
HALF_UNIT = {torch.float32: EPS, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


class Case(NamedTuple):
    """One call of paged_attention, and what it was made of."""

    config: CacheConfig
    tables: CacheTables
    cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu: Tensor | None
    max_q_len: int
    tail: tt.Tail | None
    q: Tensor
    k: list[Tensor]
    v: list[Tensor]
    slots: list[Tensor]

    def arguments(self, **options):
        """(args, kwargs) of paged_attention and its reference."""
        kwargs = {"cu_seqlens_q": self.cu, "max_q_len": self.max_q_len, "tail": self.tail}
        args = (self.q, self.cache, self.block_table, self.seq_lens, self.config, self.tables)
        return args, {**kwargs, **options}


def starts(q_lens):
    return int32(0, *torch.tensor(q_lens, dtype=torch.int64).cumsum(0).tolist())


def build(
    config,
    lengths,
    q_lens=None,
    *,
    q_heads=4,
    kv_heads=2,
    dtype=torch.float32,
    center=False,
    tail=False,
    max_q_len=None,
    store_new=True,
    seed=0,
):
    """Stores whole sequences, the last q_lens tokens of each in a call of their own, or not yet."""
    d = config.head_dim
    offset = 8.0 * randn(kv_heads, d, seed=seed + 50) if center else torch.zeros(kv_heads, d)
    scaled = tt.scaled_center(offset, scales(kv_heads, d, seed=seed + 51))
    given = {False: None, True: offset, "scaled": scaled}[center]
    tables = tt.make_tables(config, 1, center=given)
    num_pages, table, slots = paged(lengths, config.page_size, seed)
    cache = garbage_cache(config, num_pages, kv_heads, seed)
    new = q_lens or [min(1, n) for n in lengths]
    max_q_len = max_q_len or max(1, *new)
    k = [
        (randn(n, kv_heads, d, seed=seed + 100 + s) + offset).to(dtype)
        for s, n in enumerate(lengths)
    ]
    v = [randn(n, kv_heads, d, seed=seed + 200 + s, dtype=dtype) for s, n in enumerate(lengths)]
    if tail:
        ring = tt.allocate_tail(config, len(lengths) + 2, kv_heads, dtype, max_q_len)
        ring.fill_(torch.nan)
        tail = tt.Tail(ring, torch.arange(1, len(lengths) + 1).flip(0))
    else:
        tail = None
    before = [n - m for n, m in zip(lengths, new, strict=True)]
    for begin, end in (([0] * len(lengths), before), (before, lengths))[: 1 + store_new]:
        span = [slice(b, e) for b, e in zip(begin, end, strict=True)]
        counts = [e - b for b, e in zip(begin, end, strict=True)]
        tt.cache_store(
            torch.cat([part[i] for part, i in zip(k, span, strict=True)]),
            torch.cat([part[i] for part, i in zip(v, span, strict=True)]),
            cache,
            torch.cat([part[i] for part, i in zip(slots, span, strict=True)]),
            config,
            tables,
            tail=tail,
            seq_lens=int32(*end),
            cu_seqlens_q=starts(counts),
        )
    one_each = q_lens is None and 0 not in lengths
    queries = randn(sum(new), q_heads, d, seed=seed + 300, dtype=dtype)
    cu = None if one_each else starts(new)
    return Case(
        config, tables, cache, table, int32(*lengths), cu, max_q_len, tail, queries, k, v, slots
    )


def run(case, device="cpu", **options):
    kind = torch.device(device).type
    if not torch._C._dispatch_has_kernel_for_dispatch_key(
        "turboquant::paged_attention", kind.upper()
    ):
        pytest.skip(f"paged_attention has no {kind} kernel in this release")
    args, kwargs = case.arguments(**options)
    out, lse = tt.paged_attention(
        *(to_device(a, device) for a in args),
        **{name: to_device(a, device) for name, a in kwargs.items()},
    )
    assert out.shape == case.q.shape and out.dtype == case.q.dtype
    assert lse.shape == case.q.shape[:2] and lse.dtype == torch.float32
    return out.cpu(), lse.cpu()


def assert_same_results(actual, expected, device):
    """Of the same queries in different calls: bit for bit, but on CUDA what else a call is about
    decides where work is cut, and so how sums and softmax weights (16 bits) are rounded."""
    if torch.device(device).type == "cpu":
        return assert_same_bytes(actual, expected)
    assert (actual - expected).abs().max() <= 2.0**-14 * expected.abs().max()


def bounds(case, device="cpu", softmax_scale=None, k_new=None):
    """What the kernels may cost: (error of a score and of lse, error of an output before rounding).

    float32: a score is a sum of d products in any order, after a rotation of q: its error is a
    small multiple of eps times |q| |k|, and of |q| |center| where one is added.
    Integers (CPU): a rotated query is rounded to multiples of its largest channel / 32639. These
    errors are independent and at most half a unit, sigma 0.29 units: five sigma of their sum over
    the channels of a key is 1.5 units times |k|. Weights are rounded to multiples of the largest of
    their block of 128 keys / 32639, which at five sigma is 1.5 sqrt(128) units in the mean.
    float16 (CUDA): see half_products; a weight is off by at most 2^-11 of itself, and so is what
    its value adds to an output. Keys and values of a float32 tail are rounded in the same way.
    """
    d = case.config.head_dim
    scale = softmax_scale or 1 / math.sqrt(d)
    q, channels = case.q.double(), Channels.of(case.tables.center, 2)
    length = max(part.double().norm(dim=-1).max().item() for part in case.k if len(part))
    k = torch.cat(case.k).double()
    coded = k if channels.center is None else k - channels.center.double()
    scaled = q
    if channels.scale is not None:
        coded = coded * channels.scale.double()
        group = q.shape[1] // k.shape[1]
        scaled = q * channels.inverse.double().repeat_interleave(group, 0)
    rounding = weight = 0
    if len(q):
        rotation = torch.from_numpy(rotation_matrix(d, case.tables.key_signs)).T
        if torch.device(device).type == "cpu":
            most = max(length, coded.norm(dim=-1).max().item())
            rounding = 1.5 * most * (scaled @ rotation).abs().max().item() / 32639
            weight = 1.5 * math.sqrt(128) / 32639
        else:
            rounding, weight = half_products(scaled @ rotation, coded @ rotation), 2.0**-11
            exact_keys = case.tail is not None or k_new is not None
            if exact_keys and case.q.dtype == torch.float32:
                plain = k if channels.center is None else k - channels.center.double()
                rounding, weight = max(rounding, 2 * half_products(q, plain)), 2 * weight
    if channels.center is not None:
        length += 2 * channels.center.double().norm(dim=-1).max().item()
    rounding *= scale
    score = rounding + 4 * EPS * (1 + scale * length * q.norm(dim=-1).max().item())
    largest = max(part.double().abs().max().item() for part in case.v if len(part))
    return score, (score + 16 * EPS + weight) * largest


def half_products(q, k):
    """Five sigma of the worst sum of products q . k when one side is rounded to float16.

    A channel is off by at most half of its last place, which is 2^-10 of it or less, sigma 0.29
    places; those of different channels are independent.
    """
    squares = q.flatten(0, 1).square() @ k.flatten(0, 1).square().T
    return 1.45 * 2.0**-10 * squares.max().sqrt().item()


def check(case, device="cpu", **options):
    """Runs the op and compares it with the oracle; returns its results."""
    out, lse = run(case, device, **options)
    args, kwargs = case.arguments(**options)
    exact, exact_lse = paged_attention_reference(*args, **kwargs)
    of_bounds = {name: options.get(name) for name in ("softmax_scale", "k_new")}
    score_error, out_error = bounds(case, device, **of_bounds)
    assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf)
    finite = torch.isfinite(exact_lse)
    assert finite.any() or not len(case.q)
    assert ((lse - exact_lse).abs()[finite] <= score_error + EPS * exact_lse.abs()[finite]).all()
    rounding = HALF_UNIT[case.q.dtype] * exact.abs() + (
        2.0**-25 if case.q.dtype == torch.half else 0
    )
    worst = ((out.double() - exact).abs() - rounding).max() if out.numel() else 0
    assert worst <= out_error
    # a large learned sink leaves nothing, or subnormal numbers
    some = exact.norm(dim=-1) > (1e-3 if case.q.dtype == torch.half else 1e-5)
    if some.any():
        cosine = torch.nn.functional.cosine_similarity(out.double()[some], exact[some], dim=-1)
        assert cosine.min() > 0.9999
    return out, lse


RANDOM_CALLS = {
    "lengths": st.lists(st.integers(0, 70), min_size=1, max_size=4),
    "queries": st.lists(st.integers(0, 8), min_size=4, max_size=4),
    "name": st.sampled_from(list(tt.PRESETS)),
    "page_size": st.sampled_from([16, 32]),
    "dtype": st.sampled_from(FLOATS),
    "group": st.integers(1, 5),
    "sliding_window": st.sampled_from([0, 1, 5, 17, 40]),
    "soft_cap": st.sampled_from([0.0, 0.5, 30.0]),
    "tail": st.booleans(),
    "center": st.sampled_from([False, True, "scaled"]),
    "sink_tokens": st.integers(0, 6),
    "seed": st.integers(0, 5),
}
