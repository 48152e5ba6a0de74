"""Kernels of one call of attention on CUDA, which run beside each other (Overlap in device.cuh):
each must see all that was written before the call, and whoever comes behind it all of the call.

Most kernels leave no room on a multiprocessor, so few orders of events can be brought about. On
compute capability 9.0 no kernel of a call waits at its end for those ahead of it (Overlap::leave).
Whoever comes behind the call must wait for all of its kernels nevertheless."""

import itertools
import random
import re

import pytest
import torch

import torch_turboquant as tt
from tests.attention_cuda import (
    Case,
    attend,
    behind,
    build,
    check,
    check_own,
    int32,
    lengths_ahead,
    own_tokens,
)
from tests.helpers import assert_same_bytes
from tests.test_row_tiles_launches import needs_row_tiles
from tests.test_split_kv_launches import kernels_of

pytestmark = pytest.mark.cuda

# (preset, (q_heads, kv_heads), queries of each sequence, tokens of the longest, kernels on compute
# capability 9.0 with own tokens, of which split_kv may be launched twice)
CALLS = {
    "steps, drafts": ("k4v4u", (8, 2), [1] * 6 + [6] * 3, 20_000, "split_kv key_tiles"),
    "steps, many drafts": ("k5v4u", (16, 4), [1] * 24 + [4] * 16, 2_000, "split_kv key_tiles"),
    "steps, wide drafts": ("k4v4", (32, 2), [1] * 6 + [6] * 3, 20_000, "split_kv row_tiles"),
    "steps, drafts, chunk": (
        *("k5v4u", (16, 2), [1] * 6 + [3, 900], 20_000),
        "split_kv prompts chunks row_tiles",
    ),
    "steps, prompts": (
        *("k5v4u", (16, 2), [1] * 6 + [700] * 6, 2_000),
        "split_kv gather prompts row_tiles",
    ),
    "steps, chunks": (
        *("k5v4u", (16, 2), [1] * 6 + [900] * 3, 20_000),
        "split_kv gather prompts chunks row_tiles",
    ),
    "prompts": ("k5v4u", (16, 2), [700] * 8, 2_000, "gather prompts row_tiles"),
}


def of_name(name: str, seed: int) -> Case:
    preset, (q_heads, kv_heads), q_lens, longest, _ = CALLS[name]
    config = tt.preset(preset, 128)
    heads = {"q_heads": q_heads, "kv_heads": kv_heads}
    return build(config, [longest] * len(q_lens), q_lens, **heads, seed=seed)


def with_lengths(case: Case, chosen: random.Random) -> Case:
    """With other lengths: one token, no older ones, few, or nearly as many as there is room for."""
    longest = case.k.shape[1]
    lengths = [
        min(chosen.choice([q, q + 50, longest // 3, longest - 63, longest]), longest)
        for q in case.q_lens
    ]
    return case._replace(lengths=int32(*lengths))


def names_of(case: Case, **options) -> list[str]:
    """Of the kernels that a call launches, once for each that is launched twice in a row."""
    names = re.findall(r"::(\w+)_kernel<", " ".join(kernels_of(case, **options)))
    return [{"attend": "split_kv"}.get(name, name) for name, _ in itertools.groupby(names)]


@pytest.mark.parametrize("name", CALLS)
def test_kernels(name):
    """What the other tests are about, and that it is right."""
    needs_row_tiles(behind([50], [40]))
    case = of_name(name, 0)
    assert names_of(case, **own_tokens(case)) == CALLS[name][-1].split()
    check(case)
    check_own(case)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_lengths_written_just_before(name, own):
    """The kernel ahead, which lets the call begin early, writes the lengths over those of the call
    before."""
    case, chosen = of_name(name, 1), random.Random(name)
    calls = [with_lengths(case, chosen) for _ in range(4)]
    options = own_tokens(case) if own else {}
    wanted = [attend(call, **options) for call in calls]
    lengths, write = lengths_ahead(calls)
    changing = case._replace(lengths=lengths)
    for turn in range(24):
        i = turn * 7 % 4
        write(i)
        found = attend(changing, **options)
        for one, other in zip(found, wanted[i], strict=True):
            assert_same_bytes(one, other)


@pytest.mark.parametrize("name", CALLS)
def test_results_read_just_behind(name):
    """The next call begins early, too, and its queries are the results of this one. The last
    sequences are short, so the kernels that take them would end first."""
    case = of_name(name, 2)
    short = [q for q in case.q_lens if q > 1]
    lengths = [case.k.shape[1]] * (len(case.q_lens) - len(short)) + short
    case = case._replace(lengths=int32(*lengths))
    next_call = case._replace(q=torch.empty_like(case.q))
    out = torch.empty_like(case.q)
    wanted = []
    for call in (case, case._replace(q=2 * case.q)):
        next_call.q.copy_(attend(call)[0])
        torch.cuda.synchronize()
        wanted.append((call, attend(next_call)[0]))
    torch.cuda.synchronize()
    for turn in range(24):
        call, expected = wanted[turn % 2]
        torch.cuda._sleep(1_000_000)
        attend(call, out=out)
        assert_same_bytes(attend(case._replace(q=out))[0], expected)
    q, graph = case.q.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(case._replace(q=q), out=out)
        found = attend(case._replace(q=out))[0]
    for turn in range(8):
        call, expected = wanted[turn % 2]
        q.copy_(call.q)
        graph.replay()
        assert_same_bytes(found, expected)


def test_the_longest_kernel_is_not_the_last():
    """Most thread blocks of the kernel of prompts are done long before the one that has the last
    queries, and then row tiles attend to a draft, and the next call reads the last results. (The
    table has no page more than the prompt needs, so that nothing is gathered.)"""
    needs_row_tiles(behind([50], [40]))
    config = tt.preset("k5v4u", 128)
    longest = 16_960  # 132 tiles of 128 rows and 132 tiles of 128 keys
    case = build(config, [longest, 140], [longest, 40], q_heads=1, kv_heads=1)
    next_call = build(config, [30] * 64, q_heads=1, kv_heads=1, seed=1)
    case = case._replace(table=case.table[:, : longest // config.page_size].contiguous())
    options, last = own_tokens(case), slice(longest - 64, longest)
    assert names_of(case, **options)[-3:] == ["prompts", "chunks", "row_tiles"]
    out, calls, wanted = torch.empty_like(case.q), [case, case._replace(q=2 * case.q)], []
    for call in calls:
        attend(call, out=out, **options)
        torch.cuda.synchronize()
        copy = out[last].clone()
        wanted.append((copy, attend(next_call._replace(q=copy))[0]))
    torch.cuda.synchronize()
    q, graph = case.q.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # of calls of ours, and of a kernel that knows nothing of this
        attend(case._replace(q=q), out=out, **options)
        of_graph = out[last].clone(), attend(next_call._replace(q=out[last]))[0]
        attend(case._replace(q=q), out=out, **options)
        behind_graph = attend(next_call._replace(q=out[last]))[0], out[last].clone()
    for turn in range(24):
        torch.cuda._sleep(1_000_000)
        attend(calls[turn % 2], out=out, **options)
        if turn % 3 == 0:
            assert_same_bytes(out[last].clone(), wanted[turn % 2][0])
        assert_same_bytes(attend(next_call._replace(q=out[last]))[0], wanted[turn % 2][1])
        q.copy_(calls[turn % 2].q)
        graph.replay()
        for found in (of_graph, behind_graph[::-1]):
            for one, other in zip(found, wanted[turn % 2], strict=True):
                assert_same_bytes(one, other)
