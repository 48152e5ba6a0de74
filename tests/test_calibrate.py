"""`torch_turboquant calibrate`: a tiny model in a folder, its text, and the file that comes out."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from tests.helpers import WORDS, save_words_tokenizer, tiny_llama
from torch_turboquant import __main__ as command_line
from torch_turboquant import centers
from torch_turboquant.integrations.engine.centers import LayerConstants, find_file
from torch_turboquant.integrations.transformers import TurboQuantCache, load_centers
from torch_turboquant.integrations.vllm import calibrator


@pytest.fixture
def folder(tmp_path):
    """A model of at most 100 positions, with a tokenizer that knows 64 words."""
    path = tmp_path / "model"
    save_words_tokenizer(path)
    tiny_llama(max_position_embeddings=100).save_pretrained(path)
    return path


@pytest.fixture
def ids():
    return torch.randint(0, 64, (250,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def text(tmp_path, ids):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(WORDS[i] for i in ids))
    return path


def calibrate(*argv):
    return command_line.main(["calibrate", *map(str, argv)])


def test_the_file_beside_the_model(folder, text, ids, capsys):
    assert calibrate(folder, text) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    path = folder / "turboquant.centers"
    assert line.startswith(f"{path}: centers and channel scales from 200 tokens in ")
    model = tiny_llama(max_position_embeddings=100)
    expected = TurboQuantCache.calibrate(model, ids[:200].view(2, 100))  # no longer than it reads
    for found, center in zip(load_centers(path, model), expected, strict=True):
        torch.testing.assert_close(found, center, rtol=1e-5, atol=1e-6)
    assert find_file(folder, None) == path
    center, scale = LayerConstants.of(path, model.config, 1, 2).for_layer(1, 1, 32)
    torch.testing.assert_close(center, expected[1][0, 1:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scale, expected[1][1, 1:], rtol=1e-5, atol=1e-6)


def test_options(folder, text, ids, tmp_path, capsys):
    path = tmp_path / "mean.safetensors"
    assert calibrate(folder, text, "-o", path, "--tokens", 90, "--mean", "--device", "cpu") == 0
    assert ": centers from 90 tokens in" in capsys.readouterr().out
    assert not (folder / centers.FILE_NAME).exists()
    model = tiny_llama(max_position_embeddings=100)
    expected = TurboQuantCache.calibrate(model, ids[:90], scaled=False)
    for found, center in zip(load_centers(path, model), expected, strict=True):
        torch.testing.assert_close(found, center, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
@torch.no_grad()
def test_models_that_also_see(family, text, ids, tmp_path, capsys):
    """Their class is the one that config.json names."""
    models = pytest.importorskip("tests.transformers.multimodal", exc_type=ImportError)
    make_multimodal = models.make_multimodal
    folder = tmp_path / family
    save_words_tokenizer(folder)
    make_multimodal(family).save_pretrained(folder)
    assert calibrate(folder, text) == 0
    assert ": centers and channel scales from 250 tokens in" in capsys.readouterr().out
    expected = TurboQuantCache.calibrate(make_multimodal(family), ids)
    found = load_centers(folder / centers.FILE_NAME, make_multimodal(family))
    assert len(found) == len(expected)
    for one, center in zip(found, expected, strict=True):
        torch.testing.assert_close(one, center, rtol=1e-4, atol=1e-5)


def test_vllm_reads_the_text(folder, text, ids, tmp_path, capsys, monkeypatch):
    """With the arguments that are given, in sequences with room for one more token."""
    made = []

    def llm(model, **options):
        config = SimpleNamespace(max_model_len=101)
        tokenizer = AutoTokenizer.from_pretrained(model)
        made.append((model, options))
        return SimpleNamespace(
            llm_engine=SimpleNamespace(model_config=config), get_tokenizer=lambda: tokenizer
        )

    def read(llm, prompts, path, scaled):
        made.append((prompts, path, scaled))

    from transformers import AutoTokenizer

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=llm))
    monkeypatch.setattr(calibrator, "calibrate", read)
    path = tmp_path / "c.safetensors"
    options = '{"tensor_parallel_size": 2}'
    assert calibrate(folder, text, "-o", path, "--dtype", "float16", "--vllm", options) == 0
    (model, options), (prompts, output, scaled) = made
    assert model == str(folder) and output == path and scaled
    assert options["tensor_parallel_size"] == 2 and options["dtype"] == "float16"
    assert prompts == ids[:200].view(2, 100).tolist()
    assert "from 200 tokens in" in capsys.readouterr().out


def test_vllm_that_is_not_there(folder, text, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    line = refused(capsys, folder, text, "--vllm")
    assert line == "calibrate: --vllm needs vLLM: pip install 'torch_turboquant[vllm]'"
    line = refused(capsys, folder, text, "--vllm", '{"enforce_eager": false}')
    assert line.endswith("sets these arguments of vLLM itself: leave enforce_eager=False out")
    line = refused(capsys, folder, text, "--device", "cpu", "--vllm")
    assert "vLLM chooses its devices by itself" in line


@pytest.mark.parametrize(("given", "says"), [("[1]", "is no object"), ("{", "is no JSON")])
def test_arguments_of_vllm_that_are_none(folder, text, capsys, given, says):
    with pytest.raises(SystemExit):
        calibrate(folder, text, "--vllm", given)
    assert says in capsys.readouterr().err


def refused(capsys, *argv):
    assert calibrate(*argv) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_is_refused(folder, text, tmp_path, capsys, monkeypatch):
    nowhere, short, picture = (tmp_path / name for name in ("nowhere", "short.txt", "picture.png"))
    line = refused(capsys, nowhere, text)
    assert line.startswith(f"calibrate: {nowhere} is no folder of a transformers model")
    line = refused(capsys, folder, nowhere)
    assert line == f"calibrate: there is no text {nowhere}: give a file of plain text"
    short.write_text("w1 " * 67)
    assert f"{short} gives 67 tokens; centers need 68, and" in refused(capsys, folder, short)
    assert "gives 20 tokens; " in refused(capsys, folder, text, "--tokens", 20)
    picture.write_bytes(b"\x89PNG")
    assert f"{picture} is no text in UTF-8: " in refused(capsys, folder, picture)
    assert not (folder / centers.FILE_NAME).exists()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert f"{folder} cannot be written: name a file with -o" in refused(capsys, folder, text)


def test_latent_attention_has_no_centers(folder, text, capsys, monkeypatch):
    """Refused before the weights are loaded."""
    (folder / "config.json").write_text('{"model_type": "deepseek_v3", "kv_lora_rank": 512}')
    (folder / "model.safetensors").unlink()
    line = refused(capsys, folder, text)
    assert line.startswith(f"calibrate: {folder} has latent attention (MLA), and centers are of")


def test_tokenizers_that_are_none(folder, text, capsys):
    (folder / "tokenizer.json").write_text("{}")
    line = refused(capsys, folder, text)
    assert line.startswith(f"calibrate: the tokenizer in {folder} cannot be read: ")
    for path in folder.glob("*token*"):
        path.unlink()
    line = refused(capsys, folder, text)
    assert line.startswith(f"calibrate: {folder} has no tokenizer, which the text is read with")


def test_a_folder_that_does_not_exist(folder, text, tmp_path, capsys):
    with pytest.raises(SystemExit):
        calibrate(folder, text, "-o", tmp_path / "nowhere" / "c.safetensors")
    assert "cannot be written: there is no" in capsys.readouterr().err
