"""Which attention backend vLLM gets on a CPU.

On CPUs vLLM has one backend for each kind of attention and ignores --attention-backend, but honours
what is registered in that one's place. The names of this module are ours where the user asked for
ours, else vLLM's.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Names of this module: the class of our backend, and vLLM's name of what it is registered for.
_NAMES = {
    "Backend": ("backend.CpuBackend", "CPU_ATTN"),
    "LatentBackend": ("latent.CpuLatentBackend", "CPU_MLA"),
    "AmxLatentBackend": ("latent.CpuLatentBackend", "AMX_MLA"),
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(name)
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from torch_turboquant.integrations.engine.settings import KEY
    from torch_turboquant.integrations.vllm import choice

    ours, theirs = _NAMES[name]
    config = get_current_vllm_config()
    asked = config.attention_config.backend
    if asked is not None and asked.name in choice.NAMES:
        choice.check_version()
        from torch_turboquant.integrations.vllm import adapter, limits

        if ours.startswith("latent.") and not adapter.INTERFACE.latents:
            raise ValueError(f"torch_turboquant: {limits.NO_LATENTS}")
        return _find(f"{choice.MODULE}.{ours}")
    if KEY in config.additional_config and not _has_ours(config):
        raise ValueError(
            "turboquant: there are settings, but another attention backend is chosen: pass "
            "--attention-backend CUSTOM"
        )
    return _find(AttentionBackendEnum[theirs].value)


def _has_ours(config: Any) -> bool:
    """Whether layers of ours have been made: those of a draft come after them, and may differ."""
    layers = config.compilation_config.static_forward_context.values()
    return any(hasattr(getattr(layer, "impl", None), "plan") for layer in layers)


def _find(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
