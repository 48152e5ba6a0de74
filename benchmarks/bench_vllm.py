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
    python benchmarks/bench_vllm.py --device cpu --shape 1.5b
                                                         into results/cpu_vllm.json: the shape of
                                                         Qwen2.5-1.5B, beside vLLM's own attention

Every row is written as soon as it is measured. Older rows of the same device stay until they are
measured again. It needs vLLM, which pins the version of torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import common
import engines
import vllm_engine
from engines import Engine
from vllm_engine import THEIRS, Point, measure_engine

NAME, CPU_NAME = "h200_vllm", "cpu_vllm"
ENVIRONMENT = {
    **vllm_engine.ENVIRONMENT,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, as far as it can
}
CONFIGS = "k5v4u,bf16,fp8,k4v4u,turboquant_4bit_nc"
CPU_CONFIGS = "k5v4u,bf16,k4v4"
# What matters most comes first: a run that is stopped has it.
POINTS = (
    "16x32768,32x8192,64x2048,1x131072,1x8192,1x128,prompt32768,full8192,full32768,prompt8192,"
    "prompt2048,prompt131072,check,verify3:16x32768,verify3:32x8192,verify3:1x8192,"
    "verify7:16x32768,verify7:32x8192,verify7:1x8192"
)
CPU_POINTS = "1x1024,1x8192,1x32768,8x1024,8x4096,prompt2048"
TINY_POINTS = "2x200,1x128,prompt200,full400,check"
# What a device or a try gets, where nothing else is asked for.
SIZES = {
    "cuda": {"kv_gib": 72, "sequences": 288, "batched_tokens": 16384, "serve": 40, "limit": 150},
    "cpu": {"kv_gib": 2, "sequences": 16, "batched_tokens": 2048, "serve": 40, "limit": 1200},
    "tiny": {"kv_gib": 0.03, "sequences": 16, "batched_tokens": 512, "serve": 2, "limit": 150},
}
SLOW_POINTS = r"\d|prompt|check"  # of vLLM's own presets: a step of a full memory takes 0.4 s


class Child(engines.Child):
    """The process of one engine of vLLM."""

    program, environment = os.path.abspath(__file__), ENVIRONMENT


# ---- which engines


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


# ---- how far predictions are from bf16's


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


# ---- the run


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        task = json.loads(sys.argv[2])
        engine = Engine(task["config"], task["drafts"], [Point.parse(p) for p in task["points"]])
        engines.run_child(task, partial(measure_engine, engine, task["settings"]))
        return
    options = common.parser(__doc__)
    options.add_argument("--configs", help=f"default: {CONFIGS}; on a CPU {CPU_CONFIGS}")
    options.add_argument("--points", help=f"default: {POINTS}; on a CPU {CPU_POINTS}")
    options.add_argument("--only", help="regular expression: rows whose name it finds")
    options.add_argument("--shape", choices=engines.SHAPES, help="default: 8b; on a CPU tiny")
    options.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    options.add_argument("--kv-gib", type=float, help="of the cache, on each GPU")
    options.add_argument("--sequences", type=int, help="at most, at a time")
    options.add_argument("--batched-tokens", type=int, help="of a step")
    options.add_argument("--serve", type=float, help="seconds of clients")
    options.add_argument("--limit", type=float, help="seconds of one engine")
    options.add_argument("--seconds", type=float, default=1e9, help="of all engines")
    options.add_argument("--out", type=Path, help="folder of the result file and all output")
    arguments = options.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("This benchmark needs vLLM (pip install vllm).")
        return
    cuda = engines.begin(arguments, written=arguments.shape not in (None, "tiny"))
    arguments.shape = arguments.shape or ("8b" if cuda else "tiny")
    for name, value in sizes_of(arguments.shape, cuda).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    measure_all(arguments, cuda)


def sizes_of(shape: str, cuda: bool) -> dict[str, float]:
    """What options are unless they are given."""
    return SIZES["tiny" if shape == "tiny" else "cuda" if cuda else "cpu"]


def measure_all(arguments: Any, cuda: bool) -> None:
    """Every engine, one after the other, and every row into the file."""
    few = TINY_POINTS if arguments.shape == "tiny" else CPU_POINTS
    texts = (arguments.points or (POINTS if cuda else few)).split(",")
    configs = (arguments.configs or (CONFIGS if cuda else CPU_CONFIGS)).split(",")
    points = [Point.parse(text) for text in texts]
    if any(point.drafts for point in points) and not can_draft():
        print("this vLLM makes no n-gram drafts on the GPU: points with drafts are left out")
        points = [point for point in points if not point.drafts]
    shape = engines.SHAPES[arguments.shape]
    rows: list[common.Row] = []
    versions: common.Row = {}
    checked: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch)
        engines.write_model(shape, model)
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
        start = partial(Child, settings=settings, folder=arguments.out or model)
        chosen = list(engines_of(configs, points, arguments.only))
        for engine, found in engines.measured(
            chosen, start, arguments.limit, arguments.seconds, ahead=int(cuda)
        ):
            if found["point"] == "memory":  # the first row of an engine
                versions = {"vllm": found.pop("vllm"), "torch": found.pop("torch")}
                if engine.drafts:
                    found["point"] = f"memory with {engine.drafts} drafts"
            if "outputs" in found:
                checked[engine.config] = found.pop("outputs")
            rows.append(complete(found, engine, versions, arguments, cuda))
            add_differences(rows, checked)
            print(engines.describe(rows[-1]), flush=True)
            common.write_progress(NAME if cuda else CPU_NAME, rows, "row", arguments)
    for row in rows:
        if row["point"] == "check":
            print(engines.describe(row))
    print(engines.table(rows, configs))


def complete(
    found: common.Row, engine: Engine, versions: common.Row, arguments: Any, cuda: bool
) -> common.Row:
    """A row with its name, which tells it from all others of a device.

    The name leaves out what is the default of the device.
    """
    name = [f"vllm {versions['vllm']}", engine.config, found["point"]]
    if arguments.shape != ("8b" if cuda else "tiny") or arguments.tensor_parallel != 1:
        name.append(f"{arguments.shape} tp {arguments.tensor_parallel}")
    if arguments.kv_gib != sizes_of(arguments.shape, cuda)["kv_gib"]:
        name.append(f"{arguments.kv_gib:g} GiB")
    first = {"row": " ".join(name), **versions, "config": engine.config}
    extent = {
        "shape": arguments.shape,
        "tensor_parallel": arguments.tensor_parallel,
        "cache_gib": arguments.kv_gib,
    }
    return {**first, **extent, **found}


if __name__ == "__main__":
    main()
