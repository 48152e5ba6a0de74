"""The command line: `torch_turboquant info`, `memory`, `calibrate`, `quantize`, `demo`, `eval`.

`python -m torch_turboquant` is the same, except inside a clone of the project: there Python finds
the sources, which have no libraries, before the installed package.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from torch_turboquant import choices
from torch_turboquant._extras import MODEL, READING, MissingPackages, extra_of, require
from torch_turboquant._library import build_info
from torch_turboquant._version import __version__
from torch_turboquant.memory import cli as memory

# The exit statuses that shells give a command which Ctrl-C ended, and one whose reader went away.
INTERRUPTED, UNREAD = 130, 141


class Parser(argparse.ArgumentParser):
    """Prints an error as one line, and where to find the options instead of all of them."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n(the options: {self.prog} --help)\n")


def print_info(info: dict[str, Any]) -> None:
    """Prints one aligned line per fact of build_info."""
    rows = []
    for key, value in info.items():
        if key == "libraries":
            for name, library in value.items():
                size = f"{library['bytes'] / 2**20:.2f} MiB"
                rows.append(
                    (f"{name} library", f"{library['path']} ({size}, {library['compiler']})")
                )
        elif key == "devices":
            rows += [("cpu device", value["cpu"]), ("cuda devices", ", ".join(value["cuda"]))]
        else:
            text = " ".join(value) if isinstance(value, list) else value
            rows.append((key.replace("_", " "), text))
    for name, text in rows:
        print(f"{name:<20}{'none' if text in (None, '') else text}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that argv names; returns the exit status. argv: None means sys.argv."""
    try:
        try:
            return run(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read what it wanted
        # Python writes out what is left when it ends, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


def run(argv: list[str]) -> int:
    """`main` for a reader who stays to the end."""
    parser = Parser(
        prog="torch_turboquant",
        description="KV caches of 2 to 8 bits per channel, and weights of 4 or 8, read directly.",
    )
    parser.add_argument("--version", action="version", version=f"torch_turboquant {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="{info,memory,calibrate,quantize,demo,eval}"
    )
    info = commands.add_parser("info", help="what is installed and what it runs on")
    info.add_argument("--json", action="store_true", help="print JSON")
    choices.add_arguments(info)
    planner = commands.add_parser("memory", help="what a model's KV cache takes, preset by preset")
    memory.add_arguments(planner)
    programs = {
        "calibrate": commands.add_parser("calibrate", help="a file of a model's centers"),
        "quantize": commands.add_parser("quantize", help="a model with its weights packed"),
        "demo": commands.add_parser("demo", help="a language model with a quantised cache"),
        "eval": commands.add_parser("eval", help="what quantised caches do to a model's quality"),
    }
    name = argv[0] if argv and argv[0] in programs else None
    try:
        if name:
            require(name, *(MODEL if name in ("calibrate", "quantize") else READING))
            program = importlib.import_module(f"torch_turboquant.{name}")
            program.add_arguments(programs[name])
        args = parser.parse_args(argv)
        if name:
            return program.run(args)
    except MissingPackages as error:
        print(error, file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:  # one that a package of the extra should have brought
        if (error.name or "").startswith("torch_turboquant"):
            raise
        print(
            f"{name} needs the package {error.name}: pip install "
            f"'torch_turboquant[{extra_of(name or '')}]'",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    if args.command == "memory":
        return memory.run(args)
    try:
        choice = choices.asked_choice(args)
    except ValueError as error:
        print(f"info: {error}", file=sys.stderr)
        return 2
    facts = build_info() if choice is None else choice._asdict()
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        print_info(facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
