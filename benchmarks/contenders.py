"""The bf16 and fp8 attention kernels of others, over the batches of batches.py.

bench_attention.py and bench_vllm_kernels.py time their own kernels beside these.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from types import ModuleType
from typing import NamedTuple

import torch
from batches import (
    STEP_QUERIES,
    Difference,
    Shape,
    exact_attention,
    heads_of,
    integers,
    running_sum,
    tables_of,
)
from timing import DEVICE, Call, number_of_caches, reason_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

flashinfer: ModuleType | None
why_no_flashinfer = ""
try:
    import flashinfer
except ImportError as error:
    flashinfer, why_no_flashinfer = None, f"cannot be imported: {error}"

BASELINE_PAGE = 16
FLASHINFER_DIMS = (64, 128, 256)
FIVE = ("cudnn", "cudnn folded", "flash", "flash folded", "flashinfer")
STEPS = (*FIVE, "fp8")
MIXED = ("in parts", "flash varlen", "flashinfer", "fa3")
PROMPTS = ("cudnn", "flash", "flashinfer", "flashinfer fa3", "fa3")
COLD = (*FIVE, "flashinfer fa3", "fa3")


def vllm_version() -> str | None:
    """Of the package whose FlashAttention 3 is a contender; None: it is not installed."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


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
                self.absent[name] = reason_of(error, 200)
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
