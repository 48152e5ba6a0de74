"""Speed of everything but attention, against a copy of the same number of bytes.

Memory bounds every op here, so the yardstick is a device-to-device copy that reads and writes as
many bytes in total ("copy"). For scores, which write next to nothing, it is a sum that reads as
many bytes ("read"). "of" is the yardstick's time over the op's: 1.0 is the speed of memory. "eager"
is the same work in plain PyTorch, without the exact rounding of the format, and "compiled" the same
through torch.compile. Ops, yardsticks and PyTorch code take turns on two sets of random data.
Before each call, reading 512 MB flushes the device's cache, and the device sleeps until everything
is queued. Times are medians between events around the call.

The last rows are one decode step: cache_store of 64 tokens, or mla_store of 1 or 64, in a CUDA
graph, compared with an empty kernel, in a graph of one node (the cost of a launch) and per node of
a graph of 100.

    python benchmarks/bench_codec.py                  everything, into results/h200_codec.json
    python benchmarks/bench_codec.py --only score     rows whose name matches, merged into the file
    python benchmarks/bench_codec.py --device cpu     small sizes, printed only (see bench_cpu.py)
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import common
import torch
from torch import Tensor

import torch_turboquant as tt
from torch_turboquant.ops.codec import level_table_reference
from torch_turboquant.signs import SignKind, random_signs, rotation_matrix

D = 128
HEADS = 8
LATENT, ROPE = 512, 64


@dataclass
class Work:
    """One row of the table, on one set of data."""

    op: Callable[[], object]
    bytes: int
    """Bytes that every implementation must read or write."""
    eager: Callable[[], object] | None = None
    yardstick: str = "copy"


@dataclass
class Row:
    name: str
    make: Callable[[], Work]
    """Makes the calls to measure; called once per set of data."""
    notes: dict[str, object] = field(default_factory=dict)


# ---- eager: the same in plain PyTorch


def rotation(d: int, signs: Tensor, dtype: torch.dtype) -> Tensor:
    """The transform as a matrix, for x @ matrix."""
    matrix = torch.from_numpy(rotation_matrix(d, signs.cpu()).T.copy())
    return matrix.to(signs.device, dtype)


def pack_eager(codes: Tensor, bits: int) -> Tensor:
    """Packs codes of widths that divide a byte, and eight codes of others at a time."""
    if 8 % bits == 0:
        per = 8 // bits
        parts = codes.unflatten(-1, (-1, per))
        out = parts[..., 0]
        for i in range(1, per):
            out = out | parts[..., i] << (bits * i)
        return out
    groups = codes.unflatten(-1, (-1, 8)).long()
    word = (groups << (bits * torch.arange(8, device=codes.device))).sum(-1, keepdim=True)
    return (word >> (8 * torch.arange(bits, device=codes.device)) & 255).to(torch.uint8).flatten(-2)


def unpack_eager(packed: Tensor, bits: int) -> Tensor:
    if 8 % bits == 0:
        parts = [packed >> (bits * i) & (2**bits - 1) for i in range(8 // bits)]
        return torch.stack(parts, -1).flatten(-2)
    groups = packed.unflatten(-1, (-1, bits)).long()
    word = (groups << (8 * torch.arange(bits, device=packed.device))).sum(-1, keepdim=True)
    codes = word >> (bits * torch.arange(8, device=packed.device)) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(-2)


@dataclass
class Codec:
    """The tables of one width, for encoding and decoding."""

    bits: int
    grid: str
    search: int
    device: torch.device
    d: int = D

    def __post_init__(self) -> None:
        book = tt.Codebook.make(self.d, self.bits, self.grid)
        self.signs = random_signs(self.d, 0).to(self.device)
        self.levels = book.levels_tensor(self.device)
        self.steps = book.steps_tensor(self.search, self.device)
        self.table = level_table_reference(self.levels, self.bits).to(self.device, torch.float32)
        self.matrix = rotation(self.d, self.signs, torch.float32)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return tt.encode(x, self.signs, self.levels, self.steps, self.bits)

    def decode(self, packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return tt.decode(packed, scale, self.signs, self.levels, self.bits, None, dtype)

    def encode_eager(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.float() @ self.matrix
        length = y.norm(dim=-1, keepdim=True)
        u = y * (self.d**0.5 / length)
        best = None
        for step in self.steps:
            codes = torch.bucketize(u, (self.table[1:] + self.table[:-1]) * (step / 2), right=True)
            levels = self.table[codes]
            a, b = (u * levels).sum(-1), levels.square().sum(-1)
            if best is None:
                best = [a * a / b, codes, a / b]
                continue
            better = a * a / b > best[0]
            best = [
                torch.where(better, a * a / b, best[0]),
                torch.where(better[..., None], codes, best[1]),
                torch.where(better, a / b, best[2]),
            ]
        scale = (best[2] * length[..., 0] * (32 / self.d**0.5)).half()
        return pack_eager(best[1].to(torch.uint8), self.bits), scale

    def decode_eager(self, packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        if self.bits == 8:  # a code is its own level, a signed byte
            levels = packed.view(torch.int8).float()
        else:
            levels = self.table[unpack_eager(packed, self.bits).int()]
        return (levels * (scale.float() / 32)[..., None] @ self.matrix.T).to(dtype)


# ---- the rows


class Rows:
    """All rows for one device, whose sizes are divided by `scale` (on a CPU)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scale = 1 if device.type == "cuda" else 64
        self.vectors = 65536 * HEADS // self.scale

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=self.device)

    def all(self) -> Iterator[Row]:
        for d in (64, 128, 256):
            yield Row(f"hadamard d={d} bf16", lambda d=d: self.hadamard(d))
        for bits in (3, 4, 8):
            yield Row(f"pack {bits} bit", lambda b=bits: self.pack(b))
            yield Row(f"unpack {bits} bit", lambda b=bits: self.unpack(b))
        for bits, search in ((4, 1), (4, 8), (3, 1), (8, 1), (8, 8)):
            yield Row(f"encode {bits} bit S={search}", lambda b=bits, s=search: self.encode(b, s))
        for bits in (4, 3):
            yield Row(f"decode {bits} bit", lambda b=bits: self.decode(b))
        yield Row("expand 1:4", self.expand)
        for group, bits in ((32, 4), (64, 2)):
            yield Row(
                f"group_encode {group} x {bits} bit", lambda g=group, b=bits: self.group(g, b, 0)
            )
            yield Row(
                f"group_decode {group} x {bits} bit", lambda g=group, b=bits: self.group(g, b, 1)
            )
        yield Row("qjl_sketch structured", lambda: self.sketch(False))
        yield Row("qjl_sketch dense 128", lambda: self.sketch(True))
        yield Row("qjl_sketch dense 128 float32", lambda: self.sketch(True, dtype=torch.float32))
        yield Row("qjl_sketch dense 1536", lambda: self.sketch(True, 1536))
        for d in (80, 224, 384, 1024):
            yield Row(f"qjl_sketch structured d={d}", lambda d=d: self.sketch(False, d))
        for keys in (128, 4096, 32768, 131072):
            notes: dict[str, object] = {"keys": keys}
            if keys == 4096:
                notes["published_ms"] = {"a Metal kernel, 4 bits": 0.57}
            if keys > 4096 and self.scale > 1:
                continue
            yield Row(f"qjl_score {keys} keys", lambda k=keys: self.score(k, 0, True), notes)
            yield Row(f"score 4 bit {keys} keys", lambda k=keys: self.score(k, 4, False), notes)
            yield Row(
                f"score 4 bit + sketch {keys} keys", lambda k=keys: self.score(k, 4, True), notes
            )
        keys = 131072 // (self.scale // 2 or 1)
        for bits, grid in ((3, "lloyd"), (2, "lloyd"), (5, "uniform"), (8, "uniform")):
            make = lambda b=bits, g=grid: self.score(keys, b, False, g)  # noqa: E731
            yield Row(f"score {bits} bit {keys} keys", make)
        yield Row(
            f"score 4 bit {keys} keys, 4 queries", lambda: self.score(keys, 4, False, queries=4)
        )
        for name in ("k4v4", "k3v3", "k5v4u", "k8v4", "k8v8"):
            for search in (1, 8):
                yield Row(
                    f"cache_store {name} S={search}", lambda n=name, s=search: self.store(n, s)
                )
        for name, search in (("k4v4", 1), ("k4v4", 8), ("k3v3", 1), ("k8v8", 8)):
            for order in ("in order", "random"):
                make = lambda n=name, s=search, o=order: self.store(n, s, o)  # noqa: E731
                yield Row(f"cache_store {name} S={search}, slots {order}", make)
        for name in ("k4v4", "k3v3", "k8v8"):
            yield Row(f"cache_load {name}", lambda n=name: self.load(n))
        for d in (80, 96, 160, 224):
            for search in (1, 8):
                make = lambda d=d, s=search: self.store("k4v4", s, d=d)  # noqa: E731
                yield Row(f"cache_store k4v4 S={search} d={d}", make)
            yield Row(f"cache_load k4v4 d={d}", lambda d=d: self.load("k4v4", d))
        for name in ("k4u", "k5u", "k8"):
            yield Row(f"mla_store {name}", lambda n=name: self.store_latents(n))
            yield Row(f"mla_load {name}", lambda n=name: self.load_latents(n))

    def hadamard(self, d: int) -> Work:
        x, signs = self.randn(self.vectors * D // d, d), random_signs(d, 0).to(self.device)
        matrix = rotation(d, signs, x.dtype)
        return Work(lambda: tt.hadamard(x, signs), 2 * x.nbytes, lambda: x @ matrix)

    def codes(self, bits: int) -> Tensor:
        shape = (self.vectors, D)
        return torch.randint(2**bits, shape, dtype=torch.uint8, device=self.device)

    def pack(self, bits: int) -> Work:
        x = self.codes(bits)
        size = x.nbytes * (8 + bits) // 8
        eager = (lambda: pack_eager(x, bits)) if bits < 8 else None
        return Work(lambda: tt.pack(x, bits), size, eager)

    def unpack(self, bits: int) -> Work:
        x = tt.pack(self.codes(bits), bits)
        size = x.nbytes * (8 + bits) // bits
        eager = (lambda: unpack_eager(x, bits)) if bits < 8 else None
        return Work(lambda: tt.unpack(x, bits, D), size, eager)

    def encode(self, bits: int, search: int) -> Work:
        grid = "uniform" if bits == 8 else "lloyd"
        c, x = Codec(bits, grid, search, self.device), self.randn(self.vectors, D)
        size = x.nbytes + self.vectors * (D * bits // 8 + 2)
        return Work(lambda: c.encode(x), size, lambda: c.encode_eager(x))

    def decode(self, bits: int) -> Work:
        c = Codec(bits, "lloyd", 1, self.device)
        packed, scale = c.encode(self.randn(self.vectors, D))
        size = packed.nbytes + scale.nbytes + self.vectors * D * 2
        return Work(
            lambda: c.decode(packed, scale, torch.bfloat16),
            size,
            lambda: c.decode_eager(packed, scale, torch.bfloat16),
        )

    def expand(self) -> Work:
        """A row without an op of ours: PyTorch writes four bytes per byte read, like decoding."""
        x = torch.randint(2**62, (self.vectors * D // 16,), device=self.device)
        out = torch.empty(len(x), 4, dtype=x.dtype, device=self.device)
        return Work(lambda: out.copy_(x[:, None].expand(-1, 4)), x.nbytes + out.nbytes)

    def group(self, group: int, bits: int, decode: int) -> Work:
        x, top = self.randn(self.vectors, D), 2**bits - 1
        packed, scale, zero = tt.group_encode(x, group, bits)
        size = x.nbytes + packed.nbytes + scale.nbytes + zero.nbytes

        def encode_eager():
            y = x.float().unflatten(-1, (-1, group))
            low, high = y.aminmax(dim=-1, keepdim=True)
            step = (high - low) / top
            codes = ((y - low) / step + 0.5).floor().clamp(0, top).to(torch.uint8)
            return pack_eager(codes.flatten(-2), bits), step[..., 0].half(), low[..., 0].half()

        def decode_eager():
            codes = unpack_eager(packed, bits).unflatten(-1, (-1, group)).float()
            return (
                (codes * scale.float()[..., None] + zero.float()[..., None]).flatten(-2).to(x.dtype)
            )

        if decode:
            op = lambda: tt.group_decode(packed, scale, zero, group, bits, D, x.dtype)  # noqa: E731
            return Work(op, size, decode_eager)
        return Work(lambda: tt.group_encode(x, group, bits), size, encode_eager)

    def projection(self, dense: bool, d: int = D) -> tuple[Tensor, Tensor]:
        """The projection as the op takes it, and as a matrix for x @ matrix."""
        if dense:
            s = tt.gaussian_projection(d, d, 1).to(self.device)
            return s, s.T.contiguous()
        s = random_signs(d, 1, kind=SignKind.SKETCH).to(self.device)
        return s, rotation(d, s, torch.float32)

    def sketch(self, dense: bool, d: int = D, dtype: torch.dtype = torch.bfloat16) -> Work:
        s, matrix = self.projection(dense, d)
        x = self.randn(self.vectors * D // d, d, dtype=dtype)

        def eager():
            y = x.float()
            return pack_eager((y @ matrix >= 0).to(torch.uint8), 1), y.norm(dim=-1)

        size = x.nbytes + len(x) * (d // 8 + 4)
        return Work(lambda: tt.qjl_sketch(x, s), size, eager)

    def score(
        self, keys: int, bits: int, sketched: bool, grid: str = "lloyd", queries: int = 1
    ) -> Work:
        q, x = self.randn(HEADS, queries, D), self.randn(HEADS, keys, D)
        size = q.nbytes + HEADS * queries * keys * 4
        s, matrix = self.projection(False)
        sign_bits = norm = None
        if sketched:
            sign_bits, norm = tt.qjl_sketch(x, s)
            size += sign_bits.nbytes + norm.nbytes

        def sketch_eager():
            signs = (unpack_eager(sign_bits, 1).to(q.dtype) * 2 - 1).transpose(-1, -2)
            factor = (torch.pi / (2 * D)) ** 0.5
            return (q @ matrix.to(q.dtype)) @ signs * (norm * factor)[..., None, :]

        if bits == 0:
            op = lambda: tt.qjl_score(q, sign_bits, norm, s)  # noqa: E731
            return Work(op, size, sketch_eager, "read")
        c = Codec(bits, grid, 1, self.device)
        packed, scale = c.encode(x)
        size += packed.nbytes + scale.nbytes
        extra = (None, sign_bits, norm, s) if sketched else ()

        def eager():
            codes = unpack_eager(packed, bits)
            rotated = (c.table[codes.int()] * (scale.float() / 32)[..., None]).to(q.dtype)
            out = (q @ c.matrix.to(q.dtype)) @ rotated.transpose(-1, -2)
            return out + sketch_eager() if sketched else out

        return Work(
            lambda: tt.score(q, packed, scale, c.signs, c.levels, bits, *extra),
            size,
            eager if bits <= 4 else None,
            "read",
        )

    def cache(self, name: str, search: int, tokens: int, order: str = "pages", d: int = D):
        """A cache that is full of these tokens, and their slots.

        order: of the pages at random, of all slots at random, or in order.
        """
        config = tt.preset(name, d, search=search, sink_tokens=0, recent_window=0)
        tables = tt.make_tables(config, 0, self.device)
        pages, slots = self.places(tokens, config.page_size, order)
        cache = tt.allocate_cache(config, len(pages), HEADS, self.device)
        return config, tables, cache, pages, slots

    def places(self, tokens: int, size: int, order: str = "pages") -> tuple[Tensor, Tensor]:
        """Pages of `size` tokens, and the slots of these tokens. order: as of `cache`."""
        count = -(-tokens // size)
        pages = torch.arange(count, device=self.device)
        if order == "pages":
            pages = torch.randperm(count, device=self.device)
        token = torch.arange(tokens, device=self.device)
        slots = pages[token // size] * size + token % size
        if order == "random":
            slots = slots[torch.randperm(tokens, device=self.device)]
        return pages, slots

    def sequences(self, pages: Tensor, tokens: int) -> tuple[Tensor, Tensor, int]:
        """The tokens as eight sequences to load: block table, lengths, and the longest one."""
        seqs = 8
        longest = tokens // seqs
        lengths = torch.full((seqs,), longest, dtype=torch.int32, device=self.device)
        return pages.view(seqs, -1).int(), lengths, longest

    def store(self, name: str, search: int, order: str = "pages", d: int = D) -> Work:
        tokens = self.vectors // HEADS
        config, tables, cache, _, slots = self.cache(name, search, tokens, order, d)
        qkv = self.randn(tokens, 2 * HEADS, d)  # k and v as slices of one projection
        k, v = qkv[:, :HEADS], qkv[:, HEADS:]
        stored = tokens * HEADS * config.bytes_per_token
        sides = [
            Codec(config.key_bits, config.key_grid, search, self.device, d),
            Codec(config.value_bits, config.value_grid, search, self.device, d),
        ]
        rows = [
            torch.zeros(tokens, HEADS, d * c.bits // 8, dtype=torch.uint8, device=self.device)
            for c in sides
        ]

        def eager():
            for x, c, row in zip((k, v), sides, rows, strict=True):
                packed, _ = c.encode_eager(x)
                row[slots] = packed

        return Work(
            lambda: tt.cache_store(k, v, cache, slots, config, tables),
            qkv.nbytes + slots.nbytes + int(stored),
            eager,
        )

    def load(self, name: str, d: int = D) -> Work:
        tokens = self.vectors // HEADS
        config, tables, cache, pages, slots = self.cache(name, 1, tokens, d=d)
        k, v = self.randn(tokens, HEADS, d), self.randn(tokens, HEADS, d)
        tt.cache_store(k, v, cache, slots, config, tables)
        table, lens, longest = self.sequences(pages, tokens)
        grid = "uniform" if config.key_bits == 8 else "lloyd"
        sides = [Codec(config.key_bits, grid, 1, self.device, d) for _ in range(2)]
        rows = [c.encode(x) for c, x in zip(sides, (k, v), strict=True)]

        def eager():
            return [
                c.decode_eager(packed[slots], scale[slots], k.dtype)
                for c, (packed, scale) in zip(sides, rows, strict=True)
            ]

        return Work(
            lambda: tt.cache_load(cache, table, lens, config, tables, longest, k.dtype),
            2 * k.nbytes + cache.nbytes,
            eager,
        )

    def latents(self, name: str, tokens: int):
        """A cache that is full of so many tokens, and what stores them: its pages, the slots of
        tokens, latents and raw channels."""
        config = tt.latent_preset(name, LATENT, ROPE, sink_tokens=0, recent_window=0)
        tables = tt.make_latent_tables(config, 0, self.device)
        pages, slots = self.places(tokens, config.page_size)
        cache = tt.allocate_latent_cache(config, len(pages), self.device)
        new = self.randn(tokens, LATENT), self.randn(tokens, ROPE)
        return config, tables, cache, pages, slots, new

    def store_latents(self, name: str) -> Work:
        tokens = self.vectors // HEADS
        config, tables, cache, _, slots, (latent, rope) = self.latents(name, tokens)
        c = Codec(config.bits, config.grid, config.search, self.device, LATENT)
        rows = torch.zeros(tokens, LATENT * c.bits // 8, dtype=torch.uint8, device=self.device)
        raw = torch.zeros_like(rope)

        def eager():
            rows[slots], raw[slots] = c.encode_eager(latent)[0], rope

        return Work(
            lambda: tt.mla_store(latent, rope, cache, slots, config, tables),
            latent.nbytes + rope.nbytes + slots.nbytes + int(tokens * config.bytes_per_token),
            eager,
        )

    def load_latents(self, name: str) -> Work:
        tokens = self.vectors // HEADS
        config, tables, cache, pages, slots, (latent, rope) = self.latents(name, tokens)
        tt.mla_store(latent, rope, cache, slots, config, tables)
        table, lens, longest = self.sequences(pages, tokens)
        return Work(
            lambda: tt.mla_load(cache, table, lens, config, tables, longest, latent.dtype),
            latent.nbytes + rope.nbytes + cache.nbytes,
        )


# ---- timing


class Timer:
    """Medians of the times of calls that take turns."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        self.flushed = torch.zeros(512 << 20 if device.type == "cuda" else 1, dtype=torch.uint8)
        self.flushed = self.flushed.to(device).view(torch.int8)

    def once(self, call: Callable[[], object]) -> Callable[[], float]:
        """Runs call. The returned function waits for its end and gives its milliseconds."""
        if self.device.type == "cpu":
            start = time.perf_counter()
            call()
            took = (time.perf_counter() - start) * 1e3
            return lambda: took
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flushed.view(torch.float32).sum()  # reading leaves nothing to be written back
        torch.cuda._sleep(1_000_000)  # about 0.5 ms: calls are queued before the first starts
        begin.record()
        call()
        end.record()

        def elapsed() -> float:
            end.synchronize()
            return begin.elapsed_time(end)

        return elapsed

    def medians(self, calls: dict[str, list[Callable[[], object]]]) -> dict[str, float]:
        """Milliseconds by name. calls: for every name one call per set of data."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for i in range(-2, self.repeats):  # two warm-ups
            for name, sets in calls.items():
                took = self.once(sets[i % len(sets)])()
                if i >= 0:
                    times[name].append(took)
        return {name: statistics.median(t) for name, t in times.items()}


def yardstick(kind: str, size: int, device: torch.device) -> Callable[[], object]:
    """A copy that reads and writes `size` bytes in total, or a sum that reads as many."""
    if kind == "copy":
        source = torch.randint(256, (size // 2,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    source = torch.randn(size // 4, device=device)
    return source.sum


def measure(row: Row, timer: Timer) -> dict[str, object]:
    sets = [row.make() for _ in range(2)]
    first = sets[0]
    calls = {"op": [w.op for w in sets]}
    for kind in dict.fromkeys(("copy", first.yardstick)):
        calls[kind] = [yardstick(kind, first.bytes, timer.device)]
    if first.eager:
        calls["eager"] = [w.eager for w in sets]
        if timer.device.type == "cuda":
            torch._dynamo.reset()
            calls["compiled"] = [torch.compile(w.eager, dynamic=False) for w in sets]
    times = timer.medians(calls)
    took, reference = times["op"], times[first.yardstick]
    return {
        "row": row.name,
        "bytes": first.bytes,
        "ms": round(took, 5),
        "tb_per_s": round(first.bytes / took / 1e9, 3),
        "yardstick": first.yardstick,
        "yardstick_ms": round(reference, 5),
        "of": round(reference / took, 3),
        "copy_ms": round(times["copy"], 5),
        "eager_ms": round(times["eager"], 5) if "eager" in times else None,
        "compiled_ms": round(times["compiled"], 5) if "compiled" in times else None,
    } | row.notes


def some_of(slots: Tensor, count: int) -> Tensor:
    return slots[torch.randperm(len(slots), device=slots.device)[:count]].contiguous()


def step_of_keys(rows: Rows, name: str, search: int) -> Callable[[], object]:
    """cache_store of 64 tokens."""
    config, tables, cache, _, slots = rows.cache(name, search, 65536)
    k, v = (rows.randn(64, 2 * HEADS, D)[:, :HEADS] for _ in range(2))
    slots = some_of(slots, 64)
    return lambda: tt.cache_store(k, v, cache, slots, config, tables)


def step_of_latents(rows: Rows, name: str, tokens: int) -> Callable[[], object]:
    """mla_store of so many tokens."""
    config, tables, cache, _, slots, new = rows.latents(name, 65536)
    slots, (latent, rope) = some_of(slots, tokens), (x[:tokens] for x in new)
    return lambda: tt.mla_store(latent, rope, cache, slots, config, tables)


def decode_steps(rows: Rows) -> Iterator[tuple[str, Callable[[], Callable[[], object]]]]:
    """The name of each row, and what makes its call."""
    for name in ("k4v4", "k3v3", "k8v4", "k8v8"):
        for search in (1, 8):
            make = partial(step_of_keys, rows, name, search)
            yield f"decode step 64 tokens {name} S={search}", make
    for name in ("k4u", "k5u"):
        for tokens in (1, 64):
            yield (
                f"decode step {tokens} latents {name}",
                partial(step_of_latents, rows, name, tokens),
            )


def decode_step(name: str, store: Callable[[], object], repeats: int) -> dict[str, object]:
    """Microseconds of one graph launch, and of one node among 100.

    Where a graph lies makes a difference of 0.2 us, so all are captured several times, by turns.
    """
    works = {"store": store, "empty": lambda: torch.cuda._sleep(0)}
    out: dict[str, object] = {"row": name}
    graphs: dict[str, tuple[list[torch.cuda.CUDAGraph], int]] = {}
    for _ in range(7):
        for kind, call in works.items():
            for nodes in (1, 100):
                call()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(nodes):
                        call()
                key = f"{kind}_us_{'launch' if nodes == 1 else 'node'}"
                graphs.setdefault(key, ([], nodes))[0].append(graph)
    times: dict[str, list[float]] = {key: [] for key in graphs}
    for i in range(-7, 10 * repeats):  # a clock of 32 ns: medians of few would differ by its steps
        for key, (copies, nodes) in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(100_000)
            begin.record()
            copies[i % len(copies)].replay()
            end.record()
            end.synchronize()
            if i >= 0:
                times[key].append(begin.elapsed_time(end) * 1e3 / nodes)
    out |= {key: round(statistics.median(t), 3) for key, t in times.items()}
    return out


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--only", help="regular expression of row names")
    options.add_argument("--repeats", type=int, default=21, help="default: %(default)s")
    arguments = options.parse_args()
    wanted = re.compile(arguments.only or "")
    device = torch.device(arguments.device)
    arguments.dry_run |= device.type != "cuda"
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True  # what eager code would choose
    rows, timer, results, names = Rows(device), Timer(device, arguments.repeats), [], []

    print(f"{common.device_name(device)}, torch {torch.__version__}")
    print(
        f"{'':38} {'MB':>8} {'ms':>9} {'TB/s':>6} {'yardstick':>15} {'of':>5} {'eager':>9} "
        f"{'compiled':>9}"
    )
    with torch.no_grad():
        for row in rows.all():
            names.append(row.name)
            if not wanted.search(row.name):
                continue
            r = measure(row, timer)
            results.append(r)
            eager, compiled = (
                "-" if r[key] is None else f"{r[key]:9.4f}" for key in ("eager_ms", "compiled_ms")
            )
            print(
                f"{row.name:38} {r['bytes'] / 1e6:8.1f} {r['ms']:9.4f} {r['tb_per_s']:6.3f} "
                f"{r['yardstick']:>5} {r['yardstick_ms']:9.4f} {r['of']:5.2f} {eager:>9} "
                f"{compiled:>9}",
                flush=True,
            )
            if device.type == "cuda":
                torch.cuda.empty_cache()
        for name, make in decode_steps(rows) if device.type == "cuda" else ():
            names.append(name)
            if wanted.search(name):
                r = decode_step(name, make(), arguments.repeats)
                results.append(r)
                print(
                    f"{r['row']:38} launch {r['store_us_launch']:.2f} us (empty kernel "
                    f"{r['empty_us_launch']:.2f}), node {r['store_us_node']:.2f} us "
                    f"({r['empty_us_node']:.2f})",
                    flush=True,
                )
    if arguments.only is None:
        common.write_rows("h200_codec", results, arguments)
    else:
        common.write_progress("h200_codec", results, "row", arguments, order=names)


if __name__ == "__main__":
    main()
