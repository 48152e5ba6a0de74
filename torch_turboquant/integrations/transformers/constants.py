"""Tables of all layers on every device that layers run on, made once and shared between caches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_turboquant._autograd import lasting
from torch_turboquant.integrations.transformers.tensors import put_together
from torch_turboquant.integrations.transformers.uncompressed import (
    AnyConfig,
    NoTables,
    UncompressedLatents,
)
from torch_turboquant.latent import LatentConfig, LatentTables, make_latent_tables
from torch_turboquant.tables import CacheTables, make_center, make_tables

AnyTables = CacheTables | LatentTables | NoTables


class Constants(NamedTuple):
    """What all layers need and nothing changes, on one device."""

    tables: dict[int, AnyTables]  # of each layer; without a center that is to be learned
    partners: Tensor  # channels that RoPE turns into each other (rotary_partners)


class ConstantsByDevice:
    """Constants wherever layers run."""

    def __init__(
        self,
        configs: dict[int, AnyConfig],
        centers: Mapping[int, Tensor],
        partners: Tensor,
    ) -> None:
        """Of each layer its config and, unless that is to be learned or off, its center."""
        self.configs, self.partners = tuple(configs.items()), partners
        self.centers = {i: _center_of(configs[i], c) for i, c in centers.items()}
        self.known: dict[torch.device, Constants] = {}

    def on(self, device: torch.device) -> Constants:
        if device not in self.known:
            tables = dict(_tables_on(self.configs, device))
            arrays = [x.numpy() for x in (*self.centers.values(), self.partners)]
            with lasting():
                *centers, partners = put_together(arrays, device)
            for index, center in zip(self.centers, centers, strict=True):
                tables[index] = tables[index]._replace(center=center)
            self.known[device] = Constants(tables, partners)
        return self.known[device]

    def __getstate__(self) -> dict[str, Any]:
        """For files: given centers in memory of their own, and no devices."""
        centers = {index: center.clone() for index, center in self.centers.items()}
        return {**vars(self), "centers": centers, "known": {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> ConstantsByDevice:
        return self  # nothing changes


@lru_cache(maxsize=16)
@lasting()
def _tables_on(
    configs: tuple[tuple[int, AnyConfig], ...], device: torch.device
) -> dict[int, AnyTables]:
    """Tables of layers without their centers; all caches of such layers share them."""
    host = {index: _tables_of(config, index) for index, config in configs}
    arrays = [t.numpy() for table in host.values() for t in table if t is not None]
    placed = iter(put_together(arrays, device))
    if device.type == "cuda":  # once: another cache may use them on any stream
        torch.cuda.current_stream(device).synchronize()
    return {
        index: type(table)(*(t if t is None else next(placed) for t in table))
        for index, table in host.items()
    }


def _center_of(config: Any, center: Tensor) -> Tensor:
    """A center as the tables of such a layer hold it."""
    if isinstance(config, LatentConfig):
        held = make_latent_tables(config, 0, center=center).center
        assert held is not None
        return held
    return make_center(center, config.head_dim)


def _tables_of(config: AnyConfig, index: int) -> AnyTables:
    if isinstance(config, UncompressedLatents):
        return NoTables()
    if isinstance(config, LatentConfig):
        return make_latent_tables(config, index)
    return make_tables(config, index)
