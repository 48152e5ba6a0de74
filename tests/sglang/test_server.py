"""SGLang's server with our pages: another process, which is asked over HTTP."""

import json

import pytest

pytest.importorskip("sglang", reason="needs SGLang: make sglang")
pytest.importorskip("uvicorn", reason="needs what SGLang's server needs: make sglang")

from tests.server import at_once, events, started
from tests.sglang.harness import ON_GPU, arguments
from tests.vllm.harness import prompt, save_llama
from tests.vllm.reference import Reference

pytestmark = pytest.mark.skipif(ON_GPU, reason="the tests of engines run there")

PRESET, TOKENS = "k8v8", 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_llama(folder, head_dim=64)


@pytest.fixture(scope="module")
def server(model):
    folder, _ = model
    options = []
    for name, value in arguments(folder, {"window": 16}, f"turboquant:{PRESET}").items():
        flag = f"--{name.replace('_', '-')}"
        options += [flag] if value is True else [] if value is False else [flag, str(value)]
    with started("sglang.launch_server", options, folder) as client:
        yield client


def question(prompt):
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling}


def answer(server, prompt):
    return server.ask("generate", **question(prompt))["output_ids"]


def settled(server, prompt):
    """An answer that finds pages in the radix cache, whatever has been asked before."""
    answer(server, prompt)
    return answer(server, prompt)


def test_answers_to_several_clients(server, model):
    """The tokens that the same codes give without SGLang."""
    prompts = [prompt(n, seed=n) for n in (5, 40, 33, 90)]
    reference = Reference(model[1], PRESET, window=16)
    answers = at_once(lambda p: answer(server, p), prompts)
    for p, found in zip(prompts, answers, strict=True):
        reference.check(p, found)


def test_streams(server):
    p = prompt(40, seed=100)
    answer(server, p)  # then both find its pages in the radix cache
    with server.open("generate", **question(p), stream=True) as lines:
        found = [event["output_ids"] for event in events(lines)]
    assert len(found) > 1
    assert found[-1] == answer(server, p)


def test_clients_that_leave(server):
    """Their pages are others' afterwards."""
    prompts = [prompt(n, seed=200 + n) for n in (20, 70)]
    right = [settled(server, p) for p in prompts]
    for _ in range(2):
        left = [question(prompt(200, seed=n)) for n in range(6)]
        streams = [server.open("generate", **asked, stream=True) for asked in left]
        for stream in streams:
            assert json.loads(stream.readline().removeprefix(b"data: "))["output_ids"]
            stream.close()
    assert [settled(server, p) for p in prompts] == right
