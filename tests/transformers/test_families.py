"""Which model families of transformers the cache serves, and which it refuses.

Every family is a tiny random model. Greedy generation through the cache is compared with a
reference that knows nothing of caches: one forward over the generated text with an attention
function that quantises the keys and values it is given and attends in float64, under the mask that
the model itself has made. Families that a version of transformers does not have are skipped.
"""

import copy
import re

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
)
from transformers.masking_utils import eager_mask

from tests.helpers import ROOT
from tests.transformers.families import (
    FAMILIES,
    HYBRIDS,
    MAMBA,
    REFUSED,
    REFUSED_WHILE_RUNNING,
    SUPPORTED,
    make_family,
    make_family_config,
)
from tests.transformers.harness import DRAFTS, feed, generate, make_ids, quantised
from torch_turboquant import make_tables
from torch_turboquant.integrations.transformers import (
    TurboQuantCache,
    TurboQuantLayer,
    load_centers,
    save_centers,
)
from torch_turboquant.integrations.transformers.models import layer_windows, rotary_partners


def reference_logits(model, tokens, prompt, config, centers):
    """Logits of all tokens where those after the prompt attend to quantised keys and values."""

    def attention(module, query, key, value, attention_mask=None, scaling=None, **kwargs):
        n, group = query.shape[2], query.shape[1] // key.shape[1]
        layer = module.layer_idx
        tables = make_tables(config, layer, center=centers[layer])
        rough = quantised(key, value, config, tables)
        i, j = torch.arange(n)[:, None], torch.arange(n)[None]
        exact = (j < config.sink_tokens) | (i - j < config.recent_window) | (i < prompt)
        k, v, rough_k, rough_v = (
            x.double().repeat_interleave(group, 1) for x in (key, value, *rough)
        )
        q = query.double() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = torch.where(exact, q @ k.mT, q @ rough_k.mT)
        if kwargs.get("softcap"):
            scores = kwargs["softcap"] * torch.tanh(scores / kwargs["softcap"])
        scores = scores.masked_fill(attention_mask != 0, -torch.inf)
        total = scores.logsumexp(-1, keepdim=True)
        if kwargs.get("s_aux") is not None:
            total = torch.logaddexp(total, kwargs["s_aux"].double()[None, :, None, None])
        p = (scores - total).exp()
        out = (p * exact) @ v + (p * ~exact) @ rough_v
        return out.transpose(1, 2).to(query.dtype).contiguous(), None

    name = "reference_of_test_families"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, eager_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    logits = model(tokens, use_cache=False).logits
    model.set_attn_implementation(before)
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_equals_the_reference(family):
    model, prompt = make_family(family, FAMILIES[family]), make_ids(80)
    options = {"page_size": 16, "sink_tokens": 3, "recent_window": 9, "max_q_len": 7}
    with TurboQuantCache.for_model(model, "k3v2", **options) as cache:
        tokens = generate(model, prompt, cache, new=12)
        config, centers = cache.config, cache.centers
        cache.reset()
        logits = feed(model, cache, tokens[:, :-1], 80, *[1] * 11)[:, 79:]
        assert torch.equal(logits.argmax(-1), tokens[:, 80:])
    expected = reference_logits(model, tokens[:, :-1], 80, config, centers)[:, 79:]
    plain = model(tokens[:, :-1], use_cache=False).logits[:, 79:]
    error = (logits - expected).abs()
    effect = (plain - expected).abs()[:, 1:].mean()  # the prompt's last token attends exactly
    assert error.mean() < 0.1 * effect, (error.mean(), effect)
    # the same tokens, wherever the choice does not hang on the last bits
    best = expected.topk(2).values
    clear = (best[..., 0] - best[..., 1]) > 2 * error.amax(-1)
    assert clear.sum() >= 9
    assert torch.equal(expected.argmax(-1)[clear], tokens[:, 80:][clear])


def test_the_documented_families():
    text = (ROOT / "docs/transformers.md").read_text()
    refused = {*REFUSED, *REFUSED_WHILE_RUNNING} - set(SUPPORTED)
    for heading, families in (("Families", SUPPORTED), ("Refused", refused)):
        section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)[1]
        assert set(re.findall(r"`([\w-]+)`", section)) == set(families), heading


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_are_refused(family):
    options, match = REFUSED[family]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_family_config(family, options))
    with pytest.raises(ValueError, match=f"does not support {type(model).__name__}.*({match})"):
        TurboQuantCache.for_model(model)


@pytest.mark.parametrize("family", REFUSED_WHILE_RUNNING)
def test_families_that_are_refused_while_running(family):
    options, match = REFUSED_WHILE_RUNNING[family]
    model = make_family(family, options)
    with pytest.raises((ValueError, RuntimeError), match=match):
        with TurboQuantCache.for_model(model, page_size=16) as cache:
            feed(model, cache, make_ids(80), 75, 1, 1)


@pytest.mark.parametrize("static", [False, True])
def test_masks_of_a_model_of_its_own_leave_the_cache_as_it_was(static):
    model, ids = make_family("doge", REFUSED_WHILE_RUNNING["doge"][0]), make_ids(80)
    with TurboQuantCache.for_model(model, static=static, max_cache_len=100) as cache:
        prompt = feed(model, cache, ids[:, :75])
        if not static:  # with transformers 5.5 prompts on its own static cache are wrong, too
            want = feed(model, DynamicCache(config=model.config), ids[:, :75])
            assert torch.equal(prompt, want)
        for new in (1, 5):
            with pytest.raises(ValueError, match=r"attends under a mask .* Use DynamicCache"):
                model(ids[:, 75 : 75 + new], past_key_values=cache)
        assert cache.get_seq_length() == 75


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrid_models(family):
    """Only layers with keys and values are ours; what their other states cannot do is refused."""
    model, ids = make_family(family, SUPPORTED[family]), make_ids(90, 2)
    attends = [window is not None for window in layer_windows(model)]
    centers = TurboQuantCache.calibrate(model, make_ids(90, seed=5))
    assert [center is not None for center in centers] == attends and True in attends
    with TurboQuantCache.for_model(model, "k3v2", center=centers, max_batch_size=2) as cache:
        packed = [isinstance(layer, TurboQuantLayer) for layer in cache.layers]
        assert packed == attends
        first = feed(model, cache, ids, 80, *[1] * 10)
        learned = cache.centers
        assert [center is not None for center in learned] == attends
        with pytest.raises(RuntimeError, match="cannot take tokens back"):
            cache.crop(-1)
        cache.reset()
        assert torch.equal(feed(model, cache, ids, 80, *[1] * 10), first)
        cache.reset()
        feed(model, cache, ids, 80, *[1] * 10)
        cache.reorder_cache(torch.tensor([1, 1]))
        swapped = feed(model, cache, ids[[0, 0], :1])
        torch.testing.assert_close(swapped[0], swapped[1])
        hook = model.model.layers[2].register_forward_pre_hook(lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, :1], past_key_values=cache)
        hook.remove()
        with pytest.raises(RuntimeError, match="reset"):
            model(ids[:, :1], past_key_values=cache)
        cache.reset()
        feed(model, cache, ids, 80)


@pytest.mark.skipif(
    not hasattr(DynamicCache, "is_croppable"), reason="this version drafts without asking the cache"
)
def test_drafts_for_a_hybrid_model_leave_no_trace():
    """transformers refuses them, as `crop` does, and the states go on as before."""
    model, ids = make_family("lfm2", SUPPORTED["lfm2"]), make_ids(12).repeat(1, 12)
    with TurboQuantCache.for_model(model, static=True, max_cache_len=256) as cache:
        expected = generate(model, ids, cache)
        sizes = [layer.conv_states[0].shape for layer in cache.states]
        cache.reset()
        with pytest.raises(ValueError, match=r"can be cropped|stateful"):
            generate(model, ids, cache, **DRAFTS)
        cache.reset()
        assert torch.equal(generate(model, ids, cache), expected)
        assert [layer.conv_states[0].shape for layer in cache.states] == sizes
        assert cache.is_compileable


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", HYBRIDS)
def test_batches_of_another_size_after_a_reset(family, static):
    """States are of the batch; who is reset may read the next prompt with another one."""
    model, ids = make_family(family, SUPPORTED[family]), make_ids(85, 4)
    options = {"max_batch_size": 4, "max_cache_len": 100, "static": static}
    fresh = {}
    for batch in (1, 2, 4):
        with TurboQuantCache.for_model(model, "k4v4", **options) as cache:
            fresh[batch] = feed(model, cache, ids[:batch], 80, *[1] * 5)
    with TurboQuantCache.for_model(model, "k4v4", **options) as cache:
        for batch in (4, 1, 2, 2, 4):
            assert torch.equal(feed(model, cache, ids[:batch], 80, *[1] * 5), fresh[batch])
            cache.reset()
        feed(model, cache, ids[:2], 80)
        cache.reorder_cache(torch.tensor([1]))
        cache.reset()
        assert torch.equal(feed(model, cache, ids[:2], 80, *[1] * 5), fresh[2])
        twin = copy.deepcopy(cache)
        for one in (twin, cache):
            one.reset()
            assert torch.equal(feed(model, one, ids[:1], 80, *[1] * 5), fresh[1])


@pytest.mark.parametrize("family", HYBRIDS)
def test_centers_of_hybrid_models_in_files(family, tmp_path):
    pytest.importorskip("safetensors")
    model, path = make_family(family, SUPPORTED[family]), tmp_path / "centers.safetensors"
    centers = TurboQuantCache.calibrate(model, make_ids(90, seed=5))
    save_centers(path, centers, model)
    for saved, loaded in zip(centers, load_centers(path, model), strict=True):
        assert saved is loaded is None or torch.equal(saved, loaded)
    with TurboQuantCache.for_model(model, center=path, page_size=16) as cache:
        feed(model, cache, make_ids(20), 10)


def test_bamba_decodes_as_with_its_own_cache():
    """transformers' cached forwards of it differ from its uncached one: no reference but them."""
    model = make_family("bamba", {**MAMBA, "attn_layer_indices": [1]})
    ids, logits = make_ids(100), []
    with TurboQuantCache.for_model(model, "k8v8") as cache:
        for each in (cache, DynamicCache(config=model.config)):
            logits.append(feed(model, each, ids, 80, *[1] * 20))
    torch.testing.assert_close(*logits, rtol=0, atol=2e-3)


@pytest.mark.parametrize("family, partners", [
    ("llama", [*range(16, 32), *range(16)]),
    ("cohere", [1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14]),  # neighbours
    ("phi", [4, 5, 6, 7, 0, 1, 2, 3, *range(8, 16)]),  # half of the channels
    ("gpt2", [*range(16)]),  # no RoPE
])  # fmt: skip
def test_channels_that_rope_turns_into_each_other(family, partners):
    model = make_family(family, FAMILIES[family])
    assert rotary_partners(model).tolist() == partners
