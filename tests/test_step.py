"""store_and_attend: the bytes of cache_store and of paged_attention with the call's own tokens."""

import pytest
import torch

import torch_turboquant as tt
from tests.attention_cases import build
from tests.helpers import assert_same_bytes, to_device

PARTS = ("out", "lse", "cache", "tail")


def parts_of(case, out, lse):
    tail = torch.empty(0) if case.tail is None else case.tail.ring
    return dict(zip(PARTS, (out, lse, case.cache, tail), strict=True))


def step_of(case):
    """k, v and slots of the tokens that the case has not stored yet."""
    counts = [1] * len(case.k) if case.cu is None else (case.cu[1:] - case.cu[:-1]).tolist()

    def last(parts):
        return torch.cat([p[len(p) - n :] for p, n in zip(parts, counts, strict=True)])

    return last(case.k), last(case.v), last(case.slots)


def both_ways(case, device, **options):
    """What the two ops leave behind, and what store_and_attend does."""
    k, v, slots = (t.to(device) for t in step_of(case))
    apart, together = (
        to_device(case._replace(cache=case.cache.clone(), tail=copied(case.tail)), device)
        for _ in range(2)
    )
    tail = {"tail": apart.tail, "seq_lens": apart.seq_lens, "cu_seqlens_q": apart.cu}
    tt.cache_store(k, v, apart.cache, slots, apart.config, apart.tables, **tail)
    args, kwargs = apart.arguments(**options)
    out, lse = tt.paged_attention(*args, **kwargs, k_new=k, v_new=v)
    (q, cache, table, lengths, config, tables), kwargs = together.arguments(**options)
    found = tt.store_and_attend(q, k, v, cache, slots, table, lengths, config, tables, **kwargs)
    return parts_of(apart, out, lse), parts_of(together, *found)


def copied(tail):
    return None if tail is None else tail._replace(ring=tail.ring.clone())


CASES = {
    "one token each": ([70, 1, 300, 129], None),
    "drafts": ([70, 9, 300, 129], [3, 1, 4, 4]),
    "empty sequences": ([0, 33, 0, 5], [0, 2, 0, 1]),
    "a chunk of a prompt": ([40, 200, 17], [1, 90, 1]),
    "whole prompts": ([150, 31], [150, 31]),
    "more rows than a block has": ([600], [40]),
    "forty sequences": ([3 + 7 * i for i in range(40)], None),
}


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("lengths", CASES)
@pytest.mark.parametrize("preset", ["k5v4u", "k8v4", "k3v3"])
def test_the_same_bytes_as_two_calls(preset, lengths, tail, device):
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    config = tt.preset(preset, 64, page_size=32, sink_tokens=1, recent_window=8)
    case = build(config, *CASES[lengths], dtype=dtype, center=True, tail=tail, store_new=False)
    apart, together = both_ways(case, device)
    for part in PARTS:
        assert_same_bytes(together[part], apart[part])


@pytest.mark.parametrize("lengths", ["drafts", "empty sequences", "a chunk of a prompt"])
def test_tiny_steps(lengths, device):
    """For compute-sanitizer (tests/sanitize_cuda.sh)."""
    config = tt.preset("k5v4u", 128, page_size=16, sink_tokens=1, recent_window=8)
    options = {"dtype": torch.bfloat16, "center": True, "tail": True, "store_new": False}
    apart, together = both_ways(build(config, *CASES[lengths], **options), device)
    for part in PARTS:
        assert_same_bytes(together[part], apart[part])


@pytest.mark.parametrize(("d", "dtype"), [(128, "float16"), (96, "bfloat16"), (320, "float32")])
def test_other_kernels_store_before_they_attend(d, dtype, device):
    config = tt.preset("k4v4", d, page_size=16)
    case = build(config, [90, 40], [2, 1], dtype=getattr(torch, dtype), store_new=False)
    options = {"sliding_window": 21, "soft_cap": 15.0}
    apart, together = both_ways(case, device, **options)
    for part in PARTS:
        assert_same_bytes(together[part], apart[part])


def test_given_outputs_and_skipped_tokens(device):
    """Tokens without a slot are attended to all the same."""
    config = tt.preset("k4v4u", 64, page_size=16)
    case = to_device(build(config, [20, 9], store_new=False), device)
    k, v, slots = (t.to(device) for t in step_of(case))
    slots[1] = -1
    before = case.cache.clone()
    out, lse = torch.empty_like(case.q), torch.empty(case.q.shape[:2], device=device)
    args = (case.q, k, v, case.cache, slots, *case.arguments()[0][2:])
    found = tt.store_and_attend(*args, out=out, lse=lse)
    assert found[0] is out and found[1] is lse
    expected = tt.paged_attention(*case.arguments()[0], k_new=k, v_new=v)
    assert_same_bytes(out, expected[0])
    page = int(case.block_table[1, 0])
    assert_same_bytes(case.cache[page], before[page])


def test_a_ring_needs_no_room_for_new_tokens(device):
    """What they overwrite comes from codes, as in paged_attention with k_new."""
    config = tt.preset("k4v4", 64, page_size=16, recent_window=8)
    case = build(config, [40, 9], [3, 2], tail=True, store_new=False)
    small = torch.zeros_like(tt.allocate_tail(config, 4, 2, torch.float32, max_q_len=1))
    case = case._replace(tail=case.tail._replace(ring=small))
    apart, together = both_ways(case, device)
    for part in PARTS:
        assert_same_bytes(together[part], apart[part])


SHARED = {
    "a whole prompt": ([32, 33], [32, 1]),
    "a token that fills a page": ([32, 33], [1, 1]),
    "drafts that fill a page": ([32, 40], [4, 3]),
    "far from the begin": ([4096, 4123], [1, 1]),
    "more tokens than a warp has lanes": ([64, 70], [33, 2]),
}


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", SHARED)
def test_a_sequence_reads_what_another_one_stores(name, d, device):
    """Engines share a prefix from the step on that fills its pages."""
    lengths, q_lens = SHARED[name]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    case = build(tt.preset("k4v4u", d, page_size=16), lengths, q_lens, dtype=dtype, store_new=False)
    pages = lengths[0] // 16
    case.block_table[1, :pages] = case.block_table[0, :pages]
    for _ in range(1 if device.type == "cpu" else 20):  # early readers may be lucky
        apart, together = both_ways(case, device)
        assert not torch.isnan(apart["out"]).any()
        for part in PARTS:
            assert_same_bytes(together[part], apart[part])


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("length", [40, 4000])
def test_a_token_stored_over_an_older_one(length, d, device):
    """Its sequence reads it twice: as it is, and from the codes of the other position."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    case = build(tt.preset("k5v4u", d, page_size=16), [length, 9], dtype=dtype, store_new=False)
    case.slots[0][-1] = case.slots[0][length // 2]
    for _ in range(1 if device.type == "cpu" else 20):
        apart, together = both_ways(case, device)
        for part in PARTS:
            assert_same_bytes(together[part], apart[part])


def test_outputs_apart_from_what_is_written():
    config = tt.preset("k4v4", 64, page_size=16)
    case = build(config, [20], dtype=torch.float16, store_new=False)
    k, v, slots = step_of(case)
    page = case.cache[0].view(torch.float16).flatten()
    args = (case.q, k, v, case.cache, slots, *case.arguments()[0][2:])
    for name, given in (("out", {"out": page[: case.q.numel()].view(case.q.shape)}), ("q", {})):
        before = case.cache.clone()
        called = args if given else (page[: case.q.numel()].view(case.q.shape), *args[1:])
        with pytest.raises(RuntimeError, match=f"{name} .*share memory|and {name} share memory"):
            tt.store_and_attend(*called, **given)
        assert_same_bytes(case.cache, before)


@pytest.mark.cuda
@pytest.mark.parametrize("q_len", [1, 3])
def test_steps_in_one_graph(q_len):
    """A step reads what the step before it has stored."""
    device, steps, seqs = torch.device("cuda"), 24, 3
    config = tt.preset("k5v4u", 128, page_size=64)
    tables = tt.make_tables(config, 0, device)
    table = torch.arange(seqs * 4, device=device, dtype=torch.int32).view(seqs, 4)
    lengths = [torch.full((seqs,), q_len * (i + 1), device=device).int() for i in range(steps)]
    starts = torch.arange(0, q_len * seqs + 1, q_len, device=device, dtype=torch.int32)
    generator = torch.Generator(device).manual_seed(0)

    def random(heads):
        shape = (steps, seqs * q_len, heads, 128)
        return torch.randn(shape, device=device, generator=generator).bfloat16()

    q, k, v = random(32), random(8), random(8)

    def slots(i):
        at = torch.arange(q_len * i, q_len * (i + 1), device=device)
        return (table[:, at // 64].long() * 64 + at % 64).flatten()

    mapping = [slots(i) for i in range(steps)]

    def run(cache, together):
        found = []
        for i in range(steps):
            batch = (table, lengths[i], config, tables)
            options = {"cu_seqlens_q": starts, "max_q_len": q_len}
            if together:
                step = tt.store_and_attend(q[i], k[i], v[i], cache, mapping[i], *batch, **options)
            else:
                tt.cache_store(k[i], v[i], cache, mapping[i], config, tables)
                new = {"k_new": k[i], "v_new": v[i]}
                step = tt.paged_attention(q[i], cache, *batch, **options, **new)
            found.append(step[0])
        return torch.stack(found)

    expected_cache = tt.allocate_cache(config, seqs * 4, 8, device)
    expected = run(expected_cache, together=False)
    cache = tt.allocate_cache(config, seqs * 4, 8, device)
    run(cache, together=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(cache, together=True)
    for _ in range(5):
        cache.zero_()
        graph.replay()
        assert_same_bytes(found, expected)
        assert_same_bytes(cache, expected_cache)
