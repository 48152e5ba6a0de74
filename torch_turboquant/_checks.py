"""Argument checks shared by the public functions and the fakes of their ops.

The compiled ops check everything again, but C++ can only raise RuntimeError; these raise TypeError
(not a tensor, wrong dtype) and ValueError (everything else) before the op is called. They look at
dtypes, shapes, strides and devices only, never at a tensor's values, so they cost no
synchronisation and torch.compile can trace through them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_turboquant.format import MAX_VECTOR_DIM, valid_vector_dim

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FLOATS_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
SLOTS = (torch.int32, torch.int64)
CODEC_BITS = (1, 2, 3, 4, 5, 8)


@contextmanager
def of_fake() -> Iterator[None]:
    """Around the checks of a fake: errors are RuntimeErrors, as those of the compiled op.

    A size that depends on data is not known while tracing. Then the compiled op has to check it.
    """
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # takes 0.5 s

    try:
        yield
    except GuardOnDataDependentSymNode:
        return
    except (TypeError, ValueError) as error:
        raise RuntimeError(str(error)) from None


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def check_kind(name: str, value: object, kind: type) -> None:
    """An object of the package, whose fields are read next."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")


def not_a_tensor(name: str, t: Any) -> TypeError:
    return TypeError(f"{name} must be a tensor, got {type(t).__name__}")


def check_dtype(name: str, t: Any, allowed: tuple[torch.dtype, ...]) -> None:
    if not isinstance(t, Tensor):
        raise not_a_tensor(name, t)
    if t.dtype not in allowed:
        raise TypeError(f"{name} has dtype {_names((t.dtype,))}, supported: {_names(allowed)}")


def check_shape(name: str, t: Tensor, shape: tuple[int | None, ...]) -> None:
    """`None` stands for any size."""
    have = t.shape
    if len(have) == len(shape):
        for n, want in zip(have, shape, strict=True):
            if want is not None and n != want:
                break
        else:
            return
    wanted = ", ".join("any" if n is None else str(n) for n in shape)
    raise ValueError(f"{name} has shape {list(have)}, expected [{wanted}]")


def check_device(name: str, t: Any, device: torch.device) -> None:
    if t.device != device:
        raise ValueError(
            f"{name} is on {t.device}, the first tensor of the call on {device}: "
            "all tensors of a call must be on one device"
        )


def check_vectors(name: str, x: Tensor, ndim: int | None = None) -> int:
    """A floating-point tensor [..., d] with stride 1 in the last dimension; returns d."""
    check_dtype(name, x, FLOATS)
    if x.dim() == 0 or (ndim is not None and x.dim() != ndim):
        wanted = "one dimension or more" if ndim is None else f"{ndim} dimensions"
        raise ValueError(f"{name} has shape {list(x.shape)}, expected {wanted}")
    check_unit_stride(name, x)
    return x.shape[-1]


def check_unit_stride(name: str, x: Tensor) -> None:
    if x.shape[-1] > 1 and x.stride(-1) != 1 and x.numel() > 0:
        raise ValueError(
            f"{name} must have stride 1 in its last dimension, got strides {x.stride()}"
        )


def check_constant(
    name: str,
    t: Any,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
) -> None:
    """A contiguous tensor of one dtype and shape on the device of the call."""
    if not isinstance(t, Tensor) or t.dtype != dtype:
        check_dtype(name, t, (dtype,))
    if t.device != device:
        check_device(name, t, device)
    if t.shape != shape:
        check_shape(name, t, shape)
    if not t.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {t.stride()}")


def check_entries(
    name: str,
    t: Any,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
) -> None:
    """Entries of the first dimension are contiguous and apart, at any distance from each other."""
    if not isinstance(t, Tensor) or t.is_contiguous():
        check_constant(name, t, device, dtype, shape)
        return
    check_dtype(name, t, (dtype,))
    check_device(name, t, device)
    check_shape(name, t, shape)
    size = 1
    for n, stride in zip(reversed(t.shape[1:]), reversed(t.stride()[1:]), strict=True):
        if n != 1 and stride != size:
            raise ValueError(
                f"{name} must be contiguous behind its first dimension, got strides {t.stride()}"
            )
        size *= n
    if t.shape[0] > 1 and t.stride(0) < size:
        raise ValueError(
            f"{name} has stride {t.stride(0)} in its first dimension, supported: {size} and more, "
            "so that entries are apart"
        )


def check_table(name: str, t: Any, device: torch.device, rows: int) -> None:
    """int32 [rows, any], stride 1 in a row."""
    check_dtype(name, t, (torch.int32,))
    check_device(name, t, device)
    check_shape(name, t, (rows, None))
    check_unit_stride(name, t)


def check_slots(name: str, t: Any, device: torch.device, count: int | None) -> None:
    """int32 or int64 [count]."""
    check_dtype(name, t, SLOTS)
    check_constant(name, t, device, t.dtype, (count,))


def check_tail_slots(t: Any, device: torch.device, seqs: int) -> None:
    """int32 or int64 [seqs], of any stride."""
    check_dtype("tail_slots", t, SLOTS)
    check_device("tail_slots", t, device)
    check_shape("tail_slots", t, (seqs,))


def check_center(center: Tensor | None, device: torch.device, shape: tuple[int, ...]) -> None:
    """[*shape], or [3, *shape] with scales of channels (codec.scaled_center)."""
    if center is not None:
        scaled = isinstance(center, Tensor) and center.dim() == len(shape) + 1
        check_constant("center", center, device, torch.float32, (3, *shape) if scaled else shape)


def fits_center(center: Tensor, d: int) -> bool:
    """Whether it is [heads, d], or [3, heads, d] with scales of channels."""
    return center.dim() >= 2 and center.shape[-1] == d and center.shape[:-2] in ((), (3,))


def check_output_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        raise TypeError(f"dtype is {dtype}, supported: {_names(FLOATS)}")


def check_vector_dim(name: str, d: int) -> None:
    if not valid_vector_dim(d):
        raise ValueError(
            f"the last dimension of {name} is {d}, supported: m * 2^k with m in {{1, 3, 5, 7, 9}} "
            f"and k >= 1, up to {MAX_VECTOR_DIM}"
        )


def check_bits(bits: int, supported: tuple[int, ...], name: str = "bits") -> None:
    if bits not in supported:
        raise ValueError(f"{name} is {bits}, supported: {', '.join(map(str, supported))}")


def check_whole(**numbers: Any) -> None:
    """Counts and sizes. (4.0 is 4 to Python and True is 1, but neither is a size.)"""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | np.integer | torch.SymInt):
            raise ValueError(f"{name} is {number!r}, which is no whole number")


def check_whole_fields(config: Any, *names: str) -> None:
    """Fields of a frozen dataclass. NumPy's integers become ints, as JSON takes no others."""
    for name in names:
        number = getattr(config, name)
        check_whole(**{name: number})
        if isinstance(number, np.integer):
            object.__setattr__(config, name, int(number))


def check_seed(seed: int) -> None:
    """Of a cache's signs, or of a draw, that is a whole number already."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be 0 to 2^64 - 1, got {seed}")


def check_count(**numbers: int) -> None:
    check_whole(**numbers)
    for name, number in numbers.items():
        if number < 0:
            raise ValueError(f"{name} is {number}, supported: 0 and more")


def check_positive(**numbers: int) -> None:
    check_whole(**numbers)
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is {number}, supported: 1 and more")


def check_scale_mode(mode: str, modes: dict[str, int], name: str = "scale_mode") -> int:
    if mode not in modes:
        raise ValueError(f"{name} is {mode!r}, supported: {', '.join(modes)}")
    return modes[mode]


def check_scale_number(number: int, modes: dict[str, int], name: str = "scale_mode") -> str:
    """The mode that raw ops know by this number."""
    for mode, n in modes.items():
        if n == number:
            return mode
    supported = ", ".join(f"{n} ({mode})" for mode, n in modes.items())
    raise ValueError(f"{name} is {number}, supported: {supported}")


def check_levels(
    levels: Tensor | None, device: torch.device, bits: int, name: str = "levels"
) -> None:
    if levels is None:
        if bits < 2:
            raise ValueError(f"{name} is needed at {bits} bit: the uniform grid starts at 2 bits")
        return
    if bits > 5:
        raise ValueError(
            f"{name} must be absent at {bits} bits: 8-bit codes are the uniform signed grid"
        )
    check_constant(name, levels, device, torch.int8, (2**bits,))


def check_steps(steps: Tensor, device: torch.device, name: str = "steps") -> None:
    check_constant(name, steps, device, torch.float32, (None,))
    if not 1 <= steps.shape[0] <= 64:
        raise ValueError(f"{name} has {steps.shape[0]} candidates, supported: 1 to 64")
