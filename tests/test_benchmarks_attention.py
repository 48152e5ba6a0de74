"""bench_attention.py with tiny sizes on the CPU: its rows, the check of each, what times mean."""

import inspect
import json
import sys
from dataclasses import replace

import pytest
import torch

import torch_turboquant as tq
from tests.benchmark_runs import run
from tests.helpers import ROOT, load_script


def test_attention_without_a_gpu(monkeypatch, capsys):
    assert run(monkeypatch, "bench_attention.py", "--device", "cpu") is None
    assert "needs a CUDA device" in capsys.readouterr().out


@pytest.fixture
def attention(monkeypatch):
    """bench_attention.py on the CPU, with one cache per contender."""
    bench = load_script("benchmarks/bench_attention.py")
    for module in (bench, bench.timing, bench.contenders, sys.modules["batches"]):
        monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(bench.timing, "ROTATED_BYTES", 0)
    monkeypatch.setattr(sys.modules["attention_batches"], "SHORT", bench.Shape(1, 96))  # of uniform
    return bench


def tiny_rows(bench, cases):
    """What a run with tiny sizes writes: rows, and what failed. Everything runs, once."""

    class Once(bench.Contest):
        def turns(self, graphs):
            return dict.fromkeys(graphs, 1)

    cases = [replace(case, shape=case.shape.tiny()) for case in cases]
    with torch.no_grad():
        run = bench.Bench(Once(0.0), 1.0, None)
        rows = [row for some in run.all_rows(cases, with_us=True) for row in some]
    return rows, run.failed


def some_cases(bench, table):
    """The first case of every batch of a table, one with a tail and, where it can run, with own."""
    cases = [case for case in bench.ALL if case.table == table]
    if table in ("steps", "rows"):
        cases = cases[:1] + cases[-1:]
    chosen = {case.shape: case for case in reversed(cases)}.values()
    chosen = [*chosen, *[case for case in cases if case.tail and not case.own][:1]]
    if "k_new" in inspect.signature(tq.paged_attention).parameters:
        chosen += [case for case in cases if case.own and case.tail]
        chosen += [case for case in cases if case.own][:1]
    return sorted(set(chosen), key=bench.ALL.index)


def test_every_row_of_attention_has_a_name_of_its_own(attention):
    names = [str(case) for case in attention.ALL]
    assert len(set(names)) == len(names)
    file = json.loads((ROOT / "benchmarks" / "results" / "h200_attention.json").read_text())
    assert {row["row"] for row in file} <= set(names)  # those of former runs are replaced


def test_rows_of_attention_are_chosen_by_table_or_name(attention):
    mixed = attention.chosen(attention.ALL, "mixed")
    assert mixed and {case.table for case in mixed} == {"mixed"}
    named = attention.chosen(attention.ALL, "^k4v4 .* q_len 8 ")
    assert named and all(str(case).startswith("k4v4 ") for case in named)
    assert {case.shape.q_len for case in named} == {8}
    assert attention.chosen(attention.ALL, "") == list(attention.ALL)


def test_batches_have_as_many_query_rows_as_they_should(attention):
    shapes = {case.shape for case in attention.ALL if case.table == "rows"}
    rows = {s.q_len * s.q_heads // s.kv_heads for s in shapes}
    assert {4, 8, 16, 20, 21, 32, 40, 48, 56, 64, 71, 96, 128} == rows
    groups = {s.q_heads // s.kv_heads for s in shapes}
    assert {4, 5, 7, 8, 12, 16, 48, 71} == groups


@pytest.mark.parametrize("table", ["steps", "rows", "mixed", "prompts", "ragged", "cold", "dims"])
def test_every_table_of_attention(attention, monkeypatch, table):
    """With tiny sizes, and as a table of the documents."""
    cases = some_cases(attention, table)
    rows, failed = tiny_rows(attention, cases)
    assert not failed and [row["preset"] for row in rows] == [case.preset for case in cases]
    assert {row["table"] for row in rows} == {table}
    assert all(row["bytes_read"] > 0 for row in rows)
    # "cold" subtracts the time of what comes before a call, and is anything on a busy processor
    assert table == "cold" or all(row["ours_ms"] > 0 for row in rows)
    assert all(("of_parts" in row) == (table == "mixed") for row in rows)
    assert all(("of_uniform" in row) == (table == "ragged") for row in rows)
    if table == "steps":
        return
    generate = load_script("docs/generate.py")
    monkeypatch.setattr(generate.results, "read_rows", lambda name: on_an_h200(rows))
    makers = generate.BLOCKS["docs/measurements/performance_attention.md"]
    text = makers[table]()
    for row in rows:
        assert generate.attention.microseconds(row["ours_ms"]) in text
    monkeypatch.setattr(generate.results, "read_rows", lambda name: [])
    assert makers[table]() == ""  # not measured yet


def test_drawn_batches(attention):
    """The same in every run, within their limits, and such that every contender takes them."""
    drawn = sys.modules["drawn_batches"]
    cases = [case for case in attention.ALL if case.table == "drawn"]
    for number, case in enumerate(cases):
        assert drawn.draw(number) == (case.preset, case.page_size, case.shape)
        s, kinds = case.shape, drawn.KINDS[number % len(drawn.KINDS)]
        least, most = drawn.CACHE_BYTES
        assert least <= s.bf16_bytes <= most and s.new_tokens <= drawn.NEW_TOKENS
        assert (s.q_heads, s.kv_heads, s.head_dim) in drawn.HEADS
        assert len(kinds) <= len(s.parts) <= 4  # else contenders do not take them one by one
        for part in s.parts:
            limits = (drawn.QUERIES[kind] for kind in kinds)
            assert any(low <= part.q_len <= high for low, high in limits)
    rows, failed = tiny_rows(attention, cases[: len(drawn.KINDS)])
    assert not failed and all(row["own"] and row["ours_ms"] > 0 for row in rows)
    assert {row["head_dim"] for row in rows} == {c.shape.head_dim for c in cases[: len(rows)]}


def on_an_h200(rows):
    return [{**row, "device": "NVIDIA H200"} for row in json.loads(json.dumps(rows))]


def test_a_tail_and_several_queries_count_in_bytes(attention):
    shape = attention.Shape(2, 100, kv_heads=3, q_len=4)
    config = tq.preset("k4v4u", 128)
    coded, exact = config.bytes_per_token, 4 * 128
    sinks, window = config.sink_tokens, config.recent_window

    def size(**changes):
        return attention.Packed(attention.Case("k4v4u", shape, **changes)).bytes_read / (2 * 3)

    assert size() == 100 * coded
    assert size(own=True) == 96 * coded + 4 * exact
    # the first query's window begins three tokens before the last one's
    assert size(tail=True) == (100 - sinks - window) * coded + (sinks + window + 3) * exact
    assert size(tail=True, own=True) == size(tail=True)


@pytest.mark.parametrize("wrong", [lambda out: 1.02 * out, lambda out: out.roll(1, -1)])
def test_a_wrong_kernel_writes_no_row(attention, monkeypatch, wrong):
    """A wrong normalisation, too, which leaves cosines at 1."""
    real = attention.tt.paged_attention

    def broken(*arguments, **named):
        out, lse = real(*arguments, **named)
        return wrong(out), lse

    case = attention.Case("k4v4u", attention.Shape(1, 100), table="rows")
    assert tiny_rows(attention, [case])[1] == []
    monkeypatch.setattr(attention.tt, "paged_attention", broken)
    rows, failed = tiny_rows(attention, [case])
    assert not rows and len(failed) == 1 and "k4v4u 1 x 100" in failed[0]


def test_a_row_that_fails_leaves_the_others(attention, monkeypatch, capsys):
    real = attention.tt.paged_attention

    def broken(*arguments, **named):
        if named["tail"] is not None:
            raise RuntimeError("no such kernel")
        return real(*arguments, **named)

    monkeypatch.setattr(attention.tt, "paged_attention", broken)
    shape = attention.Shape(1, 100)
    cases = [attention.Case("k4v4u", shape, tail=tail, table="rows") for tail in (True, False)]
    rows, failed = tiny_rows(attention, cases)
    assert [row["tail"] for row in rows] == [False]
    assert len(failed) == 1 and failed[0].endswith("no such kernel")
    assert "Traceback" in capsys.readouterr().err


def test_contenders_read_the_cache_as_they_say(attention):
    """The check of a contender finds its keys in each layout, in batches of any mixture."""
    batch = attention.Shape.of([attention.Part(2, 37, 3), attention.Part(1, 80, 20)])
    plain = attention.Plain(batch)
    (cache, *_), d = plain.caches, batch.head_dim
    for layout in ("heads", "tokens", "pages"):
        k, v = plain.keys_and_values(layout, 1, 4)
        assert k.shape == v.shape == (37, d)
    assert plain.keys_and_values("heads", 2, 0).shape == (2, 80, d)
    k, _ = plain.keys_and_values("pages", 1, 4)
    assert torch.equal(k[16], plain.by_pages(cache)[0, plain.tables[1][1, 1], 0, 4])
    k, _ = plain.keys_and_values("tokens", 2, 4)
    assert torch.equal(k[5], plain.by_tokens(cache)[0, 74 + 5, 4])

    def attend(queries_causal):
        out = torch.zeros(batch.new_tokens, batch.q_heads, d)
        starts = batch.starts.tolist()
        for number, sequence in enumerate(batch.sequences):
            rows = slice(starts[number], starts[number + 1])
            last = torch.arange(sequence.context - sequence.q_len, sequence.context)
            for head in range(batch.kv_heads):
                k, v = plain.keys_and_values("tokens", number, head)
                q = attention.heads_of(plain.q[rows], batch, head)
                exact = attention.exact_attention(q, k, v, last if queries_causal else None)
                out[rows].unflatten(1, (batch.kv_heads, -1))[:, head] = exact.float()
        return out.bfloat16()

    right, wrong = (
        attention.contenders.Contender([lambda out=out: out], "tokens", True)
        for out in (attend(True), attend(False))
    )
    plain.check(right)
    with pytest.raises(RuntimeError, match="its result has a cosine of"):
        plain.check(wrong)


def test_other_work_between_calls_is_not_counted(attention, monkeypatch):
    """The time of a call in a model is what it adds to the time of what runs between two calls."""
    clock = [0.0]

    def takes(seconds):
        def work():
            clock[0] += seconds

        return work

    monkeypatch.setattr(attention.timing.time, "perf_counter", lambda: clock[0])
    contest = attention.Contest(0.1)
    calls = {"one": [takes(3e-3)], "two": [takes(1e-3), takes(2e-3)]}
    found = contest.medians_between(calls, takes(5e-3), calls=4)
    assert found == {"one": pytest.approx(3.0), "two": pytest.approx(1.5)}
    in_turn = contest.medians({"long": [takes(0.03)] * 8, "short": [takes(1e-4)] * 2})
    assert in_turn["long"][0] == pytest.approx(30) and in_turn["short"][0] == pytest.approx(0.1)


def test_reasons_name_no_folder():
    """What a contender raises may name the folder that it was installed or built in."""
    reason_of = load_script("benchmarks/bench_attention.py").timing.reason_of
    error = RuntimeError("Error in 'alloc' at /home/me/site/lib/a.h:49: 8 bytes / 2\nmore")
    assert reason_of(error, 200) == "RuntimeError: Error in 'alloc' at a.h:49: 8 bytes / 2"
    assert reason_of(ValueError("'/opt/x/y.so' and /tmp/z"), 200) == "ValueError: 'y.so' and z"
    assert reason_of(OSError(), 200) == "OSError: "
    assert reason_of(OSError("abcdef"), 12) == "OSError: abc"
