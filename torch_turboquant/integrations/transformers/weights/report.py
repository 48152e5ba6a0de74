"""What packing did to each layer: its format, its bytes, its error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor

from torch_turboquant import weight_calibration
from torch_turboquant.weights import WeightFormat


class PackedLayer(NamedTuple):
    """One packed layer."""

    name: str
    form: WeightFormat
    weights: int
    bytes: int
    """Of the packed weight, scales and padding included."""
    error: float
    """Squared error over squared size: of the outputs for a text, or without one of the weights."""


_noted: ContextVar[list[PackedLayer] | None] = ContextVar("packed layers", default=None)


@contextmanager
def noted_layers() -> Iterator[list[PackedLayer]]:
    """A list that gets an entry for every layer that from_pretrained packs in this block.

    It costs the decoding of every weight, which is why it is not always done.
    """
    rows: list[PackedLayer] = []
    token = _noted.set(rows)
    try:
        yield rows
    finally:
        _noted.reset(token)


def listening() -> list[PackedLayer] | None:
    """The list of the innermost `noted_layers`; None outside."""
    return _noted.get()


def relative_error(weight: Tensor, other: Tensor, moment: Tensor | None = None) -> float:
    """Squared error of other over the square of weight: of outputs, or without moment of weights.

    Args:
        weight, other: [N, K].
        moment: of the inputs, [K, K].
    """
    if moment is not None:
        return float(weight_calibration.relative_error(weight, other, moment))
    exact = weight.float()
    size = exact.square().sum()
    return float((other.float() - exact).square().sum() / size) if size > 0 else 0.0
