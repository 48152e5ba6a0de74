"""Sequences between pools: exported, adopted, or refused with the difference named."""

import dataclasses
import json
import math
import pickle

import pytest
import torch

import torch_turboquant as tt
from tests.helpers import assert_same_bytes, randn
from tests.pool.harness import (
    CENTERS,
    CONFIG,
    HEADS,
    MAX_Q,
    NO_TAIL,
    PAGE,
    RING,
    SINKS,
    WINDOW,
    D,
    append,
    assert_same_results,
    assert_same_state,
    check_contents,
    check_exact,
    filled,
    make_pool,
    state,
    step,
)


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


def test_exported_tensors_with_gradients():
    """The pool's memory takes none."""
    pool = make_pool()
    seq = filled(pool, 37)[0]
    exported = pool.export(seq)
    exact = tuple(x.clone().requires_grad_() for x in exported.exact)
    copy = pool.adopt(dataclasses.replace(exported, exact=exact))
    assert not any(tail.requires_grad for tail in pool.tails)
    assert_same_results(step(pool, [copy], [[100]]), step(pool, [seq], [[100]]))


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


def through_a_file(exported, path):
    """The recipe of docs/pool.md."""
    torch.save(vars(exported.to("cpu")), path)
    return tt.ExportedSequence(**torch.load(path, weights_only=True))


OF_LAYERS = [tt.preset(name, d, page_size=PAGE, sink_tokens=SINKS, recent_window=WINDOW)
             for name, d in (("k5v4u", 16), ("k2v2", 32))]  # fmt: skip


@pytest.mark.parametrize("length", [0, 1, PAGE, 37])
@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (CONFIG, {"centers": CENTERS}),
        (CONFIG, {"centers": [None, tt.scaled_center(CENTERS[1], CENTERS[1].abs() + 1)]}),
        (NO_TAIL, {}),
        (OF_LAYERS, {"dtype": torch.bfloat16}),
    ],
)
def test_a_sequence_through_a_file(config, changes, length, device, tmp_path):
    """The same bytes in the file, in the pool that it came from and in another; pages that a fork
    shares, too."""
    pool = make_pool(config, device=device, **changes)
    dims = [c.head_dim for c in pool.configs]
    keys, values = ([randn(length, HEADS, d, seed=kind + d).to(device, pool.dtype) for d in dims]
                    for kind in (1, 2))  # fmt: skip
    seq = pool.allocate()
    if length:
        pool.append([seq], keys, values, length)
    twin = pool.fork(seq)
    exported = pool.export(seq)
    path = tmp_path / "sequence.pt"
    loaded = through_a_file(exported, path)
    assert vars(loaded).keys() == vars(exported).keys()
    for name in ("fingerprint", "length", "ring_first"):
        assert getattr(loaded, name) == getattr(exported, name)
    tensors = loaded.pages + loaded.exact
    assert path.stat().st_size < sum(t.nbytes for t in tensors) + 20_000  # no views of all pages
    pool.free(seq)
    for target in (pool, make_pool(config, num_pages=3, max_q_len=MAX_Q, **changes)):
        again = target.export(target.adopt(loaded))
        for one, other in zip(again.pages + again.exact, tensors, strict=True):
            assert_same_bytes(one, other)
    assert_same_bytes(pool.export(twin).pages[0], exported.pages[0])
    other = make_pool(tt.preset("k8v4", D, page_size=PAGE, sink_tokens=SINKS,
                                recent_window=WINDOW, seed=5), device=device)  # fmt: skip
    with pytest.raises(ValueError, match=r"do not fit this pool: .*key_bits is \d there and 8 "):
        other.adopt(loaded)


def test_a_file_with_more_than_a_sequence(tmp_path):
    """What else a file may hold is refused, by torch or by the pool."""
    pool = make_pool()
    exported = pool.export(filled(pool, 5)[0])
    path = tmp_path / "sequence.pt"
    torch.save({**vars(exported), "pages": dataclasses.replace(exported)}, path)
    with pytest.raises(pickle.UnpicklingError, match="ExportedSequence"):
        torch.load(path, weights_only=True)
    torch.save(vars(exported), path)
    loaded = torch.load(path, weights_only=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'more'"):
        tt.ExportedSequence(**loaded, more=1)
    loaded["fingerprint"]["format_version"] = 2
    with pytest.raises(ValueError, match="format_version is 2 there and 1 here"):
        pool.adopt(tt.ExportedSequence(**loaded))


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
    for layers in (None, 2, [None, None]):
        with pytest.raises(ValueError, match="the layers there are no list of objects"):
            pool.adopt(dataclasses.replace(exported, fingerprint={"layers": layers}))


def test_files_that_say_something_else(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import load_file, save_file

    path = tmp_path / "sequence.safetensors"
    pool = make_pool()
    pool.export(filled(pool, 20)[0]).save(path)
    tensors = load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    numbers = json.loads(metadata["sequence"])
    for change in (
        {"fingerprint": "null"},
        {"fingerprint": "[" * 100_000},
        {"sequence": "5"},
        {"sequence": json.dumps({**numbers, "length": math.inf})},
        {"sequence": json.dumps({**numbers, "length": "20"})},
        {"sequence": json.dumps({**numbers, "layers": 2.0})},
    ):
        save_file(tensors, path, metadata={**metadata, **change})
        with pytest.raises(
            ValueError, match=r"sequence\.safetensors is no file of a sequence, or d"
        ):
            tt.ExportedSequence.load(path)


def test_a_length_that_no_memory_holds():
    pool = make_pool()
    exported = pool.export(filled(pool, 20)[0])
    with pytest.raises(ValueError, match="pages has shape"):
        pool.adopt(dataclasses.replace(exported, length=2**60))


def test_exported_tensors_that_are_no_sequence():
    pool = make_pool(max_seq_len=24)
    seq = filled(pool, 20)[0]
    exported = pool.export(seq)
    before = state(pool, [seq])
    pages, exact = exported.pages, exported.exact
    for match, changes in {
        "length 20 and ring_first 21": {"ring_first": 21},
        "length -1": {"length": -1, "ring_first": 0},
        "dropped is -1": {"dropped": -1},
        f"dropped is {2**63 - 20}, supported: 0 to {2**63 - 21}": {"dropped": 2**63 - 20},
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
