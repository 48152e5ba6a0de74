"""Packed weights in transformers.

    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=TurboQuantConfig(bits=4))
    model.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)

    quantize(model, text=text, tokenizer=tokenizer)         # a model that is loaded

config: TurboQuantConfig. choice: which layers are packed. quantizer: what transformers calls.
conversions: layers that share a tensor of a file. pack: `quantize`. moments: what it learns from a
text. budget: which layers get more bits. report: what was done to each layer.

transformers finds config and quantizer in its dictionaries of methods, where they are entered once.
"""

from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)

from torch_turboquant.integrations.transformers.weights.config import METHOD, TurboQuantConfig
from torch_turboquant.integrations.transformers.weights.pack import quantize
from torch_turboquant.integrations.transformers.weights.quantizer import TurboQuantHfQuantizer
from torch_turboquant.integrations.transformers.weights.report import PackedLayer, noted_layers

__all__ = [
    "PackedLayer",
    "TurboQuantConfig",
    "TurboQuantHfQuantizer",
    "noted_layers",
    "quantize",
]

# Their decorators refuse a second registration, which a reload of this module would be.
if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
    register_quantization_config(METHOD)(TurboQuantConfig)
if METHOD not in AUTO_QUANTIZER_MAPPING:
    register_quantizer(METHOD)(TurboQuantHfQuantizer)
