"""Attention over the pool's sequences: alone, in batches, forked, rolled back, in CUDA graphs."""

from itertools import chain

import pytest
import torch

import torch_turboquant as tt
from tests.helpers import assert_same_bytes
from tests.pool.harness import (
    CENTERS,
    CONFIG,
    HEADS,
    LAYERS,
    MAX_Q,
    PAGE,
    WINDOW,
    D,
    assert_same_results,
    assert_same_state,
    check_contents,
    filled,
    make_pool,
    queries,
    run_alone,
    state,
    step,
    vectors,
)


def test_a_sequence_is_what_the_ops_make_of_it(device):
    """Two pieces and single tokens, against cache, block table and tail put together by hand."""
    sizes = [3, 3, 1, 1, 3, 1, 2, 3, 1]
    rows = list(range(40, 40 + sum(sizes)))
    actual = run_alone(rows, sizes, device=device)
    for layer in range(LAYERS):
        tables = tt.make_tables(CONFIG, layer, device, CENTERS[layer])
        cache = tt.allocate_cache(CONFIG, 3, HEADS, device)
        tail = tt.Tail(
            tt.allocate_tail(CONFIG, 1, HEADS, torch.float32, MAX_Q, device),
            torch.tensor([0], device=device),
        )
        table = torch.tensor([[2, 0]], dtype=torch.int32, device=device)
        k, v = (part[layer] for part in vectors(rows, device))
        start, parts = 0, []
        for size in sizes:
            part = slice(start, start + size)
            position = torch.arange(start, start + size, device=device)
            options = {
                "seq_lens": torch.tensor([start + size], dtype=torch.int32, device=device),
                "cu_seqlens_q": torch.tensor([0, size], dtype=torch.int32, device=device),
                "tail": tail,
            }
            slots = table[0, position // PAGE].long() * PAGE + position % PAGE
            tt.cache_store(k[part], v[part], cache, slots, CONFIG, tables, **options)
            q, lens = queries(rows[part], device), options.pop("seq_lens")
            parts.append(
                tt.paged_attention(q, cache, table, lens, CONFIG, tables, max_q_len=size, **options)
            )
            start += size
        expected = [torch.cat(t) for t in zip(*parts, strict=True)]
        assert_same_results([actual[layer]], [expected])


def test_any_pieces_give_nearly_the_same_results(device):
    """A long prompt token by token and in two ways of cutting it, but for the last bits."""
    rows = list(range(300))
    one, *others = (
        run_alone(rows, sizes, device=device)
        for sizes in ([1] * 300, [MAX_Q] * 100, [2, 1, 3, 1] * 42 + [3, 3])
    )
    for other in others:
        for actual, expected in zip(chain(*other), chain(*one), strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_options_of_attention_reach_it():
    pool = make_pool()
    seqs = filled(pool, 20)
    q, sinks = queries([5]), torch.zeros(2 * HEADS)
    with pool.reserve(seqs) as batch:
        for layer in range(LAYERS):
            pool.store(layer, *(part[layer] for part in vectors([5])), batch)
        plain, _ = pool.attend(0, q, batch)
        for options in (
            {"softmax_scale": 2.0},
            {"sliding_window": 3},
            {"soft_cap": 0.1},
            {"sink_logits": sinks},
        ):
            assert not torch.equal(pool.attend(0, q, batch, **options)[0], plain)
        out, lse = torch.zeros_like(plain), torch.zeros(1, 2 * HEADS)
        assert pool.attend(0, q, batch, out=out, lse=lse)[0] is out
        assert_same_bytes(out, plain)


def test_own_tokens_of_any_number(device):
    """More than the tail has rows for, before and after they are stored."""
    pool = make_pool(device=device)
    seqs = filled(pool, 20, 3)
    sizes = [4 * MAX_Q, 1]
    rows = list(range(100, 100 + sum(sizes)))
    q, (keys, values) = queries(rows, device), vectors(rows, device)
    with pool.reserve(seqs, sizes) as batch:
        for layer in range(LAYERS):
            own = {"k_new": keys[layer], "v_new": values[layer]}
            with pytest.raises(ValueError, match=f"supported: max_q_len = {MAX_Q} of the pool"):
                pool.attend(layer, q, batch)
            before = pool.attend(layer, q, batch, **own)
            pool.store(layer, keys[layer], values[layer], batch)
            for one, other in zip(pool.attend(layer, q, batch, **own), before, strict=True):
                assert_same_bytes(one, other)
            alone = tt.paged_attention(
                q,
                pool.pages[layer],
                batch.block_table,
                batch.seq_lens,
                CONFIG,
                pool.tables[layer],
                cu_seqlens_q=batch.cu_seqlens_q,
                max_q_len=batch.max_q_len,
                tail=tt.Tail(pool.tails[layer], batch.tail_slots, batch.tail_valid),
                **own,
            )
            assert_same_bytes(alone[0], before[0])


def test_both_in_one_call(device):
    """The bytes of `store`, the results of `attend` with own tokens, and a batch that counts."""
    sizes, rows = [4 * MAX_Q, 1], list(range(100, 101 + 4 * MAX_Q))
    q, (keys, values) = queries(rows, device), vectors(rows, device)
    pools = [make_pool(device=device) for _ in range(2)]
    results = []
    for pool, together in zip(pools, (False, True), strict=True):
        seqs = filled(pool, 20, 3)
        with pool.reserve(seqs, sizes) as batch:
            for layer in range(LAYERS):
                own = {"k_new": keys[layer], "v_new": values[layer]}
                options = {"soft_cap": 9.0, "out": torch.empty_like(q)}
                if together:
                    found = pool.store_and_attend(layer, q, batch=batch, **own, **options)
                else:
                    pool.store(layer, keys[layer], values[layer], batch)
                    found = pool.attend(layer, q, batch, **own, **options)
                assert found[0] is options["out"]
                results.append(found)
        assert [seq.length for seq in seqs] == [20 + 4 * MAX_Q, 4]
    for one, other in zip(results[:LAYERS], results[LAYERS:], strict=True):
        assert_same_results([one], [other])
    for one, other in zip(*(pool.pages + pool.tails for pool in pools), strict=True):
        assert_same_bytes(one, other)


def test_steps_that_a_pool_refuses():
    pool = make_pool()
    (seq,) = filled(pool, 20)
    q, (keys, values) = queries([5]), vectors([5])
    with pool.reserve([seq]) as batch:
        new = keys[0], values[0]
        before = pool.pages[0].clone()
        with pytest.raises(TypeError, match="k_new has dtype float16, supported: float32"):
            pool.store_and_attend(0, q.half(), *(x.half() for x in new), batch)
        with pytest.raises(ValueError, match=f"layer is {LAYERS}"):
            pool.store_and_attend(LAYERS, q, *new, batch)
        with pytest.raises(ValueError, match="soft_cap is -1"):
            pool.store_and_attend(0, q, *new, batch, soft_cap=-1.0)
        assert_same_bytes(pool.pages[0], before)
        for layer in range(LAYERS):
            pool.store_and_attend(layer, q, *new, batch)
    with pytest.raises(RuntimeError, match="was committed or rolled back"):
        pool.store_and_attend(0, q, *new, batch)


@pytest.mark.parametrize("padded", [False, True])
def test_a_batch_equals_one_by_one(padded, device):
    """Sequences join and leave; single tokens and pieces share batches."""
    pool = make_pool(centers=CENTERS, num_pages=12, device=device)
    sizes = {"a": [3, 3, 1, 1, 1, 2, 3], "b": [2, 1, 3, 3, 3, 3, 1, 1, 1], "c": [1] * 20}
    first = {"a": 0, "b": 2, "c": 1}  # step
    rows = {n: list(range(60 * i, 60 * i + sum(sizes[n]))) for i, n in enumerate(sizes)}
    into = pool.empty_batch(4, 10, MAX_Q) if padded else None
    live, results = {}, {name: [] for name in sizes}
    for now in range(30):
        live |= {name: pool.allocate() for name in sizes if first[name] == now}
        if not live:
            break
        counts = {name: sizes[name][now - first[name]] for name in live}
        parts = [rows[n][live[n].length :][: counts[n]] for n in live]
        together = step(pool, list(live.values()), parts, into)
        start = 0
        for name in live:
            end = start + counts[name]
            results[name].append([[t[start:end] for t in layer] for layer in together])
            start = end
        for name in [n for n in live if now - first[n] == len(sizes[n]) - 1]:
            pool.free(live.pop(name))
    for name, steps in results.items():
        joined = [
            [torch.cat(t) for t in zip(*layer, strict=True)] for layer in zip(*steps, strict=True)
        ]
        assert_same_results(joined, run_alone(rows[name], sizes[name], device=device))
    assert pool.free_pages == 12


def test_forks_equal_sequences_that_never_were_one(device):
    """In the middle of a page, both sides go on, one of them forked again."""
    pool = make_pool(centers=CENTERS, device=device)
    rows = list(range(21))
    a = pool.allocate()
    for start in range(0, 21, 3):
        step(pool, [a], [rows[start : start + 3]])
    assert pool.free_pages == 6
    b = pool.fork(a)
    assert pool.page_numbers(a) == pool.page_numbers(b) and pool.free_pages == 6
    ends = {a: [100, 101, 102], b: [200, 201, 202]}
    first = step(pool, [a, b], [ends[a], ends[b]])
    assert pool.page_numbers(a)[0] == pool.page_numbers(b)[0] and pool.free_pages == 5
    c = pool.fork(b)
    ends |= {c: ends[b] + [300]}
    ends[a], ends[b] = ends[a] + [103], ends[b] + [203]
    second = step(pool, [c, a, b], [[300], [103], [203]])
    assert pool.free_pages == 4
    for seq, three, one in ((a, 0, 1), (b, 3, 2), (c, 3, 0)):
        alone = run_alone(rows + ends[seq], [3] * 8 + [1], device=device)
        actual = [
            [torch.cat([f[three : three + 3], s[one : one + 1]]) for f, s in zip(x, y, strict=True)]
            for x, y in zip(first, second, strict=True)
        ]
        assert_same_results(actual, [[t[21:] for t in layer] for layer in alone])
        check_contents(pool, seq, rows + ends[seq])
    for seq in (b, a, c):
        pool.free(seq)
    assert pool.free_pages == 8


@pytest.mark.parametrize("taken_back", [1, MAX_Q, MAX_Q + 1, 9])
@pytest.mark.parametrize("how", ["truncate", "rollback"])
def test_tokens_taken_back_were_never_there(how, taken_back, device):
    """Up to max_q_len nothing is lost; beyond, codes stand in until the window is full again."""
    rows = list(range(30))
    if how == "truncate" and taken_back <= MAX_Q:
        pieces = [taken_back]
    else:
        pieces = [1] * taken_back if how == "truncate" else [taken_back]
    pool = make_pool(centers=CENTERS, device=device)
    seq = pool.allocate()
    for start in range(0, 18, 3):
        step(pool, [seq], [rows[start : start + 3]])
    before = pool.free_pages
    draft = list(range(400, 400 + taken_back))
    keys, values = vectors(draft, device)
    if how == "truncate":
        for piece in pieces:
            step(pool, [seq], [[draft.pop(0) for _ in range(piece)]])
        pool.truncate(seq, 18)
    else:
        with pytest.raises(ZeroDivisionError), pool.reserve([seq], taken_back) as batch:
            for layer in range(LAYERS):
                pool.store(layer, keys[layer], values[layer], batch)
            raise ZeroDivisionError
    assert (seq.length, pool.free_pages) == (18, before)
    actual = [step(pool, [seq], [rows[i : i + 1]]) for i in range(18, 30)]
    expected = run_alone(rows, [3] * 6 + [1] * 12, device=device)
    same = []
    for i, results in enumerate(actual):
        pairs = [
            (one, other[18 + i : 19 + i])
            for one, other in zip(chain(*results), chain(*expected), strict=True)
        ]
        same.append(all(torch.equal(one, other) for one, other in pairs))
    if taken_back <= MAX_Q:
        assert all(same)
    else:
        lost = min(taken_back - MAX_Q, WINDOW - 1)
        assert same == [False] * lost + [True] * (12 - lost)


def test_batches_that_are_filled_again(device):
    """Addresses and shapes stay, padding is inert, and what was left from before has no effect."""
    pool = make_pool(device=device)
    batch = pool.empty_batch(3)
    names = ("slot_mapping", "block_table", "seq_lens", "tail_slots", "tail_valid")
    tensors = {name: getattr(batch, name) for name in names}
    assert batch.cu_seqlens_q is None and batch.tokens == 3
    before = state(pool, [])
    pool.store(0, *(part[0] for part in vectors([1, 2, 3], device)), batch)
    assert_same_state(state(pool, []), before)
    seqs = filled(pool, 17, 3, 0)
    for chosen in (seqs, seqs[1:2], seqs[::2]):
        fresh = pool.reserve(chosen)
        expected = {name: getattr(fresh, name).cpu() for name in names}
        pool.rollback(fresh)
        assert pool.reserve(chosen, into=batch) is batch
        n = len(chosen)
        for name, tensor in tensors.items():
            assert getattr(batch, name) is tensor
            if name == "block_table":
                for row, seq in enumerate(chosen):
                    numbers = pool.page_numbers(seq)
                    for table in (tensor.cpu(), expected[name]):
                        assert table[row, : len(numbers)].tolist() == numbers
            elif name == "tail_valid":
                assert_same_bytes(tensor, expected[name])
            else:
                assert_same_bytes(tensor[:n], expected[name])
        assert batch.slot_mapping[n:].tolist() == batch.tail_slots[n:].tolist() == [-1] * (3 - n)
        assert batch.seq_lens[n:].tolist() == [0] * (3 - n)
        pool.rollback(batch)

    long = pool.empty_batch(2, 5, MAX_Q)
    pool.reserve(seqs[:2], [3, 1], into=long)
    assert long.cu_seqlens_q.tolist() == [0, 3, 4] and long.max_q_len == MAX_Q
    assert (long.slot_mapping >= 0).tolist() == [True] * 4 + [False]
    pool.rollback(long)
    pool.reserve(seqs[2:], 2, into=long)
    assert long.cu_seqlens_q.tolist() == [0, 2, 2]
    pool.rollback(long)


@pytest.mark.cuda
def test_a_cuda_graph_serves_every_batch():
    device = torch.device("cuda")
    eager, graphed = (make_pool(centers=CENTERS, device=device) for _ in range(2))
    batch = graphed.empty_batch(3)
    keys, values = (torch.zeros(LAYERS, 3, HEADS, D, device=device) for _ in range(2))
    q = torch.zeros(3, 2 * HEADS, D, device=device)

    def layers():
        results = []
        for layer in range(LAYERS):
            graphed.store(layer, keys[layer], values[layer], batch)
            results.append(graphed.attend(layer, q, batch))
        return results

    layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers()
    pairs = [(filled(eager, n)[0], filled(graphed, n)[0]) for n in (20, 3, 15)]
    for row, chosen in enumerate([pairs, pairs[:1], pairs[1:], pairs]):
        rows = [[100 + 10 * row + i] for i in range(len(chosen))]
        expected = step(eager, [one for one, _ in chosen], rows)
        with graphed.reserve([other for _, other in chosen], into=batch):
            flat = [*chain(*rows)]
            for target, source in zip((keys, values), vectors(flat, device), strict=True):
                target[:, : len(flat)] = torch.stack(source)
            q[: len(flat)] = queries(flat, device)
            graph.replay()
        assert_same_results([[t[: len(flat)] for t in layer] for layer in captured], expected)


@pytest.mark.cuda
def test_a_graph_that_was_captured_from_an_open_batch():
    """Its replays are stores as well, which commit cannot see."""
    pool = make_pool(device=torch.device("cuda"))
    (seq,) = filled(pool, 3)
    batch = pool.empty_batch(1)
    keys, values = vectors([50], pool.device)

    def store():
        for layer in range(LAYERS):
            pool.store(layer, keys[layer], values[layer], batch)

    graph = torch.cuda.CUDAGraph()
    with pool.reserve([seq], into=batch):
        store()
        with torch.cuda.graph(graph):
            store()
    with pool.reserve([seq], into=batch):
        graph.replay()
    check_contents(pool, seq, [0, 1, 2, 50, 50])


@pytest.mark.parametrize("made", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("used", [torch.inference_mode, torch.no_grad])
def test_inference_mode_may_come_and_go(made, used):
    """What a pool holds may be changed in the other mode than it was made in."""
    results = []
    for first, second in ((torch.no_grad, torch.no_grad), (made, used)):
        with first():
            pool = make_pool(centers=CENTERS)
            into, a = pool.empty_batch(2), pool.allocate()
            hitters = tt.HeavyHitters(pool, budget=20, interval=4, window=2, keep_last=8)
            pool.append([a], *vectors(range(20)), new_tokens=20)
        found = []
        for now in range(8):
            with second() if now % 2 else first():
                b = pool.fork(a)
                with pool.reserve([a, b], into=into) as batch:
                    for layer in range(LAYERS):
                        k, v = (part[layer] for part in vectors([now, now + 1]))
                        q = queries([now, now + 1])
                        out, lse = pool.store_and_attend(layer, q, k, v, batch)
                        hitters.observe(layer, q, lse, batch)
                        found.append(out)
                pool.free(b)
                hitters.evict([a])
        with second():
            pool.truncate(a, 15)
            back = pool.swap_in(pool.swap_out(a))
            found += pool.load(0, back)
        results.append(found)
    for one, other in zip(*results, strict=True):
        assert_same_bytes(one, other)
