"""A model of transformers: which ones TurboQuantCache supports, and the attention of their own.

What the layers of a model are is read by torch_turboquant.models, as for the memory planner; here
stand the refusals, and what only the model's code can tell.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from torch_turboquant import models
from torch_turboquant.latent import norm_center
from torch_turboquant.models import Kind, Layer

CACHE_PARAMETERS = "past_key_values", "cache"
"""Names of the parameter for a cache: until transformers 5.23, and since 5.24."""

EXPAND = "expand_kv"
"""Method of latent attention that makes the keys and values of all heads from latent rows."""


def text_config(model: nn.Module) -> Any:
    """The configuration of the model's language model.

    Raises:
        ValueError: not a model.
    """
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        got = f"the string {model!r}" if isinstance(model, str) else f"a {type(model).__name__}"
        raise ValueError(
            "a loaded model of transformers is needed, as AutoModelForCausalLM.from_pretrained "
            f"returns it, but this is {got}"
        )
    return models.text_config(model.config)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model of transformers that torch.compile or another wrapper was given."""
    own: nn.Module = getattr(getattr(model, "get_decoder", None), "__self__", model)
    return own


def device_of(model: nn.Module) -> torch.device:
    """Of its first parameter. accelerate keeps weights that it offloads on the meta device."""
    return next(model.parameters()).device


def head_dim_of(config: Any) -> int:
    """The head dimension of all layers that attend.

    Raises:
        ValueError: these layers have different ones.
    """
    layers = models.read_layers(config, slides=lambda: False)  # windows do not matter here
    found = {layer.head_dim for layer in layers if layer.kind in models.KEEPS_KEYS}
    if len(found) > 1:
        raise ValueError(
            f"{type(config).__name__} has layers of different head_dim; TurboQuantCache "
            "supports one head_dim for all layers"
        )
    return found.pop() if found else layers[0].head_dim


def kv_heads_of(config: Any) -> int:
    """The heads of keys and values of the first layer, by the rule of the shared reader."""
    return models.read_layers(config, slides=lambda: False)[0].kv_heads


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
    """Sliding window of every layer in tokens, 0 for full attention.

    None stands for a layer that attends to nothing but has a state (linear attention, convolution),
    or has none.

    Raises:
        ValueError: the model is not supported; the text says why, and what is.
    """
    return [
        layer.window if layer.kind in models.KEEPS_TOKENS else None for layer in model_layers(model)
    ]


def latent_dims(model: nn.Module) -> tuple[int, int] | None:
    """Channels of the latent rows and of the keys with RoPE of a model with latent attention.

    None: the model keeps keys and values of every KV head.
    """
    found = {x.latent_dims for x in model_layers(model) if x.kind is Kind.LATENT}
    return found.pop() if found else None


def model_layers(model: nn.Module) -> list[Layer]:
    """The layers of a model that TurboQuantCache supports, as the shared reader describes them.

    Raises:
        ValueError: the model is not supported; the text says why, and what is.
    """
    config = text_config(model)
    layers = models.read_layers(config, slides=partial(_has_sliding_masks, model))
    problem = models.unsupported_attention(model.config)
    if problem and models.is_latent(models.Fields(config)):
        problem += ". Use DynamicCache, transformers' default"
    problem = problem or _problem(model, config, layers)
    if problem:
        raise ValueError(
            f"TurboQuantCache does not support {type(model).__name__}: it has {problem}. "
            "Supported: decoders with full or sliding-window self-attention, MHA, GQA or MQA, or "
            "with latent attention (MLA), and layers of linear attention or convolution between "
            "them"
        )
    return layers


def _problem(model: nn.Module, config: Any, layers: list[Layer]) -> str | None:
    """What the model has that TurboQuantCache cannot serve, in words; None if there is nothing."""
    kinds, types = {layer.kind for layer in layers}, [layer.type for layer in layers]
    if Kind.SHARED in kinds:
        return "layers that share keys and values"
    if own := _own_cache(model):
        return f"a cache class of its own ({own})"
    if getattr(config, "alibi", False):
        return "ALiBi"
    windows = {layer.window for layer in layers if layer.kind is Kind.SLIDING} - {0}
    if windows and not _has_sliding_masks(model):
        return (
            f"layers of type 'sliding_attention' (sliding_window={min(windows)}), but its code "
            "makes no masks with a window, so that these layers attend to all tokens. Write "
            "'full_attention' into layer_types of its configuration"
        )
    if Kind.CHUNKED in kinds and getattr(config, "attention_chunk_size", None):
        return "chunked attention"
    if others := sorted(_without_a_place(layers, config)):
        return f"layers of type {others}"
    if len(layers) != config.num_hidden_layers:
        return f"{len(layers)} layer_types for {config.num_hidden_layers} layers"
    if not kinds & models.KEEPS_TOKENS:
        return f"no attention, only layers of type {sorted(set(types))}"
    if Kind.LATENT in kinds and (wrong := _latent_problem(model, layers)):
        return wrong
    if encoder := _encoder(model):
        return encoder
    if not getattr(model, "_can_set_attn_implementation", lambda: False)():
        return "attention that does not go through transformers' AttentionInterface"
    return None


def _latent_problem(model: nn.Module, layers: list[Layer]) -> str | None:
    """What keeps the cache from absorbing the model's latent attention, in words; None: nothing.

    Before transformers 5.15 these models handed keys and values of every head to the cache.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    latent = {i: x for i, x in enumerate(layers) if x.kind is Kind.LATENT}
    expands = {m.layer_idx for m in decoder.modules() if hasattr(m, EXPAND)}
    if not expands:
        return (
            f"{Kind.LATENT.value}, whose latents reach a cache from transformers 5.15 on, and this "
            f"is {transformers.__version__}. Upgrade transformers"
        )
    if any(x.kind in models.KEEPS_KEYS for x in layers):
        return f"layers of {Kind.LATENT.value} and others with keys of every head"
    if expands != set(latent) or len({x.latent_dims for x in latent.values()}) > 1:
        return f"{Kind.LATENT.value} of different kinds"
    return None


def norm_centers(model: nn.Module) -> dict[int, Tensor]:
    """Scales of latents' channels from the weights of their norms, by layer (norm_center).

    Raises:
        ValueError: the modules have no such norm, or the model has no weights yet.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    centers: dict[int, Tensor] = {}
    modules: list[Any] = list(decoder.modules())
    for module in modules:
        if not hasattr(module, EXPAND):
            continue
        norm: Any = getattr(module, "kv_a_layernorm", None)
        weight = getattr(norm, "weight", None)
        if weight is not None and weight.is_meta and hasattr(norm, "_hf_hook"):
            # of an offloaded model: accelerate has it there during a call, which shows it
            weight = norm(torch.ones(weight.shape, dtype=weight.dtype, device="cpu"))
        if weight is None or weight.is_meta:
            raise ValueError(
                f"{type(module).__name__} has no kv_a_layernorm with a weight that could be read: "
                "load the model's weights first, or give center='none'"
            )
        centers[module.layer_idx] = norm_center(weight)
    return centers


def cache_parameter(module: nn.Module) -> str | None:
    """The parameter of a module's forward that takes a cache; None if there is none."""
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in CACHE_PARAMETERS if name in parameters), None)


def given_cache(call: dict[str, Any]) -> Any:
    """The cache among the keyword arguments of a forward, under either name; None without one."""
    for name in CACHE_PARAMETERS:
        if name in call:
            return call[name]
    return None


def with_cache(model: nn.Module, cache: Cache) -> dict[str, Cache]:
    """The cache as a keyword argument of the model's forward."""
    return {cache_parameter(model) or CACHE_PARAMETERS[0]: cache}


def _encoder(model: nn.Module) -> str | None:
    """What shows that the model attends to more than the past, in words; None if nothing does."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    modules = [m for m in decoder.modules() if hasattr(m, "layer_idx")]
    if any("CrossAttention" in type(m).__name__ for m in modules):
        return "cross attention"
    if any(getattr(m, "is_causal", True) is False for m in modules):
        return "attention in both directions, as encoders have"
    if cache_parameter(decoder) is None:
        names = " or ".join(CACHE_PARAMETERS)
        return f"no place for a cache, as encoders do (its forward takes no {names})"
    return None


def _without_a_place(layers: list[Layer], config: Any) -> set[str]:
    """Types of layers that are neither attention nor a state which transformers keeps for us.

    The caches of transformers decide which layers have a state: they know more types than names
    can tell.
    """
    others = {layer.type for layer in layers if layer.kind not in models.KEEPS_TOKENS}
    if not others:
        return set()
    own = [type(layer).__name__ for layer in DynamicCache(config=config).layers]
    if len(own) != len(layers):
        return others
    return {
        x.type for x, o in zip(layers, own, strict=True) if x.type in others and o not in _STATES
    }


def _own_cache(model: nn.Module) -> str | None:
    """Name of the cache class that the file of the model's class defines; None if there is none."""
    home = vars(sys.modules[type(model).__module__])
    for name, value in home.items():
        if isinstance(value, type) and issubclass(value, Cache):
            if value.__module__ == home["__name__"]:
                return name
    return None


def _has_sliding_masks(model: nn.Module) -> bool:
    """Whether the model's code makes sliding-window masks.

    Some families name a window in their configuration and never use it.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    homes = [vars(sys.modules[base.__module__]) for base in type(decoder).__mro__]
    return any("create_sliding_window_causal_mask" in home for home in homes)


def original_attention(previous: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function that the module calls where no cache of ours is attached.

    The function of "eager" stands in the file of the module's class, all others in the registry of
    transformers.

    Raises:
        ValueError: there is none of this name.
    """
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
    """The channel with which RoPE mixes each channel of a head: int64 [head_dim], on the CPU.

    The model's own rotate_half is asked. A channel that is not rotated is its own partner, and so
    is every channel of a model where the partners cannot be found out.
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
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, and afterwards each in the mode that it had: dropout would
    be taken for what a model does."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def recording(model: nn.Module, note: Callable[..., None]) -> Iterator[None]:
    """Calls note(module, query, key, value, options) before each call of the model's own attention.

    query: [batch, heads, n, head_dim]; key and value: [batch, kv_heads, n, head_dim];
    options: scaling, softcap, sliding_window and s_aux, each None where the model gives none.
    """
    # not above: the binding needs the lifecycle, and that the centers, which are learned with this
    from torch_turboquant.integrations.transformers.binding import RUNNING, Implementation

    def noted(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: Any) -> None:
        names = ("scaling", "softcap", "sliding_window", "s_aux")
        note(module, query, key, value, {name: kwargs.get(name) for name in names})

    user = object()
    implementation = Implementation.of(text_config(model), user)
    around, RUNNING.note = RUNNING.note, torch.compiler.disable(noted)
    try:
        yield
    finally:
        RUNNING.note = around
        implementation.release(user)
