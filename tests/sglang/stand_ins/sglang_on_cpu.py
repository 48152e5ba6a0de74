"""A plug-in that lets SGLang's scheduler run on a CPU: its allocator of pages is Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def never(backend: str) -> bool:
        return False

    allocator = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
    for target, instead in (
        ("sglang.srt.mem_cache.allocation.support_triton", never),
        ("sglang.srt.model_executor.forward_batch_info.support_triton", never),
        (f"{allocator}.alloc_extend", alloc_extend),
        (f"{allocator}.alloc_decode", alloc_decode),
    ):
        HookRegistry.register(target, instead, HookType.REPLACE)


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
