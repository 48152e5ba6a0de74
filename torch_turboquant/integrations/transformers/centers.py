"""Centers: the constant key vectors that keys are stored relative to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from torch_turboquant.integrations.transformers.models import layer_windows
from torch_turboquant.integrations.transformers.sequences import CENTER_TOKENS, Forward


def mean_key(keys: Tensor, forward: Forward) -> Tensor:
    """Mean over the tokens of all sequences after their sinks: [b, h, n, d] -> float32 [h, d].

    Sink tokens are left out because their keys are outliers, and read exactly in any case.
    """
    position = torch.arange(keys.shape[2]) - torch.tensor(forward.pads)[:, None]
    chosen = (position >= forward.sink_tokens).to(keys.device, torch.float32)
    total = torch.einsum("bhnd,bn->hd", keys.float(), chosen)
    return total / chosen.sum()


@torch.no_grad()
def calibrate(
    model: nn.Module,
    inputs: Tensor | str | Sequence[str],
    tokenizer: Any = None,
    *,
    skip: int = 4,
    chunk: int = 512,
) -> list[Tensor]:
    """See TurboQuantCache.calibrate."""
    if isinstance(inputs, str):
        inputs = [inputs]
    if not isinstance(inputs, Tensor):
        if tokenizer is None:
            raise ValueError("calibrate: text needs its tokenizer")
        inputs = [tokenizer(text, return_tensors="pt").input_ids[0] for text in inputs]
    elif inputs.dim() == 1:
        inputs = [inputs]
    count = sum(max(0, len(ids) - skip) for ids in inputs)
    if count < CENTER_TOKENS:
        raise ValueError(
            f"calibrate needs at least {CENTER_TOKENS} tokens after the first {skip} of every "
            f"sequence, got {count}"
        )
    sums = [0.0] * len(layer_windows(model))
    for ids in inputs:
        cache = DynamicCache()
        for part in ids.to(model.device).split(chunk):
            model(part[None], past_key_values=cache, use_cache=True)
        for index, layer in enumerate(cache.layers):
            sums[index] = sums[index] + layer.keys[0, :, skip:].double().sum(1).cpu()
    return [(s / count).float() for s in sums]


def save_centers(path: str | os.PathLike, centers: Sequence[Tensor]) -> None:
    """Writes centers to a safetensors file that `center=path` reads (needs safetensors)."""
    from safetensors.torch import save_file

    save_file({f"layers.{i}.center": c.contiguous() for i, c in enumerate(centers)}, path)


def load_centers(path: str | os.PathLike) -> list[Tensor]:
    """Reads a file of `save_centers`: one float32 [kv_heads, head_dim] per layer.

    Raises:
        ValueError: the file holds anything else.
    """
    from safetensors.torch import load_file

    tensors = load_file(path)
    names = [f"layers.{i}.center" for i in range(len(tensors))]
    if set(names) != set(tensors):
        raise ValueError(f"{path} is no file of centers: it holds {sorted(tensors)[:3]}, ...")
    return [tensors[name].float() for name in names]
