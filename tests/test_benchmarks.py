"""`make bench` runs every benchmark; a machine without what one needs changes no table."""

import re
import sys

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


def test_search_without_its_vectors(monkeypatch, capsys):
    assert run(monkeypatch, "bench_search.py") is None
    assert "needs faiss and a file of vectors" in capsys.readouterr().out


def test_attention_without_a_gpu(monkeypatch, capsys):
    assert run(monkeypatch, "bench_attention.py", "--device", "cpu") is None
    assert "needs a CUDA device" in capsys.readouterr().out


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
