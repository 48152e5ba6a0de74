"""Bytes of a token where vLLM cuts the pages of unlike layers from one pool.

Layers that are alike but for their bytes each get pages of their own size. Where layers with
sliding windows are beside others, all pages of the model have the bytes of the largest one: a page
of a smaller layer has several times the tokens where these fill it, and else is padded, or refused
before vLLM 0.28. In bfloat16 sizes are multiples of each other, as those of Gemma 4. With scales
and exact first tokens they are nearly so, and half of a page would be lost. Hence some layers get
more bytes for a token, as few in all as fill every page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple


class Need(NamedTuple):
    """What a layer's tokens take."""

    kind: Hashable
    """Layers of one kind are given pages that differ in size."""
    heads: int
    """KV heads."""
    content: int
    """Bytes of a token and KV head."""


def share(needs: Mapping[str, Need]) -> dict[str, int]:
    """The bytes of a token and KV head that layers get, `Need.content` or more.

    needs: of the layers of one engine, by the names of the layers.
    """
    counts = Counter(needs.values())
    unlike = len({need.kind for need in counts}) > 1
    if not unlike or len({need.heads * need.content for need in counts}) == 1:
        return {name: need.content for name, need in needs.items()}
    sizes = Counter((need.heads, need.content) for need in needs.values())
    found = _from_one_pool(tuple(sorted((*size, count) for size, count in sizes.items())))
    return {name: found[need.heads, need.content] for name, need in needs.items()}


@lru_cache
def _from_one_pool(layers: tuple[tuple[int, int, int], ...]) -> dict[tuple[int, int], int]:
    """Bytes of a token and KV head, by KV heads and the bytes that are needed: the least in all.

    layers: KV heads, bytes of a token and head that are needed, number of such layers.
    """
    heads, content, _ = max(layers, key=lambda layer: layer[0] * layer[1])
    best: tuple[int, dict[tuple[int, int], int]] | None = None
    for page in range(heads * content, 2 * heads * content, heads):
        found = {}
        for h, c, _ in layers:
            tokens = next((n for n in range(page // (h * c), 0, -1) if page % (n * h) == 0), 0)
            if not tokens:
                break
            found[h, c] = page // (tokens * h)
        else:
            total = sum(h * found[h, c] * count for h, c, count in layers)
            if best is None or total < best[0]:
                best = total, found
    assert best is not None, "there are fewer heads than bytes"
    return best[1]


def target_of(layer: Any) -> str | None:
    """The name of the layer whose keys and values a layer of vLLM reads; None: it has its own.

    vLLM may say so after it has made the layer.
    """
    name: str | None = getattr(layer, "kv_sharing_target_layer_name", None)
    return name


def needs_of(layers: Mapping[str, Any], alike: bool) -> dict[str, Need]:
    """The needs of this backend's layers.

    Args:
        layers: of the engine on this rank, by their names; those of a draft model too.
        alike: whether vLLM treats all as it treats layers without windows.
    """
    found = {}
    for name, layer in layers.items():
        impl = getattr(layer, "impl", None)
        if hasattr(impl, "plan") and impl.index is not None and target_of(layer) is None:
            window = getattr(impl, "sliding_window", 0)
            kind = None if alike else (window, getattr(layer, "attention_chunk_size", None))
            content = impl.plan.bytes_per_token(impl.config)
            found[name] = Need(kind, impl.num_kv_heads, content)
    return found
