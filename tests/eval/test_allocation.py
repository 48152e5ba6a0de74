"""Bits layer by layer: the best allocation within a budget, and what it is made of."""

import itertools

import numpy as np
import pytest

pytest.importorskip("transformers")

from tests.eval.harness import CHUNK, LAYERS, PREFILL, TEXT, reading
from torch_turboquant.eval import allocation
from torch_turboquant.eval.caches import Choice


@pytest.mark.parametrize("budget", [2.1, 2.5, 3.0, 3.9, 4.2])
def test_an_allocation_is_the_best_in_its_budget(budget):
    bits, layers = [2.1, 2.6, 3.1, 4.2], range(4)
    random = np.random.default_rng(int(10 * budget))
    lost = {layer: sorted(random.random(4), reverse=True) for layer in layers}
    chosen = allocation.allocate(lost, bits, budget)
    assert list(chosen) == list(layers)

    def cost(numbers):
        return sum(lost[layer][n] for layer, n in zip(layers, numbers, strict=True))

    inside = [
        numbers
        for numbers in itertools.product(range(4), repeat=4)
        if sum(bits[n] for n in numbers) / 4 <= budget + 1e-9
    ]
    assert tuple(chosen.values()) in inside
    assert cost(chosen.values()) == pytest.approx(min(map(cost, inside)))


def test_an_allocation_holds_its_budget_to_the_last_bit():
    lost = {0: [1.0, 0.1, 0.09], 1: [1.0, 0.1, 0.09]}
    assert allocation.allocate(lost, [2.0, 3.0, 4.0], 3.0) == {0: 1, 1: 1}
    assert sorted(allocation.allocate(lost, [2.0, 3.0, 4.0], 2.99999).values()) == [0, 1]


def test_an_allocation_of_many_layers_is_not_rounded():
    """Half of the layers get the larger preset, which takes the budget to the last bit."""
    lost = {layer: [1.0, 0.0] for layer in range(34)}
    chosen = allocation.allocate(lost, [2.0, 3.1], 2.55)
    assert list(chosen) == list(range(34)) and sum(chosen.values()) == 17


def test_an_allocation_needs_room_for_the_smallest():
    with pytest.raises(ValueError, match="the smallest has 2"):
        allocation.allocate({0: [1.0, 0.5]}, [2.1, 3.1], 2.0)


@pytest.mark.parametrize("lost, bits, budget", [
    ([1.0, 0.5], [2.0, 3.0], np.nan),
    ([1.0, 0.5], [2.0, np.nan], 3.0),
    ([1.0, np.nan], [2.0, 3.0], 3.0),
])  # fmt: skip
def test_an_allocation_needs_finite_numbers(lost, bits, budget):
    with pytest.raises(ValueError, match=r"must be finite numbers|the budget is NaN"):
        allocation.allocate({0: lost}, bits, budget)


def test_an_allocation_without_a_limit():
    assert allocation.allocate({0: [1.0, 0.5], 1: [0.3, 0.4]}, [2.0, 3.0], np.inf) == {0: 1, 1: 0}


def test_sensitivities_are_those_of_single_layers(model):
    names = ("k2v2", "k8v8")
    found = allocation.sensitivities(model, TEXT[:1], PREFILL, CHUNK, names, recent_window=16)
    assert list(found) == list(range(LAYERS))
    text = "k8v8:recent_window=16,layers=1@k2v2"
    alone = reading(model, text, TEXT[:1]).kl.double().mean().item()
    assert found[1][0] == pytest.approx(alone, rel=1e-4)
    assert all(lost[0] > 10 * lost[1] for lost in found.values())


def test_layers_of_a_file(model, tmp_path):
    path = tmp_path / "chosen.json"
    path.write_text('{"0": "k8v4", "1": "k3v2"}')
    cache = Choice.parse(f"k4v4:layers={path}").make(model)
    cache.detach()
    assert [(c.key_bits, c.value_bits) for c in cache.configs] == [(8, 4), (3, 2)]
