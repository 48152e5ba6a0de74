"""Loading from the packed cache: the reference's values, from whatever is stored."""

import pytest
import torch

import torch_turboquant as tt
from tests.cache_cases import HEADS, check_store, random_kv
from tests.helpers import FLOATS, assert_same_bytes, int32, paged, randn, scales, to_device
from torch_turboquant.ops.cache import cache_load_reference


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
