"""Weights in blocks: bytes, decoding and products against references written from the format page.

test_opcheck, test_bad_arguments, test_raw_calls, test_simd and test_parity have these ops, too.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import torch_turboquant as tt
from tests.helpers import FLOATS, assert_same_bytes, at_the_end_of_memory, load_script, randn
from torch_turboquant.format import WeightBlock
from torch_turboquant.ops.linear_reference import (
    linear_integers_reference,
    linear_packed_reference,
    rotated_weight_reference,
    weight_decode_reference,
    weight_encode_reference,
    weight_pack_reference,
    weight_unpack_reference,
)

make_golden = load_script("tests/make_golden.py")

FORMATS = (
    tt.WeightFormat(4, "lloyd", 32),
    tt.WeightFormat(4, "lloyd", 0),
    tt.WeightFormat(4, "uniform", 32),
    tt.WeightFormat(4, "uniform", 0),
    tt.WeightFormat(8, "uniform", 0),
)
CHANNELS = (64, 128, 192, 576)
formats = pytest.mark.parametrize("f", FORMATS, ids=lambda f: f"{f.grid}{f.bits}-sub{f.sub}")


class Case(NamedTuple):
    """A weight and the constants of its format, on the CPU."""

    w: Tensor
    signs: Tensor
    levels: Tensor | None
    steps: Tensor
    f: tt.WeightFormat
    scale: Tensor  # of channels

    @property
    def n(self) -> int:
        return self.w.shape[0]

    def packed(self) -> Tensor:
        """By the reference."""
        return weight_encode_reference(
            self.w, self.signs, self.levels, self.steps, self.f.bits, self.f.sub, self.scale
        )

    @property
    def reading(self) -> tuple:
        """What weight_decode and linear_packed take behind the packed weight."""
        return self.signs, self.levels, self.n, self.f.bits, self.f.sub


def make_case(f: tt.WeightFormat, n: int, k: int, seed: int = 1, dtype=torch.float32) -> Case:
    group = f.group_of(k)
    w = (0.02 * randn(n, k, seed=seed)).to(dtype)
    scale = 0.5 + torch.rand(k, generator=torch.Generator().manual_seed(seed))
    return Case(w, f.signs(group), f.levels(group), f.steps(group), f, scale)


def hard_case(f: tt.WeightFormat, n: int, k: int, dtype=torch.float32) -> Case:
    """Rows of zeros, ties, spikes, NaN, infinities, subnormals and the largest numbers."""
    case = make_case(f, n, k, dtype=dtype)
    w = case.w
    w[0] = 0
    w[1] = w[1, 0].clone()
    w[2], w[2, 7] = 0, -1.5
    w[3, 5], w[4, 6], w[5, k - 1] = torch.nan, torch.inf, -torch.inf
    w[6] *= torch.finfo(dtype).smallest_normal / 4
    w[7] *= torch.finfo(dtype).max / 4
    w[8] = (64 * w[8]).round() / 64
    w[9, : k // 2] = 0
    return case


def moved(device, *values):
    return [v.to(device) if isinstance(v, Tensor) else v for v in values]


# ---- bytes


@formats
@pytest.mark.parametrize("k", CHANNELS)
def test_bytes_of_the_encoder(f, k, device):
    for n, dtype in ((70, torch.float32), (64, torch.bfloat16), (11, torch.float16)):
        case = hard_case(f, n, k, dtype)
        packed = tt.weight_encode(
            *moved(device, case.w, case.signs, case.levels, case.steps, f.bits, f.sub, case.scale)
        )
        assert packed.shape == f.block(k).packed_shape(n, k)
        assert_same_bytes(packed, case.packed())


@formats
def test_rows_at_a_distance(f, device):
    """A weight may be a slice of another one, and end where memory ends."""
    case = make_case(f, 20, 192)
    wide = at_the_end_of_memory(torch.cat([randn(20, 7, seed=3), case.w], 1))
    for w in (wide[:, 7:], case.w.repeat_interleave(2, 0)[::2]):
        packed = tt.weight_encode(
            *moved(device, w, case.signs, case.levels, case.steps, f.bits, f.sub, case.scale)
        )
        assert_same_bytes(packed, case.packed())


@formats
@pytest.mark.parametrize("k", CHANNELS)
def test_pack_and_unpack(f, k, device):
    n, group = 70, f.group_of(k)
    packed = make_case(f, n, k).packed()
    parts = tt.weight_unpack(packed.to(device), n, group, f.bits, f.sub)
    for part, want in zip(
        parts, weight_unpack_reference(packed, n, group, f.bits, f.sub), strict=True
    ):
        assert_same_bytes(part, want)
    codes, scale, multipliers = parts
    again = tt.weight_pack(codes, scale, multipliers if f.sub else None, f.bits)
    assert_same_bytes(again, packed)


@formats
def test_every_byte_can_be_packed(f, device):
    """All codes, multipliers and bit patterns of scales; whole tiles have no unused byte."""
    n, k = 16, 128
    codes = torch.arange(n * k).view(n, k).mul(7).bitwise_right_shift(2) % 2**f.bits
    codes = codes.to(torch.uint8)
    scale = torch.randint(2**16, (n, 1), generator=torch.Generator().manual_seed(2))
    scale = scale.to(torch.int32).to(torch.uint16).view(torch.float16)
    multipliers = (torch.arange(n * 4).view(n, 4) % 16).to(torch.uint8) if f.sub else None
    packed = tt.weight_pack(*moved(device, codes, scale, multipliers, f.bits))
    assert_same_bytes(packed, weight_pack_reference(codes, scale, multipliers, f.bits))
    unpacked = tt.weight_unpack(packed, n, 128, f.bits, f.sub)
    assert_same_bytes(unpacked[0], codes)
    assert_same_bytes(unpacked[1], scale)
    if multipliers is not None:
        assert_same_bytes(unpacked[2], multipliers)


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize(("bits", "sub"), [(4, 32), (4, 0), (8, 0)])
def test_every_bit_of_a_block_has_one_owner(bits, sub, group):
    block = WeightBlock(group, bits, sub)
    owned = np.zeros(8 * block.block_bytes, dtype=int)
    for row in range(16):
        pieces = [block.code(row, channel) for channel in range(group)]
        pieces += [block.multiplier(row, s) for s in range(block.subs)]
        for piece in pieces:
            owned[8 * piece.byte + piece.shift :][: piece.width] += 1
        owned[8 * block.scale(row) :][:16] += 1
    assert (owned == 1).all()
    assert block.scales % 64 == block.block_bytes % 16 == 0


@pytest.mark.parametrize("case", make_golden.WEIGHTS, ids=str)
def test_golden_weights(case, device):
    packed = tt.weight_encode(*moved(device, *make_golden.weight_case(*case)))
    assert packed.cpu().numpy().tobytes() == make_golden.weight_file(*case).read_bytes()


@formats
def test_slices_are_slices_of_bytes(f, device):
    case = make_case(f, 150, 384)
    w, signs, levels, steps = moved(device, *case[:4])
    whole = tt.weight_encode(w, signs, levels, steps, f.bits, f.sub)
    rows = tt.weight_encode(w[48:], signs, levels, steps, f.bits, f.sub)
    assert_same_bytes(rows, whole[3:])
    columns = tt.weight_encode(w[:, 128:256], signs, levels, steps, f.bits, f.sub)
    assert_same_bytes(columns, whole[:, 1:2])


def fuzzed_weight(n: int, k: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Vectors of 64 channels of all sizes, some with ties, spikes, zeros, NaN or infinities."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k // 64, 64, generator=g)
    kind = torch.randint(12, (n, k // 64), generator=g)
    w[kind == 0] = (4 * w[kind == 0]).round() / 4
    w[kind == 1] = w[kind == 1].pow(5)
    w[kind == 2] = 0
    w[kind == 3] = w[kind == 3][:, :1]
    w *= torch.exp2(torch.randint(-24, 12, (n, k // 64, 1), generator=g))
    for value in (torch.nan, torch.inf, -torch.inf, torch.finfo(dtype).tiny):
        row = torch.randint(n, (3,), generator=g)
        w[row, torch.randint(k // 64, (3,), generator=g), 17] = value
    return w.view(n, k).to(dtype)


@pytest.mark.cuda
@formats
def test_a_million_vectors_on_both_devices(f):
    """The same bytes, and the same values when they are decoded."""
    n, k = 2048, 8192
    for seed, group in enumerate((64, 128, 128, 64, 128, 128)):  # 1.3 million
        of_group = tt.WeightFormat(f.bits, f.grid, f.sub, group)
        signs, levels, steps = (
            make(group) for make in (of_group.signs, of_group.levels, of_group.steps)
        )
        w = fuzzed_weight(n, k, seed, FLOATS[seed % 3])
        packed = tt.weight_encode(w, signs, levels, steps, f.bits, f.sub)
        on_cuda = tt.weight_encode(*moved("cuda", w, signs, levels, steps, f.bits, f.sub))
        assert torch.equal(on_cuda.cpu(), packed)
        arguments = (packed, signs, levels, n, f.bits, f.sub, FLOATS[(seed + 1) % 3])
        decoded = tt.weight_decode(*moved("cuda", *arguments))
        want = tt.weight_decode(*arguments)
        assert torch.equal(decoded.cpu().nan_to_num(), want.nan_to_num())
        assert torch.equal(decoded.isnan().cpu(), want.isnan())


@pytest.mark.cuda
def test_large_codes_lose_their_upper_bits_on_cuda():
    codes = torch.arange(256).repeat(4, 1).to(torch.uint8)
    scale = torch.ones(4, 2, dtype=torch.float16)
    multipliers = torch.arange(32).view(4, 8).to(torch.uint8)
    packed = tt.weight_pack(codes.cuda(), scale.cuda(), multipliers.cuda(), 4)
    assert_same_bytes(packed, tt.weight_pack(codes % 16, scale, multipliers % 16, 4))


# ---- decoding


@formats
@pytest.mark.parametrize("k", CHANNELS)
def test_decoding(f, k, device):
    case = hard_case(f, 70, k)
    packed = case.packed()
    for dtype in FLOATS:
        arguments = (packed, *case.reading, dtype, 1 / case.scale)
        want = weight_decode_reference(*arguments)
        assert_same_values(tt.weight_decode(*moved(device, *arguments)), want)


@formats
def test_scales_that_nothing_writes(f, device):
    """Infinite, negative and subnormal scales decode by the same formula."""
    case = make_case(f, 16, 128)
    packed = case.packed()
    start = f.block(128).scales
    halves = torch.tensor([torch.inf, -2, 6e-8, -0.0, 65504] + [1] * 11).half().view(torch.uint8)
    packed[0, 0, start : start + 32] = halves
    want = weight_decode_reference(packed, *case.reading)
    assert_same_values(tt.weight_decode(*moved(device, packed, *case.reading)), want)


def assert_same_values(actual: Tensor, want: Tensor) -> None:
    """Bit for bit, but for the payload of NaN."""
    actual = actual.cpu()
    assert torch.equal(actual.isnan(), want.isnan())
    assert_same_bytes(actual.nan_to_num(), want.nan_to_num())


def test_error_of_gaussian_weights():
    """Of the relative squared error that the design computed: 0.0079 and 0.0060 at 4 bits."""
    w = randn(512, 256, seed=5)
    most = {("lloyd", 32): 0.0061, ("lloyd", 0): 0.0080, ("uniform", 32): 0.0080}
    for (grid, sub), bound in most.items():
        f = tt.WeightFormat(4, grid, sub)
        error = tt.decode_weight(tt.encode_weight(w, f), f, 512) - w
        relative = float(error.square().mean() / w.square().mean())
        assert 0.9 * bound < relative < bound
    f = tt.WeightFormat(8)
    error = tt.decode_weight(tt.encode_weight(w, f), f, 512) - w
    assert float(error.square().mean() / w.square().mean()) < 1e-4


# ---- products: CPU; tests of CUDA are in test_linear_cuda.py


def product_bound(x: Tensor, packed: Tensor, case: Case, bias: Tensor | None) -> Tensor:
    """What roundings of float32 can add up to, and of the result's dtype: float64 [tokens, n].

    A sum has a product per 32 channels, each rounded three times and added once.
    """
    integers, unit = linear_integers_reference(x, case.signs, 1 / case.scale)
    activations = (integers.double() * unit.double()[..., None]).flatten(1)
    f, k = case.f, activations.shape[1]
    group = case.signs.shape[0]
    w = rotated_weight_reference(packed, case.levels, case.n, group, f.bits, f.sub).flatten(1)
    sums = activations.abs() @ w.double().abs().T
    if bias is not None:
        sums = sums + bias.double().abs()
    return sums.nan_to_num() * (k // 32 + 4) * 2.0**-24 + k * 2.0**-149  # and subnormals


# What rounding of a result costs: half a unit in the last place.
LAST = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def assert_within(y: Tensor, want: Tensor, bound: Tensor) -> None:
    """y is the float64 `want` up to `bound` and one rounding to its own dtype."""
    assert torch.equal(y.isnan(), want.isnan())
    bound = bound + want.abs().nan_to_num() * LAST[y.dtype]
    bound = bound + (2.0**-24 if y.dtype == torch.float16 else 0)  # subnormals
    assert ((y.double() - want).nan_to_num().abs() <= bound).all()


def check_product(x: Tensor, case: Case, packed: Tensor, bias: Tensor | None = None) -> None:
    arguments = (x, packed, *case.reading, 1 / case.scale, bias)
    y, want = tt.linear_packed(*arguments), linear_packed_reference(*arguments)
    assert y.dtype == x.dtype and y.shape == (*x.shape[:-1], case.n)
    bound = product_bound(x, packed, case, bias).view(want.shape)
    assert_within(y, want, bound)


@formats
@pytest.mark.parametrize("k", CHANNELS)
def test_products(f, k):
    case = make_case(f, 70, k)
    packed = case.packed()
    for tokens, dtype in ((1, FLOATS[0]), (3, FLOATS[1]), (4, FLOATS[2]), (21, FLOATS[0])):
        x = randn(tokens, k, seed=tokens, dtype=dtype)
        check_product(x, case, packed, randn(70, seed=4, dtype=dtype) if tokens > 1 else None)


@formats
def test_hard_activations(f):
    """Zeros, spikes, NaN and infinities of one token are not those of another."""
    case = make_case(f, 33, 192)
    x = randn(9, 192, seed=2)
    x[0], x[1, 5], x[2, 70], x[3] = 0, torch.nan, torch.inf, x[3] * 1e-42
    x[4] *= 1e30
    x[5], x[5, 100] = 0, 3.0
    x[6] = x[6, 0].clone()
    check_product(x, case, case.packed())
    broken = hard_case(f, 33, 192)
    check_product(randn(5, 192, seed=3), broken, broken.packed())


@pytest.mark.parametrize("n", [1, 15, 16, 17, 63, 64, 65, 129])
def test_any_number_of_outputs(n):
    case = make_case(FORMATS[0], n, 128)
    check_product(randn(5, 128, seed=n), case, case.packed(), randn(n, seed=1))


def test_shapes_and_strides_of_activations():
    case = make_case(FORMATS[0], 70, 128)
    packed = case.packed()
    x = randn(3, 5, 2, 128, seed=1)
    want = tt.linear_packed(x.reshape(30, 128), packed, *case.reading)
    assert torch.equal(tt.linear_packed(x, packed, *case.reading).reshape(30, 70), want)
    wide = at_the_end_of_memory(torch.cat([randn(3, 5, 2, 9, seed=2), x], -1))[..., 9:]
    assert torch.equal(tt.linear_packed(wide, packed, *case.reading).reshape(30, 70), want)
    turned = x.transpose(0, 2).contiguous().transpose(0, 2)
    assert torch.equal(tt.linear_packed(turned, packed, *case.reading).reshape(30, 70), want)
    one = tt.linear_packed(x[0, 0, 0], packed, *case.reading)
    assert torch.equal(one, want[0])
    for empty in (x[:0], x[:, :, :0]):
        y = tt.linear_packed(empty, packed, *case.reading)
        assert y.shape == (*empty.shape[:-1], 70)


def test_tokens_do_not_depend_on_each_other():
    """A token's outputs are the same bits alone and among so many that they are taken in parts."""
    case = make_case(FORMATS[0], 20, 2048)
    packed = case.packed()
    x = randn(1100, 2048, seed=1, dtype=torch.bfloat16)
    y = tt.linear_packed(x, packed, *case.reading)
    for token in (0, 15, 16, 500, 1099):
        assert torch.equal(tt.linear_packed(x[token], packed, *case.reading), y[token])


def test_no_outputs():
    packed = torch.zeros(0, 1, FORMATS[0].block(128).block_bytes, dtype=torch.uint8)
    case = make_case(FORMATS[0], 0, 128)
    assert tt.linear_packed(randn(2, 128, seed=1), packed, *case.reading).shape == (2, 0)
    assert tt.weight_decode(packed, *case.reading).shape == (0, 128)
    assert_same_bytes(case.packed(), packed)


def test_products_with_unit_vectors_give_the_weight():
    """Up to the rounding of one activation, 1/127 of a channel in the rotated space."""
    case = make_case(FORMATS[0], 70, 128)
    packed = case.packed()
    decoded = tt.weight_decode(packed, *case.reading, torch.float32, 1 / case.scale)
    y = tt.linear_packed(torch.eye(128), packed, *case.reading, 1 / case.scale)
    assert float((y.T - decoded).norm() / decoded.norm()) < 0.01


def test_tiny(device):
    """For compute-sanitizer."""
    for f in FORMATS:
        case = hard_case(f, 17, 64)
        w, signs, levels, steps, scale = moved(device, *case[:4], case.scale)
        packed = tt.weight_encode(w, signs, levels, steps, f.bits, f.sub, scale)
        assert_same_bytes(packed, case.packed())
        tt.weight_decode(packed, signs, levels, 17, f.bits, f.sub)
        codes, half, multipliers = tt.weight_unpack(packed, 17, 64, f.bits, f.sub)
        again = tt.weight_pack(codes, half, multipliers if f.sub else None, f.bits)
        assert_same_bytes(again, packed)
