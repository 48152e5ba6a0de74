"""Which attention computes prompts that have nothing in the cache yet.

Their keys and values are all at hand, unrounded, so that any attention computes them exactly. On
GPUs where vLLM has FlashAttention it is faster at that than the kernels for pages, which read the
same keys and values from k_new and v_new.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

PromptAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], None]


def fresh_prompt_attention(
    head_dim: int, scale: float, sliding_window: int, soft_cap: float, has_sinks: bool
) -> PromptAttention | None:
    """A function (q, k, v, out, cu_seqlens, longest) for fresh prompts; None: use the pages' op."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or has_sinks or head_dim > 256:
        return None
    try:
        from vllm.v1.attention.backends import fa_utils

        version = fa_utils.get_flash_attn_version(head_size=head_dim)
        flash_attention: Any = fa_utils.flash_attn_varlen_func
    except (ImportError, AttributeError):  # a build of vLLM without it
        return None
    if version is None:
        return None
    window = [sliding_window - 1, 0] if sliding_window else [-1, -1]

    def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens: Tensor, n: int) -> None:
        flash_attention(
            q=q,
            k=k,
            v=v,
            out=out,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=n,
            max_seqlen_k=n,
            softmax_scale=scale,
            causal=True,
            window_size=window,
            softcap=soft_cap,
            fa_version=version,
        )

    return attend
