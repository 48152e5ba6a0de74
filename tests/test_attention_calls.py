"""Shapes of calls of attention: padding, layouts, given outputs, chunks, bad indices, graphs."""

import pytest
import torch

import torch_turboquant as tt
from tests.attention_cases import EPS, bounds, build, check, run
from tests.helpers import (
    FLOATS,
    WRONG_STARTS,
    PeakOfMemory,
    assert_same_bytes,
    assert_space_around_is_left,
    entries_apart,
    garbage_cache,
    int32,
    randn,
    to_device,
    with_space_around,
)


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


@pytest.mark.parametrize("max_q_len", [1, 64])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("d", [64, 96, 128, 512])
def test_no_queries_or_no_sequences(d, dtype, max_q_len, device):
    case = build(tt.preset("k4v4", d), [5], dtype=dtype)
    empty = case._replace(q=case.q[:0], cu=int32(0, 0), max_q_len=max_q_len)
    assert run(empty, device)[0].shape == (0, 4, d)
    none = empty._replace(
        cu=int32(0), seq_lens=int32(), block_table=torch.zeros(0, 3, dtype=torch.int32)
    )
    assert run(none, device)[0].shape == (0, 4, d)
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


def test_a_long_call_takes_bounded_memory():
    """The CPU attends to some of the rows at a time, and where it stops changes no result."""
    tokens, heads, config = 6256, 32, tt.preset("k4v4", 128, page_size=16)
    half = tokens // 2  # a multiple of the tokens whose rows the CPU takes together
    cache, tables = tt.allocate_cache(config, tokens // 16, 1), tt.make_tables(config, 1)
    k, v = randn(tokens, 1, 128, seed=1), randn(tokens, 1, 128, seed=2)
    tt.cache_store(k, v, cache, torch.arange(tokens), config, tables)
    table = torch.arange(tokens // 16, dtype=torch.int32)[None]
    q = randn(tokens, heads, 128, seed=3, dtype=torch.bfloat16)

    def attend(begin, end):
        cu = int32(0, end - begin)
        numbers = {"cu_seqlens_q": cu, "max_q_len": end - begin, "sliding_window": 64}
        return tt.paged_attention(q[begin:end], cache, table, int32(end), config, tables, **numbers)

    peak = PeakOfMemory()
    whole = attend(0, tokens)
    assert peak.grown() < whole[0].nbytes + 100 * 2**20
    parts = zip(attend(0, half), attend(half, tokens), strict=True)
    for one, both in zip(whole, parts, strict=True):
        assert_same_bytes(one, torch.cat(both))


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


@pytest.mark.cuda
@pytest.mark.parametrize("cu", WRONG_STARTS)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [9, 2, 1], [70, 2, 1]])
@pytest.mark.parametrize("d", [64, 128, 512])
def test_wrong_starts_of_queries_write_nowhere_else(d, q_lens, own, cu):
    config = tt.preset("k4v4", d, page_size=16, sink_tokens=2, recent_window=5)
    case = build(config, [90, 40, 33], q_lens, dtype=torch.bfloat16, tail=True)
    args, kwargs = case._replace(cu=int32(*cu)).arguments()
    if own:
        new = torch.cat([k[-n:] for k, n in zip(case.k, q_lens, strict=True)])
        kwargs = {**kwargs, "k_new": new, "v_new": new}
    outs, out = with_space_around(tuple(case.q.shape), torch.bfloat16, "cuda")
    all_lse, lse = with_space_around(tuple(case.q.shape[:2]), torch.float32, "cuda")
    tt.paged_attention(
        *(to_device(a, "cuda") for a in args),
        **{name: to_device(a, "cuda") for name, a in kwargs.items()},
        out=out,
        lse=lse,
    )
    assert_space_around_is_left(outs)
    assert_space_around_is_left(all_lse)


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
