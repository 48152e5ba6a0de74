"""Between model and cache: how a forward finds out which cache it runs on."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    causal_mask_function,
    create_masks_for_generate,
    sdpa_mask,
)

from torch_turboquant.integrations.transformers.lifecycle import Lifecycle
from torch_turboquant.integrations.transformers.models import original_attention, text_config

if TYPE_CHECKING:
    from typing_extensions import Self

_PREFIX = "turboquant_"
_ATTRIBUTE = "_turboquant_binding"  # of the modules of an attached model
_MASKS = "create_masks_for_generate"  # what `generate` asks the model for, if the model has it


class Attachable:
    """A cache that can be attached to models; the hooks drive its lifecycle."""

    lifecycle: Lifecycle
    layers: Any
    binding: Binding | None = None
    _release: weakref.finalize[..., Any] | None = None

    def attach(self, model: nn.Module) -> None:
        """Makes `model` able to use this cache."""
        self.detach()
        self._hold(Binding.of(model))

    def _hold(self, binding: Binding) -> None:
        binding.attached += 1
        self.binding = binding
        self._release = weakref.finalize(self, binding.release)

    def __getstate__(self) -> dict[str, Any]:
        return {n: x for n, x in vars(self).items() if n not in ("binding", "_release")}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that goes its own way, attached to the same model if this one is."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        if self.binding is not None:
            twin._hold(self.binding)
        return twin

    def detach(self) -> None:
        """Gives the model its own attention back once no other cache is attached. Idempotent."""
        if self._release is not None:
            self._release()
        self.binding = self._release = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()


class Binding:
    """The link between one decoder and the caches attached to it.

    Two hooks on the decoder: before a forward, note which cache it runs on and plan it; afterwards,
    let the counts move. The attention and mask functions below look here. torch.compile traces all
    of this.
    """

    attached = 0  # a copy of a model carries copies of these, bound to nothing: they do nothing
    cache: Attachable | None = None  # of the running forward
    begun_by: nn.Module | None = None  # whose forward that is

    def __init__(self, model: nn.Module, decoder: nn.Module, config: Any) -> None:
        current = config._attn_implementation or "eager"
        self.previous = current.removeprefix(_PREFIX)  # a copy of an attached model carries it
        self.name = _PREFIX + self.previous
        self.config = config
        self.originals: dict[type[nn.Module], Callable[..., Any]] = {}  # of classes of attention
        modules = [m for m in decoder.modules() if hasattr(m, "layer_idx")]
        for module in modules:
            if hasattr(module, "num_key_value_groups"):
                self.original(module)  # raises here rather than in a forward
                if module.config is not config:
                    raise ValueError(
                        f"{type(module).__name__} has a configuration of its own; TurboQuantCache "
                        "supports decoders whose attention modules share one"
                    )
        AttentionInterface.register(self.name, partial(_attention, self.previous))
        AttentionMaskInterface.register(self.name, partial(_mask, self.previous))
        self.hooks = []
        for outer in (decoder, *_around(decoder, model)):
            names = list(inspect.signature(outer.forward).parameters)
            before = partial(self._before, names)
            self.hooks.append(outer.register_forward_pre_hook(before, with_kwargs=True))
            self.hooks.append(outer.register_forward_hook(self._after, always_call=True))
        config._attn_implementation_internal = self.name
        for module in (decoder, *modules):
            setattr(module, _ATTRIBUTE, self)
        _BY_CONFIG[id(config)] = self
        masks = getattr(model, _MASKS, create_masks_for_generate)
        if not isinstance(masks, partial) or masks.func is not _early_masks:
            setattr(model, _MASKS, partial(_early_masks, masks))
        attributes = [(model, _MASKS), *((module, _ATTRIBUTE) for module in (decoder, *modules))]
        self.attributes = [(weakref.ref(module), name) for module, name in attributes]

    @classmethod
    def of(cls, model: nn.Module) -> Binding:
        """The binding of the model's decoder, made if needed."""
        decoder = model.get_decoder()
        binding = getattr(decoder, _ATTRIBUTE, None)
        if binding is None or not binding.attached:
            binding = cls(model, decoder, text_config(model))
        return binding

    def original(self, module: nn.Module) -> Callable[..., Any]:
        """The attention that the module had before; looked up once for its class."""
        found = self.originals.get(type(module))
        if found is None:
            found = self.originals[type(module)] = original_attention(self.previous, module)
        return found

    def release(self) -> None:
        """One cache less; the last one restores the model."""
        self.attached -= 1
        if self.attached:
            return
        for hook in self.hooks:
            hook.remove()
        if self.config._attn_implementation == self.name:
            self.config._attn_implementation_internal = self.previous
        for module, name in self.attributes:
            if module() is not None:
                delattr(module(), name)
        del _BY_CONFIG[id(self.config)]

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (Binding,)

    def _before(
        self, names: list[str], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self.attached:
            return
        call = dict(zip(names, args, strict=False)) | kwargs
        cache = call.get("past_key_values")
        if self.cache is not None and cache is self.cache and self.begun_by is not module:
            return  # the decoder, within the module around it
        self.cache = None
        if not isinstance(cache, Attachable):
            return
        if cache.binding is not self:
            raise ValueError(
                "this TurboQuantCache is not attached to this model; call cache.attach(model)"
            )
        if self.config._attn_implementation != self.name:
            raise RuntimeError(
                f"the attention implementation was changed to {self.config._attn_implementation!r} "
                "while a TurboQuantCache was attached; detach it first, change, attach again"
            )
        tokens = call.get("input_ids")
        if tokens is None:
            tokens = call["inputs_embeds"]
        described = call.get("attention_mask"), call.get("position_ids")
        cache.lifecycle.begin(tokens.shape[0], tokens.shape[1], *described)
        self.cache, self.begun_by = cache, module

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.begun_by is not module:
            return
        cache, self.cache, self.begun_by = self.cache, None, None
        if cache is not None:
            cache.lifecycle.end(succeeded=output is not None)  # no output: it has raised


def _around(decoder: nn.Module, model: nn.Module) -> list[nn.Module]:
    """The modules between model and decoder: some make the decoder's masks.

    So a forward on a cache begins with them: a decoder of a model for images gets masks, but no
    padding.
    """
    inner = [m for m in model.modules() if m is not decoder and decoder in m.modules()]
    if getattr(model, "base_model", None) is not model:
        inner = [m for m in inner if m is not model]
    names = {"attention_mask", "past_key_values"}
    return [m for m in inner if names <= set(inspect.signature(m.forward).parameters)]


_BY_CONFIG: dict[int, Binding] = {}  # id of the text configuration -> who is attached there


def _attention(
    previous: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention implementation "turboquant_<previous>"."""
    binding: Binding | None = getattr(module, _ATTRIBUTE, None)
    if binding is None or binding.cache is None:
        original = original_attention(previous, module)
        return original(module, query, key, value, attention_mask, **kwargs)
    layer = binding.cache.layers[module.layer_idx]
    if binding.cache.lifecycle.attended(layer, module, query, key, value):
        return binding.original(module)(module, query, key, value, attention_mask, **kwargs)
    return layer.attend(module, query, key, value, **kwargs)


def _mask(previous: str, *args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
    """The mask of "turboquant_<previous>": the previous one where that attention is going to run.

    paged_attention needs none: causality, padding and sliding windows follow from the lengths.
    """
    binding = _BY_CONFIG.get(id(config))
    cache = None if binding is None else binding.cache
    if cache is None or cache.lifecycle.exact:
        build = AttentionMaskInterface().get(previous)
        return None if build is None else build(*args, config=config, **kwargs)
    causal = kwargs.get("mask_function", causal_mask_function) is causal_mask_function
    # a window of 0 too: Qwen2-MoE makes a mask for sliding layers also where it has none
    sliding = kwargs.get("local_size") is not None
    if kwargs.get("use_vmap") or not (causal or sliding):
        if not _is_causal(getattr(config, "sliding_window", None), **kwargs):
            raise ValueError(
                "the model asks for a mask other than causal or sliding-window attention with left "
                "padding, as for an image or a prefix, which TurboQuantCache supports in the first "
                "forward only"
            )
    return None


_QUERIES = 64  # whose mask is worked out at a time


def _is_causal(
    window: int | None,
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int,
    mask_function: Callable[..., Tensor],
    use_vmap: bool,
    device: torch.device,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    **kwargs: Any,
) -> bool:
    """Whether new tokens get nothing but a causal mask, or one with this window.

    Models make masks for their images, which differ from others in the rows of an image's tokens,
    also for a text without one. Only working the mask out can tell.
    """
    if q_length is None or torch.compiler.is_compiling():
        return False
    keys = torch.arange(kv_length, device=device) + kv_offset
    windows = {kv_length, window or kv_length}  # that the mask may have
    for first in range(0, q_length, _QUERIES):
        queries = min(_QUERIES, q_length - first)
        place = {"q_offset": q_offset + first, "kv_offset": kv_offset}
        options = {"use_vmap": use_vmap, "allow_torch_fix": False, "device": device}
        mask = sdpa_mask(batch_size, queries, kv_length, mask_function=mask_function,
                         allow_is_causal_skip=False, **place, **options)  # fmt: skip
        back = (torch.arange(queries, device=device) + q_offset + first)[:, None] - keys
        windows = {w for w in windows if (mask == ((back >= 0) & (back < w))).all()}
    return bool(windows)


def _early_masks(
    original: Callable[..., Any],
    *args: Any,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    """Masks that `generate` makes before a forward on a cache which can be compiled.

    Ours are made within the forward, from the padding; a step needs none, and has to have the same
    inputs whatever the length.
    """
    if isinstance(past_key_values, Attachable):
        return None if past_key_values.lifecycle.sequences.stepping else attention_mask
    return original(*args, attention_mask=attention_mask, past_key_values=past_key_values, **kwargs)
