"""Configurations and presets: names, defaults, derived sizes, and what is refused."""

import dataclasses

import numpy as np
import pytest
import torch

import torch_turboquant as tt
from torch_turboquant.config import PRESETS, CacheConfig


def test_presets_are_what_their_names_say():
    for name, bits in PRESETS.items():
        keys, values = name.removeprefix("k").removesuffix("u").split("v")
        assert (bits.key_bits, bits.value_bits) == (int(keys), int(values))
        for width, grid in ((bits.key_bits, bits.key_grid), (bits.value_bits, bits.value_grid)):
            assert grid == ("uniform" if name.endswith("u") or width == 8 else "lloyd")
        config = tt.preset(name, 128)
        assert (config.key_bits, config.value_bits) == (bits.key_bits, bits.value_bits)
        assert (config.key_grid, config.value_grid) == (bits.key_grid, bits.value_grid)
        assert config.value_scale_mode == ("unbiased" if name in ("k4v2", "k3v2") else "mse")
    assert list(PRESETS) == ("k8v8 k8v4 k5v4u k5v3u k4v4 k4v4u k4v3 k4v2 k3v3 k3v2 k2v2".split())


def test_named_presets_are_presets():
    assert list(tt.NAMED_PRESETS) == ["near-lossless", "balanced", "smallest"]
    sizes = []
    for use, (name, options) in tt.NAMED_PRESETS.items():
        assert tt.preset(use, 128, search=1) == tt.preset(name, 128, search=1, **options)
        assert tt.preset(use, 128, recent_window=7) == tt.preset(name, 128, recent_window=7)
        sizes.append(tt.preset(use, 128).bytes_per_token)
    assert sizes == sorted(sizes, reverse=True)
    assert not set(tt.NAMED_PRESETS) & set(PRESETS)


@pytest.mark.parametrize("name, near", [
    ("K4V4", "(did you mean 'k4v4' or "),
    ("k5v4", "(did you mean 'k5v4u' or "),
    ("Balanced", "(did you mean 'balanced'?)"),
    ("turbo", "'turbo'; the presets are"),
    (4, "4; the presets are"),
])  # fmt: skip
def test_a_name_that_is_nearly_right(name, near):
    with pytest.raises(ValueError, match="unknown preset") as caught:
        tt.preset(name, 128)
    assert near in str(caught.value) and "k4v4, k4v4u" in str(caught.value)


def test_names_of_other_packages():
    assert tt.preset("int8", 128, recent_window=7) == tt.preset("k8v8", 128, recent_window=7)
    assert tt.preset("int8", 128).bytes_per_token == 260
    for name in ("fp8", "FP8", "fp8_e4m3", "float8"):
        with pytest.raises(ValueError, match=f"no preset '{name}', because .*: use 'k8v8'"):
            tt.preset(name, 128)
        with pytest.raises(ValueError, match=f"no preset '{name}', because .* of latents 'k8'"):
            tt.latent_preset(name)


@pytest.mark.parametrize(
    "name",
    [
        "head_dim",
        "key_bits",
        "value_bits",
        "page_size",
        "search",
        "sink_tokens",
        "recent_window",
        "seed",
    ],
)
@pytest.mark.parametrize("value", [2.5, "64", True, None])
def test_sizes_are_whole_numbers(name, value):
    good = {"head_dim": 64, "key_bits": 4, "value_bits": 4}
    with pytest.raises(ValueError, match=f"{name} is {value!r}, which is no whole number"):
        CacheConfig(**{**good, name: value})
    if name in ("page_size", "recent_window"):
        with pytest.raises(ValueError, match=f"{name} is {value!r}, which is no whole number"):
            tt.LatentConfig(512, 64, 4, **{name: value})
    assert CacheConfig(**{**good, "seed": np.int64(3)}).seed == 3
    for make, config in (
        (tt.make_tables, CacheConfig(**good)),
        (tt.make_latent_tables, tt.LatentConfig(512, 64, 4)),
    ):
        for layer in (1.5, 1.0, True):
            with pytest.raises(ValueError, match=f"layer is {layer}, which is no whole number"):
                make(config, layer)


def test_integers_of_numpy_become_ints():
    """Only these go into files, whose metadata are JSON."""
    sizes = {"page_size": 32, "search": 4, "sink_tokens": 2, "recent_window": 8, "seed": 1}
    for kind, shape in ((CacheConfig, (64, 4, 4)), (tt.LatentConfig, (512, 64, 4))):
        plain = kind(*shape, **sizes)
        config = kind(*map(np.int64, shape), **{n: np.int32(size) for n, size in sizes.items()})
        assert config == plain and config.record_bytes == plain.record_bytes
        numbers = [x for x in dataclasses.astuple(config) if not isinstance(x, str)]
        assert not [x for x in numbers if isinstance(x, np.integer)]


def test_caches_that_cannot_be():
    keys, latents = CacheConfig(64, 4, 4), tt.LatentConfig(512, 64, 4)
    with pytest.raises(TypeError, match="config must be a CacheConfig, got LatentConfig"):
        tt.allocate_cache(latents, 3, 2)
    with pytest.raises(TypeError, match="config must be a LatentConfig, got CacheConfig"):
        tt.allocate_latent_cache(keys, 3)
    for pages, text in ((-1, "num_pages is -1, supported: 0"), ("a", "num_pages is 'a', which")):
        with pytest.raises(ValueError, match=text):
            tt.allocate_cache(keys, pages, 2)
        with pytest.raises(ValueError, match=text):
            tt.allocate_latent_cache(latents, pages)


def test_defaults():
    config = CacheConfig(128, 4, 3)
    assert config == tt.preset("k4v3", 128)
    assert (config.page_size, config.search, config.seed) == (32, 8, 0)
    assert (config.sink_tokens, config.recent_window) == (4, 64)
    assert (config.key_scale_mode, config.value_scale_mode) == ("unbiased", "mse")
    assert (config.key_grid, config.value_grid) == ("lloyd", "lloyd")
    assert CacheConfig(128, 8, 8).key_grid == "uniform"
    assert tt.preset("k4v4", 64, page_size=16, search=1).page_size == 16


def test_a_config_is_a_value():
    a, b = tt.preset("k4v4", 128), tt.preset("k4v4", 128)
    assert a == b and hash(a) == hash(b) and a.record_bytes == b.record_bytes
    assert a == b and hash(a) == hash(b)  # also after cached sizes were read
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.key_bits = 3
    assert dataclasses.replace(a, page_size=64).record_bytes == 64 * 132


def test_sizes():
    config = tt.preset("k4v4", 128)
    assert config.bytes_per_token == 132 and isinstance(config.bytes_per_token, int)
    assert config.record_bytes == 32 * 132
    assert config.bits_per_value == 8 * 132 / 256
    assert config.compression() == 512 / 132
    assert config.compression(torch.float32) == 1024 / 132
    assert config.record.tile_bytes == 32 * 132


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"head_dim": 100}, "head_dim is 100, supported in page records: multiples of 16"),
        ({"head_dim": 352}, "head_dim is 352"),
        ({"key_bits": 6}, "key_bits is 6, supported: 2, 3, 4, 5, 8"),
        ({"key_bits": 1}, "key_bits is 1"),
        ({"value_bits": 5}, "value_bits is 5, supported: 2, 3, 4, 8"),
        ({"page_size": 48}, "page_size is 48, supported: 16, 32, 64, 128"),
        ({"key_grid": "nf4"}, "key_grid must be one of"),
        ({"value_grid": "Lloyd"}, "value_grid must be one of"),
        ({"key_bits": 8, "key_grid": "lloyd"}, "key_grid must be 'uniform' for 8 bits"),
        ({"key_scale_mode": "l2"}, "key_scale_mode must be one of"),
        ({"value_scale_mode": 2}, "value_scale_mode must be one of"),
        ({"search": 0}, "search must be 1 to 64, got 0"),
        ({"search": 65}, "search must be 1 to 64, got 65"),
        ({"sink_tokens": -1}, "sink_tokens must be 0 or more"),
        ({"recent_window": -1}, "recent_window must be 0 or more"),
        ({"seed": -1}, "seed must be 0 to 2^64 - 1"),
        ({"seed": 2**64}, "seed must be 0 to 2^64 - 1"),
    ],
)
def test_what_is_refused(fields, text):
    with pytest.raises(ValueError) as error:
        CacheConfig(**{"head_dim": 128, "key_bits": 4, "value_bits": 4, **fields})
    assert text in str(error.value)


def test_unknown_preset():
    with pytest.raises(ValueError, match="unknown preset 'k7v7'; the presets are k8v8, k8v4"):
        tt.preset("k7v7", 128)
