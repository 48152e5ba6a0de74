"""SGLang's scheduler over our pages: the tokens that the same codes give without SGLang."""

import pytest

pytest.importorskip("sglang", reason="needs SGLang: make sglang")

from tests.sglang.harness import engine, replay
from tests.vllm.harness import prompt, save_llama
from tests.vllm.reference import Reference

TOKENS = 12
WINDOW = 24
PRESET = "k5v4u"
PROMPTS = [prompt(n, seed=n) for n in (5, 40, 33, 90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_llama(folder)


@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("preset", ["k8v8", "k3v2"])
def test_prompts_of_a_batch(model, preset, window):
    folder, llama = model
    reference = Reference(llama, preset, window=window)
    with engine(folder, {"window": window}, f"turboquant:{preset}") as loop:
        answers = loop.generate(PROMPTS, TOKENS)
    for p, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer.tokens) == TOKENS
        replay(reference, p, answer)
