"""QJL: a 1-bit sketch of a residual, and the unbiased estimate of inner products with it.

The paper (Algorithm 2, TurboQuant_prod) stores the signs of S r and the length |r| for the residual
r = x - decoded x. For a query q,  c * |r| * <S q, sign(S r)>  estimates <q, r> without bias. The
factor c depends on the kind of S, and the wrong one gives wrong estimates without an error:

    dense S, float32 [m, d] of independent N(0, 1):        c = sqrt(pi / 2) / m
    structured S = signed orthonormal transform, m = d:    c = sqrt(pi / (2 d))

The sketch belongs to standalone vectors; page records have none.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant.format import dense_row_bytes
from torch_turboquant.ops.codec import power_of_two
from torch_turboquant.ops.hadamard import core_reference, sqrt_reference, tree_sum_reference
from torch_turboquant.ops.pack import pack_reference, unpack_reference
from torch_turboquant.signs import gaussian_projection, rotation_tensor

__all__ = ["gaussian_projection", "qjl_score", "qjl_sketch"]


def qjl_sketch(residual: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    """Signs of the projected residuals, and their lengths.

    Args:
        residual: [..., d], float32, float16 or bfloat16, stride 1 in the last dimension;
            d = m * 2^k up to 4096 with m one of 1, 3, 5, 7, 9 and k >= 1.
        projection: either dense, float32 [m, d] with m a multiple of 8 (gaussian_projection), or
            the signs of a structured projection, float32 [d] with d a multiple of 8 (random_signs
            with SignKind.SKETCH).

    Returns:
        sign_bits: uint8 [..., m / 8]; bit i of a row is 1 where projection i is >= 0.
        norm: float32 [...]. It is NaN, and all bits are 0, where the residual has a NaN or an
            infinity.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride or device.
    """
    _check_residual(residual, projection)
    return torch.ops.turboquant.qjl_sketch.default(residual, projection)


def qjl_score(q: Tensor, sign_bits: Tensor, norm: Tensor, projection: Tensor) -> Tensor:
    """Unbiased estimates of the inner products of queries with sketched residuals.

    Args:
        q: [..., queries, d], float32, float16 or bfloat16, stride 1 in the last dimension.
        sign_bits: uint8 [..., keys, m / 8], contiguous, with the leading dimensions of q.
        norm: float32 [..., keys], contiguous.
        projection: as given to qjl_sketch.

    Returns:
        float32 [..., queries, keys]. On the CPU the projected query is rounded to 16-bit integers
        (docs/ops.md#score), which adds an error of about 1e-5 |q| norm.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride or device.
    """
    _check_score(q, sign_bits, norm, projection)
    return torch.ops.turboquant.qjl_score.default(q, sign_bits, norm, projection)


def _check_residual(residual: Tensor, projection: Tensor) -> None:
    d = _checks.check_vectors("residual", residual)
    _checks.check_vector_dim("residual", d)
    check_projection(projection, residual.device, d)


def _check_score(q: Tensor, sign_bits: Tensor, norm: Tensor, projection: Tensor) -> None:
    d = _checks.check_vectors("q", q)
    if q.dim() < 2:
        raise ValueError(f"q has shape {list(q.shape)}, expected [..., queries, d]")
    _checks.check_vector_dim("q", d)
    check_projection(projection, q.device, d)
    _checks.check_dtype("sign_bits", sign_bits, (torch.uint8,))
    lead, row = tuple(q.shape[:-2]), projection.shape[0] // 8
    keys = sign_bits.shape[-2] if sign_bits.dim() >= 2 else None
    _checks.check_constant("sign_bits", sign_bits, q.device, torch.uint8, (*lead, keys, row))
    _checks.check_constant("norm", norm, q.device, torch.float32, (*lead, keys))


def check_projection(projection: Tensor, device: torch.device, d: int) -> None:
    """Checks a projection: dense [m, d] or structured [d], whose sketches fill whole bytes.

    Raises:
        TypeError: another dtype than float32.
        ValueError: another shape, stride or device.
    """
    _checks.check_dtype("projection", projection, (torch.float32,))
    rows = projection.shape[0] if projection.dim() in (1, 2) else 0
    if rows < 8 or rows % 8 or projection.shape[-1] != d:
        raise ValueError(
            f"projection has shape {list(projection.shape)}, expected [m, {d}] (dense) or [{d}] "
            "(structured), its first dimension a multiple of 8"
        )
    _checks.check_constant("projection", projection, device, torch.float32, tuple(projection.shape))


# ---- fakes


@torch.library.register_fake("turboquant::qjl_sketch")
def _qjl_sketch_fake(residual: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    with _checks.of_fake():
        _check_residual(residual, projection)
    lead = residual.shape[:-1]
    bits = residual.new_empty((*lead, dense_row_bytes(projection.shape[0], 1)), dtype=torch.uint8)
    return bits, residual.new_empty(lead, dtype=torch.float32)


@torch.library.register_fake("turboquant::qjl_score")
def _qjl_score_fake(q: Tensor, sign_bits: Tensor, norm: Tensor, projection: Tensor) -> Tensor:
    with _checks.of_fake():
        _check_score(q, sign_bits, norm, projection)
    return q.new_empty((*q.shape[:-1], sign_bits.shape[-2]), dtype=torch.float32)


# ---- references


def qjl_sketch_reference(residual: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    """The op in plain PyTorch, with every rounding of docs/format.md, section 10."""
    r = residual.float()
    broken = ~torch.isfinite(r).all(-1)
    r = torch.where(broken[..., None], torch.zeros_like(r), r)
    exponent = ((r.abs().amax(-1).view(torch.int32) >> 23) - 127).clamp(-100, 100)
    r = r * power_of_two(-exponent)[..., None]
    if projection.dim() == 2:
        projected = tree_sum_reference(projection * r[..., None, :])
    else:
        projected = core_reference(projection * r)
    bits = ((projected >= 0) & ~broken[..., None]).to(torch.uint8)
    norm = sqrt_reference(tree_sum_reference(r * r)) * power_of_two(exponent)
    return pack_reference(bits, 1), torch.where(broken, torch.full_like(norm, torch.nan), norm)


def qjl_score_reference(q: Tensor, sign_bits: Tensor, norm: Tensor, projection: Tensor) -> Tensor:
    """The estimator in float64: float64 [..., queries, keys]."""
    signs = 2.0 * unpack_reference(sign_bits, 1, projection.shape[0]).double() - 1.0
    if projection.dim() == 2:
        factor = math.sqrt(math.pi / 2) / projection.shape[0]
        projected = q.double() @ projection.double().T
    else:
        factor = math.sqrt(math.pi / (2 * projection.shape[0]))
        projected = q.double() @ rotation_tensor(projection).T
    return factor * norm.double()[..., None, :] * (projected @ signs.transpose(-1, -2))
