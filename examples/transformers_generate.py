"""A model of transformers with a packed cache, beside its own DynamicCache.

    python examples/transformers_generate.py [--model NAME --prompt "..."] [--preset k5v4u]

Without --model it is a small Llama with random weights, whose answer means nothing: what counts is
how many tokens agree and what the caches take. With --model it is any decoder of transformers
(docs/transformers.md), a folder or a name. A prompt of a few words compares nothing: the first and
the last tokens stay exact.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from torch_turboquant.config import PRESETS
from torch_turboquant.integrations.transformers import TurboQuantCache

COUNTING = "".join(f"{n}, " for n in range(300))


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or name; default: random weights")
    parser.add_argument("--prompt", default=COUNTING, help="default: numbers to go on counting")
    parser.add_argument("--preset", default="k5v4u", choices=PRESETS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args(arguments)

    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        prompt = tokenizer(options.prompt, return_tensors="pt").input_ids
    else:
        model, tokenizer = small_llama(), None
        prompt = torch.randint(0, 1000, (1, 600))
    model, prompt = model.to(options.device), prompt.to(options.device)

    cache = TurboQuantCache.for_model(model, preset=options.preset)
    settings = {"max_new_tokens": options.tokens, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(prompt)
    packed = model.generate(prompt, attention_mask=mask, past_key_values=cache, **settings)
    cache.detach()  # the model is as it was before
    plain = model.generate(prompt, attention_mask=mask, **settings)

    new = slice(prompt.shape[1], min(packed.shape[1], plain.shape[1]))
    agreement = (packed[:, new] == plain[:, new]).float().mean().item()
    tokens = packed.shape[1] - 1  # the last one is not stored
    text = model.config.get_text_config()
    head_dim = cache.config.head_dim
    bf16 = 2 * 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim * tokens
    sizes = cache.memory_bytes()
    if sizes["pages"] == 0:
        print(f"{tokens} tokens are too few: all are exact, and nothing was compared")
    print(f"{options.preset}: {100 * agreement:.0f}% of the tokens are the same")
    print(f"pages {sizes['pages']:,} bytes, exact tail {sizes['tail']:,}, bf16 {bf16:,}")
    if tokenizer:
        print(tokenizer.decode(packed[0, prompt.shape[1] :], skip_special_tokens=True))
    return {"agreement": agreement, "pages": sizes["pages"], "bf16": bf16}


if __name__ == "__main__":
    main()
