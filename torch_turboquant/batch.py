"""What a call of one layer's cache is about: which tokens are new, and how queries attend.

A serving loop makes one AttentionBatch per step and passes it to every layer; a layer has one
AttentionOptions for its whole life. Both are checked when they are made, so that a layer looks only
at the queries, keys and values of a call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_turboquant import _checks


@dataclass(eq=False, repr=False)
class AttentionBatch:
    """The new tokens of some sequences: index tensors that every layer of a model shares.

    The tensors may belong to somebody else, such as a serving engine, and their values may change
    between calls: a CUDA graph reads them on the device. The object itself is not changed. Making
    one looks at shapes, dtypes and devices only, so it synchronises nothing.

    Raises:
        TypeError: another dtype.
        ValueError: another shape or stride, several devices, max_q_len below 1.
    """

    slot_mapping: Tensor | None = None
    """int64 [tokens]: page * page_size + offset of each new token; -1: padding, nothing is stored.
    None: the batch only attends or loads."""
    block_table: Tensor | None = None
    """int32 [seqs, pages]: the pages of each sequence in order; entries that no query needs have no
    meaning. None: the batch only stores."""
    seq_lens: Tensor | None = None
    """int32 [seqs], with the new tokens; 0: padding. None: the batch only stores codes."""
    cu_seqlens_q: Tensor | None = None
    """int32 [seqs + 1]: where the new tokens of each sequence start among the tokens; None: every
    sequence has one new token."""
    max_q_len: int = 1
    """An upper bound of the new tokens of a sequence."""
    tail_slots: Tensor | None = None
    """int64 [seqs]: the entry of the exact tail that each sequence owns; -1: it has none, or is
    padding. None: the layers have no tail."""
    tail_valid: Tensor | None = None
    """int32 [max_seqs, 2]: of each entry of the tail, how many sink tokens it holds and the first
    position that its ring holds. None: everything that a query asks for is there."""

    def __post_init__(self) -> None:
        _checks.check_positive(max_q_len=self.max_q_len)
        if self.seq_lens is None:
            if self.tail_slots is not None:
                raise ValueError("tail needs seq_lens")
            if self.slot_mapping is not None:
                _checks.check_dtype("slot_mapping", self.slot_mapping, (torch.int64,))
                device = self.slot_mapping.device
                _checks.check_constant(
                    "slot_mapping", self.slot_mapping, device, torch.int64, (None,)
                )
            return
        _checks.check_dtype("seq_lens", self.seq_lens, (torch.int32,))
        device = self.seq_lens.device
        _checks.check_constant("seq_lens", self.seq_lens, device, torch.int32, (None,))
        seqs = self.seq_lens.shape[0]
        for name, tensor, dtype, shape in (
            ("slot_mapping", self.slot_mapping, torch.int64, (None,)),
            ("block_table", self.block_table, torch.int32, (seqs, None)),
            ("cu_seqlens_q", self.cu_seqlens_q, torch.int32, (seqs + 1,)),
            ("tail_slots", self.tail_slots, torch.int64, (seqs,)),
            ("tail_valid", self.tail_valid, torch.int32, (None, 2)),
        ):
            if tensor is not None:
                _checks.check_constant(name, tensor, device, dtype, shape)


@dataclass(eq=False, repr=False)
class AttentionOptions:
    """How queries attend, beyond what the cache says: the same for every call of a layer.

    Raises:
        TypeError: sink_logits of another dtype.
        ValueError: numbers out of range, sink_logits of another shape.
    """

    softmax_scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(head_dim)."""
    sliding_window: int = 0
    """A query sees this many keys, its own included; 0: all."""
    soft_cap: float = 0.0
    """Above 0, a score s becomes soft_cap * tanh(s / soft_cap)."""
    sink_logits: Tensor | None = None
    """float32 [q_heads]: each adds exp(logit) to the softmax denominator, and to lse."""

    def __post_init__(self) -> None:
        scale = self.softmax_scale  # compared: torch.compile(dynamic=True) cannot trace isfinite
        if scale is not None and not -math.inf < scale < math.inf:
            raise ValueError(f"softmax_scale is {self.softmax_scale}, supported: finite numbers")
        if self.sliding_window < 0:
            raise ValueError(
                f"sliding_window is {self.sliding_window}, supported: 0 (none) and more"
            )
        if not 0.0 <= self.soft_cap < math.inf:
            raise ValueError(f"soft_cap is {self.soft_cap}, supported: 0 (none) and more")
        if self.sink_logits is not None:
            _checks.check_dtype("sink_logits", self.sink_logits, (torch.float32,))
