"""Centers for the ranks of an engine, without one: which file, and which heads a rank gets."""

import re

import pytest
import torch

from torch_turboquant import centers as files
from torch_turboquant.integrations.engine.centers import LayerConstants, find_file, heads_of_rank
from torch_turboquant.ops.codec import scaled_center

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rope_theta": 10000.0,
}


@pytest.fixture
def written(tmp_path):
    """A file of centers and scales, and what is in it: [layers, 3, kv_heads, head_dim]."""
    pytest.importorskip("safetensors")
    torch.manual_seed(0)
    found = [scaled_center(torch.randn(4, 32), torch.rand(4, 32) + 0.5) for _ in range(3)]
    path = tmp_path / "c.safetensors"
    files.save(path, found, LLAMA)
    return path, torch.stack(found)


def test_which_file(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    assert find_file(model, None) is None and find_file("somebody/a-model", None) is None
    beside = model / "turboquant.centers"
    beside.touch()
    assert find_file(str(model), None) == beside
    former = model / "turboquant_centers.safetensors"
    former.touch()
    with pytest.raises(ValueError, match="would be read as weights of the model: rename it to tur"):
        find_file(model, None)
    former.unlink()
    given = tmp_path / "other.safetensors"
    with pytest.raises(ValueError, match=r"there is no file of centers .*: make it with"):
        find_file(model, str(given))
    given.touch()
    assert find_file(model, str(given)) == given


@pytest.mark.parametrize(("size", "heads"), [
    (1, [[0, 1, 2, 3]]),
    (2, [[0, 1], [2, 3]]),
    (4, [[0], [1], [2], [3]]),
    (8, [[0], [0], [1], [1], [2], [2], [3], [3]]),
])  # fmt: skip
def test_heads_of_a_rank(written, size, heads):
    path, found = written
    for rank, own in enumerate(heads):
        assert list(range(4))[heads_of_rank(4, rank, size)] == own
        constants = LayerConstants.of(path, LLAMA, rank, size)
        for layer in range(3):
            center, scale = constants.for_layer(layer, len(own), 32)
            assert torch.equal(center, found[layer, 0, own])
            assert torch.equal(scale, found[layer, 1, own])
            assert torch.equal(scaled_center(center, scale), found[layer][:, own])
            assert torch.equal(constants.center(layer, len(own), 32), found[layer][:, own])


def test_heads_that_cannot_be_divided():
    with pytest.raises(ValueError, match=r"4 KV heads .* 3 tensor-parallel ranks"):
        heads_of_rank(4, 0, 3)


def test_the_mean_alone(tmp_path):
    pytest.importorskip("safetensors")
    path = tmp_path / "c.safetensors"
    files.save(path, [torch.ones(4, 32)] * 3, LLAMA)
    constants = LayerConstants.of(path, LLAMA, 0, 1)
    center, scale = constants.for_layer(2, 4, 32, dtype=torch.bfloat16)
    assert scale is None and torch.equal(center, torch.ones(4, 32).bfloat16())
    assert torch.equal(constants.center(2, 4, 32), torch.ones(4, 32))
    assert re.fullmatch(f"centers from {path} \\(sha256 [0-9a-f]{{12}}\\)", constants.describe())


def test_what_the_start_up_line_says(written, tmp_path):
    path, found = written
    first = LayerConstants.of(path, LLAMA, 0, 1).describe()
    assert first.startswith(f"centers and channel scales from {path} (sha256 ")
    files.save(path, list(found[[0, 1, 1]]), LLAMA)
    assert LayerConstants.of(path, LLAMA, 0, 1).describe() != first


def test_layers_that_the_file_does_not_know(written):
    constants = LayerConstants.of(written[0], LLAMA, 0, 1)
    assert constants.for_layer(3, 4, 32) == (None, None)  # a draft model's, behind the model's own
    assert constants.center(3, 4, 32) is None
    hybrid = LayerConstants(written[0], {0: written[1][0], 2: written[1][2]}, 0, 1)
    with pytest.raises(ValueError, match="no center for layer 1, which keeps no keys"):
        hybrid.for_layer(1, 4, 32)


@pytest.mark.parametrize(("heads", "dim"), [(4, 32), (2, 64)])
def test_a_wrong_cut_is_refused(written, heads, dim):
    constants = LayerConstants.of(written[0], LLAMA, 1, 2)
    text = (
        f"has 4 KV heads of 32 channels for layer 0, 2 of them on each of 2 tensor-parallel ranks, "
        f"but the layer has {heads} of {dim} channels: calibrate the whole model"
    )
    with pytest.raises(ValueError, match=text):
        constants.for_layer(0, heads, dim)


def test_other_files_are_refused(written, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    cure = "Make centers of this model with torch_turboquant calibrate"
    with pytest.raises(ValueError, match=f"centers of another model: rope .*{cure}"):
        LayerConstants.of(written[0], {**LLAMA, "rope_theta": 500000.0}, 0, 1)
    other = tmp_path / "other.safetensors"
    save_file({"layers.0.center": torch.ones(4, 32)}, other)
    with pytest.raises(ValueError, match=f"format is '', .*{cure}"):
        LayerConstants.of(other, LLAMA, 0, 1)
    save_file({}, other, metadata={"format": "torch_turboquant centers 9"})
    with pytest.raises(ValueError, match=f"another format, 'torch_turboquant centers 9'; .*{cure}"):
        LayerConstants.of(other, LLAMA, 0, 1)
    other.write_bytes(written[0].read_bytes()[:100])
    with pytest.raises(ValueError, match=f"or damaged: .*{cure}"):
        LayerConstants.of(other, LLAMA, 0, 1)
