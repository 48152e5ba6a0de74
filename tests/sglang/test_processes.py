"""An engine as users start it: in processes of its own, which find the plug-in by themselves."""

import os

import pytest

sglang = pytest.importorskip("sglang", reason="needs SGLang: make sglang")

import torch

from tests.helpers import load_script
from tests.sglang.harness import ON_GPU, arguments, engine
from tests.vllm.harness import prompt, save_llama
from tests.vllm.reference import Reference
from torch_turboquant import centers as files

TOKENS = 8


def test_an_engine(tmp_path):
    """Also with streams, several answers to a prompt, and the probabilities of a prompt."""
    llama = save_llama(tmp_path, head_dim=64)
    prompts = [prompt(n, seed=n) for n in (30, 70)]
    chosen = (tmp_path, {"window": 16}, "turboquant:k8v8")
    with engine(*chosen) as loop:
        expected = [answer.tokens for answer in loop.generate(prompts, TOKENS)]
    llm = sglang.Engine(**arguments(*chosen))
    try:
        sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        found = llm.generate(input_ids=prompts, sampling_params=sampling)
        again = llm.generate(input_ids=prompts[1], sampling_params=sampling)
        samples = llm.generate(input_ids=prompts[0], sampling_params={**sampling, "n": 2})
        stream = llm.generate(input_ids=prompts[0], sampling_params=sampling, stream=True)
        streamed = [answer["output_ids"] for answer in stream]
        asked = {"return_logprob": True, "logprob_start_len": 0}
        scored = llm.generate(input_ids=prompts[1], sampling_params=sampling, **asked)
    finally:
        llm.shutdown()
    assert [answer["output_ids"] for answer in found] == expected
    assert [answer["output_ids"] for answer in samples] == expected[:1] * 2
    assert len(streamed) > 1
    assert streamed[-1] == expected[0]
    with torch.no_grad():
        logits = llama(torch.tensor([prompts[1]])).logits[0].log_softmax(-1)
    seen = logits[:-1].gather(1, torch.tensor(prompts[1])[1:, None])[:, 0]
    told = [logprob for logprob, *_ in scored["meta_info"]["input_token_logprobs"][1:]]
    assert (torch.tensor(told) - seen).abs().max() < (0.1 if ON_GPU else 1e-4)
    assert again["meta_info"]["cached_tokens"] == (70 - 16) // 16 * 16
    assert len(again["output_ids"]) == TOKENS


def test_the_example(tmp_path):
    """Every turn finds the turns before it."""
    options = arguments(tmp_path, None, "")
    for name in ("model_path", "attention_backend", "page_size", "context_length"):
        del options[name]
    cached = load_script("examples/sglang_generate.py").main(["--tokens", "40"], **options)
    # Of 139 and 279 tokens that are stored, whole pages, and not the last 64 of the prompt.
    assert cached == [0, 128, 256]


@pytest.mark.skipif(
    ON_GPU and torch.cuda.device_count() < 2, reason="each process needs a GPU of its own"
)
def test_two_processes(tmp_path, monkeypatch):
    """Each stores its own heads, with their centers; layers have presets of their own."""
    last = (os.cpu_count() or 1) - 1
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"0|{last}")  # a core for each
    llama = save_llama(tmp_path, head_dim=64)
    generator = torch.Generator().manual_seed(5)
    centers = [torch.randn(2, 64, generator=generator) for _ in range(3)]
    file = tmp_path / "centers.safetensors"
    files.save(file, centers, llama.config)
    presets = ["k8v8", "k5v4u", "k8v4"]
    reference = Reference(llama, presets, center=lambda layer, keys: centers[layer], window=16)
    chosen = {"0": presets[0], "-1": presets[2]}
    settings = {"window": 16, "layers": chosen, "centers": str(file)}
    prompts = [prompt(n, seed=n) for n in (9, 70, 40)]
    llm = sglang.Engine(**arguments(tmp_path, settings, "turboquant", tp_size=2))
    try:
        sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
        found = llm.generate(input_ids=prompts, sampling_params=sampling)
        again = llm.generate(input_ids=[prompts[1]], sampling_params=sampling)
    finally:
        llm.shutdown()
    for p, answer in zip(prompts, found, strict=True):
        reference.check(p, answer["output_ids"])
    assert again[0]["meta_info"]["cached_tokens"] == (70 - 16) // 16 * 16
