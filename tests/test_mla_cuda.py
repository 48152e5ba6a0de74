"""Attention over latents on a GPU against the float64 reference, for its four kernels.

Of 16-bit queries, on devices that have products of warpgroups, key tiles take uniform grids of 4, 5
and 8 bits of 256 or 512 channels, and row tiles take more than 16 rows over tables of levels and 3
bits of 512 channels. Warp tiles take all other 16-bit queries, the general kernel the rest
(csrc/choices/mla.h). tests/test_mla.py tests storing and loading on every device.
"""

import pytest
import torch

import torch_turboquant as tt
from tests.helpers import (
    FLOATS,
    WRONG_STARTS,
    assert_space_around_is_left,
    int32,
    randn,
    to_device,
    with_space_around,
)
from tests.mla_cases import CENTERS, Case, assert_close, attend, make_case, queries
from torch_turboquant.choices import kernel_choice
from torch_turboquant.ops.mla import mla_attention_reference
from torch_turboquant.tail import Rings

pytestmark = pytest.mark.cuda

# What rounding of the results costs: half a unit in the last place, and the 4e-4 of float32.
UNIT = {torch.float32: 5e-4, torch.float16: 1.5e-3, torch.bfloat16: 6e-3}
KEY_TILES = ((4, "uniform"), (5, "uniform"), (8, "uniform"))
ROW_TILES = ((3, "lloyd"), (3, "uniform"), (4, "lloyd"), (5, "lloyd"))
BOTH = ["k4u", "k4"]  # a preset of each
HEADS = [16, 20]  # at most 16 rows, and more: tables of levels have a kernel for each


def on_device(case: Case, q, **options):
    """The op on the GPU; its results on the CPU."""
    there = torch.device("cuda")
    moved = case._replace(
        tables=to_device(case.tables, there),
        cache=case.cache.to(there),
        block_table=case.block_table.to(there),
        tail=to_device(case.tail, there),
    )
    options = {
        "softmax_scale": 0.08,
        "cu_seqlens_q": case.cu_seqlens_q.to(there),
        "max_q_len": case.max_q_len,
        "tail": moved.tail,
        **{name: to_device(value, there) for name, value in options.items()},
    }
    lengths = int32(*case.lengths, device=there)
    arguments = (moved.cache, moved.block_table, lengths, case.config, moved.tables)
    out, lse = tt.mla_attention(*(t.to(there) for t in q), *arguments, **options)
    return out.cpu(), lse.cpu()


def kernel_of(case: Case, heads: int, dtype: torch.dtype) -> str:
    """The kernel that this GPU has for a call."""
    c = case.config
    shape = {"bits": c.bits, "grid": c.grid, "latent_dim": c.latent_dim}
    rows = {"q_heads": heads, "max_q_len": case.max_q_len}
    types = {"dtype": dtype, "rope_dtype": c.rope_dtype}
    return kernel_choice("mla_attention", **shape, **rows, **types).kernel


def of_logarithms(kernel: str) -> float:
    """Row tiles and warp tiles round queries to float16.

    A channel is off by 2 * 10^-4 of itself (sigma); times 512 of them, latents of length 23 and the
    factor 0.08 of scores that is 3.7 * 10^-4. The bound is six times that.
    """
    return 2.2e-3 if kernel in ("row_tiles", "warp_tiles") else 4e-4


def check(case: Case, heads: int, dtype: torch.dtype, **options):
    q = queries(case, heads, dtype)
    actual = on_device(case, q, **options)
    expected = attend(case, q, mla_attention_reference, **options)
    assert_close(actual, expected, UNIT[dtype], of_logarithms(kernel_of(case, heads, dtype)))
    again = on_device(case, q, **options)
    assert all(torch.equal(x, y) for x, y in zip(actual, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("bits", "grid"), KEY_TILES + ROW_TILES)
@pytest.mark.parametrize(
    "dims", [(512, 64), (512, 0), (256, 64), (256, 32), (128, 64), (128, 32), (128, 0)], ids=str
)
def test_fast_widths(dims, bits, grid, dtype):
    for i, page_size in enumerate((32, 64, 128)):
        config = tt.LatentConfig(*dims, bits, grid, page_size, transform=i != 1, rope_dtype=dtype)
        case = make_case(config, [150, 33, 1, 700], [1] * 4, center=CENTERS[i], dtype=dtype)
        for heads in HEADS:
            check(case, heads, dtype)


@pytest.mark.parametrize("dims", [(512, 64), (256, 32), (128, 32)], ids=str)
@pytest.mark.parametrize("name", BOTH)
def test_results_may_start_at_any_multiple_of_eight_bytes(name, dims):
    config = tt.latent_preset(name, *dims)
    case = make_case(config, [150, 33], [1, 1], dtype=torch.bfloat16)
    q = queries(case, 16, torch.bfloat16)
    memory = torch.full((q[0].numel() + 8,), torch.nan, dtype=torch.bfloat16, device="cuda")
    out = memory[4:-4].view(q[0].shape)
    actual = on_device(case, q, out=out)[0]
    assert torch.equal(actual, on_device(case, q)[0])
    assert memory[:4].isnan().all() and memory[-4:].isnan().all()
    with pytest.raises(RuntimeError, match="multiple of 8 bytes, got one that starts 4 bytes beh"):
        on_device(case, q, out=memory[2:-6].view(q[0].shape))


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("name", ["k4u", "k5u", "k8", "k4", "k3"])
def test_many_tokens_that_weigh_the_same(name, heads):
    """What tensor cores cut off must not add up over the tokens that one block sums.

    So many sequences have the pages of one that every block has whole sequences. Rounding to
    float16 is a relative error of 2e-4, and sums of codes as they are would be off by 1e-2.
    """
    config = tt.latent_preset(name, 512, 64, rope_dtype=torch.float16)
    case = make_case(config, [60_000], [1], dtype=torch.float16)
    q = tuple(0.1 * x for x in queries(case, heads, torch.float16))
    wanted, _ = attend(case, q, mla_attention_reference)
    copies = 264
    many = repeated(case, copies)
    out, _ = on_device(many, tuple(x.repeat(copies, 1, 1) for x in q))
    for found in (out[:1], out[copies // 2 : copies // 2 + 1], out[-1:]):
        error = (found.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert error.max() < 4e-3


@pytest.mark.parametrize("grid", ["lloyd", "uniform"])
@pytest.mark.parametrize("bits", [3, 4, 5, 8])
def test_widths_of_the_general_kernel(bits, grid):
    for (d, rope_dim), kind in zip(((128, 32), (256, 64), (512, 0)), CENTERS, strict=True):
        config = tt.LatentConfig(d, rope_dim, bits, None if bits == 8 else grid, 32)
        case = make_case(config, [70, 33, 1], [1, 1, 1], center=kind)
        check(case, 6, torch.float32)


@pytest.mark.parametrize("heads", [1, 16, 20, 24, 40, 64, 128])
@pytest.mark.parametrize("q_lens", [[1, 1, 0, 1], [2, 5, 0, 3], [1, 4, 0, 0]])
@pytest.mark.parametrize("name", BOTH)
def test_heads_and_queries(name, heads, q_lens):
    """Blocks of 16, 32 and 64 rows, several blocks of rows, sequences without tokens or queries."""
    config = tt.latent_preset(name, 512, 64)
    case = make_case(config, [70, 300, 0, 5], q_lens, dtype=torch.bfloat16)
    check(case, heads, torch.bfloat16)
    if heads in (1, 20):
        check(case, heads, torch.float32)  # the general kernel


@pytest.mark.parametrize(("heads", "queries_each"), [(16, 1), (40, 1), (16, 3), (128, 1)])
@pytest.mark.parametrize("sinks", [0, 1, 4])
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(("short", "idle"), [(28, False), (300, False), (300, True)])
def test_long_sequences_among_short_ones(short, idle, name, sinks, heads, queries_each):
    """Many blocks share a segment though few share most: a block for each row joins its parts.

    Also where there are more segments than blocks, and where there could be, because many
    sequences have no queries in this call.
    """
    config = tt.latent_preset(name, 512, 64, sink_tokens=sinks, recent_window=4 * sinks)
    lengths = [90, 15000, *[40] * short, 6000, 3]
    q_lens = [queries_each, queries_each, *[0 if idle else queries_each] * short, queries_each, 1]
    case = make_case(config, lengths, q_lens, tail=sinks > 0, dtype=torch.bfloat16)
    check(case, heads, torch.bfloat16)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("kind", CENTERS)
@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("grid", ["uniform", "lloyd"])
def test_tail_and_own_tokens(grid, dtype, kind, rotated, own):
    rope_dtype = torch.float16 if dtype == torch.float16 else torch.bfloat16
    config = tt.LatentConfig(
        512, 64, 5, grid, 64, sink_tokens=3, recent_window=40, rope_dtype=rope_dtype
    )
    lengths, q_lens = [145, 20, 380, 6], [1, 4, 2, 5]
    case = make_case(config, lengths, q_lens, center=kind, dtype=dtype, tail=True, rotated=rotated)
    options = {"rotated": rotated}
    if own:
        latent, rope = case.own()
        if rotated:
            latent = tt.rotate_latent(latent, case.tables)
        options |= {"latent_new": latent, "rope_new": rope}
    assert case.tail is not None
    rings = Rings(config, len(case.tail.ring), case.max_q_len)
    valid = torch.from_numpy(rings.valid(case.tail.slots.clamp(min=0).tolist(), lengths))
    for tail in (case.tail, case.tail._replace(valid=valid)):
        check(case, 12, dtype, **{**options, "tail": tail})


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", BOTH)
def test_more_segments_than_blocks(name, heads):
    """Equal lengths, then unequal ones: whole segments, and a list that is cut anywhere."""
    config = tt.latent_preset(name, 512, 64, sink_tokens=0, recent_window=0)
    for lengths in ([70] * 300, [1 + 37 * i % 200 for i in range(320)]):
        case = make_case(config, lengths, [1] * len(lengths), dtype=torch.bfloat16)
        check(case, heads, torch.bfloat16)


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize(("bits", "grid"), KEY_TILES + ROW_TILES)
def test_every_stage_is_filled_again(bits, grid, heads):
    """A block reads a sequence of many more units than it has stages, from end to end.

    There are as many sequences as blocks, and all are the same one: so are their results.
    """
    config = tt.LatentConfig(512, 64, bits, grid, sink_tokens=0, recent_window=0)
    one = make_case(config, [1300], [1], dtype=torch.bfloat16)
    q = queries(one, heads, torch.bfloat16)
    count = 2 * torch.cuda.get_device_properties("cuda").multi_processor_count
    many = one._replace(
        lengths=count * one.lengths,
        q_lens=count * one.q_lens,
        block_table=one.block_table.repeat(count, 1),
    )
    out, lse = on_device(many, [t.repeat(count, 1, 1) for t in q])
    expected = attend(one, q, mla_attention_reference)
    limits = UNIT[torch.bfloat16], of_logarithms(kernel_of(one, heads, torch.bfloat16))
    assert_close((out[:1], lse[:1]), expected, *limits)
    assert torch.equal(out, out[:1].expand_as(out))
    assert torch.equal(lse, lse[:1].expand_as(lse))


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("name", BOTH)
def test_many_blocks_share_a_segment(name, heads):
    """So many that a second kernel joins their parts; references move up and down on the way."""
    config = tt.latent_preset(name, 512, 64)
    case = make_case(config, [9000, 2500], [1, 1], dtype=torch.bfloat16, tail=True)
    q_latent, q_rope = queries(case, heads, torch.bfloat16)
    q = 4 * q_latent, 4 * q_rope
    actual = on_device(case, q)
    out, lse = attend(case, q, mla_attention_reference)
    error = (actual[0].double() - out).norm(dim=-1) / out.norm(dim=-1)
    assert float(error.max()) < UNIT[torch.bfloat16]
    more = of_logarithms(kernel_of(case, heads, torch.bfloat16)) - of_logarithms("general")
    limit = 3e-3 + 4 * more  # queries are four times as long
    assert float((actual[1].double() - lse).abs().max()) < limit


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", BOTH)
def test_short_sequences_beside_a_long_one(name, heads):
    """A block attends to several whole segments, whose parts a second kernel joins all the same."""
    config = tt.latent_preset(name, 512, 64, sink_tokens=2, recent_window=20)
    lengths = [6000] + [1 + 7 * i % 90 for i in range(39)]
    case = make_case(config, lengths, [1] * len(lengths), dtype=torch.bfloat16, tail=True)
    check(case, heads, torch.bfloat16)


@pytest.mark.parametrize("heads", [16, 40])
@pytest.mark.parametrize("name", BOTH)
def test_many_queries_beside_single_ones(name, heads):
    """Segments are numbered by tokens, not for the most queries that a sequence has."""
    config = tt.latent_preset(name, 512, 64)
    case = make_case(config, [300, 7, 150, 70, 0, 90], [40, 1, 1, 2, 0, 1], dtype=torch.bfloat16)
    check(case, heads, torch.bfloat16)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("name", BOTH)
def test_exact_keys_of_several_blocks(name, heads):
    """A window that is longer than the part of a block."""
    config = tt.latent_preset(name, 512, 64, sink_tokens=4, recent_window=250)
    for lengths, q_lens in (([700, 1], [1, 1]), ([900, 300], [2, 1])):
        case = make_case(config, lengths, q_lens, dtype=torch.bfloat16, tail=True)
        check(case, heads, torch.bfloat16)


@pytest.mark.parametrize("copies", [1, 40, 300])
@pytest.mark.parametrize("heads", [1, 16, 40])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("dims", "bits", "grid"),
    [((512, 64), 5, "uniform"), ((512, 64), 4, "lloyd"), ((256, 32), 8, None), ((128, 0), 3, None)],
    ids=str,
)
def test_few_exact_latents(dims, bits, grid, own, heads, copies):
    """Up to eight exact tokens of up to eight queries are apart from the units of others.

    One kernel attends to them and another joins them, or, with more segments than blocks, the
    blocks themselves.
    """
    config = tt.LatentConfig(*dims, bits, grid, 32, sink_tokens=1, recent_window=1)
    lengths, q_lens = [1, 2, 9, 70, 300, 300, 0, 40, 1200], [1, 2, 7, 8, 9, 1, 0, 6, 1]
    case = make_case(config, lengths, q_lens, dtype=torch.bfloat16, tail=True)
    latent, rope = case.own()
    options = {"latent_new": latent, "rope_new": rope} if own else {}
    if copies == 1:
        check(case, heads, torch.bfloat16, **options)
        return
    q = queries(case, heads, torch.bfloat16)
    wanted = attend(case, q, mla_attention_reference, **options)
    many = tuple(x.repeat(copies, 1, 1) for x in q)
    options = {name: x.repeat(copies, 1) for name, x in options.items()}
    out, lse = on_device(repeated(case, copies), many, **options)
    logarithms = of_logarithms(kernel_of(case, heads, torch.bfloat16))
    for part in (slice(0, len(q[0])), slice(-len(q[0]), None)):
        assert_close((out[part], lse[part]), wanted, UNIT[torch.bfloat16], logarithms)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("name", BOTH)
def test_first_tokens_without_recent_ones(name, dtype, heads):
    """Few exact tokens of few queries, and of many."""
    config = tt.latent_preset(name, 512, 64, sink_tokens=3, recent_window=0)
    lengths, q_lens = [1, 40, 9, 70, 300], [1, 8, 9, 30, 1]
    case = make_case(config, lengths, q_lens, dtype=dtype, tail=True)
    check(case, heads, dtype)


@pytest.mark.parametrize("window", [1, 64])
@pytest.mark.parametrize("name", BOTH)
def test_a_nan_stays_with_those_who_see_it(name, window):
    """A call's later token of NaN leaves the earlier ones' results alone."""
    config = tt.latent_preset(name, 512, 64, recent_window=window)
    case = make_case(config, [200], [3], dtype=torch.bfloat16, tail=True)
    latent, rope = case.own()
    q = queries(case, 16, torch.bfloat16)
    clean = on_device(case, q, latent_new=latent, rope_new=rope)
    spoiled = latent.clone()
    spoiled[2, 7] = torch.nan
    out, lse = on_device(case, q, latent_new=spoiled, rope_new=rope)
    # sums of such keys take another way, and round differently
    assert float((out[:2] - clean[0][:2]).abs().max()) < 0.02
    assert torch.equal(lse[:2], clean[1][:2])
    assert bool(out[2].isnan().any())


def repeated(case: Case, copies: int) -> Case:
    """So many copies of the case's sequences, which share their pages and their tail."""
    tail = case.tail and case.tail._replace(slots=case.tail.slots.repeat(copies))
    return case._replace(
        tail=tail,
        block_table=case.block_table.repeat(copies, 1),
        lengths=case.lengths * copies,
        q_lens=case.q_lens * copies,
    )


def stored_again(case: Case, latent: torch.Tensor, rope: torch.Tensor) -> Case:
    """The case of one sequence, stored again with other latents and raw channels."""
    position = torch.arange(case.lengths[0])
    pages = case.block_table[0, position // case.config.page_size].long()
    slots = pages * case.config.page_size + position % case.config.page_size
    cache = case.cache.clone()
    tt.mla_store(latent, rope, cache, slots, case.config, case.tables)
    return case._replace(latent=latent, rope=rope, cache=cache)


@pytest.mark.parametrize("part", ["latent", "rope"])
@pytest.mark.parametrize("dim", [256, 512])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", ["k4u", "k5u", "k8", "k4", "k3"])
def test_a_nan_in_codes_stays_with_those_who_see_it(name, heads, dim, part):
    """A later token of NaN leaves earlier queries of the same block alone, an earlier one none."""
    config = tt.latent_preset(name, dim, 64)
    for length in (2, 40, 200):
        case = make_case(config, [length], [2], dtype=torch.bfloat16)
        q = queries(case, heads, torch.bfloat16)
        clean = on_device(case, q)
        for at in (-1, 0, length // 2):
            latent, rope = case.latent.clone(), case.rope.clone()
            (latent if part == "latent" else rope)[at, 7] = torch.nan
            out, lse = on_device(stored_again(case, latent, rope), q)
            seen = range(2) if at >= 0 and at < length - 1 else range(1, 2)
            assert all(bool(out[i].isnan().all()) and bool(lse[i].isnan().all()) for i in seen)
            if len(seen) == 1:
                assert torch.equal(out[0], clean[0][0]) and torch.equal(lse[0], clean[1][0])


@pytest.mark.parametrize(
    ("tokens", "first", "copies"), [(200, 70, 1), (200, 199, 1), (700, 300, 264)]
)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", BOTH)
def test_scores_of_minus_infinity(name, heads, tokens, first, copies):
    """Tokens with scores of -inf have no weight, also if they are the first ones.

    Of many sequences every block has whole ones, and begins with several units of such tokens.
    """
    config = tt.latent_preset(name, 512, 64)
    case = make_case(config, [tokens], [1], dtype=torch.bfloat16)
    q_latent, q_rope = queries(case, heads, torch.bfloat16)
    q_rope[..., 7] = q_rope[..., 7].abs() + 1
    rope = case.rope.clone()
    rope[:first, 7] = -torch.inf
    rope[first + 20 :: 50, 7] = -torch.inf
    case = stored_again(case, case.latent, rope)
    expected = attend(case, (q_latent, q_rope), mla_attention_reference)
    many = repeated(case, copies)
    kernel = kernel_of(many, heads, torch.bfloat16)
    out, lse = on_device(many, (q_latent.repeat(copies, 1, 1), q_rope.repeat(copies, 1, 1)))
    for i in {0, copies // 2, copies - 1}:
        actual = out[i : i + 1], lse[i : i + 1]
        assert_close(actual, expected, UNIT[torch.bfloat16], of_logarithms(kernel))


@pytest.mark.parametrize("name", BOTH)
def test_padding_behind_the_last_sequence(name):
    config = tt.latent_preset(name, 512, 64)
    case = make_case(config, [90], [1], dtype=torch.bfloat16)
    q = randn(4, 16, 512, seed=3).bfloat16(), randn(4, 16, 64, seed=4).bfloat16()
    out, lse = on_device(case, q)
    assert not out[1:].any()
    assert bool((lse[1:] == -torch.inf).all())


@pytest.mark.parametrize("max_q_len", [1, 64])
@pytest.mark.parametrize("heads", [3, 16, 40, 64])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", BOTH)
def test_no_sequences(name, dtype, heads, max_q_len):
    case = make_case(tt.latent_preset(name, 512, 64), [], [], dtype=dtype)
    for tokens in (0, 4):
        q_latent = randn(tokens, heads, 512, seed=3, dtype=dtype)
        q = q_latent, randn(tokens, heads, 64, seed=4, dtype=dtype)
        out, lse = on_device(case, q, max_q_len=max_q_len)
        assert not out.any()
        assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize("name", BOTH)
def test_lengths_of_a_captured_call_may_change(name):
    config = tt.latent_preset(name, 512, 64)
    case = make_case(config, [500, 130], [1, 1], dtype=torch.bfloat16)
    there = torch.device("cuda")
    q = [t.to(there) for t in queries(case, 16, torch.bfloat16)]
    lengths, cu = int32(500, 130, device=there), case.cu_seqlens_q.to(there)
    constants = case.config, to_device(case.tables, there)
    pages = case.cache.to(there), case.block_table.to(there)

    def call():
        return tt.mla_attention(
            *q, *pages, lengths, *constants, softmax_scale=0.08, cu_seqlens_q=cu
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for new in ((500, 130), (64, 129), (1, 0)):
        lengths.copy_(int32(*new))
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(captured, call(), strict=True))


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("heads", [3, 24, 40])
@pytest.mark.parametrize("name", BOTH)
def test_what_memory_held_before_does_not_matter(name, heads, tail):
    """Behind the last key a tile has scores and scales of whatever was there."""
    config = tt.latent_preset(name, 512, 64, sink_tokens=1, recent_window=1)
    case = make_case(config, [70, 300, 0, 5], [1, 4, 0, 0], dtype=torch.bfloat16, tail=tail)
    q = queries(case, heads, torch.bfloat16)
    first = on_device(case, q)
    for size in (1, 1e3, 1e-3, 1e4, torch.inf):
        other = size * torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
        torch.mm(other, other)
        again = on_device(case, q)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("cu", WRONG_STARTS)
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [9, 2, 1]])
@pytest.mark.parametrize("heads", [3, 16, 40])
@pytest.mark.parametrize("name", BOTH)
def test_wrong_starts_of_queries_write_nowhere_else(name, heads, q_lens, cu):
    config = tt.latent_preset(name, 512, 64, sink_tokens=1, recent_window=1)
    case = make_case(config, [70, 40, 33], q_lens, dtype=torch.bfloat16, tail=True)
    q = queries(case, heads, torch.bfloat16)
    outs, out = with_space_around(tuple(q[0].shape), torch.bfloat16, "cuda")
    all_lse, lse = with_space_around(tuple(q[0].shape[:2]), torch.float32, "cuda")
    on_device(case, q, cu_seqlens_q=int32(*cu), out=out, lse=lse)
    assert_space_around_is_left(outs)
    assert_space_around_is_left(all_lse)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", BOTH)
def test_pages_that_do_not_exist(name, heads):
    """They are not read, wherever the table has them, and other sequences do not notice."""
    config = tt.latent_preset(name, 512, 64)
    case = make_case(config, [1500, 700], [1, 1], dtype=torch.bfloat16)
    q = queries(case, heads, torch.bfloat16)
    whole = on_device(case, q)
    table = case.block_table.clone()
    table[0, 2], table[0, 7:11], table[0, -1] = -1, 1 << 30, -(1 << 30)
    broken = on_device(case._replace(block_table=table), q)
    assert all(torch.equal(x[1], y[1]) for x, y in zip(whole, broken, strict=True))


@pytest.mark.parametrize("window", [2, 20])
@pytest.mark.parametrize("heads", [3, 20])
@pytest.mark.parametrize(("bits", "grid"), KEY_TILES + ROW_TILES)
def test_tiny_attention_for_the_sanitizer(bits, grid, heads, window):
    config = tt.LatentConfig(512, 64, bits, grid, 32, sink_tokens=1, recent_window=window)
    case = make_case(config, [66, 3], [1, 2], dtype=torch.bfloat16, tail=True)
    check(case, heads, torch.bfloat16)
