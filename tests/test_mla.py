"""Caches of latents: configuration, what mla_store writes, also to the tail, what mla_load decodes.

The references in ops/mla.py are written from docs/format.md.
"""

import pytest
import torch

import torch_turboquant as tt
from tests.helpers import (
    FLOATS,
    assert_same_bytes,
    entries_apart,
    hard_vectors,
    int32,
    load_script,
    paged,
    randn,
    to_device,
)
from tests.mla_cases import CENTERS, assert_close, attend, center_of, make_case, queries
from torch_turboquant.format import LATENT_BITS, LATENT_DIMS, LATENT_PAGE_SIZES, ROPE_DIMS
from torch_turboquant.ops.mla import (
    mla_attention_reference,
    mla_load_reference,
    mla_store_reference,
)

make_golden = load_script("tests/make_golden.py")


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
    for seqs in (-1, True, 1.0):
        with pytest.raises(ValueError, match=f"max_seqs is {seqs}"):
            tt.allocate_latent_tail(config, seqs, torch.float32)
    none = tt.latent_preset("k4u", 128, 32, sink_tokens=0, recent_window=0)
    with pytest.raises(ValueError, match="needs no tail"):
        tt.allocate_latent_tail(none, 1, torch.float32)
    tables = tt.make_latent_tables(config, 0)
    for w_uk, w_uv in (((2, 3, 64), (2, 128, 3)), ((2, 3, 128), (2, 64, 3)), ((3, 128), (128, 3))):
        with pytest.raises(ValueError, match=r"expected w_uk .heads, nope, latent_dim."):
            tt.fold_latent_rotation(torch.zeros(w_uk), torch.zeros(w_uv), tables)
    for dtype in (torch.int64, torch.float64, torch.bool):
        with pytest.raises(TypeError, match=r"latent has dtype .* supported: float32, float16"):
            tt.rotate_latent(torch.ones(2, 128, dtype=dtype), tables)
        w_uk, w_uv = torch.ones(2, 3, 128, dtype=dtype), torch.ones(2, 128, 3)
        with pytest.raises(TypeError, match=r"w_uk has dtype .* supported: float32, float16"):
            tt.fold_latent_rotation(w_uk, w_uv, tables)
        with pytest.raises(TypeError, match="w_uv has dtype"):
            tt.fold_latent_rotation(w_uv.mT, w_uk.mT, tables)


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


@pytest.mark.parametrize("search", [1, 3, 8])
@pytest.mark.parametrize("kind", CENTERS)
@pytest.mark.parametrize(("bits", "grid"), [(4, "uniform"), (4, "lloyd"), (5, "uniform")])
def test_the_bytes_of_decode_steps(bits, grid, kind, search, device):
    """Few tokens of 512 channels, which have a kernel of their own on a GPU, and their tail."""
    # rows of the second case begin at multiples of 16 bytes, those of the first do not
    cases = ((torch.bfloat16, "mse", 517), (torch.float16, "unbiased", 600))
    for dtype, scale_mode, width in cases:
        config = tt.LatentConfig(
            512,
            64,
            bits,
            grid,
            32,
            search=search,
            scale_mode=scale_mode,
            rope_dtype=torch.bfloat16,
            sink_tokens=1,
            recent_window=2,
        )
        tables = tt.make_latent_tables(config, 2, center=center_of(kind, 512))
        vectors = hard_vectors(512, tt.random_signs(512, 0, 2)).to(dtype)
        count = len(vectors)
        latent = torch.zeros(count, width, dtype=dtype)[:, :512].copy_(vectors)  # rows apart
        rope = randn(count, 65, seed=7, dtype=dtype)[:, 1:]
        slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:count].clone()
        slots[3] = -1
        lengths = int32(*(i % 5 for i in range(count)))
        found = []
        for store, on in ((mla_store_reference, torch.device("cpu")), (tt.mla_store, device)):
            cache = torch.full((2, config.record_bytes), 0xA5, dtype=torch.uint8, device=on)
            ring = tt.allocate_latent_tail(config, count, dtype, 1, on)
            entries = torch.arange(count, device=on).roll(1)
            entries[7] = -1
            x, raw, at = latent.to(on), rope.to(on), slots.to(on)
            store(
                *(x, raw, cache, at, config, to_device(tables, on)),
                tail=tt.Tail(ring, entries),
                seq_lens=lengths.to(on),
            )
            found += [cache.cpu(), ring.cpu()]
        assert_same_bytes(found[2], found[0])
        assert_same_bytes(found[3], found[1])


def test_the_bytes_do_not_depend_on_how_many_tokens_there_are(device):
    """A GPU stores many tokens by another kernel than few."""
    config = tt.latent_preset("k5u", 512, 64)
    tables = tt.make_latent_tables(config, 0)
    latent, rope = randn(4096, 512, seed=1).bfloat16(), randn(4096, 64, seed=2).bfloat16()
    slots = torch.arange(4096)

    def pages(each):
        cache = tt.allocate_latent_cache(config, 4096 // config.page_size, device)
        on = config, to_device(tables, device)
        for part in zip(latent.split(each), rope.split(each), slots.split(each), strict=True):
            x, raw, at = (t.to(device) for t in part)
            tt.mla_store(x, raw, cache, at, *on)
        return cache

    expected = pages(4096)
    for each in (17, 500, 1024):
        assert_same_bytes(pages(each), expected)


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
