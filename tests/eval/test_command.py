"""The evaluation's command: its options, what it refuses, and a whole run."""

import argparse

import pytest

pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel

from tests.eval.harness import Tokenizer, tiny
from torch_turboquant import eval as evaluation
from torch_turboquant.eval import assets, controls, measure, options, report


def test_the_command(model, tmp_path, monkeypatch, readings, capsys):
    monkeypatch.setattr(assets, "load_dense", lambda path, device, dtype: (model, Tokenizer()))
    (tmp_path / "text.txt").write_text("A text of a few words. " * 20)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text('{"model_type": "llama"}')
    parser = argparse.ArgumentParser()
    evaluation.add_arguments(parser)
    argv = ["--model", str(tmp_path / "tiny"), "--text", str(tmp_path / "text.txt")]
    argv += ["--json", str(tmp_path / "out.json"), "--segments", "1", "--prefill", "80"]
    argv += ["--score-tokens", "40", "--needle", "200"]
    args = parser.parse_args([*argv, "--caches", "k4v4 int8"])
    assert evaluation.run(args) == 0
    text = capsys.readouterr().out
    assert "tiny (float32): 2 layers, 4/2 heads of 64" in text and "int8" in text
    assert readings.names == ["none", "k4v4", "int8"]
    readings.names.clear()
    assert evaluation.run(parser.parse_args([*argv, "--caches", "int8 fp8"])) == 0
    assert readings.names == ["none", "fp8"]
    names = [row["cache"] for row in report.read_json(tmp_path / "out.json")]
    assert sorted(names) == ["fp8", "int8", "k4v4", "none"]

    assert [len(row["needle"]["found"][0]) for row in report.read_json(tmp_path / "out.json")] == [
        5
    ] * 4

    assert evaluation.run(parser.parse_args([*argv, "--score-tokens", "4000"])) == 1
    assert "the text has 460 tokens" in capsys.readouterr().err


def test_a_file_of_two_runs_at_once(model, tmp_path, monkeypatch):
    """Another run writes its rows while this one measures."""
    monkeypatch.setattr(assets, "load_dense", lambda path, device, dtype: (model, Tokenizer()))
    (tmp_path / "text.txt").write_text("A text of a few words. " * 20)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    path, read, theirs = tmp_path / "out.json", measure.read, {"model": "another", "cache": "k2v2"}

    def with_another_run(*args, **kwargs):
        if kwargs["title"] == "k4v4":
            report.write_json(path, [*report.read_json(path), theirs])
        return read(*args, **kwargs)

    monkeypatch.setattr(measure, "read", with_another_run)
    parser = argparse.ArgumentParser()
    evaluation.add_arguments(parser)
    argv = ["--model", str(tmp_path), "--text", str(tmp_path / "text.txt"), "--json", str(path)]
    argv += ["--caches", "k4v4", "--segments", "1", "--prefill", "80", "--score-tokens", "40"]
    assert evaluation.run(parser.parse_args([*argv, "--no-layers"])) == 0
    found = report.read_json(path)
    assert theirs in found and {row["cache"] for row in found} == {"none", "k4v4", "k2v2"}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "too few for the 1,536 tokens of --prefill and --score-tokens"),
        (["--score-tokens", "512", "--needle"], "too few for the 2,048 tokens of --needle"),
        (["--score-tokens", "512", "--synthetic", "1025"], "for the 1,025 tokens of --synthetic"),
    ],
)
def test_positions_that_a_model_does_not_know(readings, argv, says):
    """GPT-2 looks positions up in a table; of a model with RoPE only the text is too short here."""
    shape = {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 1024, "vocab_size": 64}
    gpt2 = GPT2LMHeadModel(GPT2Config(**shape)).eval()
    parser = argparse.ArgumentParser()
    evaluation.add_arguments(parser)
    args = parser.parse_args([*argv, "--segments", "9"])
    with pytest.raises(ValueError, match=f"gpt2 has 1,024 positions in a table, .*{says}"):
        evaluation.measure_rows(args, (gpt2, Tokenizer(), "gpt2", "text"), None, (), None)
    assert not readings.names
    llama = tiny(max_position_embeddings=9)
    with pytest.raises(ValueError, match="the text has 4 tokens"):
        evaluation.measure_rows(args, (llama, Tokenizer(), "llama", "text"), None, (), None)


@pytest.mark.parametrize(
    "argv",
    [
        ("--caches", "k9v9"),
        ("--caches", "k4v4:layers=nowhere.json"),
        ("--chunk", "0"),
        ("--gpu", "9" * 400),
        ("--picture", "quality"),
        ("--picture", "quality.txt"),
    ],
)
def test_options_that_are_refused(argv, capsys):
    parser = argparse.ArgumentParser()
    evaluation.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(argv)
    assert argv[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("k4v4,k8v8", ["k4v4", "k8v8"]),
        ("k4v4 k8v8", ["k4v4", "k8v8"]),
        ("k4v4; k8v8 ,\nint4,", ["k4v4", "k8v8", "int4"]),
        (
            "k4v4:recent_window=0,center=none,k8v8:sink_tokens=0 int4",
            ["k4v4:recent_window=0,center=none", "k8v8:sink_tokens=0", "int4"],
        ),
        ("k4v4: recent_window=0, center=none, int4", ["k4v4:recent_window=0,center=none", "int4"]),
        ("k3v3:layers=0@k8v8+-1@k4v4,k2v2", ["k3v3:layers=0@k8v8+-1@k4v4", "k2v2"]),
        ("", []),
    ],
)
def test_lists_have_one_syntax(text, found):
    assert options.names(text) == found
    parser = argparse.ArgumentParser()
    evaluation.add_arguments(parser)
    assert [c.text for c in parser.parse_args(["--caches", text]).caches] == found


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--model", "/nonexistent"], "/nonexistent is no folder of a transformers model"),
        (["--text", "/nonexistent"], "there is no text /nonexistent"),
        (["--strategies", "--steps", "--device", "cpu"], "--steps needs a CUDA device"),
    ],
)
def test_what_is_not_there_is_told_before_a_download(monkeypatch, tmp_path, capsys, argv, says):
    def fetch(*_):
        raise AssertionError("a download began")

    monkeypatch.setattr(assets, "fetch", fetch)
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    evaluation.add_arguments(parser)
    assert evaluation.run(parser.parse_args([*argv, "--cache-dir", str(tmp_path)])) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("eval: ") and says in line


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--text", "latin.txt"], "latin.txt is no text in UTF-8"),
        (["--json", "latin.txt"], "latin.txt holds no rows of results"),
    ],
)
def test_files_of_another_kind_are_told_before_a_download(
    monkeypatch, tmp_path, capsys, options, says
):
    def fetch(*_):
        raise AssertionError("a download began")

    monkeypatch.setattr(assets, "fetch", fetch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes("é".encode("latin1"))
    parser = argparse.ArgumentParser()
    evaluation.add_arguments(parser)
    assert evaluation.run(parser.parse_args([*options, "--cache-dir", str(tmp_path)])) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("eval: ") and says in line


@pytest.mark.parametrize(
    ("locked", "says"), [("rows.json", "the file is read-only"), (".", "its folder is read-only")]
)
def test_what_is_read_only_is_named(tmp_path, monkeypatch, locked, says):
    """By the answer of the system, which lets root write everywhere."""
    path = tmp_path / "rows.json"
    path.write_text("[]")
    monkeypatch.setattr(options.os, "access", lambda place, mode: place != tmp_path / locked)
    with pytest.raises(argparse.ArgumentTypeError, match=f"rows.json cannot be written: {says}"):
        options.output_file(str(path))


def test_latent_attention_is_refused_by_name(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3", "kv_lora_rank": 512}')
    parser = argparse.ArgumentParser()
    evaluation.add_arguments(parser)
    assert evaluation.run(parser.parse_args(["--model", str(tmp_path)])) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"eval: {tmp_path} has latent attention (MLA), and eval compares caches")


def test_the_default_is_everything():
    parser = argparse.ArgumentParser()
    evaluation.add_arguments(parser)
    names = [choice.text for choice in parser.parse_args([]).caches]
    assert set(controls.CONTROLS) < set(names) and "k5v4u" in names and "k2v2" in names
