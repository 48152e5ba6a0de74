"""The demo without its downloads, on a tiny random model."""

import argparse
import json

import pytest
import torch

pytest.importorskip("transformers")

from tests.helpers import tiny_llama
from torch_turboquant import demo
from torch_turboquant.demo import measure, report
from torch_turboquant.eval.options import default_cache_dir

# ---------------------------------------------------------------------------------- arguments


def parse(*argv):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(argv)


def test_arguments(monkeypatch, tmp_path):
    args = parse()
    assert args.presets == ("k5v4u", "k4v4", "k3v2")
    assert args.new_tokens >= 64 and args.score_tokens >= 1000 and args.json is None
    args = parse("--presets", "k8v4, k2v2", "--new-tokens", "5", "--cache-dir", "there")
    assert args.presets == ("k8v4", "k2v2") and args.cache_dir.name == "there"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "torch_turboquant"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir().parts[-2:] == (".cache", "torch_turboquant")


@pytest.mark.parametrize("argv", [("--presets", "k9v9"), ("--chunk", "0"), ("--new-tokens", "x")])
def test_arguments_that_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        parse(*argv)
    assert argv[0] in capsys.readouterr().err


# ------------------------------------------------------------------------------------- metrics


def test_equal_prefix():
    a = torch.tensor([1, 2, 3, 4])
    assert measure.equal_prefix(a, a) == 4
    assert measure.equal_prefix(a, torch.tensor([1, 2, 9, 4])) == 2
    assert measure.equal_prefix(a, torch.tensor([1, 2])) == 2
    assert measure.equal_prefix(a, torch.tensor([5])) == 0


# --------------------------------------------------------------------------- the measurement


class Tokenizer:
    """Bytes as tokens."""

    def __call__(self, text, return_tensors, add_special_tokens):
        ids = torch.tensor([[b % 64 for b in text.encode()]])
        return argparse.Namespace(input_ids=ids)

    def apply_chat_template(self, message, **options):
        return {"input_ids": self(message[0]["content"], "pt", False).input_ids}

    def decode(self, ids, skip_special_tokens):
        return " ".join(str(int(i)) for i in ids)


@pytest.fixture(scope="module")
def model():
    return tiny_llama(initializer_range=0.2, max_position_embeddings=4096)


PROSE = torch.randint(0, 64, (180,), generator=torch.Generator().manual_seed(3))


def test_reading_in_chunks_equals_token_by_token(model):
    """What the demo does to be fast is what decoding does."""
    names = [None, "k8v8", "k3v2"]
    chunked = measure.read_prose(model, names, PROSE, prefill=90, chunk=32)
    single = measure.read_prose(model, names, PROSE, prefill=90, chunk=1)
    for a, b in zip(chunked, single, strict=True):
        assert (a.tokens, a.scored) == (b.tokens, b.scored) == (180, 90)
        assert a.perplexity == pytest.approx(b.perplexity, rel=2e-3)
        assert a.kl == pytest.approx(b.kl, rel=0.05, abs=1e-6)
        assert a.bytes_per_token == b.bytes_per_token and a.bytes_total == b.bytes_total
    base, eight, coarse = chunked
    assert base.kl == 0.0 and base.top1 == 1.0
    assert 0 < eight.kl < 0.02 * coarse.kl


def test_the_reference_perplexity_is_the_models(model):
    with torch.no_grad():
        logits = model(PROSE[None]).logits[0, 89:-1]
    expected = torch.nn.functional.cross_entropy(logits, PROSE[90:]).exp().item()
    (result,) = measure.read_prose(model, [None], PROSE, prefill=90, chunk=25)
    assert result.perplexity == pytest.approx(expected, rel=1e-4)
    heads, layers, dim = 2, 2, 32
    assert result.bytes_per_token == 2 * heads * layers * dim * 4
    assert result.bytes_total == 180 * result.bytes_per_token


def test_generation_stops_at_the_end_and_not_too_early(model):
    prompts = [PROSE[None, :40], PROSE[None, 50:120]]
    answers, rate = measure.generate(model, lambda: measure.new_cache(model, None), prompts, 12)
    assert [len(a) for a in answers] == [12, 12] and rate > 0
    with torch.no_grad():
        logits = model(torch.cat([prompts[1][0], answers[1]])[None]).logits[0]
    assert torch.equal(logits[69:-1].argmax(-1), answers[1])
    assert model.config._attn_implementation == "sdpa"
    measure.generate(model, lambda: measure.new_cache(model, "k4v4"), prompts, 2)
    assert model.config._attn_implementation == "sdpa"


@pytest.fixture(scope="module")
def results(model):
    prompts = measure.make_prompts(Tokenizer(), ["one " * 40, "two " * 40, "three " * 40])
    found = measure.read_prose(model, [None, "k8v8", "k2v2"], PROSE, 90, 30)
    first = report.quality_table(found), report.legend(found)
    measure.add_answers(model, found, prompts, 10)
    return argparse.Namespace(all=found, first=first)


def test_results(model, results):
    base, eight, two = results.all
    assert [r.preset for r in results.all] == [None, "k8v8", "k2v2"]
    assert base.agreement == 1.0 and len(base.answers) == 2
    assert two.kl > eight.kl > 0
    # packed: 8 bit keys and values of 32 channels and two scales, 2 layers of 2 heads
    assert eight.bytes_per_token == (64 + 4) * 4
    assert eight.compression == pytest.approx(2 * 64 / 68)
    assert base.compression == pytest.approx(0.5)  # this model runs in float32
    assert model.config._attn_implementation == "sdpa"


def test_report(results, tmp_path, capsys):
    report.show_reading(results.all)
    report.show_answers(results.all, Tokenizer())
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "none (float32)" in text and "k8v8" in text and "k2v2" in text
    assert "Note:" not in text
    assert "Prompt 1" in text and "Prompt 2" in text

    report.write_json(tmp_path / "rows.json", results.all)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["preset"] for row in rows] == ["uncompressed", "k8v8", "k2v2"]
    needed = "name device commit command batch context q_heads kv_heads head_dim bytes"
    assert all(set(needed.split()) <= set(row) for row in rows)
    assert rows[1]["page_size"] == 32 and rows[1]["tail"] == [4, 64]
    assert rows[1]["center"] == "auto"
    assert rows[2]["kl"] == results.all[2].kl and rows[0]["context"] == 180


def test_the_first_table_does_not_wait_for_answers(results):
    """It has the same columns but for those that need generated tokens."""
    table, legend = results.first
    last = report.quality_table(results.all).splitlines()
    for early, late in zip(table.splitlines(), last, strict=True):
        assert late.split()[: len(early.split())] == early.split()
    assert last[0].split()[-2:] == ["greedy", "tokens/s"] and "greedy" not in table + legend
    whole = " ".join(report.legend(results.all).split())
    assert whole.startswith(" ".join(legend.split())) and "greedy" in whole


def test_only_different_endings_are_shown():
    a = measure.Result(None, answers=[torch.arange(6)])
    b = measure.Result("k8v8", answers=[torch.arange(6)])
    c = measure.Result("k2v2", answers=[torch.tensor([0, 1, 2, 33, 34])])
    text = report.answers([a, b, c], Tokenizer())
    assert "k8v8: the same 6 tokens" in text
    assert "k2v2: the same 3 tokens, then\n  | ...33 34" in text
