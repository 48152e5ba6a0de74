"""Eviction while decoding: sequences of a pool keep the tokens that get the most attention.

    hitters = HeavyHitters(pool, budget=4096)
    ...
    with pool.reserve(sequences) as batch:              # a decode step
        for layer in range(num_layers):
            pool.store(layer, k, v, batch)
            out, lse = pool.attend(layer, q, batch)
            hitters.observe(layer, q, lse, batch)       # copies queries, in few steps only
    hitters.evict(sequences)                            # does something every 256 tokens

A sequence that has grown `interval` tokens above its budget is cut back to the budget. The last
`window` queries before that say which tokens stay: each KV head keeps those with the largest mass
(paged_mass), beside the sinks and the most recent tokens, which always stay. What a token got at
earlier evictions counts, too, times `decay` for each. Other queries than these are not asked: a
token that none of them looks at may go, even if one between them did. In return it costs one pass
over keys in `interval` steps, instead of one in each.

Heads keep different tokens at equal counts, so that memory and time fall with the budget. The kept
tokens stay where they are, except that those in the part to be cut off move into the gaps
(PagedKVPool.compact): about `interval` tokens of each head move, whatever the budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant._autograd import lasting
from torch_turboquant.batch import AttentionOptions
from torch_turboquant.ops._cache_checks import check_queries
from torch_turboquant.ops.mass import paged_mass
from torch_turboquant.pool.batch import PoolBatch, PoolSequence
from torch_turboquant.pool.pool import PagedKVPool

LAYERS_AT_ONCE = 4
"""Layers whose masses an eviction holds and chooses from together: fewer calls, more memory."""

DRAFTS = 16
"""Tokens of a step, at most, that can be taken back without loss of earlier queries. A pool that
takes prompts in pieces has a larger max_q_len, but does not take the pieces back."""


class HeavyHitters:
    """Cuts sequences of a pool back to a budget of tokens; see the module's text.

    It keeps, for every layer, the last n = window + min(pool.max_q_len, DRAFTS) - 1 queries, of
    which some may be taken back, and a mass for each kept token:
    max_seqs * (n * q_heads * (head_dim * itemsize + 4) + num_kv_heads * budget * 4) bytes.

    Attributes (not to be assigned to):
        pool, budget, interval, window, keep_last, decay, softmax_scale, soft_cap.
    """

    def __init__(
        self,
        pool: PagedKVPool,
        budget: int,
        *,
        interval: int = 256,
        window: int = 16,
        keep_last: int = 64,
        decay: float = 0.5,
        softmax_scale: float | None = None,
        soft_cap: float = 0.0,
    ) -> None:
        """Takes no memory of a device yet.

        Args:
            pool: its layers attend without sliding windows, which would count other tokens once
                some are gone.
            budget: tokens of a sequence after an eviction, sinks and last ones included.
            interval: tokens above the budget at which a sequence is cut back.
            window: queries that are asked, the last ones before an eviction. Those of tokens that
                were taken back, such as drafts that were rejected, are not.
            keep_last: the most recent tokens that stay; at least those in the ring of the tail do.
            decay: of the masses of earlier evictions, 0 to 1; 0: only the present one counts.
            softmax_scale, soft_cap: those of the model's attention, as in paged_attention.

        Raises:
            ValueError: numbers below 1, a window longer than the interval, a decay outside 0 to 1,
                or a budget without room beside sinks and last tokens.
        """
        _checks.check_positive(budget=budget, interval=interval, window=window, keep_last=keep_last)
        budget, interval, window, keep_last = map(int, (budget, interval, window, keep_last))
        if window > interval:
            raise ValueError(f"window is {window}, supported: up to the interval of {interval}")
        if not 0 <= decay <= 1:
            raise ValueError(f"decay is {decay}, supported: 0 to 1")
        AttentionOptions(softmax_scale=softmax_scale, soft_cap=soft_cap)  # checks them
        config = pool.configs[0]
        ring = 0 if pool.tails is None else pool.tails[0].shape[2] - config.sink_tokens
        self._ring, self._sinks = ring, config.sink_tokens
        self.keep_last = max(keep_last, ring)
        least = self._sinks + self.keep_last
        if budget <= least:
            raise ValueError(
                f"budget is {budget}, supported: more than the {self._sinks} sinks and the "
                f"{self.keep_last} last tokens, which always stay"
            )
        self.pool, self.budget, self.interval = pool, budget, interval
        self.window, self.decay = window, decay
        self.softmax_scale, self.soft_cap = softmax_scale, soft_cap
        self._room = window + min(pool.max_q_len, DRAFTS) - 1  # queries of each sequence
        self._put = pool._memory.put
        self._owner: list[PoolSequence | None] = [None] * pool.max_seqs
        self._seen = np.full((pool.max_seqs, self._room), -1)  # position of each query that is kept
        self._steps = np.zeros(pool.max_seqs, dtype=np.int64)  # that were observed since a cut
        self._step: tuple[Any, ...] | None = None  # that was observed last
        self._watched: _Watched | None = None
        layers = len(pool.configs)
        self._q: list[Tensor | None] = [None] * layers  # [max_seqs, room, q_heads, head_dim]
        self._lse: list[Tensor | None] = [None] * layers  # float32 [max_seqs, room, q_heads]
        self._mass: list[Tensor | None] = [None] * layers  # float32 [max_seqs, kv_heads, budget]

    # ---- decode steps

    def observe(self, layer: int, q: Tensor, lse: Tensor, batch: PoolBatch) -> None:
        """Keeps the new queries, the last ones, of sequences that are about to be cut.

        It waits for no device, and does nothing while all sequences are more than `window` tokens
        below that. A CUDA graph cannot capture it: call it with the graph's q and lse between two
        replays.

        Args:
            layer: 0 to num_layers - 1.
            q, lse: what pool.attend of this batch got and returned.
            batch: open.

        Raises:
            RuntimeError: the batch was committed or rolled back.
            TypeError, ValueError: tensors that are not the batch's; another pool's batch; no such
                layer.
        """
        self.pool._check_usable(layer, batch)
        _checks.check_dtype("q", q, (self.pool.dtype,))
        pool, held = self.pool, self._q[layer]
        heads = None if held is None else held.shape[2]
        _checks.check_shape("q", q, (batch.tokens, heads, pool.configs[layer].head_dim))
        check_queries(q, pool.device, pool.configs[layer], pool.num_kv_heads)
        _checks.check_constant("lse", lse, q.device, torch.float32, tuple(q.shape[:2]))
        if _step_of(batch) != self._step:  # once for all layers
            self._watched = self._watch(batch)
            self._step = _step_of(batch)
        if self._watched is None:
            return
        tokens, place = self._watched
        kept_q, kept_lse, _ = self._buffers(layer, q)
        for kept, new in ((kept_q, q), (kept_lse, lse)):
            part = new if tokens is None else new.index_select(0, tokens)
            kept.flatten(0, 1).index_copy_(0, place, part.detach())

    def _watch(self, batch: PoolBatch) -> _Watched | None:
        """The queries of a step that are kept; None: none."""
        positions = [
            s.length + n - 1 for s, n in zip(batch.sequences, batch.new_tokens, strict=True)
        ]
        begin = self.budget + self.interval - self.window
        watched = [i for i, position in enumerate(positions) if position >= begin]
        if not watched:
            return None
        rows = np.array([self._row_of(batch.sequences[i]) for i in watched])
        for i, row in zip(watched, rows, strict=True):
            seq = batch.sequences[i]
            self._forget(seq, row)
            seq._least = positions[i] + 1
        last = np.array([positions[i] for i in watched])
        self._steps[rows] += self._seen[rows, last % self._room] != last
        # all that may be asked: of drafts the last one seldom stays
        counts = np.minimum([batch.new_tokens[i] for i in watched], self._room)
        before = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - 1, counts)  # ..., -1, 0
        rows, at = np.repeat(rows, counts), np.repeat(last, counts) + before
        self._seen[rows, at % self._room] = at
        kept = np.repeat(np.cumsum(batch.new_tokens)[watched] - 1, counts) + before
        tokens = None if len(kept) == batch.tokens else self._put(kept)
        return _Watched(tokens, self._put(rows * self._room + at % self._room))

    def _forget(self, seq: PoolSequence, row: int) -> None:
        """Drops queries of tokens that were taken back: rejected drafts, an answer written anew."""
        seen = self._seen[row]
        seen[seen >= seq._least] = -1
        if seen.max() < 0:
            self._steps[row] = 0

    def _row_of(self, seq: PoolSequence) -> int:
        """The sequence's row, without anything of a former owner."""
        row = seq._row
        if self._owner[row] is not seq:
            self._owner[row] = seq
            self._seen[row], self._steps[row] = -1, 0
            for mass in self._mass:
                if mass is not None:
                    mass[row] = 0
        return row

    def _buffers(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pool, (_, heads, d) = self.pool, q.shape
        kept_q, lse, mass = self._q[layer], self._lse[layer], self._mass[layer]
        if kept_q is None or lse is None or mass is None:
            with lasting():
                kept_q = q.new_zeros(pool.max_seqs, self._room, heads, d)
                lse = kept_q.new_zeros(kept_q.shape[:3], dtype=torch.float32)
                mass = lse.new_zeros(pool.max_seqs, pool.num_kv_heads, self.budget)
            self._q[layer], self._lse[layer], self._mass[layer] = kept_q, lse, mass
        return kept_q, lse, mass

    # ---- eviction

    def due(self, seq: PoolSequence) -> bool:
        """Whether `evict` would cut the sequence: it is long enough, and `window` of its steps were
        observed."""
        row = seq._row
        if self._owner[row] is not seq or seq.length < self.budget + self.interval:
            return False
        self._forget(seq, row)
        # a prompt of any length may come before: then the first queries have to be waited for
        return bool(self._steps[row] >= self.window)

    def evict(self, sequences: Iterable[PoolSequence]) -> list[PoolSequence]:
        """Cuts those of the sequences that are due back to the budget.

        Args:
            sequences: in no open batch.

        Returns:
            Those that were cut. Their `dropped` has grown, so that length + dropped is the next
            position as before.

        Raises:
            PoolExhausted: too few free pages for copies of pages that are shared; nothing has
                changed.
            RuntimeError: a layer was never observed, or a sequence that is due is in an open batch;
                a device without memory for the work, as PagedKVPool.compact.
            ValueError: a sequence that is due is there twice.
        """
        due = [seq for seq in sequences if self.due(seq)]
        if not due:
            return []
        self._step = None
        missing = [layer for layer, q in enumerate(self._q) if q is None]
        if missing:
            raise RuntimeError(f"these layers were never observed: {missing}")
        rows = np.array([seq._row for seq in due])
        lengths = np.array([seq.length for seq in due])
        asked = self._asked(due, rows, lengths)
        ends, owners = self._put(lengths), self._put(rows)
        moves, masses = [], []
        numbers = range(len(self._q))
        for layers in (numbers[i : i + LAYERS_AT_ONCE] for i in numbers[::LAYERS_AT_ONCE]):
            size = len(layers), len(due), self.pool.num_kv_heads, int(lengths.max())
            mass = torch.zeros(size, dtype=torch.float32, device=self.pool.device)
            for of_layer, layer in zip(mass, layers, strict=True):
                self._add_masses(of_layer, layer, asked, owners)
            flat = mass.flatten(0, 1)
            moved = moves_to_budget(
                flat, ends.repeat(len(layers)), self.budget, self._sinks, self.keep_last
            )
            left = moved_along(flat, *moved, self.budget)
            moves.append([part.unflatten(0, size[:2]) for part in moved])
            masses += left.unflatten(0, size[:2]).unbind()
        self.pool._move(due, self.budget, *map(torch.cat, zip(*moves, strict=True)))
        for layer, of_layer in enumerate(masses):
            kept = self._mass[layer]
            assert kept is not None
            kept[owners] = of_layer
        for seq in due:
            seq._unmoved = self.budget
        self._seen[rows], self._steps[rows] = -1, 0
        return due

    def _asked(self, due: Sequence[PoolSequence], rows: np.ndarray, lengths: np.ndarray) -> _Asked:
        """What is the same for the masses of all layers."""
        positions = lengths[:, None] - self.window + np.arange(self.window)
        known = self._seen[rows[:, None], positions % self._room] == positions
        place = self._put((rows[:, None] * self._room + positions % self._room).ravel())
        starts = np.arange(len(due) + 1, dtype=np.int32) * self.window
        silent = self._put(~known.ravel())[:, None]
        unmoved = np.array([seq._unmoved for seq in due])
        others = self._put(np.arange(self.budget) >= unmoved[:, None])[:, None]
        return _Asked(place, silent, self._put(starts), others, *self.pool.tables_of(due))

    def _add_masses(self, mass: Tensor, layer: int, asked: _Asked, owners: Tensor) -> None:
        """Those of all tokens, and of earlier evictions, to zeros [due, kv_heads, longest]."""
        q, lse, before = self._q[layer], self._lse[layer], self._mass[layer]
        assert q is not None and lse is not None and before is not None
        earlier = before[owners].masked_fill_(asked.others, 0)
        torch.mul(earlier, self.decay, out=mass[..., : self.budget])
        paged_mass(
            q.flatten(0, 1).index_select(0, asked.place),
            lse.flatten(0, 1).index_select(0, asked.place).masked_fill_(asked.silent, -torch.inf),
            mass,
            self.pool.pages[layer],
            asked.block_table,
            asked.seq_lens,
            self.pool.configs[layer],
            self.pool.tables[layer],
            cu_seqlens_q=asked.starts,
            max_q_len=self.window,
            softmax_scale=self.softmax_scale,
            soft_cap=self.soft_cap,
        )


def _step_of(batch: PoolBatch) -> tuple[Any, ...]:
    """What a step is known by, as long as none of its tokens is taken back."""
    return batch.sequences, batch.new_tokens, [(s.length, s._least) for s in batch.sequences]


class _Watched(NamedTuple):
    """The queries of a step that are kept."""

    tokens: Tensor | None  # int64 [kept]: which they are; None: all
    place: Tensor  # int64 [kept]: where each goes among the queries of all rows


class _Asked(NamedTuple):
    """The queries of sequences that are due, and their tables."""

    place: Tensor  # int64 [due * window]: of a query among those of all rows
    silent: Tensor  # bool [due * window, 1]: nobody has observed that query
    starts: Tensor  # int32 [due + 1]
    others: Tensor  # bool [due, 1, budget]: no token of the last eviction is in this place
    block_table: Tensor
    seq_lens: Tensor


def moves_to_budget(
    mass: Tensor, lengths: Tensor, budget: int, first: int, last: int
) -> tuple[Tensor, Tensor]:
    """What moves where so that the heaviest tokens are the first `budget` ones, beside the first
    and the last tokens.

    Args:
        mass: float32 [seqs, heads, n].
        lengths: int64 [seqs], at least budget and at most n.
        budget: tokens that stay.
        first, last: tokens that stay anyway.

    Returns:
        Sources and targets, int64 [seqs, heads, n - budget + 2 * last]: positions; sources of -1
        mean nothing. A kept token whose position is below budget - last stays where it is; the
        others fill the gaps, in their order; the last tokens are the last.
    """
    free = budget - last
    behind = mass.shape[2] - free
    position = torch.arange(mass.shape[2], device=mass.device)
    end = (lengths - last)[:, None, None]
    # a mass that is no number stays, as the greatest ones do
    weight = mass.nan_to_num(nan=torch.inf, posinf=torch.inf)
    weight[..., :first] = torch.inf
    weight[..., free:].masked_fill_(position[free:] >= end, -torch.inf)
    dropped = _lightest(weight, behind)
    is_gap = dropped < free
    targets = dropped.masked_fill(~is_gap, -1)  # as many as there are sources
    stays = torch.ones_like(dropped, dtype=torch.bool)
    stays = _scattered(stays, torch.where(is_gap, behind, dropped - free), False)
    sources = _listed(stays, position[free:], behind)
    recent = torch.arange(last, device=mass.device)
    shape = (-1, mass.shape[1], -1)
    sources = torch.cat([sources, (end + recent).expand(shape)], dim=2)
    targets = torch.cat([targets, (free + recent).expand(*mass.shape[:2], -1)], dim=2)
    return sources, targets


def _listed(chosen: Tensor, position: Tensor, room: int) -> Tensor:
    """Positions [n] that are chosen [.., n], in their order, and -1 behind them: [.., room]."""
    place = torch.where(chosen, chosen.cumsum(-1) - 1, room)
    found = place.new_full((*chosen.shape[:-1], room), -1)
    return _scattered(found, place, position.expand_as(place))


def moved_along(mass: Tensor, sources: Tensor, targets: Tensor, budget: int) -> Tensor:
    """The masses of the tokens that are left, where they are then: float32 [.., budget]."""
    left = mass[..., : budget + 1].clone()  # the last one is for what does not move
    place = torch.where(sources < 0, budget, targets)
    return left.scatter_(-1, place, mass.gather(-1, sources.clamp(min=0)))[..., :budget]


def _scattered(x: Tensor, place: Tensor, values: Tensor | bool) -> Tensor:
    """x [.., n] with the values at these places; at place n there is nothing."""
    longer = torch.nn.functional.pad(x, (0, 1))
    longer.scatter_(-1, place, values)
    return longer[..., :-1]


def _lightest(weight: Tensor, count: int) -> Tensor:
    """Positions of the `count` smallest weights [.., n], increasing; of equal ones the last are, on
    every device. (Which of them topk finds depends on the device.)"""
    n = weight.shape[-1]
    least = weight.topk(count, largest=False, sorted=False)
    most = least.values.amax(-1, keepdim=True)
    below = least.values < most
    position = torch.arange(n, dtype=torch.int32, device=weight.device)
    last = torch.where(weight == most, position, -1).topk(count).values
    room = count - below.sum(-1, keepdim=True)
    found = [least.indices.masked_fill(~below, n), last.masked_fill(position[:count] >= room, n)]
    return torch.cat(found, dim=-1).sort().values[..., :count]
