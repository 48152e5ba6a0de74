"""References that no format has an advantage on: stored weights, dithered within their cells.

Models that are stored in 4 to 8 bits would be reproduced without an error by a format with the same
grid (bench_weights.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
