"""Calls of the ops of latents: compiled, and of raw ops, which no Python function has checked."""

import sys

import pytest
import torch
from torch import Tensor

import torch_turboquant as tt
from tests.helpers import assert_same_bytes, int32, randn
from tests.mla_cases import Case, center_of, make_case, queries

# ---- torch.compile


def test_compiled_without_a_break():
    config = tt.latent_preset("k4u", 128, 32, page_size=32, sink_tokens=2, recent_window=4)
    tables = tt.make_latent_tables(config, 0, center=center_of("scales", 128))
    table = int32(0, 1)[None]

    def step(latent, rope, q_latent, q_rope, cache, ring, lengths, slots):
        tail = tt.Tail(ring, torch.zeros(1, dtype=torch.int64))
        tt.mla_store(latent, rope, cache, slots, config, tables, tail=tail, seq_lens=lengths)
        out, lse = tt.mla_attention(
            q_latent * 2,
            q_rope,
            cache,
            table,
            lengths,
            config,
            tables,
            softmax_scale=0.1,
            tail=tail,
        )
        latents, _ = tt.mla_load(cache, table, lengths, config, tables, 40, torch.float32)
        return out + 1, lse, latents * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    caches = [tt.allocate_latent_cache(config, 2) for _ in range(2)]
    rings = [tt.allocate_latent_tail(config, 1, torch.float32) for _ in range(2)]
    for i in range(3):
        new = randn(1, 128, seed=i), randn(1, 32, seed=10 + i)
        q = randn(1, 4, 128, seed=20 + i), randn(1, 4, 32, seed=30 + i)
        lengths, slots = int32(i + 1), torch.tensor([i])
        results = [
            function(*new, *q, cache, ring, lengths, slots)
            for function, cache, ring in zip((step, compiled), caches, rings, strict=True)
        ]
        for actual, wanted in zip(results[1], results[0], strict=True):
            assert_same_bytes(actual, wanted)
    assert_same_bytes(caches[1], caches[0])
    assert_same_bytes(rings[1], rings[0])


# ---- raw ops


def raw_store(case: Case, **changes):
    """A call of the raw op that stores the first token of each sequence, with changes."""
    config, tables = case.config, case.tables
    a = {
        "latent": case.latent[:2],
        "rope": case.rope[:2],
        "cache": case.cache,
        "slot_mapping": torch.tensor([0, 1]),
        "signs": tables.signs,
        "levels": tables.levels,
        "steps": tables.steps,
        "center": tables.center,
        "page_size": config.page_size,
        "bits": config.bits,
        "scale_mode": 3,
        "rope_dtype": config.rope_dtype,
        "seq_lens": int32(1, 1),
        "tail": case.tail.ring if case.tail else None,
        "tail_slots": torch.tensor([0, 1]) if case.tail else None,
        "sink_tokens": config.sink_tokens,
        **changes,
    }
    torch.ops.turboquant.mla_store.default(**a)


def raw_attend(case: Case, q: tuple[Tensor, Tensor], op=None, **changes):
    tables, config = case.tables, case.config
    a = {
        "q_latent": q[0],
        "q_rope": q[1],
        "cache": case.cache,
        "block_table": case.block_table,
        "seq_lens": int32(*case.lengths),
        "signs": tables.signs,
        "levels": tables.levels,
        "center": tables.center,
        "page_size": config.page_size,
        "bits": config.bits,
        "rope_dtype": config.rope_dtype,
        "softmax_scale": 0.1,
        **changes,
    }
    return (op or torch.ops.turboquant.mla_attention.default)(**a)


@pytest.fixture
def small() -> tuple[Case, tuple[Tensor, Tensor]]:
    config = tt.latent_preset("k4u", 128, 32, page_size=32, sink_tokens=1, recent_window=2)
    case = make_case(config, [30, 50], [1, 1], tail=True)
    return case, queries(case, 2)


def test_what_is_written_is_apart_from_the_rest(small):
    case, q = small
    out_op = torch.ops.turboquant.mla_attention_out.default
    inside = case.cache.flatten()[: 4 * 256].view(torch.float32).view(2, 128)
    with pytest.raises(RuntimeError, match=r"cache and latent share memory|latent and cache share"):
        raw_store(case, latent=inside)
    assert case.tail is not None
    rope = case.tail.ring.flatten()[:64].view(2, 32)
    with pytest.raises(RuntimeError, match="share memory: what a call writes must be apart"):
        raw_store(case, rope=rope)
    for changes in ({"out": q[0]}, {"out": torch.empty_like(q[0]), "lse": q[1].flatten()[:4]}):
        changes = {name: t.view(2, 2) if name == "lse" else t for name, t in changes.items()}
        with pytest.raises(RuntimeError, match="share memory"):
            raw_attend(case, q, out_op, **changes)


def test_integers_of_raw_ops_do_not_overflow(small):
    case, q = small
    assert case.tail is not None
    most = 2**63 - 1
    of_tail = {"tail": case.tail.ring, "tail_slots": case.tail.slots, "sink_tokens": 1}
    for window, max_q_len in ((most, 1), (most, most), (2, most), (3, 3)):
        with pytest.raises(RuntimeError, match=f"max_q_len - 1 = {window + max_q_len - 1}"):
            raw_attend(case, q, recent_window=window, max_q_len=max_q_len, **of_tail)
    own = dict(zip(("latent_new", "rope_new"), case.own(), strict=True))
    with pytest.raises(RuntimeError, match=f"recent_window - 1 = {most - 1}"):
        raw_attend(case, q, recent_window=most, **of_tail, **own)
    for sinks in (-1, 4, most):
        with pytest.raises(RuntimeError, match=f"sink_tokens is {sinks} but the tail has 3 rows"):
            raw_store(case, sink_tokens=sinks)
    with pytest.raises(RuntimeError, match=r"no memory for latents of max_seq_len = 68719476736"):
        tt.mla_load(
            case.cache, case.block_table, int32(1, 1), case.config, case.tables, 2**36, torch.half
        )


def test_an_op_of_a_step_runs_no_python(small):
    """But for one question, as the ops of other caches."""
    case, q = small
    out, lse = torch.empty_like(q[0]), torch.empty(2, 2)
    out_op = torch.ops.turboquant.mla_attention_out.default
    for call in (
        lambda: raw_store(case),
        lambda: raw_attend(case, q),
        lambda: raw_attend(case, q, out_op, out=out, lse=lse),
    ):
        ran = []
        sys.setprofile(lambda frame, event, _, ran=ran: ran.append((event, frame.f_code)))
        try:
            call()
        finally:
            sys.setprofile(None)
        ours = [code for event, code in ran if event == "call" and "_autograd" in code.co_filename]
        assert [code.co_name for code in ours] == ["_derivative_of", "in_forward_mode"]


def test_results_start_at_multiples_of_eight_bytes(small):
    """CUDA kernels write four 16-bit elements at once; any other alignment of tensors is fine."""
    case, q = small
    memory = torch.zeros(q[0].numel() + 2)
    raw_out = torch.ops.turboquant.mla_attention_out.default
    for out in (memory[2:], memory[:-2]):
        raw_attend(case, q, raw_out, out=out.view(q[0].shape), lse=torch.empty(2, 2))
        assert_same_bytes(out.view(q[0].shape), raw_attend(case, q)[0])
    before = memory.clone()
    with pytest.raises(RuntimeError, match="multiple of 8 bytes, got one that starts 4 bytes beh"):
        raw_attend(case, q, raw_out, out=memory[1:-1].view(q[0].shape), lse=torch.empty(2, 2))
    assert_same_bytes(memory, before)


def test_a_lazy_negation_is_not_written(small):
    case, q = small
    with pytest.raises(RuntimeError, match="out must not be a lazy negation"):
        raw_attend(
            case,
            q,
            torch.ops.turboquant.mla_attention_out.default,
            out=torch._neg_view(torch.empty_like(q[0])),
        )
    negated = torch._neg_view(-q[0])
    assert_same_bytes(raw_attend(case, (negated, q[1]))[0], raw_attend(case, q)[0])
