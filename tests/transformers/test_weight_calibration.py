"""Calibration of packed weights on a text: moments, passes, budgets, and models that read none."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from torch import nn

from tests.transformers.weights import (
    SHAPE,
    TEXT,
    load,
    logits,
    make,
    packed_by_hand,
    packed_layers,
    random_model,
)
from torch_turboquant import PackedLinear, WeightFormat
from torch_turboquant.integrations.transformers import TurboQuantConfig, quantize
from torch_turboquant.integrations.transformers.weights import budget, noted_layers, pack
from torch_turboquant.integrations.transformers.weights.moments import passes, second_moments


def test_moments_are_those_of_the_inputs():
    model = make(dtype=torch.float32)
    names = ["model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj",
             "model.layers.0.mlp.down_proj", "lm_head"]  # fmt: skip
    inputs = {name: [] for name in names}
    hooks = [
        model.get_submodule(n).register_forward_hook(
            lambda m, x, y, n=n: inputs[n].append(x[0].flatten(0, -2).double())
        )
        for n in names
    ]
    sequences = [TEXT[:50], TEXT[50:150], TEXT[150:151]]
    found = second_moments(model, names, sequences)
    for hook in hooks:
        hook.remove()
    assert list(found) == names
    assert found[names[0]] is found[names[1]]  # queries and values have one input
    for name in names:
        x = torch.cat(inputs[name])
        torch.testing.assert_close(found[name].double(), x.T @ x / 151, rtol=1e-5, atol=1e-5)
    assert not any(m._forward_pre_hooks for m in model.modules())


class Twice(nn.Module):
    """Calls one layer with the input of another, and then with an input of its own."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(64, 64) for _ in range(3))
        self.table = nn.Embedding(96, 64)
        self.device = torch.device("cpu")

    def forward(self, input_ids):
        x = self.table(input_ids)
        y = self.one(x)
        return self.two(x) + self.three(x) + self.two(y) + self.three(y)


def test_moments_of_layers_that_are_called_twice():
    torch.manual_seed(0)
    model = Twice()
    found = second_moments(model, ["one", "two", "three"], [TEXT[:100], TEXT[100:200]])
    x = model.table(TEXT[:200])
    y = model.one(x)
    torch.testing.assert_close(found["one"], x.T @ x / 200)
    both = (x.T @ x + y.T @ y) / 400
    torch.testing.assert_close(found["two"], both)
    torch.testing.assert_close(found["three"], both)
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_text_is_read_in_passes():
    model = make()
    names = [n for n, m in model.named_modules() if type(m) is nn.Linear]
    small, large = 4 * 128**2, 4 * 192**2
    groups = list(passes(model, names, 2 * small))
    assert [n for group in groups for n in group] == names
    assert [n for n in names if n.endswith("down_proj")] == [
        group[0] for group in groups if len(group) == 1 and group[0].endswith("down_proj")
    ]  # larger than all that is allowed
    assert large > 2 * small > small and len(groups) > 4
    assert list(passes(model, names, 2**40)) == [names]


def test_calibrated(folder):
    """The text lowers the error of outputs; how often it is read does not change a byte."""
    plain, model, slow = make("qwen2"), make("qwen2"), make("qwen2")
    norm = torch.linspace(-2, 2, 128).exp()  # channels of very different sizes
    for m in (plain, model, slow):
        for layer in m.model.layers:
            layer.input_layernorm.weight.copy_(norm)
            layer.post_attention_layernorm.weight.copy_(norm)
    original = copy.deepcopy(plain)
    quantize(plain)
    rows = quantize(model, text=TEXT)
    quantize(slow, text=TEXT, memory=1)
    assert [row.name for row in rows] == list(packed_layers(model))
    assert all(0 < row.error < 0.05 for row in rows)
    for name, layer in packed_layers(model).items():
        assert torch.equal(layer.weight, slow.get_submodule(name).weight), name
        assert layer.channel_inverse.dtype == torch.float32
    exact = logits(original).float()
    error, uncalibrated = (
        (logits(m).float() - exact).square().mean().item() for m in (model, plain)
    )
    assert error < 0.8 * uncalibrated
    done = model.config.quantization_config
    assert done.scaled and done.calibration["tokens"] == 512 and done.calibration["sequences"] == 1
    again = load(folder(model, "packed"))
    assert torch.equal(logits(again), logits(model))
    assert again.config.quantization_config.calibration == done.calibration


def test_a_calibrated_model_that_was_loaded_can_be_plain(folder):
    model = make("qwen2")
    quantize(model, text=TEXT)
    loaded = load(folder(model))
    name = "model.layers.0.self_attn.q_proj"
    assert not any(p.requires_grad for p in loaded.get_submodule(name).parameters())
    with torch.enable_grad():  # as users call it
        loaded.get_submodule(name).decode()
        plain = loaded.dequantize()
    expected = model.get_submodule(name).decode(torch.bfloat16)
    assert torch.equal(plain.get_submodule(name).weight, expected)
    assert plain.get_submodule(name).weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(dtype):
    model, like = make(dtype=torch.float32), make(dtype=torch.float32)
    quantize(like, text=TEXT, budget=5.0)
    torch.set_default_dtype(dtype)
    try:
        quantize(model, text=TEXT, budget=5.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_parameters(model, like)


def test_weights_are_packed_without_autocast():
    """The model reads the text as it is told to; weights are rounded as ever."""
    model, like = make(dtype=torch.float32), make(dtype=torch.float32)
    quantize(like)
    with torch.autocast("cpu", torch.bfloat16):
        rows = quantize(model, text=TEXT)
    assert all(0 < row.error < 0.05 for row in rows)
    model = make(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        quantize(model)
    assert_same_parameters(model, like)


def test_packed_in_inference_mode():
    model = make(dtype=torch.float32)
    with torch.inference_mode():
        quantize(model, text=TEXT)
    assert not any(p.is_inference() for p in model.parameters())
    model.load_state_dict(model.state_dict())
    with torch.inference_mode():
        model.dequantize()
    assert not any(p.is_inference() for p in model.parameters())
    model.requires_grad_(True)


def assert_same_parameters(model, like):
    ours, theirs = model.state_dict(), like.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_layer_costs_what_it_costs_alone(folder):
    model = make(dtype=torch.float32)
    name = "model.layers.1.mlp.up_proj"
    layer = PackedLinear.from_linear(model.get_submodule(name), WeightFormat())
    (cost,) = budget.sensitivities(model, {name: layer}, TEXT[:100]).values()
    alone = packed_by_hand(model, [name])
    exact, found = (logits(m, TEXT[None, :100])[0].log_softmax(-1) for m in (model, alone))
    expected = nn.functional.kl_div(found, exact, log_target=True, reduction="batchmean")
    assert cost == pytest.approx(expected.item(), rel=1e-3) and cost > 0
    assert type(model.get_submodule(name)) is nn.Linear


def test_what_layers_cost_a_model_that_masks_tokens():
    model = random_model("PhiConfig", torch.float32, **SHAPE)  # its head has a bias
    model.lm_head.bias[90:] = -torch.inf  # places of a vocabulary that no token has
    rows = quantize(model, text=TEXT, budget=6.0)
    assert {row.form.bits for row in rows} == {4, 8}


def test_layers_that_break_predictions_cost_no_number(monkeypatch):
    model, whole = make(), budget._predictions

    def broken(model, ids):
        packed = isinstance(model.model.layers[0].mlp.up_proj, PackedLinear)
        return whole(model, ids) * (torch.nan if packed else 1)

    monkeypatch.setattr(budget, "_predictions", broken)
    says = r"bits and costs must be finite numbers, those of model\.layers\.0\.mlp\.up_proj are not"
    with pytest.raises(ValueError, match=says):
        quantize(model, text=TEXT, budget=6.0)
    assert not packed_layers(model)


@pytest.mark.parametrize("dear", ["model.layers.1.mlp.up_proj", "model.layers.0.mlp.up_proj"])
def test_bits_go_to_the_layer_whose_errors_cost_most(dear, monkeypatch):
    model = make()

    def costs(model, layers, ids):
        return {name: 1.0 if name == dear else 0.1 for name in layers}

    monkeypatch.setattr(budget, "sensitivities", costs)
    weights = sum(m.weight.numel() for m in model.modules() if type(m) is nn.Linear)
    one = 4.0 * 128 * 192 / weights  # what 8 bits for one such layer take
    rows = quantize(model, text=TEXT, budget=4.25 + 0.07 + one)
    assert dear in [row.name for row in rows if row.form.bits == 8]
    assert sum(row.form.bits == 8 for row in rows if row.name.endswith("up_proj")) == 1


def test_a_budget_keeps_the_group():
    rows = quantize(make(), TurboQuantConfig(group=64), text=TEXT, budget=6.5)
    assert {(row.form.bits, row.form.group) for row in rows} == {(4, 64), (8, 64)}


def test_under_a_budget(folder):
    model = make(dtype=torch.float32)
    dense = copy.deepcopy(model)
    config = TurboQuantConfig(layers={"*.q_proj": {"bits": 4}})
    rows = quantize(model, config, text=TEXT, budget=5.0)
    bits = {row.name: row.form.bits for row in rows}
    assert set(bits.values()) == {4, 8} and not any(
        b == 8 for name, b in bits.items() if name.endswith("q_proj")
    )
    weights = sum(row.weights for row in rows)
    assert 4.5 < 8 * sum(row.bytes for row in rows) / weights <= 5.0
    assert model.config.quantization_config.calibration["budget"] == 5.0
    again = load(folder(model, "packed"))
    assert torch.equal(logits(again), logits(model))

    def cost(budgeted):
        exact, found = (logits(m, TEXT[None, :400]).log_softmax(-1) for m in (dense, budgeted))
        return (exact.exp() * (exact - found)).sum(-1).mean().item()

    plain = copy.deepcopy(dense)
    quantize(plain, text=TEXT)
    assert cost(model) < 0.8 * cost(plain)
    with pytest.raises(ValueError, match=r"budget is 3\.0 bits per weight, the coarsest .* 4\."):
        quantize(dense, text=TEXT, budget=3.0)
    with pytest.raises(ValueError, match="budget needs a text"):
        quantize(dense, budget=5.0)
    for wrong in (torch.nan, torch.inf, "5"):
        with pytest.raises(ValueError, match=r"expected bits per weight, such as 4.5"):
            quantize(dense, text=TEXT, budget=wrong)
    with pytest.raises(ValueError, match="budget compares predictions, and a LlamaModel has none"):
        quantize(dense.model, text=TEXT, budget=5.0)
    assert not packed_layers(dense)


def test_a_budget_is_refused_before_the_text_is_read(monkeypatch):
    monkeypatch.setattr(pack, "second_moments", lambda *_: pytest.fail("the text was read"))
    with pytest.raises(ValueError, match=r"the coarsest formats take 4.274"):
        quantize(make(), text=TEXT, budget=4.27)
    config = TurboQuantConfig(skip=["*.self_attn.*", "lm_head"])
    with pytest.raises(ValueError, match="linear layers, and none is packed"):
        quantize(make("qwen3_moe"), config, text=TEXT, budget=5.0)


class Words:
    """A tokenizer of numbers."""

    def __call__(self, text):
        return transformers.BatchEncoding({"input_ids": [int(word) for word in text.split()]})


def test_texts():
    text = " ".join(map(str, TEXT.tolist()))
    by_text, by_ids = make(), make()
    quantize(by_text, text=[text[: len(text) // 2], text[len(text) // 2 :]], tokenizer=Words())
    assert by_text.config.quantization_config.calibration["tokens"] == 512
    quantize(by_ids, text=TEXT, tokens=300)
    assert by_ids.config.quantization_config.calibration["tokens"] == 300
    with pytest.raises(ValueError, match="text needs its tokenizer"):
        quantize(make(), text=text)
    with pytest.raises(ValueError, match="the text gives 20 tokens; calibration needs 256"):
        quantize(make(), text=TEXT[:20])
    with pytest.raises(ValueError, match="tokens is -1"):
        quantize(make(), text=TEXT, tokens=-1)
    with pytest.raises(ValueError, match=r"token ids are torch.float32, expected int64"):
        quantize(make(), text=TEXT.float())
    for other in (TEXT + 50, -TEXT):
        with pytest.raises(ValueError, match=r"token ids from .* the model knows 96 tokens"):
            quantize(make(), text=other)


@pytest.mark.parametrize("layer", ["mlp.down_proj", "mlp.up_proj", "self_attn.o_proj"])
def test_layers_of_zeros(layer):
    """As of blocks that somebody has added to a model: they are zeros, or their inputs are."""
    model = make()
    model.get_submodule(f"model.layers.1.{layer}").weight.zero_()
    quantize(model, text=TEXT)
    assert not model.get_submodule(f"model.layers.1.{layer}").decode().any()
    assert logits(model).isfinite().all()


SEQ2SEQ = {
    "d_model": 128,
    "vocab_size": 96,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def test_models_with_an_encoder_read_a_text():
    t5 = transformers.T5Config(**SEQ2SEQ, d_kv=64, d_ff=192, num_layers=1, num_heads=2)
    for model in (transformers.T5ForConditionalGeneration(t5), transformers.T5EncoderModel(t5)):
        names = [row.name for row in quantize(model.eval(), text=TEXT)]
        assert names and set(names) == set(packed_layers(model))
    shape = {k: v for k, v in SHAPE.items() if k not in ("head_dim", "num_key_value_heads")}
    for kind in (transformers.DebertaV2Model, transformers.BertForMaskedLM):
        model = kind(kind.config_class(**shape)).eval()
        assert {row.name for row in quantize(model, text=TEXT)} == set(packed_layers(model))


CANINE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
          "num_attention_heads": 2, "max_position_embeddings": 128}  # fmt: skip
PROPHET = {"hidden_size": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 96,
           "num_encoder_layers": 1, "num_decoder_layers": 1, "num_encoder_attention_heads": 2,
           "num_decoder_attention_heads": 2, "max_position_embeddings": 128}  # fmt: skip
LED = {"d_model": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 96,
       "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
       "decoder_attention_heads": 2, "max_encoder_position_embeddings": 512,
       "max_decoder_position_embeddings": 128, "attention_window": 32}  # fmt: skip
XLNET = {"d_model": 64, "n_layer": 1, "n_head": 2, "d_inner": 64, "vocab_size": 96}
MPT = {"d_model": 64, "n_heads": 2, "n_layers": 1, "vocab_size": 96, "max_seq_len": 128}


@pytest.mark.parametrize(
    ("kind", "config", "options", "length"),
    [
        ("CanineModel", "CanineConfig", CANINE, 128),  # no table of tokens
        # learned positions, of which one is padding's, and one more is needed to predict two tokens
        ("ProphetNetForConditionalGeneration", "ProphetNetConfig", PROPHET, 126),
        ("LEDForConditionalGeneration", "LEDConfig", LED, 128),
        ("XLNetLMHeadModel", "XLNetConfig", XLNET, 700),  # no last position
        ("MptForCausalLM", "MptConfig", MPT, 128),
    ],
)
def test_as_many_tokens_as_a_model_has_positions(kind, config, options, length):
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**options)).eval()
    skip = ["*_global"] if kind.startswith("LED") else []
    rows = quantize(model, TurboQuantConfig(skip=skip), text=TEXT)
    record = model.config.quantization_config.calibration
    assert rows and record["tokens"] == record["sequences"] * length


def test_models_that_read_no_text():
    shape = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "num_mel_bins": 8,
             "decoder_ffn_dim": 64, "max_source_positions": 8, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2}  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**SEQ2SEQ, **shape)
    )
    with pytest.raises(ValueError, match="WhisperForConditionalGeneration reads no text"):
        quantize(model, text=TEXT)


def test_layers_that_the_text_does_not_reach():
    model = make()
    model.extra = nn.Linear(128, 128)
    with pytest.raises(ValueError, match="went through the model without extra"):
        quantize(model, text=TEXT)
    assert not packed_layers(model)


def test_a_model_that_overflows():
    model = make()
    model.model.layers[1].input_layernorm.weight.fill_(torch.inf)
    with pytest.raises(ValueError, match=r"inputs of model\.layers\.1\.self_attn\.q_proj.* finite"):
        quantize(model, text=TEXT)


def test_what_was_done_to_each_layer(folder):
    model = make()
    path = folder(model)
    with noted_layers() as rows:
        packed = load(path, TurboQuantConfig(layers={"lm_head": {"bits": 8}}))
    assert {row.name for row in rows} == set(packed_layers(packed))
    for row in rows:
        weight = model.get_submodule(row.name).weight.float()
        layer = packed.get_submodule(row.name)
        assert row.weights == weight.numel() and row.bytes == layer.weight.numel()
        error = (layer.decode() - weight).square().sum() / weight.square().sum()
        assert row.error == pytest.approx(error.item(), rel=1e-5)
    assert 0 < next(r for r in rows if r.name == "lm_head").error < 1e-3 < rows[-1].error
    load(path, TurboQuantConfig())  # nobody listens
    assert len(rows) == len(packed_layers(packed))
