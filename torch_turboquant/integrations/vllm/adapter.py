"""Everything that differs between versions of vLLM: names, the bytes of a page, its shape.

Models with latent attention are served from 0.32 on: their interface is here and in latent.py.

Until 0.27 a layer builds its own cache spec and a backend cannot change it: `spec_of` then makes
one of vLLM's specs for packed pages. From 0.28 on a spec has `state_content_bytes`, and backends
change specs in `customize_spec`. In both, a layer's `get_kv_cache_spec` is replaced on the layer
itself, because only the layer knows its number and so its preset.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import vllm
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from torch_turboquant.config import NAMED_PRESETS, PRESETS
from torch_turboquant.integrations.engine import centers, pages
from torch_turboquant.integrations.vllm.choice import MODULE, OWN_NAME
from torch_turboquant.integrations.vllm.limits import NOT_CAUSAL
from torch_turboquant.integrations.vllm.settings import DTYPE_PREFIX
from torch_turboquant.integrations.vllm.versions import find_interface

INTERFACE = find_interface(vllm.__version__)


# ---- registration


def register() -> None:
    """Registers what only some versions allow; may be called again."""
    if INTERFACE.own_name and OWN_NAME not in AttentionBackendEnum.__members__:
        register_backend(OWN_NAME, f"{MODULE}.choice.OwnNameBackend")
    if INTERFACE.own_dtype:
        _register_dtypes()
    if INTERFACE.latents:
        _register_latent_layers()


def _register_latent_layers() -> None:
    """Layers with latent attention whose backend, if it is ours, knows the modules around it.

    vLLM lets plug-ins replace the class of these layers, and tells backends nothing of the modules
    around them. Another backend is given exactly what vLLM gives it.
    """
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

    name = MultiHeadLatentAttentionWrapper.__name__
    if name in op_registry_oot:
        return

    class LatentAttention(MultiHeadLatentAttentionWrapper):
        """vLLM's layer."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if hasattr(self.mla_attn.impl, "attach_to"):
                self.mla_attn.impl.attach_to(self)

    MultiHeadLatentAttentionWrapper.register_oot(LatentAttention, name=name)


def _register_dtypes() -> None:
    """--kv-cache-dtype tq_<preset>."""
    from vllm.config import cache

    class Handler:
        """What vLLM asks of a dtype that only one backend knows."""

        name = DTYPE_PREFIX

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> Any:
            return kv_cache_interface.KVQuantMode.CUSTOM

    for preset in (*PRESETS, *NAMED_PRESETS):
        name = DTYPE_PREFIX + preset.replace("-", "_")
        if not cache.is_known_kv_cache_dtype(name):
            cache.register_kv_cache_dtype(name)(Handler)


# ---- the model around a layer


def keys_have_bias(layer: torch.nn.Module) -> bool:
    """Whether the module around an attention layer gives keys a bias; False where there is none.

    Must be called while vLLM loads the model: only who loads it has it, and no layer knows what is
    around it.
    """
    from vllm.model_executor.layers.linear import QKVParallelLinear

    frame: Any = sys._getframe(1)
    while frame is not None:
        model = frame.f_locals.get("model")
        loads = frame.f_globals["__name__"].startswith("vllm.model_executor.model_loader.")
        if loads and isinstance(model, torch.nn.Module):
            around = (m for m in model.modules() if any(one is layer for one in m.children()))
            return any(centers.keys_have_bias(module, QKVParallelLinear) for module in around)
        frame = frame.f_back
    return False


# ---- the bytes and the shape of a page


@dataclass(frozen=True, kw_only=True)
class PackedSlidingWindowSpec(kv_cache_interface.SlidingWindowSpec):
    """To 0.27: the pages of a layer with a sliding window."""

    slot_bytes: int = 0
    """Of one token and KV head."""

    @property
    def real_page_size_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.slot_bytes


def packed_spec(spec: Any, bytes_per_token: int) -> Any:
    """A spec of vLLM's for a layer whose tokens take so many bytes per KV head."""
    if INTERFACE.page_bytes == "backend":
        return replace(spec, dtype=torch.uint8, state_content_bytes=bytes_per_token)
    values = {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}
    values["dtype"] = torch.uint8
    if isinstance(spec, kv_cache_interface.SlidingWindowSpec):
        return PackedSlidingWindowSpec(**values, slot_bytes=bytes_per_token)
    values["tq_slot_size"] = bytes_per_token
    return kv_cache_interface.TQFullAttentionSpec(**values)


def set_page_bytes(
    layer: Any, bytes_per_token: Callable[[], int], tokens_of_block: Callable[[int], int]
) -> None:
    """Lets vLLM allocate pages of packed tokens for this layer; called before it asks for specs,
    which raises ValueError for a layer that is not causal.

    tokens_of_block: of the layer's blocks, from the number that vLLM has chosen.
    """

    def get_kv_cache_spec(vllm_config: Any) -> Any:
        spec = type(layer).get_kv_cache_spec(layer, vllm_config)
        if getattr(spec, "non_causal", False):  # HRM-Text: no step of it would be causal
            raise ValueError(NOT_CAUSAL)
        if spec is not None:
            spec = replace(spec, block_size=tokens_of_block(spec.block_size))
        return None if spec is None else packed_spec(spec, bytes_per_token())

    layer.get_kv_cache_spec = get_kv_cache_spec


def longest_lengths(m: Any) -> torch.Tensor:
    """Upper bounds of the lengths of a step's sequences, on the CPU.

    To 0.29 chunks of sequences (Llama 4) have theirs beside the bounds of whole sequences.
    """
    exact: torch.Tensor | None = getattr(m, "_seq_lens_cpu", None)
    bounds: torch.Tensor = m.seq_lens_cpu_upper_bound
    return bounds if exact is None else exact


class Pages(AttentionBackend):
    """The part of a backend that speaks of pages: [pages, kv_heads, page_size, bytes of a token].

    A page is contiguous, and pages lie at any distance from each other.
    """

    bytes_per_token: Callable[[int], int]
    """Of a head dimension, where no layer is known: a static method of the backend."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return list(pages.SIZES)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, -1)  # layers differ: the view finds the bytes

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        if spec.state_content_bytes is not None:
            return spec
        return packed_spec(spec, cls.bytes_per_token(spec.head_size))
