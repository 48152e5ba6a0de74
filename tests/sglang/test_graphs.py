"""Decode steps in CUDA graphs are those without them, bit by bit."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: make sglang")

from tests.sglang.harness import Loop, engine
from tests.vllm.harness import prompt, save_llama

pytestmark = pytest.mark.cuda

PROMPTS = [prompt(n, seed=n) for n in (5, 40, 90)]  # three of a graph's four sequences
HIT = [*PROMPTS[2][:80], *prompt(30, seed=7)]
TOKENS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_llama(path, head_dim=128)
    return path


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
def test_steps_in_graphs(folder, preset, window):
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
