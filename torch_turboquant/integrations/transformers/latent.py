"""Layers of latent attention (MLA): one latent row and one key with RoPE per token, for all heads.

transformers hands both to `update`, and then calls the module's `expand_kv`, which makes the keys
and values of all heads from them, of every token and in every step. Only an exact forward does that
here. Any other one is *absorbed*: with W_UK and W_UV the parts of `kv_b_proj` that make a head's
keys and values, a head's score of a token is

    q_nope . (W_UK c) + q_rope . k_rope  =  (W_UK^T q_nope) . c + q_rope . k_rope

and its output W_UV (sum of p c). So queries become rows of the latent's size, attention reads the
latent rows c as keys and as values, and what comes out is expanded. binding.py puts `expand` in the
place of `expand_kv`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from torch_turboquant.batch import AttentionBatch, AttentionOptions
from torch_turboquant.integrations.transformers.layer import TurboQuantLayer
from torch_turboquant.integrations.transformers.sequences import Piece, chosen_tokens
from torch_turboquant.integrations.transformers.uncompressed import (
    UncompressedLatents,
    UncompressedPages,
)
from torch_turboquant.latent import LatentConfig, LatentTables
from torch_turboquant.ops.mla import mla_attention, mla_store
from torch_turboquant.tail import Tail, ring_rows


class LatentLayer(TurboQuantLayer):
    """Latent rows of one attention layer; made by TurboQuantCache.

    What TurboQuantLayer calls keys are here latent rows [batch, 1, tokens, latent_dim], and what it
    calls values are keys with RoPE [batch, 1, tokens, rope_dim].
    """

    has_one_call = False
    _projections: Projections | None = None  # of a `kv_b_proj` that is no plain linear layer

    # -- memory

    def check_shapes(self, key_states: Tensor, value_states: Tensor) -> None:
        config = self.config
        batch, _, tokens, _ = key_states.shape
        latent, rope = [batch, 1, tokens, config.latent_dim], [batch, 1, tokens, config.rope_dim]
        if list(key_states.shape) != latent or list(value_states.shape) != rope:
            raise ValueError(
                f"layer {self.index} has latent rows {list(key_states.shape)} and keys with RoPE "
                f"{list(value_states.shape)}, its configuration says {latent} and {rope}"
            )

    def check_center(self, kv_heads: int, head_dim: int) -> None:
        """A given center was checked when it was given: there is one shape only."""

    def wanted_pages(self, owned: int) -> tuple[tuple[int, ...], torch.dtype]:
        config, pages = self.config, self.sequences.rows * owned
        if isinstance(config, UncompressedLatents):
            return (pages, config.page_size, config.channels), self.dtype
        return (pages, config.record_bytes), torch.uint8

    def empty_pages(self, owned: int) -> Tensor:
        shape, dtype = self.wanted_pages(owned)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def ring_shape(self) -> tuple[int, ...]:
        config, sequences = self.config, self.sequences
        rows = config.sink_tokens + ring_rows(config, sequences.max_q_len)
        return sequences.rows, rows, config.channels

    def make_paged(self, pages: Tensor, ring: Tensor | None) -> Any:
        if isinstance(self.config, UncompressedLatents):
            return UncompressedPages(pages, self.config, self.sequences.rows)
        return PackedLatents(pages, self.config, self.tables, ring)

    @staticmethod
    def store_together(
        layers: list[TurboQuantLayer], tokens: list[tuple[Tensor, Tensor]], piece: Piece
    ) -> None:
        for layer, pair in zip(layers, tokens, strict=True):
            rows = [chosen_tokens(x, piece.real).transpose(1, 2).flatten(0, 1) for x in pair]
            layer.paged.store(*rows, piece.batch)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {name: x for name, x in state.items() if name != "_projections"}

    # -- what the model calls

    def expand(
        self,
        module: nn.Module,
        own: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        latent: Tensor,
        rope: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """In the place of the module's `expand_kv`, which is `own`."""
        forward = self.sequences.forward
        if not forward.exact:
            return latent, rope
        forward.latents[self.index] = super().take_back(module, latent, rope)
        forward.handed[self.index] = own(latent, rope)
        return forward.handed[self.index]

    def take_back(
        self, module: nn.Module | None, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        handed = super().take_back(module, key, value)
        return self.sequences.forward.latents.pop(self.index, handed)

    # -- attending

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of query [batch, heads, new, nope + rope] over latent rows, absorbed."""
        if others := [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]:
            raise ValueError(
                f"{type(module).__name__} asks for {', '.join(others)}, which TurboQuantCache does "
                "not support over latent rows; it supports scaling"
            )
        nope = query.shape[3] - self.config.rope_dim
        kwargs["scaling"] = kwargs.get("scaling") or query.shape[3] ** -0.5
        weight, bias = self._projections_of(module)
        to_keys, to_values = weight.unflatten(0, (query.shape[1], -1)).split(
            [nope, module.v_head_dim], dim=1
        )
        absorbed = torch.einsum("bhsn,hnr->bhsr", query[..., :nope], to_keys)
        rows = torch.cat([absorbed.to(self.dtype), query[..., nope:].to(self.dtype)], dim=-1)
        out, _ = super().attend(module, rows, key, value, **kwargs)
        out = torch.einsum("bshr,hvr->bshv", out, to_values)
        if bias is not None:  # that of keys adds the same to all scores of a query
            out = out + bias.unflatten(0, (query.shape[1], -1))[:, nope:]
        return out, None

    def _projections_of(self, module: nn.Module) -> Projections:
        """W_UK and W_UV of all heads.

        The weight of a plain linear layer is used where it stands. What another one (quantised, or
        with an adapter) does to the latent's channels is worked out once after each prompt.
        """
        projection = module.kv_b_proj
        if _is_plain(projection):
            return Projections(projection.weight, None)
        found = self._projections
        if found is None:
            unit = torch.eye(self.config.latent_dim, dtype=self.dtype, device=self.device)
            bias = projection(torch.zeros_like(unit[:1]))
            found = Projections((projection(unit) - bias).T.contiguous(), bias[0])
            if not is_dynamo_compiling():
                self._projections = found
        return found

    def forget_projections(self) -> None:
        """They may be others from now on."""
        self._projections = None

    def reset(self) -> None:
        super().reset()
        self.forget_projections()


class Projections(NamedTuple):
    """What a module's `kv_b_proj` does to latents: linear, or linear and a bias."""

    weight: Tensor
    """[heads * (nope + v_head_dim), latent_dim]: of each head W_UK, then W_UV."""
    bias: Tensor | None
    """[heads * (nope + v_head_dim)]."""


class PackedLatents:
    """The packed latent rows of one layer: pages, config, tables and the memory of its tail."""

    def __init__(
        self, pages: Tensor, config: LatentConfig, tables: LatentTables, ring: Tensor | None
    ) -> None:
        self.pages, self.config, self.tables, self.ring = pages, config, tables, ring

    def store(self, latent: Tensor, rope: Tensor, batch: AttentionBatch) -> None:
        """New tokens [tokens, 1, latent_dim] and [tokens, 1, rope_dim], into slots and tail."""
        mla_store(
            latent[:, 0],
            rope[:, 0],
            self.pages,
            batch.slot_mapping,
            self.config,
            self.tables,
            tail=self._tail(batch),
            seq_lens=batch.seq_lens,
            cu_seqlens_q=batch.cu_seqlens_q,
        )

    def attend(
        self, q: Tensor, batch: AttentionBatch, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Causal attention of q [tokens, heads, latent_dim + rope_dim] -> latents, absorbed."""
        r = self.config.latent_dim
        return mla_attention(
            q[..., :r],
            q[..., r:],
            self.pages,
            batch.block_table,
            batch.seq_lens,
            self.config,
            self.tables,
            softmax_scale=options.softmax_scale,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_q_len=batch.max_q_len,
            tail=self._tail(batch),
        )

    def _tail(self, batch: AttentionBatch) -> Tail | None:
        return None if self.ring is None else Tail(self.ring, batch.tail_slots, batch.tail_valid)


def _is_plain(projection: nn.Module) -> bool:
    """Whether calling it multiplies with its weight and does nothing else."""
    return (
        type(projection) is nn.Linear
        and type(projection.weight) is nn.Parameter  # no subclass, as torchao has for packed ones
        and projection.bias is None
        and "forward" not in vars(projection)
        and not projection._forward_hooks
        and not projection._forward_pre_hooks
    )
