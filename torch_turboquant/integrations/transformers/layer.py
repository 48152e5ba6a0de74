"""One layer of the cache: its tensors, storing into them, attending over them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from torch_turboquant.attention import paged_attention
from torch_turboquant.cache import (
    CacheTables,
    Tail,
    allocate_cache,
    allocate_tail,
    cache_store,
    make_center,
    make_tables,
)
from torch_turboquant.config import CacheConfig
from torch_turboquant.integrations.transformers.centers import learn
from torch_turboquant.integrations.transformers.sequences import (
    Forward,
    Piece,
    Sequences,
    Step,
    fixed,
    put_together,
)


class Constants(NamedTuple):
    """What all layers need and nothing changes, on one device."""

    tables: dict[int, CacheTables]  # of each layer; without a center that is to be learned
    partners: Tensor  # channels that RoPE turns into each other (rotary_partners)


class ConstantsByDevice:
    """Constants wherever layers run."""

    def __init__(
        self,
        configs: dict[int, CacheConfig],
        centers: Mapping[int, Tensor],
        partners: Tensor,
    ) -> None:
        """Of each layer its config and, unless that is to be learned or off, its center."""
        self.configs, self.partners = tuple(configs.items()), partners
        self.centers = {i: make_center(c, configs[i].head_dim) for i, c in centers.items()}
        self.known: dict[torch.device, Constants] = {}

    def on(self, device: torch.device) -> Constants:
        if device not in self.known:
            tables = dict(_tables_on(self.configs, device))
            *centers, partners = put_together([*self.centers.values(), self.partners], device)
            for index, center in zip(self.centers, centers, strict=True):
                tables[index] = tables[index]._replace(center=center)
            self.known[device] = Constants(tables, partners)
        return self.known[device]


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _tables_on(
    configs: tuple[tuple[int, CacheConfig], ...], device: torch.device
) -> dict[int, CacheTables]:
    """Tables of layers without their centers; all caches of such layers share them."""
    host = {index: make_tables(config, index) for index, config in configs}
    tensors = [t for table in host.values() for t in table if t is not None]
    placed = iter(put_together(tensors, device))
    if device.type == "cuda":  # once: another cache may use them on any stream
        torch.cuda.current_stream(device).synchronize()
    return {
        index: CacheTables(*(t if t is None else next(placed) for t in table))
        for index, table in host.items()
    }


class Unsettled(NamedTuple):
    """What one forward brought to a layer whose center it is to be learned from."""

    layer: TurboQuantLayer
    query: Tensor  # [batch, heads, new, head_dim]
    key: Tensor  # [batch, kv_heads, tokens, head_dim]
    value: Tensor


# Tokens of a batch in all layers that wait for their centers, at most but for the last layer's: the
# host needs longer to start what learns a center than a GPU to read so many tokens.
_TOGETHER = 8192


def settle(forward: Forward) -> None:
    """Learns the centers of all layers that wait for it, then stores what they were handed."""
    unsettled, forward.unsettled = forward.unsettled, []
    alike: dict[Any, list[Unsettled]] = defaultdict(list)
    for one in unsettled:
        alike[one.layer.device, one.query.shape, one.key.shape].append(one)
    for group in alike.values():
        first = group[0].layer
        centers = learn(
            [one.key for one in group],
            [one.query for one in group],
            forward,
            first.constants.on(first.device).partners,
            scaled=first.sequences.learned_center == "auto",
        )
        for one, center in zip(group, centers, strict=True):
            one.layer.store_with(center, one.key, one.value)


class TurboQuantLayer(CacheLayerMixin):
    """Packed keys and values of one attention layer; made by TurboQuantCache.

    Tensors, all where the layer's keys come from: `pages` uint8 [max_batch_size * pages per
    sequence, kv_heads, record_bytes], `ring` (the exact tail) [max_batch_size, kv_heads, ring
    tokens, 2, head_dim] in the model's dtype, `tables` the constants of the codec. Until a center
    could be learned, `waiting` holds the first few keys and values as they came.
    """

    is_croppable = True

    def __init__(
        self,
        index: int,
        config: CacheConfig,
        sequences: Sequences,
        constants: ConstantsByDevice,
        sliding_window: int,
    ) -> None:
        super().__init__()
        self.index, self.config, self.sequences = index, config, sequences
        self.constants = constants
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window > 0
        self.is_compileable = sequences.static
        self.pages: Tensor | None = None
        self.ring: Tensor | None = None
        self.tables: CacheTables | None = None
        self.waiting: tuple[Tensor, Tensor] | None = None
        self._handed: tuple[Tensor, Tensor] | None = None

    # -- storing

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        _, self.kv_heads, _, head_dim = key_states.shape
        if head_dim != self.config.head_dim or value_states.shape != key_states.shape:
            raise ValueError(
                f"layer {self.index} has keys {list(key_states.shape)} and values "
                f"{list(value_states.shape)} [batch, heads, tokens, dim]; this cache supports "
                f"equal shapes with head_dim {self.config.head_dim} (no latent attention)"
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.tables = self.constants.on(self.device).tables[self.index]
        center = self.tables.center
        if center is not None and center.shape[-2:] != (self.kv_heads, head_dim):
            raise ValueError(
                f"center of layer {self.index} has shape {list(center.shape)}, expected "
                f"[kv_heads, head_dim] = [{self.kv_heads}, {head_dim}], or 3 of these"
            )
        if self.sequences.learned_center:
            scaled = self.sequences.learned_center == "auto"
            shape = (3, self.kv_heads, head_dim) if scaled else (self.kv_heads, head_dim)
            self.tables = self.tables._replace(center=torch.zeros(shape, device=self.device))
        if self.sequences.has_tail:
            self.ring = allocate_tail(
                self.config,
                self.sequences.rows,
                self.kv_heads,
                self.dtype,
                max_q_len=self.sequences.max_q_len,
                device=self.device,
            )
        if self.sequences.max_len:
            self._reserve()
            self.sequences.counters_on(self.device, self._pages)
            if self.sequences.static:
                fixed(self.pages, self.ring, *self.tables)
        self.is_initialized = True

    @property
    def _pages(self) -> int:
        """Pages of a sequence; the rest of its tokens the layer's window has left."""
        return self.sequences.window_pages(self.sliding_window)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores new tokens: [batch, kv_heads, new, head_dim] each.

        Returns what the attention function of this module expects: the new keys and values, which
        it recognises, not the whole sequence.
        """
        forward = self.sequences.forward
        if forward is None:
            raise RuntimeError(
                "TurboQuantCache.update was called outside a forward of the model that the cache "
                "is attached to (a detached cache can be attached again: cache.attach(model))"
            )
        if key_states.requires_grad or value_states.requires_grad:
            raise RuntimeError(
                "TurboQuantCache takes no gradient: run the model under torch.no_grad()"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if forward.exact and forward.past > 0:
            held = [w[:, :, : forward.past] for w in self.waiting]
            key_states = torch.cat([held[0], key_states], dim=2)
            value_states = torch.cat([held[1], value_states], dim=2)
        self._handed = (key_states, value_states)
        if forward.exact and not forward.encode:
            self.waiting = self._handed
        elif self.sequences.center_known:
            self._reserve()
            self._store(forward.piece(0, self.device, self._pages), key_states, value_states)
        return self._handed

    def settle(self, query: Tensor) -> None:
        """After `update`: has a center learned, if this forward learns one, and then stores.

        query: [batch, heads, new, head_dim]. The scales of channels need it, so `update` cannot.
        """
        forward = self.sequences.forward
        if forward.encode and not self.sequences.center_known and self._handed is not None:
            forward.unsettled.append(Unsettled(self, query, *self._handed))
            if len(forward.unsettled) * forward.batch * forward.total >= _TOGETHER:
                settle(forward)
        self._handed = None

    def store_with(self, center: Tensor, keys: Tensor, values: Tensor) -> None:
        """Takes a center that was learned, and stores all tokens of this forward with it."""
        self.tables.center.copy_(center)
        self._reserve()
        self._store(self.sequences.forward.piece(0, self.device, self._pages), keys, values)

    def _reserve(self) -> None:
        """Makes room for the pages of all sequences; what is stored keeps its place in its row."""
        rows, pages = self.sequences.rows, self._pages
        have = 0 if self.pages is None else self.pages.shape[0] // rows
        if have >= pages:
            return
        grown = allocate_cache(self.config, rows * pages, self.kv_heads, self.device)
        if have:
            grown.unflatten(0, (rows, pages))[:, :have] = self.pages.unflatten(0, (rows, have))
        self.pages = grown

    def _store(self, piece: Piece, keys: Tensor, values: Tensor) -> None:
        """Encodes the piece's columns of keys and values [batch, kv_heads, columns, head_dim]."""
        cache_store(
            _tokens(keys, piece),
            _tokens(values, piece),
            self.pages,
            piece.slot_mapping,
            self.config,
            self.tables,
            tail=self._tail(piece),
            seq_lens=piece.seq_lens,
            cu_seqlens_q=piece.cu_seqlens_q,
        )

    def _tail(self, piece: Piece) -> Tail | None:
        return None if self.ring is None else Tail(self.ring, piece.tail_slots, piece.tail_valid)

    # -- attending

    def attend(
        self,
        original: Callable[[], Callable[..., Any]],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of query [batch, heads, new, head_dim] over the cache, after `update`.

        original: returns the attention that the model had before.
        """
        forward, handed = self.sequences.forward, self._handed
        if handed is None or key is not handed[0] or value is not handed[1]:
            raise RuntimeError(
                f"{type(module).__name__} changes keys or values between the cache's update and "
                "attention (or shares them between layers), which TurboQuantCache does not support"
            )
        self.settle(query)
        if forward.exact:
            return original()(module, query, key, value, attention_mask, **kwargs)
        options = self._options(module, query, kwargs)
        outputs = []
        for index in range(len(forward.pieces)):
            piece = forward.piece(index, self.device, self._pages)
            if index > 0:  # update has stored the first one
                self._store(piece, key, value)
            out, _ = paged_attention(
                _tokens(query, piece),
                self.pages,
                piece.block_table,
                piece.seq_lens,
                self.config,
                self.tables,
                cu_seqlens_q=piece.cu_seqlens_q,
                max_q_len=piece.max_q_len,
                tail=self._tail(piece),
                **options,
            )
            outputs.append(_columns(out, piece, forward.batch))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return out, None

    def _options(self, module: nn.Module, query: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The attention function's keyword arguments as paged_attention's; refuses the others."""
        refused = [
            name
            for name, value in kwargs.items()
            if name not in _KNOWN_KWARGS and isinstance(value, Tensor)
        ]
        if kwargs.get("dropout"):
            refused.append("dropout")
        if kwargs.get("output_attentions"):
            refused.append("output_attentions")
        causal = kwargs.get("is_causal")
        if (getattr(module, "is_causal", True) if causal is None else causal) is False:
            refused.append("is_causal=False")
        if refused:
            raise ValueError(
                f"{type(module).__name__} asks for {', '.join(refused)}, which TurboQuantCache "
                "does not support; it supports scaling, softcap, sliding_window and s_aux (sinks)"
            )
        window = kwargs.get("sliding_window") or 0
        if window and window != self.sliding_window:
            raise ValueError(
                f"layer {self.index} attends with sliding_window={window}, its configuration and "
                f"masks say {self.sliding_window} (0: none)"
            )
        sinks = kwargs.get("s_aux")
        scaling = kwargs.get("scaling")
        return {
            "softmax_scale": query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            "sliding_window": self.sliding_window,
            "soft_cap": float(kwargs.get("softcap") or 0.0),
            "sink_logits": None if sinks is None else sinks.float(),
        }

    # -- what transformers asks

    def get_seq_length(self) -> int | Tensor:
        sequences = self.sequences
        if isinstance(sequences.forward, Step):
            return sequences.counters[self.device].columns
        sequences.pull()
        return sequences.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if isinstance(self.sequences.forward, Step):  # no mask is made, nothing may depend on data
            return self.get_max_length(), 0
        return self.sequences.columns + query_length, 0

    def get_max_length(self) -> int:
        return self.sequences.max_len or -1

    def get_max_cache_shape(self) -> int:
        return self.get_max_length()

    def reset(self) -> None:
        """Forgets the tokens; keeps the memory."""
        self.waiting = self._handed = None

    def select_rows(self, rows: Tensor) -> None:
        """Sequence i becomes the former sequence rows[i]: int64 [new batch] on the CPU."""
        if self.waiting is not None:
            keys, values = self.waiting
            chosen = rows.to(keys.device)
            self.waiting = keys.index_select(0, chosen), values.index_select(0, chosen)
        for tensor in (self.pages, self.ring):
            if tensor is not None:
                by_row = tensor.unflatten(0, (self.sequences.rows, -1))
                by_row[: len(rows)] = by_row.index_select(0, rows.to(tensor.device))

    def finish(self) -> None:
        """After a forward: lets go of what only it needed."""
        self._handed = None
        if self.sequences.encoded:
            self.waiting = None


def nbytes(t: Tensor | None) -> int:
    """Of a tensor's numbers; 0 without one."""
    return 0 if t is None else t.nbytes


_KNOWN_KWARGS = frozenset(
    # read here, or of no consequence to attention once keys carry their positions
    "scaling softcap sliding_window s_aux position_ids cache_position token_type_ids input_ids "
    "position_embeddings logits_to_keep num_items_in_batch labels".split()
)


def _tokens(x: Tensor, piece: Piece) -> Tensor:
    """[batch, heads, columns, dim] -> the piece's [tokens, heads, dim] without padding."""
    x = x[:, :, piece.columns].transpose(1, 2).flatten(0, 1)
    return x if piece.real is None else x.index_select(0, piece.real)


def _columns(x: Tensor, piece: Piece, batch: int) -> Tensor:
    """[tokens, heads, dim] -> [batch, columns, heads, dim], zeros where there is padding."""
    if piece.real is not None:
        x = x.new_zeros(batch * piece.max_q_len, *x.shape[1:]).index_copy_(0, piece.real, x)
    return x.unflatten(0, (batch, piece.max_q_len))
