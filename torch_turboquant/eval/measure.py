"""Predictions through a cache, compared with those of the uncompressed one.

Every segment of the text is read as predict.py describes, with an empty cache of its own. Means
come with 95% intervals from a bootstrap over blocks of neighbouring tokens, because the errors of
neighbours are related. Intervals of differences are paired: both caches are resampled by the same
blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers.cache_utils import Cache

from torch_turboquant.eval.predict import (
    detach,
    divergence,
    negative_log_likelihood,
    predictions,
    text_tokens,
)

BLOCK = 32  # tokens of a block of the bootstrap
PARTS = 8  # parts of a segment, to show whether the divergence grows with the position
RESAMPLES = 10_000


def segments(tokenizer: Any, text: str, count: int, length: int) -> Tensor:
    """The beginning of a text as sequences for the model: int64 [count, length].

    Every segment starts with the token that the tokenizer itself puts before a text, if any.

    Raises:
        ValueError: the text is too short.
    """
    before = torch.tensor(tokenizer("").input_ids[:1], dtype=torch.int64)
    ids = text_tokens(tokenizer, [text], count * (length - len(before)))
    return torch.cat([before.expand(count, -1), ids.view(count, -1)], dim=1)


@dataclass
class Reading:
    """How well one cache predicted every scored token: [segments, tokens] on the CPU."""

    loss: Tensor  # float32: negative log-likelihood of the true token, nats
    kl: Tensor  # float32: divergence from the uncompressed predictions, nats
    same: Tensor  # bool: the most likely token is that of the uncompressed predictions


@torch.no_grad()
def read(
    model: Any,
    make: Callable[[], Cache],
    text: Tensor,
    prefill: int,
    chunk: int,
    reference: list[Tensor] | None = None,
    title: str = "",
) -> tuple[Reading, list[Tensor], Cache]:
    """Predicts text[:, prefill:] through a new cache per segment.

    Args:
        make: makes an empty cache.
        text: int64 [segments, n].
        prefill, chunk: tokens of the first forward of a segment, and of every other one.
        reference: the uncompressed logits, float32 [n - prefill, vocabulary] per segment; None
            means that this is the uncompressed cache.
        title: stands in front of the progress bar.

    Returns:
        The reading; the logits of every segment if reference was None, else an empty list; the
        cache of the last segment, detached.
    """
    losses, kls, sames, kept = [], [], [], []
    scored = text.shape[1] - prefill
    bar = tqdm(total=len(text) * scored, desc=title, unit=" tokens", leave=False)
    for number, ids in enumerate(text.to(model.device)):
        cache = make()
        try:
            for start, end, logits in predictions(model, cache, ids, prefill, chunk):
                base = logits
                if reference is None:
                    if start == prefill:  # one tensor for all chunks: it may be large
                        kept.append(logits.new_empty(scored, logits.shape[-1], dtype=torch.float32))
                    kept[number][start - prefill : end - prefill] = logits
                else:
                    base = reference[number][start - prefill : end - prefill]
                kl, same = divergence(base, logits)
                losses.append(negative_log_likelihood(logits, ids[start:end]))
                kls.append(kl)
                sames.append(same)
                bar.update(end - start)
        finally:
            detach(cache)
    bar.close()
    shape = (len(text), scored)
    reading = Reading(*(torch.cat(parts).view(shape).cpu() for parts in (losses, kls, sames)))
    return reading, kept, cache


# ----------------------------------------------------------------------------------- summaries


def block_means(x: Tensor) -> np.ndarray:
    """Means over blocks of neighbouring tokens: float64 [segments * blocks].

    x: [segments, tokens].

    A remainder shorter than a block joins the last block. All blocks weigh the same.
    """
    rows = [row.split(BLOCK) for row in x.double()]
    out = []
    for parts in rows:
        parts = list(parts)
        if len(parts) > 1 and len(parts[-1]) < BLOCK:
            parts[-2:] = [torch.cat(parts[-2:])]
        out += [part.mean().item() for part in parts]
    return np.array(out)


def interval(blocks: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The 95% interval of the mean of blocks, by bootstrap with a fixed seed."""
    values = np.asarray(blocks, dtype=np.float64)
    chosen = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[chosen].mean(1), [0.025, 0.975])
    return float(low), float(high)


def summary(reading: Reading, base: Reading | None = None) -> dict[str, Any]:
    """Means with their intervals, as entries of a row.

    The means are those of all tokens, the intervals those of `block_means`.

    Args:
        base: the uncompressed reading; None means that this is the uncompressed one.
    """
    row: dict[str, Any] = {}
    loss = reading.loss.double().mean().item()
    row["perplexity"] = math.exp(loss)
    row["perplexity_interval"] = [math.exp(x) for x in interval(block_means(reading.loss))]
    if base is None:
        return row
    change = reading.loss.double() - base.loss.double()
    row["perplexity_change"] = math.expm1(change.mean().item())
    row["perplexity_change_interval"] = [math.expm1(x) for x in interval(block_means(change))]
    row["kl"] = reading.kl.double().mean().item()
    row["kl_interval"] = list(interval(block_means(reading.kl)))
    parts = reading.kl.double().tensor_split(PARTS, dim=1)
    row["kl_by_position"] = [float(f"{part.mean().item():.4g}") for part in parts]
    row["top1_agreement"] = reading.same.double().mean().item()
    row["top1_agreement_interval"] = list(interval(block_means(reading.same)))
    return row
