"""Calls with many query rows in a serving loop: launches, scratch memory, streams, CUDA graphs."""

import itertools

import pytest
import torch

import torch_turboquant as tt
from tests.attention_cuda import (
    BF16,
    DEVICE,
    MIXTURES,
    Case,
    assert_near,
    attend,
    batch,
    build,
    expected,
    int32,
    randn,
    scratch_bytes,
    starts_of,
)
from tests.choices_cases import DRAFTS
from tests.helpers import assert_same_bytes
from tests.test_split_kv_launches import assert_streams_share_nothing, kernels_of
from torch_turboquant.config import CacheConfig

pytestmark = pytest.mark.cuda

NAMES = {
    "split_kv": ["split_kv::attend_kernel"],
    "key_tiles": ["key_tiles::key_tiles_kernel"],
    "row_tiles": ["row_tiles::row_tiles_kernel"],
    "split_kv+key_tiles": ["split_kv::attend_kernel", "key_tiles::key_tiles_kernel"],
    "split_kv+row_tiles": ["split_kv::attend_kernel", "row_tiles::row_tiles_kernel"],
    "general": ["general::general_kernel"],
}


def chosen(case: Case) -> str:
    """The kernel that choose_attention names."""
    return choice_of(case).kernel


def needs_row_tiles(case: Case) -> None:
    """Skips the test on GPUs that have no row tiles for this call."""
    if chosen(case) != "row_tiles":
        pytest.skip("no row tiles on this GPU")


def choice_of(case: Case) -> tt.KernelChoice:
    c = case.config
    return tt.kernel_choice(
        "paged_attention",
        head_dim=c.head_dim,
        q_heads=case.q.shape[1],
        kv_heads=case.cache.shape[1],
        max_q_len=case.max_q_len,
        seqs=len(case.lengths),
        tokens=len(case.q),
        max_seq_len=case.table.shape[1] * c.page_size,
        key_bits=c.key_bits,
        value_bits=c.value_bits,
        key_grid=c.key_grid,
        value_grid=c.value_grid,
        dtype=case.q.dtype,
        tail=case.tail is not None,
    )


def assert_launches(case: Case) -> None:
    """The kernels that the choice names, each once; split-KV twice where there may be drafts."""
    names = NAMES[chosen(case)]
    if choice_of(case).reason == DRAFTS:
        names = [names[0], *names]
    kernels = kernels_of(case)
    assert len(kernels) == len(names), kernels
    for kernel, name in zip(kernels, names, strict=True):
        assert name in kernel, kernels


def test_launches():
    """One kernel for a uniform batch, two where lengths decide, and the one that the choice says
    for everything that row tiles cannot take."""
    mixed, uniform = batch(MIXTURES["decode steps and a chunk"]), ([300, 90], [40, 40])
    for d in (64, 80, 128, 192, 256, 320):
        config = tt.preset("k4v4u", d)
        for lengths, q_lens in (mixed, uniform, ([300, 90], [1, 2]), ([300], [200])):
            assert_launches(build(config, lengths, q_lens))
    config = tt.preset("k4v4u", 128)
    for dtype in (torch.float16, torch.float32):
        assert_launches(build(config, *mixed, dtype=dtype))
        assert_launches(build(config, *mixed, dtype=dtype, tail=True))
    assert_launches(build(config, *mixed, q_heads=17, kv_heads=1))
    odd = CacheConfig(128, 4, 4, "uniform", "lloyd")
    assert_launches(build(odd, *mixed))
    assert_launches(build(odd, [300, 90], [1, 1]))
    drafts, some_drafts = ([300, 90], [8, 8]), ([300, 90, 70], [8, 8, 1])
    for lengths, q_lens in (drafts, some_drafts):
        for tail in (False, True):
            assert_launches(build(config, lengths, q_lens, tail=tail))
    if chosen(build(config, *uniform)) == "row_tiles":  # as on an H200
        assert chosen(build(config, *mixed)) == "split_kv+row_tiles"
        assert chosen(build(config, *drafts)) == "key_tiles"
        assert chosen(build(config, *some_drafts)) == "split_kv+key_tiles"
        for longest, q_lens, wanted in (
            (2016, [4] * 67, "key_tiles"),
            (2016, [4] * 51 + [1] * 16, "key_tiles"),
            (2016, [4] * 50 + [1] * 17, "split_kv+key_tiles"),
            (2017, [4] * 67, "split_kv"),  # block_table has room for more than 2,048
        ):
            case = build(config, [longest, *[300] * 66], q_lens, tail=True)
            assert chosen(case) == wanted
            assert_launches(case)


def test_more_work_than_one_call_can_count():
    """The host asks for the width of the block table, not for lengths: nothing is launched."""
    case = build(tt.preset("k4v4u", 64, page_size=128), [2000], [1024], q_heads=16, kv_heads=1)
    if chosen(case) != "row_tiles":
        pytest.skip("the general kernel counts no tiles")
    wide = torch.zeros(1, 1 << 23, dtype=torch.int32, device=DEVICE)
    attend(case._replace(table=wide[:, : 1 << 22]))
    with pytest.raises(RuntimeError, match="are more work than one call can count"):
        attend(case._replace(table=wide))


def test_scratch_memory_does_not_grow():
    """Neither with the context nor with the batch nor with the queries. In a mixed call each kernel
    has memory of its own."""
    config = tt.preset("k4v4u", 128)
    used = []
    for lengths, q_lens in (([300], [100]), ([60000], [100]), ([64] * 500, [20] * 499 + [1])):
        used.append(scratch_bytes(build(config, lengths, q_lens, q_heads=32, kv_heads=8)))
    assert used[0] == used[1] and used[2] < used[0] + (8 << 20) and max(used) < 32 << 20


def test_two_streams_at_once():
    """Scratch memory that two calls shared by accident would show."""
    config = tt.preset("k4v4u", 128)
    cases = [
        build(config, [20000, 37], [40, 1], tail=True),
        build(config, [9000, 300], [20, 20]),
        build(tt.preset("k3v3", 64), *batch(MIXTURES["all sorts"])),
    ]
    assert_streams_share_nothing(cases)


@pytest.mark.parametrize("own", [False, True])
def test_replays_with_other_mixtures(own):
    """A captured call of 8 sequences and 400 tokens: lengths, queries, pages and padding change in
    place between replays, and results are those of eager execution, bit for bit."""
    config = tt.preset("k4v4u", 128, page_size=16)
    lengths = [3000, 700, 700, 90, 64, 1000, 33, 40]
    case = build(config, lengths, [1] * 8)
    given = {"k_new": randn(400, 2, 128, seed=8, dtype=BF16)} if own else {}
    given |= {"v_new": randn(400, 2, 128, seed=9, dtype=BF16)} if own else {}
    static = case._replace(
        q=randn(400, 8, 128, seed=7, dtype=BF16), starts=starts_of([1] * 8), max_q_len=300
    )
    attend(static, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(static, **given)
    seen = []
    for seed, q_lens in enumerate(
        [
            [1, 1, 1, 1, 1, 1, 1, 1],
            [300, 1, 1, 1, 1, 1, 1, 1],
            [1, 4, 4, 0, 64, 200, 33, 40],
            [50, 50, 50, 50, 50, 50, 33, 40],
            [0, 0, 0, 0, 0, 0, 0, 0],
            [1, 0, 2, 0, 0, 300, 0, 9],
        ]
    ):
        shorter = [max(n - 17 * seed, count) for n, count in zip(lengths, q_lens, strict=True)]
        static.lengths.copy_(int32(*shorter))
        static.starts.copy_(starts_of(q_lens))
        static.q.copy_(randn(400, 8, 128, seed=50 + seed, dtype=BF16))
        for result in captured:
            result.fill_(torch.nan)
        graph.replay()
        replayed = [t.clone() for t in captured]
        for found, exact in zip(replayed, attend(static, **given), strict=True):
            assert_same_bytes(found, exact)
        used = sum(q_lens)
        assert torch.isfinite(replayed[0][:used]).all() and not replayed[0][used:].any()
        if not own:
            exact = static._replace(q=static.q[:used])
            if used:
                pair = replayed[0][:used], replayed[1][:used]
                assert_near(pair, expected(exact), case.spread)
        seen.append(replayed[0])
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(seen))


def test_what_the_kernel_ahead_writes_is_read():
    """A launch may begin before the kernel ahead of it has ended, and must then wait for it."""
    for q_lens in ([20, 20, 20], [40, 1, 3]):
        lengths = [5000, 77, 300]
        cases = [
            build(tt.preset("k4v4u", 128), lengths, q_lens, tail=True, seed=10 * i)
            for i in range(3)
        ]
        wanted = []
        for case in cases:
            torch.cuda.synchronize()
            first = attend(case)[0]
            torch.cuda.synchronize()
            wanted.append((first, attend(case._replace(q=first))[0]))
        one = build(tt.preset("k4v4u", 128), lengths, q_lens, tail=True, seed=99)
        for last, (case, (first, second)) in itertools.product(
            range(4), zip(cases, wanted, strict=True)
        ):
            pairs = [
                (one.q, case.q),
                (one.cache, case.cache),
                (one.table, case.table),
                (one.tail.ring, case.tail.ring),
            ]
            for to, _ in pairs:
                to.zero_()
            for to, source in pairs[last + 1 :] + pairs[: last + 1]:  # right before the launch
                to.copy_(source)
            out = attend(one)[0]
            assert_same_bytes(attend(one._replace(q=out))[0], second)
            assert_same_bytes(out, first)
