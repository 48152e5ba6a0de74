"""Batches of attention, the bf16 and fp8 kernels of others that attend over them, and the contest.

bench_attention.py and bench_vllm_kernels.py time their own kernels beside these.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import (
    cosine_similarity,
    linear,
    rms_norm,
    scaled_dot_product_attention,
    silu,
)

flashinfer: ModuleType | None
why_no_flashinfer = ""
try:
    import flashinfer
except ImportError as error:
    flashinfer, why_no_flashinfer = None, f"cannot be imported: {error}"

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROTATED_BYTES = 256 << 20
BASELINE_PAGE = 16
FLASHINFER_DIMS = (64, 128, 256)
STEP_QUERIES = 16
"""More queries of a sequence are a prompt, or a part of one."""

Call = Callable[[], object]


# ---- what is measured


class Part(NamedTuple):
    """Sequences of a batch that are alike."""

    count: int
    context: int
    """Tokens of each, those of the call included."""
    q_len: int = 1

    def __str__(self) -> str:
        return f"{self.count} x {self.context}" + (f" q_len {self.q_len}" if self.q_len > 1 else "")


@dataclass(frozen=True)
class Shape:
    batch: int
    context: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    q_len: int = 1
    mixed: tuple[Part, ...] = ()
    """The sequences, in order, where they differ: batch is then their number, context and q_len are
    the largest."""
    label: str = ""
    """What a row calls sequences that differ; without it, it lists them."""

    @staticmethod
    def of(parts: Iterable[Part], label: str = "", q_heads: int = 32, kv_heads: int = 8) -> Shape:
        """A batch of sequences that differ."""
        mixed = tuple(parts)
        return Shape(
            sum(part.count for part in mixed),
            max(part.context for part in mixed),
            q_heads,
            kv_heads,
            q_len=max(part.q_len for part in mixed),
            mixed=mixed,
            label=label,
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.mixed or (Part(self.batch, self.context, self.q_len),)

    @property
    def sequences(self) -> list[Part]:
        """Every sequence by itself."""
        return [part._replace(count=1) for part in self.parts for _ in range(part.count)]

    @property
    def tokens(self) -> int:
        return sum(part.count * part.context for part in self.parts)

    @property
    def new_tokens(self) -> int:
        return sum(part.count * part.q_len for part in self.parts)

    @property
    def bf16_bytes(self) -> int:
        """Bytes of the whole cache in bf16."""
        return 4 * self.tokens * self.kv_heads * self.head_dim

    @property
    def prefill(self) -> bool:
        """Whether every sequence reads a prompt."""
        return all(part.q_len > STEP_QUERIES for part in self.parts)

    @property
    def lengths(self) -> Tensor:
        """int32 [batch], on the device."""
        return integers(sequence.context for sequence in self.sequences).to(DEVICE)

    @property
    def starts(self) -> Tensor:
        """int32 [batch + 1], on the host: where each sequence's queries start."""
        return running_sum(sequence.q_len for sequence in self.sequences)

    def pages_of_each(self, page_size: int) -> list[int]:
        return [-(-sequence.context // page_size) for sequence in self.sequences]

    def queries(self) -> Tensor:
        shape = (self.new_tokens, self.q_heads, self.head_dim)
        return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)

    def samples(self) -> list[tuple[int, Part, list[int]]]:
        """What a check looks at: (number of a sequence, the sequence, some of its queries).

        The first and last sequence of every part, or the last, shortest and longest of many parts;
        all queries of a step, 16 of a prompt.
        """
        ends = list(accumulate(part.count for part in self.parts))
        firsts = [end - part.count for end, part in zip(ends, self.parts, strict=True)]
        chosen = {*firsts, *(end - 1 for end in ends)}
        sequences = self.sequences
        if len(self.parts) > 4:
            by_length = sorted(range(self.batch), key=lambda i: sequences[i].context)
            chosen = {self.batch - 1, by_length[0], by_length[-1]}
        found = []
        for number in sorted(chosen):
            q_len = sequences[number].q_len
            queries = range(q_len)
            if q_len > STEP_QUERIES:
                queries = sorted({*range(4), *range(0, q_len, -(-q_len // 8)), *queries[-4:]})
            found.append((number, sequences[number], list(queries)))
        return found

    def tiny(self) -> Shape:
        """Few and short sequences of the same kinds."""

        def short(part: Part) -> Part:
            q_len = min(part.q_len, STEP_QUERIES + 4)
            older = min(part.context - part.q_len, 90 + part.context % 70)
            return Part(min(part.count, 2), older + q_len, q_len)

        parts = [short(part) for part in self.parts[:3]]
        if self.mixed:
            return Shape.of(parts, self.label, self.q_heads, self.kv_heads)
        batch, context, q_len = parts[0]
        return replace(self, batch=batch, context=context, q_len=q_len)

    def __str__(self) -> str:
        heads = f"heads {self.q_heads}/{self.kv_heads} d {self.head_dim}"
        if self.mixed and not self.label:
            return f"{' + '.join(map(str, self.mixed))} {heads}"
        text = f"{self.label or f'{self.batch} x {self.context}'} {heads}"
        return text + (f" q_len {self.q_len}" if self.q_len > 1 else "")


def integers(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def running_sum(values: Iterable[int]) -> Tensor:
    """int32, from 0 to the sum of all."""
    return integers(accumulate(values, initial=0))


def tables_of(pages: list[int]) -> tuple[Tensor, Tensor]:
    """Pages in random order: the ids of each sequence in turn, and as a padded block table."""
    order = torch.randperm(sum(pages), device=DEVICE).int()
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=DEVICE)
    for row, ids in zip(table, order.split(pages), strict=True):
        row[: len(ids)] = ids
    return order, table


# ---- exact results


def heads_of(x: Tensor, shape: Shape, kv_head: int) -> Tensor:
    """The query heads of one KV head: [q_len, group, d] of [q_len, q_heads, d]."""
    return x.unflatten(1, (shape.kv_heads, -1))[:, kv_head]


def exact_attention(q: Tensor, k: Tensor, v: Tensor, last: Tensor | None = None) -> Tensor:
    """Attention in float64, [q_len, group, d]: of q [q_len, group, d], k and v [context, d].

    last: the last key that each query sees; None: all.
    """
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.T / math.sqrt(k.shape[1])
    if last is not None:
        hidden = torch.arange(len(k), device=k.device) > last[:, None, None]
        scores.masked_fill_(hidden, -torch.inf)
    return scores.softmax(-1) @ v


class Difference(NamedTuple):
    """How far rows are from exact ones."""

    max_error: float
    cosine: float
    """The least of all rows."""
    relative: float
    """The largest distance of a row, in units of the length of the exact row."""

    @staticmethod
    def of(found: Tensor, exact: Tensor) -> Difference:
        found = found.double()
        cosine = cosine_similarity(found, exact, dim=-1).min()
        relative = ((found - exact).norm(dim=-1) / exact.norm(dim=-1)).max()
        return Difference((found - exact).abs().max().item(), cosine.item(), relative.item())

    @staticmethod
    def worst(of: Iterable[Difference]) -> Difference:
        errors, cosines, relatives = zip(*of, strict=True)
        return Difference(max(errors), min(cosines), max(relatives))


# ---- timing


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
        for turn in range(max(turns.values(), default=0)):
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


def number_of_caches(size: int) -> int:
    return max(1, math.ceil(ROTATED_BYTES / size))


def bandwidth(contest: Contest, elements: int = 1 << 30) -> tuple[float, float]:
    """TB/s of a sum over 4 GiB, and of a copy of 2 GiB (bytes read and bytes written)."""
    source = torch.randn(elements, device=DEVICE)
    half = source.numel() // 2
    calls = {"read": [source.sum], "copy": [lambda: source[half:].copy_(source[:half])]}
    times = contest.medians(calls)  # a copy inside a graph is slower than outside
    return tuple(source.nbytes / min(times[name]) / 1e9 for name in ("read", "copy"))


# ---- the others

FIVE = ("cudnn", "cudnn folded", "flash", "flash folded", "flashinfer")
STEPS = (*FIVE, "fp8")
MIXED = ("in parts", "flash varlen", "flashinfer", "fa3")
PROMPTS = ("cudnn", "flash", "flashinfer", "flashinfer fa3", "fa3")
COLD = (*FIVE, "flashinfer fa3", "fa3")


class Contender(NamedTuple):
    calls: list[Call]
    layout: str
    """How it reads a cache: "heads" [batch, kv_heads, context, d] of each part, "tokens"
    [tokens, kv_heads, d], or "pages"."""
    causal: bool
    """Whether a query sees nothing behind it. Prompts are always masked so."""
    dtype: torch.dtype = torch.bfloat16
    cosine: float = 0.9999
    """The least cosine with exact attention over the same keys and values in dtype."""


class Plain:
    """Unpacked keys and values of a shape, and whatever attends over them.

    names: the contenders to try. without: those among them that are left out.
    """

    def __init__(
        self, shape: Shape, names: Iterable[str] = STEPS, without: re.Pattern[str] | None = None
    ) -> None:
        self.shape, self.q = shape, shape.queries()
        self.names, self.without = tuple(names), without
        self.absent: dict[str, str] = {}
        """Why a contender cannot run, by name."""
        self.pages = shape.pages_of_each(BASELINE_PAGE)

    @cached_property
    def caches(self) -> list[Tensor]:
        """Random keys and values, [2, elements]; elements fill the pages of every sequence."""
        size = (2, sum(self.pages) * BASELINE_PAGE * self.shape.kv_heads * self.shape.head_dim)
        return [
            torch.randn(size, dtype=torch.bfloat16, device=DEVICE)
            for _ in range(number_of_caches(self.shape.bf16_bytes // 2))  # fp8 is half of it
        ]

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        return tables_of(self.pages)

    def contenders(self) -> dict[str, list[Call]]:
        """The contenders that run and give right results."""
        cudnn, flash = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
        fp8 = torch.float8_e4m3fn
        if self.shape.prefill:
            makers = {"cudnn": self.cudnn_causal, "flash": self.in_parts}
        else:
            makers = {
                "cudnn": lambda: self.sdpa(cudnn, False),
                "cudnn folded": lambda: self.sdpa(cudnn, True),
                "flash": lambda: self.sdpa(flash, False),
                "flash folded": lambda: self.sdpa(flash, True),
            }
        makers |= {
            "in parts": self.in_parts,
            "flash varlen": self.flash_varlen,
            "flashinfer": lambda: self.flashinfer(torch.bfloat16),
            "flashinfer fa3": lambda: self.flashinfer(torch.bfloat16, "fa3"),
            "fp8": lambda: self.flashinfer(fp8),
            "fa3": lambda: self.fa3(torch.bfloat16),
            "fa3 fp8": lambda: self.fa3(fp8),
        }
        found = {}
        for name in self.names:
            try:
                if self.without and self.without.search(name):
                    raise RuntimeError("left out by --without")
                contender = makers[name]()
                self.check(contender)
                found[name] = contender.calls
            except Exception as error:  # whatever it is, the row names it
                self.absent[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return found

    # -- how a cache is read

    def by_heads(self, cache: Tensor) -> list[Tensor]:
        """[2, count, kv_heads, context, d] of each part."""
        s, found, start = self.shape, [], 0
        for count, context, _ in s.parts:
            end = start + count * context * s.kv_heads * s.head_dim
            found.append(cache[:, start:end].view(2, count, s.kv_heads, context, s.head_dim))
            start = end
        return found

    def by_tokens(self, cache: Tensor) -> Tensor:
        """[2, tokens, kv_heads, d]"""
        s = self.shape
        rows = cache.view(2, -1, s.kv_heads, s.head_dim)
        return rows[:, : s.tokens]

    def by_pages(self, cache: Tensor) -> Tensor:
        """[2, pages, BASELINE_PAGE, kv_heads, d]"""
        return cache.view(2, -1, BASELINE_PAGE, self.shape.kv_heads, self.shape.head_dim)

    def keys_and_values(self, layout: str, number: int, head: int) -> Tensor:
        """[2, context, d] of one sequence and KV head of the first cache."""
        cache, context = self.caches[0], self.shape.sequences[number].context
        if layout == "pages":
            pages = self.tables[1][number, : self.pages[number]].long()
            return self.by_pages(cache)[:, pages, :, head].flatten(1, 2)[:, :context]
        if layout == "tokens":
            start = sum(sequence.context for sequence in self.shape.sequences[:number])
            return self.by_tokens(cache)[:, start : start + context, head]
        for part in self.by_heads(cache):
            if number < part.shape[1]:
                return part[:, number, head]
            number -= part.shape[1]
        raise IndexError(number)

    def check(self, contender: Contender) -> None:
        """Compares results of the first cache with exact ones."""
        s, head, dtype = self.shape, self.shape.kv_heads // 2, contender.dtype
        out = contender.calls[0]()
        if contender.layout == "heads":  # one output per part: [count, heads, queries, d]
            parts = [
                x.reshape(part.count, s.q_heads, part.q_len, s.head_dim)
                .transpose(1, 2)
                .flatten(0, 1)
                for x, part in zip(out, s.parts, strict=True)
            ]
            out = torch.cat(parts)
        out, starts, found = out.view(self.q.shape), s.starts.tolist(), []
        for number, sequence, queries in s.samples():
            k, v = self.keys_and_values(contender.layout, number, head).to(dtype)
            rows = starts[number] + torch.tensor(queries, device=DEVICE)
            last = rows - starts[number] + sequence.context - sequence.q_len
            masked = contender.causal or sequence.q_len > STEP_QUERIES
            q, out_rows = (heads_of(x[rows], s, head) for x in (self.q, out))
            exact = exact_attention(q, k, v, last if masked else None)
            found.append(Difference.of(out_rows, exact))
        cosine = Difference.worst(found).cosine
        if not cosine > contender.cosine:
            raise RuntimeError(f"its result has a cosine of {cosine:.5f} with exact attention")

    # -- attention of torch

    def queries_by_part(self) -> list[Tensor]:
        """[count, q_heads, q_len, d] of each part."""
        s = self.shape
        parts = self.q.split([part.count * part.q_len for part in s.parts])
        return [
            q.view(part.count, part.q_len, s.q_heads, s.head_dim).transpose(1, 2)
            for q, part in zip(parts, s.parts, strict=True)
        ]

    def of_parts(self, attend: list[Callable[[Tensor, Tensor], Tensor]]) -> list[Call]:
        """A call that attends over the keys and values of each part in turn."""

        def call(parts: list[Tensor]) -> list[Tensor]:
            return [f(k, v) for f, (k, v) in zip(attend, parts, strict=True)]

        return [partial(call, self.by_heads(cache)) for cache in self.caches]

    def step(
        self, q: Tensor, backend: SDPBackend, folded: bool
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """SDPA of a decode step; without a causal mask among the queries of a sequence."""
        if folded:
            q = q.reshape(len(q), self.shape.kv_heads, -1, self.shape.head_dim)
        else:
            q = q.contiguous()

        def attend(k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, enable_gqa=not folded)

        return attend

    def sdpa(self, backend: SDPBackend, folded: bool) -> Contender:
        if self.shape.mixed:
            raise RuntimeError("it takes sequences of one length")
        (q,) = self.queries_by_part()
        return Contender(self.of_parts([self.step(q, backend, folded)]), "heads", False)

    def cudnn_causal(self) -> Contender:
        """cuDNN's mask shows the first query the first key only."""
        if any(part.context != part.q_len for part in self.shape.parts):
            raise RuntimeError("its causal mask begins with the first key")

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        attends = [partial(attend, q) for q in self.queries_by_part()]
        return Contender(self.of_parts(attends), "heads", True)

    def in_parts(self) -> Contender:
        """Sequences that are alike together, one launch after the other.

        Decode steps take cuDNN with folded heads, prompts flash attention, whose last query sees
        the last key.
        """
        if len(self.shape.parts) > 4:
            raise RuntimeError("every sequence has a length of its own")
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        attends = []
        for q, part in zip(self.queries_by_part(), self.shape.parts, strict=True):
            if part.q_len > STEP_QUERIES:
                attends.append(lambda k, v, q=q: flash(q, k, v, 0.0, True)[0])
            else:
                attends.append(self.step(q, SDPBackend.CUDNN_ATTENTION, True))
        return Contender(self.of_parts(attends), "heads", False)

    def flash_varlen(self) -> Contender:
        """Flash attention 2 as torch has it, on sequences of any length."""
        s = self.shape
        starts = s.starts.to(DEVICE), running_sum(x.context for x in s.sequences).to(DEVICE)
        fixed = (*starts, s.q_len, s.context, 0.0, True, False)

        def call(k: Tensor, v: Tensor) -> Tensor:
            return torch.ops.aten._flash_attention_forward(self.q, k, v, *fixed)[0]

        calls = [partial(call, *self.by_tokens(cache)) for cache in self.caches]
        return Contender(calls, "tokens", True)

    # -- attention of others

    def flashinfer(self, dtype: torch.dtype, backend: str = "fa2") -> Contender:
        if flashinfer is None:
            raise RuntimeError(why_no_flashinfer)
        s = self.shape
        if s.head_dim not in FLASHINFER_DIMS:  # others take the device down with them
            raise RuntimeError(f"head_dim {s.head_dim} is none of {FLASHINFER_DIMS}")
        pages = running_sum(self.pages)
        last = integers((x.context - 1) % BASELINE_PAGE + 1 for x in s.sequences)
        paged = pages, self.tables[0], last, s.q_heads, s.kv_heads, s.head_dim, BASELINE_PAGE
        types = {"q_data_type": torch.bfloat16, "kv_data_type": dtype}
        workspace = torch.zeros(512 << 20, dtype=torch.uint8, device=DEVICE)
        if s.q_len == 1 and backend == "fa2":
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=True, backend=backend
            )
            wrapper.plan(*paged, **types)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace, "NHD", backend=backend
            )
            wrapper.plan(s.starts, *paged, causal=True, **types)

        def call(k: Tensor, v: Tensor) -> Tensor:
            return wrapper.run(self.q, (k, v))

        calls = [partial(call, *self.by_pages(cache).to(dtype)) for cache in self.caches]
        return Contender(calls, "pages", True, dtype)

    def fa3(self, dtype: torch.dtype) -> Contender:
        """FlashAttention 3 of vLLM or of its own package.

        It reads pages of 16 tokens, or whole prompts without pages, which it does faster.
        """
        s = self.shape
        lengths, starts = s.lengths, s.starts.to(DEVICE)
        common = {"softmax_scale": 1 / math.sqrt(s.head_dim), "causal": True}
        if dtype != torch.bfloat16:
            one = torch.ones(s.batch, s.kv_heads, device=DEVICE)
            common |= {"q_descale": one, "k_descale": one, "v_descale": one}
        try:
            from vllm.vllm_flash_attn import flash_attn_varlen_func as attend

            own = None
            common |= {"fa_version": 3, "out": torch.empty_like(self.q)}
        except ImportError:
            import flash_attn_interface as own

            attend = own.flash_attn_varlen_func
        of_queries = {"cu_seqlens_q": starts, "max_seqlen_q": s.q_len}
        if s.prefill:
            ends = running_sum(x.context for x in s.sequences).to(DEVICE)
            more = {"cu_seqlens_k": ends, "max_seqlen_k": s.context}
        elif own is None:
            more = {
                "max_seqlen_k": s.context,
                "seqused_k": lengths,
                "block_table": self.tables[1],
            }
        else:
            attend = own.flash_attn_with_kvcache
            more = {"cache_seqlens": lengths, "page_table": self.tables[1]}
        q, layout = self.q.to(dtype), "tokens" if s.prefill else "pages"
        read = self.by_tokens if s.prefill else self.by_pages

        def call(k: Tensor, v: Tensor) -> Tensor:
            out = attend(q, k, v, **of_queries, **more, **common)
            return out[0] if isinstance(out, tuple) else out

        calls = [partial(call, *read(cache).to(dtype)) for cache in self.caches]
        least = 0.9999 if dtype == torch.bfloat16 else 0.99  # of fp8 queries and probabilities
        return Contender(calls, layout, True, dtype, least)


def read_speed() -> float:
    """TB/s of a sum over 4 GiB."""
    if DEVICE.type == "cpu":
        return 1.0
    x = torch.zeros(1 << 30, dtype=torch.float32, device=DEVICE)
    (ms, _), *_ = Contest(0.5).medians({"sum": [x.sum]}).values()
    return 4 * len(x) / ms * 1e-9


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
            text = str(error).splitlines() or [""]
            missing[name] = f"{type(error).__name__}: {text[0][:120]}"
    return found, missing
