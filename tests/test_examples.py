"""The examples run, and show what they say. continuous_batching.py is in pool/test_pool.py."""

import pytest

from tests.helpers import ROOT, load_script


def test_every_example_is_run():
    here = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert here == {
        "compiled_step",
        "continuous_batching",
        "paper_step_by_step",
        "raw_ops",
        "transformers_generate",
        "vector_compression",
    }


def test_raw_ops(device):
    found = load_script("examples/raw_ops.py").main(["--device", str(device)])
    # 4 bits lose 0.8% of a Gaussian vector; attention adds keys and values
    assert found["vectors"] < 0.009 and found["attention"] < 0.025
    assert 0.08 < found["scores"] < 0.1


@pytest.mark.parametrize("preset", ["k8v8", "k5v4u"])
def test_transformers_generate(preset, device):
    pytest.importorskip("transformers")
    example = load_script("examples/transformers_generate.py")
    found = example.main(["--preset", preset, "--tokens", "8", "--device", str(device)])
    assert found["agreement"] == 1.0 and found["pages"] < 0.6 * found["bf16"]


def test_compiled_step(device):
    assert load_script("examples/compiled_step.py").main(["--device", str(device)]) == 40


def test_vector_compression(device):
    found = load_script("examples/vector_compression.py").main(["--device", str(device)])
    recalls = []
    for name, (error, theory, recall) in found.items():
        if name.startswith("MSE"):
            assert error == pytest.approx(theory, rel=0.02), name
            recalls.append(recall)
    assert recalls == sorted(recalls) and recalls[0] > 0.5 and recalls[-1] > 0.98


def test_paper_step_by_step(tmp_path):
    pytest.importorskip("matplotlib")
    found = load_script("examples/paper_step_by_step.py").main(["--out", str(tmp_path)])
    assert found["spread before"] > 300 and found["spread after"] < 1.2
    for bits in (1, 2, 3, 4):
        assert found[f"error at {bits} bits"] == pytest.approx(
            found[f"theory at {bits} bits"], 0.02
        )
    assert found["slope, least error"] < 0.9
    for name in ("1 bit + QJL", "unbiased scale"):
        assert found[f"slope, {name}"] == pytest.approx(1, abs=0.01)
    assert found["spread, 1 bit + QJL"] > 2 * found["spread, unbiased scale"]
    assert (tmp_path / "paper_step_by_step.png").stat().st_size > 10_000
