"""Memory of the cache: how pages grow, who shares an allocation, and what the planner predicts."""

import math
import re
import weakref
from collections import Counter

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.helpers import ROOT
from tests.transformers.families import WINDOW, make_family
from tests.transformers.harness import (
    MODELS,
    POLICIES,
    assert_close,
    feed,
    make_config,
    make_ids,
    make_model,
)
from torch_turboquant import CacheConfig, preset
from torch_turboquant.integrations.transformers import TurboQuantCache, lifecycle
from torch_turboquant.integrations.transformers import layer as layer_module
from torch_turboquant.integrations.transformers.models import layer_windows
from torch_turboquant.integrations.transformers.sequences import Sequences
from torch_turboquant.integrations.transformers.tensors import zeros_together
from torch_turboquant.memory import (
    AttentionLayer,
    attention_layers,
    packed_memory,
    plain_memory,
)
from torch_turboquant.ops.cache import allocate_cache

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


def bytes_held(cache):
    """Of all allocations that the cache's tensors lie in, whole: what the machine has less of."""
    tensors = [t for layer in cache.packed for t in (layer.pages, layer.ring, *layer.tables)]
    storages = [t.untyped_storage() for t in tensors if t is not None]
    return sum({one._cdata: one.nbytes() for one in storages}.values())


@pytest.mark.parametrize("name, options", [
    ("llama", {}),
    ("llama", {"max_batch_size": 3}),
    ("mistral", {}),
    ("llama", {"boundary_layers": 1, "center": None}),
])  # fmt: skip
@pytest.mark.parametrize("prompt", [1, 80, 81, 333, 1009])
def test_growth_adds_a_tenth_at_most(name, options, prompt):
    """Beyond pages that hold tokens, counted in what the machine really has less of."""
    model, rows = make_model(name), options.get("max_batch_size", 1)
    with TurboQuantCache.for_model(model, "k4v4", page_size=16, **options) as cache:
        feed(model, cache, make_ids(prompt, rows))
        first = cache.memory_bytes()
        assert first["pages_allocated"] == first["pages"]  # the prompt has what it needs
        for _ in range(40):
            feed(model, cache, make_ids(1, rows))
            memory = cache.memory_bytes()
            assert memory["pages_allocated"] <= 1.10 * memory["pages"]
            pieces = 256 * 4 * len(cache.packed)  # of each tensor the last one may be padding
            assert bytes_held(cache) <= memory["total"] + pieces


def test_how_often_a_growing_cache_is_copied():
    """Ten times in the end, however long it gets, token by token, in turns or from any prompt."""
    config = CacheConfig(32, 4, 4, page_size=16)
    for prompt, new in [(1, 1), (1, 7), (15, 1), (16, 1), (2000, 1), (1, 500), (300, 45)]:
        sequences = Sequences(config, 1, None, 32, learned_center=None, static=False, windows=[0])
        copied = pages = 0
        for length in range(prompt, 20_000, new):
            sequences.begin(1, length - sequences.columns, None)
            sequences.commit()
            needed = math.ceil(length / 16)
            assert needed <= sequences.places[False].pages <= 1.10 * needed
            if sequences.places[False].pages > pages:
                copied, pages = copied + pages, sequences.places[False].pages
        assert copied <= 10 * pages


def test_the_documented_sizes_of_a_growing_cache():
    """docs/memory.md, by the pages that sequences count and the planner's bytes of so many."""
    text = (ROOT / "docs" / "memory.md").read_text()
    section = text[text.index("## A cache that grows") :]
    rows = re.findall(
        r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", section, re.M
    )
    assert [name for name, *_ in rows] == ["bf16", "k5v4u", "k4v4"]
    layers, lengths = [AttentionLayer(3, 64)] * 30, [4096, 4097, 4596]
    for name, *written in rows:
        if name == "bf16":
            sizes = [plain_memory("", layers, 2, n, page_size=1).request for n in [*lengths, 4596]]
        else:
            config = preset(name, 64)
            sequences = Sequences(
                config, 1, None, 32, learned_center="auto", static=False, windows=[0] * 30
            )
            tokens = []
            for n in lengths:
                for new in range(sequences.columns or n - 1, n):
                    sequences.begin(1, new + 1 - sequences.columns, None)
                    sequences.commit()
                tokens.append(sequences.places[False].pages * config.page_size)
            planned = [packed_memory("", layers, [config] * 30, n) for n in [*tokens, 4596]]
            sizes = [one.request + one.constants for one in planned]
        assert [f"{size / 2**20:.1f}" for size in sizes] == written, name


def test_a_longer_prompt_takes_the_place_of_the_former_memory():
    model = make_model()
    with TurboQuantCache.for_model(model, "k4v4", page_size=16, center=None) as cache:
        feed(model, cache, make_ids(100), 90)
        cache.reset()
        held = [weakref.ref(layer.pages) for layer in cache.packed]
        take = allocate_cache

        def noted(*args):
            assert held.pop(0)() is None
            return take(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer_module, "allocate_cache", noted)
            feed(model, cache, make_ids(300))
        assert not held and cache.memory_bytes()["pages_allocated"] == cache.memory_bytes()["pages"]


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
    tensors = zeros_together(3, shape, dtype, torch.device("cpu"))
    assert [(tuple(t.shape), t.dtype) for t in tensors] == 3 * [(shape, dtype)]
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


def test_layers_of_different_kv_heads_are_allocated_as_they_are():
    """Full layers of Gemma 4 may have fewer than its sliding ones."""
    options = {"head_dim": 32, "global_head_dim": 32, "num_global_key_value_heads": 1,
               "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
               "num_kv_shared_layers": 0, **WINDOW,
               "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}  # fmt: skip
    model, ids = make_family("gemma4_text", options), make_ids(100)
    with TurboQuantCache.for_model(model, "k4v4") as cache:
        expected = feed(model, cache, ids, 90)
    with TurboQuantCache.for_model(model, "k4v4", max_cache_len=200) as cache:
        assert [layer.kv_heads for layer in cache.packed] == [2, 2, 1]
        places = [layer.pages for layer in cache.packed]
        assert torch.equal(feed(model, cache, ids, 90), expected)
        assert all(one.pages is pages for one, pages in zip(cache.packed, places, strict=True))


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


# ---- what the planner predicts


def predicted(model, configs, context, **options):
    layers = attention_layers(model.config.to_dict())
    assert [layer.window for layer in layers] == layer_windows(model)
    return packed_memory(
        "", layers, configs, context, tail_itemsize=model.dtype.itemsize, **options
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_memory_is_what_the_command_predicts(name, policy):
    """Exactly, not only within 2%: pages, tail and constants of every layer."""
    model, context = make_model(name), 150
    config = make_config(model, "k4v3", page_size=32)
    options = {"max_q_len": 5, "max_cache_len": context, **POLICIES[policy]}
    with TurboQuantCache.for_model(model, config=config, **options) as cache:
        feed(model, cache, make_ids(context), 90, 50, 10)
        memory, layers = cache.memory_bytes(), cache.memory_by_layer()
        expected = predicted(model, cache.configs, context, max_q_len=5)
        assert memory["pages"] == memory["pages_allocated"] == expected.pages
        assert memory["tail"] == expected.tail
        assert memory["tables"] == expected.constants
        assert memory["total"] == expected.request + expected.constants
        assert cache.bytes_per_token == expected.bytes_per_token
        for index, (layer, own) in enumerate(zip(cache.layers, layers, strict=True)):
            shape = AttentionLayer(layer.kv_heads, config.head_dim, layer.sliding_window)
            one = packed_memory("", [shape], [cache.configs[index]], context, max_q_len=5,
                                tail_itemsize=4)  # fmt: skip
            assert own["total"] == one.request + one.constants


@pytest.mark.parametrize("options", [
    {"center": None},
    {"sink_tokens": 0, "recent_window": 0},
    {"dtype": torch.bfloat16, "max_batch_size": 3},
])  # fmt: skip
def test_prediction_with_other_options(options):
    options = dict(options)
    model = make_model(dtype=options.pop("dtype", torch.float32))
    rows = options.get("max_batch_size", 1)
    with TurboQuantCache.for_model(model, "k5v4u", max_cache_len=100, **options) as cache:
        feed(model, cache, make_ids(100, rows))
        expected = predicted(model, cache.configs, 100, center=options.get("center", 1) is not None)
        memory = cache.memory_bytes()
        assert memory["total"] == rows * expected.request + expected.constants
