"""Calibration of compressed weights: what a text says about a model's linears, and what to do then.

All of it needs one thing of each linear: the second moments of its input, the mean of x x^T over
the tokens x of some text. Weights are [N, K] (out, in), moments [K, K], with any number of equal
leading dimensions, such as layers of the same shape.

    channel_scales      factors of input channels that balance the errors of a rotated group
    round_by_moments    rounds channel by channel, later channels make up for errors of earlier ones
    encode_calibrated   both, into packed weights
    relative_error      of a linear's output, from moments alone
    allocate            formats of all linears under a budget, by what each is predicted to cost
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant._budget import cheapest
from torch_turboquant.format import MULTIPLIER_OFFSET, MULTIPLIER_UNIT
from torch_turboquant.ops.hadamard import hadamard
from torch_turboquant.ops.linear import weight_pack, weight_unpack
from torch_turboquant.weights import WeightFormat, checked_channel_scale, encode_weight

# Of the mean second moment, added to every channel's before moments are inverted. GPTQ takes 1%; of
# 8,192 tokens more is learned with 20%: errors of outputs on other text are 7 to 15% smaller.
DAMPING = 0.2
NEAREST, ROUNDED = 1 / 4, 1 / 8  # powers of channel_scales without and with rounding by moments
_TINY = 1e-20  # of the largest energy, below which a channel counts as silent

# ---- one linear


def channel_scales(weight: Tensor, moment: Tensor, power: float = ROUNDED) -> Tensor:
    """Factors of channels that weights are multiplied by, and activations divided by.

    The transform spreads the error of a group evenly over its channels, and the factors are undone
    behind it, so channel k's error is multiplied by E x_k^2 / s_k^2. With the group's energy, the
    sum of E w_k^2 s_k^2, the product is least for s_k = (E x_k^2 / E w_k^2)^(1/4). Rounding by
    moments gives channels of large inputs small errors by itself, and needs half of that.

    Args:
        weight: [..., N, K]; linears that read the same input, such as queries, keys and values,
            may be put together along N to share their factors.
        moment: second moments [..., K, K], or their diagonal [..., K].
        power: ROUNDED for encode_calibrated; NEAREST for encode_weight.

    Returns:
        float32 [..., K], positive, with a geometric mean of 1.

    Raises:
        ValueError: shapes that do not fit, or moments or weights that are not finite.
    """
    energy = _energy(weight, moment)
    own = weight.float().square().mean(-2)
    _check_finite("weights", own)
    scale = (_audible(energy) / _audible(own)) ** power
    return scale / scale.log().mean(-1, keepdim=True).exp()


def _audible(x: Tensor) -> Tensor:
    """Energies of channels in units of their layer's largest, the silent ones as the quietest that
    speaks.

    Where all are silent, as in a block that somebody has added as zeros, all are alike.
    """
    top = x.amax(-1, keepdim=True)
    return torch.where(top > 0, (x / top).clamp(min=_TINY), 1)


def _energy(weight: Tensor, moment: Tensor) -> Tensor:
    """The diagonal of the moments, float32 [..., K], checked."""
    k = weight.shape[-1]
    if moment.shape == (*weight.shape[:-2], k, k):
        moment = moment.diagonal(dim1=-2, dim2=-1)
    if moment.shape != (*weight.shape[:-2], k):
        raise ValueError(
            f"moments of weights {list(weight.shape)} must be [..., {k}, {k}] or [..., {k}], "
            f"got {list(moment.shape)}"
        )
    _check_finite("second moments", moment)
    return moment.float()


def _check_finite(name: str, x: Tensor) -> None:
    if not bool(x.isfinite().all()):
        raise ValueError(f"{name} must be finite: they have NaN or infinite elements")


def inverse_factor(moment: Tensor, damping: float = DAMPING) -> Tensor:
    """The upper Cholesky factor U of the inverse of damped moments, U^T U: float32 [..., K, K].

    Row k divided by its diagonal element says how much of channel k's error each later channel
    makes up for (GPTQ, arXiv:2210.17323). Computed in float64.

    Raises:
        ValueError: moments that are not finite, or cannot be those of any input.
    """
    moment = moment.double()
    _check_finite("second moments", moment)
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)
    identity = torch.eye(moment.shape[-1], device=moment.device, dtype=moment.dtype)
    damped = moment + (damping * mean.clamp(min=_TINY))[..., None, None] * identity
    # cholesky reads the lower triangle and would not see; rounding is far below a thousandth
    largest = moment.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=0)
    lopsided = (moment - moment.mT).abs().amax((-1, -2)) > 1e-3 * largest
    try:
        if bool(lopsided.any()):
            raise torch.linalg.LinAlgError("they are not symmetric")  # type: ignore[attr-defined]
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        return torch.linalg.cholesky(inverse, upper=True).float()
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise ValueError(
            "second moments must be symmetric, without negative eigenvalues, as the mean of x x^T "
            f"over inputs x is: {error}"
        ) from None


Quantiser = Callable[[Tensor, int], Tensor]


def round_by_moments(
    weight: Tensor,
    moment: Tensor,
    bounds: Sequence[tuple[int, int]],
    prepare: Callable[[Tensor, int], Quantiser],
    damping: float = DAMPING,
) -> Tensor:
    """Quantises channel after channel; those not yet quantised make up for the error (GPTQ).

    Args:
        weight: float32 [..., N, K], in the basis in which it is quantised.
        moment: second moments of the input in the same basis, [..., K, K].
        bounds: first and last channel (exclusive) of the groups, in order, all of K.
        prepare: called with a group's weights [..., N, g] as they are when its turn comes, and its
            number; chooses scales, and returns the quantiser of one channel, which takes values
            [..., N] and the channel's place in the group and gives the decoded values.
        damping: of the mean second moment, added to every channel's.

    Returns:
        The decoded weights, float32 [..., N, K].
    """
    left, factor = weight.clone(), inverse_factor(moment, damping)
    decoded = torch.empty_like(left)
    for number, (first, last) in enumerate(bounds):
        part = left[..., first:last].contiguous()
        quantise = prepare(part, number)
        own = factor[..., first:last, first:last]
        # of all rows one channel at a time, so channels come first
        part, errors = part.movedim(-1, 0).contiguous(), []
        for i in range(last - first):
            value = quantise(part[i], i)
            decoded[..., first + i] = value
            error = (part[i] - value) / own[..., i, i, None]
            errors.append(error)
            later = own[..., i, i + 1 :].movedim(-1, 0)
            part[i + 1 :] -= error * later[..., None]
        left[..., last:] -= torch.stack(errors, -1) @ factor[..., first:last, last:]
    return decoded


def encode_calibrated(
    weight: Tensor,
    moment: Tensor,
    form: WeightFormat,
    channel_scale: Tensor | None = None,
) -> Tensor:
    """Packs a weight so that the error of the output is small, by `round_by_moments`.

    Scales and multipliers of a group are those that encode_weight chooses for the weights that are
    left when the group's turn comes; the codes differ. Any reader of the format reads the result.

    Args:
        weight: [n, k] (outputs, inputs), float32, float16 or bfloat16; k is a multiple of 64.
        moment: [k, k], the mean of x x^T over inputs x as the layer gets them, before
            channel_scale. It is damped, so fewer inputs than channels are allowed.
        form: how the weight is stored.
        channel_scale: as of encode_weight, such as `channel_scales`.

    Returns:
        packed: uint8, as of encode_weight, on the weight's device.

    Raises:
        TypeError: another dtype.
        ValueError: another shape or device, as encode_weight, or moments that are not finite or
            cannot be those of any input.
    """
    _checks.check_dtype("weight", weight, _checks.FLOATS)
    _checks.check_shape("weight", weight, (None, None))
    n, k = weight.shape
    group, device = form.group_of(k), weight.device
    _checks.check_shape("moment", moment, (k, k))
    _checks.check_device("moment", moment, device)
    _check_finite("second moments", moment)
    weight, moment = weight.detach().float(), moment.float()
    if channel_scale is not None:
        scale = checked_channel_scale(channel_scale, k).to(device)
        weight, moment = weight * scale, moment / (scale * scale[:, None])
    form = replace(form, group=group)
    signs = form.signs(group, device)
    coder = _Coder(form, n, k, device)
    round_by_moments(
        _rotated(weight, signs),
        _rotated(_rotated(moment, signs).mT.contiguous(), signs).mT,
        [(first, first + group) for first in range(0, k, group)],
        coder.prepare,
    )
    return coder.packed()


def _rotated(x: Tensor, signs: Tensor) -> Tensor:
    """The transform of every group of the last dimension."""
    return hadamard(x.unflatten(-1, (-1, len(signs))), signs).flatten(-2)


class _Coder:
    """Codes, scales and multipliers of a weight [n, k], as they are chosen group after group."""

    def __init__(self, form: WeightFormat, n: int, k: int, device: torch.device) -> None:
        self.form, self.group = form, form.group_of(k)
        levels = form.levels(self.group, device)
        if levels is None:
            top = 127 if form.bits == 8 else 2**form.bits - 1
            step = 1 if form.bits == 8 else 2
            levels = torch.arange(-top, top + 1, step, device=device)
        self.levels = levels.float()
        self.middles = (self.levels[1:] + self.levels[:-1]) / 2
        self.codes = torch.empty(n, k, dtype=torch.uint8, device=device)
        self.scales: list[Tensor] = []  # [n] of each group
        self.multipliers: list[Tensor] = []  # [n, group / sub]

    def prepare(self, part: Tensor, number: int) -> Quantiser:
        """The quantiser of a group's channels, see `round_by_moments`."""
        n, group = part.shape
        form, sub = self.form, self.form.sub or 0
        own = encode_weight(hadamard(part, form.signs(group, part.device), inverse=True), form)
        _, scale, multipliers = weight_unpack(own, n, group, form.bits, sub)
        self.scales.append(scale[:, 0])
        self.multipliers.append(multipliers)
        units = scale.float() / 32
        if sub:
            units = units * ((multipliers.float() + MULTIPLIER_OFFSET) * MULTIPLIER_UNIT)
        safe = torch.where(units > 0, units, 1)
        codes = self.codes[:, number * group : (number + 1) * group]

        def quantise(value: Tensor, i: int) -> Tensor:
            at = i * units.shape[1] // group
            rank = torch.bucketize(value / safe[:, at], self.middles, right=True)
            # at 8 bits a code is the level's byte, in two's complement
            codes[:, i] = (rank - 127) % 256 if form.bits == 8 else rank
            return self.levels[rank] * units[:, at]

        return quantise

    def packed(self) -> Tensor:
        """All groups, as packed weights."""
        multipliers = torch.cat(self.multipliers, 1) if self.form.sub else None
        return weight_pack(self.codes, torch.stack(self.scales, 1), multipliers, self.form.bits)


def relative_error(weight: Tensor, decoded: Tensor, moment: Tensor) -> Tensor:
    """The energy of the output's error over that of the output, float64 [...].

    Args:
        weight, decoded: [..., N, K].
        moment: second moments [..., K, K] of the input.
    """
    energies = []
    for w in (decoded.float() - weight.float(), weight.float()):
        energies.append(((w @ moment.to(w)) * w).double().sum((-1, -2)))
    return energies[0] / energies[1].clamp(min=1e-300)


# ---- a whole model


class Choice(NamedTuple):
    """One format for one linear.

    Attributes:
        label: the format, of any type.
        bits: all bits that the linear takes in it.
        cost: what it is predicted to cost, in any unit that can be added up, such as a sensitivity
            times `relative_error`.
    """

    label: object
    bits: float
    cost: float


def allocate(choices: Mapping[str, Sequence[Choice]], budget: float) -> dict[str, Choice]:
    """The formats of least total cost whose bits are within the budget (see `cheapest`).

    Args:
        choices: of each linear by its name, at least one.
        budget: bits of all linears together.

    Returns:
        The choice for every name, in the order of `choices`.

    Raises:
        ValueError: the smallest choices exceed the budget or it is NaN, a linear has no choice, or
            bits or costs are not finite numbers.
    """
    if math.isnan(budget):
        raise ValueError("the budget is NaN, supported: a number of bits")
    for name, given in choices.items():
        if not given:
            raise ValueError(f"{name} has no format to choose from")
        if not all(math.isfinite(c.bits) and math.isfinite(c.cost) for c in given):
            raise ValueError(f"bits and costs must be finite numbers, those of {name} are not")
    bits = [[choice.bits for choice in given] for given in choices.values()]
    least = sum(map(min, bits))
    if least > budget:
        raise ValueError(
            f"the budget of {budget:.0f} bits is below the {least:.0f} bits that the smallest "
            "formats take"
        )
    costs = [[choice.cost for choice in given] for given in choices.values()]
    numbers = cheapest(bits, costs, budget)
    return {name: choices[name][i] for name, i in zip(choices, numbers, strict=True)}
