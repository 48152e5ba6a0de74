"""Pages of unlike layers, which vLLM cuts from one pool. Needs no vLLM."""

import pytest

from torch_turboquant.integrations.vllm.sizes import Need, share

SLIDING, FULL = 512, 0


def layers(*groups):
    """Needs by names; groups: how many layers, and what each needs."""
    needs = [Need(*need) for count, *need in groups for _ in range(count)]
    return {f"layers.{i}": need for i, need in enumerate(needs)}


def check(needs):
    """As vLLM wants it: the largest page is a whole number of every other one."""
    found = share(needs)
    own = {name: needs[name].heads * content for name, content in found.items()}
    for name, size in own.items():
        assert found[name] >= needs[name].content
        assert max(own.values()) % size == 0
    return [*found.values()]


def test_layers_of_one_kind_get_what_they_need():
    needs = layers((2, FULL, 4, 268), (3, FULL, 4, 156), (1, FULL, 1, 612))
    assert [*share(needs).values()] == [*[268] * 2, *[156] * 3, 612]


def test_layers_of_one_size_get_what_they_need():
    assert check(layers((5, SLIDING, 4, 156), (1, FULL, 4, 156))) == [156] * 6
    assert check(layers((5, SLIDING, 4, 156), (1, FULL, 2, 312))) == [*[156] * 5, 312]


def test_sizes_that_are_nearly_multiples():
    """Gemma 4: 4 heads of 256 channels with windows and one of 512, whose page was half lost."""
    assert check(layers((5, SLIDING, 4, 308), (1, FULL, 1, 612))) == [*[308] * 5, 616]
    # more than half of it
    assert check(layers((5, SLIDING, 4, 308), (1, FULL, 1, 620))) == [*[310] * 5, 620]


def test_a_layer_with_a_preset_of_its_own():
    """A large page beside five that are half of it costs less than six large ones."""
    needs = layers((1, SLIDING, 4, 268), (4, SLIDING, 4, 156), (1, FULL, 4, 156))
    assert check(needs) == [312, *[156] * 5]
    assert check(layers((5, SLIDING, 4, 268), (1, FULL, 4, 156))) == [268] * 6


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("content", [36, 80, 156, 310])
def test_all_fit_into_one_pool(heads, content):
    check(layers((3, SLIDING, 3, 156), (2, FULL, heads, content), (1, 24, heads, 268)))
