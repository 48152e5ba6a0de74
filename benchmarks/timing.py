"""Times of calls that take turns, in CUDA graphs and eager, with caches that nothing is left in.

bench_attention.py, bench_linear.py, bench_experts.py, bench_mla.py and bench_vllm_kernels.py
measure with it.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import common
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""What is timed; of several GPUs the current one, which `on_a_gpu` chooses."""
ROTATED_BYTES = 256 << 20
"""Distinct caches of a contender have more together than the L2 cache holds."""

Call = Callable[[], object]


def on_a_gpu(arguments: argparse.Namespace, elsewhere: str = "") -> bool:
    """Whether a run measures a GPU: the one that --device names, which becomes the current one.

    Args:
        arguments: of common.parser.
        elsewhere: what the message, printed where it does not, says of other devices.
    """
    device = torch.device(arguments.device)
    if device.type != "cuda" or DEVICE.type != "cuda":
        print(f"This benchmark needs a CUDA device{elsewhere}.")
        return False
    if device.index is not None:
        torch.cuda.set_device(device)
    return True


# ---- turns


def number_of_caches(size: int) -> int:
    """Copies of a cache of `size` bytes that a contender goes through in turn."""
    return max(1, math.ceil(ROTATED_BYTES / size))


class Replays:
    """What a CUDA graph is on a GPU: calls in a row."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls

    def replay(self) -> None:
        for call in self.calls:
            call()


class Contest:
    """Calls that take turns. Every contender is a list of calls, one for each of its caches."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """About how long the replays of one contender take."""

    def capture(self, calls: list[Call]) -> torch.cuda.CUDAGraph | Replays:
        for call in calls[:2]:  # what must happen once, happens outside of the graph
            call()
        if DEVICE.type == "cpu":
            return Replays(calls)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph

    def once(self, work: Call) -> float:
        """Milliseconds."""
        if DEVICE.type == "cpu":
            start = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def turns(self, graphs: dict[str, torch.cuda.CUDAGraph | Replays]) -> dict[str, int]:
        """How often each is replayed."""
        found = {}
        for name, graph in graphs.items():
            graph.replay()
            estimate = self.once(graph.replay)
            found[name] = min(40, max(7, round(self.seconds * 1e3 / estimate)))
        return found

    def in_a_graph(self, calls: list[Call]) -> list[Call]:
        """At least four calls in the order of their caches, but of slow ones only some 20 ms."""
        calls[0]()
        estimate = self.once(calls[0])
        return (calls * -(-4 // len(calls)))[: max(2, math.ceil(20 / estimate))]

    def medians(self, contenders: dict[str, list[Call]]) -> dict[str, tuple[float, float]]:
        """Milliseconds of one call in a graph and eager, by the contender's name."""
        rounds = {name: self.in_a_graph(calls) for name, calls in contenders.items()}
        graphs = {name: self.capture(calls) for name, calls in rounds.items()}
        turns = self.turns(graphs)
        replayed: dict[str, list[float]] = {name: [] for name in graphs}
        eager: dict[str, list[float]] = {name: [] for name in graphs}
        order, shuffle = list(graphs.items()), random.Random(0).shuffle
        for turn in range(max(turns.values(), default=0)):
            shuffle(order)  # who comes behind a kernel that takes much power has lower clocks
            for name, graph in order:
                if turn < turns[name]:
                    replayed[name].append(self.once(graph.replay) / len(rounds[name]))
        for _ in range(5):
            for name, calls in rounds.items():
                took = self.once(lambda calls=calls: [call() for call in calls])
                eager[name].append(took / len(calls))
        return {
            name: (statistics.median(replayed[name]), statistics.median(eager[name]))
            for name in graphs
        }

    def medians_between(
        self, contenders: dict[str, list[Call]], between: Call, calls: int = 16
    ) -> dict[str, float]:
        """Milliseconds that one call adds to a graph in which other work precedes it.

        A graph of `calls` times [between, call] takes turns with one of between alone; a turn's
        difference is one measurement. The wait of each kernel for the one before it counts.
        """
        alone = self.capture([between] * calls)
        graphs = {}
        for name, some in contenders.items():
            rounds = (some * -(-calls // len(some)))[:calls]
            graphs[name] = self.capture([work for call in rounds for work in (between, call)])
        turns = self.turns(graphs)
        added: dict[str, list[float]] = {name: [] for name in graphs}
        for turn in range(max(turns.values(), default=0)):
            for name, graph in graphs.items():
                if turn < turns[name]:
                    without = self.once(alone.replay)
                    added[name].append((self.once(graph.replay) - without) / calls)
        return {name: statistics.median(some) for name, some in added.items()}


class Layer:
    """What a model of 8B parameters runs between two attentions: a norm and an MLP.

    It reads 200 MB of weights in several kernels, more than the L2 cache holds.
    """

    def __init__(self, hidden: int = 4096, intermediate: int = 8192) -> None:
        def weights(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) / math.sqrt(shape[-1])

        self.x = weights(1, hidden)
        self.gate, self.up = weights(intermediate, hidden), weights(intermediate, hidden)
        self.down = weights(hidden, intermediate)

    def __call__(self) -> Tensor:
        x = rms_norm(self.x, self.x.shape[-1:])
        return linear(silu(linear(x, self.gate)) * linear(x, self.up), self.down)


FOLDERS = re.compile(r"(?<![^\s('])/(?:[^\s/]+/)+")
"""Of an absolute path, all but its last name."""


def reason_of(error: Exception, most: int) -> str:
    """An error in one line of at most `most` characters, without the folders of this machine."""
    first = (str(error).splitlines() or [""])[0]
    text = FOLDERS.sub("", first)
    return f"{type(error).__name__}: {text}"[:most]


def those_that_run(
    kinds: Mapping[str, Callable[[], list[Call]]],
) -> tuple[dict[str, list[Call]], dict[str, str]]:
    """The calls of contenders that run on this machine, and why the others do not.

    Args:
        kinds: name -> what makes the calls; it may raise anything, and so may the first call.
    """
    found: dict[str, list[Call]] = {}
    missing: dict[str, str] = {}
    for name, make in kinds.items():
        try:
            calls = make()
            calls[0]()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            found[name] = calls
        except Exception as error:
            missing[name] = reason_of(error, 120)
    return found, missing


# ---- what the device can do, which "of read" compares with


def bandwidth(contest: Contest, elements: int = 1 << 30) -> tuple[float, float]:
    """TB/s of a sum over 4 GiB of normal numbers, and of a copy of 2 GiB (bytes read and bytes
    written), each in a graph or eager, whichever is faster."""
    source = torch.randn(elements, device=DEVICE)
    half = source.numel() // 2
    calls = {"read": [source.sum], "copy": [lambda: source[half:].copy_(source[:half])]}
    times = contest.medians(calls)  # a copy inside a graph is slower than outside
    return tuple(source.nbytes / min(times[name]) / 1e9 for name in ("read", "copy"))


def read_speed() -> float:
    """TB/s of a sum as `bandwidth` measures it; 1 on a CPU, where rows are only a try."""
    return 1.0 if DEVICE.type == "cpu" else bandwidth(Contest(0.5))[0]


# ---- cases one after the other


def case_parser(description: str, seconds: float = 0.1) -> argparse.ArgumentParser:
    """A parser with the options of benchmarks whose rows are cases."""
    options = common.parser(description)
    options.add_argument("--only", help="a regular expression of cases")
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--table", action="store_true")
    options.add_argument("--seconds", type=float, default=seconds, help="of each contender")
    return options


def measure_cases(
    name: str,
    cases: Sequence[Any],
    measure: Callable[[Any, float, float], common.Row | None],
    arguments: argparse.Namespace,
    order: Sequence[Any] | None,
) -> None:
    """Measures cases, and writes the rows so far into a result file after each of them.

    Without a GPU it measures nothing but a try. Ends with an error that names the cases without a
    row.

    Args:
        name: of the result file.
        measure: the row of a case, from the case, seconds of each contender and TB/s of a sum over
            4 GiB; None: its results are wrong.
        arguments: of case_parser.
        order: all cases, in the order of the file; None: nothing is written.
    """
    if not arguments.tiny and not on_a_gpu(arguments, "; --tiny is a try on any"):
        return
    read, rows, wrong = read_speed(), [], []
    for case in cases:
        row = measure(case, arguments.seconds, read)
        if row is None:
            wrong.append(str(case))
        else:
            rows.append({**row, "read_tb_s": round(read, 3)})
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        if order is not None:
            common.write_progress(name, rows, "case", arguments, [str(case) for case in order])
    if wrong:
        raise SystemExit("cases with wrong results, which have no row:\n" + "\n".join(wrong))
