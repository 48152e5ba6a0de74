"""A model whose heads or layers are divided among processes."""

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make vllm")

from tests.vllm.harness import ON_GPU, engine, generate, prompt, save_llama
from tests.vllm.reference import Reference

TOKENS = 12
PRESETS = ["k8v8", "k5v4u", "k5v4u", "k4v4"]
PROMPTS = [prompt(n, seed=n) for n in (64, 5, 40)]
# Without a warm-up, which it leaves out where nothing is compiled, vLLM's last pipeline stage has
# no room for what it receives.
TRACED = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}


@pytest.mark.skipif(
    ON_GPU and torch.cuda.device_count() < 2, reason="each process needs a GPU of its own"
)
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_two_processes(tmp_path, kind):
    """Each stores its own heads or layers, with their presets and the centers that it learns."""
    llama = save_llama(tmp_path, num_hidden_layers=4)
    learned: dict[int, torch.Tensor] = {}

    def center(layer: int, keys: torch.Tensor) -> torch.Tensor:
        return learned.setdefault(layer, keys[4:].mean(0))

    reference = Reference(llama, PRESETS, center=center)
    settings = {"preset": "k5v4u", "layers": {"0": "k8v8", "-1": "k4v4"}}
    options = {f"{kind}_parallel_size": 2, "distributed_executor_backend": "mp"}
    if kind == "pipeline" and not ON_GPU:
        options |= TRACED
    with engine(tmp_path, settings, **options) as llm:
        alone = [generate(llm, [p], TOKENS)[0] for p in PROMPTS]
        together = generate(llm, [p[::-1] for p in PROMPTS], TOKENS)
    for p, answer in zip(PROMPTS, alone, strict=True):
        reference.check(p, answer)
    for p, answer in zip(PROMPTS, together, strict=True):
        reference.check(p[::-1], answer)
