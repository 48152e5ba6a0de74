"""What the command line says where the package itself cannot be imported."""

from __future__ import annotations

import shlex
import sys
from importlib.machinery import PathFinder
from pathlib import Path

PACKAGE = Path(__file__).parent


def exit_from_command(error: ImportError) -> None:
    """Ends the process with one line if it is a command of this package; else returns."""
    program = sys.argv[0] if sys.argv else ""  # "-m" while `python -m` imports the package
    by_module = program == "-m" and "torch_turboquant" in sys.orig_argv
    if by_module and not (PACKAGE / "lib").exists() and (PACKAGE.parent / "csrc").exists():
        sys.exit(source_tree_line(sys.orig_argv))
    if by_module or Path(program).name == "torch_turboquant":
        sys.exit(f"torch_turboquant: {error}")


def source_tree_line(typed: list[str]) -> str:
    """What to type instead of a `python -m torch_turboquant ...` that found the source tree."""
    others = [p for p in sys.path if p and Path(p).resolve() != PACKAGE.resolve().parent]
    if PathFinder.find_spec("torch_turboquant", others) is None:
        return (
            f"torch_turboquant: {PACKAGE} is a source tree without libraries, and no wheel is "
            "installed. Type: make wheel && pip install build/wheel/*.whl"
        )
    module = typed.index("-m")
    command = shlex.join([typed[0], "-I", *typed[module:]])
    return (
        f"torch_turboquant: {PACKAGE} is a source tree without libraries, and hides the installed "
        f"package here. Type: {command}"
    )
