"""A packed KV cache for Hugging Face transformers.

    cache = TurboQuantCache.for_model(model, preset="k5v4u")
    model.generate(**inputs, past_key_values=cache)

The idea. transformers asks a cache for keys and values and then calls an attention function with
them. Handing back decoded keys would rebuild in every step the tensor that the cache exists to
avoid, so this module replaces both halves: `update` writes new tokens into packed pages, and an
attention function registered with transformers reads the pages themselves.

1. The first forward (the prompt) attends exactly, with the attention that the model had before;
   its keys and values are also encoded into pages.
2. Every later forward (one new token, a draft, the next turn of a chat) attends through
   `paged_attention`: codes, plus the exact tail (first and last tokens) of the configuration.
   A long continuation goes piece by piece, so that its result does not depend on how it is cut.

Attaching. A cache attaches itself to its model: the text configuration's attention implementation
becomes "turboquant_<previous>", and two hooks on the decoder tell which cache a forward runs on. In
a forward with any other cache, or none, this implementation *is* the previous one. `detach()`, the
end of a `with` block or the end of the cache's life restore the model.

Center. Keys are stored relative to one constant vector per layer and KV head, which softmax cannot
see. center="auto" learns it from the first CENTER_TOKENS tokens or more (mean key after the sink
tokens, padding excluded). Until that many have been seen, the layers hold them as they are and
attend exactly; then everything is encoded at once. A learned center stays until `reset()`.

Memory. Without `max_cache_len` pages are added as sequences grow (half as much again each time, so
a growth step briefly holds two copies of one layer). With it, pages for `max_batch_size` sequences
of that length are allocated at the first forward and never move. Sliding-window layers keep the
pages of their whole sequence.
"""

from __future__ import annotations

import inspect
import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.masking_utils import causal_mask_function

from torch_turboquant.attention import paged_attention
from torch_turboquant.cache import (
    CacheTables,
    Tail,
    allocate_cache,
    allocate_tail,
    cache_store,
    make_tables,
)
from torch_turboquant.config import CacheConfig
from torch_turboquant.config import preset as preset_config

__all__ = ["CENTER_TOKENS", "TurboQuantCache", "TurboQuantLayer", "load_centers", "save_centers"]

CENTER_TOKENS = 64
_PREFIX = "turboquant_"
_FIRST_PAGES = 256  # tokens per sequence that the first allocation of a growing cache holds
Centers = Sequence[Tensor] | Mapping[int, Tensor]

# ------------------------------------------------------------------ which sequences, how long


class _Piece(NamedTuple):
    """Up to max_q_len columns of a batch, as the ops want them; tensors on one device."""

    first: int  # columns [first, last) of the batch
    last: int
    real: Tensor | None  # int64: which of the batch * columns tokens are no padding; None: all
    slot_mapping: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    max_q_len: int
    block_table: Tensor
    tail_slots: Tensor
    tail_valid: Tensor


class _Forward:
    """What one forward call does, worked out once and used by all layers."""

    def __init__(self, sequences: _Sequences, batch: int, new: int, pads: list[int]) -> None:
        self.batch, self.past, self.new, self.pads = batch, sequences.columns, new, pads
        self.total = self.past + new
        self.pages, self.page_size = sequences.pages, sequences.config.page_size
        self.rows, self.sink_tokens = sequences.rows, sequences.config.sink_tokens
        self.ring_first, self.ring_tokens = list(sequences.ring_first), sequences.ring_tokens
        after_sinks = sum(max(0, length - self.sink_tokens) for length in self.lengths(self.total))
        # exact: attend with the model's own attention; encode: write pages in this forward
        self.exact = self.past == 0 or not sequences.encoded
        self.encode = sequences.center_known or sequences.encoded or after_sinks >= CENTER_TOKENS
        if self.exact:
            self.pieces = [(0, self.total)] if self.encode else []
        else:
            # the ring holds what max_q_len new queries may read exactly, so no piece is longer
            step = sequences.max_q_len if sequences.has_tail else new
            self.pieces = [
                (c, min(c + step, self.total)) for c in range(self.past, self.total, step)
            ]
        self._built: dict[tuple[int, torch.device], _Piece] = {}

    def lengths(self, column: int) -> list[int]:
        """Tokens of every sequence among the columns before `column`."""
        return [max(0, column - pad) for pad in self.pads]

    def piece(self, index: int, device: torch.device) -> _Piece:
        """The index-th piece of `pieces` on `device`."""
        if (index, device) not in self._built:
            self._built[index, device] = self._build(*self.pieces[index], device)
        return self._built[index, device]

    def _build(self, first: int, last: int, device: torch.device) -> _Piece:
        lengths = self.lengths(last)
        position = torch.arange(first, last) - torch.tensor(self.pads)[:, None]
        # pages of a row are contiguous: page id = row * pages + position // page_size
        slots = torch.arange(self.batch)[:, None] * (self.pages * self.page_size) + position
        real, cu_seqlens_q = None, None
        if max(self.pads) > first:
            real = (position >= 0).flatten().nonzero()[:, 0]
            slots = slots.flatten()[real]
            counts = [min(last - first, length) for length in lengths]
            cu_seqlens_q = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
        elif last - first > 1:
            cu_seqlens_q = torch.arange(self.batch + 1, dtype=torch.int32) * (last - first)
        valid = torch.zeros(self.rows, 2, dtype=torch.int32)
        for row, (length, kept) in enumerate(zip(lengths, self.ring_first, strict=False)):
            valid[row, 0] = min(length, self.sink_tokens)
            valid[row, 1] = max(kept, length - self.ring_tokens)
        table = torch.arange(self.batch * self.pages, dtype=torch.int32)

        def put(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.to(device)

        return _Piece(
            first,
            last,
            put(real),
            put(slots.flatten()),
            put(torch.tensor(lengths, dtype=torch.int32)),
            put(cu_seqlens_q),
            last - first,
            put(table.view(self.batch, self.pages)),
            put(torch.arange(self.batch)),
            put(valid),
        )


class _Sequences:
    """Lengths, left padding and page counts of the batch: host integers shared by all layers.

    Counts move only when a forward has succeeded, so one that fails leaves the cache as it was.
    """

    def __init__(
        self, config: CacheConfig, rows: int, max_len: int | None, max_q_len: int, auto: bool
    ) -> None:
        self.config, self.rows, self.max_len, self.max_q_len = config, rows, max_len, max_q_len
        self.has_tail = config.sink_tokens + config.recent_window > 0
        self.ring_tokens = max(1, config.recent_window + max_q_len - 1)
        self.auto_center = auto
        self.pages = math.ceil(max_len / config.page_size) if max_len else 0
        self.forward: _Forward | None = None
        self.reset()

    def reset(self) -> None:
        self.batch = 0
        self.columns = 0
        self.pads: list[int] = []
        self.ring_first = [0] * self.rows  # first position that each row of the tail still holds
        self.encoded = False
        self.center_known = not self.auto_center
        self.forward = None

    def lengths(self) -> list[int]:
        return [max(0, self.columns - pad) for pad in self.pads]

    def begin(self, batch: int, new: int, attention_mask: Any) -> None:
        """Plans a forward of `new` columns, or raises before anything has been written."""
        self.forward = None
        if self.columns and batch != self.batch:
            raise ValueError(
                f"this cache holds {self.batch} sequences, the forward has a batch of {batch}; "
                "use reset() or another cache"
            )
        if not 1 <= batch <= self.rows:
            raise ValueError(
                f"batch of {batch} (beams included), but the cache was made for "
                f"max_batch_size={self.rows} sequences"
            )
        pads = self._left_padding(batch, new, attention_mask)
        longest = self.columns + new - min(pads)
        if self.max_len and longest > self.max_len:
            raise ValueError(f"{longest} tokens do not fit into max_cache_len={self.max_len}")
        needed = math.ceil(longest / self.config.page_size)
        if needed > self.pages:
            first = math.ceil(_FIRST_PAGES / self.config.page_size)
            self.pages = max(needed, self.pages * 3 // 2, first)
        self.forward = _Forward(self, batch, new, pads)
        if self.forward.encode:
            # before the forward, not after: a failed one has overwritten its part of the ring too
            for row, length in enumerate(self.forward.lengths(self.forward.total)):
                kept = self.ring_first[row]
                self.ring_first[row] = max(kept, length - self.ring_tokens)

    def commit(self) -> None:
        """The planned forward has gone through all layers."""
        done, self.forward = self.forward, None
        self.batch, self.columns, self.pads = done.batch, done.total, done.pads
        self.encoded = self.encoded or done.encode
        self.center_known = self.center_known or done.encode

    def crop(self, tokens: int) -> None:
        self.columns = max(0, self.columns - tokens)
        # a ring that holds nothing older than the cut holds everything from there on
        for row, length in enumerate(self.lengths()):
            self.ring_first[row] = min(self.ring_first[row], length)
        if self.columns == 0:
            self.batch, self.pads, self.ring_first = 0, [], [0] * self.rows

    def select(self, rows: list[int]) -> None:
        self.batch = len(rows)
        self.pads = [self.pads[r] for r in rows]
        kept = [self.ring_first[r] for r in rows]
        self.ring_first = kept + [0] * (self.rows - len(kept))

    def _left_padding(self, batch: int, new: int, mask: Any) -> list[int]:
        """Padding tokens in front of every sequence; refuses every other kind of mask."""
        total = self.columns + new
        if mask is None:
            if any(self.pads):
                raise ValueError(
                    "the sequences in this cache are left-padded: every forward needs their "
                    "attention_mask"
                )
            return [0] * batch
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                "TurboQuantCache supports causal attention with left padding, given as a 2D "
                f"attention_mask [batch, tokens so far]; got {shape}"
            )
        if tuple(mask.shape) != (batch, total):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}, expected {(batch, total)}: "
                f"{self.columns} columns in the cache and {new} new ones"
            )
        mask = mask.bool()
        pads = (mask.cumsum(1) == 0).sum(1)
        if not torch.equal(mask.sum(1) + pads, torch.full_like(pads, total)):
            raise ValueError(
                "only left padding is supported, but a row of attention_mask has a 0 after a 1"
            )
        pads = pads.tolist()
        for row, (old, now) in enumerate(zip(self.pads, pads, strict=False)):
            if old != now and (old < self.columns or now < self.columns):
                raise ValueError(
                    f"attention_mask says {now} padding tokens for sequence {row}, the cache was "
                    f"filled with {old}"
                )
        return pads


# ------------------------------------------------------------------------------------ layers


class TurboQuantLayer(CacheLayerMixin):
    """Packed keys and values of one attention layer; made by TurboQuantCache.

    Tensors: `pages` uint8 [max_batch_size * pages per sequence, kv_heads, record_bytes], `ring`
    (the exact tail) [max_batch_size, kv_heads, ring tokens, 2, head_dim] in the model's dtype,
    `tables` the constants of the codec. Until a center could be learned, `waiting` holds the first
    few keys and values as they came.
    """

    is_compileable = False
    is_croppable = True

    def __init__(
        self,
        index: int,
        config: CacheConfig,
        sequences: _Sequences,
        center: Tensor | None,
        sliding_window: int,
        cache_device: str | torch.device,
    ) -> None:
        super().__init__()
        self.index, self.config, self.sequences = index, config, sequences
        self.center, self.sliding_window = center, sliding_window
        self.is_sliding = sliding_window > 0
        self.cache_device = cache_device
        self.pages: Tensor | None = None
        self.ring: Tensor | None = None
        self.tables: CacheTables | None = None
        self.waiting: tuple[Tensor, Tensor] | None = None
        self._handed: tuple[Tensor, Tensor] | None = None

    # -- storing

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        _, self.kv_heads, _, head_dim = key_states.shape
        if head_dim != self.config.head_dim or value_states.shape != key_states.shape:
            raise ValueError(
                f"layer {self.index} has keys {list(key_states.shape)} and values "
                f"{list(value_states.shape)} [batch, heads, tokens, dim]; this cache supports "
                f"equal shapes with head_dim {self.config.head_dim} (no latent attention)"
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.store_device = _storage_device(self.cache_device, self.device)
        if self.center is not None and self.center.shape != (self.kv_heads, head_dim):
            raise ValueError(
                f"center of layer {self.index} has shape {list(self.center.shape)}, expected "
                f"[kv_heads, head_dim] = [{self.kv_heads}, {head_dim}]"
            )
        if self.sequences.has_tail:
            self.ring = allocate_tail(
                self.config,
                self.sequences.rows,
                self.kv_heads,
                self.dtype,
                max_q_len=self.sequences.max_q_len,
                device=self.store_device,
            )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores new tokens: [batch, kv_heads, new, head_dim] each.

        Returns what the attention function of this module expects: the new keys and values, which
        it recognises, not the whole sequence.
        """
        forward = self.sequences.forward
        if forward is None:
            raise RuntimeError(
                "TurboQuantCache.update was called outside a forward of the model that the cache "
                "is attached to (a detached cache can be attached again: cache.attach(model))"
            )
        if key_states.requires_grad or value_states.requires_grad:
            raise RuntimeError(
                "TurboQuantCache takes no gradient: run the model under torch.no_grad()"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if forward.exact and forward.past > 0:
            held = [w[:, :, : forward.past] for w in self.waiting]
            key_states = torch.cat([held[0], key_states], dim=2)
            value_states = torch.cat([held[1], value_states], dim=2)
        if forward.exact and not forward.encode:
            self.waiting = (key_states, value_states)
        else:
            self._make_tables(key_states, forward)
            self._reserve(forward.pages)
            self._store(forward.piece(0, self.store_device), key_states, value_states, forward)
        self._handed = (key_states, value_states)
        return self._handed

    def _make_tables(self, keys: Tensor, forward: _Forward) -> None:
        """The constants of the codec, with the center of these keys where none is given."""
        if self.tables is not None and self.sequences.center_known:
            return
        center = self.center
        if self.sequences.auto_center:
            center = _mean_key(keys, forward)
        center = None if center is None else center.to(self.store_device, torch.float32)
        self.tables = make_tables(self.config, self.index, self.store_device, center)

    def _reserve(self, pages: int) -> None:
        """Makes room for `pages` pages per sequence; what is stored keeps its place in its row."""
        rows = self.sequences.rows
        have = 0 if self.pages is None else self.pages.shape[0] // rows
        if have >= pages:
            return
        grown = allocate_cache(self.config, rows * pages, self.kv_heads, self.store_device)
        if have:
            grown.unflatten(0, (rows, pages))[:, :have] = self.pages.unflatten(0, (rows, have))
        self.pages = grown

    def _store(self, piece: _Piece, keys: Tensor, values: Tensor, forward: _Forward) -> None:
        """Encodes the piece's columns of keys and values [batch, kv_heads, columns, head_dim]."""
        start = forward.total - keys.shape[2]  # the column that keys begin with
        chosen = slice(piece.first - start, piece.last - start)
        cache_store(
            _tokens(keys[:, :, chosen].to(self.store_device), piece),
            _tokens(values[:, :, chosen].to(self.store_device), piece),
            self.pages,
            piece.slot_mapping,
            self.config,
            self.tables,
            tail=self._tail(piece),
            seq_lens=piece.seq_lens,
            cu_seqlens_q=piece.cu_seqlens_q,
        )

    def _tail(self, piece: _Piece) -> Tail | None:
        return None if self.ring is None else Tail(self.ring, piece.tail_slots, piece.tail_valid)

    # -- attending

    def attend(
        self,
        original: Callable,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of query [batch, heads, new, head_dim] over the cache, after `update`."""
        forward = self.sequences.forward
        handed, self._handed = self._handed, None
        if handed is None or key is not handed[0] or value is not handed[1]:
            raise RuntimeError(
                f"{type(module).__name__} changes keys or values between the cache's update and "
                "attention (or shares them between layers), which TurboQuantCache does not support"
            )
        if forward.exact:
            return original(module, query, key, value, attention_mask, **kwargs)
        options = self._options(module, query, kwargs)
        outputs = []
        for index in range(len(forward.pieces)):
            piece = forward.piece(index, self.store_device)
            if index > 0:  # update has stored the first one
                self._store(piece, key, value, forward)
            columns = slice(piece.first - forward.past, piece.last - forward.past)
            q = _tokens(query[:, :, columns].to(self.store_device), piece)
            out, _ = paged_attention(
                q,
                self.pages,
                piece.block_table,
                piece.seq_lens,
                self.config,
                self.tables,
                cu_seqlens_q=piece.cu_seqlens_q,
                max_q_len=piece.max_q_len,
                tail=self._tail(piece),
                **options,
            )
            outputs.append(_columns(out, piece, forward.batch))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return out.to(query.device), None

    def _options(self, module: nn.Module, query: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The attention function's keyword arguments as paged_attention's; refuses the others."""
        refused = [
            name
            for name, value in kwargs.items()
            if name not in _KNOWN_KWARGS and isinstance(value, Tensor)
        ]
        if kwargs.get("dropout"):
            refused.append("dropout")
        if kwargs.get("output_attentions"):
            refused.append("output_attentions")
        causal = kwargs.get("is_causal")
        if (getattr(module, "is_causal", True) if causal is None else causal) is False:
            refused.append("is_causal=False")
        if refused:
            raise ValueError(
                f"{type(module).__name__} asks for {', '.join(refused)}, which TurboQuantCache "
                "does not support; it supports scaling, softcap, sliding_window and s_aux (sinks)"
            )
        window = kwargs.get("sliding_window") or 0
        if window and self.sliding_window and window != self.sliding_window:
            raise ValueError(
                f"layer {self.index} attends with sliding_window={window}, its configuration says "
                f"{self.sliding_window}"
            )
        sinks = kwargs.get("s_aux")
        scaling = kwargs.get("scaling")
        return {
            "softmax_scale": query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            "sliding_window": window or self.sliding_window,
            "soft_cap": float(kwargs.get("softcap") or 0.0),
            "sink_logits": None if sinks is None else sinks.to(self.store_device, torch.float32),
        }

    # -- what transformers asks

    def get_seq_length(self) -> int:
        return self.sequences.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.sequences.columns + query_length, 0

    def get_max_length(self) -> int:
        return self.sequences.max_len or -1

    def get_max_cache_shape(self) -> int:
        return self.get_max_length()

    def reset(self) -> None:
        """Forgets the tokens and a learned center; keeps the memory."""
        self.waiting = self._handed = None
        if self.sequences.auto_center:
            self.tables = None

    def select_rows(self, rows: Tensor) -> None:
        """Sequence i becomes the former sequence rows[i]: int64 [new batch] on the CPU."""
        if self.waiting is not None:
            self.waiting = tuple(w.index_select(0, rows.to(w.device)) for w in self.waiting)
        for tensor in (self.pages, self.ring):
            if tensor is not None:
                by_row = tensor.unflatten(0, (self.sequences.rows, -1))
                by_row[: len(rows)] = by_row.index_select(0, rows.to(tensor.device))

    def finish(self) -> None:
        """After a forward: lets go of what only it needed."""
        self._handed = None
        if self.sequences.encoded:
            self.waiting = None


_KNOWN_KWARGS = frozenset(
    # read here, or of no consequence to attention once keys carry their positions
    "scaling softcap sliding_window s_aux position_ids cache_position token_type_ids input_ids "
    "position_embeddings logits_to_keep num_items_in_batch labels".split()
)


def _tokens(x: Tensor, piece: _Piece) -> Tensor:
    """[batch, heads, columns, dim] -> [tokens, heads, dim] without padding."""
    x = x.transpose(1, 2).flatten(0, 1)
    return x if piece.real is None else x.index_select(0, piece.real)


def _columns(x: Tensor, piece: _Piece, batch: int) -> Tensor:
    """[tokens, heads, dim] -> [batch, columns, heads, dim], zeros where there is padding."""
    if piece.real is not None:
        x = x.new_zeros(batch * piece.max_q_len, *x.shape[1:]).index_copy_(0, piece.real, x)
    return x.unflatten(0, (batch, piece.max_q_len))


def _mean_key(keys: Tensor, forward: _Forward) -> Tensor:
    """Mean over the tokens of all sequences after their sinks: [b, h, n, d] -> float32 [h, d].

    Sink tokens are left out because their keys are outliers, and read exactly in any case.
    """
    position = torch.arange(keys.shape[2]) - torch.tensor(forward.pads)[:, None]
    chosen = (position >= forward.sink_tokens).to(keys.device, torch.float32)
    total = torch.einsum("bhnd,bn->hd", keys.float(), chosen)
    return total / chosen.sum()


def _storage_device(requested: str | torch.device, model_device: torch.device) -> torch.device:
    if requested != "auto":
        return torch.device(requested)
    return model_device if _has_kernels(model_device) else torch.device("cpu")


def _has_kernels(device: torch.device) -> bool:
    """Whether the ops of the cache are implemented for this kind of device."""
    key = device.type.upper()
    return key == "CPU" or all(
        torch._C._dispatch_has_kernel_for_dispatch_key(f"turboquant::{op}", key)
        for op in ("cache_store", "paged_attention")
    )


# -------------------------------------------------------------------------------------- cache


class TurboQuantCache(Cache):
    """Packed KV cache of a model; see the module's text for how it works.

    Make one with `for_model`, pass it as `past_key_values` to `generate` or to the model, and
    `detach` it (or use it in a `with` statement) when the model should be as before. Several caches
    may be attached to one model at a time. One forward at a time per model.
    """

    def __init__(
        self,
        model: nn.Module,
        config: CacheConfig,
        *,
        max_batch_size: int = 1,
        max_cache_len: int | None = None,
        max_q_len: int = 32,
        center: str | Centers | None = "auto",
        cache_device: str | torch.device = "auto",
    ) -> None:
        """See `for_model`."""
        if max_batch_size < 1 or max_q_len < 1 or (max_cache_len is not None and max_cache_len < 1):
            raise ValueError("max_batch_size, max_q_len and max_cache_len must be positive")
        windows = _layer_windows(model)
        auto = isinstance(center, str) and center == "auto"
        if isinstance(center, str) and not auto:
            center = load_centers(center)
        if center is not None and not auto:
            have = sorted(center) if isinstance(center, Mapping) else list(range(len(center)))
            if have != list(range(len(windows))):
                raise ValueError(
                    f"center needs one tensor for each of {len(windows)} layers, got {have}"
                )
        self.config = config
        self.center = center
        self._sequences = _Sequences(config, max_batch_size, max_cache_len, max_q_len, auto)
        layers = [
            TurboQuantLayer(
                index,
                config,
                self._sequences,
                None if auto or center is None else center[index],
                window,
                cache_device,
            )
            for index, window in enumerate(windows)
        ]
        super().__init__(layers=layers)
        self._binding: _Binding | None = None
        self._release: weakref.finalize | None = None
        self.attach(model)

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        preset: str = "k5v4u",
        *,
        config: CacheConfig | None = None,
        max_batch_size: int = 1,
        max_cache_len: int | None = None,
        max_q_len: int = 32,
        center: str | Centers | None = "auto",
        cache_device: str | torch.device = "auto",
        **overrides: Any,
    ) -> TurboQuantCache:
        """A cache for `model`, attached to it.

        Args:
            model: a decoder of transformers whose attention goes through AttentionInterface, with
                full or sliding-window attention in every layer.
            preset: name of a configuration (torch_turboquant.config.PRESETS); `overrides` change
                its fields, for example recent_window=128.
            config: a CacheConfig instead of a preset.
            max_batch_size: sequences, beams included.
            max_cache_len: tokens per sequence to allocate at once; None grows as needed.
            max_q_len: new tokens that one attention call takes; longer continuations go in pieces
                of this length. The tail holds max_q_len - 1 tokens more than its window, so `crop`
                of up to as many loses nothing.
            center: "auto" (learned from the first tokens), None (off), one tensor [kv_heads,
                head_dim] per layer as `calibrate` returns them, or the path of a file written by
                `save_centers`.
            cache_device: where pages live and attention over them runs. "auto" is the model's
                device if the ops have kernels for it, else the CPU, with tensors copied across.

        Raises:
            ValueError: a model or option that is not supported; the text names what is.
        """
        head_dim = _head_dim(_text_config(model))
        if config is None:
            config = preset_config(preset, head_dim, **overrides)
        elif overrides:
            raise ValueError(f"with config=, {sorted(overrides)} belong into the CacheConfig")
        elif config.head_dim != head_dim:
            raise ValueError(f"config.head_dim is {config.head_dim}, the model's is {head_dim}")
        return cls(
            model,
            config,
            max_batch_size=max_batch_size,
            max_cache_len=max_cache_len,
            max_q_len=max_q_len,
            center=center,
            cache_device=cache_device,
        )

    # -- attaching

    def attach(self, model: nn.Module) -> None:
        """Makes `model` able to use this cache; `for_model` has done it already."""
        self.detach()
        windows = _layer_windows(model)
        if windows != [layer.sliding_window for layer in self.layers]:
            raise ValueError("this cache was made for a model with other layers")
        if _head_dim(_text_config(model)) != self.config.head_dim:
            raise ValueError(f"this cache was made for head_dim {self.config.head_dim}")
        self._binding = _Binding.of(model)
        self._release = weakref.finalize(self, self._binding.release)

    def detach(self) -> None:
        """Gives the model its own attention back once no other cache is attached. Idempotent."""
        if self._release is not None:
            self._release()
        self._binding = self._release = None

    def __enter__(self) -> TurboQuantCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    # -- what changes the sequences

    def reset(self) -> None:
        """Forgets all tokens and a learned center; keeps memory and attachment."""
        for layer in self.layers:
            layer.reset()
        self._sequences.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove tokens of every sequence (a negative number or 0).

        Up to max_q_len - 1 tokens nothing else changes. Beyond that, tokens which the ring of the
        tail no longer holds are read from their codes until new ones have come.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative one"
            )
        self._sequences.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes a copy of the former sequence beam_idx[i] (beam search)."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences `indices` (integers or a mask), in this order."""
        self._select(torch.arange(self._sequences.batch)[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times, copies side by side."""
        self._select(torch.arange(self._sequences.batch).repeat_interleave(repeats))

    def _select(self, rows: Tensor) -> None:
        rows = rows.cpu().long()
        chosen = rows.tolist()
        sequences = self._sequences
        if not 1 <= len(chosen) <= sequences.rows:
            raise ValueError(
                f"{len(chosen)} sequences do not fit into max_batch_size={sequences.rows}"
            )
        if chosen == list(range(sequences.batch)):
            return
        if max(chosen) >= sequences.batch:
            raise ValueError(f"sequence {max(chosen)} of {sequences.batch}")
        for layer in self.layers:
            layer.select_rows(rows)
        sequences.select(chosen)

    # -- what it holds

    @property
    def centers(self) -> list[Tensor] | None:
        """Centers in use: float32 [kv_heads, head_dim] per layer. None: off, or to be learned."""
        tables = [layer.tables for layer in self.layers]
        if any(t is None or t.center is None for t in tables):
            return None
        return [t.center.cpu() for t in tables]

    @property
    def cache_device(self) -> torch.device | None:
        """Where the first layer keeps its pages; None before the first forward."""
        first = self.layers[0]
        return first.store_device if first.is_initialized else None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of one sequence adds: packed keys and values of all layers.

        Measured from the pages; 0 before the first token has been encoded.
        """
        return sum(
            _nbytes(layer.pages) // (layer.pages.shape[0] * self.config.page_size)
            for layer in self.layers
            if layer.pages is not None
        )

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the tensors that the cache holds, all layers together.

        pages: pages that hold tokens; pages_allocated: all pages; tail: the exact first and last
        tokens; tables: constants of the codec; waiting: tokens not yet encoded because the center
        is still to be learned; total: everything allocated.
        """
        used = sum(math.ceil(n / self.config.page_size) for n in self._sequences.lengths())
        pages = allocated = tail = tables = waiting = 0
        for layer in self.layers:
            if layer.pages is not None:
                allocated += _nbytes(layer.pages)
                if self._sequences.encoded:
                    pages += used * _nbytes(layer.pages) // layer.pages.shape[0]
            tail += _nbytes(layer.ring)
            tables += sum(_nbytes(t) for t in layer.tables or ())
            waiting += sum(_nbytes(t) for t in layer.waiting or ())
        return {
            "pages": pages,
            "pages_allocated": allocated,
            "tail": tail,
            "tables": tables,
            "waiting": waiting,
            "total": allocated + tail + tables + waiting,
        }

    # -- centers

    @staticmethod
    @torch.no_grad()
    def calibrate(
        model: nn.Module,
        inputs: Tensor | str | Sequence[str],
        tokenizer: Any = None,
        *,
        skip: int = 4,
        chunk: int = 512,
    ) -> list[Tensor]:
        """Mean keys of a text, for `center=`.

        Args:
            inputs: token ids, int64 [n] or [batch, n] without padding; or text, with its tokenizer.
            skip: first tokens of each sequence to leave out (their keys are outliers).
            chunk: tokens per forward.

        Returns:
            One float32 [kv_heads, head_dim] per layer, on the CPU.

        Raises:
            ValueError: fewer than CENTER_TOKENS tokens, or text without a tokenizer.
        """
        if isinstance(inputs, str):
            inputs = [inputs]
        if not isinstance(inputs, Tensor):
            if tokenizer is None:
                raise ValueError("calibrate: text needs its tokenizer")
            inputs = [tokenizer(text, return_tensors="pt").input_ids[0] for text in inputs]
        elif inputs.dim() == 1:
            inputs = [inputs]
        count = sum(max(0, len(ids) - skip) for ids in inputs)
        if count < CENTER_TOKENS:
            raise ValueError(
                f"calibrate needs at least {CENTER_TOKENS} tokens after the first {skip} of every "
                f"sequence, got {count}"
            )
        sums = [0.0] * len(_layer_windows(model))
        for ids in inputs:
            cache = DynamicCache()
            for part in ids.to(model.device).split(chunk):
                model(part[None], past_key_values=cache, use_cache=True)
            for index, layer in enumerate(cache.layers):
                sums[index] = sums[index] + layer.keys[0, :, skip:].double().sum(1).cpu()
        return [(s / count).float() for s in sums]


def save_centers(path: str, centers: Sequence[Tensor]) -> None:
    """Writes centers to a safetensors file that `center=path` reads (needs safetensors)."""
    from safetensors.torch import save_file

    save_file({f"layers.{i}.center": c.contiguous() for i, c in enumerate(centers)}, path)


def load_centers(path: str) -> list[Tensor]:
    """Reads a file of `save_centers`: one float32 [kv_heads, head_dim] per layer.

    Raises:
        ValueError: the file holds anything else.
    """
    from safetensors.torch import load_file

    tensors = load_file(path)
    names = [f"layers.{i}.center" for i in range(len(tensors))]
    if set(names) != set(tensors):
        raise ValueError(f"{path} is no file of centers: it holds {sorted(tensors)[:3]}, ...")
    return [tensors[name].float() for name in names]


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


# --------------------------------------------------------------------------- what a model is


def _text_config(model: nn.Module) -> Any:
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise ValueError(f"{type(model).__name__} is no model of transformers")
    return model.config.get_text_config(decoder=True)


def _head_dim(config: Any) -> int:
    """As named by the configuration; hidden_size / heads only where it names none (Qwen2)."""
    named = getattr(config, "head_dim", None)
    return named if named is not None else config.hidden_size // config.num_attention_heads


def _layer_windows(model: nn.Module) -> list[int]:
    """Sliding window of every layer, 0 for full attention; refuses all other models."""
    config = _text_config(model)
    name = type(model).__name__
    layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["sliding_attention" if window else "full_attention"] * layers
    problem = None
    if getattr(model.config, "is_encoder_decoder", False) or getattr(
        config, "add_cross_attention", False
    ):
        problem = "cross attention"
    elif getattr(config, "kv_lora_rank", None):
        problem = "latent attention (MLA)"
    elif getattr(config, "num_kv_shared_layers", 0) or "reuse" in (
        getattr(config, "kv_sharing_modes", None) or ()
    ):
        problem = "layers that share keys and values"
    elif getattr(config, "alibi", False):
        problem = "ALiBi"
    elif getattr(config, "attention_chunk_size", None) and "chunked_attention" in types:
        problem = "chunked attention"
    elif set(types) - {"full_attention", "sliding_attention"}:
        problem = f"layers of type {sorted(set(types) - {'full_attention', 'sliding_attention'})}"
    elif len(types) != layers:
        problem = f"{len(types)} layer_types for {layers} layers"
    elif not getattr(model, "_can_set_attn_implementation", lambda: False)():
        problem = "attention that does not go through transformers' AttentionInterface"
    if problem:
        raise ValueError(
            f"TurboQuantCache does not support {name}: it has {problem}. Supported: decoders with "
            "full or sliding-window self-attention in every layer, MHA, GQA or MQA"
        )
    return [int(window) if kind == "sliding_attention" else 0 for kind in types]


# ----------------------------------------------------------------- between model and cache


class _Binding:
    """The link between one decoder and the caches attached to it.

    Two hooks on the decoder: before a forward, note which cache it runs on and plan it; afterwards,
    let the counts move. The attention and mask functions below look here.
    """

    def __init__(self, decoder: nn.Module, config: Any) -> None:
        current = config._attn_implementation or "eager"
        self.previous = current.removeprefix(_PREFIX)  # a copy of an attached model carries it
        self.name = _PREFIX + self.previous
        self.config = config
        self.attached = 0
        self.running: weakref.ref[TurboQuantCache] | None = None
        self.decoder = weakref.ref(decoder)
        modules = [m for m in decoder.modules() if hasattr(m, "layer_idx")]
        for module in modules:
            if hasattr(module, "num_key_value_groups"):
                _original_attention(self.previous, module)  # raises here rather than in a forward
                if module.config is not config:
                    raise ValueError(
                        f"{type(module).__name__} has a configuration of its own; TurboQuantCache "
                        "supports decoders whose attention modules share one"
                    )
        AttentionInterface.register(self.name, partial(_attention, self.previous))
        AttentionMaskInterface.register(self.name, partial(_mask, self.previous))
        self.parameters = list(inspect.signature(decoder.forward).parameters)
        self.hooks = [
            decoder.register_forward_pre_hook(self._before, with_kwargs=True),
            decoder.register_forward_hook(self._after, always_call=True),
        ]
        config._attn_implementation_internal = self.name
        for module in (decoder, *modules):
            _BINDINGS[module] = self

    @classmethod
    def of(cls, model: nn.Module) -> _Binding:
        """The binding of the model's decoder, made if needed; counts one cache more."""
        decoder = model.get_decoder()
        binding = _BINDINGS.get(decoder) or cls(decoder, _text_config(model))
        binding.attached += 1
        return binding

    def release(self) -> None:
        """One cache less; the last one restores the model."""
        self.attached -= 1
        if self.attached:
            return
        for hook in self.hooks:
            hook.remove()
        if self.config._attn_implementation == self.name:
            self.config._attn_implementation_internal = self.previous
        for module in [m for m, binding in _BINDINGS.items() if binding is self]:
            del _BINDINGS[module]

    @property
    def cache(self) -> TurboQuantCache | None:
        """The cache of the running forward."""
        return None if self.running is None else self.running()

    def _before(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.running = None
        call = dict(zip(self.parameters, args, strict=False)) | kwargs
        cache = call.get("past_key_values")
        if not isinstance(cache, TurboQuantCache):
            return
        if cache._binding is not self:
            raise ValueError(
                "this TurboQuantCache is not attached to this model; call cache.attach(model)"
            )
        if self.config._attn_implementation != self.name:
            raise RuntimeError(
                f"the attention implementation was changed to {self.config._attn_implementation!r} "
                "while a TurboQuantCache was attached; detach it first, change, attach again"
            )
        tokens = call.get("input_ids")
        if tokens is None:
            tokens = call["inputs_embeds"]
        cache._sequences.begin(tokens.shape[0], tokens.shape[1], call.get("attention_mask"))
        self.running = weakref.ref(cache)

    def _after(self, decoder: nn.Module, args: tuple, output: Any) -> None:
        cache, self.running = self.cache, None
        if cache is None:
            return
        sequences = cache._sequences
        if output is None:  # the forward has raised
            sequences.forward = None
        else:
            sequences.commit()
        for layer in cache.layers:
            layer.finish()


_BINDINGS: weakref.WeakKeyDictionary[nn.Module, _Binding] = weakref.WeakKeyDictionary()


def _attention(
    previous: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention implementation "turboquant_<previous>"."""
    binding = _BINDINGS.get(module)
    cache = None if binding is None else binding.cache
    original = _original_attention(previous, module)
    if cache is None:
        return original(module, query, key, value, attention_mask, **kwargs)
    layer = cache.layers[module.layer_idx]
    return layer.attend(original, module, query, key, value, attention_mask, **kwargs)


def _mask(previous: str, *args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
    """The mask of "turboquant_<previous>": the previous one where that attention is going to run.

    paged_attention needs none: causality, padding and sliding windows follow from the lengths.
    """
    binding = next((b for b in _BINDINGS.values() if b.config is config), None)
    cache = None if binding is None else binding.cache
    if cache is None or cache._sequences.forward.exact:
        build = AttentionMaskInterface().get(previous)
        return None if build is None else build(*args, config=config, **kwargs)
    causal = kwargs.get("mask_function", causal_mask_function) is causal_mask_function
    if kwargs.get("use_vmap") or not (causal or kwargs.get("local_size")):
        raise ValueError(
            "the model asks for a mask other than causal or sliding-window attention with left "
            "padding, which TurboQuantCache does not support after the first forward"
        )
    return None


def _original_attention(previous: str, module: nn.Module) -> Callable:
    """What the module would call without this file; "eager" lives beside the module's class."""
    home = sys.modules[type(module).__module__]
    if previous == "eager":
        function = getattr(home, "eager_attention_forward", None)
    else:
        function = getattr(home, "ALL_ATTENTION_FUNCTIONS", AttentionInterface()).get(previous)
    if function is None:
        raise ValueError(
            f"the {previous!r} attention of {type(module).__name__} was not found; load the model "
            "with attn_implementation='sdpa'"
        )
    return function
