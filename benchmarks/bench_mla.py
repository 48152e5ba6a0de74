"""Speed of latent attention over the packed cache on a GPU, against bf16 kernels of the same run.

A row is one batch, one number of query heads and one preset. "1 x 131072 beside 63 x 200" is a
batch of one sequence of 131,072 tokens and 63 of 200. Times are medians of CUDA graph replays,
divided by the number of calls in the graph; all contenders take turns. A graph cycles through
distinct caches of more than 256 MB in total, so that the L2 cache never holds the next one. Pages
are in random order, and their codes come from Gaussian latents by mla_store.

Before anything is timed, outputs of the last sequence's last token are compared with float64
attention: ours over its decoded latents, but for rows with an exact tail, which are compared with
nothing, and those of every contender over its own cache. Where a cosine of ours is not above
COSINE, no row is written, an older one stays, and the program ends with an error that names the
case. A contender with such a cosine does not count.

bf16, on an uncompressed cache of 512 + 64 channels: FlashInfer's paged MLA (fa3 backend), FlashMLA,
and vLLM's FlashAttention 3 with q_v, each where it can be imported; scaled_dot_product_attention
with absorbed matrices otherwise. The fastest of them counts, the row names what cannot run or is
wrong. "of read" compares with a sum over 4 GiB.

    python benchmarks/bench_mla.py                all, into results/h200_mla.json
    python benchmarks/bench_mla.py --quick        the first rows, printed only
    python benchmarks/bench_mla.py --only '^k4u'  rows that match, merged into the file
    python benchmarks/bench_mla.py --tiny         tiny sizes on any device: a try
    python benchmarks/bench_mla.py --table        the result file as Markdown
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import common
import torch
from batches import Difference, Part, Shape, exact_attention, running_sum, tables_of
from contenders import flashinfer, why_no_flashinfer
from timing import (
    DEVICE,
    Call,
    Contest,
    case_parser,
    measure_cases,
    number_of_caches,
    those_that_run,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import torch_turboquant as tt

LATENT, ROPE = 512, 64
PAGE = 64
SHORT = 200  # tokens of a short sequence beside long ones
STORED_TOKENS = 4096  # pages hold so many distinct tokens and are repeated in random order
COSINE = 0.9999
SCALE = 1 / math.sqrt(128 + ROPE)

Row = dict[str, object]


@dataclass(frozen=True)
class Case:
    preset: str
    heads: int
    batch: int
    context: int
    q_len: int = 1
    tail: bool = False
    short: int = 0
    """Sequences of SHORT tokens in front of the others."""

    @property
    def shape(self) -> Shape:
        width = LATENT + ROPE
        if self.short:
            parts = Part(self.short, SHORT), Part(self.batch, self.context)
            return Shape.of(parts, q_heads=self.heads, kv_heads=1, head_dim=width)
        return Shape(self.batch, self.context, self.heads, 1, width, self.q_len)

    @property
    def bf16_bytes(self) -> int:
        return 2 * self.shape.tokens * (LATENT + ROPE)

    def tiny(self) -> Case:
        return replace(self, batch=min(self.batch, 2), context=250, short=min(self.short, 2))

    def __str__(self) -> str:
        text = f"{self.preset} {self.heads} heads {self.batch} x {self.context}"
        text += f" q_len {self.q_len}" if self.q_len > 1 else ""
        text += f" beside {self.short} x {SHORT}" if self.short else ""
        return text + (" tail" if self.tail else "")


SIZES = ((64, 8192), (8, 32768), (1, 131072), (1, 8192))
LONG_AMONG_SHORT = ((1, 131072, 63), (2, 65536, 62), (1, 131072, 299))


def cases() -> Iterator[Case]:
    for heads in (16, 24, 32, 64, 128):
        for batch, context in SIZES:
            tables = ("k4", "k3") if heads in (16, 64, 128) else ()  # 17 to 64 heads take as long
            for preset in ("k4u", "k5u", "k8", *tables):
                yield Case(preset, heads, batch, context)
    for batch, context in SIZES:
        yield Case("k4u", 16, batch, context, tail=True)
        yield Case("k4u", 16, batch, context, q_len=2)
    for batch, context, short in LONG_AMONG_SHORT:
        for preset in ("k4u", "k4"):
            yield Case(preset, 16, batch, context, short=short)


ALL = tuple(cases())
QUICK = 3


class Packed:
    """The packed caches of one case."""

    def __init__(self, case: Case) -> None:
        self.case, s = case, case.shape
        self.config = tt.latent_preset(case.preset, LATENT, ROPE, page_size=PAGE)
        self.tables = tt.make_latent_tables(self.config, 0, DEVICE)
        shape = (s.new_tokens, s.q_heads)
        self.q = [
            torch.randn(*shape, d, dtype=torch.bfloat16, device=DEVICE) for d in (LATENT, ROPE)
        ]
        self.lengths, self.starts = s.lengths, s.starts.to(DEVICE)
        pages = s.pages_of_each(PAGE)
        stored = min(STORED_TOKENS // PAGE, sum(pages))
        base = tt.allocate_latent_cache(self.config, stored, DEVICE)
        slots = torch.arange(stored * PAGE, device=DEVICE)
        latent, rope = (
            torch.randn(len(slots), d, dtype=torch.bfloat16, device=DEVICE) for d in (LATENT, ROPE)
        )
        tt.mla_store(latent, rope, base, slots, self.config, self.tables)
        self.sets = []
        for _ in range(number_of_caches(sum(pages) * self.config.record_bytes)):
            cache = base[torch.randint(len(base), (sum(pages),), device=DEVICE)]
            self.sets.append((cache, tables_of(pages)[1], self.random_tail()))

    def random_tail(self) -> tt.Tail | None:
        if not self.case.tail:
            return None
        s = self.case.shape
        ring = tt.allocate_latent_tail(self.config, s.batch, torch.bfloat16, s.q_len, DEVICE)
        return tt.Tail(ring.normal_(), torch.randperm(s.batch, device=DEVICE))

    def calls(self) -> list[Call]:
        return [
            lambda cache=cache, table=table, tail=tail: tt.mla_attention(
                *self.q,
                cache,
                table,
                self.lengths,
                self.config,
                self.tables,
                softmax_scale=SCALE,
                cu_seqlens_q=self.starts if self.case.q_len > 1 else None,
                max_q_len=self.case.q_len,
                tail=tail,
            )
            for cache, table, tail in self.sets
        ]

    @property
    def bytes_read(self) -> int:
        s, config = self.case.shape, self.config
        exact = config.sink_tokens + config.recent_window if self.case.tail else 0
        codes = (s.tokens - s.batch * exact) * config.bytes_per_token
        return codes + s.batch * exact * 2 * (LATENT + ROPE)

    def errors(self) -> Difference:
        """How far the last sequence's last token is from exact attention, without a tail."""
        cache, table, _ = self.sets[-1]
        out = self.calls()[-1]()[0]
        latent, rope = tt.mla_load(
            cache,
            table[-1:],
            self.lengths[-1:],
            self.config,
            self.tables,
            self.case.context,
            torch.float32,
        )
        keys, q = torch.cat([latent[0], rope[0]], 1), torch.cat([x[-1] for x in self.q], 1)
        return difference(out[-1], q, keys)


def difference(out: Tensor, q: Tensor, keys: Tensor) -> Difference:
    """How far the outputs of one token, [heads, LATENT], are from exact attention.

    q: [heads, LATENT + ROPE]. keys: [context, LATENT + ROPE].
    """
    q = q.float() * (SCALE * math.sqrt(keys.shape[1]))
    return Difference.of(out[None], exact_attention(q[None], keys, keys[:, :LATENT]))


class Plain:
    """The same batch in bf16: [pages, 64, 576], and contenders over it."""

    def __init__(self, case: Case) -> None:
        self.case, s = case, case.shape
        self.q = torch.randn(
            s.new_tokens, s.q_heads, LATENT + ROPE, dtype=torch.bfloat16, device=DEVICE
        )
        pages = s.pages_of_each(PAGE)
        self.sets = []
        for _ in range(number_of_caches(case.bf16_bytes)):
            shape = (sum(pages), PAGE, LATENT + ROPE)
            cache = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
            self.sets.append((cache, *tables_of(pages)))
        self.pages, self.starts, self.lengths = pages, s.starts, s.lengths

    def flashinfer_mla(self) -> list[Call]:
        if flashinfer is None:
            raise RuntimeError(why_no_flashinfer)
        q_latent, q_rope = (x.contiguous() for x in self.q.split([LATENT, ROPE], 2))
        found = []
        for cache, order, _ in self.sets:
            work = torch.zeros(128 << 20, dtype=torch.uint8, device=DEVICE)
            wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(work, backend="fa3")
            wrapper.plan(
                self.starts.to(DEVICE),
                running_sum(self.pages).to(DEVICE),
                order,
                self.lengths,
                self.case.heads,
                LATENT,
                ROPE,
                PAGE,
                self.case.q_len > 1,
                SCALE,
                torch.bfloat16,
                torch.bfloat16,
            )
            latent, rope = (x.contiguous() for x in cache.split([LATENT, ROPE], 2))
            found.append(
                lambda wrapper=wrapper, latent=latent, rope=rope: wrapper.run(
                    q_latent, q_rope, latent, rope
                )
            )
        return found

    def flash_mla(self) -> list[Call]:
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata

        case = self.case
        q = self.q.unflatten(0, (case.shape.batch, case.q_len))
        metadata = get_mla_metadata(self.lengths, case.q_len * case.heads, 1)
        return [
            lambda cache=cache, table=table: flash_mla_with_kvcache(
                q,
                cache[:, :, None],
                table,
                self.lengths,
                LATENT,
                *metadata,
                softmax_scale=SCALE,
                causal=True,
            )[0]
            for cache, _, table in self.sets
        ]

    def vllm_fa3(self) -> list[Call]:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        q_latent, q_rope = (x.contiguous() for x in self.q.split([LATENT, ROPE], 2))
        starts = self.starts.to(DEVICE)
        return [
            lambda cache=cache, table=table: flash_attn_varlen_func(
                q=q_rope,
                k=cache[:, :, None, LATENT:],
                v=cache[:, :, None, :LATENT],
                q_v=q_latent,
                max_seqlen_q=self.case.q_len,
                cu_seqlens_q=starts,
                max_seqlen_k=self.case.context,
                seqused_k=self.lengths,
                block_table=table,
                softmax_scale=SCALE,
                causal=True,
                fa_version=3,
            )
            for cache, _, table in self.sets
        ]

    def sdpa(self) -> list[Call]:
        """Heads as queries of one head, on contiguous keys, a call for sequences of one length;
        queries of a step see everything."""
        parts = self.case.shape.parts
        queries = self.q.split([part.count * part.q_len for part in parts])
        found = []
        for cache, _, _ in self.sets:
            pages = cache.split([part.count * -(-part.context // PAGE) for part in parts])
            operands = [
                (
                    q.view(part.count, 1, part.q_len * self.case.heads, -1),
                    keys.view(part.count, 1, -1, LATENT + ROPE)[:, :, : part.context],
                )
                for part, q, keys in zip(parts, queries, pages, strict=True)
            ]
            found.append(
                lambda operands=operands: [
                    scaled_dot_product_attention(q, keys, keys[..., :LATENT], scale=SCALE)
                    for q, keys in operands
                ]
            )
        return found

    def checked(self, calls: list[Call], paged: bool = True) -> list[Call]:
        """Calls whose last output is right for the last sequence's last token.

        paged: whether they read pages in the order of the block table.
        """
        out, (cache, _, table) = calls[-1](), self.sets[-1]
        pages = table[-1, : self.pages[-1]].long()
        keys = cache[pages] if paged else cache[len(cache) - len(pages) :]
        rows = (out[-1] if isinstance(out, list) else out).reshape(-1, self.case.heads, LATENT)
        keys = keys.flatten(0, 1)[: self.case.context]
        cosine = difference(rows[-1], self.q[-1], keys).cosine
        if not cosine > COSINE:
            raise RuntimeError(f"its result has a cosine of {cosine:.5f} with exact attention")
        return calls

    def contenders(self) -> tuple[dict[str, list[Call]], dict[str, str]]:
        """Those that run and are right, and why the others are not among them."""
        kinds: dict[str, Callable[[], list[Call]]] = {
            "flashinfer": lambda: self.checked(self.flashinfer_mla()),
            "flashmla": lambda: self.checked(self.flash_mla()),
            "vllm_fa3": lambda: self.checked(self.vllm_fa3()),
        }
        found, missing = those_that_run(kinds)
        if not found:
            found["sdpa"] = self.checked(self.sdpa(), paged=False)
        return found, missing


def measure(case: Case, seconds: float, read: float) -> Row | None:
    packed = Packed(case)
    errors = None if case.tail else packed.errors()
    if errors is not None and not errors.cosine > COSINE:
        print(f"{case}: wrong results, cosine {errors.cosine}")
        return None
    plain = Plain(case)
    others, missing = plain.contenders()
    ours = {"ours": packed.calls()}
    times = Contest(seconds).medians({**ours, **others})
    ms = times["ours"][0]
    best = min(others, key=lambda name: times[name][0])
    row: Row = {
        "case": str(case),
        "preset": case.preset,
        "heads": case.heads,
        "batch": case.batch,
        "context": case.context,
        "q_len": case.q_len,
        "tail": case.tail,
        "short": case.short,
        "ms": round(ms, 5),
        "eager_ms": round(times["ours"][1], 5),
        "tb_s": round(packed.bytes_read / ms * 1e-9, 3),
        "of_read": round(packed.bytes_read / ms * 1e-9 / read, 3),
        "best_bf16": best,
        "best_bf16_ms": round(times[best][0], 5),
        "speedup": round(times[best][0] / ms, 3),
        "bf16_ms": {name: round(times[name][0], 5) for name in others},
        "missing": missing,
    }
    if errors is not None:
        row |= {"cosine": round(errors.cosine, 8), "relative": round(errors.relative, 6)}
    print(
        f"{case}: {1e3 * ms:.1f} us, {row['of_read']:.0%} of read, {row['speedup']:.2f}x {best}"
        f" ({1e3 * times[best][0]:.1f} us)"
    )
    return row


def table() -> str:
    body = [
        [
            row["case"],
            f"{1e3 * row['ms']:.1f}",
            f"{row['of_read']:.0%}",
            f"{1e3 * row['best_bf16_ms']:.1f} ({row['best_bf16']})",
            f"{row['speedup']:.2f}x",
        ]
        for row in common.read_rows("h200_mla")
    ]
    return common.markdown(["case", "us", "of read", "best bf16, us", "speed-up"], body)


def main() -> None:
    options = case_parser(str(__doc__), seconds=0.15)
    options.add_argument("--quick", action="store_true")
    arguments = options.parse_args()
    if arguments.table:
        print(table())
        return
    chosen = [case for case in ALL if not arguments.only or re.search(arguments.only, str(case))]
    if arguments.quick:
        chosen = chosen[:QUICK]
    if arguments.tiny:
        chosen = [case.tiny() for case in chosen]
    kept = not (arguments.quick or arguments.tiny)
    measure_cases("h200_mla", chosen, measure, arguments, ALL if kept else None)


if __name__ == "__main__":
    main()
