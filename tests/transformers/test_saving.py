"""Files of caches: exact, of the size of what is in use, and refused where they do not belong."""

import copy
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.transformers import harness
from tests.transformers.families import SUPPORTED, VERSION, make_family
from tests.transformers.harness import (
    FORMS,
    calibrated,
    feed,
    generate,
    make_ids,
    make_model,
    padded,
)
from tests.transformers.latents import make_latent_model
from torch_turboquant.integrations.transformers import TurboQuantCache, saving

of_latents = pytest.mark.skipif(
    VERSION < (5, 15), reason="caches get latents from transformers 5.15 on"
)
SAVED_FORMS = {
    **FORMS,
    "no center": {"center": "none"},
    "half": {"keep": 0.5},
    "half, allocated": {"keep": 0.5, "evict": "keydiff", "max_cache_len": 160},
    "half, static": {"keep": 0.5, "static": True, "max_cache_len": 160},
}


def make_cache(model, form="growing", **options):
    return harness.make_cache(model, form, SAVED_FORMS, **options)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def through_a_file(cache, model, **options):
    size = cache.save("cache.safetensors")
    assert size == Path("cache.safetensors").stat().st_size
    return TurboQuantCache.load("cache.safetensors", model, **options)


def check_goes_on(model, cache, twin, ids, *sizes):
    """Both give the same logits bit for bit, whatever the other does."""
    expected = feed(model, cache, ids, *sizes)
    cache.reset()
    assert torch.equal(feed(model, twin, ids, *sizes), expected)


@pytest.mark.parametrize("form", SAVED_FORMS)
def test_a_loaded_cache_goes_on(form):
    model, ids = make_model(), make_ids(120, 2)
    with make_cache(model, form, max_batch_size=3) as cache:
        feed(model, cache, ids[:, :90], 80, 1)
        with through_a_file(cache, model) as twin:
            mine, theirs = twin.memory_bytes(), cache.memory_bytes()
            assert mine["pages"] == theirs["pages"] and mine["tail"] == theirs["tail"]
            assert mine["pages_allocated"] <= theirs["pages_allocated"]
            assert twin.get_seq_length() == 90 and twin.config == cache.config
            assert twin.configs == cache.configs
            learned = cache.centers
            pairs = [] if learned is None else zip(twin.centers, learned, strict=True)
            assert all(torch.equal(*pair) for pair in pairs)
            check_goes_on(model, cache, twin, ids[:, 90:], *[1] * 12, 9)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "qwen2", "llama-mqa-48"])
@pytest.mark.parametrize("tokens", [20, 90])
def test_caches_of_other_models(name, tokens):
    """20 tokens wait for their center; 90 are more than a window."""
    model, ids = make_model(name), make_ids(200)
    with TurboQuantCache.for_model(model, "k4v4", page_size=16, max_q_len=8) as cache:
        feed(model, cache, ids[:, :tokens], tokens - 1)
        with through_a_file(cache, model) as twin:
            check_goes_on(model, cache, twin, ids[:, tokens:], 7, *[1] * 10, 50, 1, 1)


@pytest.mark.parametrize("window", [20, 45, 4096])
@pytest.mark.parametrize("stored", [90, 140])
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 300}])
def test_windows_of_sequences_that_were_cut(window, stored, options):
    """A loaded cache may have fewer pages than one that has held more tokens before."""
    model, ids = make_model("mistral", sliding_window=window), make_ids(220)
    rows = {"page_size": 16, "max_q_len": 32}
    for cut in (1, 9, 17, 31):
        left = stored - cut
        with TurboQuantCache.for_model(model, "k4v4", **rows, **options) as cache:
            feed(model, cache, ids[:, :stored], 70, 20, *[10] * ((stored - 90) // 10))
            cache.crop(-cut)
            for room in ({}, {"max_cache_len": 300}, {"max_cache_len": left + 60}):
                with through_a_file(cache, model, **room) as twin:
                    twins = copy.deepcopy(cache)
                    check_goes_on(model, twins, twin, ids[:, left : left + 50], 1, *[7] * 7)
            with through_a_file(cache, model) as twin:  # what it cannot take back stays refused
                outcomes = []
                for one in (cache, twin):
                    try:
                        one.crop(-(left - 40))
                        outcomes.append("taken back")
                    except RuntimeError as error:
                        outcomes.append(str(error)[:60])
                assert outcomes[1] == outcomes[0]


def test_a_window_that_a_failed_forward_has_overwritten():
    """A loaded cache refuses what the saved one refuses, the static form as well."""
    model, ids = make_model("mistral"), make_ids(200)
    for form in ({}, {"static": True}):
        options = {"page_size": 16, "max_q_len": 7, "max_cache_len": 220, **form}
        with TurboQuantCache.for_model(model, "k4v4", **options) as cache:
            feed(model, cache, ids[:, :100], 90, 1)
            hook = model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(ids[:, 100:], past_key_values=cache)
            hook.remove()
            with through_a_file(cache, model) as twin:
                for one in (cache, twin):
                    with pytest.raises(RuntimeError, match="tokens cannot be cut to 100"):
                        model(ids[:, 100:101], past_key_values=one)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "jamba", "nemotron_h"])
def test_caches_of_hybrid_models(family):
    model, ids = make_family(family, SUPPORTED[family]), make_ids(110)
    with TurboQuantCache.for_model(model, "k4v4", page_size=16) as cache:
        feed(model, cache, ids[:, :90], 80, 1)
        with through_a_file(cache, model) as twin:
            check_goes_on(model, cache, twin, ids[:, 90:], *[1] * 20)


@of_latents
@pytest.mark.parametrize("preset", ["k4", "k5v4u", "uncompressed"])
@pytest.mark.parametrize("options", [{}, {"static": True, "max_cache_len": 160}, {"keep": 0.5}])
def test_caches_of_latents(preset, options):
    model, ids = make_latent_model(), make_ids(110)
    with TurboQuantCache.for_model(model, preset, page_size=np.int64(32), **options) as cache:
        feed(model, cache, ids[:, :90], 80, 1)
        with through_a_file(cache, model) as twin:
            check_goes_on(model, cache, twin, ids[:, 90:], *[1] * 20)


@pytest.mark.parametrize("form", ["growing", "allocated", "static", "half", "half, static"])
@pytest.mark.parametrize("moment", ["waiting", "cropped", "reordered", "failed"])
def test_files_at_any_moment(form, moment):
    model, ids = make_model(), make_ids(120, 2)
    with make_cache(model, form, max_batch_size=2) as cache:
        feed(model, cache, ids[:, : 20 if moment == "waiting" else 100])
        if moment == "cropped":
            cache.crop(-20 if "half" in form else -60)
        if moment == "reordered":
            cache.reorder_cache(torch.tensor([1, 1]))
        if moment == "failed":
            hook = model.model.layers[1].register_forward_pre_hook(lambda *a: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                feed(model, cache, ids[:, :30])
            hook.remove()
        with through_a_file(cache, model) as twin:
            check_goes_on(model, cache, twin, make_ids(40, 2, seed=4), 3, *[1] * 10, 9)


@pytest.mark.parametrize("what", ["crop", "failure"])
def test_tokens_that_wait_no_more_are_in_no_file(what):
    """Keys and values that wait for their center outlive a crop and a forward that fails."""
    model, ids = make_model(), make_ids(100)
    with make_cache(model) as cache:
        feed(model, cache, ids[:, :20])
        if what == "crop":
            cache.crop(-5)
        else:
            hook = model.model.layers[-1].mlp.register_forward_pre_hook(lambda *a: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                feed(model, cache, ids[:, 20:23])
            hook.remove()
        with through_a_file(cache, model) as twin:
            keys = load_file("cache.safetensors")["layers.0.keys"]
            assert keys.shape[2] == cache.get_seq_length()
            check_goes_on(model, cache, twin, ids[:, 23:], 70, 4)


@pytest.mark.parametrize("form", ["growing", "static", "half"])
def test_a_crop_into_the_padding_of_a_sequence(form):
    model = make_model()
    ids, mask = padded([30, 10], 40)
    with make_cache(model, form, center="none", max_batch_size=2) as cache:
        feed(model, cache, ids, mask=mask)
        cache.crop(-15)
        mask = torch.cat([mask[:, :25], torch.tensor([[1, 1], [0, 1]])], dim=1)
        with through_a_file(cache, model) as twin:
            expected = feed(model, cache, ids[:, :2], mask=mask)
            cache.reset()
            assert torch.equal(feed(model, twin, ids[:, :2], mask=mask), expected)
            twin.crop(-19)  # 8 columns, all of them padding
            with pytest.raises(ValueError, match="holds no tokens to save"):
                twin.save("cache.safetensors")


@pytest.mark.parametrize("form", ["growing", "static", "half", "half, static"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_padded_batches(form, name):
    model = make_model(name)
    ids, mask = padded([100, 30, 71], 100)
    with make_cache(model, form, max_batch_size=3) as cache:
        feed(model, cache, ids[:, :80], 75, mask=mask)
        with through_a_file(cache, model) as twin:
            expected = feed(model, cache, ids[:, 80:], *[1] * 20, mask=mask)
            cache.reset()
            assert torch.equal(feed(model, twin, ids[:, 80:], *[1] * 20, mask=mask), expected)


def test_sizes_of_numpy():
    """A file takes ints only."""
    model, ids = make_model(), make_ids(60, 2)
    sizes = {"max_batch_size": 2, "max_q_len": 8, "max_cache_len": 100, "recent_window": 32}
    sizes = {name: np.int64(size) for name, size in sizes.items()}
    with make_cache(model, **sizes) as cache:
        feed(model, cache, ids[:, :50])
        with through_a_file(cache, model, max_cache_len=np.int64(90)) as twin:
            check_goes_on(model, cache, twin, ids[:, 50:], *[1] * 10)


def test_loaded_with_more_room():
    """One saved prefix becomes a batch, in memory that never moves."""
    model, ids = make_model(), make_ids(120)
    with make_cache(model) as prefix, make_cache(model, max_batch_size=4) as cache:
        for each in (prefix, cache):
            feed(model, each, ids[:, :90])
        with through_a_file(prefix, model, max_batch_size=4, max_cache_len=150) as twin:
            first = twin.memory_bytes()["pages_allocated"]
            for each in (cache, twin):
                each.batch_repeat_interleave(4)
            new = make_ids(30, 4, seed=6)
            assert torch.equal(
                feed(model, twin, new, *[1] * 30), feed(model, cache, new, *[1] * 30)
            )
            assert twin.memory_bytes()["pages_allocated"] == first
            for match, options in (
                ("90 tokens do not fit into max_cache_len=80", {"max_cache_len": 80}),
                ("4 sequences do not fit into max_batch_size=3", {"max_batch_size": 3}),
                ("4 sequences do not fit into max_batch_size=0", {"max_batch_size": 0}),
                ("max_cache_len is 0, supported: 1 and more", {"max_cache_len": 0}),
            ):
                twin.crop(-30)
                twin.save("twin.safetensors")
                with pytest.raises(ValueError, match=match):
                    TurboQuantCache.load("twin.safetensors", model, **options)
                feed(model, twin, ids[:, :30].expand(4, -1))


def test_a_policy_of_its_own():
    def longest(queries, keys, values):
        return keys.float().norm(dim=-1)

    model, ids = make_model(), make_ids(200)
    with make_cache(model, keep=0.5, evict=longest) as cache:
        feed(model, cache, ids[:, :180])
        cache.save("cache.safetensors")
        with pytest.raises(ValueError, match=r"a policy of its own, .*: give it as evict="):
            TurboQuantCache.load("cache.safetensors", model)
        with TurboQuantCache.load("cache.safetensors", model, evict=longest) as twin:
            assert twin.memory_bytes()["pages"] == cache.memory_bytes()["pages"]
            check_goes_on(model, cache, twin, ids[:, 180:], *[1] * 20)
            twin.reset()
            assert torch.equal(feed(model, twin, ids), feed(model, cache, ids))
    with make_cache(model, keep=0.5) as cache:
        feed(model, cache, ids)
        cache.save("cache.safetensors")
        with pytest.raises(ValueError, match="made with evict='snapkv': leave evict= out"):
            TurboQuantCache.load("cache.safetensors", model, evict=longest)


def test_the_same_tokens_are_the_same_file():
    """Whatever the memory held before: no byte of another prompt leaves the cache."""
    model, ids = make_model("mistral"), make_ids(150, 3)
    center = calibrated(model)
    options = {"center": center, "max_batch_size": 3, "max_q_len": 8}
    digests = []
    for before in (False, True):
        with TurboQuantCache.for_model(model, "k5v3u", page_size=16, **options) as cache:
            if before:
                feed(model, cache, make_ids(200, 3, seed=9))
                cache.reset()
            feed(model, cache, ids[:, :83])
            cache.save("cache.safetensors")
            digests.append(load_file("cache.safetensors"))
    for name, tensor in digests[0].items():
        assert torch.equal(tensor, digests[1][name]), name


def test_tokens_that_were_taken_back_are_in_no_file():
    model, ids, found = make_model("mistral"), make_ids(150), []
    for more in (0, 5):
        with TurboQuantCache.for_model(
            model, "k5v3u", page_size=16, center=calibrated(model), max_q_len=8
        ) as cache:
            feed(model, cache, ids[:, : 83 + more], 83)
            cache.crop(-more)
            cache.save("cache.safetensors")
            found.append(load_file("cache.safetensors"))
    for layer in range(3):
        pages, tails = (
            [file[f"layers.{layer}.{part}"] for file in found] for part in ("pages", "tail")
        )
        assert torch.equal(*pages)
        assert (tails[1] == tails[0])[tails[1] != 0].all()


@of_latents
@pytest.mark.parametrize("kind", ["k4", "uncompressed"])
def test_the_same_latents_are_the_same_file(kind):
    model, ids, found = make_latent_model(), make_ids(90), []
    for before in (False, True):
        with TurboQuantCache.for_model(model, kind, page_size=32) as cache:
            if before:
                feed(model, cache, make_ids(150, seed=9))
                cache.reset()
            feed(model, cache, ids)
            cache.save("cache.safetensors")
            found.append(load_file("cache.safetensors"))
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name


@pytest.mark.parametrize("form", ["growing", "static", "given center"])
@pytest.mark.parametrize("tokens", [1, 40, 90, 150])
def test_the_size_of_files(form, tokens):
    model = make_model(num_hidden_layers=8)
    with make_cache(model, form, max_batch_size=4) as cache:
        feed(model, cache, make_ids(tokens), tokens)
        memory = cache.memory_bytes()
        center = 0 if cache.centers is None else sum(c.nbytes for c in cache.centers)
        held = memory["pages"] + memory["tail"] // 4 + memory["waiting"] + center
        assert held <= cache.save("cache.safetensors") <= held + 12_000


IN_ANOTHER_PROCESS = """
import torch, transformers
from torch_turboquant.integrations.transformers import TurboQuantCache
torch.set_num_threads(1)
model = transformers.AutoModelForCausalLM.from_pretrained("model").eval()
prompt = torch.load("prompt.pt")
for form in ("growing", "static"):
    with TurboQuantCache.load(f"{form}.safetensors", model) as cache:
        out = model.generate(prompt, past_key_values=cache, max_new_tokens=12, do_sample=False)
    torch.save(out, f"{form}-out.pt")
"""


def test_files_in_another_process():
    model, prompt, expected = make_model(), make_ids(110), {}
    model.save_pretrained("model")
    torch.save(prompt, "prompt.pt")
    for form in ("growing", "static"):
        with make_cache(model, form) as cache:
            feed(model, cache, prompt[:, :90])
            cache.save(f"{form}.safetensors")
            expected[form] = generate(model, prompt, cache)
    subprocess.run([sys.executable, "-P", "-c", IN_ANOTHER_PROCESS], check=True)
    for form, tokens in expected.items():
        assert torch.equal(torch.load(f"{form}-out.pt"), tokens)


# ---- what is refused


@pytest.fixture
def saved():
    """A model, and the path of a cache of it."""
    model = make_model()
    with make_cache(model, "growing") as cache:
        feed(model, cache, make_ids(90))
        cache.save("cache.safetensors")
    return model


def rewrite(metadata=(), tensors=()):
    """The same file with other metadata or tensors (None: without)."""
    with safe_open("cache.safetensors", "pt") as file:
        told = {**file.metadata(), **dict(metadata)}
    held = {**load_file("cache.safetensors"), **dict(tensors)}
    kept = {name: tensor for name, tensor in held.items() if tensor is not None}
    save_file(kept, "other.safetensors", metadata={n: x for n, x in told.items() if x is not None})
    return "other.safetensors"


def refused(path, model, match, error=ValueError):
    with pytest.raises(error, match=match):
        TurboQuantCache.load(path, model)
    assert model.config._attn_implementation == "sdpa"


def test_files_for_other_models(saved):
    trained = copy.deepcopy(saved)
    trained.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    longer = make_model("mistral", sliding_window=40)
    for match, other in (
        ("another model: model_type 'llama', the model's is 'qwen2'", make_model("qwen2")),
        ("another model: .*kv_heads '2', the model's is '4'", make_model(num_key_value_heads=4)),
        ("another model: layers '3', the model's is '2'", make_model(num_hidden_layers=2)),
        ("another model: .* with other weights", trained),
        ("another model: .* in another dtype", copy.deepcopy(saved).bfloat16()),
    ):
        refused("cache.safetensors", other, match)
    model = make_model("mistral")
    with make_cache(model) as cache:
        feed(model, cache, make_ids(90))
        cache.save("mistral.safetensors")
    refused("mistral.safetensors", longer, "a model with other sliding windows")
    with TurboQuantCache.load("cache.safetensors", copy.deepcopy(saved)) as cache:
        assert cache.get_seq_length() == 90


def test_files_that_are_no_caches(saved):
    whole = Path("cache.safetensors").read_bytes()
    for content in (
        b"",
        whole[:5],
        whole[:-1],
        whole[: len(whole) // 2],
        whole + b"more",
        b"x" * 99,
    ):
        Path("other.safetensors").write_bytes(content)
        refused("other.safetensors", saved, "is no file of a cache, or damaged: ")
    center = saved.model.layers[0].self_attn.k_proj.weight
    save_file({"layers.0.center": center}, "other.safetensors")
    refused("other.safetensors", saved, "its format is '', expected 'torch_turboquant cache 1'")
    refused("none.safetensors", saved, "none.safetensors", FileNotFoundError)
    refused(".", saved, "is a folder; name a file", IsADirectoryError)


def changed(**changes):
    with safe_open("cache.safetensors", "pt") as file:
        told = json.loads(file.metadata()["cache"])
    return {"cache": json.dumps({**told, **changes})}


def test_files_of_other_versions(saved):
    refused(rewrite({"format": "torch_turboquant cache 2"}), saved,
            "in another format, 'torch_turboquant cache 2'; this version reads")  # fmt: skip
    refused(
        rewrite(changed(format_version=2)),
        saved,
        "format version 2, .* reads version 1: run the prompt",
    )
    refused(rewrite({"codebooks": "0"}), saved, "with other codebooks: run the prompt")


def test_files_that_say_something_else(saved):
    damaged = "no file of a cache, or damaged"
    for told in (
        {"cache": None},
        {"cache": "[]"},
        {"cache": "{"},
        changed(batch=2),
        changed(batch=0, pads=[], evicted=[], places=[[[], []]]),
        changed(places=[]),
        changed(places=[[[90], [0]]] * 2),
        changed(evicted=[-1]),
        changed(prompt_end=-1),
        changed(pads=[-1]),
        changed(pads=[91]),
        changed(places=[[[90], [91]]]),
        changed(places=[[[89], [0]]]),
        changed(columns="many"),
        changed(layers={}),
        changed(layers={"0": [2, "int8"]}),
        changed(config={"kind": "Path"}),
        changed(center="somewhere"),
        changed(columns=90.0),
        changed(max_batch_size=2**64),
        changed(max_q_len=None),
        changed(max_cache_len="many"),
        changed(static="no"),
        changed(evict=5),
        changed(keep=2.0),
        changed(layers={str(i): [math.inf, "float32"] for i in range(3)}),
        changed(layers={str(i): [0, "float32"] for i in range(3)}),
        changed(states={"0": {}}),
        {"cache": "[" * 100_000},
        {"model": None},
        {"model": "{"},
        {"model": "[]"},
    ):
        refused(rewrite(told), saved, damaged)
    tensors = load_file("cache.safetensors")
    pages = tensors["layers.1.pages"]
    refused(rewrite(tensors={"layers.1.pages": None}), saved, r"it lacks \['layers.1.pages'\]")
    refused(rewrite(tensors={"layers.9.pages": pages.clone()}), saved, "has .* too much")
    for tensor in (pages[:, 1:].clone(), pages.int()):
        refused(rewrite(tensors={"layers.1.pages": tensor}), saved, "pages of layer 1 is torch.")


def test_sizes_that_the_tensors_do_not_have(saved):
    """Refused before memory is taken: of these sizes no machine has enough."""
    config = json.loads(changed()["cache"])["config"]
    huge = 2**30
    for part, told in (
        ("tail", changed(max_q_len=huge)),
        ("tail", changed(config={**config, "sink_tokens": huge})),
        ("tail", changed(config={**config, "recent_window": huge})),
        ("pages", changed(columns=huge, places=[[[huge], [0]]])),
        ("center", changed(layers={str(i): [huge, "float32"] for i in range(3)})),
    ):
        refused(rewrite(told), saved, f"{part} of layer 0 is torch")


def test_a_state_of_another_transformers():
    family = "qwen3_next"
    model, ids = make_family(family, SUPPORTED[family]), make_ids(30)
    with TurboQuantCache.for_model(model, page_size=16) as cache:
        feed(model, cache, ids)
        cache.save("cache.safetensors")
        states = json.loads(changed()["cache"])["states"]
        first = next(iter(states))
        for state in ({"kind": "Other", "state": {}}, {**states[first], "state": {}}):
            path = rewrite(changed(states={**states, first: state}))
            with pytest.raises(ValueError, match=f"layer {first} was saved as a .* of another ver"):
                TurboQuantCache.load(path, model)
        for state in ({}, {**states[first], "state": 5}, {**states[first], "state": {
            **states[first]["state"], "dtype": {"dtype": "load"}}}):  # fmt: skip
            path = rewrite(changed(states={**states, first: state}))
            with pytest.raises(ValueError, match=f"damaged: the state of layer {first} cannot be"):
                TurboQuantCache.load(path, model)
        name, held = next(
            (n, t) for n, t in load_file("cache.safetensors").items() if f"s.{first}.state" in n
        )
        for tensor in (held[..., 1:].clone(), held.half(), held[None].clone()):
            path = rewrite(tensors={name: tensor})
            with pytest.raises(ValueError, match=f"layer {first} .*{name} is torch.* expected"):
                TurboQuantCache.load(path, model)
        with pytest.raises(ValueError, match="or damaged"):
            TurboQuantCache.load(rewrite(tensors={name: None}), model)
        del states[first]
        with pytest.raises(ValueError, match="or damaged: it has states of layers"):
            TurboQuantCache.load(rewrite(changed(states=states)), model)
        cache.layers[int(first)].something = object()
        with pytest.raises(TypeError, match="with a object, which a file cannot hold"):
            cache.save("other.safetensors")


def test_what_cannot_be_saved():
    model, ids = make_model(), make_ids(90)
    with make_cache(model) as cache:
        with pytest.raises(ValueError, match="holds no tokens to save: run the model on a prompt"):
            cache.save("cache.safetensors")
        feed(model, cache, ids)
        with pytest.raises(IsADirectoryError, match="is a folder; name a file"):
            cache.save(".")
        with pytest.raises(FileNotFoundError, match="cannot be written: there is no nowhere"):
            cache.save("nowhere/cache.safetensors")

        def inside(*_):
            with pytest.raises(RuntimeError, match="a forward is running on this TurboQuantCache"):
                cache.save("cache.safetensors")

        hook = model.model.layers[1].register_forward_pre_hook(inside)
        feed(model, cache, ids[:, :1])
        hook.remove()
    with pytest.raises(RuntimeError, match=r"this TurboQuantCache is detached: call cache.attach"):
        cache.save("cache.safetensors")
    assert not list(Path().iterdir())


def test_nothing_is_half_written(saved, monkeypatch):
    """A file that was there stays, and nothing else appears."""
    before = Path("cache.safetensors").read_bytes()

    def full_disk(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with make_cache(saved) as cache:
        feed(saved, cache, make_ids(70, seed=3))
        with pytest.raises(OSError, match="no space left"):
            cache.save("cache.safetensors")
    assert [path.name for path in Path().iterdir()] == ["cache.safetensors"]
    assert Path("cache.safetensors").read_bytes() == before


def test_every_attribute_is_known_to_files():
    """Whoever adds one decides whether a file has it, and says so here."""
    model = make_model()
    with make_cache(model) as cache:
        assert set(vars(cache.sequences)) == {
            # in the file
            "batch", "columns", "pads", "places", "encoded", "config", "rows", "max_len",
            "max_q_len", "learned_center", "static", "windows", "eviction", "evicted", "prompt_end",
            # from what is in the file
            "center_known", "stepping", "has_states", "full", "most_columns",
            # of a moment, or of a device
            "forward", "lost", "counters", "tables", "first_counters",
        }  # fmt: skip
        of_transformers = set(vars(transformers.cache_utils.DynamicLayer()))
        assert set(vars(cache.packed[0])) - of_transformers == {
            # in the file
            "index", "config", "sequences", "kv_heads", "paged", "tables", "waiting",
            # from what is in the file
            "constants", "sliding_window", "is_sliding", "is_compileable", "dtype", "device",
            "eviction", "thinned",
            # of a moment
            "_options_of_layer",
        } - of_transformers  # fmt: skip


def test_weights_on_the_meta_device():
    with torch.device("meta"):
        model = make_model()
    with pytest.raises(ValueError, match="are on the meta device, where nothing tells them"):
        saving.weights_digest(model.get_decoder())
