"""One layer's cache as an object: checked when it is made, called without checking it again.

    layer = PagedLayer(pages, config, tables, ring)
    batch = AttentionBatch(slot_mapping=..., block_table=..., seq_lens=..., tail_slots=...)
    layer.store(k, v, batch)                     # [tokens, kv_heads, head_dim]
    out, lse = layer.attend(q, batch)            # [tokens, q_heads, head_dim]
    out, lse = layer.store_and_attend(q, k, v, batch)       # or both in one call

The functions cache_store, paged_attention, store_and_attend and cache_load do the same from
separate tensors and check all of them in every call. A serving loop calls them for each layer and
each step with pages, tables and tail that never change. A PagedLayer holds those, an AttentionBatch
holds what changes with a step, and an AttentionOptions holds what a model says about its attention.

Queries, keys, values and batch are checked by the op, which refuses bad ones before it writes
anything; a PagedLayer then looks for what is wrong, and raises the error of the functions.

Nothing here copies a tensor or waits for a device. Pages and tail may belong to somebody else, for
example to a serving engine that allocates the memory of all layers. A call can be captured in a
CUDA graph and be compiled with fullgraph=True.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant.batch import AttentionBatch, AttentionOptions
from torch_turboquant.config import CacheConfig
from torch_turboquant.ops import _cache_checks as checks
from torch_turboquant.ops.attention import call_attention, call_step
from torch_turboquant.ops.cache import call_load, call_store
from torch_turboquant.tables import CacheTables

_PLAIN = AttentionOptions()


class PagedLayer:
    """The packed cache of one attention layer: pages, config, tables and the memory of its tail.

    Attributes (not to be assigned to):
        pages: uint8 [num_pages, kv_heads, record_bytes].
        config: CacheConfig.
        tables: CacheTables.
        ring: the tail, [max_seqs, kv_heads, sink_tokens + ring, 2, head_dim], or None.
        kv_heads: int.
        device: torch.device.
        max_q_len: queries per sequence that the tail has rows for; None: any number, no tail.
    """

    def __init__(
        self,
        pages: Tensor,
        config: CacheConfig,
        tables: CacheTables,
        ring: Tensor | None = None,
    ) -> None:
        """Checks everything that stays.

        Args:
            pages: uint8 [num_pages, kv_heads, record_bytes], each page contiguous, for example of
                allocate_cache, or one layer's part of somebody else's memory for all layers.
            config: what the pages hold.
            tables: of make_tables, on the device of the pages.
            ring: [max_seqs, kv_heads, sink_tokens + ring, 2, head_dim] as of allocate_tail, in the
                dtype of keys, values and queries; None: everything comes from codes.

        Raises:
            TypeError: another dtype.
            ValueError: another shape, stride or device; a ring with too few rows.
        """
        _checks.check_dtype("cache", pages, (torch.uint8,))
        self.device = pages.device
        checks.check_pages(pages, self.device, config, None)
        self.kv_heads: int = pages.shape[1]
        checks.check_tables(tables, self.device, config, self.kv_heads)
        self.max_q_len: int | None = None
        if ring is not None:
            _checks.check_dtype("tail", ring, _checks.FLOATS)
            checks.check_ring(ring, self.device, ring.dtype, config, self.kv_heads)
            rows = ring.shape[2] - config.sink_tokens
            self.max_q_len = rows - config.recent_window + 1
        self.pages, self.config, self.tables, self.ring = pages, config, tables, ring

    def __repr__(self) -> str:
        tail = "no tail" if self.ring is None else f"tail {list(self.ring.shape)}"
        return f"<PagedLayer pages {list(self.pages.shape)}, {tail}, {self.device}>"

    def store(self, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        """Encodes new tokens into their slots, and copies them into the tail (cache_store).

        Args:
            k, v: [tokens, kv_heads, head_dim], one dtype of float32, float16 and bfloat16, that of
                the ring if there is one; stride 1 in the last dimension.
            batch: with slot_mapping; with a ring also seq_lens and tail_slots.

        Raises:
            TypeError: another dtype.
            ValueError: another shape, stride or device; a batch that does not fit.
            RuntimeError: values of the batch's tensors out of range (checked on the CPU, before
                anything is written).
        """
        if self.ring is not None:  # the op knows nothing of tail_valid
            checks.check_tail_slots(batch, self.ring)
        try:
            return call_store(k, v, self.pages, self.config, self.tables, self.ring, batch)
        except (RuntimeError, TypeError) as error:
            refused = error
        self._check_new(k, v, batch)
        raise refused

    def _check_new(self, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        """Says what is wrong with a call that the op refused, as an error of Python's kind."""
        _checks.check_vectors("k", k, 3)
        tokens = k.shape[0]
        checks.check_values(k, v, self.device, self.config)
        if k.shape[1] != self.kv_heads:  # the layer was checked when it was made
            _checks.check_shape("k", k, (tokens, self.kv_heads, self.config.head_dim))
        checks.check_slot_mapping(batch, self.device, tokens)
        if self.ring is not None:
            self._check_tail("k", k, batch)

    def _check_tail(self, name: str, x: Tensor, batch: AttentionBatch) -> None:
        assert self.ring is not None
        if x.dtype != self.ring.dtype:
            _checks.check_dtype(name, x, (self.ring.dtype,))
        checks.check_tail_slots(batch, self.ring)

    def attend(
        self,
        q: Tensor,
        batch: AttentionBatch,
        options: AttentionOptions | None = None,
        *,
        k_new: Tensor | None = None,
        v_new: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Causal attention of the batch's tokens (paged_attention).

        It comes after `store`, or with k_new and v_new before or after it.

        Args:
            q: [tokens, q_heads, head_dim], float32, float16 or bfloat16, the dtype of the ring if
                there is one; stride 1 in the last dimension; q_heads a multiple of kv_heads.
            batch: with block_table and seq_lens; with a ring also tail_slots.
            options: scale, window, cap and sinks of the model's attention; None: the defaults of
                AttentionOptions.
            k_new, v_new: [tokens, kv_heads, head_dim] of q's dtype, stride 1 in the last
                dimension; given together: the batch's tokens, which queries then read exactly as
                they are, and for which the ring needs no rows.
            out, lse: written instead of new tensors; contiguous, out of q's shape and dtype, lse
                float32 [tokens, q_heads] and only beside out. out may be q; otherwise neither
                shares memory with another tensor of the call.

        Returns:
            out: [tokens, q_heads, head_dim]; lse: float32 [tokens, q_heads], natural logarithm.
            Rows of padding are 0 and -inf (or the sink logit).

        Raises:
            TypeError: another dtype.
            ValueError: another shape, stride or device; a batch that does not fit; more queries
                per sequence than the tail has rows for.
            RuntimeError: values of the batch's tensors out of range (checked on the CPU).
        """
        # A default object in the signature is more than torch.compile of torch 2.11 can follow.
        options = _PLAIN if options is None else options
        new = (k_new, v_new)
        if lse is not None and out is None:
            self._check_attending(q, batch, options, new, out, lse)
        try:
            return call_attention(
                q, self.pages, self.config, self.tables, self.ring, batch, options, new, out, lse
            )
        except (RuntimeError, TypeError) as error:
            refused = error
        self._check_attending(q, batch, options, new, out, lse)
        raise refused

    def store_and_attend(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        batch: AttentionBatch,
        options: AttentionOptions | None = None,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`store` of new tokens and `attend` with them, in one call (store_and_attend).

        Args:
            q, options, out, lse: as of `attend`.
            k_new, v_new: the batch's tokens as of `store`, in q's dtype, which queries read exactly
                as they are.
            batch: what both need.

        Returns:
            out, lse: as of `attend`.

        Raises:
            TypeError, ValueError, RuntimeError: as `store` and `attend`, before anything is
                written.
        """
        options = _PLAIN if options is None else options
        new = (k_new, v_new)
        if lse is not None and out is None:
            self._check_attending(q, batch, options, new, out, lse)
        constants = self.pages, self.config, self.tables, self.ring
        try:
            return call_step(q, *constants, batch, batch.slot_mapping, options, new, out, lse)
        except (RuntimeError, TypeError) as error:
            refused = error
        self._check_attending(q, batch, options, new, out, lse)
        checks.check_slot_mapping(batch, self.device, q.shape[0])
        raise refused

    def _check_attending(
        self,
        q: Tensor,
        batch: AttentionBatch,
        options: AttentionOptions,
        new: tuple[Tensor | None, Tensor | None],
        out: Tensor | None,
        lse: Tensor | None,
    ) -> None:
        """Says what is wrong with a call that the op refused, as an error of Python's kind."""
        _checks.check_vectors("q", q, 3)
        checks.check_queries(q, self.device, self.config, self.kv_heads)
        checks.check_attention(q, batch, options, out, lse)
        checks.check_new_tokens(q, *new, self.kv_heads)
        if self.ring is not None:
            self._check_tail("q", q, batch)
            if new[0] is None and batch.max_q_len > self.max_q_len:  # type: ignore[operator]
                checks.check_ring_rows(self.ring.shape[2], self.config, batch.max_q_len)

    def load(
        self, batch: AttentionBatch, max_seq_len: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Decodes the pages of the batch's sequences (cache_load); the tail is not read.

        Args:
            batch: with block_table and seq_lens, which are at most max_seq_len.
            max_seq_len: the second dimension of the result.
            dtype: of the result: float32, float16 or bfloat16.

        Returns:
            k, v: [seqs, max_seq_len, kv_heads, head_dim]; zeros from seq_lens on.

        Raises:
            TypeError: another dtype.
            ValueError: another device; a batch without block_table and seq_lens.
            RuntimeError: values of the batch's tensors out of range (checked on the CPU).
        """
        checks.check_loading(batch, self.device, max_seq_len, dtype)
        return call_load(self.pages, self.config, self.tables, batch, max_seq_len, dtype)
