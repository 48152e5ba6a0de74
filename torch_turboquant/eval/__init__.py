"""The evaluation: what quantised caches do to the quality of a model, beside what they take.

    torch_turboquant eval --model PATH --text FILE

Every cache predicts the same text token by token through itself. Perplexity, KL divergence and
agreement compare it with the uncompressed cache. docs/quality.md has the results.

options, assets: the command line, the model and the text. caches: the names of caches. weights: the
names of packed weights. controls:
published ways of quantising, to compare with. predict: predictions through a cache. measure:
predictions of a whole text, and their intervals. layers: errors of single layers. needle, tasks,
synthetic: questions answered through the cache. steps: times of decode steps. strategies: what
people choose from, in one table. allocation: bits for each layer under a budget. rows: what is left
to measure, and the rows of results. origin: where they come from. report: table, JSON,
picture.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from torch_turboquant._checks import FLOATS_BY_NAME
from torch_turboquant._extras import (
    FETCHED_MODEL,
    FETCHED_TEXT,
    PICTURE,
    READING,
    require,
)
from torch_turboquant.config import PRESETS
from torch_turboquant.eval.options import (
    actual_device,
    add_cache_dir_argument,
    add_device_argument,
    default_cache_dir,
    names,
    output_file,
    positive,
    read_text,
)

ARTICLES = 12  # of Wikipedia, where no text is given
NEEDLE_LENGTHS = (512, 1024, 2048)
STRATEGY_CONTEXT = 2048  # tokens of a context in the table of strategies
PICTURES = (".png", ".svg", ".pdf")


def _choices(text: str) -> list[Any]:
    """The type of --caches: names, see options.names."""
    from torch_turboquant.eval.caches import Choice

    try:
        return [Choice.parse(part) for part in names(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _weights(text: str) -> list[Any]:
    """The type of --weights."""
    from torch_turboquant.eval.weights import WeightChoice

    try:
        return [WeightChoice.parse(part) for part in names(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class _Given(argparse.Action):
    """Notes that an option was given, whose default depends on --strategies."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, values)
        namespace.given = {*getattr(namespace, "given", ()), self.dest}


def _memory(text: str) -> int:
    """The type of --gpu."""
    from torch_turboquant.memory.cli import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _picture(text: str) -> Path:
    """The type of --picture."""
    path = output_file(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text} ends in none of {', '.join(PICTURES)}")
    return path


def default_caches() -> str:
    """All presets and all controls, as --caches takes them."""
    from torch_turboquant.eval.controls import CONTROLS

    return ",".join([*PRESETS, *CONTROLS])


def add_measure_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say what is measured, on which model and text.

    These are all options but those of the device and the outputs.
    """
    parser.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="folder of a transformers model (default: the demo's, downloaded once)",
    )
    parser.add_argument(
        "--dtype",
        choices=FLOATS_BY_NAME,
        help="to compute in: float32 shows what a cache does and nothing else, the others add "
        "their own rounding to every cache (default: float32 on CPUs, bfloat16 on GPUs)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="UTF-8 text to predict (default: the demo's Wikipedia articles)",
    )
    parser.add_argument(
        "--caches",
        type=_choices,
        default=default_caches(),
        action=_Given,
        metavar="A,B,...",
        help="caches beside the uncompressed one: presets, also with changes "
        "(k4v4:recent_window=0,center=none), and controls (default: all of both: %(default)s)",
    )
    parser.add_argument(
        "--weights",
        type=_weights,
        default=[],
        metavar="A,B,...",
        help="also packed weights, by their bits, with changes or a cache: 4, 8:skip=lm_head, "
        "4:calibrate=train.txt, 4+k5v4u",
    )
    parser.add_argument(
        "--segments",
        type=positive,
        default=2,
        metavar="N",
        help="pieces of text, each with an empty cache (default %(default)s)",
    )
    parser.add_argument(
        "--prefill",
        type=positive,
        default=512,
        action=_Given,
        metavar="N",
        help="tokens of a segment to read at once (default %(default)s, with --strategies "
        f"{STRATEGY_CONTEXT})",
    )
    parser.add_argument(
        "--score-tokens",
        type=positive,
        default=1024,
        metavar="N",
        help="tokens of a segment to predict after that, through the cache (default %(default)s); "
        "the uncompressed predictions are held on the device, 4 bytes x vocabulary each",
    )
    parser.add_argument(
        "--chunk",
        type=positive,
        default=32,
        metavar="N",
        help="tokens per forward while predicting (default %(default)s)",
    )
    parser.add_argument(
        "--no-layers",
        action="store_true",
        help="leave out the errors of single layers, which need all keys and values at once",
    )
    parser.add_argument(
        "--needle",
        type=positive,
        nargs="*",
        metavar="TOKENS",
        help="also hide a number in texts of so many tokens, at five depths, and ask for it "
        f"(without lengths: {' '.join(map(str, NEEDLE_LENGTHS))})",
    )
    parser.add_argument(
        "--tasks",
        action="store_true",
        help="also compare greedy answers: 40 prompts of five kinds, and conversations",
    )
    parser.add_argument(
        "--synthetic",
        type=positive,
        metavar="TOKENS",
        help="also eleven tasks of RULER, made from a seed, over contexts of so many tokens, each "
        f"with two questions (with --strategies: {STRATEGY_CONTEXT})",
    )
    parser.add_argument(
        "--samples",
        type=positive,
        default=2,
        metavar="N",
        help="contexts of each of these tasks (default %(default)s)",
    )
    add_cache_dir_argument(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `torch_turboquant eval`."""
    add_measure_arguments(parser)
    parser.add_argument(
        "--strategies",
        action="store_true",
        help="one table of what people choose from: fewer bits, fewer tokens (eviction, and at "
        "random), both; with --caches: of these",
    )
    parser.add_argument(
        "--gpu",
        type=_memory,
        metavar="SIZE",
        help="with --strategies: also how many requests fit a GPU of so many bytes, such as 80GB",
    )
    parser.add_argument(
        "--steps",
        action="store_true",
        help="with --strategies: also time a decode step of 64 sequences of 8,192 tokens, in a "
        "CUDA graph; takes some GB of a GPU that nothing else uses",
    )
    add_device_argument(parser)
    parser.add_argument(
        "--json",
        type=output_file,
        default=Path("quality.json"),
        metavar="FILE",
        help="rows; what it has of the same run is not measured again (default %(default)s)",
    )
    parser.add_argument(
        "--picture",
        type=_picture,
        metavar="FILE",
        help=f"also draw quality against size ({', '.join(PICTURES)})",
    )


def needed_packages(args: argparse.Namespace) -> list[str]:
    """Packages of extras that these options take, also those that only a download takes."""
    needed = list(READING)
    if args.model is None:
        needed += FETCHED_MODEL
    if args.text is None:
        needed += FETCHED_TEXT
    if getattr(args, "picture", None):
        needed += PICTURE
    return needed


def load(args: argparse.Namespace, device: str) -> tuple[Any, Any, str, str]:
    """Loads the model and the text that --model, --dtype, --text and --cache-dir name.

    Returns:
        The model, its tokenizer, its name, and the text.

    Raises:
        MissingPackages: before anything is downloaded.
        AssetError: the default model or text cannot be had.
        OSError, ValueError: a path holds something else.
    """
    import torch

    from torch_turboquant.eval import assets

    require("eval", *needed_packages(args))
    folder = args.cache_dir or default_cache_dir()
    dtype = getattr(torch, args.dtype) if args.dtype else None
    # What is given is looked at before anything is downloaded.
    text = None if args.text is None else read_text(args.text)
    if args.model is not None:
        assets.check_dense(args.model)
        assets.check_keys(args.model)
    if text is None:
        text = "\n\n".join(assets.load_articles(folder, ARTICLES))
    if args.model is None:
        model, tokenizer = assets.load_model(folder, device, dtype)
        name = "SmolLM2-135M-Instruct"
    else:
        model, tokenizer = assets.load_dense(args.model, device, dtype)
        name = args.model.resolve().name
    return model, tokenizer, name, text


def measure_rows(args: argparse.Namespace, loaded: Any, origin: Any, done: Any, save: Any) -> Any:
    """`rows.evaluate` with the options of `add_measure_arguments`.

    Args:
        loaded: the result of `load`.
        origin, done, save: as for `rows.evaluate`.
    """
    from torch_turboquant.eval.controls import fits_heads
    from torch_turboquant.eval.measure import segments
    from torch_turboquant.eval.rows import (
        Settings,
        evaluate,
        needle_extra,
        steps_extra,
        synthetic_extra,
        tasks_extra,
    )
    from torch_turboquant.integrations.transformers.models import head_dim_of, text_config

    model, tokenizer, name, text = loaded
    if args.weights and (args.needle is not None or args.tasks or args.synthetic):
        raise ValueError(
            "--needle, --tasks and --synthetic are measured with caches only: give --weights in a "
            "run of its own"
        )
    for choice in args.weights:
        choice.check(model, tokenizer)
    head_dim = head_dim_of(text_config(model))
    unfit = [c.text for c in args.caches if not fits_heads(c.name, head_dim)]
    if unfit and "caches" in getattr(args, "given", ()):
        raise ValueError(
            f"{', '.join(unfit)} code blocks of 32 channels, and heads of {name} have {head_dim}"
        )
    if unfit:
        print(f"Left out, for blocks of 32 channels: {', '.join(unfit)}")
        args.caches = [c for c in args.caches if c.text not in unfit]
    read = {"--prefill and --score-tokens": args.prefill + args.score_tokens}
    if args.needle is not None:
        read["--needle"] = max(args.needle or NEEDLE_LENGTHS)
    if args.synthetic:
        read["--synthetic"] = args.synthetic
    check_positions(model, name, read)
    settings = Settings(args.segments, args.prefill, args.score_tokens, args.chunk)
    ids = segments(tokenizer, text, args.segments, args.prefill + args.score_tokens)
    extras = []
    if args.needle is not None:
        extras.append(needle_extra(model, tokenizer, text, args.needle or NEEDLE_LENGTHS))
    if args.tasks:
        extras.append(tasks_extra(model, tokenizer))
    if args.synthetic:
        extras.append(synthetic_extra(model, tokenizer, text, args.synthetic, args.samples))
    if getattr(args, "steps", False):
        extras.append(steps_extra(model))
    measured = [(choice, partial(choice.packed, tokenizer=tokenizer)) for choice in args.weights]
    single_layers = not args.no_layers
    return evaluate(
        model, name, args.caches, ids, settings, origin, done, save, extras, single_layers, measured
    )


def check_positions(model: Any, name: str, read: dict[str, int]) -> None:
    """Raises where a text has more tokens than the model has positions in a table, as GPT-2 does.

    RoPE has no table: how far a model with RoPE can go is what people may want to measure.

    Args:
        name: of the model.
        read: tokens of a text, by the options that say it.

    Raises:
        ValueError: such a text.
    """
    from torch_turboquant.models import Fields, text_config

    fields = Fields(text_config(model.config))
    if fields.get("rope_parameters") or fields.get("rope_theta"):
        return
    most = fields.get("max_position_embeddings")
    for options, tokens in read.items():
        if most and tokens > most:
            raise ValueError(
                f"{name} has {most:,} positions in a table, too few for the {tokens:,} tokens of "
                f"{options}: give fewer"
            )


def memory_for_caches(model: Any, total: int) -> int:
    """Bytes of a GPU's memory that 16-bit weights of the model leave.

    Raises:
        ValueError: none.
    """
    weights = 2 * sum(parameter.numel() for parameter in model.parameters())
    if weights >= total:
        raise ValueError(
            f"weights and reserve take {weights:,} bytes, the memory has {total:,}: nothing is "
            "left for a cache"
        )
    return total - weights


def choose_strategies(args: argparse.Namespace) -> None:
    """What --strategies stands for: its caches unless --caches names some, and its tasks."""
    from torch_turboquant.eval.caches import Choice
    from torch_turboquant.eval.strategies import strategies

    given = getattr(args, "given", ())
    if "caches" not in given:
        args.caches = [Choice.parse(name) for name in strategies()]
    if "prefill" not in given:
        args.prefill = STRATEGY_CONTEXT
    args.synthetic = args.synthetic or STRATEGY_CONTEXT
    args.no_layers = True  # errors of single layers say nothing about tokens that are gone


def run(args: argparse.Namespace) -> int:
    """Runs the evaluation; returns the exit status."""
    from torch_turboquant.eval import report
    from torch_turboquant.eval.assets import AssetError
    from torch_turboquant.eval.origin import row_origin
    from torch_turboquant.eval.rows import without

    if args.weights and args.strategies:
        print("eval: --weights and --strategies are tables of their own", file=sys.stderr)
        return 2
    if args.gpu is not None and not args.strategies:
        print("eval: --gpu belongs to --strategies", file=sys.stderr)
        return 2
    if args.steps and not args.strategies:
        print("eval: --steps belongs to --strategies", file=sys.stderr)
        return 2
    if args.strategies:
        choose_strategies(args)
    try:
        done = report.read_json(args.json)
        if args.steps and not actual_device(args.device).startswith("cuda"):
            raise ValueError("--steps needs a CUDA device: leave it out")
        loaded = load(args, args.device)
        memory = None if args.gpu is None else memory_for_caches(loaded[0], args.gpu)
        origin = row_origin("quality", str(loaded[0].device))

        def save(rows: list[dict[str, Any]]) -> None:
            # the file is read again: another run may have written its rows into it since
            report.write_json(args.json, without(report.read_json(args.json), rows) + rows)

        rows = measure_rows(args, loaded, origin, done, save)
    except (AssetError, OSError, ValueError) as error:
        print(f"eval: {error}", file=sys.stderr)
        return 1
    if args.strategies:
        report.show_strategies(rows, memory)
    else:
        report.show(rows)
    print(f"\nRows: {args.json}")
    if args.picture:
        draw = report.strategies_picture if args.strategies else report.picture
        draw(args.picture, rows)
        print(f"Picture: {args.picture}")
    return 0
