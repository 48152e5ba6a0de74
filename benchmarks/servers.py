"""Servers of engines in processes of their own, and what asks them over HTTP."""

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

END_S = 20  # that a server gets to end by itself


def free_port() -> int:
    """A port of this machine that nobody listens to."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Server:
    """A server of this machine, by its port."""

    def __init__(self, port: int) -> None:
        self.port = port

    def open(self, page: str, **asked: Any) -> Any:
        """The answer to a question, or a page where nothing is asked."""
        body = json.dumps(asked).encode() if asked else None
        kind = {"Content-Type": "application/json"}
        address = f"http://127.0.0.1:{self.port}/{page}"
        return urllib.request.urlopen(urllib.request.Request(address, body, kind), timeout=60)

    def ask(self, page: str, **asked: Any) -> Any:
        """The whole answer, which is JSON."""
        with self.open(page, **asked) as answer:
            return json.load(answer)

    def text(self, page: str) -> str:
        """A page that is not JSON."""
        with self.open(page) as answer:
            return answer.read().decode()

    def has_begun(self) -> bool:
        """Whether it answers."""
        try:
            self.open("health").close()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True


@contextmanager
def started(
    module: str,
    options: Sequence[str],
    folder: Path,
    log: Path,
    limit: float,
    environment: Mapping[str, str],
) -> Iterator[Server]:
    """A server that has begun; in the end nothing of it is left.

    Args:
        module: of Python, which is the server.
        options: of it, but for its address.
        folder: where it runs: not a checkout, whose package would hide the installed one.
        log: the file of its output.
        limit: seconds until it must have begun.
        environment: variables beside those of this process.

    Raises:
        RuntimeError: it has not; with the end of its output.
    """
    server, begun = Server(free_port()), time.monotonic()
    address = ["--host", "127.0.0.1", "--port", str(server.port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *options, *address],
            stdout=output,
            stderr=output,
            cwd=folder,
            env={**os.environ, **environment},
            start_new_session=True,  # with the processes that it starts
        )
    try:
        while not server.has_begun():
            if process.poll() is not None or time.monotonic() - begun > limit:
                raise RuntimeError(f"{module} has not begun:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        with suppress(ProcessLookupError):  # what is left of it, such as the engine's process
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
