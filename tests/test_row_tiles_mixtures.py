"""Batches of few and many query rows on CUDA: any mixture, in any order, with padding behind."""

import random

import pytest
import torch

import torch_turboquant as tt
from tests.attention_cuda import (
    DEVICE,
    HALVES,
    MIXTURES,
    assert_near,
    attend,
    batch,
    build,
    check,
    check_own,
    partly_held,
    starts_of,
)

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("group", [1, 4, 7, 16, 20])
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures(name, group):
    lengths, q_lens = batch(MIXTURES[name])
    for i, (preset, d) in enumerate((("k4v4u", 128), ("k5v4u", 64), ("k4v4", 256), ("k5v4u", 80))):
        config = tt.preset(preset, d, page_size=16 << i, recent_window=20)
        case = build(
            config,
            lengths,
            q_lens,
            q_heads=2 * group,
            dtype=HALVES[i % 2],
            center="scaled",
            tail=i > 0,
            seed=group,
        )
        check(case)
        check_own(case, sliding_window=90 * i)


@pytest.mark.parametrize("preset", ["k4v4u", "k4v4", "k8v8"])
@pytest.mark.parametrize("name", MIXTURES)
def test_tails_that_hold_only_some_tokens(name, preset):
    """And sequences without one, in every kernel."""
    lengths, q_lens = batch(MIXTURES[name])
    for group in (1, 4, 16):
        config = tt.preset(preset, 128, recent_window=40, sink_tokens=4)
        case = build(config, lengths, q_lens, q_heads=2 * group, tail=True, seed=group)
        case = partly_held(case, seed=group)
        check(case)
        check_own(case)


@pytest.mark.parametrize("kinds", [(1,), (1, 1, 1, 1, 30), (0, 1, 5, 40), (20,)])
@pytest.mark.parametrize("count", [33, 70, 300, 1100])
def test_many_sequences(count, kinds):
    """More than a warp has lanes, and than a block has room to count."""
    chosen = random.Random(count)
    q_lens = [chosen.choice(kinds) for _ in range(count)]
    lengths = [max(q, chosen.randint(1, 150)) for q in q_lens]
    case = build(tt.preset("k5v4u", 128), lengths, q_lens, tail=True, seed=count)
    check(case)
    check_own(case)


def test_any_order_gives_the_same_results():
    """Up to roundings: where the work is cut depends on the whole batch."""
    lengths, q_lens = batch(MIXTURES["all sorts"])
    config = tt.preset("k4v4u", 128, page_size=16)
    case = build(config, lengths, q_lens)
    out, lse = check(case)
    starts = case.starts.tolist()
    order = list(range(len(lengths)))
    for seed in range(4):
        random.Random(seed).shuffle(order)
        rows = torch.cat([torch.arange(starts[s], starts[s + 1], device=DEVICE) for s in order])
        moved = case._replace(
            q=case.q[rows],
            table=case.table[order].contiguous(),
            lengths=case.lengths[order],
            starts=starts_of([q_lens[s] for s in order]),
        )
        found = attend(moved)
        assert_near(found, (out[rows].double(), lse[rows].double()), 1.0, roundings=2)


@pytest.mark.parametrize(
    "q_lens", [[40, 1, 0, 3], [40, 40, 40, 40], [2, 1, 0, 3], [8, 8, 8, 8], [8, 1, 0, 3]]
)
def test_rows_past_the_last_sequence(q_lens):
    case = build(tt.preset("k4v4u", 128), [700, 133, 50, 60], q_lens, tail=True)
    out, lse = check(case)
    used = len(case.q)
    for extra in (1, 3, 500):
        longer = case._replace(q=torch.cat([case.q, case.q[:1].expand(extra, -1, -1)]))
        given = {
            "out": torch.full_like(longer.q, torch.nan),
            "lse": torch.full(longer.q.shape[:2], torch.nan, device=DEVICE),
        }
        more, more_lse = attend(longer, **given)
        found = more[:used], more_lse[:used]  # another choice of kernels may round otherwise
        assert_near(found, (out.double(), lse.double()), 1.0, roundings=2)
        assert not more[used:].any() and (more_lse[used:] == -torch.inf).all()
