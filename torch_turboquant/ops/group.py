"""Affine quantisation of groups of channels, without a rotation: the usual baseline for values.

Each quantisation group of 32 or 64 channels stores its minimum and one step in float16, and a 2- or
4-bit code per channel that counts steps from the minimum (docs/format.md, section 10). Published
caches store values this way; rotated codes are measured against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant.format import dense_row_bytes
from torch_turboquant.ops.pack import check_rows, pack_reference, unpack_reference

GROUPS = (32, 64)
GROUP_BITS = (2, 4)


def group_encode(x: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises groups of channels between their minimum and maximum.

    Args:
        x: [..., d], float32, float16 or bfloat16, stride 1 in the last dimension, d a multiple of
            group.
        group: channels of a quantisation group: 32 or 64.
        bits: 2 or 4.

    Returns:
        packed: uint8 [..., d * bits / 8], dense rows.
        scale, zero: the step and the minimum of every group, float16 [..., d / group]; NaN where a
            group has a NaN or an infinity.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride, group or bits.
    """
    _check_encode(x, group, bits)
    return torch.ops.turboquant.group_encode.default(x, group, bits)


def group_decode(
    packed: Tensor,
    scale: Tensor,
    zero: Tensor,
    group: int,
    bits: int,
    d: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Reconstructs the vectors that group_encode stored: code * scale + zero.

    Args:
        packed: uint8 [..., d * bits / 8], contiguous.
        scale, zero: float16 [..., d / group], contiguous.
        group: 32 or 64.
        bits: 2 or 4.
        d: channels of a vector, a multiple of group.
        dtype: dtype of the result: float32, float16 or bfloat16.

    Returns:
        [..., d] of this dtype.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, device, group or bits.
    """
    _check_decode(packed, scale, zero, group, bits, d, dtype)
    return torch.ops.turboquant.group_decode.default(packed, scale, zero, group, bits, d, dtype)


def _check_encode(x: Tensor, group: int, bits: int) -> None:
    d = _checks.check_vectors("x", x)
    _check_group("x", d, group, bits)


def _check_decode(
    packed: Tensor, scale: Tensor, zero: Tensor, group: int, bits: int, d: int, dtype: torch.dtype
) -> None:
    _checks.check_output_dtype(dtype)
    _check_group("packed", d, group, bits)
    check_rows("packed", packed, d, bits)
    device, groups = packed.device, (*packed.shape[:-1], d // group)
    _checks.check_constant("scale", scale, device, torch.float16, groups)
    _checks.check_constant("zero", zero, device, torch.float16, groups)


def _check_group(name: str, d: int, group: int, bits: int) -> None:
    _checks.check_bits(group, GROUPS, "group")
    _checks.check_bits(bits, GROUP_BITS)
    if d < group or d % group:
        raise ValueError(f"d of {name} is {d}, supported: multiples of the group of {group}")


# ---- fakes


@torch.library.register_fake("turboquant::group_encode")
def _group_encode_fake(x: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    with _checks.of_fake():
        _check_encode(x, group, bits)
    lead, d = x.shape[:-1], x.shape[-1]
    packed = x.new_empty((*lead, dense_row_bytes(d, bits)), dtype=torch.uint8)
    scale = x.new_empty((*lead, d // group), dtype=torch.float16)
    return packed, scale, torch.empty_like(scale)


@torch.library.register_fake("turboquant::group_decode")
def _group_decode_fake(
    packed: Tensor, scale: Tensor, zero: Tensor, group: int, bits: int, d: int, dtype: torch.dtype
) -> Tensor:
    with _checks.of_fake():
        _check_decode(packed, scale, zero, group, bits, d, dtype)
    return packed.new_empty((*packed.shape[:-1], d), dtype=dtype)


# ---- references


def group_encode_reference(x: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """The op in plain PyTorch, with every rounding of docs/format.md, section 10."""
    top = 2**bits - 1
    x = x.float().unflatten(-1, (-1, group))
    broken = ~torch.isfinite(x).all(-1)
    x = torch.where(broken[..., None], torch.zeros_like(x), x)
    low, high = x.amin(-1) + 0.0, x.amax(-1) + 0.0  # -0 becomes +0
    zero = low.clamp(-65504, 65504).half()
    scale = ((high - low) / top).clamp(-65504, 65504).half()
    step = scale.float()[..., None]
    code = torch.floor((x - zero.float()[..., None]) * (1 / step) + 0.5).clamp(0, top)
    code = torch.where((step == 0) | broken[..., None], torch.zeros_like(code), code)
    nan = torch.full((), 0x7E00, dtype=torch.int16).view(torch.float16)
    scale, zero = torch.where(broken, nan, scale), torch.where(broken, nan, zero)
    return pack_reference(code.to(torch.uint8).flatten(-2), bits), scale, zero


def group_decode_reference(
    packed: Tensor,
    scale: Tensor,
    zero: Tensor,
    group: int,
    bits: int,
    d: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The op in plain PyTorch, with every rounding of docs/format.md, section 10."""
    code = unpack_reference(packed, bits, d).float().unflatten(-1, (-1, group))
    x = code * scale.float()[..., None] + zero.float()[..., None]
    return x.flatten(-2).to(dtype)
