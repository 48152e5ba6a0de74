"""What a page holds: the records of its KV heads, then the exact key and value of its first token.

Softmax gives much weight to the first token of a sequence, whose key is unlike all others, so that
exactness pays most there. A page carries the row by itself, which keeps pages complete whoever
copies, shares or brings them back. All pages have room for it, and only the first page of a
sequence uses it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_turboquant.config import CacheConfig

SIZES = (16, 32, 64, 128)
"""Tokens of a page."""


def page_tokens(block_size: int) -> int:
    """Tokens of a page where vLLM's blocks have `block_size`: it cuts larger blocks into pages."""
    return max((size for size in SIZES if block_size % size == 0), default=SIZES[0])


def row_bytes(config: CacheConfig, dtype: torch.dtype) -> int:
    """Bytes of an exact key and value of one KV head."""
    return 2 * config.head_dim * dtype.itemsize


def bytes_per_token(config: CacheConfig, tokens: int, dtype: torch.dtype | None) -> int:
    """Bytes of a token and KV head in pages of `tokens`.

    Args:
        dtype: of the exact first token; None: pages have none.
    """
    row = 0 if dtype is None else row_bytes(config, dtype)
    return config.bytes_per_token + -(-row // tokens)


def page_parts(
    kv_cache: Tensor, config: CacheConfig, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """The two parts of vLLM's pages, in the same memory.

    Args:
        kv_cache: uint8 [pages, kv_heads, tokens, bytes of a token], pages contiguous and at any
            distance from each other.
        config: of the records, with this page size.
        dtype: as in bytes_per_token.

    Returns:
        uint8 [pages, kv_heads, record_bytes], and [pages, kv_heads, 1, 2, head_dim] of the dtype,
        which is a tail of one sink (docs/format.md, section 9).

    Raises:
        ValueError: vLLM has made pages of fewer tokens than bytes_per_token was told.
    """
    pages, heads = kv_cache.shape[:2]
    flat = kv_cache.view(pages, -1)
    end = heads * config.record_bytes
    records = flat[:, :end].view(pages, heads, config.record_bytes)
    if dtype is None:
        return records, None
    behind = end + heads * row_bytes(config, dtype)
    if behind > flat.shape[1]:
        raise ValueError(
            f"turboquant: vLLM has cut its blocks into pages of {config.page_size} tokens, whose "
            f"{flat.shape[1]} bytes have no room for an exact first token, needed: {behind}. Pass "
            f'--block-size {config.page_size}, or set "first_token" to "codes"'
        )
    rows = flat[:, end:behind].view(dtype)
    return records, rows.view(pages, heads, 1, 2, config.head_dim)
