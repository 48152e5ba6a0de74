"""Models of which some layers keep a state of fixed size, in a pool of SGLang's beside pages."""

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: make sglang")

import transformers

from tests.sglang.harness import ON_GPU, engine, replay, told
from tests.vllm.harness import prompt, randomise, save
from tests.vllm.reference import Reference

TOKENS = 12
WINDOW = 16
PRESET = "k8v8" if ON_GPU else "k5v4u"
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "full_attention_interval": 2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def states_of_the_models_type(monkeypatch):
    """Of convolutions, which SGLang rounds to bfloat16 otherwise, and transformers does not."""
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float16" if ON_GPU else "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    qwen = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**SHAPE))
    folder = tmp_path_factory.mktemp("qwen")
    return folder, save(randomise(qwen), folder)


def options():
    """On a CPU SGLang keeps no states in the prefix tree, since its pages have several tokens."""
    return {} if ON_GPU else {"disable_radix_cache": True}


def test_linear_attention_beside_packed_pages(model):
    folder, qwen = model
    presets = [PRESET, PRESET, PRESET, "k8v4"]
    reference = Reference(qwen, presets, window=WINDOW)
    settings = {"preset": PRESET, "window": WINDOW, "layers": {"-1": "k8v4"}}
    # Whole prompts: transformers forgets the state of linear attention between pieces of one.
    prompts = [prompt(n, seed=n) for n in (9, 70, 40)]
    with told() as lines, engine(folder, settings, **options()) as loop:
        answers = loop.generate(prompts, TOKENS)
        pages = loop.pool.full_kv_pool.pages
        assert len(pages) == 2
        assert sorted(loop.backend.full_attn_backend.layers) == [1, 3]
    assert lines[0].startswith(f"TurboQuant: preset {PRESET} (layers -1: k8v4)")
    for p, answer in zip(prompts, answers, strict=True):
        assert len(answer.tokens) == TOKENS
        replay(reference, p, answer)
    with pytest.raises(AssertionError, match="below"):  # the reference can tell
        replay(Reference(qwen, "k3v2"), prompts[1], answers[1])
