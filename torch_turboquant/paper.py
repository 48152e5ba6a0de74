"""TurboQuant as the paper writes it: the two quantisers, and the dense KV cache built on them.

`TurboQuantMSE` is Algorithm 1: rotate at random, quantise every coordinate with one fixed scalar
codebook. `TurboQuantProd` is Algorithm 2: the same with one bit less, and a 1-bit sketch (QJL) of
what is left, which makes inner products unbiased. `TurboQuantKVCache` is the cache that published
implementations build from them: sketched keys, affine groups of values, an exact buffer of the last
tokens.

These are for study and comparison, on the same compiled ops as everything else. To serve a model,
use the paged cache (layer.py, pool): it keeps more quality at the same size.

(paper = "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
arXiv:2504.19874.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_turboquant import _autograd, _checks
from torch_turboquant.codebook import Codebook
from torch_turboquant.ops.codec import SCALE_MODES, decode, encode
from torch_turboquant.ops.group import GROUP_BITS, GROUPS, group_decode, group_encode
from torch_turboquant.ops.hadamard import hadamard
from torch_turboquant.ops.pack import unpack
from torch_turboquant.ops.qjl import qjl_sketch
from torch_turboquant.ops.score import score
from torch_turboquant.signs import SignKind, gaussian_projection, random_signs

SKETCHES = ("gaussian", "hadamard")


class QuantizedMSE(NamedTuple):
    """Vectors in the form of Algorithm 1.

    packed: uint8 [..., ceil(dim * bits / 8)], the codes.
    scale: float16 [...], the length of each vector in units of a level (docs/format.md, section 6).
    """

    packed: Tensor
    scale: Tensor


class QuantizedProd(NamedTuple):
    """Vectors in the form of Algorithm 2.

    packed: uint8 [..., ceil(dim * (bits - 1) / 8)], the codes of the first stage.
    scale: float16 [...], as in QuantizedMSE.
    sign_bits: uint8 [..., dim / 8], the sketch of the residual.
    residual_norm: float32 [...], the length of the residual.
    """

    packed: Tensor
    scale: Tensor
    sign_bits: Tensor
    residual_norm: Tensor


class TurboQuantMSE:
    """TurboQuant_mse (paper, Algorithm 1): the least expected squared error.

    A unit vector of dimension `dim` comes back with the expected squared error
    `distortion(codebook.values, dim)` (codebook.py): 0.361, 0.116, 0.034 and 0.0093 for 1 to 4 bits
    at dim 128 (the paper's Theorem 1 bounds it). The paper quantises unit vectors; here any vector,
    its length being stored as well.

    Args:
        dim: m * 2^k up to 4096 with m one of 1, 3, 5, 7, 9 and k >= 1.
        bits: 1 to 5 (Lloyd-Max levels), or 8 (evenly spaced levels).
        seed, layer, kind: choose the random rotation (signs.py).
        grid: "lloyd", or "uniform" for evenly spaced levels at 2 to 5 and 8 bits; None: the best.
        search: step sizes tried for each vector, 1 (the paper) to 64.
        scale_mode: what the stored scale preserves (codec.SCALE_MODES); "norm" is the paper.
        device: where the vectors are.

    Raises:
        ValueError: anything else.
    """

    def __init__(
        self,
        dim: int,
        bits: int,
        seed: int = 0,
        *,
        layer: int = 0,
        kind: SignKind = SignKind.KEYS,
        grid: str | None = None,
        search: int = 1,
        scale_mode: str = "norm",
        device: torch.device | str = "cpu",
    ) -> None:
        _checks.check_whole(dim=dim, bits=bits, search=search)
        dim, bits, search = int(dim), int(bits), int(search)  # NumPy's would overflow
        _checks.check_vector_dim("vectors", dim)
        _checks.check_scale_mode(scale_mode, SCALE_MODES)
        self.dim = dim
        self.bits = bits
        self.scale_mode = scale_mode
        self.codebook = Codebook.make(dim, bits, grid)
        self.signs = random_signs(dim, seed, layer, kind).to(device)
        self.levels = self.codebook.levels_tensor(device)
        self.steps = self.codebook.steps_tensor(search, device)
        _checks.check_steps(self.steps, self.steps.device)

    def quantize(self, x: Tensor) -> QuantizedMSE:
        """Encodes x [..., dim], float32, float16 or bfloat16."""
        return QuantizedMSE(
            *encode(x, self.signs, self.levels, self.steps, self.bits, self.scale_mode)
        )

    def dequantize(self, quantized: QuantizedMSE, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decodes to [..., dim]."""
        packed, scale = quantized
        return decode(packed, scale, self.signs, self.levels, self.bits, dtype=dtype)

    def score(self, q: Tensor, quantized: QuantizedMSE) -> Tensor:
        """Inner products with the decoded vectors, without decoding them.

        With scale_mode "norm" they are biased: on average they are the true ones times one minus
        the expected squared error of a unit vector. TurboQuantProd and scale_mode "unbiased" are
        not.

        Args:
            q: [..., queries, dim].
            quantized: of [..., keys, dim], the same leading dimensions.

        Returns:
            float32 [..., queries, keys].
        """
        packed, scale = quantized
        return score(q, packed, scale, self.signs, self.levels, self.bits)


class TurboQuantProd:
    """TurboQuant_prod (paper, Algorithm 2): unbiased inner products.

    bits - 1 bits go to TurboQuantMSE, the last one to the signs of a random projection of the
    residual (QJL). For unit vectors the expected squared error of an inner product, averaged over
    the directions of the query, is E / dim times

        pi / 2 - 1 / dim     with the dense Gaussian projection (the paper's Theorem 2 bounds it),
        pi / 2 - 1           with the orthonormal one, less a term of 1 / (2 dim),

    E being the expected squared error of the first stage.

    Args:
        dim: a multiple of 8 of the form m * 2^k up to 4096 with m one of 1, 3, 5, 7, 9.
        bits: 2 to 6, the sketch included. (1 bit would be the sketch alone: qjl.qjl_sketch.)
        seed, layer: choose the rotation and the projection.
        sketch: "gaussian", the paper's dense dim x dim projection, which is unbiased for every
            single pair of vectors; or "hadamard", a second signed Walsh-Hadamard transform: faster,
            with less than half of the error, but unbiased on average over directions only (a
            vector with one or two channels other than zero can be off by 20%).
        device: where the vectors are.

    Raises:
        ValueError: anything else.
    """

    def __init__(
        self,
        dim: int,
        bits: int,
        seed: int = 0,
        sketch: str = "gaussian",
        *,
        layer: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        _checks.check_whole(dim=dim, bits=bits)
        dim, bits = int(dim), int(bits)
        if dim % 8:
            raise ValueError(f"dim must be a multiple of 8 with a sketch, got {dim}")
        if bits not in range(2, 7):
            raise ValueError(f"bits must be 2 to 6 with the bit of the sketch, got {bits}")
        if sketch not in SKETCHES:
            raise ValueError(f"sketch must be one of {SKETCHES}, got {sketch!r}")
        self.dim = dim
        self.bits = bits
        self.sketch = sketch
        self.mse = TurboQuantMSE(dim, bits - 1, seed, layer=layer, device=device)
        if sketch == "gaussian":
            projection = gaussian_projection(dim, dim, seed, layer)
        else:
            projection = random_signs(dim, seed, layer, SignKind.SKETCH)
        self.projection = projection.to(device)

    def quantize(self, x: Tensor) -> QuantizedProd:
        """Encodes x [..., dim], float32, float16 or bfloat16."""
        first = self.mse.quantize(x)
        residual = x.float() - self.mse.dequantize(first)
        return QuantizedProd(*first, *qjl_sketch(residual, self.projection))

    def dequantize(self, quantized: QuantizedProd, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decodes to [..., dim] (Algorithm 2, DeQuant_prod): both stages added.

        It is meant for inner products. With the "gaussian" sketch its squared error is larger than
        the first stage's alone (pi / 2 times), with "hadamard" smaller (about pi / 2 - 1 times).
        """
        packed, scale, sign_bits, residual_norm = quantized
        first = self.mse.dequantize(QuantizedMSE(packed, scale))
        signs = 2.0 * unpack(sign_bits, 1, self.dim).float() - 1.0
        if self.sketch == "gaussian":
            back = signs @ self.projection * (math.sqrt(math.pi / 2.0) / self.dim)
        else:
            back = hadamard(signs, self.projection, inverse=True)
            back *= math.sqrt(math.pi / (2.0 * self.dim))
        return (first + residual_norm[..., None] * back).to(dtype)

    def score(self, q: Tensor, quantized: QuantizedProd) -> Tensor:
        """Unbiased estimates of the inner products, straight from the packed vectors.

        Args:
            q: [..., queries, dim].
            quantized: of [..., keys, dim], the same leading dimensions.

        Returns:
            float32 [..., queries, keys].
        """
        packed, scale, sign_bits, residual_norm = quantized
        mse = self.mse
        return score(
            q,
            packed,
            scale,
            mse.signs,
            mse.levels,
            mse.bits,
            sign_bits=sign_bits,
            residual_norm=residual_norm,
            projection=self.projection,
        )


class _Packed(NamedTuple):
    """The packed tokens of a TurboQuantKVCache: [batch, heads, tokens, ...] each."""

    key_codes: Tensor
    key_scales: Tensor
    key_sign_bits: Tensor
    key_residual_norms: Tensor
    value_codes: Tensor
    value_scales: Tensor
    value_zeros: Tensor


class TurboQuantKVCache:
    """The dense KV cache of one attention layer in the paper's form.

    The last `buffer_size` tokens are exact. A token that leaves the buffer is packed: its key by
    TurboQuantProd, its value in affine groups of channels. Every token is packed on its own, so the
    content does not depend on how the tokens were cut into calls.

    Appending copies the packed past (torch.cat), about the work of one attention over it.

    Args:
        head_dim: a multiple of group_size of the form m * 2^k with m one of 1, 3, 5, 7, 9.
        key_bits: 2 to 6, the bit of the sketch included.
        value_bits: 2 or 4.
        buffer_size: exact tokens, 0 or more.
        group_size: channels of a group of values, 32 or 64.
        sketch: "gaussian" (the paper) or "hadamard", as in TurboQuantProd.
        seed, layer: choose the rotation and the projection of the keys.
        device: where keys and values are.

    Raises:
        ValueError: anything else.
    """

    def __init__(
        self,
        head_dim: int,
        key_bits: int = 3,
        value_bits: int = 2,
        buffer_size: int = 64,
        group_size: int = 32,
        *,
        sketch: str = "gaussian",
        seed: int = 0,
        layer: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        _checks.check_whole(
            head_dim=head_dim,
            key_bits=key_bits,
            value_bits=value_bits,
            buffer_size=buffer_size,
            group_size=group_size,
        )
        # NumPy's would overflow
        head_dim, buffer_size, group_size = int(head_dim), int(buffer_size), int(group_size)
        if value_bits not in GROUP_BITS:
            raise ValueError(f"value_bits must be one of {GROUP_BITS}, got {value_bits}")
        if group_size not in GROUPS:
            raise ValueError(f"group_size must be one of {GROUPS}, got {group_size}")
        if head_dim % group_size:
            raise ValueError(
                f"head_dim must be a multiple of group_size = {group_size}, got {head_dim}"
            )
        if buffer_size < 0:
            raise ValueError(f"buffer_size must be 0 or more, got {buffer_size}")
        self.head_dim = head_dim
        self.value_bits = value_bits
        self.buffer_size = buffer_size
        self.group_size = group_size
        self.key_quantizer = TurboQuantProd(
            head_dim, key_bits, seed, sketch, layer=layer, device=device
        )
        self._packed: _Packed | None = None
        # keys and values of the exact buffer, [batch, heads, tokens, head_dim]
        self._exact: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        """Tokens held, packed and exact."""
        return self._packed_tokens() + (0 if self._exact is None else self._exact[0].shape[2])

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Fills the empty cache with a prompt: `append` that refuses to follow other tokens.

        Raises:
            RuntimeError: the cache holds tokens already.
        """
        if len(self):
            raise RuntimeError(f"prefill needs an empty cache, this one holds {len(self)} tokens")
        self.append(keys, values)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Adds tokens at the end.

        Args:
            keys, values: [batch, heads, tokens, head_dim], float32, float16 or bfloat16, of one
                head at least; batch, heads and dtype as in the first call. Gradients do not flow
                through codes: in grad mode pass detached ones.

        Raises:
            TypeError: another dtype.
            ValueError: another shape or device, or another dtype than in the first call.
            RuntimeError: keys or values are differentiated.
        """
        self._check_tokens(keys, values)
        if self._exact is not None:
            keys, values = (
                torch.cat([held, new], dim=2)
                for held, new in zip(self._exact, (keys, values), strict=True)
            )
        leaving = max(0, keys.shape[2] - self.buffer_size)
        packed = self._packed
        if leaving:
            new = self._pack(keys[:, :, :leaving], values[:, :, :leaving])
            if packed is not None:
                new = _Packed(*(torch.cat(pair, dim=2) for pair in zip(packed, new, strict=True)))
            packed = new
        # copies, so that the buffer does not keep a whole prompt alive
        exact = (
            keys[:, :, leaving:].clone(memory_format=torch.contiguous_format),
            values[:, :, leaving:].clone(memory_format=torch.contiguous_format),
        )
        self._packed, self._exact = packed, exact  # both, or neither where memory runs out

    def attention_scores(self, query: Tensor, scale: float | None = None) -> Tensor:
        """Attention logits of queries against every token held; masking is the caller's.

        Args:
            query: [batch, query_heads, queries, head_dim], float32, float16 or bfloat16;
                query_heads is a multiple of heads, and head h reads the cache's head
                h // (query_heads / heads).
            scale: of the logits; None is 1 / sqrt(head_dim).

        Returns:
            float32 [batch, query_heads, queries, tokens].

        Raises:
            TypeError: another dtype.
            ValueError: another shape.
            RuntimeError: the cache is empty, or the query is differentiated.
        """
        keys, _ = self._held()
        _checks.check_dtype("query", query, _checks.FLOATS)
        _refuse_gradient(query)
        q = _unit_stride(self._grouped(query, self.head_dim, "query"))
        scores = q.float() @ keys.float().transpose(-1, -2)
        if self._packed is not None:
            coded = self.key_quantizer.score(q, QuantizedProd(*self._packed[:4]))
            scores = torch.cat([coded, scores], dim=-1)
        scale = 1.0 / math.sqrt(self.head_dim) if scale is None else scale
        return (scores * scale).view(*query.shape[:-1], len(self))

    def attend(self, weights: Tensor) -> Tensor:
        """Sums the values with the given weights.

        Args:
            weights: [batch, query_heads, queries, tokens], such as the softmax of
                `attention_scores`.

        Returns:
            [batch, query_heads, queries, head_dim] in the dtype of the values.

        Raises:
            ValueError: another shape.
            RuntimeError: the cache is empty.
        """
        _, values = self._held()
        w = self._grouped(weights, len(self), "weights").float()
        packed = self._packed_tokens()
        out = w[..., packed:] @ values.float()
        if self._packed is not None:
            codes, scales, zeros = self._packed[4:]
            past = group_decode(
                codes, scales, zeros, self.group_size, self.value_bits, self.head_dim
            )
            out += w[..., :packed] @ past
        return out.view(*weights.shape[:-1], self.head_dim).to(values.dtype)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of every tensor held, by name, and their "total".

        Nothing is left out: "constants" are the signs, levels, steps and projection of the keys.
        """
        quantizer = self.key_quantizer
        mse = quantizer.mse
        parts = dict.fromkeys([*_Packed._fields, "buffer_keys", "buffer_values"], 0)
        if self._packed is not None:
            parts |= {name: tensor.nbytes for name, tensor in self._packed._asdict().items()}
        if self._exact is not None:
            keys, values = self._exact
            parts |= {"buffer_keys": keys.nbytes, "buffer_values": values.nbytes}
        constants = (mse.signs, mse.levels, mse.steps, quantizer.projection)
        parts["constants"] = sum(t.nbytes for t in constants if t is not None)
        return {**parts, "total": sum(parts.values())}

    def _held(self) -> tuple[Tensor, Tensor]:
        if self._exact is None:
            raise RuntimeError("the cache is empty: prefill or append first")
        return self._exact

    def _packed_tokens(self) -> int:
        return 0 if self._packed is None else self._packed.key_codes.shape[2]

    def _pack(self, keys: Tensor, values: Tensor) -> _Packed:
        return _Packed(
            *self.key_quantizer.quantize(_unit_stride(keys)),
            *group_encode(_unit_stride(values), self.group_size, self.value_bits),
        )

    def _check_tokens(self, keys: Tensor, values: Tensor) -> None:
        for name, x in (("keys", keys), ("values", values)):
            if x.dim() != 4 or x.shape[-1] != self.head_dim:
                raise ValueError(
                    f"{name} must have shape [batch, heads, tokens, {self.head_dim}], "
                    f"got {list(x.shape)}"
                )
            _checks.check_dtype(name, x, _checks.FLOATS)
            if x.device != self.key_quantizer.projection.device:
                raise ValueError(
                    f"{name} must be on the cache's device, "
                    f"{self.key_quantizer.projection.device}, got {x.device}"
                )
            _refuse_gradient(x)
        if not keys.shape[1]:
            raise ValueError("keys and values must have at least one head")
        if keys.shape != values.shape:
            raise ValueError(
                f"keys and values must have one shape, got {list(keys.shape)} "
                f"and {list(values.shape)}"
            )
        if self._exact is None:
            return
        for name, x, held in zip(("keys", "values"), (keys, values), self._exact, strict=True):
            wanted = (*held.shape[:2], held.dtype, held.device)
            given = (*x.shape[:2], x.dtype, x.device)
            if given != wanted:
                raise ValueError(
                    f"{name} must continue the cache's (batch, heads, dtype, device) {wanted}, "
                    f"got {given}"
                )

    def _grouped(self, x: Tensor, last: int, name: str) -> Tensor:
        """[batch, query_heads, queries, last] -> [batch, heads, group * queries, last]."""
        batch, heads = self._held()[0].shape[:2]
        if x.dim() != 4 or x.shape[0] != batch or x.shape[1] % heads or x.shape[3] != last:
            raise ValueError(
                f"{name} must have shape [{batch}, a multiple of {heads} heads, queries, {last}], "
                f"got {list(x.shape)}"
            )
        return x.reshape(batch, heads, x.shape[1] // heads * x.shape[2], last)


def _refuse_gradient(x: Tensor) -> None:
    if _autograd.requires_grad(x):
        raise RuntimeError(
            "TurboQuantKVCache takes no gradient: call it under torch.no_grad() or detach its "
            "inputs"
        )


def _unit_stride(x: Tensor) -> Tensor:
    """As the ops take vectors."""
    return x if x.stride(-1) == 1 else x.contiguous()
