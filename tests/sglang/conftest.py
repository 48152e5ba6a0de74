"""SGLang runs in the tests' own process and asks for nothing from a network.

Without a GPU it gets stand-ins for what it takes from packages that need one.
"""

import importlib.util
import os
import sys
from pathlib import Path

import torch

STAND_INS = Path(__file__).parent / "stand_ins"

if importlib.util.find_spec("sglang") is not None:  # else the rest of the tests would see these
    os.environ["HF_HUB_OFFLINE"] = "1"  # before sglang is imported
    if not torch.cuda.is_available():
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        os.environ["TORCH_COMPILE_DISABLE"] = "1"  # of small functions, which takes minutes
        os.environ.setdefault("CXX", str(STAND_INS / "cxx"))
        # for the processes that an engine starts, and for this one
        paths = [str(STAND_INS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        sys.path.insert(0, str(STAND_INS))
