"""Files of caches: what a model has read, so that no program has to read it again.

A file has the format of safetensors, so that nothing in it is executed when it is read. It holds
what is in use: of pages and exact tail what belongs to tokens, centers, and the states of layers
without keys and values. Bytes that earlier tokens have left behind are 0. The file's metadata say
what the rest depends on (model, weights, format, codebooks) and how long the sequences are.

Loading makes a cache as `for_model` does and puts the tokens into it, after everything that the
metadata say has been checked.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from torch_turboquant import _files
from torch_turboquant._checks import FLOATS_BY_NAME, check_whole
from torch_turboquant.centers import differences
from torch_turboquant.config import CacheConfig
from torch_turboquant.eviction import Eviction, Policy
from torch_turboquant.format import FORMAT_VERSION, latent_own_bytes, own_bytes
from torch_turboquant.integrations.transformers import centers
from torch_turboquant.integrations.transformers.layer import TurboQuantLayer
from torch_turboquant.integrations.transformers.lifecycle import allocate
from torch_turboquant.integrations.transformers.models import layer_windows, unwrapped
from torch_turboquant.integrations.transformers.saved_states import restore_state, saved_state
from torch_turboquant.integrations.transformers.tensors import dtype_name, on_host
from torch_turboquant.integrations.transformers.uncompressed import AnyConfig, UncompressedLatents
from torch_turboquant.latent import LatentConfig
from torch_turboquant.tail import held_positions

if TYPE_CHECKING:
    from torch_turboquant.integrations.transformers.cache import TurboQuantCache

    Kind = TypeVar("Kind", bound=TurboQuantCache)

FILE_FORMAT = "torch_turboquant cache 1"
_KIND = "a cache"
_CONFIGS: dict[str, type[AnyConfig]] = {
    kind.__name__: kind for kind in (CacheConfig, LatentConfig, UncompressedLatents)
}
_OWN_POLICY = "a function"  # where a file would have the name of a policy
_MOST = 2**31  # no number of tokens or sequences is as large: ops count with int32
_SAMPLE = 64  # elements of each parameter that stand for it, about


# ---- writing


def save(cache: TurboQuantCache, path: str | os.PathLike[str]) -> int:
    """See TurboQuantCache.save."""
    _files.check_place(path)  # before the work
    with cache.lifecycle.exclusive:
        model = _model_of(cache)
        _check_ready(cache)
        tensors: dict[str, Tensor] = {}
        states = {}
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, TurboQuantLayer):
                tensors |= _tensors_of(layer)
            else:
                states[index] = saved_state(layer, index, _tensor_name(index, "state"), tensors)
        given = cache.center if not cache.sequences.learned_center else None
        if given is not None:
            pairs = given.items() if isinstance(given, Mapping) else enumerate(given)
            tensors |= {_tensor_name(i, "center"): on_host(c) for i, c in pairs if c is not None}
        metadata = {
            "model": json.dumps(_shape_of(cache.made_for)),
            "weights": weights_digest(model),
            "codebooks": _codebooks(cache),
            "cache": json.dumps(_description(cache, given is not None, states)),
        }
    return _files.write(path, tensors, FILE_FORMAT, metadata)


def _model_of(cache: TurboQuantCache) -> nn.Module:
    """The decoder that the cache is attached to."""
    decoder = None if cache.binding is None else cache.binding.decoder()
    if decoder is None:
        raise RuntimeError(
            "a cache is saved with the fingerprint of its model's weights, and this "
            "TurboQuantCache is detached: call cache.attach(model)"
        )
    return decoder


def _check_ready(cache: TurboQuantCache) -> None:
    """Raises unless the cache holds tokens that a file can hold."""
    sequences = cache.sequences
    if sequences.forward is not None:
        raise RuntimeError("a forward is running on this TurboQuantCache: save it before or after")
    if sequences.lost:
        raise RuntimeError(
            "a forward on this cache has failed, and layers without keys and values have lost "
            "the state that they had before: reset() it"
        )
    sequences.pull()
    if not any(sequences.lengths()):
        raise ValueError("this cache holds no tokens to save: run the model on a prompt first")


def _description(cache: TurboQuantCache, given: bool, states: dict[int, Any]) -> dict[str, Any]:
    """Sizes, configurations and lengths: plain data, for JSON."""
    sequences, base = cache.sequences, cache.config
    batch = sequences.batch
    return {
        "format_version": FORMAT_VERSION,
        "config": _plain_config(base),
        "configs": {i: _plain_config(c) for i, c in enumerate(cache.configs) if c != base},
        "max_batch_size": sequences.rows,
        "max_cache_len": sequences.max_len,
        "max_q_len": sequences.max_q_len,
        "static": sequences.static,
        "center": sequences.learned_center or ("given" if given else "none"),
        "windows": cache.windows,
        "batch": batch,
        "columns": sequences.columns,
        "pads": sequences.pads,
        "keep": sequences.eviction.keep,
        "evict": _name_of(sequences.eviction.evict),
        "evicted": sequences.evicted or [0] * batch,
        "prompt_end": sequences.prompt_end,
        "places": [
            [places.stored[:batch], places.rings.first[:batch]]
            for places in sequences.places.values()
        ],
        "encoded": sequences.encoded,
        "layers": {x.index: [x.kv_heads, dtype_name(x.dtype)] for x in cache.packed},
        "states": states,
    }


def _name_of(policy: str | Policy) -> str:
    """A policy as a file has it: functions have no name there."""
    return policy if isinstance(policy, str) else _OWN_POLICY


def _plain_config(config: AnyConfig) -> dict[str, Any]:
    values = asdict(config)
    values = {n: dtype_name(v) if isinstance(v, torch.dtype) else v for n, v in values.items()}
    return {"kind": type(config).__name__, **values}


def _shape_of(fingerprint: dict[str, str]) -> dict[str, str]:
    """A model's fingerprint without the format of files of centers."""
    return {name: value for name, value in fingerprint.items() if name != "format"}


def weights_digest(decoder: nn.Module) -> str:
    """What tells the weights of a language model from others of the same shapes, on any device.

    Names, shapes and types of all parameters count, and evenly spaced elements of each, 43 to 127
    or all where there are fewer: a training changes nearly all of them.

    Raises:
        ValueError: weights on the meta device, as those that accelerate has offloaded.
    """
    hashed = hashlib.sha256()
    samples: list[Tensor] = []
    for name, parameter in sorted(decoder.named_parameters()):
        for part in _plain_tensors(parameter.detach()):
            if part.is_meta:
                raise ValueError(
                    f"the weights {name} are on the meta device, where nothing tells them from "
                    "those of another model: load the model without offloading"
                )
            hashed.update(f"{name} {tuple(part.shape)} {part.dtype}\n".encode())
            step = max(1, part.numel() // _SAMPLE) | 1  # odd: not the same column of every row
            samples.append(part.reshape(-1)[::step].contiguous().view(torch.uint8))
    for _, group in groupby(samples, key=lambda sample: sample.device):  # one transfer each
        hashed.update(torch.cat(list(group)).cpu().numpy().tobytes())
    return hashed.hexdigest()


def _plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that a tensor of a quantised or sharded weight consists of; else itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _plain_tensors(getattr(tensor, name))]


def _codebooks(cache: TurboQuantCache) -> str:
    """What codes of the cache's layers stand for: signs, levels and steps of all of them."""
    hashed = hashlib.sha256()
    host = cache.packed[0].constants.on(torch.device("cpu"))
    for tables in host.tables.values():
        for tensor in tables._replace(center=None):
            if tensor is not None:
                hashed.update(tensor.numpy().tobytes())
    return hashed.hexdigest()


# ---- the tensors of a layer


def _tensor_name(layer: int, part: str) -> str:
    return f"layers.{layer}.{part}"


def _tensors_of(layer: TurboQuantLayer) -> dict[str, Tensor]:
    """What the layer holds of the tokens, by the names in the file."""
    sequences = layer.sequences
    found = {}
    if sequences.encoded:
        found["pages"] = _held_pages(layer)
        if layer.ring is not None:
            found["tail"] = _held_tail(layer)
        if sequences.learned_center:
            found["center"] = on_host(layer.tables.center)
    else:
        # behind these columns are tokens that were cropped, or of a forward that has failed
        waiting = (x[:, :, : sequences.columns] for x in layer.waiting)
        found["keys"], found["values"] = map(on_host, waiting)
    return {_tensor_name(layer.index, part): tensor for part, tensor in found.items()}


def _held_pages(layer: TurboQuantLayer) -> Tensor:
    """[batch, pages in use, ...], zeros in all that belongs to no token."""
    sequences, size = layer.sequences, layer.config.page_size
    pages = layer.paged.pages.unflatten(0, (sequences.rows, -1))
    used = sequences.pages_in_use(pages.shape[1], layer.thinned)
    held = on_host(pages[: sequences.batch, :used])
    for row, length in enumerate(sequences.lengths(layer.thinned)):
        whole, inside = divmod(length, size)
        first, last = _written_pages(layer, row)
        around = max(1, last - first + 1)
        for place in range(held.shape[1]):
            page = place + max(0, last - place) // around * around  # the newest one there
            if page == whole and inside:
                _keep_tokens(held[row, place], layer.config, inside)
            elif page >= whole:
                held[row, place] = 0
    return held


def _written_pages(layer: TurboQuantLayer, row: int) -> tuple[int, int]:
    """First and last page of a sequence that the layer holds, tokens taken back included."""
    sequences, window = layer.sequences, layer.sliding_window
    last = -(-sequences.places[layer.thinned].stored[row] // layer.config.page_size) - 1
    return (max(0, last - sequences.pages_of_window(window) + 1) if window else 0), last


def _keep_tokens(page: Tensor, config: AnyConfig, count: int) -> None:
    """Zeros behind the first tokens of a page, whatever form it has."""
    if isinstance(config, UncompressedLatents):
        page[count:] = 0
    else:
        page *= _bytes_of_tokens(config, count)


def _bytes_of_tokens(config: CacheConfig | LatentConfig, count: int) -> Tensor:
    """1 for each byte of a record that belongs to its first tokens: uint8 [record_bytes]."""
    used = np.zeros(config.record_bytes, dtype=np.uint8)
    for token in range(count):
        if isinstance(config, LatentConfig):
            used[latent_own_bytes(config.record, token)] = 1
        else:
            used[own_bytes(config.record, token)] = 1
    return torch.from_numpy(used)


def _held_tail(layer: TurboQuantLayer) -> Tensor:
    """[batch, ...] of the layer's ring_shape, zeros in all rows that hold no token.

    A prompt longer than a window leaves out the rows of tokens whose pages it leaves out.
    """
    sequences = layer.sequences
    rings = sequences.places[layer.thinned].rings
    held = on_host(layer.paged.ring[: sequences.batch])
    by_row = held if held.dim() == 3 else held.transpose(1, 2)  # [batch, rows, ...]
    for row, length in enumerate(sequences.lengths(layer.thinned)):
        first = rings.first[row]
        pages = held_positions(length, first, rings.sinks) // layer.config.page_size
        free = np.ones(by_row.shape[1], dtype=bool)
        free[rings.rows(length, first)[pages >= _written_pages(layer, row)[0]]] = False
        by_row[row, torch.from_numpy(free)] = 0
    return held


# ---- reading


@dataclass(frozen=True)
class _Saved:
    """What a file says, checked as far as that takes no model."""

    config: AnyConfig
    configs: dict[int, AnyConfig]
    max_batch_size: int
    max_cache_len: int | None
    max_q_len: int
    static: bool
    center: str
    windows: list[int | None]
    batch: int
    columns: int
    pads: list[int]
    keep: float
    evict: str
    evicted: list[int]
    prompt_end: int
    places: list[tuple[list[int], list[int]]]
    encoded: bool
    layers: dict[int, tuple[int, torch.dtype]]
    states: dict[int, Any]

    @classmethod
    def of(cls, values: dict[str, Any]) -> _Saved:
        """From the JSON of a file.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: it says something else.
        """
        values = {field.name: values[field.name] for field in fields(cls)}
        for name, read in (("configs", _config_of), ("layers", _layer_of), ("states", dict)):
            values[name] = {int(index): read(x) for index, x in values[name].items()}
        values["config"] = _config_of(values["config"])
        found = cls(**values)
        found.check_types()
        if not found.fits():
            raise ValueError("its numbers do not fit together")
        return found

    def check_types(self) -> None:
        """Raises a TypeError or ValueError unless every value is one that `save` writes."""
        single = ("max_batch_size", "max_q_len", "batch", "columns", "prompt_end")
        numbers = [getattr(self, name) for name in single]
        numbers += [*self.pads, *self.evicted, *(heads for heads, _ in self.layers.values())]
        numbers += [n for stored, first in self.places for n in (*stored, *first)]
        if self.max_cache_len is not None:
            numbers.append(self.max_cache_len)
        for number in numbers:
            check_whole(number=number)
            if number >= _MOST:
                raise ValueError(f"it has the number {number}")
        if not (type(self.static) is type(self.encoded) is bool and isinstance(self.evict, str)):
            raise TypeError("static, encoded or evict is of another type")
        Eviction(self.keep, Eviction().evict if self.evict == _OWN_POLICY else self.evict)

    def lengths(self, thinned: bool) -> list[int]:
        """Tokens of every sequence; thinned: in layers that have evicted some.

        A cache that was cropped may end within the padding of a sequence.
        """
        pairs = zip(self.pads, self.evicted, strict=True)
        return [max(0, self.columns - pad - thinned * evicted) for pad, evicted in pairs]

    def fits(self) -> bool:
        """Whether the numbers can be those of one cache."""
        return (
            1 <= self.batch <= self.max_batch_size
            and len(self.pads) == len(self.evicted) == self.batch
            and min(self.pads + self.evicted) >= 0
            and max(self.lengths(thinned=False)) >= 1
            and self.prompt_end >= 0
            and len(self.places) == 1 + (self.keep < 1)
            and all(self._fits(bool(i), *places) for i, places in enumerate(self.places))
            and self.center in ("auto", "mean", "given", "none")
            and len(self.layers) > 0
            and min(heads for heads, _ in self.layers.values()) >= 1
            and not (self.static and not self.encoded)
        )

    def _fits(self, thinned: bool, stored: list[int], ring_first: list[int]) -> bool:
        lengths = self.lengths(thinned)
        return (
            len(stored) == len(ring_first) == self.batch
            and all(n <= m or not self.encoded for n, m in zip(lengths, stored, strict=True))
            and all(0 <= m <= n for n, m in zip(lengths, ring_first, strict=True))
        )


def _config_of(values: dict[str, Any]) -> AnyConfig:
    values = dict(values)
    kind = _CONFIGS[values.pop("kind")]
    if "rope_dtype" in values:
        values["rope_dtype"] = FLOATS_BY_NAME[values["rope_dtype"]]
    return kind(**values)


def _layer_of(values: list[Any]) -> tuple[int, torch.dtype]:
    heads, dtype = values
    return heads, FLOATS_BY_NAME[dtype]


def load(
    kind: type[Kind],
    path: str | os.PathLike[str],
    model: nn.Module,
    max_batch_size: int | None,
    max_cache_len: int | None,
    evict: Policy | None,
) -> Kind:
    """See TurboQuantCache.load."""
    model = unwrapped(model)
    with _files.opened(path, _KIND, FILE_FORMAT) as file:
        metadata = file.metadata()
        saved = _parsed(path, metadata)
        _check_model(path, metadata, saved, model)
        sizes = {"max_batch_size": max_batch_size, "max_cache_len": max_cache_len}
        sizes = {name: n for name, n in sizes.items() if n is not None}
        check_whole(**sizes)
        saved = replace(saved, **sizes)
        _check_room(saved)
        cache = _empty(kind, path, saved, model, file, evict)
        try:
            _check_contents(path, metadata, saved, cache, set(file.keys()))
            _fill(cache, saved, file.get_tensor, _devices(model))
        except BaseException:
            cache.detach()
            raise
        return cache


def _parsed(path: str | os.PathLike[str], metadata: dict[str, str]) -> _Saved:
    values = _files.told(path, _KIND, metadata, "cache")
    try:
        version = values["format_version"]
        if version == FORMAT_VERSION:
            return _Saved.of(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _files.damaged(path, _KIND, repr(error)) from error
    raise ValueError(
        f"{path} holds pages of format version {version}, this torch_turboquant reads version "
        f"{FORMAT_VERSION}: run the prompt and save it again"
    )


def _check_model(
    path: str | os.PathLike[str], metadata: dict[str, str], saved: _Saved, model: nn.Module
) -> None:
    windows = layer_windows(model)  # first of all refuses what is not supported
    expected = _shape_of(centers.fingerprint(model))
    if wrong := differences(_files.told(path, _KIND, metadata, "model"), expected):
        raise ValueError(f"{path} holds a cache of another model: {wrong}")
    if saved.windows != windows:
        raise ValueError(f"{path} holds a cache of a model with other sliding windows")
    decoder: Any = model
    if metadata.get("weights") != weights_digest(decoder.get_decoder()):
        raise ValueError(
            f"{path} holds a cache of another model: one of the same shape with other weights, or "
            "with the same in another dtype"
        )


def _check_room(saved: _Saved) -> None:
    longest = max(saved.lengths(saved.keep < 1))
    if saved.batch > saved.max_batch_size:
        raise ValueError(
            f"{saved.batch} sequences do not fit into max_batch_size={saved.max_batch_size}"
        )
    if saved.max_cache_len and longest > saved.max_cache_len:
        raise ValueError(f"{longest} tokens do not fit into max_cache_len={saved.max_cache_len}")


def _empty(
    kind: type[Kind],
    path: str | os.PathLike[str],
    saved: _Saved,
    model: nn.Module,
    file: Any,
    evict: Policy | None,
) -> Kind:
    """The cache before it has read anything, attached."""
    policy: str | Policy = saved.evict
    if policy == _OWN_POLICY:
        if evict is None:
            raise ValueError(
                f"{path} holds a cache that was made with a policy of its own, which a file cannot "
                "hold: give it as evict="
            )
        policy = evict
    elif evict is not None:
        raise ValueError(
            f"{path} holds a cache that was made with evict={policy!r}: leave evict= out, which is "
            "for a cache with a policy of its own"
        )
    center: Any = saved.center
    if center == "given":
        center = {index: file.get_tensor(_tensor_name(index, "center")) for index in saved.layers}
    presets = [saved.configs.get(index) for index in range(len(saved.windows))]
    return kind(
        model,
        saved.config,
        max_batch_size=saved.max_batch_size,
        max_cache_len=saved.max_cache_len,
        max_q_len=saved.max_q_len,
        center=center,
        layer_presets=presets if saved.configs else None,
        static=saved.static,
        keep=saved.keep,
        evict=policy,
    )


def _check_contents(
    path: str | os.PathLike[str],
    metadata: dict[str, str],
    saved: _Saved,
    cache: TurboQuantCache,
    names: set[str],
) -> None:
    """Raises unless the file has what such a cache holds, in codes that mean the same here."""
    if metadata.get("codebooks") != _codebooks(cache):
        raise ValueError(
            f"{path} was written by torch_turboquant {metadata.get('version')} with other "
            "codebooks: run the prompt and save it again"
        )
    packed = [layer.index for layer in cache.packed]
    parts = ["keys", "values"]
    if saved.encoded:
        parts = ["pages", "tail"] if saved.config.has_tail else ["pages"]
    if saved.center == "given" or (saved.encoded and saved.center != "none"):
        parts.append("center")
    expected = {_tensor_name(index, part) for index in packed for part in parts}
    found = {name for name in names if ".state." not in name}
    if found != expected or sorted(saved.layers) != packed:
        lacks, more = sorted(expected - found), sorted(found - expected)
        raise _files.damaged(path, _KIND, f"it lacks {lacks} and has {more} too much")
    others = [index for index in range(len(cache.layers)) if index not in packed]
    if sorted(saved.states) != others:
        raise _files.damaged(
            path, _KIND, f"it has states of layers {sorted(saved.states)}, expected {others}"
        )


def _devices(model: nn.Module) -> dict[int, torch.device]:
    """Where the layers of the model run, by their index."""
    decoder: Any = model
    found = {}
    for module in decoder.get_decoder().modules():
        parameter = next(module.parameters(), None)
        if hasattr(module, "layer_idx") and parameter is not None:
            found[module.layer_idx] = parameter.device
    return found


def _fill(
    cache: TurboQuantCache,
    saved: _Saved,
    tensor: Callable[[str], Tensor],
    devices: dict[int, torch.device],
) -> None:
    """Puts what was saved into a new cache. tensor: gives those of the file by their names."""
    sequences, batch = cache.sequences, saved.batch
    for index, state in saved.states.items():
        restore_state(cache.layers[index], index, state, tensor, devices[index])
    for layer in cache.packed:
        heads, dtype = saved.layers[layer.index]
        holds = heads, dtype, devices[layer.index]
        if holds != (layer.kv_heads, layer.dtype, layer.device) or layer.tables is None:
            layer.prepare(*holds)
        layer.check_center(heads, getattr(layer.config, "head_dim", 0))
        layer.is_initialized = True
    sequences.batch, sequences.columns, sequences.pads = batch, saved.columns, saved.pads
    sequences.evicted, sequences.prompt_end = saved.evicted, saved.prompt_end
    for places, (stored, first) in zip(sequences.places.values(), saved.places, strict=True):
        places.stored[:batch], places.rings.first[:batch] = stored, first
    sequences.encoded = saved.encoded
    sequences.center_known = saved.encoded or not sequences.learned_center
    if not sequences.max_len:
        for thinned, places in sequences.places.items():
            places.grow(max(sequences.lengths(thinned)), begun=False)
    sequences.restore_windows()
    sequences.stepping = sequences.can_step()
    for layer in cache.packed:
        if saved.encoded and sequences.learned_center:
            layer.take_center(_read_center(layer, saved, tensor))
        # What the file has is looked at before memory is taken for as much as it says.
        if saved.encoded:
            held = _read_held(layer, tensor)
        else:
            layer.waiting = _read_waiting(layer, tensor)
        if saved.encoded or sequences.max_len:
            allocate([layer])  # one by one, because a growing cache gives pages back one by one
        if saved.encoded:
            _put(layer, *held)
    cache.lifecycle.states.rows = batch
    sequences.push()


def _read(
    tensor: Callable[[str], Tensor], layer: TurboQuantLayer, part: str, shape: Any, *dtypes: Any
) -> Tensor:
    """A tensor of the file, of this shape and one of these types."""
    found = tensor(_tensor_name(layer.index, part))
    if tuple(found.shape) != tuple(shape) or found.dtype not in dtypes:
        raise ValueError(
            f"the file of the cache is damaged: {part} of layer {layer.index} is {found.dtype} "
            f"{list(found.shape)}, expected {dtypes[0]} {list(shape)}"
        )
    return found


def _read_center(layer: TurboQuantLayer, saved: _Saved, tensor: Callable[[str], Tensor]) -> Tensor:
    parts = () if saved.center == "mean" else (3,)
    shape = (*parts, layer.kv_heads, layer.config.head_dim)
    return _read(tensor, layer, "center", shape, torch.float32).to(layer.device)


def _read_held(
    layer: TurboQuantLayer, tensor: Callable[[str], Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Pages of the sequences, and their tail if the layer has one; it need not have memory yet."""
    sequences, owned = layer.sequences, layer.owned_pages
    (_, *page), of_pages = layer.wanted_pages(owned)
    used = sequences.pages_in_use(owned, layer.thinned)
    pages = _read(tensor, layer, "pages", (sequences.batch, used, *page), of_pages)
    if not layer.config.has_tail:
        return pages, None
    rows = layer.ring_shape()[1:]
    return pages, _read(tensor, layer, "tail", (sequences.batch, *rows), layer.dtype)


def _put(layer: TurboQuantLayer, pages: Tensor, tail: Tensor | None) -> None:
    """Into the memory that the layer has."""
    into = layer.paged.pages.unflatten(0, (layer.sequences.rows, -1))
    into[: pages.shape[0], : pages.shape[1]] = pages
    if tail is not None:
        layer.paged.ring[: len(tail)] = tail


def _read_waiting(layer: TurboQuantLayer, tensor: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values that wait for their center. Under autocast keys are wider than values."""
    sequences = layer.sequences
    shape = sequences.batch, layer.kv_heads, sequences.columns, layer.config.head_dim
    keys = _read(tensor, layer, "keys", shape, layer.dtype, *FLOATS_BY_NAME.values())
    values = _read(tensor, layer, "values", shape, layer.dtype)
    return keys.to(layer.device), values.to(layer.device)
