"""The rows of the study of weights: what they give in place of a linear's weight, and its bits.

They are ours and those of controls (weight_formats.py); bench_weights.py says what they are for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import weight_formats as formats
from torch import Tensor
from weight_formats import Format

from torch_turboquant.weight_calibration import DAMPING, NEAREST, ROUNDED, channel_scales


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
