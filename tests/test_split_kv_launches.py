"""Decode steps in a serving loop: launches, scratch memory, streams, CUDA graphs, compilation."""

import itertools
import re

import pytest
import torch
from torch import Tensor

import torch_turboquant as tt
from tests.attention_cuda import (
    BF16,
    DEVICE,
    DIMS,
    Case,
    attend,
    build,
    generator,
    int32,
    randn,
    scratch_bytes,
)
from tests.helpers import ROOT, assert_same_bytes, launched

pytestmark = pytest.mark.cuda


# ---- launches, memory, streams


def few_cases() -> list[Case]:
    return [
        build(tt.preset("k4v4", 128), [3000, 37, 300], tail=True, center=True),
        build(tt.preset("k5v4u", 128), [20000], q_heads=32, kv_heads=8, tail=True),
        build(tt.preset("k3v3", 64), [100] * 200, [4] * 200),
    ]


def kernels_of(case: Case, **options) -> list[str]:
    """Names of what a call launches."""
    return launched(lambda: attend(case, **options))


def test_one_launch():
    """Rotation of the queries, splits, their merge, tail and inverse rotation: one kernel."""
    for case in few_cases():
        kernels = kernels_of(case)
        assert len(kernels) == 1, kernels


def test_which_head_dimensions_have_a_split_kv_kernel():
    """Those that the README names; others expand the whole cache. kernel_choice knows which."""
    row = re.search(r"^\| `paged_attention` .*$", (ROOT / "README.md").read_text(), re.MULTILINE)[0]
    most, *others = re.search(r"up to (\d+) channels, or (\d+) or (\d+)\.", row).groups()
    assert (DIMS[-1], 512, 576) == (int(most), *map(int, others))
    for d in (*DIMS, 512, 576, 288, 320, 1024):
        case = build(tt.preset("k4v4", d), [100])
        shape = {"head_dim": d, "q_heads": 8, "kv_heads": 2, "preset": "k4v4"}
        chosen = tt.kernel_choice("paged_attention", **shape)
        on_this_gpu = "compute capability below 8.0" not in chosen.reason
        assert (chosen.kernel == "split_kv") == (on_this_gpu and (d <= 256 or d in (512, 576)))
        kernels = kernels_of(case)
        assert len(kernels) == 1, kernels
        name = {"split_kv": "split_kv::attend_kernel", "general": "general::general_kernel"}
        assert name[chosen.kernel] in kernels[0], (d, kernels)


def test_scratch_memory_does_not_grow():
    """Neither with the context nor with the batch; outputs are given."""
    config = tt.preset("k4v4u", 128)
    used = []
    for lengths in ([100], [130000], [64] * 2000):
        used.append(scratch_bytes(build(config, lengths, q_heads=32, kv_heads=8)))
    assert max(used) < 32 << 20
    assert used[1] <= used[0] + (4 << 20) and used[2] <= used[0] + (4 << 20)


def test_nothing_waits_for_the_device():
    case = build(tt.preset("k4v4", 128), [3000, 37], tail=True, center=True)
    out, lse = torch.empty_like(case.q), torch.empty(case.q.shape[:2], device=DEVICE)
    slots = torch.stack([s[-1] for s in case.slots]).to(DEVICE)
    k, v = case.k[:, -1].contiguous(), case.v[:, -1].contiguous()
    attend(case)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tt.cache_store(
            k,
            v,
            case.cache,
            slots,
            case.config,
            case.tables,
            tail=case.tail,
            seq_lens=case.lengths,
        )
        attend(case)
        attend(case, out=out, lse=lse)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_the_kernel_ahead_writes_is_read():
    """A launch may begin before the kernel ahead of it has ended, and must then wait for it."""
    lengths = [5000, 77, 300]
    cases = [build(tt.preset("k4v4", 128), lengths, tail=True, seed=10 * i) for i in range(4)]
    wanted = []
    for case in cases:
        torch.cuda.synchronize()
        first = attend(case)[0]
        torch.cuda.synchronize()
        wanted.append((first, attend(case._replace(q=first))[0]))
    one = build(tt.preset("k4v4", 128), lengths, tail=True, seed=99)

    def written(case: Case) -> list[Tensor]:
        return [case.q, case.cache, case.table, case.lengths, case.tail.ring]

    for last, (case, (first, second)) in itertools.product(
        range(5), zip(cases, wanted, strict=True)
    ):
        pairs = list(zip(written(one), written(case), strict=True))
        for to, _ in pairs:
            to.zero_()
        for to, source in pairs[last + 1 :] + pairs[: last + 1]:  # `last` right before the launch
            to.copy_(source)
        out = attend(one)[0]
        assert_same_bytes(attend(one._replace(q=out))[0], second)
        assert_same_bytes(out, first)


def test_another_stream():
    """Inputs made on a side stream just before the call, after a long wait."""
    case = few_cases()[0]
    expected_out, expected_lse = attend(case)
    stream = torch.cuda.Stream()
    q = torch.zeros_like(case.q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        q.copy_(case.q)
        out, lse = attend(case._replace(q=q))
    stream.synchronize()
    assert_same_bytes(out, expected_out)
    assert_same_bytes(lse, expected_lse)


def assert_streams_share_nothing(cases: list[Case], options_of=lambda case: {}) -> None:
    """Each case many times on a stream of its own, all at once: the results of each case alone."""
    options = [options_of(case) for case in cases]
    first = [attend(case, **given) for case, given in zip(cases, options, strict=True)]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results = [[] for _ in cases]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(5_000_000)  # until all have work
    for _ in range(20):
        for case, given, stream, found in zip(cases, options, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(attend(case, **given))
    torch.cuda.synchronize()
    for exact, found in zip(first, results, strict=True):
        for out, lse in found:
            assert_same_bytes(out, exact[0])
            assert_same_bytes(lse, exact[1])


def test_two_streams_at_once():
    """Scratch memory that two calls shared by accident would show."""
    assert_streams_share_nothing(few_cases())


# ---- CUDA graphs


class Layers:
    """Two layers with different codebooks over the same pages; every page holds tokens."""

    seqs, q_heads, kv_heads, d, page_size, max_pages = 4, 8, 2, 128, 32, 80

    def __init__(self, q_len: int = 1) -> None:
        self.q_len = q_len
        pages = self.seqs * self.max_pages
        tokens = pages * self.page_size
        self.layers = []
        for layer, name in enumerate(("k4v4", "k5v4u")):
            config = tt.preset(name, self.d, page_size=self.page_size)
            center = randn(self.kv_heads, self.d, seed=layer + 1)
            tables = tt.make_tables(config, layer, DEVICE, center)
            cache = tt.allocate_cache(config, pages, self.kv_heads, DEVICE)
            k, v = (
                randn(tokens, self.kv_heads, self.d, seed=10 * layer + i, dtype=BF16)
                for i in (3, 4)
            )
            slots = torch.arange(tokens, device=DEVICE)
            tt.cache_store(k, v, cache, slots, config, tables)
            ring = tt.allocate_tail(config, self.seqs, self.kv_heads, BF16, q_len, DEVICE)
            ring.copy_(randn(*ring.shape, seed=10 * layer + 5))
            slots = torch.arange(self.seqs, device=DEVICE).flip(0)
            self.layers.append((config, tables, cache, tt.Tail(ring, slots)))
        self.starts = None
        if q_len > 1:
            self.starts = q_len * torch.arange(self.seqs + 1, dtype=torch.int32, device=DEVICE)
        self.inputs = self.some_inputs([1000, 4, 33, 64], 0)

    def some_inputs(self, lengths: list[int], seed: int) -> dict[str, Tensor]:
        pages = self.seqs * self.max_pages
        table = torch.randperm(pages, generator=generator(seed), device=DEVICE)
        table = table.view(self.seqs, -1)
        slots = []
        for s, length in enumerate(lengths):
            for position in range(length - self.q_len, length):
                page, offset = divmod(position, self.page_size)
                missing = position < 0
                slots.append(-1 if missing else int(table[s, page]) * self.page_size + offset)
        tokens = self.seqs * self.q_len
        heads = self.q_heads + 2 * self.kv_heads
        return {
            "qkv": randn(2, tokens, heads, self.d, seed=seed + 50, dtype=BF16),
            "table": table.int(),
            "lengths": int32(*lengths),
            "slots": torch.tensor(slots, device=DEVICE),
        }

    def step(self) -> list[tuple[Tensor, Tensor]]:
        results, i = [], self.inputs
        for (config, tables, cache, tail), qkv in zip(self.layers, i["qkv"], strict=True):
            q, k, v = qkv.split([self.q_heads, self.kv_heads, self.kv_heads], dim=1)
            tt.cache_store(
                k,
                v,
                cache,
                i["slots"],
                config,
                tables,
                tail=tail,
                seq_lens=i["lengths"],
                cu_seqlens_q=self.starts,
            )
            results.append(
                tt.paged_attention(
                    q,
                    cache,
                    i["table"],
                    i["lengths"],
                    config,
                    tables,
                    cu_seqlens_q=self.starts,
                    max_q_len=self.q_len,
                    tail=tail,
                )
            )
        return results


@pytest.mark.parametrize("q_len", [1, 4])
def test_replays_with_other_lengths_and_pages(q_len):
    """Whatever changes in place between replays: the results of eager execution, bit for bit."""
    layers = Layers(q_len)
    layers.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers.step()
    batches = ([1000, 4, 33, 64], [2560, 2560, 2560, 2560], [4, 5, 4, 2000], [31, 32, 33, 2049])
    if q_len == 1:
        batches += ([0, 0, 0, 0], [0, 1, 0, 2559], [1, 1, 1, 1])
    seen = []
    for seed, lengths in enumerate(batches):
        for name, value in layers.some_inputs(lengths, seed).items():
            layers.inputs[name].copy_(value)
        for pair in captured:
            for result in pair:
                result.fill_(torch.nan)
        graph.replay()
        replayed = [tuple(t.clone() for t in pair) for pair in captured]
        caches = [cache.clone() for _, _, cache, _ in layers.layers]
        rings = [tail.ring.clone() for *_, tail in layers.layers]
        for found, exact in zip(replayed, layers.step(), strict=True):
            assert_same_bytes(found[0], exact[0])
            assert_same_bytes(found[1], exact[1])
        for (_, _, cache, tail), cache_before, ring_before in zip(
            layers.layers, caches, rings, strict=True
        ):
            assert_same_bytes(cache, cache_before)
            assert_same_bytes(tail.ring, ring_before)
        seen.append(replayed[1][0])
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(seen))


def test_replays_in_a_row():
    """Scratch memory is as a captured call found it: ten replays, no other work between them."""
    layers = Layers()
    layers.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers.step()
    graph.replay()
    first = [tuple(t.clone() for t in pair) for pair in captured]
    for _ in range(10):
        graph.replay()
    for found, exact in zip(captured, first, strict=True):
        assert_same_bytes(found[0], exact[0])
        assert_same_bytes(found[1], exact[1])


# ---- torch.compile


class TinyModel(torch.nn.Module):
    """Two layers of attention over packed caches."""

    def __init__(self, seqs: int, max_len: int, tail: bool, seed: int = 0) -> None:
        super().__init__()
        heads, self.kv_heads, d, vocabulary = 8, 2, 64, 1000
        hidden = heads * d
        self.q_heads, self.d, self.page_size = heads, d, 32
        self.embedding = torch.nn.Parameter(randn(vocabulary, hidden, seed=seed + 1))
        self.head = torch.nn.Parameter(randn(hidden, vocabulary, seed=seed + 2))
        pages = -(-max_len // self.page_size)
        table = torch.randperm(seqs * pages, generator=generator(seed), device=DEVICE)
        self.register_buffer("table", table.view(seqs, pages).int())
        self.register_buffer("tail_slots", torch.arange(seqs, device=DEVICE))
        self.layers = []
        for layer, name in enumerate(("k4v4", "k5v4u")):
            config = tt.preset(
                name, d, page_size=self.page_size, search=1, sink_tokens=2, recent_window=8
            )
            width = (heads + 2 * self.kv_heads) * d
            scale = hidden**-0.5
            for part, shape in (("qkv", (hidden, width)), ("out", (hidden, hidden))):
                weight = torch.nn.Parameter(scale * randn(*shape, seed=seed + 10 * layer + 7))
                self.register_parameter(f"{part}{layer}", weight)
            cache = tt.allocate_cache(config, seqs * pages, self.kv_heads, DEVICE)
            self.register_buffer(f"cache{layer}", cache)
            ring = tt.allocate_tail(config, seqs, self.kv_heads, BF16, 1, DEVICE)
            self.register_buffer(f"ring{layer}", ring if tail else None)
            self.layers.append((config, tt.make_tables(config, layer, DEVICE)))
        self.eval().requires_grad_(False)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The next token of each sequence; lengths with this one."""
        x = self.embedding[tokens]
        last = (lengths - 1).long()
        page = self.table.gather(1, (last // self.page_size)[:, None])[:, 0].long()
        slots = page * self.page_size + last % self.page_size
        for layer, (config, tables) in enumerate(self.layers):
            cache, ring = getattr(self, f"cache{layer}"), getattr(self, f"ring{layer}")
            tail = None if ring is None else tt.Tail(ring, self.tail_slots)
            qkv = (x @ getattr(self, f"qkv{layer}")).unflatten(1, (-1, self.d)).to(BF16)
            q, k, v = qkv.split([self.q_heads, self.kv_heads, self.kv_heads], dim=1)
            tt.cache_store(k, v, cache, slots, config, tables, tail=tail, seq_lens=lengths)
            out, _ = tt.paged_attention(q, cache, self.table, lengths, config, tables, tail=tail)
            x = x + out.float().flatten(1) @ getattr(self, f"out{layer}")
        return (x @ self.head).argmax(-1)


@pytest.mark.parametrize("tail", [False, True])
def test_compiled_decode_steps(tail):
    """fullgraph, CUDA graphs by torch.compile, lengths growing over page borders: one graph, no
    recompilation, nothing that made the compiler give up CUDA graphs, the tokens of eager."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    eager, compiled = (TinyModel(3, 160, tail) for _ in range(2))
    step = torch.compile(compiled, fullgraph=True, mode="reduce-overhead")
    tokens = torch.tensor([1, 2, 3], device=DEVICE)
    expected_tokens, lengths = tokens.clone(), int32(1, 30, 61)
    seen = []
    with torch.no_grad():
        for i in range(70):
            with torch.compiler.set_stance("default" if i == 0 else "fail_on_recompile"):
                torch.compiler.cudagraph_mark_step_begin()
                tokens = step(tokens, lengths).clone()
            expected_tokens = eager(expected_tokens, lengths)
            assert torch.equal(tokens, expected_tokens), i
            seen.append(tokens)
            lengths = lengths + 1
    assert len(torch.stack(seen).unique()) > 20  # it does not repeat itself
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1
    for layer in range(2):
        assert_same_bytes(getattr(compiled, f"cache{layer}"), getattr(eager, f"cache{layer}"))
    torch._dynamo.reset()
