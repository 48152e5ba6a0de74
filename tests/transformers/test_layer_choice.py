"""Layers of one cache with bits, boundaries and configurations of their own."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.transformers.harness import (
    POLICIES,
    calibrated,
    check_against_oracle,
    feed,
    generate,
    make_calm_model,
    make_config,
    make_ids,
    make_model,
    recorded,
)
from torch_turboquant import CacheConfig
from torch_turboquant.integrations.transformers import TurboQuantCache
from torch_turboquant.integrations.transformers.models import layer_windows
from torch_turboquant.layer_choice import layer_configs


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "gemma2"])
@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "uniform"])
def test_every_layer_has_its_own_bits(name, policy):
    model, ids = make_model(name), make_ids(110)
    config = make_config(model, "k3v2")
    options = POLICIES[policy]
    with recorded(model, config, max_q_len=7, **options) as (cache, recorder):
        feed(model, cache, ids, 80, 1, 1, 20, 1)
        expected = layer_configs(config, layer_windows(model), **options)
        assert cache.configs == expected
        # 8 bits are close to exact; a layer with the bits of another would be far from both
        check_against_oracle(recorder, expected, 80, center="auto", coarse=2)


def test_a_layer_may_have_a_configuration_of_its_own():
    model, ids = make_model(), make_ids(100)
    config = make_config(model, "k3v2")
    own = CacheConfig(
        32, 5, 3, page_size=16, sink_tokens=3, recent_window=9, search=1, seed=77,
        key_scale_mode="mse", value_scale_mode="preserve",
    )  # fmt: skip
    with recorded(model, config, layer_presets={1: own}) as (cache, recorder):
        feed(model, cache, ids, 80, 1, 10, 1)
        check_against_oracle(recorder, [config, own, config], 80, center="auto")


def test_boundary_layers_cost_less_than_they_save():
    """8 bits in the layers next to the ends change the result towards the uncompressed model."""
    model, ids = make_calm_model(), make_ids(200)
    exact = model(ids).logits[:, 100:]
    errors = []
    for options in ({}, {"boundary_layers": 1}, {"boundary_layers": 2}):
        with TurboQuantCache.for_model(
            model, "k2v2", sink_tokens=0, recent_window=0, **options
        ) as cache:
            logits = feed(model, cache, ids, 100, *[1] * 100)[:, 100:]
        errors.append((logits - exact).pow(2).mean().item())
    assert errors[0] > errors[1] > 100 * errors[2]


def test_options_of_for_model_are_checked():
    model = make_model()
    for match, options in {
        "unknown preset 'k9'": {"boundary_preset": "k9"},
        "names layer 3, the model has 3 layers": {"layer_presets": {3: "k4v4"}},
        "layer 0 has page_size=16, the cache 32": {
            "layer_presets": {0: CacheConfig(32, 4, 4, page_size=16)}
        },
    }.items():
        with pytest.raises(ValueError, match=match):
            TurboQuantCache.for_model(model, **options)
    assert model.config._attn_implementation == "sdpa"


def test_policies_generate():
    """All options at once through generate: 8 bits everywhere write what the model does."""
    model, prompt = make_calm_model(), make_ids(75)
    expected = generate(model, prompt, new=30)
    options = {"boundary_layers": 1, "layer_presets": {1: "k8v8"}, "center": calibrated(model)}
    with TurboQuantCache.for_model(model, "k2v2", **options) as cache:
        assert torch.equal(generate(model, prompt, cache, new=30), expected)
        assert [c.key_bits for c in cache.configs] == [8, 8, 8]
