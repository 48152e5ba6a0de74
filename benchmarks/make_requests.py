"""Writes requests for `vllm bench serve`: conversations of no one, of usual lengths.

    python benchmarks/make_requests.py requests.jsonl
    vllm bench serve --model MODEL_FOLDER --dataset-name custom --dataset-path requests.jsonl \\
        --custom-output-len -1 --skip-chat-template --ignore-eos --num-prompts 1000 \\
        --request-rate 20

A file that ends in .json has the form of ShareGPT's instead, with an answer of the drawn length to
each prompt, for programs that take such a file (`--dataset-name sharegpt`).

Prompts and answers have lognormal lengths, cut at --longest, with the means that the paper of
PagedAttention gives for ShareGPT's conversations: 161 and 338 tokens. Every --turns-th request on
average goes on with an earlier one: its prompt begins with all of that prompt, as in a
conversation, so that prefix caching has something to find. Words are drawn from common English ones
that most tokenizers have whole; with --tokenizer prompts have exactly as many tokens as were drawn.
The same seed gives the same file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

PROMPT, ANSWER = 161, 338  # means, tokens
LONGEST = 1024  # tokens of a prompt, and of an answer
TURNS = 3  # every so many-th request goes on with an earlier one
SPREAD = 1.0  # standard deviation of the logarithm of a length
WORDS = (
    "the of and to in is that it was for on are as with his they at be this from have or by one "
    "had not but what all were when we there can an your which their said if do will each about "
    "how up out them then she many some so these would other into has more her two like him see "
    "time could no make than first been its who now people my made over did down only way find "
    "use may water long little very after words called just where most know get through back much "
    "before go good new write our used me man too any day same right look think also around"
).split()


def lengths(random: np.random.Generator, count: int, mean: float, longest: int) -> np.ndarray:
    """Lognormal numbers with this mean, at least 4 and at most `longest`."""
    drawn = random.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, count)
    return drawn.round().clip(4, longest).astype(int)


def make_requests(
    count: int,
    prompt_mean: float,
    output_mean: float,
    longest: int,
    turns: float,
    seed: int,
    tokenizer: Any = None,
) -> list[dict[str, Any]]:
    """Requests as vLLM's custom data set has them: a prompt and how many tokens answer it.

    Args:
        count: of requests.
        prompt_mean, output_mean: tokens of a new prompt and of an answer.
        longest: the most tokens of a prompt, and of an answer.
        turns: every turns-th request goes on with an earlier one; 0: none does.
        seed: of everything that is drawn.
        tokenizer: of transformers; None: a word counts as a token.
    """
    random = np.random.default_rng(seed)
    prompts = lengths(random, count, prompt_mean, longest)
    answers = lengths(random, count, output_mean, longest)
    goes_on = random.random(count) < (1 / turns if turns else 0)
    made: list[dict[str, Any]] = []
    sizes: list[int] = []  # tokens of the prompts
    for tokens, answer, again in zip(prompts, answers, goes_on, strict=True):
        text, before = "", 0
        if again and made:
            earlier = int(random.integers(len(made)))
            if sizes[earlier] + tokens <= longest:
                text, before = made[earlier]["prompt"] + " ", sizes[earlier]
        text += " ".join(random.choice(WORDS, tokens))
        if tokenizer is not None:  # a word has one token or more
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            text = tokenizer.decode(ids[: before + tokens])
        made.append({"prompt": text, "output_tokens": int(answer)})
        sizes.append(before + int(tokens))
    return made


def as_conversations(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Requests in the form of ShareGPT's file: a question and an answer each."""
    return [
        {
            "id": str(number),
            "conversations": [
                {"from": "human", "value": one["prompt"]},
                {"from": "gpt", "value": " ".join([WORDS[0]] * one["output_tokens"])},
            ],
        }
        for number, one in enumerate(requests)
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="to write: a .jsonl, or a .json")
    parser.add_argument("--count", type=int, default=1000, help="requests; default: %(default)s")
    parser.add_argument("--prompt", type=float, default=PROMPT, help="mean; default: %(default)s")
    parser.add_argument("--output", type=float, default=ANSWER, help="mean; default: %(default)s")
    parser.add_argument("--longest", type=int, default=LONGEST, help="default: %(default)s")
    parser.add_argument("--turns", type=float, default=TURNS, help="default: %(default)s; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--tokenizer", help="folder of a model; default: a word is a token")
    given = parser.parse_args(arguments)
    tokenizer = None
    if given.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    sizes = given.prompt, given.output, given.longest, given.turns
    made = make_requests(given.count, *sizes, given.seed, tokenizer)
    if given.file.suffix == ".json":
        given.file.write_text(json.dumps(as_conversations(made)))
    else:
        given.file.write_text("".join(json.dumps(one) + "\n" for one in made))
    print(f"{len(made)} requests in {given.file}")


if __name__ == "__main__":
    main()
