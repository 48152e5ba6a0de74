"""Quality: rows that other documents quote, and pictures. quality_tables.py has the tables."""

from __future__ import annotations

from pathlib import Path

import quality_tables
from common import Row, file_name

from generator import results
from generator.words import half

QUALITY = file_name("quality", quality_tables.MODELS["SmolLM2-135M"])
OTHERS = {
    "int8": "int8 per token",
    "kivi4": "KIVI, 4 bits",
    "q4_0h": "4-bit blocks, rotated",
    "int4": "int4 per token",
}


def quality_rows(name: str = QUALITY) -> dict[str, Row]:
    """Rows of the shortest segments, computed in float32: cache -> row."""
    wanted = {"dtype": "float32", "context": quality_tables.SHORT}
    return {row["cache"]: row for row in results.read_rows(name) if wanted.items() <= row.items()}


def top1(row: Row) -> str:
    """Agreement of the most likely next token, with half of its interval."""
    return f"{100 * row['top1_agreement']:.1f}% ± {100 * half(row['top1_agreement_interval']):.1f}"


def quality_picture(path: Path) -> None:
    """Presets and controls without changes, for which a picture has no room."""
    from torch_turboquant.eval import report  # needs the packages of an extra

    found = quality_rows(path.stem)
    shown = [row for cache, row in found.items() if ":" not in cache]
    report.picture(path, shown, results.digest(path.stem))
