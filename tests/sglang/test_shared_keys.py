"""Models whose later layers keep no keys, and read those of an earlier one (Gemma 3n, Gemma 4)."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: make sglang")

import transformers
from sglang.srt.configs import update_config
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.utils.hf_transformers import config as config_parser

from tests.sglang import test_graphs, test_prompts
from tests.sglang.harness import (
    ON_GPU,
    check_prefixes,
    check_retraction,
    describe_around_graphs,
    engine,
    in_32_bits,
    replay,
    told,
)
from tests.vllm import reference as references
from tests.vllm.harness import prompt, randomise, save
from tests.vllm.reference import Reference
from torch_turboquant import centers as files
from torch_turboquant.integrations.sglang import limits
from torch_turboquant.integrations.sglang.backend import TurboQuantBackend

flash = test_prompts.flash
TOKENS = 12
SEEN = 24  # tokens that a sliding layer sees
PRESET, DTYPE = ("k8v8", "float16") if ON_GPU else ("k5v4u", "float32")
# In prefill graphs SGLang itself cannot run Gemma 3n without pictures: it hands queries of three
# dimensions over, gets results of the same shape, and multiplies them as if they had two.
OPTIONS = {"dtype": DTYPE, "disable_prefill_cuda_graph": True}
LAYERS = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"] * 2
LAYERS.append("full_attention")
# Newer versions of SGLang look for a field that transformers 5.12 does not have.
SINCE_HETEROGENEOUS = hasattr(config_parser, "_apply_gemma4_attention_overrides")
READERS = 3  # of layers 2 and 3: 4 and 5 read the keys of 2, and 6 those of 3
PROMPTS = [prompt(n, seed=n) for n in (5, 40, 33, 90)]
SHAPE = {
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size": 128,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 64,
    "num_hidden_layers": len(LAYERS),
    "num_kv_shared_layers": READERS,
    "layer_types": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": SEEN,
    "max_position_embeddings": 1024,
    "laurel_rank": 16,
    "altup_num_inputs": 2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def save_gemma(folder):
    """Writes a small random Gemma 3n; returns it, with the windows that SGLang gives its layers."""
    torch.manual_seed(0)
    config = transformers.Gemma3nTextConfig(**SHAPE)
    gemma = save(randomise(transformers.Gemma3nForCausalLM(config)), folder)
    for layer in gemma.model.layers:
        if layer.self_attn.sliding_window is not None:
            layer.self_attn.sliding_window += 1  # SGLang does not count the query in this model
    return gemma


@pytest.fixture(autouse=True)
def sizes_of_layers(monkeypatch):
    """SGLang rounds sizes up for its CPU kernels, and knows no lists of them, nor missing ones."""
    original = update_config.update_intermediate_size

    def leave_others(config, name, padding):
        is_size = isinstance(getattr(config.hf_config, name, None), int)
        return original(config, name, padding) if is_size else config

    monkeypatch.setattr(update_config, "update_intermediate_size", leave_others)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    return folder, save_gemma(folder)


@pytest.mark.parametrize("window", [0, 8, 40])
def test_prompts_of_a_batch(model, window):
    folder, gemma = model
    reference = Reference(gemma, PRESET, window=window)
    settings = {"preset": PRESET, "window": window}
    with told() as lines, engine(folder, settings, **OPTIONS) as loop:
        answers = loop.generate(PROMPTS, TOKENS)
        assert list(loop.pool.layers) == sorted(loop.backend.layers) == [0, 1, 2, 3]
        assert len(loop.pool.pages) == 4
    assert " 3 more layers have no pages and read those of layers 2 and 3." in lines[0]
    for p, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer.tokens) == TOKENS
        replay(reference, p, answer)


@in_32_bits
def test_the_reference_tells_readers_apart(model, monkeypatch):
    """Whose signs a reader takes makes a difference, and what it sees exactly as well."""
    folder, gemma = model
    prompts = [prompt(n, seed=n) for n in (20, 25, 30, 35, 40)]
    with engine(folder, {"preset": "k3v2", "window": 16}) as loop:
        answers = loop.generate(prompts, TOKENS)

    class Other(Reference):
        """Readers see that many tokens exactly, and their own ones or not."""

        def __init__(self, window, own):
            super().__init__(gemma, "k3v2", window=16)
            self.of_readers = window, own

        def _attend(self, module, *arguments, **more):
            before = self.window, self.exact_steps
            if references.stored_by(module) != module.layer_idx:
                self.window, self.exact_steps = self.of_readers
            try:
                return super()._attend(module, *arguments, **more)
            finally:
                self.window, self.exact_steps = before

    def check(seen):
        for p, answer in zip(prompts, answers, strict=True):
            replay(seen, p, answer)

    check(Other(16, own=True))
    for wrong in (Other(0, own=True), Other(0, own=False)):
        with pytest.raises(AssertionError, match="below"):
            check(wrong)
    monkeypatch.setattr(references, "stored_by", lambda module: module.layer_idx)
    with pytest.raises(AssertionError, match="below"):
        check(Reference(gemma, "k3v2", window=16))


@pytest.mark.parametrize(("page_size", "window"), [(16, 0), (16, 16), (64, 40)])
def test_prompts_in_chunks(model, page_size, window):
    """Beside decoding requests as well, where pages are small enough."""
    folder, gemma = model
    reference = Reference(gemma, PRESET, window=window)
    prompts = [prompt(n, seed=n) for n in (20, 150, 130)]
    settings = {"preset": PRESET, "window": window}
    chunks = {"chunked_prefill_size": 64, "enable_mixed_chunk": True, "page_size": page_size}
    with engine(folder, settings, **OPTIONS, **chunks) as loop:
        answers = loop.generate(prompts, TOKENS)
        assert loop.mixed > 0 or page_size == 64
    for p, answer in zip(prompts, answers, strict=True):
        replay(reference, p, answer)


def test_prompts_that_flash_attention_takes(model, flash):
    """It gets the keys of the layer that stored them, and what its ring held before."""
    folder, gemma = model
    reference = Reference(gemma, PRESET, window=16)
    reference.long_chunk = test_prompts.LONG
    p, short = prompt(180, seed=1), prompt(20, seed=2)
    settings, chunks = {"preset": PRESET, "window": 16}, {"chunked_prefill_size": 64}
    with engine(folder, settings, **OPTIONS, enable_mixed_chunk=True, **chunks) as loop:
        answers = loop.generate([p, short], TOKENS)
    full = LAYERS.count("full_attention")
    assert flash[: len(LAYERS)] == [(64, True)] * len(LAYERS)  # the first chunk, in all layers
    past = [tokens for tokens, causal in flash if not causal]
    # of the second chunk, and of the third in two parts
    assert past == [64] * full + [52] * 2 * full
    for q, answer in zip((p, short), answers, strict=True):
        replay(reference, q, answer)


@pytest.mark.parametrize("window", [0, 16])
def test_prefixes_of_the_tree(model, window):
    folder, gemma = model
    started = engine(folder, {"preset": PRESET, "window": window}, **OPTIONS)
    check_prefixes(Reference(gemma, PRESET, window=window), started, TOKENS)


def test_the_first_token_from_its_codes(model):
    folder, gemma = model
    reference = Reference(gemma, PRESET, window=16, first_token=False)
    settings = {"preset": PRESET, "window": 16, "first_token": "codes"}
    with engine(folder, settings, **OPTIONS) as loop:
        answers = loop.generate(PROMPTS, TOKENS)
    for p, answer in zip(PROMPTS, answers, strict=True):
        replay(reference, p, answer)


def test_retracted_requests_go_on(model):
    folder, gemma = model
    reference = Reference(gemma, PRESET, window=16)
    started = engine(folder, {"preset": PRESET, "window": 16}, **OPTIONS)
    check_retraction(reference, started)


@pytest.mark.parametrize(("window", "chain"), [(0, 4), (24, 9)])
def test_drafts(model, window, chain):
    folder, gemma = model
    reference = Reference(gemma, PRESET, window=window)
    options = {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": chain,
        "speculative_ngram_max_bfs_breadth": 1,
        "speculative_ngram_capacity": 10_000,
    }
    prompts = [[*prompt(5, seed=5)] * 5, *PROMPTS[1:]]
    hit = [*PROMPTS[3][:70], *prompt(30, seed=1)]
    settings = {"preset": PRESET, "window": window}
    with engine(folder, settings, **OPTIONS, **options) as loop:
        answers = loop.generate(prompts, 24)
        (later,) = loop.generate([hit], 24)
        steps = loop.accepted
    for p, answer in zip(prompts, answers, strict=True):
        replay(reference, p, answer)
    assert later.cached == 64
    replay(reference, hit, later, answers[3].calls)
    assert max(steps) > 1


@pytest.mark.parametrize("window", [0, 16])
def test_decode_steps_as_graphs_describe_them(model, window):
    """Which here are not recorded. Three of a graph's four sequences; then two and one."""
    folder, gemma = model
    reference = Reference(gemma, PRESET, window=window)
    settings = {"preset": PRESET, "window": window}
    with engine(folder, settings, **OPTIONS, disable_cuda_graph=True) as loop:
        describe_around_graphs(loop, 4)
        reqs = [loop.add(p, tokens) for p, tokens in zip(PROMPTS[1:], (5, 9, TOKENS), strict=True)]
        loop.run()
        answers = [loop.answer(req) for req in reqs]
    for p, answer in zip(PROMPTS[1:], answers, strict=True):
        replay(reference, p, answer)


@pytest.mark.cuda
@pytest.mark.parametrize("window", [0, 16])
def test_steps_in_graphs(model, window):
    """Decode steps in CUDA graphs are those without them, bit by bit."""
    folder, _ = model
    found = []
    with engine(folder, {"preset": PRESET, "window": window}, **OPTIONS) as loop:
        runner = loop.scheduler.tp_worker.model_runner
        for graphs in (runner.decode_cuda_graph_runner, None):
            runner.decode_cuda_graph_runner = graphs
            loop.flush()
            before = loop.graphs
            with test_graphs.logits_of_steps(loop) as logits:
                answers = loop.generate(PROMPTS, 30)
            assert loop.graphs - before == (len(logits) if graphs else 0)
            found.append(([answer.tokens for answer in answers], logits))
    (tokens, in_graphs), (others, without) = found
    assert tokens == others
    for a, b in zip(in_graphs, without, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@in_32_bits
def test_a_file_of_centers(model, tmp_path):
    """Readers take the center of the layer whose keys they read, and its preset."""
    folder, gemma = model
    generator = torch.Generator().manual_seed(5)
    centers = [0.5 * torch.randn(2, 64, generator=generator) for _ in range(4)]
    file = tmp_path / "centers.safetensors"
    files.save(file, [*centers, *[None] * READERS], gemma.config)
    presets = ["k4v4", "k4v4", "k3v2", "k8v4", "k4v4", "k4v4", "k4v4"]
    reference = Reference(gemma, presets, center=lambda layer, keys: centers[layer], window=16)
    layers = {"2": "k3v2", "-4": "k8v4"}
    settings = {"preset": "k4v4", "layers": layers, "centers": str(file), "window": 16}
    with told() as lines, engine(folder, settings, dtype="float32") as loop:
        answers = loop.generate(PROMPTS, TOKENS)
    assert f"Centers: centers from {file} (sha256 " in lines[0]
    for p, answer in zip(PROMPTS, answers, strict=True):
        replay(reference, p, answer)


@pytest.mark.parametrize("window", [0, 64])
def test_the_engine_counts_layers_that_store(model, window):
    """What SGLang allocates for a budget is not more than that, and not much less."""
    folder, _ = model
    budget = 8 << 20
    options = {"max_total_tokens": None, "max_running_requests": 4, "page_size": 64}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCacheConfigurator, "_profile_available_bytes", lambda *_: budget)
        with told() as lines, engine(folder, {"window": window}, **OPTIONS, **options) as loop:
            rings = [layer.ring for layer in loop.backend.layers.values()]
            memory = [*loop.pool.pages, *(ring for ring in rings if ring is not None)]
            taken = sum(part.numel() * part.element_size() for part in memory)
            page = sum(pages[0].numel() for pages in loop.pool.pages)
            tokens = loop.scheduler.max_total_num_tokens
    assert budget - 2 * page < taken <= budget + page  # page 0 is SGLang's
    assert f"{tokens:,} tokens fit" in lines[0]


def test_presets_of_layers_that_read(model):
    folder, _ = model
    wrong = r'"layers" names -1, which keep no keys and values; those that do are 0, 1, 2, 3'
    with pytest.raises(ValueError, match=wrong), engine(folder, {"layers": {"-1": "k8v8"}}):
        pass


# ---- Gemma 4, whose layers with sliding windows have other heads, and a pool of their own


@pytest.fixture(scope="module")
def gemma_4(tmp_path_factory):
    """Gemma 4 without pictures, whose full layers have one head for keys and values alike. Its file
    names the heads as SGLang calls them when it has read a file with pictures."""
    shape = {name: SHAPE[name] for name in SHAPE if not name.startswith(("laurel", "altup"))}
    heads = {"head_dim": 64, "global_head_dim": 128, "num_key_value_heads": 2}
    heads |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    config = transformers.Gemma4TextConfig(**{**shape, **heads})
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("gemma_4")
    model = save(randomise(transformers.Gemma4ForCausalLM(config)), folder)
    file = folder / "config.json"
    theirs = {"head_dim": 128, "v_head_dim": 128, "swa_head_dim": 64, "swa_v_head_dim": 64}
    theirs |= {"num_key_value_heads": 1, "swa_num_key_value_heads": 2}
    file.write_text(json.dumps(json.loads(file.read_text()) | theirs))
    return folder, model


@pytest.mark.parametrize("window", [0, 16])
def test_two_pools(gemma_4, window):
    folder, gemma = gemma_4
    reference = Reference(gemma, PRESET, window=window)
    settings = {"preset": PRESET, "window": window}
    with told() as lines, engine(folder, settings, dtype=DTYPE, chunked_prefill_size=64) as loop:
        answers = loop.generate(PROMPTS, TOKENS)
        hit = [*PROMPTS[3][:70], *prompt(40, seed=5)]
        (later,) = loop.generate([hit], TOKENS)
        both = loop.pool.full_kv_pool, loop.pool.swa_kv_pool
    assert [list(pool.layers) for pool in both] == [[1, 3], [0, 2]]
    assert " 3 more layers have no pages and read those of layers 2 and 3." in lines[0]
    for p, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer.tokens) == TOKENS
        replay(reference, p, answer)
    assert later.cached == 64
    replay(reference, hit, later, answers[3].calls)


@in_32_bits
def test_a_model_for_pictures(gemma_4, tmp_path, monkeypatch):
    """Asked in words. Centers are of the heads that its own configuration names."""
    _, gemma = gemma_4
    rotary = gemma.model.rotary_emb
    original = rotary.forward

    def from_one(x, positions, *more, **options):  # as SGLang counts in this model
        return original(x, positions + 1, *more, **options)

    monkeypatch.setattr(rotary, "forward", from_one)
    tower = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    tower |= {"num_attention_heads": 1, "num_key_value_heads": 1, "position_embedding_size": 16}
    config = transformers.Gemma4Config(
        text_config=gemma.config.to_dict(), vision_config=tower, audio_config=None
    )
    if SINCE_HETEROGENEOUS and not hasattr(config.text_config, "is_heterogeneous"):
        pytest.skip("this SGLang reads such a model with a newer transformers")
    whole = transformers.Gemma4ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(gemma.model.state_dict())
    save(whole, tmp_path)
    generator = torch.Generator().manual_seed(5)
    heads = [(2, 64), (1, 128)] * 2
    centers = [0.5 * torch.randn(shape, generator=generator) for shape in heads]
    files.save(tmp_path / files.FILE_NAME, [*centers, *[None] * READERS], config)
    reference = Reference(gemma, "k4v4", center=lambda layer, keys: centers[layer], window=16)
    settings = {"preset": "k4v4", "window": 16}
    with told() as lines, engine(tmp_path, settings, dtype="float32") as loop:
        answers = loop.generate(PROMPTS, TOKENS)
        assert type(loop.scheduler.tp_worker.model_runner.model).__name__.startswith(
            "Gemma4ForCond"
        )
    assert f"Centers: centers from {tmp_path / files.FILE_NAME} (sha256 " in lines[0]
    for p, answer in zip(PROMPTS, answers, strict=True):
        replay(reference, p, answer)


def test_one_pool_with_drafts(gemma_4):
    """Which SGLang's own pools cannot hold where heads differ."""
    folder, gemma = gemma_4
    reference = Reference(gemma, PRESET, window=16)
    options = {
        "disable_hybrid_swa_memory": True,
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 4,
        "speculative_ngram_max_bfs_breadth": 1,
        "speculative_ngram_capacity": 10_000,
    }
    prompts = [[*prompt(5, seed=5)] * 5, *PROMPTS[1:]]
    with engine(folder, {"preset": PRESET, "window": 16}, dtype=DTYPE, **options) as loop:
        answers = loop.generate(prompts, 24)
        assert list(loop.pool.layers) == [0, 1, 2, 3]
        assert max(loop.accepted) > 1
    for p, answer in zip(prompts, answers, strict=True):
        replay(reference, p, answer)


@pytest.mark.parametrize("one_pool", [False, True])
def test_the_engine_counts_heads_that_differ(gemma_4, one_pool):
    folder, _ = gemma_4
    budget = 8 << 20
    options = {"max_total_tokens": None, "max_running_requests": 4, "dtype": DTYPE}
    options["disable_hybrid_swa_memory"] = one_pool
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCacheConfigurator, "_profile_available_bytes", lambda *_: budget)
        with engine(folder, {"window": 16}, **options) as loop:
            pools = [loop.pool]
            if not one_pool:
                pools = [loop.pool.full_kv_pool, loop.pool.swa_kv_pool]
            rings = [layer.ring for layer in loop.backend.layers.values()]
            memory = [*rings, *(pages for pool in pools for pages in pool.pages)]
            taken = sum(part.numel() * part.element_size() for part in memory)
            page = sum(pages[0].numel() for pool in pools for pages in pool.pages)
    assert budget - 3 * page < taken <= budget + page  # page 0 is SGLang's


# ---- what is refused


class Sharing(torch.nn.Module):
    """A module around an attention, as SGLang marks those that read."""

    def __init__(self, number, reads, **changes):
        super().__init__()
        options = {"num_kv_heads": 2, "layer_id": number, **changes}
        self.attn = RadixAttention(4, 64, 0.125, **options)
        self.is_kv_shared_layer = reads


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([(0, False), (1, True)], "a layer reads the keys of layer 1, which has none: choose"),
        ([(0, True), (0, False)], "a layer reads the keys of layer 0, which has none: choose"),
        ([(0, False), (0, False)], "several attentions store the keys of layer 0: choose"),
        (
            [(0, False), (0, True, {"sliding_window_size": 8})],
            "a layer reads the keys of layer 0 with another window or cap: choose",
        ),
    ],
)
def test_models_that_are_refused(layers, text):
    made = [Sharing(*given[:2], **(given[2] if len(given) > 2 else {})) for given in layers]
    backend = object.__new__(TurboQuantBackend)
    backend.plan = SimpleNamespace(heads=lambda layer: (2, 64))
    with pytest.raises(ValueError, match=re.escape(f"torch_turboquant: {text}")):
        backend._bind(torch.nn.ModuleList(made), requests=1)


def test_readers_like_their_source():
    source, reader = (SimpleNamespace(layer_id=1, sliding_window_size=7, logit_cap=0) for _ in "ab")
    assert limits.wrong_reader(reader, source) == []


def test_calls_without_keys_are_refused():
    """Where no layer has stored some in the same step."""
    backend = object.__new__(TurboQuantBackend)
    backend.kept = {}
    layer = SimpleNamespace(layer_id=1)
    with pytest.raises(NotImplementedError, match="attention with keys of another layer is not"):
        backend._options(layer, None, False, {})
    with pytest.raises(NotImplementedError, match="attention with save_kv_cache=False is not"):
        backend._options(layer, torch.zeros(1), False, {})
