"""The table of strategies: `torch_turboquant eval --strategies`."""

from __future__ import annotations

from pathlib import Path

from common import markdown

from generator import results
from generator.results import source
from generator.words import half

STRATEGIES = "strategies_smollm2_135m_instruct"


def strategies_rows() -> str:
    """One line for each strategy: bits, size, divergence, answers, time."""
    if not (results.RESULTS / f"{STRATEGIES}.json").exists():
        return "Strategies have not been measured yet."
    rows, lines = results.read_rows(STRATEGIES), []
    whole, base = rows[0]["bytes_8k"], rows[0]["step"]["ms"]
    for row in rows:
        smaller = whole / row["bytes_8k"]
        cells = [f"`{row['cache']}`", f"{16 / smaller:.2f}", f"{smaller:.2f}x"]
        cells.append(f"{int((80e9 - 2 * row['parameters']) // row['bytes_8k']):,}")
        cells += [f"{row['kl']:.4f} ± {half(row['kl_interval']):.4f}" if "kl" in row else ""]
        cells += [f"{100 * row['top1_agreement']:.1f}%" if "kl" in row else ""]
        cells += [f"{100 * row['synthetic'][name]:.0f}%" for name in ("seen", "unseen")]
        ms = row["step"]["ms"]
        cells.append("" if ms is None else f"{ms:.2f} ms ({base / ms:.2f}x)")
        lines.append(cells)
    header = ["cache", "bits", "smaller", "requests in 80 GB", "KL", "top-1", "1st question", "2nd"]
    origin = source(STRATEGIES, rows, "../")
    return f"{markdown([*header, 'step'], lines)}\n\n{origin}"


def strategies_drawn(path: Path) -> None:
    """Divergence over bits, with and without eviction."""
    from torch_turboquant.eval import report  # needs the packages of an extra

    rows = results.read_rows(STRATEGIES)
    report.strategies_picture(path, rows, results.digest(STRATEGIES))
