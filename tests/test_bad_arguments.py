"""What every op refuses, and how it says so.

One table per op. Each case changes an argument of a good call and names the exception of the
public function and a part of its text. The raw op must refuse the same call with RuntimeError and
the same part of the text (or `raw`, where the words differ). Nothing may have been written by then.
"""

import math
import re
from typing import NamedTuple

import pytest
import torch
from torch import func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map, tree_map_only

import torch_turboquant as tt
from tests.helpers import assert_same_bytes, paged, randn

ops = torch.ops.turboquant
SAME = object()
SKIP = object()
D = 64


class Bad(NamedTuple):
    """A change of a good call; `raw` is the raw op's text where it differs, or SKIP."""

    changes: dict
    error: type
    text: str
    raw: object = SAME


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def floats(*shape):
    return randn(*shape, seed=sum(shape))


def elsewhere(*shape, dtype=torch.float32):
    """A tensor on another device, to which torch sends the whole call: its fake refuses it."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def gaps(t):
    """The same values with stride 2 in the last dimension."""
    return t.repeat_interleave(2, dim=-1)[..., ::2]


def column(t):
    """The same values, not contiguous, stride 1 in the last dimension."""
    return torch.cat([t, t], dim=-1)[..., : t.shape[-1]]


def heads_apart(t):
    """The same values, entries of the second dimension apart."""
    return torch.cat([t, t], dim=2)[:, :, : t.shape[2]]


DTYPE = "dtype float64, supported: float32, float16, bfloat16"
ONE_DEVICE = "all tensors of a call must be on one device"
STRIDE = "must have stride 1 in its last dimension"
DIMENSION = "supported: m * 2^k with m in {1, 3, 5, 7, 9} and k >= 1, up to 4096"
BOOK = tt.Codebook.make(D, 4)
SIGNS, LEVELS, STEPS = tt.random_signs(D, 0), BOOK.levels_tensor(), BOOK.steps_tensor(4)

# ---- hadamard, pack, codec, group, qjl, score: good calls and what spoils them

HADAMARD = {"x": floats(3, D), "signs": SIGNS, "inverse": False}
HADAMARD_BAD = [
    Bad({"x": floats(3, D).double()}, TypeError, f"x has {DTYPE}"),
    Bad({"x": [1.0] * D}, TypeError, "x must be a tensor, got list", SKIP),
    Bad({"x": gaps(floats(3, D))}, ValueError, f"x {STRIDE}"),
    Bad({"x": torch.tensor(1.0)}, ValueError, "x has shape []"),
    Bad({"x": floats(2, 22)}, ValueError, f"the last dimension of x is 22, {DIMENSION}"),
    Bad({"x": floats(2, 9)}, ValueError, "the last dimension of x is 9"),
    Bad({"x": floats(1, 8192)}, ValueError, "the last dimension of x is 8192"),
    Bad({"x": floats(2, 0)}, ValueError, "the last dimension of x is 0"),
    Bad({"signs": SIGNS[:32]}, ValueError, "signs has shape [32], expected [64]"),
    Bad({"signs": SIGNS[None]}, ValueError, "signs has shape [1, 64], expected [64]"),
    Bad({"signs": SIGNS.half()}, TypeError, "signs has dtype float16, supported: float32"),
    Bad({"signs": gaps(SIGNS)}, ValueError, "signs must be contiguous"),
    Bad({"signs": elsewhere(D)}, ValueError, ONE_DEVICE),
]

PACK = {"codes": torch.zeros(3, 10, dtype=torch.uint8), "bits": 3}
PACK_BAD = [
    Bad({"bits": 0}, ValueError, "bits is 0, supported: 1", "bits is 0, supported: 1 to 8"),
    Bad({"bits": 9}, ValueError, "bits is 9, supported: 1", "bits is 9, supported: 1 to 8"),
    Bad({"codes": torch.zeros(3, 10, dtype=torch.int32)}, TypeError, "codes has dtype int32"),
    Bad({"codes": "codes"}, TypeError, "codes must be a tensor, got str", SKIP),
    Bad({"codes": torch.tensor(1, dtype=torch.uint8)}, ValueError, "codes has shape []"),
    Bad({"codes": torch.zeros(3, 0, dtype=torch.uint8)}, ValueError, "codes has shape [3, 0]"),
    Bad({"codes": column(PACK["codes"])}, ValueError, "codes must be contiguous"),
    Bad(
        {"codes": torch.full((3, 10), 8, dtype=torch.uint8)},
        RuntimeError,
        "codes holds values of 8 or more, which do not fit 3 bits",
    ),
]

UNPACK = {"packed": torch.zeros(3, 4, dtype=torch.uint8), "bits": 3, "d": 10}
UNPACK_BAD = [
    Bad({"bits": 0}, ValueError, "bits is 0, supported: 1", "bits is 0, supported: 1 to 8"),
    Bad({"d": 0}, ValueError, "d is 0, supported: 1 and more", "d is 0, supported: 1 to"),
    Bad({"d": 11}, ValueError, "packed has shape [3, 4], expected [..., 5]"),
    Bad({"d": 8}, ValueError, "packed has shape [3, 4], expected [..., 3]"),
    Bad({"packed": torch.tensor(1, dtype=torch.uint8)}, ValueError, "packed has shape []"),
    Bad({"packed": torch.zeros(3, 4, dtype=torch.int8)}, TypeError, "packed has dtype int8"),
    Bad({"packed": column(UNPACK["packed"])}, ValueError, "packed must be contiguous"),
]

ENCODE = {
    "x": floats(3, D),
    "signs": SIGNS,
    "levels": LEVELS,
    "steps": STEPS,
    "bits": 4,
    "scale_mode": "mse",
    "center": floats(D),
}
LEVELS_BAD = [
    Bad({"levels": LEVELS.flip(0)}, RuntimeError, "levels must increase and be symmetric"),
    Bad(
        {"levels": LEVELS + LEVELS.eq(LEVELS[9])},
        RuntimeError,
        "levels must increase and be symmetric",
    ),
    Bad({"levels": LEVELS[:8]}, ValueError, "levels has shape [8], expected [16]"),
    Bad({"levels": LEVELS.float()}, TypeError, "levels has dtype float32, supported: int8"),
    Bad({"levels": gaps(LEVELS)}, ValueError, "levels must be contiguous"),
    Bad({"bits": 6}, ValueError, "bits is 6, supported: 1, 2, 3, 4, 5, 8"),
    Bad({"bits": 0}, ValueError, "bits is 0, supported"),
    Bad({"signs": SIGNS.double()}, TypeError, "signs has dtype float64, supported: float32"),
    Bad({"center": floats(32)}, ValueError, "center has shape [32], expected [64]"),
    Bad({"center": floats(2, D)}, ValueError, "center has shape [2, 64], expected [3, 64]"),
    Bad({"center": floats(D).half()}, TypeError, "center has dtype float16, supported: float32"),
    Bad({"center": gaps(floats(D))}, ValueError, "center must be contiguous"),
    Bad({"center": elsewhere(D)}, ValueError, ONE_DEVICE),
]
ENCODE_BAD = [
    *LEVELS_BAD,
    Bad({"x": floats(3, D).long()}, TypeError, "x has dtype int64, supported: float32"),
    Bad({"x": gaps(floats(3, D))}, ValueError, f"x {STRIDE}"),
    Bad({"x": floats(3, 44)}, ValueError, f"the last dimension of x is 44, {DIMENSION}"),
    Bad({"signs": SIGNS[:32]}, ValueError, "signs has shape [32], expected [64]"),
    Bad({"levels": None, "bits": 1}, ValueError, "levels is needed at 1 bit"),
    Bad({"bits": 8}, ValueError, "levels must be absent at 8 bits"),
    Bad({"steps": STEPS.double()}, TypeError, "steps has dtype float64, supported: float32"),
    Bad({"steps": STEPS[:0]}, ValueError, "steps has 0 candidates, supported: 1 to 64"),
    Bad({"steps": torch.ones(65)}, ValueError, "steps has 65 candidates, supported: 1 to 64"),
    Bad({"steps": STEPS.flip(0)}, RuntimeError, "steps must be positive, finite and increasing"),
    Bad({"steps": -STEPS.flip(0)}, RuntimeError, "steps must be positive, finite and increasing"),
    Bad(
        {"steps": STEPS * torch.nan}, RuntimeError, "steps must be positive, finite and increasing"
    ),
    Bad({"steps": STEPS[None]}, ValueError, "steps has shape [1, 4], expected [any]"),
    Bad(
        {"scale_mode": "l2"},
        ValueError,
        "scale_mode is 'l2', supported: norm, preserve, mse, unbiased",
        SKIP,
    ),
]

_packed, _scale = tt.encode(floats(3, D), SIGNS, LEVELS, STEPS, 4)
DECODE = {
    "packed": _packed,
    "scale": _scale,
    "signs": SIGNS,
    "levels": LEVELS,
    "bits": 4,
    "center": floats(D),
    "dtype": torch.float32,
}
DECODE_BAD = [
    *LEVELS_BAD,
    Bad({"packed": _packed.int()}, TypeError, "packed has dtype int32, supported: uint8"),
    Bad(
        {"packed": _packed[:, :30].contiguous()},
        ValueError,
        "packed has shape [3, 30], expected [..., 32]",
    ),
    Bad({"packed": column(_packed)}, ValueError, "packed must be contiguous"),
    Bad({"scale": _scale.float()}, TypeError, "scale has dtype float32, supported: float16"),
    Bad({"scale": _scale[:2]}, ValueError, "scale has shape [2], expected"),
    Bad({"scale": gaps(_scale)}, ValueError, "scale must be contiguous"),
    Bad({"signs": SIGNS[:44]}, ValueError, "is 44, supported: m * 2^k"),
    Bad({"dtype": torch.float64}, TypeError, "dtype is", "dtype is float64, supported: float32"),
    Bad({"scale": elsewhere(3, dtype=torch.half)}, ValueError, ONE_DEVICE),
]

GROUP_ENCODE = {"x": floats(3, D), "group": 32, "bits": 4}
GROUP_BAD = [
    Bad({"group": 16}, ValueError, "group is 16, supported: 32, 64"),
    Bad({"bits": 3}, ValueError, "bits is 3, supported: 2, 4"),
]
GROUP_ENCODE_BAD = [
    *GROUP_BAD,
    Bad({"x": floats(3, D).double()}, TypeError, f"x has {DTYPE}"),
    Bad({"x": gaps(floats(3, D))}, ValueError, f"x {STRIDE}"),
    Bad({"x": floats(3, 80)}, ValueError, "is 80, supported: multiples of the group of 32"),
    Bad({"x": floats(3, 32), "group": 64}, ValueError, "is 32, supported: multiples of the group"),
]
_groups = tt.group_encode(floats(3, D), 32, 4)
GROUP_DECODE = {
    **dict(zip(("packed", "scale", "zero"), _groups, strict=True)),
    "group": 32,
    "bits": 4,
    "d": D,
    "dtype": torch.float32,
}
GROUP_DECODE_BAD = [
    *GROUP_BAD,
    Bad({"d": 80}, ValueError, "is 80, supported: multiples of the group of 32"),
    Bad({"d": 96}, ValueError, "packed has shape [3, 32], expected [..., 48]"),
    Bad({"d": 0}, ValueError, "is 0, supported: multiples of the group of 32"),
    Bad({"packed": _groups[0].int()}, TypeError, "packed has dtype int32"),
    Bad({"packed": column(_groups[0])}, ValueError, "packed must be contiguous"),
    Bad({"scale": _groups[1].float()}, TypeError, "scale has dtype float32, supported: float16"),
    Bad({"zero": _groups[2].float()}, TypeError, "zero has dtype float32, supported: float16"),
    Bad({"zero": _groups[2][:, :1].contiguous()}, ValueError, "zero has shape [3, 1], expected"),
    Bad({"scale": column(_groups[1])}, ValueError, "scale must be contiguous"),
    Bad({"dtype": torch.int8}, TypeError, "dtype is"),
]

DENSE = tt.gaussian_projection(24, D, 0)
PROJECTION_BAD = [
    Bad({"projection": DENSE[:20]}, ValueError, "projection has shape [20, 64]", "has 20 rows"),
    Bad({"projection": DENSE[:, :48]}, ValueError, "projection has shape [24, 48]"),
    Bad({"projection": DENSE[None]}, ValueError, "projection has shape [1, 24, 64]"),
    Bad({"projection": SIGNS[:32]}, ValueError, "projection has shape [32]"),
    Bad({"projection": DENSE.half()}, TypeError, "projection has dtype float16"),
    Bad({"projection": gaps(DENSE)}, ValueError, "projection must be contiguous"),
    Bad({"projection": elsewhere(24, D)}, ValueError, ONE_DEVICE),
]
QJL_SKETCH = {"residual": floats(2, 5, D), "projection": DENSE}
QJL_SKETCH_BAD = [
    *PROJECTION_BAD,
    Bad({"residual": floats(5, D).double()}, TypeError, f"residual has {DTYPE}"),
    Bad({"residual": gaps(floats(5, D))}, ValueError, f"residual {STRIDE}"),
    Bad({"residual": floats(5, 44)}, ValueError, "of residual is 44", "is 44, supported"),
    Bad(
        {"residual": floats(5, 20), "projection": torch.ones(20)},
        ValueError,
        "projection has shape [20]",
        "projection has 20 rows, supported: multiples of 8",
    ),
]
_bits, _norm = tt.qjl_sketch(floats(2, 5, D), DENSE)
QJL_SCORE = {"q": floats(2, 3, D), "sign_bits": _bits, "norm": _norm, "projection": DENSE}
QJL_SCORE_BAD = [
    *PROJECTION_BAD,
    Bad({"q": floats(2, 3, D).double()}, TypeError, f"q has {DTYPE}"),
    Bad({"q": gaps(floats(2, 3, D))}, ValueError, f"q {STRIDE}"),
    Bad({"q": floats(D)}, ValueError, "q has shape [64]"),
    Bad({"q": floats(3, 3, D)}, ValueError, "sign_bits has shape [2, 5, 3]", "sign_bits [2, 5, 3]"),
    Bad({"q": floats(3, D)}, ValueError, "sign_bits has shape [2, 5, 3]", "sign_bits [2, 5, 3]"),
    Bad({"sign_bits": _bits[..., :2]}, ValueError, "sign_bits", "sign_bits"),
    Bad({"sign_bits": _bits.int()}, TypeError, "sign_bits has dtype int32, supported: uint8"),
    Bad({"sign_bits": column(_bits)}, ValueError, "sign_bits must be contiguous"),
    Bad({"norm": _norm.half()}, TypeError, "norm has dtype float16, supported: float32"),
    Bad({"norm": _norm[:, :4].contiguous()}, ValueError, "norm has shape [2, 4], expected"),
    Bad({"norm": gaps(_norm)}, ValueError, "norm must be contiguous"),
]

_keys, _key_scale = tt.encode(floats(2, 5, D), SIGNS, LEVELS, STEPS, 4)
SCORE = {
    "q": floats(2, 3, D),
    "packed": _keys,
    "scale": _key_scale,
    "signs": SIGNS,
    "levels": LEVELS,
    "bits": 4,
    "center": floats(D),
    "sign_bits": _bits,
    "residual_norm": _norm,
    "projection": DENSE,
}
TOGETHER = "sign_bits, residual_norm and projection come together or not at all"
SCORE_BAD = [
    *LEVELS_BAD,
    *PROJECTION_BAD,
    Bad({"q": floats(2, 3, D).double()}, TypeError, f"q has {DTYPE}"),
    Bad({"q": gaps(floats(2, 3, D))}, ValueError, f"q {STRIDE}"),
    Bad({"q": floats(D)}, ValueError, "q has shape [64]"),
    Bad({"q": floats(3, 3, D)}, ValueError, "packed has shape [2, 5, 32]", "packed [2, 5, 32]"),
    Bad({"q": floats(2, 3, 32)}, ValueError, "has shape [2, 5, 32]", "q has shape [2, 3, 32]"),
    Bad({"packed": _keys[..., :30].contiguous()}, ValueError, "packed has shape [2, 5, 30]"),
    Bad({"packed": column(_keys)}, ValueError, "packed must be contiguous"),
    Bad({"packed": _keys.int()}, TypeError, "packed has dtype int32, supported: uint8"),
    Bad({"scale": _key_scale[:1]}, ValueError, "scale has shape [1, 5], expected"),
    Bad({"scale": _key_scale.float()}, TypeError, "scale has dtype float32, supported: float16"),
    Bad({"sign_bits": None}, ValueError, TOGETHER),
    Bad({"residual_norm": None}, ValueError, TOGETHER),
    Bad({"projection": None}, ValueError, TOGETHER),
    Bad({"residual_norm": _norm[:, :4].contiguous()}, ValueError, "norm has shape [2, 4]"),
    Bad({"sign_bits": _bits[:, :4].contiguous()}, ValueError, "sign_bits has shape [2, 4, 3]"),
]

# ---- cache and attention

CONFIG = tt.preset("k4v4", D, page_size=16, sink_tokens=2, recent_window=3)
TABLES = tt.make_tables(CONFIG, 0, center=floats(2, D))
NUM_PAGES, TABLE, _slots = paged([20, 5], 16)
SLOTS = torch.cat([_slots[0][18:], _slots[1][4:]])
TAIL = tt.Tail(
    tt.allocate_tail(CONFIG, 3, 2, torch.float32, 2),
    torch.tensor([2, 0]),
    int32(2, 0).expand(3, 2).contiguous(),
)
LAST_SLOT = NUM_PAGES * 16 - 1


def tables(**changes):
    return {"tables": TABLES._replace(**changes)}


def tail(**changes):
    return {"tail": TAIL._replace(**changes)}


def table_with(value, row=0, page=0):
    changed = TABLE.clone()
    changed[row, page] = value
    return {"block_table": changed}


SIGNS_AND_CENTER_BAD = [
    Bad(tables(key_signs=SIGNS[:32]), ValueError, "key_signs has shape [32], expected [64]"),
    Bad(tables(value_signs=SIGNS.half()), TypeError, "value_signs has dtype float16"),
    Bad(tables(key_levels=LEVELS[:8]), ValueError, "key_levels has shape [8], expected [16]"),
    Bad(tables(value_levels=LEVELS.int()), TypeError, "value_levels has dtype int32"),
    Bad(tables(key_levels=LEVELS.flip(0)), RuntimeError, "key_levels must increase and be"),
    Bad(tables(value_levels=LEVELS.flip(0)), RuntimeError, "value_levels must increase and be"),
    Bad(tables(center=floats(3, D)), ValueError, "center has shape [3, 64], expected [2, 64]"),
    Bad(tables(center=floats(D)), ValueError, "center has shape [64], expected [2, 64]"),
    Bad(tables(center=floats(2, 2, D)), ValueError, "[2, 2, 64], expected [3, 2, 64]"),
    Bad(tables(center=floats(2, D).half()), TypeError, "center has dtype float16"),
    Bad(tables(center=gaps(floats(2, D))), ValueError, "center must be contiguous"),
    Bad(tables(value_signs=elsewhere(D)), ValueError, ONE_DEVICE),
]
BATCH_BAD = [
    Bad({"seq_lens": int32(20, 5).long()}, TypeError, "seq_lens has dtype int64, supported: int32"),
    Bad({"seq_lens": int32(20, 5)[None]}, ValueError, "seq_lens has shape [1, 2], expected [any]"),
    Bad({"seq_lens": int32(20, -5)}, RuntimeError, "seq_lens holds -5, supported: 0 and more"),
    Bad({"cu_seqlens_q": int32(0, 3)}, ValueError, "cu_seqlens_q has shape [2], expected [3]"),
    Bad({"cu_seqlens_q": torch.tensor([0, 2, 3])}, TypeError, "cu_seqlens_q has dtype int64"),
    Bad(
        {"cu_seqlens_q": None}, ValueError, "without cu_seqlens_q every sequence has one new token"
    ),
    Bad({"cu_seqlens_q": int32(1, 2, 3)}, RuntimeError, "cu_seqlens_q must start at 0"),
    Bad({"cu_seqlens_q": int32(0, 2, 4)}, RuntimeError, "no more than the 3 tokens of the call"),
    Bad({"cu_seqlens_q": int32(0, 3, 2)}, RuntimeError, "cu_seqlens_q must not decrease"),
    Bad({"seq_lens": int32(1, 5)}, RuntimeError, "sequence 0 has 2 new tokens but a length of 1"),
]
TAIL_BAD = [
    Bad(tail(ring=TAIL.ring.half()), TypeError, "tail has dtype float16, supported: float32"),
    Bad(tail(ring=TAIL.ring[:, :1].contiguous()), ValueError, "tail has shape [3, 1, 6, 2, 64]"),
    Bad(tail(ring=TAIL.ring[:, :, :, :1].contiguous()), ValueError, "tail has shape [3, 2, 6, 1"),
    Bad(tail(ring=TAIL.ring[0]), ValueError, "tail has shape [2, 6, 2, 64]"),
    Bad(tail(ring=gaps(TAIL.ring)), ValueError, "tail must be contiguous"),
    Bad(tail(ring=heads_apart(TAIL.ring)), ValueError, "tail must be contiguous behind its first"),
    Bad(
        tail(
            ring=TAIL.ring[:2]
            .flatten()[: 2 * 768]
            .as_strided((2, 2, 6, 2, D), (768, 768, 128, 64, 1))
        ),
        ValueError,
        "tail has stride 768 in its first dimension, supported: 1536 and more",
    ),
    Bad(
        tail(slots=TAIL.slots.short()),
        TypeError,
        "tail_slots has dtype int16, supported: int32, int64",
    ),
    Bad(tail(slots=torch.tensor([0])), ValueError, "tail_slots has shape [1], expected [2]"),
    Bad(tail(slots=torch.tensor([0, 3])), RuntimeError, "tail_slots holds 3, supported: -1 to 2"),
    Bad(tail(slots=torch.tensor([-2, 0])), RuntimeError, "tail_slots holds -2, supported: -1 to 2"),
    Bad(tail(ring=elsewhere(3, 2, 6, 2, D)), ValueError, ONE_DEVICE),
]
CACHE = tt.allocate_cache(CONFIG, NUM_PAGES, 2)
CACHE_BAD = [
    Bad({"cache": CACHE.int()}, TypeError, "cache has dtype int32, supported: uint8"),
    Bad({"cache": CACHE[0]}, ValueError, "cache has shape [2, 1088]"),
    Bad({"cache": CACHE[..., :1000].contiguous()}, ValueError, "cache has shape [5, 2, 1000]"),
    Bad({"cache": gaps(CACHE)}, ValueError, "cache must be contiguous"),
    Bad({"cache": heads_apart(CACHE)}, ValueError, "cache must be contiguous behind its first"),
    Bad({"cache": CACHE[:1].expand(5, 2, -1)}, ValueError, "cache has stride 0 in its first dim"),
    Bad(
        {"cache": CACHE.view(-1).as_strided((5, 2, 1088), (1088, 1088, 1))},
        ValueError,
        "cache has stride 1088 in its first dimension, supported: 2176 and more, so that entries",
    ),
]

CACHE_STORE = {
    "k": floats(3, 2, D),
    "v": floats(3, 2, D) + 1,
    "cache": CACHE,
    "slot_mapping": SLOTS,
    "config": CONFIG,
    "tables": TABLES,
    "tail": TAIL,
    "seq_lens": int32(20, 5),
    "cu_seqlens_q": int32(0, 2, 3),
}
CACHE_STORE_BAD = [
    *SIGNS_AND_CENTER_BAD,
    *BATCH_BAD,
    *TAIL_BAD,
    *CACHE_BAD,
    Bad(tables(key_steps=STEPS[:0]), ValueError, "key_steps has 0 candidates, supported: 1 to 64"),
    Bad(tables(key_steps=STEPS.flip(0)), RuntimeError, "key_steps must be positive, finite and"),
    Bad(tables(value_steps=STEPS.half()), TypeError, "value_steps has dtype float16"),
    Bad({"k": floats(3, 2, D).double()}, TypeError, f"k has {DTYPE}"),
    Bad({"k": None}, TypeError, "k must be a tensor, got NoneType", SKIP),
    Bad({"k": floats(3, D)}, ValueError, "k has shape [3, 64]"),
    Bad({"k": gaps(floats(3, 2, D))}, ValueError, f"k {STRIDE}"),
    Bad({"v": gaps(floats(3, 2, D))}, ValueError, f"v {STRIDE}"),
    Bad({"v": floats(3, 2, D).half()}, TypeError, "v has dtype float16, supported: float32"),
    Bad({"v": floats(3, 1, D)}, ValueError, "v has shape [3, 1, 64], expected [3, 2, 64]"),
    Bad({"v": elsewhere(3, 2, D)}, ValueError, ONE_DEVICE),
    Bad(
        {"k": floats(3, 2, 48), "v": floats(3, 2, 48)},
        ValueError,
        "k has head_dim 48, but the config has 64",
        "cache has shape",
    ),
    Bad(
        {"k": floats(3, 2, 40), "v": floats(3, 2, 40)},
        ValueError,
        "k has head_dim 40",
        "head_dim is 40, supported in page records: multiples of 16 up to 1024",
    ),
    Bad(
        {"cache": CACHE[:, :1].contiguous()}, ValueError, "cache has", "cache has 1 KV heads but k"
    ),
    Bad(
        {"slot_mapping": SLOTS.short()},
        TypeError,
        "slot_mapping has dtype int16, supported: int32, int64",
    ),
    Bad({"slot_mapping": int32(0, -2, 1)}, RuntimeError, "slot_mapping holds -2"),
    Bad({"slot_mapping": SLOTS[:2]}, ValueError, "slot_mapping has shape [2], expected [3]"),
    Bad({"slot_mapping": gaps(SLOTS)}, ValueError, "slot_mapping must be contiguous"),
    Bad(
        {"slot_mapping": torch.tensor([0, 1, LAST_SLOT + 1])},
        RuntimeError,
        f"slot_mapping holds {LAST_SLOT + 1}, supported: -1 to {LAST_SLOT}",
    ),
    Bad({"slot_mapping": torch.tensor([0, -2, 1])}, RuntimeError, "slot_mapping holds -2"),
    Bad({"seq_lens": None, "cu_seqlens_q": None}, ValueError, "tail needs seq_lens"),
    Bad(
        tail(ring=TAIL.ring[:, :, :2].contiguous()),
        ValueError,
        "tail has 2 rows, expected at least 5",
        SKIP,  # does not know the window, and sinks may be alone
    ),
    Bad(
        tables(key_levels=None),
        ValueError,
        "key_levels do not fit the config's key_grid 'lloyd'",
        SKIP,
    ),
]

CACHE_LOAD = {
    "cache": CACHE,
    "block_table": TABLE,
    "seq_lens": int32(20, 5),
    "config": CONFIG,
    "tables": TABLES,
    "max_seq_len": 20,
    "dtype": torch.float32,
}
TABLE_BAD = [
    Bad({"block_table": TABLE.long()}, TypeError, "block_table has dtype int64, supported: int32"),
    Bad({"block_table": TABLE[:1]}, ValueError, "block_table has shape [1, 3], expected [2, any]"),
    Bad({"block_table": TABLE[0]}, ValueError, "block_table has shape [3], expected [2, any]"),
    Bad({"block_table": gaps(TABLE)}, ValueError, f"block_table {STRIDE}"),
    Bad(table_with(5), RuntimeError, "block_table names page 5 for sequence 0, supported: 0 to 4"),
    Bad(table_with(-1, 1), RuntimeError, "block_table names page -1 for sequence 1"),
    Bad(
        {"block_table": TABLE[:, :1].contiguous()},
        RuntimeError,
        "sequence 0 has 20 tokens but block_table has room for 16",
    ),
]
CACHE_LOAD_BAD = [
    *CACHE_BAD,
    *TABLE_BAD,
    *[bad for bad in BATCH_BAD[:3]],
    *[bad for bad in SIGNS_AND_CENTER_BAD if bad.raw is SAME],
    Bad({"max_seq_len": -1}, ValueError, "max_seq_len is -1, supported: 0 and more"),
    Bad({"max_seq_len": 19}, RuntimeError, "sequence 0 has 20 tokens, more than max_seq_len 19"),
    Bad({"dtype": torch.int32}, TypeError, "dtype is"),
]

PAGED_ATTENTION = {
    "q": floats(3, 4, D),
    "cache": CACHE,
    "block_table": TABLE,
    "seq_lens": int32(20, 5),
    "config": CONFIG,
    "tables": TABLES,
    "cu_seqlens_q": int32(0, 2, 3),
    "max_q_len": 2,
    "softmax_scale": 0.1,
    "tail": TAIL,
    "sliding_window": 9,
    "soft_cap": 20.0,
    "sink_logits": floats(4),
}


def new(**changes):
    return {"k_new": floats(3, 2, D), "v_new": floats(3, 2, D), **changes}


PAGED_ATTENTION_BAD = [
    *CACHE_BAD,
    *TABLE_BAD,
    *BATCH_BAD,
    *TAIL_BAD,
    *SIGNS_AND_CENTER_BAD,
    Bad({"q": floats(3, 4, D).double()}, TypeError, f"q has {DTYPE}"),
    Bad({"q": floats(3, D)}, ValueError, "q has shape [3, 64]"),
    Bad({"q": gaps(floats(3, 4, D))}, ValueError, f"q {STRIDE}"),
    Bad({"q": floats(3, 3, D)}, ValueError, "q has 3 heads"),
    Bad(
        {"q": floats(3, 4, 48)},
        ValueError,
        "q has head_dim 48, but the config has 64",
        "cache has shape",
    ),
    Bad({"max_q_len": 0}, ValueError, "max_q_len is 0, supported: 1 and more"),
    Bad({"max_q_len": 1}, RuntimeError, "a sequence has 2"),
    Bad({"max_q_len": 3}, ValueError, "tail has 6 rows, expected at least 7", "the tail has room"),
    Bad(
        {"softmax_scale": math.nan},
        ValueError,
        "softmax_scale is nan, supported: numbers that are finite in float32",
    ),
    Bad({"softmax_scale": math.inf}, ValueError, "softmax_scale is inf"),
    Bad({"softmax_scale": 1e39}, ValueError, "softmax_scale is 1e+39"),
    Bad({"softmax_scale": -3.41e38}, ValueError, "softmax_scale is -3.41e+38"),
    Bad({"sliding_window": -1}, ValueError, "sliding_window is -1, supported: 0 (none) and more"),
    Bad({"soft_cap": -1.0}, ValueError, "soft_cap is -1"),
    Bad(
        {"soft_cap": 1e39},
        ValueError,
        "soft_cap is 1e+39, supported: 0 (none), or 1.17549e-38 to 1000",
    ),
    Bad({"soft_cap": 1001.0}, ValueError, "soft_cap is 1001"),
    Bad({"soft_cap": 1e-38}, ValueError, "soft_cap is 1e-38"),
    Bad({"soft_cap": 1e-46}, ValueError, "soft_cap is 1e-46"),
    Bad({"soft_cap": math.nan}, ValueError, "soft_cap is nan"),
    Bad({"soft_cap": math.inf}, ValueError, "soft_cap is inf"),
    Bad({"sink_logits": floats(2)}, ValueError, "sink_logits has shape [2], expected [4]"),
    Bad({"sink_logits": floats(4).half()}, TypeError, "sink_logits has dtype float16"),
    Bad(tail(valid=int32(2, 0)), ValueError, "tail_valid has shape [2], expected [3, 2]"),
    Bad(tail(valid=TAIL.valid.long()), TypeError, "tail_valid has dtype int64, supported: int32"),
    Bad(new(v_new=None), ValueError, "k_new and v_new come together or not at all"),
    Bad(new(k_new=None), ValueError, "k_new and v_new come together or not at all"),
    Bad(new(k_new=[1.0]), TypeError, "k_new must be a tensor, got list", SKIP),
    Bad(new(k_new=floats(2, 2, D)), ValueError, "k_new has shape [2, 2, 64], expected [3, 2, 64]"),
    Bad(new(v_new=floats(3, 4, D)), ValueError, "v_new has shape [3, 4, 64], expected [3, 2, 64]"),
    Bad(new(v_new=floats(3, 2, 32)), ValueError, "v_new has shape [3, 2, 32], expected"),
    Bad(new(k_new=floats(3, 2 * D)), ValueError, "k_new has shape [3, 128], expected [3, 2, 64]"),
    Bad(
        new(v_new=floats(3, 2, D).half()), TypeError, "v_new has dtype float16, supported: float32"
    ),
    Bad(new(k_new=gaps(floats(3, 2, D))), ValueError, f"k_new {STRIDE}"),
    Bad(new(v_new=gaps(floats(3, 2, D))), ValueError, f"v_new {STRIDE}"),
    Bad(new(k_new=elsewhere(3, 2, D)), ValueError, ONE_DEVICE),
    Bad(
        new(tail=TAIL._replace(ring=TAIL.ring[:, :, :3].contiguous())),
        ValueError,
        "tail has 3 rows, expected at least 4 beside k_new",
        "the tail has room for 1 recent tokens, needed beside k_new: recent_window - 1 = 2",
    ),
    Bad(
        new(block_table=TABLE[:, :1].contiguous()),
        RuntimeError,
        "sequence 0 has 18 tokens but block_table has room for 16",
    ),
]

PAGED_ATTENTION_OUT = {**PAGED_ATTENTION, "out": torch.zeros(3, 4, D), "lse": torch.zeros(3, 4)}
PAGED_ATTENTION_OUT_BAD = [
    Bad({"out": torch.zeros(3, 4, D).half()}, TypeError, "out has dtype float16"),
    Bad({"out": torch.zeros(2, 4, D)}, ValueError, "out has shape [2, 4, 64], expected [3, 4, 64]"),
    Bad({"out": gaps(torch.zeros(3, 4, D))}, ValueError, "out must be contiguous"),
    Bad({"lse": torch.zeros(3, 4).double()}, TypeError, "lse has dtype float64"),
    Bad({"lse": torch.zeros(4, 3)}, ValueError, "lse has shape [4, 3], expected [3, 4]"),
    Bad({"lse": gaps(torch.zeros(3, 4))}, ValueError, "lse must be contiguous"),
    Bad({"out": None}, ValueError, "lse is given without out", SKIP),
    Bad(new(k_new=floats(2, 2, D)), ValueError, "k_new has shape [2, 2, 64], expected [3, 2, 64]"),
    Bad({"seq_lens": int32(20, 999)}, RuntimeError, "sequence 1 has 999 tokens but block_table"),
    Bad(table_with(99), RuntimeError, "block_table names page 99"),
]

STORE_AND_ATTEND = {**PAGED_ATTENTION_OUT, **new(), "slot_mapping": SLOTS}
STORE_AND_ATTEND_BAD = [
    *CACHE_BAD,
    *TABLE_BAD[:-1],  # new tokens need no room in block_table
    *BATCH_BAD,
    *TAIL_BAD,
    *SIGNS_AND_CENTER_BAD,
    Bad({"slot_mapping": SLOTS[:2]}, ValueError, "slot_mapping has shape [2], expected [3]"),
    Bad({"slot_mapping": int32(0, -2, 1)}, RuntimeError, "slot_mapping holds -2"),
    Bad({"k_new": None}, TypeError, "k_new must be a tensor", "k_new and v_new"),
    Bad(
        {"k_new": None, "v_new": None},
        TypeError,
        "k_new must be a tensor",
        "store_and_attend needs k_new and v_new",
    ),
    Bad({"k_new": floats(3, 2, 32)}, ValueError, "k_new has shape [3, 2, 32], expected"),
    Bad({"v_new": floats(3, 2, D).half()}, TypeError, "v_new has dtype float16"),
    Bad({"max_q_len": 1}, RuntimeError, "a sequence has 2"),
    Bad({"out": torch.zeros(2, 4, D)}, ValueError, "out has shape [2, 4, 64], expected [3, 4, 64]"),
    Bad({"lse": torch.zeros(4, 3)}, ValueError, "lse has shape [4, 3], expected [3, 4]"),
    Bad(table_with(99), RuntimeError, "block_table names page 99"),
    Bad(tables(key_steps=torch.tensor([])), ValueError, "key_steps"),
]

PAGED_MASS = {
    **{name: value for name, value in PAGED_ATTENTION.items() if name != "sink_logits"},
    "lse": floats(3, 4),
    "mass": torch.zeros(2, 2, 20),
}
PAGED_MASS_BAD = [
    *(bad for bad in PAGED_ATTENTION_BAD if "sink_logits" not in bad.changes),
    Bad({"lse": None}, TypeError, "lse must be a tensor, got NoneType", SKIP),
    Bad({"lse": floats(3, 4).half()}, TypeError, "lse has dtype float16, supported: float32"),
    Bad({"lse": floats(4, 3)}, ValueError, "lse has shape [4, 3], expected [3, 4]"),
    Bad({"lse": gaps(floats(3, 4))}, ValueError, "lse must be contiguous"),
    Bad({"lse": elsewhere(3, 4)}, ValueError, ONE_DEVICE),
    Bad({"mass": torch.zeros(2, 2, 20).double()}, TypeError, "mass has dtype float64"),
    Bad({"mass": torch.zeros(2, 20)}, ValueError, "mass has shape [2, 20], expected [2, 2, any]"),
    Bad({"mass": torch.zeros(3, 2, 20)}, ValueError, "mass has shape [3, 2, 20], expected [2, 2"),
    Bad({"mass": torch.zeros(2, 4, 20)}, ValueError, "mass has shape [2, 4, 20], expected [2, 2"),
    Bad({"mass": column(torch.zeros(2, 2, 20))}, ValueError, "mass must be contiguous"),
    Bad({"mass": elsewhere(2, 2, 20)}, ValueError, ONE_DEVICE),
    Bad(
        {"mass": torch.zeros(2, 2, 19)},
        RuntimeError,
        "sequence 0 has 20 tokens but mass has room for 19",
    ),
]

CACHE_MOVE = {
    "cache": CACHE,
    "sources": torch.tensor([[0, 1, -1], [2, 3, 4]]),
    "targets": torch.tensor([[5, 6, 7], [7, 6, 5]]),
    "config": CONFIG,
}
CACHE_MOVE_BAD = [
    *CACHE_BAD,
    Bad({"sources": int32(0, 1).short()[None]}, TypeError, "sources has dtype int16, supported"),
    Bad({"sources": torch.tensor([0, 1])}, ValueError, "sources has shape [2], expected [2, any]"),
    Bad({"sources": int32(0, 1, 2)[None]}, ValueError, "sources has shape [1, 3], expected [2, a"),
    Bad({"sources": gaps(CACHE_MOVE["sources"])}, ValueError, "sources must be contiguous"),
    Bad({"sources": elsewhere(2, 3, dtype=torch.int64)}, ValueError, ONE_DEVICE),
    Bad({"targets": int32(5, 6, 7, 8).view(2, 2)}, ValueError, "targets has shape [2, 2], expect"),
    Bad({"targets": CACHE_MOVE["targets"].float()}, TypeError, "targets has dtype float32"),
    Bad({"targets": gaps(CACHE_MOVE["targets"])}, ValueError, "targets must be contiguous"),
    Bad({"sources": int32(0, 1, 2, 3, 80, 5).view(2, 3)}, RuntimeError, "sources holds 80, suppor"),
    Bad({"targets": int32(5, 6, -2, 7, 8, 9).view(2, 3)}, RuntimeError, "targets holds -2, suppo"),
    Bad(
        {"targets": int32(5, 6, 7, 8, 9, 8).view(2, 3)},
        RuntimeError,
        "targets holds slot 8 twice for KV head 1: a slot has room for one token",
    ),
]

MERGE_ATTENTION = {
    "out_a": floats(3, 4, D),
    "lse_a": floats(3, 4),
    "out_b": floats(3, 4, D),
    "lse_b": floats(3, 4),
}
MERGE_ATTENTION_BAD = [
    Bad({"out_a": floats(3, 4, D).double()}, TypeError, f"out_a has {DTYPE}"),
    Bad({"out_b": floats(3, 4, D).half()}, TypeError, "out_b has dtype float16"),
    Bad({"out_b": floats(3, 5, D)}, ValueError, "out_b has shape [3, 5, 64]"),
    Bad({"lse_a": floats(3)}, ValueError, "lse_a has shape [3]"),
    Bad({"lse_b": floats(3, 4, 1)}, ValueError, "lse_b has shape [3, 4, 1]"),
    Bad({"lse_b": floats(3, 4).half()}, TypeError, "lse_b has dtype float16"),
    Bad({"out_a": column(floats(3, 4, D))}, ValueError, "out_a must be contiguous"),
    Bad({"out_b": column(floats(3, 4, D))}, ValueError, "out_b must be contiguous"),
    Bad({"lse_a": gaps(floats(3, 4))}, ValueError, "lse_a must be contiguous"),
    Bad({"lse_b": elsewhere(3, 4)}, ValueError, ONE_DEVICE),
]

# ---- mla_store, mla_load, mla_attention

R, DR = 128, 32
LATENTS = tt.latent_preset("k4", R, DR, page_size=32, sink_tokens=2, recent_window=3)
_center = tt.scaled_center(floats(R), floats(R).abs() + 0.5)
# rotated_center is for calls with rotated=True, steps are for mla_store
STORED = tt.make_latent_tables(LATENTS, 0, center=_center)._replace(rotated_center=None)
READ = STORED._replace(steps=None)
LATENT_PAGES = tt.allocate_latent_cache(LATENTS, 5)
LATENT_TABLE = int32(0, 2, 1, 3).view(2, 2)
LATENT_RING = tt.allocate_latent_tail(LATENTS, 3, torch.float32, 2)
LATENT_TAIL = tt.Tail(LATENT_RING, torch.tensor([2, 0]))


def of_tables(name, **changes):
    """Other constants of the good call."""
    return {"tables": (STORED if name == "mla_store" else READ)._replace(**changes)}


def latent_constants(name):
    change = lambda **changes: of_tables(name, **changes)  # noqa: E731
    return [
        Bad(change(signs=floats(64)), ValueError, "signs has shape [64], expected [128]"),
        Bad(change(signs=STORED.signs.half()), TypeError, "signs has dtype float16"),
        Bad(change(signs=STORED.signs * 2), RuntimeError, "signs must be +1 or -1"),
        Bad(change(signs=None), ValueError, "signs do not fit the config's transform True", SKIP),
        Bad(change(levels=STORED.levels[:8]), ValueError, "levels has shape [8], expected [16]"),
        Bad(change(levels=STORED.levels.flip(0)), RuntimeError, "levels must increase"),
        Bad(change(levels=None), ValueError, "levels do not fit the config's grid 'lloyd'", SKIP),
        Bad(change(center=floats(64)), ValueError, "center has shape [64], expected [128]"),
        Bad(change(center=floats(2, R)), ValueError, "center has shape [2, 128], expected [3, 1"),
        Bad(change(center=_center.double()), TypeError, "center has dtype float64"),
        Bad({"cache": LATENT_PAGES[:, :-2]}, ValueError, "cache has shape [5, 4158], expected"),
        Bad({"cache": LATENT_PAGES[:, None]}, ValueError, "cache has shape [5, 1, 4160], expected"),
        Bad({"cache": LATENT_PAGES.char()}, TypeError, "cache has dtype int8, supported: uint8"),
        Bad(
            {"cache": LATENT_PAGES.T.contiguous().T}, ValueError, "cache must be contiguous behind"
        ),
        Bad(
            {"cache": elsewhere(5, 4160, dtype=torch.uint8)},
            ValueError,
            ONE_DEVICE,
            SKIP if name == "mla_load" else SAME,
        ),
        Bad({"seq_lens": int32(20, 5).long()}, TypeError, "seq_lens has dtype int64"),
        Bad({"seq_lens": int32(20, -5)}, RuntimeError, "seq_lens holds -5, supported: 0 and more"),
    ]


def latent_tail(**changes):
    return {"tail": LATENT_TAIL._replace(**changes)}


LATENT_TAIL_BAD = [
    Bad(latent_tail(ring=LATENT_RING.half()), TypeError, "tail has dtype float16, supported"),
    Bad(
        latent_tail(ring=LATENT_RING[..., :R].contiguous()),
        ValueError,
        "tail has shape [3, 6, 128], expected [any, any, 160]",
    ),
    Bad(latent_tail(ring=LATENT_RING[:, None]), ValueError, "tail has shape [3, 1, 6, 160]"),
    Bad(latent_tail(ring=gaps(LATENT_RING)), ValueError, "tail must be contiguous behind"),
    Bad(latent_tail(slots=torch.tensor([3, 0])), RuntimeError, "tail_slots holds 3, supported: -1"),
    Bad(latent_tail(slots=torch.tensor([2])), ValueError, "tail_slots has shape [1], expected [2]"),
    Bad(latent_tail(slots=int32(2, 0).short()), TypeError, "tail_slots has dtype int16"),
    Bad({"cu_seqlens_q": int32(0, 3, 2)}, RuntimeError, "cu_seqlens_q must"),
    Bad({"cu_seqlens_q": int32(0, 3)}, ValueError, "cu_seqlens_q has shape [2], expected [3]"),
    Bad({"cu_seqlens_q": None}, ValueError, "without cu_seqlens_q every sequence has one new"),
    Bad({"seq_lens": int32(1, 5)}, RuntimeError, "sequence 0 has 2 new tokens but a length of 1"),
]

MLA_STORE = {
    "latent": floats(3, R),
    "rope": floats(3, DR),
    "cache": LATENT_PAGES,
    "slot_mapping": torch.tensor([3, 70, 159]),
    "config": LATENTS,
    "tables": STORED,
    "tail": LATENT_TAIL,
    "seq_lens": int32(20, 5),
    "cu_seqlens_q": int32(0, 2, 3),
}
MLA_STORE_BAD = [
    *latent_constants("mla_store"),
    *LATENT_TAIL_BAD,
    Bad({"latent": floats(3, R).double()}, TypeError, f"latent has {DTYPE}"),
    Bad({"latent": floats(3, 1, R)}, ValueError, "latent has shape [3, 1, 128], expected"),
    Bad({"latent": gaps(floats(3, R))}, ValueError, f"latent {STRIDE}"),
    Bad(
        {"latent": floats(3, 256)},
        ValueError,
        "latent has shape [3, 256], expected [3, 128]",
        "cache has shape",
    ),
    Bad(
        {"latent": floats(3, 96)},
        ValueError,
        "latent has shape [3, 96], expected [3, 128]",
        "latent_dim is 96, supported: 128, 256, 512",
    ),
    Bad({"rope": floats(3, DR).half()}, TypeError, "rope has dtype float16, supported: float32"),
    Bad({"rope": floats(2, DR)}, ValueError, "rope has shape [2, 32], expected [3,"),
    Bad(
        {"rope": floats(3, 48)},
        ValueError,
        "rope has shape [3, 48], expected [3, 32]",
        "rope_dim is 48, supported: 0, 32, 64",
    ),
    Bad({"rope": gaps(floats(3, DR))}, ValueError, f"rope {STRIDE}"),
    Bad({"rope": elsewhere(3, DR)}, ValueError, ONE_DEVICE),
    Bad(of_tables("mla_store", steps=STORED.steps.flip(0)), RuntimeError, "steps must be positive"),
    Bad(of_tables("mla_store", steps=STORED.steps[:0]), ValueError, "steps has 0 candidates"),
    Bad({"slot_mapping": torch.tensor([3, 70])}, ValueError, "slot_mapping has shape [2]"),
    Bad({"slot_mapping": torch.tensor([3, 70, 160])}, RuntimeError, "slot_mapping holds 160"),
    Bad({"slot_mapping": torch.tensor([3, -2, 5])}, RuntimeError, "slot_mapping holds -2"),
    Bad({"seq_lens": None, "cu_seqlens_q": None}, ValueError, "tail needs seq_lens"),
    Bad(
        latent_tail(ring=LATENT_RING[:, :2].contiguous()),
        ValueError,
        "tail has 2 rows, expected at least 5",
        SKIP,  # does not know the window, and sinks may be alone
    ),
]

MLA_LOAD = {
    "cache": LATENT_PAGES,
    "block_table": LATENT_TABLE,
    "seq_lens": int32(40, 5),
    "config": LATENTS,
    "tables": READ,
    "max_seq_len": 40,
    "dtype": torch.float32,
}
LATENT_TABLE_BAD = [
    Bad({"block_table": LATENT_TABLE.long()}, TypeError, "block_table has dtype int64, supported"),
    Bad({"block_table": LATENT_TABLE[:1]}, ValueError, "block_table has shape [1, 2], expected"),
    Bad({"block_table": LATENT_TABLE + 4}, RuntimeError, "block_table names page 6 for sequence 0"),
    Bad({"block_table": gaps(LATENT_TABLE)}, ValueError, f"block_table {STRIDE}"),
    Bad(
        {"block_table": LATENT_TABLE[:, :1].contiguous()},
        RuntimeError,
        "sequence 0 has 40 tokens but block_table has room for 32",
    ),
]
MLA_LOAD_BAD = [
    *latent_constants("mla_load"),
    *LATENT_TABLE_BAD,
    Bad({"max_seq_len": -1}, ValueError, "max_seq_len is -1, supported: 0 and more"),
    Bad({"max_seq_len": 39}, RuntimeError, "sequence 0 has 40 tokens, more than max_seq_len 39"),
    Bad({"dtype": torch.int32}, TypeError, "dtype is"),
]

MLA_ATTENTION = {
    "q_latent": floats(3, 4, R),
    "q_rope": floats(3, 4, DR),
    "cache": LATENT_PAGES,
    "block_table": LATENT_TABLE,
    "seq_lens": int32(40, 5),
    "config": LATENTS,
    "tables": READ,
    "softmax_scale": 0.1,
    "cu_seqlens_q": int32(0, 2, 3),
    "max_q_len": 2,
    "tail": LATENT_TAIL._replace(valid=int32(2, 0, 2, 0, 2, 0).view(3, 2)),
}


def own_latents(**changes):
    return {"latent_new": floats(3, R), "rope_new": floats(3, DR), **changes}


MLA_ATTENTION_BAD = [
    *latent_constants("mla_attention"),
    *LATENT_TABLE_BAD,
    *LATENT_TAIL_BAD,
    Bad({"q_latent": floats(3, 4, R).double()}, TypeError, f"q_latent has {DTYPE}"),
    Bad({"q_latent": floats(3, R)}, ValueError, "q_latent has shape [3, 128], expected"),
    Bad({"q_latent": gaps(floats(3, 4, R))}, ValueError, f"q_latent {STRIDE}"),
    Bad(
        {"q_latent": floats(3, 4, 256)},
        ValueError,
        "q_latent has shape [3, 4, 256], expected [3, any, 128]",
        "cache has shape",
    ),
    Bad(
        {"q_latent": floats(3, 0, R), "q_rope": floats(3, 0, DR)},
        ValueError,
        "q_latent has no heads",
    ),
    Bad({"q_rope": floats(3, 4, DR).half()}, TypeError, "q_rope has dtype float16, supported"),
    Bad({"q_rope": floats(3, 2, DR)}, ValueError, "q_rope has shape [3, 2, 32], expected [3, 4,"),
    Bad(
        {"q_rope": floats(3, 4, 16)},
        ValueError,
        "q_rope has shape [3, 4, 16], expected [3, 4, 32]",
        "rope_dim is 16, supported: 0, 32, 64",
    ),
    Bad({"q_rope": gaps(floats(3, 4, DR))}, ValueError, f"q_rope {STRIDE}"),
    Bad({"q_rope": elsewhere(3, 4, DR)}, ValueError, ONE_DEVICE),
    Bad({"softmax_scale": math.nan}, ValueError, "softmax_scale is nan, supported: numbers that"),
    Bad({"softmax_scale": 1e39}, ValueError, "softmax_scale is 1e+39"),
    Bad({"max_q_len": 0}, ValueError, "max_q_len is 0, supported: 1 and more"),
    Bad({"max_q_len": 1}, RuntimeError, "a sequence has 2"),
    Bad({"max_q_len": 3}, ValueError, "tail has 6 rows, expected at least 7", "the tail has room"),
    Bad(latent_tail(valid=int32(2, 0)), ValueError, "tail_valid has shape [2], expected [3, 2]"),
    Bad(own_latents(rope_new=None), ValueError, "latent_new and rope_new come together or not"),
    Bad(own_latents(latent_new=None), ValueError, "latent_new and rope_new come together or not"),
    Bad(
        own_latents(latent_new=floats(2, R)), ValueError, "latent_new has shape [2, 128], expected"
    ),
    Bad(
        own_latents(rope_new=floats(3, R)), ValueError, "rope_new has shape [3, 128], expected [3,"
    ),
    Bad(own_latents(latent_new=floats(3, R).half()), TypeError, "latent_new has dtype float16"),
    Bad(own_latents(rope_new=floats(3, DR).half()), TypeError, "rope_new has dtype float16"),
    Bad(own_latents(latent_new=gaps(floats(3, R))), ValueError, f"latent_new {STRIDE}"),
    Bad(own_latents(latent_new=elsewhere(3, R)), ValueError, ONE_DEVICE),
    Bad(
        own_latents(**latent_tail(ring=LATENT_RING[:, :3].contiguous())),
        ValueError,
        "tail has 3 rows, expected at least 4 beside latent_new",
        "the tail has room for 1 recent tokens, needed beside latent_new: recent_window - 1 = 2",
    ),
]
MLA_ATTENTION_OUT = {**MLA_ATTENTION, "out": torch.zeros(3, 4, R), "lse": torch.zeros(3, 4)}
MLA_ATTENTION_OUT_BAD = [
    Bad({"out": torch.zeros(3, 4, R).half()}, TypeError, "out has dtype float16"),
    Bad({"out": torch.zeros(2, 4, R)}, ValueError, "out has shape [2, 4, 128], expected [3, 4, 1"),
    Bad({"lse": torch.zeros(4, 3)}, ValueError, "lse has shape [4, 3], expected [3, 4]"),
    Bad({"out": None}, ValueError, "lse is given without out", SKIP),
    Bad({"out": MLA_ATTENTION["q_latent"]}, RuntimeError, "share memory"),
    Bad({"block_table": LATENT_TABLE + 9}, RuntimeError, "block_table names page 9"),
]

# ---- weight_encode, weight_pack, weight_unpack, weight_decode, linear_packed, linear_experts

WEIGHTS = tt.WeightFormat(4)
WEIGHT_SIGNS, WEIGHT_LEVELS = WEIGHTS.signs(128), WEIGHTS.levels(128)
N, K = 20, 256
WEIGHT_ENCODE = {
    "w": floats(N, K),
    "signs": WEIGHT_SIGNS,
    "levels": WEIGHT_LEVELS,
    "steps": WEIGHTS.steps(128),
    "bits": 4,
    "sub": 32,
    "channel_scale": floats(K).abs() + 1,
}
WEIGHT_CODES_BAD = [
    Bad({"bits": 5}, ValueError, "bits is 5, supported for weights: 4, 8"),
    Bad({"sub": 16}, ValueError, "sub is 16, supported at 4 bits: 0, 32"),
    Bad({"sub": -1}, ValueError, "sub is -1, supported at 4 bits: 0, 32"),
    Bad({"bits": 8}, ValueError, "sub is 32, supported at 8 bits: 0"),
]
WEIGHT_LEVELS_BAD = [
    *WEIGHT_CODES_BAD,
    Bad({"signs": WEIGHT_SIGNS[:32]}, ValueError, "signs has 32 channels, supported: 64 or 128"),
    Bad({"signs": WEIGHT_SIGNS.double()}, TypeError, "signs has dtype float64, supported: float32"),
    Bad({"signs": gaps(WEIGHT_SIGNS)}, ValueError, "signs must be contiguous"),
    Bad({"signs": 2 * WEIGHT_SIGNS}, RuntimeError, "signs must be +1 or -1"),
    Bad({"signs": elsewhere(128)}, ValueError, ONE_DEVICE),
    Bad({"levels": WEIGHT_LEVELS[:8]}, ValueError, "levels has shape [8], expected [16]"),
    Bad({"levels": WEIGHT_LEVELS.flip(0)}, RuntimeError, "levels must increase and be symmetric"),
]
WEIGHT_ENCODE_BAD = [
    *WEIGHT_LEVELS_BAD,
    Bad({"w": floats(N, K).double()}, TypeError, f"w has {DTYPE}"),
    Bad({"w": gaps(floats(N, K))}, ValueError, f"w {STRIDE}"),
    Bad({"w": floats(K)}, ValueError, "w has shape [256], expected [any, any]"),
    Bad({"w": floats(N, 192)}, ValueError, "w has 192 channels, supported: multiples of the group"),
    Bad({"w": floats(N, 0)}, ValueError, "w has 0 channels, supported: multiples of the group"),
    Bad({"steps": torch.ones(65)}, ValueError, "steps has 65 candidates, supported: 1 to 64"),
    Bad({"steps": -torch.ones(1)}, RuntimeError, "steps must be positive, finite and increasing"),
    Bad({"channel_scale": floats(N)}, ValueError, "channel_scale has shape [20], expected [256]"),
    Bad({"channel_scale": floats(K).half()}, TypeError, "channel_scale has dtype float16"),
    Bad({"channel_scale": elsewhere(K)}, ValueError, ONE_DEVICE),
]
_weight = tt.weight_encode(**WEIGHT_ENCODE)
WEIGHT_UNPACK = {"packed": _weight, "n": N, "group": 128, "bits": 4, "sub": 32}
PACKED_WEIGHT_BAD = [
    Bad({"packed": _weight.int()}, TypeError, "packed has dtype int32, supported: uint8"),
    Bad({"packed": _weight[0]}, ValueError, "packed has shape [2, 1088], expected"),
    Bad(
        {"packed": _weight[..., :1056].contiguous()},
        ValueError,
        "packed has shape [2, 2, 1056], expected [any, any, 1088]",
    ),
    Bad({"packed": _weight[:, :1]}, ValueError, "packed must be contiguous"),
    Bad({"packed": _weight[:, :0]}, ValueError, "packed has 0 groups of channels, supported: 1 to"),
    Bad({"n": 16}, ValueError, "packed has 2 tiles of 16 rows, but n is 16, which takes 1"),
    Bad({"n": 33}, ValueError, "packed has 2 tiles of 16 rows, but n is 33, which takes 3"),
    Bad({"n": -1}, ValueError, "the weight has -1 rows, supported: 0 to"),
    Bad({"n": 2**63 - 1}, ValueError, "rows, supported: 0 to 2147483648"),
]
WEIGHT_UNPACK_BAD = [
    *WEIGHT_CODES_BAD,
    *PACKED_WEIGHT_BAD,
    Bad({"group": 32}, ValueError, "group is 32, supported for weights: 64, 128"),
]
_codes, _scales, _multipliers = tt.weight_unpack(**WEIGHT_UNPACK)
WEIGHT_PACK = {"codes": _codes, "scale": _scales, "multipliers": _multipliers, "bits": 4}
WEIGHT_PACK_BAD = [
    Bad({"bits": 5}, ValueError, "bits is 5, supported for weights: 4, 8"),
    Bad({"bits": 8}, ValueError, "sub is 32, supported at 8 bits: 0"),
    Bad({"codes": _codes.int()}, TypeError, "codes has dtype int32, supported: uint8"),
    Bad({"codes": column(_codes)}, ValueError, "codes must be contiguous"),
    Bad({"codes": _codes + 1}, RuntimeError, "codes holds values of 16 or more, which do not fit"),
    Bad({"scale": _scales.float()}, TypeError, "scale has dtype float32, supported: float16"),
    Bad({"scale": _scales[:4]}, ValueError, "scale has shape [4, 2], expected [20, any]"),
    Bad(
        {"scale": _scales[:, :1].contiguous()},
        ValueError,
        "codes has shape [20, 256] and scale [20, 1], supported: a scale for every 64 or every 128",
    ),
    Bad(
        {"multipliers": _multipliers[:, :4].contiguous()},
        ValueError,
        "multipliers has shape [20, 4], expected [20, 8]",
    ),
    Bad({"multipliers": _multipliers + 16}, RuntimeError, "multipliers holds values of 16 or more"),
    Bad({"multipliers": _multipliers.int()}, TypeError, "multipliers has dtype int32"),
]
WEIGHT_DECODE = {
    "packed": _weight,
    "signs": WEIGHT_SIGNS,
    "levels": WEIGHT_LEVELS,
    "n": N,
    "bits": 4,
    "sub": 32,
    "dtype": torch.bfloat16,
    "channel_inverse": floats(K),
}
INVERSE_BAD = [
    Bad({"channel_inverse": floats(N)}, ValueError, "channel_inverse has shape [20], expected"),
    Bad({"channel_inverse": floats(K).half()}, TypeError, "channel_inverse has dtype float16"),
    Bad({"channel_inverse": gaps(floats(K))}, ValueError, "channel_inverse must be contiguous"),
]
WEIGHT_DECODE_BAD = [
    *WEIGHT_LEVELS_BAD,
    *PACKED_WEIGHT_BAD,
    *INVERSE_BAD,
    Bad({"dtype": torch.float64}, TypeError, "dtype is", "dtype is float64, supported: float32"),
]
LINEAR_PACKED = {
    "x": floats(3, K),
    "packed": _weight,
    "signs": WEIGHT_SIGNS,
    "levels": WEIGHT_LEVELS,
    "n": N,
    "bits": 4,
    "sub": 32,
    "channel_inverse": floats(K),
    "bias": floats(N),
}
LINEAR_PACKED_BAD = [
    *WEIGHT_LEVELS_BAD,
    *PACKED_WEIGHT_BAD,
    *INVERSE_BAD,
    Bad({"x": floats(3, K).double()}, TypeError, f"x has {DTYPE}"),
    Bad({"x": gaps(floats(3, K))}, ValueError, f"x {STRIDE}"),
    Bad({"x": torch.tensor(1.0)}, ValueError, "x has shape []"),
    Bad({"x": floats(3, 128)}, ValueError, "x has shape [3, 128], expected [..., 256] for the 2"),
    Bad({"x": elsewhere(3, K)}, ValueError, ONE_DEVICE),
    Bad({"packed": elsewhere(2, 2, 1088, dtype=torch.uint8)}, ValueError, ONE_DEVICE),
    Bad({"bias": floats(K)}, ValueError, "bias has shape [256], expected [20]"),
    Bad({"bias": floats(N).half()}, TypeError, "bias has dtype float16, supported: float32"),
]
LINEAR_EXPERTS = {
    "x": floats(3, K),
    "packed": torch.stack([_weight, _weight]),
    "experts": torch.tensor([[0, 1], [1, 0], [1, 1]]),
    "signs": WEIGHT_SIGNS,
    "levels": WEIGHT_LEVELS,
    "n": N,
    "bits": 4,
    "sub": 32,
    "bias": floats(2, N),
}
_experts = LINEAR_EXPERTS["experts"]
LINEAR_EXPERTS_BAD = [
    *WEIGHT_LEVELS_BAD,
    Bad({"packed": _weight}, ValueError, "packed has shape [2, 2, 1088], expected [any, any, any"),
    Bad({"packed": LINEAR_EXPERTS["packed"][:0]}, ValueError, "packed has no experts"),
    Bad({"n": 16}, ValueError, "packed has 2 tiles of 16 rows, but n is 16, which takes 1"),
    Bad({"n": 2**63 - 1}, ValueError, "rows, supported: 0 to 2147483648"),
    Bad({"x": floats(3, K).double()}, TypeError, f"x has {DTYPE}"),
    Bad({"x": gaps(floats(3, K))}, ValueError, f"x {STRIDE}"),
    Bad({"x": floats(3, 1, K)}, ValueError, "x has shape [3, 1, 256], expected"),
    Bad({"x": floats(3, 128)}, ValueError, "x has shape [3, 128], expected [any, 256] for the 2"),
    Bad({"x": elsewhere(3, K)}, ValueError, ONE_DEVICE),
    Bad({"experts": _experts.int()}, TypeError, "experts has dtype int32, supported: int64"),
    Bad({"experts": _experts[:2]}, ValueError, "experts has shape [2, 2], expected [3, any]"),
    Bad({"experts": column(_experts)}, ValueError, "experts must be contiguous"),
    Bad({"bias": floats(N)}, ValueError, "bias has shape [20], expected [2, 20]"),
    Bad({"bias": floats(2, N).half()}, TypeError, "bias has dtype float16, supported: float32"),
]

GOOD = {
    name: globals()[name.upper()]
    for name in (
        "hadamard pack unpack encode decode group_encode group_decode qjl_sketch qjl_score score "
        "cache_store cache_load paged_attention paged_attention_out store_and_attend "
        "merge_attention paged_mass cache_move mla_store mla_load mla_attention mla_attention_out "
        "weight_encode weight_pack weight_unpack weight_decode linear_packed linear_experts"
    ).split()
}
STORES = ("cache_store", "store_and_attend")
NO_FLOATS = ("pack", "unpack", "cache_move", "weight_unpack")
READ_NO_STEPS = ("cache_load", "paged_attention", "paged_attention_out", "paged_mass")
CASES = [(name, bad) for name in GOOD for bad in globals()[f"{name.upper()}_BAD"]]


def public(name, arguments):
    function = getattr(tt, name.removesuffix("_out"))
    return function(**arguments)


def raw(name, arguments):
    """The raw op's arguments, made of the public function's."""
    a = dict(arguments)
    if "scale_mode" in a:
        a["scale_mode"] = tt.SCALE_MODES[a["scale_mode"]]
    if name.startswith("mla_"):
        return getattr(ops, name)(**raw_of_latents(name, a))
    if "config" in a:
        config, t = a.pop("config"), a.pop("tables", TABLES)._asdict()
        if name == "cache_move":
            t = {}
        elif name not in STORES:
            del t["key_steps"], t["value_steps"]
        a.update(t, page_size=config.page_size, key_bits=config.key_bits)
        a["value_bits"] = config.value_bits
        if name in ("cache_load", "cache_move"):
            a["head_dim"] = config.head_dim
        if name in STORES:
            a["key_scale_mode"], a["value_scale_mode"] = 3, 2
        if "tail" in a:
            ring, slots, valid = a.pop("tail")
            a.update(tail=ring, tail_slots=slots, sink_tokens=config.sink_tokens)
            if name != "cache_store":
                a.update(tail_valid=valid, recent_window=config.recent_window)
    return getattr(ops, name)(**a)


def raw_of_latents(name, a):
    """The arguments of a raw op of latents; a: those of the public function, which it changes."""
    config, t = a.pop("config"), a.pop("tables")
    a.update(signs=t.signs, levels=t.levels, center=t.center)
    a.update(page_size=config.page_size, bits=config.bits, rope_dtype=config.rope_dtype)
    if name == "mla_store":
        a.update(steps=t.steps, scale_mode=3)
    if name == "mla_load":
        a.update(latent_dim=config.latent_dim, rope_dim=config.rope_dim)
    if "tail" in a:
        ring, slots, valid = a.pop("tail")
        a.update(tail=ring, tail_slots=slots, sink_tokens=config.sink_tokens)
        if name != "mla_store":
            a.update(tail_valid=valid, recent_window=config.recent_window)
    return a


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list, dict)):
        values = value.values() if isinstance(value, dict) else value
        return [t for v in values for t in tensors(v)]
    return []


@pytest.mark.parametrize("call", [public, raw])
@pytest.mark.parametrize("name", GOOD)
def test_the_good_call_is_good(name, call):
    call(name, GOOD[name])


@pytest.mark.parametrize("call", [public, raw])
def test_own_tokens_and_outputs_without_lse_are_good(call):
    out = torch.zeros(3, 4, D)
    call("paged_attention_out", {**PAGED_ATTENTION, **new(), "out": out, "lse": None})
    assert_same_bytes(out, call("paged_attention", {**PAGED_ATTENTION, **new()})[0])
    few = {"tail": TAIL._replace(ring=TAIL.ring[:, :, :4].contiguous()), "max_q_len": 10**9}
    call("paged_attention", {**PAGED_ATTENTION, **new(**few)})


@pytest.mark.parametrize(
    ("name", "bad"), CASES, ids=lambda v: v if isinstance(v, str) else v.text[:50]
)
def test_bad_argument(name, bad):
    arguments = {**GOOD[name], **bad.changes}
    held = [t for t in tensors(arguments) if t.device.type != "meta"]
    before = [t.clone() for t in held]
    with pytest.raises(bad.error, match=re.escape(bad.text)):
        public(name, arguments)
    if bad.raw is not SKIP:
        text = bad.text if bad.raw is SAME else bad.raw
        with pytest.raises(RuntimeError, match=re.escape(text)):
            raw(name, arguments)
    for t, old in zip(held, before, strict=True):
        assert_same_bytes(t, old)


class Odd:
    """What the raw ops read of a LatentConfig, which would refuse these numbers."""

    def __init__(self, **changes):
        fields = ("latent_dim", "rope_dim", "page_size", "bits", "rope_dtype")
        vars(self).update({name: getattr(LATENTS, name) for name in fields}, **changes)


def test_numbers_that_only_raw_ops_can_be_given():
    """A config cannot hold them."""
    t, before = TABLES, CACHE.clone()
    store = (floats(3, 2, D), floats(3, 2, D), CACHE, SLOTS, *t)
    load = (CACHE, TABLE, int32(20, 5), *t[:4], t.center)
    k8v4 = tt.allocate_cache(tt.preset("k8v4", D, page_size=16), NUM_PAGES, 2)

    attention = (floats(2, 4, D), *load)
    for call, text in (
        (lambda: ops.cache_store(*store, 48, 4, 4, 3, 2), "page_size is 48, supported: 16, 32"),
        (
            lambda: ops.cache_store(*store, 16, 6, 4, 3, 2),
            "key_bits is 6, supported: 2, 3, 4, 5, 8",
        ),
        (lambda: ops.cache_store(*store, 16, 4, 5, 3, 2), "value_bits is 5, supported: 2, 3, 4, 8"),
        (
            lambda: ops.cache_store(*store, 16, 4, 4, 4, 2),
            "key_scale_mode is 4, supported: 0 (norm)",
        ),
        (lambda: ops.cache_store(*store, 16, 4, 4, 3, -1), "value_scale_mode is -1, supported"),
        (lambda: ops.cache_load(*load, 40, 16, 4, 4, 20, torch.half), "head_dim is 40, supported"),
        (lambda: ops.cache_load(*load, D, 8, 4, 4, 20, torch.half), "page_size is 8, supported"),
        (
            lambda: ops.cache_load(k8v4, *load[1:], D, 16, 8, 4, 20, torch.half),
            "key_levels must be absent at 8",
        ),
        (lambda: ops.paged_attention(*attention, 16, 4, 7, 0.1), "value_bits is 7, supported"),
        (
            lambda: ops.paged_attention(*attention, 16, 4, 4, 0.1, recent_window=-1),
            "recent_window is -1, supported: 0 and more",
        ),
        (
            lambda: ops.paged_attention(
                *attention, 16, 4, 4, 0.1, tail=TAIL.ring, tail_slots=TAIL.slots, sink_tokens=-1
            ),
            "sink_tokens is -1 but the tail has 6 rows",
        ),
        (
            lambda: ops.paged_attention(
                *attention, 16, 4, 4, 0.1, tail=TAIL.ring, tail_slots=TAIL.slots, sink_tokens=7
            ),
            "sink_tokens is 7 but the tail has 6 rows: supported are 1 row and more, and 0 to rows",
        ),
        (
            lambda: ops.paged_attention(*attention, 16, 4, 4, 0.1, tail=TAIL.ring),
            "tail needs tail_slots",
        ),
        (
            lambda: raw("mla_load", {**MLA_LOAD, "config": Odd(page_size=16)}),
            "page_size is 16, supported for latents: 32, 64, 128",
        ),
        (
            lambda: raw("mla_load", {**MLA_LOAD, "config": Odd(bits=2)}),
            "bits is 2, supported for latents: 3, 4, 5, 8",
        ),
        (
            lambda: raw("mla_load", {**MLA_LOAD, "config": Odd(latent_dim=192)}),
            "latent_dim is 192, supported: 128, 256, 512",
        ),
        (
            lambda: raw("mla_load", {**MLA_LOAD, "config": Odd(rope_dtype=torch.float32)}),
            "rope_dtype is",
        ),
        (
            lambda: ops.encode(floats(3, D), SIGNS, LEVELS, STEPS, 4, 9),
            "scale_mode is 9, supported: 0 (norm), 1 (preserve), 2 (mse), 3 (unbiased)",
        ),
    ):
        with pytest.raises(RuntimeError, match=re.escape(text)):
            call()
        first = text.split()[0]
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match=first):
            call()
    assert_same_bytes(CACHE, before)


# ---- fakes


def refuses(name, bad):
    """Whether the raw op refuses it in the words of the kernel or of the public function."""
    words = {bad.text, bad.text if bad.raw is SAME else bad.raw}
    try:
        raw(name, {**GOOD[name], **bad.changes})
    except RuntimeError as error:
        return any(text in str(error) for text in words)
    return False


@pytest.mark.parametrize("name", GOOD)
def test_what_fakes_refuse(name):
    """All that the kernels refuse without reading values; a good call has the kernel's shapes."""
    bads = [bad for n, bad in CASES if n == name and bad.raw is not SKIP]
    bads = [bad for bad in bads if bad.error is not RuntimeError]  # not values
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = raw(name, GOOD[name])
        accepted = [bad.text for bad in bads if not refuses(name, bad)]
    assert not accepted
    for one, other in zip(tensors(fake), tensors(raw(name, GOOD[name])), strict=True):
        assert one.device == other.device
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def given_to_raw(name):
    """The tensors of a good call that reach the raw op."""
    steps = () if name == "cache_store" else (TABLES.key_steps, TABLES.value_steps)
    others = (TAIL.valid,) if name == "cache_store" else ()
    return [t for t in tensors(GOOD[name]) if not any(t is unused for unused in (*steps, *others))]


@pytest.mark.parametrize("name", [name for name in GOOD if len(given_to_raw(name)) > 1])
def test_one_meta_tensor_among_others_is_refused(name):
    """torch sends such a call to the fake, which would do nothing. All on meta is a good call."""
    before = [t.clone() for t in tensors(GOOD[name])]
    for t in given_to_raw(name):
        arguments = tree_map(lambda x, t=t: x.to("meta") if x is t else x, GOOD[name])
        with pytest.raises(RuntimeError, match=ONE_DEVICE):
            raw(name, arguments)
    for t, old in zip(tensors(GOOD[name]), before, strict=True):
        assert_same_bytes(t, old)
    results = raw(name, tree_map_only(torch.Tensor, lambda t: t.to("meta"), GOOD[name]))
    assert all(t.is_meta for t in tensors(results))


# ---- gradients


def _replace_in(value, old, new):
    if value is old:
        return new
    if isinstance(value, tuple):
        return type(value)(*(_replace_in(v, old, new) for v in value))
    return value


@pytest.mark.parametrize("call", [public, raw])
@pytest.mark.parametrize("name", [n for n in GOOD if n != "hadamard"])
def test_gradients_are_refused(name, call):
    """For every floating-point input; not under no_grad or inference_mode."""
    text = (
        f"turboquant::{name} takes no gradient: call it under torch.no_grad() or detach its inputs"
    )
    kept = {key: value for key, value in GOOD[name].items() if key not in ("out", "lse")}
    if name in READ_NO_STEPS:
        kept["tables"] = kept["tables"]._replace(key_steps=None, value_steps=None)  # unused
    inputs = [t for t in tensors(list(kept.values())) if t.is_floating_point()]
    for t in inputs:
        needs = t.clone().requires_grad_()
        arguments = {key: _replace_in(value, t, needs) for key, value in GOOD[name].items()}
        with pytest.raises(RuntimeError, match=re.escape(text)):
            call(name, arguments)
        with torch.no_grad():
            call(name, arguments)
    with torch.inference_mode():
        call(name, GOOD[name])
    assert inputs or name in NO_FLOATS


@pytest.mark.parametrize("call", [public, raw])
@pytest.mark.parametrize("name", [n for n in GOOD if n not in ("hadamard", *NO_FLOATS)])
def test_tangents_are_refused(name, call):
    """Of every floating-point input, under no_grad as well; nothing has been written by then."""
    text = f"turboquant::{name} takes no forward-mode tangent: detach its inputs"
    good = dict(GOOD[name])
    if name in READ_NO_STEPS:
        good["tables"] = good["tables"]._replace(key_steps=None, value_steps=None)  # unused
    inputs = [t for t in tensors(good) if t.is_floating_point()]
    before = [t.clone() for t in tensors(GOOD[name])]
    for t in inputs:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(t, torch.ones_like(t))
            arguments = {key: _replace_in(value, t, dual) for key, value in GOOD[name].items()}
            with pytest.raises(RuntimeError, match=re.escape(text)):
                call(name, arguments)
            with torch.no_grad(), pytest.raises(RuntimeError, match=re.escape(text)):
                call(name, arguments)
    for t, old in zip(tensors(GOOD[name]), before, strict=True):
        assert_same_bytes(t, old)
    assert inputs
    with forward_ad.dual_level():
        call(name, GOOD[name])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_tangents_are_refused_inside_transforms():
    """Of a level that is not the innermost, too; tensors without a tangent are taken."""
    x, t = floats(3, D), floats(2, 3, D)[0]

    def scale(x):
        return tt.encode(x, SIGNS, LEVELS, STEPS, 4)[1].float().sum()

    def inner(x, y):
        return func.jvp(lambda z: z.sum() * scale(x), (y,), (t,))[1]

    refused = pytest.raises(RuntimeError, match="turboquant::encode takes no forward-mode tangent")
    for call in (
        lambda: func.jvp(scale, (x,), (t,)),
        lambda: func.jacfwd(scale)(x),
        lambda: func.linearize(scale, x),
        lambda: func.vmap(lambda x, t: func.jvp(scale, (x,), (t,)))(x, t),
        lambda: func.jvp(lambda x: inner(x, x), (x,), (t,)),
        lambda: func.jvp(lambda x: func.grad(lambda z: z.sum() * scale(x))(t), (x,), (t,)),
    ):
        with refused:
            call()
    with pytest.raises(RuntimeError, match="turboquant::encode takes no gradient"):
        func.grad(lambda x: inner(x, x))(x)
    inner(x, t)
    func.jvp(lambda x: x.sum() * scale(x.detach()), (x,), (t,))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_derivatives_are_refused_inside_transforms_by_the_ops_of_a_step():
    """They have no kernel at the Autograd key, and their compiled kernel sees no levels."""
    good = GOOD["paged_attention"]
    q, t = good["q"], torch.ones_like(good["q"])

    def out(q):
        return raw("paged_attention", {**good, "q": q})[0].float().sum()

    def stored(k):
        raw("cache_store", {**GOOD["cache_store"], "k": k})
        return k.sum()

    k = GOOD["cache_store"]["k"]
    for name, call in (
        ("paged_attention takes no gradient", lambda: func.grad(out)(q.float())),
        ("paged_attention takes no gradient", lambda: func.jacrev(out)(q.float())),
        ("paged_attention takes no forward-mode", lambda: func.jvp(out, (q,), (t,))),
        ("paged_attention takes no forward-mode", lambda: func.linearize(out, q)),
        ("cache_store takes no gradient", lambda: func.grad(stored)(k)),
        ("cache_store takes no forward-mode", lambda: func.jvp(stored, (k,), (k,))),
    ):
        with pytest.raises(RuntimeError, match=f"turboquant::{name}"):
            call()
    func.jvp(lambda q: q.float().sum() * out(q.detach()), (q,), (t,))
    batched = func.vmap(lambda q: raw("paged_attention", {**good, "q": q})[0])(torch.stack([q, t]))
    for one, alone in zip(batched, (q, t), strict=True):
        assert_same_bytes(one, raw("paged_attention", {**good, "q": alone})[0])


def test_gradients_of_lists_are_refused():
    x = floats(1, 2, 5, 16)
    needs = [x, x.clone().requires_grad_()]
    energy, partners = floats(2, 16).requires_grad_(), torch.arange(16)
    for name, call in (
        ("query_energy", lambda: tt.query_energy(needs, 2)),
        ("learn_center", lambda: tt.learn_center(needs)),
        (
            "learn_center",
            lambda: tt.learn_center([x], [energy], partners),
        ),
    ):
        with pytest.raises(RuntimeError, match=f"turboquant::{name} takes no gradient"):
            call()
        with torch.no_grad():
            call()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode tangent"):
        tt.query_energy([x, forward_ad.make_dual(x, x)], 2)


def test_the_transform_has_no_gradient_for_its_signs():
    with pytest.raises(RuntimeError, match="gradient for x only: detach the signs"):
        tt.hadamard(floats(2, D), SIGNS.clone().requires_grad_())
