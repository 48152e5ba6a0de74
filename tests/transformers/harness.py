"""Tiny models and the oracle of the tests of the transformers cache.

A recorder takes down what enters and leaves the attention of every layer. From the recorded
queries, keys and values the oracle computes what must come out: it encodes and decodes every key
and value with the public ops, and attends densely in float64, reading exact numbers where the
definition says so (the first forward, sinks, recent window). It shares no bookkeeping with the
cache under test, and gets the very same bits, so that no code may differ.

Models are tiny and random, with weights large enough that attention is peaked: quantised keys
change the result by far more than the tolerance, which the tests check.
"""

import itertools
from contextlib import contextmanager

import torch
import transformers
from transformers import AttentionInterface, AutoModelForCausalLM

from torch_turboquant import cache_load, cache_store, make_tables, preset
from torch_turboquant.integrations.transformers import TurboQuantCache
from torch_turboquant.integrations.transformers.models import rotary_partners
from torch_turboquant.ops.cache import allocate_cache

VOCAB = 101


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

POLICIES = {
    "uniform": {},
    "boundary": {"boundary_layers": 1},
    "boundary-k4v4": {"boundary_layers": 1, "boundary_preset": "k4v4"},
    "by-layer": {"layer_presets": {0: "k5v3u", -1: "k8v4"}},
    "list": {"layer_presets": [None, "k2v2", "k4v3"], "boundary_layers": 1},
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


def generate(model, prompt, cache=None, new=12, **options):
    return model.generate(
        prompt, past_key_values=cache, max_new_tokens=new, do_sample=False, **options
    )


DRAFTS = {"prompt_lookup_num_tokens": 4, "eos_token_id": 0}  # older versions look for an end


def padded(lengths, total, seed=1):
    ids, mask = make_ids(total, len(lengths), seed), torch.ones(len(lengths), total).long()
    for row, length in enumerate(lengths):
        ids[row, : total - length] = 0
        mask[row, : total - length] = 0
    return ids, mask


def calibrated(model, tokens=90):
    return TurboQuantCache.calibrate(model, make_ids(tokens, seed=5))


FORMS = {
    "growing": {},
    "allocated": {"max_cache_len": 160},
    "static": {"static": True, "max_cache_len": 160},
    "no tail": {"sink_tokens": 0, "recent_window": 0},
    "given center": {"center": "calibrated"},
    "mean": {"center": "mean"},
    "by layer": {"boundary_layers": 1},
}


def make_cache(model, form, forms=FORMS, **options):
    """A cache of one of the forms; the center "calibrated" is made for it."""
    form = dict(forms[form])
    if form.get("center") == "calibrated":
        form["center"] = calibrated(model)
    return TurboQuantCache.for_model(model, "k3v2", page_size=16, **form, **options)


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


def oracle(
    query, key, value, layer, options, config, exact_columns, center, pads, first_held=0, gone=None
):
    """What attention must return, and what it would without quantisation: float64 like query.

    gone: bool [batch, kv_heads, tokens], what queries after the exact columns do not see.
    """
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
    if gone is not None:
        gone = gone.repeat_interleave(group, 1)[:, :, None]
        visible = visible[:, None] & ((i < exact_columns) | ~gone)
    else:
        visible = visible[:, None]
    q = query.double()
    k, v, rough_k, rough_v = (x.double().repeat_interleave(group, 1) for x in (key, value, *rough))

    def attend(exact):
        scores = torch.where(exact, q @ k.mT, q @ rough_k.mT) * options["scaling"]
        if options.get("softcap"):
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        scores = scores.masked_fill(~visible, -torch.inf)
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
    attention_cases.py), relative to the largest output. config: of all layers, or a list with one
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
