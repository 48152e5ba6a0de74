"""Affine groups: bytes against the reference, and the error that the grid allows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_turboquant as tt
from tests.helpers import FLOATS, assert_same_bytes, hard_vectors, randn, signs_of
from torch_turboquant.ops.group import group_decode_reference, group_encode_reference

GRIDS = [(group, bits) for group in (32, 64) for bits in (2, 4)]


def compare(x, group, bits, device="cpu"):
    stored = tt.group_encode(x.to(device), group, bits)
    expected = group_encode_reference(x, group, bits)
    for actual, reference in zip(stored, expected, strict=True):
        assert_same_bytes(actual, reference)
    for dtype in FLOATS:
        decoded = tt.group_decode(*stored, group, bits, x.shape[-1], dtype).cpu()
        reference = group_decode_reference(*expected, group, bits, x.shape[-1], dtype)
        good = ~reference.isnan()
        assert_same_bytes(decoded[good], reference[good])
        assert torch.equal(decoded.isnan(), reference.isnan())
    return stored


@pytest.mark.parametrize(("group", "bits"), GRIDS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("d", [64, 128, 192, 576])
def test_bytes(d, dtype, group, bits, device):
    sizes = torch.logspace(-6, 6, 40)[:, None]
    compare((randn(40, d, seed=d) * sizes).to(dtype), group, bits, device)
    hard = hard_vectors(d, signs_of(d))
    compare(hard[~(hard == 0).any(-1)].to(dtype), group, bits, device)


def test_by_hand(device):
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1], x[0, 2], x[0, 3] = -3.0, 12.0, 4.5, 4.49  # scale 1, zero -3
    x[0, 32:] = 7.0  # a constant group has scale 0
    packed, scale, zero = tt.group_encode(x.to(device), 32, 4)
    assert scale.tolist() == [[1.0, 0.0]] and zero.tolist() == [[-3.0, 7.0]]
    codes = tt.unpack(packed.cpu(), 4, 64)[0].tolist()
    assert codes[:4] == [0, 15, 8, 7]  # halves go up
    assert codes[4:32] == [3] * 28 and codes[32:] == [0] * 32
    decoded = tt.group_decode(packed, scale, zero, 32, 4, 64)[0].tolist()
    assert decoded[:5] == [-3.0, 12.0, 5.0, 4.0, 0.0] and decoded[32:] == [7.0] * 32


@pytest.mark.parametrize(("group", "bits"), GRIDS)
def test_error_is_at_most_half_a_step(group, bits):
    x = randn(200, 128, seed=1)
    packed, scale, zero = tt.group_encode(x, group, bits)
    error = (tt.group_decode(packed, scale, zero, group, bits, 128) - x).abs()
    step = scale.float().repeat_interleave(group, dim=1)
    # float16 rounds the zero (up to |zero| 2^-11) and the step (2^bits - 1 times, up to 2^-11 each)
    span = x.abs().max() * 2.0**-11 * 3
    assert (error <= 0.5 * step + span).all()
    assert (error > 0.45 * step).any()  # the bound is tight


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_group_spoils_only_itself(bad, device):
    x = randn(3, 128, seed=2)
    clean = compare(x, 32, 4, device)
    x[1, 40] = bad
    packed, scale, zero = compare(x, 32, 4, device)
    assert scale[1, 1].isnan() and zero[1, 1].isnan()
    assert not packed[1, 16:32].any()
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1, 1] = False
    assert torch.equal(scale.cpu()[mask], clean[1].cpu()[mask])
    assert torch.equal(packed.cpu().view(3, 4, 16)[mask], clean[0].cpu().view(3, 4, 16)[mask])


def test_beyond_float16(device):
    x = torch.cat([torch.full((1, 32), -1e6), torch.linspace(-1e30, 1e30, 32)[None]])
    _, scale, zero = compare(x, 32, 2, device)
    assert zero.flatten().tolist() == [-65504.0, -65504.0]
    assert scale.flatten().tolist() == [0.0, 65504.0]


@given(
    rows=st.integers(0, 4),
    groups=st.integers(1, 5),
    grid=st.sampled_from(GRIDS),
    offset=st.integers(0, 9),
    gap=st.integers(0, 5),
    dtype=st.sampled_from(FLOATS),
)
def test_views(rows, groups, grid, offset, gap, dtype):
    group, bits = grid
    d = group * groups
    buffer = randn(offset + rows * (d + gap), seed=3, dtype=dtype)
    compare(buffer[offset:].view(rows, d + gap)[:, :d], group, bits)
