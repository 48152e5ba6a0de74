"""Quality through SGLang's engine: predictions of a text with packed pages, beside those without.

Every cache is an engine of its own, which gets the beginning of segments of a text as prompts, and
then the text itself as its answer, token by token: a logit processor of SGLang notes what the
engine predicts, and leaves it no other token than the text's. So all predictions come from decode
steps, which read older tokens from the pages and the last ones from the exact tail. They are
compared with those of the same engine with SGLang's own cache in the model's dtype. Texts,
positions and numbers are those of bench_quality.py. There are two ways:

    decode   prompts that the engine has never seen
    hit      the same prompts again, which the prefix tree has

Caches are named PRESET, PRESET:none (no centers) or PRESET:window0 (no exact window). A preset has
the centers and channel scales of a file from another part of the text.

    python benchmarks/bench_sglang_quality.py --model FOLDER --text FILE
    python benchmarks/bench_sglang_quality.py          the demo's model and text

It writes results/sglang_quality_<model>.json, row by row, and needs SGLang. On a CPU SGLang needs
what tests/sglang/stand_ins has: PYTHONPATH=tests/sglang/stand_ins SGLANG_USE_CPU_ENGINE=1.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import engine_quality
import torch
from engine_quality import BASE

CACHES = ("k8v8", "k5v4u", "k4v4", "k4v2", "k5v4u:none", "k5v4u:window0")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
WAYS = ("decode", "hit")


def engine_options(task: dict[str, Any]) -> dict[str, Any]:
    """Arguments of SGLang's server."""
    on_gpu = torch.cuda.is_available()
    length = len(task["ids"][0])
    options: dict[str, Any] = {
        "model_path": task["model"],
        "skip_tokenizer_init": True,
        "dtype": task["dtype"],
        "device": "cuda" if on_gpu else "cpu",
        "page_size": 64,
        "context_length": length + 16,
        "max_running_requests": len(task["ids"]),
        "max_total_tokens": 2 * len(task["ids"]) * (length + 128),
        "chunked_prefill_size": -1,  # a whole prompt is one step, whose last token predicts
        "enable_custom_logit_processor": True,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "random_seed": 0,
        "log_level": "error",
    }
    if not on_gpu:
        options |= {"disable_cuda_graph": True, "disable_overlap_schedule": True}
        options["mem_fraction_static"] = 0.5
    preset, *variants = task["cache"].split(":")
    if preset == BASE:
        return {**options, "attention_backend": "triton" if on_gpu else "torch_native"}
    settings: dict[str, Any] = {"preset": preset}
    settings["centers"] = "none" if "none" in variants else task["centers"]
    if "window0" in variants:
        settings["window"] = 0
    options["attention_backend"] = "turboquant"
    return {**options, "json_model_override_args": json.dumps({"turboquant": settings})}


def read(task: dict[str, Any]) -> None:
    """Reads all segments with one cache, in both ways."""
    import sglang
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    class Teacher(CustomLogitProcessor):
        """Runs in the scheduler's process, to which it travels as bytes."""

        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            import numpy

            for row, given in zip(logits, custom_param_list, strict=True):
                ids, place = given["ids"], given.setdefault("place", 0)
                shape = (len(ids), logits.shape[1])
                mode = "r+" if place else "w+"
                file = numpy.memmap(given["file"], numpy.float32, mode, shape=shape)
                file[place] = row.float().log_softmax(0).cpu().numpy()
                file.flush()
                row.fill_(-float("inf"))
                row[ids[place]] = 0
                given["place"] = place + 1
            return logits

    llm = sglang.Engine(**engine_options(task))
    try:
        prompts = [segment[: task["prefill"]] for segment in task["ids"]]
        answers = [segment[task["prefill"] :] for segment in task["ids"]]
        for way in WAYS:
            files = [
                str(Path(task["folder"]) / f"scores{number}") for number in range(len(prompts))
            ]
            params = [
                {
                    "max_new_tokens": len(answer),
                    "temperature": 0,
                    "ignore_eos": True,
                    "custom_params": {"ids": answer, "file": file},
                }
                for answer, file in zip(answers, files, strict=True)
            ]
            found = llm.generate(
                input_ids=prompts,
                sampling_params=params,
                custom_logit_processor=[Teacher.to_str()] * len(prompts),
            )
            for answer, given in zip(found, answers, strict=True):
                assert answer["output_ids"] == given, "the engine has left the text"
                cached = answer["meta_info"]["cached_tokens"]
                assert (cached > 0) == (way == "hit"), (way, cached)
            scores = [
                torch.from_file(file, size=Path(file).stat().st_size // 4).view(len(answer), -1)
                for file, answer in zip(files, answers, strict=True)
            ]
            engine_quality.compare(task, way, scores)
    finally:
        llm.shutdown()


PROGRAM = engine_quality.Program(
    engine="sglang",
    documentation=__doc__,
    path=__file__,
    caches=CACHES,
    score_tokens=256,
    environment=ENVIRONMENT,
    ways=WAYS,
    version=lambda: f"sglang {version('sglang')}",
    read=read,
)

if __name__ == "__main__":
    engine_quality.main(PROGRAM)
