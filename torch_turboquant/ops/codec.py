"""The codec of single vectors: rotate, quantise every coordinate, keep one scale.

encode is the paper's TurboQuant_mse (Algorithm 1) with two refinements that cost nothing to decode:
several step sizes are tried for each vector, and the stored scale can give the decoded vector the
least squared error, the length of the original, or the original's inner product with itself. With
one step and scale mode "norm" it is the paper's quantiser.

A vector decodes as  inverse transform of (scale * level of each code / 32), plus the center. With
scales of channels (scaled_center), the center is subtracted and the channels are scaled before
encoding; decoding undoes both. Codes and scales are the same bytes on every device (docs/format.md,
sections 4 to 7).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant.format import dense_row_bytes
from torch_turboquant.ops.hadamard import core_reference, sqrt_reference, tree_sum_reference
from torch_turboquant.ops.pack import check_rows, pack_reference, unpack_reference
from torch_turboquant.signs import split_dim

# The rule for the stored scale, with y the decoded vector and x its original. norm: the scale is
# |x|, nothing is fitted (the paper); preserve: |y| = |x|; mse: |x - y| is least; unbiased:
# <x, y> = <x, x>.
SCALE_MODES = {"norm": 0, "preserve": 1, "mse": 2, "unbiased": 3}


def encode(
    x: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    steps: Tensor,
    bits: int,
    scale_mode: str = "mse",
    center: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantises vectors.

    Args:
        x: [..., d], float32, float16 or bfloat16, stride 1 in the last dimension;
            d = m * 2^k up to 4096 with m one of 1, 3, 5, 7, 9 and k >= 1.
        signs: float32 [d] of +1 and -1.
        levels: int8 [2^bits], increasing and symmetric, for 1 to 5 bits; None for the uniform grid
            of 2 to 5 bits and for 8 bits.
        steps: float32 [S], increasing, S = 1 to 64: candidate sizes of one unit of levels, relative
            to the standard deviation of a coordinate. The one with the least error is kept.
        bits: 1, 2, 3, 4, 5 or 8.
        scale_mode: "norm" (the paper), "preserve", "mse" or "unbiased".
        center: float32 [d], which is subtracted first; or float32 [3, d] (scaled_center), which
            scales channels as well.

    Returns:
        packed: uint8 [..., ceil(d * bits / 8)], dense rows.
        scale: float16 [...], limited to 65504; NaN where x has a NaN or an infinity.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride, device, bits or scale mode.
    """
    mode = _checks.check_scale_mode(scale_mode, SCALE_MODES)
    _check_encode(x, signs, levels, steps, bits, center)
    return torch.ops.turboquant.encode.default(x, signs, levels, steps, bits, mode, center)


def _check_encode(
    x: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    steps: Tensor,
    bits: int,
    center: Tensor | None,
) -> None:
    d = _checks.check_vectors("x", x)
    _checks.check_vector_dim("x", d)
    _checks.check_bits(bits, _checks.CODEC_BITS)
    device = x.device
    _checks.check_constant("signs", signs, device, torch.float32, (d,))
    _checks.check_levels(levels, device, bits)
    _checks.check_steps(steps, device)
    _checks.check_center(center, device, (d,))


def decode(
    packed: Tensor,
    scale: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    bits: int,
    center: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Reconstructs the vectors that encode stored.

    Args:
        packed: uint8 [..., ceil(d * bits / 8)], contiguous.
        scale: float16 [...], contiguous.
        signs, levels, bits, center: as given to encode; d is the length of signs.
        dtype: dtype of the result: float32, float16 or bfloat16.

    Returns:
        [..., d] of this dtype.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, device or bits.
    """
    _check_decode(packed, scale, signs, levels, bits, center, dtype)
    return torch.ops.turboquant.decode.default(packed, scale, signs, levels, bits, dtype, center)


def _check_decode(
    packed: Tensor,
    scale: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    bits: int,
    center: Tensor | None,
    dtype: torch.dtype,
) -> None:
    _checks.check_bits(bits, _checks.CODEC_BITS)
    _checks.check_output_dtype(dtype)
    _checks.check_dtype("packed", packed, (torch.uint8,))
    device = packed.device
    _checks.check_constant("signs", signs, device, torch.float32, (None,))
    d = signs.shape[0]
    _checks.check_vector_dim("signs", d)
    check_rows("packed", packed, d, bits)
    _checks.check_constant("scale", scale, device, torch.float16, tuple(packed.shape[:-1]))
    _checks.check_levels(levels, device, bits)
    _checks.check_center(center, device, (d,))


def scaled_center(center: Tensor, scale: Tensor) -> Tensor:
    """A `center` that scales channels as well: (x - center) * scale is rotated and coded.

    The rotation spreads the error of a vector evenly over all scaled channels. An inner product
    with q gets the error of a channel times q / scale, so large scales keep errors small in those
    channels where queries are large.

    Args:
        center: [..., d], float32, float16 or bfloat16.
        scale: [..., d], float32, float16 or bfloat16, positive.

    Returns:
        float32 [3, ..., d]: center, scale, 1 / scale.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, or scales that are not positive and finite.
    """
    _checks.check_dtype("center", center, _checks.FLOATS)
    _checks.check_dtype("scale", scale, _checks.FLOATS)
    _checks.check_shape("scale", scale, tuple(center.shape))
    center, scale = center.detach().float(), scale.detach().float()
    inverse = 1 / scale
    if not (torch.isfinite(scale) & torch.isfinite(inverse) & (scale > 0)).all():
        raise ValueError("scale must be positive and finite, and so must be its inverse")
    return torch.stack([center, scale, inverse])


# ---- fakes


@torch.library.register_fake("turboquant::encode")
def _encode_fake(
    x: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    steps: Tensor,
    bits: int,
    scale_mode: int,
    center: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    with _checks.of_fake():
        _checks.check_scale_number(scale_mode, SCALE_MODES)
        _check_encode(x, signs, levels, steps, bits, center)
    packed = x.new_empty((*x.shape[:-1], dense_row_bytes(x.shape[-1], bits)), dtype=torch.uint8)
    return packed, x.new_empty(x.shape[:-1], dtype=torch.float16)


@torch.library.register_fake("turboquant::decode")
def _decode_fake(
    packed: Tensor,
    scale: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    bits: int,
    dtype: torch.dtype,
    center: Tensor | None = None,
) -> Tensor:
    with _checks.of_fake():
        _check_decode(packed, scale, signs, levels, bits, center, dtype)
    return packed.new_empty((*packed.shape[:-1], signs.shape[0]), dtype=dtype)


# ---- references


def level_table_reference(levels: Tensor | None, bits: int) -> Tensor:
    """The levels in ascending order: int64 [2^bits], or [255] for 8 bits (section 4)."""
    if bits == 8:
        return torch.arange(-127, 128)
    if levels is None:
        return 2 * torch.arange(2**bits) - (2**bits - 1)
    return levels.cpu().long()


def level_of_code_reference(codes: Tensor, levels: Tensor | None, bits: int) -> Tensor:
    """The int64 levels that uint8 codes stand for, in the shape of the codes."""
    if bits == 8:
        return codes.view(torch.int8).long()
    return level_table_reference(levels, bits)[codes.long()]


def power_of_two(exponent: Tensor) -> Tensor:
    """float32 2^exponent for -126 <= exponent <= 127, made from its bit pattern."""
    return (exponent + 127 << 23).to(torch.int32).view(torch.float32)


class Channels(NamedTuple):
    """The parts of a `center`: float32 [d] or [kv_heads, d] each, None for a part that it lacks."""

    center: Tensor | None
    scale: Tensor | None
    inverse: Tensor | None

    @classmethod
    def of(cls, center: Tensor | None, dims: int) -> Channels:
        """dims: how many dimensions a center without scales has."""
        if center is not None and center.dim() > dims:
            return cls(*center.unbind())
        return cls(center, None, None)


NO_CHANNELS = Channels(None, None, None)


def quantise_reference(
    x: Tensor,
    signs: Tensor | None,
    levels: Tensor | None,
    steps: Tensor,
    bits: int,
    scale_mode: int,
    channels: Channels = NO_CHANNELS,
) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., d], scales float16 [...]: docs/format.md, section 5, step by step.

    signs: None leaves the rotation out (section 12).
    """
    d = x.shape[-1]
    root = math.sqrt(d)

    # 1, 2: subtract the center and scale the channels; vectors that cannot be coded become zero
    x = x.float()
    if channels.center is not None:
        x = x - channels.center
    if channels.scale is not None:
        x = x * channels.scale
    broken = ~torch.isfinite(x).all(-1)
    x = torch.where(broken[..., None], torch.zeros_like(x), x)
    amax = x.abs().amax(-1)

    # 3: scale by an exact power of two, so that squares neither overflow nor vanish
    exponent = ((amax.view(torch.int32) >> 23) - 127).clamp(-100, 100)
    x = x * power_of_two(-exponent)[..., None]

    # 4, 5: rotate, normalise to a length of sqrt(d), round to integers in units of 2^-12
    y = x if signs is None else core_reference(signs * x, scaled=False)
    length = r = sqrt_reference(tree_sum_reference(y * y))
    if signs is not None:
        r = length * torch.tensor(1.0 / math.sqrt(split_dim(d)[1]), dtype=torch.float32)
    k = torch.tensor(4096 * root, dtype=torch.float32) / length
    u = torch.round(y * k[..., None])
    u = torch.where((amax == 0)[..., None], torch.zeros_like(u), u).long()

    # 6: choose the candidate step with the greatest merit
    table = level_table_reference(levels, bits)
    sums = (table[1:] + table[:-1]).float()
    grain = 1 if bits == 8 else 16
    best: list[Tensor] = []
    for step in steps.float():
        boundaries = (
            grain * torch.round(sums * (step * (2048 / grain))).clamp(-(2**26), 2**26).long()
        )
        rank = torch.bucketize(u, boundaries, right=True)  # how many boundaries are <= u
        level = table[rank]
        total = (u * level).sum(-1)
        a = total.float() * 2.0**-12
        b = (level * level).sum(-1).float()
        merit = torch.where(total > 0, a * a / b, torch.zeros_like(a))
        step = step.expand_as(a)
        if not best:
            best = [merit, rank, total, a, b, step]
            continue
        better = merit > best[0]
        new = [merit, rank, total, a, b, step]
        best = [
            torch.where(better[..., None] if n.dim() > better.dim() else better, n, o)
            for n, o in zip(new, best, strict=True)
        ]
    _, rank, total, a, b, step = best

    # 7: the scale
    if scale_mode == SCALE_MODES["norm"]:
        scale = r * torch.tensor(32 / root, dtype=torch.float32) * step
    elif scale_mode == SCALE_MODES["preserve"]:
        scale = r * 32 / sqrt_reference(b)
    elif scale_mode == SCALE_MODES["mse"]:
        scale = r * torch.tensor(32 / root, dtype=torch.float32) * (a / b)
    else:
        scale = r * torch.tensor(32 * root, dtype=torch.float32) / a
    scale = torch.where((total <= 0) | (amax == 0), torch.zeros_like(scale), scale)
    scale = (scale * power_of_two(exponent)).clamp(max=65504).half()

    nan = torch.full((), 0x7E00, dtype=torch.int16).view(torch.float16)
    scale = torch.where(broken, nan, scale)
    codes = (rank - 127) % 256 if bits == 8 else rank
    codes = torch.where(broken[..., None], torch.zeros_like(codes), codes)
    return codes.to(torch.uint8), scale


def dequantise_reference(
    codes: Tensor,
    scale: Tensor,
    signs: Tensor | None,
    levels: Tensor | None,
    bits: int,
    channels: Channels = NO_CHANNELS,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Vectors [..., d] of codes uint8 [..., d], scales float16 [...]: docs/format.md, section 6.

    signs: None leaves the rotation out (section 12).
    """
    level = level_of_code_reference(codes, levels, bits)
    x = (scale.float() * 2.0**-5)[..., None] * level.float()
    if signs is not None:
        x = signs * core_reference(x)
    if channels.inverse is not None:
        x = x * channels.inverse
    if channels.center is not None:
        x = x + channels.center
    return x.to(dtype)


def encode_reference(
    x: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    steps: Tensor,
    bits: int,
    scale_mode: str = "mse",
    center: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """encode in plain PyTorch, with every rounding of docs/format.md."""
    codes, scale = quantise_reference(
        x, signs, levels, steps, bits, SCALE_MODES[scale_mode], Channels.of(center, 1)
    )
    return pack_reference(codes, bits), scale


def decode_reference(
    packed: Tensor,
    scale: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    bits: int,
    center: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """decode in plain PyTorch, with every rounding of docs/format.md."""
    codes = unpack_reference(packed, bits, signs.shape[0])
    channels = Channels.of(center, 1)
    return dequantise_reference(codes, scale, signs, levels, bits, channels, dtype)
