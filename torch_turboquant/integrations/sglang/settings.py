"""What a user writes: --attention-backend turboquant[:PRESET], and the rest as JSON.

SGLang has no flag for the settings of plug-ins. --json-model-override-args takes any object, so
that the settings are its entry "turboquant".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_turboquant.config import NAMED_PRESETS, PRESETS, CacheConfig
from torch_turboquant.integrations.engine.settings import KEY, EngineSettings, read_object

NAME = "turboquant"
BACKEND_NAMES = (NAME, *(f"{NAME}:{preset}" for preset in (*PRESETS, *NAMED_PRESETS)))


@dataclass(frozen=True)
class Settings(EngineSettings):
    """The settings of one engine. Each field is a key of the object "turboquant".

    Raises:
        TypeError: a value of another type.
        ValueError: an unknown preset, a number out of range.
    """

    window: int | None = None
    """How many last tokens of a sequence stay exact; None: as the preset has it, usually 64."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 0:
            raise ValueError(f"turboquant: window is {self.window}, supported: 0 and more")
        super().__post_init__()

    def config(self, head_dim: int) -> CacheConfig:
        """The configuration of layers that `layers` does not name, with some page size."""
        window = {} if self.window is None else {"recent_window": self.window}
        return self._config(head_dim, sink_tokens=int(self.first_token == "exact"), **window)


_TYPES = {
    "preset": str,
    "layers": Mapping,
    "centers": (str, type(None)),
    "seed": int,
    "first_token": str,
    "window": (int, type(None)),
}


def is_ours(backend: str | None) -> bool:
    """Whether the name of an attention backend means this plug-in, with whatever preset."""
    return backend is not None and backend.partition(":")[0] == NAME


def backends_of(server_args: Any) -> tuple[str | None, str | None]:
    """The attention backends of prefill and of decode."""
    both = server_args.attention_backend
    prefill = server_args.prefill_attention_backend or both
    return prefill, server_args.decode_attention_backend or both


def parse(backend: str, override_args: str | None) -> Settings:
    """The settings of an engine.

    Args:
        backend: the value of --attention-backend: turboquant, or turboquant:PRESET.
        override_args: the text of --json-model-override-args; only its entry "turboquant" is looked
            at, and it may have none.

    Raises:
        TypeError: a value of another type.
        ValueError: an unknown key or preset, or two presets.
    """
    given = given_settings(override_args)
    values = read_object({} if given is None else given, _TYPES)
    named = backend.partition(":")[2]
    if named and values.setdefault("preset", named) != named:
        raise ValueError(
            f"turboquant: --attention-backend {backend} and preset {values['preset']!r} differ; "
            "give one of them"
        )
    return Settings(**values)


def given_settings(override_args: str | None) -> Any:
    """The entry "turboquant" of --json-model-override-args; None: there is none."""
    given = json.loads(override_args or "{}")
    return given.get(KEY) if isinstance(given, Mapping) else None
