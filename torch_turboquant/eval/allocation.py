"""Bits for each layer: divergence measured layer by layer, then the best choice under a budget.

One layer at a time is stored with a preset, all others with k8v8, which changes next to nothing.
The divergences of layers add up well enough to choose by: the choice with the least sum whose mean
size is within the budget wins. `TurboQuantCache.for_model(layer_presets=...)` takes the result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from tqdm import tqdm

from torch_turboquant._budget import cheapest
from torch_turboquant.config import preset
from torch_turboquant.eval import measure
from torch_turboquant.eval.caches import UNCOMPRESSED, Choice
from torch_turboquant.integrations.transformers import TurboQuantCache
from torch_turboquant.integrations.transformers.models import (
    head_dim_of,
    layer_windows,
    text_config,
)

REST = "k8v8"  # the preset of the layers that are not being measured
PRESETS = ("k2v2", "k3v2", "k3v3", "k4v2", "k4v3", "k4v4", "k5v3u", "k5v4u", "k8v4", "k8v8")
_ROUNDING = 1e-12  # of a budget: its product and the sum of sizes may differ in their last bits


def sensitivities(
    model: Any,
    ids: Tensor,
    prefill: int,
    chunk: int,
    presets: Sequence[str] = PRESETS,
    **options: Any,
) -> dict[int, list[float]]:
    """The mean KL divergence of every layer, in nats, with each of the presets in that layer alone.

    Args:
        ids: int64 [segments, n].
        prefill, chunk: as in measure.read.
        presets: names of PRESETS.
        options: arguments of TurboQuantCache.for_model, for all layers.

    Returns:
        For every layer that keeps keys, one divergence per preset.
    """
    make = partial(Choice.parse(UNCOMPRESSED).make, model)
    _, reference, _ = measure.read(model, make, ids, prefill, chunk)
    layers = [i for i, window in enumerate(layer_windows(model)) if window is not None]
    found: dict[int, list[float]] = {layer: [] for layer in layers}
    for layer in tqdm(layers, "layers", leave=False):
        for name in presets:
            chosen = {layer: name}
            make = partial(TurboQuantCache.for_model, model, REST, layer_presets=chosen, **options)
            reading, _, _ = measure.read(model, make, ids, prefill, chunk, reference)
            found[layer].append(max(0.0, reading.kl.double().mean().item()))
    return found


def allocate(
    divergence: dict[int, list[float]], bits: Sequence[float], budget: float
) -> dict[int, int]:
    """Chooses presets with the least sum of divergences whose mean size is within the budget.

    Args:
        divergence: the result of `sensitivities`.
        bits: bits per value of each preset.
        budget: bits per value, the mean over the layers.

    Returns:
        For every layer the index of its preset.

    Raises:
        ValueError: the budget is below the smallest preset or NaN, or a divergence or bits are not
            finite numbers.
    """
    if math.isnan(budget):
        raise ValueError("the budget is NaN, supported: a number of bits per value")
    if not all(map(math.isfinite, itertools.chain(bits, *divergence.values()))):
        raise ValueError(
            f"divergences and bits must be finite numbers, got {divergence} and {list(bits)}"
        )
    if min(bits) > budget:
        raise ValueError(f"no preset has {budget} bits or less; the smallest has {min(bits):.3f}")
    sizes = [bits] * len(divergence)
    total = budget * len(divergence) * (1 + _ROUNDING)
    return dict(zip(divergence, cheapest(sizes, list(divergence.values()), total), strict=True))


def bits_of(model: Any, presets: Sequence[str] = PRESETS) -> list[float]:
    """Bits per value of presets at the model's head_dim, without the exact tail."""
    dim = head_dim_of(text_config(model))
    return [preset(name, dim).bits_per_value for name in presets]
