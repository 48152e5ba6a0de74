"""Models whose layers keep a state of fixed size or keys and values: one memory for both."""

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make vllm")

import transformers

from tests.vllm.harness import ON_GPU, engine, generate, prompt, randomise, save
from tests.vllm.reference import Reference
from torch_turboquant import centers as files
from torch_turboquant.integrations.vllm.adapter import INTERFACE

TOKENS = 16
PRESET = "k8v8"
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}

pytestmark = [
    pytest.mark.skipif(INTERFACE.page_bytes == "layer", reason="refused: needs vLLM 0.28 or newer"),
    pytest.mark.skipif(
        not ON_GPU and not torch.cpu._is_avx512_bf16_supported(),
        reason="vLLM's linear attention needs a CPU with products in bfloat16",
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    qwen = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**SHAPE))
    folder = tmp_path_factory.mktemp("qwen")
    return folder, save(randomise(qwen), folder)


def test_layers_of_drafts_that_are_numbered_anew(model):
    """MTP: the layer mtp.layers.0 attends, while layer 0 of the model, of which a file of centers
    has nothing and the settings have a preset, does not."""
    folder, qwen = model
    pytest.importorskip("safetensors")
    centers = [None, None, None, torch.ones(2, 32)]
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    settings = {"preset": PRESET, "layers": {"0": "k4v4"}}
    files.save(folder / files.FILE_NAME, centers, qwen.config)
    try:
        options = {"dtype": "bfloat16", "block_size": 64, "load_format": "dummy"}
        with engine(folder, settings, **options, speculative_config=drafts) as llm:
            layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
            found = {n: layer.impl for n, layer in layers.items() if hasattr(layer, "impl")}
    finally:
        (folder / files.FILE_NAME).unlink()
    own, drafting = (next(i for n, i in found.items() if n.startswith(p)) for p in ("model", "mtp"))
    assert len(found) == 2
    assert own.config == drafting.config and own.config.key_bits == 8
    assert own.tables.center is not None and drafting.tables.center is None


def layers_of(llm):
    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return [layer.kv_cache for layer in context.values() if hasattr(layer, "kv_cache")]


def test_linear_attention_beside_packed_pages(model):
    """vLLM makes blocks of so many tokens that their bytes hold a state; they are many pages."""
    folder, qwen = model
    reference = Reference(qwen, PRESET)
    prompts = [prompt(n, seed=n) for n in (9, 70, 300)]
    settings = {"preset": PRESET, "learn": False}
    options = {"dtype": "bfloat16", "block_size": 64}
    if ON_GPU:  # without FlashInfer, which vLLM would compile for prompts of linear attention
        options["gdn_prefill_backend"] = "triton"
    with engine(folder, settings, **options) as llm:
        alone = [generate(llm, [p], TOKENS)[0] for p in prompts]
        together = generate(llm, [p[::-1] for p in prompts], TOKENS)
        *states, pages = layers_of(llm)
        tokens = llm.llm_engine.vllm_config.cache_config.block_size
    for p, answer in zip(prompts, alone, strict=True):
        reference.check(p, answer, near_tie=0.15)
    for p, answer in zip(prompts, together, strict=True):
        reference.check(p[::-1], answer, near_tie=0.15)
    with pytest.raises(AssertionError, match="below"):  # the reference can tell
        reference.check(prompts[2], alone[1], near_tie=0.15)

    assert pages.is_contiguous() and pages.shape[2] == 128  # no padding
    blocks = len(pages) * 128 // tokens
    of_attention = pages[: tokens // 128].nbytes
    of_states = max(sum(part[0].nbytes for part in state) for state in states)
    assert blocks == len(states[0][0])
    assert of_states <= of_attention < of_states + pages[0].nbytes
