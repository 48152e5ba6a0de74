"""The page of the ops: schemas, signatures and docstrings."""

from __future__ import annotations

import inspect
import re

import torch

import torch_turboquant as tq
from generator import results


def op_names() -> list[str]:
    """All ops, in the order of csrc/ops.cpp."""
    return re.findall(r'm\.def\("(\w+)\(', (results.ROOT / "csrc" / "ops.cpp").read_text())


def ops() -> str:
    """A section per room, with its module's docstring; then its functions with their ops."""
    parts, room = [], None
    names = op_names()
    for name in names:
        function = getattr(tq, name, None)
        if function is None:
            continue  # an op that another one's function calls
        module = inspect.getmodule(function)
        if module.__name__ != room:
            room = module.__name__
            parts += [f"## {room.rpartition('.')[2]}", inspect.getdoc(module)]
        schemas = [schema(op) for op in names if op in (name, f"{name}_out")]
        signature = str(inspect.signature(function, eval_str=True))
        signature = re.sub(r"torch_turboquant\.(?:\w+\.)+|torch\.(?=Tensor)", "", signature)
        parts += [f"### {name}"]
        parts += ["```\n" + "\n\n".join(schemas) + "\n```"]
        parts += ["```python\n" + wrapped(f"torch_turboquant.{name}{signature}") + "\n```"]
        parts += [docstring(inspect.getdoc(function))]
    return "\n\n".join(parts)


def schema(op: str) -> str:
    text = str(getattr(torch.ops.turboquant, op).default._schema)
    return wrapped(text.removeprefix("turboquant::"))


def wrapped(call: str) -> str:
    """A call in lines of at most 110 characters, the arguments aligned."""
    first, *others = call.split(", ")
    indent = " " * (first.index("(") + 1)
    lines = [first]
    for argument in others:
        lines[-1] += ","
        if len(lines[-1]) + len(argument) > 108:
            lines.append(indent + argument)
        else:
            lines[-1] += " " + argument
    return "\n".join(lines)


def docstring(text: str) -> str:
    """The sections of a docstring as paragraphs, its arguments as a list."""
    parts = []
    for part in re.split(r"\n(?=(?:Args|Returns|Raises):\n)", text):
        title, _, body = part.partition(":\n")
        if title not in ("Args", "Returns", "Raises"):
            parts.append(part.strip())
            continue
        body = inspect.cleandoc(body)
        items = re.sub(r"^(\w[\w, ]*): ", r"- `\1`: ", body, flags=re.MULTILINE)
        parts.append(f"{title}:\n\n{items}")
    return "\n\n".join(parts)
