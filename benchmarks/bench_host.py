"""Host time of eager calls: how long Python waits for an op that has only to be started.

Without a CUDA graph the host starts every kernel of every layer, and the GPU waits for it where the
kernel before takes less time. A row is a call: the ops of a decode step of one short sequence, raw
and through PagedLayer, and beside them what one would take for an unpacked cache: PyTorch's
scaled_dot_product_attention over the same tokens, and index_put_ of one token's keys and values.

On a GPU, 100 calls are enqueued and nothing waits for them, which fits into the driver's queue; the
GPU is waited for before the next 100. On a CPU the kernels run within the call, so sizes are tiny
(one KV head, 16 tokens, 64 channels), and a row says "host and kernel". In both cases times are
microseconds per call of this thread, the median of the runs; "least" is the fastest run. Calls take
turns, with grad mode on ("grad"), under torch.no_grad() and under torch.inference_mode().

    python benchmarks/bench_host.py                    into results/host.json
    python benchmarks/bench_host.py --dry-run          printed only
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import common
import torch
from torch.nn.functional import scaled_dot_product_attention

import torch_turboquant as tt

Call = Callable[[], object]

MODES: dict[str, Callable[[], AbstractContextManager]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
PRESET = "k5v4u"


class Step:
    """A decode step of one sequence in one layer, packed and unpacked."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.q_heads, self.heads, self.d, self.tokens = (
            (32, 8, 128, 1024) if on_gpu else (1, 1, 64, 16)
        )
        self.device, self.dtype = device, torch.bfloat16
        self.q = self.random(1, self.q_heads)
        self.k, self.v = self.random(1, self.heads), self.random(1, self.heads)
        self.last = torch.tensor([self.tokens - 1], device=device)
        self.lengths = torch.tensor([self.tokens], dtype=torch.int32, device=device)
        plain = [self.random(self.tokens, self.heads) for _ in range(2)]
        self.plain = [x.transpose(0, 1)[None].contiguous() for x in plain]  # [1, heads, tokens, d]
        self.stored = [torch.zeros_like(x) for x in plain]  # [tokens, heads, d]

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, self.d, dtype=self.dtype, device=self.device)

    def layer(self, exact: bool) -> tuple[tt.PagedLayer, tt.AttentionBatch]:
        """A layer with center and exact tail, or without both, and the batch of the step."""
        tail = {} if exact else {"sink_tokens": 0, "recent_window": 0}
        config = tt.preset(PRESET, self.d, **tail)
        center = torch.randn(self.heads, self.d) if exact else None
        tables = tt.make_tables(config, 0, self.device, center)
        pages = -(-self.tokens // config.page_size)
        cache = tt.allocate_cache(config, pages, self.heads, self.device)
        ring = slots = None
        if exact:
            ring = tt.allocate_tail(config, 1, self.heads, self.dtype, device=self.device)
            slots = torch.zeros(1, dtype=torch.int64, device=self.device)
        table = torch.arange(pages, dtype=torch.int32, device=self.device)[None]
        batch = tt.AttentionBatch(self.last, table, self.lengths, tail_slots=slots)
        return tt.PagedLayer(cache, config, tables, ring), batch

    def raw(self, exact: bool) -> tuple[Call, Call]:
        """Calls of the raw ops paged_attention and cache_store."""
        layer, batch = self.layer(exact)
        config, tables = layer.config, layer.tables
        tail = layer.ring, batch.tail_slots
        signs_and_levels = tables[:4]
        attend = (
            *(self.q, layer.pages, batch.block_table, batch.seq_lens, *signs_and_levels),
            *(tables.center, config.page_size, config.key_bits, config.value_bits, self.d**-0.5),
            *(None, 1, *tail, None, config.sink_tokens, config.recent_window),
        )
        modes = (tt.SCALE_MODES[m] for m in (config.key_scale_mode, config.value_scale_mode))
        store = (
            *(self.k, self.v, layer.pages, batch.slot_mapping, *signs_and_levels),
            *(tables.key_steps, tables.value_steps, tables.center),
            *(config.page_size, config.key_bits, config.value_bits, *modes, *tail),
            *(batch.seq_lens, None, config.sink_tokens),
        )
        ops = torch.ops.turboquant
        return lambda: ops.paged_attention(*attend), lambda: ops.cache_store(*store)

    def calls(self) -> dict[str, Call]:
        attend, store = self.raw(exact=False)
        attend_all, store_all = self.raw(exact=True)
        layer, batch = self.layer(exact=True)
        k, v = self.plain
        q = self.q[:, :, None]
        return {
            "paged_attention": attend,
            "paged_attention, tail and center": attend_all,
            "PagedLayer.attend, tail and center": lambda: layer.attend(self.q, batch),
            "scaled_dot_product_attention": lambda: scaled_dot_product_attention(
                q, k, v, enable_gqa=True
            ),
            "cache_store": store,
            "cache_store, tail and center": store_all,
            "PagedLayer.store, tail and center": lambda: layer.store(self.k, self.v, batch),
            "index_put_ of keys and values": self.put,
        }

    def put(self) -> None:
        for memory, new in zip(self.stored, (self.k, self.v), strict=True):
            memory.index_put_((self.last,), new)


def measure(calls: dict[str, Call], device: torch.device, runs: int, each: int) -> list[common.Row]:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times: dict[tuple[str, str], list[float]] = {(n, m): [] for m in MODES for n in calls}
    gc.disable()
    try:
        for turn in range(runs + 1):  # the first warms up
            for (name, mode), found in times.items():
                call = calls[name]
                wait()
                with MODES[mode]():
                    start = time.perf_counter()
                    for _ in range(each):
                        call()
                    took = time.perf_counter() - start
                if turn:
                    found.append(took / each * 1e6)
            gc.collect()
    finally:
        gc.enable()
    wait()
    return [
        {
            "call": name,
            "mode": mode,
            "us": round(statistics.median(found), 2),
            "least": round(min(found), 2),
            "time": "host" if device.type == "cuda" else "host and kernel",
        }
        for (name, mode), found in times.items()
    ]


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--runs", type=int, default=100, help="of each call; default: %(default)s")
    options.add_argument(
        "--each", type=int, default=100, help="calls of a run; default: %(default)s"
    )
    arguments = options.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    if device.type == "cpu":
        torch.set_num_threads(1)
        print(
            "Without a GPU the kernels run within the calls: tiny sizes, host and kernel together."
        )
    rows = measure(Step(device).calls(), device, arguments.runs, arguments.each)
    body = [
        [name, *(f"{row['us']:.1f} ({row['least']:.1f})" for row in rows if row["call"] == name)]
        for name in dict.fromkeys(row["call"] for row in rows)
    ]
    print(common.markdown(["us per call: median (least)", *MODES], body))
    common.write_rows("host", rows, arguments)


if __name__ == "__main__":
    main()
