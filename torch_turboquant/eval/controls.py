"""Controls: caches that quantise in other, published ways, with which packed caches are compared.

A control holds the vectors that its codes would decode to, so it saves no memory. The memory that
it *would* take is counted from its format, with scales and zero points (float16 each, unless a
format says otherwise). As in a packed cache, the first forward attends exactly; from then on every
query reads decoded keys and values, those of its own token included.

    fp8          float8 e4m3, as it comes (values beyond 448 are clipped)
    fp8s         float8 e4m3 with one scale per layer for keys and one for values, their largest
                 magnitude in the first forward over 448: a calibrated fp8 cache
    int8         one scale and zero point per token and head, 8 bits (int2 .. int16: other widths)
    q4_0         blocks of 32 channels, one scale each, 4 bits (q2_0 .. q16_0)
    q4_0h        the same after a signed Hadamard transform of the head
    kivi4        KIVI as published, 4 bits (kivi2 ..): keys per channel in groups of 32 tokens,
                 values per token in groups of 32 channels, scale and zero point per group; keys
                 are exact after the last multiple of 128 tokens, values in the last 128 tokens
    channel4     keys per channel with the range of the first forward, values as int4
    qjl4         the paper's Algorithm 2 for keys (3 bits and a 1-bit sketch of the residual), its
                 Algorithm 1 for values: 4 bits in total for each (qjl2 .. qjl5)

Rotations use the signs of seed 0 and the layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from torch_turboquant.ops.hadamard import hadamard
from torch_turboquant.paper import TurboQuantMSE, TurboQuantProd
from torch_turboquant.signs import SignKind, random_signs

CONTROLS = ("fp8", "fp8s", "int8", "q4_0", "q4_0h", "kivi4", "kivi2", "channel4", "qjl4")
FP8_MAX = 448.0
BLOCK = 32  # channels or tokens that share a scale
RESIDUAL = 128  # tokens that KIVI keeps exact
_HALF = 2  # bytes of a float16

# -------------------------------------------------------------------------------- quantisers


def half(x: Tensor) -> Tensor:
    """x rounded to float16, in which scales are stored; as float32."""
    return x.clamp(-65504, 65504).half().float()


def affine(x: Tensor, bits: int, dim: int) -> Tensor:
    """x, float32, quantised with one scale and zero point (its minimum) along dim, and decoded."""
    low = half(x.amin(dim, keepdim=True))
    step = half((x.amax(dim, keepdim=True) - low) / (2**bits - 1))
    return _affine_codes(x, low, step, bits)


def _affine_codes(x: Tensor, low: Tensor, step: Tensor, bits: int) -> Tensor:
    safe = torch.where(step > 0, step, torch.ones_like(step))
    codes = ((x - low) / safe).round().clamp(0, 2**bits - 1)
    return low + codes * step


def blocks(x: Tensor, bits: int) -> Tensor:
    """x, float32 [..., d], quantised in blocks of 32 channels as by q4_0, and decoded.

    The element of largest magnitude gets the lowest code, -2^(bits - 1) steps.
    """
    parts = x.unflatten(-1, (-1, BLOCK))
    at = parts.abs().argmax(-1, keepdim=True)
    step = half(parts.gather(-1, at) / -(2 ** (bits - 1)))
    safe = torch.where(step != 0, step, torch.ones_like(step))
    codes = (parts / safe).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (codes * step).flatten(-2)


def fp8(x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """x / scale, float32, rounded to float8 e4m3 within its range, times scale."""
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale


# ------------------------------------------------------------------------------------- layers


class ControlLayer(DynamicLayer):
    """One layer: keys and values [batch, kv_heads, tokens, head_dim] as they would be decoded.

    Subclasses define the quantiser (`code`) and its size (`token_bytes`).
    """

    exact_rows = (0, 0)  # keys and values per head that are kept exact beside the codes

    def __init__(self, index: int, bits: int) -> None:
        super().__init__()
        self.index, self.bits = index, bits

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        _, self.kv_heads, _, self.head_dim = key_states.shape
        self.calibrate(key_states.float(), value_states.float())

    def calibrate(self, keys: Tensor, values: Tensor) -> None:
        """Learns constants from the first forward: float32 [batch, kv_heads, n, head_dim]."""

    def code(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Quantises and decodes float32 [batch, kv_heads, n, head_dim] each."""
        raise NotImplementedError

    def token_bytes(self) -> float:
        """Bytes of one token's key and value of one head."""
        raise NotImplementedError

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        first = self.get_seq_length() == 0
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        k, v = self.code(key_states.float(), value_states.float())
        stored = super().update(k.to(key_states.dtype), v.to(value_states.dtype))
        return (key_states, value_states) if first else stored


class Fp8(ControlLayer):
    """float8 e4m3 without a scale."""

    scales: tuple[Tensor | float, Tensor | float] = (1.0, 1.0)

    def code(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return fp8(keys, self.scales[0]), fp8(values, self.scales[1])

    def token_bytes(self) -> float:
        return 2 * self.head_dim


class ScaledFp8(Fp8):
    """float8 e4m3 with one scale per layer for keys and one for values."""

    def calibrate(self, keys: Tensor, values: Tensor) -> None:
        self.scales = tuple(x.abs().amax().clamp(min=1e-12) / FP8_MAX for x in (keys, values))


class PerToken(ControlLayer):
    """One scale and zero point per token and head."""

    def code(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return affine(keys, self.bits, -1), affine(values, self.bits, -1)

    def token_bytes(self) -> float:
        return 2 * (self.head_dim * self.bits / 8 + 2 * _HALF)


class Blocks(ControlLayer):
    """Blocks of 32 channels with one scale each, keys and values."""

    def code(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return blocks(keys, self.bits), blocks(values, self.bits)

    def token_bytes(self) -> float:
        return 2 * self.head_dim // BLOCK * (BLOCK * self.bits / 8 + _HALF)


class RotatedBlocks(Blocks):
    """Blocks of 32 channels after a signed Hadamard transform, keys and values."""

    def code(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        decoded = []
        for x, kind in ((keys, SignKind.KEYS), (values, SignKind.VALUES)):
            signs = random_signs(self.head_dim, 0, self.index, kind).to(x.device)
            decoded.append(hadamard(blocks(hadamard(x, signs), self.bits), signs, inverse=True))
        return tuple(decoded)


class PerChannel(ControlLayer):
    """Keys per channel with fixed ranges, values per token."""

    def calibrate(self, keys: Tensor, values: Tensor) -> None:
        low, high = keys.amin((0, 2), keepdim=True), keys.amax((0, 2), keepdim=True)
        self.low, self.step = half(low), half((high - half(low)) / (2**self.bits - 1))

    def code(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return _affine_codes(keys, self.low, self.step, self.bits), affine(values, self.bits, -1)

    def token_bytes(self) -> float:
        return 2 * self.head_dim * self.bits / 8 + 2 * _HALF


class Kivi(ControlLayer):
    """KIVI (arXiv:2402.02750) as published: groups of 32, a residual of 128 tokens.

    Tokens are quantised after the forward that completes their group. With one token per forward
    this is the published cache. In a forward of c tokens that does not cross a multiple of 128 the
    keys are the same, and the last queries read up to c - 1 more exact values.
    """

    exact_rows = (RESIDUAL, RESIDUAL)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.coded = [0, 0]  # how many keys and values have been quantised

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        handed = DynamicLayer.update(self, key_states, value_states)
        length = self.keys.shape[2]
        first, last = self.coded[0], length - length % RESIDUAL
        if last > first:
            groups = self.keys[:, :, first:last].float().unflatten(2, (-1, BLOCK))
            done = affine(groups, self.bits, 3).flatten(2, 3).to(key_states.dtype)
            self.keys = torch.cat([self.keys[:, :, :first], done, self.keys[:, :, last:]], 2)
            self.coded[0] = last
        first, last = self.coded[1], length - RESIDUAL
        if last > first:
            groups = self.values[:, :, first:last].float().unflatten(-1, (-1, BLOCK))
            done = affine(groups, self.bits, -1).flatten(-2).to(value_states.dtype)
            self.values = torch.cat([self.values[:, :, :first], done, self.values[:, :, last:]], 2)
            self.coded[1] = last
        return handed

    def token_bytes(self) -> float:
        return 2 * self.head_dim * (self.bits / 8 + 2 * _HALF / BLOCK)


class TwoStage(ControlLayer):
    """Algorithm 2 of the paper for keys, Algorithm 1 for values."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        options = {"layer": self.index, "device": key_states.device}
        self.keys_by = TurboQuantProd(key_states.shape[-1], self.bits, **options)
        self.values_by = TurboQuantMSE(
            key_states.shape[-1], self.bits, kind=SignKind.VALUES, **options
        )
        super().lazy_initialization(key_states, value_states)

    def code(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (
            self.keys_by.quantize(keys.contiguous()),
            self.values_by.quantize(values.contiguous()),
        )
        vectors = keys.numel() // self.head_dim
        self.measured = sum(t.numel() * t.element_size() for t in (*k, *v)) / vectors
        return self.keys_by.dequantize(k), self.values_by.dequantize(v)

    def token_bytes(self) -> float:
        return self.measured  # of the packed tensors


# -------------------------------------------------------------------------------------- caches


@dataclass(frozen=True)
class _Family:
    layer: type[ControlLayer]
    bits: Sequence[int]


_FAMILIES = {
    r"fp8()": _Family(Fp8, (8,)),
    r"fp8s()": _Family(ScaledFp8, (8,)),
    r"int(\d+)": _Family(PerToken, range(2, 17)),
    r"q(\d+)_0": _Family(Blocks, range(2, 17)),
    r"q(\d+)_0h": _Family(RotatedBlocks, range(2, 17)),
    r"kivi(\d+)": _Family(Kivi, range(2, 17)),
    r"channel(\d+)": _Family(PerChannel, range(2, 17)),
    r"qjl(\d+)": _Family(TwoStage, range(2, 6)),
}


def _family(name: str) -> tuple[_Family, int] | None:
    for pattern, family in _FAMILIES.items():
        match = re.fullmatch(pattern, name)
        if match:
            bits = int(match[1] or 8)
            return (family, bits) if bits in family.bits else None
    return None


def is_control(name: str) -> bool:
    """Whether `ControlCache` knows the name."""
    return _family(name) is not None


def fits_heads(name: str, head_dim: int) -> bool:
    """Whether a control is defined for heads of so many channels: some code blocks of 32."""
    found = _family(name)
    in_blocks = found is not None and issubclass(found[0].layer, Blocks | Kivi)
    return head_dim % BLOCK == 0 or not in_blocks


class ControlCache(Cache):
    """A cache of a model, quantised as the control `name` says.

    Args:
        config: the model's text configuration.
        name: a name from the list at the top of this file.

    Raises:
        ValueError: an unknown name.
    """

    def __init__(self, config: Any, name: str) -> None:
        found = _family(name)
        if found is None:
            raise ValueError(
                f"unknown control {name!r}; the controls are {', '.join(CONTROLS)} and the same "
                "with other bits"
            )
        family, bits = found
        super().__init__(layers=[family.layer(i, bits) for i in range(config.num_hidden_layers)])

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one more token would add, all layers and heads."""
        return sum(layer.kv_heads * layer.token_bytes() for layer in self.layers)

    @property
    def exact_bytes(self) -> int:
        """Bytes of the tokens that stay exact beside the codes, at 16 bits per element."""
        return sum(
            sum(layer.exact_rows) * layer.kv_heads * layer.head_dim * _HALF for layer in self.layers
        )
