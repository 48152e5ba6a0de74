"""The static form of the transformers cache: fixed capacity, lengths on the device.

Eagerly it must be bit for bit the growing form, whatever is asked of it. Compiled, its decode step
must be one graph that is never compiled again while the context grows, with the tokens of eager
execution.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("setuptools")  # inductor imports it, too late once a test has loaded distutils

from transformers import CompileConfig, DynamicCache

from tests.transformers.families import FAMILIES, make_family
from tests.transformers.harness import (
    DRAFTS,
    MODELS,
    feed,
    generate,
    make_calm_model,
    make_config,
    make_ids,
    make_model,
    padded,
)
from torch_turboquant.integrations.transformers import TurboQuantCache

ROOM = 256


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def both(model, run, **options):
    """What `run` returns on the growing and on the static form."""
    results = []
    for form in ({}, {"static": True, "max_cache_len": ROOM}):
        with TurboQuantCache.for_model(model, **options, **form) as cache:
            results.append(run(cache))
            assert cache.is_compileable == bool(form)
    return results


def assert_same(pair):
    growing, static = pair
    assert torch.equal(growing, static), (growing - static).abs().max()


# ------------------------------------------------------------------------ eager: the growing form


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_growing_form(name):
    """Prompt, steps, a continuation longer than max_q_len, a draft, steps."""
    model, ids = make_model(name), make_ids(150, 2)

    def run(cache):
        logits = feed(model, cache, ids, 80, 1, 1, 1, 30, 1, 1, 5, 1)
        assert cache.get_seq_length() == 150
        return logits

    options = {"config": make_config(model, "k3v2"), "max_batch_size": 3, "max_q_len": 7}
    assert_same(both(model, run, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    model, prompt = make_family(family, FAMILIES[family]), make_ids(80)
    options = {"page_size": 16, "sink_tokens": 3, "recent_window": 9, "max_q_len": 7}
    assert_same(both(model, lambda cache: generate(model, prompt, cache), **options))


@pytest.mark.parametrize("overrides", [
    {"sink_tokens": 0, "recent_window": 0},
    {"sink_tokens": 0, "recent_window": 9},
    {"sink_tokens": 3, "recent_window": 0},
])  # fmt: skip
def test_without_parts_of_the_tail(overrides):
    model, ids = make_model(), make_ids(120)
    config = make_config(model, **overrides)
    assert_same(both(model, lambda c: feed(model, c, ids, 80, 1, 1, 20, 1), config=config))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("chunk", [None, 16])
def test_left_padding(name, chunk):
    """In one forward, and in chunks where padding goes on beyond the first one."""
    model = make_model(name)
    ids, mask = padded([80, 30, 55], 80)

    def run(cache):
        return generate(model, ids, cache, attention_mask=mask, prefill_chunk_size=chunk)

    centers = TurboQuantCache.calibrate(model, make_ids(90, seed=5))
    assert_same(both(model, run, preset="k3v2", max_batch_size=3, center=centers))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_the_mask_of_a_step_is_ignored(name):
    """Padding is known from the prompt, whatever the mask of a step says."""
    model, (ids, mask) = make_model(name), padded([72, 30], 72)
    places = (mask.cumsum(1) - 1).clamp_min(0)
    options = {"max_batch_size": 2, "static": True, "max_cache_len": ROOM}
    with TurboQuantCache.for_model(model, "k3v2", **options) as cache:

        def run(**of_step):
            cache.reset()
            feed(model, cache, ids[:, :70], 70, mask=mask[:, :70])
            steps = [{name: value[:, :end] for name, value in of_step.items()} for end in (71, 72)]
            return [
                model(ids[:, i : i + 1], past_key_values=cache,
                      position_ids=places[:, i : i + 1], **more).logits
                for i, more in zip((70, 71), steps, strict=True)
            ]  # fmt: skip

        expected = run()
        for given in (mask, torch.ones_like(mask), 1 - mask):
            for one, other in zip(run(attention_mask=given), expected, strict=True):
                assert torch.equal(one, other)


def test_crop_reorder_and_select():
    model, ids = make_model(), make_ids(140, 3)
    config = make_config(model, "k3v2")

    def run(cache):
        feed(model, cache, ids[:, :90], 80, 1, 5)
        cache.crop(-4)
        feed(model, cache, ids[:, 86:100], 1, 1)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        feed(model, cache, ids[:, 100:110], 1, 1)
        cache.crop(-30)  # deeper than the ring
        cache.batch_select_indices(torch.tensor([0, 2]))
        assert cache.get_seq_length() == 80
        logits = feed(model, cache, ids[:2, 80:], 1, 1, 30)
        assert cache.memory_bytes()["pages"] == 2 * 9 * cache.bytes_per_token * 16
        return logits

    assert_same(both(model, run, config=config, max_batch_size=3, max_q_len=6))


def test_drafts_are_rolled_back():
    model, prompt = make_calm_model(), make_ids(20).repeat(1, 4)
    for options in ({"eos_token_id": 0}, DRAFTS):
        run = lambda cache, options=options: generate(model, prompt, cache, new=30, **options)  # noqa: E731
        assert_same(both(model, run, preset="k3v2"))


def test_a_failing_step_leaves_the_cache_as_it_was():
    model, ids = make_model(), make_ids(120)

    def run(cache):
        feed(model, cache, ids[:, :90], 80, *[1] * 10)

        def fail(*args):
            raise KeyboardInterrupt

        for tokens in (1, 20):
            hook = model.model.layers[1].register_forward_pre_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                model(make_ids(tokens, seed=8), past_key_values=cache)
            hook.remove()
            assert cache.get_seq_length() == 90
        return feed(model, cache, ids[:, 90:], *[1] * 30)

    assert_same(both(model, run, config=make_config(model, "k3v2"), max_q_len=8))


def test_reset_keeps_addresses():
    model, ids = make_model(), make_ids(100)
    options = {"static": True, "max_cache_len": ROOM}
    with TurboQuantCache.for_model(model, "k3v2", **options) as cache:
        first = feed(model, cache, ids, 80, *[1] * 20)

        def tensors():
            held = [t for layer in cache.layers for t in (layer.pages, layer.ring, *layer.tables)]
            counters = cache.sequences.first_counters
            return [t.data_ptr() for t in held if t is not None] + [counters.columns.data_ptr()]

        before = tensors()
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.centers is None
        feed(model, cache, make_ids(90, seed=3), 80, 1)
        cache.reset()
        assert torch.equal(feed(model, cache, ids, 80, *[1] * 20), first)
        assert tensors() == before


@pytest.mark.parametrize("length", [1, 3, 20])
def test_short_prompts_do_not_wait_for_a_center(length):
    """The center comes from what there is; eight bits show that nothing else is wrong."""
    model, ids = make_model(), make_ids(120)
    options = {"static": True, "max_cache_len": ROOM}
    with TurboQuantCache.for_model(model, "k8v8", **options) as cache:
        logits = feed(model, cache, ids, length)
        assert len(cache.centers) == 3 and cache.memory_bytes()["waiting"] == 0
        step = feed(model, cache, ids[:, :1], 1)
        assert step.isfinite().all()
    expected = model(ids).logits
    assert (logits - expected).abs().mean() < 0.01 * expected.abs().mean()


@pytest.mark.parametrize("options", [{}, {"keep": 0.5}, {"keep": 0.5, "center": "none"}])
@pytest.mark.parametrize("static", [True, False])
def test_a_first_piece_of_padding_is_no_prompt(static, options):
    """A prompt that is padded to a fixed length, in pieces: nothing is learned from the padding."""
    model = make_model("qwen2")
    ids, mask = padded([90], 120)
    both_options = {"static": static, "max_cache_len": ROOM, "page_size": 16, **options}
    found = []
    for pieces in ((), (16, 10)):
        with TurboQuantCache.for_model(model, "k4v4", **both_options) as cache:
            feed(model, cache, ids, *pieces, mask=mask)
            found.append((cache.memory_bytes(), cache.centers))
    (memory, centers), (in_pieces, theirs) = found
    assert in_pieces == memory
    for one, other in zip(centers or [], theirs or [], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
    assert centers is not None or options.get("center") == "none"


def test_refused():
    model, ids = make_model(), make_ids(90, 2)
    with pytest.raises(ValueError, match="needs its max_cache_len"):
        TurboQuantCache.for_model(model, static=True)
    options = {"static": True, "max_cache_len": 82, "max_batch_size": 2}
    with TurboQuantCache.for_model(model, "k4v4", **options) as cache:
        with pytest.raises(ValueError, match="90 tokens do not fit into max_cache_len=82"):
            model(ids, past_key_values=cache)
        feed(model, cache, ids[:, :82], 80, 1)
        with pytest.raises(RuntimeError, match="do not fit into max_cache_len=82"):
            model(ids[:, :1], past_key_values=cache)
        assert cache.get_seq_length() == 82
        cache.crop(-1)
        with pytest.raises(ValueError, match="holds 2 sequences"):
            model(ids[:1, :1], past_key_values=cache)
        with pytest.raises(ValueError, match="2D attention_mask"):
            four = torch.ones(2, 1, 1, 82).bool()
            model(ids[:, :1], attention_mask=four, past_key_values=cache)
        feed(model, cache, ids[:, :1])


# ----------------------------------------------------------------------------------- windows


def test_layers_with_a_window_keep_its_pages():
    model, ids = make_model("mistral"), make_ids(200)  # a window of 24
    config = make_config(model, "k3v2")
    for form in ({"max_cache_len": ROOM}, {"max_cache_len": ROOM, "static": True}, {}):
        with TurboQuantCache.for_model(model, config=config, max_q_len=7, **form) as cache:
            logits = feed(model, cache, ids, 130, *[1] * 40, 30)
            assert cache.layers[0].pages.shape[0] == 3  # 30 tokens, wherever they begin
            cache.crop(-6)  # max_q_len - 1
            again = feed(model, cache, ids[:, 194:])
            torch.testing.assert_close(again, logits[:, 194:], rtol=1e-4, atol=1e-4)
            with pytest.raises(RuntimeError, match="200 tokens cannot be cut to 150"):
                cache.crop(-50)
            assert cache.get_seq_length() == 200
            cache.crop(-200)
            assert torch.equal(feed(model, cache, ids, 130, *[1] * 40, 30), logits)


def test_a_long_forward_that_fails_loses_a_window():
    model, ids = make_model("mistral"), make_ids(200)

    def fail(*args):
        raise KeyboardInterrupt

    for form in ({"static": True}, {}):
        options = {"config": make_config(model), "max_q_len": 7, "max_cache_len": ROOM, **form}
        with TurboQuantCache.for_model(model, **options) as cache:
            feed(model, cache, ids[:, :100], 90, 1)
            hook = model.model.layers[1].register_forward_pre_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                model(ids[:, 100:], past_key_values=cache)
            hook.remove()
            with pytest.raises(RuntimeError, match="200 tokens cannot be cut to 100"):
                model(ids[:, 100:101], past_key_values=cache)
            cache.reset()
            feed(model, cache, ids[:, :100], 90, 1)


# ----------------------------------------------------------------------------------- compiled


def compiled_logits(model, step, cache, ids, prompt):
    """Logits of ids: the prompt by the model, the rest token by token, compiled once."""
    parts = [model(ids[:, :prompt], past_key_values=cache).logits]
    for i in range(prompt, ids.shape[1]):
        with torch.compiler.set_stance("default" if i == prompt else "fail_on_recompile"):
            # a copy: the next replay of a CUDA graph writes to the same place
            parts.append(step(ids[:, i : i + 1], past_key_values=cache).logits.clone())
    return torch.cat(parts, 1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_while_the_context_grows(name, backend):
    model, ids = make_model(name), make_ids(120, 2)
    config = make_config(model, "k3v2")
    step = torch.compile(model, fullgraph=True, backend=backend)

    def run(cache):
        if not cache.is_compileable:
            return feed(model, cache, ids, 80, *[1] * 40)
        logits = compiled_logits(model, step, cache, ids, 80)
        assert cache.get_seq_length() == 120
        cache.reset()  # another prompt, the same graph
        with torch.compiler.set_stance("fail_on_recompile"):
            again = compiled_logits(model, step, cache, ids, 80)
        assert torch.equal(again, logits)
        return logits

    assert_same(both(model, run, config=config, max_batch_size=2))


def test_drafts_in_one_graph():
    """Several tokens at once, rolled back in between."""
    model, ids = make_model(), make_ids(120)
    step = torch.compile(model, fullgraph=True, backend="eager")

    def run(cache):
        call = step if cache.is_compileable else model
        parts = [model(ids[:, :80], past_key_values=cache).logits]
        for i in range(80, 116, 4):
            with torch.compiler.set_stance("default" if i == 80 else "fail_on_recompile"):
                parts.append(call(ids[:, i : i + 5], past_key_values=cache).logits[:, :4])
            cache.crop(-1)
        return torch.cat(parts, 1)

    assert_same(both(model, run, config=make_config(model, "k3v2")))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_generate_compiles(backend):
    """As it does for a StaticCache; a second prompt of another length needs no new graph."""
    model = make_calm_model()
    ids, mask = padded([80, 30], 80)
    config = CompileConfig(fullgraph=True, mode=None, backend=backend)
    config._compile_all_devices = True  # not only on GPUs

    def run(cache):
        compiling = {"compile_config": config} if cache.is_compileable else {}
        first = generate(model, ids, cache, new=20, attention_mask=mask, **compiling)
        cache.reset()
        other = make_ids(90, 2, seed=4)
        with torch.compiler.set_stance("fail_on_recompile" if compiling else "default"):
            second = generate(model, other, cache, new=20, **compiling)
        assert hasattr(model, "_compiled_call") == bool(compiling)
        return torch.cat([first, second], 1)

    assert_same(both(model, run, max_batch_size=2))


def test_the_prompt_is_not_compiled():
    model, ids = make_model(), make_ids(90)
    options = {"static": True, "max_cache_len": ROOM}
    with TurboQuantCache.for_model(model, "k4v4", **options) as cache:
        with pytest.raises(Exception, match="first forward of a prompt"):
            torch.compile(model, fullgraph=True, backend="eager")(ids, past_key_values=cache)
        assert cache.get_seq_length() == 0
        expected = feed(model, cache, ids)
        cache.reset()
        lenient = torch.compile(model, backend="eager")  # breaks its graphs and runs it eagerly
        assert torch.equal(lenient(ids, past_key_values=cache).logits, expected)


def test_other_caches_compile_while_attached():
    model, ids = make_model(), make_ids(90)
    with TurboQuantCache.for_model(model, "k4v4"):
        step = torch.compile(model, fullgraph=True, backend="eager")
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        logits = step(ids[:, :1], past_key_values=cache).logits
    expected = feed(model, DynamicCache(), torch.cat([ids, ids[:, :1]], 1), 90)[:, 90:]
    torch.testing.assert_close(logits, expected)


# --------------------------------------------------------------------------------------- CUDA


@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt_oss"])
def test_cuda_graphs(name):
    """mode="reduce-overhead": captured once, replayed while the context grows, as eager execution.

    Compiled matrix products round differently, and so may codes: the graph is compared bit for bit
    with the same compiled code without graphs. (The experts of gpt_oss wait for the device.)
    """
    model, ids = make_model(name).cuda(), make_ids(140, 2).cuda()
    options = {"config": make_config(model, "k3v2"), "static": True, "max_cache_len": ROOM}
    plain = torch.compile(model, fullgraph=True)
    graph = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    with TurboQuantCache.for_model(model, max_batch_size=2, **options) as cache:
        expected = compiled_logits(model, plain, cache, ids, 80)
        skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
        cache.reset()
        actual = compiled_logits(model, graph, cache, ids, 80)
        assert torch.equal(actual, expected)
        assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == skipped


@pytest.mark.cuda
def test_generate_compiles_by_itself_on_cuda():
    model = make_calm_model().cuda()
    ids, mask = (x.cuda() for x in padded([80, 30], 80))

    def run(cache):
        first = generate(model, ids, cache, new=40, attention_mask=mask)
        assert hasattr(model, "_compiled_call") == cache.is_compileable
        cache.reset()
        with torch.compiler.set_stance("fail_on_recompile" if cache.is_compileable else "default"):
            again = generate(model, ids, cache, new=40, attention_mask=mask)
        assert torch.equal(again, first)
        return first

    assert_same(both(model, run, max_batch_size=2))
