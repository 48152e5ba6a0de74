"""The caches that are measured: uncompressed, a preset with changes, or a control, by name.

none                                    uncompressed
k4v4                                    a preset
k4v4:recent_window=0,center=none        the same with changes: any field of CacheConfig,
                                        center (auto, mean, none or a file of
                                        save_centers),
                                        boundary_layers, boundary_preset, and single layers:
k3v3:layers=0@k8v8+-1@k4v4              the first and the last layer in other presets
k3v3:layers=FILE.json                   the same from {"0": "k8v8", "-1": "k4v4"}
k4v4:keep=0.5,evict=keydiff             of the first forward's tokens a part (eviction.py)
kivi4                                   a control (controls.py)
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import Cache

from torch_turboquant.config import NAMED_PRESETS, PRESETS, CacheConfig, preset
from torch_turboquant.eval.controls import CONTROLS, ControlCache, is_control
from torch_turboquant.eviction import Eviction
from torch_turboquant.integrations.transformers import TurboQuantCache
from torch_turboquant.integrations.transformers.models import layer_windows

UNCOMPRESSED = "none"
CONTEXT = 8192  # tokens over which bytes that do not grow with the sequence are spread
_HALF = 2  # bytes of a 16-bit element

_FIELDS = {f.name: f.type for f in fields(CacheConfig) if f.name != "head_dim"}
_OPTIONS = {"center": "str | None", "layers": "str | None"}  # of for_model
_OPTIONS |= {"boundary_layers": "int", "boundary_preset": "str"}
_EVICTION = {"keep": "float", "evict": "str"}


@dataclass(frozen=True)
class Choice:
    """One cache to measure."""

    text: str  # as the user wrote it, without spaces
    name: str
    kind: str  # "uncompressed", "packed" or "control"
    changes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Choice:
        """The cache of a name in one of the forms at the top of this file.

        Raises:
            ValueError: another form; the text names what there is.
        """
        text = "".join(text.split())
        name, _, rest = text.partition(":")
        if name in PRESETS or name in NAMED_PRESETS:
            changes = dict(_change(name, part) for part in rest.split(",") if part)
            preset(name, 64, **{k: v for k, v in changes.items() if k in _FIELDS})  # checks values
            Eviction(**{k: v for k, v in changes.items() if k in _EVICTION})
            return cls(text, name, "packed", changes)
        if rest:
            raise ValueError(f"{text!r}: only presets ({', '.join(PRESETS)}) take changes")
        if name == UNCOMPRESSED:
            return cls(text, name, "uncompressed")
        if is_control(name):
            return cls(text, name, "control")
        raise ValueError(
            f"unknown cache {name!r}; there are {UNCOMPRESSED}, the presets {', '.join(PRESETS)} "
            f"and the controls {', '.join(CONTROLS)}"
        )

    def make(self, model: Any, **more: Any) -> Cache:
        """An empty cache of the model, for one sequence.

        more: further options of TurboQuantCache.for_model, for packed caches only.
        """
        if self.kind == "packed":
            options = {_ARGUMENTS.get(key, key): value for key, value in self.changes.items()}
            return TurboQuantCache.for_model(model, self.name, **options, **more)
        config = model.config.get_text_config(decoder=True)
        if self.kind == "control":
            return ControlCache(config, self.name)
        return DynamicCache(config=config)


_ARGUMENTS = {"layers": "layer_presets"}  # arguments of for_model that have another name there


def _layers(text: str) -> dict[int, str]:
    """{0: "k8v8", 1: "k4v4"} from "0@k8v8+1@k4v4", or from the name of a JSON file."""
    if text.endswith(".json"):
        try:
            found = json.loads(Path(text).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"layers={text} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f'layers={text} holds no layers: write {{"0": "k8v8"}} into it')
        pairs = list(found.items())
    else:
        pairs = [part.partition("@")[::2] for part in text.split("+")]
    if not all(isinstance(preset, str) and preset in PRESETS for _, preset in pairs):
        raise ValueError(f"layers={text}: write layer@preset, joined by +")
    try:
        return {int(layer): preset for layer, preset in pairs}
    except ValueError:
        raise ValueError(f"layers={text}: write layer@preset, joined by +") from None


def _change(name: str, part: str) -> tuple[str, Any]:
    key, equals, value = part.partition("=")
    types = _FIELDS | _OPTIONS | _EVICTION
    if not equals or key not in types:
        raise ValueError(f"{name}:{part}: write field=value; the fields are {', '.join(types)}")
    if value == "none" and types[key].endswith("None"):
        return key, None
    if key == "layers":
        return key, _layers(value)
    if types[key] == "float":
        try:
            return key, float(value)
        except ValueError:
            raise ValueError(f"{name}:{part}: write a number") from None
    if types[key] != "int":
        return key, value
    try:
        return key, int(value)
    except ValueError:
        raise ValueError(f"{name}:{part}: {key} is an integer") from None


def sizes(cache: Cache, model: Any, head_dim: int) -> dict[str, float]:
    """Bytes and bits of a cache that has been used.

    Returns:
        bytes_per_token: bytes that one more token adds in all layers, scales and padding included.
        bytes_per_token_8k: the same, plus everything that exists once (exact tokens, at 16 bits per
            element) spread over 8,192 tokens.
        bits_per_value, bits_per_value_8k: both, per channel of a key or value.
        bytes_8k: bytes of 8,192 tokens with everything included, where layers with a sliding window
            release the tokens that they no longer need, and others keep what eviction leaves of a
            prompt of so many.
    """
    windows = [window for window in layer_windows(model) if window is not None]
    held = [min(CONTEXT, window or CONTEXT) for window in windows]
    if isinstance(cache, TurboQuantCache):
        # as of a long text, be this one so short that nothing of it was encoded
        layers, size = cache.packed, cache.config.page_size
        grows = [layer.kv_heads * layer.config.record_bytes // size for layer in layers]
        rings = [math.prod(layer.ring_shape()) for layer in layers if layer.config.has_tail]
        once = sum(rings) * _HALF
        pages = [w and cache.sequences.pages_of_window(w) for w in windows]
        most = [layer.eviction.count(CONTEXT) if layer.thinned else CONTEXT for layer in layers]
        held = [min(m, n * size or m) for m, n in zip(most, pages, strict=True)]
        heads = [layer.kv_heads for layer in layers]
    elif isinstance(cache, ControlCache):
        heads = [layer.kv_heads for layer in cache.layers]
        grows = [layer.kv_heads * layer.token_bytes() for layer in cache.layers]
        once = cache.exact_bytes
    else:
        heads = [layer.keys.shape[1] for layer in cache.layers]
        grows = [2 * head_dim * n * _HALF for n in heads]  # whatever dtype this run has
        once = 0
    numbers = 2 * head_dim * sum(heads)
    whole = sum(grows) + once / CONTEXT
    return {
        "bytes_per_token": sum(grows),
        "bytes_per_token_8k": whole,
        "bits_per_value": 8 * sum(grows) / numbers,
        "bits_per_value_8k": 8 * whole / numbers,
        "bytes_8k": once + sum(n * tokens for n, tokens in zip(grows, held, strict=True)),
    }
