"""What cannot be done changes nothing: exhaustion, errors, batches left open, threads."""

import random
import sys
import threading

import pytest
import torch

import torch_turboquant as tt
from tests.helpers import assert_same_bytes
from tests.pool.harness import (
    CONFIG,
    LAYERS,
    MAX_Q,
    NO_TAIL,
    PAGE,
    append,
    assert_same_results,
    assert_same_state,
    check_contents,
    check_exact,
    filled,
    make_pool,
    queries,
    state,
    step,
    stored_alone,
    vectors,
)


@pytest.mark.parametrize("num_pages", range(1, 7))
def test_exhaustion_at_every_point(num_pages):
    """The same work in pools of every size: whatever fails, fails whole, and space helps."""
    pool = make_pool(num_pages=num_pages, max_seqs=3, max_seq_len=6 * PAGE)
    spare = make_pool()
    exported = spare.export(filled(spare, 40)[0])
    seqs, rows, failed = [], {}, 0

    def attempt(call):
        nonlocal failed
        before = state(pool, seqs)
        try:
            return call()
        except tt.PoolExhausted as error:
            failed += 1
            assert_same_state(state(pool, seqs), before)
            for seq in seqs:
                check_contents(pool, seq, rows[seq])
            needed = str(error).split()[0]
            assert needed == "all" or int(needed) > pool.free_pages
            return None

    def new(call, first_rows):
        seq = attempt(call)
        if seq is not None:
            seqs.append(seq)
            rows[seq] = list(first_rows)

    def grow(chosen, *counts):
        parts = [list(range(i, i + n)) for i, n in enumerate(counts)]
        before = [s.length for s in chosen]
        attempt(lambda: append(pool, chosen, parts))
        for seq, old, part in zip(chosen, before, parts, strict=True):
            if seq.length > old:
                rows[seq] += part

    new(pool.allocate, [])
    grow(seqs, 9)
    new(lambda: pool.fork(seqs[0]), rows[seqs[0]])
    grow(seqs, 20, 1)
    new(lambda: pool.adopt(exported), range(40))
    grow(seqs, *[5] * len(seqs))
    new(pool.allocate, [])
    new(lambda: pool.fork(seqs[0]), rows[seqs[0]])
    new(lambda: pool.adopt(exported), range(40))
    grow(seqs[::-1], *[30] * len(seqs))
    assert failed
    for seq in seqs:
        check_contents(pool, seq, rows[seq])
        pool.free(seq)
    assert (pool.free_pages, pool.free_seqs) == (num_pages, 3)
    with pytest.raises(tt.PoolExhausted) as caught:
        pool.append([pool.allocate()], *vectors([0] * 6 * PAGE), new_tokens=6 * PAGE)
        raise tt.PoolExhausted  # it fits
    assert num_pages == 6 or "6 pages are needed for 96 new tokens" in str(caught.value)


def test_a_sequence_longer_than_all_pages():
    """Exhaustion where the pages are the only limit, an error of its own where there is another."""
    pool = make_pool(num_pages=3)
    (seq,) = filled(pool, 40)
    assert pool.max_seq_len == 48 and pool.pages_needed([seq], 9) == 1
    pool.free(pool.fork(seq))
    with pytest.raises(tt.PoolExhausted, match="1 pages are needed for 9 new tokens"):
        append(pool, [seq], [list(range(9))])
    with pytest.raises(tt.PoolExhausted, match="4 pages are needed for 49 tokens, 0 of 3 are free"):
        big = make_pool()
        pool.adopt(big.export(filled(big, 49)[0]))
    check_contents(pool, seq, list(range(40)))
    limited = make_pool(num_pages=3, max_seq_len=48)
    with pytest.raises(ValueError, match="49 tokens do not fit into max_seq_len=48"):
        limited.reserve([limited.allocate()], 49)


def test_a_fork_needs_a_page_when_it_differs():
    pool = make_pool(num_pages=2)
    (a,) = filled(pool, 20)
    b = pool.fork(a)
    assert pool.pages_needed([a], 1) == pool.pages_needed([a, b], 1) == 1
    with pytest.raises(tt.PoolExhausted, match="1 pages are needed for 1 new tokens"):
        pool.reserve([a])
    pool.free(b)
    assert pool.pages_needed([a], 1) == 0
    append(pool, [a], [[3]])
    check_contents(pool, a, [*range(20), 3])


def test_errors_come_before_anything_is_written():
    pool, other = make_pool(max_seq_len=40), make_pool()
    a, b = filled(pool, 20, 5)
    (foreign,) = filled(other, 1)
    gone = filled(pool, 3)[0]
    pool.free(gone)
    before = state(pool, [a, b])

    def refuse(error, match, call, *args, **options):
        with pytest.raises(error, match=match):
            call(*args, **options)
        assert_same_state(state(pool, [a, b]), before)

    for call in (
        pool.fork,
        pool.free,
        pool.export,
        pool.page_numbers,
        lambda s: pool.truncate(s, 0),
        lambda s: pool.reserve([a, s]),
        lambda s: pool.pages_needed([s], 1),
        lambda s: pool.load(0, s),
    ):
        refuse(RuntimeError, "was freed", call, gone)
        refuse(ValueError, "another pool", call, foreign)
    assert repr(gone) == "<PoolSequence freed>" and repr(a) == "<PoolSequence 20 tokens>"
    for call in (pool.fork, pool.free, lambda s: pool.reserve([s])):
        refuse(TypeError, "a sequence must be a PoolSequence, got NoneType", call, None)
    refuse(TypeError, "a batch must be a PoolBatch, got NoneType", pool.attend, 0, None, None)
    refuse(ValueError, "twice", pool.reserve, [a, b, a])
    refuse(ValueError, "no sequences", pool.reserve, [])
    refuse(ValueError, "2 numbers for 1 sequences", pool.reserve, [a], [1, 1])
    refuse(ValueError, "new_tokens holds 0", pool.reserve, [a, b], [1, 0])
    refuse(ValueError, "41 tokens do not fit into max_seq_len=40", pool.reserve, [a], 21)
    refuse(ValueError, "length is 21, supported: 0 to 20", pool.truncate, a, 21)
    refuse(ValueError, "length is -1", pool.truncate, a, -1)
    for wrong in (1.5, True, "1", [1.5], "12"):
        refuse(ValueError, "which is no whole number", pool.reserve, [a], wrong)
    refuse(ValueError, "length is True, which is no whole", pool.truncate, a, True)
    refuse(ValueError, "layer is 2, supported: 0 to 1", pool.load, 2, a)
    refuse(ValueError, r"layer is 1\.0, which is no whole number", pool.load, 1.0, a)

    # values of the last layer are wrong: nothing is written in the first one either
    keys, values = vectors([1, 2])
    refuse(ValueError, "1 and 2 layers", pool.append, [a], keys[:1], values, 2)
    refuse(
        ValueError, "no sequences", pool.append, [], [k[:0] for k in keys], [v[:0] for v in values]
    )
    for bad, error, match in (
        (keys[1][:1], ValueError, r"k has shape \[1, 2, 16\], expected \[2, 2, 16\]"),
        (keys[1][:, :1], ValueError, r"k has shape \[2, 1, 16\]"),
        (keys[1][..., :8], ValueError, r"k has shape \[2, 2, 8\]"),
        (keys[1].half(), TypeError, "k has dtype float16, supported: float32"),
        (keys[1].mT.contiguous().mT, ValueError, "stride 1"),
        (keys[1].to("meta"), ValueError, "k is on meta, the pool on cpu"),
    ):
        refuse(error, match, pool.append, [a, b], [keys[0], bad], values)


def test_open_and_closed_batches():
    pool, other = make_pool(), make_pool()
    a, b = filled(pool, 4, 4)
    k, v = (part[0] for part in vectors([1]))
    batch = pool.reserve([a])
    assert (a.length, batch.sequences, batch.new_tokens) == (4, (a,), (1,))
    assert (a.batch, b.batch) == (batch, None)
    for call in (pool.fork, pool.free, pool.export, lambda s: pool.truncate(s, 0),
                 lambda s: pool.reserve([b, s])):  # fmt: skip
        with pytest.raises(RuntimeError, match="is in an open batch"):
            call(a)
    assert pool.load(0, a)[0].shape[0] == 4
    pool.free(b)  # others go on
    for call in (other.commit, other.rollback, lambda x: other.store(0, k, v, x)):
        with pytest.raises(ValueError, match="another pool"):
            call(batch)
    with pytest.raises(ValueError, match="layer is 2"):
        pool.store(2, k, v, batch)
    for layer in range(LAYERS):
        pool.store(layer, k, v, batch)
    pool.commit(batch)
    assert (a.length, a.batch) == (5, None)
    for call in (pool.commit, pool.rollback):
        with pytest.raises(RuntimeError, match="is closed, not open"):
            call(batch)
    for call in (lambda: pool.store(0, k, v, batch), lambda: pool.attend(0, queries([1]), batch)):
        with pytest.raises(RuntimeError, match="was committed or rolled back"):
            call()

    into = pool.empty_batch(2)
    with pytest.raises(RuntimeError, match="is empty, not open"):
        pool.commit(into)
    with pool.reserve([a], into=into) as same:
        assert same is into
        with pytest.raises(RuntimeError, match="this batch is open"):
            pool.reserve([pool.allocate()], into=into)
        pool.rollback(into)  # and the end of the block leaves it at that
    assert a.length == 5
    c, d = pool.allocate(), pool.allocate()
    for seqs, counts in (([a, c, d], 1), ([a], 2)):
        with pytest.raises(ValueError, match="made for seqs=2, tokens=2, max_q_len=1"):
            pool.reserve(seqs, counts, into=into)
    with pytest.raises(ValueError, match="another pool"):
        other.reserve([other.allocate()], into=into)
    with pytest.raises(ValueError, match="supported with max_q_len = 1: seqs"):
        pool.empty_batch(2, 3)
    with pytest.raises(ValueError, match="seqs is 0"):
        pool.empty_batch(0)
    assert "1 of 2 sequences" in repr(into)


def store(pool, batch, row, *layers):
    """The same row of BANK for all tokens; layers beyond BANK's store what the first ones do."""
    keys, values = vectors([row] * batch.tokens)
    for layer in layers:
        pool.store(layer, keys[layer % LAYERS], values[layer % LAYERS], batch)


@pytest.mark.parametrize("static", [False, True])
def test_batches_that_a_layer_has_not_stored(static):
    """They are no part of their sequences, whole or half: the block's end rolls them back."""
    pool = make_pool([CONFIG] * 4, num_layers=4)
    keys, values = (part * 2 for part in vectors(range(20)))
    a = pool.allocate()
    pool.append([a], keys, values, 20)
    b = pool.fork(a)
    into = pool.empty_batch(2) if static else None
    before = [pool.export(seq) for seq in (a, b)]

    def check_unchanged():
        for seq, exported in zip((a, b), before, strict=True):
            assert (seq.length, seq.batch) == (20, None)
            for page, expected in zip(pool.export(seq).pages, exported.pages, strict=True):
                assert_same_bytes(page, expected)

    for layers, missing in {
        (): "0 to 3",
        (0,): "1 to 3",
        (2, 0, 2): "1, 3",
        (1, 2, 3): "0",
    }.items():
        with pytest.raises(RuntimeError, match=f"these are missing: {missing};"):
            with pool.reserve([a, b], into=into) as batch:
                store(pool, batch, 30, *layers)
        check_unchanged()
    with pytest.raises(ZeroDivisionError), pool.reserve([a, b], into=into) as batch:
        store(pool, batch, 30, 0)
        raise ZeroDivisionError  # and nothing about layers
    check_unchanged()

    batch = pool.reserve([a, b], into=into)
    store(pool, batch, 30, 0, 1)
    with pytest.raises(RuntimeError, match="these are missing: 2 to 3;"):
        pool.commit(batch)
    assert (a.length, a.batch, batch.sequences) == (20, batch, (a, b))  # it is still open
    store(pool, batch, 30, 3, 2)
    store(pool, batch, 31, 0)  # again: the last one counts
    pool.commit(batch)
    assert (a.length, b.length) == (21, 21)
    for layer, row in ((0, 31), (1, 30)):
        wanted = stored_alone(CONFIG, pool.tables[layer], layer, [*range(20), row])
        for actual, expected in zip(pool.load(layer, b), wanted, strict=True):
            assert_same_bytes(actual, expected)


def test_layers_that_a_graph_may_store():
    """What a batch stored while it was empty may be in a graph, whose replays are not seen."""
    pool = make_pool()
    a, b = filled(pool, 3, 3)
    batch = pool.empty_batch(1)
    store(pool, batch, 30, 1)
    with pytest.raises(RuntimeError, match="these are missing: 0;"):
        with pool.reserve([a], into=batch):
            pass
    with pool.reserve([a], into=batch):
        store(pool, batch, 30, 0)
    store(pool, batch := pool.empty_batch(1), 30, 0, 1)
    with pool.reserve([b], into=batch):
        pass
    assert (a.length, b.length) == (4, 4)


def test_compiled_stores_are_counted():
    """In one graph for all steps: what was stored is written by compiled code, never read."""
    torch._dynamo.reset()
    pool = make_pool()
    (seq,) = filled(pool, 3)
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def step(batch, keys, values):
        for layer in range(len(keys)):
            pool.store(layer, keys[layer], values[layer], batch)

    batch, (keys, values) = pool.empty_batch(1), vectors([30])
    for _ in range(3):
        with pool.reserve([seq], into=batch):
            step(batch, keys, values)
    assert len(frames) == 1
    with pytest.raises(RuntimeError, match="these are missing: 1;"):
        with pool.reserve([seq], into=batch):
            step(batch, keys[:1], values[:1])
    assert seq.length == 6
    check_contents(pool, seq, [0, 1, 2, 30, 30, 30])


def test_pieces_longer_than_the_tail_allows():
    rows = list(range(MAX_Q + 1))
    pool = make_pool()
    with pytest.raises(ValueError, match="supported: max_q_len = 3 of the pool"):
        step(pool, [pool.allocate()], [rows])
    pool = make_pool(NO_TAIL)
    assert pool.tails is None
    results = step(pool, [pool.allocate()], [rows])
    pool = make_pool(NO_TAIL)
    seq = pool.allocate()
    for i, row in enumerate(rows):
        one = step(pool, [seq], [[row]])
        assert_same_results([[t[i : i + 1] for t in layer] for layer in results], one)


# ---- threads


def test_threads():
    """Sequences hold their tokens, whatever other threads do; a common parent is forked."""
    pool = make_pool(num_pages=24, max_seqs=14)
    (parent,) = filled(pool, 21)
    errors, exhausted, interval = [], [], sys.getswitchinterval()
    together = threading.Barrier(4)

    def work(number):
        choose, mine = random.Random(number), {}
        try:
            together.wait()
            for _ in range(600):
                action = choose.choice(["new", "fork", "grow", "grow", "grow", "cut", "free"])
                seq = choose.choice(list(mine)) if mine else None
                try:
                    if action == "new":
                        mine[pool.allocate()] = []
                    elif action == "fork":
                        mine[pool.fork(parent)] = list(range(21))
                    elif seq is None:
                        continue
                    elif action == "grow":
                        chosen = choose.sample(list(mine), choose.randint(1, len(mine)))
                        parts = [
                            [choose.randrange(509) for _ in range(choose.randint(1, 20))]
                            for _ in chosen
                        ]
                        append(pool, chosen, parts)
                        for one, part in zip(chosen, parts, strict=True):
                            mine[one] += part
                    elif action == "cut":
                        length = choose.randint(0, seq.length)
                        pool.truncate(seq, length)
                        del mine[seq][length:]
                    else:
                        pool.free(seq)
                        del mine[seq]
                except tt.PoolExhausted:
                    exhausted.append(action)
                    if mine:
                        seq = choose.choice(list(mine))
                        check_contents(pool, seq, mine[seq])
                        pool.free(seq)
                        del mine[seq]
            for seq, rows in mine.items():
                check_contents(pool, seq, rows)
                check_exact(pool, seq, rows)
                pool.free(seq)
        except BaseException as error:
            errors.append(error)

    try:
        sys.setswitchinterval(1e-6)  # seconds: threads take turns within every call
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors
    assert "grow" in exhausted
    check_contents(pool, parent, list(range(21)))
    pool.free(parent)
    assert (pool.free_pages, pool.free_seqs) == (24, 14)
