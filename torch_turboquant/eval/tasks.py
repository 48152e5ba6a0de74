"""Short tasks, answered greedily: how many answers through a cache equal the uncompressed ones.

There are forty prompts of five kinds, and conversations of three turns. The mean divergence of
single tokens can hide a drift that generation shows; here, one different token makes a different
answer. Every prompt has worked examples and one case; every conversation is about a passage. A note
stands between the examples or the passage and the question. It is longer than the default
exact window of a packed cache, so that examples and passages are read from codes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm
from transformers.cache_utils import Cache

from torch_turboquant.eval.predict import detach
from torch_turboquant.eval.session import Session, tokens_of

NEW_TOKENS = 16
CHAT_TOKENS = 32


class Kind(NamedTuple):
    """A kind of task: an instruction and (case, answer) pairs, EXAMPLES of them shown solved."""

    name: str
    instruction: str
    pairs: tuple[tuple[str, str], ...]


EXAMPLES = 6

NOTE = (
    "A note before the next question: please read it slowly, think about what was said above, and "
    "then give a short answer in the same form. There is no need to explain how the answer was "
    "found, to repeat the question, or to add anything that was not asked for. If two answers seem "
    "possible, choose the one that fits best and do not mention the other. Take your time; "
    "nobody is waiting. What follows is the next question of this list.\n\n"
)

KINDS = (
    Kind(
        "classification",
        "Say for every review whether it is positive or negative.",
        (
            ("The soup was cold and the waiter forgot our drinks twice.", "negative"),
            ("A charming little film with a lot of heart; we laughed all evening.", "positive"),
            ("The battery died after two days and nobody answered my letters.", "negative"),
            ("Comfortable shoes, quick delivery, and they look wonderful.", "positive"),
            ("I would stay in this hotel again, the view alone is worth it.", "positive"),
            ("The second half drags on and the ending makes no sense.", "negative"),
            ("The kettle leaks and the handle gets too hot to touch.", "negative"),
            ("Our guide was funny, patient and knew every stone of the old town.", "positive"),
            ("It broke on the first morning.", "negative"),
            ("The best bread I have eaten in years, still warm.", "positive"),
            ("What a waste of a sunny afternoon.", "negative"),
            ("The staff went out of their way to help us with the children.", "positive"),
            ("Noisy rooms, thin walls, and a bathroom that smelled of paint.", "negative"),
            ("I finished the book in one night and started again at once.", "positive"),
        ),
    ),
    Kind(
        "extraction",
        "Name the city that every sentence speaks of.",
        (
            ("Maria moved to Lisbon in the spring to study music.", "Lisbon"),
            ("The train from the coast reaches Vienna shortly after noon.", "Vienna"),
            ("In 1903 the brothers opened a small bakery in Chicago.", "Chicago"),
            ("Heavy rain closed the airport of Mumbai for most of Tuesday.", "Mumbai"),
            ("The museum in Cairo will show the painted masks until June.", "Cairo"),
            ("He wrote his letters from a quiet street in Prague.", "Prague"),
            ("The next congress of engineers will be held in Toronto.", "Toronto"),
            ("Two bridges were built in Budapest in that decade.", "Budapest"),
            ("The fish market of Tokyo opens long before sunrise.", "Tokyo"),
            ("After the war she taught chemistry in Edinburgh.", "Edinburgh"),
            ("The football team from Madrid won the final.", "Madrid"),
            ("A fire destroyed large parts of London in 1666.", "London"),
            ("The concert in Nairobi was sold out within an hour.", "Nairobi"),
            ("Fishermen from Bergen sold their catch on the quay.", "Bergen"),
        ),
    ),
    Kind(
        "arithmetic",
        "Work out every sum.",
        (
            ("12 + 7", "19"),
            ("30 - 4", "26"),
            ("6 * 5", "30"),
            ("45 + 45", "90"),
            ("81 - 11", "70"),
            ("3 * 9", "27"),
            ("14 + 5", "19"),
            ("50 - 20", "30"),
            ("7 * 8", "56"),
            ("23 + 42", "65"),
            ("99 - 33", "66"),
            ("4 * 12", "48"),
            ("60 + 17", "77"),
            ("18 - 9", "9"),
        ),
    ),
    Kind(
        "reasoning",
        "Answer every question with one name.",
        (
            ("Anna is taller than Ben. Ben is taller than Carl. Who is the tallest?", "Anna"),
            ("Dora runs faster than Emil. Emil runs faster than Finn. Who is the slowest?", "Finn"),
            ("Greta is older than Hugo. Hugo is older than Ida. Who is the youngest?", "Ida"),
            ("Jan has more books than Kim. Kim has more books than Leo. Who has most?", "Jan"),
            ("Mia arrived before Nils. Nils arrived before Olga. Who was first?", "Mia"),
            ("Paul is heavier than Rosa. Rosa is heavier than Sam. Who is the lightest?", "Sam"),
            ("Tina is taller than Udo. Udo is taller than Vera. Who is the tallest?", "Tina"),
            ("Will runs faster than Xena. Xena runs faster than Yves. Who is slowest?", "Yves"),
            ("Zoe is older than Adam. Adam is older than Beth. Who is the youngest?", "Beth"),
            ("Cora has more coins than Dirk. Dirk has more coins than Eva. Who has most?", "Cora"),
            ("Fritz arrived before Gina. Gina arrived before Hans. Who was first?", "Fritz"),
            ("Inga is heavier than Jens. Jens is heavier than Kara. Who is lightest?", "Kara"),
            ("Lars is taller than Mona. Mona is taller than Nora. Who is the tallest?", "Lars"),
            ("Otto came home after Pia. Pia came home after Ralf. Who came home first?", "Ralf"),
        ),
    ),
    Kind(
        "verification",
        "Say whether every statement is true or false.",
        (
            ("A week has seven days.", "true"),
            ("Ice is hotter than steam.", "false"),
            ("Fish live in water.", "true"),
            ("The sun rises in the west.", "false"),
            ("A triangle has three sides.", "true"),
            ("Birds have four legs.", "false"),
            ("Paris is the capital of France.", "true"),
            ("A minute has one hundred seconds.", "false"),
            ("Elephants are smaller than mice.", "false"),
            ("Snow is cold.", "true"),
            ("The moon is made of cheese.", "false"),
            ("Water boils when it gets hot enough.", "true"),
            ("Trees have leaves or needles.", "true"),
            ("Ten is less than two.", "false"),
        ),
    ),
)

CONVERSATIONS = (
    (
        "The ferry to the island leaves the harbour at eight in the morning and comes back at six. "
        "It carries forty passengers and six cars. On Sundays it does not run, and in winter only "
        "on Mondays and Fridays. A ticket costs nine euros; children under six travel free. The "
        "captain, Mr. Holm, has sailed this route for twenty years and knows every rock. In storms "
        "he waits in the bay behind the lighthouse until the wind turns.",
        ("When does the ferry leave?", "Who is the captain?", "What does a ticket cost?"),
    ),
    (
        "In the valley of the Ems lies a village with a mill, a school and an old stone church. "
        "The mill was built in 1752 by Jakob Brandt and grinds rye until today. The school has "
        "thirty pupils and one teacher, Miss Weber, who also plays the organ. Every autumn the "
        "village celebrates the harvest with a market, where honey, apples and baskets are sold. "
        "The river floods the lower road nearly every spring.",
        ("Who built the mill?", "How many pupils has the school?", "What does the market sell?"),
    ),
    (
        "A young botanist named Clara Lindt spent three summers in the mountains to count flowers. "
        "She walked the same path every week and wrote down the species on both sides. In the "
        "first summer she found one hundred and four, in the third only ninety. She believes that "
        "the new reservoir, which keeps the soil dry, is the reason. Her report was printed in a "
        "journal and read by the mayor, who asked her to speak to the council.",
        ("What did Clara count?", "How many summers did she spend there?", "Who read her report?"),
    ),
    (
        "The library on Station Road has two floors. Novels and children's books are on the ground "
        "floor, maps and newspapers upstairs. Books may be kept for four weeks, films for one. "
        "Late books cost ten cents a day. On Wednesdays a storyteller visits in the afternoon, and "
        "on Saturdays a retired engineer helps people to repair radios and clocks. The reading "
        "room has a glass roof, and plants that were given by the botanical garden.",
        ("Where are the maps?", "How long may books be kept?", "What happens on Saturdays?"),
    ),
    (
        "Our company makes bicycles for people who carry things: bakers, postmen and parents. The "
        "frame is steel, the box in front is made of birch. An electric motor helps up to a speed "
        "of twenty-five kilometres an hour, and its battery lasts for a day. We build eleven "
        "bicycles a week in a former brewery in Leeds. The founder, Priya Nair, was a nurse before "
        "she learned to weld. Next year a second workshop will open in Bristol.",
        ("What is the frame made of?", "Who founded the company?", "Where will they open next?"),
    ),
)


def prompts() -> list[tuple[str, str, str, str]]:
    """(kind, examples, case, answer) of every prompt; examples and case make the prompt."""
    out = []
    for kind in KINDS:
        shown = "".join(f"Question: {c}\nAnswer: {a}\n\n" for c, a in kind.pairs[:EXAMPLES])
        for case, answer in kind.pairs[EXAMPLES:]:
            examples = f"{kind.instruction}\n\n{shown}{NOTE}"
            out.append((kind.name, examples, f"Question: {case}\nAnswer:", answer))
    return out


def version() -> str:
    """A name of the texts, which changes with them: answers to other texts cannot be compared."""
    texts = json.dumps([prompts(), CONVERSATIONS, NEW_TOKENS, CHAT_TOKENS])
    return hashlib.sha256(texts.encode()).hexdigest()[:16]


def answers(
    model: Any, tokenizer: Any, make: Callable[[], Cache], title: str = ""
) -> dict[str, list[list[int]]]:
    """Greedy tokens of every prompt ("prompts") and of every turn of every chat ("turns").

    In a chat every cache continues from its own answers.
    """
    out: dict[str, list[list[int]]] = {"prompts": [], "turns": []}
    work = prompts()
    bar = tqdm(total=len(work) + len(CONVERSATIONS), desc=f"{title} tasks", leave=False)
    for _, examples, case, _ in work:
        cache = make()
        try:
            session = Session(model, tokenizer, cache)
            session.read(tokens_of(tokenizer, examples, first=True))
            session.read(tokens_of(tokenizer, case))
            out["prompts"].append(session.answer(NEW_TOKENS))
        finally:
            detach(cache)
        bar.update()
    for passage, questions in CONVERSATIONS:
        cache = make()
        try:
            session = Session(model, tokenizer, cache)
            session.read(
                tokens_of(tokenizer, f"Read this text.\n\n{passage}\n\n{NOTE}", first=True)
            )
            for question in questions:
                session.read(tokens_of(tokenizer, f"User: {question}\nAssistant:"))
                out["turns"].append(session.answer(CHAT_TOKENS))
                session.read(tokens_of(tokenizer, "\n"))
        finally:
            detach(cache)
        bar.update()
    bar.close()
    return out


def agreement(
    tokenizer: Any, found: dict[str, list[list[int]]], base: dict[str, list[list[int]]]
) -> dict[str, Any]:
    """Shares, 0 to 1, of answers that equal those of `base`, the uncompressed ones.

    Returns:
        first_token, whole_answer: the shares of prompts. kinds: whole_answer of each kind of
        prompt. turn_first_token, turn_whole_answer: the shares of turns. right: the share of
        prompts whose answer begins with the expected one.
    """

    def shares(a: Sequence[list[int]], b: Sequence[list[int]]) -> tuple[float, float]:
        pairs = list(zip(a, b, strict=True))
        first = sum(x[:1] == y[:1] for x, y in pairs) / len(pairs)
        return first, sum(x == y for x, y in pairs) / len(pairs)

    first, whole = shares(found["prompts"], base["prompts"])
    turn_first, turn_whole = shares(found["turns"], base["turns"])
    work = prompts()
    kinds = {}
    for kind in KINDS:
        at = [i for i, prompt in enumerate(work) if prompt[0] == kind.name]
        kinds[kind.name] = shares(
            [found["prompts"][i] for i in at], [base["prompts"][i] for i in at]
        )[1]
    right = [
        tokenizer.decode(tokens).strip().lower().startswith(answer.lower())
        for tokens, (*_, answer) in zip(found["prompts"], work, strict=True)
    ]
    return {
        "first_token": first,
        "whole_answer": whole,
        "kinds": kinds,
        "turn_first_token": turn_first,
        "turn_whole_answer": turn_whole,
        "right": sum(right) / len(right),
    }
