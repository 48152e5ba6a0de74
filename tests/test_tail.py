"""Rings, slots and counters against a model that remembers what every row of a tail holds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import torch_turboquant as tt
from torch_turboquant.ops.cache import tail_row_reference
from torch_turboquant.tail import (
    Counters,
    Rings,
    held_positions,
    owned_pages,
    owned_slots,
    ring_rows,
    tail_shape,
    token_slots,
)

ENTRIES = 3


def config(sinks, window):
    return tt.CacheConfig(16, 4, 4, sink_tokens=sinks, recent_window=window)


class RingsMachine(RuleBasedStateMachine):
    """Sequences that are stored, cut, forked and reordered.

    The model writes a token of its own into the row of every stored position, as cache_store does,
    and looks which positions of a sequence still hold the sequence's own token.
    """

    @initialize(sinks=st.integers(0, 3), window=st.integers(0, 6), max_q_len=st.integers(1, 4))
    def start(self, sinks, window, max_q_len):
        self.config = config(sinks, window)
        self.rings = Rings(self.config, ENTRIES, max_q_len)
        self.ring = ring_rows(self.config, max_q_len)
        self.tokens = [[] for _ in range(ENTRIES)]  # of each sequence, by position
        self.rows = [{} for _ in range(ENTRIES)]  # of each entry: row -> token
        self.made = 0

    def held(self, entry):
        """First position from which on the ring holds everything, at least `sink_tokens`."""
        tokens, first = self.tokens[entry], len(self.tokens[entry])
        while first > self.config.sink_tokens:
            row = tail_row_reference(first - 1, self.config.sink_tokens, self.ring)
            if self.rows[entry].get(row) != tokens[first - 1]:
                break
            first -= 1
        return max(first, self.config.sink_tokens)

    @rule(entry=st.integers(0, ENTRIES - 1), count=st.integers(1, 12))
    def store(self, entry, count):
        length = len(self.tokens[entry]) + count
        announced = self.rings.valid([entry], [length])
        self.rings.stored(entry, length)
        for position in range(length - count, length):
            self.made += 1
            self.tokens[entry].append(self.made)
            row = tail_row_reference(position, self.config.sink_tokens, self.ring)
            self.rows[entry][row] = self.made
        sinks = self.config.sink_tokens
        assert announced.dtype == np.int32 and announced.shape == (ENTRIES, 2)
        assert announced[entry, 0] == min(length, sinks)
        assert max(announced[entry, 1], sinks) == self.held(entry)
        assert not np.delete(announced, entry, axis=0).any()

    @rule(entry=st.integers(0, ENTRIES - 1), part=st.floats(0, 1))
    def cut(self, entry, part):
        length = int(part * len(self.tokens[entry]))
        del self.tokens[entry][length:]
        self.rings.cut(entry, length)

    @rule(entries=st.lists(st.integers(0, ENTRIES - 1), max_size=ENTRIES))
    def select(self, entries):
        self.rings.select(entries)
        empty = ENTRIES - len(entries)
        self.tokens = [list(self.tokens[e]) for e in entries] + [[] for _ in range(empty)]
        self.rows = [dict(self.rows[e]) for e in entries] + [{} for _ in range(empty)]

    @invariant()
    def the_rings_hold_what_they_say(self):
        if not hasattr(self, "rings"):
            return
        sinks = self.config.sink_tokens
        for entry, tokens in enumerate(self.tokens):
            first, length = self.rings.first[entry], len(tokens)
            assert 0 <= first <= length
            if length > sinks:
                assert max(first, sinks) == self.held(entry)
            rows = self.rings.rows(length, first)
            positions = held_positions(length, first, sinks)
            assert rows.dtype == positions.dtype == np.int64
            assert len(set(rows.tolist())) == len(rows) == len(positions)
            assert [self.rows[entry][row] for row in rows] == [tokens[p] for p in positions]


TestRings = RingsMachine.TestCase
TestRings.settings = settings(max_examples=150, stateful_step_count=30)


def test_a_snapshot_stays():
    rings = Rings(config(2, 3), 2, 1)
    rings.stored(0, 9)
    before = rings.snapshot()
    rings.stored(0, 20)
    assert before.first == [6, 0] and rings.first == [17, 0]
    assert before.valid([0], [10]).tolist() == [[2, 7], [0, 0]]


def test_shapes():
    assert ring_rows(config(2, 3), 4) == 6
    assert ring_rows(config(2, 0), 1) == 1  # a ring is never empty
    shape = tail_shape(config(2, 3), 5, 7, 4)
    assert shape == (5, 7, 8, 2, 16) == tt.allocate_tail(config(2, 3), 5, 7, torch.half, 4).shape


@given(
    pads=st.lists(st.integers(0, 9), min_size=1, max_size=ENTRIES),
    columns=st.integers(10, 40),
    steps=st.lists(st.integers(1, 5), max_size=4),
    cut=st.integers(0, 12),
)
def test_counters_are_rings_on_a_device(pads, columns, steps, cut):
    rings = Rings(config(2, 3), ENTRIES, 5)
    for entry, pad in enumerate(pads):
        rings.stored(entry, columns - pad)
        rings.cut(entry, max(0, columns - cut - pad))
    columns = max(0, columns - cut)
    counters = Counters(rings, torch.device("cpu"))
    counters.own_slots(48)
    places = [t.data_ptr() for t in counters.tensors]
    counters.set(columns, pads, rings)

    def check_ahead():
        lengths = [columns + 1 - pad for pad in pads]
        assert counters.next_lengths[: len(pads)].tolist() == lengths
        if min(lengths) > 0:
            valid = rings.valid(range(len(pads)), lengths)[: len(pads)]
            assert counters.next_valid[: len(pads)].tolist() == valid.tolist()
            last = np.array(lengths)[:, None] - 1
            for room in (48, 80):
                slots = owned_slots(np.arange(len(pads)), last, room)[:, 0]
                assert counters.next_slots[room][: len(pads)].tolist() == slots.tolist()

    known = counters.next_slots[48]
    counters.own_slots(80)  # known at once
    counters.own_slots(48)
    assert counters.next_slots[48] is known
    check_ahead()
    places += [counters.next_slots[80].data_ptr()]
    for new in steps:
        lengths = counters.lengths(new)
        expected = [columns + new - pad for pad in pads]
        assert lengths[: len(pads)].tolist() == expected
        if min(expected) > 0:
            valid = counters.valid(lengths)
            assert valid.dtype == torch.int32 and lengths.dtype == torch.int32
            host = rings.valid(range(len(pads)), expected)
            assert valid[: len(pads)].tolist() == host[: len(pads)].tolist()
        counters.advance(new)
        columns += new
        for entry, length in enumerate(expected):
            rings.stored(entry, max(0, length))
        check_ahead()
    assert int(counters.columns) == columns
    assert [t.data_ptr() for t in counters.tensors] == places
    assert counters.entries.tolist() == [0, 1, 2]


@given(
    pages=st.integers(1, 5),
    page_size=st.sampled_from([1, 16, 32]),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=3),
)
def test_owned_slots_are_slots_of_owned_pages(pages, page_size, lengths):
    entries, longest = len(lengths), max(lengths)
    table = owned_pages(entries, -(-longest // page_size), pages)
    assert table.dtype == np.int32
    assert (np.sort(np.unique(table)) < entries * pages).all()
    position = np.arange(longest)[None].repeat(entries, 0)
    page = np.take_along_axis(table, position // page_size, axis=1)
    expected = token_slots(page, position, page_size)
    found = owned_slots(np.arange(entries), position, pages * page_size)
    assert (found == expected).all()
    tensors = owned_slots(torch.arange(entries), torch.from_numpy(position), pages * page_size)
    assert tensors.tolist() == expected.tolist()
    for row, length in zip(found, lengths, strict=True):  # the last tokens overwrite no others
        last = row[max(0, length - pages * page_size) : length]
        assert len(set(last.tolist())) == len(last)


def test_no_tail_for_a_config_without():
    with pytest.raises(ValueError, match="needs no tail"):
        tt.allocate_tail(config(0, 0), 1, 1, torch.float32)
