"""Which layers of a model the planner counts, and which models it refuses."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_turboquant.models import (
    KEEPS_KEYS,
    Fields,
    IncompleteConfig,
    Kind,
    layer_count,
    read_layers,
    text_config,
    unsupported_attention,
)

_SUPPORTED = (
    "decoders with full, sliding-window and linear attention (MHA, GQA, MQA), and latent attention "
    "(MLA) without an indexer"
)
# The options of the command that stand in for what a file does not say.
_OPTIONS = {
    "layers": "--layers, --kv-heads and --head-dim",
    "attending": "--layers (those that keep keys and values), --kv-heads and --head-dim",
    "kv_heads": "--kv-heads",
    "head_dim": "--head-dim",
}


class AttentionLayer(NamedTuple):
    """What one layer keeps of a token."""

    kv_heads: int
    head_dim: int
    window: int = 0
    """Sliding window in tokens; 0: full attention."""

    @property
    def channels(self) -> int:
        """Numbers of a token, keys and values."""
        return 2 * self.kv_heads * self.head_dim


class LatentLayer(NamedTuple):
    """What one layer with latent attention (MLA) keeps of a token: one row for all heads."""

    latent_dim: int
    rope_dim: int
    """Channels of the key with RoPE."""
    window: int = 0

    @property
    def channels(self) -> int:
        """Numbers of a token."""
        return self.latent_dim + self.rope_dim


MemoryLayer = AttentionLayer | LatentLayer


def attention_layers(
    config: Any, *, kv_heads: int | None = None, head_dim: int | None = None
) -> list[MemoryLayer | None]:
    """The layers of a model in order; None for one that keeps nothing of its own per token.

    Args:
        config: the content of a config.json of transformers, or a configuration object. Of a
            multimodal model, its language model is read.
        kv_heads, head_dim: these stand in place of what the configuration says, or does not say,
            of layers that keep keys and values.

    Raises:
        ValueError: a configuration that does not say enough, or an architecture that is not
            supported (cross attention, chunked attention, latent attention with an indexer).
    """
    text = text_config(config)
    family = Fields(text).get("model_type")
    if problem := unsupported_attention(config):
        raise ValueError(f"model type {family!r} has {problem}; supported: {_SUPPORTED}")
    try:
        layers, count = read_layers(text), layer_count(text)
    except IncompleteConfig as error:
        raise error.with_advice(_OPTIONS) from None
    unknown = sorted({x.type for x in layers if x.kind in (Kind.OTHER, Kind.CHUNKED)})
    if unknown:
        raise ValueError(
            f"model type {family!r} has layers of type {unknown}; supported: {_SUPPORTED}"
        )
    if len(layers) != count:
        raise ValueError(f"the configuration has {len(layers)} layer types for {count} layers")
    found: list[MemoryLayer | None] = []
    for layer in layers:
        if layer.kind is Kind.LATENT:
            found.append(LatentLayer(*layer.latent_dims))
            continue
        if layer.kind not in KEEPS_KEYS:
            found.append(None)
            continue
        if layer.kind is Kind.SLIDING and not layer.window:
            raise ValueError("the configuration has sliding layers but names no sliding_window")
        try:
            heads = layer.kv_heads if kv_heads is None else kv_heads
            dim = layer.head_dim if head_dim is None else head_dim
        except IncompleteConfig as error:
            raise error.with_advice(_OPTIONS) from None
        found.append(AttentionLayer(heads, dim, layer.window))
    return found
