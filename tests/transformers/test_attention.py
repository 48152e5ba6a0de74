"""What attention through the cache returns: against the oracle, in generation and in batches."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from tests.transformers.harness import (
    COMMON,
    DRAFTS,
    MODELS,
    assert_close,
    calibrated,
    check_against_oracle,
    feed,
    generate,
    make_calm_model,
    make_config,
    make_ids,
    make_model,
    padded,
    recorded,
)
from torch_turboquant import PagedLayer
from torch_turboquant.integrations.transformers import TurboQuantCache

# ------------------------------------------------------------------------------- correctness


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bits", ["k4v4", "k3v2"])
def test_attention_equals_the_oracles(name, bits):
    """Prompt, single tokens, a continuation longer than max_q_len, single tokens."""
    model = make_model(name)
    ids, config = make_ids(150), make_config(model, bits)
    with recorded(model, config, max_q_len=7) as (cache, recorder):
        logits = feed(model, cache, ids, 80, 1, 1, 1, 30, 1, 1, 5, 1, 1, 1, 9, 1)
        assert cache.get_seq_length() == 150
        check_against_oracle(recorder, config, 80, center="auto")
    plain = model(ids).logits
    assert torch.equal(logits[:, :80], model(ids[:, :80]).logits)  # the prompt is exact
    assert (plain - logits)[:, 80:].abs().max() > 1e-2


@pytest.mark.parametrize("overrides", [
    {"sink_tokens": 0, "recent_window": 0},
    {"sink_tokens": 0, "recent_window": 9},
    {"sink_tokens": 3, "recent_window": 0},
    {"key_grid": "uniform", "value_grid": "uniform", "page_size": 32},
])  # fmt: skip
def test_tail_and_grid_options(overrides):
    model, ids = make_model(), make_ids(90)
    config = make_config(model, **overrides)
    with recorded(model, config, center=None, max_q_len=4) as (cache, recorder):
        feed(model, cache, ids, 50, 1, 1, 10, 1)
        check_against_oracle(recorder, config, 50)


def test_few_tokens_are_stored_by_their_attention(monkeypatch):
    """One call of both, if the window of the tail has all tokens of the call."""
    model, ids = make_model(), make_ids(100)
    config = make_config(model, recent_window=5)
    calls = []

    def noted(name):
        call = getattr(PagedLayer, name)
        return lambda *args: calls.append(name) or call(*args)

    for name in ("store", "attend", "store_and_attend"):
        monkeypatch.setattr(PagedLayer, name, noted(name))
    with recorded(model, config, max_q_len=6) as (cache, recorder):
        for new, expected in (
            (80, []),
            (1, ["store_and_attend"]),
            (5, ["store_and_attend"]),
            (6, ["store", "attend"]),
            (8, ["store", "attend", "store_and_attend"]),  # two pieces
        ):
            calls.clear()
            feed(model, cache, ids[:, :new], new)
            assert calls == expected * len(cache.packed)
            ids = ids[:, new:]
        check_against_oracle(recorder, config, 80, center="auto")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model, ids = make_model(dtype=dtype), make_ids(100)
    config = make_config(model, "k3v2")
    with recorded(model, config) as (cache, recorder):
        logits = feed(model, cache, ids, 80, 1, 1, 10, 1)
        assert logits.dtype == cache.layers[0].ring.dtype == dtype
        eps = torch.finfo(dtype).eps
        check_against_oracle(recorder, config, 80, center="auto", tolerance=eps, coarse=10)


@pytest.mark.parametrize("sizes", [(70, 61), (70, 20, 20), (70, 3, 1, 7, 50)])
def test_any_chunking_equals_token_by_token(sizes):
    """Seen from one layer, whose input does not depend on the codes of others: bytes and all."""
    model, ids = make_model(num_hidden_layers=1), make_ids(131)
    with TurboQuantCache.for_model(model, "k3v2", max_q_len=8, recent_window=16) as cache:
        one_by_one = feed(model, cache, ids, 70, *[1] * 61)
        layer = cache.layers[0]
        pages, ring = layer.pages.clone(), layer.ring.clone()
        cache.reset()
        layer.pages.zero_()
        layer.ring.zero_()
        chunked = feed(model, cache, ids, *sizes)
        assert_close(chunked, one_by_one)
        assert (pages != layer.pages).float().mean() < 1e-3  # a code may fall on the other side
        torch.testing.assert_close(layer.ring, ring, rtol=1e-4, atol=1e-4)


def test_wrong_keys_change_the_output():
    """The pages are what attention reads: no copy elsewhere hides them."""
    model, ids = make_model(), make_ids(100)
    with TurboQuantCache.for_model(model, config=make_config(model)) as cache:
        feed(model, cache, ids[:, :90])
        good = model(ids[:, 90:91], past_key_values=cache).logits
        cache.crop(-1)
        for layer in cache.layers:
            layer.pages.copy_(layer.pages.roll(1, dims=1))  # the other head's
        bad = model(ids[:, 90:91], past_key_values=cache).logits
    assert (good - bad).abs().max() > 0.5


def test_embeddings_instead_of_tokens():
    model, ids = make_model(), make_ids(75)
    embeddings = model.get_input_embeddings()(ids)
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        expected = feed(model, cache, ids, 70)
        cache.reset()
        parts = (embeddings[:, :70], embeddings[:, 70:])
        got = [model(inputs_embeds=part, past_key_values=cache).logits for part in parts]
        assert torch.equal(torch.cat(got, dim=1), expected)


# -------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generate_is_greedy_over_the_logits(name):
    model, prompt = make_model(name), make_ids(75)
    with TurboQuantCache.for_model(model, "k3v2") as cache:
        tokens = generate(model, prompt, cache)
        cache.reset()
        logits = feed(model, cache, tokens, 75, *[1] * 12)
    assert torch.equal(logits[:, 74:-1].argmax(-1), tokens[:, 75:])


def test_eight_bits_generate_what_the_model_does():
    model, prompt = make_calm_model(), make_ids(75)
    expected = generate(model, prompt, new=40)
    with TurboQuantCache.for_model(model, "k8v8") as cache:
        assert torch.equal(generate(model, prompt, cache, new=40), expected)


def test_generate_goes_on_with_a_filled_cache():
    """The second turn of a chat: generate gets the whole conversation, the cache its beginning."""
    model, prompt, more = make_model(), make_ids(75), make_ids(20, seed=2)
    with TurboQuantCache.for_model(model, "k4v4", max_q_len=8) as cache:
        first = generate(model, prompt, cache)
        whole = torch.cat([first, more], dim=1)
        second = generate(model, whole, cache)
        assert cache.get_seq_length() == second.shape[1] - 1
    with TurboQuantCache.for_model(model, "k4v4") as again:
        ids = second
        logits = feed(model, again, ids, 75, *[1] * (ids.shape[1] - 75))
    predicted = logits.argmax(-1)[:, -13:-1]
    assert torch.equal(predicted, second[:, -12:])


@pytest.mark.parametrize("form", [{}, {"static": True, "max_cache_len": 128}])
@pytest.mark.parametrize("tokens", [56, 80])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, DRAFTS])
def test_generate_keeps_the_cache_where_rope_changes(form, tokens, options):
    """Phi-3 leaves out a cache with keys of its short factors once a text needs the long ones."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0,
            "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}  # fmt: skip
    short = {"original_max_position_embeddings": 64}
    config = {**COMMON, "initializer_range": 0.08, "max_position_embeddings": 256, **short}
    model = AutoModelForCausalLM.from_config(
        transformers.Phi3Config(**config, rope_parameters={**rope, **short}), dtype=torch.float32
    ).eval()
    ids = make_ids(tokens // 2).repeat(1, 2)
    expected = generate(model, ids, None, **options)
    sizes = {"max_batch_size": 2, "recent_window": 96}
    with TurboQuantCache.for_model(model, "k8v8", **sizes, **form) as cache:
        assert torch.equal(generate(model, ids, cache, **options), expected)
        assert cache.get_seq_length() == expected.shape[1] - 1
    assert "prepare_inputs_for_generation" not in vars(model)


def test_prompt_lookup_decoding_equals_greedy():
    """Drafts of several tokens, most of them rolled back with crop."""
    model, prompt = make_calm_model(), make_ids(20).repeat(1, 4)
    with TurboQuantCache.for_model(model, "k3v2") as cache:
        expected = generate(model, prompt, cache, new=30, eos_token_id=0)
        cache.reset()
        drafted = generate(model, prompt, cache, new=30, **DRAFTS)
    assert torch.equal(drafted[:, :110], expected)  # 5.5 does not stop in the middle of a draft


def test_beam_search():
    model, prompt = make_calm_model(), make_ids(80)
    expected = generate(model, prompt, new=16, num_beams=3)
    with TurboQuantCache.for_model(model, "k8v8", max_batch_size=3) as cache:
        assert torch.equal(generate(model, prompt, cache, new=16, num_beams=3), expected)


# ----------------------------------------------------------------------------- batches, padding


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("sizes", [(70,), (70, 20, 1)])
def test_left_padded_batch_equals_each_sequence_alone(name, sizes):
    model = make_model(name)
    ids, mask = padded([100, 61, 31], 100)
    centers = TurboQuantCache.calibrate(model, make_ids(90, seed=7))
    options = {"config": make_config(model), "center": centers, "max_q_len": 8}
    with TurboQuantCache.for_model(model, max_batch_size=4, **options) as cache:
        together = feed(model, cache, ids, *sizes, *[1] * 3, mask=mask)
    for row in range(3):
        pad = int((mask[row] == 0).sum())
        first = sizes[0] - pad  # this sequence's share of the first, exact forward
        assert first > 0
        with TurboQuantCache.for_model(model, **options) as cache:
            alone = feed(model, cache, ids[row : row + 1, pad:], first)
        assert_close(together[row, pad:], alone[0], 1e-3)  # a code or two rounds the other way


def test_padded_batch_equals_the_oracle():
    model = make_model()
    ids, mask = padded([100, 61, 77], 100)
    config = make_config(model, "k3v2")
    with recorded(model, config, max_batch_size=3, max_q_len=8) as (cache, recorder):
        feed(model, cache, ids, 70, 1, 1, 20, 1, mask=mask)
        check_against_oracle(recorder, config, 70, center="auto", pads=[0, 39, 23])


def test_padding_beyond_the_first_forward_equals_the_oracle():
    """The first forward alone reads no codes, also for sequences without a token in it."""
    model = make_model()
    ids, mask = padded([100, 61, 31], 100)
    config, centers = make_config(model, "k3v2"), calibrated(model)
    options = {"center": centers, "max_batch_size": 3, "max_q_len": 8}
    with recorded(model, config, **options) as (cache, recorder):
        feed(model, cache, ids, 16, 16, 48, 1, 1, mask=mask)
        check_against_oracle(recorder, config, 16, center=centers, pads=[0, 39, 69])


def test_generate_with_left_padding():
    model = make_model()
    ids, mask = padded([80, 30, 55], 80)
    expected = generate(model, ids, attention_mask=mask)
    with TurboQuantCache.for_model(model, "k8v8", max_batch_size=3) as cache:
        assert torch.equal(generate(model, ids, cache, attention_mask=mask), expected)
        cache.reset()
        chunked = generate(model, ids, cache, attention_mask=mask, prefill_chunk_size=16)
        assert torch.equal(chunked, expected)


@pytest.mark.parametrize("method", ["reorder_cache", "batch_select_indices", "repeat"])
def test_selecting_sequences(method):
    model, ids = make_model(), make_ids(90, 3)
    options = {"max_batch_size": 4, "center": None, "config": make_config(model)}
    with TurboQuantCache.for_model(model, **options) as cache:
        feed(model, cache, ids[:, :60], 50, 10)
        if method == "repeat":
            cache.batch_select_indices(torch.tensor([True, False, True]))
            cache.batch_repeat_interleave(2)
            rows = [0, 0, 2, 2]
        else:
            rows = [2, 0, 0]
            getattr(cache, method)(torch.tensor(rows))
        actual = feed(model, cache, ids[rows, 60:], 1, 20)
    with TurboQuantCache.for_model(model, **options) as cache:
        feed(model, cache, ids[rows, :60], 50, 10)
        expected = feed(model, cache, ids[rows, 60:], 1, 20)
    assert_close(actual, expected)


def test_selecting_copies_what_is_in_use():
    """Beam search selects in every step, and memory may be there for a much longer context."""
    model, ids = make_model(), make_ids(40, 2)

    class Copies(TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.index_select.default:
                self.nbytes += result.nbytes
            return result

    for form in ({}, {"static": True}):
        options = {"max_batch_size": 2, "max_cache_len": 8192, "recent_window": 0, **form}
        with TurboQuantCache.for_model(model, "k8v8", **options) as cache:
            feed(model, cache, ids, 40)
            with Copies() as copies:
                cache.reorder_cache(torch.tensor([1, 0]))
            pages = sum(layer.pages.nbytes for layer in cache.layers)
            assert 0 < copies.nbytes < pages / 32
    with TurboQuantCache.for_model(model, max_batch_size=2) as cache:
        with pytest.raises(ValueError, match="holds no sequences yet"):
            cache.reorder_cache(torch.tensor([0, 0]))


def test_calls_without_tokens():
    """The model says what is missing, as without a cache."""
    model = make_model()
    with TurboQuantCache.for_model(model) as cache:
        with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
            model(past_key_values=cache)


def test_options_are_those_of_the_call():
    """Made anew when a number changes, and for sinks, whose values may have changed."""
    model = make_model()
    with TurboQuantCache.for_model(model, config=make_config(model)) as cache:
        feed(model, cache, make_ids(41), 40, 1)
        layer, module = cache.layers[0], model.model.layers[0].self_attn
        query, sinks = torch.zeros(1, 4, 1, 32), torch.zeros(4, dtype=torch.bfloat16)

        def options(**kwargs):
            return layer._options(module, query, kwargs)

        first = options(scaling=0.5)
        assert options(scaling=0.5) is first and options(scaling=0.5, softcap=0) is first
        assert options(scaling=0.25).softmax_scale == 0.25
        assert options(scaling=0.5, softcap=3.0).soft_cap == 3.0
        assert options().softmax_scale == 32**-0.5 and options().soft_cap == 0
        assert options(s_aux=sinks).sink_logits.max() == 0
        sinks += 1
        assert options(s_aux=sinks).sink_logits.min() == 1
        assert options().sink_logits is None
        with pytest.raises(ValueError, match="asks for prefix, which"):
            options(prefix=sinks)
