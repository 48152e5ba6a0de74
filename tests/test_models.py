"""The reader of model configurations: kinds of layers, and what a file leaves unsaid.

tests/transformers/test_models.py shows that the planner and the transformers cache, which both ask
it, agree about every family.
"""

import pytest

from tests.memory.harness import PLAIN
from torch_turboquant.models import (
    IncompleteConfig,
    Kind,
    layer_count,
    read_layers,
    unsupported_attention,
)


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
    assert unsupported_attention(config) is unsupported_attention(PLAIN) is None
    sparse = {**config, "index_topk": 2048}
    for each in (sparse, {"text_config": sparse}):
        assert unsupported_attention(each) == "latent attention (MLA) with an indexer (index_topk)"


def test_files_of_models_with_latent_attention():
    """Kimi Linear counts the layers that attend from 1 on, LongCat has two attentions a block."""
    types = {"full_attn_layers": [2, 5], "kda_layers": [1, 3, 4]}
    kimi = {"model_type": "kimi_linear", "num_hidden_layers": 5, "kv_lora_rank": 512}
    kimi["linear_attn_config"] = types
    state, latent = Kind.STATE, Kind.LATENT
    assert [x.kind for x in read_layers(kimi)] == [state, latent, state, state, latent]
    longcat = {"model_type": "longcat_flash", "num_layers": 3, "kv_lora_rank": 512}
    assert [x.kind for x in read_layers(longcat)] == [latent] * 6
    assert layer_count(longcat) == 6


@pytest.mark.parametrize("changes", [
    {"is_encoder_decoder": True}, {"add_cross_attention": True}, {"cross_attention_layers": [2]},
])  # fmt: skip
def test_cross_attention_has_a_name(changes):
    assert unsupported_attention({**PLAIN, **changes}) == "cross attention"


@pytest.mark.parametrize("changes, problem", [
    ({"head_dim": 16, "v_head_dim": 16, "n_recurrent_loops": 1}, None),
    ({"kv_lora_rank": 512, "v_head_dim": 128}, None),  # of the values that latents are expanded to
    ({"head_dim": 192, "v_head_dim": 128}, "values of another size than keys (v_head_dim)"),
    ({"n_recurrent_loops": 2},
     "layers that run several times (n_recurrent_loops), each time with other keys"),
])  # fmt: skip
def test_what_no_cache_holds_has_a_name(changes, problem):
    assert unsupported_attention({**PLAIN, **changes}) == problem


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
