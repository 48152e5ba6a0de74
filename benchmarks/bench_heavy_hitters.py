"""Eviction while decoding: what HeavyHitters adds to the time of decode steps.

The steps are those of a model with the shape of Llama-3.1-8B and random weights, without rotary
positions, over a pool: all layers in one CUDA graph, which is replayed step by step while sequences
grow. Sequences grow from the budget by one interval and are then cut back, with and without
HeavyHitters (without: truncated); the share is what the one run takes longer than the other, all
work of the host included. It is measured anew in every round, and the median counts.

`parts_ms` says where an eviction's time goes, in a round of its own that waits after every part.

    python benchmarks/bench_heavy_hitters.py             into results/h200_heavy_hitters.json
    python benchmarks/bench_heavy_hitters.py --device cpu    two small layers, only printed: a try
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import common
import torch
from torch import Tensor
from torch.nn import functional

import torch_turboquant as tq
from torch_turboquant import heavy_hitters
from torch_turboquant.pool import compaction

TINY = common.LLAMA_8B | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
}
POINTS = "64x8192,16x32768,64x2048"
PARTS = {
    "mass": (heavy_hitters, "paged_mass"),
    "choice": (heavy_hitters, "moves_to_budget"),
    "move": (compaction, "cache_move"),
}


class Model:
    """Decode steps of a decoder. All layers have the same weights, which no cache of a GPU holds
    until the next layer asks for them."""

    def __init__(self, shape: dict[str, Any], pool: tq.PagedKVPool) -> None:
        self.pool, self.layers = pool, shape["num_hidden_layers"]
        self.heads, self.head_dim = shape["num_attention_heads"], shape["head_dim"]
        hidden, kv_heads = shape["hidden_size"], shape["num_key_value_heads"]

        def weight(rows: int, columns: int) -> Tensor:
            scale = rows**-0.5
            return (torch.randn(rows, columns, device=pool.device) * scale).to(pool.dtype)

        self.widths = [n * self.head_dim for n in (self.heads, kv_heads, kv_heads)]
        self.norm = torch.ones(hidden, dtype=pool.dtype, device=pool.device)
        self.qkv, self.out = weight(hidden, sum(self.widths)), weight(self.widths[0], hidden)
        self.up = weight(hidden, 2 * shape["intermediate_size"])
        self.down = weight(shape["intermediate_size"], hidden)
        self.head = weight(hidden, shape["vocab_size"])
        self.x = torch.randn(pool.max_seqs, hidden, device=pool.device).to(pool.dtype)
        self.attended: list[tuple[Tensor, Tensor]] = []

    def step(self, batch: Any) -> Tensor:
        """The next tokens; leaves every layer's queries and lse in `attended`."""
        x, self.attended = self.x, []
        for layer in range(self.layers):
            normed = functional.rms_norm(x, x.shape[-1:], self.norm)
            parts = (normed @ self.qkv).split(self.widths, dim=-1)
            q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
            self.pool.store(layer, k, v, batch)
            found, lse = self.pool.attend(layer, q, batch)
            self.attended.append((q, lse))
            x = x + found.flatten(1) @ self.out
            gate, up = (functional.rms_norm(x, x.shape[-1:], self.norm) @ self.up).chunk(2, -1)
            x = x + (functional.silu(gate) * up) @ self.down
        return (x @ self.head).argmax(-1)


class Decoding:
    """Sequences of a pool that a model decodes, one token of each in a step."""

    def __init__(self, shape: dict[str, Any], sequences: int, budget: int, options: Any) -> None:
        config = tq.preset(options.preset, shape["head_dim"])
        most = budget + options.interval
        pages = sequences * -(-most // config.page_size)
        self.pool = tq.PagedKVPool(
            config,
            num_layers=shape["num_hidden_layers"],
            num_kv_heads=shape["num_key_value_heads"],
            num_pages=pages,
            max_seqs=sequences,
            max_seq_len=most,
            dtype=torch.bfloat16,
            device=options.device,
        )
        self.budget, self.cuda = budget, self.pool.device.type == "cuda"
        self.hitters = tq.HeavyHitters(
            self.pool, budget, interval=options.interval, window=options.window
        )
        self.model = Model(shape, self.pool)
        layers, heads = shape["num_hidden_layers"], shape["num_key_value_heads"]
        self.sequences = [self.pool.allocate() for _ in range(sequences)]
        for sequence in self.sequences:
            k, v = torch.randn(
                2, budget, heads, shape["head_dim"], device=options.device
            ).bfloat16()
            self.pool.append([sequence], [k] * layers, [v] * layers, budget)
        self.batch = self.pool.empty_batch(sequences)
        self.replay: Callable[[], Any] = lambda: self.model.step(self.batch)
        if self.cuda:
            self._capture()

    def _capture(self) -> None:
        """While the batch is empty: what a graph stores, it stores in every replay."""
        self.model.step(self.batch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.model.step(self.batch)
        self.replay = graph.replay

    def wait(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def grow(self, evicting: bool) -> float:
        """Seconds of an interval of steps, and of the eviction behind it."""
        begun = self.wait()
        for _ in range(self.hitters.interval):
            with self.pool.reserve(self.sequences, into=self.batch) as batch:
                self.replay()
                if evicting:
                    for layer, (q, lse) in enumerate(self.model.attended):
                        self.hitters.observe(layer, q, lse, batch)
        if evicting:
            assert len(self.hitters.evict(self.sequences)) == len(self.sequences)
        else:
            for sequence in self.sequences:
                self.pool.truncate(sequence, self.budget)
        seconds = self.wait() - begun
        assert all(sequence.length == self.budget for sequence in self.sequences)
        return seconds


@contextmanager
def timed(decoding: Decoding, found: dict[str, float]) -> Iterator[None]:
    """Adds up the seconds of the parts of an eviction, waiting after each."""

    def wrapped(name: str, call: Callable) -> Callable:
        def run(*arguments: Any, **options: Any) -> Any:
            begun = decoding.wait()
            result = call(*arguments, **options)
            found[name] = found.get(name, 0.0) + decoding.wait() - begun
            return result

        return run

    patches = [
        mock.patch.object(module, name, wrapped(part, getattr(module, name)))
        for part, (module, name) in PARTS.items()
    ]
    hitters = decoding.hitters
    patches.append(mock.patch.object(hitters, "evict", wrapped("evict", hitters.evict)))
    patches.append(mock.patch.object(hitters, "observe", wrapped("observe", hitters.observe)))
    compact = decoding.pool._move
    patches.append(mock.patch.object(decoding.pool, "_move", wrapped("compact", compact)))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def measure(shape: dict[str, Any], sequences: int, budget: int, options: Any) -> common.Row:
    decoding = Decoding(shape, sequences, budget, options)
    for evicting in (True, False):
        decoding.grow(evicting)
    pairs = [(decoding.grow(True), decoding.grow(False)) for _ in range(options.rounds)]
    parts: dict[str, float] = {}
    with timed(decoding, parts):
        decoding.grow(True)
    steps = statistics.median(without for _, without in pairs)
    return {
        "cache": options.preset,
        "sequences": sequences,
        "budget": budget,
        "interval": options.interval,
        "window": options.window,
        "layers": shape["num_hidden_layers"],
        "step_ms": 1e3 * steps / options.interval,
        "eviction_ms": 1e3 * statistics.median(a - b for a, b in pairs),
        "share": statistics.median(a / b for a, b in pairs) - 1,
        "shares": [round(a / b - 1, 5) for a, b in pairs],
        "parts_ms": {name: round(1e3 * seconds, 3) for name, seconds in parts.items()},
    }


@torch.no_grad()
def main() -> None:
    arguments = common.parser(__doc__)
    arguments.add_argument("--points", default=POINTS, help="sequences x budget")
    arguments.add_argument("--preset", default="k4v4u", help="default: %(default)s")
    arguments.add_argument("--interval", type=int, default=256, help="default: %(default)s")
    arguments.add_argument("--window", type=int, default=16, help="default: %(default)s")
    arguments.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    options = arguments.parse_args()
    shape = common.LLAMA_8B
    if torch.device(options.device).type != "cuda":
        options.dry_run, shape, options.points, options.interval = True, TINY, "3x128", 32
    torch.manual_seed(0)
    rows = []
    for point in options.points.split(","):
        sequences, budget = map(int, point.split("x"))
        row = measure(shape, sequences, budget, options)
        name = f"{point} {options.preset} interval {options.interval} window {options.window}"
        rows.append({"row": name, **row})
        print(rows[-1], flush=True)
        common.write_progress("h200_heavy_hitters", rows, "row", options)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
