"""Says what each part of the CUDA library costs: bytes of compressed code for each architecture.

    python wheels/sizes.py            # a row for each room
    python wheels/sizes.py --files    # a row for each source

Reads the object files of the last build (build/native). Machine code and PTX are in their section
.nv_fatbin: containers that begin with a magic number, with an entry for each architecture, whose
header names its kind, its size and the architecture. What remains of the library is host code.
"""

import argparse
import struct
from collections import Counter
from pathlib import Path

from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).resolve().parents[1]
OBJECTS = ROOT / "build" / "native"
LIBRARY = OBJECTS / "libturboquant_cuda.so"
SECTION, MAGIC = ".nv_fatbin", 0xBA55ED50
KINDS = {1: " PTX", 2: ""}


def device_code(data: bytes) -> Counter[str]:
    """Bytes of each architecture in a section .nv_fatbin: "9.0", or "9.0 PTX"."""
    sizes: Counter[str] = Counter()
    at = 0
    while at < len(data):
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            raise ValueError(f"{SECTION} has no container at byte {at}")
        at += header
        end = at + size
        while at < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
            (architecture,) = struct.unpack_from("<I", data, at + 28)
            sizes[f"{architecture // 10}.{architecture % 10}{KINDS[kind]}"] += header + size
            at += header + size
        at = -(-end // 8) * 8
    return sizes


def section_of(path: Path) -> bytes:
    """.nv_fatbin of an object file or a library; empty where there is none."""
    with open(path, "rb") as file:
        found = ELFFile(file).get_section_by_name(SECTION)
        return found.data() if found else b""


def part_of(source: Path, files: bool) -> str:
    """The room of a source below csrc/cuda; the many instances of attention are a part of it."""
    if files:
        return str(source)
    room = source.parts[0].removesuffix(".cu")
    return f"{room}/{source.parts[1]}" if source.parts[1:2] == ("instances",) else room


def measured(files: bool) -> dict[str, Counter[str]]:
    """Part -> architecture -> bytes.

    Raises:
        FileNotFoundError: the CUDA library has not been built.
    """
    parts: dict[str, Counter[str]] = {}
    folder = ROOT / "csrc" / "cuda"
    for path in sorted(folder.rglob("*.cu")):
        source = path.relative_to(folder)
        code = device_code(section_of(OBJECTS / "csrc" / "cuda" / f"{source}.o"))
        parts.setdefault(part_of(source, files), Counter()).update(code)
    return parts


def table(parts: dict[str, Counter[str]], library: int) -> list[list[str]]:
    """Rows of text, in units of 1000 bytes, with what is no device code last."""
    code = sum(parts.values(), Counter())
    architectures = sorted(code, key=lambda name: (float(name.split()[0]), name))
    rows = [["kB", *architectures, "all"]]
    for name, sizes in [*parts.items(), ("all code of GPUs", code)]:
        each = [*(sizes[a] for a in architectures), sizes.total()]
        rows.append([name, *(f"{n / 1000:,.0f}" for n in each)])
    blank = [""] * len(architectures)
    rows.append(["host code", *blank, f"{(library - code.total()) / 1000:,.0f}"])
    rows.append(["the library", *blank, f"{library / 1000:,.0f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", action="store_true", help="a row for each source")
    try:
        rows = table(measured(parser.parse_args().files), LIBRARY.stat().st_size)
    except FileNotFoundError as missing:
        parser.error(f"{missing.filename} is missing: build the library first, make wheel")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *numbers in rows:
        cells = [text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True)]
        print("  ".join([name.ljust(widths[0]), *cells]).rstrip())


if __name__ == "__main__":
    main()
