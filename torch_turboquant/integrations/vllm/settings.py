"""What a user writes: --additional-config '{"turboquant": {...}}', checked and frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_turboquant.integrations.engine.settings import KEY, EngineSettings, read_object
from torch_turboquant.latent import LATENT_PRESETS, LatentConfig, latent_preset_of

DTYPE_PREFIX = "tq_"  # --kv-cache-dtype tq_<preset>


@dataclass(frozen=True)
class Settings(EngineSettings):
    """The settings of one engine. Each field is a key of additional_config["turboquant"].

    Presets may also be, for models with latent attention (MLA) alone, of latent.LATENT_PRESETS.

    Raises:
        TypeError: a value of another type.
        ValueError: an unknown preset, a number out of range.
    """

    learn: bool = True
    """Whether centers are learned from the first prompt where there is no file of them."""
    calibrate: bool = False
    """Whether the engine measures keys and queries, for a file of centers."""
    exact_steps: bool = True
    """Whether the tokens of a decode step are read exactly by the step itself, as those of a prompt
    always are. False: from their codes, as every later step reads them, so that speculative steps
    see what steps of one token would have seen."""
    window: int = 0
    """How many last tokens of a sequence stay exact."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window:
            raise ValueError(
                f"turboquant: window is {self.window}, supported: 0. The pages hold codes of all "
                "tokens; raise the bits instead (preset k8v4 or k8v8)"
            )

    def _check_preset(self, name: str) -> None:
        if name not in LATENT_PRESETS:
            super()._check_preset(name)

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
        name = self.choices(layers).get(layer, self.preset)
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


_TYPES = {
    "preset": str,
    "layers": Mapping,
    "centers": (str, type(None)),
    "learn": bool,
    "calibrate": bool,
    "seed": int,
    "exact_steps": bool,
    "first_token": str,
    "window": int,
}


def _check_other_names(entries: Mapping[Any, Any]) -> None:
    """Without our entry all is as by default, which nobody means who has misspelt it.

    Raises:
        ValueError: an entry that is ours by all appearances.
    """
    for name in entries:
        plain = re.sub(r"[^a-z]", "", str(name).lower()).removeprefix("torch")
        if plain == KEY or name == "preset":
            raise ValueError(
                f"turboquant: additional_config has {name!r}, which means nothing here: the "
                f'settings belong into its entry "{KEY}", {{"{KEY}": {{"preset": "k5v4u"}}}}'
            )


def parse(additional_config: Any, kv_cache_dtype: str = "auto") -> Settings:
    """The settings of an engine.

    Args:
        additional_config: vLLM's; only its entry "turboquant" is looked at, and it may have none.
        kv_cache_dtype: vLLM's; tq_<preset> names the preset.

    Raises:
        TypeError: a value of another type.
        ValueError: an unknown key or preset, or two presets; settings that are elsewhere.
    """
    entries = additional_config if isinstance(additional_config, Mapping) else {}
    if KEY not in entries:
        _check_other_names(entries)
    values = read_object(entries.get(KEY, {}), _TYPES)
    if kv_cache_dtype.startswith(DTYPE_PREFIX):
        named = kv_cache_dtype.removeprefix(DTYPE_PREFIX).replace("_", "-")
        if values.setdefault("preset", named) != named:
            raise ValueError(
                f"turboquant: --kv-cache-dtype {kv_cache_dtype} and preset {values['preset']!r} "
                "differ; give one of them"
            )
    return Settings(**values)
