"""WeightFormat, encode_weight and PackedLinear: what users of the ops of weights call."""

import copy
import dataclasses
import io
import pickle
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import torch_turboquant as tt
from tests.helpers import ROOT, assert_same_bytes, randn
from torch_turboquant import weights
from torch_turboquant.ops.linear_reference import linear_packed_reference

FORMAT = tt.WeightFormat(4)


def linear(n=70, k=192, bias=True, dtype=torch.float32, device="cpu"):
    layer = nn.Linear(k, n, bias=bias, device=device, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(0.02 * randn(n, k, seed=1))
        if bias:
            layer.bias.copy_(randn(n, seed=2))
    return layer


def scales(k=192):
    return 0.5 + randn(k, seed=3).abs()


def packed(**changes):
    return tt.PackedLinear.from_linear(linear(**changes), FORMAT, scales(changes.get("k", 192)))


# ---- formats


def test_defaults_of_each_width():
    assert FORMAT == tt.WeightFormat(4, "lloyd", 32, None)
    assert tt.WeightFormat(8) == tt.WeightFormat(8, "uniform", 0, None)
    assert hash(FORMAT) == hash(tt.WeightFormat(4, "lloyd"))
    assert [FORMAT.group_of(k) for k in (64, 128, 192, 576, 4096)] == [64, 128, 64, 64, 128]
    assert tt.WeightFormat(4, group=64).group_of(128) == 64
    sizes = [tt.WeightFormat(b, sub=s).bits_per_weight(128) for b, s in ((4, 32), (4, 0), (8, 0))]
    assert sizes == [4.25, 4.125, 8.125]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((3,), "bits is 3, supported for weights: 4, 8"),
        ((4, "log"), "grid must be one of"),
        ((8, "lloyd"), "grid must be 'uniform' for 8 bits"),
        ((4, None, 16), "sub is 16, supported at 4 bits: 0, 32"),
        ((8, None, 32), "sub is 32, supported at 8 bits: 0"),
        ((4, None, None, 32), "group is 32, supported for weights: 64, 128"),
    ],
)
def test_formats_that_do_not_exist(arguments, text):
    with pytest.raises(ValueError, match=text):
        tt.WeightFormat(*arguments)


def test_integers_of_numpy_become_ints():
    """Only these go into config.json, and small ones of NumPy overflow in sizes of blocks."""
    form = tt.WeightFormat(np.int8(4), sub=np.int64(32), group=np.uint8(128))
    assert form == tt.WeightFormat(4, sub=32, group=128)
    assert form.bits_per_weight(256) == 4.25
    assert not any(isinstance(x, np.integer) for x in dataclasses.astuple(form))


@pytest.mark.parametrize(("group", "k"), [(None, 96), (None, 0), (128, 192)])
def test_channels_that_a_format_does_not_have(group, k):
    with pytest.raises(ValueError, match=f"the weight has {k} input channels, supported: multiple"):
        tt.WeightFormat(4, group=group).group_of(k)


# ---- weights


def test_encode_and_decode(device):
    w, scale = 0.02 * randn(70, 192, seed=1), scales()
    for f in (FORMAT, tt.WeightFormat(4, "uniform", 0), tt.WeightFormat(8)):
        bytes_of_w = tt.encode_weight(w.to(device), f, scale.double())
        back = tt.decode_weight(bytes_of_w, f, 70, (1 / scale).to(device), torch.float32).cpu()
        error = ((back - w) * scale).square().mean() / (w * scale).square().mean()
        assert 0 < float(error) < (1e-4 if f.bits == 8 else 0.013)
    turned = (0.02 * randn(192, 70, seed=1)).t()
    assert_same_bytes(tt.encode_weight(turned, FORMAT), tt.encode_weight(turned.clone(), FORMAT))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused(value, device):
    layer = linear(device=device)
    with torch.no_grad():
        layer.weight[69, 191] = value
    with pytest.raises(ValueError, match=r"the weight holds a NaN or an infinity$"):
        tt.PackedLinear.from_linear(layer, FORMAT)
    large = torch.full((1, 64), 1e38, device=device)
    with pytest.raises(ValueError, match="or becomes infinite by its channel_scale"):
        tt.encode_weight(large, FORMAT, torch.full((64,), 10.0))


@pytest.mark.parametrize("form", [FORMAT, tt.WeightFormat(4, "uniform"), tt.WeightFormat(8)])
def test_weights_above_the_largest_scale_are_refused(form, device):
    w = randn(20, 192, seed=1).to(device)
    small = tt.decode_weight(tt.encode_weight(w, form), form, 20)
    large = tt.decode_weight(tt.encode_weight(8192 * w, form), form, 20)
    torch.testing.assert_close(large, 8192 * small, rtol=2e-3, atol=0)
    with pytest.raises(ValueError, match="too large for scales in float16: divide it by"):
        tt.encode_weight(1e6 * w, form)


def test_standard_deviations_that_scales_suffice_for():
    """docs/weights.md says up to which one weights are packed, whatever group and sub are."""
    text = (ROOT / "docs" / "weights.md").read_text()
    said = r"standard deviation above ([\d,]+) \(([\d,]+) with the uniform grid of 4 bits\) may not"
    most, most_uniform = (int(n.replace(",", "")) for n in re.search(said, text).groups())
    w = randn(256, 256, seed=1)
    for group in (64, 128):
        for sub in (0, 32):
            tt.encode_weight(most * w, tt.WeightFormat(4, "lloyd", sub, group))
            tt.encode_weight(most_uniform * w, tt.WeightFormat(4, "uniform", sub, group))
        tt.encode_weight(most * w, tt.WeightFormat(8, group=group))
    with pytest.raises(ValueError, match="too large for scales in float16"):
        tt.encode_weight(2 * most_uniform * w, tt.WeightFormat(4, "uniform", 0, 64))


def test_weights_that_become_zeros():
    """docs/weights.md says below which size, whatever group and sub are."""
    text = " ".join((ROOT / "docs" / "weights.md").read_text().split())
    said = r"become zeros below (1e-\d) \((1e-\d) with the uniform grid of 4 bits\)"
    least, least_uniform = map(float, re.search(said, text).groups())
    w = randn(256, 256, seed=1)
    w /= w.abs().max()
    for group in (64, 128):
        forms = [(tt.WeightFormat(8, group=group), least)]
        for sub in (0, 32):
            forms.append((tt.WeightFormat(4, "lloyd", sub, group), least))
            forms.append((tt.WeightFormat(4, "uniform", sub, group), least_uniform))
        for form, size in forms:
            zeros, small = (
                tt.decode_weight(tt.encode_weight(f * size * w, form), form, 256) for f in (1, 4)
            )
            assert not zeros.any() and small.any()


def test_bad_scales_and_shapes():
    w = randn(4, 64, seed=1)
    for bad in (0.0, -1.0, torch.nan, torch.inf, 1e-40):
        scale = torch.ones(64)
        scale[3] = bad
        with pytest.raises(ValueError, match="channel_scale must be positive and finite"):
            tt.encode_weight(w, FORMAT, scale)
    with pytest.raises(ValueError, match=r"channel_scale has shape \[4\], expected \[64\]"):
        tt.encode_weight(w, FORMAT, torch.ones(4))
    with pytest.raises(TypeError, match="w has dtype float64"):
        tt.encode_weight(w.double(), FORMAT)
    with pytest.raises(ValueError, match="w has shape"):
        tt.encode_weight(w[0], FORMAT)
    with pytest.raises(ValueError, match="packed has blocks of 560 bytes, expected 544 or 1056"):
        tt.decode_weight(tt.encode_weight(w, FORMAT), tt.WeightFormat(4, sub=0), 4)
    with pytest.raises(TypeError, match=r"linear must be an nn.Linear, got Conv1d"):
        tt.PackedLinear.from_linear(nn.Conv1d(2, 2, 1), FORMAT)


# ---- the layer


def test_a_layer_is_its_product():
    layer = packed()
    x = randn(2, 3, 192, seed=4)
    f = layer.format
    arguments = f.signs(64), f.levels(64), 70, 4, 32, layer.channel_inverse, layer.bias
    want = linear_packed_reference(x, layer.weight, *arguments)
    torch.testing.assert_close(layer(x).double(), want, rtol=1e-5, atol=1e-6)
    exact = nn.functional.linear(x, layer.decode(), layer.bias)
    assert float((layer(x) - exact).norm() / exact.norm()) < 0.01  # activations of 8 bits
    turned = randn(192, 5, seed=5).t()
    assert torch.equal(layer(turned), layer(turned.contiguous()))
    assert layer(x[:0]).shape == (0, 3, 70)
    with pytest.raises(RuntimeError, match="takes no gradient"):
        layer(x.requires_grad_())
    for bad, error, text in (
        (x.detach().double(), TypeError, "x has dtype float64, supported"),
        (x.detach()[..., :64], ValueError, r"x has shape \[2, 3, 64\], expected \[..., 192\]"),
        (torch.tensor(1.0), ValueError, r"x has shape \[\], expected \[..., 192\]"),
        ([1.0], TypeError, "x must be a tensor, got list"),
        (x.detach().half(), RuntimeError, "bias has dtype float32, supported: float16"),
    ):
        with pytest.raises(error, match=text):
            layer(bad)


def test_scales_of_channels_are_undone():
    """The layer computes what the linear layer does, up to the error of 4 bits."""
    own, layer = linear(), packed()
    x = randn(9, 192, seed=4)
    with torch.no_grad():
        for y, want in ((layer.decode(), own.weight), (layer(x), own(x))):
            assert (y - want).norm() < 0.15 * want.norm()


def test_what_a_layer_says_of_itself():
    text = repr(packed())
    for part in ("in_features=192", "out_features=70", "bits=4", "sub=32", "group=64"):
        assert part in text


def test_conversions_keep_the_scales_of_channels():
    """bias takes the dtype, channel_inverse and signs do not."""
    for convert in (
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: nn.Sequential(m).bfloat16()[0],
    ):
        layer = packed()
        before = layer.channel_inverse.clone()
        layer = convert(layer)
        assert layer.bias.dtype in (torch.bfloat16, torch.float16)
        assert_same_bytes(layer.channel_inverse, before)
        assert not layer.channel_inverse.requires_grad
        assert layer(randn(3, 192, seed=1).to(layer.bias.dtype)).dtype == layer.bias.dtype


def test_state_and_copies(device):
    layer = packed().to(device)
    x = randn(3, 192, seed=4).to(device)
    want = layer(x)
    state = layer.state_dict()
    assert set(state) == {"weight", "channel_inverse", "bias"}
    empty = tt.PackedLinear(192, 70, FORMAT, bias=True, channel_inverse=True, device="meta")
    empty.load_state_dict(state, assign=True)
    assert_same_bytes(empty(x), want)
    empty = tt.PackedLinear(192, 70, FORMAT, bias=True, channel_inverse=True, device=device)
    empty.load_state_dict(state)
    assert_same_bytes(empty(x), want)
    moved = tt.PackedLinear(192, 70, FORMAT, bias=True, channel_inverse=True, device="meta")
    moved.to_empty(device=device)
    assert moved._constants_are_here()  # a CUDA graph must not place them
    moved.load_state_dict(state)
    assert_same_bytes(moved(x), want)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_bytes(other(x), want)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert_same_bytes(torch.load(file, weights_only=False)(x), want)


def test_a_layer_takes_the_place_of_a_linear(device):
    """Callers may name the argument, as nn.Linear does."""
    layer, x = packed(n=70, k=192).to(device), randn(3, 192, seed=4).to(device)
    assert_same_bytes(layer(input=x), layer(x))


def test_layers_share_constants(device, monkeypatch):
    """A layer finds or makes them, also in a process that has none yet, and in a trace."""
    a, b, other = (packed(n=n, k=k).to(device) for n, k in ((70, 192), (33, 192), (33, 256)))
    assert a._kind == b._kind != other._kind
    x, z = (randn(3, k, seed=4).to(device) for k in (192, 256))
    want = a(x), b(x), other(z)
    file = pickle.dumps(a)
    monkeypatch.setattr(weights, "CONSTANTS", weights.SharedConstants())
    shared = vars(weights.CONSTANTS)
    torch._dynamo.reset()
    compiled = torch.compile(lambda: (a(x), b(x), other(z)), fullgraph=True, backend="eager")
    for found, y in zip(compiled(), want, strict=True):
        assert_same_bytes(found, y)
    assert set(shared) == {a._kind, other._kind}
    shared.clear()
    assert_same_bytes(a(x), want[0])
    assert list(shared) == [a._kind]
    shared.clear()
    loaded = pickle.loads(file)
    assert loaded._constants_are_here()
    assert_same_bytes(loaded(x), want[0])


def test_every_kind_has_its_own_constants(monkeypatch):
    """Formats that differ in one thing only, after each other and alone."""
    monkeypatch.setattr(weights, "CONSTANTS", weights.SharedConstants())
    kinds = ((4, "lloyd", 32), (4, "lloyd", 0), (4, "uniform", 32), (4, "uniform", 0), (8, None, 0))
    layers = [tt.PackedLinear.from_linear(linear(), tt.WeightFormat(*kind)) for kind in kinds]
    layers.append(tt.PackedLinear.from_linear(linear(k=256), tt.WeightFormat(4)))
    xs = [randn(3, layer.in_features, seed=4) for layer in layers]
    found = [layer(x) for layer, x in zip(layers, xs, strict=True)]
    for layer, x, y in zip(layers, xs, found, strict=True):
        vars(weights.CONSTANTS).clear()
        assert_same_bytes(layer(x), y)


def test_compiled_without_constants():
    """Layers that have not placed any: loaded into an empty one, and moved by hand."""
    layer = packed()
    x = randn(3, 192, seed=4)
    want = layer(x)
    loaded = tt.PackedLinear(192, 70, FORMAT, bias=True, channel_inverse=True, device="meta")
    loaded.load_state_dict(layer.state_dict(), assign=True)
    assert not loaded._constants_are_here()
    torch._dynamo.reset()
    assert_same_bytes(torch.compile(loaded, fullgraph=True, backend="eager")(x), want)
    meta = copy.deepcopy(layer)
    for name, parameter in layer.named_parameters():
        setattr(meta, name, nn.Parameter(parameter.to("meta"), requires_grad=False))
    compiled = torch.compile(meta, fullgraph=True, backend="eager")
    assert compiled(x.to("meta")).device.type == "meta"


def test_export_leaves_no_constants(monkeypatch):
    monkeypatch.setattr(weights, "CONSTANTS", weights.SharedConstants())
    layer, x = packed(), randn(3, 192, seed=4)
    for strict in (False, True):
        exported = torch.export.export(layer, (x,), strict=strict)
        assert_same_bytes(exported.module()(x), layer(x))
    assert list(vars(weights.CONSTANTS)) == [layer._kind]


def test_shared_constants_are_real(monkeypatch):
    """They serve everybody, whoever was the first to ask for them."""
    monkeypatch.setattr(weights, "CONSTANTS", weights.SharedConstants())
    shared = vars(weights.CONSTANTS)
    with FakeTensorMode():
        fake = tt.PackedLinear(192, 70, FORMAT)
        assert fake(torch.empty(3, 192)).shape == (3, 70)
    with torch.inference_mode():
        layer = packed()
    assert fake._kind != layer._kind
    assert type(shared[layer._kind].signs) is torch.Tensor
    assert not shared[layer._kind].signs.is_inference()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_as_of_a_linear_layer(given, dtype, device):
    """Its dtype for activations and bias, the packed weight as it is; nothing without it."""
    source = linear(device=device)
    layer, x = tt.PackedLinear.from_linear(source, tt.WeightFormat(8)), randn(3, 192, seed=4)
    x = x.to(device, given)
    with torch.no_grad():
        like = layer(x.float())
        with torch.autocast(device.type, dtype):
            y = layer(x)
            assert y.dtype is source(x).dtype is dtype
            with torch.autocast(device.type, enabled=False):
                assert layer(x.float()).dtype is torch.float32
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            assert_same_bytes(compiled(x), y)
        torch.testing.assert_close(y.float(), like, rtol=0.02, atol=0.05)
        assert_same_bytes(layer(x.float()), like)


def test_layers_on_the_meta_device():
    for layer in (packed().to("meta"), tt.PackedLinear(192, 70, FORMAT, device="meta")):
        y = layer(torch.empty(3, 192, device="meta"))
        assert y.shape == (3, 70) and y.device.type == "meta"
        with pytest.raises(ValueError, match=r"x has shape \[3, 191\], expected \[..., 192\]"):
            layer(torch.empty(3, 191, device="meta"))


def test_layers_that_are_packed_in_inference_mode():
    """They can be loaded, moved and cut outside of it."""
    with torch.inference_mode():
        layer = packed()
        parts = layer.rows(0, 32), layer.columns(0, 64)
    for one in (layer, *parts):
        assert not any(p.is_inference() for p in one.parameters())
        one.load_state_dict(one.state_dict())


def test_slices_of_a_layer(device):
    layer = packed(n=70, k=384).to(device)  # groups of 128
    x = randn(3, 384, seed=4).to(device)
    want = layer(x)
    parts = [layer.rows(0, 48), layer.rows(48, 70)]
    assert_same_bytes(torch.cat([part(x) for part in parts], -1), want)
    columns = [layer.columns(0, 128), layer.columns(128, 384)]
    assert all(part.bias is None and part.format.group == 128 for part in columns)
    total = columns[0](x[:, :128]) + columns[1](x[:, 128:]) + layer.bias
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-5)
    of_64 = packed(k=192).columns(0, 128)
    assert of_64.format.group == 64  # although 128 is a multiple of 128
    for call in (
        lambda: layer.rows(0, 47),
        lambda: layer.rows(8, 70),
        lambda: layer.rows(48, 48),
        lambda: layer.rows(0, 80),
        lambda: layer.columns(0, 64),
        lambda: layer.columns(0, 512),
    ):
        with pytest.raises(ValueError, match="are no slice of"):
            call()


def test_layers_that_cannot_be():
    with pytest.raises(ValueError, match="the weight has 100 input channels"):
        tt.PackedLinear(100, 10, FORMAT)
    with pytest.raises(ValueError, match="out_features is 0, supported: 1 and more"):
        tt.PackedLinear(64, 0, FORMAT)
