"""QJL: the bits, the length, and an estimator without bias, of the variance that theory gives."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_turboquant as tt
from tests.helpers import (
    FLOATS,
    assert_same_bytes,
    at_the_end_of_memory,
    hard_vectors,
    randn,
    signs_of,
    sketch_score_rounding,
)
from torch_turboquant.ops.qjl import qjl_score_reference, qjl_sketch_reference
from torch_turboquant.signs import SignKind, random_signs

EPS = 2.0**-24


def projection(kind, d, rows=None, seed=0):
    if kind == "dense":
        return tt.gaussian_projection(rows or d, d, seed)
    return random_signs(d, seed, kind=SignKind.SKETCH)


@pytest.mark.parametrize("kind", ["dense", "structured"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("d", [24, 48, 64, 80, 128, 144, 224, 320, 384, 576, 1024])
def test_bytes(d, dtype, kind, device):
    s = projection(kind, d)
    for x in (randn(20, d, seed=d), hard_vectors(d, signs_of(d, 7))):
        x = x.to(dtype)
        bits, norm = tt.qjl_sketch(x.to(device), s.to(device))
        expected = qjl_sketch_reference(x, s)
        assert_same_bytes(bits, expected[0])
        good = torch.isfinite(expected[1])
        assert_same_bytes(norm.cpu()[good], expected[1][good])
        broken = ~torch.isfinite(x).all(-1)
        assert torch.equal(norm.cpu().isnan(), broken)
        assert not bits.cpu()[broken].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_bytes_of_many(d, dtype, device):
    """Enough for tensor cores, where few, some or all neighbours have sums near zero."""
    s, hard = projection("structured", d), hard_vectors(d, signs_of(d, 7))
    x = randn(9001, d, seed=d)
    x[1000:2000] = (2 * x[1000:2000]).round()  # sums of exactly zero are frequent
    x[2000:2500] = -0.0 * x[2000:2500]
    x[3000 : 3000 + len(hard)] = hard
    x[4000 : 4000 + 17 * len(hard) : 17] = hard
    x = x.to(dtype)
    bits, norm = (t.cpu() for t in tt.qjl_sketch(x.to(device), s.to(device)))
    expected = qjl_sketch_reference(x, s)
    good = torch.isfinite(expected[1])
    assert_same_bytes(bits, expected[0])
    assert_same_bytes(norm[good], expected[1][good])
    assert torch.equal(norm.isnan(), ~torch.isfinite(x).all(-1))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("d", "m"), [(40, 40), (64, 8), (128, 128), (128, 264), (144, 136), (256, 256), (1536, 64)]
)
def test_bytes_of_many_dense(d, m, dtype, device):
    """Several tiles of vectors and of rows, where few, some or all sums are close to zero."""
    s, hard = projection("dense", d, m), hard_vectors(d, signs_of(d, 7))
    s[2] = 0
    s[3] *= 1e-30
    s[4] *= 1e30
    s[5] = s[5].sign()
    x = randn(700, d, seed=d)
    x[100:200] = (2 * x[100:200]).round()
    x[200:230] = -0.0 * x[200:230]
    x[230:260] *= 1e-6 if dtype == torch.float16 else 1e-25
    x[260:290] *= 1e4 if dtype == torch.float16 else 1e35
    x[300:400] -= (x[300:400] @ s[6])[:, None] * s[6] / s[6].square().sum()  # nearly orthogonal
    x[400 : 400 + len(hard)] = hard
    x = x.to(dtype)
    bits, norm = (t.cpu() for t in tt.qjl_sketch(x.to(device), s.to(device)))
    expected = qjl_sketch_reference(x, s)
    broken = ~torch.isfinite(x).all(-1)
    assert_same_bytes(bits, expected[0])
    assert_same_bytes(norm[~broken], expected[1][~broken])
    assert norm[broken].isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("d", [36, 64, 144])
def test_tiny_dense_sketches(d, dtype, device):
    """Two tiles of vectors, two of rows, and two of channels or a length of the other kernel."""
    s, x = projection("dense", d, 136), randn(70, d, seed=d)
    x[3:5], x[6] = 0, 1e30 if dtype != torch.float16 else 6e4
    x = x.to(dtype)
    bits, norm = tt.qjl_sketch(x.to(device), s.to(device))
    expected = qjl_sketch_reference(x, s)
    assert_same_bytes(bits, expected[0])
    assert_same_bytes(norm, expected[1])


@pytest.mark.parametrize("d", [36, 128, 1536])
def test_bytes_do_not_depend_on_the_number_of_vectors(d, device):
    """Few vectors are summed in the order of the format, of many it is estimated at first."""
    s, x = projection("dense", d, 24).to(device), randn(120, d, seed=d).round().to(device)
    bits, norm = tt.qjl_sketch(x, s)
    for first, count in [(0, 1), (3, 11), (5, 15), (0, 16), (7, 17), (40, 25), (31, 0)]:
        part = slice(first, first + count)
        some = tt.qjl_sketch(x[part], s)
        assert_same_bytes(some[0], bits[part])
        assert_same_bytes(some[1], norm[part])


@pytest.mark.parametrize("dtype", FLOATS)
def test_bytes_of_a_dense_projection_that_is_not_finite(dtype, device):
    """A NaN in a row makes its bits 0; infinity times what it meets decides."""
    s = projection("dense", 64)
    s[1, 5], s[2, 7], s[3, 0], s[3, 1] = torch.nan, torch.inf, torch.inf, -torch.inf
    x = randn(200, 64, seed=1).to(dtype)
    x[:50] = 0
    x[50:100, 7] = 0
    bits, norm = tt.qjl_sketch(x.to(device), s.to(device))
    expected = qjl_sketch_reference(x, s)
    assert_same_bytes(bits, expected[0])
    assert_same_bytes(norm, expected[1])


@pytest.mark.parametrize("rows", [8, 40, 264])
def test_any_number_of_rows(rows, device):
    x, s = randn(5, 64, seed=rows), projection("dense", 64, rows)
    bits, norm = tt.qjl_sketch(x.to(device), s.to(device))
    assert bits.shape == (5, rows // 8)
    assert_same_bytes(bits, qjl_sketch_reference(x, s)[0])
    exact = x.double() @ s.double().T
    clear = exact.abs() > 1e-4
    signs = tt.unpack(bits.cpu(), 1, rows).bool()
    assert torch.equal(signs[clear], (exact > 0)[clear])
    assert (norm.cpu().double() / x.double().norm(dim=1) - 1).abs().max() < 10 * EPS


def test_zero_counts_as_positive(device):
    for s in (projection("dense", 16), projection("structured", 16)):
        for zero in (torch.zeros(1, 16), -torch.zeros(1, 16)):
            bits, norm = tt.qjl_sketch(zero.to(device), s.to(device))
            assert bits.flatten().tolist() == [255, 255]
            assert norm.tolist() == [0.0]
    s = torch.zeros(8, 16)
    s[::2, 0] = -1
    bits, _ = tt.qjl_sketch(torch.eye(16)[:1].to(device), s.to(device))
    assert bits.flatten().tolist() == [0b10101010]


def test_length_beyond_float32_squares(device):
    """The length of 1e30 and 1e-30 vectors, whose squares leave float32."""
    for size in (1e30, 1e-30):
        x = randn(3, 128, seed=1) * size
        _, norm = tt.qjl_sketch(x.to(device), projection("structured", 128).to(device))
        assert (norm.cpu().double() / x.double().norm(dim=1) - 1).abs().max() < 10 * EPS


@pytest.mark.parametrize("kind", ["dense", "structured"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_score_against_float64(kind, dtype, device):
    d = 80
    s = projection(kind, d, rows=56)
    q, x = randn(2, 3, 5, d, seed=1, dtype=dtype), randn(2, 3, 9, d, seed=2)
    bits, norm = qjl_sketch_reference(x, s)
    out = tt.qjl_score(*(t.to(device) for t in (q, bits, norm, s))).cpu()
    exact = qjl_score_reference(q, bits, norm, s)
    assert out.shape == (2, 3, 5, 9) and out.dtype == torch.float32
    # each of the sums of d products and of m signs rounds once per addition
    projected = (
        q.double().abs() @ s.double().abs().T if kind == "dense" else q.double().norm(dim=-1)
    )
    size = projected.sum(-1) if kind == "dense" else projected * d
    factor = math.sqrt(math.pi / 2) / 56 if kind == "dense" else math.sqrt(math.pi / (2 * d))
    bound = 2 * d * EPS * factor * size[..., None] * norm.double()[..., None, :]
    bound = bound + sketch_score_rounding(q, norm, s)  # the CPU's queries are 16-bit integers
    assert ((out - exact).abs() <= bound).all()
    assert exact.abs().min() > 0  # nothing is vacuous here


@pytest.mark.parametrize("rows", [8, 40, 64, 72, 136, 1000, 4096])
def test_scores_with_any_number_of_rows(rows, device):
    d, s = 48, projection("dense", 48, rows)
    q, x = randn(7, d, seed=1), randn(21, d, seed=2)
    q[2], q[5, 3], x[4], x[20, 7] = 0, torch.nan, 0, torch.inf
    bits, norm = qjl_sketch_reference(x, s)
    out = tt.qjl_score(*(t.to(device) for t in (q, bits, norm, s))).cpu()
    assert out[5].isnan().all() and out[:, 20].isnan().all()
    queries, keys = [i for i in range(7) if i != 5], list(range(20))
    q, bits, norm, out = q[queries], bits[keys], norm[keys], out[queries][:, keys]
    assert (out[2] == 0).all() and (out[:, 4] == 0).all()
    bound = 4 * d * EPS * q.double().norm(dim=-1)[:, None] * norm.double()
    bound = bound + sketch_score_rounding(q, norm, s)
    assert ((out - qjl_score_reference(q, bits, norm, s)).abs() <= bound).all()


@pytest.mark.parametrize("kind", ["dense", "structured"])
@pytest.mark.parametrize("d", [8, 40, 64, 144])
def test_nothing_is_read_behind_a_tensor(d, kind):
    """Every argument ends where memory does."""
    s, x, q = projection(kind, d, rows=56), randn(19, d, seed=1), randn(3, d, seed=2)
    sketch = tt.qjl_sketch(x, s)
    s_end = at_the_end_of_memory(s)
    for actual, expected in zip(tt.qjl_sketch(at_the_end_of_memory(x), s_end), sketch, strict=True):
        assert_same_bytes(actual, expected)
    guarded = [at_the_end_of_memory(t) for t in (q, *sketch)]
    assert_same_bytes(tt.qjl_score(*guarded, s_end), tt.qjl_score(q, *sketch, s))


def test_empty_sides():
    s = projection("structured", 64)
    bits, norm = tt.qjl_sketch(randn(0, 64, seed=1), s)
    assert bits.shape == (0, 8) and norm.shape == (0,)
    assert tt.qjl_score(randn(3, 64, seed=1), bits, norm, s).shape == (3, 0)
    bits, norm = tt.qjl_sketch(randn(4, 64, seed=1), s)
    assert tt.qjl_score(randn(0, 64, seed=1), bits, norm, s).shape == (0, 4)


def slope(estimate, truth):
    return float((estimate.double() * truth).sum() / truth.square().sum())


@pytest.mark.parametrize("kind", ["dense", "structured"])
def test_no_bias_over_a_million_pairs(kind):
    """Mean over 64 projections of the slope of estimates against true inner products; confusing the
    factors of the two kinds gives a slope of about 1 / sqrt(d) or sqrt(d)."""
    d = 64
    q, x = randn(128, d, seed=1), randn(128, d, seed=2)
    truth = q.double() @ x.double().T
    slopes = []
    for seed in range(64):
        s = projection(kind, d, seed=seed)
        slopes.append(slope(tt.qjl_score(q, *tt.qjl_sketch(x, s), s), truth))
    assert abs(sum(slopes) / len(slopes) - 1) < 0.02


def test_no_bias_for_fixed_vectors():
    """The expectation is over the projection alone: each fixed pair is unbiased (dense S)."""
    d, trials = 32, 4000
    q, x = randn(4, d, seed=3), randn(4, d, seed=4)
    s = tt.gaussian_projection(d * trials, d, 5).view(trials, d, d)
    estimates = torch.stack([tt.qjl_score(q, *tt.qjl_sketch(x, part), part) for part in s]).double()
    truth = q.double() @ x.double().T
    lengths = q.double().norm(dim=1)[:, None] * x.double().norm(dim=1)
    # per row of S: sqrt(pi/2) |x| <s, q> sign<s, x>, with second moment pi/2 |q|^2 |x|^2
    variance = (math.pi / 2 * lengths**2 - truth**2) / d
    error = (estimates.mean(0) - truth) / (variance / trials).sqrt()
    assert error.abs().max() < 4.5  # standard deviations, 16 pairs
    assert (estimates.var(0) / variance - 1).abs().max() < 0.15


def test_structured_projection_has_less_variance_than_a_dense_one():
    """Orthonormal rows do not repeat each other: about (pi/2 - 1) / (pi/2) of the variance."""
    d = 64
    q, x = randn(64, d, seed=6), randn(64, d, seed=7)
    truth = q.double() @ x.double().T
    error = {}
    for kind in ("dense", "structured"):
        total = 0.0
        for seed in range(40):
            s = projection(kind, d, seed=seed)
            total += float((tt.qjl_score(q, *tt.qjl_sketch(x, s), s) - truth).square().mean())
        error[kind] = total / 40
    lengths = (q.double().norm(dim=1)[:, None] * x.double().norm(dim=1)).square().mean()
    assert error["dense"] / float(lengths) * d == pytest.approx(math.pi / 2, rel=0.05)
    assert error["structured"] / float(lengths) * d == pytest.approx(math.pi / 2 - 1, rel=0.05)


@given(
    lead=st.lists(st.integers(0, 3), max_size=2),
    offset=st.integers(0, 9),
    gap=st.integers(0, 5),
    kind=st.sampled_from(["dense", "structured"]),
    dtype=st.sampled_from(FLOATS),
)
def test_views(lead, offset, gap, kind, dtype):
    d, rows = 48, math.prod(lead)
    buffer = randn(offset + rows * (d + gap), seed=8, dtype=dtype)
    x = buffer[offset:].view(rows, d + gap)[:, :d]
    if lead:
        x = x.unflatten(0, lead)
    else:
        x = x[0]
    s = projection(kind, d)
    for actual, expected in zip(
        tt.qjl_sketch(x, s), qjl_sketch_reference(x.contiguous(), s), strict=True
    ):
        assert_same_bytes(actual, expected)
