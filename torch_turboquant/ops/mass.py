"""The attention mass of cached tokens: what eviction while decoding goes by.

The mass of a token under a KV head is the sum of the softmax weights that the queries of a call
give it, over all query heads of the group. A weight is exp(score - lse), and lse, the logarithm of
the softmax denominator, is known only when attention is done: paged_mass is a second pass, over
keys alone, with the queries of paged_attention and the lse that it returned. The masses of a call
sum to its number of query rows, less what learned sinks took.

Masses are those of tokens in a sequence, not of slots in the cache: sequences that share pages look
at them with other queries, and each drops tokens of its own. Whoever moves a token's codes
(cache_move) moves its mass, too.

Scores are computed as paged_attention computes them and rounded as its CPU kernel or its general
CUDA kernel rounds them, see its room; the weights themselves are float32. Against float64 a mass is
off by less than 10^-3 of itself, times the standard deviation of the scores where that is above 1.
It is the same in every run, and does not depend on the other sequences of the call, nor on the
number of threads.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torch_turboquant import _checks
from torch_turboquant.batch import AttentionBatch, AttentionOptions
from torch_turboquant.config import CacheConfig
from torch_turboquant.ops import _cache_checks as checks
from torch_turboquant.ops.attention import (
    NewTokens,
    call_arguments,
    check_raw_call,
    checked_call,
    scores_reference,
)
from torch_turboquant.tables import CacheTables
from torch_turboquant.tail import Tail


def paged_mass(
    q: Tensor,
    lse: Tensor,
    mass: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    config: CacheConfig,
    tables: CacheTables,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_q_len: int = 1,
    softmax_scale: float | None = None,
    tail: Tail | None = None,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
) -> None:
    """Adds the attention that the queries of a call give each token to its mass.

    mass[s, h, j] += sum of exp(score - lse) over the queries of sequence s and the query heads of
    KV head h. A query adds nothing to a token that it does not see.

    The other arguments are those of a call of paged_attention, and they decide which key a query
    meets: a key that the tail holds exactly for a query, a sink or one of its window, counts with
    the score of the exact key, and so does one of k_new. Without tail or k_new the same tokens
    count with the score of their codes. Learned sinks need no argument, because they are in lse.

    Args:
        q: [tokens, q_heads, head_dim] as in paged_attention.
        lse: float32 [tokens, q_heads], contiguous, what paged_attention returned for q. A row with
            -inf adds nothing.
        mass: float32 [seqs, kv_heads, n], contiguous, with room for n tokens of each sequence;
            what is there is added to, so a new one starts as zeros. It shares no memory with
            another tensor of the call.
        cache, block_table, seq_lens, config, tables, cu_seqlens_q, max_q_len: as in
            paged_attention. The value half of the cache does not matter.
        softmax_scale, tail, sliding_window, soft_cap, k_new, v_new: as in paged_attention. The
            numbers in v_new do not matter.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, stride or device; a number out of range; a tail with too few
            rows.
        RuntimeError: values of block_table, seq_lens, cu_seqlens_q or tail.slots out of range, or a
            sequence longer than n (checked on the CPU; on CUDA tokens behind n are left out); mass
            that shares memory. Nothing has been written by then.
    """
    ring, slots, valid = checks.parts_of_tail(tail)
    new = (k_new, v_new)
    batch, options = checked_call(
        q,
        cache,
        config,
        tables,
        ring,
        (block_table, seq_lens, cu_seqlens_q, max_q_len, slots, valid),
        (softmax_scale, sliding_window, soft_cap, None),
        new,
        None,
        None,
    )
    _check_mass(q, lse, mass, seq_lens.shape[0], cache.shape[1])
    call_mass(q, lse, mass, cache, config, tables, ring, batch, options, new)


def _check_mass(q: Tensor, lse: Tensor, mass: Tensor, seqs: int, kv_heads: int) -> None:
    _checks.check_constant("lse", lse, q.device, torch.float32, tuple(q.shape[:2]))
    _checks.check_constant("mass", mass, q.device, torch.float32, (seqs, kv_heads, None))


def call_mass(
    q: Tensor,
    lse: Tensor,
    mass: Tensor,
    pages: Tensor,
    config: CacheConfig,
    tables: CacheTables,
    ring: Tensor | None,
    batch: AttentionBatch,
    options: AttentionOptions,
    new: NewTokens,
) -> None:
    """Calls the op paged_mass, which checks everything that Python has not checked."""
    arguments = call_arguments(q, pages, config, tables, ring, batch, options, new)
    torch.ops.turboquant.paged_mass.default(*arguments, lse=lse, mass=mass)


# ---- fakes


@torch.library.register_fake("turboquant::paged_mass")
def _paged_mass_fake(*given: Any, **named: Any) -> None:
    a = checks.raw_arguments("paged_mass", given, named)
    check_raw_call(a)
    with _checks.of_fake():
        _check_mass(a.q, a.lse, a.mass, a.seq_lens.shape[0], a.cache.shape[1])


# ---- references: CPU tensors only


def paged_mass_reference(*arguments: Any, **options: Any) -> Tensor:
    """Takes paged_mass's arguments; mass is not written, and max_q_len has no effect.

    Returns:
        What paged_mass adds, float64 of mass's shape.
    """
    given = inspect.signature(paged_mass).bind(*arguments, **options)
    given.apply_defaults()
    a = SimpleNamespace(**given.arguments)
    added = torch.zeros(a.mass.shape, dtype=torch.float64)
    for token, s, first, scores, _ in scores_reference(a):
        lse = a.lse[token].double()[:, None]
        weights = torch.where(lse > -torch.inf, torch.exp(scores - lse), 0.0)
        of_heads = weights.unflatten(0, (added.shape[1], -1)).sum(1)
        added[s, :, first : first + scores.shape[1]] += of_heads
    return added
