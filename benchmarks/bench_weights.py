"""Quality of compressed weights: language models whose linears are quantised, without kernels.

Every row quantises all linears of a model in one way, ours or a control's (weight_formats.py), and
compares its predictions with the model's own: KL divergence of the next token, perplexity, the
share of equal most likely tokens, and the errors of the linears' outputs. Embedding, head and norms
stay as they are. Everything is computed in float32.

The models at hand are stored in 4 to 8 bits, and a format with the same grid would reproduce them
without an error. So the reference is dithered: every stored weight is replaced by a draw from its
cell, and rounded to bfloat16 (`dither`).

Rows that need a text learn from articles that follow those which are scored. Scales of channels are
those of weight_calibration.channel_scales, "rounding" is its round_by_moments; both see the inputs
of the reference, not those of a model whose earlier layers are already quantised.

predicted_kl is a linear prediction: every linear has a sensitivity, its KL over the relative error
of its output when it alone is quantised, and errors of a row are multiplied with it and added up.
The rows "mixed" choose a format for every linear by such predictions, under a budget.

A GPU needs 3 minutes for all rows of SmolLM2-135M, two CPU cores some hours.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
import weight_formats as formats
from torch import Tensor, nn
from weight_formats import Format

from torch_turboquant.eval import assets, default_cache_dir
from torch_turboquant.weight_calibration import (
    DAMPING,
    NEAREST,
    ROUNDED,
    Choice,
    allocate,
    channel_scales,
    relative_error,
)

# Linears that read the same input, in the order of a layer; q, k and v share second moments.
INPUTS = {
    "attention": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "mlp": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
KINDS = {kind: source for source, kinds in INPUTS.items() for kind in kinds}
BLOCK = 64  # neighbouring tokens whose mean is one sample of a standard error


# ------------------------------------------------------------------------ reference of no format

# where a block of a GGUF tensor keeps the low bits of its codes: bytes, first byte, count, and
# the byte whose codes are all 1
_CODES = {
    "Q4_0": (18, 2, 16, 0x11),
    "Q4_1": (20, 4, 16, 0x11),
    "Q5_0": (22, 6, 16, 0x11),
    "Q8_0": (34, 2, 32, 0x01),
    "Q4_K": (144, 16, 128, 0x11),
    "Q6_K": (210, 0, 128, 0x11),
}
_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def stored_steps(data: Any, kind: Any) -> Tensor:
    """The step of the stored grid at every weight of a GGUF tensor: its bytes uint8 [N, bytes].

    Codes that all are 1 and codes that all are 0 decode to values one step apart.
    """
    import gguf

    size, first, count, one = _CODES[kind.name]
    low, high = (data.reshape(-1, size).copy() for _ in range(2))
    low[:, first : first + count], high[:, first : first + count] = 0, one
    a, b = (gguf.dequantize(x.reshape(data.shape), kind) for x in (low, high))
    return torch.from_numpy(b - a).abs()


def dither(model: nn.Module, file: Path) -> None:
    """Adds uniform noise of one stored step to every weight that the GGUF file quantises.

    A stored weight stands for all that were rounded to it. A draw from its cell is as plausible
    and lies on no format's grid; the stored weight itself would favour formats with that grid.
    The sum is rounded to bfloat16, as published models are.
    """
    import gguf

    parameters = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(0)
    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.tensor_type.name not in _CODES:
            continue
        weight = parameters[_name(tensor.name)] if _name(tensor.name) in parameters else None
        if weight is None:
            continue
        stored = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        steps = stored_steps(tensor.data, tensor.tensor_type)
        own = weight.data.float().cpu()
        rows = _row_order(stored, own, model.config)
        if rows is None:
            raise SystemExit(f"{tensor.name} of {file.name} is not {_name(tensor.name)}")
        noise = torch.rand(own.shape, generator=generator) - 0.5
        weight.data.copy_((stored[rows] + noise * steps[rows]).bfloat16())


def _name(stored: str) -> str:
    """The parameter of transformers that a GGUF tensor holds."""
    if stored == "token_embd.weight":
        return "model.embed_tokens.weight"
    if stored == "output.weight":
        return "lm_head.weight"
    _, layer, name, _ = stored.split(".")
    return f"model.layers.{layer}.{_NAMES[name]}.weight"


def _row_order(stored: Tensor, own: Tensor, config: Any) -> Tensor | None:
    """Where each row of a weight stands in the file: Llama's queries and keys are permuted."""
    rows = torch.arange(len(own))
    orders = [rows]
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if len(own) % width == 0:
        orders.append(rows.view(-1, width // 2, 2).mT.reshape(-1))
    for order in orders:
        if (stored[order] - own).abs().max() <= 0.01 * own.abs().max():
            return order
    return None


# ------------------------------------------------------------------------------------ measuring


@dataclass
class Model:
    """A model, the weights of its linears, and what their inputs look like.

    Attributes:
        network: computes in float32.
        weights: of each kind (q_proj, ...) in all layers, float32 [layers, N, K].
        moments: of each input (INPUTS) the mean x x^T over calibration tokens: [layers, K, K].
        seen: the same over the tokens that are scored, for the errors of outputs.
        ids: int64 [segments, tokens], scored.
        hidden: the network's last hidden states before the head, [segments, tokens, hidden].
    """

    network: nn.Module
    weights: dict[str, Tensor]
    ids: Tensor
    moments: dict[str, Tensor] = field(default_factory=dict)
    seen: dict[str, Tensor] = field(default_factory=dict)
    hidden: Tensor | None = None

    @classmethod
    def of(cls, network: nn.Module, ids: Tensor, calibration: Tensor) -> Model:
        found = linears(network)
        weights = {k: torch.stack([m.weight.data for m in ms]) for k, ms in found.items()}
        model = cls(network, weights, ids)
        model.moments = second_moments(network, calibration)
        model.seen = second_moments(network, ids)
        model.hidden = hidden_states(network, ids)
        return model


# Where a layer has its linears: of Llama and its like, and of BERT.
_PLACES = {
    "model.layers": {
        **{kind: f"self_attn.{kind}" for kind in ("q_proj", "k_proj", "v_proj", "o_proj")},
        **{kind: f"mlp.{kind}" for kind in ("gate_proj", "up_proj", "down_proj")},
    },
    "encoder.layer": {
        "q_proj": "attention.self.query",
        "k_proj": "attention.self.key",
        "v_proj": "attention.self.value",
        "o_proj": "attention.output.dense",
        "up_proj": "intermediate.dense",
        "down_proj": "output.dense",
    },
}


def _family(network: nn.Module) -> str:
    return "encoder.layer" if hasattr(network, "encoder") else "model.layers"


def layers_of(network: nn.Module) -> nn.ModuleList:
    return network.get_submodule(_family(network))


def linears(network: nn.Module) -> dict[str, list[nn.Linear]]:
    """The linears of each kind, by layer; an encoder has no gate."""
    return {
        kind: [layer.get_submodule(place) for layer in layers_of(network)]
        for kind, place in _PLACES[_family(network)].items()
    }


def batches(ids: Tensor) -> Sequence[Tensor]:
    """Segments [segments, tokens] in parts of some 1,024 tokens."""
    return ids.split(max(1, 1024 // ids.shape[1]))


def run(network: nn.Module, ids: Tensor) -> Tensor:
    """The last hidden states of segments, float32 [segments, tokens, hidden]."""
    return getattr(network, "model", network)(ids, use_cache=False)[0]


@torch.no_grad()
def hidden_states(network: nn.Module, ids: Tensor) -> Tensor:
    """What the head reads, float32 [segments, tokens, hidden]."""
    return torch.cat([run(network, part) for part in batches(ids)])


class Prefix:
    """What every layer gets while a network reads tokens, so that a forward can begin at any layer.

    A linear that is quantised alone changes nothing before its own layer.

    Args:
        network: as it is without changes.
        ids: int64 [segments, tokens].
    """

    @torch.no_grad()
    def __init__(self, network: nn.Module, ids: Tensor) -> None:
        self.network, self.parts = network, []
        layers = layers_of(network)
        for part in batches(ids):
            given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
            handles = [
                layer.register_forward_pre_hook(
                    lambda _, inputs, named, given=given: given.append((inputs, named)),
                    with_kwargs=True,
                )
                for layer in layers
            ]
            run(network, part)
            for handle in handles:
                handle.remove()
            self.parts.append(given)

    @torch.no_grad()
    def hidden_states(self, first: int) -> Tensor:
        """The function of this name, of a network that is unchanged before layer `first`."""
        layers, found = layers_of(self.network), []
        for given in self.parts:
            hidden = given[first][0][0]
            for layer, (inputs, named) in zip(layers[first:], given[first:], strict=True):
                out = layer(hidden, *inputs[1:], **named)
                hidden = out[0] if isinstance(out, tuple) else out
            norm = getattr(getattr(self.network, "model", None), "norm", None)
            found.append(norm(hidden) if norm else hidden)
        return torch.cat(found)


def second_moments(network: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """The mean of x x^T over all tokens x of each input, float32 [layers, K, K]."""
    found, handles = linears(network), []
    moments = {}
    for name, kinds in INPUTS.items():
        modules = found[next(kind for kind in kinds if kind in found)]
        size = modules[0].in_features
        device = modules[0].weight.device
        moments[name] = torch.zeros(len(modules), size, size, device=device)
        for module, total in zip(modules, moments[name], strict=True):

            def add(_: Any, inputs: tuple[Tensor], total: Tensor = total) -> None:
                x = inputs[0].flatten(0, -2)
                total.addmm_(x.T, x, alpha=1 / ids.numel())

            handles.append(module.register_forward_pre_hook(add))
    hidden_states(network, ids)
    for handle in handles:
        handle.remove()
    return moments


@torch.no_grad()
def compare(model: Model, hidden: Tensor | None = None) -> dict[str, Tensor]:
    """The network as it is now against the reference, per token that has a next one.

    Args:
        hidden: hidden_states of the network as it is now, if they are known.

    Returns:
        "kl" and "loss" in nats and "same" (of the most likely token), float32 [tokens] each.
    """
    head, out = model.network.lm_head, {"kl": [], "loss": [], "same": []}
    limit = max(1, (1 << 28 if head.weight.is_cuda else 1 << 24) // head.out_features)
    hidden = hidden_states(model.network, model.ids) if hidden is None else hidden
    for own, other, ids in zip(model.hidden, hidden, model.ids, strict=True):
        for first in range(0, len(ids) - 1, limit):
            part = slice(first, min(first + limit, len(ids) - 1))
            p, q = (head(x[part]).log_softmax(-1) for x in (own, other))
            following = ids[1:][part]
            out["kl"].append((p.exp() * (p - q)).sum(-1))
            out["loss"].append(-q.gather(-1, following[:, None])[:, 0])
            out["same"].append((p.argmax(-1) == q.argmax(-1)).float())
    return {name: torch.cat(parts) for name, parts in out.items()}


def mean_and_error(each: Tensor, block: int = BLOCK) -> tuple[float, float]:
    """The mean and its standard error, from means of `block` neighbours."""
    blocks = each[: len(each) // block * block].view(-1, block).mean(1)
    return each.mean().item(), (blocks.std() / len(blocks) ** 0.5).item()


# ----------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Linear:
    """What a row's quantiser may know of one kind of linear in all layers.

    Attributes:
        kind: q_proj, ...
        weight: float32 [layers, N, K].
        moment: second moments of the calibration text, [layers, K, K].
        shared: the weights of all kinds that read this input, together [layers, N', K].
    """

    kind: str
    weight: Tensor
    moment: Tensor
    shared: Tensor


@dataclass(frozen=True)
class Row:
    """One way to quantise all linears.

    Attributes:
        name: unique.
        decoded: gives the decoded weights of a kind in all layers, in the model's own basis.
        size: bits per weight of rows of K channels, and of the kind and layer where it depends.
        text: whether it needs a calibration text.
        activations: None for float activations, or (transform, group, per-channel factors of a
            Linear) of int8 ones with a unit per token and group.
        about: entries of the result file.
    """

    name: str
    decoded: Callable[[Linear], Tensor]
    size: Callable[[str, int, int, int], float]
    text: bool = False
    activations: tuple[int | None, int, Callable[[Linear], Tensor]] | None = None
    about: dict[str, Any] = field(default_factory=dict)


def factors(linear: Linear, scales: str, power: float = NEAREST) -> Tensor:
    """The factors of channels [layers, K]: "none", from "weights", or of the "text"."""
    if scales == "none":
        return torch.ones_like(linear.shared[:, 0])
    if scales == "weights":
        return formats.scales_of_weights(linear.shared)
    return channel_scales(linear.shared, linear.moment, power)


def ours(
    form: Format,
    scales: str = "none",
    rounding: bool = False,
    acts: bool = False,
    power: float | None = None,
    damping: float = DAMPING,
) -> Row:
    """A format of ours: its transform, factors of channels with their power, and how it rounds."""
    usual_power = ROUNDED if rounding else NEAREST
    exponent = power or usual_power

    def decoded(linear: Linear) -> Tensor:
        s = factors(linear, scales, exponent)[:, None]
        w = formats.rotate(linear.weight * s, form.block, seed=form.seed)
        if rounding:
            h = formats.rotate_moments(linear.moment / (s * s.mT), form.block, form.seed)
            w = formats.encode_rounded(w, h, form, damping)
        else:
            w = formats.encode(w, form)
        return formats.rotate(w, form.block, inverse=True, seed=form.seed) / s

    parts = [f"{form.bits} bit"]
    parts += ["uniform"] if form.grid == "uniform" and form.bits < 8 else []
    parts += [{None: "no transform", 0: "whole"}.get(form.block, f"block {form.block}")]
    parts += [f"group {form.group}"] if form.group != 128 else []
    parts += [f"sub {form.sub}"] if form.sub else []
    usual = 4 if form.sub else 8
    parts += [f"S {form.search}"] if form.search != usual else []
    parts += [] if scales == "none" else [f"scales {scales}"]
    parts += [] if exponent == usual_power else [f"power 1/{round(1 / exponent)}"]
    parts += ["rounding"] if rounding else []
    parts += [] if damping == DAMPING else [f"damping {damping:.0%}"]
    parts += ["A8"] if acts else []
    parts += [f"signs {form.seed}"] if form.seed else []
    about = {"family": "ours", "bits": form.bits, "grid": form.grid, "block": form.block}
    about |= {"group": form.group, "sub": form.sub, "search": form.search, "scales": scales}
    about |= {"rounding": rounding, "activation_bits": 8 if acts else 16, "seed": form.seed}
    return Row(
        ", ".join(parts),
        decoded,
        lambda kind, layer, layers, k: form.size(k),
        text=rounding or scales == "text",
        activations=(form.block, form.group, lambda x: factors(x, scales, exponent))
        if acts
        else None,
        about=about,
    )


def control(
    name: str, size: float | Callable[[str, int, int, int], float], code: Any, text: bool = False
) -> Row:
    """A published format; its scales are counted by the caller, in bits per weight."""
    fixed = (lambda kind, layer, layers, k: size) if isinstance(size, (int, float)) else size
    return Row(name, code, fixed, text, about={"family": "control", "activation_bits": 16})


def exact(block: int | None) -> Row:
    """Weights as they are, with int8 activations."""
    name = "exact weights, A8, " + ("no transform" if block is None else f"block {block}")
    about = {"family": "activations", "block": block, "activation_bits": 8}
    unit = lambda linear: factors(linear, "none")  # noqa: E731
    return Row(name, lambda x: x.weight, lambda *_: 16, activations=(block, 128, unit), about=about)


def energy(linear: Linear) -> Tensor:
    return linear.moment.diagonal(dim1=-2, dim2=-1)


def q4_k_m(with_text: bool) -> Row:
    def decoded(linear: Linear) -> Tensor:
        given = energy(linear) if with_text else None
        layers = len(linear.weight)
        six = [formats.q4_k_m_has_six_bits(linear.kind, i, layers) for i in range(layers)]
        out = formats.q4_k(linear.weight, given)
        if any(six):
            at = torch.tensor(six, device=out.device)
            out[at] = formats.q6_k(linear.weight[at], None if given is None else given[at])
        return out

    def size(kind: str, layer: int, layers: int, k: int) -> float:
        return 6.5625 if formats.q4_k_m_has_six_bits(kind, layer, layers) else 4.5

    name = "Q4_K_M-like" + (", importance" if with_text else "")
    return control(name, size, decoded, with_text)


def higgs(linear: Linear, bits: int = 4) -> Tensor:
    w = formats.rotate(linear.weight, 512)
    return formats.rotate(formats.higgs(w, bits), 512, inverse=True)


DEFAULT = ours(Format(sub=32, search=4))
PLAIN = ours(Format())  # sensitivities of linears are measured with it


def all_rows() -> list[Row]:
    """Main effects around the default, and the interactions that could change the choice."""
    four, sub = Format(), Format(sub=32, search=4)
    fine, three = replace(sub, sub=16), Format(bits=3)
    rows = [DEFAULT, PLAIN]
    for block in (None, 64, 128, 256, 0):
        rows += [ours(replace(four, block=block), scales) for scales in ("none", "text")]
    for block in (None, 64):
        rows += [ours(replace(sub, block=block), scales) for scales in ("none", "text")]
    rows.append(ours(replace(four, block=None), "text", True))
    for form in (four, sub, fine):
        rows += [ours(form, scales) for scales in ("none", "weights", "text")]
        rows += [ours(form, scales, True) for scales in ("none", "text")]
    rows.append(ours(sub, "text", True, power=NEAREST))
    rows += [ours(sub, "text", True, damping=damping) for damping in (0.01, 0.05, 1.0)]
    for form in (three, replace(three, sub=32, search=4), replace(three, sub=16, search=4)):
        rows += [ours(form), ours(form, "text"), ours(form, "text", True)]
    rows += [ours(Format(bits=8, grid="uniform"), *how) for how in ((), ("text", True))]
    even = Format(grid="uniform")
    rows += [ours(even), ours(even, "text", True)]
    even = replace(even, sub=32, search=4)
    rows += [ours(even), ours(even, "text"), ours(even, "text", True)]
    rows += [ours(replace(four, group=64, block=64)), ours(replace(sub, group=64, block=64))]
    rows += [ours(replace(four, search=1)), ours(replace(sub, search=1))]
    rows.append(ours(replace(sub, search=8)))
    for seed in (1, 2, 3):  # what the draw of the signs alone changes
        rows += [ours(replace(sub, seed=seed)), ours(replace(sub, seed=seed), "text", True)]
    rows += [exact(None), exact(64), exact(128)]
    rows += [ours(four, acts=True), ours(sub, acts=True), ours(sub, "text", True, acts=True)]
    rows += [
        control("HQQ g64", 4.5, lambda x: formats.hqq(x.weight)),
        control("HQQ g64, 3 bit", 3.5, lambda x: formats.hqq(x.weight, 3)),
        control("NF4 g64", 4.5, lambda x: formats.nf4(x.weight)),
        control("int4 RTN g128", 4 + 20 / 128, lambda x: formats.rtn(x.weight)),
        control("int4 GPTQ g128", 4 + 20 / 128, lambda x: formats.gptq(x.weight, x.moment), True),
        control("Q4_K-like", 4.5, lambda x: formats.q4_k(x.weight)),
        control("Q4_K-like, importance", 4.5, lambda x: formats.q4_k(x.weight, energy(x)), True),
        q4_k_m(False),
        q4_k_m(True),
        control("HIGGS p=2 g256", 4 + 16 / 256, higgs),
        control("NF3 g64", 3.5, lambda x: formats.nf4(x.weight, 3)),
        control("int3 RTN g128", 3 + 19 / 128, lambda x: formats.rtn(x.weight, 3)),
        control(
            "int3 GPTQ g128", 3 + 19 / 128, lambda x: formats.gptq(x.weight, x.moment, 3), True
        ),
        control("Q3_K-like", 3.4375, lambda x: formats.q3_k(x.weight)),
        control("Q3_K-like, importance", 3.4375, lambda x: formats.q3_k(x.weight, energy(x)), True),
        control("HIGGS p=2 g256, 3 bit", 3 + 16 / 256, lambda x: higgs(x, 3)),
    ]
    return list({row.name: row for row in rows}.values())


# ---------------------------------------------------------------------------------- measurements


def linear_of(model: Model, kind: str) -> Linear:
    source = KINDS[kind]
    shared = [model.weights[other] for other in INPUTS[source] if other in model.weights]
    return Linear(kind, model.weights[kind], model.moments[source], torch.cat(shared, 1))


def quantise_activations(x: Tensor, block: int | None, group: int, inverse: Tensor) -> Tensor:
    """x [..., K] as int8 with a unit per token and group, after factors and the transform."""

    def code(y: Tensor) -> Tensor:
        unit = y.abs().amax(-1, keepdim=True).clamp(min=1e-20) / 127
        return (y / unit).round() * unit

    y = formats.by_group(formats.rotate(x * inverse, block), group, code)
    return formats.rotate(y, block, inverse=True) / inverse


def before_linear(
    block: int | None, group: int, inverse: Tensor, _: nn.Module, inputs: tuple[Tensor]
) -> tuple[Tensor]:
    """A forward pre-hook: the linear reads what its int8 activations stand for."""
    return (quantise_activations(inputs[0], block, group, inverse),)


@torch.no_grad()
def apply(model: Model, row: Row) -> tuple[dict[str, Tensor], float, list[Any]]:
    """Gives the network the row's weights and activations.

    Returns:
        The relative errors of outputs by kind (float64 [layers]), bits per weight, and the hooks
        of the activations, to be removed.
    """
    errors, bits, count, hooks = {}, 0.0, 0, []
    for kind, modules in linears(model.network).items():
        linear = linear_of(model, kind)
        decoded = row.decoded(linear)
        seen = model.seen[KINDS[kind]]
        errors[kind] = relative_error(linear.weight, decoded, seen).cpu()
        for i, module in enumerate(modules):
            module.weight.data.copy_(decoded[i])
            size = module.weight.numel()
            bits += size * row.size(kind, i, len(modules), module.in_features)
            count += size
        if row.activations:
            inverses = 1 / row.activations[2](linear)
            for module, inverse in zip(modules, inverses, strict=True):
                hooks.append(
                    module.register_forward_pre_hook(
                        partial(before_linear, *row.activations[:2], inverse)
                    )
                )
    return errors, bits / count, hooks


@torch.no_grad()
def restore(model: Model) -> None:
    for kind, modules in linears(model.network).items():
        for module, weight in zip(modules, model.weights[kind], strict=True):
            module.weight.data.copy_(weight)


def predicted(sensitivity: dict[str, Tensor], errors: dict[str, Tensor]) -> float:
    """The sum of sensitivities times errors of outputs."""
    return sum((sensitivity[kind] * errors[kind]).sum().item() for kind in errors)


class Bench:
    """Measures rows on one model; `default` is what others are compared with.

    Args:
        model: that is compared with itself.
        about: entries of every row.
    """

    cost, block = "kl", BLOCK  # what compare() gives of every sample, and how many are neighbours

    def __init__(self, model: Model, about: common.Row | None = None) -> None:
        self.model, self.about = model, about or {}
        self.default: Tensor | None = None
        self.sensitivity: dict[str, Tensor] | None = None
        self.rows: list[common.Row] = []
        self.errors: dict[str, dict[str, Tensor]] = {}  # by the name of a row

    def compare(self, model: Model, hidden: Tensor | None = None) -> dict[str, Tensor]:
        """What is seen of every sample, see `compare`."""
        return compare(model, hidden)

    def entries(self, seen: dict[str, Tensor]) -> common.Row:
        """Of compare()'s results those of a row beside the cost."""
        loss, _ = mean_and_error(seen["loss"])
        return {"perplexity": math.exp(loss), "same_token": seen["same"].mean().item()}

    def measure(self, row: Row) -> common.Row:
        begin = time.perf_counter()
        errors, bits, hooks = apply(self.model, row)
        coded = time.perf_counter()
        seen = self.compare(self.model)
        for hook in hooks:
            hook.remove()
        restore(self.model)
        self.errors[row.name] = errors
        cost, spread = mean_and_error(seen[self.cost], self.block)
        if row.name == DEFAULT.name:
            self.default = seen[self.cost]
        out: common.Row = {**self.about, "row": row.name}
        out |= {"bits_per_weight": round(bits, 4), self.cost: cost, f"{self.cost}_error": spread}
        out |= self.entries(seen)
        every = torch.cat(list(errors.values()))
        out |= {"output_error": every.mean().item(), "needs_text": row.text, **row.about}
        if self.default is not None:
            difference, spread = mean_and_error(seen[self.cost] - self.default, self.block)
            out |= {f"{self.cost}_above_default": difference, "above_error": spread}
        self._predict(out)
        self.rows.append(out)
        seconds = time.perf_counter()
        found = [f"{name} {value:.5f}" for name, value in out.items() if isinstance(value, float)]
        timed = f"{coded - begin:.1f} + {seconds - coded:.1f} s"
        print(f"{row.name}: {', '.join(found)} ({timed})", flush=True)
        return out

    def predict(self, tokens: int) -> None:
        """Adds predictions to rows, those measured already too; sensitivities are of `tokens`."""
        self.sensitivity = self.sensitivities(tokens)
        for row in self.rows:
            self._predict(row)

    def _predict(self, row: common.Row) -> None:
        if self.sensitivity and row["family"] != "activations":
            errors = self.errors[row["row"]]
            row[f"predicted_{self.cost}"] = predicted(self.sensitivity, errors)

    def sensitivities(self, tokens: int) -> dict[str, Tensor]:
        """The cost over the relative error of each linear's output, if it alone is quantised.

        Returns:
            Of each kind float64 [layers].
        """
        model = self.model
        short = replace(model, ids=model.ids[: max(1, tokens // model.ids.shape[1])])
        short.hidden = model.hidden[: len(short.ids)]
        prefix, found = Prefix(model.network, short.ids), {}
        for kind, modules in linears(model.network).items():
            linear = linear_of(model, kind)
            decoded = PLAIN.decoded(linear)
            errors = relative_error(linear.weight, decoded, model.seen[KINDS[kind]]).cpu()
            costs = []
            for i, module in enumerate(modules):
                module.weight.data.copy_(decoded[i])
                seen = self.compare(short, prefix.hidden_states(i))
                costs.append(seen[self.cost].double().mean().item())
                module.weight.data.copy_(linear.weight[i])
            found[kind] = torch.tensor(costs).double() / errors
            print(f"alone quantised, {kind}: sum of {self.cost} {sum(costs):.5f}", flush=True)
        return found


def mixed(bench: Bench, options: Sequence[Row], budget: float, name: str) -> Row:
    """Formats by linear, chosen by sensitivities and the errors of rows measured before."""
    model, sensitivity = bench.model, bench.sensitivity
    assert sensitivity is not None
    choices: dict[str, list[Choice]] = {}
    total = 0
    for kind, weight in model.weights.items():
        layers, n, k = weight.shape
        total += weight.numel()
        for i in range(layers):
            choices[f"{kind} {i}"] = [
                Choice(
                    row,
                    n * k * row.size(kind, i, layers, k),
                    float(sensitivity[kind][i] * bench.errors[row.name][kind][i]),
                )
                for row in options
            ]
    chosen = allocate(choices, budget * total)

    def at(kind: str, layer: int) -> Row:
        return chosen[f"{kind} {layer}"].label

    def decoded(linear: Linear) -> Tensor:
        out = linear.weight.clone()
        for row in options:
            mine = [at(linear.kind, i) is row for i in range(len(out))]
            if any(mine):
                where = torch.tensor(mine, device=out.device)
                parts = (linear.weight, linear.moment, linear.shared)
                out[where] = row.decoded(Linear(linear.kind, *(x[where] for x in parts)))
        return out

    counts = {row.name: sum(c.label is row for c in chosen.values()) for row in options}
    about = {"family": "mixed", "activation_bits": 16, "counts": counts}
    size = lambda kind, layer, layers, k: at(kind, layer).size(kind, layer, layers, k)  # noqa: E731
    return Row(name, decoded, size, text=True, about=about)


# ----------------------------------------------------------------------------------------- main


def segments(tokenizer: Any, articles: Sequence[str], count: int, tokens: int) -> Tensor:
    """The first tokens of `count` articles that have as many: int64 [count, tokens]."""
    found = []
    for article in articles:
        ids = tokenizer(article, truncation=True, max_length=tokens)["input_ids"]
        if len(ids) == tokens:
            found.append(torch.tensor(ids))
        if len(found) == count:
            return torch.stack(found)
    raise SystemExit(f"the text has {len(found)} articles of {tokens} tokens, {count} are needed")


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--model", type=Path, metavar="FOLDER", help="default: SmolLM2-135M")
    options.add_argument(
        "--gguf", type=Path, metavar="FILE", help="that the model was expanded from"
    )
    options.add_argument("--cache", type=Path, default=default_cache_dir(), help="of downloads")
    options.add_argument("--segments", type=int, default=24, help="of text (default: 24)")
    options.add_argument("--tokens", type=int, default=1024, help="of a segment (default: 1024)")
    options.add_argument("--calibration", type=int, default=16, help="segments (default: 16)")
    options.add_argument("--rows", default="", metavar="REGEX", help="of names (default: all)")
    options.add_argument("--no-sensitivity", action="store_true", help="and no predicted KL")
    arguments = options.parse_args()
    rows = [row for row in all_rows() if re.search(arguments.rows, row.name)]
    network, tokenizer, name, file = load(arguments)
    articles = assets.load_articles(
        arguments.cache, 2 * (arguments.segments + arguments.calibration)
    )
    both = segments(
        tokenizer, articles, arguments.segments + arguments.calibration, arguments.tokens
    ).to(arguments.device)
    ids, calibration = both[: arguments.segments], both[arguments.segments :]
    stored = perplexity(network, ids)
    dither(network, file)
    model = Model.of(network, ids, calibration)
    reference = perplexity(network, ids)
    print(f"{name}: perplexity {stored:.3f} as stored, {reference:.3f} dithered", flush=True)
    shared = {
        "model": name,
        "scored_tokens": ids.numel(),
        "calibration_tokens": calibration.numel(),
    }
    shared |= {"stored_perplexity": stored, "reference_perplexity": reference}
    bench, results = Bench(model, shared), common.file_name("weights", name)
    order = [row.name for row in all_rows()]

    def keep() -> None:  # what is measured stays if the rest is interrupted
        common.write_progress(results, bench.rows, "row", arguments, order)

    for row in rows:
        bench.measure(row)
        keep()
    if arguments.no_sensitivity:
        return
    bench.predict(4096)
    keep()
    for row in mixes(bench):
        bench.measure(row)
        keep()


def mixes(bench: Bench) -> list[Row]:
    """Mixed formats, of those that have kernels; none if one of them was not measured."""
    four, sub, eight = Format(), Format(sub=32, search=4), Format(bits=8, grid="uniform")
    free = [ours(form) for form in (four, sub, eight)]
    text = [ours(form, "text", True) for form in (four, sub, eight)]
    wanted = [
        (free, 4.5, "mixed 4 and 8 bit, 4.5 bits"),
        (text, 4.5, "mixed 4 and 8 bit, scales text, rounding, 4.5 bits"),
        (text, 4.771, "mixed 4 and 8 bit, scales text, rounding, 4.77 bits"),
        (text, 4.264, "mixed 4 and 8 bit, scales text, rounding, 4.26 bits"),
    ]
    return [
        mixed(bench, options, budget, name)
        for options, budget, name in wanted
        if {row.name for row in options} <= bench.errors.keys()
    ]


def load(arguments: argparse.Namespace) -> tuple[nn.Module, Any, str, Path]:
    """The network in float32, its tokenizer, its name, and the file that it comes from."""
    if (arguments.model is None) != (arguments.gguf is None):
        raise SystemExit("--model and --gguf go together: the folder was expanded from the file")
    if arguments.model is None:
        network, tokenizer = assets.load_model(arguments.cache, arguments.device, torch.float32)
        file, name = arguments.cache / assets.MODEL.inner, "SmolLM2-135M-Instruct"
    else:
        network, tokenizer = assets.load_dense(arguments.model, arguments.device, torch.float32)
        file, name = arguments.gguf, arguments.model.name
    return network.requires_grad_(False), tokenizer, name, file


@torch.no_grad()
def perplexity(network: nn.Module, ids: Tensor) -> float:
    """Of the next token, over all segments."""
    losses = []
    for part, hidden in zip(ids, hidden_states(network, ids), strict=True):
        logits = network.lm_head(hidden[:-1])
        losses.append(nn.functional.cross_entropy(logits, part[1:]).double())
    return torch.stack(losses).mean().exp().item()


if __name__ == "__main__":
    main()
