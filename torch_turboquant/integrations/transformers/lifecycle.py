"""The life of a forward on a cache, from its plan to its commit; all of it stands here.

    begin          before the decoder's forward: sequences.begin plans it, or refuses it
    for each layer
        update     transformers hands over keys and values (layer.TurboQuantLayer)
        attended   the attention function: an exact forward's tokens are noted here, as Pending, and
                   the model's own attention runs; every other forward stores them and attends over
                   the pages
    end            after the decoder's forward: pending tokens are settled and the counts move, or
                   the forward has failed and its tokens were never there

An exact forward (the prompt) is settled later than it is attended, because the centers of several
layers are learned by one call, and because what it stores is needed by the next forward only.
Settling has four parts: learn centers, evict tokens, allocate memory, encode. They come in this
order so that centers are those of all tokens, and the memory takes the place of what has gone. The
scores by which tokens are evicted come earlier: `attended` sees the queries.

This module knows sequences and layers. What calls it around the decoder (binding.py) and the user's
object (cache.py) know this module.
"""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torch_turboquant._autograd import lasting
from torch_turboquant.eviction import OBSERVED, kept_tokens
from torch_turboquant.integrations.transformers.centers import learn, query_energies
from torch_turboquant.integrations.transformers.layer import TurboQuantLayer
from torch_turboquant.integrations.transformers.sequences import Forward, Sequences
from torch_turboquant.integrations.transformers.tensors import zeros_together

T = TypeVar("T")

# Tokens of a batch in all layers that are settled together, at most but for the last layer's: the
# host needs longer to launch the kernels that learn a center than a GPU to read so many tokens.
_TOGETHER = 8192
# Layers whose queries are kept until they are measured: they may be many times as large as keys.
_QUERIES_TOGETHER = 16


@dataclass(slots=True)
class Pending:
    """What an exact forward brought to a layer, [batch, heads, tokens, head_dim] each."""

    layer: TurboQuantLayer
    query: Tensor | None  # where scales of channels are to be learned, until it is measured
    key: Tensor
    value: Tensor
    scores: Tensor | None = None  # of tokens that may be evicted, float32 [batch, heads, tokens]
    energy: Tensor | None = None  # of the queries (query_energies)


class Exclusive:
    """At most one thread at a time has it, and every other one that wants it gets an error.

    The thread that has it may enter again.
    """

    def __init__(self) -> None:
        self.holder: dict[str, int] = {}  # one key: setdefault lets one thread be the first
        self.depth = 0

    def enter(self) -> None:
        me = threading.get_ident()
        holder = self.holder.setdefault("thread", me)
        if holder != me:
            if any(thread.ident == holder for thread in threading.enumerate()):
                raise RuntimeError(
                    "another thread uses this TurboQuantCache: give every thread a cache of its "
                    "own (several may be attached to one model), or wait until its forward is over"
                )
            self.holder["thread"], self.depth = me, 0  # it ended in the middle of a forward
        self.depth += 1

    def leave(self) -> None:
        self.depth -= 1
        if self.depth <= 0:
            self.depth = 0
            self.holder.clear()

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *exc: object) -> None:
        self.leave()

    def __reduce__(self) -> tuple[Any, ...]:
        return Exclusive, ()  # a copy is another cache's


class States:
    """The layers that have a state instead of keys and values, those of transformers.

    When such a layer is reset it keeps its tensors, because graphs know their addresses. They fit
    a batch of the same size only.
    """

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.rows = 0  # sequences of the states; 0: there are none yet
        self._fresh = copy.deepcopy(layers)

    def begin(self, batch: int) -> None:
        """A first prompt of so many sequences."""
        if self.rows not in (0, batch):
            for layer, fresh in zip(self.layers, copy.deepcopy(self._fresh), strict=True):
                vars(layer).clear()
                vars(layer).update(vars(fresh))
        self.rows = batch


class Lifecycle:
    """The forwards of one cache, one at a time."""

    def __init__(self, sequences: Sequences, layers: list[TurboQuantLayer], states: States) -> None:
        self.sequences, self.layers, self.states = sequences, layers, states
        self.pending: list[Pending] = []
        self.exclusive = Exclusive()

    def __reduce__(self) -> tuple[Any, ...]:
        return Lifecycle, (self.sequences, self.layers, self.states)

    @property
    def exact(self) -> bool:
        """Whether the running forward attends with the model's own attention."""
        return self.sequences.forward.exact

    def begin(self, batch: int, new: int, attention_mask: Any, position_ids: Any) -> None:
        """Plans a forward of `new` columns, or raises before anything has been written."""
        if self.pending:  # of a forward that was interrupted where nobody could tell
            self.pending = []
        self.sequences.begin(batch, new, attention_mask, position_ids)
        if self.states.layers and not self.sequences.batch:
            self.states.begin(batch)

    def attended(
        self,
        layer: TurboQuantLayer,
        module: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None = None,
    ) -> bool:
        """After a layer's `update`: whether the model's own attention runs on these tensors.

        It does in an exact forward, whose tokens are noted here and settled later. Learning and
        eviction need the query [batch, heads, new, head_dim], which `update` does not see; scaling
        is the factor of its scores (None: 1 / sqrt(head_dim)).
        """
        attended, (key, value) = (key, value), layer.take_back(module, key, value)
        forward = self.sequences.forward
        if forward.exact:
            kept = query if forward.learns_scales else None
            scores = None
            if forward.evicts and layer.thinned:
                scores = _score(layer, query, *attended, scaling, forward)
            self.pending.append(Pending(layer, kept, key.to(layer.dtype), value, scores))
            layers = len(self.pending)
            if layers * forward.batch * forward.total >= _TOGETHER:
                self._settle()
            elif layers % _QUERIES_TOGETHER == 0:
                _measure(self.pending, forward)
        return forward.exact

    def end(self, succeeded: bool = True) -> None:
        """The planned forward has gone through all layers, or has failed."""
        sequences, forward = self.sequences, self.sequences.forward
        if succeeded:
            if forward.handed:
                self.end(succeeded=False)
                raise RuntimeError(
                    f"the attention of layer {min(forward.handed)} did not go through "
                    "transformers' AttentionInterface, which TurboQuantCache needs"
                )
            if self.pending:
                try:
                    self._settle()
                except BaseException:
                    self.end(succeeded=False)
                    raise
            sequences.commit()
        else:
            if self.pending:
                self.pending = []
            sequences.abort()
        if not forward.traced:
            for layer in self.layers:
                layer.finish()

    def _settle(self) -> None:
        """Gives pending tokens what they still need: centers, memory, their codes."""
        pending, self.pending = self.pending, []
        sequences, forward = self.sequences, self.sequences.forward
        if forward.encode and not sequences.center_known:
            _measure(pending, forward)
            _learn(pending, forward)
        if forward.evicts:
            _evict(pending, forward)
        if forward.encode or sequences.max_len:
            allocate([one.layer for one in pending])
        if forward.encode:
            _store(pending, forward)


def _measure(pending: list[Pending], forward: Forward) -> None:
    """Measures the queries that a center is learned from, and lets go of them."""
    held = [one for one in pending if one.query is not None]

    def key(one: Pending) -> Any:
        return one.layer.device, one.query.dtype, one.query.shape, one.layer.kv_heads

    for group in _alike(held, key):
        queries = [one.query for one in group]
        energies = query_energies(queries, group[0].layer.kv_heads, forward)
        for one, energy in zip(group, energies.unbind(), strict=True):
            one.query, one.energy = None, energy


def _learn(pending: list[Pending], forward: Forward) -> None:
    for group in _alike(pending, lambda one: (one.layer.device, one.layer.dtype, one.key.shape)):
        first = group[0].layer
        centers = learn(
            [one.key for one in group],
            [one.energy for one in group if one.energy is not None],
            forward,
            first.constants.on(first.device).partners,
        )
        for one, center in zip(group, centers.unbind(), strict=True):
            one.layer.take_center(center)


def _score(
    layer: TurboQuantLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    forward: Forward,
) -> Tensor:
    """What the layer's policy gives to the tokens that attention gets, padding included.

    A latent row serves all heads: its score is the mean of theirs.
    """
    factor = 1.0 if scaling is None else scaling * query.shape[3] ** 0.5
    observed = query[:, :, -OBSERVED:] * factor
    scores = layer.eviction.scores(observed, key, value, forward.lengths(forward.total))
    return scores.unflatten(1, (layer.kv_heads, -1)).mean(2)


def _evict(pending: list[Pending], forward: Forward) -> None:
    """Leaves of the pending tokens those that stay, and less padding."""
    lengths = forward.lengths(forward.total)
    for one in pending:
        if one.scores is not None:
            columns = one.layer.eviction.columns(one.scores, lengths)
            one.key, one.value = kept_tokens(one.key, columns), kept_tokens(one.value, columns)
            one.scores = None


@lasting()
def allocate(layers: list[TurboQuantLayer]) -> None:
    """Memory for what layers are about to store; the first pages of equal layers are one piece.

    Their tails are another one, for a piece lives as long as a part of it is in use, and pages are
    outgrown. The static form takes its memory layer by layer, because torch.compile treats tensors
    that are written and share memory as one.
    """
    together = []
    for layer in layers:
        if layer.paged is not None:
            layer.reserve()
        elif layer.sequences.static:
            zeros = [torch.zeros(s, dtype=t, device=layer.device) for s, t in layer.wanted()]
            layer.take_memory(*zeros)
        else:
            together.append(layer)
    for group in _alike(together, lambda layer: (layer.device, *layer.wanted())):
        first = group[0]
        pieces = [zeros_together(len(group), s, t, first.device) for s, t in first.wanted()]
        for layer, *tensors in zip(group, *pieces, strict=True):
            layer.take_memory(*tensors)


def _store(pending: list[Pending], forward: Forward) -> None:
    """Encodes the tokens, of equal layers in one call of the op; `update` has checked them."""

    def key(one: Pending) -> Any:
        layer = one.layer
        return layer.device, layer.owned_pages, layer.thinned, id(layer.config), one.key.shape

    for group in _alike(pending, key):
        first = group[0].layer
        piece = first.piece(0)
        # nobody wants gradients (`update` has seen to that): without their records the op takes
        # less of the host's time
        with torch.inference_mode():
            tokens = [(one.key, one.value) for one in group]
            first.store_together([one.layer for one in group], tokens, piece)


def _alike(items: Iterable[T], key: Callable[[T], Any]) -> Iterable[list[T]]:
    """The items in groups of one key."""
    groups: dict[Any, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups.values()
