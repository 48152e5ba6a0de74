"""Eviction: which tokens of a prompt a cache keeps, and which it never stores.

    eviction = Eviction(keep=0.5, evict="snapkv", sinks=4, window=64)
    scores = eviction.scores(queries, keys, values, lengths)    # float32 [batch, kv_heads, tokens]
    columns = eviction.columns(scores, lengths)                 # int64 [batch, kv_heads, kept]
    keys, values = kept_tokens(keys, columns), kept_tokens(values, columns)

`Eviction.thin` does the same with one prompt in the shape that ops and pools take.

A policy gives every token of every KV head a score, and those with the highest scores stay, in
their order. The heads of a layer keep equally many tokens, but not the same ones. The first `sinks`
and the last `window` tokens always stay, whatever their scores.

A policy is a function policy(queries, keys, values) -> scores of one prompt without padding, or of
several of one length:

    queries     [batch, heads, n, head_dim]: of the last n tokens, scaled so that
                softmax(queries keys^T / sqrt(head_dim)) are the weights of attention; n is OBSERVED
                or less, where the prompt or its last forward is shorter
    keys        [batch, kv_heads, tokens, head_dim], with their positions (RoPE) in them
    values      [batch, kv_heads, tokens, head_dim]
    scores      float32 [batch, kv_heads, tokens], on the device of the keys, without NaN

The policies below compute in float32 and take temporary memory of some LIMIT elements, however long
the prompt is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_turboquant import _checks
from torch_turboquant.config import did_you_mean

Policy = Callable[[Tensor, Tensor, Tensor], Tensor]

OBSERVED = 64
"""The last tokens of a prompt whose queries a policy gets."""

VOTING = 16  # last queries that SnapKV looks at: with 64, a question at the end is outvoted
POOLED = 5  # neighbouring tokens whose scores SnapKV averages
LIMIT = 2**24  # elements of a temporary tensor, but for a single row

# ---- policies


def snapkv(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """SnapKV (arXiv:2404.14469, section 4): what the last queries attend to.

    A token's score is the mean weight that the last VOTING queries give it, over the query heads of
    its KV head and over the queries that see it. Scores are then averaged over POOLED neighbours,
    so that what stays is pieces of text rather than single tokens. The paper keeps all tokens of
    the queries; here the exact window does that.
    """
    queries, group = queries[:, :, -VOTING:], queries.shape[1] // keys.shape[1]
    n, tokens, d = queries.shape[2], keys.shape[2], keys.shape[3]
    mass = torch.empty(keys.shape[:3], dtype=torch.float32, device=keys.device)
    hidden = torch.ones(n, n, dtype=torch.bool, device=keys.device).triu(1).repeat(group, 1)
    for rows, heads in _parts(keys.shape[0], keys.shape[1], tokens * d):
        key = keys[rows, heads].float()
        query = queries[rows].unflatten(1, (-1, group))[:, heads].flatten(2, 3).float() / d**0.5
        total = mass[rows, heads].zero_()
        step = max(1, LIMIT // (key.shape[0] * key.shape[1] * tokens))
        for first in range(0, n * group, step):
            logits = query[:, :, first : first + step] @ key.mT
            logits[..., tokens - n :].masked_fill_(hidden[first : first + step], -torch.inf)
            total += logits.softmax(-1).sum(2)
    seen = torch.full((tokens,), n, dtype=torch.float32, device=keys.device)
    seen[tokens - n :] = torch.arange(n, 0, -1, device=keys.device)
    return F.avg_pool1d(mass / (seen * group), POOLED, 1, POOLED // 2, count_include_pad=False)


def keydiff(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """KeyDiff (arXiv:2504.15364, section 3): keys that differ from the others.

    A token's score is the negative cosine of its key and the mean of all keys of the head, each
    scaled to length 1. No query is looked at.
    """
    scores = torch.empty(keys.shape[:3], dtype=torch.float32, device=keys.device)
    for rows, heads in _parts(keys.shape[0], keys.shape[1], keys.shape[2] * keys.shape[3]):
        unit = F.normalize(keys[rows, heads].float(), dim=-1)
        anchor = F.normalize(unit.mean(2, keepdim=True), dim=-1)
        scores[rows, heads] = -(unit @ anchor.mT)[..., 0]
    return scores


def streaming(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """StreamingLLM (arXiv:2309.17453, section 3.2): the sinks and the most recent tokens.

    A token's score is its position. Unlike in the paper, tokens keep the positions that they had in
    the prompt.
    """
    position = torch.arange(keys.shape[2], dtype=torch.float32, device=keys.device)
    return position.expand(keys.shape[:3])


def random(queries: Tensor, keys: Tensor, values: Tensor, *, seed: int = 0) -> Tensor:
    """Any tokens: what a policy has to beat. Of one seed the same ones on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    scores = torch.rand(keys.shape[:3], generator=generator, dtype=torch.float32, device="cpu")
    return scores.to(keys.device)


POLICIES: dict[str, Policy] = {
    "snapkv": snapkv,
    "keydiff": keydiff,
    "streaming": streaming,
    "random": random,
}


def _parts(batch: int, heads: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Sequences and heads of `size` elements each, as many at a time as LIMIT allows."""
    together = max(1, LIMIT // size)
    rows, part = max(1, together // heads), min(heads, together)
    for row in range(0, batch, rows):
        for head in range(0, heads, part):
            yield slice(row, row + rows), slice(head, head + part)


# ---- what stays


@dataclass(frozen=True)
class Eviction:
    """What a cache keeps of its prompts.

    Args:
        keep: the share of a prompt's tokens that stay, above 0 and up to 1 (all of them).
        evict: a name of POLICIES, or a policy.
        sinks: the first tokens, which always stay.
        window: the last tokens, which always stay.
        seed: of the policy "random", 0 to 2^64 - 1.

    Raises:
        TypeError: keep is no number, or evict neither a name nor callable.
        ValueError: keep out of range, an unknown name, or sinks, window and seed that are no whole
            numbers of 0 and more.
    """

    keep: float = 1.0
    evict: str | Policy = "snapkv"
    sinks: int = 0
    window: int = 0
    seed: int = 0
    policy: Policy = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        keep, evict = self.keep, self.evict
        if isinstance(keep, bool) or not isinstance(keep, (int, float)):
            raise TypeError(f"keep must be a number, got {type(keep).__name__}")
        if not 0 < keep <= 1:
            raise ValueError(f"keep is {keep}, supported: above 0 and up to 1 (all tokens)")
        if isinstance(evict, str):
            if evict not in POLICIES:
                raise ValueError(
                    f"unknown policy {evict!r}{did_you_mean(evict, list(POLICIES))}; evict is one "
                    f"of {', '.join(POLICIES)}, or a function of queries, keys and values"
                )
        elif not callable(evict):
            raise TypeError(
                f"evict must be a name or a function of queries, keys and values, got "
                f"{type(evict).__name__}"
            )
        _checks.check_count(sinks=self.sinks, window=self.window)
        _checks.check_whole_fields(self, "sinks", "window", "seed")
        _checks.check_seed(self.seed)
        policy = POLICIES[evict] if isinstance(evict, str) else evict
        policy = partial(random, seed=self.seed) if evict == "random" else policy
        object.__setattr__(self, "policy", policy)

    @property
    def evicts(self) -> bool:
        """Whether any tokens can go."""
        return self.keep < 1

    def count(self, length: int) -> int:
        """How many of a prompt's tokens stay: the share `keep`, rounded up, or sinks and window.

        Args:
            length: tokens of the prompt, without padding.
        """
        share = math.ceil(self.keep * length - 1e-6)  # the product may be a trace above an integer
        return min(length, max(1, share, self.sinks + self.window))

    def scores(
        self, queries: Tensor, keys: Tensor, values: Tensor, lengths: Sequence[int]
    ) -> Tensor:
        """The policy's scores of left-padded prompts; it never sees the padding.

        Args:
            queries: [batch, heads, new, head_dim] of the last tokens, scaled as at the top of this
                file. The policy gets the last OBSERVED of them.
            keys, values: [batch, kv_heads, tokens, head_dim].
            lengths: tokens of each prompt; the rest, on the left, is padding.

        Returns:
            float32 [batch, kv_heads, tokens]; of padding -inf.

        Raises:
            TypeError: the policy returns no tensor, or one of another dtype.
            ValueError: it returns another shape or device, or NaN; lengths that are not those of
                these prompts.
        """
        tokens = keys.shape[2]
        _check_lengths(lengths, keys.shape[0], tokens)
        queries = queries[:, :, -OBSERVED:]
        if 0 in keys.shape[:3]:  # a policy need not know of them
            return keys.new_empty(keys.shape[:3], dtype=torch.float32)
        if min(lengths) == tokens:
            return self._scores(queries, keys, values)
        scores = keys.new_full(keys.shape[:3], -torch.inf, dtype=torch.float32)
        for length in sorted(set(lengths) - {0}):
            rows = torch.tensor([i for i, n in enumerate(lengths) if n == length])
            rows = rows.to(keys.device, non_blocking=True)
            parts = (x[:, :, -length:].index_select(0, rows) for x in (queries, keys, values))
            scores[rows, :, tokens - length :] = self._scores(*parts)
        return scores

    def _scores(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Of prompts of one length, without padding."""
        with torch.autocast(keys.device.type, enabled=False):  # scores are float32
            scores = self.policy(queries, keys, values)
        if not isinstance(self.evict, str):
            _check_scores(scores, keys)
        return scores

    def columns(self, scores: Tensor, lengths: Sequence[int]) -> Tensor:
        """Which columns of left-padded prompts stay in each head.

        Args:
            scores: float32 [batch, kv_heads, tokens].
            lengths: tokens of each prompt.

        Returns:
            int64 [batch, kv_heads, kept], increasing; kept is `count` of the longest prompt. A
            prompt with fewer tokens to keep has them on the right; what is left of them is padding,
            with no meaning but a valid column.

        Raises:
            ValueError: lengths that are not those of these prompts.
        """
        batch, heads, tokens = scores.shape
        _check_lengths(lengths, batch, tokens)
        counts = [self.count(length) for length in lengths]
        kept = max(counts, default=0)
        columns = torch.zeros(batch, heads, kept, dtype=torch.int64, device=scores.device)
        for length in sorted(set(lengths) - {0}):
            rows = [i for i, n in enumerate(lengths) if n == length]
            which: slice | Tensor = slice(None)
            if len(rows) < batch:
                which = torch.tensor(rows).to(scores.device, non_blocking=True)
            count, pad = self.count(length), tokens - length
            columns[which, :, kept - count :] = pad + self._chosen(scores[which, :, pad:], count)
        return columns

    def thin(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What stays of one prompt in one layer.

        Args:
            queries: [n, heads, head_dim], of the prompt's last tokens or all, scaled as at the top
                of this file.
            keys, values: [tokens, kv_heads, head_dim], with the same dtype.

        Returns:
            keys, values: [count(tokens), kv_heads, head_dim].

        Raises:
            TypeError: as scores.
            ValueError: as scores; an empty prompt; tensors whose shapes do not fit together.
        """
        _check_prompt(queries, keys, values)
        queries, keys, values = (x.transpose(0, 1)[None] for x in (queries, keys, values))
        lengths = [keys.shape[2]]
        columns = self.columns(self.scores(queries, keys, values, lengths), lengths)
        keys, values = kept_tokens(keys, columns), kept_tokens(values, columns)
        return keys[0].transpose(0, 1), values[0].transpose(0, 1)

    def _chosen(self, scores: Tensor, count: int) -> Tensor:
        """The positions that stay of scores [batch, kv_heads, length], increasing."""
        length = scores.shape[2]
        first = min(self.sinks, length)
        last = max(first, length - self.window)
        position = torch.arange(length, device=scores.device).expand(scores.shape)
        middle = scores[..., first:last].topk(count - first - (length - last), sorted=False).indices
        middle = middle.sort().values + first
        return torch.cat([position[..., :first], middle, position[..., last:]], dim=2)


def _check_prompt(queries: Tensor, keys: Tensor, values: Tensor) -> None:
    """Raises unless these are one prompt of one layer."""
    _checks.check_shape("keys", keys, (None, None, None))
    _checks.check_shape("values", values, tuple(keys.shape))
    _checks.check_shape("queries", queries, (None, None, keys.shape[2]))
    (n, heads, _), (tokens, kv_heads, _) = queries.shape, keys.shape
    if not 1 <= n <= tokens:
        raise ValueError(
            f"queries of {n} tokens for a prompt of {tokens}, supported: 1 to all of them"
        )
    if not kv_heads or not heads or heads % kv_heads:
        raise ValueError(f"queries have {heads} heads, expected a multiple of the keys' {kv_heads}")


def _check_lengths(lengths: Sequence[int], batch: int, tokens: int) -> None:
    """Raises unless these are the lengths of so many left-padded prompts."""
    if len(lengths) != batch or not all(0 <= length <= tokens for length in lengths):
        raise ValueError(
            f"lengths are {list(lengths)}, supported: of {batch} prompts, 0 to {tokens} each"
        )


def _check_scores(scores: Any, keys: Tensor) -> None:
    """Raises where a user's policy returns something else than scores."""
    _checks.check_dtype("the policy's result", scores, (torch.float32,))
    _checks.check_shape("the policy's result", scores, tuple(keys.shape[:3]))
    if scores.device != keys.device:
        raise ValueError(f"the policy's result is on {scores.device}, its keys on {keys.device}")
    if scores.isnan().any():
        raise ValueError("the policy's result holds NaN, which no token can be compared with")


def kept_tokens(x: Tensor, columns: Tensor) -> Tensor:
    """Keys or values [batch, kv_heads, tokens, d] of these columns: [batch, kv_heads, kept, d].

    columns: int64 [batch, kv_heads, kept], as of Eviction.columns.
    """
    return x.gather(2, columns[..., None].expand(-1, -1, -1, x.shape[3]))
