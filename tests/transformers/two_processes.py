"""What test_weight_parallel.py runs in two processes: python -m torch.distributed.run ... FOLDER.

The folder has "model", "packed" and "mixture"; each process writes "rank0" or "rank1".
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from torch_turboquant.integrations.transformers import TurboQuantConfig

FOLDER = Path(sys.argv[1])
IDS = torch.arange(1, 25)[None]


def load(name, **options):
    config = DistributedConfig(tp_size=2)
    return AutoModelForCausalLM.from_pretrained(FOLDER / name, distributed_config=config, **options)


def refusal(name, **options):
    try:
        load(name, **options)
    except ValueError as error:
        return str(error)
    return "none"


@torch.no_grad()
def main():
    found = {}
    form = TurboQuantConfig(4)
    loaded = {"loading": load("model", quantization_config=form), "packed": load("packed")}
    for name, model in loaded.items():
        found[name] = model(IDS).logits
        attention = model.model.layers[0].self_attn
        found[f"{name} bytes"] = [
            p.to_local().nbytes for p in (attention.q_proj.weight, attention.o_proj.weight)
        ]
    loaded["packed"].save_pretrained(FOLDER / "saved")
    try:
        loaded["packed"].dequantize()
    except ValueError as error:
        found["plain"] = str(error)
    skip = ["*.down_proj", "*.o_proj"]
    found["odd"] = refusal("odd", quantization_config=TurboQuantConfig(4))
    found["odd, skipped"] = refusal("odd", quantization_config=TurboQuantConfig(4, skip=skip))
    found["mixture"] = refusal("mixture", quantization_config=form)
    torch.save(found, FOLDER / f"rank{dist.get_rank()}")
    dist.destroy_process_group()


main()
