"""SGLang's engine with several KV caches: times of decode steps and prompts, and how much fits.

The model has the shape of Llama-3.1-8B and random weights, which do not change the times; every
engine gets the same share of the GPU's memory, as SGLang divides it. The contestants:

    k5v4u, k4v4u, ...     our backend with this preset; with :window0 without exact tails
    triton, triton:fp8    SGLang's attention in Triton, with caches of bf16 and of fp8 (e4m3)
    fa3, fa3:fp8          FlashAttention 3, where SGLang's package of kernels has it
    flashinfer            where the package flashinfer is

Each is an engine in a process of its own, which is imported while the one before is measured. It
measures these points:

    memory                the tokens that SGLang says it has room for (max_total_num_tokens)
    16x32768              a decode step of 16 sequences that have 32,768 tokens each
    prompt8192            a prompt of 8,192 tokens, in chunks as SGLang makes them by default
    hit8192:100           100 new tokens behind 8,192 that the prefix tree has
    serve64x16384:512     clients that ask again as soon as they are answered: requests and tokens
                          per second, times of tokens; turns64x16384:256 and mix256 are others
                          (serving.py)
    graphs                whether steps in CUDA graphs are those without, bit by bit

Requests go through SGLang's own scheduler with its overlapped loop; the time of a step is the time
between the tokens of two steps as the scheduler gets them (the median), in CUDA graphs. The prompts
of decode steps run through one layer of the model only, and the pages of all layers are filled with
copies of that layer's, since the values do not change the times.

With --tensor-parallel the engine is SGLang's own, in processes of its own, and measures decode
steps only: the time of many tokens less that of few, behind prompts that the prefix tree has. The
weights are those of SGLang's loader then. --shape 70b-cut has the layers of Llama-3.1-70B.

    python benchmarks/bench_sglang.py                    all, into results/h200_sglang.json
    python benchmarks/bench_sglang.py --configs triton,k5v4u --points 16x32768,1x8192
    python benchmarks/bench_sglang.py --out FOLDER       result file and the engines' output there
    python benchmarks/bench_sglang.py --device cpu       a tiny model, only printed: a try

Every row is written as soon as it is measured. Older rows of the same device stay until they are
measured again. It needs SGLang, which pins the version of torch.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common
import engines
import serving
import torch
from engines import Engine, make_prompts

NAME = "h200_sglang"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
CONFIGS = ("k5v4u", "fa3", "fa3:fp8", "k4v4u", "k4v4", "k4v2", "triton")
# What matters most comes first: a run that is stopped has it.
POINTS = (
    "16x32768,64x8192,1x8192,1x100,16x4096,1x131072,16x1024,64x100,16x100,64x1024,64x4096,16x8192,"
    "16x16384,1x32768,1x1024,1x4096,1x16384,prompt8192,prompt32768,hit8192:100,graphs"
)
TINY_POINTS = "2x200,1x100,prompt200,hit128:100"
STEPS = 64
TRIES = 4  # of an engine in processes of its own, whose requests take their time to arrive
PROMPTS, PROMPTS_FOR = 4, 2.0  # of one length: at most so many, begun in so many seconds
PAGE = 64


@dataclass(frozen=True)
class Point:
    """One thing to measure in an engine."""

    text: str
    kind: str  # decode, prompt, hit, graphs, load
    sequences: int
    context: int
    new: int  # tokens behind a hit
    load: serving.Load | None = None

    @property
    def longest(self) -> int:
        """Tokens of its longest prompt, with all that clients get."""
        return self.load.longest if self.load else self.context + self.new

    @property
    def batches(self) -> list[int]:
        """Numbers of sequences that decode together."""
        return self.load.batches() if self.load else [self.sequences]

    @staticmethod
    def parse(text: str) -> Point:
        """Of "16x32768", "prompt8192", "hit8192:100", "graphs"."""
        if text == "graphs":
            return Point(text, text, 5, 700, 0)
        load = serving.Load.parse(text)
        if load:
            return Point(text, "load", load.clients, load.context, 0, load)
        found = re.fullmatch(r"(?:(\d+)x(\d+))|(?:(prompt|hit)(\d+)(?::(\d+))?)", text)
        if not found:
            raise SystemExit(f"{text!r} is no point; write 16x32768, prompt8192, hit8192:100")
        sequences, context, kind, length, new = found.groups()
        if kind is None:
            return Point(text, "decode", int(sequences), int(context), 0)
        return Point(text, kind, 1, int(length), int(new or 0))


class Child(engines.Child):
    """The process of one engine of SGLang."""

    program, environment = os.path.abspath(__file__), ENVIRONMENT


# ---- one engine


class Server:
    """SGLang's scheduler in this process, which runs its own loop over our requests."""

    def __init__(self, options: dict[str, Any]) -> None:
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        load_plugins()
        server_args = ServerArgs(**options)
        ports = PortArgs.init_new(server_args)
        ranks: tuple[Any, ...] = ()
        if len(inspect.signature(Scheduler).parameters) == 2:  # newer versions publish the ranks
            from sglang.srt.runtime_context import SpawnRanks

            ranks_of_process = SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
            publish(server_args, role="scheduler", ranks=ranks_of_process)
        else:
            publish(server_args, role="scheduler")
            ranks = (0, 0, 0, 0, 0, 0, None)
        self.scheduler = Scheduler(server_args, ports, *ranks)
        self.requests = 0
        self.watch = self.see_graphs
        self.eager_steps = 0
        self.chunks, self.eager_chunks = 0, 0
        self.graphs_of_prompts = self.runner.prefill_cuda_graph_runner
        worker = self.scheduler.tp_worker
        forward = worker.forward_batch_generation

        def watched(batch: Any, *more: Any, **options: Any) -> Any:
            result = forward(batch, *more, **options)
            if batch.forward_mode.is_decode():
                self.watch(result)
            elif batch.forward_mode.is_extend():
                self.chunks += 1
                self.eager_chunks += not result.can_run_cuda_graph
            return result

        worker.forward_batch_generation = watched

    def see_graphs(self, result: Any) -> None:
        """Counts decode steps that have not run in a CUDA graph."""
        self.eager_steps += not result.can_run_cuda_graph

    @property
    def runner(self) -> Any:
        return self.scheduler.tp_worker.model_runner

    @property
    def layers(self) -> Any:
        """The part of the model that has its layers and says which of them run."""
        return self.runner.model.model

    def _request(self, prompt: Sequence[int], tokens: int) -> Any:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(max_new_tokens=tokens, temperature=0, ignore_eos=True)
        params.normalize(None)
        self.requests += 1
        return TokenizedGenerateReqInput(
            rid=str(self.requests),
            input_text="",
            input_ids=array("q", prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )

    def run(
        self, prompts: Sequence[Sequence[int]], tokens: int
    ) -> tuple[list[Any], list[tuple[float, list[int]]]]:
        """Generates `tokens` behind each prompt.

        Returns:
            SGLang's requests; and (time, tokens of each request so far) of every round of the loop.
        """
        asked = [self._request(prompt, tokens) for prompt in prompts]
        requests: list[Any] = []
        rounds: list[tuple[float, list[int]]] = []
        scheduler, quiet = self.scheduler, 0
        process = scheduler.process_input_requests

        def receive() -> list[Any]:
            """The scheduler asks for new requests in every round."""
            nonlocal quiet
            rounds.append((time.perf_counter(), [len(req.output_ids) for req in requests]))
            given = asked[:]
            asked.clear()
            quiet = 0 if given or any(not req.finished() for req in requests) else quiet + 1
            scheduler.gracefully_exit = quiet > 3
            return given

        def keep(given: list[Any]) -> None:
            """It makes its own requests of them."""
            process(given)
            if given:
                requests.extend(scheduler.waiting_queue)
                rounds[0] = (rounds[0][0], [0] * len(requests))

        self._loop(receive, keep)
        return requests, rounds

    def _loop(self, receive: Callable[[], list[Any]], keep: Callable[[list[Any]], None]) -> None:
        """SGLang's event loop, until `receive` has it end.

        Args:
            receive: what came in since the last step.
            keep: takes that in place of the scheduler.
        """
        scheduler, process = self.scheduler, self.scheduler.process_input_requests
        scheduler.gracefully_exit = False
        scheduler.request_receiver = SimpleNamespace(recv_requests=receive)
        scheduler.process_input_requests = keep
        try:
            scheduler.run_event_loop()
        finally:
            scheduler.process_input_requests = process

    def serve(self, clients: serving.Clients) -> int:
        """Lets clients ask until they have seen enough; returns how often SGLang has retracted."""
        from sglang.srt.managers.io_struct import AbortReq

        scheduler, process = self.scheduler, self.scheduler.process_input_requests
        start = time.perf_counter()
        asked = clients.begin(start)
        running: dict[int, Any] = {}
        had: dict[int, int] = {}
        again, before, quiet, over = 0, 0, 0, False

        def receive() -> list[Any]:
            nonlocal again, before, over, quiet
            now = time.perf_counter()
            if not over and not clients.clock(now, start):
                over, asked[:] = True, []
                scheduler.abort_request(AbortReq(abort_all=True))
            if over:
                busy = scheduler.running_batch.reqs or scheduler.waiting_queue
                quiet = 0 if busy else quiet + 1
                scheduler.gracefully_exit = quiet > 3
                return []
            if clients.begun is None:
                before = again + sum(req.retraction_count for req in running.values())
            for number, req in list(running.items()):
                made = req.output_ids[had[number] :]
                had[number] += len(made)
                following = clients.told(number, made, now)
                if following:
                    again += req.retraction_count
                    del running[number]
                    asked.append(following)
            return [self._request(request.prompt, request.tokens) for request in asked]

        def keep(given: list[Any]) -> None:
            """SGLang makes its own requests of them, the last ones of its queue."""
            process(given)
            made = scheduler.waiting_queue[len(scheduler.waiting_queue) - len(given) :]
            for request, req in zip(asked if given else (), made, strict=True):
                running[request.number], had[request.number] = req, 0
            asked.clear()

        self._loop(receive, keep)
        again += sum(req.retraction_count for req in running.values())
        return again - before

    def flush(self) -> None:
        """Empties the prefix tree."""
        if not self.scheduler.flush_cache():
            raise RuntimeError("SGLang has not emptied its prefix tree")

    def random_weights(self) -> None:
        """Weights of the usual size; those of SGLang's loader let attention look at all keys
        alike."""
        torch.manual_seed(0)
        for name, weight in self.runner.model.named_parameters():
            if weight.dim() == 1:
                weight.data.fill_(1.0)
            else:
                weight.data.normal_(0.0, 1.0 if "embed" in name else 1.28 / weight.shape[1] ** 0.5)

    def use_layers(self, layers: int | None) -> None:
        """Lets prompts run through the first layers only, and without graphs, which have all
        layers. Graphs of decode steps keep all layers."""
        self.layers.end_layer = self.layers.config.num_hidden_layers if layers is None else layers
        self.runner.prefill_cuda_graph_runner = self.graphs_of_prompts if layers is None else None

    def copy_pages(self) -> None:
        """Makes the pages of all layers copies of the first one's."""
        pool = self.runner.token_to_kv_pool
        for name in ("pages", "k_buffer", "v_buffer"):
            first, *others = getattr(pool, name, None) or [None]
            for other in others:
                other.copy_(first)


def engine_options(config: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of SGLang's server."""
    cuda = settings["cuda"]
    name, _, variant = config.partition(":")
    options: dict[str, Any] = {
        "model_path": settings["model"],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "dtype": "bfloat16" if cuda else "float32",
        "page_size": PAGE,
        "context_length": settings["longest"],
        "max_running_requests": settings["sequences"],
        "mem_fraction_static": settings["memory"],
        "chunked_prefill_size": settings["chunk"],
        "cuda_graph_bs_decode": settings["batches"],
        "random_seed": 0,
        "log_level": "info",
        "device": "cuda" if cuda else "cpu",
    }
    if cuda:
        options["sampling_backend"] = "pytorch"
    else:
        options |= {"max_total_tokens": 8192, "disable_overlap_schedule": True}
        options |= {"disable_cuda_graph": True, "cuda_graph_bs_decode": None}
    if name in ("triton", "fa3", "flashinfer", "torch_native"):
        options["attention_backend"] = name
        if variant == "fp8":
            options["kv_cache_dtype"] = "fp8_e4m3"
    else:
        options["attention_backend"] = f"turboquant:{name}"
        if variant == "window0":
            options["json_model_override_args"] = json.dumps({"turboquant": {"window": 0}})
    return options


def measure_engine(config: str, points: list[Point], settings: dict[str, Any], put: Any) -> None:
    """Starts SGLang and measures all points; put(row) hands over each as soon as it is there."""
    import sglang
    import sglang.srt.managers.scheduler  # what takes long

    print("imported", flush=True)
    sys.stdin.readline()  # the engine before has gone
    begun = time.perf_counter()
    server = Server(engine_options(config, settings))
    put(
        point="memory",
        seconds=time.perf_counter() - begun,
        sglang=sglang.__version__,
        torch=torch.__version__,
        cache_tokens=server.scheduler.max_total_num_tokens,
        requests=server.runner.req_to_token_pool.size,
        memory=settings["memory"],
    )
    server.random_weights()
    vocabulary = settings["vocabulary"]
    warm = min(settings["longest"] - 16, settings["chunk"] + 300)
    server.run(make_prompts(1, warm, 1, vocabulary), 8)  # every kernel once
    for point in points:
        server.flush()
        measure = {"decode": measure_steps, "graphs": measure_graphs}.get(
            point.kind, measure_prompt
        )
        if point.load:
            clients = serving.Clients(point.load, vocabulary, settings["serve_s"])
            put(point=point.text, **measure_load(server, clients))
        else:
            put(point=point.text, **measure(server, point, vocabulary))


def measure_steps(server: Server, point: Point, vocabulary: int) -> dict[str, Any]:
    """Decode steps of sequences whose prompts one layer has computed."""
    seed = 10 + point.context + point.sequences
    prompts = make_prompts(point.sequences, point.context, seed, vocabulary)
    server.use_layers(1)
    server.run(prompts, 1)
    server.copy_pages()
    server.eager_steps = 0
    _, rounds = server.run(prompts, STEPS + 1)
    server.use_layers(None)
    # Steps of all sequences only; the first few may wait for a prompt's rest.
    times = sorted(
        1e3 * (now - before)
        for (before, had), (now, has) in itertools.pairwise(rounds)
        if all(b - a == 1 and a > 1 for a, b in zip(had, has, strict=True))
    )
    if len(times) < STEPS // 2:
        raise RuntimeError(f"{point.text}: {len(times)} steps had all {point.sequences} sequences")
    median = statistics.median(times)
    return {
        "sequences": point.sequences,
        "context": point.context,
        "steps": len(times),
        "steps_without_graphs": server.eager_steps,
        "step_ms": median,
        "p10_ms": times[len(times) // 10],
        "p90_ms": times[len(times) * 9 // 10],
        "tokens_s": 1e3 * point.sequences / median,
    }


def measure_processes(config: str, points: list[Point], settings: dict[str, Any], put: Any) -> None:
    """Decode steps of SGLang's own engine, whose ranks are processes."""
    import sglang

    print("imported", flush=True)
    sys.stdin.readline()  # the engine before has gone
    begun = time.perf_counter()
    ranks = {"tp_size": settings["tensor_parallel"]}
    llm = sglang.Engine(**engine_options(config, settings), **ranks)
    put(
        point="memory",
        seconds=time.perf_counter() - begun,
        sglang=sglang.__version__,
        torch=torch.__version__,
        cache_tokens=llm.get_server_info()["max_total_num_tokens"],
        memory=settings["memory"],
    )

    def seconds(prompts: list[list[int]], tokens: int) -> float:
        start = time.perf_counter()
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        llm.generate(input_ids=prompts, sampling_params=sampling)
        return time.perf_counter() - start

    for point in points:
        if point.kind != "decode":
            continue
        count, seed = point.sequences, 10 + point.context + point.sequences
        prompts = make_prompts(count, point.context, seed, settings["vocabulary"])
        seconds(prompts, 1)
        few, many = 16, 16 + STEPS
        least = [min(seconds(prompts, tokens) for _ in range(TRIES)) for tokens in (few, many)]
        step = 1e3 * (least[1] - least[0]) / STEPS
        rate = 1e3 * count / step
        row = {"sequences": count, "context": point.context, "steps": STEPS}
        put(point=point.text, **row, step_ms=step, tokens_s=rate)
    llm.shutdown()


def measure_load(server: Server, clients: serving.Clients) -> dict[str, Any]:
    """Clients whose first prompts the prefix tree has, as far as they fit."""
    server.use_layers(1)
    server.run(clients.opening, 1)
    server.copy_pages()
    server.use_layers(None)
    return clients.row(server.serve(clients))


def measure_prompt(server: Server, point: Point, vocabulary: int) -> dict[str, Any]:
    """Time to the first token: of prompts that the tree has nothing of, or all but the end of."""
    seconds, cached, begun = [], 0, time.perf_counter()
    server.chunks, server.eager_chunks = 0, 0
    for number in range(PROMPTS):
        if seconds and time.perf_counter() - begun > PROMPTS_FOR:
            break
        (prompt,) = make_prompts(1, point.context, 100 + number, vocabulary)
        if point.kind == "hit":
            server.run([prompt], 1)
            prompt += make_prompts(1, point.new, 200 + number, vocabulary)[0]
        (req,), rounds = server.run([prompt], 1)
        seconds.append(next(now for now, has in rounds if has[0]) - rounds[0][0])
        cached = req.cached_tokens
    fastest = min(seconds)
    return {
        "prompts": len(seconds),
        "chunks": server.chunks,
        "chunks_without_graphs": server.eager_chunks,
        "cached": cached,
        "prompt_s": fastest,
        "tokens_s": (point.context + point.new) / fastest,
    }


def measure_graphs(server: Server, point: Point, vocabulary: int) -> dict[str, Any]:
    """The same requests in CUDA graphs and without; the prefix tree is empty before each."""
    prompts = make_prompts(point.sequences, point.context, 5, vocabulary)
    answers, logits = [], []
    for graphs in (True, False):
        server.flush()
        found, seen = answers_and_logits(server, prompts, graphs)
        answers.append(found)
        logits.append(seen)
    same = [torch.equal(a, b) for a, b in zip(*logits, strict=True)]
    return {
        "steps": len(same),
        "steps_with_equal_logits": sum(same),
        "same_tokens": answers[0] == answers[1],
    }


def answers_and_logits(
    server: Server, prompts: list[list[int]], graphs: bool
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The tokens of each prompt, and the logits of each decode step, in graphs or without."""
    logits: list[torch.Tensor] = []
    runner, before = server.runner, server.eager_steps
    graph_runner = runner.decode_cuda_graph_runner

    def watch(result: Any) -> None:
        server.see_graphs(result)
        logits.append(result.logits_output.next_token_logits.clone())

    server.watch = watch
    if not graphs:
        runner.decode_cuda_graph_runner = None
    try:
        requests, _ = server.run(prompts, 24)
    finally:
        server.watch = server.see_graphs
        runner.decode_cuda_graph_runner = graph_runner
    torch.cuda.synchronize()
    eager = server.eager_steps - before
    if eager != (0 if graphs else len(logits)):
        raise RuntimeError(f"{eager} of {len(logits)} steps ran without graphs")
    return [list(req.output_ids) for req in requests], logits


# ---- all engines


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        task = json.loads(sys.argv[2])
        points, settings = [Point.parse(text) for text in task["points"]], task["settings"]
        measure = measure_processes if settings["tensor_parallel"] > 1 else measure_engine
        engines.run_child(task, partial(measure, task["config"], points, settings))
        return
    options = common.parser(__doc__)
    options.add_argument("--configs", default=",".join(CONFIGS), help="default: %(default)s")
    options.add_argument("--points", help=f"default: {POINTS}")
    options.add_argument("--shape", choices=engines.SHAPES, help="default: 8b; on a CPU tiny")
    options.add_argument("--layers", type=int, help="of the model; default: all of them")
    options.add_argument("--memory", type=float, default=0.8, help="SGLang's mem_fraction_static")
    options.add_argument("--sequences", type=int, default=64, help="at most, at a time")
    options.add_argument("--chunk", type=int, default=8192, help="tokens of a chunk of a prompt")
    options.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    options.add_argument("--serve", type=float, default=40, help="seconds of clients")
    options.add_argument("--limit", type=float, default=150, help="seconds of one engine")
    options.add_argument("--seconds", type=float, default=1e9, help="of all engines")
    options.add_argument("--out", type=Path, help="folder of the result file and all output")
    arguments = options.parse_args()
    if importlib.util.find_spec("sglang") is None:
        print("This benchmark needs SGLang (pip install 'torch_turboquant[sglang]').")
        return
    cuda = engines.begin(arguments)
    arguments.shape = arguments.shape or ("8b" if cuda else "tiny")
    measure_all(arguments, cuda)


def measure_all(arguments: Any, cuda: bool) -> None:
    """Every engine, one after the other, and every row into the file."""
    points = [
        Point.parse(text)
        for text in (arguments.points or (POINTS if cuda else TINY_POINTS)).split(",")
    ]
    configs: list[str] = arguments.configs.split(",")
    rows: list[common.Row] = []
    versions: common.Row = {}
    shape = dict(engines.SHAPES[arguments.shape])
    shape["num_hidden_layers"] = arguments.layers or shape["num_hidden_layers"]
    with tempfile.TemporaryDirectory() as scratch:
        engines.write_model(shape, Path(scratch))
        settings = {
            "model": scratch,
            "cuda": cuda,
            "vocabulary": shape["vocab_size"],
            "longest": max(2048, *(p.longest for p in points)) + 512,
            "sequences": arguments.sequences,
            "batches": sorted({1}.union(*(p.batches for p in points))),
            "tensor_parallel": arguments.tensor_parallel,
            "serve_s": arguments.serve if cuda else 2.0,
            "memory": arguments.memory,
            "chunk": arguments.chunk if cuda else 256,
        }
        start = partial(Child, settings=settings, folder=arguments.out or Path(scratch))
        chosen = [Engine(config, 0, points) for config in configs]
        for engine, found in engines.measured(chosen, start, arguments.limit, arguments.seconds):
            if found["point"] == "memory":  # the first row of an engine
                versions = {"sglang": found.pop("sglang"), "torch": found.pop("torch")}
            name = f"sglang {versions['sglang']} {engine.config} {found['point']}"
            if arguments.shape != ("8b" if cuda else "tiny"):
                name += f" {arguments.shape}"
            if arguments.layers:
                name += f" of {arguments.layers} layers"
            if arguments.tensor_parallel != 1:
                name += f" tp {arguments.tensor_parallel}"
            extent = {"shape": arguments.shape, "layers": shape["num_hidden_layers"]}
            extent["tensor_parallel"] = arguments.tensor_parallel
            rows.append({"row": name, **versions, "config": engine.config, **extent, **found})
            print(engines.describe(rows[-1]), flush=True)
            common.write_progress(NAME, rows, "row", arguments)
    print(engines.table(rows, configs, "fa3"))


if __name__ == "__main__":
    main()
