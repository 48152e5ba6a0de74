"""Which sequences are in a cache and how long they are, and what one forward does with them.

All layers share what is here. A *column* is a position of the batch as the model sees it, left
padding included; a *place* is where a token stands in the pages and the tail of its own sequence.
Places count from 0 and leave out padding, and in layers that evict also the tokens that were
evicted; the model's positions, which keys carry, never change.

Two plans of a forward do the same arithmetic. `Forward` works on host integers, for every kind of
forward. `Step` works on tensors of the device, for the static form once its prompt is stored: it
depends on shapes alone, so that it can be compiled and captured, and the one number that moves is
`Counters.columns`. Host integers are read back (`pull`) only where something other than a step is
asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from torch_turboquant.batch import AttentionBatch
from torch_turboquant.centers import CENTER_TOKENS
from torch_turboquant.eviction import Eviction
from torch_turboquant.integrations.transformers.tensors import fixed, put_together
from torch_turboquant.integrations.transformers.uncompressed import AnyConfig
from torch_turboquant.tail import Counters, Rings, owned_pages, owned_slots

_NOTHING_LEAVES = Eviction()
_GROWTH = 10  # a growing cache takes a tenth more pages at a time, or as many as are needed


class Piece(NamedTuple):
    """Up to max_q_len columns of a batch, on one device."""

    columns: slice | None
    """Of the queries, keys and values at hand; None: all."""
    real: Tensor | None
    """int64: which of the batch * columns tokens are no padding; None: all."""
    batch: AttentionBatch
    """What layers store and attend. An exact forward's has no block_table: it is only stored."""


class Pieces:
    """The pieces of one forward, each worked out once and used by all layers."""

    exact: bool  # attend with the model's own attention
    encode: bool  # write pages in this forward
    evicts = False  # tokens leave before they are stored
    learns_scales = False  # of channels: queries are measured
    traced = False  # by torch.compile, if it runs

    def __init__(self, batch: int, new: int, columns: list[tuple[int, int]]) -> None:
        self.batch, self.new, self.pieces = batch, new, columns
        self._built: dict[tuple[int, torch.device, int, bool], Piece] = {}
        # by layer: what it has handed to its attention, until that takes it back. They stand here
        # because torch.compile writes attributes of what outlives a step again in every step.
        self.handed: dict[int, tuple[Tensor, Tensor]] = {}
        self.latents: dict[int, tuple[Tensor, Tensor]] = {}  # whose expansion was handed

    def piece(self, index: int, device: torch.device, pages: int, thinned: bool) -> Piece:
        """The index-th piece of `pieces` on `device`.

        For a layer with `pages` pages a sequence, which evicts tokens (thinned) or keeps all.
        """
        key = index, device, pages, thinned
        if key not in self._built:
            self._built[key] = self._build(*self.pieces[index], device, pages, thinned)
        return self._built[key]

    def _build(
        self, first: int, last: int, device: torch.device, pages: int, thinned: bool
    ) -> Piece:
        raise NotImplementedError


class Forward(Pieces):
    """A forward of any kind, from integers of the host."""

    def __init__(self, sequences: Sequences, batch: int, new: int, pads: list[int]) -> None:
        self.past, self.total, self.pads = sequences.columns, sequences.columns + new, pads
        self.places, self.page_size = sequences.places, sequences.config.page_size
        self.sink_tokens = sequences.config.sink_tokens
        # before this forward
        self.rings = {kind: places.rings.snapshot() for kind, places in self.places.items()}
        lengths = self.lengths(self.total)
        after_sinks = sum(max(0, length - self.sink_tokens) for length in lengths)
        self.exact = self.past == 0 or not sequences.encoded
        enough = sequences.center_known or after_sinks >= CENTER_TOKENS or sequences.static
        # nothing but padding, as the first piece of a prompt may be, teaches no center
        self.encode = sequences.encoded or (enough and any(lengths))
        unknown = not sequences.center_known
        self.learns_scales = self.encode and unknown and sequences.learned_center == "auto"
        whole = [(0, self.total)] if self.encode else []
        super().__init__(batch, new, whole if self.exact else sequences.pieces(self.past, new))
        self.evicted = sequences.evicted or [0] * batch
        if self.exact and self.encode and sequences.eviction.evicts:
            self.evicted = [n - sequences.eviction.count(n) for n in lengths]
            self.evicts = any(self.evicted)
        self.padded = any(pads)
        self.skipped = min(self.sink_tokens, max(lengths) - 1)
        self._chosen: dict[tuple[torch.device, int], Tensor] = {}

    def lengths(self, column: int, thinned: bool = False) -> list[int]:
        """Tokens of every sequence among the columns before `column`; thinned: those that stay."""
        return [max(0, column - before) for before in self.before(thinned)]

    def before(self, thinned: bool) -> list[int]:
        """Columns of every sequence that take no place, in layers that evict tokens or keep all."""
        if not thinned:
            return self.pads
        return [pad + evicted for pad, evicted in zip(self.pads, self.evicted, strict=True)]

    def after_sinks(self, layers: list[Tensor]) -> tuple[list[Tensor], int]:
        """The same layers without padding, and how many of their first tokens are sinks.

        layers: [batch, heads, columns, dim] of the last columns. The last token is no sink where
        there is nothing else. With padding, what all sequences have left after their sinks comes as
        one: [1, heads, tokens, dim].
        """
        first = self.total - layers[0].shape[2]
        if not self.padded:
            return layers, max(0, self.skipped - first)
        key = layers[0].device, first
        if key not in self._chosen:
            place = torch.arange(first, self.total) - torch.tensor(self.pads)[:, None]
            self._chosen[key] = (place >= self.skipped).flatten().nonzero()[:, 0].to(key[0])
        return [chosen_tokens(x, self._chosen[key]) for x in layers], 0

    def _build(
        self, first: int, last: int, device: torch.device, pages: int, thinned: bool
    ) -> Piece:
        # numpy: all of it is a few integers, and its calls take a third of torch's time
        before, longest = np.array(self.before(thinned)), self.places[thinned].pages
        if thinned and self.evicts:
            first = before.min()  # as many columns as the most tokens that stay
        lengths = np.maximum(last - before, 0).astype(np.int32)
        place = np.arange(first, last) - before[:, None]
        slots = owned_slots(np.arange(self.batch), place, pages * self.page_size)
        if pages < longest:  # a prompt longer than its window: later tokens take these slots
            last_page = (lengths - 1)[:, None] // self.page_size
            slots[place // self.page_size <= last_page - pages] = -1
        arrays = {
            "slot_mapping": slots.ravel(),
            "seq_lens": lengths,
            "tail_slots": np.arange(self.batch),
        }
        if before.max() > first:
            arrays["real"] = (place >= 0).ravel().nonzero()[0]
            arrays["slot_mapping"] = arrays["slot_mapping"][arrays["real"]]
            counts = np.minimum(lengths, last - first)
            arrays["cu_seqlens_q"] = np.append(0, counts.cumsum()).astype(np.int32)
        elif last - first > 1:
            steps = np.arange(self.batch + 1, dtype=np.int32)
            arrays["cu_seqlens_q"] = steps * np.int32(last - first)
        if not self.exact:
            arrays["block_table"] = owned_pages(self.batch, longest, pages)
            arrays["tail_valid"] = self.rings[thinned].valid(range(self.batch), lengths)
        placed = dict(zip(arrays, put_together(list(arrays.values()), device), strict=True))
        real = placed.pop("real", None)
        whole = self.exact or (first, last) == (self.past, self.total)
        columns = None if whole else slice(first - self.past, last - self.past)
        return Piece(columns, real, AttentionBatch(max_q_len=int(last - first), **placed))


class Step(Pieces):
    """A forward after the first one of the static form: what Forward does, from shapes alone."""

    exact, encode = False, True
    traced = True

    def __init__(self, sequences: Sequences, batch: int, new: int) -> None:
        super().__init__(batch, new, sequences.pieces(0, new))
        self.sequences = sequences
        first = sequences.first_counters
        longest = first.columns + new - first.pads[:batch].min()
        # without a look at the device from here: on a GPU the process stops at this assertion
        torch._assert_async(longest <= sequences.max_len, sequences.full)

    def _build(
        self, first: int, last: int, device: torch.device, pages: int, thinned: bool
    ) -> Piece:
        sequences, batch, new = self.sequences, self.batch, last - first
        counters, room = sequences.counters[device, thinned], pages * sequences.config.page_size
        cu_seqlens_q = None
        if self.new == 1:
            lengths, valid = counters.next_lengths, counters.next_valid
            slots = counters.next_slots[room][:batch]
        else:
            lengths = counters.lengths(last)
            valid = counters.valid(lengths)
            slots = counters.slots(lengths, new, room)[:batch].flatten()
        if new > 1:
            cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=device) * new
        return Piece(
            None if new == self.new else slice(first, last),
            None,
            AttentionBatch(
                slot_mapping=slots,
                block_table=sequences.tables[device, thinned, pages][:batch],
                seq_lens=lengths[:batch],
                cu_seqlens_q=cu_seqlens_q,
                max_q_len=new,
                tail_slots=counters.entries[:batch],
                tail_valid=valid,
            ),
        )

    def commit(self) -> None:
        """The step has gone through all layers."""
        for counters in self.sequences.counters.values():
            counters.advance(self.new)


def chosen_tokens(x: Tensor, chosen: Tensor | None) -> Tensor:
    """x [batch, heads, columns, dim], or the tokens `chosen` of all sequences as those of one.

    chosen: int64, of batch * columns: [1, heads, tokens, dim]; None: all of them, as they are.
    """
    if chosen is None:
        return x
    return x.transpose(1, 2).flatten(0, 1).index_select(0, chosen).transpose(0, 1)[None]


class Places:
    """Where tokens stand in the pages and tails of layers that keep the same of them."""

    def __init__(self, config: AnyConfig, rows: int, max_len: int | None, max_q_len: int) -> None:
        self.rings, self.page_size = Rings(config, rows, max_q_len), config.page_size
        self.pages = math.ceil(max_len / self.page_size) if max_len else 0  # of a sequence
        self.forget()

    def forget(self) -> None:
        """Nothing is stored."""
        self.rings.select([])
        self.stored = [0] * len(self.rings.first)  # up to which each row has ever been stored

    def note_stored(self, lengths: list[int]) -> None:
        """Tokens have been written up to `lengths`: the ring and windows have lost older ones."""
        for row, length in enumerate(lengths):
            self.rings.stored(row, length)
            self.stored[row] = max(self.stored[row], length)

    def clamp_ring(self, lengths: list[int]) -> None:
        """Sequences have these lengths now; one without tokens begins anew."""
        for row, length in enumerate(lengths):
            self.rings.cut(row, length)
            if not length:
                self.stored[row] = 0

    def select(self, rows: list[int]) -> None:
        """Sequence i becomes a copy of the former sequence rows[i]."""
        self.rings.select(rows)
        self.stored = [self.stored[r] for r in rows] + [0] * (len(self.stored) - len(rows))

    def grow(self, longest: int, begun: bool) -> None:
        """Counts pages for `longest` tokens of a sequence; layers take them as they come to store.

        The first ones are just enough. Later ones are a tenth more than there were, since every
        growth copies what is stored: that adds up to ten copies of each page in the end, where page
        by page would copy each as often as others follow it.
        """
        needed = math.ceil(longest / self.page_size)
        if needed > self.pages:
            more = math.ceil(self.pages / _GROWTH) if begun else 0
            self.pages = max(needed, self.pages + more)


class Sequences:
    """Lengths, left padding and page counts of the batch, shared by all layers.

    Counts move only when a forward has succeeded, so one that fails leaves the cache as it was.
    """

    def __init__(
        self,
        config: AnyConfig,
        rows: int,
        max_len: int | None,
        max_q_len: int,
        *,
        learned_center: str | None,
        static: bool,
        windows: list[int | None],
        eviction: Eviction = _NOTHING_LEAVES,
    ) -> None:
        rows, max_q_len = int(rows), int(max_q_len)  # files take no integers of NumPy
        max_len = None if max_len is None else int(max_len)
        self.config, self.rows, self.max_len, self.max_q_len = config, rows, max_len, max_q_len
        self.eviction = eviction
        self.learned_center, self.static = learned_center, static  # "auto", "mean" or None
        self.has_states = None in windows  # layers with a state that nothing can take back
        self.windows = sorted({window for window in windows if window})
        # by whether a layer evicts tokens; what stays of a sequence has max_len places
        self.most_columns = math.ceil(max_len / eviction.keep) if max_len else None
        self.places = {False: Places(config, rows, self.most_columns, max_q_len)}
        if eviction.evicts:
            self.places[True] = Places(config, rows, max_len, max_q_len)
        # written here: torch.compile may take max_len for a number that varies
        self.full = f"the tokens do not fit into max_cache_len={max_len}"
        self.forward: Forward | Step | None = None
        self.counters: dict[tuple[torch.device, bool], Counters] = {}
        self.tables: dict[tuple[torch.device, bool, int], Tensor] = {}  # by pages of a sequence
        self.first_counters: Counters | None = None  # of the first layer that fills up first
        self.reset()

    def reset(self) -> None:
        self.batch = 0
        self.columns = 0
        self.pads: list[int] = []
        self.evicted: list[int] = []  # tokens of each sequence
        self.prompt_end = 0  # the column up to which tokens were evicted; 0: none were
        self._forget_stored()
        self.encoded = False
        self.center_known = self.learned_center is None
        self.stepping = False  # whether the next forward can be a Step
        self.lost = False
        self.forward = None
        self.push()

    def __getstate__(self) -> dict[str, Any]:
        """Without the device's counters: layers make them again as they take memory."""
        self.pull()
        return {name: x for name, x in vars(self).items() if name not in _OF_DEVICES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, forward=None, counters={}, tables={}, first_counters=None)

    def before(self, thinned: bool) -> list[int]:
        """Columns of every sequence that take no place, in layers that evict tokens or keep all."""
        if not thinned:
            return self.pads
        return [pad + evicted for pad, evicted in zip(self.pads, self.evicted, strict=True)]

    def lengths(self, thinned: bool = False) -> list[int]:
        """Tokens of every sequence; thinned: those that layers have which evict tokens."""
        return [max(0, self.columns - before) for before in self.before(thinned)]

    def pages_in_use(self, owned: int, thinned: bool) -> int:
        """Pages with tokens of the longest sequence, in a layer where it owns so many."""
        longest = max(self.lengths(thinned), default=0)
        return min(owned, math.ceil(longest / self.config.page_size))

    def window_pages(self, window: int, thinned: bool = False) -> int:
        """Pages that a sequence owns in a layer: all, or those max_q_len queries can see."""
        pages = self.places[thinned].pages
        return min(pages, self.pages_of_window(window)) if window else pages

    def pages_of_window(self, window: int) -> int:
        """Pages that max_q_len queries see through a window, however it lies over them."""
        visible = window + self.max_q_len - 1
        return 1 + math.ceil((visible - 1) / self.config.page_size)

    def pieces(self, first: int, new: int) -> list[tuple[int, int]]:
        """Columns [first, first + new) in parts that one call of attention takes.

        The ring of the tail, and the pages of a window, hold what max_q_len queries see.
        """
        step = self.max_q_len if self.config.has_tail or self.windows else new
        last = first + new
        return [(c, min(c + step, last)) for c in range(first, last, step)]

    # -- the device's counters, in the static form

    def counters_on(self, device: torch.device, pages: int, thinned: bool) -> None:
        """Makes sure that steps find what they need for a layer on `device`."""
        if not self.static:
            return
        if (device, thinned) not in self.counters:
            counters = self.counters[device, thinned] = Counters(self.places[thinned].rings, device)
            if self.first_counters is None and thinned is self.eviction.evicts:
                self.first_counters = counters
        if (device, thinned, pages) not in self.tables:
            table = owned_pages(self.rows, self.places[thinned].pages, pages)
            self.tables[device, thinned, pages] = torch.from_numpy(table).to(device)
            counters = self.counters[device, thinned]
            counters.own_slots(pages * self.config.page_size)
            fixed(self.tables[device, thinned, pages], *counters.tensors)

    def pull(self) -> None:
        """Host integers as the device has them: waits for it."""
        if self.first_counters is not None:
            self.columns = int(self.first_counters.columns)
            self._note_stored()

    def push(self) -> None:
        """The device's counters as the host has them."""
        for (_, thinned), counters in self.counters.items():
            counters.set(self.columns, self.before(thinned), self.places[thinned].rings)

    def _note_stored(self, new: int = 0) -> None:
        """Tokens have been written up to `new` columns behind those that count."""
        for thinned, places in self.places.items():
            places.note_stored([length + new for length in self.lengths(thinned)])

    # -- forwards

    def begin(self, batch: int, new: int, attention_mask: Any, position_ids: Any = None) -> None:
        """Plans a forward of `new` columns, or raises before anything has been written."""
        if self.forward is not None:
            self.abort()  # interrupted where nobody could tell
        if self.lost:
            raise RuntimeError(
                "a forward on this cache has failed, and layers without keys and values have lost "
                "the state that they had before: reset() it"
            )
        self._check_continues(new, position_ids)
        if self.batch and batch != self.batch:
            raise ValueError(
                f"this cache holds {self.batch} sequences, the forward has a batch of {batch}; "
                "use reset() or another cache"
            )
        if not 1 <= batch <= self.rows:
            raise ValueError(
                f"batch of {batch} (beams included), but the cache was made for "
                f"max_batch_size={self.rows} sequences"
            )
        if self.stepping:
            _check_form(attention_mask)
            self.forward = Step(self, batch, new)
            return
        if self.encoded:
            self._check_windows(self.lengths())
        planned = Forward(self, batch, new, self._left_padding(batch, new, attention_mask))
        longest = max(planned.lengths(planned.total, self.eviction.evicts))
        if self.max_len and longest > self.max_len:
            raise ValueError(f"{longest} tokens do not fit into max_cache_len={self.max_len}")
        for thinned, places in self.places.items():
            lengths = planned.lengths(planned.total, thinned)
            places.grow(max(lengths), begun=self.columns > 0)
            if planned.encode:
                # before the forward, not after: a failed one has overwritten older tokens too
                places.note_stored(lengths)
        self.forward = planned

    def commit(self) -> None:
        """The planned forward has gone through all layers."""
        done, self.forward = self.forward, None
        if isinstance(done, Step):
            done.commit()
            return
        self.batch, self.columns, self.pads = done.batch, done.total, done.pads
        self.evicted = done.evicted
        self.prompt_end = done.total if done.evicts else self.prompt_end
        self.encoded = self.encoded or done.encode
        self.center_known = self.center_known or done.encode
        self.stepping = self.can_step()
        self.push()

    def can_step(self) -> bool:
        """Whether the next forward can be a Step, as far as tokens decide it.

        Not where a sequence has nothing but padding: more of it may come. Nor where a window has
        lost tokens: a step would read what stands in their place, any other forward refuses.
        """
        if not self.static or not self.encoded or max(self.pads) >= self.columns:
            return False
        return not any(self._cut_windows(self.lengths()))

    def abort(self) -> None:
        """The planned forward has failed: its tokens were never there."""
        done, self.forward = self.forward, None
        if isinstance(done, Step):
            self.pull()
            self._note_stored(done.new)
        self.stepping = False  # look again
        self.lost = self.has_states
        if self.batch and self.encoded:
            self._clamp_rings()
        else:  # the tokens before it, if any, wait: the next prompt stores all of them
            self._forget_stored()
        self.push()

    def crop(self, tokens: int) -> None:
        """Removes the last `tokens` tokens of every sequence."""
        self.pull()
        kept = max(0, self.columns - tokens)
        most = self.columns - self.prompt_end + self.eviction.window  # none of these was evicted
        if self.prompt_end and 0 < kept < self.columns - most:
            raise RuntimeError(
                f"tokens of the prompt were evicted (keep={self.eviction.keep}), so crop takes "
                f"back up to {most} tokens, or all {self.columns}, not {tokens}"
            )
        self._check_windows([max(0, kept - pad) for pad in self.pads])
        self.columns = kept
        self.stepping = self.stepping and self.can_step()  # it may end within padding
        self._clamp_rings()
        if kept == 0:
            self.batch, self.pads, self.stepping = 0, [], False
            self.evicted, self.prompt_end = [], 0
            self._forget_stored()
        self.push()

    def _check_windows(self, lengths: list[int]) -> None:
        """Raises where pages of a window were used again for tokens that are no more."""
        for window, length, stored in self._cut_windows(lengths):
            raise RuntimeError(
                f"layers with a sliding window of {window} keep its tokens and "
                f"{self.max_q_len - 1} more (max_q_len - 1): {stored} tokens cannot be cut "
                f"to {length}"
            )

    def _cut_windows(self, lengths: list[int]) -> Iterator[tuple[int, int, int]]:
        """Windows that lack tokens of sequences cut to `lengths`: window, length, tokens stored."""
        size = self.config.page_size
        for window in self.windows:
            pages = self.window_pages(window)
            for length, stored in zip(lengths, self.places[False].stored, strict=False):
                held = (max(0, stored - 1) // size - pages + 1) * size
                if length and max(0, length - window + 1) < held:
                    yield window, length, stored

    def restore_windows(self) -> None:
        """Counts again up to which tokens were stored, for layers with windows.

        For a cache that comes from a file. Which tokens are gone follows from this count and from
        the number of pages, and the loaded cache may have fewer pages than the saved one: that one
        had enough for all tokens that it had ever stored, or for the window.
        """
        places, size = self.places[False], self.config.page_size
        lengths = self.lengths()
        stored = places.stored[: len(lengths)]
        gone = {  # by window: pages of each sequence
            window: [max(0, math.ceil(n / size) - self.pages_of_window(window)) for n in stored]
            for window in self.windows
        }
        if not self.max_len:  # then pages may come, but not what is gone
            for window, pages in gone.items():
                if any(pages):
                    places.grow(self.pages_of_window(window) * size, begun=False)
        for row, length in enumerate(lengths):
            ends = [
                (pages[row] + self.window_pages(window) - 1) * size + 1
                for window, pages in gone.items()
                if pages[row]
            ]
            places.stored[row] = max(length, *ends) if ends else length

    def _forget_stored(self) -> None:
        for places in self.places.values():
            places.forget()

    def _clamp_rings(self) -> None:
        for thinned, places in self.places.items():
            places.clamp_ring(self.lengths(thinned))

    def select(self, rows: list[int]) -> None:
        """Sequence i becomes a copy of the former sequence rows[i]."""
        self.pull()
        self.batch = len(rows)
        self.pads = [self.pads[r] for r in rows]
        self.evicted = [self.evicted[r] for r in rows]
        for places in self.places.values():
            places.select(rows)
        self.push()

    def _check_continues(self, new: int, position_ids: Any) -> None:
        """Raises where a prompt does not go on from the tokens in the cache.

        `generate` cuts as many tokens off a prompt as the cache holds. What is left of one that is
        no longer than that is nothing, or its tail, whose positions give it away.
        """
        if new == 0 and not self.batch:
            raise ValueError("the prompt has no tokens")
        # one new token goes on from several; from one it may be the same prompt again
        tail = new > 1 or (new == 1 and not is_dynamo_compiling() and self.columns == 1)
        if tail and self.batch and isinstance(position_ids, Tensor) and position_ids.dim() == 2:
            if is_dynamo_compiling() or (self.stepping and position_ids.is_cuda):
                return  # steps do not wait for the device
            self.pull()
            begins, lengths = position_ids[:, 0].tolist(), self.lengths()
            continues = all(b >= n for b, n in zip(begins * len(lengths), lengths, strict=False))
        else:
            continues = new > 0
        if not continues:
            raise ValueError(
                f"this cache holds {self.columns} tokens already, and the prompt does not go on "
                "from there: it has to begin with these tokens and have more; for another prompt "
                "call reset()"
            )

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
        _check_form(mask)
        if tuple(mask.shape) != (batch, total):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}, expected {(batch, total)}: "
                f"{self.columns} columns in the cache and {new} new ones; for another prompt call "
                "reset()"
            )
        mask = mask.bool()
        in_front = (mask.cumsum(1) == 0).sum(1)
        pads, tokens = torch.stack([in_front, mask.sum(1)]).tolist()  # waits for the device, once
        if any(pad + n != total for pad, n in zip(pads, tokens, strict=True)):
            raise ValueError(
                "only left padding is supported, but a row of attention_mask has a 0 after a 1"
            )
        for row, (old, now) in enumerate(zip(self.pads, pads, strict=False)):
            if old != now and (old < self.columns or now < self.columns):
                raise ValueError(
                    f"attention_mask says {now} padding tokens for sequence {row}, the cache was "
                    f"filled with {old}"
                )
        return pads


# Attributes of Sequences that no copy carries.
_OF_DEVICES = ("forward", "counters", "tables", "first_counters")


def _check_form(mask: Any) -> None:
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            "TurboQuantCache supports causal attention with left padding, given as a 2D "
            f"attention_mask [batch, tokens so far]; got {shape}"
        )
