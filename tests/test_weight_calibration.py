"""Calibration of weights: factors of channels, rounding by second moments, allocation of bits."""

import itertools

import pytest
import torch

from torch_turboquant import WeightFormat, _budget, decode_weight, encode_weight, weight_unpack
from torch_turboquant.weight_calibration import (
    DAMPING,
    NEAREST,
    Choice,
    allocate,
    channel_scales,
    encode_calibrated,
    inverse_factor,
    relative_error,
    round_by_moments,
)


def inputs(count, k, seed=0, spread=1.0):
    """Correlated inputs whose channels differ in size: float32 [count, k]."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(k, k, generator=generator) / k**0.5 + torch.eye(k)
    sizes = (spread * torch.randn(k, generator=generator)).exp()
    return torch.randn(count, k, generator=generator) @ mixing * sizes


def moments(x):
    return x.T @ x / len(x)


def weights(n, k, seed=1):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


# ---- factors of channels


def test_factors_of_channels_have_the_least_product():
    x, w = inputs(500, 64), weights(48, 64) * torch.linspace(0.1, 3, 64)
    energy, own = x.square().mean(0), w.square().mean(0)

    def cost(scale):  # error of the group, spread evenly, behind the factors that undo it
        return ((own * scale**2).sum() * (energy / scale**2).sum()).item()

    best = channel_scales(w, moments(x), NEAREST)
    torch.testing.assert_close(best, channel_scales(w, energy, NEAREST))
    torch.testing.assert_close(best.sqrt(), channel_scales(w, energy))
    assert best.log().mean().abs() < 1e-5
    generator = torch.Generator().manual_seed(2)
    for size in (0.01, 0.1, 1.0):
        other = best * (size * torch.randn(64, generator=generator)).exp()
        assert cost(best) < cost(other)


def test_factors_of_many_layers_are_those_of_each():
    x, w = torch.stack([inputs(99, 32, s) for s in (3, 4)]), torch.stack([weights(8, 32)] * 2)
    together = channel_scales(w, x.mT @ x / 99)
    for layer in range(2):
        torch.testing.assert_close(together[layer], channel_scales(w[layer], moments(x[layer])))


def test_silent_channels_are_those_of_their_own_layer():
    """What is silent, and beside which channels, no other layer's loudness decides."""
    loud, w = torch.rand(3, 16) + 0.1, torch.stack([weights(8, 16)] * 3)
    energies = loud * torch.tensor([[1.0], [1e4], [0.0]])
    energies[:2, 5] = 0
    together = channel_scales(w, energies)
    for layer in range(3):
        torch.testing.assert_close(together[layer], channel_scales(w[layer], energies[layer]))


def test_silent_channels_have_factors():
    energy = torch.tensor([0.0, 1.0, 4.0, 0.0])
    w = torch.tensor([[1.0, 2.0, 0.0, 0.0]])
    scale = channel_scales(w, energy)
    assert scale.isfinite().all() and (scale > 0).all() and (1 / scale).isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(bad):
    energy = torch.ones(64)
    energy[3] = bad
    with pytest.raises(ValueError, match="second moments must be finite"):
        channel_scales(torch.ones(2, 64), energy)
    with pytest.raises(ValueError, match="weights must be finite"):
        channel_scales(energy[None], torch.ones(64))
    moment = torch.eye(64)
    moment[1, 2] = bad
    with pytest.raises(ValueError, match="second moments must be finite"):
        encode_calibrated(torch.ones(2, 64), moment, WeightFormat())


def test_moments_that_no_input_has_are_refused():
    x = inputs(300, 128)
    negative = -(x.T @ x) / len(x)
    with pytest.raises(ValueError, match="second moments must be symmetric, without negative"):
        encode_calibrated(torch.randn(16, 128), negative, WeightFormat())
    for half in (moments(x).triu(), moments(x).tril()):
        with pytest.raises(ValueError, match=r"must be symmetric.*: they are not symmetric"):
            inverse_factor(half)


def test_moments_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"must be \[..., 64, 64\] or \[..., 64\]"):
        channel_scales(torch.ones(2, 64), torch.ones(32))
    with pytest.raises(ValueError, match=r"moment has shape \[32, 32\], expected \[64, 64\]"):
        encode_calibrated(torch.ones(2, 64), torch.eye(32), WeightFormat())


# ---- rounding


def rounded_one_by_one(w, moment, grid):
    """GPTQ without blocks and factors: after each channel the inverse loses its row and column."""
    w, moment = w.double().clone(), moment.double()
    k = w.shape[1]
    inverse = (moment + DAMPING * moment.diagonal().mean() * torch.eye(k)).inverse()
    out = torch.empty_like(w)
    for i in range(k):
        out[:, i] = grid(w[:, i])
        error = (w[:, i] - out[:, i]) / inverse[i, i]
        w[:, i + 1 :] -= error[:, None] * inverse[i, i + 1 :]
        inverse = inverse - inverse[:, i : i + 1] * inverse[i : i + 1] / inverse[i, i]
    return out


def test_rounding_is_that_of_one_channel_at_a_time():
    k = 24
    w, moment = weights(5, k), moments(inputs(200, k))
    step = torch.linspace(0.2, 0.4, 5)

    def grid(value):
        return (value / step.to(value)).round() * step.to(value)

    bounds = [(0, 8), (8, 10), (10, 24)]
    found = round_by_moments(w, moment, bounds, lambda part, number: lambda value, i: grid(value))
    expected = rounded_one_by_one(w, moment, grid)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    assert relative_error(w, found, moment) < 0.7 * relative_error(w, grid(w.T).T, moment)
    layers = round_by_moments(
        torch.stack([w, w + 1]),
        torch.stack([moment, moment]),
        bounds,
        lambda part, number: lambda value, i: grid(value),
    )
    torch.testing.assert_close(layers[0], found, atol=1e-5, rtol=0)


def test_a_prepared_group_sees_what_earlier_groups_changed():
    w, moment, seen = weights(3, 8), moments(inputs(50, 8)), []

    def prepare(part, number):
        seen.append((number, part.clone()))
        return lambda value, i: torch.zeros_like(value)

    round_by_moments(w, moment, [(0, 4), (4, 8)], prepare)
    assert [number for number, _ in seen] == [0, 1]
    assert torch.equal(seen[0][1], w[:, :4]) and not torch.equal(seen[1][1], w[:, 4:])


FORMATS = [
    WeightFormat(),
    WeightFormat(sub=0),
    WeightFormat(grid="uniform", group=64),
    WeightFormat(grid="uniform", sub=0),
    WeightFormat(bits=8),
]


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_calibrated_weights_have_smaller_errors_of_outputs(form, scaled):
    n, k = 40, 256
    w, moment = weights(n, k).bfloat16(), moments(inputs(3000, k))
    scale = channel_scales(w, moment) if scaled else None
    inverse = None if scale is None else 1 / scale
    errors = []
    for packed in (
        encode_weight(w, form, scale),
        encode_calibrated(w, moment, form, scale),
    ):
        errors.append(relative_error(w, decode_weight(packed, form, n, inverse), moment))
    assert errors[1] < 0.75 * errors[0]


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_independent_inputs_leave_the_scales_of_the_encoder(form):
    n, k = 33, 128
    w = weights(n, k)
    form = WeightFormat(form.bits, form.grid, form.sub, form.group or 128)
    own, other = encode_weight(w, form), encode_calibrated(w, torch.eye(k), form)
    group = form.group
    parts = [weight_unpack(p, n, group, form.bits, form.sub) for p in (own, other)]
    # every group is rotated back and forth before its scale is chosen
    torch.testing.assert_close(parts[0][1].float(), parts[1][1].float(), rtol=2e-3, atol=0)
    assert (parts[0][0] == parts[1][0]).float().mean() > 0.9
    errors = [relative_error(w, decode_weight(p, form, n), torch.eye(k)) for p in (own, other)]
    assert 0.97 < errors[1] / errors[0] < 1.005


def test_fewer_inputs_than_channels_are_enough():
    x, w, form = inputs(20, 128), weights(16, 128), WeightFormat()
    packed = encode_calibrated(w, moments(x), form)
    plain = relative_error(w, decode_weight(encode_weight(w, form), form, 16), moments(x))
    assert relative_error(w, decode_weight(packed, form, 16), moments(x)) < 0.3 * plain


def test_silent_groups_and_rows_are_zero():
    w = weights(20, 256)
    w[:, :128] = 0
    w[3] = 0
    form = WeightFormat()
    packed = encode_calibrated(w, moments(inputs(400, 256)), form)
    decoded = decode_weight(packed, form, 20)
    assert (decoded[3] == 0).all() and (decoded[:, :128] == 0).all() and decoded.isfinite().all()


def test_weights_that_are_not_finite_are_refused():
    w = weights(4, 128)
    w[2, 100] = float("nan")
    with pytest.raises(ValueError, match="NaN or an infinity"):
        encode_calibrated(w, torch.eye(128), WeightFormat())


def test_relative_error_is_that_of_outputs():
    x, w = inputs(300, 48), weights(10, 48)
    decoded = w + 0.1 * weights(10, 48, 7)
    expected = (x @ (decoded - w).T).square().sum() / (x @ w.T).square().sum()
    assert relative_error(w, decoded, moments(x)).item() == pytest.approx(expected.item(), rel=1e-4)


# ---- allocation


def some_choices(names, seed):
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in names:
        bits = torch.randint(10, 60, (4,), generator=generator).tolist()
        cost = torch.rand(4, generator=generator).tolist()
        found[name] = [Choice(i, b, c) for i, (b, c) in enumerate(zip(bits, cost, strict=True))]
    return found


@pytest.mark.parametrize("seed", range(12))
def test_allocation_is_the_best_within_its_budget(seed):
    choices = some_choices("abcde", seed)
    every = [
        (sum(c.bits for c in some), sum(c.cost for c in some))
        for some in itertools.product(*choices.values())
    ]
    for budget in range(min(every)[0], max(every)[0] + 5, 9):
        chosen = allocate(choices, budget)
        assert list(chosen) == list(choices)
        assert sum(c.bits for c in chosen.values()) <= budget
        cost = sum(c.cost for c in chosen.values())
        assert cost == pytest.approx(min(c for bits, c in every if bits <= budget))


def test_two_formats_of_layers_of_any_size():
    """The best leaves out the format that lowers the cost most per bit."""
    sizes = {"a": (4, 8, 5.0), "b": (6, 12, 6.0), "c": (2, 4, 2.5)}
    choices = {n: [Choice(0, x, cost), Choice(1, y, 0.0)] for n, (x, y, cost) in sizes.items()}
    chosen = allocate(choices, 12 + 8)
    assert [c.label for c in chosen.values()] == [0, 1, 1]
    assert allocate({}, 0) == {}


def test_allocation_of_too_many_sums_to_keep(monkeypatch):
    choices = some_choices("abcdefghijkl", 0)
    budget = sum(min(c.bits for c in given) for given in choices.values()) + 90
    best = sum(c.cost for c in allocate(choices, budget).values())
    monkeypatch.setattr(_budget, "MOST_SUMS", 2)
    chosen = allocate(choices, budget)
    assert sum(c.bits for c in chosen.values()) <= budget
    assert 0.999 * best < sum(c.cost for c in chosen.values()) < 1.2 * best


def test_bits_go_where_they_help_most():
    small, large = Choice("small", 4.0, 1.0), Choice("large", 8.0, 0.5)
    choices = {"a": [small, large], "b": [small, Choice("large", 8.0, 0.9)]}
    chosen = allocate(choices, 12)
    assert {name: c.label for name, c in chosen.items()} == {"a": "large", "b": "small"}


def test_a_format_that_costs_more_bits_for_nothing_is_never_chosen():
    choices = {"a": [Choice(0, 4, 1.0), Choice(1, 6, 1.0), Choice(2, 8, 0.5)]}
    assert allocate(choices, 7)["a"].label == 0
    assert allocate(choices, 8)["a"].label == 2


def test_budgets_that_cannot_be_met_are_refused():
    with pytest.raises(ValueError, match="the budget of 3 bits is below the 4 bits"):
        allocate({"a": [Choice(0, 4, 1.0)]}, 3)
    with pytest.raises(ValueError, match="a has no format to choose from"):
        allocate({"a": []}, 3)
    with pytest.raises(ValueError, match="the budget is NaN"):
        allocate({"a": [Choice(0, 4, 1.0)]}, float("nan"))
    with pytest.raises(ValueError, match="bits and costs must be finite"):
        allocate({"a": [Choice(0, float("nan"), 1.0)]}, 5)
    assert allocate({"a": [Choice(0, 4, 1.0), Choice(1, 6, 0.5)]}, float("inf"))["a"].label == 1
    with pytest.raises(ValueError, match="bits and costs must be finite"):
        allocate({"a": [Choice(0, 4, float("nan"))]}, 9)
