"""Writes centers for bench_quality: `--caches k4v4:center=FILE` measures with them.

The centers are those of a text, as TurboQuantCache.calibrate finds them. With --biases they are
those of a model's key biases alone: the mean of the biases after RoPE over the same positions,
without any text.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from torch_turboquant.eval import assets
from torch_turboquant.eval.predict import text_tokens
from torch_turboquant.integrations.transformers import TurboQuantCache, save_centers

SINKS = 4  # first positions, which are left out as in the cache


def of_biases(model: Any, tokens: int) -> list[Tensor]:
    """The mean of RoPE(bias) over positions SINKS .. tokens - 1, float32 [kv_heads, head_dim]."""
    positions = torch.arange(SINKS, tokens, device=model.device)[None]
    cos, sin = model.model.rotary_emb(torch.zeros(1, device=model.device), positions)
    centers = []
    for layer in model.model.layers:
        attention = layer.self_attn
        bias = attention.k_proj.bias.float().view(-1, 1, attention.head_dim)
        centers.append((bias * cos + rotate_half(bias) * sin).mean(1).cpu())
    return centers


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("file", type=Path, help="to write")
    options.add_argument("--model", type=Path, required=True, help="folder of transformers")
    options.add_argument("--device", default="auto", help="default: %(default)s")
    options.add_argument("--tokens", type=int, default=1024, help="default: %(default)s")
    source = options.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, help="UTF-8")
    source.add_argument("--biases", action="store_true", help="of the key projections")
    options.add_argument("--start", type=int, default=0, help="token of the text to begin with")
    arguments = options.parse_args()
    model, tokenizer = assets.load_dense(arguments.model, arguments.device, torch.float32)
    with torch.no_grad():
        if arguments.biases:
            centers = of_biases(model, arguments.tokens)
        else:
            text = arguments.text.read_text(encoding="utf-8")
            ids = text_tokens(tokenizer, [text], arguments.start + arguments.tokens)
            centers = TurboQuantCache.calibrate(model, ids[arguments.start :])
    save_centers(arguments.file, centers, model)
    print(f"{len(centers)} centers in {arguments.file}")


if __name__ == "__main__":
    main()
