"""What users write, and what is refused at start. Needs no vLLM."""

import re
from enum import Enum
from types import SimpleNamespace

import pytest
import torch

from torch_turboquant.integrations.vllm import limits
from torch_turboquant.integrations.vllm.learning import Learning
from torch_turboquant.integrations.vllm.settings import Settings, parse
from torch_turboquant.integrations.vllm.versions import find_interface

# ---- settings


def test_everything_that_can_be_set():
    given = {
        "preset": "k4v4u",
        "layers": {"0": "k8v8", "-1": "k8v4"},
        "centers": "centers.safetensors",
        "seed": 3,
        "learn": False,
        "calibrate": True,
        "exact_steps": False,
        "first_token": "codes",
        "window": 0,
    }
    assert parse({"turboquant": given}) == Settings(
        preset="k4v4u",
        layers=((0, "k8v8"), (-1, "k8v4")),
        centers="centers.safetensors",
        seed=3,
        learn=False,
        calibrate=True,
        exact_steps=False,
        first_token="codes",
    )


@pytest.mark.parametrize("given", [{}, {"other": 1}, {"turboquant": {}}, None])
def test_defaults(given):
    assert parse(given) == Settings("near-lossless")


def test_layers_have_their_own_presets():
    settings = parse({"turboquant": {"preset": "k5v4u", "layers": {"0": "k8v8", "-1": "k3v2"}}})
    widths = [settings.layer_config(64, layer, 4).key_bits for layer in range(4)]
    assert widths == [8, 5, 5, 3]
    config = settings.layer_config(64, 1, 4)
    assert (config.sink_tokens, config.recent_window) == (0, 0)


def test_layers_of_latents():
    """A preset for keys and values gives a latent the bits of its keys."""
    settings = parse({"turboquant": {"layers": {"0": "k8", "-1": "k4v4"}, "seed": 3}})
    configs = [settings.latent_layer_config(512, 64, torch.bfloat16, n, 3) for n in range(3)]
    assert [(c.bits, c.grid) for c in configs] == [(8, "uniform"), (5, "uniform"), (4, "lloyd")]
    for config in (*configs, settings.latent_config(512, 64, torch.bfloat16)):
        assert (config.sink_tokens, config.recent_window, config.seed) == (1, 0, 3)
        assert config.rope_dtype == torch.bfloat16
    settings = parse({"turboquant": {"preset": "k4u", "first_token": "codes"}})
    config = settings.latent_config(256, 32, torch.float16)
    assert (config.bits, config.grid, config.rope_dtype) == (4, "uniform", torch.float16)
    assert config.sink_tokens == 0
    with pytest.raises(ValueError, match="unknown preset 'k4u'"):
        settings.config(64)


@pytest.mark.parametrize("name", ["tq_k4v4u", "tq_near_lossless"])
def test_presets_named_by_the_dtype(name):
    preset = name.removeprefix("tq_").replace("_", "-")
    assert parse({}, name).preset == preset
    assert parse({"turboquant": {"preset": preset}}, name).preset == preset


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("k5v4u", TypeError, 'expected an object such as {"preset": "k5v4u"}, got \'k5v4u\''),
        ({"presett": "k5v4u"}, ValueError, "unknown key 'presett' (did you mean 'preset'"),
        ({"bits": 4}, ValueError, "the keys are preset, layers, centers, learn"),
        ({"preset": "k5v4"}, ValueError, "unknown preset 'k5v4' (did you mean 'k5v4u'"),
        ({"preset": 4}, TypeError, "preset is 4, of type int"),
        ({"layers": {"first": "k8v8"}}, ValueError, "layers names 'first', expected numbers"),
        ({"layers": {None: "k8v8"}}, ValueError, "layers names None, expected numbers"),
        ({"layers": {1.5: "k8v8"}}, ValueError, "layers names 1.5, expected numbers"),
        ({"layers": {"0": "k9v9"}}, ValueError, "unknown preset 'k9v9'"),
        ({"layers": {"0": 8}}, TypeError, "layer 0 has 8, expected the name of a preset"),
        ({"layers": ["k8v8"]}, TypeError, "layers is ['k8v8'], of type list"),
        ({"seed": True}, TypeError, "seed is True, of type bool"),
        ({"seed": False}, TypeError, "seed is False, of type bool"),
        ({"window": False}, TypeError, "window is False, of type bool"),
        ({"seed": -1}, ValueError, "seed must be 0 to 2^64 - 1, got -1"),
        ({"learn": 1}, TypeError, "learn is 1, of type int"),
        ({"first_token": True}, TypeError, "first_token is True, of type bool"),
        ({"first_token": "no"}, ValueError, "first_token is 'no', supported: 'exact' and 'codes'"),
        ({"window": 64}, ValueError, "window is 64, supported: 0"),
    ],
)
def test_mistakes_are_named(given, error, text):
    with pytest.raises(error, match=re.escape(text)):
        parse({"turboquant": given})


@pytest.mark.parametrize("name", ["TurboQuant", "turbo_quant", "torch_turboquant", "preset"])
def test_settings_that_are_elsewhere(name):
    with pytest.raises(ValueError, match=rf"additional_config has '{name}', which means nothing"):
        parse({name: {"preset": "k8v8"}, "other": 1})
    assert parse({"turboquant": {"preset": "k8v8"}, name: 1}).preset == "k8v8"
    assert parse({"others": {"preset": "k8v8"}}).preset == "near-lossless"


def test_two_presets_are_one_too_many():
    with pytest.raises(ValueError, match="tq_k8v8 and preset 'k4v4' differ"):
        parse({"turboquant": {"preset": "k4v4"}}, "tq_k8v8")


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ({"7": "k8v8"}, 'turboquant: "layers" names layer 7, the model has 4 layers'),
        ({"-5": "k8v8"}, 'turboquant: "layers" names layer -5, the model has 4 layers'),
        ({"0": "k8v8", "-4": "k4v4"}, 'turboquant: "layers" names layer 0 twice'),
    ],
)
def test_layers_that_the_model_has_not(layers, text):
    settings = parse({"turboquant": {"layers": layers}})
    with pytest.raises(ValueError, match=text):
        settings.layer_config(64, 0, 4)
    with pytest.raises(ValueError, match=text):
        settings.latent_layer_config(512, 64, torch.bfloat16, 0, 4)


# ---- refusals


class Kind(str, Enum):
    """As vLLM's kinds of attention."""

    ENCODER_ONLY = "encoder_only"


def layer_problems(head_dim=64, dtype=torch.bfloat16, on_cpu=False, cache="auto", **changes):
    alibi, kind = changes.pop("alibi", None), changes.pop("kind", "decoder")
    return limits.wrong_layer(head_dim, dtype, on_cpu, cache, alibi, kind, changes)


def test_what_layers_may_be():
    assert layer_problems() == []
    assert layer_problems(dtype=torch.float32, on_cpu=True) == []
    assert layer_problems(head_dim=256, cache="bfloat16", sinks=None) == []
    assert layer_problems(cache="tq_k5v4u") == []
    assert layer_problems(chunk_lookback=-1) == []  # layers of Rnj-1 without chunks


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtype": torch.float32}, "pass --dtype bfloat16 or float16"),
        ({"cache": "fp8"}, "pass --kv-cache-dtype bfloat16"),
        ({"cache": "turboquant_k8v4"}, "pass --kv-cache-dtype bfloat16"),
        ({"head_dim": 88}, "choose another --attention-backend"),
        ({"alibi": [1.0]}, "ALiBi is not supported: choose another --attention-backend"),
        ({"kind": "encoder_only"}, "encoder_only attention is not supported"),
        ({"kind": Kind.ENCODER_ONLY}, "encoder_only attention is not supported"),
        ({"indexer": 1}, "the option indexer of attention is not supported"),
        ({"chunk_lookback": 1}, "the option chunk_lookback of attention is not supported"),
    ],
)
def test_layers_that_are_refused(changes, text):
    (problem,) = layer_problems(**changes)
    assert text in problem


def engine_config(**changes):
    model = {"is_hybrid": False, "enforce_eager": False, "use_mla": False, "is_mm_prefix_lm": False}
    transfer = {"kv_connector": None, "kv_connector_extra_config": {}}
    transfer["kv_connector_module_path"] = None
    parts = {"cache": {}, "parallel": {}, "model": model, "transfer": transfer}
    for name, value in changes.items():
        part, _, field = name.partition("_")
        parts[part][field] = value
    names = {"transfer": "kv_transfer_config"}
    configs = {names.get(name, f"{name}_config"): SimpleNamespace(**p) for name, p in parts.items()}
    return SimpleNamespace(**configs)


def with_pictures(image, video):
    """A model whose pictures' tokens see each other, and how many pictures a request may have."""
    limits_of = {"image": image, "video": video}
    return {
        "model_is_mm_prefix_lm": True,
        "model_multimodal_config": SimpleNamespace(get_limit_per_prompt=limits_of.get),
    }


NEW, OLD = find_interface("0.32.0"), find_interface("0.27.1")


def test_what_engines_may_be():
    limits.check_engine(engine_config(model_use_mla=True), NEW, Settings("k4u"))
    limits.check_engine(engine_config(model_is_hybrid=True), NEW, Settings())
    limits.check_engine(engine_config(), OLD, Settings())
    limits.check_engine(engine_config(model_enforce_eager=True), NEW, Settings(calibrate=True))
    limits.check_engine(engine_config(**with_pictures(0, 0)), NEW, Settings())
    text = engine_config(model_is_mm_prefix_lm=True, model_multimodal_config=None)
    limits.check_engine(text, NEW, Settings())


@pytest.mark.parametrize(
    ("changes", "interface", "settings", "text"),
    [
        ({"cache_calculate_kv_scales": True}, NEW, {}, "calculate_kv_scales has no meaning"),
        (
            {"cache_kv_cache_dtype_skip_layers": ["0"]},
            OLD,
            {},
            'leave it out, and give layers presets of their own, such as "layers": {"0": "k8v8"}',
        ),
        (
            {"parallel_decode_context_parallel_size": 2},
            NEW,
            {},
            "decode_context_parallel_size is 2, supported: 1",
        ),
        (
            {"parallel_prefill_context_parallel_size": 4},
            NEW,
            {},
            "prefill_context_parallel_size is 4, supported: 1",
        ),
        ({"model_is_hybrid": True}, OLD, {}, "install vLLM 0.28 or newer"),
        ({"model_rswa_window": 128}, NEW, {}, "(rswa_window) are not supported: choose another"),
        (with_pictures(999, 0), NEW, {}, "pass --language-model-only to serve text alone"),
        (with_pictures(0, 1), OLD, {}, "tokens of a picture see each other in this model"),
        (
            {"transfer_kv_connector": "NixlConnector"},
            NEW,
            {},
            "the KV connector NixlConnector is not known to move packed pages as a whole, "
            "supported: ExampleConnector, OffloadingConnector, SimpleCPUOffloadConnector, several",
        ),
        (
            {"transfer_kv_connector": "ExampleConnector", "model_use_mla": True},
            NEW,
            {},
            "move packed pages of latents as a whole, supported: OffloadingConnector, Simple",
        ),
        (
            {
                "transfer_kv_connector": "MultiConnector",
                "transfer_kv_connector_extra_config": {
                    "connectors": [
                        {"kv_connector": "ExampleConnector"},
                        {"kv_connector": "NixlConnector"},
                    ]
                },
            },
            NEW,
            {},
            "the KV connector NixlConnector is not known",
        ),
        (
            {
                "transfer_kv_connector": "OffloadingConnector",
                "transfer_kv_connector_extra_config": {"canonical_layout": True},
            },
            NEW,
            {},
            "canonical_layout divides pages by heads",
        ),
        ({}, NEW, {"calibrate": True}, "pass --enforce-eager"),
        ({"model_use_mla": True}, OLD, {}, "(MLA) need vLLM 0.32 or 0.33: choose another"),
        ({"model_use_mla": True, "model_is_hybrid": True}, NEW, {}, "hybrid models with latent"),
        ({"model_use_mla": True}, NEW, {"centers": "file"}, '"centers" has no meaning for latent'),
        (
            {"model_use_mla": True},
            NEW,
            {"calibrate": True},
            '"calibrate" has no meaning for latent',
        ),
    ],
)
def test_engines_that_are_refused(changes, interface, settings, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        limits.check_engine(engine_config(**changes), interface, Settings(**settings))


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("ExampleConnector", {}),
        ("OffloadingConnector", {"spec_name": "TieringOffloadingSpec"}),
        ("SimpleCPUOffloadConnector", {"kv_offload_backend": "disk"}),
        ("MultiConnector", {"connectors": [{"kv_connector": "ExampleConnector"}]}),
    ],
)
def test_learned_centers_stay_in_their_process(name, extra):
    config = engine_config(transfer_kv_connector=name, transfer_kv_connector_extra_config=extra)
    limits.check_engine(config, NEW, Settings())
    with pytest.raises(ValueError, match="give a file of centers, or set"):
        limits.check_learning(config)


@pytest.mark.parametrize("name", [None, "OffloadingConnector", "SimpleCPUOffloadConnector"])
def test_centers_may_be_learned(name):
    limits.check_learning(engine_config(transfer_kv_connector=name))


@pytest.mark.parametrize("name", ["Mine", "OffloadingConnector"])
def test_connectors_of_the_user(name):
    """Nothing is known of them, even if they are called as one of vLLM's."""
    own = {"transfer_kv_connector": name, "transfer_kv_connector_module_path": "mine"}
    limits.check_engine(engine_config(**own), NEW, Settings())
    with pytest.raises(ValueError, match=f"connector {name} may take pages to another process"):
        limits.check_learning(engine_config(**own))


# ---- centers of the first prompt


def step(*lengths):
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return SimpleNamespace(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        num_reqs=len(lengths),
        max_query_len=max(lengths),
    )


def test_the_first_step_teaches():
    learning = Learning()
    assert "first prompt's 16 tokens" in learning.see(step(10, 3, 14), 1)
    assert learning.tokens.tolist() == [*range(4, 10), *range(17, 27)]
    assert learning.see(step(100), 1) is None  # and no other one
    assert len(learning.tokens) == 16


@pytest.mark.parametrize(
    ("lengths", "graphs", "least"), [([7], 1, 8), ([8] * 10, 8, 9), ([5, 3], 16, 17)]
)
def test_a_first_step_that_teaches_nothing(lengths, graphs, least):
    """Too few tokens; or a step that vLLM may replay, in which no layer can learn."""
    learning = Learning()
    said = learning.see(step(*lengths), graphs)
    assert f"too short to learn centers from ({max(lengths)} tokens, needed: {least})" in said
    assert f"Give a file of centers, or let the first prompt have {least} tokens or more" in said
    assert learning.decided and learning.tokens is None
    assert "are the mean keys of" in Learning().see(step(least), graphs)
    learning.see(step(100), graphs)
    assert learning.tokens is None


@pytest.mark.parametrize("method", ["load_model", "elastic_ep_execute", "_dummy_run"])
@pytest.mark.parametrize(
    ("module", "decides"), [("vllm.v1.worker.gpu_worker", False), ("somebody.else", True)]
)
def test_warm_up_teaches_nothing(module, method, decides):
    """A worker that joins a running engine (elastic expert parallelism) warms up in methods of its
    own."""
    learning = Learning()
    names = {"__name__": module, "see": lambda: learning.see(step(100), 1)}
    exec(f"def {method}(): return see()", names)
    names[method]()
    assert learning.decided == decides
