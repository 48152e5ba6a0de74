"""SGLang with packed pages: a conversation whose turns continue the prefix of the ones before.

    python examples/sglang_generate.py [--model FOLDER --prompt "..."] [--preset k5v4u]

It prints how many tokens fit into the cache, and how many of every turn's prompt the prefix tree
had. Without --model it is a small Llama with random weights, whose answers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

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
QUESTIONS = 3
WORDS = 100  # of a question of the model with random weights, in tokens


def turn(llm: Any, conversation: Any, tokens: int) -> tuple[Any, int]:
    """Lets the model go on with a conversation, a text or tokens.

    Returns:
        The conversation with the answer, and how many tokens of it the prefix tree had.
    """
    sampling = {"max_new_tokens": tokens, "temperature": 0}
    if isinstance(conversation, str):
        found = llm.generate(conversation, sampling_params=sampling)
        answer = found["text"]
        print(answer)
    else:
        sampling["ignore_eos"] = True
        found = llm.generate(input_ids=conversation, sampling_params=sampling)
        answer = found["output_ids"]
    return conversation + answer, found["meta_info"]["cached_tokens"]


def main(arguments: list[str] | None = None, **options: Any) -> list[int]:
    """options: further ones of sglang.Engine. Returns the cached tokens of every turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or name; default: random weights")
    parser.add_argument("--prompt", default="The three largest rivers of Europe are")
    parser.add_argument("--preset", default="k5v4u")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    chosen = parser.parse_args(arguments)
    import sglang

    with tempfile.TemporaryDirectory() as folder:
        model, conversation = chosen.model, chosen.prompt
        if model is None:
            (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
            model, conversation = folder, [7 * n % 1000 for n in range(WORDS)]
            options = {"load_format": "dummy", "skip_tokenizer_init": True, **options}
        llm = sglang.Engine(
            model_path=model,
            attention_backend=f"turboquant:{chosen.preset}",
            page_size=64,
            context_length=2048,
            **options,
        )
        try:
            print(f"{llm.get_server_info()['max_total_num_tokens']:,} tokens fit")
            cached = []
            for number in range(QUESTIONS):
                conversation, found = turn(llm, conversation, chosen.tokens)
                print(f"turn {number + 1}: {found} tokens of the prompt were there")
                cached.append(found)
                conversation += (
                    " And then?" if chosen.model else [11 * n % 1000 for n in range(WORDS)]
                )
        finally:
            llm.shutdown()
    return cached


if __name__ == "__main__":
    main()
