"""Decode steps of a model with latent attention: what absorption gives, and what fewer bits give.

DeepSeek-V2-Lite's shape with some of its layers and random weights. Ways to keep the context:

    dynamic        transformers' DynamicCache, which expands the whole cache in every step
    uncompressed   TurboQuantCache(preset="uncompressed"): absorbed steps over 16-bit latents
    k5u, k4u, k8   TurboQuantCache: absorbed steps over packed latents

Each reads its prompt, then takes steps, `eager` and, but for dynamic, `graph`: the static form,
compiled with CUDA graphs. `ms` is the median of a step's times, `short_ms` that of the same steps
behind a prompt of 64 tokens, so that their difference is the context's part, `attention_ms`.

    python benchmarks/bench_latent_steps.py                      into h200_latent_steps.json
    python benchmarks/bench_latent_steps.py --tiny --device cpu  tiny sizes: a try, printed only
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import common
import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from torch_turboquant.integrations.transformers import TurboQuantCache

V2_LITE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 65536,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 100,
}
WAYS = "dynamic", "uncompressed", "k5u", "k4u", "k8"
MODES = "eager", "graph"
SHORT = 64


def make_model(arguments: Any) -> nn.Module:
    """With the library's default weights, which are small enough for logits without infinities."""
    sizes = {**V2_LITE, **(TINY if arguments.tiny else {}), "num_hidden_layers": arguments.layers}
    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = transformers.DeepseekV2Config(**sizes, **tokens)
    torch.manual_seed(0)
    with torch.device(arguments.device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def step_ms(step: Callable[[], object], device: torch.device, steps: int) -> float:
    """The median of the host's times until a step's results are there, after three others."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for i in range(steps + 3):
        wait()
        begin = time.perf_counter()
        step()
        wait()
        if i >= 3:
            times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def steps_of(model: nn.Module, cache: Cache, ids: Tensor, mode: str, steps: int) -> float:
    model(ids, past_key_values=cache, logits_to_keep=1)
    token = ids[:, -1:].clone()
    forward = model
    if mode == "graph":
        kind = "reduce-overhead" if ids.is_cuda else "default"
        forward = torch.compile(model, mode=kind, fullgraph=True)
    try:
        return step_ms(lambda: forward(token, past_key_values=cache), ids.device, steps)
    finally:
        torch._dynamo.reset()


def measure(
    model: nn.Module, ids: Tensor, way: str, mode: str, steps: int
) -> tuple[float, dict[str, int]]:
    """Milliseconds of a step behind a prompt, and the bytes of its cache."""
    if way == "dynamic":
        cache = DynamicCache(config=model.config)
        ms = steps_of(model, cache, ids, mode, steps)
        return ms, {"total": sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)}
    batch, context = ids.shape
    options = {"max_batch_size": batch, "max_cache_len": context + steps + 16}
    with TurboQuantCache.for_model(model, way, static=mode == "graph", **options) as packed:
        return steps_of(model, packed, ids, mode, steps), packed.memory_bytes()


def rows(arguments: Any) -> Iterator[common.Row]:
    model = make_model(arguments)
    vocabulary = model.config.vocab_size
    shape = arguments.sequences, arguments.context
    ids = torch.randint(vocabulary, shape, device=arguments.device)
    stock = None
    for way in WAYS:
        for mode in MODES:
            if (way, mode) == ("dynamic", "graph"):
                continue
            ms, held = measure(model, ids, way, mode, arguments.steps)
            short, _ = measure(model, ids[:, :SHORT], way, mode, arguments.steps)
            stock = stock or (ms, ms - short)
            row = {
                "way": way,
                "mode": mode,
                "layers": arguments.layers,
                "sequences": arguments.sequences,
                "context": arguments.context,
                "ms": round(ms, 3),
                "short_ms": round(short, 3),
                "attention_ms": round(ms - short, 3),
                "faster": round(stock[0] / ms, 2),
                "bytes_per_layer": held["total"] // arguments.layers,
            }
            print(row, flush=True)
            yield row


@torch.no_grad()
def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--layers", type=int, default=8, help="default: 8, of the model's 27")
    options.add_argument("--sequences", type=int, default=8, help="default: 8")
    options.add_argument("--context", type=int, default=32768, help="tokens (default: 32768)")
    options.add_argument("--steps", type=int, default=20, help="that are timed (default: 20)")
    options.add_argument("--tiny", action="store_true", help="tiny sizes, printed only")
    arguments = options.parse_args()
    if arguments.tiny:
        arguments.layers, arguments.sequences, arguments.context, arguments.steps = 2, 2, 150, 2
        arguments.dry_run = True
    elif torch.device(arguments.device).type != "cuda":
        print("bench_latent_steps.py needs a CUDA device, or --tiny")
        return
    common.write_rows("h200_latent_steps", list(rows(arguments)), arguments)


if __name__ == "__main__":
    main()
