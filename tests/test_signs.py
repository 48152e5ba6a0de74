"""The sign generator against pinned words, and the rotation matrix against its definition."""

import math

import numpy as np
import pytest
import torch

from torch_turboquant.signs import (
    SignKind,
    gaussian_projection,
    hartley_matrix,
    mix64,
    random_signs,
    random_words,
    rotation_matrix,
    split_dim,
    walsh_hadamard_matrix,
)

DIMS = (64, 80, 96, 112, 128, 160, 192, 256, 512, 576)


def words(*args, **kwargs) -> list[int]:
    return [int(w) for w in random_words(*args, **kwargs)]


def test_golden_words():
    # seed 0 is the published splitmix64 sequence, since mix64(0) = 0
    assert words(3, 0) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert words(2, 42, 7, SignKind.SKETCH) == [0xA574DE5E0C66CE5F, 0x7F81F800B6FFB20B]
    assert words(2, 2**64 - 1, 31, SignKind.VALUES) == [0xC0C861C3FD9F1097, 0x73C46FF0533EB9AF]


def test_words_follow_the_definition():
    """The same arithmetic in Python's integers."""
    mask = 2**64 - 1

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    for seed, layer, kind in ((1, 0, 0), (2**63, 5, 1), (2**64 - 1, 2**64 - 1, 2)):
        key = mix((mix((mix(seed) + layer) & mask) + kind) & mask)
        expected = [mix((key + (w + 1) * 0x9E3779B97F4A7C15) & mask) for w in range(20)]
        assert words(20, seed, layer, kind) == expected
    assert int(mix64(np.array([1], dtype=np.uint64))[0]) == mix(1)


def test_bits_become_signs_in_order():
    signs = random_signs(150, 42, layer=7, kind=SignKind.SKETCH)
    assert signs.dtype == torch.float32 and signs.device.type == "cpu" and signs.shape == (150,)
    w = words(3, 42, 7, SignKind.SKETCH)
    for channel in range(150):
        bit = w[channel // 64] >> (channel % 64) & 1
        assert signs[channel].item() == (-1.0 if bit else 1.0)
    # the low byte of the first word, 0x5F = 0b01011111
    assert signs[:8].tolist() == [-1, -1, -1, -1, -1, 1, -1, 1]


def test_a_longer_row_extends_a_shorter_one():
    assert torch.equal(random_signs(576, 3)[:80], random_signs(80, 3))


def test_signs_are_balanced():
    n = 2**20
    for seed in range(4):
        assert abs(random_signs(n, seed).sum().item()) < 4.0 * math.sqrt(n)
    # every one of the 64 bit positions on its own
    per_bit = random_signs(n, 9).view(-1, 64).sum(0)
    assert per_bit.abs().max().item() < 5.0 * math.sqrt(n / 64)


def test_streams_are_independent():
    n = 2**16
    streams = [
        random_signs(n, seed, layer, kind)
        for seed in (0, 1, 2, 2**63)
        for layer in (0, 1, 2, 31)
        for kind in SignKind
    ]
    table = torch.stack(streams)
    correlation = table @ table.T / n - torch.eye(len(table))
    assert correlation.abs().max().item() < 5.5 / math.sqrt(n)
    # and a stream with its own shifts
    x = streams[0]
    for shift in (1, 2, 3, 63, 64, 65, 128):
        assert abs((x[shift:] @ x[:-shift]).item()) < 5.0 * math.sqrt(n)


def test_kinds_have_fixed_numbers():
    assert (SignKind.KEYS, SignKind.VALUES, SignKind.SKETCH) == (0, 1, 2)
    assert torch.equal(random_signs(64, 5), random_signs(64, 5, 0, 0))


def test_gaussian_projection():
    s = gaussian_projection(512, 256, seed=3)
    assert s.shape == (512, 256) and s.dtype == torch.float32 and s.device.type == "cpu"
    # a golden value: Box and Muller of the first two words
    w = words(2, 3, 0, SignKind.SKETCH)
    u, v = (((word >> 11) + 0.5) * 2.0**-53 for word in w)
    radius, angle = math.sqrt(-2.0 * math.log(u)), 2.0 * math.pi * v
    assert s[0, 0].item() == pytest.approx(radius * math.cos(angle), rel=1e-6)
    assert s[0, 1].item() == pytest.approx(radius * math.sin(angle), rel=1e-6)
    # moments of N(0, 1), each within five of its own standard errors
    x, n = s.double().flatten(), s.numel()
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean().item() - mean) < 5.0 * math.sqrt(variance / n)
    assert 4.0 < x.abs().max().item() < 6.0
    # independent rows, columns, seeds and layers
    for other in (s.roll(1, 0), s.roll(1, 1), s.roll(1), gaussian_projection(512, 256, 4)):
        assert abs((s * other).double().mean().item()) < 5.0 / math.sqrt(n)
    assert not torch.equal(s, gaussian_projection(512, 256, 3, layer=1))
    # an odd count, and rows that do not depend on how many follow
    assert gaussian_projection(3, 5, 3).shape == (3, 5)
    assert torch.equal(gaussian_projection(8, 256, 3), s[:8])
    with pytest.raises(ValueError, match="at least one row"):
        gaussian_projection(0, 5, 3)


@pytest.mark.parametrize("d", DIMS)
def test_rotation_is_orthonormal(d):
    r = rotation_matrix(d, random_signs(d, 1))
    assert r.shape == (d, d) and r.dtype == np.float64
    assert np.abs(r @ r.T - np.eye(d)).max() < 1e-12
    assert np.abs(r.T @ r - np.eye(d)).max() < 1e-12


@pytest.mark.parametrize("d", DIMS)
def test_rotation_is_the_kronecker_product(d):
    """Entry by entry: blocks of n contiguous channels, the Hartley factor across the blocks."""
    m, n = split_dim(d)
    signs = random_signs(d, 4, layer=2, kind=SignKind.VALUES)
    r = rotation_matrix(d, signs)
    rng = np.random.default_rng(d)
    for row, col in rng.integers(0, d, (500, 2)):
        angle = 2.0 * math.pi * (row // n) * (col // n) / m
        hartley = (math.cos(angle) + math.sin(angle)) / math.sqrt(m)
        walsh = (-1) ** ((row % n) & (col % n)).bit_count()
        expected = hartley * walsh / math.sqrt(n) * signs[col].item()
        assert r[row, col] == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("m", (1, 3, 5, 7, 9))
def test_hartley(m):
    h = hartley_matrix(m)
    assert (h == h.T).all()
    assert np.abs(h @ h - np.eye(m)).max() < 1e-15 * 4


def test_walsh_hadamard():
    np.testing.assert_array_equal(walsh_hadamard_matrix(1), [[1]])
    np.testing.assert_array_equal(walsh_hadamard_matrix(2), [[1, 1], [1, -1]])
    h = walsh_hadamard_matrix(64)
    np.testing.assert_array_equal(h @ h, 64 * np.eye(64))


def test_split_dim():
    assert split_dim(1) == (1, 1)
    assert split_dim(128) == (1, 128)
    assert split_dim(96) == (3, 32)
    assert split_dim(80) == (5, 16)
    assert split_dim(112) == (7, 16)
    assert split_dim(576) == (9, 64)
    for d in (11, 26, 30, 120, 0, -64):
        with pytest.raises(ValueError, match="m one of"):
            split_dim(d)


def test_unsupported_arguments():
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="seed must be 0 to 2"):
            random_signs(64, seed)
    with pytest.raises(ValueError, match="layer must be 0 to 2"):
        random_signs(64, 0, layer=-1)
    for number in (1.5, "1", True, None):  # 1.5 was 1
        for name in ("seed", "layer"):
            with pytest.raises(ValueError, match=f"{name} is {number!r}, which is no whole number"):
                random_signs(64, **{"seed": 0, name: number})
    with pytest.raises(ValueError):
        random_signs(64, 0, kind=4)
    with pytest.raises(ValueError, match="d must be 1 or more"):
        random_signs(0, 0)


def test_sizes_of_numpy():
    """Their own arithmetic ends at 255, where 224 channels would have no signs at all."""
    assert torch.equal(random_signs(np.uint8(224), 3), random_signs(224, 3))
    small = gaussian_projection(np.uint8(16), np.uint8(32), 3)
    assert torch.equal(small, gaussian_projection(16, 32, 3))


def test_signs_of_another_shape():
    with pytest.raises(ValueError, match=r"shape \[64\]"):
        rotation_matrix(64, random_signs(128, 0))
