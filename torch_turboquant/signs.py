"""Random signs of the rotation, and the rotation itself as a float64 matrix.

The signs are never stored: they follow from (seed, layer, kind) by 64-bit integer arithmetic alone,
so every device, every process and every release generates the same ones. The generator is
splitmix64, evaluated at a counter:

    key    = mix64(mix64(mix64(seed) + layer) + kind)
    word w = mix64(key + (w + 1) * 0x9E3779B97F4A7C15)            (all modulo 2^64)
    channel c takes bit (c mod 64) of word c // 64: 0 is +1, 1 is -1

The rotation of a vector of d = m * 2^k channels (m = 1, 3, 5, 7 or 9) is

    y = (M_m kron H_n) (signs * x) / sqrt(n),    n = 2^k,

where H is the Walsh-Hadamard matrix over the n contiguous channels of a block, and M the
orthonormal m x m Hartley matrix across the blocks. Both are symmetric and their own inverses up to
scale, so the inverse rotation applies the same matrices and then the signs. It stands in for the
paper's random rotation matrix (Algorithm 1, line 2) at O(d log d) operations instead of O(d^2).
"""

from __future__ import annotations

import enum
import math

import numpy as np
import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ODD_FACTORS = (1, 3, 5, 7, 9)


class SignKind(enum.IntEnum):
    """The use of the signs. Each kind is an independent stream of the same seed and layer."""

    KEYS = 0
    VALUES = 1
    SKETCH = 2
    WEIGHTS = 3


def mix64(z: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, elementwise on uint64: a bijection that mixes every bit."""
    z = np.asarray(z, dtype=np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def random_words(count: int, seed: int, layer: int = 0, kind: int = SignKind.KEYS) -> np.ndarray:
    """The first words of the stream (seed, layer, kind): uint64 [count].

    Raises:
        ValueError: seed or layer no whole number of 0 .. 2^64 - 1, or an unknown kind.
    """
    from torch_turboquant._checks import check_whole  # not above: it needs this file

    check_whole(seed=seed, layer=layer)
    key = np.zeros(1, dtype=np.uint64)
    for name, part in (("seed", seed), ("layer", layer), ("kind", SignKind(kind))):
        if not 0 <= part <= _MASK:
            raise ValueError(f"{name} must be 0 to 2^64 - 1, got {part}")
        key = mix64(key + np.uint64(part))
    counter = np.arange(1, count + 1, dtype=np.uint64)
    return mix64(key + counter * np.uint64(_GOLDEN))


def random_signs(d: int, seed: int, layer: int = 0, kind: int = SignKind.KEYS) -> torch.Tensor:
    """The signs of one rotation: float32 [d] of +1 and -1, on the CPU.

    Args:
        d: number of channels.
        seed: 0 to 2^64 - 1.
        layer: index of the layer, 0 to 2^64 - 1; every layer has signs of its own.
        kind: SignKind.KEYS, VALUES, SKETCH (the projection of QJL) or WEIGHTS.

    Raises:
        ValueError: d below 1, seed or layer outside their range, or an unknown kind.
    """
    if d < 1:
        raise ValueError(f"d must be 1 or more, got {d}")
    d = int(d)  # NumPy's may have no sign
    words = random_words(-(-d // 64), seed, layer, kind)
    bits = (words[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    return torch.from_numpy(1.0 - 2.0 * bits.reshape(-1)[:d].astype(np.float32))


def gaussian_projection(m: int, d: int, seed: int, layer: int = 0) -> torch.Tensor:
    """The projection S of QJL (paper, Algorithm 2): m x d independent N(0, 1), float32 on the CPU.

    Words 2i and 2i + 1 of the stream SignKind.SKETCH give elements 2i and 2i + 1 of the matrix in
    row-major order, by the Box-Muller transform in float64.

    Raises:
        ValueError: m or d below 1, seed or layer outside 0 .. 2^64 - 1.
    """
    if m < 1 or d < 1:
        raise ValueError(f"a projection has at least one row and one column, got {m} x {d}")
    m, d = int(m), int(d)  # NumPy's overflow
    words = random_words(m * d + m * d % 2, seed, layer, SignKind.SKETCH)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # inside (0, 1)
    radius = np.sqrt(-2.0 * np.log(uniform[0::2]))
    angle = 2.0 * math.pi * uniform[1::2]
    normal = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).reshape(-1)
    return torch.from_numpy(normal[: m * d].reshape(m, d).astype(np.float32))


def split_dim(d: int) -> tuple[int, int]:
    """(m, n) with d = m * n, n a power of two and m one of 1, 3, 5, 7, 9.

    Raises:
        ValueError: d has another odd factor.
    """
    if d >= 1:
        n = d & -d
        if d // n in _ODD_FACTORS:
            return d // n, n
    raise ValueError(f"the rotation needs d = m * 2^k with m one of {_ODD_FACTORS}, got d = {d}")


def hartley_matrix(m: int) -> np.ndarray:
    """The orthonormal discrete Hartley transform: float64 [m, m], symmetric, its own inverse."""
    i = np.arange(m)
    # the angle is reduced in integers, exactly, before cos and sin round
    angle = (2.0 * math.pi / m) * ((i[:, None] * i[None, :]) % m)
    return (np.cos(angle) + np.sin(angle)) / math.sqrt(m)


def walsh_hadamard_matrix(n: int) -> np.ndarray:
    """The unnormalised Walsh-Hadamard matrix in natural order: float64 [n, n] of +1 and -1."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h


def rotation_matrix(d: int, signs: torch.Tensor | np.ndarray) -> np.ndarray:
    """The rotation as a matrix, y = R x: float64 [d, d], orthonormal.

    This is the slow and obvious form that fast transforms are tested against. R.T is the inverse.

    Args:
        d: m * 2^k with m one of 1, 3, 5, 7, 9.
        signs: [d] of +1 and -1.

    Raises:
        ValueError: another d, or signs of another shape.
    """
    m, n = split_dim(d)
    signs = np.asarray(signs, dtype=np.float64)
    if signs.shape != (d,):
        raise ValueError(f"signs must have shape [{d}], got {list(signs.shape)}")
    return np.kron(hartley_matrix(m), walsh_hadamard_matrix(n)) / math.sqrt(n) * signs


def rotation_tensor(signs: torch.Tensor) -> torch.Tensor:
    """rotation_matrix as a tensor on the device of the signs, float32 [d]: float64 [d, d]."""
    matrix = rotation_matrix(signs.shape[0], signs.cpu())
    return torch.from_numpy(matrix).to(signs.device)
