"""The layout of page records: format.py, csrc/format.h and docs/format.md say the same thing.

For every record there is: each bit of each code has one place of its own, every token owns whole
bytes, sections are aligned; and the sizes are the numbers written here.
"""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import torch_turboquant as tt
from tests.helpers import assert_same_bytes, codebook_tensors, garbage_cache, randn, to_device
from torch_turboquant import format as layout
from torch_turboquant._checks import CODEC_BITS
from torch_turboquant.codebook import lloyd_max
from torch_turboquant.format import KEY_BITS, PAGE_SIZES, VALUE_BITS, Record, valid_head_dim
from torch_turboquant.signs import split_dim

DIMS = [d for d in range(16, 1025, 16) if valid_head_dim(d)]
# every width of keys and of values at least once
PAIRS = ((8, 8), (5, 4), (4, 3), (3, 2), (2, 8))
PAGE = (Path(__file__).parents[1] / "docs" / "format.md").read_text()

# bytes per token and KV head, key and value and both scales
BYTES = {
    # d:    64   80   96  128  192  256   512   576
    "k8v8": (132, 164, 196, 260, 388, 516, 1028, 1156),
    "k8v4": (100, 124, 148, 196, 292, 388, 772, 868),
    "k5v4u": (76, 96, 112, 148, 220, 292, 580, 652),
    "k5v3u": (68, 88, 104, 132, 196, 260, 516, 580),
    "k4v4": (68, 84, 100, 132, 196, 260, 516, 580),
    "k4v4u": (68, 84, 100, 132, 196, 260, 516, 580),
    "k4v3": (60, 76, 92, 116, 172, 228, 452, 508),
    "k4v2": (52, 64, 76, 100, 148, 196, 388, 436),
    "k3v3": (52, 68, 80, 100, 148, 196, 388, 436),
    "k3v2": (44, 56, 64, 84, 124, 164, 324, 364),
    "k2v2": (36, 44, 52, 68, 100, 132, 260, 292),
}
BYTES_DIMS = (64, 80, 96, 128, 192, 256, 512, 576)


def test_sizes_of_all_presets():
    assert set(BYTES) == set(tt.PRESETS)
    for name, sizes in BYTES.items():
        for d, size in zip(BYTES_DIMS, sizes, strict=True):
            for page_size in PAGE_SIZES:
                config = tt.preset(name, d, page_size=page_size)
                assert config.bytes_per_token == size
                assert config.record_bytes == page_size * size
                cache = tt.allocate_cache(config, 3, 2)
                assert cache.numel() == cache.nbytes == 3 * 2 * page_size * size


def test_which_dimensions_exist():
    assert [d for d in DIMS if d <= 256] == [
        *(16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256)
    ]
    assert set(DIMS) == {
        m * 2**k for m in (1, 3, 5, 7, 9) for k in range(4, 11) if m * 2**k <= 1024
    }
    assert [d for d in range(2, 41) if layout.valid_vector_dim(d)] == [
        *(2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 36, 40)
    ]
    assert layout.valid_vector_dim(4096) and not layout.valid_vector_dim(8192)


@pytest.mark.parametrize("d", DIMS)
def test_every_bit_has_one_place(d):
    """A tile: all code bits in distinct places inside their own section, tokens apart."""
    for page_size in (16, 32):
        for key_bits, value_bits in PAIRS:
            record = Record(d, page_size, key_bits, value_bits)
            _check_places(record, "key", key_bits, ("key_rows", "key_planes"))
            _check_places(record, "value", value_bits, ("value_blocks",))


def _check_places(record, kind, bits, sections):
    places = layout._places(record, kind)
    width = np.log2(places.mask + 1).astype(int)  # [tokens, channels, pieces]
    token, channel, piece = np.nonzero(width)
    where = (token, channel, piece)
    byte, shift = places.byte[where], places.shift[where]
    used = np.zeros((record.tile_bytes, 8), dtype=int)
    code_bits = np.zeros((record.tile_tokens, record.head_dim, 8), dtype=int)
    for k in range(8):
        here = width[where] > k
        np.add.at(used, (byte[here], shift[here] + k), 1)
        code_bit = places.code_shift[where][here] + k
        np.add.at(code_bits, (token[here], channel[here], code_bit), 1)
    assert (code_bits[..., :bits] == 1).all() and not code_bits[..., bits:].any()
    assert used.max() == 1 and used.sum() == record.tile_tokens * record.head_dim * bits
    first, last = np.full(record.tile_bytes, 99), np.full(record.tile_bytes, -1)
    np.minimum.at(first, byte, token)
    np.maximum.at(last, byte, token)
    assert (first[byte] == last[byte]).all(), "two tokens share a byte"
    inside = np.zeros(record.tile_bytes, dtype=bool)
    for name in sections:
        start, size = record.sections.get(name, (0, 0))
        inside[start : start + size] = True
    assert inside[byte].all()


@pytest.mark.parametrize("d", DIMS)
def test_records_are_aligned_and_without_gaps(d):
    for page_size in PAGE_SIZES:
        for key_bits in KEY_BITS:
            for value_bits in VALUE_BITS:
                record = Record(d, page_size, key_bits, value_bits)
                assert record.record_bytes % 64 == 0 and record.tile_bytes % 64 == 0
                end = 0
                for name, (start, size) in record.sections.items():
                    assert start == end
                    # scales are 2 bytes a token: 32 bytes in pages of 16, 64 otherwise
                    assert start % (64 if name != "value_scales" else 2 * record.tile_tokens) == 0
                    end = start + size
                assert end == record.tile_bytes


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("key_bits", "value_bits"), PAIRS)
def test_tokens_share_the_record_among_them(key_bits, value_bits, page_size):
    for d in (16, 48, 64, 80, 112, 128, 144):
        record = Record(d, page_size, key_bits, value_bits)
        owned = np.concatenate([layout.own_bytes(record, t) for t in range(page_size)])
        assert sorted(owned.tolist()) == list(range(record.record_bytes))
        assert len({len(layout.own_bytes(record, t)) for t in range(page_size)}) == 1


def _random_codes(d, page_size, key_bits, value_bits):
    rng = np.random.default_rng(d)
    keys = rng.integers(0, 2**key_bits, (page_size, d), dtype=np.uint8)
    return keys, rng.integers(0, 2**value_bits, (page_size, d), dtype=np.uint8)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("key_bits", "value_bits"), PAIRS)
def test_what_is_written_is_read(key_bits, value_bits, page_size):
    """Tokens in any order, over garbage; the garbage of a neighbour stays, that of padding goes."""
    for d in (48, 64, 80, 96, 112):
        record = Record(d, page_size, key_bits, value_bits)
        keys, values = _random_codes(d, page_size, key_bits, value_bits)
        scales = np.random.default_rng(2).standard_normal((2, page_size)).astype(np.float16)
        clean = np.zeros(record.record_bytes, dtype=np.uint8)
        dirty = np.random.default_rng(0).integers(0, 256, record.record_bytes, dtype=np.uint8)
        order = np.random.default_rng(1).permutation(page_size)
        for token in range(page_size):
            layout.write_token(record, clean, token, keys[token], values[token], *scales[:, token])
        for token in order:
            before = dirty.copy()
            layout.write_token(record, dirty, token, keys[token], values[token], *scales[:, token])
            assert set(np.flatnonzero(before != dirty)) <= set(layout.own_bytes(record, token))
        assert np.array_equal(clean, dirty)
        assert np.array_equal(layout.read_keys(record, clean), keys)
        assert np.array_equal(layout.read_values(record, clean[None])[0], values)
        assert np.array_equal(layout.read_scales(record, clean), scales)


@pytest.mark.parametrize("d", [16, 48, 64, 80, 96, 112])
def test_unused_bits(d):
    """As many as section 8 says, in bytes that tokens own; a store writes 0 there."""
    rng = np.random.default_rng(d)
    for page_size in (16, 64):
        for key_bits, value_bits in PAIRS:
            record = Record(d, page_size, key_bits, value_bits)
            unused = layout.unused_bits(record)
            keys = 16 if key_bits in (3, 5) and d % 32 == 16 else 0
            values = d % 64 if value_bits == 3 else 0
            assert np.unpackbits(unused).sum() == page_size * (keys + values)
            data = rng.integers(0, 256, record.record_bytes, dtype=np.uint8)
            before, codes = data.copy(), rng.integers(0, 2**value_bits, d, dtype=np.uint8)
            layout.write_token(
                record, data, 9, codes & (2**key_bits - 1), codes, *np.float16([1, 2])
            )
            own = layout.own_bytes(record, 9)
            assert not (data & unused)[own].any()
            assert (before & unused)[own].any() == (keys + values > 0)


# ---- what a reader does with bits that no store writes


def _stored(config, device, tokens=45):
    """Keys and values of one sequence in pages, and the same with every unused bit set."""
    tables = tt.make_tables(config, 2)
    k, v = randn(2, tokens, 2, config.head_dim, seed=5)
    cache = garbage_cache(config, -(-tokens // config.page_size), 2)
    tt.cache_store(k, v, cache, torch.arange(tokens), config, tables)
    unused = torch.from_numpy(layout.unused_bits(config.record))
    assert unused.any()
    return to_device(tables, device), cache.to(device), (cache | unused).to(device)


@pytest.mark.parametrize(
    ("name", "d"),
    [
        *(("k5v4u", 16), ("k5v4u", 80), ("k5v4u", 112), ("k5v3u", 80), ("k5v3u", 96)),
        *(("k5v3u", 112), ("k5v3u", 160), ("k4v3", 96), ("k3v3", 32), ("k3v3", 80)),
        *(("k3v3", 112), ("k3v3", 144), ("k3v3", 160), ("k3v2", 48), ("k3v2", 80), ("k3v2", 112)),
    ],
)
def test_readers_ignore_unused_bits(name, d, device):
    """Loading and both kernels of attention: few queries of half precision take one of them on
    CUDA, many queries or float32 the other."""
    config = tt.preset(name, d, sink_tokens=0, recent_window=0)
    tables, clean, dirty = _stored(config, device)
    table = torch.arange(2, dtype=torch.int32, device=device)[None]
    lens = torch.tensor([45], dtype=torch.int32, device=device)
    load = (table, lens, config, tables, 45, torch.float32)
    for one, other in zip(tt.cache_load(clean, *load), tt.cache_load(dirty, *load), strict=True):
        assert_same_bytes(one, other)
    for queries, dtype in ((1, torch.bfloat16), (3, torch.float16), (20, torch.float32)):
        q = randn(queries, 4, d, seed=6, dtype=dtype).to(device)
        starts = torch.tensor([0, queries], dtype=torch.int32, device=device)
        more = {"cu_seqlens_q": starts, "max_q_len": queries}
        one, other = (
            tt.paged_attention(q, cache, table, lens, config, tables, **more)
            for cache in (clean, dirty)
        )
        assert torch.isfinite(one[1]).all()
        for a, b in zip(one, other, strict=True):
            assert_same_bytes(a, b)


@pytest.mark.parametrize(
    ("d", "bits"), [(2, 1), (2, 3), (6, 5), (12, 1), (20, 1), (36, 3), (36, 5)]
)
def test_readers_ignore_unused_bits_of_rows(d, bits, device):
    levels, steps = codebook_tensors(d, bits, "lloyd", 1, device)
    signs = tt.random_signs(d, 0).to(device)
    x, q = randn(67, d, seed=7).to(device), randn(3, d, seed=8).to(device)
    clean, scale = tt.encode(x, signs, levels, steps, bits)
    dirty = clean.clone()
    dirty[:, -1] |= 0xFF << d * bits % 8 & 0xFF
    assert not torch.equal(clean, dirty)
    for read in (
        lambda rows: tt.unpack(rows, bits, d),
        lambda rows: tt.decode(rows, scale, signs, levels, bits),
        lambda rows: tt.score(q, rows, scale, signs, levels, bits),
    ):
        assert_same_bytes(read(clean), read(dirty))


@pytest.mark.parametrize("d", [16, 64, 80, 128, 1024])
def test_the_byte_that_is_never_written(d, device):
    """0x80 is level -128 wherever it is read, even where every product has the same sign."""
    config = tt.preset("k8v8", d, sink_tokens=0, recent_window=0)
    tables = to_device(tt.make_tables(config, 2), device)
    record, one = config.record, np.float16(1)
    data = np.zeros((1, 1, config.record_bytes), dtype=np.uint8)
    codes = np.full(d, 0x80, dtype=np.uint8)
    for token in range(config.page_size):
        layout.write_token(record, data[0, 0], token, codes, codes, one, one)
    cache = torch.from_numpy(data).to(device)
    length = config.page_size
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    lens = torch.tensor([length], dtype=torch.int32, device=device)
    k, v = tt.cache_load(cache, table, lens, config, tables, length, torch.float32)
    rotated = torch.full((d,), -128 / 32, device=device)
    for loaded, signs in ((k, tables.key_signs), (v, tables.value_signs)):
        expected = signs * tt.hadamard(rotated, torch.ones_like(signs))
        assert_same_bytes(loaded, expected.expand_as(loaded))
    rows = torch.full((length, d), 0x80, dtype=torch.uint8, device=device)
    scale = torch.ones(length, dtype=torch.float16, device=device)
    decoded = tt.decode(rows, scale, tables.key_signs, None, 8)
    assert_same_bytes(decoded, k[0, :, 0])

    q = decoded[:1, None] / 8  # along the keys
    score = (q.double()[:, 0] * decoded[:1].double()).sum()
    scored = tt.score(q[:, 0], rows, scale, tables.key_signs, None, 8)
    torch.testing.assert_close(scored.double(), score.expand_as(scored), rtol=1e-4, atol=0)
    for dtype in (torch.bfloat16, torch.float32):
        out, lse = tt.paged_attention(q.to(dtype), cache, table, lens, config, tables)
        logit = (q.to(dtype).double()[0, 0] * decoded[0].double()).sum() / math.sqrt(d)
        expected = logit + math.log(length)
        torch.testing.assert_close(lse[0, 0].double(), expected, rtol=1e-3, atol=0)
        torch.testing.assert_close(out[0, 0], v[0, 0, 0].to(dtype), rtol=0.01, atol=0.01)


# ---- csrc/format.h


def test_constants_of_the_header(native):
    assert native.VERSION == layout.FORMAT_VERSION
    assert native.MAX_VECTOR_DIM == layout.MAX_VECTOR_DIM
    assert native.MAX_HEAD_DIM == layout.MAX_HEAD_DIM
    assert native.MAX_TILE == layout.MAX_TILE
    assert native.VALUE_GROUP == layout.VALUE_GROUP
    assert native.LEVEL_UNIT == 1 / 32 and native.UNITS_PER_SIGMA == 4096
    assert native.NAN_SCALE == 0x7E00 and native.MAX_HALF == 65504
    assert [b for b in range(-1, 10) if native.valid_key_bits(b)] == list(KEY_BITS)
    assert [b for b in range(-1, 10) if native.valid_value_bits(b)] == list(VALUE_BITS)
    assert [n for n in range(-1, 300) if native.valid_page_size(n)] == list(PAGE_SIZES)
    for d in range(-16, 1200):
        assert native.valid_head_dim(d) == valid_head_dim(d)
    for d in (*range(-2, 700), *range(4080, 4200), 8192):
        expected = split_dim(d) if layout.valid_vector_dim(d) else (0, 0)
        assert native.split_dim(d) == expected
        for bits in range(1, 9):
            if d >= 0:
                assert native.dense_row_bytes(d, bits) == layout.dense_row_bytes(d, bits)


def test_levels_of_the_header(native):
    for bits in (2, 3, 4, 5, 8):
        count = native.num_levels(bits)
        assert count == (255 if bits == 8 else 2**bits)
        for rank in range(count):
            code = native.code_of_rank(bits, rank)
            level = rank - 127 if bits == 8 else 2 * rank - (2**bits - 1)
            assert native.uniform_level(bits, rank) == level
            assert native.level_of_code(bits, None, code) == level
    levels = [-127, -40, 40, 127]
    assert [native.level_of_code(2, levels, c) for c in range(4)] == levels


def test_widths_of_the_header(native):
    widths = [b for b in range(-1, 10) if native.valid_width(b)]
    assert widths == list(CODEC_BITS)
    assert [native.storage(b) for b in widths] == [
        *("fields", "fields", "spread", "fields", "plane", "fields")
    ]
    assert [b for b in widths if not native.has_uniform_grid(b)] == [1]
    assert [native.boundary_grain(b) for b in widths] == [16] * 5 + [1]
    modes = [m for m in range(-2, 9) if native.valid_scale_mode(m)]
    assert modes == sorted(tt.SCALE_MODES.values())
    for config in map(tt.preset, tt.PRESETS, [64] * len(tt.PRESETS)):
        assert native.valid_key_bits(config.key_bits)
        assert native.valid_value_bits(config.value_bits)


def test_addresses_of_the_header(native):
    """A cache is [num_pages, kv_heads, record_bytes], a tail [max_seqs, kv_heads, rows, 2, d]."""
    cache, tail = np.zeros((5, 3, 320)), np.zeros((4, 3, 6, 2, 16))
    for page, head in ((0, 0), (2, 1), (4, 2)):
        want = np.ravel_multi_index((page, head, 0), cache.shape)
        assert native.record_offset(page, head, 3 * 320, 320) == want
        assert native.record_offset_32(page, head, 3 * 320, 320) == want
        assert native.record_offset(page, head, 5000, 320) == 5000 * page + 320 * head
    assert native.record_offset_32(2**27, 7, 8 * 4096, 4096) == (2**30 + 7) * 4096
    for position, row in ((0, 0), (1, 1), (2, 2), (5, 5), (6, 2), (13, 5)):
        assert native.tail_row(position, 2, 4) == row
        want = np.ravel_multi_index((3, 1, row, 1, 0), tail.shape)
        assert native.tail_offset(3, 3 * 6 * 2 * 16, 1, row, 6, 16, 1) == want
        assert native.tail_offset_32(3, 3 * 6 * 2 * 16, 1, row, 6, 16, 1) == want
    assert native.tail_offset_32(2**20, 2**31, 3, 4, 6, 512, 1) == 2**51 + (22 * 2 + 1) * 512


def test_sizes_of_the_header(native):
    for d in DIMS:
        for page_size in PAGE_SIZES:
            for key_bits in KEY_BITS:
                for value_bits in VALUE_BITS:
                    ours = Record(d, page_size, key_bits, value_bits)
                    theirs = native.Record(d, page_size, key_bits, value_bits)
                    assert theirs.record_bytes == ours.record_bytes
                    assert theirs.tile_bytes == ours.tile_bytes
                    for token in (0, 1, page_size // 2, page_size - 1):
                        assert theirs.key_scale(token) == ours.key_scale(token)
                        assert theirs.value_scale(token) == ours.value_scale(token)


@pytest.mark.parametrize("d", DIMS)
def test_places_of_the_header(native, d):
    """Random codes written by the header are those written here: every token of one tile of both
    sizes, and tokens of all tiles of larger pages."""
    for key_bits, value_bits in PAIRS:
        for page_size in PAGE_SIZES:
            ours = Record(d, page_size, key_bits, value_bits)
            theirs = native.Record(d, page_size, key_bits, value_bits)
            keys, values = _random_codes(d, page_size, key_bits, value_bits)
            zero = np.float16(0)
            data = np.zeros(ours.record_bytes, dtype=np.uint8)
            other = data
            for token in range(0, page_size, 1 if page_size <= 32 else 13):
                layout.write_token(ours, data, token, keys[token], values[token], zero, zero)
                other = native.write_codes(theirs, other, "key", token, keys[token])
                other = native.write_codes(theirs, other, "value", token, values[token])
                assert np.array_equal(native.read_codes(theirs, data, "key", token), keys[token])
            assert np.array_equal(data, other)
            assert np.array_equal(native.read_codes(theirs, data, "value", 13), values[13])


@pytest.mark.parametrize("d", [16, 48, 64, 80, 96, 112, 144, 192])
def test_pieces_of_the_header(native, d):
    """Piece by piece, in the same order."""
    for page_size in (16, 64):
        for key_bits, value_bits in PAIRS:
            ours = Record(d, page_size, key_bits, value_bits)
            theirs = native.Record(d, page_size, key_bits, value_bits)
            for token in (0, 5, 10, page_size - 1):
                for channel in range(d):
                    assert theirs.key(token, channel) == ours.key(token, channel)
                    assert theirs.value(token, channel) == ours.value(token, channel)


# ---- records of latents

LATENTS = [
    (d, dr, page_size, bits)
    for d in layout.LATENT_DIMS
    for dr in layout.ROPE_DIMS
    for page_size in layout.LATENT_PAGE_SIZES
    for bits in layout.LATENT_BITS
]


def test_latent_records_of_the_header(native):
    """Sizes, and every piece of some tokens, in the same order."""
    assert [d for d in range(2000) if native.valid_latent_dim(d)] == [*layout.LATENT_DIMS]
    assert [d for d in range(200) if native.valid_rope_dim(d)] == [*layout.ROPE_DIMS]
    assert [b for b in range(-1, 10) if native.valid_latent_bits(b)] == [*layout.LATENT_BITS]
    pages = [n for n in range(300) if native.valid_latent_page_size(n)]
    assert pages == [*layout.LATENT_PAGE_SIZES]
    for shape in LATENTS:
        ours, theirs = layout.LatentRecord(*shape), native.LatentRecord(*shape)
        for name in ("row_bytes", "plane_bytes", "tile_bytes", "record_bytes"):
            assert getattr(theirs, name) == getattr(ours, name)
        for token in (0, 13, 31, shape[2] - 1):
            assert theirs.scale(token) == ours.scale(token)
            for channel in range(shape[1]):
                assert theirs.rope(token, channel) == ours.rope(token, channel)
            for channel in range(0, shape[0], 1 if shape[0] == 128 else 37):
                assert theirs.code(token, channel) == ours.code(token, channel)
    tail = np.zeros((4, 6, 160))
    assert native.latent_tail_offset(3, 6 * 160, 5, 160) == np.ravel_multi_index(
        (3, 5, 0), tail.shape
    )


@pytest.mark.parametrize("bits", layout.LATENT_BITS)
def test_every_bit_of_a_page_of_latents_has_one_owner(bits):
    """Codes, raw channels and scales share no bit, and leave none over; a token owns its bytes."""
    for d, dr, page_size in ((128, 32, 32), (256, 0, 64), (512, 64, 32)):
        record = layout.LatentRecord(d, dr, page_size, bits)
        owner = np.full((record.record_bytes, 8), -1)
        for token in range(page_size):
            pieces = [p for c in range(d) for p in record.code(token, c)]
            pieces += [layout.Piece(record.scale(token) + i, 0, 8, 0) for i in range(2)]
            raw = [record.rope(token, c) + i for c in range(dr) for i in range(2)]
            pieces += [layout.Piece(byte, 0, 8, 0) for byte in raw]
            for byte, shift, width, _ in pieces:
                assert (owner[byte, shift : shift + width] == -1).all()
                owner[byte, shift : shift + width] = token
        assert (owner >= 0).all()
        assert (owner == owner[:, :1]).all()
        assert record.record_bytes % 64 == 0
        assert not [name for name, (start, _) in record.sections.items() if start % 64]


@pytest.mark.parametrize("bits", layout.LATENT_BITS)
def test_latents_are_read_as_they_were_written(bits):
    record = layout.LatentRecord(128, 32, 64, bits)
    random = np.random.default_rng(bits)
    data = random.integers(256, size=record.record_bytes, dtype=np.uint8)
    codes = random.integers(1 << bits, size=(64, 128), dtype=np.uint8)
    ropes = random.integers(1 << 16, size=(64, 32)).astype(np.uint16)
    scales = random.random(64).astype(np.float16)
    for token in random.permutation(64):
        layout.write_latent(record, data, token, codes[token], ropes[token], scales[token])
    held = layout.read_latents(record, np.stack([data, data]))
    for part, wanted in zip(held, (codes, ropes, scales), strict=True):
        assert part.dtype == wanted.dtype
        assert np.array_equal(part, np.stack([wanted, wanted]))


def test_sizes_of_latents_on_the_page():
    rows = re.findall(r"^\| (\d) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for bits, row, plane, token in rows:
        record = layout.LatentRecord(512, 64, 64, int(bits))
        assert (record.row_bytes, record.plane_bytes) == (int(row), int(plane))
        assert record.record_bytes == 64 * int(token)


# ---- docs/format.md


def _as_python(cell):
    """A size in the page's words as an expression in d."""
    cell = cell.strip()
    if cell == "-":
        return None
    rounded = "rounded up to a multiple of 4" in cell
    cell = cell.split(",")[0].replace("div", "//").replace("mod", "%")
    cell = re.sub(r"(\d) ?(?=[d(])", r"\1 * ", cell).replace("d/", "d //")
    return f"({cell} + 3) // 4 * 4" if rounded else cell


def test_table_of_the_page():
    table = PAGE.split("| bits | key_row_bytes |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (\d) \| ([^|]+)\| ([^|]+)\| ([^|]+)\|$", table, re.MULTILINE)
    table = {int(bits): [_as_python(cell) for cell in cells] for bits, *cells in rows}
    assert sorted(table) == [2, 3, 4, 5, 8]
    for d in DIMS:
        for bits, cells in table.items():
            row, plane, block = (None if c is None else eval(c, {"d": d}) for c in cells)
            keys = Record(d, 32, bits, 4)
            assert (row, plane or 0) == (keys.key_row_bytes, keys.key_plane_bytes)
            assert (block is None) == (bits not in VALUE_BITS)
            if block is not None:
                assert block == Record(d, 32, 4, bits).value_block_bytes


def test_codebooks_of_the_page():
    """The search ratios and the examples of section 4."""
    rows = re.findall(
        r"^\| (lloyd|uniform) \| (\d) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE
    )
    assert len(rows) == 9
    for grid, bits, low, high in rows:
        low, high = float(low), float(high)
        for d in (2, 80, 128, 4096):
            book = tt.Codebook.make(d, int(bits), grid)
            for count in (2, 8, 64):
                ratios = [low + v * (high - low) / (count - 1) for v in range(count)]
                steps = tuple(float(np.float32(book.step * ratio)) for ratio in ratios)
                assert book.candidate_steps(count) == steps
            if book.levels is not None:
                levels = lloyd_max(d, int(bits))
                assert book.levels == tuple(np.rint(levels / (levels[-1] / 127)))
                assert book.step == levels[-1] / 127
    examples = PAGE.split("for `d = 128`:\n\n```\n")[1].split("```")[0]
    examples = re.findall(r"^(\w+), (\d) bits\n((?:  .*\n)+)", examples, re.MULTILINE)
    assert len(examples) == 2
    for grid, bits, lines in examples:
        book = tt.Codebook.make(128, int(bits), grid)
        lines = {name: words for name, *words in map(str.split, lines.splitlines())}
        # The last bits of a float64 depend on the processor. What encoders get does not.
        assert math.isclose(float(lines["step"][0]), book.step, rel_tol=1e-14)
        assert (float(np.float32(lines["step"][0])),) == book.candidate_steps(1)
        assert tuple(float(np.float32(w)) for w in lines["candidates"]) == book.candidate_steps(8)
        assert book.levels == (tuple(map(int, lines["levels"])) if "levels" in lines else None)


def test_constants_of_the_page():
    """Which sizes need a constant of float64 (tests/data/constants.bin pins their scales)."""
    text = re.search(r"another number for `d` = ([\d,\sand]+),", PAGE)
    assert text
    dims = [d for d in range(2, layout.MAX_VECTOR_DIM + 1) if layout.valid_vector_dim(d)]
    once = {d: np.float32(32 / math.sqrt(d)) for d in dims}
    twice = {d: np.float32(32) / np.sqrt(np.float32(d)) for d in dims}
    assert [d for d in dims if once[d] != twice[d]] == [*map(int, re.findall(r"\d+", text[1]))]


def test_version_of_the_page():
    assert f"Format version: **{layout.FORMAT_VERSION}**" in PAGE


def test_records_that_do_not_exist():
    for arguments, text in (
        ((40, 32, 4, 4), "head_dim is 40, supported in page records: multiples of 16 up to 1024"),
        ((176, 32, 4, 4), "head_dim is 176"),
        ((2048, 32, 4, 4), "head_dim is 2048"),
        ((0, 32, 4, 4), "head_dim is 0"),
        ((64, 8, 4, 4), "page_size is 8, supported: 16, 32, 64, 128"),
        ((64, 32, 6, 4), "key_bits is 6, supported: 2, 3, 4, 5, 8"),
        ((64, 32, 4, 5), "value_bits is 5, supported: 2, 3, 4, 8"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            Record(*arguments)
