"""Every family that the cache serves, with packed weights: what is saved is what is loaded."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from tests.transformers.families import SUPPORTED, make_family
from tests.transformers.harness import make_ids
from torch_turboquant import PackedLinear
from torch_turboquant.integrations.transformers import TurboQuantConfig

REFUSED = ("gpt2", "gpt-sw3")  # Conv1D
# whose files have several layers in one tensor, which transformers takes apart and puts together
MERGED = {"hrm_text": {}}
FAMILIES = {n: o for n, o in (SUPPORTED | MERGED).items() if n not in REFUSED}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_packed_saved_and_loaded(family, tmp_path):
    make_family(family, FAMILIES[family]).save_pretrained(tmp_path / "model")
    config = TurboQuantConfig(bits=8)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=config)
    names = [name for name, m in model.named_modules() if isinstance(m, PackedLinear)]
    assert names
    logits = model(make_ids(12)).logits
    assert logits.isfinite().all()
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert torch.equal(again(make_ids(12)).logits, logits)
    for name in names:
        assert torch.equal(again.get_submodule(name).weight, model.get_submodule(name).weight)


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_are_refused(family, tmp_path):
    make_family(family, SUPPORTED[family]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"can be packed: .*Conv1D stores its weight transposed"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=TurboQuantConfig())
