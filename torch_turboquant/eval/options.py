"""Options that the evaluation shares with other programs which run a model, such as the demo."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import torch

from torch_turboquant._files import check_place


def default_cache_dir() -> Path:
    """Where downloads are kept: $XDG_CACHE_HOME/torch_turboquant, or ~/.cache/torch_turboquant.

    Raises:
        ValueError: the user has no home folder, as in a container that runs under a bare number.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache") / "torch_turboquant"
    except RuntimeError as error:
        raise ValueError(
            "this user has no home folder to keep downloads in: name a folder with --cache-dir"
        ) from error


def positive(text: str) -> int:
    """The type of an option that is a positive integer.

    Raises:
        argparse.ArgumentTypeError: the text is no integer, or one that is 0 or negative.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def names(text: str) -> list[str]:
    """The type of every option that takes a list: names separated by commas, spaces or semicolons.

    A comma before field=value goes on with the name before it: "k4v4:sink_tokens=0,center=none" is
    one cache.
    """
    text = re.sub(r"\s*:\s*", ":", re.sub(r"\s*,\s*(?=\w+=)", "\0", text))
    return [name.replace("\0", ",") for name in re.split(r"[,;\s]+", text) if name]


def device(text: str) -> str:
    """The type of --device: "auto", or a device that this machine has.

    Raises:
        argparse.ArgumentTypeError: it has no such device; the text says why.
    """
    if text == "auto":
        return text
    match = re.fullmatch(r"cpu|cuda(?::([0-9]+))?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no device; there are cpu, cuda and cuda:N")
    if text.startswith("cuda"):
        if torch.version.cuda is None:
            raise argparse.ArgumentTypeError(
                f"{text} needs a CUDA build of torch; torch {torch.__version__} is not one"
            )
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(match[1] or 0) >= found:
            raise argparse.ArgumentTypeError(f"{text} is not there: torch sees {found} GPUs")
    return text


def actual_device(text: str) -> str:
    """The device of --device: what "auto" stands for, or the one that is named."""
    if text != "auto":
        return text
    return "cuda" if torch.cuda.is_available() else "cpu"


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


def output_file(text: str) -> Path:
    """The type of an option that names a file to write.

    Raises:
        argparse.ArgumentTypeError: it cannot be written, which would show after the work only.
    """
    path = Path(text)
    try:
        check_place(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if path.exists() and not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: the file is read-only")
    if not os.access(path.parent, os.W_OK):  # one rule for files that are replaced, too
        raise argparse.ArgumentTypeError(f"{text} cannot be written: its folder is read-only")
    return path


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --device, which every program that runs a model has."""
    parser.add_argument(
        "--device",
        type=device,
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
        help="where the model and the text are kept (default $XDG_CACHE_HOME/torch_turboquant, or "
        "~/.cache/torch_turboquant)",
    )
