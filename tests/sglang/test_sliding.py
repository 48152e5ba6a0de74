"""Models with sliding windows in some layers, whose pages SGLang keeps in a pool of their own.

That pool has room for fewer tokens: what no window of a running request reaches any more is given
up, and of a prefix of the tree as well when room is wanted (the tree calls such tokens tombstones).
"""

import json

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: make sglang")

import transformers
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

from tests.sglang.harness import (
    ON_GPU,
    check_prefixes,
    check_retraction,
    describe_around_graphs,
    engine,
    replay,
    told,
)
from tests.vllm.harness import prompt, randomise, save
from tests.vllm.reference import Reference

TOKENS = 12
SEEN = 24  # tokens that a sliding layer sees
PRESET, DTYPE = ("k8v8", "bfloat16") if ON_GPU else ("k5v4u", "float32")
LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": len(LAYERS),
    "layer_types": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": SEEN,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


@pytest.fixture
def at_once(monkeypatch):
    """Pages are given up at once, which SGLang otherwise does after 128 decode steps only."""
    monkeypatch.setenv("SGLANG_SWA_EVICTION_INTERVAL", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Mellum without experts."""
    config = transformers.MellumConfig(**SHAPE, mlp_layer_types=["dense"] * len(LAYERS))
    folder = tmp_path_factory.mktemp("mellum")
    return folder, save(randomise(transformers.MellumForCausalLM(config)), folder)


def tombstones(loop, req):
    """Tokens of a running request whose pages of sliding layers have been given up."""
    slots = loop.scheduler.req_to_token_pool.req_to_token[row_of(req), : req.seqlen - 1]
    return int((loop.pool.full_to_swa_index_mapping[slots.long()] == 0).sum())


def row_of(req):
    return (req if hasattr(req, "req_pool_idx") else req.kv).req_pool_idx


@pytest.mark.parametrize("window", [0, 8, 40])
def test_prompts_of_a_batch(model, window):
    folder, mellum = model
    reference = Reference(mellum, PRESET, window=window)
    prompts = [prompt(n, seed=n) for n in (5, 40, 33, 90)]
    settings = {"preset": PRESET, "window": window}
    with told() as lines, engine(folder, settings, dtype=DTYPE) as loop:
        answers = loop.generate(prompts, TOKENS)
        both = loop.pool
        assert [both.full_kv_pool.layers, list(both.swa_kv_pool.layers)] == [[1, 3], [0, 2]]
        assert both.swa_kv_pool.size < both.full_kv_pool.size
    assert "in a pool of 2 layers with sliding windows" in lines[0]
    for p, answer in zip(prompts, answers, strict=True):
        assert len(answer.tokens) == TOKENS
        replay(reference, p, answer)


@pytest.mark.parametrize("window", [0, 16])
def test_decode_steps_as_graphs_describe_them(model, window, at_once):
    """Which here are not recorded. Three of a graph's four sequences; then two and one."""
    folder, mellum = model
    reference = Reference(mellum, PRESET, window=window)
    prompts = [prompt(n, seed=n) for n in (40, 33, 90)]
    settings = {"preset": PRESET, "window": window}
    with engine(folder, settings, dtype=DTYPE, disable_cuda_graph=True) as loop:
        describe_around_graphs(loop, 4)
        reqs = [loop.add(p, tokens) for p, tokens in zip(prompts, (5, 9, 40), strict=True)]
        loop.run()
        answers = [loop.answer(req) for req in reqs]
    for p, answer in zip(prompts, answers, strict=True):
        replay(reference, p, answer)


def test_the_reference_tells_pools_apart(model, monkeypatch):
    """What a sliding layer sees makes a difference, and what it must not see as well."""
    folder, mellum = model
    with engine(folder, {"preset": PRESET, "window": 8}, dtype=DTYPE) as loop:
        (answer,) = loop.generate([prompt(90, seed=90)], 40)
    reference = Reference(mellum, PRESET, window=8)
    replay(reference, prompt(90, seed=90), answer)
    layers = [layer.self_attn for layer in mellum.model.layers]
    sliding = [layer for layer in layers if layer.sliding_window is not None]
    for wrong in (SEEN // 2, SEEN + 1, None):
        # One key more, in the later layer alone, is less than what 16 bits change on a GPU.
        together = ON_GPU and wrong == SEEN + 1
        for some in [sliding] if together else [[layer] for layer in sliding]:
            with monkeypatch.context() as patch, pytest.raises(AssertionError, match="below"):
                for layer in some:
                    patch.setattr(layer, "sliding_window", wrong)
                replay(reference, prompt(90, seed=90), answer)


@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("options", [{}, {"disable_radix_cache": True}, {"page_size": 64}])
def test_prompts_in_chunks(model, options, window, at_once):
    """While a request goes on, sliding layers give up the pages behind its window."""
    folder, mellum = model
    reference = Reference(mellum, "k8v8", window=window)
    prompts = [prompt(n, seed=n) for n in (190, 180)]
    settings = {"preset": "k8v8", "window": window}
    options = {"chunked_prefill_size": 64, "enable_mixed_chunk": True, **options}
    with engine(folder, settings, dtype=DTYPE, **options) as loop:
        reqs, given_up = [loop.add(p, 160) for p in prompts], [0, 0]
        while loop.step() or not all(req.finished() for req in reqs):
            for i, req in enumerate(reqs):
                if req.output_ids and not req.finished():
                    given_up[i] = tombstones(loop, req)
        loop.run()
        answers = [loop.answer(req) for req in reqs]
    assert min(given_up) >= 32
    for p, answer in zip(prompts, answers, strict=True):
        assert sum(call.end - call.begin > 1 for call in answer.calls) > 2
        replay(reference, p, answer)


@pytest.mark.parametrize("window", [16, 40])
def test_prefixes_of_the_tree(model, window):
    folder, mellum = model
    started = engine(folder, {"preset": PRESET, "window": window}, dtype=DTYPE)
    check_prefixes(Reference(mellum, PRESET, window=window), started, TOKENS)


@pytest.mark.parametrize(("window", "cached"), [(0, 96), (16, 80), (40, 48)])
def test_prompts_that_the_tree_has(model, window, cached):
    """Pages of tokens that are computed anew are given up for those of the tree, in both pools."""
    folder, mellum = model
    reference = Reference(mellum, "k8v8", window=window)
    first = prompt(100, seed=1)
    with engine(folder, {"preset": "k8v8", "window": window}, dtype=DTYPE) as loop:
        (source,) = loop.generate([first], TOKENS)
        (answer,) = loop.generate([first], TOKENS)
    assert answer.cached == cached
    replay(reference, first, answer, source.calls)


@pytest.mark.parametrize("window", [0, 16, 40])
@pytest.mark.parametrize("new", [3, 60])
def test_conversations(model, new, window, at_once):
    """A turn continues an answer, whose older pages of sliding layers were given up meanwhile."""
    folder, mellum = model
    reference = Reference(mellum, "k8v8", window=window)
    with engine(folder, {"preset": "k8v8", "window": window}, dtype=DTYPE) as loop:
        first, given_up = loop.add(prompt(40, seed=1), 120), 0
        while loop.step() or not first.finished():
            if first.output_ids and not first.finished():
                given_up = tombstones(loop, first)
        loop.run()
        turn = loop.answer(first)
        asked = [*prompt(40, seed=1), *turn.tokens, *prompt(new, seed=2)]
        (answer,) = loop.generate([asked], TOKENS)
    assert given_up >= 32
    assert answer.cached == min(159, len(asked) - window) // 16 * 16  # 159 tokens are stored
    replay(reference, asked, answer, turn.calls)


def test_prefixes_whose_windows_are_gone(model):
    """Room in the pool of sliding layers is made by giving up windows of the tree.

    The other layers still have all of these prefixes, and nobody may use them.
    """
    folder, mellum = model
    reference = Reference(mellum, "k8v8", window=16)
    firsts = [prompt(100, seed=seed) for seed in range(4)]
    asked = [[*p, *prompt(20, seed=9)] for p in firsts]
    settings = {"preset": "k8v8", "window": 16}
    options = {"max_total_tokens": 1024, "swa_full_tokens_ratio": 0.25}
    with engine(folder, settings, dtype=DTYPE, **options) as loop:
        assert loop.pool.swa_kv_pool.size == 256
        assert loop.pool.full_kv_pool.size == 1024
        sources = [loop.generate([p], 4)[0] for p in firsts]
        assert loop.scheduler.tree_cache.full_evictable_size() > 256
        answers = [loop.generate([p], TOKENS)[0] for p in reversed(asked)][::-1]
    assert answers[-1].cached == 96
    assert answers[0].cached == 0
    for p, answer, source in zip(asked, answers, sources, strict=True):
        replay(reference, p, answer, source.calls)


def test_more_requests_than_the_pool_has_room_for(model):
    """What the pool of sliding layers has no room for waits or is retracted."""
    folder, mellum = model
    reference = Reference(mellum, "k8v8", window=16)
    prompts = [prompt(n, seed=n) for n in (60, 70, 80, 90, 100, 110)]
    settings = {"preset": "k8v8", "window": 16}
    options = {"max_total_tokens": 1024, "swa_full_tokens_ratio": 0.25}
    with engine(folder, settings, dtype=DTYPE, chunked_prefill_size=64, **options) as loop:
        answers = loop.generate(prompts, 60)
    for p, answer in zip(prompts, answers, strict=True):
        assert len(answer.tokens) == 60, answer.reason
        replay(reference, p, answer)


def test_retracted_requests_go_on(model):
    folder, mellum = model
    reference = Reference(mellum, PRESET, window=16)
    started = engine(folder, {"preset": PRESET, "window": 16}, dtype=DTYPE)
    check_retraction(reference, started)


def test_one_pool_gives_the_same_answers(model):
    folder, _ = model
    prompts = [prompt(n, seed=n) for n in (40, 90)]
    settings, found = {"preset": PRESET, "window": 16}, []
    for one_pool in (True, False):
        options = {"dtype": DTYPE, "disable_hybrid_swa_memory": one_pool}
        with engine(folder, settings, **options) as loop:
            assert hasattr(loop.pool, "swa_kv_pool") != one_pool
            found.append([answer.tokens for answer in loop.generate(prompts, 40)])
    assert found[0] == found[1]


def test_the_engine_counts_both_pools(model):
    """What SGLang allocates for a budget is not more than that, with presets of single layers."""
    folder, _ = model
    budget = 8 << 20
    settings = {"preset": "k8v8", "layers": {"0": "k3v2"}, "window": 16}
    for changes in ({}, {"disable_radix_cache": True}):
        options = {"max_total_tokens": None, "max_running_requests": 4, "dtype": DTYPE, **changes}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KVCacheConfigurator, "_profile_available_bytes", lambda *_: budget)
            with told() as lines, engine(folder, settings, **options) as loop:
                both = [loop.pool.full_kv_pool, loop.pool.swa_kv_pool]
                rings = [layer.ring for layer in loop.backend.layers.values()]
                memory = [*rings, *(pages for pool in both for pages in pool.pages)]
                taken = sum(part.numel() * part.element_size() for part in memory)
                page = sum(pages[0].numel() for pool in both for pages in pool.pages)
                sizes = [pool.size for pool in both]
        assert budget - 3 * page < taken <= budget + page  # page 0 is SGLang's
        assert "{:,} tokens fit (and {:,} in a pool".format(*sizes) in lines[0]


def test_drafts_are_refused(model):
    folder, _ = model
    options = {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 4,
        "speculative_ngram_max_bfs_breadth": 1,
    }
    with (
        pytest.raises(ValueError, match=r"drafts beside a pool .* --disable-hybrid-swa-memory"),
        engine(folder, dtype=DTYPE, **options),
    ):
        pass


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """Every head also has a learned sink."""
    shape = {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0}
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    config = transformers.GptOssConfig(**{**SHAPE, **shape}, rope_parameters=rope)
    model = randomise(transformers.GptOssForCausalLM(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 3:
                parameter.normal_(0, 1.3 / parameter.shape[1] ** 0.5)
            elif name.endswith("sinks"):
                parameter.normal_(1, 1)
            elif "bias" in name:
                parameter.zero_()
    folder = tmp_path_factory.mktemp("gpt_oss")
    save(model, folder)
    if ON_GPU:  # SGLang takes the type of some layers from the checkpoint, here float32
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": DTYPE}))
    return folder, model


def check_sinks(model):
    """No call converts them, and those of later weights are at the same place."""
    name = "model.layers.1.self_attn.sinks"
    sinks = model.get_parameter(name)
    assert sinks.dtype == torch.float32
    address = sinks.data_ptr()
    model.load_weights([(name, torch.arange(4, dtype=torch.bfloat16))])
    assert model.get_parameter(name).tolist() == [0, 1, 2, 3]
    assert model.get_parameter(name).data_ptr() == address


def test_gpt_oss(gpt_oss):
    folder, model = gpt_oss
    reference = Reference(model, "k8v8", window=16)
    settings = {"preset": "k8v8", "window": 16}
    prompts = [prompt(n, seed=n) for n in (9, 40, 90)]
    with engine(folder, settings, dtype=DTYPE, chunked_prefill_size=64) as loop:
        assert loop.pool.swa_kv_pool.layers == (0, 2)
        answers = loop.generate(prompts, TOKENS)
        check_sinks(loop.scheduler.tp_worker.model_runner.model)
    for p, answer in zip(prompts, answers, strict=True):
        replay(reference, p, answer)
    sinks = [layer.self_attn.sinks for layer in model.model.layers]
    # Those of one layer alone matter less than what 16 bits change on a GPU.
    for some in [sinks] if ON_GPU else [[of_layer] for of_layer in sinks]:
        kept = [of_layer.clone() for of_layer in some]
        for of_layer in some:
            of_layer.data.fill_(-100)
        with pytest.raises(AssertionError, match="below"):
            for p, answer in zip(prompts, answers, strict=True):
                replay(reference, p, answer)
        for of_layer, before in zip(some, kept, strict=True):
            of_layer.data.copy_(before)
