"""What goes into the layers of a model while it reads a text: second moments of their inputs.

The moment of a layer is the mean of x x^T over all tokens, for inputs x of K channels: float32
[K, K]. It says how much an error of each weight changes the layer's output, and which channels are
large. Layers that get the same input, as the projections to queries, keys and values do, share one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from torch_turboquant.integrations.transformers.models import evaluating


class Moments:
    """The moments of some layers, summed over forwards of the model.

    Args:
        model: whose forwards are counted from now on, until `close`.
        names: of the layers.
        alone: those of them that get sums of their own.

    Attributes:
        mixed: layers whose sums are wrong, as they got an input with one layer at first and another
            input, or the same with another layer, later. Count again with these in `alone`.
    """

    def __init__(self, model: nn.Module, names: Iterable[str], alone: Iterable[str] = ()) -> None:
        self.mixed: set[str] = set()
        self._alone = set(alone)
        self._sums: dict[str, Tensor] = {}  # by the first layer that gets an input
        self._first: dict[str, str] = {}  # layer -> the first layer that gets the same input
        self._tokens: dict[str, int] = {}
        self._last: tuple[str, Tensor] | None = None  # the layer that was called last, its input
        self._hooks = [
            model.get_submodule(name).register_forward_pre_hook(self._note(name), with_kwargs=True)
            for name in names
        ]

    def _note(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            x = inputs[0] if inputs else named["input"]
            first = name
            if name not in self._alone:
                if self._last is not None and self._last[1] is x:
                    first = self._last[0]
                self._last = (first, x)
            if self._first.setdefault(name, first) != first:
                self.mixed.add(name)
            if first == name:
                self._add(name, x.reshape(-1, x.shape[-1]).float())

        return note

    def _add(self, name: str, x: Tensor) -> None:
        if name not in self._sums:
            self._sums[name] = x.new_zeros(x.shape[1], x.shape[1])
            self._tokens[name] = 0
        self._sums[name].addmm_(x.T, x)
        self._tokens[name] += len(x)

    def forget_input(self) -> None:
        """Lets go of the last input; called after each forward."""
        self._last = None

    def close(self) -> dict[str, Tensor]:
        """Ends the counting: the moments of all layers that were called."""
        for hook in self._hooks:
            hook.remove()
        means = {name: total.div_(self._tokens[name]) for name, total in self._sums.items()}
        return {name: means[first] for name, first in self._first.items()}


def passes(model: nn.Module, names: Sequence[str], memory: int) -> Iterator[list[str]]:
    """The layers in groups whose moments take at most `memory` bytes together, or one layer each.

    Every group takes a reading of the whole text. Shared moments are counted once per layer, since
    which are shared is known only after the first reading.
    """
    group: list[str] = []
    total = 0
    for name in names:
        linear: Any = model.get_submodule(name)
        size = 4 * linear.in_features**2
        if group and total + size > memory:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield group


def reads_tokens(model: nn.Module) -> bool:
    """Whether text is what the model reads, and not sounds or pictures alone."""
    return "input_ids" in inspect.signature(model.forward).parameters


def read(model: nn.Module, ids: Tensor) -> Any:
    """What a model of transformers returns for tokens [tokens] without dropout; a decoder reads
    those too."""
    tokens, known = ids[None].to(model.device), inspect.signature(model.forward).parameters
    given: dict[str, Any] = {"input_ids": tokens}
    if "decoder_input_ids" in known:
        given["decoder_input_ids"] = tokens
    if "use_cache" in known or any(p.kind is p.VAR_KEYWORD for p in known.values()):
        given["use_cache"] = False
    with evaluating(model):
        return model(**given)


def _counted(
    model: nn.Module, names: list[str], sequences: Sequence[Tensor], what: str, alone: set[str]
) -> tuple[dict[str, Tensor], set[str]]:
    """What a reading found, and which layers need sums of their own: if any, it ended early."""
    counted = Moments(model, names, alone)
    try:
        for ids in logging.tqdm(sequences, desc=what):
            read(model, ids)
            counted.forget_input()
            if counted.mixed:
                break
    finally:
        found = counted.close()
    return found, counted.mixed


@torch.no_grad()
def second_moments(
    model: nn.Module, names: Iterable[str], sequences: Sequence[Tensor], what: str = "Calibrating"
) -> dict[str, Tensor]:
    """The moments of layers, over all tokens of the sequences.

    Args:
        model: of transformers, on any devices.
        names: of linear layers.
        sequences: int64 [tokens] each.
        what: in front of the progress bar.

    Raises:
        ValueError: a layer was never called, or its input is not finite.
    """
    names = list(names)
    alone: set[str] = set()
    while True:
        found, mixed = _counted(model, names, sequences, what, alone)
        if not mixed:
            break
        alone |= mixed
    _check(names, found)
    return {name: found[name] for name in names}


def _check(names: list[str], found: dict[str, Tensor]) -> None:
    if silent := [name for name in names if name not in found]:
        raise ValueError(
            f"the text went through the model without {', '.join(silent)}: nothing is known of "
            "their inputs; name them in skip, or pack them without a text"
        )
    if bad := [name for name, moment in found.items() if not moment.isfinite().all()]:
        raise ValueError(
            f"the inputs of {', '.join(bad)} are not finite while the model reads the text: load "
            "the model in another dtype, as float16 overflows in some models"
        )
