"""What happens before the first token: names, the start-up line, refusals."""

import copy
import importlib
import re
import sys
from types import SimpleNamespace

import pytest

vllm = pytest.importorskip("vllm", reason="needs vLLM: make vllm")

import transformers
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.vllm.harness import ON_GPU, engine, generate, prompt, save_llama, told
from tests.vllm.steps import vllm_started
from torch_turboquant.centers import FILE_NAME
from torch_turboquant.integrations import vllm as plugin
from torch_turboquant.integrations.vllm.adapter import INTERFACE
from torch_turboquant.integrations.vllm.backend import TurboQuantBackend
from torch_turboquant.integrations.vllm.plan import latest_plan, plan_of

# Without a GPU vLLM knows one name, which the plug-in takes; unasked, vLLM chooses its own backend.
OURS, OWN_NAME, THEIRS = "CpuBackend", "CpuBackend", "CPUAttentionBackend"
if ON_GPU:
    OURS, OWN_NAME, THEIRS = "TurboQuantBackend", "OwnNameBackend", "FlashAttentionBackend"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder, head_dim=128, num_hidden_layers=2)
    return folder


def backend_of(llm):
    (layer, *_) = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return layer.attn_backend.__name__


def test_the_start_up_line(folder):
    settings = {"preset": "k5v4u", "layers": {"-1": "k8v8"}, "seed": 5}
    options = {"dtype": "bfloat16", "block_size": 64}
    with told() as lines, engine(folder, settings, **options) as llm:
        assert backend_of(llm) == OURS
    assert lines == [
        "TurboQuant: preset k5v4u (layers -1: k8v8), 424 bytes per token and layer on this rank, "
        "16 of them for exact first tokens; 2.42 times the tokens of bfloat16 fit. Centers: to be "
        "learned from the first prompt; seed 5; format 1"
    ]


def test_a_version_that_was_not_tested(folder, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", f"{vllm.__version__.partition('+')[0]}.post1")
    with told() as lines, engine(folder, {}, dtype="bfloat16"):
        pass
    assert len(lines) == 2 and "post1 has not been tested; tested: " in lines[1]


def test_the_start_up_line_without_exact_first_tokens(folder):
    with told() as lines, engine(folder, {"first_token": "codes"}, dtype="bfloat16"):
        pass
    assert lines[0].startswith(
        "TurboQuant: preset near-lossless, 296 bytes per token and layer on this rank; 3.46 times"
    )


def test_nothing_happens_unasked(folder):
    with told() as lines, engine(folder, None, block_size=32) as llm:
        assert backend_of(llm) == THEIRS
        assert len(generate(llm, [prompt(9, seed=9)], 2)[0]) == 2
    assert lines == []


def test_another_version_is_refused_only_where_the_backend_is_chosen(monkeypatch):
    importlib.import_module("vllm.v1.attention.backends.cpu_attn")  # keeps what is replaced below
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.delitem(sys.modules, f"{plugin.__name__}.adapter")  # as in a new process
    monkeypatch.delattr(plugin, "adapter")
    plugin.register()
    text = re.escape("torch_turboquant: vLLM 0.99.0 is installed; this torch_turboquant supports")
    with pytest.raises(ValueError, match=text):
        AttentionBackendEnum.CUSTOM.get_class()

    def on_a_cpu(chosen):
        attention = SimpleNamespace(backend=chosen)
        config = SimpleNamespace(attention_config=attention, additional_config={})
        monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: config)
        return AttentionBackendEnum.CPU_ATTN.get_class()

    with pytest.raises(ValueError, match=text):
        on_a_cpu(AttentionBackendEnum.CUSTOM)
    assert on_a_cpu(None).__name__ == "CPUAttentionBackend"


@pytest.mark.skipif(not INTERFACE.own_name, reason="this vLLM has no names for others' backends")
def test_the_own_name(folder):
    with engine(folder, {}, attention_backend="TORCH_TURBOQUANT") as llm:
        assert backend_of(llm) == OWN_NAME


@pytest.mark.skipif(not INTERFACE.own_dtype, reason="this vLLM has no dtypes of others' caches")
def test_presets_named_by_the_dtype(folder):
    with told() as lines, engine(folder, {}, kv_cache_dtype="tq_k4v2"):
        pass
    assert lines[0].startswith("TurboQuant: preset k4v2, ")


def test_a_model_that_is_not_causal_is_refused_when_it_starts(tmp_path):
    """HRM-Text, whose prompts' tokens see each other."""
    shape = {"vocab_size": 128, "hidden_size": 64, "num_attention_heads": 2}
    config = transformers.HrmTextConfig(
        **shape, num_hidden_layers=1, architectures=["HrmTextForCausalLM"], eos_token_id=None
    )
    config.save_pretrained(tmp_path)
    text = "attention that is not causal is not supported: choose another"
    with pytest.raises(Exception, match=text):
        with engine(tmp_path, {}, load_format="dummy"):
            pass


def test_block_sizes(folder):
    """Codes do not depend on pages. Blocks of 256 tokens are two pages each."""
    answers = []
    for block_size in (16, 32, 64, 128, 256):
        with engine(folder, {"learn": False}, block_size=block_size) as llm:
            answers.append(generate(llm, [prompt(300, seed=3)], 8))
            layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
            shapes = {layer.kv_cache.shape[2] for layer in layers.values()}
            assert shapes == {min(block_size, 128)}
    assert answers == answers[:1] * 5


@pytest.mark.parametrize(
    ("settings", "options", "text"),
    [
        ({"preset": "k9"}, {}, "unknown preset 'k9'"),
        ({"presets": "k8v8"}, {}, "unknown key 'presets'"),
        ({"layers": {"2": "k8v8"}}, {}, "names layer 2, the model has 2 layers"),
        ({"calibrate": True}, {"enforce_eager": False}, "pass --enforce-eager"),
        # vLLM 0.33 itself refuses fp8 on most CPUs.
        ({}, {"kv_cache_dtype": "fp8"}, "pass --kv-cache-dtype bfloat16|fp8 is not supported by"),
        ({}, {"block_size": 24}, "block size|block_size"),
        ({}, {"kv_cache_dtype_skip_layers": ["0"]}, "give layers presets of their own"),
        pytest.param(
            *({}, {"attention_backend": "CPU_ATTN"}, "pass --attention-backend CUSTOM"),
            marks=pytest.mark.skipif(ON_GPU, reason="a name of CPUs"),
        ),
    ],
)
def test_refusals_when_an_engine_starts(folder, settings, options, text):
    with pytest.raises(Exception, match=text), engine(folder, settings, **options):
        pass


def test_a_calibration_does_not_read_the_file_that_it_replaces(tmp_path):
    save_llama(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(b"damaged")
    settings = {"preset": "k8v8", "learn": False, "calibrate": True}
    with told() as lines, engine(tmp_path, settings, enforce_eager=True):
        pass
    assert "Centers: none" in lines[0]


def test_bytes_follow_the_block_size(folder, tmp_path):
    """vLLM asks for them as soon as drafts are loaded, when its block size may be 16 still."""
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with vllm_started(tmp_path) as configure:
        config = configure({"preset": "k5v4u"}, block_size=16)
        plan = plan_of(config)
        packed = plan.config(0, 128)
        for block_size in (16, 64, 128):
            config.cache_config.block_size = block_size
            row = 2 * 128 * 4 // block_size
            assert plan.bytes_per_token(packed) == packed.bytes_per_token + row


def test_drafts_without_a_model_leave_the_served_one_its_settings(folder, tmp_path):
    """vLLM calls the served model the one that drafts, too."""
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with vllm_started(tmp_path) as configure:
        config = configure({"layers": {"0": "k8v8"}}, speculative_config=drafts)
        assert config.speculative_config.draft_model_config is config.model_config
        plan = plan_of(config)
        assert plan.config(0, 128).key_bits == 8
        assert plan.learns(0)


@pytest.mark.skipif(INTERFACE.page_bytes == "layer", reason="refused: needs vLLM 0.28 or newer")
def test_bytes_of_a_hybrid_model_that_has_a_draft_model(folder, tmp_path, monkeypatch):
    """vLLM makes blocks of a hybrid model larger than those that it has counted with, after it has
    made the draft model, whose plan is the one that is asked."""
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with vllm_started(tmp_path) as configure:
        config = configure({"preset": "k5v4u"}, block_size=64)
        hybrid = config.model_config
        monkeypatch.setattr(type(hybrid), "is_hybrid", property(lambda model: model is hybrid))
        drafting = vllm.config.replace(config, model_config=copy.copy(hybrid))
        plans = plan_of(config), plan_of(drafting)
        assert latest_plan() is plans[1] and plans[0].engine is plans[1].engine
        asked = TurboQuantBackend.bytes_per_token(128)
        config.cache_config.block_size = drafting.cache_config.block_size = 9 * 128
        packed = plans[0].config(0, 128)
        assert asked == packed.bytes_per_token + 2 * 128 * 4 // 64
        assert [plan.bytes_per_token(packed) for plan in plans] == [asked] * 2
        assert TurboQuantBackend.bytes_per_token(128) == asked


def test_alibi_is_refused(tmp_path):
    config = transformers.BloomConfig(vocab_size=128, hidden_size=64, n_layer=1, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="ALiBi is not supported"), engine(tmp_path, {}):
        pass
