"""The planner, which has a config.json, and the cache, which has a model, ask the same reader, and
agree about every layer of every family that the tests know.
"""

import json

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.transformers.families import (
    FAMILIES,
    INTERFACE,
    MAMBA,
    REFUSED,
    REFUSED_WHILE_RUNNING,
    SINCE,
    VERSION,
    make_family_config,
)
from torch_turboquant.integrations.transformers.models import (
    head_dim_of,
    layer_windows,
    model_layers,
)
from torch_turboquant.memory import attention_layers
from torch_turboquant.models import Kind, read_layers, text_config

KNOWN = {
    **FAMILIES,
    **{family: options for family, (options, _) in REFUSED_WHILE_RUNNING.items()},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
}
# What files of these families leave to their class: the planner asks, it never guesses.
ASKS = {
    **dict.fromkeys(
        "bamba biogpt bitnet doge ernie4_5_moe exaone4 exaone_moe glm4_moe gpt_neox lfm2_moe "
        "nanochat olmo_hybrid opt persimmon".split(),
        "head_dim = None; give --head-dim",
    ),
    **dict.fromkeys(
        "codegen gpt-sw3 gpt2 gpt_bigcode gptj nemotron_h".split(),
        "num_hidden_layers = None; give --layers",
    ),
    "llama with a window": "does not say in which layers",
    "olmoe": "does not say in which layers",
}


def meta_model(family, options):
    if VERSION < (5, SINCE.get(family, 0)):
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
    if family == "diffllama" and VERSION < (5, 13):  # its attention had no interface: refused
        with pytest.raises(ValueError, match=INTERFACE):
            model_layers(model)
        return
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


@pytest.mark.parametrize("family", [f for f, (_, why) in REFUSED.items() if "indexer" in why])
def test_planner_and_cache_refuse_an_indexer_alike(family):
    model = meta_model(family, REFUSED[family][0])
    assert {layer.kind for layer in read_layers(model.config)} <= {Kind.LATENT, Kind.OTHER}
    with pytest.raises(ValueError, match=r"latent attention \(MLA\) with an indexer"):
        model_layers(model)
    with pytest.raises(ValueError, match=r"latent attention \(MLA\) with an indexer"):
        attention_layers(json.loads(model.config.to_json_string()))


@pytest.mark.parametrize("family", ["dory", "mimo_v2_flash"])
def test_planner_and_cache_refuse_alike(family):
    """What these models keep is not what their numbers of layers, heads and channels say."""
    options, why = REFUSED[family]
    model = meta_model(family, options)
    for refuses, given in (
        (model_layers, model),
        (attention_layers, json.loads(model.config.to_json_string())),
    ):
        with pytest.raises(ValueError, match=why):
            refuses(given)


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
    config = make_family_config("gemma4_text", {"head_dim": 32, "global_head_dim": 64})
    planned = attention_layers(config)
    assert {layer.head_dim for layer in planned} == {32, 64}
    assert planned == attention_layers(json.loads(config.to_json_string()))
    with pytest.raises(ValueError, match="layers of different head_dim"):
        head_dim_of(config)
