"""Decode steps in CUDA graphs are those without, bit by bit; prompts in CUDA graphs are right."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: make sglang")

from tests.sglang.harness import Loop, engine, replay
from tests.vllm.harness import prompt, save_llama
from tests.vllm.reference import Reference

pytestmark = pytest.mark.cuda

PROMPTS = [prompt(n, seed=n) for n in (5, 40, 90)]  # three of a graph's four sequences
HIT = [*PROMPTS[2][:80], *prompt(30, seed=7)]
TOKENS = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    return path, save_llama(path, head_dim=128)


@contextmanager
def logits_of_steps(loop: Loop) -> Iterator[list[torch.Tensor]]:
    """The logits of every decode step."""
    worker = loop.scheduler.tp_worker
    forward, found = worker.forward_batch_generation, []

    def watch(batch, *more, **options):
        result = forward(batch, *more, **options)
        if batch.forward_mode.is_decode():
            found.append(result.logits_output.next_token_logits.clone())
        return result

    worker.forward_batch_generation = watch
    try:
        yield found
    finally:
        worker.forward_batch_generation = forward


@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize("preset", ["k5v4u", "k4v2"])
def test_steps_in_graphs(model, preset, window):
    folder, _ = model
    settings = {"preset": preset, "window": window}
    found = []
    with engine(folder, settings, dtype="bfloat16", max_running_requests=4) as loop:
        runner = loop.scheduler.tp_worker.model_runner
        for graphs in (runner.decode_cuda_graph_runner, None):
            runner.decode_cuda_graph_runner = graphs
            loop.flush()
            before = loop.graphs
            with logits_of_steps(loop) as logits:
                answers = loop.generate(PROMPTS, TOKENS) + loop.generate([HIT], TOKENS)
            assert answers[3].cached > 0
            assert loop.graphs - before == (len(logits) if graphs else 0)
            found.append(([answer.tokens for answer in answers], logits))
    (tokens, in_graphs), (others, without) = found
    assert tokens == others
    assert len(in_graphs) == len(without) == 2 * (TOKENS - 1)
    for a, b in zip(in_graphs, without, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_prompts_in_graphs(model):
    """As SGLang computes prompts by default: in graphs that are cut where attention is. In chunks,
    beside decoding requests, behind a prefix of the tree, of lengths that no graph has."""
    folder, llama = model
    reference = Reference(llama, "k8v8", window=24)
    options = {"chunked_prefill_size": 64, "enable_mixed_chunk": True}
    with engine(folder, {"preset": "k8v8", "window": 24}, **options) as loop:
        answers = loop.generate([*PROMPTS, prompt(150, seed=150)], TOKENS)
        (later,) = loop.generate([HIT], TOKENS)
        assert loop.mixed > 0
        assert loop.prompt_graphs > 4
    for p, answer in zip([*PROMPTS, prompt(150, seed=150)], answers, strict=True):
        replay(reference, p, answer)
    assert later.cached > 0
    replay(reference, HIT, later, answers[2].calls)
