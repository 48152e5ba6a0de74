"""How split-KV cuts its work: long contexts, large batches, few units of keys, far pages."""

import math
import random

import pytest
import torch
from torch import Tensor

import torch_turboquant as tt
from tests.attention_cuda import (
    BF16,
    DEVICE,
    MANY_PRESETS,
    Case,
    assert_near,
    attend,
    build,
    check,
    decoded,
    expected,
    int32,
    lengths_ahead,
    randn,
)
from tests.helpers import assert_same_bytes
from tests.oracle import exact_attention

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("name", ["k4v4", "k4v4u", "k8v8"])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("sink", [0.0, 12.0, 20.0])
def test_a_sink_before_a_long_context(sink, tail, name):
    """A key at position 0 that scores `sink` more than the rest, with a value of almost nothing:
    the result is made of 131,071 weights of e^-sink each."""
    length, d = 131072, 128
    k = randn(1, length, 1, d, seed=1)
    direction = torch.zeros(d, device=DEVICE)
    direction[5] = 1.0
    k[..., 5] = 0.0
    k[0, 0, 0] = direction * math.sqrt(d)
    v = randn(1, length, 1, d, seed=2) + 0.5
    v[0, 0] *= 1e-3
    case = build(
        tt.preset(name, d), [length], q_heads=4, kv_heads=1, tail=tail, k=k.to(BF16), v=v.to(BF16)
    )
    q = case.q.float()
    q[..., 5] = sink
    check(case._replace(q=q.to(BF16), spread=1.0 if sink == 0 else 3.0))


@pytest.mark.parametrize("name", MANY_PRESETS)
@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_a_long_context(spread, name):
    config = tt.preset(name, 128)
    check(build(config, [131072, 5], q_heads=32, kv_heads=8, spread=spread, tail=True))


def test_more_sequences_than_the_device_has_room_for():
    chance = random.Random(0)
    lengths = [chance.choice([0, 1, 2, 31, 32, 33, 100, 250]) for _ in range(3000)]
    config = tt.preset("k4v4u", 64, page_size=16)
    case = build(config, lengths, [min(1, n) for n in lengths], q_heads=4, kv_heads=2)
    out, _ = check(case)
    one_each = case._replace(
        starts=None, q=randn(3000, 4, 64, seed=9, dtype=BF16), max_q_len=1
    )  # padding: sequences of length 0 have a row
    padded, lse = check(one_each)
    empty = case.lengths == 0
    assert not padded[empty].any() and (lse[empty] == -torch.inf).all()
    assert len(out) == int((~empty).sum())


def test_one_long_sequence_among_short_ones():
    config = tt.preset("k4v4", 128)
    lengths = [3] * 50 + [60000] + [40] * 50
    check(build(config, lengths, q_heads=8, kv_heads=1, tail=True))


@pytest.mark.parametrize(
    ("lengths", "kv_heads"),
    [
        ([4096] * 3, 2),  # equal parts of every segment
        ([64, 4000, 2500, 1, 700], 2),  # parts of several sizes
        ([512] * 60, 8),  # whole segments, several to a block
        ([100 + 37 * i % 900 for i in range(90)], 8),  # cut anywhere
        ([0] * 500 + [200] + [0] * 700, 1),  # more sequences than a block remembers
        ([1] * 300, 8),
    ],
    ids=["parts", "uneven", "whole", "anywhere", "sparse", "tiny"],
)
@pytest.mark.parametrize("q_len", [1, 4])
def test_ways_to_cut_the_work(lengths, kv_heads, q_len):
    q_lens = [min(q_len, n) for n in lengths] if q_len > 1 else None
    case = build(tt.preset("k4v4u", 128), lengths, q_lens, q_heads=4 * kv_heads, kv_heads=kv_heads)
    check(case)


def with_new_tokens(case: Case) -> dict[str, Tensor]:
    """k_new and v_new of a case: what the last tokens of its sequences are made of."""
    parts = {"k_new": case.k, "v_new": case.v}
    ends = zip(case.lengths.tolist(), case.q_lens, strict=True)
    rows = [(s, n - q, n) for s, (n, q) in enumerate(ends)]
    return {
        name: torch.cat([part[s, begin:end] for s, begin, end in rows])
        for name, part in parts.items()
    }


def expected_with_new_tokens(case: Case, **options) -> tuple[Tensor, Tensor]:
    """The oracle, whose new tokens are exact beside the tail's."""
    k, v = decoded(case)
    for s, (n, q) in enumerate(zip(case.lengths.tolist(), case.q_lens, strict=True)):
        k[s, n - q : n], v[s, n - q : n] = (
            case.k[s, n - q : n].float(),
            case.v[s, n - q : n].float(),
        )
    exact = {}
    if case.tail is not None:
        sinks, window = case.config.sink_tokens, case.config.recent_window
        exact = {"exact_k": case.k, "exact_v": case.v, "sinks": sinks, "window": window}
    return exact_attention(case.q, k, v, case.lengths.tolist(), case.q_lens, **exact, **options)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize(
    ("group", "q_len"), [(1, 1), (4, 1), (5, 1), (8, 1), (16, 1), (4, 2), (4, 3), (4, 4), (1, 16)]
)
@pytest.mark.parametrize("d", [64, 128])
def test_few_units_of_keys(d, group, q_len, tail, own):
    """Lengths around a stage (32 keys), a unit (64) and what blocks have room for, ragged."""
    for lengths in ([1, 31, 32, 33, 63], [64, 65, 129, 700], [5000], [2047, 2], [0, 40]):
        q_lens = [min(q_len, n) for n in lengths]
        case = build(
            tt.preset("k5v4u", d),
            lengths,
            q_lens,
            q_heads=2 * group,
            center=True,
            tail=tail,
            max_q_len=q_len,
            seed=len(lengths),
        )
        for options in ({}, {"sliding_window": 70}, {"soft_cap": 20.0}):
            if not own:
                check(case, **options)
                continue
            found = attend(case, **with_new_tokens(case), **options)
            assert_near(found, expected_with_new_tokens(case, **options), case.spread)


@pytest.mark.parametrize("name", tt.PRESETS)
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_few_units_and_more(name, kv_heads):
    """From lengths that have room in the pipelines of all blocks to those that have not; both
    kinds of launch read the same pages."""
    config, q_heads = tt.preset(name, 128), 4 * kv_heads
    tokens = 140_000 // kv_heads
    long = build(config, [tokens], q_heads=q_heads, kv_heads=kv_heads)
    for length in (tokens, tokens // 2, tokens // 3, tokens // 5, tokens // 20, 100):
        case = long._replace(lengths=int32(length))
        found = attend(case)
        assert_near(found, expected(case), case.spread)
        for one, other in zip(attend(case), found, strict=True):
            assert_same_bytes(one, other)


def test_lengths_that_change_between_few_units_and_many():
    """The kernel ahead writes the lengths: what a launch guesses from the old ones may be either
    way of cutting the work."""
    case = build(tt.preset("k4v4u", 128), [60000, 60000], q_heads=8, kv_heads=2)
    lengths = [int32(60000, 60000), int32(100, 7), int32(60000, 5), int32(3000, 2000)]
    wanted = [attend(case._replace(lengths=each)) for each in lengths]
    torch.cuda.synchronize()
    changing = case._replace(lengths=lengths[0].clone())
    for turn in range(30):
        i = turn * 7 % 4
        changing.lengths.copy_(lengths[i])
        for one, other in zip(attend(changing), wanted[i], strict=True):
            assert_same_bytes(one, other)


@pytest.mark.parametrize("seqs", [1, 2, 31, 32, 33, 63, 64])
def test_guesses_that_are_wrong(seqs):
    """The kernel ahead lets the attention begin, which guesses its work, one or two sequences for
    each lane, before it has written the lengths: as a token of an exact tail. In every other
    round of the four calls all lengths were 0 before, so that a warp which reads these finds few
    units."""
    config, longest = tt.preset("k4v4u", 128), 200_000 // seqs  # too long for all to be few units
    case, chosen = build(config, [longest] * seqs), random.Random(seqs)
    calls = []
    for _ in range(4):
        some = [0, 65, longest // 3, longest - 63, longest, longest]
        lengths = int32(*(chosen.choice(some) for _ in range(seqs)))
        order = chosen.sample(range(seqs), seqs)
        calls.append(case._replace(lengths=lengths, table=case.table[order].contiguous()))
    wanted = [attend(call) for call in calls]

    lengths, write = lengths_ahead(calls)
    changing = case._replace(lengths=lengths, table=case.table.clone())
    for turn in range(40):
        i = turn * 7 % 4
        changing.table.copy_(calls[i].table)
        if turn // 4 % 2:
            lengths.zero_()
        write(i)
        found = attend(changing)
        assert lengths.equal(calls[i].lengths)
        for one, other in zip(found, wanted[i], strict=True):
            assert_same_bytes(one, other)


def test_pages_beyond_4_gib():
    config = tt.preset("k4v4u", 128, page_size=128)
    case = build(config, [1000])
    pages = (5 << 30) // (2 * config.record_bytes)
    far = torch.empty(pages, 2, config.record_bytes, dtype=torch.uint8, device=DEVICE)
    used = case.table[0, :8].long()
    far[pages - 8 :] = case.cache[used]
    table = case.table.clone()
    table[0, :8] = torch.arange(pages - 8, pages, device=DEVICE)
    out, lse = attend(case._replace(cache=far, table=table))
    for one, other in zip((out, lse), check(case), strict=True):
        assert_same_bytes(one, other)
