"""What pages hold, and that the ops read and write both parts of them. Needs no vLLM."""

import pytest
import torch

import torch_turboquant as tt
from tests.helpers import randn, to_device
from tests.oracle import exact_attention
from tests.vllm.reference import through_codes
from torch_turboquant.integrations.engine.pages import (
    LATENT_SIZES,
    bytes_per_token,
    latent_page_parts,
    page_parts,
    page_tokens,
)

HEADS, D = 2, 64


@pytest.mark.parametrize(
    ("block_size", "tokens"), [(16, 16), (64, 64), (256, 128), (528, 16), (544, 32), (1, 16)]
)
def test_blocks_are_cut_into_pages(block_size, tokens):
    assert page_tokens(block_size) == tokens


@pytest.mark.parametrize(("block_size", "tokens"), [(32, 32), (64, 64), (96, 32), (1024, 128)])
def test_blocks_are_cut_into_pages_of_latents(block_size, tokens):
    assert page_tokens(block_size, LATENT_SIZES) == tokens


def config_of(page_size=16, d=D):
    return tt.preset("k5v4u", d, page_size=page_size, sink_tokens=1, recent_window=0)


def test_bytes():
    """An exact key and value of 16 bits per channel, shared by the tokens of a page."""
    config = config_of(d=128)
    assert bytes_per_token(config, 64, None) == config.bytes_per_token == 148
    assert bytes_per_token(config, 64, torch.bfloat16) == 148 + 8
    assert bytes_per_token(config, 128, torch.float16) == 148 + 4
    assert (
        bytes_per_token(config_of(d=80), 128, torch.bfloat16) == config_of(d=80).bytes_per_token + 3
    )
    latents = tt.latent_preset("k4", 512, 64)
    assert bytes_per_token(latents, 64, None) == 386
    assert bytes_per_token(latents, 64, torch.bfloat16) == 386 + 18


def pages_of_two_layers(config, dtype, pages=14):
    """The pages of one of two layers that share an allocation."""
    tokens = config.page_size
    shape = (pages, 2, HEADS, tokens, bytes_per_token(config, tokens, dtype))
    return torch.full(shape, 0x5A, dtype=torch.uint8)[:, 1]


def test_parts_share_the_memory_of_their_page():
    config, dtype = config_of(), torch.bfloat16
    kv_cache = pages_of_two_layers(config, dtype)
    records, rows = page_parts(kv_cache, config, dtype)
    assert records.shape == (14, HEADS, config.record_bytes)
    assert rows.shape == (14, HEADS, 1, 2, D)
    records[3], rows[3] = 1, 2.0
    assert (kv_cache[3] != 0x5A).all()
    for other in (2, 4):
        assert (kv_cache[other] == 0x5A).all()
    assert page_parts(kv_cache, config, None)[1] is None


def test_pages_without_room():
    config = config_of(page_size=32)
    kv_cache = torch.zeros(
        4, HEADS, 16, bytes_per_token(config, 32, torch.bfloat16), dtype=torch.uint8
    )
    with pytest.raises(ValueError, match=r"pages of 16 tokens, whose \d+ bytes have no room"):
        page_parts(kv_cache, config_of(page_size=16), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("q_lens", [[1, 1, 1, 1], [1, 20, 2, 3]])
@pytest.mark.parametrize("own", [True, False])
def test_tiny_ops_on_pages(own, q_lens, dtype, device):
    """Sequences of one token, of one page and of more; a fresh one writes its first token."""
    config = config_of()
    tables = to_device(tt.make_tables(config, 0), device)
    records, rows = page_parts(pages_of_two_layers(config, dtype).to(device), config, dtype)
    lengths = [1, 60, 16, 3]
    k, v = (
        [randn(n, HEADS, D, seed=seed + s).to(dtype) for s, n in enumerate(lengths)]
        for seed in (1, 11)
    )
    table = torch.arange(12).flip(0).int().view(4, 3)
    table = torch.cat([table, table[:, :1]], dim=1)  # the second sequence needs four pages
    table[1, 3] = table[0, 1]
    q_lens = [min(pair) for pair in zip(q_lens, lengths, strict=True)]
    before = [length - new for length, new in zip(lengths, q_lens, strict=True)]

    def store(begin, end):
        counts = [e - b for b, e in zip(begin, end, strict=True)]
        position = [torch.arange(b, e) for b, e in zip(begin, end, strict=True)]
        slots = [table[s, p // 16].long() * 16 + p % 16 for s, p in enumerate(position)]
        tt.cache_store(
            torch.cat([x[b:e] for x, b, e in zip(k, begin, end, strict=True)]).to(device),
            torch.cat([x[b:e] for x, b, e in zip(v, begin, end, strict=True)]).to(device),
            records,
            torch.cat(slots).to(device),
            config,
            tables,
            tail=tt.Tail(rows, table.to(device)[:, 0]),
            seq_lens=torch.tensor(end).int().to(device),
            cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).int().to(device),
        )

    store([0] * 4, before)
    store(before, lengths)
    first = torch.stack([torch.stack([x[0], y[0]], 1) for x, y in zip(k, v, strict=True)])
    assert torch.equal(rows[table[:, 0].long().to(device)].cpu()[:, :, 0], first)
    q = randn(sum(q_lens), 4, D, seed=5).to(dtype)
    new = {}
    if own:
        new = {
            name: torch.cat([x[b:] for x, b in zip(part, before, strict=True)]).to(device)
            for name, part in (("k_new", k), ("v_new", v))
        }
    found, _ = tt.paged_attention(
        q.to(device),
        records,
        table.to(device),
        torch.tensor(lengths).int().to(device),
        config,
        tables,
        cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0).int().to(device),
        max_q_len=max(q_lens),
        tail=tt.Tail(rows, table.to(device)[:, 0]),
        **new,
    )
    decoded = [through_codes(x, y, "k5v4u", 0) for x, y in zip(k, v, strict=True)]
    pad = torch.nn.utils.rnn.pad_sequence
    right, _ = exact_attention(
        q,
        *(pad([pair[i] for pair in decoded], batch_first=True) for i in (0, 1)),
        lengths,
        q_lens,
        exact_k=pad(k, batch_first=True),
        exact_v=pad(v, batch_first=True),
        sinks=1,
        own=own,
    )
    error = (found.cpu().double() - right).norm(dim=-1) / right.norm(dim=-1)
    allowed = {torch.float32: 5e-4, torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype]
    if dtype == torch.float32 and torch.device(device).type == "cuda":
        allowed = 2e-3  # float16 products of float32 queries
    assert error.max() < allowed


@pytest.mark.parametrize("q_lens", [[1, 1], [3, 2], [40, 30]])
def test_tiny_windows_that_have_left_the_first_page(q_lens, device):
    """vLLM takes such a page from its sequence: the block table then names another one."""
    config, dtype = config_of(), torch.float16
    tables = to_device(tt.make_tables(config, 0), device)
    records, rows = page_parts(pages_of_two_layers(config, dtype).to(device), config, dtype)
    lengths, table = [100, 90], torch.arange(14).int().view(2, 7)
    k, v = (randn(190, HEADS, D, seed=seed).to(dtype) for seed in (1, 2))
    begins = [(0, 100), (100, 190)]
    for s, (begin, end) in enumerate(begins):
        position = torch.arange(end - begin)
        slots = table[s, position // 16].long() * 16 + position % 16
        tt.cache_store(
            k[begin:end].to(device),
            v[begin:end].to(device),
            records,
            slots.to(device),
            config,
            tables,
        )
    found = []
    for left in (torch.nan, 1.0):  # what the other page holds does not matter
        rows[table[:, 0].long().to(device)] = left
        out, _ = tt.paged_attention(
            randn(sum(q_lens), 4, D, seed=5).to(dtype).to(device),
            records,
            table.to(device),
            torch.tensor(lengths).int().to(device),
            config,
            tables,
            cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0).int().to(device),
            max_q_len=max(q_lens),
            sliding_window=24,
            tail=tt.Tail(rows, table.to(device)[:, 0]),
        )
        found.append(out)
    assert found[0].isfinite().all() and torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("q_lens", [[1, 1, 1, 1], [1, 20, 2, 3]])
@pytest.mark.parametrize("own", [True, False])
def test_tiny_ops_on_pages_of_latents(own, q_lens, dtype, device):
    """The first token of a sequence is read as it is, and no other page is touched."""
    config = tt.latent_preset(
        "k4u", 256, 64, page_size=32, sink_tokens=1, recent_window=0, rope_dtype=dtype
    )
    tables = to_device(tt.make_latent_tables(config, 0), device)
    shape = (14, 2, 32, bytes_per_token(config, 32, dtype))
    memory = torch.full(shape, 0x5A, dtype=torch.uint8, device=device)
    records, rows = latent_page_parts(memory[:, 1], config, dtype)
    assert records.shape == (14, config.record_bytes) and rows.shape == (14, 1, 320)
    lengths = [1, 70, 32, 3]
    latent, rope = randn(106, 256, seed=1).to(dtype), randn(106, 64, seed=2).to(dtype)
    table = torch.arange(12).flip(0).int().view(4, 3)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    position = [torch.arange(n) for n in lengths]
    slots = [table[s, p // 32].long() * 32 + p % 32 for s, p in enumerate(position)]
    seq_lens = torch.tensor(lengths).int().to(device)
    tail = tt.Tail(rows, table.to(device)[:, 0])
    tt.mla_store(
        latent.to(device),
        rope.to(device),
        records,
        torch.cat(slots).to(device),
        config,
        tables,
        tail=tail,
        seq_lens=seq_lens,
        cu_seqlens_q=torch.tensor([0, *ends]).int().to(device),
    )
    firsts = [end - n for end, n in zip(ends, lengths, strict=True)]
    exact = torch.cat([latent, rope], 1)
    assert torch.equal(rows[table[:, 0].long().to(device), 0].cpu(), exact[firsts])
    assert (memory[:, 0] == 0x5A).all()

    q_lens = [min(pair) for pair in zip(q_lens, lengths, strict=True)]
    new = torch.cat([torch.arange(e - n, e) for e, n in zip(ends, q_lens, strict=True)])
    q_latent, q_rope = (randn(len(new), 4, d, seed=d).to(dtype) for d in (256, 64))
    given = {"latent_new": latent[new].to(device), "rope_new": rope[new].to(device)} if own else {}
    found, _ = tt.mla_attention(
        q_latent.to(device),
        q_rope.to(device),
        records,
        table.to(device),
        seq_lens,
        config,
        tables,
        softmax_scale=0.05,
        cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0).int().to(device),
        max_q_len=max(q_lens),
        tail=tail,
        **given,
    )
    loaded = tt.mla_load(records, table.to(device), seq_lens, config, tables, 70, torch.float32)
    coded, first = torch.cat(loaded, 2).cpu(), 0
    for s, (length, end, n) in enumerate(zip(lengths, ends, q_lens, strict=True)):
        seen, as_is = coded[s, :length].double(), exact[end - length : end].double()
        seen[0] = as_is[0]
        if own:
            seen[length - n :] = as_is[length - n :]
        q = torch.cat([q_latent, q_rope], 2)[first : first + n].double()
        score = 0.05 * torch.einsum("qhd,kd->hqk", q, seen)
        hidden = torch.ones(n, length, dtype=torch.bool).triu(length - n + 1)
        weights = score.masked_fill(hidden, -torch.inf).softmax(-1)
        right = torch.einsum("hqk,kd->qhd", weights, seen[:, :256])
        error = (found[first : first + n].cpu().double() - right).norm(dim=-1) / right.norm(dim=-1)
        assert error.max() < {torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype]
        first += n
