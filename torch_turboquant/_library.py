"""Loads the compiled libraries, which register the ops under `torch.ops.turboquant`.

The CPU library holds the op schemas and is always loaded. The CUDA library only adds kernels for
CUDA tensors, and is loaded where torch itself is a CUDA build. Importing this module does not touch
the GPU driver, so processes may still fork.
"""

import ctypes
import json
import platform
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torch_turboquant._version import __version__

MIN_TORCH = "2.11"
LIBRARY_FOLDER = Path(__file__).parent / "lib"


def check_torch_version(version: str) -> None:
    """Raises ImportError if `version` (such as "2.10.1+cu128") is older than the libraries need.

    Without this check an old torch shows as an undefined symbol.
    """
    found, needed = ([int(n) for n in v.split(".")[:2]] for v in (version, MIN_TORCH))
    if found < needed:
        raise ImportError(
            f"torch_turboquant {__version__} needs torch >= {MIN_TORCH}, but torch {version} is "
            f"installed. Upgrade it: pip install --upgrade torch"
        )


def load(name: str, folder: Path = LIBRARY_FOLDER) -> dict[str, Any]:
    """Loads `libturboquant_<name>.so` (name "cpu" or "cuda") and returns what it says of itself.

    Raises ImportError with the loader's reason and what to do about it.
    """
    path = folder / f"libturboquant_{name}.so"
    if not path.exists():
        raise ImportError(
            f"{path} is missing: this torch_turboquant is a source tree, or a wheel for another "
            f"platform than {platform.system()} {platform.machine()}. Install a wheel that fits or "
            f"build one (make wheel); inside a checkout, python -I finds the installed package."
        )
    try:
        torch.ops.load_library(path)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        glibc = " ".join(part for part in platform.libc_ver() if part) or "unknown"
        raise ImportError(
            f"{path} cannot be loaded: {error}. It needs torch >= {MIN_TORCH} (found "
            f"{torch.__version__}) and the glibc named by the wheel's manylinux tag (found "
            f"{glibc}). If both fit, reinstall both, or build the wheel here (make wheel)."
        ) from error
    describe = getattr(library, f"turboquant_{name}_build_info")
    describe.restype = ctypes.c_char_p
    info = {"path": str(path), "bytes": path.stat().st_size, **json.loads(describe())}
    if info["version"] != __version__:
        raise ImportError(
            f"{path} is of version {info['version']}, but the Python files are of {__version__}: "
            f"an upgrade was interrupted. Install the wheel again: pip install --force-reinstall "
            f"--no-deps with the path of the .whl file"
        )
    return info


def load_libraries() -> dict[str, dict[str, Any]]:
    """Loads what this torch can use; the keys are "cpu" and, where loaded, "cuda".

    A wheel built without nvcc or without a GPU has no CUDA library: ops on CUDA tensors raise
    NotImplementedError.
    """
    check_torch_version(torch.__version__)
    libraries = {"cpu": load("cpu")}
    if torch.version.cuda is not None and (LIBRARY_FOLDER / "libturboquant_cuda.so").exists():
        libraries["cuda"] = load("cuda")
    return libraries


_libraries = load_libraries()
_cpu = ctypes.CDLL(_libraries["cpu"]["path"])
for _name in ("turboquant_cpu_levels", "turboquant_cpu_level"):
    getattr(_cpu, _name).restype = ctypes.c_char_p
_cpu.turboquant_cpu_force_level.argtypes = [ctypes.c_char_p]
_cpu.turboquant_cpu_force_level.restype = ctypes.c_bool
_cpu.turboquant_choose_kernel.argtypes = [
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_char_p),
]
_cpu.turboquant_choose_kernel.restype = ctypes.c_char_p
_DEVICE_FACTS = 6  # members of DeviceFacts (csrc/choices/device.h)


def cpu_levels() -> list[str]:
    """The levels of CPU kernels that this processor runs, best first (docs/design.md, Levels)."""
    return _cpu.turboquant_cpu_levels().decode().split()


def cpu_level() -> str:
    """The level in use: the best one, unless a test forced another."""
    return _cpu.turboquant_cpu_level().decode()


@contextmanager
def force_cpu_level(name: str) -> Iterator[None]:
    """For tests: all CPU kernels of the process are those of level `name` until the block ends.

    Raises ValueError if this processor does not run it.
    """
    before = cpu_level()
    if not name or not _cpu.turboquant_cpu_force_level(name.encode()):
        raise ValueError(
            f"this processor has no CPU level {name!r}, supported: {', '.join(cpu_levels())}"
        )
    try:
        yield
    finally:
        _cpu.turboquant_cpu_force_level(before.encode())


_ForwardMode = ctypes.CFUNCTYPE(ctypes.c_int)
_forward_mode: Any = None  # what the libraries call must stay alive


def set_forward_mode(ask: Callable[[], int]) -> None:
    """What the libraries ask in every call of some ops: whether the thread is in forward mode."""
    global _forward_mode
    _forward_mode = _ForwardMode(ask)
    for name, library in _libraries.items():
        getattr(ctypes.CDLL(library["path"]), f"turboquant_{name}_set_forward_mode")(_forward_mode)


def choose_kernel(op: str, facts: Sequence[int], device: Sequence[int]) -> tuple[str, str]:
    """The CUDA kernel that takes a call, and the condition that decided.

    Args:
        op: one that csrc/cpu/common/choices.cpp names.
        facts: what its choice asks of a call, in the order of that file.
        device: the members of DeviceFacts (csrc/choices/device.h).

    Raises:
        ValueError: facts that no call and no device has.
    """
    if len(device) != _DEVICE_FACTS:
        raise ValueError(f"device must have {_DEVICE_FACTS} facts, got {len(device)}")
    call, gpu, reason = array("q", facts), array("q", device), ctypes.c_char_p()
    kernel = _cpu.turboquant_choose_kernel(
        op.encode(), call.buffer_info()[0], len(call), gpu.buffer_info()[0], ctypes.byref(reason)
    )
    assert reason.value is not None, "a name has its reason, and so has an error"
    if kernel is None:
        raise ValueError(
            f"the facts of {op} must be those of a call, got {list(facts)} on a device of "
            f"{list(device)}: {reason.value.decode()}"
        )
    return kernel.decode(), reason.value.decode()


def device_facts(index: int) -> list[int] | None:
    """DeviceFacts (csrc/choices/device.h) as launches on a CUDA device see them.

    None: there is no CUDA library.

    Raises:
        RuntimeError: the library has no code for this device.
    """
    if "cuda" not in _libraries:
        return None
    ask = ctypes.CDLL(_libraries["cuda"]["path"]).turboquant_cuda_device_facts
    ask.argtypes, ask.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_char_p
    facts = array("q", [0] * _DEVICE_FACTS)
    error = ask(index, facts.buffer_info()[0])
    if error is not None:
        raise RuntimeError(error.decode())
    return facts.tolist()


def _processor() -> str:
    """The CPU's name where the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def build_info() -> dict[str, Any]:
    """What is installed and what it runs on: versions, loaded libraries, architectures, devices.

    All of it is strings, numbers, None, and lists and dicts of these: it can be printed as JSON.
    """
    in_wheel = (LIBRARY_FOLDER / "libturboquant_cuda.so").exists()
    if "cuda" in _libraries:
        cuda = "loaded"
    elif in_wheel:
        cuda = "not loaded: this torch is not a CUDA build"
    else:
        cuda = "not in this build: make wheel ARCHS=all, where nvcc is on PATH"
    cuda_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "format_version": _libraries["cpu"]["format_version"],
        "cpu_level": cpu_level(),
        "cpu_levels": cpu_levels(),
        "cuda": cuda,
        "cuda_architectures": _libraries.get("cuda", {}).get("architectures", "").split(),
        "libraries": _libraries,
        "devices": {
            "cpu": _processor(),
            "cuda": [torch.cuda.get_device_name(i) for i in range(cuda_devices)],
        },
    }
