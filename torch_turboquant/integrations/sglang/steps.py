"""What a step is about: lengths, pages, slots and entries of the exact tail, for every layer.

A request's tokens fill its pages in order, so that SGLang's slot of a token is a slot of ours, and
its table of slots (`req_to_token`, a row per request) gives the pages. SGLang may put the pages of
the prefix tree in place of a request's own between two steps: pages are looked up in every step.

Where layers with sliding windows have a pool of their own, a token has another slot there. SGLang
keeps a table of them, which gives slot 0, of nobody's page, for tokens that no window reaches any
more. `Step.sliding` is the step as these layers see it.

Decode steps run in CUDA graphs. `Steps.fill` is recorded in them, or runs before them where SGLang
changes its tables as soon as a graph begins: it reads the row numbers, lengths and slots that
SGLang has put into its buffers, and writes into tensors that never move. Rows behind the batch have
number 0, which no request has: their length becomes 0 and their slot -1, so that nothing is read or
stored for them.

With speculative decoding, a decode step checks a chain of drafts: the last token of the answer and
as many guesses behind it, of which SGLang keeps those that turn out right. Lengths in its batch are
those without the chain.

The exact tail belongs to the row. Which positions its ring holds changes with prompts only, since a
ring is never shorter than the window: `DeviceRings` keeps the first one of each row on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_turboquant.integrations.sglang.prompts import Recent, Run, runs_of


@dataclass(frozen=True)
class Step:
    """The tensors that a step's calls share; n sequences."""

    rows: Tensor
    """int64 [n]: of SGLang's table of slots; -1: padding."""
    seq_lens: Tensor
    """int32 [n], with the new tokens; 0: padding."""
    block_table: Tensor
    """int32 [n, pages of the longest context]."""
    first_pages: Tensor
    """int32 [n]: the first column of block_table."""
    slots: Tensor
    """int64 [tokens]: of the new tokens; -1: padding."""
    starts: Tensor | None = None
    """int32 [n + 1]: where each sequence's new tokens begin; None: one token each."""
    longest: int = 1
    """The most new tokens of a sequence."""
    checks_drafts: bool = False
    """Whether the new tokens are chains of drafts, which see each other as later steps would."""
    begun: Tensor | None = None
    """int64 [2, sequences that begin]: their first token of the step, and its page; None: none."""
    resumed: Tensor | None = None
    """int64 [2, sequences with a past]: their row, and their first page; None: none."""
    runs: tuple[tuple[Run, Step], ...] = ()
    """Of a step of prompts, which sequences are left to FlashAttention, each run with the step of
    its sequences alone; empty: none of them."""
    sliding: Step | None = None
    """The same with the pages and slots of the pool of sliding layers; None: there is none."""

    def of_run(self, run: Run) -> Step:
        """The sequences of a run, as far as attention asks."""
        part = slice(run.first_sequence, run.end_sequence)
        assert self.starts is not None
        starts = self.starts[run.first_sequence : run.end_sequence + 1]
        return replace(
            self,
            rows=self.rows[part],
            seq_lens=self.seq_lens[part],
            block_table=self.block_table[part],
            first_pages=self.first_pages[part],
            starts=starts - run.first if run.first else starts,
            longest=run.longest,
        )


class Steps:
    """Makes a step from a ForwardBatch.

    Args:
        req_to_token: int32 [rows, longest context], SGLang's.
        page_size: tokens of a page.
        drafts: tokens of a chain of drafts; 0: there is no speculative decoding.
        to_sliding: int64 [slots + 1]: a token's slot in the pool of sliding layers; the last one is
            -1, for slot -1. None: there is no such pool.
    """

    def __init__(
        self,
        req_to_token: Tensor,
        page_size: int,
        drafts: int = 0,
        to_sliding: Tensor | None = None,
    ) -> None:
        self.page_size, self.drafts, self.to_sliding = page_size, drafts, to_sliding
        self.page_slots = req_to_token[:, ::page_size]  # the first slot of every page
        self.device = req_to_token.device
        self.none = torch.tensor(-1, device=self.device)

    def allocate(self, sequences: int, drafts: int = 0) -> Step:
        """A step of one token, or one chain of drafts, for each sequence, which `fill` describes.

        Args:
            drafts: tokens of a chain; 0: one token, which is no draft.
        """

        def empty(dtype: torch.dtype, *more: int) -> Tensor:
            return torch.zeros(sequences, *more, dtype=dtype, device=self.device)

        table = empty(torch.int32, self.page_slots.shape[1])
        rows, lengths, slots = empty(torch.int64), empty(torch.int32), empty(torch.int64)
        step = Step(rows, lengths, table, table[:, 0], slots)
        if drafts:
            slots = torch.zeros(sequences * drafts, dtype=torch.int64, device=self.device)
            starts = torch.zeros(sequences + 1, dtype=torch.int32, device=self.device)
            step = replace(step, slots=slots, starts=starts, longest=drafts, checks_drafts=True)
        if self.to_sliding is None:
            return step
        table, slots = torch.zeros_like(table), torch.zeros_like(slots)
        sliding = replace(step, block_table=table, first_pages=table[:, 0], slots=slots)
        return replace(step, sliding=sliding)

    def part(self, step: Step, sequences: int) -> Step:
        """The first sequences of a step, in the same memory."""
        return replace(
            step,
            rows=step.rows[:sequences],
            seq_lens=step.seq_lens[:sequences],
            block_table=step.block_table[:sequences],
            first_pages=step.first_pages[:sequences],
            slots=step.slots[: sequences * step.longest],
            starts=None if step.starts is None else step.starts[: sequences + 1],
            sliding=None if step.sliding is None else self.part(step.sliding, sequences),
        )

    def fill(self, step: Step, batch: Any) -> None:
        """Describes a decode step in place. Nothing waits for the device, nothing is allocated that
        stays, and all shapes are those of the step: a CUDA graph may record it. Before a graph the
        batch has no slots of the rows behind it."""
        rows, lengths, slots = batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc
        alive = rows > 0
        if step.starts is not None:
            lengths = lengths + step.longest
            # padding has no tokens, which stands behind all sequences that have some
            step.starts[1:].copy_((alive * step.longest).cumsum(0))
        self._fill_sequences(step, rows, lengths, alive)
        by_sequence, slots = step.slots.view(-1, step.longest), slots.view(-1, step.longest)
        n = len(slots)
        torch.where(alive[:n, None], slots, self.none, out=by_sequence[:n])
        if n < len(by_sequence):
            by_sequence[n:] = -1
        if step.sliding is not None:
            step.sliding.slots.copy_(self._slots_of_sliding(step.slots))

    def _fill_sequences(self, step: Step, rows: Tensor, lengths: Tensor, alive: Tensor) -> None:
        torch.index_select(self.page_slots, 0, rows, out=step.block_table)
        step.block_table.floor_divide_(self.page_size)
        torch.mul(lengths, alive, out=step.seq_lens)
        torch.where(alive, rows, self.none, out=step.rows)
        if step.sliding is not None:
            first_slots = self._slots_of_sliding(step.block_table.long() * self.page_size)
            step.sliding.block_table.copy_(first_slots // self.page_size)

    def _slots_of_sliding(self, slots: Tensor) -> Tensor:
        assert self.to_sliding is not None
        return self.to_sliding[slots]

    def decode(self, batch: Any) -> Step:
        """A decode step outside CUDA graphs."""
        return self._filled(self.allocate(batch.batch_size), batch)

    def check_drafts(self, batch: Any) -> Step:
        """A step that checks drafts, outside CUDA graphs."""
        return self._filled(self.allocate(batch.batch_size, self.drafts), batch)

    def _filled(self, step: Step, batch: Any) -> Step:
        self.fill(step, batch)
        return step

    def extend(
        self, batch: Any, long_from: int | None = None, rings: DeviceRings | None = None
    ) -> Step:
        """A step of prompts and their continuations, with decoding sequences among them.

        Args:
            long_from: new tokens from which FlashAttention takes a sequence; None: there is none.
            rings: of the exact tails, which have seen this step.
        """
        new, old = list(batch.extend_seq_lens_cpu), list(batch.extend_prefix_lens_cpu)
        rows = batch.req_pool_indices
        step = self.allocate(len(new))
        self._fill_sequences(step, rows, batch.seq_lens, rows > 0)
        starts = torch.tensor([0, *new]).cumsum(0).to(self.device, non_blocking=True)
        slots = batch.out_cache_loc.long()
        runs = () if long_from is None else runs_of(new, old, long_from, self.device)
        if rings is not None:
            runs = tuple(rings.seen_by(run, rows, old) for run in runs)
        has = list(zip(new, old, strict=True))
        begun = [i for i, (n, prefix) in enumerate(has) if n and not prefix]
        resumed = [i for i, (n, prefix) in enumerate(has) if n and prefix]

        def described(step: Step, slots: Tensor) -> Step:
            return replace(
                step,
                slots=slots,
                starts=starts.int(),
                longest=max(new, default=1) or 1,
                begun=self._with_pages(starts, begun, step),
                resumed=self._with_pages(rows, resumed, step),
            )

        def with_runs(step: Step) -> Step:
            return replace(step, runs=tuple((run, step.of_run(run)) for run in runs))

        if step.sliding is not None:
            sliding = described(step.sliding, self._slots_of_sliding(slots))
            step = replace(step, sliding=with_runs(sliding))
        return with_runs(described(step, slots))

    def _with_pages(self, values: Tensor, chosen: list[int], step: Step) -> Tensor | None:
        """int64 [2, chosen]: values of chosen sequences, and their first pages; None: no choice."""
        if not chosen:
            return None
        index = torch.tensor(chosen).to(self.device, non_blocking=True)
        return torch.stack([values[index].long(), step.first_pages[index].long()])


class DeviceRings:
    """Since which position the ring of every row holds the tokens of its request.

    A request keeps its row from its first chunk to its end. `req_generation`, which SGLang counts
    up when a row gets another request, tells a further chunk from the first one: a request whose
    first chunk continues a prefix of the tree has nothing of that prefix in its ring.

    Args:
        pool: SGLang's ReqToTokenPool.
        sinks: how many first tokens an entry of the tail holds.
        ring: how many tokens its ring holds.
    """

    def __init__(self, pool: Any, sinks: int, ring: int, device: torch.device) -> None:
        self.pool, self.sinks, self.ring = pool, sinks, ring
        entries = len(pool.req_generation)
        self.valid = torch.zeros(entries, 2, dtype=torch.int32, device=device)
        """As Tail.valid: sinks held, first position in the ring."""
        self.valid[:, 0] = sinks
        self.tenants = torch.full((entries,), -1, dtype=torch.int64, device=device)
        self.last_seen = pool.req_generation.clone()

    def see(self, batch: Any) -> None:
        """Brings `valid` up to date for a step of prompts; the host does not wait."""
        counts = self.pool.req_generation
        if bool((counts < self.last_seen).any()):  # SGLang has forgotten all requests
            self.tenants.fill_(-1)
        self.last_seen.copy_(counts)
        rows, prefix = batch.req_pool_indices, batch.extend_prefix_lens
        now = counts.to(self.tenants.device, non_blocking=True)[rows]
        known = (self.tenants[rows] == now) & (prefix > 0)
        first = torch.where(known, self.valid[rows, 1], prefix.int())
        self.valid[rows, 1] = first.int()
        self.tenants[rows] = now

    def seen_by(self, run: Run, rows: Tensor, old: Sequence[int]) -> Run:
        """The run with what the rings hold for its chunks; the host does not wait.

        Args:
            rows: int64 [n], of all sequences of the step.
            old: their tokens of earlier steps.
        """
        recent = {}
        for context in run.contexts:
            number = run.first_sequence + context.sequence
            end = old[number]
            first = min(max(end - self.ring, self.sinks), end)
            positions = torch.arange(first, end, device=self.valid.device)
            entries = self.sinks + (positions - self.sinks) % self.ring  # docs/format.md, section 9
            # a slice, since the host would wait for a number that it indexes with
            held = positions >= self.valid[rows[number : number + 1], 1]
            recent[context.sequence] = Recent(first, entries, held[:, None, None])
        return replace(run, recent=recent)
