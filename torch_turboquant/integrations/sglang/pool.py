"""The memory of the pages, in place of SGLang's pool of keys and values.

A KVCache, but no MHATokenToKVPool: whoever copies keys and values by their slots (HiCache, fused
stores of single models, KV connectors) looks for that class or its buffers, and finds neither.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import KVCache
from torch import Tensor

from torch_turboquant.integrations.sglang.plan import Heads, Plan

SLIDING = "SWA"  # what SGLang calls the pool of layers with sliding windows


def pages_of(pool: KVCache) -> KVCache:
    """The pool of an engine's attention layers, which that of a hybrid model has inside; with
    two pools, that of the layers without sliding windows."""
    return getattr(pool, "full_kv_pool", pool)


class TurboQuantKVPool(KVCache):
    """Pages of the layers of this rank.

    SGLang keeps fewer tokens of layers with sliding windows where a model has others beside them:
    then it makes this pool twice, inside a SWAKVPool, whose slots are those of the other layers. A
    table of SGLang's translates them.

    Attributes:
        plan: Plan.
        layers: the numbers of the layers whose pages are here. A layer that reads the keys of
            another one has none, though SGLang counts it.
        pages: of each of these uint8 [pages, kv_heads, page_size, bytes of a token], of which
            engine.pages.page_parts makes records and exact first tokens. Page 0 is SGLang's, for
            padding.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
        v_head_dim: int | None = None,
        start_layer: int | None = None,
        end_layer: int | None = None,
        enable_alt_stream: bool = True,
        enable_kv_cache_copy: bool = False,
        post_capture_active: bool = False,
        quant_method: Any = None,
        swa_head_num: int | None = None,
        swa_head_dim: int | None = None,
        swa_v_head_dim: int | None = None,
        *,
        allocation_label: str | None = None,
        plan: Plan,
    ) -> None:
        """Allocates what KVCacheConfigurator._build_mha_kv_pool asks for, HybridLinearKVPool, or
        SWAKVPool, which names its two pools by their label. That of sliding layers gets the heads
        of both.

        Raises:
            ValueError: that is not what the plan was made from.
        """
        super().__init__(
            size,
            page_size,
            torch.uint8,
            layer_num,
            device,
            enable_memory_saver,
            start_layer,
            end_layer,
        )
        sliding = allocation_label == SLIDING
        self.layers = plan.sliding_layers if sliding else plan.full_layers
        heads = Heads(head_num, head_dim)
        if sliding:
            heads = Heads(swa_head_num or head_num, swa_head_dim or head_dim)
        asked = (page_size, *heads, layer_num, start_layer or 0)
        own = plan.heads(self.layers[0]) if sliding else Heads(plan.kv_heads, plan.head_dim)
        expected = (plan.page_size, *own, plan.asked(self.layers), 0)
        if asked != expected or post_capture_active or quant_method is not None:
            raise ValueError(
                "torch_turboquant: SGLang asks for a cache of page size, heads, channels, layers "
                f"and first layer {asked}, expected {expected}"
            )
        self.plan, (self.head_num, self.head_dim) = plan, heads
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.pages = [
                torch.zeros(
                    size // page_size + 1,
                    plan.heads(layer).number,
                    page_size,
                    plan.token_bytes(layer),
                    dtype=torch.uint8,
                    device=device,
                )
                for layer in self.layers
            ]
        self._finalize_allocation_log(size)

    def get_kv_size_bytes(self) -> int | tuple[int, int]:
        """Bytes of all pages; SGLang's pools of several kinds of layers add up two numbers."""
        total = sum(page.numel() for page in self.pages)
        return (total, 0) if self.plan.is_hybrid or self.plan.sliding_layers else total

    def memory_of(self, layer: int) -> Tensor:
        """The pages of a layer of the model."""
        return self.pages[self.layers.index(layer)]

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """Where accepted drafts go: drafts are chains, so that they are there.

        Raises:
            ValueError: on a CPU, they are not. On a GPU nothing waits to find out.
        """
        if self.pages[0].device.type == "cpu" and not torch.equal(tgt_loc, src_loc):
            raise ValueError("torch_turboquant: drafts that are no chain were accepted")

    def get_key_buffer(self, layer_id: int) -> Tensor:
        """Refused, as what would read keys without the backend."""
        raise NotImplementedError(
            "torch_turboquant: pages hold codes, and only the attention backend turboquant reads "
            "and writes them: leave out the option of SGLang that asks for keys and values"
        )

    def get_value_buffer(self, layer_id: int) -> Tensor:
        """Refused, see get_key_buffer."""
        return self.get_key_buffer(layer_id)

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Refused, see get_key_buffer."""
        return self.get_key_buffer(layer_id), self.get_key_buffer(layer_id)

    def set_kv_buffer(self, layer: Any, *_: Any, **__: Any) -> None:
        """Refused, see get_key_buffer."""
        self.get_key_buffer(layer.layer_id)
