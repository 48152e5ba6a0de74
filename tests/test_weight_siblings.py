"""Packed layers that read the same input are one product, and nothing else changes."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn

from tests.helpers import randn
from torch_turboquant import weights
from torch_turboquant.weight_siblings import _MOST_CHANGES, _MOST_UNUSED, Siblings, join
from torch_turboquant.weights import PackedLinear, WeightFormat

K, SIZES = 128, (64, 16, 32)


@pytest.fixture
def products(monkeypatch):
    """Rows of the weights that were multiplied with."""
    called = []
    multiply = weights._linear_packed

    def noted(*arguments):
        called.append(arguments[4])
        return multiply(*arguments)

    monkeypatch.setattr(weights, "_linear_packed", noted)
    return called


def packed_layer(n, k=K, bias=False, form=None, seed=1, **options):
    linear = nn.Linear(k, n, bias)
    with torch.no_grad():
        for i, parameter in enumerate(linear.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed + i))
    return PackedLinear.from_linear(linear, form or WeightFormat(), **options)


class Family(nn.Module):
    """Three layers that read the same input."""

    def __init__(self, bias=False, seed=1):
        super().__init__()
        self.layers = nn.ModuleList(
            packed_layer(n, bias=bias, seed=seed + 2 * i) for i, n in enumerate(SIZES)
        )

    def joined(self):
        (self.siblings,) = join(self.layers)
        return self

    def forward(self, x):
        return [layer(x) for layer in self.layers]


def assert_equal(found, expected):
    """On a GPU the cut of a product may differ with its rows, and so the order of its sums."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        if one.is_cuda:
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 20), (0,)])
def test_one_product(bias, shape, products, device):
    alone, together = Family(bias).to(device), Family(bias).joined().to(device)
    x = randn(*shape, K, seed=9).to(device)
    for dtype in (torch.float32, torch.bfloat16):
        alone, together, x = alone.to(dtype), together.to(dtype), x.to(dtype)
        expected = alone(x)
        for _ in range(2):
            products.clear()
            assert_equal(together(x), expected)
            assert products == [sum(SIZES)]
    wide = torch.cat([x, x], dim=-1)[..., ::2]  # not contiguous
    assert_equal(together(wide), alone(wide))


def test_any_order_and_who_is_called_again(products):
    alone, together = Family(), Family().joined()
    x, y = randn(3, K, seed=9), randn(3, K, seed=10)
    calls = [(2, x), (0, x), (1, x), (0, y), (0, y), (1, y), (2, y)]
    for place, given in calls:
        assert_equal([together.layers[place](given)], [alone.layers[place](given)])
    # that of y's second call was thrown away once
    assert [n for n in products if n not in SIZES] == [sum(SIZES)] * 3
    assert together.siblings.waiting is None


def test_parameters_stay_theirs(products):
    """Names, bytes and files as before; views of one tensor, which is all there is."""
    alone, together = Family(bias=True), Family(bias=True).joined()
    x = randn(1, K, seed=9)
    expected = together(x)
    found = together.state_dict()
    assert found.keys() == alone.state_dict().keys()
    for name, tensor in alone.state_dict().items():
        assert torch.equal(found[name], tensor)
    for name in ("weight", "bias"):  # neighbours, whose storages are as long as they are
        address = getattr(together.siblings, name).data_ptr()
        for layer in together.layers:
            held = getattr(layer, name)
            assert held.data_ptr() == held.untyped_storage().data_ptr() == address
            assert held.untyped_storage().nbytes() == held.nbytes
            address += held.nbytes
    file = io.BytesIO()
    torch.save(together.state_dict(), file)
    file.seek(0)
    other = Family(bias=True, seed=40).joined()
    other.load_state_dict(torch.load(file))  # copies into the views
    products.clear()
    assert_equal(other(x), expected)
    assert products == [sum(SIZES)]


def replace_by_assignment(family, other):
    family.load_state_dict(other.state_dict(), assign=True)


def replace_attributes(family, other):
    for mine, theirs in zip(family.layers, other.layers, strict=True):
        mine.weight, mine.bias = theirs.weight, theirs.bias


def replace_data(family, other):
    for mine, theirs in zip(family.parameters(), other.parameters(), strict=True):
        mine.data = theirs.data.clone()


def replace_one(family, other):
    family.layers[1].weight = other.layers[1].weight
    for mine, theirs in zip(family.parameters(), other.parameters(), strict=True):
        mine.data.copy_(theirs)


@pytest.mark.parametrize(
    "replace", [replace_by_assignment, replace_attributes, replace_data, replace_one]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_other_parameters(replace, compiled, products):
    """The next call has them, and they are put together again."""
    torch._dynamo.reset()
    family, other = Family(bias=True).joined(), Family(bias=True, seed=40)
    x = randn(2, K, seed=9)
    expected = other(x)
    call = torch.compile(family, fullgraph=True, backend="eager") if compiled else family
    with torch.no_grad():
        family(x)
        call(x)
        replace(family, other)
        if compiled and replace is replace_data:
            family(x)  # a compiled module cannot see it
        assert_equal(call(x), expected)
        products.clear()
        assert_equal(family(x), expected)
        assert products == [sum(SIZES)]


def test_a_compiled_family_is_one_product():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        op = torch.ops.turboquant.linear_packed.default
        graphs.append(sum(node.target is op for node in graph.graph.nodes))
        return graph

    family, x = Family().joined(), randn(2, K, seed=9)
    call = torch.compile(family, fullgraph=True, backend=backend)
    expected = Family()(x)
    with torch.no_grad():
        for _ in range(2):
            assert_equal(call(x), expected)
        assert graphs == [1] and family.siblings.waiting is None
        # a CUDA graph reads their weights where they are, as it does parameters
        assert family.siblings.weight._dynamo_static_input_type == "unguarded"
        family.to(torch.float16).load_state_dict(Family(seed=40).state_dict(), assign=True)
        assert_equal(call(x), Family(seed=40)(x))  # not put together again by a trace
        assert graphs == [1, 3]


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict):
    family, x = Family(bias=True).joined(), randn(2, K, seed=9)
    expected = family(x)
    program = torch.export.export(family, (x,), strict=strict)
    assert_equal(program.module()(x), expected)
    assert_equal(family(x), expected)
    assert family.layers[0]._siblings is family.siblings and family.siblings.waiting is None


def test_who_gets_other_tensors_parts(products):
    """As in attention to another sequence: right at once, and each alone from then on."""
    alone, family = Family(), Family().joined()
    x, y = randn(3, K, seed=9), randn(3, K, seed=10)
    for _ in range(2):
        assert_equal([family.layers[0](x)], [alone.layers[0](x)])
        products.clear()
        assert_equal([family.layers[1](y)], [alone.layers[1](y)])
        assert products == [SIZES[1], SIZES[1]]
    assert all(layer._siblings is None for layer in family.layers)


def test_who_is_called_alone_parts(products):
    family, x = Family().joined(), randn(3, K, seed=9)
    for _ in range(_MOST_UNUSED):
        assert family.layers[0]._siblings is family.siblings
        family.layers[0](x)
    products.clear()
    family.layers[0](x)
    assert products == [SIZES[0]] and family.layers[0]._siblings is None


def test_an_interrupted_call_is_forgotten():
    alone, family = Family(), Family().joined()
    x, y = randn(3, K, seed=9), randn(3, K, seed=10)
    family.layers[0](x)
    assert_equal(family(y), alone(y))
    assert family.layers[0]._siblings is family.siblings
    with pytest.raises(ValueError, match=r"x has shape \[3, 64\], expected"):
        family(y[:, :64])
    with pytest.raises(TypeError, match="x has dtype float64"):
        family(y.double())
    assert_equal(family(y), alone(y))
    assert family.layers[0]._siblings is family.siblings


def test_weights_that_come_and_go_part(products):
    """As those of a model that is offloaded."""
    alone, family, x = Family(), Family().joined(), randn(3, K, seed=9)
    for _ in range(_MOST_CHANGES + 1):
        for parameter in family.parameters():
            parameter.data = parameter.data.clone()
        assert_equal(family(x), alone(x))
    assert family.layers[0]._siblings is None
    another = Family().joined()
    another.layers[2].weight = nn.Parameter(
        another.layers[2].weight.to("meta"), requires_grad=False
    )
    assert_equal([layer(x) for layer in another.layers[:2]], alone(x)[:2])
    assert another.layers[0]._siblings is None
    another = Family(bias=True).joined()
    another.layers[2].bias = None
    found = another(x)
    assert_equal(found[:2], Family(bias=True)(x)[:2])
    assert another.layers[0]._siblings is None


def test_copies_stand_alone():
    family, x = Family().joined(), randn(3, K, seed=9)
    expected = family(x)
    copies = copy.deepcopy(family), pickle.loads(pickle.dumps(family))
    for other in copies:
        assert all(layer._siblings is None for layer in other.layers)
        assert_equal(other(x), expected)
        for mine, theirs in zip(family.parameters(), other.parameters(), strict=True):
            assert mine.data_ptr() != theirs.data_ptr()
    assert_equal([copy.deepcopy(family.layers[1])(x)], [expected[1]])


def test_in_inference_mode():
    alone, x = Family(), randn(3, K, seed=9)
    with torch.inference_mode():
        family = Family().joined()  # whose parameters nothing outside may change
        assert_equal(family(x), alone(x))
    later = Family().joined()
    with torch.inference_mode():
        assert_equal(later(x), alone(x))
    assert_equal(later(x), alone(x))
    assert later.siblings.weight is not None and not later.siblings.weight.is_inference()


def test_threads():
    """Each gets what belongs to its own tensor."""
    alone, family = Family(), Family().joined()
    inputs = [randn(4, K, seed=20 + i) for i in range(4)]
    expected = [alone(x) for x in inputs]
    wrong = []

    def run(x, wanted):
        for _ in range(200):
            found = family(x)
            if not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
                wrong.append(x)

    threads = [threading.Thread(target=run, args=a) for a in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_who_is_alike():
    def kinds(*layers):
        return [[layer.out_features for layer in one.layers] for one in join(layers)]

    a, b = packed_layer(64), packed_layer(32)
    assert kinds(a, b) == [[64, 32]]
    assert kinds(a) == kinds() == kinds(None, a, nn.Linear(K, 48)) == []
    assert kinds(a, packed_layer(48, form=WeightFormat(8)), b) == [[64, 32]]
    assert kinds(a, packed_layer(48, 256)) == []
    assert kinds(a, packed_layer(48, form=WeightFormat(group=64))) == []
    assert kinds(a, packed_layer(48, bias=True)) == []
    assert kinds(a, packed_layer(40)) == []  # not whole blocks of rows
    assert kinds(a, packed_layer(48, channel_scale=torch.ones(K))) == []
    half = packed_layer(48, bias=True).half()
    assert kinds(packed_layer(64, bias=True), half) == []
    shared = packed_layer(48)
    shared.rows_here = 16
    assert kinds(a, shared) == []
    assert isinstance(a._siblings, Siblings)
