"""Errors of single layers: a cache stores and gives back what the uncompressed model computed.

The keys, values and queries of every layer are those of the uncompressed model, so that no layer
gets the errors of the one before. A cache gives back what it would attend to after the last token:
codes decoded, exact tokens exact. Tokens that a sliding window has released count as exact, since
no query attends to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from torch_turboquant.centers import SINKS
from torch_turboquant.integrations.transformers import TurboQuantCache
from torch_turboquant.integrations.transformers.models import recording
from torch_turboquant.ops.cache import cache_load
from torch_turboquant.ops.hadamard import hadamard
from torch_turboquant.signs import SignKind, random_signs
from torch_turboquant.tail import owned_pages

QUERIES = 32  # last tokens whose attention is compared


class Activations(NamedTuple):
    """The inputs of one attention layer, for one sequence of n tokens."""

    queries: Tensor  # [heads, n, head_dim]
    keys: Tensor  # [kv_heads, n, head_dim], after RoPE
    values: Tensor  # [kv_heads, n, head_dim]
    options: dict[str, Any]  # scaling, softcap, sliding_window, s_aux


@torch.no_grad()
def record(model: Any, ids: Tensor) -> list[Activations]:
    """The attention inputs of every layer in one uncompressed forward over ids, int64 [n]."""
    found: dict[int, Activations] = {}

    def note(module, query, key, value, options) -> None:
        found[module.layer_idx] = Activations(
            query[0].clone(), key[0].clone(), value[0].clone(), options
        )

    with recording(model, note):
        model(ids[None].to(model.device), use_cache=False, logits_to_keep=1)
    return [found[i] for i in range(len(found))]


# ---------------------------------------------------------------------------- through a cache


@torch.no_grad()
def store(cache: Cache, batch: int, new: int, layers: Iterable[Sequence[Tensor | None]]) -> None:
    """Stores new tokens of every layer as a forward would, without one.

    Args:
        cache: any kind of cache; a TurboQuantCache may be attached or not.
        batch, new: sequences, and new tokens of each.
        layers: for each layer queries [batch, heads, new, head_dim] (only TurboQuantCache needs
            them), keys and values [batch, kv_heads, new, head_dim].
    """
    packed = isinstance(cache, TurboQuantCache)
    if packed:
        cache.lifecycle.begin(batch, new, None, None)
    for index, (queries, keys, values) in enumerate(layers):
        stored = cache.update(keys, values, index)
        if packed:  # what attention does after the update
            layer = cache.layers[index]
            if not cache.lifecycle.attended(layer, None, queries, *stored):
                layer.keep(*stored)
    if packed:
        cache.lifecycle.end()


@torch.no_grad()
def read_back(
    cache: Cache, layers: list[Activations], prefill: int, chunk: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of every layer as an empty cache holds them: float32 [kv_heads, n, head_dim].

    Args:
        cache: an empty cache of caches.Choice.make, attached or not.
        layers: the activations of every layer (record).
        prefill, chunk: tokens of the first store, from which a center is learned, and of every
            other one.
    """
    packed = isinstance(cache, TurboQuantCache)
    n = layers[0].keys.shape[1]
    step = min(chunk, cache.sequences.max_q_len) if packed else chunk
    starts = [0, *range(min(prefill, n), n, step)]
    for start, end in zip(starts, [*starts[1:], n], strict=True):
        inputs = ((x.queries, x.keys, x.values) for x in layers)
        store(cache, 1, end - start, ([t[None, :, start:end] for t in x] for x in inputs))
    for index, layer in enumerate(layers):
        yield _packed(cache, index, layer) if packed else _plain(cache.layers[index])


def _plain(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.keys[0].float(), layer.values[0].float()


def _packed(cache: TurboQuantCache, index: int, layer: Activations) -> tuple[Tensor, Tensor]:
    held, n = cache.layers[index], layer.keys.shape[1]
    exact = layer.keys.float(), layer.values.float()
    if not cache.sequences.encoded:
        return exact
    device, config = held.device, held.config
    size, pages = config.page_size, len(held.pages)
    blocks = -(-n // size)
    table = torch.from_numpy(owned_pages(1, blocks, pages)).to(device)
    lengths = torch.tensor([n], dtype=torch.int32, device=device)
    decoded = cache_load(held.pages, table, lengths, config, held.tables, n, torch.float32)
    recent = n - min(n, config.recent_window)
    first = max(0, blocks - pages) * size  # a sliding window has released the tokens before
    out = []
    for codes, original in zip(decoded, exact, strict=True):
        x = codes[0].transpose(0, 1).to(original.device, copy=True)
        exact_head = max(first, config.sink_tokens)
        x[:, :exact_head] = original[:, :exact_head]
        x[:, recent:] = original[:, recent:]
        out.append(x)
    return tuple(out)


# ------------------------------------------------------------------------------------- metrics


def errors(layer: Activations, keys: Tensor, values: Tensor) -> dict[str, float | None]:
    """Errors of one layer that attends to decoded keys and values, float32 [kv_heads, n, head_dim].

    Returns:
        key_nmse, value_nmse: squared error over squared length, of the tokens that are not exact.
        key_snr_db, value_snr_db: the energy of the same tokens around the channel means over their
            squared error, in decibels; None without an error.
        score_cosine: the mean over queries of the cosine between true and decoded attention scores,
            each less its mean, which softmax ignores.
        output_error: the root mean square error of the attention output over the root mean square
            of the output.
    """
    layer = layer._replace(queries=layer.queries[:, -QUERIES:])
    out: dict[str, float | None] = {}
    pairs = (("key", layer.keys.float(), keys), ("value", layer.values.float(), values))
    for name, x, y in pairs:
        coded = (x != y).any(-1).any(0)
        error = (x - y)[:, coded].double().square().sum().item()
        energy = x[:, coded].double().square().sum().item()
        around = (x - x.mean(1, keepdim=True))[:, coded].double().square().sum().item()
        out[f"{name}_nmse"] = error / energy if energy else 0.0
        out[f"{name}_snr_db"] = 10 * math.log10(around / error) if error and around else None
    true_scores, true_output = attend(layer, layer.keys.float(), layer.values.float())
    scores, output = attend(layer, keys, values)
    seen = true_scores.isfinite()
    count = seen.sum(-1, keepdim=True)

    def centered(s: Tensor) -> Tensor:
        s = s.masked_fill(~seen, 0.0)
        return (s - s.sum(-1, keepdim=True) / count).masked_fill(~seen, 0.0)

    cosine = torch.cosine_similarity(centered(true_scores), centered(scores), dim=-1)
    out["score_cosine"] = cosine.double().mean().item()
    error = (output - true_output).double().square().mean() / true_output.double().square().mean()
    out["output_error"] = error.sqrt().item()
    return out


def attend(layer: Activations, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention of the layer's queries over float32 [kv_heads, n, head_dim] each.

    Returns:
        The scores [heads, queries, n], -inf where a query does not attend, and the output
        [heads, queries, head_dim].
    """
    q = layer.queries.float()
    heads, queries, dim = q.shape
    groups = heads // keys.shape[0]
    keys, values = (x.repeat_interleave(groups, 0) for x in (keys, values))
    scaling = layer.options.get("scaling")
    scores = q @ keys.transpose(1, 2) * (dim**-0.5 if scaling is None else scaling)
    cap = layer.options.get("softcap")
    if cap:
        scores = cap * torch.tanh(scores / cap)
    n = keys.shape[1]
    at = torch.arange(n - queries, n, device=q.device)[:, None]
    token = torch.arange(n, device=q.device)
    unseen = token > at
    window = layer.options.get("sliding_window")
    if window:
        unseen |= token <= at - window
    scores = scores.masked_fill(unseen, -math.inf)
    sinks = layer.options.get("s_aux")
    if sinks is None:
        weights = scores.softmax(-1)
    else:  # one more logit per head, which takes weight and adds no value
        extra = sinks.float().view(-1, 1, 1).expand(-1, queries, 1)
        weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
    return scores, weights @ values


def channel_spread(index: int, layer: Activations) -> dict[str, float]:
    """Largest over smallest mean square of a channel, averaged over KV heads.

    Measured for keys as they are, less their center (the mean), rotated, and both; for values as
    they are, and rotated. 1 is ideal for one scalar codebook for all channels.

    index: of the layer, which determines the signs of the rotation.
    """

    def spread(x: Tensor) -> float:
        power = x.double().square().mean(1)
        return (power.amax(-1) / power.amin(-1).clamp(min=1e-30)).mean().item()

    keys, values = (x[:, SINKS:].float() for x in (layer.keys, layer.values))
    rotate = [
        random_signs(keys.shape[-1], 0, index, kind).to(keys.device)
        for kind in (SignKind.KEYS, SignKind.VALUES)
    ]
    centered = keys - keys.mean(1, keepdim=True)
    return {
        "key": spread(keys),
        "key_centered": spread(centered),
        "key_rotated": spread(hadamard(keys, rotate[0])),
        "key_centered_rotated": spread(hadamard(centered, rotate[0])),
        "value": spread(values),
        "value_rotated": spread(hadamard(values, rotate[1])),
    }
