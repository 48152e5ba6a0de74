"""What the demo measures.

Likelihood scoring of a text in one forward never reads a KV cache, so the caches are measured the
way they are used: a first chunk of prose is read at once, and every later token is predicted by a
forward that reads all earlier keys and values from the cache. The forwards take several tokens at a
time, which does not change what any token sees (a test compares with one at a time). All caches see
the same true tokens, and every prediction is compared with that of the uncompressed cache.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from torch_turboquant.integrations.transformers import TurboQuantCache

QUESTIONS = (
    "Summarise the following text in a few sentences.",
    "What are the most important points of the following text? Answer in a short paragraph.",
)
PASSAGE_WORDS = 220
MIN_NEW_TOKENS = 64  # an answer that ends at once says little about a cache


@dataclass
class Result:
    """One cache: what it held, what it said, how well it predicted, how fast."""

    preset: str | None  # None: uncompressed
    info: dict[str, Any] = field(default_factory=dict)
    answers: list[Tensor] = field(default_factory=list)  # int64 [new tokens] per prompt
    agreement: float = 1.0  # share of generated tokens before the first difference
    tokens_per_second: float = math.nan  # while generating, after the prompt
    bytes_per_token: float = math.nan  # that one more token adds, all layers
    bytes_total: int = 0  # everything the cache holds after the prose
    tokens: int = 0  # of prose in the cache
    scored: int = 0
    perplexity: float = math.nan
    kl: float = 0.0  # mean KL(uncompressed || this), nats
    top1: float = 1.0  # share of scored tokens with the same most likely token

    @property
    def compression(self) -> float:
        """Against 16 bits per number, whatever the model runs in."""
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


def prose_tokens(tokenizer: Any, articles: Sequence[str], count: int) -> Tensor:
    """The first `count` tokens of the articles: int64 [count].

    Raises:
        ValueError: the articles are shorter.
    """
    ids = tokenizer("\n\n".join(articles), return_tensors="pt", add_special_tokens=False)
    ids = ids.input_ids[0]
    if len(ids) < count:
        raise ValueError(f"the text has {len(ids)} tokens, {count} are asked for")
    return ids[:count]


# ------------------------------------------------------------------------------------- metrics


def equal_prefix(a: Tensor, b: Tensor) -> int:
    """How many tokens two sequences share before they first differ."""
    n = min(len(a), len(b))
    differ = (a[:n] != b[:n]).nonzero()
    return int(differ[0]) if len(differ) else n


def negative_log_likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    """Of every token, in nats, float32 [n]: logits [n, vocabulary], targets int64 [n]."""
    return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")


def divergence(reference: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """KL(reference || logits) of every token in nats, float32 [n], and whether the top one agrees.

    Args:
        reference, logits: [n, vocabulary].
    """
    p, q = reference.float().log_softmax(-1), logits.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1), p.argmax(-1) == q.argmax(-1)


# ----------------------------------------------------------------------------------- the caches


def new_cache(model: Any, preset: str | None) -> DynamicCache | TurboQuantCache:
    """A cache for one sequence; preset None is the uncompressed one."""
    if preset is None:
        return DynamicCache(config=model.config)
    return TurboQuantCache.for_model(model, preset)


def detach(cache: Cache) -> None:
    """Gives the model back as it was before `new_cache`."""
    if isinstance(cache, TurboQuantCache):
        cache.detach()


def cache_bytes(cache: DynamicCache | TurboQuantCache) -> tuple[float, int]:
    """(bytes that one more token adds, bytes in all), measured from the tensors."""
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
    """What a row of results has to name."""
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
    """Notes when `generate` hands out tokens."""

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
    """Greedy answers of `model.generate`: int64 [at most new_tokens] each, and tokens per second.

    Every prompt, int64 [1, n], gets a cache of its own. The rate is that of the median step, so
    that a busy machine disturbs it little.
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


@torch.no_grad()
def predictions(
    model: Any, cache: Cache, ids: Tensor, prefill: int, chunk: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Teacher forcing through a cache: reads ids[:prefill] at once, then predicts the rest.

    Args:
        ids: int64 [n] on the model's device.
        cache: empty.
        prefill: tokens of the first forward, 1 to n - 1.
        chunk: tokens of the others.

    Yields:
        (start, end, logits [end - start, vocabulary] that predict ids[start:end]).
    """
    last = model(ids[None, :prefill], past_key_values=cache, logits_to_keep=1).logits[0]
    for start in range(prefill, len(ids), chunk):
        end = min(start + chunk, len(ids))
        new = model(ids[None, start:end], past_key_values=cache).logits[0]
        yield start, end, torch.cat([last, new[:-1]])
        last = new[-1:]


def read_prose(
    model: Any, presets: Sequence[str | None], prose: Tensor, prefill: int, chunk: int
) -> list[Result]:
    """Predicts prose[prefill:] through one cache per preset; the first is the reference.

    All caches advance together, chunk by chunk, so that no logits need to be kept.
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


def compare(
    model: Any,
    prompts: Sequence[Tensor],
    prose: Tensor,
    presets: Sequence[str],
    new_tokens: int,
    prefill: int,
    chunk: int,
) -> list[Result]:
    """Everything for the uncompressed cache and every preset, in this order."""
    names = [None, *presets]
    results = read_prose(model, names, prose, prefill, chunk)
    for result in tqdm(results, "generating", leave=False):
        result.answers, result.tokens_per_second = generate(
            model, partial(new_cache, model, result.preset), prompts, new_tokens
        )
        pairs = zip(results[0].answers, result.answers, strict=True)
        equal = sum(equal_prefix(a, b) for a, b in pairs)
        result.agreement = equal / sum(len(a) for a in results[0].answers)
    return results
