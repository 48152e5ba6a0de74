"""vLLM's engine with several KV caches: times of decode steps and prompts, and how much fits.

The model has the shape of Llama-3.1-8B and random weights, which do not change the times; every
cache gets the same memory. The contestants:

    bf16, fp8             FlashAttention 3; of latent attention what vLLM chooses
    k5v4u, k4v4u, ...     our backend with this preset, with centers and scales of channels from a
                          file, and everything else as it is by default; with :codes the first
                          token of a sequence is not kept exact
    turboquant_4bit_nc    vLLM's own TurboQuant, in all layers

Each is an engine in a process of its own, which is imported while the one before is measured. It
measures these points:

    16x32768              a decode step of 16 sequences that have 32,768 tokens each
    full8192              the same with as many sequences of 8,192 tokens as fit into the memory
    prompt32768           a prompt of 32,768 tokens, in chunks of --batched-tokens
    verify3:16x32768      a step that verifies 3 drafts of each sequence (q_len 4)
    serve64x16384:512     clients that ask again as soon as they are answered: requests and tokens
                          per second, times of tokens; turns64x16384:256 and mix256 are others
                          (serving.py)
    check                 how far the 20 likeliest tokens' log-probabilities are from bf16's, by two
                          layers of the model: an end-to-end check and no measure of quality

The time of a step is the time between the outputs of two steps (the median), in CUDA graphs. The
sequences of a step come from the prefix cache: their prompts run through one layer of the model
only, and the pages of all layers are filled with copies of pages that a real prompt has made, since
the values do not change the times. Prompts are real, and the fastest of a few counts.

Drafts are vLLM's n-gram drafts made on the GPU, which are always as many as there may be (vLLM
0.32; versions without them leave these points out); which of them are accepted is drawn at random
(its "synthetic" acceptance). An engine has one number of drafts, so that these points start engines
of their own.

    python benchmarks/bench_vllm.py                      all, into results/h200_vllm.json
    python benchmarks/bench_vllm.py --configs bf16,k5v4u --points 16x32768,32x8192
    python benchmarks/bench_vllm.py --only 'k5v4u .*full'      rows whose name the expression finds
    python benchmarks/bench_vllm.py --out FOLDER         result file and the engines' output there
    python benchmarks/bench_vllm.py --device cpu         a tiny model, only printed: a try

Every row is written as soon as it is measured. Older rows of the same device stay until they are
measured again. It needs vLLM, which pins the version of torch.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import serving
import torch

NAME = "h200_vllm"
LLAMA_8B = common.LLAMA_8B | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 132096,  # 131,072 and what is generated behind them
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "dtype": "bfloat16",
}
SHAPES = {
    "8b": LLAMA_8B,
    # the layers of Llama-3.1-70B, a fifth of them: for several GPUs
    "70b-cut": LLAMA_8B
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 16,
        "num_attention_heads": 64,
    },
    # latent attention (MLA) as in DeepSeek-V2-Lite, with one dense layer's MLP in place of experts
    "v2-lite-dense": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": None,
        "first_k_dense_replace": 27,
        "vocab_size": 102400,
        "max_position_embeddings": 132096,
        "rms_norm_eps": 1e-06,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "dtype": "bfloat16",
    },
    "tiny": LLAMA_8B
    | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "max_position_embeddings": 8192,
    },
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, as far as it can
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
CONFIGS = ("k5v4u", "bf16", "fp8", "k4v4u", "turboquant_4bit_nc")
# What matters most comes first: a run that is stopped has it.
POINTS = (
    "16x32768,32x8192,64x2048,1x131072,1x8192,1x128,prompt32768,full8192,full32768,prompt8192,"
    "prompt2048,prompt131072,check,verify3:16x32768,verify3:32x8192,verify3:1x8192,"
    "verify7:16x32768,verify7:32x8192,verify7:1x8192"
)
TINY_POINTS = "2x200,1x128,prompt200,full400,check"
SLOW_POINTS = r"\d|prompt|check"  # of vLLM's own presets: a step of a full memory takes 0.4 s
STEPS, FULL_STEPS, SLOW_STEPS = 96, 40, 24
ACCEPTED = 2.5  # tokens of a step that verifies drafts, on average
PROMPTS_FOR = 1.5  # seconds of prompts of one length


@dataclass(frozen=True)
class Point:
    """One thing to measure in an engine."""

    text: str
    kind: str  # decode, full, prompt, check, load
    sequences: int  # 0: as many as fit
    context: int
    drafts: int
    load: serving.Load | None = None

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence, without those that a step adds."""
        return self.load.longest if self.load else self.context

    @staticmethod
    def parse(text: str) -> Point:
        """Of "16x32768", "full8192", "prompt32768", "verify3:16x32768", "check"."""
        load = serving.Load.parse(text)
        if load:
            return Point(text, "load", load.clients, load.context, 0, load)
        found = re.fullmatch(r"(?:verify(\d+):)?(?:(\d+)x|(full|prompt))(\d+)|check", text)
        if not found:
            raise SystemExit(f"{text!r} is no point; write 16x32768, full8192, prompt8192, check")
        drafts, sequences, kind, context = found.groups()
        if context is None:
            return Point(text, "check", 8, 1500, 0)
        count = int(sequences or (1 if kind == "prompt" else 0))
        return Point(text, kind or "decode", count, int(context), int(drafts or 0))


@dataclass
class Engine:
    """What one process measures: a configuration with one number of drafts."""

    config: str
    drafts: int
    points: list[Point] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.config} {self.drafts} drafts" if self.drafts else self.config


def can_draft() -> bool:
    """Whether this vLLM makes n-gram drafts on the GPU. It is not imported: that takes a while."""
    found = importlib.util.find_spec("vllm")
    folder = Path(found.origin).parent if found and found.origin else Path()
    return (folder / "v1" / "worker" / "gpu" / "spec_decode" / "ngram").exists()


def engines_of(configs: list[str], points: list[Point], only: str | None) -> Iterator[Engine]:
    """The engines to start, in order: the most important configuration of each kind first."""
    for drafts in sorted({point.drafts for point in points}):
        for config in configs:
            chosen = [
                point
                for point in points
                if point.drafts == drafts
                and (not config.startswith(THEIRS) or re.match(SLOW_POINTS, point.text))
                and (not only or re.search(only, f"{config} {point.text}"))
            ]
            if chosen and not (drafts and config.startswith(THEIRS)):  # it does not verify drafts
                yield Engine(config, drafts, chosen)


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


# ---- one engine


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
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
            output_kind=RequestOutputKind.DELTA,
        )
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
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        numbers: dict[str, int] = {}
        preempted = 0
        scheduler = self.engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def count(*given: Any, **options: Any) -> Any:
            nonlocal preempted
            preempted += clients.begun is not None
            return preempt(*given, **options)

        def ask(request: serving.Request) -> None:
            params = SamplingParams(
                max_tokens=request.tokens,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            self.requests += 1
            numbers[str(self.requests)] = request.number
            prompt = {"prompt_token_ids": request.prompt}
            self.engine.add_request(str(self.requests), prompt, params)

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


def make_prompts(count: int, length: int, seed: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, vocabulary - 300, (count, length), generator=generator).tolist()


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


def measure_engine(engine: Engine, settings: dict[str, Any], put: Any) -> None:
    """Starts vLLM and measures all points; put(row) hands over each as soon as it is there."""
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
        cache_gib=settings["kv_gib"],
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
    if engine.config.startswith(THEIRS):
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


def difference(reference: list[Any], outputs: list[Any]) -> dict[str, Any]:
    """How far log-probabilities are from the reference's, as long as both chose the same tokens."""
    gaps, same, all_tokens = [], 0, 0
    for theirs, ours in zip(reference, outputs, strict=True):
        for (token, top), (other, other_top) in zip(theirs, ours, strict=True):
            gaps += [abs(top[key] - other_top[key]) for key in top if key in other_top]
            same, all_tokens = same + (token == other), all_tokens + 1
            if token != other:
                break
    mean = statistics.fmean(gaps) if gaps else None
    return {"logprob_difference": mean, "same_tokens": same, "tokens": all_tokens}


def add_differences(rows: list[common.Row], checked: dict[str, list[Any]]) -> None:
    """Completes the rows of "check" by config once bf16 has been checked too."""
    for row in rows:
        if row["point"] == "check" and "bf16" in checked and "same_tokens" not in row:
            row |= difference(checked["bf16"], checked[row["config"]])


# ---- all engines


class Child:
    """The process of one engine, and the rows that it sends."""

    program, environment = os.path.abspath(__file__), ENVIRONMENT

    def __init__(self, engine: Engine, settings: dict[str, Any], folder: Path) -> None:
        self.engine = engine
        self.log = folder / f"{engine.title.replace(' ', '_')}.log"
        self.rows, sender = os.pipe()
        task = {
            "config": engine.config,
            "drafts": engine.drafts,
            "points": [point.text for point in engine.points],
            "settings": settings,
            "sender": sender,
        }
        command = [sys.executable, self.program, "--child", json.dumps(task)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(sender,),
                env={**os.environ, **self.environment},
            )
        os.close(sender)

    def measure(self, limit: float) -> Iterator[dict[str, Any]]:
        """Lets it begin, and yields its rows; after `limit` seconds it is ended."""
        timer = threading.Timer(limit, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(b"go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has failed already: its output says why
        with os.fdopen(self.rows) as lines:
            for line in lines:
                yield json.loads(line)
        self.process.wait()
        timer.cancel()


def run_child(task: dict[str, Any]) -> None:
    """The process of one engine."""
    engine = Engine(task["config"], task["drafts"], [Point.parse(p) for p in task["points"]])
    with os.fdopen(task["sender"], "w") as sender:

        def put(**row: Any) -> None:
            sender.write(json.dumps(row) + "\n")
            sender.flush()

        measure_engine(engine, task["settings"], put)
    sys.stdout.flush()
    os._exit(0)  # without waiting for vLLM to take everything down


def write_model(shape: dict[str, Any], folder: Path) -> None:
    """A folder that vLLM takes for a model: a configuration, and centers that our backend finds."""
    from torch_turboquant import centers
    from torch_turboquant.ops.codec import scaled_center

    (folder / "config.json").write_text(json.dumps(shape))
    if "kv_lora_rank" in shape:
        return  # latents have no centers
    heads = shape["num_key_value_heads"], shape["head_dim"]
    generator = torch.Generator().manual_seed(0)
    found = [
        scaled_center(
            0.1 * torch.randn(heads, generator=generator),
            0.9 + 0.2 * torch.rand(heads, generator=generator),
        )
        for _ in range(shape["num_hidden_layers"])
    ]
    centers.save(folder / centers.FILE_NAME, found, shape)


def describe(row: common.Row) -> str:
    """One line about a row."""
    skipped = ("row", "vllm", "torch", "config", "point", "shape", "tensor_parallel")
    facts = (
        f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
        if key not in skipped
    )
    return f"{row['row']}: {', '.join(facts)}"


def table(rows: list[common.Row], configs: list[str], base_config: str = "bf16") -> str:
    """Tokens per second, and how many times those of base_config."""
    points = list(dict.fromkeys(row["point"] for row in rows if "tokens_s" in row))
    found = {(row["config"], row["point"]): row["tokens_s"] for row in rows if "tokens_s" in row}
    body = []
    for point in points:
        cells, base = [point], found.get((base_config, point))
        for config in configs:
            speed = found.get((config, point))
            times = f" ({speed / base:.2f}x)" if speed and base else ""
            cells.append(f"{speed:,.0f}{times}" if speed else "")
        body.append(cells)
    return common.markdown(["tokens per second", *configs], body)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        run_child(json.loads(sys.argv[2]))
        return
    options = common.parser(__doc__)
    options.add_argument("--configs", default=",".join(CONFIGS), help="default: %(default)s")
    options.add_argument("--points", help=f"default: {POINTS}")
    options.add_argument("--only", help="regular expression: rows whose name it finds")
    options.add_argument("--shape", choices=SHAPES, default="8b")
    options.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    options.add_argument("--kv-gib", type=float, default=72, help="of the cache, on each GPU")
    options.add_argument("--sequences", type=int, default=288, help="at most, at a time")
    options.add_argument("--batched-tokens", type=int, default=16384, help="of a step")
    options.add_argument("--serve", type=float, default=40, help="seconds of clients")
    options.add_argument("--limit", type=float, default=150, help="seconds of one engine")
    options.add_argument("--seconds", type=float, default=1e9, help="of all engines")
    options.add_argument("--out", type=Path, help="folder of the result file and all output")
    arguments = options.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("This benchmark needs vLLM (pip install vllm).")
        return
    cuda = begin(arguments)
    if not cuda:  # a try
        arguments.shape, arguments.kv_gib, arguments.sequences = "tiny", 0.03, 16
        arguments.batched_tokens, arguments.serve = 512, 2.0
    measure_all(arguments, cuda)


def begin(arguments: Any) -> bool:
    """Settles where rows go and which commit they name; whether engines run on a GPU."""
    cuda = torch.device(arguments.device).type == "cuda"
    arguments.dry_run |= not cuda
    if not arguments.dry_run:
        arguments.commit = arguments.commit or common.commit_name()
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        common.RESULTS = arguments.out.absolute()
    return cuda


def measure_all(arguments: Any, cuda: bool) -> None:
    """Every engine, one after the other, and every row into the file."""
    texts = (arguments.points or (POINTS if cuda else TINY_POINTS)).split(",")
    configs, points = arguments.configs.split(","), [Point.parse(text) for text in texts]
    if any(point.drafts for point in points) and not can_draft():
        print("this vLLM makes no n-gram drafts on the GPU: points with drafts are left out")
        points = [point for point in points if not point.drafts]
    engines = list(engines_of(configs, points, arguments.only))
    shape = SHAPES[arguments.shape]
    started, rows = time.perf_counter(), []
    checked: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch)
        write_model(shape, model)
        settings = {
            "model": str(model),
            "cuda": cuda,
            "latents": "kv_lora_rank" in shape,
            "vocabulary": shape["vocab_size"],
            "longest": max(2048, *(p.longest for p in points)) + 512,
            "sequences": arguments.sequences,
            "batched_tokens": arguments.batched_tokens,
            "kv_gib": arguments.kv_gib,
            "serve_s": arguments.serve,
            "tensor_parallel": arguments.tensor_parallel,
        }
        logs = arguments.out or model
        children: list[Child] = []
        for number, engine in enumerate(engines):
            while len(children) <= min(number + 1, len(engines) - 1):
                children.append(Child(engines[len(children)], settings, logs))
            child, begun = children[number], time.perf_counter()
            left = arguments.seconds - (begun - started)
            common_part: common.Row = {}
            for found in child.measure(max(1.0, min(arguments.limit, left))):
                if found["point"] == "memory":
                    common_part = {"vllm": found.pop("vllm"), "torch": found.pop("torch")}
                if "outputs" in found:
                    checked[engine.config] = found.pop("outputs")
                if engine.drafts and found["point"] == "memory":
                    found["point"] = f"memory with {engine.drafts} drafts"
                rows.append(complete(found, engine, common_part, arguments))
                add_differences(rows, checked)
                print(describe(rows[-1]), flush=True)
                common.write_progress(NAME, rows, "row", arguments)
            seconds, code = time.perf_counter() - begun, child.process.returncode
            print(f"{engine.title}: {seconds:.0f} s, exit {code}", flush=True)
            if code:
                print(child.log.read_text()[-3000:], flush=True)
    for row in rows:
        if row["point"] == "check":
            print(describe(row))
    print(table(rows, configs))


def complete(found: common.Row, engine: Engine, versions: common.Row, arguments: Any) -> common.Row:
    """A row with its name, which tells it from all others of a device."""
    name = [f"vllm {versions.get('vllm')}", engine.config, found["point"]]
    if arguments.shape != "8b" or arguments.tensor_parallel != 1:
        name.append(f"{arguments.shape} tp {arguments.tensor_parallel}")
    first = {"row": " ".join(name), **versions, "config": engine.config}
    extent = {"shape": arguments.shape, "tensor_parallel": arguments.tensor_parallel}
    return {**first, **extent, **found}


if __name__ == "__main__":
    main()
