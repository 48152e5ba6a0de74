"""Good calls of linear, and what spoils them."""

import torch

import torch_turboquant as tt
from tests.bad_arguments.common import (
    DTYPE,
    ONE_DEVICE,
    STRIDE,
    Bad,
    column,
    elsewhere,
    floats,
    gaps,
)

WEIGHTS = tt.WeightFormat(4)
WEIGHT_SIGNS, WEIGHT_LEVELS = WEIGHTS.signs(128), WEIGHTS.levels(128)
N, K = 20, 256
WEIGHT_ENCODE = {
    "w": floats(N, K),
    "signs": WEIGHT_SIGNS,
    "levels": WEIGHT_LEVELS,
    "steps": WEIGHTS.steps(128),
    "bits": 4,
    "sub": 32,
    "channel_scale": floats(K).abs() + 1,
}
WEIGHT_CODES_BAD = [
    Bad({"bits": 5}, ValueError, "bits is 5, supported for weights: 4, 8"),
    Bad({"sub": 16}, ValueError, "sub is 16, supported at 4 bits: 0, 32"),
    Bad({"sub": -1}, ValueError, "sub is -1, supported at 4 bits: 0, 32"),
    Bad({"bits": 8}, ValueError, "sub is 32, supported at 8 bits: 0"),
]
WEIGHT_LEVELS_BAD = [
    *WEIGHT_CODES_BAD,
    Bad({"signs": WEIGHT_SIGNS[:32]}, ValueError, "signs has 32 channels, supported: 64 or 128"),
    Bad({"signs": WEIGHT_SIGNS.double()}, TypeError, "signs has dtype float64, supported: float32"),
    Bad({"signs": gaps(WEIGHT_SIGNS)}, ValueError, "signs must be contiguous"),
    Bad({"signs": 2 * WEIGHT_SIGNS}, RuntimeError, "signs must be +1 or -1"),
    Bad({"signs": elsewhere(128)}, ValueError, ONE_DEVICE),
    Bad({"levels": WEIGHT_LEVELS[:8]}, ValueError, "levels has shape [8], expected [16]"),
    Bad({"levels": WEIGHT_LEVELS.flip(0)}, RuntimeError, "levels must increase and be symmetric"),
]
WEIGHT_ENCODE_BAD = [
    *WEIGHT_LEVELS_BAD,
    Bad({"w": floats(N, K).double()}, TypeError, f"w has {DTYPE}"),
    Bad({"w": gaps(floats(N, K))}, ValueError, f"w {STRIDE}"),
    Bad({"w": floats(K)}, ValueError, "w has shape [256], expected [any, any]"),
    Bad({"w": floats(N, 192)}, ValueError, "w has 192 channels, supported: multiples of the group"),
    Bad({"w": floats(N, 0)}, ValueError, "w has 0 channels, supported: multiples of the group"),
    Bad({"steps": torch.ones(65)}, ValueError, "steps has 65 candidates, supported: 1 to 64"),
    Bad({"steps": -torch.ones(1)}, RuntimeError, "steps must be positive, finite and increasing"),
    Bad({"channel_scale": floats(N)}, ValueError, "channel_scale has shape [20], expected [256]"),
    Bad({"channel_scale": floats(K).half()}, TypeError, "channel_scale has dtype float16"),
    Bad({"channel_scale": elsewhere(K)}, ValueError, ONE_DEVICE),
]
_weight = tt.weight_encode(**WEIGHT_ENCODE)
WEIGHT_UNPACK = {"packed": _weight, "n": N, "group": 128, "bits": 4, "sub": 32}
PACKED_WEIGHT_BAD = [
    Bad({"packed": _weight.int()}, TypeError, "packed has dtype int32, supported: uint8"),
    Bad({"packed": _weight[0]}, ValueError, "packed has shape [2, 1088], expected"),
    Bad(
        {"packed": _weight[..., :1056].contiguous()},
        ValueError,
        "packed has shape [2, 2, 1056], expected [any, any, 1088]",
    ),
    Bad({"packed": _weight[:, :1]}, ValueError, "packed must be contiguous"),
    Bad({"packed": _weight[:, :0]}, ValueError, "packed has 0 groups of channels, supported: 1 to"),
    Bad({"n": 16}, ValueError, "packed has 2 tiles of 16 rows, but n is 16, which takes 1"),
    Bad({"n": 33}, ValueError, "packed has 2 tiles of 16 rows, but n is 33, which takes 3"),
    Bad({"n": -1}, ValueError, "the weight has -1 rows, supported: 0 to"),
    Bad({"n": 2**63 - 1}, ValueError, "rows, supported: 0 to 2147483648"),
]
WEIGHT_UNPACK_BAD = [
    *WEIGHT_CODES_BAD,
    *PACKED_WEIGHT_BAD,
    Bad({"group": 32}, ValueError, "group is 32, supported for weights: 64, 128"),
]
_codes, _scales, _multipliers = tt.weight_unpack(**WEIGHT_UNPACK)
WEIGHT_PACK = {"codes": _codes, "scale": _scales, "multipliers": _multipliers, "bits": 4}
WEIGHT_PACK_BAD = [
    Bad({"bits": 5}, ValueError, "bits is 5, supported for weights: 4, 8"),
    Bad({"bits": 8}, ValueError, "sub is 32, supported at 8 bits: 0"),
    Bad({"codes": _codes.int()}, TypeError, "codes has dtype int32, supported: uint8"),
    Bad({"codes": column(_codes)}, ValueError, "codes must be contiguous"),
    Bad({"codes": _codes + 1}, RuntimeError, "codes holds values of 16 or more, which do not fit"),
    Bad({"scale": _scales.float()}, TypeError, "scale has dtype float32, supported: float16"),
    Bad({"scale": _scales[:4]}, ValueError, "scale has shape [4, 2], expected [20, any]"),
    Bad(
        {"scale": _scales[:, :1].contiguous()},
        ValueError,
        "codes has shape [20, 256] and scale [20, 1], supported: a scale for every 64 or every 128",
    ),
    Bad(
        {"multipliers": _multipliers[:, :4].contiguous()},
        ValueError,
        "multipliers has shape [20, 4], expected [20, 8]",
    ),
    Bad({"multipliers": _multipliers + 16}, RuntimeError, "multipliers holds values of 16 or more"),
    Bad({"multipliers": _multipliers.int()}, TypeError, "multipliers has dtype int32"),
]
WEIGHT_DECODE = {
    "packed": _weight,
    "signs": WEIGHT_SIGNS,
    "levels": WEIGHT_LEVELS,
    "n": N,
    "bits": 4,
    "sub": 32,
    "dtype": torch.bfloat16,
    "channel_inverse": floats(K),
}
INVERSE_BAD = [
    Bad({"channel_inverse": floats(N)}, ValueError, "channel_inverse has shape [20], expected"),
    Bad({"channel_inverse": floats(K).half()}, TypeError, "channel_inverse has dtype float16"),
    Bad({"channel_inverse": gaps(floats(K))}, ValueError, "channel_inverse must be contiguous"),
]
WEIGHT_DECODE_BAD = [
    *WEIGHT_LEVELS_BAD,
    *PACKED_WEIGHT_BAD,
    *INVERSE_BAD,
    Bad({"dtype": torch.float64}, TypeError, "dtype is", "dtype is float64, supported: float32"),
]
LINEAR_PACKED = {
    "x": floats(3, K),
    "packed": _weight,
    "signs": WEIGHT_SIGNS,
    "levels": WEIGHT_LEVELS,
    "n": N,
    "bits": 4,
    "sub": 32,
    "channel_inverse": floats(K),
    "bias": floats(N),
}
LINEAR_PACKED_BAD = [
    *WEIGHT_LEVELS_BAD,
    *PACKED_WEIGHT_BAD,
    *INVERSE_BAD,
    Bad({"x": floats(3, K).double()}, TypeError, f"x has {DTYPE}"),
    Bad({"x": gaps(floats(3, K))}, ValueError, f"x {STRIDE}"),
    Bad({"x": torch.tensor(1.0)}, ValueError, "x has shape []"),
    Bad({"x": floats(3, 128)}, ValueError, "x has shape [3, 128], expected [..., 256] for the 2"),
    Bad({"x": elsewhere(3, K)}, ValueError, ONE_DEVICE),
    Bad({"packed": elsewhere(2, 2, 1088, dtype=torch.uint8)}, ValueError, ONE_DEVICE),
    Bad({"bias": floats(K)}, ValueError, "bias has shape [256], expected [20]"),
    Bad({"bias": floats(N).half()}, TypeError, "bias has dtype float16, supported: float32"),
]
LINEAR_EXPERTS = {
    "x": floats(3, K),
    "packed": torch.stack([_weight, _weight]),
    "experts": torch.tensor([[0, 1], [1, 0], [1, 1]]),
    "signs": WEIGHT_SIGNS,
    "levels": WEIGHT_LEVELS,
    "n": N,
    "bits": 4,
    "sub": 32,
    "bias": floats(2, N),
}
_experts = LINEAR_EXPERTS["experts"]
LINEAR_EXPERTS_BAD = [
    *WEIGHT_LEVELS_BAD,
    Bad({"packed": _weight}, ValueError, "packed has shape [2, 2, 1088], expected [any, any, any"),
    Bad({"packed": LINEAR_EXPERTS["packed"][:0]}, ValueError, "packed has no experts"),
    Bad({"n": 16}, ValueError, "packed has 2 tiles of 16 rows, but n is 16, which takes 1"),
    Bad({"n": 2**63 - 1}, ValueError, "rows, supported: 0 to 2147483648"),
    Bad({"x": floats(3, K).double()}, TypeError, f"x has {DTYPE}"),
    Bad({"x": gaps(floats(3, K))}, ValueError, f"x {STRIDE}"),
    Bad({"x": floats(3, 1, K)}, ValueError, "x has shape [3, 1, 256], expected"),
    Bad({"x": floats(3, 128)}, ValueError, "x has shape [3, 128], expected [any, 256] for the 2"),
    Bad({"x": elsewhere(3, K)}, ValueError, ONE_DEVICE),
    Bad({"experts": _experts.int()}, TypeError, "experts has dtype int32, supported: int64"),
    Bad({"experts": _experts[:2]}, ValueError, "experts has shape [2, 2], expected [3, any]"),
    Bad({"experts": column(_experts)}, ValueError, "experts must be contiguous"),
    Bad({"bias": floats(N)}, ValueError, "bias has shape [20], expected [2, 20]"),
    Bad({"bias": floats(2, N).half()}, TypeError, "bias has dtype float16, supported: float32"),
]
