"""vLLM: its kernels beside ours (bench_vllm_kernels), and whole engines (bench_vllm*)."""

from __future__ import annotations

import re
from typing import Any

import quality_tables
import torch
from common import Row, file_name, markdown

import torch_turboquant as tq
from generator import results
from generator.clients import clients_table
from generator.results import h200_rows
from generator.words import half, name_of, paragraph, shape_of_model
from torch_turboquant.integrations.engine import pages


def vllm_rows(call: str, shape: dict[str, int]) -> dict[str, Row]:
    """Rows of bench_vllm_kernels on the GPU: contender -> row."""
    wanted = {"call": call, **shape}
    return {
        row["name"]: row for row in h200_rows("h200_vllm_kernels") if wanted.items() <= row.items()
    }


VLLM_PRESETS = {  # ours -> vLLM's preset with as many bits
    "k8v4": "turboquant_k8v4",
    "k4v4": "turboquant_4bit_nc",
    "k3v3": "turboquant_3bit_nc",
}


def vllm_table() -> str:
    """vLLM's TurboQuant and FlashAttention 3 beside ours: microseconds of one call."""
    attention = [row for row in h200_rows("h200_vllm_kernels") if row["call"] == "attention"]
    shapes = list(dict.fromkeys((row["batch"], row["context"]) for row in attention))
    calls = [
        (f"attention, {name_of(shape)}", "attention", {"batch": shape[0], "context": shape[1]})
        for shape in sorted(shapes, key=lambda shape: -shape[0] * shape[1])
    ]
    stores = [row for row in h200_rows("h200_vllm_kernels") if row["call"] == "store"]
    for tokens in sorted({row["tokens"] for row in stores}, reverse=True):
        calls.append((f"store, {tokens:,} tokens", "store", {"tokens": tokens}))
    lines = []
    for label, call, shape in calls:
        found = vllm_rows(call, shape)
        line = [
            label,
            *(f"{1000 * found[n]['ms']:.0f}" if n in found else "" for n in ("fa3", "fa3 fp8")),
        ]
        for ours, theirs in VLLM_PRESETS.items():
            a, b = found[theirs]["ms"], found[ours]["ms"]
            line.append(f"{1000 * a:,.0f} / {1000 * b:.1f} = {a / b:.1f}x")
        line.append(f"{1000 * found['k5v4u']['ms']:.1f}")
        lines.append(line)
    header = ["us", "FA3, bf16", "FA3, fp8"]
    pairs = [f"vLLM's {theirs} / {ours}" for ours, theirs in VLLM_PRESETS.items()]
    return markdown([*header, *pairs, "k5v4u"], lines)


ENGINE_MODEL = {"layers": 32, "kv_heads": 8, "head_dim": 128}  # Llama-3.1-8B
ENGINE_GIB = 72  # of bench_vllm
ENGINE_PAGE = 64  # tokens, where the user chooses none


def engine_presets() -> str:
    """What pages of vLLM take in every preset, and how many tokens fit."""

    def tokens(bytes_per_token: int) -> str:
        layers, heads = ENGINE_MODEL["layers"], ENGINE_MODEL["kv_heads"]
        return f"{ENGINE_GIB * 2**30 // (bytes_per_token * layers * heads):,}"

    d = ENGINE_MODEL["head_dim"]
    lines = [
        ["bf16", "16.00", f"{4 * d}", "1.00x", tokens(4 * d)],
        ["fp8", "8.00", f"{2 * d}", "2.00x", tokens(2 * d)],
    ]
    uses = {preset: f"{preset} ({use})" for use, (preset, _) in tq.NAMED_PRESETS.items()}
    for preset in tq.PRESETS:
        config = tq.preset(preset, d, sink_tokens=0, recent_window=0)
        size = pages.bytes_per_token(config, ENGINE_PAGE, torch.bfloat16)
        bits, times = f"{8 * size / (2 * d):.2f}", f"{4 * d / size:.2f}x"
        lines.append([uses.get(preset, preset), bits, str(size), times, tokens(size)])
    fits = f"tokens of Llama-3.1-8B in {ENGINE_GIB} GiB"
    return markdown(["cache", "bits", "bytes per token and KV head", "bf16's tokens", fits], lines)


def engine_latents() -> str:
    """What pages of latents take in vLLM in every preset: a token, and a request of DeepSeek-V3."""
    latent, rope, layers, request = 512, 64, 61, 131072
    plain = 2 * (latent + rope)
    sizes = {"bf16": plain}
    for preset in tq.LATENT_PRESETS:
        config = tq.latent_preset(preset, latent, rope)
        sizes[preset] = pages.bytes_per_token(config, ENGINE_PAGE, torch.bfloat16)
    lines = [
        [name, str(size), f"{plain / size:.2f}x", f"{size * layers * request / 1e9:.1f} GB"]
        for name, size in sizes.items()
    ]
    head = ["cache", "bytes per token and layer", "bf16's tokens", "131,072 tokens of 61 layers"]
    return markdown(head, lines)


def engine_rows() -> list[Row]:
    """Rows of bench_vllm on the GPU with as much memory for caches as documents say."""
    gib = ENGINE_GIB  # of rows that do not name it
    return [row for row in h200_rows("h200_vllm") if row.get("cache_gib", gib) == ENGINE_GIB]


def engine_base(row: Row, rows: list[Row]) -> Row | None:
    """bf16 at a row's point: of the same run, or the fastest of all runs."""
    bases = [r for r in rows if (r["point"], r["config"]) == (row["point"], "bf16")]
    same = [base for base in bases if base["commit"] == row["commit"]]
    return max(same or bases, key=lambda base: base["tokens_s"], default=None)


def engine_cell(row: Row | None, rows: list[Row]) -> str:
    """Milliseconds of a step, tokens a second, and how many times bf16's."""
    if row is None:
        return ""
    base = engine_base(row, rows)
    step, speed = row.get("step_ms", 0), row["tokens_s"]
    step = f"{step:.{0 if step >= 100 else 2}f} ms, " if step else ""
    times = f" ({speed / base['tokens_s']:.2f}x)" if base and base is not row else ""
    return f"{step}{speed:,.{0 if speed >= 100 else 1}f}/s{times}"


def engine_table(rows: list[Row]) -> str:
    """A row for each point, a column for each cache."""
    found = {(row["point"], row["config"]): row for row in reversed(rows)}
    configs = sorted({row["config"] for row in rows}, key=engine_order)
    memory = [found.get(("memory", config)) for config in configs]
    lines = [["tokens that fit", *(f"{r['cache_tokens']:,}" if r else "" for r in memory)]]
    points = {row["point"] for row in rows if "tokens_s" in row and "clients" not in row}
    for point in sorted(points, key=engine_point_order):
        cells = (engine_cell(found.get((point, config)), rows) for config in configs)
        lines.append([engine_point(point), *cells])
    return markdown(["", *configs], lines)


def engine_speed() -> str:
    """Whole engines on the GPU, a table for each version of vLLM that was measured."""
    if not (results.RESULTS / "h200_vllm.json").exists():
        return paragraph(
            "Whole engines have not been measured at this version: `python "
            "benchmarks/bench_vllm.py` does. The kernels have ([beside vLLM's "
            "own](measurements/performance_vllm.md))."
        )
    rows = engine_rows()
    tables = []
    for version, model, gpus in sorted(
        dict.fromkeys(map(engine_kind, rows)), key=lambda kind: kind[2]
    ):
        own = [row for row in rows if engine_kind(row) == (version, model, gpus)]
        title = f"vLLM {version}{shape_of_model(model, gpus)}"
        tables.append(f"{title}:\n\n{engine_table(own)}")
    return "\n\n".join(tables)


def engine_clients() -> str:
    """vLLM's clients."""
    return clients_table(engine_rows(), {"bf16": "bf16", "fp8": "fp8"})


def server_clients() -> str:
    """vLLM's server and what its own client has measured, the most clients first."""

    def interval(row: Row) -> int:
        return row.get("stream_interval", 1)

    def in_words(row: Row) -> str:
        clients, _, rate = row["point"].removeprefix("mix").partition("@")
        name = f"{clients} at most, {rate} requests/s come" if rate else f"{clients} at a time"
        name += f", {row['cache_gib']:g} GiB" if row["cache_gib"] != 8 else ""
        return name + (f", {interval(row)} tokens a message" if interval(row) > 1 else "")

    def order(row: Row) -> tuple[int, float, int, int, tuple[int, str]]:
        clients, _, rate = row["point"].removeprefix("mix").partition("@")
        load = -int(clients), -float(rate or "inf"), -interval(row), -row["requests"]
        return *load, engine_order(row["config"])

    lines = [
        [
            in_words(row),
            row["config"],
            f"{row['requests_s']:.1f}",
            f"{row['tokens_s']:,.0f}",
            f"{row['first_ms'] / 1000:.2f} s, {row['first_p99_ms'] / 1000:.2f} s",
            f"{row['token_ms']:.1f} ms, {row['token_p99_ms']:.1f} ms",
            f"{row['preempted']:,} in {row['requests']:,} requests",
        ]
        for row in sorted(h200_rows("h200_vllm_serve"), key=order)
    ]
    head = ["clients", "cache", "requests/s", "tokens/s", "first token", "time of a token"]
    return markdown([*head, "preemptions"], lines)


def engine_kind(row: Row) -> tuple[str, str, int]:
    """The rows of a table."""
    return row["vllm"], row["shape"], row["tensor_parallel"]


def engine_point_order(point: str) -> tuple[int, int, int, int]:
    """Decode steps, full memories, prompts, drafts; few tokens, then few sequences first."""
    drafts, _, rest = point.rpartition(":")
    kind, number = re.match(r"(\d+x|full|prompt)(\d+)", rest).groups()
    place = {"full": 1, "prompt": 2}.get(kind, 3 if drafts else 0)
    count = int(kind.removesuffix("x")) if kind.endswith("x") else 1
    return place, int(drafts.removeprefix("verify") or 0), count * int(number), count


def engine_order(config: str) -> tuple[int, str]:
    """bf16, fp8, ours, vLLM's own."""
    first = {"bf16": 0, "fp8": 1}
    return first.get(config, 3 if config.startswith("turboquant_") else 2), config


def engine_point(point: str) -> str:
    """A point of bench_vllm in words."""
    drafts, _, rest = point.rpartition(":")
    kind, number = re.match(r"(\d+x|full|prompt)(\d+)", rest).groups()
    context = f"{int(number):,}"
    text = {"full": f"as many as fit x {context}", "prompt": f"prompt of {context}"}.get(kind)
    text = text or f"{kind.removesuffix('x')} x {context}"
    return f"{text}, {drafts.removeprefix('verify')} drafts" if drafts else text


def engine_quality() -> str:
    """Predictions through vLLM's engine, for the models that were measured."""
    found = {
        title: results.read_rows(name)
        for title, model in quality_tables.MODELS.items()
        if (results.RESULTS / f"{(name := file_name('vllm_quality', model))}.json").exists()
    }
    if not found:
        return paragraph(
            "Predictions through vLLM's engine have not been measured at this version: `python "
            "benchmarks/bench_vllm_quality.py` does."
        )
    names = dict.fromkeys(
        (row["cache"], row["chunk"]) for rows in found.values() for row in rows if "kl" in row
    )
    lines = []
    for cache, chunk in sorted(names, key=engine_quality_order):
        of_cache = (
            next((r for r in rows if (r["cache"], r["chunk"]) == (cache, chunk)), None)
            for rows in found.values()
        )
        lines.append([cache, str(chunk), *map(engine_difference, of_cache)])
    texts = []
    for title, rows in found.items():
        bases = [row for row in rows if row["cache"] == "uncompressed"]
        counts = [
            f"{row['segments'] * row['score_tokens']:,} in chunks of {row['chunk']}"
            for row in sorted(bases, key=lambda row: -row["chunk"])
        ]
        texts.append(f"{title}: {' and '.join(counts)}, in {bases[0]['dtype']}")
    note = f"Tokens predicted, and the dtype of the model: {'; '.join(texts)}."
    return f"{markdown(['cache', 'chunk', *found], lines)}\n\n{paragraph(note)}"


def engine_quality_order(name: tuple[str, int]) -> tuple[Any, ...]:
    """Large chunks before small ones; with exact first tokens before those from codes."""
    cache, chunk = name
    preset, *variants = cache.split(":")
    presets = list(tq.PRESETS)
    place = presets.index(preset) if preset in presets else len(presets)
    return -chunk, preset not in presets, "codes" in variants, variants, place


def engine_difference(row: Row | None) -> str:
    """A cell: KL, top-1 agreement and change of perplexity."""
    if row is None:
        return ""
    digits = 4 if row["kl"] < 1 else 2
    kl = f"{row['kl']:.{digits}f} ± {half(row['kl_interval']):.{digits}f}"
    factor = 1 + row["perplexity_change"]
    change = f"{factor:,.0f}x" if factor > 10 else f"{row['perplexity_change']:+.2%}"
    return f"{kl}, {row['top1_agreement']:.1%}, {change}"
