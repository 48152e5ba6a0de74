"""How prompts are computed where vLLM has FlashAttention.

Keys and values of a step's own tokens are at hand, unrounded, and FlashAttention reads them sooner
than the kernels for pages do. Long chunks of a prompt whose beginning is in the cache gain from it,
too: their pages are decoded a segment at a time, and the parts are joined by their log-sum-exps.
Short chunks do not: decoding costs as much as a few hundred queries gain.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_turboquant.ops.attention import merge_attention

LONG_CHUNK = 512
"""New tokens of a sequence from which decoding its pages pays."""
LONG_LATENT_CHUNK = 128
"""The same for latents. Over these, attention of a query takes 3.4 times the products that it takes
over the keys and values of its head (512 + 64 + 512 to 128 + 64 + 128 channels), while making these
from a latent costs as much as some 170 queries gain."""
SEGMENT = 16384
"""Tokens that are decoded at once: bounds the memory that this takes, whatever the context. A
multiple of every page size."""

Load = Callable[[int, int, int, Tensor], tuple[Tensor, Tensor]]
"""(sequence of the part, first token, tokens, int32 [1] tokens) -> k, v [tokens, kv_heads, d]. Of
latents these are the keys and values of all heads, which may differ in d."""


class Segment(NamedTuple):
    """A part of a sequence's tokens in the cache."""

    first: int
    tokens: int
    starts: Tensor
    """int32 [2]: 0 and `tokens`."""


@dataclass(frozen=True)
class Context:
    """A sequence of a part that has tokens of earlier steps."""

    sequence: int
    """Its number in the part."""
    first: int
    """Its new tokens in the part: first .. end - 1."""
    end: int
    starts: Tensor
    """int32 [2]: 0 and the number of new tokens."""
    segments: tuple[Segment, ...]


def contexts_of(
    new: Sequence[int], old: Sequence[int], device: Any, long_chunk: int = LONG_CHUNK
) -> tuple[Context, ...]:
    """What the sequences of a part have in the cache; empty if none of them has a long chunk.

    Args:
        new: tokens of this step, of each sequence.
        old: tokens of earlier steps.
        device: of the tensors.
        long_chunk: new tokens of a sequence that make a long chunk.
    """
    if not any(n >= long_chunk and o > 0 for n, o in zip(new, old, strict=True)):
        return ()
    firsts = itertools.accumulate(new, initial=0)
    found = [
        (sequence, first, n, [(at, min(SEGMENT, o - at)) for at in range(0, o, SEGMENT)])
        for sequence, (first, n, o) in enumerate(zip(firsts, new, old, strict=False))
        if n > 0 and o > 0
    ]
    ends = [end for *_, n, cuts in found for end in (n, *(tokens for _, tokens in cuts))]
    pairs = torch.tensor([(0, end) for end in ends], dtype=torch.int32)
    starts = iter(pairs.to(device, non_blocking=True))  # in one copy
    return tuple(
        Context(
            sequence,
            first,
            first + n,
            next(starts),
            tuple(Segment(at, tokens, next(starts)) for at, tokens in cuts),
        )
        for sequence, first, n, cuts in found
    )


@dataclass(frozen=True)
class PromptAttention:
    """FlashAttention for the prompts of one layer."""

    flash: Callable[..., Any]
    """flash_attn_varlen_func of vLLM."""
    options: dict[str, Any]
    """Its arguments that stay: softmax_scale, softcap, fa_version."""
    sliding_window: int

    def fresh(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, starts: Tensor, n: int) -> None:
        """Prompts that have nothing in the cache.

        Args:
            q: [tokens, q_heads, d].
            k, v: [tokens, kv_heads, d]; v may have another d.
            out: [tokens, q_heads, d of v], filled.
            starts: int32 [seqs + 1], where the tokens of each sequence begin.
            n: the most tokens of a sequence.
        """
        self._own(q, k, v, out, starts, n)

    def continued(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        starts: Tensor,
        n: int,
        contexts: tuple[Context, ...],
        load: Load,
    ) -> None:
        """Chunks of prompts; arguments as in `fresh`. Not for layers with a sliding window."""
        _, own = self._own(q, k, v, out, starts, n, return_softmax_lse=True)
        for context in contexts:
            first, end = context.first, context.end
            # lse [q_heads, tokens] as FlashAttention has it; merge_attention has it the other way
            found, lse = out[first:end], own[:, first:end].t().contiguous()
            for segment in context.segments:
                keys, values = load(
                    context.sequence, segment.first, segment.tokens, segment.starts[1:]
                )
                part, part_lse = self.flash(
                    q=q[first:end],
                    k=keys,
                    v=values,
                    cu_seqlens_q=context.starts,
                    cu_seqlens_k=segment.starts,
                    max_seqlen_q=end - first,
                    max_seqlen_k=segment.tokens,
                    causal=False,
                    return_softmax_lse=True,
                    **self.options,
                )
                found, lse = merge_attention(found, lse, part, part_lse.t().contiguous())
            out[first:end].copy_(found)

    def _own(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, starts: Tensor, n: int, **more: Any
    ) -> Any:
        """The step's own tokens, which see each other up to themselves."""
        window = [self.sliding_window - 1, 0] if self.sliding_window else [-1, -1]
        return self.flash(
            q=q,
            k=k,
            v=v,
            out=out,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=n,
            max_seqlen_k=n,
            causal=True,
            window_size=window,
            **more,
            **self.options,
        )


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
