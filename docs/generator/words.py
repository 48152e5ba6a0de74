"""Numbers and paragraphs as documents write them."""

from __future__ import annotations

import re
import textwrap


def name_of(shape: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]:,}"


def microseconds(ms: float) -> str:
    return f"{1000 * ms:.0f} us" if ms < 1 else f"{ms:.2f} ms"


def in_words(count: int) -> str:
    """A number of things, of which there are few."""
    return "none one two three four five six seven eight nine".split()[count]


def shape_of_model(shape: str, gpus: int) -> str:
    """What follows the name of an engine: the shape in benchmarks/engines.py and its GPUs."""
    model = {
        "8b": "",
        "70b-cut": ", 16 layers of Llama-3.1-70B's shape",
        "v2-lite-dense": ", DeepSeek-V2-Lite's shape with dense layers in place of experts",
    }[shape]
    return f"{model}{f', {gpus} GPUs' if gpus > 1 else ''}"


def paragraph(text: str) -> str:
    """Text in lines of at most 110 characters, code unbroken."""
    text = re.sub(r"`[^`]*`", lambda m: m[0].replace(" ", "\0"), text)
    width = {"width": 110, "break_long_words": False, "break_on_hyphens": False}
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, subsequent_indent=indent, **width).replace("\0", " ")


def half(interval: list[float]) -> float:
    return (interval[1] - interval[0]) / 2
