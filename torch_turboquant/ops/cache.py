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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_turboquant import _checks, format
from torch_turboquant.codebook import Codebook
from torch_turboquant.config import CacheConfig
from torch_turboquant.ops.codec import (
    SCALE_MODES,
    Channels,
    dequantise_reference,
    quantise_reference,
    scaled_center,
)
from torch_turboquant.signs import SignKind, random_signs


class CacheTables(NamedTuple):
    """The constants of one layer's cache, as tensors on its device (make_tables)."""

    key_signs: Tensor
    """float32 [head_dim] of +1 and -1."""
    value_signs: Tensor
    """float32 [head_dim] of +1 and -1."""
    key_levels: Tensor | None
    """int8 [2^key_bits], or None for the uniform grid."""
    value_levels: Tensor | None
    """int8 [2^value_bits], or None for the uniform grid."""
    key_steps: Tensor
    """float32 [S]: candidate steps, increasing."""
    value_steps: Tensor
    """float32 [S]: candidate steps, increasing."""
    center: Tensor | None
    """float32 [kv_heads, head_dim] subtracted from keys before they are encoded, or None; or
    [3, kv_heads, head_dim], which scales their channels as well (codec.scaled_center)."""


class Tail(NamedTuple):
    """The exact tail of a call's sequences (docs/format.md, section 9)."""

    ring: Tensor
    """[max_seqs, kv_heads, sink_tokens + ring, 2, head_dim], of k's dtype (allocate_tail)."""
    slots: Tensor
    """int64 [seqs]: which of the max_seqs rows each sequence owns; -1: it has none, use codes."""
    valid: Tensor | None = None
    """int32 [max_seqs, 2]: number of sink tokens held, first position in the ring; None: all."""


def make_tables(
    config: CacheConfig,
    layer: int,
    device: torch.device | str = "cpu",
    center: Tensor | None = None,
) -> CacheTables:
    """The constants of one layer: signs from (seed, layer), codebooks from the config.

    Args:
        config: the cache.
        layer: 0 and more; every layer has its own signs.
        device: of the cache.
        center: [kv_heads, head_dim], any floating dtype: the mean key of this layer, or None;
            or [3, kv_heads, head_dim] of codec.scaled_center.

    Raises:
        ValueError: a center of another shape, scales that are not positive and finite, or codebooks
            that the config's grids do not have.
    """
    d = config.head_dim
    keys = Codebook.make(d, config.key_bits, config.key_grid)
    values = Codebook.make(d, config.value_bits, config.value_grid)
    return CacheTables(
        random_signs(d, config.seed, layer, SignKind.KEYS).to(device),
        random_signs(d, config.seed, layer, SignKind.VALUES).to(device),
        keys.levels_tensor(device),
        values.levels_tensor(device),
        keys.steps_tensor(config.search, device),
        values.steps_tensor(config.search, device),
        None if center is None else make_center(center, d, device),
    )


def make_center(center: Tensor, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """A center as CacheTables holds it; see make_tables."""
    if not _checks.fits_center(center, head_dim):
        raise ValueError(
            f"center has shape {list(center.shape)}, expected [kv_heads, {head_dim}] or "
            f"[3, kv_heads, {head_dim}]"
        )
    if center.dim() == 3:
        center = scaled_center(center[0], center[1])
    return center.detach().to(device, torch.float32).contiguous()


def allocate_cache(
    config: CacheConfig, num_pages: int, num_kv_heads: int, device: torch.device | str = "cpu"
) -> Tensor:
    """An empty cache: uint8 [num_pages, num_kv_heads, record_bytes], zeros."""
    return torch.zeros(
        num_pages, num_kv_heads, config.record_bytes, dtype=torch.uint8, device=device
    )


def allocate_tail(
    config: CacheConfig,
    max_seqs: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    max_q_len: int = 1,
    device: torch.device | str = "cpu",
) -> Tensor:
    """An empty tail, the `ring` of Tail: zeros.

    The ring has recent_window + max_q_len - 1 rows, so that every query of a call of up to
    max_q_len new tokens finds its window, also after rolling back to any of them.

    Returns:
        [max_seqs, num_kv_heads, sink_tokens + ring, 2, head_dim].

    Raises:
        TypeError: a dtype other than float32, float16 and bfloat16.
        ValueError: a config without sink tokens and window, or max_q_len below 1.
    """
    _checks.check_output_dtype(dtype)
    if not config.has_tail:
        raise ValueError("a config with sink_tokens = 0 and recent_window = 0 needs no tail")
    _checks.check_positive(max_q_len=max_q_len)
    shape = tail_shape(config, max_seqs, num_kv_heads, max_q_len)
    return torch.zeros(shape, dtype=dtype, device=device)


def tail_shape(
    config: CacheConfig, max_seqs: int, num_kv_heads: int, max_q_len: int
) -> tuple[int, ...]:
    rows = config.sink_tokens + ring_rows(config, max_q_len)
    return max_seqs, num_kv_heads, rows, 2, config.head_dim


# What a ring holds of a sequence, as host integers: all positions from `first` on. tail_valid tells
# attention (docs/format.md, section 9).


def ring_rows(config: CacheConfig, max_q_len: int) -> int:
    """Rows of the ring for calls of up to max_q_len new tokens: the tail's without the sinks."""
    return max(1, config.recent_window + max_q_len - 1)


def ring_first_stored(first: int, seq_len: int, ring: int) -> int:
    """`first` once a sequence has been stored up to seq_len."""
    return max(first, seq_len - ring)


def ring_first_rolled_back(first: int, seq_len: int) -> int:
    """`first` once a sequence has been cut to seq_len: rows of later positions count no more.

    A ring that holds nothing older than the last token holds all that come from here on.
    """
    return min(first, seq_len)


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
        cache: uint8 [num_pages, kv_heads, record_bytes], contiguous; written.
        slot_mapping: int64 [tokens]: page * page_size + offset of each token; -1 skips the token.
            Two tokens of a call must not have the same slot.
        config, tables: of the cache.
        tail: written at the positions that it keeps; needs seq_lens. Two sequences of a call must
            not share a row.
        seq_lens: int32 [seqs], with the new tokens; 0 for padding.
        cu_seqlens_q: int32 [seqs + 1]; absent: one new token per sequence.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride or device; a tail without seq_lens.
        RuntimeError: values of slot_mapping, seq_lens, cu_seqlens_q or tail.slots out of range
            (checked on the CPU, before anything is written).
    """
    _checks.check_vectors("k", k, 3)
    tokens = k.shape[0]
    _check_store(k, v, cache, slot_mapping, config, tables, tail, seq_lens, cu_seqlens_q, tokens)
    store_checked(k, v, cache, slot_mapping, config, tables, tail, seq_lens, cu_seqlens_q)


def _check_store(
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    config: CacheConfig,
    tables: CacheTables,
    tail: Tail | None,
    seq_lens: Tensor | None,
    cu_seqlens_q: Tensor | None,
    tokens: int,
) -> None:
    """All but k's own dtype and number of dimensions; the second of these is kv_heads."""
    _checks.check_dtype("v", v, (k.dtype,))
    _checks.check_device("v", v, k.device)
    _checks.check_shape("v", v, tuple(k.shape))
    _checks.check_unit_stride("v", v)
    kv_heads, d = k.shape[1], k.shape[-1]
    if d != config.head_dim:
        raise ValueError(f"k has head_dim {d}, but the config has {config.head_dim}")
    check_cache(cache, k.device, config, kv_heads)
    check_tables(tables, k.device, config, kv_heads)
    _checks.check_constant("slot_mapping", slot_mapping, k.device, torch.int64, (tokens,))
    if seq_lens is not None:
        check_batch(seq_lens, cu_seqlens_q, k.device, tokens)
    if tail is not None:
        if seq_lens is None:
            raise ValueError("tail needs seq_lens")
        check_tail(tail, k.device, k.dtype, config, kv_heads, seq_lens.shape[0])


def store_checked(
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    config: CacheConfig,
    tables: CacheTables,
    tail: Tail | None,
    seq_lens: Tensor | None,
    cu_seqlens_q: Tensor | None,
) -> None:
    """cache_store of arguments that were made to fit: the op alone looks at them."""
    torch.ops.turboquant.cache_store.default(
        k,
        v,
        cache,
        slot_mapping,
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
        None if tail is None else tail.ring,
        None if tail is None else tail.slots,
        seq_lens,
        cu_seqlens_q,
        config.sink_tokens,
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
        caches: of each layer, as in cache_store; written. No two may overlap.
        slot_mapping: int64 [batch * new], for all layers.
        config: of all caches.
        tables: of each layer.
        tails: of each layer, with the same slots; empty: none.
        seq_lens, cu_seqlens_q: as in cache_store, for all layers.

    Raises:
        TypeError, ValueError, RuntimeError: as cache_store, before anything is written; lists of
            different lengths.
    """
    layers = len(k)
    for name, items, needed in (
        ("v", v, True),
        ("caches", caches, True),
        ("tables", tables, True),
        ("tails", tails, False),
    ):
        if len(items) != layers and (needed or len(items)):
            raise ValueError(f"{name} are of {len(items)} layers, k of {layers}")
    if not layers:
        return
    device = k[0].device
    for i, (key, value, cache, table) in enumerate(zip(k, v, caches, tables, strict=True)):
        _checks.check_vectors("k", key, 4)
        _checks.check_device("k", key, device)
        tail = tails[i] if tails else None
        tokens = key.shape[0] * key.shape[2]
        _check_store(
            key, value, cache, slot_mapping, config, table, tail, seq_lens, cu_seqlens_q, tokens
        )
        if (table.center is None) != (tables[0].center is None):
            raise ValueError("tables of some layers have a center and those of others have none")
        if tail is not None and tail.slots is not tails[0].slots:
            raise ValueError("tails of all layers must have the same slots")
    rings, slots = [tail.ring for tail in tails], tails[0].slots if tails else None
    store_layers_checked(
        list(k),
        list(v),
        list(caches),
        slot_mapping,
        config,
        tables,
        rings,
        slots,
        seq_lens,
        cu_seqlens_q,
    )


def store_layers_checked(
    k: list[Tensor],
    v: list[Tensor],
    caches: list[Tensor],
    slot_mapping: Tensor,
    config: CacheConfig,
    tables: Sequence[CacheTables],
    rings: list[Tensor],
    tail_slots: Tensor | None,
    seq_lens: Tensor | None,
    cu_seqlens_q: Tensor | None,
) -> None:
    """cache_store_layers of arguments that were made to fit: the op alone looks at them."""
    shared = tables[0]
    torch.ops.turboquant.cache_store_layers.default(
        k,
        v,
        caches,
        slot_mapping,
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
        tail_slots,
        seq_lens,
        cu_seqlens_q,
        config.sink_tokens,
    )


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
        cache: uint8 [num_pages, kv_heads, record_bytes], contiguous.
        block_table: int32 [seqs, max_pages]: the pages of each sequence in order; entries past
            seq_lens are not read.
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
    _checks.check_dtype("cache", cache, (torch.uint8,))
    device = cache.device
    check_cache(cache, device, config, None)
    check_tables(tables, device, config, cache.shape[1])
    _checks.check_output_dtype(dtype)
    if max_seq_len < 0:
        raise ValueError(f"max_seq_len is {max_seq_len}, supported: 0 and more")
    _checks.check_constant("seq_lens", seq_lens, device, torch.int32, (None,))
    seqs = seq_lens.shape[0]
    _checks.check_constant("block_table", block_table, device, torch.int32, (seqs, None))
    return torch.ops.turboquant.cache_load.default(
        cache,
        block_table,
        seq_lens,
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


# ---- checks shared with attention


def check_cache(
    cache: Tensor, device: torch.device, config: CacheConfig, kv_heads: int | None
) -> None:
    shape = (None, kv_heads, config.record_bytes)
    _checks.check_constant("cache", cache, device, torch.uint8, shape)


def check_tables(
    tables: CacheTables, device: torch.device, config: CacheConfig, kv_heads: int
) -> None:
    d = config.head_dim
    _checks.check_constant("key_signs", tables.key_signs, device, torch.float32, (d,))
    _checks.check_constant("value_signs", tables.value_signs, device, torch.float32, (d,))
    for kind, bits, grid, levels, steps in (
        ("key", config.key_bits, config.key_grid, tables.key_levels, tables.key_steps),
        ("value", config.value_bits, config.value_grid, tables.value_levels, tables.value_steps),
    ):
        if (levels is None) != (grid == "uniform"):
            raise ValueError(f"{kind}_levels do not fit the config's {kind}_grid {grid!r}")
        _checks.check_levels(levels, device, bits, f"{kind}_levels")
        _checks.check_steps(steps, device, f"{kind}_steps")
    _checks.check_center(tables.center, device, (kv_heads, d))


def check_batch(
    seq_lens: Tensor, cu_seqlens_q: Tensor | None, device: torch.device, tokens: int
) -> None:
    _checks.check_constant("seq_lens", seq_lens, device, torch.int32, (None,))
    seqs = seq_lens.shape[0]
    if cu_seqlens_q is not None:
        _checks.check_constant("cu_seqlens_q", cu_seqlens_q, device, torch.int32, (seqs + 1,))
    elif seqs != tokens:
        raise ValueError(
            "without cu_seqlens_q every sequence has one new token, but there are "
            f"{seqs} sequences and {tokens} tokens"
        )


def check_tail(
    tail: Tail,
    device: torch.device,
    dtype: torch.dtype,
    config: CacheConfig,
    kv_heads: int,
    seqs: int,
    max_q_len: int = 1,
) -> None:
    """Window and sinks are the config's; a call of max_q_len queries needs that many more rows."""
    ring, slots, valid = tail
    _checks.check_constant("tail", ring, device, dtype, (None, kv_heads, None, 2, config.head_dim))
    rows, need = ring.shape[2], config.sink_tokens + ring_rows(config, max_q_len)
    if rows < need:
        raise ValueError(
            f"tail has {rows} rows, expected at least {need}: sink_tokens ({config.sink_tokens}) + "
            f"recent_window ({config.recent_window}) + max_q_len ({max_q_len}) - 1"
        )
    _checks.check_constant("tail_slots", slots, device, torch.int64, (seqs,))
    if valid is not None:
        _checks.check_constant("tail_valid", valid, device, torch.int32, (ring.shape[0], 2))


# ---- fakes


@torch.library.register_fake("turboquant::cache_store")
def _cache_store_fake(k: Tensor, *others: Any) -> None:
    return None


@torch.library.register_fake("turboquant::cache_store_layers")
def _cache_store_layers_fake(k: list[Tensor], *others: Any) -> None:
    return None


@torch.library.register_fake("turboquant::cache_load")
def _cache_load_fake(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    key_signs: Tensor,
    value_signs: Tensor,
    key_levels: Tensor | None,
    value_levels: Tensor | None,
    center: Tensor | None,
    head_dim: int,
    page_size: int,
    key_bits: int,
    value_bits: int,
    max_seq_len: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    shape = (seq_lens.shape[0], max_seq_len, cache.shape[1], head_dim)
    return cache.new_empty(shape, dtype=dtype), cache.new_empty(shape, dtype=dtype)


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
            format.write_token(
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

    key_scales, value_scales = format.read_scales(config.record, records)
    return (
        by_token(format.read_keys(config.record, records)),
        by_token(format.read_values(config.record, records)),
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
