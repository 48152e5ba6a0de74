"""Long sequences: many query rows over many older codes, on CUDA.

With at least 1,024 rows per KV head, 3,072 codes, and enough tiles of 128 rows to fill three
quarters of the device, a sequence has a kernel of its own
(csrc/cuda/attention/row_tiles/chunks.cuh), which expands each code once, and attends to exact keys
behind them. With own tokens and 8,192 rows any number of codes is enough, where block_table has
room for 3,072 tokens or a sequence may have 16,384 rows. Lengths on the device decide.
"""

import pytest
import torch

import torch_turboquant as tt
from tests.attention_cuda import (
    DEVICE,
    DIMS,
    HALVES,
    MANY_PRESETS,
    OTHER_OPTIONS,
    attend,
    attend_again,
    behind,
    check,
    check_own,
    given,
    int32,
    own_tokens,
    scratch_bytes,
)
from tests.helpers import assert_same_bytes
from tests.test_row_tiles_launches import chosen, needs_row_tiles
from tests.test_split_kv_launches import assert_streams_share_nothing, kernels_of

pytestmark = pytest.mark.cuda

ROWS, CODES = 1024, 3072
"""Of a long sequence, at least."""
MANY_ROWS = 8192
"""With which it needs no more than one code, if there are own tokens."""
TILE = 128


def least_tiles() -> int:
    """Of rows, of all KV heads, with which a call has long sequences."""
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count * 3 // 4


def long_config(d: int = 128, name: str = "k4v4u", **options) -> tt.CacheConfig:
    return tt.preset(name, d, **{"recent_window": 20, "sink_tokens": 3, **options})


def filling(d: int = 128, **options):
    """One long sequence whose tiles of rows fill the device."""
    return behind([3200], [420], config=long_config(d), **options)


# ---- right results


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("name", MANY_PRESETS)
def test_presets(name, tail):
    case = behind([3200], [420], config=long_config(name=name), tail=tail)
    check_own(case)
    check(case)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("name", ["k5v4u", "k8v8"])
@pytest.mark.parametrize("page_size", [32, 64, 128])
def test_head_dimensions(page_size, name, d):
    config = long_config(d, name, page_size=page_size)
    for dtype in HALVES:
        case = behind([3100 + d], [420], config=config, dtype=dtype, tail=page_size == 64)
        check_own(case)


@pytest.mark.parametrize("older", [3071, 3072, 3073, 4095, 4096, 8191, 8192, 8193, 12000, 30011])
def test_lengths(older):
    """Around every border of a stretch of keys, of which there are up to four, and of a tile."""
    check_own(behind([older], [430], kv_heads=8))


@pytest.mark.parametrize("older", [1, 3, 4, 23, 24, 63, 64, 127, 128, 129, 700, 3071])
@pytest.mark.parametrize("tail", [False, True])
def test_many_rows_behind_few_codes(tail, older):
    """Fewer tokens than the tail holds, about as many, and more; and one query too few. The first
    sequence has as many rows as the host wants, which sees no room for 3,072 codes."""
    q_lens = [MANY_ROWS // 4, MANY_ROWS // 8, MANY_ROWS // 8 - 1]
    case = behind([older] * 3, q_lens, group=8, kv_heads=2, tail=tail)
    if "row_tiles" in chosen(case):
        assert any("chunks_kernel" in name for name in kernels_of(case, **own_tokens(case)))
    check_own(case)


@pytest.mark.parametrize(
    ("older", "options"), [(7600, {}), (16000, {"sliding_window": 4500})], ids=str
)
@pytest.mark.parametrize("name", ["k4v4", "k8v8"])
def test_stretches_that_most_rows_do_not_see(name, older, options):
    """Rows that see nothing of a stretch must not count as done with it while others attend to the
    stretch before, in the same place of the ring. Calls hang if they do."""
    case = behind([older] * 5, [747] * 5, config=long_config(name=name), group=5)
    if "row_tiles" in chosen(case):
        assert any("chunks_kernel" in name for name in kernels_of(case, **options))
    attend_again(case, 5, **options)
    check(case, **options)


def test_windows_that_end_before_the_codes_of_every_tile_of_rows():
    """They are expanded, and nobody reads them; the next call finds all counters at 0."""
    config = long_config(sink_tokens=5, recent_window=300)
    case = behind([310], [MANY_ROWS // 4], config=config, group=8, kv_heads=2, tail=True)
    for _ in range(20):
        check_own(case, sliding_window=150)
        check_own(case)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 150}, {"sliding_window": 600}], ids=str)
def test_tails_of_more_than_a_tile(d, options):
    """Sinks and windows that end within tiles of exact keys, of which own ones begin new ones."""
    config = long_config(d, sink_tokens=5, recent_window=300)
    case = behind([3500, 310], [420, 1040], config=config, group=8, tail=True)
    check_own(case, **options)
    check(case, **options)


@pytest.mark.parametrize(
    ("group", "kv_heads"), [(1, 13), (3, 8), (7, 8), (16, 4), (71, 2), (48, 1)]
)
def test_groups(group, kv_heads):
    queries = -(-least_tiles() * TILE // (group * kv_heads)) + TILE // group + 2
    check_own(behind([3300], [queries], group=group, kv_heads=kv_heads))


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1000},
        {"sliding_window": 3200},
        {"sliding_window": 4500, "soft_cap": 20.0},
        *OTHER_OPTIONS,
    ],
    ids=str,
)
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_options(d, tail, options):
    case = behind([9000], [420], config=long_config(d), tail=tail)
    check_own(case, **given(options, case))
    check(case, **given(options, case))


@pytest.mark.parametrize("center", [True, "scaled"])
def test_centers(center):
    check_own(behind([3200], [420], center=center))


def test_large_logits():
    """References are raised between stretches of keys and within them."""
    check_own(behind([9000], [420], spread=10.0))


def test_causal_among_codes():
    """Prompts and chunks whose own tokens are read from codes: rows see different stretches."""
    check(behind([0], [5000], group=2, kv_heads=2))
    check(behind([5000, 0], [700, 2100], group=4, kv_heads=4))


@pytest.mark.parametrize("tail", [False, True])
def test_beside_all_others(tail):
    """Decode steps, drafts, short chunks, prompts and padding before, between and behind."""
    older = [200, 3200, 0, 90, 6000, 0, 3071, 700, 3100, 0]
    q_lens = [1, 300, 0, 4, 270, 500, 300, 40, 256, 1]
    case = behind(older, q_lens, tail=tail)
    check_own(case)
    check_own(case, sliding_window=3500)


def test_many_sequences():
    """More than a warp has lanes, some of them long: their codes are more than the ring holds."""
    older = [3100 + 37 * i if i % 3 == 0 else 50 for i in range(70)]
    q_lens = [270 if i % 3 == 0 else 1 + i % 2 for i in range(70)]
    check_own(behind(older, q_lens, kv_heads=2))


def test_too_few_tiles_of_rows():
    """One tile less than fills the device, and one row more."""
    queries = (least_tiles() - 1) // 3 * TILE
    for count in (queries, queries + 1):
        check_own(behind([3200], [count], group=1, kv_heads=3))


# ---- what must not matter


def broken_page(case, sequence, page):
    """The case with a page that does not exist."""
    table = case.table.clone()
    table[sequence, page] = -1
    return case._replace(table=table)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_scales_that_are_not_numbers_reach_those_who_see_them(bad):
    """A key in the second stretch makes all rows of its KV head NaN, and nothing else.

    (The general kernel, which takes the call on GPUs without row tiles, gives an infinite key of a
    negative product the weight 0.)
    """
    needs_row_tiles(behind([500], [420]))
    case = behind([9000], [420])
    own = own_tokens(case)
    wanted = attend(case, **own)
    record, page = case.config.record, case.table[0, 8500 // case.config.page_size]
    for place in (record.key_scale, record.value_scale):
        cache = case.cache.clone()
        at = place(8500 % case.config.page_size)
        scale = torch.tensor([bad], dtype=torch.float16, device=DEVICE).view(torch.uint8)
        cache[page, 5, at : at + 2] = scale
        out, lse = attend(case._replace(cache=cache), **own)
        assert out[:, 20:24].isnan().all()
        for found, same in zip((out, lse), wanted, strict=True):
            spared = [h for h in range(32) if h // 4 != 5]
            assert_same_bytes(found[:, spared].contiguous(), same[:, spared].contiguous())


def test_pages_that_do_not_exist():
    """Their keys count as absent: the same as a shorter context, up to roundings."""
    case = behind([5120], [420])
    page = case.config.page_size
    own = own_tokens(case)
    found = attend(broken_page(case, 0, 4096 // page), **own)
    k, v = (torch.cat([x[:, :4096], x[:, 4096 + page :]], dim=1) for x in (case.k, case.v))
    shorter = behind([5120 - page], [420], k=k, v=v)._replace(q=case.q)
    for x, same in zip(found, attend(shorter, **own), strict=True):
        assert (x - same).abs().max() <= 2.0**-6 * same.abs().max()


def test_same_bits_in_every_run():
    case = behind([20000, 3200], [420, 300], tail=True)
    attend_again(case, 20, **own_tokens(case))


def test_launches():
    """Where the host cannot rule out that sequences are long."""
    needs_row_tiles(behind([500], [420]))
    for case, some in (
        *((filling(d), True) for d in DIMS),
        (behind([3200], [255]), False),
        (behind([3200], [260], kv_heads=1), False),
        (behind([500], [420]), False),
        (behind([3100], [MANY_ROWS // 8], group=8), True),
        (behind([500], [MANY_ROWS // 4], group=8), True),
        (behind([500], [MANY_ROWS // 8], group=8), False),
    ):
        names = kernels_of(case, **own_tokens(case))
        assert sum("chunks_kernel" in name for name in names) == some, names
        assert "row_tiles_kernel" in names[-1], names


def test_scratch_memory_does_not_grow_with_the_context():
    used = []
    for older in (8000, 60000):
        case = behind([older], [420])
        used.append(scratch_bytes(case, **own_tokens(case)))
    assert used[0] == used[1] < 128 << 20


def test_two_streams_at_once():
    cases = [behind([9000], [420]), behind([3200, 4000], [300, 300]), filling(64)]
    assert_streams_share_nothing(cases, own_tokens)


def test_one_graph_for_all_lengths():
    """Whether a sequence is long is decided at replay, not at capture."""
    case = behind([9000, 3200], [420, 300])
    own = own_tokens(case)
    attend(case, **own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(case, **own)
    for lengths in ((9420, 3500), (420, 3400), (3200, 300), (8192 + 420, 3372), (9420, 3500)):
        case.lengths.copy_(int32(*lengths))
        graph.replay()
        torch.cuda.synchronize()
        for x, same in zip(found, attend(case, **own), strict=True):
            assert_same_bytes(x, same)


@pytest.mark.parametrize("d", DIMS)
def test_tiny_chunks(d):
    """For compute-sanitizer: as few rows and codes as a long sequence has."""
    check_own(behind([CODES], [ROWS // 8], config=long_config(d), group=8, kv_heads=13))


def test_tiny_chunks_whose_queries_overlap():
    """Offsets that give four sequences the same queries: more rows than there is memory for.

    The sequences that it has no room for are not long. Nothing else is written, and the next call
    finds all counters at 0.
    """
    needs_row_tiles(behind([500], [420]))
    case, tokens = behind([4200] * 8, [100] * 8), 800
    own = own_tokens(case)
    wanted = attend(case, **own)
    twisted = case._replace(starts=int32(*[0, tokens] * 4, 0), max_q_len=tokens)
    assert all(x.isfinite().all() for x in attend(twisted, **own))
    for found, same in zip(attend(case, **own), wanted, strict=True):
        assert_same_bytes(found, same)
