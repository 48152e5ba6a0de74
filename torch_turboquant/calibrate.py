"""The centers of a model, found once from a text and kept in a file.

    torch_turboquant calibrate MODEL TEXT -o FILE
    torch_turboquant calibrate MODEL TEXT -o FILE --vllm '{"tensor_parallel_size": 4}'

The model reads the text, and the file gets the mean key of every layer and KV head with the scales
of its channels (torch_turboquant.ops.center). vLLM finds the file in the model's folder under the
name that the command gives it by default; TurboQuantCache takes it as `center=FILE`. A model that
is too large for one process of transformers is read by vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from torch_turboquant import centers
from torch_turboquant._checks import FLOATS_BY_NAME
from torch_turboquant.centers import CENTER_TOKENS, SINKS
from torch_turboquant.eval.options import add_device_argument, output_file, positive, read_text
from torch_turboquant.models import (
    Fields,
    Kind,
    is_latent,
    read_config,
    text_config,
    unsupported_attention,
)

TOKENS = 8192


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
        choices=FLOATS_BY_NAME,
        help="to compute in; float16 overflows in some models (default: float32 on CPUs, bfloat16 "
        "on GPUs)",
    )
    add_device_argument(parser)
    parser.add_argument(
        "--vllm",
        type=json_object,
        nargs="?",
        const={},
        metavar="JSON",
        help="read the text in vLLM instead of transformers; JSON: arguments of its LLM, such as "
        '{"tensor_parallel_size": 4}',
    )


def json_object(text: str) -> dict[str, Any]:
    """The type of an option that is an object in JSON.

    Raises:
        argparse.ArgumentTypeError: the text is something else.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no object of JSON")
    return value


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    started = time.perf_counter()
    output = args.output or args.model / centers.FILE_NAME
    read = with_transformers if args.vllm is None else with_vllm
    try:
        tokens = read(args, checked_text(args), output)
    except (OSError, ValueError) as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 1
    what = "centers" if args.mean else "centers and channel scales"
    seconds = time.perf_counter() - started
    print(f"{output}: {what} from {tokens:,} tokens in {seconds:.0f} s")
    return 0


def checked_text(args: argparse.Namespace) -> str:
    """The text; what can be refused without the model's weights is refused before they are loaded.

    Raises:
        ValueError: model or text cannot be used, or there is no place for the file.
    """
    from torch_turboquant.eval import assets

    assets.check_dense(args.model)
    config = read_config(args.model)
    latent = Kind.LATENT.value if is_latent(Fields(text_config(config))) else None
    if problem := latent or unsupported_attention(config):
        raise ValueError(
            f"{args.model} has {problem}, and centers are of keys that every KV head keeps: this "
            "model has no use for them"
        )
    if args.output is None and not os.access(args.model, os.W_OK):
        raise ValueError(f"the folder {args.model} cannot be written: name a file with -o FILE")
    if args.vllm is not None and args.device != "auto":
        raise ValueError("vLLM chooses its devices by itself: give --vllm without --device")
    return read_text(args.text)


def with_transformers(args: argparse.Namespace, text: str, output: Path) -> int:
    """Writes the file; returns how many tokens the model has read.

    Raises:
        ValueError: the text is too short, or the model is not supported.
    """
    import torch

    from torch_turboquant.eval import assets
    from torch_turboquant.integrations.transformers import TurboQuantCache

    dtype = getattr(torch, args.dtype) if args.dtype else None
    model, tokenizer = assets.load_dense(args.model, args.device, dtype)
    # The model's own limit: no position is read that it was not made for.
    longest = Fields(text_config(model.config)).get("max_position_embeddings")
    ids = in_sequences(tokenizer(text).input_ids, args, longest)
    found = TurboQuantCache.calibrate(model, torch.tensor(ids), skip=SINKS, scaled=not args.mean)
    centers.save(output, found, model.config)
    return sum(map(len, ids))


def with_vllm(args: argparse.Namespace, text: str, output: Path) -> int:
    """The same through vLLM's engine.

    Raises:
        ValueError: the text is too short, vLLM is missing, or --vllm asks for something else than
            a calibration needs.
    """
    from torch_turboquant.integrations.vllm import calibrator

    dtype = {"dtype": args.dtype} if args.dtype else {}
    options = calibrator.engine_options({**dtype, **args.vllm})
    try:
        from vllm import LLM
    except ModuleNotFoundError as error:
        raise ValueError("--vllm needs vLLM: pip install 'torch_turboquant[vllm]'") from error
    llm = LLM(str(args.model), **options)
    longest = llm.llm_engine.model_config.max_model_len - 1  # and one token is generated
    ids = in_sequences(llm.get_tokenizer().encode(text), args, longest)
    calibrator.calibrate(llm, ids, output, scaled=not args.mean)
    return sum(map(len, ids))


def in_sequences(ids: list[int], args: argparse.Namespace, longest: int | None) -> list[list[int]]:
    """The first tokens of a text as sequences of one length, which is at most `longest`.

    Raises:
        ValueError: too few tokens.
    """
    ids = ids[: args.tokens]
    if len(ids) < CENTER_TOKENS + SINKS:
        raise ValueError(
            f"{args.text} gives {len(ids)} tokens; centers need {CENTER_TOKENS + SINKS}, and are "
            f"better from {TOKENS:,}: give a longer text, or more --tokens"
        )
    length = min(len(ids), longest or len(ids))
    return [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
