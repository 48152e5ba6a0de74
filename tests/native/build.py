"""Builds one of the Python modules of this folder into build/tests-native, for tests/conftest.py.

turboquant_native     bindings.cpp: csrc/format.h for the tests
turboquant_sanitized  kernels.cpp, its cases in other sources and the CPU kernels of every level,
                      under AddressSanitizer and UndefinedBehaviorSanitizer

They have their own build because pybind11 has no place in the wheel, whose libraries know no
Python. Only what changed is compiled, headers included.
"""

import os
import platform
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("build/tests-native")
LEVELS = sorted(path.relative_to(ROOT) for path in (ROOT / "csrc/cpu/levels").glob("*.cpp"))
SOURCES = {
    "turboquant_native": [Path("tests/native/bindings.cpp")],
    "turboquant_sanitized": [
        Path("tests/native/kernels.cpp"),
        Path("tests/native/attention_kernels.cpp"),
        Path("tests/native/codec_kernels.cpp"),
        Path("csrc/cpu/common/dispatch.cpp"),
        *LEVELS,
    ],
}
FLAGS = {
    "turboquant_native": "-O2",
    "turboquant_sanitized": "-O0 -g1 -fno-omit-frame-pointer -fno-sanitize-recover=all "
    "-fsanitize=address,undefined,float-cast-overflow",
}
NINJA = """\
builddir = {folder}
flags = -std=c++20 -Werror=switch -fPIC -ffp-contract=off -fvisibility=hidden -Icsrc {flags}

rule cxx
  command = {cxx} $flags $extra -MMD -MF $out.d -c $in -o $out
  deps = gcc
  depfile = $out.d

rule link
  command = {cxx} -shared $flags -o $out $in

"""


def ninja_file(name: str) -> str:
    text = NINJA.format(folder=FOLDER / name, flags=FLAGS[name], cxx=os.environ.get("CXX", "g++"))
    includes = f"-isystem {pybind11.get_include()} -isystem {sysconfig.get_paths()['include']}"
    objects = []
    for source in SOURCES[name]:
        # what a source asks for in a line of its own, as in the wheel's setup.py
        own = rf"^// cxx {platform.machine()}: (.*)$"
        extra = re.findall(own, (ROOT / source).read_text(), re.MULTILINE)
        extra += [includes] * (source.parent.name == "native")
        objects.append(f"{FOLDER / name / source.stem}.o")
        text += f"build {objects[-1]}: cxx {source}\n  extra = {' '.join(extra)}\n"
    return text + f"build {FOLDER / name}.so: link {' '.join(objects)}\n"


def main(name: str) -> int:
    os.chdir(ROOT)
    (FOLDER / name).mkdir(parents=True, exist_ok=True)
    path = FOLDER / name / "build.ninja"
    path.write_text(ninja_file(name))
    jobs = str(len(os.sched_getaffinity(0)))
    return subprocess.run([sys.executable, "-m", "ninja", "-f", path, "-j", jobs]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
