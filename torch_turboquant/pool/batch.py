"""What a caller of the pool holds: sequences, and batches of their new tokens."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from torch_turboquant.batch import AttentionBatch
from torch_turboquant.tail import Rings, token_slots

if TYPE_CHECKING:
    from typing_extensions import Self


class Owner(Protocol):
    """The pool, as far as its batches know it."""

    def commit(self, batch: PoolBatch) -> None: ...

    def rollback(self, batch: PoolBatch) -> None: ...


class PoolSequence:
    """A sequence of a pool, made by allocate, fork, adopt and swap_in, valid until it is freed."""

    __slots__ = (
        "_batch",
        "_books",
        "_dropped",
        "_least",
        "_length",
        "_num_pages",
        "_row",
        "_unmoved",
    )

    def __init__(self, books: object, row: int) -> None:
        self._books: object | None = books  # of its pool; None: freed
        self._row = row  # of the block tables, and the sequence's entry of the tails
        self._length = 0
        self._dropped = 0
        self._num_pages = 0
        self._unmoved = 0  # the first tokens that are where HeavyHitters has seen them last
        self._least = 0  # tokens that were there at all times since HeavyHitters saw a step
        self._batch: PoolBatch | None = None

    @property
    def length(self) -> int:
        """Tokens, without those of a batch that is still open."""
        return self._length

    @property
    def dropped(self) -> int:
        """Tokens that PagedKVPool.compact has taken: the next position is length + dropped."""
        return self._dropped

    @property
    def batch(self) -> PoolBatch | None:
        """The open batch that the sequence is in."""
        return self._batch

    def __repr__(self) -> str:
        state = "freed" if self._books is None else f"{self._length} tokens"
        return f"<PoolSequence {state}>"


class LayerMark:
    """Whether a layer has stored a batch.

    An object of its own, so that compiled code writes it and never depends on what it was.
    """

    def __init__(self) -> None:
        self.stored = False  # since the batch was reserved
        self.rehearsed = False  # by a graph, perhaps, whose replays are not seen


class PoolBatch(AttentionBatch):
    """The new tokens of some sequences, as layers want them; made by reserve or empty_batch.

    Used as a context manager it is committed at the end of the block, and rolled back if the block
    raises or if a layer has not stored it, which is an error. Tensors are on the pool's device;
    nobody changes them, except `reserve(into=batch)`. Every AttentionBatch field but cu_seqlens_q
    is there; tail_slots and tail_valid are None where the config has no tail.

    Attributes:
        sequences: tuple of PoolSequence, without padding.
        new_tokens: tuple of int, of each sequence.
    """

    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor
    sequences: tuple[PoolSequence, ...]
    new_tokens: tuple[int, ...]

    def __init__(
        self, owner: Owner, max_q_len: int, tensors: dict[str, Tensor | None], layers: int
    ) -> None:
        self._owner = owner
        self._state = "empty"  # then "open", then "closed", and so on if it is used again
        self._marks = tuple(LayerMark() for _ in range(layers))
        self.sequences, self.new_tokens = (), ()
        super().__init__(max_q_len=max_q_len, **tensors)

    @property
    def tokens(self) -> int:
        """Rows that store and attend expect, padding included."""
        return self.slot_mapping.shape[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._state != "open":
            return
        try:
            if kind is None:
                self._owner.commit(self)
        finally:
            if self._state == "open":
                self._owner.rollback(self)

    def _open(self, sequences: tuple[PoolSequence, ...], counts: tuple[int, ...]) -> None:
        self.sequences, self.new_tokens, self._state = sequences, counts, "open"
        for mark in self._marks:
            mark.stored = False

    def _mark(self, layer: int, replayed: bool) -> None:
        """A layer has stored the batch. replayed: and will do so again without being seen."""
        self._marks[layer].stored = True
        if replayed or self._state == "empty":
            self._marks[layer].rehearsed = True

    def _missing(self) -> list[int]:
        """The layers that have not stored the batch since it was reserved."""
        marks = enumerate(self._marks)
        return [layer for layer, mark in marks if not (mark.stored or mark.rehearsed)]

    def __repr__(self) -> str:
        return (
            f"<PoolBatch {self._state}: {len(self.sequences)} of {self.seq_lens.shape[0]} "
            f"sequences, {sum(self.new_tokens)} of {self.tokens} tokens>"
        )


class Shape(NamedTuple):
    """Sizes of a batch's tensors, padding included."""

    seqs: int
    tokens: int
    pages: int
    """Columns of the block table."""
    with_cu: bool
    """Whether there is a cu_seqlens_q."""

    def fill(
        self,
        tables: np.ndarray,
        sequences: tuple[PoolSequence, ...],
        counts: tuple[int, ...],
        page_size: int,
        rings: Rings | None,
    ) -> dict[str, np.ndarray | None]:
        """The tensors of a PoolBatch as arrays.

        Args:
            tables: int32 [len(sequences), pages], the block tables with the new pages.
            sequences, counts: with so many new tokens each.
            page_size: tokens.
            rings: of the pool's tails; None: it has none.
        """
        n, new = len(sequences), sum(counts)
        before = np.array([s._length for s in sequences], dtype=np.int64)
        count = np.array(counts, dtype=np.int64)
        ends = np.cumsum(count)
        owner = np.repeat(np.arange(n), count)
        position = np.arange(new) - (ends - count)[owner] + before[owner]
        page = tables[owner, position // page_size].astype(np.int64)
        slots = np.full(self.tokens, -1, dtype=np.int64)
        slots[:new] = token_slots(page, position, page_size)
        block_table = np.zeros((self.seqs, self.pages), dtype=np.int32)
        block_table[:n, : tables.shape[1]] = tables
        lens = np.zeros(self.seqs, dtype=np.int32)
        lens[:n] = before + count
        cu = None
        if self.with_cu:
            cu = np.full(self.seqs + 1, new, dtype=np.int32)
            cu[0], cu[1 : n + 1] = 0, ends
        tail_slots = tail_valid = None
        if rings is not None:
            rows = [s._row for s in sequences]
            tail_slots = np.full(self.seqs, -1, dtype=np.int64)
            tail_slots[:n] = rows
            tail_valid = rings.valid(rows, lens[:n])
        return {
            "slot_mapping": slots,
            "block_table": block_table,
            "seq_lens": lens,
            "cu_seqlens_q": cu,
            "tail_slots": tail_slots,
            "tail_valid": tail_valid,
        }
