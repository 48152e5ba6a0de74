"""The books of a pool: which sequence owns which pages, on the host and without a tensor.

A page is free or has one or more owners. Every method expects the pool's lock to be held, and
raises before it changes anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torch_turboquant._checks import check_whole
from torch_turboquant.pool.batch import PoolBatch, PoolSequence
from torch_turboquant.tail import Rings


class PoolExhausted(RuntimeError):
    """No free page or no free sequence is left; everything is as it was before the call."""


@dataclass(frozen=True)
class PoolStatistics:
    """How full a pool is, and what sharing pages has saved; plain numbers of one moment.

    The fields from `most_pages` on count since the pool was made.
    """

    num_pages: int
    """Pages of the pool: used_pages + free_pages."""
    used_pages: int
    """Pages that sequences own, those of open batches included."""
    free_pages: int
    """Pages that nobody owns."""
    shared_pages: int
    """Used pages that several sequences own."""
    saved_pages: int
    """Pages that would be used in addition if no two sequences shared one."""
    sequences: int
    """Sequences, forks included."""
    tokens: int
    """Tokens of all sequences, each counted in every sequence that has it; without open batches."""
    most_pages: int
    """The largest number of used pages at a time."""
    most_sequences: int
    """The largest number of sequences at a time."""
    forks: int
    """Sequences that `fork` made."""
    forked_tokens: int
    """Tokens that these sequences began with, which nobody had to compute and store again."""
    copied_pages: int
    """Shared pages that a sequence copied before it appended to them or moved tokens in them."""


class Plan(NamedTuple):
    """What appending tokens to sequences takes."""

    sequences: tuple[PoolSequence, ...]
    counts: tuple[int, ...]
    """New tokens of each."""
    copies: list[tuple[int, int, int]]
    """(index of the sequence, column of its block table, page): pages that others own too. The
    sequence leaves the page and gets a copy."""
    runs: list[tuple[int, int, int]]
    """(index of the sequence, first column, end): new pages."""
    pages: int
    """Free pages that are needed in all."""


class NewPages(NamedTuple):
    """The pages that a plan is going to take; they are still free."""

    numbers: np.ndarray
    """int32 [plan.pages]: first those of the copies, then those of the runs."""
    tables: np.ndarray
    """int32 [sequences, pages]: block tables with the new pages."""
    copied: np.ndarray
    """int64 [copies]: pages to copy."""
    copies: np.ndarray
    """int64 [copies]: where they are copied to."""


class Places(NamedTuple):
    """Pages of a pool that held the tokens of a sequence, and what to know them again by."""

    books: Books
    """Of the pool."""
    pages: np.ndarray
    """int32, in the sequence's order."""
    stamps: np.ndarray
    """int64, the stamps that these pages had."""


class Books:
    """Block tables, owners of pages, free pages and free rows.

    Args:
        page_size: tokens.
        num_pages: of the pool.
        max_seqs: rows of the block tables and entries of the tails.
        max_seq_len: tokens of the longest sequence; None: as many as all pages hold.
        rings: of the tails; kept up to date here.
    """

    def __init__(
        self, page_size: int, num_pages: int, max_seqs: int, max_seq_len: int | None, rings: Rings
    ) -> None:
        self.page_size, self.num_pages, self.max_seqs = page_size, num_pages, max_seqs
        # without a limit of its own a sequence ends with the pages: that is exhaustion
        self.limit = max_seq_len
        self.max_seq_len = num_pages * page_size if max_seq_len is None else max_seq_len
        self.max_pages = self.pages_of(self.max_seq_len)
        self.rings = rings
        self.untouched = True  # no page was ever taken
        self.free_rows = list(range(max_seqs))[::-1]
        self.num_free = num_pages
        self._tables = np.zeros((max_seqs, self.max_pages), dtype=np.int32)
        self._owners = np.zeros(num_pages, dtype=np.int32)  # of each page; 0: free
        self._free = np.arange(num_pages, dtype=np.int32)[::-1].copy()  # a stack
        self.stamps = np.zeros(num_pages, dtype=np.int64)  # when each page was last written into
        self._writes = 0  # the last stamp
        self._tokens = self._most_pages = self._most_seqs = 0
        self._forks = self._forked_tokens = self._copied_pages = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        arrays = self._tables, self._owners, self._free, self.stamps
        return sum(array.nbytes for array in arrays)

    def statistics(self) -> PoolStatistics:
        owners, used = self._owners, self.num_pages - self.num_free
        return PoolStatistics(
            num_pages=self.num_pages,
            used_pages=used,
            free_pages=self.num_free,
            shared_pages=int((owners > 1).sum()),
            saved_pages=int(owners.sum(dtype=np.int64)) - used,
            sequences=self.max_seqs - len(self.free_rows),
            tokens=self._tokens,
            most_pages=self._most_pages,
            most_sequences=self._most_seqs,
            forks=self._forks,
            forked_tokens=self._forked_tokens,
            copied_pages=self._copied_pages,
        )

    def pages_of(self, length: int) -> int:
        """Pages that so many tokens take."""
        return -(-length // self.page_size)

    def pages(self, seq: PoolSequence) -> np.ndarray:
        """The pages of a sequence in order: int32, a view."""
        return self._tables[seq._row, : seq._num_pages]

    # ---- checks

    def check_mine(self, seq: PoolSequence) -> None:
        if not isinstance(seq, PoolSequence):
            raise TypeError(f"a sequence must be a PoolSequence, got {type(seq).__name__}")
        if seq._books is None:
            raise RuntimeError("this sequence was freed")
        if seq._books is not self:
            raise ValueError("this sequence belongs to another pool; see export and adopt")

    def check_idle(self, seq: PoolSequence) -> None:
        self.check_mine(seq)
        if seq._batch is not None:
            raise RuntimeError("this sequence is in an open batch: commit it or roll it back first")

    def check_each(self, sequences: Sequence[PoolSequence]) -> None:
        """Sequences that are going to change, each once."""
        for seq in sequences:
            self.check_idle(seq)
        if len(set(map(id, sequences))) < len(sequences):
            raise ValueError("a sequence is there twice")

    def check_length(self, length: int) -> None:
        if self.limit is not None and length > self.limit:
            raise ValueError(f"{length} tokens do not fit into max_seq_len={self.limit}")

    # ---- whole sequences

    def free_row(self) -> int:
        """The row that `add` takes next.

        Raises:
            PoolExhausted: all rows are in use.
        """
        if not self.free_rows:
            raise PoolExhausted(f"all {self.max_seqs} sequences of the pool (max_seqs) are in use")
        return self.free_rows[-1]

    def add(self) -> PoolSequence:
        """A new sequence without tokens, in the row `free_row`."""
        seq = PoolSequence(self, self.free_row())
        self.free_rows.pop()
        self._most_seqs = max(self._most_seqs, self.max_seqs - len(self.free_rows))
        return seq

    def add_fork(self, seq: PoolSequence) -> PoolSequence:
        """A new sequence that owns the same pages."""
        copy = self.add()
        shared = self.pages(seq)
        self._tables[copy._row, : seq._num_pages] = shared
        self._owners[shared] += 1
        copy._length, copy._num_pages = seq._length, seq._num_pages
        copy._dropped = seq._dropped
        self._tokens += seq._length
        self._forks += 1
        self._forked_tokens += seq._length
        self.rings.first[copy._row] = self.rings.first[seq._row]
        return copy

    def add_filled(
        self, pages: np.ndarray, new: np.ndarray, length: int, dropped: int, ring_first: int
    ) -> PoolSequence:
        """A new sequence of `length` tokens in the pages and new ones of `pages_again`."""
        seq = self.add()
        shared = np.delete(pages, new)
        self._owners[shared] += 1
        self._take(pages[new])
        self._tables[seq._row, : len(pages)] = pages
        seq._length, seq._dropped, seq._num_pages = length, dropped, len(pages)
        self._tokens += length
        self.rings.first[seq._row] = ring_first
        return seq

    def will_move(self, seq: PoolSequence) -> None:
        """The sequence's tokens are going to be moved within its pages."""
        self._stamp(self.pages(seq))

    def close_up(self, seq: PoolSequence, length: int) -> None:
        """Keeps `length` tokens, which have moved up, the last ones with their part of the ring."""
        dropped = seq._length - length
        seq._dropped += dropped
        seq._unmoved = seq._least = 0
        self.rings.first[seq._row] = max(self.rings.first[seq._row] - dropped, 0)
        self.cut(seq, length)

    def cut(self, seq: PoolSequence, length: int) -> None:
        """Keeps the first `length` tokens; pages that nobody owns any more become free."""
        keep = self.pages_of(length)
        self._drop(self._tables[seq._row, keep : seq._num_pages])
        self._tokens += length - seq._length
        seq._length, seq._num_pages = length, keep
        seq._unmoved, seq._least = min(seq._unmoved, length), min(seq._least, length)
        if length == 0:  # positions begin anew
            seq._dropped = 0
        self.rings.cut(seq._row, length)

    def remove(self, seq: PoolSequence) -> None:
        """Ends a sequence."""
        self.cut(seq, 0)
        self.free_rows.append(seq._row)
        seq._books = None

    # ---- new tokens

    def plan(self, sequences: Iterable[PoolSequence], new_tokens: int | Sequence[int]) -> Plan:
        """What these sequences need for so many new tokens each; changes nothing.

        Raises:
            RuntimeError: a sequence that was freed or is in an open batch.
            ValueError: no sequence, one of another pool or twice; numbers that do not fit.
        """
        sequences, counts = self._checked(sequences, new_tokens)
        left: Counter[int] = Counter()  # owners that pages are going to lose
        copies, runs, pages = [], [], 0
        for i, (seq, n) in enumerate(zip(sequences, counts, strict=True)):
            start, inside = divmod(seq._length, self.page_size)
            if inside:
                page = int(self._tables[seq._row, start])
                if self._owners[page] - left[page] > 1:
                    left[page] += 1
                    copies.append((i, start, page))
                start += 1
            stop = self.pages_of(seq._length + n)
            runs.append((i, start, stop))
            pages += stop - start
        return Plan(sequences, counts, copies, runs, pages + len(copies))

    def _checked(
        self, sequences: Iterable[PoolSequence], new_tokens: int | Sequence[int]
    ) -> tuple[tuple[PoolSequence, ...], tuple[int, ...]]:
        sequences = tuple(sequences)
        if not sequences:
            raise ValueError("no sequences, supported: 1 and more")
        counts = counts_of(sequences, new_tokens)
        if len(counts) != len(sequences):
            raise ValueError(f"new_tokens has {len(counts)} numbers for {len(sequences)} sequences")
        self.check_each(sequences)
        for seq, n in zip(sequences, counts, strict=True):
            if n < 1:
                raise ValueError(f"new_tokens holds {n}, supported: 1 and more")
            self.check_length(seq._length + n)
        return sequences, counts

    def new_pages(self, plan: Plan) -> NewPages:
        """The pages that `open` of this plan takes; changes nothing.

        Raises:
            PoolExhausted: too few free pages.
        """
        if plan.pages > self.num_free:
            raise PoolExhausted(
                f"{plan.pages} pages are needed for {sum(plan.counts)} new tokens of "
                f"{len(plan.sequences)} sequences, {self.num_free} of {self.num_pages} are free"
            )
        numbers = self._top(plan.pages)
        width = max(stop for _, _, stop in plan.runs)
        tables = self._tables[[s._row for s in plan.sequences], :width]
        copies = numbers[: len(plan.copies)]
        for (i, column, _), page in zip(plan.copies, copies, strict=True):
            tables[i, column] = page
        end = len(copies)
        for i, start, stop in plan.runs:
            tables[i, start:stop] = numbers[end : end + stop - start]
            end += stop - start
        copied = np.array([page for _, _, page in plan.copies], dtype=np.int64)
        return NewPages(numbers, tables, copied, copies.astype(np.int64))

    def open(self, plan: Plan, new: NewPages, batch: PoolBatch) -> None:
        """The batch's sequences own their new pages, and are in the batch."""
        self._take(new.numbers)
        rows = [s._row for s in plan.sequences]
        self._tables[rows, : new.tables.shape[1]] = new.tables
        self._stamp(self._appended(plan, new))
        for page in new.copied:  # one at a time: two sequences may leave the same page
            self._drop(np.array([page]))
        self._copied_pages += len(new.copied)
        for seq, n in zip(plan.sequences, plan.counts, strict=True):
            seq._num_pages = self.pages_of(seq._length + n)
            # now, not at the end: a batch that fails has overwritten its part of the ring too
            self.rings.stored(seq._row, seq._length + n)
            seq._batch = batch
        batch._open(plan.sequences, plan.counts)

    def close(self, batch: PoolBatch, succeeded: bool) -> None:
        """The batch's tokens belong to their sequences, or were never there."""
        for seq, n in zip(batch.sequences, batch.new_tokens, strict=True):
            if succeeded:
                seq._length += n
                self._tokens += n
            else:
                self.cut(seq, seq._length)
            seq._batch = None
        batch._state = "closed"

    # ---- pages of one's own

    def shared_pages(
        self, sequences: Sequence[PoolSequence], length: int
    ) -> list[tuple[PoolSequence, int, int]]:
        """(sequence, column of its block table, page): what sequences have to leave so that each is
        the only owner of the pages of its first `length` tokens; changes nothing."""
        left: Counter[int] = Counter()  # owners that pages are going to lose
        shared = []
        for seq in sequences:
            pages = self.pages(seq)[: self.pages_of(length)]
            for column in np.flatnonzero(self._owners[pages] > 1).tolist():
                page = int(pages[column])
                if self._owners[page] - left[page] > 1:
                    left[page] += 1
                    shared.append((seq, column, page))
        return shared

    def leave(self, shared: list[tuple[PoolSequence, int, int]], copies: np.ndarray) -> None:
        """The sequences own `copies`, pages that `top` has given, instead of shared ones."""
        self._take(copies)
        for (seq, column, page), copy in zip(shared, copies, strict=True):
            self._tables[seq._row, column] = copy
            self._drop(np.array([page]))  # one at a time: two sequences may leave the same page
        self._copied_pages += len(shared)

    # ---- pages

    def places(self, seq: PoolSequence) -> Places:
        """Where the tokens of a sequence are."""
        pages = self.pages(seq).copy()
        return Places(self, pages, self.stamps[pages])

    def is_at(self, seq: PoolSequence, places: Places) -> bool:
        """Whether the sequence is where it was, and nothing was written there."""
        now = self.places(seq)
        return np.array_equal(now.pages, places.pages) and np.array_equal(now.stamps, places.stamps)

    def still_there(self, places: Places | None) -> np.ndarray:
        """Pages of a sequence that was swapped out which hold its tokens and have an owner: bool.

        None of them if they are another pool's.
        """
        if places is None or places.books is not self:
            return np.zeros(0 if places is None else len(places.pages), dtype=bool)
        same = self.stamps[places.pages] == places.stamps
        return same & (self._owners[places.pages] > 0)

    def pages_again(self, length: int, places: Places | None) -> tuple[np.ndarray, np.ndarray]:
        """The pages of a sequence that comes into the pool; the new ones are still free.

        Args:
            length: its tokens.
            places: where its pages were; None: not in a pool.

        Returns:
            int32, the pages in order; int64, which of them are new.

        Raises:
            PoolExhausted: too few free pages.
        """
        count = self.pages_of(length)
        there = np.zeros(count, dtype=bool) if places is None else self.still_there(places)
        new = np.flatnonzero(~there)
        pages = np.zeros(count, dtype=np.int32) if places is None else places.pages.copy()
        pages[new] = self.top(len(new), length)
        return pages, new

    def top(self, count: int, length: int) -> np.ndarray:
        """The next `count` free pages, for `length` tokens: int32; they are still free.

        Raises:
            PoolExhausted: too few free pages.
        """
        if count > self.num_free:
            raise PoolExhausted(
                f"{count} pages are needed for {length} tokens, {self.num_free} of "
                f"{self.num_pages} are free"
            )
        return self._top(count)

    def _top(self, count: int) -> np.ndarray:
        return self._free[self.num_free - count : self.num_free][::-1].copy()

    def _take(self, top: np.ndarray) -> None:
        """The pages on top of the stack get their first owner."""
        self.untouched = self.untouched and len(top) == 0
        self._owners[top] = 1
        self._stamp(top)
        self.num_free -= len(top)
        self._most_pages = max(self._most_pages, self.num_pages - self.num_free)

    def _stamp(self, pages: np.ndarray) -> None:
        """Something is going to be written into these pages."""
        self._writes += 1
        self.stamps[pages] = self._writes

    def _appended(self, plan: Plan, new: NewPages) -> np.ndarray:
        """The pages, not all of them new, that get the plan's first tokens."""
        starts = [seq._length // self.page_size for seq in plan.sequences]
        return new.tables[np.arange(len(starts)), starts]

    def _drop(self, pages: np.ndarray) -> None:
        """One owner less for each of these pages, all different."""
        self._owners[pages] -= 1
        gone = pages[self._owners[pages] == 0]
        self._free[self.num_free : self.num_free + len(gone)] = gone
        self.num_free += len(gone)


def counts_of(
    sequences: Sequence[PoolSequence], new_tokens: int | Sequence[int]
) -> tuple[int, ...]:
    """New tokens of each sequence; one number counts for all."""
    counts = new_tokens if isinstance(new_tokens, Iterable) else [new_tokens] * len(sequences)
    counts = list(counts)
    for n in counts:
        check_whole(new_tokens=n)
    return tuple(int(n) for n in counts)
