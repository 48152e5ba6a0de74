"""Dense little-endian bit strings, in which codes of standalone vectors are stored.

Code c of a row takes bits c * bits .. (c + 1) * bits - 1 of the row's bit string. Bit k of the
string is bit k mod 8 of byte k // 8, and unused bits of the last byte are 0 (docs/format.md,
section 7). Page records have another layout (format.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant.format import dense_row_bytes

PACK_BITS = tuple(range(1, 9))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs codes into dense rows.

    Args:
        codes: uint8 [..., d] with values below 2^bits, contiguous, d >= 1. Larger values are an
            error on the CPU; on CUDA their upper bits are dropped.
        bits: 1 to 8.

    Returns:
        uint8 [..., ceil(d * bits / 8)].

    Raises:
        TypeError: another dtype.
        ValueError: other bits, another shape or stride.
        RuntimeError: a code of 2^bits or more (checked on the CPU).
    """
    _check_pack(codes, bits)
    return torch.ops.turboquant.pack.default(codes, bits)


def _check_pack(codes: Tensor, bits: int) -> None:
    _checks.check_bits(bits, PACK_BITS)
    _checks.check_dtype("codes", codes, (torch.uint8,))
    if codes.dim() == 0 or codes.shape[-1] == 0:
        raise ValueError(f"codes has shape {list(codes.shape)}, expected [..., d] with d >= 1")
    _checks.check_constant("codes", codes, codes.device, torch.uint8, tuple(codes.shape))


def unpack(packed: Tensor, bits: int, d: int) -> Tensor:
    """Reads dense rows back: the inverse of pack.

    Args:
        packed: uint8 [..., ceil(d * bits / 8)], contiguous.
        bits: 1 to 8.
        d: codes of a row, d >= 1.

    Returns:
        uint8 [..., d].

    Raises:
        TypeError: another dtype.
        ValueError: other bits, another stride or last dimension.
    """
    _check_unpack(packed, bits, d)
    return torch.ops.turboquant.unpack.default(packed, bits, d)


def _check_unpack(packed: Tensor, bits: int, d: int) -> None:
    _checks.check_bits(bits, PACK_BITS)
    _checks.check_positive(d=d)
    check_rows("packed", packed, d, bits)


def check_rows(name: str, packed: Tensor, d: int, bits: int) -> None:
    """Checks rows of d codes: uint8 [..., ceil(d * bits / 8)], contiguous.

    Raises:
        TypeError: another dtype.
        ValueError: another stride or last dimension.
    """
    _checks.check_dtype(name, packed, (torch.uint8,))
    if packed.dim() == 0 or packed.shape[-1] != dense_row_bytes(d, bits):
        raise ValueError(
            f"{name} has shape {list(packed.shape)}, expected "
            f"[..., {dense_row_bytes(d, bits)}] for {d} codes of {bits} bits"
        )
    _checks.check_constant(name, packed, packed.device, torch.uint8, tuple(packed.shape))


# ---- fakes


@torch.library.register_fake("turboquant::pack")
def _pack_fake(codes: Tensor, bits: int) -> Tensor:
    with _checks.of_fake():
        _check_pack(codes, bits)
    return codes.new_empty((*codes.shape[:-1], dense_row_bytes(codes.shape[-1], bits)))


@torch.library.register_fake("turboquant::unpack")
def _unpack_fake(packed: Tensor, bits: int, d: int) -> Tensor:
    with _checks.of_fake():
        _check_unpack(packed, bits, d)
    return packed.new_empty((*packed.shape[:-1], d))


# ---- references


def pack_reference(codes: Tensor, bits: int) -> Tensor:
    """The op in plain PyTorch: writes the bit string out, then reads it in bytes."""
    if codes.numel() and int(codes.max()) >= 2**bits:
        raise RuntimeError(f"codes must be below 2^bits = {2**bits}, got {int(codes.max())}")
    string = (codes[..., None] >> torch.arange(bits, dtype=torch.uint8)) & 1
    string = string.flatten(-2)
    padded = torch.nn.functional.pad(string, (0, -string.shape[-1] % 8))
    octets = padded.unflatten(-1, (-1, 8)).int() << torch.arange(8, dtype=torch.int32)
    return octets.sum(-1).to(torch.uint8)


def unpack_reference(packed: Tensor, bits: int, d: int) -> Tensor:
    """The op in plain PyTorch: writes the bytes out as a bit string, then reads it in codes."""
    string = ((packed[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)
    codes = string[..., : d * bits].unflatten(-1, (d, bits)).int()
    return (codes << torch.arange(bits, dtype=torch.int32)).sum(-1).to(torch.uint8)
