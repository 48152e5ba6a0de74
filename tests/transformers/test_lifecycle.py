"""A cache over its life: tokens taken back, models attached and detached, copies, failures."""

import copy
import gc
import inspect
import weakref

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, Cache, DynamicCache

from tests.transformers.harness import (
    assert_close,
    calibrated,
    check_against_oracle,
    feed,
    make_config,
    make_ids,
    make_model,
    recorded,
)
from torch_turboquant.integrations.transformers import TurboQuantCache

# --------------------------------------------------------------------------------------- crop


@pytest.mark.parametrize("removed", [1, 5, 8])
def test_crop_within_the_ring_leaves_no_trace(removed):
    """max_q_len - 1 tokens can be taken back."""
    model, ids, draft = make_model(), make_ids(110), make_ids(9, seed=3)
    config = make_config(model)
    with TurboQuantCache.for_model(model, config=config, max_q_len=9) as cache:
        feed(model, cache, ids[:, :90], 80, 1)
        kept = 9 - removed
        feed(model, cache, torch.cat([ids[:, 90 : 90 + kept], draft[:, :removed]], dim=1))
        cache.crop(-removed)
        actual = feed(model, cache, ids[:, 90 + kept :], 1, 3)
        cache.reset()
        expected = feed(model, cache, ids, 80, *[1] * (10 + kept), 1, 3)
    # Exact tokens that had become codes would be 6e-3 at least, codes that round otherwise 5e-4.
    assert_close(actual, expected[:, 90 + kept :], 2e-3)


def test_deep_crop_reads_codes_until_the_ring_is_full_again():
    model, ids = make_model(), make_ids(110)
    config = make_config(model, "k3v2")
    with recorded(model, config, max_q_len=4, center=None) as (cache, recorder):
        feed(model, cache, ids)
        cache.crop(-50)
        recorder.crop(50)
        assert cache.get_seq_length() == 60
        feed(model, cache, ids[:, 60:], *[1] * 5, 30)
        check_against_oracle(recorder, config, 60, first_held=60)


def test_crop_to_nothing_and_refill():
    model, ids = make_model(), make_ids(90)
    with TurboQuantCache.for_model(model, config=make_config(model)) as cache:
        first = feed(model, cache, ids, 80, 1)
        cache.crop(-90)
        assert cache.get_seq_length() == 0
        assert_close(feed(model, cache, ids, 80, 1), first, 1e-6)
        cache.crop(0)
        assert cache.get_seq_length() == 90
        if "max_length" in inspect.signature(Cache.crop).parameters:  # 5.5: tokens to keep
            cache.crop(85)
            assert cache.get_seq_length() == 85
            cache.crop(100)
            assert cache.get_seq_length() == 85
        else:
            with pytest.raises(ValueError, match="negative"):
                cache.crop(5)


@pytest.mark.parametrize("form", [{}, {"static": True, "max_cache_len": 160}])
def test_a_sequence_that_was_cropped_to_its_padding_begins_anew(form):
    """Its window has lost nothing, however long it was before."""
    model, ids = make_model("mistral"), make_ids(120)
    options = {"page_size": 16, "max_q_len": 4, "center": "none"}
    found = []
    for tokens in (10, 110):
        mask = torch.ones(1, 8 + tokens).long()
        mask[:, :8] = 0
        with TurboQuantCache.for_model(model, "k4v4", **options, **form) as cache:
            feed(model, cache, ids[:, : 8 + tokens], mask=mask)
            cache.crop(2 - tokens - 8)  # 2 columns are left
            seen = torch.cat([mask[:, :8], torch.ones(1, 40).long()], dim=1)
            found.append(feed(model, cache, ids[:, :46], 16, *[1] * 30, mask=seen))
    assert torch.equal(found[0][:, 6:], found[1][:, 6:])


# ----------------------------------------------------------------------------- attach and detach


def test_other_caches_work_as_before_while_attached():
    model, ids = make_model(), make_ids(90)
    expected = feed(model, DynamicCache(), ids, 60, 1)
    uncached = model(ids).logits
    own = set(vars(model.model))
    first = TurboQuantCache.for_model(model, "k3v2")
    second = TurboQuantCache.for_model(model, "k4v4")
    assert model.config._attn_implementation == "turboquant_sdpa"
    dynamic = DynamicCache(config=model.config)
    a1, b1 = feed(model, first, ids[:, :60]), feed(model, second, ids[:, :60])
    c1 = feed(model, dynamic, ids[:, :60])
    a2, b2 = feed(model, first, ids[:, 60:], 1), feed(model, second, ids[:, 60:], 1)
    c2 = feed(model, dynamic, ids[:, 60:], 1)
    assert torch.equal(torch.cat([c1, c2], 1), expected)
    assert torch.equal(model(ids).logits, uncached)
    first.detach()
    assert model.config._attn_implementation == "turboquant_sdpa"  # the second is attached
    second.detach()
    second.detach()
    assert model.config._attn_implementation == "sdpa"
    assert set(vars(model.model)) == own
    assert torch.equal(feed(model, DynamicCache(), ids, 60, 1), expected)
    # interleaving has not mixed them
    for preset_name, part1, part2 in (("k3v2", a1, a2), ("k4v4", b1, b2)):
        with TurboQuantCache.for_model(model, preset_name) as cache:
            alone = feed(model, cache, ids, 60, 1)
        assert_close(torch.cat([part1, part2], 1), alone, 1e-6)


def test_models_that_share_their_configuration():
    first, ids = make_model(), make_ids(80)
    torch.manual_seed(1)
    second = type(first)(first.config).eval()
    assert second.config is first.config and second.model.config is first.model.config
    plain = first(ids).logits, second(ids).logits
    expected = []
    for model in (first, second):
        with TurboQuantCache.for_model(model, "k4v4") as cache:
            expected.append(feed(model, cache, ids, 70, 1))
    one = TurboQuantCache.for_model(first, "k4v4")
    assert torch.equal(second(ids).logits, plain[1])
    two = TurboQuantCache.for_model(second, "k4v4")
    prompts = feed(first, one, ids[:, :70]), feed(second, two, ids[:, :70])
    steps = feed(first, one, ids[:, 70:], 1), feed(second, two, ids[:, 70:], 1)
    for logits, *parts in zip(expected, prompts, steps, strict=True):
        assert torch.equal(torch.cat(parts, 1), logits)
    del one  # the other one's model keeps its attention
    gc.collect()
    two.reset()
    assert torch.equal(feed(second, two, ids, 70, 1), expected[1])
    assert torch.equal(first(ids).logits, plain[0])
    with pytest.raises(RuntimeError, match="outside a forward of the model"):
        first(ids, past_key_values=two)
    del two
    gc.collect()
    assert first.config._attn_implementation == "sdpa"
    assert torch.equal(first(ids).logits, plain[0]) and torch.equal(second(ids).logits, plain[1])


def test_an_implementation_that_was_changed_for_one_of_two_models():
    first, ids = make_model(), make_ids(80)
    second = type(first)(first.config).eval()
    one = TurboQuantCache.for_model(first, "k4v4")
    first.set_attn_implementation("eager")
    with TurboQuantCache.for_model(second, "k4v4") as two:
        feed(second, two, ids, 70)
        with pytest.raises(RuntimeError, match="was changed to 'eager'"):
            first(ids, past_key_values=one)
        one.detach()
        feed(second, two, ids[:, :1])
    assert first.config._attn_implementation == "eager"


def test_a_detached_cache_is_refused_and_can_come_back():
    model, ids = make_model(), make_ids(80)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    cache = TurboQuantCache.for_model(model, "k4v4")
    feed(model, cache, ids[:, :70])
    cache.detach()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    with pytest.raises(RuntimeError, match=r"not attached to this model; .* attached again"):
        model(ids[:, 70:], past_key_values=cache)
    cache.attach(model)
    actual = feed(model, cache, ids[:, 70:], 1)
    cache.reset()
    assert_close(actual, feed(model, cache, ids, 70, 1)[:, 70:], 1e-6)
    cache.detach()


def test_a_forgotten_cache_restores_the_model():
    model = make_model()
    own = set(vars(model.model))
    cache = TurboQuantCache.for_model(model, "k4v4")
    feed(model, cache, make_ids(70))
    del cache
    gc.collect()
    assert model.config._attn_implementation == "sdpa"
    assert set(vars(model.model)) == own


def test_a_cache_does_not_keep_its_model():
    model = make_model()
    cache = TurboQuantCache.for_model(model, "k4v4")
    feed(model, cache, make_ids(70))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    cache.detach()


def test_a_copy_of_an_attached_model_is_an_ordinary_model():
    model, ids = make_model(), make_ids(70)
    expected = feed(model, DynamicCache(), ids, 60, 1)
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        feed(model, cache, ids)
        copied = copy.deepcopy(model)
        assert torch.equal(feed(copied, DynamicCache(), ids, 60, 1), expected)
        with pytest.raises(RuntimeError, match="attached"):
            copied(ids, past_key_values=cache)
        with TurboQuantCache.for_model(copied, "k4v4") as other:
            feed(copied, other, ids)
            with pytest.raises(ValueError, match="not attached to this model"):
                copied(ids, past_key_values=cache)
        assert copied.config._attn_implementation == "sdpa"
    assert torch.equal(feed(model, DynamicCache(), ids, 60, 1), expected)


def test_saving_an_attached_model(tmp_path):
    model, ids = make_model(), make_ids(70)
    with TurboQuantCache.for_model(model, "k4v4"):
        model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert_close(loaded(ids).logits, model(ids).logits, 1e-6)


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_failing_forward_leaves_the_cache_as_it_was(tokens):
    model, ids = make_model(), make_ids(110)
    config = make_config(model, "k3v2")
    with recorded(model, config, max_q_len=8) as (cache, recorder):
        feed(model, cache, ids[:, :80])

        def fail(*args):
            raise KeyboardInterrupt

        # the first layer has stored its tokens when the second one fails
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(make_ids(tokens, seed=8), past_key_values=cache)
        hook.remove()
        for part in recorder.layers[0]:
            part.pop()
        assert cache.get_seq_length() == 80
        feed(model, cache, ids[:, 80:], 1, 5, *[1] * 24)
        # a long failed forward has overwritten the ring: codes until it is full again
        held = 0 if tokens == 1 else 80
        check_against_oracle(recorder, config, 80, center="auto", first_held=held)


FORMS = {
    "growing": {},
    "sized": {"max_cache_len": 200},
    "static": {"static": True, "max_cache_len": 200},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_inference_mode_may_come_and_go(form, first, tmp_path):
    """What one forward makes, another one changes: in the other mode, too, and of a copy."""
    model, ids = make_model(), make_ids(190, 2)
    second = torch.no_grad if first is torch.inference_mode else torch.inference_mode
    with torch.no_grad(), TurboQuantCache.for_model(model, max_batch_size=2, **FORMS[form]) as c:
        plain = feed(model, c, ids[:, :91], 80, 1, 9), feed(model, c, ids[:, 91:110], 1, 18)
    with first():
        cache = TurboQuantCache.for_model(model, max_batch_size=2, **FORMS[form])
        begun = feed(model, cache, ids[:, :91], 80, 1, 9)
        assert torch.equal(begun, plain[0])
        cache.save(tmp_path / "cache")
        copies = copy.deepcopy(cache), TurboQuantCache.load(tmp_path / "cache", model)
    for one in (cache, *copies):
        with second():
            assert torch.equal(feed(model, one, ids[:, 91:110], 1, 18), plain[1])
        with first():
            one.reorder_cache(torch.tensor([1, 0]))
        with second():
            feed(model, one, ids[:, 110:])
            one.reset()
            again = feed(model, one, ids[:, :91], 80, 1, 9)  # a center is learned anew
            assert torch.equal(again, plain[0])
        with first():
            assert torch.equal(feed(model, one, ids[:, 91:110], 1, 18), plain[1])
        one.detach()


@pytest.mark.parametrize("form", FORMS)
def test_the_default_device_is_of_no_consequence(form):
    """Memory and numbers are where the model is, or on the host."""
    model, ids = make_model(), make_ids(110, 2)
    found = []
    for default in ("cpu", "meta"):
        with torch.device(default):
            cache = TurboQuantCache.for_model(model, max_batch_size=2, **FORMS[form])
            logits = feed(model, cache, ids, 80, 1, 9)
            cache.reorder_cache(torch.tensor([1, 0], device="cpu"))
            copied = copy.deepcopy(cache)
            found.append((logits, feed(model, copied, ids[:, :9], 1)))
            cache.reset()
            assert torch.equal(feed(model, cache, ids, 80, 1, 9), logits)
        cache.detach()
        copied.detach()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("attached", [False, True])
def test_a_cache_of_another_model(attached):
    """The text is the same whether that model has a cache of its own attached or not."""
    model, other, ids = make_model(), make_model(), make_ids(70)
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        own = TurboQuantCache.for_model(other, "k4v4") if attached else None
        with pytest.raises((RuntimeError, ValueError), match="is not attached to this model; call"):
            feed(other, cache, ids)
        feed(model, cache, ids)
        if own is not None:
            own.detach()


def test_attaching_to_another_model():
    model = make_model()
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        for match, other in (
            ("made for another model: layers '3'", make_model(num_hidden_layers=2)),
            ("head_dim '32', the model's is '16'", make_model(head_dim=16)),
            ("hidden_size '64', the model's is '32'", make_model(hidden_size=32)),
            ("rope ", make_model(rope_parameters={"rope_type": "default", "rope_theta": 5.0})),
        ):
            with pytest.raises(ValueError, match=match):
                cache.attach(other)
            assert other.config._attn_implementation == "sdpa"
        feed(model, cache, make_ids(70))  # it still serves its own model
        assert cache.get_seq_length() == 70


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_first_prompt_that_fails_is_forgotten(name):
    """What it has stored in some layers takes no token out of the tail of a shorter one."""
    model, ids = make_model(name), make_ids(100)
    options = {"config": make_config(model, "k3v2"), "max_q_len": 7, "center": calibrated(model)}

    def fail(*args):
        raise KeyboardInterrupt

    with TurboQuantCache.for_model(model, **options) as cache:
        expected = feed(model, cache, ids, 80, *[1] * 20)
        cache.reset()
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(make_ids(140, seed=8), past_key_values=cache)
        hook.remove()
        assert torch.equal(feed(model, cache, ids, 80, *[1] * 20), expected)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_prompt_that_fails_behind_waiting_tokens(name):
    """They wait for a center: the next forward stores all tokens, whatever this one has stored."""
    model, ids = make_model(name), make_ids(200)
    config = make_config(model, "k3v2", recent_window=80)
    with TurboQuantCache.for_model(model, config=config, max_q_len=4) as cache:
        found = []
        for fails in (False, True):
            cache.reset()
            feed(model, cache, ids[:, :10])
            if fails:
                hook = model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    model(ids[:, 10:], past_key_values=cache)
                hook.remove()
            cache.crop(-2)
            found.append(feed(model, cache, ids[:, 8:90], 2, 60))
        assert torch.equal(*found)
