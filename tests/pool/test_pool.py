"""What a pool is: its bytes, its layers, its centers, its options, the example and its document."""

import dataclasses
import re

import pytest
import torch

import torch_turboquant as tt
from tests.helpers import ROOT, assert_same_bytes, load_script
from tests.pool.harness import (
    CENTERS,
    CONFIG,
    NO_TAIL,
    SINKS,
    WINDOW,
    D,
    append,
    check_contents,
    filled,
    make_pool,
    vectors,
)

DOCUMENT = (ROOT / "docs" / "pool.md").read_text()


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
    assert said.host == 4 * (5 * 7 + 4 * 7)
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


def test_sequences_may_come_from_a_generator():
    pool = make_pool()
    seqs = [pool.allocate(), pool.allocate()]
    pool.append(iter(seqs), *vectors([0, 1, 2, 3]), new_tokens=2)
    pool.append(iter(seqs), *vectors([4, 5, 6, 7, 8]), new_tokens=iter([3, 2]))
    check_contents(pool, seqs[0], [0, 1, 4, 5, 6])
    check_contents(pool, seqs[1], [2, 3, 7, 8])
    with pool.reserve(iter(seqs)) as batch:
        assert batch.sequences == tuple(seqs)
        pool.rollback(batch)


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
        assert tables.center.data_ptr() != center.data_ptr()  # whoever gave it may change it
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
        "num_kv_heads is 2.5, which is no whole": {"num_kv_heads": 2.5},
        "num_layers is 2.0, which is no whole": {"num_layers": 2.0},
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


@pytest.mark.parametrize("policy", ["snapkv", "random"])
def test_continuous_batching_of_parts_of_prompts(policy):
    """More requests at a time in the same pages, and again the tokens of one after the other."""
    example = load_script("examples/continuous_batching.py")
    all_kept, whole = example.main([])
    seen, requests = example.main(["--keep", "0.5", "--evict", policy])
    assert seen["steps"] < 0.8 * all_kept["steps"]
    assert all(len(request.answer) == request.answer_length for request in requests)
    assert [r.answer for r in requests] != [r.answer for r in whole]  # something was evicted


def test_the_documentation_runs(tmp_path, monkeypatch, capsys):
    """Every snippet of the page, one after the other."""
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert len(snippets) == 3
    names, printed = {}, []
    for snippet in snippets:
        exec(compile(snippet, "docs/pool.md", "exec"), names)
        printed.append(capsys.readouterr().out)
        pool, twin = names["pool"], names["twin"]
        assert (twin.length, pool.free_seqs, pool.free_pages) == (98, 7, 60)
    assert (names["out"].shape, names["lse"].shape) == ((2, 8, 64), (2, 8))
    needed = tt.PagedKVPool.bytes_needed(names["config"], centers=None, **names["sizes"])
    assert repr(needed) in printed[0] and "torch.Size([2, 8, 64])" in printed[0]
    assert "used_pages=5, free_pages=59, shared_pages=3, saved_pages=3" in printed[0]
    assert "forks=1, forked_tokens=100, copied_pages=1" in printed[0]
    exported = names["pool"].export(names["twin"])
    assert printed[1:] == ["100 16\n", f"{exported.nbytes} 4\n98 4\n"]
    means = torch.stack([layer.float().mean(0) for layer in names["prompt"][0, :, 4:]])
    for tables, mean in zip(pool.tables, means, strict=True):
        torch.testing.assert_close(tables.center, mean)


def test_every_number_is_documented():
    rows = re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \|", DOCUMENT.split("## Statistics")[1], re.MULTILINE
    )
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert named == [field.name for field in dataclasses.fields(tt.PoolStatistics)]
