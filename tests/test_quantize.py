"""`torch_turboquant quantize`: a tiny model in a folder, and the folder that comes out."""

import json
import resource

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers import WORDS, save_words_tokenizer, tiny_llama
from torch_turboquant import PackedLinear
from torch_turboquant import __main__ as command_line
from torch_turboquant.integrations.transformers import TurboQuantConfig, quantize
from torch_turboquant.memory.weights import weight_memory


@pytest.fixture
def folder(tmp_path):
    """A model with a tokenizer that knows 64 words, in two files, and a licence."""
    path = tmp_path / "model"
    save_words_tokenizer(path)
    tiny_llama(vocab_size=128).save_pretrained(path, max_shard_size="150KB")
    (path / "LICENSE").write_text("free")
    (path / "pytorch_model.bin").write_text("of no use")
    assert (path / "model.safetensors.index.json").exists()
    return path


@pytest.fixture
def text(tmp_path):
    ids = torch.randint(0, 64, (400,), generator=torch.Generator().manual_seed(1))
    path = tmp_path / "text.txt"
    path.write_text(" ".join(WORDS[i] for i in ids))
    return path


def run(*argv):
    return command_line.main(["quantize", *map(str, argv)])


def load(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, local_files_only=True, **options)


def logits(model):
    with torch.no_grad():
        return model(torch.arange(30)[None]).logits


def test_folders_in_the_folder(folder, tmp_path, capsys):
    """A tokenizer has its further chat templates in one; those with weights are other forms."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": "{{messages}}", "rag": "{{documents}}"}
    tokenizer.save_pretrained(folder)
    for name in ("onnx", ".cache"):
        (folder / name / "inner").mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
    (folder / "onnx" / "inner" / "model.onnx").write_text("of no use")
    assert run(folder, tmp_path / "out") == 0
    packed = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert packed.chat_template == tokenizer.chat_template
    folders = [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()]
    assert folders == ["additional_chat_templates"]


def test_a_folder_becomes_another(folder, tmp_path, capsys):
    out, report = tmp_path / "out", tmp_path / "report.json"
    assert run(folder, out, "--layer", "lm_head=8", "--report", report) == 0
    config = TurboQuantConfig(layers={"lm_head": {"bits": 8}})
    expected = load(folder, quantization_config=config)
    assert torch.equal(logits(load(out)), logits(expected))
    assert {p.name for p in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "LICENSE",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert AutoTokenizer.from_pretrained(out)("w3 w5").input_ids == [3, 5]
    facts = json.loads(report.read_text())
    layers = [n for n, m in expected.named_modules() if isinstance(m, PackedLinear)]
    assert sorted(row["name"] for row in facts["layers"]) == sorted(layers)
    (head,) = [row for row in facts["layers"] if row["name"] == "lm_head"]
    assert head["form"]["bits"] == 8 and head["weights"] == 128 * 64 and head["error"] < 1e-3
    assert facts["left_alone"] == {"model.embed_tokens": "it is an embedding"}
    assert facts["packed_bytes"] == sum(row["bytes"] for row in facts["layers"])
    said = capsys.readouterr().out
    assert f"{out}: 0." in said and f"{len(layers)} layers with" in said
    assert "left alone: model.embed_tokens: it is an embedding" in said


def test_with_a_text(folder, text, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(folder, out, "--calibrate", text, "--tokens", "300", "--bits", "8") == 0
    model = load(folder)
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text.read_text()).input_ids)
    quantize(model, TurboQuantConfig(8), text=ids, tokens=300)
    again = load(out)
    assert torch.equal(logits(again), logits(model))
    assert again.config.quantization_config.calibration["tokens"] == 300
    assert "relative squared error of outputs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--bits", "5"], "bits is 5"),
        (["--skip", "*.nothing"], "names no linear layer"),
        (["--tokens", "300"], "--tokens belongs to --calibrate"),
        (["--calibrate", "nowhere.txt"], "there is no text nowhere.txt"),
    ],
)
def test_refusals_leave_nothing(options, says, folder, tmp_path, capsys):
    before = sorted(tmp_path.iterdir())
    assert run(folder, tmp_path / "out", *options) == 1
    said = capsys.readouterr().err
    assert said.startswith("quantize: ") and says in said
    assert sorted(tmp_path.iterdir()) == before


def test_folders_that_cannot_be_used(folder, tmp_path, capsys):
    def says(*argv):
        assert run(*argv) == 1
        return capsys.readouterr().err

    out = tmp_path / "out"
    assert "is no folder of a transformers model" in says(tmp_path / "nowhere", out)
    assert "cannot be written: there is no" in says(folder, tmp_path / "a" / "b")
    (tmp_path / "link").symlink_to("nothing")
    assert "is there already: name a new folder" in says(folder, tmp_path / "link")
    assert run(folder, out) == 0
    assert "is there already: name a new folder" in says(folder, out)
    assert "quantised already (torch_turboquant)" in says(out, tmp_path / "twice")
    path = folder / "config.json"
    config = json.loads(path.read_text())  # of a model that also sees
    config = {"model_type": "llava", "text_config": {**config, "quantization_config": "int4"}}
    path.write_text(json.dumps(config))
    assert "quantised already (int4)" in says(folder, tmp_path / "inner")
    assert not (tmp_path / "twice").exists()


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_files_without_a_weight(name, calibrated, text, tmp_path, capsys):
    """transformers would draw it at random, with a warning."""
    folder, out = tmp_path / "model", tmp_path / "out"
    save_words_tokenizer(folder)
    tiny_llama(vocab_size=128).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert run(folder, out, *(["--calibrate", text] if calibrated else [])) == 1
    assert name.removesuffix(".weight") in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_damaged_file_of_weights(calibrated, folder, text, tmp_path, capsys):
    for path in folder.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    options = ["--calibrate", text] if calibrated else []
    assert run(folder, tmp_path / "out", *options) == 1
    assert f"quantize: the weights in {folder} are damaged: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_weight_that_is_not_finite(folder, tmp_path, capsys):
    model = tiny_llama(vocab_size=128)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    model.save_pretrained(folder, max_shard_size="150KB")
    before = sorted(tmp_path.iterdir())
    assert run(folder, tmp_path / "out") == 1
    assert "model.layers.1.mlp.up_proj: the weight holds a NaN" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_a_text_that_is_too_short(folder, text, tmp_path, capsys):
    text.write_text("w1 w2 w3")
    assert run(folder, tmp_path / "out", "--calibrate", text) == 1
    assert "the text gives 3 tokens; calibration needs 256" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


KINDS = {
    "T5ForConditionalGeneration": {"d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1},
    "LlamaForSequenceClassification": {"hidden_size": 64, "intermediate_size": 64, "num_labels": 3},
}


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_other_kinds(kind, tmp_path, capsys):
    """What the folder says it holds is what is written: other heads, encoders with a decoder."""
    owner = getattr(transformers, kind)
    shape = {"vocab_size": 96, "num_heads": 2, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    owner(owner.config_class(**shape, **KINDS[kind])).save_pretrained(tmp_path / "model")
    assert run(tmp_path / "model", tmp_path / "out") == 0
    assert f"Load it with {kind}.from_pretrained" in capsys.readouterr().out
    packed = owner.from_pretrained(tmp_path / "out")
    assert any(isinstance(m, PackedLinear) for m in packed.modules())
    planned = weight_memory(str(tmp_path / "model"), 4, "float32")
    assert planned.packed == sum(p.numel() * p.element_size() for p in packed.parameters())


def test_a_kind_of_models_with_the_class_of_another(tmp_path, capsys):
    """Llama's class would read EXAONE's configuration as one of Llama, and so write it."""
    if "exaone" not in transformers.CONFIG_MAPPING:
        pytest.skip("this version of transformers has no exaone")
    shape = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": None}
    config = transformers.AutoConfig.for_model("exaone", **shape)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert run(tmp_path / "model", tmp_path / "out") == 0
    assert "Load it with AutoModelForCausalLM.from_pretrained" in capsys.readouterr().out
    packed = load(tmp_path / "out")
    assert packed.config.model_type == "exaone"
    expected = load(tmp_path / "model", quantization_config=TurboQuantConfig())
    assert torch.equal(logits(packed), logits(expected))
    assert weight_memory(str(tmp_path / "model"), 4, "float32").layers == 8


def test_options(folder, capsys):
    with pytest.raises(SystemExit):
        run(folder, "out", "--layer", "lm_head")
    assert "'lm_head' is no NAME=BITS" in capsys.readouterr().err


@pytest.mark.parametrize("room", [100, 50_000])
def test_a_disk_that_is_full(room, folder, tmp_path, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        assert run(folder, tmp_path / "out") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_no_room_for_the_report(folder, tmp_path, capsys, monkeypatch):
    report = tmp_path / "report.json"
    report.write_text("old")

    def full(self, text):
        self.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    assert run(folder, tmp_path / "out", "--report", report) == 1
    assert "no space left" in capsys.readouterr().err
    assert report.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "report.json"]
