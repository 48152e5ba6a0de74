"""torch.autocast: keys are wider than values, and the cache holds one type."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache

from tests.transformers.harness import feed, generate, make_calm_model, make_ids, make_model, padded
from torch_turboquant.integrations.transformers import TurboQuantCache

FORMS = [{}, {"max_cache_len": 128}, {"static": True, "max_cache_len": 128}]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_logits_under_autocast(place, name, dtype, form):
    """Prompt, steps and a draft. Two bits show what an error would look like."""
    model, ids = make_model(name, initializer_range=0.1).to(place), make_ids(110).to(place)
    sizes = (90, *[1] * 10, 5)
    with torch.autocast(place, dtype):
        expected = feed(model, DynamicCache(config=model.config), ids, *sizes).float()
        errors = {}
        for preset in ("k8v8", "k2v2"):
            with TurboQuantCache.for_model(model, preset, recent_window=4, **form) as cache:
                actual = feed(model, cache, ids, *sizes).float()
                assert {layer.dtype for layer in cache.packed} == {dtype}
                assert {layer.ring.dtype for layer in cache.packed} == {dtype}
            errors[preset] = (actual - expected).abs().max() / expected.abs().max()
    assert errors["k8v8"] < 0.02 < 6 * errors["k8v8"] < errors["k2v2"], errors


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("prompt", [70, 20])  # 20: tokens that wait for their center
def test_generate_under_autocast(form, prompt):
    model = make_calm_model()
    ids, mask = padded([prompt, prompt // 2], prompt)
    with torch.autocast("cpu", torch.bfloat16):
        expected = generate(model, ids, attention_mask=mask)
        with TurboQuantCache.for_model(model, "k8v8", max_batch_size=2, **form) as cache:
            assert torch.equal(generate(model, ids, cache, attention_mask=mask), expected)


@pytest.mark.parametrize("first", [True, False])
def test_one_cache_is_filled_with_autocast_or_without(first):
    model, ids = make_model(), make_ids(80)
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        with torch.autocast("cpu", torch.bfloat16, enabled=first):
            feed(model, cache, ids)
        with torch.autocast("cpu", torch.bfloat16, enabled=not first):
            with pytest.raises(TypeError, match=r"the same torch\.autocast"):
                feed(model, cache, ids[:, :1])
        assert cache.get_seq_length() == 80
