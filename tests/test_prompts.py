"""Sequences of which no key is older than the call: prompts, read as they are, on CUDA.

With k_new, more than 64 query rows per KV head and more than 32 queries they take a kernel of their
own (csrc/cuda/attention/row_tiles/prompts.cuh), beside which row tiles take all other sequences of
the call. Lengths on the device decide. Elsewhere other kernels must give the same results.
"""

import pytest
import torch

import torch_turboquant as tt
from tests.attention_cuda import (
    BF16,
    DEVICE,
    DIMS,
    HALVES,
    OTHER_OPTIONS,
    assert_near,
    attend,
    attend_again,
    build,
    check_own,
    expected_own,
    given,
    int32,
    own_tokens,
    starts_of,
)
from tests.helpers import assert_same_bytes
from tests.test_row_tiles_launches import needs_row_tiles
from tests.test_split_kv_launches import assert_streams_share_nothing, kernels_of

pytestmark = pytest.mark.cuda

LONG = 2200
"""Queries of a sequence beside which the others are attended to in tiles of 128 rows, not 64."""


def prompts(lengths, *, d=128, older=0, long=False, **options):
    """Whole prompts, each behind so many older tokens; a long one last, if asked for."""
    lengths = [*lengths, *[LONG] * long]
    config = options.pop("config", None) or tt.preset("k4v4u", d, recent_window=20, sink_tokens=3)
    return build(config, [n + older for n in lengths], lengths, **options)


# ---- right results


@pytest.mark.parametrize("group", [1, 3, 4, 7, 16, 71])
@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("long", [False, True])
def test_lengths(long, d, group):
    """Around every border of a tile of rows and of one of keys; several tiles of both."""
    borders = {-(-rows // group) + more for rows in (64, 128, 256) for more in (-1, 0, 1)}
    lengths = sorted({*borders, 1, 63, 64, 65, 127, 128, 129, 257} - {0})
    heads = -(-8 // group) if long else 1  # without which row tiles would cut the long one
    for i in range(2):
        case = prompts(
            lengths[i::2],
            d=d,
            long=long,
            q_heads=heads * group,
            kv_heads=heads,
            dtype=HALVES[i],
            tail=i > 0,
            seed=group,
        )
        check_own(case)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 100},
        {"sliding_window": 129, "soft_cap": 20.0},
        *OTHER_OPTIONS,
    ],
    ids=str,
)
@pytest.mark.parametrize("long", [False, True])
def test_options(long, options, d):
    case = prompts([300, 33, 130], d=d, long=long)
    check_own(case, **given(options, case))


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("d", [64, 256])
def test_beside_all_others(d, tail):
    """Decode steps, drafts, chunks behind older tokens and padding, prompts anywhere between."""
    config = tt.preset("k4v4u", d, recent_window=20, sink_tokens=3)
    lengths = [200, 500, 0, 90, 1, 700, 64, 1000, 35, 40]
    q_lens = [200, 1, 0, 90, 1, 200, 64, 4, 34, 0]
    case = build(config, lengths, q_lens, tail=tail)
    check_own(case)
    check_own(case, sliding_window=70)


def test_many_sequences():
    """More than a warp has lanes, empty ones among them."""
    lengths = [17 + 5 * i % 23 if i % 3 else 0 for i in range(100)]
    check_own(prompts(lengths, kv_heads=1, q_heads=8))


@pytest.mark.parametrize("kv_heads", [1, 8])
def test_long_prompts(kv_heads):
    """Few tiles of rows, which row tiles cut into parts, and more than the device has blocks."""
    check_own(prompts([300], long=True, q_heads=kv_heads, kv_heads=kv_heads))


def test_more_heads_than_are_attended_to_at_once():
    """Heads are taken in groups whose keys fit into the L2 cache, the last of fewer heads."""
    check_own(prompts([9000], q_heads=7, kv_heads=7))


def test_more_queries_than_tokens():
    """The first queries of a sequence stand before its first token, and see nothing."""
    case = prompts([300, 100])
    case = case._replace(lengths=int32(260, 0))
    own = own_tokens(prompts([300, 100]))
    out, lse = attend(case, **own)
    assert (out[:40] == 0).all() and (lse[:40] == -torch.inf).all()
    assert (out[300:] == 0).all() and (lse[300:] == -torch.inf).all()
    later = prompts([260])._replace(q=case.q[40:300])
    wanted = attend(later, **{name: x[40:300].contiguous() for name, x in own.items()})
    for found, as_wanted in zip((out[40:300], lse[40:300]), wanted, strict=True):
        assert (found - as_wanted).abs().max() <= 2.0**-7 * as_wanted.abs().max()


@pytest.mark.parametrize("d", DIMS)
def test_tiny_prompts(d):
    """For compute-sanitizer: the last tile reaches behind the last token."""
    check_own(prompts([70, 3], d=d, q_heads=4, kv_heads=2))


@pytest.mark.parametrize("d", [64, 128])
def test_tiny_prompts_in_large_tiles(d):
    """For compute-sanitizer: 128 rows and keys, because of tokens that belong to no sequence."""
    case, more = prompts([70], d=d, q_heads=9, kv_heads=9), LONG - 70
    own = {
        name: torch.cat([x, x.new_zeros(more, *x.shape[1:])])
        for name, x in own_tokens(case).items()
    }
    padded = torch.cat([case.q, case.q.new_zeros(more, *case.q.shape[1:])])
    out, lse = attend(case._replace(q=padded, max_q_len=LONG), **own)
    assert_near((out[:70], lse[:70]), expected_own(case), case.spread)
    assert (out[70:] == 0).all()


# ---- what must not matter


def test_layouts_of_new_tokens():
    """Views of fused projections, heads first, one key for all heads or tokens, odd addresses."""
    case = prompts([200, 90], q_heads=4, kv_heads=2)
    own = own_tokens(case)
    wanted = attend(case, **own)
    tokens = len(case.q)
    fused = torch.cat([case.q, own["k_new"], own["v_new"]], dim=1)
    views = [
        {"k_new": fused[:, 4:6], "v_new": fused[:, 6:8]},
        {name: x.transpose(0, 1).contiguous().transpose(0, 1) for name, x in own.items()},
        {name: torch.cat([x, x], dim=2)[..., : x.shape[2]] for name, x in own.items()},
    ]
    for view in views:
        for found, same in zip(attend(case, **view), wanted, strict=True):
            assert_same_bytes(found, same)
    shifted = torch.empty(own["k_new"].numel() + 1, dtype=BF16, device=DEVICE)[1:]
    shifted.copy_(own["k_new"].flatten())
    found = attend(case, k_new=shifted.view_as(own["k_new"]), v_new=own["v_new"])
    assert_same_bytes(found[0], wanted[0])
    one = {name: x[:, :1].expand(tokens, 2, x.shape[2]) for name, x in own.items()}
    copied = {name: x.contiguous() for name, x in one.items()}
    for found, same in zip(attend(case, **one), attend(case, **copied), strict=True):
        assert (found - same).abs().max() <= 2.0**-7 * same.abs().max()


@pytest.mark.parametrize("behind", [2, 8])
def test_results_at_any_address(behind):
    """Behind so many elements: 16 bytes are written at once only where they may be."""
    case = prompts([150, 40])
    own = own_tokens(case)
    wanted = attend(case, **own)
    memory = torch.full((case.q.numel() + 16,), 7.0, dtype=BF16, device=DEVICE)
    out = memory[behind : behind + case.q.numel()].view_as(case.q)
    attend(case, **own, out=out, lse=torch.empty_like(wanted[1]))
    assert_same_bytes(out, wanted[0])
    assert (memory[:behind] == 7).all() and (memory[behind + case.q.numel() :] == 7).all()


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("long", [False, True])
def test_values_that_are_not_finite_reach_those_who_see_them(long, bad, d):
    """Of a prompt's own keys and values, and of the next sequence, which a tile reaches into."""
    case = prompts([200, 150], d=d, q_heads=8, kv_heads=4, long=long)
    own = own_tokens(case)
    wanted = attend(case, **own)
    for name, token in (("v_new", 170), ("k_new", 100), ("v_new", 200), ("k_new", 201)):
        broken = {**own, name: own[name].clone()}
        broken[name][token, 1, 5] = bad
        out, lse = attend(case, **broken)
        end = 200 if token < 200 else 350
        sees = torch.zeros(len(case.q), dtype=torch.bool, device=DEVICE)
        sees[token:end] = True
        spared = torch.ones(out.shape[:2], dtype=torch.bool, device=DEVICE)
        spared[sees, 2:4] = False
        # An infinite score moves the reference of the weights of all rows of a warp: roundings.
        for found, same in ((out[spared], wanted[0][spared]), (lse[spared], wanted[1][spared])):
            assert (found - same).abs().max() <= (
                2.0**-7 if bad == torch.inf else 0
            ) * same.abs().max()
        if name == "v_new" or bad != bad:
            assert not out[token:end, 2:4].float().isfinite().all(dim=-1).any()


@pytest.mark.parametrize("long", [False, True])
def test_same_bits_in_every_run(long):
    case = prompts([700, 300, 64], tail=True, long=long)
    attend_again(case, 20, **own_tokens(case))


def test_one_graph_for_prompts_and_chunks():
    """What is a prompt is decided by lengths at replay, not at capture."""
    chunk = prompts([130, 70], older=64)
    own = own_tokens(chunk)
    attend(chunk, **own)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(chunk, **own)
    both = int32(194, 134), int32(130, 134), int32(130, 70), int32(194, 134)
    for lengths in both:
        chunk.lengths.copy_(lengths)
        graph.replay()
        eager = attend(chunk, **own)
        assert_same_bytes(out, eager[0])
        assert_same_bytes(lse, eager[1])
        if lengths.tolist() == [194, 134]:
            assert_near((out, lse), expected_own(chunk), chunk.spread)


# ---- launches


def test_launches():
    """Two kernels with k_new and more than 64 rows, one after the other; else one."""
    needs_row_tiles(prompts([100]))
    for d in DIMS:
        case = prompts([100], d=d)
        first, second = kernels_of(case, **own_tokens(case))
        assert "prompts_kernel" in first and "row_tiles_kernel" in second
        (only,) = kernels_of(case)
        assert "row_tiles_kernel" in only
    for few in (prompts([16, 16]), prompts([32, 32], q_heads=16)):
        (only,) = kernels_of(few, **own_tokens(few))
        assert "row_tiles_kernel" in only
    expanded = {name: x[:, :1].expand(-1, 2, -1) for name, x in own_tokens(case).items()}
    one_long = prompts([], long=True, q_heads=1, kv_heads=1)
    for call, own in ((case, expanded), (one_long, own_tokens(one_long))):
        (only,) = kernels_of(call, **own)
        assert "row_tiles_kernel" in only


def test_streams_share_nothing():
    """Calls on two streams take their items from counters of their own."""
    assert_streams_share_nothing([prompts([700, 300], seed=n) for n in range(2)], own_tokens)


def test_padding_behind_the_last_sequence():
    """Tokens that belong to no sequence get zeros, as in every other call."""
    case = prompts([200])
    own = {name: torch.cat([x, x[:30]]) for name, x in own_tokens(case).items()}
    case = case._replace(q=torch.cat([case.q, case.q[:30]]), starts=starts_of([200]))
    out, lse = attend(case, **own)
    assert (out[200:] == 0).all() and (lse[200:] == -torch.inf).all()
