"""Which attention backend vLLM gets on a CPU.

On CPUs vLLM has one backend and ignores --attention-backend, but honours what is registered in that
one's place. The name `Backend` of this module is ours where the user asked for ours, else vLLM's.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "Backend":
        raise AttributeError(name)
    from vllm.config import get_current_vllm_config

    from torch_turboquant.integrations.vllm import backend
    from torch_turboquant.integrations.vllm.settings import KEY

    config = get_current_vllm_config()
    asked = config.attention_config.backend
    if asked is not None and asked.name in backend.NAMES:
        return backend.CpuBackend
    if KEY in config.additional_config:
        raise ValueError(
            "turboquant: there are settings, but another attention backend is chosen: pass "
            "--attention-backend CUSTOM"
        )
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend
