"""Packed weights that two processes share: tensor parallelism of transformers, on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.transformers.families import VERSION
from tests.transformers.test_weight_experts import make as make_mixture
from tests.transformers.weights import make
from torch_turboquant.integrations.transformers import TurboQuantConfig

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.skipif(VERSION < (5, 23), reason="transformers cuts layers in other ways before 5.23")
def test_two_processes(tmp_path):
    """One run for all, since it takes long to start."""
    make("qwen2", dtype=torch.float32, **SHAPE).save_pretrained(tmp_path / "model")
    odd = make("qwen2", dtype=torch.float32, **{**SHAPE, "intermediate_size": 384})
    odd.save_pretrained(tmp_path / "odd")
    make_mixture("qwen3_moe", **SHAPE).save_pretrained(tmp_path / "mixture")
    packed = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=TurboQuantConfig(4)
    )
    packed.save_pretrained(tmp_path / "packed")
    want = packed(torch.arange(1, 25)[None]).logits
    program = Path(__file__).with_name("two_processes.py")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         "2", str(program), str(tmp_path)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}")
        for name in ("loading", "packed"):
            # sums in another order round some activations of 8 bits to their neighbours
            assert float((found[name] - want).norm() / want.norm()) < 0.03
            own = packed.model.layers[0].self_attn
            whole = [own.q_proj.weight.nbytes, own.o_proj.weight.nbytes]
            assert found[f"{name} bytes"] == [size // 2 for size in whole]
        assert torch.equal(found["loading"], found["packed"])
        assert "cannot be made plain: load the model in one process" in found["plain"]
        assert "none" == found["odd, skipped"]
        says = (
            "down_proj is packed and cannot be cut for 2 processes: it has 384 inputs, which must"
        )
        assert says in found["odd"]
        assert (
            "PackedQwen3MoeExperts are packed, which tensor parallelism cannot" in found["mixture"]
        )
    first, saved = (load_file(tmp_path / n / "model.safetensors") for n in ("packed", "saved"))
    assert first.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in first.items())
