"""Checks that the functions on a packed cache share; each looks at one part of a call.

The parts are what a layer keeps (pages, tables, the tail's memory), which PagedLayer checks once,
and what a call brings (keys, values, queries, the batch). `device` is that of the first tensor.
Fakes put the arguments of a raw op together to what the functions take, and check that.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torch_turboquant import _autograd, _checks
from torch_turboquant.batch import AttentionBatch, AttentionOptions
from torch_turboquant.config import CacheConfig, PackedConfig
from torch_turboquant.ops.codec import SCALE_MODES
from torch_turboquant.tables import CacheTables
from torch_turboquant.tail import Tail, tail_rows

# ---- the arguments of raw ops


def raw_arguments(op: str, given: tuple[Any, ...], named: dict[str, Any]) -> SimpleNamespace:
    """What a raw op was called with, defaults included, by the names of its schema.

    Raises RuntimeError if tensors of an op that has no kernel at the Autograd key are
    differentiated.
    """
    schema = getattr(torch.ops.turboquant, op).default._schema.arguments
    values = {x.name: x.default_value for x in schema if x.has_default_value()}
    values.update(zip((x.name for x in schema), given, strict=False))
    values.update(named)
    if op in _autograd.OPS_OF_A_STEP:
        tensors = (x for x in tree_leaves(list(values.values())) if isinstance(x, Tensor))
        _autograd.refuse(op, tuple(tensors))
    return SimpleNamespace(**values)


def raw_config(a: SimpleNamespace, head_dim: int, **others: Any) -> CacheConfig:
    """A config of the numbers of a raw op, with the grids of its levels; others: of its fields."""

    def grid(bits: int, levels: Tensor | None) -> str:
        return "uniform" if levels is None or bits == 8 else "lloyd"

    return CacheConfig(
        head_dim=head_dim,
        key_bits=a.key_bits,
        value_bits=a.value_bits,
        key_grid=grid(a.key_bits, a.key_levels),
        value_grid=grid(a.value_bits, a.value_levels),
        page_size=a.page_size,
        **others,
    )


def raw_scale_modes(a: SimpleNamespace) -> dict[str, str]:
    """The names of the scale modes of a raw op that stores."""
    return {
        name: _checks.check_scale_number(getattr(a, name), SCALE_MODES, name)
        for name in ("key_scale_mode", "value_scale_mode")
    }


def raw_tables(a: SimpleNamespace, **of_layer: Tensor | None) -> CacheTables:
    """The constants of a raw op; of_layer: those that every layer has for itself."""
    given = {**vars(a), **of_layer}
    return CacheTables(**{name: given.get(name) for name in CacheTables._fields})  # type: ignore[arg-type]


# ---- what a layer keeps


def check_pages(
    cache: Tensor, device: torch.device, config: CacheConfig, kv_heads: int | None
) -> None:
    """uint8 [num_pages, kv_heads, record_bytes], pages contiguous."""
    _checks.check_kind("config", config, CacheConfig)
    shape = (None, kv_heads, config.record_bytes)
    _checks.check_entries("cache", cache, device, torch.uint8, shape)


def check_tables(
    tables: CacheTables,
    device: torch.device,
    config: CacheConfig,
    kv_heads: int,
    steps_too: bool = True,
) -> None:
    """Constants that make_tables could have made for this config; ops that read have no steps."""
    _checks.check_kind("tables", tables, CacheTables)
    d = config.head_dim
    _checks.check_constant("key_signs", tables.key_signs, device, torch.float32, (d,))
    _checks.check_constant("value_signs", tables.value_signs, device, torch.float32, (d,))
    for kind, bits, grid, levels, steps in (
        ("key", config.key_bits, config.key_grid, tables.key_levels, tables.key_steps),
        ("value", config.value_bits, config.value_grid, tables.value_levels, tables.value_steps),
    ):
        _checks.check_levels(levels, device, bits, f"{kind}_levels")
        if (levels is None) != (grid == "uniform"):
            raise ValueError(f"{kind}_levels do not fit the config's {kind}_grid {grid!r}")
        if steps_too:
            _checks.check_steps(steps, device, f"{kind}_steps")
    _checks.check_center(tables.center, device, (kv_heads, d))


def parts_of_tail(tail: Tail | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Its ring, slots and valid, None where there is no tail."""
    if tail is None:
        return None, None, None
    _checks.check_kind("tail", tail, Tail)
    if tail.ring is None:
        raise TypeError("tail has no ring: give None for a call without a tail")
    return tail.ring, tail.slots, tail.valid


def check_ring(
    ring: Tensor,
    device: torch.device,
    dtype: torch.dtype,
    config: CacheConfig,
    kv_heads: int,
    max_q_len: int = 1,
    beside_new: bool = False,
) -> None:
    """[max_seqs, kv_heads, rows, 2, head_dim], with enough rows."""
    shape = (None, kv_heads, None, 2, config.head_dim)
    _checks.check_entries("tail", ring, device, dtype, shape)
    if beside_new:
        check_ring_rows_beside_new(ring.shape[2], config)
    else:
        check_ring_rows(ring.shape[2], config, max_q_len)


def check_ring_rows_beside_new(rows: int, config: PackedConfig, new: str = "k_new") -> None:
    """Beside the argument `new`, a query reads its window from the ring, but not itself."""
    need = max(1, config.sink_tokens + max(0, config.recent_window - 1))
    if rows < need:
        raise ValueError(
            f"tail has {rows} rows, expected at least {need} beside {new}: sink_tokens "
            f"({config.sink_tokens}) + recent_window ({config.recent_window}) - 1"
        )


def check_ring_rows(rows: int, config: PackedConfig, max_q_len: int) -> None:
    """Window and sinks are the config's; a call of max_q_len queries needs that many more rows.

    Without a window, sinks need no ring beside them.
    """
    need = max(1, config.sink_tokens)
    if config.recent_window:
        need = tail_rows(config, max_q_len)
    if rows < need:
        raise ValueError(
            f"tail has {rows} rows, expected at least {need}: sink_tokens ({config.sink_tokens}) + "
            f"recent_window ({config.recent_window}) + max_q_len ({max_q_len}) - 1"
        )


def check_same_centers(tables: CacheTables, first: CacheTables) -> None:
    """Layers of one call have a center all, or none of them."""
    if (tables.center is None) != (first.center is None):
        raise ValueError("tables of some layers have a center and those of others have none")


# ---- what a call brings


def check_values(k: Tensor, v: Tensor, device: torch.device, config: CacheConfig) -> None:
    """Keys and values that belong together; k's dtype and number of dimensions are known."""
    _checks.check_kind("config", config, CacheConfig)
    if not isinstance(v, Tensor) or v.dtype != k.dtype:
        _checks.check_dtype("v", v, (k.dtype,))
    if k.device != device or v.device != device:
        _checks.check_device("k", k, device)
        _checks.check_device("v", v, device)
    if v.shape != k.shape:
        _checks.check_shape("v", v, tuple(k.shape))
    _checks.check_unit_stride("v", v)
    if k.shape[-1] != config.head_dim:
        raise ValueError(f"k has head_dim {k.shape[-1]}, but the config has {config.head_dim}")


def check_slot_mapping(batch: AttentionBatch, device: torch.device, tokens: int) -> None:
    """A slot for each of the call's tokens, and sequences that can have so many."""
    _checks.check_slots("slot_mapping", batch.slot_mapping, device, tokens)
    if batch.seq_lens is not None:
        check_sequences(batch, device, tokens)


def check_sequences(batch: AttentionBatch, device: torch.device, tokens: int) -> None:
    """The batch is where the layer is, and has this many tokens if that can be told."""
    seq_lens = batch.seq_lens
    if seq_lens is None:
        raise _checks.not_a_tensor("seq_lens", seq_lens)
    if seq_lens.device != device:
        _checks.check_device("seq_lens", seq_lens, device)
    if batch.cu_seqlens_q is None and seq_lens.shape[0] != tokens:
        raise ValueError(
            "without cu_seqlens_q every sequence has one new token, but there are "
            f"{seq_lens.shape[0]} sequences and {tokens} tokens"
        )


def check_tail_slots(batch: AttentionBatch, ring: Tensor) -> None:
    """The batch names entries of a tail, and knows how many there are."""
    if batch.tail_slots is None:
        if batch.seq_lens is None:
            raise ValueError("tail needs seq_lens")
        raise ValueError("the layer has a tail, but the batch has no tail_slots")
    if batch.tail_valid is not None and batch.tail_valid.shape[0] != ring.shape[0]:
        _checks.check_shape("tail_valid", batch.tail_valid, (ring.shape[0], 2))


def check_queries(q: Tensor, device: torch.device, config: CacheConfig, kv_heads: int) -> None:
    """[tokens, q_heads, head_dim] with query heads for every KV head; q is a vector already."""
    _, q_heads, d = q.shape
    if d != config.head_dim:
        raise ValueError(f"q has head_dim {d}, but the config has {config.head_dim}")
    if q.device != device:
        _checks.check_device("q", q, device)
    if kv_heads == 0 or q_heads % kv_heads:
        raise ValueError(f"q has {q_heads} heads, expected a multiple of the cache's {kv_heads}")


def check_attention(
    q: Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
    out: Tensor | None,
    lse: Tensor | None,
) -> None:
    """What attention asks of a call beyond queries that fit the layer."""
    tokens, q_heads, _ = q.shape
    device = q.device
    check_sequences(batch, device, tokens)
    if batch.block_table is None:
        _checks.check_dtype("block_table", batch.block_table, (torch.int32,))
    if options.sink_logits is not None:
        logits = options.sink_logits
        _checks.check_constant("sink_logits", logits, device, torch.float32, (q_heads,))
    if out is not None:
        _checks.check_constant("out", out, device, q.dtype, tuple(q.shape))
        if lse is not None:
            _checks.check_constant("lse", lse, device, torch.float32, (tokens, q_heads))
    elif lse is not None:
        raise ValueError("lse is given without out")


def check_new_tokens(q: Tensor, k_new: Tensor | None, v_new: Tensor | None, kv_heads: int) -> None:
    """The keys and values of q's own tokens: [tokens, kv_heads, head_dim] of its dtype."""
    if (k_new is None) != (v_new is None):
        raise ValueError("k_new and v_new come together or not at all")
    for name, t in (("k_new", k_new), ("v_new", v_new)):
        if t is None:
            return
        _checks.check_dtype(name, t, (q.dtype,))
        _checks.check_device(name, t, q.device)
        _checks.check_shape(name, t, (q.shape[0], kv_heads, q.shape[2]))
        _checks.check_unit_stride(name, t)


def check_loading(
    batch: AttentionBatch, device: torch.device, max_seq_len: int, dtype: torch.dtype
) -> None:
    """What cache_load asks of a call."""
    _checks.check_output_dtype(dtype)
    if max_seq_len < 0:
        raise ValueError(f"max_seq_len is {max_seq_len}, supported: 0 and more")
    for name, tensor in (("seq_lens", batch.seq_lens), ("block_table", batch.block_table)):
        _checks.check_dtype(name, tensor, (torch.int32,))
        _checks.check_device(name, tensor, device)
