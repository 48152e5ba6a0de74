"""Which of our backends vLLM gets by a name of ours: that of the kind of attention of the model.

A name of vLLM's stands for one class, and models with latent attention (MLA) need another class
than the rest. vLLM looks the class up while it makes a layer, when it is known what the model is;
the names of this module, Backend and OwnNameBackend, are looked up anew each time.
"""

from __future__ import annotations

from typing import Any

from torch_turboquant.integrations.vllm.versions import wrong_version

MODULE = "torch_turboquant.integrations.vllm"
OWN_NAME = "TORCH_TURBOQUANT"
NAMES = ("CUSTOM", OWN_NAME)

FOLLOWING = ("eagle", "eagle3", "mtp", "draft_model")
"""Methods of speculation whose draft models attend as any model does."""


def register_names() -> None:
    """Makes the backend known by the names that every version allows; may be called again."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, f"{MODULE}.choice.Backend")
    on_cpus = {
        "CPU_ATTN": "Backend",
        "CPU_MLA": "LatentBackend",
        "AMX_MLA": "AmxLatentBackend",
    }
    for name, ours in on_cpus.items():
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], f"{MODULE}.cpu.{ours}")


def check_version() -> None:
    """Raises ValueError for a vLLM that the plug-in does not know.

    An ImportError would lose its text: vLLM shows those of backends by the name of their type.
    """
    import vllm

    wrong = wrong_version(vllm.__version__)
    if wrong:
        raise ValueError(f"torch_turboquant: {wrong}")


def let_drafts_follow(vllm_config: Any) -> None:
    """Gives a draft model the backend of the model that it drafts for, unless the user chose one.

    vLLM's V1 runner would choose one by itself, and on CPUs there is no other choice than by name.
    Must be called before the draft model is made.
    """
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method in FOLLOWING:
        chosen = speculative.attention_backend
        speculative.attention_backend = chosen or vllm_config.attention_config.backend


def tokens_left_out(speculative: Any) -> int:
    """Tokens of a sequence that vLLM's upper bounds of lengths do not count in steps of drafts.

    A draft model by itself begins with the token that the model has found last, and, where drafts
    are made at once, with room for these; heads of EAGLE and MTP get the former in place of their
    first token.
    """
    if speculative is None:
        return 0
    count = int(speculative.num_speculative_tokens) if speculative.parallel_drafting else 1
    return count if speculative.method == "draft_model" else count - 1


def __getattr__(name: str) -> Any:
    if name not in ("Backend", "OwnNameBackend"):
        raise AttributeError(name)
    check_version()
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
