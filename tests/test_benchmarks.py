"""`make bench` runs every benchmark; a machine without what one needs changes no table."""

import importlib.util
import inspect
import itertools
import json
import re
import sys
from argparse import Namespace
from dataclasses import replace

import pytest
import torch

import torch_turboquant as tq
from tests.helpers import ROOT, load_script, tiny_llama


def test_make_bench_names_every_benchmark():
    (listed,) = re.findall(r"^BENCHMARKS :=((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.M)
    there = {path.name for path in (ROOT / "benchmarks").glob("bench_*.py")} | {"soak.py"}
    assert set(re.findall(r"\w+\.py", listed)) == there


def run(monkeypatch, name, *arguments, **replaced):
    """What a benchmark hands to write_rows: (file, rows, whether it was to be written) or None."""
    module, given = load_script(f"benchmarks/{name}"), []
    for attribute, value in replaced.items():
        monkeypatch.setattr(module, attribute, value)

    def write_rows(file, rows, options):
        given.append((file, rows, not options.dry_run))

    monkeypatch.setattr(module.common, "write_rows", write_rows)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    module.main()
    return given[0] if given else None


def test_a_command_names_no_folder_of_this_machine(monkeypatch):
    common = load_script("benchmarks/common.py")
    script = str(ROOT / "benchmarks" / "bench_search.py")
    monkeypatch.setattr(sys, "argv", [script, "/somewhere/vectors.json", "--text", "models/a.txt"])
    assert common.command_line() == (
        "python benchmarks/bench_search.py vectors.json --text models/a.txt"
    )


def test_host_times_on_a_cpu_say_what_they_hold(monkeypatch, capsys):
    arguments = ("--device", "cpu", "--runs", "2", "--each", "1")
    threads = torch.get_num_threads()
    file, rows, written = run(monkeypatch, "bench_host.py", *arguments)
    torch.set_num_threads(threads)
    assert file == "host" and written
    modes = {"grad", "no_grad", "inference"}
    calls = {(row["call"], row["mode"]) for row in rows}
    assert len(calls) == len(rows) and {mode for _, mode in calls} == modes
    named = {"paged_attention", "cache_store", "paged_attention, tail and center"}
    assert named < {call for call, _ in calls}
    assert all(row["us"] >= row["least"] > 0 for row in rows)
    assert {row["time"] for row in rows} == {"host and kernel"}
    assert "the kernels run within the calls" in capsys.readouterr().out


def test_latents_of_a_model_that_is_trained(monkeypatch, tmp_path):
    """Tiny: it is trained once, and both kinds of latents are the same function."""
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    script = load_script("benchmarks/bench_mla_quality.py")
    shape = {**script.SHAPE, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    shape |= {"kv_lora_rank": 128, "vocab_size": 300}
    sizes = {"SHAPE": shape, "PROMPT": 70, "SCORED": 50, "CALIBRATION": 60}
    words = torch.randint(0, 1000, (3000,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "text").write_text(" ".join(map(str, words)))
    arguments = ["--device", "cpu", "--text", str(tmp_path / "text"), "--steps", "3",
                 "--tokens", "64", "--segments", "2", "--presets", "k3", "k8",
                 "--model", str(tmp_path / "model"), "--dry-run"]  # fmt: skip
    file, rows, written = run(monkeypatch, "bench_mla_quality.py", *arguments, **sizes)
    assert file == "mla_quality" and not written
    assert len(rows) == 2 * (1 + 2 * 2 * len(script.CHANNELS))
    found = {(r["latents"], r["cache"], r["transform"], r["channels"]): r for r in rows}
    for latents in ("as trained", "unequal"):
        assert found[latents, "uncompressed", False, "none"]["kl"] < 1e-6
        coarse, fine = (found[latents, name, True, "norm"]["kl"] for name in ("k3", "k8"))
        assert 0 < fine < coarse
    losses = {round(row["loss"], 3) for row in rows}
    assert len(losses) == 1  # scaling channels and their columns changes nothing


class Letters:
    """A tokenizer of single letters."""

    def __call__(self, text, return_tensors=None, **_):
        from transformers import BatchEncoding

        ids = [1 + ord(letter) % 60 for letter in text]
        return BatchEncoding({"input_ids": torch.tensor([ids]) if return_tensors else ids})


def test_eviction_without_a_gpu(monkeypatch, capsys):
    pytest.importorskip("transformers")
    assert run(monkeypatch, "bench_eviction.py", "--device", "cpu") is None
    assert "needs a CUDA device, or --model" in capsys.readouterr().out


@torch.no_grad()
def test_eviction_of_prompts_that_are_read_once():
    """The caches hold what the model's own forwards would have stored."""
    pytest.importorskip("transformers")
    from torch_turboquant.integrations.transformers import TurboQuantCache

    bench = load_script("benchmarks/bench_eviction.py")
    model, text = tiny_llama(), "A river runs through the town, and so on. " * 40
    context = bench.make_context(Letters(), torch.tensor(Letters()(text)["input_ids"]), 700, 0)
    assert (len(context.ids), len(context.following)) == (700, bench.CONTINUED)
    question = context.asked[3].question
    whole = bench.read(model, context.ids)
    prompt = bench.read(model, question, whole)[1]
    with TurboQuantCache.for_model(model, "k4v4", keep=0.5, center="none") as cache:
        model(torch.cat([context.ids, question])[None], past_key_values=cache)
        expected = [layer.pages.clone() for layer in cache.packed]
        bench.fill(cache, prompt)
        for layer, pages in zip(cache.packed, expected, strict=True):
            assert (layer.pages != pages).float().mean() < 0.01  # products of other sizes
        right = bench.answers(model, cache, context.asked, 3)
        assert len(right) == len(bench.PLACES)
        assert cache.get_seq_length() == 700 + len(question) + len(context.asked[3].answer)


def test_rows_of_eviction(monkeypatch):
    pytest.importorskip("transformers")
    bench = load_script("benchmarks/bench_eviction.py")
    monkeypatch.setattr(bench, "CACHES", [("k8v8", 1, "-"), ("k4v4", 0.5, "keydiff")])
    options = Namespace(context=700, contexts=1, questions=2, policies=None)
    text = "A river runs through the town, and so on. " * 40
    with torch.no_grad():
        rows = bench.quality(tiny_llama(), Letters(), text, options)
    none, fine, thin = rows
    assert none["kl"] == 0 and fine["kl"] < thin["kl"] and none["questions"] == 10
    assert 0.2 < thin["bytes"] / fine["bytes"] < 0.3


def test_search_without_its_vectors(monkeypatch, capsys):
    assert run(monkeypatch, "bench_search.py") is None
    assert "needs faiss and a file of vectors" in capsys.readouterr().out


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
    monkeypatch.setattr(bench, "SHORT", bench.Shape(1, 96))  # of uniform batches
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
    rows = {s.q_len * s.q_heads // s.kv_heads for s in attention.ROWS}
    assert {4, 8, 16, 20, 21, 32, 40, 48, 56, 64, 71, 96, 128} == rows
    groups = {s.q_heads // s.kv_heads for s in attention.ROWS}
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


def test_a_part_of_the_rows_is_merged_in_order(monkeypatch):
    common = load_script("benchmarks/common.py")
    here = {"device": "this"}
    old = [{"row": name, "ms": 1, **here} for name in ("a", "b", "gone", "d")]
    monkeypatch.setattr(common, "read_rows", lambda name, missing_ok: old)
    monkeypatch.setattr(common, "origin", lambda name, arguments: here)
    written = []
    monkeypatch.setattr(common, "write_rows", lambda name, rows, arguments: written.extend(rows))
    new = [{"row": name, "ms": 2} for name in ("d", "c")]
    common.write_progress("file", new, "row", None, order="abcd")
    found = [(row["row"], row["ms"]) for row in written]
    assert found == [("a", 1), ("b", 1), ("c", 2), ("d", 2), ("gone", 1)]


def test_vllm_kernels_without_a_gpu(monkeypatch, capsys):
    assert run(monkeypatch, "bench_vllm_kernels.py", "--device", "cpu") is None
    assert "needs a CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "mode"), [("unmasked", "graph"), ("dynamic", "eager")])
def test_an_uncompressed_cache_counts_in_its_fastest_way(monkeypatch, kind, mode):
    bench = load_script("benchmarks/bench_generate.py")
    case = bench.Case("decode", kind, mode, 1, 100)
    assert set(bench.KERNELS) <= set(case.ways)
    for fastest in case.ways:

        def steps_of(case, way, *rest, fastest=fastest):
            return {"tpot_ms": 1.0 if way == fastest else 2.0}

        monkeypatch.setattr(bench, "steps_of", steps_of)
        row = bench.decode(case, case.ways, None, None, 8)
        assert row["way"] == fastest and row["tpot_ms"] == 1.0
        assert set(row["ways_ms"]) == set(case.ways)


@pytest.fixture
def bench_vllm():
    return load_script("benchmarks/bench_vllm.py")


def test_engines_without_vllm(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "vllm" else find(name, *rest),
    )
    assert run(monkeypatch, "bench_vllm.py", "--device", "cpu") is None
    assert "needs vLLM" in capsys.readouterr().out


def test_points_of_an_engine(bench_vllm):
    decode, full, prompt, check = map(
        bench_vllm.Point.parse, ["verify3:16x32768", "full8192", "prompt2048", "check"]
    )
    assert (decode.kind, decode.sequences, decode.context, decode.drafts) == (
        "decode",
        16,
        32768,
        3,
    )
    assert (full.kind, full.sequences, full.context, full.drafts) == ("full", 0, 8192, 0)
    assert (prompt.kind, prompt.sequences, prompt.context) == ("prompt", 1, 2048)
    assert check.kind == "check"
    load = bench_vllm.Point.parse("turns8x1000:50")
    assert (load.kind, load.sequences, load.longest) == ("load", 8, load.load.longest)
    with pytest.raises(SystemExit, match="'16' is no point"):
        bench_vllm.Point.parse("16")


def test_an_engine_has_one_number_of_drafts(bench_vllm):
    points = [bench_vllm.Point.parse(text) for text in bench_vllm.POINTS.split(",")]
    found = list(bench_vllm.engines_of(bench_vllm.CONFIGS.split(","), points, None))
    titles = [engine.title for engine in found]
    assert titles[:5] == ["k5v4u", "bf16", "fp8", "k4v4u", "turboquant_4bit_nc"]
    assert titles[5:9] == ["k5v4u 3 drafts", "bf16 3 drafts", "fp8 3 drafts", "k4v4u 3 drafts"]
    assert len(titles) == 13 and found[0].points[0].text == "16x32768"
    theirs = [point.text for point in found[4].points]
    assert "16x32768" in theirs and "full8192" not in theirs
    (only,) = bench_vllm.engines_of(bench_vllm.CONFIGS.split(","), points, "k4v4u verify7:1x")
    assert only.drafts == 7 and [point.text for point in only.points] == ["verify7:1x8192"]


def test_what_an_engine_of_vllm_is_given():
    options_of = load_script("benchmarks/vllm_engine.py").engine_options
    settings = {"model": "m", "longest": 33280, "sequences": 64, "batched_tokens": 16384}
    settings |= {"cuda": True, "kv_gib": 72, "tensor_parallel": 1, "latents": False}
    ours = options_of("k5v4u", 3, settings)
    assert ours["attention_backend"] == "CUSTOM"
    assert ours["additional_config"] == {"turboquant": {"preset": "k5v4u"}}
    without = options_of("k5v4u:codes", 0, settings)["additional_config"]["turboquant"]
    assert without == {"preset": "k5v4u", "first_token": "codes"}
    assert ours["compilation_config"]["cudagraph_capture_sizes"] == [4, 64, 128]
    assert ours["speculative_config"]["num_speculative_tokens"] == 3
    plain = [options_of(name, 0, settings) for name in ("bf16", "fp8")]
    assert [x.get("kv_cache_dtype") for x in plain] == [None, "fp8"]
    for options in plain:
        assert options["compilation_config"]["cudagraph_capture_sizes"][-1] == 64
        same = {"kv_cache_memory_bytes": 72 * 2**30, "attention_backend": "FLASH_ATTN"}
        assert same.items() <= options.items() and "additional_config" not in options
    settings["latents"] = True  # vLLM chooses itself
    assert "attention_backend" not in options_of("bf16", 0, settings)
    assert options_of("k5u", 0, settings)["attention_backend"] == "CUSTOM"


def test_engines_are_compared_with_bf16(bench_vllm):
    tops = {"7": -0.1, "8": -2.0}, {"7": -0.2, "9": -3.0}
    reference, ours = [[(7, tops[0]), (8, tops[0])]], [[(7, tops[1]), (9, tops[0])]]
    rows = [{"point": "check", "config": "k5v4u"}, {"point": "16x128", "config": "k5v4u"}]
    bench_vllm.add_differences(rows, {"k5v4u": ours})
    assert "tokens" not in rows[0]
    bench_vllm.add_differences(rows, {"k5v4u": ours, "bf16": reference})
    assert rows[0]["same_tokens"] == 1 and rows[0]["tokens"] == 2
    assert rows[0]["logprob_difference"] == pytest.approx((0.1 + 0 + 0) / 3) and len(rows[1]) == 2
    times = [
        {"config": "bf16", "point": "16x128", "tokens_s": 100.0},
        {"config": "k5v4u", "point": "16x128", "tokens_s": 250.0},
    ]
    printed = bench_vllm.engines.table(times, ["k5v4u", "bf16"])
    assert "| 16x128 | 250 (2.50x) | 100 (1.00x) |" in printed


def test_engines_are_measured_one_after_the_other(tmp_path, capsys):
    """The next process is there before it is its turn, and one that fails leaves the others."""
    engines = load_script("benchmarks/engines.py")
    program = tmp_path / "bench.py"
    program.write_text("""
import json, os, sys
task = json.loads(sys.argv[2])
sys.stdin.readline()
with os.fdopen(task["sender"], "w") as sender:
    for point in task["points"]:
        sender.write(json.dumps({"point": point, "config": task["config"]}) + "\\n")
if task["config"] == "broken":
    sys.exit("no such engine")
""")

    class Child(engines.Child):
        def __init__(self, engine):
            started.append(engine.config)
            super().__init__(engine, {}, tmp_path)

    Child.program, Child.environment = str(program), {}
    started, ahead, found = [], [], []
    points = [Namespace(text="a"), Namespace(text="b")]
    order = [engines.Engine(name, 0, points) for name in ("first", "broken", "last")]
    for engine, row in engines.measured(order, Child, 60.0, 60.0):
        ahead.append(list(started))
        found.append((engine.config, row["config"], row["point"]))
    assert found == [(name, name, p) for name in ("first", "broken", "last") for p in "ab"]
    assert ahead[0] == ["first", "broken"] and ahead[2] == ["first", "broken", "last"]
    printed = capsys.readouterr().out
    assert re.search(r"^broken: \d+ s, exit 1\nno such engine$", printed, re.MULTILINE)
    assert re.search(r"^last: \d+ s, exit 0$", printed, re.MULTILINE)


def test_an_engine_that_takes_too_long_is_ended(tmp_path):
    engines = load_script("benchmarks/engines.py")
    program = tmp_path / "bench.py"
    program.write_text("import sys, time; sys.stdin.readline(); time.sleep(60)")
    child = type("Child", (engines.Child,), {"program": str(program), "environment": {}})
    process = child(engines.Engine("slow", 0, []), {}, tmp_path)
    assert list(process.measure(0.2)) == [] and process.process.returncode < 0


def test_a_row_of_vllm_has_its_fastest_and_its_own_way():
    bench = load_script("benchmarks/bench_vllm_kernels.py")
    row = bench.fastest({"pages 16": 3.0, "pages 64": 2.0}, "pages 16")
    assert (row["ms"], row["way"], row["default_ms"]) == (2.0, "pages 64", 3.0)


def test_disturbed_steps_do_not_count():
    bench = load_script("benchmarks/bench_generate.py")
    quiet, disturbed = [5.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 2.0], [9.0] * bench.WINDOW
    assert bench.typical(disturbed + quiet + disturbed + [0.5]) == 2.0
    assert bench.typical([3.0, 1.0, 2.0]) == 2.0


def test_steps_over_latents(monkeypatch):
    arguments = "--tiny", "--device", "cpu"
    changes = {"WAYS": ("dynamic", "uncompressed", "k5u"), "MODES": ("eager",)}
    file, rows, written = run(monkeypatch, "bench_latent_steps.py", *arguments, **changes)
    assert file == "h200_latent_steps" and not written
    assert [row["way"] for row in rows] == [*changes["WAYS"]]
    assert all(row["ms"] > 0 and row["short_ms"] > 0 for row in rows)
    stock, plain, packed = (row["bytes_per_layer"] for row in rows)
    # 2 sequences; the steps that were timed and the room of pages count, too
    assert 2 * 150 * 160 * 2 < stock < plain and packed < plain


def test_the_codec_on_a_cpu_writes_nothing(monkeypatch):
    class NoRows:
        all = staticmethod(tuple)

    nothing = {"Rows": lambda device: NoRows, "Timer": lambda *arguments: None}
    file, _, written = run(monkeypatch, "bench_codec.py", "--device", "cpu", **nothing)
    assert file == "h200_codec" and not written


def test_another_gpu_changes_no_table_that_names_the_h200(monkeypatch):
    generate = load_script("docs/generate.py")
    real = generate.results.read_rows

    def two_devices(name):
        found = real(name)
        other = {"device": "another", "ms": 1.0, "ours_ms": 1.0}
        return found + [{**row, **other} for row in found if name.startswith("h200")]

    monkeypatch.setattr(generate.results, "read_rows", two_devices)
    assert not list(generate.outdated())


def test_packed_weights_are_compared_with_the_same_cases():
    bench = load_script("benchmarks/bench_generate.py")
    plain, packed = {}, {}
    for case in bench.weights_table(4, tiny=False):
        (packed if case.weights else plain)[case.title.removesuffix(" w4")] = case
    assert plain.keys() == packed.keys() and "decode k5v4u graph 16x32768" in plain
    for case in (*plain.values(), *packed.values()):
        row = {"part": case.part, "kind": case.kind, "mode": case.mode, "batch": case.batch}
        row["context"] = case.context
        if case.weights:
            row["weights"] = case.weights
        assert bench.identity(row) == case.identity
    assert not {c.identity for c in plain.values()} & {c.identity for c in packed.values()}


def test_a_model_is_packed_between_its_rows():
    bench = load_script("benchmarks/bench_generate.py")
    model = tiny_llama()
    assert re.fullmatch(r"15 layers packed in .* GiB -> .* GiB", bench.packed(model, 4))
    assert model.config.quantization_config.bits == 4


def test_a_model_on_a_cpu(monkeypatch, capsys):
    pytest.importorskip("transformers")
    bench = load_script("benchmarks/bench_cpu_model.py")
    small = bench.SHAPE | {"hidden_size": 192, "intermediate_size": 256, "vocab_size": 64}
    small["num_hidden_layers"] = 1
    arguments = {"SHAPE": small, "PROMPTS": (3, 5), "STEPS": 2}
    file, rows, _ = run(monkeypatch, "bench_cpu_model.py", "--commit", "x", **arguments)
    assert file == "cpu_model" and len(rows) == 2 * len(bench.WEIGHTS)
    size = {row["weights"]: row["weights_bytes"] for row in rows}
    assert size["4"] == size["4 uniform"] < size["8"] < size["bfloat16"]
    assert all(row["ttft_ms"] > 0 and row["tpot_ms"] > 0 for row in rows)


# ---- clients of an engine


@pytest.fixture
def serving():
    return load_script("benchmarks/serving.py")


def serve(clients, slots, step=0.01):
    """An engine of so many slots whose step makes one token each: all requests, in order."""
    queue, running, seen, now, number = clients.begin(0.0), [], [], 0.0, 0
    while clients.clock(now, 0.0):
        now += step
        while queue and len(running) < slots:
            running.append(queue.pop(0))
            seen.append(running[-1])
        for request in running[:]:
            number += 1
            following = clients.told(request.number, [number], now)
            if request.number not in clients.waiting:
                running.remove(request)
                queue.append(following)
    return seen


def test_loads_of_clients(serving):
    parse = serving.Load.parse
    load = parse("serve64x16384:512")
    assert (load.kind, load.clients, load.context, load.tokens) == ("serve", 64, 16384, 512)
    assert load.longest == 16384 + 512 and load.batches()[-1] == 64
    assert parse("turns8x100:20").longest > 100 + 2 * 20
    assert parse("mix256").clients == 256 and parse("mix256").batches()[-1] == 256
    assert parse("16x32768") is None and parse("serve64") is None


def test_clients_have_one_request_at_a_time(serving):
    clients = serving.Clients(serving.Load.parse("serve4x50:20"), 1000, 4.0)
    seen = serve(clients, slots=4)
    row = clients.row(3)
    # Four tokens every 10 ms, and 20 of them answer a request.
    assert row["tokens_s"] == pytest.approx(400, rel=0.02)
    assert row["requests_s"] == pytest.approx(20, rel=0.1)
    assert row["token_ms_median"] == pytest.approx(10) and row["preempted"] == 3
    assert row["first_token_s_p99"] == pytest.approx(0.01)
    assert {len(request.prompt) for request in seen} == {50}
    assert len({tuple(request.prompt[:8]) for request in seen}) == len(seen)
    first = [request.tokens for request in seen[:4]]
    assert sorted(request.client for request in seen[:4]) == [0, 1, 2, 3]
    assert len(set(first)) > 1 and max(first) <= 20  # as if they had begun before
    assert {request.tokens for request in seen[4:]} == {20}


def test_clients_that_wait(serving):
    """Half as many slots as clients: as long as an answer takes, until the first token comes."""
    clients = serving.Clients(serving.Load.parse("serve8x50:20"), 1000, 4.0)
    serve(clients, slots=4)
    row = clients.row(0)
    assert row["tokens_s"] == pytest.approx(400, rel=0.02)
    assert row["first_token_s_median"] == pytest.approx(0.21, abs=0.03)


def test_clients_that_get_nothing(serving):
    clients = serving.Clients(serving.Load.parse("serve4x50:20"), 1000, 4.0)
    with pytest.raises(RuntimeError, match="no token came"):
        clients.row(0)
    serve(clients, slots=0)
    with pytest.raises(RuntimeError, match="no token came"):
        clients.row(0)


def test_turns_of_a_conversation(serving):
    load = serving.Load.parse("turns2x50:10")
    clients = serving.Clients(load, 1000, 20.0)
    seen = serve(clients, slots=2)
    for client in range(2):
        mine = [request for request in seen if request.client == client]
        for before, after in itertools.pairwise(mine):
            if len(after.prompt) > 50:
                assert after.prompt[: len(before.prompt)] == before.prompt
                assert len(after.prompt) == len(before.prompt) + len(before.answer) + 10
            assert len(after.prompt) + after.tokens <= load.longest
        again = [request for request in mine if request.prompt == mine[0].prompt]
        assert len(again) > 1 and len(mine[1].prompt) > 50  # it began again, and not at once


def test_a_mix_of_lengths(serving):
    clients = serving.Clients(serving.Load.parse("mix64"), 100_000, 30.0)
    seen = serve(clients, slots=64)
    prompts = [tuple(request.prompt) for request in seen]
    assert 100 < sum(map(len, prompts)) / len(prompts) < 400
    assert max(map(len, prompts)) <= serving.LONGEST
    assert max(request.tokens for request in seen) <= serving.LONGEST
    beginnings = {prompt[:4] for prompt in prompts}
    assert 0.5 < len(beginnings) / len(prompts) < 0.85  # a third goes on with others


def test_points_of_an_engine_of_sglang():
    bench = load_script("benchmarks/bench_sglang.py")
    decode, hit, load = map(bench.Point.parse, ["16x4096", "hit800:100", "turns32x1000:50"])
    assert (decode.kind, decode.longest, decode.batches) == ("decode", 4096, [16])
    assert (hit.kind, hit.longest) == ("hit", 900)
    assert (load.kind, load.longest) == ("load", load.load.longest)
    assert load.batches[0] == 1 and load.batches[-1] == 32
    with pytest.raises(SystemExit, match="'16' is no point"):
        bench.Point.parse("16")


# ---- requests for `vllm bench serve`


def test_requests_are_drawn_from_a_seed(tmp_path):
    script = load_script("benchmarks/make_requests.py")
    files = []
    for name, seed in (("a.jsonl", "3"), ("b.jsonl", "3"), ("c.jsonl", "4")):
        script.main([str(tmp_path / name), "--count", "200", "--seed", seed])
        files.append((tmp_path / name).read_text())
    assert files[0] == files[1] != files[2]
    rows = [json.loads(line) for line in files[0].splitlines()]
    assert len(rows) == 200
    assert all(set(row) == {"prompt", "output_tokens"} for row in rows)


def test_lengths_of_requests():
    script = load_script("benchmarks/make_requests.py")
    rows = script.make_requests(2000, 161, 338, 100_000, 0, 0)
    prompts = [len(row["prompt"].split()) for row in rows]
    answers = [row["output_tokens"] for row in rows]
    assert sum(prompts) / 2000 == pytest.approx(161, rel=0.1)
    assert sum(answers) / 2000 == pytest.approx(338, rel=0.1)
    assert min(prompts) >= 4
    short = script.make_requests(300, 161, 338, 200, 3, 0)
    assert max(len(row["prompt"].split()) for row in short) == 200


def test_requests_that_go_on_with_earlier_ones():
    script = load_script("benchmarks/make_requests.py")

    def going_on(turns):
        prompts = [row["prompt"] for row in script.make_requests(300, 40, 40, 4000, turns, 0)]
        return sum(
            any(later.startswith(earlier + " ") for earlier in prompts[:place])
            for place, later in enumerate(prompts)
        )

    assert going_on(0) == 0
    assert 60 < going_on(3) < 140


def test_requests_have_so_many_tokens_of_a_tokenizer():
    script = load_script("benchmarks/make_requests.py")

    class Halves:
        """A token is a word, or half of a longer one."""

        def __call__(self, text, add_special_tokens):
            words = (part for word in text.split() for part in (word[:3], word[3:]))
            return {"input_ids": [part for part in words if part]}

        def decode(self, ids):
            return " ".join(ids)

    drawn = script.make_requests(50, 30, 30, 200, 0, 1)
    cut = script.make_requests(50, 30, 30, 200, 0, 1, Halves())
    for one, other in zip(drawn, cut, strict=True):
        assert len(other["prompt"].split()) == len(one["prompt"].split())


def test_reasons_name_no_folder():
    """What a contender raises may name the folder that it was installed or built in."""
    reason_of = load_script("benchmarks/bench_attention.py").timing.reason_of
    error = RuntimeError("Error in 'alloc' at /home/me/site/lib/a.h:49: 8 bytes / 2\nmore")
    assert reason_of(error, 200) == "RuntimeError: Error in 'alloc' at a.h:49: 8 bytes / 2"
    assert reason_of(ValueError("'/opt/x/y.so' and /tmp/z"), 200) == "ValueError: 'y.so' and z"
    assert reason_of(OSError(), 200) == "OSError: "
    assert reason_of(OSError("abcdef"), 12) == "OSError: abc"
