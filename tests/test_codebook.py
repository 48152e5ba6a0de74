"""Codebooks: independent quadrature, closed forms, published totals, a simulated step search."""

import math

import numpy as np
import pytest
import torch

from torch_turboquant.codebook import Codebook, distortion, lloyd_max, uniform_step

DIMS = (2, 3, 4, 16, 64, 80, 128, 256, 576, None)

# Expected total squared error of a unit vector, Lloyd-Max of the exact marginal, 1 to 5 bits.
TOTALS = {
    64: (0.35839, 0.11453, 0.03339, 0.00913, 0.00240),
    96: (0.36006, 0.11551, 0.03377, 0.00925, 0.00243),
    128: (0.36089, 0.11600, 0.03397, 0.00931, 0.00245),
    256: (0.36214, 0.11674, 0.03426, 0.00941, 0.00248),
    512: (0.36276, 0.11711, 0.03440, 0.00945, 0.00249),
    None: (0.36338, 0.11748, 0.03455, 0.00950, 0.00250),
}


class Grid:
    """Running integrals of p, t p and t^2 p by the midpoint rule over a million angles.

    t = sqrt(d) sin(angle); deliberately another method than the module's Gauss-Legendre cells.
    """

    def __init__(self, d: int | None, points: int = 1_000_000) -> None:
        end, root = (12.0, 1.0) if d is None else (0.5 * math.pi, math.sqrt(d))
        x = np.linspace(-end, end, points + 1)
        middle = 0.5 * (x[1:] + x[:-1])
        if d is None:
            t, weight = middle, np.exp(-0.5 * middle**2)
        else:
            t, weight = root * np.sin(middle), np.cos(middle) ** (d - 2)
        weight /= weight.sum()
        self.t = x if d is None else root * np.sin(x)
        self.integrals = [np.append(0.0, np.cumsum(weight * t**k)) for k in range(3)]

    def moments(self, levels: np.ndarray, cuts: np.ndarray | None = None) -> list[np.ndarray]:
        if cuts is None:
            cuts = 0.5 * (levels[1:] + levels[:-1])
        return [np.diff([0.0, *np.interp(cuts, self.t, f), f[-1]]) for f in self.integrals]

    def centroids(self, levels: np.ndarray) -> np.ndarray:
        mass, first, _ = self.moments(levels)
        return first / mass

    def error(self, levels: np.ndarray, cuts: np.ndarray | None = None) -> float:
        mass, first, second = self.moments(levels, cuts)
        return float((second - 2 * levels * first + levels**2 * mass).sum())


@pytest.mark.parametrize("d", DIMS)
def test_levels_are_centroids_by_quadrature(d):
    grid = Grid(d)
    assert grid.integrals[2][-1] == pytest.approx(1.0, abs=1e-9)  # sigma is the unit
    for bits in (1, 2, 3, 4, 5):
        levels = lloyd_max(d, bits)
        assert np.abs(grid.centroids(levels) - levels).max() < 1e-6
        assert distortion(levels, d) == pytest.approx(grid.error(levels), abs=1e-9)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_levels_are_symmetric_and_ascending(d, bits):
    levels = lloyd_max(d, bits)
    assert levels.dtype == np.float64 and levels.shape == (2**bits,)
    assert (levels == -levels[::-1]).all()
    assert (np.diff(levels) > 0).all()
    if d is not None:
        assert levels[-1] < math.sqrt(d)


@pytest.mark.parametrize("d", (4, 64, 128, None))
@pytest.mark.parametrize("bits", (2, 4, 5, 8))
def test_no_perturbation_of_the_levels_helps(d, bits):
    levels = lloyd_max(d, bits)
    best = distortion(levels, d)
    rng = np.random.default_rng(bits)
    for _ in range(20):
        move = rng.standard_normal(len(levels)) * 0.05 * np.diff(levels).min()
        assert distortion(levels + move, d) > best
    # a stationary point: no first-order change in any level
    for i in range(len(levels)):
        move = 1e-4 * (np.arange(len(levels)) == i)
        slope = (distortion(levels + move, d) - distortion(levels - move, d)) / 2e-4
        assert abs(slope) < 1e-8


def test_midpoints_are_the_boundaries():
    """Moving any single boundary off the midpoint of its levels, with the levels kept, costs."""
    grid = Grid(128)
    levels = lloyd_max(128, 4)
    middle = 0.5 * (levels[1:] + levels[:-1])
    best = grid.error(levels, middle)
    for i in range(len(middle)):
        for move in (-0.02, 0.02):
            assert grid.error(levels, middle + move * (np.arange(len(middle)) == i)) > best


def test_closed_forms():
    # d = 3: a coordinate of the sphere is uniform (Archimedes), so the levels are evenly spaced
    for bits in (1, 2, 5, 8):
        n = 2**bits
        even = math.sqrt(3.0) * (2.0 * np.arange(n) - (n - 1)) / n
        np.testing.assert_allclose(lloyd_max(3, bits), even, atol=1e-12)
        assert distortion(even, 3) == pytest.approx(1.0 / n**2, rel=1e-12)
    for bits in (2, 3, 4, 5):
        assert uniform_step(3, bits) == pytest.approx(math.sqrt(3.0) / 2**bits, rel=1e-7)
    # 1 bit: the level is E|t|
    assert lloyd_max(2, 1)[1] == pytest.approx(math.sqrt(8.0) / math.pi, abs=1e-12)
    assert lloyd_max(None, 1)[1] == pytest.approx(math.sqrt(2.0 / math.pi), abs=1e-12)
    for d in (5, 64, 128, 576):
        mean = math.sqrt(d / math.pi) * math.exp(math.lgamma(d / 2) - math.lgamma((d + 1) / 2))
        assert lloyd_max(d, 1)[1] == pytest.approx(mean, abs=1e-12)
        assert distortion(lloyd_max(d, 1), d) == pytest.approx(1.0 - mean**2, abs=1e-12)


def test_published_gaussian_levels():
    """Max, "Quantizing for minimum distortion" (1960), tables I: 2 and 3 bits."""
    np.testing.assert_allclose(lloyd_max(None, 2)[2:], [0.4528, 1.510], atol=5e-4)
    np.testing.assert_allclose(lloyd_max(None, 3)[4:], [0.2451, 0.7560, 1.344, 2.152], atol=5e-4)


@pytest.mark.parametrize("d", TOTALS)
def test_totals_to_the_printed_digits(d):
    found = [distortion(lloyd_max(d, bits), d) for bits in range(1, 6)]
    np.testing.assert_allclose(found, TOTALS[d], atol=5.1e-6, rtol=0)


def test_gaussian_uniform_totals_to_the_printed_digits():
    for bits, total in ((2, 0.11885), (3, 0.03744), (4, 0.011543)):
        levels = uniform_step(None, bits) * (2.0 * np.arange(2**bits) - (2**bits - 1))
        digits = 6 if bits == 4 else 5
        assert round(distortion(levels, None), digits) == total


def test_the_gaussian_is_the_limit():
    assert (lloyd_max(None, 4) == lloyd_max(math.inf, 4)).all()
    gaps = [
        np.abs(lloyd_max(d, 4) - lloyd_max(None, 4)).max() for d in (100, 1000, 10_000, 100_000)
    ]
    ratios = np.array(gaps[:-1]) / np.array(gaps[1:])
    np.testing.assert_allclose(ratios, 10.0, rtol=0.2)  # convergence like 1 / d


@pytest.mark.parametrize("bits", (2, 3, 4, 5, 8))
@pytest.mark.parametrize("d", (16, 64, 128, 576, None))
def test_uniform_step_is_the_minimum(d, bits):
    step = uniform_step(d, bits)
    codes = np.arange(-127, 128) if bits == 8 else 2 * np.arange(2**bits) - (2**bits - 1)
    best = distortion(step * codes, d)
    for factor in (0.98, 0.999, 1.001, 1.02):
        assert distortion(step * factor * codes, d) > best
    scan = min(distortion(step * f * codes, d) for f in np.linspace(0.3, 3.0, 55))
    assert best <= scan  # not only a local minimum


def test_distortion_counts_the_whole_line():
    assert distortion([0.0], 64) == pytest.approx(1.0, abs=1e-12)  # one level at 0: the variance
    assert distortion([-20.0, 0.0, 20.0], 64) == pytest.approx(1.0, abs=1e-12)
    assert distortion([1.0], None) == pytest.approx(2.0, abs=1e-12)


# ---------------------------------------------------------------- the form that kernels get


@pytest.mark.parametrize("d", (16, 64, 96, 128, 256, 576))
def test_int8_levels(d):
    for bits, loss in ((1, 1e-9), (2, 1e-4), (3, 2e-3), (4, 3e-3), (5, 2e-2)):
        book = Codebook.make(d, bits)
        assert (book.head_dim, book.bits, book.grid) == (d, bits, "lloyd")
        levels = np.array(book.levels)
        assert all(isinstance(level, int) for level in book.levels)
        assert len(levels) == 2**bits and levels[-1] == 127
        assert (levels == -levels[::-1]).all() and (np.diff(levels) > 0).all()
        assert (book.values == book.step * levels).all()
        exact = lloyd_max(d, bits)
        assert np.abs(book.values - exact).max() <= 0.5000001 * book.step
        assert 1.0 - 1e-9 <= distortion(book.values, d) / distortion(exact, d) <= 1.0 + loss


def test_uniform_codebooks():
    book = Codebook.make(128, 4, "uniform")
    assert book.levels is None and book.levels_tensor() is None
    assert book.step == uniform_step(128, 4)
    np.testing.assert_array_equal(book.values, book.step * np.arange(-15, 16, 2))
    eight = Codebook.make(128, 8)
    assert eight.grid == "uniform" and eight.levels is None
    np.testing.assert_array_equal(eight.values, eight.step * np.arange(-127, 128))


def test_tensors():
    book = Codebook.make(64, 3)
    levels, steps = book.levels_tensor(), book.steps_tensor(8)
    assert levels.dtype == torch.int8 and levels.tolist() == list(book.levels)
    assert steps.dtype == torch.float32 and tuple(steps.tolist()) == book.candidate_steps(8)
    assert book.steps_tensor().tolist() == [np.float32(book.step)]


def test_candidate_steps():
    every = [("lloyd", bits) for bits in (1, 2, 3, 4, 5)]
    every += [("uniform", bits) for bits in (2, 3, 4, 5, 8)]
    for grid, bits in every:
        book = Codebook.make(128, bits, grid)
        assert book.candidate_steps(1) == (float(np.float32(book.step)),)
        for search in (2, 4, 8, 16, 64):
            steps = np.array(book.candidate_steps(search))
            assert (steps == steps.astype(np.float32)).all()
            if bits == 1:  # one code pattern whatever the step
                assert len(steps) == 1
                continue
            assert len(steps) == search and (np.diff(steps) > 0).all()
            assert 0.5 * book.step < steps[0] < book.step < steps[-1] < 1.5 * book.step
            np.testing.assert_allclose(np.diff(steps), np.diff(steps)[0], rtol=1e-3)
    with pytest.raises(ValueError, match="search must be 1 or more"):
        book.candidate_steps(0)


def searched_error(book: Codebook, search: int, t: np.ndarray) -> float:
    """Mean squared error per coordinate with the best candidate and a least-squares scale."""
    codes = np.arange(-127, 128) if book.bits == 8 else np.rint(book.values / book.step)
    square = (t * t).sum(-1)
    best = square
    for step in book.candidate_steps(search):
        bounds = 0.5 * step * (codes[1:] + codes[:-1])
        c = codes[np.searchsorted(bounds, t, side="right")]
        best = np.minimum(best, square - (t * c).sum(-1) ** 2 / (c * c).sum(-1))
    return float(best.mean()) / t.shape[-1]


def random_directions(count: int, d: int, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((count, d))
    return x * (math.sqrt(d) / np.linalg.norm(x, axis=-1, keepdims=True))


@pytest.mark.parametrize(
    ("d", "bits", "lloyd", "uniform"),
    [
        (64, 4, (0.00890, 0.00734, 0.00712), (0.01069, 0.00925, 0.00889)),
        (128, 4, (0.00916, 0.00810, 0.00790), (0.01108, 0.01027, 0.00998)),
        (256, 4, (0.00932, 0.00869, 0.00852), (0.01132, 0.01096, 0.01074)),
        (64, 3, (0.03265, 0.02990, 0.02978), (0.03540, 0.03354, 0.03316)),
        (128, 3, (0.03352, 0.03190, 0.03175), (0.03633, 0.03548, 0.03514)),
        (128, 2, (0.11541, 0.11457, 0.11444), (0.11681, 0.11644, 0.11609)),
    ],
)
def test_step_search(d, bits, lloyd, uniform):
    """Measured error per coordinate with 1, 4 and 8 candidate steps."""
    t = random_directions(4000, d, seed=d + bits)
    for grid, expected in (("lloyd", lloyd), ("uniform", uniform)):
        book = Codebook.make(d, bits, grid)
        found = [searched_error(book, search, t) for search in (1, 4, 8)]
        np.testing.assert_allclose(found, expected, rtol=0.02)
        assert found[0] > found[1] > found[2]


@pytest.mark.parametrize(
    ("bits", "grid", "gain"), [(5, "lloyd", 0.81), (5, "uniform", 0.80), (8, "uniform", 0.57)]
)
def test_step_search_of_fine_codebooks(bits, grid, gain):
    t = random_directions(2000, 128, seed=bits)
    book = Codebook.make(128, bits, grid)
    ratio = searched_error(book, 8, t) / searched_error(book, 1, t)
    assert ratio == pytest.approx(gain, rel=0.03)


# ---------------------------------------------------------------- levels from elsewhere


@pytest.mark.parametrize("given", ("tuple", "numpy", "tensor"))
def test_from_levels_accepts(given):
    levels = (-2.0, -0.5, 0.5, 2.0)
    convert = {"tuple": tuple, "numpy": np.array, "tensor": torch.tensor}[given]
    book = Codebook.from_levels(convert(levels), 64)
    assert book == Codebook(64, 2, "lloyd", (-127, -32, 32, 127), 2.0 / 127)


def test_from_levels_averages_a_rounded_pair():
    book = Codebook.from_levels((-2.00001, -0.5, 0.5, 2.0), 64)
    assert book.levels == (-127, -32, 32, 127)
    assert book.step == pytest.approx(2.000005 / 127, rel=1e-12)


def test_from_levels_of_lloyd_max_is_make():
    for bits in range(1, 6):
        made = Codebook.make(96, bits)
        assert Codebook.from_levels(lloyd_max(96, bits), 96) == made
        in_float32 = Codebook.from_levels(torch.tensor(lloyd_max(96, bits)).float(), 96)
        assert in_float32.levels == made.levels


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ((-1.0, 0.5), "symmetric about zero"),
        ((-2.0, -0.5, 0.6, 2.0), "symmetric about zero"),
        ((0.1, 0.2, 0.3, 0.4), "symmetric about zero"),
        ((-1.0, 0.0, 1.0), "2, 4, 8, 16 or 32"),
        (tuple(range(-32, 32)), "2, 4, 8, 16 or 32"),
        (((-1.0, 1.0),), "2, 4, 8, 16 or 32"),
        ((1.0, -1.0), "strictly increasing"),
        ((-1.0, -0.0, 0.0, 1.0), "strictly increasing"),
        ((-math.inf, math.inf), "finite"),
        ((-math.nan, math.nan), "finite"),
        ((-1000.0, -1.0, 1.0, 1000.0), "rounding to int8"),
        ((-1000.0, -999.0, 999.0, 1000.0), "rounding to int8"),
    ],
)
def test_from_levels_rejects(levels, message):
    with pytest.raises(ValueError, match=message):
        Codebook.from_levels(levels, 64)


def test_unsupported_arguments():
    with pytest.raises(ValueError, match="bits must be 1 to 8, got 0"):
        lloyd_max(64, 0)
    with pytest.raises(ValueError, match="bits must be 1 to 8, got 9"):
        lloyd_max(64, 9)
    for d in (1, 0, -5, 2.5, math.nan, -math.inf):
        with pytest.raises(ValueError, match="integer of 2 or more"):
            lloyd_max(d, 2)
    for bits in (1, 6, 7, 9):
        with pytest.raises(ValueError, match="2, 3, 4, 5 and 8 bits"):
            Codebook.make(64, bits, "uniform")
    for bits in (0, 6, 7, 8):
        with pytest.raises(ValueError, match="supports 1 to 5 bits"):
            Codebook.make(64, bits, "lloyd")
    with pytest.raises(ValueError, match="grid must be one of"):
        Codebook.make(64, 4, "nf4")
    for levels in ([1.0, 0.0], [], [[0.0]]):
        with pytest.raises(ValueError, match="one ascending sequence"):
            distortion(levels, 64)


def test_results_are_private_copies():
    lloyd_max(64, 3)[:] = 0.0
    assert lloyd_max(64, 3)[-1] > 2.0
