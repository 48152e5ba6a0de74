"""A greedy conversation through one cache, in any number of forwards.

The first forward of a packed cache attends exactly, so a prompt that is read at once says nothing
about the cache. Here the material comes first, and the question follows in a forward of its own,
which reads the material from the cache, as a later turn of a chat does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from torch_turboquant.integrations.transformers.models import with_cache


def tokens_of(tokenizer: Any, text: str, first: bool = False) -> Tensor:
    """The tokens of a text: int64 [n].

    first: whether to begin with the token that the tokenizer puts before a text, if there is one.
    """
    return torch.tensor(tokenizer(text, add_special_tokens=first).input_ids, dtype=torch.int64)


def ends_of(model: Any) -> set[int]:
    """The tokens that end the model's answers."""
    eos = model.generation_config.eos_token_id
    return set(eos) if isinstance(eos, (list, tuple)) else {eos}


class Session:
    """A model, a cache, and the logits of the next token."""

    def __init__(self, model: Any, tokenizer: Any, cache: Cache) -> None:
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.ends = ends_of(model)

    @torch.no_grad()
    def read(self, ids: Tensor) -> None:
        """Runs one forward over ids, int64 [n] with n >= 1."""
        ids = ids.to(self.model.device)[None]
        output = self.model(ids, **with_cache(self.model, self.cache), logits_to_keep=1)
        self.next = output.logits[0, -1]

    def answer(self, most: int) -> list[int]:
        """Greedy tokens up to the end of the line or text, but at most `most`.

        The cache holds all of them afterwards.
        """
        out: list[int] = []
        while len(out) < most:
            token = int(self.next.argmax())
            if token in self.ends or (out and "\n" in self.tokenizer.decode([token])):
                break
            out.append(token)
            self.read(torch.tensor([token]))
        return out
