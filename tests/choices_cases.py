"""Calls of every op by the facts that a choice of CUDA kernels asks for, and what must be chosen.

CASES has a call for every reason that a header of csrc/choices holds.
"""

from typing import NamedTuple

from torch_turboquant._library import choose_kernel
from torch_turboquant.choices import GPUS

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
        **{"kv_heads": 8, "group": 4, "q_len": 1, "seqs": 1, "tokens": 1, "room": 9000},
        **{"dtype": BF16, "tail": 1},
    },
    "mla_attention": {
        **{"d": 512, "bits": 4, "uniform": 1, "dtype": BF16, "rope_dtype": BF16, "rows": 16},
    },
    "mla_store": {
        **{"d": 512, "bits": 4, "candidates": 8, "dtype": BF16, "transforms": 1, "rotated": 0},
        **{"tokens": 1},
    },
    "encode": {"d": 128, "dtype": BF16, "tokens": 4096, "heads": 8, **ONE},
    "decode": {"d": 128, "dtype": BF16, "vectors": 1 << 16, "aligned": 1},
    "cache_store": {
        **{"d": 128, "dtype": BF16, "tokens": 4096, "heads": 8, **KEYS, **VALUES},
        **{"pages": 1024, "tile_bytes": 4224, "tail": 1, "aligned": 1, "seqs": 1, "max_seqs": 1},
    },
    "cache_load": {"d": 128, "dtype": BF16, "seqs": 4, "max_length": 4096, "heads": 8},
    "score": {
        **{"has_codes": 1, "has_sketch": 0, "dense": 0, **CODES, "m": 128, "d": 128},
        **{"batch": 1, "queries": 1, "keys": 4096, "word_rows": 1, "aligned": 1},
    },
    "qjl_sketch": {"dense": 0, "d": 128, "vectors": 1 << 16, "dtype": BF16},
    "linear_packed": {"tokens": 1, "n": 4096, "k": 4096, "dtype": BF16},
    "linear_experts": {"pairs": 8, "experts": 128, "k": 2048, "dtype": BF16, "graph": 0},
}
HEADERS = {
    "attention": ["paged_attention"],
    "codec": ["encode", "decode", "cache_store", "cache_load"],
    "linear": ["linear_packed", "linear_experts"],
    "mla": ["mla_attention", "mla_store"],
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
MANY_SEQS = "9 to 16 query rows per KV head, many sequences"
MANY_ROWS = "more than 16 query rows per KV head"
MORE_THAN_32 = "more than 32 query rows per KV head"
UP_TO_32_ROWS, UNIFORM = "17 to 32 query rows per KV head", {"k_uniform": 1, "v_uniform": 1}
MIXED = "few query rows per KV head in some sequences, more in others"
DRAFTS = f"{MIXED}, and there may be drafts"
UP_TO_64 = "at most 64 query rows per KV head"
UP_TO_32 = "at most 32 query rows per KV head"
MANY = "many query rows per KV head"
MORE_THAN_12 = "more than 12 tokens for each expert on average"
MORE_THAN_8_FULL = "more than 8 tokens of float32 for each expert on average"
NO_WIDE_ROOM = "more than 8 tokens for each expert on average, and no room for the channels of 16"
OF_AN_EXPERT = "tokens for each expert on average"
FULL_OF_AN_EXPERT = "more than 256 tokens of float32 for each expert on average"
NO_ROOM = "shared memory has no room for the channels of 3 tokens"
IN_A_GRAPH = "a CUDA graph, which cannot wait"
WITHOUT, FULL_TOKENS = "without products of warpgroups", "256 tokens of float32"
UP_TO_32_TOKENS = "up to 32 tokens of 16 bits"
UP_TO_64_TOKENS = "up to 64 tokens, and n * k is at most 17 million"
UP_TO_96_TOKENS = "up to 96 tokens, and n * k is at most 5 million"
FEWER_TOKENS = "fewer than 400 (n k / 2^24)^(4/3) tokens"
MORE_TOKENS = "at least 400 (n k / 2^24)^(4/3) tokens"
NO_PRODUCTS = f"{MANY}, {WITHOUT}"
NO_TILE_DIM = f"{MANY}, and head_dim is above 256"
NO_TILE_CODES = f"{MANY}, and the row-tile kernel does not expand these codes"
FULL_ROWS = f"{MANY}, of float32"
NO_DIM = "the split-KV kernel is not compiled for this head_dim"
FEW_WARPS = "shared memory of the device holds too few warps"
MANY_STEPS = "a codebook has more than 8 candidate steps"
SEQS = "2^31 sequences in the exact tail or more"
TAIL = "the exact tail does not start at a multiple of 8 bytes"
OF_LATENTS = "uniform grid of 4, 5 or 8 bits"
NO_WARPGROUPS = "the device has no products of warpgroups"
OTHER_DTYPE = "queries and raw channels differ in dtype"
FEW_LATENTS = "few tokens of 512 channels"
MANY_LATENTS = "more than four tokens for each multiprocessor"
FEW_LEVELS = "Lloyd-Max levels or 3 bits, at most 16 query rows"
LEVELS_OF_256 = "Lloyd-Max levels or 3 bits over 256 channels"
MANY_LEVELS = "Lloyd-Max levels or 3 bits, more than 16 query rows"
CONSTANTS = "signs, center or projection are not aligned to 16 bytes"
NO_SKETCH_DIM = "the other kernels are not compiled for this head_dim"
FEW = {"tokens": 1}
CASES = [
    Case("paged_attention", {}, "split_kv", FEW_ROWS),
    Case("paged_attention", {"d": 256}, "split_kv", UP_TO_32),
    Case("paged_attention", {"group": 17}, "key_tiles", UP_TO_32_ROWS),
    Case("paged_attention", {"group": 33}, "row_tiles", MANY_ROWS),
    Case("paged_attention", {"group": 16, "seqs": 17, "tokens": 17}, "key_tiles", MANY_SEQS),
    Case("paged_attention", {"d": 256, "group": 32}, "split_kv", UP_TO_32),
    Case("paged_attention", {"d": 256, "group": 33}, "row_tiles", MORE_THAN_32),
    Case("paged_attention", {"group": 32, **UNIFORM, "k_bits": 5}, "key_tiles", UP_TO_32_ROWS),
    Case("paged_attention", {"group": 17, "k_bits": 2}, "row_tiles", PAIR),
    Case("paged_attention", {"group": 17, "d": 64}, "key_tiles", UP_TO_32_ROWS),
    Case("paged_attention", {"group": 33, "d": 64}, "row_tiles", MANY_ROWS),
    Case("paged_attention", {"group": 17}, "split_kv", UP_TO_64, "A100"),
    Case("paged_attention", {"q_len": 5, "tokens": 6, "seqs": 2}, "split_kv+key_tiles", MIXED),
    Case("paged_attention", {"q_len": 9, "tokens": 10, "seqs": 2}, "split_kv+row_tiles", MIXED),
    Case("paged_attention", {"q_len": 9, "tokens": 12, "seqs": 3}, "split_kv+row_tiles", DRAFTS),
    Case("paged_attention", {"k_bits": 2}, "row_tiles", PAIR),
    Case("paged_attention", {"group": 64}, "split_kv", UP_TO_64, "A100"),
    Case("paged_attention", {"group": 65}, "general", NO_PRODUCTS, "A100"),
    Case("paged_attention", {"group": 65, "dtype": FULL}, "general", FULL_ROWS),
    Case("paged_attention", {"group": 32, "d": 96}, "split_kv", UP_TO_32),
    Case("paged_attention", {"group": 33, "d": 96}, "row_tiles", MORE_THAN_32),
    Case("paged_attention", {"group": 64, "d": 96}, "split_kv", UP_TO_64, "A100"),
    Case("paged_attention", {"group": 65, "d": 96}, "general", NO_PRODUCTS, "A100"),
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
    Case("encode", {"d": 96}, "generic", DIMS),
    Case("encode", {"dtype": FULL}, "generic", "dtype is float32"),
    Case("encode", {"width": 8, "candidates": 8}, "bulk", FILL),
    Case("encode", {"width": 8, "candidates": 9}, "generic", MANY_STEPS),
    Case("encode", {"d": 256, "width": 8, "candidates": 2}, "bulk", FILL),
    Case("encode", {"candidates": 9}, "generic", MANY_STEPS),
    Case("encode", {"d": 256, "candidates": 2}, "bulk", FILL),
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
    Case("cache_store", BOTH, "step", FEW_WARPS, "T4"),
    Case("cache_store", {"d": 256, **BOTH}, "bulk", FILL),
    Case("cache_store", {"d": 96}, "generic", DIMS),
    Case("cache_store", {"dtype": FULL}, "generic", "dtype is float32"),
    Case("cache_store", {"v_width": 8}, "bulk", FILL),
    Case("cache_store", {"k_width": 8, **BOTH, **FEW}, "step", TOO_FEW),
    Case("cache_store", {"d": 256, "k_width": 8, "k_candidates": 8}, "bulk", FILL),
    Case("cache_store", {"d": 256, "k_width": 8, "v_candidates": 8}, "bulk", FILL),
    Case("cache_store", {"k_width": 8, "v_width": 8, **BOTH}, "bulk", FILL, "T4"),
    Case("cache_store", {"d": 64, **BOTH}, "step", FEW_WARPS, "T4"),
    Case("cache_store", {"d": 64, "k_width": 8, **BOTH}, "bulk", FILL, "T4"),  # a launch for each
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
    Case("cache_load", {"d": 80}, "generic", DIMS),
    Case("cache_load", {"seqs": 1, "max_length": 1}, "generic", TOO_FEW),
    Case("cache_load", {"seqs": 1, "max_length": TWO_GIB}, "generic", COUNTERS),
    Case("score", {}, "one_query", "one query, head_dim 128"),
    Case("score", {"word_rows": 0}, "general", "rows do not start at multiples of a load"),
    Case("mla_attention", {}, "key_tiles", OF_LATENTS),
    Case("mla_attention", {"d": 256, "bits": 8}, "key_tiles", OF_LATENTS),
    Case("mla_attention", {"d": 256, "bits": 5}, "key_tiles", OF_LATENTS),
    Case("mla_attention", {"dtype": HALF, "rope_dtype": HALF}, "key_tiles", OF_LATENTS),
    Case("mla_attention", {"d": 128}, "warp_tiles", "latent_dim is neither 256 nor 512"),
    Case("mla_attention", {"rows": 128}, "key_tiles", OF_LATENTS),
    Case("mla_attention", {"uniform": 0}, "warp_tiles", FEW_LEVELS),
    Case("mla_attention", {"bits": 3}, "warp_tiles", FEW_LEVELS),
    Case("mla_attention", {"uniform": 0, "rows": 17}, "row_tiles", MANY_LEVELS),
    Case("mla_attention", {"uniform": 0, "bits": 5, "rows": 32}, "row_tiles", MANY_LEVELS),
    Case("mla_attention", {"uniform": 0, "d": 256}, "warp_tiles", LEVELS_OF_256),
    Case("mla_attention", {"bits": 3, "d": 256, "rows": 128}, "warp_tiles", LEVELS_OF_256),
    Case("mla_attention", {"bits": 3, "rows": 2**31 - 1}, "row_tiles", MANY_LEVELS),
    Case("mla_attention", {"uniform": 0, "dtype": FULL}, "general", "queries are float32"),
    Case("mla_attention", {"bits": 3, "d": 128}, "warp_tiles", "latent_dim is neither 256 nor 512"),
    Case("mla_attention", {"dtype": FULL}, "general", "queries are float32"),
    Case("mla_attention", {"dtype": HALF}, "general", OTHER_DTYPE),
    Case("mla_attention", {"dtype": FULL, "d": 128}, "general", "queries are float32"),
    Case("mla_attention", {}, "warp_tiles", NO_WARPGROUPS, "A100"),
    Case("mla_attention", {}, "warp_tiles", NO_WARPGROUPS, "B200"),
    Case("mla_attention", {"bits": 3}, "warp_tiles", NO_WARPGROUPS, "L4"),
    Case("mla_attention", {"dtype": HALF}, "general", OTHER_DTYPE, "A100"),
    Case("mla_attention", {}, "general", "compute capability below 8.0", "T4"),
    Case("mla_store", {}, "step", FEW_LATENTS),
    Case("mla_store", {"bits": 5, "candidates": 1, "dtype": HALF}, "step", FEW_LATENTS),
    Case("mla_store", {"tokens": 4 * 132}, "step", FEW_LATENTS),
    Case("mla_store", {"tokens": 4 * 108}, "step", FEW_LATENTS, "A100"),
    Case("mla_store", {"tokens": 4 * 132 + 1}, "table", MANY_LATENTS),
    Case("mla_store", {}, "table", "compute capability below 8.0", "T4"),
    Case("mla_store", {"d": 256}, "table", "latent_dim is not 512"),
    Case("mla_store", {"bits": 3}, "table", "codes have neither 4 nor 5 bits"),
    Case("mla_store", {"bits": 8}, "table", "codes have neither 4 nor 5 bits"),
    Case("mla_store", {"candidates": 9}, "table", "the codebook has more than 8 candidate steps"),
    Case("mla_store", {"dtype": FULL}, "table", "latents are float32"),
    Case("mla_store", {"transforms": 0}, "table", "latents are not rotated"),
    Case("mla_store", {"rotated": 1}, "table", "the exact tail has rotated latents"),
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
    Case("qjl_sketch", {"dense": 1}, "dense_tiles", "the projection is dense"),
    Case("qjl_sketch", {"dense": 1}, "dense", "compute capability below 8.0", "T4"),
    Case("qjl_sketch", {"dense": 1, "d": 36}, "dense", "head_dim is not a multiple of 8"),
    Case("qjl_sketch", {"d": 224}, "general", NO_SKETCH_DIM),
    Case("qjl_sketch", {"d": 96}, "lanes", "head_dim is not 64, 128 or 256"),
    Case("qjl_sketch", {"dtype": FULL}, "lanes", "vectors are float32"),
    Case("qjl_sketch", {}, "lanes", "compute capability below 8.0", "T4"),
    Case("qjl_sketch", {"vectors": 16 * 4 * 132 - 16}, "lanes", TOO_FEW),
    Case("qjl_sketch", {"vectors": 16 * 4 * 132 - 15}, "bulk", "many 16-bit vectors"),
    Case("linear_packed", {"tokens": 16}, "codes", "up to 16 tokens"),
    Case("linear_packed", {"tokens": 16}, "codes", "up to 16 tokens", "A100"),
    Case("linear_packed", {"tokens": 17, "n": 6500, "k": 4000}, "codes", UP_TO_32_TOKENS),
    Case("linear_packed", {"tokens": 32, "n": 1 << 40, "dtype": HALF}, "codes", UP_TO_32_TOKENS),
    Case("linear_packed", {"tokens": 33, "n": 17_000_000, "k": 1}, "codes", UP_TO_64_TOKENS),
    Case("linear_packed", {"tokens": 64, "n": 17_000_000, "k": 1}, "codes", UP_TO_64_TOKENS),
    Case("linear_packed", {"tokens": 33, "n": 17_000_001, "k": 1}, "tiles", FEWER_TOKENS),
    Case("linear_packed", {"tokens": 65, "n": 5_000_000, "k": 1}, "codes", UP_TO_96_TOKENS),
    Case("linear_packed", {"tokens": 96, "n": 5_000_000, "k": 1}, "codes", UP_TO_96_TOKENS),
    Case("linear_packed", {"tokens": 65, "n": 5_000_001, "k": 1}, "tiles", FEWER_TOKENS),
    Case("linear_packed", {"tokens": 399, "dtype": HALF}, "tiles", FEWER_TOKENS),
    Case("linear_packed", {"tokens": 400}, "decoded", MORE_TOKENS),
    Case("linear_packed", {"tokens": 97, "n": 640, "k": 1024}, "decoded", MORE_TOKENS),
    Case("linear_packed", {"tokens": 5000, "n": 1 << 40, "k": 1 << 40}, "tiles", FEWER_TOKENS),
    Case("linear_packed", {"tokens": 5001, "n": 1 << 40}, "decoded", "more than 5,000 tokens"),
    Case("linear_packed", {"tokens": 17, "n": 64, "dtype": FULL}, "tiles", f"up to {FULL_TOKENS}"),
    Case("linear_packed", {"tokens": 257, "dtype": FULL}, "decoded", f"more than {FULL_TOKENS}"),
    Case("linear_packed", {"tokens": 64}, "codes", f"up to 64 tokens, {WITHOUT}", "A100"),
    Case("linear_packed", {"tokens": 65}, "decoded", f"more than 64 tokens, {WITHOUT}", "B200"),
    Case("linear_experts", {"pairs": 1024}, "codes", f"up to 8 {OF_AN_EXPERT}"),
    Case("linear_experts", {"k": 43_776}, "codes", f"up to 8 {OF_AN_EXPERT}"),
    Case("linear_experts", {"k": 43_777}, "tiles", f"{NO_ROOM} as bytes"),
    Case("linear_experts", {"pairs": 1025}, "codes", f"up to 12 {OF_AN_EXPERT}"),
    Case("linear_experts", {"pairs": 1536, "k": 10_300}, "codes", f"up to 12 {OF_AN_EXPERT}"),
    Case("linear_experts", {"pairs": 1025, "k": 10_301}, "tiles", NO_WIDE_ROOM),
    Case("linear_experts", {"pairs": 1025, "dtype": FULL}, "tiles", MORE_THAN_8_FULL),
    Case("linear_experts", {"pairs": 1537}, "tiles", MORE_THAN_12),
    Case("linear_experts", {"pairs": 32768, "dtype": FULL}, "tiles", MORE_THAN_8_FULL),
    Case("linear_experts", {"pairs": 32769, "dtype": FULL}, "one_by_one", FULL_OF_AN_EXPERT),
    Case("linear_experts", {"pairs": 32769, "dtype": FULL, "graph": 1}, "tiles", MORE_THAN_8_FULL),
    Case("linear_experts", {"pairs": 8192}, "codes", f"up to 64 {OF_AN_EXPERT}", "A100"),
    Case("linear_experts", {"pairs": 8193}, "one_by_one", f"more than 64 {OF_AN_EXPERT}", "L4"),
    Case("linear_experts", {"pairs": 8193, "graph": 1}, "codes", IN_A_GRAPH, "B200"),
    Case("linear_experts", {"k": 11_009, "graph": 1}, "one_by_one", NO_ROOM, "L4"),
    Case("linear_experts", {"k": 2048}, "codes", f"up to 64 {OF_AN_EXPERT}", "T4"),
]  # fmt: skip
