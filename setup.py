"""Builds the two shared libraries of the wheel and tags it for every Python.

lib/libturboquant_cpu.so   csrc/ops.cpp and csrc/cpu/*.cpp: the op schemas and the CPU kernels; always built.
lib/libturboquant_cuda.so  csrc/cuda/*.cu: the CUDA kernels; built where nvcc is found.

Both use the LibTorch stable ABI only, no Python and no C++ symbol of torch, so that one wheel (py3-none-<platform>) serves
every Python >= 3.10 and every torch >= 2.11, with or without CUDA. Name, version and metadata are in pyproject.toml.

TORCH_TURBOQUANT_BUILD_CUDA  1: fail without nvcc; 0: CPU only; auto (default): CUDA where nvcc is found
TORCH_CUDA_ARCH_LIST         narrows the CUDA architectures, e.g. "9.0a+PTX" (default: ARCHITECTURES)
CUDA_HOME, CXX, MAX_JOBS     toolkit folder, C++ compiler, parallel compilations
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.dist import Distribution

ARCHITECTURES = "7.5;8.0;8.6;8.9;9.0a;10.0;12.0+PTX"
TORCH_TARGET = "0x020b000000000000"  # torch 2.11 (0x0210... would be 2.16)
BUILD = Path("build/native")

# Packed bytes are the same on every device, so no compiler may fuse a multiply and an add (docs/format.md). A .cu file
# that writes no packed bytes may say otherwise on a line of its own: "// nvcc: -fmad=true".
CXX_FLAGS = "-std=c++20 -O3 -fPIC -ffp-contract=off -fvisibility=hidden -fvisibility-inlines-hidden -Wall".split()
NVCC_FLAGS = "-std=c++20 -O3 -fmad=false --expt-relaxed-constexpr".split()
HOST_FLAGS = "-fPIC,-ffp-contract=off,-fvisibility=hidden,-fvisibility-inlines-hidden,-Wall"


def torch_folder() -> Path:
    """Where torch is installed; importing it would take seconds and tells no more."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit(
            "torch_turboquant builds against torch >= 2.11: install it first (pip install torch==2.13.0)"
        )
    return Path(spec.origin).parent


def find_nvcc() -> str | None:
    """The CUDA compiler to build with, or None for a CPU-only wheel."""
    wanted = os.environ.get("TORCH_TURBOQUANT_BUILD_CUDA", "auto")
    if wanted not in ("0", "1", "auto"):
        sys.exit(f"TORCH_TURBOQUANT_BUILD_CUDA is {wanted!r}; it can be 0, 1 or auto")
    if wanted == "0":
        return None
    folders = [os.path.join(os.environ["CUDA_HOME"], "bin")] if "CUDA_HOME" in os.environ else []
    path = os.pathsep.join([*folders, os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    nvcc = shutil.which("nvcc", path=path)
    if nvcc is None and wanted == "1":
        sys.exit("TORCH_TURBOQUANT_BUILD_CUDA=1, but nvcc is neither in CUDA_HOME/bin nor on PATH")
    return nvcc


def architectures() -> list[str]:
    """Entries such as "9.0a" or "12.0+PTX"."""
    entries = re.split(
        r"[;, ]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip() or ARCHITECTURES
    )
    for entry in entries:
        if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", entry):
            sys.exit(f"TORCH_CUDA_ARCH_LIST holds {entry!r}; entries look like 9.0a or 12.0+PTX")
    return entries


def gencode(entry: str) -> list[str]:
    number = entry.removesuffix("+PTX").replace(".", "")
    flags = [f"-gencode=arch=compute_{number},code=sm_{number}"]
    if entry.endswith("+PTX"):
        flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def quote(text: str) -> str:
    """A C string literal that survives the shell of a ninja rule."""
    return f"'\"{text}\"'"


def ninja_file(version: str, nvcc: str | None) -> str:
    torch = torch_folder()
    define = [
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
        f"-DTURBOQUANT_VERSION={quote(version)}",
        "-Icsrc",
    ]
    # Error texts hold __FILE__: keep the folders of the build machine out of them.
    prefix = f"-ffile-prefix-map={torch}/include/="
    define.append(f"-isystem {torch}/include")
    exports = "csrc/exports.map"
    cxx = os.environ.get("CXX", "g++")
    lines = [
        f"builddir = {BUILD}",
        "rule cxx",
        f"  command = {cxx} {' '.join(CXX_FLAGS)} {prefix} {' '.join(define)} -MMD -MF $out.d -c $in -o $out",
        "  deps = gcc\n  depfile = $out.d",
        "rule link_cpu",
        f"  command = {cxx} -shared -s -Wl,--version-script={exports} -Wl,--as-needed -o $out $in"
        f" -L{torch}/lib -ltorch_cpu",
    ]
    objects = []
    for source in [Path("csrc/ops.cpp"), *sorted(Path("csrc/cpu").glob("*.cpp"))]:
        objects.append(str(BUILD / source.with_suffix(".o")))
        lines.append(f"build {objects[-1]}: cxx {source}")
    lines.append(f"build {BUILD}/libturboquant_cpu.so: link_cpu {' '.join(objects)} | {exports}")
    if nvcc:
        archs = architectures()
        lines += [
            "rule nvcc",
            f"  command = {nvcc} -ccbin {cxx} {' '.join(NVCC_FLAGS)} -Xcompiler {HOST_FLAGS},{prefix}"
            f" -DUSE_CUDA -DTURBOQUANT_CUDA_ARCHITECTURES={quote(' '.join(archs))} {' '.join(define)}"
            f" {' '.join(flag for entry in archs for flag in gencode(entry))} $extra"
            " -MD -MF $out.d -c $in -o $out",
            "  deps = gcc\n  depfile = $out.d",
            # libtorch.so is what a CUDA build of torch links to its CUDA half, and it exists in CPU builds too: so a machine
            # without a CUDA build of torch can make this library.
            "rule link_cuda",
            f"  command = {nvcc} -ccbin {cxx} -shared -cudart static -Xlinker -s -Xlinker --version-script={exports}"
            f" -o $out $in -Xlinker --no-as-needed -L{torch}/lib -ltorch",
        ]
        objects = []
        for source in sorted(Path("csrc/cuda").glob("*.cu")):
            objects.append(str(BUILD / source.with_suffix(".o")))
            lines.append(f"build {objects[-1]}: nvcc {source}")
            if extra := re.search(r"^// nvcc: (.*)$", source.read_text(), re.MULTILINE):
                lines.append(f"  extra = {extra[1]}")
        lines.append(
            f"build {BUILD}/libturboquant_cuda.so: link_cuda {' '.join(objects)} | {exports}"
        )
    return "\n".join(lines) + "\n"


class BuildLibraries(build_ext):
    """Runs ninja, which compiles what changed, and copies the libraries into the package."""

    def run(self) -> None:
        nvcc = find_nvcc()
        names = ["libturboquant_cpu.so"] + (["libturboquant_cuda.so"] if nvcc else [])
        cuda = (
            f"CUDA for {' '.join(architectures())}, by {nvcc}"
            if nvcc
            else "no CUDA (nvcc not found or not wanted)"
        )
        print(f"torch_turboquant: building CPU and {cuda}", flush=True)
        BUILD.mkdir(parents=True, exist_ok=True)
        (BUILD / "build.ninja").write_text(ninja_file(self.distribution.get_version(), nvcc))
        jobs = os.environ.get("MAX_JOBS", str(len(os.sched_getaffinity(0))))
        ninja = [sys.executable, "-m", "ninja", "-f", str(BUILD / "build.ninja"), "-j", jobs]
        if subprocess.run(ninja).returncode != 0:
            sys.exit("torch_turboquant: a compilation failed, see above")
        folder = Path(".") if self.editable_mode or self.inplace else Path(self.build_lib)
        self.libraries_built = [folder / "torch_turboquant/lib" / name for name in names]
        shutil.rmtree(folder / "torch_turboquant/lib", ignore_errors=True)
        for target in self.libraries_built:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(BUILD / target.name, target)

    def get_outputs(self) -> list[str]:
        return [str(path) for path in getattr(self, "libraries_built", [])]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class StableWheel(bdist_wheel):
    """Platform-specific, but for any Python: the libraries know nothing of it."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    distclass=BinaryDistribution, cmdclass={"build_ext": BuildLibraries, "bdist_wheel": StableWheel}
)
