"""Times of decode steps in CUDA graphs, of a batch of long contexts.

Keys and values are random, written straight into the cache, since their values do not change the
times. Nor does it matter which tokens of a prompt have stayed: caches that differ in the policy
only are timed once, with one that looks at nothing. The uncompressed cache is read by the fastest
of PyTorch's kernels without a mask. Controls hold decoded vectors in 16 bits, so that their steps
would say nothing: they have no time.

The model computes in bfloat16, whatever its predictions were made in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, StaticCache
from transformers.cache_utils import Cache

from torch_turboquant.eval.caches import Choice
from torch_turboquant.eval.layers import store
from torch_turboquant.eviction import Eviction
from torch_turboquant.integrations.transformers import TurboQuantCache
from torch_turboquant.integrations.transformers.models import (
    head_dim_of,
    kv_heads_of,
    text_config,
    with_cache,
)

SEQUENCES, CONTEXT = 64, 8192
ROOM = 64  # tokens behind the context that static caches have room for
RUNS = 20
KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)


class StepTimes:
    """Times steps of one model.

    Args:
        model: a decoder that TurboQuantCache supports.
        sequences, context: of a step: sequences, and tokens that each of them has.
    """

    def __init__(self, model: Any, sequences: int = SEQUENCES, context: int = CONTEXT) -> None:
        self.model = copy.deepcopy(model).bfloat16()
        self.sequences, self.context = sequences, context
        self.known: dict[str, float] = {}

    def of(self, choice: Choice) -> float | None:
        """Milliseconds of a step through a cache; None: a control."""
        if choice.kind == "control":
            return None
        if choice.kind == "uncompressed":
            return self._uncompressed()
        changes = dict(choice.changes)
        if "keep" in changes:
            changes["evict"] = "streaming"
        name = f"{choice.name} {sorted(changes.items(), key=str)}"
        if name not in self.known:
            self.known[name] = self._packed(replace(choice, changes=changes))
        return self.known[name]

    def _packed(self, choice: Choice) -> float:
        stays = Eviction(keep=choice.changes.get("keep", 1)).count(self.context)
        options = {"static": True, "max_batch_size": self.sequences}
        room = min(self.context, max(stays, 2 * ROOM)) + ROOM
        with choice.make(self.model, max_cache_len=room, **options) as cache:
            return self._filled(cache)

    def _uncompressed(self) -> float:
        found = []
        for kernel in KERNELS:
            cache = StaticCache(config=self.model.config, max_cache_len=self.context + ROOM)
            try:
                with attending(self.model, kernel):
                    found.append(self._filled(cache))
            except RuntimeError as error:
                if isinstance(error, torch.cuda.OutOfMemoryError):
                    raise
                continue  # no kernel for this shape or device
        if not found:
            raise ValueError(
                "no kernel of PyTorch attends to this model's heads: leave out --steps"
            )
        return min(found)

    @torch.no_grad()
    def _filled(self, cache: Cache) -> float:
        """Fills a cache, and times steps behind that."""
        config = text_config(self.model)
        kv_heads = kv_heads_of(config)
        heads = config.num_attention_heads, kv_heads, kv_heads
        shape = self.sequences, self.context, head_dim_of(config)
        packed = isinstance(cache, TurboQuantCache)

        def noise(count: int) -> Tensor:
            x = torch.randn(*shape[:2], count, shape[2], device=self.model.device)
            return x.to(self.model.dtype).transpose(1, 2)

        layers = (
            (noise(heads[0]) if packed else None, noise(heads[1]), noise(heads[2]))
            for _ in range(config.num_hidden_layers)
        )
        store(cache, self.sequences, self.context, layers)
        ids = torch.full((self.sequences, 1), 7, device=self.model.device)
        return milliseconds(lambda: self.model(ids, **with_cache(self.model, cache)).logits)


@contextmanager
def attending(model: Any, kernel: SDPBackend) -> Iterator[None]:
    """Lets a model attend to everything that it is given, by one of PyTorch's kernels."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        batch, heads, new, d = query.shape
        query = query.reshape(batch, key.shape[1], -1, d)  # query heads of a KV head are neighbours
        with sdpa_kernel(kernel):
            out = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, scale=options.get("scaling")
            )
        return out.reshape(batch, new, heads, d), None

    name = f"unmasked_{KERNELS.index(kernel)}"  # names with "flash" mean more to transformers
    AttentionInterface.register(name, attend)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def milliseconds(step: Callable[[], Tensor]) -> float:
    """The time of a step on a GPU, in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(RUNS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / RUNS
