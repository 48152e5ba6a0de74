"""Formats for each layer under a budget of bits: more for those whose errors cost most.

What a layer costs is measured: the divergence of the model's predictions when this layer alone is
packed. It grows as the layer's error does, so a format with a smaller error costs less in
proportion; and the layers' costs are added up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers.utils import logging

from torch_turboquant.integrations.transformers.weights.moments import read
from torch_turboquant.integrations.transformers.weights.report import PackedLayer
from torch_turboquant.weight_calibration import Choice, allocate
from torch_turboquant.weights import PackedLinear

TOKENS = 512
"""Of the text, whose predictions are compared."""

Candidate = tuple[PackedLinear, PackedLayer]


def choose_by_budget(
    model: nn.Module, candidates: Mapping[str, Sequence[Candidate]], budget: float, ids: Tensor
) -> dict[str, Candidate]:
    """One candidate for each layer, so that the sum of their costs is the least.

    Args:
        model: with none of these layers packed; it is as before afterwards.
        candidates: of each layer, the coarsest first.
        budget: bits per weight, of all layers together.
        ids: int64 [tokens], the text.

    Raises:
        ValueError: the coarsest candidates take more than the budget, there are no predictions, or
            those with a packed layer are not finite numbers.
    """
    weights = sum(rows[0][1].weights for rows in candidates.values())
    # Nothing is chosen for a layer with one candidate, whatever it costs.
    undecided = {name: rows[0][0] for name, rows in candidates.items() if len(rows) > 1}
    cost = sensitivities(model, undecided, ids[:TOKENS])
    choices = {}
    for name, rows in candidates.items():
        unit = cost.get(name, 0.0) / max(rows[0][1].error, 1e-30)
        choices[name] = [
            Choice(place, 8 * row.bytes, unit * row.error) for place, (_, row) in enumerate(rows)
        ]
    chosen = allocate(choices, budget * weights)
    return {name: candidates[name][int(str(choice.label))] for name, choice in chosen.items()}


@torch.no_grad()
def sensitivities(
    model: nn.Module, layers: Mapping[str, PackedLinear], ids: Tensor
) -> dict[str, float]:
    """What each layer costs if it alone is packed: the mean divergence of predictions, in nats.

    Args:
        model: as it is without these layers.
        layers: packed, by name.
        ids: int64 [tokens].

    Returns:
        By name; NaN or infinite where predictions are, which `allocate` refuses.
    """
    exact = _predictions(model, ids)
    found = {}
    for name, layer in logging.tqdm(layers.items(), desc="Measuring layers"):
        own = model.get_submodule(name)
        model.set_submodule(name, layer)
        try:
            changed = _predictions(model, ids)
        finally:
            model.set_submodule(name, own)
        found[name] = float(divergences(exact, changed).mean().clamp(min=0))  # NaN stays NaN
    return found


def divergences(exact: Tensor, changed: Tensor) -> Tensor:
    """KL(exact || changed) in nats, [...], from logarithms of probabilities [..., vocabulary].

    Tokens that `exact` never predicts add nothing, as those that a model masks by -inf; their
    logarithms differ by NaN.
    """
    terms = exact.exp() * (exact - changed)
    return terms.masked_fill(exact == -torch.inf, 0).sum(-1)


def check_predicts(model: nn.Module, ids: Tensor) -> None:
    """Raises ValueError for a model without predictions, before anything takes long."""
    if getattr(read(model, ids[:8]), "logits", None) is None:
        raise ValueError(
            f"quantize: budget compares predictions, and a {type(model).__name__} has none: "
            "leave budget out, or load the model with a head"
        )


def _predictions(model: nn.Module, ids: Tensor) -> Tensor:
    """Logarithms of probabilities: float32 [tokens, vocabulary]."""
    predictions: Tensor = read(model, ids).logits[0].float().log_softmax(-1)
    return predictions
