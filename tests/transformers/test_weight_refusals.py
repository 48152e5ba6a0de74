"""Configurations, weights and files that cannot be packed weights, and what is said of them."""

import copy
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from torch import nn

from tests.transformers.weights import SHAPE, TEXT, load, logits, make, packed_layers
from torch_turboquant import PackedLinear, WeightFormat
from torch_turboquant.integrations.transformers import TurboQuantConfig, quantize
from torch_turboquant.integrations.transformers.weights import pack
from torch_turboquant.integrations.transformers.weights.budget import sensitivities
from torch_turboquant.integrations.transformers.weights.quantizer import NEEDS


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


def test_changes_of_layers_keep_the_rest():
    """Only other bits have another grid and other multipliers."""
    config = TurboQuantConfig(
        4, "uniform", 0, 64, layers={"a": {"bits": 8}, "b": {"bits": 4}, "c": {"sub": 32}}
    )
    assert config.layer_formats() == {
        "a": WeightFormat(8, group=64),
        "b": WeightFormat(4, "uniform", 0, 64),
        "c": WeightFormat(4, "uniform", 32, 64),
    }
    other = TurboQuantConfig(group=64, layers={"a": {"bits": 8, "group": None}})
    assert other.layer_formats() == {"a": WeightFormat(8)}


def test_integers_of_numpy_are_written_as_others(folder):
    """JSON knows none: a model with them was packed, and could not be saved."""
    layers = {"lm_head": {"bits": np.int64(8)}, "*.q_proj": {"sub": np.int8(0)}}
    config = TurboQuantConfig(np.int64(4), group=np.int32(64), layers=layers)
    model = make(dtype=torch.float32)
    quantize(model, config, text=TEXT, budget=np.float32(5.5))
    again = load(folder(model, "packed"))
    assert torch.equal(logits(again), logits(model))
    done = again.config.quantization_config
    assert (done.bits, done.group, done.calibration["budget"]) == (4, 64, 5.5)
    assert json.loads(config.to_json_string())["layers"] == {
        "lm_head": {"bits": 8},
        "*.q_proj": {"sub": 0},
    }


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
    packed.register_forward_hook(lambda m, args, y: seen.append(m))
    model.dequantize()
    logits(model)
    assert seen[2:] == [model.model.layers[0].mlp.up_proj]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_hooks_of_accelerate_stay(family):
    """They move inputs to the devices of a map, and keep the forward that their module had."""
    hooks = pytest.importorskip("accelerate.hooks")
    seen = []

    class Noting(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(module)
            return args, kwargs

    model, plain = make(family), make(family)
    quantize(plain)
    want = logits(plain)
    names = ["lm_head", "model.layers.1.mlp.experts"] if family == "qwen3_moe" else ["lm_head"]

    def check(model):
        seen.clear()
        found = logits(model)
        assert set(seen) == {model.get_submodule(name) for name in names}
        return found

    for name in names:
        hooks.add_hook_to_module(model.get_submodule(name), Noting())
    quantize(model)
    assert torch.equal(check(model), want)
    twin = copy.deepcopy(model)
    assert torch.equal(check(twin), want)
    for one in (plain, twin):
        one.dequantize()
    assert torch.equal(check(twin), logits(plain))
    assert torch.equal(check(model), want)


def test_what_a_layer_costs_is_measured_with_its_hooks():
    """A hook that changes what a layer computes is no error of its packed form."""
    model = make(dtype=torch.float32)
    layer = model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda m, args, y: 0 * y)
    packed, _ = pack._pack(model, "model.layers.0.mlp.up_proj", WeightFormat(), None)
    cost = sensitivities(model, {"model.layers.0.mlp.up_proj": packed}, TEXT[:64])
    assert cost == {"model.layers.0.mlp.up_proj": 0.0}


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


@pytest.mark.parametrize("name, values", [
    ("left_alone", (None, [], "lm_head", {"lm_head": 3})),
    ("outputs", (None, [], 3, {"lm_head": "96"}, {"lm_head": 96.0}, {"lm_head": None})),
    ("scaled", (None, "no", 0)),
    ("calibration", (5, "text", [])),
])  # fmt: skip
def test_records_of_other_types(name, values, folder):
    path = folder(load(folder(make()), TurboQuantConfig()), "packed")
    for value in values:
        with pytest.raises(TypeError, match=f"{name} must be .* got"):
            load(changed(path, **{name: value}))


@pytest.mark.parametrize("family, layer", [
    ("llama", "layers.0.mlp.up_proj.weight"),
    ("qwen3_moe", "layers.1.mlp.experts.down_packed"),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool])
def test_bytes_as_numbers_of_another_kind(family, layer, dtype, folder):
    path = folder(load(folder(make(family)), TurboQuantConfig()), "packed")
    file = path / "model.safetensors"
    tensors = load_file(file)
    [name] = [name for name in tensors if name.endswith(layer)]
    kinds = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8", torch.bool: "BOOL"}
    save_file({**tensors, name: tensors[name].view(dtype)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"{layer} in {kinds[dtype]}, supported: U8"):
        load(path)


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


@pytest.mark.parametrize("text", [None, TEXT])
@pytest.mark.parametrize("labels", [17, 30, 40])
def test_a_head_of_another_size_than_the_files_have(labels, text, folder):
    """Bytes say how many tiles of 16 outputs there are, and 17, 20 and 30 outputs have two."""
    kind = transformers.LlamaForSequenceClassification
    made = kind(transformers.LlamaConfig(**SHAPE, num_labels=20))
    path = folder(made)
    quantize(made, text=text)
    packed = folder(made, "packed")
    assert kind.from_pretrained(packed).score.out_features == 20
    fits = {"num_labels": labels, "ignore_mismatched_sizes": True}
    for options in ({"quantization_config": TurboQuantConfig()}, {}):
        with pytest.raises(ValueError, match=r"1 layers were not in .* another shape: score"):
            kind.from_pretrained(path if options else packed, **fits, **options)
    loaded = kind.from_pretrained(path, quantization_config=TurboQuantConfig())
    assert loaded.config.quantization_config.outputs == {"score": 20}
    with pytest.raises(ValueError, match="another shape: score"):
        kind.from_pretrained(folder(loaded, "again"), **fits)


def test_a_packed_model_is_not_packed_again(folder):
    packed = load(folder(make()), TurboQuantConfig())
    with pytest.raises(ValueError, match=r"quantised already \(torch_turboquant\)"):
        quantize(packed)
    part = make()
    quantize(part.model)
    with pytest.raises(ValueError, match=r"this LlamaForCausalLM is quantised already"):
        quantize(part)
    assert type(part.lm_head) is nn.Linear


def test_a_model_that_processes_share_is_not_made_plain():
    model = make()
    quantize(model)
    model._tp_size = 2  # as transformers notes it
    with pytest.raises(ValueError, match=r"processes share .* cannot be made plain: load"):
        model.dequantize()
    assert packed_layers(model) and model.hf_quantizer is not None
    model._tp_size = None
    model.dequantize()
    assert not packed_layers(model)


def test_disk(folder):
    pytest.importorskip("accelerate")
    path = folder(make())
    with pytest.raises(ValueError, match="cannot be packed while they are offloaded to disk"):
        load(path, TurboQuantConfig(), device_map={"model": "cpu", "lm_head": "disk"})
    with pytest.raises(ValueError, match="'meta', where there are no weights"):
        load(path, TurboQuantConfig(), device_map="meta")


# One process for both, since it takes long to start.
WITHOUT_AND_WITH_THE_PACKAGE = """
import sys
from transformers import AutoModelForCausalLM
path = sys.argv[1]
try:
    AutoModelForCausalLM.from_pretrained(path)
except RuntimeError as error:
    print(error)
assert not [name for name in sys.modules if name.startswith("torch_turboquant")]
print("imports the package")
import torch_turboquant.integrations.transformers
AutoModelForCausalLM.from_pretrained(path)
print("loads")
"""


def test_without_the_package(folder):
    """A process that has not imported the package gets an error, and reads what to import."""
    path = folder(load(folder(make()), TurboQuantConfig()), "packed")
    command = [sys.executable, "-u", "-P", "-c", WITHOUT_AND_WITH_THE_PACKAGE, str(path)]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert found.returncode == 0, found.stdout
    without, _, after = found.stdout.partition("imports the package")
    assert NEEDS in without and "got torch_turboquant" in without
    assert NEEDS not in after and after.endswith("loads\n")
