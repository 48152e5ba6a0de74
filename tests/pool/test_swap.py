"""Sequences that leave a pool for a while: the same bytes afterwards, pages that come free."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import torch_turboquant as tt
from tests.helpers import assert_same_bytes
from tests.pool.harness import (
    CENTERS,
    CONFIG,
    NO_TAIL,
    PAGE,
    D,
    append,
    assert_same_results,
    assert_same_state,
    check_contents,
    filled,
    make_pool,
    state,
    step,
)
from torch_turboquant.pool import transfer

WAYS = ["memory", "file"]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def out(pool, seq, way):
    if way == "file":
        pytest.importorskip("safetensors")
    return pool.swap_out(seq, "sequence.safetensors" if way == "file" else None)


def contents(pool, seq):
    exported = pool.export(seq)
    return exported.ring_first, [*exported.pages, *exported.exact]


def assert_same_contents(actual, expected):
    assert actual[0] == expected[0]
    for one, other in zip(actual[1], expected[1], strict=True):
        assert_same_bytes(one, other)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [0, 1, PAGE, 37])
@pytest.mark.parametrize(
    ("config", "changes"),
    [(CONFIG, {"centers": CENTERS}), (NO_TAIL, {}), (CONFIG, {"dtype": torch.bfloat16})],
)
def test_out_and_in(config, changes, length, way, device):
    """While others take its pages, tail and entry of the block table."""
    pool = make_pool(config, device=device, **changes)
    keys = [[torch.randn(length, 2, D).to(device, pool.dtype) for _ in range(2)] for _ in "kv"]
    seq = pool.allocate()
    if length:
        pool.append([seq], *keys, new_tokens=length)
    before = contents(pool, seq)
    swapped = out(pool, seq, way)
    assert pool.free_pages == 8 and pool.free_seqs == 4 and swapped.length == length
    with pytest.raises(RuntimeError, match="this sequence was freed"):
        pool.truncate(seq, 0)
    size = sum(t.nbytes for t in before[1])
    assert swapped.nbytes == (size if way == "memory" else 0)
    if way == "file":
        assert size <= swapped.path.stat().st_size <= size + 6000
    elif device.type == "cuda":
        assert all(t.is_pinned() for t in swapped.held.pages if t.numel())
    if length and pool.dtype == torch.float32:
        (other,) = filled(pool, 8 * PAGE)
        with pytest.raises(tt.PoolExhausted):
            pool.swap_in(swapped)
        pool.free(other)
    assert pool.pages_to_swap_in(swapped) == -(-length // PAGE)
    for _ in range(2):  # it can come in again
        back = pool.swap_in(swapped)
        assert_same_contents(contents(pool, back), before)


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_as_if_it_had_stayed(way, device):
    pool, other = (make_pool(centers=CENTERS, device=device) for _ in range(2))
    seqs = [p.allocate() for p in (pool, other)]
    for p, seq in zip((pool, other), seqs, strict=True):
        append(p, [seq], [list(range(37))])
    swapped = out(pool, seqs[0], way)
    pool.free(filled(pool, 90)[0])
    seqs[0] = pool.swap_in(swapped)
    for rows in ([100], [101, 102], [103]):
        actual, expected = (
            step(p, [seq], [rows]) for p, seq in zip((pool, other), seqs, strict=True)
        )
        assert_same_results(actual, [list(layer) for layer in expected])


def shares(pool, one, other):
    """How many first pages two sequences have in common."""
    pairs = zip(pool.page_numbers(one), pool.page_numbers(other), strict=False)
    return sum(a == b for a, b in pairs)


@pytest.mark.parametrize("way", WAYS)
def test_a_prefix_is_shared_again(way):
    """Pages that others own stay in the pool, and are the swapped sequence's once more."""
    pool = make_pool()
    root = filled(pool, 35)[0]
    seq = pool.fork(root)
    append(pool, [seq], [[200, 201]])
    rows = [*range(35), 200, 201]
    assert shares(pool, root, seq) == 2 and pool.free_pages == 4
    swapped = out(pool, seq, way)
    assert pool.free_pages == 5 and pool.statistics().shared_pages == 0
    check_contents(pool, root, list(range(35)))
    assert pool.pages_to_swap_in(swapped) == 1
    back = pool.swap_in(swapped)
    assert shares(pool, root, back) == 2 and pool.free_pages == 4
    check_contents(pool, back, rows)
    append(pool, [back], [[202]])
    check_contents(pool, root, list(range(35)))
    pool.free(root)
    check_contents(pool, back, [*rows, 202])
    pool.free(back)
    assert pool.free_pages == 8 and pool.statistics().tokens == 0


@pytest.mark.parametrize("change", ["append", "truncate", "free", "free and take", "rollback"])
def test_a_prefix_that_has_changed_is_not_shared(change):
    """The last page once somebody has appended to it; all pages once their owners are gone."""
    pool = make_pool()
    root = filled(pool, 35)[0]
    seq = pool.fork(root)
    swapped = pool.swap_out(seq)
    expected = {"append": 2, "truncate": 1, "rollback": 2}.get(change, 0)
    if change == "append":
        append(pool, [root], [[300]])
    if change == "rollback":
        pool.rollback(pool.reserve([root], 1))
    if change == "truncate":
        pool.truncate(root, 20)
        append(pool, [root], [list(range(300, 315))])  # the same length, other tokens
    if change.startswith("free"):
        pool.free(root)
    if change == "free and take":
        root = filled(pool, 60)[0]
    assert pool.pages_to_swap_in(swapped) == 3 - expected
    back = pool.swap_in(swapped)
    check_contents(pool, back, list(range(35)))
    if not change.startswith("free"):
        assert shares(pool, root, back) == expected
    append(pool, [back], [[400]])
    check_contents(pool, back, [*range(35), 400])


def test_a_prefix_that_was_compacted_is_not_shared():
    pool = make_pool()
    root = filled(pool, 35)[0]
    swapped = pool.swap_out(pool.fork(root))
    kept = torch.tensor([0, 1, *range(10, 20)]).expand(1, 2, -1).contiguous()
    pool.compact([root], [kept, kept])
    assert pool.pages_to_swap_in(swapped) == 3
    check_contents(pool, pool.swap_in(swapped), list(range(35)))


def test_an_untouched_last_page_is_shared_and_then_copied():
    pool = make_pool()
    root = filled(pool, 35)[0]
    back = pool.swap_in(pool.swap_out(pool.fork(root)))
    assert shares(pool, root, back) == 3 and pool.free_pages == 5
    append(pool, [back], [[300]])
    assert shares(pool, root, back) == 2
    check_contents(pool, root, list(range(35)))
    check_contents(pool, back, [*range(35), 300])


def test_another_pool_takes_it_without_sharing():
    pool, target = make_pool(), make_pool()
    filled(target, 40)
    root = filled(pool, 35)[0]
    swapped = pool.swap_out(pool.fork(root))
    assert target.pages_to_swap_in(swapped) == 3
    check_contents(target, target.swap_in(swapped), list(range(35)))
    different = make_pool(tt.preset("k8v4", D, page_size=PAGE, sink_tokens=2, recent_window=5))
    with pytest.raises(ValueError, match="do not fit this pool: key_bits is 4 there and 8 here"):
        different.swap_in(swapped)


def test_a_file_that_another_sequence_was_written_to():
    pool = make_pool()
    swapped = [out(pool, seq, "file") for seq in filled(pool, 20, 37)]
    with pytest.raises(ValueError, match=r"another sequence than .*, one of 37 tokens: give each"):
        pool.swap_in(swapped[0])
    assert pool.swap_in(swapped[1]).length == 37


def test_a_file_that_another_sequence_of_the_same_length_was_written_to():
    pool = make_pool()
    swapped = [out(pool, seq, "file") for seq in filled(pool, 20, 20)]
    with pytest.raises(ValueError, match="another sequence than was swapped out to it"):
        pool.swap_in(swapped[0])
    check_contents(pool, pool.swap_in(swapped[1]), list(range(20, 40)))


def test_no_page_is_free():
    pool = make_pool(num_pages=4)
    swapped = pool.swap_out(filled(pool, 40)[0])
    other = filled(pool, 30)[0]
    before = state(pool, [other])
    with pytest.raises(tt.PoolExhausted, match="3 pages are needed for 40 tokens, 2 of 4 are free"):
        pool.swap_in(swapped)
    assert_same_state(state(pool, [other]), before)
    pool.free(other)
    check_contents(pool, pool.swap_in(swapped), list(range(40)))
    for _ in range(3):
        pool.allocate()
    with pytest.raises(tt.PoolExhausted, match="all 4 sequences"):
        pool.swap_in(swapped)


def test_integers_of_numpy():
    """Sizes and lengths of them do not keep a sequence out of a file."""
    sizes = dict.fromkeys(("num_layers", "num_kv_heads"), np.int64(2))
    sizes |= {"num_pages": np.int32(8), "max_seqs": np.int32(4), "max_q_len": np.int64(3)}
    pool = make_pool(**sizes, max_seq_len=np.int64(100))
    assert pool.fingerprint == make_pool().fingerprint
    (seq,) = filled(pool, 40)
    pool.truncate(seq, np.int64(39))
    pool.export(seq).save("exported.safetensors")
    check_contents(pool, pool.swap_in(out(pool, seq, "file")), list(range(39)))


def test_what_cannot_be_swapped_out():
    pool, other = make_pool(), make_pool()
    seq = filled(pool, 20)[0]
    with pytest.raises(ValueError, match="belongs to another pool"):
        other.swap_out(seq)
    for path, error in ((".", IsADirectoryError), ("nowhere/file", FileNotFoundError)):
        with pytest.raises(error, match=r"name a file|cannot be written: there is no nowhere"):
            pool.swap_out(seq, path)
    with pool.reserve([seq]) as batch:
        with pytest.raises(RuntimeError, match="in an open batch"):
            pool.swap_out(seq)
        pool.rollback(batch)
    check_contents(pool, seq, list(range(20)))
    pool.free(seq)
    with pytest.raises(RuntimeError, match="was freed"):
        pool.swap_out(seq)


@pytest.mark.parametrize("change", ["append", "truncate", "replace"])
def test_a_sequence_that_changes_while_it_is_written(change, monkeypatch):
    pytest.importorskip("safetensors")
    pool = make_pool()
    seq = filled(pool, 20)[0]
    real = transfer._write

    def meanwhile(*arguments):
        real(*arguments)
        if change != "append":
            pool.truncate(seq, 19)
        if change != "truncate":
            append(pool, [seq], [[300]])

    monkeypatch.setattr(transfer, "_write", meanwhile)
    with pytest.raises(RuntimeError, match="changed while it was written to sequence: let no oth"):
        pool.swap_out(seq, "sequence")
    changed = {"append": [*range(20), 300], "truncate": [*range(19)], "replace": [*range(19), 300]}
    check_contents(pool, seq, changed[change])


def test_a_disk_that_is_full(monkeypatch):
    """The sequence is still there, and no file is."""
    pytest.importorskip("safetensors")
    pool = make_pool()
    seq = filled(pool, 20)[0]

    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="no space left"):
        pool.swap_out(seq, "sequence")
    check_contents(pool, seq, list(range(20)))
    assert not list(Path().iterdir())


def test_files_of_sequences():
    """In another pool, as another program would; and what is none is refused."""
    safetensors = pytest.importorskip("safetensors.torch")
    pool = make_pool(centers=CENTERS)
    exported = pool.export(filled(pool, 37)[0])
    size = exported.save("sequence")
    assert size == Path("sequence").stat().st_size <= exported.nbytes + 6000
    loaded = tt.ExportedSequence.load("sequence")
    assert dataclasses.asdict(loaded).keys() == dataclasses.asdict(exported).keys()
    assert (loaded.fingerprint, loaded.length) == (exported.fingerprint, 37)
    target = make_pool(centers=CENTERS)
    check_contents(target, target.adopt(loaded), list(range(37)))
    whole = Path("sequence").read_bytes()
    for content in (b"", whole[:-1], whole[:100]):
        Path("other").write_bytes(content)
        with pytest.raises(ValueError, match="other is no file of a sequence, or damaged"):
            tt.ExportedSequence.load("other")
    tensors = safetensors.load_file("sequence")
    said = {"fingerprint": "{}", "sequence": json.dumps({"length": 1}), "version": "0"}
    for match, metadata in (
        ("is no file of a sequence: its format is ''", {}),
        (
            "in another format, '.* 2'; this version reads",
            {"format": "torch_turboquant sequence 2"},
        ),
        (
            "is no file of a sequence, or damaged: KeyError",
            {"format": "torch_turboquant sequence 1"},
        ),
    ):
        safetensors.save_file(tensors, "other", metadata={**said, **metadata})
        with pytest.raises(ValueError, match=match):
            tt.ExportedSequence.load("other")
    with pytest.raises(FileNotFoundError):
        tt.ExportedSequence.load("none")
