"""Layers read from configurations of models."""

import json

import pytest

from tests.memory.harness import PLAIN, command
from torch_turboquant.memory import AttentionLayer, attention_layers
from torch_turboquant.models import DERIVED_HEAD_DIM, read_config

FULL, NONE = AttentionLayer(2, 16), None


def sliding(window):
    return AttentionLayer(2, 16, window)


@pytest.mark.parametrize("changes, expected", [
    ({}, [FULL] * 4),
    ({"head_dim": None}, [FULL] * 4),
    ({"head_dim": 32}, [AttentionLayer(2, 32)] * 4),  # named: never derived
    ({"num_key_value_heads": None}, [AttentionLayer(4, 16)] * 4),
    ({"model_type": "mistral", "sliding_window": 5}, [sliding(5)] * 4),
    ({"model_type": "mistral", "sliding_window": None}, [FULL] * 4),
    ({"model_type": "mistral", "sliding_window": 0}, [FULL] * 4),
    ({"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": False}, [FULL] * 4),
    ({"model_type": "qwen2", "sliding_window": 5, "max_window_layers": 3,
      "use_sliding_window": True}, [FULL] * 3 + [sliding(5)]),
    ({"model_type": "gemma2", "sliding_window": 5, "head_dim": 16}, [sliding(5), FULL] * 2),
    ({"model_type": "gemma3_text", "sliding_window": 5, "head_dim": 16},  # a full one every 6
     [sliding(5)] * 4),
    ({"sliding_window": 5, "sliding_window_pattern": 3},
     [sliding(5), sliding(5), FULL, sliding(5)]),
    ({"layer_types": ["full_attention", "linear_attention", "conv", "sliding_attention"],
      "sliding_window": 7}, [FULL, NONE, NONE, sliding(7)]),
    ({"full_attention_interval": 2, "linear_num_key_heads": 3}, [NONE, FULL] * 2),
    ({"model_type": "jamba", "mamba_d_state": 3, "attn_layer_period": 4, "attn_layer_offset": 2},
     [NONE, NONE, FULL, NONE]),
    ({"mamba_d_state": 3, "attn_layer_indices": [1]}, [NONE, FULL, NONE, NONE]),
    ({"attn_type_list": [0, 0, 1, 0], "linear_attn_alpha_factor": 1}, [NONE, NONE, FULL, NONE]),
    ({"model_type": "nemotron-nas", "num_key_value_heads": None, "block_configs": [
        {"attention": {"no_op": False, "replace_with_linear": False, "n_heads_in_group": group,
                       **more}} for group, more in ((2, {}), (4, {}), (None, {"no_op": True}),
                                                    (None, {"replace_with_linear": True}))]},
     [FULL, AttentionLayer(1, 16), NONE, NONE]),
    ({"attention_chunk_size": None, "no_rope_layers": [1, 1, 1, 0]}, [FULL] * 4),
    ({"num_kv_shared_layers": 3}, [FULL, NONE, NONE, NONE]),
    ({"block_types": ["recurrent", "recurrent", "attention"], "attention_window_size": 9},
     [NONE, NONE, sliding(9), NONE]),
    ({"sliding_window": 5, "sliding_window_pattern": 2, "global_head_dim": 64,
      "num_global_key_value_heads": 1, "attention_k_eq_v": True},
     [sliding(5), AttentionLayer(1, 64)] * 2),
    ({"sliding_window": 5, "sliding_window_pattern": 2, "global_head_dim": 64,
      "num_global_key_value_heads": 1, "attention_k_eq_v": False},
     [sliding(5), AttentionLayer(2, 64)] * 2),
    ({"per_layer_config": {"02": {"head_dim": 48}}}, [FULL, FULL, AttentionLayer(2, 48), FULL]),
])  # fmt: skip
def test_layers_of_a_configuration(changes, expected):
    config = {**PLAIN, **changes}
    assert attention_layers(config) == expected
    nested = {"model_type": "vision", "hidden_size": 7, "text_config": config}
    assert attention_layers(nested) == expected
    assert attention_layers({"thinker_config": nested}) == expected


@pytest.mark.parametrize("match, changes", [
    (r"'gemma2'\) has head_dim = None; give --head-dim", {"model_type": "gemma2"}),
    (r"'llama4_x'\) has head_dim = None", {"model_type": "llama4_x"}),
    ("num_key_value_heads = 'x'; give --kv-heads", {"num_key_value_heads": "x"}),
    ("num_attention_heads = None; give --kv-heads",
     {"num_key_value_heads": None, "num_attention_heads": None}),
    ("num_hidden_layers = 0; give --layers", {"num_hidden_layers": 0}),
    (r"latent attention \(MLA\) with an indexer \(index_topk\); supported",
     {"kv_lora_rank": 512, "index_topk": 2048}),
    ("cross attention; supported", {"is_encoder_decoder": True}),
    (r"layers of type \['chunked_attention'\]; supported",
     {"layer_types": ["chunked_attention"] * 4}),
    (r"layers of type \['chunked_attention'\]; supported",
     {"attention_chunk_size": 8, "no_rope_layers": [1, 1, 1, 0]}),
    (r"layers of type \['chunked_attention'\]; supported",
     {"attention_chunk_size": 8, "no_rope_layers": []}),
    (r"layers of type \['windowed_attention'\]; supported",
     {"block_configs": [{"attention": {"n_heads_in_group": 2, "window_length": 8}}] * 4}),
    ("sliding_window = 5 but does not say in which layers", {"sliding_window": 5}),
    *[(f"has {name} = {value}, which is neither a number of tokens nor null", changes)
      for value, number in (("-1", -1), ("4096.0", 4096.0), ("'4K'", "4K"), ("True", True))
      for name, changes in (
          ("sliding_window", {"model_type": "mistral", "sliding_window": number}),
          ("attention_window_size", {"layer_types": ["sliding_attention"] * 4,
                                     "attention_window_size": number}))],
    ("3 layer types for 4 layers", {"layer_types": ["full_attention"] * 3}),
    ("names no sliding_window", {"layer_types": ["sliding_attention"] * 4}),
    ("has mamba_d_state but does not say which layers attend", {"mamba_d_state": 16}),
])  # fmt: skip
def test_configurations_that_say_too_little(match, changes):
    with pytest.raises(ValueError, match=match):
        attention_layers({**PLAIN, **changes})


@pytest.mark.parametrize("changes", [
    {"layer_types": 5}, {"layer_types": [[1]]}, {"layer_types": [5, "conv"]},
    {"per_layer_config": [1]}, {"per_layer_config": {"0": 5}}, {"block_configs": [1]},
    {"block_configs": [{}]}, {"linear_attn_config": 5}, {"num_kv_shared_layers": "x"},
    {"kv_sharing_modes": 5}, {"model_type": [1], "sliding_window": 5},
    {"layer_types": ["full_attention"] * 4, "block_configs": [{"attention": {}}]},
])  # fmt: skip
def test_fields_of_another_type(capsys, tmp_path, changes):
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, **changes}))
    error = command(capsys, f"--config {tmp_path} --context 10", code=1)
    assert error.startswith("memory: the configuration cannot be read: ") and "Error(" in error


def test_heads_and_dimension_by_hand():
    silent = {"model_type": "gemma3_text", "num_hidden_layers": 2}
    with pytest.raises(ValueError, match="--kv-heads"):
        attention_layers(silent)
    expected = [AttentionLayer(4, 256)] * 2
    assert attention_layers(silent, kv_heads=4, head_dim=256) == expected


def test_what_transformers_makes_of_its_configurations():
    """Layer types, windows and head_dim of the real classes, read from the JSON they write."""
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = {"hidden_size": 384, "num_attention_heads": 12, "num_key_value_heads": 4}
    kinds = [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "phi3",
        "olmo2",
    ]
    kinds += ["smollm3", "gpt_oss", "qwen3_next", "granite", "cohere2", "starcoder2", "phi"]
    for kind in kinds:
        config = CONFIG_MAPPING[kind](**sizes)
        types = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        if types is None:
            types = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
        head_dim = getattr(config, "head_dim", None) or 32
        expected = [
            None
            if t == "linear_attention"
            else AttentionLayer(4, head_dim, window if t == "sliding_attention" else 0)
            for t in types
        ]
        written = json.loads(config.to_json_string())
        assert attention_layers(written) == expected, kind
        written.pop("layer_types", None)  # as older files are
        assert attention_layers(written) == expected, kind


def test_families_that_derive_head_dim_have_none_of_their_own():
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for kind in sorted(DERIVED_HEAD_DIM & set(CONFIG_MAPPING)):
        config = CONFIG_MAPPING[kind](hidden_size=384, num_attention_heads=12)
        assert getattr(config, "head_dim", None) in (None, 32), kind


def test_read_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PLAIN))
    assert read_config(path) == read_config(str(tmp_path)) == PLAIN
    for content in ("[1]", "{", None):
        path.write_text(content) if content else path.unlink()
        with pytest.raises(ValueError, match=r"config\.json"):
            read_config(tmp_path)
