"""SGLang runs in the tests' own process, on a CPU, and asks for nothing from a network."""

import importlib.util
import os
import sys
from pathlib import Path

STAND_INS = Path(__file__).parent / "stand_ins"

if importlib.util.find_spec("sglang") is not None:  # else the rest of the tests would see these
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1")  # before sglang is imported
    # for the processes that an engine starts, and for this one
    paths = [str(STAND_INS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.path.insert(0, str(STAND_INS))
