"""What SGLang's scheduler calls of sgl_kernel on a CPU, in PyTorch; there is no wheel of it."""

from typing import Any

from torch import Tensor


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, first: Tensor, end: Tensor, slots: Tensor, _: int
) -> None:
    at = 0
    for row, a, b in zip(rows.tolist(), first.tolist(), end.tolist(), strict=True):
        table[row, a:b] = slots[at : at + b - a].to(table.dtype)
        at += b - a


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return missing
