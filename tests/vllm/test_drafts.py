"""Drafts of models: with every token from its codes, answers are those without drafts.

The served model's layers change little of what a token's embedding says, so that a draft that only
looks at that is often right. The drafts' own pages are packed as well.
"""

import json

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make vllm")

import transformers
from safetensors.torch import save_file

from tests.vllm.harness import (
    ON_GPU,
    engine,
    generate,
    metric,
    prompt,
    randomise,
    save,
    save_deepseek,
    save_llama,
    told,
)
from tests.vllm.reference import Reference
from torch_turboquant.integrations.vllm.adapter import INTERFACE

PRESET = "k8v8" if ON_GPU else "k5v4u"
SETTINGS = {"preset": PRESET, "exact_steps": False, "learn": False}
PROMPTS = [[*prompt(5, seed=5)] * 6, prompt(33, seed=33), prompt(70, seed=70)]
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
TOKENS = 30
DRAFTS = 3


def quieten(model):
    """Layers that add little to the embedding of a token."""
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(16)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    llama = save_llama(folder)
    quieten(llama)
    return folder, save(llama, folder)


def save_head(folder, target, eagle):
    """A draft of one layer, the target's first one, that sees embeddings and no states of layers.

    eagle: 1 or 3, whose inputs differ.
    """
    weights = dict(target.state_dict())
    n = target.config.hidden_size
    block = {
        name.removeprefix("model.layers.0."): weight.clone()
        for name, weight in weights.items()
        if name.startswith("model.layers.0.")
    }
    if eagle == 1:
        del block["input_layernorm.weight"]
        head = {f"layers.0.{name}": weight for name, weight in block.items()}
        head["fc.weight"] = torch.cat([torch.eye(n), torch.zeros(n, n)], 1)
    else:
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = block[f"self_attn.{name}.weight"]
            block[f"self_attn.{name}.weight"] = torch.cat([weight, torch.zeros_like(weight)], 1)
        block["hidden_norm.weight"] = torch.ones(n)
        head = {f"midlayer.{name}": weight for name, weight in block.items()}
        head["fc.weight"] = torch.cat([torch.eye(n), torch.zeros(n, 2 * n)], 1)
        head["norm.weight"] = weights["model.norm.weight"].clone()
        head["lm_head.weight"] = weights["lm_head.weight"].clone()
    head["embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    config = {**target.config.to_dict(), "num_hidden_layers": 1}
    config["architectures"] = ["LlamaForCausalLM"] if eagle == 1 else ["LlamaForCausalLMEagle3"]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(head, folder / "model.safetensors")


def save_mimo(folder):
    """A MiMo, which is a Qwen2 and, in a layer behind its last one, a draft for one more token."""
    shape = {**SHAPE, "num_nextn_predict_layers": 1}
    qwen = randomise(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape)))
    quieten(qwen)
    save(qwen, folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), "architectures": ["MiMoForCausalLM"]}
    path.write_text(json.dumps(config))
    weights, n = dict(qwen.state_dict()), qwen.config.hidden_size
    names = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    draft = {f"{name}.weight": torch.ones(n) for name in names}
    draft["input_proj.weight"] = torch.cat([torch.zeros(n, n), 4 * torch.eye(n)], 1)
    for name, weight in weights.items():
        if name.startswith("model.layers.0."):
            draft[name.removeprefix("model.layers.0.")] = weight.clone()
    draft = {f"model.mtp_layers.0.{name}": weight for name, weight in draft.items()}
    save_file(draft, folder / "model_mtp.safetensors")
    return qwen


def check(llm, reference, least):
    """Answers are right, and so are as many of the drafts."""
    answers = generate(llm, PROMPTS, TOKENS)
    accepted = metric(llm, "vllm:spec_decode_num_accepted_tokens")
    drafted = metric(llm, "vllm:spec_decode_num_draft_tokens")
    assert least * drafted < accepted <= drafted, (accepted, drafted)
    for p, answer in zip(PROMPTS, answers, strict=True):
        reference.check(p, answer)


def layers_of(llm):
    """The class of each layer's attention."""
    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return {name: type(layer.impl).__name__ for name, layer in context.items()}


@pytest.mark.parametrize(("method", "least"), [("eagle", 0.2), ("eagle3", 0), ("draft_model", 0.9)])
def test_drafts_of_a_model(model, tmp_path, method, least):
    folder, llama = model
    drafting = folder  # the same model: all drafts are right, if its pages are
    if method != "draft_model":
        drafting = tmp_path
        save_head(tmp_path, llama, 3 if method == "eagle3" else 1)
    drafts = {"method": method, "model": str(drafting), "num_speculative_tokens": DRAFTS}
    options = {"speculative_config": drafts, "disable_log_stats": False}
    with told() as lines, engine(folder, SETTINGS, **options) as llm:
        kinds = layers_of(llm)
        check(llm, Reference(llama, PRESET, exact_steps=False), least)
    assert len(kinds) == (6 if method == "draft_model" else 4)
    assert set(kinds.values()) == {"TurboQuantImpl"}
    assert len(lines) == 1 and lines[0].startswith(f"TurboQuant: preset {PRESET}")


def test_drafts_by_a_layer_of_the_model(tmp_path):
    """MTP."""
    mimo = save_mimo(tmp_path)
    options = {
        "speculative_config": {"method": "mtp", "num_speculative_tokens": DRAFTS},
        "disable_log_stats": False,
    }
    with engine(tmp_path, {**SETTINGS, "centers": "none"}, **options) as llm:
        assert [*layers_of(llm).values()] == ["TurboQuantImpl"] * 4
        check(llm, Reference(mimo, PRESET, exact_steps=False), 0.2)


def save_gemma(folder, drafting):
    """A Gemma 4, and its assistant, whose layers read the keys of the model's last ones."""
    kinds = ["sliding_attention", "full_attention"]
    heads = {"head_dim": 32, "global_head_dim": 64, "sliding_window": 24}
    shape = {**SHAPE, **heads, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    text = {**shape, "num_hidden_layers": 2, "layer_types": kinds}
    config = transformers.Gemma4TextConfig(
        **{**shape, "num_hidden_layers": 4, "layer_types": kinds * 2}
    )
    gemma = save(randomise(transformers.Gemma4ForCausalLM(config)), folder)
    assistant = transformers.Gemma4AssistantConfig(
        text_config={"model_type": "gemma4_text", **text, "num_kv_shared_layers": 2},
        backbone_hidden_size=SHAPE["hidden_size"],
    )
    save(randomise(transformers.Gemma4AssistantForCausalLM(assistant)), drafting)
    return gemma


@pytest.mark.skipif(
    INTERFACE.page_bytes == "layer",
    reason="vLLM 0.27.1 does not read the assistant's configuration of newer transformers",
)
def test_drafts_that_read_the_keys_of_the_model(tmp_path):
    """vLLM tells the assistant's layers so after it has made them."""
    drafting = tmp_path / "assistant"
    gemma = save_gemma(tmp_path, drafting)
    drafts = {"method": "mtp", "model": str(drafting), "num_speculative_tokens": DRAFTS}
    options = {"speculative_config": drafts, "disable_log_stats": False}
    if ON_GPU:
        options["dtype"] = "bfloat16"
    with told() as lines, engine(tmp_path, SETTINGS, **options) as llm:
        context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        impls = [layer.impl for layer in context.values()]
        answers = generate(llm, PROMPTS, TOKENS)
        assert metric(llm, "vllm:spec_decode_num_draft_tokens") > 0
    assert [impl.owner for impl in impls] == [None] * 4 + impls[2:4]
    assert len(lines) == 1
    reference = Reference(gemma, PRESET, exact_steps=False)
    for p, answer in zip(PROMPTS, answers, strict=True):
        reference.check(p, answer, near_tie=0.15 if ON_GPU else None)


@pytest.mark.skipif(not INTERFACE.latents, reason="refused: needs vLLM 0.32 or newer")
@pytest.mark.parametrize(
    ("preset", "cure"), [("k8v8", None), ("k5u", 'set "preset" to "k5v4u", which is k5u for')]
)
def test_keys_and_values_draft_for_latents(model, tmp_path, preset, cure):
    """As heads of EAGLE3 do for DeepSeek and Kimi."""
    folder, _ = model
    save_deepseek(tmp_path)
    drafts = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": DRAFTS}
    settings = {**SETTINGS, "preset": preset}
    options = {"speculative_config": drafts, "disable_log_stats": False, "block_size": 64}
    if ON_GPU:
        options["dtype"] = "bfloat16"
    if cure is not None:
        with pytest.raises(Exception, match=cure), engine(tmp_path, settings, **options):
            pass
        return
    with engine(tmp_path, settings, **options) as llm:
        assert [*layers_of(llm).values()] == [*["LatentImpl"] * 2, *["TurboQuantImpl"] * 3]
        answers = generate(llm, PROMPTS, TOKENS)
        assert metric(llm, "vllm:spec_decode_num_draft_tokens") > 0
    assert {len(answer) for answer in answers} == {TOKENS}
    if ON_GPU:  # 16 bits: of two tokens that are as likely, another batch may find the other
        return
    with engine(tmp_path, settings, block_size=64) as llm:
        alone = generate(llm, PROMPTS, TOKENS)
    assert answers == alone


@pytest.mark.skipif(ON_GPU, reason="GPUs have other backends")
def test_a_backend_of_their_own(model, tmp_path):
    """The user may leave drafts to vLLM's backend: pages of both kinds, side by side."""
    folder, llama = model
    save_head(tmp_path, llama, 1)
    drafts = {
        "method": "eagle",
        "model": str(tmp_path),
        "num_speculative_tokens": DRAFTS,
        "attention_backend": "CPU_ATTN",
    }
    options = {"speculative_config": drafts, "disable_log_stats": False, "block_size": 32}
    with engine(folder, SETTINGS, **options) as llm:
        kinds = layers_of(llm)
        check(llm, Reference(llama, PRESET, exact_steps=False), 0.2)
    assert sorted(kinds.values()) == ["CPUAttentionBackendImpl", *["TurboQuantImpl"] * 3]
