"""Decode steps on CUDA: attention of a few queries per sequence, against a float64 oracle on the
device, and what must not matter to it.
"""

import math
import random

import pytest
import torch
from torch import Tensor

import torch_turboquant as tt
from tests.attention_cuda import (
    BF16,
    DEVICE,
    DIMS,
    MANY_PRESETS,
    assert_near,
    attend,
    build,
    check,
    decoded,
    expected,
    generator,
    randn,
    stale_cache,
)
from tests.helpers import FLOATS, assert_same_bytes

pytestmark = pytest.mark.cuda


# ---- right results


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("name", tt.PRESETS)
def test_presets_and_lengths(name, page_size):
    config = tt.preset(name, 128, page_size=page_size)
    lengths = [1, page_size - 1, page_size, page_size + 1, 4095, 5 * page_size + 3]
    check(build(config, lengths))


@pytest.mark.parametrize("name", MANY_PRESETS)
@pytest.mark.parametrize("d", [*DIMS, 512, 576])
def test_head_dimensions(d, name):
    check(build(tt.preset(name, d), [1000, 33], [1, 3], center="scaled", tail=True))


@pytest.mark.parametrize(
    ("page_size", "group", "q_len"), [(16, 3, 1), (32, 1, 1), (64, 2, 4), (128, 16, 1)]
)
@pytest.mark.parametrize("name", tt.PRESETS)
@pytest.mark.parametrize("d", [d for d in DIMS if d % 64])
def test_head_dimensions_that_fill_no_chunk(d, name, page_size, group, q_len):
    """Every pair of codes, page size and size of a block of rows, with and without the tail."""
    config = tt.preset(name, d, page_size=page_size, sink_tokens=3, recent_window=37)
    lengths, q_lens = [1000, page_size + 1, 4], [q_len, 1, q_len]
    heads = {"q_heads": 2 * group, "seed": d}
    case = build(config, lengths, q_lens, center="scaled", tail=True, **heads)
    check(case)
    check(case, sliding_window=100, soft_cap=20.0, sink_logits=randn(2 * group, seed=d))
    check(build(config, lengths, q_lens, dtype=torch.float16, **heads))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("q_len", [1, 2, 4])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_groups_of_query_heads(group, q_len, dtype):
    config = tt.preset("k4v4", 128)
    case = build(config, [700, 45], [q_len, q_len], q_heads=2 * group, dtype=dtype, tail=True)
    check(case)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spread", [0.1, 3.0, 10.0])
@pytest.mark.parametrize("name", tt.PRESETS)
def test_flat_and_peaked_softmax(name, spread, dtype):
    case = build(tt.preset(name, 128), [8192, 777, 64], spread=spread, dtype=dtype)
    scores = case.q[0, 0].double() @ case.k[0, :, 0].double().T / math.sqrt(128)
    assert scores.std().item() == pytest.approx(spread, rel=0.3)
    check(case)


@pytest.mark.parametrize("name", ["k4v4", "k4v4u", "k3v3"])
@pytest.mark.parametrize("d", [d for d in DIMS if d != 128])
def test_peaked_softmax_of_other_head_dimensions(d, name):
    check(build(tt.preset(name, d), [5000, 100], [2, 1], spread=10.0, center="scaled", tail=True))


@pytest.mark.parametrize("name", ["k4v4", "k5v4u"])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("q_len", range(1, 17))
def test_many_queries_equal_sequential_steps(q_len, tail, name):
    """The ring of the tail still holds the windows of all queries, so one cache serves all."""
    config = tt.preset(name, 128, recent_window=20)
    lengths = [300, 40, 2000, q_len]
    case = build(config, lengths, [q_len] * 4, tail=tail, max_q_len=16, seed=q_len)
    out, lse = check(case)
    for i in range(q_len):
        rows = torch.arange(4, device=DEVICE) * q_len + i
        step = case._replace(
            q=case.q[rows], lengths=case.lengths - (q_len - 1 - i), starts=None, max_q_len=1
        )
        one, one_lse = check(step)
        assert_near((out[rows], lse[rows]), (one.double(), one_lse.double()), 3.0, roundings=2)


def test_mixed_numbers_of_queries():
    config = tt.preset("k4v4u", 128)
    lengths = [500, 1, 0, 70, 16, 3000, 900, 33]
    q_lens = [3, 1, 0, 16, 16, 0, 7, 2]
    check(build(config, lengths, q_lens, tail=True, center=True))
    check(build(config, lengths, q_lens, max_q_len=16, q_heads=14))


@pytest.mark.parametrize("seed", range(40))
def test_everything_at_once(seed):
    chance = random.Random(seed)
    tail = chance.random() < 0.5
    config = tt.preset(
        chance.choice(list(tt.PRESETS)),
        chance.choice(DIMS),
        page_size=chance.choice([16, 32, 64, 128]),
        sink_tokens=chance.choice([1, 4, 20]),
        recent_window=chance.choice([0, 5, 64, 200]),
    )
    lengths = [chance.choice([0, 1, 17, 300, 1025, 2500]) for _ in range(chance.randint(1, 6))]
    q_lens = [min(n, chance.choice([0, 1, 1, 2, 5, 16])) for n in lengths]
    if not any(q_lens):
        lengths, q_lens = [90], [2]
    group = chance.choice([1, 2, 4, 5, 7, 8, 16])
    kv_heads = chance.choice([1, 2, 3])
    case = build(
        config,
        lengths,
        q_lens,
        q_heads=group * kv_heads,
        kv_heads=kv_heads,
        dtype=chance.choice(FLOATS),
        spread=chance.choice([1.0, 3.0]),
        center=chance.choice([False, True, "scaled"]),
        tail=tail,
        seed=100 * seed,
    )
    check(
        case,
        sliding_window=chance.choice([0, 0, 1, 40, 333]),
        soft_cap=chance.choice([0.0, 0.0, 2.0, 30.0]),
        sink_logits=randn(group * kv_heads, seed=seed) if chance.random() < 0.3 else None,
    )


@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("name", MANY_PRESETS)
def test_every_token_can_be_found(name, q_len):
    """One query for every token of a sequence, so near its key that it takes all the weight: the
    result is this token's value and no other's. All sequences share the pages."""
    config = tt.preset(name, 128, page_size=16)
    length, kv_heads, group = 4095, 2, 4
    case = build(config, [length], kv_heads=kv_heads, dtype=torch.float32)
    targets = torch.arange(length - q_len + 1, device=DEVICE)
    targets = targets[: len(targets) // q_len * q_len]
    seqs = len(targets) // q_len
    case = case._replace(
        q=(3 * case.k[0, targets]).repeat_interleave(group, 1),
        table=case.table.expand(seqs, -1).contiguous(),
        lengths=case.lengths.expand(seqs).contiguous(),
        starts=q_len * torch.arange(seqs + 1, dtype=torch.int32, device=DEVICE),
        max_q_len=q_len,
    )
    out, _ = attend(case)
    alone = case._replace(table=case.table[:1], lengths=case.lengths[:1])
    values = decoded(alone)[1][0]
    for head in range(kv_heads * group):
        found, value = out[:, head], values[:, head // group]
        assert torch.equal((found @ value.T).argmax(-1), targets)
        cosine = torch.nn.functional.cosine_similarity(found, value[targets], dim=-1)
        assert cosine.min() > 0.9999


def test_wrong_keys_give_wrong_output():
    config = tt.preset("k4v4", 128)
    case = build(config, [600, 600], spread=3.0)
    out, _ = check(case)
    swapped, _ = attend(case._replace(table=case.table.flip(0).contiguous()))
    other = build(config, [600, 600], spread=3.0, k=case.k.flip(1), v=case.v)
    for wrong in (swapped, attend(other)[0]):
        cosine = torch.nn.functional.cosine_similarity(wrong.float(), out.float(), dim=-1)
        assert cosine.max() < 0.9


# ---- what must not matter


def test_layouts_of_q():
    """Slices of a fused projection, transposed heads, any alignment."""
    case = build(tt.preset("k4v4", 128), [700, 33], [2, 3], tail=True)
    out, lse = check(case)
    fused = torch.full((5, 12, 128), torch.nan, dtype=BF16, device=DEVICE)
    fused[:, :8] = case.q
    by_head = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    shifted = torch.empty(case.q.numel() + 3, dtype=BF16, device=DEVICE)[3:].view(case.q.shape)
    shifted.copy_(case.q)
    for q in (fused[:, :8], by_head, shifted):
        again, again_lse = attend(case._replace(q=q))
        assert_same_bytes(again, out)
        assert_same_bytes(again_lse, lse)


def test_stale_bytes_do_not_matter():
    """Other garbage, in the pages, behind the table and in the tail: the same result."""
    config = tt.preset("k5v4u", 128)
    case = build(config, [700, 33, 1], tail=True)
    out, lse = check(case)
    cache = stale_cache(config, len(case.cache), 2, seed=77)
    for s, length in enumerate((700, 33, 1)):
        slots = case.slots[s].to(DEVICE)
        tt.cache_store(case.k[s, :length], case.v[s, :length], cache, slots, config, case.tables)
    table = case.table.clone()
    table[table < 0] = 2**31 - 1
    ring = torch.where(case.tail.ring.isnan(), torch.inf, case.tail.ring)
    tail = case.tail._replace(ring=ring)
    again = attend(case._replace(cache=cache, table=table, tail=tail))
    assert_same_bytes(again[0], out)
    assert_same_bytes(again[1], lse)


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("window", [1, 16, 31, 100, 700])
def test_a_sliding_window_needs_no_older_pages(window, q_len):
    """Pages that every query's window has left are neither looked up nor read."""
    config = tt.preset("k4v4", 128, page_size=16)
    lengths = [3000, 500, 20]
    case = build(config, lengths, [q_len] * 3)
    out, lse = check(case, sliding_window=window)
    table, cache = case.table.clone(), case.cache.clone()
    for s, length in enumerate(lengths):
        gone = max(0, length - q_len - window + 1) // 16
        cache[table[s, :gone].long()] = stale_cache(config, gone, 2)
        table[s, :gone] = torch.tensor([-7, 2**31 - 1] * gone, device=DEVICE)[:gone]
    again, again_lse = attend(case._replace(cache=cache, table=table), sliding_window=window)
    assert_same_bytes(again, out)
    assert_same_bytes(again_lse, lse)
    full, _ = attend(case)
    assert not torch.equal(full, out)


def test_pages_anywhere_give_the_same_result():
    config = tt.preset("k3v3", 128, page_size=16)
    case = build(config, [3000, 17], [2, 1])
    out, lse = check(case)
    order = torch.randperm(len(case.cache), generator=generator(3), device=DEVICE)
    cache = torch.empty_like(case.cache)
    cache[order] = case.cache
    table = torch.where(case.table >= 0, order[case.table.clamp(0).long()].int(), case.table)
    again, again_lse = attend(case._replace(cache=cache, table=table))
    assert_same_bytes(again, out)
    assert_same_bytes(again_lse, lse)


def test_the_rest_of_the_batch_changes_no_more_than_rounding():
    config = tt.preset("k4v4", 128)
    case = build(config, [5000, 37, 300, 1200], spread=3.0, tail=True)
    out, lse = check(case)
    for s in range(4):
        row = slice(s, s + 1)
        alone = case._replace(
            q=case.q[row],
            table=case.table[row],
            lengths=case.lengths[row],
            tail=case.tail._replace(slots=case.tail.slots[row]),
        )
        one, one_lse = attend(alone)
        assert_near((one, one_lse), (out[row].double(), lse[row].double()), 3.0)


def test_results_are_the_same_bits_every_time():
    """Also after calls of other shapes, which leave their own partial results behind."""
    cases = [
        build(tt.preset("k4v4", 128), [9000, 37, 300], tail=True),
        build(tt.preset("k4v4u", 128), [70000], q_heads=32, kv_heads=8),
        build(tt.preset("k3v3", 64), [100] * 300),
        build(tt.preset("k8v8", 256), [4000, 2], [4, 1], q_heads=16),
    ]
    first = [attend(case) for case in cases]
    for turn in range(20):
        for i in torch.randperm(4, generator=torch.Generator().manual_seed(turn)).tolist():
            for one, other in zip(attend(cases[i]), first[i], strict=True):
                assert_same_bytes(one, other)


def test_given_outputs_are_written():
    case = build(tt.preset("k4v4", 128), [700, 33], tail=True, center=True)
    exact = attend(case)
    out = torch.full_like(case.q, torch.nan)
    lse = torch.full(case.q.shape[:2], torch.nan, device=DEVICE)
    result = attend(case, out=out, lse=lse)
    assert result[0] is out and result[1] is lse
    assert_same_bytes(out, exact[0])
    assert_same_bytes(lse, exact[1])


def test_rows_past_the_last_sequence():
    case = build(tt.preset("k4v4", 128), [700, 33], [2, 3])
    out, lse = check(case)
    longer = case._replace(q=torch.cat([case.q, case.q]))
    more, more_lse = attend(
        longer,
        out=torch.full_like(longer.q, torch.nan),
        lse=torch.full(longer.q.shape[:2], torch.nan, device=DEVICE),
    )
    assert_same_bytes(more[:5], out)
    assert_same_bytes(more_lse[:5], lse)
    assert not more[5:].any() and (more_lse[5:] == -torch.inf).all()


# ---- unusual vectors


@pytest.mark.parametrize("name", ["k4v4", "k4v4u", "k8v4"])
def test_vectors_of_extreme_size(name):
    """Nothing, almost nothing and more than float16 can hold, among ordinary tokens."""
    case = build(tt.preset(name, 128), [300], dtype=torch.float32)
    k, v = case.k.clone(), case.v.clone()
    k[0, 10], v[0, 20] = 0.0, 0.0
    k[0, 30] *= 1e-30
    v[0, 40] *= 1e-30
    k[0, 50, 0] *= 1e30
    v[0, 60] *= 1e5
    k[0, 70] = 0.0
    v[0, 70] = 0.0
    case = build(tt.preset(name, 128), [300], dtype=torch.float32, k=k, v=v)
    case = case._replace(q=case.q * 0.1)
    (out, lse), (exact, _) = attend(case), expected(case)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    assert torch.nn.functional.cosine_similarity(out.double(), exact, dim=-1).min() > 0.9999


def assert_others_are_spared(spoiled: Tensor, out: Tensor, seeing: Tensor) -> None:
    """One of eight query heads, 0 to 3, has a broken key or value of sequence 0.

    spoiled, out: [tokens, 8, d], results with and without it; seeing: bool, which queries of
    sequence 0 see it. The others may round otherwise; other heads and sequences are the same bytes.
    """
    count = len(seeing)
    spared = spoiled[:count][~seeing][:, :4], out[:count][~seeing][:, :4]
    assert torch.isfinite(spared[0]).all()
    near = [x.double() for x in spared]
    assert torch.nn.functional.cosine_similarity(*near, dim=-1).gt(0.9999).all()
    assert_same_bytes(spoiled[:, 4:], out[:, 4:])
    assert_same_bytes(spoiled[count:], out[count:])


@pytest.mark.parametrize("tail", [False, True])
def test_a_broken_token_spoils_only_who_sees_it(tail):
    """A NaN in the key or value of one head: the queries that see it, nobody else."""
    config, dtype = tt.preset("k4v4", 128), BF16 if tail else torch.float32
    clean = build(config, [300, 300], [3, 3], dtype=dtype, tail=tail)
    out, _ = check(clean)
    for which in ("k", "v"):
        for position in (5, 298, 299):
            parts = {"k": clean.k.clone(), "v": clean.v.clone()}
            parts[which][0, position, 0, 7] = torch.nan
            case = build(config, [300, 300], [3, 3], dtype=dtype, tail=tail, **parts)
            spoiled, _ = attend(case)
            seeing = torch.arange(297, 300, device=DEVICE) >= position
            assert spoiled[:3][seeing][:, :4].isnan().all()
            assert_others_are_spared(spoiled, out, seeing)


# ---- few and small: for compute-sanitizer (tests/sanitize_cuda.sh)


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("name", ["k4v4", "k4v4u", "k5v4u", "k3v3", "k4v2", "k8v8"])
def test_tiny(name, q_len):
    config = tt.preset(name, 64, page_size=16, search=1, recent_window=5)
    lengths = [200, 16, 3]
    check(build(config, lengths, [q_len] * 3, center=True, tail=True))
    check(build(config, lengths, [q_len] * 3, q_heads=14), sliding_window=20, soft_cap=5.0)


@pytest.mark.parametrize("d", [32, 128, 192, 256, 576])
def test_tiny_head_dimensions(d):
    config = tt.preset("k4v4", d, page_size=32, search=1)
    check(build(config, [100, 1], [2, 1], kv_heads=1, tail=True))


@pytest.mark.parametrize("d", [16, 48, 80, 96, 112, 144, 160, 224])
@pytest.mark.parametrize("name", tt.PRESETS)
def test_tiny_chunks_that_are_filled_in_part(name, d):
    """What is read behind the rows of keys meets zeros."""
    config = tt.preset(name, d, page_size=16, search=1, recent_window=5)
    check(build(config, [100, 16, 1], [2, 1, 1], kv_heads=1, tail=True))
