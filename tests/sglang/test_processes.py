"""An engine as users start it: in processes of its own, which find the plug-in by themselves."""

import pytest

sglang = pytest.importorskip("sglang", reason="needs SGLang: make sglang")

from tests.helpers import load_script
from tests.sglang.harness import arguments, engine
from tests.vllm.harness import prompt, save_llama

TOKENS = 8


def test_an_engine(tmp_path):
    save_llama(tmp_path, head_dim=64)
    prompts = [prompt(n, seed=n) for n in (30, 70)]
    chosen = (tmp_path, {"window": 16}, "turboquant:k8v8")
    with engine(*chosen) as loop:
        expected = [answer.tokens for answer in loop.generate(prompts, TOKENS)]
    llm = sglang.Engine(**arguments(*chosen))
    try:
        sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        found = llm.generate(input_ids=prompts, sampling_params=sampling)
        again = llm.generate(input_ids=prompts[1], sampling_params=sampling)
    finally:
        llm.shutdown()
    assert [answer["output_ids"] for answer in found] == expected
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
