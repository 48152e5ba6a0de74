"""The packed cache and its exact tail: bytes against the reference, in any order and any chunks."""

import importlib.util
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_turboquant as tt
from tests.helpers import (
    FLOATS,
    HEAD_DIMS,
    assert_same_bytes,
    entries_apart,
    garbage_cache,
    generator,
    hard_vectors,
    paged,
    randn,
    scales,
    to_device,
)
from torch_turboquant.format import PAGE_SIZES
from torch_turboquant.ops.cache import (
    cache_load_reference,
    cache_store_reference,
    tail_row_reference,
)
from torch_turboquant.ops.codec import decode_reference, encode_reference

_spec = importlib.util.spec_from_file_location(
    "make_golden", Path(__file__).with_name("make_golden.py")
)
make_golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_golden)

HEADS = 2


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def random_kv(tokens, d, seed=0, dtype=torch.float32, heads=HEADS):
    """Keys with large constant channels, values without."""
    k = randn(tokens, heads, d, seed=seed) + 20 * (torch.arange(d) % 17 == 3)
    return k.to(dtype), randn(tokens, heads, d, seed=seed + 1, dtype=dtype)


def check_store(config, tables, k, v, slots, num_pages, device="cpu", **extra):
    """The op over stale bytes against the reference over the same; returns the cache."""
    cache = garbage_cache(config, num_pages, k.shape[1])
    expected = cache.clone()
    actual = cache.to(device)
    tt.cache_store(
        k.to(device),
        v.to(device),
        actual,
        slots.to(device),
        config,
        to_device(tables, device),
        **{name: to_device(value, device) for name, value in extra.items()},
    )
    cache_store_reference(k, v, expected, slots, config, tables)
    assert_same_bytes(actual, expected)
    return actual


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("d", [80, 128])
@pytest.mark.parametrize("name", tt.PRESETS)
def test_bytes_of_all_presets(name, d, page_size, device):
    config = tt.preset(name, d, page_size=page_size)
    dtype = FLOATS[PAGE_SIZES.index(page_size) % 3]
    center = 20.0 * (torch.arange(d) % 17 == 3).expand(HEADS, d)
    if page_size > 32:
        center = tt.scaled_center(center, scales(HEADS, d, seed=7))
    tables = tt.make_tables(config, 5, center=center if page_size > 16 else None)
    k, v = random_kv(21, d, dtype=dtype)
    slots = torch.randperm(2 * page_size, generator=generator(1))[:21]
    check_store(config, tables, k, v, slots, 2, device)


@pytest.mark.parametrize("name", ["k4v4", "k5v3u", "k3v2", "k8v8"])
@pytest.mark.parametrize("d", [*HEAD_DIMS, 16, 48, 144, 1024])
def test_bytes_of_all_dimensions(d, name, device):
    config = tt.preset(name, d)
    k, v = random_kv(7, d, seed=d)
    check_store(config, tt.make_tables(config, 0), k, v, torch.arange(7) * 9, 2, device)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["k4v4", "k5v4u", "k3v3", "k2v2", "k8v8"])
@pytest.mark.parametrize("d", [64, 112])
def test_bytes_of_hard_vectors(d, name, dtype, device):
    config = tt.preset(name, d)
    tables = tt.make_tables(config, 1)
    k = torch.stack([hard_vectors(d, tables.key_signs), hard_vectors(d, tables.value_signs)], 1)
    slots = torch.randperm(64, generator=generator(2))[: len(k)]
    check_store(config, tables, k.to(dtype), k.flip(1, 2).to(dtype), slots, 2, device)


@pytest.mark.parametrize("key_mode", tt.SCALE_MODES)
@pytest.mark.parametrize("value_mode", tt.SCALE_MODES)
def test_scale_modes_and_searches(key_mode, value_mode, device):
    for search in (1, 2, 8, 64):
        config = tt.preset(
            "k4v3", 64, key_scale_mode=key_mode, value_scale_mode=value_mode, search=search
        )
        k, v = random_kv(9, 64)
        check_store(config, tt.make_tables(config, 0), k, v, torch.arange(9), 1, device)


@pytest.mark.parametrize("search", [1, 2, 8])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", ["k4v4", "k5v4u", "k3v3", "k2v2"])
def test_bytes_of_few_tokens(name, d, search, device):
    """Those that a GPU has a kernel for: hard vectors, all scale modes, with and without center."""
    modes = list(tt.SCALE_MODES)
    center = 20.0 * (torch.arange(d) % 17 == 3).expand(HEADS, d)
    for case, (dtype, known) in enumerate(
        (
            (torch.bfloat16, None),
            (torch.float16, center),
            (torch.bfloat16, tt.scaled_center(center, scales(HEADS, d, seed=7))),
        )
    ):
        config = tt.preset(
            name,
            d,
            search=search,
            page_size=16 << case,
            key_scale_mode=modes[case],
            value_scale_mode=modes[case + 1],
        )
        tables = tt.make_tables(config, 3, center=known)
        hard = [hard_vectors(d, x) for x in (tables.key_signs, tables.value_signs)]
        k, v = random_kv(20, d, dtype=dtype)
        k = torch.cat([torch.stack(hard, 1).to(dtype), k])
        v = torch.cat([torch.stack(hard[::-1], 1).to(dtype), v])
        pages = 1 + len(k) // config.page_size
        slots = torch.randperm(pages * config.page_size, generator=generator(2))[: len(k)]
        slots[::5] = -1
        check_store(config, tables, k, v, slots, pages, device)


@pytest.mark.parametrize("search", [1, 8])
@pytest.mark.parametrize("name", ["k4v4", "k5v4u", "k3v2"])
def test_tiny_steps(name, search, device):
    """For compute-sanitizer (tests/sanitize_cuda.sh): a decode step, few tokens of a prompt."""
    config = tt.preset(name, 128, search=search, sink_tokens=2, recent_window=3)
    for lengths, cu in ((int32(1, 2, 7), None), (int32(9, 5), int32(0, 6, 8))):
        tokens = len(lengths) if cu is None else int(cu[-1])
        k, v = random_kv(tokens, 128, dtype=torch.bfloat16)
        rows = torch.arange(len(lengths)).flip(0)
        check_tail(config, k, v, lengths, cu, rows, 8, 4, device)


def test_records_hold_what_encode_makes():
    """The cache stores the codes and scales of the codec, whatever their places."""
    config = tt.preset("k4v2", 96, page_size=16)
    tables = tt.make_tables(config, 2, center=randn(HEADS, 96, seed=3))
    k, v = random_kv(5, 96)
    cache = tt.allocate_cache(config, 1, HEADS)
    tt.cache_store(k, v, cache, torch.arange(5), config, tables)
    for head in range(HEADS):
        packed, scale = encode_reference(
            k[:, head],
            tables.key_signs,
            tables.key_levels,
            tables.key_steps,
            4,
            "unbiased",
            tables.center[head],
        )
        assert_same_bytes(cache[0, head, : 5 * 48].view(5, 48), packed)  # 4-bit rows are dense rows
        start = config.record.key_scale(0)
        assert_same_bytes(cache[0, head, start : start + 10].view(torch.float16), scale)
    decoded, values = tt.cache_load(cache, int32([0]), int32(5), config, tables, 5, torch.float32)
    assert (decoded[0] - k).norm() / (k - tables.center).norm() < 0.12
    assert (values[0] - v).norm() / v.norm() < 0.4


def test_minus_one_and_empty_calls_write_nothing(device):
    config = tt.preset("k4v4", 64)
    tables = to_device(tt.make_tables(config, 0), device)
    k, v = (t.to(device) for t in random_kv(4, 64))
    cache = garbage_cache(config, 2, HEADS).to(device)
    before = cache.clone()
    tail = tt.Tail(
        tt.allocate_tail(config, 1, HEADS, torch.float32, 4, device),
        torch.tensor([0], device=device),
    )
    skipped = torch.full((4,), -1, device=device)
    cu = int32(0, 4).to(device)
    tt.cache_store(k, v, cache, skipped, config, tables)
    tt.cache_store(
        k,
        v,
        cache,
        skipped,
        config,
        tables,
        tail=tail,
        seq_lens=int32(4).to(device),
        cu_seqlens_q=cu,
    )
    tt.cache_store(k[:0], v[:0], cache, skipped[:0], config, tables)
    tt.cache_store(
        k[:0],
        v[:0],
        cache,
        skipped[:0],
        config,
        tables,
        tail=tail,
        seq_lens=int32(4).to(device),
        cu_seqlens_q=int32(0, 0).to(device),
    )
    assert_same_bytes(cache, before)
    assert not tail.ring.any()


def test_some_tokens_skipped(device):
    config = tt.preset("k3v3", 80)
    slots = torch.tensor([40, -1, 3, -1, 63, 0, 31, 32])
    k, v = random_kv(8, 80)
    check_store(config, tt.make_tables(config, 0), k, v, slots, 2, device)


def test_a_token_never_touches_anothers_bytes(device):
    """Storing one token again, with other contents, changes only it; storing the old contents
    restores every byte: rolling back needs nothing."""
    for name in ("k5v3u", "k3v2", "k8v4"):
        config = tt.preset(name, 80)
        tables = tt.make_tables(config, 0)
        k, v = random_kv(32, 80)
        cache = check_store(config, tables, k, v, torch.arange(32), 1, device)
        before = cache.clone()
        on = to_device(tables, device)
        slot = torch.tensor([13], device=device)
        new = (100 * randn(1, HEADS, 80, seed=4)).to(device)
        tt.cache_store(new, new, cache, slot, config, on)
        table, lengths = int32([0]).to(device), int32(32).to(device)
        old_k, old_v = tt.cache_load(before, table, lengths, config, on, 32, torch.float32)
        new_k, new_v = tt.cache_load(cache, table, lengths, config, on, 32, torch.float32)
        others = torch.arange(32) != 13
        assert_same_bytes(new_k[:, others], old_k[:, others])
        assert_same_bytes(new_v[:, others], old_v[:, others])
        assert (new_k[:, 13] != old_k[:, 13]).any() and (new_v[:, 13] != old_v[:, 13]).any()
        tt.cache_store(k[13:14].to(device), v[13:14].to(device), cache, slot, config, on)
        assert_same_bytes(cache, before)


@given(
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    name=st.sampled_from(["k4v4", "k3v3", "k5v4u"]),
    page_size=st.sampled_from([16, 32]),
)
def test_any_chunking_leaves_the_same_bytes(chunks, name, page_size):
    config = tt.preset(name, 48, page_size=page_size, sink_tokens=2, recent_window=5)
    tables = tt.make_tables(config, 0)
    total = sum(chunks)
    k, v = random_kv(total, 48)
    num_pages, _, (slots,) = paged([total], page_size)
    results = []
    for split in ([total], chunks, [1] * total):
        cache = garbage_cache(config, num_pages, HEADS)
        tail = tt.Tail(tt.allocate_tail(config, 2, HEADS, torch.float32, 3), torch.tensor([1]))
        end = 0
        for n in split:
            part, end = slice(end, end + n), end + n
            tt.cache_store(
                k[part],
                v[part],
                cache,
                slots[part],
                config,
                tables,
                tail=tail,
                seq_lens=int32(end),
                cu_seqlens_q=int32(0, n),
            )
        results.append((cache, tail.ring))
    for cache, ring in results[1:]:
        assert_same_bytes(cache, results[0][0])
        assert_same_bytes(ring, results[0][1])


@given(
    alignment=st.integers(0, 17),
    gap=st.integers(0, 3),
    dtype=st.sampled_from(FLOATS),
    name=st.sampled_from(["k4v4", "k3v2"]),
    d=st.sampled_from([16, 64, 80]),
)
def test_views_of_a_fused_projection(alignment, gap, dtype, name, d):
    """k and v as slices of one [tokens, (q + k + v heads) d] buffer at any alignment."""
    config = tt.preset(name, d, page_size=16)
    tokens, q_heads, kv = 6, 3, HEADS
    row = (q_heads + 2 * kv) * d + gap
    buffer = randn(alignment + tokens * row, seed=5, dtype=dtype)[alignment:].view(tokens, row)
    heads = buffer[:, : row - gap].unflatten(1, (-1, d))
    k, v = heads[:, q_heads : q_heads + kv], heads[:, q_heads + kv :]
    slots = torch.tensor([15, 2, 7, -1, 0, 31])
    check_store(config, tt.make_tables(config, 0), k, v, slots, 2)


def test_other_layouts():
    config = tt.preset("k4v4", 64)
    tables = tt.make_tables(config, 0)
    by_head = randn(HEADS, 5, 64, seed=6).transpose(0, 1)
    one_token = randn(1, HEADS, 64, seed=7).expand(5, HEADS, 64)
    check_store(config, tables, by_head, one_token, torch.arange(5), 1)
    every_second = randn(10, HEADS, 64, seed=8)[::2]
    check_store(config, tables, every_second, by_head, torch.arange(5), 1)


def test_any_number_of_threads_writes_the_same_bytes():
    config = tt.preset("k4v3", 64)
    tables = tt.make_tables(config, 0)
    k, v = random_kv(700, 64)
    num_pages, table, (slots,) = paged([700], 32)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            cache = garbage_cache(config, num_pages, HEADS)
            tt.cache_store(k, v, cache, slots, config, tables)
            loaded = tt.cache_load(cache, table, int32(700), config, tables, 700, torch.half)
            q = randn(1, 4, 64, seed=1)
            out, lse = tt.paged_attention(q, cache, table, int32(700), config, tables)
            results.append((cache, *loaded, out, lse))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for one, first in zip(other, results[0], strict=True):
            assert_same_bytes(one, first)


# ---- the exact tail


def check_tail(config, k, v, seq_lens, cu, tail_slots, ring_rows, max_seqs, device="cpu"):
    tables = tt.make_tables(config, 0)
    tokens = k.shape[0]
    slots = torch.randperm(64, generator=generator(3))[:tokens]
    slots[torch.rand(tokens, generator=generator(4)) < 0.1] = -1
    start = randn(max_seqs, HEADS, config.sink_tokens + ring_rows, 2, config.head_dim, seed=9)
    start = start.to(k.dtype)
    expected = tt.Tail(start.clone(), tail_slots)
    actual = to_device(tt.Tail(start.clone(), tail_slots), device)
    cache = garbage_cache(config, 64 // config.page_size, HEADS)
    reference, on_device = cache.clone(), cache.to(device)
    cache_store_reference(
        k,
        v,
        reference,
        slots,
        config,
        tables,
        tail=expected,
        seq_lens=seq_lens,
        cu_seqlens_q=cu,
    )
    tt.cache_store(
        k.to(device),
        v.to(device),
        on_device,
        slots.to(device),
        config,
        to_device(tables, device),
        tail=actual,
        seq_lens=seq_lens.to(device),
        cu_seqlens_q=to_device(cu, device),
    )
    assert_same_bytes(on_device, reference)
    assert_same_bytes(actual.ring, expected.ring)


@pytest.mark.parametrize("dtype", FLOATS)
def test_tail_of_one_token_each(dtype, device):
    config = tt.preset("k4v4", 64, page_size=16, sink_tokens=3, recent_window=4)
    k, v = random_kv(6, 64, dtype=dtype)
    lengths = int32(
        1, 3, 4, 8, 4095, 0
    )  # in sinks, last sink, first of the ring, wrapped, far, none
    check_tail(config, k, v, lengths, None, torch.tensor([5, 0, -1, 2, 3, 1]), 4, 6, device)


@given(
    queries=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    before=st.lists(st.integers(0, 30), min_size=4, max_size=4),
    padding=st.integers(0, 2),
    sinks=st.integers(0, 3),
    window=st.integers(1, 5),
    extra=st.integers(0, 3),
    holes=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_tail_of_many_tokens(queries, before, padding, sinks, window, extra, holes):
    """More new tokens than rows, sequences without a tail, tokens of no sequence."""
    config = tt.preset("k4v4", 16, page_size=16, sink_tokens=sinks, recent_window=window)
    count = len(queries)
    tokens = sum(queries) + padding
    k, v = random_kv(tokens, 16)
    lengths = int32(*(b + n for b, n in zip(before, queries, strict=False)))
    cu = int32(0, *torch.tensor(queries).cumsum(0).tolist())
    slots = torch.randperm(5, generator=generator(1))[:count]
    slots = torch.where(torch.tensor(holes[:count]), -1, slots)
    check_tail(config, k, v, lengths, cu, slots, window + extra, 5)


class Layers:
    """Two layers of a batch, as models have them, and what cache_store needs to store them."""

    def __init__(
        self, name="k4v4", d=64, dtype=torch.bfloat16, center=True, tail=True, layout="bshd"
    ):
        sinks, window = (4, 5) if tail else (0, 0)
        self.config = tt.preset(name, d, page_size=16, sink_tokens=sinks, recent_window=window)
        self.lengths = [20, 20]
        self.tables, self.k, self.v, self.caches, self.rings = [], [], [], [], []
        self.num_pages, _, slots = paged(self.lengths, 16)
        self.slots = torch.cat(slots)
        for layer in range(2):
            known = randn(HEADS, d, seed=layer) if center else None
            self.tables.append(tt.make_tables(self.config, layer, center=known))
            for held, seed in ((self.k, 10 + layer), (self.v, 20 + layer)):
                held.append(self.of_layout(randn(2, 20, HEADS, d, seed=seed, dtype=dtype), layout))
            self.caches.append(garbage_cache(self.config, self.num_pages, HEADS))
            if tail:
                self.rings.append(tt.allocate_tail(self.config, 3, HEADS, dtype, 20))
        self.tail_slots = torch.tensor([2, 0])
        self.batch = {"seq_lens": int32(20, 20), "cu_seqlens_q": int32(0, 20, 40)}

    @staticmethod
    def of_layout(x, layout):
        """[batch, tokens, heads, d] -> [batch, heads, tokens, d] over memory of some order."""
        if layout == "bshd":  # a projection's output
            return x.transpose(1, 2)
        if layout == "bhsd":  # tokens of two sequences lie at no equal distances
            return x.transpose(1, 2).contiguous()
        if layout == "gaps":  # rows that do not start at multiples of 16 bytes
            wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype)
            wide[..., 1:-2] = x
            return wide[..., 1:-2].transpose(1, 2)
        assert layout == "sbhd"  # sequences lie inside of a position
        return x.transpose(0, 1).contiguous().permute(1, 2, 0, 3)

    def tails(self, rings):
        return [tt.Tail(ring, self.tail_slots.to(ring.device)) for ring in rings]

    def one_by_one(self):
        caches, rings = [c.clone() for c in self.caches], [r.clone() for r in self.rings]
        for i in range(2):
            k, v = (x[i].transpose(1, 2).flatten(0, 1) for x in (self.k, self.v))
            tail = self.tails(rings)[i] if rings else None
            tt.cache_store(
                k, v, caches[i], self.slots, self.config, self.tables[i], tail=tail, **self.batch
            )
        return caches, rings

    def together(self, device="cpu", **changes):
        """Stores into copies and returns them, also after an error."""
        caches, rings = ([t.to(device, copy=True) for t in x] for x in (self.caches, self.rings))
        slots = self.tail_slots.to(device)
        arguments = {
            "k": [self.moved(x, device) for x in self.k],
            "v": [self.moved(x, device) for x in self.v],
            "caches": caches,
            "slot_mapping": self.slots.to(device),
            "config": self.config,
            "tables": [to_device(t, device) for t in self.tables],
            "tails": [tt.Tail(ring, slots) for ring in rings],
            **{name: t.to(device) for name, t in self.batch.items()},
        }
        self.error = None
        try:
            tt.cache_store_layers(**(arguments | changes))
        except (TypeError, ValueError, RuntimeError) as error:
            self.error = error
        return caches, rings

    @staticmethod
    def moved(x, device):
        """On the device with the same strides."""
        if torch.device(device).type == "cpu":
            return x
        size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        memory = torch.as_strided(x, (size,), (1,)).to(device)
        return torch.as_strided(memory, x.shape, x.stride())


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "gaps", "sbhd"])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize(("name", "dtype"), [("k4v4", torch.bfloat16), ("k5v4u", torch.float32)])
def test_layers_together_are_layers_one_by_one(name, dtype, tail, layout, device):
    layers = Layers(name, dtype=dtype, center=tail, tail=tail, layout=layout)
    expected = layers.one_by_one()
    actual = layers.together(device)
    assert layers.error is None
    for found, wanted in zip(actual, expected, strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert_same_bytes(one.cpu(), other)


def test_no_layers_are_stored_as_nothing():
    tt.cache_store_layers([], [], [], torch.arange(3), tt.preset("k4v4", 64), [])


def _with_last(items, wrong):
    return [*items[:-1], wrong]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda x: {"v": x.v[:1]}, ValueError, "v are of 1 layers, k of 2"),
        (lambda x: {"caches": x.caches * 2}, ValueError, "caches are of 4 layers, k of 2"),
        (lambda x: {"tables": x.tables[:1]}, ValueError, "tables are of 1 layers, k of 2"),
        (lambda x: {"tails": x.tails(x.rings)[:1]}, ValueError, "tails are of 1 layers, k of 2"),
        (
            lambda x: {"v": _with_last(x.v, x.v[1].float())},
            TypeError,
            "v has dtype float32, supported: bfloat16",
        ),
        (lambda x: {"k": _with_last(x.k, x.k[1][:, :1])}, ValueError, "expected [2, 1, 20, 64]"),
        (lambda x: {"k": _with_last(x.k, x.k[1][0])}, ValueError, "k has shape [2, 20, 64]"),
        (
            lambda x: {"caches": _with_last(x.caches, x.caches[1][..., :-1])},
            ValueError,
            "cache has shape",
        ),
        (
            lambda x: {"tables": _with_last(x.tables, x.tables[1]._replace(center=None))},
            ValueError,
            "tables of some layers have a center and those of others have none",
        ),
        (lambda x: {"seq_lens": None}, ValueError, "tail needs seq_lens"),
        (
            lambda x: {
                "tails": _with_last(x.tails(x.rings), tt.Tail(x.rings[1], x.tail_slots + 0))
            },
            ValueError,
            "tails of all layers must have the same slots",
        ),
        (lambda x: {"slot_mapping": x.slots[:-1]}, ValueError, "slot_mapping has shape [39]"),
        (lambda x: {"slot_mapping": x.slots + 999}, RuntimeError, "slot_mapping holds"),
        (
            lambda x: {"k": [t[..., :48] for t in x.k], "v": [t[..., :48] for t in x.v]},
            ValueError,
            "k has head_dim 48, but the config has 64",
        ),
    ],
)
def test_layers_that_do_not_fit_leave_all_of_them_alone(change, error, text):
    layers = Layers()
    found = layers.together(**change(layers))
    assert isinstance(layers.error, error) and text in str(layers.error)
    for after, before in zip(found, (layers.caches, layers.rings), strict=True):
        for one, other in zip(after, before, strict=True):
            assert_same_bytes(one, other)


@pytest.mark.parametrize(
    ("place", "change", "text"),
    [
        (1, lambda v: v[:1], "v are of 1 layers, k of 2"),
        (2, lambda caches: [], "caches are of 0 layers, k of 2"),
        (
            2,
            lambda caches: [caches[0], caches[1][:, :1].contiguous()],
            "cache has 1 KV heads but k has 2",
        ),
        (4, lambda signs: [signs[0], signs[1][:-1]], "key_signs has shape [63]"),
        (5, lambda signs: signs[:1], "value_signs are of 1 layers, k of 2"),
        (10, lambda centers: centers[:1], "centers are of 1 layers, k of 2"),
        (16, lambda rings: rings[:1], "tails are of 1 layers, k of 2"),
        (18, lambda lengths: None, "tail needs seq_lens"),
        (1, lambda v: [v[0], v[1].float()], "v has dtype float32"),
        (0, lambda k: [k[0], k[1][0]], "k has shape [2, 20, 64]"),
    ],
)
def test_the_raw_op_checks_all_layers_first(place, change, text):
    x = Layers()
    t = x.tables
    arguments = [
        x.k, x.v, x.caches, x.slots, [y.key_signs for y in t], [y.value_signs for y in t],
        t[0].key_levels, t[0].value_levels, t[0].key_steps, t[0].value_steps,
        [y.center for y in t], 16, 4, 4, 3, 2, x.rings, x.tail_slots,
        x.batch["seq_lens"], x.batch["cu_seqlens_q"], 4,
    ]  # fmt: skip
    held = [y.clone() for y in (*x.caches, *x.rings)]
    arguments[place] = change(arguments[place])
    with pytest.raises(RuntimeError) as caught:
        torch.ops.turboquant.cache_store_layers(*arguments)
    assert text in str(caught.value)
    for after, before in zip((*x.caches, *x.rings), held, strict=True):
        assert_same_bytes(after, before)


def test_the_ring_holds_the_last_positions():
    """Spelled out: 2 sinks, a ring of 5, 12 tokens in two calls."""
    config = tt.preset("k4v4", 16, page_size=16, sink_tokens=2, recent_window=3)
    tables = tt.make_tables(config, 0)
    k = torch.arange(12.0)[:, None, None].expand(12, 1, 16).contiguous()
    cache = tt.allocate_cache(config, 1, 1)
    ring = tt.allocate_tail(config, 1, 1, torch.float32, max_q_len=3)
    assert ring.shape == (1, 1, 2 + 5, 2, 16)
    tail = tt.Tail(ring, torch.tensor([0]))
    for start, end in ((0, 9), (9, 12)):
        tt.cache_store(
            k[start:end],
            -k[start:end],
            cache,
            torch.arange(start, end),
            config,
            tables,
            tail=tail,
            seq_lens=int32(end),
            cu_seqlens_q=int32(0, end - start),
        )
    assert ring[0, 0, :, 0, 0].tolist() == [0, 1, 7, 8, 9, 10, 11]
    assert ring[0, 0, :, 1, 5].tolist() == [0, -1, -7, -8, -9, -10, -11]
    assert [tail_row_reference(p, 2, 5) for p in range(12)] == [0, 1, *(2, 3, 4, 5, 6) * 2]


@pytest.mark.parametrize("tokens", [3, 700])
@pytest.mark.parametrize(
    ("d", "dtype"), [(64, torch.bfloat16), (128, torch.half), (48, torch.float)]
)
@pytest.mark.parametrize("gap", [16, 64 * 1023])
def test_one_layer_of_an_allocation_for_several(gap, d, dtype, tokens, device):
    """Pages and entries of the tail at any distance, int32 slots: the same bytes, and the rest is
    as it was. Loading finds them, by a table with rows at any distance."""
    config = tt.preset("k5v4u", d, page_size=16, sink_tokens=2, recent_window=3)
    tables = tt.make_tables(config, 3, center=randn(HEADS, d, seed=1))
    k, v = random_kv(tokens, d, dtype=dtype)
    num_pages, table, slots = paged([tokens - 1, 1], 16)
    table, slots = table.clamp(0), torch.cat(slots)
    slots[0] = -1
    ring = torch.full((3, HEADS, 2 + 5, 2, d), 7, dtype=dtype)
    batch = {"seq_lens": int32(tokens - 1, 1), "cu_seqlens_q": int32(0, tokens - 1, tokens)}
    want, want_ring = garbage_cache(config, num_pages, HEADS), ring.clone()
    tail = tt.Tail(want_ring, torch.tensor([2, 0]))
    cache_store_reference(k, v, want, slots, config, tables, tail=tail, **batch)

    memory, cache = entries_apart(garbage_cache(config, num_pages, HEADS), gap, device)
    tail_memory, found_ring = entries_apart(ring, gap // 2, device)
    batch = {name: to_device(x, device) for name, x in batch.items()}
    moved = to_device(tables, device)
    tail = tt.Tail(found_ring, int32(2, 0).to(device))
    given = (k.to(device), v.to(device), cache, slots.int().to(device), config, moved)
    tt.cache_store(*given, tail=tail, **batch)
    assert_same_bytes(memory, entries_apart(want, gap)[0])
    assert_same_bytes(tail_memory, entries_apart(want_ring, gap // 2)[0])

    wide = torch.full((2, table.shape[1] + 3), -(2**31), dtype=torch.int32)
    wide[:, 1 : table.shape[1] + 1] = table
    view = wide.to(device)[:, 1 : table.shape[1] + 1]
    numbers = (config, moved, tokens, dtype)
    loaded = tt.cache_load(cache, view, batch["seq_lens"], *numbers)
    plain = tt.cache_load(want.to(device), table.to(device), batch["seq_lens"], *numbers)
    for one, other in zip(loaded, plain, strict=True):
        assert_same_bytes(one, other)


def test_layers_of_one_allocation(device):
    """They interleave without sharing a byte; layers that do share some are refused."""
    layers = Layers("k4v4", dtype=torch.bfloat16, center=False, tail=True, layout="bshd")
    expected = layers.one_by_one()

    def together(parts):
        """Both layers' tensors as parts [:, 0] and [:, 1] of one, page by page."""
        memory = torch.stack(parts, dim=1).to(device)
        return [memory[:, i] for i in range(2)]

    caches, rings = together(layers.caches), together(layers.rings)
    slots = layers.tail_slots.int().to(device)
    tails = [tt.Tail(ring, slots) for ring in rings]
    layers.together(device, caches=caches, tails=tails, slot_mapping=layers.slots.int().to(device))
    assert layers.error is None
    for found, wanted in zip((caches, rings), expected, strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert_same_bytes(one.contiguous(), other)
    held = [t.clone() for t in (*caches, *rings)]
    flat, shape = caches[0]._base.view(-1), caches[0].shape
    record = shape[2]
    for distance in (0, 16, record):  # the second layer begins inside the first
        other = torch.as_strided(flat[distance:], (shape[0] - 1, *shape[1:]), caches[0].stride())
        layers.together(device, caches=[caches[0][:-1], other], tails=[])
        assert "cache and cache share memory" in str(layers.error)
    layers.together(device, caches=[caches[0], caches[0].contiguous()], tails=[tails[0], tails[0]])
    assert "tail and tail share memory" in str(layers.error)
    for one, other in zip((*caches, *rings), held, strict=True):
        assert_same_bytes(one, other)


# ---- loading


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", tt.PRESETS)
def test_loaded_values_are_the_references(name, dtype, device):
    d, page_size = 112, 16
    config = tt.preset(name, d, page_size=page_size)
    center = tt.scaled_center(randn(HEADS, d, seed=1), scales(HEADS, d, seed=2))
    tables = tt.make_tables(config, 4, center=center)
    lengths = [0, 1, 15, 16, 17, 40]
    num_pages, table, slots = paged(lengths, page_size)
    k, v = random_kv(sum(lengths), d)
    cache = check_store(config, tables, k, v, torch.cat(slots), num_pages, device)
    arguments = (table, int32(*lengths))
    loaded = tt.cache_load(
        cache,
        *(t.to(device) for t in arguments),
        config,
        to_device(tables, device),
        43,
        dtype,
    )
    expected = cache_load_reference(cache.cpu(), *arguments, config, tables, 43, dtype)
    for actual, reference in zip(loaded, expected, strict=True):
        assert actual.shape == (6, 43, HEADS, d)
        assert_same_bytes(actual, reference)  # stale NaN bytes would show
        for s, length in enumerate(lengths):
            assert not actual[s, length:].any()
    error = (loaded[0][5, :40].cpu().float() - k[-40:]).norm() / (k[-40:] - center[0]).norm()
    assert error < 0.4


def test_load_of_nothing():
    config = tt.preset("k4v4", 64)
    tables = tt.make_tables(config, 0)
    cache = tt.allocate_cache(config, 2, HEADS)
    for lengths, longest in (((), 5), ((0, 0), 0)):
        table = torch.full((len(lengths), 3), 99, dtype=torch.int32)
        k, v = tt.cache_load(cache, table, int32(*lengths), config, tables, longest, torch.bfloat16)
        assert k.shape == v.shape == (len(lengths), longest, HEADS, 64)


def test_a_broken_token_spoils_only_itself(device):
    config = tt.preset("k4v4", 64)
    tables = tt.make_tables(config, 0)
    k, v = random_kv(20, 64)
    clean = check_store(config, tables, k, v, torch.arange(20), 1, device)
    k[7, 1, 5], v[9, 0, 63] = torch.nan, -torch.inf
    cache = check_store(config, tables, k, v, torch.arange(20), 1, device)
    arguments = (int32([0]).to(device), int32(20).to(device), config, to_device(tables, device))
    before = tt.cache_load(clean, *arguments, 20, torch.float32)
    after = tt.cache_load(cache, *arguments, 20, torch.float32)
    for kind, token, head in ((0, 7, 1), (1, 9, 0)):
        assert after[kind][0, token, head].isnan().all()
        others = torch.ones(20, HEADS, dtype=torch.bool)
        others[token, head] = False
        assert_same_bytes(after[kind][0][others.to(device)], before[kind][0][others.to(device)])


def test_caches_beyond_4_gib():
    """64-bit offsets: tokens on both sides of 4 GiB. Only touched pages of memory become real."""
    config = tt.preset("k4v4", 128, page_size=128)
    num_pages = 5 * 2**30 // config.record_bytes + 1
    cache = torch.empty(num_pages, 1, config.record_bytes, dtype=torch.uint8)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tables = tt.make_tables(config, 0)
    k, v = random_kv(4, 128, heads=1)
    pages = torch.tensor([num_pages - 1, 0])
    # where a 32-bit offset of the last page would land
    wrapped = (num_pages - 1) * config.record_bytes % 2**32
    alias = cache.flatten()[wrapped : wrapped + 4096]
    alias.fill_(0xAB)
    slots = torch.cat([pages[:1] * 128 + torch.arange(3), pages[1:] * 128])
    tt.cache_store(k, v, cache, slots, config, tables)
    assert (alias == 0xAB).all()
    small = tt.allocate_cache(config, 2, 1)
    tt.cache_store(k, v, small, torch.tensor([0, 1, 2, 128]), config, tables)
    assert_same_bytes(cache[pages[0], 0, : 3 * 64], small[0, 0, : 3 * 64])
    for table, store in ((pages.int()[:, None], cache), (int32(0, 1)[:, None], small)):
        loaded = tt.cache_load(store, table, int32(3, 1), config, tables, 3, torch.float32)
        q = randn(2, 4, 128, seed=1)
        result = (*loaded, *tt.paged_attention(q, store, table, int32(3, 1), config, tables))
        if store is cache:
            big = result
    for one, other in zip(big, result, strict=True):
        assert_same_bytes(one, other)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown < 200 * 1024  # KiB


# ---- pinned bytes


@pytest.mark.parametrize("case", make_golden.RECORDS, ids=lambda c: f"{c[0]}-{c[1]}-{c[2]}")
def test_golden_records(case, device):
    config, tables, k, v, slots = make_golden.record_case(*case)
    golden = make_golden.record_file(*case).read_bytes()
    cache = tt.allocate_cache(config, 1, make_golden.KV_HEADS, device)
    tt.cache_store(
        k.to(device), v.to(device), cache, slots.to(device), config, to_device(tables, device)
    )
    assert cache.cpu().numpy().tobytes() == golden
    cache = tt.allocate_cache(config, 1, make_golden.KV_HEADS)
    cache_store_reference(k, v, cache, slots, config, tables)
    assert cache.numpy().tobytes() == golden


def test_golden_dense_rows():
    golden = (make_golden.DATA / "dense_rows.bin").read_bytes()
    assert make_golden.dense_bytes(tt.encode) == golden
    assert make_golden.dense_bytes(encode_reference) == golden


@pytest.mark.parametrize("case", make_golden.READERS, ids=lambda c: f"{c[0]}-{c[1]}")
def test_golden_readers(case, device):
    """Unused bits that are 1, and every byte of an 8-bit code."""
    config, tables, data = make_golden.reader_record(*case)
    golden = make_golden.reader_file(*case).read_bytes()
    assert golden[: config.record_bytes] == data.tobytes()
    cache = torch.from_numpy(data)[None, None]
    arguments = make_golden.load_arguments(config, to_device(tables, device), device)
    loaded = tt.cache_load(cache.to(device), *arguments)
    expected = cache_load_reference(cache, *make_golden.load_arguments(config, tables))
    for parts in (loaded, expected):
        read = b"".join(part.cpu().numpy().tobytes() for part in parts)
        assert read == golden[config.record_bytes :]


def test_golden_reader_rows(device):
    golden = (make_golden.DATA / "reader_rows.bin").read_bytes()
    assert make_golden.reader_row_bytes(decode_reference) == golden

    def decode(*arguments):
        return tt.decode(*(to_device(a, device) for a in arguments)).cpu()

    assert make_golden.reader_row_bytes(decode) == golden


def test_golden_constants(device):
    """Constants are computed in float64 and rounded once: for these sizes it can be seen."""
    golden = (make_golden.DATA / "constants.bin").read_bytes()
    assert make_golden.constant_bytes(encode_reference) == golden

    def encode(*arguments):
        packed, scale = tt.encode(*(to_device(a, device) for a in arguments))
        return packed.cpu(), scale.cpu()

    assert make_golden.constant_bytes(encode) == golden


# ---- tables and allocation


def test_tables():
    config = tt.preset("k4v3", 96, seed=11)
    tables = tt.make_tables(config, 2, center=randn(3, 96, seed=1, dtype=torch.bfloat16))
    assert_same_bytes(tables.key_signs, tt.random_signs(96, 11, 2, tt.SignKind.KEYS))
    assert_same_bytes(tables.value_signs, tt.random_signs(96, 11, 2, tt.SignKind.VALUES))
    assert not torch.equal(tables.key_signs, tables.value_signs)
    assert not torch.equal(tables.key_signs, tt.make_tables(config, 3).key_signs)
    assert tables.key_levels.shape == (16,) and tables.value_levels.shape == (8,)
    assert tables.key_steps.shape == tables.value_steps.shape == (8,)
    assert tables.center.dtype == torch.float32 and tables.center.shape == (3, 96)
    assert tt.make_tables(tt.preset("k5v4u", 64), 0).key_levels is None
    assert tt.make_tables(tt.preset("k8v8", 64), 0).value_levels is None
    center = tt.scaled_center(randn(5, 96, seed=1), scales(5, 96, seed=2))
    assert_same_bytes(tt.make_tables(config, 2, center=center).center, center)
    rounded = tt.make_tables(config, 2, center=center.bfloat16()).center
    assert torch.equal(rounded[2], 1 / rounded[1])  # not the inverse that was rounded
    for wrong in (torch.zeros(96), torch.zeros(2, 5, 96), torch.zeros(5, 95)):
        with pytest.raises(ValueError, match=r"center has shape .*, expected \[kv_heads, 96\] or"):
            tt.make_tables(config, 2, center=wrong)
    with pytest.raises(ValueError, match="scale must be positive and finite"):
        tt.make_tables(config, 2, center=torch.zeros(3, 5, 96))


def test_allocation():
    config = tt.preset("k4v4", 128)
    cache = tt.allocate_cache(config, 7, 8)
    assert cache.shape == (7, 8, 32 * 132) and cache.dtype == torch.uint8 and not cache.any()
    tail = tt.allocate_tail(config, 5, 8, torch.bfloat16, max_q_len=4)
    assert tail.shape == (5, 8, 4 + 64 + 3, 2, 128) and tail.dtype == torch.bfloat16
    only_sinks = tt.preset("k4v4", 128, recent_window=0)
    assert tt.allocate_tail(only_sinks, 1, 1, torch.float32).shape == (1, 1, 5, 2, 128)
    with pytest.raises(ValueError, match="needs no tail"):
        tt.allocate_tail(tt.preset("k4v4", 128, recent_window=0, sink_tokens=0), 1, 1, torch.half)
    with pytest.raises(ValueError, match="max_q_len is 0"):
        tt.allocate_tail(config, 1, 1, torch.half, max_q_len=0)
    with pytest.raises(TypeError, match=r"dtype is torch\.int8"):
        tt.allocate_tail(config, 1, 1, torch.int8)
