"""What no engine can do with packed pages, with the cure. Each sentence is written once, here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_turboquant.config import CacheConfig

ELSEWHERE = "choose another --attention-backend for this model"


def refuse(found: Sequence[str]) -> None:
    """Raises ValueError if there is anything: sentences with their cures."""
    if found:
        raise ValueError(f"torch_turboquant: {'; '.join(found)}")


def wrong_dtype(dtype: torch.dtype, on_cpu: bool) -> str | None:
    """What is wrong with the dtype of a model; None: nothing."""
    if dtype in (torch.float16, torch.bfloat16) or (on_cpu and dtype == torch.float32):
        return None
    return f"the model computes in {dtype}: pass --dtype bfloat16 or float16"


def wrong_head_dim(head_dim: int) -> str | None:
    """What is wrong with a head dimension; None: nothing."""
    try:
        CacheConfig(head_dim, 8, 8)
    except ValueError as error:
        return f"{error}: {ELSEWHERE}"
    return None
