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
    codebook_tensors,
    randn,
    signs_of,
)
from torch_turboquant.score import score_reference
from torch_turboquant.signs import SignKind, random_signs

EPS = 2.0**-24


def encoded(x, bits, grid, center=None, device="cpu"):
    d = x.shape[-1]
    levels, steps = codebook_tensors(d, bits, grid, 4)
    packed, scale = tt.encode(x, signs_of(d), levels, steps, bits, "unbiased", center)
    constants = (signs_of(d), levels, bits, center)
    return [t.to(device) if isinstance(t, torch.Tensor) else t for t in (packed, scale, *constants)]


def assert_close(out, exact, q, length):
    """The rotation of q and the sum over d each round at most about d times; sums of d terms of
    random sign stay far below that."""
    d = q.shape[-1]
    bound = d * EPS * q.double().norm(dim=-1)[..., None] * length[..., None, :]
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(("bits", "grid"), CODEBOOKS)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_against_float64(d, bits, grid, device):
    q, x, center = randn(2, 3, d, seed=1), randn(2, 37, d, seed=2), 10 * randn(d, seed=3)
    for c in (None, center):
        stored = encoded(x, bits, grid, c, device)
        out = tt.score(q.to(device), *stored)
        cpu = [t.cpu() if isinstance(t, torch.Tensor) else t for t in stored]
        exact = score_reference(q, *cpu)
        assert out.shape == (2, 3, 37) and out.dtype == torch.float32
        length = x.double().norm(dim=-1) * 1.5 + (0 if c is None else c.double().norm())
        assert_close(out.cpu(), exact, q, length)


@pytest.mark.parametrize("dtype", FLOATS)
def test_query_dtypes_and_strides(dtype, device):
    q = randn(5, 4, 128, seed=4, dtype=dtype).transpose(0, 1)  # [heads, queries, d]
    x = randn(4, 19, 128, seed=5)
    stored = encoded(x, 3, "lloyd", None, device)
    out = tt.score(q.to(device), *stored).cpu()
    exact = score_reference(
        q.float(), *(t.cpu() if isinstance(t, torch.Tensor) else t for t in stored)
    )
    assert_close(out, exact, q, x.double().norm(dim=-1) * 1.5)
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
    exact = score_reference(q, *stored, *sketch)
    assert_close(out, exact, q, 4 * x.double().norm(dim=-1))
    parts = tt.score(*on[:7]).cpu() + tt.qjl_score(on[0], *on[7:]).cpu()
    assert_close(parts, exact, q, 4 * x.double().norm(dim=-1))
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
    assert_close(out, score_reference(q, *stored), q, x.double().norm(dim=-1) * 1.5)
