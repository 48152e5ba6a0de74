"""Speed of the CPU kernels: attention against PyTorch's, the rest against a copy of as many bytes.

Contestants take turns in one process and on the same threads. 96 MB are read before each call, so
that every call finds its data in memory and not in a cache. Times are medians.

Attention is one decode step of 32 query heads over 8 KV heads of 128 channels. It is compared with
four ways to do the same in PyTorch over an unpacked cache, in bfloat16 and float32:
scaled_dot_product_attention with enable_gqa, the same with the query heads of a KV head as queries,
two products with a softmax between them, and these through torch.compile. "speedup" is the time of
the fastest way over ours.

For all other ops the yardstick is a copy into new memory that reads and writes as many bytes in
total: "copy" is its time over the op's, and 1.0 is the speed of memory.

    python benchmarks/bench_cpu.py                        the best level, into results/cpu.json
    python benchmarks/bench_cpu.py --levels all           every level of this processor
    python benchmarks/bench_cpu.py --instructions         and instructions per code (minutes)
    python benchmarks/bench_cpu.py --only 'score|encode'  rows whose name matches
    python benchmarks/bench_cpu.py --quick                a second for everything, printed only

Rows that are not measured again stay, and so do those of a processor of the same name with other
levels: virtual machines may call processors with and without AVX-512 by one name.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import common
import instructions
import torch
from instructions import D, codebook
from torch import Tensor
from torch.nn.functional import cosine_similarity, scaled_dot_product_attention

import torch_turboquant as tt
from torch_turboquant._library import cpu_levels, force_cpu_level

Q_HEADS, HEADS = 32, 8
PRESETS = ("k4v4", "k3v3", "k5v4u", "k8v8")
WAYS = ("gqa", "folded", "matmul", "compiled")
CONTEXTS = [(1024 << i, 1) for i in range(7)] + [(8192, 4), (32768, 4)]
FLUSHED_BYTES = 96 << 20
KEY = ("row", "level", "by", "levels")  # what tells a row from the others of a processor
SIMILAR = {
    2: 0.8,
    3: 0.95,
    4: 0.98,
    5: 0.99,
    8: 0.999,
}  # outputs of random keys, by the fewest bits

Call = Callable[[], object]
Row = dict[str, object]


# ---- timing


class Race:
    """Medians of the times of calls that take turns."""

    def __init__(self, repeats: int, seconds: float) -> None:
        self.repeats = repeats
        self.seconds = seconds
        """A slow call gets fewer turns, at least three, so that it takes no longer than this."""
        self.memory = torch.zeros(FLUSHED_BYTES // 4)

    def medians(
        self, calls: dict[tuple[str, str | None], Call], flush: bool = True
    ) -> dict[tuple[str, str | None], float]:
        """Milliseconds of calls by (name, level). The level of calls that are not ours is None."""
        turns = dict.fromkeys(calls, self.repeats)
        times: dict[tuple[str, str | None], list[float]] = {key: [] for key in calls}
        for i in range(-1, self.repeats):  # one warm-up
            for key, call in calls.items():
                if i >= turns[key]:
                    continue
                with force_cpu_level(key[1]) if key[1] else nullcontext():
                    if flush:
                        self.memory.sum()
                    start = time.perf_counter()
                    call()
                    took = time.perf_counter() - start
                if i < 0:
                    turns[key] = max(3, min(self.repeats, int(self.seconds / took)))
                else:
                    times[key].append(took * 1e3)
        return {key: statistics.median(t) for key, t in times.items()}


# ---- attention


def products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(D)).softmax(-1) @ v


class Attention:
    """One decode step: the same keys and values plain, and packed by presets."""

    def __init__(self, context: int, batch: int, presets: tuple[str, ...]) -> None:
        self.context, self.batch = context, batch
        self.q = torch.randn(batch, Q_HEADS, D, dtype=torch.bfloat16)
        kv = [torch.randn(batch, context, HEADS, D, dtype=torch.bfloat16) for _ in range(2)]
        self.packed = {name: self.pack(name, *kv) for name in presets}
        plain = [x.transpose(1, 2).contiguous() for x in kv]
        self.plain = {torch.bfloat16: plain, torch.float32: [x.float() for x in plain]}

    def pack(self, name: str, k: Tensor, v: Tensor):
        config = tt.preset(name, D, search=1)
        tables = tt.make_tables(config, 0)
        pages = self.batch * self.context // config.page_size
        cache = tt.allocate_cache(config, pages, HEADS)
        order = torch.randperm(pages)
        slots = order[:, None] * config.page_size + torch.arange(config.page_size)
        tt.cache_store(k.flatten(0, 1), v.flatten(0, 1), cache, slots.flatten(), config, tables)
        lengths = torch.full((self.batch,), self.context, dtype=torch.int32)
        return cache, order.view(self.batch, -1).int(), lengths, config, tables

    def ours(self, name: str) -> Call:
        return lambda: tt.paged_attention(self.q, *self.packed[name])

    def ways(self, dtype: torch.dtype) -> dict[str, Call]:
        (k, v), q = self.plain[dtype], self.q.to(dtype)
        folded = q.view(self.batch, HEADS, -1, D)
        compiled = torch.compile(products, dynamic=False)
        return {
            "gqa": lambda: scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True),
            "folded": lambda: scaled_dot_product_attention(folded, k, v),
            "matmul": lambda: products(folded, k, v),
            "compiled": lambda: compiled(folded, k, v),
        }

    def check(self, name: str) -> None:
        """Checks that packed and plain attention compute the same."""
        out = self.ours(name)()[0].float().flatten()
        exact = self.ways(torch.float32)["folded"]().flatten()
        found, config = cosine_similarity(out, exact, dim=0), self.packed[name][3]
        if found < SIMILAR[min(config.key_bits, config.value_bits)]:
            raise SystemExit(f"attention {name} has a cosine of {found:.3f} with PyTorch's")


def attention_rows(race: Race, levels: list[str], wanted: re.Pattern, quick: bool) -> Iterator[Row]:
    for context, batch in CONTEXTS[:1] if quick else CONTEXTS:
        rows = {name: f"attention {name} {context} x {batch}" for name in PRESETS}
        presets = tuple(name for name in PRESETS if wanted.search(rows[name]))
        if not presets:
            continue
        torch._dynamo.reset()  # every context is compiled by itself
        data = Attention(context, batch, presets)
        calls: dict[tuple[str, str | None], Call] = {}
        for dtype in data.plain:
            for way, call in data.ways(dtype).items():
                calls[f"{common.short_name(dtype)}_{way}_ms", None] = call
        for name in presets:
            data.check(name)
            calls |= {(name, level): data.ours(name) for level in levels}
        times = race.medians(calls)
        plain = {key: round(ms, 4) for (key, level), ms in times.items() if level is None}
        for name in presets:
            for level in levels:
                ms, size = times[name, level], data.packed[name][0].nbytes
                best = {
                    kind: min(t for key, t in plain.items() if key.startswith(kind))
                    for kind in ("bf16", "fp32")
                }
                yield {
                    "row": rows[name],
                    "level": level,
                    "context": context,
                    "batch": batch,
                    "ms": round(ms, 4),
                    "speedup_vs_bf16": round(best["bf16"] / ms, 3),
                    "speedup_vs_float32": round(best["fp32"] / ms, 3),
                    "gb_per_s": round(size / ms / 1e6, 2),
                    "ns_per_token": round(ms * 1e6 / (context * batch), 2),
                    **plain,
                }


# ---- everything else


@dataclass
class Work:
    """One row of the table."""

    name: str
    op: Call
    bytes: int
    """Bytes that every implementation must read or write."""
    vectors: int = 0
    """Vectors that the op encodes or decodes, if it does either."""
    others: dict[str, Call] = field(default_factory=dict)
    """The same work in PyTorch on unpacked data."""
    warm: bool = False
    """Whether to measure a second time with all data in the CPU's caches."""
    published: dict[str, float] = field(default_factory=dict)


def hadamard_work(n: int, dtype: torch.dtype) -> Work:
    x, signs = torch.randn(n, D).to(dtype), tt.random_signs(D, 0)
    name = f"hadamard {common.short_name(dtype)}"
    return Work(name, lambda: tt.hadamard(x, signs), 2 * x.nbytes)


def encode_work(n: int, dtype: torch.dtype, search: int) -> Work:
    signs, levels, steps = codebook(4, search)
    x = torch.randn(n, D).to(dtype)
    return Work(
        f"encode 4 bit {common.short_name(dtype)} S={search}",
        lambda: tt.encode(x, signs, levels, steps, 4),
        x.nbytes + n * (D // 2 + 2),
        n,
        published={"PyTorch on a CPU, M/s": 1.7, "Metal, M/s": 2.9} if search == 1 else {},
    )


def decode_work(n: int, dtype: torch.dtype, bits: int) -> Work:
    signs, levels, steps = codebook(bits)
    packed, scale = tt.encode(torch.randn(n, D), signs, levels, steps, bits)
    return Work(
        f"decode {bits} bit {common.short_name(dtype)}",
        lambda: tt.decode(packed, scale, signs, levels, bits, None, dtype),
        packed.nbytes + scale.nbytes + n * D * dtype.itemsize,
        n,
    )


def score_work(heads: int, keys: int, bits: int) -> Work:
    signs, levels, steps = codebook(bits)
    k, q = torch.randn(heads, keys, D), torch.randn(heads, 1, D)
    packed, scale = tt.encode(k, signs, levels, steps, bits)
    k_half, q_half = k.bfloat16(), q.bfloat16()
    published = {"a Metal kernel, ms": 0.57, "its PyTorch path on a CPU, ms": 4.6}
    return Work(
        f"score {bits} bit {heads} heads x {keys} keys",
        lambda: tt.score(q, packed, scale, signs, levels, bits),
        packed.nbytes + scale.nbytes + 4 * heads * keys,
        others={"bf16_matmul_ms": lambda: q_half @ k_half.mT, "fp32_matmul_ms": lambda: q @ k.mT},
        warm=True,
        published=published if bits == 3 else {},
    )


def sketch_work(n: int, d: int, dtype: torch.dtype) -> Work:
    """Sketches with a dense projection, beside the product alone that PyTorch would begin with."""
    x, projection = torch.randn(n, d).to(dtype), tt.gaussian_projection(d, d, 0)
    plain = x.float()
    return Work(
        f"qjl_sketch dense {common.short_name(dtype)} {n} x {d}",
        lambda: tt.qjl_sketch(x, projection),
        x.nbytes + projection.nbytes + n * (d // 8 + 4),
        n,
        others={"fp32_matmul_ms": lambda: plain @ projection.T},
    )


def cache_work(name: str, search: int, tokens: int, loads: bool) -> Work:
    config = tt.preset(name, D, search=search)
    tables = tt.make_tables(config, 0)
    pages = max(4096, tokens) // config.page_size
    cache = tt.allocate_cache(config, pages, HEADS)
    k, v = torch.randn(tokens, 2 * HEADS, D, dtype=torch.bfloat16).split(HEADS, 1)
    slots = torch.randperm(pages * config.page_size)[:tokens]
    size = k.nbytes + v.nbytes + int(tokens * HEADS * config.bytes_per_token)
    vectors, many = 2 * tokens * HEADS, f"{tokens} token{'s' * (tokens > 1)}"
    if not loads:
        return Work(
            f"cache_store {name} S={search} {many}",
            lambda: tt.cache_store(k, v, cache, slots, config, tables),
            size,
            vectors,
        )
    every = torch.arange(pages * config.page_size)
    filling = torch.randn(len(every), HEADS, D, dtype=torch.bfloat16)
    tt.cache_store(filling, filling, cache, every, config, tables)
    table = torch.randperm(pages).int()[None]
    length = torch.tensor([tokens], dtype=torch.int32)
    return Work(
        f"cache_load {name} {many}",
        lambda: tt.cache_load(cache, table, length, config, tables, tokens, torch.bfloat16),
        size,
        vectors,
    )


def linear_work(tokens: int, n: int) -> Work:
    """A layer of n inputs and outputs, beside PyTorch's in bfloat16 and 4 bits, and beside a sum
    over the packed bytes."""
    weights = tt.WeightFormat(4)
    codes = torch.randint(16, (n, n), dtype=torch.uint8)
    scale = torch.full((n, n // D), 0.01).half()
    multipliers = torch.randint(16, (n, n // 32), dtype=torch.uint8)
    packed = tt.weight_pack(codes, scale, multipliers, 4)
    reading = weights.signs(D), weights.levels(D), n, 4, 32
    x = torch.randn(tokens, n, dtype=torch.bfloat16)
    exact = torch.randn(n, n, dtype=torch.bfloat16)
    int4 = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    affine = torch.ones(n // D, n, 2, dtype=torch.bfloat16)
    int4_mm = torch.ops.aten._weight_int4pack_mm_for_cpu
    return Work(
        f"linear {tokens} x {n} -> {n}",
        lambda: tt.linear_packed(x, packed, *reading),
        packed.nbytes,
        others={
            "sum_ms": packed.view(torch.int64).sum,
            "bf16_linear_ms": lambda: torch.nn.functional.linear(x, exact),
            "int4_linear_ms": lambda: int4_mm(x, int4, D, affine),
        },
    )


def weight_work(n: int) -> Work:
    weights = tt.WeightFormat(4)
    w = torch.randn(n, n, dtype=torch.bfloat16)
    constants = weights.signs(D), weights.levels(D), weights.steps(D)
    packed = weights.block(n).packed_shape(n, n)
    return Work(
        f"weight_encode {n} x {n}",
        lambda: tt.weight_encode(w, *constants, 4, 32),
        w.nbytes + math.prod(packed),
        n * n // D,
    )


def works(quick: bool) -> Iterator[Callable[[], Work]]:
    n, tokens = (512, 64) if quick else (32768, 4096)
    dtypes = (torch.float32, torch.bfloat16)
    for bits in (3, 4):
        yield lambda bits=bits: score_work(8, 4096, bits)
    for dtype in dtypes:
        yield lambda dtype=dtype: hadamard_work(n, dtype)
    for search in (1, 8):
        for dtype in dtypes:
            yield lambda dtype=dtype, search=search: encode_work(n, dtype, search)
    for bits in (4, 3):
        for dtype in dtypes:
            yield lambda dtype=dtype, bits=bits: decode_work(n, dtype, bits)
    for dtype in dtypes:
        yield lambda dtype=dtype: sketch_work(n, D, dtype)
    yield lambda: sketch_work(n // 64, 12 * D, torch.float32)
    for name in ("k4v4", "k3v3"):
        for count in (tokens, 1):
            for search in (1, 8):
                yield lambda a=(name, search, count, False): cache_work(*a)
            yield lambda a=(name, 1, count, True): cache_work(*a)
    size = 256 if quick else 4096
    for count in (1, 4, 16, 32, 512):
        yield lambda count=count: linear_work(count, size)
    yield lambda: weight_work(size)


def work_rows(race: Race, levels: list[str], wanted: re.Pattern, quick: bool) -> Iterator[Row]:
    for make in works(quick):
        work = make()
        if not wanted.search(work.name):
            continue
        source = torch.randint(256, (work.bytes // 2,), dtype=torch.uint8)
        calls: dict[tuple[str, str | None], Call] = {("copy_ms", None): source.clone}
        calls |= {(name, None): call for name, call in work.others.items()}
        calls |= {("op", level): work.op for level in levels}
        times = race.medians(calls)
        warm = race.medians(calls, flush=False) if work.warm else {}
        for level in levels:
            ms = times["op", level]
            row = {
                "row": work.name,
                "level": level,
                "ms": round(ms, 5),
                "gb_per_s": round(work.bytes / ms / 1e6, 2),
                "fraction_of_copy": round(times["copy_ms", None] / ms, 3),
            }
            row |= {name: round(t, 5) for (name, other), t in times.items() if other is None}
            if work.vectors:
                row["vectors_per_second"] = round(work.vectors / ms * 1e3)
            if warm:
                row["warm_ms"] = round(warm["op", level], 5)
            yield row | ({"published": work.published} if work.published else {})


# ---- the table


def print_row(row: Row) -> None:
    ours = f"{row['row']:36} {row['level']:9}"
    if "per_code" in row:
        print(f"{ours} {row['per_code'] or '-':>9} instructions per code ({row['by']})")
    elif "batch" in row:
        bf16, fp32 = (
            "/".join(
                f"{row[f'{kind}_{way}_ms']:.2f}" for way in ("gqa", "folded", "matmul", "compiled")
            )
            for kind in ("bf16", "fp32")
        )
        print(
            f"{ours} {row['ms']:9.3f} ms {row['gb_per_s']:6.1f} GB/s  "
            f"{row['speedup_vs_bf16']:5.2f} x bf16 ({bf16})  "
            f"{row['speedup_vs_float32']:5.2f} x fp32 ({fp32})"
        )
    else:
        text = f"{ours} {row['ms']:9.4f} ms {row['gb_per_s']:6.1f} GB/s  "
        text += f"{row['fraction_of_copy']:5.2f} copy"
        if "vectors_per_second" in row:
            text += f" {row['vectors_per_second'] / 1e6:7.2f} M vectors/s"
        if "warm_ms" in row:
            text += f"  warm {row['warm_ms']:.4f} ms"
        print(text)


def main() -> None:
    options = common.parser(__doc__)
    options.set_defaults(device="cpu")
    options.add_argument("--levels", choices=("best", "all"), default="best")
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--instructions", action="store_true", help="counts them too")
    options.add_argument("--only", default="", help="regular expression of row names")
    options.add_argument("--quick", action="store_true", help="small sizes; prints only")
    options.add_argument("--repeats", type=int, default=51, help="default: %(default)s")
    options.add_argument("--seconds", type=float, default=4.0, help="of one contestant's turns")
    arguments = options.parse_args()
    arguments.dry_run |= arguments.quick
    torch.set_num_threads(arguments.threads)
    levels = cpu_levels() if arguments.levels == "all" else cpu_levels()[:1]
    race = Race(3, 0.02) if arguments.quick else Race(arguments.repeats, arguments.seconds)
    wanted = re.compile(arguments.only)

    shared = {
        "threads": arguments.threads,
        "levels": " ".join(cpu_levels()),
        "torch": torch.__version__,
    }
    print(f"{common.device_name('cpu')}, {', '.join(f'{k} {v}' for k, v in shared.items())}")
    results: list[Row] = []
    with torch.no_grad():
        for rows in (attention_rows, work_rows):
            for row in rows(race, levels, wanted, arguments.quick):
                print(f"  {row['row']} {row['level']}: {row['ms']:.4f} ms", flush=True)
                results.append(row)
    if arguments.instructions:
        results += instructions.rows(wanted, arguments.quick)
    for row in results:
        print_row(row)
    results = [row | shared for row in results]
    common.write_progress("cpu", results, KEY, arguments)


if __name__ == "__main__":
    main()
