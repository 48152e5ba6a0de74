"""Batches of attention as servers form them, drawn at random: none that kernels were tuned to."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from batches import Part, Shape

HEADS = (
    *((32, 8, 128), (28, 4, 128), (40, 8, 128), (64, 8, 128), (96, 8, 128), (8, 1, 128)),
    *((4, 1, 128), (24, 8, 128), (32, 4, 128), (32, 2, 128), (48, 1, 128), (16, 16, 128)),
    *((32, 32, 96), (32, 8, 80), (14, 2, 64), (64, 8, 64), (71, 1, 64), (16, 8, 256)),
)
"""Query heads, KV heads and channels of models, and of their tensor-parallel shards."""
PRESETS = ("k5v4u", "k5v4u", "k4v4u", "k4v4", "k3v3", "k8v8")
KINDS = (
    *(("steps",), ("drafts",), ("steps", "drafts"), ("steps", "chunks")),
    *(("prefixes",), ("chunks",), ("prompts",)),
)
"""What the sequences of a batch are; short prompts behind a cached prefix are "prefixes"."""
COUNTS = {"steps": 512, "drafts": 128, "prefixes": 64, "chunks": 8, "prompts": 32}
"""Of sequences, at most."""
QUERIES = {
    "steps": (1, 1),
    "drafts": (2, 9),
    "prefixes": (8, 256),
    "chunks": (16, 2048),
    "prompts": (16, 8192),
}
"""Tokens of the call, from and to."""
CACHE_BYTES, NEW_TOKENS = (20e6, 2e9), 20_000
"""Of a batch: bytes in bf16, at least and at most; tokens of the call, at most."""
LENGTHS = 2
"""Different ones of a kind in a batch, at most: a batch has no more than four parts, which
contenders take one by one."""


class Drawn(NamedTuple):
    preset: str
    page_size: int
    shape: Shape


def between(chance: random.Random, low: int, high: int) -> int:
    """A number whose logarithm is evenly distributed."""
    return round(math.exp(chance.uniform(math.log(low), math.log(high))))


def parts_of(kind: str, older: int, chance: random.Random) -> Iterator[Part]:
    """Sequences of a kind, each with `older` tokens before the call; or, if lengths differ, with 0
    to twice as many."""
    count, (least, most) = between(chance, 1, COUNTS[kind]), QUERIES[kind]
    queries, before = between(chance, least, most), 0 if kind == "prompts" else older
    lengths = min(count, chance.choice([1, LENGTHS]))
    for i in range(lengths):
        each = (count + i) // lengths
        if lengths == 1:
            yield Part(each, before + queries, queries)
        else:
            new = chance.randint(least, queries)
            yield Part(each, chance.randint(0, 2 * before) + new, new)


def draw(number: int) -> Drawn:
    """The batch of this number, the same in every run; kinds take turns."""
    chance = random.Random(number)
    kinds = KINDS[number % len(KINDS)]
    while True:
        q_heads, kv_heads, head_dim = chance.choice(HEADS)
        older = between(chance, 64, 16384)
        parts = [part for kind in kinds for part in parts_of(kind, older, chance)]
        label = f"drawn {number} {'+'.join(kinds)}"
        shape = Shape.of(parts, label, q_heads, kv_heads, head_dim)
        least, most = CACHE_BYTES
        if least <= shape.bf16_bytes <= most and shape.new_tokens <= NEW_TOKENS:
            return Drawn(chance.choice(PRESETS), chance.choice([16, 32, 64, 128]), shape)
