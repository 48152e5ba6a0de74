"""Questions and answers: sessions, needles and tasks."""

import argparse

import pytest
import torch

pytest.importorskip("transformers")

from tests.eval.harness import DIM, TEXT, Tokenizer
from torch_turboquant.config import preset
from torch_turboquant.eval import needle, predict, tasks
from torch_turboquant.eval.caches import Choice
from torch_turboquant.eval.session import Session


def ask(model, parts, most=12, name="none"):
    cache = Choice.parse(name).make(model)
    session = Session(model, Tokenizer(), cache)
    for part in parts:
        session.read(part)
    answer = session.answer(most)
    predict.detach(cache)
    return answer, cache


def test_a_session_is_greedy_generation(model):
    prompt = TEXT[0, :90]
    answer, cache = ask(model, [prompt[:60], prompt[60:89], prompt[89:]])
    assert cache.get_seq_length() == 90 + len(answer)
    expected = prompt.tolist()
    for _ in range(12):
        with torch.no_grad():
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
    assert answer == expected[90:]


def test_a_session_ends(model, monkeypatch):
    answer, _ = ask(model, [TEXT[0, :90]])
    at = next(i for i in range(1, 12) if answer[i] not in answer[:i])
    monkeypatch.setattr(model.generation_config, "eos_token_id", [answer[at]])
    assert ask(model, [TEXT[0, :90]])[0] == answer[:at]
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    newline = answer[at]
    monkeypatch.setattr(
        Tokenizer, "decode", lambda self, ids: "\n" if ids == [newline] else "x" * len(ids)
    )
    assert ask(model, [TEXT[0, :90]])[0] == answer[:at]


class Reader:
    """Stands in for Session: remembers the last `memory` bytes that it read before the question."""

    memory = 10**6

    def __init__(self, model, tokenizer, cache):
        self.parts = []

    def read(self, ids):
        self.parts.append(ids.tolist())

    def answer(self, most):
        return self.parts


def test_needles_are_found_where_they_are(monkeypatch):
    class Bytes(Tokenizer):
        def __call__(self, text, add_special_tokens=True):
            return argparse.Namespace(input_ids=list(text.encode()))

        def decode(self, parts):
            haystack, question = (bytes(part).decode() for part in parts)
            assert question == needle.QUESTION
            lengths.append(len(haystack))
            return haystack[-Reader.memory :]

    lengths = []
    monkeypatch.setattr(needle, "Session", Reader)
    text = "hay " * 300
    found = needle.search(None, Bytes(), text, lambda: None, [200, 1000])
    assert lengths == [200] * 5 + [1000] * 5
    assert found["share"] == 1.0 and found["found"] == [[True] * 5] * 2
    monkeypatch.setattr(Reader, "memory", 600)
    found = needle.search(None, Bytes(), text, lambda: None, [200, 1000])
    assert found["found"] == [[True] * 5, [False, False, True, True, True]]
    assert found["share"] == 0.8 and found["depths"] == [0.0, 0.25, 0.5, 0.75, 1.0]
    with pytest.raises(ValueError, match="a text of 9 tokens has no room for a needle of"):
        needle.search(None, Bytes(), text, lambda: None, [9, 200])
    with pytest.raises(ValueError, match="the needle needs 5000"):
        needle.search(None, Bytes(), text, lambda: None, [5000])


def test_secrets_differ():
    secrets = {needle.number(length, depth) for length in (512, 1024) for depth in needle.DEPTHS}
    assert len(secrets) == 10 and all(len(s) == 5 and s.isdigit() for s in secrets)
    assert needle.number(512, 0.25) == "45190"  # the same in every process


def test_the_tasks():
    work = tasks.prompts()
    assert len(work) == 40 and len(set(work)) == 40
    assert {kind for kind, *_ in work} == {
        "classification",
        "extraction",
        "arithmetic",
        "reasoning",
        "verification",
    }
    for kind in tasks.KINDS:
        assert len(kind.pairs) == tasks.EXAMPLES + 8
        assert len({case for case, _ in kind.pairs}) == len(kind.pairs)
    pairs = {kind.name: kind.pairs for kind in tasks.KINDS}
    assert all(city in sentence for sentence, city in pairs["extraction"])
    for expression, value in pairs["arithmetic"]:
        a, sign, b = expression.split()
        results = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}
        assert results[sign] == int(value)
    assert len(tasks.CONVERSATIONS) >= 5
    assert all(len(questions) == 3 for _, questions in tasks.CONVERSATIONS)
    config = preset("k5v4u", DIM)  # what the answer needs is not in the exact tail
    assert len(tasks.NOTE.split()) > config.sink_tokens + config.recent_window


def test_agreement():
    base = {"prompts": [[i, 1] for i in range(40)], "turns": [[1, 2, 3], [4], [], [5]]}
    found = {"prompts": [list(x) for x in base["prompts"]], "turns": [[1, 2], [4], [], [6]]}
    found["prompts"][0] = [0, 9]
    found["prompts"][39] = [7, 1]
    got = tasks.agreement(Tokenizer(), found, base)
    assert got["first_token"] == 39 / 40 and got["whole_answer"] == 38 / 40
    assert got["kinds"]["classification"] == got["kinds"]["verification"] == 7 / 8
    assert got["kinds"]["arithmetic"] == 1.0
    assert got["turn_first_token"] == 3 / 4 and got["turn_whole_answer"] == 2 / 4
    assert got["right"] == 0.0

    class Right(Tokenizer):
        def decode(self, ids):
            return f" {tasks.prompts()[ids[0]][3].upper()}, I think"

    assert tasks.agreement(Right(), base, base)["right"] == 1.0


def test_answers(model, monkeypatch):
    monkeypatch.setattr(tasks, "KINDS", tasks.KINDS[:2])
    monkeypatch.setattr(tasks, "CONVERSATIONS", tasks.CONVERSATIONS[:1])

    def said(name):
        make = Choice.parse(name).make
        return tasks.answers(model, Tokenizer(), lambda: make(model))

    base = said("none")
    assert len(base["prompts"]) == 16 and len(base["turns"]) == 3
    assert base == said("int16") != said("int2")
    assert base != said("k2v2")
    _, examples, case, _ = tasks.prompts()[0]
    ids = torch.tensor([b % 64 for b in (examples + case).encode()])
    assert ask(model, [ids], tasks.NEW_TOKENS)[0] == base["prompts"][0]
