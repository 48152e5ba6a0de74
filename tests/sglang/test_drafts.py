"""Speculative decoding: answers are those of steps of one token each.

The model's layers change little of what a token's embedding says, so that its answers go round in
circles, and a draft that only looks at the last token is often right.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: make sglang")

from safetensors.torch import save_file
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

from tests.sglang.harness import ON_GPU, engine, replay
from tests.vllm.harness import prompt, save, save_llama
from tests.vllm.reference import Reference
from torch_turboquant.integrations.sglang.hooks import chains_of_trees, draft_chains

PRESET = "k8v8" if ON_GPU else "k5v4u"
WINDOW = 24
PROMPTS = [[*prompt(5, seed=5)] * 5, prompt(33, seed=33), prompt(70, seed=70)]
TOKENS = 24
CHAIN = 4
THEIRS = "triton" if ON_GPU else "torch_native"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    llama = save_llama(folder, head_dim=64)
    with torch.no_grad():
        llama.model.embed_tokens.weight.mul_(16)
        for layer in llama.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
    return folder, save(llama, folder)


def save_head(folder, target, algorithm):
    """A draft of one layer, the target's first one, that sees embeddings and no layer's states."""
    weights, n = dict(target.state_dict()), target.config.hidden_size
    block = {
        name.removeprefix("model.layers.0."): weight.clone()
        for name, weight in weights.items()
        if name.startswith("model.layers.0.")
    }
    config = {**target.config.to_dict(), "num_hidden_layers": 1}
    if algorithm == "EAGLE":
        del block["input_layernorm.weight"]
        config["architectures"] = ["LlamaForCausalLMEagle"]
        head = {f"layers.0.{name}": weight for name, weight in block.items()}
        head["fc.weight"] = torch.cat([torch.eye(n), torch.zeros(n, n)], 1)
        head["fc.bias"] = torch.zeros(n)
    else:
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = block[f"self_attn.{name}.weight"]
            block[f"self_attn.{name}.weight"] = torch.cat([weight, torch.zeros_like(weight)], 1)
        block["hidden_norm.weight"] = torch.ones(n)
        # which takes the states behind two layers: the target has too few for SGLang's choice
        seen = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1]}
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": seen}
        config["draft_vocab_size"] = 128
        head = {f"midlayer.{name}": weight for name, weight in block.items()}
        head["fc.weight"] = torch.cat([torch.eye(n), torch.zeros(n, n)], 1)
        head["norm.weight"] = weights["model.norm.weight"].clone()
        head["lm_head.weight"] = weights["lm_head.weight"].clone()
    head["embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(head, folder / "model.safetensors")


def ngrams(chain=CHAIN):
    return {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": chain,
        "speculative_ngram_max_bfs_breadth": 1,
        "speculative_ngram_capacity": 10_000,
    }


def drafted(algorithm, folder, chain=CHAIN):
    return {
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(folder),
        "speculative_num_steps": chain - 1,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": chain,
        "speculative_draft_attention_backend": THEIRS,
    }


@pytest.mark.parametrize(("window", "chain"), [(0, CHAIN), (WINDOW, 9)])
def test_ngrams(model, window, chain):
    folder, llama = model
    reference = Reference(llama, PRESET, window=window)
    settings = {"preset": PRESET, "window": window}
    with engine(folder, settings, **ngrams(chain)) as loop:
        answers = loop.generate(PROMPTS, TOKENS)
        again = loop.generate(PROMPTS, TOKENS)  # their n-grams are known, and their prefixes
        steps = loop.accepted
    for p, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer.tokens) == TOKENS
        replay(reference, p, answer)
    assert [answer.cached for answer in again] != [0, 0, 0]
    replay(reference, PROMPTS[2], again[2], answers[2].calls)
    assert max(steps) == chain  # all of a chain was right, and in others a part of it
    assert len({*steps}) > 2


def test_ngrams_of_a_backend_for_each_phase(model):
    """SGLang takes what prefill and decode have in common for the backend of all steps, and newer
    versions do not write it into the arguments that were given."""
    folder, llama = model
    reference = Reference(llama, PRESET, window=WINDOW)
    both = {f"{phase}_attention_backend": "turboquant" for phase in ("prefill", "decode")}
    settings = {"preset": PRESET, "window": WINDOW}
    with engine(folder, settings, backend=None, **both, **ngrams(9)) as loop:
        answers = loop.generate(PROMPTS, TOKENS)
        for _ in range(2):  # whose n-grams are known, of several lengths, which make trees
            loop.generate(PROMPTS, TOKENS)
        assert max(loop.accepted) > 1
    for p, answer in zip(PROMPTS, answers, strict=True):
        replay(reference, p, answer)


@pytest.mark.parametrize("algorithm", ["NGRAM", "NEXTN", "STANDALONE"])
def test_numbers_that_sglang_chooses(model, tmp_path, algorithm):
    """Of drafts, where none are given; and what NEXTN is another name of."""
    folder, llama = model
    options = ngrams() if algorithm == "NGRAM" else drafted(algorithm, folder)
    if algorithm == "NEXTN":
        save_head(tmp_path, llama, "EAGLE")
        options["speculative_draft_model_path"] = str(tmp_path)
    else:
        for name in ("num_draft_tokens", "num_steps", "eagle_topk"):
            options.pop(f"speculative_{name}", None)
    reference = Reference(llama, PRESET, window=WINDOW)
    with engine(folder, {"preset": PRESET, "window": WINDOW}, **options) as loop:
        answers = loop.generate(PROMPTS, TOKENS)
        assert loop.accepted
    for p, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer.tokens) == TOKENS
        replay(reference, p, answer)


@pytest.mark.parametrize(("algorithm", "least"), [("EAGLE", 1.5), ("EAGLE3", 1), ("STANDALONE", 3)])
def test_drafts_of_a_model(model, tmp_path, algorithm, least):
    folder, llama = model
    drafting = folder  # the same model: nearly all drafts are right
    if algorithm != "STANDALONE":
        drafting = tmp_path
        save_head(tmp_path, llama, algorithm)
    reference = Reference(llama, PRESET, window=WINDOW)
    settings = {"preset": PRESET, "window": WINDOW}
    hit = [*PROMPTS[2][:60], *prompt(30, seed=1)]
    with engine(folder, settings, **drafted(algorithm, drafting)) as loop:
        answers = loop.generate(PROMPTS, TOKENS)
        (later,) = loop.generate([hit], TOKENS)
        pools = loop.pool, loop.scheduler.draft_worker.draft_worker.draft_runner.token_to_kv_pool
        steps = loop.accepted
    assert [type(pool).__name__ for pool in pools] == ["TurboQuantKVPool", "MHATokenToKVPool"]
    assert sum(steps) / len(steps) > least, steps
    for p, answer in zip(PROMPTS, answers, strict=True):
        replay(reference, p, answer)
    assert later.cached == 48
    replay(reference, hit, later, answers[2].calls)


def test_branches_of_trees():
    """Chains stay, and of trees the deepest branch; what is missing is one more guess."""
    tree = [7, 1, 2, 3, 0]  # 7 1 3, and beside them 7 2 and the padding 7 0
    parents = [-1, 0, 0, 1, 0]
    sees = np.zeros((5, 5), dtype=np.int64)
    for node, parent in enumerate(parents):
        sees[node] = sees[parent] if node else 0
        sees[node, node] = 1
    chain, causal = [9, 8, 7, 6, 5], np.tri(5, dtype=np.int64)
    tokens = np.array([*tree, *chain])
    found, mask = chains_of_trees(tokens, np.stack([sees, causal]).reshape(-1), 5)
    assert found.tolist() == [7, 1, 3, 0, 0, *chain]
    assert (mask.reshape(2, 5, 5) == causal).all()


@pytest.mark.parametrize(("backend", "ours"), [("turboquant:k4v4", True), (THEIRS, False)])
def test_trees_of_another_backend_stay(backend, ours):
    """The hook of n-grams asks whose engine it is."""
    args = SimpleNamespace(attention_backend=backend)
    worker = SimpleNamespace(server_args=args, draft_token_num=4)
    tokens, mask = np.array([7, 1, 2, 0]), np.eye(4, dtype=np.int64)
    found = draft_chains(lambda *_: (tokens, mask), worker, None)
    assert (found[0] is tokens and found[1] is mask) != ours


def test_memory_of_drafts(model, tmp_path):
    """The keys of the model that drafts, and rings that hold a chain, are in the budget."""
    folder, llama = model
    save_head(tmp_path, llama, "EAGLE")
    budget = 8 << 20
    options = {"max_total_tokens": None, "max_running_requests": 4, "page_size": 64}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCacheConfigurator, "_profile_available_bytes", lambda kvc, before: budget)
        with engine(folder, {"window": 64}, **options, **drafted("EAGLE", tmp_path)) as loop:
            rings = [layer.ring for layer in loop.backend.layers.values()]
            theirs = loop.scheduler.draft_worker.draft_worker.draft_runner.token_to_kv_pool
            memory = [*loop.pool.pages, *rings, *theirs.k_buffer, *theirs.v_buffer]
            taken = sum(part.numel() * part.element_size() for part in memory)
            page = taken // len(loop.pool.pages[0])
    assert {ring.shape[2] for ring in rings} == {1 + 64 + CHAIN - 1}
    assert budget - 2 * page < taken <= budget + page  # page 0 is SGLang's


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["NGRAM", "EAGLE"])
def test_drafts_in_graphs(model, tmp_path, kind):
    """Chains that are checked in CUDA graphs give what they give without."""
    folder, llama = model
    options = ngrams() if kind == "NGRAM" else drafted(kind, tmp_path)
    if kind == "EAGLE":
        save_head(tmp_path, llama, kind)
    settings = {"preset": PRESET, "window": WINDOW}
    with engine(folder, settings, dtype="bfloat16", **options) as loop:
        runner = loop.scheduler.tp_worker.model_runner
        found = []
        for graphs in (runner.decode_cuda_graph_runner, None):
            runner.decode_cuda_graph_runner = graphs
            loop.flush()
            before = loop.graphs
            answers = loop.generate(PROMPTS, TOKENS)
            assert (loop.graphs > before) == (graphs is not None)
            found.append([answer.tokens for answer in answers])
    assert found[0] == found[1]
