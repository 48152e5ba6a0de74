"""What torch.compile must not trace.

Whether it traces is asked with is_dynamo_compiling: while one thread compiles, is_compiling is true
in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_UNCOMPILED = (
    "the first forward of a prompt (and one after a forward that failed), and every forward of a "
    "cache without static=True, cannot be compiled: without fullgraph=True TurboQuantCache runs "
    "them uncompiled; with it, call the model itself for them"
)


def uncompiled(function: F) -> F:
    """The same function, which torch.compile calls instead of tracing it.

    Where it may not do that (fullgraph=True), it raises an error with the text above.
    """
    disabled: F = torch.compiler.disable(function, reason=_UNCOMPILED)
    return disabled
