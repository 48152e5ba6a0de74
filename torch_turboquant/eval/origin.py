"""Where rows of results come from: the device, the commit and the command of a run."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def device_name(device: str) -> str:
    """A name that a reader can compare: the GPU's, or the CPU's where the system tells it."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    from torch_turboquant import build_info

    return build_info()["devices"]["cpu"]


def commit() -> str | None:
    """The commit of the checkout, if the program was started inside a checkout of this project."""
    if not (Path.cwd() / "torch_turboquant" / "_version.py").exists():
        return None
    try:
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def row_origin(name: str, device: str) -> dict[str, Any]:
    """The first entries of a row: the program's name, the device's, the commit and the command."""
    return {
        "name": name,
        "device": device_name(device),
        "commit": commit(),
        "command": shlex.join(["torch_turboquant", *sys.argv[1:]]),
    }
