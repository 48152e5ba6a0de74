"""torch.compile(fullgraph=True): every public function in one graph, without recompiling as a
sequence grows; mutations reach the caller's tensors."""

import pytest
import torch

import torch_turboquant as tt
from tests.helpers import assert_same_bytes, garbage_cache, int32, paged, randn

D = 48
SIGNS = tt.random_signs(D, 0)
BOOK = tt.Codebook.make(D, 4)
LEVELS, STEPS = BOOK.levels_tensor(), BOOK.steps_tensor(4)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _stored(seed=1):
    x = randn(2, 5, D, seed=seed)
    return x, *tt.encode(x, SIGNS, LEVELS, STEPS, 4)


def _functions():
    """name -> function of x [2, 3, D], float32; each returns a tensor or a tuple of them."""
    codes = torch.randint(8, (3, 13), dtype=torch.uint8)
    projection = tt.gaussian_projection(16, D, 0)
    _, packed, scale = _stored()
    groups = tt.group_encode(randn(3, 64, seed=1), 32, 4)
    bits, norm = tt.qjl_sketch(randn(2, 5, D, seed=2), projection)
    sketched = tt.qjl_sketch(_stored()[0], projection)
    center = randn(D, seed=3)
    lse = randn(2, 3, seed=4)
    weights = tt.WeightFormat(4)
    of_weights, steps = (weights.signs(64), weights.levels(64)), weights.steps(64)
    weight = tt.weight_encode(randn(20, 64, seed=5), *of_weights, steps, 4, 32)
    parts = tt.weight_unpack(weight, 20, 64, 4, 32)
    layer = tt.PackedLinear.from_linear(torch.nn.Linear(64, 20), weights, torch.full((64,), 2.0))
    return {
        "hadamard": lambda x: tt.hadamard(x, SIGNS, inverse=True),
        "pack": lambda x: tt.pack(codes, 3),
        "unpack": lambda x: tt.unpack(tt.pack(codes, 3), 3, 13),
        "encode": lambda x: tt.encode(x, SIGNS, LEVELS, STEPS, 4, "unbiased", center),
        "decode": lambda x: tt.decode(packed, scale, SIGNS, LEVELS, 4, center, torch.half),
        "group_encode": lambda x: tt.group_encode(x[..., :32], 32, 2),
        "group_decode": lambda x: tt.group_decode(*groups, 32, 4, 64, torch.bfloat16),
        "qjl_sketch": lambda x: tt.qjl_sketch(x, projection),
        "weight_encode": lambda x: tt.weight_encode(
            torch.cat([x, x], -1)[0, :, :64], *of_weights, steps, 4, 32
        ),
        "weight_pack": lambda x: tt.weight_pack(*parts, 4),
        "weight_unpack": lambda x: tt.weight_unpack(weight, 20, 64, 4, 32),
        "weight_decode": lambda x: tt.weight_decode(weight, *of_weights, 20, 4, 32, torch.half),
        "linear_packed": lambda x: tt.linear_packed(
            torch.cat([x, x], -1)[..., :64], weight, *of_weights, 20, 4, 32
        ),
        "linear_experts": lambda x: tt.linear_experts(
            torch.cat([x, x], -1)[0, :, :64],
            weight[None],
            torch.zeros(3, 2).long(),
            *of_weights,
            20,
            4,
            32,
        ),
        "PackedLinear": lambda x: layer(torch.cat([x, x], -1)[..., :64]),
        "qjl_score": lambda x: tt.qjl_score(x, bits, norm, projection),
        "score": lambda x: tt.score(
            x, packed, scale, SIGNS, LEVELS, 4, center, *sketched, projection
        ),
        "merge_attention": lambda x: tt.merge_attention(x, lse, x + 1, lse.flip(0)),
    }


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", _functions())
def test_functions_in_one_graph(name, dynamic):
    function = _functions()[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    x = randn(2, 3, D, seed=9)
    eager, graph = function(x), compiled(x)
    for one, other in zip(
        *((r if isinstance(r, tuple) else (r,)) for r in (graph, eager)), strict=True
    ):
        assert_same_bytes(one, other)
        assert one.stride() == other.stride()


def test_gradient_of_the_transform():
    compiled = torch.compile(
        lambda x: (tt.hadamard(x, SIGNS) ** 2).sum(), fullgraph=True, backend="aot_eager"
    )
    x = randn(3, D, seed=1).requires_grad_()
    compiled(x).backward()
    assert torch.allclose(x.grad, 2 * x, atol=1e-5)  # orthonormal


class Model:
    """One layer's cache state, with everything a decode step needs."""

    def __init__(self, name="k4v4", tail=True, dtype=torch.float32, lengths=(14, 3)):
        self.config = tt.preset(name, D, page_size=16, sink_tokens=2, recent_window=3)
        self.tables = tt.make_tables(self.config, 0, center=randn(2, D, seed=2))
        self.dtype, self.lengths = dtype, list(lengths)
        room = [n + 8 for n in lengths]
        num_pages, self.table, self.slots = paged(room, 16)
        self.table = self.table.clamp(0)
        self.cache = garbage_cache(self.config, num_pages, 2)
        ring = tt.allocate_tail(self.config, 2, 2, dtype, 8)
        self.tail = tt.Tail(ring, torch.tensor([1, 0])) if tail else None
        for i in range(max(lengths)):
            active = [i < n for n in lengths]
            self.store(*self.step_inputs(i, active=active)[1:])

    def step_inputs(self, i, active=(True, True)):
        """q, k, v of one token per sequence, slots and lengths when each sequence has i + 1."""
        q = randn(2, 4, D, seed=3 * i, dtype=self.dtype)
        k = randn(2, 2, D, seed=3 * i + 1, dtype=self.dtype)
        v = randn(2, 2, D, seed=3 * i + 2, dtype=self.dtype)
        slots = torch.stack(
            [s[i] if a else torch.tensor(-1) for s, a in zip(self.slots, active, strict=True)]
        )
        lengths = int32(*((i + 1) * a for a in active))
        return q, k, v, slots, lengths

    def store(self, k, v, slots, lengths):
        tt.cache_store(
            k, v, self.cache, slots, self.config, self.tables, tail=self.tail, seq_lens=lengths
        )

    def step(self, q, k, v, slots, lengths, cache, ring):
        tail = tt.Tail(ring, self.tail.slots) if self.tail is not None else None
        tt.cache_store(k, v, cache, slots, self.config, self.tables, tail=tail, seq_lens=lengths)
        return tt.paged_attention(
            q, cache, self.table, lengths, self.config, self.tables, tail=tail
        )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_steps(tail, dtype, backend):
    """Store and attend, step after step, across a page border: one graph, no recompilation, the
    bytes and results of eager execution."""
    eager, graph = (Model(tail=tail, dtype=dtype, lengths=(12, 12)) for _ in range(2))
    step = torch.compile(graph.step, fullgraph=True, backend=backend)
    with torch.no_grad():
        for i in range(12, 20):
            results = []
            for model, function in ((eager, eager.step), (graph, step)):
                ring = model.tail.ring if tail else None
                with torch.compiler.set_stance("default" if i == 12 else "fail_on_recompile"):
                    results.append(function(*model.step_inputs(i), model.cache, ring))
            for one, other in zip(*results, strict=True):
                assert_same_bytes(other, one)
            assert_same_bytes(graph.cache, eager.cache)
            if tail:
                assert_same_bytes(graph.tail.ring, eager.tail.ring)


def test_several_queries_and_given_outputs():
    """The _out op inside a graph, with cu_seqlens_q, window, soft cap and learned sinks."""
    model = Model(lengths=(12, 12))
    q = randn(6, 4, D, seed=1)
    cu, lengths, sinks = int32(0, 3, 6), int32(12, 12), randn(4, seed=2)
    options = {
        "cu_seqlens_q": cu,
        "max_q_len": 3,
        "tail": model.tail,
        "sliding_window": 7,
        "soft_cap": 20.0,
        "sink_logits": sinks,
    }
    args = (q, model.cache, model.table, lengths, model.config, model.tables)

    def plain(q):
        return tt.paged_attention(q, *args[1:], **options)

    def given(q, out, lse):
        tt.paged_attention(q, *args[1:], **options, out=out, lse=lse)
        return out.sum(), lse.sum()

    expected = plain(q)
    for one, other in zip(torch.compile(plain, fullgraph=True)(q), expected, strict=True):
        assert_same_bytes(one, other)
    out, lse = torch.full_like(q, torch.nan), torch.full((6, 4), torch.nan)
    sums = torch.compile(given, fullgraph=True, backend="aot_eager")(q, out, lse)
    assert_same_bytes(out, expected[0])
    assert_same_bytes(lse, expected[1])
    assert sums[0] == expected[0].sum() and sums[1] == expected[1].sum()


def test_loading_in_a_graph():
    model = Model(lengths=(12, 12))
    lengths = int32(12, 12)

    def load(cache):
        return tt.cache_load(
            cache, model.table, lengths, model.config, model.tables, 13, torch.half
        )

    compiled = torch.compile(load, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(model.cache), load(model.cache), strict=True):
        assert_same_bytes(one, other)


def test_growing_batches_compile_once_more_at_most():
    """With dynamic shapes a new number of tokens is no new graph."""
    compiled = torch.compile(
        lambda x: tt.encode(x, SIGNS, LEVELS, STEPS, 4),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    compiled(randn(3, D, seed=1))
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (4, 7, 100):
            x = randn(rows, D, seed=rows)
            for one, other in zip(compiled(x), tt.encode(x, SIGNS, LEVELS, STEPS, 4), strict=True):
                assert_same_bytes(one, other)


def test_two_layers_in_one_graph():
    """Different codebooks, signs and centers: constants belong to the call, not to the op."""
    models = [Model("k4v4"), Model("k5v3u"), Model("k8v4")]
    q = randn(2, 4, D, seed=1)
    lengths = int32(14, 3)

    def forward(q):
        for model in models:
            q = tt.paged_attention(
                q, model.cache, model.table, lengths, model.config, model.tables, tail=model.tail
            )[0]
        return q

    assert_same_bytes(torch.compile(forward, fullgraph=True)(q), forward(q))


def test_gradients_are_refused_while_compiling():
    model = Model(tail=False)
    compiled = torch.compile(
        lambda q: tt.paged_attention(
            q, model.cache, model.table, int32(14, 3), model.config, model.tables
        )[0],
        fullgraph=True,
        backend="aot_eager",
    )
    with pytest.raises(Exception, match="turboquant::paged_attention takes no gradient"):
        compiled(randn(2, 4, D, seed=1).requires_grad_())


@torch._dynamo.config.patch("capture_dynamic_output_shape_ops", True)
def test_sizes_that_depend_on_data():
    """They are compared when the graph runs, by the compiled op; the other checks stay."""
    model = Model(tail=False)
    k, slots = randn(6, 2, D, seed=1), torch.arange(6)
    numbers = (16, 4, 4, 3, 2)

    def store(k, slots, bits=4):
        k, slots = k[k[:, 0, 0] > 0], slots[slots % 2 == 0]  # as many by chance
        args = (k, k, model.cache, slots, *model.tables, 16, bits, 4, 3, 2)
        torch.ops.turboquant.cache_store(*args)
        return model.cache.sum()

    eager = Model(tail=False)
    k[:, 0, 0] = torch.tensor([1.0, -1, 1, -1, 1, -1])
    compiled = torch.compile(store, fullgraph=True, backend="aot_eager")
    compiled(k, slots)
    args = (k[::2], k[::2], eager.cache, torch.tensor([0, 2, 4]), *eager.tables, *numbers)
    torch.ops.turboquant.cache_store(*args)
    assert_same_bytes(model.cache, eager.cache)
    with pytest.raises(RuntimeError, match=r"slot_mapping has shape \[3\], expected \[6\]"):
        compiled(k.abs(), slots)
    with pytest.raises(Exception, match="key_bits is 6, supported"):
        compiled(k, slots, 6)
