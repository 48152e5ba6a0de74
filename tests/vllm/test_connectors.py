"""KV connectors: pages that leave the cache and come back, or come to another engine."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm")

from tests.vllm.harness import (
    ON_GPU,
    engine,
    generate,
    metric,
    outputs,
    prompt,
    save_llama,
)
from tests.vllm.reference import Reference

TOKENS = 12
PAGE = 32
PRESET = "k8v8" if ON_GPU else "k5v4u"
SETTINGS = {"preset": PRESET, "learn": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_llama(folder)


def first_pages(llm, count):
    """The bytes of the first pages that vLLM hands out, 1 .. count, of every layer."""
    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return [layer.kv_cache[1 : 1 + count].cpu() for layer in context.values()]


def test_pages_go_to_another_engine(model, tmp_path):
    folder, llama = model
    reference = Reference(llama, PRESET)
    p = prompt(100, seed=100)
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    options = {"kv_transfer_config": connector, "block_size": PAGE, "disable_log_stats": False}
    answers, found = [], []
    for _ in range(2):
        with engine(folder, SETTINGS, **options) as llm:
            answers += generate(llm, [p], TOKENS)
            found.append(first_pages(llm, 3))
            hits = metric(llm, "vllm:external_prefix_cache_hits")
    assert hits == 96
    for stored, loaded in zip(*found, strict=True):
        assert stored.any() and stored.equal(loaded)
    reference.check(p, answers[0])
    reference.check(p, answers[1], chunks=[96])


def test_pages_come_back_from_an_offloading_store(model):
    folder, llama = model
    reference = Reference(llama, PRESET)
    extra = {"cpu_bytes_to_use": 16 << 20}
    if not ON_GPU:
        extra |= {"spec_name": "Spec", "spec_module_path": "tests.vllm.copies"}
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    options = {
        "kv_transfer_config": connector,
        "block_size": PAGE,
        "num_gpu_blocks_override": 12,
        "max_model_len": 256,
        "disable_log_stats": False,
    }
    p = prompt(100, seed=100)
    with engine(folder, SETTINGS, **options) as llm:
        (first,) = generate(llm, [p], TOKENS)
        for seed in range(3):  # whose pages take the place of the first one's
            generate(llm, [prompt(200, seed=seed)], 2)
        (again,) = outputs(llm, [p], TOKENS)
        assert metric(llm, "vllm:prefix_cache_hits") == 0  # of pages that were still there
    assert again.num_cached_tokens == 96
    reference.check(p, first)
    reference.check(p, again.outputs[0].token_ids, chunks=[96])


def test_connectors_that_are_refused(model):
    folder, _ = model
    for name, settings, text in (
        ("DecodeBenchConnector", SETTINGS, "DecodeBenchConnector is not known to move packed"),
        ("ExampleConnector", {}, "may take pages to another process"),
    ):
        connector = {"kv_connector": name, "kv_role": "kv_both"}
        with (
            pytest.raises(Exception, match=text),
            engine(folder, settings, kv_transfer_config=connector),
        ):
            pass
