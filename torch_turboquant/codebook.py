"""Codebooks: the scalar quantisers of the coordinates of a rotated vector.

After a random rotation every coordinate t of sqrt(d) * x / |x| has the same known distribution
(paper, section 3.1): the marginal of a uniform point of the sphere,

    p(t) proportional to (1 - t^2 / d)^((d - 3) / 2)      on |t| < sqrt(d),

which has variance 1 and tends to the Gaussian as d grows. So one scalar quantiser, computed in
advance, serves every coordinate of every vector: Lloyd-Max for the least error (grid "lloyd"), or
evenly spaced levels that kernels expand without a table (grid "uniform").

All quantities are in units of sigma, the standard deviation of such a coordinate. Kernels get a
codebook as int8 levels L and one float step: a code stands for step * L sigma.

(paper = "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
arXiv:2504.19874.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

GRIDS = ("lloyd", "uniform")
MAX_BITS = 8

# ---------------------------------------------------------------- the marginal and its integrals


class _Marginal:
    """The density of one coordinate of sqrt(d) * (uniform unit vector), or of a Gaussian.

    Integrals substitute t = sqrt(d) sin(a), where the density is cos(a)^(d - 2). That is smooth up
    to both ends for every d >= 2, so Gauss-Legendre quadrature is exact to rounding. `reach` cuts
    the support where the remaining mass (below 1e-40) no longer changes a float64 sum.
    """

    _NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)

    def __init__(self, head_dim: float) -> None:
        self.d = head_dim
        self.reach = min(14.0, math.sqrt(head_dim))
        self._log_total = 0.0
        cells = np.linspace(0.0, self.reach, 9)
        self._log_total = math.log(2.0 * self.moments(cells[:-1], cells[1:])[0].sum())

    def density(self, t: np.ndarray) -> np.ndarray:
        """p(t), normalised."""
        if math.isinf(self.d):
            return np.exp(-0.5 * t * t - self._log_total)
        inside = 1.0 - np.minimum(t * t / self.d, 1.0)
        with np.errstate(divide="ignore"):  # for d = 2 the density is infinite at both ends
            return np.exp(0.5 * (self.d - 3.0) * np.log(inside) - self._log_total)

    def moments(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Integrals of p, t p and t^2 p over the cells [low, high]: float64 [3, cells]."""
        low = np.clip(low, -self.reach, self.reach)
        high = np.clip(high, -self.reach, self.reach)
        if math.isinf(self.d):
            t, width = self._nodes(low, high)
            mass = width * np.exp(-0.5 * t * t - self._log_total)
        else:
            root = math.sqrt(self.d)
            ends = [np.arcsin(np.clip(bound / root, -1.0, 1.0)) for bound in (low, high)]
            angle, width = self._nodes(*ends)
            t = root * np.sin(angle)
            # rounding alone makes cos negative, at the very end of the support
            mass = width * root * np.abs(np.cos(angle)) ** (self.d - 2.0)
            mass *= math.exp(-self._log_total)
        return np.stack([mass.sum(-1), (mass * t).sum(-1), (mass * t * t).sum(-1)])

    def _nodes(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        half = 0.5 * (high - low)[:, None]
        return 0.5 * (high + low)[:, None] + half * self._NODES, half * self._WEIGHTS


def _checked_dim(head_dim: float | None) -> float:
    if head_dim is None:
        return math.inf
    d = float(head_dim)
    if d == math.inf or (d >= 2 and d.is_integer()):
        return d
    raise ValueError(
        f"head_dim must be an integer of 2 or more, or None for the Gaussian limit, got {head_dim}"
    )


@lru_cache(maxsize=64)
def _marginal(head_dim: float) -> _Marginal:
    return _Marginal(head_dim)


# ---------------------------------------------------------------- Lloyd-Max


def lloyd_max(head_dim: float | None, bits: int) -> np.ndarray:
    """The scalar quantiser of least error for a coordinate of a randomly rotated vector.

    Args:
        head_dim: d >= 2; None or inf means the Gaussian limit.
        bits: 1 to 8.

    Returns:
        float64 [2**bits], ascending and exactly symmetric, in sigma units: every level is the
        centroid of its cell (to 1e-9 sigma or better) and every boundary is the midpoint of two
        levels (paper, section 3.1).

    Raises:
        ValueError: head_dim or bits outside these ranges.
    """
    if bits not in range(1, MAX_BITS + 1):
        raise ValueError(f"bits must be 1 to {MAX_BITS}, got {bits}")
    return _lloyd_max(_checked_dim(head_dim), int(bits)).copy()


@lru_cache(maxsize=512)
def _lloyd_max(d: float, bits: int) -> np.ndarray:
    """Solves "every level is the centroid of its cell" for the positive half by Newton's method.

    From the companded start it takes 3 to 8 iterations, where Lloyd's own method takes thousands at
    5 bits and more.
    """
    marginal = _marginal(d)
    levels = _companded_start(marginal, 2 ** (bits - 1))
    for _ in range(50):
        mass, first, bounds = _half_cells(marginal, levels)
        centroids = first / mass
        jacobian = _centroid_jacobian(marginal, levels, centroids, mass, bounds)
        step = np.linalg.solve(jacobian, levels - centroids)
        levels = levels - step
        if np.abs(step).max() < 1e-10:
            break
    else:
        raise ArithmeticError(f"Lloyd-Max did not converge for d = {d}, bits = {bits}")
    out = np.concatenate([-levels[::-1], levels])
    out.setflags(write=False)
    return out


def _companded_start(marginal: _Marginal, half: int) -> np.ndarray:
    """A first guess of the positive half of the levels: float64 [half].

    High-resolution theory (Panter and Dite) spaces levels by the cube root of the density.
    """
    edges = np.linspace(0.0, marginal.reach, 4001)
    middle = 0.5 * (edges[1:] + edges[:-1])
    spread = np.concatenate([[0.0], np.cumsum(marginal.density(middle) ** (1.0 / 3.0))])
    wanted = (np.arange(half) + 0.5) / half
    return np.interp(wanted, spread / spread[-1], edges)


def _half_cells(
    marginal: _Marginal, levels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    inner = 0.5 * (levels[1:] + levels[:-1])
    bounds = np.concatenate([[0.0], inner, [marginal.reach]])
    mass, first, _ = marginal.moments(bounds[:-1], bounds[1:])
    return mass, first, bounds


def _centroid_jacobian(
    marginal: _Marginal,
    levels: np.ndarray,
    centroids: np.ndarray,
    mass: np.ndarray,
    bounds: np.ndarray,
) -> np.ndarray:
    """Derivatives of (level - centroid) by the levels: float64 [n, n].

    Moving an inner boundary moves the centroids of both cells beside it. The derivative of a
    centroid by its upper boundary b is p(b) (b - centroid) / mass, by its lower boundary
    p(b) (centroid - b) / mass. A boundary moves by half of what either neighbouring level moves;
    the boundaries at 0 and at the end of the support stay.
    """
    n = len(levels)
    jacobian = np.eye(n)
    if n == 1:
        return jacobian
    inner = bounds[1:-1]
    density = marginal.density(inner)
    up = 0.5 * density * (inner - centroids[:-1]) / mass[:-1]
    down = 0.5 * density * (centroids[1:] - inner) / mass[1:]
    i = np.arange(n - 1)
    jacobian[i, i] -= up
    jacobian[i, i + 1] -= up
    jacobian[i + 1, i + 1] -= down
    jacobian[i + 1, i] -= down
    return jacobian


def distortion(levels: Sequence[float] | np.ndarray, head_dim: float | None) -> float:
    """Expected squared error per coordinate of nearest-level quantisation.

    Args:
        levels: any number of levels, ascending, in sigma units.
        head_dim: d >= 2; None or inf means the Gaussian limit.

    Returns:
        The error in units of sigma^2. For a unit vector of dimension d this is the expected total
        squared error (the paper's D_mse, Theorem 1) when its exact norm is the scale.

    Raises:
        ValueError: levels in another order, or head_dim outside its range.
    """
    levels = np.asarray(levels, dtype=np.float64)
    if levels.ndim != 1 or len(levels) < 1 or not (np.diff(levels) > 0).all():
        raise ValueError("levels must be one ascending sequence")
    marginal = _marginal(_checked_dim(head_dim))
    inner = 0.5 * (levels[1:] + levels[:-1])
    bounds = np.concatenate([[-marginal.reach], inner, [marginal.reach]])
    mass, first, second = marginal.moments(bounds[:-1], bounds[1:])
    return float((second - 2.0 * levels * first + levels**2 * mass).sum())


def uniform_step(head_dim: float | None, bits: int) -> float:
    """The step of the evenly spaced grid with the least expected squared error.

    With 2 to 5 bits the levels are step * (2 c - (2**bits - 1)), so neighbours are 2 * step apart.
    With 8 bits they are step * L for L = -127 .. 127, so neighbours are one step apart.

    Returns:
        The step in sigma units.

    Raises:
        ValueError: the uniform grid does not exist for these bits, or head_dim is outside its
            range.
    """
    return _uniform_step(_checked_dim(head_dim), _checked_uniform_bits(bits))


def _checked_uniform_bits(bits: int) -> int:
    if bits not in (2, 3, 4, 5, 8):
        raise ValueError(f"the uniform grid supports 2, 3, 4, 5 and 8 bits, got {bits}")
    return int(bits)


def _uniform_codes(bits: int) -> np.ndarray:
    """The integers L of the uniform grid, in the order of the code."""
    return np.arange(-127, 128) if bits == 8 else 2 * np.arange(2**bits) - (2**bits - 1)


@lru_cache(maxsize=512)
def _uniform_step(d: float, bits: int) -> float:
    """Finds the zero of d error / d step = -2 sum of E[L (t - step L)] by bisection."""
    marginal = _marginal(d)
    codes = _uniform_codes(bits)
    codes = codes[codes > 0].astype(np.float64)  # the negative half is its mirror image
    inner = 0.5 * (codes[1:] + codes[:-1])
    lowest = 0.5 if bits == 8 else 0.0

    def descent(step: float) -> float:
        bounds = np.concatenate([[lowest * step], inner * step, [marginal.reach]])
        mass, first, _ = marginal.moments(bounds[:-1], bounds[1:])
        return float((codes * (first - step * codes * mass)).sum())

    low, high = 1e-3 * marginal.reach / codes[-1], marginal.reach / codes[-1] * 2.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if descent(middle) > 0 else (low, middle)
    return 0.5 * (low + high)


# ---------------------------------------------------------------- what the kernels get

# Ends of the step search in units of the nominal step. They minimise the measured error of random
# directions over d = 64, 128 and 256 with 8 candidates, and are within 0.5% of the best for each d
# alone (small d prefers a wider range). Finer codebooks prefer smaller steps, since their grid
# reaches beyond the largest coordinate of most vectors. 1 bit has no step to search.
_SEARCH_RANGES = {
    ("lloyd", 2): (0.88, 1.22),
    ("lloyd", 3): (0.84, 1.26),
    ("lloyd", 4): (0.80, 1.20),
    ("lloyd", 5): (0.78, 1.12),
    ("uniform", 2): (0.88, 1.18),
    ("uniform", 3): (0.86, 1.22),
    ("uniform", 4): (0.82, 1.22),
    ("uniform", 5): (0.78, 1.20),
    ("uniform", 8): (0.66, 1.10),
}


@dataclass(frozen=True)
class Codebook:
    """A codebook as the kernels get it: code c stands for step * L[c] sigma.

    `Codebook.make` and `Codebook.from_levels` build one.

    Attributes:
        head_dim: d, the dimension of the vectors that it is made for.
        bits: bits per code.
        grid: "lloyd" (int8 levels from a table) or "uniform" (L follows from the code).
        levels: the int8 levels L of a "lloyd" grid in the order of the code. None for the uniform
            grid, where L = 2 c - (2**bits - 1), and at 8 bits the signed code byte, -127 .. 127.
        step: the nominal step in sigma units.
    """

    head_dim: int
    bits: int
    grid: str
    levels: tuple[int, ...] | None
    step: float

    @classmethod
    def make(cls, head_dim: int, bits: int, grid: str | None = None) -> Codebook:
        """The best codebook of its kind for vectors of this dimension.

        Args:
            head_dim: d >= 2.
            bits: 1 to 5 for "lloyd"; 2 to 5 and 8 for "uniform".
            grid: "lloyd" (levels of Lloyd-Max, rounded to int8 with the largest at 127: the error
                grows by 0.3% at most up to 4 bits, by 2% at 5) or "uniform". None means "uniform"
                for 8 bits and "lloyd" for all others.

        Raises:
            ValueError: an unsupported grid, or bits that this grid does not have.
        """
        if grid is None:
            grid = "uniform" if bits == 8 else "lloyd"
        if grid not in GRIDS:
            raise ValueError(f"grid must be one of {GRIDS}, got {grid!r}")
        if grid == "uniform":
            return cls(head_dim, int(bits), grid, None, uniform_step(head_dim, bits))
        if bits not in range(1, 6):
            raise ValueError(f'grid "lloyd" supports 1 to 5 bits, got {bits}; 8 bits are "uniform"')
        return cls.from_levels(lloyd_max(head_dim, bits), head_dim)

    @classmethod
    def from_levels(
        cls, levels: torch.Tensor | np.ndarray | Sequence[float], head_dim: int
    ) -> Codebook:
        """A codebook from any levels, such as learned ones.

        Args:
            levels: 2, 4, 8, 16 or 32 finite levels in sigma units, strictly increasing and
                symmetric about zero to 1e-5 of the largest; they are made exactly symmetric.
            head_dim: the dimension of the vectors.

        Raises:
            ValueError: levels of another count, order or symmetry, or two that are so close that
                they become one when rounded to int8 (largest level 127).
        """
        _checked_dim(head_dim)
        if isinstance(levels, torch.Tensor):
            levels = levels.detach().cpu().double().numpy()
        given = np.asarray(levels, dtype=np.float64)
        if given.ndim != 1 or len(given) not in (2, 4, 8, 16, 32):
            raise ValueError(
                f"levels must be 2, 4, 8, 16 or 32 numbers in one row, got shape {given.shape}"
            )
        if not (np.isfinite(given).all() and (np.diff(given) > 0).all()):
            raise ValueError("levels must be finite and strictly increasing")
        asymmetry = float(np.abs(given + given[::-1]).max())
        if asymmetry > 1e-5 * np.abs(given).max():
            raise ValueError(
                "levels must be symmetric about zero (levels[i] = -levels[-1 - i]), "
                f"but the worst pair adds up to {asymmetry:.3g} sigma"
            )
        half = (0.5 * (given - given[::-1]))[len(given) // 2 :]
        step = float(half[-1]) / 127
        positive = np.rint(half / step).astype(int)
        if positive[0] < 1 or (np.diff(positive) < 1).any():
            raise ValueError(
                "levels must differ after rounding to int8 with the largest at 127, "
                f"got {positive.tolist()} for the positive half"
            )
        codes = np.concatenate([-positive[::-1], positive])
        bits = len(given).bit_length() - 1
        return cls(head_dim, bits, "lloyd", tuple(int(level) for level in codes), step)

    @property
    def values(self) -> np.ndarray:
        """The levels in sigma units, ascending: float64 [2**bits], or [255] for 8 bits."""
        codes = _uniform_codes(self.bits) if self.levels is None else np.array(self.levels)
        return self.step * codes.astype(np.float64)

    def candidate_steps(self, search: int = 1) -> tuple[float, ...]:
        """The steps an encoder tries for each vector: ascending float32 values, in sigma units.

        Args:
            search: 1 gives the nominal step (the paper). S > 1 gives S steps spread evenly over
                the range where the best step of a vector lies; the nominal one need not be among
                them. A 1-bit codebook has one step for every search, since no code depends on it.

        Raises:
            ValueError: search below 1.
        """
        if search < 1:
            raise ValueError(f"search must be 1 or more, got {search}")
        if search == 1 or self.bits == 1:
            return (float(np.float32(self.step)),)
        low, high = _SEARCH_RANGES[self.grid, self.bits]
        steps = (self.step * np.linspace(low, high, search)).astype(np.float32)
        return tuple(float(step) for step in steps)

    def levels_tensor(self, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """The `levels` argument of the ops: int8 [2**bits], or None for the uniform grid."""
        if self.levels is None:
            return None
        return torch.tensor(self.levels, dtype=torch.int8, device=device)

    def steps_tensor(self, search: int = 1, device: torch.device | str = "cpu") -> torch.Tensor:
        """The `steps` argument of the encoding ops: float32 [S], see `candidate_steps`."""
        return torch.tensor(self.candidate_steps(search), dtype=torch.float32, device=device)
