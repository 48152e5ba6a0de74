"""Calls of attention on CUDA, and the float64 oracle on the device with how near results must be.

Caches start full of stale bytes whose scales are NaN, tails full of NaN, and block tables hold
garbage where no page is needed. test_attention.py has the small cases, on both devices.

How near: queries and softmax weights of 11 significant bits, the fewest that a tensor core takes in
float16, move every score by a random error of about e = (1 + s) 2^-11, s being the standard
deviation of the logits, and so every weight by a factor of 1 + e. For values in random directions
that moves out = sum of p_j v_j by e |out|. So no channel may be off by more than 6 e times the root
mean square of its row (plus half a unit of the output's dtype), no lse by more than 3 e. The cosine
of every row is above 0.9999 for s up to 3, above 0.999 for 10.

Older tokens that are gathered (test_gather.py) are rounded to the dtype of the call first, by
evenly distributed errors of up to half a unit. In bfloat16 each score is then off by
2^-8 / sqrt(3) of s, and each value by as much of itself; cosines are above 0.9995, and 0.995 for
s = 10.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import torch_turboquant as tt
from tests.helpers import assert_same_bytes, paged, scales
from tests.oracle import exact_attention
from torch_turboquant.config import CacheConfig
from torch_turboquant.ops.cache import CacheTables

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
HALF_UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
HALVES = (torch.float16, BF16)
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


def attend_again(case: Case, times: int, **options) -> tuple[Tensor, Tensor]:
    """What a call gives, which is the same bits so many times more."""
    first = attend(case, **options)
    for _ in range(times):
        for found, same in zip(attend(case, **options), first, strict=True):
            assert_same_bytes(found, same)
    return first


def lengths_ahead(calls: list[Case]) -> tuple[Tensor, Callable[[int], None]]:
    """Lengths that the kernel ahead of a call writes while it lets the call begin: a tensor, and a
    function that launches a store of those of calls[i] to it. They are a token of an exact tail;
    there are up to 64, of calls of 128 channels."""
    config, tables, seqs = calls[0].config, calls[0].tables, len(calls[0].lengths)
    ring = tt.allocate_tail(config, 1, 1, BF16, 1, DEVICE)
    tail = tt.Tail(ring, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    page, slot, stored = stale_cache(config, 1, 1), int32(0), int32(1)
    tokens = torch.zeros(len(calls), 64, dtype=torch.int32, device=DEVICE)
    tokens[:, :seqs] = torch.stack([call.lengths for call in calls])
    tokens = tokens.view(BF16)[:, None, None]

    def write(i: int) -> None:
        torch.cuda._sleep(1_000_000)  # until then the host has launched what follows
        tt.cache_store(tokens[i], tokens[i], page, slot, config, tables, tail=tail, seq_lens=stored)

    return ring[0, 0, 0, 0].view(torch.int32)[:seqs], write


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


def held_of(case: Case) -> list[tuple[int, int]]:
    """What the tail of each sequence holds: so many first tokens, and those from a position on."""
    slots, valid = case.tail.slots.tolist(), case.tail.valid
    held = [(case.config.sink_tokens, 0)] * len(case.tail.ring)
    if valid is not None:
        held = [tuple(of_slot) for of_slot in valid.tolist()]
    return [held[slot] if slot >= 0 else (0, 2**31 - 1) for slot in slots]


def partly_held(case: Case, seed: int) -> Case:
    """The case with tails of which some are missing and others hold only some of their tokens: rows
    of all others are NaN."""
    chosen, sinks = random.Random(seed), case.config.sink_tokens
    ring, slots = case.tail.ring.clone(), case.tail.slots.clone()
    rows = ring.shape[2] - sinks
    valid = torch.zeros(len(ring), 2, dtype=torch.int32)
    for s, length in enumerate(case.lengths.tolist()):
        slot, count = int(slots[s]), chosen.randint(0, sinks)
        some, older = max(0, length - chosen.randint(0, rows)), max(0, length - case.q_lens[s])
        first = chosen.choice([0, some, older, length])
        if chosen.random() < 0.2:
            slots[s], count, first = -1, 0, length
        valid[slot] = torch.tensor([count, first])
        ring[slot, :, count:sinks] = torch.nan
        oldest = max(sinks, length - rows)
        missing = torch.arange(oldest, max(oldest, first), device=DEVICE)
        ring[slot, :, sinks + (missing - sinks) % rows] = torch.nan
    return case._replace(tail=tt.Tail(ring, slots, valid.to(DEVICE)))


def expected(case: Case, **options) -> tuple[Tensor, Tensor]:
    exact = {}
    if case.tail is not None:
        exact = {
            "exact_k": case.k,
            "exact_v": case.v,
            "sinks": case.config.sink_tokens,
            "window": case.config.recent_window,
            "held": held_of(case),
        }
    lengths = case.lengths.tolist()
    return exact_attention(case.q, *decoded(case), lengths, case.q_lens, **exact, **options)


def may_be_gathered(case: Case) -> bool:
    """Whether the call may have tokens that are, as far as the host can tell (docs/design.md)."""
    device = torch.cuda.get_device_properties(DEVICE)
    rows = (len(case.q) - len(case.lengths)) * case.q.shape[1]
    return (
        device.major == 9
        and case.q.dtype in HALVES
        and case.config.head_dim in (64, 128, 256)
        and case.max_q_len > 32
        and rows >= 0.9 * 128 * device.multi_processor_count
    )


def near_decoded(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], case: Case) -> None:
    """As assert_near, where tokens in codes may be rounded once more."""
    of_tokens = HALF_UNIT[case.q.dtype] / 3**0.5 if may_be_gathered(case) else 0.0
    assert_near(found, exact, case.spread, of_tokens=of_tokens)


def assert_near(
    found: tuple[Tensor, Tensor],
    exact: tuple[Tensor, Tensor],
    spread: float,
    roundings: int = 1,
    of_tokens: float = 0.0,
) -> None:
    """`exact` may be a rounded result itself: then there are two roundings between them.

    Row tiles round the weights of exact bfloat16 keys to bfloat16, as flash attention does: evenly
    distributed errors of up to half a unit, so sqrt(3) times less on average.
    """
    (out, lse), (exact_out, exact_lse) = found, exact
    error = score_error(spread) + spread * of_tokens
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
    assert (off <= 9 * (error + of_weights + of_tokens) * rms + 2.0**-24).all()
    cosine = torch.nn.functional.cosine_similarity(out.double()[some], exact_out[some], dim=-1)
    least = least_cosine(spread)
    if of_tokens and out.dtype == torch.bfloat16:
        least = 1 - 5 * (1 - least)
    assert cosine.min() > least


def check(case: Case, **options) -> tuple[Tensor, Tensor]:
    """Attends and compares with the oracle."""
    found = attend(case, **options)
    near_decoded(found, expected(case, **options), case)
    return found


def own_tokens(case: Case) -> dict[str, Tensor]:
    """k_new and v_new: what the last tokens of each sequence are made of."""
    spans = [
        (s, slice(length - count, length))
        for s, (length, count) in enumerate(zip(case.lengths.tolist(), case.q_lens, strict=True))
    ]
    return {
        name: torch.cat([part[s, span] for s, span in spans])
        for name, part in (("k_new", case.k), ("v_new", case.v))
    }


def expected_own(case: Case, **options) -> tuple[Tensor, Tensor]:
    """As `expected`, with this call's tokens exact."""
    tail = case.tail is not None
    return exact_attention(
        case.q,
        *decoded(case),
        case.lengths.tolist(),
        case.q_lens,
        exact_k=case.k,
        exact_v=case.v,
        sinks=case.config.sink_tokens if tail else 0,
        window=case.config.recent_window if tail else 0,
        held=held_of(case) if tail else None,
        own=True,
        **options,
    )


def check_own(case: Case, **options) -> tuple[Tensor, Tensor]:
    found = attend(case, **own_tokens(case), **options)
    near_decoded(found, expected_own(case, **options), case)
    return found


# ---- calls that several files make

OTHER_OPTIONS = ({"softmax_scale": -0.1}, {"softmax_scale": 0.0}, {"sink_logits": True})
"""Beside windows and caps, which each kernel has borders of its own for; `given` fills them in."""


def given(options: dict, case: Case) -> dict:
    """Options of a call, with sink logits where they are asked for."""
    if "sink_logits" in options:
        return options | {"sink_logits": randn(case.q.shape[1], seed=3)}
    return options


def behind(older, q_lens, *, config=None, d=128, group=4, kv_heads=8, **options) -> Case:
    """Queries behind so many older tokens. d: where no config is given."""
    lengths = [n + q for n, q in zip(older, q_lens, strict=True)]
    config = config or tt.preset("k4v4u", d, recent_window=20, sink_tokens=3)
    return build(config, lengths, q_lens, q_heads=group * kv_heads, kv_heads=kv_heads, **options)


def check_missing_pages(case: Case) -> None:
    """Page ids out of range inside two sequences, pages of 16: as if keys there scored -inf."""
    for nowhere in (-1, len(case.cache), 2**31 - 1):
        table = case.table.clone()
        table[0, 3:7], table[1, 0] = nowhere, nowhere
        k, v = decoded(case)
        gone = torch.zeros(k.shape[:2], dtype=torch.bool, device=DEVICE)
        gone[0, 48:112], gone[1, :16] = True, True
        exact = exact_attention(case.q, k, v, case.lengths.tolist(), case.q_lens, gone=gone)
        near_decoded(attend(case._replace(table=table)), exact, case)


def scratch_bytes(case: Case, **options) -> int:
    """What a call asks for beside its outputs. (The allocator may give more, depending on what it
    holds.)"""
    out, lse = attend(case, **options)
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    attend(case, **options, out=out, lse=lse)
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


# ---- mixed batches

DECODES, DRAFTS, CHUNK = ([300, 1000, 17], [1, 1, 1]), ([500, 4], [4, 4]), ([700], [200])
EMPTY = ([0, 90, 0], [0, 0, 0])
MIXTURES = {
    "decode steps and a chunk": (DECODES, DECODES, CHUNK),
    "a chunk first": (CHUNK, DECODES),
    "drafts and a chunk": (DRAFTS, DRAFTS, CHUNK),
    "an empty one first": (EMPTY, CHUNK, DECODES),
    "all sorts": (DRAFTS, EMPTY, DECODES, CHUNK, EMPTY, DECODES),
    "chunks": (CHUNK, ([64, 129, 350], [64, 129, 33]), DECODES),
    "nobody is short": (CHUNK, EMPTY, ([130], [130])),
    "one row more than few": (([80, 90], [5, 4]), DECODES),
}


def batch(parts) -> tuple[list[int], list[int]]:
    return [n for lengths, _ in parts for n in lengths], [n for _, q in parts for n in q]
