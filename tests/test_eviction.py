"""Policies of eviction against dense float64 formulas, and which tokens stay."""

import math
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from torch_turboquant import eviction
from torch_turboquant.eviction import (
    OBSERVED,
    POLICIES,
    POOLED,
    VOTING,
    Eviction,
    kept_tokens,
)

BATCH, HEADS, KV_HEADS, DIM = 2, 6, 3, 32


def prompt(tokens, batch=BATCH, observed=OBSERVED, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    keys, values = torch.randn(2, batch, KV_HEADS, tokens, DIM, generator=generator)
    queries = 3 * torch.randn(batch, HEADS, min(observed, tokens), DIM, generator=generator)
    return queries.to(dtype), keys.to(dtype), values.to(dtype)


def attention_weights(queries, keys):
    """Of the last queries, causal: float64 [batch, heads, n, tokens]."""
    keys = keys.double().repeat_interleave(HEADS // KV_HEADS, 1)
    logits = queries.double() @ keys.mT / math.sqrt(DIM)
    n, tokens = logits.shape[2:]
    hidden = torch.arange(tokens) > torch.arange(tokens - n, tokens)[:, None]
    return logits.masked_fill(hidden, -torch.inf).softmax(-1)


def dense_snapkv(queries, keys):
    weights = attention_weights(queries[:, :, -VOTING:], keys)
    n, tokens = weights.shape[2:]
    seen = torch.tensor([min(n, tokens - j) for j in range(tokens)])  # queries that see token j
    mean = weights.sum(2).unflatten(1, (KV_HEADS, -1)).mean(2) / seen
    half = POOLED // 2
    near = [mean[..., max(0, j - half) : j + half + 1].mean(-1) for j in range(tokens)]
    return torch.stack(near, -1)


def dense_keydiff(keys):
    keys = keys.double()
    anchor = F.normalize(keys, dim=-1).mean(2, keepdim=True)
    return -F.cosine_similarity(keys, anchor, dim=-1)


@pytest.fixture(params=[eviction.LIMIT, 5000, 1], ids="limit {}".format)
def _limit(request, monkeypatch):
    """Temporary memory for everything at once, for a few heads or rows, and for one."""
    monkeypatch.setattr(eviction, "LIMIT", request.param)


@pytest.mark.usefixtures("_limit")
@pytest.mark.parametrize("tokens, observed", [(1, 64), (3, 64), (40, 64), (100, 64), (100, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_snapkv(tokens, observed, dtype):
    queries, keys, values = prompt(tokens, observed=observed, dtype=dtype)
    expected = dense_snapkv(queries, keys)
    scores = eviction.snapkv(queries, keys, values)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-7)
    assert scores.dtype == torch.float32


@pytest.mark.usefixtures("_limit")
@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keydiff(tokens, dtype):
    queries, keys, values = prompt(tokens, dtype=dtype)
    keys = keys + 2  # keys of a head have something in common
    scores = eviction.keydiff(queries, keys, values)
    torch.testing.assert_close(scores.double(), dense_keydiff(keys), rtol=1e-5, atol=1e-6)
    assert scores.dtype == torch.float32


def test_temporary_memory_does_not_grow_with_the_queries(monkeypatch):
    """No tensor of [heads, queries, tokens] and no float32 copy of all keys."""
    queries, keys, values = prompt(4000, batch=1, dtype=torch.bfloat16)
    monkeypatch.setattr(eviction, "LIMIT", 10_000)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
                largest = max(largest, out.numel())
            return out

    for policy in (eviction.snapkv, eviction.keydiff):
        largest = 0
        with Sizes():
            policy(queries, keys, values)
        assert 4000 * DIM <= largest <= 4000 * DIM + 10_000  # one head, or the result


def test_streaming_takes_the_last_tokens():
    scores = eviction.streaming(*prompt(50))
    assert scores.shape == (BATCH, KV_HEADS, 50) and scores.dtype == torch.float32
    columns = Eviction(0.4, "streaming", 4, 0).columns(scores, [50, 50])
    assert columns.tolist() == [[[*range(4), *range(34, 50)]] * KV_HEADS] * BATCH


def test_random_depends_on_the_seed_alone():
    tensors = prompt(50)
    one, same, other = (
        Eviction(0.5, "random", seed=seed).scores(*tensors, [50, 50]) for seed in (1, 1, 2)
    )
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert len({tuple(row) for row in one.flatten(0, 1).tolist()}) == BATCH * KV_HEADS


@pytest.mark.parametrize("name", POLICIES)
def test_padding_is_never_seen(name):
    """Each prompt of a padded batch gets the scores that it gets alone."""
    lengths = [70, 20, 0, 70]
    queries, keys, values = prompt(70, batch=4)
    rule = Eviction(0.5, name, 3, 9)
    scores = rule.scores(queries, keys, values, lengths)
    for row, length in enumerate(lengths):
        assert (scores[row, :, : 70 - length] == -torch.inf).all()
        if length == 0 or (name == "random" and row == 3):
            continue
        one = slice(row, row + 1)
        alone = (x[one, :, max(0, x.shape[2] - length) :] for x in (queries, keys, values))
        expected = rule.scores(*alone, [length])[0]
        torch.testing.assert_close(scores[row, :, 70 - length :], expected, rtol=1e-5, atol=1e-7)


def test_a_policy_gets_the_last_queries_only():
    seen = []

    def policy(queries, keys, values):
        seen.append((queries.clone(), keys.clone(), values.clone()))
        return keys[..., 0]

    queries, keys, values = prompt(90, observed=90)
    Eviction(0.5, policy).scores(queries, keys, values, [90, 30])
    (short, *_), (long, *tensors) = seen
    assert torch.equal(short, queries[1:, :, 60:])
    assert torch.equal(long, queries[:1, :, 90 - OBSERVED :])
    assert torch.equal(tensors[0], keys[:1]) and torch.equal(tensors[1], values[:1])


@pytest.mark.parametrize("sinks, window", [(0, 0), (3, 9), (0, 9), (3, 0), (40, 40)])
def test_the_best_tokens_stay_in_order(sinks, window):
    lengths, keep = [50, 7, 0, 50, 33], 0.3
    rule = Eviction(keep, "streaming", sinks, window)
    scores = torch.randn(5, KV_HEADS, 50, generator=torch.Generator().manual_seed(0))
    columns = rule.columns(scores, lengths)
    counts = [min(n, max(math.ceil(keep * n), sinks + window)) for n in lengths]
    assert [rule.count(n) for n in lengths] == counts
    assert columns.shape == (5, KV_HEADS, max(counts)) and columns.dtype == torch.int64
    chosen = []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for head in range(KV_HEADS):
            of_row = scores[row, head, 50 - length :].clone()
            of_row[:sinks] = of_row[max(0, length - window) :] = torch.inf
            best = of_row.sort(descending=True, stable=True).indices[:count].sort().values
            found = columns[row, head, max(counts) - count :]
            assert torch.equal(found, best + 50 - length)
            chosen.append(tuple(found.tolist()))
    assert columns.min() >= 0 and columns.max() < 50
    if sinks + window < 15:
        assert len(set(chosen)) > len(lengths)  # heads keep different tokens


def test_kept_tokens():
    _, keys, _ = prompt(20)
    keys = keys.transpose(1, 2).contiguous().transpose(1, 2)  # as models hand them over
    columns = torch.tensor([[[0, 5, 19], [1, 2, 3], [4, 5, 6]], [[7, 8, 9]] * 3])
    found = kept_tokens(keys, columns)
    for row in range(2):
        for head in range(3):
            assert torch.equal(found[row, head], keys[row, head][columns[row, head]])


@pytest.mark.parametrize("name", POLICIES)
def test_autocast_changes_no_score(name):
    tensors, rule = prompt(100), Eviction(0.5, name)
    with torch.autocast("cpu", torch.bfloat16):
        found = rule.scores(*tensors, [100, 100])
    assert torch.equal(found, rule.scores(*tensors, [100, 100]))


def test_what_queries_look_for_stays():
    """A fifth of the tokens has nearly all of the weight: half of the tokens is then enough.

    Their keys differ from the others', which are alike. Another query looks for the same ones.
    """
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(3, DIM, generator=generator)
    directions[2] = directions[2] - directions[0]  # away from what keys have in common
    common, _, sought = F.normalize(directions, dim=-1) * DIM**0.5
    keys, values = torch.randn(2, BATCH, KV_HEADS, 400, DIM, generator=generator)
    wanted = torch.rand(BATCH, KV_HEADS, 40, generator=generator) < 0.2
    wanted = wanted.repeat_interleave(10, 2)  # pieces of text
    keys = torch.where(wanted[..., None], keys + 1.5 * sought, keys + 2 * common)
    queries = torch.randn(BATCH, HEADS, OBSERVED + 1, DIM, generator=generator) + 0.5 * sought
    queries, later = queries[:, :, :-1], queries[:, :, -1:]
    exact = attention_weights(later, keys) @ values.double().repeat_interleave(2, 1)
    error = {}
    for name in POLICIES:
        rule = Eviction(0.5, name, 4, 16)
        columns = rule.columns(rule.scores(queries, keys, values, [400] * 2), [400] * 2)
        k, v = kept_tokens(keys, columns), kept_tokens(values, columns)
        found = attention_weights(later, k) @ v.double().repeat_interleave(2, 1)
        error[name] = (found - exact).norm() / exact.norm()
    assert max(error["snapkv"], error["keydiff"]) < 0.1
    assert min(error["random"], error["streaming"]) > 0.5


@pytest.mark.parametrize("name", POLICIES)
def test_one_prompt_as_ops_take_it(name):
    queries, keys, values = prompt(100, batch=1)
    rule = Eviction(0.3, name, 4, 9)
    columns = rule.columns(rule.scores(queries, keys, values, [100]), [100])
    flat = [x[0].transpose(0, 1).contiguous() for x in (queries, keys, values)]
    for found, whole in zip(rule.thin(*flat), (keys, values), strict=True):
        assert found.shape == (30, KV_HEADS, DIM)
        assert torch.equal(found.transpose(0, 1)[None], kept_tokens(whole, columns))


@pytest.mark.parametrize("shapes, match", [
    (((0, 4, 8), (0, 2, 8), (0, 2, 8)), "queries of 0 tokens for a prompt of 0, supported: 1 to"),
    (((0, 4, 8), (9, 2, 8), (9, 2, 8)), "queries of 0 tokens for a prompt of 9, supported: 1 to"),
    (((10, 4, 8), (9, 2, 8), (9, 2, 8)), "queries of 10 tokens for a prompt of 9, supported: 1"),
    (((9, 3, 8), (9, 2, 8), (9, 2, 8)), "queries have 3 heads, expected a multiple of .* 2"),
    (((9, 4, 16), (9, 2, 8), (9, 2, 8)), r"queries has shape \[9, 4, 16\]"),
    (((9, 4, 8), (9, 2, 8), (8, 2, 8)), r"values has shape \[8, 2, 8\]"),
    (((4, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8)), r"keys has shape \[1, 2, 9, 8\]"),
])  # fmt: skip
def test_what_is_no_prompt(shapes, match):
    with pytest.raises(ValueError, match=match):
        Eviction(0.5).thin(*map(torch.zeros, shapes))


def test_a_prompt_of_one_token():
    one = [torch.ones(1, heads, 8) for heads in (4, 2, 2)]
    assert torch.equal(Eviction(0.1).thin(*one)[0], one[1])


@pytest.mark.parametrize("keep, length, count", [
    (0.1, 10, 1), (0.7, 10, 7), (0.55, 100, 55), (0.3, 10, 3), (0.5, 11, 6), (1 / 3, 9, 3),
    (1e-9, 5, 1), (1, 13, 13), (0.999, 10, 10), (0.5, 0, 0),
])  # fmt: skip
def test_count(keep, length, count):
    """Rounded up, and not thrown by the last bit of a product."""
    assert Eviction(keep).count(length) == count
    assert Eviction(keep, sinks=4, window=64).count(length) == min(length, max(count, 68))


@pytest.mark.parametrize("keep, error, match", [
    (0, ValueError, "keep is 0, supported: above 0 and up to 1"),
    (-0.5, ValueError, "keep is -0.5, supported"),
    (1.01, ValueError, "keep is 1.01, supported"),
    (float("nan"), ValueError, "keep is nan, supported"),
    (50, ValueError, "keep is 50, supported"),
    ("half", TypeError, "keep must be a number, got str"),
    (None, TypeError, "keep must be a number, got NoneType"),
    (True, TypeError, "keep must be a number, got bool"),
])  # fmt: skip
def test_shares_that_are_refused(keep, error, match):
    with pytest.raises(error, match=match):
        Eviction(keep)


@pytest.mark.parametrize("numbers, match", [
    ({"sinks": -3}, "sinks is -3, supported: 0 and more"),
    ({"window": -2}, "window is -2, supported: 0 and more"),
    ({"sinks": 2.5}, "sinks is 2.5, which is no whole number"),
    ({"window": True}, "window is True, which is no whole number"),
    ({"seed": "1"}, "seed is '1', which is no whole number"),
    ({"seed": -1}, "seed must be 0 to 2^64 - 1, got -1"),
    ({"seed": 2**64}, "seed must be 0 to 2^64 - 1"),
])  # fmt: skip
def test_numbers_that_are_refused(numbers, match):
    with pytest.raises(ValueError, match=re.escape(match)):
        Eviction(0.5, **numbers)


def test_a_seed_of_numpy():
    keys = torch.ones(1, 1, 9, 4)
    scores = Eviction(0.5, "random", seed=np.int64(3)).policy(None, keys, None)
    assert torch.equal(scores, POLICIES["random"](None, keys, None, seed=3))


@pytest.mark.parametrize(
    "lengths", [[10], [5], [10, 10, 10], [5, 5, 5], [12, 12], [10, 12], [-3, 10]]
)
def test_lengths_of_other_prompts_are_refused(lengths):
    """Most of them gave scores, in which a prompt had nothing or padding had some."""
    queries, keys = torch.randn(2, 4, 10, 16), torch.randn(2, 2, 10, 16)
    match = re.escape(f"lengths are {lengths}, supported: of 2 prompts, 0 to 10 each")
    with pytest.raises(ValueError, match=match):
        Eviction(0.5).scores(queries, keys, keys, lengths)
    with pytest.raises(ValueError, match=match):
        Eviction(0.5).columns(torch.randn(2, 2, 10), lengths)


@pytest.mark.parametrize("evict, error, match", [
    ("snap", ValueError, "unknown policy 'snap' .*did you mean 'snapkv'"),
    ("h2o", ValueError, "unknown policy 'h2o'.*snapkv, keydiff, streaming, random, or a function"),
    (None, TypeError, "evict must be a name or a function .* got NoneType"),
    (3, TypeError, "got int"),
])  # fmt: skip
def test_policies_that_are_refused(evict, error, match):
    with pytest.raises(error, match=match):
        Eviction(0.5, evict)


@pytest.mark.parametrize("policy, error, match", [
    (lambda q, k, v: None, TypeError, "the policy's result must be a tensor, got NoneType"),
    (lambda q, k, v: k[..., 0].double(), TypeError, "has dtype float64, supported: float32"),
    (lambda q, k, v: k[..., 0].bfloat16(), TypeError, "has dtype bfloat16, supported: float32"),
    (lambda q, k, v: q[..., 0], ValueError, r"has shape \[2, 6, 50\], expected \[2, 3, 50\]"),
    (lambda q, k, v: k, ValueError, r"has shape \[2, 3, 50, 32\], expected \[2, 3, 50\]"),
    (lambda q, k, v: k[..., 0].to("meta"), ValueError, "is on meta, its keys on cpu"),
    (lambda q, k, v: k[..., 0] * torch.nan, ValueError, "holds NaN"),
])  # fmt: skip
def test_scores_that_are_refused(policy, error, match):
    queries, keys, values = prompt(50)
    with pytest.raises(error, match=match):
        Eviction(0.5, policy).scores(queries, keys, values, [50, 50])


@pytest.mark.parametrize("evict", POLICIES)
@pytest.mark.parametrize("batch, tokens", [(2, 0), (0, 5), (0, 0)])
def test_no_tokens(evict, batch, tokens):
    queries, keys = torch.randn(batch, 4, tokens, 16), torch.randn(batch, 2, tokens, 16)
    eviction, lengths = Eviction(0.5, evict, sinks=4, window=8), [0] * batch
    scores = eviction.scores(queries, keys, keys, lengths)
    assert scores.shape == (batch, 2, tokens) and scores.dtype == torch.float32
    columns = eviction.columns(scores, lengths)
    assert columns.shape == (batch, 2, 0) and columns.dtype == torch.int64


def test_tokens_of_numpy():
    assert Eviction(0.1, sinks=np.uint8(200), window=np.uint8(100)).count(1000) == 300


@pytest.mark.parametrize("heads", [(0, 2), (0, 0), (2, 0)])
def test_prompts_without_heads_are_refused(heads):
    queries, keys = torch.zeros(5, heads[0], 8), torch.zeros(5, heads[1], 8)
    with pytest.raises(ValueError, match="expected a multiple of the keys'"):
        Eviction(0.5).thin(queries, keys, keys)
