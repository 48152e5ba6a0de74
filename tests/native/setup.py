"""Builds turboquant_native, the test-only Python view of csrc/format.h. tests/conftest.py runs it.

It has its own build because pybind11 has no place in the wheel, whose libraries know no Python.
"""

import os
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

ROOT = Path(__file__).resolve().parents[2]
os.chdir(ROOT)

setup(
    name="turboquant_native",
    ext_modules=[
        Pybind11Extension(
            "turboquant_native",
            ["tests/native/bindings.cpp"],
            include_dirs=["csrc"],
            depends=["csrc/format.h", "csrc/cpu/hadamard.h", "csrc/cpu/pack.h"],
            cxx_std=20,
            extra_compile_args=["-O2", "-ffp-contract=off", "-fvisibility=hidden"],
        )
    ],
)
