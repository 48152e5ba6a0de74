"""How much memory a model's KV cache takes: `torch_turboquant memory`.

Everything is counted from the model's configuration: the pages of a request (codes, scales and
padding, the last page whole), its exact tail, and once per model the constants of the codec. bf16
and fp8 caches in pages of the same size stand beside the presets. Sizes are bytes; the command
prints binary units (1 GiB = 2^30 bytes).

layers: which layers of a model count. sizes: the arithmetic. weights: the bytes of packed weights.
cli: the command.
"""

from torch_turboquant.memory.layers import AttentionLayer, LatentLayer, attention_layers
from torch_turboquant.memory.sizes import CacheMemory, packed_memory, plain_memory

__all__ = [
    "AttentionLayer",
    "CacheMemory",
    "LatentLayer",
    "attention_layers",
    "packed_memory",
    "plain_memory",
]
