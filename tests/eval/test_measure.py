"""Readings of a text and their metrics against direct computations."""

import ast
import math

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from tests.eval.harness import CHUNK, PREFILL, TEXT, Tokenizer, reading
from tests.helpers import ROOT, generator
from torch_turboquant.eval import measure, predict
from torch_turboquant.eval.caches import Choice

# --------------------------------------------------------------------------------- the reading


def test_the_uncompressed_reading_is_the_models(model):
    found = reading(model, "none")
    with torch.no_grad():
        logits = model(TEXT).logits[:, PREFILL - 1 : -1]
    expected = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), TEXT[:, PREFILL:], reduction="none"
    )
    torch.testing.assert_close(found.loss, expected, rtol=1e-4, atol=1e-4)
    assert found.kl.abs().max() == 0 and found.same.all()


@pytest.mark.parametrize("name", ["k3v2", "kivi2", "q2_0h"])
def test_a_reading_is_token_by_token_decoding(model, name):
    """KL, agreement and loss of every token, worked out from plain probabilities."""
    text = TEXT[:1]
    found = reading(model, name, text)
    cache = Choice.parse(name).make(model)
    with torch.no_grad():
        exact = model(text).logits[0, PREFILL - 1 : -1].double().softmax(-1)
        last = [model(text[:, :PREFILL], past_key_values=cache).logits[0, -1]]
        for i in range(PREFILL, text.shape[1] - 1):
            last.append(model(text[:, i : i + 1], past_key_values=cache).logits[0, -1])
    predict.detach(cache)
    q = torch.stack(last).double().softmax(-1)
    kl = (exact * (exact / q).log()).sum(-1)
    if name == "kivi2":  # reads a few values more exactly when tokens come together
        assert found.kl.mean().item() == pytest.approx(kl.mean().item(), rel=0.2)
        return
    torch.testing.assert_close(found.kl[0].double(), kl, rtol=0.02, atol=1e-4)
    assert (found.same[0] == (exact.argmax(-1) == q.argmax(-1))).double().mean() > 0.97
    true = q[torch.arange(len(q)), text[0, PREFILL:]]
    torch.testing.assert_close(found.loss[0].double(), -true.log(), rtol=0.01, atol=1e-3)


def test_likelihood_and_divergence():
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.2, 0.7]])
    kl, same = predict.divergence(p.log() + 3.0, q.log() - 1.0)  # logits have no absolute height
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert kl.tolist() == pytest.approx([expected, 0.0], rel=1e-6, abs=1e-7)
    assert same.tolist() == [False, True]
    loss = predict.negative_log_likelihood(p.log() + 3.0, torch.tensor([1, 2]))
    assert loss.tolist() == pytest.approx([-math.log(0.25), -math.log(0.7)], rel=1e-6)


def test_tokens_that_a_model_masks_do_not_diverge():
    logits = torch.tensor([[1.0, 2.0, -torch.inf]]), torch.tensor([[2.0, 1.0, -torch.inf]])
    masked, plain = (predict.divergence(*(x[:, :n] for x in logits))[0] for n in (3, 2))
    assert masked.item() == plain.item() > 0
    other = predict.divergence(torch.zeros(1, 3), logits[1])[0]  # which the reference predicts
    assert other.item() == math.inf


def test_too_little_text_is_an_error():
    with pytest.raises(ValueError, match="the text has 7 tokens, 8 are asked for"):
        predict.text_tokens(Tokenizer(), ["abcdefg"], 8)


def test_the_evaluation_stands_without_the_demo():
    """The demo is built from parts of the evaluation, never the other way round."""
    for path in (ROOT / "torch_turboquant" / "eval").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            assert not any(n.startswith("torch_turboquant.demo") for n in names), path


def test_the_model_is_as_before_when_reading_fails(model, monkeypatch):
    def fail(*_):
        raise RuntimeError("stop")

    monkeypatch.setattr(measure, "negative_log_likelihood", fail)
    make = Choice.parse("k4v4").make
    with pytest.raises(RuntimeError, match="stop"):
        measure.read(model, lambda: make(model), TEXT, PREFILL, CHUNK)
    assert model.config._attn_implementation == "sdpa"


# ------------------------------------------------------------------------------------ intervals


def test_block_means():
    x = torch.arange(150, dtype=torch.float32).view(2, 75)
    assert measure.block_means(x).tolist() == [15.5, (32 + 74) / 2, 75 + 15.5, 75 + (32 + 74) / 2]
    assert measure.block_means(torch.ones(1, 5, dtype=torch.bool)).tolist() == [1.0]


def test_intervals():
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    low, high = measure.interval(values)
    half = 1.96 * values.std(ddof=1) / math.sqrt(400)
    assert low == pytest.approx(values.mean() - half, abs=0.02)
    assert high == pytest.approx(values.mean() + half, abs=0.02)
    assert measure.interval(values) == (low, high)
    assert measure.interval([2.0, 2.0]) == (2.0, 2.0)


def test_summary():
    loss, other = torch.rand(2, 2, 64, generator=generator(1))
    base = measure.Reading(loss, torch.zeros(2, 64), torch.ones(2, 64, dtype=torch.bool))
    same = torch.rand(2, 64, generator=generator(2)) < 0.9
    row = measure.summary(measure.Reading(loss + 0.1, other, same), base)
    assert row["perplexity"] == pytest.approx(math.exp(loss.mean().item() + 0.1), rel=1e-6)
    assert row["perplexity_change"] == pytest.approx(math.expm1(0.1), rel=1e-5)
    # the same everywhere: paired, it is known exactly, though the perplexity is not
    assert row["perplexity_change_interval"] == pytest.approx([math.expm1(0.1)] * 2, rel=1e-4)
    low, high = row["perplexity_interval"]
    assert low < row["perplexity"] - 0.01 and high > row["perplexity"] + 0.01
    assert row["kl"] == pytest.approx(other.mean().item(), rel=1e-6)
    assert row["top1_agreement"] == pytest.approx(same.float().mean().item(), rel=1e-6)
    assert row["kl_interval"][0] < row["kl"] < row["kl_interval"][1]
    assert "kl" not in measure.summary(base)


# ---------------------------------------------------------------------------------- segments


def test_segments():
    text = "".join(chr(33 + i) for i in range(20))
    plain = measure.segments(Tokenizer(), text, 2, 8)
    assert plain.tolist() == [list(range(33, 41)), list(range(41, 49))]
    first = measure.segments(Tokenizer([5]), text, 2, 8)
    assert first.tolist() == [[5, *range(33, 40)], [5, *range(40, 47)]]
    with pytest.raises(ValueError, match="the text has 20 tokens"):
        measure.segments(Tokenizer(), text, 3, 8)
