"""What the demo measures: how well each cache predicts prose, and what it answers to prompts.

Every cache predicts the same prose through itself (torch_turboquant.eval.predict), and every
prediction is compared with that of the uncompressed cache. All caches see the same true tokens.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from torch_turboquant.eval.caches import UNCOMPRESSED, Choice
from torch_turboquant.eval.predict import (
    detach,
    divergence,
    negative_log_likelihood,
    predictions,
)
from torch_turboquant.integrations.transformers import TurboQuantCache

QUESTIONS = (
    "Summarise the following text in a few sentences.",
    "What are the most important points of the following text? Answer in a short paragraph.",
)
PASSAGE_WORDS = 220
MIN_NEW_TOKENS = 64  # an answer that ends at once says little about a cache


@dataclass
class Result:
    """One cache: what it held, how well it predicted, what it answered and how fast."""

    preset: str | None  # None: uncompressed
    info: dict[str, Any] = field(default_factory=dict)
    answers: list[Tensor] = field(default_factory=list)  # int64 [new tokens] per prompt
    agreement: float = 1.0  # share of generated tokens before the first difference
    tokens_per_second: float = math.nan  # while generating, after the prompt
    bytes_per_token: float = math.nan  # what one more token adds in all layers
    bytes_total: int = 0  # everything the cache holds after the prose
    tokens: int = 0  # of the prose, all of them in the cache
    scored: int = 0  # tokens of the prose that were predicted
    perplexity: float = math.nan
    kl: float = 0.0  # mean KL(uncompressed || this), nats
    top1: float = 1.0  # share of scored tokens with the same most likely token

    @property
    def compression(self) -> float:
        """How many times smaller than 16 bits per element, in whatever dtype the model runs."""
        return self.info["bytes_per_token_16_bit"] / self.bytes_per_token


# --------------------------------------------------------------------------------------- input


def make_prompts(tokenizer: Any, articles: Sequence[str]) -> list[Tensor]:
    """Chat prompts of a few hundred tokens, a task and a passage each: int64 [1, n]."""
    prompts = []
    for question, article in zip(QUESTIONS, articles[1:], strict=False):
        passage = " ".join(article.split()[:PASSAGE_WORDS])
        message = [{"role": "user", "content": f"{question}\n\n{passage}"}]
        encoded = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        prompts.append(encoded["input_ids"])
    return prompts


# ------------------------------------------------------------------------------------- metrics


def equal_prefix(a: Tensor, b: Tensor) -> int:
    """How many tokens two sequences share before they first differ."""
    n = min(len(a), len(b))
    differ = (a[:n] != b[:n]).nonzero()
    return int(differ[0]) if len(differ) else n


# ----------------------------------------------------------------------------------- the caches


def new_cache(model: Any, preset: str | None) -> Cache:
    """An empty cache for one sequence; preset None makes the uncompressed one."""
    return Choice.parse(preset or UNCOMPRESSED).make(model)


def cache_bytes(cache: DynamicCache | TurboQuantCache) -> tuple[float, int]:
    """Bytes that one more token adds, and bytes in all, both measured from the tensors."""
    if isinstance(cache, TurboQuantCache):
        memory = cache.memory_bytes()
        return cache.bytes_per_token, memory["pages"] + memory["tail"] + memory["tables"]
    total = sum(
        t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values)
    )
    return total / cache.get_seq_length(), total


def describe(
    model: Any, preset: str | None, cache: DynamicCache | TurboQuantCache
) -> dict[str, Any]:
    """The facts about model and cache that a row of results has to name."""
    config = model.config
    heads, layers = config.num_key_value_heads, config.num_hidden_layers
    info = {
        "model": "SmolLM2-135M-Instruct",
        "dtype": str(model.dtype).removeprefix("torch."),
        "q_heads": config.num_attention_heads,
        "kv_heads": heads,
        "head_dim": config.head_dim,
        "layers": layers,
        "bytes_per_token_16_bit": 2 * 2 * config.head_dim * heads * layers,
        "model_device": str(model.device),
    }
    if preset is None:
        return info | {"cache_device": str(model.device)}
    packed = cache.config
    return info | {
        "cache_device": str(cache.cache_device),
        "page_size": packed.page_size,
        "tail": [packed.sink_tokens, packed.recent_window],
        "center": "auto",
    }


# --------------------------------------------------------------------------------- measurements


class _Clock(BaseStreamer):
    """A streamer that notes the times at which `generate` hands out tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def steps(self) -> list[float]:
        """Seconds between new tokens; the first entry is the prompt itself."""
        return [b - a for a, b in itertools.pairwise(self.times[1:])]


@torch.no_grad()
def generate(
    model: Any, make_cache: Callable[[], Cache], prompts: Sequence[Tensor], new_tokens: int
) -> tuple[list[Tensor], float]:
    """Greedy answers of `model.generate`.

    Args:
        make_cache: makes an empty cache; every prompt gets one of its own.
        prompts: int64 [1, n] each.
        new_tokens: the most tokens of an answer.

    Returns:
        One answer per prompt, int64 [at most new_tokens], and the rate in tokens per second. The
        rate is that of the median decode step, which a busy machine disturbs little; it is NaN if
        no answer has two tokens.
    """
    answers, steps = [], []
    for prompt in prompts:
        cache, clock = make_cache(), _Clock()
        prompt = prompt.to(model.device)
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=cache,
            streamer=clock,
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=min(new_tokens, MIN_NEW_TOKENS),
        )
        detach(cache)
        answers.append(output[0, prompt.shape[1] :].cpu())
        steps += clock.steps()
    return answers, 1 / statistics.median(steps) if steps else math.nan


def read_prose(
    model: Any, presets: Sequence[str | None], prose: Tensor, prefill: int, chunk: int
) -> list[Result]:
    """Predicts prose[prefill:] through one cache per preset; the first cache is the reference.

    All caches advance together, chunk by chunk, so that no logits need to be kept.

    Args:
        presets: names of presets, None for the uncompressed cache.
        prose: int64 [n].
        prefill, chunk: tokens of the first forward, and of every other one.

    Returns:
        One result per preset, without answers.
    """
    caches = [new_cache(model, preset) for preset in presets]
    results = [Result(preset) for preset in presets]
    losses = [0.0] * len(presets)
    matches = [0] * len(presets)
    ids = prose.to(model.device)
    scored = len(ids) - prefill
    readers = [predictions(model, cache, ids, prefill, chunk) for cache in caches]
    together = zip(*readers, strict=True)
    for parts in tqdm(together, "reading prose", total=-(-scored // chunk), leave=False):
        reference = parts[0][2]
        for i, (start, end, logits) in enumerate(parts):
            losses[i] += negative_log_likelihood(logits, ids[start:end]).sum().item()
            kl, same = divergence(reference, logits)
            results[i].kl += kl.sum().item() / scored
            matches[i] += int(same.sum())
    for i, (result, cache) in enumerate(zip(results, caches, strict=True)):
        result.info = describe(model, result.preset, cache)
        result.bytes_per_token, result.bytes_total = cache_bytes(cache)
        result.tokens, result.scored = len(ids), scored
        result.perplexity = math.exp(losses[i] / scored)
        result.top1 = matches[i] / scored
        detach(cache)
    return results


def add_answers(
    model: Any, results: Sequence[Result], prompts: Sequence[Tensor], new_tokens: int
) -> None:
    """Completes results of `read_prose` by greedy answers to the prompts; see `generate`."""
    for result in tqdm(results, "generating", leave=False):
        result.answers, result.tokens_per_second = generate(
            model, partial(new_cache, model, result.preset), prompts, new_tokens
        )
        pairs = zip(results[0].answers, result.answers, strict=True)
        equal = sum(equal_prefix(a, b) for a, b in pairs)
        result.agreement = equal / sum(len(a) for a in results[0].answers)
