"""TurboQuantCache: what the user makes, passes to generate, crops, resets and measures."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from torch_turboquant import _checks
from torch_turboquant.centers import SINKS, differences
from torch_turboquant.config import CacheConfig, did_you_mean
from torch_turboquant.config import preset as preset_config
from torch_turboquant.eviction import Eviction, Policy
from torch_turboquant.integrations.transformers import centers, saving
from torch_turboquant.integrations.transformers.binding import Attachable
from torch_turboquant.integrations.transformers.constants import ConstantsByDevice
from torch_turboquant.integrations.transformers.latent import LatentLayer
from torch_turboquant.integrations.transformers.layer import TurboQuantLayer, nbytes
from torch_turboquant.integrations.transformers.lifecycle import Lifecycle, States, allocate
from torch_turboquant.integrations.transformers.models import (
    device_of,
    head_dim_of,
    latent_dims,
    layer_windows,
    model_layers,
    norm_centers,
    plain_layers,
    rotary_partners,
    text_config,
    unwrapped,
)
from torch_turboquant.integrations.transformers.sequences import Sequences
from torch_turboquant.integrations.transformers.uncompressed import (
    UNCOMPRESSED,
    AnyConfig,
    UncompressedLatents,
)
from torch_turboquant.latent import LatentConfig, latent_preset_of
from torch_turboquant.layer_choice import LayerChoice, layer_configs

if TYPE_CHECKING:
    from typing_extensions import Self

Centers = Tensor | Sequence[Tensor | None] | Mapping[int, Tensor]
LayerPresets = Mapping[int, LayerChoice] | Sequence[LayerChoice]

_PRESET = "k5v4u"  # of for_model

# In older versions (5.5) a positive argument of crop is the number of tokens to keep.
_CROPS_TO_LENGTH = "max_length" in inspect.signature(Cache.crop).parameters


class TurboQuantCache(Attachable, Cache):
    """Packed KV cache of a model; see the package's text for how it works.

    Make one with `for_model`, pass it as `past_key_values` to `generate` or to the model, and
    `detach` it (or use it in a `with` statement) when the model should be as before. Several caches
    may be attached to one model at a time, and used by a thread each.

    `copy.deepcopy` makes a cache that goes its own way, attached to the same model. `save` and
    `load` do so by a file, for the same model only. `pickle` and `torch.save` write what is in use
    as well; what is loaded again has to be attached (`attach`).
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        config: AnyConfig | None = None,
        *,
        max_batch_size: int = 1,
        max_cache_len: int | None = None,
        max_q_len: int = 32,
        center: str | os.PathLike[str] | Centers | None = "auto",
        layer_presets: LayerPresets | None = None,
        boundary_layers: int = 0,
        boundary_preset: str = "k8v8",
        static: bool = False,
        keep: float = 1.0,
        evict: str | Policy = "snapkv",
    ) -> None:
        """See `for_model`.

        Raises:
            TypeError: no model, or no CacheConfig.
        """
        if not isinstance(model, nn.Module) or not isinstance(config, _CONFIGS):
            raise TypeError(
                "TurboQuantCache(model, config) takes a model and a CacheConfig; "
                "TurboQuantCache.for_model(model, preset) makes the CacheConfig itself"
            )
        _checks.check_positive(max_batch_size=max_batch_size, max_q_len=max_q_len)
        if max_cache_len is not None:
            _checks.check_positive(max_cache_len=max_cache_len)
        if static and max_cache_len is None:
            raise ValueError("a static cache needs its max_cache_len")
        eviction = Eviction(keep, evict, config.sink_tokens, config.recent_window)
        model = unwrapped(model)
        windows, latent = layer_windows(model), latent_dims(model)
        if eviction.evicts and 0 not in windows:
            raise ValueError(
                f"keep is {keep}, but {type(model).__name__} has no layer with full attention: "
                "layers with a sliding window keep what they see, so leave keep out"
            )
        if latent:
            _check_latent(config, latent, layer_presets, boundary_layers)
            center = _latent_centers(model, config, center)
        elif not isinstance(config, CacheConfig):
            raise ValueError(f"{type(model).__name__} has no latent attention: give a CacheConfig")
        center = None if isinstance(center, str) and center == "none" else center
        learned = center if isinstance(center, str) and center in ("auto", "mean") else None
        known = None if learned else _given_centers(center, model)
        if known is not None:
            _check_each_layer(known, windows)
        self.config = config
        self.configs: Sequence[AnyConfig] = [config] * len(windows)
        if isinstance(config, CacheConfig):
            self.configs = layer_configs(
                config,
                windows,
                layer_presets=layer_presets,
                boundary_layers=boundary_layers,
                boundary_preset=boundary_preset,
            )
        self.center = learned or _own(known)
        self.sequences = Sequences(
            config,
            max_batch_size,
            max_cache_len,
            max_q_len,
            learned_center=learned,
            static=static,
            windows=windows,
            eviction=eviction,
        )
        self.windows = windows
        layers = self._make_layers(model, known, eviction, bool(latent))
        self.packed = [layer for layer in layers if isinstance(layer, TurboQuantLayer)]
        self.states = [layer for layer in layers if not isinstance(layer, TurboQuantLayer)]
        self.lifecycle = Lifecycle(self.sequences, self.packed, States(self.states))
        if max_cache_len is not None and not static and device_of(model).type != "meta":
            self._allocate(model)
        self.made_for = centers.fingerprint(model)
        super().__init__(layers=layers)
        self.attach(model)

    def _make_layers(
        self, model: nn.Module, known: Centers | None, eviction: Eviction, latent: bool
    ) -> list[Any]:
        """Packed layers, and transformers' own where a model's layer needs another kind."""
        layers, windows = plain_layers(model), self.windows
        packed = {i: self.configs[i] for i, window in enumerate(windows) if window is not None}
        centers_of = {} if known is None else {index: known[index] for index in packed}
        partners = torch.empty(0, dtype=torch.int64) if latent else rotary_partners(model)
        constants = ConstantsByDevice(packed, centers_of, partners)
        device = device_of(model)
        if device.type != "meta":
            constants.on(device)  # here, because a first forward would wait for it
        for index, config in packed.items():
            kind = LatentLayer if latent else TurboQuantLayer
            of_layer = replace(eviction, seed=index)
            layers[index] = kind(index, config, self.sequences, constants, windows[index], of_layer)
        return layers

    def _allocate(self, model: nn.Module) -> None:
        """All memory at once, for layers as the model's parameters and configuration promise them.

        One that turns out to be another kind takes its own with the first forward, as all layers do
        of a model on several devices or of several types.
        """
        places = {(p.device, p.dtype) for p in model.parameters() if p.is_floating_point()}
        layers = model_layers(model)
        device, dtype = places.pop() if len(places) == 1 else (None, None)
        if device is None or dtype not in _checks.FLOATS:
            return
        for layer in self.packed:
            heads = 1 if isinstance(layer, LatentLayer) else layers[layer.index].kv_heads
            layer.prepare(heads, dtype, device)
        allocate(self.packed)

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        preset: str = _PRESET,
        *,
        config: AnyConfig | None = None,
        max_batch_size: int = 1,
        max_cache_len: int | None = None,
        max_q_len: int = 32,
        center: str | os.PathLike[str] | Centers | None = "auto",
        layer_presets: LayerPresets | None = None,
        boundary_layers: int = 0,
        boundary_preset: str = "k8v8",
        static: bool = False,
        keep: float = 1.0,
        evict: str | Policy = "snapkv",
        **overrides: Any,
    ) -> TurboQuantCache:
        """A cache for `model`, attached to it.

        Args:
            model: a decoder of transformers whose attention goes through AttentionInterface, full
                or with a sliding window, or latent (MLA, from transformers 5.15 on). Layers of
                linear attention or convolution between them keep the cache that they have in
                transformers.
            preset: name of a configuration (torch_turboquant.config.PRESETS); `overrides` change
                its fields, for example recent_window=128. Of a model with latent attention: a name
                of torch_turboquant.LATENT_PRESETS, or of PRESETS, which stands for the bits and
                the grid of its keys; or "uncompressed", for latents as they are.
            config: a CacheConfig instead of a preset, which is then not given; with latent
                attention a LatentConfig.
            max_batch_size: sequences, beams included; all of them get pages and a tail.
            max_cache_len: tokens per sequence to allocate at once, here and now (with static=True:
                with the first forward). None: the prompt gets the pages that it needs, and pages
                are added as sequences grow, a tenth at a time.
            max_q_len: new tokens that one attention call takes; longer continuations go in pieces
                of this length. The tail holds max_q_len - 1 tokens more than its window, so `crop`
                of up to as many loses nothing.
            center: "auto" (mean key and scales of channels, learned from the first tokens), "mean"
                (the mean key alone, learned in the same way), "none" or None (off), one tensor per
                layer as `calibrate` returns them (float32 [kv_heads, head_dim], or [3, kv_heads,
                head_dim] of torch_turboquant.scaled_center), or the path of a file written by
                `save_centers` (of a model of the same shape and RoPE, or it is refused). With
                latent attention nothing is learned: "auto" divides channels by the weight of the
                norm that latents come from, and tensors are [latent_dim] or [3, latent_dim].
            layer_presets: layer -> preset or CacheConfig (negative: from the end), or one entry per
                layer (None: as otherwise); wins over boundary_layers. Presets change bits, grids
                and the scale mode of values; a CacheConfig may differ in all but head_dim,
                page_size, sink_tokens and recent_window.
            boundary_layers: so many full-attention layers at each end of the model get
                boundary_preset. Neither is there for latent attention.
            boundary_preset: a name of PRESETS.
            static: fixed capacity (max_batch_size, max_cache_len), lengths on the device: forwards
                after the prompt can be compiled and captured in CUDA graphs. A center is learned
                from the first forward, however short. Later forwards need no attention_mask; if
                you pass one, it is ignored.
            keep: the share of a prompt's tokens that layers with full attention keep, above 0 and
                up to 1 (all). The others leave before they are stored. sink_tokens and
                recent_window always stay, so that shorter prompts lose nothing. The prompt is the
                first forward whose tokens are stored; what comes later stays. max_cache_len then
                counts the tokens that stay.
            evict: which tokens stay: "snapkv", "keydiff", "streaming" or "random", or a function of
                queries, keys and values (torch_turboquant.eviction).

        Raises:
            TypeError: an option that does not exist, or a model in float64.
            ValueError: a model or option that is not supported; the text names what is.
        """
        latent = latent_dims(model)  # refuses a model that is not supported, before its options
        plain = UncompressedLatents if preset == UNCOMPRESSED else LatentConfig
        _check_options(overrides, plain if latent else CacheConfig)
        if getattr(model, "dtype", None) == torch.float64:
            _checks.check_output_dtype(torch.float64)
        head_dim = head_dim_of(text_config(model))
        if config is not None and overrides:
            kind = type(config).__name__
            raise ValueError(f"with config=, {sorted(overrides)} belong into the {kind}")
        if config is not None and preset != _PRESET:  # the default cannot be told from none
            raise ValueError(f"config= stands in place of a preset, but there is one: {preset!r}")
        if latent:
            config = config or _latent_config(preset, latent, model.dtype, overrides)
        elif config is None:
            config = preset_config(preset, head_dim, **overrides)
        elif isinstance(config, CacheConfig) and config.head_dim != head_dim:
            raise ValueError(f"config.head_dim is {config.head_dim}, the model's is {head_dim}")
        return cls(
            model,
            config,
            max_batch_size=max_batch_size,
            max_cache_len=max_cache_len,
            max_q_len=max_q_len,
            center=center,
            layer_presets=layer_presets,
            boundary_layers=boundary_layers,
            boundary_preset=boundary_preset,
            static=static,
            keep=keep,
            evict=evict,
        )

    def attach(self, model: nn.Module) -> None:
        """Makes `model` able to use this cache; `for_model` has done it already.

        Raises:
            ValueError: the cache was made for a model of another shape or RoPE.
        """
        model = unwrapped(model)
        windows, expected = layer_windows(model), centers.fingerprint(model)
        if wrong := differences(self.made_for, expected):
            raise ValueError(f"this cache was made for another model: {wrong}")
        if windows != self.windows:
            raise ValueError("this cache was made for a model with other sliding windows")
        super().attach(model)
        for layer in self.packed:
            if isinstance(layer, LatentLayer):
                layer.forget_projections()  # of the model that it was attached to before

    def __getstate__(self) -> dict[str, Any]:
        """For copies and files, which have the size of what is in use (see TurboQuantLayer).

        A copy by `copy.deepcopy` is attached to the same model. A cache that comes from a file has
        to be: `attach(model)`.
        """
        return {**super().__getstate__(), "center": _own(self.center)}

    def save(self, path: str | os.PathLike[str]) -> int:
        """Writes what the cache holds of its tokens to a safetensors file (needs safetensors).

        The file has the size of what is in use: pages with tokens, and the exact tail of as many
        sequences. It is written under another name first, so that `path` never names half a file;
        a file that was there is replaced.

        Returns:
            Bytes of the file.

        Raises:
            OSError: the file cannot be written.
            RuntimeError: the cache is detached, or a forward is running on it.
            ValueError: it holds no tokens.
        """
        return saving.save(self, path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        max_batch_size: int | None = None,
        max_cache_len: int | None = None,
        evict: Policy | None = None,
    ) -> Self:
        """The cache of a file of `save`, attached to `model` and on its devices.

        What is generated with it is bit for bit what the saved cache would have given.

        Args:
            path: of the file.
            model: with the shape, RoPE and weights of the one that the cache was saved with.
            max_batch_size, max_cache_len: as in `for_model`; None: those of the saved cache.
            evict: the policy of a cache that was made with a function, which no file can hold;
                None for every other cache.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no file of `save`, is cut short, has another format, or holds a cache
                of another model; its tokens do not fit into the sizes given.
        """
        return saving.load(cls, path, model, max_batch_size, max_cache_len, evict)

    # -- what changes the sequences

    def reset(self) -> None:
        """Forgets all tokens and a learned center; keeps memory and attachment."""
        with self.lifecycle.exclusive:
            for layer in self.layers:
                layer.reset()
            self.sequences.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove tokens of every sequence (a negative number or 0).

        Up to max_q_len - 1 tokens nothing else changes. Beyond that, tokens which the ring of the
        tail no longer holds are read from their codes until new ones have come. All tokens, or more
        than there are, leave the cache empty; a center that was learned stays.

        Raises:
            RuntimeError: what was there before cannot be had again: tokens of a prompt that has
                lost some (keep below 1), of a sliding window, or states of other layers.
            ValueError: a positive number (in transformers 5.5 it is the number of tokens to keep).
        """
        tokens_to_remove = int(tokens_to_remove)  # a tensor in assisted generation
        if tokens_to_remove > 0 and _CROPS_TO_LENGTH:
            tokens_to_remove = min(0, tokens_to_remove - self.get_seq_length())
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative one"
            )
        if tokens_to_remove and self.states:
            raise RuntimeError(
                "layers without keys and values (linear attention, convolution) cannot take tokens "
                "back"
            )
        with self.lifecycle.exclusive:
            self.sequences.crop(-tokens_to_remove)

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` takes tokens back; transformers asks before it drafts any."""
        return not self.states

    def activate_past_recording(self) -> None:
        """Does nothing. Layers that record their past grow with every token until `crop` cuts them,
        which it never does here."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes a copy of the former sequence beam_idx[i] (beam search)."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences `indices` (integers or a mask), in this order."""
        self._select(torch.arange(self.sequences.batch, device="cpu")[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times, copies side by side."""
        rows = torch.arange(self.sequences.batch, device="cpu")
        self._select(rows.repeat_interleave(repeats))

    def _select(self, rows: Tensor) -> None:
        rows = rows.cpu().long()
        chosen = rows.tolist()
        sequences = self.sequences
        sequences.pull()
        if not sequences.batch:
            raise ValueError("the cache holds no sequences yet: there is nothing to choose from")
        if not 1 <= len(chosen) <= sequences.rows:
            raise ValueError(
                f"{len(chosen)} sequences do not fit into max_batch_size={sequences.rows}"
            )
        if chosen == list(range(sequences.batch)):
            return
        if wrong := [row for row in chosen if not 0 <= row < sequences.batch]:
            raise ValueError(f"there is no sequence {wrong[0]}: the cache has {sequences.batch}")
        with self.lifecycle.exclusive:
            for layer in self.packed:
                layer.select_rows(rows)
            for layer in self.states:
                layer.reorder_cache(rows)
            self.lifecycle.states.rows = len(chosen)
            sequences.select(chosen)

    # -- what it holds

    @property
    def centers(self) -> list[Tensor | None] | None:
        """Centers in use, one per layer (None for a layer without keys).

        float32 [kv_heads, head_dim], or with scales of channels [3, kv_heads, head_dim]
        (torch_turboquant.scaled_center). None: off, or to be learned.
        """
        tables = [layer.tables for layer in self.packed]
        if not self.sequences.center_known or any(t is None or t.center is None for t in tables):
            return None
        found: list[Tensor | None] = [None] * len(self.layers)
        for layer in self.packed:
            found[layer.index] = layer.tables.center.to("cpu", copy=True)
        return found

    @property
    def cache_device(self) -> torch.device | None:
        """Where the first layer keeps its pages: where it runs. None before the first forward."""
        first = self.packed[0]
        return first.device if first.is_initialized else None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of one sequence adds: packed keys and values of all layers.

        Measured from the pages; 0 before there are any.
        """
        return sum(
            nbytes(layer.pages) // (layer.pages.shape[0] * self.config.page_size)
            for layer in self.packed
            if layer.pages is not None
        )

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the tensors that the cache holds, all layers together.

        pages: pages that hold tokens; pages_allocated: all pages; tail: the exact first and last
        tokens; tables: constants of the codec; waiting: tokens not yet encoded because the center
        is still to be learned; total: everything allocated. States of layers without keys and
        values are not counted. With max_cache_len, pages_allocated and
        tail are what `torch_turboquant memory` predicts.
        """
        layers = self.memory_by_layer()
        return {name: sum(layer[name] for layer in layers) for name in layers[0]}

    def memory_by_layer(self) -> list[dict[str, int]]:
        """The same for each layer with keys and values."""
        self.sequences.pull()
        out = []
        for layer in self.packed:
            lengths = self.sequences.lengths(layer.thinned)
            used = [math.ceil(n / self.config.page_size) for n in lengths]
            allocated = nbytes(layer.pages)
            pages = 0
            if layer.pages is not None and self.sequences.encoded:
                pages = sum(min(n, layer.owned_pages) for n in used) * (
                    allocated // layer.pages.shape[0]
                )
            tail = nbytes(layer.ring)
            tables = sum(nbytes(t) for t in layer.tables or ())
            waiting = sum(nbytes(t) for t in layer.waiting or ())
            out.append(
                {
                    "pages": pages,
                    "pages_allocated": allocated,
                    "tail": tail,
                    "tables": tables,
                    "waiting": waiting,
                    "total": allocated + tail + tables + waiting,
                }
            )
        return out

    @staticmethod
    def calibrate(
        model: nn.Module,
        inputs: Tensor | str | Sequence[str],
        tokenizer: Any = None,
        *,
        skip: int = SINKS,
        chunk: int = 512,
        scaled: bool = True,
    ) -> list[Tensor | None]:
        """Centers learned from a text, for `center=`: mean keys, and scales of their channels.

        Args:
            inputs: token ids, int64 [n] or [batch, n] without padding; or text, with its tokenizer.
            skip: first tokens of each sequence to leave out (their keys are outliers).
            chunk: tokens per forward.
            scaled: with scales of channels; False: mean keys alone.

        Returns:
            One float32 [3, kv_heads, head_dim] per layer (torch_turboquant.scaled_center), or
            [kv_heads, head_dim] without scales, on the CPU; None for a layer without keys.

        Raises:
            ValueError: fewer than CENTER_TOKENS tokens, or text without a tokenizer.
        """
        return centers.calibrate(model, inputs, tokenizer, skip=skip, chunk=chunk, scaled=scaled)


_CONFIGS = (CacheConfig, LatentConfig, UncompressedLatents)


def _latent_config(
    preset: str, dims: tuple[int, int], dtype: torch.dtype, overrides: Mapping[str, Any]
) -> LatentConfig | UncompressedLatents:
    """The configuration of latent rows that `for_model` was asked for."""
    if preset == UNCOMPRESSED:
        return UncompressedLatents(*dims, **overrides)
    half = torch.float16 if dtype == torch.float16 else torch.bfloat16
    return latent_preset_of(preset, *dims, **{"rope_dtype": half, **overrides})


def _latent_centers(model: nn.Module, config: Any, center: Any) -> Centers | None:
    """What is done to latents before they are coded: "auto" is as their norm says."""
    if center is None or (isinstance(center, str) and center == "none"):
        return None
    if isinstance(center, str) and center == "auto":
        if isinstance(config, UncompressedLatents):
            return None
        return norm_centers(model)
    if isinstance(center, (str, os.PathLike)):
        raise ValueError(
            f"center is {str(center)!r}, supported with latent attention: 'auto' (scales of "
            "channels from the weight of the norm), 'none' (off), or a tensor per layer"
        )
    if isinstance(config, UncompressedLatents):
        raise ValueError("uncompressed latents have no center: leave center= out")
    return center


def _check_latent(
    config: Any, dims: tuple[int, int], layer_presets: Any, boundary_layers: int
) -> None:
    """Raises unless a model with latent attention of these sizes can have such a cache."""
    if isinstance(config, CacheConfig):
        raise ValueError("a model with latent attention needs a LatentConfig, not a CacheConfig")
    if (config.latent_dim, config.rope_dim) != dims:
        raise ValueError(
            f"the configuration is of latent rows of {config.latent_dim} channels and "
            f"{config.rope_dim} with RoPE, the model has {dims[0]} and {dims[1]}"
        )
    if layer_presets is not None or boundary_layers:
        raise ValueError(
            "all layers of a model with latent attention have one configuration: leave "
            "layer_presets and boundary_layers out"
        )


def _check_options(overrides: Mapping[str, Any], config: type) -> None:
    """Raises a TypeError unless `for_model` has all of these options.

    config: the class whose fields they change.
    """
    signature = inspect.signature(TurboQuantCache.for_model).parameters.values()
    own = [p.name for p in signature if p.kind is p.KEYWORD_ONLY]
    changes = [f.name for f in fields(config) if f.name not in _OF_THE_MODEL]
    for name in overrides:
        if name not in changes:
            near = did_you_mean(name, ["preset", *own, *changes])
            raise TypeError(
                f"TurboQuantCache.for_model has no option {name!r}{near}; its options are "
                f"{', '.join(own)}, and to change a preset {', '.join(changes)}"
            )


_OF_THE_MODEL = ("head_dim", "latent_dim", "rope_dim")  # fields of configurations


def _given_centers(center: Any, model: nn.Module) -> Centers | None:
    """Centers that were given as tensors, or are in a file."""
    if isinstance(center, (str, os.PathLike)) and os.path.isfile(center):
        return centers.load_centers(center, model)
    if center is None or isinstance(center, (Mapping, Tensor)):
        return center
    if isinstance(center, Sequence) and not isinstance(center, str):
        return center
    short = isinstance(center, (str, os.PathLike, int))
    got = repr(str(center)) if short else f"of type {type(center).__name__}"
    raise ValueError(
        f"center is {got}, supported: 'auto', 'mean', 'none' (off), a tensor per layer, "
        "or the path of a file of save_centers; there is no such file"
    )


def _check_each_layer(known: Centers, windows: Sequence[int | None]) -> None:
    """Raises ValueError unless there is a center for each packed layer, and for no other.

    TypeError: one is no tensor.
    """
    pairs = list(known.items() if isinstance(known, Mapping) else enumerate(known))
    have = sorted(layer for layer, tensor in pairs if tensor is not None)
    need = [layer for layer, window in enumerate(windows) if window is not None]
    if have != need:
        got = f"shape {list(known.shape)}" if isinstance(known, Tensor) else have
        raise ValueError(f"center needs one tensor for each of {len(need)} layers, got {got}")
    for layer, tensor in pairs:
        if not (tensor is None or isinstance(tensor, Tensor)):
            raise _checks.not_a_tensor(f"center of layer {layer}", tensor)


def _own(center: str | Centers | None) -> str | Centers | None:
    """The same centers in memory of their own."""
    if isinstance(center, Tensor):
        return center.clone()
    if isinstance(center, Mapping):
        return {layer: tensor.clone() for layer, tensor in center.items()}
    if center is None or isinstance(center, str):
        return center
    return [None if tensor is None else tensor.clone() for tensor in center]
