"""Models whose files lie otherwise than the model: transformers joins or divides their tensors."""

import copy
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers import HfQuantizer

from tests.transformers.weights import TEXT, packed_layers
from torch_turboquant.integrations.transformers import TurboQuantConfig, quantize

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
GROUPED = {"num_key_value_heads": 2}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
IDS = torch.arange(3, 43).view(2, 20)
# whose layers differ in size, so that transformers divides the tensor of the file by Split
OF_ANY_SIZE = {
    "lara_mini": {  # two of the four layers in one tensor are too small to be packed
        **GROUPED, **MIXTURE, "num_experts": 4, "shared_expert_intermediate_size": 64,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
        "linear_value_head_dim": 64,
    },
    "molmo2_text": GROUPED,
    "sarvam_moe": {**GROUPED, **MIXTURE, "n_routed_experts": 4, "n_shared_experts": 1},
}  # fmt: skip
OF_ONE_SIZE = {"hrm_text": {}, "nomic_bert": {}}
KINDS = [
    name
    for name in OF_ANY_SIZE | OF_ONE_SIZE
    if name in CONFIG_MAPPING and hasattr(HfQuantizer, "update_weight_conversions")  # not in 5.5
]
LAYERS = {"hrm_text": "*.v_proj", "nomic_bert": "*.v_proj", "lara_mini": "*.in_proj_z"}


def make(kind):
    options = {**SHAPE, **(OF_ANY_SIZE | OF_ONE_SIZE)[kind]}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**options)
    return auto_class(config).from_config(config, dtype=torch.float32).eval()


def auto_class(config):
    headless = config.model_type in ("molmo2_text", "nomic_bert")
    return AutoModel if headless else AutoModelForCausalLM


def load_like(model, path, **options):
    return auto_class(model.config).from_pretrained(path, **options)


def names_of(*kinds):
    return [kind for kind in kinds if kind in KINDS]


def assert_same_when_saved(model, folder, name="packed"):
    """It is loaded as it was saved, and saved again in the same way."""
    again = load_like(model, path := folder(model, name))
    layers = packed_layers(model)
    assert layers.keys() == packed_layers(again).keys() and layers
    for part, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[part]), part
    assert torch.equal(model(IDS)[0], again(IDS)[0])
    second = load_file(folder(again, f"{name} again") / "model.safetensors")
    first = load_file(path / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[n]) for n, tensor in first.items())


@pytest.mark.parametrize("kind", KINDS)
def test_packed_while_loading_as_when_loaded(kind, folder):
    made = make(kind)
    model = load_like(made, folder(made), quantization_config=TurboQuantConfig())
    quantize(made)
    for name, layer in packed_layers(made).items():
        assert torch.equal(layer.weight, model.get_submodule(name).weight), name
    assert torch.equal(made(IDS)[0], model(IDS)[0])
    assert_same_when_saved(model, folder)
    assert_same_when_saved(made, folder, "made")


@pytest.mark.parametrize("kind", names_of("hrm_text", "nomic_bert", "lara_mini"))
@pytest.mark.parametrize("how", ["skip", "layers", "text"])
def test_layers_of_one_tensor_in_different_formats(kind, how, folder):
    made = make(kind)
    path, pattern = folder(made), LAYERS[kind]
    config = TurboQuantConfig(
        skip=[pattern] if how == "skip" else (),
        layers={} if how == "skip" else {pattern: {"bits": 8}},
    )
    if how == "text":
        model = load_like(made, path)
        quantize(model, config, text=TEXT)
    else:
        model = load_like(made, path, quantization_config=config)
    assert_same_when_saved(model, folder)
    plain = load_like(made, path)
    model.dequantize()
    assert model.state_dict().keys() == plain.state_dict().keys()
    model.save_pretrained(path)
    again = load_like(made, path)
    assert torch.equal(model(IDS)[0], again(IDS)[0])


@pytest.mark.parametrize("kind", names_of("nomic_bert", "lara_mini"))
@pytest.mark.parametrize("which", [0, -1])
def test_some_layers_of_one_tensor_are_skipped(kind, which, folder):
    """transformers asks only for the first of them whether it is packed."""
    first, last = {
        "nomic_bert": ("*.q_proj", "*.v_proj"),
        "lara_mini": ("*.in_proj_qkv", "*.in_proj_z"),
    }[kind]
    made = make(kind)
    config = TurboQuantConfig(skip=[(first, last)[which]])
    model = load_like(made, folder(made), quantization_config=config)
    quantize(made, config)
    assert packed_layers(model).keys() == packed_layers(made).keys()
    assert torch.equal(made(IDS)[0], model(IDS)[0])


@pytest.mark.parametrize("kind", names_of("hrm_text"))
def test_files_whose_packed_layers_share_a_tensor(kind, folder):
    """As files had it before packed layers were written by their own names."""
    made = make(kind)
    path = folder(made)
    model = load_like(made, path, quantization_config=TurboQuantConfig())
    conversions = load_like(made, path)._weight_conversions
    own, model._weight_conversions = model._weight_conversions, conversions
    old = folder(model, "old")
    model._weight_conversions = own
    new = load_file(folder(model, "new") / "model.safetensors")
    shared = load_file(old / "model.safetensors")
    assert len(shared) < len(new)
    again = load_like(made, old)
    assert torch.equal(again(IDS)[0], model(IDS)[0])
    assert_same_when_saved(again, folder)


@pytest.mark.parametrize("kind", names_of("hrm_text"))
def test_copies_are_saved_as_well(kind, folder):
    made = make(kind)
    config = TurboQuantConfig(skip=["*.k_proj"])
    model = load_like(made, folder(made), quantization_config=config)
    assert_same_when_saved(copy.deepcopy(model), folder, "copy")
    assert_same_when_saved(pickle.loads(pickle.dumps(model)), folder, "pickle")
