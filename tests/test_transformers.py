"""The transformers cache against an oracle that quantises the same keys and values on the side.

A recorder takes down what enters and leaves the attention of every layer. From the recorded
queries, keys and values the oracle computes what must come out: it encodes and decodes every key
and value with the public ops, and attends densely in float64, reading exact numbers where the
definition says so (the first forward, sinks, recent window). It shares no bookkeeping with the
cache under test, and gets the very same bits, so that no code may differ.

Models are tiny and random, with weights large enough that attention is peaked: quantised keys
change the result by far more than the tolerance, which the tests check.
"""

import copy
import gc
import inspect
import itertools
import weakref
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    AttentionInterface,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
)

from torch_turboquant import CacheConfig, cache_load, cache_store, make_tables, preset  # noqa: E402
from torch_turboquant.integrations.transformers import (  # noqa: E402
    CENTER_TOKENS,
    TurboQuantCache,
    lifecycle,
    load_centers,
    save_centers,
)
from torch_turboquant.integrations.transformers.constants import ConstantsByDevice  # noqa: E402
from torch_turboquant.integrations.transformers.models import (  # noqa: E402
    recording,
    rotary_partners,
)
from torch_turboquant.integrations.transformers.tensors import zeros_together  # noqa: E402
from torch_turboquant.ops.cache import allocate_cache  # noqa: E402

VOCAB = 101


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


# ------------------------------------------------------------------------------------- models

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
MODELS = {
    "llama": ("LlamaConfig", {"head_dim": 32}),
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama-mqa-48": ("LlamaConfig", {"num_key_value_heads": 1, "head_dim": 48}),
    "qwen2": ("Qwen2Config", {}),  # biased keys, head_dim None
    "mistral": ("MistralConfig", {"sliding_window": 24, "head_dim": 32}),
    "gemma2": (
        "Gemma2Config",  # soft cap, sliding and full layers, its own scale, eager attention
        {
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",  # learned sinks, eager attention
        {
            "head_dim": 32,
            "sliding_window": 24,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}


def make_model(name="llama", dtype=torch.float32, **changes):
    kind, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**COMMON, **options, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if name == "qwen2":
        for layer in model.model.layers:  # constant channels, as the real model has them
            layer.self_attn.k_proj.bias.copy_(20 * torch.randn(layer.self_attn.k_proj.bias.shape))
    if name == "gemma2":
        model.set_attn_implementation("eager")  # sdpa has no soft cap; some versions drop it there
    if name == "gpt_oss":
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.randn(layer.self_attn.sinks.shape) + 2)
    return model


def make_calm_model():
    """Small weights: the most likely token does not hang on the last bit of a logit."""
    return make_model(initializer_range=0.04)


def make_ids(tokens, batch=1, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (batch, tokens), generator=generator)


def make_config(model, name="k4v4", **overrides):
    text = model.config
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    small = {"page_size": 16, "sink_tokens": 3, "recent_window": 9}
    return preset(name, head_dim, **{**small, **overrides})


def feed(model, cache, ids, *sizes, mask=None):
    """Logits of ids, handed to the model in forwards of these sizes (the last one: the rest)."""
    bounds = [0]
    for size in sizes:
        bounds.append(min(bounds[-1] + size, ids.shape[1]))
    if bounds[-1] < ids.shape[1]:
        bounds.append(ids.shape[1])
    past, parts = cache.get_seq_length(), []
    for start, end in itertools.pairwise(bounds):
        seen = None if mask is None else mask[:, : past + end]
        positions = None
        if seen is not None:
            positions = (seen.cumsum(1) - 1).clamp_min(0)[:, -(end - start) :]
        output = model(
            ids[:, start:end], past_key_values=cache, attention_mask=seen, position_ids=positions
        )
        parts.append(output.logits)
    return torch.cat(parts, dim=1)


# ------------------------------------------------------------------------------------- oracle


class Recorder:
    """Queries, keys, values and results of every layer's attention: [batch, heads, tokens, d]."""

    def __init__(self, model, cache):
        self.cache = cache
        self.layers = [([], [], [], []) for _ in cache.layers]
        self.options = [{} for _ in cache.layers]
        self.teachers = {}  # queries of the forward that a layer's center was learned in
        self.partners = rotary_partners(model)
        name = model.config._attn_implementation
        attention, update = AttentionInterface()[name], cache.update

        def recorded_update(key, value, layer_idx, *args, **kwargs):
            self.layers[layer_idx][1].append(key)
            self.layers[layer_idx][2].append(value)
            return update(key, value, layer_idx, *args, **kwargs)

        def recorded_attention(module, query, key, value, attention_mask=None, **kwargs):
            if not cache.sequences.center_known:
                self.teachers[module.layer_idx] = query.cpu()
            out, weights = attention(module, query, key, value, attention_mask, **kwargs)
            self.layers[module.layer_idx][0].append(query)
            self.layers[module.layer_idx][3].append(out.transpose(1, 2))
            self.options[module.layer_idx] = kwargs
            return out, weights

        AttentionInterface.register(name, recorded_attention)
        cache.update = recorded_update
        self.restore = lambda: AttentionInterface.register(name, attention)

    def to_cpu(self):
        self.layers = [tuple([x.cpu() for x in part] for part in layer) for layer in self.layers]
        for options in self.options:
            options |= {n: x.cpu() for n, x in options.items() if isinstance(x, torch.Tensor)}

    def crop(self, tokens):
        """Forgets the last tokens."""
        kept = [[torch.cat(x, 2)[:, :, :-tokens] for x in layer] for layer in self.layers]
        self.layers = [tuple([x] for x in layer) for layer in kept]


def quantised(key, value, config, tables):
    """[batch, heads, n, d] -> the same after encoding and decoding, float64."""
    batch, heads, n, d = key.shape
    k, v = (x.transpose(1, 2).reshape(batch * n, heads, d) for x in (key, value))
    pages = -(-batch * n // config.page_size)
    cache = allocate_cache(config, pages, heads)
    cache_store(k, v, cache, torch.arange(batch * n), config, tables)
    table = torch.arange(pages, dtype=torch.int32)[None]
    lengths = torch.tensor([batch * n], dtype=torch.int32)
    loaded = cache_load(cache, table, lengths, config, tables, batch * n, torch.float32)
    return [x[0].unflatten(0, (batch, n)).transpose(1, 2).double() for x in loaded]


def learned_center(key, query, pads, sinks, partners):
    """What a first forward over these keys teaches: float32 [3, heads, d].

    query: of the last tokens; partners: of rotary_partners.
    """
    tokens = torch.arange(key.shape[2]) - pads[:, None] >= sinks
    kept = key.double().transpose(1, 2)[tokens]
    mean, variance = kept.mean(0), kept.var(0, correction=0)
    seen = query.double().transpose(1, 2)[tokens[:, -query.shape[2] :]]
    energy = seen.square().mean(0).unflatten(0, (key.shape[1], -1)).mean(1)

    def spread(x):
        x = torch.stack([x, x[:, partners]]).mean(0)
        return x + 8 * x.mean(1, keepdim=True) / len(kept)

    scale = (spread(energy) / spread(variance + mean**2 / 2)) ** 0.25
    scale = scale / scale.mean(1, keepdim=True)
    return torch.stack([mean, scale, 1 / scale]).float()


def oracle(query, key, value, layer, options, config, exact_columns, center, pads, first_held=0):
    """What attention must return, and what it would without quantisation: float64 like query."""
    batch, heads, n, _ = query.shape
    pads = torch.tensor(pads or [0] * batch)
    rough = quantised(key, value, config, make_tables(config, layer, "cpu", center))
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    place = j - pads[:, None, None]  # of a key in its own sequence
    exact = (place < config.sink_tokens) | (i - j < config.recent_window) & (place >= first_held)
    exact = (exact | (i < exact_columns))[:, None]
    visible = (j <= i) & (place >= 0)
    if options.get("sliding_window"):
        visible = visible & (i - j < options["sliding_window"])
    group = heads // key.shape[1]
    q = query.double()
    k, v, rough_k, rough_v = (x.double().repeat_interleave(group, 1) for x in (key, value, *rough))

    def attend(exact):
        scores = torch.where(exact, q @ k.mT, q @ rough_k.mT) * options["scaling"]
        if options.get("softcap"):
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        total = scores.logsumexp(-1, keepdim=True)
        if options.get("s_aux") is not None:
            total = torch.logaddexp(total, options["s_aux"].double()[None, :, None, None])
        p = (scores - total).exp().nan_to_num(0.0)  # padding sees nothing
        return (p * exact) @ v + (p * ~exact) @ rough_v

    return attend(exact), attend(torch.ones_like(exact))


def check_against_oracle(
    recorder, config, exact_columns, *, center=None, pads=None, tolerance=5e-4, coarse=5, **more
):
    """Every layer's recorded results; quantisation must matter `coarse` times the tolerance.

    The tolerance is what rounding the weights of 128 keys to integers may cost (`bounds` in
    test_attention.py), relative to the largest output. config: of all layers, or a list with one
    per layer.
    """
    configs = config if isinstance(config, list) else [config] * len(recorder.layers)
    for layer, (parts, config) in enumerate(zip(recorder.layers, configs, strict=True)):
        query, key, value, actual = (torch.cat(part, 2) for part in parts)
        if center == "auto":
            first, last = key[:, :, :exact_columns], recorder.teachers[layer]
            learned = learned_center(
                first, last, torch.tensor(pads or [0]), config.sink_tokens, recorder.partners
            )
            torch.testing.assert_close(recorder.cache.centers[layer], learned, rtol=1e-4, atol=1e-5)
            given = recorder.cache.centers[layer]  # bit for bit, so that no code differs
        else:
            given = center and center[layer]
        options = recorder.options[layer]
        expected, plain = oracle(
            query, key, value, layer, options, config, exact_columns, given, pads, **more
        )
        real = torch.arange(key.shape[2]) >= torch.tensor(pads or [0] * len(key))[:, None]
        error, effect = (
            (x.double() - expected).abs().amax((1, 3))[real].max().item() for x in (actual, plain)
        )
        bound = tolerance * expected.abs().max().item()
        assert error <= bound, f"layer {layer}: error {error}, bound {bound}"
        assert effect >= coarse * bound, f"layer {layer}: effect {effect}, bound {bound}"


def assert_close(actual, expected, tolerance=5e-4):
    """Inputs that differ in their last bits may round to other integers."""
    scale = expected.abs().max().item()
    error = (actual.float() - expected.float()).abs().max().item()
    assert error <= tolerance * scale, f"error {error}, scale {scale}"


@contextmanager
def recorded(model, config, **options):
    """(cache, recorder) on a model."""
    with TurboQuantCache.for_model(model, config=config, **options) as cache:
        recorder = Recorder(model, cache)
        try:
            yield cache, recorder
        finally:
            recorder.restore()
            del cache.update


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


# -------------------------------------------------------------------------------- generation


def generate(model, prompt, cache=None, new=12, **options):
    return model.generate(
        prompt, past_key_values=cache, max_new_tokens=new, do_sample=False, **options
    )


DRAFTS = {"prompt_lookup_num_tokens": 4, "eos_token_id": 0}  # older versions look for an end


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


def padded(lengths, total, seed=1):
    ids, mask = make_ids(total, len(lengths), seed), torch.ones(len(lengths), total).long()
    for row, length in enumerate(lengths):
        ids[row, : total - length] = 0
        mask[row, : total - length] = 0
    return ids, mask


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("sizes", [(70,), (70, 20, 1), (16, 16, 48)])
def test_left_padded_batch_equals_each_sequence_alone(name, sizes):
    """Also when the padding goes on beyond the first forward."""
    model = make_model(name)
    ids, mask = padded([100, 61, 31], 100)
    centers = TurboQuantCache.calibrate(model, make_ids(90, seed=7))
    options = {"config": make_config(model), "center": centers, "max_q_len": 8}
    with TurboQuantCache.for_model(model, max_batch_size=4, **options) as cache:
        together = feed(model, cache, ids, *sizes, *[1] * 3, mask=mask)
    for row in range(3):
        pad = int((mask[row] == 0).sum())
        first = max(0, sizes[0] - pad)  # this sequence's share of the first, exact forward
        if first == 0:
            # its first own forward comes later, and reads from codes what is beyond the tail
            continue
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


# ------------------------------------------------------------------------------------- center


def test_short_prompts_wait_for_a_center():
    """Exact until CENTER_TOKENS tokens after the sinks are there, then encoded all at once."""
    model, ids = make_model(), make_ids(120)
    config = make_config(model, "k3v2")
    ready = CENTER_TOKENS + config.sink_tokens
    with recorded(model, config) as (cache, recorder):
        feed(model, cache, ids[:, : ready - 1], 20, *[1] * (ready - 21))
        assert cache.centers is None
        held = cache.memory_bytes()
        assert held["pages"] == 0 and held["waiting"] > 0
        feed(model, cache, ids[:, ready - 1 :], *[1] * (121 - ready))
        assert len(cache.centers) == 3
        held = cache.memory_bytes()
        assert held["pages"] > 0 and held["waiting"] == 0
        check_against_oracle(recorder, config, ready, center="auto")


def test_a_waiting_cache_can_be_cropped_and_reordered():
    model, ids = make_model(), make_ids(100, 2)
    with TurboQuantCache.for_model(model, "k8v8", max_batch_size=2) as cache:
        feed(model, cache, ids[:, :30], 25)
        cache.crop(-10)
        cache.reorder_cache(torch.tensor([1, 1]))
        swapped = ids[[1, 1]]
        actual = feed(model, cache, swapped[:, 20:], *[1] * 80)
    # what 8 bits change in this model; other rows or another order change everything
    assert_close(actual, model(swapped).logits[:, 20:], 3e-2)


def test_calibrated_center(tmp_path):
    model, ids = make_model("qwen2"), make_ids(120)
    text = make_ids(200, 2, seed=7)
    centers = TurboQuantCache.calibrate(model, text, chunk=33)
    reference = DynamicCache()
    model(text, past_key_values=reference)
    queries = {}
    with recording(model, lambda module, query, *others: queries.update({module.layer_idx: query})):
        model(text, use_cache=False)
    means = TurboQuantCache.calibrate(model, text, chunk=33, scaled=False)
    parts = zip(reference.layers, queries.values(), centers, means, strict=True)
    for layer, query, center, mean in parts:
        learned = learned_center(layer.keys, query, torch.zeros(2), 4, rotary_partners(model))
        torch.testing.assert_close(center, learned, rtol=1e-3, atol=1e-4)
        assert torch.equal(mean, center[0])
    config = make_config(model)
    with recorded(model, config, center=centers) as (cache, recorder):
        actual = feed(model, cache, ids, 10, 1, 1)  # no need to wait for tokens
        assert torch.equal(cache.centers[1], centers[1])
        check_against_oracle(recorder, config, 10, center=centers)

    pytest.importorskip("safetensors")
    save_centers(tmp_path / "c.safetensors", centers, model)
    loaded = load_centers(tmp_path / "c.safetensors", model)
    assert all(torch.equal(a, b) for a, b in zip(loaded, centers, strict=True))
    path = tmp_path / "c.safetensors"
    with TurboQuantCache.for_model(model, config=config, center=path) as cache:
        assert_close(feed(model, cache, ids, 10, 1, 1), actual, 1e-6)


def test_constants_reach_another_device():
    center = torch.randn(2, 32)
    configs = {0: preset("k4v4", 32), 2: preset("k5v4u", 32)}
    constants = ConstantsByDevice(configs, {0: center}, torch.arange(32).flip(0))
    expected = {0: make_tables(configs[0], 0, center=center), 2: make_tables(configs[2], 2)}
    places, contents = [], set()
    for name in ("cpu", "cpu:0"):  # the same memory under two names
        placed = constants.on(torch.device(name))
        assert torch.equal(placed.partners, torch.arange(32).flip(0))
        for layer, table in expected.items():
            for there, here in zip(placed.tables[layer], table, strict=True):
                assert (there is None) == (here is None)
                if here is not None:
                    assert torch.equal(there, here) and there.dtype == here.dtype
                    assert there.data_ptr() % 64 == 0
                    assert there.data_ptr() != center.data_ptr()
                    places.append(there.data_ptr())
                    contents.add(here.numpy().tobytes())
        assert constants.on(torch.device(name)) is placed
    assert len(set(places)) == 2 * len(contents)  # what is equal is there once
    # another cache of such layers has the same tables, but centers of its own
    other = ConstantsByDevice(configs, {}, torch.arange(32)).on(torch.device("cpu")).tables
    assert other[0].key_signs is constants.on(torch.device("cpu")).tables[0].key_signs
    assert other[0].center is None


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("center", ["auto", "mean"])
def test_layers_learn_together_what_they_would_alone(monkeypatch, family, center):
    """A first forward learns centers of several layers at once, as far as it has few tokens."""
    model, ids = make_model(family), make_ids(80, 2)
    sizes = []
    learn = lifecycle.learn

    def noted(keys, *others, **more):
        sizes.append(len(keys))
        return learn(keys, *others, **more)

    monkeypatch.setattr(lifecycle, "learn", noted)
    found = []
    layers = model.config.num_hidden_layers
    for together, expected in ((8192, [layers]), (1, [1] * layers), (2 * 2 * 70, [2, 1])):
        monkeypatch.setattr(lifecycle, "_TOGETHER", together)
        sizes.clear()
        with TurboQuantCache.for_model(model, "k8v8", max_batch_size=2, center=center) as cache:
            logits = feed(model, cache, ids, 70, 1)
            found.append((cache.centers, logits))
            assert all(one.pages.any() and one.waiting is None for one in cache.packed)
        assert sizes == expected
    for centers, logits in found[1:]:
        for one, other in zip(centers, found[0][0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert_close(logits, found[0][1], 1e-2)


def test_learning_that_fails_leaves_nothing(monkeypatch):
    model, ids = make_model(), make_ids(90)
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        with monkeypatch.context() as patch:
            patch.setattr(lifecycle, "learn", lambda *args, **more: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                feed(model, cache, ids[:, :80])
        assert cache.sequences.forward is None and cache.get_seq_length() == 0
        actual = feed(model, cache, ids, 80, 1)
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        assert_close(actual, feed(model, cache, ids, 80, 1), 1e-6)


def test_calibrate_takes_text():
    class Tokenizer:
        def __call__(self, text, return_tensors):
            return SimpleNamespace(input_ids=torch.tensor([[ord(c) % VOCAB for c in text]]))

    model, text = make_model(), "the quick brown fox jumps over the lazy dog " * 3
    ids = Tokenizer()(text, "pt").input_ids
    a = TurboQuantCache.calibrate(model, text, Tokenizer())
    b = TurboQuantCache.calibrate(model, ids)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    with pytest.raises(ValueError, match="tokenizer"):
        TurboQuantCache.calibrate(model, text)
    with pytest.raises(ValueError, match="at least 64"):
        TurboQuantCache.calibrate(model, ids[:, :60])


def test_reset_forgets_a_learned_center():
    model, ids, others = make_model(), make_ids(90), make_ids(90, seed=9)
    with TurboQuantCache.for_model(model, "k3v2") as cache:
        first = feed(model, cache, ids, 80, 1)
        before = cache.centers[0]
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.memory_bytes()["pages"] == 0
        feed(model, cache, others, 80, 1)
        assert not torch.equal(cache.centers[0], before)
        cache.reset()
        assert_close(feed(model, cache, ids, 80, 1), first, 1e-6)


# --------------------------------------------------------------------------------------- crop


@pytest.mark.parametrize("removed", [1, 5, 8])
def test_crop_within_the_ring_leaves_no_trace(removed):
    """max_q_len - 1 tokens can be taken back."""
    model, ids, draft = make_model(), make_ids(110), make_ids(9, seed=3)
    config = make_config(model)
    with TurboQuantCache.for_model(model, config=config, max_q_len=9) as cache:
        feed(model, cache, ids[:, :90], 80, 1)
        kept = 9 - removed
        feed(model, cache, torch.cat([ids[:, 90 : 90 + kept], draft[:, :removed]], dim=1))
        cache.crop(-removed)
        actual = feed(model, cache, ids[:, 90 + kept :], 1, 3)
        cache.reset()
        expected = feed(model, cache, ids, 80, *[1] * (10 + kept), 1, 3)
    # Exact tokens that had become codes would be 6e-3 at least, codes that round otherwise 5e-4.
    assert_close(actual, expected[:, 90 + kept :], 2e-3)


def test_deep_crop_reads_codes_until_the_ring_is_full_again():
    model, ids = make_model(), make_ids(110)
    config = make_config(model, "k3v2")
    with recorded(model, config, max_q_len=4, center=None) as (cache, recorder):
        feed(model, cache, ids)
        cache.crop(-50)
        recorder.crop(50)
        assert cache.get_seq_length() == 60
        feed(model, cache, ids[:, 60:], *[1] * 5, 30)
        check_against_oracle(recorder, config, 60, first_held=60)


def test_crop_to_nothing_and_refill():
    model, ids = make_model(), make_ids(90)
    with TurboQuantCache.for_model(model, config=make_config(model)) as cache:
        first = feed(model, cache, ids, 80, 1)
        cache.crop(-90)
        assert cache.get_seq_length() == 0
        assert_close(feed(model, cache, ids, 80, 1), first, 1e-6)
        cache.crop(0)
        assert cache.get_seq_length() == 90
        if "max_length" in inspect.signature(Cache.crop).parameters:  # 5.5: tokens to keep
            cache.crop(85)
            assert cache.get_seq_length() == 85
            cache.crop(100)
            assert cache.get_seq_length() == 85
        else:
            with pytest.raises(ValueError, match="negative"):
                cache.crop(5)


# ----------------------------------------------------------------------------- attach and detach


def test_other_caches_work_as_before_while_attached():
    model, ids = make_model(), make_ids(90)
    expected = feed(model, DynamicCache(), ids, 60, 1)
    uncached = model(ids).logits
    hooks = len(model.model._forward_pre_hooks), len(model.model._forward_hooks)
    first = TurboQuantCache.for_model(model, "k3v2")
    second = TurboQuantCache.for_model(model, "k4v4")
    assert model.config._attn_implementation == "turboquant_sdpa"
    dynamic = DynamicCache(config=model.config)
    a1, b1 = feed(model, first, ids[:, :60]), feed(model, second, ids[:, :60])
    c1 = feed(model, dynamic, ids[:, :60])
    a2, b2 = feed(model, first, ids[:, 60:], 1), feed(model, second, ids[:, 60:], 1)
    c2 = feed(model, dynamic, ids[:, 60:], 1)
    assert torch.equal(torch.cat([c1, c2], 1), expected)
    assert torch.equal(model(ids).logits, uncached)
    first.detach()
    assert model.config._attn_implementation == "turboquant_sdpa"  # the second is attached
    second.detach()
    second.detach()
    assert model.config._attn_implementation == "sdpa"
    assert (len(model.model._forward_pre_hooks), len(model.model._forward_hooks)) == hooks
    assert torch.equal(feed(model, DynamicCache(), ids, 60, 1), expected)
    # interleaving has not mixed them
    for preset_name, part1, part2 in (("k3v2", a1, a2), ("k4v4", b1, b2)):
        with TurboQuantCache.for_model(model, preset_name) as cache:
            alone = feed(model, cache, ids, 60, 1)
        assert_close(torch.cat([part1, part2], 1), alone, 1e-6)


def test_a_detached_cache_is_refused_and_can_come_back():
    model, ids = make_model(), make_ids(80)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    cache = TurboQuantCache.for_model(model, "k4v4")
    feed(model, cache, ids[:, :70])
    cache.detach()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    with pytest.raises(RuntimeError, match="attached again"):
        model(ids[:, 70:], past_key_values=cache)
    cache.attach(model)
    actual = feed(model, cache, ids[:, 70:], 1)
    cache.reset()
    assert_close(actual, feed(model, cache, ids, 70, 1)[:, 70:], 1e-6)
    cache.detach()


def test_a_forgotten_cache_restores_the_model():
    model = make_model()
    cache = TurboQuantCache.for_model(model, "k4v4")
    feed(model, cache, make_ids(70))
    del cache
    gc.collect()
    assert model.config._attn_implementation == "sdpa"
    assert not model.model._forward_pre_hooks and not model.model._forward_hooks


def test_a_cache_does_not_keep_its_model():
    model = make_model()
    cache = TurboQuantCache.for_model(model, "k4v4")
    feed(model, cache, make_ids(70))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    cache.detach()


def test_a_copy_of_an_attached_model_is_an_ordinary_model():
    model, ids = make_model(), make_ids(70)
    expected = feed(model, DynamicCache(), ids, 60, 1)
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        feed(model, cache, ids)
        copied = copy.deepcopy(model)
        assert torch.equal(feed(copied, DynamicCache(), ids, 60, 1), expected)
        with pytest.raises(RuntimeError, match="attached"):
            copied(ids, past_key_values=cache)
        with TurboQuantCache.for_model(copied, "k4v4") as other:
            feed(copied, other, ids)
            with pytest.raises(ValueError, match="not attached to this model"):
                copied(ids, past_key_values=cache)
        assert copied.config._attn_implementation == "sdpa"
    assert torch.equal(feed(model, DynamicCache(), ids, 60, 1), expected)


@pytest.mark.parametrize("form", [{}, {"static": True, "max_cache_len": 128}])
def test_a_copy_of_a_cache_goes_its_own_way(form):
    model, ids = make_model(), make_ids(120, 2)
    with TurboQuantCache.for_model(model, "k3v2", max_batch_size=2, **form) as cache:
        feed(model, cache, ids[:, :90], 80, 1)
        twin = copy.deepcopy(cache)
        expected = feed(model, cache, ids[:, 90:], *[1] * 30)
        with pytest.raises(ValueError, match="not attached to this model"):
            model(ids[:, 90:91], past_key_values=twin)
        cache.reset()
        feed(model, cache, make_ids(120, 2, seed=2))  # would overwrite what they share
        twin.attach(model)
        assert torch.equal(feed(model, twin, ids[:, 90:], *[1] * 30), expected)
        twin.detach()
        feed(model, cache, ids[:, :1])
        assert (cache.get_seq_length(), twin.get_seq_length()) == (121, 120)


def test_saving_an_attached_model(tmp_path):
    model, ids = make_model(), make_ids(70)
    with TurboQuantCache.for_model(model, "k4v4"):
        model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert_close(loaded(ids).logits, model(ids).logits, 1e-6)


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_failing_forward_leaves_the_cache_as_it_was(tokens):
    model, ids = make_model(), make_ids(110)
    config = make_config(model, "k3v2")
    with recorded(model, config, max_q_len=8) as (cache, recorder):
        feed(model, cache, ids[:, :80])

        def fail(*args):
            raise KeyboardInterrupt

        # the first layer has stored its tokens when the second one fails
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(make_ids(tokens, seed=8), past_key_values=cache)
        hook.remove()
        for part in recorder.layers[0]:
            part.pop()
        assert cache.get_seq_length() == 80
        feed(model, cache, ids[:, 80:], 1, 5, *[1] * 24)
        # a long failed forward has overwritten the ring: codes until it is full again
        held = 0 if tokens == 1 else 80
        check_against_oracle(recorder, config, 80, center="auto", first_held=held)


# ------------------------------------------------------------------------------------- memory


def test_pages_grow_or_are_there_from_the_start():
    model, ids = make_model(), make_ids(400)
    config = make_config(model)
    with TurboQuantCache.for_model(model, config=config) as cache:
        grown = feed(model, cache, ids, 70, 200, 1)
        assert cache.layers[0].pages.shape[0] >= 25
        assert cache.layers[0].get_max_length() == -1
    with TurboQuantCache.for_model(model, config=config, max_cache_len=400) as cache:
        fixed = feed(model, cache, ids[:, :70])
        address = cache.layers[0].pages.data_ptr()
        fixed = torch.cat([fixed, feed(model, cache, ids[:, 70:], 200, 1)], dim=1)
        assert cache.layers[0].pages.data_ptr() == address
        assert cache.layers[0].pages.shape[0] == 25
        assert cache.layers[0].get_max_length() == 400
        with pytest.raises(ValueError, match="401 tokens do not fit into max_cache_len=400"):
            model(ids[:, :1], past_key_values=cache)
        assert cache.get_seq_length() == 400
    assert_close(fixed, grown, 1e-6)


def shared(layers, name):
    """How many layers share each allocation, in the order of their first ones."""
    places = [getattr(layer, name).untyped_storage().data_ptr() for layer in layers]
    return list(Counter(places).values())


@pytest.mark.parametrize("center", ["auto", None])
def test_layers_that_are_alike_get_their_memory_together(center):
    model, ids = make_model(num_hidden_layers=5), make_ids(600)
    options = {"boundary_layers": 1, "center": center}
    with TurboQuantCache.for_model(model, "k4v4", **options) as cache:
        feed(model, cache, ids[:, :100])
        assert shared(cache.packed, "pages") == shared(cache.packed, "ring") == [2, 3]
        held = [layer.pages.clone() for layer in cache.packed]
        logits = feed(model, cache, ids[:, 100:], 200, 300)  # more pages, layer by layer
        assert shared(cache.packed, "pages") == [1] * 5
        for layer, pages in zip(cache.packed, held, strict=True):
            full = 100 // cache.config.page_size
            assert torch.equal(layer.pages[:full], pages[:full])
    for form in ({"max_cache_len": 600}, {"max_cache_len": 600, "static": True}):
        with TurboQuantCache.for_model(model, "k4v4", **options, **form) as cache:
            assert torch.equal(feed(model, cache, ids, 100, 200, 300)[:, 100:], logits)
            together = [1] * 5 if "static" in form else [2, 3]  # torch.compile would see aliases
            assert shared(cache.packed, "pages") == shared(cache.packed, "ring") == together


def test_memory_together_is_of_one_device_shape_and_dtype():
    model = make_model("mistral", num_hidden_layers=6, layer_types=["full_attention"] * 6)
    options = {"max_cache_len": 200, "max_batch_size": 2, "center": None}
    with TurboQuantCache.for_model(model, "k4v4", **options) as cache:
        cache.sequences.begin(1, 70, None)
        for layer in cache.packed:
            layer.prepare(3, torch.bfloat16, torch.device("cpu"))
        one, two, three, four = cache.packed[2:]
        one.prepare(3, torch.bfloat16, torch.device("meta"))
        two.dtype, three.kv_heads = torch.float32, 2
        four.sliding_window = 24
        lifecycle.allocate(cache.packed)
        first = cache.packed[0]
        for layer in cache.packed:
            assert layer.pages.device == layer.ring.device == layer.device
            assert layer.pages.dtype == torch.uint8 and layer.ring.dtype == layer.dtype
            assert layer.pages.shape[1] == layer.ring.shape[1] == layer.kv_heads
            assert len(layer.pages) == 2 * cache.sequences.window_pages(layer.sliding_window)
            assert layer.pages.is_contiguous() and layer.ring.is_contiguous()
        for layer in cache.packed[1:]:
            apart = layer.pages.untyped_storage()._cdata != first.pages.untyped_storage()._cdata
            assert apart == (layer is not cache.packed[1])
        cache.sequences.abort()


@pytest.mark.parametrize("shape", [(3, 5), (2, 64), (1,)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_zeros_together_begin_where_allocations_would(shape, dtype):
    wanted = [(shape, dtype), ((2, 3), torch.float32)]
    tensors = [t for part in zeros_together(3, wanted, torch.device("cpu")) for t in part]
    assert [(tuple(t.shape), t.dtype) for t in tensors] == 3 * wanted
    first = tensors[0].data_ptr()
    for i, tensor in enumerate(tensors):
        assert tensor.is_contiguous() and (tensor.data_ptr() - first) % 256 == 0
        assert not tensor.any()
        tensor.fill_(i + 1)
    for i, tensor in enumerate(tensors):  # none has overwritten another
        assert (tensor == i + 1).all()
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    assert len(storages) == 1


@pytest.mark.parametrize("static", [False, True])
def test_a_capacity_is_allocated_at_once(static):
    """When the cache is made; the static form's memory comes with its counters."""
    model, ids = make_model(), make_ids(100, 2)
    options = {"max_batch_size": 2, "max_cache_len": 300, "static": static}
    with TurboQuantCache.for_model(model, "k4v4", **options) as cache:
        made = cache.memory_bytes()
        assert (made["pages_allocated"] > 0) == (not static) and made["pages"] == 0
        places = [(one.pages, one.ring) for one in cache.packed]
        feed(model, cache, ids[:, :90], 90)
        after = cache.memory_bytes()
        for name in ("pages_allocated", "tail"):
            assert after[name] == made[name] or static
        for one, (pages, ring) in zip(cache.packed, places, strict=True):
            assert (one.pages is pages and one.ring is ring) == (not static)
        logits = feed(model, cache, ids[:, 90:])
    with TurboQuantCache.for_model(model, "k4v4", max_batch_size=2) as grown:
        feed(model, grown, ids[:, :90], 90)
        assert torch.equal(feed(model, grown, ids[:, 90:]), logits)


def test_memory_for_keys_that_no_parameter_promised(monkeypatch):
    """Of another type, or of other heads: layers let go of what was allocated for them."""
    model, ids = make_model(), make_ids(100)
    for name, value in (("dtype", torch.bfloat16), ("num_key_value_heads", 1)):
        with monkeypatch.context() as patch:
            if name == "dtype":
                promised = [p.to(value) for p in model.parameters()]
                patch.setattr(model, "parameters", lambda p=promised: iter(p))
            else:
                patch.setattr(model.config, name, value)
            cache = TurboQuantCache.for_model(model, "k4v4", max_cache_len=200)
        wrong = [one.ring for one in cache.packed]
        with cache, TurboQuantCache.for_model(model, "k4v4", max_cache_len=200) as right:
            assert cache.packed[0].ring.dtype == value or cache.packed[0].kv_heads == value
            assert torch.equal(feed(model, cache, ids, 90), feed(model, right, ids, 90))
            assert cache.memory_bytes() == right.memory_bytes()
            pairs = zip(cache.packed, wrong, strict=True)
            assert all(one.ring is not ring for one, ring in pairs)


def test_memory_of_a_model_of_several_types_comes_later(monkeypatch):
    model, ids = make_model(), make_ids(90)
    promised = [model.lm_head.weight.bfloat16(), *model.parameters()]
    with monkeypatch.context() as patch:
        patch.setattr(model, "parameters", lambda: iter(promised))
        cache = TurboQuantCache.for_model(model, "k4v4", max_cache_len=200)
    with cache:
        assert not any(cache.memory_bytes().values())
        feed(model, cache, ids)
        assert cache.memory_bytes()["pages"] > 0


def test_a_longer_prompt_after_a_reset_gets_more_pages():
    model, ids = make_model(), make_ids(700)
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        feed(model, cache, ids[:, :70])
        few = len(cache.packed[0].pages)
        cache.reset()
        actual = feed(model, cache, ids, 600, 100)
        assert len(cache.packed[0].pages) > few
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        assert torch.equal(actual, feed(model, cache, ids, 600, 100))


def test_few_queries_wait_for_a_center(monkeypatch):
    """They are larger than keys and values: what a center needs of them is taken soon."""
    model, queries, alive = make_model(num_hidden_layers=9), [], []
    attended, learn = lifecycle.Lifecycle.attended, lifecycle.learn

    def noted(life, layer, module, query, *others):
        queries.append(weakref.ref(query))
        return attended(life, layer, module, query, *others)

    def counted(*args):
        alive.append(sum(query() is not None for query in queries))
        return learn(*args)

    monkeypatch.setattr(lifecycle, "_QUERIES_TOGETHER", 4)
    monkeypatch.setattr(lifecycle.Lifecycle, "attended", noted)
    monkeypatch.setattr(lifecycle, "learn", counted)
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda *args: alive.append(sum(query() is not None for query in queries))
        )
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        feed(model, cache, make_ids(80))
    assert alive == [1, 2, 3, 0, 1, 2, 3, 0, 1, 0]


def test_memory_is_measured_from_tensors():
    model, ids = make_model(), make_ids(200, 2)
    config = CacheConfig(32, 4, 4)
    with TurboQuantCache.for_model(model, config=config, max_batch_size=2) as cache:
        feed(model, cache, ids, 190, 1)
        memory = cache.memory_bytes()
        heads, layers = 2, 3
        assert cache.bytes_per_token == config.bytes_per_token * heads * layers
        pages = 2 * 7  # 200 tokens in pages of 32, twice
        assert memory["pages"] == pages * 32 * config.bytes_per_token * heads * layers
        ring = 2 * heads * (4 + 64 + 32 - 1) * 2 * 32 * 4
        assert memory["tail"] == ring * layers
        held = [t for layer in cache.layers for t in vars(layer).values()]
        held += [t for layer in cache.layers for t in vars(layer.paged).values()]
        held += [t for layer in cache.layers for t in layer.tables]
        total = sum(t.numel() * t.element_size() for t in held if isinstance(t, torch.Tensor))
        assert memory["total"] == total
        parts = memory["pages_allocated"] + memory["tail"] + memory["tables"]
        assert memory["waiting"] == 0 and parts == total


# ------------------------------------------------------------------------------------- errors


def test_models_that_are_not_supported():
    def refuse(match, kind, **options):
        config = getattr(transformers, kind)(**{**COMMON, **options})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        with pytest.raises(ValueError, match=match):
            TurboQuantCache.for_model(model, "k4v4")

    refuse("no attention", "MambaConfig")
    refuse("MLA", "DeepseekV3Config", n_routed_experts=4, n_group=1, topk_group=1,
           num_experts_per_tok=2, moe_intermediate_size=8, num_hidden_layers=2)  # fmt: skip
    refuse("head_dim", "LlamaConfig", head_dim=22)
    refuse("chunked attention", "Llama4TextConfig", num_local_experts=2, head_dim=16)
    refuse("AttentionInterface", "BloomConfig")
    if hasattr(transformers, "Gemma4TextConfig"):
        refuse("different head_dim", "Gemma4TextConfig", head_dim=32)

    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=16, d_ff=32, num_layers=1,
                              num_heads=2)
    )  # fmt: skip
    with pytest.raises(ValueError, match="cross attention"):
        TurboQuantCache.for_model(t5, "k4v4")
    with pytest.raises(ValueError, match="no model of transformers"):
        TurboQuantCache.for_model(torch.nn.Linear(2, 2), "k4v4")


def test_options_that_are_refused():
    model = make_model()
    for match, options in {
        "unknown preset": {"preset": "k9v9"},
        "config.head_dim is 64": {"config": CacheConfig(64, 4, 4)},
        "belong into the CacheConfig": {"config": CacheConfig(32, 4, 4), "page_size": 16},
        "must be positive": {"max_q_len": 0},
        "one tensor for each of 3 layers": {"center": [torch.zeros(2, 32)]},
    }.items():
        with pytest.raises(ValueError, match=match):
            TurboQuantCache.for_model(model, **options)
    assert model.config._attn_implementation == "sdpa"
    wrong = [torch.zeros(3, 32)] * 3
    with TurboQuantCache.for_model(model, center=wrong) as cache:
        with pytest.raises(ValueError, match="center of layer 0"):
            feed(model, cache, make_ids(5))


def test_forwards_that_are_refused():
    model, ids = make_model(), make_ids(70, 2)
    with TurboQuantCache.for_model(model, "k4v4", max_batch_size=2) as cache:

        def refuse(match, error=ValueError, tokens=ids, **options):
            with pytest.raises(error, match=match):
                model(tokens, past_key_values=cache, **options)

        refuse("max_batch_size=2", tokens=make_ids(5, 3))
        right = torch.ones(2, 70).long()
        right[0, 60:] = 0
        refuse("only left padding", attention_mask=right)
        refuse("2D attention_mask", attention_mask=torch.ones(2, 1, 70, 70).bool())
        refuse("expected", attention_mask=torch.ones(2, 69).long())
        left = torch.ones(2, 70).long()
        left[0, :10] = 0
        model(ids, attention_mask=left, past_key_values=cache)
        one = ids[:, :1]
        refuse("left-padded", tokens=one)
        refuse("10", tokens=one, attention_mask=torch.ones(2, 71).long())
        refuse("holds 2 sequences", tokens=one[:1])
        ok = torch.cat([left, torch.ones(2, 1).long()], dim=1)
        refuse("output_attentions", tokens=one, attention_mask=ok, output_attentions=True)
        assert cache.get_seq_length() == 70
        with torch.enable_grad():
            refuse("no_grad", RuntimeError, tokens=one, attention_mask=ok)
        model.train()
        model.model.layers[0].self_attn.attention_dropout = 0.1
        refuse("dropout", tokens=one, attention_mask=ok)
        model.eval()
        model.set_attn_implementation("eager")
        refuse("was changed", RuntimeError, tokens=one, attention_mask=ok)
    assert model.config._attn_implementation == "eager"  # not ours to restore any more


def test_keys_of_another_dtype_or_device_are_refused():
    model, ids = make_model(), make_ids(80)
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        feed(model, cache, ids[:, :70])
        model.bfloat16()
        for tokens in (ids[:, 70:71], ids[:, 70:]):
            with pytest.raises(TypeError, match="bfloat16, but holds"):
                model(tokens, past_key_values=cache)
        elsewhere = torch.zeros(1, 2, 1, 32, device="meta")
        cache.sequences.begin(1, 1, None)
        with pytest.raises(ValueError, match="got keys on meta, but is on cpu"):
            cache.update(elsewhere, elsewhere, 0)
        model.float()
        feed(model, cache, ids[:, 70:])
        assert cache.get_seq_length() == 80
    with TurboQuantCache.for_model(model.double(), "k4v4") as cache:
        with pytest.raises(TypeError, match="float64, supported: float32, float16, bfloat16"):
            model(ids, past_key_values=cache)


def test_keys_changed_on_the_way_are_noticed():
    model, ids = make_model(), make_ids(70)
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        update = cache.update

        def changed(key, value, layer_idx, *args, **kwargs):
            key, value = update(key, value, layer_idx, *args, **kwargs)
            return key * 1.0, value

        cache.update = changed
        with pytest.raises(RuntimeError, match="changes keys or values"):
            model(ids, past_key_values=cache)


# --------------------------------------------------------------------------------------- CUDA


@pytest.mark.cuda
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_cuda(name, dtype):
    """Against the oracle; how exact the kernels are is the matter of test_attention.py."""
    model, ids = make_model(name, dtype).cuda(), make_ids(150, 2).cuda()
    config = make_config(model, "k3v2")
    with recorded(model, config, max_batch_size=2, max_q_len=7) as (cache, recorder):
        feed(model, cache, ids, 80, 1, 1, 20, 1, 5, *[1] * 42)
        assert cache.cache_device.type == "cuda"
        for layer in cache.layers:
            held = layer.pages, layer.ring, *layer.tables
            assert all(t.is_cuda for t in held if t is not None)
        recorder.to_cpu()
        options = {"center": "auto", "pads": [0, 0]}
        check_against_oracle(recorder, config, 80, tolerance=0.03, coarse=2, **options)


@pytest.mark.cuda
def test_generation_on_cuda():
    """Batches with padding, drafts, beams: each against the same with eight bits, or greedy."""
    model = make_calm_model().cuda()
    ids, mask = padded([80, 30, 55], 80)
    ids, mask = ids.cuda(), mask.cuda()
    prompt = make_ids(20).repeat(1, 4).cuda()
    expected = generate(model, ids, attention_mask=mask)
    with TurboQuantCache.for_model(model, "k8v8", max_batch_size=3) as cache:
        assert torch.equal(generate(model, ids, cache, attention_mask=mask), expected)
        cache.reset()
        beams = generate(model, prompt, new=16, num_beams=3)
        assert torch.equal(generate(model, prompt, cache, new=16, num_beams=3), beams)
    with TurboQuantCache.for_model(model, "k3v2") as cache:
        greedy = generate(model, prompt, cache, new=30, eos_token_id=0)
        cache.reset()
        drafted = generate(model, prompt, cache, new=30, **DRAFTS)
    assert torch.equal(drafted[:, :110], greedy)


def spread(model, homes):
    """The model with every part on its device; inputs follow, as under a device_map."""

    def follow(module, args, kwargs):
        home = next(module.parameters()).device

        def move(x):
            if isinstance(x, tuple):
                return tuple(move(part) for part in x)
            return x.to(home) if isinstance(x, torch.Tensor) else x

        return move(args), {name: move(x) for name, x in kwargs.items()}

    for module, home in homes:
        module.to(home).register_forward_pre_hook(follow, with_kwargs=True)
    return model


@pytest.mark.cuda
@pytest.mark.parametrize("second", ["cpu", "cuda:1"])
@pytest.mark.parametrize("form", [{}, {"static": True, "max_cache_len": 128}])
def test_every_layer_lives_where_its_model_layer_does(second, form):
    first = "cuda:0"
    if second == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model, ids = make_calm_model(), make_ids(100)
    with TurboQuantCache.for_model(model, "k8v8") as cache:
        expected = generate(model, ids, cache)
    decoder = model.model
    fronts = [decoder.embed_tokens, decoder.layers[0]]
    backs = [*decoder.layers[1:], decoder.norm, model.lm_head]
    decoder.rotary_emb.to(first)
    spread(model, [(m, first) for m in fronts] + [(m, second) for m in backs])
    with TurboQuantCache.for_model(model, "k8v8", **form) as cache:
        tokens = generate(model, ids.to(first), cache, disable_compile=True)
        assert [str(layer.pages.device) for layer in cache.layers] == [first, second, second]
        cache.crop(-5)
        feed(model, cache, tokens[:, -5:], 1, 4)
    assert torch.equal(tokens.cpu(), expected)


# --------------------------------------------------------------------------- what is refused late


def test_attaching_to_another_model():
    model = make_model()
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        for match, other in (
            ("a model with other layers", make_model(num_hidden_layers=2)),
            ("made for head_dim 32", make_model(head_dim=16)),
        ):
            with pytest.raises(ValueError, match=match):
                cache.attach(other)
            assert other.config._attn_implementation == "sdpa"
        feed(model, cache, make_ids(70))  # it still serves its own model
        assert cache.get_seq_length() == 70


def test_selecting_sequences_that_are_not_there():
    model, ids = make_model(), make_ids(90, 2)
    with TurboQuantCache.for_model(model, "k4v4", max_batch_size=2) as cache:
        feed(model, cache, ids[:, :80])
        expected = feed(model, cache, ids[:, 80:])
        cache.crop(-10)
        with pytest.raises(ValueError, match="sequence 2 of 2"):
            cache.reorder_cache(torch.tensor([0, 2]))
        with pytest.raises(ValueError, match="4 sequences do not fit into max_batch_size=2"):
            cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([0, 1]))
        assert torch.equal(feed(model, cache, ids[:, 80:]), expected)


def test_embeddings_instead_of_tokens():
    model, ids = make_model(), make_ids(75)
    embeddings = model.get_input_embeddings()(ids)
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        expected = feed(model, cache, ids, 70)
        cache.reset()
        parts = (embeddings[:, :70], embeddings[:, 70:])
        got = [model(inputs_embeds=part, past_key_values=cache).logits for part in parts]
        assert torch.equal(torch.cat(got, dim=1), expected)
