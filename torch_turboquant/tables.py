"""The constants of one layer's cache: signs, codebooks, candidate steps and the center."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant.codebook import Codebook
from torch_turboquant.config import CacheConfig
from torch_turboquant.ops.codec import scaled_center
from torch_turboquant.signs import SignKind, random_signs


class CacheTables(NamedTuple):
    """The constants of one layer's cache, as tensors on its device (make_tables)."""

    key_signs: Tensor
    """float32 [head_dim] of +1 and -1."""
    value_signs: Tensor
    """float32 [head_dim] of +1 and -1."""
    key_levels: Tensor | None
    """int8 [2^key_bits], or None for the uniform grid."""
    value_levels: Tensor | None
    """int8 [2^value_bits], or None for the uniform grid."""
    key_steps: Tensor
    """float32 [S]: candidate steps, increasing."""
    value_steps: Tensor
    """float32 [S]: candidate steps, increasing."""
    center: Tensor | None
    """float32 [kv_heads, head_dim] subtracted from keys before they are encoded, or None; or
    [3, kv_heads, head_dim], which scales their channels as well (codec.scaled_center)."""


def make_tables(
    config: CacheConfig,
    layer: int,
    device: torch.device | str = "cpu",
    center: Tensor | None = None,
) -> CacheTables:
    """The constants of one layer: signs from (seed, layer), codebooks from the config.

    Args:
        config: the cache.
        layer: 0 and more; every layer has its own signs.
        device: of the cache.
        center: [kv_heads, head_dim], any floating dtype: the mean key of this layer, or None;
            or [3, kv_heads, head_dim] of codec.scaled_center.

    Raises:
        ValueError: a center of another shape or with NaN or infinity, scales that are not positive
            and finite, or codebooks that the config's grids do not have.
    """
    _checks.check_whole(layer=layer)
    d = config.head_dim
    keys = Codebook.make(d, config.key_bits, config.key_grid)
    values = Codebook.make(d, config.value_bits, config.value_grid)
    return CacheTables(
        random_signs(d, config.seed, layer, SignKind.KEYS).to(device),
        random_signs(d, config.seed, layer, SignKind.VALUES).to(device),
        keys.levels_tensor(device),
        values.levels_tensor(device),
        keys.steps_tensor(config.search, device),
        values.steps_tensor(config.search, device),
        None if center is None else make_center(center, d, device),
    )


def make_center(center: Tensor, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """A center as CacheTables holds it; see make_tables."""
    if not _checks.fits_center(center, head_dim):
        raise ValueError(
            f"center has shape {list(center.shape)}, expected [kv_heads, {head_dim}] or "
            f"[3, kv_heads, {head_dim}]"
        )
    if center.dim() == 3:
        center = scaled_center(center[0], center[1])
    return own_center(center, device)


def own_center(center: Tensor, device: torch.device | str) -> Tensor:
    """A center in memory of its own: tokens are stored with it for as long as their pages live, so
    what a caller does to the tensor that was given must not reach it.

    Raises:
        ValueError: NaN or infinity in float32, which would reach every logit.
    """
    own = center.detach().to(torch.float32, copy=True)
    if not torch.isfinite(own).all():  # of float64 some numbers are infinite now
        raise ValueError("center holds NaN or infinity")
    return own.to(device).contiguous()
