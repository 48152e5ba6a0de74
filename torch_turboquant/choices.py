"""Which CUDA kernel takes a call of an op, and why.

Most ops have several CUDA kernels. csrc/choices has one function per op that knows all conditions;
the launch of the op asks it, and so does kernel_choice, about any shape on any GPU. That function
is in the CPU library: the answer needs neither a GPU nor the CUDA library.

A function below describes the calls of one op by a few sizes. It stands for a call with new,
contiguous tensors and returns the facts that csrc/cpu/common/choices.cpp reads, in its order.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torch_turboquant._checks import CODEC_BITS, check_whole
from torch_turboquant._library import choose_kernel, device_facts
from torch_turboquant.config import GRIDS, MAX_SEARCH, CacheConfig, preset
from torch_turboquant.format import MAX_VECTOR_DIM, valid_vector_dim
from torch_turboquant.latent import LatentConfig, latent_preset_of


class KernelChoice(NamedTuple):
    """The name of a CUDA kernel, and the condition that decided."""

    kernel: str
    reason: str


class Gpu(NamedTuple):
    """DeviceFacts of csrc/choices/device.h: of an older GPU where the code was compiled for one."""

    major: int
    minor: int
    """Compute capability."""
    multiprocessors: int
    shared_per_block: int
    """Bytes of shared memory that a kernel can opt in to."""
    shared_per_multiprocessor: int
    warpgroup_products: bool = False
    """The code has the tensor-core instructions of compute capability 9.0 (architecture 9.0a)."""


_KIB = 1024
# From the CUDA programming guide (compute capabilities) and the makers' data sheets; H100 and H200
# with code for 9.0a.
GPUS = {
    "T4": Gpu(7, 5, 40, 64 * _KIB, 64 * _KIB),
    "A100": Gpu(8, 0, 108, 163 * _KIB, 164 * _KIB),
    "L4": Gpu(8, 9, 58, 99 * _KIB, 100 * _KIB),
    "RTX 4090": Gpu(8, 9, 128, 99 * _KIB, 100 * _KIB),
    "H100": Gpu(9, 0, 132, 227 * _KIB, 228 * _KIB, warpgroup_products=True),
    "H200": Gpu(9, 0, 132, 227 * _KIB, 228 * _KIB, warpgroup_products=True),
    "B200": Gpu(10, 0, 148, 227 * _KIB, 228 * _KIB),
    "RTX 5090": Gpu(12, 0, 170, 99 * _KIB, 100 * _KIB),
}

# The numbers of csrc/dtype.h.
_DTYPES = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}
_DTYPE_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
# No call has more; within them the C++ side computes without overflow.
_MOST_VECTORS, _MOST_HEADS, _MOST_SKETCH_BITS = 1 << 40, 65535, 1 << 16
_MOST_EXPERTS = 4096
_MOST_QUERIES = 2**31 - 1


def _size(name: str, value: int, most: int = _MOST_VECTORS, least: int = 1) -> int:
    check_whole(**{name: value})
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}, supported: {least} to {most}")
    return value


def _vector_dim(head_dim: int) -> int:
    check_whole(head_dim=head_dim)
    if not valid_vector_dim(head_dim):
        raise ValueError(
            f"head_dim is {head_dim}, supported: m * 2^k up to {MAX_VECTOR_DIM} with m one of "
            f"1, 3, 5, 7, 9 and k >= 1"
        )
    return head_dim


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = getattr(torch, dtype, None) if dtype in _DTYPE_NAMES else dtype
    if found not in _DTYPES:
        raise ValueError(f"dtype is {dtype}, supported: {', '.join(_DTYPE_NAMES)}")
    return found


def _codes(bits: int, grid: str | None) -> list[int]:
    """Bits of a vector's codes, and whether their grid is uniform (None: as in CacheConfig)."""
    check_whole(bits=bits)
    if bits not in CODEC_BITS:
        raise ValueError(f"bits is {bits}, supported: {', '.join(map(str, CODEC_BITS))}")
    grids = {1: ("lloyd",), 8: ("uniform",)}.get(bits, GRIDS)
    if grid is not None and grid not in grids:
        raise ValueError(f"grid at {bits} bits is {grid!r}, supported: {', '.join(grids)}")
    return [bits, int((grid or grids[0]) == "uniform")]


def _config(
    head_dim: int,
    name: str | None,
    bits: tuple[int | None, int | None],
    grids: tuple[str | None, str | None] = (None, None),
    **others: Any,
) -> CacheConfig:
    """Of a preset, or of bits and grids of keys and values."""
    _vector_dim(head_dim)
    if name is not None:
        if any(given is not None for given in (*bits, *grids)):
            raise ValueError("a preset has its bits and grids: give either, not both")
        return preset(name, head_dim, **others)
    if bits[0] is None or bits[1] is None:
        raise ValueError("a cache must have a preset, or key_bits and value_bits, got neither")
    return CacheConfig(head_dim, bits[0], bits[1], *grids, **others)


def _source(bits: int, search: int, token_bytes: int, head_bytes: int) -> list[int]:
    return [bits, _size("search", search, MAX_SEARCH), token_bytes, head_bytes]


def _paged_attention(
    *,
    head_dim: int,
    q_heads: int,
    kv_heads: int,
    max_q_len: int = 1,
    seqs: int = 1,
    tokens: int | None = None,
    max_seq_len: int | None = None,
    preset: str | None = None,
    key_bits: int | None = None,
    value_bits: int | None = None,
    key_grid: str | None = None,
    value_grid: str | None = None,
    dtype: torch.dtype | str = torch.bfloat16,
    tail: bool = False,
) -> list[int]:
    c = _config(head_dim, preset, (key_bits, value_bits), (key_grid, value_grid))
    heads = _size("kv_heads", kv_heads, _MOST_HEADS)
    group, rest = divmod(_size("q_heads", q_heads, _MOST_HEADS), heads)
    if rest:
        raise ValueError(f"q_heads is {q_heads}, supported: multiples of kv_heads ({kv_heads})")
    most = _MOST_QUERIES
    batch = [_size("max_q_len", max_q_len, most), _size("seqs", seqs, most)]
    all_tokens = _size("tokens", batch[0] * batch[1] if tokens is None else tokens, most)
    batch[0] = min(batch[0], all_tokens)
    keys, values = _codes(c.key_bits, c.key_grid), _codes(c.value_bits, c.value_grid)
    room = most if max_seq_len is None else _size("max_seq_len", max_seq_len, most)
    of_queries = [heads, group, *batch, all_tokens, room, _DTYPES[_dtype(dtype)], int(tail)]
    return [head_dim, *keys, *values, *of_queries]


def _mla_attention(
    *,
    latent_dim: int = 512,
    q_heads: int = 16,
    max_q_len: int = 1,
    preset: str | None = None,
    bits: int | None = None,
    grid: str | None = None,
    dtype: torch.dtype | str = torch.bfloat16,
    rope_dtype: torch.dtype | str | None = None,
) -> list[int]:
    c = _latent_config(latent_dim, preset, bits, grid)
    queries = _dtype(dtype)
    half = torch.float16 if queries == torch.float16 else torch.bfloat16
    ropes = half if rope_dtype is None else _dtype(rope_dtype)
    rows = _size("q_heads", q_heads, _MOST_HEADS) * _size("max_q_len", max_q_len, _MOST_QUERIES)
    types = [_DTYPES[queries], _DTYPES[ropes]]
    return [latent_dim, *_codes(c.bits, c.grid), *types, min(rows, _MOST_QUERIES)]


def _mla_store(
    *,
    tokens: int,
    latent_dim: int = 512,
    preset: str | None = None,
    bits: int | None = None,
    search: int = 8,
    dtype: torch.dtype | str = torch.bfloat16,
    transform: bool = True,
    rotated: bool = False,
) -> list[int]:
    c = _latent_config(latent_dim, preset, bits, None)
    book = [c.bits, _size("search", search, MAX_SEARCH)]
    kinds = [_DTYPES[_dtype(dtype)], int(transform), int(rotated)]
    return [latent_dim, *book, *kinds, _size("tokens", tokens)]


def _latent_config(
    latent_dim: int, preset: str | None, bits: int | None, grid: str | None
) -> LatentConfig:
    """Of a preset, or of bits and a grid."""
    if preset is None and bits is None:
        raise ValueError("a cache must have a preset, or bits, got neither")
    if preset is not None and (bits is not None or grid is not None):
        raise ValueError("a preset has its bits and grid: give either, not both")
    if preset is not None:
        return latent_preset_of(preset, latent_dim)
    return LatentConfig(latent_dim, 64, bits or 0, grid)


def _cache_store(
    *,
    head_dim: int,
    tokens: int,
    kv_heads: int,
    preset: str | None = None,
    key_bits: int | None = None,
    value_bits: int | None = None,
    search: int = 8,
    page_size: int = 32,
    dtype: torch.dtype | str = torch.bfloat16,
    tail: bool = False,
) -> list[int]:
    c = _config(head_dim, preset, (key_bits, value_bits), page_size=page_size, search=search)
    element, heads = _dtype(dtype), _size("kv_heads", kv_heads, _MOST_HEADS)
    head_bytes = head_dim * element.itemsize
    strides = heads * head_bytes, head_bytes
    sources = _source(c.key_bits, search, *strides) + _source(c.value_bits, search, *strides)
    pages = -(-_size("tokens", tokens) // page_size)
    seqs = [1, 1]  # as if all tokens belonged to one
    call = [head_dim, _DTYPES[element], tokens, heads]
    return [*call, *sources, pages, c.record.tile_bytes, int(tail), 1, *seqs]


def _cache_load(
    *,
    head_dim: int,
    seqs: int,
    max_seq_len: int,
    kv_heads: int,
    preset: str | None = None,
    key_bits: int | None = None,
    value_bits: int | None = None,
    dtype: torch.dtype | str = torch.bfloat16,
) -> list[int]:
    _config(head_dim, preset, (key_bits, value_bits))
    most = 2**20
    sizes = [_size("seqs", seqs, most), _size("max_seq_len", max_seq_len, most)]
    heads = _size("kv_heads", kv_heads, _MOST_HEADS)
    return [head_dim, _DTYPES[_dtype(dtype)], *sizes, heads]


def _encode(
    *,
    head_dim: int,
    vectors: int,
    bits: int,
    search: int = 8,
    dtype: torch.dtype | str = torch.bfloat16,
) -> list[int]:
    element = _dtype(dtype)
    source = _source(_codes(bits, None)[0], search, _vector_dim(head_dim) * element.itemsize, 0)
    return [head_dim, _DTYPES[element], _size("vectors", vectors), 1, *source]


def _decode(*, head_dim: int, vectors: int, dtype: torch.dtype | str = torch.bfloat16) -> list[int]:
    return [_vector_dim(head_dim), _DTYPES[_dtype(dtype)], _size("vectors", vectors), 1]


def _score(
    *,
    head_dim: int,
    keys: int,
    bits: int,
    grid: str | None = None,
    queries: int = 1,
    batch: int = 1,
    sketch_bits: int = 0,
    dense: bool = False,
) -> list[int]:
    codes = _codes(bits, grid)
    return _score_facts(codes, head_dim, keys, queries, batch, sketch_bits, dense)


def _qjl_score(
    *,
    head_dim: int,
    keys: int,
    queries: int = 1,
    batch: int = 1,
    sketch_bits: int | None = None,
    dense: bool = False,
) -> list[int]:
    bits = head_dim if sketch_bits is None else _size("sketch_bits", sketch_bits)
    return _score_facts([], head_dim, keys, queries, batch, bits, dense)


def _score_facts(
    codes: list[int], head_dim: int, keys: int, queries: int, batch: int, m: int, dense: bool
) -> list[int]:
    d = _vector_dim(head_dim)
    _size("sketch_bits", m, _MOST_SKETCH_BITS, least=0)
    kinds = [int(bool(codes)), int(m > 0), int(dense)]
    sizes = [_size("batch", batch), _size("queries", queries), _size("keys", keys)]
    # A group of 32 channels has whole words at every width; rows of other sizes do not.
    whole_words = (not codes or d % 32 == 0) and m % 32 == 0
    return [*kinds, *(codes or [1, 0]), m, d, *sizes, int(whole_words), 1]


def _qjl_sketch(
    *,
    head_dim: int,
    vectors: int,
    dense: bool = False,
    dtype: torch.dtype | str = torch.bfloat16,
) -> list[int]:
    number = _DTYPES[_dtype(dtype)]
    return [int(dense), _vector_dim(head_dim), _size("vectors", vectors), number]


def _linear_packed(
    *, tokens: int, n: int, k: int, dtype: torch.dtype | str = torch.bfloat16
) -> list[int]:
    return [_size("tokens", tokens), _size("n", n), _size("k", k), _DTYPES[_dtype(dtype)]]


def _linear_experts(
    *,
    tokens: int,
    choices: int,
    experts: int,
    k: int,
    dtype: torch.dtype | str = torch.bfloat16,
    graph: bool = False,
) -> list[int]:
    pairs = _size("tokens times choices", _size("tokens", tokens) * _size("choices", choices))
    experts = _size("experts", experts, _MOST_EXPERTS)
    return [pairs, experts, _size("k", k), _DTYPES[_dtype(dtype)], int(graph)]


_OPS: dict[str, Callable[..., list[int]]] = {
    "paged_attention": _paged_attention,
    "mla_attention": _mla_attention,
    "mla_store": _mla_store,
    "cache_store": _cache_store,
    "cache_load": _cache_load,
    "encode": _encode,
    "decode": _decode,
    "score": _score,
    "qjl_score": _qjl_score,
    "qjl_sketch": _qjl_sketch,
    "linear_packed": _linear_packed,
    "linear_experts": _linear_experts,
}
OPS = tuple(_OPS)


def _gpu(device: str | None) -> Gpu:
    if device in GPUS:
        return GPUS[device]
    names = ", ".join(GPUS)
    if device is not None:
        raise ValueError(
            f"device is {device!r}, supported: {names}; None is the current CUDA device"
        )
    if not torch.cuda.is_available():
        raise ValueError(f"device is None, but there is no CUDA device, supported: {names}")
    index = torch.cuda.current_device()
    try:
        facts = device_facts(index)
    except RuntimeError as error:
        raise ValueError(f"device is None, but {error}, supported: {names}") from error
    if facts is not None:
        return Gpu._make((*facts[:-1], bool(facts[-1])))
    found = torch.cuda.get_device_properties(index)
    return Gpu(
        found.major,
        found.minor,
        found.multi_processor_count,
        found.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        found.shared_memory_per_multiprocessor,
        warpgroup_products=(found.major, found.minor) == (9, 0),
    )


def kernel_choice(op: str, *, device: str | None = None, **shape: Any) -> KernelChoice:
    """The CUDA kernel that would take a call of an op, and the condition that decided.

    The call is taken to have new, contiguous tensors. What describes it depends on the op:

    ===============  ===============================================================================
    paged_attention  head_dim, q_heads, kv_heads, a cache; max_q_len, seqs, tokens, max_seq_len,
                     key_grid, value_grid, dtype, tail
    mla_attention    ; preset, bits, grid, latent_dim, q_heads, max_q_len, dtype, rope_dtype
    mla_store        tokens; preset, bits, latent_dim, search, dtype, transform, rotated
    cache_store      head_dim, tokens, kv_heads, a cache; search, page_size, dtype, tail
    cache_load       head_dim, seqs, max_seq_len, kv_heads, a cache; dtype
    encode           head_dim, vectors, bits; search, dtype
    decode           head_dim, vectors; dtype
    score            head_dim, keys, bits; grid, queries, batch, sketch_bits, dense
    qjl_score        head_dim, keys; queries, batch, sketch_bits, dense
    qjl_sketch       head_dim, vectors; dense, dtype
    linear_packed    tokens, n, k; dtype
    linear_experts   tokens, choices, experts, k; dtype, graph
    ===============  ===============================================================================

    What stands after a semicolon has a default. "A cache" is a preset, or key_bits and value_bits;
    mla_attention and mla_store must have a preset or bits.

    Args:
        op: one of the names above.
        device: the name of a GPU, "A100", "B200", "H100", "H200", "L4", "RTX 4090", "RTX 5090" or
            "T4"; None: the current CUDA device.
        shape: the sizes above; dtype is a torch.dtype or its name, bfloat16 if it is not given;
            tail says whether the call has exact keys (a tail, or k_new), dense whether the
            projection of a sketch is a matrix. In paged_attention tokens counts the queries of all
            sequences; if it is not given, each of them has max_q_len. There, max_seq_len is what
            block_table has pages for; if it is not given, sequences may be long.

    Raises:
        ValueError: an op, device, option or size that does not exist; the text names those that do.
    """
    if op not in _OPS:
        raise ValueError(f"op is {op!r}, supported: {', '.join(OPS)}")
    parameters = inspect.signature(_OPS[op]).parameters
    unknown = [name for name in shape if name not in parameters]
    if unknown:
        raise ValueError(f"{op} has no {', '.join(unknown)}, supported: {', '.join(parameters)}")
    needed = [name for name, p in parameters.items() if p.default is p.empty]
    if not set(needed) <= set(shape):
        raise ValueError(f"{op} must have {', '.join(needed)}, got {', '.join(shape) or 'none'}")
    facts = [int(fact) for fact in _OPS[op](**shape)]  # sizes may be integers of NumPy
    return KernelChoice(*choose_kernel("score" if op == "qjl_score" else op, facts, _gpu(device)))


def _parameters() -> dict[str, list[tuple[str, inspect.Parameter]]]:
    """What describes a call: option -> the ops that have it, and how."""
    found: dict[str, list[tuple[str, inspect.Parameter]]] = {}
    for op, function in _OPS.items():
        for name, parameter in inspect.signature(function).parameters.items():
            found.setdefault(name, []).append((op, parameter))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `torch_turboquant info` that describe a call."""
    group = parser.add_argument_group(
        "which CUDA kernel takes a call", "the options that describe it, and the ops that have them"
    )
    group.add_argument("--op", choices=OPS, help="print the kernel that takes a call of this op")
    group.add_argument(
        "--device", choices=GPUS, help="on this GPU; without it on the current CUDA device"
    )
    for name, uses in _parameters().items():
        kind = uses[0][1].annotation  # text, such as "int | None"
        how: dict[str, Any] = {"type": str, "metavar": "NAME"}
        if kind.startswith("int"):
            how = {"type": int, "metavar": "N"}
        if kind == "bool":
            how = {"action": "store_true"}
        ops = ", ".join(op for op, _ in uses)
        option = "--" + name.replace("_", "-")
        group.add_argument(option, **how, default=argparse.SUPPRESS, help=ops)


def asked_choice(args: argparse.Namespace) -> KernelChoice | None:
    """What the options of add_arguments ask for; None if they name no op.

    Raises:
        ValueError: as kernel_choice, or a shape without an op.
    """
    shape = {name: value for name, value in vars(args).items() if name in _parameters()}
    if args.op is None:
        if shape or args.device:
            raise ValueError(f"a shape or --device needs --op, supported: {', '.join(OPS)}")
        return None
    return kernel_choice(args.op, device=args.device, **shape)
