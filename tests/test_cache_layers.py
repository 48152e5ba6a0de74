"""Layers that are stored in one call: the bytes of layers one by one, or an error and none."""

import pytest
import torch
from torch.utils._pytree import tree_map_only

import torch_turboquant as tt
from tests.cache_cases import HEADS
from tests.helpers import assert_same_bytes, garbage_cache, int32, paged, randn, to_device


class Layers:
    """Two layers of a batch, as models have them, and what cache_store needs to store them."""

    def __init__(
        self, name="k4v4", d=64, dtype=torch.bfloat16, center=True, tail=True, layout="bshd"
    ):
        sinks, window = (4, 5) if tail else (0, 0)
        self.config = tt.preset(name, d, page_size=16, sink_tokens=sinks, recent_window=window)
        self.lengths = [20, 20]
        self.tables, self.k, self.v, self.caches, self.rings = [], [], [], [], []
        self.num_pages, _, slots = paged(self.lengths, 16)
        self.slots = torch.cat(slots)
        for layer in range(2):
            known = randn(HEADS, d, seed=layer) if center else None
            self.tables.append(tt.make_tables(self.config, layer, center=known))
            for held, seed in ((self.k, 10 + layer), (self.v, 20 + layer)):
                held.append(self.of_layout(randn(2, 20, HEADS, d, seed=seed, dtype=dtype), layout))
            self.caches.append(garbage_cache(self.config, self.num_pages, HEADS))
            if tail:
                self.rings.append(tt.allocate_tail(self.config, 3, HEADS, dtype, 20))
        self.tail_slots = torch.tensor([2, 0])
        self.batch = {"seq_lens": int32(20, 20), "cu_seqlens_q": int32(0, 20, 40)}

    @staticmethod
    def of_layout(x, layout):
        """[batch, tokens, heads, d] -> [batch, heads, tokens, d] over memory of some order."""
        if layout == "bshd":  # a projection's output
            return x.transpose(1, 2)
        if layout == "bhsd":  # tokens of two sequences lie at no equal distances
            return x.transpose(1, 2).contiguous()
        if layout == "gaps":  # rows that do not start at multiples of 16 bytes
            wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype)
            wide[..., 1:-2] = x
            return wide[..., 1:-2].transpose(1, 2)
        assert layout == "sbhd"  # sequences lie inside of a position
        return x.transpose(0, 1).contiguous().permute(1, 2, 0, 3)

    def tails(self, rings):
        return [tt.Tail(ring, self.tail_slots.to(ring.device)) for ring in rings]

    def one_by_one(self):
        caches, rings = [c.clone() for c in self.caches], [r.clone() for r in self.rings]
        for i in range(2):
            k, v = (x[i].transpose(1, 2).flatten(0, 1) for x in (self.k, self.v))
            tail = self.tails(rings)[i] if rings else None
            tt.cache_store(
                k, v, caches[i], self.slots, self.config, self.tables[i], tail=tail, **self.batch
            )
        return caches, rings

    def together(self, device="cpu", **changes):
        """Stores into copies and returns them, also after an error."""
        caches, rings = ([t.to(device, copy=True) for t in x] for x in (self.caches, self.rings))
        slots = self.tail_slots.to(device)
        arguments = {
            "k": [self.moved(x, device) for x in self.k],
            "v": [self.moved(x, device) for x in self.v],
            "caches": caches,
            "slot_mapping": self.slots.to(device),
            "config": self.config,
            "tables": [to_device(t, device) for t in self.tables],
            "tails": [tt.Tail(ring, slots) for ring in rings],
            **{name: t.to(device) for name, t in self.batch.items()},
        }
        self.error = None
        try:
            tt.cache_store_layers(**(arguments | changes))
        except (TypeError, ValueError, RuntimeError) as error:
            self.error = error
        return caches, rings

    @staticmethod
    def moved(x, device):
        """On the device with the same strides."""
        if torch.device(device).type == "cpu":
            return x
        size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        memory = torch.as_strided(x, (size,), (1,)).to(device)
        return torch.as_strided(memory, x.shape, x.stride())


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "gaps", "sbhd"])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize(("name", "dtype"), [("k4v4", torch.bfloat16), ("k5v4u", torch.float32)])
def test_layers_together_are_layers_one_by_one(name, dtype, tail, layout, device):
    layers = Layers(name, dtype=dtype, center=tail, tail=tail, layout=layout)
    expected = layers.one_by_one()
    actual = layers.together(device)
    assert layers.error is None
    for found, wanted in zip(actual, expected, strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert_same_bytes(one.cpu(), other)


def test_tiny(device):
    """For compute-sanitizer (tests/sanitize_cuda.sh)."""
    for layout in ("bshd", "gaps"):
        layers = Layers(layout=layout)
        (expected, _), (found, _) = layers.one_by_one(), layers.together(device)
        for one, other in zip(found, expected, strict=True):
            assert_same_bytes(one, other)


def test_no_layers_are_stored_as_nothing():
    tt.cache_store_layers([], [], [], torch.arange(3), tt.preset("k4v4", 64), [])


def _with_last(items, wrong):
    return [*items[:-1], wrong]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda x: {"v": x.v[:1]}, ValueError, "v are of 1 layers, k of 2"),
        (lambda x: {"k": torch.stack(x.k)}, TypeError, "k must be a list with a tensor of each"),
        (lambda x: {"k": [None, x.k[1]]}, TypeError, "k must be a tensor, got NoneType"),
        (lambda x: {"caches": x.caches * 2}, ValueError, "caches are of 4 layers, k of 2"),
        (lambda x: {"tables": x.tables[:1]}, ValueError, "tables are of 1 layers, k of 2"),
        (lambda x: {"tails": x.tails(x.rings)[:1]}, ValueError, "tails are of 1 layers, k of 2"),
        (lambda x: {"tails": x.rings}, TypeError, "tails must be a Tail, got Tensor"),
        (
            lambda x: {"v": _with_last(x.v, x.v[1].float())},
            TypeError,
            "v has dtype float32, supported: bfloat16",
        ),
        (lambda x: {"k": _with_last(x.k, x.k[1][:, :1])}, ValueError, "expected [2, 1, 20, 64]"),
        (lambda x: {"k": _with_last(x.k, x.k[1][0])}, ValueError, "k has shape [2, 20, 64]"),
        (
            lambda x: {"caches": _with_last(x.caches, x.caches[1][..., :-1])},
            ValueError,
            "cache has shape",
        ),
        (
            lambda x: {"tables": _with_last(x.tables, x.tables[1]._replace(center=None))},
            ValueError,
            "tables of some layers have a center and those of others have none",
        ),
        (lambda x: {"seq_lens": None}, ValueError, "tail needs seq_lens"),
        (
            lambda x: {
                "tails": _with_last(x.tails(x.rings), tt.Tail(x.rings[1], x.tail_slots + 0))
            },
            ValueError,
            "tails of all layers must have the same slots",
        ),
        (lambda x: {"slot_mapping": x.slots[:-1]}, ValueError, "slot_mapping has shape [39]"),
        (lambda x: {"slot_mapping": x.slots + 999}, RuntimeError, "slot_mapping holds"),
        (
            lambda x: {"k": [t[..., :48] for t in x.k], "v": [t[..., :48] for t in x.v]},
            ValueError,
            "k has head_dim 48, but the config has 64",
        ),
    ],
)
def test_layers_that_do_not_fit_leave_all_of_them_alone(change, error, text):
    layers = Layers()
    found = layers.together(**change(layers))
    assert isinstance(layers.error, error) and text in str(layers.error)
    for after, before in zip(found, (layers.caches, layers.rings), strict=True):
        for one, other in zip(after, before, strict=True):
            assert_same_bytes(one, other)


@pytest.mark.parametrize(
    ("place", "change", "text"),
    [
        (1, lambda v: v[:1], "v are of 1 layers, k of 2"),
        (2, lambda caches: [], "caches are of 0 layers, k of 2"),
        (0, lambda k: [], "v are of 2 layers, k of 0"),
        (
            2,
            lambda caches: [caches[0], caches[1][:, :1].contiguous()],
            "cache has 1 KV heads but k has 2",
        ),
        (4, lambda signs: [signs[0], signs[1][:-1]], "key_signs has shape [63]"),
        (5, lambda signs: signs[:1], "value_signs are of 1 layers, k of 2"),
        (10, lambda centers: centers[:1], "centers are of 1 layers, k of 2"),
        (16, lambda rings: rings[:1], "tails are of 1 layers, k of 2"),
        (18, lambda lengths: None, "tail needs seq_lens"),
        (1, lambda v: [v[0], v[1].float()], "v has dtype float32"),
        (0, lambda k: [k[0], k[1][0]], "k has shape [2, 20, 64]"),
    ],
)
def test_the_raw_op_checks_all_layers_first(place, change, text):
    x = Layers()
    t = x.tables
    arguments = [
        x.k, x.v, x.caches, x.slots, [y.key_signs for y in t], [y.value_signs for y in t],
        t[0].key_levels, t[0].value_levels, t[0].key_steps, t[0].value_steps,
        [y.center for y in t], 16, 4, 4, 3, 2, x.rings, x.tail_slots,
        x.batch["seq_lens"], x.batch["cu_seqlens_q"], 4,
    ]  # fmt: skip
    held = [y.clone() for y in (*x.caches, *x.rings)]
    arguments[place] = change(arguments[place])
    fakes = tree_map_only(torch.Tensor, lambda y: y.to("meta"), arguments)
    with pytest.raises(RuntimeError) as caught:
        torch.ops.turboquant.cache_store_layers(*arguments)
    assert text in str(caught.value)
    named = text.split()[0]
    with pytest.raises(RuntimeError, match=f"^{named} "):  # in words of its own
        torch.ops.turboquant.cache_store_layers(*fakes)
    for after, before in zip((*x.caches, *x.rings), held, strict=True):
        assert_same_bytes(after, before)


def test_layers_of_one_allocation(device):
    """They interleave without sharing a byte; layers that do share some are refused."""
    layers = Layers("k4v4", dtype=torch.bfloat16, center=False, tail=True, layout="bshd")
    expected = layers.one_by_one()

    def together(parts):
        """Both layers' tensors as parts [:, 0] and [:, 1] of one, page by page."""
        memory = torch.stack(parts, dim=1).to(device)
        return [memory[:, i] for i in range(2)]

    caches, rings = together(layers.caches), together(layers.rings)
    slots = layers.tail_slots.int().to(device)
    tails = [tt.Tail(ring, slots) for ring in rings]
    layers.together(device, caches=caches, tails=tails, slot_mapping=layers.slots.int().to(device))
    assert layers.error is None
    for found, wanted in zip((caches, rings), expected, strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert_same_bytes(one.contiguous(), other)
    held = [t.clone() for t in (*caches, *rings)]
    flat, shape = caches[0]._base.view(-1), caches[0].shape
    record = shape[2]
    for distance in (0, 16, record):  # the second layer begins inside the first
        other = torch.as_strided(flat[distance:], (shape[0] - 1, *shape[1:]), caches[0].stride())
        layers.together(device, caches=[caches[0][:-1], other], tails=[])
        assert "cache and cache share memory" in str(layers.error)
    layers.together(device, caches=[caches[0], caches[0].contiguous()], tails=[tails[0], tails[0]])
    assert "tail and tail share memory" in str(layers.error)
    for one, other in zip((*caches, *rings), held, strict=True):
        assert_same_bytes(one, other)
