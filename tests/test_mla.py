"""Latent attention: what mla_store writes, what mla_load and mla_attention make of it, folding.

The references in ops/mla.py are written from docs/format.md; attention is compared with them in
float64.
"""

import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import torch_turboquant as tt
from tests.helpers import (
    assert_same_bytes,
    entries_apart,
    hard_vectors,
    load_script,
    paged,
    randn,
    scales,
    to_device,
)
from torch_turboquant import _library
from torch_turboquant.format import LATENT_BITS, LATENT_DIMS, LATENT_PAGE_SIZES, ROPE_DIMS
from torch_turboquant.ops.mla import (
    mla_attention_reference,
    mla_load_reference,
    mla_store_reference,
)
from torch_turboquant.tail import Rings

make_golden = load_script("tests/make_golden.py")

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CENTERS = (None, "center", "scales")


def center_of(kind: str | None, d: int) -> Tensor | None:
    if kind is None:
        return None
    center = randn(d, seed=5)
    if kind == "center":
        return center
    scale = scales(d, seed=6)
    return tt.scaled_center(center, scale)


def int32(*numbers: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


class Case(NamedTuple):
    """Sequences whose last tokens have queries, stored in a cache."""

    config: tt.LatentConfig
    tables: tt.LatentTables
    lengths: list[int]
    q_lens: list[int]
    latent: Tensor  # of all tokens, sequence after sequence
    rope: Tensor
    cache: Tensor
    block_table: Tensor
    tail: tt.Tail | None

    @property
    def max_q_len(self) -> int:
        return max([*self.q_lens, 1])

    @property
    def cu_seqlens_q(self) -> Tensor:
        return int32(0, *torch.tensor(self.q_lens).cumsum(0).tolist())

    def own(self) -> tuple[Tensor, Tensor]:
        """The latents of the tokens with queries."""
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        rows = [i for end, n in zip(ends, self.q_lens, strict=True) for i in range(end - n, end)]
        return self.latent[rows], self.rope[rows]


def make_case(
    config: tt.LatentConfig,
    lengths: list[int],
    q_lens: list[int],
    *,
    center: str | None = None,
    dtype: torch.dtype = torch.float32,
    tail: bool = False,
    rotated: bool = False,
    layer: int = 1,
) -> Case:
    tables = tt.make_latent_tables(config, layer, center=center_of(center, config.latent_dim))
    num_pages, table, slots = paged(lengths, config.page_size, seed=len(lengths))
    total = sum(lengths)
    latent = randn(total, config.latent_dim, seed=1, dtype=dtype)
    rope = randn(total, config.rope_dim, seed=2, dtype=dtype)
    # stale bytes: NaN as scale and as raw channels of tokens that nobody has stored
    cache = torch.full((num_pages, config.record_bytes), 0x7F, dtype=torch.uint8)
    of_tail = {}
    held = None
    if tail:
        ring = tt.allocate_latent_tail(config, len(lengths) + 1, dtype, max([*q_lens, 1]))
        ring.fill_(torch.nan)
        slots_of_tail = torch.arange(len(lengths)).flip(0)
        slots_of_tail[len(lengths) // 2] = -1  # one sequence has no entry
        held = tt.Tail(ring, torch.stack([slots_of_tail, slots_of_tail + 1], 1)[:, 0])  # a column
        starts = int32(0, *torch.tensor(lengths).cumsum(0).tolist())
        of_tail = {"tail": held, "seq_lens": int32(*lengths), "cu_seqlens_q": starts}
    slot_mapping = torch.cat(slots) if slots else torch.zeros(0, dtype=torch.int64)
    tt.mla_store(latent, rope, cache, slot_mapping, config, tables, rotated=rotated, **of_tail)
    return Case(config, tables, lengths, q_lens, latent, rope, cache, table, held)


def queries(case: Case, heads: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    tokens = sum(case.q_lens)
    q_latent = randn(tokens, heads, case.config.latent_dim, seed=3, dtype=dtype)
    return q_latent, randn(tokens, heads, case.config.rope_dim, seed=4, dtype=dtype)


def attend(case: Case, q: tuple[Tensor, Tensor], function=tt.mla_attention, **options):
    options = {
        "softmax_scale": 0.08,
        "cu_seqlens_q": case.cu_seqlens_q,
        "max_q_len": case.max_q_len,
        "tail": case.tail,
        **options,
    }
    arguments = (case.cache, case.block_table, int32(*case.lengths), case.config, case.tables)
    return function(*q, *arguments, **options)


def assert_close(actual, expected, tolerance=4e-4):
    """Outputs within a share of their length; logarithms within what 16-bit queries cost.

    A rotated query of 512 channels is a multiple of its largest channel / 32639, about 10^-4. Half
    a unit per channel (sigma 0.29 units) times latents of length 23 and the factor 0.08 of scores
    is 6 * 10^-5; the bound is six times that. Zeros and -inf are exact.
    """
    (out, lse), (out64, lse64) = actual, expected
    length = out64.norm(dim=-1)
    assert not out[length == 0].any()
    error = (out.double() - out64).norm(dim=-1)
    assert bool((error <= tolerance * length).all()), (error / length).max()
    empty = lse64 == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert bool(((lse.double() - lse64)[~empty].abs() <= 4e-4).all())


# ---- the configuration


@pytest.mark.parametrize(("name", "size"), [("k4u", 386), ("k4", 386), ("k5u", 450), ("k8", 642)])
def test_bytes_of_a_token(name, size):
    """The numbers that the documents name: 512 + 64 channels, in bfloat16 1,152 bytes."""
    config = tt.latent_preset(name)
    assert config.bytes_per_token == size
    cache = tt.allocate_latent_cache(config, 3)
    assert cache.numel() == 3 * config.page_size * size
    assert config.compression() == 1152 / size


def test_presets_are_named_as_those_of_keys():
    for name, (bits, grid) in tt.LATENT_PRESETS.items():
        assert name == f"k{bits}" + ("u" if grid == "uniform" and bits != 8 else "")
        for dim, rope in ((512, 64), (128, 0)):
            config = tt.latent_preset(name, dim, rope, page_size=32)
            assert (config.latent_dim, config.rope_dim, config.page_size) == (dim, rope, 32)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"latent_dim": 384}, "latent_dim is 384, supported: 128, 256, 512"),
        ({"rope_dim": 48}, "rope_dim is 48, supported: 0, 32, 64"),
        ({"page_size": 16}, "page_size is 16, supported for latents: 32, 64, 128"),
        ({"bits": 2}, "bits is 2, supported for latents: 3, 4, 5, 8"),
        ({"grid": "log"}, "grid must be one of"),
        ({"bits": 8, "grid": "lloyd"}, "grid must be 'uniform' for 8 bits"),
        ({"scale_mode": "l2"}, "scale_mode must be one of"),
        ({"search": 0}, "search must be 1 to 64, got 0"),
        ({"sink_tokens": -1}, "sink_tokens must be 0 or more, got -1"),
        ({"recent_window": -1}, "recent_window must be 0 or more, got -1"),
        ({"seed": -1}, "seed must be 0 to 2^64 - 1, got -1"),
        (
            {"rope_dtype": torch.float32},
            "rope_dtype is torch.float32, supported: bfloat16, float16",
        ),
    ],
)
def test_configurations_that_do_not_exist(changes, text):
    with pytest.raises(ValueError, match=text.replace("^", r"\^")):
        tt.LatentConfig(**{"latent_dim": 512, "rope_dim": 64, "bits": 4, **changes})


def test_other_refusals_of_the_parts_of_a_cache():
    config = tt.latent_preset("k4u", 128, 32)
    with pytest.raises(ValueError, match=r"unknown preset for latents 'k4v4' .did you mean 'k4'"):
        tt.latent_preset("k4v4")
    with pytest.raises(ValueError, match=r"center has shape \[2, 128\], expected \[128\] or"):
        tt.make_latent_tables(config, 0, center=torch.zeros(2, 128))
    with pytest.raises(TypeError, match="supported: float32, float16, bfloat16"):
        tt.allocate_latent_tail(config, 1, torch.float64)
    with pytest.raises(ValueError, match="max_q_len is 0"):
        tt.allocate_latent_tail(config, 1, torch.float32, 0)
    none = tt.latent_preset("k4u", 128, 32, sink_tokens=0, recent_window=0)
    with pytest.raises(ValueError, match="needs no tail"):
        tt.allocate_latent_tail(none, 1, torch.float32)
    tables = tt.make_latent_tables(config, 0)
    for w_uk, w_uv in (((2, 3, 64), (2, 128, 3)), ((2, 3, 128), (2, 64, 3)), ((3, 128), (128, 3))):
        with pytest.raises(ValueError, match=r"expected w_uk .heads, nope, latent_dim."):
            tt.fold_latent_rotation(torch.zeros(w_uk), torch.zeros(w_uv), tables)


# ---- bytes


def stored(config, tables, latent, rope, slots, store, device="cpu"):
    """The bytes that a store leaves of a page full of other bytes."""
    cache = torch.full((2, config.record_bytes), 0xA5, dtype=torch.uint8, device=device)
    latent, rope, slots = (t.to(device) for t in (latent, rope, slots))
    store(latent, rope, cache, slots, config, to_device(tables, torch.device(device)))
    return cache


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("transform", [True, False])
@pytest.mark.parametrize("bits", LATENT_BITS)
def test_the_bytes_of_hard_latents(bits, transform, dtype, device):
    """Also of zeros, extreme sizes and latents with a NaN, which affect no other latent."""
    for d, rope_dim, kind in zip(LATENT_DIMS, (64, 0, 32), CENTERS, strict=True):
        config = tt.LatentConfig(d, rope_dim, bits, transform=transform, page_size=64)
        tables = tt.make_latent_tables(config, 2, center=center_of(kind, d))
        latent = hard_vectors(d, tt.random_signs(d, 0, 2)).to(dtype)
        rope = randn(len(latent), rope_dim, seed=7, dtype=dtype)
        slots = torch.randperm(2 * config.page_size, generator=torch.Generator().manual_seed(1))
        slots = slots[: len(latent)].clone()
        slots[3] = -1
        arguments = config, tables, latent, rope, slots
        assert_same_bytes(
            stored(*arguments, tt.mla_store, device), stored(*arguments, mla_store_reference)
        )


@pytest.mark.parametrize("rope_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_size", LATENT_PAGE_SIZES)
@pytest.mark.parametrize("rope_dim", ROPE_DIMS)
@pytest.mark.parametrize("grid", ["lloyd", "uniform"])
def test_every_geometry_is_stored_and_loaded(grid, rope_dim, page_size, rope_dtype, device):
    for bits in (3, 4, 5):
        config = tt.LatentConfig(
            128, rope_dim, bits, grid, page_size, scale_mode="mse", rope_dtype=rope_dtype
        )
        tables = tt.make_latent_tables(config, 0, center=center_of("scales", 128))
        latent, rope = randn(page_size + 3, 128, seed=1), randn(page_size + 3, rope_dim, seed=2)
        slots = torch.arange(page_size + 3) + page_size - 3
        arguments = config, tables, latent, rope, slots
        cache = stored(*arguments, tt.mla_store, device)
        assert_same_bytes(cache, stored(*arguments, mla_store_reference))
        table, lengths = int32(0, 1)[None].expand(3, 2).contiguous(), int32(2 * page_size, 0, 5)
        for dtype in FLOATS:
            size = 2 * page_size + 1
            of_device = (t.to(device) for t in (table, lengths))
            on = to_device(tables, device)
            loaded = tt.mla_load(cache, *of_device, config, on, size, dtype)
            expected = mla_load_reference(cache.cpu(), table, lengths, config, tables, size, dtype)
            for part, wanted in zip(loaded, expected, strict=True):
                assert_same_bytes(part, wanted)


@pytest.mark.parametrize("bits", LATENT_BITS)
def test_small_latents_have_the_same_codes(bits):
    """The scale of a token follows its size. Early layers of models have latents of 0.02."""
    config = tt.latent_preset({3: "k3", 4: "k4u", 5: "k5u", 8: "k8"}[bits], 512, 0)
    tables = tt.make_latent_tables(config, 0)
    latent, rope = randn(64, 512, seed=1), torch.zeros(64, 0)

    def codes_and_scales(x):
        cache = tt.allocate_latent_cache(config, 1)
        tt.mla_store(x, rope, cache, torch.arange(64), config, tables)
        pages = tt.format.read_latents(config.record, cache.numpy())
        return torch.from_numpy(pages.codes), torch.from_numpy(pages.scales).double()

    codes, scale = codes_and_scales(latent)
    same, small = codes_and_scales(latent / 512)
    assert torch.equal(same, codes)
    assert torch.equal(small, scale / 512)
    # 1/500 is no power of two, so that a coordinate on a boundary may round to its other side
    near, small = codes_and_scales(latent / 500)
    differ = near != codes
    assert int(differ.sum()) <= codes.numel() // 10000
    assert bool(((near.int() - codes.int()).abs()[differ] == 1).all())
    assert float((small * 500 / scale - 1).abs().max()) < 2e-3  # float16 has 11 bits


def test_every_token_owns_its_bytes():
    """Stores of single tokens in any order leave what one store of all leaves."""
    config = tt.LatentConfig(128, 32, 5, "uniform", 32)
    tables = tt.make_latent_tables(config, 0)
    latent, rope, slots = randn(32, 128, seed=1), randn(32, 32, seed=2), torch.arange(32)
    cache = torch.full((1, config.record_bytes), 0x5A, dtype=torch.uint8)
    for token in torch.randperm(32, generator=torch.Generator().manual_seed(3)).tolist():
        one = slice(token, token + 1)
        tt.mla_store(latent[one], rope[one], cache, slots[one], config, tables)
    assert_same_bytes(cache[0], stored(config, tables, latent, rope, slots, tt.mla_store)[0])


@pytest.mark.parametrize("case", make_golden.LATENTS, ids=lambda c: "-".join(map(str, c)))
def test_golden_latents(case, device):
    config, tables, latent, rope, slots = make_golden.latent_case(*case)
    golden = make_golden.latent_file(*case).read_bytes()
    for store, on in ((mla_store_reference, torch.device("cpu")), (tt.mla_store, device)):
        cache = tt.allocate_latent_cache(config, 1, on)
        store(
            *(t.to(on) for t in (latent, rope)), cache, slots.to(on), config, to_device(tables, on)
        )
        assert cache.cpu().numpy().tobytes() == golden


def test_pages_at_any_distance(device):
    """As the part of one layer in an allocation for all layers."""
    config = tt.latent_preset("k5u", 256, 32, page_size=32)
    case = make_case(config, [40, 70], [1, 2])
    memory, view = entries_apart(case.cache, 64, device)
    q = tuple(t.to(device) for t in queries(case, 4))
    there = [t.to(device) for t in (case.block_table, int32(*case.lengths))]
    on = config, to_device(case.tables, device)
    options = {
        "softmax_scale": 0.1,
        "cu_seqlens_q": case.cu_seqlens_q.to(device),
        "max_q_len": 2,
    }
    expected = tt.mla_attention(*q, case.cache.to(device), *there, *on, **options)
    for actual, wanted in zip(
        tt.mla_attention(*q, view, *there, *on, **options), expected, strict=True
    ):
        assert_same_bytes(actual, wanted)
    before = memory.clone()
    tables = to_device(case.tables, device)
    num_pages, _, slots = paged(case.lengths, 32, seed=2)
    assert num_pages == len(case.cache)
    slots = torch.cat(slots).to(device)
    tt.mla_store(case.latent.to(device), case.rope.to(device), view, slots, config, tables)
    assert_same_bytes(memory, before)


@pytest.mark.parametrize("preset", ["k3", "k4u", "k5u", "k8"])
def test_tiny(preset, device):
    """For compute-sanitizer: tokens with a tail, read again, and attended to by float32 queries."""
    config = tt.latent_preset(preset, 128, 32, page_size=32, sink_tokens=1, recent_window=2)
    case = make_case(config, [35, 3], [1, 2], center="scales", tail=True)
    cache, tables, tail = (
        to_device(x, device) for x in (torch.zeros_like(case.cache), case.tables, case.tail)
    )
    lengths = int32(*case.lengths, device=device)
    slots = torch.cat(paged(case.lengths, 32, seed=2)[2]).to(device)
    starts = int32(0, 35, 38, device=device)
    new = case.latent.to(device), case.rope.to(device)
    tail.ring.fill_(torch.nan)
    of_tail = {"tail": tail, "seq_lens": lengths, "cu_seqlens_q": starts}
    tt.mla_store(*new, cache, slots, config, tables, **of_tail)
    table = case.block_table.to(device)
    loaded = tt.mla_load(cache, table, lengths, config, tables, 35, torch.float32)
    q = queries(case, 3)
    arguments = (cache, table, lengths, config, tables)
    starts = case.cu_seqlens_q.to(device)
    options = {"softmax_scale": 0.08, "cu_seqlens_q": starts, "max_q_len": 2, "tail": tail}
    actual = tt.mla_attention(*(t.to(device) for t in q), *arguments, **options)
    expected = mla_load_reference(
        case.cache, case.block_table, int32(*case.lengths), config, case.tables, 35, torch.float32
    )
    for x, y in zip(loaded, expected, strict=True):
        assert_same_bytes(x, y)
    out, lse = (t.cpu() for t in actual)
    assert_close((out, lse), attend(case, q, mla_attention_reference))


# ---- the tail


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("kind", CENTERS)
def test_the_tail(kind, rotated, dtype, device):
    """Sinks and ring, stored in pieces; a sequence without an entry, padding, a skipped token."""
    config = tt.LatentConfig(128, 32, 4, page_size=32, sink_tokens=2, recent_window=3)
    tables = tt.make_latent_tables(config, 0, center=center_of(kind, 128))
    rings = []
    for store, on in ((mla_store_reference, torch.device("cpu")), (tt.mla_store, device)):
        cache = tt.allocate_latent_cache(config, 6, on)
        ring = tt.allocate_latent_tail(config, 4, dtype, 2, on)
        _, ring = entries_apart(ring, 8, on)
        tail = tt.Tail(ring, torch.tensor([2, -1, 0, 1], device=on))
        length = [0, 0, 0, 0]
        for step, new in enumerate(([9, 3, 1, 0], [2, 1, 2, 0], [1, 1, 4, 0])):
            length = [a + b for a, b in zip(length, new, strict=True)]
            count = sum(new) + 1  # a token of padding
            latent = randn(count, 128, seed=10 + step, dtype=dtype).to(on)
            rope = randn(count, 32, seed=20 + step, dtype=dtype).to(on)
            slots = torch.arange(count, device=on) + 32 * step
            slots[-2] = -1
            batch = {
                "seq_lens": int32(*length, device=on),
                "cu_seqlens_q": int32(0, *torch.tensor(new).cumsum(0).tolist(), device=on),
            }
            args = (latent, rope, cache, slots, config, to_device(tables, on))
            store(*args, tail=tail, rotated=rotated, **batch)
        rings.append(ring.cpu())
    assert_same_bytes(rings[1], rings[0])


# ---- attention


@pytest.mark.parametrize("bits", LATENT_BITS)
@pytest.mark.parametrize("grid", ["lloyd", "uniform"])
@pytest.mark.parametrize("transform", [True, False])
def test_attention_of_every_width(transform, grid, bits):
    if bits == 8:
        grid = None
    for d, rope_dim, kind in zip(LATENT_DIMS, (32, 64, 0), CENTERS, strict=True):
        config = tt.LatentConfig(d, rope_dim, bits, grid, 32, transform=transform)
        case = make_case(config, [150, 33, 1], [1, 1, 1], center=kind)
        q = queries(case, 16)
        assert_close(attend(case, q), attend(case, q, mla_attention_reference))


@pytest.mark.parametrize("heads", [1, 16, 20, 24, 40, 128])
@pytest.mark.parametrize("q_lens", [[1, 1, 1, 1], [2, 5, 0, 3], [1, 4, 1, 0]])
def test_head_counts_and_lengths(heads, q_lens):
    """Sequences of no tokens, of one page and more than one block, with 0 to 5 queries."""
    config = tt.latent_preset("k4u", 128, 32, page_size=64)
    case = make_case(config, [70, 300, 0, 5], [0 if n == 2 else q for n, q in enumerate(q_lens)])
    q = queries(case, heads)
    assert_close(attend(case, q), attend(case, q, mla_attention_reference))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("kind", CENTERS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_tail_and_own_tokens(dtype, kind, rotated, own):
    config = tt.LatentConfig(128, 64, 5, "uniform", 32, sink_tokens=3, recent_window=9)
    lengths, q_lens = [45, 20, 80, 6], [1, 4, 2, 5]
    case = make_case(config, lengths, q_lens, center=kind, dtype=dtype, tail=True, rotated=rotated)
    options = {"rotated": rotated}
    if own:
        latent, rope = case.own()
        if rotated:
            latent = tt.rotate_latent(latent, case.tables)
        options |= {"latent_new": latent, "rope_new": rope}
    q = queries(case, 20, dtype)
    assert case.tail is not None
    rings = Rings(config, len(case.tail.ring), case.max_q_len)
    valid = torch.from_numpy(rings.valid(case.tail.slots.clamp(min=0).tolist(), lengths))
    for tail in (case.tail, case.tail._replace(valid=valid)):
        options["tail"] = tail
        actual, expected = (
            attend(case, q, **options),
            attend(case, q, mla_attention_reference, **options),
        )
        unit = {torch.float32: 4e-4, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
        assert_close(actual, expected, unit)


def test_own_tokens_that_nobody_has_stored():
    """A first chunk reads no page; the call's own tokens may be stored later or never."""
    config = tt.latent_preset("k4", 128, 32, page_size=32, sink_tokens=0, recent_window=0)
    tables = tt.make_latent_tables(config, 0)
    latent, rope = randn(40, 128, seed=1), randn(40, 32, seed=2)
    q = randn(40, 3, 128, seed=3), randn(40, 3, 32, seed=4)
    cache = torch.zeros(0, config.record_bytes, dtype=torch.uint8)
    out, lse = tt.mla_attention(
        *q,
        cache,
        torch.zeros(1, 0, dtype=torch.int32),
        int32(40),
        config,
        tables,
        softmax_scale=0.1,
        cu_seqlens_q=int32(0, 40),
        max_q_len=40,
        latent_new=latent,
        rope_new=rope,
    )
    keys = torch.cat([latent, rope], 1).double()
    score = 0.1 * torch.einsum("thc,jc->htj", torch.cat(q, 2).double(), keys)
    score = score.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
    expected = torch.einsum("htj,jc->thc", score.softmax(-1), latent.double())
    assert float((out - expected).abs().max()) < 1e-5
    assert float((lse.T - score.logsumexp(-1)).abs().max()) < 1e-5


@pytest.mark.parametrize("kind", CENTERS)
def test_attention_is_dense_attention_over_what_mla_load_decodes(kind):
    """Written without the reference: softmax over the decoded latents and raw channels."""
    config = tt.latent_preset("k5u", 256, 64, page_size=32)
    case = make_case(config, [90], [1], center=kind)
    q_latent, q_rope = queries(case, 20)
    out, lse = attend(case, (q_latent, q_rope))
    latent, rope = tt.mla_load(
        case.cache, case.block_table, int32(90), config, case.tables, 90, torch.float32
    )
    score = q_latent[0].double() @ latent[0].double().T + q_rope[0].double() @ rope[0].double().T
    score = 0.08 * score
    expected = score.softmax(-1) @ latent[0].double()
    assert_close((out[0], lse[0]), (expected, score.logsumexp(-1)))


def test_long_sequences_and_padding():
    """Several spans of keys; tokens behind the last sequence; other strides of queries."""
    config = tt.latent_preset("k5u", 512, 64)
    case = make_case(config, [4500, 2100], [1, 2])
    tokens = 5
    q = randn(16, tokens, 512, seed=3).transpose(0, 1), randn(tokens, 16, 96, seed=4)[..., 32:]
    actual, expected = attend(case, q), attend(case, q, mla_attention_reference)
    assert_close(actual, expected)
    assert not actual[0][3:].any()
    assert bool((actual[1][3:] == -torch.inf).all())


def test_results_do_not_depend_on_threads_or_on_others():
    config = tt.latent_preset("k4u", 256, 64)
    case = make_case(config, [500, 2500, 90], [2, 1, 3], tail=True, center="center")
    q = queries(case, 16)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = attend(case, q)
        torch.set_num_threads(3)
        for actual, wanted in zip(attend(case, q), expected, strict=True):
            assert_same_bytes(actual, wanted)
    finally:
        torch.set_num_threads(threads)
    assert case.tail is not None
    alone = tt.mla_attention(
        *(part[2:3] for part in q),
        case.cache,
        case.block_table[1:2],
        int32(2500),
        config,
        case.tables,
        softmax_scale=0.08,
        tail=case.tail._replace(slots=case.tail.slots[1:2]),
    )
    for actual, wanted in zip(alone, expected, strict=True):
        assert_same_bytes(actual[0], wanted[2])


def test_all_levels_agree():
    """Bytes, decoded latents and attention are the same on every processor."""
    levels = _library.cpu_levels()
    assert "portable" in levels
    results = []
    for level in levels:
        with _library.force_cpu_level(level):
            parts = []
            for bits in LATENT_BITS:
                config = tt.LatentConfig(128, 32, bits, None, 32, sink_tokens=2, recent_window=5)
                case = make_case(config, [140, 20], [2, 1], tail=True, center="scales")
                parts += [case.cache, *attend(case, queries(case, 5))]
            results.append(parts)
    for other in results[1:]:
        for actual, wanted in zip(other, results[0], strict=True):
            assert_same_bytes(actual, wanted)


def test_a_nan_stays_in_its_sequence():
    config = tt.latent_preset("k4u", 128, 32)
    case = make_case(config, [30, 30], [1, 1])
    q = queries(case, 2)
    expected = attend(case, q)
    page = int(case.block_table[0, 0])
    first = config.record.rope(3, 0)
    case.cache[page, first : first + 2] = 0xFF
    out, _ = attend(case, q)
    assert bool(out[0].isnan().all())
    assert_same_bytes(out[1], expected[0][1])


def test_out_and_lse():
    config = tt.latent_preset("k4u", 128, 32)
    case = make_case(config, [30, 50], [1, 1])
    q = queries(case, 4)
    expected = attend(case, q)
    out, lse = torch.full_like(q[0], 7), torch.full((2, 4), 7.0)
    assert attend(case, q, out=out, lse=lse)[0] is out
    assert_same_bytes(out, expected[0])
    assert_same_bytes(lse, expected[1])
    assert_same_bytes(attend(case, q, out=out)[1], expected[1])


# ---- folding


@pytest.mark.parametrize("transform", [True, False])
@pytest.mark.parametrize("kind", CENTERS)
def test_folded_matrices_give_the_same_attention(kind, transform):
    """In the model's matrices instead of the op: the outputs of all heads, up to rounding."""
    config = tt.LatentConfig(
        256, 32, 4, "uniform", 32, sink_tokens=2, recent_window=7, transform=transform
    )
    heads, nope, v = 6, 24, 40
    w_uk, w_uv = randn(heads, nope, 256, seed=8) / 5, randn(heads, 256, v, seed=9) / 16
    results = []
    for rotated in (False, True):
        case = make_case(config, [100, 40], [1, 3], center=kind, tail=True, rotated=rotated)
        uk, uv = tt.fold_latent_rotation(w_uk, w_uv, case.tables) if rotated else (w_uk, w_uv)
        q_nope, q_rope = randn(4, heads, nope, seed=3), randn(4, heads, 32, seed=4)
        q_latent = torch.einsum("thn,hnr->thr", q_nope, uk)
        out, lse = attend(case, (q_latent, q_rope), rotated=rotated)
        results.append((torch.einsum("thr,hrv->thv", out, uv), lse, case.cache))
    (plain, lse, cache), (folded, folded_lse, folded_cache) = results
    assert_same_bytes(folded_cache, cache)
    # both round rotated queries to 16 bits, but not the same floats
    assert float((folded - plain).norm() / plain.norm()) < 2e-4
    assert float((folded_lse - lse).abs().max()) < 2e-4


def test_folded_matrices_keep_dtype_and_shape():
    config = tt.latent_preset("k4u", 128, 32)
    tables = tt.make_latent_tables(config, 0)
    w_uk, w_uv = randn(3, 8, 128, seed=1).bfloat16(), randn(3, 128, 5, seed=2).bfloat16()
    folded = tt.fold_latent_rotation(w_uk, w_uv, tables)
    for new, old in zip(folded, (w_uk, w_uv), strict=True):
        assert (new.dtype, new.shape) == (old.dtype, old.shape) and new.is_contiguous()
    assert_same_bytes(tt.rotate_latent(w_uk[0], tables), folded[0][0])


# ---- torch.compile


def test_compiled_without_a_break():
    config = tt.latent_preset("k4u", 128, 32, page_size=32, sink_tokens=2, recent_window=4)
    tables = tt.make_latent_tables(config, 0, center=center_of("scales", 128))
    table = int32(0, 1)[None]

    def step(latent, rope, q_latent, q_rope, cache, ring, lengths, slots):
        tail = tt.Tail(ring, torch.zeros(1, dtype=torch.int64))
        tt.mla_store(latent, rope, cache, slots, config, tables, tail=tail, seq_lens=lengths)
        out, lse = tt.mla_attention(
            q_latent * 2,
            q_rope,
            cache,
            table,
            lengths,
            config,
            tables,
            softmax_scale=0.1,
            tail=tail,
        )
        latents, _ = tt.mla_load(cache, table, lengths, config, tables, 40, torch.float32)
        return out + 1, lse, latents * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    caches = [tt.allocate_latent_cache(config, 2) for _ in range(2)]
    rings = [tt.allocate_latent_tail(config, 1, torch.float32) for _ in range(2)]
    for i in range(3):
        new = randn(1, 128, seed=i), randn(1, 32, seed=10 + i)
        q = randn(1, 4, 128, seed=20 + i), randn(1, 4, 32, seed=30 + i)
        lengths, slots = int32(i + 1), torch.tensor([i])
        results = [
            function(*new, *q, cache, ring, lengths, slots)
            for function, cache, ring in zip((step, compiled), caches, rings, strict=True)
        ]
        for actual, wanted in zip(results[1], results[0], strict=True):
            assert_same_bytes(actual, wanted)
    assert_same_bytes(caches[1], caches[0])
    assert_same_bytes(rings[1], rings[0])


# ---- raw ops


def raw_store(case: Case, **changes):
    """A call of the raw op that stores the first token of each sequence, with changes."""
    config, tables = case.config, case.tables
    a = {
        "latent": case.latent[:2],
        "rope": case.rope[:2],
        "cache": case.cache,
        "slot_mapping": torch.tensor([0, 1]),
        "signs": tables.signs,
        "levels": tables.levels,
        "steps": tables.steps,
        "center": tables.center,
        "page_size": config.page_size,
        "bits": config.bits,
        "scale_mode": 3,
        "rope_dtype": config.rope_dtype,
        "seq_lens": int32(1, 1),
        "tail": case.tail.ring if case.tail else None,
        "tail_slots": torch.tensor([0, 1]) if case.tail else None,
        "sink_tokens": config.sink_tokens,
        **changes,
    }
    torch.ops.turboquant.mla_store.default(**a)


def raw_attend(case: Case, q: tuple[Tensor, Tensor], op=None, **changes):
    tables, config = case.tables, case.config
    a = {
        "q_latent": q[0],
        "q_rope": q[1],
        "cache": case.cache,
        "block_table": case.block_table,
        "seq_lens": int32(*case.lengths),
        "signs": tables.signs,
        "levels": tables.levels,
        "center": tables.center,
        "page_size": config.page_size,
        "bits": config.bits,
        "rope_dtype": config.rope_dtype,
        "softmax_scale": 0.1,
        **changes,
    }
    return (op or torch.ops.turboquant.mla_attention.default)(**a)


@pytest.fixture
def small() -> tuple[Case, tuple[Tensor, Tensor]]:
    config = tt.latent_preset("k4u", 128, 32, page_size=32, sink_tokens=1, recent_window=2)
    case = make_case(config, [30, 50], [1, 1], tail=True)
    return case, queries(case, 2)


def test_what_is_written_is_apart_from_the_rest(small):
    case, q = small
    out_op = torch.ops.turboquant.mla_attention_out.default
    inside = case.cache.flatten()[: 4 * 256].view(torch.float32).view(2, 128)
    with pytest.raises(RuntimeError, match=r"cache and latent share memory|latent and cache share"):
        raw_store(case, latent=inside)
    assert case.tail is not None
    rope = case.tail.ring.flatten()[:64].view(2, 32)
    with pytest.raises(RuntimeError, match="share memory: what a call writes must be apart"):
        raw_store(case, rope=rope)
    for changes in ({"out": q[0]}, {"out": torch.empty_like(q[0]), "lse": q[1].flatten()[:4]}):
        changes = {name: t.view(2, 2) if name == "lse" else t for name, t in changes.items()}
        with pytest.raises(RuntimeError, match="share memory"):
            raw_attend(case, q, out_op, **changes)


def test_integers_of_raw_ops_do_not_overflow(small):
    case, q = small
    assert case.tail is not None
    most = 2**63 - 1
    of_tail = {"tail": case.tail.ring, "tail_slots": case.tail.slots, "sink_tokens": 1}
    for window, max_q_len in ((most, 1), (most, most), (2, most), (3, 3)):
        with pytest.raises(RuntimeError, match=f"max_q_len - 1 = {window + max_q_len - 1}"):
            raw_attend(case, q, recent_window=window, max_q_len=max_q_len, **of_tail)
    own = dict(zip(("latent_new", "rope_new"), case.own(), strict=True))
    with pytest.raises(RuntimeError, match=f"recent_window - 1 = {most - 1}"):
        raw_attend(case, q, recent_window=most, **of_tail, **own)
    for sinks in (-1, 4, most):
        with pytest.raises(RuntimeError, match=f"sink_tokens is {sinks} but the tail has 3 rows"):
            raw_store(case, sink_tokens=sinks)
    with pytest.raises(RuntimeError, match=r"no memory for latents of max_seq_len = 68719476736"):
        tt.mla_load(
            case.cache, case.block_table, int32(1, 1), case.config, case.tables, 2**36, torch.half
        )


def test_an_op_of_a_step_runs_no_python(small):
    """But for one question, as the ops of other caches."""
    case, q = small
    out, lse = torch.empty_like(q[0]), torch.empty(2, 2)
    out_op = torch.ops.turboquant.mla_attention_out.default
    for call in (
        lambda: raw_store(case),
        lambda: raw_attend(case, q),
        lambda: raw_attend(case, q, out_op, out=out, lse=lse),
    ):
        ran = []
        sys.setprofile(lambda frame, event, _, ran=ran: ran.append((event, frame.f_code)))
        try:
            call()
        finally:
            sys.setprofile(None)
        ours = [code for event, code in ran if event == "call" and "_autograd" in code.co_filename]
        assert [code.co_name for code in ours] == ["_derivative_of", "in_forward_mode"]


def test_a_lazy_negation_is_not_written(small):
    case, q = small
    with pytest.raises(RuntimeError, match="out must not be a lazy negation"):
        raw_attend(
            case,
            q,
            torch.ops.turboquant.mla_attention_out.default,
            out=torch._neg_view(torch.empty_like(q[0])),
        )
    negated = torch._neg_view(-q[0])
    assert_same_bytes(raw_attend(case, (negated, q[1]))[0], raw_attend(case, q)[0])
