"""Engines of vLLM over our pages: the tokens that the same codes give without vLLM."""

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make vllm")

from tests.vllm.harness import ON_GPU, engine, generate, metric, outputs, prompt, save_llama, told
from tests.vllm.reference import Reference
from torch_turboquant.integrations.engine import prompts as prompts_of_engines

TOKENS = 16
# How sequences meet in a step is no matter of codes, and on a GPU many codes tell more.
PRESET = "k8v8" if ON_GPU else "k5v4u"
PROMPTS = [prompt(n, seed=n) for n in (5, 40, 33, 90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_llama(folder)


@pytest.mark.parametrize("exact_steps", [True, False])
@pytest.mark.parametrize("preset", ["k8v8", "k5v4u", "k3v2"])
def test_prompts_of_a_batch(model, preset, exact_steps):
    folder, llama = model
    reference = Reference(llama, preset, exact_steps)
    settings = {"preset": preset, "exact_steps": exact_steps, "learn": False}
    with engine(folder, settings) as llm:
        answers = generate(llm, PROMPTS, TOKENS)
    for p, answer in zip(PROMPTS, answers, strict=True):
        reference.check(p, answer)


def test_the_first_token_from_its_codes(model):
    folder, llama = model
    settings = {"preset": "k3v2", "first_token": "codes", "learn": False}
    with engine(folder, settings) as llm:
        answers = generate(llm, PROMPTS, TOKENS)
    for p, answer in zip(PROMPTS, answers, strict=True):
        Reference(llama, "k3v2", first_token=False).check(p, answer)
    with pytest.raises(AssertionError, match="below"):  # the reference can tell
        for p, answer in zip(PROMPTS, answers, strict=True):
            Reference(llama, "k3v2").check(p, answer)


def test_prompts_of_one_token(model):
    """A step that may be replayed from a CUDA graph stores the first token of a sequence."""
    folder, llama = model
    reference = Reference(llama, PRESET)
    prompts = [[token] for token in (3, 50, 99)]
    with engine(folder, {"preset": PRESET, "learn": False}) as llm:
        generate(llm, PROMPTS, 1)  # pages that held the first tokens of others
        answers = generate(llm, prompts, TOKENS)
    for p, answer in zip(prompts, answers, strict=True):
        reference.check(p, answer)


@pytest.mark.skipif(ON_GPU, reason="the rest of the model is rounded in other places")
def test_transformers_gives_the_same(model):
    """With every token but the first from its codes, both caches are the same computation."""
    from torch_turboquant.integrations.transformers import TurboQuantCache

    folder, llama = model
    expected = []
    llama.set_attn_implementation("eager")
    for p in PROMPTS:
        options = {"page_size": 16, "sink_tokens": 1, "recent_window": 0, "center": None}
        with TurboQuantCache.for_model(llama, preset="k4v4", **options) as cache:
            ids = torch.tensor([p])
            out = llama.generate(ids, past_key_values=cache, max_new_tokens=TOKENS, do_sample=False)
        expected.append(out[0, len(p) :].tolist())
    settings = {"preset": "k4v4", "exact_steps": False, "learn": False}
    with engine(folder, settings) as llm:
        assert generate(llm, PROMPTS, TOKENS) == expected


def test_steps_that_mix_prompts_and_decoding(model):
    """Two sequences at a time: the third prompt is computed beside tokens of the second."""
    folder, llama = model
    reference = Reference(llama, PRESET, exact_steps=False)
    prompts = [prompt(n, seed=n) for n in (7, 50, 20, 31, 64, 9)]
    lengths = [4, 11, 7, 16, 3, 8]
    settings = {"preset": PRESET, "exact_steps": False, "learn": False}
    with engine(folder, settings, max_num_seqs=2) as llm:
        answers = generate(llm, prompts, lengths)
    for p, answer in zip(prompts, answers, strict=True):
        reference.check(p, answer)


@pytest.mark.parametrize("exact_steps", [True, False])
def test_prompts_in_chunks(model, exact_steps):
    folder, llama = model
    reference = Reference(llama, PRESET, exact_steps)
    settings = {"preset": PRESET, "exact_steps": exact_steps, "learn": False}
    p = prompt(90, seed=90)
    chunked = {"max_num_batched_tokens": 32, "enable_chunked_prefill": True}
    with engine(folder, settings, **chunked) as llm:
        (answer,) = generate(llm, [p], TOKENS)
    reference.check(p, answer, chunks=[32, 64])


@pytest.mark.parametrize("chunk", [600, 1100])
def test_long_prompts_in_chunks(model, monkeypatch, chunk):
    """GPUs leave new prompts and such chunks, whose pages they decode, to FlashAttention."""
    monkeypatch.setattr(prompts_of_engines, "LONG_CHUNK_ROWS", 4 * 512)  # 512 tokens of this model
    folder, llama = model
    reference = Reference(llama, PRESET)
    prompts = [prompt(n, seed=n) for n in (1500, 30, 1300)]
    chunked = {"max_num_batched_tokens": chunk, "max_model_len": 1600, "max_num_seqs": 2}
    with engine(folder, {"preset": PRESET, "learn": False}, **chunked) as llm:
        answers = [generate(llm, [p], TOKENS)[0] for p in prompts]
        together = generate(llm, [p[::-1] for p in prompts], TOKENS)
    for p, answer in zip(prompts, answers, strict=True):
        reference.check(p, answer, chunks=range(chunk, len(p), chunk))
    for p, answer in zip(prompts, together, strict=True):
        reference.check(p[::-1], answer, near_tie=0.3)  # what shares a step decides about chunks


def test_prefix_hit_beside_a_long_first_prompt(model):
    """One sequence of the step has a past, another one has none (vllm#46460)."""
    folder, llama = model
    reference = Reference(llama, PRESET)
    first, second = prompt(70, seed=1), prompt(150, seed=2)
    again = [*first[:50], *prompt(30, seed=3)]
    with engine(folder, {"preset": PRESET, "learn": False}) as llm:
        generate(llm, [first], 1)
        hit, fresh = outputs(llm, [again, second], TOKENS)
    assert hit.num_cached_tokens == 48
    assert fresh.num_cached_tokens == 0
    reference.check(again, hit.outputs[0].token_ids, chunks=[48])
    reference.check(second, fresh.outputs[0].token_ids)


@pytest.mark.parametrize(
    "options", [{"enable_lora": True, "max_lora_rank": 8}, {"async_scheduling": True}]
)
def test_options_beside_attention_change_no_token(model, options):
    folder, llama = model
    reference = Reference(llama, PRESET)
    with engine(folder, {"preset": PRESET, "learn": False}, **options) as llm:
        answers = generate(llm, PROMPTS, TOKENS)
    for p, answer in zip(PROMPTS, answers, strict=True):
        reference.check(p, answer)


def test_preempted_sequences_go_on(model):
    """What was generated before is computed again as a prompt, so that less is read from codes."""
    folder, llama = model
    reference = Reference(llama, "k8v8")
    prompts = [prompt(40, seed=seed) for seed in range(4)]
    few = {"num_gpu_blocks_override": 16, "disable_log_stats": False, "max_model_len": 128}
    with engine(folder, {"preset": "k8v8", "learn": False}, **few) as llm:
        answers = generate(llm, prompts, 60)
        assert metric(llm, "vllm:num_preemptions") > 0
    for p, answer in zip(prompts, answers, strict=True):
        reference.check(p, answer, near_tie=0.1)
        with pytest.raises(AssertionError, match="below"):  # of another prompt
            reference.check(prompt(40, seed=99), answer, near_tie=0.1)


def test_drafts_change_no_token(model):
    """n-gram speculation, with every token from its codes as without drafts."""
    folder, llama = model
    reference = Reference(llama, ["k8v4", PRESET, PRESET], exact_steps=False)
    settings = {"preset": PRESET, "layers": {"0": "k8v4"}, "exact_steps": False, "learn": False}
    method = "ngram_gpu" if ON_GPU else "ngram"
    drafts = {"method": method, "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    prompts = [[*prompt(5, seed=5)] * 6, prompt(33, seed=33), [3, 4] * 20]
    options = {"speculative_config": drafts, "disable_log_stats": False}
    with told() as lines, engine(folder, settings, **options) as llm:
        answers = generate(llm, prompts, 40)
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0
        assert metric(llm, "vllm:spec_decode_num_draft_tokens") > metric(
            llm, "vllm:spec_decode_num_accepted_tokens"
        )
    assert "(layers 0: k8v4)" in lines[0]
    for p, answer in zip(prompts, answers, strict=True):
        reference.check(p, answer)
