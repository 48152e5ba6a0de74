"""Encoding and decoding of single vectors: bytes against the reference, and what the bytes mean."""

import math

import numpy as np
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
    hard_vectors,
    randn,
    scales,
    signs_of,
)
from torch_turboquant.codebook import distortion
from torch_turboquant.ops.codec import SCALE_MODES, decode_reference, encode_reference
from torch_turboquant.signs import rotation_matrix

EPS16 = 2.0**-11  # half a unit of float16, relative


def compare(x, d, bits, grid, search, mode, device="cpu", center=None):
    """Encodes on the device, checks bytes, decodes, checks bytes; returns packed and scale."""
    signs = signs_of(d)
    levels, steps = codebook_tensors(d, bits, grid, search)
    on = [None if t is None else t.to(device) for t in (signs, levels, steps, center)]
    packed, scale = tt.encode(x.to(device), *on[:3], bits, mode, on[3])
    expected = encode_reference(x, signs, levels, steps, bits, mode, center)
    assert_same_bytes(packed, expected[0])
    assert_same_bytes(scale, expected[1])
    for dtype in FLOATS:
        decoded = tt.decode(packed, scale, on[0], on[1], bits, on[3], dtype)
        reference = decode_reference(*expected, signs, levels, bits, center, dtype)
        good = torch.isfinite(expected[1])
        assert_same_bytes(decoded.cpu()[good], reference[good])
        assert decoded.cpu()[~good].isnan().all() and decoded.dtype == dtype
    return packed, scale


@pytest.mark.parametrize(("bits", "grid"), CODEBOOKS)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_bytes_on_random_vectors(d, bits, grid, device):
    x = randn(24, d, seed=d) * torch.logspace(-4, 4, 24)[:, None]
    for mode in SCALE_MODES:
        for search in (1, 8):
            compare(x, d, bits, grid, search, mode, device)
    compare(x.half(), d, bits, grid, 8, "mse", device)
    compare(x.bfloat16(), d, bits, grid, 8, "unbiased", device)
    compare(x, d, bits, grid, 3, "norm", device, center=randn(d, seed=9))
    scaled = tt.scaled_center(randn(d, seed=9), scales(d, seed=10))
    compare(x, d, bits, grid, 8, "unbiased", device, center=scaled)
    compare(x.bfloat16(), d, bits, grid, 1, "mse", device, center=scaled)


@pytest.mark.parametrize(("bits", "grid"), CODEBOOKS)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_bytes_on_hard_vectors(d, bits, grid, device):
    x = hard_vectors(d, signs_of(d))
    for mode in SCALE_MODES:
        compare(x, d, bits, grid, 8, mode, device)
    compare(x.half(), d, bits, grid, 1, "norm", device)  # sizes beyond float16 become infinities
    compare(x.bfloat16(), d, bits, grid, 8, "mse", device)


@pytest.mark.parametrize("d", [2, 4, 6, 10, 14, 18, 32, 1024, 2304, 4096])
def test_bytes_at_the_ends_of_the_dimensions(d, device):
    x = torch.cat([randn(5, d, seed=d), torch.zeros(2, d)])
    x[-1, 0] = 1
    for bits, grid in CODEBOOKS:
        compare(x, d, bits, grid, 8, "unbiased", device)


@pytest.mark.parametrize(("bits", "grid"), CODEBOOKS[1:])
def test_a_boundary_belongs_to_the_upper_code(bits, grid, device):
    """A one-hot vector has all rotated coordinates at +-1 sigma, u = +-4096. The step 2 / (L + L')
    puts the boundaries +-(L + L') exactly there, so every coordinate is a tie."""
    d, signs, book = 64, signs_of(64), tt.Codebook.make(64, bits, grid)
    levels = np.rint(book.values / book.step)
    sums = levels[1:] + levels[:-1]
    x = 3 * torch.eye(d)[1:2]
    rotated = tt.hadamard(x, signs)[0] / 3 * math.sqrt(d)
    assert sorted(set(rotated.tolist())) == [-1, 1]
    for tie in sums[sums > 0][:: 1 if bits < 8 else 20]:
        step = torch.tensor([2 / tie], dtype=torch.float32, device=device)
        packed, _ = tt.encode(
            x.to(device), signs.to(device), book.levels_tensor(device), step, bits, "norm"
        )
        upper, lower = int((sums <= tie).sum()), int((sums <= -tie).sum())
        expected = torch.where(rotated > 0, upper, lower)
        if bits == 8:
            expected = (expected - 127) % 256
        assert tt.unpack(packed.cpu(), bits, d)[0].tolist() == expected.tolist()


def test_zero_is_positive(device):
    """A zero coordinate takes the upper code of the middle boundary; a zero vector has scale 0."""
    for bits, grid in CODEBOOKS:
        levels, steps = codebook_tensors(64, bits, grid, 8, device)
        packed, scale = tt.encode(
            torch.zeros(2, 64, device=device), signs_of(64).to(device), levels, steps, bits
        )
        codes = tt.unpack(packed.cpu(), bits, 64)
        assert (codes == (0 if bits == 8 else 2 ** (bits - 1))).all()
        assert_same_bytes(scale, torch.zeros(2, dtype=torch.float16))
        assert not tt.decode(packed, scale, signs_of(64).to(device), levels, bits).any()


def test_the_code_byte_0x80_is_never_written():
    levels, steps = codebook_tensors(64, 8, "uniform", 8)
    signs = signs_of(64)
    packed, _ = tt.encode(hard_vectors(64, signs), signs, levels, steps, 8)
    assert not (packed == 0x80).any()
    one, _ = tt.encode(torch.eye(64)[1:2], signs, levels, torch.tensor([1e-3]), 8)
    assert set(one.flatten().tolist()) == {127, 0x81}  # +-1 sigma is beyond 127 * 0.001


@pytest.mark.parametrize(("bits", "grid"), CODEBOOKS)
@pytest.mark.parametrize("d", [64, 80, 128])
def test_distortion_of_random_directions(d, bits, grid):
    """20,000 random directions: the paper's quantiser has the error that integration predicts, the
    step search and a fitted scale have less."""
    x = torch.nn.functional.normalize(randn(20000, d, seed=bits), dim=1)
    signs, book = signs_of(d), tt.Codebook.make(d, bits, grid)
    errors = {}
    for search, mode in ((1, "norm"), (1, "mse"), (8, "mse")):
        levels, steps = codebook_tensors(d, bits, grid, search)
        packed, scale = tt.encode(x, signs, levels, steps, bits, mode)
        decoded = tt.decode(packed, scale, signs, levels, bits)
        errors[search, mode] = float((x - decoded).double().pow(2).sum(1).mean())
    predicted = distortion(book.values, d)
    # at 8 bits the float16 scale and u's units are no longer small beside the quantiser's error
    tolerance = 0.02 if bits < 8 else 0.1
    assert errors[1, "norm"] == pytest.approx(predicted, rel=tolerance)
    assert errors[1, "mse"] < errors[1, "norm"]
    assert errors[8, "mse"] < errors[1, "mse"] * (1 if bits == 1 else 0.9999) + 1e-12


# mean squared error per coordinate of Lloyd-Max and uniform grids with the least-squares scale,
# from an independent simulation with floating-point levels
PUBLISHED = {
    (128, 2, "lloyd"): (0.11541, 0.11444),
    (128, 3, "lloyd"): (0.03352, 0.03175),
    (64, 4, "lloyd"): (0.00890, 0.00712),
    (128, 4, "lloyd"): (0.00916, 0.00790),
    (256, 4, "lloyd"): (0.00932, 0.00852),
    (128, 2, "uniform"): (0.11681, 0.11609),
    (128, 3, "uniform"): (0.03633, 0.03514),
    (128, 4, "uniform"): (0.01108, 0.00998),
}


@pytest.mark.parametrize(("d", "bits", "grid"), PUBLISHED)
def test_distortion_table(d, bits, grid):
    x = torch.nn.functional.normalize(randn(20000, d, seed=5), dim=1)
    signs = signs_of(d)
    for search, expected in zip((1, 8), PUBLISHED[d, bits, grid], strict=True):
        levels, steps = codebook_tensors(d, bits, grid, search)
        packed, scale = tt.encode(x, signs, levels, steps, bits, "mse")
        error = float((x - tt.decode(packed, scale, signs, levels, bits)).pow(2).sum(1).mean())
        assert error == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("bits", "grid"), CODEBOOKS)
def test_what_the_scale_makes_true(bits, grid):
    """Each mode's equation, to the rounding of a float16 scale and of u (2^-13 sigma)."""
    d = 128
    x, signs = randn(500, d, seed=2), signs_of(d)
    levels, steps = codebook_tensors(d, bits, grid, 8)
    decoded, scales = {}, {}
    for mode in SCALE_MODES:
        packed, scales[mode] = tt.encode(x, signs, levels, steps, bits, mode)
        decoded[mode] = tt.decode(packed, scales[mode], signs, levels, bits).double()
    x = x.double()
    square = (x * x).sum(1)
    tolerance = EPS16 + 2.0**-12

    length = decoded["preserve"].norm(dim=1) / x.norm(dim=1)
    assert (length - 1).abs().max() < tolerance
    unbiased = (x * decoded["unbiased"]).sum(1) / square
    assert (unbiased - 1).abs().max() < tolerance
    y = decoded["mse"]
    assert (((x - y) * y).sum(1) / square).abs().max() < tolerance
    # norm: the same codes times |x| * step / sqrt(d), with nothing fitted; S = 1 shows the factor
    levels, steps = codebook_tensors(d, bits, grid, 1)
    _, scale = tt.encode(x.float(), signs, levels, steps, bits, "norm")
    expected = x.norm(dim=1) * 32 / math.sqrt(d) * float(steps[0])
    assert (scale.double() / expected - 1).abs().max() < tolerance


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_unbiased_scale(bits):
    """A million pairs: inner products with decoded keys have slope 1 in mode unbiased, and slope
    1 - distortion in mode mse, which this test must be able to see."""
    d, signs = 128, signs_of(128)
    keys, queries = randn(1000, d, seed=1), randn(1000, d, seed=2)
    truth = queries.double() @ keys.double().T
    levels, steps = codebook_tensors(d, bits, "lloyd", 1)
    slopes = {}
    for mode in ("unbiased", "mse"):
        packed, scale = tt.encode(keys, signs, levels, steps, bits, mode)
        estimate = tt.score(queries, packed, scale, signs, levels, bits).double()
        slopes[mode] = float((estimate * truth).sum() / truth.square().sum())
    assert abs(slopes["unbiased"] - 1) < 0.005
    loss = distortion(tt.Codebook.make(d, bits).values, d)
    assert slopes["mse"] == pytest.approx(1 - loss, abs=0.1 * loss)


def test_decoding_is_the_inverse_rotation_of_the_levels():
    for d in (64, 80, 112):
        signs = signs_of(d, 5)
        rotation = rotation_matrix(d, signs)
        for bits, grid in CODEBOOKS:
            book = tt.Codebook.make(d, bits, grid)
            codes = torch.randint(0, 255 if bits == 8 else 2**bits, (6, d), dtype=torch.uint8)
            if bits == 8:
                codes = (codes.int() - 127).to(torch.int8).view(torch.uint8)
            scale = randn(6, seed=1).abs().half()
            index = codes.view(torch.int8).long() + 127 if bits == 8 else codes.long()
            level = torch.from_numpy(book.values / book.step).round()[index]
            rotated = scale.double()[:, None] * level / 32
            expected = torch.from_numpy(rotated.numpy() @ rotation)
            decoded = tt.decode(tt.pack(codes, bits), scale, signs, book.levels_tensor(), bits)
            assert (decoded - expected).abs().max() < 1e-5 * rotated.norm(dim=1).max()


def test_extreme_sizes(device):
    """Beyond float16 the scale saturates; far below, it vanishes; nothing overflows on the way."""
    d, bits = 128, 4
    signs = signs_of(d).to(device)
    levels, steps = codebook_tensors(d, bits, "lloyd", 8, device)
    x = randn(1, d, seed=3)
    sizes = torch.tensor([1e-30, 1e-3, 1.0, 1e3, 1e30])[:, None]
    packed, scale = tt.encode((x * sizes).to(device), signs, levels, steps, bits)
    assert scale[0] == 0 and scale[4] == 65504
    for row in range(5):  # a direction has the same codes at (nearly) every size
        same = (
            (tt.unpack(packed[row].cpu(), 4, d) == tt.unpack(packed[2].cpu(), 4, d)).float().mean()
        )
        assert same > 0.97
    decoded = tt.decode(packed, scale, signs, levels, bits).cpu()
    for row in (1, 2, 3):
        error = (decoded[row] - x[0] * sizes[row]).norm() / (x[0] * sizes[row]).norm()
        assert error < 0.12
    assert torch.isfinite(decoded).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_vector_spoils_only_itself(bad, device):
    d = 96
    signs = signs_of(d)
    x = randn(9, d, seed=1)
    for bits, grid in ((4, "lloyd"), (8, "uniform")):
        clean = compare(x, d, bits, grid, 8, "mse", device)
        for channel in (0, 50, d - 1):
            spoiled = x.clone()
            spoiled[4, channel] = bad
            packed, scale = compare(spoiled, d, bits, grid, 8, "mse", device)
            others = [i for i in range(9) if i != 4]
            assert_same_bytes(packed[others], clean[0][others])
            assert_same_bytes(scale[others], clean[1][others])
            assert not packed[4].any()
            assert scale[4].cpu().view(torch.int16) == 0x7E00
    # infinities that only the subtraction of the center makes
    center = torch.full((d,), -3e38)
    x[0, 0] = 3e38
    _, scale = compare(x, d, 4, "lloyd", 1, "mse", device, center=center)
    assert scale[0].isnan() and not scale[1:].isnan().any()
    assert signs.abs().eq(1).all()


def test_center_is_subtracted_and_added():
    d, signs = 64, signs_of(64)
    levels, steps = codebook_tensors(d, 4, "lloyd", 8)
    center = 100 * randn(d, seed=4)
    x = randn(50, d, seed=5) + center
    packed, scale = tt.encode(x, signs, levels, steps, 4, "mse", center)
    assert_same_bytes(packed, tt.encode(x - center, signs, levels, steps, 4, "mse")[0])
    decoded = tt.decode(packed, scale, signs, levels, 4, center)
    spread = (x - center).norm()
    assert (decoded - x).norm() < 0.1 * spread
    plain = tt.decode(*tt.encode(x, signs, levels, steps, 4), signs, levels, 4)
    assert (plain - x).norm() > spread  # without it the constant part drowns the rest


def test_channels_are_scaled_and_scaled_back():
    d, signs = 64, signs_of(64)
    levels, steps = codebook_tensors(d, 4, "lloyd", 8)
    center, scale = 100 * randn(d, seed=4), scales(d, seed=5)
    scaled = tt.scaled_center(center, scale)
    assert scaled.shape == (3, d) and torch.equal(scaled[2], 1 / scale)
    x = randn(50, d, seed=6) / scale + center
    packed, stored = tt.encode(x, signs, levels, steps, 4, "mse", scaled)
    alone = tt.encode((x - center) * scale, signs, levels, steps, 4, "mse")
    assert_same_bytes(packed, alone[0])
    assert_same_bytes(stored, alone[1])
    decoded = tt.decode(packed, stored, signs, levels, 4, scaled)
    inner = tt.decode(packed, stored, signs, levels, 4)
    assert_same_bytes(decoded, inner * (1 / scale) + center)
    with pytest.raises(ValueError, match="scale must be positive and finite"):
        tt.scaled_center(center, -scale)
    with pytest.raises(ValueError, match="scale must be positive and finite"):
        tt.scaled_center(center, torch.full((d,), 1e-45))  # its inverse is infinite
    with pytest.raises(ValueError, match=r"scale has shape \[32\]"):
        tt.scaled_center(center, scale[:32])


@given(
    lead=st.lists(st.integers(0, 3), max_size=3),
    offset=st.integers(0, 9),
    gap=st.integers(0, 5),
    dtype=st.sampled_from(FLOATS),
    codebook=st.sampled_from(CODEBOOKS),
    d=st.sampled_from([6, 64, 80]),
)
def test_shapes_and_alignments(lead, offset, gap, dtype, codebook, d):
    rows = math.prod(lead)
    buffer = randn(offset + rows * (d + gap), seed=6, dtype=dtype)
    x = buffer[offset:].view(rows, d + gap)[:, :d].unflatten(0, lead) if lead else None
    if not lead:
        x = randn(offset + d, seed=6, dtype=dtype)[offset:]
    signs = signs_of(d)
    levels, steps = codebook_tensors(d, *codebook, 2)
    packed, scale = tt.encode(x, signs, levels, steps, codebook[0])
    expected = encode_reference(x.contiguous(), signs, levels, steps, codebook[0])
    assert_same_bytes(packed, expected[0])
    assert_same_bytes(scale, expected[1])
    decoded = tt.decode(packed, scale, signs, levels, codebook[0], None, dtype)
    assert_same_bytes(decoded, decode_reference(*expected, signs, levels, codebook[0], None, dtype))


def test_slices_of_a_fused_projection():
    """q, k and v as slices of [tokens, (q_heads + 2 kv_heads), d], and transposed heads."""
    d, signs = 128, signs_of(128)
    levels, steps = codebook_tensors(d, 3, "lloyd", 4)
    fused = randn(7, 12, d, seed=8)
    for x in (fused[:, 8:10], fused.transpose(0, 1), fused[::2, ::3], fused[3]):
        packed, scale = tt.encode(x, signs, levels, steps, 3)
        expected = encode_reference(x.contiguous(), signs, levels, steps, 3)
        assert_same_bytes(packed, expected[0])
        assert_same_bytes(scale, expected[1])
