"""Which of our backends vLLM gets by a name of ours: that of the kind of attention of the model.

A name of vLLM's stands for one class, and models with latent attention (MLA) need another class
than the rest. vLLM looks the class up while it makes a layer, when it is known what the model is;
the names of this module, Backend and OwnNameBackend, are looked up anew each time.
"""

from __future__ import annotations

from typing import Any

FOLLOWING = ("eagle", "eagle3", "mtp", "draft_model")
"""Methods of speculation whose draft models attend as any model does."""


def let_drafts_follow(vllm_config: Any) -> None:
    """Gives a draft model the backend of the model that it drafts for, unless the user chose one.

    vLLM's V1 runner would choose one by itself, and on CPUs there is no other choice than by name.
    Must be called before the draft model is made.
    """
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method in FOLLOWING:
        chosen = speculative.attention_backend
        speculative.attention_backend = chosen or vllm_config.attention_config.backend


def __getattr__(name: str) -> Any:
    if name not in ("Backend", "OwnNameBackend"):
        raise AttributeError(name)
    from torch_turboquant.integrations.vllm import adapter, backend

    own = name == "OwnNameBackend"
    if not (adapter.INTERFACE.latents and _has_latents()):
        return backend.OwnNameBackend if own else backend.TurboQuantBackend
    from torch_turboquant.integrations.vllm import latent

    return latent.OwnNameLatentBackend if own else latent.LatentBackend


def _has_latents() -> bool:
    """Whether the model that is made has latent attention; no model is made: no."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and config.model_config is not None and config.model_config.use_mla
