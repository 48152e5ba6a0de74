"""One layer of the cache: its tensors, storing into them, attending over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from transformers.cache_utils import CacheLayerMixin

from torch_turboquant import _checks
from torch_turboquant._autograd import lasting
from torch_turboquant.batch import AttentionBatch, AttentionOptions
from torch_turboquant.eviction import Eviction
from torch_turboquant.integrations.transformers.compiling import uncompiled
from torch_turboquant.integrations.transformers.constants import ConstantsByDevice
from torch_turboquant.integrations.transformers.sequences import (
    Piece,
    Sequences,
    Step,
    chosen_tokens,
)
from torch_turboquant.integrations.transformers.tensors import check_not_meta, fixed
from torch_turboquant.integrations.transformers.uncompressed import AnyConfig
from torch_turboquant.layer import PagedLayer
from torch_turboquant.ops.cache import allocate_cache, call_store_layers
from torch_turboquant.tail import tail_shape

_NO_GRADIENT = "TurboQuantCache takes no gradient: run the model under torch.no_grad()"


class TurboQuantLayer(CacheLayerMixin):
    """Packed keys and values of one attention layer; made by TurboQuantCache.

    Tensors, all where the layer's keys come from: `pages` uint8 [max_batch_size * pages per
    sequence, kv_heads, record_bytes], `ring` (the exact tail) [max_batch_size, kv_heads, ring
    tokens, 2, head_dim] in the model's dtype, `tables` the constants of the codec. They are None
    before there are any. Until a center could be learned, `waiting` holds the first few keys and
    values as they came.

    In a forward, transformers calls `update` with new keys and values, and then the attention
    function of binding.py, which asks `take_back` for them and has `attend` store them. What
    happens to an exact forward's tokens is decided in lifecycle.py.
    """

    is_croppable = True
    has_one_call = True  # whether an op stores and attends at once
    config: Any  # an AnyConfig
    paged: Any  # once there is memory: a PagedLayer, or what a subclass has in its place

    def __init__(
        self,
        index: int,
        config: AnyConfig,
        sequences: Sequences,
        constants: ConstantsByDevice,
        sliding_window: int,
        eviction: Eviction,
    ) -> None:
        super().__init__()
        self.index, self.config, self.sequences = index, config, sequences
        self.constants = constants
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window > 0
        self.eviction = eviction
        self.thinned = eviction.evicts and not sliding_window  # whether its prompts lose tokens
        self.is_compileable = sequences.static
        self.kv_heads = 0  # until it is known with its dtype and device
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.tables: Any = None  # CacheTables, LatentTables or NoTables
        self.paged = None
        self.waiting: tuple[Tensor, Tensor] | None = None
        self._options_of_layer: AttentionOptions | None = None  # those of the last step

    @property
    def pages(self) -> Tensor | None:
        return None if self.paged is None else self.paged.pages

    @property
    def ring(self) -> Tensor | None:
        return None if self.paged is None else self.paged.ring

    # -- memory and constants

    def prepare(self, kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
        """What the layer is going to hold, and where."""
        self.kv_heads, self.dtype, self.device = kv_heads, dtype, device
        self.tables = self.constants.on(device).tables[self.index]
        self.paged = None
        if self.sequences.static:
            fixed(*self.tables)

    def check_shapes(self, key_states: Tensor, value_states: Tensor) -> None:
        """Raises where a model's keys and values are not those that its configuration promises."""
        if key_states.shape[3] != self.config.head_dim or value_states.shape != key_states.shape:
            raise ValueError(
                f"layer {self.index} has keys {list(key_states.shape)} and values "
                f"{list(value_states.shape)} [batch, heads, tokens, dim]; this cache supports "
                f"equal shapes with head_dim {self.config.head_dim}"
            )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.check_shapes(key_states, value_states)
        _, kv_heads, _, head_dim = key_states.shape
        # Under torch.autocast keys may be wider than values, because RoPE is. The attention of a
        # model has to find one type, and takes that of the values.
        holds = kv_heads, value_states.dtype, key_states.device
        if holds != (self.kv_heads, self.dtype, self.device):
            _checks.check_output_dtype(value_states.dtype)
            self.prepare(*holds)
        self.check_center(kv_heads, head_dim)
        self.is_initialized = True

    def check_center(self, kv_heads: int, head_dim: int) -> None:
        """Raises where a given center is not that of these heads."""
        center = self.tables.center
        if center is not None and center.shape[-2:] != (kv_heads, head_dim):
            raise ValueError(
                f"center of layer {self.index} has shape {list(center.shape)}, expected "
                f"[kv_heads, head_dim] = [{kv_heads}, {head_dim}], or 3 of these"
            )

    @property
    def owned_pages(self) -> int:
        """Pages of a sequence; the rest of its tokens the layer's window has left."""
        return self.sequences.window_pages(self.sliding_window, self.thinned)

    def piece(self, index: int) -> Piece:
        """The layer's tokens and memory in a piece of the running forward."""
        forward = self.sequences.forward
        return forward.piece(index, self.device, self.owned_pages, self.thinned)

    def wanted(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and types of the layer's pages, and of its ring if it has one."""
        pages = self.wanted_pages(self.owned_pages)
        return [pages, (self.ring_shape(), self.dtype)] if self.config.has_tail else [pages]

    def wanted_pages(self, owned: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of the layer's pages where a sequence owns so many."""
        return (self.sequences.rows * owned, self.kv_heads, self.config.record_bytes), torch.uint8

    def ring_shape(self) -> tuple[int, ...]:
        sequences = self.sequences
        return tail_shape(self.config, sequences.rows, self.kv_heads, sequences.max_q_len)

    def make_paged(self, pages: Tensor, ring: Tensor | None) -> Any:
        """What stores into this memory and attends over it."""
        return PagedLayer(pages, self.config, self.tables, ring)

    def take_memory(self, pages: Tensor, ring: Tensor | None = None) -> None:
        """The layer's first memory: zeros."""
        self.paged = self.make_paged(pages, ring)
        if self.sequences.static:
            self.sequences.counters_on(self.device, self.owned_pages, self.thinned)
            fixed(pages, ring)

    def take_center(self, center: Tensor) -> None:
        """A center that was learned; another one, after `reset`, goes where the first one was."""
        if self.tables.center is None:
            with lasting():
                center = center.clone()
            self.tables = self.tables._replace(center=center)
            if self.paged is not None:
                self.paged = self.make_paged(self.pages, self.ring)
            if self.sequences.static:
                fixed(center)
        else:
            self.tables.center.copy_(center)

    def reserve(self) -> None:
        """Makes room for the pages of all sequences; what is stored keeps its place in its row."""
        rows, pages = self.sequences.rows, self.owned_pages
        have = self.pages.shape[0] // rows
        if have >= pages:
            return
        ring = self.ring
        if not self.sequences.encoded:  # nothing is stored: old pages go before new ones come
            self.paged, have = None, 0
        with lasting():
            grown = self.empty_pages(pages)
            if have:
                grown.unflatten(0, (rows, pages))[:, :have] = self.pages.unflatten(0, (rows, have))
        self.paged = self.make_paged(grown, ring)

    def empty_pages(self, owned: int) -> Tensor:
        """Pages as in `wanted_pages`: zeros."""
        return allocate_cache(self.config, self.sequences.rows * owned, self.kv_heads, self.device)

    # -- copies and files

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a file needs: of pages and tail, what holds tokens.

        All in memory of its own, because a view is copied with all that it is a view of.
        """
        state = {name: x for name, x in vars(self).items() if name not in _MADE_ANEW}
        learned = self.sequences.learned_center and self.tables and self.tables.center
        state["center"] = learned.clone() if isinstance(learned, Tensor) else None
        if self.waiting is not None:
            state["waiting"] = tuple(x.clone() for x in self.waiting)
        state["memory"] = None
        if self.paged is not None:
            rows, batch = self.sequences.rows, self.sequences.batch
            pages = self.pages.unflatten(0, (rows, -1))
            used = self.sequences.pages_in_use(pages.shape[1], self.thinned)
            held = pages[:batch, :used].clone()
            ring = None if self.ring is None else self.ring[:batch].clone()
            state["memory"] = pages.shape[1], held, ring
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        center, memory = state["center"], state["memory"]
        self.__dict__.update(
            {name: x for name, x in state.items() if name not in ("center", "memory")}
        )
        self.tables = self.paged = self._options_of_layer = None
        held = memory[1] if memory else self.waiting and self.waiting[0]
        if held is None:
            self.kv_heads, self.is_initialized = 0, False
            return
        self.prepare(self.kv_heads, self.dtype, held.device)  # where a file was mapped to
        if center is not None:
            self.take_center(center)
        if memory:
            self._take_copy(*memory)

    @lasting()
    def _take_copy(self, owned: int, held: Tensor, kept: Tensor | None) -> None:
        """Memory of `owned` pages per sequence, of which these are the first, and of the tail."""
        pages, ring = self.empty_pages(owned), None
        by_row = pages.unflatten(0, (self.sequences.rows, owned))
        by_row[: held.shape[0], : held.shape[1]] = held
        if kept is not None:
            ring = torch.zeros(self.ring_shape(), dtype=self.dtype, device=self.device)
            ring[: len(kept)] = kept
        self.take_memory(pages, ring)
        self.sequences.push()

    # -- storing

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes new tokens: [batch, kv_heads, new, head_dim] each.

        Returns what attention (binding.py) expects: the new keys and values, which
        it recognises, not the whole sequence. Attention stores them (`attend`), or the end of an
        exact forward does (`store_together`).
        """
        forward = self.sequences.forward
        if forward is not None and not forward.traced and is_dynamo_compiling():
            return _update_uncompiled(self, key_states, value_states)
        if forward is None:
            raise RuntimeError(
                "this TurboQuantCache is not attached to this model; call cache.attach(model) "
                "(its update was called outside a forward of the model that it is attached to; a "
                "detached cache can be attached again)"
            )
        if not self.is_initialized:
            check_not_meta(key_states)
        if key_states.requires_grad or value_states.requires_grad:
            raise RuntimeError(_NO_GRADIENT)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif value_states.dtype != self.dtype:
            raise TypeError(
                f"layer {self.index} got values of {value_states.dtype}, but holds {self.dtype}: "
                "all forwards on a cache need the same dtype, and the same torch.autocast"
            )
        elif key_states.device != self.device:
            raise ValueError(
                f"layer {self.index} got keys on {key_states.device}, but is on {self.device}"
            )
        if forward.exact and forward.past > 0:
            held = [w[:, :, : forward.past] for w in self.waiting]
            key_states = torch.cat([held[0], key_states], dim=2)
            value_states = torch.cat([held[1], value_states], dim=2)
        handed = forward.handed[self.index] = key_states, value_states
        if forward.exact and not forward.encode:
            self.waiting = handed
        elif not forward.exact:
            self.reserve()
        return handed

    @staticmethod
    def store_together(
        layers: list[TurboQuantLayer], tokens: list[tuple[Tensor, Tensor]], piece: Piece
    ) -> None:
        """Encodes a prompt in layers that are alike, by one call of the op.

        tokens: of each layer, keys and values [batch, kv_heads, columns, head_dim].
        """
        first, paged = layers[0], [layer.paged for layer in layers]
        call_store_layers(
            [chosen_tokens(key, piece.real) for key, _ in tokens],
            [chosen_tokens(value, piece.real) for _, value in tokens],
            [layer.pages for layer in paged],
            first.config,
            [layer.tables for layer in paged],
            [] if first.ring is None else [layer.ring for layer in paged],
            piece.batch,
        )

    # -- attending

    def take_back(
        self, module: nn.Module | None, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The tokens to store, once attention got the keys and values that it has to get.

        Raises:
            RuntimeError: it got others than `update` has handed out.
        """
        handed = self.sequences.forward.handed.pop(self.index, None)
        if handed is None or key is not handed[0] or value is not handed[1]:
            if key.requires_grad or value.requires_grad:
                raise RuntimeError(_NO_GRADIENT)
            raise RuntimeError(
                f"{type(module).__name__} changes keys or values between the cache's update and "
                "attention (or shares them between layers), which TurboQuantCache does not support"
            )
        return handed

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Stores the tokens that `take_back` gave; attention of query over them and older ones.

        query: [batch, heads, new, head_dim].
        """
        forward = self.sequences.forward
        options = self._options(module, query, kwargs)
        new = [x if x.dtype is self.dtype else x.to(self.dtype) for x in (query, key, value)]
        outputs = []
        for index in range(len(forward.pieces)):
            piece = self.piece(index)
            q, k, v = (_tokens(x.transpose(1, 2), piece) for x in new)
            out = self.step(q, k, v, piece.batch, options)
            outputs.append(_columns(out, piece, forward.batch))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return out, None

    def keep(self, key: Tensor, value: Tensor) -> None:
        """Stores the tokens that `take_back` gave, for who attends in another way."""
        for index in range(len(self.sequences.forward.pieces)):
            piece = self.piece(index)
            k, v = (_tokens(x.to(self.dtype).transpose(1, 2), piece) for x in (key, value))
            self.paged.store(k, v, piece.batch)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, options: AttentionOptions
    ) -> Tensor:
        """Stores tokens, then attends over them and older ones; [tokens, heads, head_dim] each.

        One call of both reads all of its tokens as they are. That is right where the exact tail has
        them, too. Otherwise a token would be exact or not by what else is in its call.
        """
        if self.has_one_call and batch.max_q_len <= self.config.recent_window:
            out, _ = self.paged.store_and_attend(q, k, v, batch, options)
        else:
            self.paged.store(k, v, batch)
            out, _ = self.paged.attend(q, batch, options)
        return out

    def _options(
        self, module: nn.Module, query: Tensor, kwargs: dict[str, Any]
    ) -> AttentionOptions:
        """The keyword arguments of an attention function; refuses those without a meaning here."""
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
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        cap = float(kwargs.get("softcap") or 0.0)
        fixed_ones = sinks is None and not is_dynamo_compiling()  # torch.compile would trace again
        if fixed_ones and (known := self._options_of_layer):
            if (known.softmax_scale, known.soft_cap) == (scale, cap):
                return known
        options = AttentionOptions(
            softmax_scale=scale,
            sliding_window=self.sliding_window,
            soft_cap=cap,
            sink_logits=None if sinks is None else sinks.float(),
        )
        if fixed_ones:
            self._options_of_layer = options
        return options

    # -- what transformers asks

    def get_seq_length(self) -> int | Tensor:
        sequences = self.sequences
        if isinstance(sequences.forward, Step):
            return sequences.counters[self.device, self.thinned].columns
        sequences.pull()
        return sequences.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if isinstance(self.sequences.forward, Step):  # no mask is made, nothing may depend on data
            return self.get_max_length(), 0
        return self.sequences.columns + query_length, 0

    def get_max_length(self) -> int:
        return self.sequences.most_columns or -1

    def get_max_cache_shape(self) -> int:
        return self.get_max_length()

    def reset(self) -> None:
        """Forgets the tokens; keeps the memory."""
        self.waiting = None

    def select_rows(self, rows: Tensor) -> None:
        """Sequence i becomes the former sequence rows[i]: int64 [new batch] on the CPU.

        Only pages with tokens are copied: beam search does this in every step, and a cache may have
        memory for a context a hundred times as long.
        """
        if self.waiting is not None:
            keys, values = self.waiting
            chosen = rows.to(keys.device)
            self.waiting = keys.index_select(0, chosen), values.index_select(0, chosen)
        if self.paged is None:
            return
        pages = self.pages.unflatten(0, (self.sequences.rows, -1))
        used = self.sequences.pages_in_use(pages.shape[1], self.thinned)
        for by_row in (pages[:, :used], self.ring):
            if by_row is not None:
                by_row[: len(rows)] = by_row.index_select(0, rows.to(by_row.device))

    def finish(self) -> None:
        """After a forward that was not traced: lets go of tokens that are in pages now."""
        if self.sequences.encoded:
            self.waiting = None


_update_uncompiled = uncompiled(TurboQuantLayer.update)

# Attributes of a layer that a copy makes anew.
_MADE_ANEW = ("tables", "paged", "_options_of_layer")


def nbytes(t: Tensor | None) -> int:
    """Bytes of a tensor's elements; 0 without one."""
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
        x = x.new_zeros(batch * piece.batch.max_q_len, *x.shape[1:]).index_copy_(0, piece.real, x)
    return x.view(batch, piece.batch.max_q_len, *x.shape[1:])
