"""Documents say what the code and the result files say, and lead to files that exist."""

import argparse
import ast
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import torch_turboquant as tq
from tests.helpers import ROOT, load_script, snippets, tiny_llama, without_downloads
from torch_turboquant import __main__ as command_line

DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("[!.]*/README.md")]

# With generated numbers.
SPEED_PAGES = ("attention", "codec", "cpu", "generation", "linear", "mla", "vllm")
PAGES_WITHOUT_KL = ("method", "vectors")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """docs/generate.py."""
    return load_script("docs/generate.py")


def test_generated_blocks_are_up_to_date(generate):
    assert not list(generate.outdated()), "run make docs"


def test_other_numbers_would_show(generate, monkeypatch):
    real = generate.results.read_rows

    def slower(name):
        times = ("ms", "us", "ours_ms", "tpot_ms", "ttft_ms")
        return [{**row, **{t: 2 * row[t] for t in times if row.get(t)}} for row in real(name)]

    monkeypatch.setattr(generate.results, "read_rows", slower)
    pages = [f"docs/measurements/performance_{page}.md" for page in SPEED_PAGES]
    pages += ["README.md", "docs/latent.md", "docs/performance.md", "docs/weights.md"]
    assert set(generate.outdated()) == set(pages)
    explained = ("split_kv", "key_tiles", "row_tiles")  # pages without generated numbers
    assert set(ROOT.glob("docs/measurements/performance_*.md")) - {ROOT / p for p in pages} == {
        ROOT / "docs" / "measurements" / f"performance_{page}.md" for page in explained
    }


def test_other_quality_would_show(generate, monkeypatch):
    real = generate.quality_tables.read_rows

    def worse(name, missing_ok=False):
        found = real(name, missing_ok)
        return [{**row, "kl": 2 * row["kl"]} if "kl" in row else row for row in found]

    monkeypatch.setattr(generate.quality_tables, "read_rows", worse)
    pages = {str(path.relative_to(ROOT)) for path in ROOT.glob("docs/measurements/quality_*.md")}
    pages -= {f"docs/measurements/quality_{page}.md" for page in PAGES_WITHOUT_KL}
    assert set(generate.outdated()) == {"docs/quality.md", *pages}


def test_every_block_of_a_page_is_generated(generate):
    """A block that no function writes would keep its numbers for ever."""
    for path in DOCUMENTS:
        blocks = re.findall(r"^<!-- (?!end)(.*?) -->$", path.read_text(), re.MULTILINE)
        known = generate.BLOCKS.get(path.relative_to(ROOT).as_posix(), {})
        assert sorted(blocks) == sorted(known), path


def test_every_table_is_on_a_page(generate):
    shown = [name for names in generate.quality_tables.PAGES.values() for name in names]
    assert sorted(shown) == sorted(generate.quality_tables.TABLES)


def test_the_answers_fit_two_screens():
    for page in ("quality", "performance"):
        lines = (ROOT / "docs" / f"{page}.md").read_text().splitlines()
        prose = [line for line in lines if not line.startswith("|")]
        assert len(lines) <= 100 and sum(len(line.split()) for line in prose) <= 900, page


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_wrapped(path):
    """At 120 columns at most, but for tables, code, pictures and words that cannot be broken."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^<!-- ops -->.*?^<!-- end -->$", "", text, flags=re.MULTILINE | re.DOTALL)
    for line in text.splitlines():
        broken = re.sub(r"`[^`]*`|\]\([^)]*\)", "", line).strip("-* ")
        unbreakable = len(broken.split()) <= 3
        assert len(line) <= 120 or line.startswith(("|", "![", "#")) or unbreakable, line


@pytest.mark.parametrize(
    ("number", "title", "file"),
    [
        (0, "SmolLM2-135M", "quality_smollm2_135m_instruct"),
        (1, "Qwen2.5-Coder-1.5B", "quality_qwen2_5_coder_1_5b_instruct"),
        (2, "Gemma-3-270M", "quality_gemma_3_270m"),
    ],
)
def test_a_row_of_the_quality_page_by_hand(generate, number, title, file):
    wanted = {"cache": "k5v4u", "dtype": "float32", "context": 2048}
    found = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())
    (row,) = [row for row in found if wanted.items() <= row.items()]
    tables = generate.quality_tables
    lines = tables.main_table(tables.Results("quality")).splitlines()
    header, cells = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (lines[0], next(line for line in lines if "**k5v4u**" in line))
    )
    assert cells[1].split(" / ")[number] == f"{row['bits_per_value_8k']:.2f}"
    first = header.index(f"{title}: perplexity")
    assert header[first + 1 : first + 3] == ["KL", "top-1"]
    assert cells[first] == f"{100 * row['perplexity_change']:+.2f}%"
    assert cells[first + 1].split()[0] == f"{row['kl']:.4f}"
    assert cells[first + 2] == f"{100 * row['top1_agreement']:.1f}%"


def engine_row(config, point, **values):
    origin = {"device": "NVIDIA H200", "vllm": "0.99.0", "shape": "8b", "tensor_parallel": 1}
    origin["commit"] = "now"
    return {**origin, "config": config, "point": point, **values}


def test_engines_on_the_page_of_vllm(generate, monkeypatch, tmp_path):
    """With made-up rows: which are measured changes with every run."""
    steps = {"context": 32768, "sequences": 16}
    rows = [
        engine_row("k5v4u", "memory", cache_tokens=2000),
        engine_row("k5v4u", "16x32768", step_ms=10.0, tokens_s=1600.0, drafts=0, **steps),
        engine_row("turboquant_4bit_nc", "prompt8192", tokens_s=500.0),
        engine_row("k5v4u", "verify3:16x32768", step_ms=20.0, tokens_s=2000.0, drafts=3, **steps),
        engine_row("bf16", "memory", cache_tokens=600),
        engine_row("bf16", "16x32768", step_ms=20.0, tokens_s=800.0, drafts=0, **steps),
        engine_row("bf16", "full8192", step_ms=23.0, tokens_s=3041.0, drafts=0, **steps),
        {**engine_row("bf16", "1x128", tokens_s=9.0), "shape": "70b-cut", "tensor_parallel": 2},
    ]
    rows.append(engine_row("k4v4u", "16x32768", tokens_s=1.0, cache_gib=8))  # not in these tables
    for config, speed in (("fp8", 900.0), ("bf16", 600.0)):  # of an earlier run
        rows.append({**engine_row(config, "16x32768", tokens_s=speed), "commit": "then"})
    monkeypatch.setattr(generate.results, "RESULTS", tmp_path)
    assert "have not been measured" in generate.vllm.engine_speed()
    (tmp_path / "h200_vllm.json").write_text(json.dumps(rows))
    monkeypatch.setattr(generate.results, "read_rows", lambda name: rows)
    lines = generate.vllm.engine_speed().splitlines()
    assert lines[:3] == ["vLLM 0.99.0:", "", "|  | bf16 | fp8 | k5v4u | turboquant_4bit_nc |"]
    assert lines[4:] == [
        "| tokens that fit | 600 |  | 2,000 |  |",
        "| 16 x 32,768 | 20.00 ms, 800/s | 900/s (1.50x) | 10.00 ms, 1,600/s (2.00x) |  |",
        "| as many as fit x 8,192 | 23.00 ms, 3,041/s |  |  |  |",
        "| prompt of 8,192 |  |  |  | 500/s |",
        "| 16 x 32,768, 3 drafts |  |  | 20.00 ms, 2,000/s |  |",
        "",
        "vLLM 0.99.0, 16 layers of Llama-3.1-70B's shape, 2 GPUs:",
        "",
        "|  | bf16 |",
        "| --- | --- |",
        "| tokens that fit |  |",
        "| 1 x 128 | 9.0/s |",
    ]


def test_clients_on_the_page_of_vllm(generate, monkeypatch):
    times = {"first_token_s_median": 0.05, "first_token_s_p99": 0.094}
    times |= {"token_ms_median": 19.6, "token_ms_p99": 20.4}
    load = {"clients": 64, "context": 16384, "requests_s": 12.58, "tokens_s": 3202.8}
    point = "turns64x16384:256"
    rows = [engine_row(config, point, **load, **times) for config in ("k5v4u", "bf16")]
    rows.append(engine_row("bf16", "mix64", **{**load, "context": 0}, **times))
    rows.append(engine_row("bf16", "16x32768", step_ms=20.0, tokens_s=800.0))
    monkeypatch.setattr(generate.results, "read_rows", lambda name: rows)
    found = "12.6 | 3,203 | 0.05 s, 0.09 s | 20 ms, 20 ms |"
    assert generate.vllm.engine_clients().splitlines()[2:] == [
        f"| 64 conversations of 16,384 tokens | bf16 | {found}",
        f"| 64 conversations of 16,384 tokens | k5v4u | {found}",
        f"| 64 with prompts and answers as long as ShareGPT's | bf16 | {found}",
    ]
    assert "conversations" not in generate.vllm.engine_speed()


def test_the_server_on_the_page_of_vllm(generate, monkeypatch):
    """Most clients first, as fast as they are answered before a rate; bf16 before ours."""

    def row(config, point, preempted=0, cache_gib=8.0):
        times = {"cache_gib": cache_gib, "first_ms": 11830.0, "first_p99_ms": 14310.0}
        times |= {"token_ms": 14.37, "token_p99_ms": 42.54, "requests_s": 30.32, "tokens_s": 9310.0}
        return engine_row(config, point, **times, requests=2048, preempted=preempted)

    rows = [row("k5v4u", "mix64"), row("k5v4u", "mix512@25"), row("k5v4u", "mix512")]
    rows.append(row("bf16", "mix512", preempted=1988))
    rows.append(row("k5v4u", "mix256", cache_gib=4.0))
    monkeypatch.setattr(generate.vllm, "h200_rows", lambda name: rows)
    found = "30.3 | 9,310 | 11.83 s, 14.31 s | 14.4 ms, 42.5 ms"
    assert generate.vllm.server_clients().splitlines()[2:] == [
        f"| 512 at a time | bf16 | {found} | 1,988 in 2,048 requests |",
        f"| 512 at a time | k5v4u | {found} | 0 in 2,048 requests |",
        f"| 512 at most, 25 requests/s come | k5v4u | {found} | 0 in 2,048 requests |",
        f"| 256 at a time, 4 GiB | k5v4u | {found} | 0 in 2,048 requests |",
        f"| 64 at a time | k5v4u | {found} | 0 in 2,048 requests |",
    ]


def test_steps_on_the_page_of_sglang(generate, monkeypatch):
    """Clients are no steps; another model and several GPUs have a table of their own."""

    def row(config, point, **values):
        command = "python x.py --out out --points memory"
        return {"config": config, "point": point, "command": command, **values}

    several = {"shape": "70b-cut", "tensor_parallel": 2}
    rows = [
        row("fa3", "memory", cache_tokens=100),
        row("k5v4u", "memory", cache_tokens=300),
        row("fa3", "16x32768", step_ms=20.0, tokens_s=800.0),
        row("k5v4u", "16x32768", step_ms=10.0, tokens_s=1600.0),
        row("k5v4u", "turns64x16384:256", tokens_s=900.0, clients=64),
        row("fa3", "memory", cache_tokens=200, **several),
        row("k5v4u", "memory", cache_tokens=640, **several),
        row("fa3", "16x32768", step_ms=9.0, tokens_s=1800.0, **several),
        row("k5v4u", "16x32768", step_ms=6.0, tokens_s=2700.0, **several),
    ]
    monkeypatch.setattr(generate.sglang, "h200_rows", lambda name: rows)
    assert generate.sglang.sglang_speed().splitlines() == [
        "|  | bf16, FA3 | k5v4u |",
        "| --- | --- | --- |",
        "| tokens that fit | 100 | 300 (3.00x) |",
        "| 16 x 32,768 | 20.00 ms | 10.00 ms (2.00x) |",
        "",
        "SGLang, 16 layers of Llama-3.1-70B's shape, 2 GPUs:",
        "",
        "|  | bf16, FA3 | k5v4u |",
        "| --- | --- | --- |",
        "| tokens that fit | 200 | 640 (3.20x) |",
        "| 16 x 32,768 | 9.00 ms | 6.00 ms (1.50x) |",
        "",
        "[h200_sglang.json](../benchmarks/results/h200_sglang.json): `python x.py`",
    ]


def test_rows_of_several_runs_say_so(generate):
    several = generate.results.several_runs
    one, other = {"commit": "abc"}, {"commit": "def-dirty"}
    assert several({"k5v4u": [one, one], "bf16": [one]}) == ""
    assert several({"bf16": [one], "k5v4u": [other], "fp8": [one]}) == (
        "They were measured in runs of several commits: bf16 and fp8 at abc; "
        "k5v4u at def with uncommitted changes."
    )


def test_quality_on_the_page_of_sglang(generate, monkeypatch, tmp_path):
    """Beside the cache for transformers, in float32 over 2,048 tokens."""
    row = {"kl": 0.0008, "kl_interval": [0.0006, 0.001], "top1_agreement": 0.9812}
    sizes = {"segments": 2, "score_tokens": 160, "prefill": 512, "dtype": "float32"}
    measured = [
        {"row": "uncompressed decode", "cache": "uncompressed", **sizes},
        {"row": "k4v4 decode", "cache": "k4v4", **row},
        {"row": "k4v4 hit", "cache": "k4v4", **row, "kl": 0.0012},
        {"row": "k5v4u decode", "cache": "k5v4u", **row},
    ]
    reference = {"dtype": "float32", "context": 2048, **row, "kl": 0.001}
    files = {
        "sglang_quality_gemma_3_270m": measured,
        "quality_gemma_3_270m": [
            {"cache": "k4v4", **reference},
            {"cache": "k5v4u", **reference, "kl": 0.0004},
            {"cache": "k5v4u", **reference, "kl": 7.0, "context": 8192},
        ],
    }
    monkeypatch.setattr(generate.results, "RESULTS", tmp_path)
    assert "have not been measured" in generate.sglang.sglang_quality()
    (tmp_path / "sglang_quality_gemma_3_270m.json").touch()
    monkeypatch.setattr(generate.results, "read_rows", files.__getitem__)
    assert generate.sglang.sglang_quality().splitlines()[2:] == [
        "| Gemma-3-270M | k5v4u | 0.0008 ± 0.0002 (2.00x), 98.1% |  | 0.0004 ± 0.0002, 98.1% |",
        "| Gemma-3-270M | k4v4 | 0.0008 ± 0.0002 (0.80x), 98.1% "
        "| 0.0012 ± 0.0002 (1.20x), 98.1% | 0.0010 ± 0.0002, 98.1% |",
        "",
        "Tokens predicted: [Gemma-3-270M]"
        "(../benchmarks/results/sglang_quality_gemma_3_270m.json): 2 x 160 behind 512,",
        "in float32.",
    ]


def test_quality_of_engines_on_the_page_of_vllm(generate, monkeypatch, tmp_path):
    row = {"cache": "k5v4u", "chunk": 64, "kl": 0.0044, "kl_interval": [0.004, 0.005]}
    row |= {"top1_agreement": 0.9603, "perplexity_change": -0.0016}
    none = {"cache": "k5v4u:none", "chunk": 64, "kl": 6.987, "kl_interval": [6.5, 7.5]}
    none |= {"top1_agreement": 0.012, "perplexity_change": 1233.6}
    base = {"cache": "uncompressed", "chunk": 64, "segments": 2, "score_tokens": 1536}
    files = {
        "vllm_quality_gemma_3_270m": [{**base, "dtype": "float32"}, row],
        "vllm_quality_qwen2_5_coder_1_5b_instruct": [{**base, "dtype": "bfloat16"}, row, none],
    }
    monkeypatch.setattr(generate.results, "RESULTS", tmp_path)
    assert "have not been measured" in generate.vllm.engine_quality()
    for name in files:
        (tmp_path / f"{name}.json").touch()
    monkeypatch.setattr(generate.results, "read_rows", files.__getitem__)
    assert generate.vllm.engine_quality().splitlines() == [
        "| cache | chunk | Qwen2.5-Coder-1.5B | Gemma-3-270M |",
        "| --- | --- | --- | --- |",
        "| k5v4u | 64 | 0.0044 ± 0.0005, 96.0%, -0.16% | 0.0044 ± 0.0005, 96.0%, -0.16% |",
        "| k5v4u:none | 64 | 6.99 ± 0.50, 1.2%, 1,235x |  |",
        "",
        "Tokens predicted, and the dtype of the model: Qwen2.5-Coder-1.5B: 3,072 in chunks of 64, "
        "in bfloat16;",
        "Gemma-3-270M: 3,072 in chunks of 64, in float32.",
    ]


ELSEWHERE = {
    "bba556362c71",  # distortion
    "a30dd936778f",  # eviction_*
    "1fec00562fb4",  # quality_*, as the next one
    "1aea22b04a08",
}
"""What rows name as their commit and this history does not have; no other row may."""


def test_results_name_commits_of_this_history():
    """Of the key "commit": a command may name one of a history that was rewritten since."""

    def git(*arguments, **given):
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, **given)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("this checkout has no history")
    files = (ROOT / "benchmarks" / "results").glob("*.json")
    named = {row["commit"] for path in files for row in json.loads(path.read_text())} - ELSEWHERE
    assert len(named) > 30
    asked = "\n".join(f"{name}^{{commit}}" for name in sorted(named))
    answers = git("cat-file", "--batch-check", input=asked, check=True).stdout.splitlines()
    assert not [answer for answer in answers if " commit " not in answer]


def test_another_docstring_would_show(generate, monkeypatch):
    monkeypatch.setattr(generate.ops.tq.pack, "__doc__", "Something else.")
    assert list(generate.outdated()) == ["docs/ops.md"]


def test_every_op_has_its_text(generate):
    text = (ROOT / "docs" / "ops.md").read_text()
    for name in generate.ops.op_names():
        assert f"\n{name}(" in text, name


SHOWN = {
    "attention_h200": ["h200_attention"],
    "cpu": ["cpu", "demo_cpu"],
    "distortion": ["distortion"],
    "strategies": ["strategies_smollm2_135m_instruct"],
    "weights": ["weights_smollm2_135m_instruct"],
}


def test_pictures_show_the_present_results(generate):
    """Those of benchmarks/results have the name of their rows."""
    image = pytest.importorskip("PIL.Image")
    found = {*ROOT.glob("docs/**/*.png"), *ROOT.glob("benchmarks/results/*.png")}
    assert found == {ROOT / path for path in generate.PICTURES}
    for path in found:
        results = [path.stem] if path.parent.name == "results" else SHOWN[path.stem]
        with image.open(path) as drawn:
            shown = " ".join(map(generate.results.digest, results))
            assert drawn.info.get("Source") == shown, f"{path}: run make docs"


def test_contenders_that_ran_are_on_the_page_of_attention(generate):
    """None has a name that the page leaves out, and the fastest is one of them."""
    attention = generate.attention
    ours = ("ours_ms", "ours_eager_ms", "parts_ms", "best_bf16_ms", "fp8_ms")
    for row in attention.h200_rows("h200_attention"):
        timed = attention.timed(row)
        assert row["best_bf16_name"] in timed and not row["absent"].keys() & set(timed)
        assert len(timed) == sum(key.endswith("_ms") and key not in ours for key in row)


def test_pictures_mark_the_default(generate):
    attention = generate.attention
    colors = attention.preset_colors(["k8v8", "k4v4", attention.DEFAULT])
    assert colors[attention.DEFAULT] == "tab:orange" and len(set(map(str, colors.values()))) == 3


def anchors(path: Path) -> list[str]:
    """What headings are called in links: small letters, dashes, no punctuation."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            file = path.parent / name if name else path
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


# ---- commands


COMMAND = r"torch_turboquant |python (?:benchmarks|docs|examples|wheels)/\w+\.py"


def commands(text: str) -> list[list[str]]:
    """Those of this package and of its programs, in blocks of code and in sentences."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    spans = re.findall(rf"`((?:{COMMAND})[^`]*)`", re.sub(r"\s+", " ", text))
    found = [re.match(rf"(?:\$ )?((?:{COMMAND}).*?)(?:  +#.*)?$", line) for line in lines]
    return [shlex.split(line) for line in [*spans, *(match[1] for match in found if match)]]


class Parsed(Exception):
    """A program understands its arguments."""


@pytest.fixture
def only_parses(monkeypatch, tmp_path) -> None:
    """Programs end when they have parsed their arguments, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    real = argparse.ArgumentParser.parse_args

    def parse_args(self, *given, **more):
        real(self, *given, **more)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)


def check_command(monkeypatch, command: list[str]) -> None:
    words = ["cpu" if word == "cuda" else word for word in command]  # whatever this machine has
    for name in re.findall(r"\w+\.txt", " ".join(words)):
        Path(name).touch()
    if words[0] == "torch_turboquant":
        pytest.importorskip("transformers")  # its extra, which eval needs
        if len(words) == 2 and not words[1].startswith("-"):  # a name in a sentence
            words.append("--help")
        with pytest.raises(SystemExit if "--help" in words else Parsed, match=r"^0?$"):
            command_line.main(words[1:])
        return
    program = ROOT / words[1]
    monkeypatch.setattr(sys, "argv", [str(program), *words[2:]])
    monkeypatch.syspath_prepend(program.parent)
    with pytest.raises(Parsed):
        runpy.run_path(str(program), run_name="__main__")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_work_where_the_reader_stands(path, monkeypatch, only_parses):
    """As the script, which a clone does not hide; and with arguments that are understood."""
    text = path.read_text()
    explained = path.name in ("CHANGELOG.md", "troubleshooting.md")
    assert explained or "python -m torch_turboquant" not in text
    for command in commands(text):
        check_command(monkeypatch, command)


PROGRAMS = [path for path in sorted(ROOT.glob("benchmarks/*.py")) if "python b" in path.read_text()]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_commands_of_a_benchmark_are_understood(path, monkeypatch, only_parses):
    """Those of its docstring, one a line, two spaces before what they do."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    found = re.findall(rf"^ *({COMMAND}.*?)(?:  .*)?$", text, re.MULTILINE)
    assert found
    for line in found:
        check_command(monkeypatch, shlex.split(line))


def test_a_wrong_command_is_noticed(monkeypatch, only_parses):
    for line in (
        "torch_turboquant memory --no-such",
        "python benchmarks/bench_host.py --dry-r --each x",
    ):
        with pytest.raises(SystemExit, match="2"):
            check_command(monkeypatch, line.split())


# ---- messages of docs/troubleshooting.md


def texts_in(tree: ast.AST) -> list[str]:
    """String constants; what an f-string fills in is a gap."""
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (n.value if isinstance(n, ast.Constant) else "\0" for n in node.values)
            texts.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return texts


def python_texts(path: Path) -> list[str]:
    return texts_in(ast.parse(path.read_text()))


def python_messages(path: Path) -> list[list[str]]:
    """The texts of each exception that is made; without those that pass on another's."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    errors = [c for c in calls if ast.unparse(c.func).endswith(("Error", "PoolExhausted"))]
    return [texts for texts in map(texts_in, errors) if texts]


def joined(code: str) -> str:
    """String literals of C++ as one text with gaps."""
    return "\0".join(re.findall(r'"((?:[^"\\]|\\.)*)"', code))


def cpp_texts(path: Path) -> list[str]:
    """String literals; those of one call, or one after the other, are one text with gaps."""
    calls = re.findall(r'"(?:[^"\\]|\\.)*"(?:[^";{}]|"(?:[^"\\]|\\.)*")*', path.read_text())
    return [joined(call) for call in calls]


def cpp_messages(path: Path) -> list[str]:
    """The text of each check."""
    calls = re.findall(r"STD_TORCH_CHECK\((.*?)\);", path.read_text(), re.DOTALL)
    return [joined(call) for call in calls]


def quoted_messages() -> list[str]:
    """First cells of the tables, each quoted text: without those that others raise."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    cells = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    own = [cell for cell in cells if not re.search(r"\(by (torch|transformers)", cell)]
    found = [m for cell in own for m in re.findall(r"`(.+?)`", cell)]
    return [message for message in found if message not in ("PoolExhausted", "center=")]


def stands_in(text: str, message: str) -> bool:
    """Whether a text has the parts of a quoted message, in their order."""
    at = 0
    for part in map(str.strip, message.split("…")):
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def test_quoted_messages_exist():
    texts = [text for path in ROOT.glob("torch_turboquant/**/*.py") for text in python_texts(path)]
    texts += python_texts(ROOT / "setup.py")
    for path in ROOT.glob("csrc/**/*.*"):
        texts += cpp_texts(path)
    messages = quoted_messages()
    assert len(messages) > 50
    for message in messages:
        assert any(stands_in(text, message) for text in texts), message


def test_every_message_is_explained():
    """By a row of docs/troubleshooting.md: its own, or that of its kind."""
    messages = quoted_messages()
    found = [
        (path, m) for path in ROOT.glob("torch_turboquant/**/*.py") for m in python_messages(path)
    ]
    found += [(path, [m]) for path in ROOT.glob("csrc/**/*.*") for m in cpp_messages(path)]
    assert len(found) > 200
    cuda_only = ": "  # CUDA's own reason, between the name of the op and advice
    unexplained = [
        f"{path.relative_to(ROOT)}: {' / '.join(texts)}"
        for path, texts in found
        if texts != [cuda_only]
        and not any(stands_in(text, message) for text in texts for message in messages)
    ]
    assert not unexplained, "\n".join(unexplained).replace("\0", "…")


def test_every_row_has_a_cause_and_a_cure():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| (.+?) \|(.*?)\|(.*?)\|$", text, re.MULTILINE)
    assert len(rows) > 80
    assert not [row[0] for row in rows if not (row[1].strip() and row[2].strip())]


# ---- snippets


def with_snippets() -> list[str]:
    """Documents with Python code; that of docs/ops.md is generated, and nothing but signatures."""
    names = (path.relative_to(ROOT).as_posix() for path in DOCUMENTS)
    return [name for name in names if name != "docs/ops.md" and snippets(name)]


def test_documents_with_snippets():
    assert {"README.md", "docs/migration.md", "docs/pool.md", "docs/transformers.md"} <= set(
        with_snippets()
    )


@pytest.mark.parametrize("document", with_snippets())
def test_snippets_are_complete_and_print_something(document, tmp_path, monkeypatch, capsys):
    """As a reader would type them, one after the other: later ones may use earlier names."""
    without_downloads(monkeypatch)
    import transformers

    def quantized(*_, **__):
        return transformers.DynamicCache()

    monkeypatch.setattr(transformers, "QuantizedCache", quantized)  # takes another package
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)  # takes half a minute
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for snippet in snippets(document):
        exec(compile(snippet, document, "exec"), names)
        assert capsys.readouterr().out, snippet
    if document == "docs/transformers.md":
        assert names["out"].shape == (8, 199) and names["cache"].sequences.static
        assert names["cache"].get_seq_length() == 102
    if document == "docs/migration.md":
        assert names["out"].shape == (1, 340) and names["cache"].config.recent_window == 128


class Words:
    """A tokenizer: the length of every word is its token, with the space before it, as in BPE."""

    def __call__(self, text, return_tensors):
        ids = torch.tensor([[len(word) for word in re.findall(r" ?\S+|\s", text)]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def decode(self, ids):
        return " ".join(map(str, ids.tolist()))


def test_the_documented_prefix_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "transformers.md").read_text()
    copies, files = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[3:5]
    from torch_turboquant.integrations.transformers import TurboQuantCache

    names = {"model": tiny_llama(), "tokenizer": Words(), "TurboQuantCache": TurboQuantCache}
    names["torch"] = torch
    exec(compile(copies, "transformers.md", "exec"), names)
    expected = capsys.readouterr().out
    assert len(expected.splitlines()) == 2
    begins = names["tokenizer"](names["instructions"], "pt")["input_ids"]
    assert torch.equal(names["asked"]["input_ids"][:, : begins.shape[1]], begins)
    exec(compile(files, "transformers.md", "exec"), names)
    tokens, size = map(int, capsys.readouterr().out.split())
    assert tokens == names["prefix"].get_seq_length() > 100
    assert size == (tmp_path / "prefix.safetensors").stat().st_size
    loop = copies[copies.index("for question") :]
    exec(compile(loop, "transformers.md", "exec"), names)
    assert capsys.readouterr().out == expected


# ---- docs/migration.md

MIGRATION = (ROOT / "docs" / "migration.md").read_text()


def test_sizes_in_the_migration_table():
    rows = re.findall(r"^\| [^|]+ \| \d+ \| `([^|]+)` \| (\d+) \|", MIGRATION, re.MULTILINE)
    assert len(rows) == 6
    for name, size in rows:
        config = tq.preset(name, 128) if name in tq.PRESETS else tq.CacheConfig(128, 3, 4)
        assert config.bytes_per_token == int(size), name


# ---- files that documents name


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(path):
    named = re.findall(
        r"`((?:csrc|tests|docs|benchmarks|examples|wheels|torch_turboquant)/[\w/.]+\.\w+)`",
        path.read_text(),
    )
    for name in set(named):
        assert (ROOT / name).exists() or name.endswith(".so"), name


def test_the_map_names_what_exists():
    """The tree of CONTRIBUTING.md: a name at the start of each line, below the folder above it."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tree = re.search(r"^```\n(csrc/\n.*?)```", text, re.MULTILINE | re.DOTALL)
    assert tree
    folders: list[str] = []
    found = 0
    for line in tree[1].splitlines():
        name = re.match(r"( *)([\w.]+/?)(?:  |$)", line)
        if not name or len(name[1]) > 4:
            continue  # a description that goes on
        folders = [*folders[: len(name[1]) // 2], name[2]]
        assert ROOT.joinpath(*folders).exists(), line
        found += 1
    assert found > 30
