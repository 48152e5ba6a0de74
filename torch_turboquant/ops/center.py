"""Centers: the mean of keys, which is subtracted before encoding, and the scales of their channels.

Keys of one layer have much in common: some channels have a large mean, others vary far more than
queries make use of. Codes would spend their levels on both. The mean and the scales are learned
from the keys and queries of a first prompt, for all layers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_turboquant import _checks

PRIOR_TOKENS = 8  # the weight of the prior in scales of channels, in tokens
MOST_CHANNELS = 1024
MOST_HEADS = 65535


def query_energy(queries: Sequence[Tensor], kv_heads: int, skip: int = 0) -> Tensor:
    """The mean squares of the queries' channels, layer by layer, as learn_center takes them.

    Args:
        queries: one tensor per layer, [batch, heads, tokens, d] as attention gets them, all of one
            shape and dtype (float32, float16 or bfloat16), with stride 1 in the last dimension.
        kv_heads: a divisor of heads; the query heads of a KV head are neighbours.
        skip: how many first tokens of every sequence are left out.

    Returns:
        float32 [layers, kv_heads, d]: the mean square over batch, tokens and the heads of a group.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride or device; skip outside 0 to tokens - 1.
    """
    _check_queries(queries, kv_heads, skip)
    return torch.ops.turboquant.query_energy.default(list(queries), kv_heads, skip)


def learn_center(
    keys: Sequence[Tensor],
    energies: Sequence[Tensor] = (),
    partners: Tensor | None = None,
    skip: int = 0,
) -> Tensor:
    """Learns the centers of layers from the keys and the queries of a prompt (see channel_scale).

    Args:
        keys: one tensor per layer, [batch, kv_heads, tokens, d] as attention gets them, all of one
            shape and dtype (float32, float16 or bfloat16), with stride 1 in the last dimension and
            d up to 1,024.
        energies: one tensor per layer, float32 [kv_heads, d], contiguous (query_energy), for scales
            of channels; without any, the mean alone is learned.
        partners: int64 [d], given with energies: the channel with which RoPE mixes each channel. A
            channel that is not rotated is its own partner.
        skip: how many first tokens of every sequence are left out: sinks, whose keys are outliers.

    Returns:
        Without energies the mean key of each layer, float32 [layers, kv_heads, d]. With energies
        float32 [layers, 3, kv_heads, d]: the mean, the scales and their inverses. An entry of the
        first dimension is a `center` of make_tables.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride or device; skip outside 0 to tokens - 1; energies without
            partners.
        RuntimeError: partners outside 0 to d - 1 (checked on the CPU; on CUDA such a channel is its
            own partner).
    """
    _check_keys(keys, energies, partners, skip)
    return torch.ops.turboquant.learn_center.default(list(keys), list(energies), partners, skip)


def channel_scale(
    center: Tensor, variance: Tensor, energy: Tensor, count: int, partners: Tensor
) -> Tensor:
    """Scales of key channels, by the rule that learn_center follows: [..., kv_heads, head_dim].

    The rotation spreads the error of a key evenly over its channels, and a score adds up these
    errors times (query / scale). So the squared error of a score is proportional to the sum of
    scale^2 * variance times the sum of energy / scale^2, which is least for
    scale^4 = energy / variance.

    The scales must also hold for later tokens, at other positions. RoPE mixes pairs of channels, so
    both channels of a pair get the pair's average. RoPE also rotates the mean key away from the
    center, which makes keys vary more; half of the center's square stands for this. Few tokens tell
    little about a channel, so the average of all channels counts as PRIOR_TOKENS more tokens; this
    also keeps the scales of channels that are always zero finite. The mean scale is 1.

    Args:
        center: the mean of `count` keys, [..., kv_heads, head_dim].
        variance: the variance of their channels, in the shape of center.
        energy: the mean square of the queries' channels over the query heads of a KV head, or any
            multiple of it, in the shape of center.
        count: how many keys the mean and the variance were taken from.
        partners: int64 [head_dim], the channel with which RoPE mixes each channel.
    """

    spread = torch.stack([energy, torch.addcmul(variance, center, center, value=0.5)])
    spread = spread + spread.index_select(-1, partners)
    spread = torch.add(spread, spread.mean(-1, keepdim=True), alpha=PRIOR_TOKENS / count)
    scale = (spread[0] / spread[1]).pow(0.25)
    # If all queries or keys of a head are zero, the ratio is 0, infinite or NaN in all channels.
    return (scale / scale.mean(-1, keepdim=True)).nan_to_num(1.0)


def _check_queries(queries: Sequence[Tensor], kv_heads: int, skip: int) -> None:
    heads = _check_layers("queries", queries, skip)[1]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"kv_heads is {kv_heads}, supported: divisors of the {heads} query heads")


def _check_keys(
    keys: Sequence[Tensor], energies: Sequence[Tensor], partners: Tensor | None, skip: int
) -> None:
    _, kv_heads, _, d = _check_layers("keys", keys, skip)
    device = keys[0].device
    if energies and len(energies) != len(keys):
        raise ValueError(f"energies are of {len(energies)} layers, keys of {len(keys)}")
    if bool(energies) != (partners is not None):
        raise ValueError("energies and partners belong together")
    for energy in energies:
        _checks.check_constant("energies", energy, device, torch.float32, (kv_heads, d))
    if partners is not None:
        _checks.check_constant("partners", partners, device, torch.int64, (d,))


def _check_layers(name: str, layers: Sequence[Tensor], skip: int) -> torch.Size:
    """Checks tensors of one shape and dtype; returns the shape, [batch, heads, tokens, d]."""
    if not layers:
        raise ValueError(f"{name} has no layers")
    first = layers[0]
    _checks.check_vectors(name, first, 4)
    batch, heads, tokens, d = first.shape
    if batch < 1 or not 1 <= heads <= MOST_HEADS or not 1 <= d <= MOST_CHANNELS:
        raise ValueError(
            f"{name} has shape {list(first.shape)}, supported: [batch, heads, tokens, d] with 1 to "
            f"{MOST_HEADS} heads and d from 1 to {MOST_CHANNELS}"
        )
    if not 0 <= skip < tokens:
        raise ValueError(
            f"skip is {skip}, supported for the {tokens} tokens of {name}: 0 to tokens - 1"
        )
    for x in layers:
        _checks.check_dtype(name, x, (first.dtype,))
        _checks.check_device(name, x, first.device)
        _checks.check_shape(name, x, tuple(first.shape))
        _checks.check_unit_stride(name, x)
    return first.shape


# ---- fakes


@torch.library.register_fake("turboquant::query_energy")
def _query_energy_fake(queries: list[Tensor], kv_heads: int, skip: int = 0) -> Tensor:
    with _checks.of_fake():
        _check_queries(queries, kv_heads, skip)
    shape = len(queries), kv_heads, queries[0].shape[-1]
    return queries[0].new_empty(shape, dtype=torch.float32)


@torch.library.register_fake("turboquant::learn_center")
def _learn_center_fake(
    keys: list[Tensor], energies: list[Tensor], partners: Tensor | None = None, skip: int = 0
) -> Tensor:
    with _checks.of_fake():
        _check_keys(keys, energies, partners, skip)
    _, kv_heads, _, d = keys[0].shape
    parts: tuple[Any, ...] = () if partners is None else (3,)
    return keys[0].new_empty((len(keys), *parts, kv_heads, d), dtype=torch.float32)


# ---- references


def query_energy_reference(queries: Sequence[Tensor], kv_heads: int, skip: int = 0) -> Tensor:
    """query_energy in plain PyTorch, in float64."""
    x = torch.stack(list(queries))[:, :, :, skip:].double().unflatten(2, (kv_heads, -1))
    return x.square().mean((1, 3, 4))


def learn_center_reference(
    keys: Sequence[Tensor],
    energies: Sequence[Tensor] = (),
    partners: Tensor | None = None,
    skip: int = 0,
) -> Tensor:
    """learn_center in plain PyTorch, in float64."""
    x = torch.stack(list(keys))[:, :, :, skip:].double()
    center, count = x.mean((1, 3)), x.shape[1] * x.shape[3]
    if partners is None:
        return center
    variance = x.var((1, 3), correction=0)
    energy = torch.stack(list(energies)).double()
    scale = channel_scale(center, variance, energy, count, partners)
    return torch.stack([center, scale, 1 / scale], dim=1)
