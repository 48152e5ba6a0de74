"""What is refused at start, with the reason and the cure.

vLLM asks a backend what it supports on GPUs (supports_*) and asks nothing on CPUs, so that layers
check themselves as well. Each sentence is written once, here.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_turboquant.config import CacheConfig
from torch_turboquant.integrations.vllm.settings import DTYPE_PREFIX, Settings
from torch_turboquant.integrations.vllm.versions import Interface

CACHE_DTYPES = ("auto", "float16", "bfloat16")
ELSEWHERE = "choose another --attention-backend for this model"


def wrong_dtype(dtype: torch.dtype, on_cpu: bool) -> str | None:
    """What is wrong with the dtype of a model; None: nothing."""
    if dtype in (torch.float16, torch.bfloat16) or (on_cpu and dtype == torch.float32):
        return None
    return f"the model computes in {dtype}: pass --dtype bfloat16 or float16"


def wrong_cache_dtype(kv_cache_dtype: str) -> str | None:
    """What is wrong with --kv-cache-dtype, given or read from a checkpoint; None: nothing."""
    if kv_cache_dtype in CACHE_DTYPES or kv_cache_dtype.startswith(DTYPE_PREFIX):
        return None
    return (
        f"--kv-cache-dtype is {kv_cache_dtype}, or the checkpoint asks for it, but pages of "
        "TurboQuant hold codes of their own: pass --kv-cache-dtype bfloat16"
    )


def wrong_head_dim(head_dim: int) -> str | None:
    """What is wrong with a head dimension; None: nothing."""
    try:
        CacheConfig(head_dim, 8, 8)
    except ValueError as error:
        return f"{error}: {ELSEWHERE}"
    return None


def wrong_layer(
    head_dim: int,
    dtype: torch.dtype,
    on_cpu: bool,
    kv_cache_dtype: str,
    alibi_slopes: Any,
    attn_type: str,
    extra: dict[str, Any],
) -> list[str]:
    """What is wrong with a layer: sentences with their cures."""
    found = [
        wrong_head_dim(head_dim),
        wrong_dtype(dtype, on_cpu),
        wrong_cache_dtype(kv_cache_dtype),
        None if alibi_slopes is None else f"ALiBi is not supported: {ELSEWHERE}",
        None if attn_type == "decoder" else f"{attn_type} attention is not supported: {ELSEWHERE}",
        *(
            f"the option {name} of attention is not supported: {ELSEWHERE}"
            for name, value in extra.items()
            if value is not None
        ),
    ]
    return [text for text in found if text]


def check_engine(vllm_config: Any, interface: Interface, settings: Settings) -> None:
    """Raises ValueError for settings of vLLM that no layer sees, naming all of them."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    model = vllm_config.model_config
    found = []
    if getattr(cache, "calculate_kv_scales", False):
        found.append("calculate_kv_scales has no meaning for packed pages: leave it out")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            found.append(f"{name} is {size}, supported: 1. Use tensor or pipeline parallelism")
    if interface.page_bytes == "layer" and model.is_hybrid:
        found.append(
            "this vLLM pads the pages of hybrid models to their size in bfloat16: install vLLM "
            "0.28 or newer"
        )
    if settings.calibrate and not model.enforce_eager:
        found.append("calibrate needs every step as it is: pass --enforce-eager")
    if found:
        raise ValueError(f"torch_turboquant: {'; '.join(found)}")
