"""Quality of compressed weights: language models whose linears are quantised, without kernels.

Every row quantises all linears of a model in one way, ours or a control's (weight_formats.py), and
compares its predictions with the model's own: KL divergence of the next token, perplexity, the
share of equal most likely tokens, and the errors of the linears' outputs. Embedding, head and norms
stay as they are. Everything is computed in float32.

The models at hand are stored in 4 to 8 bits, and a format with the same grid would reproduce them
without an error. So the reference is dithered: every stored weight is replaced by a draw from its
cell, and rounded to bfloat16 (`dither`).

Rows that need a text learn from articles that follow those which are scored. Scales of channels are
those of weight_calibration.channel_scales, "rounding" is its round_by_moments; both see the inputs
of the reference, not those of a model whose earlier layers are already quantised.

predicted_kl is a linear prediction: every linear has a sensitivity, its KL over the relative error
of its output when it alone is quantised, and errors of a row are multiplied with it and added up.
The rows "mixed" choose a format for every linear by such predictions, under a budget.

A GPU needs 3 minutes for all rows of SmolLM2-135M, two CPU cores some hours.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import torch
import weight_study as study
from torch import Tensor, nn
from weight_references import dither

from torch_turboquant.eval import assets


def segments(tokenizer: Any, articles: Sequence[str], count: int, tokens: int) -> Tensor:
    """The first tokens of `count` articles that have as many: int64 [count, tokens]."""
    found = []
    for article in articles:
        ids = tokenizer(article, truncation=True, max_length=tokens)["input_ids"]
        if len(ids) == tokens:
            found.append(torch.tensor(ids))
        if len(found) == count:
            return torch.stack(found)
    raise SystemExit(f"the text has {len(found)} articles of {tokens} tokens, {count} are needed")


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--model", type=Path, metavar="FOLDER", help="default: SmolLM2-135M")
    options.add_argument(
        "--gguf", type=Path, metavar="FILE", help="that the model was expanded from"
    )
    options.add_argument("--segments", type=int, default=24, help="of text (default: 24)")
    options.add_argument("--tokens", type=int, default=1024, help="of a segment (default: 1024)")
    options.add_argument("--calibration", type=int, default=16, help="segments (default: 16)")
    study.add_options(options)
    arguments = options.parse_args()
    network, tokenizer, name, file = load(arguments)
    articles = assets.load_articles(
        arguments.cache, 2 * (arguments.segments + arguments.calibration)
    )
    both = segments(
        tokenizer, articles, arguments.segments + arguments.calibration, arguments.tokens
    ).to(arguments.device)
    ids, calibration = both[: arguments.segments], both[arguments.segments :]
    stored = perplexity(network, ids)
    dither(network, file)
    model = study.Model.of(network, ids, calibration)
    reference = perplexity(network, ids)
    print(f"{name}: perplexity {stored:.3f} as stored, {reference:.3f} dithered", flush=True)
    shared = {
        "model": name,
        "scored_tokens": ids.numel(),
        "calibration_tokens": calibration.numel(),
    }
    shared |= {"stored_perplexity": stored, "reference_perplexity": reference}
    study.measure_rows(study.Bench(model, shared), name, arguments, tokens=4096)


def load(arguments: argparse.Namespace) -> tuple[nn.Module, Any, str, Path]:
    """The network in float32, its tokenizer, its name, and the file that it comes from."""
    if (arguments.model is None) != (arguments.gguf is None):
        raise SystemExit("--model and --gguf go together: the folder was expanded from the file")
    if arguments.model is None:
        network, tokenizer = assets.load_model(arguments.cache, arguments.device, torch.float32)
        file, name = arguments.cache / assets.MODEL.inner, "SmolLM2-135M-Instruct"
    else:
        network, tokenizer = assets.load_dense(arguments.model, arguments.device, torch.float32)
        file, name = arguments.gguf, arguments.model.name
    return network.requires_grad_(False), tokenizer, name, file


@torch.no_grad()
def perplexity(network: nn.Module, ids: Tensor) -> float:
    """Of the next token, over all segments."""
    losses = []
    for part, hidden in zip(ids, study.hidden_states(network, ids), strict=True):
        logits = network.lm_head(hidden[:-1])
        losses.append(nn.functional.cross_entropy(logits, part[1:]).double())
    return torch.stack(losses).mean().exp().item()


if __name__ == "__main__":
    main()
