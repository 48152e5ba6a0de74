"""Calls on a GPU return while it is busy with what came before them.

Attention, codec, linear and mass have such tests in their own files (test_parity.py and others), or
are captured in graphs there.
"""

from collections.abc import Callable

import pytest
import torch

import torch_turboquant as tt
from tests.helpers import busy_gpu, garbage_cache, int32, randn, to_device
from tests.pool.harness import append, filled, make_pool
from torch_turboquant.eviction import POLICIES, Eviction

pytestmark = pytest.mark.cuda

Call = Callable[[], object]


def keys_of_layers(seed: int) -> list[torch.Tensor]:
    return [randn(1, 2, 20, 64, seed=seed + layer).cuda() for layer in range(2)]


def cache_move() -> Call:
    config = tt.preset("k4v4u", 64, page_size=16)
    cache = garbage_cache(config, 2, 2).cuda()
    sources, targets = (torch.arange(18).view(2, 9).cuda() + first for first in (0, 13))
    return lambda: tt.cache_move(cache, sources, targets, config)


def cache_store_layers() -> Call:
    config = tt.preset("k4v4", 64, page_size=16, sink_tokens=2, recent_window=5)
    caches = [garbage_cache(config, 2, 2).cuda() for _ in range(2)]
    tables = [to_device(tt.make_tables(config, layer), "cuda") for layer in range(2)]
    keys, values = keys_of_layers(1), keys_of_layers(3)
    rings = [tt.allocate_tail(config, 1, 2, torch.float32, 20).cuda() for _ in range(2)]
    tail_slots, slots = torch.zeros(1, dtype=torch.int64).cuda(), torch.arange(20).cuda()
    batch = {"seq_lens": int32(20).cuda(), "cu_seqlens_q": int32(0, 20).cuda()}
    tails = [tt.Tail(ring, tail_slots) for ring in rings]
    given = keys, values, caches, slots, config, tables
    return lambda: tt.cache_store_layers(*given, tails=tails, **batch)


def mla_load() -> Call:
    config = tt.latent_preset("k5u", 256, 64, page_size=32)
    tables = to_device(tt.make_latent_tables(config, 0), "cuda")
    cache = tt.allocate_latent_cache(config, 4, "cuda")
    table, lengths = int32(2, 0, 3, 1).view(2, 2).cuda(), int32(50, 3).cuda()
    return lambda: tt.mla_load(cache, table, lengths, config, tables, 64, torch.bfloat16)


def query_energy() -> Call:
    queries = keys_of_layers(1)
    return lambda: tt.query_energy(queries, 1, 2)


def learn_center() -> Call:
    keys, partners = keys_of_layers(1), (torch.arange(64).cuda() + 32) % 64
    energies = tt.query_energy(keys_of_layers(3), 2).unbind()
    return lambda: tt.learn_center(keys, energies, partners, 2)


def of_weights() -> list[Call]:
    f = tt.WeightFormat(4)
    group = f.group_of(256)
    signs, levels, steps = (
        to_device(x, "cuda") for x in (f.signs(group), f.levels(group), f.steps(group))
    )
    w = randn(40, 256, seed=1).cuda()
    packed = tt.weight_encode(w, signs, levels, steps, f.bits, f.sub)
    codes, scale, multipliers = tt.weight_unpack(packed, 40, group, f.bits, f.sub)
    more = multipliers if f.sub else None
    return [
        lambda: tt.weight_encode(w, signs, levels, steps, f.bits, f.sub),
        lambda: tt.weight_decode(packed, signs, levels, 40, f.bits, f.sub),
        lambda: tt.weight_pack(codes, scale, more, f.bits),
        lambda: tt.weight_unpack(packed, 40, group, f.bits, f.sub),
    ]


ONE_CALL = [cache_move, cache_store_layers, mla_load, query_energy, learn_center]


@pytest.mark.parametrize("make", ONE_CALL, ids=lambda make: make.__name__)
def test_never_waits(make):
    call = make()
    call()  # loads the kernels
    with busy_gpu():
        call()


@pytest.mark.parametrize("number", range(4), ids=["encode", "decode", "pack", "unpack"])
def test_weights_never_wait(number):
    call = of_weights()[number]
    call()
    with busy_gpu():
        call()


# torch's own random numbers come from the host
@pytest.mark.parametrize("name", sorted(POLICIES.keys() - {"random"}))
@pytest.mark.parametrize("lengths", [[90, 90], [90, 40]])
def test_policies_never_wait(name, lengths):
    evict = Eviction(0.5, name, sinks=2, window=8)
    keys, values = (randn(2, 2, 90, 64, seed=seed).cuda() for seed in (1, 2))
    queries = randn(2, 4, 64, 64, seed=3).cuda()

    def call():
        return evict.columns(evict.scores(queries, keys, values, lengths), lengths)

    call()
    with busy_gpu():
        call()


def test_a_pool_comes_back_and_counts_without_waiting():
    pool = make_pool(device="cuda")
    (seq,) = filled(pool, 37)
    pool.swap_in(pool.swap_out(seq))  # pins memory, loads kernels
    other = pool.allocate()
    append(pool, [other], [list(range(20))])
    swapped = pool.swap_out(other)
    with busy_gpu():
        pool.swap_in(swapped)
        assert pool.statistics().tokens == 57
