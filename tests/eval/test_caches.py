"""Caches that the evaluation compares: their names, their sizes, and the controls against their
formats.
"""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache
from transformers.models.mistral import MistralConfig

from tests.eval.harness import DIM, HEADS, LAYERS, TEXT, reading, tiny
from tests.helpers import randn
from torch_turboquant.config import preset
from torch_turboquant.eval import caches, controls
from torch_turboquant.eval.caches import Choice
from torch_turboquant.eval.controls import ControlCache
from torch_turboquant.paper import TurboQuantMSE, TurboQuantProd
from torch_turboquant.signs import SignKind

# ---------------------------------------------------------------------------------- the names


def test_names_of_caches():
    assert Choice.parse("none").kind == "uncompressed"
    assert Choice.parse("k4v4").kind == "packed" and Choice.parse("k4v4").changes == {}
    changed = Choice.parse(" k4v4: recent_window=0, center=none,boundary_layers=1,key_grid=uniform")
    assert changed.text == "k4v4:recent_window=0,center=none,boundary_layers=1,key_grid=uniform"
    assert changed.changes == {
        "recent_window": 0,
        "center": None,
        "boundary_layers": 1,
        "key_grid": "uniform",
    }
    assert all(Choice.parse(name).kind == "control" for name in controls.CONTROLS)


@pytest.mark.parametrize(
    "text, says",
    [
        ("k9v9", "presets k8v8"),
        ("kivi1", "controls fp8"),
        ("qjl6", "controls fp8"),
        ("kivi4:center=none", "only presets"),
        ("k4v4:windows=3", "recent_window"),
        ("k4v4:search", "field=value"),
        ("k4v4:search=many", "integer"),
        ("k4v4:search=1000", "1 to 64"),
        ("k4v4:search=none", "search is an integer"),
        ("k4v4:boundary_layers=none", "boundary_layers is an integer"),
        ("k4v4:keep=none", "keep=none: write a number"),
        ("k4v4:evict=none", "unknown policy 'none'"),
        ("k4v4:keep=half", "keep=half: write a number"),
        ("k4v4:keep=1.5", "keep is 1.5, supported"),
        ("k4v4:keep=0.5,evict=h2o", "unknown policy 'h2o'"),
        ("k4v4:layers=0@k9v9", "layer@preset"),
        ("k4v4:layers=first@k8v8", "layer@preset"),
    ],
)
def test_names_that_are_refused(text, says):
    with pytest.raises(ValueError, match=says):
        Choice.parse(text)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "layers.json cannot be read: .*No such file"),
        ("no JSON", "layers.json cannot be read: Expecting value"),
        ("[1]", "layers.json holds no layers"),
        ('{"0": ["k8v8"]}', "layer@preset"),
    ],
)
def test_files_of_layers_that_are_refused(tmp_path, monkeypatch, content, says):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "layers.json").write_text(content)
    with pytest.raises(ValueError, match=says):
        Choice.parse("k4v4:layers=layers.json")


def test_changes_reach_the_cache(model):
    cache = Choice.parse("k4v4:recent_window=7,center=none,boundary_layers=1").make(model)
    cache.detach()
    assert cache.config.recent_window == 7 and cache.center is None
    assert [c.key_bits for c in cache.configs] == [8, 8]
    cache = Choice.parse("k4v4:layers=-1@k3v2").make(model)
    cache.detach()
    assert [c.key_bits for c in cache.configs] == [4, 3]
    cache = Choice.parse("k4v4:keep=0.25,evict=keydiff").make(model)
    cache.detach()
    assert (cache.sequences.eviction.keep, cache.sequences.eviction.evict) == (0.25, "keydiff")


# ------------------------------------------------------------------------------------- sizes

# Bytes of a key and a value of 64 channels, by hand from the formats.
TOKEN_BYTES = {
    "fp8": 64 + 64,
    "fp8s": 64 + 64,
    "int8": 2 * (64 + 4),
    "int4": 2 * (32 + 4),
    "q4_0": 2 * 2 * 18,
    "q8_0": 2 * 2 * 34,
    "q4_0h": 2 * 2 * 18,
    "kivi4": (32 + 64 * 4 / 32) + (32 + 2 * 4),
    "kivi2": (16 + 64 * 4 / 32) + (16 + 2 * 4),
    "channel4": 32 + (32 + 4),
    "qjl4": (24 + 2 + 8 + 4) + (32 + 2),  # codes, scale, sketch, norm; codes, scale
}


def test_every_control_has_its_size_here():
    assert set(controls.CONTROLS) <= set(TOKEN_BYTES)


@pytest.mark.parametrize("name", TOKEN_BYTES)
def test_bytes_of_controls(model, name):
    cache = ControlCache(model.config, name)
    with torch.no_grad():
        model(TEXT[:1, :40], past_key_values=cache)
    size = caches.sizes(cache, model, DIM)
    assert size["bytes_per_token"] == TOKEN_BYTES[name] * HEADS * LAYERS
    assert size["bits_per_value"] == pytest.approx(TOKEN_BYTES[name] * 8 / (2 * DIM))
    exact = 2 * 128 * DIM * HEADS * LAYERS * 2 if name.startswith("kivi") else 0
    grown = size["bytes_per_token_8k"] - size["bytes_per_token"]
    assert grown == pytest.approx(exact / 8192)


def test_bytes_of_presets_and_of_no_compression(model):
    cache = Choice.parse("k4v4").make(model)
    with torch.no_grad():
        model(TEXT[:1, :90], past_key_values=cache)
    cache.detach()
    size = caches.sizes(cache, model, DIM)
    config = preset("k4v4", DIM)
    assert size["bytes_per_token"] == config.bytes_per_token * HEADS * LAYERS
    rows_held = config.sink_tokens + config.recent_window + cache.sequences.max_q_len - 1
    tail = rows_held * 2 * DIM * HEADS * LAYERS * 2  # 16 bits, though this model runs in 32
    assert size["bytes_per_token_8k"] == size["bytes_per_token"] + tail / 8192
    assert size["bits_per_value_8k"] == pytest.approx(
        8 * size["bytes_per_token_8k"] / (2 * DIM * HEADS * LAYERS)
    )
    assert size["bytes_8k"] == 8192 * size["bytes_per_token"] + tail
    short = Choice.parse("k4v4").make(model)  # a text of which nothing is encoded yet
    with torch.no_grad():
        model(TEXT[:1, :9], past_key_values=short)
    short.detach()
    assert caches.sizes(short, model, DIM) == size
    thin = Choice.parse("k4v4:keep=0.25").make(model)
    with torch.no_grad():
        model(TEXT[:1, :90], past_key_values=thin)
    thin.detach()
    assert caches.sizes(thin, model, DIM)["bytes_8k"] == 2048 * size["bytes_per_token"] + tail
    plain = DynamicCache()
    with torch.no_grad():
        model(TEXT[:1, :9], past_key_values=plain)
    size = caches.sizes(plain, model, DIM)
    assert size["bits_per_value"] == size["bits_per_value_8k"] == 16


@pytest.mark.parametrize("name", ["none", "k4v4", "int8", "kivi4"])
def test_a_window_holds_no_more_than_it_needs(name):
    sliding = tiny(MistralConfig, sliding_window=40)
    cache = Choice.parse(name).make(sliding)
    with torch.no_grad():
        sliding(TEXT[:1, :200], past_key_values=cache)
    size = caches.sizes(cache, sliding, DIM)
    values = 2 * DIM * HEADS * LAYERS
    if name == "k4v4":
        cache.detach()
        tokens = 32 * (1 + math.ceil((40 + 31 - 1) / 32))  # whole pages, and what max_q_len needs
        grows, once = preset("k4v4", DIM).bytes_per_token * HEADS * LAYERS, 99 * values * 2
    else:
        tokens, grows = 40, {"none": 2 * values, "int8": 68 * 2 * HEADS * LAYERS}.get(name)
        grows, once = (
            (grows, 0) if grows else (TOKEN_BYTES[name] * HEADS * LAYERS, 128 * values * 2)
        )
    assert size["bytes_per_token"] == grows
    assert size["bytes_per_token_8k"] == pytest.approx(grows + once / 8192)
    assert size["bytes_8k"] == pytest.approx(grows * tokens + once)


# ---------------------------------------------------------------------------- the quantisers


def test_affine_is_the_formula(device):
    x = randn(3, 5, 7, seed=1).to(device) * 4 + 2
    got = controls.affine(x, 3, -1).cpu().numpy()
    for index in np.ndindex(3, 5):
        row = x[index].cpu().numpy()
        low = np.float32(np.float16(row.min()))
        step = np.float32(np.float16((row.max() - low) / np.float32(7)))
        codes = np.clip(np.round((row - low) / step), 0, 7)
        np.testing.assert_allclose(got[index], low + codes * step, rtol=1e-6)
    assert len(np.unique(got[0, 0])) <= 8
    constant = torch.full((2, 4), 0.5, device=device)
    assert torch.equal(controls.affine(constant, 4, -1), constant)


def test_blocks_are_those_of_llama_cpp(device):
    """quantize_row_q4_0: d = max / -8, codes min(15, int8(x / d + 8.5))."""
    x = randn(6, 64, seed=2)
    x[0, :32] = 0
    got = controls.blocks(x.to(device), 4).cpu()
    for row in range(6):
        for start in (0, 32):
            part = x[row, start : start + 32].numpy()
            largest = part[np.abs(part).argmax()]
            d = np.float32(np.float16(largest / np.float32(-8)))
            expected = np.zeros(32, np.float32)
            if d:
                codes = np.minimum(15, (part / d + np.float32(8.5)).astype(np.int8))
                expected = (codes - np.float32(8)) * d
            found = got[row, start : start + 32].numpy()
            # a tie may be rounded either way
            ties = np.abs(np.abs(part / (d or 1)) % 1 - 0.5) < 1e-5
            np.testing.assert_allclose(found[~ties], expected[~ties], rtol=1e-6)


def test_fp8_clips_and_scales(device):
    x = torch.tensor([1000.0, -1000.0, 0.3, 17.0, 1e-9], device=device)
    assert controls.fp8(x).tolist() == [448.0, -448.0, 0.3125, 17.0 - 1.0, 0.0]
    layer = controls.ScaledFp8(0, 8)
    keys, values = x.view(1, 1, 5, 1), x.view(1, 1, 5, 1) / 100
    layer.calibrate(keys, values)
    k, v = layer.code(keys, values)
    assert k.flatten()[:2].tolist() == pytest.approx([1000.0, -1000.0])
    assert torch.allclose(v * 100, k)


def through(layer, keys, values, chunk):
    """Feeds [1, heads, n, d] after a first forward of 150 tokens; what each forward was handed."""
    handed = [layer.update(keys[:, :, :150], values[:, :, :150])]
    for start in range(150, keys.shape[2], chunk):
        part = slice(start, start + chunk)
        handed.append(layer.update(keys[:, :, part], values[:, :, part]))
    return handed


def test_kivi_keeps_its_residual_exact(device):
    n = 300
    keys, values = (randn(1, HEADS, n, DIM, seed=s).to(device) for s in (1, 2))
    layer = controls.Kivi(0, 2)
    handed = through(layer, keys, values, 1)
    assert torch.equal(handed[0][0], keys[:, :, :150])  # the prompt attends exactly
    groups = keys[:, :, :256].unflatten(2, (8, 32))
    coded = controls.affine(groups, 2, 3).flatten(2, 3)
    assert torch.equal(layer.keys[:, :, :256], coded)
    assert torch.equal(layer.keys[:, :, 256:], keys[:, :, 256:])
    coded = controls.affine(values[:, :, :172].unflatten(-1, (2, 32)), 2, -1).flatten(-2)
    assert torch.equal(layer.values[:, :, :172], coded)
    assert torch.equal(layer.values[:, :, 172:], values[:, :, 172:])
    # a query reads keys as they are before its own token closes a group
    at = 255 - 150 + 1
    assert torch.equal(handed[at][0][:, :, 128:], keys[:, :, 128:256])
    assert not torch.equal(handed[at + 1][0][:, :, 128:256], keys[:, :, 128:256])
    together = controls.Kivi(0, 2)
    through(together, keys, values, 30)
    assert torch.equal(together.keys, layer.keys) and torch.equal(together.values, layer.values)


@pytest.mark.parametrize("name", ["fp8s", "int4", "q4_0", "q4_0h", "channel4", "qjl3"])
def test_tokens_are_coded_one_by_one(model, name, device):
    """How the tokens are cut into forwards does not matter, and later queries read codes."""
    keys, values = (randn(1, HEADS, 200, DIM, seed=s).to(device) for s in (1, 2))
    one, many = (ControlCache(model.config, name).layers[1] for _ in range(2))
    handed = through(one, keys, values, 1)
    through(many, keys, values, 25)
    torch.testing.assert_close(one.keys, many.keys)
    torch.testing.assert_close(one.values, many.values)
    assert torch.equal(handed[0][0], keys[:, :, :150])
    assert torch.equal(handed[-1][0], one.keys)
    assert not torch.equal(one.keys[:, :, -1], keys[:, :, -1])


def test_channel_ranges_are_those_of_the_first_forward(device):
    keys, values = (randn(1, HEADS, 50, DIM, seed=s).to(device) for s in (1, 2))
    layer = controls.PerChannel(0, 16)
    layer.update(keys, values)
    torch.testing.assert_close(layer.keys, keys, atol=2e-3, rtol=0)
    layer.update(keys[:, :, :1] + 100, values[:, :, :1])
    torch.testing.assert_close(layer.keys[:, :, 50], keys.amax(2), atol=5e-3, rtol=0)


def test_two_stages_are_the_papers(device):
    keys, values = (randn(1, HEADS, 30, DIM, seed=s).to(device) for s in (1, 2))
    layer = controls.TwoStage(3, 4)
    layer.update(keys, values)
    prod = TurboQuantProd(DIM, 4, layer=3, device=device)
    queries = randn(1, HEADS, 5, DIM, seed=7).to(device)
    expected = prod.score(queries, prod.quantize(keys))
    torch.testing.assert_close(queries @ layer.keys.transpose(2, 3), expected, atol=1e-3, rtol=1e-3)
    mse = TurboQuantMSE(DIM, 4, layer=3, kind=SignKind.VALUES, device=device)
    torch.testing.assert_close(layer.values, mse.dequantize(mse.quantize(values)))


def test_rotation_spreads_an_outlier(device):
    x = torch.zeros(1, 1, 1, DIM, device=device)
    x[..., 5] = 8.0
    x += 0.3 * randn(1, 1, 1, DIM, seed=1).to(device)
    plain, rotated = controls.Blocks(0, 4), controls.RotatedBlocks(0, 4)
    for layer in (plain, rotated):
        layer.update(x, x)
    assert (rotated.keys - x).square().sum() < 0.5 * (plain.keys - x).square().sum()


@pytest.mark.parametrize("family", ["int{}", "q{}_0", "q{}_0h", "kivi{}"])
def test_many_bits_are_no_compression(model, family):
    kl = [reading(model, family.format(bits)).kl.mean().item() for bits in (2, 4, 8, 16)]
    assert kl[0] > kl[1] > kl[2] and kl[3] < 1e-5, kl
    assert kl[1] > 1e-4


def test_other_controls_order_as_their_bits(model):
    kl = {n: reading(model, n).kl.mean().item() for n in ("fp8s", "qjl2", "qjl3", "qjl5")}
    assert kl["qjl2"] > kl["qjl3"] > kl["qjl5"] > kl["fp8s"] > 0
    kl = [reading(model, f"channel{bits}").kl.mean().item() for bits in (2, 4, 12)]
    assert kl[0] > kl[1] > kl[2] > 0
