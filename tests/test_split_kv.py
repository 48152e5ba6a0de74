"""Decode steps on CUDA: attention of a few queries per sequence, against a float64 oracle on the
device, and all that a serving loop does with it: graphs, streams, compilation.

Caches start full of stale bytes whose scales are NaN, tails full of NaN, and block tables hold
garbage where no page is needed. test_attention.py has the small cases, on both devices.

How near: queries and softmax weights of 11 significant bits, the fewest that a tensor core takes in
float16, move every score by a random error of about e = (1 + s) 2^-11, s being the standard
deviation of the logits, and so every weight by a factor of 1 + e. For values in random directions
that moves out = sum of p_j v_j by e |out|. So no channel may be off by more than 6 e times the root
mean square of its row (plus half a unit of the output's dtype), no lse by more than 3 e. The cosine
of every row is above 0.9999 for s up to 3, above 0.999 for 10.
"""

import itertools
import math
import random
import re
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import torch_turboquant as tt
from tests.helpers import FLOATS, ROOT, assert_same_bytes, paged, scales
from tests.oracle import exact_attention
from torch_turboquant.config import CacheConfig
from torch_turboquant.ops.cache import CacheTables

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
HALF_UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
MANY_PRESETS = ("k4v4", "k4v4u", "k5v4u", "k3v3", "k4v2", "k8v8")
DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256)
"""All that pages can have up to 256: each has a split-KV kernel, and so have 512 and 576."""


def least_cosine(spread: float) -> float:
    """Promised for logits of this standard deviation."""
    return 0.9999 if spread <= 3 else 0.999


def score_error(spread: float) -> float:
    """e, of the text above."""
    return (1 + spread) * 2.0**-11


class Case(NamedTuple):
    """One call of paged_attention, and what it was made of."""

    config: CacheConfig
    tables: CacheTables
    cache: Tensor
    table: Tensor
    lengths: Tensor
    starts: Tensor | None
    """cu_seqlens_q"""
    max_q_len: int
    tail: tt.Tail | None
    q: Tensor
    k: Tensor
    """[seqs, max_len, kv_heads, d], as stored"""
    v: Tensor
    slots: list[Tensor]
    spread: float
    """Standard deviation of the logits."""

    @property
    def q_lens(self) -> list[int]:
        if self.starts is None:
            return [1] * len(self.lengths)
        return self.starts.diff().tolist()


def generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), device=DEVICE).to(dtype)


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def starts_of(counts: list[int]) -> Tensor:
    return int32(0, *torch.tensor(counts, dtype=torch.int64).cumsum(0).tolist())


def stale_cache(config: CacheConfig, pages: int, kv_heads: int, seed: int = 0) -> Tensor:
    """Random codes, NaN in every scale."""
    cache = torch.randint(
        256,
        (pages, kv_heads, config.record_bytes),
        dtype=torch.uint8,
        generator=generator(seed),
        device=DEVICE,
    )
    record, tokens = config.record, range(config.page_size)
    places = [place(t) for place in (record.key_scale, record.value_scale) for t in tokens]
    places = torch.tensor(places, device=DEVICE)
    cache[..., places] = 0x00
    cache[..., places + 1] = 0x7E
    return cache


def build(
    config: CacheConfig,
    lengths: list[int],
    q_lens: list[int] | None = None,
    *,
    q_heads: int = 8,
    kv_heads: int = 2,
    dtype: torch.dtype = BF16,
    spread: float = 1.0,
    center: bool | str = False,
    tail: bool = False,
    max_q_len: int | None = None,
    seed: int = 0,
    k: Tensor | None = None,
    v: Tensor | None = None,
) -> Case:
    """Stores whole sequences; the logits of random queries have the given standard deviation."""
    d, most = config.head_dim, max(lengths)
    offset = 8.0 * randn(kv_heads, d, seed=seed + 1) if center else None
    given = offset
    if center == "scaled":
        given = tt.scaled_center(offset, scales(kv_heads, d, seed=seed + 5).to(DEVICE))
    tables = tt.make_tables(config, 1, DEVICE, given)
    if k is None:
        k = randn(len(lengths), most, kv_heads, d, seed=seed + 2)
        k = (k + offset if center else k).to(dtype)
    if v is None:
        v = randn(len(lengths), most, kv_heads, d, seed=seed + 3, dtype=dtype)
    num_pages, table, slots = paged(lengths, config.page_size, seed)
    cache = stale_cache(config, num_pages, kv_heads, seed)
    counts = q_lens or [1] * len(lengths)
    max_q_len = max_q_len or max(1, *counts)
    if tail:
        ring = tt.allocate_tail(config, len(lengths) + 2, kv_heads, dtype, max_q_len, DEVICE)
        ring.fill_(torch.nan)
        tail = tt.Tail(ring, torch.arange(1, len(lengths) + 1, device=DEVICE).flip(0))
    lens = int32(*lengths)
    stored = torch.arange(most, device=DEVICE) < lens[:, None]
    tt.cache_store(
        k[stored],
        v[stored],
        cache,
        torch.cat(slots).to(DEVICE),
        config,
        tables,
        tail=tail or None,
        seq_lens=lens,
        cu_seqlens_q=starts_of(lengths),
    )
    return Case(
        config,
        tables,
        cache,
        table.to(DEVICE),
        lens,
        starts_of(counts) if q_lens else None,
        max_q_len,
        tail or None,
        (spread * randn(sum(counts), q_heads, d, seed=seed + 4)).to(dtype),
        k,
        v,
        slots,
        spread,
    )


def attend(case: Case, **options) -> tuple[Tensor, Tensor]:
    out, lse = tt.paged_attention(
        case.q,
        case.cache,
        case.table,
        case.lengths,
        case.config,
        case.tables,
        cu_seqlens_q=case.starts,
        max_q_len=case.max_q_len,
        tail=case.tail,
        **options,
    )
    assert out.shape == case.q.shape and out.dtype == case.q.dtype and out.device == case.q.device
    assert lse.shape == case.q.shape[:2] and lse.dtype == torch.float32
    return out, lse


def decoded(case: Case) -> tuple[Tensor, Tensor]:
    return tt.cache_load(
        case.cache,
        case.table,
        case.lengths,
        case.config,
        case.tables,
        case.k.shape[1],
        torch.float32,
    )


def expected(case: Case, **options) -> tuple[Tensor, Tensor]:
    exact = {}
    if case.tail is not None:
        exact = {
            "exact_k": case.k,
            "exact_v": case.v,
            "sinks": case.config.sink_tokens,
            "window": case.config.recent_window,
        }
    lengths = case.lengths.tolist()
    return exact_attention(case.q, *decoded(case), lengths, case.q_lens, **exact, **options)


def assert_near(
    found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], spread: float, roundings: int = 1
) -> None:
    """`exact` may be a rounded result itself: then there are two roundings between them.

    Row tiles round the weights of exact bfloat16 keys to bfloat16, as flash attention does: evenly
    distributed errors of up to half a unit, so sqrt(3) times less on average.
    """
    (out, lse), (exact_out, exact_lse) = found, exact
    error = score_error(spread)
    of_weights = HALF_UNIT[out.dtype] / 3**0.5 if out.dtype == torch.bfloat16 else 0.0
    assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf)
    finite = torch.isfinite(exact_lse)
    assert torch.isfinite(lse[finite]).all()
    assert (lse.double() - exact_lse)[finite].abs().max() <= 4 * error  # of thousands of rows
    # a large learned sink leaves nothing, or subnormal numbers, and no key leaves 0
    some = exact_out.norm(dim=-1) > (1e-3 if out.dtype == torch.float16 else 1e-5)
    assert torch.equal(out[~finite], torch.zeros_like(out[~finite]))
    off = (out.double() - exact_out).abs() - roundings * HALF_UNIT[out.dtype] * exact_out.abs()
    rms = exact_out.square().mean(-1, keepdim=True).sqrt()
    # Weights that two keys share move by the difference of their scores' errors. The largest of 10
    # million outputs is off by 8.1 of these units.
    assert (off <= 9 * (error + of_weights) * rms + 2.0**-24).all()
    cosine = torch.nn.functional.cosine_similarity(out.double()[some], exact_out[some], dim=-1)
    assert cosine.min() > least_cosine(spread)


def check(case: Case, **options) -> tuple[Tensor, Tensor]:
    """Attends and compares with the oracle."""
    found = attend(case, **options)
    assert_near(found, expected(case, **options), case.spread)
    return found


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


# ---- long contexts, large batches, far pages


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
    each lane, before it has written the lengths: as a token of an exact tail."""
    config, longest = tt.preset("k4v4u", 128), 200_000 // seqs  # too long for all to be few units
    case, chosen = build(config, [longest] * seqs), random.Random(seqs)
    calls = []
    for _ in range(4):
        some = [0, 65, longest // 3, longest - 63, longest, longest]
        lengths = int32(*(chosen.choice(some) for _ in range(seqs)))
        order = chosen.sample(range(seqs), seqs)
        calls.append(case._replace(lengths=lengths, table=case.table[order].contiguous()))
    wanted = [attend(call) for call in calls]

    ring = tt.allocate_tail(config, 1, 1, BF16, 1, DEVICE)
    tail = tt.Tail(ring, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    page, slot, stored = stale_cache(config, 1, 1), int32(0), int32(1)
    lengths = ring[0, 0, 0, 0].view(torch.int32)[:seqs]
    tokens = torch.zeros(4, 64, dtype=torch.int32, device=DEVICE)
    tokens[:, :seqs] = torch.stack([call.lengths for call in calls])
    tokens = tokens.view(BF16)[:, None, None]
    changing = case._replace(lengths=lengths, table=case.table.clone())
    for turn in range(30):
        i = turn * 7 % 4
        changing.table.copy_(calls[i].table)
        torch.cuda._sleep(1_000_000)  # until then the host has launched what follows
        tt.cache_store(
            tokens[i], tokens[i], page, slot, config, case.tables, tail=tail, seq_lens=stored
        )
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


# ---- launches, memory, streams


def few_cases() -> list[Case]:
    return [
        build(tt.preset("k4v4", 128), [3000, 37, 300], tail=True, center=True),
        build(tt.preset("k5v4u", 128), [20000], q_heads=32, kv_heads=8, tail=True),
        build(tt.preset("k3v3", 64), [100] * 200, [4] * 200),
    ]


def kernels_of(case: Case) -> list[str]:
    """Names of what a call launches."""
    attend(case)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        attend(case)
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == cuda]


def test_one_launch():
    """Rotation of the queries, splits, their merge, tail and inverse rotation: one kernel."""
    for case in few_cases():
        kernels = kernels_of(case)
        assert len(kernels) == 1, kernels


def test_which_head_dimensions_have_a_split_kv_kernel():
    """Those that the README names; others expand the whole cache. kernel_choice knows which."""
    row = re.search(r"^\| `paged_attention` .*$", (ROOT / "README.md").read_text(), re.MULTILINE)[0]
    most, *others = re.search(r"up to (\d+) channels, or (\d+) or (\d+);", row).groups()
    assert (DIMS[-1], 512, 576) == (int(most), *map(int, others))
    for d in (*DIMS, 512, 576, 288, 320, 1024):
        case = build(tt.preset("k4v4", d), [100])
        shape = {"head_dim": d, "q_heads": 8, "kv_heads": 2, "preset": "k4v4"}
        chosen = tt.kernel_choice("paged_attention", **shape)
        on_this_gpu = "compute capability below 8.0" not in chosen.reason
        assert (chosen.kernel == "split_kv") == (on_this_gpu and (d <= 256 or d in (512, 576)))
        kernels = kernels_of(case)
        assert len(kernels) == 1, kernels
        name = {"split_kv": "split_kv::attend_kernel", "general": "general::general_kernel"}
        assert name[chosen.kernel] in kernels[0], (d, kernels)


def test_scratch_memory_does_not_grow():
    """Neither with the context nor with the batch; outputs are given."""
    config = tt.preset("k4v4u", 128)
    used = []
    for lengths in ([100], [130000], [64] * 2000):
        case = build(config, lengths, q_heads=32, kv_heads=8)
        out, lse = attend(case)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        attend(case, out=out, lse=lse)
        torch.cuda.synchronize()
        used.append(torch.cuda.max_memory_allocated() - before)
    assert max(used) < 32 << 20
    assert used[1] <= used[0] + (4 << 20) and used[2] <= used[0] + (4 << 20)


def test_nothing_waits_for_the_device():
    case = build(tt.preset("k4v4", 128), [3000, 37], tail=True, center=True)
    out, lse = torch.empty_like(case.q), torch.empty(case.q.shape[:2], device=DEVICE)
    slots = torch.stack([s[-1] for s in case.slots]).to(DEVICE)
    k, v = case.k[:, -1].contiguous(), case.v[:, -1].contiguous()
    attend(case)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tt.cache_store(
            k,
            v,
            case.cache,
            slots,
            case.config,
            case.tables,
            tail=case.tail,
            seq_lens=case.lengths,
        )
        attend(case)
        attend(case, out=out, lse=lse)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_the_kernel_ahead_writes_is_read():
    """A launch may begin before the kernel ahead of it has ended, and must then wait for it."""
    lengths = [5000, 77, 300]
    cases = [build(tt.preset("k4v4", 128), lengths, tail=True, seed=10 * i) for i in range(4)]
    wanted = []
    for case in cases:
        torch.cuda.synchronize()
        first = attend(case)[0]
        torch.cuda.synchronize()
        wanted.append((first, attend(case._replace(q=first))[0]))
    one = build(tt.preset("k4v4", 128), lengths, tail=True, seed=99)

    def written(case: Case) -> list[Tensor]:
        return [case.q, case.cache, case.table, case.lengths, case.tail.ring]

    for last, (case, (first, second)) in itertools.product(
        range(5), zip(cases, wanted, strict=True)
    ):
        pairs = list(zip(written(one), written(case), strict=True))
        for to, _ in pairs:
            to.zero_()
        for to, source in pairs[last + 1 :] + pairs[: last + 1]:  # `last` right before the launch
            to.copy_(source)
        out = attend(one)[0]
        assert_same_bytes(attend(one._replace(q=out))[0], second)
        assert_same_bytes(out, first)


def test_another_stream():
    """Inputs made on a side stream just before the call, after a long wait."""
    case = few_cases()[0]
    expected_out, expected_lse = attend(case)
    stream = torch.cuda.Stream()
    q = torch.zeros_like(case.q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        q.copy_(case.q)
        out, lse = attend(case._replace(q=q))
    stream.synchronize()
    assert_same_bytes(out, expected_out)
    assert_same_bytes(lse, expected_lse)


def assert_streams_share_nothing(cases: list[Case]) -> None:
    """Each case many times on a stream of its own, all at once: the results of each case alone."""
    first = [attend(case) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results = [[] for _ in cases]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(5_000_000)  # until all have work
    for _ in range(20):
        for case, stream, found in zip(cases, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(attend(case))
    torch.cuda.synchronize()
    for exact, found in zip(first, results, strict=True):
        for out, lse in found:
            assert_same_bytes(out, exact[0])
            assert_same_bytes(lse, exact[1])


def test_two_streams_at_once():
    """Scratch memory that two calls shared by accident would show."""
    assert_streams_share_nothing(few_cases())


# ---- CUDA graphs


class Layers:
    """Two layers with different codebooks over the same pages; every page holds tokens."""

    seqs, q_heads, kv_heads, d, page_size, max_pages = 4, 8, 2, 128, 32, 80

    def __init__(self, q_len: int = 1) -> None:
        self.q_len = q_len
        pages = self.seqs * self.max_pages
        tokens = pages * self.page_size
        self.layers = []
        for layer, name in enumerate(("k4v4", "k5v4u")):
            config = tt.preset(name, self.d, page_size=self.page_size)
            center = randn(self.kv_heads, self.d, seed=layer + 1)
            tables = tt.make_tables(config, layer, DEVICE, center)
            cache = tt.allocate_cache(config, pages, self.kv_heads, DEVICE)
            k, v = (
                randn(tokens, self.kv_heads, self.d, seed=10 * layer + i, dtype=BF16)
                for i in (3, 4)
            )
            slots = torch.arange(tokens, device=DEVICE)
            tt.cache_store(k, v, cache, slots, config, tables)
            ring = tt.allocate_tail(config, self.seqs, self.kv_heads, BF16, q_len, DEVICE)
            ring.copy_(randn(*ring.shape, seed=10 * layer + 5))
            slots = torch.arange(self.seqs, device=DEVICE).flip(0)
            self.layers.append((config, tables, cache, tt.Tail(ring, slots)))
        self.starts = None
        if q_len > 1:
            self.starts = q_len * torch.arange(self.seqs + 1, dtype=torch.int32, device=DEVICE)
        self.inputs = self.some_inputs([1000, 4, 33, 64], 0)

    def some_inputs(self, lengths: list[int], seed: int) -> dict[str, Tensor]:
        pages = self.seqs * self.max_pages
        table = torch.randperm(pages, generator=generator(seed), device=DEVICE)
        table = table.view(self.seqs, -1)
        slots = []
        for s, length in enumerate(lengths):
            for position in range(length - self.q_len, length):
                page, offset = divmod(position, self.page_size)
                missing = position < 0
                slots.append(-1 if missing else int(table[s, page]) * self.page_size + offset)
        tokens = self.seqs * self.q_len
        heads = self.q_heads + 2 * self.kv_heads
        return {
            "qkv": randn(2, tokens, heads, self.d, seed=seed + 50, dtype=BF16),
            "table": table.int(),
            "lengths": int32(*lengths),
            "slots": torch.tensor(slots, device=DEVICE),
        }

    def step(self) -> list[tuple[Tensor, Tensor]]:
        results, i = [], self.inputs
        for (config, tables, cache, tail), qkv in zip(self.layers, i["qkv"], strict=True):
            q, k, v = qkv.split([self.q_heads, self.kv_heads, self.kv_heads], dim=1)
            tt.cache_store(
                k,
                v,
                cache,
                i["slots"],
                config,
                tables,
                tail=tail,
                seq_lens=i["lengths"],
                cu_seqlens_q=self.starts,
            )
            results.append(
                tt.paged_attention(
                    q,
                    cache,
                    i["table"],
                    i["lengths"],
                    config,
                    tables,
                    cu_seqlens_q=self.starts,
                    max_q_len=self.q_len,
                    tail=tail,
                )
            )
        return results


@pytest.mark.parametrize("q_len", [1, 4])
def test_replays_with_other_lengths_and_pages(q_len):
    """Whatever changes in place between replays: the results of eager execution, bit for bit."""
    layers = Layers(q_len)
    layers.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers.step()
    batches = ([1000, 4, 33, 64], [2560, 2560, 2560, 2560], [4, 5, 4, 2000], [31, 32, 33, 2049])
    if q_len == 1:
        batches += ([0, 0, 0, 0], [0, 1, 0, 2559], [1, 1, 1, 1])
    seen = []
    for seed, lengths in enumerate(batches):
        for name, value in layers.some_inputs(lengths, seed).items():
            layers.inputs[name].copy_(value)
        for pair in captured:
            for result in pair:
                result.fill_(torch.nan)
        graph.replay()
        replayed = [tuple(t.clone() for t in pair) for pair in captured]
        caches = [cache.clone() for _, _, cache, _ in layers.layers]
        rings = [tail.ring.clone() for *_, tail in layers.layers]
        for found, exact in zip(replayed, layers.step(), strict=True):
            assert_same_bytes(found[0], exact[0])
            assert_same_bytes(found[1], exact[1])
        for (_, _, cache, tail), cache_before, ring_before in zip(
            layers.layers, caches, rings, strict=True
        ):
            assert_same_bytes(cache, cache_before)
            assert_same_bytes(tail.ring, ring_before)
        seen.append(replayed[1][0])
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(seen))


def test_replays_in_a_row():
    """Scratch memory is as a captured call found it: ten replays, no other work between them."""
    layers = Layers()
    layers.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers.step()
    graph.replay()
    first = [tuple(t.clone() for t in pair) for pair in captured]
    for _ in range(10):
        graph.replay()
    for found, exact in zip(captured, first, strict=True):
        assert_same_bytes(found[0], exact[0])
        assert_same_bytes(found[1], exact[1])


# ---- torch.compile


class TinyModel(torch.nn.Module):
    """Two layers of attention over packed caches."""

    def __init__(self, seqs: int, max_len: int, tail: bool, seed: int = 0) -> None:
        super().__init__()
        heads, self.kv_heads, d, vocabulary = 8, 2, 64, 1000
        hidden = heads * d
        self.q_heads, self.d, self.page_size = heads, d, 32
        self.embedding = torch.nn.Parameter(randn(vocabulary, hidden, seed=seed + 1))
        self.head = torch.nn.Parameter(randn(hidden, vocabulary, seed=seed + 2))
        pages = -(-max_len // self.page_size)
        table = torch.randperm(seqs * pages, generator=generator(seed), device=DEVICE)
        self.register_buffer("table", table.view(seqs, pages).int())
        self.register_buffer("tail_slots", torch.arange(seqs, device=DEVICE))
        self.layers = []
        for layer, name in enumerate(("k4v4", "k5v4u")):
            config = tt.preset(
                name, d, page_size=self.page_size, search=1, sink_tokens=2, recent_window=8
            )
            width = (heads + 2 * self.kv_heads) * d
            scale = hidden**-0.5
            for part, shape in (("qkv", (hidden, width)), ("out", (hidden, hidden))):
                weight = torch.nn.Parameter(scale * randn(*shape, seed=seed + 10 * layer + 7))
                self.register_parameter(f"{part}{layer}", weight)
            cache = tt.allocate_cache(config, seqs * pages, self.kv_heads, DEVICE)
            self.register_buffer(f"cache{layer}", cache)
            ring = tt.allocate_tail(config, seqs, self.kv_heads, BF16, 1, DEVICE)
            self.register_buffer(f"ring{layer}", ring if tail else None)
            self.layers.append((config, tt.make_tables(config, layer, DEVICE)))
        self.eval().requires_grad_(False)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The next token of each sequence; lengths with this one."""
        x = self.embedding[tokens]
        last = (lengths - 1).long()
        page = self.table.gather(1, (last // self.page_size)[:, None])[:, 0].long()
        slots = page * self.page_size + last % self.page_size
        for layer, (config, tables) in enumerate(self.layers):
            cache, ring = getattr(self, f"cache{layer}"), getattr(self, f"ring{layer}")
            tail = None if ring is None else tt.Tail(ring, self.tail_slots)
            qkv = (x @ getattr(self, f"qkv{layer}")).unflatten(1, (-1, self.d)).to(BF16)
            q, k, v = qkv.split([self.q_heads, self.kv_heads, self.kv_heads], dim=1)
            tt.cache_store(k, v, cache, slots, config, tables, tail=tail, seq_lens=lengths)
            out, _ = tt.paged_attention(q, cache, self.table, lengths, config, tables, tail=tail)
            x = x + out.float().flatten(1) @ getattr(self, f"out{layer}")
        return (x @ self.head).argmax(-1)


@pytest.mark.parametrize("tail", [False, True])
def test_compiled_decode_steps(tail):
    """fullgraph, CUDA graphs by torch.compile, lengths growing over page borders: one graph, no
    recompilation, nothing that made the compiler give up CUDA graphs, the tokens of eager."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    eager, compiled = (TinyModel(3, 160, tail) for _ in range(2))
    step = torch.compile(compiled, fullgraph=True, mode="reduce-overhead")
    tokens = torch.tensor([1, 2, 3], device=DEVICE)
    expected_tokens, lengths = tokens.clone(), int32(1, 30, 61)
    seen = []
    with torch.no_grad():
        for i in range(70):
            with torch.compiler.set_stance("default" if i == 0 else "fail_on_recompile"):
                torch.compiler.cudagraph_mark_step_begin()
                tokens = step(tokens, lengths).clone()
            expected_tokens = eager(expected_tokens, lengths)
            assert torch.equal(tokens, expected_tokens), i
            seen.append(tokens)
            lengths = lengths + 1
    assert len(torch.stack(seen).unique()) > 20  # it does not repeat itself
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1
    for layer in range(2):
        assert_same_bytes(getattr(compiled, f"cache{layer}"), getattr(eager, f"cache{layer}"))
    torch._dynamo.reset()


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
