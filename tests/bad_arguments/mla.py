"""Good calls of mla, and what spoils them."""

import math

import torch

import torch_turboquant as tt
from tests.bad_arguments.common import (
    DTYPE,
    ONE_DEVICE,
    SAME,
    SKIP,
    STRIDE,
    Bad,
    elsewhere,
    floats,
    gaps,
)
from tests.helpers import int32

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
