"""Models with latent attention (MLA): exact prompts, then steps absorbed over packed latents.

Model types are tiny random models. What every layer's attention returns is compared with a float64
oracle that expands keys and values from decoded latents (latents.py), and greedy tokens with those
of the model's own cache.
"""

import copy
import io
import json
import re

import pytest
import torch
from torch._dynamo.utils import counters

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache

from tests.helpers import ROOT
from tests.transformers.families import VERSION
from tests.transformers.harness import feed, generate, make_ids, padded
from tests.transformers.latents import (
    LATENT,
    MODELS,
    ROPE,
    attending_modules,
    check_latents,
    latents_recorded,
    make_latent_model,
)
from torch_turboquant import CacheConfig, LatentConfig, scaled_center
from torch_turboquant.integrations.transformers import TurboQuantCache
from torch_turboquant.memory import LatentLayer, attention_layers, packed_memory

pytestmark = pytest.mark.skipif(
    VERSION < (5, 15), reason="caches get latents from transformers 5.15 on"
)

TAIL = {"sink_tokens": 3, "recent_window": 9}
SMALL = {"page_size": 32, "max_q_len": 7, **TAIL}
SIZES = 80, 1, 1, 1, 20, 1, 5  # a prompt, steps, a longer continuation, a draft, ...
ROOM = 256
FORMS = {"growing": {}, "static": {"static": True, "max_cache_len": ROOM}}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def own_logits(model, ids, *sizes, mask=None):
    """Of the model's own cache and attention."""
    return feed(model, DynamicCache(config=model.config), ids, *sizes, mask=mask)


# ------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("kind", MODELS)
def test_every_layer_equals_the_oracle(kind):
    model, ids = make_latent_model(kind), make_ids(111, 2)
    with latents_recorded(model, "k3", max_batch_size=2, **SMALL) as (cache, recorder):
        logits = feed(model, cache, ids, *SIZES)
        assert len(cache.packed) == len(attending_modules(model)) > 0
        check_latents(recorder, cache, prompt=80)
    assert torch.equal(logits[:, :80], own_logits(model, ids, 80)[:, :80])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_half_precision(dtype, tolerance):
    """Products of absorbed queries and results are rounded to the type of the model."""
    model, ids = make_latent_model(dtype=dtype), make_ids(111, 2)
    with latents_recorded(model, "k3", max_batch_size=2, **SMALL) as (cache, recorder):
        assert cache.config.rope_dtype == dtype
        feed(model, cache, ids, *SIZES)
        check_latents(recorder, cache, prompt=80, tolerance=tolerance, coarse=2)


@pytest.mark.parametrize("name", ["k8", "k5u", "k4", "k4u", "k3"])
def test_every_preset(name):
    model, ids = make_latent_model("youtu"), make_ids(111)
    with latents_recorded(model, name, **SMALL) as (cache, recorder):
        feed(model, cache, ids, *SIZES)
        coarse = 0 if name == "k8" else 5  # whose codes are nearly exact
        check_latents(recorder, cache, prompt=80, coarse=coarse)


@pytest.mark.parametrize("changes", [
    {"sink_tokens": 0, "recent_window": 0},
    {"recent_window": 0},
    {"sink_tokens": 0},
    {"transform": False},
    {"page_size": 64, "scale_mode": "mse"},
])  # fmt: skip
def test_other_configurations(changes):
    model, ids = make_latent_model("youtu"), make_ids(111)
    with latents_recorded(model, "k4", **{**SMALL, **changes}) as (cache, recorder):
        feed(model, cache, ids, *SIZES)
        check_latents(recorder, cache, prompt=80)


@pytest.mark.parametrize("kind", ["deepseek_v3", "kimi_linear"])
def test_channels_are_divided_by_the_weight_of_their_norm(kind):
    """So that codes do not depend on it where the columns of kv_b_proj make up for it."""
    model, ids = make_latent_model(kind), make_ids(111)
    other = copy.deepcopy(model)
    for module in attending_modules(other).values():
        factors = torch.empty(LATENT).uniform_(-4, 2).exp()
        module.kv_a_layernorm.weight.mul_(factors)
        module.kv_b_proj.weight.div_(factors)
    found = []
    for center in ("auto", "none"):
        for each in (model, other):
            with TurboQuantCache.for_model(each, "k5u", center=center, **SMALL) as cache:
                found.append(feed(each, cache, ids, *SIZES)[:, 80:])
                learned = [c is not None for c in cache.centers or [None]]
                assert any(learned) == (center == "auto")
    same, scaled, _, unscaled = found
    own = own_logits(model, ids, 111)[:, 80:]
    errors = [(x - own).abs().mean() for x in (scaled, unscaled)]
    assert 3 * errors[0] < errors[1]
    assert 10 * (same - scaled).abs().mean() < errors[0]  # a code here and there


@pytest.mark.parametrize("scaled", [False, True])
def test_given_centers(scaled):
    model, ids = make_latent_model("youtu"), make_ids(111)
    means = [torch.randn(LATENT) for _ in range(3)]
    centers = [scaled_center(x, torch.rand(LATENT) + 0.5) for x in means] if scaled else means
    with latents_recorded(model, "k3", center=centers, **SMALL) as (cache, recorder):
        feed(model, cache, ids, *SIZES)
        for layer, center in zip(cache.packed, centers, strict=True):
            assert torch.equal(layer.tables.center, center)
        check_latents(recorder, cache, prompt=80)


def test_left_padding():
    model, (ids, mask) = make_latent_model(), padded([111, 50, 101], 111)
    for form in FORMS.values():
        options = {"max_batch_size": 3, **SMALL, **form}
        with latents_recorded(model, "k3", **options) as (cache, recorder):
            feed(model, cache, ids, *SIZES, mask=mask)
            check_latents(recorder, cache, prompt=80, pads=[0, 61, 10])


@pytest.mark.parametrize("kind", MODELS)
def test_uncompressed_latents_are_the_model_in_float64(kind):
    """Absorbed without quantisation: as far from float64 as the model's own attention is."""
    model, ids = make_latent_model(kind), make_ids(111, 2)
    model.set_experts_implementation("eager")  # others have no float64
    own = own_logits(model, ids, *SIZES)
    cached = []
    for form in FORMS.values():
        with latents_recorded(model, "uncompressed", max_batch_size=2, **form) as (cache, recorder):
            cached.append(feed(model, cache, ids, *SIZES))
            check_latents(recorder, cache, prompt=80, tolerance=1e-5)
    exact = own_logits(model.double(), ids, *SIZES)
    bound = 20 * (own - exact).abs().max()
    for logits in cached:
        assert (logits - exact).abs().max() <= bound
        assert torch.equal(logits.argmax(-1), exact.argmax(-1))


def test_uncompressed_latents_of_padded_sequences():
    model, (ids, mask) = make_latent_model(), padded([111, 50, 101], 111)
    for form in FORMS.values():
        options = {"max_batch_size": 3, **form}
        with latents_recorded(model, "uncompressed", **options) as (cache, recorder):
            feed(model, cache, ids, *SIZES, mask=mask)
            check_latents(recorder, cache, prompt=80, pads=[0, 61, 10], tolerance=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", ["k4u", "uncompressed"])
def test_inference_mode_may_come_and_go(bits, form):
    model, ids = make_latent_model(), make_ids(111, 2)
    parts = ids[:, :81], ids[:, 81:]
    results = []
    for first in (torch.inference_mode, torch.no_grad):  # which makes the memory
        second = torch.no_grad if first is torch.inference_mode else torch.inference_mode
        with TurboQuantCache.for_model(model, bits, max_batch_size=2, **FORMS[form]) as cache:
            with first():
                logits = feed(model, cache, parts[0], *SIZES[:2])
            with second():
                results.append(torch.cat([logits, feed(model, cache, parts[1], *SIZES[2:])], 1))
                cache.reset()
                feed(model, cache, ids, *SIZES)
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", MODELS)
def test_greedy_tokens(kind):
    """Eight bits choose the tokens of the model's own cache, and its beams."""
    model, prompt = make_latent_model(kind, initializer_range=0.05), make_ids(80)
    expected = generate(model, prompt)
    with TurboQuantCache.for_model(model, "k8", max_batch_size=2) as cache:
        assert torch.equal(generate(model, prompt, cache), expected)
        cache.reset()
        assert torch.equal(generate(model, prompt, cache), expected)
    with TurboQuantCache.for_model(model, "k8", max_batch_size=2) as cache:
        beams = generate(model, prompt, cache, num_beams=2)
    assert torch.equal(beams, generate(model, prompt, num_beams=2))


# -------------------------------------------------------------------------------------- forms


def both(model, run, *args, tolerance=0.0, **options):
    """What `run` returns on the growing and on the static form, which has to be equal."""
    results = []
    for form in FORMS.values():
        with TurboQuantCache.for_model(model, *args, **options, **form) as cache:
            results.append(run(cache))
            assert cache.is_compileable == bool(form)
    torch.testing.assert_close(*results, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", MODELS)
def test_the_static_form_equals_the_growing_one(kind):
    model, ids = make_latent_model(kind), make_ids(111, 2)
    both(model, lambda c: feed(model, c, ids, *SIZES), "k4", max_batch_size=2, **SMALL)


@pytest.mark.parametrize("kind, preset, backend", [
    # experts of longcat_flash depend on data
    *((kind, "k4", "eager") for kind in MODELS if kind != "longcat_flash"),
    ("deepseek_v3", "k4", "aot_eager"),
    ("kimi_linear", "uncompressed", "eager"),
    ("youtu", "uncompressed", "aot_eager"),
])  # fmt: skip
def test_one_graph_while_the_context_grows(kind, preset, backend):
    layers = {} if "layer_types" in MODELS[kind] else {"num_hidden_layers": 2}
    model, ids = make_latent_model(kind, **layers), make_ids(100, 2)
    step = torch.compile(model, fullgraph=True, backend=backend)
    small = SMALL if preset == "k4" else {}
    options = {"max_batch_size": 2, **small, **FORMS["static"]}
    with TurboQuantCache.for_model(model, preset, **options) as cache:
        expected = feed(model, cache, ids, 80, *[1] * 20)
        cache.reset()
        parts = [model(ids[:, :80], past_key_values=cache).logits]
        for i in range(80, 100):
            with torch.compiler.set_stance("default" if i == 80 else "fail_on_recompile"):
                parts.append(step(ids[:, i : i + 1], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_is_compiled_already(form):
    model, ids = make_latent_model("youtu", num_hidden_layers=1), make_ids(90)
    with TurboQuantCache.for_model(model, "k4", **FORMS[form]) as cache:
        expected = generate(model, ids, cache)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    with TurboQuantCache.for_model(model, "k4", **FORMS[form]) as cache:
        assert torch.equal(generate(model, ids, cache), expected)


# ---------------------------------------------------------------------- sequences and copies


def test_crop_reorder_and_select():
    model, ids = make_latent_model(), make_ids(140, 3)

    def run(cache):
        feed(model, cache, ids[:, :90], 80, 1, 5)
        cache.crop(-4)
        feed(model, cache, ids[:, 86:100], 1, 1)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        feed(model, cache, ids[:, 100:110], 1, 1)
        cache.crop(-30)  # deeper than the ring
        cache.batch_select_indices(torch.tensor([0, 2]))
        assert cache.get_seq_length() == 80
        return feed(model, cache, ids[:2, 80:], 1, 1, 30)

    both(model, run, "k3", max_batch_size=3, **SMALL)
    both(model, run, "uncompressed", max_batch_size=3, tolerance=1e-4)  # of other sizes


def test_what_is_cropped_and_selected_is_what_was_there():
    """Against a cache that has never seen anything else. Tokens within the ring stay exact."""
    model, ids = make_latent_model(), make_ids(100, 2)
    with TurboQuantCache.for_model(model, "k3", max_batch_size=2, **SMALL) as cache:
        feed(model, cache, ids[[1, 0]], 80, 1, 1, 18)
        cache.crop(-5)
        cache.reorder_cache(torch.tensor([1, 0]))
        actual = feed(model, cache, ids[:, 95:], 1, 1, 1)
        cache.reset()
        expected = feed(model, cache, ids, 80, 1, 1, 13, 1, 1, 1)[:, 95:]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("preset", ["k3", "uncompressed"])
@pytest.mark.parametrize("form", FORMS)
def test_copies_and_files(preset, form):
    model, ids = make_latent_model("youtu"), make_ids(100)
    with TurboQuantCache.for_model(model, preset, **FORMS[form]) as cache:
        feed(model, cache, ids[:, :90], 80)
        twin, file = copy.deepcopy(cache), io.BytesIO()
        torch.save(cache, file)
        expected = feed(model, cache, ids[:, 90:], 1, 1)
        assert torch.equal(feed(model, twin, ids[:, 90:], 1, 1), expected)
        twin.detach()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded.attach(model)
    assert torch.equal(feed(model, loaded, ids[:, 90:], 1, 1), expected)
    loaded.detach()
    with pytest.raises(ValueError, match=r"made for another model: rope_dim .32."):
        loaded.attach(make_latent_model("youtu", qk_rope_head_dim=64))


# ----------------------------------------------------------------------------------- the hook


def test_the_model_is_as_it_was():
    model, ids = make_latent_model(), make_ids(90)
    modules, plain = attending_modules(model), own_logits(model, ids, 80, 1)
    first = TurboQuantCache.for_model(model, "k4")
    second = TurboQuantCache.for_model(model, "k4")
    assert all("expand_kv" in vars(m) for m in modules.values())
    assert torch.equal(own_logits(model, ids, 80, 1), plain)
    feed(model, first, ids, 80, 1)
    copied = copy.deepcopy(model)
    first.detach()
    feed(model, second, ids, 80, 1)
    del second
    assert not any("expand_kv" in vars(m) for m in modules.values())
    for each in (model, copied):
        assert torch.equal(own_logits(each, ids, 80, 1), plain)
    assert model.config._attn_implementation == "sdpa"


def test_an_expansion_that_somebody_has_replaced():
    """What stood in the place of the method before a cache came stands there afterwards."""
    model, ids = make_latent_model("youtu"), make_ids(90)
    module, calls = attending_modules(model)[1], []
    own = module.expand_kv

    def noted(latent, rope):
        calls.append(latent.shape[2])
        return own(latent, rope)

    module.expand_kv = noted
    with TurboQuantCache.for_model(model, "k4") as cache:
        feed(model, cache, ids, 80, 1)
    assert calls == [80] and module.expand_kv is noted


def test_a_step_that_fails_leaves_the_cache_as_it_was():
    model, ids = make_latent_model("youtu"), make_ids(100)

    def fail(*args):
        raise KeyboardInterrupt

    with TurboQuantCache.for_model(model, "k3", **SMALL) as cache:
        expected = feed(model, cache, ids, 80, *[1] * 20)
        cache.reset()
        for tokens, before in ((90, 0), (1, 90)):
            hook = model.model.layers[1].register_forward_pre_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                model(make_ids(tokens, seed=8), past_key_values=cache)
            hook.remove()
            if not before:
                feed(model, cache, ids[:, :90], 80, *[1] * 10)
        actual = feed(model, cache, ids[:, 90:], *[1] * 10)
    assert torch.equal(actual, expected[:, 90:])


class Halves(torch.nn.Linear):
    """Multiplies with another matrix than its weight, as quantised linear layers do."""

    def forward(self, x):
        return torch.nn.functional.linear(x, (self.weight * 2).round() / 2)


@pytest.mark.parametrize("form", FORMS)
def test_projections_that_are_no_plain_linear_layers(form):
    model, ids = make_latent_model("youtu", initializer_range=1.0), make_ids(100)
    rounded = copy.deepcopy(model)
    for module in attending_modules(model).values():
        module.kv_b_proj.__class__ = Halves
    for module in attending_modules(rounded).values():
        module.kv_b_proj.weight.copy_((module.kv_b_proj.weight * 2).round() / 2)
    found = []
    for each in (model, rounded):
        with TurboQuantCache.for_model(each, "k4", **FORMS[form]) as cache:
            found.append(feed(each, cache, ids, 80, *[1] * 20))
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)
    assert (found[1] - own_logits(rounded, ids, 100)).abs().max() > 1e-2


@pytest.mark.parametrize("form", FORMS)
def test_projections_with_a_bias(form):
    """As those of an adapter may have one (lora_bias of peft)."""
    model, ids = make_latent_model("youtu"), make_ids(100)
    for module in attending_modules(model).values():
        plain = module.kv_b_proj
        module.kv_b_proj = torch.nn.Linear(plain.in_features, plain.out_features)
        module.kv_b_proj.weight.copy_(plain.weight)
        module.kv_b_proj.bias.normal_()
    with TurboQuantCache.for_model(model, "uncompressed", **FORMS[form]) as cache:
        logits = feed(model, cache, ids, 80, *[1] * 15)
    own = own_logits(model, ids, 100)
    assert (logits - own).abs().max() < 1e-4 * own.abs().max()


class Packed(torch.Tensor):
    """A weight that can be multiplied with and has no other shape, as those of torchao."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.unflatten:
            raise NotImplementedError(function)
        if function is torch.nn.functional.linear:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)


def test_weights_of_another_class_of_tensors():
    model, ids = make_latent_model("youtu"), make_ids(90)
    own = own_logits(model, ids, 90)
    for module in attending_modules(model).values():
        packed = module.kv_b_proj.weight.detach().as_subclass(Packed)
        module.kv_b_proj.weight = torch.nn.Parameter(packed, requires_grad=False)
        assert type(module.kv_b_proj) is torch.nn.Linear
    with TurboQuantCache.for_model(model, "uncompressed") as cache:
        logits = feed(model, cache, ids, 80, *[1] * 10)
    assert type(logits) is torch.Tensor
    assert (logits - own).abs().max() < 1e-4 * own.abs().max()


def test_a_cache_that_goes_to_a_model_with_another_projection():
    model, ids = make_latent_model("youtu"), make_ids(90)
    for module in attending_modules(model).values():
        module.kv_b_proj.__class__ = Halves
    other = copy.deepcopy(model)
    for module in attending_modules(other).values():
        module.kv_b_proj.weight.mul_(-2)
    cache, own = TurboQuantCache.for_model(model, "uncompressed"), DynamicCache(config=model.config)
    for each in (cache, own):
        feed(model, each, ids[:, :85], 80, *[1] * 5)
    cache.attach(other)
    actual, expected = (feed(other, each, ids[:, 85:], *[1] * 5) for each in (cache, own))
    cache.detach()
    assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()


def test_weights_that_are_offloaded():
    """The norm's weight, which channels are divided by, is on the meta device between its calls."""
    accelerate = pytest.importorskip("accelerate")
    model, ids = make_latent_model("youtu"), make_ids(90)
    found = []
    for offloaded in (False, True):
        if offloaded:
            accelerate.cpu_offload(model, torch.device("cpu"))
        assert attending_modules(model)[0].kv_a_layernorm.weight.is_meta == offloaded
        with TurboQuantCache.for_model(model, "k5u") as cache:
            logits = feed(model, cache, ids, 80, *[1] * 10)
            found.append((logits, torch.stack(cache.centers)))
    (plain, centers), (offloaded, read) = found
    torch.testing.assert_close(read, centers, rtol=1e-5, atol=0)
    assert (offloaded - plain).abs().mean() < 1e-4  # a code here and there


def test_autocast():
    model, ids = make_latent_model("youtu"), make_ids(100)
    with torch.autocast("cpu", torch.bfloat16):
        own = own_logits(model, ids, 80, *[1] * 20)
        for preset in ("k8", "uncompressed"):
            with TurboQuantCache.for_model(model, preset) as cache:
                logits = feed(model, cache, ids, 80, *[1] * 20)
            assert torch.equal(logits[:, :80], own[:, :80])
            assert (logits - own).abs().mean() < 0.02 * own.abs().mean()


# ----------------------------------------------------------------------------- sizes, refusals


@pytest.mark.parametrize("preset, bits", [
    ("k8", 8), ("k5u", 5), ("k4", 4), ("k3", 3),
    ("k5v4u", 5), ("k4v2", 4), ("near-lossless", 5), ("balanced", 4), ("smallest", 3),
    ("int8", 8),
])  # fmt: skip
def test_bytes_per_token(preset, bits):
    """Codes, one scale and the rotary channels; of presets for keys and values, the keys' bits."""
    model = make_latent_model("youtu")
    with TurboQuantCache.for_model(model, preset, max_cache_len=64) as cache:
        assert cache.config.bits == bits
        assert cache.bytes_per_token == 3 * (LATENT * bits // 8 + 2 + 2 * ROPE)


@pytest.mark.parametrize("kind", MODELS)
def test_the_planner_knows_every_model(kind):
    """From the object and from the file that its class writes; bytes are those of the cache."""
    model = make_latent_model(kind)
    layers = attention_layers(model.config)
    assert layers == attention_layers(json.loads(model.config.to_json_string()))
    assert {x for x in layers if x} == {LatentLayer(LATENT, ROPE)}
    options = {"max_cache_len": 150, "max_q_len": 5}
    with TurboQuantCache.for_model(model, "k4", **options) as cache:
        assert [layer is not None for layer in layers] == [w is not None for w in cache.windows]
        feed(model, cache, make_ids(150), 90, 50, 10)
        memory = cache.memory_bytes()
        planned = packed_memory("", layers, cache.configs, 150, max_q_len=5, tail_itemsize=4)
    assert memory["pages"] == memory["pages_allocated"] == planned.pages
    assert (memory["tail"], memory["tables"]) == (planned.tail, planned.constants)
    assert memory["total"] == planned.request + planned.constants
    assert cache.bytes_per_token == planned.bytes_per_token


def test_the_documented_types():
    text = (ROOT / "docs/latent.md").read_text()
    section = re.search(r"^## Model types\n.*?\n\n(.*?)\n\n", text, re.DOTALL | re.MULTILINE)[1]
    assert re.findall(r"`(\w+)`", section) == [*MODELS]


def test_uncompressed_bytes_per_token():
    model = make_latent_model("youtu", torch.bfloat16)
    with TurboQuantCache.for_model(model, "uncompressed", max_cache_len=64) as cache:
        assert cache.bytes_per_token == 3 * (LATENT + ROPE) * 2
        assert cache.memory_bytes()["tail"] == cache.memory_bytes()["tables"] == 0


@pytest.mark.parametrize("options, error, match", [
    ({"preset": "k2v2"}, ValueError, "bits"),
    ({"preset": "k6"}, ValueError, "unknown preset for latents 'k6'"),
    ({"value_bits": 4}, TypeError, "no option 'value_bits'"),
    ({"preset": "uncompressed", "recent_window": 9}, TypeError, "no option 'recent_window'"),
    ({"page_size": 16}, ValueError, "page_size"),
    ({"center": [torch.zeros(1, LATENT)] * 3}, ValueError, "expected .128. or .3, 128."),
    ({"center": [torch.zeros(LATENT)] * 2}, ValueError, "one tensor for each of 3 layers"),
    ({"center": "mean"}, ValueError, "'auto' .*, 'none' .off., or a tensor per layer"),
    ({"preset": "uncompressed", "center": [torch.zeros(LATENT)] * 3}, ValueError, "have no center"),
    ({"config": CacheConfig(128, 4, 4)}, ValueError, "needs a LatentConfig, not a CacheConfig"),
    ({"boundary_layers": 1}, ValueError, "leave layer_presets and boundary_layers out"),
    ({"layer_presets": {0: "k8"}}, ValueError, "leave layer_presets and boundary_layers out"),
    ({"config": LatentConfig(256, 32, 4)}, ValueError, "latent rows of 256 .* the model has 128"),
    ({"config": LatentConfig(128, 32, 4), "bits": 3}, ValueError, "into the LatentConfig"),
])  # fmt: skip
def test_options_that_are_refused(options, error, match):
    model = make_latent_model("youtu")
    with pytest.raises(error, match=match):
        TurboQuantCache.for_model(model, **options)
    assert not any("expand_kv" in vars(m) for m in attending_modules(model).values())


# --------------------------------------------------------------------------------------- CUDA


@pytest.mark.cuda
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("form", FORMS)
def test_every_layer_equals_the_oracle_on_a_gpu(kind, form):
    """Records go to the CPU, where the oracle encodes and decodes: the codes are the same."""
    model, ids = make_latent_model(kind).cuda(), make_ids(111, 2).cuda()
    options = {"max_batch_size": 2, **SMALL, **FORMS[form]}
    with latents_recorded(model, "k3", **options) as (cache, recorder):
        feed(model, cache, ids, *SIZES)
        recorder.to_cpu()
        check_latents(recorder, cache, prompt=80)


@pytest.mark.cuda
@pytest.mark.parametrize("preset", ["k5u", "uncompressed"])
@pytest.mark.parametrize("kind", ["deepseek_v3", "youtu"])
def test_cuda_graphs(kind, preset):
    """Captured once and replayed while the context grows: as the same compiled code without."""
    model, ids = make_latent_model(kind).cuda(), make_ids(140, 2).cuda()
    # transformers' other ways to compute experts in float32 read numbers of tokens on the host
    model.set_experts_implementation("batched_mm")
    options = {"max_batch_size": 2, "static": True, "max_cache_len": ROOM}
    plain = torch.compile(model, fullgraph=True)
    graph = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    skipped = counters["inductor"]["cudagraph_skips"]
    found = []
    with TurboQuantCache.for_model(model, preset, **options) as cache:
        for step in (plain, graph):
            cache.reset()
            parts = [model(ids[:, :80], past_key_values=cache).logits]
            for i in range(80, 140):
                # a copy: the next replay of a CUDA graph writes to the same place
                parts.append(step(ids[:, i : i + 1], past_key_values=cache).logits.clone())
            found.append(torch.cat(parts, 1))
    assert torch.equal(*found)
    assert counters["inductor"]["cudagraph_skips"] == skipped


@pytest.mark.cuda
def test_half_precision_on_a_gpu():
    for dtype, tolerance in ((torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
        model, ids = make_latent_model(dtype=dtype).cuda(), make_ids(111, 2).cuda()
        with latents_recorded(model, "k3", max_batch_size=2, **SMALL) as (cache, recorder):
            feed(model, cache, ids, *SIZES)
            recorder.to_cpu()
            check_latents(recorder, cache, prompt=80, tolerance=tolerance, coarse=2)
