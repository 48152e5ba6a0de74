"""Clients of an engine, for bench_vllm.py and bench_sglang.py.

Each client has one request at a time and asks again as soon as that is answered. What they ask:

    serve64x16384:512     64 clients; prompts of 16,384 tokens that no other one begins like, and
                          answers of 512
    turns64x16384:256     64 clients, whose conversations have 16,384 tokens when it begins; every
                          turn asks 256 more and is answered with 256
    mix256                256 clients with prompts and answers of the lengths of ShareGPT's
                          conversations; every third request goes on with an earlier one
                          (make_requests.py)

Engines are measured as they run all day: the first prompts are in the prefix cache as far as they
fit into it, and the first answers end at any time, as if they had begun before. Prompts after the
first ones, and those that have lost their pages, are computed as they come.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import make_requests
import numpy as np

WARM = 0.1  # of the time that is measured passes before
TURNS = 16  # after so many a conversation begins again, so that it does not outgrow the model
LONGEST = make_requests.LONGEST  # tokens of a prompt of the mix, and of an answer


@dataclass(frozen=True)
class Load:
    """What clients ask for.

    Attributes:
        kind: serve, turns, mix.
        clients: how many.
        context: tokens of the first prompts; 0: as they are drawn.
        tokens: of an answer, and of a turn's question; 0: as they are drawn.
    """

    kind: str
    clients: int
    context: int = 0
    tokens: int = 0

    @staticmethod
    def parse(text: str) -> Load | None:
        """Of "serve64x16384:512", "turns64x16384:256", "mix256"; of anything else None."""
        found = re.fullmatch(r"(serve|turns)(\d+)x(\d+):(\d+)|(mix)(\d+)", text)
        if not found:
            return None
        kind, clients, context, tokens, mix, drawn = found.groups()
        return Load(mix, int(drawn)) if mix else Load(kind, *map(int, (clients, context, tokens)))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        if self.kind == "mix":
            return 2 * LONGEST
        return self.context + (2 * TURNS if self.kind == "turns" else 1) * self.tokens

    def batches(self) -> list[int]:
        """How many sequences a CUDA graph should have room for."""
        sizes = {1, 2, 4, *range(8, 65, 8), *range(80, self.clients, 16), self.clients}
        return sorted(size for size in sizes if size <= self.clients)


@dataclass
class Request:
    """A request and when its tokens came."""

    number: int
    client: int
    prompt: list[int]
    tokens: int
    asked: float
    first: float | None = None
    last: float = 0.0
    answer: list[int] = field(default_factory=list)


@dataclass
class Clients:
    """The clients of a load, and what they have seen.

    Attributes:
        load: what they ask for.
        vocabulary: tokens are drawn from it.
        seconds: how long they are measured.
        begun: when measuring began; None: not yet.
    """

    load: Load
    vocabulary: int
    seconds: float
    begun: float | None = None
    ended: float = 0.0
    waiting: dict[int, Request] = field(default_factory=dict)
    done: list[Request] = field(default_factory=list)
    generated: int = 0
    starts: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.load.clients + self.load.context)
        self.asked = 0
        drawn = 4 * self.load.clients
        mix = make_requests.lengths
        self.prompts = mix(self.random, drawn, make_requests.PROMPT, LONGEST)
        self.answers = mix(self.random, drawn, make_requests.ANSWER, LONGEST)
        self.earlier: list[list[int]] = []
        self.opening = [self._new_prompt(number) for number in range(self.load.clients)]

    def _words(self, count: int) -> list[int]:
        return self.random.integers(100, self.vocabulary - 300, int(count)).tolist()

    def _new_prompt(self, number: int) -> list[int]:
        if self.load.kind != "mix":
            return self._words(self.load.context)
        prompt = self._words(self.prompts[number % len(self.prompts)])
        if self.earlier and self.random.random() < 1 / make_requests.TURNS:
            before = self.earlier[int(self.random.integers(len(self.earlier)))]
            prompt = [*before, *prompt] if len(before) + len(prompt) <= LONGEST else prompt
        self.earlier.append(prompt)
        return prompt

    def _ask(self, client: int, prompt: list[int], tokens: int, now: float) -> Request:
        self.asked += 1
        request = Request(self.asked, client, prompt, max(1, int(tokens)), now)
        self.waiting[request.number] = request
        return request

    def begin(self, now: float) -> list[Request]:
        """The first request of each client. Last prompts come first: an engine that could not keep
        all of them in its prefix cache has lost the first ones."""
        requests = []
        for client in reversed(range(self.load.clients)):
            tokens = self.load.tokens or self.answers[client]
            left = tokens * (1 - self.random.random())
            requests.append(self._ask(client, self.opening[client], left, now))
        return requests

    def told(self, number: int, made: Sequence[int], now: float) -> Request | None:
        """Takes new tokens of a request; the client's next one, if it has ended."""
        request = self.waiting[number]
        if not made:
            return None
        measuring = self.begun is not None
        if request.first is None:
            request.first = now
            if measuring:
                self.starts.append(now - request.asked)
        request.last = now
        request.answer.extend(made)
        if measuring:
            self.generated, self.ended = self.generated + len(made), now
        if len(request.answer) < request.tokens:
            return None
        del self.waiting[number]
        if measuring:
            self.done.append(request)
        return self._next(request, now)

    def _next(self, request: Request, now: float) -> Request:
        load = self.load
        if load.kind == "turns":
            prompt = [*request.prompt, *request.answer, *self._words(load.tokens)]
            if len(prompt) + load.tokens > load.longest:
                prompt = self.opening[request.client]
            return self._ask(request.client, prompt, load.tokens, now)
        tokens = load.tokens or self.answers[self.asked % len(self.answers)]
        return self._ask(request.client, self._new_prompt(self.asked), tokens, now)

    def clock(self, now: float, start: float) -> bool:
        """Begins to measure once the engine is warm; False: it is over."""
        if self.begun is None and now - start > WARM * self.seconds:
            self.begun = now
        return self.begun is None or now - self.begun < self.seconds

    def row(self, preempted: int) -> dict[str, Any]:
        """What has been measured."""
        if self.begun is None or not self.generated:
            raise RuntimeError(f"{self.load}: no token came while it was measured")
        seconds = self.ended - self.begun
        pace = [
            1e3 * (request.last - request.first) / (len(request.answer) - 1)
            for request in self.done
            if request.first is not None and len(request.answer) > 1
        ]
        return {
            "clients": self.load.clients,
            "context": self.load.context,
            "seconds": seconds,
            "requests": len(self.done),
            "requests_s": len(self.done) / seconds,
            "tokens_s": self.generated / seconds,
            "preempted": preempted,
            **percentiles("first_token_s", self.starts),
            **percentiles("token_ms", pace),
        }


def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile; nothing of no values."""
    if not values:
        return {}
    ordered = sorted(values)
    return {
        f"{name}_median": statistics.median(ordered),
        f"{name}_p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
    }
