"""The paged pool: books, sharing and the tail against simple models; what cannot be done changes
nothing."""

import dataclasses
import json
import random
import sys
import threading
from itertools import chain

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import torch_turboquant as tt
from tests.helpers import ROOT, assert_same_bytes, load_script, randn
from torch_turboquant.ops.cache import tail_row_reference

LAYERS, HEADS, D, PAGE = 2, 2, 16, 16
SINKS, WINDOW, MAX_Q = 2, 5, 3
RING = WINDOW + MAX_Q - 1
CONFIG = tt.preset("k4v4", D, page_size=PAGE, sink_tokens=SINKS, recent_window=WINDOW)
NO_TAIL = tt.preset("k3v2", D, page_size=PAGE, sink_tokens=0, recent_window=0)

# keys and values that tests refer to by their row: [layer, key or value, row, head, channel]
BANK = randn(LAYERS, 2, 509, HEADS, D, seed=11)
CENTERS = list(randn(LAYERS, HEADS, D, seed=12))


def make_pool(config=CONFIG, **changes):
    sizes = {
        "num_layers": LAYERS,
        "num_kv_heads": HEADS,
        "num_pages": 8,
        "max_seqs": 4,
        "dtype": torch.float32,
        "max_q_len": MAX_Q,
    }
    return tt.PagedKVPool(config, **{**sizes, **changes})


def vectors(rows, device="cpu"):
    """(keys, values) per layer, [tokens, heads, channels]."""
    rows = torch.tensor(rows, dtype=torch.int64)
    keys, values = ([layer[kind][rows].to(device) for layer in BANK] for kind in (0, 1))
    return keys, values


def append(pool, seqs, rows):
    """rows: of BANK, a list per sequence."""
    pool.append(
        seqs, *vectors([*chain(*rows)], pool.device), new_tokens=[len(part) for part in rows]
    )


def filled(pool, *lengths):
    """Sequences of these lengths; the rows of one follow those of the other."""
    seqs, start = [], 0
    for length in lengths:
        seqs.append(pool.allocate())
        if length:
            append(pool, seqs[-1:], [list(range(start, start + length))])
        start += length
    return seqs


def stored_alone(config, tables, layer, rows, device="cpu"):
    """What a cache that holds these rows and nothing else decodes to."""
    count = len(rows)
    k, v = (BANK[layer, kind][torch.tensor(rows, dtype=torch.int64)].to(device) for kind in (0, 1))
    pages = -(-count // PAGE)
    cache = tt.allocate_cache(config, pages, HEADS, device)
    tt.cache_store(k, v, cache, torch.arange(count, device=device), config, tables)
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    lens = torch.tensor([count], dtype=torch.int32, device=device)
    k, v = tt.cache_load(cache, table, lens, config, tables, count, torch.float32)
    return k[0], v[0]


def check_contents(pool, seq, rows):
    assert seq.length == len(rows)
    for layer in range(LAYERS):
        expected = stored_alone(pool.configs[layer], pool.tables[layer], layer, rows, pool.device)
        for actual, wanted in zip(pool.load(layer, seq), expected, strict=True):
            assert_same_bytes(actual, wanted)


def check_exact(pool, seq, rows):
    """What the tail holds, from ring_first on, is what was stored; returns ring_first."""
    exported = pool.export(seq)
    held = [p for p in range(len(rows)) if p < SINKS or p >= exported.ring_first]
    for layer, exact in enumerate(exported.exact):
        expected = BANK[layer][:, torch.tensor([rows[p] for p in held], dtype=torch.int64)]
        assert_same_bytes(exact, expected.permute(2, 1, 0, 3))
    return exported.ring_first


def state(pool, seqs):
    """Everything that a failed call must leave as it was."""
    return (
        pool.free_pages,
        pool.free_seqs,
        [(s.length, pool.page_numbers(s)) for s in seqs],
        [pool.export(s).ring_first for s in seqs],
        [p.clone() for p in pool.pages],
        [t.clone() for t in pool.tails or ()],
    )


def assert_same_state(actual, expected):
    assert actual[:4] == expected[:4]
    for one, other in zip(actual[4] + actual[5], expected[4] + expected[5], strict=True):
        assert_same_bytes(one, other)


# ---- any sequence of operations


class Model:
    """A sequence as lists: rows of BANK, page objects (shared: the same object), ring contents."""

    def __init__(self, rows=(), pages=(), ring=None):
        self.rows, self.pages, self.ring = list(rows), list(pages), dict(ring or {})

    def write(self, rows):
        """The ring after these rows were stored behind the present ones."""
        total = len(self.rows) + len(rows)
        for p, row in enumerate(rows, len(self.rows)):
            if p >= max(SINKS, total - RING):
                self.ring[tail_row_reference(p, SINKS, RING)] = (p, row)

    def ring_first(self):
        first = len(self.rows)
        while first > SINKS:
            p = first - 1
            if self.ring.get(tail_row_reference(p, SINKS, RING)) != (p, self.rows[p]):
                break
            first -= 1
        return first


PICK = st.integers(0, 5)
APPENDS = st.lists(st.tuples(PICK, st.integers(1, 40)), min_size=1, max_size=4)
some_sequence = precondition(lambda machine: machine.models)


class PoolMachine(RuleBasedStateMachine):
    """Operations in any order; the pool is small enough to be exhausted often."""

    def __init__(self):
        super().__init__()
        self.pool = make_pool(centers=CENTERS, num_pages=10, max_seqs=6)
        self.models = {}
        self.next_row = 0

    def pick(self, number):
        return list(self.models)[number % len(self.models)]

    # what the model says about pages

    def owners(self, page):
        return sum(page in m.pages for m in self.models.values())

    def used(self):
        return len({id(p) for m in self.models.values() for p in m.pages})

    def grow(self, batch):
        """The model's pages after an append to these models; undoes it if they are too many."""
        before = [(m, list(m.pages)) for m, _ in batch]
        for model, rows in batch:
            inside = len(model.rows) % PAGE
            if inside and self.owners(model.pages[-1]) > 1:
                model.pages[-1] = object()
            while len(model.pages) * PAGE < len(model.rows) + len(rows):
                model.pages.append(object())
        fits = self.used() <= self.pool.num_pages
        if not fits:
            for model, pages in before:
                model.pages = pages
        return fits

    def rows(self, count):
        start, self.next_row = self.next_row, self.next_row + count
        return [(start + i) % BANK.shape[2] for i in range(count)]

    def expect(self, possible, call):
        """`call` works if the model says so, and else is exhausted and changes nothing."""
        if possible:
            return call()
        before = state(self.pool, self.models)
        with pytest.raises(tt.PoolExhausted):
            call()
        assert_same_state(state(self.pool, self.models), before)
        return None

    def expect_new(self, possible, call, model):
        seq = self.expect(possible, call)
        if seq is not None:
            self.models[seq] = model

    # operations

    @initialize(appends=APPENDS)
    def begin(self, appends):
        self.make_new("allocate", 0)
        self.append_and_commit(appends, False)
        self.make_new("fork", 0)
        self.append_and_commit(appends, False)

    @rule(kind=st.sampled_from(["allocate", "fork", "fork", "adopt"]), pick=PICK)
    def make_new(self, kind, pick):
        room, pool = len(self.models) < self.pool.max_seqs, self.pool
        if kind == "allocate" or not self.models:
            return self.expect_new(room, pool.allocate, Model())
        seq = self.pick(pick)
        model = self.models[seq]
        if kind == "fork":
            copy = Model(model.rows, model.pages, model.ring)
            return self.expect_new(room, lambda: pool.fork(seq), copy)
        room = room and self.used() + len(model.pages) <= pool.num_pages
        exported = pool.export(seq)
        copy = Model(model.rows, [object() for _ in model.pages], model.ring)
        return self.expect_new(room, lambda: pool.adopt(exported), copy)

    @some_sequence
    @rule(appends=APPENDS, padded=st.booleans())
    def append_and_commit(self, appends, padded):
        self.append(appends, "commit", padded)

    @some_sequence
    @rule(picks=st.lists(PICK, min_size=1, max_size=6), count=st.integers(1, MAX_Q))
    def append_few(self, picks, count):
        self.append([(pick, count) for pick in picks], "commit", False)

    @some_sequence
    @rule(
        appends=APPENDS,
        stage=st.sampled_from(["stored", "half stored", "not stored"]),
        padded=st.booleans(),
    )
    def append_and_roll_back(self, appends, stage, padded):
        self.append(appends, stage, padded)

    def append(self, appends, finish, padded):
        appends = list({self.pick(number): n for number, n in appends}.items())
        seqs, counts = [seq for seq, _ in appends], [n for _, n in appends]
        batch = [(self.models[seq], self.rows(n)) for seq, n in appends]
        old_pages = [list(model.pages) for model, _ in batch]
        possible = self.grow(batch)
        if possible:
            needed = self.used() - (self.pool.num_pages - self.pool.free_pages)
            assert self.pool.pages_needed(seqs, counts) == needed
        into = self.pool.empty_batch(6, sum(counts) + 2, 41) if padded else None
        opened = self.expect(possible, lambda: self.pool.reserve(seqs, counts, into=into))
        if opened is None:
            return
        assert opened.sequences == tuple(seqs) and opened.new_tokens == tuple(counts)
        for i, (model, rows) in enumerate(batch):
            after = Model(model.rows, (), model.ring)
            after.write(rows)
            after.rows += rows
            sinks, first = opened.tail_valid[opened.tail_slots[i]].tolist()
            assert sinks == min(len(after.rows), SINKS)
            assert max(first, SINKS) == max(after.ring_first(), SINKS)
        padding = opened.tokens - sum(counts)
        keys, values = vectors([*chain(*(rows for _, rows in batch)), *[0] * padding])
        layers = {"not stored": 0, "half stored": 1}.get(finish, LAYERS)
        for layer in range(layers):
            self.pool.store(layer, keys[layer], values[layer], opened)
        if finish == "commit":
            self.pool.commit(opened)
            for model, rows in batch:
                model.write(rows)
                model.rows += rows
        else:
            self.pool.rollback(opened)
            for (model, rows), old in zip(batch, old_pages, strict=True):
                model.write([None] * len(rows))
                del model.pages[len(old) :]  # but a page that was copied stays copied

    @some_sequence
    @rule(pick=PICK, share=st.floats(0, 1), few=st.booleans())
    def truncate(self, pick, share, few):
        seq = self.pick(pick)
        model = self.models[seq]
        length = len(model.rows)
        length = max(0, length - round(share * MAX_Q)) if few else round(share * length)
        self.pool.truncate(seq, length)
        del model.rows[length:]
        del model.pages[-(-length // PAGE) :]

    @precondition(lambda machine: len(machine.models) > 2)
    @rule(pick=PICK)
    def free(self, pick):
        seq = self.pick(pick)
        self.pool.free(seq)
        del self.models[seq]

    # what always holds

    @invariant()
    def pages_are_counted(self):
        assert self.pool.free_pages == self.pool.num_pages - self.used()
        assert self.pool.free_seqs == self.pool.max_seqs - len(self.models)
        pairs = {
            (id(page), number)
            for seq, model in self.models.items()
            for page, number in zip(model.pages, self.pool.page_numbers(seq), strict=True)
        }
        # shared in the model if and only if shared in the pool
        assert len(pairs) == len({p for p, _ in pairs}) == len({n for _, n in pairs})

    @invariant()
    def sequences_hold_their_tokens(self):
        for seq, model in self.models.items():
            check_contents(self.pool, seq, model.rows)
            first = check_exact(self.pool, seq, model.rows)
            assert max(first, SINKS) == max(model.ring_first(), SINKS)

    def teardown(self):
        for seq in self.models:
            self.pool.free(seq)
        assert (self.pool.free_pages, self.pool.free_seqs) == (10, 6)


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
test_any_operations = PoolMachine.TestCase


# ---- attention


def queries(rows, device="cpu"):
    """[tokens, 2 * HEADS, D], chosen by the rows of BANK that the tokens' keys are."""
    table = randn(BANK.shape[2], 2 * HEADS, D, seed=13)
    return table[torch.tensor(rows, dtype=torch.int64)].to(device)


def step(pool, seqs, rows, into=None):
    """One step of a model: [(out, lse) per layer] of these new rows, padding left out."""
    flat = [*chain(*rows)]
    with pool.reserve(seqs, [len(part) for part in rows], into=into) as batch:
        padded = flat + [7] * (batch.tokens - len(flat))  # rows of padding hold anything
        keys, values = vectors(padded, pool.device)
        results = []
        for layer in range(LAYERS):
            pool.store(layer, keys[layer], values[layer], batch)
            out, lse = pool.attend(layer, queries(padded, pool.device), batch)
            assert not out[len(flat) :].any() and (lse[len(flat) :] == -torch.inf).all()
            results.append((out[: len(flat)], lse[: len(flat)]))
    return results


def run_alone(rows, sizes, config=CONFIG, device="cpu"):
    """The same of one sequence in a pool of its own, fed in pieces of these sizes."""
    pool = make_pool(config, centers=CENTERS, num_pages=20, device=device)
    seq, start, parts = pool.allocate(), 0, []
    for size in sizes:
        parts.append(step(pool, [seq], [rows[start : start + size]]))
        start += size
    assert start == len(rows)
    return [[torch.cat(t) for t in zip(*layer, strict=True)] for layer in zip(*parts, strict=True)]


def assert_same_results(actual, expected):
    """Bits on the CPU; a GPU may cut a longer batch into other pieces."""
    for one, other in zip(chain(*actual), chain(*expected), strict=True):
        if one.device.type == "cpu":
            assert_same_bytes(one, other)
        else:
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


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
    with pool.reserve(seqs[:2], [3, 1], into=long):
        assert long.cu_seqlens_q.tolist() == [0, 3, 4] and long.max_q_len == MAX_Q
        assert (long.slot_mapping >= 0).tolist() == [True] * 4 + [False]
    with pool.reserve(seqs[2:], 2, into=long):
        assert long.cu_seqlens_q.tolist() == [0, 2, 2]


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


# ---- what cannot be done changes nothing


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
    refuse(ValueError, "twice", pool.reserve, [a, b, a])
    refuse(ValueError, "no sequences", pool.reserve, [])
    refuse(ValueError, "2 numbers for 1 sequences", pool.reserve, [a], [1, 1])
    refuse(ValueError, "new_tokens holds 0", pool.reserve, [a, b], [1, 0])
    refuse(ValueError, "41 tokens do not fit into max_seq_len=40", pool.reserve, [a], 21)
    refuse(ValueError, "length is 21, supported: 0 to 20", pool.truncate, a, 21)
    refuse(ValueError, "length is -1", pool.truncate, a, -1)
    refuse(ValueError, "layer is 2, supported: 0 to 1", pool.load, 2, a)

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


# ---- between pools


def test_a_sequence_moves_to_another_pool(device):
    """Into pools of other sizes and on another device, without loss; then both go on."""
    pool = make_pool(centers=CENTERS)
    rows = list(range(37))
    filled(pool, 3)
    seq = pool.allocate()
    append(pool, [seq], [rows])
    exported = pool.export(seq)
    assert json.loads(json.dumps(exported.fingerprint)) == pool.fingerprint
    target = make_pool(
        centers=CENTERS, num_pages=5, max_seqs=2, max_seq_len=60, max_q_len=MAX_Q + 2, device=device
    )
    target.allocate()
    assert target.fingerprint == pool.fingerprint
    copy = target.adopt(exported)
    check_contents(target, copy, rows)
    assert check_exact(target, copy, rows) == 37 - RING
    for row in (100, 101, 102):
        actual = step(target, [copy], [[row]])
        expected = step(pool, [seq], [[row]])
        assert_same_results(actual, [[t.to(device) for t in layer] for layer in expected])
    assert target.free_pages == 2

    small = make_pool(centers=CENTERS, max_q_len=1)
    adopted = small.adopt(exported)
    assert check_exact(small, adopted, rows) == 37 - WINDOW
    for length in (SINKS + 1, SINKS, 1, 0):
        pool.truncate(seq, length)
        short = small.adopt(pool.export(seq))
        check_contents(small, short, rows[:length])
        check_exact(small, short, rows[:length])
        small.free(short)


def test_equal_sequences_are_exported_equal():
    """Whatever the pages held before: no byte of another sequence leaves the pool."""
    pool = make_pool()
    for seq in filled(pool, 60, 60):
        pool.free(seq)
    used, fresh = (p.export(filled(p, 19)[0]) for p in (pool, make_pool()))
    assert used.length == fresh.length == 19
    for one, other in zip(used.pages + used.exact, fresh.pages + fresh.exact, strict=True):
        assert_same_bytes(one, other)
    empty = pool.export(pool.allocate())
    assert [p.shape[0] for p in empty.pages] == [0, 0] and empty.length == 0


OTHER_CENTERS = [CENTERS[0], CENTERS[1] + 1]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"config": tt.preset("k4v4", D, page_size=32, sink_tokens=2, recent_window=5)},
         "page_size is 16 there and 32 here$"),
        ({"config": tt.preset("k5v3u", D, page_size=16, sink_tokens=2, recent_window=5)},
         "key_bits is 4 there and 5 here; value_bits is 4 there and 3 here; key_grid is lloyd"),
        ({"config": tt.preset("k4v4u", D, page_size=16, sink_tokens=2, recent_window=5)},
         "key_grid is lloyd there and uniform here.*key_levels is [0-9a-f]+ there and None here"),
        ({"config": tt.preset("k4v4", D, page_size=16, sink_tokens=2, recent_window=5, seed=9)},
         "seed is 0 there and 9 here$"),
        ({"config": tt.preset("k4v4", 32, page_size=16, sink_tokens=2, recent_window=5),
          "centers": None}, "head_dim is 16 there and 32 here"),
        ({"config": tt.preset("k4v4", D, page_size=16, sink_tokens=2, recent_window=6)},
         "recent_window is 5 there and 6 here$"),
        ({"config": tt.preset("k4v4", D, page_size=16, sink_tokens=2, recent_window=5,
                              key_scale_mode="norm")},
         "key_scale_mode is unbiased there and norm here$"),
        ({"centers": None}, "center is [0-9a-f]+ there and None here$"),
        ({"centers": OTHER_CENTERS},
         "center is [0-9a-f]+ there and [0-9a-f]+ here \\(layers \\[1\\]\\)$"),
        ({"num_kv_heads": 1, "centers": None}, "kv_heads is 2 there and 1 here"),
        ({"num_layers": 1, "centers": CENTERS[:1]}, "2 layers there and 1 here$"),
        ({"dtype": torch.float16}, "tail_dtype is float32 there and float16 here$"),
    ],
)  # fmt: skip
def test_pages_that_do_not_fit(changes, match):
    pool = make_pool(centers=CENTERS)
    exported = pool.export(filled(pool, 20)[0])
    target = make_pool(**{"centers": CENTERS, **changes})
    before = state(target, [])
    with pytest.raises(ValueError, match=f"do not fit this pool: .*{match}"):
        target.adopt(exported)
    assert_same_state(state(target, []), before)


def test_pages_of_other_formats_and_levels():
    pool = make_pool()
    exported = pool.export(filled(pool, 20)[0])
    other = exported.fingerprint
    other["format_version"] = 2
    other["layers"][1]["value_levels"] = "0123456789abcdef"
    with pytest.raises(ValueError, match=r"format_version is 2 there and 1 here; value_levels is "
                       r"0123456789abcdef there and \w+ here \(layers \[1\]\)$"):  # fmt: skip
        pool.adopt(dataclasses.replace(exported, fingerprint=other))
    with pytest.raises(ValueError, match="0 layers there"):
        pool.adopt(dataclasses.replace(exported, fingerprint={}))


def test_exported_tensors_that_are_no_sequence():
    pool = make_pool(max_seq_len=24)
    seq = filled(pool, 20)[0]
    exported = pool.export(seq)
    before = state(pool, [seq])
    pages, exact = exported.pages, exported.exact
    for match, changes in {
        "length 20 and ring_first 21": {"ring_first": 21},
        "length -1": {"length": -1, "ring_first": 0},
        "pages has tensors of 1 layers, expected 2": {"pages": pages[:1]},
        "exact has tensors of 0 layers, expected 2": {"exact": ()},
        "pages has shape": {"pages": (pages[0], pages[1][:1])},
        "exact has shape": {"exact": (exact[0], exact[1][:, 1:])},
        "exact has shape ": {"ring_first": exported.ring_first - 1},
        "pages has shape ": {"length": 33},
    }.items():
        with pytest.raises(ValueError, match=match):
            pool.adopt(dataclasses.replace(exported, **changes))
        assert_same_state(state(pool, [seq]), before)
    for changes in (
        {"pages": tuple(p.int() for p in pages)},
        {"exact": tuple(e.half() for e in exact)},
    ):
        with pytest.raises(TypeError, match="supported"):
            pool.adopt(dataclasses.replace(exported, **changes))
        assert_same_state(state(pool, [seq]), before)
    big = make_pool()
    with pytest.raises(ValueError, match="25 tokens do not fit into max_seq_len=24"):
        pool.adopt(big.export(filled(big, 25)[0]))


# ---- what a pool is


@pytest.mark.parametrize("config", [CONFIG, NO_TAIL, [CONFIG, tt.preset("k8v4", 48, page_size=16,
                         sink_tokens=SINKS, recent_window=WINDOW)]])  # fmt: skip
@pytest.mark.parametrize("center", [False, True])
def test_bytes_are_said_beforehand(config, center, device):
    sizes = {
        "num_layers": 2,
        "num_kv_heads": 3,
        "num_pages": 7,
        "max_seqs": 5,
        "dtype": torch.bfloat16,
        "max_seq_len": 100,
        "max_q_len": 4,
        "device": device,
    }
    dims = [c.head_dim for c in (config if isinstance(config, list) else [config] * 2)]
    ones = [torch.ones(3, d) for d in dims]
    centers = [tt.scaled_center(x, x) for x in ones] if center else None
    said = tt.PagedKVPool.bytes_needed(config, centers=centers, **sizes)
    assert said == tt.PagedKVPool.bytes_needed(config, centers=center, **sizes)
    plain = tt.PagedKVPool.bytes_needed(config, centers=ones, **sizes)
    assert said.tables - plain.tables == (2 * 3 * 4 * sum(dims) if center else -3 * 4 * sum(dims))
    pool = tt.PagedKVPool(config, centers=centers, **sizes)
    assert said == pool.bytes
    tensors = [
        *pool.pages,
        *(pool.tails or ()),
        *(t for c in pool.tables for t in c if t is not None),
    ]
    assert said.device == sum(t.nbytes for t in tensors)
    assert said.device == said.pages + said.tail + said.tables
    assert said.pages == 7 * 3 * sum(c.record_bytes for c in pool.configs)
    assert said.host == 4 * (5 * 7 + 2 * 7)
    assert f"{said.device:,} bytes" in repr(pool) and "7 pages and 5 sequences free" in repr(pool)
    held = [t.data_ptr() for t in tensors]
    seq = pool.allocate()
    keys = [torch.zeros(100, 3, d, dtype=torch.bfloat16, device=device) for d in dims]
    pool.append([seq], keys, keys, 100)
    assert pool.free_pages == 0 and held == [t.data_ptr() for t in tensors]
    assert said == pool.bytes


def test_layers_may_differ_in_bits():
    configs = [tt.preset(name, D, page_size=16, sink_tokens=2, recent_window=5)
               for name in ("k8v8", "k4v4")]  # fmt: skip
    pool = make_pool(configs)
    seq = filled(pool, 30)[0]
    check_contents(pool, seq, list(range(30)))
    with pytest.raises(ValueError, match="key_bits is 8 there and 4 here \\(layers \\[0\\]\\)"):
        make_pool().adopt(pool.export(seq))


def test_centers_are_fixed_before_the_first_page():
    pool = make_pool()
    plain = pool.fingerprint
    seq = pool.allocate()
    pool.set_centers(CENTERS)
    assert pool.fingerprint == make_pool(centers=CENTERS).fingerprint != plain
    append(pool, [seq], [[1, 2, 3]])
    check_contents(pool, seq, [1, 2, 3])  # encoded with pool.tables
    for tables, center in zip(pool.tables, CENTERS, strict=True):
        assert_same_bytes(tables.center, center)
    fresh, adopting = make_pool(), make_pool(centers=CENTERS)
    adopting.adopt(pool.export(seq))
    pool.free(seq)
    for used in (pool, adopting):
        with pytest.raises(RuntimeError, match="fixed before the pool's first page"):
            used.set_centers(None)
    for match, centers in {
        "1 centers for 2 layers": CENTERS[:1],
        r"center of layer 1 has shape \[1, 16\], expected \[2, 16\]": [CENTERS[0], CENTERS[1][:1]],
        "center of layer 0 holds NaN": [CENTERS[0] / 0, None],
    }.items():
        for call in (fresh.set_centers, lambda c: make_pool(centers=c)):
            with pytest.raises(ValueError, match=match):
                call(centers)
    assert fresh.fingerprint == plain
    fresh.set_centers([None, CENTERS[1]])
    assert [layer["center"] is None for layer in fresh.fingerprint["layers"]] == [True, False]


def test_pools_that_are_refused():
    for match, changes in {
        "num_layers is 0": {"num_layers": 0},
        "num_kv_heads is 0": {"num_kv_heads": 0},
        "num_pages is -1": {"num_pages": -1},
        "max_seqs is 0": {"max_seqs": 0},
        "max_seq_len is 0": {"max_seq_len": 0},
        "max_q_len is 0": {"max_q_len": 0},
        "1 configs for 2 layers": {"config": [CONFIG]},
        r"one page_size, got \[16, 32\]": {"config": [CONFIG, tt.preset("k4v4", D)]},
        r"one sink_tokens, got \[0, 2\]": {"config": [CONFIG, NO_TAIL]},
    }.items():
        sizes = {"num_layers": 2, "num_kv_heads": 2, "num_pages": 4, "max_seqs": 4,
                 "dtype": torch.float32, "config": CONFIG}  # fmt: skip
        for call in (tt.PagedKVPool, tt.PagedKVPool.bytes_needed):
            with pytest.raises(ValueError, match=match):
                call(**{**sizes, **changes})
    with pytest.raises(TypeError, match="float64, supported: float32"):
        make_pool(dtype=torch.float64)


# ---- the example and the documentation


def test_continuous_batching(device):
    """The example asserts that its tokens are those of one request after the other."""
    example = load_script("examples/continuous_batching.py")
    seen, requests = example.main(["--device", str(device)])
    assert len(requests) == 32 and seen["steps with requests waiting"] > 0
    assert 8 <= seen["most at a time"] < 32 and seen["fewest pages"] < 8
    assert sum(request.prefix is not None for request in requests) == 20
    assert all(len(request.answer) == request.answer_length for request in requests)
    assert len({tuple(request.answer) for request in requests}) > 28


def test_the_documentation_runs():
    text = (ROOT / "docs" / "pool.md").read_text()
    names = {}
    exec(compile(text.split("```python\n")[1].split("```")[0], "docs/pool.md", "exec"), names)
    pool, twin = names["pool"], names["twin"]
    assert (twin.length, pool.free_seqs, pool.free_pages) == (98, 7, 60)
    assert (names["out"].shape, names["lse"].shape) == ((2, 8, 64), (2, 8))
