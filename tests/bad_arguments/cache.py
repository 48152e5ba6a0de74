"""Good calls of cache and move, and what spoils them; what spoils all calls with a cache."""

import torch

import torch_turboquant as tt
from tests.bad_arguments.common import (
    DTYPE,
    LEVELS,
    ONE_DEVICE,
    SAME,
    SIGNS,
    SKIP,
    STEPS,
    STRIDE,
    Bad,
    D,
    elsewhere,
    floats,
    gaps,
    heads_apart,
)
from tests.helpers import int32, paged

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
