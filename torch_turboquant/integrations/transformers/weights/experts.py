"""Experts of transformers with packed weights.

transformers keeps the weights of all experts of a layer in tensors of three dimensions, in modules
that its experts interface serves (integrations/moe.py): each has the same parts, and says of itself
how its weights lie. Such a module gets another class, made of its own and of PackedExperts, and its
weights become packed ones with other names. Its gate and everything else stay.

The names are others because a saved model has what was loaded: transformers takes tensors that are
called as an expert's weight apart, into one for each expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from torch_turboquant import _checks
from torch_turboquant._autograd import named_error
from torch_turboquant.format import WEIGHT_ROWS
from torch_turboquant.ops.linear import weight_decode
from torch_turboquant.weights import (
    CONSTANTS,
    Constants,
    WeightFormat,
    encode_weight,
    share_constants,
)

_linear_experts = torch.ops.turboquant.linear_experts.default


def packed_name(weight: str) -> str:
    """The name that a weight gets when it is packed: "down_packed" of "down_proj"."""
    return weight.removesuffix("_proj") + "_packed"


def matrices_of(module: nn.Module) -> dict[str, nn.Parameter] | None:
    """The weights of experts that can be packed, by name; None: no such module."""
    kind = type(module)
    served = hasattr(kind.forward, "__wrapped__") and hasattr(kind, "_apply_gate")
    if not served or not {"is_transposed", "has_bias", "has_gate"} <= vars(module).keys():
        return None
    own = dict(module.named_parameters(recurse=False))
    first = "gate_up_proj" if module.has_gate else "up_proj"
    biases = {f"{first}_bias", "down_proj_bias"} if module.has_bias else set()
    if own.keys() != {first, "down_proj"} | biases or own[first].dim() != 3:
        return None
    return {name: own[name] for name in (first, "down_proj")}


def shape_of(module: nn.Module, weight: Tensor) -> tuple[int, int, int]:
    """Experts, outputs and inputs of such a weight."""
    experts, n, k = weight.shape
    return (experts, k, n) if module.is_transposed else (experts, n, k)


def encode_experts(weight: Tensor, form: WeightFormat, transposed: bool) -> Tensor:
    """The packed weights of experts: uint8 [experts, tiles, groups, block_bytes].

    Args:
        weight: [experts, n, k], or [experts, k, n] if transposed.
    """
    parts = [encode_weight(part.T if transposed else part, form) for part in weight]
    return torch.stack(parts)


class PackedWeights:
    """One packed weight for each expert of a layer, without its bytes.

    Args:
        experts, n, k: of the weight.
        form: how it is stored.
    """

    def __init__(self, experts: int, n: int, k: int, form: WeightFormat) -> None:
        self.experts, self.n, self.k = experts, n, k
        self.form = WeightFormat(form.bits, form.grid, form.sub, form.group_of(k))
        self.shape = torch.Size((experts, *self.form.block(k).packed_shape(n, k)))
        self._form = self.form.kind(k)
        self._kind = ""

    def constants(self, device: torch.device) -> Constants:
        """What the ops take beside a weight on this device."""
        if torch.compiler.is_dynamo_compiling():
            return getattr(CONSTANTS, share_constants(*self._form, str(device)))
        here = CONSTANTS.find(self._kind)
        if here is None or here.signs.device != device:
            kind = share_constants(*self._form, str(device))
            self._kind, here = kind, getattr(CONSTANTS, kind)  # replicas of other GPUs set it too
        return here

    def multiply(self, x: Tensor, packed: Tensor, experts: Tensor, bias: Tensor | None) -> Tensor:
        """[tokens, k] and int64 [tokens, choices] -> [tokens, choices, n]."""
        _checks.check_dtype("x", x, _checks.FLOATS)
        if x.stride(-1) != 1:
            x = x.contiguous()
        signs, levels, bits, sub = self.constants(x.device)
        try:
            return _linear_experts(x, packed, experts, signs, levels, self.n, bits, sub, bias)
        except RuntimeError as error:
            raise named_error(error) from None

    def decode(self, packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights of some experts: [experts, n, k]."""
        experts, tiles = packed.shape[:2]
        rows = tiles * WEIGHT_ROWS
        signs, levels, bits, sub = self.constants(packed.device)
        w = weight_decode(packed.flatten(0, 1), signs, levels, experts * rows, bits, sub, dtype)
        return w.view(experts, rows, self.k)[:, : self.n]


class PackedExperts(nn.Module):
    """The part of an experts' class that is packed; pack_experts makes such classes."""

    packed: dict[str, PackedWeights]
    """By name of the weight that was packed."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """What the experts interface of transformers computes.

        Args:
            hidden_states: [tokens, channels].
            top_k_index: int64 [tokens, choices]; a number that no expert has adds nothing.
            top_k_weights: [tokens, choices].
        """
        choices = top_k_index.contiguous()
        own: Any = self
        if own.has_gate:
            y = own._apply_gate(
                self._multiply("gate_up_proj", hidden_states, choices).flatten(0, 1)
            )
        else:
            y = own.act_fn(self._multiply("up_proj", hidden_states, choices).flatten(0, 1))
        y = self._multiply("down_proj", y, choices.view(-1, 1)).flatten(0, 1)
        if getattr(own, "has_post_expert_norm", False):
            y = own.post_expert_norm(y)
        exists = (choices >= 0) & (choices < own.num_experts)
        weights = top_k_weights.masked_fill(~exists, 0)
        y = y.view(*choices.shape, y.shape[-1]) * weights.unsqueeze(-1)
        return y.sum(1).to(hidden_states.dtype)

    def _multiply(self, name: str, x: Tensor, experts: Tensor) -> Tensor:
        # A replica of nn.DataParallel has no parameters but attributes.
        packed = getattr(self, packed_name(name))
        bias = getattr(self, f"{name}_bias") if getattr(self, "has_bias", False) else None
        return self.packed[name].multiply(x, packed, experts, bias)

    def decode(
        self, name: str, packed: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The weight as it was before it was packed, but for its error, and as it lay.

        packed: bytes of this weight; None: its own.
        """
        if packed is None:
            packed = self.get_parameter(packed_name(name))
        w = self.packed[name].decode(packed, dtype)
        return w.transpose(1, 2).contiguous() if self.is_transposed else w.contiguous()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # the class has no name by which it could be found
        # The state comes last, as a copy may be asked for while its own state is copied: hooks of
        # accelerate refer to their module.
        plain = type(self).__mro__[2]
        return _rebuilt, (plain,), self.__dict__


@cache
def _packed_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Packed{kind.__name__}", (PackedExperts, kind), {})


def _rebuilt(kind: type[nn.Module]) -> nn.Module:
    packed_class = _packed_class(kind)
    return packed_class.__new__(packed_class)


def pack_experts(module: Any, forms: Mapping[str, WeightFormat], loading: bool = False) -> None:
    """Makes packed experts of experts, whose bytes are still to come.

    Args:
        module: for which matrices_of has an answer.
        forms: of each of its weights.
        loading: its own weights stay until drop_weight, so that files that have them fit.
    """
    weights = matrices_of(module)
    assert weights is not None
    packed = {}
    for name, weight in weights.items():
        packed[name] = PackedWeights(*shape_of(module, weight), forms[name])
        empty = torch.empty(packed[name].shape, dtype=torch.uint8, device=weight.device)
        module.register_parameter(packed_name(name), nn.Parameter(empty, requires_grad=False))
        if not loading:
            drop_weight(module, name)
    module.packed = packed
    # else the model's class would look for the weights, to fill those that no file has
    module._is_hf_initialized = True
    module.__class__ = _packed_class(type(module))


def drop_weight(module: nn.Module, name: str) -> None:
    """Takes the weight out of packed experts that has been packed."""
    module._parameters.pop(name, None)


def plain_experts(module: Any, dtype: torch.dtype) -> None:
    """Makes experts of packed experts again, with the decoded weights."""
    plain = type(module).__mro__[2]
    for name in list(module.packed):
        weight = nn.Parameter(module.decode(name, dtype=dtype))
        del module._parameters[packed_name(name)]
        module.register_parameter(name, weight)
    del module.packed
    module.__class__ = plain
