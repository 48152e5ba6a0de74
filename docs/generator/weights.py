"""Packed weights in time: bench_linear, bench_experts, bench_generate, bench_cpu_model."""

from __future__ import annotations

from typing import Any

from common import markdown

from generator import results
from generator.results import h200_rows, source

LINEAR_MATRICES = {
    "layer": "all of a layer",
    "qkv": "qkv, 6144 x 4096",
    "o": "o, 4096 x 4096",
    "gate_up": "gate and up, 28672 x 4096",
    "down": "down, 4096 x 14336",
    "8192": "8192 x 8192",
    "lm_head": "lm_head, 128256 x 4096",
    "small": "2048 x 2048",
    "narrow": "896 x 4864",
}


def times(row: dict[str, Any], bf16: str) -> list[str]:
    """Our time, its share of the read bandwidth, that in bf16, and the speed-up."""
    return [f"{row['us']:,.1f}", f"{row['of_read']:.0%}", bf16, f"{row['speedup']:.2f}x"]


def linear_speed() -> str:
    """Times of linear layers with packed weights, a row for each matrix, format and batch."""
    rows = h200_rows("h200_linear")
    lines = [
        [
            LINEAR_MATRICES[str(row["matrix"])],
            f"`{row['format']}`",
            f"{row['tokens']:,}",
            *times(row, f"{row['other_us']['bf16']:,.1f}"),
            f"{row['error']:.4f} ({row['w4a16_error']:.4f})",
        ]
        for row in rows
    ]
    header = ["matrices", "format", "tokens", "us", "of read", "bf16, us", "speed-up", "error"]
    return f"{markdown(header, lines)}\n\n{source('h200_linear', rows, '../../')}"


EXPERT_MODELS = {
    "qwen3-30b-a3b": "Qwen3-30B-A3B, 8 of 128",
    "gpt-oss-20b": "gpt-oss-20b, 4 of 32",
    "mixtral-8x7b": "Mixtral-8x7B, 2 of 8",
    "deepseek-v3": "DeepSeek-V3, 8 of 256",
}


def best_of_experts(others: dict[str, float]) -> str:
    """Time and name of the fastest way to multiply by experts in bf16."""
    name = min(others, key=others.__getitem__)
    return f"{others[name]:,.1f}, {name.replace('bf16', 'grouped_mm')}"


def expert_speed() -> str:
    """Times of both products of a layer's packed experts."""
    rows = h200_rows("h200_experts")
    lines = [
        [
            EXPERT_MODELS[str(row["model"])],
            f"`{row['format']}`",
            f"{row['tokens']:,}",
            f"{row['distinct_experts']:,.0f}",
            *times(row, best_of_experts(row["other_us"])),
        ]
        for row in rows
    ]
    header = ["shape", "format", "tokens", "chosen", "us", "of read", "best bf16, us", "speed-up"]
    return f"{markdown(header, lines)}\n\n{source('h200_experts', rows, '../../')}"


MODES = {"eager": "eager", "graph": "CUDA graph", "compile": "compiled"}


def packed_model_speed() -> str:
    """Times and memory of a model as it is, with packed weights, a packed cache, and both."""
    rows = h200_rows("h200_weights")
    found = {
        (r["part"], r["mode"], r["batch"], r["context"], r["kind"], r.get("weights", 0)): r
        for r in rows
    }
    lines = []
    points = dict.fromkeys(key[:4] for key in found)
    steps = [point for point in points if point[0] == "step"]
    steps.sort(key=lambda point: (point[3], point[2], list(MODES).index(point[1])))
    for part, mode, batch, context in [*steps, *(p for p in points if p[0] == "prompt")]:
        kinds = ("dynamic" if mode == "eager" else "unmasked", "k5v4u")
        some = [
            found.get((part, mode, batch, context, kind, weights))
            for weights in (0, 4)
            for kind in kinds
        ]
        if not any(some[2:]):  # without packed weights only
            continue
        times = [row and row["ttft_ms" if part == "prompt" else "tpot_ms"] for row in some]
        what = "first token" if part == "prompt" else f"step, {MODES[mode]}"
        lines.append(
            [f"{what}, {batch} x {context:,}"]
            + [
                f"{ms:.2f} ms, {row['peak_bytes'] / 2**30:.1f} GiB" if row else ""
                for row, ms in zip(some, times, strict=True)
            ]
            + [f"{times[0] / ms:.2f}x" if ms and times[0] else "" for ms in times[2:]]
        )
    header = ["", "bfloat16", "its cache `k5v4u`", "weights of 4 bits", "both"]
    header += ["weights: faster", "both: faster"]
    origin = source("h200_weights", rows, "../")
    return f"{markdown(header, lines)}\n\n{origin}"


def cpu_model_speed() -> str:
    """Times of a model on the CPU, a row for each form of its weights."""
    rows = results.read_rows("cpu_model")
    rows = [row for row in rows if row["device"] == rows[0]["device"]]
    found = {(row["weights"], row["prompt"]): row for row in rows}
    prompts = list(dict.fromkeys(row["prompt"] for row in rows))
    lines = []
    for weights in dict.fromkeys(row["weights"] for row in rows):
        some = [found[weights, prompt] for prompt in prompts]
        plain = [found["bfloat16", prompt] for prompt in prompts]
        step, plain_step = some[0]["tpot_ms"], plain[0]["tpot_ms"]
        lines.append(
            [
                f"`{weights}`",
                f"{some[0]['weights_bytes'] / 2**30:.2f} GiB",
                f"{1e3 / step:.1f}",
                f"{plain_step / step:.2f}x",
            ]
        )
        for row, other in zip(some, plain, strict=True):
            lines[-1].append(f"{row['ttft_ms']:.0f} ms ({other['ttft_ms'] / row['ttft_ms']:.2f}x)")
    header = ["weights", "bytes", "tokens/s", "of bfloat16"]
    header += [f"first token after {prompt}" for prompt in prompts]
    threads = f"{rows[0]['device']}, {rows[0]['threads']} threads"
    origin = source("cpu_model", rows, "../")
    return f"{markdown(header, lines)}\n\n{threads}; {origin}"
