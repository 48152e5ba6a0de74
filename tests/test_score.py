"""Scores from packed keys against decoded keys in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_turboquant as tt
from tests.helpers import (
    CODEBOOKS,
    FLOATS,
    HEAD_DIMS,
    assert_same_bytes,
    at_the_end_of_memory,
    code_score_rounding,
    codebook_tensors,
    randn,
    scales,
    signs_of,
    sketch_score_rounding,
)
from torch_turboquant.ops.codec import Channels
from torch_turboquant.ops.score import score_reference
from torch_turboquant.signs import SignKind, random_signs

EPS = 2.0**-24


def encoded(x, bits, grid, center=None, device="cpu"):
    d = x.shape[-1]
    levels, steps = codebook_tensors(d, bits, grid, 4)
    packed, scale = tt.encode(x, signs_of(d), levels, steps, bits, "unbiased", center)
    constants = (signs_of(d), levels, bits, center)
    return [t.to(device) if isinstance(t, torch.Tensor) else t for t in (packed, scale, *constants)]


def bounds(
    q, packed, scale, signs, levels, bits, center, sign_bits=None, norm=None, projection=None
):
    """Largest error of each score.

    float32: coordinates of the rotated query are off by about log2(d) roundings each, and sums over
    d terms of random sign by sqrt(d) of theirs: together below 64 roundings of |q| times the length
    of the key. Integers: see rounded_query_error, for the codes and for the sketch.
    """
    length = tt.decode(packed, scale, signs, levels, bits).double().norm(dim=-1)
    center, _, inverse = Channels.of(center, 1)
    scaled = q if inverse is None else q.float() * inverse
    rounding = code_score_rounding(scaled, signs, length, bits)
    if projection is not None:
        rounding = rounding + sketch_score_rounding(q, norm, projection)
        length = length + 4 * norm.double()  # the estimate varies by pi/2 |q|^2 norm^2 / d
    if center is not None:
        length = length + center.double().norm()
    size = torch.maximum(q.double().norm(dim=-1), scaled.double().norm(dim=-1))
    return rounding + 64 * EPS * size[..., None] * length[..., None, :]


def assert_close(out, q, *stored):
    """stored: all that score takes after q, on the CPU."""
    exact = score_reference(q, *stored)
    assert ((out.cpu().double() - exact).abs() <= bounds(q, *stored)).all()


def on_cpu(values):
    return [v.cpu() if isinstance(v, torch.Tensor) else v for v in values]


@pytest.mark.parametrize(("bits", "grid"), CODEBOOKS)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_against_float64(d, bits, grid, device):
    q, x, center = randn(2, 3, d, seed=1), randn(2, 37, d, seed=2), 10 * randn(d, seed=3)
    for c in (None, center, tt.scaled_center(center, scales(d, seed=4))):
        stored = encoded(x, bits, grid, c, device)
        out = tt.score(q.to(device), *stored)
        assert out.shape == (2, 3, 37) and out.dtype == torch.float32
        assert_close(out, q, *on_cpu(stored))


@pytest.mark.parametrize("dtype", FLOATS)
def test_query_dtypes_and_strides(dtype, device):
    q = randn(5, 4, 128, seed=4, dtype=dtype).transpose(0, 1)  # [heads, queries, d]
    x = randn(4, 19, 128, seed=5)
    stored = encoded(x, 3, "lloyd", None, device)
    out = tt.score(q.to(device), *stored).cpu()
    assert_close(out, q.float(), *on_cpu(stored))
    # the query is converted, not rounded again
    assert_same_bytes(out, tt.score(q.float().to(device), *stored))


@pytest.mark.parametrize("kind", ["dense", "structured"])
def test_with_a_sketch(kind, device):
    """The paper's inner-product quantiser: the sketch of the residual takes most of the error."""
    d = 128
    q, x = randn(40, d, seed=6), randn(300, d, seed=7)
    s = (
        tt.gaussian_projection(d, d, 0)
        if kind == "dense"
        else random_signs(d, 0, kind=SignKind.SKETCH)
    )
    levels, steps = codebook_tensors(d, 2, "lloyd", 1)
    packed, scale = tt.encode(x, signs_of(d), levels, steps, 2, "mse")
    residual = x - tt.decode(packed, scale, signs_of(d), levels, 2)
    sketch = (*tt.qjl_sketch(residual, s), s)
    stored = (packed, scale, signs_of(d), levels, 2, None)
    on = [t.to(device) if isinstance(t, torch.Tensor) else t for t in (q, *stored, *sketch)]
    out = tt.score(*on).cpu()
    assert_close(out, q, *stored, *sketch)
    parts = tt.score(*on[:7]).cpu() + tt.qjl_score(on[0], *on[7:]).cpu()
    assert_close(parts, q, *stored, *sketch)
    truth = q.double() @ x.double().T
    slope = {}
    for name, estimate in (("plain", tt.score(*on[:7]).cpu()), ("sketch", out)):
        slope[name] = float((estimate * truth).sum() / truth.square().sum())
    assert abs(slope["sketch"] - 1) < 0.02 < abs(slope["plain"] - 1)


def test_wrong_keys_change_the_score():
    q, x = randn(2, 64, seed=8), randn(6, 64, seed=9)
    packed, scale, *constants = encoded(x, 4, "lloyd")
    out = tt.score(q, packed, scale, *constants)
    for key in range(6):
        other = packed.clone()
        other[key, 5] ^= 0x30
        changed = tt.score(q, other, scale, *constants) != out
        assert changed[:, key].all() and changed.sum() == 2
        other = scale.clone()
        other[key] *= 2
        assert_same_bytes(tt.score(q, packed, other, *constants)[:, key], out[:, key] * 2)


def test_a_broken_key_spoils_only_itself(device):
    x = randn(9, 96, seed=1)
    clean = tt.score(randn(3, 96, seed=2).to(device), *encoded(x, 4, "lloyd", None, device))
    x[4, 7] = torch.inf
    out = tt.score(randn(3, 96, seed=2).to(device), *encoded(x, 4, "lloyd", None, device))
    assert out[:, 4].isnan().all()
    others = [i for i in range(9) if i != 4]
    assert_same_bytes(out[:, others], clean[:, others])


@given(
    lead=st.lists(st.integers(0, 2), max_size=2),
    queries=st.integers(0, 5),
    keys=st.integers(0, 40),
    offset=st.integers(0, 9),
    codebook=st.sampled_from(CODEBOOKS),
)
def test_shapes(lead, queries, keys, offset, codebook):
    d = 16
    rows = queries
    for n in lead:
        rows *= n
    q = randn(offset + rows * d, seed=3)[offset:].view(*lead, queries, d)
    x = randn(*lead, keys, d, seed=4)
    stored = encoded(x, *codebook)
    out = tt.score(q, *stored)
    assert out.shape == (*lead, queries, keys)
    assert_close(out, q, *stored)


# Any d that the ops take: short rows, several rows to a register, rows that end inside one.
ODD_DIMS = (2, 4, 6, 8, 10, 12, 16, 18, 20, 24, 32, 36, 40, 48, 56, 72, 144, 224, 288, 1024, 3584)


@pytest.mark.parametrize(("bits", "grid"), CODEBOOKS[:5] + CODEBOOKS[-1:])
@pytest.mark.parametrize("d", ODD_DIMS)
def test_any_dimension_and_number_of_keys(d, bits, grid, device):
    for queries, keys in ((1, 1), (3, 17), (7, 31)):
        q, x = randn(queries, d, seed=d + 1), randn(keys, d, seed=d + 2)
        stored = encoded(x, bits, grid, randn(d, seed=3), device)
        assert_close(tt.score(q.to(device), *stored), q, *on_cpu(stored))


@pytest.mark.parametrize(("bits", "grid"), CODEBOOKS[:5] + CODEBOOKS[-1:])
@pytest.mark.parametrize("d", [10, 48, 128, 160])
def test_many_keys_and_queries_are_single_ones(d, bits, grid, device):
    """No matter in which block of keys and with which other queries: the same bits."""
    q, x = randn(2, 70, d, seed=1), randn(2, 530, d, seed=2)
    q, (packed, scale, *constants) = q.to(device), encoded(x, bits, grid, None, device)
    out = tt.score(q, packed, scale, *constants)
    assert_close(out, q.cpu(), *on_cpu((packed, scale, *constants)))
    for b, i, j in ((0, 0, 0), (0, 69, 529), (1, 64, 512), (1, 31, 511), (1, 5, 300)):
        one = tt.score(
            q[b, i : i + 1].clone(),
            packed[b, j : j + 1].clone(),
            scale[b, j : j + 1].clone(),
            *constants,
        )
        assert_same_bytes(one, out[b, i : i + 1, j : j + 1])


@pytest.mark.parametrize("sketched", [False, True])
@pytest.mark.parametrize(("bits", "grid"), CODEBOOKS)
def test_a_query_alone(bits, grid, sketched, device):
    """One query over many keys takes a way of its own on CUDA; its scores are those of several."""
    q, x = randn(3, 2, 128, seed=1), randn(3, 777, 128, seed=2)
    for center in (None, randn(128, seed=3)):
        packed, scale, *constants = encoded(x, bits, grid, center, device)
        sketch = ()
        if sketched:
            s = random_signs(128, 0, kind=SignKind.SKETCH).to(device)
            sketch = (*tt.qjl_sketch(x.to(device), s), s)
        for dtype in FLOATS:
            queries = q.to(device, dtype)
            for keys in (32, 33, 256, 287, 288, 777):
                cut = [t[:, :keys].contiguous() for t in (packed, scale, *sketch[:2])]
                stored = (*cut[:2], *constants, *cut[2:], *sketch[2:])
                both = tt.score(queries, *stored)
                assert_same_bytes(tt.score(queries[:, 1:], *stored), both[:, 1:])


@pytest.mark.parametrize("d", [6, 48, 80, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
def test_rows_at_any_address(d, bits, device):
    """Rows need no alignment, and what lies around them plays no part."""
    q, x = randn(2, d, seed=1), randn(21, d, seed=2)
    stored = encoded(x, bits, "uniform" if bits == 8 else "lloyd", None, device)
    packed, scale, *constants = stored
    out = tt.score(q.to(device), *stored)
    for offset in (1, 2, 3, 7):
        around = torch.full((offset + packed.numel() + 99,), 0xA5, dtype=torch.uint8, device=device)
        around[offset : offset + packed.numel()] = packed.flatten()
        moved = around[offset : offset + packed.numel()].view(packed.shape)
        assert_same_bytes(tt.score(q.to(device), moved, scale, *constants), out)


@pytest.mark.parametrize("d", [2, 8, 20, 40, 80, 128, 320])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
def test_nothing_is_read_behind_a_tensor(d, bits):
    """Every argument ends where memory does."""
    for queries, keys in ((1, 1), (3, 16), (5, 33)):
        q, x = randn(queries, d, seed=1), randn(keys, d, seed=2)
        stored = encoded(x, bits, "uniform" if bits == 8 else "lloyd", randn(d, seed=3))
        s = tt.gaussian_projection(24, d, 1)
        call = (q, *stored, *tt.qjl_sketch(x, s), s)
        guarded = [at_the_end_of_memory(t) if isinstance(t, torch.Tensor) else t for t in call]
        assert_same_bytes(tt.score(*guarded), tt.score(*call))
        assert_same_bytes(tt.score(*guarded[:7]), tt.score(*call[:7]))


def test_special_queries(device):
    d, stored = 64, encoded(randn(19, 64, seed=1), 3, "lloyd", None, device)
    q = randn(6, d, seed=2)
    q[1], q[2, 9], q[3, 0], q[4] = 0, torch.nan, -torch.inf, 1e-42
    out = tt.score(q.to(device), *stored).cpu()
    assert (out[1] == 0).all()
    assert out[2].isnan().all() and not torch.isfinite(out[3]).any()
    assert out[4].abs().max() < 1e-38
    good = [0, 5]
    assert_same_bytes(out[good], tt.score(q[good].to(device), *stored))


@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e15, 1e30])
def test_queries_of_any_size(size, device):
    """The integers that stand for a query adapt to it."""
    q, x = size * randn(3, 96, seed=1), randn(40, 96, seed=2)
    stored = encoded(x, 4, "lloyd", None, device)
    assert_close(tt.score(q.to(device), *stored), q, *on_cpu(stored))
    s = tt.gaussian_projection(40, 96, 1)
    bits, norm = tt.qjl_sketch(x, s)
    out = tt.score(q.to(device), *stored, *(t.to(device) for t in (bits, norm, s)))
    assert_close(out, q, *on_cpu(stored), bits, norm, s)


def test_a_broken_scale_spoils_only_its_key(device):
    q, x = randn(5, 80, seed=1), randn(35, 80, seed=2)
    stored = encoded(x, 5, "lloyd", randn(80, seed=3), device)
    s = tt.gaussian_projection(24, 80, 1).to(device)
    sketch = tt.qjl_sketch(x.to(device), s)
    clean = tt.score(q.to(device), *stored, *sketch, s)
    stored[1][17] = torch.nan
    sketch[1][33] = torch.nan
    out = tt.score(q.to(device), *stored, *sketch, s)
    assert out[:, [17, 33]].isnan().all()
    others = [i for i in range(35) if i not in (17, 33)]
    assert_same_bytes(out[:, others], clean[:, others])
