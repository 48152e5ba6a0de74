"""Models whose linear layers are packed: loaded, saved, and what of them is left alone.

Models are tiny and random. What must come out is what the layer's own class makes of the same
weights, so a test of a model needs no tolerance.
"""

import gc
import logging

import pytest
import torch

transformers = pytest.importorskip("transformers")

import torch.nn.utils.prune
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tests.transformers.weights import (
    FAMILIES,
    IDS,
    MIXTURES,
    files,
    load,
    logits,
    make,
    packed_by_hand,
    packed_layers,
)
from torch_turboquant import PackedLinear, WeightFormat, encode_weight
from torch_turboquant.integrations.transformers import TurboQuantConfig, quantize
from torch_turboquant.integrations.transformers.weights import choice
from torch_turboquant.integrations.transformers.weights.experts import PackedExperts

# ------------------------------------------------------------------------------ loading, saving


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_packed_while_it_loads(family, folder):
    path = folder(make(family))
    skip = ["*.experts"] if family in MIXTURES else []  # test_weight_experts.py
    model, packed = load(path), load(path, TurboQuantConfig(bits=4, skip=skip))
    layers = packed_layers(packed)
    assert layers and packed.config.quantization_config.bits == 4
    assert all(layer.weight.dtype == torch.uint8 for layer in layers.values())
    expected = packed_by_hand(model, layers)
    assert torch.equal(logits(packed), logits(expected))
    assert not torch.equal(logits(packed), logits(model))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", ["1GB", "60KB"])
def test_saved_and_loaded_it_has_the_same_bytes(family, size, folder):
    packed = load(folder(make(family)), TurboQuantConfig(bits=4))
    path = folder(packed, "packed", max_shard_size=size)
    assert (len(files(path)) > 1) == (size == "60KB")
    again = load(path)
    assert torch.equal(logits(again), logits(packed))
    for name, layer in packed_layers(packed).items():
        assert torch.equal(again.get_submodule(name).weight, layer.weight), name
    twice = folder(again, "twice", max_shard_size=size)
    assert (path / "config.json").read_text() == (twice / "config.json").read_text()
    first, second = files(path), files(twice)
    assert first.keys() == second.keys()
    for name, tensors in first.items():
        assert tensors.keys() == second[name].keys()
        assert all(torch.equal(x, second[name][key]) for key, x in tensors.items())
    assert not list(path.glob("*.bin"))


def test_memory_while_loading(folder, monkeypatch):
    """Whenever a weight is packed, there is what is packed so far and this one tensor."""
    model = make(intermediate_size=1024, vocab_size=8192)
    plain = sum(p.numel() * p.element_size() for p in model.parameters())
    path = folder(model)
    del model
    quantizer = "torch_turboquant.integrations.transformers.weights.quantizer.encode_weight"
    peaks = []

    def noted(weight, form):
        alive = {x.untyped_storage().data_ptr(): x for x in live_tensors()}
        held = sum(x.untyped_storage().nbytes() for x in alive.values())
        peaks.append(held - weight.untyped_storage().nbytes())
        return encode_weight(weight, form)

    monkeypatch.setattr(quantizer, noted)
    gc.freeze()  # live_tensors does not look at what there was before
    try:
        model = load(path, TurboQuantConfig(bits=4))
    finally:
        gc.unfreeze()
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    slack = 64 * 1024  # buffers of positions, signs, levels
    assert len(peaks) == len(packed_layers(model)) == 15
    assert total / 2 < max(peaks) <= total + slack
    assert plain > 1.3 * total + slack  # so that a second copy would show


def live_tensors():
    gc.collect()
    return [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter) and on_cpu(x)]


def on_cpu(x):
    return x.device.type == "cpu"


def test_layers_and_formats_by_pattern(folder):
    model = make()
    config = TurboQuantConfig(
        layers={"lm_head": {"bits": 8}, "*.down_proj": {"sub": 0}}, skip=["*.layers.0.*.o_proj"]
    )
    packed = load(folder(model), config)
    layers = packed_layers(packed)
    assert layers["lm_head"].format.bits == 8
    assert layers["model.layers.1.mlp.down_proj"].format.sub == 0
    assert layers["model.layers.1.mlp.up_proj"].format.sub == 32
    assert type(packed.model.layers[0].self_attn.o_proj) is nn.Linear
    done = packed.config.quantization_config
    assert done.left_alone["model.layers.0.self_attn.o_proj"] == "skip names it"
    assert config.left_alone == {} and config.layers == {
        "lm_head": {"bits": 8},
        "*.down_proj": {"sub": 0},
    }  # what the user gave can be given again
    again = load(folder(packed, "packed"))
    assert {n: m.format for n, m in packed_layers(again).items()} == {
        n: m.format for n, m in layers.items()
    }
    assert torch.equal(logits(again), logits(packed))


def test_a_base_model_of_a_saved_one(folder):
    """transformers lets a model be loaded without its head, by names without their prefix."""
    packed = load(folder(make()), TurboQuantConfig(layers={"*.v_proj": {"bits": 8}}))
    base = AutoModel.from_pretrained(folder(packed, "packed"))
    assert packed_layers(base)["layers.0.self_attn.v_proj"].format.bits == 8
    assert torch.equal(base(IDS).last_hidden_state, packed.model(IDS).last_hidden_state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype, folder):
    path = folder(make("qwen2", dtype=torch.float32))
    model, packed = (load(path, config, dtype=dtype) for config in (None, TurboQuantConfig()))
    assert packed.dtype == dtype and logits(packed).dtype == dtype
    by_hand = packed_by_hand(model, packed_layers(packed))
    assert torch.equal(logits(packed), logits(by_hand))


def test_it_can_be_a_plain_model_again(folder):
    model = make("qwen2")
    packed = load(folder(model), TurboQuantConfig())
    names = list(packed_layers(packed))
    plain = packed.dequantize()
    assert not packed_layers(plain) and not hasattr(plain.config, "quantization_config")
    for name in names:
        by_hand = PackedLinear.from_linear(model.get_submodule(name), WeightFormat())
        assert torch.equal(plain.get_submodule(name).weight, by_hand.decode(torch.bfloat16))
        if by_hand.bias is not None:
            assert torch.equal(plain.get_submodule(name).bias, by_hand.bias)
    assert all(p.requires_grad for p in plain.parameters())


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_plain_model_has_one_dtype(dtype, folder):
    packed = load(folder(make("qwen2")), TurboQuantConfig()).to(torch.float32)
    plain = packed.dequantize() if dtype is None else packed.dequantize(dtype=dtype)
    assert {p.dtype for p in plain.parameters()} == {dtype or torch.bfloat16}
    assert logits(plain).dtype == plain.dtype


# ------------------------------------------------------------------------------ what is left


def test_everything_that_is_not_packed_is_listed(folder, caplog):
    path = folder(make("jamba"))
    with caplog.at_level(logging.INFO, "torch_turboquant"):
        packed = load(path, TurboQuantConfig())
    left = packed.config.quantization_config.left_alone
    owners = {
        name
        for name, module in packed.named_modules()
        if any(p.dim() > 1 for p in module.parameters(recurse=False))
    }
    experts = {n for n, m in packed.named_modules() if isinstance(m, PackedExperts)}
    assert owners == set(left) | set(packed_layers(packed)) | experts
    assert left["model.embed_tokens"] == "it is an embedding"
    assert "Conv1d" in left["model.layers.0.mamba.conv1d"]
    assert left["model.layers.1.feed_forward.router"] == "it routes tokens to experts"
    own = [
        r for r in caplog.records if r.name.startswith("torch_turboquant")
    ]  # transformers warns, too
    said = "\n".join(r.getMessage() for r in own)
    assert all(name.split(".")[-1] in said for name in left)
    warned = [r.getMessage() for r in own if r.levelno == logging.WARNING]
    assert len(warned) == 1 and "conv1d" in warned[0]
    assert "embed_tokens" not in warned[0] and "router" not in warned[0]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("labels", [3, 20])
@pytest.mark.parametrize(
    "auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification]
)
def test_another_head_of_a_model(auto, labels, packed, folder):
    """It is a new one, and stays as transformers makes it."""
    path, options = folder(make()), {"quantization_config": TurboQuantConfig()}
    if packed:
        path, options = folder(load(path, TurboQuantConfig()), "packed"), {}
    model = auto.from_pretrained(path, num_labels=labels, **options)
    assert type(model.score) is nn.Linear and len(packed_layers(model)) == 14
    weight, config = model.score.weight, model.config
    assert weight.dtype == model.dtype and weight.shape == (labels, config.hidden_size)
    assert 0.5 < weight.std() / config.initializer_range < 2
    again = auto.from_pretrained(folder(model, "again"))
    assert torch.equal(logits(again), logits(model))


def test_a_weight_that_a_class_far_above_reads(folder):
    config = transformers.RwkvConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2)
    packed = load(folder(transformers.RwkvForCausalLM(config)), TurboQuantConfig())
    left = packed.config.quantization_config.left_alone
    assert left["rwkv.blocks.0.attention.output"].startswith("RwkvModel reads its weight")
    assert logits(packed).isfinite().all()


def test_blocks_that_are_tied_to_each_other_are_a_surprise():
    """Nobody expects them to stay as they are; a head that is tied to the embedding is no news."""
    config = transformers.ZambaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid"] * 2, n_mamba_heads=2, mamba_d_state=8,
        num_attention_heads=2, num_key_value_heads=2, attention_head_dim=64,
        attention_hidden_size=128, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.ZambaForCausalLM(config)
    _, left = choice.choose(model, WeightFormat(), {}, ())
    surprises = choice.unexpected(left)
    name = "model.layers.{}.shared_transf.self_attn.q_proj"
    assert surprises[name.format(1)] == f"its weight is tied to {name.format(3)}.weight"
    assert left["lm_head"].startswith("its weight is tied to") and "lm_head" not in surprises


def test_a_tied_head_stays(folder):
    packed = load(folder(make("gemma")), TurboQuantConfig())
    left = packed.config.quantization_config.left_alone
    assert left["lm_head"] == "its weight is tied to model.embed_tokens.weight"
    assert packed.lm_head.weight is packed.model.embed_tokens.weight
    assert "lm_head" in packed_layers(load(folder(make(), "untied"), TurboQuantConfig()))


class Reader(nn.Module):
    """Uses the weight of one layer, calls the other."""

    def __init__(self):
        super().__init__()
        self.read, self.called = nn.Linear(64, 64), nn.Linear(64, 64)
        self.narrow, self.odd = nn.Linear(64, 8), nn.Linear(72, 64)
        self.block = nn.Module()
        self.block.gate = nn.Linear(64, 64)
        self.block.experts = nn.ModuleList([nn.Linear(64, 64)])

    def forward(self, x):
        return self.called(x @ self.read.weight)


def test_reasons():
    packed, left = choice.choose(Reader(), WeightFormat(), {}, [])
    assert set(packed) == {"called", "block.experts.0"}
    assert left["read"] == "Reader reads its weight instead of calling it"
    assert left["odd"] == "its 72 input channels are no multiple of 64"
    assert "its 8 rows are fewer than" in left["narrow"]
    assert left["block.gate"] == "it routes tokens to experts"


def test_weights_that_are_computed_in_every_forward():
    """A hook of the layer does that, from parameters that a packed layer has not."""
    model = make()
    layers = model.model.layers
    nn.utils.prune.l1_unstructured(layers[0].mlp.up_proj, "weight", amount=0.5)
    before = logits(model)
    quantize(model)
    why = "its weight is no parameter: pruning or weight_norm computes it in every forward"
    assert model.config.quantization_config.left_alone["model.layers.0.mlp.up_proj"] == why
    assert isinstance(layers[1].mlp.up_proj, PackedLinear)
    assert (logits(model) - before).norm() < 0.5 * before.norm()


def test_an_encoder_and_its_decoder():
    """T5 casts what its layer `wo` gets to the dtype of its weight, which would be bytes."""
    config = transformers.T5Config(d_model=64, d_kv=32, d_ff=128, num_layers=1, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config).eval()
    quantize(model, TurboQuantConfig(8))
    names = set(packed_layers(model))
    assert {"encoder.block.0.layer.1.DenseReluDense.wi",
            "decoder.block.0.layer.1.EncDecAttention.q"} <= names  # fmt: skip
    left = model.config.quantization_config.left_alone
    assert left["decoder.block.0.layer.2.DenseReluDense.wo"] == (
        "T5DenseActDense reads its weight instead of calling it"
    )
    assert model(input_ids=IDS, decoder_input_ids=IDS).logits.isfinite().all()


def test_names_in_a_summary():
    left = {f"layers.{i}.mlp": "a" for i in range(4)} | {"layers.7.mlp": "b", "layers.9.mlp": "b"}
    assert choice.summary({**left, "head": "a"}) == {
        "layers.0-3.mlp": "a",
        "layers.7,9.mlp": "b",
        "head": "a",
    }


def test_a_model_without_linear_layers_is_refused(folder):
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=96)
    path = folder(transformers.GPT2LMHeadModel(config))
    with pytest.raises(ValueError, match=r"h\.0-1\.attn\.c_attn: Conv1D stores its weight transp"):
        load(path, TurboQuantConfig())
    with pytest.raises(ValueError, match="no layer of this GPT2LMHeadModel can be packed"):
        quantize(transformers.GPT2LMHeadModel(config))
