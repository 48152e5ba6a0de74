"""The arithmetic of caches: bytes of packed and plain ones, from the layers that a model has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_turboquant._checks import check_positive
from torch_turboquant.config import CacheConfig
from torch_turboquant.latent import LatentConfig
from torch_turboquant.memory.layers import LatentLayer, MemoryLayer
from torch_turboquant.tail import ring_rows


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of one kind of cache, all layers together."""

    name: str
    bytes_per_token: int
    """What one more token takes, in all layers that keep it."""
    pages: int
    """Of one request: codes, scales and padding, the last page rounded up."""
    tail: int
    """Of one request: the exact first and last tokens."""
    constants: int
    """Once per model: signs, codebooks and centers."""

    @property
    def request(self) -> int:
        """Bytes of one request."""
        return self.pages + self.tail

    def requests_in(self, budget: int) -> int:
        """How many requests fit into `budget` bytes."""
        return max(0, budget - self.constants) // self.request


def packed_memory(
    name: str,
    layers: Sequence[MemoryLayer | None],
    configs: Sequence[CacheConfig | LatentConfig],
    context: int,
    *,
    tail_itemsize: int = 2,
    max_q_len: int = 32,
    center: bool = True,
    whole_sliding: bool = False,
) -> CacheMemory:
    """Bytes of a packed cache.

    Args:
        name: what the row is called.
        layers: the model's (attention_layers).
        configs: one per layer (layer_choice.layer_configs); a LatentConfig for a LatentLayer.
            Their head_dim, latent_dim and rope_dim are not used: the layer's own are.
        context: tokens of one request.
        tail_itemsize: bytes of an element of the model's dtype.
        max_q_len: new tokens that one attention call takes; the tail holds max_q_len - 1 tokens
            more than its window.
        center: whether keys or latents have a center and scales of channels.
        whole_sliding: whether sliding layers keep all tokens. TurboQuantCache does not: it keeps
            the pages that max_q_len queries can see.

    Raises:
        ValueError: context or max_q_len below 1, or a head_dim that packed caches do not have.
    """
    check_positive(context=context, max_q_len=max_q_len)
    context, max_q_len = int(context), int(max_q_len)  # NumPy's would overflow
    per_token = pages = tail = constants = 0
    for layer, config in zip(layers, configs, strict=True):
        if layer is None:
            continue
        heads = 1 if isinstance(layer, LatentLayer) else layer.kv_heads
        config = _of_layer(config, layer)
        visible = layer.window + max_q_len - 1 if layer.window and not whole_sliding else 0
        held = _pages(context, visible, config.page_size)
        per_token += heads * config.bytes_per_token
        pages += held * heads * config.record_bytes
        if config.has_tail:
            rows = config.sink_tokens + ring_rows(config, max_q_len)
            tail += rows * layer.channels * tail_itemsize
        if isinstance(config, LatentConfig):
            constants += _constants_of_latents(config, center)
        else:
            constants += _constants(config, 3 * heads if center else 0)
    return CacheMemory(name, per_token, pages, tail, constants)


def plain_memory(
    name: str,
    layers: Sequence[MemoryLayer | None],
    itemsize: int,
    context: int,
    *,
    page_size: int = 32,
    max_q_len: int = 32,
    whole_sliding: bool = False,
) -> CacheMemory:
    """Bytes of a paged cache of plain elements, each of `itemsize` bytes.

    page_size: tokens of a page. The other arguments are those of packed_memory.

    Raises:
        ValueError: context, max_q_len or page_size below 1.
    """
    check_positive(context=context, max_q_len=max_q_len, page_size=page_size)
    context, max_q_len, page_size = int(context), int(max_q_len), int(page_size)
    per_token = pages = 0
    kept: list[MemoryLayer] = [layer for layer in layers if layer is not None]
    for layer in kept:
        token = layer.channels * itemsize
        visible = layer.window + max_q_len - 1 if layer.window and not whole_sliding else 0
        per_token += token
        pages += _pages(context, visible, page_size) * page_size * token
    return CacheMemory(name, per_token, pages, 0, 0)


def _of_layer(config: CacheConfig | LatentConfig, layer: MemoryLayer) -> Any:
    """The configuration with the sizes of the layer."""
    if isinstance(config, LatentConfig) != isinstance(layer, LatentLayer):
        raise ValueError(f"{type(config).__name__} cannot describe a cache of {layer}")
    sizes = layer._asdict() if isinstance(layer, LatentLayer) else {"head_dim": layer.head_dim}
    sizes.pop("window", None)
    return replace(config, **sizes)


def _pages(context: int, visible: int, page_size: int) -> int:
    """Pages that hold the last `visible` of `context` tokens, wherever in a page these begin.

    visible: 0 stands for all tokens.
    """
    whole = -(-context // page_size)
    return min(whole, 1 - (1 - visible) // page_size) if visible else whole


def _constants(config: CacheConfig, center_rows: int) -> int:
    """Bytes of the tables of one layer (make_tables).

    These are the signs of keys and values, the candidate steps of both, the levels of a grid that
    has any, and the center with its scales: center_rows vectors of head_dim float32 elements.
    """
    size = 2 * 4 * config.head_dim + 2 * 4 * config.search + 4 * center_rows * config.head_dim
    for bits, grid in (
        (config.key_bits, config.key_grid),
        (config.value_bits, config.value_grid),
    ):
        size += 2**bits if grid == "lloyd" else 0
    return size


def _constants_of_latents(config: LatentConfig, center: bool) -> int:
    """Bytes of the tables of one layer of latents, with the center that TurboQuantCache has."""
    vectors = (1 if config.transform else 0) + (3 if center else 0)  # signs, center
    return (
        4 * vectors * config.latent_dim
        + 4 * config.search
        + (2**config.bits if config.grid == "lloyd" else 0)
    )
