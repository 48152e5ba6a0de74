"""Which layer gets which configuration."""

import numpy as np
import pytest

from torch_turboquant import PRESETS, CacheConfig, preset
from torch_turboquant.layer_choice import SHARED_FIELDS, layer_configs

BASE = preset("k3v2", 64, page_size=16, sink_tokens=2, recent_window=7, search=3, seed=5)
FULL = [0] * 5


def bits(configs):
    return [(c.key_bits, c.value_bits) for c in configs]


def test_one_configuration_for_all_is_the_default():
    assert layer_configs(BASE, FULL) == [BASE] * 5
    assert layer_configs(BASE, FULL, layer_presets={}) == [BASE] * 5
    assert layer_configs(BASE, FULL, layer_presets=[None] * 5) == [BASE] * 5


@pytest.mark.parametrize("windows, count, high", [
    (FULL, 1, [0, 4]),
    (FULL, 2, [0, 1, 3, 4]),
    (FULL, 9, [0, 1, 2, 3, 4]),
    ([8, 0, 8, 0, 0, 8], 1, [1, 4]),  # full-attention layers are counted
    ([None, 0, None, 0, None, 0], 1, [1, 5]),
    ([8, 8], 1, []),
])  # fmt: skip
def test_boundary_layers(windows, count, high):
    configs = layer_configs(BASE, windows, boundary_layers=count)
    expected = [(8, 8) if i in high else (3, 2) for i in range(len(windows))]
    assert bits(configs) == expected


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_changes_bits_and_grids_only(name):
    configs = layer_configs(BASE, FULL, boundary_layers=1, boundary_preset=name)
    mine = preset(name, 64, page_size=16, sink_tokens=2, recent_window=7, search=3, seed=5)
    assert configs == [mine, BASE, BASE, BASE, mine]
    assert layer_configs(BASE, FULL, layer_presets={2: name})[2] == mine


def test_layers_by_name_win_over_the_boundary():
    own = CacheConfig(64, 5, 3, page_size=16, sink_tokens=2, recent_window=7, seed=9)
    configs = layer_configs(BASE, FULL, boundary_layers=1, layer_presets={0: "k4v4", -2: own})
    assert bits(configs) == [(4, 4), (3, 2), (3, 2), (5, 3), (8, 8)]
    assert configs[3] is own
    configs = layer_configs(BASE, FULL, layer_presets=["k4v4", None, own, "k2v2", None])
    assert bits(configs) == [(4, 4), (3, 2), (5, 3), (2, 2), (3, 2)]


@pytest.mark.parametrize("match, options", [
    ("unknown preset 'k9'; the presets are k8v8", {"boundary_preset": "k9"}),
    ("unknown preset 'k9'", {"layer_presets": {0: "k9"}}),
    ("boundary_layers is -1, supported: 0 and more", {"boundary_layers": -1}),
    ("boundary_layers is 1.5, which is no whole number", {"boundary_layers": 1.5}),
    ("a layer of layer_presets is '0', which is no whole", {"layer_presets": {"0": "k8v8"}}),
    ("names layer 5, the model has 5", {"layer_presets": {5: "k4v4"}}),
    ("names layer -6", {"layer_presets": {-6: "k4v4"}}),
    ("names layer 4 twice", {"layer_presets": {4: "k4v4", -1: "k8v8"}}),
    ("has 2 entries, the model 5 layers", {"layer_presets": ["k4v4", "k4v4"]}),
    ("a preset per layer, got 'k4v4'", {"layer_presets": "k4v4"}),
])  # fmt: skip
def test_refused(match, options):
    with pytest.raises(ValueError, match=match):
        layer_configs(BASE, FULL, **options)


@pytest.mark.parametrize("field", SHARED_FIELDS)
def test_what_layers_must_share(field):
    fields = {"head_dim": 64, "page_size": 16, "sink_tokens": 2, "recent_window": 7}
    fields[field] *= 2
    own = CacheConfig(key_bits=4, value_bits=4, **fields)
    with pytest.raises(ValueError, match=f"layer 1 has {field}={fields[field]}"):
        layer_configs(BASE, FULL, layer_presets={1: own})


def test_layers_at_the_ends_counted_by_numpy():
    base = preset("k4v4", 64)
    for count in (np.uint8(2), np.int64(2)):
        found = layer_configs(base, [0] * 6, boundary_layers=count)
        assert found == layer_configs(base, [0] * 6, boundary_layers=2)
