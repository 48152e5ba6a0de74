"""Weights of linear layers in blocks of codes, and products straight from them.

A weight [n, k] (outputs, inputs) is stored in blocks of 16 rows and a group of 64 or 128 channels.
The channels of a row in a block are rotated, coded at 4 or 8 bits and share a float16 scale; with
`sub` = 32, every 32 of them share a multiplier as well. All groups take the same rotation, so that
a slice of a weight by whole tiles of rows or whole groups of channels is a slice of its bytes.
Codes, scales and multipliers are the same bytes on every device (docs/format.md, section 13).

linear_packed rotates the activations of each group as the weight was, makes signed bytes of them
with a unit per token and group, and sums products of integers; CUDA multiplies many tokens in other
ways. linear_experts does the same with one of several weights, for each token those that a router
has chosen. weight_pack and weight_unpack are for those who choose codes themselves, such as
rounding by second moments of activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant._autograd import named_error
from torch_turboquant.format import (
    MAX_WEIGHT_GROUPS,
    MAX_WEIGHT_ROWS,
    SUB_CHANNELS,
    WEIGHT_GROUPS,
    WEIGHT_ROWS,
    WeightBlock,
)
from torch_turboquant.ops import _cache_checks as checks

_linear_packed = torch.ops.turboquant.linear_packed.default
_linear_experts = torch.ops.turboquant.linear_experts.default

# ---- checks

# What an op raises if it refuses a call. The ops check every argument before they touch memory, so
# products call them first. Checks in Python would take 6 us of each call, and ten times that after
# a model's weights have passed through the caches. They run only if the op refuses, and say what is
# wrong as other wrappers do.
_REFUSALS = (RuntimeError, TypeError)


def _check_signs(signs: Tensor, device: torch.device) -> int:
    """float32 [group]; returns group."""
    _checks.check_constant("signs", signs, device, torch.float32, (None,))
    if signs.shape[0] not in WEIGHT_GROUPS:
        raise ValueError(
            f"signs has {signs.shape[0]} channels, supported: 64 or 128, the group of the weight"
        )
    return signs.shape[0]


def _check_size(n: int, k: int, group: int, name: str) -> None:
    if not 0 <= n <= MAX_WEIGHT_ROWS:
        raise ValueError(f"{name} has {n} rows, supported: 0 to {MAX_WEIGHT_ROWS}")
    if k < group or k % group or k // group > MAX_WEIGHT_GROUPS:
        raise ValueError(
            f"{name} has {k} channels, supported: multiples of the group of {group} up to "
            f"{MAX_WEIGHT_GROUPS * group}"
        )


def _check_packed(
    packed: Tensor, device: torch.device, n: int, block: WeightBlock, several: bool = False
) -> tuple[int, int]:
    """uint8 [tiles, groups, block_bytes] of a weight of n rows; returns (n, k).

    several: [experts, ...].
    """
    shape = (None,) * (2 + several) + (block.block_bytes,)
    _checks.check_constant("packed", packed, device, torch.uint8, shape)
    tiles, groups, _ = packed.shape[-3:]
    if not 1 <= groups <= MAX_WEIGHT_GROUPS:
        raise ValueError(
            f"packed has {groups} groups of channels, supported: 1 to {MAX_WEIGHT_GROUPS}"
        )
    _check_size(n, groups * block.group, block.group, "the weight")
    if tiles != -(-n // WEIGHT_ROWS):
        raise ValueError(
            f"packed has {tiles} tiles of {WEIGHT_ROWS} rows, but n is {n}, which takes "
            f"{-(-n // WEIGHT_ROWS)}"
        )
    return n, groups * block.group


def _check_channels(name: str, t: Tensor | None, device: torch.device, k: int) -> None:
    if t is not None:
        _checks.check_constant(name, t, device, torch.float32, (k,))


# ---- functions


def weight_encode(
    w: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    steps: Tensor,
    bits: int,
    sub: int,
    channel_scale: Tensor | None = None,
) -> Tensor:
    """Quantises a weight.

    WeightFormat (weights.py) has the constants: `encode_weight` calls this with them.

    Args:
        w: [n, k], float32, float16 or bfloat16, stride 1 in k; k is a multiple of the group.
        signs: float32 [group] of +1 and -1; group = 64 or 128 channels share a scale.
        levels: int8 [16], increasing and symmetric; None for the uniform grid, as at 8 bits.
        steps: float32 [S], increasing, S = 1 to 64: candidate sizes of one unit of levels, relative
            to the standard deviation of a rotated channel. With multipliers, they are the size at a
            multiplier of 1.
        bits: 4 or 8.
        sub: 32 gives every 32 channels a multiplier (4 bits); 0 does not.
        channel_scale: float32 [k]: channels of w are multiplied with these first.

    Returns:
        packed: uint8 [ceil(n / 16), k / group, block_bytes]. The rest of the last 16 rows is zero.
        A row with a NaN or an infinity in a group has a NaN as the scale of this group.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride, device, bits or sub.
    """
    _check_encode(w, signs, levels, steps, bits, sub, channel_scale)
    return torch.ops.turboquant.weight_encode.default(
        w, signs, levels, steps, bits, sub, channel_scale
    )


def _check_encode(
    w: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    steps: Tensor,
    bits: int,
    sub: int,
    channel_scale: Tensor | None,
) -> WeightBlock:
    _checks.check_dtype("w", w, _checks.FLOATS)
    device = w.device
    _checks.check_shape("w", w, (None, None))
    _checks.check_unit_stride("w", w)
    block = WeightBlock(_check_signs(signs, device), bits, sub)
    _check_size(w.shape[0], w.shape[1], block.group, "w")
    _checks.check_levels(levels, device, bits)
    _checks.check_steps(steps, device)
    _check_channels("channel_scale", channel_scale, device, w.shape[1])
    return block


def weight_pack(codes: Tensor, scale: Tensor, multipliers: Tensor | None, bits: int) -> Tensor:
    """Puts codes that somebody else has chosen into blocks.

    Args:
        codes: uint8 [n, k], below 2^bits; at 8 bits a signed byte.
        scale: float16 [n, k / group]; the group is 64 or 128.
        multipliers: uint8 [n, k / 32], 0 to 15: the multiplier of 32 channels is
            (12 + this) / 16. None: there are none.
        bits: 4 or 8.

    Returns:
        packed: uint8 [ceil(n / 16), k / group, block_bytes].

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride, device or bits.
        RuntimeError: codes or multipliers out of range (checked on the CPU; on CUDA their low bits
            are taken).
    """
    _check_pack(codes, scale, multipliers, bits)
    return torch.ops.turboquant.weight_pack.default(codes, scale, multipliers, bits)


def _check_pack(codes: Tensor, scale: Tensor, multipliers: Tensor | None, bits: int) -> WeightBlock:
    _checks.check_dtype("codes", codes, (torch.uint8,))
    device = codes.device
    _checks.check_constant("codes", codes, device, torch.uint8, (None, None))
    n, k = codes.shape
    _checks.check_constant("scale", scale, device, torch.float16, (n, None))
    groups = scale.shape[1]
    if groups < 1 or k % groups or k // groups not in WEIGHT_GROUPS:
        raise ValueError(
            f"codes has shape {list(codes.shape)} and scale {list(scale.shape)}, supported: a "
            "scale for every 64 or every 128 codes of a row"
        )
    block = WeightBlock(k // groups, bits, 0 if multipliers is None else SUB_CHANNELS)
    _check_size(n, k, block.group, "codes")
    if multipliers is not None:
        shape = (n, k // SUB_CHANNELS)
        _checks.check_constant("multipliers", multipliers, device, torch.uint8, shape)
    return block


def weight_unpack(
    packed: Tensor, n: int, group: int, bits: int, sub: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The codes, scales and multipliers of a packed weight: the inverse of weight_pack.

    Args:
        packed: uint8 [ceil(n / 16), k / group, block_bytes], contiguous.
        n: rows of the weight.
        group, bits, sub: as it was encoded.

    Returns:
        codes: uint8 [n, k].
        scale: float16 [n, k / group].
        multipliers: uint8 [n, k / 32]; [n, 0] without multipliers.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride, bits or sub.
    """
    _check_unpack(packed, n, group, bits, sub)
    return torch.ops.turboquant.weight_unpack.default(packed, n, group, bits, sub)


def _check_unpack(packed: Tensor, n: int, group: int, bits: int, sub: int) -> WeightBlock:
    block = WeightBlock(group, bits, sub)
    _checks.check_dtype("packed", packed, (torch.uint8,))
    _check_packed(packed, packed.device, n, block)
    return block


def weight_decode(
    packed: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    n: int,
    bits: int,
    sub: int,
    dtype: torch.dtype = torch.float32,
    channel_inverse: Tensor | None = None,
) -> Tensor:
    """Reconstructs the weight that weight_encode stored.

    Args:
        packed: uint8 [ceil(n / 16), k / group, block_bytes], contiguous.
        signs, levels, bits, sub: as given to weight_encode.
        n: rows of the weight.
        dtype: of the result: float32, float16 or bfloat16.
        channel_inverse: float32 [k]: channels of the result are multiplied with these; the inverse
            of channel_scale gives the weight as it was.

    Returns:
        [n, k] of this dtype.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride, device, bits or sub.
    """
    _check_decode(packed, signs, levels, n, bits, sub, dtype, channel_inverse)
    return torch.ops.turboquant.weight_decode.default(
        packed, signs, levels, n, bits, sub, dtype, channel_inverse
    )


def _check_decode(
    packed: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    n: int,
    bits: int,
    sub: int,
    dtype: torch.dtype,
    channel_inverse: Tensor | None,
) -> tuple[int, int]:
    _checks.check_dtype("packed", packed, (torch.uint8,))
    _checks.check_output_dtype(dtype)
    device = packed.device
    block = WeightBlock(_check_signs(signs, device), bits, sub)
    shape = _check_packed(packed, device, n, block)
    _checks.check_levels(levels, device, bits)
    _check_channels("channel_inverse", channel_inverse, device, shape[1])
    return shape


def linear_packed(
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
    """A linear layer: x times the transpose of the packed weight, plus the bias.

    Activations get signed bytes after their rotation: with the unit of a token and group, the
    largest channel is 127. On the CPU the result is the same bits whatever the level of
    instructions, the number of threads and the other tokens of the call. CUDA does the same with
    few tokens (32, or 16 of float32; up to 96 of a small weight, and 64 on GPUs of another compute
    capability than 9.0), but adds in another order, so that results differ by roundings of float32.
    With more tokens it rounds activations to float16 after their rotation (those of bfloat16 to 8
    significant bits), each token with a power of two of its own, or multiplies decoded rows of the
    weight, and activations keep their dtype.
    `kernel_choice("linear_packed", tokens=..., n=..., k=..., dtype=...)` tells which ("codes",
    "tiles" or "decoded").

    On CUDA a call that is captured in a graph may begin to read `packed` before the kernel that
    precedes it has ended. So that kernel may not write `packed`; earlier ones may.

    Args:
        x: [..., k], float32, float16 or bfloat16, stride 1 in k.
        packed: uint8 [ceil(n / 16), k / group, block_bytes], contiguous.
        signs, levels, bits, sub: as given to weight_encode.
        n: rows of the weight: outputs of the layer.
        channel_inverse: float32 [k]: channels of x are multiplied with these first; the inverse of
            the channel_scale that the weight was encoded with.
        bias: [n] of x's dtype.

    Returns:
        y: [..., n] of x's dtype. All of a token is NaN if a channel of its x is NaN or infinite
        (infinite or NaN, if rows of the weight are decoded and a channel is infinite); all of an
        output is NaN if its row of the weight had a NaN or an infinity.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride, device, bits or sub.
        RuntimeError: x or bias is differentiated; the op has no derivative.
    """
    try:
        return _linear_packed(x, packed, signs, levels, n, bits, sub, channel_inverse, bias)
    except _REFUSALS as error:
        refusal = error
    _check_linear(x, packed, signs, levels, n, bits, sub, channel_inverse, bias)
    raise named_error(refusal) from None


def _check_linear(
    x: Tensor,
    packed: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    n: int,
    bits: int,
    sub: int,
    channel_inverse: Tensor | None,
    bias: Tensor | None,
) -> None:
    k = _checks.check_vectors("x", x)
    device = x.device
    block = WeightBlock(_check_signs(signs, device), bits, sub)
    _, expected = _check_packed(packed, device, n, block)
    if k != expected:
        raise ValueError(
            f"x has shape {list(x.shape)}, expected [..., {expected}] for the "
            f"{packed.shape[1]} groups of the weight"
        )
    _checks.check_levels(levels, device, bits)
    _check_channels("channel_inverse", channel_inverse, device, expected)
    if bias is not None:
        _checks.check_constant("bias", bias, device, x.dtype, (n,))


def linear_experts(
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
    """Linear layers of experts: each token is multiplied with the weights that are chosen for it.

    What a token and an expert give is what linear_packed gives with the weight of this expert, on
    the CPU bit by bit. CUDA rounds activations to signed bytes, as linear_packed does with few
    tokens, or on a GPU of compute capability 9.0 and with more than 12 tokens for each expert on
    average to float16, as it does with more (8 tokens of float32, or of more than some 10,000
    channels). It does not wait for the device: graphs are replayed with whatever experts are chosen
    then. Only other GPUs with more than 64 tokens for each expert, or with so many channels that
    they refuse a graph (see RuntimeError), and float32 with more than 256 tokens wait to know the
    chosen experts, and call linear_packed for one after the other; in a graph they do not.
    `kernel_choice("linear_experts", tokens=..., choices=..., experts=..., k=...)` tells which
    ("codes", "tiles" or "one_by_one").

    Args:
        x: [tokens, k], float32, float16 or bfloat16, stride 1 in k.
        packed: uint8 [experts, ceil(n / 16), k / group, block_bytes], contiguous: the packed weight
            of each expert.
        experts: int64 [tokens, choices], contiguous: the experts of each token. A number that no
            expert has gives zeros, as for a token whose expert is somewhere else.
        signs, levels, bits, sub: as given to weight_encode.
        n: rows of each weight: outputs of the layer.
        bias: [experts, n] of x's dtype.

    Returns:
        y: [tokens, choices, n] of x's dtype. NaN as of linear_packed.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride, device, bits or sub.
        RuntimeError: x or bias is differentiated; the op has no derivative. On CUDA: more than
            4,096 experts; or in a graph on a GPU of another compute capability than 9.0 so many
            channels that shared memory has no room for those of 3 tokens (more than 2,048 on a T4,
            11,008 on an L4, 27,392 on an A100).
    """
    try:
        return _linear_experts(x, packed, experts, signs, levels, n, bits, sub, bias)
    except _REFUSALS as error:
        refusal = error
    _check_experts(x, packed, experts, signs, levels, n, bits, sub, bias)
    raise named_error(refusal) from None


def _check_experts(
    x: Tensor,
    packed: Tensor,
    experts: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    n: int,
    bits: int,
    sub: int,
    bias: Tensor | None,
) -> None:
    k = _checks.check_vectors("x", x, 2)
    device = x.device
    block = WeightBlock(_check_signs(signs, device), bits, sub)
    _, expected = _check_packed(packed, device, n, block, several=True)
    if k != expected:
        raise ValueError(
            f"x has shape {list(x.shape)}, expected [any, {expected}] for the "
            f"{packed.shape[2]} groups of the weight"
        )
    if packed.shape[0] < 1:
        raise ValueError("packed has no experts")
    _checks.check_constant("experts", experts, device, torch.int64, (x.shape[0], None))
    _checks.check_levels(levels, device, bits)
    if bias is not None:
        _checks.check_constant("bias", bias, device, x.dtype, (packed.shape[0], n))


# ---- autocast

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU).add(
    torch._C.DispatchKey.AutocastCUDA
)


def _autocast(op: Any, device: str) -> Callable[..., Tensor]:
    """The op under torch.autocast, for tensors on a type of device.

    Activations and bias take the dtype of autocast, as those of nn.Linear do. What belongs to the
    packed weight stays as it is.
    """
    names = [argument.name for argument in op._schema.arguments]
    activations = names.index("x"), names.index("bias")

    def kernel(*given: Any) -> Tensor:
        dtype, args = torch.get_autocast_dtype(device), list(given)
        for i in activations:
            if i < len(args) and isinstance(args[i], Tensor) and args[i].dtype in _checks.FLOATS:
                args[i] = args[i].to(dtype)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            result: Tensor = op(*args)
        return result

    return kernel


_library = torch.library.Library("turboquant", "IMPL")
for _op in (_linear_packed, _linear_experts):
    for _device in ("cpu", "cuda"):
        _name = _op._schema.name.removeprefix("turboquant::")
        _library.impl(_name, _autocast(_op, _device), f"Autocast{_device.upper()}")


# ---- fakes


@torch.library.register_fake("turboquant::weight_encode")
def _weight_encode_fake(
    w: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    steps: Tensor,
    bits: int,
    sub: int,
    channel_scale: Tensor | None = None,
) -> Tensor:
    with _checks.of_fake():
        _check_encode(w, signs, levels, steps, bits, sub, channel_scale)
    block = WeightBlock(signs.shape[0], bits, sub)
    return w.new_empty(block.packed_shape(w.shape[0], w.shape[1]), dtype=torch.uint8)


@torch.library.register_fake("turboquant::weight_pack")
def _weight_pack_fake(
    codes: Tensor, scale: Tensor, multipliers: Tensor | None, bits: int
) -> Tensor:
    with _checks.of_fake():
        block = _check_pack(codes, scale, multipliers, bits)
    return codes.new_empty(block.packed_shape(codes.shape[0], codes.shape[1]))


@torch.library.register_fake("turboquant::weight_unpack")
def _weight_unpack_fake(
    packed: Tensor, n: int, group: int, bits: int, sub: int
) -> tuple[Tensor, Tensor, Tensor]:
    with _checks.of_fake():
        block = _check_unpack(packed, n, group, bits, sub)
    groups = packed.shape[1]
    return (
        packed.new_empty((n, groups * group)),
        packed.new_empty((n, groups), dtype=torch.float16),
        packed.new_empty((n, groups * block.subs)),
    )


@torch.library.register_fake("turboquant::weight_decode")
def _weight_decode_fake(
    packed: Tensor,
    signs: Tensor,
    levels: Tensor | None,
    n: int,
    bits: int,
    sub: int,
    dtype: torch.dtype,
    channel_inverse: Tensor | None = None,
) -> Tensor:
    with _checks.of_fake():
        _check_decode(packed, signs, levels, n, bits, sub, dtype, channel_inverse)
    return packed.new_empty((n, packed.shape[1] * signs.shape[0]), dtype=dtype)


@torch.library.register_fake("turboquant::linear_packed")
def _linear_packed_fake(*given: Any, **named: Any) -> Tensor:
    a = checks.raw_arguments("linear_packed", given, named)
    with _checks.of_fake():
        _check_linear(**vars(a))
    return a.x.new_empty((*a.x.shape[:-1], a.n))


@torch.library.register_fake("turboquant::linear_experts")
def _linear_experts_fake(*given: Any, **named: Any) -> Tensor:
    a = checks.raw_arguments("linear_experts", given, named)
    with _checks.of_fake():
        _check_experts(**vars(a))
    return a.x.new_empty((a.x.shape[0], a.experts.shape[1], a.n))
