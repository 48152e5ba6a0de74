"""The installed wheel: tag, metadata, libraries, what it says of itself and how it fails."""

import importlib.metadata
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import tomllib
import torch

import torch_turboquant
from tests.helpers import ROOT, load_script
from torch_turboquant import __main__ as command_line
from torch_turboquant import _command, _extras, _library

LIBRARIES = sorted((Path(torch_turboquant.__file__).parent / "lib").glob("*.so"))


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that sees installed packages only."""
    command = [sys.executable, "-I", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def distribution() -> importlib.metadata.Distribution:
    return importlib.metadata.distribution("torch_turboquant")


# ---- the wheel


def test_one_wheel_serves_every_python():
    lines = distribution().read_text("WHEEL").splitlines()
    tags = [line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")]
    assert tags and all(tag.startswith("py3-none-") and "linux" in tag for tag in tags)
    assert "Root-Is-Purelib: false" in lines


def test_metadata():
    metadata = distribution().metadata
    assert metadata["Version"] == torch_turboquant.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    always = {line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert always == {"torch>=2.11", "numpy"}


def test_the_wheel_holds_the_package_and_nothing_else():
    files = [str(path) for path in distribution().files if "__pycache__" not in path.parts]
    assert "torch_turboquant/lib/libturboquant_cpu.so" in files
    assert "torch_turboquant/py.typed" in files
    strangers = [f for f in files if not f.startswith(("torch_turboquant/", "torch_turboquant-"))]
    assert [Path(f).parts[-2:] for f in strangers] == [("bin", "torch_turboquant")]  # the command


def test_the_source_distribution_holds_what_a_build_needs(tmp_path):
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    done = subprocess.run(
        [*command, "sdist", "--dist-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    here = {
        "setup.py",
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "Makefile",
        "requirements/test.txt",
        "wheels/manifest.json",
        ".github/workflows/wheels.yml",
        ".ci/run",
    }
    for folder in ("csrc", "torch_turboquant", "tests", "docs", "examples", "benchmarks", "wheels"):
        files = (ROOT / folder).rglob("*.*")
        here |= {
            str(f.relative_to(ROOT))
            for f in files
            if f.suffix in (".py", ".cpp", ".h", ".cu", ".cuh", ".map", ".md", ".sh", ".typed")
        }
    assert not here - names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


# ---- what is compiled: what this machine can run, or what is asked for


ALL = ["7.5", "8.0", "9.0a", "10.0", "12.0"]
HOW = (
    ". For the CUDA kernels: make ARCHS=all (pip: "
    "TORCH_CUDA_ARCH_LIST=all), or ARCHS=9.0a for one architecture"
)
NO_GPU = "this machine has no GPU" + HOW
OLD_GPUS = "the GPU's compute capability, 7.0, 6.1, is below 7.5" + HOW


@pytest.fixture
def setup(monkeypatch, tmp_path) -> ModuleType:
    """setup.py on a machine with nvcc and without a GPU."""
    pytest.importorskip("setuptools")
    for name in ("TORCH_TURBOQUANT_BUILD_CUDA", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "nvcc", "")
    program(tmp_path / "nvidia-smi", "exit 9")  # a driver without a device
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return load_script("setup.py")


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("capabilities", "compiled"),
    [
        (["9.0"], ["9.0a"]),
        (["8.9", "8.6"], ["8.0"]),
        (["7.5", "12.0", "7.5"], ["7.5", "12.0"]),
        (["10.3"], ["10.0"]),
        (["12.1"], ["12.0"]),
        (["11.0"], ["11.0"]),  # nvcc knows whether it can
        (["7.0", "6.1"], []),
    ],
)
def test_the_default_is_what_this_machine_can_run(setup, tmp_path, capabilities, compiled):
    lines = "\\n".join(capabilities)
    program(tmp_path / "nvidia-smi", f"[ $1 = --query-gpu=compute_cap ] && printf '{lines}\\n'")
    choice = setup.choose_cuda()
    assert (choice.architectures if compiled else choice) == (compiled or OLD_GPUS)


@pytest.mark.parametrize(
    ("wanted", "listed", "compiled"),
    [
        (None, None, NO_GPU),
        (None, "all", ALL),
        (None, "9.0a", ["9.0a"]),
        ("auto", "8.0;12.0+PTX", ["8.0", "12.0+PTX"]),
        ("1", None, ALL),
        ("1", "9.0a, 10.0", ["9.0a", "10.0"]),
        (None, "7.5@9.0 8.0@PTX", ["7.5@9.0", "8.0@PTX"]),
        ("0", "all", "TORCH_TURBOQUANT_BUILD_CUDA is 0"),
    ],
)
def test_what_is_compiled_without_a_gpu(setup, monkeypatch, wanted, listed, compiled):
    for name, value in (
        ("TORCH_TURBOQUANT_BUILD_CUDA", wanted),
        ("TORCH_CUDA_ARCH_LIST", listed),
    ):
        if value is not None:
            monkeypatch.setenv(name, value)
    choice = setup.choose_cuda()
    assert (choice if isinstance(choice, str) else choice.architectures) == compiled


@pytest.mark.parametrize(
    "entry", ["8.0@", "@9.0", "8.0@9", "8.0@9.0+PTX", "8.0+PTX@9.0", "8.0@ptx"]
)
def test_entries_that_are_refused(setup, monkeypatch, entry):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", f"9.0a {entry}")
    with pytest.raises(SystemExit, match=re.escape(f"holds {entry!r}; entries look like 9.0a")):
        setup.choose_cuda()


def test_choices_that_are_refused(setup, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "sm_90")
    with pytest.raises(SystemExit, match=r"'sm_90'; entries look like 9\.0a or"):
        setup.choose_cuda()
    monkeypatch.setenv("TORCH_TURBOQUANT_BUILD_CUDA", "yes")
    with pytest.raises(SystemExit, match="'yes'; it can be 0, 1 or auto"):
        setup.choose_cuda()
    monkeypatch.setattr(setup, "find_nvcc", lambda: None)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "all")
    monkeypatch.setenv("TORCH_TURBOQUANT_BUILD_CUDA", "1")
    with pytest.raises(SystemExit, match="is 1, but nvcc is not in CUDA_HOME/bin nor on PATH"):
        setup.choose_cuda()
    monkeypatch.setenv("TORCH_TURBOQUANT_BUILD_CUDA", "auto")
    assert setup.choose_cuda() == "nvcc is not in CUDA_HOME/bin nor on PATH"


def test_an_old_setuptools_is_refused_by_name(monkeypatch):
    """Python 3.11 puts 65.5 into a new virtual environment."""
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "__version__", "65.5.0")
    with pytest.raises(SystemExit, match=r"needs setuptools >= 77, but setuptools 65\.5\.0 is"):
        load_script("setup.py")


def test_machine_code_of_one_architecture(setup, monkeypatch):
    """nvcc is asked for the chosen ones and no others; without CUDA it is not asked at all."""
    monkeypatch.chdir(ROOT)
    text = setup.ninja_file("0", setup.Cuda("/opt/nvcc", ["9.0a", "12.0+PTX"]))
    flags = re.findall(r"-gencode=\S+", text)
    assert flags == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_120,code=sm_120",
        "-gencode=arch=compute_120,code=compute_120",
    ]
    assert "build build/native/csrc/cuda/" in text
    text = setup.ninja_file("0", setup.Cuda("/opt/nvcc", ["7.5@9.0", "8.0@PTX"]))
    assert re.findall(r"-gencode=\S+", text) == [
        "-gencode=arch=compute_75,code=sm_90",
        "-gencode=arch=compute_80,code=compute_80",
    ]
    assert "ARCHITECTURES='\"7.5@9.0 8.0@PTX\"'" in text
    assert "csrc/cuda" not in setup.ninja_file("0", None)


def test_a_strict_editable_install_has_links_to_the_libraries(setup, monkeypatch, tmp_path):
    """`pip install --config-settings editable_mode=strict -e .` builds them in the clone."""
    monkeypatch.setattr(setup, "choose_cuda", lambda: "not asked for")
    monkeypatch.setattr(setup, "ninja_file", lambda *_: "")
    monkeypatch.setattr(setup, "OBJECTS", tmp_path / "objects")
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(setup.subprocess, "run", lambda *_, **__: done)
    monkeypatch.chdir(tmp_path)
    command = setup.BuildLibraries(setup.Distribution())
    command.build_lib = "elsewhere"
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "libturboquant_cpu.so").touch()
    library = "torch_turboquant/lib/libturboquant_cpu.so"
    for editable, links in ((True, {f"elsewhere/{library}": library}), (False, {})):
        command.editable_mode = editable
        command.inplace = editable
        command.run()
        assert command.get_output_mapping() == links
        assert Path(library if editable else f"elsewhere/{library}").exists()


def test_folders_with_spaces(setup, monkeypatch, tmp_path):
    """Compilers get the folders of torch and of nvcc, which may lie in the clone, as one word."""
    pytest.importorskip("ninja")
    here = tmp_path / "My Projects"
    torch_folder, objects, given = here / "torch", tmp_path / "objects", tmp_path / "given"
    for folder in (here, objects):
        folder.mkdir()
    for compiler in (tmp_path / "c++", here / "nvcc"):
        program(compiler, f"printf '%s\\n' \"$@\" >> {given}")
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    monkeypatch.setattr(setup, "torch_folder", lambda: torch_folder)
    monkeypatch.setattr(setup, "OBJECTS", objects)
    monkeypatch.chdir(ROOT)
    rules = objects / "build.ninja"
    rules.write_text(setup.ninja_file("0", setup.Cuda(str(here / "nvcc"), ["9.0a"])))
    for target in ("csrc/ops.cpp.o", "csrc/cuda/pack.cu.o"):
        command = [sys.executable, "-m", "ninja", "-f", rules, objects / target]
        assert subprocess.run(command, capture_output=True).returncode == 0
        words = given.read_text().splitlines()
        assert str(torch_folder / "include") in words
        prefix = f"-ffile-prefix-map={torch_folder}/include/="
        if target.endswith("cu.o"):  # nvcc's own quotes, around what it passes on
            assert words[words.index("-Xcompiler") + 1].endswith(f',"{prefix}"')
        else:
            assert prefix in words
        given.unlink()


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_builds_again_without_a_source_that_is_gone(tmp_path):
    """Or that has another name: nothing is newer than the wheel then."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    package = tmp_path / "torch_turboquant"
    for folder in ("csrc", "torch_turboquant", "requirements", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    names = ("setup.py", "pyproject.toml", "LICENSE", "requirements/build.txt", ".venv/.build")
    for name in (*names, "torch_turboquant/one.py", "torch_turboquant/two.py"):
        (tmp_path / name).touch()
    said = "echo 'torch_turboquant: building'; mkdir build/wheel; ls torch_turboquant >> built"
    program(tmp_path / ".venv" / "bin" / "python", said)

    def built() -> list[str]:
        command = ["make", "--no-print-directory", "build/wheel/.built"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        return (tmp_path / "built").read_text().split()

    assert built() == built() == ["one.py", "two.py"]
    (package / "two.py").rename(package / "three.py")
    assert built()[2:] == ["one.py", "three.py"]
    (package / "one.py").unlink()
    assert built()[4:] == ["three.py"]


# ---- the libraries


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    for module in ("auditwheel", "elftools", "torch_abi_audit"):
        pytest.importorskip(module)
    return load_script("wheels/audit.py")


@pytest.mark.parametrize("path", LIBRARIES, ids=lambda path: path.stem)
def test_libraries_use_the_stable_abi_only(audit, path, capsys):
    table = audit.Table()
    audit.audit_library(table, path.stem.removeprefix("libturboquant_"), path)
    assert not table.failed, capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ("C++ symbols of torch", "namespace at { void f(); } void g() { at::f(); }"),
        ("C++ symbols of torch", "namespace c10 { void f(); } void g() { c10::f(); }"),
        ("Python symbols", 'extern "C" void PyErr_Clear(); void g() { PyErr_Clear(); }'),
        ("least torch", 'extern "C" int torch_tag_core(); int g() { return torch_tag_core(); }'),
        ("unknown torch functions", 'extern "C" int torch_x(); int g() { return torch_x(); }'),
        ("exports", 'extern "C" void stranger() {}'),
        ("libraries needed", ""),
        ("folders of this machine", f'const char* folder() {{ return "{ROOT}"; }}'),
    ],
)
def test_the_audit_finds(audit, tmp_path, capsys, row, code):
    compiler = shutil.which("g++") or pytest.skip("needs g++")
    (tmp_path / "bad.cpp").write_text(code)
    path = tmp_path / "libturboquant_cpu.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, tmp_path / "bad.cpp"], check=True)
    audit.audit_library(audit.Table(), "cpu", path)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("FAIL") and f"cpu: {row}" in line for line in lines), lines


def test_the_audit_limits_the_size_of_a_library(audit, monkeypatch, capsys):
    (cpu, *_) = LIBRARIES
    size = cpu.stat().st_size
    for limit, result in ((size, "ok"), (size - 1, "FAIL")):
        monkeypatch.setattr(audit, "MAX_LIBRARY_BYTES", limit)
        audit.audit_library(audit.Table(), "cpu", cpu)
        assert re.search(rf"^{result} +cpu: size ", capsys.readouterr().out, re.MULTILINE)


# ---- what the code of GPUs costs


@pytest.fixture(scope="module")
def sizes() -> ModuleType:
    pytest.importorskip("elftools")
    return load_script("wheels/sizes.py")


def container(*entries: tuple[int, int, int]) -> bytes:
    """What nvcc puts into an object file: a header, then each code (kind, architecture, bytes)."""
    code = b""
    for kind, architecture, size in entries:
        code += struct.pack("<HHIQIIHHI", kind, 0x101, 64, size, 0, 0, 8, 1, architecture)
        code += bytes(64 - 32 + size)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(code)) + code


def test_sizes_of_code(sizes):
    first, second = container((2, 75, 1000), (2, 120, 24), (1, 120, 8)), container((2, 75, 12))
    padded = first + bytes(-len(first) % 8) + second
    wanted = {"7.5": 1000 + 12 + 2 * 64, "12.0": 24 + 64, "12.0 PTX": 8 + 64}
    assert sizes.device_code(padded) == wanted and not sizes.device_code(b"")
    with pytest.raises(ValueError, match="no container at byte 0"):
        sizes.device_code(bytes(64))


def test_sizes_of_parts(sizes, monkeypatch, tmp_path):
    monkeypatch.setattr(
        sizes, "section_of", lambda path: container((2, 90, len(path.name)), (2, 80, 0))
    )
    parts = sizes.measured(files=False)
    assert set(parts) >= {"attention", "attention/instances", "codec", "hadamard", "common"}
    files = sizes.measured(files=True)
    assert "attention/instances/split_kv_128.cu" in files and "codec/encode_bulk.cu" in files
    code = sum(sizes_of.total() for sizes_of in files.values())
    assert code == sum(sizes_of.total() for sizes_of in parts.values())
    rows = sizes.table(parts, library=code + 5000)
    assert rows[0] == ["kB", "8.0", "9.0", "all"] and len(rows) == len(parts) + 4
    assert rows[-2][-1] == "5" and all(len(row) == 4 for row in rows)
    monkeypatch.undo()
    monkeypatch.setattr(sizes, "OBJECTS", tmp_path)
    with pytest.raises(FileNotFoundError):
        sizes.measured(files=False)


@pytest.mark.parametrize("path", LIBRARIES, ids=lambda path: path.stem)
def test_sizes_of_a_library(sizes, path):
    found = sizes.device_code(sizes.section_of(path))
    assert bool(found) == ("cuda" in path.stem)


# ---- what it says of itself


def test_the_manifest_is_of_wheels_like_this():
    entries = json.loads((ROOT / "wheels" / "manifest.json").read_text())
    assert entries
    for entry in entries:
        name = f"torch_turboquant-{torch_turboquant.__version__}-py3-none-manylinux_2_"
        assert entry["wheel"].startswith(name)
        assert entry["bytes"] < 20 * 2**20 and len(entry["sha256"]) == 64
        assert any("fresh" in what for what in entry["checks"])


def test_info_as_json():
    done = python("-m", "torch_turboquant", "info", "--json")
    assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout)
    assert info["version"] == torch_turboquant.__version__
    assert info["torch"] == torch.__version__
    assert info["format_version"] == 1
    assert info["cpu_level"] == info["cpu_levels"][0]
    assert info["cpu_levels"][-1] == "portable"
    for name, library in info["libraries"].items():
        assert Path(library["path"]).stat().st_size == library["bytes"]
        assert library["torch_target"] == "0x020b000000000000", name
    assert ("cuda" in info["libraries"]) == bool(info["cuda_architectures"])
    if torch.version.cuda is None:
        assert "cuda" not in info["libraries"]


def test_info_as_text():
    done = python("-m", "torch_turboquant", "info")
    assert done.returncode == 0, done.stderr
    facts = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert facts["version"].strip() == torch_turboquant.__version__
    assert "libturboquant_cpu.so" in facts["cpu library"]
    assert facts["cpu level"].strip() == torch_turboquant.build_info()["cpu_levels"][0]
    assert facts["cpu levels"].split() == torch_turboquant.build_info()["cpu_levels"]
    devices = torch_turboquant.build_info()["devices"]["cuda"]
    assert facts["cuda devices"].strip() == (", ".join(devices) or "none")


def test_the_script_is_the_command():
    (script,) = distribution().entry_points.select(group="console_scripts")
    assert script.name == "torch_turboquant" and script.load() is command_line.main


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "the following arguments are required: {info,memory,calibrate,quantize,demo,eval}"),
        (["inf"], "invalid choice: 'inf'"),
        (["memory"], "torch_turboquant memory: the following arguments are required: --context"),
        (["memory", "--context", "1x"], "argument --context: '1x' is no number of tokens"),
        (["info", "--op", "x"], "argument --op: invalid choice: 'x'"),
    ],
)
def test_a_mistake_is_one_line_and_where_the_options_are(capsys, argv, says):
    with pytest.raises(SystemExit) as exit:
        command_line.main(argv)
    first, second = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and says in first
    assert second == f"(the options: {first.partition(':')[0]} --help)"


def test_the_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        command_line.main(["--version"])
    assert capsys.readouterr().out == f"torch_turboquant {torch_turboquant.__version__}\n"


# ---- packages of extras


def test_the_packages_of_extras_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups: dict[str, dict[str, str]] = {}
    for extra, lines in project["optional-dependencies"].items():
        pairs = (re.match(r"(\w+)(?:>=([\d.]+))?", line).groups() for line in lines)
        groups[extra] = {name: least or "0" for name, least in pairs if name != "torch_turboquant"}
    demo = groups["transformers"] | groups["demo"]
    assert {*_extras.READING, *_extras.FETCHED_MODEL, *_extras.FETCHED_TEXT} == set(demo)
    assert set(_extras.PICTURE) == set(groups["eval"])
    assert demo | groups["eval"] == _extras.LEAST


def test_missing_packages_are_named_together(monkeypatch):
    installed = {"transformers": "4.57.1", "safetensors": "0.5.0rc1"}

    def version(name):
        if name in installed:
            return installed[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(
        _extras.importlib.util, "find_spec", lambda name: name if name != "gguf" else None
    )
    monkeypatch.setattr(_extras.importlib.metadata, "version", version)
    with pytest.raises(_extras.MissingPackages) as error:
        _extras.require("demo", *_extras.READING, *_extras.FETCHED_MODEL)
    assert str(error.value) == (
        "demo needs transformers >= 5.5 (4.57.1 is installed), the package gguf: "
        "pip install 'torch_turboquant[demo]'"
    )


@pytest.mark.parametrize(
    ("argv", "missing"),
    [
        (["demo"], "transformers"),
        (["demo"], "gguf"),
        (["demo"], "mwparserfromhell"),
        (["eval"], "accelerate"),
        (["eval", "--model", "somewhere"], "mwparserfromhell"),
        (["eval", "--model", "a", "--text", "b", "--picture", "c.png"], "matplotlib"),
    ],
)
def test_nothing_is_fetched_without_all_packages(monkeypatch, capsys, tmp_path, argv, missing):
    pytest.importorskip("transformers")
    from torch_turboquant.eval import assets

    def fetch(*_):
        raise AssertionError("a download began")

    monkeypatch.setattr(assets, "fetch", fetch)
    real = _extras._what_is_wrong
    monkeypatch.setattr(
        _extras, "_what_is_wrong", lambda name: name if name == missing else real(name)
    )
    monkeypatch.chdir(tmp_path)
    assert command_line.main([*argv, "--cache-dir", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{argv[0]} needs {missing}: pip install 'torch_turboquant[{argv[0]}]'" == line


@pytest.mark.parametrize("when", ["add_arguments", "run"])
@pytest.mark.parametrize("name", ["demo", "eval"])
def test_programs_name_the_extra_they_need(monkeypatch, capsys, name, when):
    def missing(*_):
        raise ModuleNotFoundError("No module named 'gguf'", name="gguf")

    program = ModuleType(f"torch_turboquant.{name}")
    program.add_arguments = lambda parser: None
    program.run = lambda args: 0
    setattr(program, when, missing)
    monkeypatch.setitem(sys.modules, f"torch_turboquant.{name}", program)
    assert command_line.main([name]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "gguf" in line and f"pip install 'torch_turboquant[{name}]'" in line


def test_demo_passes_its_arguments_on(monkeypatch):
    program = ModuleType("torch_turboquant.demo")
    program.add_arguments = lambda parser: parser.add_argument("--tokens", type=int)
    program.run = lambda args: args.tokens
    monkeypatch.setitem(sys.modules, "torch_turboquant.demo", program)
    assert command_line.main(["demo", "--tokens", "7"]) == 7


def test_an_interrupted_program_says_so(monkeypatch, capsys):
    def run(args):
        raise KeyboardInterrupt

    program = ModuleType("torch_turboquant.demo")
    program.add_arguments = lambda parser: None
    program.run = run
    monkeypatch.setitem(sys.modules, "torch_turboquant.demo", program)
    assert command_line.main(["demo"]) == 130
    assert capsys.readouterr().err == "demo: interrupted\n"


@pytest.mark.parametrize("argument", ["info", "--help"])
def test_a_reader_that_goes_away_ends_a_command_quietly(argument):
    """As `| head -1` does; 141 is what shells give a program that SIGPIPE ended."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-I", "-m", "torch_turboquant", argument]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


# ---- how it fails


def test_an_old_torch_is_refused_by_name():
    done = python("-c", "import torch; torch.__version__ = '2.10.1'; import torch_turboquant")
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError") and "torch >= 2.11" in last and "2.10.1" in last


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0a0+git1", "2.20.1+cu130", "3.0.0"])
def test_newer_torch_is_accepted(version):
    _library.check_torch_version(version)


@pytest.mark.parametrize("version", ["1.13.1", "2.9.0", "2.10.2+cu128"])
def test_older_torch_is_not(version):
    with pytest.raises(ImportError, match="pip install --upgrade torch"):
        _library.check_torch_version(version)


def test_a_missing_library_says_what_to_do(tmp_path):
    with pytest.raises(ImportError, match=r"libturboquant_cpu.so is missing.*make wheel"):
        _library.load("cpu", tmp_path)


def test_a_library_that_does_not_load_says_why(tmp_path):
    (tmp_path / "libturboquant_cuda.so").write_bytes(b"not a library")
    with pytest.raises(ImportError, match=r"cannot be loaded: .*torch >= 2\.11.*glibc"):
        _library.load("cuda", tmp_path)


def test_a_half_upgraded_package_is_refused(monkeypatch):
    monkeypatch.setattr(_library, "__version__", "9.9.9")
    with pytest.raises(ImportError, match=r"9\.9\.9.*--force-reinstall") as error:
        _library.load("cpu")
    assert "torch_turboquant" not in str(error.value).partition("pip install")[2]  # not of an index


def source_tree(folder: Path) -> None:
    """What a clone has: the package without its libraries, and the sources."""
    here = Path(torch_turboquant.__file__).parent
    ignored = shutil.ignore_patterns("lib", "__pycache__", "integrations", "eval", "pool", "ops")
    shutil.copytree(here, folder / "torch_turboquant", ignore=ignored)
    (folder / "csrc").mkdir()


def test_a_command_inside_a_clone_says_what_to_type_instead(tmp_path):
    source_tree(tmp_path)
    (tmp_path / "torch.py").write_text("__version__ = '2.13.0'")  # the real one takes seconds
    command = [sys.executable, "-m", "torch_turboquant", "info", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "hides the installed package here. Type: " in line
    assert line.endswith(f"{sys.executable} -I -m torch_turboquant info --json")


def test_a_command_inside_a_clone_without_a_wheel(tmp_path, monkeypatch):
    source_tree(tmp_path)
    monkeypatch.setattr(_command, "PACKAGE", tmp_path / "torch_turboquant")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "elsewhere")])
    monkeypatch.setattr(sys, "argv", ["-m", "info"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "torch_turboquant", "info"])
    with pytest.raises(SystemExit, match=r"Type: make wheel && pip install build/wheel/\*\.whl$"):
        _command.exit_from_command(ImportError("no library"))


def test_other_programs_get_the_error_itself(monkeypatch):
    for argv in (["-c"], ["script.py"], [""], []):
        monkeypatch.setattr(sys, "argv", argv)
        assert _command.exit_from_command(ImportError("no library")) is None
    monkeypatch.setattr(sys, "argv", ["/venv/bin/torch_turboquant", "info"])
    with pytest.raises(SystemExit, match="torch_turboquant: no library"):
        _command.exit_from_command(ImportError("no library"))
