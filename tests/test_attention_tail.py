"""The exact tail in attention: its rows in the softmax, missing rows, rolling back."""

import pytest
import torch

import torch_turboquant as tt
from tests.attention_cases import assert_same_results, bounds, build, check, run
from tests.helpers import assert_same_bytes, garbage_cache, int32, randn


def test_tail_mixes_into_the_same_softmax(device):
    """Rows replaced in the tail change exactly the queries that read them."""
    config = tt.preset("k4v4", 64, page_size=16, sink_tokens=2, recent_window=3)
    case = build(config, [30], [2], tail=True, center=True)
    out, _ = check(case, device)
    ring, slot = case.tail.ring, int(case.tail.slots[0])
    rows = ring.shape[2] - 2
    # 25 is no longer there: the ring has as many rows as the window and one for a second query
    readers = {0: {0, 1}, 1: {0, 1}, 26: {0}, 27: {0, 1}, 28: {0, 1}, 29: {1}}
    for position, expected in readers.items():
        row = position if position < 2 else 2 + (position - 2) % rows
        changed = ring.clone()
        changed[slot, :, row] += 1
        other, _ = check(case._replace(tail=case.tail._replace(ring=changed)), device)
        different = {i for i in range(2) if not torch.equal(other[i], out[i])}
        assert different == expected, position


def test_a_tail_without_a_ring_is_refused():
    """It could be taken for none."""
    case = build(tt.preset("k4v4", 64, page_size=16), [30], [2], tail=True, center=True)
    with pytest.raises(TypeError, match="tail has no ring: give None"):
        run(case._replace(tail=case.tail._replace(ring=None)), "cpu")


@pytest.mark.parametrize("sinks_held", [0, 1, 2, 3])
@pytest.mark.parametrize("first_held", [0, 24, 25, 27, 29, 40])
def test_rows_that_the_tail_does_not_hold(sinks_held, first_held, device):
    """tail_valid: what is missing comes from codes. Missing rows are NaN here."""
    config = tt.preset("k4v4", 64, page_size=16, sink_tokens=3, recent_window=6)
    case = build(config, [31, 12], [2, 1], tail=True, center=True)
    ring = case.tail.ring.clone()
    slot = int(case.tail.slots[0])
    rows = ring.shape[2] - 3
    ring[slot, :, sinks_held:3] = torch.nan
    for position in range(31 - rows, min(first_held, 31)):
        ring[slot, :, 3 + (position - 3) % rows] = torch.nan
    valid = torch.tensor([[3, 0]] * len(ring), dtype=torch.int32)
    valid[slot] = torch.tensor([sinks_held, first_held])
    tail = tt.Tail(ring, case.tail.slots, valid)
    out, _ = check(case._replace(tail=tail), device)
    everything, _ = check(case, device)
    assert_same_results(out[2], everything[2], device)  # the other sequence does not care
    if sinks_held == 3 and first_held <= 24:  # the first query is at 29, its window begins at 24
        assert_same_results(out, everything, device)
    if sinks_held == 0 and first_held == 40:
        without, _ = run(case._replace(tail=None), device)
        assert (out[:2] - without[:2]).abs().max() <= bounds(case, device)[1]


def test_sequences_without_a_tail(device):
    config = tt.preset("k2v2", 64, page_size=16, sink_tokens=2, recent_window=5)
    case = build(config, [31, 12, 40], tail=True, center=True)
    slots = case.tail.slots.clone()
    slots[1] = -1
    mixed, _ = check(case._replace(tail=case.tail._replace(slots=slots)), device)
    exact, _ = run(case, device)
    codes, _ = run(case._replace(tail=None), device)
    assert_same_results(mixed[[0, 2]], exact[[0, 2]], device)
    assert (mixed[1] - codes[1]).abs().max() <= bounds(case, device)[1]
    assert (exact[1] - codes[1]).abs().max() > 5 * bounds(case, device)[1]


def test_rolling_back_rejected_tokens(device):
    """Speculative decoding: 4 tokens stored, 3 rejected, others stored in their place. Codes, ring
    and results are those of a run that never saw the rejected ones."""
    config = tt.preset("k4v4", 64, page_size=16, sink_tokens=2, recent_window=6)
    accepted = build(config, [25], [4], tail=True, max_q_len=4)
    tables, slots = accepted.tables, accepted.slots[0]
    cache = garbage_cache(config, accepted.cache.shape[0], 2)
    ring = torch.full_like(accepted.tail.ring, torch.nan)
    tail = tt.Tail(ring, accepted.tail.slots)
    rejected = 5 * randn(4, 2, 64, seed=77)

    def store(k, v, start):
        span = slots[start : start + len(k)]
        cu, lengths = int32(0, len(k)), int32(start + len(k))
        tt.cache_store(
            k, v, cache, span, config, tables, tail=tail, seq_lens=lengths, cu_seqlens_q=cu
        )

    k, v = accepted.k[0], accepted.v[0]
    store(k[:20], v[:20], 0)
    for start in range(20, 25, 1):  # one accepted each time, three rejected
        draft_k, draft_v = rejected.clone(), rejected.flip(0)
        draft_k[0], draft_v[0] = k[start], v[start]
        room = min(4, len(slots) - start)
        store(draft_k[:room], draft_v[:room], start)
    out, _ = run(accepted._replace(cache=cache, tail=tail), device)
    # the last call stored position 24 alone; 21 to 24 are the queries
    clean, _ = run(accepted, device)
    assert_same_bytes(out, clean)
    page = slots // 16
    assert_same_bytes(
        *(
            torch.stack(
                tt.cache_load(c, accepted.block_table, int32(25), config, tables, 25, torch.float32)
            )
            for c in (cache, accepted.cache)
        )
    )
    assert len(page.unique()) == 2
