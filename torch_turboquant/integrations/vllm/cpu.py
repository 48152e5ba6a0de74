"""Which attention backend vLLM gets on a CPU.

On CPUs vLLM has one backend for each kind of attention and ignores --attention-backend, but honours
what is registered in that one's place. The names of this module are ours where the user asked for
ours, else vLLM's.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Names of this module: the class of our backend, and the one in whose place it is registered.
_NAMES = {
    "Backend": ("backend.CpuBackend", "cpu_attn.CPUAttentionBackend"),
    "LatentBackend": ("latent.CpuLatentBackend", "mla.cpu_mla.CPUMLABackend"),
    "AmxLatentBackend": ("latent.CpuLatentBackend", "mla.amx_mla.AMXMLABackend"),
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(name)
    from vllm.config import get_current_vllm_config

    from torch_turboquant.integrations.engine.settings import KEY
    from torch_turboquant.integrations.vllm import backend

    ours, theirs = _NAMES[name]
    config = get_current_vllm_config()
    asked = config.attention_config.backend
    if asked is not None and asked.name in backend.NAMES:
        return _find("torch_turboquant.integrations.vllm", ours)
    if KEY in config.additional_config:
        raise ValueError(
            "turboquant: there are settings, but another attention backend is chosen: pass "
            "--attention-backend CUSTOM"
        )
    return _find("vllm.v1.attention.backends", theirs)


def _find(package: str, path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"{package}.{module}"), name)
