"""Whole evaluations: rows of results, and that an interrupted run goes on."""

import copy
import json

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, GPTNeoXConfig, Lfm2Config, LlamaConfig, OPTConfig

from tests.eval.harness import (
    CHOICES,
    DIM,
    LAYERS,
    ORIGIN,
    PREFILL,
    SETTINGS,
    SHAPE,
    TEXT,
    evaluate,
    reading,
    tiny,
)
from torch_turboquant.eval import predict, report, rows
from torch_turboquant.eval.caches import Choice
from torch_turboquant.eval.weights import WeightChoice


def test_rows(model, result):
    assert [row["cache"] for row in result] == ["none", "k4v4", "int4", "k2v2"]
    assert [row["kind"] for row in result] == ["uncompressed", "packed", "control", "packed"]
    base = reading(model, "none")
    assert result[0]["perplexity"] == pytest.approx(base.loss.mean().exp().item(), rel=1e-4)
    assert set(result[0]["channel_spread"]) >= {"key", "key_centered_rotated", "value_rotated"}
    for row in result[1:]:
        found = reading(model, row["cache"])
        assert row["kl"] == pytest.approx(found.kl.double().mean().item(), rel=1e-4)
        assert row["top1_agreement"] == found.same.double().mean().item()
        eighth = found.kl[:, 13:26].double().mean().item()  # 100 tokens: parts of 13 and 12
        assert row["kl_by_position"][1] == pytest.approx(eighth, rel=1e-3)
        assert all(len(values) == LAYERS for values in row["by_layer"].values())
        assert row["mean_key_nmse"] == pytest.approx(np.mean(row["by_layer"]["key_nmse"]))
        assert row["context"] == 260 and row["head_dim"] == DIM and row["segments"] == 2
    assert result[3]["kl"] > result[1]["kl"] > 0
    assert result[3]["mean_output_error"] > result[1]["mean_output_error"] > 0


@pytest.mark.parametrize("kind", [GPTNeoXConfig, OPTConfig])
def test_models_that_name_no_heads_of_keys(kind):
    """They have one for every query head."""
    shape = {name: SHAPE[name] for name in SHAPE if name not in ("num_key_value_heads", "head_dim")}
    shape |= {"hidden_size": 128, "ffn_dim": 64, "word_embed_proj_dim": 128}
    model = AutoModelForCausalLM.from_config(kind(**shape)).eval()
    assert not hasattr(model.config, "num_key_value_heads")
    *_, row = evaluate(model, choices=CHOICES[:1])
    assert row["cache"] == "k4v4" and row["q_heads"] == row["kv_heads"] == 4


def test_an_interrupted_run_goes_on(model, result, readings):
    saved = []
    readings.stop = "int4"
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, save=lambda rows: saved.append(list(rows)))
    assert [row["cache"] for row in saved[-1]] == ["none", "k4v4"]
    readings.stop, readings.names[:] = None, []
    again = evaluate(model, json.loads(json.dumps(saved[-1])))
    assert readings.names == ["none", "int4", "k2v2"]  # the reference, and what was missing
    assert json.dumps(again) == json.dumps(result)
    readings.names.clear()
    assert evaluate(model, again) == again and readings.names == []


def test_rows_without_single_layers(model, result, capsys):
    found = rows.evaluate(model, "tiny", CHOICES[:1], TEXT, SETTINGS, ORIGIN, single_layers=False)
    assert found[1]["kl"] == result[1]["kl"] and not set(found[1]) & {"by_layer", "mean_key_nmse"}
    assert "channel_spread" not in found[0]
    report.show(found)
    assert "k4v4" in capsys.readouterr().out


def test_rows_of_other_settings_do_not_count(model, result, readings):
    other = rows.Settings(2, PREFILL, 100, 25)
    found = evaluate(model, result, settings=other, choices=CHOICES[1:2])
    assert readings.names == ["none", "int4"]
    assert rows.without(result, found) == result
    assert rows.without(result, result[1:3]) == [result[0], result[3]]


def test_rows_of_another_model_of_the_same_name_do_not_count(result, readings):
    """A folder's name says nothing of what is in it now."""
    other = tiny(initializer_range=0.1)
    found = evaluate(other, result, choices=CHOICES[:1])
    assert readings.names == ["none", "k4v4"]
    assert found[1]["kl"] != result[1]["kl"]
    left = rows.without(result, found)
    assert [row["cache"] for row in left] == ["int4", "k2v2"]  # never two rows of one name


def test_a_training_of_any_channels_makes_another_model(model, result, readings):
    """The elements that stand for a weight are not all of its first column."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer in other.model.layers:
            layer.mlp.up_proj.weight[:, 1:] *= 1.5
    evaluate(other, result, choices=CHOICES[:1])
    assert readings.names == ["none", "k4v4"]


def test_rows_without_layers_are_measured_again_for_them(model, result, readings):
    short = rows.evaluate(model, "tiny", CHOICES[:1], TEXT, SETTINGS, ORIGIN, single_layers=False)
    readings.names.clear()
    again = evaluate(model, short, choices=CHOICES[:1])
    assert readings.names == ["none", "k4v4"] and again == result[:2]
    readings.names.clear()
    rows.evaluate(model, "tiny", CHOICES[:1], TEXT, SETTINGS, ORIGIN, again, single_layers=False)
    assert readings.names == []


def test_files_that_a_choice_names_belong_to_its_row(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("one")
    named = f"4:calibrate={file},tokens=300+k4v4:center=none"
    before = rows.files_of(named)
    assert list(before) == [str(file)]
    file.write_text("two")
    assert rows.files_of(named) != before and rows.files_of("k4v4:center=none") == {}


def test_models_with_other_states_are_refused():
    config = LlamaConfig(**SHAPE)
    other = Lfm2Config(**{**SHAPE, "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False})
    assert config.num_hidden_layers == other.num_hidden_layers
    model = AutoModelForCausalLM.from_config(other).eval()
    with pytest.raises(ValueError, match=r"layers \[0\] of tiny keep no keys and values"):
        evaluate(model)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("k4v4:center=typo.safetensors", "center is 'typo.safetensors', .* there is no such file"),
        ("k4v4:boundary_preset=foo", "unknown preset 'foo'"),
        ("k4v4:boundary_layers=-1", "boundary_layers is -1, supported: 0 and more"),
        ("k4v4:layers=999@k8v8", "layer_presets names layer 999, the model has 2 layers"),
    ],
)
def test_caches_that_cannot_be_made_are_told_before_the_first_reading(model, readings, text, says):
    before = model.config._attn_implementation
    match = f"this model cannot have the cache {text}: {says}"
    with pytest.raises(ValueError, match=match):
        evaluate(model, choices=[*CHOICES, Choice.parse(text)])
    weights = [(WeightChoice.parse(f"4+{text}"), None)]
    with pytest.raises(ValueError, match=match):
        rows.evaluate(model, "tiny", CHOICES, TEXT, SETTINGS, ORIGIN, weights=weights)
    assert readings.names == [] and model.config._attn_implementation == before


def test_extras_join_finished_rows(model, result, readings):
    calls = []

    def run(make, title, base):
        calls.append((title, None if base is None else base["value"]))
        cache = make()
        predict.detach(cache)
        if title == "k2v2" and len(calls) < 5:
            raise KeyboardInterrupt
        return {"value": len(title)}

    extra = rows.Extra("more", {"size": 3}, run)
    saved = []

    def again(done, extras):
        return rows.evaluate(
            model,
            "tiny",
            CHOICES,
            TEXT,
            SETTINGS,
            ORIGIN,
            done,
            lambda rows: saved.append(list(rows)),
            extras,
        )

    with pytest.raises(KeyboardInterrupt):
        again(result, [extra])
    assert readings.names == []  # the text is not read again
    assert calls == [("none", None), ("k4v4", 4), ("int4", 4), ("k2v2", 4)]
    found = again(saved[-1], [extra])
    assert calls[4:] == [("k2v2", 4)]
    expected = {"size": 3, "value": 4, "commit": None, "command": "x"}
    assert [row["more"] for row in found] == [expected] * 4
    assert [{k: v for k, v in row.items() if k != "more"} for row in found] == result
    calls[:] = [None] * 5
    again(found, [extra._replace(same={"size": 4})])  # another grid is measured anew
    assert len(calls) == 9
