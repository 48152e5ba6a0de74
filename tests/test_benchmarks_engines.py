"""Benchmarks of serving engines, without one: points, settings, processes, clients and requests."""

import importlib.util
import itertools
import json
import re
from argparse import Namespace
from types import SimpleNamespace

import pytest

from tests.benchmark_runs import run
from tests.helpers import load_script


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


@pytest.mark.parametrize("cuda", [True, False])
def test_rows_of_another_model_or_memory_have_another_name(bench_vllm, cuda):
    """Rows replace those of their name in the file."""

    def row(shape, kv_gib=None, gpus=1):
        kv_gib = kv_gib or bench_vllm.sizes_of(shape, cuda)["kv_gib"]
        options = Namespace(shape=shape, kv_gib=kv_gib, tensor_parallel=gpus)
        engine = bench_vllm.Engine("k5v4u", 0, [])
        found = {"point": "16x128", "tokens_s": 1.0}
        return bench_vllm.complete(found, engine, {"vllm": "1"}, options, cuda)

    shapes = [row(shape) for shape in bench_vllm.engines.SHAPES]
    memory = [row("8b", 40.5), row("1.5b", 40.5), row("8b", 40.5, gpus=2), row("8b", gpus=2)]
    names = [found["row"] for found in (*shapes, *memory)]
    assert len(set(names)) == len(names)
    assert row("8b" if cuda else "tiny")["row"] == "vllm 1 k5v4u 16x128"
    assert memory[2]["row"] == "vllm 1 k5v4u 16x128 8b tp 2 40.5 GiB"
    assert memory[0]["cache_gib"] == 40.5


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


def test_requests_in_the_form_of_sharegpt(tmp_path):
    """A program that reads such a file finds the same prompts and lengths of answers."""
    script = load_script("benchmarks/make_requests.py")
    for name in ("a.jsonl", "a.json"):
        script.main([str(tmp_path / name), "--count", "20"])
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    talks = [row["conversations"] for row in json.loads((tmp_path / "a.json").read_text())]
    assert [question["value"] for question, _ in talks] == [row["prompt"] for row in rows]
    answers = [len(answer["value"].split()) for _, answer in talks]
    assert answers == [row["output_tokens"] for row in rows]


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


# ---- vLLM's server


def test_loads_of_a_server():
    bench = load_script("benchmarks/bench_vllm_serve.py")
    assert bench.Load.parse("mix512") == bench.Load("mix512", 512, None)
    assert bench.Load.parse("mix8@2.5") == bench.Load("mix8@2.5", 8, 2.5)
    for text in ("serve512", "mix0", "mix8@0", "mix8@0.0", "mix8@1.2.3"):
        with pytest.raises(SystemExit, match=f"'{text}' is no load"):
            bench.Load.parse(text)


def test_the_tokenizer_of_a_server_has_a_token_for_each_word(tmp_path):
    pytest.importorskip("tokenizers")
    bench = load_script("benchmarks/bench_vllm_serve.py")
    bench.write_tokenizer(tmp_path, 1000)
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert found.get_vocab_size() == 1000
    requests = bench.make_requests.make_requests(50, 30, 30, 200, 3, 0)
    for one in requests:
        assert len(found.encode(one["prompt"]).ids) == len(one["prompt"].split())


def test_what_a_server_says_about_itself():
    bench = load_script("benchmarks/bench_vllm_serve.py")
    page = (
        "# HELP vllm:num_preemptions_total Cumulative number\n"
        'vllm:num_preemptions_total{engine="0",model_name="model"} 12.0\n'
        'vllm:num_preemptions_total{engine="1",model_name="model"} 3.0\n'
        'vllm:cache_config_info{block_size="64",cache_dtype="auto",num_gpu_blocks="3360"} 1.0\n'
    )
    server = SimpleNamespace(text=lambda name: page)
    assert bench.metric(server, "vllm:num_preemptions_total") == 15
    assert bench.cache_tokens(server) == 64 * 3360
    silent = SimpleNamespace(text=lambda name: "")
    with pytest.raises(RuntimeError, match="does not say how large its cache is"):
        bench.cache_tokens(silent)
    with pytest.raises(RuntimeError, match="does not say its vllm:num_preemptions_total"):
        bench.metric(silent, "vllm:num_preemptions_total")
