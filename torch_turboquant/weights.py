"""Weights of linear layers in 4 or 8 bits: their format, their codec and the layer that uses them.

    layer = PackedLinear.from_linear(linear, WeightFormat(bits=4))
    y = layer(x)

The weight stays in its codes: the layer multiplies with them (ops/linear.py). Its bytes are the
same on disk and on every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from torch_turboquant import _checks
from torch_turboquant._autograd import lasting, named_error
from torch_turboquant.codebook import GRIDS, Codebook
from torch_turboquant.format import (
    MULTIPLIER_OFFSET,
    MULTIPLIER_UNIT,
    WEIGHT_BITS,
    WEIGHT_GROUPS,
    WEIGHT_ROWS,
    WeightBlock,
    weight_subs,
)
from torch_turboquant.ops.linear import weight_decode, weight_encode, weight_unpack
from torch_turboquant.signs import SignKind, random_signs

_linear_packed = torch.ops.turboquant.linear_packed.default

# Candidate steps of an encoder without multipliers, as for vectors of a cache.
_SEARCH = 8
# With multipliers a few are enough, between two neighbouring multipliers. They are the nominal step
# over the multiplier in the middle, times numbers that were found on Gaussian weights.
_SUB_SEARCH = (0.92, 0.95, 0.98, 1.01)
_MIDDLE_MULTIPLIER = (MULTIPLIER_OFFSET + 7.5) * MULTIPLIER_UNIT


@dataclass(frozen=True)
class WeightFormat:
    """How weights are stored.

    Args:
        bits: 4 or 8 bits per channel.
        grid: "lloyd" (Lloyd-Max levels) or "uniform" (evenly spaced). None stands for "lloyd" at 4
            bits, and for "uniform" at 8, which have no other grid.
        sub: 32 gives every 32 channels a multiplier of 4 bits beside the scale of their group,
            which makes the error at 4 bits a quarter smaller; 0 does not. None stands for 32 at 4
            bits, and for 0 at 8, which have no multipliers.
        group: 64 or 128 channels that share a scale and a rotation. None stands for 128 where the
            number of input channels is a multiple of it, else for 64.

    Raises:
        ValueError: anything else; the text names what is supported.
    """

    bits: int = 4
    grid: str | None = None
    sub: int | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("bits", "sub", "group") if getattr(self, name) is not None]
        _checks.check_whole_fields(self, *given)
        if self.bits not in WEIGHT_BITS:
            raise ValueError(f"bits is {self.bits}, supported for weights: 4, 8")
        if self.grid is None:
            object.__setattr__(self, "grid", "uniform" if self.bits == 8 else "lloyd")
        elif self.grid not in GRIDS:
            raise ValueError(f"grid must be one of {GRIDS}, got {self.grid!r}")
        elif self.bits == 8 and self.grid != "uniform":
            raise ValueError(f"grid must be 'uniform' for 8 bits, got {self.grid!r}")
        if self.sub is None:
            object.__setattr__(self, "sub", max(weight_subs(self.bits)))
        if self.group is not None and self.group not in WEIGHT_GROUPS:
            raise ValueError(f"group is {self.group}, supported for weights: 64, 128")
        self._block(self.group or WEIGHT_GROUPS[0])  # checks sub

    def _block(self, group: int) -> WeightBlock:
        return WeightBlock(group, self.bits, self.sub or 0)

    def group_of(self, k: int) -> int:
        """Channels of a group of a weight with k input channels: 64 or 128.

        Raises:
            ValueError: k is not a multiple of the group.
        """
        groups = (128, 64) if self.group is None else (self.group,)
        for group in groups:
            if k > 0 and k % group == 0:
                return group
        raise ValueError(f"the weight has {k} input channels, supported: multiples of {groups[-1]}")

    def block(self, k: int) -> WeightBlock:
        """The layout of the blocks of a weight with k input channels."""
        return self._block(self.group_of(k))

    def bits_per_weight(self, k: int) -> float:
        """Bits that a weight takes with its share of scales and multipliers."""
        block = self.block(k)
        return 8 * block.block_bytes / (WEIGHT_ROWS * block.group)

    def codebook(self, group: int) -> Codebook:
        """The levels, and the step of one unit of them at a multiplier of 1."""
        return Codebook.make(group, self.bits, self.grid)

    def kind(self, k: int) -> tuple[int, str, int, int]:
        """All that constants of weights with k channels depend on: bits, grid, sub and group."""
        return self.bits, self.grid or "", self.sub or 0, self.group_of(k)

    def signs(self, group: int, device: torch.device | str = "cpu") -> Tensor:
        """The signs of the rotation, the same for all groups and layers: float32 [group]."""
        return random_signs(group, 0, 0, SignKind.WEIGHTS).to(device)

    def levels(self, group: int, device: torch.device | str = "cpu") -> Tensor | None:
        """The `levels` argument of the ops: int8 [2^bits], or None for the uniform grid."""
        return self.codebook(group).levels_tensor(device)

    def steps(self, group: int, device: torch.device | str = "cpu") -> Tensor:
        """The `steps` argument of weight_encode: float32 [S]."""
        book = self.codebook(group)
        if not self.sub:
            return book.steps_tensor(_SEARCH, device)
        steps = [book.step / _MIDDLE_MULTIPLIER * ratio for ratio in _SUB_SEARCH]
        return torch.tensor(steps, dtype=torch.float32, device=device)


def encode_weight(w: Tensor, format: WeightFormat, channel_scale: Tensor | None = None) -> Tensor:
    """Quantises the weight of a linear layer.

    Args:
        w: [n, k] (outputs, inputs), float32, float16 or bfloat16; k is a multiple of 64.
        format: how it is stored.
        channel_scale: [k], positive, any floating dtype: input channels are multiplied with these
            before they are coded. Whoever multiplies activations with the weight divides them by
            these first. Large scales keep errors small in channels where activations are large.

    Returns:
        uint8 [ceil(n / 16), k / group, block_bytes] on w's device.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, scales that are not positive and finite, or a weight that holds a
            NaN or an infinity, becomes infinite by its scales, or is too large for scales in
            float16, which are enough for a standard deviation of 6,000 with the uniform grid of 4
            bits and of 40,000 otherwise. This waits for a GPU.
    """
    _checks.check_dtype("w", w, _checks.FLOATS)
    _checks.check_shape("w", w, (None, None))
    w = w.detach()
    if w.stride(-1) != 1:
        w = w.contiguous()
    group, device = format.group_of(w.shape[1]), w.device
    if channel_scale is not None:
        channel_scale = checked_channel_scale(channel_scale, w.shape[1]).to(device)
    scaled = w if channel_scale is None else w.float() * channel_scale
    greatest = _greatest(scaled)
    if not math.isfinite(greatest):
        cause = "" if channel_scale is None else ", or becomes infinite by its channel_scale"
        raise ValueError(f"the weight holds a NaN or an infinity{cause}")
    constants = format.signs(group, device), format.levels(group, device)
    steps, sub = format.steps(group, device), format.sub or 0
    packed = weight_encode(w, *constants, steps, format.bits, sub, channel_scale)
    if greatest > _LARGE and _scales_are_limited(packed, w.shape[0], group, format.bits, sub):
        raise ValueError(
            f"the weight holds numbers up to {greatest:.3g}, too large for scales in float16: "
            "divide it by a constant, and multiply what comes out with it"
        )
    return packed


def _greatest(x: Tensor) -> float:
    """The largest absolute value, NaN if there is one, without a copy of x."""
    if x.numel() == 0:
        return 0.0
    least, most = torch.stack(x.aminmax()).tolist()
    return math.nan if math.isnan(most) else max(abs(least), abs(most))


_LARGE = 4096.0
"""Weights up to here never need scales that float16 does not have."""


def _scales_are_limited(packed: Tensor, n: int, group: int, bits: int, sub: int) -> bool:
    """Whether an encoder has limited a scale to the greatest number of float16."""
    scales = weight_unpack(packed, n, group, bits, sub)[1]
    return bool((scales == torch.finfo(torch.float16).max).any())


def decode_weight(
    packed: Tensor,
    format: WeightFormat,
    n: int,
    channel_inverse: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight that encode_weight stored.

    Args:
        packed: uint8 [ceil(n / 16), k / group, block_bytes].
        format: as given to encode_weight; its group must be given where encode_weight took 64
            channels although k is a multiple of 128, as in a slice.
        n: rows of the weight.
        channel_inverse: float32 [k]: 1 / channel_scale.
        dtype: of the result: float32, float16 or bfloat16.

    Returns:
        [n, k] of this dtype.

    Raises:
        TypeError: another dtype.
        ValueError: another shape.
    """
    _checks.check_dtype("packed", packed, (torch.uint8,))
    _checks.check_shape("packed", packed, (None, None, None))
    group = packed_group(packed, format)
    constants = format.signs(group, packed.device), format.levels(group, packed.device)
    return weight_decode(
        packed, *constants, n, format.bits, format.sub or 0, dtype, channel_inverse
    )


def packed_group(packed: Tensor, format: WeightFormat) -> int:
    """The group that the bytes of a block say, for blocks of different groups differ in size.

    Raises:
        ValueError: no group of this format has blocks of so many bytes.
    """
    groups = WEIGHT_GROUPS if format.group is None else (format.group,)
    sizes = {replace(format, group=g).block(g).block_bytes: g for g in groups}
    if packed.shape[2] not in sizes:
        raise ValueError(
            f"packed has blocks of {packed.shape[2]} bytes, expected "
            f"{' or '.join(map(str, sizes))} for {format}"
        )
    return sizes[packed.shape[2]]


def checked_channel_scale(scale: Tensor, k: int) -> Tensor:
    """Scales of input channels as the ops take them: float32 [k], contiguous.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, or scales that are not positive and finite.
    """
    _checks.check_dtype("channel_scale", scale, (*_checks.FLOATS, torch.float64))
    _checks.check_shape("channel_scale", scale, (k,))
    scale = scale.detach().float().contiguous()
    if not (torch.isfinite(scale) & torch.isfinite(1 / scale) & (scale > 0)).all():
        raise ValueError("channel_scale must be positive and finite, and so must be its inverse")
    return scale


class Constants(NamedTuple):
    """What the ops of a packed weight take beside it, the same for all weights of a kind."""

    signs: Tensor
    levels: Tensor | None
    bits: int
    sub: int


class SharedConstants:
    """Constants by kind: format, group and device.

    Layers share them, because before every step of a compiled model torch looks at all tensors
    that its layers hold, a microsecond at each. Kinds are attributes, because a trace sees those
    that are made while it runs; it would read a dictionary once.
    """

    def find(self, kind: str) -> Constants | None:
        """Those of a kind, if somebody has made them."""
        return self.__dict__.get(kind)


CONSTANTS = SharedConstants()


def share_constants(bits: int, grid: str, sub: int, group: int, device: str) -> str:
    """Makes the constants of a kind of weights, if nobody has yet; returns the kind.

    In a trace it is called while tracing, and not in the graph.
    """
    kind = f"{bits} {grid} {sub} {group} {device}"
    made = torch.empty(0)
    if isinstance(made, FakeTensor):  # nobody else can use what is made here
        kind += f" of mode {id(made.fake_mode)}"
    if not hasattr(CONSTANTS, kind):
        form = WeightFormat(bits, grid, sub, group)
        with lasting():
            signs, levels = form.signs(group, device), form.levels(group, device)
        vars(CONSTANTS).setdefault(kind, Constants(signs, levels, bits, sub))
    return kind


# What torch.compiler.assume_constant_result does, which imports the compiler for half a second.
share_constants._dynamo_marked_constant = True  # type: ignore[attr-defined]


class PackedLinear(nn.Module):
    """A linear layer whose weight is packed: y = x W^T + bias, without gradients.

    Attributes:
        in_features, out_features: as of nn.Linear.
        format: how the weight is stored; its group is set.
        weight: uint8 [ceil(out_features / 16), in_features / group, block_bytes], a parameter.
        rows_here: the rows of weight: out_features, but for a layer that processes share.
        channel_inverse: float32 [in_features], a parameter, or None: activations are multiplied
            with these first. It stays float32 when the module is converted to another dtype.
        bias: [out_features] of the model's dtype, a parameter, or None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        format: WeightFormat,
        bias: bool = False,
        channel_inverse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """An empty layer, whose parameters are loaded later.

        Args:
            in_features: a multiple of 64.
            out_features: 1 and more.
            format: how the weight is stored.
            bias, channel_inverse: whether there is one.
            device: of the parameters; "meta" for those that are loaded later.
            dtype: of the bias.

        Raises:
            ValueError: in_features that the format does not have.
        """
        super().__init__()
        group = format.group_of(in_features)
        _checks.check_positive(out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.rows_here = out_features
        self.format = replace(format, group=group)
        shape = self.format.block(in_features).packed_shape(out_features, in_features)
        self.weight = _frozen(torch.empty(shape, dtype=torch.uint8, device=device))
        self.channel_inverse: nn.Parameter | None
        self.register_parameter("channel_inverse", None)
        if channel_inverse:
            of_channels = torch.empty(in_features, dtype=torch.float32, device=device)
            self.channel_inverse = _frozen(of_channels)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None)
        if bias:
            self.bias = _frozen(torch.empty(out_features, dtype=dtype, device=device))
        self._form, self._kind = self.format.kind(in_features), ""
        # A weight on the meta device is most likely replaced before the first call.
        if self.weight.device.type != "meta":
            self.place_constants()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._parameters.get("weight") is not None:
            self.place_constants()  # another process has its own

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, format: WeightFormat, channel_scale: Tensor | None = None
    ) -> PackedLinear:
        """The packed form of a linear layer, on its device.

        Args:
            linear: its weight is encoded, its bias is copied.
            format: how the weight is stored.
            channel_scale: as of encode_weight.

        Raises:
            TypeError: not an nn.Linear.
            ValueError: as encode_weight.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be an nn.Linear, got {type(linear).__name__}")
        packed = encode_weight(linear.weight, format, channel_scale)
        n, k = linear.weight.shape
        layer = cls(k, n, format, device="meta")
        layer.weight = _frozen(packed)
        if channel_scale is not None:
            scale = checked_channel_scale(channel_scale, k).to(packed.device)
            layer.channel_inverse = _frozen(1 / scale)
        if linear.bias is not None:
            layer.bias = _frozen(linear.bias.detach().clone())
        layer.train(linear.training)
        layer.place_constants()
        return layer

    def place_constants(self) -> None:
        """Puts the signs and levels on the weight's device.

        The constructor does so, and so do `to`, `cuda` and the like. Call it after the weight has
        been replaced by one on another device; else the first `forward` does.
        """
        self._form = self.format.kind(self.in_features)
        self._kind = share_constants(*self._form, str(self.weight.device))

    def _constants_are_here(self) -> bool:
        here = CONSTANTS.find(self._kind)
        return here is not None and here.signs.device == self.weight.device

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        # a parameter that is converted gets other data, so what it has now is kept
        before = None if self.channel_inverse is None else self.channel_inverse.detach()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self.channel_inverse
        if before is not None and after is not None and after.dtype != torch.float32:
            self.channel_inverse = _frozen(before.to(after.device))
        if not self._constants_are_here():
            self.place_constants()
        return self

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], of the input's dtype; see linear_packed, whose
        x it is.

        Raises:
            TypeError: x has another dtype than float32, float16 or bfloat16.
            ValueError: x has another last dimension.
            RuntimeError: x is differentiated, on another device, or of another dtype than bias.
        """
        # A step calls this for every layer, and without a graph the host is what it waits for. So
        # nothing is asked first that the op asks again, and parameters are taken from their
        # dictionary, which self.weight would find after searching in others.
        own, x = self._parameters, input
        try:
            kind = self._kind
            if torch.compiler.is_dynamo_compiling():  # a trace cannot take the way through _mended
                kind = share_constants(*self._form, str(self.weight.device))
            if x.stride(-1) != 1:
                x = x.contiguous()
            signs, levels, bits, sub = getattr(CONSTANTS, kind)
            return _linear_packed(
                x,
                own["weight"],
                signs,
                levels,
                self.rows_here,
                bits,
                sub,
                own["channel_inverse"],
                own["bias"],
            )
        except (RuntimeError, TypeError, AttributeError, IndexError, KeyError) as error:
            return self._mended(x, error)

    def _mended(self, x: Tensor, error: Exception) -> Tensor:
        """What to do about an error of a call: find what it needs, or say what is wrong with x."""
        own: dict[str, Any] = self._parameters
        if "weight" not in own and getattr(self, "_is_replica", False):
            # nn.DataParallel makes replicas for one call, with attributes in place of parameters
            own |= {name: getattr(self, name) for name in ("weight", "channel_inverse", "bias")}
            return self.forward(x)
        if not self._constants_are_here():
            self.place_constants()
            return self.forward(x)
        _checks.check_dtype("x", x, _checks.FLOATS)
        channels = self.weight.shape[1] * self.format.group_of(self.in_features)
        if x.shape[-1:] != (channels,):
            raise ValueError(f"x has shape {list(x.shape)}, expected [..., {channels}]")
        raise named_error(error) from None

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight: [out_features, in_features] of this dtype."""
        return decode_weight(
            self.weight, self.format, self.out_features, self.channel_inverse, dtype
        )

    def rows(self, start: int, stop: int) -> PackedLinear:
        """The layer of outputs start .. stop - 1, with their bias: a slice of the same bytes.

        Args:
            start: a multiple of 16.
            stop: a multiple of 16, or out_features.

        Raises:
            ValueError: another start or stop.
        """
        _check_slice("rows", start, stop, self.out_features, WEIGHT_ROWS)
        part = self._part(self.in_features, stop - start)
        part.weight = _frozen(self.weight[start // WEIGHT_ROWS : -(-stop // WEIGHT_ROWS)].clone())
        if self.channel_inverse is not None:
            part.channel_inverse = _frozen(self.channel_inverse.clone())
        if self.bias is not None:
            part.bias = _frozen(self.bias[start:stop].clone())
        part.place_constants()
        return part

    def columns(self, start: int, stop: int) -> PackedLinear:
        """The layer of inputs start .. stop - 1: a slice of the same bytes.

        It has no bias, which belongs to the sum of all parts.

        Args:
            start, stop: multiples of the group.

        Raises:
            ValueError: another start or stop.
        """
        group = self.format.group_of(self.in_features)
        _check_slice("columns", start, stop, self.in_features, group)
        part = self._part(stop - start, self.out_features)
        part.weight = _frozen(self.weight[:, start // group : stop // group].contiguous().clone())
        if self.channel_inverse is not None:
            part.channel_inverse = _frozen(self.channel_inverse[start:stop].clone())
        part.place_constants()
        return part

    def _part(self, in_features: int, out_features: int) -> PackedLinear:
        return PackedLinear(in_features, out_features, self.format, device="meta")

    def extra_repr(self) -> str:
        f = self.format
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, bits={f.bits}, grid={f.grid!r}, sub={f.sub}, "
            f"group={f.group}, channel_inverse={self.channel_inverse is not None}"
        )


@lasting()
def _frozen(t: Tensor) -> nn.Parameter:
    return nn.Parameter(t.clone() if t.is_inference() else t, requires_grad=False)


def _check_slice(name: str, start: int, stop: int, size: int, unit: int) -> None:
    fits = start % unit == 0 and (stop % unit == 0 or (name == "rows" and stop == size))
    if not (0 <= start < stop <= size and fits):
        raise ValueError(
            f"{name} {start} to {stop} are no slice of {size}: supported are multiples of {unit}"
        )
