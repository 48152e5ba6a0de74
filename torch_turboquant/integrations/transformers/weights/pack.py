"""Packing a model that is loaded: with what a text says about its layers, or without a text."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from torch_turboquant._autograd import lasting
from torch_turboquant._checks import FLOATS, check_positive
from torch_turboquant.integrations.transformers.weights.budget import (
    Candidate,
    check_predicts,
    choose_by_budget,
)
from torch_turboquant.integrations.transformers.weights.choice import (
    choose,
    experts_among,
    names_layer,
)
from torch_turboquant.integrations.transformers.weights.config import METHOD, TurboQuantConfig
from torch_turboquant.integrations.transformers.weights.experts import (
    PackedExperts,
    PackedWeights,
    encode_experts,
    pack_experts,
    packed_name,
    shape_of,
)
from torch_turboquant.integrations.transformers.weights.moments import (
    passes,
    reads_tokens,
    second_moments,
)
from torch_turboquant.integrations.transformers.weights.quantizer import (
    TurboQuantHfQuantizer,
    empty_layer,
    keep_hooks,
    tell,
)
from torch_turboquant.integrations.transformers.weights.report import (
    PackedLayer,
    relative_error,
)
from torch_turboquant.models import Fields, text_config
from torch_turboquant.weight_calibration import channel_scales, encode_calibrated
from torch_turboquant.weights import PackedLinear, WeightFormat, encode_weight

_POSITIONS = (
    "max_position_embeddings",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
    "max_seq_len",
)
"""Names of the number of positions in configurations."""
TOKENS = 16384
"""Of a text that are read."""
LENGTH = 2048
"""Tokens of a sequence; a model with fewer positions gets shorter ones."""
LEAST = 256
"""The fewest tokens that say anything about a layer."""
MEMORY = 8 * 2**30
"""Bytes of moments that are held at a time."""


@lasting()
@torch.no_grad()
def quantize(
    model: nn.Module,
    config: TurboQuantConfig | None = None,
    *,
    text: str | Sequence[str] | Tensor | None = None,
    tokenizer: Any = None,
    tokens: int = TOKENS,
    budget: float | None = None,
    memory: int = MEMORY,
) -> list[PackedLayer]:
    """Packs the linear layers of a loaded model, in place.

    With a text, the model reads it first: the channels of each layer are scaled by how large their
    inputs are, and weights are rounded so that errors cancel in the layer's outputs. Afterwards the
    model is as one that was loaded with this configuration, and `save_pretrained` writes it.

    Args:
        model: of transformers, loaded without quantization_config, on any devices.
        config: which layers, and how; None: the defaults. It is not changed; the model gets a copy
            with the record of what was done, `model.config.quantization_config`.
        text: texts, or token ids int64 [tokens]; what the model will read later is best. None:
            weights are packed as they are.
        tokenizer: of the texts; not needed for token ids.
        tokens: of the text to read; a shorter text is read whole.
        budget: bits per weight that the packed layers may take together, scales included, such as
            4.5. Layers that `config.layers` does not name get 8 bits where that lowers the measured
            divergence of predictions most; needs a text. Experts do not count, and keep the format
            of config. None: the formats of config.
        memory: bytes that may be used for what the text says, on the devices of the layers. The
            text is read as often as that requires; the result does not depend on it.

    Returns:
        One entry per packed layer, in the order of the model.

    Raises:
        TypeError: model or config is something else.
        ValueError: no layer can be packed; the model or a part of it is packed already; a text is
            too short, has no tokenizer or tokens that the model does not know; weights or inputs
            are not finite, or of a dtype that is not supported; a budget is too small, or has no
            text. The model has not changed.
    """
    _check_model(model, config)
    quantizer = TurboQuantHfQuantizer(config or TurboQuantConfig(), pre_quantized=False)
    config = quantizer.quantization_config
    check_positive(tokens=tokens)
    named = config.layer_formats()
    packed, left = choose(model, config.weight_format(), named, config.skip)
    experts = experts_among(model, packed)
    of_experts = [f"{name}.{weight}" for name, forms in experts.items() for weight in forms]
    linear = [name for name in packed if name not in set(of_experts)]
    if budget is not None:
        _check_budget(model, budget, {name: packed[name] for name in linear}, text)
    sequences = None if text is None else _sequences(model, text, tokenizer, tokens)
    if budget is not None and sequences is not None:
        check_predicts(model, sequences[0])
    candidates: dict[str, list[Candidate]] = {}
    groups = [linear] if sequences is None else list(passes(model, linear, memory))
    for number, names in enumerate(groups, 1):
        moments: Mapping[str, Tensor] = {}
        if sequences is not None:
            which = f" {number}/{len(groups)}" if len(groups) > 1 else ""
            moments = second_moments(model, names, sequences, f"Reading the text{which}")
        for name in logging.tqdm(names, desc="Packing weights"):
            forms = [packed[name]]
            if budget is not None and packed[name].bits < 8 and not names_layer(named, name):
                forms.append(WeightFormat(bits=8, group=packed[name].group))
            candidates[name] = [_pack(model, name, form, moments.get(name)) for form in forms]
    chosen = {name: found[0] for name, found in candidates.items()}
    if budget is not None and sequences is not None:
        chosen = choose_by_budget(model, candidates, budget, sequences[0])
    bytes_of = {
        name: _pack_experts(model, name, packed[name])
        for name in logging.tqdm(of_experts, desc="Packing experts", disable=not of_experts)
    }
    for name, (layer, _) in chosen.items():
        model.set_submodule(name, layer)
    for name, of_weights in experts.items():
        module = model.get_submodule(name)
        pack_experts(module, of_weights)
        keep_hooks(module, module)
        for weight in of_weights:
            packed_bytes = _parameter(bytes_of[f"{name}.{weight}"][0])
            module.register_parameter(packed_name(weight), packed_bytes)
    done = {name: row for part in (chosen, bytes_of) for name, (_, row) in part.items()}
    rows = [done[name] for name in packed]
    formats = {row.name: row.form for row in rows}
    outputs = {name: layer.out_features for name, (layer, _) in chosen.items()}
    config.record(formats, left, outputs, scaled=sequences is not None)
    if sequences is not None:
        bits = None if budget is None else float(budget)
        config.calibration = {**_calibration(sequences), "budget": bits}
    _attach(model, quantizer)
    tell(left)
    return rows


def check_quantize(
    model: nn.Module,
    config: TurboQuantConfig,
    *,
    text: str | Sequence[str] | Tensor | None = None,
    tokenizer: Any = None,
    tokens: int = TOKENS,
) -> None:
    """Refuses what `quantize` refuses about model, config and text, without packing anything.

    The model does not read the text here, so what its layers make of it is not known.

    Raises:
        TypeError, ValueError: as quantize.
    """
    _check_model(model, config)
    check_positive(tokens=tokens)
    choose(model, config.weight_format(), config.layer_formats(), config.skip)
    if text is not None:
        _sequences(model, text, tokenizer, tokens)


def _check_model(model: Any, config: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"quantize: model must be a model of transformers, got {_kind(model)}")
    if not isinstance(config, TurboQuantConfig | None):
        raise TypeError(f"quantize: config must be a TurboQuantConfig, got {_kind(config)}")
    packed = [n for n, m in model.named_modules() if isinstance(m, PackedLinear | PackedExperts)]
    method = getattr(model.config, "quantization_config", None)
    if getattr(model, "hf_quantizer", None) is not None or packed:
        how = getattr(method, "quant_method", packed[0] if packed else None)
        raise ValueError(
            f"this {type(model).__name__} is quantised already ({how}): load the original weights"
        )


def _check_budget(
    model: nn.Module, budget: Any, packed: Mapping[str, WeightFormat], text: Any
) -> None:
    if text is None:
        raise ValueError("quantize: budget needs a text, which says what each layer costs")
    if not isinstance(budget, Real) or not math.isfinite(budget):
        raise ValueError(f"budget is {budget!r}, expected bits per weight, such as 4.5")
    shapes: dict[str, Any] = {name: model.get_submodule(name).weight.shape for name in packed}
    weights = sum(n * k for n, k in shapes.values())
    least = sum(
        8 * math.prod(packed[name].block(k).packed_shape(n, k)) for name, (n, k) in shapes.items()
    )
    if budget * weights < least:  # found before the text is read, which takes long
        raise ValueError(
            f"budget is {budget} bits per weight, the coarsest formats take {least / weights:.3f}"
        )
    if not weights:
        raise ValueError(
            "budget chooses formats of linear layers, and none is packed: leave it out"
        )


def _kind(value: Any) -> str:
    return type(value).__name__


def _pack(model: nn.Module, name: str, form: WeightFormat, moment: Tensor | None) -> Candidate:
    linear = model.get_submodule(name)
    weight = linear.weight
    _check_weight(name, weight)
    scale = None
    with _encoding(name, weight):
        if moment is None:
            packed = encode_weight(weight, form)
        else:
            scale = channel_scales(weight, moment)
            packed = encode_calibrated(weight, moment, form, scale)
    layer = empty_layer(linear, form, scaled=scale is not None, device="meta")
    layer.weight = _parameter(packed)
    if scale is not None:
        layer.channel_inverse = _parameter(1 / scale)
    if linear.bias is not None:
        layer.bias = _parameter(linear.bias.detach())
    layer.place_constants()
    keep_hooks(linear, layer)
    with _encoding(name, weight):
        error = relative_error(weight, layer.decode(), moment)
    return layer, PackedLayer(name, form, weight.numel(), packed.numel(), error)


def _pack_experts(model: nn.Module, name: str, form: WeightFormat) -> tuple[Tensor, PackedLayer]:
    module, _, child = name.rpartition(".")
    experts: Any = model.get_submodule(module)
    weight = experts.get_parameter(child)
    _check_weight(name, weight)
    with _encoding(name, weight):
        packed = encode_experts(weight, form, experts.is_transposed)
    decoded = PackedWeights(*shape_of(experts, weight), form).decode(packed)
    if experts.is_transposed:
        decoded = decoded.transpose(1, 2)
    error = relative_error(weight, decoded)
    return packed, PackedLayer(name, form, weight.numel(), packed.numel(), error)


@contextmanager
def _encoding(name: str, weight: Tensor) -> Iterator[None]:
    """Computes without autocast, and says which weight was refused, as from_pretrained does."""
    try:
        with torch.autocast(weight.device.type, enabled=False):
            yield
    except ValueError as error:
        raise ValueError(f"the weights of this model cannot be packed: {name}: {error}") from error


def _check_weight(name: str, weight: Tensor) -> None:
    if weight.device.type == "meta":
        raise ValueError(f"{name} is offloaded (device_map): load the model without offloading")
    if weight.dtype not in FLOATS:
        raise ValueError(
            f"the weight of {name} is {weight.dtype}, supported: float32, float16, bfloat16"
        )
    if not weight.isfinite().all():
        raise ValueError(f"the weight of {name} has numbers that are not finite")


def _parameter(tensor: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(tensor, requires_grad=False)
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return parameter


def _attach(model: nn.Module, quantizer: TurboQuantHfQuantizer) -> None:
    """What from_pretrained does to a model that it has quantised."""
    model.is_quantized = True  # type: ignore[assignment]
    model.quantization_method = METHOD  # type: ignore[assignment]
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)


# ---- the text


def _sequences(model: nn.Module, text: Any, tokenizer: Any, tokens: int) -> list[Tensor]:
    """The first tokens of the text in sequences of one length; the rest of a text is left out."""
    if not reads_tokens(model):
        raise ValueError(f"{type(model).__name__} reads no text: pack it without one")
    if isinstance(text, Tensor):
        ids = text.reshape(-1)
    elif tokenizer is None:
        raise ValueError("quantize: text needs its tokenizer, or give token ids as a tensor")
    else:
        texts = [text] if isinstance(text, str) else list(text)
        ids = torch.tensor([i for part in texts for i in tokenizer(part).input_ids])
    ids = ids[:tokens]
    if len(ids) < LEAST:
        raise ValueError(
            f"the text gives {len(ids)} tokens; calibration needs {LEAST}, and is better with "
            f"{TOKENS:,}: give a longer text, or pack without one"
        )
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"token ids are {ids.dtype}, expected int64")
    known = _known_tokens(model)
    if ids.min() < 0 or (known is not None and ids.max() >= known):
        raise ValueError(
            f"the text has token ids from {ids.min()} to {ids.max()}, and the model knows {known} "
            "tokens: is this the model's own tokenizer?"
        )
    length = min(len(ids), _positions(model), LENGTH)
    return list(ids[: len(ids) // length * length].view(-1, length))


def _known_tokens(model: nn.Module) -> int | None:
    """How many tokens a model knows; None: it has no table of tokens, as CANINE."""
    try:
        return getattr(model.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:
        return None


def _positions(model: nn.Module) -> int:
    """The longest sequence that a model can read."""
    fields = Fields(text_config(model.config))
    named = [fields.get(name) for name in _POSITIONS]
    # XLNet says -1, as it has no last position
    longest = min([int(n) for n in named if n is not None and n > 0], default=LENGTH)
    if fields.get("ngram"):  # ProphetNet predicts more than one token, at positions of their own
        longest -= 1
    for name, module in model.named_modules():
        # RoBERTa and its like begin to count behind the place of padding
        if (
            name.endswith("position_embeddings")
            and getattr(module, "padding_idx", None) is not None
        ):
            return longest - module.padding_idx - 1
    return longest


def _calibration(sequences: list[Tensor]) -> dict[str, Any]:
    digest = hashlib.sha256(torch.cat(sequences).to(torch.int64).cpu().numpy().tobytes())
    return {
        "tokens": sum(map(len, sequences)),
        "sequences": len(sequences),
        "text": digest.hexdigest()[:16],
    }
