"""Every family that the cache serves, with packed weights: what is saved is what is loaded."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from tests.transformers.families import SUPPORTED, VERSION, make_family
from tests.transformers.harness import make_ids
from torch_turboquant import PackedLinear
from torch_turboquant.integrations.transformers import TurboQuantConfig
from torch_turboquant.integrations.transformers.weights.experts import PackedExperts

REFUSED = ("gpt2", "gpt-sw3")  # Conv1D
# whose files have several layers in one tensor, which transformers takes apart and puts together
MERGED = {"hrm_text": {}}
FAMILIES = {n: o for n, o in (SUPPORTED | MERGED).items() if n not in REFUSED}
PACKABLE = {"moe_intermediate_size": 64, "intermediate_size": 128}  # multiples of 64 channels


def has_cubes(module):
    return any(p.dim() == 3 for p in module.parameters(recurse=False))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_packed_saved_and_loaded(family, tmp_path):
    options = FAMILIES[family]
    mixture = family == "flex_olmo" or any("expert" in name for name in options)
    made = make_family(family, {**options, **PACKABLE} if mixture else options)
    made.save_pretrained(tmp_path / "model")
    config = TurboQuantConfig(bits=8)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=config)
    names = [name for name, m in model.named_modules() if isinstance(m, PackedLinear)]
    assert names
    experts = {n for n, m in made.named_modules() if n.endswith("experts") and has_cubes(m)}
    assert experts == {n for n, m in model.named_modules() if isinstance(m, PackedExperts)}
    # experts of Granite's were modules of their own, which keep their weights
    assert experts or not mixture or (family.startswith("granite") and VERSION < (5, 13))
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
