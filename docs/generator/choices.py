"""Which kernel takes a call."""

from __future__ import annotations

from typing import Any

from common import markdown

import torch_turboquant as tq

STEP = {"head_dim": 128, "q_heads": 32, "kv_heads": 8, "preset": "k5v4u"}
PAGES = {"head_dim": 128, "kv_heads": 8, "preset": "k5v4u"}
VECTORS = {"head_dim": 128, "vectors": 65536}
MATRIX = {"n": 4096, "k": 4096}
EXPERTS = {"choices": 8, "experts": 128, "k": 2048}
# (op, a usual call, what differs in this one)
CALLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("paged_attention", STEP, {}),
    ("paged_attention", STEP, {"max_q_len": 4}),
    ("paged_attention", STEP, {"max_q_len": 4, "seqs": 17}),
    ("paged_attention", STEP, {"max_q_len": 5}),
    ("paged_attention", STEP, {"max_q_len": 512, "seqs": 61, "tokens": 572}),
    ("paged_attention", STEP, {"max_q_len": 5, "head_dim": 96}),
    ("paged_attention", STEP, {"max_q_len": 5, "device": "A100"}),
    ("paged_attention", STEP, {"head_dim": 320}),
    ("paged_attention", STEP, {"dtype": "float32", "tail": True}),
    ("paged_attention", STEP, {"device": "T4"}),
    ("mla_attention", {}, {"preset": "k4u"}),
    ("mla_attention", {}, {"preset": "k4"}),
    ("mla_attention", {}, {"preset": "k4", "q_heads": 64}),
    ("mla_attention", {}, {"preset": "k4u", "device": "A100"}),
    ("mla_attention", {}, {"preset": "k4u", "dtype": "float32"}),
    ("mla_store", {"preset": "k5u"}, {"tokens": 64}),
    ("mla_store", {"preset": "k5u"}, {"tokens": 4096}),
    ("linear_packed", MATRIX, {"tokens": 16}),
    ("linear_packed", MATRIX, {"tokens": 399}),
    ("linear_packed", MATRIX, {"tokens": 400}),
    ("linear_packed", MATRIX, {"tokens": 32}),
    ("linear_packed", {}, {"tokens": 64, "n": 2048, "k": 2048}),
    ("linear_packed", MATRIX, {"tokens": 257, "dtype": "float32"}),
    ("linear_packed", MATRIX, {"tokens": 65, "device": "A100"}),
    ("linear_experts", EXPERTS, {"tokens": 128}),
    ("linear_experts", EXPERTS, {"tokens": 129}),
    ("linear_experts", EXPERTS, {"tokens": 193}),
    ("linear_experts", EXPERTS, {"tokens": 1025, "device": "A100"}),
    ("cache_store", PAGES, {"tokens": 64}),
    ("cache_store", PAGES, {"tokens": 4096}),
    ("cache_store", PAGES, {"tokens": 4096, "head_dim": 96}),
    ("cache_load", PAGES, {"seqs": 1, "max_seq_len": 4096}),
    ("cache_load", PAGES, {"seqs": 1, "max_seq_len": 4096, "head_dim": 96}),
    ("encode", VECTORS, {"bits": 4}),
    ("decode", VECTORS, {}),
    ("decode", VECTORS, {"dtype": "float32"}),
    ("score", {"head_dim": 128, "bits": 4}, {"keys": 4096}),
    ("score", {"head_dim": 128, "bits": 4}, {"keys": 4096, "queries": 2}),
    ("qjl_sketch", VECTORS, {}),
    ("qjl_sketch", VECTORS, {"head_dim": 80}),
    ("qjl_sketch", VECTORS, {"dense": True}),
]


def kernels() -> str:
    """A row per call, on an H200 unless the row names another GPU."""
    lines = []
    for op, base, changes in CALLS:
        call = {**base, **changes}
        choice = tq.kernel_choice(op, **{"device": "H200", **call})
        text = ", ".join(f"{name} {value}" for name, value in call.items() if value is not True)
        text += "".join(f", {name}" for name, value in call.items() if value is True)
        lines.append([f"`{op}`", text, f"`{choice.kernel}`", choice.reason])
    return markdown(["op", "call", "kernel", "reason"], lines)
