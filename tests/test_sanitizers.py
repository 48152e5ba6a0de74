"""The CPU kernels of every level under AddressSanitizer and UBSan, without torch: random arguments
in memory of exactly the promised size (tests/native)."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SEEDS = 600

Run = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def fuzz(request: pytest.FixtureRequest) -> Run:
    """Runs tests/native/fuzz.py with the sanitizers loaded before anything else."""
    compiler = shutil.which("g++") or pytest.skip("needs g++")
    libraries = []
    for name in ("libasan.so", "libubsan.so"):
        done = subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True
        )
        libraries.append(done.stdout.strip())
        if not Path(libraries[-1]).is_file():
            pytest.skip(f"needs {name}")
    path = request.getfixturevalue("sanitized")
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(libraries),
        # Leaks are Python's own. Frames that are watched for use after return lie, with g++ 13, at
        # addresses that are not aligned to the 64 bytes of AVX-512 (GCC bug 110027).
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    }

    def run(task: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", ROOT / "tests" / "native" / "fuzz.py", path, task]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    return run


def test_kernels_stay_in_bounds_and_agree(fuzz):
    done = fuzz(str(SEEDS))
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"{last}\n{done.stderr}"
    assert last[0].endswith(f"seed {SEEDS - 1}")


@pytest.mark.parametrize(
    ("what", "report"),
    [
        ("read beyond", "heap-buffer-overflow"),
        ("shift", "shift exponent"),
        ("misaligned", "misaligned address"),
    ],
)
def test_the_sanitizers_see(fuzz, what, report):
    done = fuzz(what)
    assert done.returncode != 0
    assert report in done.stderr
