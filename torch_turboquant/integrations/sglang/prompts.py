"""FlashAttention for prompts, as SGLang has it, and which sequences of a step are left to it.

A step of prompts holds sequences in the order of SGLang's batch: new prompts, continuations of any
length, and with mixed chunks decoding ones. Where none of them has tokens in the cache, all are
left to FlashAttention; else the long ones are (../engine/prompts.py). What stands between these
stays with the op for pages, so that a step is cut into runs of neighbours that are alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_turboquant.integrations.engine.prompts import (
    Context,
    contexts_of,
    long_chunk,
    runs_of_neighbours,
)

__all__ = ["Recent", "Run", "flash_attention", "long_chunk", "runs_of"]


@dataclass(frozen=True)
class Recent:
    """What the ring of a sequence holds of the last tokens before its chunk."""

    first: int
    """The position of the first of them that is looked for."""
    entries: Tensor
    """int64 [n]: the rows of the tail's entry in which these positions are."""
    held: Tensor
    """bool [n, 1, 1]: whether they are."""


@dataclass(frozen=True)
class Run:
    """Neighbouring sequences of a step, first_sequence .. end_sequence - 1, computed alike."""

    first_sequence: int
    end_sequence: int
    first: int
    """Their new tokens in the step: first .. end - 1."""
    end: int
    longest: int
    """The most new tokens of a sequence."""
    by_flash: bool
    contexts: tuple[Context, ...] = ()
    """What they have in the cache, where FlashAttention reads it."""
    recent: dict[int, Recent] = field(default_factory=dict)
    """What the ring holds of each of these, by its number in the run; empty: there is no ring."""


def runs_of(new: Sequence[int], old: Sequence[int], long_from: int, device: Any) -> tuple[Run, ...]:
    """The runs of a step; empty: all of it stays with the op.

    Args:
        new: tokens of this step, of each sequence.
        old: tokens of earlier steps.
        long_from: new tokens of a sequence that make a long chunk.
        device: of the tensors.
    """
    found = runs_of_neighbours(new, old, long_from)
    if not any(alike.by_flash for alike in found):
        return ()
    firsts, runs = [0, *itertools.accumulate(new)], []
    for begin, end, by_flash in found:
        tokens, past = new[begin:end], old[begin:end]
        contexts = contexts_of(tokens, past, device) if by_flash else ()
        place = (begin, end, firsts[begin], firsts[end])
        runs.append(Run(*place, max(tokens), by_flash, contexts))
    return tuple(runs)


def flash_attention(head_dim: int, device: torch.device) -> Callable[..., Any] | None:
    """SGLang's flash_attn_varlen_func; None: use the op for pages, which takes all prompts."""
    if device.type != "cuda" or head_dim > 256:
        return None
    try:
        from sgl_kernel import flash_attn
    except ImportError:
        return None
    found: Callable[..., Any] = flash_attn.flash_attn_varlen_func
    return found if flash_attn.is_fa3_supported() else None
