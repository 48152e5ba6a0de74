"""What a model is: its head dimension, its layers, its own attention; and which are supported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer


def text_config(model: nn.Module) -> Any:
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise ValueError(f"{type(model).__name__} is no model of transformers")
    return model.config.get_text_config(decoder=True)


def head_dim_of(config: Any) -> int:
    """As named by the configuration; hidden_size / heads only where it names none (Qwen2)."""
    differ = ValueError(
        f"{type(config).__name__} has layers of different head_dim; TurboQuantCache "
        "supports one head_dim for all layers"
    )
    try:
        named = getattr(config, "head_dim", None)
    except RuntimeError as error:  # transformers refuses to name one where layers differ
        raise differ from error
    if getattr(config, "global_head_dim", None) not in (None, named):  # Gemma 4 before that
        raise differ
    return named if named is not None else config.hidden_size // config.num_attention_heads


_ATTENTION = {"full_attention", "attention", "sliding_attention"}
# Layers of transformers' caches that hold no keys and values. They are kept as they are.
_STATES = {"LinearAttentionLayer", "DummyLayer"}


def plain_layers(model: nn.Module) -> list[Any]:
    """Cache layers of transformers itself for this model, full ones wherever there is attention."""
    windows = layer_windows(model)
    if None not in windows:
        return [DynamicLayer() for _ in windows]
    own = DynamicCache(config=text_config(model)).layers
    return [o if w is None else DynamicLayer() for w, o in zip(windows, own, strict=True)]


def layer_windows(model: nn.Module) -> list[int | None]:
    """Sliding window of every layer, 0 for full attention; refuses models that are not supported.

    None: a layer that attends to nothing but has a state (linear attention, convolution), or none.
    """
    config = text_config(model)
    name = type(model).__name__
    layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    blocks = getattr(config, "layers_block_type", None)
    if types is None and blocks:  # hybrid models of older versions
        types = ["full_attention" if kind == "attention" else kind for kind in blocks]
    elif types is None:
        slides = window and _has_sliding_masks(model)
        types = ["sliding_attention" if slides else "full_attention"] * layers
    others = sorted(_unsupported(types, config))
    problem = None
    if getattr(model.config, "is_encoder_decoder", False) or getattr(
        config, "add_cross_attention", False
    ):
        problem = "cross attention"
    elif getattr(config, "kv_lora_rank", None):
        problem = "latent attention (MLA)"
    elif getattr(config, "num_kv_shared_layers", 0) or "reuse" in (
        getattr(config, "kv_sharing_modes", None) or ()
    ):
        problem = "layers that share keys and values"
    elif _own_cache(model):
        problem = f"a cache class of its own ({_own_cache(model)})"
    elif getattr(config, "alibi", False):
        problem = "ALiBi"
    elif getattr(config, "attention_chunk_size", None) and "chunked_attention" in types:
        problem = "chunked attention"
    elif others:
        problem = f"layers of type {others}"
    elif len(types) != layers:
        problem = f"{len(types)} layer_types for {layers} layers"
    elif not _ATTENTION.intersection(types):
        problem = f"no attention, only layers of type {sorted(set(types))}"
    elif not getattr(model, "_can_set_attn_implementation", lambda: False)():
        problem = "attention that does not go through transformers' AttentionInterface"
    if problem:
        raise ValueError(
            f"TurboQuantCache does not support {name}: it has {problem}. Supported: decoders with "
            "full or sliding-window self-attention, MHA, GQA or MQA, and layers of linear "
            "attention or convolution between them"
        )
    of_kind = {"sliding_attention": int(window or 0), "full_attention": 0, "attention": 0}
    return [of_kind.get(kind) for kind in types]


def _unsupported(types: list[str], config: Any) -> set[str]:
    """Types of layers that are neither attention nor a state which transformers keeps for us."""
    if set(types) <= _ATTENTION:
        return set()
    own = [type(layer).__name__ for layer in DynamicCache(config=config).layers]
    if len(own) != len(types):
        return set(types) - _ATTENTION
    return {
        kind
        for kind, layer in zip(types, own, strict=True)
        if kind not in _ATTENTION and layer not in _STATES
    }


def _own_cache(model: nn.Module) -> str | None:
    """Name of the cache class that the model's own file defines, if any."""
    home = vars(sys.modules[type(model).__module__])
    for name, value in home.items():
        if isinstance(value, type) and issubclass(value, Cache):
            if value.__module__ == home["__name__"]:
                return name
    return None


def _has_sliding_masks(model: nn.Module) -> bool:
    """Whether the model makes sliding-window masks: some configurations name a window for none."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return hasattr(sys.modules[type(decoder).__module__], "create_sliding_window_causal_mask")


def original_attention(previous: str, module: nn.Module) -> Callable[..., Any]:
    """What the module would call without this file; "eager" lives beside the module's class."""
    home = sys.modules[type(module).__module__]
    if previous == "eager":
        function = getattr(home, "eager_attention_forward", None)
    else:
        function = getattr(home, "ALL_ATTENTION_FUNCTIONS", AttentionInterface()).get(previous)
    if function is None:
        raise ValueError(
            f"the {previous!r} attention of {type(module).__name__} was not found; load the model "
            "with attn_implementation='sdpa'"
        )
    return function


def rotary_partners(model: nn.Module) -> Tensor:
    """The channel that RoPE turns each channel of a head into: int64 [head_dim].

    Asked of the model's own rotate_half. A channel that is not rotated, or of a model where this
    cannot be told, is its own partner.
    """
    partners = torch.arange(head_dim_of(text_config(model)), device="cpu")
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    rotate = getattr(sys.modules[type(decoder).__module__], "rotate_half", None)
    buffers = decoder.named_buffers()
    sizes = {2 * buffer.numel() for name, buffer in buffers if name.endswith("inv_freq")}
    if rotate is None or len(sizes) != 1:
        return partners
    rotated = partners[: sizes.pop()]
    found = rotate(rotated + 1).abs() - 1
    if found.sort().values.equal(rotated):
        partners[: len(rotated)] = found
    return partners


@contextmanager
def recording(model: nn.Module, note: Callable[..., None]) -> Iterator[None]:
    """Calls note(module, query, key, value, options) in front of the model's own attention."""
    config = text_config(model)
    previous = config._attn_implementation or "eager"

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        names = ("scaling", "softcap", "sliding_window", "s_aux")
        note(module, query, key, value, {name: kwargs.get(name) for name in names})
        return original_attention(previous, module)(module, query, key, value, mask, **kwargs)

    AttentionInterface.register(_RECORDING, attention)
    AttentionMaskInterface.register(_RECORDING, AttentionMaskInterface().get(previous))
    config._attn_implementation_internal = _RECORDING
    try:
        yield
    finally:
        config._attn_implementation_internal = previous


_RECORDING = "turboquant_recording"
