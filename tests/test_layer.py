"""PagedLayer: the bytes and results of the functions, checked once instead of in every call."""

import pytest
import torch

import torch_turboquant as tt
from tests.helpers import assert_same_bytes, garbage_cache, int32, paged, randn, to_device
from torch_turboquant import _checks

D, HEADS, Q_HEADS, PAGE, MAX_Q = 48, 2, 4, 16, 3
CONFIG = tt.preset("k4v4", D, page_size=PAGE, sink_tokens=2, recent_window=3)
TABLES = tt.make_tables(CONFIG, 1, center=randn(HEADS, D, seed=1))
ENTRIES = 5


class World:
    """Sequences of these lengths whose last tokens are new; every tensor of a call of either kind.

    A length of 0 is a row of padding, as are `spare` tokens at the end.
    """

    def __init__(
        self,
        lengths,
        new=None,
        tail=True,
        dtype=torch.float32,
        spare=0,
        device="cpu",
        config=CONFIG,
    ):
        one_each = new is None
        new = [min(1, n) for n in lengths] if one_each else new
        self.tables = to_device(tt.make_tables(config, 1, center=randn(HEADS, D, seed=1)), device)
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        num_pages, table, slots = paged(lengths, PAGE)
        self.cache = garbage_cache(config, num_pages, HEADS).to(device)
        ring = tt.allocate_tail(config, ENTRIES, HEADS, dtype, MAX_Q).fill_(torch.nan)
        self.ring = ring.to(device) if tail else None
        rows = torch.arange(1, len(lengths) + 1).flip(0)
        rows = torch.where(torch.tensor(lengths) > 0, rows, -1)
        self.before = [n - m for n, m in zip(lengths, new, strict=True)]
        self.old = torch.cat([s[:n] for s, n in zip(slots, self.before, strict=True)]).to(device)
        ones = [-1] * (len(lengths) - sum(new)) if one_each else []  # tokens of padding rows
        mine = [s[n:] for s, n in zip(slots, self.before, strict=True)]
        padding = torch.full((spare,), -1)
        if ones:
            mine = [s if len(s) else torch.tensor([-1]) for s in mine]
        cu = None if one_each else torch.tensor([0, *new]).cumsum(0).int()
        valid = int32(2, 0).expand(ENTRIES, 2).contiguous()
        self.batch = tt.AttentionBatch(
            slot_mapping=torch.cat([*mine, padding]).to(device),
            block_table=table.clamp(0).to(device),
            seq_lens=int32(*lengths).to(device),
            cu_seqlens_q=None if cu is None else cu.to(device),
            max_q_len=max(1, *new),
            tail_slots=rows.to(device) if tail else None,
            tail_valid=valid.to(device) if tail else None,
        )
        tokens = len(self.batch.slot_mapping)
        self.q, self.k, self.v = (
            randn(tokens, heads, D, seed=seed, dtype=dtype).to(device)
            for seed, heads in ((2, Q_HEADS), (3, HEADS), (4, HEADS))
        )
        if len(self.old):
            old = [randn(len(self.old), HEADS, D, seed=s, dtype=dtype).to(device) for s in (5, 6)]
            cu = torch.tensor([0, *self.before]).cumsum(0).int().to(device)
            tt.cache_store(
                *old,
                self.cache,
                self.old,
                config,
                self.tables,
                tail=self.tail(),
                seq_lens=int32(*self.before).to(device),
                cu_seqlens_q=cu,
            )

    def tail(self):
        if self.ring is None:
            return None
        return tt.Tail(self.ring, self.batch.tail_slots, self.batch.tail_valid)

    def layer(self):
        return tt.PagedLayer(self.cache, self.config, self.tables, self.ring)

    def store(self):
        batch = self.batch
        tt.cache_store(
            self.k,
            self.v,
            self.cache,
            batch.slot_mapping,
            self.config,
            self.tables,
            tail=self.tail(),
            seq_lens=batch.seq_lens,
            cu_seqlens_q=batch.cu_seqlens_q,
        )

    def attend(self, **options):
        batch = self.batch
        return tt.paged_attention(
            self.q,
            self.cache,
            batch.block_table,
            batch.seq_lens,
            self.config,
            self.tables,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_q_len=batch.max_q_len,
            tail=self.tail(),
            **options,
        )


SHAPES = [
    ([20, 5], None),
    ([1, 40, 17], None),
    ([20, 0, 33], None),  # a row of padding
    ([20, 5, 3], [3, 1, 2]),
    ([0, 18], [0, 3]),
]
OPTIONS = [
    {},
    {"softmax_scale": 0.3, "sliding_window": 7, "soft_cap": 20.0},
    {"sink_logits": randn(Q_HEADS, seed=9)},
]


@pytest.mark.parametrize("lengths, new", SHAPES)
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_functions(lengths, new, tail, dtype, device):
    spare = 2 if new else 0
    expected, actual = (World(lengths, new, tail, dtype, spare, device) for _ in range(2))
    layer = actual.layer()
    expected.store()
    layer.store(actual.k, actual.v, actual.batch)
    assert_same_bytes(actual.cache, expected.cache)
    if tail:
        assert_same_bytes(actual.ring, expected.ring)
    for options in OPTIONS:
        options = {name: to_device(x, device) for name, x in options.items()}
        wanted = expected.attend(**options)
        found = layer.attend(actual.q, actual.batch, tt.AttentionOptions(**options))
        out, lse = torch.empty_like(wanted[0]), torch.empty_like(wanted[1])
        given = layer.attend(
            actual.q, actual.batch, tt.AttentionOptions(**options), out=out, lse=lse
        )
        assert given[0] is out and given[1] is lse
        for parts in (found, given):
            for one, other in zip(parts, wanted, strict=True):
                assert_same_bytes(one, other)
    batch, longest = actual.batch, max(lengths) + 2
    wanted = tt.cache_load(
        expected.cache,
        batch.block_table,
        batch.seq_lens,
        CONFIG,
        expected.tables,
        longest,
        torch.float32,
    )
    for one, other in zip(layer.load(batch, longest, torch.float32), wanted, strict=True):
        assert_same_bytes(one, other)


def test_a_good_call_is_checked_once(monkeypatch):
    """By the op. Python looks at a call that the op has refused, and says what is wrong with it."""
    world = World([20, 5])
    layer = world.layer()
    looked = []
    check = _checks.check_vectors
    monkeypatch.setattr(_checks, "check_vectors", lambda *a: looked.append(a[0]) or check(*a))
    layer.store(world.k, world.v, world.batch)
    layer.attend(world.q, world.batch)
    layer.store_and_attend(world.q, world.k, world.v, world.batch)
    assert not looked
    for name, call in (
        ("k", lambda: layer.store(world.k.double(), world.v.double(), world.batch)),
        ("q", lambda: layer.attend(world.q.double(), world.batch)),
        ("q", lambda: layer.store_and_attend(world.q.double(), world.k, world.v, world.batch)),
    ):
        with pytest.raises(TypeError, match=f"^{name} has dtype float64") as caught:
            call()
        assert looked.pop() == name and not looked
        assert caught.value.__context__ is None
    # what Python finds good, too, is the op's error
    with pytest.raises(RuntimeError, match="takes no gradient"):
        layer.store(world.k.clone().requires_grad_(), world.v, world.batch)
    with pytest.raises(RuntimeError, match="takes no gradient"):
        layer.attend(world.q.clone().requires_grad_(), world.batch)


@pytest.mark.parametrize("lengths, new", SHAPES)
@pytest.mark.parametrize("tail", [True, False])
def test_own_tokens_before_or_after_storing(lengths, new, tail, device):
    """The function's results, with an output of the caller's or none."""
    world = World(lengths, new, tail, device=device)
    own = {"k_new": world.k, "v_new": world.v}
    layer = world.layer()
    before = layer.attend(world.q, world.batch, **own)
    out = torch.full_like(world.q, torch.nan)
    given = layer.attend(world.q, world.batch, **own, out=out)
    assert given[0] is out
    layer.store(world.k, world.v, world.batch)
    for found in (given, layer.attend(world.q, world.batch, **own), world.attend(**own)):
        for one, other in zip(found, before, strict=True):
            assert_same_bytes(one, other)


@pytest.mark.parametrize("lengths, new", SHAPES)
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_in_one_call(lengths, new, tail, dtype, device):
    """The bytes of `store`, and the results of `attend` with the same tokens."""
    spare = 2 if new else 0
    for options in OPTIONS:
        options = tt.AttentionOptions(**{name: to_device(x, device) for name, x in options.items()})
        one, both, given = (World(lengths, new, tail, dtype, spare, device) for _ in range(3))
        layer = one.layer()
        layer.store(one.k, one.v, one.batch)
        wanted = layer.attend(one.q, one.batch, options, k_new=one.k, v_new=one.v)
        found = both.layer().store_and_attend(both.q, both.k, both.v, both.batch, options)
        out, lse = torch.full_like(wanted[0], torch.nan), torch.full_like(wanted[1], torch.nan)
        tokens = given.q, given.k, given.v, given.batch
        filled = given.layer().store_and_attend(*tokens, options, out=out, lse=lse)
        assert filled[0] is out and filled[1] is lse
        for world, parts in ((both, found), (given, filled)):
            assert_same_bytes(world.cache, one.cache)
            if tail:
                assert_same_bytes(world.ring, one.ring)
            for part, other in zip(parts, wanted, strict=True):
                assert_same_bytes(part, other)


def test_padding_gives_zeros(device):
    world = World([20, 0, 33], device=device)
    before = world.cache.clone()
    layer = world.layer()
    layer.store(world.k, world.v, world.batch)
    out, lse = layer.attend(world.q, world.batch)
    assert not out[1].any() and (lse[1] == -torch.inf).all()
    assert out[[0, 2]].all() and lse[[0, 2]].isfinite().all()
    slots = world.batch.slot_mapping
    changed = (world.cache != before).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert sorted(changed) == sorted({int(s) // PAGE for s in slots if s >= 0})


def test_an_empty_batch(device):
    """No sequences at all, and sequences without a token."""
    world = World([20, 5], device=device)
    layer, before = world.layer(), world.cache.clone()
    none = tt.AttentionBatch(
        slot_mapping=world.batch.slot_mapping[:0],
        block_table=world.batch.block_table[:0],
        seq_lens=world.batch.seq_lens[:0],
        tail_slots=world.batch.tail_slots[:0],
    )
    layer.store(world.k[:0], world.v[:0], none)
    out, lse = layer.attend(world.q[:0], none)
    assert out.shape == (0, Q_HEADS, D) and lse.shape == (0, Q_HEADS)
    k, v = layer.load(none, 4, torch.half)
    assert k.shape == v.shape == (0, 4, HEADS, D)
    assert_same_bytes(world.cache, before)


def test_pages_of_somebody_else(device):
    """A serving engine's memory: all layers in one tensor, each of them a view."""
    world = World([20, 5], device=device)
    pages = len(world.cache)
    memory = torch.zeros(3, pages, HEADS, PAGE, CONFIG.bytes_per_token, dtype=torch.uint8)
    memory = memory.to(device)
    memory[1] = world.cache.view(memory[1].shape)
    view = memory[1].view(pages, HEADS, -1)
    layer = tt.PagedLayer(view, CONFIG, world.tables, world.ring)
    ring = world.ring.clone()
    layer.store(world.k, world.v, world.batch)
    found = layer.attend(world.q, world.batch)
    world.ring.copy_(ring)
    world.store()
    assert_same_bytes(memory[1].view_as(world.cache), world.cache)
    assert not memory[0].any() and not memory[2].any()
    for one, other in zip(found, world.attend(), strict=True):
        assert_same_bytes(one, other)
    assert layer.pages.data_ptr() == memory[1].data_ptr()


def test_batches_for_one_purpose():
    """Storing needs no block table, attending no slots, and codes alone no lengths."""
    world = World([20, 5], tail=False)
    layer, batch, before = world.layer(), world.batch, world.cache.clone()
    layer.store(world.k, world.v, tt.AttentionBatch(slot_mapping=batch.slot_mapping))
    stored = world.cache.clone()
    world.cache.copy_(before)
    layer.store(world.k, world.v, batch)
    assert_same_bytes(world.cache, stored)
    only = tt.AttentionBatch(block_table=batch.block_table, seq_lens=batch.seq_lens)
    for one, other in zip(layer.attend(world.q, only), layer.attend(world.q, batch), strict=True):
        assert_same_bytes(one, other)


def test_what_a_layer_knows():
    layer = World([20, 5]).layer()
    assert layer.kv_heads == HEADS and layer.device.type == "cpu" and layer.max_q_len == MAX_Q
    assert "tail [5, 2, 7, 2, 48]" in repr(layer)
    assert World([20, 5], tail=False).layer().max_q_len is None
    only_sinks = tt.preset("k4v4", D, page_size=PAGE, sink_tokens=2, recent_window=0)
    for max_q_len in (2, 3, 9):
        ring = tt.allocate_tail(only_sinks, 1, HEADS, torch.half, max_q_len)
        layer = tt.PagedLayer(tt.allocate_cache(only_sinks, 1, HEADS), only_sinks, TABLES, ring)
        assert layer.max_q_len == max_q_len


# ---- graphs


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_steps(tail, backend):
    """One graph for a growing context: the batch's tensors keep their places and change."""
    torch._dynamo.reset()
    eager, graph = World([12, 12], tail=tail), World([12, 12], tail=tail)
    pages, table, slots = paged([24, 24], PAGE)
    for world in (eager, graph):
        world.cache = garbage_cache(CONFIG, pages, HEADS)
        world.batch.block_table = table.clamp(0)
    options = tt.AttentionOptions(sliding_window=9)

    def stepping(world):
        layer, batch = world.layer(), world.batch

        def step(q, k, v):
            layer.store(k, v, batch)
            return layer.attend(q, batch, options)

        return step

    plain = stepping(eager)
    compiled = torch.compile(stepping(graph), fullgraph=True, backend=backend)
    with torch.no_grad():
        for i in range(24):
            for world in (eager, graph):
                world.batch.seq_lens.fill_(i + 1)
                world.batch.slot_mapping.copy_(torch.stack([s[i] for s in slots]))
            q, k, v = (randn(2, h, D, seed=3 * i + s) for s, h in enumerate((4, 2, 2)))
            expected = plain(q, k, v)
            with torch.compiler.set_stance("default" if i == 0 else "fail_on_recompile"):
                found = compiled(q, k, v)
            for one, other in zip(found, expected, strict=True):
                assert_same_bytes(one, other)
    assert_same_bytes(graph.cache, eager.cache)
    if tail:
        assert_same_bytes(graph.ring, eager.ring)


@pytest.mark.parametrize("tail", [True, False])
def test_a_batch_made_in_a_graph(tail):
    """An engine's tensors become a batch, options and a layer inside the compiled function."""
    torch._dynamo.reset()
    world = World([20, 5, 3], [3, 1, 2], tail=tail)
    ours = world.batch

    def step(q, k, v, cache, ring, slots, table, lengths, cu, rows):
        layer = tt.PagedLayer(cache, CONFIG, world.tables, ring)
        batch = tt.AttentionBatch(
            slot_mapping=slots,
            block_table=table,
            seq_lens=lengths,
            cu_seqlens_q=cu,
            max_q_len=3,
            tail_slots=rows,
        )
        layer.store(k, v, batch)
        return layer.attend(q, batch, tt.AttentionOptions(soft_cap=10.0))

    rest = ours.slot_mapping, ours.block_table, ours.seq_lens, ours.cu_seqlens_q, ours.tail_slots
    cache, ring = world.cache.clone(), None if world.ring is None else world.ring.clone()
    expected = step(world.q, world.k, world.v, cache, ring, *rest)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = compiled(world.q, world.k, world.v, world.cache, world.ring, *rest)
    for one, other in zip(found, expected, strict=True):
        assert_same_bytes(one, other)
    assert_same_bytes(world.cache, cache)


@pytest.mark.cuda
@pytest.mark.parametrize("tail", [True, False])
def test_a_cuda_graph_replays_other_lengths(tail):
    """Captured with padding only; later lengths, slots and pages are read on the device."""
    dtype = torch.bfloat16
    world = World([20, 5], tail=tail, dtype=dtype, device="cuda")
    layer, batch, static = world.layer(), world.batch, [t.clone() for t in (world.q, world.k)]
    values, wanted = (
        world.v.clone(),
        {
            n: getattr(batch, n).clone()
            for n in vars(batch)
            if isinstance(getattr(batch, n), torch.Tensor)
        },
    )
    out = torch.empty_like(world.q)
    lse = torch.empty(world.q.shape[:2], device="cuda")

    def step():
        layer.store(static[1], values, batch)
        layer.attend(static[0], batch, out=out, lse=lse)

    batch.slot_mapping.fill_(-1)
    batch.seq_lens.zero_()
    if tail:
        batch.tail_slots.fill_(-1)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for name, tensor in wanted.items():
        getattr(batch, name).copy_(tensor)
    cache, ring = world.cache.clone(), None if world.ring is None else world.ring.clone()
    graph.replay()
    found = out.clone(), lse.clone(), world.cache.clone()
    world.cache.copy_(cache)
    if ring is not None:
        world.ring.copy_(ring)
    step()
    for one, other in zip(found, (out, lse, world.cache), strict=True):
        assert_same_bytes(one, other)


# ---- what does not fit


def make(world, **changes):
    parts = {"pages": world.cache, "config": CONFIG, "tables": world.tables, "ring": world.ring}
    return tt.PagedLayer(**{**parts, **changes})


LAYER_BAD = [
    (lambda w: {"pages": w.cache.int()}, TypeError, "cache has dtype int32, supported: uint8"),
    (lambda w: {"pages": None}, TypeError, "cache must be a tensor"),
    (lambda w: {"pages": w.cache[0]}, ValueError, "cache has shape"),
    (lambda w: {"pages": w.cache[..., :99].contiguous()}, ValueError, "cache has shape"),
    (lambda w: {"pages": w.cache[..., ::2]}, ValueError, "cache has shape"),
    (lambda w: {"pages": w.cache[:1].expand(3, -1, -1)}, ValueError, "cache has stride 0 in its"),
    (lambda w: {"tables": w.tables._replace(key_signs=w.tables.key_signs[:8])}, ValueError, "key_"),
    (lambda w: {"tables": w.tables._replace(center=randn(3, D, seed=1))}, ValueError, "center has"),
    (lambda w: {"tables": w.tables._replace(key_levels=None)}, ValueError, "do not fit"),
    (lambda w: {"tables": w.tables._replace(value_steps=randn(0, seed=1))}, ValueError, "0 cand"),
    (lambda w: {"ring": w.ring.double()}, TypeError, "tail has dtype float64"),
    (lambda w: {"ring": w.ring[:, :1].contiguous()}, ValueError, "tail has shape"),
    (lambda w: {"ring": w.ring[:, :, :4].contiguous()}, ValueError, "expected at least 5"),
    (lambda w: {"ring": w.ring.to("meta")}, ValueError, "must be on one device"),
    (lambda w: {"pages": w.cache.to("meta")}, ValueError, "must be on one device"),
]


@pytest.mark.parametrize("change, error, text", LAYER_BAD)
def test_layers_that_are_refused(change, error, text):
    world = World([20, 5])
    make(world)
    with pytest.raises(error, match=text):
        make(world, **change(world))


BATCH_BAD = [
    ({"slot_mapping": int32(1, 2).half()}, TypeError, "slot_mapping has dtype float16, supported"),
    ({"slot_mapping": torch.zeros(2, 2).long()}, ValueError, r"slot_mapping has shape \[2, 2\]"),
    ({"block_table": torch.zeros(2, 3).long()}, TypeError, "block_table has dtype int64"),
    ({"block_table": int32(1, 2)}, ValueError, r"block_table has shape \[2\], expected \[2, any\]"),
    ({"block_table": int32(1, 2)[None]}, ValueError, "block_table has shape"),
    ({"seq_lens": torch.tensor([20, 5])}, TypeError, "seq_lens has dtype int64"),
    ({"seq_lens": [20, 5]}, TypeError, "seq_lens must be a tensor, got list"),
    ({"seq_lens": None}, ValueError, "tail needs seq_lens"),
    ({"seq_lens": int32(20, 5).to("meta")}, ValueError, "must be on one device"),
    ({"cu_seqlens_q": int32(0, 2)}, ValueError, r"cu_seqlens_q has shape \[2\], expected \[3\]"),
    ({"max_q_len": 0}, ValueError, "max_q_len is 0, supported: 1 and more"),
    ({"tail_slots": int32(1, 2).half()}, TypeError, "tail_slots has dtype float16, supported"),
    ({"tail_slots": torch.tensor([1])}, ValueError, r"tail_slots has shape \[1\]"),
    ({"tail_valid": int32(1, 2)}, ValueError, "tail_valid has shape"),
    ({"tail_valid": int32(1, 2)[None].long()}, TypeError, "tail_valid has dtype int64"),
]


def changed(batch, **changes):
    return tt.AttentionBatch(**{**vars(batch), **changes})


@pytest.mark.parametrize("change, error, text", BATCH_BAD)
def test_batches_that_are_refused(change, error, text):
    batch = World([20, 5]).batch
    changed(batch)
    with pytest.raises(error, match=text):
        changed(batch, **change)


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale is nan"),
        ({"sliding_window": -1}, ValueError, "sliding_window is -1"),
        ({"sliding_window": 1.5}, ValueError, "sliding_window is 1.5, which is no whole number"),
        ({"soft_cap": -1.0}, ValueError, "soft_cap is -1.0"),
        ({"soft_cap": float("inf")}, ValueError, "soft_cap is inf"),
        ({"sink_logits": torch.zeros(4).half()}, TypeError, "sink_logits has dtype float16"),
        ({"sink_logits": 1.0}, TypeError, "sink_logits must be a tensor, got float"),
    ],
)
def test_options_that_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        tt.AttentionOptions(**options)


STORE_BAD = [
    (lambda w: {"k": w.k.double()}, TypeError, "k has dtype float64"),
    (lambda w: {"k": w.k[0]}, ValueError, "k has shape"),
    (
        lambda w: {"k": w.k.half(), "v": w.v.half()},
        TypeError,
        "k has dtype float16, supported: float32$",
    ),
    (lambda w: {"v": w.v.half()}, TypeError, "v has dtype float16"),
    (lambda w: {"v": w.v[:1]}, ValueError, "v has shape"),
    (lambda w: {"v": w.v.repeat(1, 1, 2)[..., ::2]}, ValueError, "v must have stride 1"),
    (lambda w: {"k": w.k[..., :32], "v": w.v[..., :32]}, ValueError, "k has head_dim 32"),
    (
        lambda w: {"k": w.k[:, :1], "v": w.v[:, :1]},
        ValueError,
        r"k has shape \[\d+, 1, 48\], expected \[\d+, 2, 48\]",
    ),
    (
        lambda w: {"k": w.k.repeat(1, 2, 1), "v": w.v.repeat(1, 2, 1)},
        ValueError,
        r"k has shape \[\d+, 4, 48\], expected \[\d+, 2, 48\]",
    ),
    (lambda w: {"k": w.k[:1], "v": w.v[:1]}, ValueError, "slot_mapping has shape"),
    (lambda w: {"k": w.k.to("meta"), "v": w.v.to("meta")}, ValueError, "must be on one device"),
    (lambda w: {"batch": changed(w.batch, slot_mapping=None)}, TypeError, "slot_mapping must be"),
    (
        lambda w: {"batch": changed(w.batch, tail_slots=None)},
        ValueError,
        "the layer has a tail, but the batch has no tail_slots",
    ),
    (
        lambda w: {"batch": tt.AttentionBatch(slot_mapping=w.batch.slot_mapping)},
        ValueError,
        "tail needs seq_lens",
    ),
    (
        lambda w: {"batch": changed(w.batch, tail_valid=w.batch.tail_valid[:2])},
        ValueError,
        r"tail_valid has shape \[2, 2\], expected \[5, 2\]",
    ),
    (
        lambda w: {"batch": changed(w.batch, slot_mapping=torch.tensor([0, 10**6]))},
        RuntimeError,
        "slot_mapping holds 1000000",
    ),
    (
        lambda w: {"batch": changed(w.batch, tail_slots=torch.tensor([0, 5]))},
        RuntimeError,
        "tail_slots holds 5",
    ),
]


@pytest.mark.parametrize("change, error, text", STORE_BAD)
def test_tokens_that_are_refused(change, error, text):
    world = World([20, 5])
    call = {"k": world.k, "v": world.v, "batch": world.batch}
    layer, before = world.layer(), (world.cache.clone(), world.ring.clone())
    with pytest.raises(error, match=text):
        layer.store(**{**call, **change(world)})
    assert_same_bytes(world.cache, before[0])
    assert_same_bytes(world.ring, before[1])
    layer.store(**call)


# Of both in one call, which gives k and v other names; the last two sentences are the op's.
STEP_BAD = [
    (lambda w: {"q": w.q.double()}, TypeError, "q has dtype float64"),
    (lambda w: {"q": w.q[..., :32]}, ValueError, "q has head_dim 32"),
    (lambda w: {"q": w.q[:, :3]}, ValueError, "q has 3 heads"),
    (lambda w: {"k_new": w.k.half(), "v_new": w.v.half()}, TypeError, "k_new has dtype float16"),
    (lambda w: {"v_new": w.v[:1]}, ValueError, "v_new has shape"),
    (lambda w: {"k_new": w.k[:, :1]}, ValueError, "k_new has shape"),
    (lambda w: {"v_new": w.v.repeat(1, 1, 2)[..., ::2]}, ValueError, "v_new must have stride 1"),
    (lambda w: {"v_new": w.v.to("meta")}, ValueError, "must be on one device"),
    (lambda w: {"v_new": None}, ValueError, "k_new and v_new"),
    (lambda w: {"batch": changed(w.batch, slot_mapping=None)}, TypeError, "slot_mapping must be"),
    (lambda w: {"batch": changed(w.batch, tail_slots=None)}, ValueError, "has no tail_slots"),
    (lambda w: {"batch": changed(w.batch, block_table=None)}, TypeError, "block_table must be"),
    (lambda w: {"lse": torch.empty(2, Q_HEADS)}, ValueError, "lse"),
    (lambda w: {"out": torch.empty(2, Q_HEADS, 9)}, ValueError, "out has shape"),
    (
        lambda w: {"batch": changed(w.batch, slot_mapping=torch.tensor([0, 10**6]))},
        RuntimeError,
        "slot_mapping holds 1000000",
    ),
    (lambda w: {"k_new": None, "v_new": None}, RuntimeError, "needs k_new and v_new"),
]


@pytest.mark.parametrize("change, error, text", STEP_BAD)
def test_steps_that_are_refused(change, error, text):
    world = World([20, 5])
    call = {"q": world.q, "k_new": world.k, "v_new": world.v, "batch": world.batch}
    layer, before = world.layer(), (world.cache.clone(), world.ring.clone())
    with pytest.raises(error, match=text):
        layer.store_and_attend(**{**call, **change(world)})
    assert_same_bytes(world.cache, before[0])
    assert_same_bytes(world.ring, before[1])
    layer.store_and_attend(**call)


ATTEND_BAD = [
    (lambda w: {"q": None}, TypeError, "q must be a tensor"),
    (lambda w: {"q": w.q.double()}, TypeError, "q has dtype float64"),
    (lambda w: {"q": w.q[0]}, ValueError, "q has shape"),
    (lambda w: {"q": w.q[..., :32]}, ValueError, "q has head_dim 32, but the config has 48"),
    (lambda w: {"q": w.q[:, :3]}, ValueError, "q has 3 heads, expected a multiple"),
    (lambda w: {"q": w.q.half()}, TypeError, "q has dtype float16, supported: float32$"),
    (lambda w: {"q": w.q.to("meta")}, ValueError, "must be on one device"),
    (lambda w: {"q": w.q[:1]}, ValueError, "without cu_seqlens_q every sequence has one new token"),
    (lambda w: {"batch": changed(w.batch, block_table=None)}, TypeError, "block_table must be a"),
    (
        lambda w: {"batch": tt.AttentionBatch(slot_mapping=w.batch.slot_mapping)},
        TypeError,
        "seq_lens must be a tensor",
    ),
    (lambda w: {"batch": changed(w.batch, tail_slots=None)}, ValueError, "no tail_slots"),
    (
        lambda w: {"batch": changed(w.batch, max_q_len=4)},
        ValueError,
        "tail has 7 rows, expected at least 8",
    ),
    (
        lambda w: {"options": tt.AttentionOptions(sink_logits=torch.zeros(3))},
        ValueError,
        r"sink_logits has shape \[3\], expected \[4\]",
    ),
    (lambda w: {"lse": torch.empty(2, 4)}, ValueError, "lse is given without out"),
    (lambda w: {"k_new": w.k}, ValueError, "k_new and v_new come together or not at all"),
    (lambda w: {"k_new": w.k, "v_new": w.v[:1]}, ValueError, "v_new has shape"),
    (lambda w: {"k_new": w.k.half(), "v_new": w.v}, TypeError, "k_new has dtype float16"),
    (
        lambda w: {"out": torch.empty_like(w.q).half(), "lse": torch.empty(2, 4)},
        TypeError,
        "out has dtype float16",
    ),
    (
        lambda w: {"out": torch.empty_like(w.q), "lse": torch.empty(2, 3)},
        ValueError,
        "lse has shape",
    ),
]


@pytest.mark.parametrize("change, error, text", ATTEND_BAD)
def test_queries_that_are_refused(change, error, text):
    world = World([20, 5])
    layer, call = world.layer(), {"q": world.q, "batch": world.batch}
    with pytest.raises(error, match=text):
        layer.attend(**{**call, **change(world)})
    layer.attend(**call)


@pytest.mark.parametrize(
    "change, length, dtype, error, text",
    [
        ({"block_table": None}, 30, torch.half, TypeError, "block_table must be a tensor"),
        ({}, -1, torch.half, ValueError, "max_seq_len is -1"),
        ({}, 30, torch.int8, TypeError, "dtype is torch.int8"),
        ({}, 10, torch.half, RuntimeError, "sequence 0 has 20 tokens"),
    ],
)
def test_loads_that_are_refused(change, length, dtype, error, text):
    world = World([20, 5])
    with pytest.raises(error, match=text):
        world.layer().load(changed(world.batch, **change), length, dtype)
