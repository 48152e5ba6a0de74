"""What bench_vllm_quality.py and bench_sglang_quality.py share: texts, processes, rows.

Every cache is an engine of its own, in a process of its own. The engine with its own cache in the
model's dtype comes first, and leaves its log-probabilities in files, with which the others compare
theirs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor

from torch_turboquant import eval as evaluation

BASE = "uncompressed"
CENTER_TOKENS = 4096  # of the text behind the segments


@dataclass(frozen=True)
class Program:
    """What one engine's program adds.

    Attributes:
        engine: the name of its module, and of the results.
        documentation: of the program.
        path: of its file, which children run.
        caches: by default.
        score_tokens: by default.
        environment: of the children.
        ways: how a text is read, one row of results for each.
        version: of the installed engine.
        read: in a child, what a task asks for.
    """

    engine: str
    documentation: str
    path: str
    caches: Sequence[str]
    score_tokens: int
    environment: dict[str, str]
    ways: Sequence[str]
    version: Callable[[], str]
    read: Callable[[dict[str, Any]], None]


def compare(task: dict[str, Any], way: str, scores: Sequence[Tensor]) -> None:
    """Leaves loss, divergence and agreement of each token (torch_turboquant.eval.measure.Reading).

    Args:
        scores: log-probabilities [tokens that are scored, vocabulary] of every segment. The
            uncompressed cache leaves them as well, for the others.
    """
    from torch_turboquant.eval.predict import divergence, negative_log_likelihood

    readings = []
    for number, (segment, found) in enumerate(zip(torch.tensor(task["ids"]), scores, strict=True)):
        targets = segment[task["prefill"] :]
        assert len(found) == len(targets), (len(found), len(targets))
        file = Path(task["folder"]) / f"base{number}.pt"
        if task["cache"] == BASE and way == task["ways"][0]:
            torch.save(found, file)
        base = torch.load(file, mmap=True)
        readings.append((negative_log_likelihood(found, targets), *divergence(base, found)))
    result = Path(task["folder"]) / f"{way}.pt"
    torch.save([torch.stack(parts) for parts in zip(*readings, strict=True)], result)


def calibrated(model: Any, ids: Tensor, path: Path) -> None:
    """Writes the centers of a text to a file."""
    from torch_turboquant.integrations.transformers import TurboQuantCache, save_centers

    save_centers(path, TurboQuantCache.calibrate(model, ids), model)


def model_folder(arguments: Any) -> Path:
    """Of the model: as --model says, or the demo's, which `evaluation.load` has fetched."""
    from torch_turboquant.eval.options import default_cache_dir

    own = (arguments.cache_dir or default_cache_dir()) / "SmolLM2-135M-Instruct"
    return (arguments.model or own).absolute()


def main(program: Program) -> None:
    if sys.argv[1:2] == ["--child"]:
        program.read(json.loads(Path(sys.argv[2]).read_text()))
        sys.stdout.flush()
        os._exit(0)
    options = common.parser(program.documentation)
    options.add_argument("--model", type=Path, help="folder; default: the demo's")
    options.add_argument("--text", type=Path, help="UTF-8; default: the demo's Wikipedia articles")
    options.add_argument("--cache-dir", type=Path, help="of the demo's model and text")
    caches = ",".join(program.caches)
    options.add_argument("--caches", default=caches, help="default: %(default)s")
    options.add_argument("--dtype", default="float32", help="of the model, default: %(default)s")
    options.add_argument("--segments", type=int, default=2, help="of the text")
    options.add_argument("--prefill", type=int, default=512, help="tokens that are not scored")
    scored = program.score_tokens
    options.add_argument("--score-tokens", type=int, default=scored, help="of each segment")
    if "chunk" in program.ways:
        options.add_argument("--chunk", type=int, default=64, help="tokens of a step")
    options.add_argument("--kv-bytes", type=int, default=1 << 28, help="of the cache")
    arguments = options.parse_args()
    if importlib.util.find_spec(program.engine) is None:
        print(f"This benchmark needs {program.engine} (pip install {program.engine}).")
        return
    if not arguments.dry_run:
        arguments.commit = arguments.commit or common.commit_name()
    with tempfile.TemporaryDirectory() as scratch:
        measure(program, arguments, Path(scratch))


def measure(program: Program, arguments: Any, folder: Path) -> None:
    """All caches, the uncompressed one first."""
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
    sizes = {"prefill": arguments.prefill, "dtype": arguments.dtype}
    if "chunk" in program.ways:
        sizes["chunk"] = arguments.chunk
    task = {
        "model": str(model_folder(arguments)),
        "ids": ids.tolist(),
        "folder": str(folder),
        "centers": str(centers),
        "kv_bytes": arguments.kv_bytes,
        "ways": list(program.ways),
        **sizes,
    }
    base: Reading | None = None
    rows = []
    for cache in (BASE, *arguments.caches.split(",")):
        begun = time.perf_counter()
        (folder / "task.json").write_text(json.dumps({**task, "cache": cache}))
        log = folder / "log"
        with log.open("w") as output:
            command = [sys.executable, os.path.abspath(program.path), "--child"]
            code = subprocess.run(
                [*command, str(folder / "task.json")],
                stdout=output,
                stderr=output,
                env={**os.environ, **program.environment},
                check=False,
            ).returncode
        if code:
            raise SystemExit(f"{cache} failed:\n{log.read_text()[-3000:]}")
        for way in program.ways:
            reading = Reading(*torch.load(folder / f"{way}.pt"))
            row: common.Row = {
                "row": f"{cache} {way} {arguments.chunk}" if way == "chunk" else f"{cache} {way}",
                "model": title,
                program.engine: program.version(),
                "cache": cache,
                "segments": arguments.segments,
                "score_tokens": arguments.score_tokens,
                **sizes,
                **summary(reading, base),
            }
            base = base or reading
            rows.append(row)
            divergence = f"KL {row['kl']:.5f}, " if "kl" in row else ""
            same = f"top-1 {row['top1_agreement']:.2%}, " if "kl" in row else ""
            seconds = time.perf_counter() - begun
            print(
                f"{row['row']}: {divergence}{same}perplexity {row['perplexity']:.3f} "
                f"({seconds:.0f} s)",
                flush=True,
            )
        name = common.file_name(f"{program.engine}_quality", title)
        common.write_progress(name, rows, "row", arguments)
