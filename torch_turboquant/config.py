"""The description of a packed cache: bits, grids, scale modes, pages and the exact tail; presets.

Everything here is plain data. A preset is a name for bits and grids; kernels read the fields of a
CacheConfig and know no names. Sizes count everything that is stored: codes, padding and scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from torch_turboquant._checks import check_seed, check_whole_fields
from torch_turboquant.format import Record
from torch_turboquant.ops.codec import SCALE_MODES

GRIDS = ("lloyd", "uniform")
MAX_SEARCH = 64


class PackedConfig:
    """What the configs of keys and values and of latents (latent.py) have in common."""

    page_size: int
    search: int
    sink_tokens: int
    recent_window: int
    seed: int

    if TYPE_CHECKING:

        @property
        def record_bytes(self) -> int: ...

    def _check_codes(self, bits: int, kind: str = "") -> None:
        """Checks grid and scale mode of `kind` ("key_", "value_"), and fills in the grid."""
        grid, mode = getattr(self, f"{kind}grid"), getattr(self, f"{kind}scale_mode")
        if grid is None:
            object.__setattr__(self, f"{kind}grid", "uniform" if bits == 8 else "lloyd")
        elif grid not in GRIDS:
            raise ValueError(f"{kind}grid must be one of {GRIDS}, got {grid!r}")
        elif bits == 8 and grid != "uniform":
            raise ValueError(f"{kind}grid must be 'uniform' for 8 bits, got {grid!r}")
        if mode not in SCALE_MODES:
            raise ValueError(f"{kind}scale_mode must be one of {tuple(SCALE_MODES)}, got {mode!r}")

    def _check_whole(self, *sizes: str) -> None:
        """Before anything is computed from them."""
        others = "page_size", "search", "sink_tokens", "recent_window", "seed"
        check_whole_fields(self, *sizes, *others)

    def _check_numbers(self) -> None:
        if not 1 <= self.search <= MAX_SEARCH:
            raise ValueError(f"search must be 1 to {MAX_SEARCH}, got {self.search}")
        for name in ("sink_tokens", "recent_window"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        check_seed(self.seed)

    @property
    def has_tail(self) -> bool:
        """Whether any tokens stay exact, first or last ones."""
        return self.sink_tokens + self.recent_window > 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one KV head, or of its latent: all that its page has for it."""
        whole, rest = divmod(self.record_bytes, self.page_size)
        assert rest == 0, "every token owns whole bytes"
        return whole


@dataclass(frozen=True)
class CacheConfig(PackedConfig):
    """The static description of a packed cache of one model.

    Args:
        head_dim: channels of a head: a multiple of 16 up to 1024 of the form m * 2^k, m one of
            1, 3, 5, 7, 9.
        key_bits: 2, 3, 4, 5 or 8 bits per channel.
        value_bits: 2, 3, 4 or 8 bits per channel.
        key_grid, value_grid: "lloyd" (Lloyd-Max levels) or "uniform" (evenly spaced, decodes faster
            on GPUs). None stands for the default: "uniform" for 8 bits, which have no other grid,
            and "lloyd" for all others. On GPUs attention is slower with bits and grids that no
            preset has together (kernel_choice).
        page_size: 16, 32, 64 or 128 tokens per page.
        key_scale_mode, value_scale_mode: the rule for the stored scale (docs/format.md, section 5):
            "norm" (the paper), "preserve", "mse" or "unbiased".
        search: how many step sizes are tried for each vector, 1 (the paper) to 64.
        sink_tokens: how many first tokens of a sequence stay exact in the tail.
        recent_window: how many last tokens of a sequence stay exact in the tail.
        seed: the seed of the random signs, 0 to 2^64 - 1.

    Raises:
        ValueError: anything else; the text names what is supported.
    """

    head_dim: int
    key_bits: int
    value_bits: int
    key_grid: str | None = None
    value_grid: str | None = None
    page_size: int = 32
    key_scale_mode: str = "unbiased"
    value_scale_mode: str = "mse"
    search: int = 8
    sink_tokens: int = 4
    recent_window: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_whole("head_dim", "key_bits", "value_bits")
        self.record  # noqa: B018  checks head_dim, bits and page_size
        for kind, bits in (("key", self.key_bits), ("value", self.value_bits)):
            self._check_codes(bits, f"{kind}_")
        self._check_numbers()

    @cached_property
    def record(self) -> Record:
        """The layout of one (page, KV head)."""
        return Record(self.head_dim, self.page_size, self.key_bits, self.value_bits)

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of one (page, KV head)."""
        return self.record.record_bytes

    @property
    def bits_per_value(self) -> float:
        """Bits stored per channel of a key or a value, on average, scales and padding included."""
        return 8 * self.bytes_per_token / (2 * self.head_dim)

    def compression(self, dtype: torch.dtype = torch.bfloat16) -> float:
        """How many times smaller the pages are than an unquantised cache of this dtype."""
        return 2 * self.head_dim * dtype.itemsize / self.bytes_per_token


class Preset(NamedTuple):
    """Bits and grids of keys and values, and the scale mode of values."""

    key_bits: int
    value_bits: int
    key_grid: str
    value_grid: str
    value_scale_mode: str = "mse"


# Two presets with 2-bit values have the scale mode "unbiased": random errors of values average out
# over the tokens that a query attends to, but the length that "mse" takes off each value does not.
PRESETS: dict[str, Preset] = {
    "k8v8": Preset(8, 8, "uniform", "uniform"),
    "k8v4": Preset(8, 4, "uniform", "lloyd"),
    "k5v4u": Preset(5, 4, "uniform", "uniform"),
    "k5v3u": Preset(5, 3, "uniform", "uniform"),
    "k4v4": Preset(4, 4, "lloyd", "lloyd"),
    "k4v4u": Preset(4, 4, "uniform", "uniform"),
    "k4v3": Preset(4, 3, "lloyd", "lloyd"),
    "k4v2": Preset(4, 2, "lloyd", "lloyd", "unbiased"),
    "k3v3": Preset(3, 3, "lloyd", "lloyd"),
    "k3v2": Preset(3, 2, "lloyd", "lloyd", "unbiased"),
    "k2v2": Preset(2, 2, "lloyd", "lloyd"),
}


class NamedPreset(NamedTuple):
    """A preset named by its use, with the fields of CacheConfig that differ from their defaults."""

    preset: str
    options: dict[str, int]


# The choices that docs/quality.md recommends for the models measured there.
NAMED_PRESETS: dict[str, NamedPreset] = {
    "near-lossless": NamedPreset("k5v4u", {}),
    "balanced": NamedPreset("k4v2", {}),
    "smallest": NamedPreset("k3v2", {"recent_window": 40}),
}

# What other packages call the same bits.
OTHER_NAMES = {"int8": "k8v8"}


def find_preset(name: str) -> Preset:
    """The preset that has this name in PRESETS, NAMED_PRESETS or OTHER_NAMES.

    Raises:
        ValueError: an unknown name, or one that asks for floating-point codes.
    """
    refuse_fp8(name)
    name = NAMED_PRESETS[name].preset if name in NAMED_PRESETS else OTHER_NAMES.get(name, name)
    found = PRESETS.get(name)
    if found is None:
        raise ValueError(
            f"unknown preset {name!r}{did_you_mean(name, [*PRESETS, *NAMED_PRESETS])}; the presets "
            f"are {', '.join(PRESETS)}, and by their use {', '.join(NAMED_PRESETS)}"
        )
    return found


def refuse_fp8(name: object) -> None:
    """Raises a ValueError with what to use instead, if the name is one of fp8."""
    if str(name).lower().startswith(("fp8", "float8")):
        raise ValueError(
            f"there is no preset {name!r}, because 8-bit integers take the same space and are "
            "closer to the original: use 'k8v8' (also called 'int8'; of latents 'k8')"
        )


def did_you_mean(name: object, known: Sequence[str]) -> str:
    """ " (did you mean ...?)" with the names that come nearest; nothing where none comes near."""
    near = get_close_matches(str(name).lower(), known, n=2)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""


def preset(name: str, head_dim: int, **overrides: object) -> CacheConfig:
    """The configuration of a named preset.

    Args:
        name: one of PRESETS (k<key bits>v<value bits>, with a final u for the uniform grid), of
            NAMED_PRESETS, or "int8", which is k8v8.
        head_dim: channels of a head.
        overrides: any other fields of CacheConfig, which win over the options of a named preset.

    Raises:
        ValueError: an unknown name, or fields that CacheConfig rejects.
    """
    options = NAMED_PRESETS[name].options if name in NAMED_PRESETS else {}
    return CacheConfig(head_dim, **{**find_preset(name)._asdict(), **options, **overrides})
