"""Speed of attention over the packed cache on a GPU, against bf16 and fp8 of the same run.

A row is one batch and one preset. Times are medians of CUDA graph replays, divided by the number of
calls in the graph; all contenders take turns. A graph cycles through distinct caches of more than
256 MB in total, or 20 ms of calls, so that the L2 cache never holds the next one. "eager" is the
same sequence of calls without a graph: at small sizes it measures the host. Pages are in random
order, and their codes come from Gaussian keys and values by cache_store. Before it is timed, every
row compares outputs with float64 attention over its decoded keys and values, for one KV head of the
first and last sequence of each kind: all queries of a step, 16 of a prompt. A row whose cosine is
not above COSINE or whose relative error (of an output vector's length) is not below RELATIVE is not
written.

bf16: SDPA with cuDNN and with flash attention, each with enable_gqa and with the query heads of a
KV head folded into queries, on contiguous keys and values; FlashInfer's paged decode with tensor
cores on pages of 16 tokens, or its paged prefill for several queries. The fastest of them counts.
fp8: FlashInfer with e4m3 keys and values. SDPA ignores causality among the queries of a step (q_len
> 1), which makes it faster and its result another one; FlashInfer and ours do not. The row names
contenders that cannot run, with the reason. "of read" compares with a sum over 4 GiB.

The tables, which --only takes by name:

    steps    decode steps of one query or four, exact tail and center included
    rows     several queries of many heads: 4 to 128 query rows per KV head
    mixed    decode steps, drafts and prompt chunks in one call, and each part alone ("parts_ms").
             bf16 is FlashInfer's paged prefill in one call, flash attention of variable lengths,
             FlashAttention 3 where it is installed, or "in parts": cuDNN with folded heads over
             steps, flash attention over each prompt.
    prompts  prompts from position 0 and behind older tokens, causal, from codes ("own": this call's
             keys and values as they are, by k_new and v_new). bf16: cuDNN where its mask fits,
             flash attention, FlashInfer, and FlashAttention 3 where it is installed.
    prefixes several short prompts whose beginnings are in the cache; bf16 as for prompts
    ragged   sequences of different or few tokens. "of_uniform" is the bandwidth in units of that of
             a uniform batch of as many bytes, timed by turns: sequences of 8,192 tokens with 32/8
             heads and the same q_len, as many as come closest.
    cold     small caches when everything is cold, not only keys and values: before each call a norm
             and an MLP of an 8B model run, which read 200 MB of weights and so push tables, signs,
             queries, lengths and code out of the caches. The time is what the call adds to that
             graph. bf16 and FlashAttention 3 are timed in the same way.
    dims     other head dimensions
    drawn    batches of decode steps, drafts, prompts and chunks drawn at random (drawn_batches.py),
             this call's tokens exact; bf16 as for mixed

    python benchmarks/bench_attention.py                   all, into results/h200_attention.json
    python benchmarks/bench_attention.py --quick           five rows, printed only
    python benchmarks/bench_attention.py --only mixed      a table again, merged into the file
    python benchmarks/bench_attention.py --only '^k4v4 '   rows that match, merged into the file
    python benchmarks/bench_attention.py --baselines-only  without us, printed only
    python benchmarks/bench_attention.py --tiny            all with tiny sizes on any device: a try
    python benchmarks/bench_attention.py --table           the result file as Markdown
"""

from __future__ import annotations

import gc
import itertools
import re
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import common
import contenders
import timing
import torch
from attention_batches import ALL, QUICK, TABLES, Case
from batches import Difference, Part, Shape, exact_attention, heads_of, tables_of
from contenders import Plain
from timing import DEVICE, Call, Contest, Layer, number_of_caches
from torch import Tensor

import torch_turboquant as tt

STORED_TOKENS = 4096  # pages hold so many distinct tokens and are repeated in random order
COSINE, RELATIVE = 0.9999, 1 / 64

Row = dict[str, object]


# ---- ours


class Packed:
    """The packed caches of one case."""

    def __init__(self, case: Case) -> None:
        self.case, s = case, case.shape
        self.config = tt.preset(case.preset, s.head_dim, page_size=case.page_size)
        self.center = torch.randn(s.kv_heads, s.head_dim, device=DEVICE) if case.tail else None
        self.tables = tt.make_tables(self.config, 0, DEVICE, self.center)
        self.q, self.lengths = s.queries(), s.lengths
        self.starts = s.starts.to(DEVICE) if s.q_len > 1 else None

        pages = s.pages_of_each(case.page_size)
        stored = min(STORED_TOKENS // case.page_size, sum(pages))
        base = tt.allocate_cache(self.config, stored, s.kv_heads, DEVICE)
        slots = torch.arange(stored * case.page_size, device=DEVICE)
        tt.cache_store(*self.random_tokens(len(slots)), base, slots, self.config, self.tables)
        self.sets = []
        """(cache, block_table, tail, k_new and v_new) of each cache."""
        size = sum(pages) * s.kv_heads * self.config.record_bytes
        if case.own:
            size += 4 * s.new_tokens * s.kv_heads * s.head_dim
        for _ in range(number_of_caches(size)):
            cache = base[torch.randint(len(base), (sum(pages),), device=DEVICE)]
            tail = self.random_tail() if case.tail else None
            own = self.random_tokens(s.new_tokens) if case.own else None
            self.sets.append((cache, tables_of(pages)[1], tail, own))

    def random_tokens(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys around the center and values, [tokens, kv_heads, d]."""
        s = self.case.shape
        k, v = (
            torch.randn(tokens, s.kv_heads, s.head_dim, dtype=torch.bfloat16, device=DEVICE)
            for _ in range(2)
        )
        if self.center is not None:
            k += self.center.bfloat16()
        return k, v

    def random_tail(self) -> tt.Tail:
        s = self.case.shape
        ring = tt.allocate_tail(self.config, s.batch, s.kv_heads, torch.bfloat16, s.q_len, DEVICE)
        return tt.Tail(ring.normal_(), torch.randperm(s.batch, device=DEVICE))

    def calls(self) -> list[Call]:
        s = self.case.shape
        return [
            lambda cache=cache, table=table, tail=tail, new=new: tt.paged_attention(
                self.q,
                cache,
                table,
                self.lengths,
                self.config,
                self.tables,
                cu_seqlens_q=self.starts,
                max_q_len=s.q_len,
                tail=tail,
                **new,
            )
            for cache, table, tail, own in self.sets
            for new in [{} if own is None else {"k_new": own[0], "v_new": own[1]}]
        ]

    @property
    def bytes_read(self) -> int:
        """Bytes that one call must read: codes and scales, rows of the tail, and own tokens.

        A token that only some queries of a sequence have in their windows is read in both forms.
        """
        s, config = self.case.shape, self.config
        codes = rows = 0
        for context, q_len in ((x.context, x.q_len) for x in s.sequences):
            first = context - q_len  # the position of the first query
            stored = first if self.case.own else context
            rows += context - stored
            if self.case.tail:
                sinks = min(config.sink_tokens, stored)
                rows += sinks + max(0, stored - max(sinks, first - config.recent_window + 1))
                codes += max(0, min(stored, context - config.recent_window) - sinks)
            else:
                codes += stored
        return s.kv_heads * (codes * config.bytes_per_token + rows * 4 * s.head_dim)

    @property
    def flops(self) -> int:
        """Of the products of queries with keys and of weights with values."""
        s = self.case.shape
        pairs = sum(
            x.q_len * (x.context - x.q_len) + x.q_len * (x.q_len + 1) // 2 for x in s.sequences
        )
        return 4 * s.q_heads * s.head_dim * pairs

    def errors(self) -> Difference:
        """How far outputs of one KV head of some sequences are from exact attention."""
        s, head = self.case.shape, self.case.shape.kv_heads // 2
        out, starts, found = self.calls()[-1]()[0], s.starts.tolist(), []
        if not out.isfinite().all():
            return Difference(torch.inf, -1.0, torch.inf)
        for number, sequence, queries in s.samples():
            rows = starts[number] + torch.tensor(queries, device=DEVICE)
            exact = self.exact(number, head, sequence, queries)
            found.append(Difference.of(heads_of(out[rows], s, head), exact))
        return Difference.worst(found)

    def exact(self, number: int, head: int, sequence: Part, queries: list[int]) -> Tensor:
        """Exact attention of some queries of a sequence, [queries, group, d]."""
        s, config = self.case.shape, self.config
        cache, table, tail, own = self.sets[-1]
        only, start = slice(number, number + 1), int(s.starts[number])
        k, v = (
            x[0, :, head]
            for x in tt.cache_load(
                cache,
                table[only],
                self.lengths[only],
                config,
                self.tables,
                sequence.context,
                torch.float32,
            )
        )
        first = sequence.context - sequence.q_len
        if own is not None:
            new = slice(start, start + sequence.q_len)
            k[first:], v[first:] = (x[new, head].float() for x in own)
        rows = self.q[start + torch.tensor(queries, device=DEVICE)]
        q, last = heads_of(rows, s, head), first + torch.tensor(queries, device=DEVICE)
        if tail is None:
            return exact_attention(q, k, v, last)
        exact_rows = tail.ring[tail.slots[number], head].float()
        sinks, ring = config.sink_tokens, len(exact_rows) - config.sink_tokens
        stored = first if own is not None else sequence.context
        by_query = []
        for i, position in enumerate(last.tolist()):  # each has a window of its own
            end = min(stored, position + 1)
            keys, values = k[: position + 1].clone(), v[: position + 1].clone()
            begin = min(max(0, position + 1 - config.recent_window), end)  # all may be own tokens
            recent = torch.arange(begin, end, device=DEVICE)
            keys[recent], values[recent] = exact_rows[sinks + (recent - sinks) % ring].unbind(1)
            held = min(sinks, end)
            keys[:held], values[:held] = exact_rows[:held].unbind(1)
            by_query.append(exact_attention(q[i : i + 1], keys, values))
        return torch.cat(by_query)


# ---- the table


@dataclass
class Beside:
    """What our own call is compared with."""

    label: str
    packed: list[Packed]

    @staticmethod
    def of(case: Case) -> Beside | None:
        if case.table == "mixed":
            return Beside("parts", [Packed(part) for part in case.parts()])
        if case.table == "ragged":
            return Beside("uniform", [Packed(case.uniform())])
        return None

    def entries(self, ours: float, size: int, times: list[float]) -> Row:
        """times: milliseconds of each of packed. ours, size: those of the row."""
        names = [str(p.case.shape) for p in self.packed]
        if self.label == "parts":
            parts = {name: round(ms, 5) for name, ms in zip(names, times, strict=True)}
            return {"parts_ms": parts, "of_parts": round(ours / sum(times), 3)}
        (bandwidth,) = (p.bytes_read / ms / 1e9 for p, ms in zip(self.packed, times, strict=True))
        return {
            "uniform": names[0],
            "uniform_tb_s": round(bandwidth, 3),
            "of_uniform": round(size / ours / 1e9 / bandwidth, 3),
        }


@dataclass
class Entry:
    """A case that gives right results, ready to be timed."""

    packed: Packed
    errors: Difference
    beside: Beside | None

    @property
    def right(self) -> bool:
        return self.errors.cosine > COSINE and self.errors.relative < RELATIVE

    @staticmethod
    def of(case: Case) -> Entry:
        packed = Packed(case)
        return Entry(packed, packed.errors(), Beside.of(case))

    @cached_property
    def calls(self) -> dict[str, list[Call]]:
        """Contenders by name, the case's own first."""
        name = str(self.packed.case)
        beside = self.beside.packed if self.beside else []
        return {name: self.packed.calls()} | {
            f"{name}, beside {i}": p.calls() for i, p in enumerate(beside)
        }


def row_of(entry: Entry, times: dict[str, tuple[float, float]], best: Row, read: float) -> Row:
    """The row of a case.

    times: milliseconds in a graph and eager, by contender. best: what others_of says.
    """
    case, s = entry.packed.case, entry.packed.case.shape
    (ours, eager), *beside = (times[name] for name in entry.calls)
    size, bf16, fp8 = entry.packed.bytes_read, best["best_bf16_ms"], best["fp8_ms"]
    row = {
        "row": str(case),
        "table": case.table,
        "preset": case.preset,
        "batch": s.batch,
        "context": s.context,
        "tokens": s.tokens,
        "q_len": s.q_len,
        "q_heads": s.q_heads,
        "kv_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "page_size": case.page_size,
        "tail": case.tail,
        "center": case.tail,
        "own": case.own,
        "ours_ms": round(ours, 5),
        "ours_eager_ms": round(eager, 5) if eager else None,
        "bytes_read": size,
        "achieved_tb_s": round(size / ours / 1e9, 3),
        "fraction_of_read_bandwidth": round(size / ours / 1e9 / read, 3),
        "tflop_s": round(entry.packed.flops / ours / 1e9, 1),
        "bf16_bytes": s.bf16_bytes,
        **best,
        "speedup_vs_bf16": round(bf16 / ours, 3) if bf16 else None,
        "speedup_vs_fp8": round(fp8 / ours, 3) if fp8 else None,
        "max_error": round(entry.errors.max_error, 7),
        "cosine": round(entry.errors.cosine, 7),
        "relative_error": round(entry.errors.relative, 6),
    }
    if entry.beside:
        row |= entry.beside.entries(ours, size, [ms for ms, _ in beside])
    return row


def others_of(times: dict[str, tuple[float, float]], absent: dict[str, str]) -> Row:
    """What every row of a shape says of the others."""
    ms = {name: round(in_graph, 5) for name, (in_graph, _) in times.items()}
    bf16 = {name: x for name, x in ms.items() if "fp8" not in name}
    best = min(bf16, key=bf16.__getitem__, default=None)
    row: Row = {
        "best_bf16_ms": bf16[best] if best else None,
        "best_bf16_name": best,
        "fp8_ms": ms.get("fp8"),
    }
    return row | {f"{name.replace(' ', '_')}_ms": x for name, x in ms.items()} | {"absent": absent}


class Bench:
    """Times groups of cases, and remembers which could not run or were wrong."""

    def __init__(self, contest: Contest, read: float, without: re.Pattern[str] | None) -> None:
        self.contest, self.read, self.without = contest, read, without
        self.failed: list[str] = []

    @cached_property
    def layer(self) -> Layer:
        return Layer() if timing.ROTATED_BYTES else Layer(64, 128)

    def entries(self, cases: list[Case]) -> Iterator[Entry]:
        for case in cases:
            try:
                entry = Entry.of(case)
            except Exception:  # other rows are still worth measuring
                self.failed.append(f"{case}: {traceback.format_exc().splitlines()[-1]}")
                traceback.print_exc()
                continue
            if not entry.right:
                self.failed.append(f"{case}: {entry.errors}")
            yield entry

    def rows(self, table: str, shape: Shape, others: Plain, cases: list[Case]) -> Iterator[Row]:
        """The right rows of cases of one shape, measured together with the others."""
        start, entries = time.perf_counter(), list(self.entries(cases))
        plain = others.contenders()
        calls = dict(plain)
        for entry in entries:
            calls |= entry.calls
        if table == "cold":
            some = self.contest.medians_between(calls, self.layer)
            times = {name: (ms, 0.0) for name, ms in some.items()}
        else:
            times = self.contest.medians(calls)
        best = others_of({name: times[name] for name in plain}, others.absent)
        text = ", ".join(f"{name} {times[name][0]:.4f}" for name in plain)
        print(f"{table}: {shape}: {text} ms [{time.perf_counter() - start:.1f} s]", flush=True)
        for name, reason in others.absent.items():
            print(f"  {name} is absent: {reason}")
        for entry in entries:
            row = row_of(entry, times, best, self.read)
            print_row(row)
            if entry.right:
                yield row

    def all_rows(self, cases: list[Case], with_us: bool) -> Iterator[list[Row]]:
        """The right rows of each table and shape in turn."""
        for (table, shape), some in itertools.groupby(cases, key=lambda c: (c.table, c.shape)):
            group = list(some)
            try:
                others = Plain(shape, group[0].others, self.without)
                yield list(self.rows(table, shape, others, group if with_us else []))
            except Exception:
                reason = traceback.format_exc()
                print(reason, flush=True)
                self.failed.append(f"{table}: {shape}: {reason.splitlines()[-1]}")
            others = None
            gc.collect()  # contenders and their caches hold each other
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()


def print_row(row: Row) -> None:
    def ratio(kind: str) -> str:
        found = row[f"speedup_vs_{kind}"]
        return "    -" if found is None else f"{found:5.2f}"

    eager, more = row["ours_eager_ms"], ""
    if "of_parts" in row:
        more = f" {row['of_parts']:.2f} of its parts"
    if "of_uniform" in row:
        more = f" {row['of_uniform']:.2f} of {row['uniform_tb_s']:.3f} TB/s of {row['uniform']}"
    print(
        f"{row['row']:52} {row['ours_ms']:8.4f} ms (eager {f'{eager:8.4f}' if eager else '-'}) "
        f"{row['achieved_tb_s']:6.3f} TB/s {row['fraction_of_read_bandwidth']:5.2f} of read "
        f"{row['tflop_s']:6.1f} TFLOP/s {ratio('bf16')} x bf16 ({row['best_bf16_name']}) "
        f"{ratio('fp8')} x fp8  cos {row['cosine']:.6f} error {row['max_error']:.1e} "
        f"relative {row['relative_error']:.1e}{more}",
        flush=True,
    )


def print_markdown(rows: list[Row]) -> None:
    """The tables of docs/performance.md. Rows of one shape keep the order of measuring."""
    header = "case,ms,eager,TB/s,of read,best bf16,vs bf16,vs fp8,largest error".split(",")
    body = []
    for row in rows:
        ratios = (row[f"speedup_vs_{kind}"] for kind in ("bf16", "fp8"))
        eager = row["ours_eager_ms"]
        cells = [
            row["row"],
            f"{row['ours_ms']:.4f}",
            f"{eager:.4f}" if eager else "-",
            f"{row['achieved_tb_s']:.2f}",
            f"{row['fraction_of_read_bandwidth']:.0%}",
            f"{row['best_bf16_ms']} ms, {row['best_bf16_name']}",
            *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
            f"{row['max_error']:.1e}",
        ]
        body.append(cells)
    print(common.markdown(header, body))


def chosen(cases: tuple[Case, ...], only: str) -> list[Case]:
    """The rows that a regular expression finds, or those of the table of this name."""
    if only in TABLES:
        return [case for case in cases if case.table == only]
    return [case for case in cases if re.search(only, str(case))]


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--only", default="", help="a table, or a regular expression of rows")
    options.add_argument("--quick", action="store_true", help="five rows; prints only")
    options.add_argument("--baselines-only", action="store_true", help="without us; prints only")
    options.add_argument("--tiny", action="store_true", help="a try on any device; prints only")
    options.add_argument("--table", action="store_true", help="prints the result file")
    options.add_argument("--seconds", type=float, default=0.1, help="of one contestant's replays")
    options.add_argument(
        "--without",
        default="flashinfer fa3",
        help="regular expression of contenders that do not run, '' for none; default: "
        "%(default)s, which compiles for minutes",
    )
    arguments = options.parse_args()
    arguments.dry_run |= arguments.quick or arguments.baselines_only or arguments.tiny
    if arguments.table:
        print_markdown(common.read_rows("h200_attention"))
        return
    elsewhere = "; bench_cpu.py measures attention on CPUs"
    if not arguments.tiny and not timing.on_a_gpu(arguments, elsewhere):
        return
    cases = chosen(QUICK if arguments.quick else ALL, arguments.only)
    if arguments.tiny:
        timing.ROTATED_BYTES = 0  # one cache is enough
        cases = [replace(case, shape=case.shape.tiny()) for case in cases]
    torch.manual_seed(0)
    without = re.compile(arguments.without) if arguments.without else None
    contest, found = Contest(0.0 if arguments.tiny else arguments.seconds), []
    order = [str(case) for case in ALL]

    with torch.no_grad():
        read, copy = timing.bandwidth(contest, 1 << (16 if arguments.tiny else 30))
        shared = {
            "read_tb_s": round(read, 3),
            "copy_tb_s": round(copy, 3),
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "flashinfer": getattr(contenders.flashinfer, "__version__", None),
            "vllm": contenders.vllm_version(),
        }
        print(f"{common.device_name(DEVICE)}, {', '.join(f'{k} {v}' for k, v in shared.items())}")
        bench = Bench(contest, read, without)
        for rows in bench.all_rows(cases, with_us=not arguments.baselines_only):
            found += [row | shared for row in rows]
            if not arguments.dry_run:
                common.write_progress("h200_attention", found, "row", arguments, order)
    if not arguments.only and not bench.failed:
        common.write_rows("h200_attention", found, arguments)  # no older row is left
    if bench.failed:
        raise SystemExit("rows that failed or are wrong:\n" + "\n".join(bench.failed))


if __name__ == "__main__":
    main()
