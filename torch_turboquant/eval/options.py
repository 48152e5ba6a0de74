"""Options that the evaluation shares with other programs which run a model, such as the demo."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def default_cache_dir() -> Path:
    """Where downloads are kept: $XDG_CACHE_HOME/torch_turboquant, or ~/.cache/torch_turboquant."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torch_turboquant"


def positive(text: str) -> int:
    """The type of an option that is a positive integer.

    Raises:
        ValueError: the text is no integer.
        argparse.ArgumentTypeError: the integer is 0 or negative.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --device, which every program that runs a model has."""
    parser.add_argument(
        "--device",
        default="auto",
        help="cpu, cuda, cuda:1, ... (default: cuda where torch sees it)",
    )


def add_cache_dir_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --cache-dir, which every program has that may download the model and the text."""
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help=f"where the model and the text are kept (default {default_cache_dir()})",
    )
