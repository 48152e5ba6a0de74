"""Centers of keys: learned in a first forward, calibrated, saved and loaded."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache

from tests.transformers.harness import (
    VOCAB,
    assert_close,
    calibrated,
    check_against_oracle,
    feed,
    learned_center,
    make_config,
    make_ids,
    make_model,
    recorded,
)
from tests.transformers.latents import make_latent_model
from torch_turboquant import CacheConfig, make_tables, preset
from torch_turboquant.integrations.transformers import (
    CENTER_TOKENS,
    TurboQuantCache,
    lifecycle,
    load_centers,
    save_centers,
)
from torch_turboquant.integrations.transformers.centers import fingerprint
from torch_turboquant.integrations.transformers.constants import ConstantsByDevice
from torch_turboquant.integrations.transformers.models import recording, rotary_partners
from torch_turboquant.integrations.transformers.tensors import put_together

CPU = torch.device("cpu")

# ------------------------------------------------------------------------------------- center


def test_short_prompts_wait_for_a_center():
    """Exact until CENTER_TOKENS tokens after the sinks are there, then encoded all at once."""
    model, ids = make_model(), make_ids(120)
    config = make_config(model, "k3v2")
    ready = CENTER_TOKENS + config.sink_tokens
    with recorded(model, config) as (cache, recorder):
        feed(model, cache, ids[:, : ready - 1], 20, *[1] * (ready - 21))
        assert cache.centers is None
        held = cache.memory_bytes()
        assert held["pages"] == 0 and held["waiting"] > 0
        feed(model, cache, ids[:, ready - 1 :], *[1] * (121 - ready))
        assert len(cache.centers) == 3
        held = cache.memory_bytes()
        assert held["pages"] > 0 and held["waiting"] == 0
        check_against_oracle(recorder, config, ready, center="auto")


def test_a_waiting_cache_can_be_cropped_and_reordered():
    model, ids = make_model(), make_ids(100, 2)
    with TurboQuantCache.for_model(model, "k8v8", max_batch_size=2) as cache:
        feed(model, cache, ids[:, :30], 25)
        cache.crop(-10)
        cache.reorder_cache(torch.tensor([1, 1]))
        swapped = ids[[1, 1]]
        actual = feed(model, cache, swapped[:, 20:], *[1] * 80)
    # what 8 bits change in this model; other rows or another order change everything
    assert_close(actual, model(swapped).logits[:, 20:], 3e-2)


def test_calibrated_center(tmp_path):
    model, ids = make_model("qwen2"), make_ids(120)
    text = make_ids(200, 2, seed=7)
    centers = TurboQuantCache.calibrate(model, text, chunk=33)
    reference = DynamicCache()
    model(text, past_key_values=reference)
    queries = {}
    with recording(model, lambda module, query, *others: queries.update({module.layer_idx: query})):
        model(text, use_cache=False)
    means = TurboQuantCache.calibrate(model, text, chunk=33, scaled=False)
    parts = zip(reference.layers, queries.values(), centers, means, strict=True)
    for layer, query, center, mean in parts:
        learned = learned_center(layer.keys, query, torch.zeros(2), 4, rotary_partners(model))
        torch.testing.assert_close(center, learned, rtol=1e-3, atol=1e-4)
        assert torch.equal(mean, center[0])
    config = make_config(model)
    with recorded(model, config, center=centers) as (cache, recorder):
        actual = feed(model, cache, ids, 10, 1, 1)  # no need to wait for tokens
        assert torch.equal(cache.centers[1], centers[1])
        check_against_oracle(recorder, config, 10, center=centers)

    pytest.importorskip("safetensors")
    save_centers(tmp_path / "c.safetensors", centers, model)
    loaded = load_centers(tmp_path / "c.safetensors", model)
    assert all(torch.equal(a, b) for a, b in zip(loaded, centers, strict=True))
    path = tmp_path / "c.safetensors"
    with TurboQuantCache.for_model(model, config=config, center=path) as cache:
        assert_close(feed(model, cache, ids, 10, 1, 1), actual, 1e-6)


def test_constants_reach_another_device():
    center = torch.randn(2, 32)
    configs = {0: preset("k4v4", 32), 2: preset("k5v4u", 32)}
    constants = ConstantsByDevice(configs, {0: center}, torch.arange(32).flip(0))
    expected = {0: make_tables(configs[0], 0, center=center), 2: make_tables(configs[2], 2)}
    places, contents = [], set()
    for name in ("cpu", "cpu:0"):  # the same memory under two names
        placed = constants.on(torch.device(name))
        assert torch.equal(placed.partners, torch.arange(32).flip(0))
        for layer, table in expected.items():
            for there, here in zip(placed.tables[layer], table, strict=True):
                assert (there is None) == (here is None)
                if here is not None:
                    assert torch.equal(there, here) and there.dtype == here.dtype
                    assert there.data_ptr() % 64 == 0
                    assert there.data_ptr() != center.data_ptr()
                    places.append(there.data_ptr())
                    contents.add(here.numpy().tobytes())
        assert constants.on(torch.device(name)) is placed
    assert len(set(places)) == 2 * len(contents)  # what is equal is there once
    # another cache of such layers has the same tables, but centers of its own
    other = ConstantsByDevice(configs, {}, torch.arange(32)).on(torch.device("cpu")).tables
    assert other[0].key_signs is constants.on(torch.device("cpu")).tables[0].key_signs
    assert other[0].center is None


def test_constants_with_the_same_numbers_are_one_tensor():
    """Before every step of a compiled model torch looks at each tensor that it holds."""
    configs = {layer: preset("k4v4", 64) for layer in range(3)}
    center = torch.randn(2, 64)
    given = {0: center, 1: center.clone(), 2: torch.randn(2, 64)}
    first, *others = ConstantsByDevice(configs, given, torch.arange(32)).on(CPU).tables.values()
    for table in (first, *others):
        assert table.key_steps is table.value_steps is first.key_steps
        assert table.key_levels is table.value_levels is first.key_levels
    assert others[0].center is first.center and others[1].center is not first.center
    assert others[0].key_signs is not first.key_signs
    # equal bytes of another shape or type are not
    zeros = [np.zeros(shape, np.float32) for shape in ((2, 3), (6,), (2, 3))]
    zeros.append(np.zeros((2, 3), np.int32))
    a, b, again, integers = put_together(zeros, CPU)
    assert again is a and b is not a and integers is not a
    assert (b.shape, integers.dtype) == ((6,), torch.int32)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("center", ["auto", "mean"])
def test_layers_learn_together_what_they_would_alone(monkeypatch, family, center):
    """A first forward learns centers of several layers at once, as far as it has few tokens."""
    model, ids = make_model(family), make_ids(80, 2)
    sizes = []
    learn = lifecycle.learn

    def noted(keys, *others, **more):
        sizes.append(len(keys))
        return learn(keys, *others, **more)

    monkeypatch.setattr(lifecycle, "learn", noted)
    found = []
    layers = model.config.num_hidden_layers
    for together, expected in ((8192, [layers]), (1, [1] * layers), (2 * 2 * 70, [2, 1])):
        monkeypatch.setattr(lifecycle, "_TOGETHER", together)
        sizes.clear()
        with TurboQuantCache.for_model(model, "k8v8", max_batch_size=2, center=center) as cache:
            logits = feed(model, cache, ids, 70, 1)
            found.append((cache.centers, logits))
            assert all(one.pages.any() and one.waiting is None for one in cache.packed)
        assert sizes == expected
    for centers, logits in found[1:]:
        for one, other in zip(centers, found[0][0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert_close(logits, found[0][1], 1e-2)


def test_learning_that_fails_leaves_nothing(monkeypatch):
    model, ids = make_model(), make_ids(90)
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        with monkeypatch.context() as patch:
            patch.setattr(lifecycle, "learn", lambda *args, **more: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                feed(model, cache, ids[:, :80])
        assert cache.sequences.forward is None and cache.get_seq_length() == 0
        actual = feed(model, cache, ids, 80, 1)
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        assert_close(actual, feed(model, cache, ids, 80, 1), 1e-6)


def test_calibrate_takes_text():
    class Tokenizer:
        def __call__(self, text, return_tensors):
            return SimpleNamespace(input_ids=torch.tensor([[ord(c) % VOCAB for c in text]]))

    model, text = make_model(), "the quick brown fox jumps over the lazy dog " * 3
    ids = Tokenizer()(text, "pt").input_ids
    a = TurboQuantCache.calibrate(model, text, Tokenizer())
    b = TurboQuantCache.calibrate(model, ids)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    with pytest.raises(ValueError, match="tokenizer"):
        TurboQuantCache.calibrate(model, text)
    with pytest.raises(ValueError, match="at least 64"):
        TurboQuantCache.calibrate(model, ids[:, :60])


def test_reset_forgets_a_learned_center():
    model, ids, others = make_model(), make_ids(90), make_ids(90, seed=9)
    with TurboQuantCache.for_model(model, "k3v2") as cache:
        first = feed(model, cache, ids, 80, 1)
        before = cache.centers[0]
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.memory_bytes()["pages"] == 0
        feed(model, cache, others, 80, 1)
        assert not torch.equal(cache.centers[0], before)
        cache.reset()
        assert_close(feed(model, cache, ids, 80, 1), first, 1e-6)


def test_centers_are_the_caches_own():
    """What a caller does to the tensors afterwards changes neither codes nor files."""
    model, ids = make_model(), make_ids(60)
    given = calibrated(model)
    with TurboQuantCache.for_model(model, "k4v4", center=given) as cache:
        kept = [center.clone() for center in given]
        for center in given:
            center.add_(5)
        feed(model, cache, ids, 50)
        for mine, theirs, center in zip(cache.centers, kept, cache.center, strict=True):
            assert torch.equal(mine, theirs) and torch.equal(center, theirs)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_centers_that_are_not_finite(number):
    model = make_model()
    center = [torch.full((2, 32), number)] * 3
    with pytest.raises(ValueError, match="center holds NaN or infinity"):
        TurboQuantCache.for_model(model, center=center)


def test_calibration_of_what_has_no_centers():
    with pytest.raises(ValueError, match="YoutuForCausalLM has latent attention, and centers are"):
        TurboQuantCache.calibrate(make_latent_model("youtu"), make_ids(90))
    model = make_model()
    for options in ({"skip": -1}, {"chunk": 0}):
        with pytest.raises(ValueError, match="supported"):
            TurboQuantCache.calibrate(model, make_ids(90), **options)


def test_calibration_reads_without_dropout():
    model, ids = make_model(attention_dropout=0.5), make_ids(90)
    expected = TurboQuantCache.calibrate(model, ids)
    model.train()
    model.model.layers[1].eval()
    for found, center in zip(TurboQuantCache.calibrate(model, ids), expected, strict=True):
        assert torch.equal(found, center)
    modes = [layer.training for layer in model.model.layers]
    assert modes == [True, False, True] and model.training


def test_calibration_does_not_touch_the_model():
    model, ids = make_model(), make_ids(90)
    before = model(ids).logits
    text = SimpleNamespace(input_ids=ids)
    by_text = TurboQuantCache.calibrate(model, ["a"], lambda text_, return_tensors: text)
    for a, b in zip(by_text, TurboQuantCache.calibrate(model, ids[0]), strict=True):
        assert torch.equal(a, b)
    assert model.config._attn_implementation == "sdpa"
    assert "forward" not in vars(model.model)
    assert torch.equal(model(ids).logits, before)


def test_calibration_of_an_offloaded_model():
    """Its weights are on the meta device between calls, and so is model.device."""
    accelerate = pytest.importorskip("accelerate")
    model, ids = make_model(), make_ids(90)
    expected = TurboQuantCache.calibrate(model, ids)
    accelerate.cpu_offload(model, CPU)
    assert model.device.type == "meta"
    for found, center in zip(TurboQuantCache.calibrate(model, ids), expected, strict=True):
        assert torch.equal(found, center)


def test_calibration_of_a_model_without_weights():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(make_model().config)
    with pytest.raises(ValueError, match="the forward runs on the meta device"):
        TurboQuantCache.calibrate(model, make_ids(90))


# ---- centers in files


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
    with pytest.raises(ValueError, match="format is '', expected 'torch_turboquant centers 1'"):
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


def test_a_center_for_other_layers():
    """One tensor for all layers is not taken for 512 layers, whose numbers fill the screen."""
    model = make_model()
    for center, got in ((torch.zeros(512), r"shape \[512\]"), ({0: torch.zeros(2, 32)}, r"\[0\]")):
        with pytest.raises(ValueError, match=f"each of 3 layers, got {got}$"):
            TurboQuantCache.for_model(model, center=center)


@pytest.mark.parametrize(
    ("center", "error", "text"),
    [
        (np.zeros((3, 2, 32), np.float32), ValueError, "center is of type ndarray, supported: "),
        ([np.zeros((2, 32), np.float32)] * 3, TypeError, "layer 0 must be a tensor, got ndarray"),
        ([torch.zeros(2, 32), 1, 2], TypeError, "center of layer 1 must be a tensor, got int"),
    ],
)
def test_centers_that_are_no_tensors(center, error, text):
    with pytest.raises(error, match=text):
        TurboQuantCache.for_model(make_model(), center=center)


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


def test_names_of_centers():
    model = make_model()
    with TurboQuantCache.for_model(model, center="none") as cache:
        assert cache.center is None and cache.sequences.learned_center is None
    for wrong in ("non", "AUTO", "/nowhere/centers.safetensors"):
        match = f"center is '{wrong}', supported: 'auto', 'mean', 'none' "
        with pytest.raises(ValueError, match=match):
            TurboQuantCache.for_model(model, center=wrong)
    assert model.config._attn_implementation == "sdpa"
