"""Copies of a cache, in memory and in files: exact, of the size of what is in use, on their own."""

import copy
import gc
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.transformers.families import SUPPORTED, make_family
from tests.transformers.harness import (
    FORMS,
    calibrated,
    feed,
    generate,
    make_cache,
    make_ids,
    make_model,
)
from torch_turboquant.integrations.transformers import TurboQuantCache


def through_pickle(cache, model):
    twin = pickle.loads(pickle.dumps(cache))
    twin.attach(model)
    return twin


def through_a_file(cache, model, path="cache.pt"):
    torch.save(cache, path)
    twin = torch.load(path, weights_only=False)
    twin.attach(model)
    return twin


def test_a_model_that_was_saved_while_a_cache_was_attached():
    """Another process reads it, which has heard of no cache."""
    model, ids = make_model(), make_ids(20)
    with TurboQuantCache.for_model(model):
        torch.save(model, "model.pt")
    torch.save(ids, "ids.pt")
    code = (
        "import torch; model = torch.load('model.pt', weights_only=False); "
        "torch.save(model(torch.load('ids.pt')).logits, 'logits.pt')"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
    assert torch.equal(torch.load("logits.pt"), model(ids).logits)


def in_memory(cache, model):
    return copy.deepcopy(cache)


WAYS = [in_memory, through_pickle, through_a_file]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_a_copy_goes_its_own_way(way, form):
    model, ids = make_model(), make_ids(120, 2)
    with make_cache(model, form, max_batch_size=3) as cache:
        feed(model, cache, ids[:, :90], 80, 1)
        twin = way(cache, model)
        expected = feed(model, cache, ids[:, 90:], *[1] * 30)
        learned = cache.centers
        cache.reset()
        feed(model, cache, make_ids(120, 2, seed=2))  # would overwrite what they share
        assert torch.equal(feed(model, twin, ids[:, 90:], *[1] * 30), expected)
        pairs = [] if learned is None else zip(twin.centers, learned, strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
        twin.reset()
        feed(model, cache, ids[:, :1])
        assert (cache.get_seq_length(), twin.get_seq_length()) == (121, 0)
        twin.detach()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "qwen2", "llama-mqa-48"])
def test_copies_of_caches_of_other_models(way, name):
    model, ids = make_model(name), make_ids(120)
    with TurboQuantCache.for_model(model, "k4v4", page_size=16, max_q_len=8) as cache:
        feed(model, cache, ids[:, :90], 80, 1)
        with way(cache, model) as twin:
            expected = feed(model, cache, ids[:, 90:], 7, *[1] * 10)
            assert torch.equal(feed(model, twin, ids[:, 90:], 7, *[1] * 10), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "jamba"])
def test_copies_of_caches_of_hybrid_models(way, family):
    model, ids = make_family(family, SUPPORTED[family]), make_ids(110)
    with TurboQuantCache.for_model(model, "k4v4", page_size=16) as cache:
        feed(model, cache, ids[:, :90], 80, 1)
        with way(cache, model) as twin:
            expected = feed(model, cache, ids[:, 90:], *[1] * 20)
            assert torch.equal(feed(model, twin, ids[:, 90:], *[1] * 20), expected)


@pytest.mark.parametrize("way", [in_memory, through_pickle])
@pytest.mark.parametrize("form", ["growing", "static"])
@pytest.mark.parametrize("moment", ["new", "waiting", "reset", "cropped", "emptied", "reordered",
                                    "failed"])  # fmt: skip
def test_copies_at_any_moment(way, form, moment):
    model, ids = make_model(), make_ids(120, 2)
    with make_cache(model, form, max_batch_size=2) as cache:
        if moment != "new":
            feed(model, cache, ids[:, : 20 if moment == "waiting" else 100])
        if moment == "reset":
            cache.reset()
        if moment in ("cropped", "emptied"):
            cache.crop(-60 if moment == "cropped" else -100)
        if moment == "reordered":
            cache.reorder_cache(torch.tensor([1, 1]))
        if moment == "failed":
            hook = model.model.layers[1].register_forward_pre_hook(lambda *a: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                feed(model, cache, ids[:, :30])
            hook.remove()
        with way(cache, model) as twin:
            assert twin.get_seq_length() == cache.get_seq_length()
            new = make_ids(40, 2, seed=4)
            expected = feed(model, cache, new, 3, *[1] * 10, 9)
            assert torch.equal(feed(model, twin, new, 3, *[1] * 10, 9), expected)


@pytest.mark.parametrize("form", ["growing", "static"])
@pytest.mark.parametrize("system", [12, 75])
def test_one_prefix_for_many_questions(form, system):
    """The recipe of transformers' documents. 12 tokens wait for their center, 75 are encoded."""
    model, prefix = make_model(), make_ids(system)
    model.generation_config.cache_implementation = None
    with make_cache(model, form) as cache:
        model(prefix, past_key_values=cache)
        answers = []
        for question in range(3):
            prompt = torch.cat([prefix, make_ids(30 + question, seed=7 + question)], 1)
            answers.append(generate(model, prompt, copy.deepcopy(cache)))
        assert cache.get_seq_length() == system
        gc.collect()
        for question, answer in enumerate(answers):
            cache.reset()
            model(prefix, past_key_values=cache)
            assert torch.equal(generate(model, answer[:, : system + 30 + question], cache), answer)


@pytest.mark.parametrize("form", ["growing", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_branches_in_turns(form, name):
    """Two copies that step in turns decode as if each were alone, and cost a cache each."""
    model, prefix = make_model(name), make_ids(75)
    texts = [make_ids(20, seed=7), make_ids(20, seed=8)]
    with make_cache(model, form) as cache:
        feed(model, cache, prefix)
        branches = [copy.deepcopy(cache) for _ in texts]
        assert [held(branch) for branch in branches] == [held(branches[0])] * 2
        assert held(branches[0]) <= held(cache)
        steps = [[], []]
        for token in range(20):
            for branch, text, logits in zip(branches, texts, steps, strict=True):
                logits.append(feed(model, branch, text[:, token : token + 1]))
        assert cache.get_seq_length() == 75
        for text, logits in zip(texts, steps, strict=True):
            alone = copy.deepcopy(cache)
            assert torch.equal(feed(model, alone, text, *[1] * 20), torch.cat(logits, 1))


def test_copies_of_a_detached_cache_are_detached():
    model, ids = make_model(), make_ids(110)
    cache = make_cache(model, "growing")
    feed(model, cache, ids[:, :90])
    cache.detach()
    twin = copy.deepcopy(cache)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(RuntimeError, match="attach"):
        model(ids[:, 90:], past_key_values=twin)
    twin.attach(model)
    cache.attach(model)
    expected = feed(model, cache, ids[:, 90:])
    assert torch.equal(feed(model, twin, ids[:, 90:]), expected)
    cache.detach()
    twin.detach()
    assert model.config._attn_implementation == "sdpa"


def test_the_last_copy_restores_the_model():
    model, ids = make_model(), make_ids(110)
    cache = make_cache(model, "growing")
    feed(model, cache, ids[:, :90])
    twin = copy.deepcopy(copy.deepcopy(cache))
    cache.detach()
    assert model.config._attn_implementation == "turboquant_sdpa"
    feed(model, twin, ids[:, 90:])
    del twin
    gc.collect()
    assert model.config._attn_implementation == "sdpa"


def held(cache):
    tensors = [t for layer in cache.packed for t in (layer.pages, layer.ring)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("form", ["growing", "static", "given center"])
@pytest.mark.parametrize("tokens", [1, 40, 90, 150])
def test_the_size_of_copies(form, tokens):
    """Of a copy in memory that of the cache, of a file that of what is in use."""
    model = make_model(num_hidden_layers=8)
    with make_cache(model, form) as cache:
        feed(model, cache, make_ids(tokens), tokens)
        memory = cache.memory_bytes()
        used = memory["total"] - memory["pages_allocated"] + memory["pages"]
        torch.save(cache, "cache.pt")
        for size in (len(pickle.dumps(cache)), Path("cache.pt").stat().st_size):
            assert size <= 1.1 * used + 100_000
        twin = copy.deepcopy(cache)
        assert twin.memory_bytes() == memory
        if memory["pages_allocated"]:
            assert held(twin) <= memory["pages_allocated"] + memory["tail"]


def test_files_are_of_what_is_in_use():
    """Not of the capacity, nor of the memory that layers share, nor of a tensor of all centers."""
    model, sizes = make_model(num_hidden_layers=8), []
    for longest in (100, 30_000):
        centers = torch.stack(calibrated(model))
        many = torch.cat([centers, torch.zeros(10_000, *centers.shape[1:])])[: len(centers)]
        options = {"max_cache_len": longest, "max_batch_size": 4, "center": many}
        with TurboQuantCache.for_model(model, "k4v4", **options) as cache:
            feed(model, cache, make_ids(90))
            sizes.append(len(pickle.dumps(cache)))
            memory = cache.memory_bytes()
    assert max(sizes) - min(sizes) < 1000
    ring = memory["tail"] // 4  # one of four sequences
    assert sizes[0] <= 1.1 * (memory["pages"] + ring + memory["tables"]) + 100_000


IN_ANOTHER_PROCESS = """
import torch, transformers
from torch_turboquant.integrations.transformers import TurboQuantCache
torch.set_num_threads(1)
model = transformers.AutoModelForCausalLM.from_pretrained("model").eval()
prompt = torch.load("prompt.pt")
for form in ("growing", "static"):
    cache = torch.load(f"{form}.pt", weights_only=False)
    cache.attach(model)
    out = model.generate(prompt, past_key_values=cache, max_new_tokens=12, do_sample=False)
    torch.save(out, f"{form}-out.pt")
    cache.detach()
"""


def test_files_in_another_process():
    model, prompt, expected = make_model(), make_ids(110), {}
    model.save_pretrained("model")
    torch.save(prompt, "prompt.pt")
    for form in ("growing", "static"):
        with make_cache(model, form) as cache:
            feed(model, cache, prompt[:, :90])
            torch.save(cache, f"{form}.pt")
            expected[form] = generate(model, prompt, cache)
    subprocess.run([sys.executable, "-P", "-c", IN_ANOTHER_PROCESS], check=True)
    for form, tokens in expected.items():
        assert torch.equal(torch.load(f"{form}-out.pt"), tokens)


def test_files_for_other_models():
    model, ids = make_model(), make_ids(90)
    with make_cache(model, "growing") as cache:
        feed(model, cache, ids)
        torch.save(cache, "cache.pt")
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        torch.load("cache.pt", weights_only=True)
    loaded = torch.load("cache.pt", weights_only=False)
    for match, other in (
        ("model_type 'llama', the model's is 'qwen2'", make_model("qwen2")),
        ("kv_heads '2', the model's is '4'", make_model(num_key_value_heads=4)),
        ("layers '3', the model's is '2'", make_model(num_hidden_layers=2)),
    ):
        with pytest.raises(ValueError, match=f"made for another model: .*{match}"):
            loaded.attach(other)
        assert other.config._attn_implementation == "sdpa"
    with pytest.raises(RuntimeError, match="attach"):
        model(ids, past_key_values=loaded)
    loaded.attach(copy.deepcopy(model))
    loaded.detach()
