"""`make bench` runs every benchmark; a machine without what one needs changes no table."""

import re
import sys

import pytest

from tests.helpers import ROOT, load_script


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


def test_search_without_its_vectors(monkeypatch, capsys):
    assert run(monkeypatch, "bench_search.py") is None
    assert "needs faiss and a file of vectors" in capsys.readouterr().out


def test_attention_without_a_gpu(monkeypatch, capsys):
    assert run(monkeypatch, "bench_attention.py", "--device", "cpu") is None
    assert "needs a CUDA device" in capsys.readouterr().out


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


def test_a_row_of_vllm_has_its_fastest_and_its_own_way():
    bench = load_script("benchmarks/bench_vllm_kernels.py")
    row = bench.fastest({"pages 16": 3.0, "pages 64": 2.0}, "pages 16")
    assert (row["ms"], row["way"], row["default_ms"]) == (2.0, "pages 64", 3.0)


def test_disturbed_steps_do_not_count():
    bench = load_script("benchmarks/bench_generate.py")
    quiet, disturbed = [5.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 2.0], [9.0] * bench.WINDOW
    assert bench.typical(disturbed + quiet + disturbed + [0.5]) == 2.0
    assert bench.typical([3.0, 1.0, 2.0]) == 2.0


def test_the_codec_on_a_cpu_writes_nothing(monkeypatch):
    class NoRows:
        all = staticmethod(tuple)

    nothing = {"Rows": lambda device: NoRows, "Timer": lambda *arguments: None}
    file, _, written = run(monkeypatch, "bench_codec.py", "--device", "cpu", **nothing)
    assert file == "h200_codec" and not written


def test_another_gpu_changes_no_table_that_names_the_h200(monkeypatch):
    generate = load_script("docs/generate.py")
    real = generate.read_rows

    def two_devices(name):
        found = real(name)
        other = {"device": "another", "ms": 1.0, "ours_ms": 1.0}
        return found + [{**row, **other} for row in found if name.startswith("h200")]

    monkeypatch.setattr(generate, "read_rows", two_devices)
    assert not list(generate.outdated())
