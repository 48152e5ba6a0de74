"""The configuration of every layer: one for all, more bits at both ends, or layer by layer.

The layers of a model may differ in bits, grids, scale modes, search and seed. They share head_dim,
the page size and the exact tail, since the bookkeeping of a sequence is the same for all layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from torch_turboquant._checks import check_count, check_whole
from torch_turboquant.config import CacheConfig, find_preset

SHARED_FIELDS = ("head_dim", "page_size", "sink_tokens", "recent_window")

LayerChoice = str | CacheConfig | None
Choice = TypeVar("Choice")


def layer_configs(
    base: CacheConfig,
    windows: Sequence[int | None],
    *,
    layer_presets: Mapping[int, LayerChoice] | Sequence[LayerChoice] | None = None,
    boundary_layers: int = 0,
    boundary_preset: str = "k8v8",
) -> list[CacheConfig]:
    """The configuration of every layer of a model.

    Args:
        base: the configuration of all layers that no other argument names.
        windows: one entry per layer: its sliding window in tokens, 0 for full attention, None for a
            layer that holds no keys and values.
        layer_presets: maps layers to presets or CacheConfigs (negative layers count from the end),
            or holds one entry per layer, None for a layer that the other arguments decide. A preset
            changes only bits, grids and the scale mode of values. layer_presets wins over
            boundary_layers.
        boundary_layers: how many full-attention layers at each end of the model get
            boundary_preset.
        boundary_preset: a name of PRESETS.

    Returns:
        One CacheConfig per layer.

    Raises:
        ValueError: an unknown preset, a layer that the model does not have or that is named twice,
            a CacheConfig that differs from base in a field of SHARED_FIELDS.
    """
    count = len(windows)
    check_count(boundary_layers=boundary_layers)
    boundary_layers = int(boundary_layers)  # NumPy's may have no sign
    configs = [base] * count
    at_boundary = _with_preset(base, boundary_preset)  # a wrong name is refused even if unused
    if boundary_layers:
        full = [layer for layer, window in enumerate(windows) if window == 0]
        for layer in {*full[:boundary_layers], *full[-boundary_layers:]}:
            configs[layer] = at_boundary
    for layer, choice in choices_by_layer(layer_presets, count).items():
        if isinstance(choice, CacheConfig):
            for field in SHARED_FIELDS:
                if getattr(choice, field) != getattr(base, field):
                    raise ValueError(
                        f"the configuration of layer {layer} has {field}={getattr(choice, field)}, "
                        f"the cache {getattr(base, field)}; layers may differ in all fields but "
                        f"{', '.join(SHARED_FIELDS)}"
                    )
            configs[layer] = choice
        elif choice is not None:
            configs[layer] = _with_preset(base, choice)
    return configs


def _with_preset(base: CacheConfig, name: str) -> CacheConfig:
    return replace(base, **find_preset(name)._asdict())


def choices_by_layer(
    given: Mapping[int, LayerChoice] | Sequence[LayerChoice] | None, count: int
) -> dict[int, LayerChoice]:
    """`layer_presets` of layer_configs as a mapping whose layers are 0 .. count - 1.

    Raises:
        ValueError: a layer that the model does not have, or that is named twice.
    """
    if given is None:
        return {}
    if isinstance(given, str):
        raise ValueError(f"layer_presets names a preset per layer, got {given!r} for all")
    if not isinstance(given, Mapping):
        if len(given) != count:
            raise ValueError(f"layer_presets has {len(given)} entries, the model {count} layers")
        given = dict(enumerate(given))
    return by_number(given.items(), count, "layer_presets")


def by_number(given: Iterable[tuple[int, Choice]], count: int, setting: str) -> dict[int, Choice]:
    """Layers and what is chosen for them, by the numbers 0 .. count - 1.

    Args:
        given: layers, negative ones counted from the end, and what is chosen for each.
        count: layers of the model.
        setting: what errors call `given`.

    Raises:
        ValueError: a layer that the model does not have, or that is named twice.
    """
    choices: dict[int, Choice] = {}
    for layer, choice in given:
        check_whole(**{f"a layer of {setting}": layer})
        if not -count <= layer < count:
            raise ValueError(f"{setting} names layer {layer}, the model has {count} layers")
        if layer % count in choices:
            raise ValueError(f"{setting} names layer {layer % count} twice")
        choices[layer % count] = choice
    return choices
