"""The bytes of a model's weights, packed and as they are, from its configuration alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_turboquant._extras import MODEL, require
from torch_turboquant.models import model_class, quant_method, read_config


class WeightMemory(NamedTuple):
    """Bytes of all parameters of a model."""

    plain: int
    """In the dtype of the model."""
    packed: int
    """With packed layers; the others as they are."""
    layers: int
    """That are packed; each weight of a layer's experts is one."""
    left_alone: dict[str, str]
    """Reasons by names of modules."""


def weight_memory(path: str, bits: int, dtype: str) -> WeightMemory:
    """What packing the weights of a model takes (needs transformers).

    Args:
        path: of config.json, or of its folder. The model is built without memory for its weights.
        bits: of packed weights.
        dtype: of everything else, a name in torch.

    Raises:
        MissingPackages: transformers is not installed.
        ValueError: there is no such model, its weights are quantised already, or nothing of it can
            be packed.
    """
    values = read_config(path)
    found = quant_method(values)
    if found is not None:
        raise ValueError(
            f"the weights of {path} are quantised already ({found}): give the configuration of the "
            "original model, or their size with --weights"
        )
    require("memory", *MODEL)
    import torch
    from transformers import AutoConfig

    from torch_turboquant.integrations.transformers.weights import TurboQuantConfig
    from torch_turboquant.integrations.transformers.weights.choice import choose, experts_among
    from torch_turboquant.integrations.transformers.weights.experts import PackedWeights, shape_of

    config: Any = AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        kind = model_class(values)
        make = getattr(kind, "_from_config", None) or kind.from_config  # an automatic class
        model = make(config, dtype=getattr(torch, dtype))
    chosen = TurboQuantConfig(bits)
    packed, left = choose(model, chosen.weight_format(), {}, ())
    plain = sum(p.numel() * p.element_size() for p in model.parameters())
    saved = 0
    experts = {
        f"{name}.{weight}": model.get_submodule(name)
        for name, forms in experts_among(model, packed).items()
        for weight in forms
    }
    for name, form in packed.items():
        if name in experts:
            weight = model.get_parameter(name)
            shape = PackedWeights(*shape_of(experts[name], weight), form).shape
            saved += weight.numel() * model.dtype.itemsize - shape.numel()
            continue
        n, k = model.get_submodule(name).weight.shape
        tiles, groups, size = form.block(k).packed_shape(n, k)
        saved += n * k * model.dtype.itemsize - tiles * groups * size
    return WeightMemory(plain, plain - saved, len(packed), left)
