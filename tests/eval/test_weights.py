"""Packed weights in the evaluation: names, options, and rows beside those of caches."""

import argparse
import copy
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

from tests.eval.harness import CHOICES, CHUNK, ORIGIN, PREFILL, SETTINGS, TEXT, Tokenizer
from torch_turboquant import eval as evaluation
from torch_turboquant.eval import measure, report, rows
from torch_turboquant.eval.caches import Choice
from torch_turboquant.eval.weights import WeightChoice
from torch_turboquant.integrations.transformers import quantize


def with_weights(model, *names, done=(), tokenizer=None):
    choices = [WeightChoice.parse(name) for name in names]
    pairs = [(choice, partial(choice.packed, tokenizer=tokenizer)) for choice in choices]
    return rows.evaluate(
        model, "tiny", CHOICES[:1], TEXT, SETTINGS, ORIGIN, done, single_layers=False, weights=pairs
    )


def test_rows_of_packed_weights(model, result, readings, capsys):
    found = with_weights(model, "4", "8", "4+k4v4", done=result)
    assert readings.names == ["none", "w4", "w8", "w4+k4v4"]
    assert [row["cache"] for row in found] == ["none", "k4v4", "w4", "w8", "w4+k4v4"]
    four, eight, both = found[2:]
    assert [row["kind"] for row in found[2:]] == ["weights"] * 3
    assert four["kl"] > 5 * eight["kl"] > 0 and both["kl"] > 0
    packed = copy.deepcopy(model)
    quantize(packed)
    make = partial(Choice.parse("none").make, packed)
    _, exact, _ = measure.read(model, make, TEXT, PREFILL, CHUNK, title="")
    again, _, _ = measure.read(packed, make, TEXT, PREFILL, CHUNK, reference=exact, title="")
    assert four["kl"] == pytest.approx(again.kl.double().mean().item(), rel=1e-4)
    assert 4.2 < four["weight_bits"] < 4.6 and 8.1 < eight["weight_bits"] < 8.6
    assert four["model_bytes"] == sum(p.numel() * p.element_size() for p in packed.parameters())
    assert four["bits_per_value"] == 16 and both["bits_per_value"] == found[1]["bits_per_value"]
    assert "embed_tokens" in str(four["left_alone"])
    assert not [m for m in model.modules() if type(m).__name__ == "PackedLinear"]
    readings.names.clear()
    assert with_weights(model, "4", "8", "4+k4v4", done=found) == found and not readings.names
    report.show(found)
    shown = capsys.readouterr().out
    assert "w4+k4v4" in report.weights_table(found) and "w4" not in report.quality_table(found)
    assert report.weights_table(found) in shown and max(map(len, shown.splitlines())) <= 100
    assert report.weights_table(result) is None


def test_weights_that_are_named_twice(model, result, readings):
    found = with_weights(model, "4", "8", "4", done=result)
    assert [row["cache"] for row in found[2:]] == ["w4", "w8"]
    assert [name for name in readings.names if name.startswith("w")] == ["w4", "w8"]


def test_weights_of_a_text(model, tmp_path):
    def tokenizer(text):
        return argparse.Namespace(input_ids=[int(word) for word in text.split()])

    path = tmp_path / "text.txt"
    path.write_text(" ".join(str(i) for i in torch.randint(0, 64, (600,)).tolist()))
    *_, plain, found = with_weights(
        model, "4", f"4:calibrate={path},tokens=512", tokenizer=tokenizer
    )
    assert found["calibration"]["tokens"] == 512 and plain["calibration"] is None
    assert found["kl"] < plain["kl"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("k4v4", "write the bits of weights first"),
        ("4:seed=1", "the fields are grid, sub, group, skip, calibrate, tokens"),
        ("4:sub=x", "sub is an integer"),
        ("4:tokens=5", "tokens belong to calibrate=FILE"),
        ("4:calibrate=no/such.txt", "there is no file no/such.txt"),
        ("5", "bits is 5"),
        ("4+k9", "unknown cache 'k9'"),
    ],
)
def test_names_of_weights_that_are_refused(text, says):
    with pytest.raises(ValueError, match=says):
        WeightChoice.parse(text)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("4:skip=typo", "--weights 4:skip=typo: 'typo' names no linear layer of this Llama"),
        ("8", "--weights 8: this LlamaForCausalLM is quantised already"),
        ("4:calibrate=short.txt", "the text gives 5 tokens; calibration needs 256"),
        ("4:calibrate=long.txt,tokens=10", "the text gives 10 tokens; calibration needs 256"),
        ("4:calibrate=long.txt,tokens=0", "tokens is 0, supported: 1 and more"),
        ("4:calibrate=bytes.txt", "bytes.txt is no text in UTF-8"),
    ],
)
def test_weights_are_refused_before_a_cache_is_measured(
    model, readings, name, says, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("words")
    (tmp_path / "long.txt").write_text("words " * 200)
    (tmp_path / "bytes.txt").write_bytes(b"\xff")
    if name == "8":
        quantize(model := copy.deepcopy(model))
    parser = argparse.ArgumentParser()
    evaluation.add_arguments(parser)
    short = "--caches k4v4 --prefill 64 --score-tokens 32".split()
    args = parser.parse_args(["--weights", name, *short])
    loaded = model, Tokenizer(), "tiny", "text " * 99
    with pytest.raises(ValueError, match=says):
        evaluation.measure_rows(args, loaded, {}, (), lambda rows: None)
    assert not readings.names


def test_options_of_weights(capsys):
    def parse(*argv):
        parser = argparse.ArgumentParser()
        evaluation.add_arguments(parser)
        return parser.parse_args(argv)

    args = parse("--weights", "4,8:skip=lm_head,sub=0 4+k5v4u")
    assert [c.text for c in args.weights] == ["w4", "w8:skip=lm_head,sub=0", "w4+k5v4u"]
    assert args.weights[1].config.skip == ["lm_head"] and args.weights[2].cache.name == "k5v4u"
    assert evaluation.run(parse("--weights", "4", "--strategies")) == 2
    with pytest.raises(ValueError, match="are measured with caches only"):
        loaded = None, None, "tiny", "text"
        args = parse("--weights", "4", "--tasks")
        evaluation.measure_rows(args, loaded, None, (), None)
    capsys.readouterr()
