"""Which CUDA kernel takes a call (csrc/choices), asked on the CPU about any GPU.

A reason is a promise: here is a call for every one that a header holds, and what presets, widths
and head_dims take is compared with the lists that they come from.
"""

import argparse
import ctypes
import inspect
import itertools
import json
import re
from typing import NamedTuple

import pytest
import torch

import torch_turboquant as tt
from tests.helpers import ROOT
from torch_turboquant import __main__ as command_line
from torch_turboquant import _library, choices
from torch_turboquant._library import choose_kernel
from torch_turboquant.choices import GPUS, kernel_choice
from torch_turboquant.format import KEY_BITS, VALUE_BITS, Record, valid_head_dim

HALF, FULL, BF16 = 5, 6, 15  # csrc/dtype.h
TWO_GIB = 1 << 31

# A call of each op by the facts that csrc/cpu/common/choices.cpp reads, in its order: on an H200
# the fastest kernel takes it.
ONE = {"width": 4, "candidates": 1, "token_stride": 2048, "head_stride": 256}
KEYS, VALUES = ({f"{kind}_{name}": fact for name, fact in ONE.items()} for kind in ("k", "v"))
CODES = {"bits": 4, "uniform": 0}
CALLS: dict[str, dict[str, int]] = {
    "paged_attention": {
        "d": 128,
        **{f"k_{name}": fact for name, fact in CODES.items()},
        **{f"v_{name}": fact for name, fact in CODES.items()},
        **{"group": 4, "q_len": 1, "seqs": 1, "tokens": 1, "dtype": BF16, "tail": 1},
    },
    "mla_attention": {"d": 512, "bits": 4, "uniform": 1, "dtype": BF16, "rope_dtype": BF16},
    "encode": {"d": 128, "dtype": BF16, "merges": 1, "tokens": 4096, "heads": 8, **ONE},
    "decode": {"d": 128, "dtype": BF16, "vectors": 1 << 16, "aligned": 1},
    "cache_store": {
        **{"d": 128, "dtype": BF16, "tokens": 4096, "heads": 8, **KEYS, **VALUES},
        **{"pages": 1024, "tile_bytes": 4224, "tail": 1, "aligned": 1, "seqs": 1, "max_seqs": 1},
    },
    "cache_load": {"d": 128, "dtype": BF16, "seqs": 4, "max_length": 4096, "heads": 8, "width": 4},
    "score": {
        **{"has_codes": 1, "has_sketch": 0, "dense": 0, **CODES, "m": 128, "d": 128},
        **{"batch": 1, "queries": 1, "keys": 4096, "word_rows": 1, "aligned": 1},
    },
    "qjl_sketch": {"dense": 0, "d": 128, "vectors": 1 << 16, "dtype": BF16},
    "linear_packed": {"tokens": 1, "dtype": BF16},
}
HEADERS = {
    "attention": ["paged_attention"],
    "codec": ["encode", "decode", "cache_store", "cache_load"],
    "linear": ["linear_packed"],
    "mla": ["mla_attention"],
    "score": ["score", "qjl_sketch"],
}


class Case(NamedTuple):
    """The call of CALLS with some facts changed."""

    op: str
    changes: dict[str, int]
    kernel: str
    reason: str
    gpu: str = "H200"

    def ask(self) -> tuple[str, str]:
        assert set(self.changes) <= set(CALLS[self.op])
        return choose_kernel(
            self.op, [*{**CALLS[self.op], **self.changes}.values()], GPUS[self.gpu]
        )


FILL, TOO_FEW = "enough vectors to fill the device", "too few vectors to fill the device"
DIMS, COUNTERS = "head_dim is not 64, 128 or 256", "too many vectors for 32-bit counters"
STRIDE, BOTH = "a stride of 2 GiB or more", {"k_candidates": 2, "v_candidates": 2}
PAIR = "the split-KV kernel is not compiled for this pair of key and value codes"
FEW_ROWS = "at most 16 query rows per KV head"
MANY_ROWS = "more than 16 query rows per KV head"
MORE_THAN_8 = "more than 8 query rows per KV head"
UP_TO_32_ROWS, UNIFORM = "17 to 32 query rows per KV head", {"k_uniform": 1, "v_uniform": 1}
MIXED = "few query rows per KV head in some sequences, more in others"
UP_TO_64 = "at most 64 query rows per KV head"
UP_TO_32 = "at most 32 query rows per KV head"
MANY = "many query rows per KV head"
WITHOUT, FULL_TOKENS = "without products of warpgroups", "256 tokens of float32"
NO_PRODUCTS = f"{MANY}, {WITHOUT}"
NO_TILE_DIM = f"{MANY}, and the row-tile kernel is not compiled for this head_dim"
NO_TILE_CODES = f"{MANY}, and the row-tile kernel does not expand these codes"
FULL_ROWS = f"{MANY}, of float32"
NO_DIM = "the split-KV kernel is not compiled for this head_dim"
MANY_STEPS = "a codebook has more than 8 candidate steps"
NARROW = "several candidate steps need head_dim <= 128"
SEQS = "2^31 sequences in the exact tail or more"
TAIL = "the exact tail does not start at a multiple of 8 bytes"
OF_LATENTS = "uniform grid of 4, 5 or 8 bits"
CONSTANTS = "signs, center or projection are not aligned to 16 bytes"
NO_SKETCH_DIM = "the other kernels are not compiled for this head_dim"
FEW = {"tokens": 1}
CASES = [
    Case("paged_attention", {}, "split_kv", FEW_ROWS),
    Case("paged_attention", {"d": 256}, "split_kv", "at most 8 query rows per KV head"),
    Case("paged_attention", {"group": 17}, "key_tiles", UP_TO_32_ROWS),
    Case("paged_attention", {"group": 33}, "row_tiles", MANY_ROWS),
    Case("paged_attention", {"d": 256, "group": 9}, "row_tiles", MORE_THAN_8),
    Case("paged_attention", {"group": 32, **UNIFORM, "k_bits": 5}, "key_tiles", UP_TO_32_ROWS),
    Case("paged_attention", {"group": 17, "k_bits": 2}, "row_tiles", PAIR),
    Case("paged_attention", {"group": 17, "d": 64}, "row_tiles", MANY_ROWS),
    Case("paged_attention", {"group": 17}, "split_kv", UP_TO_64, "A100"),
    Case("paged_attention", {"q_len": 5, "tokens": 6, "seqs": 2}, "split_kv+key_tiles", MIXED),
    Case("paged_attention", {"q_len": 9, "tokens": 10, "seqs": 2}, "split_kv+row_tiles", MIXED),
    Case("paged_attention", {"k_bits": 2}, "row_tiles", PAIR),
    Case("paged_attention", {"group": 64}, "split_kv", UP_TO_64, "A100"),
    Case("paged_attention", {"group": 65}, "general", NO_PRODUCTS, "A100"),
    Case("paged_attention", {"group": 65, "dtype": FULL}, "general", FULL_ROWS),
    Case("paged_attention", {"group": 64, "d": 96}, "split_kv", UP_TO_64),
    Case("paged_attention", {"group": 65, "d": 96}, "general", NO_TILE_DIM),
    Case("paged_attention", {"group": 32, "d": 512}, "split_kv", UP_TO_32),
    Case("paged_attention", {"group": 33, "d": 512}, "general", NO_TILE_DIM),
    Case("paged_attention", {"group": 65, "k_bits": 5}, "general", NO_TILE_CODES),
    Case("paged_attention", {"dtype": FULL}, "general", "the exact tail is float32"),
    Case("paged_attention", {"dtype": FULL, "tail": 0}, "split_kv", UP_TO_64),
    Case("paged_attention", {"d": 320}, "general", NO_DIM),
    Case("paged_attention", {"k_bits": 5}, "general", PAIR),
    Case("paged_attention", {"v_uniform": 1}, "row_tiles", PAIR),
    Case("paged_attention", {"v_uniform": 1}, "general", PAIR, "A100"),
    Case("paged_attention", {}, "general", "compute capability below 8.0", "T4"),
    Case("encode", {}, "bulk", FILL),
    Case("encode", {"merges": 0}, "generic", "the leading dimensions do not merge into two"),
    Case("encode", {"d": 96}, "generic", DIMS),
    Case("encode", {"dtype": FULL}, "generic", "dtype is float32"),
    Case("encode", {"width": 8, "candidates": 8}, "bulk", FILL),
    Case("encode", {"width": 8, "candidates": 9}, "generic", MANY_STEPS),
    Case("encode", {"d": 256, "width": 8, "candidates": 2}, "bulk", FILL),
    Case("encode", {"candidates": 9}, "generic", MANY_STEPS),
    Case("encode", {"d": 256, "candidates": 2}, "generic", NARROW),
    Case("encode", {"tokens": 100, "heads": 1}, "generic", TOO_FEW),
    Case("encode", {"tokens": TWO_GIB}, "generic", COUNTERS),
    Case("encode", {"token_stride": TWO_GIB}, "generic", STRIDE),
    Case("encode", {"head_stride": TWO_GIB}, "generic", STRIDE),
    Case("decode", {}, "bulk", FILL),
    Case("decode", {"aligned": 0}, "generic", "packed does not start at a multiple of 8 bytes"),
    Case("decode", {"d": 80}, "generic", DIMS),
    Case("decode", {"dtype": FULL}, "generic", "dtype is float32"),
    Case("decode", {"vectors": 100}, "generic", TOO_FEW),
    Case("decode", {"vectors": TWO_GIB}, "generic", COUNTERS),
    Case("cache_store", {}, "bulk", FILL),
    Case("cache_store", FEW, "step", TOO_FEW),
    Case("cache_store", {"dtype": HALF, **FEW}, "step", TOO_FEW),
    Case("cache_store", BOTH, "step", "shared memory of the device holds too few warps", "T4"),
    Case("cache_store", {"d": 256, **BOTH}, "step", NARROW),
    Case("cache_store", {"d": 96}, "generic", DIMS),
    Case("cache_store", {"dtype": FULL}, "generic", "dtype is float32"),
    Case("cache_store", {"v_width": 8}, "bulk", FILL),
    Case("cache_store", {"k_width": 8, **BOTH, **FEW}, "step", TOO_FEW),
    Case("cache_store", {"d": 256, "k_width": 8, "k_candidates": 8}, "bulk", FILL),
    Case("cache_store", {"d": 256, "k_width": 8, "v_candidates": 8}, "step", NARROW),
    Case("cache_store", {"k_width": 8, "v_width": 8, **BOTH}, "bulk", FILL, "T4"),
    Case("cache_store", {"k_width": 8, "k_candidates": 9}, "generic", MANY_STEPS),
    Case("cache_store", {"k_candidates": 9}, "generic", MANY_STEPS),
    Case("cache_store", {"v_head_stride": TWO_GIB}, "generic", STRIDE),
    Case("cache_store", {"tokens": TWO_GIB}, "generic", "2^31 tokens or more"),
    Case("cache_store", {"pages": TWO_GIB // 8, **FEW}, "generic", "2^31 records or more"),
    Case("cache_store", {"tile_bytes": 1 << 16, **FEW}, "generic", "tiles of 64 KiB or more"),
    Case("cache_store", {"seqs": TWO_GIB, **FEW}, "generic", SEQS),
    Case("cache_store", {"max_seqs": TWO_GIB // 8, **FEW}, "generic", SEQS),
    Case("cache_store", {"seqs": TWO_GIB, "tail": 0, **FEW}, "step", TOO_FEW),
    Case("cache_store", {"aligned": 0, **FEW}, "generic", TAIL),
    Case("cache_load", {}, "bulk", FILL),
    Case("cache_load", {"width": 8}, "generic", "8-bit values"),
    Case("cache_load", {"d": 80}, "generic", DIMS),
    Case("cache_load", {"seqs": 1, "max_length": 1}, "generic", TOO_FEW),
    Case("cache_load", {"seqs": 1, "max_length": TWO_GIB}, "generic", COUNTERS),
    Case("score", {}, "one_query", "one query, head_dim 128"),
    Case("score", {"word_rows": 0}, "general", "rows do not start at multiples of a load"),
    Case("mla_attention", {}, "warpgroups", OF_LATENTS),
    Case("mla_attention", {"d": 256, "bits": 8}, "warpgroups", OF_LATENTS),
    Case("mla_attention", {"d": 256, "bits": 5}, "warpgroups", OF_LATENTS),
    Case("mla_attention", {"dtype": HALF, "rope_dtype": HALF}, "warpgroups", OF_LATENTS),
    Case("mla_attention", {"d": 128}, "general", "latent_dim is neither 256 nor 512"),
    Case("mla_attention", {"uniform": 0}, "general", f"codes are not of a {OF_LATENTS}"),
    Case("mla_attention", {"bits": 3}, "general", f"codes are not of a {OF_LATENTS}"),
    Case("mla_attention", {"dtype": FULL}, "general", "queries are float32"),
    Case("mla_attention", {"dtype": HALF}, "general", "queries and raw channels differ in dtype"),
    Case("mla_attention", {}, "general", "the device has no products of warpgroups", "A100"),
    Case("mla_attention", {}, "general", "the device has no products of warpgroups", "B200"),
    Case("score", {"queries": 2}, "general", "more than one query"),
    Case("score", {"d": 64}, "general", "head_dim is not 128"),
    Case("score", {"keys": 31}, "general", "fewer than 32 keys"),
    Case("score", {"batch": 65536}, "general", "more than 65535 rows of keys"),
    Case("score", {"aligned": 0}, "general", CONSTANTS),
    Case("score", {"has_sketch": 1}, "one_query", "one query, head_dim 128"),
    Case("score", {"has_sketch": 1, "dense": 1}, "general", "the projection is dense"),
    Case("score", {"has_sketch": 1, "m": 64}, "general", "sketches do not have 128 bits"),
    Case("score", {"bits": 5}, "general", "the one-query kernel is not compiled for these codes"),
    Case("score", {"bits": 5, "uniform": 1}, "one_query", "one query, head_dim 128"),
    Case("score", {"has_codes": 0, "has_sketch": 1}, "one_query", "one query, head_dim 128"),
    Case("qjl_sketch", {}, "bulk", "many 16-bit vectors"),
    Case("qjl_sketch", {"dense": 1}, "dense", "the projection is dense"),
    Case("qjl_sketch", {"d": 224}, "general", NO_SKETCH_DIM),
    Case("qjl_sketch", {"d": 96}, "lanes", "head_dim is not 64, 128 or 256"),
    Case("qjl_sketch", {"dtype": FULL}, "lanes", "vectors are float32"),
    Case("qjl_sketch", {}, "lanes", "compute capability below 8.0", "T4"),
    Case("qjl_sketch", {"vectors": 16 * 4 * 132 - 16}, "lanes", TOO_FEW),
    Case("qjl_sketch", {"vectors": 16 * 4 * 132 - 15}, "bulk", "many 16-bit vectors"),
    Case("linear_packed", {"tokens": 16}, "codes", "up to 16 tokens"),
    Case("linear_packed", {"tokens": 16}, "codes", "up to 16 tokens", "A100"),
    Case("linear_packed", {"tokens": 17}, "tiles", "up to 1,536 tokens"),
    Case("linear_packed", {"tokens": 1536, "dtype": HALF}, "tiles", "up to 1,536 tokens"),
    Case("linear_packed", {"tokens": 1537}, "decoded", "more than 1,536 tokens"),
    Case("linear_packed", {"tokens": 17, "dtype": FULL}, "tiles", f"up to {FULL_TOKENS}"),
    Case("linear_packed", {"tokens": 257, "dtype": FULL}, "decoded", f"more than {FULL_TOKENS}"),
    Case("linear_packed", {"tokens": 64}, "codes", f"up to 64 tokens, {WITHOUT}", "A100"),
    Case("linear_packed", {"tokens": 65}, "decoded", f"more than 64 tokens, {WITHOUT}", "B200"),
]  # fmt: skip


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
    files = (ROOT / "csrc/cuda/attention/instances").glob("split_kv_*.cu")
    return sorted(int(path.stem.rpartition("_")[2]) for path in files)


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
    more = "many query rows per KV head"
    if d in row_tiles_dims():
        limit = 8 if d in (192, 256) else 16
        more = f"more than {limit} query rows per KV head"
    for rows in range(1, limit + 1):
        assert choice(rows) == ("split_kv", f"at most {limit} query rows per KV head")
        assert choice(1, max_q_len=rows) == choice(rows)
    for rows in range(limit + 1, 33 if d == 128 else limit + 1):
        assert choice(rows) == choice(1, max_q_len=rows) == ("key_tiles", UP_TO_32_ROWS)
        limit = 32
    for found in (choice(limit + 1), choice(1, limit + 1), choice(1, 1000)):
        assert found.kernel == ("row_tiles" if d in row_tiles_dims() else "general")
        assert found.reason.startswith(more)
    for device, kernel in (("A100", "split_kv"), ("B200", "split_kv"), ("T4", "general")):
        assert choice(up_to, device=device).kernel == kernel
        assert choice(up_to + 1, device=device).kernel == "general"


def row_tiles_dims() -> list[int]:
    """The head_dims that the row-tile kernel is compiled for."""
    files = (ROOT / "csrc/cuda/attention/instances").glob("row_tiles_*.cu")
    return sorted(int(path.stem.rpartition("_")[2]) for path in files)


def test_the_row_tile_kernel_is_chosen_where_it_is_compiled():
    dims = [d for d in range(16, 1025, 16) if valid_head_dim(d)]
    assert [d for d in dims if attention(d=d, group=33) == "row_tiles"] == row_tiles_dims()
    assert row_tiles_dims() == [64, 128, 192, 256]


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
    assert choice(9, 32, 9 * 32 - 1) == choice(9, 32, 9 * 32 + 1) == both
    assert choice(8, 32, 8 * 32) == choice(8, 32, None) == ("key_tiles", UP_TO_32_ROWS)
    some_drafts = ("split_kv+key_tiles", MIXED)
    assert choice(8, 32, 8 * 32 - 1) == choice(8, 32, 8 * 32 + 1) == some_drafts
    assert choice(4, 32, 40) == choice(4, 32, 4 * 32) == ("split_kv", FEW_ROWS)
    # one query has more rows than split-KV takes, or all fit
    assert choice(2, 32, 40, q_heads=17, kv_heads=1) == ("row_tiles", MANY_ROWS)
    assert choice(2, 32, 40, q_heads=16, kv_heads=1) == some_drafts
    assert choice(2, 32, 40, q_heads=8, kv_heads=1) == ("split_kv", FEW_ROWS)
    wide = {"head_dim": 256, "q_heads": 9, "kv_heads": 1}
    assert choice(2, 32, 40, **wide) == ("row_tiles", MORE_THAN_8)
    # one kernel takes all
    assert choice(512, 61, 572, preset=None, key_bits=3, value_bits=4) == ("row_tiles", PAIR)
    assert choice(512, 61, 572, head_dim=96)[0] == "general"
    assert choice(512, 61, 572, dtype="float32")[0] == "general"
    assert choice(512, 61, 572, device="A100")[0] == "general"


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


# ---- bad input


@pytest.mark.parametrize("op", CALLS)
def test_facts_that_no_call_has(op):
    facts = list(CALLS[op].values())
    choose_kernel(op, facts, GPUS["H200"])
    bad = [facts[:n] for n in range(len(facts))] + [[*facts, 1]]
    for place, value in itertools.product(range(len(facts)), (-(2**63), -1, 2**62, 2**63 - 1)):
        bad.append([*facts[:place], value, *facts[place + 1 :]])
    for some in bad:
        with pytest.raises(ValueError, match=rf"the facts of {op} must be those of a call"):
            choose_kernel(op, some, GPUS["H200"])
    for place, value in itertools.product(range(6), (-1, 2**40)):
        device = [*GPUS["H200"]]
        device[place] = value
        with pytest.raises(ValueError, match="a size or a fact of the device is not supported"):
            choose_kernel(op, facts, device)
    with pytest.raises(ValueError, match="device must have 6 facts, got 4"):
        choose_kernel(op, facts, GPUS["H200"][:4])


@pytest.mark.parametrize(
    ("op", "changes"),
    [
        ("encode", {"d": 22}),
        ("encode", {"dtype": 7}),
        ("encode", {"width": 7}),
        ("encode", {"heads": 65536}),
        ("cache_load", {"seqs": 1 << 30, "max_length": 1 << 30}),
        ("paged_attention", {"k_bits": 8}),
        ("paged_attention", {"v_bits": 1, "v_uniform": 1}),
        ("score", {"has_codes": 0}),
    ],
)
def test_facts_that_do_not_go_together(op, changes):
    with pytest.raises(ValueError, match="must be those of a call"):
        Case(op, changes, "", "").ask()


def test_an_op_without_a_choice():
    with pytest.raises(ValueError, match="this op has no choice of kernels"):
        choose_kernel("pack", [1], GPUS["H200"])


STEP = {"head_dim": 128, "q_heads": 32, "kv_heads": 8, "preset": "k4v4", "device": "H200"}


@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [
        ("pack", {}, "op is 'pack', supported: paged_attention, mla_attention"),
        ("paged_attention", {"device": "V100"}, "device is 'V100', supported: T4, A100"),
        ("paged_attention", {"vectors": 1}, "has no vectors, supported: head_dim, q_heads"),
        ("paged_attention", {"head_dim": 22}, "head_dim is 22, supported: m"),
        ("paged_attention", {"head_dim": 2}, "head_dim is 2, supported in page records"),
        ("paged_attention", {"head_dim": 128.0}, "head_dim is 128.0, supported"),
        ("paged_attention", {"q_heads": 12}, "q_heads is 12, supported: multiples of kv_heads"),
        ("paged_attention", {"kv_heads": 0}, "kv_heads is 0, supported: 1 to 65535"),
        ("paged_attention", {"max_q_len": 2**31}, "max_q_len is 2147483648, supported: 1 to"),
        ("paged_attention", {"seqs": 0}, "seqs is 0, supported: 1 to 2147483647"),
        ("paged_attention", {"tokens": 0}, "tokens is 0, supported: 1 to"),
        ("paged_attention", {"seqs": 2**16, "max_q_len": 2**15}, "tokens is 2147483648, supported"),
        ("paged_attention", {"preset": "k9v9"}, "unknown preset 'k9v9'"),
        ("paged_attention", {"preset": None}, "must have a preset, or key_bits and value_bits"),
        ("paged_attention", {"key_bits": 4}, "give either, not both"),
        ("paged_attention", {"dtype": "int8"}, "dtype is int8, supported: float16, float32"),
        ("paged_attention", {"dtype": torch.float64}, "dtype is torch.float64, supported"),
        ("encode", {}, "encode has no q_heads, kv_heads, preset, supported: head_dim, vectors"),
    ],
)
def test_bad_shapes(op, changes, message):
    with pytest.raises(ValueError, match=message):
        kernel_choice(op, **{**STEP, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 7}, "bits is 7, supported: 1, 2, 3, 4, 5, 8"),
        ({"bits": 8, "grid": "lloyd"}, "grid at 8 bits is 'lloyd', supported: uniform"),
        ({"bits": 1, "grid": "uniform"}, "grid at 1 bits is 'uniform', supported: lloyd"),
        ({"keys": 2**41}, "keys is 2199023255552, supported: 1 to"),
        ({"sketch_bits": -1}, "sketch_bits is -1, supported: 0 to 65536"),
    ],
)
def test_bad_scores(changes, message):
    call = {"head_dim": 128, "bits": 4, "keys": 64, "device": "L4"}
    with pytest.raises(ValueError, match=message):
        kernel_choice("score", **{**call, **changes})


def test_what_a_call_must_have():
    with pytest.raises(ValueError, match="encode must have head_dim, vectors, bits, got bits"):
        kernel_choice("encode", bits=4, device="L4")


# ---- devices


def test_without_a_gpu_a_device_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="there is no CUDA device, supported: T4, A100"):
        kernel_choice("decode", head_dim=128, vectors=1)


@pytest.fixture
def fourth_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)


@pytest.mark.parametrize("name", ["T4", "H200"])
def test_the_current_device_without_a_cuda_library(fourth_gpu, monkeypatch, name):
    names = "major minor multi_processor_count shared_memory_per_block_optin"
    names = [*names.split(), "shared_memory_per_multiprocessor"]
    facts = argparse.Namespace(**dict(zip(names, GPUS[name][:5], strict=True)))
    monkeypatch.setattr(choices, "device_facts", lambda index: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: {3: facts}[index])
    assert choices._gpu(None) == GPUS[name]
    call = {**STEP, "device": None}
    wanted = kernel_choice("paged_attention", **{**STEP, "device": name})
    assert kernel_choice("paged_attention", **call) == wanted


def test_the_code_of_the_current_device_decides(fourth_gpu, monkeypatch):
    """An H200 that runs code for 7.5 has none of the kernels that need more."""
    facts = [7, 5, *GPUS["H200"][2:5], 0]
    monkeypatch.setattr(choices, "device_facts", lambda index: {3: facts}[index])
    assert choices._gpu(None) == GPUS["H200"]._replace(major=7, minor=5, warpgroup_products=False)
    call = {**STEP, "device": None}
    assert kernel_choice("paged_attention", **call).reason == "compute capability below 8.0"


def test_a_library_without_code_for_the_current_device(fourth_gpu, monkeypatch, capsys):
    def ask(index):
        raise RuntimeError("torch_turboquant: no kernel image")

    monkeypatch.setattr(choices, "device_facts", ask)
    with pytest.raises(ValueError, match="None, but torch_turboquant: no kernel image, supported"):
        kernel_choice("paged_attention", **{**STEP, "device": None})
    command = "info --op decode --head-dim 128 --vectors 1"
    assert command_line.main(command.split()) == 2
    assert "info: device is None, but torch_turboquant: no kernel" in capsys.readouterr().err


def test_facts_are_those_of_the_cuda_library(monkeypatch):
    class Function:
        error = None

        def __call__(self, device, facts):
            for i in range(6):
                ctypes.c_int64.from_address(facts + 8 * i).value = 10 * device + i
            return self.error

    function = Function()
    library = argparse.Namespace(turboquant_cuda_device_facts=function)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: {"a path": library}[path])
    monkeypatch.setattr(_library, "_libraries", {})
    assert _library.device_facts(2) is None
    monkeypatch.setattr(_library, "_libraries", {"cuda": {"path": "a path"}})
    assert _library.device_facts(2) == [20, 21, 22, 23, 24, 25]
    function.error = b"no kernel image"
    with pytest.raises(RuntimeError, match="no kernel image"):
        _library.device_facts(2)


@pytest.mark.cuda
def test_the_facts_of_this_gpu():
    """The table is right about the GPUs that the tests have run on, and the facts of its code about
    the architectures that the library was compiled for."""
    name = torch.cuda.get_device_name().removeprefix("NVIDIA ")
    named = [gpu for gpu in GPUS if name == gpu or name.startswith((f"{gpu} ", f"{gpu}-"))]
    found = choices._gpu(None)
    assert found.multiprocessors > 0 and found.shared_per_block <= found.shared_per_multiprocessor
    major, minor = torch.cuda.get_device_capability()
    older = (found.major, found.minor) < (major, minor)
    if named == ["H200"]:
        of = {(7, 5): GPUS["T4"], (8, 0): GPUS["A100"]}.get(found[:2], GPUS["H200"])
        assert found.multiprocessors == GPUS["H200"].multiprocessors and found[3:5] == of[3:5]
        assert older or (found.major, found.minor) == (9, 0)
    codes = set()  # that can run here
    for entry in tt.build_info()["cuda_architectures"]:
        code, _, machine = entry.removesuffix("+PTX").partition("@")
        of = [] if machine == "PTX" else (machine or code).rstrip("af").split(".")
        if not of or (int(of[0]) == major and int(of[1]) <= minor):
            codes.add(code)
    if len(codes) == 1:
        (code,) = codes
        assert f"{found.major}.{found.minor}" == code.rstrip("af")
        assert found.warpgroup_products == (code == "9.0a")


# ---- latents


@pytest.mark.parametrize("name", tt.latent.LATENT_PRESETS)
def test_latents_by_preset_or_bits(name):
    """Presets for keys and values, too: latents have the bits of keys."""
    config = tt.latent_preset(name)
    found = kernel_choice("mla_attention", preset=name, device="H200")
    assert (found.kernel == "warpgroups") == (name in ("k8", "k5u", "k4u"))
    shape = {"bits": config.bits, "grid": config.grid, "device": "H200"}
    assert kernel_choice("mla_attention", **shape) == found
    both = {"k8": "k8v8", "k5u": "k5v4u", "k4u": "k4v4u", "k4": "k4v4", "k3": "k3v3"}[name]
    assert kernel_choice("mla_attention", preset=both, device="H200") == found
    half = {"dtype": "float16", "rope_dtype": "bfloat16"}
    assert kernel_choice("mla_attention", **shape, **half).kernel == "general"
    assert kernel_choice("mla_attention", **shape, dtype="float16") == found


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({}, "must have a preset, or bits, got neither"),
        ({"preset": "k4u", "bits": 4}, "a preset has its bits and grid: give either"),
        ({"preset": "k6"}, "unknown preset for latents 'k6'"),
        ({"bits": 6}, "bits is 6, supported for latents"),
        ({"preset": "k4u", "latent_dim": 64}, "latent_dim is 64"),
    ],
)
def test_bad_latents(shape, message):
    with pytest.raises(ValueError, match=message):
        kernel_choice("mla_attention", device="H200", **shape)


# ---- what is written of it


def test_the_docstring_names_every_option():
    table = inspect.getdoc(kernel_choice).partition("==  ===")[2].rpartition("==\n")[0]
    rows = {}
    for line in re.sub(r"\n {4,}", " ", table).splitlines():
        if match := re.match(r"(\w+) +(.*)", line):
            rows[match[1]] = match[2]
    cache = {"preset", "key_bits", "value_bits"}
    assert list(rows) == list(choices.OPS)
    for op, text in rows.items():
        parameters = inspect.signature(choices._OPS[op]).parameters
        required, _, optional = text.partition(";")
        needed = {name for name, p in parameters.items() if p.default is p.empty}
        assert set(re.findall(r"\w+", required.replace("a cache", ""))) == needed, op
        others = set(parameters) - needed - (cache if "a cache" in required else set())
        assert set(re.findall(r"\w+", optional)) == others, op
    for gpu in GPUS:
        assert f'"{gpu}"' in inspect.getdoc(kernel_choice)


def test_the_command(capsys):
    line = "info --op paged_attention --preset k5v4u --head-dim 128 --q-heads 32 --kv-heads 8"
    assert command_line.main([*line.split(), "--device", "H200"]) == 0
    rows = dict(row.split(maxsplit=1) for row in capsys.readouterr().out.splitlines())
    assert rows == {"kernel": "split_kv", "reason": "at most 16 query rows per KV head"}

    line += " --device H200 --dtype float32 --tail --json"
    assert command_line.main(line.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"kernel": "general", "reason": "the exact tail is float32"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--device H200", "a shape or --device needs --op, supported: paged_attention"),
        ("--head-dim 128", "needs --op"),
        ("--op encode --head-dim 128 --device L4", "encode must have head_dim, vectors, bits, got"),
    ],
)
def test_commands_that_ask_nothing(line, message, capsys):
    assert command_line.main(["info", *line.split()]) == 2
    assert message in capsys.readouterr().err
