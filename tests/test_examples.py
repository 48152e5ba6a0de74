"""The examples run, and show what they say. continuous_batching.py is in pool/test_pool.py."""

import re
import tempfile
from types import SimpleNamespace

import pytest
import torch

from tests.helpers import ROOT, SnippetTokenizer, load_script, without_downloads


def test_every_example_is_run():
    here = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert here == {
        "compiled_step",
        "continuous_batching",
        "paper_step_by_step",
        "prompt_cache",
        "raw_ops",
        "sglang_generate",  # tests/sglang
        "transformers_generate",
        "vector_compression",
        "vllm_generate",
    }


def test_raw_ops(device):
    found = load_script("examples/raw_ops.py").main(["--device", str(device)])
    # 4 bits lose 0.8% of a Gaussian vector; attention adds keys and values
    assert found["vectors"] < 0.009 and found["attention"] < 0.025
    assert 0.08 < found["scores"] < 0.1


@pytest.mark.parametrize("preset", ["k8v8", "k5v4u"])
def test_transformers_generate(preset, device):
    pytest.importorskip("transformers")
    example = load_script("examples/transformers_generate.py")
    found = example.main(["--preset", preset, "--tokens", "8", "--device", str(device)])
    assert found["agreement"] == 1.0 and found["pages"] < 0.6 * found["bf16"]


def test_transformers_generate_compares_something_by_default(monkeypatch, capsys):
    """With a model of the user's and the default prompt, too; and says where it does not."""
    without_downloads(monkeypatch)
    example = load_script("examples/transformers_generate.py")
    real = SnippetTokenizer.__call__

    def words(self, text, return_tensors):
        return real(self, text[:1], return_tensors) if len(text.split()) > 80 else short

    def decode(self, ids, skip_special_tokens):
        return f"{len(ids)} tokens"

    short = SimpleNamespace(input_ids=torch.arange(1, 10)[None])
    monkeypatch.setattr(SnippetTokenizer, "__call__", words)
    monkeypatch.setattr(SnippetTokenizer, "decode", decode)
    assert example.main(["--model", "some/model", "--tokens", "4"])["pages"] > 0
    assert "nothing was compared" not in capsys.readouterr().out
    found = example.main(["--model", "some/model", "--tokens", "4", "--prompt", "Why?"])
    assert found["pages"] == 0 and "nothing was compared" in capsys.readouterr().out


def test_prompt_cache(device, monkeypatch, capsys):
    """Of keys and values in 16 bits, a file would have 8 * 2 * 2 * 64 * 2 bytes per token."""
    pytest.importorskip("transformers")
    example = load_script("examples/prompt_cache.py")
    found = example.main(["--preset", "k8v8", "--tokens", "8", "--device", str(device)])
    assert found["agreement"] > 0.8 and found["bytes"] < 0.65 * 4096 * found["tokens"]
    without_downloads(monkeypatch)
    monkeypatch.setattr(SnippetTokenizer, "decode", lambda *_, **__: "an answer")
    assert example.main(["--model", "some/model", "--tokens", "4"])["agreement"] > 0.5
    assert capsys.readouterr().out.count("an answer") == 2


def test_the_document_of_the_prompt_cache_begins_every_prompt(monkeypatch, capsys):
    """In tokens, where a space belongs to the word behind it; else answers would be wrong."""
    pytest.importorskip("transformers")
    example = load_script("examples/prompt_cache.py")
    without_downloads(monkeypatch)

    def words(self, text, return_tensors=None):
        ids = torch.tensor([[len(word) for word in re.findall(r" ?\S+|\s", text)]])
        return SimpleNamespace(input_ids=ids)

    monkeypatch.setattr(SnippetTokenizer, "__call__", words)
    monkeypatch.setattr(SnippetTokenizer, "decode", lambda *_, **__: "an answer")
    assert example.main(["--model", "some/model", "--tokens", "4"])["tokens"] == 600
    monkeypatch.setattr(example, "DOCUMENT", example.DOCUMENT + " ")
    monkeypatch.setattr(example, "QUESTIONS", [text.strip() for text in example.QUESTIONS])
    with pytest.raises(SystemExit):
        example.main(["--model", "some/model"])
    assert "gives the document other tokens" in capsys.readouterr().err


def test_vllm_generate(monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    found = load_script("examples/vllm_generate.py").main(["--preset", "k8v8", "--tokens", "4"])
    assert found["agreement"] == 1.0
    assert found["capacity"] == pytest.approx(4 * 64 / 132, rel=0.02)  # bytes per token and head


def test_compiled_step(device):
    assert load_script("examples/compiled_step.py").main(["--device", str(device)]) == 40


def test_vector_compression(device):
    found = load_script("examples/vector_compression.py").main(["--device", str(device)])
    recalls = []
    for name, (error, theory, recall) in found.items():
        if name.startswith("MSE"):
            assert error == pytest.approx(theory, rel=0.02), name
            recalls.append(recall)
    assert recalls == sorted(recalls) and recalls[0] > 0.5 and recalls[-1] > 0.98


def test_paper_step_by_step(tmp_path):
    pytest.importorskip("matplotlib")
    found = load_script("examples/paper_step_by_step.py").main(["--out", str(tmp_path)])
    assert found["spread before"] > 300 and found["spread after"] < 1.2
    for bits in (1, 2, 3, 4):
        assert found[f"error at {bits} bits"] == pytest.approx(
            found[f"theory at {bits} bits"], 0.02
        )
    assert found["slope, least error"] < 0.9
    for name in ("1 bit + QJL", "unbiased scale"):
        assert found[f"slope, {name}"] == pytest.approx(1, abs=0.01)
    assert found["spread, 1 bit + QJL"] > 2 * found["spread, unbiased scale"]
    assert (tmp_path / "paper_step_by_step.png").stat().st_size > 10_000


def test_the_paper_leaves_nothing_in_the_checkout(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    example = load_script("examples/paper_step_by_step.py")
    for step in ("step_1_rotation", "step_2_codebook", "step_3_and_4_inner_products"):
        monkeypatch.setattr(example, step, lambda axes: axes.plot([1], label="x") and {})
    example.main([])
    assert not list((tmp_path / "here").iterdir())
    assert (tmp_path / "paper_step_by_step.png").exists()
