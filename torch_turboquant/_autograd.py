"""Ops refuse inputs that are differentiated, instead of silently cutting the graph.

The kernels see no autograd state (the stable ABI has no such question), so every op but hadamard,
which has derivatives (ops/hadamard.py), gets a small kernel at the Autograd dispatch key: it raises
when a gradient or a forward-mode tangent would be lost, and else passes the call on. It is not run
at all under torch.inference_mode().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

OPS = (
    "pack",
    "unpack",
    "encode",
    "decode",
    "group_encode",
    "group_decode",
    "qjl_sketch",
    "qjl_score",
    "score",
    "query_energy",
    "learn_center",
    "cache_store",
    "cache_store_layers",
    "cache_load",
    "paged_attention",
    "paged_attention_out",
    "merge_attention",
)

below_autograd = torch._C._after_autograd_keyset


def requires_grad(tensor: Tensor) -> bool:
    """Whether reverse mode wants the gradient of this input."""
    return tensor.requires_grad and torch.is_grad_enabled()


def in_forward_mode() -> bool:
    """Whether inputs can have tangents: no_grad does not end that.

    torch.compile enters the level of torch.func.jvp unseen, but not the transform.
    """
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def _has_tangent(tensor: Tensor) -> bool:
    floating = tensor.is_floating_point()
    return floating and forward_ad.unpack_dual(tensor, level=0).tangent is not None  # there is one


def _refuse_gradients(name: str) -> Callable[..., Any]:
    op = getattr(torch.ops.turboquant, name).default
    redispatch = op.redispatch
    types = [str(argument.type) for argument in op._schema.arguments]
    # a call may be shorter than the schema: trailing defaults are left out
    tensors = tuple(i for i, t in enumerate(types) if t in ("Tensor", "Optional[Tensor]"))
    lists = tuple(i for i, t in enumerate(types) if t == "List[Tensor]")

    def kernel(keyset: Any, *args: Any, **outputs: Any) -> Any:  # outputs: of an _out variant
        if torch.is_grad_enabled() or in_forward_mode():
            given = [args[i] for i in tensors if i < len(args) and args[i] is not None]
            given += [tensor for i in lists if i < len(args) for tensor in args[i]]
            given += outputs.values()
            if any(requires_grad(tensor) for tensor in given):
                raise RuntimeError(
                    f"turboquant::{name} takes no gradient: call it under torch.no_grad() or "
                    "detach its inputs"
                )
            if in_forward_mode() and any(_has_tangent(tensor) for tensor in given):
                raise RuntimeError(
                    f"turboquant::{name} takes no forward-mode tangent: detach its inputs"
                )
        return redispatch(keyset & below_autograd, *args, **outputs)

    return kernel


_library = torch.library.Library("turboquant", "IMPL")
for _name in OPS:
    _library.impl(_name, _refuse_gradients(_name), "Autograd", with_keyset=True)
