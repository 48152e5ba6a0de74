"""One layer of the cache: its tensors, storing into them, attending over them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from torch_turboquant import _checks
from torch_turboquant.config import CacheConfig
from torch_turboquant.integrations.transformers.centers import learn, query_energies
from torch_turboquant.integrations.transformers.sequences import (
    Forward,
    Piece,
    Sequences,
    Step,
    chosen_tokens,
    fixed,
    put_together,
    zeros_together,
)
from torch_turboquant.ops.attention import attend_checked
from torch_turboquant.ops.cache import (
    CacheTables,
    Tail,
    allocate_cache,
    make_center,
    make_tables,
    store_checked,
    store_layers_checked,
    tail_shape,
)

T = TypeVar("T")


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
            *centers, partners = put_together(
                [x.numpy() for x in (*self.centers.values(), self.partners)], device
            )
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
    arrays = [t.numpy() for table in host.values() for t in table if t is not None]
    placed = iter(put_together(arrays, device))
    if device.type == "cuda":  # once: another cache may use them on any stream
        torch.cuda.current_stream(device).synchronize()
    return {
        index: CacheTables(*(t if t is None else next(placed) for t in table))
        for index, table in host.items()
    }


@dataclass(slots=True)
class Unsettled:
    """What an exact forward brought to a layer, [batch, heads, tokens, head_dim] each."""

    layer: TurboQuantLayer
    query: Tensor | None  # where scales of channels are to be learned, until it is measured
    key: Tensor
    value: Tensor
    energy: Tensor | None = None  # of the queries (query_energies)


# Tokens of a batch in all layers that wait to be settled, at most but for the last layer's: the
# host needs longer to start what learns a center than a GPU to read so many tokens.
_TOGETHER = 8192
# Layers whose queries are kept until they are measured: they may be many times as large as keys.
_QUERIES_TOGETHER = 16


def settle(sequences: Sequences) -> None:
    """What layers still need of an exact forward: their centers, memory, their tokens stored."""
    forward = sequences.forward
    unsettled, forward.unsettled = forward.unsettled, []
    if forward.encode and not sequences.center_known:
        # ahead of the memory, which then takes the place of what this has needed
        measure(unsettled, forward)
        _learn(unsettled, sequences)
    if forward.encode or sequences.max_len:
        allocate([one.layer for one in unsettled])
    if forward.encode:
        _store(unsettled, forward)


def measure(unsettled: list[Unsettled], forward: Forward) -> None:
    """What a center needs to know of queries, of those layers that still hold theirs."""
    held = [one for one in unsettled if one.query is not None]

    def key(one: Unsettled) -> Any:
        return one.layer.device, one.query.dtype, one.query.shape, one.layer.kv_heads

    for group in _alike(held, key):
        queries = [one.query for one in group]
        energies = query_energies(queries, group[0].layer.kv_heads, forward)
        for one, energy in zip(group, energies.unbind(), strict=True):
            one.query, one.energy = None, energy


def _learn(unsettled: list[Unsettled], sequences: Sequences) -> None:
    for group in _alike(unsettled, lambda one: (one.layer.device, one.layer.dtype, one.key.shape)):
        first = group[0].layer
        centers = learn(
            [one.key for one in group],
            [one.energy for one in group if one.energy is not None],
            sequences.forward,
            first.constants.on(first.device).partners,
        )
        for one, center in zip(group, centers.unbind(), strict=True):
            one.layer.take_center(center)


def _store(unsettled: list[Unsettled], forward: Forward) -> None:
    def key(one: Unsettled) -> Any:
        layer = one.layer
        return layer.device, layer.owned_pages, id(layer.config), one.key.shape

    for group in _alike(unsettled, key):
        layers: list[Any] = [one.layer for one in group]  # Any: their tensors are there by now
        first = layers[0]
        piece = forward.piece(0, first.device, first.owned_pages)
        # nobody wants gradients (`update` has seen to that): without their records the op takes
        # less of the host's time
        with torch.inference_mode():
            store_layers_checked(
                [chosen_tokens(one.key, piece.real) for one in group],
                [chosen_tokens(one.value, piece.real) for one in group],
                [layer.pages for layer in layers],
                piece.slot_mapping,
                first.config,
                [layer.tables for layer in layers],
                [] if first.ring is None else [layer.ring for layer in layers],
                piece.tail_slots,
                piece.seq_lens,
                piece.cu_seqlens_q,
            )


def allocate(layers: list[TurboQuantLayer]) -> None:
    """Memory for what layers are about to store, the first one in one piece for all that are alike.

    Not in the static form: torch.compile takes tensors that are written and share memory for one.
    """
    together = []
    for layer in layers:
        if layer.pages is not None:
            layer.reserve()
        elif layer.sequences.static:
            zeros = [torch.zeros(s, dtype=t, device=layer.device) for s, t in layer.wanted()]
            layer.take_memory(*zeros)
        else:
            together.append(layer)
    for group in _alike(together, lambda layer: (layer.device, *layer.wanted())):
        memory = zeros_together(len(group), group[0].wanted(), group[0].device)
        for layer, tensors in zip(group, memory, strict=True):
            layer.take_memory(*tensors)


def _alike(items: Iterable[T], key: Callable[[T], Any]) -> Iterable[list[T]]:
    groups: dict[Any, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups.values()


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
        self.kv_heads = 0  # until it is known with its dtype and device
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.pages: Tensor | None = None
        self.ring: Tensor | None = None
        self.tables: CacheTables | None = None
        self.waiting: tuple[Tensor, Tensor] | None = None
        self._handed: tuple[Tensor, Tensor] | None = None

    # -- storing

    def prepare(self, kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
        """What the layer is going to hold, and where."""
        self.kv_heads, self.dtype, self.device = kv_heads, dtype, device
        self.tables = self.constants.on(device).tables[self.index]
        self.pages = self.ring = None
        if self.sequences.static:
            fixed(*self.tables)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        _, kv_heads, _, head_dim = key_states.shape
        if head_dim != self.config.head_dim or value_states.shape != key_states.shape:
            raise ValueError(
                f"layer {self.index} has keys {list(key_states.shape)} and values "
                f"{list(value_states.shape)} [batch, heads, tokens, dim]; this cache supports "
                f"equal shapes with head_dim {self.config.head_dim} (no latent attention)"
            )
        holds = kv_heads, key_states.dtype, key_states.device
        if holds != (self.kv_heads, self.dtype, self.device):
            _checks.check_output_dtype(key_states.dtype)
            self.prepare(*holds)
        center = self.tables.center
        if center is not None and center.shape[-2:] != (kv_heads, head_dim):
            raise ValueError(
                f"center of layer {self.index} has shape {list(center.shape)}, expected "
                f"[kv_heads, head_dim] = [{kv_heads}, {head_dim}], or 3 of these"
            )
        self.is_initialized = True

    @property
    def owned_pages(self) -> int:
        """Pages of a sequence; the rest of its tokens the layer's window has left."""
        return self.sequences.window_pages(self.sliding_window)

    def wanted(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and types of the layer's pages, and of its ring if it has one."""
        config, rows, heads = self.config, self.sequences.rows, self.kv_heads
        pages = (rows * self.owned_pages, heads, config.record_bytes)
        if not self.sequences.config.has_tail:
            return [(pages, torch.uint8)]
        ring = tail_shape(config, rows, heads, self.sequences.max_q_len)
        return [(pages, torch.uint8), (ring, self.dtype)]

    def take_memory(self, pages: Tensor, ring: Tensor | None = None) -> None:
        """The layer's first memory: zeros."""
        self.pages, self.ring = pages, ring
        if self.sequences.static:
            self.sequences.counters_on(self.device, self.owned_pages)
            fixed(pages, ring)

    def take_center(self, center: Tensor) -> None:
        """A center that was learned; another one, after `reset`, goes where the first one was."""
        if self.tables.center is None:
            self.tables = self.tables._replace(center=center)
            if self.sequences.static:
                fixed(center)
        else:
            self.tables.center.copy_(center)

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
        elif key_states.dtype != self.dtype:
            raise TypeError(
                f"layer {self.index} got keys of {key_states.dtype}, but holds {self.dtype}"
            )
        elif key_states.device != self.device:
            raise ValueError(
                f"layer {self.index} got keys on {key_states.device}, but is on {self.device}"
            )
        if forward.exact and forward.past > 0:
            held = [w[:, :, : forward.past] for w in self.waiting]
            key_states = torch.cat([held[0], key_states], dim=2)
            value_states = torch.cat([held[1], value_states], dim=2)
        self._handed = (key_states, value_states)
        if forward.exact and not forward.encode:
            self.waiting = self._handed
        elif not forward.exact:
            self.reserve()
            piece = forward.piece(0, self.device, self.owned_pages)
            self.store(piece, key_states.transpose(1, 2), value_states.transpose(1, 2))
        return self._handed

    def reserve(self) -> None:
        """Makes room for the pages of all sequences; what is stored keeps its place in its row."""
        rows, pages = self.sequences.rows, self.owned_pages
        have = self.pages.shape[0] // rows
        if have >= pages:
            return
        grown = allocate_cache(self.config, rows * pages, self.kv_heads, self.device)
        grown.unflatten(0, (rows, pages))[:, :have] = self.pages.unflatten(0, (rows, have))
        self.pages = grown

    def store(self, piece: Piece, keys: Tensor, values: Tensor) -> None:
        """Encodes the piece's columns of keys and values [batch, columns, kv_heads, head_dim]."""
        store_checked(
            _tokens(keys, piece),
            _tokens(values, piece),
            self.pages,
            piece.slot_mapping,
            self.config,
            self.tables,
            self._tail(piece),
            piece.seq_lens,
            piece.cu_seqlens_q,
        )

    def _tail(self, piece: Piece) -> Tail | None:
        return None if self.ring is None else Tail(self.ring, piece.tail_slots, piece.tail_valid)

    # -- attending

    def hand_on(self, module: nn.Module | None, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """After `update`: whether the model's own attention is to go on with these.

        An exact forward's tokens are stored later: centers of several layers are learned at once,
        and need the query [batch, heads, new, head_dim], which `update` does not see.
        """
        forward, handed = self.sequences.forward, self._handed
        if handed is None or key is not handed[0] or value is not handed[1]:
            raise RuntimeError(
                f"{type(module).__name__} changes keys or values between the cache's update and "
                "attention (or shares them between layers), which TurboQuantCache does not support"
            )
        self._handed = None
        if forward.exact:
            unsettled = forward.unsettled
            unsettled.append(Unsettled(self, query if forward.learns_scales else None, key, value))
            layers = len(unsettled)
            if layers * forward.batch * forward.total >= _TOGETHER:
                settle(self.sequences)
            elif layers % _QUERIES_TOGETHER == 0:
                measure(unsettled, forward)
        return forward.exact

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of query [batch, heads, new, head_dim] over the cache, after `hand_on`."""
        forward = self.sequences.forward
        options = self._options(module, query, kwargs)
        outputs = []
        for index in range(len(forward.pieces)):
            piece = forward.piece(index, self.device, self.owned_pages)
            if index > 0:  # update has stored the first one
                self.store(piece, key.transpose(1, 2), value.transpose(1, 2))
            out, _ = attend_checked(
                _tokens(query.transpose(1, 2), piece),
                self.pages,
                piece.block_table,
                piece.seq_lens,
                self.config,
                self.tables,
                piece.cu_seqlens_q,
                piece.max_q_len,
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
    """[batch, columns, heads, dim] -> the piece's [tokens, heads, dim] without padding."""
    if piece.columns is not None:
        x = x[:, piece.columns]
    x = x.flatten(0, 1)
    return x if piece.real is None else x.index_select(0, piece.real)


def _columns(x: Tensor, piece: Piece, batch: int) -> Tensor:
    """[tokens, heads, dim] -> [batch, columns, heads, dim], zeros where there is padding."""
    if piece.real is not None:
        x = x.new_zeros(batch * piece.max_q_len, *x.shape[1:]).index_copy_(0, piece.real, x)
    return x.unflatten(0, (batch, piece.max_q_len))
