"""What the demo measures: the speed of tokens behind a long text, predictions of prose, answers.

Speed is that of a model as people run it, in bfloat16. Quality is measured in float32, where only
the cache differs: every cache predicts the same prose through itself
(torch_turboquant.eval.predict), and every prediction is compared with that of the uncompressed
cache. All caches see the same true tokens. The same model in bfloat16, uncompressed, is one row
more: what rounding alone does to predictions and to greedy answers. So are the model with packed
weights, and both together.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from torch_turboquant.eval.predict import (
    detach,
    divergence,
    negative_log_likelihood,
    predictions,
)
from torch_turboquant.integrations.transformers import TurboQuantCache, quantize
from torch_turboquant.integrations.transformers.models import with_cache

MODEL_NAME = "SmolLM2-135M-Instruct"
QUESTIONS = (
    "Summarise the following text in a few sentences.",
    "What are the most important points of the following text? Answer in a short paragraph.",
)
PASSAGE_WORDS = 160
CALIBRATION_TOKENS = 2048  # of other articles than the prose that is predicted


@dataclass
class Speed:
    """One cache behind a long text: what it takes and how fast tokens follow."""

    preset: str | None  # None: uncompressed
    info: dict[str, Any]
    tokens: int  # in the cache at the end
    bytes_per_token: float  # what one more token adds in all layers
    bytes_total: int  # everything the cache holds
    prompt_seconds: float  # until the first new token
    tokens_per_second: float  # of the median decode step; NaN if there is none


@dataclass
class Result:
    """One cache: how well it predicted, and what it answered."""

    preset: str | None  # None: uncompressed
    info: dict[str, Any] = field(default_factory=dict)
    answers: list[Tensor] = field(default_factory=list)  # int64 [new tokens] per prompt
    agreement: float = 1.0  # share of generated tokens before the first difference
    tokens: int = 0  # of the prose, all of them in the cache
    scored: int = 0  # tokens of the prose that were predicted
    perplexity: float = math.nan
    kl: float = 0.0  # mean KL(uncompressed || this), nats
    top1: float = 1.0  # share of scored tokens with the same most likely token


# --------------------------------------------------------------------------------------- input


def make_prompts(tokenizer: Any, articles: Sequence[str]) -> list[Tensor]:
    """Chat prompts of some 250 tokens: one of QUESTIONS in turn, and a passage. int64 [n] each."""
    prompts = []
    for question, article in zip(itertools.cycle(QUESTIONS), articles, strict=False):
        passage = " ".join(article.split()[:PASSAGE_WORDS])
        message = [{"role": "user", "content": f"{question}\n\n{passage}"}]
        encoded = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        prompts.append(encoded["input_ids"][0])
    return prompts


# ------------------------------------------------------------------------------------- metrics


def equal_prefix(a: Tensor, b: Tensor) -> int:
    """How many tokens two sequences share before they first differ."""
    n = min(len(a), len(b))
    differ = (a[:n] != b[:n]).nonzero()
    return int(differ[0]) if len(differ) else n


# ---------------------------------------------------------------------------------- the weights


def pack_weights(model: Any, tokenizer: Any, articles: Sequence[str]) -> Any:
    """A copy of the model with packed weights, calibrated with these articles."""
    packed = copy.deepcopy(model)
    quantize(packed, text=articles, tokenizer=tokenizer, tokens=CALIBRATION_TOKENS)
    return packed


def weight_bits(model: Any) -> int | None:
    """Bits of the model's packed weights; None if they are not packed."""
    config = getattr(model.config, "quantization_config", None)
    return None if config is None else config.bits


def model_bytes(model: Any) -> int:
    """Bytes of all parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


# ----------------------------------------------------------------------------------- the caches


def new_cache(model: Any, preset: str | None, batch: int = 1) -> Cache:
    """An empty cache for `batch` sequences; preset None makes the uncompressed one."""
    if preset is None:
        return DynamicCache(config=model.config)
    return TurboQuantCache.for_model(model, preset, max_batch_size=batch)


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
        "model": MODEL_NAME,
        "dtype": str(model.dtype).removeprefix("torch."),
        "q_heads": config.num_attention_heads,
        "kv_heads": heads,
        "head_dim": config.head_dim,
        "layers": layers,
        "model_device": str(model.device),
        "weight_bits": weight_bits(model),
        "model_bytes": model_bytes(model),
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

    @property
    def prompt_seconds(self) -> float:
        """From the prompt, which is handed out first, to the first new token."""
        return self.times[1] - self.times[0]

    def tokens_per_second(self) -> float:
        """By the median decode step, which a busy machine disturbs little; NaN if there is none."""
        steps = [b - a for a, b in itertools.pairwise(self.times[1:])]
        return 1 / statistics.median(steps) if steps else math.nan


def fast_bfloat16(device: str) -> bool:
    """Whether torch multiplies in bfloat16 at full speed; old CPUs take minutes for a long text."""
    return torch.device(device).type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


@torch.no_grad()
def speed(model: Any, preset: str | None, text: Tensor, new_tokens: int) -> Speed:
    """Lets the model read a text at once and then generate greedily.

    Args:
        preset: of the cache, None for the uncompressed one.
        text: int64 [n].
        new_tokens: decode steps, and one.
    """
    cache, clock = new_cache(model, preset), _Clock()
    prompt = text[None].to(model.device)
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        **with_cache(model, cache),
        streamer=clock,
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
    )
    info = describe(model, preset, cache)
    per_token, total = cache_bytes(cache)
    detach(cache)
    tokens = len(text) + new_tokens - 1  # the last one is not stored
    return Speed(
        preset, info, tokens, per_token, total, clock.prompt_seconds, clock.tokens_per_second()
    )


@torch.no_grad()
def generate(
    model: Any, preset: str | None, prompts: Sequence[Tensor], new_tokens: int
) -> list[Tensor]:
    """Greedy answers of `model.generate` to all prompts in one batch, padded on the left.

    Args:
        preset: of the cache, None for the uncompressed one.
        prompts: int64 [n] each.
        new_tokens: of each answer, which does not end before.

    Returns:
        One answer per prompt, int64 [new_tokens].
    """
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    cache = new_cache(model, preset, len(prompts))
    output = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        **with_cache(model, cache),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
    )
    detach(cache)
    return list(output[:, longest:].cpu())


def read_prose(
    runs: Sequence[tuple[Any, str | None]], prose: Tensor, prefill: int, chunk: int
) -> list[Result]:
    """Predicts prose[prefill:] through one cache per run; the first run is the reference.

    All caches advance together, chunk by chunk, so that no logits need to be kept.

    Args:
        runs: (model, name of a preset or None for the uncompressed cache).
        prose: int64 [n].
        prefill, chunk: tokens of the first forward, and of every other one.

    Returns:
        One result per run, without answers.
    """
    caches = [new_cache(model, preset) for model, preset in runs]
    results = [Result(preset) for _, preset in runs]
    losses = [0.0] * len(runs)
    matches = [0] * len(runs)
    scored = len(prose) - prefill
    readers = [
        predictions(model, cache, prose.to(model.device), prefill, chunk)
        for (model, _), cache in zip(runs, caches, strict=True)
    ]
    together = zip(*readers, strict=True)
    for parts in tqdm(together, "reading prose", total=-(-scored // chunk), leave=False):
        reference = parts[0][2]
        for i, (start, end, logits) in enumerate(parts):
            ids = prose[start:end].to(logits.device)
            losses[i] += negative_log_likelihood(logits, ids).sum().item()
            kl, same = divergence(reference, logits)
            results[i].kl += kl.sum().item() / scored
            matches[i] += int(same.sum())
    for i, (result, cache) in enumerate(zip(results, caches, strict=True)):
        result.info = describe(runs[i][0], result.preset, cache)
        result.tokens, result.scored = len(prose), scored
        result.perplexity = math.exp(losses[i] / scored)
        result.top1 = matches[i] / scored
        detach(cache)
    return results


def add_answers(
    runs: Sequence[tuple[Any, str | None]],
    results: Sequence[Result],
    prompts: Sequence[Tensor],
    new_tokens: int,
) -> None:
    """Completes results of `read_prose` by greedy answers to the prompts; see `generate`."""
    pairs = list(zip(runs, results, strict=True))
    for (model, preset), result in tqdm(pairs, "generating", leave=False):
        result.answers = generate(model, preset, prompts, new_tokens)
        both = zip(results[0].answers, result.answers, strict=True)
        equal = sum(equal_prefix(a, b) for a, b in both)
        result.agreement = equal / sum(len(a) for a in results[0].answers)
