"""Calls of raw ops that no wrapper makes: numbers out of all bounds, None, memory that is shared.

An error says what is wrong, and nothing has been written by then. Good calls and the common
mistakes are in bad_arguments/, test_bad_arguments.py makes them.
"""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_map_only

import torch_turboquant as tt
from tests.bad_arguments.calls import GOOD, raw
from tests.helpers import assert_same_bytes, entries_apart, garbage_cache, randn
from torch_turboquant import _autograd
from torch_turboquant.signs import SignKind, random_signs

ops = torch.ops.turboquant
D = 64
CONFIG = tt.preset("k4v4", D, page_size=16, sink_tokens=2, recent_window=3)
MOST = 2**63 - 1
MOST_CODES = 2**60 - 1


def good(name, device, **changes):
    """The raw op's good call with changes, its tensors on the device; returns a copy of all."""
    return tree_map_only(torch.Tensor, lambda t: t.to(device, copy=True), {**GOOD[name], **changes})


def refused(text, call):
    with pytest.raises(RuntimeError, match=re.escape(text)):
        call()


def octets(*shape, device="cpu"):
    return torch.zeros(*shape, dtype=torch.uint8, device=device)


def halves(*shape, device="cpu"):
    return torch.zeros(*shape, dtype=torch.half, device=device)


class Layer:
    """A cache of raw tensors, with everything that a call of cache_store or attention needs."""

    def __init__(self, device, new=3):
        self.tables = tt.make_tables(CONFIG, 0, device)
        self.cache = garbage_cache(CONFIG, 2, 2).to(device)
        self.ring = torch.zeros(1, 2, 7, 2, D, device=device)
        self.slots = torch.zeros(1, dtype=torch.int64, device=device)
        self.k, self.v = (randn(new, 2, D, seed=i).to(device) for i in (1, 2))
        self.slot_mapping = torch.arange(new, device=device)
        self.seq_lens = self.int32(new)
        self.cu_seqlens_q = self.int32(0, new)
        self.block_table = self.int32(0, 1)[None]

    def int32(self, *numbers):
        return torch.tensor(numbers, dtype=torch.int32, device=self.cache.device)

    def store(self, **changes):
        a = SimpleNamespace(**{**vars(self), "tail": self.ring, **changes})
        numbers = (16, 4, 4, 3, 2)
        of_tail = (a.tail, a.slots, a.seq_lens, a.cu_seqlens_q, 2)
        ops.cache_store(a.k, a.v, a.cache, a.slot_mapping, *a.tables, *numbers, *of_tail)

    def store_layers(self, k, v, caches, rings, **changes):
        a = SimpleNamespace(**{**vars(self), **changes})
        signs = [[s] * len(k) for s in a.tables[:2]]
        k, v = ([x.transpose(0, 1)[None] for x in part] for part in (k, v))
        numbers = (16, 4, 4, 3, 2)
        of_tail = (rings, a.slots, a.seq_lens, a.cu_seqlens_q, 2)
        books = a.tables[2:6]
        ops.cache_store_layers(k, v, caches, a.slot_mapping, *signs, *books, [], *numbers, *of_tail)

    def attend(self, q, out=None, lse=None, **changes):
        a = SimpleNamespace(**{**vars(self), "tail": self.ring, "max_q_len": 3, **changes})
        window = getattr(a, "recent_window", 3)
        arguments = (q, a.cache, a.block_table, a.seq_lens, *a.tables[:4], None, 16, 4, 4, 0.125)
        of_tail = (a.tail, a.slots, None, 2, window)
        others = (a.cu_seqlens_q, a.max_q_len, *of_tail, getattr(a, "sliding_window", 0))
        new = {name: getattr(a, name, None) for name in ("k_new", "v_new")}
        if out is None:
            return ops.paged_attention(*arguments, *others, **new)
        return ops.paged_attention_out(*arguments, *others, **new, out=out, lse=lse)

    def mass(self, q, lse, mass, **changes):
        a = SimpleNamespace(**{**vars(self), "tail": self.ring, "max_q_len": 3, **changes})
        window = getattr(a, "recent_window", 3)
        arguments = (q, a.cache, a.block_table, a.seq_lens, *a.tables[:4], None, 16, 4, 4, 0.125)
        of_tail = (a.tail, a.slots, None, 2, window)
        options = (a.cu_seqlens_q, a.max_q_len, *of_tail, getattr(a, "sliding_window", 0))
        ops.paged_mass(*arguments, *options, lse=lse, mass=mass)

    def move(self, sources, targets, cache=None):
        ops.cache_move(self.cache if cache is None else cache, sources, targets, D, 16, 4, 4)


# ---- integers


def test_no_sum_of_integers_overflows(device):
    """recent_window + max_q_len - 1, bits of a row, tokens without those that are skipped."""
    layer = Layer(device)
    layer.store()
    q = randn(3, 2, D, seed=3).to(device)
    for numbers in (
        {"recent_window": MOST, "max_q_len": 3},
        {"recent_window": MOST, "max_q_len": MOST},
        {"recent_window": 3, "max_q_len": MOST},
        {"recent_window": 3, "max_q_len": 4},
    ):
        needed = numbers["recent_window"] + numbers["max_q_len"] - 1
        refused(f"max_q_len - 1 = {needed}", lambda n=numbers: layer.attend(q, **n))
    own = {"k_new": layer.k, "v_new": layer.v}
    refused(f"recent_window - 1 = {MOST - 1}", lambda: layer.attend(q, recent_window=MOST, **own))
    for window in (0, 6):  # a ring of 5 rows
        layer.attend(q, recent_window=window, max_q_len=MOST, **own)
    refused("recent_window - 1 = 6", lambda: layer.attend(q, recent_window=7, **own))
    for window in (MOST, MOST - 2, 2**31):  # of padding, too: its positions are negative
        assert_same_bytes(layer.attend(q, sliding_window=window)[0], layer.attend(q)[0])
        layer.attend(q, sliding_window=window, seq_lens=layer.int32(0))

    too_many = f"d is {2**62}, supported: 1 to {MOST_CODES}"
    groups = halves(0, 2**57, device=device)
    refused(too_many, lambda: ops.unpack(octets(0, 0, device=device), 4, 2**62))
    refused(too_many, lambda: ops.unpack(octets(3, 0, device=device), 4, 2**62))
    refused(f"d is {MOST}", lambda: ops.unpack(octets(3, 4, device=device), 1, MOST))
    refused(too_many, lambda: ops.pack(octets(0, 2**62, device=device), 4))
    refused(too_many, lambda: ops.group_encode(torch.zeros(0, 2**62, device=device), 32, 4))
    refused(
        too_many,
        lambda: ops.group_decode(
            octets(0, 0, device=device), groups, groups, 32, 4, 2**62, torch.half
        ),
    )
    x = torch.zeros(1, 1, 3, 4, device=device)
    for skip in (-(2**63), -1, 3, MOST):
        refused(f"skip is {skip}", lambda s=skip: ops.query_energy([x], 1, s))

    # pages without heads can be many
    pages = octets(2**62, 0, CONFIG.record_bytes, device=device)
    none = torch.zeros(3, 0, D, device=device)
    layer.store(k=none, v=none, cache=pages, tail=None)


def test_rows_that_can_just_be_counted(device):
    assert ops.unpack(octets(0, 2**57 - 1, device=device), 1, 2**60 - 8).shape == (0, 2**60 - 8)
    assert ops.pack(octets(0, MOST_CODES, device=device), 8).shape == (0, MOST_CODES)


# ---- memory


def test_no_memory(device):
    """torch's words, which it gives from 2.13 on, and what was too large."""
    asked = TorchVersion(torch.__version__) >= "2.13"
    a = good("cache_load", device, max_seq_len=2**36)
    size = 2 * 2**36 * 2 * D * 4
    with pytest.raises(RuntimeError, match=f"keys or values of max_seq_len = {2**36}") as caught:
        raw("cache_load", a)
    if not asked:
        assert "torch could not allocate it" in str(caught.value)
    elif device.type == "cpu":
        assert f"you tried to allocate {size} bytes" in str(caught.value)
    else:
        assert "CUDA out of memory. Tried to allocate" in str(caught.value)
        assert isinstance(caught.value, torch.OutOfMemoryError)
    refused(
        f"keys or values of max_seq_len = {2**62} of shape [2, {2**62}, 2, 64] and dtype float32: ",
        lambda: raw("cache_load", {**a, "max_seq_len": 2**62}),
    )
    x = halves(0, 2**40, device=device)
    if device.type == "cpu":  # CUDA has a limit of its own for the number of queries
        words = "Stride" if asked else "torch could not allocate it"
        refused(
            f"no memory for a tensor of shape [0, {2**40}, {2**40}] and dtype float32: {words}",
            lambda: ops.score(
                x[..., None].expand(0, 2**40, D).float(),
                octets(0, 2**40, D // 2),
                x,
                tt.random_signs(D, 0),
                None,
                4,
            ),
        )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("no memory for a tensor: CUDA out of memory. Tried to allocate", torch.OutOfMemoryError),
        ("x has shape [3]", RuntimeError),
    ],
)
def test_the_type_of_an_error_of_a_gpu_without_memory(text, error):
    def redispatch(*arguments):
        raise RuntimeError(text)

    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    with pytest.raises(RuntimeError, match=re.escape(text)) as caught:
        _autograd.call_below(SimpleNamespace(redispatch=redispatch), keys)
    assert caught.type is error


def test_the_functions_name_the_error_of_a_gpu_without_memory(monkeypatch):
    """The raw ops of a step have no Python around them that could."""

    def without_memory(*arguments, **outputs):
        raise RuntimeError("no memory for a tensor: CUDA out of memory. Tried to allocate")

    for name in _autograd.OPS_OF_A_STEP:
        monkeypatch.setattr(ops, name, SimpleNamespace(default=without_memory))
    monkeypatch.setattr("torch_turboquant.ops.linear._linear_packed", without_memory)
    layers = {key: [GOOD["cache_store"][key]] for key in ("cache", "tables")}
    of_store = {key: GOOD["cache_store"][key] for key in ("slot_mapping", "config")}
    k = GOOD["cache_store"]["k"].transpose(0, 1)[None]
    for call in (
        lambda: tt.cache_store(**GOOD["cache_store"]),
        lambda: tt.cache_store_layers(
            [k], [k], layers["cache"], tables=layers["tables"], **of_store
        ),
        lambda: tt.paged_attention(**GOOD["paged_attention"]),
        lambda: tt.paged_attention(**GOOD["paged_attention_out"]),
        lambda: tt.linear_packed(**GOOD["linear_packed"]),
    ):
        with pytest.raises(torch.OutOfMemoryError, match="no memory for a tensor: CUDA out of mem"):
            call()


@pytest.mark.parametrize("grad", [False, True])
def test_an_op_of_a_step_runs_no_python(grad, device):
    """But for one question: whether forward mode is on, or (in grad mode) of all tensors."""
    layer = Layer(device)
    q, out, lse = (torch.zeros(3, 2, *d, device=device) for d in ((D,), (D,), ()))
    linear = good("linear_packed", device)
    for call in (
        layer.store,
        lambda: layer.store_layers([layer.k], [layer.v], [layer.cache], [layer.ring]),
        lambda: layer.attend(q),
        lambda: layer.attend(q, out, lse),
        lambda: ops.linear_packed(**linear),
    ):
        ran = []
        with torch.set_grad_enabled(grad):
            sys.setprofile(lambda frame, event, _, ran=ran: ran.append((event, frame.f_code)))
            try:
                call()
            finally:
                sys.setprofile(None)
        ours = [code for event, code in ran if event == "call" and "_autograd" in code.co_filename]
        asked = ["_derivative_of", "in_forward_mode"] if grad else ["<lambda>"]
        assert [code.co_name for code in ours] == asked


# ---- messages


def test_none_for_a_tensor(device):
    x, signs = randn(3, D, seed=1).to(device), tt.random_signs(D, 0).to(device)
    must = "must be a tensor, got None"
    refused(f"x {must}", lambda: ops.hadamard(None, signs))
    refused(f"signs {must}", lambda: ops.hadamard(x, None))
    refused(f"projection {must}", lambda: ops.qjl_sketch(x, None))
    packed, scale = octets(3, 32, device=device), halves(3, device=device)
    refused(f"signs {must}", lambda: ops.decode(packed, scale, None, None, 4, torch.half))
    refused(f"packed {must}", lambda: ops.score(x, None, scale, signs, None, 4))
    required = {"cache_store": "k v cache slot_mapping", "cache_load": "cache block_table seq_lens"}
    required["paged_attention"] = "q cache block_table seq_lens"
    required["merge_attention"] = "out_a lse_a out_b lse_b"
    required["qjl_score"] = "q sign_bits projection"
    for op, names in required.items():
        for name in names.split():
            refused(f"{name} {must}", lambda o=op, n=name: raw(o, good(o, device, **{n: None})))


def test_dtypes_by_name(device):
    signs = tt.random_signs(D, 0).to(device)
    packed, scale = octets(3, 32, device=device), halves(3, device=device)
    for dtype in (torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16, torch.bool):
        name = str(dtype).removeprefix("torch.")
        x = torch.zeros(3, D, dtype=dtype, device=device)
        refused(f"x has dtype {name}, supported: float32", lambda x=x: ops.hadamard(x, signs))
        refused(f"codes has dtype {name}, supported: uint8", lambda x=x: ops.pack(x, 4))
        refused(
            f"dtype is {name}, supported: float32, float16",
            lambda d=dtype: ops.decode(packed, scale, signs, None, 4, d),
        )


def test_a_number_for_a_vector(device):
    x, signs = torch.tensor(1.0, device=device), tt.random_signs(D, 0).to(device)
    one = "x has shape [], expected one dimension or more"
    refused(one, lambda: ops.hadamard(x, signs))
    refused(one, lambda: ops.encode(x, signs, None, torch.ones(1, device=device), 4, 2))
    refused(one, lambda: ops.group_encode(x, 32, 4))
    refused(f"residual{one[1:]}", lambda: ops.qjl_sketch(x, signs))


def test_layers_without_tokens(device):
    text = "supported: [batch, heads, tokens, d] of one sequence and token or more"
    for shape in ((1, 2, 0, 8), (0, 2, 3, 8), (1, 0, 3, 8), (1, 2, 3, 0)):
        x = torch.zeros(shape, device=device)
        for call in (
            lambda x=x: ops.query_energy([x], 1),
            lambda x=x: ops.learn_center([x], []),
        ):
            refused(f"has shape {list(shape)}, {text}", call)
        with pytest.raises(ValueError, match=re.escape(text)):
            tt.query_energy([x], 1)


def test_ranges_of_one_number_and_of_none():
    """Of an empty cache, an empty tail, no pages."""
    layer = Layer("cpu")
    empty = octets(0, 2, CONFIG.record_bytes)
    refused("slot_mapping holds 0, supported: -1", lambda: layer.store(cache=empty))
    layer.store(cache=empty, slot_mapping=torch.full((3,), -1))
    refused(
        "block_table names page 0 for sequence 0, supported: none",
        lambda: layer.attend(randn(3, 2, D, seed=1), cache=empty),
    )
    refused("tail_slots holds 0, supported: -1", lambda: layer.store(tail=layer.ring[:0]))


# ---- values that the CPU checks


@pytest.mark.parametrize("value", [torch.nan, 0.0, 2.0, -0.5, torch.inf])
def test_signs_are_plus_or_minus_one(value):
    """As levels and steps, in every op that rotates, before anything is written."""
    for op, names in (
        ("hadamard", "signs"),
        ("encode", "signs"),
        ("decode", "signs"),
        ("score", "signs"),
    ):
        for name in names.split():
            a = good(op, "cpu")
            a[name][5] = value
            refused(f"{name} must be +1 or -1", lambda o=op, a=a: raw(o, a))
    for op in ("cache_store", "cache_load", "paged_attention"):
        for name in ("key_signs", "value_signs"):
            a = good(op, "cpu")
            getattr(a["tables"], name)[5] = value
            before = a["cache"].clone()
            refused(f"{name} must be +1 or -1", lambda o=op, a=a: raw(o, a))
            assert_same_bytes(a["cache"], before)
    signs = random_signs(D, 0, kind=SignKind.SKETCH)
    bits, norm = tt.qjl_sketch(randn(5, D, seed=1), signs)
    signs[5] = value
    text = "projection must be +1 or -1"
    refused(text, lambda: ops.qjl_sketch(randn(5, D, seed=1), signs))
    refused(text, lambda: ops.qjl_score(randn(5, D, seed=1), bits, norm, signs))


def test_what_a_tail_needs_is_checked_without_one(device):
    layer = Layer(device)
    before = layer.cache.clone()

    def layers(**changes):
        layer.store_layers([layer.k], [layer.v], [layer.cache], [], **changes)

    def one(**changes):
        layer.store(tail=None, **changes)

    for store in (one, layers):
        for name, changed, text in (
            ("slots", layer.slots.half(), "tail_slots has dtype float16, supported: int32, int64"),
            ("slots", layer.slots.repeat(2), "tail_slots has shape [2], expected [1]"),
            ("seq_lens", layer.seq_lens.long(), "seq_lens has dtype int64, supported: int32"),
            ("seq_lens", layer.seq_lens.float(), "seq_lens has dtype float32, supported: int32"),
            ("cu_seqlens_q", layer.cu_seqlens_q.long(), "cu_seqlens_q has dtype int64"),
            ("cu_seqlens_q", layer.cu_seqlens_q[:1], "cu_seqlens_q has shape [1], expected [2]"),
            ("seq_lens", None, "tail needs seq_lens"),
        ):
            refused(text, lambda s=store, n=name, c=changed: s(**{n: c}))
        wrong = {"seq_lens": None, "slots": None, "cu_seqlens_q": layer.cu_seqlens_q.long()}
        refused("cu_seqlens_q has dtype int64", lambda s=store, w=wrong: s(**w))
        with pytest.raises(TypeError, match="cu_seqlens_q has dtype int64"):
            tt.AttentionBatch(layer.slot_mapping, cu_seqlens_q=wrong["cu_seqlens_q"])
        assert_same_bytes(layer.cache, before)
    one(slots=None)
    layers(seq_lens=None, slots=None)


# ---- memory that is shared, lazy or empty


def test_what_is_written_is_apart_from_the_rest(device):
    layer = Layer(device)
    layer.ring.fill_(1)  # can be signs
    other = garbage_cache(CONFIG, 4, 2).to(device)
    rings = torch.zeros(2, 1, 2, 7, 2, D, device=device)
    floats = layer.cache.view(-1).view(torch.float32)[: 3 * 2 * D].view(3, 2, D)
    before = [t.clone() for t in (layer.cache, layer.ring, other)]

    def layers(caches, rings=(), k=layer.k):
        of_tail = {} if rings else {"slots": None}
        layer.store_layers([layer.k, k], [layer.v, layer.v], caches, list(rings), **of_tail)

    for first, second, call in (
        ("k", "cache", lambda: layer.store(k=floats)),
        ("v", "cache", lambda: layer.store(v=floats)),
        ("k", "tail", lambda: layer.store(k=layer.ring.view(-1)[: 3 * 2 * D].view(3, 2, D))),
        ("k", "cache", lambda: layers([other[:2], layer.cache], k=floats)),
        ("cache", "cache", lambda: layers([layer.cache, layer.cache])),
        ("cache", "cache", lambda: layers([other[:3], other[2:]])),
        ("tail", "tail", lambda: layers([layer.cache, other], [layer.ring, layer.ring])),
        (
            "key_signs",
            "tail",
            lambda: layer.store(tables=layer.tables._replace(key_signs=layer.ring.view(-1)[:D])),
        ),
    ):
        with pytest.raises(RuntimeError, match=f"({first} and {second}|{second} and {first}) sha"):
            call()
    for t, old in zip((layer.cache, layer.ring, other), before, strict=True):
        assert_same_bytes(t, old)
    layers([other[:2], other[2:]], list(rings))  # neighbours
    layer.store(v=layer.k)  # what is read may be shared


def test_attention_writes_apart_from_all_but_queries(device):
    layer = Layer(device)
    layer.store()
    memory = randn(5 * 2 * D, seed=3).to(device)
    q = memory[: 3 * 2 * D].view(3, 2, D)
    lse = torch.zeros(3, 2, device=device)
    expected = layer.attend(q.clone())
    shifted, ring = memory[2 * D : 8 * D].view(3, 2, D), layer.ring.view(-1)
    out = torch.zeros(3, 2, D, device=device)
    scores, lse_of_q = layer.cache.view(-1)[:24].view(torch.float32).view(3, 2), memory[6:12]
    lse_of_q = lse_of_q.view(3, 2)
    before = [t.clone() for t in (memory, layer.cache, layer.ring)]
    for first, second, call in (
        ("q", "out", lambda: layer.attend(q, shifted, lse)),
        ("out", "lse", lambda: layer.attend(q.clone(), q, memory[:6].view(3, 2))),
        ("q", "lse", lambda: layer.attend(q, out, lse_of_q)),
        ("tail", "out", lambda: layer.attend(q, ring[: 6 * D].view(3, 2, D), lse)),
        ("cache", "lse", lambda: layer.attend(q, out, scores)),
        ("q", "out", lambda: layer.attend(q[:1].expand(3, 2, D), q, lse)),
        ("k_new", "out", lambda: layer.attend(q.clone(), q, k_new=q, v_new=layer.v)),
        ("v_new", "out", lambda: layer.attend(q, q, k_new=layer.k, v_new=shifted)),
        ("k_new", "lse", lambda: layer.attend(out, out, lse_of_q, k_new=q, v_new=q)),
    ):
        with pytest.raises(RuntimeError, match=f"({first} and {second}|{second} and {first}) sha"):
            call()
    for t, old in zip((memory, layer.cache, layer.ring), before, strict=True):
        assert_same_bytes(t, old)
    layer.attend(q, out, k_new=q, v_new=q)  # what is read may be shared
    layer.attend(q, q, lse)  # in place
    assert_same_bytes(q, expected[0])
    assert_same_bytes(lse, expected[1])


@pytest.mark.cuda
def test_entries_that_a_gpu_cannot_read():
    """It reads pages and tail 16 bytes at a time, and keeps their distance in 32 bits."""
    layer = Layer("cuda")
    q = randn(3, 2, D, seed=3).cuda()
    text = "bytes from an entry to the next, supported on CUDA: multiples of 16 below 2^32"
    for gap in (1, 8, 24):
        _, cache = entries_apart(layer.cache, gap, "cuda")
        size = cache.stride(0)
        for call in (
            lambda c=cache: layer.store(cache=c),
            lambda c=cache: layer.attend(q, cache=c),
            lambda c=cache: ops.cache_load(
                c,
                layer.block_table,
                layer.seq_lens,
                *layer.tables[:4],
                None,
                D,
                16,
                4,
                4,
                3,
                q.dtype,
            ),
        ):
            refused(f"cache has {size} {text}", call)
    ring = layer.ring.expand(2, -1, -1, -1, -1).contiguous()
    _, ring = entries_apart(ring, 2, "cuda")
    for call in (lambda: layer.store(tail=ring), lambda: layer.attend(q, tail=ring)):
        refused(f"tail has {4 * ring.stride(0)} {text}", call)
    pages = torch.empty(2**32 + 2**20, dtype=torch.uint8, device="cuda")
    far = torch.as_strided(pages, (2, 2, CONFIG.record_bytes), (2**32, CONFIG.record_bytes, 1))
    refused(f"cache has {2**32} {text}", lambda: layer.store(cache=far))


def test_numbers_and_memory_of_mass_and_move(device):
    """Nothing is written by a call that is refused."""
    layer = Layer(device)
    layer.store()
    q = randn(3, 2, D, seed=3).to(device)
    lse, mass = layer.attend(q)[1], torch.zeros(1, 2, 8, device=device)
    layer.mass(q, lse, mass)
    want = mass.clone()
    for window in (MOST, MOST - 2, 2**31):
        mass.zero_()
        layer.mass(q, lse, mass, sliding_window=window)
        assert_same_bytes(mass, want)
    refused(
        f"max_q_len - 1 = {2 * MOST - 1}",
        lambda: layer.mass(q, lse, mass, recent_window=MOST, max_q_len=MOST),
    )
    layer.mass(q, lse, torch.zeros(1, 2, 2**20, device=device))  # more room than pages
    memory = q.clone().view(-1)
    in_q, of_lse = memory[:16].view(1, 2, 8), mass.view(-1)[:6].view(3, 2)
    refused("share memory", lambda: layer.mass(memory.view(q.shape), lse, in_q))
    refused("share memory", lambda: layer.mass(q, of_lse, mass))
    inside = layer.ring.view(-1)[:16].view(1, 2, 8)
    refused("share memory", lambda: layer.mass(q, lse, inside))

    slots = torch.arange(4, device=device).view(2, 2)
    before = layer.cache.clone()
    own = layer.cache.view(-1)[:32].view(torch.int64).view(2, 2)
    refused("share memory", lambda: layer.move(own, slots))
    refused("share memory", lambda: layer.move(slots, own))
    assert_same_bytes(layer.cache, before)
    layer.move(slots, slots)  # what is read may be shared
    assert_same_bytes(layer.cache, before)
    none = torch.zeros(0, 5, dtype=torch.int64, device=device)
    layer.move(none, none, octets(2**62, 0, CONFIG.record_bytes, device=device))  # no heads
    layer.move(slots[:, :0], slots[:, :0], octets(0, 2, CONFIG.record_bytes, device=device))
    must = "must not be a lazy negation, because it is written"
    refused(f"mass {must}", lambda: layer.mass(q, lse, torch._neg_view(mass)))
    refused(f"cache {must}", lambda: layer.move(slots, slots, torch._neg_view(layer.cache)))


@pytest.mark.parametrize("inference", [False, True])
def test_a_lazy_negation_is_not_written(inference, device):
    layer = Layer(device)
    before = [t.clone() for t in (layer.cache, layer.ring)]
    q, out, lse = (torch.zeros(3, 2, *d, device=device) for d in ((D,), (D,), ()))
    negated = torch._neg_view
    must = "must not be a lazy negation, because it is written"
    with torch.inference_mode(inference):
        refused(f"cache {must}", lambda: layer.store(cache=negated(layer.cache)))
        refused(f"tail {must}", lambda: layer.store(tail=negated(layer.ring)))
        refused(
            f"caches {must}",
            lambda: layer.store_layers([layer.k], [layer.v], [negated(layer.cache)], [layer.ring]),
        )
        refused(f"out {must}", lambda: layer.attend(q, negated(out), lse))
        refused(f"lse {must}", lambda: layer.attend(q, out, negated(lse)))
        for t, old in zip((layer.cache, layer.ring), before, strict=True):
            assert_same_bytes(t, old)
        layer.store(k=negated(-layer.k))  # what is read may be lazy
        lazy = layer.cache.clone()
        layer.attend(negated(q), out, lse)
        layer.store()
    assert_same_bytes(lazy, layer.cache)


def test_an_empty_tensor_has_any_strides(device):
    """NumPy's have strides of 0; torch calls them contiguous."""
    x = torch.from_numpy(np.empty((0, D), dtype=np.float32))
    x = torch.as_strided(x, (0, D), (0, 0)).to(device).as_strided((0, D), (0, 0))
    signs, steps = tt.random_signs(D, 0).to(device), torch.ones(1, device=device)
    assert x.stride() == (0, 0) and x.is_contiguous()
    assert tt.hadamard(x, signs).shape == (0, D)
    assert tt.encode(x, signs, None, steps, 4)[0].shape == (0, D // 2)
    assert tt.group_encode(x, 32, 4)[0].shape == (0, D // 2)
    assert tt.qjl_sketch(x, signs)[0].shape == (0, D // 8)
    layer = Layer(device)
    none = x.view(0, 1, D).expand(0, 2, D).as_strided((0, 2, D), (0, 0, 0))
    layer.store(
        k=none,
        v=none,
        slot_mapping=layer.slot_mapping[:0],
        seq_lens=layer.seq_lens[:0],
        slots=layer.slots[:0],
        cu_seqlens_q=None,
    )


def test_fakes_of_lists_check_them():
    """Ops whose tensors come in lists: one on another device, lists of different lengths."""
    layer = Layer("cpu")
    x = randn(1, 2, 3, 16, seed=1)
    energy, partners = torch.ones(2, 16), torch.arange(16)
    before = layer.cache.clone()

    def meta(t):
        return t.to("meta")

    def layers(caches, rings, k=layer.k):
        layer.store_layers([layer.k, k], [layer.v, layer.v], caches, rings)

    other, device = layer.cache.clone(), "all tensors of a call must be on one device"
    rings = [layer.ring, layer.ring.clone()]
    refused(device, lambda: layers([layer.cache, meta(other)], []))
    refused(device, lambda: layers([layer.cache, other], [], k=meta(layer.k)))
    refused(device, lambda: layers([layer.cache, other], [layer.ring, meta(rings[1])]))
    refused(device, lambda: ops.query_energy([x, meta(x)], 2))
    refused(device, lambda: ops.learn_center([x], [meta(energy)], partners))
    refused(device, lambda: ops.learn_center([x], [energy], meta(partners)))
    with FakeTensorMode(allow_non_fake_inputs=True):
        refused("caches are of 1 layers, k of 2", lambda: layers([layer.cache], []))
        refused("tails are of 1 layers, k of 2", lambda: layers([layer.cache, other], rings[:1]))
        refused("kv_heads is 3", lambda: ops.query_energy([x], 3))
        refused("skip is 3", lambda: ops.query_energy([x], 2, 3))
        refused("energies and partners belong together", lambda: ops.learn_center([x], [energy]))
        refused("queries has no layers", lambda: ops.query_energy([], 2))
        assert ops.learn_center([x, x], [energy, energy], partners).shape == (2, 3, 2, 16)
        assert layers([layer.cache, other], rings) is None
    assert_same_bytes(layer.cache, before)


# ---- memory of results


def test_results_start_at_multiples_of_four_bytes(device):
    """Kernels write pairs of 16-bit elements; any other alignment of tensors is fine."""
    layer = Layer(device)
    layer.store()
    q = randn(3, 2, D, seed=3).to(device, torch.bfloat16)
    layer.ring = layer.ring.to(torch.bfloat16)
    memory = torch.zeros(q.numel() + 2, dtype=q.dtype, device=device)
    out, odd = memory[2:].view(q.shape), memory[1:-1].view(q.shape)
    layer.attend(q, out=out)
    assert_same_bytes(out, layer.attend(q)[0])
    before = memory.clone()
    refused("that starts 2 bytes behind it", lambda: layer.attend(q, out=odd))
    assert_same_bytes(memory, before)
    if device.type == "cpu":
        buffer = bytearray(q.nbytes + 1)
        odd = torch.frombuffer(buffer, dtype=q.dtype, offset=1).view(q.shape)
        refused("that starts 1 bytes behind it", lambda: layer.attend(q, out=odd))
        assert not any(buffer)
