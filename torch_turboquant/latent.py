"""Caches of latents: their description, constants and memory, and the folding of their rotation.

A model with multi-head latent attention (MLA) keeps one vector of latent_dim channels per token,
from which each head expands its key and value, and rope_dim channels beside it that carry the
position and serve all heads. DeepSeek-V2 introduced it (arXiv:2405.04434, section 2.1). The same
section says why the heads need not expand anything: with k = latent @ W_UK^T and v = latent @ W_UV,

    q . k = (q @ W_UK) . latent        sum of p * v = (sum of p * latent) @ W_UV

so queries absorb W_UK, outputs meet W_UV once, and attention reads latents alone. The ops in
ops/mla.py do that over latents of 3 to 8 bits; docs/format.md, section 12 has the bytes.

Codes stand for rotated latents. An op can rotate queries and outputs, or the two matrices do it for
good (fold_latent_rotation): then queries, outputs, exact tails and new latents are all in the
rotated space, y = forward(latent * channel_scale), and attention has no transform to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant.codebook import Codebook
from torch_turboquant.config import (
    NAMED_PRESETS,
    OTHER_NAMES,
    PRESETS,
    PackedConfig,
    did_you_mean,
    find_preset,
    refuse_fp8,
)
from torch_turboquant.format import LatentRecord
from torch_turboquant.ops.codec import Channels, scaled_center
from torch_turboquant.ops.hadamard import hadamard
from torch_turboquant.signs import SignKind, random_signs
from torch_turboquant.tables import own_center
from torch_turboquant.tail import check_new_tail, tail_rows

ROPE_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LatentConfig(PackedConfig):
    """The static description of a packed cache of latents.

    Args:
        latent_dim: channels of a latent (kv_lora_rank): 128, 256 or 512.
        rope_dim: channels beside it that carry the position (qk_rope_head_dim): 0, 32 or 64.
        bits: 3, 4, 5 or 8 bits per channel of a latent.
        grid: "lloyd" (Lloyd-Max levels) or "uniform" (evenly spaced). None stands for "uniform"
            with 8 bits, which have no other grid, and "lloyd" otherwise.
        page_size: 32, 64 or 128 tokens per page.
        scale_mode: the rule for the stored scale (docs/format.md, section 5): "norm", "preserve",
            "mse" or "unbiased".
        search: how many step sizes are tried for each latent, 1 to 64.
        sink_tokens: how many first tokens of a sequence stay exact in the tail.
        recent_window: how many last tokens of a sequence stay exact in the tail.
        seed: the seed of the random signs, 0 to 2^64 - 1.
        rope_dtype: what the raw channels are stored in: torch.bfloat16 or torch.float16. On a GPU
            it should be the dtype of the model: with queries of another, mla_attention takes its
            general kernel, which is many times slower.
        transform: whether latents are rotated before they are coded. Without, codes stand for
            their channels as they are, less a center and times scales of channels.

    Raises:
        ValueError: anything else; the text names what is supported.
    """

    latent_dim: int
    rope_dim: int
    bits: int
    grid: str | None = None
    page_size: int = 64
    scale_mode: str = "unbiased"
    search: int = 8
    sink_tokens: int = 4
    recent_window: int = 64
    seed: int = 0
    rope_dtype: torch.dtype = torch.bfloat16
    transform: bool = True

    def __post_init__(self) -> None:
        self._check_whole("latent_dim", "rope_dim", "bits")
        self.record  # noqa: B018  checks dimensions, bits and page_size
        self._check_codes(self.bits)
        self._check_numbers()
        if self.rope_dtype not in ROPE_DTYPES:
            raise ValueError(f"rope_dtype is {self.rope_dtype}, supported: bfloat16, float16")

    @cached_property
    def record(self) -> LatentRecord:
        """The layout of a page."""
        return LatentRecord(self.latent_dim, self.rope_dim, self.page_size, self.bits)

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of a page."""
        return self.record.record_bytes

    @property
    def channels(self) -> int:
        """Channels of a token: those of its latent, then the raw ones."""
        return self.latent_dim + self.rope_dim

    @property
    def bits_per_value(self) -> float:
        """Bits stored per channel on average, raw channels and scale included."""
        return 8 * self.bytes_per_token / self.channels

    def compression(self, dtype: torch.dtype = torch.bfloat16) -> float:
        """How many times smaller the pages are than an unquantised cache of this dtype."""
        return self.channels * dtype.itemsize / self.bytes_per_token


class LatentPreset(NamedTuple):
    """Bits and grid of latents."""

    bits: int
    grid: str


# Latents are keys and values in one, so a name has the key's half of a preset's name.
LATENT_PRESETS: dict[str, LatentPreset] = {
    "k8": LatentPreset(8, "uniform"),
    "k5u": LatentPreset(5, "uniform"),
    "k4": LatentPreset(4, "lloyd"),
    "k4u": LatentPreset(4, "uniform"),
    "k3": LatentPreset(3, "lloyd"),
}


def latent_preset(
    name: str, latent_dim: int = 512, rope_dim: int = 64, **overrides: object
) -> LatentConfig:
    """The configuration of a named preset for latents.

    Args:
        name: one of LATENT_PRESETS: k<bits>, with a final u for the uniform grid.
        latent_dim, rope_dim: of the model.
        overrides: any other fields of LatentConfig.

    Raises:
        ValueError: an unknown name, or fields that LatentConfig rejects.
    """
    refuse_fp8(name)
    if name not in LATENT_PRESETS:
        raise ValueError(
            f"unknown preset for latents {name!r}{did_you_mean(name, [*LATENT_PRESETS])}; they are "
            f"{', '.join(LATENT_PRESETS)}"
        )
    return LatentConfig(latent_dim, rope_dim, **{**LATENT_PRESETS[name]._asdict(), **overrides})


def latent_preset_of(
    name: str, latent_dim: int = 512, rope_dim: int = 64, **overrides: object
) -> LatentConfig:
    """The configuration that any preset's name stands for where a model has latents.

    Latents are keys and values in one: of a preset for both, they take what it says of keys.

    Args:
        name: one of LATENT_PRESETS, or of PRESETS, NAMED_PRESETS or OTHER_NAMES of config.
        latent_dim, rope_dim, overrides: as in latent_preset.

    Raises:
        ValueError: an unknown name, or fields that LatentConfig rejects.
    """
    if name not in (*PRESETS, *NAMED_PRESETS, *OTHER_NAMES):
        return latent_preset(name, latent_dim, rope_dim, **overrides)
    both = find_preset(name)
    options = NAMED_PRESETS[name].options if name in NAMED_PRESETS else {}
    keys = {"bits": both.key_bits, "grid": both.key_grid, **options}
    return LatentConfig(latent_dim, rope_dim, **{**keys, **overrides})  # type: ignore[arg-type]


# ---- the constants of a layer


class LatentTables(NamedTuple):
    """The constants of one layer's cache of latents, as tensors on its device."""

    signs: Tensor | None
    """float32 [latent_dim] of +1 and -1; None: there is no transform."""
    levels: Tensor | None
    """int8 [2^bits], or None for the uniform grid."""
    steps: Tensor
    """float32 [S]: candidate steps, increasing."""
    center: Tensor | None
    """float32 [latent_dim] subtracted from latents before they are encoded, or None; or
    [3, latent_dim], which scales their channels as well (codec.scaled_center)."""
    rotated_center: Tensor | None
    """float32 [latent_dim]: the center in the rotated space, rotate_latent of it; None: none."""


def make_latent_tables(
    config: LatentConfig,
    layer: int,
    device: torch.device | str = "cpu",
    center: Tensor | None = None,
) -> LatentTables:
    """The constants of one layer: signs from (seed, layer), the codebook from the config.

    Args:
        config: the cache.
        layer: 0 and more; every layer has its own signs.
        device: of the cache.
        center: [latent_dim], any floating dtype: the mean latent of this layer, or None; or
            [3, latent_dim] of codec.scaled_center.

    Raises:
        ValueError: a center of another shape or with NaN or infinity, scales that are not positive
            and finite, or a grid that the bits do not have.
    """
    _checks.check_whole(layer=layer)
    d = config.latent_dim
    book = Codebook.make(d, config.bits, str(config.grid))
    signs = random_signs(d, config.seed, layer, SignKind.KEYS).to(device)
    tables = LatentTables(
        signs if config.transform else None,
        book.levels_tensor(device),
        book.steps_tensor(config.search, device),
        None if center is None else _make_center(center, d, device),
        None,
    )
    if tables.center is None:
        return tables
    plain = tables.center if tables.center.dim() == 1 else tables.center[0]
    return tables._replace(rotated_center=rotate_latent(plain, tables))


def norm_center(weight: Tensor) -> Tensor:
    """Scales of channels that divide latents by the weight of the norm that they come from.

    Channels of a latent are as large as that weight. Divided by it they are alike, as they have to
    be to share one scale, and small ones lose nothing to others.

    Args:
        weight: [latent_dim] of the model's kv_a_layernorm, of any floating dtype.

    Returns:
        float32 [3, latent_dim] (codec.scaled_center) on the CPU, for make_latent_tables.
    """
    size = weight.detach().float().cpu().abs()
    # a channel without any weight is 0 whatever its scale is
    scale = 1 / size.clamp(min=max(1e-3 * size.mean().item(), 1e-6))
    return scaled_center(torch.zeros_like(size), scale / scale.mean())


def _make_center(center: Tensor, latent_dim: int, device: torch.device | str) -> Tensor:
    if tuple(center.shape) not in ((latent_dim,), (3, latent_dim)):
        raise ValueError(
            f"center has shape {list(center.shape)}, expected [{latent_dim}] or [3, {latent_dim}]"
        )
    if center.dim() == 2:
        center = scaled_center(center[0], center[1])
    return own_center(center, device)


# ---- memory


def allocate_latent_cache(
    config: LatentConfig, num_pages: int, device: torch.device | str = "cpu"
) -> Tensor:
    """An empty cache: uint8 [num_pages, record_bytes], zeros.

    Raises:
        TypeError: another config, such as that of keys and values.
        ValueError: a number that is not whole, or is below 0.
    """
    if not isinstance(config, LatentConfig):
        raise TypeError(f"config must be a LatentConfig, got {type(config).__name__}")
    _checks.check_count(num_pages=num_pages)
    return torch.zeros(num_pages, config.record_bytes, dtype=torch.uint8, device=device)


def allocate_latent_tail(
    config: LatentConfig,
    max_seqs: int,
    dtype: torch.dtype,
    max_q_len: int = 1,
    device: torch.device | str = "cpu",
) -> Tensor:
    """An empty tail, the `ring` of Tail: zeros.

    The ring has recent_window + max_q_len - 1 rows, so that every query of a call of up to
    max_q_len new tokens finds its window, also after rolling back to any of them.

    Returns:
        [max_seqs, sink_tokens + ring, latent_dim + rope_dim].

    Raises:
        TypeError: a dtype other than float32, float16 and bfloat16.
        ValueError: a config without sink tokens and window, max_q_len below 1, or a number that is
            not whole or is below 0.
    """
    check_new_tail(config, dtype, max_q_len)
    _checks.check_count(max_seqs=max_seqs)
    rows = tail_rows(config, int(max_q_len))
    return torch.zeros(max_seqs, rows, config.channels, dtype=dtype, device=device)


# ---- the rotated space


def rotate_latent(latent: Tensor, tables: LatentTables) -> Tensor:
    """Latents in the rotated space, forward(latent * channel_scale), without losing their center.

    Attention with rotated=True takes latent_new like this, and a tail that mla_store has written
    with rotated=True holds latents like this.

    Args:
        latent: [..., latent_dim], float32, float16 or bfloat16.
        tables: of the layer.

    Returns:
        [..., latent_dim] of latent's dtype, computed in float32 and rounded once.

    Raises:
        TypeError: another dtype.
    """
    _checks.check_dtype("latent", latent, _checks.FLOATS)
    scale = Channels.of(tables.center, 1).scale
    y = latent.float() if scale is None else latent.float() * scale
    if tables.signs is not None:
        y = hadamard(y.contiguous(), tables.signs)
    return y.to(latent.dtype)


def fold_latent_rotation(w_uk: Tensor, w_uv: Tensor, tables: LatentTables) -> tuple[Tensor, Tensor]:
    """W_UK and W_UV that map from and to the rotated space, for attention with rotated=True.

    With R the rotation and s the scales of channels, codes stand for y = R (s * latent). So
    q . latent = (R (q / s)) . y, and sum of p * latent = (R^T sum of p * y) / s: both matrices get
    R (W / s) along their latent channels, once per layer.

    Args:
        w_uk: [heads, nope, latent_dim]: q_latent = q_nope @ w_uk for each head. float32, float16 or
            bfloat16, as w_uv.
        w_uv: [heads, latent_dim, v]: the output of a head is out_latent @ w_uv.
        tables: of the layer.

    Returns:
        Two new tensors of the shapes and dtypes given, computed in float32 and rounded once.

    Raises:
        TypeError: another dtype.
        ValueError: another number of latent channels or of dimensions.
    """
    constant = tables.signs if tables.center is None else tables.center
    for name, w, channels in (("w_uk", w_uk, 2), ("w_uv", w_uv, 1)):
        _checks.check_dtype(name, w, _checks.FLOATS)
        fits = w.dim() == 3 and (constant is None or w.shape[channels] == constant.shape[-1])
        if not fits:
            raise ValueError(
                f"{name} has shape {list(w.shape)}, expected w_uk [heads, nope, latent_dim] and "
                "w_uv [heads, latent_dim, v] with the latent_dim of the tables"
            )
    return _fold(w_uk, tables), _fold(w_uv.transpose(1, 2), tables).transpose(1, 2).contiguous()


def _fold(w: Tensor, tables: LatentTables) -> Tensor:
    """R (w / s) along the last dimension."""
    inverse = Channels.of(tables.center, 1).inverse
    y = w.detach().float() if inverse is None else w.detach().float() * inverse
    if tables.signs is not None:
        y = hadamard(y.contiguous(), tables.signs)
    # without scales and transform y may be the model's own memory
    return y.to(w.dtype, copy=inverse is None and tables.signs is None)
