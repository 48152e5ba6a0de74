"""How prompts are computed where an engine has FlashAttention.

Keys and values of a step's own tokens are at hand, unrounded, and FlashAttention reads many of them
sooner than the kernels for pages do. Long chunks of a prompt whose beginning is in the cache gain
from it, too: their pages are decoded a segment at a time, and the parts are joined by their
log-sum-exps. Short chunks do not. Decoding costs as much as a few hundred queries gain, and a
sequence takes FlashAttention some ten launches, for which the host needs 0.3 ms in each layer,
while the op for pages takes any number of sequences at once. So a step is cut into runs of
neighbours that are computed alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_turboquant.ops.attention import merge_attention

LONG_CHUNK_ROWS = 32768
"""New tokens of a sequence times query heads from which decoding its pages pays on GPUs of compute
capability 9.0: 1,024 tokens of 32 heads. The op takes 0.1 to 0.4 ms for them behind 1,024 to 8,192
tokens (H200)."""
LONG_CHUNK = 512
"""New tokens from which it pays on other GPUs, whose op has no kernel for many query rows."""
SEGMENT = 16384
"""Tokens that are decoded at once: bounds the memory that this takes, whatever the context. A
multiple of every page size."""

Load = Callable[[int, int, int, Tensor], tuple[Tensor, Tensor]]
"""(sequence of the call, first token, tokens, int32 [1] tokens) -> k, v [tokens, kv_heads, d]. Of
latents these are the keys and values of all heads, which may differ in d."""


class Segment(NamedTuple):
    """A part of a sequence's tokens in the cache."""

    first: int
    tokens: int
    starts: Tensor
    """int32 [2]: 0 and `tokens`."""


@dataclass(frozen=True)
class Context:
    """A sequence of a call that has tokens of earlier steps."""

    sequence: int
    """Its number in the call."""
    first: int
    """Its new tokens in the call: first .. end - 1."""
    end: int
    starts: Tensor
    """int32 [2]: 0 and the number of new tokens."""
    segments: tuple[Segment, ...]


class Alike(NamedTuple):
    """Neighbouring sequences of a step, begin .. end - 1, that are computed alike."""

    begin: int
    end: int
    by_flash: bool
    """Whether FlashAttention takes them; else the op for pages."""


def long_chunk(q_heads: int, device: torch.device) -> int:
    """New tokens of a sequence that make a long chunk, for so many query heads of a process."""
    return -(-LONG_CHUNK_ROWS // max(1, q_heads)) if _has_kernels(device) else LONG_CHUNK


def _has_kernels(device: torch.device) -> bool:
    """Whether the op for pages has kernels for prompts and long chunks there."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0)


def least_fresh(q_heads: int, device: torch.device) -> int:
    """Tokens of all prompts of a step together, of which none has any in the cache, from which they
    are left to FlashAttention, if an engine stores and attends to a step in one call otherwise.

    Together with decode steps that is two calls more in each layer, for which the host needs 65 us,
    and without them one, for 25. On GPUs of compute capability 9.0 prompts of 1,024 tokens gain 6
    to 12 us of 50 (32 heads, H200). The op of other GPUs has no kernel for prompts.
    """
    return long_chunk(q_heads, device) if _has_kernels(device) else 0


def runs_of_neighbours(
    new: Sequence[int],
    old: Sequence[int],
    long_from: int,
    begin: int = 0,
    fresh_from: int = 0,
) -> tuple[Alike, ...]:
    """Who takes which sequences of a step's prompts: FlashAttention the long ones, or all of them
    if none has tokens of earlier steps and they are worth its calls.

    Args:
        new: tokens of this step, of each sequence.
        old: tokens of earlier steps.
        long_from: new tokens of a sequence that make a long chunk (long_chunk).
        begin: the first sequence that is in its prompt.
        fresh_from: new tokens of all these sequences together from which they are worth the calls
            (least_fresh).
    """
    all_fresh = not any(old[begin:]) and sum(new[begin:]) >= fresh_from
    runs = []
    for by_flash, group in itertools.groupby(all_fresh or n >= long_from for n in new[begin:]):
        end = begin + len(list(group))
        runs.append(Alike(begin, end, by_flash))
        begin = end
    return tuple(runs)


def contexts_of(new: Sequence[int], old: Sequence[int], device: Any) -> tuple[Context, ...]:
    """What the sequences of a run have in the cache; those with nothing there are left out.

    Args:
        new, old: tokens, as in runs_of_neighbours.
        device: of the tensors.
    """
    firsts = itertools.accumulate(new, initial=0)
    found = [
        (sequence, first, n, [(at, min(SEGMENT, o - at)) for at in range(0, o, SEGMENT)])
        for sequence, (first, n, o) in enumerate(zip(firsts, new, old, strict=False))
        if n > 0 and o > 0
    ]
    if not found:
        return ()
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
    """flash_attn_varlen_func, as the engine has it."""
    options: dict[str, Any]
    """Its arguments that stay, such as softmax_scale and softcap."""
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
        # SGLang's function returns more than these
        _, own, *_ = self._own(q, k, v, out, starts, n, return_softmax_lse=True)
        for context in contexts:
            first, end = context.first, context.end
            # lse [q_heads, tokens] as FlashAttention has it; merge_attention has it the other way
            found, lse = out[first:end], own[:, first:end].t().contiguous()
            for segment in context.segments:
                keys, values = load(
                    context.sequence, segment.first, segment.tokens, segment.starts[1:]
                )
                part, part_lse, *_ = self.flash(
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
