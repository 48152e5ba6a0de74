"""The demo: one small language model, its normal KV cache, and packed caches beside it.

    python -m torch_turboquant demo

Every cache reads the same prose, and its predictions are compared with those of the uncompressed
cache; then every cache answers the same prompts greedily. One run on this machine shows memory,
perplexity, KL divergence, agreement and speed.

The model, the text and the reading are those of torch_turboquant.eval. measure: what is measured,
and how. report: the tables, the texts, the JSON rows.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from torch_turboquant.eval.options import (
    add_cache_dir_argument,
    add_device_argument,
    default_cache_dir,
    positive,
)

DEFAULT_PRESETS = ("k5v4u", "k4v4", "k3v2")


def _presets(text: str) -> tuple[str, ...]:
    from torch_turboquant.config import find_preset

    names = tuple(name.strip() for name in text.split(","))
    try:
        for name in names:
            find_preset(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's options."""
    parser.add_argument(
        "--presets",
        type=_presets,
        default=DEFAULT_PRESETS,
        metavar="A,B,...",
        help=f"caches to compare (default {','.join(DEFAULT_PRESETS)})",
    )
    parser.add_argument(
        "--new-tokens",
        type=positive,
        default=96,
        metavar="N",
        help="tokens to generate for each prompt (default 96)",
    )
    parser.add_argument(
        "--prefill",
        type=positive,
        default=512,
        metavar="N",
        help="tokens of prose to read at once (default 512)",
    )
    parser.add_argument(
        "--score-tokens",
        type=positive,
        default=1536,
        metavar="N",
        help="tokens of prose to predict after that, through the cache (default 1536)",
    )
    parser.add_argument(
        "--chunk",
        type=positive,
        default=32,
        metavar="N",
        help="tokens per forward while predicting; does not change the results (default 32)",
    )
    add_device_argument(parser)
    add_cache_dir_argument(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns the exit status."""
    from torch_turboquant.demo import measure, report
    from torch_turboquant.eval import assets
    from torch_turboquant.eval.predict import text_tokens

    started = time.perf_counter()
    folder = args.cache_dir or default_cache_dir()
    try:
        model, tokenizer = assets.load_model(folder, args.device)
        articles = assets.load_articles(folder)
    except assets.AssetError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    prompts = measure.make_prompts(tokenizer, articles)
    prose = text_tokens(tokenizer, articles, args.prefill + args.score_tokens)
    loaded = time.perf_counter()

    results = measure.read_prose(model, [None, *args.presets], prose, args.prefill, args.chunk)
    report.show_reading(results)  # generation takes as long again: nobody has to wait for it
    measure.add_answers(model, results, prompts, args.new_tokens)
    report.show_answers(results, tokenizer)
    print(
        f"\nLoaded in {loaded - started:.0f} s, measured in {time.perf_counter() - loaded:.0f} s. "
        f"Model and text: {folder}"
    )
    if args.json:
        report.write_json(args.json, results)
        print(f"Rows: {args.json}")
    return 0
