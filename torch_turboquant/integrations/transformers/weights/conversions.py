"""The conversions between the tensors of files and those of transformers' models.

A conversion joins or divides tensors: a file has one `query_key_value`, and the model three layers.
transformers makes them of float tensors. Packed bytes cannot be joined where formats differ, so a
packed layer is written by its own name, and so are the layers that it would be joined with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightTransform,
)

from torch_turboquant.integrations.transformers.weights.experts import PackedExperts, packed_name
from torch_turboquant.weights import PackedLinear


class SplitByLayers(ConversionOps):
    """transformers' Split, which divides a tensor among layers, for layers that are to be packed.

    Split asks the parameters for their sizes. Those of a layer that is to be packed have the shape
    of packed bytes already, while the tensor of the file is not packed yet.
    """

    def __init__(self, split: Any) -> None:
        self.split = split

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """input_dict: the one tensor of the file, by its pattern."""
        [value] = input_dict.values()
        tensor = value[0] if isinstance(value, list) else value
        first = target_patterns[0]
        dim = self.split.dim
        sizes = [
            _shape_of(model, full_layer_name.replace(first, target))[dim]
            for target in target_patterns
        ]
        parts = tensor.split(sizes, dim)
        return {name: p.contiguous() for name, p in zip(target_patterns, parts, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        return self.split.reverse_op


def _shape_of(model: nn.Module, name: str) -> Sequence[int]:
    """The shape that a parameter has in a model that is not packed."""
    module, _, parameter = name.rpartition(".")
    layer = model.get_submodule(module)
    if isinstance(layer, PackedLinear) and parameter == "weight":
        return layer.out_features, layer.in_features
    return model.get_parameter(name).shape


def split_by_layers(conversions: Iterable[WeightTransform]) -> None:
    """Changes conversions in place: none asks a layer that is to be packed for its shape."""
    for conversion in conversions:
        if isinstance(conversion, WeightConverter):
            conversion.operations = [
                SplitByLayers(op) if type(op).__name__ == "Split" else op
                for op in conversion.operations
            ]


class _Names(frozenset[str]):
    """Names that stay one object when transformers copies a conversion, once for every tensor."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Names:
        return self


class _Sparing(WeightConverter):
    """A conversion that spares some tensors: in files they have the names that the model uses."""

    __slots__ = ("names",)

    names: _Names

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        if source_key in self.names:
            return source_key, None
        found: tuple[str, str | None] = super().rename_source_key(source_key)
        return found

    def reverse_transform(self) -> WeightTransform:
        return _sparing(super().reverse_transform(), self.names)


def _sparing(conversion: WeightTransform, names: _Names) -> WeightTransform:
    made = _Sparing.__new__(_Sparing)
    for kind in WeightConverter.__mro__:
        for field in getattr(kind, "__slots__", ()):
            object.__setattr__(made, field, getattr(conversion, field))
    made.names = names
    return made


def leave_packed_alone(
    conversions: Iterable[WeightTransform], model: nn.Module
) -> list[WeightTransform]:
    """These conversions without their effect on packed layers and on what is joined with those.

    Files of earlier versions, in which packed layers share a tensor, are still divided.

    Args:
        conversions: of the model, as for loading.
        model: has its packed layers, whose bytes may still be missing.
    """
    conversions = list(conversions)
    joined = joined_with(conversions, model.state_dict(), _packed_tensors(model))
    if not joined:
        return conversions
    names = _Names(names_in_files(model, joined))
    return [
        _sparing(conversion, names) if isinstance(conversion, WeightConverter) else conversion
        for conversion in conversions
    ]


def names_in_files(model: nn.Module, names: Iterable[str]) -> set[str]:
    """The names that files may have for tensors of a model: its prefix may be there or not."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return {n for name in names for n in (name, name.removeprefix(prefix), prefix + name)}


def packed_weights(model: nn.Module) -> set[str]:
    """Names of the tensors that are bytes of packed weights."""
    found: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            found.add(f"{name}.weight")
        elif isinstance(module, PackedExperts):
            found.update(f"{name}.{packed_name(weight)}" for weight in module.packed)
    return found


def _packed_tensors(model: nn.Module) -> set[str]:
    """The same, and what else packed linear layers have."""
    found = packed_weights(model)
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            found.update(f"{name}.{tensor}" for tensor in module.state_dict())
    return found


def conversions_to_save(model: nn.Module) -> list[WeightTransform]:
    """Those that transformers would use to save a model."""
    found: list[WeightTransform] | None = getattr(model, "_weight_conversions", None)
    if found is None:  # the model was not loaded from files
        every = get_model_conversion_mapping(model, add_legacy=False)
        found = [one for one in every if type(one).__name__ != "PrefixChange"]  # 5.5 has none
    return found


def joined_with(
    conversions: Iterable[WeightTransform], tensors: Iterable[str], packed: set[str]
) -> set[str]:
    """Names of the tensors that conversions join with a packed one when a model is saved.

    Args:
        conversions: of a model, as for loading.
        tensors: names of all its tensors.
        packed: those of these names that are packed. The result has them too if a conversion takes
            them, even alone.
    """
    back = [_back(c) for c in reversed(list(conversions)) if isinstance(c, WeightConverter)]
    groups: dict[str, set[str]] = {}  # by the name in the file
    for name in tensors:
        for renaming in back:
            saved, pattern = renaming.rename_source_key(name)
            if pattern is not None:
                groups.setdefault(saved, set()).add(name)
                break
    return {name for group in groups.values() if group & packed for name in group}


def _back(conversion: WeightTransform) -> WeightTransform:
    """The names of a conversion for saving, without its operations: some have no way back."""
    targets, sources = (
        list(getattr(conversion, f"_original_{name}", getattr(conversion, name)))  # 5.5 has one
        for name in ("target_patterns", "source_patterns")
    )
    back = WeightTransform(targets, sources)
    for scope in ("scope_prefix", "base_model_prefix"):
        if hasattr(conversion, scope):
            setattr(back, scope, getattr(conversion, scope))
    return back
