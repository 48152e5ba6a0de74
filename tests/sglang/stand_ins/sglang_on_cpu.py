"""A plug-in that lets SGLang's scheduler run on a CPU: its allocator of pages is Triton, and models
that draft have no backend there without sgl_kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def never(backend: str) -> bool:
        return False

    norm = "sglang.kernels.ops.attention.fla.fused_norm_gate.FusedRMSNormGated"
    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
    allocator = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
    for target, instead in (
        ("sglang.srt.mem_cache.allocation.support_triton", never),
        ("sglang.srt.model_executor.forward_batch_info.support_triton", never),
        ("sglang.srt.mem_cache.allocation.get_last_loc_triton", last_slots),
        (f"{allocator}.alloc_extend", alloc_extend),
        (f"{allocator}.alloc_decode", alloc_decode),
        (f"{norm}.forward", gated_norm),
        ("sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add", add_gated),
        (f"{factory}.create_decode_backend", draft_steps),
        (f"{factory}.create_draft_extend_backend", draft_extends),
    ):
        HookRegistry.register(target, instead, HookType.REPLACE)


def last_slots(table: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """The slot of each request's last token; -1: it has none."""
    return torch.where(lengths > 0, table[rows, lengths - 1], -1)


def alloc_extend(
    self: Any,
    prefix_lens: Tensor,
    prefix_lens_cpu: Tensor,
    seq_lens: Tensor,
    seq_lens_cpu: Tensor,
    last_loc: Tensor,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
) -> Tensor | None:
    """Slots of new tokens, by the function that SGLang tests its kernel against."""
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    size = self.page_size
    pages = (seq_lens_cpu + size - 1) // size - (prefix_lens_cpu + size - 1) // size
    needed = int(pages.sum())
    if self.need_sort and needed > len(self.free_pages):
        self.merge_and_sort_free()
    if needed > len(self.free_pages):
        return None
    slots = torch.empty(extend_num_tokens, dtype=torch.int64)
    alloc_extend_naive(prefix_lens, seq_lens, last_loc, self.free_pages, slots, size, self.device)
    self.free_pages = self.free_pages[needed:]
    return slots


def alloc_decode(
    self: Any, seq_lens: Tensor, seq_lens_cpu: Tensor, last_loc: Tensor
) -> Tensor | None:
    new = len(seq_lens)
    return alloc_extend(self, seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc, new)


def gated_norm(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    """The norm behind linear attention, times its gate."""
    assert self.activation == "silu"
    normed = torch.nn.functional.rms_norm(x.float(), self.weight.shape, eps=self.eps)
    return (normed * self.weight * torch.nn.functional.silu(gate.float())).to(x.dtype)


def add_gated(x: Tensor, weight: Tensor, shared: Tensor, out: Tensor) -> None:
    """Adds what an expert gives that all tokens share, times its gate."""
    out += (x @ weight).sigmoid()[:, None] * shared


def draft_steps(self: Any) -> Any:
    """The backends of a draft's steps: SGLang's torch_native, in which lengths grow."""
    return DraftSteps(self.draft_model_runner, self.speculative_num_steps)


def draft_extends(self: Any) -> Any:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend(self.draft_model_runner)


class DraftSteps:
    def __init__(self, runner: Any, steps: int) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        class OneStep(TorchNativeAttnBackend):
            new = 0

            def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, **more: Any):
                lengths, batch.seq_lens = batch.seq_lens, batch.seq_lens + self.new
                try:
                    return super().forward_decode(q, k, v, layer, batch, **more)
                finally:
                    batch.seq_lens = lengths

        self.attn_backends = [OneStep(runner) for _ in range(steps - 1)]
        for i, backend in enumerate(self.attn_backends):
            backend.new = i + 1

    def init_forward_metadata(self, batch: Any) -> None:
        pass
