"""Files of centers know a model by its configuration, be it a file of any age or an object."""

import os

import pytest
import torch

from torch_turboquant import centers
from torch_turboquant.models import IncompleteConfig

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "rope_type": "llama3"}


def test_files_that_cannot_be_written(tmp_path):
    """A link leads to the file that is written; a folder and a device stay what they are."""
    pytest.importorskip("safetensors")
    means = [torch.zeros(2, 32)] * 2
    with pytest.raises(OSError, match="is a folder; name a file"):
        centers.save(tmp_path, means, LLAMA)
    with pytest.raises(OSError, match="cannot be written: there is no"):
        centers.save(tmp_path / "nowhere" / "file", means, LLAMA)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="is a device, a pipe or a socket"):
        centers.save(pipe, means, LLAMA)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    centers.save(link, means, LLAMA)
    assert link.is_symlink() and sorted(p.name for p in tmp_path.iterdir()) == [
        "file", "link", "pipe"
    ]  # fmt: skip
    assert set(centers.load(tmp_path / "file", LLAMA)) == {0, 1}


def test_a_fingerprint_by_hand():
    assert centers.fingerprint(LLAMA) == {
        "format": "torch_turboquant centers 1",
        "model_type": "llama",
        "layers": "2",
        "hidden_size": "128",
        "attention_heads": "4",
        "kv_heads": "2",
        "head_dim": "32",
        "rope": '{"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}',
    }


def spelled(**rope):
    return {**{k: v for k, v in LLAMA.items() if k != "rope_parameters"}, **rope}


@pytest.mark.parametrize("other", [
    spelled(rope_theta=10000),
    spelled(rope_theta=10000.0, rope_scaling=None),
    spelled(rope_parameters={"rope_theta": 10000, "rope_type": "default", "factor": None}),
    spelled(rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 1.0}),
    {"model_type": "llava", "text_config": LLAMA},
])  # fmt: skip
def test_spellings_of_one_model(other):
    assert centers.fingerprint(other) == centers.fingerprint(LLAMA)


def test_older_files_spell_scaled_rope_otherwise():
    new = spelled(rope_parameters={**LLAMA3_ROPE, "rope_theta": 500000.0})
    old = spelled(rope_theta=500000, rope_scaling=LLAMA3_ROPE)
    older = spelled(
        rope_theta=500000,
        rope_scaling={"type": "llama3", "factor": 8, "low_freq_factor": 1},
    )
    assert centers.fingerprint(new) == centers.fingerprint(old) == centers.fingerprint(older)
    assert centers.fingerprint(new) != centers.fingerprint(LLAMA)


def test_the_object_of_transformers_says_the_same():
    transformers = pytest.importorskip("transformers")
    values = {**LLAMA, "head_dim": 32, "max_position_embeddings": 8192}
    config = transformers.LlamaConfig(**values)
    assert centers.fingerprint(config) == centers.fingerprint(LLAMA)
    assert centers.fingerprint(config.to_dict()) == centers.fingerprint(LLAMA)


def test_a_configuration_that_does_not_say_enough():
    with pytest.raises(IncompleteConfig, match="head_dim"):
        centers.fingerprint({**LLAMA, "model_type": "unheard_of"})


def test_centers_come_back(tmp_path):
    pytest.importorskip("safetensors")
    path, found = tmp_path / "c.safetensors", list(torch.randn(2, 2, 32))
    centers.save(path, found, LLAMA)
    loaded = centers.load(path, spelled(rope_theta=10000))
    assert list(loaded) == [0, 1]
    assert all(torch.equal(loaded[i], found[i]) for i in loaded)
    with pytest.raises(ValueError, match="another model: layers '2', the model's is '3'"):
        centers.load(path, {**LLAMA, "num_hidden_layers": 3})
    with pytest.raises(ValueError, match="1 centers, expected one for each of 2 layers"):
        centers.save(path, found[:1], LLAMA)


def test_files_that_cannot_be_read(tmp_path):
    """The errors are those of other files: what is there, and which version has written it."""
    safetensors = pytest.importorskip("safetensors.torch")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        centers.load(tmp_path / "nowhere", LLAMA)
    with pytest.raises(IsADirectoryError, match="is a folder; name a file"):
        centers.load(tmp_path, LLAMA)
    path, tensor = tmp_path / "file", {"x": torch.zeros(1)}
    newer = {"format": "torch_turboquant centers 2", "version": "9.1"}
    for metadata, says in (
        (newer, "was written by torch_turboquant 9.1 in another format, 'torch_turboquant cen"),
        ({"format": "pt"}, "is no file of centers: its format is 'pt', expected 'torch_turboq"),
        (None, "is no file of centers: its format is '', expected"),
    ):
        safetensors.save_file(tensor, path, metadata)
        with pytest.raises(ValueError, match=says):
            centers.load(path, LLAMA)
    path.write_bytes(b"abc")
    with pytest.raises(ValueError, match="is no file of centers, or damaged"):
        centers.load(path, LLAMA)


def test_layers_of_different_sizes(tmp_path):
    pytest.importorskip("safetensors")
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    config = {**LLAMA, **layers, "head_dim": 32, "global_head_dim": 64, "model_type": "gemma4_text"}
    assert centers.fingerprint(config)["head_dim"] == "32 and 64"
    path, found = tmp_path / "c.safetensors", [torch.randn(2, 32), torch.randn(2, 64)]
    centers.save(path, found, config)
    loaded = centers.load(path, config)
    assert all(torch.equal(loaded[i], found[i]) for i in loaded)
    with pytest.raises(ValueError, match="is of 3 KV heads, the model's layer has 2"):
        centers.save(path, [torch.randn(3, 32), found[1]], config)
    with pytest.raises(ValueError, match="is of 1 KV heads, the model's layer has 2"):
        centers.save(path, [found[0], torch.ones(3, 1, 64)], config)
    with pytest.raises(ValueError, match=r"\[2, 64\], expected torch.float32 \[kv_heads, 32\]"):
        centers.save(path, found[::-1], config)
