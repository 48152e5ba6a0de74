"""TurboQuantConfig: how the weights of a model are packed, and the record of what was done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_turboquant._version import __version__
from torch_turboquant.format import WEIGHT_ROWS
from torch_turboquant.weights import WeightFormat

METHOD = "torch_turboquant"
"""quant_method in config.json: the package to import, which transformers names where it is not."""
FILE_FORMAT = "torch_turboquant weights 1"

_FIELDS = ("bits", "grid", "sub", "group")
_RECORD = ("left_alone", "outputs", "scaled", "calibration")


class TurboQuantConfig(QuantizationConfigMixin):
    """Weights of linear layers in 4 or 8 bits, multiplied as they are stored.

        model = AutoModelForCausalLM.from_pretrained(name, quantization_config=TurboQuantConfig())

    Args:
        bits, grid, sub, group: of WeightFormat; None: its defaults.
        skip: names of linear layers that stay as they are, or patterns of names ("*.down_proj").
        layers: changes of these four for some layers, by name or pattern: {"lm_head": {"bits": 8}}.
            The first pattern that fits a layer counts. What a change does not name stays as it is,
            but other bits have their own grid and sub.
        record: what a saved model says of itself; no argument of users.

    Attributes:
        left_alone: after loading, name and reason of every module with a matrix that is not packed.
        outputs: of packed linear layers that do not fill their last tile; bytes do not say it.
        scaled: whether the layers have channel scales.
        calibration: what `quantize` was given and did; None for a model that was packed without.

    Raises:
        TypeError: skip, layers or parts of a record of another type.
        ValueError: a combination that WeightFormat refuses.
    """

    def __init__(
        self,
        bits: int | None = None,
        grid: str | None = None,
        sub: int | None = None,
        group: int | None = None,
        *,
        skip: Sequence[str] = (),
        layers: Mapping[str, Mapping[str, Any]] | None = None,
        **record: Any,
    ) -> None:
        self.quant_method = METHOD
        if unknown := set(record) - set(_RECORD):
            raise ValueError(
                f"TurboQuantConfig has no {', '.join(sorted(unknown))}; it has "
                f"{', '.join([*_FIELDS, 'skip', 'layers'])}"
            )
        given = {"bits": bits, "grid": grid, "sub": sub, "group": group}
        self._set_format(WeightFormat(**{n: v for n, v in given.items() if v is not None}))
        self.skip = _names("skip", [skip] if isinstance(skip, str) else skip or ())
        self.layers = _changes(layers or {})
        self.left_alone: dict[str, str] = _recorded(record, "left_alone", str)
        self.outputs: dict[str, int] = _recorded(record, "outputs", int)
        self.scaled: bool = record.get("scaled", False)
        self.calibration: dict[str, Any] | None = record.get("calibration")
        if not isinstance(self.scaled, bool):
            raise TypeError(f"scaled must be true or false, got {self.scaled!r}")
        if not isinstance(self.calibration, dict | None):
            raise TypeError(f"calibration must be an object or null, got {self.calibration!r}")
        self.layer_formats()  # refuses what does not exist before a model is loaded

    def _set_format(self, form: WeightFormat) -> None:
        self.bits, self.grid, self.sub, self.group = form.bits, form.grid, form.sub, form.group

    def weight_format(self) -> WeightFormat:
        """Of the layers that `layers` does not name."""
        return WeightFormat(**{name: getattr(self, name) for name in _FIELDS})

    def layer_formats(self) -> dict[str, WeightFormat]:
        """The formats of `layers`, by pattern.

        Raises:
            ValueError: a change of something else, or one that WeightFormat refuses.
        """
        found = {}
        for pattern, changes in self.layers.items():
            if unknown := set(changes) - set(_FIELDS):
                raise ValueError(
                    f"layers[{pattern!r}] changes {', '.join(sorted(unknown))}; it can change "
                    f"{', '.join(_FIELDS)}"
                )
            base = asdict(self.weight_format())
            if changes.get("bits", self.bits) != self.bits:  # whose grid and sub are its own
                base = {"group": self.group}
            found[pattern] = WeightFormat(**{**base, **changes})
        return found

    def record(
        self,
        packed: Mapping[str, WeightFormat],
        left: Mapping[str, str],
        outputs: Mapping[str, int],
        scaled: bool,
    ) -> None:
        """Replaces patterns by what they chose, so that a file needs no rule to be read.

        outputs: of packed linear layers.
        """
        default = self.weight_format()
        self.layers = {name: asdict(form) for name, form in packed.items() if form != default}
        self.outputs = {name: n for name, n in outputs.items() if n % WEIGHT_ROWS}
        self.left_alone, self.skip, self.scaled = dict(left), [], scaled

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, as config.json has it."""
        return {**super().to_dict(), "format": FILE_FORMAT, "version": __version__}

    @classmethod
    def from_dict(
        cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """The configuration of a saved model.

        Raises:
            ValueError: it was written in another format.
        """
        values = dict(config_dict)
        found, version = values.pop("format", FILE_FORMAT), values.pop("version", None)
        values.pop("quant_method", None)
        if found != FILE_FORMAT:
            raise ValueError(
                f"the weights of this model were packed by torch_turboquant {version} in another "
                f"format, {found!r}; this version reads {FILE_FORMAT!r}: pack the model again, or "
                "install that version"
            )
        return super().from_dict(values, return_unused_kwargs, **kwargs)


def _recorded(record: Mapping[str, Any], name: str, kind: type) -> dict[str, Any]:
    """What a record has by the names of layers, all of one type.

    Raises:
        TypeError: it has something else.
    """
    found = record.get(name, {})
    if not (isinstance(found, dict) and all(type(x) is kind for x in found.values())):
        raise TypeError(f"{name} must be {kind.__name__} by names of layers, got {found!r}")
    return dict(found)


def _names(argument: str, names: Any) -> list[str]:
    """A list of names of layers, or patterns of names."""
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} must be names of layers, got {names!r}")
    return list(names)


def _changes(layers: Any) -> dict[str, dict[str, Any]]:
    """Changes of some layers, by name or pattern."""
    fits = isinstance(layers, Mapping) and all(isinstance(c, Mapping) for c in layers.values())
    if not fits:
        raise TypeError(
            f"layers must be changes by names, as {{'lm_head': {{'bits': 8}}}}, got {layers!r}"
        )
    return {
        name: {field: _plain(value) for field, value in layers[name].items()}
        for name in _names("layers", layers)
    }


def _plain(value: Any) -> Any:
    """An int in place of an integer of NumPy, as JSON takes no others."""
    return int(value) if isinstance(value, np.integer) else value
