"""Layers with latent attention (MLA): the backend of models such as DeepSeek and GLM-4.7-Flash.

vLLM hands queries of all heads, latents after their norm and the channels of the position after
RoPE to a layer's `forward_mha`, and, if metadata name tokens that decode, absorbed queries of these
to `forward_mqa`. Here all tokens take the first way, because only there are the latents of the step
at hand, unrounded. What a step is made of is decided as for other layers (backend.py):

- Decode steps, drafts and short chunks of prompts are absorbed: queries take W_UK, mla_attention
  reads latents, outputs take W_UV.
- Prompts, and long chunks of them, are left to FlashAttention where vLLM has it: keys and values of
  all heads are made from the step's own latents, and from those of the pages, a segment at a time.

Channels of latents are divided by the weight of their norm before they are coded, which the layer
learns from the module around it (adapter.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import MLAAttentionImpl

from torch_turboquant.integrations.engine import pages
from torch_turboquant.integrations.engine.limits import ELSEWHERE, refuse
from torch_turboquant.integrations.vllm import adapter, choice, limits
from torch_turboquant.integrations.vllm.backend import (
    Part,
    TurboQuantBackend,
    TurboQuantMetadata,
    TurboQuantMetadataBuilder,
    keep_while_asleep,
    logger,
)
from torch_turboquant.integrations.vllm.plan import Plan, are_for_drafts, latest_plan, plan_of
from torch_turboquant.integrations.vllm.prompts import (
    LONG_LATENT_CHUNK,
    latent_prompt_attention,
)
from torch_turboquant.ops.mla import mla_attention, mla_load, mla_store
from torch_turboquant.tail import Tail

# ---- the backend


class LatentBackend(TurboQuantBackend):
    """What vLLM asks before it makes layers. --attention-backend CUSTOM."""

    @staticmethod
    def get_impl_cls() -> type[LatentImpl]:
        return LatentImpl

    @staticmethod
    def get_builder_cls() -> type[LatentMetadataBuilder]:
        return LatentMetadataBuilder

    @staticmethod
    def bytes_per_token(head_dim: int) -> int:
        plan, dims = latest_plan(), limits.latent_dims(head_dim)
        assert dims is not None, "supports_head_size has said so"
        return plan.bytes_per_token(plan.settings.latent_config(*dims, plan.dtype))

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return list(pages.LATENT_SIZES)

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return limits.wrong_latent_dims(head_size) is None

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None = None,
        use_mla: bool = True,
        has_sink: bool = False,
        use_sparse: bool = False,
        *_: Any,
        **__: Any,
    ) -> str | None:
        on_cpu = current_platform.is_cpu()
        given = kv_cache_dtype or "auto"
        wrong = limits.wrong_latent_layer(head_size, None, dtype, on_cpu, given, indexer=use_sparse)
        return "; ".join(wrong) or None


class OwnNameLatentBackend(LatentBackend):
    """--attention-backend TORCH_TURBOQUANT."""

    @staticmethod
    def get_name() -> str:
        return choice.OWN_NAME


class CpuLatentBackend(LatentBackend):
    """The name that vLLM knows on a CPU."""

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA"


# ---- a step


@dataclass
class LatentMetadata(TurboQuantMetadata):
    """What vLLM's layer reads of a step: that no token takes `forward_mqa`."""

    num_decodes: ClassVar[int] = 0
    num_decode_tokens: ClassVar[int] = 0
    num_prefills: ClassVar[int] = 0
    prefill: ClassVar[None] = None

    @property
    def num_actual_tokens(self) -> int:
        return self.whole.end


class LatentMetadataBuilder(TurboQuantMetadataBuilder):
    """Makes the metadata of a step."""

    metadata_class = LatentMetadata

    @staticmethod
    def for_flash(vllm_config: Any, device: torch.device) -> tuple[int, int]:
        return LONG_LATENT_CHUNK, 0


# ---- a layer


class Rope(torch.nn.Module):
    """vLLM's rotation in plain PyTorch.

    Its kernel for CPUs (0.32) takes the heads of queries [tokens, heads, d] for tokens: it rotates
    only some of them, and by the positions of other tokens.
    """

    def __init__(self, rope: Any) -> None:
        super().__init__()
        self.rope = rope

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        rotated: tuple[Tensor, Tensor] = self.rope.forward_native(positions, query, key)
        return rotated


class LatentImpl(MLAAttentionImpl[LatentMetadata]):
    """One layer: its tables, and the calls of a step."""

    can_return_lse_for_decode = False
    supports_quant_query_input = False
    supports_pcp = False
    num_kv_heads = 1

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        q_lora_rank: int | None = None,
        qk_head_dim: int | None = None,
        indexer: Any = None,
        **extra: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.latent_dim, self.rope_dim = kv_lora_rank, qk_rope_head_dim
        self.nope_dim, self.value_dim = qk_nope_head_dim, v_head_dim
        self.kv_b_proj, self.kv_cache_dtype = kv_b_proj, kv_cache_dtype
        self.vllm_config = get_current_vllm_config()
        self.dtype = torch.get_default_dtype()
        on_cpu = current_platform.is_cpu()
        wrong = limits.wrong_latent_layer(
            head_size,
            kv_lora_rank,
            self.dtype,
            on_cpu,
            kv_cache_dtype,
            sliding_window,
            indexer,
            extra,
        )
        refuse(wrong)
        self.plan: Plan = plan_of(self.vllm_config)
        self.latent_norm: Any = None  # the module; `attach_to` tells
        self.drafts = are_for_drafts(self.vllm_config)
        self.index: int | None = None
        self.bound: Tensor | None = None

    def attach_to(self, module: Any) -> None:
        """Reads the norm of latents from the module around this layer.

        On a CPU the module also gets a rotation that takes its queries as they are shaped (Rope).
        """
        self.latent_norm = module.kv_a_layernorm
        if current_platform.is_cpu() and module.rotary_emb is not None:
            module.rotary_emb = Rope(module.rotary_emb)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Makes what stays; called again when weights are loaded again, then addresses stay."""
        if self.index is not None:
            self._learn_norm()
            return
        layers = self.vllm_config.compilation_config.static_forward_context
        name, layer = next((n, x) for n, x in layers.items() if getattr(x, "impl", None) is self)
        self.index, self.layer = self.plan.index(name, self.drafts), layer
        if self.latent_norm is None:
            raise ValueError(
                f"torch_turboquant: layer {name} does not tell the norm of its latents, whose "
                "channels are scaled by its weight; supported: models of vLLM's own that have "
                f"MultiHeadLatentAttentionWrapper. {ELSEWHERE.capitalize()}"
            )
        dims = self.latent_dim, self.rope_dim
        self.config = self.plan.latent_config(self.index, *dims)
        weight = self.latent_norm.weight
        self.tables = self.plan.latent_tables(self.index, self.config, weight)
        keep_while_asleep(layer, **self.tables._asdict())
        self.prompt_attention = latent_prompt_attention(
            self.nope_dim + self.rope_dim, self.value_dim, self.scale
        )

        def bytes_per_token() -> int:
            self.plan.tell(logger, self, layers)
            return self.plan.given(layers)[name]

        adapter.set_page_bytes(layer, bytes_per_token, self.plan.tokens_of_block)

    def _learn_norm(self) -> None:
        """Scales of channels from weights that were loaded again, in place."""
        weight = self.latent_norm.weight
        new = self.plan.latent_tables(int(self.index or 0), self.config, weight)
        for old, found in zip(self.tables, new, strict=True):
            if old is not None:
                old.copy_(found)

    def _bind(self, kv_cache: Tensor) -> None:
        """Finds the parts of pages in memory that vLLM has allocated, [pages, tokens, bytes]."""
        self.config = replace(self.config, page_size=kv_cache.shape[1])
        parts = pages.latent_page_parts(kv_cache, self.config, self.plan.first_token_dtype)
        self.pages, self.first_tokens = parts
        self.bound = kv_cache

    # -- what vLLM calls

    def do_kv_cache_update(self, *_: Any) -> None:
        """Nothing: latents are stored in forward_mha, which knows the first tokens of sequences."""

    def forward_mqa(self, *_: Any) -> Any:
        """Is not called: LatentMetadata.num_decode_tokens is 0."""
        raise NotImplementedError

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: LatentMetadata,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        """Stores the latents of a step and attends.

        Args:
            q: [tokens, heads, nope + rope], after RoPE.
            kv_c_normed: [tokens, latent_dim].
            k_pe: [tokens, 1, rope_dim], after RoPE.
            kv_c_and_k_pe_cache: uint8 [pages, tokens of a page, bytes of a token].
            output: [tokens, heads * v_head_dim], filled.
        """
        if kv_c_and_k_pe_cache is not self.bound:
            self._bind(kv_c_and_k_pe_cache)
        latent, rope = kv_c_normed, k_pe[:, 0]
        self._store(attn_metadata, latent, rope)
        out = output.view(-1, self.num_heads, self.value_dim)
        has_flash = self.prompt_attention is not None
        for part in attn_metadata.parts if has_flash else attn_metadata.by_op:
            new = slice(part.first, part.end)
            given = q[new], latent[new], rope[new], out[new]
            if has_flash and part.by_flash:
                self._attend_expanded(part, *given)
            else:
                self._attend_absorbed(part, *given)

    # -- the calls of a step

    def _tail(self, part: Part) -> Tail | None:
        return None if self.first_tokens is None else Tail(self.first_tokens, part.first_pages)

    def _store(self, m: LatentMetadata, latent: Tensor, rope: Tensor) -> None:
        """Stores a whole step before any of its parts is computed, as in backend.py."""
        step = m.whole
        mla_store(
            latent,
            rope,
            self.pages,
            m.slot_mapping,
            self.config,
            self.tables,
            tail=self._tail(step),
            seq_lens=step.seq_lens,
            cu_seqlens_q=step.cu_seqlens,
        )

    def _attend_absorbed(
        self, part: Part, q: Tensor, latent: Tensor, rope: Tensor, out: Tensor
    ) -> None:
        """Attention over latents: q [tokens, heads, nope + rope], out [tokens, heads, v]."""
        q_latent = q.new_empty(q.shape[0], self.num_heads, self.latent_dim)
        nope = q[..., : self.nope_dim].transpose(0, 1)
        torch.bmm(nope, self.layer.W_UK_T, out=q_latent.transpose(0, 1))
        found, _ = mla_attention(
            q_latent,
            q[..., self.nope_dim :],
            self.pages,
            part.block_table,
            part.seq_lens,
            self.config,
            self.tables,
            softmax_scale=self.scale,
            cu_seqlens_q=part.cu_seqlens,
            max_q_len=part.longest,
            tail=self._tail(part),
            latent_new=latent if part.exact else None,
            rope_new=rope if part.exact else None,
        )
        torch.bmm(found.transpose(0, 1), self.layer.W_UV, out=out.transpose(0, 1))

    def _attend_expanded(
        self, part: Part, q: Tensor, latent: Tensor, rope: Tensor, out: Tensor
    ) -> None:
        """Attention over keys and values of all heads; shapes as in _attend_absorbed."""
        assert self.prompt_attention is not None
        keys, values = self._expand(latent, rope)
        options = part.cu_seqlens, part.longest
        if not part.contexts:
            self.prompt_attention.fresh(q, keys, values, out, *options)
            return

        def load(sequence: int, at: int, tokens: int, length: Tensor) -> tuple[Tensor, Tensor]:
            row = part.block_table[sequence : sequence + 1, at // self.config.page_size :]
            arguments = self.config, self.tables, tokens, q.dtype
            (old,), (old_rope,) = mla_load(self.pages, row, length, *arguments)
            if at == 0 and self.first_tokens is not None:
                entry = self.first_tokens.index_select(0, row[:, 0])[0]
                pages.put_first_latent(old, old_rope, entry)
            return self._expand(old, old_rope)

        self.prompt_attention.continued(
            q,
            keys,
            values,
            out,
            *options,
            part.contexts,
            load,
        )

    def _expand(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [tokens, heads, nope + rope] and values [tokens, heads, v] of all heads."""
        both = self.kv_b_proj(latent)[0].view(-1, self.num_heads, self.nope_dim + self.value_dim)
        nope, values = both.split([self.nope_dim, self.value_dim], dim=-1)
        return torch.cat([nope, rope[:, None].expand(-1, self.num_heads, -1)], dim=-1), values
