"""The kernels of vLLM beside ours: its own TurboQuant, and its FlashAttention 3 in bf16 and fp8.

vLLM's TurboQuant (`--kv-cache-dtype turboquant_*`) consists of Triton kernels, which this program
calls from vLLM's package as vLLM's backend does: the same caches, tables and arguments. Two of
their parameters may vary, and the fastest counts: how many parts a sequence is split into (vLLM
takes 32) and pages of 16 (vLLM's default) or 64 tokens.

A row is one call: "attention", a decode step's attention, or "store", the keys and values of new
tokens written to the cache. Shapes, data and times are those of bench_attention.py, medians of CUDA
graph replays, but not all contenders take turns: those in bf16 and fp8 do with each other, the
splits of one of vLLM's presets and page size do, and the page sizes of a store; a preset of ours is
timed alone. Attention goes through caches that the L2 cache never holds; a store writes two sets of
new tokens in turn, each to random slots of one cache. Ours have the exact tail and the center of
their preset, theirs have neither.

Outputs of one sequence and KV head are compared with float64 attention, theirs over the unquantised
keys and values ("cosine"), ours over the decoded ones and the exact tail ("cosine_of_decoded"): two
different checks of the kernels. With random data, where attention averages over many tokens,
neither is a measure of quality.

    python benchmarks/bench_vllm_kernels.py            all, into results/h200_vllm_kernels.json
    python benchmarks/bench_vllm_kernels.py --quick    one shape, printed only

It needs a CUDA device and vLLM: `pip install vllm`, whose version pins that of torch.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import common
import torch
from attention_batches import LARGE, LONG, LONG_BATCH, MANY_SHORT, SHORT, Case
from batches import Difference, Shape, exact_attention, heads_of
from bench_attention import STORED_TOKENS, Packed, Row
from contenders import STEPS, Plain
from timing import DEVICE, Call, Contest, number_of_caches, on_a_gpu
from torch import Tensor

import torch_turboquant as tt

SHAPES = (LARGE, LONG_BATCH, LONG, MANY_SHORT, SHORT)
STORED = (64, 4096, 65536)  # new tokens of a store
OURS = ("k8v4", "k5v4u", "k4v4u", "k4v4", "k3v3")
THEIRS = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
SPLITS = (32, 64, 128)
PAGES = (16, 64)


# ---- vLLM's kernels


@dataclass(frozen=True)
class Tables:
    """What vLLM's backend derives once per layer."""

    config: object
    rotation: Tensor  # [d, d], symmetric
    centroids: Tensor
    midpoints: Tensor

    @staticmethod
    def make(preset: str, d: int) -> Tables:
        from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
        from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
        from vllm.v1.attention.backends.turboquant_attn import _build_hadamard

        config = TurboQuantConfig.from_cache_dtype(preset, d)
        centroids = get_centroids(d, config.centroid_bits).to(DEVICE, torch.float32)
        ordered = centroids.sort().values
        midpoints = (ordered[:-1] + ordered[1:]) / 2
        return Tables(config, _build_hadamard(d, str(DEVICE)), centroids, midpoints)

    def allocate(self, pages: int, page_size: int, kv_heads: int) -> Tensor:
        """[pages, page_size, kv_heads, bytes], heads before tokens in memory."""
        shape = (pages, kv_heads, page_size, self.config.slot_size_aligned)
        return torch.zeros(shape, dtype=torch.uint8, device=DEVICE).transpose(1, 2)

    def store(self, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
        from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store

        triton_turboquant_store(
            k,
            v,
            cache,
            slots,
            self.rotation,
            self.midpoints,
            mse_bits=self.config.key_mse_bits,
            key_packed_size=self.config.key_packed_size,
            value_quant_bits=self.config.effective_value_quant_bits,
            key_fp8=self.config.key_fp8,
        )


class Theirs:
    """The caches of one shape in one of vLLM's TurboQuant presets, with one size of pages."""

    def __init__(self, preset: str, shape: Shape, page_size: int, k: Tensor, v: Tensor) -> None:
        """k, v: the STORED_TOKENS distinct tokens that pages repeat."""
        self.shape, self.tables = shape, Tables.make(preset, shape.head_dim)
        base = self.tables.allocate(STORED_TOKENS // page_size, page_size, shape.kv_heads)
        self.tables.store(k, v, base, torch.arange(STORED_TOKENS, device=DEVICE))
        self.q = shape.queries()
        self.lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=DEVICE)
        self.page_size, pages = page_size, shape.tokens // page_size
        self.sets = []
        """(cache, block_table, which page of the base each page repeats) of each cache."""
        size = base[0].numel() * pages
        for _ in range(number_of_caches(size)):
            origin = torch.randint(len(base), (pages,), device=DEVICE)
            cache = base.transpose(1, 2)[origin].transpose(1, 2)
            table = torch.randperm(pages, device=DEVICE).view(shape.batch, -1).int()
            self.sets.append((cache, table, origin))
        self.bytes_read = size

    def calls(self, splits: int) -> list[Call]:
        from vllm.v1.attention.ops.triton_turboquant_decode import (
            triton_turboquant_decode_attention,
        )

        s, config = self.shape, self.tables.config
        # vLLM takes these from a workspace that all layers share.
        parts = torch.empty(s.batch, s.q_heads, splits, s.head_dim + 1, device=DEVICE)
        out = torch.empty(s.batch, s.q_heads, s.head_dim, dtype=torch.bfloat16, device=DEVICE)
        lse = torch.empty(s.batch, s.q_heads, device=DEVICE)
        return [
            lambda cache=cache, table=table: triton_turboquant_decode_attention(
                query=self.q,
                kv_cache=cache,
                block_table=table,
                seq_lens=self.lengths,
                Pi=self.tables.rotation,
                centroids=self.tables.centroids,
                scale=1 / math.sqrt(s.head_dim),
                mse_bits=config.key_mse_bits,
                key_packed_size=config.key_packed_size,
                value_quant_bits=config.effective_value_quant_bits,
                key_fp8=config.key_fp8,
                norm_correction=config.norm_correction,
                PiT=self.tables.rotation,
                mid_o_buf=parts,
                output_buf=out,
                lse_buf=lse,
                max_num_kv_splits=splits,
            )
            for cache, table, _ in self.sets
        ]

    def tokens(self, sequence: int) -> Tensor:
        """Which of the distinct tokens each position of a sequence of the last cache repeats."""
        _, table, origin = self.sets[-1]
        offset = torch.arange(self.page_size, device=DEVICE)
        return (origin[table[sequence].long()][:, None] * self.page_size + offset).flatten()


# ---- the rows


def of_one_sequence(out: Tensor, q: Tensor, shape: Shape, k: Tensor, v: Tensor) -> float:
    """Cosine of the last sequence's outputs with attention over its unquantised keys and values.

    out, q: [batch, q_heads, d]. k, v: [context, kv_heads, d].
    """
    head = shape.kv_heads // 2
    exact = exact_attention(heads_of(q[-1:], shape, head), k[:, head], v[:, head])
    return round(Difference.of(heads_of(out[-1:], shape, head), exact).cosine, 5)


def milliseconds(contest: Contest, calls: dict[str, list[Call]]) -> dict[str, float]:
    """Of one call in a graph, by the contender's name."""
    return {name: round(ms, 5) for name, (ms, _) in contest.medians(calls).items()}


def fastest(ways: dict[str, float], default: str) -> Row:
    """What a row says of one of vLLM's presets: the time of its fastest way, and of vLLM's own."""
    best = min(ways, key=ways.__getitem__)
    times = {"ms": ways[best], "default_ms": ways[default], "ways_ms": ways}
    return {"kind": "vllm", "way": best, **times}


def attention_rows(shape: Shape, contest: Contest) -> Iterator[Row]:
    """Attention of a decode step: a row per contender."""
    plain = Plain(shape, (*STEPS, "fa3", "fa3 fp8"))
    contenders = plain.contenders()
    for name, reason in plain.absent.items():
        print(f"{shape}: {name} is absent: {reason}")
    own = {"call": "attention", "batch": shape.batch, "context": shape.context}
    for name, ms in milliseconds(contest, contenders).items():
        kind = "fp8" if "fp8" in name else "bf16"
        yield own | {"kind": kind, "name": name, "ms": ms, "absent": plain.absent}
    del plain, contenders
    free()

    k, v = (
        torch.randn(STORED_TOKENS, shape.kv_heads, shape.head_dim, device=DEVICE).bfloat16()
        for _ in range(2)
    )
    for preset in THEIRS:
        ways: dict[str, float] = {}
        cosines = []
        for page_size in PAGES:
            theirs = Theirs(preset, shape, page_size, k, v)
            calls = {f"pages {page_size}, splits {n}": theirs.calls(n) for n in SPLITS}
            ways |= milliseconds(contest, calls)
            tokens = theirs.tokens(shape.batch - 1)
            for some in calls.values():
                out = some[-1]()
                cosines.append(of_one_sequence(out, theirs.q, shape, k[tokens], v[tokens]))
            size = theirs.bytes_read
            del theirs, calls, some
            free()
        found = {"bytes_read": size, "cosine": min(cosines)}
        yield (
            own | {"name": preset} | fastest(ways, f"pages {PAGES[0]}, splits {SPLITS[0]}") | found
        )
    for preset in OURS:
        packed = Packed(Case(preset, shape, tail=True))
        (ms,) = milliseconds(contest, {preset: packed.calls()}).values()
        yield own | {
            "kind": "ours",
            "name": preset,
            "ms": ms,
            "bytes_read": packed.bytes_read,
            "cosine_of_decoded": round(packed.errors().cosine, 5),
        }
        del packed
        free()


KV_HEADS, HEAD_DIM = 8, 128  # of a store
HELD = 1 << 18  # tokens that its cache has room for


def store_rows(tokens: int, contest: Contest) -> Iterator[Row]:
    """New tokens written to random slots of a large cache: a row per contender."""
    new = [torch.randn(2, tokens, KV_HEADS, HEAD_DIM, device=DEVICE).bfloat16() for _ in range(2)]
    slots = [torch.randperm(HELD, device=DEVICE)[:tokens] for _ in range(2)]

    own = {"call": "store", "tokens": tokens}
    for preset in THEIRS:
        tables, calls = Tables.make(preset, HEAD_DIM), {}
        for page_size in PAGES:
            cache = tables.allocate(HELD // page_size, page_size, KV_HEADS)
            calls[f"pages {page_size}"] = [
                partial(tables.store, *kv, cache, s) for kv, s in zip(new, slots, strict=True)
            ]
        ways = milliseconds(contest, calls)
        yield own | {"name": preset} | fastest(ways, f"pages {PAGES[0]}")
        del cache, calls
        free()
    for preset in OURS:
        config = tt.preset(preset, HEAD_DIM)
        center = torch.randn(KV_HEADS, HEAD_DIM, device=DEVICE)
        tables = tt.make_tables(config, 0, DEVICE, center)
        cache = tt.allocate_cache(config, HELD // config.page_size, KV_HEADS, DEVICE)
        calls = [
            partial(tt.cache_store, *kv, cache, s, config, tables)
            for kv, s in zip(new, slots, strict=True)
        ]
        (ms,) = milliseconds(contest, {preset: calls}).values()
        yield own | {"kind": "ours", "name": preset, "ms": ms}
        del cache, calls
        free()


def free() -> None:
    """Gives memory back: contenders and their caches hold each other."""
    gc.collect()
    torch.cuda.empty_cache()


def title(row: Row) -> str:
    if row["call"] == "store":
        return f"store {row['tokens']} tokens"
    return f"attention {row['batch']} x {row['context']}"


def print_row(row: Row) -> None:
    text = f"{row['row']:52} {1000 * row['ms']:10.1f} us"
    if "way" in row:
        text += f" ({row['way']}; vLLM's default {1000 * row['default_ms']:.1f} us)"
    for name in ("cosine", "cosine_of_decoded"):
        if name in row:
            text += f" {name} {row[name]:.5f}"
    print(text, flush=True)


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--quick", action="store_true", help="one shape; prints only")
    options.add_argument("--seconds", type=float, default=0.1, help="of one contender's replays")
    arguments = options.parse_args()
    arguments.dry_run |= arguments.quick
    if not on_a_gpu(arguments):
        return
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        print(f"This benchmark needs vLLM (pip install vllm): {error}")
        return
    shared = {"torch": torch.__version__, "vllm": version("vllm")}
    print(f"{common.device_name(DEVICE)}, {', '.join(f'{k} {v}' for k, v in shared.items())}")
    torch.manual_seed(0)
    contest, rows = Contest(arguments.seconds), []
    with torch.no_grad():
        for shape in SHAPES[:1] if arguments.quick else SHAPES:
            rows += take(attention_rows(shape, contest), shared)
            if not arguments.dry_run:
                common.write_progress("h200_vllm_kernels", rows, "row", arguments)
        for tokens in STORED[:1] if arguments.quick else STORED:
            rows += take(store_rows(tokens, contest), shared)
    common.write_rows("h200_vllm_kernels", rows, arguments)


def take(found: Iterator[Row], shared: Row) -> list[Row]:
    """Completes and prints rows."""
    rows = []
    for row in found:
        rows.append({"row": f"{title(row)} {row['name']}"} | row | shared)
        print_row(rows[-1])
    free()
    return rows


if __name__ == "__main__":
    main()
