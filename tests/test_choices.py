"""Which CUDA kernel takes a call (csrc/choices), asked on the CPU about any GPU.

A reason is a promise: there is a call for every one that a header holds (choices_cases.py), and
what presets, widths and head_dims take is compared with the lists that they come from.
"""

import itertools
import re

import numpy as np
import pytest
import torch

import torch_turboquant as tt
from tests.choices_cases import (
    CALLS,
    CASES,
    DIMS,
    DRAFTS,
    FEW_ROWS,
    FILL,
    HALF,
    HEADERS,
    MANY_ROWS,
    MIXED,
    MORE_THAN_32,
    PAIR,
    TOO_FEW,
    UP_TO_32,
    UP_TO_32_ROWS,
    Case,
)
from tests.helpers import ROOT
from torch_turboquant import choices
from torch_turboquant.choices import kernel_choice
from torch_turboquant.format import KEY_BITS, VALUE_BITS, Record, valid_head_dim

# ---- every condition


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case.reason}")
def test_a_condition_decides(case):
    assert case.ask() == (case.kernel, case.reason)


def reasons_of(header: str) -> set[str]:
    """The string literals of a header of csrc/choices."""
    lines = (ROOT / f"csrc/choices/{header}.h").read_text().splitlines()
    code = [line.partition("//")[0] for line in lines if not line.startswith("#include")]
    return set(re.findall(r'"([^"]+)"', "\n".join(code)))


@pytest.mark.parametrize("header", HEADERS)
def test_every_reason_is_reached(header):
    reached = {case.ask()[1] for case in CASES if case.op in HEADERS[header]}
    assert reasons_of(header) == reached and len(reached) >= 2


def test_every_header_has_its_cases():
    headers = {path.stem for path in (ROOT / "csrc/choices").glob("*.h")}
    assert headers == {*HEADERS, "device"} and not reasons_of("device")
    assert set(itertools.chain.from_iterable(HEADERS.values())) == set(CALLS)
    assert {case.op for case in CASES} == set(CALLS)


# ---- attention: presets, widths and head_dims


def split_kv_dims() -> list[int]:
    """The head_dims that the split-KV kernel is compiled for."""
    return instances("split_kv_*.cu")


def key_tiles_dims() -> list[int]:
    """The head_dims that the key-tile kernel is compiled for."""
    return instances("key_tiles*.cu")


def instances(files: str) -> list[int]:
    """The head_dims that some files instantiate kernels for."""
    found = (ROOT / "csrc/cuda/attention/instances").glob(files)
    texts = [path.read_text() for path in found]
    return sorted({int(d) for text in texts for d in re.findall(r"find_kernel<(\d+)[,>]", text)})


def attention(**changes: int) -> str:
    return Case("paged_attention", changes, "", "").ask()[0]


def test_the_split_kv_kernel_is_chosen_where_it_is_compiled():
    dims = [d for d in range(16, 1025, 16) if valid_head_dim(d)]
    assert [d for d in dims if attention(d=d) == "split_kv"] == split_kv_dims()
    assert split_kv_dims() == [*(d for d in dims if d <= 256), 512, 576]


@pytest.mark.parametrize("d", split_kv_dims())
@pytest.mark.parametrize("name", tt.PRESETS)
def test_every_preset_takes_the_split_kv_kernel(name, d):
    def choice(rows: int, max_q_len: int = 1, device: str = "H200") -> tuple[str, str]:
        heads = {"q_heads": 2 * rows, "kv_heads": 2, "max_q_len": max_q_len}
        return kernel_choice("paged_attention", head_dim=d, preset=name, device=device, **heads)

    limit = up_to = 64 if d <= 256 else 32  # of the kernels that read codes again for more rows
    more, tiles = "many query rows per KV head", d <= row_tiles_channels()[-1]
    if tiles:
        limit = 16 if d in (64, 128) else 32
        more = f"more than {limit} query rows per KV head"
    for rows in range(1, limit + 1):
        assert choice(rows) == ("split_kv", f"at most {limit} query rows per KV head")
        assert choice(1, max_q_len=rows) == choice(rows)
    for rows in range(limit + 1, 33 if d in key_tiles_dims() else limit + 1):
        assert choice(rows) == choice(1, max_q_len=rows) == ("key_tiles", UP_TO_32_ROWS)
        limit = 32
    for found in (choice(limit + 1), choice(1, limit + 1), choice(1, 1000)):
        assert found.kernel == ("row_tiles" if tiles else "general")
        assert found.reason.startswith(more)
    for device, kernel in (("A100", "split_kv"), ("B200", "split_kv"), ("T4", "general")):
        assert choice(up_to, device=device).kernel == kernel
        assert choice(up_to + 1, device=device).kernel == "general"


def row_tiles_channels() -> list[int]:
    """The numbers of channels that the row-tile kernel is compiled for; head_dims are padded."""
    return instances("row_tiles.cu")


def test_the_row_tile_kernel_is_chosen_up_to_the_most_channels_that_it_is_compiled_for():
    dims = [d for d in range(16, 1025, 16) if valid_head_dim(d)]
    taken = [d for d in dims if attention(d=d, group=33) == "row_tiles"]
    assert taken == [d for d in dims if d <= row_tiles_channels()[-1]]
    assert row_tiles_channels() == [64, 128, 192, 256]


def test_every_pair_of_codes_takes_row_tiles_but_those_with_5_bits_of_a_table():
    for keys, values in itertools.product(
        [(2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1), (5, 0), (5, 1), (8, 1)],
        [(2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1), (8, 1)],
    ):
        codes = dict(
            zip(("k_bits", "k_uniform", "v_bits", "v_uniform"), keys + values, strict=True)
        )
        wanted = "general" if keys == (5, 0) else "row_tiles"
        assert attention(group=33, **codes) == wanted
        assert attention(group=33, dtype=HALF, **codes) == wanted


def test_mixed_batches():
    def choice(max_q_len: int, seqs: int, tokens: int | None, **others: object) -> tuple[str, str]:
        call = {"head_dim": 128, "q_heads": 32, "kv_heads": 8, "preset": "k5v4u", "device": "H200"}
        batch = {"max_q_len": max_q_len, "seqs": seqs, "tokens": tokens}
        return kernel_choice("paged_attention", **{**call, **batch, **others})

    both = ("split_kv+row_tiles", MIXED)
    assert choice(512, 61, 512 + 60) == both
    assert choice(512, 1, 512) == choice(1000, 1, 512) == choice(9, 32, None)  # uniform
    assert choice(9, 32, 9 * 32) == choice(9, 32, None) == ("row_tiles", MANY_ROWS)
    drafts_too = ("split_kv+row_tiles", DRAFTS)
    assert choice(9, 32, 9 * 32 - 1) == choice(9, 32, 9 * 32 + 1) == drafts_too
    assert choice(8, 32, 8 * 32) == choice(8, 32, None) == ("key_tiles", UP_TO_32_ROWS)
    some_drafts = ("split_kv+key_tiles", DRAFTS)
    assert choice(8, 32, 8 * 32 - 1) == choice(8, 32, 8 * 32 + 1) == some_drafts
    assert choice(4, 16, 20) == choice(4, 16, 4 * 16) == ("split_kv", FEW_ROWS)
    # one query has more rows than split-KV takes, or all fit
    assert choice(2, 32, 40, q_heads=17, kv_heads=1) == ("row_tiles", MANY_ROWS)
    # a block of 16 rows holds one query of 16 heads
    assert choice(2, 32, 40, q_heads=16, kv_heads=1) == ("split_kv+key_tiles", MIXED)
    assert choice(2, 32, 40, q_heads=8, kv_heads=1) == ("split_kv", FEW_ROWS)
    wide = {"head_dim": 256, "kv_heads": 1}
    assert choice(2, 32, 40, q_heads=16, **wide) == ("split_kv", UP_TO_32)
    assert choice(2, 32, 40, q_heads=17, **wide) == both
    assert choice(2, 32, 40, q_heads=33, **wide) == ("row_tiles", MORE_THAN_32)
    # one kernel takes all
    assert choice(512, 61, 572, preset=None, key_bits=3, value_bits=4) == ("row_tiles", PAIR)
    assert choice(512, 61, 572, head_dim=96) == both
    assert choice(512, 61, 572, head_dim=512)[0] == "general"
    assert choice(512, 61, 572, dtype="float32")[0] == "general"
    assert choice(512, 61, 572, device="A100")[0] == "general"


@pytest.mark.parametrize(
    ("head_dim", "group", "smallest", "second"),
    [
        (128, 4, 1, (1, 4)),  # 255 decode steps have blocks of 4 rows
        (128, 1, 4, (4, 16)),
        (128, 3, 1, (1, 5)),
        (128, 5, 1, (1, 3)),
        (128, 8, 1, (1, 2)),
        (128, 9, 1, (0, 1)),  # 16 rows hold one query
        (128, 16, 1, (0, 1)),
        (64, 4, 1, (1, 4)),
        (256, 4, 1, (1, 2)),
        (256, 8, 1, (0, 1)),
        (256, 12, 1, (0, 2)),  # several blocks of the same 8 rows
        (256, 32, 1, (0, 1)),
        (32, 4, 2, (0, 2)),  # no block has fewer rows than 8
        (32, 1, 8, (0, 8)),
    ],
)
def test_who_is_short_in_a_mixed_call(native, head_dim, group, smallest, second):
    """Decode steps beside one prompt have the smallest block, beside several a launch of their own
    if drafts would take another one."""
    alone = native.split_kv_queries(head_dim, group, 200, 61, 260)
    assert alone == (0, smallest)
    assert native.split_kv_queries(head_dim, group, 200, 61, 261) == second
    assert native.split_kv_queries(head_dim, group, 200, 259, 255 + 4 * 161) == second
    assert native.split_kv_queries(head_dim, group, 200, 61, 230) == alone  # some have no query
    assert native.split_kv_queries(head_dim, group, 200, 1, 300) == alone  # padding


def test_launches_of_decode_steps_beside_drafts(native):
    """(few_queries, split_kv_queries) of 4 queries at most, all of which split-KV takes."""

    def launches(group, drafts, seqs=40, head_dim=128):
        return native.split_kv_queries(head_dim, group, 4, seqs, seqs + 3 * drafts)

    assert launches(4, drafts=8) == launches(4, drafts=30) == (1, 4)
    assert launches(4, drafts=31) == launches(4, drafts=40) == (0, 4)
    assert launches(1, drafts=8) == (0, 4)  # one block holds four queries
    assert launches(2, drafts=8) == (2, 4)
    assert launches(4, drafts=8, seqs=15) == (0, 4)
    assert launches(4, drafts=8, head_dim=32) == (0, 4)  # no block has fewer rows than 8
    assert launches(4, drafts=0) == (1, 4)  # and some have none


def test_many_sequences_of_9_to_16_rows():
    """More KV heads of sequences than multiprocessors: key tiles instead of blocks of 16 rows."""

    def choice(max_q_len: int, seqs: int, tokens: int | None = None, **others: object) -> str:
        call = {"head_dim": 128, "q_heads": 32, "kv_heads": 8, "preset": "k5v4u", "device": "H200"}
        batch = {"max_q_len": max_q_len, "seqs": seqs, "tokens": tokens}
        return kernel_choice("paged_attention", **{**call, **batch, **others}).kernel

    of_few_instructions = ("k4v4u", "k3v3", "k3v2", "k2v2")  # for split-KV
    for name, room in itertools.product(tt.PRESETS, (2048, 2049, None)):
        others = {"preset": name, "max_seq_len": room}
        wanted = "split_kv" if room != 2048 and name in of_few_instructions else "key_tiles"
        assert choice(4, 17, **others) == choice(3, 17, **others) == wanted
        assert choice(4, 16, **others) == choice(2, 17, **others) == "split_kv"
    assert choice(5, 17) == "key_tiles"  # as with few sequences
    one_query = {"q_heads": 9, "kv_heads": 1}
    assert choice(1, 133, **one_query) == choice(1, 133, q_heads=16, kv_heads=1) == "key_tiles"
    assert choice(1, 132, **one_query) == choice(1, 133, q_heads=8, kv_heads=1) == "split_kv"
    # decode steps beside drafts have split-KV, unless they are few
    assert choice(4, 20, 20 + 3 * 15) == "split_kv+key_tiles"
    assert choice(4, 20, 20 + 3 * 16) == "key_tiles"
    # others cannot take key tiles, or not with so few rows
    assert choice(4, 32, head_dim=64) == choice(4, 32, head_dim=96) == "split_kv"
    assert choice(4, 32, device="A100") == choice(4, 32, dtype="float32") == "split_kv"
    assert choice(4, 32, preset=None, key_bits=3, value_bits=4) == "row_tiles"


def test_other_calls_of_attention():
    call = {"q_heads": 32, "kv_heads": 8, "preset": "k5v4u"}

    def choice(head_dim: int = 128, device: str = "H200", **others: object) -> tuple[str, str]:
        others = {**call, **others}
        return kernel_choice("paged_attention", head_dim=head_dim, device=device, **others)

    assert choice().kernel == "split_kv"
    assert choice(tail=True).kernel == "split_kv"
    assert choice(tail=True, dtype=torch.float16).kernel == "split_kv"
    assert choice(dtype="float32").kernel == "split_kv"
    assert choice(tail=True, dtype="float32") == ("general", "the exact tail is float32")
    assert choice(320).kernel == "general" and choice(320).reason.endswith("this head_dim")
    assert choice(device="T4") == ("general", "compute capability below 8.0")


def test_widths_presets_and_pairs(native):
    """Every width that pages can have is in a preset, and kernels are compiled for presets only."""
    widths = range(-1, 17)
    assert [bits for bits in widths if native.valid_key_bits(bits)] == list(KEY_BITS)
    assert [bits for bits in widths if native.valid_value_bits(bits)] == list(VALUE_BITS)

    presets = {(p.key_bits, p.key_grid, p.value_bits, p.value_grid) for p in tt.PRESETS.values()}
    assert {pair[0] for pair in presets} == set(KEY_BITS)
    assert {pair[2] for pair in presets} == set(VALUE_BITS)

    def codes(all_bits: tuple[int, ...]) -> list[tuple[int, str]]:
        grids = {8: ["uniform"]}
        return [(bits, grid) for bits in all_bits for grid in grids.get(bits, choices.GRIDS)]

    pairs = {
        (key_bits, key_grid, value_bits, value_grid)
        for (key_bits, key_grid), (value_bits, value_grid) in itertools.product(
            codes(KEY_BITS), codes(VALUE_BITS)
        )
        if kernel_choice(
            "paged_attention",
            **{"head_dim": 128, "q_heads": 8, "kv_heads": 8, "device": "H200"},
            **{"key_bits": key_bits, "value_bits": value_bits},
            **{"key_grid": key_grid, "value_grid": value_grid},
        ).kernel
        == "split_kv"
    }
    assert pairs == presets and len(pairs) == len(tt.PRESETS)


# ---- the codec: how many vectors are enough


@pytest.mark.parametrize("d", [64, 128, 256])
def test_stores_of_a_decode_step_and_of_a_prompt(d):
    # two warps of a block of 16 share 32 vectors of 64 channels, 16 of 128 or 8 of 256
    enough = 2048 // d * (132 * 16 // 2) // (2 * 8)  # tokens with 8 heads, keys and values
    span = 32 if d == 64 else 16

    def store(tokens: int, device: str = "H200") -> tuple[str, str]:
        call = {"head_dim": d, "tokens": tokens, "kv_heads": 8, "preset": "k4v4", "search": 1}
        return kernel_choice("cache_store", **call, device=device)

    assert store(1) == store(enough - span) == ("step", TOO_FEW)
    assert store(enough) == store(100_000, "T4") == ("bulk", FILL)


def test_several_candidates_need_shared_memory():
    call = {"head_dim": 128, "tokens": 100_000, "kv_heads": 8, "preset": "k4v4", "search": 2}
    assert kernel_choice("cache_store", **call, device="H200").kernel == "bulk"
    few_warps = "step", "shared memory of the device holds too few warps"
    assert kernel_choice("cache_store", **call, device="T4") == few_warps


def test_wide_pages_of_8_bits_have_large_tiles():
    assert Record(1024, 16, 8, 8).tile_bytes < 65536 < Record(1024, 32, 8, 8).tile_bytes
    call = {"head_dim": 1024, "tokens": 1, "kv_heads": 8, "preset": "k8v8"}
    large = "tiles of 64 KiB or more"
    for page_size, reason in ((32, large), (128, large), (16, DIMS)):
        found = kernel_choice("cache_store", **call, page_size=page_size, device="H200")
        assert found == ("generic", reason)


def test_standalone_vectors():
    def decode(vectors: int) -> tuple[str, str]:
        return kernel_choice("decode", head_dim=128, vectors=vectors, device="H200")

    def encode(vectors: int) -> tuple[str, str]:
        return kernel_choice("encode", head_dim=128, vectors=vectors, bits=4, device="H200")

    assert decode(16 * 4 * 132 - 16) == encode(1000) == ("generic", TOO_FEW)
    assert decode(16 * 4 * 132) == encode(100_000) == ("bulk", FILL)


def test_scores_and_sketches():
    call = {"head_dim": 128, "keys": 4096, "device": "H200"}
    assert kernel_choice("score", bits=4, **call).kernel == "one_query"
    assert kernel_choice("score", bits=4, sketch_bits=128, **call).kernel == "one_query"
    assert kernel_choice("score", bits=8, sketch_bits=128, **call).kernel == "general"
    assert kernel_choice("score", bits=5, **call).kernel == "general"
    assert kernel_choice("score", bits=5, grid="uniform", **call).kernel == "one_query"
    assert kernel_choice("qjl_score", **call).kernel == "one_query"
    dense = kernel_choice("qjl_score", **call, dense=True)
    assert dense == ("general", "the projection is dense")
    odd = kernel_choice("score", bits=4, **{**call, "head_dim": 80})
    assert odd == ("general", "rows do not start at multiples of a load")
    sketch = kernel_choice("qjl_sketch", head_dim=128, vectors=1 << 16, device="A100")
    assert sketch == ("bulk", "many 16-bit vectors")


# ---- latents


@pytest.mark.parametrize("name", tt.latent.LATENT_PRESETS)
def test_latents_by_preset_or_bits(name):
    """Presets for keys and values, too: latents have the bits of keys."""
    config = tt.latent_preset(name)
    found = kernel_choice("mla_attention", preset=name, device="H200")
    uniform = name in ("k8", "k5u", "k4u")
    assert found.kernel == ("key_tiles" if uniform else "warp_tiles")
    many = kernel_choice("mla_attention", preset=name, device="H200", q_heads=8, max_q_len=3)
    assert many.kernel == ("key_tiles" if uniform else "row_tiles")
    shape = {"bits": config.bits, "grid": config.grid, "device": "H200"}
    assert kernel_choice("mla_attention", **shape) == found
    both = {"k8": "k8v8", "k5u": "k5v4u", "k4u": "k4v4u", "k4": "k4v4", "k3": "k3v3"}[name]
    assert kernel_choice("mla_attention", preset=both, device="H200") == found
    stored = {"latent_dim": 512, "device": "H200"}
    few = kernel_choice("mla_store", tokens=64, preset=name, **stored)
    assert few.kernel == ("step" if config.bits in (4, 5) else "table")
    assert kernel_choice("mla_store", tokens=64, bits=config.bits, **stored) == few
    assert kernel_choice("mla_store", tokens=600, preset=name, **stored).kernel == "table"
    assert kernel_choice("mla_store", tokens=1, preset=name, **stored, rotated=True)[0] == "table"
    half = {"dtype": "float16", "rope_dtype": "bfloat16"}
    assert kernel_choice("mla_attention", **shape, **half).kernel == "general"
    assert kernel_choice("mla_attention", **shape, dtype="float16") == found


@pytest.mark.parametrize("name", ["head_dim", "vectors", "bits", "search"])
def test_sizes_are_whole_numbers(name):
    """Of NumPy, too, but no truth values."""
    shape = {"head_dim": 128, "vectors": 8, "bits": 4, "search": 1, "device": "H200"}
    expected = kernel_choice("encode", **shape)
    assert kernel_choice("encode", **{**shape, name: np.int64(shape[name])}) == expected
    for wrong in (True, 8.0, "8"):
        message = f"{name} is {wrong!r}, which is no whole number"
        with pytest.raises(ValueError, match=re.escape(message)):
            kernel_choice("encode", **{**shape, name: wrong})


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({}, "must have a preset, or bits, got neither"),
        ({"preset": "k4u", "bits": 4}, "a preset has its bits and grid: give either"),
        ({"preset": "k6"}, "unknown preset for latents 'k6'"),
        ({"bits": 6}, "bits is 6, supported for latents"),
        ({"preset": "k4u", "latent_dim": 64}, "latent_dim is 64"),
        ({"preset": "k4", "q_heads": 0}, "q_heads is 0"),
        ({"preset": "k4", "max_q_len": 0}, "max_q_len is 0"),
    ],
)
def test_bad_latents(shape, message):
    with pytest.raises(ValueError, match=message):
        kernel_choice("mla_attention", device="H200", **shape)
