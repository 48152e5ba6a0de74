"""What is refused at start, with the reason and the cure.

vLLM asks a backend what it supports on GPUs (supports_*) and asks nothing on CPUs, so that layers
check themselves as well. Each sentence is written once, here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torch_turboquant.config import PRESETS
from torch_turboquant.format import LATENT_DIMS, ROPE_DIMS
from torch_turboquant.integrations.engine.limits import (
    ELSEWHERE,
    refuse,
    wrong_dtype,
    wrong_head_dim,
)
from torch_turboquant.integrations.vllm.connectors import sharing, wrong_connectors
from torch_turboquant.integrations.vllm.settings import DTYPE_PREFIX, Settings
from torch_turboquant.integrations.vllm.versions import INTERFACES, Interface
from torch_turboquant.latent import LATENT_PRESETS

CACHE_DTYPES = ("auto", "float16", "bfloat16")
_VERSIONS = " or ".join(f"{i.first[0]}.{i.first[1]}" for i in INTERFACES if i.latents)
NO_LATENTS = f"models with latent attention (MLA) need vLLM {_VERSIONS}: {ELSEWHERE}"

_OFF = {"chunk_lookback": -1}
"""Options of attention that models give also where they do not use them, and what they say then:
Rnj-1, whose layers may attend within chunks."""

NOT_CAUSAL = f"torch_turboquant: attention that is not causal is not supported: {ELSEWHERE}"

BOTH_WAYS = (
    "tokens of a picture see each other in this model, and attention that is not causal is not "
    "supported: pass --language-model-only to serve text alone (on a GPU from vLLM 0.28 on), or "
    f"{ELSEWHERE}"
)


def layer_index(name: str) -> int:
    """The number of a layer, which vLLM names by the place of its attention in the model.

    Raises:
        ValueError: there is no number; or there are several, of layers with several attentions.
    """
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    if not numbers:
        raise ValueError(
            f"torch_turboquant: {name} has no number, so that this backend does not know which "
            f"layer it is: {ELSEWHERE}"
        )
    if len(numbers) > 1:
        raise _several_attentions(name)
    return numbers[0]


def check_layer_number(name: str, number: int, layers: int) -> None:
    """Raises ValueError for a layer behind the last one of its model, which nobody drafts with.

    Models that run their layers several times (IQuest-LoopCoder) number the attentions of later
    runs on, and read keys of the first run there without any of their own.
    """
    if number >= layers:
        raise _several_attentions(name)


def _several_attentions(name: str) -> ValueError:
    return ValueError(
        f"torch_turboquant: {name} is one of several attentions of a layer, which this backend "
        f"does not support: {ELSEWHERE}"
    )


def wrong_cache_dtype(kv_cache_dtype: str) -> str | None:
    """What is wrong with --kv-cache-dtype, given or read from a checkpoint; None: nothing."""
    if kv_cache_dtype in CACHE_DTYPES or kv_cache_dtype.startswith(DTYPE_PREFIX):
        return None
    return (
        f"--kv-cache-dtype is {kv_cache_dtype}, or the checkpoint asks for it, but pages of "
        "TurboQuant hold codes of their own: pass --kv-cache-dtype bfloat16"
    )


def latent_dims(head_dim: int) -> tuple[int, int] | None:
    """Channels of a latent and of its position, of as many together; None: no page holds these."""
    pairs = ((latent, head_dim - latent) for latent in LATENT_DIMS)
    return next((pair for pair in pairs if pair[1] in ROPE_DIMS), None)


def wrong_latent_dims(head_dim: int, latent_dim: int | None = None) -> str | None:
    """What is wrong with the channels of a latent and its position; None: nothing.

    Args:
        head_dim: channels of both.
        latent_dim: of a latent; None: it is not known yet.
    """
    found = latent_dims(head_dim)
    if found is not None and latent_dim in (None, found[0]):
        return None
    return (
        f"a latent and its position have {head_dim} channels"
        f"{'' if latent_dim is None else f', {latent_dim} of them the latent'}, supported: 128, "
        f"256 or 512 of a latent and 0, 32 or 64 of a position: {ELSEWHERE}"
    )


def wrong_latent_layer(
    head_dim: int,
    latent_dim: int | None,
    dtype: torch.dtype,
    on_cpu: bool,
    kv_cache_dtype: str,
    sliding_window: int | None = None,
    indexer: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> list[str]:
    """What is wrong with a layer with latent attention: sentences with their cures."""
    found = [
        wrong_latent_dims(head_dim, latent_dim),
        wrong_dtype(dtype, on_cpu),
        wrong_cache_dtype(kv_cache_dtype),
    ]
    if sliding_window:
        found.append(f"a sliding window over latents is not supported: {ELSEWHERE}")
    if indexer:
        found.append(
            "latent attention with an indexer, which chooses the tokens that are attended to, is "
            f"not supported: {ELSEWHERE}"
        )
    return [text for text in found if text] + _wrong_options(extra or {})


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
    kind = getattr(attn_type, "value", attn_type)  # vLLM's are strings whose format is a name
    found = [
        wrong_head_dim(head_dim),
        wrong_dtype(dtype, on_cpu),
        wrong_cache_dtype(kv_cache_dtype),
        None if alibi_slopes is None else f"ALiBi is not supported: {ELSEWHERE}",
        None if kind == "decoder" else f"{kind} attention is not supported: {ELSEWHERE}",
        *_wrong_options(extra),
    ]
    return [text for text in found if text]


def _wrong_options(extra: Mapping[str, Any]) -> list[str]:
    return [
        f"the option {name} of attention is not supported: {ELSEWHERE}"
        for name, value in extra.items()
        if value is not None and value != _OFF.get(name)
    ]


def check_engine(vllm_config: Any, interface: Interface, settings: Settings) -> None:
    """Raises ValueError for settings of vLLM that no layer sees, naming all of them."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    model = vllm_config.model_config
    found = []
    if getattr(cache, "calculate_kv_scales", False):
        found.append("calculate_kv_scales has no meaning for packed pages: leave it out")
    if getattr(cache, "kv_cache_dtype_skip_layers", None):
        found.append(
            "--kv-cache-dtype-skip-layers has no meaning for packed pages, which all layers have: "
            "leave it out, and give layers presets of their own, such as "
            '"layers": {"0": "k8v8"}'
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            found.append(f"{name} is {size}, supported: 1. Use tensor or pipeline parallelism")
    if interface.page_bytes == "layer" and model.is_hybrid:
        found.append(
            "this vLLM pads the pages of hybrid models to their size in bfloat16: install vLLM "
            "0.28 or newer"
        )
    if getattr(model, "rswa_window", None) is not None:
        found.append(
            f"windows behind the whole prompt (rswa_window) are not supported: {ELSEWHERE}"
        )
    if _sees_pictures_both_ways(model):
        found.append(BOTH_WAYS)
    found += wrong_connectors(vllm_config.kv_transfer_config, model.use_mla)
    if model.use_mla:
        found += _wrong_with_latents(model, interface, settings)
    if settings.calibrate and not model.enforce_eager:
        found.append("calibrate needs every step as it is: pass --enforce-eager")
    refuse(found)


def _sees_pictures_both_ways(model: Any) -> bool:
    """Whether requests may have pictures whose tokens see each other."""
    if not model.is_mm_prefix_lm or model.multimodal_config is None:
        return False
    limit = model.multimodal_config.get_limit_per_prompt
    return bool(limit("image") or limit("video"))


def check_learning(vllm_config: Any) -> None:
    """Raises ValueError where pages relative to learned centers might meet others."""
    connector = sharing(vllm_config.kv_transfer_config)
    if connector is not None:
        raise ValueError(
            f"torch_turboquant: the KV connector {connector} may take pages to another process, "
            "where the centers that this one learns from its first prompt mean nothing: give a "
            'file of centers, or set "learn" to false'
        )


def check_preset_of_drafts(preset: str) -> None:
    """Raises ValueError where drafts have keys and values, and the preset is for latents."""
    if preset in LATENT_PRESETS:
        same = LATENT_PRESETS[preset]
        both = next(n for n, p in PRESETS.items() if (p.key_bits, p.key_grid) == tuple(same))
        raise ValueError(
            f"torch_turboquant: the draft model has keys and values, and the preset {preset} is "
            f'for latents alone: set "preset" to "{both}", which is {preset} for latents'
        )


def _wrong_with_latents(model: Any, interface: Interface, settings: Settings) -> list[str]:
    found = []
    if not interface.latents:
        found.append(NO_LATENTS)
    if model.is_hybrid:
        found.append(f"hybrid models with latent attention (MLA) are not supported: {ELSEWHERE}")
    for name in ("centers", "calibrate"):
        if getattr(settings, name):
            found.append(
                f'"{name}" has no meaning for latent attention, whose channels are scaled by the '
                "weight of their norm: leave it out"
            )
    return found


def keep_pages_to_attention(compilation_config: Any) -> None:
    """Turns off the one pass of vLLM's compiler that writes latents into pages by itself.

    It takes every backend's pages for rows in the dtype of the model. Must be called before the
    model is compiled.
    """
    compilation_config.pass_config.fuse_rope_kvcache_cat_mla = False
