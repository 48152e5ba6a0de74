"""Good calls of hadamard, pack, codec and group, and what spoils them."""

import torch

import torch_turboquant as tt
from tests.bad_arguments.common import (
    DIMENSION,
    DTYPE,
    LEVELS,
    ONE_DEVICE,
    SIGNS,
    SKIP,
    STEPS,
    STRIDE,
    Bad,
    D,
    column,
    elsewhere,
    floats,
    gaps,
)

HADAMARD = {"x": floats(3, D), "signs": SIGNS, "inverse": False}
HADAMARD_BAD = [
    Bad({"x": floats(3, D).double()}, TypeError, f"x has {DTYPE}"),
    Bad({"x": [1.0] * D}, TypeError, "x must be a tensor, got list", SKIP),
    Bad({"x": gaps(floats(3, D))}, ValueError, f"x {STRIDE}"),
    Bad({"x": torch.tensor(1.0)}, ValueError, "x has shape []"),
    Bad({"x": floats(2, 22)}, ValueError, f"the last dimension of x is 22, {DIMENSION}"),
    Bad({"x": floats(2, 9)}, ValueError, "the last dimension of x is 9"),
    Bad({"x": floats(1, 8192)}, ValueError, "the last dimension of x is 8192"),
    Bad({"x": floats(2, 0)}, ValueError, "the last dimension of x is 0"),
    Bad({"signs": SIGNS[:32]}, ValueError, "signs has shape [32], expected [64]"),
    Bad({"signs": SIGNS[None]}, ValueError, "signs has shape [1, 64], expected [64]"),
    Bad({"signs": SIGNS.half()}, TypeError, "signs has dtype float16, supported: float32"),
    Bad({"signs": gaps(SIGNS)}, ValueError, "signs must be contiguous"),
    Bad({"signs": elsewhere(D)}, ValueError, ONE_DEVICE),
]

PACK = {"codes": torch.zeros(3, 10, dtype=torch.uint8), "bits": 3}
PACK_BAD = [
    Bad({"bits": 0}, ValueError, "bits is 0, supported: 1", "bits is 0, supported: 1 to 8"),
    Bad({"bits": 9}, ValueError, "bits is 9, supported: 1", "bits is 9, supported: 1 to 8"),
    Bad({"codes": torch.zeros(3, 10, dtype=torch.int32)}, TypeError, "codes has dtype int32"),
    Bad({"codes": "codes"}, TypeError, "codes must be a tensor, got str", SKIP),
    Bad({"codes": torch.tensor(1, dtype=torch.uint8)}, ValueError, "codes has shape []"),
    Bad({"codes": torch.zeros(3, 0, dtype=torch.uint8)}, ValueError, "codes has shape [3, 0]"),
    Bad({"codes": column(PACK["codes"])}, ValueError, "codes must be contiguous"),
    Bad(
        {"codes": torch.full((3, 10), 8, dtype=torch.uint8)},
        RuntimeError,
        "codes holds values of 8 or more, which do not fit 3 bits",
    ),
]

UNPACK = {"packed": torch.zeros(3, 4, dtype=torch.uint8), "bits": 3, "d": 10}
UNPACK_BAD = [
    Bad({"bits": 0}, ValueError, "bits is 0, supported: 1", "bits is 0, supported: 1 to 8"),
    Bad({"d": 0}, ValueError, "d is 0, supported: 1 and more", "d is 0, supported: 1 to"),
    Bad({"d": 11}, ValueError, "packed has shape [3, 4], expected [..., 5]"),
    Bad({"d": 8}, ValueError, "packed has shape [3, 4], expected [..., 3]"),
    Bad({"packed": torch.tensor(1, dtype=torch.uint8)}, ValueError, "packed has shape []"),
    Bad({"packed": torch.zeros(3, 4, dtype=torch.int8)}, TypeError, "packed has dtype int8"),
    Bad({"packed": column(UNPACK["packed"])}, ValueError, "packed must be contiguous"),
]

ENCODE = {
    "x": floats(3, D),
    "signs": SIGNS,
    "levels": LEVELS,
    "steps": STEPS,
    "bits": 4,
    "scale_mode": "mse",
    "center": floats(D),
}
LEVELS_BAD = [
    Bad({"levels": LEVELS.flip(0)}, RuntimeError, "levels must increase and be symmetric"),
    Bad(
        {"levels": LEVELS + LEVELS.eq(LEVELS[9])},
        RuntimeError,
        "levels must increase and be symmetric",
    ),
    Bad({"levels": LEVELS[:8]}, ValueError, "levels has shape [8], expected [16]"),
    Bad({"levels": LEVELS.float()}, TypeError, "levels has dtype float32, supported: int8"),
    Bad({"levels": gaps(LEVELS)}, ValueError, "levels must be contiguous"),
    Bad({"bits": 6}, ValueError, "bits is 6, supported: 1, 2, 3, 4, 5, 8"),
    Bad({"bits": 0}, ValueError, "bits is 0, supported"),
    Bad({"signs": SIGNS.double()}, TypeError, "signs has dtype float64, supported: float32"),
    Bad({"center": floats(32)}, ValueError, "center has shape [32], expected [64]"),
    Bad({"center": floats(2, D)}, ValueError, "center has shape [2, 64], expected [3, 64]"),
    Bad({"center": floats(D).half()}, TypeError, "center has dtype float16, supported: float32"),
    Bad({"center": gaps(floats(D))}, ValueError, "center must be contiguous"),
    Bad({"center": elsewhere(D)}, ValueError, ONE_DEVICE),
]
ENCODE_BAD = [
    *LEVELS_BAD,
    Bad({"x": floats(3, D).long()}, TypeError, "x has dtype int64, supported: float32"),
    Bad({"x": gaps(floats(3, D))}, ValueError, f"x {STRIDE}"),
    Bad({"x": floats(3, 44)}, ValueError, f"the last dimension of x is 44, {DIMENSION}"),
    Bad({"signs": SIGNS[:32]}, ValueError, "signs has shape [32], expected [64]"),
    Bad({"levels": None, "bits": 1}, ValueError, "levels is needed at 1 bit"),
    Bad({"bits": 8}, ValueError, "levels must be absent at 8 bits"),
    Bad({"steps": STEPS.double()}, TypeError, "steps has dtype float64, supported: float32"),
    Bad({"steps": STEPS[:0]}, ValueError, "steps has 0 candidates, supported: 1 to 64"),
    Bad({"steps": torch.ones(65)}, ValueError, "steps has 65 candidates, supported: 1 to 64"),
    Bad({"steps": STEPS.flip(0)}, RuntimeError, "steps must be positive, finite and increasing"),
    Bad({"steps": -STEPS.flip(0)}, RuntimeError, "steps must be positive, finite and increasing"),
    Bad(
        {"steps": STEPS * torch.nan}, RuntimeError, "steps must be positive, finite and increasing"
    ),
    Bad({"steps": STEPS[None]}, ValueError, "steps has shape [1, 4], expected [any]"),
    Bad(
        {"scale_mode": "l2"},
        ValueError,
        "scale_mode is 'l2', supported: norm, preserve, mse, unbiased",
        SKIP,
    ),
]

_packed, _scale = tt.encode(floats(3, D), SIGNS, LEVELS, STEPS, 4)
DECODE = {
    "packed": _packed,
    "scale": _scale,
    "signs": SIGNS,
    "levels": LEVELS,
    "bits": 4,
    "center": floats(D),
    "dtype": torch.float32,
}
DECODE_BAD = [
    *LEVELS_BAD,
    Bad({"packed": _packed.int()}, TypeError, "packed has dtype int32, supported: uint8"),
    Bad(
        {"packed": _packed[:, :30].contiguous()},
        ValueError,
        "packed has shape [3, 30], expected [..., 32]",
    ),
    Bad({"packed": column(_packed)}, ValueError, "packed must be contiguous"),
    Bad({"scale": _scale.float()}, TypeError, "scale has dtype float32, supported: float16"),
    Bad({"scale": _scale[:2]}, ValueError, "scale has shape [2], expected"),
    Bad({"scale": gaps(_scale)}, ValueError, "scale must be contiguous"),
    Bad({"signs": SIGNS[:44]}, ValueError, "is 44, supported: m * 2^k"),
    Bad({"dtype": torch.float64}, TypeError, "dtype is", "dtype is float64, supported: float32"),
    Bad({"scale": elsewhere(3, dtype=torch.half)}, ValueError, ONE_DEVICE),
]

GROUP_ENCODE = {"x": floats(3, D), "group": 32, "bits": 4}
GROUP_BAD = [
    Bad({"group": 16}, ValueError, "group is 16, supported: 32, 64"),
    Bad({"bits": 3}, ValueError, "bits is 3, supported: 2, 4"),
    Bad({"bits": 2**32 + 2}, ValueError, "bits is 4294967298, supported: 2, 4"),
]
GROUP_ENCODE_BAD = [
    *GROUP_BAD,
    Bad({"x": floats(3, D).double()}, TypeError, f"x has {DTYPE}"),
    Bad({"x": gaps(floats(3, D))}, ValueError, f"x {STRIDE}"),
    Bad({"x": floats(3, 80)}, ValueError, "is 80, supported: multiples of the group of 32"),
    Bad({"x": floats(3, 32), "group": 64}, ValueError, "is 32, supported: multiples of the group"),
]
_groups = tt.group_encode(floats(3, D), 32, 4)
GROUP_DECODE = {
    **dict(zip(("packed", "scale", "zero"), _groups, strict=True)),
    "group": 32,
    "bits": 4,
    "d": D,
    "dtype": torch.float32,
}
GROUP_DECODE_BAD = [
    *GROUP_BAD,
    Bad({"d": 80}, ValueError, "is 80, supported: multiples of the group of 32"),
    Bad({"d": 96}, ValueError, "packed has shape [3, 32], expected [..., 48]"),
    Bad({"d": 0}, ValueError, "is 0, supported: multiples of the group of 32"),
    Bad({"packed": _groups[0].int()}, TypeError, "packed has dtype int32"),
    Bad({"packed": column(_groups[0])}, ValueError, "packed must be contiguous"),
    Bad({"scale": _groups[1].float()}, TypeError, "scale has dtype float32, supported: float16"),
    Bad({"zero": _groups[2].float()}, TypeError, "zero has dtype float32, supported: float16"),
    Bad({"zero": _groups[2][:, :1].contiguous()}, ValueError, "zero has shape [3, 1], expected"),
    Bad({"scale": column(_groups[1])}, ValueError, "scale must be contiguous"),
    Bad({"dtype": torch.int8}, TypeError, "dtype is"),
]
