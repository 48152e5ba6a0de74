"""Ops refuse inputs that are differentiated, instead of silently cutting the graph.

The kernels see no autograd state (the stable ABI has no such question), so every op but hadamard,
which has derivatives (ops/hadamard.py), gets a small kernel at the Autograd dispatch key: it raises
when a gradient or a forward-mode tangent would be lost, and else passes the call on. It is not run
at all under torch.inference_mode().

Such a kernel takes 5 microseconds, as long as the rest of a call. The ops that a model calls in
every step have none, and others refuse for them. In a plain call the compiled kernel does
(csrc/calls/derivatives.h): it knows whether grad mode is on, and a function that it gets from here
says whether forward mode is. Only if one of them is, it has the op _turboquant::derivative_of look
at the tensors. While torch traces, the fake looks at them. And in a transform of torch.func, whose
levels a compiled kernel does not see, torch calls an op of the same name in the namespace
_turboquant instead, which has the small kernel.

Two more things that the compiled kernels cannot do are done here. C++ can only raise RuntimeError:
that of a GPU without memory becomes a torch.OutOfMemoryError, in the kernels at the Autograd key
or in the functions that call the ops of a step. And torch copies a lazily negated tensor before a
kernel sees it, which would lose what is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_turboquant._library import set_forward_mode

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
    "cache_load",
    "cache_move",
    "merge_attention",
    "paged_mass",
    "mla_load",
    "weight_encode",
    "weight_pack",
    "weight_unpack",
    "weight_decode",
)
OPS_OF_A_STEP = (
    "cache_store",
    "cache_store_layers",
    "paged_attention",
    "paged_attention_out",
    "store_and_attend",
    "mla_store",
    "mla_attention",
    "mla_attention_out",
    "linear_packed",
    "linear_experts",
)

_below_autograd = torch._C._after_autograd_keyset
# AutogradCPU stands for the key of every device. Tangents are views, which have a key of their own.
_autograd = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU).add(
    torch._C.DispatchKey.ADInplaceOrView
)


def call_below(op: Any, keyset: Any, *args: Any, **outputs: Any) -> Any:
    """Passes a call on to the compiled kernel."""
    try:
        return op.redispatch(keyset & _below_autograd, *args, **outputs)
    except RuntimeError as error:
        raise named_error(error) from None


def named_error(error: Exception) -> Exception:
    """The error itself, or that of a GPU without memory by its own name."""
    if "CUDA out of memory" in str(error):
        return torch.OutOfMemoryError(str(error))
    return error


def requires_grad(tensor: Tensor | None) -> bool:
    """Whether reverse mode wants the gradient of this input; None is what the kernel refuses."""
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def in_forward_mode() -> bool:
    """Whether inputs can have tangents: no_grad does not end that.

    torch.compile enters the level of torch.func.jvp unseen, but not the transform.
    """
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def _has_tangent(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return False
    # torch finds tangents at the Autograd key, which fakes and compiled kernels are below
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - _autograd
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        return forward_ad.unpack_dual(tensor, level=0).tangent is not None  # there is one level


_NONE, _GRADIENT, _TANGENT = range(3)  # csrc/calls/derivatives.h


def _derivative_of(tensors: Iterable[Tensor]) -> int:
    """Which derivative of these a call would lose."""
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        return _GRADIENT
    if in_forward_mode() and any(_has_tangent(tensor) for tensor in tensors):
        return _TANGENT
    return _NONE


def refuse(name: str, tensors: Iterable[Tensor]) -> None:
    """Raises if a call of the op with these tensors would lose a derivative."""
    found = _derivative_of(tensors)
    if found == _GRADIENT:
        raise RuntimeError(
            f"turboquant::{name} takes no gradient: call it under torch.no_grad() or "
            "detach its inputs"
        )
    if found == _TANGENT:
        raise RuntimeError(f"turboquant::{name} takes no forward-mode tangent: detach its inputs")


def _refuse_gradients(name: str, namespace: Any = torch.ops.turboquant) -> Callable[..., Any]:
    op = getattr(namespace, name).default
    types = [str(argument.type) for argument in op._schema.arguments]
    # a call may be shorter than the schema: trailing defaults are left out
    tensors = tuple(i for i, t in enumerate(types) if t in ("Tensor", "Optional[Tensor]"))
    lists = tuple(i for i, t in enumerate(types) if t == "List[Tensor]")

    def kernel(keyset: Any, *args: Any, **outputs: Any) -> Any:  # outputs: of an _out variant
        if torch.is_grad_enabled() or in_forward_mode():
            given = [args[i] for i in tensors if i < len(args) and args[i] is not None]
            given += [tensor for i in lists if i < len(args) for tensor in args[i]]
            given += outputs.values()
            refuse(name, given)
        return call_below(op, keyset, *args, **outputs)

    return kernel


def _refuse_negated_outputs(name: str) -> Callable[..., Any]:
    op = getattr(torch.ops.turboquant, name).default
    schema = op._schema.arguments

    def kernel(*args: Any, **outputs: Any) -> Any:
        given = dict(zip((a.name for a in schema), args, strict=False)) | outputs
        for argument in schema:
            value = given.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and any(t.is_neg() for t in tree_leaves(value) if t is not None):
                raise RuntimeError(
                    f"{argument.name} must not be a lazy negation, because it is written: call "
                    "resolve_neg() first"
                )
        args, outputs = tree_map_only(Tensor, Tensor.resolve_neg, (args, outputs))
        return op(*args, **outputs)

    return kernel


def _calls(op: Any) -> Callable[..., Any]:
    return lambda *args, **outputs: op(*args, **outputs)


_library = torch.library.Library("turboquant", "IMPL")
for _name in OPS:
    _library.impl(_name, _refuse_gradients(_name), "Autograd", with_keyset=True)
for _name in (
    "cache_store",
    "cache_store_layers",
    "cache_move",
    "paged_attention_out",
    "paged_mass",
    "store_and_attend",
    "mla_store",
    "mla_attention_out",
):
    _library.impl(_name, _refuse_negated_outputs(_name), "Negative")

_internal = torch.library.Library("_turboquant", "DEF")
_internal.define("derivative_of(Tensor[] tensors) -> int")
_internal.impl("derivative_of", _derivative_of, "CompositeImplicitAutograd")
set_forward_mode(lambda: forward_ad._current_level >= 0)
for _name in OPS_OF_A_STEP:
    _op = getattr(torch.ops.turboquant, _name).default
    _internal.define(str(_op._schema).removeprefix("turboquant::"))
    _refusing = getattr(torch.ops._turboquant, _name).default
    _kernel = _refuse_gradients(_name, torch.ops._turboquant)
    _internal.impl(_name, _kernel, "Autograd", with_keyset=True)
    _internal.impl(_name, _calls(_op), "CompositeExplicitAutograd")
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
    _library.impl(_name, _calls(_refusing), "FuncTorchDynamicLayerFrontMode")


def lasting() -> torch.inference_mode:
    """Where memory is made that outlives a call, as a decorator or in a `with` statement.

    Tensors that are made in inference mode cannot be changed outside of it.
    """
    return torch.inference_mode(False)
