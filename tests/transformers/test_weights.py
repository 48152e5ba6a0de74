"""Models whose linear layers are packed: loaded, saved, calibrated, compiled, refused.

Models are tiny and random. What must come out is what the layer's own class makes of the same
weights, so a test of a model needs no tolerance.
"""

import copy
import gc
import json
import logging
import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from torch_turboquant import PackedLinear, WeightFormat, encode_weight
from torch_turboquant.integrations.transformers import TurboQuantCache, TurboQuantConfig, quantize
from torch_turboquant.integrations.transformers.weights import budget, choice, noted_layers, pack
from torch_turboquant.integrations.transformers.weights.experts import PackedExperts
from torch_turboquant.integrations.transformers.weights.moments import passes, second_moments
from torch_turboquant.integrations.transformers.weights.quantizer import NEEDS

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),  # biases
    "gemma": ("GemmaConfig", {}),  # the head is tied
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS),
    "jamba": (  # layers of state-space models, and experts
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,  # early versions write this at a forward without kernels
        },
    ),
}
MIXTURES = ("qwen3_moe", "jamba")
IDS = torch.randint(1, 96, (1, 40), generator=torch.Generator().manual_seed(1))
TEXT = torch.randint(1, 96, (700,), generator=torch.Generator().manual_seed(2))


def random_model(kind, dtype, **options):
    """A model of a configuration class, whose biases are no zeros."""
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**options)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.copy_(torch.randn(parameter.shape))
    return model


def make(family="llama", dtype=torch.bfloat16, **changes):
    kind, options = FAMILIES[family]
    return random_model(kind, dtype, **{**SHAPE, **options, **changes})


def load(path, config=None, **options):
    if config is not None:
        options["quantization_config"] = config
    return AutoModelForCausalLM.from_pretrained(path, local_files_only=True, **options)


def packed_layers(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, PackedLinear)}


def packed_by_hand(model, names, form=None):
    """The model with these layers packed by their own class."""
    model = copy.deepcopy(model)
    model.config._is_quantized = True  # layers of state-space models round otherwise then
    for name in names:
        linear = model.get_submodule(name)
        model.set_submodule(name, PackedLinear.from_linear(linear, form or WeightFormat()))
    return model


def logits(model, ids=IDS):
    return model(ids).logits


def files(path):
    return {p.name: load_file(p) for p in sorted(path.glob("*.safetensors"))}


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
    peaks, before = [], {id(x) for x in live_tensors()}

    def noted(weight, form):
        alive = {x.untyped_storage().data_ptr(): x for x in live_tensors() if id(x) not in before}
        held = sum(x.untyped_storage().nbytes() for x in alive.values())
        peaks.append(held - weight.untyped_storage().nbytes())
        return encode_weight(weight, form)

    monkeypatch.setattr(quantizer, noted)
    model = load(path, TurboQuantConfig(bits=4))
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    slack = 64 * 1024  # buffers of positions, signs, levels
    assert len(peaks) == len(packed_layers(model)) == 15
    assert max(peaks) <= total + slack
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
    said = caplog.text
    assert all(name.split(".")[-1] in said for name in left)
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
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


# ------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bits": 5}, "bits is 5"),
        ({"bits": 4, "sub": 16}, "sub"),
        ({"grid": "log"}, "grid must be one of"),
        ({"layers": {"x": {"seed": 1}}}, r"layers\['x'\] changes seed; it can change bits"),
        ({"modules": ["x"]}, "TurboQuantConfig has no modules; it has bits"),
        ({"bits": "4"}, "bits is '4', which is no whole number"),
        ({"bits": 4.0}, "bits is 4.0, which is no whole number"),
        ({"group": 64.0}, "group is 64.0, which is no whole number"),
        ({"skip": 3}, "skip must be names of layers, got 3"),
        ({"skip": [3]}, r"skip must be names of layers, got \[3\]"),
        ({"layers": ["lm_head"]}, "layers must be changes by names"),
        ({"layers": {"lm_head": 8}}, "layers must be changes by names"),
        ({"layers": {3: {"bits": 8}}}, "layers must be names of layers"),
    ],
)
def test_configurations_that_are_refused(options, says):
    with pytest.raises((TypeError, ValueError), match=says):
        TurboQuantConfig(**options)


def test_nothing_to_skip():
    config = TurboQuantConfig(skip=None, layers=None)
    assert config.skip == [] and config.layers == {}


def test_a_group_that_a_layer_has_not(folder):
    says = r"group is 128, and model\.layers\.0\.mlp\.down_proj has 192 input channels"
    with pytest.raises(ValueError, match=says):
        load(folder(make()), TurboQuantConfig(group=128))
    config = TurboQuantConfig(group=128, layers={"*.down_proj": {"group": 64}})
    packed = load(folder(make(), "other"), config)
    assert packed.model.layers[0].mlp.down_proj.format.group == 64


def test_weights_of_a_dtype_that_is_not_supported(folder):
    path = folder(make())
    with pytest.raises(ValueError, match=r"is torch.float64, supported: float32, float16, bfloat"):
        load(path, TurboQuantConfig(), dtype=torch.float64)
    model = make(dtype=torch.float64)
    with pytest.raises(ValueError, match=r"q_proj is torch.float64, supported: float32, float16"):
        quantize(model)
    assert not packed_layers(model)


def test_what_is_no_model_and_no_configuration():
    for other in (nn.Sequential(nn.Linear(64, 64)), "llama"):
        with pytest.raises(TypeError, match="model must be a model of transformers"):
            quantize(other)
    with pytest.raises(TypeError, match="config must be a TurboQuantConfig, got dict"):
        quantize(make(), {"bits": 4})


@pytest.mark.parametrize("options", [{"skip": ["*.k"]}, {"layers": {"*.k": {"bits": 8}}}])
def test_a_pattern_that_names_nothing(options, folder):
    with pytest.raises(ValueError, match=r"'\*\.k' names no linear layer of this LlamaForCausalLM"):
        load(folder(make()), TurboQuantConfig(**options))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite(bad, folder):
    model = make()
    model.model.layers[1].mlp.up_proj.weight[3, 5] = bad
    with pytest.raises(ValueError, match=r"cannot be packed: model\.layers\.1\.mlp\.up_proj: "):
        load(folder(model), TurboQuantConfig())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj"):
        quantize(model)
    assert not packed_layers(model) and not hasattr(model.config, "quantization_config")
    assert all(torch.equal(x.nan_to_num(), before[n].nan_to_num()) for n, x in
               model.state_dict().items())  # fmt: skip


def test_weights_above_the_largest_scale(folder):
    model = make()
    model.model.layers[1].mlp.up_proj.weight *= 1e8
    says = r"cannot be packed: model\.layers\.1\.mlp\.up_proj: .* too large for scales in float16"
    with pytest.raises(ValueError, match=says):
        load(folder(model), TurboQuantConfig())
    with pytest.raises(ValueError, match=says):
        quantize(model)
    with pytest.raises(ValueError, match=says):
        quantize(model, text=TEXT)
    assert not packed_layers(model)


def test_hooks_of_layers_stay():
    model, seen = make(), []
    layer = model.model.layers[0].mlp.up_proj
    handles = [
        layer.register_forward_pre_hook(lambda m, args, kwargs: seen.append(m), with_kwargs=True),
        layer.register_forward_hook(lambda m, args, y: seen.append(y)),
    ]
    quantize(model)
    logits(model)
    packed = model.model.layers[0].mlp.up_proj
    assert seen[0] is packed and isinstance(packed, PackedLinear)
    assert seen[1].shape[-1] == packed.out_features and len(seen) == 2
    for handle in handles:
        handle.remove()
    logits(model)
    assert len(seen) == 2


def changed(path, **values):
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= values
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_files_of_another_format(folder):
    path = folder(load(folder(make()), TurboQuantConfig()), "packed")
    with pytest.raises(ValueError, match=r"packed by torch_turboquant 9\.9 in another format"):
        load(changed(path, format="torch_turboquant weights 9", version="9.9"))
    with pytest.raises(ValueError, match="TurboQuantConfig has no novelty"):
        load(changed(path, format="torch_turboquant weights 1", novelty=1))


def test_files_that_are_incomplete(folder):
    path = folder(load(folder(make()), TurboQuantConfig()), "packed")
    file = path / "model.safetensors"
    tensors = load_file(file)
    missing = {n: x for n, x in tensors.items() if n != "model.layers.0.mlp.up_proj.weight"}
    save_file(missing, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"1 layers .* another shape: model\.layers\.0\.mlp\.up_p"):
        load(path)
    other = {**tensors, "lm_head.weight": tensors["lm_head.weight"][:, :, :-1].contiguous()}
    save_file(other, file, {"format": "pt"})
    with pytest.raises((RuntimeError, ValueError), match=r"mismatched|another shape: lm_head"):
        load(path)  # before 5.23 transformers does not look at shapes of quantised models
    with pytest.raises(ValueError, match="another shape: lm_head"):
        load(path, ignore_mismatched_sizes=True)
    for name in ("channel_inverse", "bias"):
        model = make("qwen2")
        quantize(model, text=TEXT)
        fewer = load_file((part := folder(model, name)) / file.name)
        del fewer[f"model.layers.0.self_attn.q_proj.{name}"]
        save_file(fewer, part / file.name, {"format": "pt"})
        with pytest.raises(ValueError, match=r"1 layers were not in .*self_attn\.q_proj"):
            load(part)
    save_file(tensors, file, {"format": "pt"})
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(Exception, match=r"incomplete|not fully covered"):
        load(path)


def test_a_packed_model_is_not_packed_again(folder):
    packed = load(folder(make()), TurboQuantConfig())
    with pytest.raises(ValueError, match=r"quantised already \(torch_turboquant\)"):
        quantize(packed)
    part = make()
    quantize(part.model)
    with pytest.raises(ValueError, match=r"this LlamaForCausalLM is quantised already"):
        quantize(part)
    assert type(part.lm_head) is nn.Linear


def test_disk(folder):
    pytest.importorskip("accelerate")
    path = folder(make())
    with pytest.raises(ValueError, match="cannot be packed while they are offloaded to disk"):
        load(path, TurboQuantConfig(), device_map={"model": "cpu", "lm_head": "disk"})
    with pytest.raises(ValueError, match="'meta', where there are no weights"):
        load(path, TurboQuantConfig(), device_map="meta")


def test_without_the_package(folder):
    """A process that has not imported the package gets an error, and reads what to import."""
    path = folder(load(folder(make()), TurboQuantConfig()), "packed")
    code = (
        "from transformers import AutoModelForCausalLM\n"
        f"AutoModelForCausalLM.from_pretrained({str(path)!r})"
    )
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert found.returncode != 0 and "RuntimeError" in found.stderr
    assert NEEDS in found.stderr and "got torch_turboquant" in found.stderr
    code = f"import torch_turboquant.integrations.transformers\n{code}"
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert NEEDS not in found.stderr


# ------------------------------------------------------------------------------ calibration


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


# ------------------------------------------------------------------------------ running


def test_with_a_packed_cache(folder):
    """Both at once, and the cache of a packed model can be saved and loaded."""
    packed = load(folder(make()), TurboQuantConfig(), dtype=torch.float32)
    expected = packed.generate(IDS, max_new_tokens=8, do_sample=False)
    with TurboQuantCache.for_model(packed, "k8v8") as cache:
        found = packed.generate(IDS, past_key_values=cache, max_new_tokens=8, do_sample=False)
        assert torch.equal(found, expected)
        path = folder(packed, "packed") / "cache.safetensors"
        cache.save(path)
    with TurboQuantCache.load(path, packed) as cache:
        assert cache.get_seq_length() == 47
    other = load(folder(make(), "other"), TurboQuantConfig(bits=8), dtype=torch.float32)
    with pytest.raises(ValueError, match="another model"):
        TurboQuantCache.load(path, other)


@pytest.mark.parametrize("calibrated", [False, True])
def test_compiled_in_one_piece(calibrated, folder):
    model = make(dtype=torch.float32)
    if calibrated:
        quantize(model, text=TEXT)
        model = load(folder(model, "packed"))
    else:
        model = load(folder(model), TurboQuantConfig())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(IDS).logits, logits(model), rtol=1e-3, atol=1e-3)


def test_on_devices_of_a_map(folder):
    pytest.importorskip("accelerate")
    path = folder(make())
    mapped = load(path, TurboQuantConfig(), device_map={"": "cpu"})
    assert torch.equal(logits(mapped), logits(load(path, TurboQuantConfig())))


def test_packed_weights_on_disk(folder, tmp_path):
    pytest.importorskip("accelerate")
    packed = load(folder(make()), TurboQuantConfig())
    path = folder(packed, "packed")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
              "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}  # fmt: skip
    spread = load(path, device_map=places, offload_folder=tmp_path / "offload")
    assert torch.equal(logits(spread), logits(packed))


def test_the_package_can_be_imported_again():
    import importlib

    from torch_turboquant.integrations.transformers import weights

    importlib.reload(weights)  # a second registration would raise


# ------------------------------------------------------------------------------ on GPUs


@pytest.mark.cuda
@pytest.mark.parametrize("calibrated", [False, True])
def test_packed_on_a_gpu(calibrated, folder):
    """The bytes are those of the CPU; a calibrated model has those that it was saved with."""
    model = make("qwen2").cuda()
    quantize(model, text=TEXT if calibrated else None)
    again = load(folder(model, "packed")).cuda()
    assert torch.equal(logits(again, IDS.cuda()), logits(model, IDS.cuda()))
    for name, layer in packed_layers(model).items():
        assert torch.equal(layer.weight, again.get_submodule(name).weight), name
        assert calibrated == (layer.channel_inverse is not None)
    if not calibrated:
        on_cpu = make("qwen2")
        quantize(on_cpu)
        for name, layer in packed_layers(on_cpu).items():
            assert torch.equal(layer.weight, model.get_submodule(name).weight.cpu()), name


@pytest.mark.cuda
def test_packed_while_it_loads_on_a_gpu(folder):
    pytest.importorskip("accelerate")
    path = folder(make())
    model = load(path, TurboQuantConfig(), device_map={"": "cuda"})
    on_cpu = load(path, TurboQuantConfig())
    for name, layer in packed_layers(on_cpu).items():
        assert torch.equal(layer.weight, model.get_submodule(name).weight.cpu()), name
    found, expected = logits(model, IDS.cuda()).float().cpu(), logits(on_cpu).float()
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_computes_what_a_cpu_does(dtype):
    model = make(dtype=dtype)
    quantize(model)
    expected = logits(model).float()
    found = logits(model.cuda(), IDS.cuda()).float().cpu()
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.cuda
def test_weights_and_cache_in_a_graph():
    """A captured step gives the logits of the same step without a graph."""
    model = make().cuda()
    quantize(model)
    prompt, tokens = IDS[:, :30].cuda(), IDS[:, 30:].cuda()
    with TurboQuantCache.for_model(model, "k5v4u", static=True, max_cache_len=96) as cache:
        model(prompt, past_key_values=cache)
        expected = [model(token, past_key_values=cache).logits for token in tokens.split(1, 1)]
        cache.reset()
        model(prompt, past_key_values=cache)
        token = tokens[:, :1].clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.equal(model(token, past_key_values=cache).logits, expected[0])
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = model(token, past_key_values=cache).logits
        for number in range(1, tokens.shape[1]):
            token.copy_(tokens[:, number : number + 1])
            graph.replay()
            assert torch.equal(found, expected[number]), number


@pytest.mark.cuda
def test_a_model_may_move():
    model = make()
    quantize(model, text=TEXT)
    expected = logits(model)
    assert torch.equal(logits(model.cuda().cpu()), expected)
