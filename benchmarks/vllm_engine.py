"""One engine of vLLM: what is measured in it, what it is given, and how, for bench_vllm.py.

The sequences of a decode step come from the prefix cache. Their prompts run through one layer of
the model only (`use_layers`), and the pages of all layers are copies of pages that a real prompt
has filled (`fill_pages`), since the values do not change the times.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import serving
import torch
from engines import Engine, make_prompts

ENVIRONMENT = {  # of every process of vLLM
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # greedy: nothing is sampled
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "PYTHONUNBUFFERED": "1",
}
THEIRS = "turboquant_"  # how vLLM's own presets begin
STEPS, FULL_STEPS, SLOW_STEPS = 96, 40, 24
ACCEPTED = 2.5  # tokens of a step that verifies drafts, on average
PROMPTS_FOR = 1.5  # seconds of prompts of one length


@dataclass(frozen=True)
class Point:
    """One thing to measure in an engine."""

    text: str
    kind: str
    """decode, full, prompt or check; load: clients (serving.py)."""
    sequences: int
    """0: as many as fit."""
    context: int
    drafts: int
    load: serving.Load | None = None

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence, without those that a step adds."""
        return self.load.longest if self.load else self.context

    @staticmethod
    def parse(text: str) -> Point:
        """Of "16x32768", "full8192", "prompt32768", "verify3:16x32768", "check", and of loads.

        Raises:
            SystemExit: the text names no point.
        """
        load = serving.Load.parse(text)
        if load:
            return Point(text, "load", load.clients, load.context, 0, load)
        found = re.fullmatch(r"(?:verify(\d+):)?(?:(\d+)x|(full|prompt))(\d+)|check", text)
        if not found:
            raise SystemExit(
                f"{text!r} is no point; write 16x32768, full8192, prompt8192, verify3:16x32768, "
                "check, or a load such as turns64x16384:256"
            )
        drafts, sequences, kind, context = found.groups()
        if context is None:
            return Point(text, "check", 8, 1500, 0)
        count = int(sequences or (1 if kind == "prompt" else 0))
        return Point(text, kind or "decode", count, int(context), int(drafts or 0))


# ---- inside of vLLM's workers


def random_weights(worker: Any) -> None:
    """Weights of the usual size; those of vLLM's loader let attention look at all keys alike."""
    torch.manual_seed(0)
    for name, weight in worker.get_model().named_parameters():
        if weight.dim() == 1:
            weight.data.fill_(1.0)
        else:
            weight.data.normal_(0.0, 1.0 if "embed" in name else 1.28 / weight.shape[1] ** 0.5)
    for layer in worker.get_model().modules():
        if hasattr(layer, "kv_lora_rank") and hasattr(layer, "impl"):
            layer.process_weights_after_loading(torch.bfloat16)  # what it made of its weights


def use_layers(worker: Any, layers: int | None, graphs: bool) -> None:
    """Lets the model run through its first layers only, and turns replaying graphs on or off.

    Captured graphs keep all layers.
    """
    model = worker.get_model().model
    model.end_layer = model.config.num_hidden_layers if layers is None else layers
    manager = getattr(worker.model_runner, "cudagraph_manager", None)
    if manager is not None:
        manager._graphs_captured = graphs


def fill_pages(worker: Any) -> tuple[int, int]:
    """Makes every page of every layer a copy of one that a prompt has filled."""
    caches = worker.model_runner.kv_caches
    # The last token tells whether a page is full. Behind latents stands an exact token instead.
    token = caches[-1][:, 0, 0 if caches[-1].shape[1] == 1 else -1]
    used = (token.contiguous().view(torch.uint8) != 0).flatten(1).any(-1)
    used, empty = used.nonzero()[:, 0], (~used).nonzero()[:, 0]
    source = used[torch.arange(len(empty), device=used.device) % len(used)]
    for cache in caches:
        for target, origin in zip(empty.split(2048), source.split(2048), strict=True):
            cache[target] = cache[origin]
    return len(used), len(empty)


def quantise_all_layers() -> None:
    """vLLM's own TurboQuant leaves two layers at each end in bf16: here all caches are alike."""
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
    from vllm.v1.attention.backends import turboquant_attn

    TurboQuantConfig.get_boundary_skip_layers = staticmethod(lambda *_, **__: [])
    if importlib.util.find_spec("vllm.vllm_flash_attn._vllm_fa2_C") is None:
        turboquant_attn.get_flash_attn_version = lambda *_, **__: 3  # for prompts


# ---- the engine


def sampling(tokens: int, logprobs: int | None = None) -> Any:
    """vLLM's SamplingParams of greedy answers of exactly `tokens`, handed over step by step."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        logprobs=logprobs,
        output_kind=RequestOutputKind.DELTA,
    )


class Steps:
    """An engine of vLLM, step by step."""

    def __init__(self, llm: Any) -> None:
        self.engine, self.requests = llm.llm_engine, 0

    def run(
        self, prompts: list[list[int]], tokens: int, logprobs: int | None = None
    ) -> tuple[float, list[tuple[float, int, int]], list[list[Any]]]:
        """Generates `tokens` behind each prompt.

        Returns:
            Seconds; (time, sequences, tokens) of every step with outputs; and of each prompt its
            tokens with the likeliest ones' log-probabilities, if asked for.
        """
        params = sampling(tokens, logprobs)
        for prompt in prompts:
            self.requests += 1
            self.engine.add_request(str(self.requests), {"prompt_token_ids": prompt}, params)
        steps, found = [], {}
        start = time.perf_counter()
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            if not outputs:
                continue
            count = sum(len(output.outputs[0].token_ids) for output in outputs)
            steps.append((time.perf_counter(), len(outputs), count))
            for output in outputs if logprobs else ():
                number = int(output.request_id.split("-")[0])
                for token, top in zip(
                    output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
                ):
                    likeliest = {str(key): value.logprob for key, value in top.items()}
                    found.setdefault(number, []).append((token, likeliest))
        return time.perf_counter() - start, steps, [found[number] for number in sorted(found)]

    def serve(self, clients: serving.Clients) -> int:
        """Lets clients ask until they have seen enough; returns how often vLLM has preempted."""
        numbers: dict[str, int] = {}
        preempted = 0
        scheduler = self.engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def count(*given: Any, **options: Any) -> Any:
            nonlocal preempted
            preempted += clients.begun is not None
            return preempt(*given, **options)

        def ask(request: serving.Request) -> None:
            self.requests += 1
            numbers[str(self.requests)] = request.number
            prompt = {"prompt_token_ids": request.prompt}
            self.engine.add_request(str(self.requests), prompt, sampling(request.tokens))

        scheduler._preempt_request = count
        start = time.perf_counter()
        for request in clients.begin(start):
            ask(request)
        while clients.clock(time.perf_counter(), start):
            outputs = self.engine.step()
            now = time.perf_counter()
            for output in outputs:
                number = numbers[output.request_id.split("-")[0]]
                following = clients.told(number, output.outputs[0].token_ids, now)
                if following:
                    ask(following)
        scheduler._preempt_request = preempt
        self.engine.abort_request(list(numbers), internal=False)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return preempted


def engine_options(config: str, drafts: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's LLM."""
    cuda, most = settings["cuda"], settings["sequences"]
    tokens = 1 + drafts  # of a sequence in a step
    options: dict[str, Any] = {
        "model": settings["model"],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": settings["longest"],
        "max_num_seqs": most,
        "max_num_batched_tokens": settings["batched_tokens"],
        "kv_cache_memory_bytes": int(settings["kv_gib"] * 2**30),
        "tensor_parallel_size": settings["tensor_parallel"],
        "disable_log_stats": True,
        "seed": 0,
        "enforce_eager": not cuda,
    }
    if cuda:
        batches = [1, *range(8, 81, 8), *range(96, most + 1, 16)]
        if drafts:
            batches = [1, 16, 32]
        sizes = [tokens * batch for batch in batches if batch <= most]
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sizes,
        }
    if drafts:
        options["speculative_config"] = {
            "method": "ngram_gpu",
            "num_speculative_tokens": drafts,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 2,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": ACCEPTED,
        }
    if config.startswith(THEIRS):
        options |= {"attention_backend": "TURBOQUANT", "kv_cache_dtype": config}
    elif config in ("bf16", "fp8"):
        if cuda and not settings["latents"]:
            options["attention_backend"] = "FLASH_ATTN"
        if config == "fp8":
            options["kv_cache_dtype"] = "fp8"
    else:
        options["attention_backend"] = "CUSTOM"
        preset, _, first_token = config.partition(":")
        chosen = {"preset": preset, **({"first_token": first_token} if first_token else {})}
        options["additional_config"] = {"turboquant": chosen}
    return options


# ---- measurements


def measure_engine(engine: Engine, settings: dict[str, Any], put: Callable[..., None]) -> None:
    """Starts vLLM and measures all points; put(**row) hands over each as soon as it is there."""
    import vllm
    from vllm import LLM

    if engine.config.startswith(THEIRS):
        quantise_all_layers()
    elif engine.config not in ("bf16", "fp8"):
        from torch_turboquant.integrations.vllm import register

        register()  # a wheel that is installed has done so by its entry point
    print("imported", flush=True)
    sys.stdin.readline()  # the engine before has gone
    begun = time.perf_counter()
    llm = LLM(**engine_options(engine.config, engine.drafts, settings))
    cache = llm.llm_engine.vllm_config.cache_config
    put(
        point="memory",
        seconds=time.perf_counter() - begun,
        vllm=vllm.__version__,
        torch=torch.__version__,
        cache_tokens=cache.num_gpu_blocks * cache.block_size,
        block_size=cache.block_size,
        graphs=str(llm.llm_engine.vllm_config.compilation_config.cudagraph_mode),
    )
    llm.collective_rpc(random_weights)
    steps, vocabulary = Steps(llm), settings["vocabulary"]
    # Two chunks, so that every kernel runs once, and pages for fill_pages.
    first = min(settings["longest"] - 16, settings["batched_tokens"] + 700)
    steps.run(make_prompts(1, first, 1, vocabulary), 8)
    print("pages filled, copied:", llm.collective_rpc(fill_pages), flush=True)
    for point in engine.points:
        if point.kind == "prompt":
            put(point=point.text, **measure_prompt(steps, point, vocabulary))
        elif point.kind == "check":
            put(point=point.text, **measure_check(llm, steps, point, settings))
        elif point.load:
            clients = serving.Clients(point.load, vocabulary, settings["serve_s"])
            put(point=point.text, **measure_load(llm, steps, clients))
        else:
            put(point=point.text, **measure_steps(llm, steps, point, engine, settings))


def measure_prompt(steps: Steps, point: Point, vocabulary: int) -> dict[str, Any]:
    """A prompt of its own each time: the prefix cache has nothing of it."""
    seconds, begun = [], time.perf_counter()
    while not seconds or (time.perf_counter() - begun < PROMPTS_FOR and len(seconds) < 8):
        prompts = make_prompts(1, point.context, 100 + len(seconds) + point.context, vocabulary)
        seconds.append(steps.run(prompts, 1)[0])
    fastest = min(seconds)
    return {"prompts": len(seconds), "prompt_s": fastest, "tokens_s": point.context / fastest}


def measure_steps(
    llm: Any, steps: Steps, point: Point, engine: Engine, settings: dict[str, Any]
) -> dict[str, Any]:
    """Decode steps of sequences that the prefix cache has."""
    count = FULL_STEPS if point.kind == "full" else STEPS
    if engine.config.startswith(THEIRS) or not settings["cuda"]:
        count = SLOW_STEPS
    tokens = int(count * (ACCEPTED if point.drafts else 1))
    cache, sequences = llm.llm_engine.vllm_config.cache_config, point.sequences
    if point.kind == "full":
        pages = -(-(point.context + tokens) // cache.block_size) + 2
        sequences = min(settings["sequences"], (cache.num_gpu_blocks - 1) // pages)
    seed = 10 + point.context + sequences
    prompts = make_prompts(sequences, point.context, seed, settings["vocabulary"])
    llm.collective_rpc(use_layers, args=(1, True))
    steps.run(prompts, 1)
    llm.collective_rpc(use_layers, args=(None, True))
    _, outputs, _ = steps.run(prompts, tokens)
    # Steps of all sequences only; the first few have a prompt's rest or wait for it.
    times = [
        (now - before, made)
        for (before, all_before, _), (now, all_now, made) in itertools.pairwise(outputs)
        if all_before == all_now == sequences
    ][4:-2]
    ordered = sorted(1e3 * seconds for seconds, _ in times)
    if not ordered:
        raise RuntimeError(f"{point.text}: no step had all {sequences} sequences")
    median = statistics.median(ordered)
    made = statistics.fmean(made for _, made in times)
    return {
        "sequences": sequences,
        "context": point.context,
        "drafts": point.drafts,
        "steps": len(ordered),
        "step_ms": median,
        "p10_ms": ordered[len(ordered) // 10],
        "p90_ms": ordered[len(ordered) * 9 // 10],
        "tokens_s": 1e3 * made / median,
    }


def measure_load(llm: Any, steps: Steps, clients: serving.Clients) -> dict[str, Any]:
    """Clients whose first prompts the prefix cache has, as far as they fit."""
    llm.collective_rpc(use_layers, args=(1, True))
    steps.run(clients.opening, 1)
    llm.collective_rpc(use_layers, args=(None, True))
    return clients.row(steps.serve(clients))


def measure_check(llm: Any, steps: Steps, point: Point, settings: dict[str, Any]) -> dict[str, Any]:
    """Four tokens behind each prompt that the pages hold, by two layers: more would be chaos."""
    length = min(point.context, settings["longest"] - 16)
    prompts = make_prompts(point.sequences, length, 5, settings["vocabulary"])
    llm.collective_rpc(use_layers, args=(2, False))
    steps.run(prompts, 1)
    outputs = steps.run(prompts, 4, logprobs=20)[2]
    llm.collective_rpc(use_layers, args=(None, True))
    return {"outputs": outputs}
