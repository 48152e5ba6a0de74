"""Attention to the call's own tokens, which are read as they are, stored before, after or never."""

import pytest
import torch

import torch_turboquant as tt
from tests.attention_cases import build, check, run
from tests.helpers import FLOATS, assert_same_bytes, int32, randn, to_device


def own_tokens(case, q_lens):
    """k_new and v_new of the case: what its last tokens are made of."""
    return {
        name: torch.cat([x[len(x) - n :] for x, n in zip(part, q_lens, strict=True)])
        for name, part in (("k_new", case.k), ("v_new", case.v))
    }


OWN = ([330, 65, 20, 40, 0, 150, 3], [33, 1, 20, 0, 0, 17, 3])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("d", [64, 80, 128, 256])
@pytest.mark.parametrize("tail", [True, False])
def test_own_tokens_are_read_as_they_are(tail, d, dtype, device):
    """Older tokens from codes and tail; the rest of pages that this call's tokens share is NaN."""
    config = tt.preset("k5v4u", d, page_size=16, sink_tokens=2, recent_window=5)
    lengths, q_lens = OWN
    case = build(config, lengths, q_lens, dtype=dtype, center="scaled", tail=tail, store_new=False)
    own = own_tokens(case, q_lens)
    used = [-(-(n - new) // config.page_size) for n, new in zip(lengths, q_lens, strict=True)]
    for s, pages in enumerate(used):  # pages of own tokens alone
        case.block_table[s, pages:] = -7
    case = case._replace(block_table=case.block_table[:, : max(used)].contiguous())
    check(case, device, **own)
    check(case, device, **own, sliding_window=24, soft_cap=20.0, sink_logits=randn(4, seed=3))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 9, "soft_cap": 5.0}])
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [4, 2, 1], [1, 0, 4], None])
def test_own_tokens_of_decode_steps(q_lens, options, device):
    """Few rows, for the split-KV kernel; the third sequence is new."""
    config = tt.preset("k4v4u", 128, page_size=16, sink_tokens=2, recent_window=5)
    counts = q_lens or [1, 1, 1]
    case = build(
        config,
        [1000, 39, counts[2]],
        q_lens,
        q_heads=8,
        dtype=torch.bfloat16,
        tail=True,
        store_new=False,
    )
    check(case, device, **own_tokens(case, counts), **options)
    check(case._replace(tail=None), device, **own_tokens(case, counts), **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tiny_own_tokens(dtype, device):
    """For compute-sanitizer: few rows and many, copies of other rows than a tail's."""
    config = tt.preset("k4v4u", 64, page_size=16, sink_tokens=2, recent_window=5)
    for q_lens in ([2, 1, 3], [20, 1, 3]):
        lengths = [90, 17, 3]
        case = build(config, lengths, q_lens, dtype=dtype, tail=True, store_new=False)
        case = case._replace(block_table=case.block_table[:, :6].contiguous())  # of older tokens
        own = own_tokens(case, q_lens)
        check(case, device, **{name: x.clone() for name, x in own.items()})
        check(case, device, **own, sliding_window=7)


@pytest.mark.parametrize("window", [0, 1, 17])
@pytest.mark.parametrize("q_lens", [[1, 1], [5, 3], [40, 2], [150, 33]])
@pytest.mark.parametrize("d", [16, 64, 80, 128, 256, 512])
def test_prompts_need_no_pages(d, q_lens, window, device):
    """Their tokens are the call's own, the sinks, too: block_table has no columns."""
    config = tt.preset("k4v4u", d, page_size=16, sink_tokens=4, recent_window=5)
    case = build(config, q_lens, q_lens, dtype=torch.bfloat16, tail=True, store_new=False)
    own = own_tokens(case, q_lens)
    case = case._replace(block_table=case.block_table[:, :0].contiguous())
    check(case, device, **own, sliding_window=window)


def test_a_window_of_one_token_needs_no_page(device):
    """Each query sees itself alone, also amid a page: no page of older tokens is read."""
    config = tt.preset("k4v4u", 64, page_size=16)
    q_lens = [2, 1, 1]
    case = build(config, [90, 17, 33], q_lens, store_new=False)
    case = case._replace(block_table=torch.full_like(case.block_table, -7))
    check(case, device, **own_tokens(case, q_lens), sliding_window=1)


@pytest.mark.parametrize("q_lens", [[3, 1, 4], [30, 1, 40]])
@pytest.mark.parametrize("dtype", FLOATS)
def test_own_tokens_stored_before_or_after(dtype, q_lens, device):
    """What codes and tail hold of this call's tokens makes no difference."""
    config = tt.preset("k4v4u", 64, page_size=16, sink_tokens=2, recent_window=5)
    lengths = [70, 40, q_lens[2]]
    common = {"dtype": dtype, "center": True, "tail": True}
    after = build(config, lengths, q_lens, store_new=False, **common)
    before = build(config, lengths, q_lens, **common)
    own = own_tokens(after, q_lens)
    for options in ({}, {"sliding_window": 9}):
        expected = check(after, device, **own, **options)
        for got, want in zip(run(before, device, **own, **options), expected, strict=True):
            assert_same_bytes(got, want)
        other = build(config, lengths, q_lens, seed=7, **common)  # stored with other contents
        cache = after.cache.clone()
        for s, n in enumerate(q_lens):
            for slot in after.slots[s][lengths[s] - n :].tolist():
                copy_token(config, other.cache, cache, slot)
        for got, want in zip(
            run(after._replace(cache=cache), device, **own, **options), expected, strict=True
        ):
            assert_same_bytes(got, want)


def copy_token(config, source, target, slot):
    """The codes of one token from a cache to another with the same pages."""
    page, token = divmod(slot, config.page_size)
    record = config.record
    for head in range(target.shape[1]):
        for at in (record.key_scale(token), record.value_scale(token)):
            target[page, head, at : at + 2] = torch.tensor([0, 0x7E], dtype=torch.uint8)  # NaN


@pytest.mark.parametrize("window", [0, 1, 5, 40])
def test_a_ring_without_room_for_own_tokens(window, device):
    """Chunks longer than the ring: what storing them overwrites comes from codes, unless the caller
    says that it is there still."""
    config = tt.preset("k4v4u", 64, page_size=16, sink_tokens=2, recent_window=window)
    for q_lens, rows in (([20, 1, 3], max(1, window)), ([30, 7, 3], window + 3)):
        lengths = [90, 33, 3]
        common = {"tail": True, "max_q_len": max(1, rows + 1 - window), "dtype": torch.bfloat16}
        after = build(config, lengths, q_lens, store_new=False, **common)
        before = build(config, lengths, q_lens, **common)
        assert after.tail.ring.shape[2] == 2 + rows
        own = own_tokens(after, q_lens)
        after, before = (c._replace(max_q_len=max(q_lens)) for c in (after, before))
        expected = check(after, device, **own)
        for got, want in zip(run(before, device, **own), expected, strict=True):
            assert_same_bytes(got, want)
        valid = int32([0, 0], [0, 0], [0, 0], [0, 0], [0, 0])
        for s, slot in enumerate(after.tail.slots.tolist()):
            old = lengths[s] - q_lens[s]
            valid[slot] = int32(min(old, 2), max(0, old - rows))
        held = after._replace(tail=after.tail._replace(valid=valid))
        out, _ = check(held, device, **own)
        if window > 1:
            assert (out[0] - expected[0][0]).abs().max() > 0


def test_own_tokens_of_new_sequences_need_no_pages(device):
    """Plain causal attention: no pages, no block table, no rounding of keys or values."""
    config = tt.preset("k3v2", 64, page_size=16, sink_tokens=0, recent_window=0)
    tables = tt.make_tables(config, 0)
    for count, heads in ((5, 2), (70, 8)):
        q, k, v = (randn(count, h, 64, seed=i) for i, h in enumerate((heads, 2, 2)))
        args = (
            tt.allocate_cache(config, 0, 2),
            torch.zeros(1, 0, dtype=torch.int32),
            int32(count),
            config,
            tables,
        )
        given = {"cu_seqlens_q": int32(0, count), "max_q_len": count, "k_new": k, "v_new": v}
        kind = torch.device(device)
        out, _ = tt.paged_attention(
            q.to(kind),
            *(to_device(a, device) for a in args),
            **{name: to_device(a, device) for name, a in given.items()},
        )
        k, v = (x.double().repeat_interleave(heads // 2, 1).transpose(0, 1) for x in (k, v))
        want = torch.nn.functional.scaled_dot_product_attention(
            q.double().transpose(0, 1), k, v, is_causal=True
        ).transpose(0, 1)
        allowed = 1e-5 if kind.type == "cpu" else 2e-3  # float16 products of float32 queries
        assert (out.cpu().double() - want).abs().max() < allowed


@pytest.mark.parametrize("dtype", FLOATS)
def test_layouts_of_own_tokens(dtype, device):
    """Slices of a fused projection, transposed heads, any alignment, of one token and of many."""
    config = tt.preset("k4v4u", 64, page_size=16, sink_tokens=2, recent_window=3)
    for q_lens in ([2, 3], [1, 1]):
        case = build(config, [20, 33], q_lens, dtype=dtype, tail=True, store_new=False)
        own = own_tokens(case, q_lens)
        out, _ = run(case, device, **own)
        tokens = sum(q_lens)
        own = {name: x.to(device) for name, x in own.items()}
        fused = torch.full((tokens, 8, 64), torch.nan, dtype=dtype, device=device)
        fused[:, :4], fused[:, 4:6], fused[:, 6:] = case.q, own["k_new"], own["v_new"]
        views = {"k_new": fused[:, 4:6], "v_new": fused[:, 6:]}
        assert_same_bytes(run(case._replace(q=fused[:, :4]), device, **views)[0], out)
        by_head = {n: x.transpose(0, 1).contiguous().transpose(0, 1) for n, x in own.items()}
        assert_same_bytes(run(case, device, **by_head)[0], out)
        for shift in (1, 3, 8):
            wide = torch.full((tokens, 2, 64 + shift), torch.nan, dtype=dtype, device=device)
            wide[..., shift:] = own["k_new"]
            shifted = {"k_new": wide[..., shift:], "v_new": own["v_new"]}
            assert_same_bytes(run(case, device, **shifted)[0], out)


def test_own_tokens_with_infinities_stay_where_they_are(device):
    """A NaN among this call's tokens reaches the queries that see it, and no others."""
    config = tt.preset("k4v4u", 64, page_size=16, sink_tokens=2, recent_window=3)
    case = build(config, [20, 33], [3, 4], dtype=torch.float16, tail=True, store_new=False)
    own = own_tokens(case, [3, 4])
    clean, _ = run(case, device, **own)
    for name in own:
        bad = {n: x.clone() for n, x in own.items()}
        bad[name][4] = torch.nan  # the second token of the second sequence
        out, _ = run(case, device, **bad)
        assert out[4:].isnan().all()
        assert_same_bytes(out[:4], clean[:4])
