"""How the demo shows its results: tables of at most 100 columns, the texts, and JSON rows."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torch_turboquant.demo.measure import Result, equal_prefix
from torch_turboquant.eval.origin import device_name, row_origin
from torch_turboquant.eval.report import WIDTH, table


def quality_table(results: Sequence[Result]) -> str:
    """One row per cache; the last two columns are there once there are answers."""
    header = "cache,B/token,vs 16 bit,MiB,perplexity,change,KL,top-1,greedy,tokens/s".split(",")
    base = results[0]
    rows = []
    for r in results:
        packed = r.preset is not None
        change = 100 * (r.perplexity / base.perplexity - 1)
        rows.append(
            [
                r.preset or f"none ({r.info['dtype']})",
                f"{r.bytes_per_token:,.0f}",
                f"{r.compression:.2f}x",
                f"{r.bytes_total / 2**20:.2f}",
                f"{r.perplexity:.3f}",
                f"{change:+.2f}%" if packed else "",
                f"{r.kl:.4f}" if packed else "",
                f"{100 * r.top1:.1f}%" if packed else "",
                f"{100 * r.agreement:.0f}%" if packed else "",
                f"{r.tokens_per_second:.1f}",
            ]
        )
    if not base.answers:
        header, rows = header[:-2], [row[:-2] for row in rows]
    return table(header, rows)


def legend(results: Sequence[Result]) -> str:
    """What the columns of `quality_table` mean, with the numbers of this run."""
    r = results[-1]
    sinks, window = r.info["tail"]
    text = (
        "B/token: bytes that one more token adds, keys and values of all layers, measured from the "
        f"tensors. MiB: all that the cache holds after {r.tokens:,} tokens, with the exact tail of "
        f"packed caches (first {sinks}, last {window} tokens). perplexity, KL (nats) and top-1 "
        f"agreement: {r.scored:,} tokens of Wikipedia, each predicted through the cache."
    )
    if results[0].answers:
        text += " greedy: generated tokens before the first difference from the uncompressed cache."
    return textwrap.fill(text, WIDTH)


def answers(results: Sequence[Result], tokenizer: Any) -> str:
    """The generated texts: that of the uncompressed cache in full, others where they differ."""
    parts = []
    for i, reference in enumerate(results[0].answers):
        parts.append(f"Prompt {i + 1}, no compression:")
        parts.append(_wrapped(tokenizer.decode(reference, skip_special_tokens=True)))
        for r in results[1:]:
            equal = equal_prefix(reference, r.answers[i])
            if equal == len(reference):
                parts.append(f"{r.preset}: the same {equal} tokens")
                continue
            rest = tokenizer.decode(r.answers[i][equal:], skip_special_tokens=True)
            parts.append(f"{r.preset}: the same {equal} tokens, then")
            parts.append(_wrapped("..." + rest))
        parts.append("")
    return "\n".join(parts).rstrip()


def _wrapped(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    style = {"width": WIDTH, "initial_indent": "  | ", "subsequent_indent": "  | "}
    return "\n".join(textwrap.fill(line, **style) for line in lines)


def show_reading(results: Sequence[Result]) -> None:
    """Prints what is known before the caches generate anything: sizes and predictions."""
    info = results[0].info
    shape = (
        f"{info['layers']} layers, {info['q_heads']}/{info['kv_heads']} heads of {info['head_dim']}"
    )
    print(f"\n{info['model']}: {shape}")
    print(f"{device_name(info['model_device'])}, {torch.get_num_threads()} threads, ", end="")
    print(f"torch {torch.__version__}\n")
    print(quality_table(results) + "\n", flush=True)


def show_answers(results: Sequence[Result], tokenizer: Any) -> None:
    """Prints the complete table, what its columns mean, and the generated texts."""
    print(quality_table(results) + "\n")
    print(legend(results))
    print("\n" + answers(results, tokenizer))


def rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The results as plain data, one row per cache, for JSON."""
    base = results[0]
    return [
        {
            **row_origin("demo", r.info["model_device"]),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "preset": r.preset or "uncompressed",
            "batch": 1,
            "context": r.tokens,
            **r.info,
            "bytes": r.bytes_total,
            "bytes_per_token": r.bytes_per_token,
            "compression_vs_16_bit": r.compression,
            "scored_tokens": r.scored,
            "perplexity": r.perplexity,
            "perplexity_change": r.perplexity / base.perplexity - 1,
            "kl": r.kl,
            "top1_agreement": r.top1,
            "greedy_agreement": r.agreement,
            # a single token has no rate, and JSON no NaN
            "tokens_per_second": None if math.isnan(r.tokens_per_second) else r.tokens_per_second,
        }
        for r in results
    ]


def write_json(path: Path, results: Sequence[Result]) -> None:
    """Writes `rows` to a file."""
    path.write_text(json.dumps(rows(results), indent=1, allow_nan=False) + "\n")
