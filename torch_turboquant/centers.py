"""Files of centers: what keys of one model are stored relative to, layer by layer.

A file is written once for a model and read by every integration, so it knows a model by its
configuration alone: a configuration object, or the content of a config.json. transformers is not
imported. How centers are found is the integrations' matter, and what they do is told in
torch_turboquant.ops.center.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_turboquant import _checks, _files
from torch_turboquant.models import (
    KEEPS_KEYS,
    Fields,
    Layer,
    is_latent,
    read_layers,
    text_config,
)

FILE_FORMAT = "torch_turboquant centers 1"
FILE_NAME = "turboquant.centers"
"""Of the file that is found without being named, in the folder of the model's weights.

It does not end in .safetensors, because engines load every file there that does as weights.
"""
CENTER_TOKENS = 64
"""The fewest tokens that a center is learned from."""
SINKS = 4
"""First tokens of a sequence, whose keys are outliers: a calibration leaves them out."""


def fingerprint(config: Any) -> dict[str, str]:
    """What a file of centers must agree on with a model: they are means of its keys after RoPE.

    Args:
        config: of the model, or of its language model: an object, or the content of config.json.

    Raises:
        IncompleteConfig: the configuration does not say enough.
    """
    config = text_config(config)
    values, layers = Fields(config), attending_layers(config)
    heads = values.get("num_key_value_heads")
    if getattr(config, "is_heterogeneous", False):
        heads = [layer.kv_heads for layer in layers.values()]
    dims = sorted({layer.head_dim for layer in layers.values()})
    latents = {}
    if is_latent(values):
        latents["latent_dim"] = str(values.get("kv_lora_rank"))
        latents["rope_dim"] = str(values.get("qk_rope_head_dim"))
    return {
        "format": FILE_FORMAT,
        "model_type": str(values.get("model_type")),
        "layers": str(values.get("num_hidden_layers")),
        "hidden_size": str(values.get("hidden_size")),
        "attention_heads": str(values.get("num_attention_heads")),
        "kv_heads": str(heads),
        "head_dim": " and ".join(map(str, dims)),
        "rope": _rope(values),
        **latents,
    }


def differences(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """What a fingerprint has otherwise than the model's, in words; empty if they are equal."""
    return "; ".join(
        f"{name} {found.get(name)!r}, the model's is {value!r}"
        for name, value in expected.items()
        if found.get(name) != value
    )


def save(path: str | os.PathLike[str], centers: Sequence[Tensor | None], config: Any) -> None:
    """Writes a file of centers (needs safetensors).

    Args:
        path: of the file.
        centers: float32 [kv_heads, head_dim] or [3, kv_heads, head_dim] per layer with attention,
            None for others; kv_heads are those of the whole model.
        config: of the model, as for fingerprint.

    Raises:
        OSError: the file cannot be written; nothing has changed.
        ValueError: centers that do not fit the model.
    """
    # Copies: safetensors refuses tensors that share memory, as those of one tensor's rows do.
    tensors = {
        _name(i): c.float().cpu().clone(memory_format=torch.contiguous_format)
        for i, c in enumerate(centers)
        if c is not None
    }
    _check_tensors("centers", tensors, config)
    _files.write(path, tensors, FILE_FORMAT, fingerprint(config))


def load(path: str | os.PathLike[str], config: Any) -> dict[int, Tensor]:
    """Reads a file of `save`: the center of every layer with attention, by its index.

    config: of the model, as for fingerprint.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file holds anything else, is damaged, or holds centers of a model with
            another fingerprint.
    """
    with _files.opened(path, "centers", FILE_FORMAT) as file:
        found = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    if wrong := differences(found, fingerprint(config)):
        raise ValueError(f"{path} holds the centers of another model: {wrong}")
    _check_tensors(str(path), tensors, config)
    return {i: tensors[_name(i)] for i in attending_layers(config)}


def _name(layer: int) -> str:
    return f"layers.{layer}.center"


def attending_layers(config: Any) -> dict[int, Layer]:
    """The layers that keep keys and values, by index. config: as for fingerprint."""
    layers = read_layers(text_config(config), slides=lambda: False)  # windows do not matter here
    return {i: layer for i, layer in enumerate(layers) if layer.kind in KEEPS_KEYS}


def _check_tensors(where: str, tensors: Mapping[str, Tensor], config: Any) -> None:
    """Raises unless these are finite centers of every layer with attention."""
    layers = {_name(i): layer for i, layer in attending_layers(config).items()}
    if set(tensors) != set(layers):
        raise ValueError(
            f"{where}: {len(tensors)} centers, expected one for each of {len(layers)} layers"
        )
    for name, tensor in tensors.items():
        head_dim, heads = layers[name].head_dim, layers[name].kv_heads
        if tensor.dtype != torch.float32 or not _checks.fits_center(tensor, head_dim):
            raise ValueError(
                f"{where}: {name} is {tensor.dtype} {list(tensor.shape)}, expected torch.float32 "
                f"[kv_heads, {head_dim}] or [3, kv_heads, {head_dim}]"
            )
        if tensor.shape[-2] != heads:
            raise ValueError(
                f"{where}: {name} is of {tensor.shape[-2]} KV heads, the model's layer has {heads}"
            )
        if not tensor.isfinite().all():
            raise ValueError(f"{where}: {name} has numbers that are not finite")
        if tensor.dim() == 3 and not ((tensor[1] > 0) & (tensor[2] == 1 / tensor[1])).all():
            raise ValueError(f"{where}: {name} has scales whose inverses are others")


# ---- RoPE: the same for a file of any age, and for the object that a program makes of it


def _rope(values: Fields) -> str:
    """How keys are rotated, as JSON; "none" if the configuration says nothing."""
    parameters = values.get("rope_parameters")
    if parameters is None and values.get("rope_theta") is not None:  # files of transformers 4
        parameters = {**(values.get("rope_scaling") or {}), "rope_theta": values.get("rope_theta")}
    rope = {"rope_parameters": parameters, "no_rope_layers": values.get("no_rope_layers")}
    rope = {name: _plain(value) for name, value in rope.items() if value is not None}
    return json.dumps(rope, sort_keys=True) if rope else "none"


def _plain(value: Any) -> Any:
    """Without what says nothing: names without a value, defaults, integers beside floats."""
    if isinstance(value, Mapping):
        value = dict(value)
        if "type" in value:  # as older files spell it
            value.setdefault("rope_type", value.pop("type"))
        if "rope_theta" in value:
            value.setdefault("rope_type", "default")
        if value.get("partial_rotary_factor") == 1:
            del value["partial_rotary_factor"]
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
