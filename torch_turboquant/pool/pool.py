"""PagedKVPool: a model's layers on top of the pool's sequences; see the package's text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_turboquant import _checks, _files
from torch_turboquant.batch import AttentionBatch, AttentionOptions
from torch_turboquant.pool.batch import PoolBatch, PoolSequence
from torch_turboquant.pool.books import Books, counts_of
from torch_turboquant.pool.compaction import compact, move
from torch_turboquant.pool.memory import Centers, Configs, PoolBytes, PoolMemory, Sizes
from torch_turboquant.pool.sequences import PoolSequences
from torch_turboquant.pool.transfer import (
    ExportedSequence,
    SwappedSequence,
    adopt_sequence,
    copy_to_host,
    export_sequence,
    write_swapped,
)
from torch_turboquant.tail import Rings


class PagedKVPool(PoolSequences):
    """Packed pages of many sequences in all layers of a model; see the package's text.

    Attributes (not to be assigned to):
        configs: tuple of CacheConfig, one per layer.
        layers: PagedLayer per layer, which holds the tensors below.
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
        config: Configs,
        *,
        num_layers: int,
        num_kv_heads: int,
        num_pages: int,
        max_seqs: int,
        dtype: torch.dtype,
        max_seq_len: int | None = None,
        max_q_len: int = 1,
        centers: Centers | None = None,
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
        checked = Sizes.of(config, *sizes)
        self.configs, self.num_kv_heads = checked.configs, checked.num_kv_heads
        self.num_pages, self.max_seqs = checked.num_pages, checked.max_seqs
        self.dtype, self.max_q_len = checked.dtype, checked.max_q_len
        first = self.configs[0]
        self.page_size = first.page_size
        rings = Rings(first, self.max_seqs, self.max_q_len)
        books = Books(self.page_size, self.num_pages, self.max_seqs, checked.max_seq_len, rings)
        memory = PoolMemory(checked, centers, device)
        super().__init__(books, memory)
        self.max_seq_len, self.device = books.max_seq_len, memory.device
        self.layers, self.pages = memory.layers, memory.pages
        self.tails, self.tables = memory.tails, memory.tables

    # ---- sizes

    @classmethod
    def bytes_needed(
        cls,
        config: Configs,
        *,
        num_layers: int,
        num_kv_heads: int,
        num_pages: int,
        max_seqs: int,
        dtype: torch.dtype,
        max_seq_len: int | None = None,
        max_q_len: int = 1,
        centers: bool | Centers | None = None,
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
        return Sizes.of(config, *sizes).bytes(centers)

    @property
    def bytes(self) -> PoolBytes:
        """Bytes of everything that the pool holds. A batch adds its index tensors."""
        return self._memory.bytes(self._books.nbytes)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What stored pages depend on; plain data."""
        return self._memory.fingerprint

    def __repr__(self) -> str:
        held = self.bytes
        return (
            f"PagedKVPool({len(self.configs)} layers x {self.num_kv_heads} KV heads, "
            f"{self.num_pages} pages of {self.page_size} tokens, {self.max_seqs} sequences, "
            f"{self.device}: {held.device:,} bytes = {held.pages:,} pages + {held.tail:,} tail + "
            f"{held.tables:,} tables; {self.free_pages} pages and {self.free_seqs} sequences free)"
        )

    def set_centers(self, centers: Centers | None) -> None:
        """Fixes what is subtracted from keys before they are encoded, before the first page is.

        Args:
            centers: [num_kv_heads, head_dim] per layer, any floating dtype, or [3, num_kv_heads,
                head_dim] of scaled_center; None: no center, for one layer or for all.

        The layers get new tables: a CUDA graph that was captured before still reads the old ones.

        Raises:
            RuntimeError: a page was taken before.
            ValueError: another number of layers, another shape, NaN or infinity.
        """
        with self._lock:
            if not self._books.untouched:
                raise RuntimeError(
                    "centers are fixed before the pool's first page is taken: make another pool"
                )
            self._memory.set_centers(centers)

    # ---- one layer

    def _check_usable(self, layer: int, batch: PoolBatch) -> None:
        self._memory.check_layer(layer)
        self._check_batch(batch)
        if batch._state == "closed":
            raise RuntimeError("this batch was committed or rolled back: its pages are not its own")

    def store(self, layer: int, k: Tensor, v: Tensor, batch: PoolBatch) -> None:
        """Encodes the new keys and values of one layer (cache_store).

        Every layer has to, before the batch is committed; a layer that does so twice holds what it
        was given last.

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
        self.layers[layer].store(k, v, batch)
        batch._mark(layer, replayed=self._is_capturing())

    def _is_capturing(self) -> bool:
        """Whether a CUDA graph is captured on the current stream."""
        if self.device.type != "cuda" or torch.compiler.is_compiling():
            return False
        return torch.cuda.is_current_stream_capturing()

    def attend(
        self,
        layer: int,
        q: Tensor,
        batch: PoolBatch,
        *,
        k_new: Tensor | None = None,
        v_new: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Causal attention of the batch's tokens in one layer (paged_attention).

        It comes after `store`, or with k_new and v_new before or after it.

        Args:
            layer: 0 to num_layers - 1.
            q: [batch.tokens, q_heads, head_dim], of the pool's dtype.
            batch: open, or empty.
            k_new, v_new: [batch.tokens, num_kv_heads, head_dim], the keys and values of the batch's
                tokens, which queries then read exactly as they are; given together.
            out, lse: written instead of new tensors, as in paged_attention.
            options: softmax_scale, sliding_window, soft_cap and sink_logits of paged_attention.

        Returns:
            out: [batch.tokens, q_heads, head_dim]; lse: float32 [batch.tokens, q_heads]. Rows of
            padding are 0 and -inf (or the sink logit).

        Raises:
            RuntimeError: the batch was committed or rolled back.
            TypeError, ValueError: as paged_attention; another pool's batch; no such layer; more
                than max_q_len new tokens per sequence where there is a tail and no k_new.
        """
        self._check_usable(layer, batch)
        if self.tails is not None and k_new is None and batch.max_q_len > self.max_q_len:
            raise ValueError(
                f"the batch has up to {batch.max_q_len} new tokens per sequence, supported: "
                f"max_q_len = {self.max_q_len} of the pool; append longer texts in pieces"
            )
        given = AttentionOptions(**options)
        return self.layers[layer].attend(
            q, batch, given, k_new=k_new, v_new=v_new, out=out, lse=lse
        )

    def store_and_attend(
        self,
        layer: int,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        batch: PoolBatch,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """`store` of the new tokens, and `attend` with them, in one call (store_and_attend).

        Args:
            layer, q, batch, out, lse, options: as of `attend`.
            k_new, v_new: as of `store`, of the pool's dtype; queries read them exactly as they are.

        Returns:
            out, lse: as of `attend`.

        Raises:
            RuntimeError, TypeError, ValueError: as `store` and `attend`, before anything is
                written.
        """
        self._check_usable(layer, batch)
        _checks.check_dtype("k_new", k_new, (self.dtype,))
        given = AttentionOptions(**options)
        found = self.layers[layer].store_and_attend(q, k_new, v_new, batch, given, out=out, lse=lse)
        batch._mark(layer, replayed=self._is_capturing())
        return found

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
        sequences = tuple(sequences)  # of any iterable, as reserve
        counts = counts_of(sequences, new_tokens)
        tokens = sum(counts)
        for c, k, v in zip(self.configs, keys, values, strict=True):
            for name, t in (("k", k), ("v", v)):  # all layers before the first is written
                _checks.check_dtype(name, t, (self.dtype,))
                _checks.check_shape(name, t, (tokens, self.num_kv_heads, c.head_dim))
                _checks.check_unit_stride(name, t)
                if t.device != self.device:
                    raise ValueError(f"{name} is on {t.device}, the pool on {self.device}")
        with self.reserve(sequences, counts) as batch:
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
        self._memory.check_layer(layer)
        with self._lock:
            self._books.check_mine(seq)
            table = self._memory.put(self._books.pages(seq)[None].copy())
            length = seq._length
        lengths = self._memory.put(np.array([length], dtype=np.int32))
        batch = AttentionBatch(block_table=table, seq_lens=lengths)
        k, v = self.layers[layer].load(batch, length, self.dtype if dtype is None else dtype)
        return k[0], v[0]

    def compact(self, sequences: Sequence[PoolSequence], kept: Sequence[Tensor]) -> None:
        """Drops tokens of sequences in all layers; each KV head keeps others, but as many.

        The last tokens, those that the ring of the tail has rows for, always stay, behind the kept
        ones. All sequences then have the same length, and pages that they need no more are free.
        `length` counts the tokens that are there, and `dropped` those that have gone: the next
        position is the sum of both. A page that another sequence owns too is copied before it
        changes. Later tokens see all that are left, in whatever order.

        Args:
            sequences: one or more, each once, in no open batch.
            kept: per layer int64 [len(sequences), num_kv_heads, n], contiguous: positions of the
                tokens that stay, in their new order and without the last ones. The first
                sink_tokens are 0, 1, .. . A token moves only if its position changes.

        Raises:
            PoolExhausted: too few free pages for copies of shared ones; nothing has changed.
            RuntimeError: a sequence that was freed or is in an open batch; positions that are out
                of range or twice there, or sinks elsewhere (checked on the CPU; on CUDA such a
                token is left out, and its slot keeps what it has); a device without memory for the
                work: if some layers were done by then, the sequences are freed.
            TypeError, ValueError: tensors of another dtype, shape or device; a sequence of another
                pool or twice; more tokens than there are.
        """
        with self._lock:
            compact(self._memory, self._books, sequences, kept)

    def _move(
        self,
        sequences: Sequence[PoolSequence],
        length: int,
        sources: Tensor,
        targets: Tensor,
    ) -> None:
        """compact by lists of what moves in all layers, for callers that know them."""
        with self._lock:
            self._books.check_each(sequences)
            move(self._memory, self._books, sequences, length, [(sources, targets)])

    def tables_of(self, sequences: Sequence[PoolSequence]) -> tuple[Tensor, Tensor]:
        """What attention over sequences without new tokens takes, on the pool's device.

        Returns:
            block_table int32 [len(sequences), pages of the longest], seq_lens int32.

        Raises:
            RuntimeError: a sequence that was freed.
            ValueError: a sequence of another pool.
        """
        with self._lock:
            for seq in sequences:
                self._books.check_mine(seq)
            lengths = np.array([seq._length for seq in sequences], dtype=np.int32)
            width = self._books.pages_of(int(lengths.max(initial=0)))
            tables = np.zeros((len(sequences), width), dtype=np.int32)
            for row, seq in zip(tables, sequences, strict=True):
                pages = self._books.pages(seq)[:width]
                row[: len(pages)] = pages
            return self._memory.put(tables), self._memory.put(lengths)

    # ---- between pools

    def export(self, seq: PoolSequence) -> ExportedSequence:
        """A copy of a sequence, on the pool's device, that `adopt` of a like pool takes.

        Raises:
            RuntimeError: a sequence that was freed or is in an open batch.
            ValueError: a sequence of another pool.
        """
        with self._lock:
            self._books.check_idle(seq)
            return export_sequence(self._memory, self._books, seq)

    def adopt(self, exported: ExportedSequence) -> PoolSequence:
        """A new sequence with the pages of `exported`, which may be on any device.

        Pools may differ in their numbers of pages and sequences, in max_seq_len and max_q_len; all
        else must be the same. With a smaller max_q_len the new ring keeps the last tokens.

        Raises:
            ValueError: another fingerprint, the text names all differences; tensors that do not fit
                the fingerprint; more than max_seq_len tokens.
            TypeError: tensors of another dtype.
            PoolExhausted: too few free pages, or no free sequence; nothing has changed.
        """
        with self._lock:
            return adopt_sequence(self._memory, self._books, exported)

    # ---- out of the pool for a while

    def swap_out(
        self, seq: PoolSequence, path: str | os.PathLike[str] | None = None
    ) -> SwappedSequence:
        """Moves a sequence out of the pool; its pages come free, but for those that it shares.

        On CUDA it waits until the copy is done; the host's memory is pinned, and the device needs
        room for one layer of the sequence.

        Args:
            seq: freed afterwards.
            path: of a file to move it to (needs safetensors); None: into the host's memory.

        Returns:
            What `swap_in` takes. A file stays where it is, for its owner to delete.

        Raises:
            OSError: the file cannot be written; the sequence is still there.
            RuntimeError: a sequence that was freed or is in an open batch; tokens were appended or
                taken back in another thread while the file was written.
            ValueError: a sequence of another pool.
        """
        if path is not None:
            _files.check_place(path)  # before the work
        with self._lock:
            self._books.check_idle(seq)
            places = self._books.places(seq)
            held = copy_to_host(self._memory, self._books, seq)
            if path is None:
                self._books.remove(seq)
                return SwappedSequence(held.length, None, "", held, places)
        swapped = write_swapped(held, path, places)  # without the lock: others go on
        with self._lock:
            self._books.check_idle(seq)
            if seq._length != held.length or not self._books.is_at(seq, places):
                raise RuntimeError(
                    f"this sequence was changed while it was written to {path}: let no other "
                    "thread append to it or truncate it meanwhile"
                )
            self._books.remove(seq)
        return swapped

    def swap_in(self, swapped: SwappedSequence) -> PoolSequence:
        """A new sequence with the tokens of one that was swapped out, byte for byte.

        Pages that another sequence of the pool owns and nobody has written into are shared again.
        Another pool takes the sequence as `adopt` does.

        Raises:
            OSError, ValueError: the file cannot be read, or is none of swap_out; as adopt.
            PoolExhausted: too few free pages (pages_to_swap_in), or no free sequence; nothing has
                changed.
        """
        exported = swapped.read()
        with self._lock:
            return adopt_sequence(self._memory, self._books, exported, swapped.places)

    def pages_to_swap_in(self, swapped: SwappedSequence) -> int:
        """Free pages that `swap_in` would take now."""
        with self._lock:
            there = self._books.still_there(swapped.places)
            return self._books.pages_of(swapped.length) - int(there.sum())
