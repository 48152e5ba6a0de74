"""torch.library.opcheck on every op: schema, autograd registration, fake tensors, AOT dispatch."""

import pytest
import torch
from torch.library import opcheck

import torch_turboquant as tt
from tests.helpers import garbage_cache, int32, paged, randn
from torch_turboquant.signs import SignKind, random_signs

ops = torch.ops.turboquant
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def hadamard_samples():
    for dtype in DTYPES:
        yield randn(2, 3, 80, seed=1, dtype=dtype), tt.random_signs(80, 0)
    yield randn(3, 64, seed=1).requires_grad_(), tt.random_signs(64, 0), True
    yield randn(4, 3, 64, seed=1).transpose(0, 1), tt.random_signs(64, 0)


def pack_samples():
    codes = torch.randint(8, (2, 3, 13), dtype=torch.uint8)
    yield codes, 3
    yield codes[0, 0], 8


def unpack_samples():
    codes = torch.randint(8, (2, 3, 13), dtype=torch.uint8)
    yield tt.pack(codes, 3), 3, 13
    yield tt.pack(codes, 5)[1], 5, 13


def encode_samples():
    for dtype, bits in zip(DTYPES, (1, 4, 5), strict=True):
        book = tt.Codebook.make(48, bits)
        x = randn(2, 3, 48, seed=1, dtype=dtype)
        yield x, tt.random_signs(48, 0), book.levels_tensor(), book.steps_tensor(4), bits, 2
    book = tt.Codebook.make(48, 8)
    x = randn(7, 48, seed=2)
    yield x, tt.random_signs(48, 0), None, book.steps_tensor(1), 8, 3, randn(48, seed=3)


def decode_samples():
    for sample, dtype in zip(encode_samples(), (*DTYPES, torch.float32), strict=True):
        _, signs, levels, _, bits, _, *center = sample
        yield *ops.encode(*sample), signs, levels, bits, dtype, *center


def group_encode_samples():
    for dtype in DTYPES:
        yield randn(2, 3, 96, seed=1, dtype=dtype), 32, 4
    yield randn(64, seed=1), 64, 2


def group_decode_samples():
    for (x, group, bits), dtype in zip(group_encode_samples(), (*DTYPES, DTYPES[0]), strict=True):
        yield *ops.group_encode(x, group, bits), group, bits, x.shape[-1], dtype


def projections():
    return tt.gaussian_projection(24, 48, 0), random_signs(48, 0, kind=SignKind.SKETCH)


def qjl_sketch_samples():
    for projection in projections():
        yield randn(2, 5, 48, seed=1), projection
        yield randn(48, seed=1, dtype=torch.bfloat16), projection


def qjl_score_samples():
    for projection in projections():
        q, x = randn(2, 3, 48, seed=1), randn(2, 5, 48, seed=2)
        yield q, *tt.qjl_sketch(x, projection), projection
        yield q[0].half(), *tt.qjl_sketch(x[0], projection), projection


def score_samples():
    book = tt.Codebook.make(48, 3)
    signs, center = tt.random_signs(48, 0), randn(48, seed=3)
    q, x = randn(2, 3, 48, seed=1), randn(2, 5, 48, seed=2)
    stored = ops.encode(x, signs, book.levels_tensor(), book.steps_tensor(), 3, 2)
    yield q, *stored, signs, book.levels_tensor(), 3
    for projection in projections():
        sketch = tt.qjl_sketch(x, projection)
        yield (
            q.bfloat16(),
            *stored,
            signs,
            book.levels_tensor(),
            3,
            center,
            *sketch,
            projection,
        )


def cache_parts(name, dtype, center, tail):
    config = tt.preset(name, 48, page_size=16, sink_tokens=2, recent_window=3)
    tables = tt.make_tables(config, 0, center=randn(2, 48, seed=4) if center else None)
    num_pages, table, slots = paged([20, 5], 16)
    cache = garbage_cache(config, num_pages, 2)
    k, v = randn(25, 2, 48, seed=5, dtype=dtype), randn(25, 2, 48, seed=6, dtype=dtype)
    ring = tt.allocate_tail(config, 3, 2, dtype, 20) if tail else None
    tail_slots = torch.tensor([2, 0]) if tail else None
    batch = (int32(20, 5), int32(0, 20, 25))
    return config, tables, table, torch.cat(slots), cache, k, v, ring, tail_slots, batch


def cache_store_samples():
    for name, dtype, center, tail in (
        ("k4v4", torch.float32, False, False),
        ("k5v3u", torch.bfloat16, True, True),
        ("k8v8", torch.float16, True, False),
    ):
        config, tables, _, slots, cache, k, v, ring, tail_slots, batch = cache_parts(
            name, dtype, center, tail
        )
        numbers = (16, config.key_bits, config.value_bits, 3, 2)
        extra = (ring, tail_slots, *batch, 2) if tail else ()
        yield k, v, cache, slots, *tables, *numbers, *extra


def query_energy_samples():
    for dtype in DTYPES:
        queries = [randn(2, 4, 7, 16, seed=i, dtype=dtype) for i in range(3)]
        yield queries, 2
        yield [q.transpose(1, 2).contiguous().transpose(1, 2) for q in queries], 4, 3


def learn_center_samples():
    for dtype in DTYPES:
        keys = [randn(2, 4, 7, 16, seed=i, dtype=dtype) for i in range(3)]
        yield keys, [], None, 2
        energies = list(ops.query_energy(keys, 4).unbind())
        yield keys, energies, torch.arange(16)


def cache_store_layers_samples():
    for sample in cache_store_samples():
        k, v, cache, slots, key_signs, value_signs, *book, center = sample[:11]
        numbers, extra = sample[11:16], sample[16:]
        k, v = (x.transpose(0, 1)[None] for x in (k, v))
        lists = [[x, x] for x in (k, v)] + [[cache, cache.clone()]]
        signs = [[x, x] for x in (key_signs, value_signs)]
        centers = [] if center is None else [center, center]
        rings = [extra[0], extra[0].clone()] if extra else []
        yield *lists, slots, *signs, *book, centers, *numbers, rings, *extra[1:]


def cache_load_samples():
    for name, dtype in zip(("k4v4", "k5v3u", "k8v8"), DTYPES, strict=True):
        config, tables, table, slots, cache, k, v, *_ = cache_parts(name, dtype, True, False)
        tt.cache_store(k, v, cache, slots, config, tables)
        constants = (*tables[:4], tables.center, 48, 16, config.key_bits, config.value_bits)
        yield cache, table, int32(20, 5), *constants, 22, dtype


def paged_attention_samples():
    for name, dtype, tail in (
        ("k4v4", torch.float32, False),
        ("k5v3u", torch.bfloat16, True),
        ("k8v8", torch.float16, False),
    ):
        config, tables, table, slots, cache, k, v, ring, tail_slots, batch = cache_parts(
            name, dtype, True, tail
        )
        stored = tt.Tail(ring, tail_slots) if tail else None
        tt.cache_store(
            k,
            v,
            cache,
            slots,
            config,
            tables,
            tail=stored,
            seq_lens=batch[0],
            cu_seqlens_q=batch[1],
        )
        q = randn(4 if tail else 2, 6, 48, seed=7, dtype=dtype)
        constants = (*tables[:4], tables.center, 16, config.key_bits, config.value_bits, 0.2)
        args = (q, cache, table, batch[0], *constants)
        if not tail:
            yield args
            continue
        valid = int32(2, 0).expand(3, 2).contiguous()
        sinks = randn(6, seed=8)
        options = int32(0, 3, 4), 3, ring, tail_slots, valid, 2, 3, 9, 30.0, sinks
        yield *args, *options
        qkv = randn(4, 10, 48, seed=9, dtype=dtype)
        yield *args, *options, qkv[:, 6:8], qkv[:, 8:]


def paged_attention_out_samples():
    for q, *others in paged_attention_samples():
        yield q, *others, {"out": torch.zeros_like(q), "lse": torch.zeros(q.shape[:2])}
        yield q, *others, {"out": torch.zeros_like(q)}


def store_and_attend_samples():
    for q, cache, table, lengths, *others in paged_attention_samples():
        tokens = len(q)
        new = [randn(tokens, cache.shape[1], 48, seed=s, dtype=q.dtype) for s in (10, 11)]
        options = others[9:-2] if len(others) > 20 else others[9:]
        options += [None, 1, None, None, None, 0, 0, 0, 0.0, None][len(options) :]
        yield (
            *(q, cache, table, lengths, *others[:9], *options, *new),
            {
                "slot_mapping": torch.arange(tokens),
                "key_steps": torch.tensor([0.3, 0.4]),
                "value_steps": torch.tensor([0.3]),
                "key_scale_mode": 3,
                "value_scale_mode": 2,
                "out": torch.zeros_like(q),
                "lse": torch.zeros(q.shape[:2]),
            },
        )


def paged_mass_samples():
    for q, cache, table, lengths, *others in paged_attention_samples():
        tokens, heads, _ = q.shape
        outputs = {"lse": randn(tokens, heads, seed=12), "mass": torch.zeros(2, cache.shape[1], 22)}
        yield q, cache, table, lengths, *others, outputs


def cache_move_samples():
    for name, dtype in (("k4v4", torch.int32), ("k5v3u", torch.int64)):
        config, *_, cache, _, _, _, _, _ = cache_parts(name, torch.float32, False, False)
        slots = torch.arange(10, dtype=dtype).view(2, 5)
        yield cache, slots, slots + 16, 48, 16, config.key_bits, config.value_bits


def latents_and_cache(name, dtype, center, **changes):
    config = tt.latent_preset(
        name, 128, 32, page_size=32, sink_tokens=2, recent_window=3, **changes
    )
    tables = tt.make_latent_tables(config, 0, center=randn(128, seed=4) if center else None)
    num_pages, table, slots = paged([40, 5], 32)
    cache = tt.allocate_latent_cache(config, num_pages)
    latent, rope = randn(45, 128, seed=5, dtype=dtype), randn(45, 32, seed=6, dtype=dtype)
    ring = tt.allocate_latent_tail(config, 3, dtype, 20)
    return config, tables, table, torch.cat(slots), cache, latent, rope, ring


LATENT_SAMPLES = (
    ("k4", torch.float32, False, {}),
    ("k5u", torch.bfloat16, True, {}),
    ("k8", torch.float16, True, {"transform": False, "rope_dtype": torch.float16}),
)


def mla_store_samples():
    for name, dtype, center, changes in LATENT_SAMPLES:
        config, tables, _, slots, cache, latent, rope, ring = latents_and_cache(
            name, dtype, center, **changes
        )
        numbers = (32, config.bits, 3, config.rope_dtype)
        args = (latent, rope, cache, slots, *tables[:4], *numbers)
        yield args
        batch = torch.tensor([2, 0]), int32(40, 5), int32(0, 40, 45)
        yield *args, ring, *batch, 2, center


def mla_load_samples():
    for name, dtype, center, changes in LATENT_SAMPLES:
        config, tables, table, slots, cache, latent, rope, _ = latents_and_cache(
            name, dtype, center, **changes
        )
        tt.mla_store(latent, rope, cache, slots, config, tables)
        constants = (tables.signs, tables.levels, tables.center)
        numbers = (128, 32, 32, config.bits, config.rope_dtype, 42, dtype)
        yield cache, table, int32(40, 5), *constants, *numbers


def mla_attention_samples():
    for name, dtype, center, changes in LATENT_SAMPLES:
        config, tables, table, slots, cache, latent, rope, ring = latents_and_cache(
            name, dtype, center, **changes
        )
        lengths, slots_of_tail = int32(40, 5), torch.tensor([2, 0])
        tail = tt.Tail(ring, slots_of_tail)
        batch = {"seq_lens": lengths, "cu_seqlens_q": int32(0, 40, 45)}
        tt.mla_store(latent, rope, cache, slots, config, tables, tail=tail, **batch)
        q = randn(4, 6, 128, seed=7, dtype=dtype), randn(4, 6, 32, seed=8, dtype=dtype)
        constants = (tables.signs, tables.levels, tables.center)
        args = (cache, table, lengths, *constants, 32, config.bits, config.rope_dtype, 0.1)
        yield *(part[:2] for part in q), *args
        valid = int32(2, 0).expand(3, 2).contiguous()
        options = int32(0, 3, 4), 3, ring, slots_of_tail, valid, 2, 3
        yield *q, *args, *options
        yield *q, *args, *options, latent[:4], rope[:4]


def mla_attention_out_samples():
    for q, *others in mla_attention_samples():
        yield q, *others, {"out": torch.zeros_like(q), "lse": torch.zeros(q.shape[:2])}
        yield q, *others, {"out": torch.zeros_like(q)}


WEIGHT_SAMPLES = (
    (tt.WeightFormat(4), 20, 128, torch.float32),
    (tt.WeightFormat(4, "uniform", 0), 5, 192, torch.bfloat16),
    (tt.WeightFormat(8), 16, 64, torch.float16),
)


def weight_encode_samples():
    for f, n, k, dtype in WEIGHT_SAMPLES:
        constants = (make(f.group_of(k)) for make in (f.signs, f.levels, f.steps))
        arguments = (randn(n, k, seed=1, dtype=dtype), *constants, f.bits, f.sub)
        yield arguments
        yield *arguments, randn(k, seed=2).abs() + 1


def weight_unpack_samples():
    for w, signs, *others in weight_encode_samples():
        packed = ops.weight_encode(w, signs, *others)
        yield packed, w.shape[0], signs.shape[0], others[2], others[3]


def weight_pack_samples():
    for arguments in weight_unpack_samples():
        codes, scale, multipliers = ops.weight_unpack(*arguments)
        yield codes, scale, multipliers if arguments[-1] else None, arguments[-2]


def packed_weights():
    """(packed, signs, levels, n, bits, sub), the shape of w, its dtype"""
    for w, signs, levels, steps, bits, sub, *scale in weight_encode_samples():
        packed = ops.weight_encode(w, signs, levels, steps, bits, sub, *scale)
        yield (packed, signs, levels, w.shape[0], bits, sub), w.shape, w.dtype


def weight_decode_samples():
    for reading, (_, k), dtype in packed_weights():
        yield *reading, dtype
        yield *reading, dtype, randn(k, seed=3)


def linear_packed_samples():
    for reading, (n, k), dtype in packed_weights():
        x = randn(2, 3, k, seed=4, dtype=dtype)
        yield x, *reading
        yield x[0], *reading, randn(k, seed=3), randn(n, seed=5, dtype=dtype)


def linear_experts_samples():
    for reading, (n, k), dtype in packed_weights():
        packed, *others = reading
        weights = torch.stack([packed, packed.flip(0)])
        x = randn(3, k, seed=4, dtype=dtype)
        experts = torch.tensor([[0, 1], [1, 2], [1, 0]])
        yield x, weights, experts, *others
        yield x, weights, experts[:, :1].contiguous(), *others, randn(2, n, seed=5, dtype=dtype)


def merge_attention_samples():
    for dtype in DTYPES:
        a, b = randn(3, 4, 48, seed=1, dtype=dtype), randn(3, 4, 48, seed=2, dtype=dtype)
        yield a, randn(3, 4, seed=3), b, randn(3, 4, seed=4)


NAMES = sorted(
    name.removeprefix("turboquant::").split(".")[0]
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("turboquant::")
)


def test_every_op_is_listed():
    assert NAMES == sorted(
        "cache_load cache_move cache_store cache_store_layers decode encode group_decode "
        "group_encode hadamard learn_center linear_experts linear_packed merge_attention "
        "mla_attention mla_attention_out mla_load mla_store pack paged_attention "
        "paged_attention_out paged_mass qjl_score qjl_sketch query_energy score store_and_attend "
        "unpack weight_decode weight_encode weight_pack weight_unpack".split()
    )


def moved(value, device):
    """Tensors on the device, leaves as before; anything else as it is."""
    if isinstance(value, list):
        return [moved(item, device) for item in value]
    if isinstance(value, dict):
        return {name: moved(item, device) for name, item in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(device).requires_grad_(value.requires_grad)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name, device):
    kind = device.type.upper()
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"turboquant::{name}", kind):
        pytest.skip(f"{name} has no {kind} kernel in this release")
    op = getattr(ops, name).default
    for sample in globals()[f"{name}_samples"]():
        arguments = [moved(value, device) for value in sample]
        outputs = arguments.pop() if isinstance(arguments[-1], dict) else {}
        opcheck(op, tuple(arguments), outputs)
