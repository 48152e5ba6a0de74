"""The settings that every engine takes, read from an object of JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch_turboquant.config import CacheConfig, did_you_mean, find_preset
from torch_turboquant.config import preset as make_config
from torch_turboquant.layer_choice import by_number, layer_configs

KEY = "turboquant"
FIRST_TOKEN = ("exact", "codes")
NO_CENTERS = "none"


@dataclass(frozen=True)
class EngineSettings:
    """Each field is a key of the object that users write.

    Raises:
        ValueError: an unknown preset, a number out of range.
    """

    preset: str = "near-lossless"
    """Of all layers: a name of config.PRESETS or config.NAMED_PRESETS."""
    layers: tuple[tuple[int, str], ...] = ()
    """Layers with presets of their own; negative ones count from the end. Users write an object
    such as {"0": "k8v8", "-1": "k8v8"}."""
    centers: str | None = None
    """A file of centers; None: the one beside the model, if there is one; "none": no file is looked
    for."""
    seed: int = 0
    """Of the random signs."""
    first_token: str = "exact"
    """Whether the first token of a sequence is read "exact" or from its "codes", by all tokens."""

    def __post_init__(self) -> None:
        for name in (self.preset, *(name for _, name in self.layers)):
            self._check_preset(name)
        replace(CacheConfig(64, 8, 8), seed=self.seed)  # checks it
        if self.first_token not in FIRST_TOKEN:
            raise ValueError(
                f"turboquant: first_token is {self.first_token!r}, supported: "
                f"{' and '.join(map(repr, FIRST_TOKEN))}"
            )

    @property
    def presets(self) -> str:
        """The presets, as the log names them."""
        own = ", ".join(f"{layer}: {name}" for layer, name in self.layers)
        return f"preset {self.preset}{f' (layers {own})' if own else ''}"

    def config(self, head_dim: int) -> CacheConfig:
        """The configuration of layers that `layers` does not name, with some page size."""
        return self._config(head_dim, sink_tokens=0, recent_window=0)

    def layer_config(self, head_dim: int, layer: int, layers: int) -> CacheConfig:
        """The configuration of one of a model's layers, with some page size.

        Raises:
            ValueError: `layers` names a layer that the model does not have, or one twice.
        """
        chosen = self.choices(layers)
        windows = [0] * layers
        return layer_configs(self.config(head_dim), windows, layer_presets=chosen)[layer]

    def choices(self, layers: int) -> dict[int, str]:
        """The presets of `layers`, by layers from 0 to layers - 1.

        Raises:
            ValueError: as in layer_config.
        """
        return by_number(self.layers, layers, 'turboquant: "layers"')

    def _check_preset(self, name: str) -> None:
        """Raises ValueError for a name that is no preset."""
        find_preset(name)

    def _config(self, head_dim: int, **fields: int) -> CacheConfig:
        return make_config(self.preset, head_dim, page_size=16, seed=self.seed, **fields)


def read_object(given: Any, types: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a user's object has, their keys and types checked.

    Args:
        given: from JSON.
        types: of every key that there is; `layers` is read from an object.

    Raises:
        TypeError: a value of another type.
        ValueError: an unknown key.
    """
    if not isinstance(given, Mapping):
        raise TypeError(
            f'turboquant: expected an object such as {{"preset": "k5v4u"}}, got {given!r}'
        )
    for key in given:
        if key not in types:
            raise ValueError(
                f"turboquant: unknown key {key!r}{did_you_mean(key, [*types])}; the keys are "
                f"{', '.join(types)}"
            )
    for key, value in given.items():
        fits = types[key] is bool if isinstance(value, bool) else isinstance(value, types[key])
        if not fits:  # to Python, true and false are integers
            raise TypeError(f"turboquant: {key} is {value!r}, of type {type(value).__name__}")
    values = dict(given)
    values["layers"] = tuple(_layer_numbers(values.get("layers", {})))
    return values


def _layer_numbers(layers: Mapping[Any, Any]) -> list[tuple[int, str]]:
    found = []
    for key, name in layers.items():
        number = str(key)
        if isinstance(key, bool) or not re.fullmatch(r"-?\d+", number):
            raise ValueError(
                f'turboquant: layers names {key!r}, expected numbers such as "0" or "-1"'
            )
        if not isinstance(name, str):
            raise TypeError(f"turboquant: layer {key} has {name!r}, expected the name of a preset")
        found.append((int(number), name))
    return found
