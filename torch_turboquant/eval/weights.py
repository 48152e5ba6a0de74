"""The packed weights that are measured, by name, each with a cache or without one.

4                               weights of 4 bits, the cache uncompressed
8:skip=lm_head                  with changes: grid, sub, group, skip (one name or pattern)
4:calibrate=train.txt           scaled and rounded for a text; tokens=N: of how much of it
4+k5v4u                         and one of the caches of caches.py
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_turboquant.eval.caches import UNCOMPRESSED, Choice
from torch_turboquant.eval.options import read_text
from torch_turboquant.integrations.transformers import TurboQuantConfig, quantize
from torch_turboquant.integrations.transformers.weights.pack import check_quantize

_TYPES = {"grid": str, "sub": int, "group": int, "skip": str, "calibrate": Path, "tokens": int}


@dataclass(frozen=True)
class WeightChoice:
    """Packed weights to measure, and a cache."""

    text: str  # as the user wrote it, without spaces
    config: TurboQuantConfig
    cache: Choice
    options: dict[str, Any] = field(default_factory=dict)  # calibrate, tokens

    @classmethod
    def parse(cls, text: str) -> WeightChoice:
        """The weights of a name in one of the forms at the top of this file.

        Raises:
            ValueError: another form; the text names what there is. Or no file has the text that
                weights are calibrated with.
        """
        text = "".join(text.split())
        weights, _, cache = text.partition("+")
        bits, _, rest = weights.partition(":")
        if not bits.isdecimal():
            raise ValueError(f"{text!r}: write the bits of weights first, such as 4 or 4+k5v4u")
        changes = dict(_change(text, part) for part in rest.split(",") if part)
        options = {n: changes.pop(n) for n in ("calibrate", "tokens") if n in changes}
        if "tokens" in options and "calibrate" not in options:
            raise ValueError(f"{text!r}: tokens belong to calibrate=FILE")
        if "calibrate" in options and not options["calibrate"].is_file():
            raise ValueError(f"{text!r}: there is no file {options['calibrate']}")
        skip = [changes.pop("skip")] if "skip" in changes else []
        config = TurboQuantConfig(int(bits), skip=skip, **changes)
        return cls(f"w{text}", config, Choice.parse(cache or UNCOMPRESSED), options)

    def check(self, model: Any, tokenizer: Any) -> None:
        """Refuses what `packed` refuses about model and text, before caches are measured.

        Raises:
            ValueError: the model cannot be packed with these formats, or is packed already; or the
                text is no text, or too short.
        """
        try:
            check_quantize(model, self.config, tokenizer=tokenizer, **self._text())
        except ValueError as error:
            asked = self.text.removeprefix("w")
            raise ValueError(f"this model cannot have --weights {asked}: {error}") from error

    def packed(self, model: Any, tokenizer: Any) -> tuple[Any, dict[str, Any]]:
        """A copy of the model with these weights, and what a row says of them.

        Raises:
            ValueError: the model cannot be packed, or the text is too short.
        """
        model = copy.deepcopy(model)
        layers = quantize(model, self.config, tokenizer=tokenizer, **self._text())
        weights = sum(layer.weights for layer in layers)
        done = model.config.quantization_config
        return model, {
            "weight_bits": 8 * sum(layer.bytes for layer in layers) / weights,
            "packed_weights": weights,
            "model_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
            "mean_weight_error": sum(layer.error for layer in layers) / len(layers),
            "calibration": done.calibration,
            "left_alone": done.left_alone,
        }

    def _text(self) -> dict[str, Any]:
        """The text and how much of it is read, as `quantize` takes them."""
        if "calibrate" not in self.options:
            return {}
        given = {name: value for name, value in self.options.items() if name == "tokens"}
        return {"text": read_text(self.options["calibrate"]), **given}


def _change(text: str, part: str) -> tuple[str, Any]:
    name, equals, value = part.partition("=")
    if not equals or name not in _TYPES:
        raise ValueError(f"{text!r}: write field=value; the fields are {', '.join(_TYPES)}")
    try:
        return name, _TYPES[name](value)
    except ValueError:
        raise ValueError(f"{text!r}: {name} is an integer") from None
