"""Good calls of qjl and score, and what spoils them."""

import torch

import torch_turboquant as tt
from tests.bad_arguments.codec import LEVELS_BAD
from tests.bad_arguments.common import (
    DTYPE,
    LEVELS,
    ONE_DEVICE,
    SIGNS,
    STEPS,
    STRIDE,
    Bad,
    D,
    column,
    elsewhere,
    floats,
    gaps,
)

DENSE = tt.gaussian_projection(24, D, 0)
PROJECTION_BAD = [
    Bad({"projection": DENSE[:20]}, ValueError, "projection has shape [20, 64]", "has 20 rows"),
    Bad({"projection": DENSE[:, :48]}, ValueError, "projection has shape [24, 48]"),
    Bad({"projection": DENSE[None]}, ValueError, "projection has shape [1, 24, 64]"),
    Bad({"projection": SIGNS[:32]}, ValueError, "projection has shape [32]"),
    Bad({"projection": DENSE.half()}, TypeError, "projection has dtype float16"),
    Bad({"projection": gaps(DENSE)}, ValueError, "projection must be contiguous"),
    Bad({"projection": elsewhere(24, D)}, ValueError, ONE_DEVICE),
]
QJL_SKETCH = {"residual": floats(2, 5, D), "projection": DENSE}
QJL_SKETCH_BAD = [
    *PROJECTION_BAD,
    Bad({"residual": floats(5, D).double()}, TypeError, f"residual has {DTYPE}"),
    Bad({"residual": gaps(floats(5, D))}, ValueError, f"residual {STRIDE}"),
    Bad({"residual": floats(5, 44)}, ValueError, "of residual is 44", "is 44, supported"),
    Bad(
        {"residual": floats(5, 20), "projection": torch.ones(20)},
        ValueError,
        "projection has shape [20]",
        "projection has 20 rows, supported: multiples of 8",
    ),
]
_bits, _norm = tt.qjl_sketch(floats(2, 5, D), DENSE)
QJL_SCORE = {"q": floats(2, 3, D), "sign_bits": _bits, "norm": _norm, "projection": DENSE}
QJL_SCORE_BAD = [
    *PROJECTION_BAD,
    Bad({"q": floats(2, 3, D).double()}, TypeError, f"q has {DTYPE}"),
    Bad({"q": gaps(floats(2, 3, D))}, ValueError, f"q {STRIDE}"),
    Bad({"q": floats(D)}, ValueError, "q has shape [64]"),
    Bad({"q": floats(3, 3, D)}, ValueError, "sign_bits has shape [2, 5, 3]", "sign_bits [2, 5, 3]"),
    Bad({"q": floats(3, D)}, ValueError, "sign_bits has shape [2, 5, 3]", "sign_bits [2, 5, 3]"),
    Bad({"sign_bits": _bits[..., :2]}, ValueError, "sign_bits", "sign_bits"),
    Bad({"sign_bits": _bits.int()}, TypeError, "sign_bits has dtype int32, supported: uint8"),
    Bad({"sign_bits": column(_bits)}, ValueError, "sign_bits must be contiguous"),
    Bad({"norm": _norm.half()}, TypeError, "norm has dtype float16, supported: float32"),
    Bad({"norm": _norm[:, :4].contiguous()}, ValueError, "norm has shape [2, 4], expected"),
    Bad({"norm": gaps(_norm)}, ValueError, "norm must be contiguous"),
]

_keys, _key_scale = tt.encode(floats(2, 5, D), SIGNS, LEVELS, STEPS, 4)
SCORE = {
    "q": floats(2, 3, D),
    "packed": _keys,
    "scale": _key_scale,
    "signs": SIGNS,
    "levels": LEVELS,
    "bits": 4,
    "center": floats(D),
    "sign_bits": _bits,
    "residual_norm": _norm,
    "projection": DENSE,
}
TOGETHER = "sign_bits, residual_norm and projection come together or not at all"
SCORE_BAD = [
    *LEVELS_BAD,
    *PROJECTION_BAD,
    Bad({"q": floats(2, 3, D).double()}, TypeError, f"q has {DTYPE}"),
    Bad({"q": gaps(floats(2, 3, D))}, ValueError, f"q {STRIDE}"),
    Bad({"q": floats(D)}, ValueError, "q has shape [64]"),
    Bad({"q": floats(3, 3, D)}, ValueError, "packed has shape [2, 5, 32]", "packed [2, 5, 32]"),
    Bad({"q": floats(2, 3, 32)}, ValueError, "has shape [2, 5, 32]", "q has shape [2, 3, 32]"),
    Bad({"packed": _keys[..., :30].contiguous()}, ValueError, "packed has shape [2, 5, 30]"),
    Bad({"packed": column(_keys)}, ValueError, "packed must be contiguous"),
    Bad({"packed": _keys.int()}, TypeError, "packed has dtype int32, supported: uint8"),
    Bad({"scale": _key_scale[:1]}, ValueError, "scale has shape [1, 5], expected"),
    Bad({"scale": _key_scale.float()}, TypeError, "scale has dtype float32, supported: float16"),
    Bad({"sign_bits": None}, ValueError, TOGETHER),
    Bad({"residual_norm": None}, ValueError, TOGETHER),
    Bad({"projection": None}, ValueError, TOGETHER),
    Bad({"residual_norm": _norm[:, :4].contiguous()}, ValueError, "norm has shape [2, 4]"),
    Bad({"sign_bits": _bits[:, :4].contiguous()}, ValueError, "sign_bits has shape [2, 4, 3]"),
]
