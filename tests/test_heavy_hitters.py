"""Eviction while decoding: what stays, what it was chosen by, and that nothing else changes."""

import numpy as np
import pytest
import torch

import torch_turboquant as tt
from tests.helpers import assert_same_bytes, randn
from torch_turboquant import heavy_hitters
from torch_turboquant.heavy_hitters import moved_along, moves_to_budget
from torch_turboquant.pool import compaction

LAYERS, HEADS, GROUP, D = 2, 2, 2, 32


def pool_of(device, sinks=2, window=3, **others):
    config = tt.preset("k8v8", D, page_size=16, sink_tokens=sinks, recent_window=window)
    sizes = {"num_pages": 64, "max_seqs": 4, **others}
    return tt.PagedKVPool(
        config, num_layers=LAYERS, num_kv_heads=HEADS, dtype=torch.float32, device=device, **sizes
    )


def tokens(count, seed, device, heads=HEADS):
    """Of each layer [count, heads, D]."""
    return [randn(count, heads, D, seed=100 * seed + i).to(device) for i in range(LAYERS)]


def fill(pool, count, seed):
    seq = pool.allocate()
    keys, values = tokens(count, seed, pool.device), tokens(count, seed + 1, pool.device)
    pool.append([seq], keys, values, count)
    return seq


def step(pool, sequences, hitters, seed, new=1):
    """A step of random tokens, `new` of each sequence. Returns q and lse of each layer."""
    n, device = len(sequences) * new, pool.device
    made = []
    with pool.reserve(sequences, new) as batch:
        for layer in range(LAYERS):
            q, k, v = (
                part[layer]
                for part in (
                    tokens(n, seed, device, HEADS * GROUP),
                    tokens(n, seed + 1, device),
                    tokens(n, seed + 2, device),
                )
            )
            pool.store(layer, k, v, batch)
            _, lse = pool.attend(layer, q, batch)
            hitters.observe(layer, q, lse, batch)
            made.append((q, lse))
    return made


# ---- which tokens stay


def kept_positions(mass, lengths, budget, first, last):
    """The positions that the first `budget` tokens have had."""
    sources, targets = moves_to_budget(mass, lengths, budget, first, last)
    position = torch.arange(mass.shape[2], device=mass.device).expand_as(mass)
    for row, (source, target) in enumerate(
        zip(sources.flatten(0, 1), targets.flatten(0, 1), strict=True)
    ):
        moved = target[source >= 0].tolist()
        assert len(set(moved)) == len(moved) and all(0 <= at < budget for at in moved), row
    return moved_along(position, sources, targets, budget)


def test_the_heaviest_stay_and_fill_the_gaps(device):
    mass = torch.tensor([[[0, 9, 1, 8, 0, 7, 2, 6, 0, 0], [5, 1, 1, 1, 1, 1, 1, 1, 9, 9]]]).float()
    kept = kept_positions(mass.to(device), torch.tensor([10], device=device), 6, 1, 2)
    # head 0 keeps 0 (the first), 1, 3 and 5, then 8 and 9; 3 is where it was, 5 fills the gap at 2
    # head 1 keeps its first, and of equal masses the earliest
    assert kept.tolist() == [[[0, 1, 5, 3, 8, 9], [0, 1, 2, 3, 8, 9]]]


def test_masses_that_are_no_numbers_stay(device):
    """Even more of them than there is room for: as many tokens are kept as ever."""
    mass = torch.ones(1, 2, 12, device=device)
    mass[0, 0, [2, 9]] = torch.nan
    mass[0, 1] = torch.inf
    mass[0, 1, 3] = torch.nan
    kept = kept_positions(mass, torch.tensor([12], device=device), 6, 1, 2)
    assert kept.tolist() == [[[0, 1, 2, 9, 10, 11], [0, 1, 2, 3, 10, 11]]]


@pytest.mark.parametrize("seed", range(4))
def test_kept_positions_of_random_masses(seed, device):
    mass = randn(3, 4, 90, seed=seed).abs()
    lengths = torch.tensor([90, 70, 81])
    budget, first, last = 40, 3, 11
    kept = kept_positions(mass.to(device), lengths.to(device), budget, first, last).cpu()
    for s, length in enumerate(lengths.tolist()):
        for head in range(4):
            got = kept[s, head].tolist()
            assert got[budget - last :] == list(range(length - last, length))
            middle = mass[s, head, first : length - last]
            want = {*range(first), *(middle.topk(budget - last - first).indices + first).tolist()}
            assert set(got[: budget - last]) == want
            for place, position in enumerate(got[: budget - last]):
                assert place == position or position >= budget - last
            movers = [p for p in got[: budget - last] if p >= budget - last]
            assert movers == sorted(movers)


# ---- a pool


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("tail", [False, True])
def test_sequences_are_cut_to_the_heaviest(tail, at_once, device, monkeypatch):
    """Two sequences of different lengths; masses are those of the last queries in float64."""
    monkeypatch.setattr(heavy_hitters, "LAYERS_AT_ONCE", at_once)
    pool = pool_of(device, *((2, 3) if tail else (0, 0)))
    budget, interval, window, last = 40, 12, 4, 6
    hitters = tt.HeavyHitters(
        pool, budget, interval=interval, window=window, keep_last=last, decay=0.0
    )
    sequences = [fill(pool, 47, 1), fill(pool, 60, 5)]
    seen = []
    while not all(hitters.due(s) for s in sequences):
        assert not hitters.evict(sequences[:1])
        seen.append(step(pool, sequences, hitters, 10 + 3 * len(seen)))
    lengths = [s.length for s in sequences]
    assert lengths == [52, 65] and len(seen) == 5
    before = [[pool.load(layer, s) for s in sequences] for layer in range(LAYERS)]
    tails = [t.clone() for t in pool.tails or ()]
    used = pool.statistics().used_pages

    assert hitters.evict(sequences) == sequences
    assert [s.length for s in sequences] == [budget, budget]
    assert [s.dropped for s in sequences] == [12, 25]
    assert pool.statistics().used_pages < used
    first = pool.configs[0].sink_tokens
    for layer in range(LAYERS):
        for i, (seq, length) in enumerate(zip(sequences, lengths, strict=True)):
            keys = before[layer][i][0].double()
            mass = torch.zeros(HEADS, length, dtype=torch.float64, device=device)
            for back in range(window):
                q, lse = (part[i].double() for part in seen[-1 - back][layer])
                score = torch.einsum("hgd,jhd->hgj", q.view(HEADS, GROUP, D), keys) / D**0.5
                weights = torch.exp(score - lse.view(HEADS, GROUP, 1))
                mass[:, : length - back] += weights.sum(1)[:, : length - back]
            order = kept_positions(
                mass[None].float(), torch.tensor([length], device=device), budget, first, last
            )[0]
            for old, new in zip(before[layer][i], pool.load(layer, seq), strict=True):
                for head in range(HEADS):
                    assert_same_bytes(new[:, head], old[order[head], head])
            if not tail:
                continue
            ring = pool.tails[0].shape[2] - first  # the exact rows of the last tokens moved along
            for position in range(budget - ring, budget):
                old = first + (position + length - budget - first) % ring
                new = first + (position - first) % ring
                entry = seq._row
                assert_same_bytes(pool.tails[layer][entry, :, new], tails[layer][entry, :, old])
            assert_same_bytes(pool.tails[layer][entry, :, :first], tails[layer][entry, :, :first])


def test_attention_afterwards_is_that_over_the_kept_tokens(device):
    """Of a step behind an eviction, against dense attention over what the pool decodes."""
    pool = pool_of(device, 0, 0)
    hitters = tt.HeavyHitters(pool, 40, interval=8, window=4, keep_last=4)
    seq = fill(pool, 44, 1)
    for i in range(4):
        step(pool, [seq], hitters, 20 + 3 * i)
    assert hitters.evict([seq]) == [seq]
    made = step(pool, [seq], hitters, 50)
    for layer in range(LAYERS):
        q, lse = made[layer]
        k, _ = pool.load(layer, seq)
        score = torch.einsum("hgd,jhd->hgj", q[0].view(HEADS, GROUP, D), k) / D**0.5
        assert k.shape[0] == 41
        assert torch.allclose(score.logsumexp(-1).flatten(), lse[0], atol=2e-3)


def test_masses_of_earlier_evictions_fade(device):
    """A token that was heavy once outlives one round with decay 1, and none with decay 0."""
    for decay, lives in ((1.0, True), (0.0, False)):
        pool = pool_of(device, 0, 0)
        hitters = tt.HeavyHitters(pool, 20, interval=4, window=4, keep_last=4, decay=decay)
        seq = fill(pool, 20, 1)
        for i in range(4):
            step(pool, [seq], hitters, 30 + 3 * i)
        hitters.evict([seq])
        token = 5  # whose value is marked, and whose mass is
        for mass in hitters._mass:
            mass[seq._row, :, token] = 1e6
        marked = [pool.load(layer, seq)[1][token].clone() for layer in range(LAYERS)]
        for i in range(4):
            step(pool, [seq], hitters, 60 + 3 * i)
            for q in hitters._q:
                q.zero_()  # so that all tokens weigh alike, and the earliest stay
            for lse in hitters._lse:
                lse.zero_()
        for mass in hitters._mass:
            mass[seq._row, :, 6:] += 1  # decay 0 forgets this, too
            mass[seq._row, :, :5] += 2
        hitters.evict([seq])
        for layer in range(LAYERS):
            found = (pool.load(layer, seq)[1] == marked[layer]).flatten(1).all(1).any()
            assert bool(found) or not lives
            if lives:
                assert float(hitters._mass[layer][seq._row].max()) >= 1e6
            else:
                assert float(hitters._mass[layer][seq._row].max()) < 1e5


@pytest.mark.parametrize("way", ["truncate", "compact"])
def test_masses_are_those_of_the_tokens_that_are_there(way, device):
    """Of an answer that is taken back and written anew, and of tokens that somebody has moved."""
    pool = pool_of(device, 0, 0)
    hitters = tt.HeavyHitters(pool, 20, interval=4, window=4, keep_last=4, decay=1.0)
    seq = fill(pool, 20, 1)
    for i in range(4):
        step(pool, [seq], hitters, 30 + 3 * i)
    hitters.evict([seq])
    for mass in hitters._mass:
        mass[seq._row] = 1e6
    if way == "truncate":
        pool.truncate(seq, 8)
        left = 8
    else:
        order = torch.arange(20, device=device).flip(0).expand(1, HEADS, 20).contiguous()
        pool.compact([seq], [order] * LAYERS)
        left = 0
    for i in range(24 - seq.length):
        step(pool, [seq], hitters, 60 + 3 * i)
    assert hitters.evict([seq]) == [seq]
    for mass in hitters._mass:
        assert ((mass[seq._row] >= 1e6).sum(1) == left).all()


@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.parametrize("way", ["truncate", "rollback"])
def test_queries_of_tokens_that_were_taken_back_have_no_say(way, window):
    """With drafts, and with steps that fail, the same tokens stay as without.

    (On the CPU only, whose rounding does not depend on how many queries a call has.)
    """
    device = torch.device("cpu")
    sizes = [(1, 4), (3, 4), (2, 4), (4, 4), (1, 4), (2, 4), (2, 4), (1, 4)]  # accepted, of a step
    if way == "rollback":
        sizes = [(2, 2)] * 8
    pool, alone = pool_of(device, max_q_len=4), pool_of(device, max_q_len=4)
    hitters, of_alone = (
        tt.HeavyHitters(p, 40, interval=8, window=window, keep_last=10) for p in (pool, alone)
    )
    seq, plain = fill(pool, 40, 1), fill(alone, 40, 1)
    shapes = [(16, heads, D) for heads in (GROUP * HEADS, HEADS, HEADS)]
    answer = [randn(*shape, seed=i).to(device) for i, shape in enumerate(shapes)]
    others = [9 * randn(*shape, seed=5 + i).to(device) for i, shape in enumerate(shapes)]

    def store(pool, seq, hitters, tokens, fails=False):
        with pool.reserve([seq], len(tokens[0])) as batch:
            for layer in range(LAYERS):
                _, lse = pool.store_and_attend(layer, *tokens, batch)
                hitters.observe(layer, tokens[0], lse, batch)
            if fails:
                raise KeyboardInterrupt

    at = 0
    for count, new in sizes:
        if way == "rollback":
            with pytest.raises(KeyboardInterrupt):
                store(pool, seq, hitters, [x[at : at + count] for x in others], fails=True)
        end = at + count
        drafts = [x[at : at + new - count] for x in others]
        right = [x[at:end] for x in answer]
        store(pool, seq, hitters, [torch.cat(pair) for pair in zip(right, drafts, strict=True)])
        pool.truncate(seq, 40 + end)
        at = end
    for i in range(at):
        store(alone, plain, of_alone, [x[i : i + 1] for x in answer])
    assert hitters.evict([seq]) == [seq] and of_alone.evict([plain]) == [plain]
    for layer in range(LAYERS):
        for mine, wanted in zip(pool.load(layer, seq), alone.load(layer, plain), strict=True):
            assert_same_bytes(mine, wanted)
        mine, wanted = (h._mass[layer][s._row] for h, s in ((hitters, seq), (of_alone, plain)))
        torch.testing.assert_close(mine, wanted, atol=1e-3, rtol=1e-2)


def test_an_answer_that_is_written_anew_is_observed_anew(device):
    """Steps count that were observed since the tokens are there."""
    pool = pool_of(device, 0, 0)
    hitters = tt.HeavyHitters(pool, 20, interval=4, window=4, keep_last=4)
    seq = fill(pool, 20, 1)
    for i in range(4):
        step(pool, [seq], hitters, 30 + 3 * i)
    assert hitters.due(seq)
    pool.truncate(seq, 10)
    pool.append([seq], tokens(14, 5, device), tokens(14, 6, device), 14)
    assert seq.length == 24 and not hitters.due(seq)
    for i in range(4):
        assert hitters.evict([seq]) == []
        step(pool, [seq], hitters, 60 + 3 * i)
    assert hitters.evict([seq]) == [seq]


def test_shared_pages_stay_as_they_are(device):
    pool = pool_of(device)
    hitters = tt.HeavyHitters(pool, 40, interval=8, window=2, keep_last=4)
    seq = fill(pool, 46, 1)
    twin = pool.fork(seq)
    before = [pool.load(layer, twin) for layer in range(LAYERS)]
    for i in range(2):
        step(pool, [seq], hitters, 20 + 3 * i)
    assert hitters.evict([seq, twin]) == [seq]
    assert (seq.length, twin.length) == (40, 46)
    assert not set(pool.page_numbers(seq)) & set(pool.page_numbers(twin))
    for layer in range(LAYERS):
        for old, new in zip(before[layer], pool.load(layer, twin), strict=True):
            assert_same_bytes(new, old)
    pool.free(twin)
    pool.free(seq)
    assert pool.free_pages == pool.num_pages


def test_a_pool_without_room_for_copies_changes_nothing(device):
    pool = pool_of(device, num_pages=4)
    hitters = tt.HeavyHitters(pool, 40, interval=8, window=2, keep_last=4)
    seq = fill(pool, 46, 1)
    pool.fork(seq)
    for i in range(2):  # takes the last page, for a copy
        step(pool, [seq], hitters, 20 + 3 * i)
    before = [pages.clone() for pages in pool.pages], pool.page_numbers(seq)
    with pytest.raises(tt.PoolExhausted):
        hitters.evict([seq])
    for old, new in zip(before[0], pool.pages, strict=True):
        assert_same_bytes(new, old)
    assert (seq.length, pool.page_numbers(seq)) == (48, before[1])


def due(pool, hitters):
    seq = fill(pool, 46, 1)
    for i in range(2):
        step(pool, [seq], hitters, 20 + 3 * i)
    return seq


def test_a_budget_of_numpy():
    """Lengths stay ints, as files of sequences need them."""
    pool = pool_of("cpu")
    hitters = tt.HeavyHitters(pool, np.int64(40), interval=np.int64(8), window=2, keep_last=4)
    seq = due(pool, hitters)
    assert hitters.evict([seq]) == [seq]
    assert type(seq.length) is int and type(seq.dropped) is int and seq.length == 40


def test_a_sequence_that_is_named_twice(device):
    pool = pool_of(device)
    hitters = tt.HeavyHitters(pool, 40, interval=8, window=2, keep_last=4)
    seq = due(pool, hitters)
    twin = pool.fork(seq)
    before = pool.statistics(), [pool.load(layer, twin) for layer in range(LAYERS)]
    with pytest.raises(ValueError, match="a sequence is there twice"):
        hitters.evict([seq, seq])
    assert pool.statistics() == before[0] and seq.length == 48
    assert hitters.evict([seq]) == [seq]
    for layer in range(LAYERS):
        for old, new in zip(before[1][layer], pool.load(layer, twin), strict=True):
            assert_same_bytes(new, old)


def test_a_sequence_in_an_open_batch():
    pool = pool_of("cpu")
    hitters = tt.HeavyHitters(pool, 40, interval=8, window=2, keep_last=4)
    seq = due(pool, hitters)
    before = [pool.load(layer, seq) for layer in range(LAYERS)]
    batch = pool.reserve([seq])
    with pytest.raises(RuntimeError, match="this sequence is in an open batch"):
        hitters.evict([seq])
    pool.rollback(batch)
    for layer in range(LAYERS):
        for old, new in zip(before[layer], pool.load(layer, seq), strict=True):
            assert_same_bytes(new, old)
    assert hitters.evict([seq]) == [seq]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failure_in_the_middle(failing, device, monkeypatch):
    """A sequence whose layers hold different tokens is nobody's."""
    pool = pool_of(device)
    hitters = tt.HeavyHitters(pool, 40, interval=8, window=2, keep_last=4)
    seq = due(pool, hitters)
    twin = pool.fork(seq)
    before = [pool.load(layer, twin) for layer in range(LAYERS)]
    calls, move = [], compaction.cache_move

    def fails(*args):
        calls.append(args)
        if len(calls) == failing:
            raise torch.OutOfMemoryError("no memory")
        move(*args)

    monkeypatch.setattr(compaction, "cache_move", fails)
    with pytest.raises(RuntimeError, match="no memory" if failing == 1 else "were freed: no mem"):
        hitters.evict([seq])
    monkeypatch.undo()
    if failing == 1:
        assert seq.length == 48 and hitters.evict([seq]) == [seq]
    else:
        with pytest.raises(RuntimeError, match="this sequence was freed"):
            pool.load(0, seq)
    for layer in range(LAYERS):
        for old, new in zip(before[layer], pool.load(layer, twin), strict=True):
            assert_same_bytes(new, old)
    for one in {twin, seq} if failing == 1 else {twin}:
        pool.free(one)
    assert pool.free_pages == pool.num_pages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_whatever_the_defaults_are(dtype, device):
    """Engines set the dtype of the model, and its device, while they work."""
    pool = pool_of(device)
    hitters = tt.HeavyHitters(pool, 40, interval=8, window=2, keep_last=4)
    seq, like = due(pool, hitters), due(pool, hitters)
    torch.set_default_dtype(dtype)
    torch.set_default_device("meta")
    try:
        assert hitters.evict([seq]) == [seq]
        kept = [torch.arange(20, device=device).repeat(1, HEADS, 1) for _ in range(LAYERS)]
        pool.compact([seq], kept)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert hitters.evict([like]) == [like]
    pool.compact([like], kept)
    for layer in range(LAYERS):
        for one, other in zip(pool.load(layer, seq), pool.load(layer, like), strict=True):
            assert_same_bytes(one, other)


def test_queries_with_gradients(device):
    """Whoever observes with gradients on keeps no graph."""
    pool = pool_of(device)
    hitters = tt.HeavyHitters(pool, 40, interval=8, window=2, keep_last=4)
    seq = fill(pool, 46, 1)
    for _ in range(2):
        with pool.reserve([seq]) as batch:
            for layer in range(LAYERS):
                q, k, v = (tokens(1, 20 + j, device, n)[layer] for j, n in enumerate((4, 2, 2)))
                pool.store(layer, k, v, batch)
                _, lse = pool.attend(layer, q, batch)
                hitters.observe(layer, q.requires_grad_(), lse, batch)
    assert not any(kept.requires_grad for kept in hitters._q)
    assert hitters.evict([seq]) == [seq]


def test_rows_of_a_former_sequence_have_no_meaning(device):
    pool = pool_of(device, max_seqs=1)
    hitters = tt.HeavyHitters(pool, 40, interval=8, window=4, keep_last=4)
    seq = fill(pool, 44, 1)
    for i in range(4):
        step(pool, [seq], hitters, 20 + 3 * i)
    hitters.evict([seq])
    pool.free(seq)
    seq = fill(pool, 48, 7)
    assert seq.dropped == 0 and not hitters.due(seq)
    step(pool, [seq], hitters, 40)
    assert not hitters.due(seq) and not any(float(m.abs().max()) for m in hitters._mass)


@pytest.mark.parametrize("new", [2, 3, 4])
def test_steps_of_several_tokens(new, device):
    """Drafts: the queries of every step but the last token's are missing, however many there are.

    The positions that are seen may be multiples of `window` or miss any of its places.
    """
    pool = pool_of(device, max_q_len=4)
    hitters = tt.HeavyHitters(pool, 40, interval=8, window=4, keep_last=8)
    seq = fill(pool, 44, 1)
    for i in range(4):
        assert not hitters.evict([seq])
        step(pool, [seq], hitters, 20 + 3 * i, new)
    assert hitters.evict([seq]) == [seq] and (seq.length, seq.dropped) == (40, 4 + 4 * new)
    assert all(torch.isfinite(m).all() for m in hitters._mass)


@pytest.mark.parametrize("way", ["memory", "file", "adopt"])
def test_positions_follow_a_sequence(way, tmp_path, device):
    """Forks and sequences that come back go on at the position where they were."""
    pool = pool_of(device)
    hitters = tt.HeavyHitters(pool, 40, interval=8, window=4, keep_last=4)
    seq = fill(pool, 44, 1)
    for i in range(4):
        step(pool, [seq], hitters, 20 + 3 * i)
    assert hitters.evict([seq]) == [seq] and (seq.length, seq.dropped) == (40, 8)
    fork = pool.fork(seq)
    if way == "adopt":
        back = pool.adopt(pool.export(seq))
    else:
        back = pool.swap_in(pool.swap_out(seq, tmp_path / "s" if way == "file" else None))
    assert [(s.length, s.dropped) for s in (fork, back)] == [(40, 8)] * 2
    pool.truncate(back, 38)
    assert (back.length, back.dropped, fork.dropped) == (38, 8, 8)
    pool.truncate(back, 0)
    assert back.dropped == 0


# ---- what is refused


def test_numbers_that_do_not_fit():
    pool = pool_of("cpu")
    for changes, text in (
        ({"budget": 0}, "budget is 0"),
        ({"window": 9}, "window is 9, supported: up to the interval of 8"),
        ({"decay": 1.5}, "decay is 1.5, supported: 0 to 1"),
        ({"interval": 8.5}, "interval is 8.5, which is no whole number"),
        ({"softmax_scale": float("nan")}, "softmax_scale is nan"),
        ({"soft_cap": -1.0}, "soft_cap is -1.0"),
        ({"budget": 22}, "budget is 22, supported: more than the 2 sinks and the 20 last tokens"),
    ):
        given = {"budget": 40, "interval": 8, "window": 4, "keep_last": 20, **changes}
        with pytest.raises(ValueError, match=text):
            tt.HeavyHitters(pool, **given)


def test_tensors_that_are_not_the_batch_s():
    pool = pool_of("cpu")
    hitters = tt.HeavyHitters(pool, 40, interval=8, window=4, keep_last=4)
    seq = fill(pool, 46, 1)
    q, lse = torch.zeros(1, 4, D), torch.zeros(1, 4)
    with pool.reserve([seq]) as batch:
        for layer in range(LAYERS):
            pool.store(layer, torch.zeros(1, HEADS, D), torch.zeros(1, HEADS, D), batch)
        with pytest.raises(TypeError, match="q has dtype float16"):
            hitters.observe(0, q.half(), lse, batch)
        with pytest.raises(ValueError, match="lse has shape"):
            hitters.observe(0, q, lse[:, :2], batch)
        with pytest.raises(ValueError, match="q has shape"):
            hitters.observe(0, q.repeat(2, 1, 1), lse.repeat(2, 1), batch)
        with pytest.raises(ValueError, match="layer"):
            hitters.observe(LAYERS, q, lse, batch)
        with pytest.raises(ValueError, match="this batch belongs to another pool"):
            tt.HeavyHitters(pool_of("cpu"), 80).observe(0, q, lse, batch)
        with pytest.raises(ValueError, match="q has 3 heads, expected a multiple"):
            hitters.observe(0, q[:, :3], lse[:, :3].contiguous(), batch)
        hitters.observe(0, q, lse, batch)
        with pytest.raises(ValueError, match=r"q has shape \[1, 2, 32\], expected \[1, 4, 32\]"):
            hitters.observe(0, q[:, :2], lse[:, :2].contiguous(), batch)
    with pytest.raises(RuntimeError, match="this batch was committed or rolled back"):
        hitters.observe(0, q, lse, batch)
    for _ in range(5):
        step_of_one_layer(pool, seq, hitters, q, lse)
    with pytest.raises(RuntimeError, match=r"these layers were never observed: \[1\]"):
        hitters.evict([seq])


def step_of_one_layer(pool, seq, hitters, q, lse):
    with pool.reserve([seq]) as batch:
        for layer in range(LAYERS):
            pool.store(layer, torch.zeros(1, HEADS, D), torch.zeros(1, HEADS, D), batch)
        hitters.observe(0, q, lse, batch)


def test_positions_behind_a_sequence_have_no_slot(device):
    """Only a GPU gets there: on the CPU such positions are refused."""
    table = torch.tensor([[3, 4], [5, 0]], device=device)
    end = torch.tensor([20, 10], device=device)[:, None, None]
    position = torch.tensor([-1, 0, 9, 10, 19, 20, 99], device=device).expand(2, 1, 7)
    slots = compaction._slots(table, position, end, 16)
    first = [-1, 48, 57, 58, 67, -1, -1]
    assert slots[:, 0].tolist() == [first, [-1, 80, 89, -1, -1, -1, -1]]


def test_compact_refuses_what_does_not_fit():
    pool = pool_of("cpu")
    seq = fill(pool, 40, 1)
    good = [torch.arange(20).repeat(1, HEADS, 1) for _ in range(LAYERS)]
    before = [pages.clone() for pages in pool.pages]
    other = good[0].clone()
    for sequences, kept, error, text in (
        ([], good, ValueError, "no sequences, supported: 1 and more"),
        ([seq, seq], good, ValueError, "a sequence is there twice"),
        ([seq], good[:1], ValueError, "kept is of 1 layers, expected 2"),
        ([seq], [good[0], other[..., :9].contiguous()], ValueError, "kept has different numbers"),
        ([seq], [x[:, :1].contiguous() for x in good], ValueError, "kept has shape"),
        ([seq], [x.int() for x in good], TypeError, "kept has dtype int32"),
        ([seq], [x[..., :1].contiguous() for x in good], ValueError, "kept has 1 tokens of each"),
        (
            [seq],
            [torch.arange(38).repeat(1, HEADS, 1)] * 2,
            ValueError,
            r"kept has 38 tokens of each head, supported: 2 \(the sinks\) to 37",
        ),
        ([seq], [good[0], other.index_fill(2, torch.tensor([5]), 37)], RuntimeError, "outside 0"),
        ([seq], [good[0], other.index_fill(2, torch.tensor([5]), 7)], RuntimeError, "twice"),
        ([seq], [good[0], other.flip(2)], RuntimeError, "must begin with the positions of the 2"),
    ):
        with pytest.raises(error, match=text):
            pool.compact(sequences, kept)
    for old, new in zip(before, pool.pages, strict=True):
        assert_same_bytes(new, old)
    assert seq.length == 40
    pool.compact([seq], good)
    assert seq.length == 23
