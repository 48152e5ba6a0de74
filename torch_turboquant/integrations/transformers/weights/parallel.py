"""Packed layers under tensor parallelism of transformers: every process has a slice of the bytes.

transformers (from 5.23 on) lays a plan of styles over the names of a model, and a style cuts the
parameters of a layer. Those of linear layers cut a matrix [n, k]; a packed weight lies as [tiles,
groups, block_bytes]. So packed layers get styles of their own, which cut tiles or groups and do all
else as the style of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import transformers
from torch import nn

from torch_turboquant.format import WEIGHT_ROWS

_PREFIX = "torch_turboquant "


def knows_styles() -> bool:
    """Whether packed layers have styles in this transformers.

    5.21 and 5.22 have plans and styles as well, in other modules; they have not been tried.
    """
    return tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)


def is_distributed(model: nn.Module) -> bool:
    """Whether transformers has spread the model over processes that share its layers."""
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    sizes = [getattr(model, "_tp_size", None), *(getattr(config, n, 1) for n in ("ep_size",))]
    return any((size or 1) > 1 for size in sizes)


def styles_for_packed(plan: dict[str, str], linear: Iterable[str], experts: Iterable[str]) -> None:
    """Changes a plan in place: the styles of packed layers become those that know how they lie.

    Args:
        plan: styles by names, with "*" for numbers of layers.
        linear: names of packed linear layers.
        experts: names of modules of packed experts, which no style can cut.
    """
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard as general

    for name in {general(name) for name in linear}:
        if name in plan:
            plan[name] = _style(plan[name], _cut)
    modules = {general(name) for name in experts}
    for name in plan:
        if name in modules or name.rpartition(".")[0] in modules:
            plan[name] = _style(plan[name], _Refused)


def _style(name: str, kind: Callable[[Any], Any]) -> str:
    """The name of the style that is `kind` of another one."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    if name.startswith(_PREFIX):
        return name
    mine = f"{_PREFIX}{kind.__name__.strip('_').lower()} {name}"
    if mine not in ALL_PARALLEL_STYLES:
        ALL_PARALLEL_STYLES.register(mine, kind(ALL_PARALLEL_STYLES[name]))
    return mine


class _Refused:
    """A style for what cannot be cut."""

    def __init__(self, style: Any) -> None:
        del style

    def validate_param(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.install_forward(module, None)

    def install_forward(self, module: nn.Module, mesh: Any) -> None:
        raise ValueError(
            f"the weights of {type(module).__name__} are packed, which tensor parallelism cannot "
            "cut: load the model on one device, or name its experts in skip"
        )


def _cut(style: Any) -> Any:
    """A style like this one that cuts the parameters of a packed layer."""
    from transformers.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel

    if isinstance(style, ColwiseParallel):
        dims = {"weight": 0, "bias": 0, "channel_inverse": None}
    elif isinstance(style, RowwiseParallel):
        dims = {"weight": 1, "bias": None, "channel_inverse": 0}
    elif "shard_param" not in vars(type(style)):
        return style  # it cuts nothing
    else:
        return _Refused(style)
    cut = _packed_style(type(style), dims)
    made = cut.__new__(cut)
    vars(made).update(vars(style))
    return made


def _packed_style(kind: Any, dims: dict[str, int | None]) -> Any:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    class Packed(kind):
        def validate_param(
            self, module: Any, param: str, mesh: Any, parameter_name: str | None = None
        ) -> None:
            size = mesh.size()
            if dims["weight"] == 0 and module.out_features % (WEIGHT_ROWS * size):
                unit = f"outputs, which must be a multiple of {WEIGHT_ROWS} x {size}"
                found = module.out_features
            elif dims["weight"] == 1 and module.weight.shape[1] % size:
                group = module.format.group_of(module.in_features)
                unit = f"inputs, which must be a multiple of {group} x {size}"
                found = module.in_features
            else:
                return
            name = (parameter_name or param).rpartition(".")[0]
            raise ValueError(
                f"{name} is packed and cannot be cut for {size} processes: it has {found} {unit}; "
                "name it in skip, or use fewer processes"
            )

        def shard_param(self, module: Any, param: str, mesh: Any) -> None:
            whole = module._parameters.get(param)
            if whole is None:
                return
            dim = dims[param]
            placement = Replicate() if dim is None else Shard(dim)
            module._parameters[param] = nn.Parameter(
                distribute_tensor(whole, mesh, [placement], src_data_rank=None),
                requires_grad=False,
            )

        def install_forward(self, module: Any, mesh: Any) -> Any:
            module._hf_quantized_needs_local_tp = True  # forward gets local tensors
            if dims["weight"] == 0:
                module.rows_here = module.out_features // mesh.size()
            return super().install_forward(module, mesh)

    return Packed
