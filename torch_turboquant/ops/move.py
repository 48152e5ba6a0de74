"""Tokens of the packed cache from slot to slot: what eviction while decoding compacts a cache with.

The bytes of a token are copied as they are, so that a moved token decodes to what it was. Each KV
head has its own list of slots, because heads keep different tokens.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant.config import CacheConfig
from torch_turboquant.format import own_bytes
from torch_turboquant.ops import _cache_checks as checks


def cache_move(cache: Tensor, sources: Tensor, targets: Tensor, config: CacheConfig) -> None:
    """Copies tokens to other slots of the cache: row, plane and scale of the key, and the value.

    All sources are read before a target is written, so that a slot may be both: a call may shift or
    swap tokens. A source that is no target keeps its token.

    What else belongs to a token does not move with it. The exact tail holds positions, not slots,
    and the caller who changes positions lays it out anew. A page that several sequences share
    changes for all of them: whoever must not do that names targets in pages of its own.

    Args:
        cache: uint8 [num_pages, kv_heads, record_bytes], pages contiguous and at any distance from
            each other; written.
        sources, targets: int32 or int64 [kv_heads, n], contiguous: page * page_size + offset of
            each token before and after. A pair with a -1 is left out. A KV head must not have the
            same target twice: on the CPU this is refused, on CUDA the slot then holds bytes of
            both tokens.
        config: of the cache.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride or device.
        RuntimeError: slots out of range or targets that repeat (checked on the CPU; on CUDA a pair
            with a slot out of range is left out); memory that is shared. Nothing has been written
            by then.
    """
    _check_move(cache, sources, targets, config)
    torch.ops.turboquant.cache_move.default(
        cache,
        sources,
        targets,
        config.head_dim,
        config.page_size,
        config.key_bits,
        config.value_bits,
    )


def _check_move(cache: Tensor, sources: Tensor, targets: Tensor, config: CacheConfig) -> None:
    _checks.check_dtype("cache", cache, (torch.uint8,))
    device = cache.device
    checks.check_pages(cache, device, config, None)
    count: int | None = None
    for name, slots in (("sources", sources), ("targets", targets)):
        _checks.check_dtype(name, slots, _checks.SLOTS)
        _checks.check_constant(name, slots, device, slots.dtype, (cache.shape[1], count))
        count = slots.shape[1]


# ---- fakes


@torch.library.register_fake("turboquant::cache_move")
def _cache_move_fake(*given: Any, **named: Any) -> None:
    a = checks.raw_arguments("cache_move", given, named)
    with _checks.of_fake():
        # grids have no meaning here
        config = checks.raw_config(
            SimpleNamespace(**vars(a), key_levels=None, value_levels=None), a.head_dim
        )
        _check_move(a.cache, a.sources, a.targets, config)


# ---- references: CPU tensors only


def cache_move_reference(
    cache: Tensor, sources: Tensor, targets: Tensor, config: CacheConfig
) -> None:
    """cache_move in numpy: the same bytes."""
    size = config.page_size
    own = [own_bytes(config.record, token) for token in range(size)]
    before, after = cache.clone().numpy(), cache.numpy()  # the latter shares memory
    for head, pairs in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
        for source, target in zip(*pairs, strict=True):
            if source >= 0 and target >= 0:
                moved = before[source // size, head, own[source % size]]
                after[target // size, head, own[target % size]] = moved
