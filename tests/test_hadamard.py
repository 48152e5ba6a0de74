"""The signed Walsh-Hadamard transform: every rounding, the algebra, the gradient."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import func
from torch.autograd import forward_ad

import torch_turboquant as tt
from tests.helpers import FLOATS, HEAD_DIMS, assert_same_bytes, hard_vectors, randn, signs_of
from torch_turboquant.ops.hadamard import hadamard_reference, sqrt_reference, tree_sum_reference
from torch_turboquant.signs import rotation_matrix

# m = 1, 3, 5, 7, 9 and both ends of what is supported
DIMS = sorted({*HEAD_DIMS, 2, 4, 6, 10, 14, 18, 1024, 2304, 3584, 4096})
EPS = 2.0**-24


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("d", DIMS)
def test_every_rounding_is_the_references(d, dtype, device):
    x, signs = randn(7, d, seed=d, dtype=dtype), signs_of(d)
    for inverse in (False, True):
        out = tt.hadamard(x.to(device), signs.to(device), inverse)
        assert_same_bytes(out, hadamard_reference(x, signs, inverse))


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_hard_vectors(d, device):
    signs = signs_of(d)
    x = hard_vectors(d, signs)
    x = x[torch.isfinite(x).all(-1)] / 4096  # the transform itself has no range reduction
    assert_same_bytes(tt.hadamard(x.to(device), signs.to(device)), hadamard_reference(x, signs))


@pytest.mark.parametrize("d", [d for d in DIMS if d <= 1024])
def test_is_the_rotation_matrix(d, device):
    """Within the rounding of log2(n) levels of additions, a scaling and a sum of m products."""
    x, signs = randn(5, d, seed=1), signs_of(d, 3)
    rotation = rotation_matrix(d, signs)
    assert np.abs(rotation @ rotation.T - np.eye(d)).max() < 1e-13
    exact = x.double().numpy() @ rotation.T
    roundings = int(np.log2(d & -d)) + 1 + 2 * (d // (d & -d))
    bound = roundings * EPS * np.linalg.norm(x.numpy(), axis=1, keepdims=True)
    forward = tt.hadamard(x.to(device), signs.to(device)).cpu()
    assert (np.abs(forward.numpy() - exact) <= bound).all()
    back = tt.hadamard(forward.to(device), signs.to(device), inverse=True).cpu()
    assert (np.abs(back.numpy() - x.numpy()) <= 3 * bound).all()


def test_native_header_agrees(native):
    for d in (2, 64, 80, 96, 112, 128, 144, 576):
        x, signs = randn(d, seed=d), signs_of(d)
        forward = torch.tensor(native.rotate(x.tolist(), signs.tolist()))
        assert_same_bytes(forward.float(), hadamard_reference(x, signs))
        back = torch.tensor(native.rotate_back(x.tolist(), signs.tolist()))
        assert_same_bytes(back.float(), hadamard_reference(x, signs, inverse=True))
        assert native.tree_sum(x.tolist()) == float(tree_sum_reference(x))


def test_hartley_constants_of_the_header(native):
    from torch_turboquant.signs import hartley_matrix

    for m in (3, 5, 7, 9):
        row = [native.hartley(m, j) for j in range(m)]  # row 1: M[b][j] is its entry b * j mod m
        assert row == [float(v) for v in hartley_matrix(m)[1].astype(np.float32)]


@given(
    lead=st.lists(st.integers(0, 4), max_size=3),
    offset=st.integers(0, 9),
    gap=st.integers(0, 5),
    d=st.sampled_from([2, 12, 16, 64, 80]),
    dtype=st.sampled_from(FLOATS),
)
def test_views(lead, offset, gap, d, dtype):
    """Any leading shape; rows at any alignment and distance."""
    rows = int(np.prod(lead))
    buffer = randn(offset + rows * (d + gap) + 1, seed=0, dtype=dtype)
    x = buffer[offset : offset + rows * (d + gap)].view(rows, d + gap)[:, :d]
    x = x.as_strided((*lead, d), _strides(lead, d + gap), buffer.storage_offset() + offset)
    signs = signs_of(d)
    assert_same_bytes(tt.hadamard(x, signs), hadamard_reference(x.clone(), signs))


def _strides(lead, row):
    strides, step = [1], row
    for n in reversed(lead):
        strides.insert(0, step)
        step *= max(n, 1)
    return strides


def test_transposed_leading_dimensions():
    x, signs = randn(3, 5, 4, 80, seed=2).permute(2, 0, 1, 3), signs_of(80)
    out = tt.hadamard(x, signs)
    assert out.is_contiguous()
    assert_same_bytes(out, hadamard_reference(x, signs))
    expanded = randn(1, 80, seed=3).expand(6, 80)
    assert_same_bytes(tt.hadamard(expanded, signs), hadamard_reference(expanded, signs))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("d", [64, 80])
def test_gradient(d, inverse, device):
    """The gradient is the transpose of the matrix, whatever the layout of the incoming gradient."""
    signs = signs_of(d).to(device)
    rotation = torch.from_numpy(rotation_matrix(d, signs_of(d)))
    matrix = rotation.T if inverse else rotation
    x = randn(3, 4, d, seed=1).to(device).requires_grad_()
    weight = randn(4, 3, d, seed=2).transpose(0, 1)
    (tt.hadamard(x, signs, inverse) * weight.to(device)).sum().backward()
    expected = weight.double() @ matrix
    assert (x.grad.cpu().double() - expected).abs().max() < 40 * EPS * weight.norm(dim=-1).max()
    assert_same_bytes(
        x.grad, hadamard_reference(weight.contiguous(), signs_of(d), inverse=not inverse)
    )
    # a gradient of a sum is an expanded scalar, with strides 0
    (grad,) = torch.autograd.grad(tt.hadamard(x, signs, inverse).sum(), x)
    assert_same_bytes(
        grad, hadamard_reference(torch.ones(3, 4, d), signs_of(d), inverse=not inverse)
    )


def test_second_derivative():
    x, signs = randn(2, 16, seed=4).requires_grad_(), signs_of(16)
    (first,) = torch.autograd.grad(tt.hadamard(x, signs).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    rotation = torch.from_numpy(rotation_matrix(16, signs))
    y = x.detach().double() @ rotation.T
    expected = (6 * y * (torch.ones(2, 16).double() @ rotation.T)) @ rotation
    assert (second.double() - expected).abs().max() < 1e-4 * expected.abs().max()


def test_reference_square_root_is_correctly_rounded():
    x = randn(20000, seed=5).abs() * 100
    root = sqrt_reference(x).double().numpy()
    exact = np.sqrt(x.double().numpy())
    half_unit = 0.5 * np.spacing(root.astype(np.float32)).astype(np.float64)
    assert (np.abs(root - exact) <= half_unit * (1 + 1e-6)).all()


# ---- forward mode and torch.func: the same as of the matrix


def _cube(transform):
    return lambda x: (transform(x) ** 3).sum()


def _dual(function, x, tangent):
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))))


DERIVATIVES = {
    "jvp": lambda f, x, t: func.jvp(f, (x,), (t,)),
    "forward_ad": _dual,
    "forward_ad under no_grad": lambda f, x, t: torch.no_grad()(_dual)(f, x, t),
    "forward_ad of a leaf": lambda f, x, t: _dual(f, x.clone().requires_grad_(), t),
    "forward_ad over reverse": lambda f, x, t: _dual(
        lambda y: torch.autograd.grad(_cube(f)(y), y, create_graph=True)[0],
        x.clone().requires_grad_(),
        t,
    ),
    "jacfwd": lambda f, x, t: func.jacfwd(f)(x),
    "jacrev": lambda f, x, t: func.jacrev(f)(x),
    "linearize": lambda f, x, t: func.linearize(f, x)[1](t),
    "grad": lambda f, x, t: func.grad(_cube(f))(x),
    "jvp of vmap": lambda f, x, t: func.jvp(func.vmap(f), (x,), (t,)),
    "vmap of jvp": lambda f, x, t: func.vmap(lambda x, t: func.jvp(f, (x,), (t,)))(x, t),
    "jvp of jvp": lambda f, x, t: func.jvp(
        lambda y: func.jvp(lambda x: f(x * y) ** 2, (x,), (t,))[1], (t,), (x,)
    ),
    "jvp of grad": lambda f, x, t: func.jvp(func.grad(_cube(f)), (x,), (t,)),
    "grad of jvp": lambda f, x, t: func.grad(lambda x: func.jvp(_cube(f), (x,), (t,))[1])(x),
    "strided tangent": lambda f, x, t: func.jvp(f, (x,), (t.T.contiguous().T,)),
    "expanded tangent": lambda f, x, t: func.jvp(f, (x,), (t[:1, :1].expand_as(t),)),
    "compiled jvp": lambda f, x, t: torch.compile(
        lambda x, t: func.jvp(f, (x,), (t,)), backend="aot_eager"
    )(x, t),
}


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop",
    "ignore:Attempted to insert",
    "ignore:`torch.jit.script` is deprecated",
)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives_are_those_of_the_matrix(derivative, device, request):
    if derivative == "compiled jvp" and device.type == "cuda" and torch.__version__ < "2.13":
        request.applymarker(
            pytest.mark.xfail(reason="wrong with torch 2.11 on CUDA: cause unknown")
        )
    signs, x, tangent = signs_of(12), randn(3, 12, seed=1), randn(3, 12, seed=2)
    signs, x, tangent = (part.to(device) for part in (signs, x, tangent))
    for inverse in (False, True):
        rotation = torch.from_numpy(rotation_matrix(12, signs_of(12))).float().to(device)
        matrix = rotation.T if inverse else rotation
        found, wanted = (
            torch.utils._pytree.tree_leaves(DERIVATIVES[derivative](function, x, tangent))
            for function in (
                lambda x, inverse=inverse: tt.hadamard(x, signs, inverse),
                lambda x, matrix=matrix: x @ matrix.T,
            )
        )
        assert wanted[-1].any()
        for one, other in zip(found, wanted, strict=True):
            bound = 1e-5 * float(other.detach().abs().max())
            torch.testing.assert_close(one, other, rtol=0, atol=bound)


def test_signs_have_no_derivative():
    x, signs = randn(2, 16, seed=1), signs_of(16)
    only_x = pytest.raises(RuntimeError, match="gradient for x only: detach the signs")
    with only_x:
        func.jvp(lambda s: tt.hadamard(x, s), (signs,), (signs,))
    with only_x:
        func.grad(lambda s: tt.hadamard(x, s).sum())(signs)
    with only_x:
        _dual(lambda s: tt.hadamard(x.clone().requires_grad_(), s), signs, signs)
