"""Attention over latents against the reference in float64, and with folded matrices."""

import pytest
import torch

import torch_turboquant as tt
from tests.helpers import FLOATS, assert_same_bytes, int32, randn
from tests.mla_cases import CENTERS, assert_close, attend, make_case, queries
from torch_turboquant import _library
from torch_turboquant.format import LATENT_BITS, LATENT_DIMS
from torch_turboquant.ops.mla import mla_attention_reference
from torch_turboquant.tail import Rings

# ---- attention


@pytest.mark.parametrize("bits", LATENT_BITS)
@pytest.mark.parametrize("grid", ["lloyd", "uniform"])
@pytest.mark.parametrize("transform", [True, False])
def test_attention_of_every_width(transform, grid, bits):
    if bits == 8:
        grid = None
    for d, rope_dim, kind in zip(LATENT_DIMS, (32, 64, 0), CENTERS, strict=True):
        config = tt.LatentConfig(d, rope_dim, bits, grid, 32, transform=transform)
        case = make_case(config, [150, 33, 1], [1, 1, 1], center=kind)
        q = queries(case, 16)
        assert_close(attend(case, q), attend(case, q, mla_attention_reference))


@pytest.mark.parametrize("heads", [1, 16, 20, 24, 40, 128])
@pytest.mark.parametrize("q_lens", [[1, 1, 1, 1], [2, 5, 0, 3], [1, 4, 1, 0]])
def test_head_counts_and_lengths(heads, q_lens):
    """Sequences of no tokens, of one page and more than one block, with 0 to 5 queries."""
    config = tt.latent_preset("k4u", 128, 32, page_size=64)
    case = make_case(config, [70, 300, 0, 5], [0 if n == 2 else q for n, q in enumerate(q_lens)])
    q = queries(case, heads)
    assert_close(attend(case, q), attend(case, q, mla_attention_reference))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("kind", CENTERS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_tail_and_own_tokens(dtype, kind, rotated, own):
    config = tt.LatentConfig(128, 64, 5, "uniform", 32, sink_tokens=3, recent_window=9)
    lengths, q_lens = [45, 20, 80, 6], [1, 4, 2, 5]
    case = make_case(config, lengths, q_lens, center=kind, dtype=dtype, tail=True, rotated=rotated)
    options = {"rotated": rotated}
    if own:
        latent, rope = case.own()
        if rotated:
            latent = tt.rotate_latent(latent, case.tables)
        options |= {"latent_new": latent, "rope_new": rope}
    q = queries(case, 20, dtype)
    assert case.tail is not None
    rings = Rings(config, len(case.tail.ring), case.max_q_len)
    valid = torch.from_numpy(rings.valid(case.tail.slots.clamp(min=0).tolist(), lengths))
    for tail in (case.tail, case.tail._replace(valid=valid)):
        options["tail"] = tail
        actual, expected = (
            attend(case, q, **options),
            attend(case, q, mla_attention_reference, **options),
        )
        unit = {torch.float32: 4e-4, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
        assert_close(actual, expected, unit)


def test_own_tokens_that_nobody_has_stored():
    """A first chunk reads no page; the call's own tokens may be stored later or never."""
    config = tt.latent_preset("k4", 128, 32, page_size=32, sink_tokens=0, recent_window=0)
    tables = tt.make_latent_tables(config, 0)
    latent, rope = randn(40, 128, seed=1), randn(40, 32, seed=2)
    q = randn(40, 3, 128, seed=3), randn(40, 3, 32, seed=4)
    cache = torch.zeros(0, config.record_bytes, dtype=torch.uint8)
    out, lse = tt.mla_attention(
        *q,
        cache,
        torch.zeros(1, 0, dtype=torch.int32),
        int32(40),
        config,
        tables,
        softmax_scale=0.1,
        cu_seqlens_q=int32(0, 40),
        max_q_len=40,
        latent_new=latent,
        rope_new=rope,
    )
    keys = torch.cat([latent, rope], 1).double()
    score = 0.1 * torch.einsum("thc,jc->htj", torch.cat(q, 2).double(), keys)
    score = score.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
    expected = torch.einsum("htj,jc->thc", score.softmax(-1), latent.double())
    assert float((out - expected).abs().max()) < 1e-5
    assert float((lse.T - score.logsumexp(-1)).abs().max()) < 1e-5


@pytest.mark.parametrize("kind", CENTERS)
def test_attention_is_dense_attention_over_what_mla_load_decodes(kind):
    """Written without the reference: softmax over the decoded latents and raw channels."""
    config = tt.latent_preset("k5u", 256, 64, page_size=32)
    case = make_case(config, [90], [1], center=kind)
    q_latent, q_rope = queries(case, 20)
    out, lse = attend(case, (q_latent, q_rope))
    latent, rope = tt.mla_load(
        case.cache, case.block_table, int32(90), config, case.tables, 90, torch.float32
    )
    score = q_latent[0].double() @ latent[0].double().T + q_rope[0].double() @ rope[0].double().T
    score = 0.08 * score
    expected = score.softmax(-1) @ latent[0].double()
    assert_close((out[0], lse[0]), (expected, score.logsumexp(-1)))


def test_long_sequences_and_padding():
    """Several spans of keys; tokens behind the last sequence; other strides of queries."""
    config = tt.latent_preset("k5u", 512, 64)
    case = make_case(config, [4500, 2100], [1, 2])
    tokens = 5
    q = randn(16, tokens, 512, seed=3).transpose(0, 1), randn(tokens, 16, 96, seed=4)[..., 32:]
    actual, expected = attend(case, q), attend(case, q, mla_attention_reference)
    assert_close(actual, expected)
    assert not actual[0][3:].any()
    assert bool((actual[1][3:] == -torch.inf).all())


@pytest.mark.parametrize("tokens", [0, 4])
def test_no_sequences(tokens):
    case = make_case(tt.latent_preset("k4u", 256, 64), [], [])
    out, lse = attend(case, (randn(tokens, 16, 256, seed=3), randn(tokens, 16, 64, seed=4)))
    assert out.shape == (tokens, 16, 256)
    assert not out.any()
    assert bool((lse == -torch.inf).all())


def test_results_do_not_depend_on_threads_or_on_others():
    config = tt.latent_preset("k4u", 256, 64)
    case = make_case(config, [500, 2500, 90], [2, 1, 3], tail=True, center="center")
    q = queries(case, 16)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = attend(case, q)
        torch.set_num_threads(3)
        for actual, wanted in zip(attend(case, q), expected, strict=True):
            assert_same_bytes(actual, wanted)
    finally:
        torch.set_num_threads(threads)
    assert case.tail is not None
    alone = tt.mla_attention(
        *(part[2:3] for part in q),
        case.cache,
        case.block_table[1:2],
        int32(2500),
        config,
        case.tables,
        softmax_scale=0.08,
        tail=case.tail._replace(slots=case.tail.slots[1:2]),
    )
    for actual, wanted in zip(alone, expected, strict=True):
        assert_same_bytes(actual[0], wanted[2])


def test_all_levels_agree():
    """Bytes, decoded latents and attention are the same on every processor."""
    levels = _library.cpu_levels()
    assert "portable" in levels
    results = []
    for level in levels:
        with _library.force_cpu_level(level):
            parts = []
            for bits in LATENT_BITS:
                config = tt.LatentConfig(128, 32, bits, None, 32, sink_tokens=2, recent_window=5)
                case = make_case(config, [140, 20], [2, 1], tail=True, center="scales")
                parts += [case.cache, *attend(case, queries(case, 5))]
            results.append(parts)
    for other in results[1:]:
        for actual, wanted in zip(other, results[0], strict=True):
            assert_same_bytes(actual, wanted)


def test_a_nan_stays_in_its_sequence():
    config = tt.latent_preset("k4u", 128, 32)
    case = make_case(config, [30, 30], [1, 1])
    q = queries(case, 2)
    expected = attend(case, q)
    page = int(case.block_table[0, 0])
    first = config.record.rope(3, 0)
    case.cache[page, first : first + 2] = 0xFF
    out, _ = attend(case, q)
    assert bool(out[0].isnan().all())
    assert_same_bytes(out[1], expected[0][1])


def test_out_and_lse():
    config = tt.latent_preset("k4u", 128, 32)
    case = make_case(config, [30, 50], [1, 1])
    q = queries(case, 4)
    expected = attend(case, q)
    out, lse = torch.full_like(q[0], 7), torch.full((2, 4), 7.0)
    assert attend(case, q, out=out, lse=lse)[0] is out
    assert_same_bytes(out, expected[0])
    assert_same_bytes(lse, expected[1])
    assert_same_bytes(attend(case, q, out=out)[1], expected[1])


# ---- folding


@pytest.mark.parametrize("transform", [True, False])
@pytest.mark.parametrize("kind", CENTERS)
def test_folded_matrices_give_the_same_attention(kind, transform):
    """In the model's matrices instead of the op: the outputs of all heads, up to rounding."""
    config = tt.LatentConfig(
        256, 32, 4, "uniform", 32, sink_tokens=2, recent_window=7, transform=transform
    )
    heads, nope, v = 6, 24, 40
    w_uk, w_uv = randn(heads, nope, 256, seed=8) / 5, randn(heads, 256, v, seed=9) / 16
    results = []
    for rotated in (False, True):
        case = make_case(config, [100, 40], [1, 3], center=kind, tail=True, rotated=rotated)
        uk, uv = tt.fold_latent_rotation(w_uk, w_uv, case.tables) if rotated else (w_uk, w_uv)
        q_nope, q_rope = randn(4, heads, nope, seed=3), randn(4, heads, 32, seed=4)
        q_latent = torch.einsum("thn,hnr->thr", q_nope, uk)
        out, lse = attend(case, (q_latent, q_rope), rotated=rotated)
        results.append((torch.einsum("thr,hrv->thv", out, uv), lse, case.cache))
    (plain, lse, cache), (folded, folded_lse, folded_cache) = results
    assert_same_bytes(folded_cache, cache)
    # both round rotated queries to 16 bits, but not the same floats
    assert float((folded - plain).norm() / plain.norm()) < 2e-4
    assert float((folded_lse - lse).abs().max()) < 2e-4


def test_folded_matrices_keep_dtype_and_shape():
    config = tt.latent_preset("k4u", 128, 32)
    tables = tt.make_latent_tables(config, 0)
    w_uk, w_uv = randn(3, 8, 128, seed=1).bfloat16(), randn(3, 128, 5, seed=2).bfloat16()
    folded = tt.fold_latent_rotation(w_uk, w_uv, tables)
    for new, old in zip(folded, (w_uk, w_uv), strict=True):
        assert (new.dtype, new.shape) == (old.dtype, old.shape) and new.is_contiguous()
    assert_same_bytes(tt.rotate_latent(w_uk[0], tables), folded[0][0])


def test_folded_matrices_are_new_where_nothing_is_folded():
    """A model that changes them must not change its weights."""
    tables = tt.make_latent_tables(tt.latent_preset("k4u", 128, 32, transform=False), 0)
    given = randn(3, 8, 128, seed=1), randn(3, 128, 5, seed=2)
    before = [w.clone() for w in given]
    for new in tt.fold_latent_rotation(*given, tables):
        new.zero_()
    for old, kept in zip(given, before, strict=True):
        assert_same_bytes(old, kept)
