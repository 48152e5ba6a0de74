"""Models that their user has compiled, whole or in parts: the tokens of the model as it was.

Steps of the static form are compiled; every other forward is called without compilation, so that a
growing context compiles nothing anew.
"""

import operator

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache

from tests.transformers.harness import feed, generate, make_ids, make_model, padded
from torch_turboquant.integrations.transformers import TurboQuantCache

FORMS = {"growing": {}, "static": {"static": True, "max_cache_len": 128}}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def make_small_model():
    return make_model(num_hidden_layers=1, initializer_range=0.04)


def compiled_whole(model, **options):
    model.compile(**options)


def compiled_forward(model, **options):
    model.forward = torch.compile(model.forward, **options)


def compiled_decoder(model, **options):
    model.model.forward = torch.compile(model.model.forward, **options)


def compiled_layers(model, **options):
    for layer in model.model.layers:
        layer.compile(**options)


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("form, compiled", [
    ("growing", compiled_whole), ("growing", compiled_forward), ("static", compiled_whole),
])  # fmt: skip
def test_generate_on_a_compiled_model(form, compiled):
    model = make_small_model()
    ids, (short, mask) = make_ids(70, 2), padded([70, 30], 70)

    def run(cache, stance="default"):
        first = generate(model, ids, cache, new=4)
        cache.reset()
        with torch.compiler.set_stance(stance):
            longer = generate(model, ids, cache, new=30)
        cache.reset()
        second = generate(model, short, cache, new=4, attention_mask=mask)
        return torch.cat([first, longer, second], 1)

    options = {"preset": "k4v4", "max_batch_size": 2, **FORMS[form]}
    plain = model(ids).logits
    with TurboQuantCache.for_model(model, **options) as cache:
        expected = run(cache)
    if compiled is compiled_forward:  # before there is a cache
        compiled(model, backend="eager")
    with TurboQuantCache.for_model(model, **options) as cache:
        if compiled is compiled_whole:
            compiled(model, backend="eager")
        assert torch.equal(run(cache, "fail_on_recompile"), expected)
        # what stands around the decoder, for a prompt and for steps; and the step of a static cache
        assert graphs() <= (3 if form == "growing" else 4)
    with TurboQuantCache.for_model(model, **options) as another:
        assert torch.equal(run(another), expected)
    other = DynamicCache(config=model.config)
    assert torch.equal(model(ids, past_key_values=other).logits, plain)


@pytest.mark.parametrize("form, compiled", [
    ("growing", compiled_decoder), ("growing", compiled_layers), ("static", compiled_decoder),
])  # fmt: skip
def test_generate_on_compiled_parts(form, compiled):
    model, ids = make_small_model(), make_ids(70)
    plain = model(ids, use_cache=False).logits
    cache = TurboQuantCache.for_model(model, "k4v4", **FORMS[form])
    expected = generate(model, ids, cache, new=4)
    cache.reset()
    compiled(model, backend="eager")  # keeps the decoder's forward of an attached model
    assert torch.equal(generate(model, ids, cache, new=4), expected)
    cache.detach()
    assert torch.equal(model(ids, use_cache=False).logits, plain)
    with TurboQuantCache.for_model(model, "k4v4", **FORMS[form]) as another:
        assert torch.equal(generate(model, ids, another, new=4), expected)


def test_a_decoder_that_breaks_its_graph():
    model, ids = make_small_model(), make_ids(75)
    with TurboQuantCache.for_model(model, "k4v4", **FORMS["static"]) as cache:
        expected = feed(model, cache, ids, 70, *[1] * 5)
        cache.reset()
        model.model.embed_tokens.register_forward_pre_hook(
            lambda *args: torch._dynamo.graph_break()
        )
        model.compile(backend="eager")
        assert torch.equal(feed(model, cache, ids, 70, *[1] * 5), expected)


def test_numbers_that_may_vary():
    """dynamic=True takes no number for a constant; it is one graph all the same."""
    model, ids = make_small_model(), make_ids(80)
    step = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    with TurboQuantCache.for_model(model, "k4v4", **FORMS["static"]) as cache:
        expected = feed(model, cache, ids, 70, *[1] * 10)
        cache.reset()
        parts = [model(ids[:, :70], past_key_values=cache).logits]
        parts += [step(ids[:, i : i + 1], past_key_values=cache).logits for i in range(70, 80)]
    assert torch.equal(torch.cat(parts, 1), expected) and graphs() == 1


def test_steps_without_looking_at_guards():
    """The documented loop, in which nothing but the tokens changes."""
    model, ids = make_small_model(), make_ids(90, 2)
    step = torch.compile(model, fullgraph=True, backend="eager")
    options = {"preset": "k4v4", "max_batch_size": 2, **FORMS["static"]}
    with TurboQuantCache.for_model(model, **options) as cache:
        expected = feed(model, cache, ids, 70, *[1] * 20)
        cache.reset()
        found = [model(ids[:, :70], past_key_values=cache).logits]
        for i in range(70, 90):
            with torch.compiler.set_stance("default", skip_guard_eval_unsafe=i > 73):
                found.append(step(ids[:, i : i + 1], past_key_values=cache).logits)
    assert torch.equal(torch.cat(found, 1), expected) and graphs() == 1


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_layers_of_a_compiled_step_share_its_tensors(name):
    """They come into its graph. torch.compile works out anew, for each op that it does not know,
    what follows from them."""
    model, ids = make_model(name), make_ids(71)
    calls = []

    def backend(graph, inputs):
        op = torch.ops.turboquant.store_and_attend.default
        calls.extend(node for node in graph.graph.nodes if node.target is op)
        return graph

    with TurboQuantCache.for_model(model, "k4v4", **FORMS["static"]) as cache:
        feed(model, cache, ids[:, :70])
        torch.compile(model, fullgraph=True, backend=backend)(ids[:, 70:], past_key_values=cache)
        assert len(calls) == len(cache.packed)
    schema = [argument.name for argument in calls[0].target._schema.arguments]
    for call in calls:
        arguments = dict(zip(schema, call.args, strict=False)) | call.kwargs
        for of_step in "block_table seq_lens tail_slots tail_valid slot_mapping".split():
            node = arguments[of_step]
            while node.target is operator.getitem:  # the batch's rows of it
                node = node.args[0]
            assert node.op == "placeholder", (of_step, node.format_node())


@pytest.mark.parametrize("form", FORMS)
def test_what_fullgraph_cannot_compile(form):
    model, ids = make_small_model(), make_ids(71)
    with TurboQuantCache.for_model(model, "k4v4", **FORMS[form]) as cache:
        model.compile(fullgraph=True, backend="eager")
        with pytest.raises(Exception, match=r"first forward of a prompt .* cannot be compiled"):
            generate(model, ids, cache)
        assert cache.get_seq_length() == 0
        model._compiled_call_impl = None
        feed(model, cache, ids)
        assert cache.get_seq_length() == 71


def test_a_compiled_model_is_a_model():
    model, ids = make_small_model(), make_ids(70)
    before = set(vars(model)) | {"_is_torch_compile"}
    step = torch.compile(model, backend="eager")
    with TurboQuantCache.for_model(step, "k4v4", **FORMS["static"]) as cache:
        tokens = generate(step, ids, cache)
    with TurboQuantCache.for_model(model, "k4v4", **FORMS["static"]) as cache:
        assert torch.equal(generate(model, ids, cache), tokens)
    assert set(vars(model)) <= before


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
def test_a_model_compiled_for_cuda_graphs(form):
    model, ids = make_small_model().cuda(), make_ids(70, 2).cuda()
    options = {"preset": "k8v8", "max_batch_size": 2, **FORMS[form]}
    with TurboQuantCache.for_model(model, **options) as cache:
        expected = generate(model, ids, cache, new=30)
        cache.reset()
        model.compile(mode="reduce-overhead")
        assert torch.equal(generate(model, ids, cache, new=30), expected)
        cache.reset()
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(generate(model, ids, cache, new=30), expected)
