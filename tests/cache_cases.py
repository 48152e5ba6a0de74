"""Keys and values that tests of the cache store, and the comparison with the reference."""

import torch

import torch_turboquant as tt
from tests.helpers import assert_same_bytes, garbage_cache, randn, to_device
from torch_turboquant.ops.cache import cache_store_reference

HEADS = 2


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
