"""Soak runs, and the random cases of the tests."""

from __future__ import annotations

import re

from common import markdown

from generator import results
from generator.ops import op_names
from generator.words import paragraph


def soak() -> str:
    """The soak runs: one column per device."""
    found = results.read_rows("soak")
    lines = [
        ["minutes", *(f"{row['minutes']:.0f}" for row in found)],
        ["preset, dtype", *(f"{row['preset']}, {row['dtype']}" for row in found)],
    ]
    counts = (
        "steps,arrive,grow,tokens attended,fork,cut,roll back,move,leave,exhausted,pages checked,"
        "attention checked"
    )
    for name in counts.split(","):
        lines.append([name, *(f"{row[name]:,}" for row in found)])
    lines.append(
        [
            "largest error of attention, of the largest value (limit)",
            *(f"{row['worst_error']:.1e} ({row['tolerance']:.0e})" for row in found),
        ]
    )
    for name, label in (
        ("process_mib", "memory of the process"),
        ("gpu_mib", "tensors on the GPU"),
    ):
        ends = (
            f"{row[name][0]:.1f} MiB after a tenth of the time, at most {max(row[name]):.1f}, "
            f"{row[name][-1]:.1f} at the end"
            if any(row[name])
            else ""
            for row in found
        )
        lines.append([label, *ends])
    return markdown(["", *(row["device"] for row in found)], lines)


def fuzz() -> str:
    """The random cases of one run of the tests, counted in their sources."""
    tests = results.ROOT / "tests"
    simd = (tests / "test_simd.py").read_text()
    calls = re.findall(r"^    (\w+_call): (\d+),$", simd, re.MULTILINE)
    bodies = dict(re.findall(r"^def (\w+_call)\((.*?)(?=^\S)", simd, re.MULTILINE | re.DOTALL))
    seeds = int(re.search(r"^SEEDS = (\d+)", (tests / "test_sanitizers.py").read_text(), re.M)[1])
    kernels = (tests / "native" / "kernels.cpp").read_text().split("CASES = {")[1].split("};")[0]
    names = re.findall(r'\{"(\w+)"', kernels)
    lines = []
    for call, count in calls:
        called = set(re.findall(r"\btt\.(\w+)\(", bodies[call]))
        ops = ", ".join(f"`{op}`" for op in op_names() if op in called)
        lines.append([ops, f"{int(count):,}"])
    return (
        markdown(["random calls, every level against plain C++", "each"], lines)
        + "\n\n"
        + paragraph(
            f"Under AddressSanitizer and UBSan: {len(names)} kernels ({', '.join(names)}), "
            f"{seeds:,} seeds each at every level: {len(names) * seeds * 3:,} runs on a processor "
            "with AVX-512."
        )
    )
