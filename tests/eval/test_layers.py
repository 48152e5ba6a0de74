"""Single layers, recorded: their attention, and what caches keep of keys and values."""

import math

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.mistral import MistralConfig

from tests.eval.harness import DIM, HEADS, LAYERS, TEXT, tiny
from tests.helpers import randn
from torch_turboquant import decode, encode
from torch_turboquant.eval import controls, layers
from torch_turboquant.eval.caches import Choice
from torch_turboquant.eval.controls import ControlCache
from torch_turboquant.tables import make_tables

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
