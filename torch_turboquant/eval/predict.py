"""Predictions of a text through a cache, and how far two predictions differ.

Likelihood scoring of a text in one forward never reads a KV cache, so a cache is measured the way
it is used: the first part of the text is read at once, and every later token is predicted by a
forward that reads all earlier keys and values from the cache. These forwards take several tokens
each, which does not change what a token attends to (a test compares with one at a time).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from torch_turboquant.integrations.transformers import TurboQuantCache
from torch_turboquant.integrations.transformers.models import with_cache
from torch_turboquant.integrations.transformers.weights.budget import divergences


def text_tokens(tokenizer: Any, texts: Sequence[str], count: int) -> Tensor:
    """The first `count` tokens of the texts, which are joined by empty lines: int64 [count].

    Raises:
        ValueError: the texts are shorter.
    """
    ids = tokenizer("\n\n".join(texts), return_tensors="pt", add_special_tokens=False)
    ids = ids.input_ids[0]
    if len(ids) < count:
        raise ValueError(f"the text has {len(ids)} tokens, {count} are asked for")
    return ids[:count]


@torch.no_grad()
def predictions(
    model: Any, cache: Cache, ids: Tensor, prefill: int, chunk: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Teacher forcing through a cache: reads ids[:prefill] at once, then predicts the rest.

    Args:
        ids: int64 [n] on the model's device.
        cache: an empty cache.
        prefill: tokens of the first forward, 1 to n - 1.
        chunk: tokens of every other forward.

    Yields:
        (start, end, logits [end - start, vocabulary] that predict ids[start:end]).
    """
    argument = with_cache(model, cache)
    last = model(ids[None, :prefill], **argument, logits_to_keep=1).logits[0]
    for start in range(prefill, len(ids), chunk):
        end = min(start + chunk, len(ids))
        new = model(ids[None, start:end], **argument).logits[0]
        yield start, end, torch.cat([last, new[:-1]])
        last = new[-1:]


def detach(cache: Cache) -> None:
    """Restores the model that the cache was made for, if it is attached to one."""
    if isinstance(cache, TurboQuantCache):
        cache.detach()


def negative_log_likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    """Of every token, in nats, float32 [n]: logits [n, vocabulary], targets int64 [n]."""
    return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")


def divergence(reference: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """How the predictions of every token differ from those of a reference.

    Args:
        reference, logits: [n, vocabulary], of any floating dtype.

    Returns:
        KL(reference || logits) in nats, float32 [n], and whether both have the same most likely
        token, bool [n].
    """
    p, q = reference.float().log_softmax(-1), logits.float().log_softmax(-1)
    return divergences(p, q), p.argmax(-1) == q.argmax(-1)
