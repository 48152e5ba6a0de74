"""Tensors on their way: many in one transfer or allocation, at addresses that stay, into files."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_dynamo_compiling, is_exporting

_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int8", "int32", "int64", "float32")}
_ALIGNED = 256  # bytes, as an allocation of its own would be
# Before torch 2.13 is_exporting() is true in all code that torch.compile traces.
_KNOWS_EXPORTS = torch.__version__ >= (2, 13)


def put_together(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copies of the host's arrays on a device: one transfer, which waits for nothing.

    Those with the same bytes share memory, so nobody may write to them. Those of the same shape and
    type, too, are one tensor: torch.compile guards it once, whoever holds it.
    """
    if not arrays:
        return []
    contents = [x.tobytes() for x in arrays]
    places: dict[bytes, int] = {}
    host = bytearray()
    for data in contents:
        if data not in places:
            places[data] = len(host)
            host += data + bytes(_ALIGNED - len(data) % _ALIGNED)
    pinned = device.type == "cuda"
    together = torch.empty(len(host), dtype=torch.uint8, device="cpu", pin_memory=pinned)
    there = together.copy_(torch.frombuffer(host, dtype=torch.uint8)).to(device, non_blocking=True)
    kinds = [(data, x.dtype, x.shape) for x, data in zip(arrays, contents, strict=True)]
    placed = {
        kind: there[places[kind[0]] :][: len(kind[0])].view(_DTYPES[kind[1]]).view(kind[2])
        for kind in set(kinds)
    }
    return [placed[kind] for kind in kinds]


def on_host(tensor: Tensor) -> Tensor:
    """A copy on the CPU, in memory of its own."""
    return tensor.detach().to("cpu", copy=True).clone(memory_format=torch.contiguous_format)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in files, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def check_not_meta(tensor: Tensor) -> None:
    """Raises if a forward runs on the meta device."""
    if tensor.device.type == "meta":
        raise ValueError(
            "the forward runs on the meta device, where tensors have no numbers: load the model's "
            "weights first (from_pretrained, or to_empty and load_state_dict)"
        )


def check_not_exported(tensor: Tensor) -> None:
    """Raises if torch.export traces the forward of these tokens.

    Another thread may export at this time, which the forward of real tokens does not matter to.
    Before torch 2.13 an export by torch.compile's tracer (strict=True) goes unnoticed.
    """
    is_traced = is_dynamo_compiling()
    if is_traced and not _KNOWS_EXPORTS:
        return
    if is_exporting() and (is_traced or isinstance(tensor, FakeTensor)):
        raise RuntimeError(
            "torch.export cannot take a forward on a TurboQuantCache: the program would have "
            "numbers of this moment in it, and not the cache. Use torch.compile, for steps of a "
            "cache with static=True"
        )


def zeros_together(
    count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """`count` times zeros of this shape and type, all in one allocation.

    Each is aligned as in an allocation of its own.
    """
    size = math.prod(shape) * dtype.itemsize
    whole = torch.zeros(count, -(-size // _ALIGNED) * _ALIGNED, dtype=torch.uint8, device=device)
    return whole[:, :size].view(dtype).view(count, *shape).unbind()


def fixed(*tensors: Tensor | None) -> None:
    """Tells torch.compile that these stay at their address, so that CUDA graphs copy nothing."""
    for tensor in tensors:
        if tensor is not None:
            torch._dynamo.mark_static_address(tensor)
