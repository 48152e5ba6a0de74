"""What a user writes: --additional-config '{"turboquant": {...}}', checked and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from torch_turboquant.config import CacheConfig, did_you_mean, find_preset, preset
from torch_turboquant.latent import LATENT_PRESETS, LatentConfig, latent_preset_of
from torch_turboquant.layer_choice import choices_by_layer, layer_configs

KEY = "turboquant"
FIRST_TOKEN = ("exact", "codes")
DTYPE_PREFIX = "tq_"  # --kv-cache-dtype tq_<preset>


@dataclass(frozen=True)
class Settings:
    """The settings of one engine. Each field is a key of additional_config["turboquant"].

    Raises:
        TypeError: a value of another type.
        ValueError: an unknown preset, a number out of range.
    """

    preset: str = "near-lossless"
    """Of all layers: a name of config.PRESETS or config.NAMED_PRESETS, or, for models with latent
    attention (MLA) alone, of latent.LATENT_PRESETS."""
    layers: tuple[tuple[int, str], ...] = ()
    """Layers with presets of their own; negative ones count from the end. Users write an object
    such as {"0": "k8v8", "-1": "k8v8"}."""
    centers: str | None = None
    """A file of centers; None: the one beside the model, if there is one."""
    learn: bool = True
    """Whether centers are learned from the first prompt where there is no file of them."""
    calibrate: bool = False
    """Whether the engine measures keys and queries, for a file of centers."""
    seed: int = 0
    """Of the random signs."""
    exact_steps: bool = True
    """Whether the tokens of a decode step are read exactly by the step itself, as those of a prompt
    always are. False: from their codes, as every later step reads them, so that speculative steps
    see what steps of one token would have seen."""
    first_token: str = "exact"
    """Whether the first token of a sequence is read "exact" or from its "codes", by all tokens."""
    window: int = 0
    """How many last tokens of a sequence stay exact."""

    def __post_init__(self) -> None:
        for name in (self.preset, *(name for _, name in self.layers)):
            if name not in LATENT_PRESETS:
                find_preset(name)
        replace(CacheConfig(64, 8, 8), seed=self.seed)  # checks it
        if self.first_token not in FIRST_TOKEN:
            raise ValueError(
                f"turboquant: first_token is {self.first_token!r}, supported: "
                f"{' and '.join(map(repr, FIRST_TOKEN))}"
            )
        if self.window:
            raise ValueError(
                f"turboquant: window is {self.window}, supported: 0. The pages hold codes of all "
                "tokens; raise the bits instead (preset k8v4 or k8v8)"
            )

    def config(self, head_dim: int) -> CacheConfig:
        """The configuration of layers that `layers` does not name, with some page size."""
        return preset(
            self.preset,
            head_dim,
            page_size=16,
            sink_tokens=0,
            recent_window=0,
            seed=self.seed,
        )

    def layer_config(self, head_dim: int, layer: int, layers: int) -> CacheConfig:
        """The configuration of one of a model's layers, with some page size.

        Raises:
            ValueError: `layers` names a layer that the model does not have, or one twice.
        """
        chosen = dict(self.layers)
        windows = [0] * layers
        return layer_configs(self.config(head_dim), windows, layer_presets=chosen)[layer]

    def latent_config(self, latent_dim: int, rope_dim: int, dtype: torch.dtype) -> LatentConfig:
        """The configuration of layers with latent attention that `layers` does not name.

        Args:
            latent_dim, rope_dim: of the layer.
            dtype: of the model, whose channels of the position stay in 16 bits.
        """
        return self._of_latents(self.preset, latent_dim, rope_dim, dtype)

    def latent_layer_config(
        self, latent_dim: int, rope_dim: int, dtype: torch.dtype, layer: int, layers: int
    ) -> LatentConfig:
        """The configuration of one of a model's layers, as layer_config."""
        chosen = choices_by_layer(dict(self.layers), layers)
        name = str(chosen.get(layer, self.preset))
        return self._of_latents(name, latent_dim, rope_dim, dtype)

    def _of_latents(
        self, name: str, latent_dim: int, rope_dim: int, dtype: torch.dtype
    ) -> LatentConfig:
        half = torch.float16 if dtype == torch.float16 else torch.bfloat16
        return latent_preset_of(
            name,
            latent_dim,
            rope_dim,
            sink_tokens=1 if self.first_token == "exact" else 0,
            recent_window=0,
            seed=self.seed,
            rope_dtype=half,
        )


_FIELDS = tuple(field.name for field in fields(Settings))
_TYPES = {"preset": str, "centers": (str, type(None)), "seed": int, "window": int}
_TYPES["first_token"] = str
_TYPES |= {"exact_steps": bool, "learn": bool, "calibrate": bool, "layers": Mapping}


def parse(additional_config: Any, kv_cache_dtype: str = "auto") -> Settings:
    """The settings of an engine.

    Args:
        additional_config: vLLM's; only its entry "turboquant" is looked at, and it may have none.
        kv_cache_dtype: vLLM's; tq_<preset> names the preset.

    Raises:
        TypeError: a value of another type.
        ValueError: an unknown key or preset, or two presets.
    """
    given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise TypeError(
            f'turboquant: expected an object such as {{"preset": "k5v4u"}}, got {given!r}'
        )
    for key in given:
        if key not in _FIELDS:
            raise ValueError(
                f"turboquant: unknown key {key!r}{did_you_mean(key, _FIELDS)}; the keys are "
                f"{', '.join(_FIELDS)}"
            )
    for key, value in given.items():
        right = isinstance(value, _TYPES[key]) and not (_TYPES[key] is int and value is True)
        if not right:
            raise TypeError(f"turboquant: {key} is {value!r}, of type {type(value).__name__}")
    values = dict(given)
    if kv_cache_dtype.startswith(DTYPE_PREFIX):
        named = kv_cache_dtype.removeprefix(DTYPE_PREFIX).replace("_", "-")
        if values.setdefault("preset", named) != named:
            raise ValueError(
                f"turboquant: --kv-cache-dtype {kv_cache_dtype} and preset {values['preset']!r} "
                "differ; give one of them"
            )
    values["layers"] = tuple(_layer_numbers(values.get("layers", {})))
    return Settings(**values)


def _layer_numbers(layers: Mapping[Any, Any]) -> list[tuple[int, str]]:
    found = []
    for key, name in layers.items():
        try:
            number = int(key)
        except ValueError:
            raise ValueError(
                f'turboquant: layers names {key!r}, expected numbers such as "0" or "-1"'
            ) from None
        if not isinstance(name, str):
            raise TypeError(f"turboquant: layer {key} has {name!r}, expected the name of a preset")
        found.append((number, name))
    return found
