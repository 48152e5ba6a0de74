"""Reading of result files, and how a document names them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from common import RESULTS, Row, read_rows

ROOT = Path(__file__).resolve().parents[2]


def digest(name: str) -> str:
    """The hash that a picture carries to name the results it shows."""
    return hashlib.sha256((RESULTS / f"{name}.json").read_bytes()).hexdigest()


def source(name: str, some: Iterable[Row], folder: str = "") -> str:
    """The origin of these rows: their file and its commands. folder: of the root, from the page."""
    parts = "commit|caches|cache-dir|only|seconds|configs|points|limit|out"
    noise = rf" --(({parts})[ =]('[^']*'|\S+)|no-picture|no-layers)"
    commands = dict.fromkeys(re.sub(noise, "", row["command"]) for row in some)
    text = " and ".join(f"`{command}`" for command in commands)
    return f"[{name}.json]({folder}benchmarks/results/{name}.json): {text}"


def several_runs(some: dict[str, list[Row]]) -> str:
    """A sentence that says which rows, by title, are of which commit; empty if all are of one."""
    titles: dict[str, list[str]] = {}
    for title, rows in some.items():
        for commit in dict.fromkeys(row["commit"] for row in rows):
            titles.setdefault(commit, []).append(title)
    if len(titles) < 2:
        return ""
    parts = []
    for commit, names in titles.items():
        clean = commit.removesuffix("-dirty")
        more = " with uncommitted changes" if clean != commit else ""
        parts.append(f"{' and '.join(names)} at {clean}{more}")
    return f"They were measured in runs of several commits: {'; '.join(parts)}."


def link(name: str, label: str) -> str:
    """A link of the README to a result file, whose rows name machine, commit and command."""
    return f"[{label}](benchmarks/results/{name}.json)"


def h200_rows(name: str) -> list[Row]:
    """Of the GPU that documents and pictures name; a file may hold rows of others."""
    return [row for row in read_rows(name) if row["device"] == "NVIDIA H200"]
