"""What a page holds: the records of its KV heads, then the exact key and value of its first token.

Softmax gives much weight to the first token of a sequence, whose key is unlike all others, so that
exactness pays most there. A page carries the row by itself, which keeps pages complete whoever
copies, shares or brings them back. All pages have room for it, and only the first page of a
sequence uses it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_turboquant.config import CacheConfig
from torch_turboquant.latent import LatentConfig

SIZES = (16, 32, 64, 128)
"""Tokens of a page."""
LATENT_SIZES = (32, 64, 128)
"""Tokens of a page of latents."""

AnyConfig = CacheConfig | LatentConfig


def page_tokens(block_size: int, sizes: tuple[int, ...] = SIZES) -> int:
    """Tokens of a page where blocks have `block_size`: vLLM cuts larger blocks into pages."""
    return max((size for size in sizes if block_size % size == 0), default=sizes[0])


def row_bytes(config: AnyConfig, dtype: torch.dtype) -> int:
    """Bytes of an exact token: of one KV head's key and value, or of its latent and position."""
    if isinstance(config, LatentConfig):
        return config.channels * dtype.itemsize
    return 2 * config.head_dim * dtype.itemsize


def bytes_per_token(config: AnyConfig, tokens: int, dtype: torch.dtype | None) -> int:
    """Bytes of a token and KV head, or of a token's latent, in pages of `tokens`.

    Args:
        dtype: of the exact first token; None: pages have none.
    """
    row = 0 if dtype is None else row_bytes(config, dtype)
    return config.bytes_per_token + -(-row // tokens)


def page_parts(
    kv_cache: Tensor, config: CacheConfig, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """The two parts of an engine's pages, in the same memory.

    Args:
        kv_cache: uint8 [pages, kv_heads, tokens, bytes of a token], pages contiguous and at any
            distance from each other.
        config: of the records, with this page size.
        dtype: as in bytes_per_token.

    Returns:
        uint8 [pages, kv_heads, record_bytes], and [pages, kv_heads, 1, 2, head_dim] of the dtype,
        which is a tail of one sink (docs/format.md, section 9).

    Raises:
        ValueError: pages have fewer tokens than bytes_per_token was told, as vLLM may make them.
    """
    pages, heads = kv_cache.shape[:2]
    records, rows = _parts(kv_cache, config, dtype, heads)
    records = records.view(pages, heads, config.record_bytes)
    return records, None if rows is None else rows.view(pages, heads, 1, 2, config.head_dim)


def latent_page_parts(
    kv_cache: Tensor, config: LatentConfig, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """The two parts of an engine's pages of latents; arguments and errors as in page_parts.

    Args:
        kv_cache: uint8 [pages, tokens, bytes of a token].

    Returns:
        uint8 [pages, record_bytes], and [pages, 1, latent_dim + rope_dim] of the dtype.
    """
    records, rows = _parts(kv_cache, config, dtype, heads=1)
    return records, None if rows is None else rows.view(-1, 1, config.channels)


def put_first_token(decoded: Sequence[Tensor], entry: Tensor) -> None:
    """Puts the exact first token of a sequence in place of the one decoded from its pages.

    Args:
        decoded: keys and values [tokens, kv_heads, head_dim], from the first token on.
        entry: [kv_heads, rows, 2, head_dim] of a tail (docs/format.md, section 9).
    """
    for kind, rows in enumerate(decoded):
        rows[0] = entry[:, 0, kind]


def put_first_latent(latents: Tensor, ropes: Tensor, entry: Tensor) -> None:
    """As put_first_token.

    Args:
        latents, ropes: [tokens, latent_dim] and [tokens, rope_dim].
        entry: [rows, latent_dim + rope_dim].
    """
    latents[0], ropes[0] = entry[0].split([latents.shape[1], ropes.shape[1]])


def _parts(
    kv_cache: Tensor, config: AnyConfig, dtype: torch.dtype | None, heads: int
) -> tuple[Tensor, Tensor | None]:
    """The bytes of each page's records, and the channels of its exact token."""
    flat = kv_cache.view(kv_cache.shape[0], -1)
    end = heads * config.record_bytes
    if dtype is None:
        return flat[:, :end], None
    behind = end + heads * row_bytes(config, dtype)
    if behind > flat.shape[1]:
        raise ValueError(
            f"turboquant: vLLM has cut its blocks into pages of {config.page_size} tokens, whose "
            f"{flat.shape[1]} bytes have no room for an exact first token, needed: {behind}. Pass "
            f'--block-size {config.page_size}, or set "first_token" to "codes"'
        )
    return flat[:, :end], flat[:, end:behind].view(dtype)
