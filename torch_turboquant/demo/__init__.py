"""The demo: one small language model, its normal KV cache, and packed caches beside it.

    python -m torch_turboquant demo

It answers prompts greedily with every cache, then lets every cache read the same real prose and
compares the predictions with those of the uncompressed model: memory, agreement, perplexity, KL
divergence and speed, from one run on this machine.

assets: the model and the text, out of packages of the index. measure: what is measured, and how.
report: the table, the texts, the JSON rows.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

DEFAULT_PRESETS = ("k5v4u", "k4v4", "k3v2")


def default_cache_dir() -> Path:
    """Where downloads are kept: $XDG_CACHE_HOME/torch_turboquant, or ~/.cache/torch_turboquant."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torch_turboquant"


def positive(text: str) -> int:
    """The type of an option that is a positive integer."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def _presets(text: str) -> tuple[str, ...]:
    from torch_turboquant.config import find_preset

    names = tuple(name.strip() for name in text.split(","))
    try:
        for name in names:
            find_preset(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """--device, of everything that runs a model."""
    parser.add_argument(
        "--device",
        default="auto",
        help="cpu, cuda, cuda:1, ... (default: cuda where torch sees it)",
    )


def add_cache_dir_argument(parser: argparse.ArgumentParser) -> None:
    """--cache-dir, of everything that may download the model and the text."""
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help=f"where the model and the text are kept (default {default_cache_dir()})",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's options."""
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
    from torch_turboquant.demo import assets, measure, report

    started = time.perf_counter()
    folder = args.cache_dir or default_cache_dir()
    try:
        model, tokenizer = assets.load_model(folder, args.device)
        articles = assets.load_articles(folder)
    except assets.AssetError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    prompts = measure.make_prompts(tokenizer, articles)
    prose = measure.prose_tokens(tokenizer, articles, args.prefill + args.score_tokens)
    loaded = time.perf_counter()

    results = measure.compare(
        model, prompts, prose, args.presets, args.new_tokens, args.prefill, args.chunk
    )
    report.show(results, tokenizer)
    print(
        f"\nLoaded in {loaded - started:.0f} s, measured in {time.perf_counter() - loaded:.0f} s. "
        f"Model and text: {folder}"
    )
    if args.json:
        report.write_json(args.json, results)
        print(f"Rows: {args.json}")
    return 0
