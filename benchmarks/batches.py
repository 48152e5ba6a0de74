"""Batches of attention, and exact results for them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from timing import DEVICE
from torch import Tensor
from torch.nn.functional import cosine_similarity

STEP_QUERIES = 16
"""More queries of a sequence are a prompt, or a part of one."""

# ---- what is measured


class Part(NamedTuple):
    """Sequences of a batch that are alike."""

    count: int
    context: int
    """Tokens of each, those of the call included."""
    q_len: int = 1

    def __str__(self) -> str:
        return f"{self.count} x {self.context}" + (f" q_len {self.q_len}" if self.q_len > 1 else "")


@dataclass(frozen=True)
class Shape:
    batch: int
    context: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    q_len: int = 1
    mixed: tuple[Part, ...] = ()
    """The sequences, in order, where they differ: batch is then their number, context and q_len are
    the largest."""
    label: str = ""
    """What a row calls sequences that differ; without it, it lists them."""

    @staticmethod
    def of(
        parts: Iterable[Part],
        label: str = "",
        q_heads: int = 32,
        kv_heads: int = 8,
        head_dim: int = 128,
    ) -> Shape:
        """A batch of sequences that differ."""
        mixed = tuple(parts)
        return Shape(
            sum(part.count for part in mixed),
            max(part.context for part in mixed),
            q_heads,
            kv_heads,
            head_dim,
            q_len=max(part.q_len for part in mixed),
            mixed=mixed,
            label=label,
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.mixed or (Part(self.batch, self.context, self.q_len),)

    @property
    def sequences(self) -> list[Part]:
        """Every sequence by itself."""
        return [part._replace(count=1) for part in self.parts for _ in range(part.count)]

    @property
    def tokens(self) -> int:
        return sum(part.count * part.context for part in self.parts)

    @property
    def new_tokens(self) -> int:
        return sum(part.count * part.q_len for part in self.parts)

    @property
    def bf16_bytes(self) -> int:
        """Bytes of the whole cache in bf16."""
        return 4 * self.tokens * self.kv_heads * self.head_dim

    @property
    def prefill(self) -> bool:
        """Whether every sequence reads a prompt."""
        return all(part.q_len > STEP_QUERIES for part in self.parts)

    @property
    def lengths(self) -> Tensor:
        """int32 [batch], on the device."""
        return integers(sequence.context for sequence in self.sequences).to(DEVICE)

    @property
    def starts(self) -> Tensor:
        """int32 [batch + 1], on the host: where each sequence's queries start."""
        return running_sum(sequence.q_len for sequence in self.sequences)

    def pages_of_each(self, page_size: int) -> list[int]:
        return [-(-sequence.context // page_size) for sequence in self.sequences]

    def queries(self) -> Tensor:
        shape = (self.new_tokens, self.q_heads, self.head_dim)
        return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)

    def samples(self) -> list[tuple[int, Part, list[int]]]:
        """What a check looks at: (number of a sequence, the sequence, some of its queries).

        The first and last sequence of every part, or the last, shortest and longest of many parts;
        all queries of a step, 16 of a prompt.
        """
        ends = list(accumulate(part.count for part in self.parts))
        firsts = [end - part.count for end, part in zip(ends, self.parts, strict=True)]
        chosen = {*firsts, *(end - 1 for end in ends)}
        sequences = self.sequences
        if len(self.parts) > 4:
            by_length = sorted(range(self.batch), key=lambda i: sequences[i].context)
            chosen = {self.batch - 1, by_length[0], by_length[-1]}
        found = []
        for number in sorted(chosen):
            q_len = sequences[number].q_len
            queries = range(q_len)
            if q_len > STEP_QUERIES:
                queries = sorted({*range(4), *range(0, q_len, -(-q_len // 8)), *queries[-4:]})
            found.append((number, sequences[number], list(queries)))
        return found

    def tiny(self) -> Shape:
        """Few and short sequences of the same kinds."""

        def short(part: Part) -> Part:
            q_len = min(part.q_len, STEP_QUERIES + 4)
            older = min(part.context - part.q_len, 90 + part.context % 70)
            return Part(min(part.count, 2), older + q_len, q_len)

        some = self.parts if len(self.parts) < 4 else (*self.parts[:2], self.parts[-1])
        parts = [short(part) for part in some]
        if self.mixed:
            return Shape.of(parts, self.label, self.q_heads, self.kv_heads, self.head_dim)
        batch, context, q_len = parts[0]
        return replace(self, batch=batch, context=context, q_len=q_len)

    def __str__(self) -> str:
        heads = f"heads {self.q_heads}/{self.kv_heads} d {self.head_dim}"
        if self.mixed and not self.label:
            return f"{' + '.join(map(str, self.mixed))} {heads}"
        text = f"{self.label or f'{self.batch} x {self.context}'} {heads}"
        return text + (f" q_len {self.q_len}" if self.q_len > 1 else "")


def integers(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def running_sum(values: Iterable[int]) -> Tensor:
    """int32, from 0 to the sum of all."""
    return integers(accumulate(values, initial=0))


def tables_of(pages: list[int]) -> tuple[Tensor, Tensor]:
    """Pages in random order: the ids of each sequence in turn, and as a padded block table."""
    order = torch.randperm(sum(pages), device=DEVICE).int()
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=DEVICE)
    for row, ids in zip(table, order.split(pages), strict=True):
        row[: len(ids)] = ids
    return order, table


# ---- exact results


def heads_of(x: Tensor, shape: Shape, kv_head: int) -> Tensor:
    """The query heads of one KV head: [q_len, group, d] of [q_len, q_heads, d]."""
    return x.unflatten(1, (shape.kv_heads, -1))[:, kv_head]


def exact_attention(q: Tensor, k: Tensor, v: Tensor, last: Tensor | None = None) -> Tensor:
    """Attention in float64, [q_len, group, d]: of q [q_len, group, d], k and v [context, d].

    last: the last key that each query sees; None: all.
    """
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.T / math.sqrt(k.shape[1])
    if last is not None:
        hidden = torch.arange(len(k), device=k.device) > last[:, None, None]
        scores.masked_fill_(hidden, -torch.inf)
    return scores.softmax(-1) @ v


class Difference(NamedTuple):
    """How far rows are from exact ones."""

    max_error: float
    cosine: float
    """The least of all rows."""
    relative: float
    """The largest distance of a row, in units of the length of the exact row."""

    @staticmethod
    def of(found: Tensor, exact: Tensor) -> Difference:
        found = found.double()
        cosine = cosine_similarity(found, exact, dim=-1).min()
        relative = ((found - exact).norm(dim=-1) / exact.norm(dim=-1)).max()
        return Difference((found - exact).abs().max().item(), cosine.item(), relative.item())

    @staticmethod
    def worst(of: Iterable[Difference]) -> Difference:
        errors, cosines, relatives = zip(*of, strict=True)
        return Difference(max(errors), min(cosines), max(relatives))
