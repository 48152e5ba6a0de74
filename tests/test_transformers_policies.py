"""Options of the transformers cache that treat layers differently, saved centers, and memory.

The oracle and the tiny models are those of test_transformers.
"""

from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.test_transformers import (  # noqa: E402
    MODELS,
    check_against_oracle,
    feed,
    generate,
    make_calm_model,
    make_config,
    make_ids,
    make_model,
    recorded,
)
from torch_turboquant import CacheConfig  # noqa: E402
from torch_turboquant.integrations.transformers import (  # noqa: E402
    TurboQuantCache,
    load_centers,
    save_centers,
)
from torch_turboquant.integrations.transformers.centers import fingerprint  # noqa: E402
from torch_turboquant.integrations.transformers.models import layer_windows  # noqa: E402
from torch_turboquant.layer_choice import layer_configs  # noqa: E402
from torch_turboquant.memory import AttentionLayer, attention_layers, packed_memory  # noqa: E402

POLICIES = {
    "uniform": {},
    "boundary": {"boundary_layers": 1},
    "boundary-k4v4": {"boundary_layers": 1, "boundary_preset": "k4v4"},
    "by-layer": {"layer_presets": {0: "k5v3u", -1: "k8v4"}},
    "list": {"layer_presets": [None, "k2v2", "k4v3"], "boundary_layers": 1},
}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


# ---- attention


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


# ---- memory


def predicted(model, configs, context, **options):
    layers = attention_layers(model.config.to_dict())
    assert [layer.window for layer in layers] == layer_windows(model)
    return packed_memory(
        "", layers, configs, context, tail_itemsize=model.dtype.itemsize, **options
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_memory_is_what_the_command_predicts(name, policy):
    """Exactly, not only within 2%: pages, tail and constants of every layer."""
    model, context = make_model(name), 150
    config = make_config(model, "k4v3", page_size=32)
    options = {"max_q_len": 5, "max_cache_len": context, **POLICIES[policy]}
    with TurboQuantCache.for_model(model, config=config, **options) as cache:
        feed(model, cache, make_ids(context), 90, 50, 10)
        memory, layers = cache.memory_bytes(), cache.memory_by_layer()
        expected = predicted(model, cache.configs, context, max_q_len=5)
        assert memory["pages"] == memory["pages_allocated"] == expected.pages
        assert memory["tail"] == expected.tail
        assert memory["tables"] == expected.constants
        assert memory["total"] == expected.request + expected.constants
        assert cache.bytes_per_token == expected.bytes_per_token
        for index, (layer, own) in enumerate(zip(cache.layers, layers, strict=True)):
            shape = AttentionLayer(layer.kv_heads, config.head_dim, layer.sliding_window)
            one = packed_memory("", [shape], [cache.configs[index]], context, max_q_len=5,
                                tail_itemsize=4)  # fmt: skip
            assert own["total"] == one.request + one.constants


@pytest.mark.parametrize("options", [
    {"center": None},
    {"sink_tokens": 0, "recent_window": 0},
    {"dtype": torch.bfloat16, "max_batch_size": 3},
])  # fmt: skip
def test_prediction_with_other_options(options):
    options = dict(options)
    model = make_model(dtype=options.pop("dtype", torch.float32))
    rows = options.get("max_batch_size", 1)
    with TurboQuantCache.for_model(model, "k5v4u", max_cache_len=100, **options) as cache:
        feed(model, cache, make_ids(100, rows))
        expected = predicted(model, cache.configs, 100, center=options.get("center", 1) is not None)
        memory = cache.memory_bytes()
        assert memory["total"] == rows * expected.request + expected.constants


# ---- centers in files


def calibrated(model, tokens=90):
    return TurboQuantCache.calibrate(model, make_ids(tokens, seed=5))


def test_centers_that_share_memory_are_saved(tmp_path):
    pytest.importorskip("safetensors")
    model, path = make_model("llama"), tmp_path / "centers.safetensors"
    shared = torch.stack(calibrated(model)).unbind()
    for centers in (shared, [shared[0]] * len(shared)):
        save_centers(path, centers, model)
        loaded = load_centers(path, model)
        assert all(torch.equal(a, b) for a, b in zip(loaded, centers, strict=True))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "llama-mqa-48"])
def test_saved_centers_come_back(tmp_path, name):
    pytest.importorskip("safetensors")
    model, path = make_model(name), tmp_path / "centers.safetensors"
    centers = calibrated(model)
    save_centers(path, centers, model)
    # another model object of the same shape, as after loading it again
    again = make_model(name)
    loaded = load_centers(path, again)
    assert all(torch.equal(a, b) for a, b in zip(loaded, centers, strict=True))
    with TurboQuantCache.for_model(again, center=path) as cache:
        feed(again, cache, make_ids(20), 10)
        assert all(torch.equal(a, b) for a, b in zip(cache.centers, centers, strict=True))
        # and what a cache has learned can be saved as well
        save_centers(path, cache.centers, again)


@pytest.mark.parametrize("match, other", [
    ("rope .*the model's is .*5000", {"rope_parameters": {"rope_type": "default",
                                                          "rope_theta": 5000.0}}),
    ("layers '3', the model's is '2'", {"num_hidden_layers": 2}),
    ("head_dim '32', the model's is '16'", {"head_dim": 16}),
    ("kv_heads '2', the model's is '4'", {"num_key_value_heads": 4}),
    ("hidden_size '64', the model's is '128'", {"hidden_size": 128}),
    ("model_type 'llama', the model's is 'qwen3'", "qwen3"),
])  # fmt: skip
def test_centers_of_another_model_are_refused(tmp_path, match, other):
    pytest.importorskip("safetensors")
    path, model = tmp_path / "centers.safetensors", make_model()
    save_centers(path, calibrated(model), model)
    if isinstance(other, dict):
        other = make_model(**other)
    else:
        config = transformers.Qwen3Config(**{**model.config.to_dict(), "model_type": other})
        other = transformers.Qwen3ForCausalLM(config)
    for use in (load_centers, lambda p, m: TurboQuantCache.for_model(m, center=p)):
        with pytest.raises(ValueError, match=match):
            use(path, other)
    assert other.config._attn_implementation == "sdpa"


def test_a_model_without_rope_says_so():
    config = transformers.GPT2Config(vocab_size=101, n_embd=64, n_layer=1, n_head=4)
    assert fingerprint(transformers.GPT2LMHeadModel(config))["rope"] == "none"
    assert "rope_theta" in fingerprint(make_model())["rope"]


def test_files_that_are_no_centers(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    path, model = tmp_path / "centers.safetensors", make_model()
    good = calibrated(model)
    save_file({"layers.0.center": good[0]}, path)  # as an older version wrote them: no fingerprint
    with pytest.raises(ValueError, match="format is None, expected 'torch_turboquant centers 1'"):
        load_centers(path, model)
    for match, centers in {
        "2 centers, expected one for each of 3": good[:2],
        r"\[3, 2, 16\], expected torch.float32 \[kv_heads, 32\] or": [*good[:2], good[2][..., :16]],
        r"\[2, 2, 32\], expected torch.float32 \[kv_heads, 32\] or": [*good[:2], good[2][:2]],
        "has scales whose inverses are others": [good[0], good[1] * 2, good[2]],
        "not finite": [good[0], good[1][0] * torch.nan, good[2]],
    }.items():
        with pytest.raises(ValueError, match=match):
            save_centers(path, centers, model)


def test_a_center_is_learned_by_default():
    """From the first prefill; biased keys lose three times as much without one."""
    model, ids = make_model("qwen2", num_hidden_layers=1), make_ids(120)
    exact = model(ids).logits[:, 100:]
    errors = {}
    for name, center in {"default": {}, "off": {"center": None},
                         "calibrated": {"center": calibrated(model)}}.items():  # fmt: skip
        with TurboQuantCache.for_model(model, config=CacheConfig(16, 4, 8), **center) as cache:
            logits = feed(model, cache, ids, 100, *[1] * 20)[:, 100:]
            assert (cache.centers is None) == (name == "off")
        errors[name] = (logits - exact).pow(2).mean().item()
    assert max(errors["default"], errors["calibrated"]) < 0.5 * errors["off"]


def test_policies_generate():
    """All options at once through generate: 8 bits everywhere write what the model does."""
    model, prompt = make_calm_model(), make_ids(75)
    expected = generate(model, prompt, new=30)
    options = {"boundary_layers": 1, "layer_presets": {1: "k8v8"}, "center": calibrated(model)}
    with TurboQuantCache.for_model(model, "k2v2", **options) as cache:
        assert torch.equal(generate(model, prompt, cache, new=30), expected)
        assert [c.key_bits for c in cache.configs] == [8, 8, 8]


def test_calibration_does_not_touch_the_model():
    model, ids = make_model(), make_ids(90)
    before = model(ids).logits
    text = SimpleNamespace(input_ids=ids)
    by_text = TurboQuantCache.calibrate(model, ["a"], lambda text_, return_tensors: text)
    for a, b in zip(by_text, TurboQuantCache.calibrate(model, ids[0]), strict=True):
        assert torch.equal(a, b)
    assert model.config._attn_implementation == "sdpa"
    assert not model.model._forward_pre_hooks
    assert torch.equal(model(ids).logits, before)
