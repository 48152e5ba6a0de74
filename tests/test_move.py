"""Tokens that move from slot to slot keep their bytes, and nobody else's change."""

import pytest
import torch

import torch_turboquant as tt
from tests.helpers import assert_same_bytes, entries_apart, garbage_cache, generator, randn
from torch_turboquant.format import own_bytes
from torch_turboquant.ops.move import cache_move_reference

GEOMETRIES = [
    (name, d, page_size)
    for name in ("k4v4u", "k5v4u", "k8v8", "k3v3", "k2v2")
    for d, page_size in ((16, 16), (48, 32), (80, 64), (128, 128), (144, 16), (576, 32))
]


def config(name="k4v4u", d=64, page_size=16):
    return tt.preset(name, d, page_size=page_size)


def slots_of(pages, page_size, heads, count, seed):
    """Different random slots for each head: int64 [heads, count]."""
    random = generator(seed)
    return torch.stack(
        [torch.randperm(pages * page_size, generator=random)[:count] for _ in range(heads)]
    )


@pytest.mark.parametrize(("name", "d", "page_size"), GEOMETRIES)
def test_bytes_of_every_geometry(name, d, page_size, device):
    """Sources and targets overlap; every unused bit has some value, and moves along."""
    c = config(name, d, page_size)
    cache = garbage_cache(c, 5, 3)
    count = 5 * page_size * 3 // 4
    sources, targets = (slots_of(5, page_size, 3, count, seed) for seed in (1, 2))
    sources[0, 3] = targets[1, 5] = -1
    want = cache.clone()
    cache_move_reference(want, sources, targets, c)
    moved = cache.to(device, copy=True)
    tt.cache_move(moved, sources.to(device), targets.to(device), c)
    assert_same_bytes(moved, want)
    assert not torch.equal(want, cache)


def test_the_bytes_of_a_token_and_no_other(device):
    c = config("k5v4u", 80, 32)
    cache = garbage_cache(c, 4, 2)
    sources, targets = torch.tensor([[5, 70], [100, 3]]), torch.tensor([[40, 127], [41, 0]])
    moved = cache.to(device, copy=True)
    tt.cache_move(moved, sources.to(device), targets.to(device), c)
    moved = moved.cpu()
    own = [own_bytes(c.record, token) for token in range(32)]
    assert len({byte for token in own for byte in token}) == c.record_bytes  # all have owners
    touched = torch.zeros(cache.shape, dtype=torch.bool)
    for head in range(2):
        for source, target in zip(sources[head].tolist(), targets[head].tolist(), strict=True):
            at = target // 32, head, own[target % 32]
            touched[at] = True
            assert_same_bytes(moved[at], cache[source // 32, head, own[source % 32]])
    assert_same_bytes(moved[~touched], cache[~touched])


def test_moved_tokens_decode_to_what_they_were(device):
    c = config("k3v2", 48)
    tables = tt.make_tables(c, 0, device)
    cache = garbage_cache(c, 6, 2).to(device)
    k, v = (randn(40, 2, 48, seed=s).to(device) for s in (1, 2))
    tt.cache_store(k, v, cache, torch.arange(40, device=device), c, tables)
    table = torch.arange(6, dtype=torch.int32, device=device)[None]

    def load(length):
        lengths = torch.tensor([length], dtype=torch.int32, device=device)
        return tt.cache_load(cache, table, lengths, c, tables, length, torch.float32)

    before = load(40)
    kept = torch.stack([torch.arange(0, 40, 2), torch.arange(20, 40)]).to(device)
    tt.cache_move(cache, kept, torch.arange(20, device=device).repeat(2, 1), c)
    for old, new in zip(before, load(20), strict=True):
        for head in range(2):
            assert_same_bytes(new[0, :, head], old[0, kept[head], head])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_shifts_and_swaps(dtype, device):
    """As if all tokens were read before one is written."""
    c = config()
    cache = garbage_cache(c, 40, 1)
    n = 40 * 16
    token = torch.arange(n)
    for to in (token.roll(1), token.roll(-1), token.flip(0)):
        moved = cache.to(device, copy=True)
        want = cache.clone()
        cache_move_reference(want, token[None], to[None], c)
        tt.cache_move(moved, *(x[None].contiguous().to(device, dtype) for x in (token, to)), c)
        assert_same_bytes(moved, want)
    moved = cache.to(device, copy=True)
    same = token[None].to(device)
    tt.cache_move(moved, same, same, c)
    assert_same_bytes(moved, cache)


def test_pages_at_any_distance_and_shared_pages(device):
    """What lies between the pages stays, and so does a page that no target is in."""
    c = config()
    cache = garbage_cache(c, 6, 2)
    memory, view = entries_apart(cache, 64, device)
    sources, targets = slots_of(3, 16, 2, 40, 1), slots_of(3, 16, 2, 40, 2) + 48
    want = cache.clone()
    cache_move_reference(want, sources, targets, c)
    tt.cache_move(view, sources.to(device), targets.to(device), c)
    assert_same_bytes(view, want)
    assert_same_bytes(view[:3], cache[:3])
    rest = memory.view(-1)[: 6 * (view[0].numel() + 64)].view(6, -1)[:, view[0].numel() :]
    assert (rest == 255).all()


def test_nothing_to_move(device):
    c = config()
    cache = garbage_cache(c, 2, 2).to(device)
    before = cache.clone()
    none = torch.zeros(2, 0, dtype=torch.int64, device=device)
    tt.cache_move(cache, none, none, c)
    skipped = torch.full((2, 5), -1, device=device)
    tt.cache_move(cache, skipped, skipped, c)
    tt.cache_move(cache, skipped, torch.zeros_like(skipped), c)  # all sources are left out
    assert_same_bytes(cache, before)


def test_values_that_the_cpu_checks():
    c = config()
    cache = garbage_cache(c, 2, 2)
    before = cache.clone()
    good = torch.tensor([[0, 1], [2, 3]])
    for sources, targets, text in (
        (good, torch.tensor([[4, 5], [6, 6]]), "targets holds slot 6 twice for KV head 1"),
        (good, torch.tensor([[4, 5], [6, 32]]), "targets holds 32, supported: -1 to 31"),
        (good - 2, good, "sources holds -2, supported: -1 to 31"),
    ):
        with pytest.raises(RuntimeError, match=text):
            tt.cache_move(cache, sources, targets, c)
    assert_same_bytes(cache, before)
    tt.cache_move(cache, good, torch.tensor([[4, 5], [4, 5]]), c)  # heads may have the same slots


@pytest.mark.cuda
def test_slots_out_of_range_are_left_out_on_cuda():
    c = config()
    cache = garbage_cache(c, 2, 1)
    moved = cache.cuda()
    sources, targets = torch.tensor([[0, 1, 99, -7]]), torch.tensor([[2**40, 20, 3, 4]])
    tt.cache_move(moved, sources.cuda(), targets.cuda(), c)
    cache_move_reference(cache, sources[:, 1:2], targets[:, 1:2], c)
    assert_same_bytes(moved, cache)


@pytest.mark.cuda
def test_warps_take_more_than_one_token():
    """So many tokens that the last warps have fewer of them than the others."""
    c, heads = config(d=16), 8
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    count = 32 * processors * 5 // heads + 7
    pages = -(-count // 16)
    cache = garbage_cache(c, pages, heads)
    sources, targets = (slots_of(pages, 16, heads, count, seed) for seed in (1, 2))
    sources[1, ::3] = -1
    moved = cache.cuda()
    cache_move_reference(cache, sources, targets, c)
    tt.cache_move(moved, sources.cuda(), targets.cuda(), c)
    assert_same_bytes(moved, cache)


def test_tiny(device):
    """For compute-sanitizer."""
    for name, d in (("k5v4u", 48), ("k3v3", 80), ("k2v2", 16)):
        c = config(name, d)
        cache = garbage_cache(c, 2, 2)
        sources, targets = slots_of(2, 16, 2, 9, 1), slots_of(2, 16, 2, 9, 2)
        want = cache.clone()
        cache_move_reference(want, sources, targets, c)
        moved = cache.to(device, copy=True)
        tt.cache_move(moved, sources.to(device), targets.to(device), c)
        assert_same_bytes(moved, want)


def test_one_graph(device):
    c = config()
    cache = garbage_cache(c, 2, 2).to(device)
    sources, targets = (slots_of(2, 16, 2, 9, s).to(device) for s in (1, 2))
    want = cache.clone()
    tt.cache_move(want, sources, targets, c)
    step = torch.compile(
        lambda *slots: tt.cache_move(cache, *slots, c), fullgraph=True, backend="aot_eager"
    )
    step(sources, targets)
    assert_same_bytes(cache, want)
