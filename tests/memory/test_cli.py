"""The memory command."""

import json
import re
from pathlib import Path

import pytest
import torch

import torch_turboquant as tq
from tests.memory.harness import GB, PLAIN, GiB, MiB, caches, command, nbytes
from torch_turboquant import __main__ as command_line
from torch_turboquant import _extras
from torch_turboquant.memory.cli import parse_count, parse_size, parse_tokens

DOCS = (Path(__file__).parents[2] / "docs/memory.md").read_text()


@pytest.mark.parametrize("text, tokens", [
    ("131072", 131072), ("128K", 131072), ("128k", 131072), ("1M", 2**20), ("131,072", 131072),
    ("131_072", 131072), ("0", 0),
])  # fmt: skip
def test_numbers_of_tokens(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "128G", "1.5K", "1,31072", "-5", "K", "128 K"])
def test_numbers_of_tokens_that_are_refused(text):
    with pytest.raises(ValueError, match="is no number of tokens; write 131072 or 128K"):
        parse_tokens(text)


@pytest.mark.parametrize("text, size", [
    ("80", 80 * GiB), ("1.5GiB", 3 * GiB // 2), ("640GB", 640 * GB), ("2 MiB", 2 * MiB)
])  # fmt: skip
def test_sizes(text, size):
    assert parse_size(text) == size


def test_sizes_and_counts_that_are_refused():
    assert (parse_count("70B"), parse_count("1.5e3"), parse_count("135M")) == (
        70 * 10**9,
        1500,
        135 * 10**6,
    )
    for text in ("", "GB", "-1GB", "5gb", "5 parsecs", "1e3"):
        with pytest.raises(ValueError, match="no size"):
            parse_size(text)
    for text in ("", "B", "-3B", "3b"):
        with pytest.raises(ValueError, match="no number of parameters"):
            parse_count(text)
    for parse, text in ((parse_size, "9" * 400), (parse_count, "1e999"), (parse_tokens, "9" * 400)):
        with pytest.raises(ValueError, match="is too large, supported: below 2"):
            parse(text)


def test_the_command_on_a_configuration(capsys, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({**PLAIN, "head_dim": 128, "sliding_window": 100, "sliding_window_pattern": 2})
    )
    facts, rows = caches(capsys, f"--config {tmp_path} --context 1000 --gpu-memory 1GB")
    assert facts["layers"] == [
        {"count": 2, "kv_heads": 2, "head_dim": 128, "window": 100},
        {"count": 2, "kv_heads": 2, "head_dim": 128, "window": 0},
    ]
    assert list(rows) == ["bf16", "fp8", *tq.PRESETS]
    k4v4 = rows["k4v4"]
    assert k4v4["bytes_per_token"] == 4 * 2 * 132
    # 1,000 tokens are 32 pages; 100 + 31 that 32 queries see touch 6
    assert k4v4["pages"] == 2 * 2 * 132 * 32 * (32 + 6)
    assert k4v4["tail"] == 4 * 2 * (4 + 64 + 31) * 2 * 128 * 2
    assert k4v4["requests"] == (GB - k4v4["constants"]) // k4v4["request"]
    assert rows["bf16"]["pages"] == 2 * 2 * 512 * 32 * (32 + 6)
    _, whole = caches(capsys, f"--config {tmp_path} --context 1000 --whole-sliding")
    assert whole["k4v4"]["pages"] == 4 * 2 * 132 * 32 * 32
    assert whole["k4v4"]["requests"] is None


def test_heads_that_make_no_sense(capsys, tmp_path):
    for config, changes, text in (
        (PLAIN, "--kv-heads -2", "kv_heads is -2, supported: 1 and more"),
        (PLAIN, "--kv-heads 0", "kv_heads is 0, supported: 1 and more"),
        (V3, "--kv-heads 7 --head-dim 33", "latent attention keeps no heads"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert text in command(capsys, f"--config {tmp_path} --context 1000 {changes}", code=1)


V3 = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512,
      "qk_rope_head_dim": 64}  # fmt: skip


def test_the_command_on_latent_attention(capsys, tmp_path):
    """A request of 128K tokens of DeepSeek-V3's shape: 9.2 GB in bf16, 3.1 GB at 4 bits."""
    (tmp_path / "config.json").write_text(json.dumps(V3))
    lines = f"--config {tmp_path}", "--layers 61 --latent-dim 512 --rope-dim 64"
    for line in lines:
        facts, rows = caches(capsys, line + " --context 128K")
        assert facts["layers"] == [{"count": 61, "latent_dim": 512, "rope_dim": 64, "window": 0}]
        assert list(rows) == ["bf16", "fp8", *tq.LATENT_PRESETS]
        assert facts["page_size"] == 64
        for name, row in rows.items():
            if name in tq.LATENT_PRESETS:
                bits = tq.LATENT_PRESETS[name].bits
                assert row["bytes_per_token"] == 61 * (512 * bits // 8 + 2 + 2 * 64)
        assert round(rows["bf16"]["request"] / GB, 1) == 9.2
        assert round(rows["k4"]["request"] / GB, 1) == 3.1
        assert (
            rows["k4"]["bytes_per_token"] == 61 * 386 and rows["k5u"]["bytes_per_token"] == 61 * 450
        )
    text = command(capsys, lines[1] + " --context 128K --page-size 128")
    assert text.startswith(
        "61 layers: latent rows of 512, keys with RoPE of 64\n131,072 tokens in "
    )
    assert "pages of 128" in text


def test_packed_experts_are_those_of_the_model(capsys, tmp_path):
    pytest.importorskip("transformers")
    from tests.transformers.test_weight_experts import make
    from torch_turboquant.integrations.transformers import TurboQuantConfig, quantize

    with torch.no_grad():
        model = make("gpt_oss")
    model.config.save_pretrained(tmp_path)
    line = f"--config {tmp_path} --context 1000 --pack-weights 4 --parameters-dtype bfloat16"
    facts, _ = caches(capsys, line)
    rows = quantize(model, TurboQuantConfig(4))
    assert facts["weights"]["packed"] == nbytes(*model.parameters())
    assert facts["weights"]["layers"] == len(rows)


@pytest.mark.parametrize(("bits", "dtype"), [(4, "bfloat16"), (8, "float32")])
def test_packed_weights_are_those_of_the_model(bits, dtype, capsys, tmp_path):
    pytest.importorskip("transformers")
    from tests.helpers import tiny_llama
    from torch_turboquant.integrations.transformers import TurboQuantConfig, quantize

    model = tiny_llama(hidden_size=128, tie_word_embeddings=bits == 8).to(getattr(torch, dtype))
    model.config.save_pretrained(tmp_path)
    line = f"--config {tmp_path} --context 1000 --pack-weights {bits} --parameters-dtype {dtype}"
    facts, _ = caches(capsys, line)
    plain = nbytes(*model.parameters())
    quantize(model, TurboQuantConfig(bits))
    assert facts["weights"]["plain"] == plain
    assert facts["weights"]["packed"] == nbytes(*model.parameters()) < plain
    assert facts["weights"]["layers"] == (15 if bits == 4 else 14) and facts["budget"] is None
    assert facts["weights"]["left_alone"] == model.config.quantization_config.left_alone
    facts, _ = caches(capsys, line + " --gpu-memory 1GB")
    assert facts["budget"] == 10**9 - nbytes(*model.parameters())
    shown = command(capsys, line)
    assert f"MiB of weights, {facts['weights']['layers']} layers packed; " in shown
    model.config.save_pretrained(tmp_path)
    said = command(capsys, line, code=1)
    assert "are quantised already (torch_turboquant)" in said


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--layers 2 --kv-heads 2 --head-dim 64 --pack-weights 4", "--pack-weights needs --config"),
        ("--config FOLDER --pack-weights 4 --parameters-dtype fp8", "float16, bfloat16, not fp8"),
        ("--config FOLDER --pack-weights 5", "bits is 5"),
    ],
)
def test_packed_weights_that_cannot_be_planned(line, says, capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, "head_dim": 128}))
    line = line.replace("FOLDER", str(tmp_path))
    assert says in command(capsys, f"{line} --context 1000", code=1)


def test_a_language_model_whose_weights_are_quantised(capsys, tmp_path):
    """As files of multimodal models have it."""
    inner = {**PLAIN, "head_dim": 128, "quantization_config": {"quant_method": "int4"}}
    config = {"model_type": "llava", "text_config": inner}
    config["architectures"] = ["LlavaForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = command(capsys, f"--config {tmp_path} --context 1000 --pack-weights 4", code=1)
    assert "are quantised already (int4): give the configuration of the original model" in said


def test_packed_weights_without_transformers(capsys, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, "head_dim": 128}))
    monkeypatch.setattr(_extras.importlib.util, "find_spec", lambda name: None)
    said = command(capsys, f"--config {tmp_path} --context 1000 --pack-weights 4", code=1)
    assert said.startswith("memory needs the package transformers") and "[transformers]" in said


def test_options_of_the_command(capsys):
    model = "--layers 4 --kv-heads 2 --head-dim 128 --context 64 "
    _, rows = caches(capsys, model + "--key-bits 5 --value-bits 8 --boundary-layers 1")
    k3v2, k8v8 = (2 * tq.preset(name, 128).bytes_per_token for name in ("k3v2", "k8v8"))
    assert rows["k3v2"]["bytes_per_token"] == 2 * k3v2 + 2 * k8v8
    by_hand = 2 * tq.CacheConfig(128, 5, 8).bytes_per_token
    assert rows["k5v8 by hand"]["bytes_per_token"] == 2 * by_hand + 2 * k8v8
    _, rows = caches(
        capsys,
        model + "--sink-tokens 1 --recent-window 2 --max-q-len 3 --tail-dtype float32 "
        "--page-size 128 --no-center",
    )
    assert rows["k4v4"]["tail"] == 4 * 2 * (1 + 2 + 2) * 2 * 128 * 4
    assert rows["k4v4"]["pages"] == 4 * 2 * 128 * 132
    with_center = caches(capsys, model)[1]["k4v4"]["constants"]
    assert with_center - rows["k4v4"]["constants"] == 3 * 4 * 2 * 128 * 4


@pytest.mark.parametrize("line, match", [
    ("", "give --config"),
    ("--layers 3", "--layers needs --kv-heads and --head-dim"),
    ("--layers 3 --kv-heads 1 --head-dim 64 --config x", "give one of them"),
    ("--layers 0 --kv-heads 1 --head-dim 64", "layers is 0, supported: 1 and more"),
    ("--config nowhere", "there is no nowhere, and nothing is downloaded"),
    ("--config org/name", "nothing is downloaded. To fetch one: hf download org/name config.json"),
    ("--config my/config.json", "hf download NAME config.json --local-dir FOLDER"),
    ("--layers 3 --kv-heads 1 --head-dim 22", "head_dim is 22, supported"),
    ("--layers 3 --kv-heads 1 --head-dim 64 --key-bits 4", "come together"),
    ("--layers 3 --latent-dim 512", "--latent-dim and --rope-dim come together"),
    ("--latent-dim 512 --rope-dim 64", "--latent-dim and --rope-dim come together"),
    ("--layers 3 --latent-dim 512 --rope-dim 64 --head-dim 64", "keeps no heads"),
    ("--layers 3 --latent-dim 512 --rope-dim 64 --boundary-layers 1", "have one preset"),
    ("--layers 3 --latent-dim 500 --rope-dim 64", "latent_dim"),
    ("--layers 3 --kv-heads 1 --head-dim 64 --key-bits 7 --value-bits 4", "key_bits is 7"),
    ("--layers 3 --kv-heads 1 --head-dim 64 --page-size 0", "page_size is 0, supported: 16"),
    ("--layers 3 --latent-dim 512 --rope-dim 64 --page-size 0", "page_size is 0, supported"),
    ("--layers 3 --kv-heads 1 --head-dim 64 --weights 3", "need --gpu-memory"),
    (
        "--layers 3 --kv-heads 1 --head-dim 64 --gpu-memory 9 --weights 3 --parameters-dtype fp8",
        "--parameters-dtype needs --parameters or --pack-weights",
    ),
    ("--layers 3 --kv-heads 1 --head-dim 64 --gpu-memory 80 --parameters 70B",
     "130.39 GiB, the memory has 80.00 GiB"),
])  # fmt: skip
def test_arguments_that_are_refused(capsys, line, match):
    assert match in command(capsys, "--context 10 " + line, code=1)


@pytest.mark.parametrize("option", ["--gpu-memory", "--weights", "--parameters", "--context"])
def test_numbers_that_nothing_holds(capsys, option):
    number = "1e999" if option == "--parameters" else "9" * 400
    line = ["--layers", "3", "--kv-heads", "1", "--head-dim", "64", "--context", "10"]
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["memory", *line, option, number])
    error = capsys.readouterr().err
    assert f"argument {option}: {number} is too large, supported: below 2^63" in error
    for huge in (f"--layers {'9' * 400} --kv-heads 1", f"--layers 1 --kv-heads {'9' * 400}"):
        error = command(capsys, f"{huge} --head-dim 64 --context 10", code=1)
        assert error.startswith("memory: ")


def test_the_documented_output(capsys):
    (block,) = re.findall(r"```\n\$ torch_turboquant memory (.*?)\n(.*?)```", DOCS, re.S)
    line, output = block
    assert command(capsys, line) == output


def test_a_path_that_the_system_refuses(capsys):
    """A name that is too long, or a file in a folder that this user may not enter."""
    error = command(capsys, f"--context 10 --config {'a' * 300}", code=1)
    assert error.startswith("memory: cannot read the model configuration a") and "too long" in error


@pytest.mark.parametrize("content", ["[" * 100_000, f'{{"hidden_size": {"1" * 5000}}}', "{"])
def test_a_configuration_that_is_no_json(capsys, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    error = command(capsys, f"--context 10 --config {tmp_path}", code=1)
    assert error.startswith(f"memory: cannot read the model configuration {tmp_path}")
