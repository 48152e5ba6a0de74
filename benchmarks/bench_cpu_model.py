"""Speed of a language model on the CPU: weights in bfloat16, float32, torch's int4, and packed.

The model has the shape of Qwen2.5-1.5B and random weights, which do not change the times. Its head
is tied to the embedding, so it stays as it is in every row. "torch int4" multiplies with torch's
own kernel (`_weight_int4pack_mm_for_cpu`, groups of 128). A row is one form of the weights and one
length of the prompt: milliseconds to the first token, and of the following decode steps of one
sequence (the median). All rows use the same threads, as many as torch takes.

    python benchmarks/bench_cpu_model.py              into results/cpu_model.json
    python benchmarks/bench_cpu_model.py --dry-run    printed only
    python benchmarks/bench_cpu_model.py --only int4  forms of weights whose name it finds; rows of
                                                      the others stay in the file
"""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable

import common
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Qwen2Config

from torch_turboquant.integrations.transformers import TurboQuantConfig, quantize

NAME = "cpu_model"
SHAPE = {  # of Qwen2.5-1.5B, as its configuration names it
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
WEIGHTS = {  # how a fresh model gets the weights of a row
    "bfloat16": None,
    "float32": torch.float32,
    "torch int4": "int4",
    "4": TurboQuantConfig(4),
    "4 uniform": TurboQuantConfig(4, grid="uniform"),
    "8": TurboQuantConfig(8),
}
PROMPTS = (64, 512)
STEPS = 16


class TorchInt4(nn.Module):
    """A linear layer with torch's int4 kernel for CPUs. Codes are random, as the weights are."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        n, k = linear.weight.shape
        self.group = 128 if k % 128 == 0 else 64
        codes = torch.randint(16, (n, k), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self.packed = nn.Parameter(packed, requires_grad=False)
        affine = torch.rand(k // self.group, n, 2, dtype=torch.bfloat16) / 1000
        self.affine = nn.Parameter(affine, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mm = torch.ops.aten._weight_int4pack_mm_for_cpu
        y = mm(x.flatten(0, -2), self.packed, self.group, self.affine).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def new_model(weights: TurboQuantConfig | torch.dtype | str | None) -> PreTrainedModel:
    torch.manual_seed(0)
    dtype = weights if isinstance(weights, torch.dtype) else torch.bfloat16
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE), dtype=dtype).eval()
    if isinstance(weights, TurboQuantConfig):
        quantize(model, weights)
    elif weights == "int4":
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and name != "lm_head":
                model.set_submodule(name, TorchInt4(module))
    return model


def milliseconds(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """What the call returns, and the time that it took."""
    started = time.perf_counter()
    result = call()
    return result, (time.perf_counter() - started) * 1e3


def generate(model: PreTrainedModel, tokens: int) -> tuple[float, float]:
    """Milliseconds of a prompt, and of a decode step after it."""
    cache = DynamicCache(config=model.config)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        return model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1)[:, None]

    prompt = torch.arange(tokens)[None] % model.config.vocab_size
    token, first = milliseconds(lambda: forward(prompt))
    steps = []
    for _ in range(STEPS):
        token, ms = milliseconds(lambda ids=token: forward(ids))
        steps.append(ms)
    return first, statistics.median(steps)


def measure(weights: str) -> list[common.Row]:
    model = new_model(WEIGHTS[weights])
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    generate(model, min(PROMPTS))  # threads and buffers are there from now on
    rows = []
    for tokens in PROMPTS:
        times = [generate(model, tokens) for _ in range(3)]
        first, step = (statistics.median(t) for t in zip(*times, strict=True))
        rows.append(
            {
                "weights": weights,
                "prompt": tokens,
                "threads": torch.get_num_threads(),
                "ttft_ms": first,
                "tpot_ms": step,
                "weights_bytes": size,
            }
        )
    return rows


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--only", default="", help="regular expression: forms of weights")
    arguments = options.parse_args()
    arguments.device = "cpu"  # on every machine
    rows: list[common.Row] = []
    with torch.inference_mode():
        for weights in filter(re.compile(arguments.only).search, WEIGHTS):
            for row in measure(weights):
                rows.append(row)
                times = f"first {row['ttft_ms']:8.1f} ms, step {row['tpot_ms']:7.1f} ms"
                size = f"{row['weights_bytes'] / 2**30:.2f} GiB"
                print(f"{weights:10} {row['prompt']:4} tokens: {times}, {size}", flush=True)
            gc.collect()
    common.write_progress(NAME, rows, "weights", arguments, list(WEIGHTS))


if __name__ == "__main__":
    main()
