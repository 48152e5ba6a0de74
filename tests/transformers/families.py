"""Families of transformers models that the cache serves or refuses, as tiny random models."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.transformers.harness import COMMON

WINDOW = {"sliding_window": 24}
WIDE = {"head_dim": 32}  # not hidden_size / heads
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
# layers of hybrid models, whose names have changed
ONE_OF_THREE = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
BLOCKS = ["linear_attention", "full_attention"] if VERSION >= (5, 17) else ["mamba", "attention"]
CONV = {"layer_types": ["conv", "full_attention", "conv"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
         "mamba_chunk_size": 16}  # fmt: skip
LINEAR_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                "linear_value_head_dim": 16}  # fmt: skip
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

SUPPORTED = {
    "afmoe": {**WIDE, **EXPERTS, **MIXED},
    "apertus": {},
    "arcee": WIDE,
    "biogpt": {},  # learned positions
    "bitnet": {},
    "codegen": {"rotary_dim": 8},
    "cohere": {},
    "cohere2": {**MIXED},
    "cohere2_moe": {**WIDE, **EXPERTS, **MIXED},
    "cwm": {**WIDE, **MIXED, "bos_token_id": 1, "eos_token_id": [99]},
    "ernie4_5": WIDE,
    "ernie4_5_moe": {"moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": 32},
    "exaone4": {**MIXED},
    "exaone_moe": {**MIXED, **EXPERTS},
    "flex_olmo": {},
    "gemma": WIDE,
    "gemma2": {**WIDE, **MIXED, "attn_logit_softcapping": 0.2, "query_pre_attn_scalar": 24},
    "gemma3_text": {**WIDE, **MIXED, "query_pre_attn_scalar": 24},
    "glm": WIDE,
    "glm4": WIDE,
    "glm4_moe": {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32},
    "gpt-sw3": {},
    "gpt2": {},  # learned positions
    "gpt_bigcode": {},  # one KV head
    "gpt_neox": {},
    "gptj": {"rotary_dim": 8},
    "gpt_oss": {**WIDE, **LOCAL_EXPERTS, **MIXED},  # learned sinks
    "granite": {},
    "granitemoe": LOCAL_EXPERTS,
    "granitemoehybrid": {**MAMBA, **LOCAL_EXPERTS, "shared_intermediate_size": 32,
                         "layer_types": [BLOCKS[0], BLOCKS[1], BLOCKS[0]]},
    "granitemoeshared": LOCAL_EXPERTS,
    "hunyuan_v1_dense": WIDE,
    "internlm3": WIDE,
    "jais2": WIDE,
    "jamba": {"num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2,
              "attn_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False},
    "lfm2": CONV,
    "lfm2_moe": {**CONV, **EXPERTS},
    "llama": WIDE,
    "ministral": {**WIDE, **MIXED},
    "ministral3": WIDE,
    "minimax_m2": {**WIDE, **LOCAL_EXPERTS},
    "mistral": {**WIDE, **WINDOW},
    "mixtral": {**LOCAL_EXPERTS, **WINDOW},
    "nanochat": {},
    "nemotron": WIDE,
    "nemotron_h": {**WIDE, "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 8,
                   "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16},
    "olmo": {},
    "olmo2": {},
    "olmo3": MIXED,
    "olmo_hybrid": {**LINEAR_HEADS, **ONE_OF_THREE},
    "olmoe": EXPERTS,
    "opt": {},  # learned positions
    "persimmon": {},
    "phi": {},
    "phi3": WINDOW,
    "phimoe": {**LOCAL_EXPERTS, **WINDOW},  # its window is in the mask only
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": WIDE,
    "qwen3_5_text": {**WIDE, **LINEAR_HEADS, **ONE_OF_THREE},
    "qwen3_moe": {**WIDE, **EXPERTS},
    "qwen3_next": {**WIDE, **EXPERTS, **LINEAR_HEADS, **ONE_OF_THREE,
                   "shared_expert_intermediate_size": 32},
    "recurrent_gemma": {"attention_window_size": 24, "lru_width": 64,
                        "block_types": ["recurrent", "attention"]},
    "seed_oss": WIDE,
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "stablelm": {},
    "starcoder2": WINDOW,
    "vaultgemma": {**WIDE, **MIXED, "attn_logit_softcapping": 0.2},
}  # fmt: skip
# earlier versions have another attention or cache class of their own for these
SINCE = {"nemotron": 17, "nemotron_h": 17, "olmo_hybrid": 17, "recurrent_gemma": 23,
         "codegen": 24, "gptj": 24}  # fmt: skip
FAMILIES = {**SUPPORTED, "llama with a window": {**WIDE, **WINDOW}}  # which llama does not read

INDEXER = "latent attention .MLA. with an indexer"
INTERFACE = "does not go through transformers' AttentionInterface"
LINEAR = "only layers of type .'(linear_attention|mamba)'"  # the name depends on the version
LOOPS = "layers that run several times .n_recurrent_loops."
VALUES = "values of another size than keys .v_head_dim."
REFUSED = {
    "bert": ({}, "attention in both directions"),
    "bloom": ({}, INTERFACE),
    "deepseek_v32": ({}, INDEXER),
    "dory": ({"n_input_layers": 1, "n_output_layers": 1}, LOOPS),
    "falcon_h1": ({}, "layers of type .'hybrid'"),
    "falcon_mamba": ({}, LINEAR),
    "glm_moe_dsa": ({}, INDEXER),
    "llama4_text": ({**LOCAL_EXPERTS, **WIDE}, "chunked attention"),
    "mamba": ({}, LINEAR),
    "mimo_v2_flash": ({**WIDE, **MIXED, **EXPERTS, "v_head_dim": 16}, VALUES),
    "minimax": (LOCAL_EXPERTS, "a cache class of its own .MiniMaxCache"),
    "mpt": ({}, INTERFACE),
    "xglm": ({}, INTERFACE),
}
# only their attention shows it: refused in a forward
REFUSED_WHILE_RUNNING = {
    "diffllama": (WIDE, f"changes keys or values|{INTERFACE}"),
    "doge": ({"keep_window_size": 16}, "attends under a mask that the model's own code makes"),
    "olmoe": ({**EXPERTS, **WINDOW}, "attends with sliding_window=24"),  # under full masks
}
HYBRIDS = ["qwen3_next", "lfm2", "jamba"]


def make_family_config(family, options):
    kind = family.split(" ")[0]
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    return CONFIG_MAPPING[kind](**{**COMMON, "initializer_range": 0.08, **options})


def make_family(family, options):
    if VERSION < (5, SINCE.get(family, 0)):
        pytest.skip("not supported with this version")
    config = make_family_config(family, options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    size = sum(p.numel() for p in model.parameters())
    assert size < 5e6, f"{family} is no tiny model: {size} parameters"
    # zeros and ones of fresh biases, gates and sinks would hide a mistake
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.add_(0.1 * torch.randn_like(parameter))
    if family in ("gemma2", "vaultgemma"):
        model.set_attn_implementation("eager")  # sdpa has no soft cap; some versions drop it there
    return model
