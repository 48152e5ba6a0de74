"""What the tests of servers share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers import load_script

START_S = 300


@contextmanager
def started(module: str, options: list[str], folder: Path, **environment: str) -> Iterator[Any]:
    """A server over the model in a folder, whose output is in folder/server.log."""
    servers = load_script("benchmarks/servers.py")
    log = folder / "server.log"
    with servers.started(module, options, folder, log, START_S, environment) as server:
        yield server


def at_once(ask: Callable[[list[int]], list[int]], prompts: Sequence[list[int]]) -> list[list[int]]:
    """The answers to prompts that are asked at the same time."""
    with ThreadPoolExecutor(len(prompts)) as clients:
        return list(clients.map(ask, prompts))


def events(lines: Any) -> list[Any]:
    """What a stream sends until it says that it is done."""
    found = [line.decode().removeprefix("data: ").strip() for line in lines if line.strip()]
    assert found.pop() == "[DONE]"
    return [json.loads(event) for event in found]
