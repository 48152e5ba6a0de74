"""vLLM's server with our pages: another process, which finds the plug-in by its entry point.

It is started as a user starts it, and asked over HTTP.
"""

import itertools
import json
import re
import time

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm")
pytest.importorskip("uvicorn", reason="needs what vLLM's server needs: make vllm")

from tests.helpers import load_script
from tests.server import at_once, events, started
from tests.vllm.harness import MEMORY, ON_GPU, prompt, save_llama
from tests.vllm.reference import Reference

pytestmark = pytest.mark.skipif(ON_GPU, reason="the tests of engines run there")

PRESET, TOKENS = "k5v4u", 24


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    llama = save_llama(folder)
    bench = load_script("benchmarks/bench_vllm_serve.py")
    bench.write_tokenizer(folder, llama.config.vocab_size)
    return folder, llama


@pytest.fixture(scope="module")
def server(model):
    folder, _ = model
    settings = {"turboquant": {"preset": PRESET, "learn": False}}
    options = [
        *("--model", str(folder), "--attention-backend", "CUSTOM"),
        *("--additional-config", json.dumps(settings), "--dtype", "float32"),
        *("--max-model-len", "512", "--block-size", "16", "--max-num-seqs", "8"),
        *("--kv-cache-memory-bytes", str(MEMORY // 8), "--enforce-eager", "--seed", "0"),
        *("--served-model-name", "model"),
    ]
    module = "vllm.entrypoints.openai.api_server"
    with started(module, options, folder, VLLM_ENABLE_V1_MULTIPROCESSING="1") as client:
        assert f"TurboQuant: preset {PRESET}" in (folder / "server.log").read_text()
        yield client


def question(prompt):
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS}
    return {"model": "model", "prompt": prompt, "return_token_ids": True, **greedy}


def answer(server, prompt):
    return server.ask("v1/completions", **question(prompt))["choices"][0]["token_ids"]


def settled(server, prompt):
    """An answer that finds pages in the prefix cache, whatever has been asked before."""
    answer(server, prompt)
    return answer(server, prompt)


def test_answers_to_several_clients(server, model):
    """The tokens that the same codes give without vLLM."""
    prompts = [prompt(n, seed=n) for n in (5, 40, 33, 90)]
    reference = Reference(model[1], PRESET)
    answers = at_once(lambda p: answer(server, p), prompts)
    for p, found in zip(prompts, answers, strict=True):
        reference.check(p, found)


def test_streams(server):
    p = prompt(40, seed=100)
    answer(server, p)  # then both find its pages in the prefix cache
    with server.open("v1/completions", **question(p), stream=True) as lines:
        tokens = [event["choices"][0]["token_ids"] or [] for event in events(lines)]
    assert len(tokens) > 1
    assert list(itertools.chain(*tokens)) == answer(server, p)


def number(server, name):
    """The sum of a number that the server counts."""
    found = re.findall(rf"^{name} (\S+)$", server.text("metrics"), re.MULTILINE)
    assert found
    return sum(map(float, found))


def test_clients_that_leave(server):
    """Their pages are others' afterwards, and no request is left."""
    prompts = [prompt(n, seed=200 + n) for n in (20, 70)]
    right = [settled(server, p) for p in prompts]
    tokens = "vllm:generation_tokens_total\\{.*\\}"
    before = number(server, tokens)
    for _ in range(4):
        left = [{**question(prompt(200, seed=n)), "max_tokens": 250} for n in range(6)]
        streams = [server.open("v1/completions", **asked, stream=True) for asked in left]
        for stream in streams:
            assert stream.readline().startswith(b"data: ")
            stream.close()
    assert [settled(server, p) for p in prompts] == right
    end = time.monotonic() + 60
    while number(server, "vllm:num_requests_running\\{.*\\}"):
        assert time.monotonic() < end
        time.sleep(0.2)
    assert number(server, tokens) - before < 4 * 6 * 250 / 2  # nobody has generated for them
