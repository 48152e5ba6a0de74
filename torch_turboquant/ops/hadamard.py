"""The transform: a signed, orthonormal Walsh-Hadamard transform of the last dimension.

It stands in for the paper's random rotation (Algorithm 1, line 2): after it, every coordinate of a
vector has nearly the same known distribution, so one scalar codebook serves all of them. With
d = m * 2^k, it does butterflies over the 2^k contiguous channels of a block, then applies the m x m
Hartley matrix across the blocks (docs/format.md, section 2).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from torch_turboquant import _autograd, _checks
from torch_turboquant.signs import hartley_matrix, split_dim


def hadamard(x: Tensor, signs: Tensor, inverse: bool = False) -> Tensor:
    """The transform of the last dimension, or its inverse.

    Args:
        x: [..., d], float32, float16 or bfloat16, stride 1 in the last dimension;
            d = m * 2^k up to 4096 with m one of 1, 3, 5, 7, 9 and k >= 1.
        signs: float32 [d] of +1 and -1 (random_signs).
        inverse: whether to apply the inverse.

    Returns:
        A new tensor of x's shape and dtype, computed in float32 and rounded once. Sums are scaled
        at the end, so that they may overflow where x has numbers above 3.4e38 / d. It can be
        differentiated with respect to x, in reverse mode (the transform is orthonormal, so its
        inverse transforms gradients), in forward mode (it transforms tangents) and by torch.func.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride or device.
        RuntimeError: signs require a gradient or have a tangent.
    """
    _check(x, signs)
    return torch.ops.turboquant.hadamard.default(x, signs, inverse)


def _check(x: Tensor, signs: Tensor) -> None:
    d = _checks.check_vectors("x", x)
    _checks.check_vector_dim("x", d)
    _checks.check_constant("signs", signs, x.device, torch.float32, (d,))


# ---- fake and derivatives


@torch.library.register_fake("turboquant::hadamard")
def _hadamard_fake(x: Tensor, signs: Tensor, inverse: bool = False) -> Tensor:
    with _checks.of_fake():
        _check(x, signs)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_ONLY_X = "turboquant::hadamard has a gradient for x only: detach the signs"


class _Transform(torch.autograd.function._SingleLevelFunction):
    """The derivatives of the Autograd kernel below, which is already inside a transform of
    torch.func where there is one; torch.autograd.Function is for the outside.
    """

    @staticmethod
    def forward(keyset: Any, x: Tensor, signs: Tensor, inverse: bool) -> Tensor:
        # what lies below may be another transform of torch.func, which differentiates as well
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return _below_autograd(keyset, x, signs, inverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, Tensor, Tensor, bool], output: Tensor) -> None:
        _, _, signs, inverse = inputs
        ctx.set_materialize_grads(False)  # so that jvp sees whether signs have a tangent
        ctx.save_for_backward(signs)
        ctx.save_for_forward(signs)
        ctx.inverse = inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, Tensor | None, None, None]:
        (signs,) = ctx.saved_tensors
        if grad is None:
            return None, None, None, None
        op = torch.ops.turboquant.hadamard.default
        return None, op(grad.contiguous(), signs, not ctx.inverse), None, None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, of_signs: Tensor | None, __: None) -> Tensor:
        if of_signs is not None:
            raise RuntimeError(_ONLY_X)
        (signs,) = ctx.saved_tensors
        op = torch.ops.turboquant.hadamard.default
        return op(tangent.contiguous(), signs, ctx.inverse)


def _below_autograd(keyset: Any, x: Tensor, signs: Tensor, inverse: bool) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        op = torch.ops.turboquant.hadamard.default
        return _autograd.call_below(op, keyset, x, signs, inverse)


def _differentiable(keyset: Any, x: Tensor, signs: Tensor, inverse: bool = False) -> Tensor:
    if _autograd.requires_grad(signs):
        raise RuntimeError(_ONLY_X)
    if not _autograd.requires_grad(x) and not _autograd.in_forward_mode():
        return _below_autograd(keyset, x, signs, inverse)
    with enable_single_level_autograd_function():
        return _Transform.apply(keyset, x, signs, inverse)  # type: ignore[attr-defined]


_library = torch.library.Library("turboquant", "IMPL")
_library.impl("hadamard", _differentiable, "Autograd", with_keyset=True)


# ---- reference


def hadamard_reference(x: Tensor, signs: Tensor, inverse: bool = False) -> Tensor:
    """The op in plain PyTorch, with every rounding of docs/format.md."""
    y = x.float()
    y = signs * core_reference(y) if inverse else core_reference(signs * y)
    return y.to(x.dtype)


def core_reference(y: Tensor, scaled: bool = True) -> Tensor:
    """The transform of float32 [..., d] without signs, which is its own inverse up to rounding.

    scaled: False leaves out the factor 1 / sqrt(n), as encoders do (section 5, step 4).
    """
    d = y.shape[-1]
    m, n = split_dim(d)
    lead = y.shape[:-1]
    h = 1
    while h < n:
        pairs = y.reshape(*lead, d // (2 * h), 2, h)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack([a + b, a - b], dim=-2)
        h *= 2
    y = y.reshape(*lead, m, n)
    if scaled:
        y = y * torch.tensor(1.0 / math.sqrt(n), dtype=torch.float32)
    if m > 1:
        matrix = torch.from_numpy(hartley_matrix(m)).float().to(y.device)
        blocks = []
        for row in matrix:
            total = row[0] * y[..., 0, :]
            for j in range(1, m):
                total = total + row[j] * y[..., j, :]
            blocks.append(total)
        y = torch.stack(blocks, dim=-2)
    return y.reshape(*lead, d)


def sqrt_reference(t: Tensor) -> Tensor:
    """The correctly rounded float32 square root; torch.sqrt can be off by one ulp on CPUs."""
    return torch.from_numpy(np.asarray(np.sqrt(t.numpy())))


def tree_sum_reference(t: Tensor) -> Tensor:
    """The sum of float32 [..., d] over d, in the fixed order of docs/format.md, section 5."""
    m, n = split_dim(t.shape[-1])
    t = t.reshape(*t.shape[:-1], m, n)
    while t.shape[-1] > 1:
        t = t[..., 0::2] + t[..., 1::2]
    total = t[..., 0, 0]
    for block in range(1, m):
        total = total + t[..., block, 0]
    return total
