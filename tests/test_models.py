"""One reader of configurations: the planner, which has a config.json, and the transformers cache,
which has a model, agree about every layer of every family that the tests know.
"""

import json

import pytest
import torch

from torch_turboquant.memory import attention_layers
from torch_turboquant.models import (
    IncompleteConfig,
    Kind,
    read_layers,
    text_config,
    unsupported_attention,
)

PLAIN = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
}

# ---- the reader


def test_what_a_layer_is():
    config = {**PLAIN, "sliding_window": 9, "layer_types": [
        "full_attention", "sliding_attention", "linear_attention", "chunked_attention"
    ]}  # fmt: skip
    layers = read_layers(config)
    assert [x.kind for x in layers] == [Kind.FULL, Kind.SLIDING, Kind.STATE, Kind.CHUNKED]
    assert [x.type for x in layers] == config["layer_types"]
    assert [x.window for x in layers] == [0, 9, 0, 0]
    assert {(x.kv_heads, x.head_dim) for x in layers} == {(2, 16)}
    (strange,) = read_layers({**PLAIN, "layer_types": ["strange"]})
    assert strange.kind is Kind.OTHER and strange.type == "strange"


@pytest.mark.parametrize("changes", [
    {"num_kv_shared_layers": 2},
    {"kv_sharing_modes": [None, "store", "reuse", "reuse"]},
])  # fmt: skip
def test_layers_that_share_keys_and_values(changes):
    kinds = [layer.kind for layer in read_layers({**PLAIN, **changes})]
    assert kinds == [Kind.FULL, Kind.FULL, Kind.SHARED, Kind.SHARED]


def test_latent_attention_has_a_name():
    config = {**PLAIN, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
              "layer_types": ["full_attention", "linear_attention"] * 2}  # fmt: skip
    layers = read_layers(config)
    assert [x.kind for x in layers] == [Kind.LATENT, Kind.STATE] * 2
    assert layers[0].latent_dims == (512, 64)
    assert unsupported_attention(config) == "latent attention (MLA)"
    assert unsupported_attention({"text_config": config}) == "latent attention (MLA)"
    assert unsupported_attention(PLAIN) is None


@pytest.mark.parametrize("key", ["is_encoder_decoder", "add_cross_attention"])
def test_cross_attention_has_a_name(key):
    assert unsupported_attention({**PLAIN, key: True}) == "cross attention"


def test_numbers_are_read_when_they_are_asked_for():
    layers = read_layers({"model_type": "gemma2", "num_hidden_layers": 2})
    with pytest.raises(IncompleteConfig, match=r"'gemma2'\) has head_dim = None$") as caught:
        _ = layers[0].head_dim
    assert caught.value.missing == "head_dim"
    with pytest.raises(IncompleteConfig, match="num_key_value_heads = None"):
        _ = layers[0].kv_heads


def test_code_is_asked_only_where_the_configuration_is_silent():
    def never():
        raise AssertionError("the configuration names the types of its layers")

    named = {**PLAIN, "layer_types": ["full_attention"] * 4, "sliding_window": 5}
    assert [x.kind for x in read_layers(named, never)] == [Kind.FULL] * 4
    assert [x.kind for x in read_layers(PLAIN, never)] == [Kind.FULL] * 4  # and no window
    silent = {**PLAIN, "sliding_window": 5}
    for answer, kind in ((True, Kind.SLIDING), (False, Kind.FULL)):
        assert [x.kind for x in read_layers(silent, lambda a=answer: a)] == [kind] * 4


# ---- planner and transformers cache

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from tests.transformers.families import (  # noqa: E402
    FAMILIES,
    MAMBA,
    MINOR,
    REFUSED,
    REFUSED_WHILE_RUNNING,
    SINCE,
    make_family_config,
)
from torch_turboquant.integrations.transformers.models import (  # noqa: E402
    head_dim_of,
    layer_windows,
    model_layers,
)

KNOWN = {
    **FAMILIES,
    **{family: options for family, (options, _) in REFUSED_WHILE_RUNNING.items()},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
}
# What files of these families leave to their class: the planner asks, it never guesses.
ASKS = {
    **dict.fromkeys(
        "bamba bert biogpt bitnet ernie4_5_moe exaone4 exaone_moe glm4_moe gpt_neox lfm2_moe "
        "nanochat olmo_hybrid opt persimmon".split(),
        "head_dim = None; give --head-dim",
    ),
    **dict.fromkeys(
        "gpt-sw3 gpt2 gpt_bigcode nemotron_h".split(), "num_hidden_layers = None; give --layers"
    ),
    "llama with a window": "does not say in which layers",
    "olmoe": "does not say in which layers",
}


def meta_model(family, options):
    if MINOR < SINCE.get(family, 0):
        pytest.skip("not supported with this version")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(make_family_config(family, options))


def as_planned(layers):
    """Layers of the reader as `attention_layers` gives them."""
    keeps = (Kind.FULL, Kind.SLIDING)
    return [(x.kv_heads, x.head_dim, x.window) if x.kind in keeps else None for x in layers]


@pytest.mark.parametrize("family", KNOWN)
def test_planner_and_cache_agree_about_every_layer(family):
    """Kinds, heads, dimensions and windows: of the model, and of the file that its class writes."""
    model = meta_model(family, KNOWN[family])
    config = text_config(model.config)
    layers = model_layers(model)
    expected = as_planned(layers)
    assert layer_windows(model) == [None if x is None else x[2] for x in expected]
    assert {x[1] for x in expected if x} == {head_dim_of(config)}
    # what the cache knew of the class before there was one reader
    assert len(layers) == config.num_hidden_layers
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert {x[:2] for x in expected if x} == {(heads, dim)}
    types = getattr(config, "layer_types", None)
    if types is not None:
        assert [x.type for x in layers] == list(types)
    written = json.loads(config.to_json_string())
    if family in ASKS:
        with pytest.raises(ValueError, match=ASKS[family]):
            attention_layers(written)
        if "head_dim" in ASKS[family]:
            given = attention_layers(written, head_dim=dim)
            assert [x and tuple(x) for x in given] == expected
        return
    assert [x and tuple(x) for x in attention_layers(written)] == expected


@pytest.mark.parametrize("family", [f for f, (_, why) in REFUSED.items() if "latent" in why])
def test_planner_and_cache_refuse_latent_attention_alike(family):
    model = meta_model(family, REFUSED[family][0])
    assert {layer.kind for layer in read_layers(model.config)} <= {Kind.LATENT, Kind.OTHER}
    with pytest.raises(ValueError, match=r"latent attention \(MLA\)"):
        model_layers(model)
    with pytest.raises(ValueError, match=r"latent attention \(MLA\)"):
        attention_layers(json.loads(model.config.to_json_string()))


def test_shared_layers_are_counted_once_and_refused_by_the_cache():
    model = meta_model("llama", {})
    model.config.num_kv_shared_layers = 1
    with pytest.raises(ValueError, match="layers that share keys and values"):
        layer_windows(model)
    planned = attention_layers(model.config)
    assert planned[-1] is None and None not in planned[:-1]
    assert attention_layers(json.loads(model.config.to_json_string())) == planned


def test_layers_of_different_sizes():
    """Planned one by one, refused by the cache; as objects and as files."""
    if "gemma4_text" not in CONFIG_MAPPING:
        pytest.skip("this version of transformers has no gemma4_text")
    config = make_family_config("gemma4_text", {"head_dim": 32})
    planned = attention_layers(config)
    assert {layer.head_dim for layer in planned} == {32, config.per_layer_config[-1].head_dim}
    assert planned == attention_layers(json.loads(config.to_json_string()))
    with pytest.raises(ValueError, match="layers of different head_dim"):
        head_dim_of(config)
