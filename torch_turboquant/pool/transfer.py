"""A sequence out of one pool and into another: its pages, its exact tokens, what they depend on."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant.format import own_bytes
from torch_turboquant.pool.batch import PoolSequence
from torch_turboquant.pool.books import Books
from torch_turboquant.pool.memory import PoolMemory
from torch_turboquant.tail import first_after_store, held_positions


@dataclass(frozen=True)
class ExportedSequence:
    """A sequence outside of a pool; the same tokens give the same bytes in every pool.

    Its fields are plain data and tensors with memory of their own, so `vars(exported)` can be
    saved and loaded without pickled objects (docs/pool.md).
    """

    fingerprint: dict[str, Any]
    """What the pages depend on; plain data (json)."""
    length: int
    """Tokens."""
    ring_first: int
    """First position after the sinks that `exact` holds."""
    pages: tuple[Tensor, ...]
    """Per layer, uint8 [pages, kv_heads, record_bytes]; what belongs to no token is 0."""
    exact: tuple[Tensor, ...]
    """Per layer, [kv_heads, held, 2, head_dim]: keys and values of the sinks, then of the positions
    from ring_first on. Empty without a tail."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ExportedSequence:
        """The same sequence with its tensors on another device, as Tensor.to moves them."""
        pages, exact = (
            tuple(part.to(device, non_blocking=non_blocking) for part in parts)
            for parts in (self.pages, self.exact)
        )
        return replace(self, pages=pages, exact=exact)


def export_sequence(memory: PoolMemory, books: Books, seq: PoolSequence) -> ExportedSequence:
    """A copy of the sequence, on the pool's device."""
    chosen = memory.put(books.pages(seq).astype(np.int64))
    pages = tuple(p.index_select(0, chosen) for p in memory.pages)
    inside = seq._length % books.page_size
    for part, c in zip(pages, memory.sizes.configs, strict=True):
        if inside:  # bytes of earlier owners of the last page do not leave the pool
            used = np.zeros(c.record_bytes, dtype=np.uint8)
            for token in range(inside):
                used[own_bytes(c.record, token)] = 1
            part[-1] *= memory.put(used)
    exact: tuple[Tensor, ...] = ()
    first = books.rings.first[seq._row]
    if memory.tails is not None:
        held = memory.put(books.rings.rows(seq._length, first))
        exact = tuple(tail[seq._row].index_select(1, held) for tail in memory.tails)
    return ExportedSequence(deepcopy(memory.fingerprint), seq._length, first, pages, exact)


def adopt_sequence(memory: PoolMemory, books: Books, exported: ExportedSequence) -> PoolSequence:
    """A new sequence of the exported tokens; see PagedKVPool.adopt."""
    found = _differences(exported.fingerprint, memory.fingerprint)
    if found:
        raise ValueError("these pages do not fit this pool: " + "; ".join(found))
    _check_tensors(memory, books, exported)
    length, rings = exported.length, books.rings
    books.check_length(length)
    first = first_after_store(exported.ring_first, length, rings.size)
    row = books.free_row()
    numbers = books.top(length)
    chosen = memory.put(numbers.astype(np.int64))
    for mine, part in zip(memory.pages, exported.pages, strict=True):
        mine.index_copy_(0, chosen, part.to(memory.device))
    if memory.tails is not None:
        sinks, rows = min(length, rings.sinks), rings.rows(length, first)
        on = memory.put(rows)
        for tail, part in zip(memory.tails, exported.exact, strict=True):
            recent = part[:, part.shape[1] - (len(rows) - sinks) :]
            part = torch.cat([part[:, :sinks], recent], dim=1)
            tail[row].index_copy_(1, on, part.to(memory.device))
    return books.add_filled(numbers, length, first)


def _check_tensors(memory: PoolMemory, books: Books, exported: ExportedSequence) -> None:
    """Tensors as export_sequence of a pool with this fingerprint makes them."""
    sizes, length = memory.sizes, exported.length
    if not 0 <= exported.ring_first <= length:
        raise ValueError(
            f"the exported sequence has length {length} and ring_first {exported.ring_first}, "
            "supported: 0 <= ring_first <= length"
        )
    layers, heads = len(sizes.configs), sizes.num_kv_heads
    held = len(held_positions(length, exported.ring_first, books.rings.sinks))
    for name, parts, expected in (
        ("pages", exported.pages, layers),
        ("exact", exported.exact, 0 if memory.tails is None else layers),
    ):
        if len(parts) != expected:
            raise ValueError(f"{name} has tensors of {len(parts)} layers, expected {expected}")
    for c, pages in zip(sizes.configs, exported.pages, strict=True):
        _checks.check_dtype("pages", pages, (torch.uint8,))
        _checks.check_shape("pages", pages, (books.pages_of(length), heads, c.record_bytes))
    for c, exact in zip(sizes.configs, exported.exact, strict=False):
        _checks.check_dtype("exact", exact, (sizes.dtype,))
        _checks.check_shape("exact", exact, (heads, held, 2, c.head_dim))


def _differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """The entries in which two fingerprints differ, in words."""
    found = [
        f"{name} is {there.get(name)} there and {here[name]} here"
        for name in here
        if name != "layers" and there.get(name) != here[name]
    ]
    theirs, mine = there.get("layers", []), here["layers"]
    if len(theirs) != len(mine):
        return [*found, f"{len(theirs)} layers there and {len(mine)} here"]
    for name in mine[0]:
        layers = [i for i in range(len(mine)) if theirs[i].get(name) != mine[i][name]]
        if layers:
            i = layers[0]
            text = f"{name} is {theirs[i].get(name)} there and {mine[i][name]} here"
            where = "" if len(layers) == len(mine) else f" (layers {layers})"
            found.append(text + where)
    return found
