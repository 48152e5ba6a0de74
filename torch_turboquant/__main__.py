"""The command line: `python -m torch_turboquant info` and `python -m torch_turboquant demo`."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from torch_turboquant._library import build_info


def print_info(info: dict[str, Any]) -> None:
    """One aligned line per fact; libraries and devices one line each."""
    rows = [(key.replace("_", " "), value) for key, value in info.items()]
    for name, value in rows:
        if name == "libraries":
            for kind, library in value.items():
                print(f"{kind + ' library':<20}{library['path']}")
                print(f"{'':<20}{library['bytes'] / 2**20:.2f} MiB, built by {library['compiler']}")
        elif name == "devices":
            print(f"{'cpu device':<20}{value['cpu']}")
            print(f"{'cuda devices':<20}{', '.join(value['cuda']) or 'none'}")
        else:
            text = " ".join(value) if isinstance(value, list) else value
            print(f"{name:<20}{text if text not in (None, '') else 'none'}")


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m torch_turboquant",
        description="KV caches of 2 to 8 bits per channel that attention reads directly.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="what is installed and what it runs on")
    info.add_argument("--json", action="store_true", help="print JSON")
    demo = commands.add_parser("demo", help="a language model with a quantised cache")
    try:
        # The demo needs the packages of an extra: nothing else may depend on them.
        if argv[:1] == ["demo"]:
            from torch_turboquant import demo as program

            program.add_arguments(demo)
        args = parser.parse_args(argv)
        if args.command == "info":
            facts = build_info()
            print(json.dumps(facts, indent=2)) if args.json else print_info(facts)
            return 0
        return program.run(args)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("torch_turboquant"):
            raise
        print(
            f"demo needs the package {error.name}: pip install 'torch_turboquant[demo]'",
            file=sys.stderr,
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
