"""Speed of attention over the packed cache on a GPU, against bf16 and fp8 of the same run.

A row is one shape and one preset. Times are medians of CUDA graph replays, divided by the number
of calls in the graph; all contenders take turns. A graph cycles through distinct caches of more
than 256 MB in total, so that the L2 cache never holds the next one. "eager" is the same sequence of
calls without a graph: at small sizes it measures the host. Pages are in random order, and their
codes come from Gaussian keys and values by cache_store. Every row compares the outputs of one
sequence and KV head with float64 attention over its decoded keys and values.

bf16: SDPA with cuDNN and with flash attention, each with enable_gqa and with the query heads of a
KV head folded into queries, on contiguous keys and values; FlashInfer's paged decode with tensor
cores on pages of 16 tokens. The fastest of them counts. fp8: FlashInfer with e4m3 keys and values.
All of these ignore causality among the queries of a step (q_len > 1), ours does not. The row names
contenders that cannot run, with the reason. "of read" compares with a sum over 4 GiB.

    python benchmarks/bench_attention.py                   all, into results/h200_attention.json
    python benchmarks/bench_attention.py --quick           five rows, printed only
    python benchmarks/bench_attention.py --prefill         2,048 queries over 32,768 older tokens
    python benchmarks/bench_attention.py --cases '^k4v4 '  rows that match, printed only
    python benchmarks/bench_attention.py --baselines-only  without us, printed only
    python benchmarks/bench_attention.py --table           the result file as Markdown
"""

from __future__ import annotations

import gc
import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import common
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cosine_similarity, scaled_dot_product_attention

import torch_turboquant as tt

try:
    import flashinfer
except ImportError as error:
    flashinfer, why_no_flashinfer = None, f"cannot be imported: {error}"

DEVICE = torch.device("cuda")
ROTATED_BYTES = 256 << 20
BASELINE_PAGE = 16
STORED_TOKENS = 4096  # pages hold so many distinct tokens and are repeated in random order

Call = Callable[[], object]
Row = dict[str, object]


# ---- what is measured


@dataclass(frozen=True)
class Shape:
    batch: int
    context: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    q_len: int = 1

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    @property
    def bf16_bytes(self) -> int:
        """Bytes of the whole cache in bf16."""
        return 4 * self.tokens * self.kv_heads * self.head_dim

    @property
    def prefill(self) -> bool:
        return self.q_len > 16

    def queries(self) -> Tensor:
        shape = (self.batch * self.q_len, self.q_heads, self.head_dim)
        return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)

    def __str__(self) -> str:
        text = (
            f"{self.batch} x {self.context} heads {self.q_heads}/{self.kv_heads} d {self.head_dim}"
        )
        return text + (f" q_len {self.q_len}" if self.q_len > 1 else "")


@dataclass(frozen=True)
class Case:
    preset: str
    shape: Shape
    page_size: int = 32
    tail: bool = False
    """Whether there are an exact tail and a center, as for models."""

    def __str__(self) -> str:
        return f"{self.preset} {self.shape} page {self.page_size}" + (" tail" if self.tail else "")


LARGE, LONG_BATCH, LONG = Shape(64, 8192), Shape(8, 32768), Shape(1, 131072)
SHORT, MANY_SHORT = Shape(1, 8192), Shape(16, 2048)
PREFILL = Shape(1, 32768 + 2048, q_len=2048)
PRESETS = ("k4v4u", "k4v4", "k5v4u", "k3v3", "k4v2", "k8v8")
BOTH = ("k4v4u", "k4v4")
QUICK = (
    Case("k5v4u", LARGE, tail=True),
    Case("k4v4u", LARGE, tail=True),
    Case("k4v4", LARGE, tail=True),
    Case("k5v4u", LONG, tail=True),
    Case("k5v4u", SHORT, tail=True),
)
FLASHINFER_DIMS = (64, 128, 256)
PREFILLS = tuple(Case(name, PREFILL) for name in (*BOTH, "k5v4u"))


def decode_cases() -> Iterator[Case]:
    """Decode steps, with exact tail and center; of two shapes without them, too."""
    for shape in (LARGE, LONG_BATCH, LONG, SHORT, MANY_SHORT):
        for name in PRESETS:
            yield Case(name, shape, tail=True)
        if shape in (LARGE, SHORT):
            for name in BOTH:
                for page_size in (16, 64, 128):
                    yield Case(name, shape, page_size, tail=True)
                yield Case(name, shape)
    for shape in (
        Shape(64, 8192, q_len=4),
        Shape(8, 32768, q_len=4),
        Shape(64, 8192, q_heads=8),  # groups of 1, 8 and 16 query heads
        Shape(64, 8192, q_heads=64),
        Shape(64, 8192, q_heads=128),
        Shape(64, 8192, head_dim=64),
        Shape(64, 4096, head_dim=256),
        Shape(16, 8192, kv_heads=32, head_dim=96),  # Phi-3-mini
        Shape(16, 8192, kv_heads=32, head_dim=80),  # Phi-2
        Shape(64, 8192, head_dim=160),  # StableLM-2-12B
        Shape(128, 8192, q_heads=12, kv_heads=2),  # Qwen2.5-1.5B
        Shape(128, 8192, q_heads=8, kv_heads=1),  # one of eight shards of Llama-70B
    ):
        for name in BOTH:
            yield Case(name, shape, tail=True)


ALL = (*decode_cases(), *PREFILLS)


# ---- timing


class Contest:
    """Calls that take turns. Every contender is a list of calls, one for each of its caches."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """About how long the replays of one contender take."""

    def capture(self, calls: list[Call]) -> torch.cuda.CUDAGraph:
        calls[0]()  # what must happen once, happens outside of the graph
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph

    def once(self, work: Call) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def medians(self, contenders: dict[str, list[Call]]) -> dict[str, tuple[float, float]]:
        """Milliseconds of one call in a graph and eager, by the contender's name."""
        rounds = {name: calls * -(-4 // len(calls)) for name, calls in contenders.items()}
        graphs = {name: self.capture(calls) for name, calls in rounds.items()}
        turns = {}
        for name, graph in graphs.items():
            graph.replay()
            estimate = self.once(graph.replay)
            turns[name] = min(40, max(7, round(self.seconds * 1e3 / estimate)))
        replayed: dict[str, list[float]] = {name: [] for name in graphs}
        eager: dict[str, list[float]] = {name: [] for name in graphs}
        for turn in range(max(turns.values())):
            for name, graph in graphs.items():
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


def number_of_caches(size: int) -> int:
    return max(1, math.ceil(ROTATED_BYTES / size))


def bandwidth(contest: Contest) -> tuple[float, float]:
    """TB/s of a sum over 4 GiB, and of a copy of 2 GiB (bytes read and bytes written)."""
    source = torch.randn(1 << 30, device=DEVICE)
    half = source.numel() // 2
    calls = {"read": [source.sum], "copy": [lambda: source[half:].copy_(source[:half])]}
    times = contest.medians(calls)  # a copy inside a graph is slower than outside
    return tuple(source.nbytes / min(times[name]) / 1e9 for name in ("read", "copy"))


# ---- the others


class Plain:
    """Unpacked keys and values of a shape, and whatever attends over them."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.q = shape, shape.queries()
        self.absent: dict[str, str] = {}
        """Why a contender cannot run, by name."""

    @cached_property
    def caches(self) -> list[Tensor]:
        """Random keys and values, [2, tokens, kv_heads, head_dim] or of another shape."""
        size = (2, self.shape.tokens * self.shape.kv_heads * self.shape.head_dim)
        return [
            torch.randn(size, dtype=torch.bfloat16, device=DEVICE)
            for _ in range(number_of_caches(self.shape.bf16_bytes // 2))  # fp8 is half of it
        ]

    @cached_property
    def page_order(self) -> Tensor:
        pages = self.shape.tokens // BASELINE_PAGE
        return torch.randperm(pages, device=DEVICE).int()

    def contenders(self) -> dict[str, list[Call]]:
        """The contenders that run and give right results."""
        if self.shape.prefill:
            makers = {"flash": self.flash_causal}
        else:
            makers = {
                "cudnn": lambda: self.sdpa(SDPBackend.CUDNN_ATTENTION, False),
                "cudnn folded": lambda: self.sdpa(SDPBackend.CUDNN_ATTENTION, True),
                "flash": lambda: self.sdpa(SDPBackend.FLASH_ATTENTION, False),
                "flash folded": lambda: self.sdpa(SDPBackend.FLASH_ATTENTION, True),
                "flashinfer": lambda: self.flashinfer(torch.bfloat16),
                "fp8": lambda: self.flashinfer(torch.float8_e4m3fn),
            }
        found = {}
        for name, make in makers.items():
            try:
                calls = make()
                self.check(name, calls[0]())
                found[name] = calls
            except Exception as error:  # whatever it is, the row names it
                self.absent[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return found

    def contiguous(self, cache: Tensor) -> Tensor:
        s = self.shape
        return cache.view(2, s.batch, s.kv_heads, s.context, s.head_dim)

    def sdpa(self, backend: SDPBackend, folded: bool) -> list[Call]:
        s = self.shape
        q = self.q.view(s.batch, s.q_len, s.q_heads, s.head_dim).transpose(1, 2).contiguous()
        if folded:
            q = q.view(s.batch, s.kv_heads, -1, s.head_dim)

        def call(k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, enable_gqa=not folded)

        return [partial(call, *self.contiguous(c)) for c in self.caches]

    def flash_causal(self) -> list[Call]:
        """Flash attention whose last query attends to the last key."""
        s = self.shape
        q = self.q.view(s.batch, s.q_len, s.q_heads, s.head_dim).transpose(1, 2)
        flash = torch.ops.aten._scaled_dot_product_flash_attention

        def call(k: Tensor, v: Tensor) -> Tensor:
            return flash(q, k, v, 0.0, True)[0]

        return [partial(call, *self.contiguous(c)) for c in self.caches]

    def flashinfer(self, dtype: torch.dtype) -> list[Call]:
        if flashinfer is None:
            raise RuntimeError(why_no_flashinfer)
        s = self.shape
        if s.head_dim not in FLASHINFER_DIMS:  # others take the device down with them
            raise RuntimeError(f"head_dim {s.head_dim} is none of {FLASHINFER_DIMS}")
        pages = s.context // BASELINE_PAGE
        starts = torch.arange(s.batch + 1, dtype=torch.int32)
        last = torch.full((s.batch,), BASELINE_PAGE, dtype=torch.int32)
        heads = (s.q_heads, s.kv_heads, s.head_dim)
        types = {"q_data_type": torch.bfloat16, "kv_data_type": dtype}
        workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=DEVICE)
        if s.q_len == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=True, backend="fa2"
            )
            wrapper.plan(starts * pages, self.page_order, last, *heads, BASELINE_PAGE, **types)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace, "NHD", backend="fa2"
            )
            wrapper.plan(
                starts * s.q_len,
                starts * pages,
                self.page_order,
                last,
                *heads,
                BASELINE_PAGE,
                causal=False,
                **types,
            )

        def call(k: Tensor, v: Tensor) -> Tensor:
            return wrapper.run(self.q, (k, v))

        paged = (2, -1, BASELINE_PAGE, s.kv_heads, s.head_dim)
        return [partial(call, *c.view(paged).to(dtype)) for c in self.caches]

    def check(self, name: str, out: Tensor) -> None:
        """Checks the first cache's result for one sequence and KV head."""
        s = self.shape
        sequence, head = s.batch - 1, s.kv_heads // 2
        by_token = (s.batch, s.q_len, s.q_heads, s.head_dim)
        if name in ("flashinfer", "fp8"):
            out = out.view(by_token)
            pages = self.page_order.view(s.batch, -1)[sequence].long()
            kv = self.caches[0].view(2, -1, BASELINE_PAGE, s.kv_heads, s.head_dim)
            k, v = kv[:, pages, :, head].flatten(1, 2)
        else:
            out = out.reshape(s.batch, s.q_heads, s.q_len, s.head_dim).transpose(1, 2)
            k, v = self.contiguous(self.caches[0])[:, sequence, head]
        dtype = torch.float8_e4m3fn if name == "fp8" else torch.bfloat16
        q = heads_of(self.q.view(by_token)[sequence], s, head)
        exact = exact_attention(q, k.to(dtype), v.to(dtype), causal=s.prefill)
        found = heads_of(out[sequence], s, head).double()
        cosine = cosine_similarity(found, exact, dim=-1).min()
        if not cosine > 0.9999:
            raise RuntimeError(f"its result has a cosine of {cosine:.5f} with exact attention")


def heads_of(x: Tensor, shape: Shape, kv_head: int) -> Tensor:
    """The query heads of one KV head: [q_len, group, d] of [q_len, q_heads, d]."""
    return x.unflatten(1, (shape.kv_heads, -1))[:, kv_head]


def exact_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention in float64, [q_len, group, d]: of q [q_len, group, d], k and v [context, d]."""
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.T / math.sqrt(k.shape[1])
    if causal:
        position = torch.arange(len(k) - len(q), len(k), device=k.device)[:, None, None]
        scores.masked_fill_(torch.arange(len(k), device=k.device) > position, -torch.inf)
    return scores.softmax(-1) @ v


# ---- ours


class Packed:
    """The packed caches of one case."""

    def __init__(self, case: Case) -> None:
        self.case, s = case, case.shape
        self.config = tt.preset(case.preset, s.head_dim, page_size=case.page_size)
        center = torch.randn(s.kv_heads, s.head_dim, device=DEVICE) if case.tail else None
        self.tables = tt.make_tables(self.config, 0, DEVICE, center)
        self.q = s.queries()
        self.lengths = torch.full((s.batch,), s.context, dtype=torch.int32, device=DEVICE)
        self.starts = None
        if s.q_len > 1:
            self.starts = s.q_len * torch.arange(s.batch + 1, dtype=torch.int32, device=DEVICE)

        base = tt.allocate_cache(self.config, STORED_TOKENS // case.page_size, s.kv_heads, DEVICE)
        k, v = (
            torch.randn(STORED_TOKENS, s.kv_heads, s.head_dim, dtype=torch.bfloat16, device=DEVICE)
            for _ in range(2)
        )
        if center is not None:
            k += center.bfloat16()
        slots = torch.arange(STORED_TOKENS, device=DEVICE)
        tt.cache_store(k, v, base, slots, self.config, self.tables)
        pages = s.tokens // case.page_size
        self.sets = []
        """(cache, block_table, tail) of each cache."""
        for _ in range(number_of_caches(pages * s.kv_heads * self.config.record_bytes)):
            cache = base[torch.randint(len(base), (pages,), device=DEVICE)]
            table = torch.randperm(pages, device=DEVICE).view(s.batch, -1).int()
            self.sets.append((cache, table, self.random_tail() if case.tail else None))

    def random_tail(self) -> tt.Tail:
        s = self.case.shape
        ring = tt.allocate_tail(self.config, s.batch, s.kv_heads, torch.bfloat16, s.q_len, DEVICE)
        return tt.Tail(ring.normal_(), torch.randperm(s.batch, device=DEVICE))

    def calls(self) -> list[Call]:
        s = self.case.shape
        return [
            lambda cache=cache, table=table, tail=tail: tt.paged_attention(
                self.q,
                cache,
                table,
                self.lengths,
                self.config,
                self.tables,
                cu_seqlens_q=self.starts,
                max_q_len=s.q_len,
                tail=tail,
            )
            for cache, table, tail in self.sets
        ]

    @property
    def bytes_read(self) -> int:
        """Bytes that one call reads: codes and scales, or the rows of the tail where it is used.

        A token in the windows of only some of a step's queries is read in both forms.
        """
        s, config = self.case.shape, self.config
        rows = codes_unread = 0
        if self.case.tail:
            rows = config.sink_tokens + config.recent_window + s.q_len - 1
            codes_unread = config.sink_tokens + config.recent_window - (s.q_len - 1)
        coded = (s.context - codes_unread) * config.bytes_per_token
        return s.batch * s.kv_heads * (coded + rows * 4 * s.head_dim)

    def errors(self) -> tuple[float, float]:
        """Largest difference from exact attention and least cosine, of one sequence and KV head."""
        s, config = self.case.shape, self.config
        sequence, head = s.batch - 1, s.kv_heads // 2
        cache, table, tail = self.sets[-1]
        row = slice(sequence, sequence + 1)
        k, v = (
            x[0, :, head]
            for x in tt.cache_load(
                cache,
                table[row],
                self.lengths[row],
                config,
                self.tables,
                s.context,
                torch.float32,
            )
        )
        q = heads_of(self.q.view(s.batch, s.q_len, s.q_heads, s.head_dim)[sequence], s, head)
        if tail is None:
            exact = exact_attention(q, k, v, causal=True)
        else:
            rows = tail.ring[tail.slots[sequence], head].float()
            by_query = []
            for i in range(s.q_len):  # each has a window of its own
                visible = s.context - s.q_len + i + 1
                keys, values = k[:visible].clone(), v[:visible].clone()
                recent = torch.arange(visible - config.recent_window, visible, device=DEVICE)
                sinks, ring = config.sink_tokens, len(rows) - config.sink_tokens
                keys[:sinks], values[:sinks] = rows[:sinks].unbind(1)
                keys[recent], values[recent] = rows[sinks + (recent - sinks) % ring].unbind(1)
                by_query.append(exact_attention(q[i : i + 1], keys, values, causal=False))
            exact = torch.cat(by_query)
        out = self.calls()[-1]()[0].view(s.batch, s.q_len, s.q_heads, s.head_dim)[sequence]
        found = heads_of(out, s, head).double()
        cosine = cosine_similarity(found, exact, dim=-1).min()
        return (found - exact).abs().max().item(), cosine.item()


# ---- the table


def row_of(packed: Packed, times: tuple[float, float], plain: dict[str, float], read: float) -> Row:
    """The row of a case.

    times: milliseconds of our call, in a graph and eager. plain: those of the others in a graph, by
    name.
    """
    case, s = packed.case, packed.case.shape
    (ours, eager), size = times, packed.bytes_read
    error, cosine = packed.errors()
    bf16 = {name: ms for name, ms in plain.items() if name != "fp8"}
    best = min(bf16, key=bf16.get, default=None)
    fp8 = plain.get("fp8")
    return {
        "row": str(case),
        "preset": case.preset,
        "batch": s.batch,
        "context": s.context,
        "q_len": s.q_len,
        "q_heads": s.q_heads,
        "kv_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "page_size": case.page_size,
        "tail": case.tail,
        "center": case.tail,
        "ours_ms": round(ours, 5),
        "ours_eager_ms": round(eager, 5),
        "bytes_read": size,
        "achieved_tb_s": round(size / ours / 1e9, 3),
        "fraction_of_read_bandwidth": round(size / ours / 1e9 / read, 3),
        "bf16_bytes": s.bf16_bytes,
        "best_bf16_ms": round(bf16[best], 5) if best else None,
        "best_bf16_name": best,
        "fp8_ms": round(fp8, 5) if fp8 else None,
        "speedup_vs_bf16": round(bf16[best] / ours, 3) if best else None,
        "speedup_vs_fp8": round(fp8 / ours, 3) if fp8 else None,
        "max_error": round(error, 7),
        "cosine": round(cosine, 7),
    }


def rows_of(shape: Shape, cases: list[Case], contest: Contest, read: float) -> Iterator[Row]:
    """Measures all cases of one shape together with the other contenders."""
    others = Plain(shape)
    contenders = others.contenders()
    packed = {str(case): Packed(case) for case in cases}
    times = contest.medians(contenders | {name: p.calls() for name, p in packed.items()})
    plain = {name: times[name][0] for name in contenders}
    print(f"{shape}: {', '.join(f'{name} {ms:.4f}' for name, ms in plain.items())} ms", flush=True)
    for name, reason in others.absent.items():
        print(f"  {name} is absent: {reason}")
    all_ms = {f"{name.replace(' ', '_')}_ms": round(ms, 5) for name, ms in plain.items()}
    for name, p in packed.items():
        yield row_of(p, times[name], plain, read) | all_ms | {"absent": others.absent}


def print_row(row: Row) -> None:
    def ratio(kind: str) -> str:
        found = row[f"speedup_vs_{kind}"]
        return "    -" if found is None else f"{found:5.2f}"

    print(
        f"{row['row']:52} {row['ours_ms']:8.4f} ms (eager {row['ours_eager_ms']:8.4f}) "
        f"{row['achieved_tb_s']:6.3f} TB/s {row['fraction_of_read_bandwidth']:5.2f} of read "
        f"{ratio('bf16')} x bf16 ({row['best_bf16_name']}) {ratio('fp8')} x fp8  "
        f"cos {row['cosine']:.6f} error {row['max_error']:.1e}",
        flush=True,
    )


def print_markdown(rows: list[Row]) -> None:
    """The tables of docs/performance.md. Rows of one shape keep the order of measuring."""
    header = "case,ms,eager,TB/s,of read,best bf16,vs bf16,vs fp8,largest error".split(",")
    body = []
    for row in rows:
        ratios = (row[f"speedup_vs_{kind}"] for kind in ("bf16", "fp8"))
        cells = [
            row["row"],
            f"{row['ours_ms']:.4f}",
            f"{row['ours_eager_ms']:.4f}",
            f"{row['achieved_tb_s']:.2f}",
            f"{row['fraction_of_read_bandwidth']:.0%}",
            f"{row['best_bf16_ms']} ms, {row['best_bf16_name']}",
            *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
            f"{row['max_error']:.1e}",
        ]
        body.append(cells)
    print(common.markdown(header, body))


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--cases", default="", help="regular expression of rows; prints only")
    options.add_argument("--quick", action="store_true", help="five rows; prints only")
    options.add_argument("--prefill", action="store_true", help="only the rows of 2,048 queries")
    options.add_argument("--baselines-only", action="store_true", help="without us; prints only")
    options.add_argument("--table", action="store_true", help="prints the result file")
    options.add_argument("--seconds", type=float, default=0.1, help="of one contestant's replays")
    arguments = options.parse_args()
    arguments.dry_run |= bool(arguments.cases or arguments.quick or arguments.baselines_only)
    if arguments.table:
        print_markdown(common.read_rows("h200_attention"))
        return
    if torch.device(arguments.device).type != "cuda":
        print("This benchmark needs a CUDA device; bench_cpu.py measures attention on CPUs.")
        return
    arguments.dry_run |= arguments.prefill
    cases = QUICK if arguments.quick else PREFILLS if arguments.prefill else ALL
    cases = [case for case in cases if re.search(arguments.cases, str(case))]
    torch.manual_seed(0)
    contest, rows, right = Contest(arguments.seconds), [], []

    with torch.no_grad():
        read, copy = bandwidth(contest)
        shared = {
            "read_tb_s": round(read, 3),
            "copy_tb_s": round(copy, 3),
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "flashinfer": getattr(flashinfer, "__version__", None),
        }
        print(f"{common.device_name(DEVICE)}, {', '.join(f'{k} {v}' for k, v in shared.items())}")
        for shape in dict.fromkeys(case.shape for case in cases):
            mine = [c for c in cases if c.shape == shape and not arguments.baselines_only]
            for row in rows_of(shape, mine, contest, read):
                print_row(row)
                rows.append(row | shared)
            gc.collect()  # contenders and their caches hold each other
            torch.cuda.empty_cache()
            right = [row for row in rows if row["cosine"] > 0.999]
            if not arguments.dry_run:
                common.write_progress("h200_attention", right, "row", arguments)
    common.write_rows("h200_attention", right, arguments)
    wrong = [row["row"] for row in rows if row not in right]
    if wrong:
        raise SystemExit(f"a cosine below 0.999 with exact attention: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
