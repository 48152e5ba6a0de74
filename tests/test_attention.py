"""Attention over codes and tail against a float64 oracle, and against itself in other portions.

All caches start full of stale bytes whose scales are NaN, all tails full of NaN, and block tables
hold garbage where no page is needed: whatever should not be read would show.
"""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import torch_turboquant as tt
from tests.helpers import (
    FLOATS,
    HEAD_DIMS,
    assert_same_bytes,
    entries_apart,
    garbage_cache,
    paged,
    randn,
    scales,
    to_device,
)
from torch_turboquant.config import CacheConfig
from torch_turboquant.ops.attention import merge_attention_reference, paged_attention_reference
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


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


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
    if device == "cpu":
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


def around(page_size):
    return [1, page_size - 1, page_size, page_size + 1, 3 * page_size + 5]


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("name", tt.PRESETS)
def test_presets_and_lengths(name, page_size, device):
    config = tt.preset(name, 64, page_size=page_size)
    dtype = FLOATS[list(tt.PRESETS).index(name) % 3]
    case = build(config, around(page_size), dtype=dtype, center=page_size == 32)
    check(case, device)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["k4v4", "k3v3", "k5v4u"])
def test_a_long_sequence(name, dtype, device):
    check(build(tt.preset(name, 128), [4095, 700], dtype=dtype, center="scaled", tail=True), device)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 300}])
def test_many_queries_over_many_keys(options, device):
    """More rows and more keys than one piece of work has."""
    config = tt.preset("k4v3", 64, page_size=16)
    check(build(config, [2500, 90], [70, 33], tail=True), device, **options)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("d", [64, 80, 128, 192, 256, 512, 1024])
def test_continued_prefills(d, dtype, device):
    """Sequences of any number of new tokens in one call: alone, more than a block of rows, none."""
    config = tt.preset("k5v4u" if d % 64 else "k4v3", d, page_size=32 if d % 128 else 16)
    lengths, q_lens = [330, 65, 40, 150], [300, 65, 0, 17]
    if d > 256:  # the reference takes its time
        lengths, q_lens = [120, 33, 20, 70], [40, 33, 0, 3]
    case = build(config, lengths, q_lens, q_heads=6, dtype=dtype, center="scaled", tail=d != 80)
    check(case, device)
    check(case, device, sliding_window=50, soft_cap=20.0, sink_logits=randn(6, seed=3))


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256, 512])
def test_tiny_prefills(d, device):
    """For compute-sanitizer (tests/sanitize_cuda.sh): more rows than a decode step has."""
    config = tt.preset("k5v4u" if d % 64 else "k4v3", d, page_size=16, recent_window=5)
    case = build(config, [90, 20], [40, 3], kv_heads=1, dtype=torch.bfloat16, tail=True)
    check(case, device, sliding_window=50)


@pytest.mark.parametrize("group", [1, 5, 16])
def test_groups_of_a_prefill(group, device):
    """Blocks of rows begin and end inside a group."""
    config = tt.preset("k3v3", 64, page_size=16, recent_window=30)
    check(build(config, [260, 90], [90, 70], q_heads=2 * group, center=True, tail=True), device)


def test_a_sequence_does_not_depend_on_its_batch_or_on_threads(device):
    config = tt.preset("k3v3", 64)
    case = build(config, [2500, 37, 300], tail=True)
    out, lse = run(case, device)
    for i in range(3):
        alone = case._replace(
            block_table=case.block_table[i : i + 1],
            seq_lens=case.seq_lens[i : i + 1],
            tail=case.tail._replace(slots=case.tail.slots[i : i + 1]),
            q=case.q[i : i + 1],
        )
        one_out, one_lse = run(alone, device)
        assert_same_results(one_out, out[i : i + 1], device)
        assert_same_results(one_lse, lse[i : i + 1], device)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 if threads == 1 else 1)
        again, again_lse = run(case, device)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(again, out) and torch.equal(again_lse, lse)


@pytest.mark.parametrize("gap", [0.0, 6.0, 10.0, 10.4, 11.0, 12.0, 20.0])
def test_one_key_far_above_many(gap, device):
    """Weights near and below the unit they are rounded to: 127 keys, each e^-gap of one other.

    Every weight is off by at most half a unit, so the mean of 128 values is off by at most
    128 / 2 units of the largest weight, whatever the softmax looks like.
    """
    d = 64
    config = tt.preset("k8v8", d, sink_tokens=0, recent_window=0, page_size=64)
    tables = tt.make_tables(config, 0)
    k = torch.zeros(128, 1, d)
    k[77, 0, 3] = gap
    v = torch.full((128, 1, d), 2.0)
    v[77] = -1.0
    cache = tt.allocate_cache(config, 2, 1)
    tt.cache_store(k, v, cache, torch.arange(128), config, tables)
    q = torch.zeros(1, 1, d)
    q[0, 0, 3] = 1.0
    arguments = (cache, int32(0, 1)[None], int32(128), config, tables)
    moved = tuple(to_device(a, device) for a in arguments)
    kind = torch.device(device).type
    if not torch._C._dispatch_has_kernel_for_dispatch_key(
        "turboquant::paged_attention", kind.upper()
    ):
        pytest.skip(f"paged_attention has no {kind} kernel in this release")
    out, _ = tt.paged_attention(q.to(device), *moved, softmax_scale=1.0)
    exact, _ = paged_attention_reference(q, *arguments, softmax_scale=1.0)
    assert (out.cpu().double() - exact).abs().max() <= 3.0 * 128 / 2 / 32639


@pytest.mark.parametrize("d", [*HEAD_DIMS, 16, 48, 144, 1024])
@pytest.mark.parametrize("name", ["k4v4", "k5v3u", "k3v2"])
def test_head_dimensions(name, d, device):
    config = tt.preset(name, d, page_size=16)
    check(build(config, [37, 5], [2, 3], q_heads=3, kv_heads=1, center=True), device)


@pytest.mark.parametrize("group", [1, 2, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("dtype", FLOATS)
def test_groups_of_query_heads(group, q_len, dtype, device):
    config = tt.preset("k4v4", 64, page_size=16, recent_window=9)
    q_lens = [q_len, q_len]
    case = build(config, [40, 17], q_lens, q_heads=2 * group, dtype=dtype, center=True, tail=True)
    out, _ = check(case, device)
    assert len(out) == 2 * q_len


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("name", ["k4v4", "k8v4"])
def test_against_loaded_keys(name, tail, device):
    """An oracle apart from the reference: cache_load, exact rows, torch's attention."""
    config = tt.preset(name, 64, page_size=16, sink_tokens=3, recent_window=6)
    case = build(config, [50], [1], center=True, tail=tail)
    table = case.block_table
    k, v = tt.cache_load(case.cache, table, case.seq_lens, config, case.tables, 50, torch.float32)
    k, v = k[0].double(), v[0].double()
    if tail:
        exact = torch.tensor([j < 3 or 49 - j < 6 for j in range(50)])
        k[exact], v[exact] = case.k[0][exact].double(), case.v[0][exact].double()
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.q.transpose(0, 1).double(), k.transpose(0, 1), v.transpose(0, 1), enable_gqa=True
    )
    out, _ = run(case, device)
    assert (out - expected.transpose(0, 1)).abs().max() <= bounds(case, device)[1]


@pytest.mark.parametrize("q_len", range(1, 9))
def test_an_all_exact_window_is_exact_attention(q_len, device):
    """With a window over everything codes play no part: causal attention of the originals."""
    config = tt.preset("k2v2", 64, page_size=16, sink_tokens=2, recent_window=64)
    case = build(config, [60], [q_len], center=True, tail=True)
    out, lse = check(case, device)
    k, v = (part[0].double().transpose(0, 1).repeat_interleave(2, 0) for part in (case.k, case.v))
    s = case.q.double().transpose(0, 1) @ k.transpose(1, 2) / 8
    position = torch.arange(60 - q_len, 60)[:, None]
    s = s.masked_fill(torch.arange(60) > position, -torch.inf)
    score_error, out_error = bounds(case, device)
    assert (out.transpose(0, 1) - s.softmax(-1) @ v).abs().max() <= out_error
    assert (lse.T - s.logsumexp(-1)).abs().max() <= score_error + 10 * EPS


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("q_len", range(2, 9))
def test_many_queries_equal_sequential_steps(q_len, tail, device):
    config = tt.preset("k4v3", 64, page_size=16, sink_tokens=2, recent_window=7)
    lengths = [33, 20, 8]
    together = build(config, lengths, [q_len] * 3, center=True, tail=tail)
    out, lse = check(together, device)
    for i in range(q_len):
        step = build(
            config,
            [n - q_len + i + 1 for n in lengths],
            [1] * 3,
            center=True,
            tail=tail,
            max_q_len=q_len,
        )
        # the same sequences, cut short: their tokens and queries are those of the longer ones
        for s in range(3):
            assert torch.equal(step.k[s][:1], together.k[s][:1])
        step = rebuild(together, i, q_len, step)
        one, one_lse = run(step, device)
        rows = torch.arange(3) * q_len + i
        score_error, out_error = bounds(together, device)
        assert (one - out[rows]).abs().max() <= 2 * out_error
        assert (one_lse - lse[rows]).abs().max() <= 2 * score_error + 10 * EPS


def rebuild(together, i, q_len, step):
    """Step i of the same sequences: only tokens up to its position are stored."""
    config, tables = together.config, together.tables
    lengths = [int(n) - q_len + i + 1 for n in together.seq_lens]
    cache = garbage_cache(config, together.cache.shape[0], together.cache.shape[1], 99)
    tail = None
    if together.tail is not None:
        tail = tt.Tail(torch.full_like(together.tail.ring, torch.nan), together.tail.slots)
    for begin, end in (([0] * 3, [n - 1 for n in lengths]), ([n - 1 for n in lengths], lengths)):
        spans = [slice(b, e) for b, e in zip(begin, end, strict=True)]
        k, v, slots = (
            torch.cat([part[span] for part, span in zip(parts, spans, strict=True)])
            for parts in (together.k, together.v, together.slots)
        )
        tt.cache_store(
            k,
            v,
            cache,
            slots,
            config,
            tables,
            tail=tail,
            seq_lens=int32(*end),
            cu_seqlens_q=starts([e - b for b, e in zip(begin, end, strict=True)]),
        )
    return step._replace(
        cache=cache,
        tables=tables,
        block_table=together.block_table,
        seq_lens=int32(*lengths),
        tail=tail,
        q=together.q[torch.arange(3) * q_len + i],
        k=together.k,
        v=together.v,
    )


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


# The device does not change from example to example.
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    **RANDOM_CALLS,
    sinks=st.booleans(),
    window=st.integers(0, 20),
    softmax_scale=st.sampled_from([None, 0.3, 1.0]),
)
def test_everything_at_once(
    lengths,
    queries,
    name,
    page_size,
    dtype,
    group,
    sliding_window,
    soft_cap,
    sinks,
    tail,
    center,
    window,
    sink_tokens,
    softmax_scale,
    seed,
    device,
):
    config = tt.preset(name, 48, page_size=page_size, recent_window=window, sink_tokens=sink_tokens)
    q_lens = [min(n, m) for n, m in zip(lengths, queries, strict=False)]
    if not any(q_lens) or (tail and window + sink_tokens == 0):
        return
    case = build(
        config,
        lengths,
        q_lens,
        q_heads=2 * group,
        dtype=dtype,
        center=center,
        tail=tail,
        seed=10 * seed,
    )
    check(
        case,
        device,
        softmax_scale=softmax_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sink_logits=2 * randn(2 * group, seed=seed) if sinks else None,
    )


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 1000])
def test_a_sliding_window_needs_no_older_pages(window, device):
    """Pages that every query's window has left may be gone: their table entries are garbage."""
    config = tt.preset("k4v4", 64, page_size=16)
    case = build(config, [70, 23], [3, 1], center=True)
    full, _ = check(case, device, sliding_window=window)
    table = case.block_table.clone()
    for s, (length, q_len) in enumerate(((70, 3), (23, 1))):
        table[s, : max(0, length - q_len - window + 1) // 16] = -7
    out, _ = run(case._replace(block_table=table), device, sliding_window=window)
    assert_same_bytes(out, full)
    if window >= 70:
        assert_same_bytes(full, run(case, device)[0])
    else:
        assert not torch.equal(full, run(case, device)[0])


def test_soft_cap_and_learned_sinks_do_something(device):
    case = build(tt.preset("k4v4", 64), [40, 9])
    plain, lse = run(case, device)
    capped, _ = check(case, device, soft_cap=0.3)
    assert (capped - plain).abs().max() > 1e-3
    for cap in (1.2e-38, 1000.0):  # the least and the largest
        check(case, device, soft_cap=cap)
    sinks = torch.tensor([-torch.inf, 0.0, 3.0, 100.0])
    sunk, sunk_lse = check(case, device, sink_logits=sinks)
    score_error, out_error = bounds(case, device)
    # a sink multiplies the output by its share of the denominator
    share = torch.exp(lse.double() - torch.logaddexp(lse.double(), sinks.double()))
    assert (sunk - plain * share[..., None]).abs().max() <= 2 * out_error
    expected = torch.logaddexp(lse.double(), sinks.double())
    assert (sunk_lse - expected).abs().max() <= 2 * score_error + 200 * EPS


# ---- the exact tail


def test_tail_mixes_into_the_same_softmax(device):
    """Rows replaced in the tail change exactly the queries that read them."""
    config = tt.preset("k4v4", 64, page_size=16, sink_tokens=2, recent_window=3)
    case = build(config, [30], [2], tail=True, center=True)
    out, _ = check(case, device)
    ring, slot = case.tail.ring, int(case.tail.slots[0])
    rows = ring.shape[2] - 2
    readers = {0: {0, 1}, 1: {0, 1}, 26: {0}, 27: {0, 1}, 28: {0, 1}, 29: {1}, 25: set()}
    for position, expected in readers.items():
        row = position if position < 2 else 2 + (position - 2) % rows
        if position == 25:  # overwritten by a newer one: the ring has window + 1 rows
            continue
        changed = ring.clone()
        changed[slot, :, row] += 1
        other, _ = check(case._replace(tail=case.tail._replace(ring=changed)), device)
        different = {i for i in range(2) if not torch.equal(other[i], out[i])}
        assert different == expected, position


@pytest.mark.parametrize("sinks_held", [0, 1, 2, 3])
@pytest.mark.parametrize("first_held", [0, 24, 25, 27, 29, 40])
def test_rows_that_the_tail_does_not_hold(sinks_held, first_held, device):
    """tail_valid: what is missing comes from codes. Missing rows are NaN here."""
    config = tt.preset("k4v4", 64, page_size=16, sink_tokens=3, recent_window=6)
    case = build(config, [31, 12], [2, 1], tail=True, center=True)
    ring = case.tail.ring.clone()
    slot = int(case.tail.slots[0])
    rows = ring.shape[2] - 3
    ring[slot, :, sinks_held:3] = torch.nan
    for position in range(31 - rows, min(first_held, 31)):
        ring[slot, :, 3 + (position - 3) % rows] = torch.nan
    valid = torch.tensor([[3, 0]] * len(ring), dtype=torch.int32)
    valid[slot] = torch.tensor([sinks_held, first_held])
    tail = tt.Tail(ring, case.tail.slots, valid)
    out, _ = check(case._replace(tail=tail), device)
    everything, _ = check(case, device)
    assert_same_results(out[2], everything[2], device)  # the other sequence does not care
    if sinks_held == 3 and first_held <= 24:  # the first query is at 29, its window begins at 24
        assert_same_results(out, everything, device)
    if sinks_held == 0 and first_held == 40:
        without, _ = run(case._replace(tail=None), device)
        assert (out[:2] - without[:2]).abs().max() <= bounds(case, device)[1]


def test_sequences_without_a_tail(device):
    config = tt.preset("k2v2", 64, page_size=16, sink_tokens=2, recent_window=5)
    case = build(config, [31, 12, 40], tail=True, center=True)
    slots = case.tail.slots.clone()
    slots[1] = -1
    mixed, _ = check(case._replace(tail=case.tail._replace(slots=slots)), device)
    exact, _ = run(case, device)
    codes, _ = run(case._replace(tail=None), device)
    assert_same_results(mixed[[0, 2]], exact[[0, 2]], device)
    assert (mixed[1] - codes[1]).abs().max() <= bounds(case, device)[1]
    assert (exact[1] - codes[1]).abs().max() > 5 * bounds(case, device)[1]


def test_rolling_back_rejected_tokens(device):
    """Speculative decoding: 4 tokens stored, 3 rejected, others stored in their place. Codes, ring
    and results are those of a run that never saw the rejected ones."""
    config = tt.preset("k4v4", 64, page_size=16, sink_tokens=2, recent_window=6)
    accepted = build(config, [25], [4], tail=True, max_q_len=4)
    tables, slots = accepted.tables, accepted.slots[0]
    cache = garbage_cache(config, accepted.cache.shape[0], 2)
    ring = torch.full_like(accepted.tail.ring, torch.nan)
    tail = tt.Tail(ring, accepted.tail.slots)
    rejected = 5 * randn(4, 2, 64, seed=77)

    def store(k, v, start):
        span = slots[start : start + len(k)]
        cu, lengths = int32(0, len(k)), int32(start + len(k))
        tt.cache_store(
            k, v, cache, span, config, tables, tail=tail, seq_lens=lengths, cu_seqlens_q=cu
        )

    k, v = accepted.k[0], accepted.v[0]
    store(k[:20], v[:20], 0)
    for start in range(20, 25, 1):  # one accepted each time, three rejected
        draft_k, draft_v = rejected.clone(), rejected.flip(0)
        draft_k[0], draft_v[0] = k[start], v[start]
        room = min(4, len(slots) - start)
        store(draft_k[:room], draft_v[:room], start)
    out, _ = run(accepted._replace(cache=cache, tail=tail), device)
    # the last call stored position 24 alone; 21 to 24 are the queries
    clean, _ = run(accepted, device)
    assert_same_bytes(out, clean)
    page = slots // 16
    assert_same_bytes(
        *(
            torch.stack(
                tt.cache_load(c, accepted.block_table, int32(25), config, tables, 25, torch.float32)
            )
            for c in (cache, accepted.cache)
        )
    )
    assert len(page.unique()) == 2


# ---- what must and must not matter


def test_every_key_and_value_matters(device):
    """Flipping a stored token's bits changes the output of the queries that see it, no others."""
    config = tt.preset("k4v4", 64, page_size=16)
    case = build(config, [35], [3])
    out, _ = run(case, device)
    for position in (0, 15, 16, 31, 32, 33, 34):
        page, offset = divmod(int(case.slots[0][position]), 16)
        for kind in ("key", "value"):
            cache = case.cache.clone()
            place = getattr(config.record, kind)
            stored = sorted({piece.byte for c in range(64) for piece in place(offset, c)})
            cache[page, :, stored] ^= 0xFF
            other, _ = check(case._replace(cache=cache), device)
            seen = [i for i in range(3) if position <= 32 + i]
            for i in range(3):
                # every level becomes its negative: seen by every head, and more than rounding
                moved = (other[i] - out[i]).abs().amax(-1)
                if i in seen:
                    assert (moved > 0).all() and moved.max() > 2 * bounds(case, device)[1]
                else:
                    assert (moved == 0).all()


def test_wrong_keys_give_wrong_output(device):
    """Permuted keys, and the neighbour's pages: far from the right result."""
    config = tt.preset("k4v4", 64, page_size=16)
    case = build(config, [64, 64])
    out, _ = check(case, device)
    swapped = case._replace(block_table=case.block_table.flip(0))
    assert (run(swapped, device)[0] - out).abs().max() > 0.05
    k, v = torch.cat(case.k), torch.cat(case.v)
    cache = garbage_cache(config, case.cache.shape[0], 2)
    tt.cache_store(
        k.view(2, 64, 2, 64).flip(1).flatten(0, 1),
        v,
        cache,
        torch.cat(case.slots),
        config,
        case.tables,
    )
    assert (run(case._replace(cache=cache), device)[0] - out).abs().max() > 0.05


def test_pages_anywhere_give_the_same_result(device):
    config = tt.preset("k3v3", 80, page_size=16)
    results = []
    for seed in (0, 1):
        case = build(config, [50, 3, 17], seed=0)
        num_pages, table, slots = paged([50, 3, 17], 16, seed=seed + 7, spare=5)
        cache = garbage_cache(config, num_pages, 2, seed)
        tt.cache_store(
            torch.cat(case.k), torch.cat(case.v), cache, torch.cat(slots), config, case.tables
        )
        results.append(run(case._replace(cache=cache, block_table=table), device)[0])
    assert_same_bytes(*results)


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_a_broken_token_spoils_only_its_sequence(soft_cap, device):
    config = tt.preset("k4v4", 64, page_size=16)
    case = build(config, [20, 20])
    clean, _ = run(case, device, soft_cap=soft_cap)
    for kind in ("k", "v"):
        page, offset = divmod(int(case.slots[0][7]), 16)
        cache = case.cache.clone()
        start = getattr(config.record, "key_scale" if kind == "k" else "value_scale")(offset)
        cache[page, 0, start : start + 2] = torch.tensor([0, 0x7E], dtype=torch.uint8)
        out, _ = run(case._replace(cache=cache), device, soft_cap=soft_cap)
        assert out[0, :2].isnan().all()
        assert_same_bytes(out[0, 2:], clean[0, 2:])  # the other KV head
        assert_same_bytes(out[1], clean[1])


def test_large_scores_do_not_overflow(device):
    """Scores of thousands: the largest key takes all the weight."""
    config = tt.preset("k8v8", 64, page_size=16)
    case = build(config, [40])
    out, lse = check(case._replace(q=case.q * 1e4), device)
    assert torch.isfinite(out).all() and lse.abs().max() > 1e4
    out, _ = check(case._replace(q=case.q * 0), device)  # no scores: the mean of the values
    mean = case.v[0].mean(0).repeat_interleave(2, dim=0)
    assert (out[0] - mean).abs().max() < 0.02


# ---- shapes of calls


def test_padding_and_empty_sequences(device):
    """Rows past the last sequence, sequences without queries, without tokens, or without both."""
    config = tt.preset("k4v4", 64, page_size=16)
    case = build(config, [20, 0, 33, 5], [2, 0, 0, 3])
    q = torch.cat([case.q, randn(2, 4, 64, seed=5)])
    out, lse = check(case._replace(q=q), device)
    assert not out[5:].any() and (lse[5:] == -torch.inf).all()
    assert_same_bytes(out[:5], run(case, device)[0])
    # one query each, some sequences empty: padding of a captured batch
    lengths = int32(20, 0, 33, 0)
    padded = case._replace(seq_lens=lengths, cu=None, max_q_len=1, q=q[:4])
    out, lse = check(padded, device)
    assert not out[[1, 3]].any() and (lse[[1, 3]] == -torch.inf).all()
    sinks = randn(4, seed=1)
    out, lse = check(padded, device, sink_logits=sinks)
    assert not out[[1, 3]].any()
    assert_same_bytes(lse[[1, 3]], sinks.expand(2, 4))


def test_no_queries_at_all(device):
    case = build(tt.preset("k4v4", 64), [5])
    empty = case._replace(q=case.q[:0], cu=int32(0, 0))
    assert run(empty, device)[0].shape == (0, 4, 64)
    none = empty._replace(
        cu=int32(0), seq_lens=int32(), block_table=torch.zeros(0, 3, dtype=torch.int32)
    )
    assert run(none, device)[0].shape == (0, 4, 64)
    out, lse = run(none._replace(q=case.q), device)  # tokens, but no sequence
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_layouts_of_q(dtype, device):
    """Slices of a fused projection, transposed heads, any alignment."""
    config = tt.preset("k4v4", 64, page_size=16)
    case = build(config, [20, 33], [2, 3], dtype=dtype)
    out, _ = run(case, device)
    fused = torch.zeros(5, 8, 64, dtype=dtype)
    fused[:, 1:5] = case.q
    assert_same_bytes(run(case._replace(q=fused[:, 1:5]), device)[0], out)
    by_head = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert_same_bytes(run(case._replace(q=by_head), device)[0], out)
    for shift in (1, 3, 7):
        buffer = torch.zeros(shift + case.q.numel(), dtype=dtype)
        view = buffer[shift:].view(case.q.shape)
        view.copy_(case.q)
        assert_same_bytes(run(case._replace(q=view), device)[0], out)


@pytest.mark.parametrize("q_lens", [[1, 2], [9, 20]])
@pytest.mark.parametrize("gap", [16, 32, 1024, 64 * 1023])
def test_layouts_of_cache_tail_and_indices(gap, q_lens, device):
    """One layer of an allocation for several, tables as wide as the longest text, int32 slots."""
    config = tt.preset("k4v4u", 64, page_size=16, sink_tokens=2, recent_window=5)
    case = build(config, [90, 33], q_lens, dtype=torch.bfloat16, center=True, tail=True)
    expected = run(case, device)
    _, cache = entries_apart(case.cache, gap, device)
    _, ring = entries_apart(case.tail.ring, gap // 2, device)
    wide = torch.full((2, case.block_table.shape[1] + 5), -(2**31), dtype=torch.int32)
    wide[:, : case.block_table.shape[1]] = case.block_table
    wide = wide.to(device)
    tail = tt.Tail(ring, case.tail.slots.int())
    for changes in (
        {"cache": cache},
        {"tail": case.tail._replace(ring=ring)},
        {"tail": case.tail._replace(slots=tail.slots)},
        {"block_table": wide},
        {"block_table": wide[:, : case.block_table.shape[1]]},
        {"block_table": wide[:, :-1], "cache": cache, "tail": tail},
    ):
        for one, other in zip(run(case._replace(**changes), device), expected, strict=True):
            assert_same_bytes(one, other)


@pytest.mark.parametrize("dtype", FLOATS)
def test_given_outputs_are_written(dtype, device):
    """No two arguments are alike: this op has them in an order of its own."""
    config = tt.preset("k3v2", 64, page_size=16, sink_tokens=2, recent_window=5)
    case = build(config, [40, 33], [1, 3], dtype=dtype, center=True, tail=True)
    valid = int32([0, 0], [2, 31], [1, 38], [0, 0])
    options = {
        "tail": case.tail._replace(valid=valid),
        "softmax_scale": 0.2,
        "sliding_window": 24,
        "soft_cap": 3.0,
        "sink_logits": randn(4, seed=9),
    }
    expected = run(case, device, **options)
    args, kwargs = case.arguments(**options)
    out = torch.full_like(case.q, torch.nan).to(device)
    lse = torch.full(case.q.shape[:2], torch.nan, device=device)
    result = tt.paged_attention(
        *(to_device(a, device) for a in args),
        **{name: to_device(a, device) for name, a in kwargs.items()},
        out=out,
        lse=lse,
    )
    assert result[0] is out and result[1] is lse
    assert_same_bytes(out, expected[0])
    assert_same_bytes(lse, expected[1])


def test_any_chunks_of_a_prefill_give_the_same_result(device):
    """Queries in portions, each after its tokens were stored, against all at once."""
    config = tt.preset("k4v4", 64, page_size=16, sink_tokens=2, recent_window=5)
    total = 29
    whole = build(config, [total], [total], tail=True, max_q_len=total)
    expected, expected_lse = check(whole, device)
    for chunks in ([1] * total, [7, 13, 9], [28, 1]):
        cache = garbage_cache(config, whole.cache.shape[0], 2)
        tail = tt.Tail(torch.full_like(whole.tail.ring, torch.nan), whole.tail.slots)
        end = 0
        for n in chunks:
            part, end = slice(end, end + n), end + n
            cu, lengths = int32(0, n), int32(end)
            tt.cache_store(
                whole.k[0][part],
                whole.v[0][part],
                cache,
                whole.slots[0][part],
                config,
                whole.tables,
                tail=tail,
                seq_lens=lengths,
                cu_seqlens_q=cu,
            )
            case = whole._replace(
                cache=cache, tail=tail, q=whole.q[part], cu=cu, seq_lens=lengths, max_q_len=n
            )
            out, lse = run(case, device)
            score_error, out_error = bounds(whole, device)
            assert (out - expected[part]).abs().max() <= 2 * out_error
            assert (lse - expected_lse[part]).abs().max() <= 2 * score_error + 10 * EPS


@pytest.mark.cuda
def test_indices_out_of_range_are_harmless():
    """What the CPU refuses and a GPU cannot see: no key is there, and no other sequence notices."""
    config = tt.preset("k4v4", 64, page_size=16, sink_tokens=2, recent_window=5)
    case = build(config, [70, 40, 33], [9, 2, 1], center=True, tail=True)
    out, lse = run(case, "cuda")
    for page in (-1, -(2**31), case.cache.shape[0], 2**31 - 1):
        table = case.block_table.clone()
        table[0] = page
        other, other_lse = run(case._replace(block_table=table), "cuda")
        assert_same_bytes(other[9:], out[9:])
        assert_same_bytes(other_lse[9:], lse[9:])
        assert (
            other[:9].isfinite().all() and (other_lse[:9] < lse[:9]).all()
        )  # only its tail is left
        table[0] = case.block_table[0]
        table[0, 2] = page  # keys 32 to 47 are missing
        other, other_lse = run(case._replace(block_table=table), "cuda")
        assert other[:9].isfinite().all() and (other_lse[:9] < lse[:9]).all()
        assert_same_bytes(other[9:], out[9:])
    for slot in (-(2**62), -2, len(case.tail.ring), 2**62):
        slots = case.tail.slots.clone()
        slots[0] = slot
        other, _ = run(case._replace(tail=case.tail._replace(slots=slots)), "cuda")
        slots[0] = -1
        assert_same_bytes(
            other, run(case._replace(tail=case.tail._replace(slots=slots)), "cuda")[0]
        )
    for length in (-5, 2**31 - 1):
        other, _ = run(case._replace(seq_lens=int32(length, 40, 33)), "cuda")
        assert_same_bytes(other[9:], out[9:])
    for cu in ((0, 12, 12, 12), (0, 9, 11, 2**31 - 1), (0, -3, 11, 12), (5, 3, 2, 1)):
        run(case._replace(cu=int32(*cu)), "cuda")


@pytest.mark.cuda
def test_a_captured_call_follows_its_tensors():
    """Lengths, tables, queries and the number of tokens in use change between replays."""
    config = tt.preset("k4v4", 64, page_size=16)
    cases = [
        build(config, [70, 40], [9, 3], center=True, tail=True, max_q_len=12, seed=0),
        build(config, [31, 64], [1, 8], center=True, tail=True, max_q_len=12, seed=1),
    ]
    tokens, pages = 12, max(c.cache.shape[0] for c in cases)
    columns = max(c.block_table.shape[1] for c in cases)

    def padded(case):
        q = torch.zeros(tokens, 4, 64)
        q[: len(case.q)] = case.q
        cache = garbage_cache(config, pages, 2)
        cache[: case.cache.shape[0]] = case.cache
        table = torch.full((2, columns), -1, dtype=torch.int32)
        table[:, : case.block_table.shape[1]] = case.block_table
        return case._replace(q=q, cache=cache, block_table=table, tables=cases[0].tables)

    shapes = [padded(case) for case in cases]
    args, kwargs = shapes[0].arguments()
    args = tuple(to_device(a, "cuda") for a in args)
    kwargs = {name: to_device(a, "cuda") for name, a in kwargs.items()}
    out = torch.empty(tokens, 4, 64, device="cuda")
    lse = torch.empty(tokens, 4, device="cuda")
    tt.paged_attention(*args, **kwargs, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tt.paged_attention(*args, **kwargs, out=out, lse=lse)
    for case in (*shapes, shapes[0]):
        for target, source in zip(args[:4], case.arguments()[0][:4], strict=True):
            target.copy_(source)
        kwargs["cu_seqlens_q"].copy_(case.cu)
        kwargs["tail"].ring.copy_(case.tail.ring)
        kwargs["tail"].slots.copy_(case.tail.slots)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        expected, expected_lse = run(case, "cuda")
        assert_same_bytes(out, expected)
        assert_same_bytes(lse, expected_lse)


# ---- this call's own tokens


def own_tokens(case, q_lens):
    """k_new and v_new of the case: what its last tokens are made of."""
    return {
        name: torch.cat([x[len(x) - n :] for x, n in zip(part, q_lens, strict=True)])
        for name, part in (("k_new", case.k), ("v_new", case.v))
    }


OWN = ([330, 65, 20, 40, 0, 150, 3], [33, 1, 20, 0, 0, 17, 3])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("d", [64, 80, 128, 256])
@pytest.mark.parametrize("tail", [True, False])
def test_own_tokens_are_read_as_they_are(tail, d, dtype, device):
    """Older tokens from codes and tail; the rest of pages that this call's tokens share is NaN."""
    config = tt.preset("k5v4u", d, page_size=16, sink_tokens=2, recent_window=5)
    lengths, q_lens = OWN
    case = build(config, lengths, q_lens, dtype=dtype, center="scaled", tail=tail, store_new=False)
    own = own_tokens(case, q_lens)
    used = [-(-(n - new) // config.page_size) for n, new in zip(lengths, q_lens, strict=True)]
    for s, pages in enumerate(used):  # pages of own tokens alone
        case.block_table[s, pages:] = -7
    case = case._replace(block_table=case.block_table[:, : max(used)].contiguous())
    check(case, device, **own)
    check(case, device, **own, sliding_window=24, soft_cap=20.0, sink_logits=randn(4, seed=3))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 9, "soft_cap": 5.0}])
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [4, 2, 1], [1, 0, 4], None])
def test_own_tokens_of_decode_steps(q_lens, options, device):
    """Few rows, for the split-KV kernel; the third sequence is new."""
    config = tt.preset("k4v4u", 128, page_size=16, sink_tokens=2, recent_window=5)
    counts = q_lens or [1, 1, 1]
    case = build(
        config,
        [1000, 39, counts[2]],
        q_lens,
        q_heads=8,
        dtype=torch.bfloat16,
        tail=True,
        store_new=False,
    )
    check(case, device, **own_tokens(case, counts), **options)
    check(case._replace(tail=None), device, **own_tokens(case, counts), **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tiny_own_tokens(dtype, device):
    """For compute-sanitizer: few rows and many, copies of other rows than a tail's."""
    config = tt.preset("k4v4u", 64, page_size=16, sink_tokens=2, recent_window=5)
    for q_lens in ([2, 1, 3], [20, 1, 3]):
        lengths = [90, 17, 3]
        case = build(config, lengths, q_lens, dtype=dtype, tail=True, store_new=False)
        case = case._replace(block_table=case.block_table[:, :6].contiguous())  # of older tokens
        own = own_tokens(case, q_lens)
        check(case, device, **{name: x.clone() for name, x in own.items()})
        check(case, device, **own, sliding_window=7)


@pytest.mark.parametrize("q_lens", [[3, 1, 4], [30, 1, 40]])
@pytest.mark.parametrize("dtype", FLOATS)
def test_own_tokens_stored_before_or_after(dtype, q_lens, device):
    """What codes and tail hold of this call's tokens makes no difference."""
    config = tt.preset("k4v4u", 64, page_size=16, sink_tokens=2, recent_window=5)
    lengths = [70, 40, q_lens[2]]
    common = {"dtype": dtype, "center": True, "tail": True}
    after = build(config, lengths, q_lens, store_new=False, **common)
    before = build(config, lengths, q_lens, **common)
    own = own_tokens(after, q_lens)
    for options in ({}, {"sliding_window": 9}):
        expected = check(after, device, **own, **options)
        for got, want in zip(run(before, device, **own, **options), expected, strict=True):
            assert_same_bytes(got, want)
        other = build(config, lengths, q_lens, seed=7, **common)  # stored with other contents
        cache = after.cache.clone()
        for s, n in enumerate(q_lens):
            for slot in after.slots[s][lengths[s] - n :].tolist():
                copy_token(config, other.cache, cache, slot)
        for got, want in zip(
            run(after._replace(cache=cache), device, **own, **options), expected, strict=True
        ):
            assert_same_bytes(got, want)


def copy_token(config, source, target, slot):
    """The codes of one token from a cache to another with the same pages."""
    page, token = divmod(slot, config.page_size)
    record = config.record
    for head in range(target.shape[1]):
        for at in (record.key_scale(token), record.value_scale(token)):
            target[page, head, at : at + 2] = torch.tensor([0, 0x7E], dtype=torch.uint8)  # NaN


@pytest.mark.parametrize("window", [0, 1, 5, 40])
def test_a_ring_without_room_for_own_tokens(window, device):
    """Chunks longer than the ring: what storing them overwrites comes from codes, unless the caller
    says that it is there still."""
    config = tt.preset("k4v4u", 64, page_size=16, sink_tokens=2, recent_window=window)
    for q_lens, rows in (([20, 1, 3], max(1, window)), ([30, 7, 3], window + 3)):
        lengths = [90, 33, 3]
        common = {"tail": True, "max_q_len": max(1, rows + 1 - window), "dtype": torch.bfloat16}
        after = build(config, lengths, q_lens, store_new=False, **common)
        before = build(config, lengths, q_lens, **common)
        assert after.tail.ring.shape[2] == 2 + rows
        own = own_tokens(after, q_lens)
        after, before = (c._replace(max_q_len=max(q_lens)) for c in (after, before))
        expected = check(after, device, **own)
        for got, want in zip(run(before, device, **own), expected, strict=True):
            assert_same_bytes(got, want)
        valid = int32([0, 0], [0, 0], [0, 0], [0, 0], [0, 0])
        for s, slot in enumerate(after.tail.slots.tolist()):
            old = lengths[s] - q_lens[s]
            valid[slot] = int32(min(old, 2), max(0, old - rows))
        held = after._replace(tail=after.tail._replace(valid=valid))
        out, _ = check(held, device, **own)
        if window > 1:
            assert (out[0] - expected[0][0]).abs().max() > 0


def test_own_tokens_of_new_sequences_need_no_pages(device):
    """Plain causal attention: no pages, no block table, no rounding of keys or values."""
    config = tt.preset("k3v2", 64, page_size=16, sink_tokens=0, recent_window=0)
    tables = tt.make_tables(config, 0)
    for count, heads in ((5, 2), (70, 8)):
        q, k, v = (randn(count, h, 64, seed=i) for i, h in enumerate((heads, 2, 2)))
        args = (
            tt.allocate_cache(config, 0, 2),
            torch.zeros(1, 0, dtype=torch.int32),
            int32(count),
            config,
            tables,
        )
        given = {"cu_seqlens_q": int32(0, count), "max_q_len": count, "k_new": k, "v_new": v}
        kind = torch.device(device)
        out, _ = tt.paged_attention(
            q.to(kind),
            *(to_device(a, device) for a in args),
            **{name: to_device(a, device) for name, a in given.items()},
        )
        k, v = (x.double().repeat_interleave(heads // 2, 1).transpose(0, 1) for x in (k, v))
        want = torch.nn.functional.scaled_dot_product_attention(
            q.double().transpose(0, 1), k, v, is_causal=True
        ).transpose(0, 1)
        allowed = 1e-5 if kind.type == "cpu" else 2e-3  # float16 products of float32 queries
        assert (out.cpu().double() - want).abs().max() < allowed


@pytest.mark.parametrize("dtype", FLOATS)
def test_layouts_of_own_tokens(dtype, device):
    """Slices of a fused projection, transposed heads, any alignment, of one token and of many."""
    config = tt.preset("k4v4u", 64, page_size=16, sink_tokens=2, recent_window=3)
    for q_lens in ([2, 3], [1, 1]):
        case = build(config, [20, 33], q_lens, dtype=dtype, tail=True, store_new=False)
        own = own_tokens(case, q_lens)
        out, _ = run(case, device, **own)
        tokens = sum(q_lens)
        own = {name: x.to(device) for name, x in own.items()}
        fused = torch.full((tokens, 8, 64), torch.nan, dtype=dtype, device=device)
        fused[:, :4], fused[:, 4:6], fused[:, 6:] = case.q, own["k_new"], own["v_new"]
        views = {"k_new": fused[:, 4:6], "v_new": fused[:, 6:]}
        assert_same_bytes(run(case._replace(q=fused[:, :4]), device, **views)[0], out)
        by_head = {n: x.transpose(0, 1).contiguous().transpose(0, 1) for n, x in own.items()}
        assert_same_bytes(run(case, device, **by_head)[0], out)
        for shift in (1, 3, 8):
            wide = torch.full((tokens, 2, 64 + shift), torch.nan, dtype=dtype, device=device)
            wide[..., shift:] = own["k_new"]
            shifted = {"k_new": wide[..., shift:], "v_new": own["v_new"]}
            assert_same_bytes(run(case, device, **shifted)[0], out)


def test_own_tokens_with_infinities_stay_where_they_are(device):
    """A NaN among this call's tokens reaches the queries that see it, and no others."""
    config = tt.preset("k4v4u", 64, page_size=16, sink_tokens=2, recent_window=3)
    case = build(config, [20, 33], [3, 4], dtype=torch.float16, tail=True, store_new=False)
    own = own_tokens(case, [3, 4])
    clean, _ = run(case, device, **own)
    for name in own:
        bad = {n: x.clone() for n, x in own.items()}
        bad[name][4] = torch.nan  # the second token of the second sequence
        out, _ = run(case, device, **bad)
        assert out[4:].isnan().all()
        assert_same_bytes(out[:4], clean[:4])


# ---- merging


@pytest.mark.parametrize("dtype", FLOATS)
def test_merge(dtype, device):
    a, b = randn(7, 3, 64, seed=1, dtype=dtype), randn(7, 3, 64, seed=2, dtype=dtype)
    lse_a, lse_b = 5 * randn(7, 3, seed=3), 5 * randn(7, 3, seed=4)
    lse_a[0], lse_b[1], lse_a[2], lse_b[2] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
    lse_a[3], lse_b[3] = 1e4, 9.99e3
    a[0], b[1], a[2] = torch.nan, torch.inf, torch.nan  # parts without keys are ignored
    out, lse = tt.merge_attention(*(t.to(device) for t in (a, lse_a, b, lse_b)))
    exact, exact_lse = merge_attention_reference(a, lse_a, b, lse_b)
    assert out.dtype == dtype and lse.dtype == torch.float32
    allowed = HALF_UNIT[dtype] * exact.abs() + 64 * EPS * 4
    assert ((out.cpu() - exact).abs() <= allowed).all()
    assert_same_bytes(out[0], b[0])
    assert_same_bytes(out[1], a[1])
    assert not out[2].any() and (lse[2] == -torch.inf).all()
    finite = torch.isfinite(exact_lse)
    wrong = (lse.cpu() - exact_lse).abs()[finite]
    assert (wrong <= 4 * EPS * (1 + exact_lse.abs()[finite])).all()


def test_merging_two_sets_of_keys_equals_attention_over_both(device):
    """Prefix in codes, window in codes: the split that a prefill makes."""
    config = tt.preset("k4v4", 64, page_size=16)
    case = build(config, [48])
    whole, whole_lse = run(case, device)
    first = case._replace(seq_lens=int32(32))
    second = case._replace(seq_lens=int32(16), block_table=case.block_table[:, 2:].contiguous())
    parts = [t.to(device) for t in (*run(first, device), *run(second, device))]
    merged, merged_lse = tt.merge_attention(*parts)
    score_error, out_error = bounds(case, device)
    assert (merged.cpu() - whole).abs().max() <= 2 * out_error
    assert (merged_lse.cpu() - whole_lse).abs().max() <= 2 * score_error + 10 * EPS


@given(lead=st.lists(st.integers(0, 3), max_size=3), d=st.integers(1, 40), seed=st.integers(0, 9))
def test_merge_shapes(lead, d, seed):
    a, b = randn(*lead, d, seed=seed), randn(*lead, d, seed=seed + 1)
    lse_a, lse_b = (randn(*lead, 1, seed=seed + i).squeeze(-1) for i in (2, 3))
    out, lse = tt.merge_attention(a, lse_a, b, lse_b)
    exact, exact_lse = merge_attention_reference(a, lse_a, b, lse_b)
    assert out.shape == a.shape and lse.shape == lse_a.shape
    assert torch.allclose(out.double(), exact, rtol=0, atol=64 * EPS)
    assert torch.allclose(lse.double(), exact_lse, rtol=0, atol=16 * EPS)
