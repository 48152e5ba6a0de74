"""Latent rows that are kept as they are: the control for packed ones.

Attention is absorbed as over packed rows (latent.py), by matrix products over all that is
allocated. So it shows what absorption alone does, without any bits taken away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from torch_turboquant._checks import check_whole_fields
from torch_turboquant.batch import AttentionBatch, AttentionOptions
from torch_turboquant.config import CacheConfig
from torch_turboquant.latent import LatentConfig

UNCOMPRESSED = "uncompressed"
"""The preset that takes no bits away."""


@dataclass(frozen=True)
class UncompressedLatents:
    """The configuration of latent rows that stay as they are. No tail: all tokens are exact."""

    latent_dim: int
    rope_dim: int
    page_size: int = 32
    sink_tokens: ClassVar[int] = 0
    recent_window: ClassVar[int] = 0
    has_tail: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_whole_fields(self, "latent_dim", "rope_dim", "page_size")

    @property
    def channels(self) -> int:
        """Of one token."""
        return self.latent_dim + self.rope_dim


AnyConfig = CacheConfig | LatentConfig | UncompressedLatents


class NoTables(NamedTuple):
    """What other forms keep their constants in."""

    center: None = None


class UncompressedPages:
    """Pages of latent rows as they came, [pages, page_size, latent_dim + rope_dim].

    A sequence owns the same number of pages as every other one, all side by side.
    """

    ring = None

    def __init__(self, pages: Tensor, config: UncompressedLatents, sequences: int) -> None:
        self.pages, self.config, self.sequences = pages, config, sequences

    def store(self, latent: Tensor, rope: Tensor, batch: AttentionBatch) -> None:
        """New tokens [tokens, 1, latent_dim] and [tokens, 1, rope_dim], into their slots."""
        rows = torch.cat([latent[:, 0], rope[:, 0]], dim=-1)
        assert batch.slot_mapping is not None
        slots = batch.slot_mapping.long()
        page, token = slots // self.config.page_size, slots % self.config.page_size
        # Into the pages themselves: torch.compile copies all of them to write to a view.
        self.pages.index_put_((page, token), rows)

    def attend(
        self, q: Tensor, batch: AttentionBatch, options: AttentionOptions
    ) -> tuple[Tensor, None]:
        """Causal attention of q [tokens, heads, latent_dim + rope_dim] -> latents, absorbed.

        All columns of the memory are multiplied, and those that a query does not see are masked.
        """
        lengths, new = batch.seq_lens, batch.max_q_len
        assert lengths is not None
        seqs, (tokens, heads, channels) = len(lengths), q.shape
        dense = q
        if tokens != seqs * new:  # shorter sequences end where the others do
            place = _right_aligned(batch, tokens)
            dense = q.new_zeros(seqs * new, heads, channels).index_copy_(0, place, q)
        memory = self.pages.view(self.sequences, -1, channels)[:seqs]
        scores = dense.reshape(seqs, new * heads, channels) @ memory.mT
        scores = scores.unflatten(1, (new, heads)).float() * options.softmax_scale
        last = lengths[:, None] - new + torch.arange(new, device=q.device)  # that a query sees
        hidden = torch.arange(memory.shape[1], device=q.device) > last[:, :, None]
        p = scores.masked_fill(hidden[:, :, None], -torch.inf).softmax(-1).to(q.dtype)
        out = p.flatten(1, 2) @ memory[..., : self.config.latent_dim]
        out = out.view(seqs * new, heads, -1)
        return (out if tokens == seqs * new else out.index_select(0, place)), None


def _right_aligned(batch: AttentionBatch, tokens: int) -> Tensor:
    """Places of a ragged batch's tokens among max_q_len columns of each sequence: int64."""
    assert batch.cu_seqlens_q is not None
    ends = batch.cu_seqlens_q[1:].long()
    token = torch.arange(tokens, device=ends.device)
    sequence = torch.searchsorted(ends, token, right=True)
    return (sequence + 1) * batch.max_q_len - (ends[sequence] - token)
