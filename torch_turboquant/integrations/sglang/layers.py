"""The attention layers of a model, and which of them read the keys of another one.

Some models (Gemma 3n, Gemma 4) have layers that keep no keys and values: they attend to those that
an earlier layer has stored. SGLang gives the attention of such a layer the number of the earlier
one, calls it without keys, and marks the module around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from sglang.srt.layers.linear import QKVParallelLinear
from sglang.srt.layers.radix_attention import RadixAttention

from torch_turboquant.integrations.engine.centers import keys_have_bias
from torch_turboquant.integrations.sglang.plan import Heads

SINKS = ("sinks", "attention_sink_bias")
"""What SGLang's models call learned sinks, in the module around an attention."""


class AttentionLayer(NamedTuple):
    """One attention of a model."""

    attention: RadixAttention
    keys_have_bias: bool
    reads: bool
    """Whether it reads the keys of the layer whose number it has."""


def attention_layers(model: torch.nn.Module) -> Iterator[AttentionLayer]:
    """Every attention layer of a model, in its order.

    Around a model of transformers (--model-impl transformers, and models that SGLang does not know)
    SGLang has the layers in a dictionary, by the numbers that the model's own attention has.
    """
    for name, module in model.named_modules():
        if isinstance(module, RadixAttention):
            around = model.get_submodule(name.rpartition(".")[0])
            reads = bool(getattr(around, "is_kv_shared_layer", False))
            yield AttentionLayer(module, keys_have_bias(around, QKVParallelLinear), reads)
    beside: dict[int, RadixAttention] = getattr(model, "attention_instances", {})
    biased = {
        getattr(module, "layer_idx", None)
        for module in model.modules()
        if keys_have_bias(module, QKVParallelLinear)
    }
    for number, module in beside.items():
        yield AttentionLayer(module, number in biased, False)


def readers_of(model: torch.nn.Module) -> Mapping[int, int]:
    """How many layers read the keys of a layer, by its number; layers that nobody reads are left
    out."""
    return Counter(layer.attention.layer_id for layer in attention_layers(model) if layer.reads)


def heads_of(model: torch.nn.Module) -> dict[int, Heads]:
    """The heads of the layers that store keys and values, by their numbers."""
    found = (layer.attention for layer in attention_layers(model) if not layer.reads)
    return {layer.layer_id: Heads(layer.tp_k_head_num, layer.qk_head_dim) for layer in found}


def widen_sinks(model: torch.nn.Module) -> None:
    """Puts learned sinks into float32, as the ops take them, so that no call has to.

    They stay the model's parameters: what SGLang loads later is copied into them.
    """
    for name, module in model.named_modules():
        if isinstance(module, RadixAttention):
            around = model.get_submodule(name.rpartition(".")[0])
            for sinks in (getattr(around, attribute, None) for attribute in SINKS):
                if isinstance(sinks, torch.nn.Parameter):
                    sinks.data = sinks.data.float()
