"""The packed cache: pages of encoded keys and values, and the exact tail.

A cache is one uint8 tensor [num_pages, num_kv_heads, record_bytes]; what a record holds is in
docs/format.md, section 8. cache_store encodes new tokens into their slots and copies them,
unrotated and in the model's dtype, into the sequence's tail: a small ring that keeps the first
(sink) and last (recent) tokens exact for attention. Every token is encoded when it arrives, so
pages alone are always complete. cache_load decodes pages.

Tokens of a call belong to sequences: seq_lens [seqs] counts all tokens of each sequence including
the new ones of this call, and cu_seqlens_q [seqs + 1] says where each sequence's new tokens start
among the call's tokens (absent: one new token per sequence).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant._autograd import named_error
from torch_turboquant.batch import AttentionBatch
from torch_turboquant.config import CacheConfig
from torch_turboquant.format import read_keys, read_scales, read_values, write_token
from torch_turboquant.ops import _cache_checks as checks
from torch_turboquant.ops.codec import (
    SCALE_MODES,
    Channels,
    dequantise_reference,
    quantise_reference,
)
from torch_turboquant.tables import CacheTables
from torch_turboquant.tail import Tail


def allocate_cache(
    config: CacheConfig, num_pages: int, num_kv_heads: int, device: torch.device | str = "cpu"
) -> Tensor:
    """An empty cache: uint8 [num_pages, num_kv_heads, record_bytes], zeros.

    Raises:
        TypeError: another config, such as that of latents.
        ValueError: numbers that are not whole, or are below 0.
    """
    if not isinstance(config, CacheConfig):
        raise TypeError(f"config must be a CacheConfig, got {type(config).__name__}")
    _checks.check_count(num_pages=num_pages, num_kv_heads=num_kv_heads)
    return torch.zeros(
        num_pages, num_kv_heads, config.record_bytes, dtype=torch.uint8, device=device
    )


def cache_store(
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    config: CacheConfig,
    tables: CacheTables,
    *,
    tail: Tail | None = None,
    seq_lens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
) -> None:
    """Encodes new tokens into their slots, and copies them into the tail.

    Args:
        k, v: [tokens, kv_heads, head_dim], one dtype of float32, float16 and bfloat16, stride 1 in
            the last dimension.
        cache: uint8 [num_pages, kv_heads, record_bytes], pages contiguous and at any distance from
            each other; written, so it shares no memory with another tensor of the call.
        slot_mapping: int32 or int64 [tokens]: page * page_size + offset of each token; -1 skips
            the token. Two tokens of a call must not have the same slot.
        config, tables: of the cache.
        tail: written at the positions that it keeps, so its ring shares no memory with another
            tensor; needs seq_lens. Two sequences of a call must not share an entry. Its ring has
            config.recent_window rows at least: one more than attention with k_new needs.
        seq_lens: int32 [seqs], with the new tokens; 0 for padding.
        cu_seqlens_q: int32 [seqs + 1]; absent: one new token per sequence.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride or device; a tail without seq_lens or with too few rows.
        RuntimeError: values of slot_mapping, seq_lens, cu_seqlens_q or tail.slots out of range
            (checked on the CPU); memory that is shared. Nothing has been written by then.
    """
    ring, slots, valid = checks.parts_of_tail(tail)
    batch = _checked_store(
        k, v, cache, config, tables, ring, slot_mapping, seq_lens, cu_seqlens_q, slots, valid
    )
    call_store(k, v, cache, config, tables, ring, batch)


def _checked_store(
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    config: CacheConfig,
    tables: CacheTables,
    ring: Tensor | None,
    *of_batch: Tensor | None,
) -> AttentionBatch:
    """Checks a call of cache_store; of_batch: what _batch takes. Returns the batch."""
    _checks.check_vectors("k", k, 3)
    device, kv_heads = k.device, k.shape[1]
    checks.check_values(k, v, device, config)
    checks.check_pages(cache, device, config, kv_heads)
    checks.check_tables(tables, device, config, kv_heads)
    batch = _batch(device, *of_batch)
    checks.check_slot_mapping(batch, device, k.shape[0])
    if ring is not None:
        checks.check_ring(ring, device, k.dtype, config, kv_heads)
        checks.check_tail_slots(batch, ring)
    return batch


def _batch(
    device: torch.device,
    slot_mapping: Tensor | None,
    seq_lens: Tensor | None,
    cu_seqlens_q: Tensor | None,
    tail_slots: Tensor | None,
    tail_valid: Tensor | None = None,
) -> AttentionBatch:
    """The index tensors of cache_store, on the device of its keys."""
    if isinstance(seq_lens, Tensor):
        _checks.check_device("seq_lens", seq_lens, device)
    return AttentionBatch(
        slot_mapping=slot_mapping,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        tail_slots=tail_slots,
        tail_valid=tail_valid,
    )


def call_store(
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    config: CacheConfig,
    tables: CacheTables,
    ring: Tensor | None,
    batch: AttentionBatch,
) -> None:
    """Calls the op cache_store, which checks everything that Python has not checked."""
    try:
        torch.ops.turboquant.cache_store.default(
            k,
            v,
            pages,
            batch.slot_mapping,
            *store_constants(config, tables),
            ring,
            None if ring is None else batch.tail_slots,
            batch.seq_lens,
            batch.cu_seqlens_q,
            config.sink_tokens,
        )
    except RuntimeError as error:
        raise named_error(error) from None


def store_constants(config: CacheConfig, tables: CacheTables) -> tuple[Any, ...]:
    """The arguments of the op cache_store from key_signs to v_scale_mode, the same in each call."""
    return (
        tables.key_signs,
        tables.value_signs,
        tables.key_levels,
        tables.value_levels,
        tables.key_steps,
        tables.value_steps,
        tables.center,
        config.page_size,
        config.key_bits,
        config.value_bits,
        SCALE_MODES[config.key_scale_mode],
        SCALE_MODES[config.value_scale_mode],
    )


def cache_store_layers(
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    config: CacheConfig,
    tables: Sequence[CacheTables],
    *,
    tails: Sequence[Tail] = (),
    seq_lens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
) -> None:
    """cache_store for layers that are alike, in one call: a prompt's host time is short.

    Args:
        k, v: of each layer [batch, kv_heads, new, head_dim], as its attention has them; the tokens
            of a call are those of the first sequence, then those of the second. Otherwise as those
            of cache_store.
        caches: of each layer, as in cache_store; written. No two share memory.
        slot_mapping: int32 or int64 [batch * new], for all layers.
        config: of all caches.
        tables: of each layer. Levels and steps, which follow from the config, are taken from the
            first one for all layers.
        tails: of each layer, with the same slots and rings of their own; empty: none.
        seq_lens, cu_seqlens_q: as in cache_store, for all layers.

    Raises:
        TypeError, ValueError, RuntimeError: as cache_store, before anything is written; lists of
            different lengths.
    """
    for name, items in (("k", k), ("v", v), ("caches", caches)):
        if isinstance(items, Tensor):
            raise TypeError(f"{name} must be a list with a tensor of each layer, got one tensor")
    for tail in tails:
        _checks.check_kind("tails", tail, Tail)
        if tail.slots is not tails[0].slots:
            raise ValueError("tails of all layers must have the same slots")
    rings = [tail.ring for tail in tails]
    slots, valid = (tails[0].slots, tails[0].valid) if tails else (None, None)
    batch = _checked_store_layers(
        k, v, caches, config, tables, rings, slot_mapping, seq_lens, cu_seqlens_q, slots, valid
    )
    if batch is not None:
        call_store_layers(list(k), list(v), list(caches), config, tables, rings, batch)


def _checked_store_layers(
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    caches: Sequence[Tensor],
    config: CacheConfig,
    tables: Sequence[CacheTables],
    rings: Sequence[Tensor],
    *of_batch: Tensor | None,
) -> AttentionBatch | None:
    """Checks a call of cache_store_layers, as _checked_store does. None: there are no layers."""
    _check_count("v", v, len(k))
    _check_count("caches", caches, len(k))
    _check_count("tables", tables, len(k))
    if rings:
        _check_count("tails", rings, len(k))
    if not k:
        return None
    _checks.check_vectors("k", k[0], 4)
    device = k[0].device
    batch = _batch(device, *of_batch)
    for i, (key, value, cache, table) in enumerate(zip(k, v, caches, tables, strict=True)):
        _checks.check_vectors("k", key, 4)
        kv_heads = key.shape[1]
        checks.check_values(key, value, device, config)
        checks.check_pages(cache, device, config, kv_heads)
        checks.check_tables(table, device, config, kv_heads)
        checks.check_slot_mapping(batch, device, key.shape[0] * key.shape[2])
        checks.check_same_centers(table, tables[0])
        if rings:
            checks.check_ring(rings[i], device, key.dtype, config, kv_heads)
            checks.check_tail_slots(batch, rings[i])
    return batch


def _check_count(name: str, items: Sequence[Any], layers: int) -> None:
    if len(items) != layers:
        raise ValueError(f"{name} are of {len(items)} layers, k of {layers}")


def call_store_layers(
    k: list[Tensor],
    v: list[Tensor],
    pages: list[Tensor],
    config: CacheConfig,
    tables: Sequence[CacheTables],
    rings: list[Tensor],
    batch: AttentionBatch,
) -> None:
    """Calls the op cache_store_layers, which checks everything that Python has not checked."""
    shared = tables[0]
    try:
        torch.ops.turboquant.cache_store_layers.default(
            k,
            v,
            pages,
            batch.slot_mapping,
            [table.key_signs for table in tables],
            [table.value_signs for table in tables],
            shared.key_levels,
            shared.value_levels,
            shared.key_steps,
            shared.value_steps,
            [] if shared.center is None else [table.center for table in tables],
            config.page_size,
            config.key_bits,
            config.value_bits,
            SCALE_MODES[config.key_scale_mode],
            SCALE_MODES[config.value_scale_mode],
            rings,
            batch.tail_slots if rings else None,
            batch.seq_lens,
            batch.cu_seqlens_q,
            config.sink_tokens,
        )
    except RuntimeError as error:
        raise named_error(error) from None


def cache_load(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    config: CacheConfig,
    tables: CacheTables,
    max_seq_len: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Decodes the pages of sequences.

    Args:
        cache: uint8 [num_pages, kv_heads, record_bytes], pages contiguous and at any distance from
            each other.
        block_table: int32 [seqs, max_pages], stride 1 in a row: the pages of each sequence in
            order; entries past seq_lens are not read.
        seq_lens: int32 [seqs], at most max_seq_len.
        config, tables: of the cache.
        max_seq_len: the second dimension of the result.
        dtype: of the result: float32, float16 or bfloat16.

    Returns:
        k, v: [seqs, max_seq_len, kv_heads, head_dim]; zeros from seq_lens on.

    Raises:
        TypeError: another dtype.
        ValueError: another shape or device.
        RuntimeError: values of block_table or seq_lens out of range (checked on the CPU).
    """
    batch = _checked_load(cache, block_table, seq_lens, config, tables, max_seq_len, dtype)
    return call_load(cache, config, tables, batch, max_seq_len, dtype)


def _checked_load(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    config: CacheConfig,
    tables: CacheTables,
    max_seq_len: int,
    dtype: torch.dtype,
) -> AttentionBatch:
    """Checks a call of cache_load. Returns its batch."""
    _checks.check_dtype("cache", cache, (torch.uint8,))
    device = cache.device
    checks.check_pages(cache, device, config, None)
    checks.check_tables(tables, device, config, cache.shape[1], steps_too=False)
    _checks.check_constant("seq_lens", seq_lens, device, torch.int32, (None,))
    batch = AttentionBatch(block_table=block_table, seq_lens=seq_lens)
    checks.check_loading(batch, device, max_seq_len, dtype)
    return batch


def call_load(
    pages: Tensor,
    config: CacheConfig,
    tables: CacheTables,
    batch: AttentionBatch,
    max_seq_len: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Calls the op cache_load, which checks everything that Python has not checked."""
    return torch.ops.turboquant.cache_load.default(
        pages,
        batch.block_table,
        batch.seq_lens,
        tables.key_signs,
        tables.value_signs,
        tables.key_levels,
        tables.value_levels,
        tables.center,
        config.head_dim,
        config.page_size,
        config.key_bits,
        config.value_bits,
        max_seq_len,
        dtype,
    )


# ---- fakes


@torch.library.register_fake("turboquant::cache_store")
def _cache_store_fake(*given: Any, **named: Any) -> None:
    a = checks.raw_arguments("cache_store", given, named)
    with _checks.of_fake():
        _checks.check_vectors("k", a.k, 3)
        config = _stored_config(a, a.k, a.tail is not None)
        batch = a.slot_mapping, a.seq_lens, a.cu_seqlens_q, a.tail_slots
        _checked_store(a.k, a.v, a.cache, config, checks.raw_tables(a), a.tail, *batch)


def _stored_config(a: SimpleNamespace, k: Tensor, has_tail: bool) -> CacheConfig:
    """The config of a raw op that stores. It does not know the window of its tail."""
    sinks = a.sink_tokens if has_tail else 0
    modes = checks.raw_scale_modes(a)
    return checks.raw_config(a, k.shape[-1], **modes, sink_tokens=sinks, recent_window=0)


@torch.library.register_fake("turboquant::cache_store_layers")
def _cache_store_layers_fake(*given: Any, **named: Any) -> None:
    a = checks.raw_arguments("cache_store_layers", given, named)
    with _checks.of_fake():
        for name in ("v", "caches", "key_signs", "value_signs"):
            _check_count(name, getattr(a, name), len(a.k))
        for name in ("centers", "tails"):
            if items := getattr(a, name):
                _check_count(name, items, len(a.k))
        if not a.k:
            return
        _checks.check_vectors("k", a.k[0], 4)
        config = _stored_config(a, a.k[0], bool(a.tails))
        centers = a.centers or [None] * len(a.k)
        tables = [
            checks.raw_tables(a, key_signs=keys, value_signs=values, center=center)
            for keys, values, center in zip(a.key_signs, a.value_signs, centers, strict=True)
        ]
        batch = a.slot_mapping, a.seq_lens, a.cu_seqlens_q, a.tail_slots
        _checked_store_layers(a.k, a.v, a.caches, config, tables, a.tails, *batch)


@torch.library.register_fake("turboquant::cache_load")
def _cache_load_fake(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    a = checks.raw_arguments("cache_load", given, named)
    with _checks.of_fake():
        config, tables = checks.raw_config(a, a.head_dim), checks.raw_tables(a)
        _checked_load(a.cache, a.block_table, a.seq_lens, config, tables, a.max_seq_len, a.dtype)
    shape = (a.seq_lens.shape[0], a.max_seq_len, a.cache.shape[1], a.head_dim)
    return a.cache.new_empty(shape, dtype=a.dtype), a.cache.new_empty(shape, dtype=a.dtype)


# ---- references: CPU tensors only


def token_places_reference(
    tokens: int, seq_lens: Tensor, cu_seqlens_q: Tensor | None
) -> list[tuple[int, int]]:
    """(sequence, position) of each token of a call; (-1, -1) past the last sequence."""
    starts = range(tokens + 1) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    places = [(-1, -1)] * tokens
    for s, length in enumerate(seq_lens.tolist()):
        count = starts[s + 1] - starts[s]
        for i in range(count):
            places[starts[s] + i] = (s, length - count + i)
    return places


def tail_row_reference(position: int, sink_tokens: int, ring: int) -> int:
    """The row of the tail that holds a position."""
    return position if position < sink_tokens else sink_tokens + (position - sink_tokens) % ring


def cache_store_reference(
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    config: CacheConfig,
    tables: CacheTables,
    *,
    tail: Tail | None = None,
    seq_lens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
) -> None:
    """cache_store in plain PyTorch and numpy: the same bytes."""
    key_codes, key_scales = quantise_reference(
        k,
        tables.key_signs,
        tables.key_levels,
        tables.key_steps,
        config.key_bits,
        SCALE_MODES[config.key_scale_mode],
        Channels.of(tables.center, 2),
    )
    value_codes, value_scales = quantise_reference(
        v,
        tables.value_signs,
        tables.value_levels,
        tables.value_steps,
        config.value_bits,
        SCALE_MODES[config.value_scale_mode],
    )
    data = cache.numpy()  # shares memory
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, config.page_size)
        for head in range(k.shape[1]):
            write_token(
                config.record,
                data[page, head],
                offset,
                key_codes[token, head].numpy(),
                value_codes[token, head].numpy(),
                key_scales[token, head].numpy(),
                value_scales[token, head].numpy(),
            )
    if tail is None or seq_lens is None:
        return
    ring = tail.ring.shape[2] - config.sink_tokens
    places = token_places_reference(k.shape[0], seq_lens, cu_seqlens_q)
    for token, (sequence, position) in enumerate(places):
        if sequence < 0 or position < 0 or slot_mapping[token] < 0 or tail.slots[sequence] < 0:
            continue
        if position >= config.sink_tokens and position < int(seq_lens[sequence]) - ring:
            continue
        row = tail_row_reference(position, config.sink_tokens, ring)
        tail.ring[tail.slots[sequence], :, row, 0] = k[token]
        tail.ring[tail.slots[sequence], :, row, 1] = v[token]


def read_pages_reference(
    cache: Tensor, pages: Tensor, config: CacheConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of a list of pages: [tokens, kv_heads, d] uint8 and [tokens, kv_heads]."""
    records = cache[pages].numpy()

    def by_token(part: np.ndarray) -> Tensor:
        """[pages, heads, page_size, ...] -> [pages * page_size, heads, ...]"""
        return torch.from_numpy(part).transpose(1, 2).flatten(0, 1)

    key_scales, value_scales = read_scales(config.record, records)
    return (
        by_token(read_keys(config.record, records)),
        by_token(read_values(config.record, records)),
        by_token(key_scales),
        by_token(value_scales),
    )


def cache_load_reference(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    config: CacheConfig,
    tables: CacheTables,
    max_seq_len: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """cache_load in plain PyTorch and numpy, with every rounding of docs/format.md."""
    shape = (seq_lens.shape[0], max_seq_len, cache.shape[1], config.head_dim)
    k, v = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    for s, length in enumerate(seq_lens.tolist()):
        pages = block_table[s, : -(-length // config.page_size)].long()
        key_codes, value_codes, key_scales, value_scales = read_pages_reference(
            cache, pages, config
        )
        k[s, :length] = dequantise_reference(
            key_codes,
            key_scales,
            tables.key_signs,
            tables.key_levels,
            config.key_bits,
            Channels.of(tables.center, 2),
            dtype,
        )[:length]
        v[s, :length] = dequantise_reference(
            value_codes,
            value_scales,
            tables.value_signs,
            tables.value_levels,
            config.value_bits,
            dtype=dtype,
        )[:length]
    return k, v
