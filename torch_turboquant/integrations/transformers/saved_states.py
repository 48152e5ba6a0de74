"""States of layers without keys and values, as files of caches hold them (saving.py).

Such a layer is one of transformers, whose attributes differ by class and by version. All of them
are saved as plain data for JSON: a tensor is the name that it has in the file, with its shape and
its dtype, so that the tensor under this name can be compared with what was saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_turboquant.integrations.transformers.tensors import dtype_name, fixed, on_host


def saved_state(layer: Any, index: int, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The state of a layer as plain data.

    Args:
        layer: of transformers.
        index: its number, for errors.
        name: that those of its tensors begin with.
        tensors: those of the file, which these join.

    Raises:
        TypeError: the layer has something that is not plain data.
    """

    def plain(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            tensors[name] = on_host(value)
            return {"tensor": name, "shape": list(value.shape), "dtype": dtype_name(value.dtype)}
        if isinstance(value, torch.dtype):
            return {"dtype": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"device": value.type}
        if isinstance(value, dict):
            return {"entries": [[key, plain(x, f"{name}.{key}")] for key, x in value.items()]}
        if isinstance(value, (list, tuple)):
            return [plain(x, f"{name}.{number}") for number, x in enumerate(value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(
            f"layer {index} of the cache is a {type(layer).__name__} of transformers with a "
            f"{type(value).__name__}, which a file cannot hold"
        )

    state = {attribute: plain(x, f"{name}.{attribute}") for attribute, x in vars(layer).items()}
    return {"kind": type(layer).__name__, "state": state}


def restore_state(
    layer: Any,
    index: int,
    saved: dict[str, Any],
    tensor: Callable[[str], Tensor],
    device: torch.device,
) -> None:
    """The state of a layer from what saved_state has made of it.

    Args:
        layer: of transformers.
        index: its number, for errors.
        saved: plain data.
        tensor: gives a tensor of the file by its name.
        device: of the layer.

    Raises:
        ValueError: the data are of another class, another version or damaged; the layer is as it
            was.
    """

    def value(plain: Any) -> Any:
        if isinstance(plain, list):
            return [value(x) for x in plain]
        if not isinstance(plain, dict):
            return plain
        if "tensor" in plain:
            found = tensor(plain["tensor"])
            if (list(found.shape), dtype_name(found.dtype)) != (plain["shape"], plain["dtype"]):
                raise ValueError(
                    f"{plain['tensor']} is {found.dtype} {list(found.shape)}, expected "
                    f"torch.{plain['dtype']} {plain['shape']}"
                )
            found = found.to(device)
            fixed(found)  # as transformers does
            return found
        if "dtype" in plain:
            dtype = getattr(torch, plain["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{dtype} is no dtype")
            return dtype
        if "device" in plain:
            return device
        return {key: value(x) for key, x in plain["entries"]}

    try:
        kind, state = saved["kind"], saved["state"]
        if kind == type(layer).__name__ and set(vars(layer)) <= set(state):
            vars(layer).update({name: value(x) for name, x in state.items()})
            return
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the file of the cache is damaged: the state of layer {index} cannot be read: "
            f"{error!r}"
        ) from error
    raise ValueError(
        f"the state of layer {index} was saved as a {kind} of another version of transformers: "
        "run the prompt and save it again"
    )
