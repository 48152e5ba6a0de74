"""What all tests share: the installed package, devices, the C++ view of the format, determinism.

Tests run on the installed wheel. `make test` installs it; pytest's importlib mode keeps the source
off sys.path, and pytest_configure refuses to go on if the package was found there after all.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest
import torch

import torch_turboquant
from torch_turboquant import _library

ROOT = Path(__file__).resolve().parents[1]

# The same examples on every run, and no limit in time: machines differ.
hypothesis.settings.register_profile(
    "turboquant", deadline=None, derandomize=True, database=None, print_blob=True
)
hypothesis.settings.load_profile("turboquant")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-level",
        choices=("avx512", "avx2", "portable"),
        help="run all CPU kernels at this level (skips everything where the processor lacks it)",
    )


def pytest_configure(config: pytest.Config) -> None:
    package = Path(torch_turboquant.__file__).resolve().parent
    if package == ROOT / "torch_turboquant":
        raise pytest.UsageError(
            f"the tests found torch_turboquant in the checkout ({package}), which has no compiled "
            "libraries: run `make test`, or `pytest` (not `python -m pytest`) beside a wheel"
        )
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # one core per worker


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # First what takes longest, the CPU kernels compiled with the sanitizers: else one worker would
    # be at it when all others have finished.
    items.sort(key=lambda item: item.path.name != "test_sanitizers.py")
    level = config.getoption("--cpu-level")
    if level and level not in _library.cpu_levels():
        for item in items:
            item.add_marker(pytest.mark.skip(reason=f"this processor has no CPU level {level}"))
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """The same random inputs in whatever order tests run, and in whichever process."""
    torch.manual_seed(0)


@pytest.hookimpl(trylast=True)  # behind the end of fixtures
def pytest_runtest_teardown() -> None:
    """Workers share a GPU: what a large test leaves in PyTorch's cache of memory, others lack."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


# docs/ops.md: devices with less than 98 KiB of shared memory for a block have these limits.
NEEDS_MORE_MEMORY = re.compile(
    r"paged_(?:attention|mass) of head_dim (?:25[7-9]|2[6-9]\d|[3-9]\d\d|\d{4})"
    r" needs more shared memory"
    r"|scores of d = (?:\d{4} and sketches of \d+|\d+ and sketches of \d{4}) bits"
    r" take \d+ bytes of shared memory"
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    except RuntimeError as error:
        if item.get_closest_marker("cuda") and NEEDS_MORE_MEMORY.search(str(error)):
            facts = _library.device_facts(torch.cuda.current_device())
            if facts is not None and facts[3] < 98 << 10:
                pytest.skip(f"this device has too little shared memory: {error}")
        raise


@pytest.fixture(scope="session", autouse=True)
def cpu_level(request: pytest.FixtureRequest) -> Iterator[None]:
    """--cpu-level, for the whole session."""
    level = request.config.getoption("--cpu-level")
    with _library.force_cpu_level(level) if level else nullcontext():
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The test runs once per device; on CUDA only where there is one."""
    return torch.device(request.param)


def build_native(name: str) -> Path:
    """A module of tests/native, compiled where its sources changed."""
    filelock = pytest.importorskip("filelock")
    for module in ("ninja", "pybind11"):
        pytest.importorskip(module)
    folder = ROOT / "build" / "tests-native"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-I", str(ROOT / "tests/native/build.py"), name]
    with filelock.FileLock(folder / f"{name}.lock"):  # xdist workers share it
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / f"{name}.so"


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """csrc/format.h for Python (tests/native)."""
    path = build_native("turboquant_native")
    spec = importlib.util.spec_from_file_location("turboquant_native", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def sanitized() -> Path:
    """The CPU kernels for a Python that has the sanitizers loaded (tests/native)."""
    return build_native("turboquant_sanitized")
