"""The centers of a model, found once from a text and kept in a file.

    torch_turboquant calibrate MODEL TEXT -o FILE

The model reads the text, and the file gets the mean key of every layer and KV head with the scales
of its channels (torch_turboquant.ops.center). vLLM finds the file in the model's folder under the
name that the command gives it by default; TurboQuantCache takes it as `center=FILE`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from torch_turboquant import centers
from torch_turboquant.centers import CENTER_TOKENS, SINKS
from torch_turboquant.eval.options import add_device_argument, output_file, positive
from torch_turboquant.models import Fields, read_config, text_config, unsupported_attention

TOKENS = 8192
DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `torch_turboquant calibrate`."""
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="folder of a transformers model, with weights"
    )
    parser.add_argument(
        "text", type=Path, metavar="TEXT", help="UTF-8 text of the kind that the model will read"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=output_file,
        metavar="FILE",
        help=f"file of centers (default: MODEL/{centers.FILE_NAME}, which vLLM finds there)",
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        default=TOKENS,
        metavar="N",
        help="tokens of the text to read; a shorter text is read whole (default %(default)s)",
    )
    parser.add_argument(
        "--mean",
        action="store_true",
        help="only the mean keys, without the scales of channels, as center='mean' has them",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="to compute in; float16 overflows in some models (default: float32 on CPUs, bfloat16 "
        "on GPUs)",
    )
    add_device_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    started = time.perf_counter()
    try:
        found, tokens, model = calibrate(args)
        output = args.output or args.model / centers.FILE_NAME
        centers.save(output, found, model.config)
    except (OSError, ValueError) as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 1
    layers = sum(center is not None for center in found)
    what = "centers" if args.mean else "centers and channel scales"
    seconds = time.perf_counter() - started
    print(f"{output}: {what} of {layers} layers, from {tokens:,} tokens in {seconds:.0f} s")
    return 0


def calibrate(args: argparse.Namespace) -> tuple[list[Any], int, Any]:
    """The centers of all layers, how many tokens they are from, and the model.

    Raises:
        OSError, ValueError: model or text cannot be used; the text says why.
    """
    from torch_turboquant.eval import assets

    # What can be refused without the weights is refused before they are loaded.
    assets.check_dense(args.model)
    config = read_config(args.model)
    if problem := unsupported_attention(config):
        raise ValueError(
            f"{args.model} has {problem}, and centers are of keys that every KV head keeps: this "
            "model has no use for them"
        )
    if args.output is None and not os.access(args.model, os.W_OK):
        raise ValueError(f"the folder {args.model} cannot be written: name a file with -o FILE")
    text = read_text(args.text)

    import torch

    from torch_turboquant.integrations.transformers import TurboQuantCache

    dtype = getattr(torch, args.dtype) if args.dtype else None
    model, tokenizer = assets.load_dense(args.model, args.device, dtype)
    ids = tokenizer(text, return_tensors="pt").input_ids[0, : args.tokens]
    if len(ids) < CENTER_TOKENS + SINKS:
        raise ValueError(
            f"{args.text} gives {len(ids)} tokens; centers need {CENTER_TOKENS + SINKS}, and are "
            f"better from {TOKENS:,}: give a longer text, or more --tokens"
        )
    # The model's own limit: no position is read that it was not made for.
    longest = Fields(text_config(model.config)).get("max_position_embeddings") or len(ids)
    length = max(1, min(len(ids), longest))
    sequences = ids[: len(ids) // length * length].view(-1, length)
    found = TurboQuantCache.calibrate(model, sequences, skip=SINKS, scaled=not args.mean)
    return found, sequences.numel(), model


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        ValueError: there is none, or it is no UTF-8.
    """
    if not path.is_file():
        raise ValueError(f"there is no text {path}: give a file of plain text")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error
