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


def not_tested(engine: str, version: str, tested: Sequence[str]) -> str | None:
    """What to say of a version of an engine that no test has run with; None: one has.

    version: with or without the name of a build ("0.5.23+cu130").
    """
    if version.partition("+")[0] in tested:
        return None
    return f"{engine} {version} has not been tested; tested: {', '.join(tested)}"


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
