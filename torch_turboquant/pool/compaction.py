"""Sequences of a pool that keep some of their tokens, each KV head its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant.ops.move import cache_move
from torch_turboquant.pool.batch import PoolSequence
from torch_turboquant.pool.books import Books
from torch_turboquant.pool.memory import PoolMemory
from torch_turboquant.tail import token_slots


def compact(
    memory: PoolMemory, books: Books, sequences: Sequence[PoolSequence], kept: Sequence[Tensor]
) -> None:
    """PagedKVPool.compact, with the lock held."""
    recent = 0 if memory.tails is None else books.rings.size
    length = _checked(memory, books, sequences, kept, recent)
    ends = memory.put(np.array([seq._length for seq in sequences], dtype=np.int64))
    last = ends[:, None, None] - recent + torch.arange(recent, device=memory.device)
    target = torch.arange(length, device=memory.device)

    def moves() -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in kept:
            source = torch.cat([chosen, last.expand(-1, chosen.shape[1], -1)], dim=2)
            yield source.masked_fill(source == target, -1)[None], target.expand_as(source)[None]

    move(memory, books, sequences, length, moves())


def move(
    memory: PoolMemory,
    books: Books,
    sequences: Sequence[PoolSequence],
    length: int,
    moves: Iterable[tuple[Tensor, Tensor]],
) -> None:
    """Moves tokens of sequences in all layers and cuts what is behind `length`, with the lock held.

    Args:
        length: of all sequences afterwards; those tokens of their tail's ring are their last ones.
        moves: of some layers at a time, one after the other, int64 [layers, seqs, kv_heads, n]
            twice: positions of tokens that move, and where to; source -1: none.

    Raises:
        PoolExhausted: too few free pages for copies of shared ones; nothing has changed.
        RuntimeError: an error after the tokens of some layers were moved. The sequences are freed
            then, since their layers no longer hold the same tokens.
    """
    shared = books.shared_pages(sequences, length)
    copies = books.top(len(shared), len(shared) * books.page_size)
    pages = np.array([page for _, _, page in shared], dtype=np.int64)
    memory.copy_pages(pages, copies.astype(np.int64))
    books.leave(shared, copies)
    for seq in sequences:
        books.will_move(seq)

    lengths = np.array([seq._length for seq in sequences], dtype=np.int64)
    tables = np.zeros((len(sequences), books.pages_of(int(lengths.max()))), dtype=np.int64)
    for row, seq in zip(tables, sequences, strict=True):
        row[: seq._num_pages] = books.pages(seq)
    table, end = memory.put(tables), memory.put(lengths)[:, None, None]
    layers, begun = iter(memory.layers), False
    try:
        for source, target in moves:
            slots = [
                _slots(table, position, end, books.page_size).masked_fill(source < 0, -1)
                for position in (source, target)
            ]
            sources, targets = (x.transpose(1, 2).flatten(2).contiguous() for x in slots)
            for of_layer in zip(sources, targets, strict=True):
                layer = next(layers)
                cache_move(layer.pages, *of_layer, layer.config)
                begun = True
        for tail in memory.tails or ():
            _turn_rings(tail, books, sequences, length, memory)
    except BaseException as error:
        if not begun:
            raise
        for seq in sequences:
            books.remove(seq)
        raise RuntimeError(
            f"moving tokens failed after some layers, so their sequences were freed: {error}"
        ) from error
    for seq in sequences:
        books.close_up(seq, length)


def _checked(
    memory: PoolMemory,
    books: Books,
    sequences: Sequence[PoolSequence],
    kept: Sequence[Tensor],
    recent: int,
) -> int:
    """Checks a call. Returns the length that all sequences get."""
    if not sequences:
        raise ValueError("no sequences, supported: 1 and more")
    books.check_each(sequences)
    if len(kept) != len(memory.layers):
        raise ValueError(f"kept is of {len(kept)} layers, expected {len(memory.layers)}")
    shape = (len(sequences), memory.sizes.num_kv_heads, None)
    sinks = memory.sizes.configs[0].sink_tokens
    for chosen in kept:
        _checks.check_constant("kept", chosen, memory.device, torch.int64, shape)
        if chosen.shape[2] != kept[0].shape[2]:
            raise ValueError("kept has different numbers of tokens in different layers")
    count = kept[0].shape[2]
    shortest = min(seq._length for seq in sequences)
    if not sinks <= count <= shortest - recent:
        raise ValueError(
            f"kept has {count} tokens of each head, supported: {sinks} (the sinks) to "
            f"{shortest - recent}, the shortest sequence without the last {recent}"
        )
    if memory.device.type == "cpu":
        for chosen in kept:
            _check_values(chosen, sequences, sinks, recent)
    return count + recent


def _check_values(
    chosen: Tensor, sequences: Sequence[PoolSequence], sinks: int, recent: int
) -> None:
    for of_seq, seq in zip(chosen, sequences, strict=True):
        ordered = of_seq.sort(dim=1).values
        end = seq._length - recent
        if ordered.numel() and not (0 <= int(ordered.min()) and int(ordered.max()) < end):
            raise RuntimeError(f"kept holds positions outside 0 to {end - 1}")
        if (ordered[:, 1:] == ordered[:, :-1]).any():
            raise RuntimeError("kept has a position twice")
        if (of_seq[:, :sinks] != torch.arange(sinks, device=of_seq.device)).any():
            raise RuntimeError(f"kept must begin with the positions of the {sinks} sinks")


def _slots(table: Tensor, position: Tensor, end: Tensor, page_size: int) -> Tensor:
    """Slots of positions [.., seqs, heads, n]; those outside of 0 to `end` [seqs, 1, 1] get -1.

    A table is as wide as the longest sequence's: behind a sequence it has pages of others.
    """
    exists = (position >= 0) & (position < end)
    column = (position // page_size).clamp(0, table.shape[1] - 1)
    tables = table.expand(*position.shape[:-3], -1, -1)
    page = tables.gather(-1, column.flatten(-2)).view(position.shape)
    return token_slots(page, position, page_size).masked_fill(~exists, -1)


def _turn_rings(
    tail: Tensor,
    books: Books,
    sequences: Sequence[PoolSequence],
    length: int,
    memory: PoolMemory,
) -> None:
    """The rows of the last tokens go where the ring has their new positions."""
    ring = books.rings.size
    dropped = np.array([seq._length - length for seq in sequences])
    row = memory.put((np.arange(ring) + dropped[:, None]) % ring)
    entries = memory.put(np.array([seq._row for seq in sequences]))
    words = tail.view(torch.int64)  # indexing takes as long for an element of any size
    part = words[entries, :, books.rings.sinks :]  # a copy
    index = row[:, None, :, None, None].expand_as(part)
    words[entries, :, books.rings.sinks :] = part.gather(2, index)
