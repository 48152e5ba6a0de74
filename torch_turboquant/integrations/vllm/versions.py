"""The versions of vLLM that the plug-in knows, and what differs between them; needs no vLLM."""

from __future__ import annotations

import re
from typing import NamedTuple

from torch_turboquant.integrations.engine.limits import not_tested


class Interface(NamedTuple):
    """What a range of versions offers to a backend."""

    first: tuple[int, int]
    last: tuple[int, int]
    page_bytes: str
    """Who says how many bytes a token takes: a spec that the "layer" makes, or the "backend"."""
    page_shape: str
    """How a backend says what a page looks like: "shape" or "layout"."""
    own_name: bool
    """Whether a backend may have a name of its own: --attention-backend TORCH_TURBOQUANT."""
    own_dtype: bool
    """Whether a cache may have a dtype of its own: --kv-cache-dtype tq_<preset>."""
    latents: bool
    """Whether models with latent attention (MLA) are served."""


INTERFACES = (
    Interface((0, 24), (0, 27), "layer", "shape", False, False, False),
    Interface((0, 28), (0, 28), "backend", "shape", False, False, False),
    Interface((0, 29), (0, 31), "backend", "layout", False, False, False),
    Interface((0, 32), (0, 32), "backend", "layout", True, False, True),
    Interface((0, 33), (0, 33), "backend", "layout", True, True, True),
)

TESTED = ("0.27.1", "0.32.0")
"""The releases that the tests have run with, as they are installed."""


def untested(version: str) -> str | None:
    """What the log says of a version that is supported and not one of TESTED; None: nothing."""
    said = not_tested("vLLM", version, TESTED)
    return said and f"TurboQuant: {said}"


def find_interface(version: str) -> Interface:
    """The interface of a version of vLLM, such as "0.32.0+cpu".

    Raises:
        ImportError: a version that this plug-in does not know.
    """
    interface = _find(version)
    if interface is None:
        raise ImportError(wrong_version(version))
    return interface


def wrong_version(version: str) -> str | None:
    """What is wrong with a version of vLLM; None: nothing."""
    if _find(version) is not None:
        return None
    first, last = INTERFACES[0].first, INTERFACES[-1].last
    return (
        f"vLLM {version} is installed; this torch_turboquant supports {first[0]}.{first[1]} to "
        f"{last[0]}.{last[1]}: install one of these, or a newer torch_turboquant"
    )


def _find(version: str) -> Interface | None:
    number = re.match(r"(\d+)\.(\d+)", version)
    found = (int(number[1]), int(number[2])) if number else None
    for interface in INTERFACES:
        if found and interface.first <= found <= interface.last:
            return interface
    return None
