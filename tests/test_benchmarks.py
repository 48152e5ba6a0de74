"""`make bench` runs every benchmark; a machine without what one needs changes no table.

The tests of bench_attention.py are in test_benchmarks_attention.py, those of programs that start
serving engines in test_benchmarks_engines.py.
"""

import re
import sys
from argparse import Namespace

import pytest
import torch

from tests.benchmark_runs import run
from tests.helpers import ROOT, load_script, tiny_llama


def test_make_bench_names_every_benchmark():
    (listed,) = re.findall(r"^BENCHMARKS :=((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.M)
    there = {path.name for path in (ROOT / "benchmarks").glob("bench_*.py")} | {"soak.py"}
    assert set(re.findall(r"\w+\.py", listed)) == there


def test_a_command_names_no_folder_of_this_machine(monkeypatch):
    common = load_script("benchmarks/common.py")
    script = str(ROOT / "benchmarks" / "bench_search.py")
    given = ["/some/vectors.json", "--text", "a/b.txt", "--model=/some/model", "--only=a=/b"]
    monkeypatch.setattr(sys, "argv", [script, *given])
    assert common.command_line() == (
        "python benchmarks/bench_search.py vectors.json --text a/b.txt --model=model --only=a=/b"
    )
    monkeypatch.setattr(sys, "argv", ["/somewhere/else/bench_own.py", "--dry-run"])
    assert common.command_line() == "python bench_own.py --dry-run"


def test_a_dry_run_needs_no_git(monkeypatch):
    """It would end a program that has measured already."""
    common = load_script("benchmarks/common.py")

    def no_git(*_, **__):
        raise OSError("there is no git")

    monkeypatch.setattr(common.subprocess, "run", no_git)
    row = {"row": "a", "ms": 1.0}
    options = Namespace(device="cpu", commit=None, dry_run=True)
    common.write_progress("cpu", [row], "row", options)
    common.write_rows("cpu", [row], options)
    with pytest.raises(SystemExit, match="git cannot name the commit"):
        common.write_rows("cpu", [row], Namespace(device="cpu", commit=None, dry_run=False))


def test_host_times_on_a_cpu_say_what_they_hold(monkeypatch, capsys):
    arguments = ("--device", "cpu", "--runs", "2", "--each", "1")
    threads = torch.get_num_threads()
    try:
        file, rows, written = run(monkeypatch, "bench_host.py", *arguments)
    finally:
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


def test_a_part_of_the_rows_is_merged_in_order(monkeypatch):
    common = load_script("benchmarks/common.py")
    here = {"device": "this"}
    old = [{"row": name, "ms": 1, **here} for name in ("a", "b", "gone", "d")]
    monkeypatch.setattr(common, "read_rows", lambda name, missing_ok: old)
    monkeypatch.setattr(common, "device_name", lambda device: "this")
    written = []
    monkeypatch.setattr(common, "write_rows", lambda name, rows, arguments: written.extend(rows))
    new = [{"row": name, "ms": 2} for name in ("d", "c")]
    common.write_progress("file", new, "row", Namespace(device="cpu"), order="abcd")
    found = [(row["row"], row["ms"]) for row in written]
    assert found == [("a", 1), ("b", 1), ("c", 2), ("d", 2), ("gone", 1)]


def test_vllm_kernels_without_a_gpu(monkeypatch, capsys):
    assert run(monkeypatch, "bench_vllm_kernels.py", "--device", "cpu") is None
    assert "needs a CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "mode"), [("unmasked", "graph"), ("dynamic", "eager")])
def test_an_uncompressed_cache_counts_in_its_fastest_way(monkeypatch, kind, mode):
    bench = load_script("benchmarks/bench_generate.py")
    case = bench.Case("step", kind, mode, 1, 100)
    assert set(bench.KERNELS) <= set(case.ways)
    for fastest in case.ways:

        def steps_of(case, way, *rest, fastest=fastest):
            return {"tpot_ms": 1.0 if way == fastest else 2.0}

        monkeypatch.setattr(bench, "steps_of", steps_of)
        row = bench.fastest_steps(case, case.ways, None, None, 8)
        assert row["way"] == fastest and row["tpot_ms"] == 1.0
        assert set(row["ways_ms"]) == set(case.ways)


def test_a_row_of_vllm_has_its_fastest_and_its_own_way():
    bench = load_script("benchmarks/bench_vllm_kernels.py")
    row = bench.fastest({"pages 16": 3.0, "pages 64": 2.0}, "pages 16")
    assert (row["ms"], row["way"], row["default_ms"]) == (2.0, "pages 64", 3.0)


def test_cosines_beside_vllm_say_what_they_are_of():
    """Ours are compared with decoded keys and values, vLLM's with the unquantised ones."""
    rows = load_script("benchmarks/common.py").read_rows("h200_vllm_kernels")
    names = {"ours": "cosine_of_decoded", "vllm": "cosine"}
    for row in rows:
        name = names.get(row["kind"]) if row["call"] == "attention" else None
        assert [key for key in row if key.startswith("cosine")] == ([name] if name else [])


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


@pytest.mark.parametrize(
    ("name", "cases", "count", "sizes"),
    [
        ("linear", "^layer 4 m 1$", 1, ("us", "eager_us", "bytes", "speedup", "error")),
        ("experts", "^qwen3-30b-a3b 4 m (1|4)$", 2, ("us", "eager_us", "bytes", "speedup")),
        ("mla", "^k4u 16 heads 1 x 8192$", 1, ("ms", "eager_ms", "speedup")),
    ],
)
def test_cases_one_after_the_other(monkeypatch, name, cases, count, sizes):
    """A try with tiny sizes writes nothing, and has a row for each case that was asked for."""
    rows, measure = [], load_script(f"benchmarks/bench_{name}.py").measure
    kept = lambda *given: rows.append(measure(*given)) or rows[-1]  # noqa: E731
    arguments = "--tiny", "--only", cases, "--seconds", "0.001"
    assert run(monkeypatch, f"bench_{name}.py", *arguments, measure=kept) is None
    assert len(rows) == count
    assert all(row[size] > 0 for row in rows for size in sizes)


def test_the_table_of_experts_names_what_it_divides_by(monkeypatch):
    bench = load_script("benchmarks/bench_experts.py")
    row = {"case": "a", "us": 10.0, "of_read": 0.5, "speedup": 2.0}
    rows = [{**row, "other_us": {"loop": 30.0, "bmm": 20.0}}, {**row, "other_us": {}}]
    monkeypatch.setattr(bench.common, "read_rows", lambda name: rows)
    assert bench.table().splitlines()[2:] == [
        "| a | 10.0 | 50% | 20.0 (bmm) | 2.00x |",
        "| a | 10.0 | 50% |  |  |",
    ]


@pytest.mark.parametrize("name", ["linear", "experts", "mla"])
def test_cases_without_a_gpu(monkeypatch, capsys, name):
    """Nothing is measured, as a row would replace those of a GPU."""

    def measure(*given):
        raise AssertionError(f"{given[0]} is measured")

    device = "--device", "cpu"
    assert run(monkeypatch, f"bench_{name}.py", *device, measure=measure) is None
    assert "needs a CUDA device; --tiny is a try on any" in capsys.readouterr().out


def test_a_case_with_wrong_results_ends_with_an_error(monkeypatch):
    """Other cases are measured before."""
    seen = []
    arguments = "--tiny", "--only", "^k4u 16 heads 1 x (8192|131072)$"
    with pytest.raises(SystemExit, match=r"(?s)wrong results.*k4u 16 heads 1 x 250"):
        run(monkeypatch, "bench_mla.py", *arguments, measure=lambda *given: seen.append(given))
    assert len(seen) == 2


def test_a_contender_over_latents_with_wrong_results_does_not_count(monkeypatch):
    """Of batches of one length, of several, and of steps of several queries."""
    bench = load_script("benchmarks/bench_mla.py")
    monkeypatch.setattr(sys.modules["timing"], "ROTATED_BYTES", 0)  # one cache is enough
    for case in (
        bench.Case("k4u", 16, 2, 250),
        bench.Case("k4u", 16, 2, 250, q_len=2),
        bench.Case("k4u", 16, 2, 250, short=3),
    ):
        plain = bench.Plain(case)
        monkeypatch.setattr(plain, "flash_mla", plain.sdpa)  # it leaves the block table out
        monkeypatch.setattr(plain, "flashinfer_mla", lambda own=plain: in_table_order(own))
        found, missing = plain.contenders()
        assert set(found) == {"flashinfer"}
        assert "its result has a cosine of" in missing["flashmla"]


def in_table_order(plain):
    """Attention of torch over pages in the order of the block table."""
    sets = plain.sets
    plain.sets = [(cache[order.long()], order, table) for cache, order, table in sets]
    calls, plain.sets = plain.sdpa(), sets
    return calls


def test_the_codec_on_a_cpu_writes_nothing(monkeypatch):
    class NoRows:
        all = staticmethod(tuple)

    nothing = {"Rows": lambda device: NoRows, "Timer": lambda *arguments: None}
    file, _, written = run(monkeypatch, "bench_codec.py", "--device", "cpu", **nothing)
    assert file == "h200_codec" and not written


def test_a_processor_of_one_name_and_other_levels_changes_no_row(monkeypatch):
    bench, here = load_script("benchmarks/bench_cpu.py"), {"device": "AMD EPYC"}
    monkeypatch.setattr(bench.common, "device_name", lambda device: here["device"])
    written = []
    monkeypatch.setattr(bench.common, "write_rows", lambda *given: written.extend(given[1]))
    real = bench.common.read_rows("cpu")
    every = "avx512 avx2 portable"
    less = {**here, "levels": "avx2 portable", "ms": 1e3, "speedup_vs_bf16": 9.0, "threads": 9}
    new = [{**row, **less} for row in real if (row["level"], row["levels"]) == ("avx2", every)]
    bench.common.write_progress("cpu", new, bench.KEY, Namespace(device="cpu"))
    assert len(written) == len(real) + len(new)
    written.clear()
    again = [{**row, "ms": 1e3} for row in real if row["level"] == "avx512"]
    bench.common.write_progress("cpu", again, bench.KEY, Namespace(device="cpu"))
    assert len(written) == len(real)  # of the default, which measures one level

    generate = load_script("docs/generate.py")
    read = generate.results.read_rows
    monkeypatch.setattr(
        generate.results, "read_rows", lambda name: (new if name == "cpu" else []) + read(name)
    )
    assert not list(generate.outdated())


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
    assert plain.keys() == packed.keys() and "step k5v4u graph 16x32768" in plain
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
