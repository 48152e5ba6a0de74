"""What pictures have in common: colours of presets, and bars side by side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch_turboquant as tq

DEFAULT = tq.NAMED_PRESETS["near-lossless"][0]


def preset_colors(presets: Iterable[str]) -> dict[str, Any]:
    """The default preset stands out; the others are shades, lighter the smaller they are."""
    from matplotlib import colormaps

    by_size = sorted(presets, key=lambda name: -tq.preset(name, 128).bytes_per_token)
    shades = {name: colormaps["Blues"](0.75 - 0.09 * i) for i, name in enumerate(by_size)}
    return {name: "tab:orange" if name == DEFAULT else shade for name, shade in shades.items()}


def grouped_bars(
    axes: Any,
    groups: list[str],
    series: dict[str, list[float | None]],
    colors: dict[str, Any],
    text: list[str],
) -> None:
    """Bars side by side in each group, None left out, with texts in those of the default."""
    width = 0.84 / len(series)
    for i, (name, values) in enumerate(series.items()):
        label = f"{name} (default)" if name == DEFAULT else name
        at = [g - 0.42 + (i + 0.5) * width for g, v in enumerate(values) if v is not None]
        heights = [v for v in values if v is not None]
        bars = axes.bar(at, heights, width, color=colors[name], label=label)
        if name == DEFAULT:
            style = {"fontsize": 9, "fontweight": "bold", "color": "white", "rotation": 90}
            axes.bar_label(bars, text, label_type="center", **style)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylim(0, 1.1 * max(v for values in series.values() for v in values if v is not None))
    axes.grid(True, axis="y", alpha=0.3)
    axes.set_axisbelow(True)
