"""CUDA against the CPU: the same bytes wherever bytes are written; views, streams, graphs.

Every op is one `Case`: how to make its inputs on the CPU, how to call it, and how far two right
results may differ. (cache_store and cache_load are compared in
test_cache.py and test_cache_load.py.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import torch_turboquant as tt
from tests.helpers import (
    CODEBOOKS,
    FLOATS,
    HEAD_DIMS,
    assert_same_bytes,
    busy_gpu,
    code_score_rounding,
    codebook_tensors,
    generator,
    hard_vectors,
    multiprocessors,
    randn,
    signs_of,
    sketch_score_rounding,
)
from torch_turboquant.format import valid_vector_dim
from torch_turboquant.signs import SignKind, random_signs

pytestmark = pytest.mark.cuda

ALL_DIMS = [d for d in range(2, 4097) if valid_vector_dim(d)]
EPS = 2.0**-24
Tensors = dict[str, Tensor | None]


class Case(NamedTuple):
    inputs: Callable[[int, torch.dtype, int], Tensors]
    """(d, dtype, seed) -> arguments, on the CPU; "x" is the one that changes in graphs."""
    call: Callable[[Tensors, int, torch.dtype], tuple[Tensor, ...]]
    """(arguments, d, dtype) -> results."""
    bound: Callable[[Tensors], Tensor] | None = None
    """Of the difference of floating-point results; None: no difference."""


def to(inputs: Tensors, device: torch.device | str) -> Tensors:
    return {name: None if t is None else t.to(device) for name, t in inputs.items()}


def cpu(results: tuple[Tensor, ...]) -> list[Tensor]:
    return [r.cpu() for r in results]


def compare(case: Case, inputs: Tensors, actual, expected) -> None:
    for a, e in zip(actual, expected, strict=True):
        a = a.cpu()
        if case.bound is None or not e.is_floating_point():
            broken = e.isnan() if e.is_floating_point() else torch.zeros_like(e, dtype=torch.bool)
            if e.is_floating_point():  # any NaN is one
                assert torch.equal(a.isnan(), broken)
            assert_same_bytes(a[~broken], e[~broken])
        else:
            assert a.dtype == e.dtype and a.shape == e.shape
            bound = case.bound(inputs).expand(e.shape)
            assert torch.equal(a.isnan(), e.isnan())
            good = ~e.isnan() & (a != e)  # equal infinities differ by NaN
            assert ((a.double() - e.double()).abs() <= bound)[good].all()


def vectors(d: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random directions of many lengths, and everything that hard_vectors knows."""
    sizes = torch.logspace(-4, 4, 24)[:, None]
    hard = hard_vectors(d, signs_of(d, seed)) if d >= 8 and d <= 1024 else randn(2, d, seed=seed)
    return torch.cat([randn(24, d, seed=seed) * sizes, hard]).to(dtype)


# ---- the ops


def bit_strings(bits: int) -> tuple[Case, Case]:
    def codes(d, dtype, seed):
        x = torch.randint(2**bits, (37, d), generator=generator(seed), dtype=torch.uint8)
        return {"x": x}

    def packed(d, dtype, seed):
        return {"x": tt.pack(codes(d, dtype, seed)["x"], bits)}

    return (
        Case(codes, lambda t, d, dtype: (tt.pack(t["x"], bits),)),
        Case(packed, lambda t, d, dtype: (tt.unpack(t["x"], bits, d),)),
    )


def groups(group: int, bits: int) -> tuple[Case, Case]:
    def floats(d, dtype, seed):
        x = vectors(-(-d // 64) * 64, dtype, seed)
        x[3, :40] = torch.tensor([0.0, -0.0]).repeat(20)  # zeros of both signs, alone and not
        return {"x": x}

    def encode(t, d, dtype):
        return tt.group_encode(t["x"], group, bits)

    def encoded(d, dtype, seed):
        x, scale, zero = encode(floats(d, dtype, seed), d, dtype)
        return {"x": x, "scale": scale, "zero": zero}

    def decode(t, d, dtype):
        d = t["x"].shape[-1] * 8 // bits
        return (tt.group_decode(t["x"], t["scale"], t["zero"], group, bits, d, dtype),)

    return Case(floats, encode), Case(encoded, decode)


def projection(kind: str, d: int) -> Tensor:
    if kind == "dense":
        return tt.gaussian_projection(24, d, 3)
    return random_signs(d, 3, kind=SignKind.SKETCH)


def sketch(kind: str) -> Case:
    def inputs(d, dtype, seed):
        return {"x": vectors(d, dtype, seed), "projection": projection(kind, d)}

    return Case(inputs, lambda t, d, dtype: tt.qjl_sketch(t["x"], t["projection"]))


def score_inputs(d, dtype, seed, bits, grid, kind=None, center=False):
    """Two heads, three queries, 70 keys."""
    q, x = randn(2, 3, d, seed=seed, dtype=dtype), randn(2, 70, d, seed=seed + 1)
    levels, steps = codebook_tensors(d, bits, grid, 2)
    mean = randn(d, seed=seed + 2) if center else None
    packed, scale = tt.encode(x, signs_of(d), levels, steps, bits, "mse", mean)
    scale[1, 5] = torch.nan  # a key that could not be encoded
    inputs = {"x": q, "packed": packed, "scale": scale, "signs": signs_of(d)}
    inputs |= {"levels": levels, "center": mean}
    if kind:
        s = projection(kind, d)
        decoded = tt.decode(packed, scale, signs_of(d), levels, bits, mean).nan_to_num()
        sign_bits, norm = tt.qjl_sketch(x - decoded, s)
        inputs |= {"sign_bits": sign_bits, "norm": norm, "projection": s}
    return inputs


def score_bound(t: Tensors) -> Tensor:
    """Float32 sums of d products, twice: 2 d roundings of what has the size |q| times the key's
    length (and center, and residual); and queries of 16-bit integers on the CPU."""
    d = t["x"].shape[-1]
    size = t["scale"].double().nan_to_num()[..., None, :] * (4 * d**0.5)
    rounding = code_score_rounding(t["x"], t["signs"], size[..., 0, :], 8)
    if t.get("norm") is not None:
        size = size + 4 * t["norm"].double()[..., None, :] * d**0.5
        rounding += sketch_score_rounding(t["x"], t["norm"].nan_to_num(), t["projection"])
    if t["center"] is not None:
        size = size + t["center"].double().norm()
    return rounding + 4 * d * EPS * t["x"].double().norm(dim=-1)[..., None] * size


def scores(bits: int, grid: str, kind: str | None = None, center: bool = False) -> Case:
    def call(t, d, dtype):
        return (
            tt.score(
                t["x"],
                t["packed"],
                t["scale"],
                t["signs"],
                t["levels"],
                bits,
                t["center"],
                t.get("sign_bits"),
                t.get("norm"),
                t.get("projection"),
            ),
        )

    return Case(
        lambda d, dtype, seed: score_inputs(d, dtype, seed, bits, grid, kind, center),
        call,
        score_bound,
    )


def sketch_scores(kind: str) -> Case:
    def inputs(d, dtype, seed):
        q, s = randn(2, 3, d, seed=seed, dtype=dtype), projection(kind, d)
        sign_bits, norm = tt.qjl_sketch(randn(2, 70, d, seed=seed + 1), s)
        norm[0, 7] = torch.nan
        return {"x": q, "sign_bits": sign_bits, "norm": norm, "projection": s}

    def bound(t):
        d = t["x"].shape[-1]
        norm = t["norm"].double().nan_to_num()
        rounding = sketch_score_rounding(t["x"], norm, t["projection"])
        size = 4 * norm[..., None, :] * d**0.5
        return rounding + 4 * d * EPS * t["x"].double().norm(dim=-1)[..., None] * size

    return Case(
        inputs,
        lambda t, d, dtype: (tt.qjl_score(t["x"], t["sign_bits"], t["norm"], t["projection"]),),
        bound,
    )


def merge() -> Case:
    def inputs(d, dtype, seed):
        x, b = randn(9, 5, d, seed=seed, dtype=dtype), randn(9, 5, d, seed=seed + 1, dtype=dtype)
        lse_a, lse_b = 5 * randn(9, 5, seed=seed + 2), 5 * randn(9, 5, seed=seed + 3)
        lse_a[0, :3] = lse_b[0, 2:] = -torch.inf  # a side without keys may hold anything
        x[0, :3] = b[0, 2:] = torch.nan
        lse_a[1], lse_b[1] = 300, -300
        return {"x": x, "lse_a": lse_a, "b": b, "lse_b": lse_b}

    def call(t, d, dtype):
        return tt.merge_attention(t["x"], t["lse_a"], t["b"], t["lse_b"])

    def bound(t):
        """A unit in the last place of the output's dtype; exp and log are right to a few ulp."""
        return torch.tensor(torch.finfo(t["x"].dtype).eps * 8 + 64 * 8 * EPS)

    return Case(inputs, call, bound)


def codec(bits: int, grid: str, search: int, mode: str) -> tuple[Case, Case]:
    def floats(d, dtype, seed):
        levels, steps = codebook_tensors(d, bits, grid, search)
        center = randn(d, seed=seed + 5) if mode == "unbiased" else None
        x = vectors(d, dtype, seed)
        return {"x": x, "signs": signs_of(d), "levels": levels, "steps": steps, "center": center}

    def encode(t, d, dtype):
        return tt.encode(t["x"], t["signs"], t["levels"], t["steps"], bits, mode, t["center"])

    def encoded(d, dtype, seed):
        t = floats(d, dtype, seed)
        x, scale = encode(t, d, dtype)
        return t | {"x": x, "scale": scale}

    def decode(t, d, dtype):
        levels, center = t["levels"], t["center"]
        return (tt.decode(t["x"], t["scale"], t["signs"], levels, bits, center, dtype),)

    return Case(floats, encode), Case(encoded, decode)


CASES = {
    "hadamard": Case(
        lambda d, dtype, seed: (
            {"x": vectors(d, dtype, seed).nan_to_num(posinf=1, neginf=-1) / 4096}
            | {"signs": signs_of(d)}
        ),
        lambda t, d, dtype: (tt.hadamard(t["x"], t["signs"]),),
    ),
    "pack": bit_strings(3)[0],
    "unpack": bit_strings(3)[1],
    "encode": codec(4, "lloyd", 8, "unbiased")[0],
    "decode": codec(4, "lloyd", 8, "unbiased")[1],
    "group_encode": groups(32, 4)[0],
    "group_decode": groups(32, 4)[1],
    "sketch": sketch("structured"),
    "dense sketch": sketch("dense"),
    "score": scores(4, "lloyd", "structured", center=True),
    "qjl_score": sketch_scores("structured"),
    "dense qjl_score": sketch_scores("dense"),
    "merge_attention": merge(),
}


def check(case: Case, d: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> None:
    inputs = case.inputs(d, dtype, seed)
    results = case.call(to(inputs, "cuda"), d, dtype)
    compare(case, inputs, results, case.call(inputs, d, dtype))


def takes(name: str, d: int) -> bool:
    """Sketches have whole bytes."""
    return d % 8 == 0 or name not in ("sketch", "score", "qjl_score")


# ---- values


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("name", CASES)
def test_dtypes(name, d, dtype):
    check(CASES[name], d, dtype)


@pytest.mark.parametrize("d", ALL_DIMS)
def test_all_dims(d):
    for name, case in CASES.items():
        if takes(name, d):
            check(case, d, torch.bfloat16, seed=d)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("d", [1, 2, 7, 8, 30, 63, 64, 80, 128, 1000, 4096, 8191, 8192, 70001])
def test_bit_strings(bits, d):
    for case in bit_strings(bits):
        check(case, d)


@pytest.mark.parametrize("offset", range(5))
@pytest.mark.parametrize("bits", range(1, 9))
def test_bit_strings_at_any_address(bits, offset):
    codes = torch.randint(2**bits, (3000,), generator=generator(bits), dtype=torch.uint8)
    for d in (24, 25):
        rows = (3000 - offset) // d
        x = codes.cuda()[offset : offset + rows * d].view(rows, d)
        packed = tt.pack(x, bits)
        assert_same_bytes(packed, tt.pack(x.cpu(), bits))
        shifted = torch.cat([packed.new_zeros(offset), packed.flatten()])[offset:]
        assert_same_bytes(tt.unpack(shifted.view(packed.shape), bits, d), x)


@pytest.mark.parametrize("bits", range(1, 8))
def test_too_large_codes_lose_their_upper_bits(bits):
    """The CPU raises; here that would take a synchronisation."""
    for d in (40, 41):
        x = torch.randint(256, (5, d), generator=generator(d), dtype=torch.uint8)
        assert_same_bytes(tt.pack(x.cuda(), bits), tt.pack(x & 2**bits - 1, bits))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("group", "bits"), [(g, b) for g in (32, 64) for b in (2, 4)])
def test_groups(group, bits, dtype):
    for case in groups(group, bits):
        for d in (64, 192, 4096):
            check(case, d, dtype, seed=group + bits)


@pytest.mark.parametrize(("bits", "grid"), CODEBOOKS)
@pytest.mark.parametrize("d", [2, 20, 64, 80, 112, 128, 144, 288, 512, 4096])
def test_scores_of_every_codebook(d, bits, grid):
    for kind in (None, "structured", "dense"):
        if kind != "structured" or d % 8 == 0:
            check(scores(bits, grid, kind, center=bits % 2 == 0), d, seed=bits)


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("keys", [1, 31, 32, 33, 300, 5000])
@pytest.mark.parametrize("bits", [3, 4])
def test_shapes_of_scores(queries, keys, bits):
    d = 128
    q, x = randn(3, queries, d, seed=queries), randn(3, keys, d, seed=keys)
    levels, steps = codebook_tensors(d, bits, "lloyd", 1)
    packed, scale = tt.encode(x, signs_of(d), levels, steps, bits)
    inputs = {"x": q, "packed": packed, "scale": scale, "signs": signs_of(d), "levels": levels}
    inputs |= {"center": None, "sign_bits": None, "norm": None, "projection": None}
    case = scores(bits, "lloyd")
    compare(case, inputs, case.call(to(inputs, "cuda"), d, q.dtype), case.call(inputs, d, q.dtype))


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e-10, 1e10, 1e30])
def test_scores_of_queries_of_any_size(size):
    """The integers that stand for a query adapt to it."""
    for case in (scores(4, "lloyd", "structured"), sketch_scores("dense")):
        inputs = case.inputs(64, torch.float32, 3)
        inputs["x"] = inputs["x"] * size
        inputs["x"][0, 0, 0] *= 100
        results = case.call(to(inputs, "cuda"), 64, torch.float32)
        tiny = 2.0**-127  # results may be subnormal
        loose = case._replace(bound=lambda t, b=case.bound, tiny=tiny: b(t) + tiny)
        compare(loose, inputs, results, case.call(inputs, 64, torch.float32))


def test_broken_queries_spoil_only_themselves():
    case = scores(4, "lloyd", "structured")
    inputs = case.inputs(128, torch.float32, 4)
    clean = case.call(to(inputs, "cuda"), 128, torch.float32)[0].cpu()
    for bad in (torch.nan, torch.inf):
        inputs["x"][1, 1, 17] = bad
        (out,) = cpu(case.call(to(inputs, "cuda"), 128, torch.float32))
        assert out[1, 1].isnan().all()
        keep = torch.ones(2, 3, dtype=torch.bool)
        keep[1, 1] = False
        assert_same_bytes(out[keep], clean[keep])


def test_equal_magnitudes_cancel():
    """Sums that only tiny channels decide, next to large ones that cancel; exact zeros."""
    for d in (16, 64, 128, 144, 256):
        x = torch.zeros(40, d)
        x[:, :2] = 1e10
        x[::2, 1] *= -1
        x[8:, 2:] = randn(32, d - 2, seed=d) * torch.logspace(-44, 8, 32)[:, None]
        x[20:30] = torch.round(x[20:30].clamp(-3, 3))
        s = projection("structured", d)
        for dtype in FLOATS[::2]:
            y = x.to(dtype)
            for actual, expected in zip(
                tt.qjl_sketch(y.cuda(), s.cuda()), tt.qjl_sketch(y, s), strict=True
            ):
                assert_same_bytes(actual, expected)


@pytest.mark.parametrize("dtype", FLOATS[1:])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_many_sketches(d, dtype):
    """Enough for the kernel that takes many, hard ones among them; rows of a wider tensor."""
    n = multiprocessors() * 4 * 32 * 2 + 5
    x = randn(n, d, seed=d) * torch.logspace(-20, 8, n)[:, None]
    x[::7, :2] = 100 * x[::7, 2:3]
    x[::14, 1] *= -1  # large ones cancel
    x[::5] = torch.round(x[::5].clamp(-3, 3))  # exact zeros
    hard = hard_vectors(d, signs_of(d))
    x[50 : 50 + len(hard)] = hard
    x = torch.stack([x, x.flip(0)], 1).to(dtype)[:, 1]
    s = projection("structured", d)
    wide = torch.stack([x, x], 1).cuda()
    for y in (x.cuda(), wide[:, 1], wide[::2, :1]):
        expected = tt.qjl_sketch(y.cpu().contiguous(), s)
        for actual, e in zip(tt.qjl_sketch(y, s.cuda()), expected, strict=True):
            broken = e.isnan() if e.is_floating_point() else torch.zeros_like(e, dtype=torch.bool)
            assert_same_bytes(actual.cpu()[~broken], e[~broken])


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", FLOATS[1:])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_many_vectors_transformed(d, dtype, inverse):
    """Enough for the kernel that takes many; rows of a wider tensor."""
    n = multiprocessors() * 4 * 32 * 2 + 5
    x = (randn(n, d, seed=d) * torch.logspace(-4, 3, n)[:, None]).to(dtype)
    signs = signs_of(d)
    wide = torch.stack([x, x.flip(0)], 1).cuda()
    for y in (x.cuda(), wide[:, 1], wide[::3, :1]):
        expected = tt.hadamard(y.cpu().contiguous(), signs, inverse)
        assert_same_bytes(tt.hadamard(y, signs.cuda(), inverse), expected)


# ---- layouts


def views(x: Tensor) -> list[Tensor]:
    """The values of x [n, d] in other layouts: every row elsewhere, or at an odd address."""
    n, d = x.shape
    wide = x.new_zeros(n, 2, d + 3)
    wide[:, 1, 1 : d + 1] = x
    flat = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(n, d)
    return [wide[:, 1, 1 : d + 1], flat, x[:1].expand(4, d)]


@pytest.mark.parametrize("name", ["hadamard", "encode", "group_encode", "sketch", "dense sketch"])
@pytest.mark.parametrize("d", [64, 80])
def test_views(name, d):
    case = CASES[name]
    inputs = case.inputs(d, torch.bfloat16, 5)
    constants = to({k: v for k, v in inputs.items() if k != "x"}, "cuda")
    for x in views(inputs["x"].cuda()):
        results = case.call(constants | {"x": x}, d, torch.bfloat16)
        expected = case.call(inputs | {"x": x.cpu().contiguous()}, d, torch.bfloat16)
        compare(case, inputs, results, expected)


@pytest.mark.parametrize("name", ["score", "qjl_score"])
def test_transposed_queries(name):
    """[queries, heads, d] as models have them."""
    case = CASES[name]
    inputs = case.inputs(128, torch.float16, 6)
    on_device = to(inputs, "cuda")
    on_device["x"] = on_device["x"].transpose(0, 1).contiguous().transpose(0, 1)
    results = case.call(on_device, 128, torch.float16)
    compare(case, inputs, results, case.call(inputs, 128, torch.float16))


def test_many_dimensions():
    x = randn(2, 3, 2, 2, 3, 2, 2, 64, seed=1).cuda().permute(6, 1, 4, 3, 2, 5, 0, 7)
    s = projection("structured", 64)
    for actual, expected in zip(
        tt.qjl_sketch(x, s.cuda()), tt.qjl_sketch(x.cpu().contiguous(), s), strict=True
    ):
        assert_same_bytes(actual, expected)


def test_keys_at_any_address():
    """Packed rows that start inside a word."""
    for bits, d in ((1, 64), (2, 96), (3, 128), (4, 128), (5, 160), (8, 64), (4, 18), (3, 80)):
        case = scores(bits, "uniform" if bits == 8 else "lloyd")
        inputs = case.inputs(d, torch.float32, bits)
        for offset in (1, 2, 3, 4, 8):
            on_device = to(inputs, "cuda")
            packed = on_device["packed"]
            moved = torch.cat([packed.new_zeros(offset), packed.flatten()])[offset:]
            on_device["packed"] = moved.view(packed.shape)
            results = case.call(on_device, d, torch.float32)
            compare(case, inputs, results, case.call(inputs, d, torch.float32))


@pytest.mark.parametrize("name", [n for n in CASES if "score" not in n])
def test_no_rows(name):
    case, d = CASES[name], 64
    inputs = case.inputs(d, torch.float32, 1)
    n = inputs["x"].shape[0]
    inputs = {
        k: t[:0] if t is not None and t.dim() and t.shape[0] == n else t for k, t in inputs.items()
    }
    results = case.call(to(inputs, "cuda"), d, torch.float32)
    for actual, expected in zip(results, case.call(inputs, d, torch.float32), strict=True):
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        assert actual.is_cuda and actual.numel() == 0


def test_no_keys_or_queries():
    s, levels = projection("structured", 64).cuda(), torch.arange(-15, 16, 2).to(torch.int8).cuda()
    for heads, queries, keys in ((2, 0, 3), (2, 3, 0), (0, 3, 3)):
        q = torch.zeros(heads, queries, 64, device="cuda")
        bits, norm = tt.qjl_sketch(torch.zeros(heads, keys, 64, device="cuda"), s)
        assert tt.qjl_score(q, bits, norm, s).shape == (heads, queries, keys)
        packed = torch.zeros(heads, keys, 32, dtype=torch.uint8, device="cuda")
        scale = torch.zeros(heads, keys, dtype=torch.float16, device="cuda")
        out = tt.score(q, packed, scale, s, levels, 4)
        assert out.shape == (heads, queries, keys) and out.is_cuda


# ---- streams, graphs, devices


@pytest.mark.parametrize("name", CASES)
def test_never_waits(name):
    """Calls return while the device is busy with what came before them."""
    case, d = CASES[name], 128
    inputs = to(case.inputs(d, torch.bfloat16, 1), "cuda")
    case.call(inputs, d, torch.bfloat16)  # loads the kernels
    with busy_gpu():
        case.call(inputs, d, torch.bfloat16)


@pytest.mark.parametrize("name", CASES)
def test_side_stream(name):
    """Work is queued on the current stream: it sees what that stream wrote just before."""
    case, d = CASES[name], 128
    first, second = (case.inputs(d, torch.bfloat16, seed) for seed in (1, 2))
    inputs, late = to(first, "cuda"), to(second, "cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        inputs["x"].copy_(late["x"])
        results = case.call(inputs, d, torch.bfloat16)
    stream.synchronize()
    mixed = first | {"x": second["x"]}
    compare(case, mixed, results, case.call(mixed, d, torch.bfloat16))


@pytest.mark.parametrize("name", CASES)
def test_graph(name):
    """A captured call replays on new inputs, and two graphs do not share anything."""
    case, d = CASES[name], 128
    graphs = []
    for dtype, seed in ((torch.bfloat16, 1), (torch.float32, 2)):
        first = case.inputs(d, dtype, seed)
        inputs = to(first, "cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            case.call(inputs, d, dtype)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = case.call(inputs, d, dtype)
        graphs.append((graph, first, inputs, results, dtype))
    for seed in (3, 4):
        for graph, first, inputs, results, dtype in graphs:
            fresh = first | {"x": case.inputs(d, dtype, seed)["x"]}
            inputs["x"].copy_(fresh["x"])
            graph.replay()
            torch.cuda.synchronize()
            compare(case, fresh, results, case.call(fresh, d, dtype))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", CASES)
def test_other_device(name):
    case, d = CASES[name], 128
    inputs = case.inputs(d, torch.bfloat16, 1)
    results = case.call(to(inputs, "cuda:1"), d, torch.bfloat16)
    assert all(r.device == torch.device("cuda:1") for r in results)
    assert torch.cuda.current_device() == 0
    compare(case, inputs, results, case.call(inputs, d, torch.bfloat16))


def test_mixed_devices_are_refused():
    s = projection("structured", 64)
    with pytest.raises((ValueError, RuntimeError), match="device"):
        tt.qjl_sketch(torch.zeros(2, 64, device="cuda"), s)


# ---- few and small: for compute-sanitizer (tests/sanitize_cuda.sh)


@pytest.mark.parametrize("name", CASES)
def test_tiny(name):
    """Lengths that kernels know, and others."""
    for d in (24, 48, 64, 96):
        check(CASES[name], d, torch.bfloat16, seed=d)


@pytest.mark.parametrize("bits", [1, 3, 5, 8])
def test_tiny_bit_strings(bits):
    """Whole chunks of codes, and rows that end inside a byte."""
    for d in (4096, 13):
        for case in bit_strings(bits):
            check(case, d)


@pytest.mark.parametrize("kind", [None, "structured", "dense"])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_tiny_scores(bits, kind):
    """The kernel for one query, and that for any number of them."""
    case = scores(bits, "uniform" if bits == 8 else "lloyd", kind)
    inputs = case.inputs(128, torch.bfloat16, bits)
    for queries in (1, 3):
        some = inputs | {"x": inputs["x"][:, :queries].contiguous()}
        results = case.call(to(some, "cuda"), 128, torch.bfloat16)
        compare(case, some, results, case.call(some, 128, torch.bfloat16))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_tiny_rows_of_many(d):
    """As many vectors as the kernels for many take."""
    n = multiprocessors() * 4 * 32 + 5
    x, s = randn(n, d, seed=d, dtype=torch.bfloat16), projection("structured", d)
    assert_same_bytes(tt.hadamard(x.cuda(), s.cuda()), tt.hadamard(x, s))
    for actual, expected in zip(
        tt.qjl_sketch(x.cuda(), s.cuda()), tt.qjl_sketch(x, s), strict=True
    ):
        assert_same_bytes(actual, expected)
