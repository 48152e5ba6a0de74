"""Attention in float64 on any device, over keys and values that cache_load has decoded.

paged_attention_reference reads the pages by itself but only on the CPU, one query at a time; this
one is for long contexts and large batches on the device under test. What both share is nothing.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: list[int],
    q_lens: list[int],
    *,
    exact_k: Tensor | None = None,
    exact_v: Tensor | None = None,
    sinks: int = 0,
    window: int = 0,
    held: list[tuple[int, int]] | None = None,
    own: bool = False,
    gone: Tensor | None = None,
    softmax_scale: float | None = None,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64 of paged_attention.

    Args:
        q: [tokens, q_heads, d].
        k, v: [seqs, max_len, kv_heads, d], decoded.
        seq_lens, q_lens: of each sequence; its queries are its last tokens.
        exact_k, exact_v: of k's shape, seen by a query at p instead of k and v where the key is one
            of the first `sinks` tokens or of the `window` tokens up to p. None: nowhere.
        held: of each sequence what its tail holds of these: so many of the first tokens, and those
            from a position on. None: all.
        own: also where the key is one of the call's own tokens, those with queries.
        gone: bool [seqs, max_len], keys that nobody sees.
        Others: as in paged_attention.
    """
    d, kv_heads = q.shape[2], k.shape[2]
    scale = 1 / math.sqrt(d) if softmax_scale is None else softmax_scale
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
    if sink_logits is not None:
        lse[: sum(q_lens)] = sink_logits.double()
    end = 0
    for s, (length, count) in enumerate(zip(seq_lens, q_lens, strict=True)):
        begin, end = end, end + count
        if count == 0 or length == 0:
            continue
        first = max(0, length - count - sliding_window + 1) if sliding_window else 0
        key = torch.arange(first, length, device=q.device)
        position = torch.arange(length - count, length, device=q.device)[:, None]
        seen = key <= position
        if sliding_window:
            seen &= key > position - sliding_window
        if gone is not None:
            seen &= ~gone[s, key]
        queries = q[begin:end].double().unflatten(1, (kv_heads, -1))  # [count, kv_heads, group, d]

        def scores(keys: Tensor, s=s, queries=queries, key=key) -> Tensor:
            return scale * torch.einsum("mhgd,jhd->mhgj", queries, keys[s, key].double())

        score = scores(k)
        near = torch.zeros_like(seen)
        if exact_k is not None:
            near = (key < sinks) | (position - key < window)
            if held is not None:
                near &= (key < held[s][0]) | (key >= max(held[s][1], sinks))
            if own:
                near |= key >= length - count
            score = torch.where(near[:, None, None], scores(exact_k), score)
        if soft_cap > 0:
            score = soft_cap * torch.tanh(score / soft_cap)
        score = score.masked_fill(~seen[:, None, None], -torch.inf)
        total = score.logsumexp(-1)
        if sink_logits is not None:
            total = torch.logaddexp(total, sink_logits.double().view(kv_heads, -1))
        weight = torch.exp(score - total[..., None])

        def sums(weights: Tensor, values: Tensor, s=s, key=key) -> Tensor:
            return torch.einsum("mhgj,jhd->mhgd", weights, values[s, key].double())

        result = sums(weight * ~near[:, None, None], v)
        if exact_v is not None:
            result += sums(weight * near[:, None, None], exact_v)
        out[begin:end] = result.flatten(1, 2)
        lse[begin:end] = total.flatten(1, 2)
    return out, lse


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    softmax_scale: float,
    **options: Any,
) -> Any:
    """flash_attn_varlen_func of FlashAttention in float64, as far as engines ask it."""
    out, lse = options.get("out"), torch.zeros(q.shape[1], len(q), dtype=torch.float32)
    out = q.new_empty(*q.shape[:2], v.shape[-1]) if out is None else out
    window, cap = options.get("window_size", (-1, -1))[0], options.get("softcap", 0.0)
    spans = zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True)
    for (a, c), (b, d) in itertools.pairwise(spans):
        keys, values = (
            x[c:d].double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)
        )
        score = torch.einsum("qhd,khd->hqk", q[a:b].double(), keys) * softmax_scale
        if cap:
            score = cap * (score / cap).tanh()
        if causal:
            seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
            if window >= 0:
                seen = seen.triu(d - c - (b - a) - window)
            score.masked_fill_(~seen, -torch.inf)
        lse[:, a:b] = score.logsumexp(-1)
        out[a:b] = torch.einsum("hqk,khd->qhd", score.softmax(-1), values)
    return (out, lse) if options.get("return_softmax_lse") else out
