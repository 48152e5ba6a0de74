"""Packed layers that read the same input are one product.

A model multiplies the same tensor with several weights: with those of queries, keys and values, and
with those of gate and up. On a GPU a product takes some microseconds before it multiplies anything:
it starts, and rotates and rounds its input. So the weights of such siblings become neighbours in
memory. The sibling that is called first multiplies with all of them, and the others, which the
model calls with the same tensor, hand out what is theirs.

Nothing else changes. Parameters keep their names and bytes; they are views of one piece of memory,
each with a storage of its own, so that files and tools see no shared tensors. Siblings that turn
out to get different tensors, or whose weights come and go (offloading), part for good.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from torch_turboquant.format import WEIGHT_ROWS

if TYPE_CHECKING:
    from torch_turboquant.weights import PackedLinear

# How often calls find other weights and put them together, before siblings part: a model is changed
# a few times, but one that is offloaded gets other weights in every forward.
_MOST_CHANGES = 8
# How many results in a row nobody has asked for, before they part.
_MOST_UNUSED = 4

# What waits for layers while torch.compile traces a model, by the number of the siblings. It is
# empty before and behind a trace. (A compiled step writes attributes that a trace has set, even if
# they are what they were: of all siblings, where it clears this dictionary once.)
_IN_TRACE: dict[int, tuple[Tensor, dict[int, Tensor]]] = {}
_numbers = itertools.count()


class Siblings:
    """Layers that are called with the same tensor, one after the other; made by `join`."""

    def __init__(self, layers: Iterable[PackedLinear]) -> None:
        self.layers = tuple(layers)
        self.sizes = [layer.out_features for layer in self.layers]
        self.weight: Tensor | None = None  # of all layers; None: theirs are not together
        self.bias: Tensor | None = None
        self.addresses: list[int] = []  # where their parameters were put
        self.changes = self.unused = 0
        # the tensor that the first one got, and by place among the layers what the others give
        self.waiting: tuple[Tensor, dict[int, Tensor]] | None = None
        self.number = next(_numbers)
        for place, layer in enumerate(self.layers):
            layer._siblings, layer._place = self, place

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # copies of layers stand alone

    def part(self) -> None:
        """They are layers of their own from now on."""
        for layer in self.layers:
            layer._siblings = None
        self.waiting = None

    def look(self) -> None:
        """A layer may have got other parameters."""
        if self.weight is not None and not self._are_slices():
            self.weight = self.bias = self.waiting = None

    @torch.no_grad()
    def put_together(self) -> None:
        """Makes one tensor of the weights, if they are there and on one device."""
        self.look()
        weights = [layer._parameters["weight"] for layer in self.layers]
        biases = [layer._parameters["bias"] for layer in self.layers]
        held = [t for t in (*weights, *biases) if t is not None]
        # inference tensors cannot be moved, and subclasses of tensors have their own memory
        usual = all(type(t) is nn.Parameter and not t.is_inference() for t in held)
        devices = {t.device for t in held}
        alike = len(devices) == 1 and len({None if t is None else t.dtype for t in biases}) == 1
        if self.weight is not None or not (usual and alike) or devices == {torch.device("meta")}:
            return
        with torch.inference_mode(False):
            self.weight = _joined(weights)
            self.bias = None if biases[0] is None else _joined(biases)
        self.addresses = self._addresses()

    def output(self, layer: PackedLinear, x: Tensor) -> Tensor | None:
        """The output of one of the layers for x; None: it is to be computed alone."""
        if torch.compiler.is_dynamo_compiling():
            return self._traced_output(layer, x)
        waiting, place = self.waiting, layer._place
        if waiting is not None:
            if waiting[0] is x and place in waiting[1]:
                found = waiting[1].pop(place)
                if not waiting[1]:
                    self.waiting, self.unused = None, 0
                return found
            self.waiting = None
            self.unused += 1
            # This one was computed for another tensor, or nobody wants the others.
            if place in waiting[1] or self.unused >= _MOST_UNUSED:
                self.part()
                return None
        if not self._are_together(x):
            return None
        found, self.waiting = self._multiply(layer, x)
        return found

    def _traced_output(self, layer: PackedLinear, x: Tensor) -> Tensor | None:
        """The same in a trace, which takes what other calls have done: nothing moves there."""
        waiting, place = _IN_TRACE.pop(self.number, None), layer._place
        if waiting is not None and waiting[0] is x and place in waiting[1]:
            found = waiting[1].pop(place)
            if waiting[1]:
                _IN_TRACE[self.number] = waiting
            return found
        if self.weight is None or waiting is not None:
            return None
        found, _IN_TRACE[self.number] = self._multiply(layer, x)
        return found

    def _multiply(
        self, layer: PackedLinear, x: Tensor
    ) -> tuple[Tensor, tuple[Tensor, dict[int, Tensor]]]:
        """The output of one layer, and what waits for the others."""
        of_all = layer.multiply(x, self.weight, sum(self.sizes), self.bias)
        outputs = dict(enumerate(of_all.split(self.sizes, dim=-1)))
        return outputs.pop(layer._place), (x, outputs)

    def _are_together(self, x: Tensor) -> bool:
        if type(x) is not Tensor:  # of an export, say, for which parameters are not these
            return False
        self.look()
        if self.weight is None:
            self._put_together_for(x)
        return self.weight is not None

    def _put_together_for(self, x: Tensor) -> None:
        """In a call that finds them apart."""
        self.changes += 1
        # The memory that a captured graph reads must stay.
        captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if not captured and self.changes <= _MOST_CHANGES:
            self.put_together()
        if self.weight is None:
            self.part()

    def _are_slices(self) -> bool:
        """Whether parameters are where they were put: somebody may have replaced them."""
        return self._addresses() == self.addresses

    def _addresses(self) -> list[int]:
        found = []
        for layer in self.layers:
            own = layer._parameters
            found.append(own["weight"].data_ptr())  # type: ignore[union-attr]
            found.append(0 if own["bias"] is None else own["bias"].data_ptr())
        return found


def _joined(parameters: list[Any]) -> Tensor:
    """One tensor of all, of which they become views."""
    whole = torch.cat([p.detach() for p in parameters])
    # What mark_static_address does, whose import takes half a second: a CUDA graph of a compiled
    # model reads it where it is, as it does parameters.
    whole._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    for p, own in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        # Through DLPack a view has a storage that is no longer than itself. Tools that look for
        # tied weights compare storages, and would leave out all siblings but one.
        p.data = from_dlpack(own)
    return whole


def join(layers: Iterable[Any]) -> list[Siblings]:
    """Makes siblings of packed layers that are alike.

    They are if they have the same input channels and format, no scales of channels, whole blocks of
    rows, and all a bias of one dtype or none.

    Args:
        layers: of a module, which calls them with the same tensor, as far as is known. Others than
            packed ones are left out.
    """
    from torch_turboquant.weights import PackedLinear

    alike: dict[Any, list[PackedLinear]] = {}
    for layer in layers:
        if not isinstance(layer, PackedLinear) or layer.channel_inverse is not None:
            continue
        if layer.out_features % WEIGHT_ROWS == 0 and layer.rows_here == layer.out_features:
            bias = None if layer.bias is None else layer.bias.dtype
            alike.setdefault((layer.in_features, layer.format, bias), []).append(layer)
    families = [Siblings(group) for group in alike.values() if len(group) > 1]
    for siblings in families:
        siblings.put_together()
    return families
