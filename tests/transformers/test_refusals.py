"""Models, options and forwards that the cache refuses, each by name."""

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, AutoModelForCausalLM

from tests.transformers.families import VERSION
from tests.transformers.harness import (
    COMMON,
    VOCAB,
    feed,
    generate,
    make_ids,
    make_model,
    padded,
)
from tests.transformers.latents import make_latent_model
from torch_turboquant import CacheConfig, preset
from torch_turboquant.integrations.transformers import TurboQuantCache, tensors
from torch_turboquant.memory import attention_layers

# ------------------------------------------------------------------------------------- errors


def test_models_that_are_not_supported():
    def refuse(match, kind, **options):
        config = getattr(transformers, kind)(**{**COMMON, **options})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        with pytest.raises(ValueError, match=match):
            TurboQuantCache.for_model(model, "k4v4")

    refuse("no attention", "MambaConfig")
    refuse("head_dim", "LlamaConfig", head_dim=22)
    refuse("chunked attention", "Llama4TextConfig", num_local_experts=2, head_dim=16)
    refuse("AttentionInterface", "BloomConfig")
    if hasattr(transformers, "Gemma4TextConfig"):
        refuse("different head_dim", "Gemma4TextConfig", head_dim=32)

    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=16, d_ff=32, num_layers=1,
                              num_heads=2)
    )  # fmt: skip
    with pytest.raises(ValueError, match="cross attention"):
        TurboQuantCache.for_model(t5, "k4v4")


@pytest.mark.parametrize("given, name", [
    (torch.nn.Linear(2, 2), "a Linear"),
    (transformers.LlamaConfig(**COMMON), "a LlamaConfig"),
    ("meta-llama/Llama-3.2-1B", "the string 'meta-llama/Llama-3.2-1B'"),
    (None, "a NoneType"),
])  # fmt: skip
def test_what_is_no_model(given, name):
    with pytest.raises(ValueError, match=f"a loaded model of transformers .* but this is {name}$"):
        TurboQuantCache.for_model(given, "k4v4")


@pytest.mark.parametrize("kind, match, options", [
    ("Bert", "attention in both directions", {}),
    ("Roberta", "attention in both directions", {}),
    ("EuroBert", "attention in both directions", {"pad_token_id": 0}),
    ("DistilBert", "takes no past_key_values", {}),
    ("ViT", "takes no past_key_values", {}),
    ("T5", "cross attention", {"d_model": 32, "d_kv": 4}),
    ("Bart", "cross attention", {"d_model": 32}),
    ("Bert", "cross attention", {"is_decoder": True, "add_cross_attention": True}),
])  # fmt: skip
def test_encoders_and_encoder_decoders(kind, match, options):
    """With the reason, and before the cache has looked at sizes, which may not fit either."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}Model")(
            getattr(transformers, f"{kind}Config")(**sizes, vocab_size=VOCAB, **options)
        )
    with pytest.raises(ValueError, match=f"does not support {kind}Model: it has .*{match}"):
        TurboQuantCache.for_model(model)


def test_cross_attention_between_other_layers():
    """Mllama has no encoder in its configuration, but layers that attend to an image."""
    text = {**COMMON, "bos_token_id": 1, "eos_token_id": 2, "cross_attention_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_global_layers": 1,
              "attention_heads": 2, "vision_output_dim": 64, "intermediate_size": 32,
              "image_size": 28, "patch_size": 14, "intermediate_layers_indices": [0]}  # fmt: skip
    config = transformers.MllamaConfig(text_config=text, vision_config=vision)
    with torch.device("meta"):
        model = transformers.MllamaForConditionalGeneration(config)
        language_model = transformers.MllamaForCausalLM(config.text_config)
    for each in (model, language_model):
        with pytest.raises(ValueError, match=r"does not support Mllama.*: it has cross attention"):
            TurboQuantCache.for_model(each)
    with pytest.raises(ValueError, match="cross attention"):
        attention_layers(config.to_dict())


def test_gemma4_with_heads_of_two_sizes():
    """As its configuration has them by default."""
    if not hasattr(transformers, "Gemma4ForConditionalGeneration"):
        pytest.skip("this version of transformers has no gemma4")
    text = {**COMMON, "num_hidden_layers": 6}
    with torch.device("meta"):
        model = transformers.Gemma4ForConditionalGeneration(
            transformers.Gemma4Config(text_config=text)
        )
    with pytest.raises(ValueError, match="Gemma4TextConfig has layers of different head_dim"):
        TurboQuantCache.for_model(model)


@pytest.mark.parametrize("kind", ["Llama", "SeedOss"])
def test_sliding_layers_of_a_model_without_sliding_masks(kind):
    """Such a model attends to all tokens, whatever its configuration says."""
    types = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, "head_dim": 32, **types})
    model, ids = AutoModelForCausalLM.from_config(config).eval(), make_ids(80)
    with TurboQuantCache.for_model(model) as cache:  # no window is named: nothing differs
        assert [layer.sliding_window for layer in cache.packed] == [0, 0, 0]
        feed(model, cache, ids, 75, 1, 1)
    model.config.sliding_window = 24
    match = rf"{kind}ForCausalLM: it has layers of type 'sliding_attention' .*24.* no masks"
    with pytest.raises(ValueError, match=match):
        TurboQuantCache.for_model(model)
    model.config.layer_types = ["full_attention"] * 3
    with TurboQuantCache.for_model(model) as cache:
        feed(model, cache, ids, 75, 1, 1)


def test_a_class_of_a_model_with_sliding_masks_has_them():
    class Own(transformers.MistralModel):
        """In a file that names no mask."""

    config = transformers.MistralConfig(**COMMON, sliding_window=24)
    with TurboQuantCache.for_model(Own(config).eval()) as cache:
        assert {layer.sliding_window for layer in cache.packed} == {24}


def test_continuous_batching_asks_for_a_detached_cache():
    """By an error of transformers, which docs/troubleshooting.md explains."""
    model, prompts = make_model(), [[1, 2, 3], [4, 5]]
    if not hasattr(model, "generate_batch"):
        pytest.skip("this version of transformers has no continuous batching")
    with TurboQuantCache.for_model(model):
        with pytest.raises(ValueError, match=r"turboquant_sdpa\W* is not supported"):
            model.generate_batch(prompts, max_new_tokens=2)
    assert len(model.generate_batch(prompts, max_new_tokens=2)) == 2


def test_latent_attention_with_an_indexer_is_told_what_to_use():
    if not hasattr(transformers, "GlmMoeDsaConfig"):
        pytest.skip("this version of transformers has no glm_moe_dsa")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers.GlmMoeDsaConfig(**COMMON))
    match = r"latent attention \(MLA\) with an indexer \(index_topk\)\. Use DynamicCache"
    with pytest.raises(ValueError, match=match):
        TurboQuantCache.for_model(model)


def test_latent_attention_of_earlier_versions(monkeypatch):
    """Whose caches get keys and values of every head."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = transformers.DeepseekV3Config(**COMMON, **experts, n_group=1, topk_group=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    attention = type(model.model.layers[0].self_attn)
    if hasattr(attention, "expand_kv"):
        monkeypatch.delattr(attention, "expand_kv")
    match = f"from transformers 5.15 on, and this is {transformers.__version__}. Upgrade"
    with pytest.raises(ValueError, match=match):
        TurboQuantCache.for_model(model)


def test_options_that_do_not_exist():
    model = make_model()
    for name, near in {
        "nbits": "'key_bits'",
        "max_cache_length": "'max_cache_len'",
        "recent_windows": "'recent_window'",
        "Preset": "'preset'",
        "head_dim": None,
        "residual_length": None,
    }.items():
        with pytest.raises(TypeError, match=f"for_model has no option '{name}'") as caught:
            TurboQuantCache.for_model(model, **{name: 4})
        text = str(caught.value)
        assert (f"did you mean {near}" in text) if near else ("did you mean" not in text)
        for option in ("max_batch_size", "static", "sink_tokens", "value_bits"):
            assert option in text
        assert "__init__" not in text and "CacheConfig" not in text
    assert model.config._attn_implementation == "sdpa"


def test_a_cache_is_made_for_a_model():
    model = make_model()
    config = CacheConfig(32, 4, 4)
    for args, options in [
        ((), {}),
        ((), {"config": model.config}),
        ((model,), {}),
        ((model, model.config), {}),
        ((model.config, config), {}),
    ]:
        with pytest.raises(TypeError, match=r"TurboQuantCache\.for_model\(model, preset\)"):
            TurboQuantCache(*args, **options)
    with pytest.raises(TypeError, match=r"TurboQuantCache\.for_model"):
        TurboQuantCache.for_model(model, config=model.config)
    with TurboQuantCache(model, config) as cache:
        feed(model, cache, make_ids(5))


@pytest.mark.parametrize("center", ["None", "Auto", "no/such/file", Path("no/such/file"), 3, True])
def test_centers_that_are_none(center):
    with pytest.raises(ValueError, match=r"center is '.*'auto', 'mean', 'none' .*save_centers"):
        TurboQuantCache.for_model(make_model(), center=center)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("preset_name", ["K4V4", "k4v4 "])
def test_presets_that_are_nearly_right(preset_name, static):
    with pytest.raises(ValueError, match="did you mean 'k4v4'"):
        TurboQuantCache.for_model(make_model(), preset_name, static=static, max_cache_len=64)


@pytest.mark.parametrize("form", [{}, {"static": True, "max_cache_len": 256}])
def test_another_prompt_in_a_cache_in_use(form):
    """A shorter one, the same one again, one of the same length as what is there."""
    model, ids = make_model(), make_ids(60, 2)
    with TurboQuantCache.for_model(model, "k4v4", max_batch_size=2, **form) as cache:
        expected = generate(model, ids, cache, 5, attention_mask=torch.ones(2, 60).long())
        for tokens in (1, 7, 32, 34, 60, 63, 64):  # of 33 and fewer nothing is left
            again = make_ids(tokens, 2, seed=2)
            for options in ({}, {"attention_mask": torch.ones(2, tokens).long()}):
                with pytest.raises(ValueError, match=r"holds 64 tokens already.*call reset\(\)"):
                    generate(model, again, cache, 5, **options)
        with pytest.raises(ValueError, match=r"holds 64 tokens already.*call reset\(\)"):
            model(ids[:, :0], past_key_values=cache)
        assert cache.get_seq_length() == 64
        longer = generate(model, torch.cat([expected, ids], 1), cache, 5)
        cache.reset()
        assert torch.equal(generate(model, ids, cache, 5), expected)
        assert torch.equal(generate(model, torch.cat([expected, ids], 1), cache, 5), longer)


@pytest.mark.parametrize("form", [{}, {"static": True, "max_cache_len": 256}])
def test_another_prompt_of_one_token(form):
    model, ids = make_model(), make_ids(2)
    with TurboQuantCache.for_model(model, "k4v4", **form) as cache:
        expected = generate(model, ids[:, :1], cache, new=1)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"holds 1 tokens already.*call reset\(\)"):
                generate(model, ids[:, :1], cache, new=1)
        generate(model, ids, cache, new=3)
        assert cache.get_seq_length() == 4
        cache.reset()
        assert torch.equal(generate(model, ids[:, :1], cache, new=1), expected)


@pytest.mark.parametrize("form", [{}, {"static": True, "max_cache_len": 256}])
def test_another_padded_prompt_in_a_cache_in_use(form):
    model, (ids, mask) = make_model(), padded([60, 41], 60)
    with TurboQuantCache.for_model(model, "k4v4", max_batch_size=2, **form) as cache:
        first = generate(model, ids, cache, 5, attention_mask=mask)
        for lengths in ([60, 41], [30, 30], [64, 20]):
            again, again_mask = padded(lengths, max(lengths), seed=2)
            with pytest.raises(ValueError, match=r"call reset\(\)"):
                generate(model, again, cache, 5, attention_mask=again_mask)
        cache.reset()
        assert torch.equal(generate(model, ids, cache, 5, attention_mask=mask), first)


def test_options_that_are_refused():
    model = make_model()
    for match, options in {
        "unknown preset": {"preset": "k9v9"},
        "config.head_dim is 64": {"config": CacheConfig(64, 4, 4)},
        "belong into the CacheConfig": {"config": CacheConfig(32, 4, 4), "page_size": 16},
        "there is one: 'k8v8'": {"config": CacheConfig(32, 4, 4), "preset": "k8v8"},
        "max_q_len is 0, supported: 1 and more": {"max_q_len": 0},
        "max_q_len is 4.0, which is no whole": {"max_q_len": 4.0},
        "max_batch_size is '4', which is no whole": {"max_batch_size": "4"},
        "max_cache_len is 100.5, which is no whole": {"max_cache_len": 100.5},
        "recent_window is 8.5, which is no whole": {"recent_window": 8.5},
        "one tensor for each of 3 layers": {"center": [torch.zeros(2, 32)]},
    }.items():
        with pytest.raises(ValueError, match=match):
            TurboQuantCache.for_model(model, **options)
    assert model.config._attn_implementation == "sdpa"
    wrong = [torch.zeros(3, 32)] * 3
    with TurboQuantCache.for_model(model, center=wrong) as cache:
        with pytest.raises(ValueError, match="center of layer 0"):
            feed(model, cache, make_ids(5))


def test_cache_implementation():
    """Its names are a list within transformers, so that a cache of ours is handed over instead."""
    model, ids = make_model(), make_ids(40)
    with pytest.raises(ValueError, match=r"Invalid `cache_implementation` \(turboquant\)"):
        generate(model, ids, cache_implementation="turboquant")
    with pytest.raises(ValueError, match=r"Invalid `cache_implementation` \(turboquant\)"):
        transformers.GenerationConfig(cache_implementation="turboquant").validate()
    config = transformers.GenerationConfig(max_new_tokens=5, do_sample=False)
    with TurboQuantCache.for_model(model, "int8") as cache:
        with pytest.raises(ValueError, match="Passing both `cache_implementation`"):
            generate(model, ids, cache, cache_implementation="dynamic")
        out = model.generate(ids, past_key_values=cache, generation_config=config)
        assert cache.get_seq_length() == out.shape[1] - 1 == 44
        assert cache.config == preset("k8v8", 32)


def test_fp8_says_what_to_use():
    models = [make_model()]
    if VERSION >= (5, 15):
        models.append(make_latent_model())
    for model in models:
        with pytest.raises(ValueError, match=r"no preset 'fp8', because .*: use 'k8v8'"):
            TurboQuantCache.for_model(model, "fp8")


def test_forwards_that_are_refused():
    model, ids = make_model(), make_ids(70, 2)
    with TurboQuantCache.for_model(model, "k4v4", max_batch_size=2) as cache:

        def refuse(match, error=ValueError, tokens=ids, **options):
            with pytest.raises(error, match=match):
                model(tokens, past_key_values=cache, **options)

        refuse("max_batch_size=2", tokens=make_ids(5, 3))
        right = torch.ones(2, 70).long()
        right[0, 60:] = 0
        refuse("only left padding", attention_mask=right)
        refuse("2D attention_mask", attention_mask=torch.ones(2, 1, 70, 70).bool())
        refuse("expected", attention_mask=torch.ones(2, 69).long())
        left = torch.ones(2, 70).long()
        left[0, :10] = 0
        model(ids, attention_mask=left, past_key_values=cache)
        one = ids[:, :1]
        refuse("left-padded", tokens=one)
        refuse("10", tokens=one, attention_mask=torch.ones(2, 71).long())
        refuse("holds 2 sequences", tokens=one[:1])
        ok = torch.cat([left, torch.ones(2, 1).long()], dim=1)
        refuse("output_attentions", tokens=one, attention_mask=ok, output_attentions=True)
        assert cache.get_seq_length() == 70
        with torch.enable_grad():
            refuse("no_grad", RuntimeError, tokens=one, attention_mask=ok)
        model.train()
        model.model.layers[0].self_attn.attention_dropout = 0.1
        refuse("dropout", tokens=one, attention_mask=ok)
        model.eval()
        model.set_attn_implementation("eager")
        refuse("was changed", RuntimeError, tokens=one, attention_mask=ok)
    assert model.config._attn_implementation == "eager"  # not ours to restore any more


def test_keys_of_another_dtype_or_device_are_refused():
    model, ids = make_model(), make_ids(80)
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        feed(model, cache, ids[:, :70])
        model.bfloat16()
        for tokens in (ids[:, 70:71], ids[:, 70:]):
            with pytest.raises(TypeError, match=r"values of torch\.bfloat16, but holds"):
                model(tokens, past_key_values=cache)
        elsewhere = torch.zeros(1, 2, 1, 32, device="meta")
        cache.sequences.begin(1, 1, None)
        with pytest.raises(ValueError, match="got keys on meta, but is on cpu"):
            cache.update(elsewhere, elsewhere, 0)
        model.float()
        feed(model, cache, ids[:, 70:])
        assert cache.get_seq_length() == 80
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        model.double()
        with pytest.raises(TypeError, match="float64, supported: float32, float16, bfloat16"):
            model(ids, past_key_values=cache)
    with pytest.raises(TypeError, match="float64, supported: float32, float16, bfloat16"):
        TurboQuantCache.for_model(model, "k4v4")


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_gradient_checkpointing_takes_no_cache(gradients, reentrant):
    model, ids = make_model(), make_ids(70)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        model.train()
        with torch.set_grad_enabled(gradients):
            with pytest.raises(RuntimeError, match="takes no gradient, and gradient checkpointing"):
                model(ids, past_key_values=cache)
            loss = model(ids, labels=ids).loss  # as before, without it
            assert loss.requires_grad == gradients
        model.eval()
        feed(model, cache, ids)  # as in an evaluation between two steps of training
        with torch.enable_grad():
            with pytest.raises(RuntimeError, match=r"takes no gradient: .* torch.no_grad"):
                model(ids[:, :1], past_key_values=cache)
        assert cache.get_seq_length() == 70


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_model_without_weights(device, gradients):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_model().config)
    for form in ({}, {"max_cache_len": 100}, {"max_cache_len": 100, "static": True}):
        cache = TurboQuantCache.for_model(model, **form)
        with torch.set_grad_enabled(gradients):
            with pytest.raises(ValueError, match="the forward runs on the meta device"):
                model(make_ids(80).to(device), past_key_values=cache)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("form", [{}, {"max_cache_len": 100, "static": True}])
def test_a_forward_that_is_exported(form, strict):
    if strict and torch.__version__ < (2, 13):
        pytest.skip("before torch 2.13 every trace is told that it is an export")
    model, ids = make_model(), make_ids(73)

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids, past_key_values=cache).logits

    with TurboQuantCache.for_model(model, "k4v4", **form) as cache:
        expected = feed(model, cache, ids, 70, 1, 1, 1)
        cache.reset()
        for tokens in (ids[:, :70], ids[:, 70:71]):
            with pytest.raises(Exception, match=r"torch\.export cannot take a forward|fullgraph"):
                torch.export.export(Step(), (tokens,), strict=strict)
            torch._dynamo.reset()
            model(tokens, past_key_values=cache)
        assert cache.get_seq_length() == 71
        assert torch.equal(feed(model, cache, ids[:, 71:], 1, 1), expected[:, 71:])


def test_a_compiled_forward_is_no_export(monkeypatch):
    """Before torch 2.13 is_exporting() is true in whatever torch.compile traces."""
    monkeypatch.setattr(tensors, "is_exporting", lambda: True)
    monkeypatch.setattr(tensors, "_KNOWS_EXPORTS", False)
    model, ids = make_model(), make_ids(72)
    with TurboQuantCache.for_model(model, max_cache_len=100, static=True) as cache:
        feed(model, cache, ids[:, :70])
        step = torch.compile(model, backend="eager", fullgraph=True)
        step(ids[:, 70:71], past_key_values=cache)
        step(ids[:, 71:], past_key_values=cache)
        assert cache.get_seq_length() == 72


def test_attention_that_goes_another_way_is_noticed(monkeypatch):
    model, ids = make_model(), make_ids(70)
    other = AttentionInterface()["sdpa"]
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        feed(model, cache, ids)
        ours = AttentionInterface()["turboquant_sdpa"]
        one = model.model.layers[1].self_attn
        monkeypatch.setitem(
            AttentionInterface._global_mapping,
            "turboquant_sdpa",
            lambda module, *args, **kwargs: (other if module is one else ours)(
                module, *args, **kwargs
            ),
        )
        with pytest.raises(RuntimeError, match="attention of layer 1 did not go through"):
            model(ids[:, :1], past_key_values=cache)
        assert cache.get_seq_length() == 70


def test_keys_changed_on_the_way_are_noticed():
    model, ids = make_model(), make_ids(70)
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        update = cache.update

        def changed(key, value, layer_idx, *args, **kwargs):
            key, value = update(key, value, layer_idx, *args, **kwargs)
            return key * 1.0, value

        cache.update = changed
        with pytest.raises(RuntimeError, match="changes keys or values"):
            model(ids, past_key_values=cache)


def test_selecting_sequences_that_are_not_there():
    model, ids = make_model(), make_ids(90, 2)
    with TurboQuantCache.for_model(model, "k4v4", max_batch_size=2) as cache:
        feed(model, cache, ids[:, :80])
        expected = feed(model, cache, ids[:, 80:])
        cache.crop(-10)
        for row in (2, -1):
            with pytest.raises(ValueError, match=f"there is no sequence {row}: the cache has 2"):
                cache.reorder_cache(torch.tensor([0, row]))
        with pytest.raises(ValueError, match="4 sequences do not fit into max_batch_size=2"):
            cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([0, 1]))
        assert torch.equal(feed(model, cache, ids[:, 80:]), expected)
