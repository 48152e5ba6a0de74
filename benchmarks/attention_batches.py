"""The batches that bench_attention.py measures: a case is a preset and a shape. The docstring
there says what each table is for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import drawn_batches
from batches import Part, Shape
from contenders import COLD, FIVE, MIXED, PROMPTS, STEPS


@dataclass(frozen=True)
class Case:
    preset: str
    shape: Shape
    page_size: int = 32
    tail: bool = False
    """Whether there are an exact tail and a center, as for models."""
    own: bool = False
    """Whether queries read the keys and values of this call as they are."""
    table: str = "steps"

    @property
    def others(self) -> tuple[str, ...]:
        """The contenders in bf16 and fp8."""
        if self.shape.mixed:
            return MIXED
        if "prompts" in self.table or self.table == "prefixes":
            return PROMPTS
        return {"steps": STEPS, "cold": COLD}.get(self.table, FIVE)

    def parts(self) -> list[Case]:
        """Each part of a mixed batch as a batch of its own."""
        s = self.shape
        alone = [
            replace(s, batch=part.count, context=part.context, q_len=part.q_len, mixed=())
            for part in s.parts
        ]
        return [replace(self, shape=shape) for shape in alone]

    def uniform(self) -> Case:
        """A batch of as many bytes that is good to read."""
        s = self.shape
        batch = max(1, round(s.tokens * s.kv_heads / (SHORT.tokens * SHORT.kv_heads)))
        return replace(self, shape=replace(SHORT, batch=batch, q_len=s.q_len))

    def __str__(self) -> str:
        text = f"{self.preset} {self.shape} page {self.page_size}"
        marks = {"tail": self.tail, "own": self.own, "cold": self.table == "cold"}
        return " ".join([text, *(mark for mark, holds in marks.items() if holds)])


LARGE, LONG_BATCH, LONG = Shape(64, 8192), Shape(8, 32768), Shape(1, 131072)
SHORT, MANY_SHORT = Shape(1, 8192), Shape(16, 2048)
PREFILL = Shape(1, 32768 + 2048, q_len=2048)
PRESETS = ("k4v4u", "k4v4", "k5v4u", "k3v3", "k4v2", "k8v8")
BOTH = ("k4v4u", "k4v4")
QUICK = (
    Case("k5v4u", LARGE, tail=True),
    Case("k4v4u", LARGE, tail=True),
    Case("k4v4", LARGE, tail=True),
    Case("k5v4u", LONG, tail=True),
    Case("k5v4u", SHORT, tail=True),
)


def step_cases() -> Iterator[Case]:
    """Decode steps, with exact tail and center; of two shapes without them, too."""
    for shape in (LARGE, LONG_BATCH, LONG, SHORT, MANY_SHORT):
        for name in PRESETS:
            yield Case(name, shape, tail=True)
        if shape in (LARGE, SHORT):
            for name in BOTH:
                for page_size in (16, 64, 128):
                    yield Case(name, shape, page_size, tail=True)
                yield Case(name, shape)
    for shape in (
        Shape(64, 8192, q_len=4),
        Shape(8, 32768, q_len=4),
        Shape(64, 8192, q_heads=8),  # groups of 1, 8 and 16 query heads
        Shape(64, 8192, q_heads=64),
        Shape(64, 8192, q_heads=128),
        Shape(64, 8192, head_dim=64),
        Shape(64, 4096, head_dim=256),
        Shape(16, 8192, kv_heads=32, head_dim=96),  # Phi-3-mini
        Shape(16, 8192, kv_heads=32, head_dim=80),  # Phi-2
        Shape(64, 8192, head_dim=160),  # StableLM-2-12B
        Shape(128, 8192, q_heads=12, kv_heads=2),  # Qwen2.5-1.5B
        Shape(128, 8192, q_heads=8, kv_heads=1),  # one of eight shards of Llama-70B
    ):
        for name in BOTH:
            yield Case(name, shape, tail=True)


def of_presets(table: str, shape: Shape, presets: str, tailed: str = "k4v4u") -> Iterator[Case]:
    """Cases without and with exact tail; names in one string."""
    for name in presets.split():
        yield Case(name, shape, table=table)
    for name in tailed.split():
        yield Case(name, shape, tail=True, table=table)


ROWS = (  # from 4 to 128 query rows per KV head: q_len times the group of query heads
    Shape(32, 8192),
    Shape(32, 8192, q_len=2),
    Shape(32, 8192, q_len=4),
    Shape(32, 8192, q_heads=40, q_len=4),
    Shape(32, 8192, q_len=5),
    Shape(32, 8192, q_heads=28, kv_heads=4, q_len=3),
    Shape(32, 8192, q_len=8),
    Shape(32, 8192, q_heads=64, q_len=4),
    Shape(32, 8192, q_len=10),
    Shape(32, 8192, q_heads=48, kv_heads=4, q_len=4),
    Shape(64, 8192, q_heads=48, kv_heads=1),
    Shape(32, 8192, q_heads=28, kv_heads=4, q_len=8),
    Shape(32, 8192, q_len=16),
    Shape(32, 8192, q_heads=128, q_len=4),
    Shape(32, 8192, q_heads=71, kv_heads=1),  # Falcon-7B
    Shape(32, 8192, q_heads=96, q_len=8),
    Shape(32, 8192, q_heads=64, kv_heads=4, q_len=8),
)


def rows_cases() -> Iterator[Case]:
    for shape in ROWS:
        yield from of_presets("rows", shape, "k4v4u k5v4u k4v4 k3v3")


def mixed_cases() -> Iterator[Case]:
    chunk = [Part(60, 8192), Part(1, 8192 + 512, 512)]
    drafts = [Part(32, 8192), Part(8, 8192, 4), Part(2, 8192 + 1024, 1024)]
    prompts = [Part(255, 400), Part(4, 161, 161)]
    for parts in (chunk, drafts, prompts):
        shape = Shape.of(parts)
        yield from of_presets("mixed", shape, "k5v4u k4v4u")
        yield Case("k5v4u", shape, own=True, table="mixed")
        yield Case("k5v4u", shape, tail=True, own=True, table="mixed")


def prompt_cases() -> Iterator[Case]:
    for tokens in (2048, 8192, 32768):
        shape = Shape(1, tokens, q_len=tokens)
        yield from of_presets("prompts", shape, "k5v4u k4v4u", tailed="")
        yield Case("k5v4u", shape, own=True, table="prompts")
    yield from of_presets("prompts", PREFILL, "k4v4u k4v4 k5v4u", tailed="")
    for name in ("k4v4u", "k4v4", "k5v4u"):
        yield Case(name, PREFILL, own=True, table="prompts")
    yield Case("k5v4u", PREFILL, tail=True, own=True, table="prompts")


def prefix_cases() -> Iterator[Case]:
    for batch, old, new in (
        (64, 100, 33),
        (32, 300, 100),
        (16, 1000, 161),
        (8, 2000, 161),
        (1, 1000, 512),
        (4, 4000, 200),
        (16, 200, 1000),
    ):
        shape = Shape(batch, old + new, q_len=new)
        yield Case("k5v4u", shape, table="prefixes")
        yield Case("k5v4u", shape, own=True, table="prefixes")
        yield Case("k5v4u", shape, tail=True, own=True, table="prefixes")


def around(count: int, tokens: int, q_heads: int, kv_heads: int) -> Shape:
    """Sequences of a random number of tokens within 10% of `tokens`, the same in every run."""
    chosen = random.Random(count)
    contexts = [chosen.randint(tokens * 9 // 10, tokens * 11 // 10) for _ in range(count)]
    label = f"{count} x about {tokens}"
    return Shape.of([Part(1, context) for context in contexts], label, q_heads, kv_heads)


def spread(q_len: int) -> Shape:
    """13 sequences, evenly from 1 to 40,000 tokens; none is shorter than its queries."""
    contexts = [max(q_len, round(1 + 39999 * i / 12)) for i in range(13)]
    parts = [Part(1, context, q_len) for context in contexts]
    return Shape.of(parts, "13 x 1..40000", q_heads=28, kv_heads=4)


def ragged_cases() -> Iterator[Case]:
    for shape in (
        spread(1),
        spread(3),
        around(128, 8000, 8, 1),  # shards of tensor-parallel models
        around(128, 8000, 4, 1),
        around(32, 2000, 28, 4),
        Shape(512, 300),
        Shape(256, 1024),
    ):
        yield from of_presets("ragged", shape, "k4v4u k5v4u k4v4")


def cold_cases() -> Iterator[Case]:
    for shape in (SHORT, Shape(8, 2048)):
        yield from of_presets("cold", shape, "k4v4u k5v4u k4v4", tailed="k4v4u k5v4u")


def dims_cases() -> Iterator[Case]:
    for head_dim in (144, 224):
        yield from of_presets("dims", Shape(8, 8192, head_dim=head_dim), "k4v4u k5v4u k4v4")


def dims_prompt_cases() -> Iterator[Case]:
    """Whole prompts and chunks of head_dims that row tiles pad."""
    for head_dim in (80, 96, 160, 224):
        for tokens, older in ((2048, 0), (8192, 0), (2048, 32768)):
            shape = Shape(1, tokens + older, head_dim=head_dim, q_len=tokens)
            for name in ("k5v4u", "k4v4"):
                yield Case(name, shape, own=True, table="dims_prompts")


def dims_rows_cases() -> Iterator[Case]:
    """16 to 32 query rows: with 64 channels key tiles take more than 16, with the others split-KV
    does, in blocks of 8."""
    for head_dim in (64, 80, 96, 160, 192, 256):
        for q_len in (4, 5, 8) if head_dim == 64 else (4, 8):
            shape = Shape(16, 8192, head_dim=head_dim, q_len=q_len)
            yield from of_presets("dims_rows", shape, "k4v4u k5v4u k4v4", tailed="")


def drawn_cases() -> Iterator[Case]:
    for number in range(112):
        preset, page_size, shape = drawn_batches.draw(number)
        yield Case(preset, shape, page_size, own=True, table="drawn")


ALL = (
    *step_cases(),
    *rows_cases(),
    *mixed_cases(),
    *prompt_cases(),
    *prefix_cases(),
    *ragged_cases(),
    *cold_cases(),
    *dims_cases(),
    *dims_prompt_cases(),
    *dims_rows_cases(),
    *drawn_cases(),
)
TABLES = tuple(dict.fromkeys(case.table for case in ALL))
