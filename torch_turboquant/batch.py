"""What a call of one layer's cache is about: which tokens are new, and how queries attend.

A serving loop makes one AttentionBatch per step and passes it to every layer; a layer has one
AttentionOptions for its whole life. Both are checked when they are made, so that a layer looks only
at the queries, keys and values of a call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_turboquant import _checks

FLOAT32 = torch.finfo(torch.float32)
MAX_SOFT_CAP = 1000.0  # csrc/calls/attention.h


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
    """int32 or int64 [tokens]: page * page_size + offset of each new token; -1: padding, nothing is
    stored. None: the batch only attends or loads."""
    block_table: Tensor | None = None
    """int32 [seqs, pages], stride 1 in a row: the pages of each sequence in order; entries that no
    query needs have no meaning. None: the batch only stores."""
    seq_lens: Tensor | None = None
    """int32 [seqs], with the new tokens; 0: padding. None: the batch only stores codes."""
    cu_seqlens_q: Tensor | None = None
    """int32 [seqs + 1]: where the new tokens of each sequence start among the tokens; None: every
    sequence has one new token."""
    max_q_len: int = 1
    """An upper bound of the new tokens of a sequence."""
    tail_slots: Tensor | None = None
    """int32 or int64 [seqs], of any stride: the entry of the exact tail that each sequence owns;
    -1: it has none, or is padding. None: the layers have no tail."""
    tail_valid: Tensor | None = None
    """int32 [max_seqs, 2]: of each entry of the tail, how many sink tokens it holds and the first
    position that its ring holds. None: everything that a query asks for is there."""

    def __post_init__(self) -> None:
        _checks.check_positive(max_q_len=self.max_q_len)
        if self.seq_lens is None:
            if self.tail_slots is not None:
                raise ValueError("tail needs seq_lens")
            for name, tensor, dtypes in (
                ("slot_mapping", self.slot_mapping, _checks.SLOTS),
                ("cu_seqlens_q", self.cu_seqlens_q, (torch.int32,)),
            ):
                if tensor is not None:
                    _checks.check_dtype(name, tensor, dtypes)
                    _checks.check_constant(name, tensor, tensor.device, tensor.dtype, (None,))
            return
        _checks.check_dtype("seq_lens", self.seq_lens, (torch.int32,))
        device = self.seq_lens.device
        _checks.check_constant("seq_lens", self.seq_lens, device, torch.int32, (None,))
        seqs = self.seq_lens.shape[0]
        if self.slot_mapping is not None:
            _checks.check_slots("slot_mapping", self.slot_mapping, device, None)
        if self.block_table is not None:
            _checks.check_table("block_table", self.block_table, device, seqs)
        if self.tail_slots is not None:
            _checks.check_tail_slots(self.tail_slots, device, seqs)
        for name, tensor, shape in (
            ("cu_seqlens_q", self.cu_seqlens_q, (seqs + 1,)),
            ("tail_valid", self.tail_valid, (None, 2)),
        ):
            if tensor is not None:
                _checks.check_constant(name, tensor, device, torch.int32, shape)


@dataclass(eq=False, repr=False)
class AttentionOptions:
    """How queries attend, beyond what the cache says: the same for every call of a layer.

    Raises:
        TypeError: sink_logits of another dtype.
        ValueError: numbers out of range, a sliding_window that is no whole number.
    """

    softmax_scale: float | None = None
    """Factor of the scores, finite in float32; None: 1 / sqrt(head_dim)."""
    sliding_window: int = 0
    """A query sees this many keys, its own included; 0: all."""
    soft_cap: float = 0.0
    """Above 0, a score s becomes soft_cap * tanh(s / soft_cap). 0: none; otherwise 1.17549e-38, the
    least normal float32, to 1000. Far above the scores a cap has no effect but loss of digits."""
    sink_logits: Tensor | None = None
    """float32 [q_heads]: each adds exp(logit) to the softmax denominator, and to lse."""

    def __post_init__(self) -> None:
        scale = self.softmax_scale
        if scale is not None and not abs(scale) <= FLOAT32.max:
            raise ValueError(
                f"softmax_scale is {scale}, supported: numbers that are finite in float32"
            )
        _checks.check_whole(sliding_window=self.sliding_window)
        if self.sliding_window < 0:
            raise ValueError(
                f"sliding_window is {self.sliding_window}, supported: 0 (none) and more"
            )
        if self.soft_cap != 0 and not FLOAT32.tiny <= self.soft_cap <= MAX_SOFT_CAP:
            raise ValueError(
                f"soft_cap is {self.soft_cap}, supported: 0 (none), or {FLOAT32.tiny:g} to "
                f"{MAX_SOFT_CAP:g}"
            )
        if self.sink_logits is not None:
            _checks.check_dtype("sink_logits", self.sink_logits, (torch.float32,))
