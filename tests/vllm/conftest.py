"""Engines run in the tests' own process, and ask for nothing from a network."""

import importlib.util
import os

import pytest

if importlib.util.find_spec("vllm") is not None:  # else the rest of the tests would see these
    os.environ.update(  # before vllm is imported
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # n-gram drafts import numba, after which vLLM 0.32 and 0.33 start no other engine in a process:
    # they look for kernels in everything that modules hold, and stumble over llvmlite's library.
    items.sort(key=lambda item: item.name == "test_drafts_change_no_token")
