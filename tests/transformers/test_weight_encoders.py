"""Encoders and classifiers with packed weights: no language models, and loaded by other classes."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    RobertaConfig,
    RobertaModel,
)

from tests.helpers import WORDS, save_words_tokenizer
from torch_turboquant import PackedLinear
from torch_turboquant import __main__ as command_line
from torch_turboquant.integrations.transformers import TurboQuantConfig, quantize

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
}
IDS = torch.arange(3, 43).view(2, 20)
TEXT = torch.randint(2, 64, (600,), generator=torch.Generator().manual_seed(1))
LAYERS = 2 * 6 + 1  # those of two layers, and the pooler's


def make(kind=BertModel, config=BertConfig, **changes):
    torch.manual_seed(0)
    return kind(config(**SHAPE, **changes)).eval()


@pytest.fixture
def folder(tmp_path):
    make().save_pretrained(tmp_path / "model")
    save_words_tokenizer(tmp_path / "model")
    return tmp_path / "model"


@torch.no_grad()
def hidden(model):
    return model(IDS).last_hidden_state


def packed_names(model):
    return [name for name, module in model.named_modules() if isinstance(module, PackedLinear)]


def relative_error(found, exact):
    return ((found - exact).square().sum() / exact.square().sum()).item()


def test_an_encoder_is_packed_saved_and_loaded(folder, tmp_path):
    exact = hidden(make())
    model = AutoModel.from_pretrained(folder, quantization_config=TurboQuantConfig(bits=4))
    assert type(model) is BertModel and len(packed_names(model)) == LAYERS
    assert set(model.config.quantization_config.left_alone.values()) == {"it is an embedding"}
    assert 0 < relative_error(hidden(model), exact) < 1e-3
    model.save_pretrained(tmp_path / "packed")
    again = AutoModel.from_pretrained(tmp_path / "packed")
    assert torch.equal(hidden(again), hidden(model))


@pytest.mark.parametrize(
    ("kind", "config"), [(BertModel, BertConfig), (RobertaModel, RobertaConfig)]
)
def test_an_encoder_learns_from_a_text(kind, config):
    """Two positions of RoBERTa's hold no token."""
    exact = hidden(make(kind, config))
    plain, calibrated = (make(kind, config) for _ in range(2))
    assert len(quantize(plain)) == len(quantize(calibrated, text=TEXT)) == LAYERS
    assert relative_error(hidden(calibrated), exact) < 0.8 * relative_error(hidden(plain), exact)
    record = calibrated.config.quantization_config.calibration
    length = 66 if kind is BertModel else 64
    assert record["tokens"] == record["sequences"] * length == 600 // length * length


def test_an_untied_head_is_packed(tmp_path):
    """Its class names the weight, as one that may be tied; nothing reads it."""
    made = make(transformers.BertForMaskedLM, tie_word_embeddings=False)
    made.cls.predictions.bias.data.copy_(torch.randn(64))
    made.save_pretrained(tmp_path / "model")
    kind, options = type(made), {"quantization_config": TurboQuantConfig()}
    packed = kind.from_pretrained(tmp_path / "model", **options).eval()
    assert "cls.predictions.decoder" in packed_names(packed)
    packed.save_pretrained(tmp_path / "packed")
    quantize(made)
    with torch.no_grad():
        for model in (packed, kind.from_pretrained(tmp_path / "packed")):
            assert torch.equal(model(IDS).logits, made(IDS).logits)


def test_an_encoder_makes_no_predictions_to_compare():
    model = make()
    with pytest.raises(ValueError, match="budget compares predictions, and a BertModel has none"):
        quantize(model, text=TEXT, budget=5.0)
    assert not packed_names(model)


def test_the_language_model_of_an_encoders_family_is_refused(folder):
    """Its head is not in the files."""
    with pytest.raises(
        ValueError,
        match=r"cls\.predictions\.transform\.dense\. The files are of a BertModel and were read as "
        "a BertLMHeadModel",
    ):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=TurboQuantConfig())


@pytest.mark.parametrize("with_text", [False, True])
def test_the_command_keeps_the_class(folder, tmp_path, capsys, with_text):
    options = []
    if with_text:
        text = tmp_path / "text.txt"
        text.write_text(" ".join(WORDS[i] for i in TEXT))
        options = ["--calibrate", str(text)]
    out = tmp_path / "out"
    assert command_line.main(["quantize", str(folder), str(out), *options]) == 0
    assert f"{LAYERS} layers with" in (said := capsys.readouterr().out)
    assert "Load it with BertModel.from_pretrained, after import" in said
    model = AutoModel.from_pretrained(out)
    assert type(model) is BertModel and len(packed_names(model)) == LAYERS
    assert 0 < relative_error(hidden(model), hidden(make())) < 1e-3


VISION = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
          "num_attention_heads": 2, "image_size": 16, "patch_size": 8}  # fmt: skip
GEMMA = {**SHAPE, "num_key_value_heads": 2, "head_dim": 32}


def git_with_pictures():
    return transformers.GitForCausalLM(transformers.GitConfig(**SHAPE, vision_config=VISION))


def idefics_with_pictures():
    vision = {"embed_dim": 64, **VISION}
    config = transformers.IdeficsConfig(
        **SHAPE, num_layers=1, vision_config=vision, use_resampler=False, additional_vocab_size=0
    )
    return transformers.IdeficsForVisionText2Text(config)


def gemma_with_pictures():
    """Both halves of the model are for text; the encoder has a tower beside its half."""
    vision = {"model_type": "siglip_vision_model", **VISION}
    config = transformers.T5Gemma2Config(
        encoder={"text_config": GEMMA, "vision_config": vision, "image_token_index": 63},
        decoder=GEMMA, image_token_index=63, eoi_token_index=62,
    )  # fmt: skip
    return transformers.T5Gemma2ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("made", "tower", "packed"),
    [
        (git_with_pictures, "git.image_encoder.", "git.encoder.layer.0.attention.self.query"),
        (idefics_with_pictures, "model.vision_model.", "model.layers.0.self_attn.q_proj"),
        (
            gemma_with_pictures,
            "model.encoder.vision_tower.",
            "model.encoder.text_model.layers.0.self_attn.q_proj",
        ),
    ],
)
def test_towers_that_the_configuration_does_not_tell_apart(made, tower, packed):
    """No configuration of these models is the language model's alone."""
    if made is gemma_with_pictures and not hasattr(transformers, "T5Gemma2Config"):
        pytest.skip("transformers has no such model yet")
    model = made()
    quantize(model)
    names = packed_names(model)
    assert packed in names and not [name for name in names if name.startswith(tower)]
    left = model.config.quantization_config.left_alone
    linear = {n for n, m in model.named_modules() if n.startswith(tower) and type(m) is nn.Linear}
    assert linear and {left[name] for name in linear} == {"it belongs to no language model"}


def test_a_classifier_keeps_its_head(tmp_path):
    made = make(BertForSequenceClassification, num_labels=3)
    made.save_pretrained(tmp_path / "model")
    command = ["quantize", str(tmp_path / "model"), str(tmp_path / "out")]
    assert command_line.main(command) == 0
    model = BertForSequenceClassification.from_pretrained(tmp_path / "out")
    assert torch.equal(model.classifier.weight, made.classifier.weight)
    assert len(packed_names(model)) == LAYERS
    reason = model.config.quantization_config.left_alone["classifier"]
    assert reason == "its 3 rows are fewer than the 16 of a tile"
