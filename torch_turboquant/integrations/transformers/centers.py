"""Centers: what keys are stored relative to, their mean and the scales of their channels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from torch_turboquant import _checks
from torch_turboquant import centers as files
from torch_turboquant.centers import CENTER_TOKENS, SINKS
from torch_turboquant.integrations.transformers.models import (
    device_of,
    evaluating,
    head_dim_of,
    latent_dims,
    layer_windows,
    model_layers,
    plain_layers,
    recording,
    rotary_partners,
    text_config,
    with_cache,
)
from torch_turboquant.integrations.transformers.sequences import Forward
from torch_turboquant.integrations.transformers.tensors import check_not_meta
from torch_turboquant.ops.center import channel_scale
from torch_turboquant.ops.codec import scaled_center


def query_energies(queries: list[Tensor], kv_heads: int, forward: Forward) -> Tensor:
    """How large queries are (query_energy), of all tokens that learn counts.

    queries: of each layer, [batch, heads, new, head_dim] of the last tokens.
    """
    queries, skip = forward.after_sinks(queries)
    with torch.inference_mode():  # nobody wants gradients of these, nor keeps them
        return torch.ops.turboquant.query_energy.default(queries, kv_heads, skip)


def learn(keys: list[Tensor], energies: list[Tensor], forward: Forward, partners: Tensor) -> Tensor:
    """Centers of layers (learn_center), from all tokens after the sinks.

    Sink tokens are left out because their keys are outliers, and read exactly in any case; the last
    one counts where a static cache has got nothing else.

    Args:
        keys: of each layer, [batch, kv_heads, tokens, head_dim].
        energies: of each layer's queries (query_energies), for scales of channels as well; or none.
        partners: of rotary_partners, where the keys are.
    """
    keys, skip = forward.after_sinks(keys)
    known = partners if energies else None
    return torch.ops.turboquant.learn_center.default(keys, energies, known, skip)


@torch.no_grad()
def calibrate(
    model: nn.Module,
    inputs: Tensor | str | Sequence[str],
    tokenizer: Any = None,
    *,
    skip: int = SINKS,
    chunk: int = 512,
    scaled: bool = True,
) -> list[Tensor | None]:
    """See TurboQuantCache.calibrate."""
    _checks.check_count(skip=skip)
    _checks.check_positive(chunk=chunk)
    if latent_dims(model):
        raise ValueError(
            f"{type(model).__name__} has latent attention, and centers are of keys that every KV "
            "head keeps: this model has no use for them"
        )
    if isinstance(inputs, Tensor):
        sequences = [inputs] if inputs.dim() == 1 else list(inputs)
    elif tokenizer is None:
        raise ValueError("calibrate: text needs its tokenizer")
    else:
        texts = [inputs] if isinstance(inputs, str) else inputs
        sequences = [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts]
    count = sum(max(0, len(ids) - skip) for ids in sequences)
    if count < CENTER_TOKENS:
        raise ValueError(
            f"calibrate needs at least {CENTER_TOKENS} tokens after the first {skip} of every "
            f"sequence, got {count}"
        )
    windows, partners = layer_windows(model), rotary_partners(model)
    sums: dict[int, Tensor] = {}  # of a layer's keys, their squares and the queries' squares
    seen = 0  # tokens of the sequence before the part at hand

    def note(module: Any, query: Tensor, key: Tensor, *others: Any) -> None:
        check_not_meta(key)
        begin = max(0, skip - seen)
        new = query[0, :, begin:].double()
        keys = key[0, :, key.shape[2] - query.shape[2] + begin :].double()
        energy = new.square().sum(1).unflatten(0, (len(keys), -1)).mean(1)
        found = torch.stack([keys.sum(1), keys.square().sum(1), energy]).cpu()
        sums[module.layer_idx] = sums.get(module.layer_idx, 0) + found

    own = device_of(model)
    device = None if own.type == "meta" else own  # accelerate moves the ids of offloaded models
    with evaluating(model), recording(model, note):
        for ids in sequences:
            cache, seen = Cache(layers=plain_layers(model)), 0
            for part in ids.to(device).split(chunk):
                model(part[None], **with_cache(model, cache), use_cache=True)
                seen += len(part)

    def center(layer: int) -> Tensor:
        mean, square, energy = sums[layer] / count
        variance = (square - mean.square()).clamp(min=0)
        scale = channel_scale(mean, variance, energy, count, partners)
        return scaled_center(mean.float(), scale.float()) if scaled else mean.float()

    return [None if w is None else center(layer) for layer, w in enumerate(windows)]


# ---- files


def fingerprint(model: nn.Module) -> dict[str, str]:
    """What a file of centers must agree on with a model (torch_turboquant.centers)."""
    head_dim_of(text_config(model))  # refuses a model whose layers have different ones
    return files.fingerprint(text_config(model))


def save_centers(
    path: str | os.PathLike[str], centers: Sequence[Tensor | None], model: nn.Module
) -> None:
    """Writes centers to a safetensors file that `center=path` reads (needs safetensors).

    Args:
        path: of the file.
        centers: float32 [kv_heads, head_dim] or [3, kv_heads, head_dim] per layer with attention,
            None for others, of TurboQuantCache.calibrate or TurboQuantCache.centers.
        model: whose centers they are; the file carries its fingerprint (shape, RoPE).

    Raises:
        ValueError: centers that do not fit the model, or a model that is not supported.
    """
    model_layers(model)
    files.save(path, centers, text_config(model))


def load_centers(path: str | os.PathLike[str], model: nn.Module) -> list[Tensor | None]:
    """Reads a file of `save_centers`: its centers.

    Raises:
        ValueError: the file holds anything else, is damaged, or holds centers of a model with
            another fingerprint.
    """
    layers = len(model_layers(model))
    by_layer = files.load(path, text_config(model))
    return [by_layer.get(i) for i in range(layers)]
