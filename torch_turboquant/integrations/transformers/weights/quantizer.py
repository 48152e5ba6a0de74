"""What transformers calls while it loads and saves a model with packed weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer
from transformers.utils import logging

from torch_turboquant import _checks
from torch_turboquant._autograd import lasting
from torch_turboquant.integrations.transformers.weights.choice import (
    choose,
    experts_among,
    recorded_choice,
    recorded_outputs,
    summary,
    unexpected,
)
from torch_turboquant.integrations.transformers.weights.config import TurboQuantConfig
from torch_turboquant.integrations.transformers.weights.conversions import (
    conversions_to_save,
    joined_with,
    leave_packed_alone,
    names_in_files,
    packed_weights,
    split_by_layers,
)
from torch_turboquant.integrations.transformers.weights.experts import (
    PackedExperts,
    drop_weight,
    encode_experts,
    pack_experts,
    packed_name,
    plain_experts,
)
from torch_turboquant.integrations.transformers.weights.parallel import (
    is_distributed,
    knows_styles,
    styles_for_packed,
)
from torch_turboquant.integrations.transformers.weights.report import (
    PackedLayer,
    listening,
    relative_error,
)
from torch_turboquant.weights import PackedLinear, WeightFormat, decode_weight, encode_weight

NEEDS = "import torch_turboquant.integrations.transformers before from_pretrained"
"""Name of an empty tensor in every file of packed weights.

transformers knows no other package's formats before that package is imported. It then refuses the
shapes of packed weights, with a table of tensors that do not belong to the model: this name stands
in the table, and says what to do.
"""

logger = logging.get_logger(__name__)


class TurboQuantHfQuantizer(HfQuantizer):
    """Packs weights while transformers loads them, or loads weights that are packed.

    Args:
        quantization_config: a TurboQuantConfig; a copy of it gets the record of what was done.
        kwargs: pre_quantized, whether the files have packed weights.
    """

    requires_calibration = False
    quantization_config: TurboQuantConfig

    def __init__(self, quantization_config: TurboQuantConfig, **kwargs: Any) -> None:
        super().__init__(copy.deepcopy(quantization_config), **kwargs)
        self._packed: dict[str, WeightFormat] = {}  # linear layers, and weights of experts
        self._experts: set[str] = set()  # the latter
        self._model: nn.Module | None = None  # while it is loaded
        self._joined: set[str] = set()  # those whose tensor of the file a packed layer shares
        self._knows_plans = False  # of tensor parallelism
        # layers whose weight in the files has other outputs or inputs, which tiles may hide
        self._misfits: set[str] = set()
        self.refused: dict[str, str] = {}  # weights that cannot be packed: name -> why

    # -- before the weights

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        devices = device_map.values() if isinstance(device_map, Mapping) else [device_map]
        if not self.pre_quantized and "disk" in devices:
            raise ValueError(
                "weights cannot be packed while they are offloaded to disk: load the model without "
                "'disk' in device_map, save it, and load what was saved"
            )
        if not self.pre_quantized and any(str(device) == "meta" for device in devices):
            raise ValueError("device_map has 'meta', where there are no weights that can be packed")

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> nn.Module:
        config = self.quantization_config
        default, layers = config.weight_format(), config.layer_formats()
        if self.pre_quantized:
            self._packed = recorded_choice(model, default, layers, config.left_alone)
        else:
            self._packed, left = choose(model, default, layers, config.skip)
            linear: Any = {n: m for n, m in model.named_modules() if n in self._packed}
            outputs = {name: layer.out_features for name, layer in linear.items()}
            config.record(self._packed, left, outputs, scaled=False)
            tell(left)
        for name, forms in experts_among(model, self._packed).items():
            pack_experts(model.get_submodule(name), forms, loading=not self.pre_quantized)
            above = model.get_submodule(name.rpartition(".")[0])
            if not [*above.parameters(recurse=False), *above.buffers(recurse=False)]:
                # The code that fills weights which no file has must not look for those of experts:
                # Qwen3-Omni asks the block above for them.
                above._is_hf_initialized = True  # type: ignore[assignment]
            self._experts.update(f"{name}.{weight}" for weight in forms)
        for name, form in self._packed.items():
            if name in self._experts:
                continue
            linear = model.get_submodule(name)
            layer = empty_layer(linear, form, config.scaled)
            if not self.pre_quantized:
                # transformers before 5.23 casts what it reads to the dtype that stands here
                expected = torch.empty_like(layer.weight, dtype=linear.weight.dtype)
                layer.weight = nn.Parameter(expected, requires_grad=False)
            model.set_submodule(name, layer)
            if recorded_outputs(model, config.outputs, name) not in (None, layer.out_features):
                self._misfits.add(name)
        if self.pre_quantized:
            names = names_in_files(model, packed_weights(model))
            check_packed_dtypes(checkpoint_files or (), names)
        self._model = model
        ignored: Any = model._keys_to_ignore_on_load_unexpected
        ignored = [] if ignored is None else ignored  # a list or none in 5.5, then a set
        model._keys_to_ignore_on_load_unexpected = type(ignored)([*ignored, f"^{NEEDS}$"])
        return model

    def update_parallel_plan(self, model: nn.Module, plan: dict[str, str]) -> None:
        super().update_parallel_plan(model, plan)
        if not knows_styles():
            return
        experts = {name.rpartition(".")[0] for name in self._experts}
        styles_for_packed(plan, self._packed.keys() - self._experts, experts)
        self._knows_plans = True

    def update_weight_conversions(self, weight_conversions: list[Any], *model: Any) -> list[Any]:
        conversions = super().update_weight_conversions(weight_conversions, *model)
        if self._model is None:  # it is loaded already
            return conversions
        if self.pre_quantized:
            return leave_packed_alone(conversions, self._model)
        split_by_layers(conversions)
        tensors = list(self._model.state_dict())
        packed = {name for name in tensors if self.is_to_pack(name)}
        self._joined = joined_with(conversions, tensors, packed)
        return conversions

    # -- the weights

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        # transformers asks for the first of the layers that share a tensor of the file, and packs
        # all of them or none; PackWeights finds out which
        return self.is_to_pack(param_name) or param_name in self._joined

    def is_to_pack(self, param_name: str) -> bool:
        """Whether the file has a weight that is packed while it is loaded."""
        module, _, name = param_name.rpartition(".")
        linear = name == "weight" and module in self._packed
        return not self.pre_quantized and (linear or param_name in self._experts)

    def packed_name(self, param_name: str) -> str:
        """The name of the parameter that the packed form of a weight gets."""
        module, _, weight = param_name.rpartition(".")
        return f"{module}.{packed_name(weight)}" if param_name in self._experts else param_name

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:
        if not self.is_to_pack(param_name):
            return super().param_element_size(model, param_name, param)
        return 0 if param_name in self._experts else 1  # the packed weight of experts counts

    def get_quantize_ops(self) -> ConversionOps:
        return PackWeights(self)

    def pack(self, model: nn.Module, name: str, weight: Tensor) -> Tensor | None:
        """The packed weight of `name`; None, and a note, if it cannot be packed."""
        if weight.dtype not in _checks.FLOATS:
            self.refused[name] = (
                f"its weight is {weight.dtype}, supported: float32, float16, bfloat16 (dtype=...)"
            )
            return None
        form = self._packed[name]
        try:
            if name in self._experts:
                experts: Any = model.get_submodule(name.rpartition(".")[0])
                packed = encode_experts(weight, form, experts.is_transposed)
            else:
                layer: Any = model.get_submodule(name)
                whole = layer.out_features, layer.in_features
                if tuple(weight.shape) != whole and not is_distributed(model):  # else a slice
                    self._misfits.add(name)
                packed = encode_weight(weight, form)
        except ValueError as error:
            self.refused[name] = str(error)
            return None
        if (rows := listening()) is not None:
            if name in self._experts:
                decoded = experts.decode(name.rpartition(".")[2], packed)
            else:
                decoded = decode_weight(packed, form, len(weight))
            loss = relative_error(weight, decoded)
            rows.append(PackedLayer(name, form, weight.numel(), packed.numel(), loss))
        return packed

    # -- after the weights

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        self._model = None
        if is_distributed(model) and self._experts:
            raise ValueError(
                "packed experts cannot be shared by processes (tensor or expert parallelism): name "
                "them in skip"
            )
        if is_distributed(model) and not self._knows_plans:
            raise ValueError(
                "packed weights need transformers 5.23 or later for tensor parallelism (tp_plan)"
            )
        if self.refused:
            raise ValueError(
                "the weights of this model cannot be packed: "
                + "; ".join(f"{name}: {why}" for name, why in self.refused.items())
            )
        names = getattr(model.config, "architectures", None) or [type(model).__name__]
        missing = [n for n in self._packed if n in self._misfits or not _is_loaded(model, n)]
        if type(model).__name__ not in names and model.get_output_embeddings() is None:
            missing = [name for name in missing if not self._is_new_head(model, name)]
        if missing:
            why = "The files are incomplete, or of another model"
            if type(model).__name__ not in names:
                why = f"The files are of a {names[0]} and were read as a {type(model).__name__}"
            raise ValueError(
                f"the packed weights of {len(missing)} layers were not in the files or have "
                f"another shape: {', '.join(summary(dict.fromkeys(missing, '')))}. {why}"
            )
        for name in self._packed.keys() - self._experts:
            layer: Any = model.get_submodule(name)
            layer.requires_grad_(False)  # transformers asks for gradients of what it reads
            layer.place_constants()
        if conversions := leave_packed_alone(conversions_to_save(model), model):
            vars(model)["_weight_conversions"] = conversions  # save_pretrained uses these
        return model

    def _is_new_head(self, model: nn.Module, name: str) -> bool:
        """Whether a layer belongs to another head than the files have.

        transformers makes such layers anew, for a training, and says so. They stay linear layers.
        Asked of models without predictions of tokens: nobody means to get random ones.
        """
        prefix = getattr(model, "base_model_prefix", "")
        layer = model.get_submodule(name)
        read = [parameter for parameter in layer.parameters() if _was_read(parameter)]
        if not hasattr(model, prefix) or name.startswith(f"{prefix}.") or read:
            return False
        bias, weight = layer.bias is not None, layer.weight
        dtype = layer.bias.dtype if bias else model.dtype
        linear = nn.Linear(layer.in_features, layer.out_features, bias, weight.device, dtype)
        model._init_weights(linear)
        model.set_submodule(name, linear)
        self._packed.pop(name)
        self.quantization_config.left_alone[name] = "it is a new head, which the files do not have"
        return True

    # -- saving

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(
        self, model: nn.Module
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        return {**model.state_dict(), NEEDS: torch.zeros(0)}, {}

    # -- what the model can do

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    @lasting()
    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        if is_distributed(model):
            raise ValueError(
                "packed layers that processes share (tensor parallelism) cannot be made plain: "
                "load the model in one process, and call dequantize there"
            )
        for name, module in model.named_modules():
            if isinstance(module, PackedLinear | PackedExperts) and _is_offloaded(module):
                raise ValueError(
                    f"{name} is offloaded (device_map) and cannot be made plain: load the model "
                    "without offloading, and call dequantize there"
                )
        # a name, where transformers takes the dtype from a configuration that has been saved
        target = getattr(torch, dtype) if isinstance(dtype, str) else dtype or model.dtype
        if model.dtype != target:  # else layers of two dtypes would follow each other
            model.to(target)
        for name, module in list(model.named_modules()):
            if isinstance(module, PackedLinear):
                plain = plain_layer(module, target)
                keep_hooks(module, plain)
                model.set_submodule(name, plain)
            elif isinstance(module, PackedExperts):
                plain_experts(module, target)
                keep_hooks(module, module)
        return model


class PackWeights(ConversionOps):
    """The last step of loading a tensor: float weights become packed ones, one at a time."""

    def __init__(self, quantizer: TurboQuantHfQuantizer) -> None:
        self.quantizer = quantizer

    def __deepcopy__(self, memo: dict[int, Any]) -> PackWeights:
        return self

    def convert(
        self, input_dict: dict[str, Any], *args: Any, model: Any = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        """input_dict: tensors by the names of the model's parameters, which transformers made."""
        found: dict[str, Tensor] = {}
        for name, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            if not self.quantizer.is_to_pack(name):
                found[name] = tensor
                continue
            target = self.quantizer.packed_name(name)
            packed = self.quantizer.pack(model, name.removesuffix(".weight"), tensor)
            if packed is None:  # any value will do: the model is refused once it is loaded
                shape = model.get_parameter(target).shape
                packed = torch.zeros(shape, dtype=torch.uint8, device=tensor.device)
            if target != name:
                module, _, weight = name.rpartition(".")
                drop_weight(model.get_submodule(module), weight)
                (kwargs.get("missing_keys") or set()).discard(name)
            found[target] = packed
        return found


def check_packed_dtypes(files: Iterable[str], packed: set[str]) -> None:
    """Raises where files have the bytes of packed weights as numbers of another kind.

    transformers would convert such numbers to bytes, and other weights would come of it.

    Args:
        files: of a saved model.
        packed: names of packed weights, as files may have them.
    """
    for path in files:
        if not path.endswith(".safetensors"):
            continue
        with safe_open(path, "pt") as file:
            for name in sorted(packed.intersection(file.keys())):
                if (dtype := file.get_slice(name).get_dtype()) != "U8":
                    raise ValueError(
                        f"{path} has the packed weight {name} in {dtype}, supported: U8 (bytes)"
                    )


def empty_layer(
    linear: nn.Module, form: WeightFormat, scaled: bool, device: str | None = None
) -> PackedLinear:
    """A layer whose weights are still to come; device: None means that of the linear layer."""
    return PackedLinear(
        linear.in_features,
        linear.out_features,
        form,
        bias=linear.bias is not None,
        channel_inverse=scaled,
        device=device or linear.weight.device,
        dtype=linear.weight.dtype,
    )


def plain_layer(layer: PackedLinear, dtype: torch.dtype) -> nn.Linear:
    """A linear layer with the decoded weights."""
    with torch.device("meta"):
        linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
    linear.weight = nn.Parameter(layer.decode(dtype))
    if layer.bias is not None:
        linear.bias = nn.Parameter(layer.bias.detach().to(dtype))
    return linear


def keep_hooks(old: nn.Module, new: nn.Module) -> None:
    """Gives a layer the hooks of the layer that it replaces.

    It gets the dictionaries themselves, so that a handle of one of these hooks still removes it.

    Args:
        new: may be `old`, if its class has become another one.
    """
    for hooks in (
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
    ):
        setattr(new, hooks, getattr(old, hooks))
    if "_hf_hook" in vars(old):
        # accelerate's moves inputs to the layer's device. It lies around the forward of the
        # instance, and calls the one that the class had.
        around: Any = old.forward
        new._hf_hook = old._hf_hook
        new._old_forward = type(new).forward.__get__(new)
        new.forward = partial(around.func, new)


def tell(left: Mapping[str, str]) -> None:
    """Logs what is left alone: as a warning what one might think is packed."""
    surprises = unexpected(left)
    for names, reason in summary(left).items():
        logger.info(f"left alone: {names}: {reason}")
    if surprises:
        lines = "\n".join(f"  {names}: {why}" for names, why in summary(surprises).items())
        logger.warning(
            f"{len(surprises)} layers keep their weights as they are:\n{lines}\n"
            "(all of them: model.config.quantization_config.left_alone)"
        )


def _is_offloaded(module: nn.Module) -> bool:
    return any(parameter.device.type == "meta" for parameter in module.parameters())


def _is_loaded(model: nn.Module, name: str) -> bool:
    """Whether a layer has got all that files have of it; what is offloaded is elsewhere.

    Nothing but a file fills the bias and the scales of channels of packed layers, whose memory has
    any values until then.
    """
    module, _, child = name.rpartition(".")
    owner: Any = model.get_submodule(module)
    if isinstance(owner, PackedExperts):
        weight, expected = owner.get_parameter(packed_name(child)), owner.packed[child].shape
        others = [getattr(owner, f"{child}_bias", None)]
    else:
        layer = owner.get_submodule(child)
        weight = layer.weight
        expected = layer.format.block(layer.in_features).packed_shape(
            layer.out_features, layer.in_features
        )
        others = [layer.bias, layer.channel_inverse]
    if not all(_was_read(other) for other in others if other is not None):
        return False
    if weight.device.type == "meta":
        return True
    fits = weight.dtype == torch.uint8 and tuple(weight.shape) == tuple(expected)
    return fits and _was_read(weight)


def _was_read(parameter: Tensor) -> bool:
    return parameter.device.type == "meta" or getattr(parameter, "_is_hf_initialized", False)
