"""Attention scores straight from packed vectors.

The inner product with a decoded key is computed in the rotated space: the query is transformed
once, every key costs one dot product with its levels, and its scale is applied at the end. Keys are
never decoded. An optional sketch of the residuals (qjl.py) adds the paper's unbiased correction
(Algorithm 2, TurboQuant_prod).

On the CPU a query is rotated or projected once and rounded to 16-bit integers. This changes a score
by about 10^-5 of |q| |key| (or |q| |residual|), less than a thousandth of the error of an 8-bit
code. Above 512 channels the integers have fewer bits, so that sums of any levels fit 32 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant.ops.codec import Channels, level_of_code_reference
from torch_turboquant.ops.pack import check_rows, unpack_reference
from torch_turboquant.ops.qjl import check_projection, qjl_score_reference
from torch_turboquant.signs import rotation_tensor


def score(
    q: Tensor,
    packed: Tensor,
    scale: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    bits: int,
    center: Tensor | None = None,
    sign_bits: Tensor | None = None,
    residual_norm: Tensor | None = None,
    projection: Tensor | None = None,
) -> Tensor:
    """Inner products of queries with encoded keys.

    Args:
        q: [..., queries, d], float32, float16 or bfloat16, stride 1 in the last dimension;
            d = m * 2^k up to 4096 with m one of 1, 3, 5, 7, 9 and k >= 1.
        packed: uint8 [..., keys, ceil(d * bits / 8)], contiguous, with the leading dimensions of q.
        scale: float16 [..., keys], contiguous.
        signs, levels, bits, center: as given to encode.
        sign_bits, residual_norm, projection: the sketch of the residuals (qjl_sketch), all three or
            none.

    Returns:
        float32 [..., queries, keys]: <q, decoded key> + <q, center> + the sketch's estimate. On the
        CPU the rotated query is rounded to 16-bit integers (docs/ops.md#score), which adds an error
        of about 1e-5 |q| |key|.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride, device or bits; a part of the sketch missing.
    """
    _check(q, packed, scale, signs, levels, bits, center, sign_bits, residual_norm, projection)
    return torch.ops.turboquant.score.default(
        q, packed, scale, signs, levels, bits, center, sign_bits, residual_norm, projection
    )


def _check(
    q: Tensor,
    packed: Tensor,
    scale: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    bits: int,
    center: Tensor | None,
    sign_bits: Tensor | None,
    residual_norm: Tensor | None,
    projection: Tensor | None,
) -> None:
    d = _checks.check_vectors("q", q)
    if q.dim() < 2:
        raise ValueError(f"q has shape {list(q.shape)}, expected [..., queries, d]")
    _checks.check_vector_dim("q", d)
    _checks.check_bits(bits, _checks.CODEC_BITS)
    device, lead = q.device, tuple(q.shape[:-2])
    check_rows("packed", packed, d, bits)
    keys = packed.shape[-2] if packed.dim() >= 2 else None
    _checks.check_constant("packed", packed, device, torch.uint8, (*lead, keys, packed.shape[-1]))
    _checks.check_constant("scale", scale, device, torch.float16, (*lead, keys))
    _checks.check_constant("signs", signs, device, torch.float32, (d,))
    _checks.check_levels(levels, device, bits)
    _checks.check_center(center, device, (d,))
    if sign_bits is not None and residual_norm is not None and projection is not None:
        check_projection(projection, device, d)
        _checks.check_constant(
            "sign_bits", sign_bits, device, torch.uint8, (*lead, keys, projection.shape[0] // 8)
        )
        _checks.check_constant("residual_norm", residual_norm, device, torch.float32, (*lead, keys))
    elif any(part is not None for part in (sign_bits, residual_norm, projection)):
        raise ValueError("sign_bits, residual_norm and projection come together or not at all")


# ---- fake


@torch.library.register_fake("turboquant::score")
def _score_fake(
    q: Tensor,
    packed: Tensor,
    scale: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    bits: int,
    center: Tensor | None = None,
    sign_bits: Tensor | None = None,
    residual_norm: Tensor | None = None,
    projection: Tensor | None = None,
) -> Tensor:
    with _checks.of_fake():
        _check(q, packed, scale, signs, levels, bits, center, sign_bits, residual_norm, projection)
    return q.new_empty((*q.shape[:-1], packed.shape[-2]), dtype=torch.float32)


# ---- reference


def score_reference(
    q: Tensor,
    packed: Tensor,
    scale: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    bits: int,
    center: Tensor | None = None,
    sign_bits: Tensor | None = None,
    residual_norm: Tensor | None = None,
    projection: Tensor | None = None,
) -> Tensor:
    """Decoded keys, the center and the estimator in float64: float64 [..., queries, keys]."""
    level = level_of_code_reference(unpack_reference(packed, bits, q.shape[-1]), levels, bits)
    rotated = scale.double()[..., None] * level.double() / 32
    keys = rotated @ rotation_tensor(signs)  # the inverse rotation of row vectors
    channels = Channels.of(center, 1)
    if channels.inverse is not None:
        keys = keys * channels.inverse.double()
    out = q.double() @ keys.transpose(-1, -2)
    if channels.center is not None:
        out = out + (q.double() @ channels.center.double())[..., None]
    if sign_bits is not None and residual_norm is not None and projection is not None:
        out = out + qjl_score_reference(q, sign_bits, residual_norm, projection)
    return out
