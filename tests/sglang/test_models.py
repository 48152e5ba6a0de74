"""Models whose attention differs: windows, soft caps, biased keys; and layers with own presets."""

import json

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: make sglang")

import transformers

import torch_turboquant as tt
from tests.sglang.harness import ON_GPU, SHAPE, engine, in_32_bits, replay, save_gemma, told
from tests.vllm.harness import prompt, randomise, save, save_llama
from tests.vllm.reference import Reference
from torch_turboquant import centers as files
from torch_turboquant.integrations.sglang.backend import TurboQuantBackend

TOKENS = 12
PROMPTS = [prompt(n, seed=n) for n in (9, 40, 70)]


@pytest.mark.parametrize("window", [0, 8, 40])
def test_sliding_windows_and_soft_caps(tmp_path, window):
    """Gemma 2: every other layer sees the last 24 tokens, all of them in one pool."""
    gemma = save_gemma(tmp_path)
    preset, dtype = ("k8v8", "bfloat16") if ON_GPU else ("k5v4u", "float32")
    reference = Reference(gemma, preset, window=window)
    settings = {"preset": preset, "window": window}
    with engine(tmp_path, settings, dtype=dtype, chunked_prefill_size=32) as loop:
        answers = loop.generate(PROMPTS, TOKENS)
        hit = [*PROMPTS[2], *prompt(40, seed=5)]
        (again,) = loop.generate([hit], TOKENS)
    for p, answer in zip(PROMPTS, answers, strict=True):
        replay(reference, p, answer)
    assert again.cached == 64
    replay(reference, hit, again, answers[2].calls)


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """A Qwen2 with large biases of keys, as its small models have."""
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    qwen = randomise(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape)))
    with torch.no_grad():
        for layer in qwen.model.layers:
            layer.self_attn.k_proj.bias.normal_(0, 8)
    folder = tmp_path_factory.mktemp("qwen")
    save(qwen, folder)
    return folder, qwen


def test_biased_keys_need_centers(biased):
    folder, qwen = biased
    with (
        pytest.raises(ValueError, match="the keys of layer 0 have a bias, which 5-bit keys"),
        engine(folder),
    ):
        pass
    for settings in ({"preset": "k8v4"}, {"centers": "none"}):
        with engine(folder, settings) as loop:
            (answer,) = loop.generate([PROMPTS[1]], TOKENS)
        reference = Reference(qwen, settings.get("preset", "k5v4u"), window=64)
        replay(reference, PROMPTS[1], answer)


@in_32_bits
def test_a_file_of_centers(biased, tmp_path):
    folder, qwen = biased
    generator = torch.Generator().manual_seed(5)
    bias = [layer.self_attn.k_proj.bias.detach().view(2, 64) for layer in qwen.model.layers]
    centers = [b + torch.randn(b.shape, generator=generator) for b in bias]
    file = tmp_path / "centers.safetensors"
    files.save(file, centers, qwen.config)
    reference = Reference(qwen, "k4v4", center=lambda layer, keys: centers[layer], window=16)
    settings = {"preset": "k4v4", "centers": str(file), "window": 16}
    with told() as lines, engine(folder, settings) as loop:
        answers = loop.generate(PROMPTS, TOKENS)
    assert f"Centers: centers from {file} (sha256 " in lines[0]
    for p, answer in zip(PROMPTS, answers, strict=True):
        replay(reference, p, answer)


def test_layers_that_run_twice_are_refused(tmp_path):
    """IQuest-LoopCoder has an attention of each layer for every run of it."""
    save_llama(tmp_path, hidden_size=128, num_attention_heads=4, num_hidden_layers=2)
    other = {"architectures": ["IQuestLoopCoderForCausalLM"], "loop_num": 2}
    options = {"json_model_override_args": json.dumps(other), "load_format": "dummy"}
    with pytest.raises(ValueError, match="layers with several attentions are not supported"):
        with engine(tmp_path, **options):
            pass


def test_layers_with_presets_of_their_own(tmp_path):
    llama = save_llama(tmp_path, head_dim=64)
    presets = ["k8v8", "k3v2", "k8v4"]
    reference = Reference(llama, presets, window=16)
    settings = {"preset": "k3v2", "layers": {"0": "k8v8", "-1": "k8v4"}, "window": 16}
    with told() as lines, engine(tmp_path, settings) as loop:
        answers = loop.generate(PROMPTS, TOKENS)
        bytes_of = [pages[0, 0, 0].numel() for pages in loop.pool.pages]
    assert "preset k3v2 (layers 0: k8v8, -1: k8v4)" in lines[0]
    row = 2 * 64 * (2 if ON_GPU else 4) // 16  # a page's exact first token, of each of its tokens
    assert bytes_of == [tt.preset(name, 64).bytes_per_token + row for name in presets]
    for p, answer in zip(PROMPTS, answers, strict=True):
        replay(reference, p, answer)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(
        vocab_size=128, n_embd=256, n_layer=2, n_head=4, eos_token_id=None, bos_token_id=None
    )
    return folder, save(randomise(transformers.GPT2LMHeadModel(config)), folder)


def test_biased_keys_of_a_projection_with_a_name_of_its_own(gpt2):
    folder, _ = gpt2
    with (
        pytest.raises(ValueError, match="the keys of layer 0 have a bias, which 5-bit keys"),
        engine(folder),
    ):
        pass


def test_a_model_that_runs_with_gradients(gpt2):
    """SGLang turns them off in its event loop, and not where it records graphs."""
    folder, model = gpt2
    reference = Reference(model, "k8v8", window=16)
    with engine(folder, {"preset": "k8v8", "window": 16}) as loop:
        answers = loop.generate(PROMPTS, TOKENS)
    for p, answer in zip(PROMPTS, answers, strict=True):
        replay(reference, p, answer)


@in_32_bits
def test_a_model_of_transformers(tmp_path):
    """SGLang calls the attention of its layers by number, and learns its scale in a call."""
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    config = transformers.GraniteConfig(**shape, attention_multiplier=0.2)
    model = save(randomise(transformers.GraniteForCausalLM(config)), tmp_path)
    reference = Reference(model, "k5v4u", window=16)
    settings = {"preset": "k5v4u", "window": 16}
    with engine(tmp_path, settings, model_impl="transformers") as loop:
        answers = loop.generate(PROMPTS, TOKENS)
    for p, answer in zip(PROMPTS, answers, strict=True):
        replay(reference, p, answer)


def test_biased_keys_of_a_model_of_transformers(biased):
    folder, _ = biased
    with (
        pytest.raises(ValueError, match="the keys of layer 0 have a bias, which 5-bit keys"),
        engine(folder, model_impl="transformers"),
    ):
        pass


def test_no_attention_is_found():
    """A model that keeps its layers where nobody looks is refused at start."""
    backend = object.__new__(TurboQuantBackend)
    with pytest.raises(ValueError, match="no attention is found in Linear: choose another"):
        backend._bind(torch.nn.Linear(1, 1), requests=1)
