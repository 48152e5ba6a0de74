"""Needle retrieval: a sentence with a number, hidden in a long text, and a question for the number.

The text is read first, and the question reads it from the cache. The cells of a grid are lengths
(tokens of the text) and depths (the place of the sentence, 0 the beginning and 1 the end). The
number depends on the cell alone, so every cache searches for the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers.cache_utils import Cache

from torch_turboquant.eval.predict import detach
from torch_turboquant.eval.session import Session, tokens_of

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
NEEDLE = " The secret number of the old lighthouse is {}. "
QUESTION = (
    "\n\nQuestion: What is the secret number of the old lighthouse?\nAnswer: The secret number"
)
QUESTION += " of the old lighthouse is"
DIGITS = 5
NEW_TOKENS = 12


def number(length: int, depth: float) -> str:
    """The secret number of a cell, DIGITS digits."""
    seed = [length, round(1000 * depth)]
    return str(np.random.default_rng(seed).integers(10 ** (DIGITS - 1), 10**DIGITS))


def search(
    model: Any,
    tokenizer: Any,
    text: str,
    make: Callable[[], Cache],
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    title: str = "",
) -> dict[str, Any]:
    """Asks for the number in every cell.

    Args:
        text: the haystack, of which the first tokens are used.
        make: makes an empty cache.
        lengths: tokens of haystack and needle together.
        depths: places of the needle, 0 to 1.
        title: stands in front of the progress bar.

    Returns:
        lengths, depths, found (for every length one boolean per depth) and share (of the cells in
        which the number was found, 0 to 1).

    Raises:
        ValueError: the text is shorter than the longest length.
    """
    first = tokens_of(tokenizer, text, first=True)
    if len(first) < max(lengths):
        raise ValueError(f"the text has {len(first)} tokens, the needle needs {max(lengths)}")
    longest = max(len(tokens_of(tokenizer, NEEDLE.format(number(min(lengths), d)))) for d in depths)
    if min(lengths) <= longest:
        raise ValueError(f"a text of {min(lengths)} tokens has no room for a needle of {longest}")
    question = tokens_of(tokenizer, QUESTION)
    found = []
    bar = tqdm(total=len(lengths) * len(depths), desc=f"{title} needle", leave=False)
    for length in lengths:
        line = []
        for depth in depths:
            secret = number(length, depth)
            needle = tokens_of(tokenizer, NEEDLE.format(secret))
            hay = first[: length - len(needle)]
            at = max(1, round(depth * len(hay)))  # behind the token that may begin a text
            cache = make()
            try:
                session = Session(model, tokenizer, cache)
                session.read(torch.cat([hay[:at], needle, hay[at:]]))
                session.read(question)
                answer = tokenizer.decode(session.answer(NEW_TOKENS))
            finally:
                detach(cache)
            line.append(secret in answer.replace(",", ""))
            bar.update()
        found.append(line)
    bar.close()
    share = float(np.mean(found))
    return {"lengths": list(lengths), "depths": list(depths), "found": found, "share": share}
