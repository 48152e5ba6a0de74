"""Gradients and tangents: every op but hadamard refuses them, also inside of torch.func."""

import re

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

import torch_turboquant as tt
from tests.bad_arguments.calls import GOOD, NO_FLOATS, READ_NO_STEPS, public, raw, tensors
from tests.bad_arguments.common import LEVELS, SIGNS, STEPS, D, floats
from tests.helpers import assert_same_bytes


def _replace_in(value, old, new):
    if value is old:
        return new
    if isinstance(value, tuple):
        return type(value)(*(_replace_in(v, old, new) for v in value))
    return value


@pytest.mark.parametrize("call", [public, raw])
@pytest.mark.parametrize("name", [n for n in GOOD if n != "hadamard"])
def test_gradients_are_refused(name, call):
    """For every floating-point input; not under no_grad or inference_mode."""
    text = (
        f"turboquant::{name} takes no gradient: call it under torch.no_grad() or detach its inputs"
    )
    kept = {key: value for key, value in GOOD[name].items() if key not in ("out", "lse")}
    if name in READ_NO_STEPS:
        kept["tables"] = kept["tables"]._replace(key_steps=None, value_steps=None)  # unused
    inputs = [t for t in tensors(list(kept.values())) if t.is_floating_point()]
    for t in inputs:
        needs = t.clone().requires_grad_()
        arguments = {key: _replace_in(value, t, needs) for key, value in GOOD[name].items()}
        with pytest.raises(RuntimeError, match=re.escape(text)):
            call(name, arguments)
        with torch.no_grad():
            call(name, arguments)
    with torch.inference_mode():
        call(name, GOOD[name])
    assert inputs or name in NO_FLOATS


@pytest.mark.parametrize("call", [public, raw])
@pytest.mark.parametrize("name", [n for n in GOOD if n not in ("hadamard", *NO_FLOATS)])
def test_tangents_are_refused(name, call):
    """Of every floating-point input, under no_grad as well; nothing has been written by then."""
    text = f"turboquant::{name} takes no forward-mode tangent: detach its inputs"
    good = dict(GOOD[name])
    if name in READ_NO_STEPS:
        good["tables"] = good["tables"]._replace(key_steps=None, value_steps=None)  # unused
    inputs = [t for t in tensors(good) if t.is_floating_point()]
    before = [t.clone() for t in tensors(GOOD[name])]
    for t in inputs:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(t, torch.ones_like(t))
            arguments = {key: _replace_in(value, t, dual) for key, value in GOOD[name].items()}
            with pytest.raises(RuntimeError, match=re.escape(text)):
                call(name, arguments)
            with torch.no_grad(), pytest.raises(RuntimeError, match=re.escape(text)):
                call(name, arguments)
    for t, old in zip(tensors(GOOD[name]), before, strict=True):
        assert_same_bytes(t, old)
    assert inputs
    with forward_ad.dual_level():
        call(name, GOOD[name])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_tangents_are_refused_inside_transforms():
    """Of a level that is not the innermost, too; tensors without a tangent are taken."""
    x, t = floats(3, D), floats(2, 3, D)[0]

    def scale(x):
        return tt.encode(x, SIGNS, LEVELS, STEPS, 4)[1].float().sum()

    def inner(x, y):
        return func.jvp(lambda z: z.sum() * scale(x), (y,), (t,))[1]

    refused = pytest.raises(RuntimeError, match="turboquant::encode takes no forward-mode tangent")
    for call in (
        lambda: func.jvp(scale, (x,), (t,)),
        lambda: func.jacfwd(scale)(x),
        lambda: func.linearize(scale, x),
        lambda: func.vmap(lambda x, t: func.jvp(scale, (x,), (t,)))(x, t),
        lambda: func.jvp(lambda x: inner(x, x), (x,), (t,)),
        lambda: func.jvp(lambda x: func.grad(lambda z: z.sum() * scale(x))(t), (x,), (t,)),
    ):
        with refused:
            call()
    with pytest.raises(RuntimeError, match="turboquant::encode takes no gradient"):
        func.grad(lambda x: inner(x, x))(x)
    inner(x, t)
    func.jvp(lambda x: x.sum() * scale(x.detach()), (x,), (t,))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_derivatives_are_refused_inside_transforms_by_the_ops_of_a_step():
    """They have no kernel at the Autograd key, and their compiled kernel sees no levels."""
    good = GOOD["paged_attention"]
    q, t = good["q"], torch.ones_like(good["q"])

    def out(q):
        return raw("paged_attention", {**good, "q": q})[0].float().sum()

    def stored(k):
        raw("cache_store", {**GOOD["cache_store"], "k": k})
        return k.sum()

    k = GOOD["cache_store"]["k"]
    for name, call in (
        ("paged_attention takes no gradient", lambda: func.grad(out)(q.float())),
        ("paged_attention takes no gradient", lambda: func.jacrev(out)(q.float())),
        ("paged_attention takes no forward-mode", lambda: func.jvp(out, (q,), (t,))),
        ("paged_attention takes no forward-mode", lambda: func.linearize(out, q)),
        ("cache_store takes no gradient", lambda: func.grad(stored)(k)),
        ("cache_store takes no forward-mode", lambda: func.jvp(stored, (k,), (k,))),
    ):
        with pytest.raises(RuntimeError, match=f"turboquant::{name}"):
            call()
    func.jvp(lambda q: q.float().sum() * out(q.detach()), (q,), (t,))
    batched = func.vmap(lambda q: raw("paged_attention", {**good, "q": q})[0])(torch.stack([q, t]))
    for one, alone in zip(batched, (q, t), strict=True):
        assert_same_bytes(one, raw("paged_attention", {**good, "q": alone})[0])


def test_gradients_of_lists_are_refused():
    x = floats(1, 2, 5, 16)
    needs = [x, x.clone().requires_grad_()]
    energy, partners = floats(2, 16).requires_grad_(), torch.arange(16)
    for name, call in (
        ("query_energy", lambda: tt.query_energy(needs, 2)),
        ("learn_center", lambda: tt.learn_center(needs)),
        (
            "learn_center",
            lambda: tt.learn_center([x], [energy], partners),
        ),
    ):
        with pytest.raises(RuntimeError, match=f"turboquant::{name} takes no gradient"):
            call()
        with torch.no_grad():
            call()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode tangent"):
        tt.query_energy([x, forward_ad.make_dual(x, x)], 2)


def test_the_transform_has_no_gradient_for_its_signs():
    with pytest.raises(RuntimeError, match="gradient for x only: detach the signs"):
        tt.hadamard(floats(2, D), SIGNS.clone().requires_grad_())
