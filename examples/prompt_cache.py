"""A long prompt is read once, kept in a file, and asked many questions.

    python examples/prompt_cache.py [--model NAME] [--preset k5v4u] [--device cuda]

The first part reads a document and saves the cache. The second one, which could be another process
on another day, loads the file and answers every question with a copy of it. Each answer is compared
with that of a model which reads document and question anew; they differ only where a model is
undecided, because there all of the document is exact.

Without --model it is a small Llama with random weights, which shows that files and copies work, and
how long they take.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from torch_turboquant.integrations.transformers import TurboQuantCache

# The space before a word belongs to the word's token: a document that ended in a space would have a
# token that document and question together have not.
DOCUMENT = " ".join(f"Room {n} is for {2 + n % 7} guests." for n in range(100, 200))
QUESTIONS = [" For how many guests is room 137?", " For how many guests is room 160?"]


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config).eval()


def answer(model: torch.nn.Module, prompt: Tensor, cache: TurboQuantCache, tokens: int) -> Tensor:
    """The new tokens of a prompt, whose beginning the cache may hold already."""
    settings = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(prompt)
    out = model.generate(prompt, attention_mask=mask, past_key_values=cache, **settings)
    return out[0, prompt.shape[1] :]


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or name; default: random weights")
    parser.add_argument("--preset", default="k5v4u")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args(arguments)

    tokenizer = None
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        document = tokenizer(DOCUMENT, return_tensors="pt").input_ids
        texts = [DOCUMENT + question for question in QUESTIONS]
        prompts = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
        if not all(torch.equal(prompt[:, : document.shape[1]], document) for prompt in prompts):
            parser.error("this tokenizer gives the document other tokens where a question follows")
    else:
        model = small_llama()
        document = torch.randint(0, 1000, (1, 2000))
        prompts = [torch.cat([document, torch.randint(0, 1000, (1, 9))], 1) for _ in QUESTIONS]
    model, document = model.to(options.device), document.to(options.device)
    prompts = [prompt.to(options.device) for prompt in prompts]

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "document.safetensors"
        start = time.perf_counter()
        with TurboQuantCache.for_model(model, options.preset) as cache:
            model(document, past_key_values=cache, logits_to_keep=1)
            reading = time.perf_counter() - start
            size = cache.save(file)
        start = time.perf_counter()
        loaded = TurboQuantCache.load(file, model)
        loading = time.perf_counter() - start

    print(f"{document.shape[1]:,} tokens read in {reading:.2f} s, saved in {size:,} bytes")
    print(f"loaded in {loading:.3f} s")
    agreement = []
    for prompt in prompts:
        branch = copy.deepcopy(loaded)  # the next question begins with the document again
        found = answer(model, prompt, branch, options.tokens)
        anew = answer(
            model, prompt, TurboQuantCache.for_model(model, options.preset), options.tokens
        )
        shared = min(len(found), len(anew))
        agreement.append((found[:shared] == anew[:shared]).float().mean().item())
        if tokenizer:
            print(tokenizer.decode(found, skip_special_tokens=True))
    same = sum(agreement) / len(agreement)
    print(f"{100 * same:.0f}% of the tokens are those of a model that reads everything anew")
    return {"agreement": same, "bytes": size, "tokens": document.shape[1]}


if __name__ == "__main__":
    main()
