"""The packages of the extras in pyproject.toml, asked for before a program needs them.

A program that starts a download and fails afterwards for want of a package has wasted the time of
its user; so has one that names its missing packages one by one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

MODEL = ("transformers", "safetensors")  # a model in a folder
READING = (*MODEL, "tqdm")  # and a text, piece by piece
FETCHED_MODEL = ("accelerate", "gguf")  # the demo's model, whose weights are a GGUF file
FETCHED_TEXT = ("mwparserfromhell",)  # the demo's text, which is wikitext
PICTURE = ("matplotlib",)

# The extras of commands that are no extras in pyproject.toml themselves.
_EXTRAS = dict.fromkeys(("calibrate", "quantize", "memory"), "transformers")

# as in pyproject.toml, without upper bounds
LEAST = {
    "transformers": "5.5",
    "safetensors": "0.5",
    "accelerate": "1.0",
    "gguf": "0.17",
    "mwparserfromhell": "0.6.6",
    "tqdm": "0",
    "matplotlib": "3.8",
}


class MissingPackages(ImportError):
    """Packages of an extra are missing or too old; the error's text says how to get them."""


def require(program: str, *packages: str) -> None:
    """Looks for packages without importing them.

    Args:
        program: a command, such as "demo".
        packages: keys of LEAST.

    Raises:
        MissingPackages: naming every one that is not installed or older than in LEAST.
    """
    lacking = [text for text in map(_what_is_wrong, packages) if text]
    if lacking:
        raise MissingPackages(
            f"{program} needs {', '.join(lacking)}: pip install "
            f"'torch_turboquant[{extra_of(program)}]'"
        )


def extra_of(program: str) -> str:
    """The extra that brings what a command needs."""
    return _EXTRAS.get(program, program)


def _what_is_wrong(package: str) -> str | None:
    """What to tell of a package; None if it can be used."""
    least = LEAST[package]
    if importlib.util.find_spec(package) is None:
        return f"the package {package}"
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None  # importable without metadata: somebody's own build
    if _numbers(found) < _numbers(least):
        return f"{package} >= {least} ({found} is installed)"
    return None


def _numbers(version: str) -> list[int]:
    """[4, 57, 1] of "4.57.1.dev0"."""
    release = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return [int(number) for number in release[0].split(".")] if release else []
