"""Engines run in the tests' own process, and ask for nothing from a network."""

import importlib.util
import os

if importlib.util.find_spec("vllm") is not None:  # else the rest of the tests would see these
    os.environ.update(  # before vllm is imported
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
