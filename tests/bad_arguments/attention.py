"""Good calls of attention and mass, and what spoils them."""

import math

import torch

from tests.bad_arguments.cache import (
    BATCH_BAD,
    CACHE,
    CACHE_BAD,
    CONFIG,
    SIGNS_AND_CENTER_BAD,
    SLOTS,
    TABLE,
    TABLE_BAD,
    TABLES,
    TAIL,
    TAIL_BAD,
    table_with,
    tables,
    tail,
)
from tests.bad_arguments.common import (
    DTYPE,
    ONE_DEVICE,
    SKIP,
    STRIDE,
    Bad,
    D,
    column,
    elsewhere,
    floats,
    gaps,
)
from tests.helpers import int32

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
    Bad(
        {"out_a": floats(3, 4, 0), "out_b": floats(3, 4, 0)},
        ValueError,
        "out_a has shape [3, 4, 0], expected [..., d] with d >= 1",
    ),
    Bad({"lse_a": floats(3)}, ValueError, "lse_a has shape [3]"),
    Bad({"lse_b": floats(3, 4, 1)}, ValueError, "lse_b has shape [3, 4, 1]"),
    Bad({"lse_b": floats(3, 4).half()}, TypeError, "lse_b has dtype float16"),
    Bad({"out_a": column(floats(3, 4, D))}, ValueError, "out_a must be contiguous"),
    Bad({"out_b": column(floats(3, 4, D))}, ValueError, "out_b must be contiguous"),
    Bad({"lse_a": gaps(floats(3, 4))}, ValueError, "lse_a must be contiguous"),
    Bad({"lse_b": elsewhere(3, 4)}, ValueError, ONE_DEVICE),
]
