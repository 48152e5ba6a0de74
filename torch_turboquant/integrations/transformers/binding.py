"""Between model and cache: how a forward finds out which cache it runs on.

Several threads may use one model at a time, each with a cache of its own or with none. So what runs
is noted by thread (RUNNING), and what is replaced in a model and its configuration does for every
other forward what was done before.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    causal_mask_function,
    create_masks_for_generate,
    sdpa_mask,
)

from torch_turboquant.integrations.transformers.compiling import uncompiled
from torch_turboquant.integrations.transformers.lifecycle import Lifecycle
from torch_turboquant.integrations.transformers.models import (
    EXPAND,
    cache_parameter,
    given_cache,
    original_attention,
    text_config,
    with_cache,
)
from torch_turboquant.integrations.transformers.tensors import (
    check_not_exported,
    check_not_meta,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_PREFIX = "turboquant_"
_ATTRIBUTE = "_turboquant_binding"  # of the modules of an attached model
_FORWARD = "forward"  # of the decoder and of modules around it
_MASKS = "create_masks_for_generate"  # what `generate` asks the model for, if the model has it
_INPUTS = "prepare_inputs_for_generation"  # of each forward, by `generate`


class Running(threading.local):
    """What runs in a thread."""

    __slots__ = ()  # else torch.compile writes to a dictionary that all threads share

    def __init__(self) -> None:
        self.cache: Attachable | None = None  # of the running forward
        self.note: Callable[..., None] | None = None  # of `models.recording`


RUNNING = Running()

# Attach and detach one at a time. Reentrant, because a cache may reach the end of its life while
# the same thread attaches another one: users are added to a set before anything else is looked at.
_ATTACHING = threading.RLock()


class Attachable:
    """A cache that can be attached to models; the decoder's `_Forward` drives its lifecycle."""

    lifecycle: Lifecycle
    layers: Any
    binding: Binding | None = None
    _release: weakref.finalize[..., Any] | None = None

    def attach(self, model: nn.Module) -> None:
        """Makes `model` able to use this cache."""
        with self.lifecycle.exclusive:
            self.detach()
            user = object()
            self._hold(Binding.of(model, user), user)

    def _hold(self, binding: Binding, user: object) -> None:
        self.binding = binding
        self._release = weakref.finalize(self, binding.release, user)
        self._release.atexit = False  # the models end with the process

    def __getstate__(self) -> dict[str, Any]:
        return {n: x for n, x in vars(self).items() if n not in ("binding", "_release")}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that goes its own way, attached to the same model if this one is."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        with self.lifecycle.exclusive:
            twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
            if self.binding is not None:
                user = object()
                self.binding.take(user)
                twin._hold(self.binding, user)
        return twin

    def detach(self) -> None:
        """Gives the model its own attention back once no other cache is attached. Idempotent."""
        with self.lifecycle.exclusive:
            if self._release is not None:
                self._release()
            self.binding = self._release = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()


class Implementation:
    """The attention implementation of a configuration, replaced while it has users.

    The configuration may be that of several models.
    """

    def __init__(self, config: Any) -> None:
        self.config, self.previous = config, previous_implementation(config)
        self.name = _PREFIX + self.previous
        self.users: set[object] = set()

    @classmethod
    def of(cls, config: Any, user: object) -> Implementation:
        """That of `config`, which `user` has to release."""
        with _ATTACHING:
            found = _IMPLEMENTATIONS.get(id(config))
            if found is not None:
                found.users.add(user)
                if found.installed and _IMPLEMENTATIONS.get(id(config)) is found:
                    return found
            found = cls(config)
            found.users.add(user)
            _register(found.previous)
            _IMPLEMENTATIONS[id(config)] = found
            config._attn_implementation_internal = found.name
            return found

    @property
    def installed(self) -> bool:
        """False where somebody has changed the configuration since."""
        return bool(self.config._attn_implementation == self.name)

    def release(self, user: object) -> None:
        """One user less; the last one restores the configuration."""
        with _ATTACHING:
            self.users.discard(user)
            if self.users or _IMPLEMENTATIONS.get(id(self.config)) is not self:
                return
            del _IMPLEMENTATIONS[id(self.config)]
            if self.installed:
                self.config._attn_implementation_internal = self.previous


_IMPLEMENTATIONS: dict[int, Implementation] = {}  # by the id of the configuration


def _register(previous: str) -> str:
    """Makes ours, in the place of `previous`, known to transformers; returns its name."""
    name = _PREFIX + previous
    AttentionInterface.register(name, partial(_attention, previous))
    AttentionMaskInterface.register(name, partial(_mask, previous))
    return name


def previous_implementation(config: Any) -> str:
    """The attention implementation that `config` names, or named before it got ours."""
    current: str = config._attn_implementation or "eager"
    return current.removeprefix(_PREFIX)  # which a copy of an attached model carries


class Binding:
    """The link between one decoder and the caches attached to it."""

    bound = False  # a copy of a model carries copies of these, bound to nothing: they do nothing

    def __init__(self, decoder: nn.Module, config: Any) -> None:
        self.previous = previous_implementation(config)
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
        self.users: set[object] = set()
        self.config, self.decoder = config, weakref.ref(decoder)
        self.implementation = Implementation.of(config, self)
        self.modules = [weakref.ref(module) for module in (decoder, *modules)]
        for module in (decoder, *modules):
            setattr(module, _ATTRIBUTE, self)
        self.expansions = [_Expansion(self, m) for m in modules if hasattr(m, EXPAND)]
        self.forwards: list[_Forward] = []
        self.preparations: list[_Preparation] = []  # of the models around the decoder
        self.models: list[weakref.ref[nn.Module]] = []  # around the decoder
        self.bound = True

    @classmethod
    def of(cls, model: nn.Module, user: object) -> Binding:
        """The binding of the model's decoder, made if needed; `user` has to release it."""
        with _ATTACHING:
            decoder = model.get_decoder()
            binding: Binding | None = getattr(decoder, _ATTRIBUTE, None)
            if binding is not None and binding.bound:
                binding.users.add(user)
            if binding is None or not binding.bound:
                binding = cls(decoder, text_config(model))
                binding.users.add(user)
            for module in (decoder, *_around(decoder, model)):
                binding.begin_forwards_with(module)
            binding.leave_masks_to_the_forward(model)
            binding.generate_with_the_cache(model)
            return binding

    def take(self, user: object) -> None:
        """One more user of a binding that has one."""
        with _ATTACHING:
            self.users.add(user)

    def begin_forwards_with(self, module: nn.Module) -> None:
        """Makes a call of `module` the begin of a forward on the cache that it gets."""
        if any(forward.module() is module for forward in self.forwards):
            return
        self.forwards.append(_Forward(self, module))

    def leave_masks_to_the_forward(self, model: nn.Module) -> None:
        """What `generate` asks `model` for, see _early_masks."""
        masks = getattr(model, _MASKS, create_masks_for_generate)
        if not _leaves_masks(masks):
            setattr(model, _MASKS, partial(_early_masks, masks))
            self.models.append(weakref.ref(model))

    def generate_with_the_cache(self, model: nn.Module) -> None:
        """Keeps the cache in what `generate` hands to the forward of `model`, see _Preparation."""
        if hasattr(model, _INPUTS) and all(p.module() is not model for p in self.preparations):
            self.preparations.append(_Preparation(self, model))

    def original(self, module: nn.Module) -> Callable[..., Any]:
        """The attention that the module had before; looked up once for its class."""
        found = self.originals.get(type(module))
        if found is None:
            found = self.originals[type(module)] = original_attention(self.previous, module)
        return found

    def release(self, user: object) -> None:
        """One cache less; the last one restores the model."""
        with _ATTACHING:
            self.users.discard(user)
            if self.users or not self.bound:
                return
            self.bound = False
            for reference in self.modules:
                _remove(reference(), _ATTRIBUTE, lambda value: value is self)
            for replacement in (*self.forwards, *self.preparations, *self.expansions):
                replacement.remove()
            for reference in self.models:
                _remove(
                    reference(), _MASKS, lambda value: getattr(value, "func", 0) is _early_masks
                )
            self.implementation.release(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _binding_of_a_copy, (self.previous,)


def _binding_of_a_copy(previous: str) -> Binding:
    """What a copy of a model holds: bound to nothing. The copy's configuration names our attention,
    which a process that reads the model from a file may not have heard of."""
    _register(previous)
    return object.__new__(Binding)


def _remove(module: nn.Module | None, name: str, ours: Callable[[Any], bool]) -> bool:
    """Removes an attribute that is still ours: whether it was."""
    attributes = {} if module is None else vars(module)
    if name not in attributes or not ours(attributes[name]):
        return False
    del attributes[name]
    return True


def _around(decoder: nn.Module, model: nn.Module) -> list[nn.Module]:
    """The modules between model and decoder: some make the decoder's masks.

    So a forward on a cache begins with them: a decoder of a model for images gets masks, but no
    padding.
    """
    inner = [m for m in model.modules() if m is not decoder and decoder in m.modules()]
    if getattr(model, "base_model", None) is not model:
        inner = [m for m in inner if m is not model]
    names = {"input_ids", "attention_mask"}
    return [
        m
        for m in inner
        if cache_parameter(m) and names <= set(inspect.signature(m.forward).parameters)
    ]


class _Replacement:
    """Stands in the place of a method of one module while the module's model is bound."""

    name: str  # of the method

    def __init__(self, binding: Binding, module: nn.Module) -> None:
        self.binding = binding
        self.module = weakref.ref(module)
        self.previous = vars(module).get(self.name)  # that of a wrapper: compiled, of accelerate
        setattr(module, self.name, self)

    def remove(self) -> None:
        """Gives the module its own method back, unless somebody has changed it since."""
        module = self.module()
        if _remove(module, self.name, lambda value: value is self) and self.previous is not None:
            setattr(module, self.name, self.previous)

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """The method that the module had before."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        module: Any = self.module()
        return getattr(type(module), self.name)(module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _method_of_a_copy, (self.module(), self.name, self.previous)


def _method_of_a_copy(module: nn.Module, name: str, previous: Any) -> Any:
    return MethodType(getattr(type(module), name), module) if previous is None else previous


class _Expansion(_Replacement):
    """`expand_kv` of a module with latent attention, which is called between update and attention.

    In an exact forward the cache's layer gets the keys and values that it makes for all heads; in
    any other one attention takes the latent rows themselves.
    """

    name = EXPAND

    def __call__(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        cache = RUNNING.cache
        if cache is None or cache.binding is not self.binding:
            expanded: tuple[Tensor, Tensor] = self.own(latent, rope)
            return expanded
        if not cache.lifecycle.sequences.forward.traced and is_dynamo_compiling():
            return _expand_uncompiled(self, latent, rope)
        module: Any = self.module()
        return cache.layers[module.layer_idx].expand(module, self.own, latent, rope)


class _Preparation(_Replacement):
    """`prepare_inputs_for_generation` of a model, which may leave the cache out.

    Phi-3 does so in the first forward of a text that is longer than the positions of its short RoPE
    factors: what the cache has of it was rotated with these. Then the inputs are the whole text,
    and `generate` would go on with a DynamicCache, and nobody could tell. Our cache reads the text
    anew instead. (An empty cache is left out, too, for what Phi-3 asks is whether it has layers.)
    """

    name = _INPUTS

    def __init__(self, binding: Binding, module: Any) -> None:
        # `generate` looks at the parameters
        self.__signature__ = inspect.signature(module.prepare_inputs_for_generation)
        super().__init__(binding, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs, cache, module = self.own(*args, **kwargs), given_cache(kwargs), self.module()
        is_ours = isinstance(cache, Attachable) and cache.binding is self.binding
        if is_ours and module is not None and given_cache(inputs) is None:
            if cache.get_seq_length():
                cache.reset()
            inputs |= with_cache(module, cache)
        return inputs


class _Forward(_Replacement):
    """The forward of an attached decoder, or of a module around it, from its begin to its end.

    Only steps of the static form are traced by torch.compile, and all of this with them. Other
    forwards depend on numbers of the host; they are called without compilation.
    """

    name = _FORWARD

    def __init__(self, binding: Binding, module: nn.Module) -> None:
        self.__signature__ = inspect.signature(module.forward)
        self.parameters = list(self.__signature__.parameters)
        super().__init__(binding, module)
        self.uncompiled = None if self.previous is None else uncompiled(self.previous)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.binding.bound:  # something that was put around it has kept it
            return self.own(*args, **kwargs)
        call = dict(zip(self.parameters, args, strict=False)) | kwargs
        cache = given_cache(call)
        if not isinstance(cache, Attachable):
            return self._plainly(args, kwargs)
        if call.get("input_ids") is None and call.get("inputs_embeds") is None:
            return self.own(*args, **kwargs)  # which says what is missing
        if cache is RUNNING.cache:  # the module around this one has begun the forward
            traced = cache.lifecycle.sequences.forward.traced
            return (self.own if traced else self.uncompiled or self.own)(*args, **kwargs)
        if cache.lifecycle.sequences.stepping:
            begin, end = _begin_uncompiled, _end_uncompiled
            return self.run(self.own, begin, end, cache, call, args, kwargs)
        return _run_uncompiled(self, cache, call, args, kwargs)

    def _plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward without a cache of ours, even within one that has one."""
        around = RUNNING.cache
        if around is None:
            return self.own(*args, **kwargs)
        RUNNING.cache = None
        try:
            return self.own(*args, **kwargs)
        finally:
            RUNNING.cache = around

    def run(
        self,
        own: Callable[..., Any],
        begin: Callable[[_Forward, Attachable, dict[str, Any]], None],
        end: Callable[[Lifecycle, bool], None],
        cache: Attachable,
        call: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A forward on the cache; `call` names all arguments."""
        if is_dynamo_compiling():  # which cannot look at threads
            begin, end = _Forward.plan, Lifecycle.end
        begin(self, cache, call)
        around, RUNNING.cache = RUNNING.cache, cache
        succeeded = False
        try:
            output = own(*args, **kwargs)
            succeeded = True
        finally:
            RUNNING.cache = around
            end(cache.lifecycle, succeeded)
        return output

    def plan(self, cache: Attachable, call: dict[str, Any]) -> None:
        """Begins a forward on the cache, or refuses it."""
        if cache.binding is not self.binding:
            raise ValueError(
                "this TurboQuantCache is not attached to this model; call cache.attach(model)"
            )
        implementation = self.binding.implementation
        if not implementation.installed:
            raise RuntimeError(
                "the attention implementation was changed to "
                f"{previous_implementation(implementation.config)!r} while a TurboQuantCache was "
                "attached; detach it first, change, attach again"
            )
        decoder: Any = self.binding.decoder()
        if decoder.training and getattr(decoder, "gradient_checkpointing", False):
            raise RuntimeError(
                "TurboQuantCache takes no gradient, and gradient checkpointing leaves the cache "
                "out: call model.eval(), and run the model under torch.no_grad()"
            )
        tokens = call.get("input_ids")
        if tokens is None:
            tokens = call["inputs_embeds"]
        check_not_meta(tokens)
        check_not_exported(tokens)
        described = call.get("attention_mask"), call.get("position_ids")
        cache.lifecycle.begin(tokens.shape[0], tokens.shape[1], *described)


# ---- what torch.compile does not trace


def _begin(forward: _Forward, cache: Attachable, call: dict[str, Any]) -> None:
    exclusive = cache.lifecycle.exclusive
    exclusive.enter()
    try:
        forward.plan(cache, call)
    except BaseException:
        exclusive.leave()
        raise


def _end(lifecycle: Lifecycle, succeeded: bool) -> None:
    try:
        lifecycle.end(succeeded)
    finally:
        lifecycle.exclusive.leave()


_begin_uncompiled, _end_uncompiled = uncompiled(_begin), uncompiled(_end)
_expand_uncompiled = uncompiled(_Expansion.__call__)


@uncompiled
def _run_uncompiled(forward: _Forward, *arguments: Any) -> Any:
    return forward.run(forward.uncompiled or forward.own, _begin, _end, *arguments)


# ---- what transformers calls


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
    cache = RUNNING.cache
    if cache is None or cache.binding is not getattr(module, _ATTRIBUTE, None):
        if RUNNING.note is not None:
            RUNNING.note(module, query, key, value, kwargs)
        original = original_attention(previous, module)
        return original(module, query, key, value, attention_mask, **kwargs)
    lifecycle = cache.lifecycle
    if not lifecycle.sequences.forward.traced and is_dynamo_compiling():
        return _attention_uncompiled(previous, module, query, key, value, attention_mask, **kwargs)
    layer = cache.layers[module.layer_idx]
    if lifecycle.attended(layer, module, query, key, value, kwargs.get("scaling")):
        original = cache.binding.original(module)
        return original(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is not None:  # `_mask` has made none
        raise ValueError(
            f"{type(module).__name__} attends under a mask that the model's own code makes, which "
            "TurboQuantCache does not support behind the first forward: it supports the causal and "
            "sliding-window masks of transformers. Use DynamicCache, transformers' default"
        )
    return layer.attend(module, query, key, value, **kwargs)


_attention_uncompiled = uncompiled(_attention)


def _mask(previous: str, *args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
    """The mask of "turboquant_<previous>": the previous one where that attention is going to run.

    paged_attention needs none: causality, padding and sliding windows follow from the lengths.
    """
    cache = RUNNING.cache
    if cache is None or cache.binding.config is not config or cache.lifecycle.exact:
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
    if q_length is None or is_dynamo_compiling():
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


def _leaves_masks(function: Any) -> bool:
    return isinstance(function, partial) and function.func is _early_masks


def _early_masks(
    original: Callable[..., Any],
    *args: Any,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Masks that `generate` makes before a forward on a cache which can be compiled.

    Ours are made within the forward, from the padding; a step needs none, and has to have the same
    inputs whatever the length.
    """
    cache = given_cache(kwargs)
    if isinstance(cache, Attachable):
        return None if cache.lifecycle.sequences.stepping else attention_mask
    return original(*args, attention_mask=attention_mask, **kwargs)
