"""Which layers of a model are packed, and why each of the others is left alone.

Packed are plain linear layers (nn.Linear) of the language model, and the weights of experts, which
have the name of their parameter. Everything else stays as the model has it: embeddings, norms,
convolutions, and whatever reads its weight otherwise than by being called. A layer that is left
alone has a reason, and both are listed.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from torch_turboquant.format import WEIGHT_ROWS
from torch_turboquant.integrations.transformers.weights.experts import matrices_of, shape_of
from torch_turboquant.weights import WeightFormat

EMBEDDING = "it is an embedding"
ASKED = "skip names it"
ROUTER = "it routes tokens to experts"
TIED = "its weight is tied to"
_SENSES = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
_TEXT = ("input_ids", "inputs_embeds", "decoder_input_ids")


def choose(
    model: nn.Module, default: WeightFormat, layers: Mapping[str, WeightFormat], skip: Iterable[str]
) -> tuple[dict[str, WeightFormat], dict[str, str]]:
    """What to pack of a model whose weights may still be missing.

    Args:
        model: of transformers.
        default: format of the layers that no pattern names.
        layers: formats by pattern of names ("*.down_proj"); the first pattern that fits counts.
        skip: patterns of layers to leave alone.

    Returns:
        Formats of the layers to pack, and the reasons of the layers that are left alone, by name.

    Raises:
        ValueError: a pattern fits nothing that can be packed; or nothing of the model can be.
    """
    skip = list(skip)
    _check_patterns(model, [*layers, *skip])
    packed: dict[str, WeightFormat] = {}
    left: dict[str, str] = {}
    for name, module in _owners_of_matrices(model):
        if reason := _reason(model, name, module, skip):
            left[name] = reason
        else:
            for packable in _packable(name, module):
                packed[packable] = _format_of(packable, default, layers)
                _check_group(model, packable, packed[packable])
    if not packed:
        raise ValueError(
            f"no layer of this {type(model).__name__} can be packed: "
            + "; ".join(f"{names}: {reason}" for names, reason in summary(left).items())
        )
    return packed, left


def recorded_choice(
    model: nn.Module,
    default: WeightFormat,
    layers: Mapping[str, WeightFormat],
    left: Iterable[str],
) -> dict[str, WeightFormat]:
    """The same for a model whose weights were packed when it was saved: what is not in `left`.

    Names may have lost or gained the prefix of the base model, as transformers allows, and the
    model may have another head: one that could not have been packed is none that was.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    without = {name.removeprefix(prefix) for name in left}
    formats = {name.removeprefix(prefix): form for name, form in layers.items()}
    return {
        packable: _format_of(packable.removeprefix(prefix), default, formats)
        for name, module in model.named_modules()
        if name.removeprefix(prefix) not in without
        and not (type(module) is nn.Linear and _reason_of_linear(module))
        for packable in _packable(name, module)
    }


def recorded_outputs(model: nn.Module, outputs: Mapping[str, int], name: str) -> int | None:
    """The outputs that a packed layer had when it was saved; None: there is no record of it."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    known = {recorded.removeprefix(prefix): n for recorded, n in outputs.items()}
    return known.get(name.removeprefix(prefix))


def experts_among(
    model: nn.Module, packed: Mapping[str, WeightFormat]
) -> dict[str, dict[str, WeightFormat]]:
    """Of what is to pack, the weights of experts: formats by name of the module and the weight."""
    found: dict[str, dict[str, WeightFormat]] = {}
    for name, module in model.named_modules():
        if matrices_of(module) is not None:
            forms = {
                n: packed[f"{name}.{n}"] for n in _weights_of(module) if f"{name}.{n}" in packed
            }
            if forms:
                found[name] = forms
    return found


def _weights_of(module: nn.Module) -> list[str]:
    return list(matrices_of(module) or ())


def _packable(name: str, module: nn.Module) -> list[str]:
    """What a module has that could be packed: itself, or weights of experts."""
    if type(module) is nn.Linear:
        return [name]
    return [f"{name}.{weight}" for weight in _weights_of(module)]


def summary(left: Mapping[str, str]) -> dict[str, str]:
    """Reasons by names, where names that differ in numbers only are one: "layers.0-31.experts"."""
    groups: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for name, reason in left.items():
        numbers = tuple(int(part) for part in name.split(".") if part.isdigit())
        groups.setdefault((_without_numbers(name), reason), []).append(numbers)
    found = {}
    for (pattern, reason), rows in groups.items():
        spans = iter([_span(sorted(set(column))) for column in zip(*rows, strict=True)])
        named = ".".join(next(spans) if part == "*" else part for part in pattern.split("."))
        found[named] = reason
    return found


def unexpected(left: Mapping[str, str]) -> dict[str, str]:
    """Without what nobody expects to be packed.

    That is embeddings, heads tied to them, routers, and what skip names.
    """
    embeddings = {f"{TIED} {name}.weight" for name, r in left.items() if r == EMBEDDING}
    expected = {EMBEDDING, ASKED, ROUTER, *embeddings}
    return {name: r for name, r in left.items() if r not in expected}


# ---- reasons


def _reason(model: nn.Module, name: str, module: nn.Module, skip: list[str]) -> str | None:
    """Why a module with a matrix of its own is left alone; None if it is packed."""
    if isinstance(module, nn.Embedding):
        return EMBEDDING
    if isinstance(module, Conv1D):
        return "Conv1D stores its weight transposed, and only nn.Linear is packed"
    if matrices_of(module) is not None:
        return _reason_of_experts(model, name, module, skip)
    if type(module) is not nn.Linear:
        if any(p.dim() == 3 for p in module.parameters(recurse=False)) and "expert" in name:
            return "its experts do not go through transformers' experts interface"
        if _routes(model, name):
            return ROUTER
        return f"it is a {type(module).__name__}, and only nn.Linear is packed"
    if names_layer(skip, name):
        return ASKED
    if partner := _tied_to(model, f"{name}.weight"):
        return f"{TIED} {partner}"
    if "weight" not in module._parameters:
        return "its weight is no parameter: pruning or weight_norm computes it in every forward"
    if not _in_language_model(model, name):
        return "it belongs to no language model"
    if _routes(model, name):
        return ROUTER
    if reason := _reason_of_linear(module):
        return reason
    if reader := _reader(model, name):
        return f"{reader} reads its weight instead of calling it"
    return None


def _reason_of_experts(
    model: nn.Module, name: str, module: nn.Module, skip: list[str]
) -> str | None:
    """Why all weights of experts are left alone: they are packed together or not at all."""
    weights = matrices_of(module) or {}
    if any(names_layer(skip, n) for n in (name, *(f"{name}.{weight}" for weight in weights))):
        return ASKED
    if not _in_language_model(model, name):
        return "it belongs to no language model"
    for weight, values in weights.items():
        _, n, k = shape_of(module, values)
        if reason := _reason_of_shape(n, k):
            return f"{weight}: {reason}"
    return None


def _reason_of_linear(module: nn.Linear) -> str | None:
    return _reason_of_shape(module.out_features, module.in_features)


def _check_group(model: nn.Module, name: str, form: WeightFormat) -> None:
    """A group that somebody has asked for by a number fits a layer, or is refused by its name."""
    module, _, weight = name.rpartition(".")
    owner = model.get_submodule(module)
    if (experts := matrices_of(owner)) is not None:
        k = shape_of(owner, experts[weight])[2]
    else:
        k = model.get_submodule(name).in_features  # type: ignore[assignment]
    if form.group is not None and k % form.group:
        raise ValueError(
            f"group is {form.group}, and {name} has {k} input channels, which are no multiple of "
            f"it: name it in skip, or give it its own format, layers={{{name!r}: {{'group': 64}}}}"
        )


def _reason_of_shape(n: int, k: int) -> str | None:
    if k % 64:
        return f"its {k} input channels are no multiple of 64"
    if n < WEIGHT_ROWS:
        return f"its {n} rows are fewer than the {WEIGHT_ROWS} of a tile"
    return None


def _tied_to(model: nn.Module, weight: str) -> str | None:
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    others = {**{source: target for target, source in tied.items()}, **tied}
    return others.get(weight)


def _in_language_model(model: nn.Module, name: str) -> bool:
    """Whether a layer belongs to a model for text, and not to one for pictures or sounds.

    Models for several of them have a configuration of their own for the language model. A part
    may be such a model too, and some parts are known only by what their forward takes.
    """
    parts = name.split(".")
    for depth in range(len(parts)):
        above: Any = model.get_submodule(".".join(parts[:depth]))
        if isinstance(above, PreTrainedModel) and not _in_its_text_model(
            above, ".".join(parts[depth:])
        ):
            return False
        if depth and _reads_no_text(type(above)) and not _reads_no_text(type(model)):
            return False
    return True


def _in_its_text_model(model: Any, name: str) -> bool:
    """The same for the parts that a model's configuration names."""
    config = model.config
    if config.is_encoder_decoder or config.get_text_config(decoder=True) is config:
        return True
    decoder = model.get_decoder()
    inside = next((n for n, module in model.named_modules() if module is decoder), "")
    head = model.get_output_embeddings()
    return name.startswith(f"{inside}.") or model.get_submodule(name) is head


@cache
def _reads_no_text(kind: type[nn.Module]) -> bool:
    """Whether a module takes pictures or sounds, and neither tokens nor embeddings of tokens."""
    taken = inspect.signature(kind.forward).parameters
    return not taken.keys().isdisjoint(_SENSES) and taken.keys().isdisjoint(_TEXT)


def _routes(model: nn.Module, name: str) -> bool:
    """Whether this is a router: named so, or a gate beside experts, with an output for each or one.

    Other layers stand beside experts too, such as those that make their inputs smaller.
    """
    if "router" in name.split("."):
        return True
    parent, _, own = name.rpartition(".")
    experts = dict(model.get_submodule(parent).named_children()).get("experts")
    if experts is None:
        return False
    outputs = {p.shape[0] for p in model.get_submodule(name).parameters(recurse=False)}
    return own == "gate" or not outputs.isdisjoint({1, _number_of(experts)})


def _number_of(experts: nn.Module) -> int | None:
    """How many experts a module has; None if it does not say."""
    if isinstance(experts, nn.ModuleList):
        return len(experts)
    return next((p.shape[0] for p in experts.parameters(recurse=False) if p.dim() == 3), None)


def _reader(model: nn.Module, name: str) -> str | None:
    """The class above a layer whose code names its weight, such as T5's `self.wo.weight`.

    Classes further above name more of the way: `block.attention.output.weight` in RWKV. A name in
    quotes is not read, such as those of tied weights, which a configuration may untie.
    """
    parts = name.split(".")
    for above in range(len(parts)):
        kind = type(model.get_submodule(".".join(parts[: len(parts) - 1 - above])))
        way = rf"\bself\.{parts[-1]}" if above == 0 else rf"\.{parts[-2]}\.{parts[-1]}"
        for base in kind.__mro__:
            if base.__module__.startswith("transformers.models") or base is kind:
                if re.search(rf"{way}\.weight\b(?!\")", _code_of(base)):
                    return base.__name__
    return None


@cache
def _code_of(kind: type) -> str:
    """The source of a class; empty where there is none."""
    try:
        return textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):
        return ""


# ---- names


def _owners_of_matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with a parameter of two or more dimensions of their own."""
    for name, module in model.named_modules():
        if any(p.dim() > 1 for p in module.parameters(recurse=False)):
            yield name, module


def _format_of(
    name: str, default: WeightFormat, layers: Mapping[str, WeightFormat]
) -> WeightFormat:
    return next((f for pattern, f in layers.items() if fnmatchcase(name, pattern)), default)


def names_layer(patterns: Iterable[str], name: str) -> bool:
    """Whether one of the patterns fits a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_patterns(model: nn.Module, patterns: list[str]) -> None:
    names = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            names.append(name)
        elif weights := _packable(name, module):
            names += [name, *weights]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            some: Any = sorted({_without_numbers(name) for name in names})
            raise ValueError(
                f"{pattern!r} names no linear layer of this {type(model).__name__}; it has "
                f"{', '.join(some)}"
            )


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _span(numbers: list[int]) -> str:
    """ "3", "0-31" or "0,2,5"."""
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))
