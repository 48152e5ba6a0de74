"""How rows of the study of weights are measured: networks, sensitivities of linears, budgets.

bench_weights.py measures language models so, bench_weights_encoder.py an encoder.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
import weight_formats as formats
from torch import Tensor, nn
from weight_formats import Format
from weight_rows import DEFAULT, PLAIN, Linear, Row, all_rows, ours

from torch_turboquant.eval import default_cache_dir
from torch_turboquant.weight_calibration import Choice, allocate, relative_error

# Linears that read the same input, in the order of a layer; q, k and v share second moments.
INPUTS = {
    "attention": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "mlp": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
KINDS = {kind: source for source, kinds in INPUTS.items() for kind in kinds}
BLOCK = 64  # neighbouring tokens whose mean is one sample of a standard error

# ---- a network


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


# ---- rows


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


def add_options(options: argparse.ArgumentParser) -> None:
    """Options of every program that measures rows."""
    options.add_argument("--cache", type=Path, default=default_cache_dir(), help="of downloads")
    options.add_argument("--rows", default="", metavar="REGEX", help="of names (default: all)")
    options.add_argument("--no-sensitivity", action="store_true", help="and no predictions")


def measure_rows(bench: Bench, name: str, arguments: argparse.Namespace, tokens: int) -> None:
    """Measures the rows that --rows names, and mixed ones unless there is --no-sensitivity.

    Every row is written as soon as it is measured: it stays if the rest is interrupted.

    Args:
        bench: of one model.
        name: of the model.
        arguments: options of the program.
        tokens: that sensitivities are measured on.
    """
    results, rows = common.file_name("weights", name), all_rows()
    order = [row.name for row in rows]

    def measure(rows: Sequence[Row]) -> None:
        for row in rows:
            bench.measure(row)
            common.write_progress(results, bench.rows, "row", arguments, order)

    measure([row for row in rows if re.search(arguments.rows, row.name)])
    if arguments.no_sensitivity:
        return
    bench.predict(tokens)
    common.write_progress(results, bench.rows, "row", arguments, order)
    measure(mixes(bench))
