"""How the demo shows its results: tables of at most 100 columns, the texts, and JSON rows."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torch_turboquant.demo.measure import MODEL_NAME, Result, Speed, equal_prefix
from torch_turboquant.eval.origin import device_name, row_origin
from torch_turboquant.eval.report import WIDTH, table

SHOWN = 2  # answers that are printed


def name_of(r: Speed | Result) -> str:
    """The first cell of a row: a preset, or the dtype of an uncompressed cache; packed weights."""
    name = r.preset or f"none, {r.info['dtype']}"
    bits = r.info.get("weight_bits")
    return name if bits is None else f"{name}; weights {bits}"


def speed_table(speeds: Sequence[Speed]) -> str:
    """One row per cache; the first is the uncompressed one."""
    base = speeds[0]
    lines = [
        [
            name_of(r),
            f"{r.bytes_per_token:,.0f}",
            f"{r.bytes_total / 2**20:.1f}",
            f"{base.bytes_total / r.bytes_total:.2f}x",
            f"{r.prompt_seconds:.1f} s",
            f"{r.tokens_per_second:.1f}",
            f"{r.tokens_per_second / base.tokens_per_second:.2f}x",
        ]
        for r in speeds
    ]
    header = "cache,B/token,MiB,smaller,prompt,tokens/s,faster"
    return table(header.split(","), lines)


def speed_legend(speeds: Sequence[Speed]) -> str:
    """What the columns of `speed_table` mean, with the numbers of this run."""
    sinks, window = speeds[-1].info["tail"]
    text = (
        f"The model computes in {speeds[0].info['dtype']} and reads a text at once; prompt is the "
        "time of that, tokens/s the rate after it. MiB: all that the cache holds at the end, "
        f"{speeds[0].tokens:,} tokens, with the exact tail of packed caches (first {sinks}, last "
        f"{window} tokens). B/token: bytes that one more token adds, keys and values of all layers."
    )
    for r in speeds:
        if r.info.get("weight_bits") is not None:
            text += (
                f" weights {r.info['weight_bits']}: linear layers in {r.info['weight_bits']} bits, "
                f"the model takes {r.info['model_bytes'] / 2**20:.0f} MiB in place of "
                f"{speeds[0].info['model_bytes'] / 2**20:.0f}."
            )
            break
    return textwrap.fill(text, WIDTH)


def quality_table(results: Sequence[Result]) -> str:
    """One row per cache; the last column is there once there are answers."""
    header = "cache,perplexity,change,KL,top-1,greedy".split(",")
    base = results[0]
    rows = []
    for r in results:
        line = [name_of(r), f"{r.perplexity:.3f}", "", "", "", ""]
        if r is not base:
            line[2:] = [
                f"{100 * (r.perplexity / base.perplexity - 1):+.2f}%",
                f"{r.kl:.4f}",
                f"{100 * r.top1:.1f}%",
                f"{100 * r.agreement:.0f}%",
            ]
        rows.append(line)
    if not base.answers:
        header, rows = header[:-1], [row[:-1] for row in rows]
    return table(header, rows)


def legend(results: Sequence[Result]) -> str:
    """What the columns of `quality_table` mean, with the numbers of this run."""
    base = results[0]
    text = (
        "Everything is compared with the first row. perplexity, KL (nats) and top-1 (the same most "
        f"likely token): {base.scored:,} tokens of Wikipedia, each predicted through the cache. "
        f"Packed caches and weights run in {base.info['dtype']}, so that nothing else differs."
    )
    if base.answers:
        many, length = len(base.answers), len(base.answers[0])
        text += f" greedy: how many of {many} x {length} generated tokens come before the first"
        text += " difference from the first row."
        text += " One token that differs changes all that follow it"
        rounded = [r for r in results[1:] if r.preset is None and r.info.get("weight_bits") is None]
        for r in rounded:
            text += (
                f", and rounding is enough: the same model in {r.info['dtype']}, nothing "
                f"compressed, keeps {100 * r.agreement:.0f}%"
            )
        text += "."
    return textwrap.fill(text, WIDTH)


def answers(results: Sequence[Result], tokenizer: Any) -> str:
    """Some generated texts: that of the first row in full, others where they differ."""
    parts = []
    for i, reference in enumerate(results[0].answers[:SHOWN]):
        parts.append(f"Prompt {i + 1}, {name_of(results[0])}:")
        parts.append(_wrapped(tokenizer.decode(reference, skip_special_tokens=True)))
        for r in results[1:]:
            equal = equal_prefix(reference, r.answers[i])
            if equal == len(reference):
                parts.append(f"{name_of(r)}: the same {equal} tokens")
                continue
            rest = tokenizer.decode(r.answers[i][equal:], skip_special_tokens=True)
            parts.append(f"{name_of(r)}: the same {equal} tokens, then")
            parts.append(_wrapped("..." + rest))
        parts.append("")
    return "\n".join(parts).rstrip()


def _wrapped(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    style = {"width": WIDTH, "initial_indent": "  | ", "subsequent_indent": "  | "}
    return "\n".join(textwrap.fill(line, **style) for line in lines)


def show_model(model: Any) -> None:
    """Prints what is measured, and where."""
    c = model.config
    heads = f"{c.num_attention_heads}/{c.num_key_value_heads} heads of {c.head_dim}"
    print(f"\n{MODEL_NAME}: {c.num_hidden_layers} layers, {heads}")
    where = f"{device_name(str(model.device))}, {torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}", flush=True)


def show_speed(speeds: Sequence[Speed]) -> None:
    """Prints the first part: speed and memory."""
    print(f"\n1. Speed and memory behind {speeds[0].tokens:,} tokens\n")
    print(speed_table(speeds) + "\n\n" + speed_legend(speeds), flush=True)


def show_reading(results: Sequence[Result]) -> None:
    """Prints what is known before the caches generate anything."""
    print("\n2. Quality\n")
    print(quality_table(results), flush=True)


def show_answers(results: Sequence[Result], tokenizer: Any) -> None:
    """Prints the complete table, what its columns mean, and the generated texts."""
    print("\n3. The same with greedy answers to prompts, and their texts\n")
    print(quality_table(results) + "\n")
    print(legend(results))
    print("\n" + answers(results, tokenizer))


def rows(speeds: Sequence[Speed], results: Sequence[Result]) -> list[dict[str, Any]]:
    """The results as plain data for JSON: one row per cache and part, "speed" or "quality"."""
    base = results[0]
    found: list[dict[str, Any]] = []
    for s in speeds:
        found.append(
            {
                **_origin(s, "speed"),
                "context": s.tokens,
                "bytes": s.bytes_total,
                "bytes_per_token": s.bytes_per_token,
                "compression": speeds[0].bytes_total / s.bytes_total,
                "prompt_seconds": s.prompt_seconds,
                # a single token has no rate, and JSON no NaN
                "tokens_per_second": None
                if math.isnan(s.tokens_per_second)
                else s.tokens_per_second,
            }
        )
    for r in results:
        found.append(
            {
                **_origin(r, "quality"),
                "context": r.tokens,
                "scored_tokens": r.scored,
                "perplexity": r.perplexity,
                "perplexity_change": r.perplexity / base.perplexity - 1,
                "kl": r.kl,
                "top1_agreement": r.top1,
                "greedy_agreement": r.agreement,
            }
        )
    return found


def _origin(r: Speed | Result, part: str) -> dict[str, Any]:
    return {
        **row_origin("demo", r.info["model_device"]),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "part": part,
        "preset": r.preset or "uncompressed",
        "batch": 1,
        **r.info,
    }


def write_json(path: Path, speeds: Sequence[Speed], results: Sequence[Result]) -> None:
    """Writes `rows` to a file."""
    path.write_text(json.dumps(rows(speeds, results), indent=1, allow_nan=False) + "\n")
