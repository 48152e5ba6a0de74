"""The exact tail: its memory, which row holds which token, and what its rings hold by now.

The tail keeps the first (sink) and the last (recent) tokens of a sequence unrotated and in the
model's dtype (docs/format.md, section 9). A sequence owns one of the tail's `max_seqs` entries. Of
its rows the first `sink_tokens` hold the sinks; the rest is a ring, in which a token of position p
overwrites the token of position p - ring.

What a ring holds follows from one number per sequence, `first`: the ring holds every position from
`first` to the sequence's end. Storing moves it forward, because new tokens overwrite old ones.
Cutting a sequence moves it back, because rows of later positions no longer count. Attention gets
the number as `tail_valid`. `Rings` keeps it on the host; `Counters` keeps it on a device, for steps
that a CUDA graph replays.

The functions on slots say where a token's codes stand in the pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant.config import CacheConfig, PackedConfig

Integers = TypeVar("Integers", np.ndarray, Tensor)  # what slots are computed from, and come as


class Tail(NamedTuple):
    """The exact tail of a call's sequences (docs/format.md, section 9)."""

    ring: Tensor
    """[max_seqs, kv_heads, sink_tokens + ring, 2, head_dim], of k's dtype (allocate_tail), entries
    contiguous and at any distance from each other. Of a cache of latents it is
    [max_seqs, sink_tokens + ring, latent_dim + rope_dim] (allocate_latent_tail)."""
    slots: Tensor
    """int32 or int64 [seqs], of any stride: which of the max_seqs entries each sequence owns; -1:
    none, it uses codes."""
    valid: Tensor | None = None
    """int32 [max_seqs, 2]: number of sink tokens held, first position in the ring; None: all."""


# ---- memory


def ring_rows(config: PackedConfig, max_q_len: int) -> int:
    """Rows of the ring for calls of up to max_q_len new tokens: the tail's without the sinks.

    The first of max_q_len queries sees a window that begins max_q_len - 1 positions before that of
    the last one, and all of them attend after the last one is stored.
    """
    return max(1, config.recent_window + max_q_len - 1)


def tail_rows(config: PackedConfig, max_q_len: int) -> int:
    """The rows of an entry of a tail: sinks, then the ring."""
    return config.sink_tokens + ring_rows(config, max_q_len)


def tail_shape(
    config: CacheConfig, max_seqs: int, num_kv_heads: int, max_q_len: int
) -> tuple[int, ...]:
    """Shape of the tensor that allocate_tail makes."""
    rows = tail_rows(config, max_q_len)
    return max_seqs, num_kv_heads, rows, 2, config.head_dim


def check_new_tail(config: PackedConfig, dtype: torch.dtype, max_q_len: int) -> None:
    """What allocate_tail and allocate_latent_tail refuse."""
    _checks.check_output_dtype(dtype)
    if not config.has_tail:
        raise ValueError("a config with sink_tokens = 0 and recent_window = 0 needs no tail")
    _checks.check_positive(max_q_len=max_q_len)


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
        TypeError: a dtype other than float32, float16 and bfloat16, or another config, such as that
            of latents.
        ValueError: a config without sink tokens and window, max_q_len below 1, or a number that is
            not whole or is below 0.
    """
    _checks.check_kind("config", config, CacheConfig)
    check_new_tail(config, dtype, max_q_len)
    _checks.check_count(max_seqs=max_seqs, num_kv_heads=num_kv_heads)
    shape = tail_shape(config, max_seqs, num_kv_heads, int(max_q_len))
    return torch.zeros(shape, dtype=dtype, device=device)


# ---- what a ring holds


def first_after_store(first: int, length: int, ring: int) -> int:
    """`first` once a sequence has been stored up to `length` tokens."""
    return max(first, length - ring)


def first_after_cut(first: int, length: int) -> int:
    """`first` once a sequence has been cut to `length` tokens.

    Whatever is stored from there on is in the ring, so that a ring which held nothing older than
    the cut holds everything from the cut on.
    """
    return min(first, length)


class Rings:
    """For every entry of a tail, the first position that its ring holds; integers of the host."""

    def __init__(self, config: PackedConfig, entries: int, max_q_len: int) -> None:
        self.sinks, self.size = config.sink_tokens, ring_rows(config, max_q_len)
        self.first = [0] * entries

    def snapshot(self) -> Rings:
        """A copy, which later stores and cuts leave alone."""
        copy = object.__new__(Rings)
        copy.sinks, copy.size, copy.first = self.sinks, self.size, list(self.first)
        return copy

    def stored(self, entry: int, length: int) -> None:
        """Tokens up to `length` have been written, or may have been: older ones are gone."""
        self.first[entry] = first_after_store(self.first[entry], length, self.size)

    def cut(self, entry: int, length: int) -> None:
        """The sequence has `length` tokens now; 0 begins a new one."""
        self.first[entry] = first_after_cut(self.first[entry], length)

    def select(self, entries: Sequence[int]) -> None:
        """Entry i has become a copy of the former entry entries[i]; the rest is empty."""
        kept = [self.first[entry] for entry in entries]
        self.first = kept + [0] * (len(self.first) - len(kept))

    def valid(self, entries: Iterable[int], lengths: Iterable[int]) -> np.ndarray:
        """`tail_valid` for sequences that will be `lengths` tokens long once they are stored.

        Returns:
            int32 [all entries, 2]: sink tokens held, first position in the ring; zeros in entries
            that no sequence of the call owns.
        """
        valid = np.zeros((len(self.first), 2), dtype=np.int32)
        for entry, length in zip(entries, lengths, strict=True):
            first = first_after_store(self.first[entry], int(length), self.size)
            valid[entry] = min(int(length), self.sinks), first
        return valid

    def rows(self, length: int, first: int) -> np.ndarray:
        """Rows of a tail's entry whose tokens count, in the order of their positions: int64.

        They are the sinks, then the positions from `first` to the end of a sequence of `length`
        tokens.
        """
        position = held_positions(length, first, self.sinks)
        after = position - self.sinks
        return np.where(after < 0, position, self.sinks + after % self.size)


def held_positions(length: int, first: int, sinks: int) -> np.ndarray:
    """Positions whose exact tokens a tail's entry holds: the sinks, then the ring's; int64."""
    return np.concatenate([np.arange(min(length, sinks)), np.arange(max(first, sinks), length)])


class Counters:
    """Where sequences stand, in tensors of one device that never move: for CUDA graphs.

    Every sequence grows by the same number of tokens per step, so that one scalar moves:
    `columns`, the tokens of each row of the batch, left padding included. What the next token of
    every sequence needs follows from it, and is worked out at the end of the step before: then a
    step begins with its layers, and torch.compile hands the same tensors to all of them. (It would
    work out again for each layer what follows from other tensors.)

    Attributes:
        columns: int32 scalar.
        pads: int32 [entries], columns of each sequence that take no place: its left padding, and
            tokens that were evicted.
        first: int32 [entries], as in Rings; a step only reads it.
        entries: int64 [entries], 0, 1, 2 and so on: sequence i owns entry i of the tail.
        next_lengths: int32 [entries], lengths with the next token.
        next_valid: int32 [entries, 2], `tail_valid` (Rings.valid) for these lengths.
        next_slots: by the slots that a sequence owns, int64 [entries]: that of the next token.
    """

    def __init__(self, rings: Rings, device: torch.device) -> None:
        self.sinks, self.ring = rings.sinks, rings.size
        entries = len(rings.first)
        self.columns = torch.zeros((), dtype=torch.int32, device=device)
        self.pads = torch.zeros(entries, dtype=torch.int32, device=device)
        self.first = torch.zeros(entries, dtype=torch.int32, device=device)
        self.entries = torch.arange(entries, device=device)
        self.next_lengths = torch.zeros_like(self.pads)
        self.next_valid = torch.zeros(entries, 2, dtype=torch.int32, device=device)
        self.next_slots: dict[int, Tensor] = {}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, whose addresses a graph remembers."""
        ahead = self.next_lengths, self.next_valid, *self.next_slots.values()
        return self.columns, self.pads, self.first, self.entries, *ahead

    def own_slots(self, room: int) -> None:
        """There are layers in which a sequence owns `room` slots (owned_slots)."""
        if room not in self.next_slots:
            self.next_slots[room] = torch.zeros_like(self.entries)
            self._look_ahead()

    def set(self, columns: int, pads: Sequence[int], rings: Rings) -> None:
        """Takes over the host's integers; entries behind `pads` have no padding."""
        self.columns.fill_(columns)
        missing = [0] * (len(rings.first) - len(pads))
        for counter, numbers in ((self.pads, [*pads, *missing]), (self.first, rings.first)):
            counter.copy_(torch.tensor(numbers, dtype=torch.int32, device="cpu"))
        self._look_ahead()

    def lengths(self, new: int) -> Tensor:
        """Lengths of all sequences with `new` more columns: int32 [entries]."""
        return self.columns + new - self.pads

    def valid(self, lengths: Tensor, out: Tensor | None = None) -> Tensor:
        """`tail_valid` (Rings.valid) for these lengths: int32 [entries, 2]."""
        first = torch.maximum(self.first, lengths - self.ring)
        return torch.stack([lengths.clamp(max=self.sinks), first], dim=1, out=out)

    def slots(self, lengths: Tensor, new: int, room: int) -> Tensor:
        """Slots of the last `new` tokens of sequences of these lengths: int64 [entries, new]."""
        place = (lengths - new)[:, None] + torch.arange(new, device=lengths.device)
        return owned_slots(self.entries, place, room)

    def advance(self, new: int) -> None:
        """A step of `new` columns is done."""
        self.columns.add_(new)
        self._look_ahead()

    def _look_ahead(self) -> None:
        lengths = torch.sub(self.columns + 1, self.pads, out=self.next_lengths)
        self.valid(lengths, out=self.next_valid)
        for room, slots in self.next_slots.items():
            slots.copy_(owned_slots(self.entries, (lengths - 1)[:, None], room)[:, 0])


# ---- slots of tokens in the pages


def token_slots(page: Integers, position: Integers, page_size: int) -> Integers:
    """Slots (slot_mapping) of tokens at these positions, whose pages have these numbers."""
    return page * page_size + position % page_size


def owned_slots(entry: Integers, position: Integers, room: int) -> Integers:
    """Slots of tokens [seqs, n] where sequence i owns the `room` slots from entry[i] * room on.

    A sequence that is longer than its room goes round in it, as layers do that see no more than a
    window. Equals token_slots of the pages in owned_pages.
    """
    return entry[:, None] * room + position % room


def owned_pages(entries: int, longest: int, pages: int) -> np.ndarray:
    """Block table of sequences that own `pages` pages each, in a row: int32 [entries, longest].

    Args:
        entries: sequences.
        longest: pages that the longest sequence would need without going round.
        pages: of each sequence.
    """
    table = np.arange(entries)[:, None] * pages + np.arange(longest) % pages
    return table.astype(np.int32)
