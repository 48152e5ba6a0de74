"""Builds the two shared libraries of the wheel and tags it for every Python.

lib/libturboquant_cpu.so   of csrc/ops.cpp and csrc/cpu: the op schemas and the CPU kernels; always.
lib/libturboquant_cuda.so  of csrc/cuda: the CUDA kernels, for this machine's GPUs or as told.

Both use the LibTorch stable ABI only, no Python and no C++ symbol of torch, so that one wheel
(py3-none-<platform>) serves every Python >= 3.10 and every torch >= 2.11, with or without CUDA.
Name, version and metadata are in pyproject.toml. Environment:

TORCH_TURBOQUANT_BUILD_CUDA  0: CPU only; 1: fail without nvcc, and without a GPU compile for all
                             architectures; auto (default): CUDA where nvcc and a GPU are found
TORCH_CUDA_ARCH_LIST         the CUDA architectures instead of those of this machine's GPUs: "all",
                             or e.g. "8.0 9.0a+PTX"; auto then needs nvcc, but no GPU. For tests of
                             an older architecture's code on a newer GPU: "8.0@9.0" is the code of
                             8.0 as machine code of 9.0, "8.0@PTX" is its PTX only, which the
                             driver compiles
CUDA_HOME, CXX, MAX_JOBS     toolkit folder, C++ compiler, sources compiled at a time
"""

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import setuptools
from setuptools.command.build_ext import build_ext
from setuptools.dist import Distribution

# As pyproject.toml says; without build isolation pip does not look.
if int(setuptools.__version__.partition(".")[0]) < 77:
    sys.exit(
        "torch_turboquant: building needs setuptools >= 77, but setuptools "
        f"{setuptools.__version__} is installed: pip install 'setuptools>=77'"
    )

from setuptools.command.bdist_wheel import bdist_wheel  # older versions have none

# Machine code also runs on later minor versions of a GPU: that of 8.0 on 8.6 and 8.9. No PTX, which
# would make the library a quarter larger: a GPU to come gets an error that names these.
ALL_ARCHITECTURES = ["7.5", "8.0", "9.0a", "10.0", "12.0"]
TORCH_TARGET = "0x020b000000000000"  # torch 2.11 (0x0210... would be 2.16)
OBJECTS = Path("build/native")

# Packed bytes are the same on every device, so no compiler may fuse a multiply and an add
# (docs/format.md). A source may ask for more in a line of its own, see own_flags: a .cu file that
# writes no packed bytes for "-fmad=true", the CPU kernels for the instructions they use.
HOST = ["-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-Wall"]
# Switches over an enum name every value, so that the compiler finds each place a new width needs.
HOST += ["-Werror=switch"]
CXX = ["-std=c++20", "-O3", *HOST]
# Machine code compresses to a tenth; nvcc 12.8 and later can. The level of optimisation is that of
# the host's code alone: -O3 would add 0.2 MB to the library, and -Os 1 to 2 us to a call.
NVCC = ["-std=c++20", "-O2", "-fmad=false", "--expt-relaxed-constexpr", "-DUSE_CUDA"]
NVCC += ["--compress-mode=size"]
# The host's code of the CUDA library is not compressed, and is checks and launches that run once in
# a call: without padding between its blocks, and with some checks not inlined, it takes less room.
CUDA_HOST = [*HOST, "-fno-align-functions", "-fno-align-jumps", "-fno-align-loops"]
CUDA_HOST += ["-fno-align-labels", "-fno-reorder-blocks-and-partition"]
CUDA_HOST += ["--param=inline-unit-growth=30"]

# ninja compiles what changed, headers included.
NINJA = """\
builddir = {objects}
common = -Icsrc -isystem {torch}/include $
    -DTORCH_TARGET_VERSION={target} -DTURBOQUANT_VERSION={version}

rule cxx
  command = {cxx} {cxx_flags} $common $extra -MMD -MF $out.d -c $in -o $out
  deps = gcc
  depfile = $out.d

rule nvcc
  command = {nvcc} -ccbin {cxx} {nvcc_flags} $common $extra -MD -MF $out.d -c $in -o $out
  deps = gcc
  depfile = $out.d

rule link_cpu
  command = {cxx} -shared -s -Wl,--version-script=csrc/exports.map -Wl,--as-needed -o $out $in $
    -L{torch}/lib -ltorch_cpu

# libtorch.so is what a CUDA build of torch ties to its CUDA half, and CPU builds have it too: so
# this library can also be built against a CPU build.
rule link_cuda
  command = {nvcc} -ccbin {cxx} -shared -cudart static -nodlink -Xlinker -s $
    -Xlinker --version-script=csrc/exports.map -o $out $in $
    -Xlinker --no-as-needed -L{torch}/lib -ltorch

"""


def torch_folder() -> Path:
    """Where torch is installed; importing it would take seconds and tells no more."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("torch_turboquant: building needs torch >= 2.11: pip install torch==2.13.0")
    return Path(spec.origin).resolve().parent


class Cuda(NamedTuple):
    """What compiles the CUDA library, and for which architectures (TORCH_CUDA_ARCH_LIST)."""

    nvcc: str
    architectures: list[str]


def choose_cuda() -> Cuda | str:
    """How the CUDA library is compiled, or why it is not."""
    wanted = os.environ.get("TORCH_TURBOQUANT_BUILD_CUDA", "auto")
    if wanted not in ("0", "1", "auto"):
        sys.exit(f"TORCH_TURBOQUANT_BUILD_CUDA is {wanted!r}; it can be 0, 1 or auto")
    if wanted == "0":
        return "TORCH_TURBOQUANT_BUILD_CUDA is 0"
    listed = listed_architectures()
    nvcc = find_nvcc()
    if nvcc is None and wanted == "1":
        sys.exit("TORCH_TURBOQUANT_BUILD_CUDA is 1, but nvcc is not in CUDA_HOME/bin nor on PATH")
    if nvcc is None:
        return "nvcc is not in CUDA_HOME/bin nor on PATH"
    capabilities = [] if listed else compute_capabilities()
    found = listed or architectures_of(capabilities)
    if not found and wanted == "1":
        found = ALL_ARCHITECTURES
    if not found:
        why = "this machine has no GPU"
        if capabilities:
            why = f"the GPU's compute capability, {', '.join(capabilities)}, is below 7.5"
        return (
            f"{why}. For the CUDA kernels: make ARCHS=all (pip: "
            "TORCH_CUDA_ARCH_LIST=all), or ARCHS=9.0a for one architecture"
        )
    return Cuda(nvcc, found)


def find_nvcc() -> str | None:
    """The CUDA compiler, or None."""
    folders = [Path(os.environ["CUDA_HOME"], "bin")] if "CUDA_HOME" in os.environ else []
    folders += [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(map(str, folders)))


def listed_architectures() -> list[str]:
    """The entries of TORCH_CUDA_ARCH_LIST; empty where it is not set."""
    given = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip(" ;,")
    if given == "all":
        return ALL_ARCHITECTURES
    entries = re.split(r"[;, ]+", given) if given else []
    for entry in entries:
        if not re.fullmatch(r"\d+\.\d[af]?(\+PTX|@PTX|@\d+\.\d[af]?)?", entry):
            sys.exit(
                f"TORCH_CUDA_ARCH_LIST holds {entry!r}; entries look like 9.0a or 12.0+PTX, "
                "or for tests on a newer GPU like 8.0@9.0 or 8.0@PTX"
            )
    return entries


def compute_capabilities() -> list[str]:
    """Those of this machine's GPUs, such as "8.6"; nvidia-smi knows them without torch."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return []
    return re.findall(r"^\d+\.\d$", done.stdout, re.MULTILINE) if done.returncode == 0 else []


def architectures_of(capabilities: list[str]) -> list[str]:
    """The architectures whose machine code runs on these GPUs: one for each major version.

    A GPU newer than all of them is compiled for as it is: nvcc knows whether it can. Older GPUs
    than the first are left out, because the kernels do not support them.
    """
    chosen = []
    for capability in capabilities:
        major, minor = map(int, capability.split("."))
        entries = [entry for entry in ALL_ARCHITECTURES if entry.startswith(f"{major}.")]
        if entries and minor >= int(entries[0].rstrip("a").split(".")[1]):
            chosen += entries
        elif major > 7:
            chosen.append(capability)
    return sorted(set(chosen), key=lambda entry: float(entry.rstrip("a")))


def gencode(entry: str) -> list[str]:
    """nvcc's options for an entry of TORCH_CUDA_ARCH_LIST."""
    code, _, machine = entry.removesuffix("+PTX").replace(".", "").partition("@")
    kinds = [f"compute_{code}"] if machine == "PTX" else [f"sm_{machine or code}"]
    if entry.endswith("+PTX"):
        kinds.append(f"compute_{code}")
    return [f"-gencode=arch=compute_{code},code={kind}" for kind in kinds]


def quote(text: str) -> str:
    """A C string literal that survives the shell."""
    return f"'\"{text}\"'"


def word(text: object) -> str:
    """One word of a command in build.ninja: a clone, and so .venv, may be in a "My Projects"."""
    return shlex.quote(str(text)).replace("$", "$$")


def own_flags(source: Path, rule: str) -> list[str]:
    """What a source asks for in a line of its own: "// nvcc: -flag" or "// cxx x86_64: -flag"."""
    machine = f" {platform.machine()}" if rule == "cxx" else ""
    return re.findall(rf"^// {rule}{machine}: (.*)$", source.read_text(), re.MULTILINE)


def ninja_file(version: str, cuda: Cuda | None) -> str:
    torch = torch_folder()
    # Error texts hold __FILE__: keep the folders of the build machine out of them.
    prefix = f"-ffile-prefix-map={torch}/include/="
    archs = cuda.architectures if cuda else []
    # nvcc runs the host compiler through a shell, too.
    nvcc_flags = [*NVCC, "-Xcompiler", word(",".join([*CUDA_HOST, f'"{prefix}"']))]
    nvcc_flags += [f"-DTURBOQUANT_CUDA_ARCHITECTURES={quote(' '.join(archs))}"]
    nvcc_flags += [flag for entry in archs for flag in gencode(entry)]
    # The largest sources would keep single cores busy for minutes: architectures side by side.
    nvcc_flags += [f"--threads={len(archs)}"] if len(archs) > 1 else []
    text = NINJA.format(
        objects=OBJECTS,
        torch=word(torch),
        target=TORCH_TARGET,
        version=quote(version),
        cxx=os.environ.get("CXX", "g++"),
        cxx_flags=" ".join([*CXX, word(prefix)]),
        nvcc=word(cuda.nvcc) if cuda else "nvcc",
        nvcc_flags=" ".join(nvcc_flags),
    )

    def library(name: str, rule: str, sources: list[Path]) -> str:
        lines, objects = [], []
        for source in sources:
            objects.append(f"{OBJECTS / source}.o")
            lines.append(f"build {objects[-1]}: {rule} {source}")
            lines += [f"  extra = {extra}" for extra in own_flags(source, rule)]
        target = f"{OBJECTS}/libturboquant_{name}.so"
        lines.append(f"build {target}: link_{name} {' '.join(objects)} | csrc/exports.map")
        return "\n".join(lines) + "\n"

    # The levels first: they take longest, and the last one of them would keep a single core busy.
    cpu = sorted(
        Path("csrc/cpu").rglob("*.cpp"), key=lambda source: ("level" not in str(source), source)
    )
    text += library("cpu", "cxx", [*cpu, Path("csrc/ops.cpp")])
    if cuda:
        text += library("cuda", "nvcc", sorted(Path("csrc/cuda").rglob("*.cu")))
    return text


class BuildLibraries(build_ext):
    """Runs ninja and copies the libraries into the package."""

    built: tuple[Path, ...] = ()

    def run(self) -> None:
        choice = choose_cuda()
        cuda = None if isinstance(choice, str) else choice
        what = f"the CPU library only: {choice}"
        if cuda:
            what = f"CPU library and CUDA library for {' '.join(cuda.architectures)} ({cuda.nvcc})"
        print(f"torch_turboquant: building {what}", flush=True)
        OBJECTS.mkdir(parents=True, exist_ok=True)
        (OBJECTS / "build.ninja").write_text(ninja_file(self.distribution.get_version(), cuda))
        jobs = os.environ.get("MAX_JOBS", str(len(os.sched_getaffinity(0))))
        ninja = [sys.executable, "-m", "ninja", "-f", str(OBJECTS / "build.ninja"), "-j", jobs]
        if subprocess.run(ninja).returncode != 0:
            sys.exit("torch_turboquant: a compilation failed, see above")
        in_tree = self.inplace or self.editable_mode
        folder = Path("." if in_tree else self.build_lib, "torch_turboquant/lib")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        names = ["cpu", "cuda"] if cuda else ["cpu"]
        self.built = tuple(folder / f"libturboquant_{name}.so" for name in names)
        for target in self.built:
            shutil.copy2(OBJECTS / target.name, target)

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self.built]

    def get_output_mapping(self) -> dict[str, str]:
        """For editable_mode=strict, whose folder has a link for each file: what these lead to."""
        if not self.editable_mode:
            return {}
        return {str(Path(self.build_lib, path)): str(path) for path in self.built}


class StableWheel(bdist_wheel):
    """For one platform, but for any Python: the libraries know nothing of it."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


if __name__ == "__main__":
    setuptools.setup(
        distclass=BinaryDistribution,
        cmdclass={"build_ext": BuildLibraries, "bdist_wheel": StableWheel},
    )
