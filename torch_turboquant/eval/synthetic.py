"""Long synthetic contexts, made from a seed, each with two questions: eleven of RULER's tasks.

RULER (arXiv:2404.06654) asks for facts hidden in a long context (needles), for the value that a
chain of variables carries, and for the words that are most common. Its two tasks over data sets of
questions are left out, because they need downloads. The tasks are made anew here, with sentences
and words of this file; haystacks are noise, the sentences of a given text, or more needles.

Every context has two questions. The first one follows it in the same forward, as a prompt does, so
that a policy which evicts tokens by the last queries sees it. The second one comes when the first
is answered: nobody has seen it when tokens left. An answer begins with a few given words, in
forwards of their own, so that it is read from the cache and not from the exact first forward.

A score is the share of the expected strings that are in the answer, as in RULER.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers.cache_utils import Cache

from torch_turboquant.eval.predict import detach
from torch_turboquant.eval.session import ends_of, tokens_of
from torch_turboquant.integrations.transformers.models import with_cache

VERSION = 2  # of texts and answers: scores of different ones cannot be compared
TOGETHER = 33  # contexts that are asked at once: three of each task


class Question(NamedTuple):
    """A question, the words that its answer begins with, and what the rest of it has to hold."""

    text: str
    begin: str
    expected: tuple[str, ...]
    tokens: int  # of the answer at most


class Context(NamedTuple):
    """A long text; the first question is part of the prompt, the second one comes later."""

    task: str
    text: str
    questions: tuple[Question, Question]


NOISE = (
    "The wind moved over the field.",
    "A door was open and nobody came in.",
    "The road went on as before.",
    "It was quiet, and then it was quiet again.",
    "Some leaves fell beside the wall.",
)
COLORS = "amber azure beige black bronze brown coral green ivory olive orange purple white".split()
THINGS = (
    "anchor apple arrow basket bell bottle bridge candle carpet castle chair clock cloud drum "
    "engine fence flute forest garden glove hammer harbor helmet island kettle ladder lamp lemon "
    "letter mirror needle orchard paddle pencil pillow rocket saddle spoon statue tower trumpet "
    "tunnel violin wagon window"
).split()
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"

# ---- pieces


def _number(rng: np.random.Generator) -> str:
    return str(rng.integers(1_000_000, 10_000_000))


def _long_id(rng: np.random.Generator) -> str:
    digits = "".join(rng.choice(list("0123456789abcdef"), 20))
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:]))


def _keys(rng: np.random.Generator) -> Iterator[str]:
    """Different names such as "amber anchor" in a random order, then "amber anchor 2", no end."""
    pairs = [f"{color} {thing}" for thing in THINGS for color in COLORS]
    shuffled = [pairs[i] for i in rng.permutation(len(pairs))]
    yield from shuffled
    for number in itertools.count(2):
        yield from (f"{pair} {number}" for pair in shuffled)


def _needle(key: str, value: str) -> str:
    return f"The pass code of the {key} is {value}."


def _ask(keys: Sequence[str], values: Sequence[str], tokens: int) -> Question:
    """For the values of these keys."""
    named = " and the ".join(keys) if len(keys) < 3 else ", the ".join(keys)
    several = len(values) > 1
    codes, are = ("pass codes", "are") if several else ("pass code", "is")
    return Question(
        f"What {are} the {codes} of the {named} in the text above?",
        f"The {codes} of the {named} {are}",
        tuple(values),
        tokens * len(values),
    )


class Makers:
    """Makes contexts of about `length` tokens; `sentences` are the essay that facts hide in."""

    def __init__(self, count: Callable[[str], int], sentences: Sequence[str], length: int) -> None:
        self.count, self.sentences, self.length = count, sentences, length

    def make(self, task: str, sample: int) -> Context:
        """One context of a task; the same every time."""
        seed = zlib.crc32(f"{task} {self.length} {sample}".encode())
        text, questions = TASKS[task](self, np.random.default_rng(seed))
        return Context(task, text, questions)

    def fill(
        self, rng: np.random.Generator, facts: Sequence[str], hay: Callable[[int], str]
    ) -> str:
        """The facts in their order, at random places among so much hay that the length is met."""
        room = self.length - sum(self.count(" " + fact) for fact in facts)
        pieces: list[str] = []
        while room > 0:
            pieces.append(hay(len(pieces)))
            room -= self.count(" " + pieces[-1])
        places = np.sort(rng.integers(0, len(pieces) + 1, len(facts)))
        for place, fact in reversed(list(zip(places, facts, strict=True))):
            pieces.insert(place, fact)
        return " ".join(pieces)

    def essay(self, rng: np.random.Generator) -> Callable[[int], str]:
        """The sentences of the text from a random one on, round and round."""
        start = int(rng.integers(len(self.sentences)))
        return lambda i: self.sentences[(start + i) % len(self.sentences)]


Made = tuple[str, tuple[Question, Question]]


# ---- the tasks


def _needles(
    hay: str, value: Callable[[np.random.Generator], str] = _number, others: int = 0, asked: int = 1
) -> Callable[[Makers, np.random.Generator], Made]:
    """Needles in a haystack of this kind: `asked` for each question, and `others` for none."""

    def make(makers: Makers, rng: np.random.Generator) -> Made:
        names = _keys(rng)
        keys = list(itertools.islice(names, 2 * asked + others))
        values = [value(rng) for _ in keys]
        facts = [_needle(key, value) for key, value in zip(keys, values, strict=True)]
        pieces = {
            "noise": lambda i: NOISE[i % len(NOISE)],
            "essay": makers.essay(rng),
            "needles": lambda i: _needle(next(names), value(rng)),
        }
        text = makers.fill(rng, [facts[i] for i in rng.permutation(len(facts))], pieces[hay])
        tokens = 12 if value is _number else 32
        first, second = (slice(i * asked, (i + 1) * asked) for i in range(2))
        return text, (
            _ask(keys[first], values[first], tokens),
            _ask(keys[second], values[second], tokens),
        )

    return make


def _multivalue(makers: Makers, rng: np.random.Generator) -> Made:
    """Two keys with four values each."""
    keys = list(itertools.islice(_keys(rng), 2))
    values = [[_number(rng) for _ in range(4)] for _ in keys]
    facts = [_needle(k, v) for k, vs in zip(keys, values, strict=True) for v in vs]
    text = makers.fill(rng, [facts[i] for i in rng.permutation(len(facts))], makers.essay(rng))
    questions = [_ask([key], each, 12) for key, each in zip(keys, values, strict=True)]
    return text, (questions[0], questions[1])


def _tracing(makers: Makers, rng: np.random.Generator) -> Made:
    """Two chains of variables: which ones carry a number?"""
    names = _coded_words(rng, 10, 5)
    chains, numbers = (names[:5], names[5:]), [str(rng.integers(10_000, 100_000)) for _ in "ab"]
    facts = []
    for step in range(5):
        for chain, number in zip(chains, numbers, strict=True):
            value = chain[step - 1].upper() if step else number
            facts.append(f"Let {chain[step].upper()} = {value}.")
    text = makers.fill(rng, facts, lambda i: NOISE[i % len(NOISE)])
    first, second = (
        Question(
            f"Which five variables have the value {number} in the text above?",
            f"The variables with the value {number} are",
            tuple(name.upper() for name in chain),
            40,
        )
        for chain, number in zip(chains, numbers, strict=True)
    )
    return text, (first, second)


def _coded_words(rng: np.random.Generator, count: int, letters: int) -> list[str]:
    """Different words that mean nothing."""
    found: dict[str, None] = {}
    while len(found) < count:
        pairs = [(rng.choice(list(CONSONANTS)), rng.choice(list(VOWELS))) for _ in range(letters)]
        found["".join(map("".join, pairs))[:letters]] = None
    return list(found)


def _common_words(makers: Makers, rng: np.random.Generator) -> Made:
    """A list of words, ten of which come ten times as often as the others."""
    words = COLORS + THINGS
    common = [words[i] for i in rng.permutation(len(words))[:10]]
    rare = [word for word in words if word not in common] + _coded_words(rng, 400, 6)
    used: list[str] = []
    while makers.count(" ".join(used)) < makers.length - 20:
        i = len(used) // 80  # a round: each common word five times, thirty others once
        used += [*common * 5, *(rare[(30 * i + j) % len(rare)] for j in range(30))]
    listed = " ".join(used[j] for j in rng.permutation(len(used)))
    letters = sorted({word[0] for word in common})
    letters = letters[: max(1, len(letters) // 2)]
    return listed, (
        Question(
            "Which ten words are most common in the list above?",
            "The ten most common words are",
            tuple(common),
            50,
        ),
        Question(
            f"Which of the ten most common words begin with {' or '.join(letters)}?",
            "The common words that begin so are",
            tuple(word for word in common if word[0] in letters),
            30,
        ),
    )


def _frequent_words(makers: Makers, rng: np.random.Generator) -> Made:
    """Coded words whose frequencies fall as those of words in a language do."""
    words = _coded_words(rng, 200, 6)
    total = max(40, makers.length // makers.count(" " + words[0]))
    shares = np.arange(1, len(words) + 1, dtype=float) ** -2.0
    counts = np.maximum(1, (total * shares / shares.sum()).astype(int))
    used = [word for word, n in zip(words, counts, strict=True) for _ in range(n)]
    while makers.count(" ".join(used)) > makers.length and len(used) > 40:
        used = used[: -len(used) // 20]  # the rarest words
    listed = " ".join(used[i] for i in rng.permutation(len(used)))
    return listed, (
        Question(
            "Which three words are most frequent in the coded text above?",
            "The three most frequent words are",
            tuple(words[:3]),
            30,
        ),
        Question(
            f"Which word is more frequent in the coded text, {words[30]} or {words[1]}?",
            "The more frequent one is",
            (words[1],),
            8,
        ),
    )


TASKS: dict[str, Callable[[Makers, np.random.Generator], Made]] = {
    "niah_single_1": _needles("noise"),
    "niah_single_2": _needles("essay"),
    "niah_single_3": _needles("essay", _long_id),
    "niah_multikey_1": _needles("essay", others=2),
    "niah_multikey_2": _needles("needles"),
    "niah_multikey_3": _needles("needles", _long_id),
    "niah_multivalue": _multivalue,
    "niah_multiquery": _needles("essay", asked=4),
    "vt": _tracing,
    "cwe": _common_words,
    "fwe": _frequent_words,
}
"""By the names that RULER gives them."""


def _pieces(sentence: str, count: Callable[[str], int], most: int) -> Iterator[str]:
    """The sentence, in parts of about `most` tokens if it has more."""
    if len(sentence.encode()) <= most or (tokens := count(sentence)) <= most:
        yield sentence
        return
    step = max(1, len(sentence) * most // tokens)
    for i in range(0, len(sentence), step):
        yield sentence[i : i + step]


def contexts(tokenizer: Any, text: str, length: int, samples: int) -> list[Context]:
    """All tasks: `samples` contexts of about `length` tokens each.

    text: its sentences are the essays.
    """
    sentences = [part.strip() + "." for part in text.replace("\n", " ").split(". ") if part.strip()]

    def count(piece: str) -> int:
        return len(tokens_of(tokenizer, piece))

    # Texts without full stops, such as Chinese or code, would be one sentence.
    most = max(16, length // 4)
    sentences = [piece for sentence in sentences for piece in _pieces(sentence, count, most)]
    makers = Makers(count, sentences, length)
    return [makers.make(task, sample) for task in TASKS for sample in range(samples)]


# ---- answers and scores


class Pupil:
    """One context: what is still to be read, and the answers so far.

    `next` takes the model's likeliest token and returns the one that the model reads then.
    """

    def __init__(self, tokenizer: Any, ends: set[int], context: Context) -> None:
        self.tokenizer, self.ends = tokenizer, ends
        self.questions = iter(context.questions)
        self.first = _asked(context.questions[0], f"Read this text.\n\n{context.text}")
        self.answers: list[list[int]] = []
        self._go_on(new=False)

    def _go_on(self, new: bool) -> None:
        """To the next question, or to the end."""
        self.question = next(self.questions, None)
        self.given: list[int] = []  # to be read before the answer goes on
        if self.question is not None:
            text = _asked(self.question) if new else ""
            self.given = [*self._ids(text), *self._ids(f" {self.question.begin}")]
            self.answers.append([])

    def _ids(self, text: str) -> list[int]:
        return tokens_of(self.tokenizer, text).tolist() if text else []

    @property
    def done(self) -> bool:
        return self.question is None

    def next(self, likeliest: int) -> int:
        if not self.given and self.question is not None:
            answer = self.answers[-1]
            ended = likeliest in self.ends or len(answer) == self.question.tokens
            if ended or (answer and "\n" in self.tokenizer.decode([likeliest])):
                self._go_on(new=True)
            else:
                answer.append(likeliest)
                return likeliest
        return self.given.pop(0) if self.given else likeliest


def _asked(question: Question, before: str = "") -> str:
    return f"{before}\n\nQuestion: {question.text}\nAnswer:"


def answers(
    model: Any,
    tokenizer: Any,
    make: Callable[..., Cache],
    asked: Sequence[Context],
    title: str = "",
) -> list[list[str]]:
    """The model's greedy answers to both questions of every context.

    Up to TOGETHER contexts share a cache, a sequence each. Every text begins with as much noise as
    it takes to make all of them equally long: padding would be in the way of other caches.

    Args:
        make: makes an empty cache for `max_batch_size` sequences.
    """
    found: list[list[str]] = []
    for begin in tqdm(range(0, len(asked), TOGETHER), desc=f"{title} synthetic", leave=False):
        group = asked[begin : begin + TOGETHER]
        cache = make(max_batch_size=len(group))
        try:
            found += _answers(model, tokenizer, cache, group)
        finally:
            detach(cache)
    return found


@torch.no_grad()
def _answers(model: Any, tokenizer: Any, cache: Cache, asked: Sequence[Context]) -> list[list[str]]:
    ends = ends_of(model)
    pupils = [Pupil(tokenizer, ends, context) for context in asked]
    ids = equally_long(tokenizer, [pupil.first for pupil in pupils])
    while True:
        logits = model(ids.to(model.device), **with_cache(model, cache), logits_to_keep=1).logits
        likeliest = logits[:, -1].argmax(-1).tolist()
        column = [pupil.next(token) for pupil, token in zip(pupils, likeliest, strict=True)]
        if all(pupil.done for pupil in pupils):
            return [[tokenizer.decode(answer) for answer in pupil.answers] for pupil in pupils]
        ids = torch.tensor(column)[:, None]


def equally_long(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Tokens of texts, each behind so much noise that all are as long as the longest: int64."""
    before = len(tokens_of(tokenizer, "", first=True))
    found = [tokens_of(tokenizer, text, first=True) for text in texts]
    longest = max(map(len, found))
    least = min(map(len, found))
    noise, count = tokens_of(tokenizer, " ".join(NOISE)), longest - least
    noise = noise.repeat(-(-count // len(noise)))
    filled = [
        torch.cat([ids[:before], noise[len(noise) - (longest - len(ids)) :], ids[before:]])
        for ids in found
    ]
    return torch.stack(filled)


def scores(asked: Sequence[Context], found: Sequence[Sequence[str]]) -> dict[str, list[float]]:
    """Of every task, the mean scores of first and second questions, 0 to 1."""
    by_task: dict[str, list[list[float]]] = {}
    for context, given in zip(asked, found, strict=True):
        shares = [
            float(np.mean([text.lower() in answer.lower() for text in question.expected]))
            for question, answer in zip(context.questions, given, strict=True)
        ]
        by_task.setdefault(context.task, []).append(shares)
    return {task: np.mean(shares, axis=0).tolist() for task, shares in by_task.items()}


def relative(
    found: dict[str, list[float]], base: dict[str, list[float]]
) -> tuple[float | None, float | None]:
    """Scores of first and second questions over those of the uncompressed cache, tasks together.

    None where the uncompressed cache scores nothing.
    """
    sums = [[sum(part[i] for part in each.values()) for each in (found, base)] for i in (0, 1)]
    mine = [score / whole if whole else None for score, whole in sums]
    return mine[0], mine[1]
