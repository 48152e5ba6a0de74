"""Which sequences are in a cache and how long they are, and what one forward does with them.

Everything here is host integers, shared by all layers, and small index tensors made from them. A
*column* is a position of the batch as the model sees it, left padding included; a *position* is the
place of a token in its own sequence.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_turboquant.cache import ring_first_rolled_back, ring_first_stored, ring_rows
from torch_turboquant.config import CacheConfig

CENTER_TOKENS = 64  # that a center is learned from, at least
_FIRST_PAGES = 256  # tokens per sequence that the first allocation of a growing cache holds


class Piece(NamedTuple):
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


class Forward:
    """What one forward call does, worked out once and used by all layers."""

    def __init__(self, sequences: Sequences, batch: int, new: int, pads: list[int]) -> None:
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
        self._built: dict[tuple[int, torch.device], Piece] = {}

    def lengths(self, column: int) -> list[int]:
        """Tokens of every sequence among the columns before `column`."""
        return [max(0, column - pad) for pad in self.pads]

    def piece(self, index: int, device: torch.device) -> Piece:
        """The index-th piece of `pieces` on `device`."""
        if (index, device) not in self._built:
            self._built[index, device] = self._build(*self.pieces[index], device)
        return self._built[index, device]

    def _build(self, first: int, last: int, device: torch.device) -> Piece:
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
            valid[row, 1] = ring_first_stored(kept, length, self.ring_tokens)
        table = torch.arange(self.batch * self.pages, dtype=torch.int32)

        def put(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.to(device)

        return Piece(
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


class Sequences:
    """Lengths, left padding and page counts of the batch: host integers shared by all layers.

    Counts move only when a forward has succeeded, so one that fails leaves the cache as it was.
    """

    def __init__(
        self, config: CacheConfig, rows: int, max_len: int | None, max_q_len: int, auto: bool
    ) -> None:
        self.config, self.rows, self.max_len, self.max_q_len = config, rows, max_len, max_q_len
        self.has_tail = config.sink_tokens + config.recent_window > 0
        self.ring_tokens = ring_rows(config, max_q_len)
        self.auto_center = auto
        self.pages = math.ceil(max_len / config.page_size) if max_len else 0
        self.forward: Forward | None = None
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
        if self.forward is not None:
            self.abort()  # interrupted where no hook could tell
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
        self.forward = Forward(self, batch, new, pads)
        if self.forward.encode:
            # before the forward, not after: a failed one has overwritten its part of the ring too
            for row, length in enumerate(self.forward.lengths(self.forward.total)):
                kept = self.ring_first[row]
                self.ring_first[row] = ring_first_stored(kept, length, self.ring_tokens)

    def commit(self) -> None:
        """The planned forward has gone through all layers."""
        done, self.forward = self.forward, None
        self.batch, self.columns, self.pads = done.batch, done.total, done.pads
        self.encoded = self.encoded or done.encode
        self.center_known = self.center_known or done.encode

    def abort(self) -> None:
        """The planned forward has failed: its tokens were never there."""
        self.forward = None
        self._clamp_ring()

    def crop(self, tokens: int) -> None:
        self.columns = max(0, self.columns - tokens)
        self._clamp_ring()
        if self.columns == 0:
            self.batch, self.pads, self.ring_first = 0, [], [0] * self.rows

    def _clamp_ring(self) -> None:
        for row, length in enumerate(self.lengths()):
            self.ring_first[row] = ring_first_rolled_back(self.ring_first[row], length)

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
