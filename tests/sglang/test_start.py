"""What an engine is started with: settings, memory, hooks, and what is refused."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode

sglang = pytest.importorskip("sglang", reason="needs SGLang: make sglang")

from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, ServerArgs

from tests.sglang.harness import ON_GPU, engine, told
from tests.vllm.harness import prompt, save_llama
from torch_turboquant.integrations.sglang import hooks, limits, register
from torch_turboquant.integrations.sglang.plan import MOST_REQUESTS, Plan
from torch_turboquant.integrations.sglang.settings import Settings, parse
from torch_turboquant.integrations.sglang.steps import DeviceRings, Steps
from torch_turboquant.integrations.sglang.versions import TESTED, check_version

DRAFTS = SimpleNamespace(kv_cache_dtype="auto", speculative_algorithm="NGRAM")
GEMMA_3 = {"hf_config": SimpleNamespace(architectures=["Gemma3ForConditionalGeneration"])}
GEMMA_4 = {"hf_config": SimpleNamespace(architectures=["Gemma4ForCausalLM"])}
BOTH_WAYS = SimpleNamespace(use_bidirectional_attention="vision")
ONE_WAY = SimpleNamespace(use_bidirectional_attention=None)  # of smaller Gemma 4
THEIR_BACKEND = {"speculative_draft_attention_backend": "triton"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder, head_dim=64)
    return folder


# ---- settings


def test_everything_that_can_be_set():
    given = {
        "preset": "k4v4u",
        "layers": {"0": "k8v8", "-1": "k8v4"},
        "centers": "centers.safetensors",
        "seed": 3,
        "first_token": "codes",
        "window": 32,
    }
    assert parse("turboquant", json.dumps({"turboquant": given, "rope_theta": 1e6})) == Settings(
        preset="k4v4u",
        layers=((0, "k8v8"), (-1, "k8v4")),
        centers="centers.safetensors",
        seed=3,
        first_token="codes",
        window=32,
    )


@pytest.mark.parametrize("given", ["{}", '{"rope_theta": 1}', '{"turboquant": {}}', None, ""])
def test_defaults(given):
    settings = parse("turboquant", given)
    assert settings == Settings("near-lossless")
    config = settings.config(64)
    assert (config.key_bits, config.sink_tokens, config.recent_window) == (5, 1, 64)


def test_presets_named_by_the_backend():
    assert parse("turboquant:k4v2", None).preset == "k4v2"
    assert parse("turboquant:k4v2", '{"turboquant": {"preset": "k4v2"}}').preset == "k4v2"
    assert parse("turboquant:smallest", None).config(64).recent_window == 40
    with pytest.raises(ValueError, match="--attention-backend turboquant:k4v2 and preset 'k8v8' d"):
        parse("turboquant:k4v2", '{"turboquant": {"preset": "k8v8"}}')


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"presett": "k8v8"}, ValueError, r"unknown key 'presett' \(did you mean 'preset'\?\)"),
        ({"preset": "k9v9"}, ValueError, "unknown preset 'k9v9'"),
        ({"preset": 4}, TypeError, "preset is 4, of type int"),
        ({"window": -1}, ValueError, "window is -1, supported: 0 and more"),
        ({"window": True}, TypeError, "window is True, of type bool"),
        ({"window": False}, TypeError, "window is False, of type bool"),
        ({"seed": False}, TypeError, "seed is False, of type bool"),
        ({"first_token": "both"}, ValueError, "first_token is 'both', supported: 'exact' and"),
        ({"layers": {"x": "k8v8"}}, ValueError, "layers names 'x', expected numbers"),
        ([], TypeError, "expected an object such as"),
    ],
)
def test_settings_that_are_refused(given, error, text):
    with pytest.raises(error, match=text):
        parse("turboquant", json.dumps({"turboquant": given}))


# ---- versions and hooks


def test_versions():
    for version in (*TESTED, "0.5.17.post1", "0.5.99+cu130"):
        check_version(version)
    for version in ("0.5.16", "0.4.9", "0.6.0", "dev"):
        with pytest.raises(ImportError, match=f"SGLang {version} is installed; this torch_turboqu"):
            check_version(version)


def test_versions_that_have_not_been_tested(folder, monkeypatch):
    said = {}
    for version in (TESTED[-1], f"{TESTED[0]}+cu130", "0.5.99"):
        monkeypatch.setattr(sglang, "__version__", version)
        with told() as lines, engine(folder):
            said[version] = [line for line in lines if "has not been tested" in line]
    (line,) = said.pop("0.5.99")
    assert line.startswith(
        f"torch_turboquant: SGLang 0.5.99 has not been tested; tested: {TESTED[0]}"
    )
    assert not any(said.values())


def test_names_of_the_backend():
    load_plugins()
    assert {"turboquant", "turboquant:k5v4u", "turboquant:balanced"} <= {*ATTENTION_BACKEND_CHOICES}
    assert len(ATTENTION_BACKEND_CHOICES) == len({*ATTENTION_BACKEND_CHOICES})


def test_registering_again_adds_nothing():
    load_plugins()
    before = {target: [*HookRegistry._hooks[target]] for target in hooks.HOOKS}
    register()
    assert {target: HookRegistry._hooks[target] for target in hooks.HOOKS} == before
    assert all(len(found) == 1 for found in before.values())


def test_hooks_are_in_place():
    load_plugins()
    hooks.check("0")


@pytest.mark.parametrize("target", [*hooks.HOOKS, hooks._first(hooks.SETTLING)])
def test_a_hook_that_is_not_there(target, monkeypatch):
    load_plugins()
    path, _, method = target.rpartition(".")
    owner = hooks._resolve(path)
    monkeypatch.setattr(owner, method, vars(owner)[method].__wrapped__)
    with pytest.raises(RuntimeError, match=re.escape(f"does not ask the plug-in in {target}: ins")):
        hooks.check("0")


def test_a_tree_with_an_answer_of_its_own(monkeypatch):
    load_plugins()
    own = staticmethod(lambda *_: 0)
    monkeypatch.setattr(RadixCache, hooks.PREFIX_METHOD, own, raising=False)
    with pytest.raises(RuntimeError, match=r"RadixCache\.swa_reprefill_tail_tokens"):
        hooks.check("0")


def test_a_method_that_is_gone(monkeypatch):
    load_plugins()
    monkeypatch.delattr(KVCacheConfigurator, "config_from_budget")
    with pytest.raises(RuntimeError, match=r"KVCacheConfigurator\.config_from_budget"):
        hooks.check("0")


# ---- memory


def plan_of_8b(preset: str, **settings) -> Plan:
    """The plan of a model of the shape of Llama-3.1-8B in bfloat16, without an engine."""
    plan = object.__new__(Plan)
    plan.settings = Settings(preset, **settings)
    plan.page_size, plan.dtype, plan.head_dim, plan.kv_heads = 64, torch.bfloat16, 128, 8
    plan.own_layers, plan.is_hybrid, plan.requested = range(32), False, None
    plan.drafts = plan.layers_of_drafts = 0
    config = replace(plan.settings.config(128), page_size=64)
    plan.configs = [config] * 32
    plan.sinks, plan.window = config.sink_tokens, config.recent_window
    return plan


@pytest.mark.parametrize(("preset", "factor"), [("k4v4", 3.6), ("k4v2", 4.3)])
def test_tokens_that_fit(preset, factor):
    """With exact first tokens, and exact tails of as many requests as fit into 1/64."""
    plan = plan_of_8b(preset)
    budget = 72 << 30
    reserved = plan.reserve(budget)
    assert reserved <= budget / 64
    assert plan.max_requests > 100
    plain = budget // (2 * 128 * 8 * 32 * 2)
    assert (budget - reserved) // plan.bytes_per_token >= factor * plain


def test_requests_that_were_asked_for():
    plan = plan_of_8b("k4v4")
    plan.requested = 256
    each = 65 * 2 * 128 * 8 * 32 * 2
    assert plan.bytes_per_request == each
    assert plan.reserve(72 << 30) == 257 * each
    assert plan.max_requests == 256
    plan.requested = 10_000
    with pytest.raises(ValueError, match=r'exact tails of 10000 requests take .* "window" to 0'):
        plan.reserve(72 << 30)


def test_cells_with_drafts():
    """SGLang multiplies a cell by the layers of both models and divides by those of one."""
    plan = plan_of_8b("k4v4")
    assert plan.cell_size == plan.bytes_per_token
    plan.layers_of_drafts = 1
    needed = plan.bytes_per_token + 2 * 128 * 8 * 2
    assert needed <= int(plan.cell_size * (1 + 1 / 32)) < needed + 2


def test_no_window_needs_no_memory():
    plan = plan_of_8b("k4v4", window=0)
    assert plan.reserve(72 << 30) == 0
    assert plan.max_requests == MOST_REQUESTS
    plan.requested = 2 * MOST_REQUESTS
    assert plan.reserve(72 << 30) == 0
    assert plan.max_requests == 2 * MOST_REQUESTS


def test_the_engine_counts_exact_tails(folder):
    """What SGLang allocates for a budget is not more than that."""
    budget = 8 << 20
    tokens = {}
    for window in (0, 64):
        options = {"max_total_tokens": None, "max_running_requests": 4, "page_size": 64}
        profile = "_profile_available_bytes"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KVCacheConfigurator, profile, lambda kvc, before: budget)
            with told() as lines, engine(folder, {"window": window}, **options) as loop:
                tokens[window] = loop.scheduler.max_total_num_tokens
                assert loop.scheduler.max_running_requests == 4
                rings = [layer.ring for layer in loop.backend.layers.values()]
                memory = [*loop.pool.pages, *(ring for ring in rings if ring is not None)]
                taken = sum(part.numel() * part.element_size() for part in memory)
                page = loop.pool.get_kv_size_bytes() // len(loop.pool.pages[0])
        assert budget - 2 * page < taken <= budget + page  # page 0 is SGLang's
        assert f"{tokens[window]:,} tokens fit" in lines[0]
        assert ("Exact tails: the last 64 tokens of 4 requests" in lines[0]) == (window > 0)
    assert tokens[64] < tokens[0]


class Saver(TorchFunctionMode):
    """A memory saver that notes what is made for the cache."""

    enabled = False

    def __init__(self):
        super().__init__()
        self.made = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function is torch.zeros:
            self.made.add(found.data_ptr())
        return found

    def region(self, tag, **_):
        return self if tag == GPU_MEMORY_TYPE_KV_CACHE else nullcontext()


def test_a_memory_saver_has_pages_and_exact_tails(folder, monkeypatch):
    saver = Saver()
    create = "sglang.srt.mem_cache.memory_pool.TorchMemorySaverAdapter.create"
    monkeypatch.setattr(create, lambda enable: saver)
    with engine(folder, {"window": 64}) as loop:
        rings = [layer.ring for layer in loop.backend.layers.values()]
        assert {part.data_ptr() for part in (*loop.pool.pages, *rings)} <= saver.made


# ---- what is refused


@pytest.mark.parametrize("name", [*limits.OFF, *limits.FIXED])
def test_arguments_that_this_version_has(name):
    """An argument that SGLang has renamed would no longer be refused."""
    if tuple(map(int, sglang.__version__.split(".")[:3])) < limits.SINCE.get(name, (0,)):
        return
    assert hasattr(ServerArgs, name) or name in ServerArgs.__dataclass_fields__


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"page_size": 1}, "--page-size is 1, supported: 16, 32, 64, 128: pass --page-size 64"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype is fp8_e5m2, but pages"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache is not supported"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode is prefill, supported: null"),
        ({"speculative_algorithm": "DFLASH"}, "--speculative-algorithm is DFLASH, supported: NGR"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 10},
            "drafts are trees, with 10 guesses .*: pass --speculative-ngram-max-bfs-breadth 1",
        ),
        (
            {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4, **THEIR_BACKEND},
            "drafts are trees, with 4 guesses .*: pass --speculative-eagle-topk 1",
        ),
        (
            {"speculative_algorithm": "EAGLE", "speculative_draft_attention_backend": None},
            "the model that drafts has keys of its own .* --speculative-draft-attention-backend",
        ),
        (
            {"enable_unified_cache_external_linker": True},
            "--enable-unified-cache-external-linker is not supported, because its pages would have",
        ),
        ({"attn_dp_size": 2}, "--attn-dp-size is 2, supported: 1, because only tensor parallelism"),
        ({"pp_size": 2}, "--pp-size is 2, supported: 1, because only tensor parallelism"),
    ],
)
def test_arguments_that_are_refused(options, text):
    plain = {
        "page_size": 64,
        "kv_cache_dtype": "auto",
        "attention_backend": "turboquant",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "speculative_algorithm": None,
        "speculative_eagle_topk": None,
        "speculative_draft_attention_backend": None,
    }
    assert limits.wrong_arguments(SimpleNamespace(**plain)) == []
    (found,) = limits.wrong_arguments(SimpleNamespace(**{**plain, **options}))
    assert re.match(text, found)


@pytest.mark.parametrize("settings", [None, {"preset": "k8v8"}])
def test_a_model_that_sglang_gives_another_backend(tmp_path, settings):
    """HRM-Text, whose prompts' tokens see each other, has Triton's whatever is asked for."""
    shape = {"vocab_size": 128, "hidden_size": 64, "num_attention_heads": 4}
    transformers.HrmTextConfig(**shape, architectures=["HrmTextForCausalLM"]).save_pretrained(
        tmp_path
    )
    text = "SGLang has put the attention backend triton in the place of turboquant, as the only one"
    with pytest.raises(ValueError, match=text), engine(tmp_path, settings):
        pass


@pytest.mark.parametrize("algorithm", limits.DRAFTING)
def test_drafts_that_are_supported(algorithm):
    args = {"speculative_algorithm": algorithm, "speculative_eagle_topk": 1, **THEIR_BACKEND}
    assert limits.wrong_drafts(SimpleNamespace(**args)) == []


def test_two_backends_are_refused():
    args = SimpleNamespace(
        page_size=64,
        kv_cache_dtype="auto",
        attention_backend="turboquant",
        prefill_attention_backend="fa3",
        decode_attention_backend=None,
        speculative_algorithm=None,
    )
    (found,) = limits.wrong_arguments(args)
    assert found.startswith("prefill has the attention backend fa3 and decode turboquant")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"use_mla_backend": True}, r"latent attention \(MLA\) is not supported: choose another"),
        (
            {"mambaish_config": 1},
            "models with Mamba, or linear attention other than by gated delta",
        ),
        (
            {"mambaish_config": 1, "hybrid_gdn_config": 1, "args": DRAFTS},
            "drafts for a model with linear attention are not supported",
        ),
        (
            {"is_hybrid_swa": True, "is_hybrid_swa_compress": True},
            "layers with sliding windows whose heads differ from those of other layers are not",
        ),
        (
            {"is_hybrid_swa": True, "full_attention_layer_ids": []},
            "all of whose layers have sliding windows .*: pass --disable-hybrid-swa-memory",
        ),
        (
            {"is_hybrid_swa": True, "args": DRAFTS},
            "drafts beside a pool of its own .*: pass --disable-hybrid-swa-memory",
        ),
        ({"post_capture_kv_active": True}, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING is not supported"),
        ({"model_dtype": torch.float64}, "the model computes in torch.float64: pass --dtype"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "the checkpoint asks .* --kv-cache-dtype bf16"),
        (
            {**GEMMA_4, "swa_head_dim": 100, "swa_v_head_dim": 100},
            "head_dim is 100, supported in page records: .*: choose another",
        ),
        (
            {**GEMMA_4, "is_multimodal": True, "hf_text_config": BOTH_WAYS},
            "pictures whose tokens see each other are not .* enable_multimodal=False, which then",
        ),
        (
            {**GEMMA_3, "is_multimodal": True},
            "pictures whose tokens see each other are not .* where --enable-multimodal is left out",
        ),
        ({"head_dim": 100}, "head_dim is 100, supported in page records: .*: choose another"),
        ({"v_head_dim": 128}, "keys have 64 channels and values 128: choose another"),
        ({"is_generation": False}, "models that do not generate by a decoder"),
        (
            {"layer_info": SimpleNamespace(num_effective_layers=4)},
            "layers with several attentions are not supported: choose another",
        ),
    ],
)
def test_models_that_are_refused(changes, text):
    model = {"head_dim": 64, "v_head_dim": 64, "is_generation": True, "is_encoder_decoder": False}
    model["full_attention_layer_ids"], model["num_hidden_layers"] = [1], 2
    model["swa_head_dim"] = model["swa_v_head_dim"] = 64
    model["hf_config"] = SimpleNamespace(architectures=["MiMoV2ForCausalLM"])
    kvc = {
        "use_mla_backend": False,
        "mambaish_config": None,
        "hybrid_gdn_config": None,
        "is_hybrid_swa": False,
        "is_hybrid_swa_compress": False,
        "post_capture_kv_active": False,
        "layer_info": SimpleNamespace(num_effective_layers=2),
        "device": "cpu",
        "model_dtype": torch.float32,
        "kv_cache_dtype": torch.float32,
    }
    args = changes.get("args", SimpleNamespace(kv_cache_dtype="auto", speculative_algorithm=None))
    for name, value in changes.items():
        (kvc if name in kvc else model)[name] = value
        if name == "head_dim":
            model["v_head_dim"] = value
        if name == "model_dtype":
            kvc["kv_cache_dtype"] = value
    kvc = SimpleNamespace(**kvc, model_config=SimpleNamespace(**model))
    (found,) = limits.wrong_model(kvc, args)
    assert re.search(text, found)


@pytest.mark.parametrize(
    "model",
    [
        {**GEMMA_3, "is_multimodal": False},
        {**GEMMA_4, "is_multimodal": False, "hf_text_config": BOTH_WAYS},
        {**GEMMA_4, "is_multimodal": True, "hf_text_config": ONE_WAY},
    ],
)
def test_models_without_pictures_that_are_seen_both_ways(model):
    assert not limits.sees_pictures_both_ways(SimpleNamespace(**model))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"attn_type": "encoder_only"}, "encoder_only attention is not supported"),
        ({"is_cross_attention": True}, "cross attention is not supported"),
        ({"pos_encoding_mode": "ALIBI"}, "positions by ALIBI are not supported"),
        ({"logit_cap": 5.0, "logit_capping_method": "sigmoid"}, "a cap by sigmoid is not"),
        ({"use_irope": True}, "attention within chunks of the context is not supported: choose"),
        ({"xai_temperature_len": 9}, "the temperature of queries by position is not"),
        ({"v_head_dim": 32}, "layer 3 has 2 KV heads of 64 and 32 channels, other layers 2 of 64"),
    ],
)
def test_layers_that_are_refused(changes, text):
    plain = {
        "attn_type": "decoder",
        "is_cross_attention": False,
        "pos_encoding_mode": "NONE",
        "logit_cap": 0.0,
        "logit_capping_method": "tanh",
        "xai_temperature_len": -1,
        "qk_head_dim": 64,
        "v_head_dim": 64,
        "tp_k_head_num": 2,
        "layer_id": 3,
    }
    assert limits.wrong_layer(SimpleNamespace(**plain), 2, 64) == []
    (found,) = limits.wrong_layer(SimpleNamespace(**{**plain, **changes}), 2, 64)
    assert found.startswith(text)


def test_presets_of_layers_without_keys():
    presets = {0: "k8v8", 3: "k8v8", -1: "k8v8", -2: "k8v8"}
    (found,) = limits.wrong_layer_presets(presets, (3, 7), 8)
    assert found.startswith(
        '"layers" names -2, 0, which keep no keys and values; those that do are'
    )
    assert limits.wrong_layer_presets({3: "k8v8", -1: "k8v8"}, (3, 7), 8) == []


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ({"7": "k8v8"}, "names layer 7, the model has 3 layers"),
        ({"0": "k8v8", "-3": "k4v2"}, "names layer 0 twice"),
        ({"0": "k8v8", "00": "k4v2"}, "names layer 0 twice"),
    ],
)
def test_layers_that_the_model_does_not_have_once(folder, layers, text):
    """The error has the name of the setting that somebody wrote."""
    with (
        pytest.raises(ValueError, match=f'^turboquant: "layers" {text}'),
        engine(folder, {"layers": layers}),
    ):
        pass


def test_everything_that_is_wrong_is_said_at_once(folder):
    wrong = {"page_size": 1, "enable_streaming_session": True}
    with (
        pytest.raises(ValueError, match=r"--enable-streaming-session is not.*--page-size is 1"),
        engine(folder, **wrong),
    ):
        pass


def test_an_unknown_preset_behind_the_name(folder):
    """The command line has a list of names; sglang.Engine asks nobody."""
    with (
        pytest.raises(ValueError, match="unknown preset 'k9v9'"),
        engine(folder, backend="turboquant:k9v9"),
    ):
        pass


def test_pages_of_the_default_size_are_refused(folder):
    with (
        pytest.raises(ValueError, match=r"--page-size is 1, supported: .*: pass --page-size 64"),
        engine(folder, page_size=None),
    ):
        pass


def test_settings_without_the_backend(folder):
    other = "triton" if ON_GPU else "torch_native"
    with (
        pytest.raises(ValueError, match="there are settings, but another attention backend is ch"),
        engine(folder, {"preset": "k4v4u"}, backend=other),
    ):
        pass


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_steps_of_another_backend(folder, phase):
    """Where nobody has written settings, the error does not speak of any."""
    other = "triton" if ON_GPU else "torch_native"
    options = {f"{phase}_attention_backend": "turboquant"}
    with (
        pytest.raises(ValueError, match=f"--attention-backend is {other}, but that of prefill or"),
        engine(folder, backend=other, **options),
    ):
        pass


def test_another_backend_is_left_alone(folder):
    other = "triton" if ON_GPU else "torch_native"
    with engine(folder, backend=other) as loop:
        (answer,) = loop.generate([prompt(20, seed=1)], 4)
        (again,) = loop.generate([prompt(40, seed=1)], 4)
        assert loop.scheduler.tree_cache.swa_reprefill_tail_tokens() == 0
    assert len(answer.tokens) == len(again.tokens) == 4
    assert type(loop.pool).__name__ == "MHATokenToKVPool"


def test_who_reads_keys_is_refused(folder):
    with engine(folder) as loop:
        for call in (loop.pool.get_key_buffer, loop.pool.get_value_buffer, loop.pool.get_kv_buffer):
            with pytest.raises(NotImplementedError, match="pages hold codes, and only the attenti"):
                call(0)


# ---- steps


def batch(rows, lengths, slots):
    """What SGLang's graphs and steps hand over of a decode step."""
    return SimpleNamespace(
        batch_size=len(rows),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(lengths),
        out_cache_loc=torch.tensor(slots),
    )


def test_padding_of_a_graph_reads_and_stores_nothing():
    """A graph of four sequences with two: rows behind them have number 0, whatever they say."""
    table = torch.zeros(6, 130, dtype=torch.int32)
    table[3] = torch.arange(64 * 7, 64 * 7 + 130)
    table[5] = torch.arange(64 * 2, 64 * 2 + 130)
    steps = Steps(table, 64)
    memory = steps.allocate(8)
    memory.seq_lens.fill_(99)
    memory.block_table.fill_(99)
    step = steps.part(memory, 4)
    addresses = [getattr(step, name).data_ptr() for name in ("rows", "seq_lens", "slots")]
    steps.fill(step, batch([3, 5, 0, 0], [70, 10, 1, 1], [64 * 7 + 69, 64 * 2 + 9, 0, 0]))
    assert step.rows.tolist() == [3, 5, -1, -1]
    assert step.seq_lens.tolist() == [70, 10, 0, 0]
    assert step.slots.tolist() == [64 * 7 + 69, 64 * 2 + 9, -1, -1]
    assert step.block_table[:2].tolist() == [[7, 8, 9], [2, 3, 4]]
    assert step.first_pages.tolist() == [7, 2, 0, 0]
    assert addresses == [getattr(step, name).data_ptr() for name in ("rows", "seq_lens", "slots")]
    memory.slots.fill_(99)  # before a graph SGLang has slots of the batch alone
    steps.fill(step, batch([3, 5, 0, 0], [70, 10, 1, 1], [64 * 7 + 69, 64 * 2 + 9]))
    assert memory.slots.tolist() == [64 * 7 + 69, 64 * 2 + 9, -1, -1, *[99] * 4]
    alone = steps.decode(batch([3, 5], [70, 10], [64 * 7 + 69, 64 * 2 + 9]))
    for name in ("rows", "seq_lens", "slots", "block_table", "first_pages"):
        assert torch.equal(getattr(alone, name), getattr(step, name)[:2])


def extend(rows, prefix):
    return SimpleNamespace(
        req_pool_indices=torch.tensor(rows), extend_prefix_lens=torch.tensor(prefix)
    )


def test_rings_know_whose_they_are():
    pool = SimpleNamespace(req_generation=torch.zeros(5, dtype=torch.int64))
    rings = DeviceRings(pool, 1, 64, torch.device("cpu"))

    def see(rows, prefix, new=()):
        for row in new:
            pool.req_generation[row] += 1
        rings.see(extend(rows, prefix))
        assert rings.valid[:, 0].tolist() == [1] * 5
        return rings.valid[rows, 1].tolist()

    assert see([1, 2], [0, 64], new=[1, 2]) == [0, 64]  # a fresh prompt, a prefix of the tree
    assert see([1, 2], [32, 128]) == [0, 64]  # further chunks
    assert see([1, 2], [48, 64], new=[1]) == [48, 64]  # another request in row 1
    pool.req_generation.zero_()  # SGLang's clear()
    assert see([1, 3], [0, 0], new=[1, 3]) == [0, 0]
    assert see([2], [64], new=[2]) == [64]
    assert see([2], [80]) == [64]
