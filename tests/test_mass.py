"""The attention mass of tokens against float64, and against what attention says of its own softmax.

As in attention_cases, stale bytes, tails and unneeded page numbers are garbage that would show.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torch_turboquant as tt
from tests.attention_cases import RANDOM_CALLS, build, starts
from tests.helpers import FLOATS, assert_same_bytes, int32, randn, to_device
from torch_turboquant.config import CacheConfig
from torch_turboquant.ops.mass import paged_mass_reference

ops = torch.ops.turboquant

CLOSE = 1e-3  # of a mass


def config(name="k4v4u", d=64, page_size=16, **others):
    return tt.preset(name, d, page_size=page_size, **{"sink_tokens": 0, **others})


def masses(case, device="cpu", room=None, lse=None, **options):
    """What paged_mass adds to zeros for a case of attention_cases: float32 [seqs, kv_heads, n]."""
    args, kwargs = case.arguments(**options)
    args = tuple(to_device(a, device) for a in args)
    kwargs = {name: to_device(a, device) for name, a in kwargs.items()}
    if lse is None:
        _, lse = tt.paged_attention(*args, **kwargs)
    kwargs.pop("sink_logits", None)
    room = room or int(case.seq_lens.max())
    mass = torch.zeros(len(case.seq_lens), case.cache.shape[1], room, device=device)
    tt.paged_mass(args[0], lse.to(device), mass, *args[1:], **kwargs)
    return mass, lse


def expected(case, lse, room=None, **options):
    args, kwargs = case.arguments(**options)
    kwargs.pop("sink_logits", None)
    room = room or int(case.seq_lens.max())
    mass = torch.zeros(len(case.seq_lens), case.cache.shape[1], room)
    return paged_mass_reference(args[0], lse.cpu(), mass, *args[1:], **kwargs)


def assert_close(mass, want, spread=1.0):
    """Every mass by itself. spread: the standard deviation of scores, which errors grow with."""
    error = (mass.cpu().double() - want).abs() / max(1.0, spread)
    assert want.sum() > 1, "the case has no mass"
    assert (error <= CLOSE * want + 1e-7 * want.max()).all(), float(
        (error / want).nan_to_num(0).max()
    )


def check(case, device, **options):
    mass, lse = masses(case, device, **options)
    scale = options.get("softmax_scale") or case.config.head_dim**-0.5
    spread = abs(scale) * case.config.head_dim**0.5
    assert_close(mass, expected(case, lse, **options), spread)
    return mass, lse


# ---- against float64


@pytest.mark.parametrize("name", ["k4v4u", "k5v4u", "k8v8", "k3v2", "k4v4", "k2v2"])
@pytest.mark.parametrize("d", [48, 64, 80, 128])
def test_widths_and_head_dims(name, d, device):
    check(build(config(name, d), [70, 33]), device)


@pytest.mark.parametrize("d", [16, 112, 192, 256, 512, 576])
def test_other_head_dims(d, device):
    check(build(config(d=d, page_size=32), [40, 70], [3, 1]), device)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_page_sizes_and_dtypes(page_size, dtype, device):
    case = build(config(page_size=page_size), [150, 1, 37], center="scaled", dtype=dtype)
    check(case, device)


@pytest.mark.parametrize("q_heads", [2, 6, 32])
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [5, 0, 20], [33, 7, 1]])
def test_groups_and_query_counts(q_heads, q_lens, device):
    """Up to 528 rows of a KV head: more than a block or a set of rows holds."""
    check(build(config(), [100, 64, 33], q_lens, q_heads=q_heads), device)


@pytest.mark.parametrize("d", [128, 256])
@pytest.mark.parametrize("name", ["k4v4u", "k5v4u", "k8v8"])
def test_many_steps_of_a_warp(name, d, device):
    """Addresses of pages are found for 16 or 32 steps at a time, and eight warps take turns."""
    for page_size in (16, 64):
        case = build(config(name, d, page_size), [9000, 4501], [2, 1])
        check(case, device)


@pytest.mark.cuda
def test_missing_pages_have_no_mass():
    """Of a step's two tiles only one may exist. The CPU refuses such pages; CUDA cannot."""
    case = build(config(), [200])
    mass, lse = masses(case, "cuda")
    case.block_table[0, [3, 8]] = 10**6
    case.block_table[0, 11] = -1
    part, _ = masses(case, "cuda", lse=lse)
    gone = torch.zeros(200, dtype=torch.bool)
    for page in (3, 8, 11):
        gone[16 * page : 16 * page + 16] = True
    assert not part[..., gone].any()
    assert_same_bytes(part[..., ~gone], mass[..., ~gone])


@pytest.mark.parametrize("options", [
    {"sliding_window": 20},
    {"sliding_window": 1},
    {"soft_cap": 2.0},
    {"softmax_scale": -0.3},
    {"soft_cap": 30.0, "sliding_window": 65, "softmax_scale": 0.2},
], ids=str)  # fmt: skip
def test_options(options, device):
    check(build(config(), [100, 30], [4, 9], center=True), device, **options)


def test_long_sequences_of_several_spans(device):
    check(build(config(page_size=64), [5000, 2049, 1], q_heads=8), device)
    check(build(config(page_size=64), [4100, 300], [40, 2]), device, sliding_window=2500)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**RANDOM_CALLS, window=st.integers(1, 20))
def test_everything_at_once(
    lengths,
    queries,
    name,
    page_size,
    dtype,
    group,
    sliding_window,
    soft_cap,
    tail,
    center,
    window,
    sink_tokens,
    seed,
    device,
):
    q_lens = [min(n, m) for n, m in zip(lengths, queries, strict=False)]
    if not any(q_lens):
        return
    case = build(
        config(name, 48, page_size, recent_window=window, sink_tokens=sink_tokens),
        lengths,
        q_lens,
        q_heads=2 * group,
        dtype=dtype,
        center=center,
        tail=tail,
        seed=seed,
    )
    check(case, device, sliding_window=sliding_window, soft_cap=soft_cap)


def test_tiny(device):
    """Every shape of the kernel and every way to copy and expand codes, for compute-sanitizer."""
    for name, d, page_size, q_lens in (
        ("k4v4u", 64, 32, [1, 1]),
        ("k4v4", 48, 16, [8, 2]),
        ("k5v4u", 80, 16, [9, 1]),
        ("k8v8", 144, 32, [17, 2]),
        ("k3v2", 64, 64, [33, 1]),
        ("k2v2", 320, 16, [2, 1]),
    ):
        tail = {"sink_tokens": 2, "recent_window": 3}
        case = build(config(name, d, page_size, **tail), [70, 11], q_lens, tail=True)
        check(case, device)


# ---- what a mass means


def dense_masses(case, k, scale):
    """Softmax weights of all queries over keys as they are, in plain PyTorch."""
    found = torch.zeros(len(k), case.cache.shape[1], int(case.seq_lens.max()), dtype=torch.float64)
    cu = case.cu.tolist() if case.cu is not None else range(len(k) + 1)
    for s, keys in enumerate(k):
        queries = case.q[cu[s] : cu[s + 1]].double().unflatten(1, (keys.shape[1], -1))
        score = scale * torch.einsum("mhgd,jhd->hgmj", queries, keys.double())
        n, m = score.shape[3], score.shape[2]
        seen = torch.arange(n) <= torch.arange(n - m, n)[:, None]
        weights = score.masked_fill(~seen, -torch.inf).softmax(-1)
        found[s, :, :n] = weights.sum((1, 2))
    return found


def test_masses_are_the_weights_of_dense_attention(device):
    """Over what cache_load decodes: nothing in common with the reference."""
    case = build(config(d=128), [90, 41], [6, 1], center=True)
    k, _ = tt.cache_load(
        case.cache, case.block_table, case.seq_lens, case.config, case.tables, 90, torch.float32
    )
    lengths = case.seq_lens.tolist()
    mass, _ = masses(case, device)
    decoded = [k[s, :n] for s, n in enumerate(lengths)]
    assert_close(mass, dense_masses(case, decoded, 128**-0.5))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("tail", [False, True])
def test_masses_of_a_call_sum_to_its_rows(tail, own, device):
    """Whatever keys are exact: the weights of a row sum to 1, less the share of a learned sink."""
    window = {"sink_tokens": 3, "recent_window": 5} if tail else {}
    lengths, q_lens = [60, 17, 4], [4, 2, 4]
    case = build(config(**window), lengths, q_lens, tail=tail, dtype=torch.float16)
    options = {"sink_logits": torch.tensor([3.0, -torch.inf, 0.0, 1.0])}
    if own:
        parts = ([part[-n:] for part, n in zip(x, q_lens, strict=True)] for x in (case.k, case.v))
        options |= zip(("k_new", "v_new"), map(torch.cat, parts), strict=True)
    mass, lse = masses(case, device, **options)
    taken = torch.exp(options["sink_logits"] - lse.cpu()).view(-1, 2, 2).sum(2)  # [tokens, kv]
    cu = starts(q_lens).tolist()
    for s in range(3):
        want = 2 * q_lens[s] - taken[cu[s] : cu[s + 1]].sum(0)
        assert torch.allclose(mass[s].sum(-1).cpu(), want, rtol=1e-3)
    assert_close(mass, expected(case, lse, **options))


@pytest.mark.parametrize("q_lens", [[1, 1], [5, 3], [40, 2]])
def test_masses_of_prompts_need_no_pages(q_lens, device):
    """Their tokens are the call's own, the sinks, too: block_table has no columns."""
    case = build(config(sink_tokens=4, recent_window=5), q_lens, q_lens, tail=True, store_new=False)
    own = dict(zip(("k_new", "v_new"), map(torch.cat, (case.k, case.v)), strict=True))
    case = case._replace(block_table=case.block_table[:, :0].contiguous())
    check(case, device, **own)


def test_exact_keys_count_with_their_own_scores(device):
    """Sinks and the window of a query come from the tail, older keys and other calls from codes."""
    case = build(
        config("k2v2", sink_tokens=2, recent_window=4), [40, 9], [3, 1], tail=True, q_heads=2
    )
    with_tail, lse = masses(case, device)
    plain = case._replace(tail=None)
    without, _ = masses(plain, device, lse=lse)  # of the same softmax
    moved = (with_tail - without).abs().cpu() > 1e-6
    # positions of the queries: 37, 38, 39 and 8; each sees its last four keys exactly
    for s, exact in ((0, {0, 1, *range(34, 40)}), (1, {0, 1, *range(5, 9)})):
        assert set(moved[s].any(0).nonzero().flatten().tolist()) == exact
    assert_close(without, expected(plain, lse))


def test_a_tail_that_holds_less(device):
    """tail.valid says what the ring holds; the rest of the window comes from codes."""
    case = build(config(sink_tokens=2, recent_window=6), [40, 9], tail=True)
    valid = torch.zeros(4, 2, dtype=torch.int32)
    valid[2], valid[1] = int32(1, 37), int32(2, 0)  # of sequence 0, of sequence 1
    held = case._replace(tail=tt.Tail(case.tail.ring, case.tail.slots, valid))
    mass, lse = check(held, device)
    assert not torch.equal(mass, masses(case, device, lse=lse)[0])


def test_it_adds_to_what_is_there(device):
    case = build(config(), [50, 20], [2, 2])
    once, lse = masses(case, device, room=64)
    before = randn(2, 2, 64, seed=3).to(device)
    args = [to_device(a, device) for a in case.arguments()[0]]
    options = {"cu_seqlens_q": case.cu.to(device), "max_q_len": 2}
    mass = before.clone()
    tt.paged_mass(args[0], lse, mass, *args[1:], **options)
    assert_same_bytes(mass[0, :, 50:], before[0, :, 50:])  # behind the sequence
    assert_same_bytes(mass[1, :, 20:], before[1, :, 20:])
    assert torch.allclose(mass, before + once, atol=1e-6)
    tt.paged_mass(args[0], lse, mass, *args[1:], **options)
    assert torch.allclose(mass, before + 2 * once, atol=1e-6)


# ---- rows and tokens without meaning


def test_rows_without_keys_and_padding_add_nothing(device):
    case = build(config(), [30, 0, 12], [2, 0, 1])
    padded = case._replace(q=torch.cat([case.q, torch.full((2, 4, 64), torch.nan)]))
    mass, lse = masses(padded, device)
    assert_close(mass, expected(case, lse[:3]))
    assert not mass[1].any() and lse[3:].isneginf().all()
    silent = torch.full_like(lse, -torch.inf)
    assert not masses(padded, device, lse=silent)[0].any()


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_a_nan_stays_where_it_is(soft_cap, device):
    case = build(config(), [50, 20], [3, 1])
    page, token = divmod(int(case.slots[0][7]), 16)
    place = case.config.record.key_scale(token)
    case.cache[page, 1, place : place + 2] = torch.tensor([0x00, 0x7E], dtype=torch.uint8)
    _, lse = masses(build(config(), [50, 20], [3, 1]), device)
    mass, _ = masses(case, device, lse=lse, soft_cap=soft_cap)
    assert mass.isnan().nonzero().tolist() == [[0, 1, 7]]
    case.q[1, 3] = torch.inf  # a query of KV head 1, which sees tokens up to 48
    mass, _ = masses(case, device, lse=lse, soft_cap=soft_cap)
    assert mass[0, 1, :49].isnan().all()
    assert not mass[0, 0].isnan().any() and not mass[1].isnan().any()
    assert not mass[0, 1, 49:].isnan().any()


def test_pages_that_a_window_has_left_may_be_gone(device):
    case = build(config(), [100], [4])
    mass, lse = masses(case, device, sliding_window=20)
    case.block_table[0, :4] = -5
    assert_same_bytes(masses(case, device, lse=lse, sliding_window=20)[0], mass)


# ---- the same bytes


def test_others_and_threads_change_nothing(device):
    lengths, q_lens = [2500, 40, 300], [20, 3, 1]
    case = build(config(sink_tokens=2, recent_window=4), lengths, q_lens, tail=True, q_heads=8)
    mass, lse = masses(case, device)
    assert_same_bytes(masses(case, device, lse=lse)[0], mass)
    cu = case.cu.tolist()
    for s, n in enumerate(lengths):
        alone = case._replace(
            q=case.q[cu[s] : cu[s + 1]],
            block_table=case.block_table[s : s + 1],
            seq_lens=case.seq_lens[s : s + 1],
            cu=int32(0, q_lens[s]),
            tail=tt.Tail(case.tail.ring, case.tail.slots[s : s + 1]),
        )
        one, _ = masses(alone, device, lse=lse[cu[s] : cu[s + 1]])
        assert_same_bytes(one[0], mass[s, :, :n])
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        assert_same_bytes(masses(case, device, lse=lse)[0], mass)
    finally:
        torch.set_num_threads(threads)


def test_all_levels_agree():
    from torch_turboquant import _library

    case = build(config("k3v3", 80, sink_tokens=2, recent_window=4), [200, 9], tail=True)
    mass, lse = masses(case)
    for level in _library.cpu_levels():
        with _library.force_cpu_level(level):
            assert_same_bytes(masses(case, lse=lse)[0], mass)


# ---- limits


def test_room_for_fewer_tokens():
    case = build(config(), [50, 20])
    with pytest.raises(RuntimeError, match="sequence 0 has 50 tokens but mass has room for 48"):
        masses(case, room=48)


@pytest.mark.cuda
def test_room_for_fewer_tokens_on_cuda():
    """Nobody waits for the device: masses that have no room are left out."""
    case = build(config(sink_tokens=2, recent_window=4), [50, 20], tail=True)
    whole, lse = masses(case, "cuda")
    part, _ = masses(case, "cuda", room=30, lse=lse)
    assert_same_bytes(part, whole[..., :30])


def test_one_graph(device):
    case = build(config(), [50, 20])
    mass, lse = masses(case, device)
    args = [to_device(a, device) for a in case.arguments()[0]]

    def step(q, lse, table, lengths):
        mass = torch.zeros(2, 2, 50, device=q.device)
        tt.paged_mass(q, lse, mass, args[1], table, lengths, *args[4:])
        return mass

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same_bytes(compiled(args[0], lse, *args[2:4]), mass)


@pytest.mark.cuda
def test_a_captured_call_follows_its_tensors():
    case = build(config(sink_tokens=2, recent_window=4), [50, 20], tail=True)
    want, lse = masses(case, "cuda")
    args, kwargs = case.arguments()
    args = [to_device(a, "cuda") for a in args]
    kwargs = {name: to_device(a, "cuda") for name, a in kwargs.items()}
    mass, lengths = torch.zeros_like(want), args[3].clone()
    args[3].copy_(int32(3, 5))
    graph = torch.cuda.CUDAGraph()
    tt.paged_mass(args[0], lse, mass, *args[1:], **kwargs)
    with torch.cuda.graph(graph):
        tt.paged_mass(args[0], lse, mass, *args[1:], **kwargs)
    mass.zero_()
    args[3].copy_(lengths)
    graph.replay()
    assert_same_bytes(mass, want)


@pytest.mark.cuda
@pytest.mark.parametrize("q_len", [1, 32])
def test_cpu_and_cuda_agree(q_len):
    case = build(
        config(d=128, sink_tokens=2, recent_window=4), [700, 300], [q_len, q_len], tail=True
    )
    _, lse = masses(case)
    assert_close(masses(case, "cuda", lse=lse)[0], masses(case, lse=lse)[0].double())


def test_a_config_is_no_raw_number():
    """Grids are part of the config: a table of the other grid is refused as in paged_attention."""
    case = build(config("k4v4u"), [20])
    other = CacheConfig(64, 4, 4, page_size=16)
    with pytest.raises(ValueError, match="do not fit the config"):
        tt.paged_mass(
            case.q,
            torch.zeros(1, 4),
            torch.zeros(1, 2, 20),
            case.cache,
            case.block_table,
            case.seq_lens,
            other,
            case.tables,
        )
