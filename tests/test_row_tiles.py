"""Many query rows on CUDA against the float64 oracle on the device, and what must not matter.

On GPUs with products of warpgroups (9.0) the key-tile kernel takes 17 to 32 rows of 64 and 128
channels, and 9 to 16 of many sequences, and the row-tile kernel all others. Elsewhere the split-KV
kernel or the general one takes them, which must give the same results. attention_cuda.py has the
cases and the oracle's bounds, the files of split-KV have everything about few rows.
"""

import itertools
import math
import random

import pytest
import torch

import torch_turboquant as tt
from tests.attention_cuda import (
    BF16,
    DEVICE,
    DIMS,
    HALVES,
    MIXTURES,
    assert_near,
    attend,
    attend_again,
    batch,
    build,
    check,
    check_missing_pages,
    check_own,
    decoded,
    expected,
    int32,
    own_tokens,
    randn,
    stale_cache,
    starts_of,
)
from tests.helpers import assert_same_bytes
from tests.oracle import exact_attention
from tests.test_row_tiles_launches import chosen
from tests.test_split_kv import assert_others_are_spared
from torch_turboquant.config import CacheConfig

pytestmark = pytest.mark.cuda

# ---- right results


@pytest.mark.parametrize("d", [48, 64, 128])
def test_a_scale_of_zero_with_tiny_queries(d):
    """All keys weigh the same, and those that a query does not see nothing."""
    case = build(tt.preset("k4v3", d), [300, 33], [20, 33], q_heads=8, kv_heads=1, dtype=BF16)
    check(case._replace(q=1e-30 * case.q), softmax_scale=0.0)


@pytest.mark.parametrize("group", [1, 4, 5, 7, 8, 12, 16, 48, 71])
def test_numbers_of_rows(group):
    """Around every border of a tile of rows, whose size depends on the keys, too; a tile begins and
    ends inside a group."""
    rows = (15, 16, 17, 20, 32, 33, 63, 64, 65, 96, 127, 128, 129, 192, 193, 300)
    config = tt.preset("k4v4u", 128, recent_window=20)
    q_lens = dict.fromkeys(-(-n // group) for n in rows)
    for i, q_len in enumerate(q_lens):
        case = build(
            config,
            [700 if i % 3 else 2100, q_len, 45 + q_len],
            [q_len] * 3,
            q_heads=group,
            kv_heads=1,
            dtype=HALVES[i % 2],
            tail=i % 3 > 0,
            seed=q_len,
        )
        check(case)
        if i % 2:
            check_own(case)


@pytest.mark.parametrize("q_len", [5, 8, 9, 40])
@pytest.mark.parametrize("name", tt.PRESETS)
def test_presets(name, q_len):
    """Blocks of 24 and 32 rows, tiles of 64 rows and of 128, every page size, every head_dim."""
    first = list(tt.PRESETS).index(name)
    for i, d in enumerate(DIMS):
        page_size = (16, 32, 64, 128)[(first + i) % 4]
        config = tt.preset(name, d, page_size=page_size, recent_window=37)
        lengths = [700, page_size + q_len, q_len]
        heads = {"dtype": HALVES[(first + i) % 2], "seed": first}
        check(build(config, lengths, [q_len] * 3, center="scaled", tail=True, **heads))
        check(build(config, lengths, [q_len] * 3, **heads))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", tt.PRESETS)
def test_first_and_last_numbers_of_rows_of_key_tiles(name, d):
    """Of blocks of 24 rows and of 32. Blocks share one sequence and have others whole."""
    first = list(tt.PRESETS).index(name)
    for i, rows in enumerate((17, 24, 25, 32)):
        page_size = (16, 32, 64, 128)[(first + i) % 4]
        config = tt.preset(name, d, page_size=page_size, recent_window=37)
        case = build(
            config,
            [9000, 300, 65, 1],
            [1] * 4,
            q_heads=2 * rows,
            kv_heads=2,
            dtype=HALVES[i % 2],
            center="scaled",
            tail=i in (1, 2),
            seed=10 * first + i,
        )
        check(case)
        check(case, sliding_window=333, soft_cap=20.0)


@pytest.mark.parametrize("name", tt.PRESETS)
def test_blocks_of_16_rows_of_key_tiles(name):
    """9 to 16 rows of many sequences. A block has a part of one, or all of a short one; with two KV
    heads they are 280, more than an H200 has blocks, and a block may have several."""
    first = list(tt.PRESETS).index(name)
    for i, (group, q_len) in enumerate(((9, 1), (4, 3), (5, 3), (8, 2), (16, 1), (1, 13))):
        page_size = (16, 32, 64, 128)[(first + i) % 4]
        config = tt.preset(name, 128, page_size=page_size, recent_window=(37, 5, 64, 130)[i % 4])
        lengths = [n + q_len for n in (0, 40, 63, 64, 130, 301, 700)] * 20
        lengths[50] = 1900
        case = build(
            config,
            lengths,
            [q_len] * len(lengths),
            q_heads=group * (1 + i % 2),
            kv_heads=1 + i % 2,
            dtype=HALVES[i % 2],
            center="scaled",
            tail=i % 3 > 0,
            seed=10 * first + i,
        )
        if torch.cuda.get_device_capability() == (9, 0):
            assert chosen(case) == "key_tiles"
        check(case)
        check_own(case, sliding_window=333, soft_cap=20.0)


@pytest.mark.parametrize("steps", [1, 9, 30])
def test_steps_beside_drafts_of_16_rows(steps):
    """Decode steps are another kernel's where they may be many, and sequences without queries are
    nobody's."""
    q_lens = [1] * steps + [4, 0, 3, 2] * 12 + [1] * steps
    lengths = [(q_len and 1 + 77 * i % 900) + q_len for i, q_len in enumerate(q_lens)]
    config = tt.preset("k5v4u", 128, recent_window=20)
    for tail in (False, True):
        case = build(config, lengths, q_lens, q_heads=16, kv_heads=4, center=True, tail=tail)
        check(case)
        check_own(case)


@pytest.mark.parametrize(("d", "q_len", "times"), [(64, 5, 1), (128, 5, 1), (128, 4, 25)])
@pytest.mark.parametrize("window", [1, 12, 28, 29, 88, 89, 92, 96, 184, 185, 300])
def test_numbers_of_exact_keys_of_key_tiles(window, d, q_len, times):
    """They are attended to 96 at a time, in blocks of 16: 8 more than the window here, or 7."""
    config = tt.preset("k4v4u", d, recent_window=window)
    for dtype in HALVES:
        case = build(
            config,
            [900, 40, 5] * times,
            [q_len] * 3 * times,
            kv_heads=2,
            q_heads=8,
            dtype=dtype,
            center=True,
            tail=True,
        )
        check(case)
        check_own(case)


@pytest.mark.parametrize(("d", "q_len"), [(128, 1), (128, 5), (128, 20), (64, 5)])
@pytest.mark.parametrize("name", ["k4v4u", "k5v3u", "k8v8", "k4v4", "k3v2"])
def test_many_keys_that_weigh_the_same(name, d, q_len):
    """What tensor cores cut off must not add up over the keys that one block sums.

    So many sequences have the pages of one that every block has whole sequences. Rounding to
    float16 is a relative error of 2e-4, and sums of uniform codes as they are would be off by 1e-2.
    """
    case = build(tt.preset(name, d), [40_000], [q_len], q_heads=16, kv_heads=4, dtype=torch.float16)
    case, copies = case._replace(q=0.1 * case.q), 132
    many = case._replace(
        table=case.table.repeat(copies, 1),
        lengths=case.lengths.repeat(copies),
        starts=starts_of([q_len] * copies),
        q=case.q.repeat(copies, 1, 1),
    )
    out, wanted = attend(many)[0].unflatten(0, (copies, q_len)), expected(case)[0]
    for found in (out[0], out[copies // 2], out[-1]):
        error = (found.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert error.max() < 4e-3


@pytest.mark.parametrize("value_bits", [2, 3, 4, 8])
@pytest.mark.parametrize("key_bits", [2, 3, 4, 5, 8])
def test_codes_that_no_preset_has(key_bits, value_bits):
    """One row and many of every pair of widths, on uniform grids and on tables."""
    grids = [("uniform", "uniform"), ("uniform", None), (None, "uniform"), (None, None)]
    for i, (key_grid, value_grid) in enumerate(grids):
        config = CacheConfig(128, key_bits, value_bits, key_grid, value_grid, page_size=16)
        for q_len in (1, 20):
            check(build(config, [200, 90], [q_len] * 2, dtype=HALVES[i % 2], q_heads=8))


@pytest.mark.parametrize("spread", [0.1, 3.0, 10.0])
@pytest.mark.parametrize("name", ["k4v4u", "k4v4", "k8v8"])
def test_flat_and_peaked_softmax(name, spread):
    for d in (64, 128, 256):
        for q_lens in ([9, 8, 9], [8, 8, 8], [6, 2, 5]):
            check(build(tt.preset(name, d), [8192, 777, 64], q_lens, spread=spread, tail=d == 128))


@pytest.mark.parametrize("scale", [-0.1, 0.0, 0.02])
@pytest.mark.parametrize("q_len", [5, 9, 40])
def test_scales_of_scores(q_len, scale):
    """Negative and zero, too."""
    config = tt.preset("k4v4u", 128, recent_window=20)
    case = build(config, [500, 70], [q_len] * 2, center="scaled", tail=True)
    for options in ({}, {"soft_cap": 3.0}, {"sink_logits": randn(8, seed=1)}):
        check(case, softmax_scale=scale, **options)
        check_own(case, softmax_scale=scale, **options)


@pytest.mark.parametrize("seed", range(40))
def test_everything_at_once(seed):
    chance = random.Random(seed)
    tail = chance.random() < 0.6
    config = tt.preset(
        chance.choice(list(tt.PRESETS)),
        chance.choice([*DIMS, 128, 128]),
        page_size=chance.choice([16, 32, 64, 128]),
        sink_tokens=chance.choice([1, 4, 20]),
        recent_window=chance.choice([0, 5, 64, 200]),
    )
    lengths = [chance.choice([0, 1, 17, 300, 1025, 2500]) for _ in range(chance.randint(1, 7))]
    q_lens = [min(n, chance.choice([0, 1, 1, 2, 5, 16, 90, 300])) for n in lengths]
    if not any(q_lens):
        lengths, q_lens = [190], [70]
    group = chance.choice([1, 2, 4, 5, 7, 8, 16, 20])
    kv_heads = chance.choice([1, 2, 3])
    case = build(
        config,
        lengths,
        q_lens,
        q_heads=group * kv_heads,
        kv_heads=kv_heads,
        dtype=chance.choice(HALVES),
        spread=chance.choice([1.0, 3.0]),
        center=chance.choice([False, True, "scaled"]),
        tail=tail,
        seed=100 * seed,
    )
    options = {
        "sliding_window": chance.choice([0, 0, 1, 40, 333]),
        "soft_cap": chance.choice([0.0, 0.0, 2.0, 30.0]),
        "sink_logits": randn(group * kv_heads, seed=seed) if chance.random() < 0.3 else None,
    }
    check(case, **options)
    check_own(case, **options)


@pytest.mark.parametrize("own", [False, True])
def test_rows_of_the_tail_that_are_missing(own):
    """tail.valid: what the ring does not hold comes from codes. Missing rows are NaN here."""
    config = tt.preset("k4v4u", 128, sink_tokens=6, recent_window=40)
    lengths, q_lens = [500, 90, 200], [20, 20, 1]
    case = build(config, lengths, q_lens, tail=True)
    ring, slots = case.tail.ring.clone(), case.tail.slots.tolist()
    held = [(4, 475), (0, 60), (6, 6)]
    valid = int32(*[0] * (2 * len(ring))).view(-1, 2)
    rows = ring.shape[2] - 6
    for slot, length, (sinks, first) in zip(slots, lengths, held, strict=True):
        valid[slot] = int32(sinks, first)
        ring[slot, :, sinks:6] = torch.nan
        for position in range(max(6, length - rows), first):
            ring[slot, :, 6 + (position - 6) % rows] = torch.nan
    case = case._replace(tail=case.tail._replace(ring=ring, valid=valid))
    given = own_tokens(case) if own else {}
    exact = {"exact_k": case.k, "exact_v": case.v, "sinks": 6, "window": 40}
    wanted = exact_attention(case.q, *decoded(case), lengths, q_lens, held=held, own=own, **exact)
    assert_near(attend(case, **given), wanted, case.spread)


def test_long_sequences_are_cut_into_parts():
    """So many keys and so few tiles of rows that blocks share them, and short sequences beside."""
    config = tt.preset("k4v4u", 128)
    for lengths, q_lens in (
        ([70000], [8]),
        ([20000, 1, 9000], [9, 1, 40]),
        ([9000 + 700 * i for i in range(12)], [20] * 12),
        ([1000, 40000, 10], [1, 300, 10]),
    ):
        case = build(config, lengths, q_lens, q_heads=4, kv_heads=1, tail=len(lengths) < 4)
        check(case)
        check_own(case, sliding_window=7000)
    for d, q_len in ((64, 24), (64, 5), (192, 24), (256, 24)):
        check(build(tt.preset("k4v4", d), [30000, 50], [q_len] * 2, kv_heads=1, spread=3.0))


@pytest.mark.parametrize("d", [64, 128])
def test_neighbours_that_many_blocks_share(d):
    """Long sequences among many short ones, 5 queries each: a block ends one and begins the next,
    and dozens of blocks join one in groups."""
    config, shorts = tt.preset("k5v4u", d), [100] * 150
    lengths = [*shorts, 60_000, 45_000, *shorts, 31_000]
    check(build(config, lengths, [5] * len(lengths), q_heads=4, kv_heads=1, tail=d == 64))


@pytest.mark.parametrize("q_len", [8, 20])
def test_every_token_can_be_found(q_len):
    """One query for every token of a sequence, so near its key that it takes all the weight: the
    result is this token's value and no other's. All sequences share the pages."""
    length, kv_heads, group = 2048, 2, 4
    for name, page_size in (("k4v4", 16), ("k5v4u", 32), ("k3v3", 64), ("k4v2", 128), ("k8v8", 16)):
        config = tt.preset(name, 128, page_size=page_size)
        case = build(config, [length], kv_heads=kv_heads)
        targets = torch.arange(length - q_len + 1, device=DEVICE)
        targets = targets[: len(targets) // q_len * q_len]
        seqs = len(targets) // q_len
        case = case._replace(
            q=(3 * case.k[0, targets].float()).to(BF16).repeat_interleave(group, 1),
            table=case.table.expand(seqs, -1).contiguous(),
            lengths=case.lengths.expand(seqs).contiguous(),
            starts=q_len * torch.arange(seqs + 1, dtype=torch.int32, device=DEVICE),
            max_q_len=q_len,
        )
        out, _ = attend(case)
        alone = case._replace(table=case.table[:1], lengths=case.lengths[:1])
        values = decoded(alone)[1][0]
        for head in range(kv_heads * group):
            found, value = out[:, head].float(), values[:, head // group]
            assert torch.equal((found @ value.T).argmax(-1), targets)
            cosine = torch.nn.functional.cosine_similarity(found, value[targets], dim=-1)
            assert cosine.min() > 0.9999


# ---- what must not matter


def test_layouts_of_q_and_own_tokens():
    """Slices of a fused projection, transposed heads, any alignment; out may be q."""
    for lengths, q_lens in (
        ([700, 90], [20, 20]),
        ([700, 90, 40], [30, 1, 9]),
        ([700, 90, 40], [6, 6, 6]),
        ([700, 90, 40], [8, 1, 7]),
    ):
        case = build(tt.preset("k4v4u", 128), lengths, q_lens, tail=True)
        out, lse = check_own(case)
        own = own_tokens(case)
        fused = torch.full((len(case.q), 12, 128), torch.nan, dtype=BF16, device=DEVICE)
        fused[:, :8], fused[:, 8:10], fused[:, 10:] = case.q, own["k_new"], own["v_new"]
        by_head = case.q.transpose(0, 1).contiguous().transpose(0, 1)
        shifted = torch.empty(case.q.numel() + 3, dtype=BF16, device=DEVICE)[3:]
        shifted = shifted.view(case.q.shape).copy_(case.q)
        views = {"k_new": fused[:, 8:10], "v_new": fused[:, 10:]}
        for q, given in ((fused[:, :8], views), (by_head, own), (shifted, own)):
            again, again_lse = attend(case._replace(q=q), **given)
            assert_same_bytes(again, out)
            assert_same_bytes(again_lse, lse)
        q = case.q.clone()
        again, _ = attend(case._replace(q=q), **own, out=q, lse=torch.empty_like(lse))
        assert again is q
        assert_same_bytes(q, out)


@pytest.mark.parametrize("q_lens", [[20, 20, 20], [40, 1, 3], [8, 8, 8], [5, 1, 3]])
def test_stale_bytes_do_not_matter(q_lens):
    """Other garbage, in the pages, behind the table and in the tail: the same result."""
    config = tt.preset("k5v4u", 128, page_size=16)
    lengths = [700, 33, 41]
    case = build(config, lengths, q_lens, tail=True)
    out, lse = check(case)
    cache = stale_cache(config, len(case.cache), 2, seed=77)
    for s, length in enumerate(lengths):
        slots = case.slots[s].to(DEVICE)
        tt.cache_store(case.k[s, :length], case.v[s, :length], cache, slots, config, case.tables)
    ring = torch.where(case.tail.ring.isnan(), torch.inf, case.tail.ring)
    for nowhere in (-1, 2**31 - 1, len(cache)):
        table = torch.where(case.table < 0, nowhere, case.table)
        wide = torch.cat([table, torch.full_like(table, nowhere)], 1)
        tail = case.tail._replace(ring=ring)
        again = attend(case._replace(cache=cache, table=wide, tail=tail))
        assert_same_bytes(again[0], out)
        assert_same_bytes(again[1], lse)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("q_lens", [[20, 20], [40, 17], [8, 8], [6, 6]])
def test_pages_that_do_not_exist_hold_no_keys(q_lens, d):
    """Page ids out of range inside a sequence: as if its keys there scored -inf.

    (Of row tiles and key tiles only: what the split-KV kernel makes of such keys means nothing.)
    """
    config = tt.preset("k4v4u", d, page_size=16)
    case = build(config, [400, 90], q_lens)
    if chosen(case) == "split_kv":  # on GPUs without row tiles
        pytest.skip("the split-KV kernel takes sequences of so many rows on this GPU")
    check_missing_pages(case)


@pytest.mark.parametrize("group", [4, 16])
def test_queries_before_the_first_key(group):
    """Padding: sequences of no tokens, or of fewer tokens than queries."""
    config = tt.preset("k4v4u", 128, page_size=16)
    case = build(config, [300, 60, 50, 40, 45], [40] * 5, q_heads=group, kv_heads=1)
    for q_lens in ([40] * 5, [1, 40, 40, 0, 3]):
        case = case._replace(lengths=int32(300, 0, 17, 40, 1), starts=starts_of(q_lens))
        case = case._replace(q=case.q[: sum(q_lens)])
        out, lse = expected(case)
        out[lse == -torch.inf] = 0
        assert (lse == -torch.inf).any()
        assert_near(attend(case), (out, lse), case.spread)


@pytest.mark.parametrize(
    ("name", "q_lens"),
    [("k4v4", [40, 40]), ("k4v4", [40, 1]), ("k4v4u", [8, 8]), ("k5v4u", [6, 1])],
)
@pytest.mark.parametrize("window", [1, 31, 100, 700])
def test_a_sliding_window_needs_no_older_pages(window, name, q_lens):
    """Pages that every query's window has left are neither looked up nor read."""
    config = tt.preset(name, 128, page_size=16)
    lengths = [3000, 500]
    case = build(config, lengths, q_lens)
    out, lse = check(case, sliding_window=window)
    table, cache = case.table.clone(), case.cache.clone()
    for s, (length, count) in enumerate(zip(lengths, q_lens, strict=True)):
        gone = max(0, length - count - window + 1) // 16
        cache[table[s, :gone].long()] = stale_cache(config, gone, 2)
        table[s, :gone] = torch.tensor([-7, 2**31 - 1] * gone, device=DEVICE)[:gone]
    again, again_lse = attend(case._replace(cache=cache, table=table), sliding_window=window)
    assert_same_bytes(again, out)
    assert_same_bytes(again_lse, lse)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("q_lens", [[20, 20], [70, 1], [8, 8], [6, 1]])
def test_a_broken_token_spoils_only_who_sees_it(q_lens, d):
    """A NaN in the key or value of one head, in codes: the queries that see it, nobody else."""
    config, lengths = tt.preset("k4v4u", d), [300, 300]
    clean = build(config, lengths, q_lens)
    out, _ = check(clean)
    count = q_lens[0]
    for which, behind in itertools.product("kv", (0, 1, 9, count - 1, 200)):
        position = 299 - behind
        parts = {"k": clean.k.clone(), "v": clean.v.clone()}
        parts[which][0, position, 0, 7] = torch.nan
        spoiled, _ = attend(build(config, lengths, q_lens, **parts))
        seeing = torch.arange(count, device=DEVICE) + 300 - count >= position
        assert spoiled[:count][seeing][:, :4].isnan().all()
        assert_others_are_spared(spoiled, out, seeing)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("exact", ["own", "tail"])
@pytest.mark.parametrize(("which", "bad"), [("k", math.nan), ("v", math.nan), ("v", math.inf)])
def test_a_broken_exact_token_spoils_only_who_sees_it(which, bad, exact, d):
    """The same among exact keys and values, of the tail and of this call.

    A value may spoil its own channel (number 7 here) or all channels of the rows that see it.
    """
    config = tt.preset("k4v4u", d, recent_window=70)
    for q_lens in ([20, 20], [90, 1], [8, 8], [6, 1]):
        lengths, count = [300, 300], q_lens[0]
        clean = build(config, lengths, q_lens, tail=exact == "tail")
        run = attend if exact == "tail" else lambda case: attend(case, **own_tokens(case))
        out, _ = run(clean)
        for behind in (0, 1, 9, count - 1):
            position = 299 - behind
            parts = {"k": clean.k.clone(), "v": clean.v.clone()}
            parts[which][0, position, 0, 7] = bad
            spoiled, _ = run(build(config, lengths, q_lens, tail=exact == "tail", **parts))
            seeing = torch.arange(count, device=DEVICE) + 300 - count >= position
            assert not torch.isfinite(spoiled[:count][seeing][:, :4, 7]).any()
            assert_others_are_spared(spoiled, out, seeing)


def test_results_are_the_same_bits_every_time():
    """Also after calls of other shapes, which leave their own partial results behind."""
    mixed = batch(MIXTURES["all sorts"])
    cases = [
        build(tt.preset("k4v4u", 128), [30000, 37, 300], [40, 20, 1], tail=True),
        build(tt.preset("k4v4u", 128), [70000], [8], q_heads=32, kv_heads=8),
        build(tt.preset("k3v3", 64), *mixed),
        build(tt.preset("k8v8", 256), [4000, 20], [40, 1], q_heads=16),
        build(tt.preset("k4v4", 128), [9000, 37]),
    ]
    first = [attend(case) for case in cases]
    for turn in range(10):
        order = torch.randperm(len(cases), generator=torch.Generator().manual_seed(turn))
        for i in order.tolist():
            for one, other in zip(attend(cases[i]), first[i], strict=True):
                assert_same_bytes(one, other)


@pytest.mark.parametrize("q_len", [4, 17, 700])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("name", ["k8v8", "k5v4u", "k3v2"])
def test_many_items_in_turn(name, d, q_len):
    """Blocks take many items in turn. Units of eight bits have so few places that units of two
    items share one while some warps are still at the first item."""
    count = 28 if q_len > 100 else 70
    lengths = [900 + 37 * (i % 14) for i in range(count)]
    config = tt.preset(name, d, page_size=64)
    case = build(config, lengths, [q_len] * count, q_heads=32, kv_heads=2)
    attend_again(case, 10)
    check(case)


# ---- few and small: for compute-sanitizer (tests/sanitize_cuda.sh)


TINY = [(name, 64) for name in ("k4v4u", "k4v4", "k3v3", "k4v2", "k8v8")]
TINY += [("k5v4u", d) for d in DIMS]


@pytest.mark.parametrize(("name", "d"), TINY)
def test_tiny_tiles(name, d):
    """Key tiles where they take the codes, tiles of 64 rows and of 128, exact keys of both kinds, a
    part of a batch for each kernel."""
    config = tt.preset(name, d, page_size=16, search=1, recent_window=5)
    for lengths, q_lens in (
        ([200, 40], [3, 3]),
        ([200, 40, 9], [4, 1, 0]),
        ([200, 40], [9, 9]),
        ([100, 20, 3, 0], [40, 1, 3, 0]),
    ):
        case = build(config, lengths, q_lens, kv_heads=1, center=True, tail=True)
        check(case)
        check_own(case, sliding_window=20)


def test_tiny_parts():
    """A sequence that is cut into parts."""
    config = tt.preset("k4v4u", 64, page_size=128, search=1)
    check(build(config, [3000], [20], q_heads=2, kv_heads=1))
