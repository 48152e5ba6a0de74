"""Latent attention (MLA): one vector per token is key and value of all query heads.

A model with multi-head latent attention keeps a latent of latent_dim channels and rope_dim channels
that carry the position; keys and values of its heads are linear in the latent (DeepSeek-V2,
arXiv:2405.04434, section 2.1). Absorbed, as there, attention reads the latents themselves:

    q_latent = q_nope @ W_UK                            [tokens, q_heads, latent_dim]
    out, lse = mla_attention(q_latent, q_rope, ...)     out: [tokens, q_heads, latent_dim]
    result   = out @ W_UV                               [tokens, q_heads, v]

with W_UK [heads, nope, latent_dim] and W_UV [heads, latent_dim, v] of each head, the two halves of
the model's kv_b_proj. mla_store encodes latents into pages, uint8 [num_pages, record_bytes], of 3,
4, 5 or 8 bits per channel; the position's channels stay in 16 bits (docs/format.md, section 12).
The exact tail is that of the other caches with one row of latent_dim + rope_dim channels per token.

A query at position i (the last of n new ones stands at seq_len - 1) sees the tokens j <= i, and

    score = softmax_scale * (q_latent . latent + q_rope . rope)
    out   = sum of softmax(score) * latent

where the latent is the decoded one with its center, or the exact one of the tail or of latent_new.
There is no sliding window, soft cap or learned sink: no model with latents has them.

rotated=True leaves the rotation to the model's matrices (fold_latent_rotation): queries, outputs,
the tail and latent_new are then in the rotated space (rotate_latent), and attention has no
transform to do. Codes and pages are the same either way.

Rounding on the CPU is that of paged_attention: latent queries and weights become 16-bit integers;
products with the raw channels and with exact tokens are float32.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant._autograd import named_error
from torch_turboquant.batch import AttentionBatch, AttentionOptions
from torch_turboquant.format import read_latents, write_latent
from torch_turboquant.latent import LatentConfig, LatentTables, rotate_latent
from torch_turboquant.ops import _cache_checks as checks
from torch_turboquant.ops.attention import call_or_fill, exact_reference
from torch_turboquant.ops.cache import tail_row_reference, token_places_reference
from torch_turboquant.ops.codec import (
    SCALE_MODES,
    Channels,
    dequantise_reference,
    level_of_code_reference,
    quantise_reference,
)
from torch_turboquant.signs import rotation_tensor
from torch_turboquant.tail import Tail

NewLatents = tuple[Tensor | None, Tensor | None]  # latent_new and rope_new


def mla_store(
    latent: Tensor,
    rope: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    config: LatentConfig,
    tables: LatentTables,
    *,
    tail: Tail | None = None,
    seq_lens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    rotated: bool = False,
) -> None:
    """Encodes the latents of new tokens into their slots, and copies them into the tail.

    Args:
        latent: [tokens, latent_dim], float32, float16 or bfloat16, stride 1 in the last dimension:
            after the model's norm, never rotated.
        rope: [tokens, rope_dim] of latent's dtype, stride 1 in the last dimension: after RoPE.
            Pages keep it in config.rope_dtype, rounded once.
        cache: uint8 [num_pages, record_bytes], pages contiguous and at any distance from each
            other; written, so it shares no memory with another tensor of the call.
        slot_mapping: int32 or int64 [tokens]: page * page_size + offset of each token; -1 skips
            the token. Two tokens of a call must not have the same slot.
        config, tables: of the cache.
        tail: written at the positions that it keeps, so its ring shares no memory with another
            tensor; needs seq_lens. Two sequences of a call must not share an entry. Its ring has
            config.recent_window rows at least: one more than attention with latent_new needs.
        seq_lens: int32 [seqs], with the new tokens; 0 for padding.
        cu_seqlens_q: int32 [seqs + 1]; absent: one new token per sequence.
        rotated: whether the tail gets the latents rotated (rotate_latent), for attention with
            rotated=True. Pages are the same either way.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride or device; a tail without seq_lens or with too few rows.
        RuntimeError: values of slot_mapping, seq_lens, cu_seqlens_q or tail.slots out of range
            (checked on the CPU); memory that is shared. Nothing has been written by then.
    """
    ring, slots, _ = checks.parts_of_tail(tail)
    _check_store(
        latent, rope, cache, config, tables, ring, slot_mapping, seq_lens, cu_seqlens_q, slots
    )
    try:
        torch.ops.turboquant.mla_store.default(
            latent,
            rope,
            cache,
            slot_mapping,
            tables.signs,
            tables.levels,
            tables.steps,
            tables.center,
            config.page_size,
            config.bits,
            SCALE_MODES[config.scale_mode],
            config.rope_dtype,
            ring,
            slots,
            seq_lens,
            cu_seqlens_q,
            config.sink_tokens,
            rotated,
        )
    except RuntimeError as error:
        raise named_error(error) from None


def mla_load(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    config: LatentConfig,
    tables: LatentTables,
    max_seq_len: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Decodes the pages of sequences.

    Args:
        cache: uint8 [num_pages, record_bytes], pages contiguous and at any distance from each
            other.
        block_table: int32 [seqs, max_pages], stride 1 in a row: the pages of each sequence in
            order; entries past seq_lens are not read.
        seq_lens: int32 [seqs], at most max_seq_len.
        config, tables: of the cache.
        max_seq_len: the second dimension of the results.
        dtype: of the results: float32, float16 or bfloat16.

    Returns:
        latent: [seqs, max_seq_len, latent_dim], not rotated; zeros from seq_lens on.
        rope: [seqs, max_seq_len, rope_dim]; zeros from seq_lens on.

    Raises:
        TypeError: another dtype.
        ValueError: another shape or device.
        RuntimeError: values of block_table or seq_lens out of range (checked on the CPU).
    """
    _check_load(cache, block_table, seq_lens, config, tables, max_seq_len, dtype)
    return torch.ops.turboquant.mla_load.default(
        cache,
        block_table,
        seq_lens,
        tables.signs,
        tables.levels,
        tables.center,
        config.latent_dim,
        config.rope_dim,
        config.page_size,
        config.bits,
        config.rope_dtype,
        max_seq_len,
        dtype,
    )


def mla_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    config: LatentConfig,
    tables: LatentTables,
    *,
    softmax_scale: float,
    cu_seqlens_q: Tensor | None = None,
    max_q_len: int = 1,
    tail: Tail | None = None,
    latent_new: Tensor | None = None,
    rope_new: Tensor | None = None,
    rotated: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last tokens of each sequence over its packed latents.

    Query i of a sequence with q_len queries stands at position p = seq_len - q_len + i and sees the
    tokens j <= p. The tokens must have been stored (mla_store) before; where latent_new and
    rope_new are given, those of this call may also be stored later, or not at all.

    Args:
        q_latent: [tokens, q_heads, latent_dim], float32, float16 or bfloat16, stride 1 in the last
            dimension: q_nope @ W_UK of each head.
        q_rope: [tokens, q_heads, rope_dim] of q_latent's dtype, stride 1 in the last dimension:
            after RoPE.
        cache: uint8 [num_pages, record_bytes], pages contiguous and at any distance from each
            other.
        block_table: int32 [seqs, max_pages], stride 1 in a row: the pages of each sequence in
            order; entries that no query needs are not read. With latent_new it needs room for older
            tokens only.
        seq_lens: int32 [seqs], with the new tokens; 0 for padding.
        config, tables: of the cache.
        softmax_scale: factor of the scores, finite in float32: the model's, 1 / sqrt(nope + rope)
            unless it says otherwise.
        cu_seqlens_q: int32 [seqs + 1]: where each sequence's queries start among the tokens;
            absent: one query per sequence.
        max_q_len: an upper bound of the queries of a sequence.
        tail: of q_latent's dtype: tokens j < config.sink_tokens and p - j < config.recent_window
            come from it. None: everything comes from codes. Its ring has config.recent_window +
            max_q_len - 1 rows at least, with latent_new config.recent_window - 1, as in
            paged_attention.
        latent_new, rope_new: [tokens, latent_dim] and [tokens, rope_dim], those of q's tokens in
            q_latent's dtype, stride 1 in the last dimension; given together. Queries read the
            tokens of this call from them, exactly as they are, and older tokens from codes and
            tail. A sequence that has no older tokens reads no page.
        rotated: whether q_latent, the tail and latent_new are in the rotated space, and out is to
            be: q_latent is q_nope @ W_UK of fold_latent_rotation, the tail was written with
            rotated=True, and latent_new comes from rotate_latent.
        out, lse: written instead of new tensors; contiguous, out of q_latent's shape and dtype, lse
            float32 [tokens, q_heads] and only beside out. They share no memory with another tensor
            of the call.

    Returns:
        out: [tokens, q_heads, latent_dim], q_latent's dtype; 0 for a query without any token.
        lse: float32 [tokens, q_heads], the natural logarithm of the softmax denominator; -inf
            without any token.
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
    _check_attention(
        q_latent,
        q_rope,
        cache,
        config,
        tables,
        ring,
        (block_table, seq_lens, cu_seqlens_q, max_q_len, slots, valid),
        softmax_scale,
        (latent_new, rope_new),
        out,
        lse,
    )
    arguments = (
        q_latent,
        q_rope,
        cache,
        block_table,
        seq_lens,
        *_constants(tables, rotated),
        config.page_size,
        config.bits,
        config.rope_dtype,
        softmax_scale,
        cu_seqlens_q,
        max_q_len,
        ring,
        slots,
        valid,
        0 if ring is None else config.sink_tokens,
        0 if ring is None else config.recent_window,
        latent_new,
        rope_new,
    )
    ops = torch.ops.turboquant
    return call_or_fill(ops.mla_attention, ops.mla_attention_out, arguments, out, lse)


def _constants(
    tables: LatentTables, rotated: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Signs, levels and center of the space that queries are in: the rotated one has no signs."""
    if rotated:
        return None, tables.levels, tables.rotated_center
    return tables.signs, tables.levels, tables.center


# ---- checks


def _check_latents(
    names: tuple[str, str], latent: Tensor, rope: Tensor, config: LatentConfig
) -> None:
    """[tokens, latent_dim] and [tokens, rope_dim] of one dtype, on one device."""
    _checks.check_vectors(names[0], latent, 2)
    tokens = latent.shape[0]
    _checks.check_shape(names[0], latent, (tokens, config.latent_dim))
    _checks.check_dtype(names[1], rope, (latent.dtype,))
    _checks.check_device(names[1], rope, latent.device)
    _checks.check_shape(names[1], rope, (tokens, config.rope_dim))
    _checks.check_unit_stride(names[1], rope)


def _check_cache(cache: Tensor, device: torch.device, config: LatentConfig) -> None:
    shape = (None, config.record_bytes)
    _checks.check_entries("cache", cache, device, torch.uint8, shape)


def _check_tables(
    tables: LatentTables, device: torch.device, config: LatentConfig, steps_too: bool = False
) -> None:
    """Constants that make_latent_tables could have made for this config."""
    _checks.check_kind("tables", tables, LatentTables)
    d = config.latent_dim
    if (tables.signs is None) == config.transform:
        raise ValueError(f"signs do not fit the config's transform {config.transform}")
    if tables.signs is not None:
        _checks.check_constant("signs", tables.signs, device, torch.float32, (d,))
    _checks.check_levels(tables.levels, device, config.bits, "levels")
    if (tables.levels is None) != (config.grid == "uniform"):
        raise ValueError(f"levels do not fit the config's grid {config.grid!r}")
    if steps_too:
        _checks.check_steps(tables.steps, device, "steps")
    _checks.check_center(tables.center, device, (d,))


def _check_ring(
    ring: Tensor,
    device: torch.device,
    dtype: torch.dtype,
    config: LatentConfig,
    max_q_len: int = 1,
    beside_new: bool = False,
) -> None:
    """[max_seqs, rows, latent_dim + rope_dim], with enough rows."""
    _checks.check_entries("tail", ring, device, dtype, (None, None, config.channels))
    if beside_new:
        checks.check_ring_rows_beside_new(ring.shape[1], config, "latent_new")
    else:
        checks.check_ring_rows(ring.shape[1], config, max_q_len)


def _check_store(
    latent: Tensor,
    rope: Tensor,
    cache: Tensor,
    config: LatentConfig,
    tables: LatentTables,
    ring: Tensor | None,
    slot_mapping: Tensor,
    seq_lens: Tensor | None,
    cu_seqlens_q: Tensor | None,
    tail_slots: Tensor | None,
) -> None:
    _checks.check_kind("config", config, LatentConfig)
    _check_latents(("latent", "rope"), latent, rope, config)
    device = latent.device
    _check_cache(cache, device, config)
    _check_tables(tables, device, config, steps_too=True)
    if isinstance(seq_lens, Tensor):
        _checks.check_device("seq_lens", seq_lens, device)
    batch = AttentionBatch(
        slot_mapping=slot_mapping,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        tail_slots=tail_slots,
    )
    checks.check_slot_mapping(batch, device, latent.shape[0])
    if ring is not None:
        _check_ring(ring, device, latent.dtype, config)
        checks.check_tail_slots(batch, ring)


def _check_load(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    config: LatentConfig,
    tables: LatentTables,
    max_seq_len: int,
    dtype: torch.dtype,
) -> None:
    _checks.check_kind("config", config, LatentConfig)
    _checks.check_dtype("cache", cache, (torch.uint8,))
    device = cache.device
    _check_cache(cache, device, config)
    _check_tables(tables, device, config)
    _checks.check_constant("seq_lens", seq_lens, device, torch.int32, (None,))
    batch = AttentionBatch(block_table=block_table, seq_lens=seq_lens)
    checks.check_loading(batch, device, max_seq_len, dtype)


def _check_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    config: LatentConfig,
    tables: LatentTables,
    ring: Tensor | None,
    of_batch: tuple[Tensor, Tensor, Tensor | None, int, Tensor | None, Tensor | None],
    softmax_scale: float,
    new: NewLatents,
    out: Tensor | None,
    lse: Tensor | None,
) -> None:
    _checks.check_kind("config", config, LatentConfig)
    _checks.check_vectors("q_latent", q_latent, 3)
    device = q_latent.device
    tokens, q_heads, _ = q_latent.shape
    _checks.check_shape("q_latent", q_latent, (tokens, None, config.latent_dim))
    if q_heads == 0:
        raise ValueError("q_latent has no heads")
    _checks.check_dtype("q_rope", q_rope, (q_latent.dtype,))
    _checks.check_device("q_rope", q_rope, device)
    _checks.check_shape("q_rope", q_rope, (tokens, q_heads, config.rope_dim))
    _checks.check_unit_stride("q_rope", q_rope)
    _check_cache(cache, device, config)
    _check_tables(tables, device, config)
    block_table, seq_lens, cu_seqlens_q, max_q_len, slots, valid = of_batch
    _checks.check_constant("seq_lens", seq_lens, device, torch.int32, (None,))
    if (new[0] is None) != (new[1] is None):
        raise ValueError("latent_new and rope_new come together or not at all")
    if new[0] is not None and new[1] is not None:
        _checks.check_dtype("latent_new", new[0], (q_latent.dtype,))
        _checks.check_device("latent_new", new[0], device)
        _checks.check_shape("latent_new", new[0], (tokens, config.latent_dim))
        _check_latents(("latent_new", "rope_new"), new[0], new[1], config)
    if ring is not None:
        _check_ring(ring, device, q_latent.dtype, config, max_q_len, new[0] is not None)
        if valid is not None:
            shape = (ring.shape[0], 2)
            _checks.check_constant("tail_valid", valid, device, torch.int32, shape)
    batch = AttentionBatch(None, block_table, seq_lens, cu_seqlens_q, max_q_len, slots, valid)
    if ring is not None:
        checks.check_tail_slots(batch, ring)
    checks.check_attention(q_latent, batch, AttentionOptions(softmax_scale), out, lse)


# ---- fakes


def _raw_config(a: SimpleNamespace, latent_dim: int, rope_dim: int, **others: Any) -> LatentConfig:
    """A config of the numbers of a raw op, with the grid of its levels; others: of its fields."""
    return LatentConfig(
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        bits=a.bits,
        grid="uniform" if a.levels is None or a.bits == 8 else "lloyd",
        page_size=a.page_size,
        rope_dtype=a.rope_dtype,
        transform=a.signs is not None,
        **others,
    )


def _raw_tables(a: SimpleNamespace) -> LatentTables:
    return LatentTables(a.signs, a.levels, getattr(a, "steps", None), a.center, None)  # type: ignore[arg-type]


@torch.library.register_fake("turboquant::mla_store")
def _mla_store_fake(*given: Any, **named: Any) -> None:
    a = checks.raw_arguments("mla_store", given, named)
    with _checks.of_fake():
        _checks.check_vectors("latent", a.latent, 2)
        _checks.check_dtype("rope", a.rope, (a.latent.dtype,))
        _checks.check_shape("rope", a.rope, (None, None))
        mode = _checks.check_scale_number(a.scale_mode, SCALE_MODES)
        sinks = a.sink_tokens if a.tail is not None else 0
        config = _raw_config(
            a,
            a.latent.shape[1],
            a.rope.shape[1],
            scale_mode=mode,
            sink_tokens=sinks,
            recent_window=0,
        )
        batch = a.slot_mapping, a.seq_lens, a.cu_seqlens_q, a.tail_slots
        _check_store(a.latent, a.rope, a.cache, config, _raw_tables(a), a.tail, *batch)


@torch.library.register_fake("turboquant::mla_load")
def _mla_load_fake(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    a = checks.raw_arguments("mla_load", given, named)
    with _checks.of_fake():
        config = _raw_config(a, a.latent_dim, a.rope_dim)
        tables = _raw_tables(a)
        _check_load(a.cache, a.block_table, a.seq_lens, config, tables, a.max_seq_len, a.dtype)
    latent, rope = (
        a.cache.new_empty((a.seq_lens.shape[0], a.max_seq_len, n), dtype=a.dtype)
        for n in (a.latent_dim, a.rope_dim)
    )
    return latent, rope


def _check_raw(a: SimpleNamespace, out: Tensor | None = None, lse: Tensor | None = None) -> None:
    with _checks.of_fake():
        _checks.check_vectors("q_latent", a.q_latent, 3)
        _checks.check_dtype("q_rope", a.q_rope, (a.q_latent.dtype,))
        _checks.check_shape("q_rope", a.q_rope, (None, None, None))
        sinks = a.sink_tokens if a.tail is not None else 0
        window = {"sink_tokens": sinks, "recent_window": a.recent_window}
        _check_attention(
            a.q_latent,
            a.q_rope,
            a.cache,
            _raw_config(a, a.q_latent.shape[2], a.q_rope.shape[2], **window),
            _raw_tables(a),
            a.tail,
            (a.block_table, a.seq_lens, a.cu_seqlens_q, a.max_q_len, a.tail_slots, a.tail_valid),
            a.softmax_scale,
            (a.latent_new, a.rope_new),
            out,
            lse,
        )


@torch.library.register_fake("turboquant::mla_attention")
def _mla_attention_fake(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    a = checks.raw_arguments("mla_attention", given, named)
    _check_raw(a)
    q = a.q_latent
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.register_fake("turboquant::mla_attention_out")
def _mla_attention_out_fake(*given: Any, **named: Any) -> None:
    a = checks.raw_arguments("mla_attention_out", given, named)
    _check_raw(a, a.out, a.lse)


# ---- references: CPU tensors only


def mla_store_reference(
    latent: Tensor,
    rope: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    config: LatentConfig,
    tables: LatentTables,
    *,
    tail: Tail | None = None,
    seq_lens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    rotated: bool = False,
) -> None:
    """mla_store in plain PyTorch and numpy: the same bytes."""
    codes, scales = quantise_reference(
        latent,
        tables.signs,
        tables.levels,
        tables.steps,
        config.bits,
        SCALE_MODES[config.scale_mode],
        Channels.of(tables.center, 1),
    )
    raw = rope.to(config.rope_dtype).view(torch.int16).numpy().view("<u2")
    data = cache.numpy()  # shares memory
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, config.page_size)
            vector = codes[token].numpy(), raw[token], scales[token].numpy()
            write_latent(config.record, data[page], offset, *vector)
    if tail is None or seq_lens is None:
        return
    exact = rotate_latent(latent, tables) if rotated else latent
    ring = tail.ring.shape[1] - config.sink_tokens
    places = token_places_reference(latent.shape[0], seq_lens, cu_seqlens_q)
    for token, (sequence, position) in enumerate(places):
        if sequence < 0 or position < 0 or slot_mapping[token] < 0 or tail.slots[sequence] < 0:
            continue
        if position >= config.sink_tokens and position < int(seq_lens[sequence]) - ring:
            continue
        row = tail_row_reference(position, config.sink_tokens, ring)
        tail.ring[tail.slots[sequence], row] = torch.cat([exact[token], rope[token]])


def _read_reference(
    cache: Tensor, block_table: Tensor, length: int, config: LatentConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [length, latent_dim], raw channels and scales of the first tokens of a sequence."""
    pages = block_table[: -(-length // config.page_size)].long()
    held = read_latents(config.record, cache[pages].numpy())
    rope = torch.from_numpy(held.ropes.view("<i2")).view(config.rope_dtype)
    codes, scales = torch.from_numpy(held.codes), torch.from_numpy(held.scales)
    return tuple(part.flatten(0, 1)[:length] for part in (codes, rope, scales))  # type: ignore[return-value]


def mla_load_reference(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    config: LatentConfig,
    tables: LatentTables,
    max_seq_len: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """mla_load in plain PyTorch and numpy, with every rounding of docs/format.md."""
    seqs = seq_lens.shape[0]
    latent = torch.zeros(seqs, max_seq_len, config.latent_dim, dtype=dtype)
    rope = torch.zeros(seqs, max_seq_len, config.rope_dim, dtype=dtype)
    for s, length in enumerate(seq_lens.tolist()):
        codes, raw, scales = _read_reference(cache, block_table[s], length, config)
        channels = Channels.of(tables.center, 1)
        latent[s, :length] = dequantise_reference(
            codes, scales, tables.signs, tables.levels, config.bits, channels, dtype
        )
        rope[s, :length] = raw.to(dtype)
    return latent, rope


def mla_attention_reference(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Takes mla_attention's arguments; out and lse are not written, and max_q_len has no effect.

    It decodes everything, and computes dense attention in float64.

    Returns:
        out, lse in float64.
    """
    given = inspect.signature(mla_attention).bind(*arguments, **options)
    given.apply_defaults()
    a = SimpleNamespace(**given.arguments)
    config, tail = a.config, a.tail
    tokens, q_heads, r = a.q_latent.shape
    queries = torch.cat([a.q_latent, a.q_rope], dim=2).double()
    out = torch.zeros(tokens, q_heads, r, dtype=torch.float64)
    lse = torch.full((tokens, q_heads), -torch.inf, dtype=torch.float64)

    decoded: dict[int, Tensor] = {}  # of each sequence: [older tokens, latent_dim + rope_dim]
    for token, (s, position) in enumerate(
        token_places_reference(tokens, a.seq_lens, a.cu_seqlens_q)
    ):
        if s < 0 or position < 0:
            continue
        length = int(a.seq_lens[s])
        own = length  # the first position of this call's own tokens, where they are given
        if a.latent_new is not None:
            own -= 1 if a.cu_seqlens_q is None else int(a.cu_seqlens_q[s + 1] - a.cu_seqlens_q[s])
        if s not in decoded:
            decoded[s] = _decoded_reference(a, s, own)
        none = torch.zeros(length - own, config.channels, dtype=torch.float64)
        keys = torch.cat([decoded[s], none])[: position + 1]
        if tail is not None and tail.slots[s] >= 0:
            slot = int(tail.slots[s])
            ring = tail.ring.shape[1] - config.sink_tokens
            held = (config.sink_tokens, 0 if a.latent_new is None else length - ring)
            if tail.valid is not None:
                held = tail.valid[slot].tolist()
            for j in range(min(position + 1, own)):
                if exact_reference(j, position, config, *held):
                    row = tail_row_reference(j, config.sink_tokens, ring)
                    keys[j] = tail.ring[slot, row].double()
        for j in range(own, position + 1):
            t = token - (position - j)
            keys[j] = torch.cat([a.latent_new[t], a.rope_new[t]]).double()
        score = a.softmax_scale * queries[token] @ keys.T
        lse[token] = torch.logsumexp(score, dim=1)
        out[token] = torch.exp(score - lse[token][:, None]) @ keys[:, :r]
    return out, lse


def _decoded_reference(a: SimpleNamespace, s: int, count: int) -> Tensor:
    """The first tokens of sequence s in the space of the queries: float64 [count, r + dr]."""
    signs, levels, center = _constants(a.tables, a.rotated)
    codes, raw, scales = _read_reference(a.cache, a.block_table[s], count, a.config)
    latent = scales.double()[:, None] * level_of_code_reference(codes, levels, a.config.bits) / 32
    if signs is not None:
        latent = latent @ rotation_tensor(signs)
    channels = Channels.of(center, 1)
    if channels.inverse is not None:
        latent = latent * channels.inverse.double()
    if channels.center is not None:
        latent = latent + channels.center.double()
    return torch.cat([latent, raw.double()], dim=1)
