"""Attention over the packed cache: decode steps, drafts and prompts.

Keys are never decoded: the query is rotated once, scores come from codes and scales, values are
accumulated in the rotated space and the result is rotated back once. Sink tokens and the recent
window come exact from the tail, and the tokens of the call itself exact from k_new and v_new where
they are given, in the same softmax. merge_attention joins two partial results.

A query at position i (the last of n new ones stands at seq_len - 1) sees the keys j <= i, and with
a sliding window only j > i - sliding_window. Then, in this order:

1. score = softmax_scale * (q . decoded key without center + q . center); for exact keys
   softmax_scale * (q . key);
2. soft_cap > 0: score = soft_cap * tanh(score / soft_cap);
3. softmax over the visible keys, with exp(sink_logits[head]) added to the denominator if given.

Rounding. The CPU kernel multiplies integers: a rotated query is rounded to 16 bits (multiples of
its largest channel / 32639), the weights of every 128 keys, softmax numerator times value scale, to
multiples of the largest of them / 32639. A score is then off by about 10^-5 of
softmax_scale * |q| |key|, an output by about 10^-4 of its length, a hundred times less than what
8-bit codes cost; never more than half a unit per channel and key. Sums that follow are exact, so
results do not depend on the processor, the number of threads or the other sequences of the call.

CUDA has several kernels. A query row is a query of one query head: a sequence has its number of
queries times the query heads per KV head of them. The split-KV kernel
(csrc/cuda/attention/split_kv.cu) takes sequences of few query rows, with any d up to 256 or d = 512
or 576, and the bits and grids of the presets, on compute capability 8.0 and later, but none in
float32 with a tail or k_new: up to 16 rows of d = 64 and 128 and up to 32 of other d where the
row-tile kernel takes the others, else up to 64 (32 beyond d = 256), in blocks of 16, 8 or 4 rows
that read the codes again. It rounds queries to 16 bits as on the CPU (multiples of the largest
channel / 32512) and weights times value scales of 64 keys to multiples of the largest / 65500; keys
and values of the exact tail are not rounded. It is one launch with a fixed grid and reads lengths
and block tables on the device; scratch memory depends on the device only. Where all sequences are
short (docs/design.md), weights are rounded for 32 keys at a time, and those of exact keys are not.
Results are the same in every run; the other sequences of a batch decide where the work is cut and
so move roundings, by about 10^-5 of the largest output.

The key-tile kernel (csrc/cuda/attention/key_tiles.cu) takes sequences of 17 to 32 rows in bfloat16
or float16 with d = 64 or 128 and the codes of any preset, on compute capability 9.0. With d = 128
it also takes those of 9 to 16 rows, in calls with more KV heads of sequences (sequences x KV heads)
than the device has multiprocessors, no sequence of more rows, and keys of 8 bits, 5 bits or 4-bit
Lloyd-Max levels or a block_table with room for up to 2,048 tokens of each. It rounds queries as
split-KV does, and weights times value scales to float16. Exact keys and values are not rounded, and
their weights are sums of two elements of their dtype.

The row-tile kernel (csrc/cuda/attention/row_tiles.cu) takes sequences of more query rows in
bfloat16 or float16 with d up to 256, which it pads to a multiple of 64, and all bits and grids but
5-bit keys with Lloyd-Max levels, on compute capability 9.0. It rounds to float16, under powers of
two that keep all digits: rotated queries, levels times their scales, and softmax weights. A tile of
64 keys, or of 128, has one power of two for its keys and one for its values, so what is below 2^-14
of the largest in its tile is off by up to 2^-24 of that. Keys and values of the exact tail and of
k_new are not rounded, and their weights have their dtype. Sums are float32. As with split-KV, the
results are the same in every run, and the other sequences decide where the work is cut. Where k_new
is given and max_q_len is more than 32 queries and 64 rows, sequences without older tokens have a
kernel of their own (docs/design.md), whose work is not cut, but max_q_len decides the size of its
tiles. In calls of many rows, with k_new or without, that kernel also takes sequences with few older
tokens, which another one decodes before, once for all of their rows. Decoded keys, before the
center is added, and values are rounded once to the dtype of q, where row tiles round levels times
scales to float16. Whether a sequence is among these depends on the lengths of all and on the shape
of the call. Scratch memory is then up to 96 MB. Where a sequence may have 1,024 rows and 3,072
tokens in codes, or with k_new 8,192 rows and any (docs/design.md), such sequences have a kernel,
too, which expands their codes once for all of their rows; scratch memory is then 64 MB at least and
6 d + 72 bytes per row (d as padded) more.

A batch with sequences of few rows and of more takes split-KV and one of these two, which run beside
each other, each for its own sequences and with scratch memory of its own. The host cannot see the
numbers of queries, so the numbers of tokens and sequences and max_q_len decide that
(docs/design.md).

The general kernel (csrc/cuda/attention/general.cu) takes all other calls. It multiplies float16 on
tensor cores with float32 sums: a query is rounded with a power of two of its own, rotated for codes
and as it is for keys of the exact tail; levels of codes are exact, and so are keys and values of a
float16 or bfloat16 tail (those of a float32 tail are rounded like a query, keys without their
center). A weight times its value's scale is rounded last. So a score is off by about 2 * 10^-4 of
its standard deviation over random keys, an output by at most 2^-11 of the largest value in
addition. (What is below 2^-18 of the largest product of weight and scale so far is off by 2^-29 of
that.) The result of a sequence does not depend on the rest of the batch, and is the same in every
run.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant._autograd import named_error
from torch_turboquant.batch import AttentionBatch, AttentionOptions
from torch_turboquant.config import CacheConfig, PackedConfig
from torch_turboquant.ops import _cache_checks as checks
from torch_turboquant.ops.cache import (
    read_pages_reference,
    tail_row_reference,
    token_places_reference,
)
from torch_turboquant.ops.codec import SCALE_MODES, Channels, level_of_code_reference
from torch_turboquant.signs import rotation_tensor
from torch_turboquant.tables import CacheTables
from torch_turboquant.tail import Tail

NewTokens = tuple[Tensor | None, Tensor | None]  # k_new and v_new


def paged_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    config: CacheConfig,
    tables: CacheTables,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_q_len: int = 1,
    softmax_scale: float | None = None,
    tail: Tail | None = None,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sink_logits: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last tokens of each sequence over its packed cache.

    Query i of a sequence with q_len queries stands at position p = seq_len - q_len + i and sees the
    keys j <= p; with a sliding window only j > p - sliding_window. The tokens must have been stored
    (cache_store) before; where k_new and v_new are given, those of this call may also be stored
    later, or not at all.

    Args:
        q: [tokens, q_heads, head_dim], float32, float16 or bfloat16, stride 1 in the last
            dimension; q_heads a multiple of kv_heads: query head h reads KV head
            h // (q_heads / kv_heads).
        cache: uint8 [num_pages, kv_heads, record_bytes], pages contiguous and at any distance from
            each other.
        block_table: int32 [seqs, max_pages], stride 1 in a row: the pages of each sequence in
            order; entries that no query needs are not read. With k_new it needs room for older
            tokens only.
        seq_lens: int32 [seqs], with the new tokens; 0 for padding.
        config, tables: of the cache.
        cu_seqlens_q: int32 [seqs + 1]: where each sequence's queries start among the tokens;
            absent: one query per sequence.
        max_q_len: an upper bound of the queries of a sequence.
        softmax_scale: factor of the scores, finite in float32; None: 1 / sqrt(head_dim).
        tail: of q's dtype: keys j < config.sink_tokens and p - j < config.recent_window come from
            it. None: everything comes from codes. Its ring has config.recent_window + max_q_len - 1
            rows at least, with k_new config.recent_window - 1: the tail then needs no room for this
            call's tokens. Without a window it may have none. In a ring without room for this call's
            tokens, storing them overwrites older tokens of the window. Those come from codes,
            whether they have been overwritten yet or not, unless tail.valid says that the ring
            holds them.
        sliding_window: 0: none.
        soft_cap: > 0: a score s becomes soft_cap * tanh(s / soft_cap); from 1.17549e-38, the least
            normal float32, to 1000. 0: none.
        sink_logits: float32 [q_heads]: each adds exp(logit) to the softmax denominator, and to lse.
        k_new, v_new: [tokens, kv_heads, head_dim], the keys and values of q's tokens in q's dtype,
            stride 1 in the last dimension; given together. Queries read the tokens of this call
            from them, exactly as they are, and older tokens from codes and tail. A sequence that
            has no older tokens reads no page.
        out, lse: written instead of new tensors; contiguous, out of q's shape and dtype, lse
            float32 [tokens, q_heads] and only beside out. out may be q; otherwise neither shares
            memory with another tensor of the call.

    Returns:
        out: [tokens, q_heads, head_dim], q's dtype; 0 for a query without any key.
        lse: float32 [tokens, q_heads], the natural logarithm of the softmax denominator; without
            any key it is the sink logit, or -inf.
        Rows of tokens past the last sequence are 0 and -inf.
        On the CPU queries and weights are rounded to 16-bit integers (docs/ops.md#attention); the
        result of a sequence depends neither on the rest of the batch nor on the number of threads.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride or device; a number out of range; a tail with too few
            rows.
        RuntimeError: values of block_table, seq_lens, cu_seqlens_q or tail.slots out of range
            (checked on the CPU); out or lse that share memory.
    """
    ring, slots, valid = checks.parts_of_tail(tail)
    batch, options = checked_call(
        q,
        cache,
        config,
        tables,
        ring,
        (block_table, seq_lens, cu_seqlens_q, max_q_len, slots, valid),
        (softmax_scale, sliding_window, soft_cap, sink_logits),
        (k_new, v_new),
        out,
        lse,
    )
    new = (k_new, v_new)
    return call_attention(q, cache, config, tables, ring, batch, options, new, out, lse)


def checked_call(
    q: Tensor,
    cache: Tensor,
    config: CacheConfig,
    tables: CacheTables,
    ring: Tensor | None,
    of_batch: tuple[Tensor, Tensor, Tensor | None, int, Tensor | None, Tensor | None],
    of_options: tuple[float | None, int, float, Tensor | None],
    new: NewTokens,
    out: Tensor | None,
    lse: Tensor | None,
) -> tuple[AttentionBatch, AttentionOptions]:
    """Checks a call; of_batch, of_options: fields in their order. Returns the two objects."""
    _checks.check_vectors("q", q, 3)
    device = q.device
    checks.check_pages(cache, device, config, None)
    kv_heads = cache.shape[1]
    checks.check_queries(q, device, config, kv_heads)
    checks.check_tables(tables, device, config, kv_heads, steps_too=False)
    block_table, seq_lens, cu_seqlens_q, max_q_len, slots, valid = of_batch
    _checks.check_constant("seq_lens", seq_lens, device, torch.int32, (None,))
    checks.check_new_tokens(q, *new, kv_heads)
    if ring is not None:
        beside_new = new[0] is not None
        checks.check_ring(ring, device, q.dtype, config, kv_heads, max_q_len, beside_new)
        if valid is not None:
            shape = (ring.shape[0], 2)
            _checks.check_constant("tail_valid", valid, device, torch.int32, shape)
    batch = AttentionBatch(None, block_table, seq_lens, cu_seqlens_q, max_q_len, slots, valid)
    if ring is not None:
        checks.check_tail_slots(batch, ring)
    options = AttentionOptions(*of_options)
    checks.check_attention(q, batch, options, out, lse)
    return batch, options


def store_and_attend(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    config: CacheConfig,
    tables: CacheTables,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_q_len: int = 1,
    softmax_scale: float | None = None,
    tail: Tail | None = None,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sink_logits: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """cache_store and paged_attention of the same new tokens in one call.

    It does what cache_store(k_new, v_new, ..) and then paged_attention(q, .., k_new, v_new) do, and
    writes the same bytes. Where split-KV takes the call, the GPU prepares the attention beside the
    store, which spares small batches most of the store's time.

    Args:
        k_new, v_new: [tokens, kv_heads, head_dim], the keys and values of q's tokens in q's dtype,
            stride 1 in the last dimension.
        cache, slot_mapping: as in cache_store; the cache is written.
        tail: of q's dtype, with as many rows as paged_attention needs with k_new; written.
        q, block_table, seq_lens, config, tables, cu_seqlens_q, max_q_len: as in paged_attention.
        softmax_scale, sliding_window, soft_cap, sink_logits: as in paged_attention.
        out, lse: as in paged_attention. Neither these nor q, block_table, seq_lens, cu_seqlens_q
            and sink_logits share memory with the cache or the tail.

    Returns:
        out, lse as paged_attention's.

    Raises:
        TypeError, ValueError, RuntimeError: as cache_store and paged_attention, before anything is
            written.
    """
    ring, slots, valid = checks.parts_of_tail(tail)
    batch, options = _checked_step(
        q,
        k_new,
        v_new,
        cache,
        config,
        tables,
        ring,
        slot_mapping,
        (block_table, seq_lens, cu_seqlens_q, max_q_len, slots, valid),
        (softmax_scale, sliding_window, soft_cap, sink_logits),
        out,
        lse,
    )
    new = (k_new, v_new)
    return call_step(q, cache, config, tables, ring, batch, slot_mapping, options, new, out, lse)


def _checked_step(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    cache: Tensor,
    config: CacheConfig,
    tables: CacheTables,
    ring: Tensor | None,
    slot_mapping: Tensor,
    of_batch: tuple[Tensor, Tensor, Tensor | None, int, Tensor | None, Tensor | None],
    of_options: tuple[float | None, int, float, Tensor | None],
    out: Tensor | None,
    lse: Tensor | None,
) -> tuple[AttentionBatch, AttentionOptions]:
    """Checks a call of store_and_attend, as checked_call does."""
    for name, t in (("k_new", k_new), ("v_new", v_new)):
        _checks.check_vectors(name, t, 3)
    new = (k_new, v_new)
    checked = checked_call(q, cache, config, tables, ring, of_batch, of_options, new, out, lse)
    kv_heads = cache.shape[1]
    checks.check_tables(tables, q.device, config, kv_heads)
    _checks.check_slots("slot_mapping", slot_mapping, q.device, q.shape[0])
    return checked


def call_attention(
    q: Tensor,
    pages: Tensor,
    config: CacheConfig,
    tables: CacheTables,
    ring: Tensor | None,
    batch: AttentionBatch,
    options: AttentionOptions,
    new: NewTokens,
    out: Tensor | None,
    lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Calls the op paged_attention, which checks everything that Python has not checked."""
    arguments = call_arguments(q, pages, config, tables, ring, batch, options, new)
    ops = torch.ops.turboquant
    return call_or_fill(ops.paged_attention, ops.paged_attention_out, arguments, out, lse)


def call_step(
    q: Tensor,
    pages: Tensor,
    config: CacheConfig,
    tables: CacheTables,
    ring: Tensor | None,
    batch: AttentionBatch,
    slot_mapping: Tensor | None,
    options: AttentionOptions,
    new: NewTokens,
    out: Tensor | None,
    lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Calls the op store_and_attend, which checks everything that Python has not checked."""
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if lse is None:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    arguments = call_arguments(q, pages, config, tables, ring, batch, options, new)
    try:
        torch.ops.turboquant.store_and_attend.default(
            *arguments,
            slot_mapping=slot_mapping,
            **step_constants(config, tables),
            out=out,
            lse=lse,
        )
    except RuntimeError as error:
        raise named_error(error) from None
    return out, lse


def call_or_fill(
    op: Any, op_out: Any, arguments: tuple[Any, ...], out: Tensor | None, lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Calls an op of attention, or its variant that fills `out`; the queries come first."""
    try:
        if out is None:
            return op.default(*arguments)
        if lse is None:
            lse = arguments[0].new_empty(arguments[0].shape[:2], dtype=torch.float32)
        op_out.default(*arguments, out=out, lse=lse)
    except RuntimeError as error:
        raise named_error(error) from None
    return out, lse


def call_arguments(
    q: Tensor,
    pages: Tensor,
    config: CacheConfig,
    tables: CacheTables,
    ring: Tensor | None,
    batch: AttentionBatch,
    options: AttentionOptions,
    new: NewTokens,
) -> tuple[Any, ...]:
    """The arguments of the op paged_attention in the order of its schema."""
    scale = options.softmax_scale
    return (
        q,
        pages,
        batch.block_table,
        batch.seq_lens,
        *attend_constants(config, tables),
        1.0 / math.sqrt(config.head_dim) if scale is None else scale,
        batch.cu_seqlens_q,
        batch.max_q_len,
        ring,
        None if ring is None else batch.tail_slots,
        None if ring is None else batch.tail_valid,
        0 if ring is None else config.sink_tokens,
        0 if ring is None else config.recent_window,
        options.sliding_window,
        options.soft_cap,
        options.sink_logits,
        *new,
    )


def attend_constants(config: CacheConfig, tables: CacheTables) -> tuple[Any, ...]:
    """The op's arguments from key_signs to value_bits, the same in each call."""
    return (
        tables.key_signs,
        tables.value_signs,
        tables.key_levels,
        tables.value_levels,
        tables.center,
        config.page_size,
        config.key_bits,
        config.value_bits,
    )


def step_constants(config: CacheConfig, tables: CacheTables) -> dict[str, Any]:
    """What the op store_and_attend needs beyond attend_constants, the same in each call."""
    return {
        "key_steps": tables.key_steps,
        "value_steps": tables.value_steps,
        "key_scale_mode": SCALE_MODES[config.key_scale_mode],
        "value_scale_mode": SCALE_MODES[config.value_scale_mode],
    }


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Joins the attention of the same queries over two disjoint sets of keys.

    Args:
        out_a, out_b: [..., head_dim], one dtype of float32, float16 and bfloat16, contiguous.
        lse_a, lse_b: float32 [...], contiguous; -inf: no keys, that part is ignored.

    Returns:
        out, lse as if computed over both sets at once, up to rounding.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride or device.
    """
    _check_merge(out_a, lse_a, out_b, lse_b)
    return torch.ops.turboquant.merge_attention.default(out_a, lse_a, out_b, lse_b)


def _check_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    if _checks.check_vectors("out_a", out_a) < 1:
        raise ValueError(f"out_a has shape {list(out_a.shape)}, expected [..., d] with d >= 1")
    device, shape = out_a.device, tuple(out_a.shape)
    _checks.check_constant("out_a", out_a, device, out_a.dtype, shape)
    _checks.check_constant("out_b", out_b, device, out_a.dtype, shape)
    _checks.check_constant("lse_a", lse_a, device, torch.float32, shape[:-1])
    _checks.check_constant("lse_b", lse_b, device, torch.float32, shape[:-1])


# ---- fakes


def _window(a: SimpleNamespace) -> dict[str, int]:
    sinks = a.sink_tokens if a.tail is not None else 0
    return {"sink_tokens": sinks, "recent_window": a.recent_window}


def check_raw_call(
    a: SimpleNamespace, out: Tensor | None = None, lse: Tensor | None = None
) -> None:
    """Checks the arguments that the raw ops of attention share, in a fake."""
    with _checks.of_fake():
        _checks.check_vectors("q", a.q, 3)
        checked_call(
            a.q,
            a.cache,
            checks.raw_config(a, a.q.shape[-1], **_window(a)),
            checks.raw_tables(a),
            a.tail,
            (a.block_table, a.seq_lens, a.cu_seqlens_q, a.max_q_len, a.tail_slots, a.tail_valid),
            (a.softmax_scale, a.sliding_window, a.soft_cap, a.sink_logits),
            (a.k_new, a.v_new),
            out,
            lse,
        )


@torch.library.register_fake("turboquant::paged_attention")
def _paged_attention_fake(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    a = checks.raw_arguments("paged_attention", given, named)
    check_raw_call(a)
    return a.q.new_empty(a.q.shape), a.q.new_empty(a.q.shape[:-1], dtype=torch.float32)


@torch.library.register_fake("turboquant::paged_attention_out")
def _paged_attention_out_fake(*given: Any, **named: Any) -> None:
    a = checks.raw_arguments("paged_attention_out", given, named)
    check_raw_call(a, a.out, a.lse)


@torch.library.register_fake("turboquant::store_and_attend")
def _store_and_attend_fake(*given: Any, **named: Any) -> None:
    a = checks.raw_arguments("store_and_attend", given, named)
    with _checks.of_fake():
        _checks.check_vectors("q", a.q, 3)
        if a.k_new is None or a.v_new is None:
            raise ValueError("store_and_attend needs k_new and v_new")
        _checked_step(
            a.q,
            a.k_new,
            a.v_new,
            a.cache,
            checks.raw_config(a, a.q.shape[-1], **checks.raw_scale_modes(a), **_window(a)),
            checks.raw_tables(a),
            a.tail,
            a.slot_mapping,
            (a.block_table, a.seq_lens, a.cu_seqlens_q, a.max_q_len, a.tail_slots, a.tail_valid),
            (a.softmax_scale, a.sliding_window, a.soft_cap, a.sink_logits),
            a.out,
            a.lse,
        )


@torch.library.register_fake("turboquant::merge_attention")
def _merge_attention_fake(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    with _checks.of_fake():
        _check_merge(out_a, lse_a, out_b, lse_b)
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


# ---- references: CPU tensors only


def paged_attention_reference(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Takes paged_attention's arguments; out and lse are not written, and max_q_len has no effect.

    It decodes everything, and computes dense attention in float64.

    Returns:
        out, lse in float64.
    """
    given = inspect.signature(paged_attention).bind(*arguments, **options)
    given.apply_defaults()
    a = SimpleNamespace(**given.arguments)
    out = torch.zeros(a.q.shape, dtype=torch.float64)
    lse = torch.full(a.q.shape[:2], -torch.inf, dtype=torch.float64)
    for token, _, _, scores, values in scores_reference(a):
        if a.sink_logits is not None:
            total = torch.cat([scores, a.sink_logits.double()[:, None]], dim=1).logsumexp(dim=1)
        else:
            total = scores.logsumexp(dim=1)
        lse[token] = total
        if scores.shape[1]:
            out[token] = torch.einsum("hj,jhd->hd", torch.exp(scores - total[:, None]), values)
    return out, lse


def scores_reference(a: SimpleNamespace) -> Iterator[tuple[int, int, int, Tensor, Tensor]]:
    """The scores of every query, by the names of paged_attention's arguments.

    Yields, for each token that belongs to a sequence:
        token, sequence, the position of the first key that its queries see;
        scores, float64 [q_heads, keys]; and the values of these keys, float64 [keys, q_heads, d].
    """
    config, tables, tail = a.config, a.tables, a.tail
    tokens, q_heads, d = a.q.shape
    group = q_heads // a.cache.shape[1]
    scale = 1.0 / math.sqrt(d) if a.softmax_scale is None else a.softmax_scale
    key_rotation = rotation_tensor(tables.key_signs)
    value_rotation = rotation_tensor(tables.value_signs)

    decoded = {}  # of each sequence: what its pages hold
    for token, (s, position) in enumerate(
        token_places_reference(tokens, a.seq_lens, a.cu_seqlens_q)
    ):
        if s < 0:
            continue
        first = max(0, position - a.sliding_window + 1) if a.sliding_window else 0
        seen = slice(first, position + 1)
        length = int(a.seq_lens[s])
        own = length  # the first position of this call's own tokens, where they are given
        if a.k_new is not None:
            own -= 1 if a.cu_seqlens_q is None else int(a.cu_seqlens_q[s + 1] - a.cu_seqlens_q[s])
        if position >= 0:
            if s not in decoded:
                pages = a.block_table[s, : -(-own // config.page_size)].long()
                # pages that the window has left may be gone
                gone = first // config.page_size if first < own else len(pages)
                pages[:gone] = pages[gone] if gone < len(pages) else 0
                key_codes, value_codes, key_scales, value_scales = read_pages_reference(
                    a.cache, pages, config
                )
                levels = level_of_code_reference(key_codes, tables.key_levels, config.key_bits)
                k = (key_scales.double()[..., None] * levels / 32) @ key_rotation
                channels = Channels.of(tables.center, 2)
                if channels.inverse is not None:
                    k = k * channels.inverse.double()
                if channels.center is not None:
                    k = k + channels.center.double()
                levels = level_of_code_reference(
                    value_codes, tables.value_levels, config.value_bits
                )
                v = (value_scales.double()[..., None] * levels / 32) @ value_rotation
                none = torch.zeros(length - own, *k.shape[1:], dtype=torch.float64)
                decoded[s] = tuple(torch.cat([part[:own], none]) for part in (k, v))
            k, v = (part[seen].clone() for part in decoded[s])
            if tail is not None and tail.slots[s] >= 0:
                slot = int(tail.slots[s])
                ring = tail.ring.shape[2] - config.sink_tokens
                held = (config.sink_tokens, 0 if a.k_new is None else length - ring)
                if tail.valid is not None:
                    held = tail.valid[slot].tolist()
                for j in range(first, min(position + 1, own)):
                    if not exact_reference(j, position, config, *held):
                        continue
                    row = tail.ring[slot, :, tail_row_reference(j, config.sink_tokens, ring)]
                    k[j - first], v[j - first] = row[:, 0].double(), row[:, 1].double()
            for j in range(max(first, own), position + 1):
                t = token - (position - j)
                k[j - first], v[j - first] = a.k_new[t].double(), a.v_new[t].double()
        else:
            k = v = torch.zeros(0, a.cache.shape[1], d, dtype=torch.float64)
        k, v = (part.repeat_interleave(group, dim=1) for part in (k, v))
        scores = scale * torch.einsum("hd,jhd->hj", a.q[token].double(), k)
        if a.soft_cap > 0:
            scores = a.soft_cap * torch.tanh(scores / a.soft_cap)
        yield token, s, first, scores, v


def exact_reference(
    j: int, position: int, config: PackedConfig, sinks_held: int, first_held: int
) -> bool:
    """Whether the query at this position reads key j from the tail (docs/format.md, section 9)."""
    if j < config.sink_tokens:
        return j < sinks_held
    return position - j < config.recent_window and j >= first_held


def merge_attention_reference(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """The join in float64: (out, lse) in float64."""
    lse_a, lse_b = lse_a.double(), lse_b.double()
    lse = torch.logaddexp(lse_a, lse_b)
    out = torch.zeros(out_a.shape, dtype=torch.float64)
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.where(part_lse > -torch.inf, torch.exp(part_lse - lse), 0.0)[..., None]
        out = out + torch.where(weight > 0, weight * part.double(), 0.0)
    return out, lse
