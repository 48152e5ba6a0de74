"""Centers: what layers learn from keys and queries, against float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_turboquant as tt
from tests.helpers import FLOATS, randn
from torch_turboquant.ops.center import (
    channel_scale,
    learn_center_reference,
    query_energy_reference,
)

ops = torch.ops.turboquant
# float32 sums of up to 512 numbers between float64 sums, and one rounding at the end
RELATIVE = 1e-5


def make_layers(count, shape, dtype=torch.float32, seed=0, by_token=True):
    """Keys as models have them: [batch, heads, tokens, d] of tensors that are stored by token."""
    batch, heads, tokens, d = shape
    layers = []
    for i in range(count):
        size = torch.logspace(-2, 2, d)[torch.randperm(d)]
        x = randn(batch, tokens, heads, d, seed=seed + i) * size + 3 * size * (i - 1)
        x = x.to(dtype)
        layers.append(x.transpose(1, 2) if by_token else x.transpose(1, 2).contiguous())
    return layers


def half_turned(d):
    """The partners of rotary embeddings that turn the first half of the channels."""
    partners, half = torch.arange(d), d // 2
    partners[:half] = (partners[:half] + half // 2) % half if half % 2 == 0 else partners[:half]
    return partners


def compare(keys, queries, skip, device):
    kv_heads, d = keys[0].shape[1], keys[0].shape[3]
    there = [[x.to(device) for x in layers] for layers in (keys, queries)]
    energy = tt.query_energy(there[1], kv_heads, skip)
    expected_energy = query_energy_reference(queries, kv_heads, skip)
    torch.testing.assert_close(energy.cpu().double(), expected_energy, rtol=RELATIVE, atol=0)

    mean = tt.learn_center(there[0], skip=skip)
    expected = learn_center_reference(keys, skip=skip)
    # the mean of numbers that nearly cancel is as good as their sizes allow
    size = torch.stack(keys)[:, :, :, skip:].double().abs().mean((1, 3))
    assert ((mean.cpu().double() - expected).abs() <= RELATIVE * size).all()

    partners = half_turned(d)
    found = tt.learn_center(there[0], energy.unbind(), partners.to(device), skip)
    assert torch.equal(found[:, 0], mean)
    expected = learn_center_reference(keys, energy.cpu().unbind(), partners, skip)
    torch.testing.assert_close(found[:, 1:].cpu().double(), expected[:, 1:], rtol=1e-4, atol=0)
    assert torch.equal(found[:, 2], 1 / found[:, 1])
    return found


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize(("tokens", "skip"), [(1, 0), (5, 4), (100, 4), (3000, 4)])
def test_against_float64(tokens, skip, by_token, dtype, device):
    for batch, kv_heads, group, d in ((1, 2, 4, 64), (2, 3, 1, 128), (3, 1, 7, 80)):
        keys = make_layers(3, (batch, kv_heads, tokens, d), dtype, 1, by_token)
        queries = make_layers(3, (batch, kv_heads * group, tokens, d), dtype, 11, by_token)
        compare(keys, queries, skip, device)


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("d", [6, 64])
def test_tiny_layers(d, by_token, device):
    """For compute-sanitizer (tests/sanitize_cuda.sh): one part and several."""
    for tokens in (3, 700):
        keys = make_layers(2, (1, 2, tokens, d), torch.bfloat16, 1, by_token)
        compare(keys, make_layers(2, (1, 4, tokens, d), torch.bfloat16, 11, by_token), 2, device)


@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    tokens=st.integers(1, 40),
    d=st.integers(1, 70),
    layers=st.integers(1, 4),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_any_shape(batch, kv_heads, group, tokens, d, layers, seed, data):
    skip = data.draw(st.integers(0, tokens - 1))
    keys = make_layers(layers, (batch, kv_heads, tokens, d), seed=seed)
    compare(keys, make_layers(layers, (batch, kv_heads * group, tokens, d), seed=seed), skip, "cpu")


def test_more_layers_than_one_launch_takes(device):
    keys = make_layers(130, (1, 2, 9, 16), torch.bfloat16)
    found = compare(keys, make_layers(130, (1, 4, 9, 16), torch.bfloat16, 7), 2, device)
    assert len(found) == 130


def test_a_long_prompt_far_from_zero(device):
    """The variance of channels whose mean is ten thousand times as large."""
    torch.manual_seed(0)
    keys = [torch.randn(1, 2, 70_000, 32) + 1e4]
    compare(keys, make_layers(1, (1, 2, 70_000, 32)), 4, device)


def test_largest_vectors(device):
    keys = make_layers(1, (1, 2, 20, 1024))
    compare(keys, make_layers(1, (1, 2, 20, 1024), seed=3), 0, device)


def test_a_row_is_what_a_cache_takes(device):
    config = tt.preset("k4v4", 64, sink_tokens=0, recent_window=0)
    keys = [x.to(device) for x in make_layers(2, (1, 2, 100, 64))]
    energies = tt.query_energy(keys, 2)
    partners = torch.arange(64, device=device)
    for layer, center in enumerate(tt.learn_center(keys, energies.unbind(), partners)):
        tables = tt.make_tables(config, layer, device, center)
        assert torch.equal(tables.center, center)


def test_numbers_that_are_none_stay_with_their_head(device):
    keys = make_layers(1, (1, 3, 20, 16))
    clean = tt.learn_center([x.to(device) for x in keys]).cpu()
    keys[0][0, 1, 7, 3] = torch.nan
    found = tt.learn_center([x.to(device) for x in keys]).cpu()
    assert found[0, 1, 3].isnan() and found.isnan().sum() == 1
    assert torch.equal(found[:, 0], clean[:, 0]) and torch.equal(found[:, 2], clean[:, 2])


@pytest.mark.cuda
def test_partners_out_of_range_on_a_gpu():
    """They cannot be refused without waiting: such channels are their own partners."""
    keys = [x.cuda() for x in make_layers(1, (1, 2, 20, 16))]
    energies = tt.query_energy(keys, 2).unbind()
    own = torch.arange(16).cuda()
    wrong = own.clone()
    wrong[3], wrong[5] = -1, 2**40
    found, expected = (tt.learn_center(keys, energies, p) for p in (wrong, own))
    assert torch.equal(found, expected)


def test_scales_of_heads_that_hold_nothing():
    """Keys or queries of zeros say nothing about channels: their scales are 1."""
    torch.manual_seed(0)
    center, variance, energy = torch.randn(3, 32), torch.rand(3, 32), torch.rand(3, 32)
    partners = (torch.arange(32) + 16) % 32
    whole = channel_scale(center, variance, energy, 100, partners)
    center[0] = variance[0] = energy[1] = 0
    found = channel_scale(center, variance, energy, 100, partners)
    assert torch.equal(found[2], whole[2])
    torch.testing.assert_close(found[:2], torch.ones(2, 32))
    # queries count by their share only
    torch.testing.assert_close(channel_scale(center, variance, 7 * energy, 100, partners), found)
    torch.testing.assert_close(found.mean(-1), torch.ones(3))


def layers(**changes):
    return [torch.zeros(**({"size": (1, 2, 5, 16)} | changes)) for _ in range(2)]


ENERGIES = (torch.ones(2, 16), torch.ones(2, 16))
PARTNERS = torch.arange(16)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda f, g: g([], ENERGIES), ValueError, "keys has no layers"),
        (lambda f, g: f(layers(dtype=torch.int8), 1), TypeError, "queries has dtype int8"),
        (lambda f, g: f(layers(), 3), ValueError, "kv_heads is 3, supported: divisors of the 2"),
        (lambda f, g: f(layers(), 0), ValueError, "kv_heads is 0"),
        (lambda f, g: f(layers(), 2, 5), ValueError, "skip is 5, supported for the 5 tokens"),
        (lambda f, g: g(layers(), (), None, -1), ValueError, "skip is -1"),
        (lambda f, g: g(layers(size=(2, 5, 16))), ValueError, "keys has shape [2, 5, 16]"),
        (lambda f, g: g(layers(size=(0, 2, 5, 16))), ValueError, "keys has shape [0, 2, 5, 16]"),
        (lambda f, g: g(layers(size=(1, 2, 5, 1025))), ValueError, "d from 1 to 1024"),
        (lambda f, g: g([*layers(), torch.zeros(1, 2, 6, 16)]), ValueError, "[1, 2, 6, 16]"),
        (lambda f, g: g([*layers(), torch.zeros(1, 2, 5, 16).half()]), TypeError, "float16"),
        (lambda f, g: g([x.mT for x in layers()]), ValueError, "stride 1 in its last dimension"),
        (lambda f, g: g(layers(), ENERGIES[:1], PARTNERS), ValueError, "energies are of 1 layers"),
        (lambda f, g: g(layers(), ENERGIES), ValueError, "energies and partners belong together"),
        (lambda f, g: g(layers(), (), PARTNERS), ValueError, "belong together"),
        (lambda f, g: g(layers(), [x[:1] for x in ENERGIES], PARTNERS), ValueError, "energies"),
        (lambda f, g: g(layers(), ENERGIES, PARTNERS.int()), TypeError, "partners has dtype int32"),
        (lambda f, g: g(layers(), ENERGIES, PARTNERS[1:]), ValueError, "partners has shape [15]"),
        (lambda f, g: g(layers(), ENERGIES, PARTNERS + 1), RuntimeError, "partners holds 16"),
    ],
)
def test_bad_arguments(call, error, text):
    """From the functions, and the same reasons as RuntimeError from the ops."""
    with pytest.raises(error) as caught:
        call(tt.query_energy, tt.learn_center)
    assert text in str(caught.value)

    def raw_learn(keys, energies=(), partners=None, skip=0):
        return ops.learn_center(keys, list(energies), partners, skip)

    with pytest.raises(RuntimeError) as caught:
        call(ops.query_energy, raw_learn)
    assert text in str(caught.value)
