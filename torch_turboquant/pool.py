"""A pool of packed pages that many sequences share: the cache of a serving loop.

One pool holds all layers of a model: per layer the pages [num_pages, kv_heads, record_bytes] and
the exact tail [max_seqs, kv_heads, sink_tokens + ring, 2, head_dim]. A sequence is a list of page
numbers, valid in all layers, and a row of the tails. All memory is taken when the pool is made, and
`PagedKVPool.bytes_needed` says beforehand how much that is.

    pool = PagedKVPool(config, num_layers=32, num_kv_heads=8, num_pages=4096, max_seqs=64,
                       dtype=torch.bfloat16)
    seq = pool.allocate()
    with pool.reserve([seq, ...], 1) as batch:          # pages for one new token each, or nothing
        for layer in range(32):
            pool.store(layer, k, v, batch)              # [tokens, kv_heads, head_dim]
            out, lse = pool.attend(layer, q, batch)     # [tokens, q_heads, head_dim]
    pool.free(seq)                                      # the tokens counted when `with` was left

Sharing. `fork` makes a second sequence of the same tokens. It copies no page: pages count their
owners, and whoever appends to a page that has several, which can only be the last page of a
sequence, gets a copy of it first. Only the row of the tail is copied at once.

Nothing happens by halves. What cannot be done (no page left, a sequence that was freed, pages of
another format) raises before anything has changed. A batch that is rolled back leaves its
sequences as they were.

Threads. Every method may be called from any thread; a lock guards the books. A sequence is in one
open batch at a time, so `store` and `attend` of two batches never meet and run without the lock.
On CUDA, work with one pool from one stream, or order the streams: a page that one sequence frees
is another's next page.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant.config import CacheConfig
from torch_turboquant.format import FORMAT_VERSION, own_bytes
from torch_turboquant.ops.attention import paged_attention
from torch_turboquant.ops.cache import (
    CacheTables,
    Tail,
    allocate_cache,
    allocate_tail,
    cache_load,
    cache_store,
    make_tables,
    ring_first_rolled_back,
    ring_first_stored,
    ring_rows,
)

if TYPE_CHECKING:
    from typing_extensions import Self


class PoolExhausted(RuntimeError):
    """No free page or no free sequence is left; everything is as it was before the call."""


class PoolBytes(NamedTuple):
    """Bytes of all tensors and arrays that a pool holds."""

    pages: int
    """Packed keys and values of all layers."""
    tail: int
    """Exact first and last tokens of all sequences, all layers."""
    tables: int
    """Signs, levels, steps and centers of all layers."""
    host: int
    """Block tables and reference counts, in the CPU's memory."""

    @property
    def device(self) -> int:
        """Bytes on the pool's device: all but `host`."""
        return self.pages + self.tail + self.tables


class PoolSequence:
    """A sequence of a pool, made by allocate, fork and adopt, valid until it is freed."""

    __slots__ = ("_batch", "_length", "_num_pages", "_pool", "_ring_first", "_row")

    def __init__(self, pool: PagedKVPool, row: int) -> None:
        self._pool: PagedKVPool | None = pool  # None: freed
        self._row = row  # of the block tables and of the tails
        self._length = 0
        self._num_pages = 0
        self._ring_first = 0  # first position that the ring of the tail holds
        self._batch: PoolBatch | None = None

    @property
    def length(self) -> int:
        """Tokens, without those of a batch that is still open."""
        return self._length

    @property
    def batch(self) -> PoolBatch | None:
        """The open batch that the sequence is in."""
        return self._batch

    def __repr__(self) -> str:
        state = "freed" if self._pool is None else f"{self._length} tokens"
        return f"<PoolSequence {state}>"


class PoolBatch:
    """The new tokens of some sequences, as the ops want them; made by reserve or empty_batch.

    Used as a context manager it is committed at the end of the block, and rolled back if the block
    raises. Tensors are on the pool's device; nobody changes them, except `reserve(into=batch)`.
    """

    slot_mapping: Tensor
    """int64 [tokens]; -1: padding."""
    block_table: Tensor
    """int32 [seqs, pages]; entries past the pages of a sequence have no meaning."""
    seq_lens: Tensor
    """int32 [seqs], with the new tokens; 0: padding."""
    cu_seqlens_q: Tensor | None
    """int32 [seqs + 1]; None: every sequence has one new token."""
    tail_slots: Tensor | None
    """int64 [seqs]; -1: padding. None: the config has no tail."""
    tail_valid: Tensor | None
    """int32 [max_seqs, 2]. None: the config has no tail."""
    max_q_len: int
    """An upper bound of the new tokens of a sequence."""
    sequences: tuple[PoolSequence, ...]
    """Without padding."""
    new_tokens: tuple[int, ...]
    """Of each sequence."""

    def __init__(self, pool: PagedKVPool, max_q_len: int) -> None:
        self._pool = pool
        self._state = "empty"  # then "open", then "closed", and so on if it is used again
        self.max_q_len = max_q_len
        self.sequences, self.new_tokens = (), ()

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
        if self._state == "open":
            (self._pool.commit if kind is None else self._pool.rollback)(self)

    def __repr__(self) -> str:
        return (
            f"<PoolBatch {self._state}: {len(self.sequences)} of {self.seq_lens.shape[0]} "
            f"sequences, {sum(self.new_tokens)} of {self.tokens} tokens>"
        )


@dataclass(frozen=True)
class ExportedSequence:
    """A sequence outside of a pool; the same tokens give the same bytes in every pool."""

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


class PagedKVPool:
    """Packed pages of many sequences in all layers of a model; see the text of this file.

    Attributes (not to be assigned to):
        configs: tuple of CacheConfig, one per layer.
        pages: per layer, uint8 [num_pages, num_kv_heads, record_bytes].
        tails: per layer, [max_seqs, num_kv_heads, sink_tokens + ring, 2, head_dim]; None without.
        tables: CacheTables per layer.
        bytes: PoolBytes.
        fingerprint: what stored pages depend on: format version, configs (seed included), levels,
            centers; plain data. Pages join a pool only if it is the same.
        page_size, num_pages, num_kv_heads, max_seqs, max_seq_len, max_q_len, dtype, device.
    """

    def __init__(
        self,
        config: CacheConfig | Sequence[CacheConfig],
        *,
        num_layers: int,
        num_kv_heads: int,
        num_pages: int,
        max_seqs: int,
        dtype: torch.dtype,
        max_seq_len: int | None = None,
        max_q_len: int = 1,
        centers: Sequence[Tensor | None] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Takes all memory of the pool.

        Args:
            config: of all layers, or one per layer with the same page_size, sink_tokens and
                recent_window.
            num_layers: of the model.
            num_kv_heads: of every layer.
            num_pages: pages of page_size tokens that all sequences share.
            max_seqs: sequences at a time, forks included.
            dtype: of the model's keys and values: float32, float16 or bfloat16.
            max_seq_len: tokens of the longest sequence; None: as many as all pages hold. The
                block tables of padded batches are this wide.
            max_q_len: new tokens per sequence that one `attend` takes, and that can be taken back
                without loss (truncate).
            centers: see set_centers.
            device: where pages, tails and batches are.

        Raises:
            TypeError: another dtype.
            ValueError: numbers below 1, configs that do not fit together, centers of another shape.
        """
        sizes = (num_layers, num_kv_heads, num_pages, max_seqs, dtype, max_seq_len, max_q_len)
        self.configs = _checked_configs(config, *sizes)
        first = self.configs[0]
        self.page_size, self.num_pages = first.page_size, num_pages
        self.num_kv_heads, self.max_seqs, self.dtype = num_kv_heads, max_seqs, dtype
        self.max_seq_len = num_pages * self.page_size if max_seq_len is None else max_seq_len
        self._limited = max_seq_len is not None
        self.max_q_len = max_q_len
        self._sinks, self._ring = first.sink_tokens, ring_rows(first, max_q_len)
        self._max_pages = self._pages_of(self.max_seq_len)

        self._lock = threading.Lock()
        self._block_tables = np.zeros((max_seqs, self._max_pages), dtype=np.int32)
        self._owners = np.zeros(num_pages, dtype=np.int32)  # of each page; 0: free
        self._free = np.arange(num_pages, dtype=np.int32)[::-1].copy()  # a stack
        self._num_free = num_pages
        self._free_rows = list(range(max_seqs))[::-1]
        self._fresh = True  # no page was ever taken

        self.device = torch.empty(0, device=device).device  # "cuda" is one device, with a number
        self._set_tables(centers)
        self.pages: list[Tensor] = [
            allocate_cache(c, num_pages, num_kv_heads, self.device) for c in self.configs
        ]
        self.tails: list[Tensor] | None = None
        if first.has_tail:
            self.tails = [
                allocate_tail(c, max_seqs, num_kv_heads, dtype, max_q_len, self.device)
                for c in self.configs
            ]

    # ---- sizes

    @classmethod
    def bytes_needed(
        cls,
        config: CacheConfig | Sequence[CacheConfig],
        *,
        num_layers: int,
        num_kv_heads: int,
        num_pages: int,
        max_seqs: int,
        dtype: torch.dtype,
        max_seq_len: int | None = None,
        max_q_len: int = 1,
        centers: bool | Sequence[Tensor | None] | None = None,
        device: torch.device | str = "cpu",
    ) -> PoolBytes:
        """The `bytes` of a pool made with the same arguments, without making it.

        Args:
            centers: as for the pool, or True for one per layer with scales of channels.
            device: has no influence.

        Raises:
            TypeError, ValueError: as the pool.
        """
        sizes = (num_layers, num_kv_heads, num_pages, max_seqs, dtype, max_seq_len, max_q_len)
        configs = _checked_configs(config, *sizes)
        first = configs[0]
        rows = first.sink_tokens + ring_rows(first, max_q_len) if first.has_tail else 0
        tokens = num_pages * first.page_size if max_seq_len is None else max_seq_len
        if isinstance(centers, bool):
            rows_of_centers = [3 * centers * num_kv_heads] * len(configs)
        else:
            checked = _checked_centers(centers, configs, num_kv_heads)
            rows_of_centers = [0 if x is None else x.numel() // x.shape[-1] for x in checked]
        constants = {c: _nbytes(make_tables(c, 0)) for c in set(configs)}
        pages = tail = tables = 0
        for c, center_rows in zip(configs, rows_of_centers, strict=True):
            pages += num_pages * num_kv_heads * c.record_bytes
            tail += max_seqs * num_kv_heads * rows * 2 * c.head_dim * dtype.itemsize
            tables += constants[c] + center_rows * c.head_dim * 4
        host = 4 * (max_seqs * -(-tokens // first.page_size) + 2 * num_pages)
        return PoolBytes(pages, tail, tables, host)

    @property
    def bytes(self) -> PoolBytes:
        """Bytes of everything that the pool holds. A batch adds its index tensors."""
        host = self._block_tables.nbytes + self._owners.nbytes + self._free.nbytes
        return PoolBytes(
            _nbytes(self.pages),
            _nbytes(self.tails or ()),
            sum(_nbytes(tables) for tables in self.tables),
            host,
        )

    @property
    def free_pages(self) -> int:
        """Pages that no sequence owns."""
        return self._num_free

    @property
    def free_seqs(self) -> int:
        """Sequences that allocate, fork and adopt can still make."""
        return len(self._free_rows)

    def pages_needed(
        self, sequences: Sequence[PoolSequence], new_tokens: int | Sequence[int]
    ) -> int:
        """Free pages that `reserve` of the same arguments would take now, copies included.

        Raises:
            as reserve, but never PoolExhausted.
        """
        with self._lock:
            sequences, counts = self._checked(sequences, new_tokens)
            return self._plan(sequences, counts).pages

    def page_numbers(self, seq: PoolSequence) -> list[int]:
        """The pages of a sequence in order, those of an open batch included.

        Raises:
            RuntimeError: a sequence that was freed.
            ValueError: a sequence of another pool.
        """
        with self._lock:
            self._check_mine(seq)
            return self._block_tables[seq._row, : seq._num_pages].tolist()

    def __repr__(self) -> str:
        held = self.bytes
        return (
            f"PagedKVPool({len(self.configs)} layers x {self.num_kv_heads} KV heads, "
            f"{self.num_pages} pages of {self.page_size} tokens, {self.max_seqs} sequences, "
            f"{self.device}: {held.device:,} bytes = {held.pages:,} pages + {held.tail:,} tail + "
            f"{held.tables:,} tables; {self._num_free} pages and {len(self._free_rows)} sequences "
            "free)"
        )

    # ---- constants

    def set_centers(self, centers: Sequence[Tensor | None] | None) -> None:
        """Fixes what is subtracted from keys before they are encoded, before the first page is.

        Args:
            centers: [num_kv_heads, head_dim] per layer, any floating dtype, or [3, num_kv_heads,
                head_dim] of scaled_center; None: no center, for one layer or for all.

        Raises:
            RuntimeError: a page was taken before.
            ValueError: another number of layers, another shape, NaN or infinity.
        """
        with self._lock:
            if not self._fresh:
                raise RuntimeError(
                    "centers are fixed before the pool's first page is taken: make another pool"
                )
            self._set_tables(centers)

    def _set_tables(self, centers: Sequence[Tensor | None] | None) -> None:
        centers = _checked_centers(centers, self.configs, self.num_kv_heads)
        self.tables: list[CacheTables] = [
            make_tables(c, layer, self.device, center)
            for layer, (c, center) in enumerate(zip(self.configs, centers, strict=True))
        ]
        self.fingerprint: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "kv_heads": self.num_kv_heads,
            "tail_dtype": str(self.dtype).removeprefix("torch.")
            if self.configs[0].has_tail
            else None,
            "layers": [
                {
                    **asdict(c),
                    "key_levels": _digest(tables.key_levels),
                    "value_levels": _digest(tables.value_levels),
                    "center": _digest(tables.center),
                }
                for c, tables in zip(self.configs, self.tables, strict=True)
            ],
        }

    # ---- sequences

    def allocate(self) -> PoolSequence:
        """A new sequence without tokens; it takes no page yet.

        Raises:
            PoolExhausted: max_seqs sequences are there already.
        """
        with self._lock:
            return self._new_sequence()

    def fork(self, seq: PoolSequence) -> PoolSequence:
        """A new sequence of the same tokens: pages are shared, the row of the tail is copied.

        Raises:
            PoolExhausted: max_seqs sequences are there already.
            RuntimeError: a sequence that was freed or is in an open batch.
            ValueError: a sequence of another pool.
        """
        with self._lock:
            self._check_idle(seq)
            row = self._free_row()
            for tail in self.tails or ():
                tail[row] = tail[seq._row]
            copy = self._new_sequence()
            mine = self._block_tables[seq._row, : seq._num_pages]
            self._block_tables[row, : seq._num_pages] = mine
            self._owners[mine] += 1
            copy._length, copy._num_pages = seq._length, seq._num_pages
            copy._ring_first = seq._ring_first
            return copy

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
            self._check_idle(seq)
            if not 0 <= length <= seq._length:
                raise ValueError(f"length is {length}, supported: 0 to {seq._length}")
            self._cut(seq, length)

    def free(self, seq: PoolSequence) -> None:
        """Ends a sequence: pages that nobody else owns become free.

        Raises:
            RuntimeError: a sequence that was freed or is in an open batch.
            ValueError: a sequence of another pool.
        """
        with self._lock:
            self._check_idle(seq)
            self._cut(seq, 0)
            self._free_rows.append(seq._row)
            seq._pool = None

    # ---- batches

    def empty_batch(self, seqs: int, tokens: int | None = None, max_q_len: int = 1) -> PoolBatch:
        """A batch of padding whose tensors `reserve(into=...)` fills: for CUDA graphs.

        Addresses and shapes stay for the batch's life. store and attend accept it as it is (they
        store nothing and give zeros), so that a graph can be captured before there is a sequence.

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
        batch = PoolBatch(self, max_q_len)
        none, shape = np.zeros((0, 0), dtype=np.int32), (seqs, self._max_pages)
        for name, array in self._index(none, (), (), shape, tokens, max_q_len > 1).items():
            setattr(batch, name, None if array is None else self._put(array))
        return batch

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
            sequences, counts = self._checked(sequences, new_tokens)
            if into is None:
                seqs, tokens, with_cu = len(sequences), sum(counts), max(counts) > 1
            else:
                seqs, tokens, with_cu = self._checked_room(into, counts)
            plan = self._plan(sequences, counts)
            if plan.pages > self._num_free:
                raise PoolExhausted(
                    f"{plan.pages} pages are needed for {sum(counts)} new tokens of "
                    f"{len(sequences)} sequences, {self._num_free} of {self.num_pages} are free"
                )
            # from here on only the device can fail, and the books change last
            width = max(stop for _, _, stop in plan.runs)
            mine = [s._row for s in sequences]
            rows = self._block_tables[mine, :width]
            fresh = self._top(plan.pages)
            copies = fresh[: len(plan.copies)]
            end = len(copies)
            for (row, column, _), page in zip(plan.copies, copies, strict=True):
                rows[row, column] = page
            for row, start, stop in plan.runs:
                rows[row, start:stop] = fresh[end : end + stop - start]
                end += stop - start
            columns = width if into is None else self._max_pages
            index = self._index(rows, sequences, counts, (seqs, columns), tokens, with_cu)
            batch = PoolBatch(self, max(counts)) if into is None else into
            for name, array in index.items():
                if array is None:
                    setattr(batch, name, None)
                elif into is None:
                    setattr(batch, name, self._put(array))
                else:
                    getattr(batch, name).copy_(_host(array, self.device), non_blocking=True)
            copied = np.array([page for _, _, page in plan.copies], dtype=np.int64)
            self._copy_pages(copied, copies.astype(np.int64))

            self._fresh = False
            self._owners[fresh] = 1
            self._num_free -= plan.pages
            self._block_tables[mine, :width] = rows
            for page in copied:  # one at a time: two sequences may leave the same page
                self._drop(np.array([page]))
            for seq, n in zip(sequences, counts, strict=True):
                seq._num_pages = self._pages_of(seq._length + n)
                # now, not at the end: a batch that fails has overwritten its part of the ring too
                seq._ring_first = ring_first_stored(seq._ring_first, seq._length + n, self._ring)
                seq._batch = batch
            batch.sequences, batch.new_tokens, batch._state = sequences, counts, "open"
            return batch

    def commit(self, batch: PoolBatch) -> None:
        """The tokens of an open batch, which all layers have stored, belong to their sequences.

        Raises:
            RuntimeError: the batch is not open.
            ValueError: a batch of another pool.
        """
        with self._lock:
            self._check_open(batch)
            for seq, n in zip(batch.sequences, batch.new_tokens, strict=True):
                seq._length += n
                seq._batch = None
            batch._state = "closed"

    def rollback(self, batch: PoolBatch) -> None:
        """The tokens of an open batch were never there; whether they were stored does not matter.

        Exact tokens that they have, or would have, driven out of the ring are read from their codes
        now: none for up to max_q_len new tokens per sequence. A page that was copied because others
        own it too stays copied.

        Raises:
            RuntimeError: the batch is not open.
            ValueError: a batch of another pool.
        """
        with self._lock:
            self._check_open(batch)
            for seq in batch.sequences:
                self._cut(seq, seq._length)
                seq._batch = None
            batch._state = "closed"

    # ---- one layer

    def store(self, layer: int, k: Tensor, v: Tensor, batch: PoolBatch) -> None:
        """Encodes the new keys and values of one layer (cache_store).

        Args:
            layer: 0 to num_layers - 1.
            k, v: [batch.tokens, num_kv_heads, head_dim], of the pool's dtype; rows of padding are
                ignored.
            batch: open, or empty.

        Raises:
            RuntimeError: the batch was committed or rolled back.
            TypeError, ValueError: as cache_store; another pool's batch; no such layer.
        """
        self._check_usable(layer, batch)
        _checks.check_dtype("k", k, (self.dtype,))
        cache_store(
            k,
            v,
            self.pages[layer],
            batch.slot_mapping,
            self.configs[layer],
            self.tables[layer],
            tail=self._tail(layer, batch),
            seq_lens=batch.seq_lens,
            cu_seqlens_q=batch.cu_seqlens_q,
        )

    def attend(
        self, layer: int, q: Tensor, batch: PoolBatch, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Causal attention of the batch's tokens in one layer, after `store` (paged_attention).

        Args:
            layer: 0 to num_layers - 1.
            q: [batch.tokens, q_heads, head_dim], of the pool's dtype.
            batch: open, or empty.
            options: softmax_scale, sliding_window, soft_cap, sink_logits, out and lse of
                paged_attention.

        Returns:
            out: [batch.tokens, q_heads, head_dim]; lse: float32 [batch.tokens, q_heads]. Rows of
            padding are 0 and -inf.

        Raises:
            RuntimeError: the batch was committed or rolled back.
            TypeError, ValueError: as paged_attention; another pool's batch; no such layer; more
                than max_q_len new tokens per sequence where there is a tail.
        """
        self._check_usable(layer, batch)
        if self.tails is not None and batch.max_q_len > self.max_q_len:
            raise ValueError(
                f"the batch has up to {batch.max_q_len} new tokens per sequence, supported: "
                f"max_q_len = {self.max_q_len} of the pool; append longer texts in pieces"
            )
        return paged_attention(
            q,
            self.pages[layer],
            batch.block_table,
            batch.seq_lens,
            self.configs[layer],
            self.tables[layer],
            cu_seqlens_q=batch.cu_seqlens_q,
            max_q_len=batch.max_q_len,
            tail=self._tail(layer, batch),
            **options,
        )

    def append(
        self,
        sequences: Sequence[PoolSequence],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        new_tokens: int | Sequence[int] = 1,
    ) -> None:
        """reserve, store of all layers, commit: for tokens whose attention was computed elsewhere.

        Args:
            sequences, new_tokens: as reserve.
            keys, values: per layer, [tokens, num_kv_heads, head_dim].

        Raises:
            as reserve and store, before anything is written.
        """
        if not len(keys) == len(values) == len(self.configs):
            raise ValueError(
                f"keys and values of {len(keys)} and {len(values)} layers, expected "
                f"{len(self.configs)}"
            )
        tokens = sum(_counts(sequences, new_tokens))
        for c, k, v in zip(self.configs, keys, values, strict=True):
            for name, t in (("k", k), ("v", v)):  # all layers before the first is written
                _checks.check_dtype(name, t, (self.dtype,))
                _checks.check_shape(name, t, (tokens, self.num_kv_heads, c.head_dim))
                _checks.check_unit_stride(name, t)
                if t.device != self.device:
                    raise ValueError(f"{name} is on {t.device}, the pool on {self.device}")
        with self.reserve(sequences, new_tokens) as batch:
            for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
                self.store(layer, k, v, batch)

    def load(
        self, layer: int, seq: PoolSequence, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """The decoded pages of a sequence in one layer (cache_load).

        Returns:
            k, v: [seq.length, num_kv_heads, head_dim] of `dtype`, None: the pool's.

        Raises:
            RuntimeError: a sequence that was freed.
            ValueError: a sequence of another pool; no such layer.
        """
        self._check_layer(layer)
        with self._lock:
            self._check_mine(seq)
            table = self._put(self._block_tables[seq._row, None, : seq._num_pages].copy())
            length = seq._length
        k, v = cache_load(
            self.pages[layer],
            table,
            self._put(np.array([length], dtype=np.int32)),
            self.configs[layer],
            self.tables[layer],
            length,
            self.dtype if dtype is None else dtype,
        )
        return k[0], v[0]

    # ---- between pools

    def export(self, seq: PoolSequence) -> ExportedSequence:
        """A copy of a sequence, on the pool's device, that `adopt` of a like pool takes.

        Raises:
            RuntimeError: a sequence that was freed or is in an open batch.
            ValueError: a sequence of another pool.
        """
        with self._lock:
            self._check_idle(seq)
            numbers = self._block_tables[seq._row, : seq._num_pages].astype(np.int64)
            chosen = self._put(numbers)
            pages = tuple(p.index_select(0, chosen) for p in self.pages)
            inside = seq._length % self.page_size
            for part, c in zip(pages, self.configs, strict=True):
                if inside:  # what earlier owners of the page have left does not leave the pool
                    used = np.zeros(c.record_bytes, dtype=np.uint8)
                    for token in range(inside):
                        used[own_bytes(c.record, token)] = 1
                    part[-1] *= self._put(used)
            exact: tuple[Tensor, ...] = ()
            if self.tails is not None:
                held = self._put(self._tail_rows(seq._length, seq._ring_first))
                exact = tuple(tail[seq._row].index_select(1, held) for tail in self.tails)
            fingerprint = deepcopy(self.fingerprint)
            return ExportedSequence(fingerprint, seq._length, seq._ring_first, pages, exact)

    def adopt(self, exported: ExportedSequence) -> PoolSequence:
        """A new sequence with the pages of `exported`, which may be on any device.

        Pools may differ in their numbers of pages and sequences, in max_seq_len and max_q_len; all
        else must be the same. With a smaller max_q_len the new ring keeps the last tokens.

        Raises:
            ValueError: another fingerprint, the text names all differences; tensors that do not fit
                the fingerprint; more than max_seq_len tokens.
            PoolExhausted: too few free pages, or no free sequence; nothing has changed.
        """
        with self._lock:
            found = _differences(exported.fingerprint, self.fingerprint)
            if found:
                raise ValueError("these pages do not fit this pool: " + "; ".join(found))
            self._check_exported(exported)
            length, count = exported.length, self._pages_of(exported.length)
            self._check_length(length)
            first = ring_first_stored(exported.ring_first, length, self._ring)
            places = self._tail_rows(length, first)
            row = self._free_row()
            if count > self._num_free:
                raise PoolExhausted(
                    f"{count} pages are needed for {length} tokens, {self._num_free} of "
                    f"{self.num_pages} are free"
                )
            fresh = self._top(count)
            chosen = self._put(fresh.astype(np.int64))
            for mine, part in zip(self.pages, exported.pages, strict=True):
                mine.index_copy_(0, chosen, part.to(self.device))
            if self.tails is not None:
                sinks = min(length, self._sinks)
                on = self._put(places)
                for tail, part in zip(self.tails, exported.exact, strict=True):
                    recent = part[:, part.shape[1] - (len(places) - sinks) :]
                    part = torch.cat([part[:, :sinks], recent], dim=1)
                    tail[row].index_copy_(1, on, part.to(self.device))

            seq = self._new_sequence()
            self._fresh = self._fresh and count == 0
            self._owners[fresh] = 1
            self._num_free -= count
            self._block_tables[row, :count] = fresh
            seq._length, seq._num_pages, seq._ring_first = length, count, first
            return seq

    def _check_exported(self, exported: ExportedSequence) -> None:
        length = exported.length
        if not 0 <= exported.ring_first <= length:
            raise ValueError(
                f"the exported sequence has length {length} and ring_first {exported.ring_first}, "
                "supported: 0 <= ring_first <= length"
            )
        layers, count = len(self.configs), self._pages_of(length)
        held = len(self._positions(length, exported.ring_first))
        for name, parts, expected in (
            ("pages", exported.pages, layers),
            ("exact", exported.exact, 0 if self.tails is None else layers),
        ):
            if len(parts) != expected:
                raise ValueError(f"{name} has tensors of {len(parts)} layers, expected {expected}")
        for c, pages in zip(self.configs, exported.pages, strict=True):
            _checks.check_dtype("pages", pages, (torch.uint8,))
            _checks.check_shape("pages", pages, (count, self.num_kv_heads, c.record_bytes))
        for c, exact in zip(self.configs, exported.exact, strict=False):
            _checks.check_dtype("exact", exact, (self.dtype,))
            _checks.check_shape("exact", exact, (self.num_kv_heads, held, 2, c.head_dim))

    # ---- the books; with the lock held

    def _pages_of(self, length: int) -> int:
        return -(-length // self.page_size)

    def _check_mine(self, seq: PoolSequence) -> None:
        if seq._pool is None:
            raise RuntimeError("this sequence was freed")
        if seq._pool is not self:
            raise ValueError("this sequence belongs to another pool; see export and adopt")

    def _check_idle(self, seq: PoolSequence) -> None:
        self._check_mine(seq)
        if seq._batch is not None:
            raise RuntimeError("this sequence is in an open batch: commit it or roll it back first")

    def _check_open(self, batch: PoolBatch) -> None:
        self._check_batch(batch)
        if batch._state != "open":
            raise RuntimeError(f"this batch is {batch._state}, not open")

    def _check_batch(self, batch: PoolBatch) -> None:
        if batch._pool is not self:
            raise ValueError("this batch belongs to another pool")

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < len(self.configs):
            raise ValueError(f"layer is {layer}, supported: 0 to {len(self.configs) - 1}")

    def _check_usable(self, layer: int, batch: PoolBatch) -> None:
        self._check_layer(layer)
        self._check_batch(batch)
        if batch._state == "closed":
            raise RuntimeError("this batch was committed or rolled back: its pages are not its own")

    def _check_length(self, length: int) -> None:
        # without a limit of its own a sequence ends with the pages: that is exhaustion
        if self._limited and length > self.max_seq_len:
            raise ValueError(f"{length} tokens do not fit into max_seq_len={self.max_seq_len}")

    def _checked(
        self, sequences: Iterable[PoolSequence], new_tokens: int | Sequence[int]
    ) -> tuple[tuple[PoolSequence, ...], tuple[int, ...]]:
        sequences = tuple(sequences)
        if not sequences:
            raise ValueError("no sequences, supported: 1 and more")
        counts = _counts(sequences, new_tokens)
        if len(counts) != len(sequences):
            raise ValueError(f"new_tokens has {len(counts)} numbers for {len(sequences)} sequences")
        for seq, n in zip(sequences, counts, strict=True):
            self._check_idle(seq)
            if n < 1:
                raise ValueError(f"new_tokens holds {n}, supported: 1 and more")
            self._check_length(seq._length + n)
        if len(set(map(id, sequences))) < len(sequences):
            raise ValueError("a sequence is there twice")
        return sequences, counts

    def _checked_room(self, into: PoolBatch, counts: tuple[int, ...]) -> tuple[int, int, bool]:
        """Rows, tokens and whether there is a cu_seqlens_q of a batch that takes these counts."""
        self._check_batch(into)
        if into._state == "open":
            raise RuntimeError("this batch is open: commit it or roll it back first")
        seqs, tokens = into.seq_lens.shape[0], into.tokens
        if len(counts) > seqs or sum(counts) > tokens or max(counts) > into.max_q_len:
            raise ValueError(
                f"{len(counts)} sequences, {sum(counts)} tokens, up to {max(counts)} of one; the "
                f"batch was made for seqs={seqs}, tokens={tokens}, max_q_len={into.max_q_len}"
            )
        return seqs, tokens, into.cu_seqlens_q is not None

    def _plan(self, sequences: tuple[PoolSequence, ...], counts: tuple[int, ...]) -> _Plan:
        left: Counter[int] = Counter()  # owners that pages are going to lose
        copies, runs, pages = [], [], 0
        for row, (seq, n) in enumerate(zip(sequences, counts, strict=True)):
            start, inside = divmod(seq._length, self.page_size)
            if inside:
                page = int(self._block_tables[seq._row, start])
                if self._owners[page] - left[page] > 1:
                    left[page] += 1
                    copies.append((row, start, page))
                start += 1
            stop = self._pages_of(seq._length + n)
            runs.append((row, start, stop))
            pages += stop - start
        return _Plan(copies, runs, pages + len(copies))

    def _free_row(self) -> int:
        if not self._free_rows:
            raise PoolExhausted(f"all {self.max_seqs} sequences of the pool (max_seqs) are in use")
        return self._free_rows[-1]

    def _new_sequence(self) -> PoolSequence:
        seq = PoolSequence(self, self._free_row())
        self._free_rows.pop()
        return seq

    def _cut(self, seq: PoolSequence, length: int) -> None:
        keep = self._pages_of(length)
        self._drop(self._block_tables[seq._row, keep : seq._num_pages])
        seq._length, seq._num_pages = length, keep
        seq._ring_first = ring_first_rolled_back(seq._ring_first, length)

    def _top(self, count: int) -> np.ndarray:
        """The next `count` free pages; they are still free."""
        return self._free[self._num_free - count : self._num_free][::-1].copy()

    def _drop(self, pages: np.ndarray) -> None:
        """One owner less for each of these pages, all different."""
        self._owners[pages] -= 1
        gone = pages[self._owners[pages] == 0]
        self._free[self._num_free : self._num_free + len(gone)] = gone
        self._num_free += len(gone)

    def _copy_pages(self, old: np.ndarray, new: np.ndarray) -> None:
        if len(old):
            source, target = self._put(old), self._put(new)
            for pages in self.pages:
                pages.index_copy_(0, target, pages.index_select(0, source))

    # ---- index tensors

    def _index(
        self,
        tables: np.ndarray,
        sequences: tuple[PoolSequence, ...],
        counts: tuple[int, ...],
        shape: tuple[int, int],
        tokens: int,
        with_cu: bool,
    ) -> dict[str, np.ndarray | None]:
        """The tensors of a PoolBatch as arrays, padded to `shape` and to `tokens` tokens.

        tables: int32 [len(sequences), pages], the block tables with the new pages; shape: that of
        the batch's block table.
        """
        seqs, n, new = shape[0], len(sequences), sum(counts)
        before = np.array([s._length for s in sequences], dtype=np.int64)
        count = np.array(counts, dtype=np.int64)
        owner = np.repeat(np.arange(n), count)
        starts = np.cumsum(count) - count
        position = np.arange(new) - starts[owner] + before[owner]
        page = tables[owner, position // self.page_size].astype(np.int64)
        slots = np.full(tokens, -1, dtype=np.int64)
        slots[:new] = page * self.page_size + position % self.page_size
        block_table = np.zeros(shape, dtype=np.int32)
        block_table[:n, : tables.shape[1]] = tables
        lens = np.zeros(seqs, dtype=np.int32)
        lens[:n] = before + count
        cu = None
        if with_cu:
            cu = np.full(seqs + 1, new, dtype=np.int32)
            cu[: n + 1] = np.concatenate([[0], np.cumsum(count)])
        tail_slots = tail_valid = None
        if self.configs[0].has_tail:
            tail_slots = np.full(seqs, -1, dtype=np.int64)
            tail_slots[:n] = [s._row for s in sequences]
            tail_valid = np.zeros((self.max_seqs, 2), dtype=np.int32)
            for s, length in zip(sequences, lens, strict=False):
                first = ring_first_stored(s._ring_first, int(length), self._ring)
                tail_valid[s._row] = min(int(length), self._sinks), first
        return {
            "slot_mapping": slots,
            "block_table": block_table,
            "seq_lens": lens,
            "cu_seqlens_q": cu,
            "tail_slots": tail_slots,
            "tail_valid": tail_valid,
        }

    def _put(self, array: np.ndarray) -> Tensor:
        return _host(array, self.device).to(self.device, non_blocking=True)

    def _tail(self, layer: int, batch: PoolBatch) -> Tail | None:
        if self.tails is None or batch.tail_slots is None:
            return None
        return Tail(self.tails[layer], batch.tail_slots, batch.tail_valid)

    def _positions(self, length: int, ring_first: int) -> np.ndarray:
        """Positions that a row of the tail holds: the sinks, then the ring."""
        sinks = np.arange(min(length, self._sinks))
        return np.concatenate([sinks, np.arange(max(ring_first, self._sinks), length)])

    def _tail_rows(self, length: int, ring_first: int) -> np.ndarray:
        """Where they are in the tail (docs/format.md, section 9)."""
        p = self._positions(length, ring_first)
        return np.where(p < self._sinks, p, self._sinks + (p - self._sinks) % self._ring)


class _Plan(NamedTuple):
    """The pages that a reservation takes."""

    copies: list[tuple[int, int, int]]
    """(row of the batch, index in its block table, page to copy there and to leave)."""
    runs: list[tuple[int, int, int]]
    """(row of the batch, first index, end): new pages."""
    pages: int
    """In all."""


def _checked_configs(
    config: CacheConfig | Sequence[CacheConfig],
    num_layers: int,
    num_kv_heads: int,
    num_pages: int,
    max_seqs: int,
    dtype: torch.dtype,
    max_seq_len: int | None,
    max_q_len: int,
) -> tuple[CacheConfig, ...]:
    """One config per layer, and sizes that make sense."""
    _checks.check_output_dtype(dtype)
    _checks.check_positive(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        num_pages=num_pages,
        max_seqs=max_seqs,
        max_seq_len=1 if max_seq_len is None else max_seq_len,
        max_q_len=max_q_len,
    )
    configs = (config,) * num_layers if isinstance(config, CacheConfig) else tuple(config)
    if len(configs) != num_layers:
        raise ValueError(f"{len(configs)} configs for {num_layers} layers")
    for name in ("page_size", "sink_tokens", "recent_window"):
        values = sorted({getattr(c, name) for c in configs})
        if len(values) > 1:
            raise ValueError(f"all layers of a pool have one {name}, got {values}")
    return configs


def _checked_centers(
    centers: Sequence[Tensor | None] | None, configs: tuple[CacheConfig, ...], kv_heads: int
) -> list[Tensor | None]:
    centers = [None] * len(configs) if centers is None else list(centers)
    if len(centers) != len(configs):
        raise ValueError(f"{len(centers)} centers for {len(configs)} layers")
    for layer, (center, c) in enumerate(zip(centers, configs, strict=True)):
        if center is not None:
            name = f"center of layer {layer}"
            _checks.check_dtype(name, center, _checks.FLOATS)
            shape = (kv_heads, c.head_dim)
            _checks.check_shape(name, center, shape if center.dim() == 2 else (3, *shape))
            if not torch.isfinite(center).all():
                raise ValueError(f"{name} holds NaN or infinity")
    return centers


def _counts(sequences: Sequence[PoolSequence], new_tokens: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(new_tokens, (int, np.integer)):
        new_tokens = [new_tokens] * len(sequences)
    return tuple(int(n) for n in new_tokens)


def _nbytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _host(array: np.ndarray, device: torch.device) -> Tensor:
    """In memory that a GPU can copy from while the CPU goes on."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _digest(tensor: Tensor | None) -> str | None:
    if tensor is None:
        return None
    return hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


def _differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """What two fingerprints do not agree on, in words."""
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
