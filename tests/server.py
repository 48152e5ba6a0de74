"""Servers of engines in processes of their own, and a client over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

START_S = 300


def free_port() -> int:
    """A port of this machine that nobody listens to."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Client:
    """What asks a server."""

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}"

    def open(self, page: str, **asked: Any) -> Any:
        """The answer to a question, or a page."""
        body = json.dumps(asked).encode() if asked else None
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address}/{page}", body, kind)
        return urllib.request.urlopen(request, timeout=60)

    def ask(self, page: str, **asked: Any) -> Any:
        """The whole answer to a question."""
        with self.open(page, **asked) as found:
            return json.load(found)


def events(lines: Any) -> list[Any]:
    """What a stream sends until it says that it is done."""
    found = [line.decode().removeprefix("data: ").strip() for line in lines if line.strip()]
    assert found.pop() == "[DONE]"
    return [json.loads(event) for event in found]


@contextmanager
def started(module: str, options: list[str], folder: Path, **environment: str) -> Iterator[Client]:
    """The client of a server that has started; the server's output is in folder/server.log.

    Args:
        module: that is run.
        options: of the server, but for its address.
    """
    port, log = free_port(), folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", module, *options),
                *("--host", "127.0.0.1", "--port", str(port)),
            ],
            stdout=output,
            stderr=output,
            cwd=folder,  # not a checkout, whose package would hide the installed one
            env={**os.environ, **environment},
            start_new_session=True,  # with its own processes
        )
    client, begun = Client(port), time.monotonic()
    try:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() - begun < START_S, log.read_text()[-3000:]
            try:
                client.open("health").close()
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        yield client
    finally:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
