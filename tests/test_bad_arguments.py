"""What every op refuses, and how it says so.

One table per op, in tests/bad_arguments with a file per room. Each case changes an argument of a
good call and names the exception of the public function and a part of its text. The raw op must
refuse the same call with RuntimeError and the same part of the text (or `raw`, where the words
differ). Nothing may have been written by then.
"""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map, tree_map_only

import torch_turboquant as tt
from tests.bad_arguments import calls
from tests.bad_arguments.attention import PAGED_ATTENTION, new
from tests.bad_arguments.cache import CACHE, NUM_PAGES, SLOTS, TABLE, TABLES, TAIL
from tests.bad_arguments.calls import CASES, GOOD, ops, public, raw, tensors
from tests.bad_arguments.common import LEVELS, ONE_DEVICE, SAME, SIGNS, SKIP, STEPS, D, floats
from tests.bad_arguments.mla import LATENTS, MLA_LOAD
from tests.helpers import assert_same_bytes, int32


@pytest.mark.parametrize("call", [public, raw])
@pytest.mark.parametrize("name", GOOD)
def test_the_good_call_is_good(name, call):
    call(name, GOOD[name])


@pytest.mark.parametrize("call", [public, raw])
def test_own_tokens_and_outputs_without_lse_are_good(call):
    out = torch.zeros(3, 4, D)
    call("paged_attention_out", {**PAGED_ATTENTION, **new(), "out": out, "lse": None})
    assert_same_bytes(out, call("paged_attention", {**PAGED_ATTENTION, **new()})[0])
    few = {"tail": TAIL._replace(ring=TAIL.ring[:, :, :4].contiguous()), "max_q_len": 10**9}
    call("paged_attention", {**PAGED_ATTENTION, **new(**few)})


@pytest.mark.parametrize(
    ("name", "bad"), CASES, ids=lambda v: v if isinstance(v, str) else v.text[:50]
)
def test_bad_argument(name, bad):
    arguments = {**GOOD[name], **bad.changes}
    held = [t for t in tensors(arguments) if t.device.type != "meta"]
    before = [t.clone() for t in held]
    with pytest.raises(bad.error, match=re.escape(bad.text)):
        public(name, arguments)
    if bad.raw is not SKIP:
        text = bad.text if bad.raw is SAME else bad.raw
        with pytest.raises(RuntimeError, match=re.escape(text)):
            raw(name, arguments)
    for t, old in zip(held, before, strict=True):
        assert_same_bytes(t, old)


@pytest.mark.parametrize("name", [n for n in GOOD if "config" in GOOD[n]])
def test_objects_of_another_kind(name):
    """The name of a preset, what belongs to the other caches, or a ring that no Tail is made of."""
    latents = name.startswith("mla_")
    config, tables = ("LatentConfig", "LatentTables") if latents else ("CacheConfig", "CacheTables")
    other = GOOD["cache_store" if latents else "mla_store"]
    for argument, kind, wrong in (
        ("config", config, ["k4v4", other["config"]]),
        ("tables", tables, [None, other["tables"], GOOD[name]["config"]]),
        ("tail", "Tail", [TAIL.ring, TAIL.ring[0]]),
    ):
        for value in wrong if argument in GOOD[name] else []:
            text = f"{argument} must be a {kind}, got {type(value).__name__}"
            with pytest.raises(TypeError, match=text):
                public(name, {**GOOD[name], argument: value})


class Odd:
    """What the raw ops read of a LatentConfig, which would refuse these numbers."""

    def __init__(self, **changes):
        fields = ("latent_dim", "rope_dim", "page_size", "bits", "rope_dtype")
        vars(self).update({name: getattr(LATENTS, name) for name in fields}, **changes)


def test_numbers_that_only_raw_ops_can_be_given():
    """A config cannot hold them."""
    t, before = TABLES, CACHE.clone()
    store = (floats(3, 2, D), floats(3, 2, D), CACHE, SLOTS, *t)
    load = (CACHE, TABLE, int32(20, 5), *t[:4], t.center)
    k8v4 = tt.allocate_cache(tt.preset("k8v4", D, page_size=16), NUM_PAGES, 2)

    attention = (floats(2, 4, D), *load)
    for call, text in (
        (lambda: ops.cache_store(*store, 48, 4, 4, 3, 2), "page_size is 48, supported: 16, 32"),
        (
            lambda: ops.cache_store(*store, 16, 6, 4, 3, 2),
            "key_bits is 6, supported: 2, 3, 4, 5, 8",
        ),
        (lambda: ops.cache_store(*store, 16, 4, 5, 3, 2), "value_bits is 5, supported: 2, 3, 4, 8"),
        (
            lambda: ops.cache_store(*store, 16, 4, 4, 4, 2),
            "key_scale_mode is 4, supported: 0 (norm)",
        ),
        (lambda: ops.cache_store(*store, 16, 4, 4, 3, -1), "value_scale_mode is -1, supported"),
        (lambda: ops.cache_load(*load, 40, 16, 4, 4, 20, torch.half), "head_dim is 40, supported"),
        (lambda: ops.cache_load(*load, D, 8, 4, 4, 20, torch.half), "page_size is 8, supported"),
        (
            lambda: ops.cache_load(k8v4, *load[1:], D, 16, 8, 4, 20, torch.half),
            "key_levels must be absent at 8",
        ),
        (lambda: ops.paged_attention(*attention, 16, 4, 7, 0.1), "value_bits is 7, supported"),
        (
            lambda: ops.paged_attention(*attention, 16, 4, 4, 0.1, recent_window=-1),
            "recent_window is -1, supported: 0 and more",
        ),
        (
            lambda: ops.paged_attention(
                *attention, 16, 4, 4, 0.1, tail=TAIL.ring, tail_slots=TAIL.slots, sink_tokens=-1
            ),
            "sink_tokens is -1 but the tail has 6 rows",
        ),
        (
            lambda: ops.paged_attention(
                *attention, 16, 4, 4, 0.1, tail=TAIL.ring, tail_slots=TAIL.slots, sink_tokens=7
            ),
            "sink_tokens is 7 but the tail has 6 rows: supported are 1 row and more, and 0 to rows",
        ),
        (
            lambda: ops.paged_attention(*attention, 16, 4, 4, 0.1, tail=TAIL.ring),
            "tail needs tail_slots",
        ),
        (
            lambda: raw("mla_load", {**MLA_LOAD, "config": Odd(page_size=16)}),
            "page_size is 16, supported for latents: 32, 64, 128",
        ),
        (
            lambda: raw("mla_load", {**MLA_LOAD, "config": Odd(bits=2)}),
            "bits is 2, supported for latents: 3, 4, 5, 8",
        ),
        (
            lambda: raw("mla_load", {**MLA_LOAD, "config": Odd(latent_dim=192)}),
            "latent_dim is 192, supported: 128, 256, 512",
        ),
        (
            lambda: raw("mla_load", {**MLA_LOAD, "config": Odd(rope_dtype=torch.float32)}),
            "rope_dtype is",
        ),
        (
            lambda: ops.encode(floats(3, D), SIGNS, LEVELS, STEPS, 4, 9),
            "scale_mode is 9, supported: 0 (norm), 1 (preserve), 2 (mse), 3 (unbiased)",
        ),
    ):
        with pytest.raises(RuntimeError, match=re.escape(text)):
            call()
        first = text.split()[0]
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match=first):
            call()
    assert_same_bytes(CACHE, before)


OF_ANY_SIZE = {"sliding_window", "max_q_len", "max_seq_len"}
"""Windows and bounds that may exceed what they are compared with."""


@pytest.mark.parametrize("name", GOOD)
def test_integers_are_not_cut_to_32_bits(name, monkeypatch):
    """2^32 + 4 bits are not 4 bits."""
    call = {}

    class Recorder:
        def __getattr__(self, op):
            return lambda **given: call.update(given)

    with monkeypatch.context() as patch:
        patch.setattr(calls, "ops", Recorder())
        raw(name, GOOD[name])
    assert call
    for key, value in call.items():
        if type(value) is int and key not in OF_ANY_SIZE:
            with pytest.raises(RuntimeError):
                getattr(ops, name)(**{**call, key: value + 2**32})


# ---- fakes


def refuses(name, bad):
    """Whether the raw op refuses it in the words of the kernel or of the public function."""
    words = {bad.text, bad.text if bad.raw is SAME else bad.raw}
    try:
        raw(name, {**GOOD[name], **bad.changes})
    except RuntimeError as error:
        return any(text in str(error) for text in words)
    return False


@pytest.mark.parametrize("name", GOOD)
def test_what_fakes_refuse(name):
    """All that the kernels refuse without reading values; a good call has the kernel's shapes."""
    bads = [bad for n, bad in CASES if n == name and bad.raw is not SKIP]
    bads = [bad for bad in bads if bad.error is not RuntimeError]  # not values
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = raw(name, GOOD[name])
        accepted = [bad.text for bad in bads if not refuses(name, bad)]
    assert not accepted
    for one, other in zip(tensors(fake), tensors(raw(name, GOOD[name])), strict=True):
        assert one.device == other.device
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def given_to_raw(name):
    """The tensors of a good call that reach the raw op."""
    steps = () if name == "cache_store" else (TABLES.key_steps, TABLES.value_steps)
    others = (TAIL.valid,) if name == "cache_store" else ()
    return [t for t in tensors(GOOD[name]) if not any(t is unused for unused in (*steps, *others))]


@pytest.mark.parametrize("name", [name for name in GOOD if len(given_to_raw(name)) > 1])
def test_one_meta_tensor_among_others_is_refused(name):
    """torch sends such a call to the fake, which would do nothing. All on meta is a good call."""
    before = [t.clone() for t in tensors(GOOD[name])]
    for t in given_to_raw(name):
        arguments = tree_map(lambda x, t=t: x.to("meta") if x is t else x, GOOD[name])
        with pytest.raises(RuntimeError, match=ONE_DEVICE):
            raw(name, arguments)
    for t, old in zip(tensors(GOOD[name]), before, strict=True):
        assert_same_bytes(t, old)
    results = raw(name, tree_map_only(torch.Tensor, lambda t: t.to("meta"), GOOD[name]))
    assert all(t.is_meta for t in tensors(results))
