"""vLLM's server with our pages: another process, which finds the plug-in by its entry point.

It is started as a user starts it, and asked over HTTP.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm")
pytest.importorskip("uvicorn", reason="needs what vLLM's server needs: make vllm")

from tests.helpers import load_script
from tests.vllm.harness import MEMORY, ON_GPU, prompt, save_llama
from tests.vllm.reference import Reference

pytestmark = pytest.mark.skipif(ON_GPU, reason="the tests of engines run there")

PRESET, TOKENS, START_S = "k5v4u", 24, 300
PROMPTS = [prompt(n, seed=n) for n in (5, 40, 33, 90)]


class Server:
    """A running server, and its client."""

    def __init__(self, model, port):
        self.model, self.address = model, f"http://127.0.0.1:{port}"

    def open(self, page, **asked):
        body = json.dumps(asked).encode() if asked else None
        request = urllib.request.Request(
            f"{self.address}/{page}", body, {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=60)

    def stream(self, prompt):
        """An answer that comes token by token."""
        return self.open("v1/completions", **self.question(prompt), stream=True)

    def answer(self, prompt):
        with self.open("v1/completions", **self.question(prompt)) as found:
            return json.load(found)["choices"][0]["token_ids"]

    @staticmethod
    def question(prompt):
        greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS}
        return {"model": "model", "prompt": prompt, "return_token_ids": True, **greedy}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    bench = load_script("benchmarks/bench_vllm_serve.py")
    folder = tmp_path_factory.mktemp("llama")
    model, port, log = save_llama(folder), bench.free_port(), folder / "server.log"
    bench.write_tokenizer(folder, model.config.vocab_size)
    settings = {"turboquant": {"preset": PRESET, "learn": False}}
    command = [
        *(sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(folder), "--attention-backend", "CUSTOM"),
        *("--additional-config", json.dumps(settings), "--dtype", "float32"),
        *("--max-model-len", "512", "--block-size", "16", "--max-num-seqs", "8"),
        *("--kv-cache-memory-bytes", str(MEMORY), "--enforce-eager", "--seed", "0"),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model"),
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            cwd=folder,
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            start_new_session=True,
        )
    found, begun = Server(model, port), time.monotonic()
    try:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() - begun < START_S, log.read_text()[-3000:]
            try:
                found.open("health").close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        assert f"TurboQuant: preset {PRESET}" in log.read_text()
        yield found
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_answers_to_several_clients(server):
    """The tokens that the same codes give without vLLM."""
    reference = Reference(server.model, PRESET)
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        answers = list(clients.map(server.answer, PROMPTS))
    for p, answer in zip(PROMPTS, answers, strict=True):
        reference.check(p, answer)


def test_streams(server):
    p = prompt(40, seed=100)
    server.answer(p)  # then both find its pages in the prefix cache
    with server.stream(p) as lines:
        events = [line.decode().removeprefix("data: ") for line in lines if line.strip()]
    assert events.pop().strip() == "[DONE]"
    tokens = [json.loads(event)["choices"][0]["token_ids"] or [] for event in events]
    assert len(tokens) > 1
    assert list(itertools.chain(*tokens)) == server.answer(p)


def test_clients_that_leave(server):
    """Their pages are others' afterwards, and no request is left."""
    prompts = [prompt(n, seed=200 + n) for n in (20, 70)]
    for p in prompts:
        server.answer(p)
    right = [server.answer(p) for p in prompts]  # from the prefix cache, as in the end
    for _ in range(4):
        streams = [server.stream(prompt(200, seed=n)) for n in range(6)]
        for stream in streams:
            assert stream.readline().startswith(b"data: ")
            stream.close()
    assert [server.answer(p) for p in prompts] == right
    with server.open("metrics") as page:
        lines = page.read().decode().splitlines()
    running = [line for line in lines if line.startswith("vllm:num_requests_running{")]
    assert running and all(line.endswith(" 0.0") for line in running)
