"""The sequences of a pool and the batches of their new tokens, behind the pool's lock."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant._autograd import lasting
from torch_turboquant.pool.batch import PoolBatch, PoolSequence, Shape
from torch_turboquant.pool.books import Books, PoolStatistics
from torch_turboquant.pool.memory import PoolMemory


class PoolSequences:
    """What a pool does with sequences; PagedKVPool adds the layers that store and attend.

    Args:
        books: who owns which page; touched with the lock held only.
        memory: where the pages are. Sequences have it copy pages that a fork appends to.
    """

    def __init__(self, books: Books, memory: PoolMemory) -> None:
        self._lock = threading.Lock()
        self._books, self._memory = books, memory

    # ---- sequences

    @property
    def free_pages(self) -> int:
        """Pages that no sequence owns."""
        return self._books.num_free

    @property
    def free_seqs(self) -> int:
        """Sequences that allocate, fork and adopt can still make."""
        return len(self._books.free_rows)

    def statistics(self) -> PoolStatistics:
        """How full the pool is, and what sharing has saved; waits for no device."""
        with self._lock:
            return self._books.statistics()

    def pages_needed(
        self, sequences: Sequence[PoolSequence], new_tokens: int | Sequence[int]
    ) -> int:
        """Free pages that `reserve` of the same arguments would take now, copies included.

        Raises:
            as reserve, but never PoolExhausted.
        """
        with self._lock:
            return self._books.plan(sequences, new_tokens).pages

    def page_numbers(self, seq: PoolSequence) -> list[int]:
        """The pages of a sequence in order, those of an open batch included.

        Raises:
            RuntimeError: a sequence that was freed.
            ValueError: a sequence of another pool.
        """
        with self._lock:
            self._books.check_mine(seq)
            return self._books.pages(seq).tolist()

    def allocate(self) -> PoolSequence:
        """A new sequence without tokens; it takes no page yet.

        Raises:
            PoolExhausted: max_seqs sequences are there already.
        """
        with self._lock:
            return self._books.add()

    def fork(self, seq: PoolSequence) -> PoolSequence:
        """A new sequence of the same tokens: pages are shared, the entry of the tail is copied.

        Raises:
            PoolExhausted: max_seqs sequences are there already.
            RuntimeError: a sequence that was freed or is in an open batch.
            ValueError: a sequence of another pool.
        """
        with self._lock:
            self._books.check_idle(seq)
            self._memory.copy_tail(seq._row, self._books.free_row())
            return self._books.add_fork(seq)

    def truncate(self, seq: PoolSequence, length: int) -> None:
        """Takes the last tokens back, until `length` are left: a rejected draft, for example.

        Up to max_q_len tokens behind the longest that the sequence has been, attention is as if
        they had never been there. Beyond that, tokens of the recent window that the ring of the
        tail holds no more are read from their codes, until new ones have come.

        Raises:
            RuntimeError: a sequence that was freed or is in an open batch.
            ValueError: a sequence of another pool; a length below 0 or above the present one.
        """
        with self._lock:
            self._books.check_idle(seq)
            _checks.check_whole(length=length)
            if not 0 <= length <= seq._length:
                raise ValueError(f"length is {length}, supported: 0 to {seq._length}")
            self._books.cut(seq, int(length))

    def free(self, seq: PoolSequence) -> None:
        """Ends a sequence: pages that nobody else owns become free.

        Raises:
            RuntimeError: a sequence that was freed or is in an open batch.
            ValueError: a sequence of another pool.
        """
        with self._lock:
            self._books.check_idle(seq)
            self._books.remove(seq)

    # ---- batches

    def empty_batch(self, seqs: int, tokens: int | None = None, max_q_len: int = 1) -> PoolBatch:
        """A batch of padding whose tensors `reserve(into=...)` fills: for CUDA graphs.

        Addresses and shapes stay for the batch's life. store and attend accept it as it is (they
        store nothing and give zeros), so that a graph can be captured before there is a sequence.
        A layer that has stored the batch while it was empty, or while a graph was captured, counts
        as stored from then on: commit cannot see what a graph replays.

        Args:
            seqs: rows.
            tokens: rows of q, k and v; None: seqs * max_q_len.
            max_q_len: new tokens per sequence at most; 1: exactly one, and tokens = seqs.

        Raises:
            ValueError: numbers below 1, or tokens other than seqs with max_q_len = 1.
        """
        tokens = seqs * max_q_len if tokens is None else tokens
        _checks.check_positive(seqs=seqs, tokens=tokens, max_q_len=max_q_len)
        if max_q_len == 1 and tokens != seqs:
            raise ValueError(f"tokens is {tokens}, supported with max_q_len = 1: seqs ({seqs})")
        shape = Shape(seqs, tokens, self._books.max_pages, with_cu=max_q_len > 1)
        arrays = self._arrays(shape, np.zeros((0, 0), dtype=np.int32), (), ())
        with lasting():
            tensors = self._put(arrays)
        return PoolBatch(self, max_q_len, tensors, len(self._memory.layers))

    def reserve(
        self,
        sequences: Sequence[PoolSequence],
        new_tokens: int | Sequence[int] = 1,
        *,
        into: PoolBatch | None = None,
    ) -> PoolBatch:
        """Room for new tokens at the end of sequences, and the tensors that say where it is.

        The sequences are in an open batch until `commit` or `rollback` of it, or until the end of
        its `with` block.

        Args:
            sequences: one or more, each once.
            new_tokens: of each sequence, 1 and more; one number: for all.
            into: a batch of empty_batch to fill and return. None: a new one without padding.

        Returns:
            The batch. The tokens of all sequences follow each other, in the order of `sequences`.

        Raises:
            PoolExhausted: too few free pages; nothing has changed.
            RuntimeError: a sequence that was freed or is in an open batch; `into` is open.
            ValueError: a sequence of another pool or twice; numbers that do not fit; more than
                max_seq_len tokens; more than `into` was made for.
        """
        with self._lock:
            plan = self._books.plan(sequences, new_tokens)
            counts = plan.counts
            room = None if into is None else self._room(into, counts)
            new = self._books.new_pages(plan)
            # from here on only the device can fail, and the books change last
            width, longest = new.tables.shape[1], max(counts)
            shape = room or Shape(len(counts), sum(counts), width, with_cu=longest > 1)
            arrays = self._arrays(shape, new.tables, plan.sequences, counts)
            if into is None:
                batch = PoolBatch(self, longest, self._put(arrays), len(self._memory.layers))
            else:
                batch = into
                for name, array in arrays.items():
                    if array is not None:
                        host = self._memory.host(array)
                        getattr(batch, name).copy_(host, non_blocking=True)
            self._memory.copy_pages(new.copied, new.copies)
            self._books.open(plan, new, batch)
            return batch

    def _room(self, into: PoolBatch, counts: tuple[int, ...]) -> Shape:
        """The shape of a batch that takes these counts."""
        self._check_batch(into)
        if into._state == "open":
            raise RuntimeError("this batch is open: commit it or roll it back first")
        seqs, tokens = into.seq_lens.shape[0], into.tokens
        if len(counts) > seqs or sum(counts) > tokens or max(counts) > into.max_q_len:
            raise ValueError(
                f"{len(counts)} sequences, {sum(counts)} tokens, up to {max(counts)} of one; the "
                f"batch was made for seqs={seqs}, tokens={tokens}, max_q_len={into.max_q_len}"
            )
        return Shape(seqs, tokens, self._books.max_pages, into.cu_seqlens_q is not None)

    def _arrays(
        self,
        shape: Shape,
        tables: np.ndarray,
        sequences: tuple[PoolSequence, ...],
        counts: tuple[int, ...],
    ) -> dict[str, np.ndarray | None]:
        rings = None if self._memory.tails is None else self._books.rings
        return shape.fill(tables, sequences, counts, self._books.page_size, rings)

    def _put(self, arrays: dict[str, np.ndarray | None]) -> dict[str, Tensor | None]:
        return {name: None if x is None else self._memory.put(x) for name, x in arrays.items()}

    def commit(self, batch: PoolBatch) -> None:
        """The tokens of an open batch, which all layers have stored, belong to their sequences.

        Raises:
            RuntimeError: the batch is not open, or a layer has not stored it (PagedKVPool.store);
                the batch is still open then.
            ValueError: a batch of another pool.
        """
        self._close(batch, succeeded=True)

    def rollback(self, batch: PoolBatch) -> None:
        """The tokens of an open batch were never there; whether they were stored does not matter.

        Exact tokens that they have, or would have, driven out of the ring are read from their codes
        now: none for up to max_q_len new tokens per sequence. A page that was copied because others
        own it too stays copied.

        Raises:
            RuntimeError: the batch is not open.
            ValueError: a batch of another pool.
        """
        self._close(batch, succeeded=False)

    def _close(self, batch: PoolBatch, succeeded: bool) -> None:
        with self._lock:
            self._check_batch(batch)
            if batch._state != "open":
                raise RuntimeError(f"this batch is {batch._state}, not open")
            missing = batch._missing()
            if succeeded and missing:
                raise RuntimeError(
                    "this batch is not stored in all layers, these are missing: "
                    f"{_ranges(missing)}; call pool.store for them before it is committed"
                )
            self._books.close(batch, succeeded)

    def _check_batch(self, batch: PoolBatch) -> None:
        if not isinstance(batch, PoolBatch):
            raise TypeError(f"a batch must be a PoolBatch, got {type(batch).__name__}")
        if batch._owner is not self:
            raise ValueError("this batch belongs to another pool")


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers in short: "0, 2 to 5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    return ", ".join(" to ".join(map(str, run)) for run in runs)
