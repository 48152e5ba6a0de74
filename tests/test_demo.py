"""The demo without its downloads, on a tiny random model."""

import argparse
import copy
import json
from pathlib import Path

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
    assert parse("--presets", "k8v4 k2v2").presets == ("k8v4", "k2v2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "torch_turboquant"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir().parts[-2:] == (".cache", "torch_turboquant")


def test_a_user_without_a_home_folder(monkeypatch, capsys):
    """As in a container that runs under a number: help and options do not ask for one."""

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert parse("--cache-dir", "there").cache_dir.name == "there"
    assert demo.run(parse()) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("demo: this user has no home folder") and "--cache-dir" in line


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--presets", "k9v9"), "unknown preset 'k9v9'"),
        (("--presets", ","), "names no preset"),
        (("--chunk", "0"), "'0' is no positive number"),
        (("--new-tokens", "x"), "'x' is no positive number"),
        (("--device", "gpu"), "'gpu' is no device; there are cpu, cuda and cuda:N"),
        (("--device", "cuda:x"), "'cuda:x' is no device"),
        (("--json", "nowhere/rows.json"), "there is no nowhere"),
        (("--json", "/"), "/ is a folder"),
    ],
)
def test_arguments_that_are_refused(argv, says, capsys):
    with pytest.raises(SystemExit):
        parse(*argv)
    last = capsys.readouterr().err.splitlines()[-1]
    assert argv[0] in last and says in last


def test_a_device_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SystemExit):
        parse("--device", "cuda")
    assert "cuda needs a CUDA build of torch" in capsys.readouterr().err
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parse("--device", "cuda:1").device == "cuda:1"
    with pytest.raises(SystemExit):
        parse("--device", "cuda:2")
    assert "cuda:2 is not there: torch sees 2 GPUs" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        parse("--device", "cuda")
    assert "torch sees 0 GPUs" in capsys.readouterr().err


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
    runs = [(model, name) for name in names]
    chunked = measure.read_prose(runs, PROSE, prefill=90, chunk=32)
    single = measure.read_prose(runs, PROSE, prefill=90, chunk=1)
    for a, b in zip(chunked, single, strict=True):
        assert (a.tokens, a.scored) == (b.tokens, b.scored) == (180, 90)
        assert a.perplexity == pytest.approx(b.perplexity, rel=2e-3)
        assert a.kl == pytest.approx(b.kl, rel=0.05, abs=1e-6)
    base, eight, coarse = chunked
    assert base.kl == 0.0 and base.top1 == 1.0
    assert 0 < eight.kl < 0.02 * coarse.kl


def test_the_reference_perplexity_is_the_models(model):
    with torch.no_grad():
        logits = model(PROSE[None]).logits[0, 89:-1]
    expected = torch.nn.functional.cross_entropy(logits, PROSE[90:]).exp().item()
    (result,) = measure.read_prose([(model, None)], PROSE, prefill=90, chunk=25)
    assert result.perplexity == pytest.approx(expected, rel=1e-4)


def test_answers_of_a_padded_batch_are_those_of_each_prompt(model):
    prompts = [PROSE[:40], PROSE[50:120]]
    answers = measure.generate(model, None, prompts, 12)
    assert [len(a) for a in answers] == [12, 12]
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.cat([prompt, answer])[None]).logits[0]
        assert torch.equal(logits[len(prompt) - 1 : -1].argmax(-1), answer)
    assert model.config._attn_implementation == "sdpa"
    measure.generate(model, "k4v4", prompts, 2)
    assert model.config._attn_implementation == "sdpa"


@pytest.fixture(scope="module")
def speeds(model):
    return [measure.speed(model, name, PROSE, 5) for name in (None, "k8v8", "k2v2")]


def test_speed(speeds):
    base, eight, _ = speeds
    heads, layers, dim = 2, 2, 32
    assert base.tokens == 184 and base.bytes_per_token == 2 * heads * layers * dim * 4
    assert base.bytes_total == 184 * base.bytes_per_token
    # packed: 8 bit keys and values of 32 channels and two scales, 2 layers of 2 heads
    assert eight.bytes_per_token == (64 + 4) * 4
    assert all(s.prompt_seconds > 0 and s.tokens_per_second > 0 for s in speeds)
    table = report.speed_table(speeds).splitlines()
    smaller = [line.split("  ")[0] for line in table[2:]]
    assert smaller == ["none, float32", "k8v8", "k2v2"]
    assert table[2].split()[4] == "1.00x" and table[2].endswith("1.00x")


def test_one_token_has_no_rate(model):
    found = measure.speed(model, None, PROSE[:20], 1)
    assert found.tokens_per_second != found.tokens_per_second


@pytest.fixture(scope="module")
def results(model):
    prompts = measure.make_prompts(Tokenizer(), ["one " * 40, "two " * 40, "three " * 40])
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    runs = [(model, None), (rounded, None), (model, "k8v8"), (model, "k2v2")]
    found = measure.read_prose(runs, PROSE, 90, 30)
    first = report.quality_table(found), report.legend(found)
    measure.add_answers(runs, found, prompts, 10)
    return argparse.Namespace(all=found, first=first)


def test_results(model, results):
    base, rounded, eight, two = results.all
    assert [r.preset for r in results.all] == [None, None, "k8v8", "k2v2"]
    assert base.agreement == 1.0 and len(base.answers) == 3
    assert two.kl > eight.kl > 0 and rounded.kl > 0
    assert rounded.info["dtype"] == "bfloat16" and 0 < rounded.agreement <= 1
    assert model.config._attn_implementation == "sdpa"


def test_report(speeds, results, tmp_path, capsys):
    report.show_speed(speeds)
    report.show_reading(results.all)
    report.show_answers(results.all, Tokenizer())
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "none, float32" in text and "none, bfloat16" in text
    assert "k8v8" in text and "k2v2" in text
    assert "Prompt 1" in text and "Prompt 2" in text and "Prompt 3" not in text
    whole = " ".join(text.split())
    share = f"{100 * results.all[1].agreement:.0f}%"
    assert f"the same model in bfloat16, nothing compressed, keeps {share}." in whole

    report.write_json(tmp_path / "rows.json", speeds, results.all)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["part"] for row in rows] == ["speed"] * 3 + ["quality"] * 4
    names = ["uncompressed", "k8v8", "k2v2", "uncompressed", "uncompressed", "k8v8", "k2v2"]
    assert [row["preset"] for row in rows] == names
    needed = "name device commit command batch context q_heads kv_heads head_dim dtype threads"
    assert all(set(needed.split()) <= set(row) for row in rows)
    assert rows[1]["page_size"] == 32 and rows[1]["tail"] == [4, 64]
    assert rows[1]["center"] == "auto" and rows[1]["bytes"] == speeds[1].bytes_total
    assert rows[6]["kl"] == results.all[3].kl and rows[3]["context"] == 180


def test_packed_weights(model, results):
    """Alone and with a packed cache, in all tables and in the rows."""

    def tokenizer(text):
        return argparse.Namespace(input_ids=[b % 64 for b in text.encode()])

    packed = measure.pack_weights(model, tokenizer, ["word " * 100])
    assert measure.weight_bits(packed) == 4 and measure.weight_bits(model) is None
    assert packed.config.quantization_config.calibration["tokens"] == 500
    speeds = [measure.speed(m, p, PROSE, 3) for m, p in ((model, None), (packed, "k4v4"))]
    assert "k4v4; weights 4" in report.speed_table(speeds)
    saved = f"{measure.model_bytes(packed) / 2**20:.0f} MiB in place of"
    assert saved in " ".join(report.speed_legend(speeds).split())
    runs = [(model, None), (packed, None), (packed, "k4v4")]
    found = measure.read_prose(runs, PROSE, 90, 30)
    names = [line.split("  ")[0] for line in report.quality_table(found).splitlines()[2:]]
    assert names == ["none, float32", "none, float32; weights 4", "k4v4; weights 4"]
    assert all(r.kl > 0 for r in found[1:])
    rows = report.rows(speeds, found)
    assert [row["weight_bits"] for row in rows] == [None, 4, None, 4, 4]


def test_the_first_table_does_not_wait_for_answers(results):
    """It has the same columns but for those that need generated tokens."""
    table, legend = results.first
    last = report.quality_table(results.all).splitlines()
    for early, late in zip(table.splitlines(), last, strict=True):
        assert late.split()[: len(early.split())] == early.split()
    assert last[0].split()[-1] == "greedy" and "greedy" not in table + legend
    whole = " ".join(report.legend(results.all).split())
    assert whole.startswith(" ".join(legend.split())) and "greedy" in whole


def test_only_different_endings_are_shown():
    a = measure.Result(None, {"dtype": "float32"}, answers=[torch.arange(6)])
    b = measure.Result("k8v8", answers=[torch.arange(6)])
    c = measure.Result("k2v2", answers=[torch.tensor([0, 1, 2, 33, 34])])
    text = report.answers([a, b, c], Tokenizer())
    assert "k8v8: the same 6 tokens" in text
    assert "k2v2: the same 3 tokens, then\n  | ...33 34" in text
