"""What tables of bad arguments are made of: changes of good calls, spoiled tensors, texts."""

from typing import NamedTuple

import torch

import torch_turboquant as tt
from tests.helpers import randn

SAME = object()
SKIP = object()
D = 64


class Bad(NamedTuple):
    """A change of a good call; `raw` is the raw op's text where it differs, or SKIP."""

    changes: dict
    error: type
    text: str
    raw: object = SAME


def floats(*shape):
    return randn(*shape, seed=sum(shape))


def elsewhere(*shape, dtype=torch.float32):
    """A tensor on another device, to which torch sends the whole call: its fake refuses it."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def gaps(t):
    """The same values with stride 2 in the last dimension."""
    return t.repeat_interleave(2, dim=-1)[..., ::2]


def column(t):
    """The same values, not contiguous, stride 1 in the last dimension."""
    return torch.cat([t, t], dim=-1)[..., : t.shape[-1]]


def heads_apart(t):
    """The same values, entries of the second dimension apart."""
    return torch.cat([t, t], dim=2)[:, :, : t.shape[2]]


DTYPE = "dtype float64, supported: float32, float16, bfloat16"
ONE_DEVICE = "all tensors of a call must be on one device"
STRIDE = "must have stride 1 in its last dimension"
DIMENSION = "supported: m * 2^k with m in {1, 3, 5, 7, 9} and k >= 1, up to 4096"
BOOK = tt.Codebook.make(D, 4)
SIGNS, LEVELS, STEPS = tt.random_signs(D, 0), BOOK.levels_tensor(), BOOK.steps_tensor(4)
