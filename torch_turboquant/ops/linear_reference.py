"""The references of the room linear, written from docs/format.md, section 13: slow and obvious.

They take CPU tensors, and nothing but tests calls them.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from torch_turboquant.format import (
    MULTIPLIER_OFFSET,
    MULTIPLIER_UNIT,
    SUB_CHANNELS,
    WeightBlock,
    WeightParts,
    read_weight,
    write_weight,
)
from torch_turboquant.ops.codec import (
    SCALE_MODES,
    Channels,
    level_of_code_reference,
    level_table_reference,
    power_of_two,
    quantise_reference,
)
from torch_turboquant.ops.hadamard import core_reference, sqrt_reference, tree_sum_reference


def weight_quantise_reference(
    w: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    steps: Tensor,
    bits: int,
    sub: int,
    channel_scale: Tensor | None = None,
) -> WeightParts:
    """Codes, scales and multipliers: docs/format.md, section 13, step by step."""
    n, k = w.shape
    group = signs.shape[0]
    x = w.float()
    if channel_scale is not None:
        x = x * channel_scale
    x = x.reshape(n, k // group, group)
    if sub == 0:
        mode = SCALE_MODES["mse"]
        codes, scale = quantise_reference(
            x, signs, levels, steps, bits, mode, Channels(None, None, None)
        )
        none = np.zeros((n, 0), dtype=np.uint8)
        return WeightParts(codes.reshape(n, k).numpy(), scale.numpy(), none)

    # section 5, steps 2 to 5
    broken = ~torch.isfinite(x).all(-1)
    x = torch.where(broken[..., None], torch.zeros_like(x), x)
    amax = x.abs().amax(-1)
    exponent = ((amax.view(torch.int32) >> 23) - 127).clamp(-100, 100)
    y = core_reference(signs * (x * power_of_two(-exponent)[..., None]), scaled=False)
    length = sqrt_reference(tree_sum_reference(y * y))
    r = length * torch.tensor(1 / math.sqrt(group), dtype=torch.float32)
    ratio = torch.tensor(4096 * math.sqrt(group), dtype=torch.float32) / length
    u = torch.round(y * ratio[..., None])
    u = torch.where((amax == 0)[..., None], torch.zeros_like(u), u).long()
    u = u.unflatten(-1, (-1, sub))  # [n, groups, subs, 32]

    best: list[Tensor] = []
    table = level_table_reference(levels, bits)
    sums = (table[1:] + table[:-1]).float()
    for candidate in steps.float():
        chosen: list[Tensor] = []  # of every sub: gain, code of the multiplier, ranks, sums
        for m in range(16):
            step = (candidate * float(m + MULTIPLIER_OFFSET)) * MULTIPLIER_UNIT
            boundaries = 16 * torch.round(sums * (step * 128)).clamp(-(2**26), 2**26).long()
            rank = torch.bucketize(u, boundaries, right=True)
            level = table[rank]
            dot = (u * level).sum(-1).float() * 2.0**-12
            square = (level * level).sum(-1).float()
            gain = step * (2 * dot - step * square)
            new = [gain, torch.full_like(dot, m), rank, dot, square]
            chosen = _better(chosen, new)
        _, code, rank, dot, square = chosen
        by = code + MULTIPLIER_OFFSET
        a, b = _sum_in_order(by * dot), _sum_in_order(by * by * square)
        merit = torch.where(a > 0, a * a / b, torch.zeros_like(a))
        best = _better(best, [merit, code, rank, a, b])
    _, code, rank, a, b = best

    over = torch.tensor(512 / math.sqrt(group), dtype=torch.float32)
    scale = torch.where(a > 0, r * over * (a / b), torch.zeros_like(r))
    scale = torch.where(amax == 0, torch.zeros_like(scale), scale)
    scale = (scale * power_of_two(exponent)).clamp(max=65504).half()
    nan = torch.full((), 0x7E00, dtype=torch.int16).view(torch.float16)
    scale = torch.where(broken, nan, scale)
    rank = torch.where(broken[..., None, None], torch.zeros_like(rank), rank)
    code = torch.where(broken[..., None], torch.zeros_like(code), code)
    return WeightParts(
        rank.reshape(n, k).to(torch.uint8).numpy(),
        scale.numpy(),
        code.reshape(n, k // sub).to(torch.uint8).numpy(),
    )


def _better(old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
    """Of two candidates the one with the greater first entry; ties keep the old one."""
    if not old:
        return new
    better = new[0] > old[0]

    def choose(n: Tensor, o: Tensor) -> Tensor:
        return torch.where(better.reshape(better.shape + (1,) * (n.dim() - better.dim())), n, o)

    return [choose(n, o) for n, o in zip(new, old, strict=True)]


def _sum_in_order(x: Tensor) -> Tensor:
    total = x[..., 0]
    for i in range(1, x.shape[-1]):
        total = total + x[..., i]
    return total


def weight_encode_reference(
    w: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    steps: Tensor,
    bits: int,
    sub: int,
    channel_scale: Tensor | None = None,
) -> Tensor:
    """weight_encode in plain PyTorch and numpy, with every rounding of docs/format.md."""
    block = WeightBlock(signs.shape[0], bits, sub)
    parts = weight_quantise_reference(w, signs, levels, steps, bits, sub, channel_scale)
    return torch.from_numpy(write_weight(block, parts))


def weight_pack_reference(
    codes: Tensor, scale: Tensor, multipliers: Tensor | None, bits: int
) -> Tensor:
    """weight_pack in numpy."""
    n, k = codes.shape
    none = torch.zeros(n, 0, dtype=torch.uint8)
    sub = 0 if multipliers is None else SUB_CHANNELS
    block = WeightBlock(k // scale.shape[1], bits, sub)
    parts = (codes, scale, none if multipliers is None else multipliers)
    return torch.from_numpy(write_weight(block, WeightParts(*(p.numpy() for p in parts))))


def weight_unpack_reference(
    packed: Tensor, n: int, group: int, bits: int, sub: int
) -> tuple[Tensor, Tensor, Tensor]:
    """weight_unpack in numpy."""
    parts = read_weight(WeightBlock(group, bits, sub), packed.numpy(), n)
    return tuple(torch.from_numpy(part) for part in parts)  # type: ignore[return-value]


def rotated_weight_reference(
    packed: Tensor, levels: Tensor | None, n: int, group: int, bits: int, sub: int
) -> Tensor:
    """The weight in the rotated space: float32 [n, groups, group], exactly."""
    codes, scale, multipliers = weight_unpack_reference(packed, n, group, bits, sub)
    level = level_of_code_reference(codes, levels, bits).float()
    y = (scale.float() * 2.0**-5).repeat_interleave(group, 1) * level
    if sub:
        by = (multipliers.float() + MULTIPLIER_OFFSET) * MULTIPLIER_UNIT
        y = y * by.repeat_interleave(sub, 1)
    return y.unflatten(1, (-1, group))


def weight_decode_reference(
    packed: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    n: int,
    bits: int,
    sub: int,
    dtype: torch.dtype = torch.float32,
    channel_inverse: Tensor | None = None,
) -> Tensor:
    """weight_decode in plain PyTorch, with every rounding of docs/format.md."""
    y = rotated_weight_reference(packed, levels, n, signs.shape[0], bits, sub)
    w = (signs * core_reference(y)).flatten(1)
    if channel_inverse is not None:
        w = w * channel_inverse
    return w.to(dtype)


def linear_integers_reference(
    x: Tensor, signs: Tensor, channel_inverse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What linear_packed makes of activations, with the roundings of the op.

    Returns:
        integers: int8 [tokens, groups, group].
        units: float32 [tokens, groups].
    """
    y = x.float().flatten(0, -2)
    if channel_inverse is not None:
        y = y * channel_inverse
    y = core_reference(signs * y.unflatten(-1, (-1, signs.shape[0])))
    broken = ~torch.isfinite(y).all(-1)
    y = torch.where(broken[..., None], torch.zeros_like(y), y)
    amax = y.abs().amax(-1)
    exponent = ((amax.view(torch.int32) >> 23) - 127).clamp(-100, 100)
    down = power_of_two(-exponent)
    # by tensors: a number divided by a tensor is a product with its reciprocal, rounded twice
    quotient = torch.full_like(amax, 127) / (amax * down)
    inverse = torch.where(amax > 0, quotient, torch.zeros_like(amax))
    integers = torch.round((y * down[..., None]) * inverse[..., None]).to(torch.int8)
    unit = (amax * down / 127) * power_of_two(exponent)
    return integers, torch.where(broken, torch.full_like(unit, torch.nan), unit)


def linear_packed_reference(
    x: Tensor,
    packed: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    n: int,
    bits: int,
    sub: int,
    channel_inverse: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """linear_packed with activations of the same integers, and sums in float64: [..., n]."""
    integers, unit = linear_integers_reference(x, signs, channel_inverse)
    w = rotated_weight_reference(packed, levels, n, signs.shape[0], bits, sub).double()
    activations = integers.double() * unit.double()[..., None]
    y = activations.flatten(1) @ w.flatten(1).T
    if bias is not None:
        y = y + bias.double()
    return y.unflatten(0, x.shape[:-1])


def linear_experts_reference(
    x: Tensor,
    packed: Tensor,
    experts: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    n: int,
    bits: int,
    sub: int,
    bias: Tensor | None = None,
) -> Tensor:
    """linear_experts by linear_packed_reference of every expert: [tokens, choices, n]."""
    y = torch.zeros(*experts.shape, n, dtype=torch.float64)
    for expert, weight in enumerate(packed):
        own = None if bias is None else bias[expert]
        products = linear_packed_reference(x, weight, signs, levels, n, bits, sub, None, own)
        y = torch.where((experts == expert)[..., None], products[:, None], y)
    return y
