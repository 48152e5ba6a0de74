"""KV connectors: which of them may move packed pages.

A packed page is whole or nothing. Its records come head by head, the exact first tokens of all
heads behind them, so that a connector must not divide it by tokens, by heads or into keys and
values, as some do where engines differ in block size or tensor parallelism. vLLM does not ask, so
that connectors are named here.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Connector(NamedTuple):
    """One of vLLM's connectors."""

    inside: bool
    """Whether its pages stay with the process that stored them, unless its options change that."""
    latents: bool
    """Whether it moves pages of latents."""


WHOLE = {
    "ExampleConnector": Connector(inside=False, latents=False),
    "OffloadingConnector": Connector(inside=True, latents=True),
    "SimpleCPUOffloadConnector": Connector(inside=True, latents=True),
}
"""Connectors that copy whole pages."""


def wrong_connectors(transfer: Any, latents: bool) -> list[str]:
    """What is wrong with an engine's connectors: sentences with their cures.

    Args:
        transfer: vLLM's KVTransferConfig, or None.
        latents: whether the model has latent attention.
    """
    found = []
    supported = [name for name, one in WHOLE.items() if one.latents or not latents]
    for name, extra, own in _connectors(transfer):
        if not own and name not in supported:
            found.append(
                f"the KV connector {name} is not known to move packed pages"
                f"{' of latents' if latents and name in WHOLE else ''} as a whole, supported: "
                f"{', '.join(supported)}, several of them in a MultiConnector, and connectors of "
                "your own by kv_connector_module_path"
            )
        if extra.get("canonical_layout"):
            found.append(
                "canonical_layout divides pages by heads, and packed pages cannot be divided: "
                "leave it out"
            )
    return found


def sharing(transfer: Any) -> str | None:
    """The first connector that may take pages to another process; None: there is none."""
    for name, extra, own in _connectors(transfer):
        inside = name in WHOLE and WHOLE[name].inside and not own
        spec, backend = extra.get("spec_name"), extra.get("kv_offload_backend")
        if not inside or spec not in (None, "CPUOffloadingSpec") or backend not in (None, "cpu"):
            return name
    return None


def _connectors(transfer: Any) -> list[tuple[str, dict[str, Any], bool]]:
    """Name and options of each connector, and whether the user brought it along."""
    if transfer is None or transfer.kv_connector is None:
        return []
    extra = transfer.kv_connector_extra_config or {}
    if transfer.kv_connector != "MultiConnector":
        return [(transfer.kv_connector, extra, transfer.kv_connector_module_path is not None)]
    return [
        (
            one.get("kv_connector", "without a name"),
            one.get("kv_connector_extra_config") or {},
            one.get("kv_connector_module_path") is not None,
        )
        for one in extra.get("connectors", [])
    ]
