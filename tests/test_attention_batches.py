"""Batches as servers form them, drawn at random, on CUDA.

They are so large that a block takes several pieces of work, and its warps are at different ones at
the same time. Warps that do not wait for each other as they must show in the bits: calls that are
repeated must give the same ones. Calls of several stretches are in test_chunks.py.
"""

import math
import random
from collections.abc import Iterator

import pytest

import torch_turboquant as tt
from tests.attention_cuda import (
    HALVES,
    Case,
    attend_again,
    build,
    expected,
    expected_own,
    near_decoded,
    own_tokens,
)

pytestmark = pytest.mark.cuda

HEADS = ((32, 8, 128), (40, 8, 128), (48, 1, 128), (32, 2, 128), (8, 1, 128), (16, 8, 256))
HEADS += ((14, 2, 64), (32, 8, 80), (71, 1, 64), (32, 32, 96))
"""Query heads, KV heads and channels."""
PRESETS = ("k5v4u", "k4v4u", "k4v4", "k3v3", "k8v8", "k8v8")
KINDS = ("steps", "drafts", "prompts", "chunks", "short chunks")
TILE = 128
"""Query rows of a tile of row tiles, at most."""
LEAST_TILES, LEAST_KEYS = 264, 100_000
"""Of a batch, in all its KV heads: so many tiles of rows, or keys."""
REPEATED = 4


def between(chance: random.Random, low: int, high: int) -> int:
    """Evenly distributed logarithms."""
    return round(math.exp(chance.uniform(math.log(low), math.log(high))))


def sequences(chance: random.Random, kind: str) -> Iterator[tuple[int, int]]:
    """Of one kind: older tokens and new ones of each."""
    count = between(chance, 1, {"steps": 200, "chunks": 6}.get(kind, 30))
    older = 0 if kind == "prompts" else between(chance, 3000 if kind == "chunks" else 50, 9000)
    most = {"steps": 1, "drafts": 8, "short chunks": 100}.get(kind, 1500)
    new = between(chance, most // 4 + 1, most)
    same_older, same_new = chance.random() < 0.5, chance.random() < 0.5
    for _ in range(count):
        a = older if same_older else chance.randint(0, older)
        b = new if same_new else chance.randint(1, new)
        yield a, b


def draw(seed: int) -> Case:
    """A case that a GPU's memory and a second of the float64 oracle are enough for."""
    chance = random.Random(seed)
    while True:
        q_heads, kv_heads, d = chance.choice(HEADS)
        kinds = [KINDS[seed % len(KINDS)], *chance.choices(KINDS, k=chance.choice([0, 0, 1, 2]))]
        drawn = [x for kind in kinds for x in sequences(chance, kind)]
        if chance.random() < 0.3:
            chance.shuffle(drawn)
        lengths, q_lens = [a + b for a, b in drawn], [b for _, b in drawn]
        tiles = kv_heads * sum(-(-n * q_heads // kv_heads // TILE) for n in q_lens)
        if tiles < LEAST_TILES and kv_heads * sum(lengths) < LEAST_KEYS:
            continue
        scores = [q_heads * n * q for n, q in zip(lengths, q_lens, strict=True)]
        elements = len(lengths) * max(lengths) * kv_heads * d
        if elements < 1 << 28 and max(scores) < 1 << 28 and sum(scores) < 1 << 31:
            break
    config = tt.preset(chance.choice(PRESETS), d, page_size=chance.choice([16, 32, 64, 128]))
    return build(
        config,
        lengths,
        q_lens,
        q_heads=q_heads,
        kv_heads=kv_heads,
        dtype=chance.choice(HALVES),
        tail=chance.random() < 0.3,
        seed=seed,
    )


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_batches(seed, own):
    case, options = draw(seed), {"sliding_window": 700 if seed % 4 == 3 else 0}
    tokens = own_tokens(case) if own else {}
    found = attend_again(case, REPEATED, **tokens, **options)
    exact = expected_own(case, **options) if own else expected(case, **options)
    near_decoded(found, exact, case)
