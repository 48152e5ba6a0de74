"""The evaluation on tiny random models: its metrics against direct computations, its controls
against their formats, and that an interrupted run goes on.
"""

import argparse
import ast
import copy
import itertools
import json
import math
from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.mistral import MistralConfig

from tests.helpers import ROOT, generator, randn
from torch_turboquant import decode, encode
from torch_turboquant import eval as evaluation
from torch_turboquant.config import preset
from torch_turboquant.eval import (
    allocation,
    assets,
    caches,
    controls,
    layers,
    measure,
    needle,
    options,
    predict,
    report,
    rows,
    tasks,
)
from torch_turboquant.eval.caches import Choice
from torch_turboquant.eval.controls import ControlCache
from torch_turboquant.eval.session import Session
from torch_turboquant.eval.weights import WeightChoice
from torch_turboquant.integrations.transformers import quantize
from torch_turboquant.paper import TurboQuantMSE, TurboQuantProd
from torch_turboquant.signs import SignKind
from torch_turboquant.tables import make_tables

DIM, HEADS, LAYERS = 64, 2, 2
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": DIM,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "max_position_embeddings": 4096,
}


def tiny(config_class=LlamaConfig, **more):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_class(**{**SHAPE, **more})).eval()


@pytest.fixture(scope="module")
def model():
    return tiny()


TEXT = torch.randint(1, 64, (2, 260), generator=generator(3))  # 0 is padding: a zero vector
PREFILL, CHUNK = 160, 20  # divides what comes before and after


def reading(model, name, text=TEXT, prefill=PREFILL, chunk=CHUNK):
    base, logits, _ = measure.read(model, lambda: DynamicCache(), text, prefill, chunk)
    if name == "none":
        return base
    make = Choice.parse(name).make
    return measure.read(model, lambda: make(model), text, prefill, chunk, logits)[0]


# ---------------------------------------------------------------------------------- the names


def test_names_of_caches():
    assert Choice.parse("none").kind == "uncompressed"
    assert Choice.parse("k4v4").kind == "packed" and Choice.parse("k4v4").changes == {}
    changed = Choice.parse(" k4v4: recent_window=0, center=none,boundary_layers=1,key_grid=uniform")
    assert changed.text == "k4v4:recent_window=0,center=none,boundary_layers=1,key_grid=uniform"
    assert changed.changes == {
        "recent_window": 0,
        "center": None,
        "boundary_layers": 1,
        "key_grid": "uniform",
    }
    assert all(Choice.parse(name).kind == "control" for name in controls.CONTROLS)


@pytest.mark.parametrize(
    "text, says",
    [
        ("k9v9", "presets k8v8"),
        ("kivi1", "controls fp8"),
        ("qjl6", "controls fp8"),
        ("kivi4:center=none", "only presets"),
        ("k4v4:windows=3", "recent_window"),
        ("k4v4:search", "field=value"),
        ("k4v4:search=many", "integer"),
        ("k4v4:search=1000", "1 to 64"),
        ("k4v4:keep=half", "keep=half: write a number"),
        ("k4v4:keep=1.5", "keep is 1.5, supported"),
        ("k4v4:keep=0.5,evict=h2o", "unknown policy 'h2o'"),
        ("k4v4:layers=0@k9v9", "layer@preset"),
        ("k4v4:layers=first@k8v8", "layer@preset"),
    ],
)
def test_names_that_are_refused(text, says):
    with pytest.raises(ValueError, match=says):
        Choice.parse(text)


def test_changes_reach_the_cache(model):
    cache = Choice.parse("k4v4:recent_window=7,center=none,boundary_layers=1").make(model)
    cache.detach()
    assert cache.config.recent_window == 7 and cache.center is None
    assert [c.key_bits for c in cache.configs] == [8, 8]
    cache = Choice.parse("k4v4:layers=-1@k3v2").make(model)
    cache.detach()
    assert [c.key_bits for c in cache.configs] == [4, 3]
    cache = Choice.parse("k4v4:keep=0.25,evict=keydiff").make(model)
    cache.detach()
    assert (cache.sequences.eviction.keep, cache.sequences.eviction.evict) == (0.25, "keydiff")


# ------------------------------------------------------------------------------------- sizes

# Bytes of a key and a value of 64 channels, by hand from the formats.
TOKEN_BYTES = {
    "fp8": 64 + 64,
    "fp8s": 64 + 64,
    "int8": 2 * (64 + 4),
    "int4": 2 * (32 + 4),
    "q4_0": 2 * 2 * 18,
    "q8_0": 2 * 2 * 34,
    "q4_0h": 2 * 2 * 18,
    "kivi4": (32 + 64 * 4 / 32) + (32 + 2 * 4),
    "kivi2": (16 + 64 * 4 / 32) + (16 + 2 * 4),
    "channel4": 32 + (32 + 4),
    "qjl4": (24 + 2 + 8 + 4) + (32 + 2),  # codes, scale, sketch, norm; codes, scale
}


def test_every_control_has_its_size_here():
    assert set(controls.CONTROLS) <= set(TOKEN_BYTES)


@pytest.mark.parametrize("name", TOKEN_BYTES)
def test_bytes_of_controls(model, name):
    cache = ControlCache(model.config, name)
    with torch.no_grad():
        model(TEXT[:1, :40], past_key_values=cache)
    size = caches.sizes(cache, model, DIM)
    assert size["bytes_per_token"] == TOKEN_BYTES[name] * HEADS * LAYERS
    assert size["bits_per_value"] == pytest.approx(TOKEN_BYTES[name] * 8 / (2 * DIM))
    exact = 2 * 128 * DIM * HEADS * LAYERS * 2 if name.startswith("kivi") else 0
    grown = size["bytes_per_token_8k"] - size["bytes_per_token"]
    assert grown == pytest.approx(exact / 8192)


def test_bytes_of_presets_and_of_no_compression(model):
    cache = Choice.parse("k4v4").make(model)
    with torch.no_grad():
        model(TEXT[:1, :90], past_key_values=cache)
    cache.detach()
    size = caches.sizes(cache, model, DIM)
    config = preset("k4v4", DIM)
    assert size["bytes_per_token"] == config.bytes_per_token * HEADS * LAYERS
    rows_held = config.sink_tokens + config.recent_window + cache.sequences.max_q_len - 1
    tail = rows_held * 2 * DIM * HEADS * LAYERS * 2  # 16 bits, though this model runs in 32
    assert size["bytes_per_token_8k"] == size["bytes_per_token"] + tail / 8192
    assert size["bits_per_value_8k"] == pytest.approx(
        8 * size["bytes_per_token_8k"] / (2 * DIM * HEADS * LAYERS)
    )
    assert size["bytes_8k"] == 8192 * size["bytes_per_token"] + tail
    thin = Choice.parse("k4v4:keep=0.25").make(model)
    with torch.no_grad():
        model(TEXT[:1, :90], past_key_values=thin)
    thin.detach()
    assert caches.sizes(thin, model, DIM)["bytes_8k"] == 2048 * size["bytes_per_token"] + tail
    plain = DynamicCache()
    with torch.no_grad():
        model(TEXT[:1, :9], past_key_values=plain)
    size = caches.sizes(plain, model, DIM)
    assert size["bits_per_value"] == size["bits_per_value_8k"] == 16


@pytest.mark.parametrize("name", ["none", "k4v4", "int8", "kivi4"])
def test_a_window_holds_no_more_than_it_needs(name):
    sliding = tiny(MistralConfig, sliding_window=40)
    cache = Choice.parse(name).make(sliding)
    with torch.no_grad():
        sliding(TEXT[:1, :200], past_key_values=cache)
    size = caches.sizes(cache, sliding, DIM)
    values = 2 * DIM * HEADS * LAYERS
    if name == "k4v4":
        cache.detach()
        tokens = 32 * (1 + math.ceil((40 + 31 - 1) / 32))  # whole pages, and what max_q_len needs
        grows, once = preset("k4v4", DIM).bytes_per_token * HEADS * LAYERS, 99 * values * 2
    else:
        tokens, grows = 40, {"none": 2 * values, "int8": 68 * 2 * HEADS * LAYERS}.get(name)
        grows, once = (
            (grows, 0) if grows else (TOKEN_BYTES[name] * HEADS * LAYERS, 128 * values * 2)
        )
    assert size["bytes_per_token"] == grows
    assert size["bytes_per_token_8k"] == pytest.approx(grows + once / 8192)
    assert size["bytes_8k"] == pytest.approx(grows * tokens + once)


# ---------------------------------------------------------------------------- the quantisers


def test_affine_is_the_formula(device):
    x = randn(3, 5, 7, seed=1).to(device) * 4 + 2
    got = controls.affine(x, 3, -1).cpu().numpy()
    for index in np.ndindex(3, 5):
        row = x[index].cpu().numpy()
        low = np.float32(np.float16(row.min()))
        step = np.float32(np.float16((row.max() - low) / np.float32(7)))
        codes = np.clip(np.round((row - low) / step), 0, 7)
        np.testing.assert_allclose(got[index], low + codes * step, rtol=1e-6)
    assert len(np.unique(got[0, 0])) <= 8
    constant = torch.full((2, 4), 0.5, device=device)
    assert torch.equal(controls.affine(constant, 4, -1), constant)


def test_blocks_are_those_of_llama_cpp(device):
    """quantize_row_q4_0: d = max / -8, codes min(15, int8(x / d + 8.5))."""
    x = randn(6, 64, seed=2)
    x[0, :32] = 0
    got = controls.blocks(x.to(device), 4).cpu()
    for row in range(6):
        for start in (0, 32):
            part = x[row, start : start + 32].numpy()
            largest = part[np.abs(part).argmax()]
            d = np.float32(np.float16(largest / np.float32(-8)))
            expected = np.zeros(32, np.float32)
            if d:
                codes = np.minimum(15, (part / d + np.float32(8.5)).astype(np.int8))
                expected = (codes - np.float32(8)) * d
            found = got[row, start : start + 32].numpy()
            # a tie may be rounded either way
            ties = np.abs(np.abs(part / (d or 1)) % 1 - 0.5) < 1e-5
            np.testing.assert_allclose(found[~ties], expected[~ties], rtol=1e-6)


def test_fp8_clips_and_scales(device):
    x = torch.tensor([1000.0, -1000.0, 0.3, 17.0, 1e-9], device=device)
    assert controls.fp8(x).tolist() == [448.0, -448.0, 0.3125, 17.0 - 1.0, 0.0]
    layer = controls.ScaledFp8(0, 8)
    keys, values = x.view(1, 1, 5, 1), x.view(1, 1, 5, 1) / 100
    layer.calibrate(keys, values)
    k, v = layer.code(keys, values)
    assert k.flatten()[:2].tolist() == pytest.approx([1000.0, -1000.0])
    assert torch.allclose(v * 100, k)


def through(layer, keys, values, chunk):
    """Feeds [1, heads, n, d] after a first forward of 150 tokens; what each forward was handed."""
    handed = [layer.update(keys[:, :, :150], values[:, :, :150])]
    for start in range(150, keys.shape[2], chunk):
        part = slice(start, start + chunk)
        handed.append(layer.update(keys[:, :, part], values[:, :, part]))
    return handed


def test_kivi_keeps_its_residual_exact(device):
    n = 300
    keys, values = (randn(1, HEADS, n, DIM, seed=s).to(device) for s in (1, 2))
    layer = controls.Kivi(0, 2)
    handed = through(layer, keys, values, 1)
    assert torch.equal(handed[0][0], keys[:, :, :150])  # the prompt attends exactly
    groups = keys[:, :, :256].unflatten(2, (8, 32))
    coded = controls.affine(groups, 2, 3).flatten(2, 3)
    assert torch.equal(layer.keys[:, :, :256], coded)
    assert torch.equal(layer.keys[:, :, 256:], keys[:, :, 256:])
    coded = controls.affine(values[:, :, :172].unflatten(-1, (2, 32)), 2, -1).flatten(-2)
    assert torch.equal(layer.values[:, :, :172], coded)
    assert torch.equal(layer.values[:, :, 172:], values[:, :, 172:])
    # a query reads keys as they are before its own token closes a group
    at = 255 - 150 + 1
    assert torch.equal(handed[at][0][:, :, 128:], keys[:, :, 128:256])
    assert not torch.equal(handed[at + 1][0][:, :, 128:256], keys[:, :, 128:256])
    together = controls.Kivi(0, 2)
    through(together, keys, values, 30)
    assert torch.equal(together.keys, layer.keys) and torch.equal(together.values, layer.values)


@pytest.mark.parametrize("name", ["fp8s", "int4", "q4_0", "q4_0h", "channel4", "qjl3"])
def test_tokens_are_coded_one_by_one(model, name, device):
    """How the tokens are cut into forwards does not matter, and later queries read codes."""
    keys, values = (randn(1, HEADS, 200, DIM, seed=s).to(device) for s in (1, 2))
    one, many = (ControlCache(model.config, name).layers[1] for _ in range(2))
    handed = through(one, keys, values, 1)
    through(many, keys, values, 25)
    torch.testing.assert_close(one.keys, many.keys)
    torch.testing.assert_close(one.values, many.values)
    assert torch.equal(handed[0][0], keys[:, :, :150])
    assert torch.equal(handed[-1][0], one.keys)
    assert not torch.equal(one.keys[:, :, -1], keys[:, :, -1])


def test_channel_ranges_are_those_of_the_first_forward(device):
    keys, values = (randn(1, HEADS, 50, DIM, seed=s).to(device) for s in (1, 2))
    layer = controls.PerChannel(0, 16)
    layer.update(keys, values)
    torch.testing.assert_close(layer.keys, keys, atol=2e-3, rtol=0)
    layer.update(keys[:, :, :1] + 100, values[:, :, :1])
    torch.testing.assert_close(layer.keys[:, :, 50], keys.amax(2), atol=5e-3, rtol=0)


def test_two_stages_are_the_papers(device):
    keys, values = (randn(1, HEADS, 30, DIM, seed=s).to(device) for s in (1, 2))
    layer = controls.TwoStage(3, 4)
    layer.update(keys, values)
    prod = TurboQuantProd(DIM, 4, layer=3, device=device)
    queries = randn(1, HEADS, 5, DIM, seed=7).to(device)
    expected = prod.score(queries, prod.quantize(keys))
    torch.testing.assert_close(queries @ layer.keys.transpose(2, 3), expected, atol=1e-3, rtol=1e-3)
    mse = TurboQuantMSE(DIM, 4, layer=3, kind=SignKind.VALUES, device=device)
    torch.testing.assert_close(layer.values, mse.dequantize(mse.quantize(values)))


def test_rotation_spreads_an_outlier(device):
    x = torch.zeros(1, 1, 1, DIM, device=device)
    x[..., 5] = 8.0
    x += 0.3 * randn(1, 1, 1, DIM, seed=1).to(device)
    plain, rotated = controls.Blocks(0, 4), controls.RotatedBlocks(0, 4)
    for layer in (plain, rotated):
        layer.update(x, x)
    assert (rotated.keys - x).square().sum() < 0.5 * (plain.keys - x).square().sum()


@pytest.mark.parametrize("family", ["int{}", "q{}_0", "q{}_0h", "kivi{}"])
def test_many_bits_are_no_compression(model, family):
    kl = [reading(model, family.format(bits)).kl.mean().item() for bits in (2, 4, 8, 16)]
    assert kl[0] > kl[1] > kl[2] and kl[3] < 1e-5, kl
    assert kl[1] > 1e-4


def test_other_controls_order_as_their_bits(model):
    kl = {n: reading(model, n).kl.mean().item() for n in ("fp8s", "qjl2", "qjl3", "qjl5")}
    assert kl["qjl2"] > kl["qjl3"] > kl["qjl5"] > kl["fp8s"] > 0
    kl = [reading(model, f"channel{bits}").kl.mean().item() for bits in (2, 4, 12)]
    assert kl[0] > kl[1] > kl[2] > 0


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


# --------------------------------------------------------------------------------- single layers

MODELS = {
    "llama": lambda: tiny(),
    "eager": lambda: tiny(attn_implementation="eager"),
    "mistral": lambda: tiny(MistralConfig, sliding_window=24),
    "gemma2": lambda: tiny(Gemma2Config, sliding_window=24, attn_logit_softcapping=2.0),
    "gpt_oss": lambda: tiny(
        GptOssConfig, sliding_window=24, num_local_experts=2, num_experts_per_tok=1
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_attention_of_recorded_layers_is_the_models(name):
    """Scaling, soft cap, sliding window and sinks included."""
    model = MODELS[name]()
    before = model.config._attn_implementation
    inputs = {}
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda _, args, i=i: inputs.update({i: args[0]})
        )
        for i, layer in enumerate(model.model.layers)
    ]
    recorded = layers.record(model, TEXT[0, :100])
    assert model.config._attn_implementation == before
    assert len(recorded) == LAYERS
    for hook in hooks:
        hook.remove()
    for i, layer in enumerate(recorded):
        assert layer.keys.shape == (HEADS, 100, DIM)
        _, output = layers.attend(layer, layer.keys, layer.values)
        expected = inputs[i][0].unflatten(-1, (4, DIM)).transpose(0, 1)
        torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def recorded(model):
    return layers.record(model, TEXT[0, :200])


def test_keys_and_values_are_the_caches(model, recorded):
    cache = DynamicCache()
    with torch.no_grad():
        model(TEXT[:1, :200], past_key_values=cache)
    for layer, held in zip(recorded, cache.layers, strict=True):
        torch.testing.assert_close(layer.keys, held.keys[0])
        torch.testing.assert_close(layer.values, held.values[0])


def test_errors_of_a_layer(recorded):
    layer = recorded[1]
    keys, values = layer.keys.clone(), layer.values.clone()
    noise = randn(HEADS, 150, DIM, seed=4)
    keys[:, 20:170] += 0.1 * noise
    values[:, 20:170] *= 1.1
    found = layers.errors(layer, keys, values)
    part = layer.keys[:, 20:170]
    error = (0.1 * noise).square().sum()
    assert found["key_nmse"] == pytest.approx((error / part.square().sum()).item(), rel=1e-3)
    around = (part - layer.keys.mean(1, keepdim=True)).square().sum()
    assert found["key_snr_db"] == pytest.approx(10 * math.log10(around / error), rel=1e-3)
    assert found["value_nmse"] == pytest.approx(0.01, rel=1e-3)

    # scores and outputs of the last query by hand
    q, groups = layer.queries[:, -1], 2
    cosines, outputs = [], []
    for head in range(4):
        true, near = (k[head // groups] @ q[head] for k in (layer.keys, keys))
        a, b = true - true.mean(), near - near.mean()
        cosines.append((a @ b / (a.norm() * b.norm())).item())
        exact = (true / 8).softmax(-1) @ layer.values[head // groups]
        outputs.append(((near / 8).softmax(-1) @ values[head // groups], exact))
    one = layers.errors(layer._replace(queries=layer.queries[:, -1:]), keys, values)
    assert one["score_cosine"] == pytest.approx(sum(cosines) / 4, rel=1e-4)
    got, exact = (torch.stack(x) for x in zip(*outputs, strict=True))
    expected = (got - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert one["output_error"] == pytest.approx(expected.item(), rel=1e-3)

    # a constant on every key is invisible to softmax
    moved = layers.errors(layer, layer.keys + 0.5, layer.values)
    assert moved["score_cosine"] == pytest.approx(1.0, abs=1e-5)
    assert moved["output_error"] < 1e-4 and moved["key_nmse"] > 0.01


def test_nothing_changed_is_no_error(recorded):
    found = layers.errors(recorded[0], recorded[0].keys, recorded[0].values)
    assert found["key_nmse"] == found["value_nmse"] == found["output_error"] == 0.0
    assert found["key_snr_db"] is None
    assert found["score_cosine"] == pytest.approx(1.0, abs=1e-6)


def test_packed_keys_are_read_back_as_encoded(model, recorded):
    cache = Choice.parse("k4v3:center=none,sink_tokens=0,recent_window=0").make(model)
    back = list(layers.read_back(cache, recorded, 120, 20))
    cache.detach()
    config = cache.config
    for index, (layer, (keys, values)) in enumerate(zip(recorded, back, strict=True)):
        t = make_tables(config, index)
        packed, scale = encode(layer.keys, t.key_signs, t.key_levels, t.key_steps, 4, "unbiased")
        assert torch.equal(keys, decode(packed, scale, t.key_signs, t.key_levels, 4))
        packed, scale = encode(layer.values, t.value_signs, t.value_levels, t.value_steps, 3, "mse")
        assert torch.equal(values, decode(packed, scale, t.value_signs, t.value_levels, 3))


def test_the_tail_is_read_back_exactly(model, recorded):
    cache = Choice.parse("k4v4").make(model)
    back = list(layers.read_back(cache, recorded, 120, 50))
    cache.detach()
    for layer, pair in zip(recorded, back, strict=True):
        for x, y in zip((layer.keys, layer.values), pair, strict=True):
            same = (x == y).all(-1).all(0)
            assert same.nonzero()[:, 0].tolist() == [*range(4), *range(136, 200)]
    expected = [layer.keys[:, 4:120].mean(1) for layer in recorded]  # learned from the first store
    for center, mean in zip(cache.centers, expected, strict=True):
        torch.testing.assert_close(center[0], mean)


def test_a_window_is_read_back_as_far_as_it_is_held():
    sliding = tiny(MistralConfig, sliding_window=40)
    recorded = layers.record(sliding, TEXT[0, :200])
    cache = Choice.parse("k4v4:center=none,recent_window=8,page_size=16").make(sliding)
    back = list(layers.read_back(cache, recorded, 120, 20))
    cache.detach()
    for index, (layer, (keys, values)) in enumerate(zip(recorded, back, strict=True)):
        same = (keys == layer.keys).all(-1).all(0)
        coded = (~same).nonzero()[:, 0].tolist()
        assert coded == list(range(coded[0], 192)) and coded[0] <= 200 - 40 - layers.QUERIES + 1
        t = make_tables(cache.config, index)
        packed, scale = encode(layer.keys, t.key_signs, t.key_levels, t.key_steps, 4, "unbiased")
        decoded = decode(packed, scale, t.key_signs, t.key_levels, 4)
        assert torch.equal(keys[:, coded], decoded[:, coded])
        assert 0 < layers.errors(layer, keys, values)["output_error"] < 0.5


def test_controls_are_read_back_as_coded(model, recorded):
    cache = ControlCache(model.config, "int4")
    for layer, (keys, values) in zip(
        recorded, layers.read_back(cache, recorded, 120, 20), strict=True
    ):
        assert torch.equal(keys, controls.affine(layer.keys, 4, -1))
        assert torch.equal(values, controls.affine(layer.values, 4, -1))


def test_channel_spread():
    keys = randn(HEADS, 2000, DIM, seed=1)
    values = randn(HEADS, 2000, DIM, seed=2)
    keys[..., 3] += 30.0  # a biased channel: the center removes it, the rotation spreads it
    values[..., 7] *= 10.0
    spread = layers.channel_spread(0, layers.Activations(keys, keys, values, {}))
    assert spread["key"] > 500
    assert spread["key_centered"] < 1.5 and spread["key_centered_rotated"] < 1.5
    assert spread["value"] > 60 and spread["value_rotated"] < 2
    power = values[:, layers.SINKS :].double().square().mean(1)
    expected = (power.amax(-1) / power.amin(-1)).mean().item()
    assert spread["value"] == pytest.approx(expected)


# ----------------------------------------------------------------------------- whole evaluations

SETTINGS = rows.Settings(segments=2, prefill=PREFILL, scored_tokens=100, chunk=CHUNK)
CHOICES = [Choice.parse(name) for name in ("k4v4", "int4", "k2v2")]
ORIGIN = {"name": "quality", "device": "a device", "commit": None, "command": "x"}


@pytest.fixture
def readings(monkeypatch):
    """The names of the caches that were read; `stop` interrupts one of them."""
    seen = argparse.Namespace(names=[], stop=None)
    read = measure.read

    def counted(*args, **kwargs):
        if kwargs["title"] == seen.stop:
            raise KeyboardInterrupt
        seen.names.append(kwargs["title"])
        return read(*args, **kwargs)

    monkeypatch.setattr(measure, "read", counted)
    return seen


def evaluate(model, done=(), settings=SETTINGS, choices=CHOICES, save=lambda rows: None):
    return rows.evaluate(model, "tiny", choices, TEXT, settings, ORIGIN, done, save)


@pytest.fixture(scope="module")
def result(model):
    return evaluate(model)


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


# ------------------------------------------------------------------------------ packed weights


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


# ------------------------------------------------------------------------- bits layer by layer


@pytest.mark.parametrize("budget", [2.1, 2.5, 3.0, 3.9, 4.2])
def test_an_allocation_is_the_best_in_its_budget(budget):
    bits, layers = [2.1, 2.6, 3.1, 4.2], range(4)
    random = np.random.default_rng(int(10 * budget))
    lost = {layer: sorted(random.random(4), reverse=True) for layer in layers}
    chosen = allocation.allocate(lost, bits, budget)
    assert list(chosen) == list(layers)

    def cost(numbers):
        return sum(lost[layer][n] for layer, n in zip(layers, numbers, strict=True))

    inside = [
        numbers
        for numbers in itertools.product(range(4), repeat=4)
        if sum(bits[n] for n in numbers) / 4 <= budget + 1e-9
    ]
    assert tuple(chosen.values()) in inside
    assert cost(chosen.values()) == pytest.approx(min(map(cost, inside)))


def test_an_allocation_holds_its_budget_to_the_last_bit():
    lost = {0: [1.0, 0.1, 0.09], 1: [1.0, 0.1, 0.09]}
    assert allocation.allocate(lost, [2.0, 3.0, 4.0], 3.0) == {0: 1, 1: 1}
    assert sorted(allocation.allocate(lost, [2.0, 3.0, 4.0], 2.99999).values()) == [0, 1]


def test_an_allocation_needs_room_for_the_smallest():
    with pytest.raises(ValueError, match="the smallest has 2"):
        allocation.allocate({0: [1.0, 0.5]}, [2.1, 3.1], 2.0)


def test_sensitivities_are_those_of_single_layers(model):
    names = ("k2v2", "k8v8")
    found = allocation.sensitivities(model, TEXT[:1], PREFILL, CHUNK, names, recent_window=16)
    assert list(found) == list(range(LAYERS))
    text = "k8v8:recent_window=16,layers=1@k2v2"
    alone = reading(model, text, TEXT[:1]).kl.double().mean().item()
    assert found[1][0] == pytest.approx(alone, rel=1e-4)
    assert all(lost[0] > 10 * lost[1] for lost in found.values())


def test_layers_of_a_file(model, tmp_path):
    path = tmp_path / "chosen.json"
    path.write_text('{"0": "k8v4", "1": "k3v2"}')
    cache = Choice.parse(f"k4v4:layers={path}").make(model)
    cache.detach()
    assert [(c.key_bits, c.value_bits) for c in cache.configs] == [(8, 4), (3, 2)]


# --------------------------------------------------------------------------- questions, answers


class Tokenizer:
    """Bytes as tokens, after a first token of its own if it has one."""

    def __init__(self, first=()):
        self.first = list(first)

    def __call__(self, text, return_tensors=None, add_special_tokens=True):
        ids = self.first * add_special_tokens + [b % 64 for b in text.encode()]
        return argparse.Namespace(input_ids=torch.tensor([ids]) if return_tensors else ids)

    def decode(self, ids):
        return "".join(chr(64 + i) for i in ids)


def ask(model, parts, most=12, name="none"):
    cache = Choice.parse(name).make(model)
    session = Session(model, Tokenizer(), cache)
    for part in parts:
        session.read(part)
    answer = session.answer(most)
    predict.detach(cache)
    return answer, cache


def test_a_session_is_greedy_generation(model):
    prompt = TEXT[0, :90]
    answer, cache = ask(model, [prompt[:60], prompt[60:89], prompt[89:]])
    assert cache.get_seq_length() == 90 + len(answer)
    expected = prompt.tolist()
    for _ in range(12):
        with torch.no_grad():
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
    assert answer == expected[90:]


def test_a_session_ends(model, monkeypatch):
    answer, _ = ask(model, [TEXT[0, :90]])
    at = next(i for i in range(1, 12) if answer[i] not in answer[:i])
    monkeypatch.setattr(model.generation_config, "eos_token_id", [answer[at]])
    assert ask(model, [TEXT[0, :90]])[0] == answer[:at]
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    newline = answer[at]
    monkeypatch.setattr(
        Tokenizer, "decode", lambda self, ids: "\n" if ids == [newline] else "x" * len(ids)
    )
    assert ask(model, [TEXT[0, :90]])[0] == answer[:at]


class Reader:
    """Stands in for Session: remembers the last `memory` bytes that it read before the question."""

    memory = 10**6

    def __init__(self, model, tokenizer, cache):
        self.parts = []

    def read(self, ids):
        self.parts.append(ids.tolist())

    def answer(self, most):
        return self.parts


def test_needles_are_found_where_they_are(monkeypatch):
    class Bytes(Tokenizer):
        def __call__(self, text, add_special_tokens=True):
            return argparse.Namespace(input_ids=list(text.encode()))

        def decode(self, parts):
            haystack, question = (bytes(part).decode() for part in parts)
            assert question == needle.QUESTION
            lengths.append(len(haystack))
            return haystack[-Reader.memory :]

    lengths = []
    monkeypatch.setattr(needle, "Session", Reader)
    text = "hay " * 300
    found = needle.search(None, Bytes(), text, lambda: None, [200, 1000])
    assert lengths == [200] * 5 + [1000] * 5
    assert found["share"] == 1.0 and found["found"] == [[True] * 5] * 2
    monkeypatch.setattr(Reader, "memory", 600)
    found = needle.search(None, Bytes(), text, lambda: None, [200, 1000])
    assert found["found"] == [[True] * 5, [False, False, True, True, True]]
    assert found["share"] == 0.8 and found["depths"] == [0.0, 0.25, 0.5, 0.75, 1.0]
    with pytest.raises(ValueError, match="the needle needs 5000"):
        needle.search(None, Bytes(), text, lambda: None, [5000])


def test_secrets_differ():
    secrets = {needle.number(length, depth) for length in (512, 1024) for depth in needle.DEPTHS}
    assert len(secrets) == 10 and all(len(s) == 5 and s.isdigit() for s in secrets)
    assert needle.number(512, 0.25) == needle.number(512, 0.25)


def test_the_tasks():
    work = tasks.prompts()
    assert len(work) == 40 and len(set(work)) == 40
    assert {kind for kind, *_ in work} == {
        "classification",
        "extraction",
        "arithmetic",
        "reasoning",
        "verification",
    }
    for kind in tasks.KINDS:
        assert len(kind.pairs) == tasks.EXAMPLES + 8
        assert len({case for case, _ in kind.pairs}) == len(kind.pairs)
    pairs = {kind.name: kind.pairs for kind in tasks.KINDS}
    assert all(city in sentence for sentence, city in pairs["extraction"])
    for expression, value in pairs["arithmetic"]:
        a, sign, b = expression.split()
        results = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}
        assert results[sign] == int(value)
    assert len(tasks.CONVERSATIONS) >= 5
    assert all(len(questions) == 3 for _, questions in tasks.CONVERSATIONS)
    config = preset("k5v4u", DIM)  # what the answer needs is not in the exact tail
    assert len(tasks.NOTE.split()) > config.sink_tokens + config.recent_window


def test_agreement():
    base = {"prompts": [[i, 1] for i in range(40)], "turns": [[1, 2, 3], [4], [], [5]]}
    found = {"prompts": [list(x) for x in base["prompts"]], "turns": [[1, 2], [4], [], [6]]}
    found["prompts"][0] = [0, 9]
    found["prompts"][39] = [7, 1]
    got = tasks.agreement(Tokenizer(), found, base)
    assert got["first_token"] == 39 / 40 and got["whole_answer"] == 38 / 40
    assert got["kinds"]["classification"] == got["kinds"]["verification"] == 7 / 8
    assert got["kinds"]["arithmetic"] == 1.0
    assert got["turn_first_token"] == 3 / 4 and got["turn_whole_answer"] == 2 / 4
    assert got["right"] == 0.0

    class Right(Tokenizer):
        def decode(self, ids):
            return f" {tasks.prompts()[ids[0]][3].upper()}, I think"

    assert tasks.agreement(Right(), base, base)["right"] == 1.0


def test_answers(model, monkeypatch):
    monkeypatch.setattr(tasks, "KINDS", tasks.KINDS[:2])
    monkeypatch.setattr(tasks, "CONVERSATIONS", tasks.CONVERSATIONS[:1])

    def said(name):
        make = Choice.parse(name).make
        return tasks.answers(model, Tokenizer(), lambda: make(model))

    base = said("none")
    assert len(base["prompts"]) == 16 and len(base["turns"]) == 3
    assert base == said("int16") != said("int2")
    assert base != said("k2v2")
    _, examples, case, _ = tasks.prompts()[0]
    ids = torch.tensor([b % 64 for b in (examples + case).encode()])
    assert ask(model, [ids], tasks.NEW_TOKENS)[0] == base["prompts"][0]


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


# ----------------------------------------------------------------------------------- the report


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


# ----------------------------------------------------------------------------- the command line


def test_segments():
    text = "".join(chr(33 + i) for i in range(20))
    plain = measure.segments(Tokenizer(), text, 2, 8)
    assert plain.tolist() == [list(range(33, 41)), list(range(41, 49))]
    first = measure.segments(Tokenizer([5]), text, 2, 8)
    assert first.tolist() == [[5, *range(33, 40)], [5, *range(40, 47)]]
    with pytest.raises(ValueError, match="the text has 20 tokens"):
        measure.segments(Tokenizer(), text, 3, 8)


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


@pytest.mark.parametrize("argv", [("--caches", "k9v9"), ("--chunk", "0")])
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
        (["--text", "/nonexistent"], "No such file or directory: '/nonexistent'"),
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
