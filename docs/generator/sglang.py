"""Whole engines of SGLang: bench_sglang, bench_sglang_quality."""

from __future__ import annotations

import re

import quality_tables
from common import Row, file_name, markdown

import torch_turboquant as tq
from generator import results
from generator.clients import clients_table
from generator.quality import quality_rows
from generator.results import h200_rows, several_runs, source
from generator.words import half, paragraph, shape_of_model

TITLES = {"fa3": "bf16, FA3", "fa3:fp8": "fp8, FA3", "triton": "bf16, Triton"}  # SGLang's caches


def sglang_speed() -> str:
    """SGLang's engine with several caches: a table for each model and number of GPUs."""
    if not (results.RESULTS / "h200_sglang.json").exists():
        return "Steps have not been measured yet."
    rows = [row for row in h200_rows("h200_sglang") if "clients" not in row]
    tables = []
    for model, gpus in sorted(dict.fromkeys(map(sglang_kind, rows)), key=lambda kind: kind[1]):
        table = sglang_table([row for row in rows if sglang_kind(row) == (model, gpus)])
        words = shape_of_model(model, gpus)
        tables.append(f"SGLang{words}:\n\n{table}" if words else table)
    return "\n\n".join([*tables, source("h200_sglang", rows, "../")])


def sglang_kind(row: Row) -> tuple[str, int]:
    """The rows of a table; older ones name neither."""
    return row.get("shape", "8b"), row.get("tensor_parallel", 1)


def sglang_table(rows: list[Row]) -> str:
    """A row for each point, a column for each cache, against FlashAttention 3 in bf16."""
    found = {(row["point"], row["config"]): row for row in rows}
    plain = "fa3" if ("memory", "fa3") in found else "triton"
    ours = [preset for preset in tq.PRESETS if ("memory", preset) in found]
    configs = [config for config in (*TITLES, *ours) if ("memory", config) in found]
    whole = found["memory", plain]["cache_tokens"]
    cells = []
    for config in configs:
        tokens = found["memory", config]["cache_tokens"]
        cells.append(f"{tokens:,}" + (f" ({tokens / whole:.2f}x)" if config != plain else ""))
    lines = [["tokens that fit", *cells]]
    points = dict.fromkeys(row["point"] for row in rows if "tokens_s" in row)
    for point in sorted(points, key=sglang_point_order):
        base = found.get((point, plain))
        cells = (sglang_cell(found.get((point, config)), base) for config in configs)
        lines.append([sglang_point(point), *cells])
    return markdown(["", *(TITLES.get(config, config) for config in configs)], lines)


def sglang_clients() -> str:
    """SGLang's clients, and which of them were not measured in one run."""
    rows = [row for row in h200_rows("h200_sglang") if "clients" in row]
    by_cache: dict[str, list[Row]] = {}
    for row in rows:
        by_cache.setdefault(TITLES.get(row["config"], row["config"]), []).append(row)
    note = several_runs(by_cache)
    return clients_table(rows, TITLES) + (f"\n\n{paragraph(note)}" if note else "")


def sglang_point_order(point: str) -> tuple[int, int, int]:
    """Decode steps, prompts, prefix hits; fewer sequences before more, few tokens before many."""
    kind, number = re.match(r"(\d+x|prompt|hit)(\d+)", point).groups()
    sequences = int(kind[:-1]) if kind.endswith("x") else 0
    return ("prompt", "hit").index(kind) + 1 if sequences == 0 else 0, sequences, int(number)


def sglang_point(point: str) -> str:
    """A point of bench_sglang in words."""
    kind, number, new = re.fullmatch(r"(\d+x|prompt|hit)(\d+)(?::(\d+))?", point).groups()
    context, behind = f"{int(number):,}", f"{int(new or 0):,} tokens behind a prefix"
    words = {"prompt": f"prompt of {context}", "hit": f"{behind} of {context}"}
    return words.get(kind) or f"{kind[:-1]} x {context}"


def sglang_cell(row: Row | None, base: Row | None) -> str:
    """Milliseconds of a step or to the first token, and how many times as fast as the base."""
    if row is None:
        return ""
    ms = row["step_ms"] if "step_ms" in row else 1e3 * row["prompt_s"]
    times = f" ({row['tokens_s'] / base['tokens_s']:.2f}x)" if base and base is not row else ""
    return f"{ms:.2f} ms{times}" if ms < 100 else f"{ms:.0f} ms{times}"


WAYS = ("decode", "hit")  # of bench_sglang_quality


def sglang_quality() -> str:
    """Predictions through SGLang's engine, beside those of the cache for transformers."""
    lines, texts = [], []
    for title, model in quality_tables.MODELS.items():
        name = file_name("sglang_quality", model)
        if not (results.RESULTS / f"{name}.json").exists():
            continue
        rows = results.read_rows(name)
        found = {row["row"]: row for row in rows}
        caches = {row["cache"] for row in rows} - {"uncompressed"}
        reference = quality_rows(file_name("quality", model))
        for cache in sorted(caches, key=list(tq.PRESETS).index):
            base = reference[cache]
            cells = (sglang_divergence(found.get(f"{cache} {way}"), base) for way in WAYS)
            lines.append([title, cache, *cells, sglang_divergence(base)])
        first = rows[0]
        texts.append(
            f"[{title}](../benchmarks/results/{name}.json): {first['segments']} x "
            f"{first['score_tokens']} behind {first['prefill']}, in {first['dtype']}"
        )
    if not lines:
        return paragraph(
            "Predictions through SGLang's engine have not been measured at this version: `python "
            "benchmarks/bench_sglang_quality.py` does."
        )
    head = ["model", "cache", "decode steps", "behind prefix hits", "cache for transformers"]
    note = f"Tokens predicted: {'; '.join(texts)}."
    return f"{markdown(head, lines)}\n\n{paragraph(note)}"


def sglang_divergence(row: Row | None, base: Row | None = None) -> str:
    """A cell: KL, how many times that of the base, and top-1 agreement."""
    if row is None:
        return ""
    times = f" ({row['kl'] / base['kl']:.2f}x)" if base else ""
    kl = f"{row['kl']:.4f} ± {half(row['kl_interval']):.4f}"
    return f"{kl}{times}, {row['top1_agreement']:.1%}"
