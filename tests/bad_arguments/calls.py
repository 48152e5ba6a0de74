"""All good calls and all cases, and how the public function and the raw op are called."""

import torch

import torch_turboquant as tt
from tests.bad_arguments import attention, cache, codec, linear, mla, score
from tests.bad_arguments.cache import TABLES

ops = torch.ops.turboquant
NAMES = {
    name: value
    for room in (codec, score, cache, attention, mla, linear)
    for name, value in vars(room).items()
}
GOOD = {
    name: NAMES[name.upper()]
    for name in (
        "hadamard pack unpack encode decode group_encode group_decode qjl_sketch qjl_score score "
        "cache_store cache_load paged_attention paged_attention_out store_and_attend "
        "merge_attention paged_mass cache_move mla_store mla_load mla_attention mla_attention_out "
        "weight_encode weight_pack weight_unpack weight_decode linear_packed linear_experts"
    ).split()
}
STORES = ("cache_store", "store_and_attend")
NO_FLOATS = ("pack", "unpack", "cache_move", "weight_unpack")
READ_NO_STEPS = ("cache_load", "paged_attention", "paged_attention_out", "paged_mass")
CASES = [(name, bad) for name in GOOD for bad in NAMES[f"{name.upper()}_BAD"]]


def public(name, arguments):
    function = getattr(tt, name.removesuffix("_out"))
    return function(**arguments)


def raw(name, arguments):
    """The raw op's arguments, made of the public function's."""
    a = dict(arguments)
    if "scale_mode" in a:
        a["scale_mode"] = tt.SCALE_MODES[a["scale_mode"]]
    if name.startswith("mla_"):
        return getattr(ops, name)(**raw_of_latents(name, a))
    if "config" in a:
        config, t = a.pop("config"), a.pop("tables", TABLES)._asdict()
        if name == "cache_move":
            t = {}
        elif name not in STORES:
            del t["key_steps"], t["value_steps"]
        a.update(t, page_size=config.page_size, key_bits=config.key_bits)
        a["value_bits"] = config.value_bits
        if name in ("cache_load", "cache_move"):
            a["head_dim"] = config.head_dim
        if name in STORES:
            a["key_scale_mode"], a["value_scale_mode"] = 3, 2
        if "tail" in a:
            ring, slots, valid = a.pop("tail")
            a.update(tail=ring, tail_slots=slots, sink_tokens=config.sink_tokens)
            if name != "cache_store":
                a.update(tail_valid=valid, recent_window=config.recent_window)
    return getattr(ops, name)(**a)


def raw_of_latents(name, a):
    """The arguments of a raw op of latents; a: those of the public function, which it changes."""
    config, t = a.pop("config"), a.pop("tables")
    a.update(signs=t.signs, levels=t.levels, center=t.center)
    a.update(page_size=config.page_size, bits=config.bits, rope_dtype=config.rope_dtype)
    if name == "mla_store":
        a.update(steps=t.steps, scale_mode=3)
    if name == "mla_load":
        a.update(latent_dim=config.latent_dim, rope_dim=config.rope_dim)
    if "tail" in a:
        ring, slots, valid = a.pop("tail")
        a.update(tail=ring, tail_slots=slots, sink_tokens=config.sink_tokens)
        if name != "mla_store":
            a.update(tail_valid=valid, recent_window=config.recent_window)
    return a


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list, dict)):
        values = value.values() if isinstance(value, dict) else value
        return [t for v in values for t in tensors(v)]
    return []
