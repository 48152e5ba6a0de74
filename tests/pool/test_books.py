"""Any sequence of operations on a pool, against a model of lists."""

from itertools import chain

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import torch_turboquant as tt
from tests.pool.harness import (
    BANK,
    CENTERS,
    LAYERS,
    MAX_Q,
    PAGE,
    RING,
    SINKS,
    assert_same_state,
    check_contents,
    check_exact,
    make_pool,
    state,
    vectors,
)
from torch_turboquant.ops.cache import tail_row_reference


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
        # what statistics count from the start
        self.most_pages = self.most_seqs = self.forks = self.forked_tokens = self.copied = 0

    def pick(self, number):
        return list(self.models)[number % len(self.models)]

    # what the model says about pages

    def owners(self, page):
        return sum(page in m.pages for m in self.models.values())

    def used(self):
        return len({id(p) for m in self.models.values() for p in m.pages})

    def grow(self, batch):
        """The model's pages after an append to these models; undoes it if they are too many."""
        before, copied = [(m, list(m.pages)) for m, _ in batch], 0
        for model, rows in batch:
            inside = len(model.rows) % PAGE
            if inside and self.owners(model.pages[-1]) > 1:
                model.pages[-1] = object()
                copied += 1
            while len(model.pages) * PAGE < len(model.rows) + len(rows):
                model.pages.append(object())
        fits = self.used() <= self.pool.num_pages
        if fits:
            self.copied += copied
            self.most_pages = max(self.most_pages, self.used())
        else:
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
            self.most_pages = max(self.most_pages, self.used())
            self.most_seqs = max(self.most_seqs, len(self.models))
        return seq

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
            self.expect_new(room, pool.allocate, Model())
            return
        seq = self.pick(pick)
        model = self.models[seq]
        if kind == "fork":
            copy = Model(model.rows, model.pages, model.ring)
            if self.expect_new(room, lambda: pool.fork(seq), copy) is not None:
                self.forks += 1
                self.forked_tokens += len(model.rows)
            return
        room = room and self.used() + len(model.pages) <= pool.num_pages
        exported = pool.export(seq)
        copy = Model(model.rows, [object() for _ in model.pages], model.ring)
        self.expect_new(room, lambda: pool.adopt(exported), copy)

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
    def statistics_are_right(self):
        models, used = list(self.models.values()), self.used()
        pages = {id(page): self.owners(page) for m in models for page in m.pages}
        assert self.pool.statistics() == tt.PoolStatistics(
            num_pages=10,
            used_pages=used,
            free_pages=10 - used,
            shared_pages=sum(owners > 1 for owners in pages.values()),
            saved_pages=sum(len(m.pages) for m in models) - used,
            sequences=len(models),
            tokens=sum(len(m.rows) for m in models),
            most_pages=self.most_pages,
            most_sequences=self.most_seqs,
            forks=self.forks,
            forked_tokens=self.forked_tokens,
            copied_pages=self.copied,
        )

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
