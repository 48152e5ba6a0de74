"""Merging the attention over two sets of keys."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_turboquant as tt
from tests.attention_cases import EPS, HALF_UNIT, bounds, build, run
from tests.helpers import FLOATS, assert_same_bytes, int32, randn
from torch_turboquant.ops.attention import merge_attention_reference


@pytest.mark.parametrize("dtype", FLOATS)
def test_merge(dtype, device):
    a, b = randn(7, 3, 64, seed=1, dtype=dtype), randn(7, 3, 64, seed=2, dtype=dtype)
    lse_a, lse_b = 5 * randn(7, 3, seed=3), 5 * randn(7, 3, seed=4)
    lse_a[0], lse_b[1], lse_a[2], lse_b[2] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
    lse_a[3], lse_b[3] = 1e4, 9.99e3
    a[0], b[1], a[2] = torch.nan, torch.inf, torch.nan  # parts without keys are ignored
    out, lse = tt.merge_attention(*(t.to(device) for t in (a, lse_a, b, lse_b)))
    exact, exact_lse = merge_attention_reference(a, lse_a, b, lse_b)
    assert out.dtype == dtype and lse.dtype == torch.float32
    allowed = HALF_UNIT[dtype] * exact.abs() + 64 * EPS * 4
    assert ((out.cpu() - exact).abs() <= allowed).all()
    assert_same_bytes(out[0], b[0])
    assert_same_bytes(out[1], a[1])
    assert not out[2].any() and (lse[2] == -torch.inf).all()
    finite = torch.isfinite(exact_lse)
    wrong = (lse.cpu() - exact_lse).abs()[finite]
    assert (wrong <= 4 * EPS * (1 + exact_lse.abs()[finite])).all()


@pytest.mark.parametrize("other", [-torch.inf, 0.0, torch.nan])
def test_a_broken_side_stays_visible(other, device):
    """Its logarithm is NaN; -inf would say that no key was seen."""
    out, lse = torch.ones(1, 32, device=device), torch.tensor([torch.nan], device=device)
    whole = torch.ones(1, 32, device=device), torch.tensor([other], device=device)
    for sides in ((out, lse, *whole), (*whole, out, lse)):
        merged, merged_lse = tt.merge_attention(*sides)
        assert merged.isnan().all()
        assert merged_lse.isnan().all()


def test_merging_two_sets_of_keys_equals_attention_over_both(device):
    """Prefix in codes, window in codes: the split that a prefill makes."""
    config = tt.preset("k4v4", 64, page_size=16)
    case = build(config, [48])
    whole, whole_lse = run(case, device)
    first = case._replace(seq_lens=int32(32))
    second = case._replace(seq_lens=int32(16), block_table=case.block_table[:, 2:].contiguous())
    parts = [t.to(device) for t in (*run(first, device), *run(second, device))]
    merged, merged_lse = tt.merge_attention(*parts)
    score_error, out_error = bounds(case, device)
    assert (merged.cpu() - whole).abs().max() <= 2 * out_error
    assert (merged_lse.cpu() - whole_lse).abs().max() <= 2 * score_error + 10 * EPS


@given(lead=st.lists(st.integers(0, 3), max_size=3), d=st.integers(1, 40), seed=st.integers(0, 9))
def test_merge_shapes(lead, d, seed):
    a, b = randn(*lead, d, seed=seed), randn(*lead, d, seed=seed + 1)
    lse_a, lse_b = (randn(*lead, 1, seed=seed + i).squeeze(-1) for i in (2, 3))
    out, lse = tt.merge_attention(a, lse_a, b, lse_b)
    exact, exact_lse = merge_attention_reference(a, lse_a, b, lse_b)
    assert out.shape == a.shape and lse.shape == lse_a.shape
    assert torch.allclose(out.double(), exact, rtol=0, atol=64 * EPS)
    assert torch.allclose(lse.double(), exact_lse, rtol=0, atol=16 * EPS)
