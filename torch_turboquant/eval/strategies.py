"""The strategies that people choose from: fewer bits, fewer tokens, both."""

from __future__ import annotations

from torch_turboquant.eviction import POLICIES

SHARES = (0.75, 0.5, 0.3, 0.2, 0.1, 0.05)
"""Of a prompt's tokens that stay."""

BITS = ("fp8", "fp8s", "int8", "kivi4", "k8v8", "k5v4u", "k4v4", "k4v2", "k3v2")
"""Fewer bits for all tokens: controls, then presets."""


def strategies() -> list[str]:
    """Names of caches, as --caches takes them.

    Tokens are evicted from a cache of 8 bits, whose own error does not show beside that.
    """
    tokens = [f"k8v8:keep={share},evict={policy}" for policy in POLICIES for share in SHARES]
    both = [f"k4v4:keep={share},evict=snapkv" for share in (0.75, 0.5, 0.3)]
    both += [f"k4v4:keep=0.5,evict={policy}" for policy in POLICIES if policy != "snapkv"]
    return [*BITS, *tokens, *both]
