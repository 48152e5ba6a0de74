"""A small pool, rows to put into it, and what it must then hold."""

from itertools import chain

import torch

import torch_turboquant as tt
from tests.helpers import assert_same_bytes, randn

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
