"""Eviction at the prompt's end: what later tokens attend to, and what the cache then holds.

What every layer's attention returns is compared with a float64 oracle that hides the evicted tokens
of each head from later queries. Whole models are compared with transformers' own cache under a mask
that hides them: with "streaming" these are the same ones in all layers and heads.
"""

import copy
import pickle
import re

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("setuptools")  # inductor imports it, too late once a test has loaded distutils

from transformers import DynamicCache

from tests.transformers.families import SUPPORTED, VERSION, make_family
from tests.transformers.harness import (
    DRAFTS,
    MODELS,
    assert_close,
    feed,
    generate,
    learned_center,
    make_config,
    make_ids,
    make_model,
    oracle,
    padded,
    recorded,
)
from tests.transformers.latents import make_latent_model
from torch_turboquant.eviction import POLICIES, Eviction
from torch_turboquant.integrations.transformers import TurboQuantCache

ROOM = 256
FORMS = {"growing": {}, "static": {"static": True, "max_cache_len": ROOM}}
FULL = ["llama", "llama-mha", "llama-mqa-48", "qwen2", "gemma2", "gpt_oss"]
SIZES = 80, 1, 1, 1, 30, 1, 1, 5, 1


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def by_key(queries, keys, values):
    """Other tokens in each head and layer, and scores that a test can work out again exactly."""
    return keys[..., 0].float()


# ---- numbers


def evicted(key, config, keep, pads, prompt):
    """Which tokens leave: bool [batch, kv_heads, tokens], with the policy by_key."""
    gone = torch.zeros(key.shape[:3], dtype=torch.bool)
    for row, pad in enumerate(pads):
        length = prompt - pad
        protected = config.sink_tokens + config.recent_window
        count = min(length, max(round(keep * length + 0.499), protected))
        for head in range(key.shape[1]):
            scores = key[row, head, pad:prompt, 0].clone()
            scores[: config.sink_tokens] = torch.inf
            scores[max(0, length - config.recent_window) :] = torch.inf
            gone[row, head, pad:prompt][scores.argsort(descending=True)[count:]] = True
    return gone


def check(recorder, config, keep, pads, prompt, tolerance=5e-4, coarse=20):
    """Every layer's results; eviction must matter `coarse` times the tolerance."""
    for layer, parts in enumerate(recorder.layers):
        query, key, value, actual = (torch.cat(part, 2) for part in parts)
        center = recorder.cache.centers[layer]
        learned = learned_center(
            key[:, :, :prompt], recorder.teachers[layer], torch.tensor(pads), config.sink_tokens,
            recorder.partners,
        )  # fmt: skip
        torch.testing.assert_close(center, learned, rtol=1e-4, atol=1e-5)  # of all tokens
        options = recorder.options[layer]
        gone = evicted(key, config, keep, pads, prompt)
        slides = bool(options.get("sliding_window"))
        whole, _ = oracle(query, key, value, layer, options, config, prompt, center, pads)
        thin, _ = oracle(query, key, value, layer, options, config, prompt, center, pads, gone=gone)
        expected = whole if slides else thin
        real = torch.arange(key.shape[2]) >= torch.tensor(pads)[:, None]
        bound = tolerance * expected.abs().max().item()
        error = (actual.double() - expected).abs().amax((1, 3))[real].max().item()
        effect = (thin - whole).abs().amax((1, 3))[real].max().item()
        assert error <= bound, f"layer {layer}: error {error}, bound {bound}"
        assert effect >= coarse * bound, f"layer {layer}: effect {effect}, bound {bound}"
        assert torch.equal(gone.sum(2), gone.sum(2)[:, :1].expand(-1, gone.shape[1]))
        assert gone.shape[1] == 1 or not torch.equal(gone[:, 0], gone[:, 1])


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pads", [[0, 0, 0], [0, 40, 11]])
def test_every_layer_equals_the_oracle(name, form, pads):
    model, config = make_model(name), None
    config = make_config(model, "k3v2")
    ids, mask = padded([80 - pad for pad in pads], 80)
    ids, mask = (
        torch.cat([ids, make_ids(41, 3, seed=2)], 1),
        torch.cat([mask, mask.new_ones(3, 41)], 1),
    )
    options = {"max_batch_size": 3, "max_q_len": 7, "keep": 0.4, "evict": by_key, **FORMS[form]}
    with recorded(model, config, **options) as (cache, recorder):
        feed(model, cache, ids, *SIZES, mask=mask)
        assert cache.get_seq_length() == 121
        check(recorder, config, 0.4, pads, 80)


@pytest.mark.cuda
@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("form", FORMS)
def test_on_cuda(name, form):
    """Padded, with one sequence that loses nothing."""
    model, pads = make_model(name).cuda(), [0, 70, 11]
    config = make_config(model, "k3v2")
    ids, mask = padded([80 - pad for pad in pads], 80)
    ids = torch.cat([ids, make_ids(41, 3, seed=2)], 1).cuda()
    mask = torch.cat([mask, mask.new_ones(3, 41)], 1).cuda()
    options = {"max_batch_size": 3, "max_q_len": 7, "keep": 0.4, "evict": by_key, **FORMS[form]}
    with recorded(model, config, **options) as (cache, recorder):
        feed(model, cache, ids, *SIZES, mask=mask)
        assert cache.get_seq_length() == 121
        recorder.to_cpu()
        check(recorder, config, 0.4, pads, 80, tolerance=0.03, coarse=2)


@pytest.mark.cuda
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_on_cuda(policy):
    """The same scores as on the CPU."""
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(2, heads, n, 64, generator=generator).bfloat16()
        for heads, n in ((8, 64), (2, 3000), (2, 3000))
    )
    rule, lengths = Eviction(0.5, policy, 4, 64), [3000, 200]
    here = rule.scores(queries, keys, values, lengths)
    there = rule.scores(queries.cuda(), keys.cuda(), values.cuda(), lengths)
    torch.testing.assert_close(there.cpu(), here, rtol=1e-3, atol=1e-6)
    assert torch.equal(rule.columns(there, lengths), rule.columns(there.cpu(), lengths).cuda())


@pytest.mark.parametrize("changes", [
    {"sink_tokens": 0, "recent_window": 0},
    {"sink_tokens": 0},
    {"recent_window": 0},
    {"page_size": 64},
])  # fmt: skip
def test_other_configurations(changes):
    model = make_model()
    config = make_config(model, "k3v2", **changes)
    with recorded(model, config, keep=0.3, evict=by_key, max_q_len=7) as (cache, recorder):
        feed(model, cache, make_ids(121), *SIZES)
        check(recorder, config, 0.3, [0], 80)


def hidden_in_all_heads(lengths, keep, columns, sinks=4, window=64):
    """The mask [batch, columns] of tokens that "streaming" leaves of prompts of these lengths."""
    total, mask = max(lengths), torch.ones(len(lengths), columns).long()
    for row, length in enumerate(lengths):
        count = Eviction(keep, sinks=sinks, window=window).count(length)
        mask[row, : total - length + sinks] = 0
        mask[row, total - length : total - length + sinks] = 1
        mask[row, total - length + sinks : total - count + sinks] = 0
    return mask


def own_logits(model, ids, mask, visible, prompt):
    """transformers' own cache, where tokens after the prompt see what is visible."""
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    first = model(ids[:, :prompt], past_key_values=cache, attention_mask=mask[:, :prompt],
                  position_ids=positions[:, :prompt])  # fmt: skip
    rest = model(ids[:, prompt:], past_key_values=cache, attention_mask=visible,
                 position_ids=positions[:, prompt:])  # fmt: skip
    return torch.cat([first.logits, rest.logits], 1)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt_oss", "qwen3_next", "olmo_hybrid",
                                  "gpt_neox", "glm", "deepseek_v3"])  # fmt: skip
@pytest.mark.parametrize("form", FORMS)
def test_whole_models_against_their_own_cache(name, form):
    """Positions and masks count all tokens, whatever is stored of them."""
    if name == "deepseek_v3":
        if VERSION < (5, 15):
            pytest.skip("caches get latents from transformers 5.15 on")
        model, preset = make_latent_model(name), "k8"
    else:
        if name == "qwen3_next" and VERSION < (5, 7):
            pytest.skip("its linear attention forgot at forwards of several tokens before 5.7")
        family = SUPPORTED.get(name)
        model = make_family(name, family) if name not in MODELS else make_model(name)
        preset = "k8v8"
    lengths = [200] if form == "static" and name in ("qwen3_next", "olmo_hybrid") else [200, 150]
    ids, mask = padded(lengths, 200)
    batch = len(lengths)
    ids = torch.cat([ids, make_ids(20, batch, seed=2)], 1)
    mask = torch.cat([mask, mask.new_ones(batch, 20)], 1)
    visible = hidden_in_all_heads(lengths, 0.4, 220)
    options = {"max_batch_size": batch, "evict": "streaming", **FORMS[form]}
    with TurboQuantCache.for_model(model, preset, keep=0.4, **options) as cache:
        found = feed(model, cache, ids, 200, 1, 1, 7, mask=mask)
    assert_close(found[:, :200], own_logits(model, ids, mask, mask, 200)[:, :200], 1e-5)
    expected = own_logits(model, ids, mask, visible, 200)[:, 200:]
    other = own_logits(model, ids, mask, mask, 200)[:, 200:]
    error, effect = (found[:, 200:] - expected).norm(), (other - expected).norm()
    assert error <= 0.1 * effect, (error, effect)


# ---- nothing to evict


def refuse_to_score(*tensors):
    raise AssertionError("nothing is to be scored")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", FORMS)
def test_keeping_all_is_no_eviction(name, form):
    model = make_model(name)
    ids, mask = padded([121, 60], 121)
    config, found = make_config(model, "k3v2"), []
    for options in ({}, {"keep": 1, "evict": refuse_to_score}, {"keep": 1.0, "evict": "random"}):
        options = {"max_batch_size": 2, "max_q_len": 7, **FORMS[form], **options}
        with TurboQuantCache.for_model(model, config=config, **options) as cache:
            found.append((feed(model, cache, ids, *SIZES, mask=mask), cache.memory_bytes()))
            if not any(layer.is_sliding for layer in cache.packed):
                cache.crop(-60)  # into the prompt
    for logits, memory in found[1:]:
        assert torch.equal(logits, found[0][0]) and memory == found[0][1]


@pytest.mark.parametrize("form", FORMS)
def test_short_prompts_lose_nothing(form):
    """Sinks and window are all there is; so is what has to wait for a center."""
    model = make_model()
    for length in (1, 8, 68):
        ids, found = make_ids(length + 60), []
        for options in ({}, {"keep": 0.01, "evict": refuse_to_score}):
            with TurboQuantCache.for_model(model, "k3v2", **FORMS[form], **options) as cache:
                logits = feed(model, cache, ids, length, 1, 1)
                cache.crop(-(length + 60) // 2)
                found.append(torch.cat([logits, feed(model, cache, ids[:, :1])], 1))
        assert torch.equal(*found)


# ---- sizes


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_falls(policy):
    """Four bits and half of the tokens: an eighth of 16 bits, but for scales and exact tokens."""
    model = make_model("llama", head_dim=128, num_key_value_heads=1, max_position_embeddings=4096)
    with TurboQuantCache.for_model(model.bfloat16(), "k4v4", keep=0.5, evict=policy) as cache:
        feed(model, cache, make_ids(2048))
        memory, layers = cache.memory_bytes(), len(cache.layers)
        assert cache.get_seq_length() == 2048
        assert (
            memory["pages"]
            == memory["pages_allocated"]
            == layers * 32 * cache.layers[0].config.record_bytes
        )
    plain = layers * 2048 * 2 * 128 * 2
    assert plain / memory["pages"] > 7.7
    assert memory["waiting"] == 0


def test_sequences_of_a_batch_keep_their_share():
    """Each of its own length; the longest decides how many pages there are."""
    model = make_model()
    ids, mask = padded([300, 100, 170], 300)
    config = make_config(model, "k4v4", sink_tokens=4, recent_window=16)
    with TurboQuantCache.for_model(model, config=config, keep=0.2, max_batch_size=3) as cache:
        feed(model, cache, ids, mask=mask)
        per_token = cache.bytes_per_token
        assert cache.memory_bytes()["pages"] == (4 + 2 + 3) * 16 * per_token  # 60, 20 and 34 tokens
        assert cache.memory_bytes()["pages_allocated"] == 3 * 4 * 16 * per_token
        assert cache.sequences.lengths() == [300, 100, 170]
        assert cache.sequences.lengths(thinned=True) == [60, 20, 34]


@pytest.mark.parametrize("form", [{"max_cache_len": 100}, FORMS["static"] | {"max_cache_len": 100}])
def test_the_capacity_counts_what_stays(form):
    model, ids = make_model("gemma2"), make_ids(280)
    config = make_config(model)
    with TurboQuantCache.for_model(model, config=config, keep=0.25, **form) as cache:
        logits = feed(model, cache, ids, 240, *[1] * 40)  # 60 stay, and 40 more
        slides, full = (layer.pages.shape[0] for layer in cache.packed[:2])
        assert cache.packed[0].is_sliding and (slides, full) == (5, 7)
        if "static" not in form:
            with pytest.raises(ValueError, match="101 tokens do not fit into max_cache_len=100"):
                feed(model, cache, ids[:, :1])
        else:
            with pytest.raises(RuntimeError, match="do not fit into max_cache_len=100"):
                feed(model, cache, ids[:, :1])
        cache.reset()
        with pytest.raises(ValueError, match="110 tokens do not fit into max_cache_len=100"):
            feed(model, cache, make_ids(440))
        assert torch.equal(feed(model, cache, ids, 240, *[1] * 40), logits)


# ---- the static form, generate, copies


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_static_form_equals_the_growing_one(policy, name):
    model = make_model(name)
    ids, mask = padded([80, 30, 0, 55], 80)
    ids, mask = torch.cat([ids, make_ids(60, 4)], 1), torch.cat([mask, mask.new_ones(4, 60)], 1)
    options = {"config": make_config(model, "k3v2"), "max_batch_size": 4, "max_q_len": 7}
    found = []
    for form in FORMS.values():
        with TurboQuantCache.for_model(model, keep=0.5, evict=policy, **options, **form) as cache:
            found.append(feed(model, cache, ids, *SIZES, mask=mask))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_steps_compile_into_one_graph(name):
    model, ids = make_model(name), make_ids(120, 2)
    options = {"config": make_config(model, "k3v2"), "max_batch_size": 2, "keep": 0.5}
    step = torch.compile(model, fullgraph=True, backend="eager")
    with TurboQuantCache.for_model(model, **options) as cache:
        expected = feed(model, cache, ids, 80, *[1] * 40)
    with TurboQuantCache.for_model(model, **options, **FORMS["static"]) as cache:
        for prompt in range(2):
            parts = [model(ids[:, :80], past_key_values=cache).logits]
            for i in range(80, 120):
                first = prompt == 0 and i == 80
                with torch.compiler.set_stance("default" if first else "fail_on_recompile"):
                    parts.append(step(ids[:, i : i + 1], past_key_values=cache).logits)
            assert torch.equal(torch.cat(parts, 1), expected)
            assert cache.get_seq_length() == 120
            cache.reset()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("drafts", [{}, DRAFTS])
def test_generate(form, drafts):
    """Drafts are taken back as ever, also those that come with the prompt."""
    model, ids = make_model(initializer_range=0.04), make_ids(150)
    with TurboQuantCache.for_model(model, keep=0.6, **FORMS[form]) as cache:
        new = generate(model, ids, cache, new=30, **drafts).shape[1] - 150
        assert cache.get_seq_length() == 149 + new
        drafted = cache.sequences.prompt_end - 150
        assert cache.sequences.evicted == [int(0.4 * (150 + drafted))]
        assert (drafted > 0) == bool(drafts)


def test_a_prompt_in_several_forwards():
    """The first one that is stored is the prompt; what comes later stays."""
    model, ids = make_model(), make_ids(300)
    with TurboQuantCache.for_model(model, "k4v4", keep=0.5) as cache:
        feed(model, cache, ids, 40, 160, 60)  # 40 tokens wait for a center, and are the prompt's
        assert cache.sequences.evicted == [100]
        assert cache.sequences.lengths(thinned=True) == [200]


@pytest.mark.parametrize("form", FORMS)
def test_beams_and_copies(form):
    model, ids = make_model("gemma2"), make_ids(140, 3)
    options = {"config": make_config(model, "k3v2"), "max_batch_size": 3, "keep": 0.5}
    options["center"] = TurboQuantCache.calibrate(model, make_ids(90, seed=5))
    _, mask = padded([80, 40, 60], 80)
    mask = torch.cat([mask, mask.new_ones(3, 60)], 1)

    def copies(cache):
        twin = pickle.loads(pickle.dumps(cache))
        twin.attach(model)
        return cache, copy.deepcopy(cache), twin

    with TurboQuantCache.for_model(model, **options, **FORMS[form]) as cache:
        feed(model, cache, ids[:, :90], 80, 1, mask=mask[:, :90])
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        mask = mask[[2, 0, 0]]
        found = []
        for each in copies(cache):
            found.append(feed(model, each, ids[:, 90:], 1, 5, mask=mask))
            assert each.get_seq_length() == 140
            assert each.sequences.lengths(thinned=True) == [90, 100, 100]
            each.detach()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    with TurboQuantCache.for_model(model, **options, **FORMS[form]) as cache:
        ids[:, :90] = ids[[2, 0, 0], :90]
        alone = feed(model, cache, ids, 80, 1, 9, 1, 5, mask=mask)
    assert torch.equal(alone[:, 90:], found[0])


# ---- what is refused


@pytest.mark.parametrize("form", FORMS)
def test_crop_takes_back_what_came_after_the_prompt(form):
    model, ids = make_model(), make_ids(130)
    config = make_config(model)
    with TurboQuantCache.for_model(model, config=config, keep=0.5, **FORMS[form]) as cache:
        expected = feed(model, cache, ids, 100, 1, 1, 1)
        cache.crop(-27)
        assert_close(feed(model, cache, ids[:, 103:]), expected[:, 103:], 1e-5)
        cache.crop(-36)  # into the exact window of the prompt
        feed(model, cache, ids[:, 94:], 1, 1)
        match = (
            "tokens of the prompt were evicted (keep=0.5), so crop takes back up to 39 tokens, or "
            "all 130, not 40"
        )
        with pytest.raises(RuntimeError, match=re.escape(match)):
            cache.crop(-40)
        assert cache.get_seq_length() == 130
        cache.crop(-39)
        cache.crop(-91)
        assert cache.get_seq_length() == 0
        assert torch.equal(feed(model, cache, ids, 100, 1, 1, 1), expected)


def test_options_that_are_refused():
    model = make_model()
    for options, error, match in [
        ({"keep": 0}, ValueError, "keep is 0, supported: above 0 and up to 1"),
        ({"keep": 1.5}, ValueError, "keep is 1.5, supported"),
        ({"keep": "0.5"}, TypeError, "keep must be a number"),
        ({"keep": 0.5, "evict": "snapkw"}, ValueError, "did you mean 'snapkv'"),
        ({"evict": "h2o"}, ValueError, "unknown policy 'h2o'"),
        ({"keep": 0.5, "evict": 7}, TypeError, "evict must be a name or a function"),
        ({"evicts": "snapkv"}, TypeError, "no option 'evicts' .did you mean 'evict'"),
    ]:
        with pytest.raises(error, match=match):
            TurboQuantCache.for_model(model, "k4v4", **options)
    with pytest.raises(ValueError, match="MistralForCausalLM has no layer with full attention"):
        TurboQuantCache.for_model(make_model("mistral"), "k4v4", keep=0.5)
    TurboQuantCache.for_model(make_model("mistral"), "k4v4", keep=1).detach()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong, error, match", [
    (lambda q, k, v: k[..., :5, 0], ValueError, r"policy's result has shape \[1, 2, 5\], expected"),
    (lambda q, k, v: k[..., 0].half(), TypeError, "policy's result has dtype float16, supported"),
    (lambda q, k, v: k[..., 0].log(), ValueError, "policy's result holds NaN"),
    (lambda q, k, v: k[..., 0].tolist(), TypeError, "policy's result must be a tensor, got list"),
    (lambda q, k, v: 1 / 0, ZeroDivisionError, "division"),
])  # fmt: skip
def test_a_policy_that_fails_leaves_the_cache_empty(form, wrong, error, match):
    model, ids, fails = make_model(), make_ids(121), True

    def policy(queries, keys, values):
        return wrong(queries, keys, values) if fails else by_key(queries, keys, values)

    config = make_config(model)
    with TurboQuantCache.for_model(
        model, config=config, keep=0.5, evict=policy, **FORMS[form]
    ) as cache:
        with pytest.raises(error, match=match):
            feed(model, cache, ids[:, :100])
        assert cache.get_seq_length() == 0 and not cache.sequences.encoded
        fails = False
        found = feed(model, cache, ids, *SIZES)
        with TurboQuantCache.for_model(
            model, config=config, keep=0.5, evict=by_key, **FORMS[form]
        ) as other:
            assert torch.equal(found, feed(model, other, ids, *SIZES))
