"""FlashAttention for prompts, as vLLM has it (../engine/prompts.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torch_turboquant.integrations.engine.prompts import PromptAttention

LONG_LATENT_CHUNK = 128
"""New tokens of a sequence from which making keys and values of its latents pays. Over latents,
attention of a query takes 3.4 times the products that it takes over the keys and values of its head
(512 + 64 + 512 to 128 + 64 + 128 channels), while making these from a latent costs as much as some
170 queries gain."""


def prompt_attention(
    head_dim: int, scale: float, sliding_window: int, soft_cap: float, has_sinks: bool
) -> PromptAttention | None:
    """FlashAttention for a layer's prompts; None: use the op for pages, which takes all of them."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or has_sinks or head_dim > 256:
        return None
    found = _flash_attention(head_size=head_dim)
    if found is None:
        return None
    flash, version = found
    options = {"softmax_scale": scale, "softcap": soft_cap, "fa_version": version}
    return PromptAttention(flash, options, sliding_window)


def latent_prompt_attention(key_dim: int, value_dim: int, scale: float) -> PromptAttention | None:
    """FlashAttention for the prompts of a layer with latent attention, whose keys and values are
    made for all heads; None: use the op for latents, which takes all prompts.

    Args:
        key_dim, value_dim: channels of a head's key (nope + rope) and value.
        scale: factor of the scores.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or key_dim > 256 or value_dim > key_dim:
        return None
    found = _flash_attention(head_size=key_dim, head_size_v=value_dim)
    if found is None:
        return None
    flash, version = found
    on_hopper = version == 3 and current_platform.is_device_capability(90)
    if value_dim < key_dim and not (on_hopper or version == 4):
        flash = partial(attend_padded, flash)
    return PromptAttention(flash, {"softmax_scale": scale, "fa_version": version}, 0)


def attend_padded(flash: Callable[..., Any], **given: Any) -> Any:
    """Attention by a FlashAttention that wants values of as many channels as keys."""
    q, v, out = given["q"], given["v"], given.pop("out", None)
    given["v"] = torch.nn.functional.pad(v, [0, q.shape[-1] - v.shape[-1]])
    found = flash(**given)
    padded, *rest = found if isinstance(found, tuple) else (found,)
    own = padded[..., : v.shape[-1]].contiguous() if out is None else out
    if out is not None:
        out.copy_(padded[..., : v.shape[-1]])
    return (own, *rest) if rest else own


def _flash_attention(**sizes: int) -> tuple[Callable[..., Any], int] | None:
    """vLLM's function and the version of it for heads of these sizes; None: this build has none."""
    try:
        from vllm.v1.attention.backends import fa_utils

        version = fa_utils.get_flash_attn_version(**sizes)
        flash: Callable[..., Any] = fa_utils.flash_attn_varlen_func
    except (ImportError, AttributeError):
        return None
    return None if version is None else (flash, version)
