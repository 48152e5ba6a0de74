"""Attention over codes and tail against a float64 oracle, and what must and must not matter to it.

Caches, tails and block tables hold garbage that would show (tests/attention_cases.py).
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torch_turboquant as tt
from tests.attention_cases import (
    EPS,
    RANDOM_CALLS,
    assert_same_results,
    bounds,
    build,
    check,
    run,
    starts,
)
from tests.helpers import (
    FLOATS,
    HEAD_DIMS,
    assert_same_bytes,
    garbage_cache,
    int32,
    paged,
    randn,
    to_device,
)
from torch_turboquant.ops.attention import paged_attention_reference


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
