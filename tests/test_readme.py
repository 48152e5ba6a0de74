"""The README's code runs as it stands, and its preset table says what config.py says."""

import re

import torch

import torch_turboquant as tq
from tests.helpers import ROOT, code_score_rounding, snippets, without_downloads

README = (ROOT / "README.md").read_text()
BLOCKS = snippets("README.md")


def test_there_are_three_examples():
    assert len(BLOCKS) == 3


def test_transformers_example(monkeypatch, capsys):
    without_downloads(monkeypatch)
    names: dict = {}
    exec(compile(BLOCKS[0], "README.md", "exec"), names)
    assert names["out"].shape == (1, 340)
    assert names["cache"].memory_bytes()["pages"] > 0
    assert repr(names["cache"].memory_bytes()) in capsys.readouterr().out


def test_paged_example(capsys):
    names: dict = {}
    exec(compile(BLOCKS[2], "README.md", "exec"), names)
    config, k, v, q = (names[n] for n in ("config", "k", "v", "q"))
    assert config.bytes_per_token == 132 and "132 bytes per token" in capsys.readouterr().out
    torch.testing.assert_close(names["tables"].center, k.float().mean(0))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float().repeat_interleave(4, 1)) / 128**0.5
    exact = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float().repeat_interleave(4, 1))
    error = (names["out"].float() - exact).pow(2).sum() / exact.pow(2).sum()
    assert error < 0.02  # 4-bit keys and values of random data: their error is 0.8% each


def test_vector_example(capsys):
    names: dict = {}
    exec(compile(BLOCKS[1], "README.md", "exec"), names)
    assert "squared error 0.00" in capsys.readouterr().out
    keys, q, decoded, scores = (names[n] for n in ("keys", "q", "decoded", "scores"))
    assert (decoded - keys).pow(2).sum() / keys.pow(
        2
    ).sum() < 0.0082  # unbiased scale: d 128, 4 bits
    error = (scores - q.double() @ decoded.double().transpose(1, 2)).abs()
    assert (error <= 1e-4 + code_score_rounding(q, names["signs"], decoded.norm(dim=-1), 4)).all()


def test_preset_table():
    rows = re.findall(r"^\| (k\d\S*) \| (.*) \|$", README, re.MULTILINE)
    table = {name: cells.split(" | ") for name, cells in rows if cells.endswith("x")}
    assert table.keys() == tq.PRESETS.keys()
    for name, cells in table.items():
        expected = [str(tq.preset(name, d).bytes_per_token) for d in (64, 96, 128, 256)]
        assert cells == [*expected, f"{tq.preset(name, 128).compression():.2f}x"]
