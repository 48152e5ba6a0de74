"""Models whose attention differs: windows, soft caps, biased keys; and layers with own presets."""

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make vllm")

import transformers

from tests.vllm.harness import (
    MEMORY,
    ON_GPU,
    engine,
    generate,
    pages_of,
    prompt,
    randomise,
    save,
    save_llama,
    told,
)
from tests.vllm.reference import Reference

TOKENS = 16
PROMPTS = [prompt(n, seed=n) for n in (9, 40, 70)]
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def test_sliding_windows_and_soft_caps(tmp_path):
    """Gemma 2: every other layer sees the last 24 tokens; pages of both kinds of layers."""
    config = transformers.Gemma2Config(
        **SHAPE,
        sliding_window=24,
        attn_logit_softcapping=5.0,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    gemma = randomise(transformers.Gemma2ForCausalLM(config))
    save(gemma, tmp_path)
    # vLLM refuses float16 for Gemma; in bfloat16 few codes would differ too often.
    preset, dtype = ("k8v8", "bfloat16") if ON_GPU else ("k5v4u", "float32")
    reference = Reference(gemma, preset)
    with engine(tmp_path, {"preset": preset, "learn": False}, dtype=dtype) as llm:
        answers = generate(llm, PROMPTS, TOKENS)
    for p, answer in zip(PROMPTS, answers, strict=True):
        reference.check(p, answer)


def test_attention_within_chunks(tmp_path):
    """Llama 4: three of four layers see a chunk of 48 tokens, of which vLLM makes a sequence."""
    config = transformers.Llama4TextConfig(
        **{**SHAPE, "num_hidden_layers": 4},
        intermediate_size_mlp=64,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=48,
        layer_types=["chunked_attention"] * 3 + ["full_attention"],
        no_rope_layers=[1, 1, 1, 0],
    )
    llama = randomise(transformers.Llama4ForCausalLM(config))
    save(llama, tmp_path)
    prompts = [prompt(n, seed=n) for n in (9, 47, 48, 49, 97, 200)]
    with engine(tmp_path, {"preset": "k8v8", "learn": False}) as llm:
        answers = generate(llm, prompts, TOKENS)

    def worst_gap(model):
        """By how much an answer's token is less likely than the model's choice."""
        gaps = []
        for p, answer in zip(prompts, answers, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([p + answer])).logits[0, len(p) - 1 : -1].double()
            chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            gaps.append((logits.amax(1) - chosen).max())
        return max(gaps)

    assert worst_gap(llama) < 0.1
    config.layer_types = ["full_attention"] * 4
    everywhere = transformers.Llama4ForCausalLM(config).eval()
    everywhere.load_state_dict(llama.state_dict())
    assert worst_gap(everywhere) > 0.5


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """A Qwen2 with large biases of keys, as its small models have."""
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    config = transformers.Qwen2Config(**{**shape, "hidden_size": 128})
    qwen = randomise(transformers.Qwen2ForCausalLM(config))
    with torch.no_grad():
        for layer in qwen.model.layers:
            layer.self_attn.k_proj.bias.normal_(0, 8)
    folder = tmp_path_factory.mktemp("qwen")
    save(qwen, folder)
    return folder, qwen


def test_centers_are_learned_from_the_first_prompt(biased):
    """From the tokens of the first step but the first four of each sequence, and never again."""
    folder, qwen = biased
    first = prompt(64, seed=64)
    learned: dict[int, torch.Tensor] = {}

    def center(layer: int, keys: torch.Tensor) -> torch.Tensor:
        return learned.setdefault(layer, keys[4:].mean(0))

    # Keys in 16 bits have other means, and find other codes: that moves logits by 0.2 of their
    # deviation, and the lack of centers by 2.
    preset, near_tie = ("k5v4u", 0.3) if ON_GPU else ("k4v4u", None)
    reference = Reference(qwen, preset, center=center)
    with engine(folder, {"preset": preset}) as llm, told() as lines:
        answers = [generate(llm, [p], TOKENS)[0] for p in (first, *PROMPTS)]
    for p, answer in zip((first, *PROMPTS), answers, strict=True):
        reference.check(p, answer, near_tie=near_tie)
    assert lines == ["TurboQuant: centers are the mean keys of the first prompt's 60 tokens"]
    with pytest.raises(AssertionError, match="below"):  # the reference can tell
        for p, answer in zip(PROMPTS, answers[1:], strict=True):
            Reference(qwen, preset).check(p, answer, near_tie=near_tie)


class Multimodal(torch.nn.Module):
    """A model with a language model inside, which vLLM makes from a copy of the configuration, as
    it does for models that see pictures."""

    def __init__(self, *, vllm_config, prefix=""):
        from vllm.model_executor.models.utils import init_vllm_registered_model

        super().__init__()
        self.language_model = init_vllm_registered_model(
            vllm_config,
            prefix="language_model",
            hf_config=vllm_config.model_config.hf_config,
            architectures=["Qwen2ForCausalLM"],
        )

    def embed_input_ids(self, input_ids):
        return self.language_model.embed_input_ids(input_ids)

    def forward(self, *args, **kwargs):
        return self.language_model(*args, **kwargs)

    def compute_logits(self, *args, **kwargs):
        return self.language_model.compute_logits(*args, **kwargs)

    def load_weights(self, weights):
        return {f"language_model.{name}" for name in self.language_model.load_weights(weights)}


def test_centers_are_learned_by_a_language_model_inside_another_model(biased):
    from vllm import ModelRegistry

    folder, qwen = biased
    first, learned = prompt(64, seed=64), {}

    def center(layer: int, keys: torch.Tensor) -> torch.Tensor:
        return learned.setdefault(layer, keys[4:].mean(0))

    ModelRegistry.register_model("Multimodal", Multimodal)
    preset, near_tie = ("k5v4u", 0.3) if ON_GPU else ("k4v4u", None)
    reference = Reference(qwen, preset, center=center)
    overrides = {"architectures": ["Multimodal"]}
    with told() as lines, engine(folder, {"preset": preset}, hf_overrides=overrides) as llm:
        answers = [generate(llm, [p], TOKENS)[0] for p in (first, *PROMPTS)]
    for p, answer in zip((first, *PROMPTS), answers, strict=True):
        reference.check(p, answer, near_tie=near_tie)
    assert len(lines) == 2 and lines[1].endswith("mean keys of the first prompt's 60 tokens")


def test_a_short_first_prompt_teaches_nothing(biased):
    folder, qwen = biased
    reference = Reference(qwen, "k8v8")
    prompts = [prompt(7, seed=7), PROMPTS[2]]
    with engine(folder, {"preset": "k8v8"}) as llm, told() as lines:
        answers = [generate(llm, [p], TOKENS)[0] for p in prompts]
    assert len(lines) == 1 and "too short to learn centers from (7 tokens, needed: 8)" in lines[0]
    for p, answer in zip(prompts, answers, strict=True):
        reference.check(p, answer)


@pytest.mark.parametrize("multimodal", [False, True])
def test_biased_keys_need_centers(biased, multimodal):
    """Refused where nothing is learned, unless the keys have 8 bits or that is what is wanted."""
    from vllm import ModelRegistry

    folder, _ = biased
    ModelRegistry.register_model("Multimodal", Multimodal)
    options = {"hf_overrides": {"architectures": ["Multimodal"]}} if multimodal else {}
    cure = r'calibrate MODEL TEXT, set "learn" to true, choose a preset with 8-bit keys, or set "c'
    with pytest.raises(Exception, match=cure):
        with engine(folder, {"preset": "k5v4u", "learn": False}, **options):
            pass
    for settings in ({"preset": "k8v4", "learn": False}, {"preset": "k5v4u", "centers": "none"}):
        with told() as lines, engine(folder, settings, **options):
            pass
        assert "Centers: none; seed" in lines[0]


def test_biased_keys_of_one_matrix_with_queries_and_values(tmp_path):
    """GPT-NeoX, which vLLM runs as transformers has it."""
    shape = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
    config = transformers.GPTNeoXConfig(**{**shape, "hidden_size": 128})
    save(randomise(transformers.GPTNeoXForCausalLM(config)), tmp_path)
    with pytest.raises(Exception, match="the keys of layer 0 have a bias"):
        with engine(tmp_path, {"preset": "k5v4u", "learn": False}):
            pass


def test_layers_that_run_twice_are_refused(tmp_path):
    """IQuest-LoopCoder's second run attends without keys of its own to those of the first one."""
    save_llama(tmp_path, hidden_size=128, num_attention_heads=4, num_hidden_layers=2)
    options = {
        "hf_overrides": {"architectures": ["IQuestLoopCoderForCausalLM"]},
        "load_format": "dummy",  # with weights that Llama has not
    }
    with pytest.raises(Exception, match=r"layers\.2\..* is one of several attentions of a layer"):
        with engine(tmp_path, {"learn": False}, **options):
            pass


def test_layers_with_presets_of_their_own(tmp_path):
    llama = save_llama(tmp_path)
    middle, last = ("k8v4", "k5v4u") if ON_GPU else ("k3v2", "k4v4")
    reference = Reference(llama, ["k8v8", middle, last])
    settings = {"preset": middle, "layers": {"0": "k8v8", "-1": last}, "learn": False}
    with engine(tmp_path, settings) as llm:
        answers = generate(llm, PROMPTS, TOKENS)
        pages = pages_of(llm)
    for p, answer in zip(PROMPTS, answers, strict=True):
        reference.check(p, answer)
    row = 2 * 32 * (2 if ON_GPU else 4)  # bytes of an exact first token in the model's dtype
    page = 2 * sum(16 * bytes_per_token(name) + row for name in reference.presets)
    assert MEMORY // page - pages in (0, 1)  # no padding


def test_unlike_layers_with_presets_of_their_own(tmp_path):
    """Beside layers with windows one with more bits takes a page of two others, in one pool: of
    4 layers a token of 5 * 80 bytes and KV head, which were 4 * 136."""
    shape = {**SHAPE, "num_hidden_layers": 4}
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    config = transformers.Gemma2Config(
        **shape, sliding_window=24, query_pre_attn_scalar=32, layer_types=kinds
    )
    gemma = randomise(transformers.Gemma2ForCausalLM(config))
    save(gemma, tmp_path)
    presets = ["k8v8", "k5v4u", "k5v4u", "k5v4u"]
    settings = {"preset": "k5v4u", "layers": {"0": "k8v8"}, "learn": False}
    reference, near_tie = Reference(gemma, presets), 0.3 if ON_GPU else None
    options = {"dtype": "bfloat16"} if ON_GPU else {}
    with told() as lines, engine(tmp_path, settings, block_size=64, **options) as llm:
        answers = [*generate(llm, PROMPTS, TOKENS), *generate(llm, [PROMPTS[2]], TOKENS)]
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        sizes = {layer.kv_cache[0].nbytes / layer.kv_cache.shape[2] for layer in layers.values()}
    for p, answer in zip((*PROMPTS, PROMPTS[2]), answers, strict=True):
        reference.check(p, answer, near_tie=near_tie)
    assert max(sizes) == 2 * min(sizes)
    row = 0 if "first tokens" not in lines[0] else -(-2 * 32 * (2 if ON_GPU else 4) // 64)
    small = 2 * (bytes_per_token("k5v4u") + row)
    assert min(sizes) == small
    assert f"{5 * small / 4:,.0f} bytes per token and layer on this rank, " in lines[0]
    assert "of them to make pages alike; " in lines[0]


def bytes_per_token(preset: str) -> int:
    import torch_turboquant as tt

    return tt.preset(preset, 32).bytes_per_token


@pytest.mark.parametrize("first_token", ["exact", "codes"])
@pytest.mark.parametrize("preset", ["k8v8", "k5v4u", "k3v2"])
def test_tokens_that_fit(tmp_path, preset, first_token):
    """In the same memory as many as the bits say."""
    import torch_turboquant as tt

    save_llama(tmp_path, head_dim=128, num_hidden_layers=2)
    with engine(tmp_path, None, dtype="bfloat16", block_size=32) as llm:
        plain = pages_of(llm) * 32
    settings = {"preset": preset, "first_token": first_token}
    with engine(tmp_path, settings, dtype="bfloat16", block_size=32) as llm:
        packed = pages_of(llm) * 32
    bits = tt.preset(preset, 128).bits_per_value + (16 / 32 if first_token == "exact" else 0)
    assert packed / plain == pytest.approx(16 / bits, rel=0.02)
