"""A sequence out of one pool and into another: its pages, its exact tokens, what they depend on.

A pool lets a sequence swap out to the host's memory or into a file, and back in. What it swaps is
the sequence as it is exported, and beside it which pages of the pool it has left: those that other
sequences own are shared again afterwards, as long as they hold what they held.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from torch_turboquant import _checks, _files
from torch_turboquant.format import own_bytes
from torch_turboquant.pool.batch import PoolSequence
from torch_turboquant.pool.books import Books, Places
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
    dropped: int = 0
    """Tokens that compact has taken: the next position is length + dropped."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ExportedSequence:
        """The same sequence with its tensors on another device, as Tensor.to moves them."""
        pages, exact = (
            tuple(part.to(device, non_blocking=non_blocking) for part in parts)
            for parts in (self.pages, self.exact)
        )
        return replace(self, pages=pages, exact=exact)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.nbytes for t in (*self.pages, *self.exact))

    def save(self, path: str | os.PathLike[str]) -> int:
        """Writes the sequence to a safetensors file (needs safetensors).

        A file that was there is replaced when all of the new one is written.

        Returns:
            Bytes of the file.

        Raises:
            OSError: the file cannot be written.
        """
        return _write(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> ExportedSequence:
        """The sequence of a file of `save`, on the CPU; `adopt` decides whether it fits a pool.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no file of `save`, is cut short or has another format.
        """
        return _read(path)[0]


FILE_FORMAT = "torch_turboquant sequence 1"
_KIND = "a sequence"


def _write(exported: ExportedSequence, path: str | os.PathLike[str], mark: str = "") -> int:
    """The file of a sequence; `mark` tells it from other files."""
    tensors = {
        f"{part}.{layer}": tensor.cpu().contiguous()
        for part in ("pages", "exact")
        for layer, tensor in enumerate(getattr(exported, part))
    }
    numbers = {name: getattr(exported, name) for name in ("length", "ring_first", "dropped")}
    numbers |= {"layers": len(exported.pages), "exact_layers": len(exported.exact)}
    metadata = {"fingerprint": json.dumps(exported.fingerprint), "sequence": json.dumps(numbers)}
    return _files.write(path, tensors, FILE_FORMAT, {**metadata, "mark": mark})


def _read(path: str | os.PathLike[str]) -> tuple[ExportedSequence, str]:
    """The sequence of a file, and its mark."""
    with _files.opened(path, _KIND, FILE_FORMAT) as file:
        metadata = file.metadata()
        fingerprint = _files.told(path, _KIND, metadata, "fingerprint")
        numbers = _files.told(path, _KIND, metadata, "sequence")
        try:
            _checks.check_whole(**numbers)
            counts = {"pages": numbers["layers"], "exact": numbers["exact_layers"]}
            tensors = {
                part: tuple(file.get_tensor(f"{part}.{layer}") for layer in range(count))
                for part, count in counts.items()
            }
            length, first = numbers["length"], numbers["ring_first"]
            dropped = numbers["dropped"]
        except (KeyError, ValueError) as error:
            raise _files.damaged(path, _KIND, repr(error)) from error
    exported = ExportedSequence(fingerprint, length, first, **tensors, dropped=dropped)
    return exported, metadata.get("mark", "")


@dataclass(frozen=True)
class SwappedSequence:
    """A sequence that has left its pool for a while, made by PagedKVPool.swap_out.

    It stays what it is when it is swapped in, so that it can be swapped in again.
    """

    length: int
    """Tokens."""
    path: Path | None
    """The file that holds it; None: the host's memory does."""
    mark: str
    """What the file says if nobody has written it again; "" without a file."""
    held: ExportedSequence | None
    """The sequence in the host's memory, pinned if the pool is on a GPU; None: the file has it."""
    places: Places
    """Where its pages were."""

    @property
    def nbytes(self) -> int:
        """Bytes of the host's memory."""
        return 0 if self.held is None else self.held.nbytes

    def read(self) -> ExportedSequence:
        """The sequence, as `adopt` takes it.

        Raises:
            as ExportedSequence.load, if a file holds it.
            ValueError: the file has been written again with another sequence.
        """
        if self.held is not None:
            return self.held
        assert self.path is not None
        exported, mark = _read(self.path)
        if mark != self.mark:
            raise ValueError(
                f"{self.path} holds another sequence than was swapped out to it, one of "
                f"{exported.length} tokens: give each a file of its own"
            )
        return exported


class LayerTokens(NamedTuple):
    """What a sequence has in one layer, on the pool's device."""

    pages: Tensor
    exact: Tensor | None


def tokens_by_layer(memory: PoolMemory, books: Books, seq: PoolSequence) -> Iterator[LayerTokens]:
    """Copies of the sequence's pages and exact tokens, layer by layer."""
    chosen = memory.put(books.pages(seq).astype(np.int64))
    held = memory.put(books.rings.rows(seq._length, books.rings.first[seq._row]))
    inside = seq._length % books.page_size
    for layer, c in enumerate(memory.sizes.configs):
        pages = memory.pages[layer].index_select(0, chosen)
        if inside:  # bytes of earlier owners of the last page do not leave the pool
            used = np.zeros(c.record_bytes, dtype=np.uint8)
            for token in range(inside):
                used[own_bytes(c.record, token)] = 1
            pages[-1] *= memory.put(used)
        tail = None if memory.tails is None else memory.tails[layer]
        exact = None if tail is None else tail[seq._row].index_select(1, held)
        yield LayerTokens(pages, exact)


def _exported(
    memory: PoolMemory, books: Books, seq: PoolSequence, layers: list[LayerTokens]
) -> ExportedSequence:
    pages = tuple(layer.pages for layer in layers)
    exact = tuple(layer.exact for layer in layers if layer.exact is not None)
    first = books.rings.first[seq._row]
    fingerprint = deepcopy(memory.fingerprint)
    return ExportedSequence(fingerprint, seq._length, first, pages, exact, seq._dropped)


def export_sequence(memory: PoolMemory, books: Books, seq: PoolSequence) -> ExportedSequence:
    """A copy of the sequence, on the pool's device."""
    return _exported(memory, books, seq, list(tokens_by_layer(memory, books, seq)))


def copy_to_host(memory: PoolMemory, books: Books, seq: PoolSequence) -> ExportedSequence:
    """A copy of the sequence in the host's memory, which no device is still writing to.

    The device has room for one layer at a time: a pool that swaps is full.
    """
    layers = []
    for pages, exact in tokens_by_layer(memory, books, seq):
        layers.append(LayerTokens(_on_host(pages), None if exact is None else _on_host(exact)))
    if memory.device.type == "cuda":
        torch.cuda.current_stream(memory.device).synchronize()
    return _exported(memory, books, seq, layers)


def write_swapped(
    held: ExportedSequence, path: str | os.PathLike[str], places: Places
) -> SwappedSequence:
    """Moves what has been copied to the host's memory into a file."""
    mark = uuid4().hex
    _write(held, path, mark)
    return SwappedSequence(held.length, Path(path), mark, None, places)


def _on_host(tensor: Tensor) -> Tensor:
    """The tensor in the host's memory: pinned, and still being copied, if it is on a GPU."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def adopt_sequence(
    memory: PoolMemory, books: Books, exported: ExportedSequence, places: Places | None = None
) -> PoolSequence:
    """A new sequence of the exported tokens; see PagedKVPool.adopt.

    places: where its pages may still be; they are shared then, instead of copied.
    """
    found = _differences(exported.fingerprint, memory.fingerprint)
    if found:
        raise ValueError("these pages do not fit this pool: " + "; ".join(found))
    _check_tensors(memory, books, exported)
    length, rings = exported.length, books.rings
    books.check_length(length)
    first = first_after_store(exported.ring_first, length, rings.size)
    row = books.free_row()
    numbers, missing = books.pages_again(length, places)
    chosen = memory.put(numbers[missing].astype(np.int64))
    for mine, part in zip(memory.pages, exported.pages, strict=True):
        part = part.detach()
        if len(missing) < len(numbers):
            part = _rows(part, torch.from_numpy(missing))
        mine.index_copy_(0, chosen, part.to(memory.device, non_blocking=True))
    if memory.tails is not None:
        sinks, rows = min(length, rings.sinks), rings.rows(length, first)
        on = memory.put(rows)
        for tail, part in zip(memory.tails, exported.exact, strict=True):
            recent = part[:, part.shape[1] - (len(rows) - sinks) :]
            part = torch.cat([part[:, :sinks], recent], dim=1)
            tail[row].index_copy_(1, on, part.detach().to(memory.device, non_blocking=True))
    return books.add_filled(numbers, missing, length, exported.dropped, first)


def _rows(part: Tensor, rows: Tensor) -> Tensor:
    """Some rows of a tensor, in pinned memory if the tensor is: so that nobody waits for a copy."""
    if part.device.type != "cpu":
        return part.index_select(0, rows.to(part.device))
    shape = (len(rows), *part.shape[1:])
    chosen = torch.empty(shape, dtype=part.dtype, device="cpu", pin_memory=part.is_pinned())
    return torch.index_select(part, 0, rows, out=chosen)


def _check_tensors(memory: PoolMemory, books: Books, exported: ExportedSequence) -> None:
    """Tensors as export_sequence of a pool with this fingerprint makes them."""
    sizes, length = memory.sizes, exported.length
    if not 0 <= exported.ring_first <= length:
        raise ValueError(
            f"the exported sequence has length {length} and ring_first {exported.ring_first}, "
            "supported: 0 <= ring_first <= length"
        )
    most = 2**63 - 1 - length  # the next position is an int64
    if not 0 <= exported.dropped <= most:
        raise ValueError(f"dropped is {exported.dropped}, supported: 0 to {most}")
    layers, heads = len(sizes.configs), sizes.num_kv_heads
    for name, parts, expected in (
        ("pages", exported.pages, layers),
        ("exact", exported.exact, 0 if memory.tails is None else layers),
    ):
        if len(parts) != expected:
            raise ValueError(f"{name} has tensors of {len(parts)} layers, expected {expected}")
    for c, pages in zip(sizes.configs, exported.pages, strict=True):
        _checks.check_dtype("pages", pages, (torch.uint8,))
        _checks.check_shape("pages", pages, (books.pages_of(length), heads, c.record_bytes))
    # behind the check of the pages: a length that they do not have would take memory here
    held = len(held_positions(length, exported.ring_first, books.rings.sinks))
    for c, exact in zip(sizes.configs, exported.exact, strict=False):
        _checks.check_dtype("exact", exact, (sizes.dtype,))
        _checks.check_shape("exact", exact, (heads, held, 2, c.head_dim))


def _differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """The entries in which two fingerprints differ, in words."""
    theirs, mine = there.get("layers", []), here["layers"]
    if not (isinstance(theirs, list) and all(isinstance(layer, dict) for layer in theirs)):
        return ["the layers there are no list of objects"]
    found = [
        f"{name} is {there.get(name)} there and {here[name]} here"
        for name in here
        if name != "layers" and there.get(name) != here[name]
    ]
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
