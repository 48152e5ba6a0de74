"""Eviction at the prompt's end: what quality it costs, and what memory and time it saves.

    python benchmarks/bench_eviction.py --model FOLDER --text FILE     quality
    python benchmarks/bench_eviction.py                                on a GPU: size and speed

Quality (eviction_<model>.json). Five sentences with a number each are hidden in every context. The
prompt ends with a question for one of them, which the policy sees: `seen` is the share of these
questions that are answered rightly, token by token. The cache is then asked for the other numbers,
which no policy has seen: `unseen`. `kl` is the divergence of the context's continuation from that
of the uncompressed cache, per token, where the prompt is the context alone. The model reads every
context once; all caches get the same queries, keys and values, and calibrated centers.

Speed (h200_eviction.json). Some layers of Llama-3.1-8B's attention with random weights, 4 bits with
and without tables of levels, 64 prompts of 8,192 tokens: bytes, and the times of the prompt, of a
compiled step, and of attention over one layer. Attention is timed in CUDA graphs that go through
all layers, so that the L2 cache holds none of them; the caches take turns.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import common
import numpy as np
import torch
import transformers
from timing import Call, Contest
from torch import Tensor, nn
from transformers.cache_utils import Cache

from torch_turboquant.batch import AttentionOptions
from torch_turboquant.eval.predict import divergence
from torch_turboquant.eviction import OBSERVED, POLICIES
from torch_turboquant.integrations.transformers import TurboQuantCache
from torch_turboquant.integrations.transformers.models import plain_layers, recording

# ---- quality: contexts and questions

PLACES = "lighthouse", "bakery", "harbour", "library", "windmill"
FACT = " The secret number of the old {} is {}. "
QUESTION = "\n\nQuestion: What is the secret number of the old {0}?\nAnswer: The secret number of "
QUESTION += "the old {0} is"
CONTINUED = 96  # tokens after a context
CALIBRATION = 512
BLOCK = 16  # neighbouring tokens whose mean is one sample of the error

CACHES: list[tuple[str, float, str]] = [("k8v8", 1, "-"), ("k4v4", 1, "-"), ("k2v2", 1, "-")]
CACHES += [("k8v8", keep, policy) for keep in (0.5, 0.25) for policy in POLICIES]
CACHES += [("k4v4", 0.5, policy) for policy in ("snapkv", "keydiff")]

SPEED: list[tuple[str, float, str]] = [
    ("k4v4", 1, "-"),
    *(("k4v4", 0.5, policy) for policy in POLICIES),
    ("k4v4", 0.25, "snapkv"),
    ("k4v4u", 1, "-"),
    ("k4v4u", 0.5, "snapkv"),
]


class Asked(NamedTuple):
    question: Tensor  # int64 [tokens]
    answer: Tensor  # int64 [tokens]


class Context(NamedTuple):
    ids: Tensor  # int64 [tokens], with the facts
    following: Tensor  # int64 [CONTINUED]
    asked: list[Asked]


def make_context(tokenizer: Any, plain_text: Tensor, tokens: int, seed: int) -> Context:
    """The facts, in an order of its own, evenly spread over nine tenths of the context."""

    def ids_of(text: str) -> Tensor:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        return torch.tensor(ids, device=plain_text.device)

    generator = np.random.default_rng(seed)
    numbers = generator.integers(10_000, 100_000, len(PLACES)).tolist()
    pairs = list(zip(PLACES, numbers, strict=True))
    facts = [ids_of(FACT.format(*pair)) for pair in pairs]
    plain, parts, begin = tokens - sum(map(len, facts)), [], 0
    for i, fact in enumerate(generator.permutation(len(facts)).tolist()):
        end = int(plain * 0.9 * (i + 0.5) / len(facts))
        parts += [plain_text[begin:end], facts[fact]]
        begin = end
    ids = torch.cat([*parts, plain_text[begin : plain + CONTINUED]])
    asked = [Asked(ids_of(QUESTION.format(place)), ids_of(f" {n}")) for place, n in pairs]
    return Context(ids[:tokens], ids[tokens:], asked)


# ---- quality: prompts that the model reads once


class Prompt(NamedTuple):
    """What the attention of all layers has got, a tensor for each of them."""

    queries: list[Tensor]  # of the last tokens, [1, heads, n, head_dim]
    keys: list[Tensor]
    values: list[Tensor]
    scalings: list[float | None]


def read(model: nn.Module, ids: Tensor, after: tuple[Cache, Prompt] | None = None) -> Any:
    """An uncompressed cache that has read ids, after what another one has, and its prompt."""
    queries, scalings = {}, {}

    def note(module: Any, query: Tensor, key: Tensor, value: Tensor, options: Any) -> None:
        queries[module.layer_idx] = query[:, :, -OBSERVED:]
        scalings[module.layer_idx] = options["scaling"]

    cache = copy.deepcopy(after[0]) if after else Cache(layers=plain_layers(model))
    with recording(model, note):
        model(ids[None], past_key_values=cache, logits_to_keep=1)
    found = [queries[i] for i in sorted(queries)]
    if after:
        pairs = zip(after[1].queries, found, strict=True)
        found = [torch.cat(pair, 2)[:, :, -OBSERVED:] for pair in pairs]
    layers = [cache.layers[i] for i in sorted(queries)]
    keys, values = [x.keys for x in layers], [x.values for x in layers]
    return cache, Prompt(found, keys, values, [scalings[i] for i in sorted(queries)])


def fill(cache: TurboQuantCache, prompt: Prompt) -> None:
    """Does with the cache what the model's forward of the prompt does. It learns no centers."""
    cache.reset()
    cache.lifecycle.begin(1, prompt.keys[0].shape[2], None, None)
    for layer, query, key, value, scaling in zip(cache.packed, *prompt, strict=True):
        cache.lifecycle.attended(layer, None, query, *layer.update(key, value), scaling)
    cache.lifecycle.end()


def following(model: nn.Module, cache: Any, ids: Tensor) -> Tensor:
    """Logits after each of ids, which the cache then forgets: float32 [tokens, vocabulary]."""
    found = model(ids[None], past_key_values=cache).logits[0].float()
    cache.crop(-len(ids))
    return found


def answers(model: nn.Module, cache: Any, asked: list[Asked], first: int) -> list[bool]:
    """Whether each question is answered rightly; the first one ends what the cache has read."""
    last = asked[first].question[-1:]
    cache.crop(-1)  # to read it again: it predicts the first token of the answer
    order, found = [first, *(i for i in range(len(asked)) if i != first)], {}
    for i in order:
        question, answer = asked[i]
        ids = torch.cat([last if i == first else question, answer[:-1]])
        logits = following(model, cache, ids)
        found[i] = torch.equal(logits[-len(answer) :].argmax(-1), answer)
        if i == first:
            model(torch.cat([last, answer])[None], past_key_values=cache)
    return [found[i] for i in range(len(asked))]


# ---- quality: measuring


class Tally:
    """What one cache has done with all contexts."""

    def __init__(self) -> None:
        self.kl: list[Tensor] = []
        self.seen: list[bool] = []
        self.unseen: list[bool] = []

    def answered(self, right: list[bool], first: int) -> None:
        self.seen.append(right[first])
        self.unseen += right[:first] + right[first + 1 :]

    def row(self) -> common.Row:
        each = torch.cat(self.kl)
        blocks = each.view(-1, BLOCK).mean(1)
        return {
            "kl": each.mean().item(),
            "kl_error": (blocks.std() / len(blocks) ** 0.5).item(),
            "seen": sum(self.seen) / len(self.seen),
            "unseen": sum(self.unseen) / len(self.unseen),
            "questions": len(self.seen) + len(self.unseen),
        }


def choice_name(preset: str, keep: float, policy: str) -> str:
    """As `eval` writes it."""
    return preset if keep == 1 else f"{preset}:keep={keep},evict={policy}"


def quality(model: nn.Module, tokenizer: Any, text: str, arguments: Any) -> list[common.Row]:
    ids = tokenizer(text, return_tensors="pt").input_ids[0].to(model.device)
    calibration, ids = ids[:CALIBRATION], ids[CALIBRATION:]
    centers = TurboQuantCache.calibrate(model, calibration)
    chosen = [c for c in CACHES if not arguments.policies or c[2] in arguments.policies]
    tallies = {choice: Tally() for choice in [("none", 1, "-"), *chosen]}
    sizes: dict[Any, int] = {}
    size = arguments.context + CONTINUED
    for number in range(arguments.contexts):
        context = make_context(tokenizer, ids[number * size :], arguments.context, number)
        whole = read(model, context.ids)
        own = following(model, whole[0], context.following)
        asked = [i % len(PLACES) for i in range(number * 2, number * 2 + arguments.questions)]
        prompts = {i: read(model, context.asked[i].question, whole) for i in asked}
        for choice, tally in tallies.items():
            preset, keep, policy = choice
            if preset == "none":
                tally.kl.append(divergence(own, own)[0])
                for i, (cache, _) in prompts.items():
                    right = answers(model, copy.deepcopy(cache), context.asked, i)
                    tally.answered(right, i)
                continue
            options = {"keep": keep, "evict": policy} if keep < 1 else {}
            with TurboQuantCache.for_model(
                model, preset, center=centers, max_q_len=128, **options
            ) as cache:
                fill(cache, whole[1])
                sizes[choice] = cache.memory_bytes()["pages"]
                tally.kl.append(divergence(own, following(model, cache, context.following))[0])
                for i, (_, prompt) in prompts.items():
                    fill(cache, prompt)
                    tally.answered(answers(model, cache, context.asked, i), i)
            print(number, *choice, tally.row(), flush=True)
    rows = []
    for (preset, keep, policy), tally in tallies.items():
        row = {"choice": choice_name(preset, keep, policy), "cache": preset, "keep": keep}
        row |= {"policy": policy, "context": arguments.context}
        pages = sizes.get((preset, keep, policy), 0)
        rows.append({**row, "bytes": pages, "contexts": arguments.contexts, **tally.row()})
    return rows


# ---- speed


def event_ms(call: Any) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def attention_calls(cache: TurboQuantCache, heads: int) -> list[Call]:
    """Attention of each layer, for one new token of each sequence."""
    first, sequences = cache.packed[0], cache.sequences
    sequences.begin(sequences.batch, 1, None)
    q = torch.randn(
        sequences.batch, heads, first.config.head_dim, dtype=first.dtype, device=first.device
    )
    layers = [(layer.paged, layer.piece(0).batch) for layer in cache.packed]
    return [
        lambda paged=paged, batch=batch: paged.attend(q, batch, AttentionOptions())
        for paged, batch in layers
    ]


def step_ms(model: nn.Module, cache: TurboQuantCache, token: Tensor, runs: int = 20) -> float:
    """Of a compiled step."""
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):
        step(token, past_key_values=cache)
    return event_ms(lambda: [step(token, past_key_values=cache) for _ in range(runs)]) / runs


def speed_row(
    model: nn.Module, ids: Tensor, choice: tuple[str, float, str], others: int
) -> tuple[common.Row, TurboQuantCache]:
    """Everything but attention's time, and the cache, which holds the prompt.

    choice: preset, share of kept tokens and policy. others: bytes of GPU memory that earlier caches
    hold; they do not count.
    """
    (preset, keep, policy), config, (batch, context) = choice, model.config, ids.shape
    layers = config.num_hidden_layers
    options = {"keep": keep, "evict": policy} if keep < 1 else {}
    room = int(context * keep) + 64
    with TurboQuantCache.for_model(
        model, preset, max_batch_size=batch, static=True, max_cache_len=room, **options
    ) as cache:
        model(ids, past_key_values=cache, logits_to_keep=1)
        cache.reset()
        torch.cuda.reset_peak_memory_stats()
        prompt_ms = event_ms(lambda: model(ids, past_key_values=cache, logits_to_keep=1))
        held = cache.memory_bytes()
        values = layers * batch * context * config.num_key_value_heads * 2 * config.head_dim
        row = {
            "cache": preset,
            "keep": keep,
            "policy": policy,
            "sequences": batch,
            "context": context,
            "layers": layers,
            "bytes": held["pages"],
            "tail_bytes": held["tail"],
            "smaller_than_bf16": 2 * values / (held["pages"] + held["tail"]),
            "prompt_ms": prompt_ms,
            "peak_bytes": torch.cuda.max_memory_allocated() - others,
        }
        if policy in ("-", "snapkv"):
            row["step_ms"] = step_ms(model, cache, ids[:, -1:].clone())
            cache.reset()
            model(ids, past_key_values=cache, logits_to_keep=1)
    print({name: x for name, x in row.items() if name not in ("sequences", "layers")}, flush=True)
    return row, cache


def speed(arguments: Any) -> Iterator[common.Row]:
    shape = {**common.LLAMA_8B, "intermediate_size": 1024, "vocab_size": 1024}
    config = transformers.LlamaConfig(**{**shape, "num_hidden_layers": arguments.layers})
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        ids = torch.randint(1024, (arguments.sequences, arguments.context))
    rows, calls, before = {}, {}, torch.cuda.memory_allocated()
    for choice in SPEED:
        others = torch.cuda.memory_allocated() - before
        name = choice_name(*choice)
        rows[name], cache = speed_row(model, ids, choice, others)
        calls[name] = attention_calls(cache, config.num_attention_heads)
        torch.cuda.empty_cache()
    for name, (milliseconds, _) in Contest(0.2).medians(calls).items():
        print(f"{name}: {1e3 * milliseconds:.1f} us")
        yield {**rows[name], "attention_ms": milliseconds}


@torch.no_grad()
def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--model", type=Path, metavar="FOLDER", help="measures its quality")
    options.add_argument("--text", type=Path, metavar="FILE", help="that contexts are made of")
    options.add_argument("--contexts", type=int, default=3, help="default: 3")
    options.add_argument("--questions", type=int, default=2, help="seen, of a context (default: 2)")
    options.add_argument("--policies", nargs="+", help="measures caches with these again; -: none")
    options.add_argument("--context", type=int, help="tokens (default: 2048, of speed 8192)")
    options.add_argument("--sequences", type=int, default=64, help="of speed (default: 64)")
    options.add_argument("--layers", type=int, default=4, help="of speed (default: 4)")
    arguments = options.parse_args()
    if arguments.model is None:
        if torch.device(arguments.device).type != "cuda":
            print("bench_eviction.py needs a CUDA device, or --model and --text")
            return
        arguments.context = arguments.context or 8192
        common.write_rows("h200_eviction", list(speed(arguments)), arguments)
        return
    if arguments.text is None:
        options.error("--model needs --text")
    arguments.context = arguments.context or 2048
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    model = model.to(arguments.device).eval()
    text = arguments.text.read_text(encoding="utf-8")
    name = common.file_name("eviction", arguments.model.name)
    rows = quality(model, tokenizer, text, arguments)
    order = [choice_name(*choice) for choice in [("none", 1, "-"), *CACHES]]
    common.write_progress(name, rows, "choice", arguments, order)


if __name__ == "__main__":
    main()
