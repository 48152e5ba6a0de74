"""Queries behind few older tokens, which are decoded once for all of them, on CUDA.

Where a call has enough query rows, more than 32 queries in some sequence, and few older tokens for
each row, these are gathered before the kernel of prompts attends to them
(csrc/cuda/attention/row_tiles/gather.cuh). Lengths on the device decide. Elsewhere other kernels
must give the same results.
"""

import pytest
import torch

import torch_turboquant as tt
from tests.attention_cuda import (
    DEVICE,
    HALVES,
    OTHER_OPTIONS,
    attend,
    attend_again,
    behind,
    check,
    check_missing_pages,
    check_own,
    given,
    int32,
    own_tokens,
    partly_held,
    scratch_bytes,
)
from tests.helpers import assert_same_bytes
from tests.test_row_tiles_launches import chosen, needs_row_tiles
from tests.test_split_kv_launches import assert_streams_share_nothing, kernels_of

pytestmark = pytest.mark.cuda

DIMS = (64, 128, 256)
"""That gathering is compiled for."""
FILLING = 900
"""Queries of four heads of eight that are enough for any GPU of compute capability 9.0."""


def gathers(case, **options) -> bool:
    return any("gather_kernel" in name for name in kernels_of(case, **options))


def check_gathered(case, **options):
    """Both with own tokens exact and from codes. On GPUs without row tiles others take the call."""
    if "row_tiles" in chosen(case):
        assert gathers(case, **own_tokens(case), **options)
    check_own(case, **options)
    check(case, **options)


# ---- right results


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("first", [0, 1])
def test_lengths(first, d, tail):
    """Around the borders of spans of 16 tokens and of tiles, and prompts without older tokens."""
    older = [0, 1, 2, 3, 4, 15, 16, 17, 22, 23, 24, 63, 64, 65, 127, 128, 129, 200, 300, 450]
    q_lens = [
        130,
        33,
        64,
        65,
        100,
        127,
        128,
        129,
        40,
        90,
        17,
        200,
        48,
        16,
        70,
        300,
        33,
        250,
        80,
        400,
    ]
    older, q_lens = older[first::2], q_lens[first::2]
    check_gathered(behind(older, q_lens, d=d, tail=tail, dtype=HALVES[first], seed=d))


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 19},
        {"sliding_window": 100},
        {"sliding_window": 333, "soft_cap": 20.0},
        *OTHER_OPTIONS,
    ],
    ids=str,
)
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("d", DIMS)
def test_options(d, tail, options):
    case = behind([300, 40, 500], [420, 233, 500], d=d, tail=tail)
    check_gathered(case, **given(options, case))


@pytest.mark.parametrize("center", [True, "scaled"])
@pytest.mark.parametrize("soft_cap", [0.0, 15.0])
@pytest.mark.parametrize("d", DIMS)
def test_centers(d, soft_cap, center):
    """Tokens are decoded without the center, so that its size does not cost them digits."""
    for tail in (False, True):
        case = behind([90, 500], [300, 700], d=d, center=center, tail=tail, dtype=HALVES[tail])
        check_gathered(case, soft_cap=soft_cap)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("name", ["k4v4", "k4v4u", "k5v4u", "k3v3", "k4v2", "k8v8"])
def test_presets(name, page_size):
    config = tt.preset(name, 128, recent_window=20, sink_tokens=3, page_size=page_size)
    check_gathered(behind([200, 33], [500, 420], config=config, tail=page_size > 32))


@pytest.mark.parametrize("d", DIMS)
def test_codes_of_8_bits(d):
    check_gathered(behind([200, 33], [500, 420], config=tt.preset("k8v8", d), tail=d > 64))


@pytest.mark.parametrize("spread", [0.01, 3.0, 10.0])
def test_flat_and_peaked_softmax(spread):
    check_gathered(behind([200, 33], [500, 420], spread=spread))


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 32), (3, 10), (7, 4), (16, 2), (71, 1)])
def test_groups(group, kv_heads):
    check_gathered(behind([100, 77], [FILLING // 2, FILLING], group=group, kv_heads=kv_heads))


@pytest.mark.parametrize("tail", [False, True])
def test_tails_of_more_than_a_tile(tail):
    config = tt.preset("k4v4u", 128, recent_window=300, sink_tokens=5)
    for window in (0, 150, 700):
        case = behind([3, 290, 600, 40], [420, 300, 200, 33], config=config, tail=tail)
        check_gathered(case, sliding_window=window)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("d", DIMS)
def test_tails_that_hold_only_some_tokens(d, seed):
    """What they do not hold comes from codes, and so do all tokens of sequences without a tail."""
    older = [200, 33, 5, 90, 64, 450, 0]
    case = behind(older, [130, 300, 40, 70, 200, 33, 100], d=d, tail=True, seed=seed)
    check_gathered(partly_held(case, seed))


@pytest.mark.parametrize("tail", [False, True])
def test_beside_all_others(tail):
    """Decode steps, drafts, prompts, a long sequence, too many older tokens, and padding."""
    older = [200, 100, 0, 90, 3500, 0, 71, 700, 3100, 500, 60, 2000]
    q_lens = [1, 300, 0, 4, 600, 500, 300, 40, 56, 1, 33, 36]
    case = behind(older, q_lens, tail=tail)
    if "row_tiles" in chosen(case):
        assert gathers(case, **own_tokens(case))
    check_own(case)
    check_own(case, sliding_window=350)
    check(case)


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
def test_prompts_beside_steps_that_alone_have_older_tokens(drafts, tail):
    """Nobody's are gathered, so prompts do not wait, and nothing reads where rows would be."""
    case = behind(
        [900] * 20 + [60] * drafts + [0] * 4, [1] * 20 + [8] * drafts + [300] * 4, tail=tail
    )
    if "row_tiles" in chosen(case):
        assert gathers(case, **own_tokens(case))
    for _ in range(3):  # memory that held rows before
        check_own(behind([200] * 6, [300] * 6, tail=tail))
        check_own(case)


@pytest.mark.parametrize("d", DIMS)
def test_more_than_there_is_room_for(d):
    """Some are left to row tiles; without own tokens, all are."""
    case = behind([900] * 34, [230] * 34, d=d, kv_heads=8 * 128 // d, group=2, tail=True)
    check_own(case)
    check(case)


def test_many_sequences():
    """More than the list has room for, and than a block has threads."""
    case = behind([40 + n % 30 for n in range(260)], [33 if n % 5 else 1 for n in range(260)])
    if "row_tiles" in chosen(case):
        assert gathers(case, **own_tokens(case))
    check_own(case)


# ---- what must not matter


def test_pages_that_do_not_exist_hold_no_keys():
    needs_row_tiles(behind([50], [40]))
    config = tt.preset("k4v4u", 128, page_size=16)
    case = behind([400, 90], [500, 420], config=config)
    assert gathers(case)
    check_missing_pages(case)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("d", DIMS)
def test_scales_that_are_not_numbers_reach_those_who_see_them(d, bad):
    """An old token makes all rows of its KV head NaN; one of the call's, those behind it."""
    needs_row_tiles(behind([50], [40]))
    case = behind([200, 100], [420, 500], d=d)
    record = case.config.record
    for position, own in ((150, own_tokens(case)), (150, {}), (300, {})):
        wanted = attend(case, **own)
        page, at = (
            case.table[0, position // case.config.page_size],
            position % case.config.page_size,
        )
        for place in (record.key_scale, record.value_scale):
            cache, begin = case.cache.clone(), place(at)
            scale = torch.tensor([bad], dtype=torch.float16, device=DEVICE).view(torch.uint8)
            cache[page, 5, begin : begin + 2] = scale
            out, lse = attend(case._replace(cache=cache), **own)
            seeing = torch.arange(920, device=DEVICE) < 420
            seeing &= torch.arange(920, device=DEVICE) >= position - 200
            assert out[seeing][:, 20:24].isnan().any(-1).all()
            spared = torch.ones(out.shape[:2], dtype=torch.bool, device=DEVICE)
            spared[seeing, 20:24] = False
            for found, same in zip((out, lse), wanted, strict=True):
                assert_same_bytes(found[spared], same[spared])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_of_the_tail_that_are_not_finite_reach_those_who_see_them(bad):
    needs_row_tiles(behind([50], [40]))
    case = behind([200, 100], [420, 500], tail=True)
    own = own_tokens(case)
    wanted = attend(case, **own)
    ring = case.tail.ring.clone()
    sinks, position = case.config.sink_tokens, 190
    row = sinks + (position - sinks) % (ring.shape[2] - sinks)
    ring[case.tail.slots[0], 5, row, 1, 7] = bad
    out, _ = attend(case._replace(tail=tt.Tail(ring, case.tail.slots)), **own)
    seeing = torch.arange(920, device=DEVICE) < position + case.config.recent_window - 200
    assert not out[seeing][:, 20:24].float().isfinite().all(-1).any()
    spared = torch.ones(out.shape[:2], dtype=torch.bool, device=DEVICE)
    spared[seeing, 20:24] = False
    assert_same_bytes(out[spared], wanted[0][spared])


@pytest.mark.parametrize("tail", [False, True])
def test_same_bits_in_every_run(tail):
    case = behind([200, 33, 700], [500, 420, 300], tail=tail)
    attend_again(case, 20)
    attend_again(case, 20, **own_tokens(case))


def test_one_graph_for_all_lengths():
    """What is gathered is decided at replay, not at capture."""
    case = behind([300, 200], [500, 420])
    own = own_tokens(case)
    attend(case, **own)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(case, **own)
    for lengths in ((800, 620), (500, 420), (501, 435), (800, 420), (0, 620), (800, 620)):
        case.lengths.copy_(int32(*lengths))
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for x, same in zip(found, attend(case, **own), strict=True):
            assert_same_bytes(x, same)


def test_two_streams_at_once():
    cases = [behind([300, 70], [500, 420], seed=n, tail=n > 0) for n in range(2)]
    assert_streams_share_nothing(cases, own_tokens)


def test_what_memory_held_before_does_not_matter():
    """Tiles reach into rows behind the last sequence."""
    case = behind([200, 33], [500, 420], tail=True)
    own = own_tokens(case)
    wanted = attend(case, **own)
    for value in (0x7F, 0xFF, 0x00):
        blocks = [
            torch.full((128 << 20,), value, dtype=torch.uint8, device=DEVICE) for _ in range(2)
        ]
        del blocks
        for found, same in zip(attend(case, **own), wanted, strict=True):
            assert_same_bytes(found, same)


# ---- launches


def test_launches():
    """Gather, prompts, row tiles; not where it would not pay, nor what it is not compiled for."""
    needs_row_tiles(behind([50], [40]))
    for d in DIMS:
        case = behind([200, 33], [500, 500], d=d)
        for own in (own_tokens(case), {}):
            names = kernels_of(case, **own)
            wanted = ("gather_kernel", "prompts_kernel", "row_tiles_kernel")
            assert len(names) == 3, names
            assert all(name in found for name, found in zip(wanted, names, strict=True)), names
    few = behind([200, 33], [33, 20])
    other_dim = behind([200, 33], [500, 420], config=tt.preset("k4v4u", 96))
    no_page_more = behind([0, 0], [512, 420])
    pages = 512 // no_page_more.config.page_size
    no_page_more = no_page_more._replace(table=no_page_more.table[:, :pages])
    for case in (few, other_dim):
        assert not gathers(case, **own_tokens(case)) and not gathers(case)
    assert not gathers(no_page_more, **own_tokens(no_page_more))
    without_own = [
        behind([700] * n, [q] * n) for n, q in ((2, 500), (16, 500), (2, 420), (30, 500))
    ]
    assert [gathers(case) for case in without_own] == [True, True, True, False]


def test_scratch_memory_has_a_limit():
    used = []
    for count in (60, 120):
        case = behind([600] * count, [160] * count, kv_heads=8, group=1)
        used.append(scratch_bytes(case, **own_tokens(case)))
    assert used[1] < 128 << 20 and used[1] - used[0] < 1 << 16


@pytest.mark.parametrize("d", DIMS)
def test_tiny_batches(d):
    """For compute-sanitizer."""
    check_own(behind([40, 17], [420, 300], d=d, kv_heads=13 * 128 // d, group=2, tail=True))


def overlapping():
    """A batch, and the same with offsets that give four sequences the same queries."""
    case, tokens = behind([900] * 8, [100] * 8), 800
    return case, case._replace(starts=int32(*[0, tokens] * 4, 0), max_q_len=tokens)


def test_tiny_batches_whose_queries_overlap():
    """Nothing else is written, and the next call finds all counters at 0."""
    case, twisted = overlapping()
    own = own_tokens(case)
    wanted = attend(case, **own)
    assert all(x.isfinite().all() for x in attend(twisted, **own))
    for found, same in zip(attend(case, **own), wanted, strict=True):
        assert_same_bytes(found, same)


def test_batches_whose_queries_overlap_are_gathered():
    """So that the test before is about the kernel of this file. compute-sanitizer, which runs tests
    whose names begin with `tiny`, leaves no room for the profiler that says which kernels run."""
    case, twisted = overlapping()
    if "row_tiles" in chosen(case):
        assert gathers(twisted, **own_tokens(case))
