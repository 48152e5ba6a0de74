"""The codec on a GPU: bench_codec."""

from __future__ import annotations

from common import markdown

from generator.results import h200_rows

CODEC = {
    "`hadamard` d = 64 / 128 / 256": [f"hadamard d={d} bf16" for d in (64, 128, 256)],
    "`pack` 3 / 4 / 8 bit": [f"pack {bits} bit" for bits in (3, 4, 8)],
    "`unpack` 3 / 4 / 8 bit": [f"unpack {bits} bit" for bits in (3, 4, 8)],
    "`encode` 4 bit, 1 / 8 candidates": ["encode 4 bit S=1", "encode 4 bit S=8"],
    "`decode` 4 / 3 bit": ["decode 4 bit", "decode 3 bit"],
    "PyTorch, 1 byte to 4": ["expand 1:4"],
    "`qjl_sketch` structured": ["qjl_sketch structured"],
    "`qjl_sketch` d = 80 / 224 / 384 / 1,024": [
        f"qjl_sketch structured d={d}" for d in (80, 224, 384, 1024)
    ],
    "`qjl_sketch` with a matrix, d = 128 / 128 in float32 / 1,536": [
        f"qjl_sketch dense {name}" for name in ("128", "128 float32", "1536")
    ],
    "`score` 4 bit / with a sketch / `qjl_score`, 131,072 keys, of a sum's speed": [
        "score 4 bit 131072 keys",
        "score 4 bit + sketch 131072 keys",
        "qjl_score 131072 keys",
    ],
    "`cache_store` k4v4, 1 / 8 candidates": ["cache_store k4v4 S=1", "cache_store k4v4 S=8"],
    "`cache_store` k3v3, 1 / 8": ["cache_store k3v3 S=1", "cache_store k3v3 S=8"],
    "`cache_store` k5v4u, 1 / 8": ["cache_store k5v4u S=1", "cache_store k5v4u S=8"],
    "`cache_load` k4v4 / k3v3 / k8v8": [f"cache_load {name}" for name in ("k4v4", "k3v3", "k8v8")],
    "`mla_store` k4u / k5u / k8": [f"mla_store {name}" for name in ("k4u", "k5u", "k8")],
    "`mla_load` k4u / k5u / k8": [f"mla_load {name}" for name in ("k4u", "k5u", "k8")],
}


def codec_table() -> str:
    found = {row["row"]: row for row in h200_rows("h200_codec")}
    lines = []
    for label, names in CODEC.items():
        some = [found[name] for name in names]
        lines.append(
            [
                label,
                " / ".join(f"{1000 * row['ms']:.0f}" for row in some),
                " / ".join(f"{row['of']:.2f}" for row in some),
            ]
        )
    return markdown(["op", "us", "of a copy's speed"], lines)
