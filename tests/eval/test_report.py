"""The report of an evaluation: tables, JSON, the picture."""

import math
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.helpers import ROOT
from torch_turboquant.eval import report


def test_table_and_legend(result, capsys):
    report.show(result)
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 100
    names = [line.split()[0] for line in text.splitlines()[5:9]]  # largest first
    assert names == ["none", "int4", "k4v4", "k2v2"]
    words = " ".join(text.split())
    assert "200 tokens" in words and "2 segments of 260" in words
    assert f"{result[1]['kl']:.4f}" in text


def test_table_of_answers(result, capsys):
    assert report.answers_table(result) is None
    shares = {"first_token": 0.9, "whole_answer": 0.5, "right": 0.25}
    shares |= {"turn_first_token": 1.0, "turn_whole_answer": 0.75}
    grid = {"lengths": [512, 2048], "found": [[True, False], [True, True]]}
    report.show([{**result[0], "tasks": shares, "needle": grid}, {**result[1], "tasks": shares}])
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert "none 16.00 3 of 4 90% 50% 25% 100% 75%".split() in lines
    assert [
        "k4v4",
        f"{result[1]['bits_per_value_8k']:.2f}",
        *"90% 50% 25% 100% 75%".split(),
    ] in lines
    assert "512, 2,048 tokens" in " ".join(text.split())
    assert max(len(line) for line in text.splitlines()) <= 100


def test_json_has_no_nan(tmp_path):
    path = tmp_path / "rows.json"
    assert report.read_json(path) == []
    report.write_json(path, [{"a": math.inf, "b": [1.0, math.nan], "c": {"d": 2}}, {"a": 1}])
    assert report.read_json(path) == [{"a": None, "b": [1.0, None], "c": {"d": 2}}, {"a": 1}]
    assert [p.name for p in tmp_path.iterdir()] == ["rows.json"]


def test_two_runs_write_at_once(tmp_path, monkeypatch):
    path, replace = tmp_path / "rows.json", Path.replace

    def after_another(self, target):
        monkeypatch.setattr(Path, "replace", replace)
        report.write_json(path, [{"a": 1}])
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", after_another)
    report.write_json(path, [{"a": 2}])
    assert report.read_json(path) == [{"a": 2}]
    assert [p.name for p in tmp_path.iterdir()] == ["rows.json"]


def overflowed(row, **more):
    """The row of a model whose logits are NaN, as the next run finds it in the file."""
    numbers = {"perplexity": math.nan, "kl": math.nan, "top1_agreement": math.nan}
    numbers |= {"perplexity_change": math.nan, "mean_key_nmse": math.nan}
    numbers |= {f"{name}_interval": [math.nan] * 2 for name in ("perplexity", "kl")}
    numbers["perplexity_change_interval"] = [math.nan, 1.0]
    return {**row, **numbers, **more}


def test_rows_of_nan_are_shown_from_a_file(tmp_path, result):
    path = tmp_path / "rows.json"
    weights = {"kind": report.WEIGHTS, "cache": "w4", "weight_bits": 4.5, "model_bytes": 2e6}
    strange = [*map(overflowed, result[:2]), overflowed(result[1], **weights)]
    report.write_json(path, strange)
    for rows in (strange, report.read_json(path)):  # both runs show the same
        none, packed = (line.split() for line in report.quality_table(rows).splitlines()[2:])
        assert none == ["none", "16.00", f"{result[0]['bytes_per_token_8k']:,.0f}"]
        known = [f"{result[1]['mean_output_error']:.3f}", f"{result[1]['mean_value_nmse']:.1e}"]
        assert packed[:1] + packed[3:] == ["k4v4", *known]
        (packed,) = (line.split() for line in report.weights_table(rows).splitlines()[2:])
        assert packed[:3] == ["w4", "4.500", "2"] and len(packed) == 4
        packed = report.strategies_table(rows[:2]).splitlines()[3].split()
        assert packed[0] == "k4v4" and packed[-1].endswith("x")


@pytest.mark.parametrize("finite", [1, 2])
def test_pictures_leave_out_rows_without_a_number(tmp_path, result, finite):
    pytest.importorskip("matplotlib")
    path = tmp_path / "rows.json"
    report.write_json(path, [*result[:finite], *map(overflowed, result[finite:])])
    for draw in (report.picture, report.strategies_picture):
        draw(tmp_path / "quality.png", report.read_json(path))
        assert (tmp_path / "quality.png").stat().st_size > 5000


@pytest.mark.parametrize("content", [b"", b"no JSON", b"\xff\xfe", b'{"a": 1}', b"[1, 2]"])
def test_a_file_of_something_else_is_no_rows(tmp_path, content):
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rows\.json holds no rows of results: .*Name a new file"):
        report.read_json(path)
    assert path.read_bytes() == content


def test_picture(tmp_path, result):
    pytest.importorskip("matplotlib")
    report.picture(tmp_path / "quality.png", result)
    assert (tmp_path / "quality.png").stat().st_size > 5000


@pytest.mark.parametrize("model", ["smollm2_135m_instruct", "qwen2_5_coder_1_5b_instruct"])
def test_labels_cover_nothing(tmp_path, monkeypatch, model):
    """Neither each other nor a point, and none leaves the axes."""
    text = pytest.importorskip("matplotlib.text").Text
    real, seen = report.place_labels, []

    def placed(axes, points):
        labels = real(axes, points)
        renderer = axes.figure.canvas.get_renderer()
        boxes = [text.get_window_extent(label, renderer) for label in labels]
        marks = axes.transData.transform([point[1:] for point in points])
        inside = axes.get_window_extent(renderer)
        assert len(labels) == len(points) > 15
        for i, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[:i]), labels[i].get_text()
            assert not any(box.contains(*mark) for mark in marks), labels[i].get_text()
            assert inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1)
        seen.append(labels)

    monkeypatch.setattr(report, "place_labels", placed)
    found = report.read_json(ROOT / "benchmarks" / "results" / f"quality_{model}.json")
    short = [r for r in found if r["context"] == 2048 and r["dtype"] == "float32"]
    report.picture(tmp_path / "quality.png", [r for r in short if ":" not in r["cache"]])
    assert seen
