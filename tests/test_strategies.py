"""The table of strategies: its synthetic tasks, its sizes, its command."""

import argparse
import json
import re
from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from tests.helpers import tiny_llama
from torch_turboquant import eval as evaluation
from torch_turboquant.eval import assets, caches, steps, synthetic
from torch_turboquant.eval.caches import Choice
from torch_turboquant.eval.session import Session
from torch_turboquant.eval.strategies import BITS, SHARES, strategies
from torch_turboquant.eviction import POLICIES
from torch_turboquant.integrations.transformers import TurboQuantCache

TEXT = "".join(f"In the year {n} somebody wrote the letter {chr(97 + n % 26)}. " for n in range(90))


class Words:
    """A tokenizer: every word is a token."""

    def __call__(self, text, return_tensors=None, add_special_tokens=True):
        ids = [1 + sum(word.encode()) % 62 for word in text.split()]
        return argparse.Namespace(input_ids=torch.tensor([ids]) if return_tensors else ids)

    def decode(self, ids):
        return " ".join(str(int(i)) for i in ids)


def made(length=400, samples=2):
    return synthetic.contexts(Words(), TEXT, length, samples)


@pytest.mark.parametrize("length", [300, 3000])
def test_contexts_are_made_from_a_seed(length):
    asked = made(length)
    assert asked == made(length)
    assert len(asked) == 22 and len({context.task for context in asked}) == 11
    assert len({context.text for context in asked}) == 22
    for context in asked:
        tokens = len(context.text.split())
        assert 0.85 * length <= tokens <= 1.1 * length + 20, (context.task, tokens)


@pytest.mark.parametrize("length", [300, 3000])
def test_texts_without_full_stops(length):
    """Chinese, code: one sentence would be longer than what was asked for."""
    text = " ".join(f"word{n}" for n in range(40000))
    for context in synthetic.contexts(Words(), text, length, 1):
        tokens = len(context.text.split())
        assert 0.85 * length <= tokens <= 1.4 * length, (context.task, tokens)


def test_every_answer_is_in_its_context_and_no_question_gives_it_away():
    for context in made():
        first, second = context.questions
        assert first.text != second.text and set(first.expected) != set(second.expected)
        for question in context.questions:
            assert question.expected and question.tokens >= 8
            for expected in question.expected:
                assert re.search(rf"\b{expected}\b", context.text), (context.task, expected)
                if context.task != "fwe":  # whose second question offers two words
                    assert expected not in question.text + question.begin


def values_of(text, key):
    return re.findall(rf"The pass code of the {key} is ([\w-]+)\.", text)


def test_needles_by_hand():
    """What a reader finds who looks the keys up."""
    for context in made():
        if context.task.startswith("niah"):
            for question in context.questions:
                named = re.findall(r"pass codes? of the (.*) in the text", question.text)[0]
                keys = re.split(r", the | and the ", named)
                found = [value for key in keys for value in values_of(context.text, key)]
                assert sorted(found) == sorted(question.expected), context.task
                assert len(keys) == (4 if context.task == "niah_multiquery" else 1)
                assert len(found) == (4 if context.task in MULTIPLE else 1)
    haystack = next(c for c in made(3000) if c.task == "niah_multikey_2").text
    assert len(re.findall("The pass code", haystack)) > 200


MULTIPLE = ("niah_multivalue", "niah_multiquery")


def test_variables_by_hand():
    for context in made():
        if context.task == "vt":
            holds = {}
            for name, value in re.findall(r"Let ([A-Z]+) = (\w+)\.", context.text):
                holds[name] = holds.get(value, value)
            assert len(holds) == 10
            for question in context.questions:
                number = re.findall(r"the value (\d+)", question.text)[0]
                assert {n for n, v in holds.items() if v == number} == set(question.expected)


def test_words_by_hand():
    for context in made(3000):
        if context.task not in ("cwe", "fwe"):
            continue
        words, counts = np.unique(context.text.split(), return_counts=True)
        order = [words[i] for i in np.argsort(-counts, kind="stable")]
        first, second = context.questions
        count = len(first.expected)
        assert set(order[:count]) == set(first.expected)
        ranked = sorted(counts)[::-1]
        assert ranked[count - 1] >= 2 * ranked[count] or context.task == "fwe"
        if context.task == "cwe":
            letters = re.findall(r"begin with (.*)\?", second.text)[0].split(" or ")
            assert set(second.expected) == {w for w in first.expected if w[0] in letters}
        else:
            offered = re.findall(r"text, (\w+) or (\w+)\?", second.text)[0]
            assert max(offered, key=context.text.split().count) == second.expected[0]


def test_scores():
    asked = made(samples=1)
    right = [[", ".join(q.expected).upper() for q in c.questions] for c in asked]
    whole = synthetic.scores(asked, right)
    assert whole == {task: [1.0, 1.0] for task in synthetic.TASKS}
    found = [[first, "nothing"] for first, _ in right]
    found[6][0] = asked[6].questions[0].expected[0]  # one of four values
    scores = synthetic.scores(asked, found)
    assert scores["niah_multivalue"] == [0.25, 0.0] and scores["cwe"] == [1.0, 0.0]
    assert synthetic.relative(scores, whole) == (10.25 / 11, 0.0)
    assert synthetic.relative(whole, scores) == (11 / 10.25, None)


@pytest.mark.parametrize("name", ["none", "k8v8:keep=0.5,evict=keydiff", "int8"])
def test_answers_come_through_the_cache(name):
    """The first forward has the context and the first question, and nothing of the second; without
    a packed cache each answer is that of a conversation of its own."""
    model, asked = tiny_llama(max_position_embeddings=2048), made(samples=1)[:3]
    reads, forward = [], model.forward

    def watch(ids, **options):
        reads.append(tuple(ids.shape))
        return forward(ids, **options)

    model.forward = watch
    found = synthetic.answers(model, Words(), partial(Choice.parse(name).make, model), asked)
    del model.forward
    assert model.config._attn_implementation == "sdpa"
    prompts = [f"Read this text. {c.text} Question: {c.questions[0].text} Answer:" for c in asked]
    longest = max(len(text.split()) for text in prompts)
    assert reads[0] == (3, longest) and set(reads[1:]) == {(3, 1)}
    if name != "none":
        return
    for context, prompt, answers in zip(asked, prompts, found, strict=True):
        session = Session(model, Words(), Choice.parse(name).make(model))
        noise = Words()(" ".join(synthetic.NOISE)).input_ids * longest
        ids = Words()(prompt).input_ids
        ids = [*noise[len(noise) - longest + len(ids) :], *ids]
        for question, answer in zip(context.questions, answers, strict=True):
            session.read(torch.tensor(ids))
            session.read(torch.tensor(Words()(question.begin).input_ids))
            assert Words().decode(session.answer(question.tokens)) == answer
            ids = Words()(f"Question: {context.questions[1].text} Answer:").input_ids


def test_answers_end_with_their_line():
    class Lines(Words):
        def decode(self, ids):
            return super().decode(ids).replace("9", "\n")

    (context,) = made(samples=1)[:1]
    pupil = synthetic.Pupil(Lines(), {5}, context)
    begin = Words()(context.questions[0].begin).input_ids
    assert [pupil.next(7) for _ in begin] == begin  # whatever the model says
    assert [pupil.next(token) for token in (9, 3)] == [9, 3]  # a line is never empty
    rest = Words()(f"Question: {context.questions[1].text} Answer:").input_ids
    rest += Words()(context.questions[1].begin).input_ids
    assert pupil.next(19) == rest[0] and [pupil.next(7) for _ in rest[1:]] == rest[1:]
    assert pupil.next(4) == 4 and not pupil.done
    pupil.next(5)
    assert pupil.done and pupil.answers == [[9, 3], [4]]


def test_sizes_of_what_stays():
    model = tiny_llama(max_position_embeddings=2048)
    ids = torch.randint(1, 60, (1, 200))
    held = {}
    for name in ("k8v8", "k8v8:keep=0.25,evict=random"):
        cache = Choice.parse(name).make(model)
        with torch.no_grad(), cache:
            model(ids, past_key_values=cache)
        held[name] = caches.sizes(cache, model, cache.config.head_dim)
    whole, part = held.values()
    tail = whole["bytes_8k"] - 8192 * whole["bytes_per_token"]
    assert tail > 0 and part["bytes_per_token"] == whole["bytes_per_token"]
    assert part["bytes_8k"] == 2048 * whole["bytes_per_token"] + tail
    assert part["bits_per_value"] == whole["bits_per_value"]


@pytest.mark.parametrize(
    "text, says",
    [
        ("k4v4:keep=half", "write a number"),
        ("k4v4:keep=0", "keep is 0.0, supported: above 0"),
        ("k4v4:keep=2", "keep is 2.0, supported"),
        ("k4v4:keep=0.5,evict=snapkw", "unknown policy 'snapkw'"),
    ],
)
def test_changes_that_are_refused(text, says):
    with pytest.raises(ValueError, match=says):
        Choice.parse(text)


def test_the_strategies():
    names = strategies()
    assert len(set(names)) == len(names)
    chosen = [Choice.parse(name) for name in names]
    assert {c.kind for c in chosen} == {"packed", "control"} and names[: len(BITS)] == list(BITS)
    for policy in POLICIES:
        shares = [c.changes["keep"] for c in chosen if c.changes.get("evict") == policy]
        assert set(SHARES) <= set(shares)
    evicting = [c for c in chosen if "keep" in c.changes]
    assert {c.name for c in evicting} == {"k8v8", "k4v4"}
    model = tiny_llama()
    cache = evicting[0].make(model)
    cache.detach()
    assert isinstance(cache, TurboQuantCache) and cache.sequences.eviction.keep == SHARES[0]


def test_the_command(tmp_path, monkeypatch, capsys):
    model = tiny_llama(max_position_embeddings=2048)
    monkeypatch.setattr(assets, "load_dense", lambda path, device, dtype: (model, Words()))
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text('{"model_type": "llama"}')
    parser = argparse.ArgumentParser()
    evaluation.add_arguments(parser)
    argv = ["--model", str(tmp_path / "tiny"), "--text", str(tmp_path / "text.txt")]
    argv += ["--json", str(tmp_path / "out.json"), "--segments", "1", "--prefill", "200"]
    argv += ["--score-tokens", "40", "--synthetic", "150", "--samples", "1"]
    argv += ["--caches", "k8v8:keep=0.5 fp8"]
    assert evaluation.run(parser.parse_args([*argv, "--gpu", "1GB"])) == 2
    assert "--gpu belongs to --strategies" in capsys.readouterr().err
    argv += ["--strategies"]
    assert evaluation.run(parser.parse_args([*argv, "--gpu", "0.01MiB"])) == 1
    assert "nothing is left for a cache" in capsys.readouterr().err
    assert evaluation.run(parser.parse_args([*argv, "--gpu", "1GB"])) == 0
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if line.startswith(("none", "k", "fp8"))]
    assert [line.split()[0] for line in lines] == ["none", "k8v8:keep=0.5", "fp8"]
    assert "11 synthetic tasks" in text and "behind a context of 200" in re.sub(r"\s+", " ", text)
    found = json.loads((tmp_path / "out.json").read_text())
    free = 1e9 - 2 * sum(parameter.numel() for parameter in model.parameters())
    for line, row in zip(lines, found, strict=True):
        assert line.split()[4].replace(",", "") == str(int(free // row["bytes_8k"]))
        assert row["synthetic"]["length"] == 150 and len(row["synthetic"]["scores"]) == 11
        assert line.split()[1] == f"{16 * row['bytes_8k'] / found[0]['bytes_8k']:.2f}"
    assert evaluation.run(parser.parse_args(argv)) == 0  # nothing is measured again
    assert "fit" not in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text()) == found


def test_what_the_option_stands_for():
    parser = argparse.ArgumentParser()
    evaluation.add_arguments(parser)
    args = parser.parse_args(["--strategies"])
    evaluation.choose_strategies(args)
    assert [choice.text for choice in args.caches] == strategies()
    assert (args.prefill, args.synthetic, args.no_layers) == (2048, 2048, True)
    args = parser.parse_args(["--strategies", "--prefill", "512", "--caches", "k4v4"])
    evaluation.choose_strategies(args)
    assert args.prefill == 512 and [choice.text for choice in args.caches] == ["k4v4"]


def test_times_of_steps(monkeypatch):
    """What is timed is a step of the whole batch, behind what the cache keeps of the context."""
    model, seen = tiny_llama(), []

    def milliseconds(step):
        seen.append(step().shape)
        return float(len(seen))

    monkeypatch.setattr(steps, "milliseconds", milliseconds)
    held = []
    make = TurboQuantCache.for_model

    def for_model(*args, **options):
        held.append(make(*args, **options))
        return held[-1]

    monkeypatch.setattr(TurboQuantCache, "for_model", for_model)
    times = steps.StepTimes(model, sequences=3, context=300)
    names = ["none", "fp8", "k8v8", "k8v8:keep=0.5,evict=random", "k8v8:keep=0.5,evict=keydiff"]
    found = [times.of(Choice.parse(name)) for name in names]
    assert found == [1, None, 2, 3, 3]
    assert set(seen) == {(3, 1, model.config.vocab_size)}
    assert [cache.get_seq_length() for cache in held] == [301, 301]
    assert [cache.sequences.evicted for cache in held] == [[0] * 3, [150] * 3]
    assert model.dtype == torch.float32
