"""The tensors of a pool: pages, tails and tables of all layers, and what their bytes depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant._autograd import lasting
from torch_turboquant.config import CacheConfig
from torch_turboquant.format import FORMAT_VERSION
from torch_turboquant.layer import PagedLayer
from torch_turboquant.ops.cache import allocate_cache
from torch_turboquant.tables import CacheTables, make_tables
from torch_turboquant.tail import allocate_tail, tail_shape

Configs = CacheConfig | Sequence[CacheConfig]
Centers = Sequence[Tensor | None]


class PoolBytes(NamedTuple):
    """Bytes of all tensors and arrays that a pool holds."""

    pages: int
    """Packed keys and values of all layers."""
    tail: int
    """Exact first and last tokens of all sequences, all layers."""
    tables: int
    """Signs, levels, steps and centers of all layers."""
    host: int
    """Block tables and reference counts, in the CPU's memory."""

    @property
    def device(self) -> int:
        """Bytes on the pool's device: all but `host`."""
        return self.pages + self.tail + self.tables


class Sizes(NamedTuple):
    """How large a pool is; the arguments of PagedKVPool, checked by `Sizes.of`."""

    configs: tuple[CacheConfig, ...]
    num_kv_heads: int
    num_pages: int
    max_seqs: int
    dtype: torch.dtype
    max_seq_len: int | None
    max_q_len: int

    @classmethod
    def of(
        cls,
        config: Configs,
        num_layers: int,
        num_kv_heads: int,
        num_pages: int,
        max_seqs: int,
        dtype: torch.dtype,
        max_seq_len: int | None,
        max_q_len: int,
    ) -> Sizes:
        """One config per layer, and numbers that make sense.

        Raises:
            TypeError: another dtype.
            ValueError: numbers below 1, configs that do not fit together.
        """
        _checks.check_output_dtype(dtype)
        _checks.check_positive(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            num_pages=num_pages,
            max_seqs=max_seqs,
            max_seq_len=1 if max_seq_len is None else max_seq_len,
            max_q_len=max_q_len,
        )
        num_layers, num_kv_heads, num_pages = int(num_layers), int(num_kv_heads), int(num_pages)
        max_seqs, max_q_len = int(max_seqs), int(max_q_len)
        max_seq_len = None if max_seq_len is None else int(max_seq_len)
        configs = (config,) * num_layers if isinstance(config, CacheConfig) else tuple(config)
        if len(configs) != num_layers:
            raise ValueError(f"{len(configs)} configs for {num_layers} layers")
        for name in ("page_size", "sink_tokens", "recent_window"):
            values = sorted({getattr(c, name) for c in configs})
            if len(values) > 1:
                raise ValueError(f"all layers of a pool have one {name}, got {values}")
        return cls(configs, num_kv_heads, num_pages, max_seqs, dtype, max_seq_len, max_q_len)

    def bytes(self, centers: bool | Centers | None) -> PoolBytes:
        """Bytes of a pool of these sizes; centers: as for the pool, or True: with scales."""
        if isinstance(centers, bool):
            rows_of_centers = [3 * centers * self.num_kv_heads] * len(self.configs)
        else:
            checked = self.centers(centers)
            rows_of_centers = [0 if x is None else x.numel() // x.shape[-1] for x in checked]
        constants = {c: nbytes(make_tables(c, 0)) for c in set(self.configs)}
        pages = tail = tables = 0
        for c, center_rows in zip(self.configs, rows_of_centers, strict=True):
            pages += self.num_pages * self.num_kv_heads * c.record_bytes
            if c.has_tail:
                shape = tail_shape(c, self.max_seqs, self.num_kv_heads, self.max_q_len)
                tail += int(np.prod(shape, dtype=object)) * self.dtype.itemsize
            tables += constants[c] + center_rows * c.head_dim * 4
        page_size = self.configs[0].page_size
        longest = self.num_pages * page_size if self.max_seq_len is None else self.max_seq_len
        host = 4 * (self.max_seqs * -(-longest // page_size) + 4 * self.num_pages)
        return PoolBytes(pages, tail, tables, host)

    def centers(self, centers: Centers | None) -> list[Tensor | None]:
        """One center per layer, as make_tables takes it.

        Raises:
            ValueError: another number of layers, another shape, NaN or infinity.
        """
        centers = [None] * len(self.configs) if centers is None else list(centers)
        if len(centers) != len(self.configs):
            raise ValueError(f"{len(centers)} centers for {len(self.configs)} layers")
        for layer, (center, c) in enumerate(zip(centers, self.configs, strict=True)):
            if center is not None:
                name = f"center of layer {layer}"
                _checks.check_dtype(name, center, _checks.FLOATS)
                shape = (self.num_kv_heads, c.head_dim)
                _checks.check_shape(name, center, shape if center.dim() == 2 else (3, *shape))
                if not torch.isfinite(center).all():
                    raise ValueError(f"{name} holds NaN or infinity")
        return centers


class PoolMemory:
    """Pages, tails and tables of all layers on one device; it knows no sequence.

    Attributes:
        sizes, device.
        pages: per layer, uint8 [num_pages, num_kv_heads, record_bytes].
        tails: per layer, [max_seqs, num_kv_heads, sink_tokens + ring, 2, head_dim]; None without.
        tables: CacheTables per layer.
        layers: PagedLayer per layer, of these tensors.
        fingerprint: what stored pages depend on, plain data.
    """

    @lasting()
    def __init__(self, sizes: Sizes, centers: Centers | None, device: torch.device | str) -> None:
        """Takes all memory."""
        self.sizes = sizes
        self.device = torch.empty(0, device=device).device  # "cuda" is one device, with a number
        self.tables: list[CacheTables] = self._make_tables(centers)
        self.pages: list[Tensor] = [
            allocate_cache(c, sizes.num_pages, sizes.num_kv_heads, self.device)
            for c in sizes.configs
        ]
        self.tails: list[Tensor] | None = None
        if sizes.configs[0].has_tail:
            shape = sizes.max_seqs, sizes.num_kv_heads, sizes.dtype, sizes.max_q_len
            self.tails = [allocate_tail(c, *shape, self.device) for c in sizes.configs]
        self.layers: list[PagedLayer] = []
        self._put_together()

    @lasting()
    def set_centers(self, centers: Centers | None) -> None:
        """Makes new tables; pages that were stored before have no meaning any more."""
        self.tables[:] = self._make_tables(centers)
        self._put_together()

    def _make_tables(self, centers: Centers | None) -> list[CacheTables]:
        pairs = zip(self.sizes.configs, self.sizes.centers(centers), strict=True)
        return [make_tables(c, i, self.device, center) for i, (c, center) in enumerate(pairs)]

    def _put_together(self) -> None:
        rings: Sequence[Tensor | None] = self.tails or [None] * len(self.pages)
        parts = self.pages, self.sizes.configs, self.tables, rings
        # in place: whoever holds the list sees the new tables
        self.layers[:] = [PagedLayer(*one) for one in zip(*parts, strict=True)]
        first = self.sizes.configs[0]
        self.fingerprint: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "kv_heads": self.sizes.num_kv_heads,
            "tail_dtype": str(self.sizes.dtype).removeprefix("torch.") if first.has_tail else None,
            "layers": [
                {
                    **asdict(c),
                    "key_levels": _digest(tables.key_levels),
                    "value_levels": _digest(tables.value_levels),
                    "center": _digest(tables.center),
                }
                for c, tables in zip(self.sizes.configs, self.tables, strict=True)
            ],
        }

    def bytes(self, host: int) -> PoolBytes:
        """Bytes of the tensors, beside `host` bytes of books."""
        tables = sum(nbytes(tables) for tables in self.tables)
        return PoolBytes(nbytes(self.pages), nbytes(self.tails or ()), tables, host)

    def check_layer(self, layer: int) -> None:
        _checks.check_whole(layer=layer)
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"layer is {layer}, supported: 0 to {len(self.layers) - 1}")

    def put(self, array: np.ndarray) -> Tensor:
        """The array on the device, without waiting; on the CPU both share their memory."""
        return self.host(array).to(self.device, non_blocking=True)

    def host(self, array: np.ndarray) -> Tensor:
        """The array in memory that a GPU can copy from while the CPU goes on."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def copy_pages(self, old: np.ndarray, new: np.ndarray) -> None:
        """Copies pages of all layers; old, new: int64 page numbers."""
        if len(old):
            source, target = self.put(old), self.put(new)
            for pages in self.pages:
                pages.index_copy_(0, target, pages.index_select(0, source))

    def copy_tail(self, old: int, new: int) -> None:
        """Copies an entry of the tails of all layers."""
        for tail in self.tails or ():
            tail[new] = tail[old]


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of tensors, where None has none."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _digest(tensor: Tensor | None) -> str | None:
    if tensor is None:
        return None
    return hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
