"""linear_packed on a GPU: products against float64, for every way in which its work is shared.

A few tokens multiply codes as bytes; thread blocks share rows, channels or both. More of them
multiply codes that become float16, in tiles, and many multiply decoded rows by a matrix product of
torch's (csrc/choices/linear.h). GPUs without products of warpgroups have no tiles. Small weights
take tiles in float32 only, so most tests of tiles are in float32; WIDE is for the other dtypes.
"""

import functools
import re

import pytest
import torch

import torch_turboquant as tt
from tests.helpers import FLOATS, launched, randn
from tests.test_linear import (
    FORMATS,
    LAST,
    Case,
    assert_within,
    formats,
    hard_case,
    make_case,
    moved,
    product_bound,
)
from torch_turboquant.choices import kernel_choice
from torch_turboquant.ops.hadamard import core_reference
from torch_turboquant.ops.linear_reference import linear_packed_reference, rotated_weight_reference

pytestmark = pytest.mark.cuda


def on_gpu(x, case: Case, packed, bias=None):
    arguments = moved("cuda", x, packed, *case.reading, 1 / case.scale, bias)
    y, again = (tt.linear_packed(*arguments).cpu() for _ in range(2))
    assert torch.equal(y.view(torch.uint8), again.view(torch.uint8))  # NaN included
    return y


def kernel_of(x, case: Case) -> str:
    tokens, k = x[..., 0].numel(), x.shape[-1]
    return kernel_choice("linear_packed", tokens=tokens, n=case.n, k=k, dtype=x.dtype).kernel


def has_tiles() -> bool:
    return kernel_choice("linear_packed", tokens=65, n=4096, k=4096).kernel == "tiles"


def check(x, case: Case, packed=None, bias=None, kernel=None):
    """kernel: the one that takes the call on a GPU that has tiles."""
    packed = case.packed() if packed is None else packed
    y, chosen = on_gpu(x, case, packed, bias), kernel_of(x, case)
    assert chosen == kernel or kernel is None or not has_tiles()
    if chosen == "tiles":
        want, bound = of_tiles(x, packed, case, bias)
    elif chosen == "codes":
        want = linear_packed_reference(x, packed, *case.reading, 1 / case.scale, bias)
        bound = product_bound(x, packed, case, bias).view(want.shape)
    else:
        return check_decoded(y, x, case, packed, bias)
    assert y.dtype == x.dtype and y.shape == want.shape
    assert_within(y, want, bound)


def check_decoded(y, x, case: Case, packed, bias):
    """The product is torch's: float32 sums of k roundings, maybe of parts rounded to the dtype."""
    inside = moved("cuda", packed, *case.reading)
    w = tt.weight_decode(*inside, x.dtype, (1 / case.scale).cuda()).double()
    want = x.cuda().double() @ w.T + (0 if bias is None else bias.cuda().double())
    assert y.dtype == x.dtype and y.shape == want.shape
    allowed = 2 * LAST[x.dtype] + x.shape[-1] ** 0.5 * 2.0**-24
    assert float((y.cuda() - want).norm() / want.norm()) < allowed


@functools.lru_cache(maxsize=1)
def rotated_weight(packed, case: Case):
    """float64 [n, k] in the rotated space, on the GPU: float64 is slow on a CPU."""
    f, group = case.f, case.signs.shape[0]
    w = rotated_weight_reference(packed, case.levels, case.n, group, f.bits, f.sub)
    return w.flatten(1).cuda().double()


def of_tiles(x, packed, case: Case, bias):
    """Products in float64, and what the roundings of tiles add up to: float64 [tokens, n] both.

    Activations are rounded to float16, relative to themselves and to the token's largest channel,
    which is 2^11 or more then, and those of bfloat16 to 8 bits. Weights are 1/8 of the decoded
    ones; factor and product are rounded.
    """
    x, signs, scale = moved("cuda", x, case.signs, case.scale)
    group = signs.shape[0]
    inside = x.double() * (1 / scale).double()
    hadamard = core_reference(torch.eye(group)).double().sign().cuda() / group**0.5
    turned = (signs.double() * inside.unflatten(-1, (-1, group))) @ hadamard
    broken = ~torch.isfinite(inside).all(-1, keepdim=True)
    v = torch.where(broken, torch.nan, turned.flatten(-2)).flatten(0, -2)
    w = rotated_weight(packed, case)
    y = v @ w.T
    sizes, weights = v.abs().nan_to_num(), w.abs().nan_to_num()
    largest = inside.abs().amax(-1).flatten().nan_to_num(posinf=0)[:, None]
    channels = v.shape[1]
    eight_bits = x.dtype == torch.bfloat16
    rounding = 2 * 2.0**-11 + (2.0**-9 + 2.0**-12 if eight_bits else 2.0**-11)
    bound = (sizes @ weights.T) * (rounding + channels * 2.0**-23)
    smallest = 2.0 ** (-32 if eight_bits else -35)  # what is lost of subnormal numbers
    bound = bound + largest * smallest * weights.sum(1) + sizes.sum(1, keepdim=True) * 2.0**-21
    bound = bound + 2.0**-148
    if bias is not None:
        y = y + bias.cuda().double()
        bound = bound + bias.cuda().double().abs() * 2.0**-23
    return y.unflatten(0, x.shape[:-1]).cpu(), bound.view(*x.shape[:-1], case.n).cpu()


def wide_case(f, n: int, k: int):
    """A weight and its bytes, by the encoder: the reference takes seconds for a large one."""
    case = make_case(f, n, k)
    w, signs, levels, steps, scale = moved("cuda", *case[:4], case.scale)
    return case, tt.weight_encode(w, signs, levels, steps, f.bits, f.sub, scale).cpu()


@formats
@pytest.mark.parametrize("k", [64, 128, 192, 576, 1024])
def test_products(f, k):
    case = make_case(f, 70, k)
    packed = case.packed()
    for tokens in (1, 2, 3, 8, 9, 16, 17, 32, 33, 64, 65, 130):
        dtype = FLOATS[tokens % 3]
        x = randn(tokens, k, seed=tokens, dtype=dtype)
        check(x, case, packed, randn(70, seed=4, dtype=dtype) if tokens % 2 else None)


@formats
def test_channels_are_shared_by_thread_blocks(f):
    """Few rows and many channels: the last of the blocks of a row adds their sums."""
    case = make_case(f, 40, 8192)
    packed = case.packed()
    for tokens in (1, 5, 16, 40):
        check(randn(tokens, 8192, seed=tokens), case, packed)


@pytest.mark.parametrize("f", FORMATS[:1] + FORMATS[-1:], ids=str)
@pytest.mark.parametrize(
    ("n", "k"),
    [
        (16, 64),
        (48, 128),
        (256, 8960),
        (640, 1024),
        (1000, 4160),
        (4500, 1088),
        (7000, 640),
        (40000, 128),
    ],
)
def test_units_are_shared_by_warps(f, n, k):
    """Warps begin and end within rows, have many or none; blocks share channels, or tokens."""
    case = make_case(f, n, k)
    packed = case.packed()
    for tokens in (1, 2, 8, 9, 16, 17, 33, 64, 70):
        dtype = FLOATS[0] if tokens <= 16 else FLOATS[1 + tokens % 2]
        x, bias = randn(tokens, k, seed=tokens, dtype=dtype), randn(n, seed=4, dtype=dtype)
        check(x, case, packed, bias, "codes" if tokens <= 64 or n * k <= 5_000_000 else None)


@pytest.mark.parametrize(
    ("n", "k", "tokens", "tiles"),
    [
        (2048, 2048, 1, 1),
        (2048, 2048, 16, 1),  # two blocks of eight columns
        (24000, 1088, 16, 2),
        (24000, 1088, 31, 4),
        (24000, 1088, 32, 4),
    ],
)
@formats
def test_the_kernel_of_so_many_columns(f, n, k, tokens, tiles):
    """A kernel of too many columns would give the right results, in more time."""
    if not has_tiles():
        pytest.skip("other GPUs have other kernels")
    case, packed = wide_case(f, n, k)
    x = randn(tokens, k, seed=tokens, dtype=torch.bfloat16)
    check(x, case, packed, randn(n, seed=4, dtype=x.dtype), "codes")
    arguments = moved("cuda", x, packed, *case.reading)
    names = launched(lambda: tt.linear_packed(*arguments))
    found = [re.search(r"linear_kernel<.*, (\d), (?:\(bool\))?(\w+)>", name) for name in names]
    kernels = [(int(m[1]), m[2] in ("1", "true")) for m in found if m]
    own = tokens == 1 and f.bits == 4 and f.sub > 0  # one column and multipliers
    assert kernels == [(tiles, own)], names


EDGES = (17, 31, 33, 63, 64, 65, 95, 97, 127, 128, 129, 159, 160, 161, 191, 192, 193, 223, 224, 225)
WIDE = ((70, 372096), (200, 131136), (513, 51200))
"""Weights (n, k) of more than 17 million numbers: 33 to 257 tokens of 16 bits take tiles."""


@formats
@pytest.mark.parametrize(("n", "k"), [(16, 64), (70, 192), (300, 1024), (513, 4160)])
def test_neighbours_of_tiles(f, n, k):
    """Tiles that are full, or miss a token or a row, alone and beside others."""
    case = make_case(f, n, k)
    packed = case.packed()
    for tokens in (16, *EDGES, 255, 256, 257):
        dtypes = FLOATS if tokens in (65, 257) else FLOATS[:1]
        for dtype in dtypes:
            x = randn(tokens, k, seed=tokens, dtype=dtype)
            bias = randn(n, seed=4, dtype=dtype) if tokens % 2 else None
            in_tiles = dtype == torch.float32 and 17 <= tokens <= 256
            check(x, case, packed, bias, "tiles" if in_tiles else None)


@formats
@pytest.mark.parametrize(("n", "k"), WIDE)
def test_16_bit_neighbours_of_tiles(f, n, k):
    case, packed = wide_case(f, n, k)
    for i, tokens in enumerate((16, *EDGES, 255, 256, 257)):
        x = randn(tokens, k, seed=tokens, dtype=FLOATS[1 + i % 2])
        bias = randn(n, seed=4, dtype=x.dtype) if tokens % 2 else None
        check(x, case, packed, bias, "tiles" if tokens > 32 else "codes")


def test_many_tokens_in_tiles():
    """More tokens than the largest tile has."""
    case, packed = wide_case(FORMATS[0], 600, 36864)
    for i, tokens in enumerate((257, 320, 383, 385, 449, 513)):
        check(
            randn(tokens, 36864, seed=tokens, dtype=FLOATS[1 + i % 2]), case, packed, None, "tiles"
        )


@pytest.mark.parametrize("n", [127, 128, 129, 191, 193, 255, 257, 383, 385, 511, 513])
def test_rows_beside_tiles(n):
    """The last tile of rows is full, has a row more, or misses one."""
    case = make_case(FORMATS[0], n, 256)
    packed = case.packed()
    for tokens in (40, 64, 90, 100, 129, 256):
        check(randn(tokens, 256, seed=n), case, packed, randn(n, seed=4), "tiles")


@formats
def test_channels_of_tiles_are_shared(f):
    """Few rows and many channels, which several workers share."""
    case = make_case(f, 40, 8256)
    packed = case.packed()
    for tokens in (33, 65, 200, 256):
        check(randn(tokens, 8256, seed=tokens), case, packed, None, "tiles")


@pytest.mark.parametrize("f", FORMATS[:1] + FORMATS[-1:], ids=str)
@pytest.mark.parametrize(("n", "k"), [(2600, 1024), (1024, 4096), (9001, 576), (20000, 128)])
def test_slices_are_shared_by_workers(f, n, k):
    """Tiles that several workers share, whole ones between them, and fewer tiles than workers."""
    case, packed = wide_case(f, n, k)
    for tokens in (34, 50, 90, 120, 150, 256):
        check(randn(tokens, k, seed=tokens), case, packed, randn(n, seed=4), "tiles")


@pytest.mark.parametrize("f", FORMATS[:1] + FORMATS[-1:], ids=str)
@pytest.mark.parametrize(("n", "k"), [(6500, 4096), (2048, 12800), (24000, 1088)])
def test_16_bit_slices_are_shared_by_workers(f, n, k):
    case, packed = wide_case(f, n, k)
    for tokens in (40, 50, 90, 120, 150, 300, 500):
        dtype = FLOATS[1 + tokens // 10 % 2]
        x, bias = randn(tokens, k, seed=tokens, dtype=dtype), randn(n, seed=4, dtype=dtype)
        check(x, case, packed, bias, "tiles")


TILES = {
    FORMATS[0]: {
        64: [(1537, 576, 200), (17000, 128, 40)],
        96: [(5120, 576, 96), (500, 128, 40)],
        128: [(2048, 576, 200), (9001, 128, 100)],
        160: [(3001, 576, 150), (9001, 128, 150)],
        192: [(17000, 192, 192), (9001, 128, 192)],
        224: [(17000, 192, 200), (9001, 128, 200)],
        256: [(20000, 192, 256), (9001, 128, 256)],
    },
    FORMATS[-1]: {
        64: [(1537, 576, 200), (17000, 128, 40)],
        96: [(5120, 576, 96), (3271, 128, 256)],
        128: [(2048, 576, 200), (7001, 128, 200)],
        160: [(5120, 576, 160), (9001, 128, 150)],
        192: [(17000, 192, 192), (9001, 128, 192)],
        224: [(17000, 192, 200), (9001, 128, 200)],
        256: [(12289, 128, 256)],
    },
}
"""Calls (n, k, tokens) that take tiles of so many tokens: with k = 128 whole ones, else shared."""


@pytest.mark.parametrize(
    ("f", "tile", "shape"),
    [(f, t, shape) for f, tiles in TILES.items() for t, some in tiles.items() for shape in some],
    ids=lambda x: f"{x.bits} bits" if isinstance(x, tt.WeightFormat) else str(x),
)
def test_every_tile(f, tile, shape):
    n, k, tokens = shape
    case, packed = wide_case(f, n, k)
    x, bias = randn(tokens, k, seed=4), randn(n, seed=4)
    check(x, case, packed, bias, "tiles")
    has_tiles = kernel_of(x, case) == "tiles"  # not all GPUs have
    # The plan depends on the number of multiprocessors.
    if has_tiles and torch.cuda.get_device_properties(0).multi_processor_count == 132:
        names = launched(lambda: on_gpu(x, case, packed, bias))
        assert any(f"stream_k_kernel<{tile}," in name for name in names), names


def test_tiles_do_not_depend_on_other_tokens():
    """A token has the same bits whatever else is in its tile."""
    case = make_case(FORMATS[0], 300, 1024)
    arguments = moved("cuda", case.packed(), *case.reading)
    for tokens in (60, 200, 256):
        x = randn(tokens, 1024, seed=1)
        y = on_gpu(x, case, arguments[0].cpu())
        x[1:] = torch.nan
        assert torch.equal(on_gpu(x, case, arguments[0].cpu())[0], y[0])


@pytest.mark.parametrize("n", [1, 15, 16, 17, 2200, 5000])
def test_rows_are_shared_by_thread_blocks(n):
    case = make_case(FORMATS[0], n, 128)
    packed = case.packed()
    for tokens in (1, 9, 64):
        x = randn(tokens, 128, seed=n, dtype=torch.bfloat16)
        check(x, case, packed, randn(n, seed=1, dtype=torch.bfloat16))


@formats
def test_hard_activations(f):
    case = make_case(f, 33, 192)
    x = randn(9, 192, seed=2)
    x[0], x[1, 5], x[2, 70], x[3] = 0, torch.nan, torch.inf, x[3] * 1e-42
    x[4] *= 1e30
    x[5], x[5, 100] = 0, 3.0
    check(x, case)
    check(x[3:4], case)
    check(torch.cat([x] * 5), case)
    broken = hard_case(f, 33, 192)
    for tokens in (5, 40):
        check(randn(tokens, 192, seed=3), broken)


def test_shapes_and_strides():
    case = make_case(FORMATS[0], 70, 128)
    packed = case.packed().cuda()
    reading = moved("cuda", *case.reading)
    x = randn(3, 5, 2, 128, seed=1).cuda()
    want = tt.linear_packed(x.reshape(30, 128), packed, *reading)
    assert torch.equal(tt.linear_packed(x, packed, *reading).view(30, 70), want)
    wide = torch.zeros(3, 5, 2, 256, device="cuda")
    wide[..., :128] = x
    assert torch.equal(tt.linear_packed(wide[..., :128], packed, *reading).view(30, 70), want)
    turned = x.transpose(0, 2).contiguous().transpose(0, 2)
    assert torch.equal(tt.linear_packed(turned, packed, *reading).view(30, 70), want)
    shifted = torch.zeros(30 * 128 + 1, device="cuda")[1:].view(30, 128)  # not aligned
    shifted.copy_(x.view(30, 128))
    assert torch.equal(tt.linear_packed(shifted, packed, *reading), want)
    assert tt.linear_packed(x[:0], packed, *reading).shape == (0, 5, 2, 70)


@pytest.mark.parametrize("tokens", [1000, 1600])
def test_many_tokens(tokens):
    """Tiles or decoded rows: activations are not rounded to bytes there."""
    case = make_case(FORMATS[0], 200, 256)
    packed = case.packed()
    w = tt.weight_decode(packed, *case.reading, torch.float32).double()
    for dtype in FLOATS:
        x, bias = randn(tokens, 256, seed=3, dtype=dtype), randn(200, seed=4, dtype=dtype)
        exact = (x.double() * (1 / case.scale).double()) @ w.T + bias.double()
        y = on_gpu(x, case, packed, bias).double()
        relative = (y - exact).norm() / exact.norm()
        assert relative < {FLOATS[0]: 1e-2, FLOATS[1]: 1e-2, FLOATS[2]: 1.2e-2}[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [2, 40, 200])
def test_a_graph_of_layers(tokens, dtype):
    """Launches that overlap: each layer reads what the one before it wrote.

    In bfloat16 the weights are decoded for 200 tokens, in float32 they are not.
    """
    f = FORMATS[0]
    cases = [make_case(f, 256, 256, seed=i) for i in range(6)]
    layers = [moved("cuda", c.packed(), *c.reading) for c in cases]
    x = randn(tokens, 256, seed=9, dtype=dtype).cuda()

    def run(y):
        for packed, *reading in layers:
            y = tt.linear_packed(y, packed, *reading)
            y = y / y.float().square().mean(-1, keepdim=True).sqrt().to(y.dtype)
            y = tt.linear_packed(y, packed, *reading)
        return y

    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = run(x)
    for seed in range(3):
        x.copy_(randn(tokens, 256, seed=seed, dtype=dtype))
        graph.replay()
        want = run(x)
        assert torch.equal(out, want)


@pytest.mark.parametrize("tokens", [1, 16, 32])
def test_a_graph_of_a_wide_layer(tokens):
    """In a graph the ring of weights is filled before the activations are there."""
    case, packed = wide_case(FORMATS[0], 24000, 1088)
    packed, *reading = moved("cuda", packed, *case.reading)
    x = torch.zeros(tokens, 1088, dtype=torch.bfloat16, device="cuda")

    def run():
        y = tt.linear_packed(x + 1, packed, *reading)
        return tt.linear_packed(y[:, :1088].contiguous(), packed, *reading)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed in range(3):
        x.copy_(randn(tokens, 1088, seed=seed, dtype=x.dtype))
        graph.replay()
        assert torch.equal(out, run())


@pytest.mark.parametrize("tokens", [3, 40, 200])
def test_several_streams(tokens):
    case = make_case(FORMATS[0], 40, 8192)
    packed, *reading = moved("cuda", case.packed(), *case.reading)
    xs = [randn(tokens, 8192, seed=i).cuda() for i in range(4)]
    want = [tt.linear_packed(x, packed, *reading) for x in xs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in xs]
    for _ in range(5):
        found = []
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(tt.linear_packed(x, packed, *reading))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 40, 200])
def test_weights_that_the_previous_kernel_wrote(tokens, dtype):
    """A launch may begin before the kernel ends that writes the weights; it must not use them."""
    f = FORMATS[0]
    cases = [make_case(f, 512, 1024, seed=i) for i in range(2)]
    packed = [c.packed().cuda() for c in cases]
    reading = moved("cuda", *cases[0].reading)
    x = randn(tokens, 1024, seed=1, dtype=dtype).cuda()
    want = [tt.linear_packed(x, p, *reading) for p in packed]
    shared = torch.empty_like(packed[0])
    for i in range(200):
        shared.copy_(packed[i % 2])
        assert torch.equal(tt.linear_packed(x, shared, *reading), want[i % 2])


def test_tiny():
    """A small case for compute-sanitizer."""
    for f in FORMATS[:2]:
        case = make_case(f, 20, 128)
        for tokens in (2, 20, 40, 90, 120, 140):
            check(randn(tokens, 128, seed=1), case)
