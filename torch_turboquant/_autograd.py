"""Ops refuse inputs that require grad, instead of silently cutting the graph.

The kernels see no autograd state (the stable ABI has no such question), so every op but hadamard,
which has a backward, gets a small kernel at the Autograd dispatch key: it raises when a gradient
would be lost, and else passes the call on. It is not run at all under torch.inference_mode().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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

_below_autograd = torch._C._after_autograd_keyset


def _refuse_gradients(name: str) -> Callable[..., Any]:
    op = getattr(torch.ops.turboquant, name).default
    redispatch = op.redispatch
    types = [str(argument.type) for argument in op._schema.arguments]
    # a call may be shorter than the schema: trailing defaults are left out
    tensors = tuple(i for i, t in enumerate(types) if t in ("Tensor", "Optional[Tensor]"))
    lists = tuple(i for i, t in enumerate(types) if t == "List[Tensor]")

    def kernel(keyset: Any, *args: Any, **outputs: Any) -> Any:  # outputs: of an _out variant
        if torch.is_grad_enabled():
            given = [args[i] for i in tensors if i < len(args) and args[i] is not None]
            given += [tensor for i in lists if i < len(args) for tensor in args[i]]
            given += outputs.values()
            if any(tensor.requires_grad for tensor in given):
                raise RuntimeError(
                    f"turboquant::{name} takes no gradient: call it under torch.no_grad() or "
                    "detach its inputs"
                )
        return redispatch(keyset & _below_autograd, *args, **outputs)

    return kernel


_library = torch.library.Library("turboquant", "IMPL")
for _name in OPS:
    _library.impl(_name, _refuse_gradients(_name), "Autograd", with_keyset=True)
