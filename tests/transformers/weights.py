"""Tiny models for tests of packed weights: how they are made, loaded, packed by hand and read."""

import copy

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from torch_turboquant import PackedLinear, WeightFormat

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
