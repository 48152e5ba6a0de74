"""The demo: one small language model, its normal KV cache, packed caches, and packed weights.

    torch_turboquant demo

One run on this machine shows speed and memory (bfloat16, behind a long text), quality (float32:
every cache reads the same prose, and its predictions are compared with those of the uncompressed
cache) and texts (every cache answers the same prompts greedily).

The model, the text and the reading are those of torch_turboquant.eval. measure: what is measured,
and how. report: the tables, the texts, the JSON rows.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time

from torch_turboquant._extras import FETCHED_MODEL, FETCHED_TEXT, READING, require
from torch_turboquant.eval.options import (
    add_cache_dir_argument,
    add_device_argument,
    default_cache_dir,
    names,
    output_file,
    positive,
)

DEFAULT_PRESETS = ("k5v4u", "k4v4", "k3v2")
SPEED_TOKENS = 33  # 32 decode steps behind the text
PROSE = "Amphibian"  # articles of Wikipedia: subjects that nobody minds
PASSAGES = ("Aardvark", "Alphabet", "Albedo", "Astronaut", "Algae", "Atlantic Ocean")


def _presets(text: str) -> tuple[str, ...]:
    from torch_turboquant.config import find_preset

    found = tuple(names(text))
    try:
        for name in found:
            find_preset(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not found:
        raise argparse.ArgumentTypeError("names no preset")
    return found


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
        "--context",
        type=positive,
        default=4096,
        metavar="N",
        help="tokens of the text behind which speed is measured (default 4096)",
    )
    parser.add_argument(
        "--new-tokens",
        type=positive,
        default=64,
        metavar="N",
        help="tokens to generate for each prompt (default 64)",
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
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the rows to FILE"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns the exit status."""
    require("demo", *READING, *FETCHED_MODEL, *FETCHED_TEXT)
    import torch

    from torch_turboquant.demo import measure, report
    from torch_turboquant.eval import assets
    from torch_turboquant.eval.predict import text_tokens

    started = time.perf_counter()
    try:
        folder = args.cache_dir or default_cache_dir()
        costs = assets.to_fetch(folder)
        print(f"Takes about three minutes on two CPU cores. {costs}".rstrip(), flush=True)
        model, tokenizer = assets.load_model(folder, args.device, torch.float32)
        articles = assets.load_titles(folder, (PROSE, *PASSAGES))
        prompts = measure.make_prompts(tokenizer, articles[1:])
        long = text_tokens(tokenizer, articles[:1], args.context)
        prose = text_tokens(tokenizer, articles[:1], args.prefill + args.score_tokens)
    except (assets.AssetError, OSError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    half = None
    if measure.fast_bfloat16(str(model.device)):
        half = copy.deepcopy(model).to(torch.bfloat16)
    packed = measure.pack_weights(model, tokenizer, articles[1:])
    loaded = time.perf_counter()
    report.show_model(model)

    fast = half or model
    fast_packed = copy.deepcopy(packed).to(torch.bfloat16) if half else packed
    both = ((packed, None), (packed, args.presets[0]))
    speeds = []
    for network, preset in (
        *((fast, p) for p in (None, *args.presets)),
        *((fast_packed, preset) for _, preset in both),
    ):
        speeds.append(measure.speed(network, preset, long, SPEED_TOKENS))
    report.show_speed(speeds)

    runs = [(model, None), *([(half, None)] if half else []), *((model, p) for p in args.presets)]
    runs += both
    results = measure.read_prose(runs, prose, args.prefill, args.chunk)
    report.show_reading(results)  # generation takes as long again: nobody has to wait for it
    measure.add_answers(runs, results, prompts, args.new_tokens)
    report.show_answers(results, tokenizer)
    print(
        f"\nLoaded in {loaded - started:.0f} s, measured in {time.perf_counter() - loaded:.0f} s. "
        f"Model and text: {folder}"
    )
    if args.json:
        report.write_json(args.json, speeds, results)
        print(f"Rows: {args.json}")
    return 0
