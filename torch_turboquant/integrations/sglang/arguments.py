"""The arguments of SGLang's server, with what SGLang has chosen where nothing was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def chosen(server_args: Any) -> Any:
    """An object with the arguments as attributes, as an engine runs with them.

    Since 0.5.19 SGLang keeps its choices, such as how many drafts there are by default, beside the
    ServerArgs, whose attributes are what was given; before, it changed these.

    Args:
        server_args: SGLang's ServerArgs.
    """
    from sglang.srt.arg_groups import overrides

    read = getattr(overrides, "resolution_result", None)
    return server_args if read is None else _Chosen(server_args, read)


class _Chosen:
    def __init__(self, given: Any, read: Callable[[Any, str], Any]) -> None:
        self._given, self._read = given, read

    def __getattr__(self, name: str) -> Any:
        getattr(self._given, name)  # AttributeError: this version has no such argument
        return self._read(self._given, name)
