"""Eviction of a prompt and while decoding: bench_eviction and bench_heavy_hitters."""

from __future__ import annotations

from common import file_name, markdown

from generator import results
from generator.results import h200_rows, source

EVICTION_MODELS = ("Qwen2.5-Coder-1.5B-Instruct", "Gemma-3-270M")


def eviction_quality() -> str:
    """Divergence and right answers of every cache, policy and share, by model."""
    files = [file_name("eviction", model) for model in EVICTION_MODELS]
    rows = [
        {(r["cache"], r["keep"], r["policy"]): r for r in file if r["cache"] != "none"}
        for file in map(results.read_rows, files)
    ]
    header = ["cache", "keep", "evict"]
    for model in EVICTION_MODELS:
        header += [f"{model}: bytes", "KL", "seen", "unseen"]
    lines = []
    for cache, keep, policy in rows[0]:
        cells = [f"`{cache}`", f"{keep:g}", "" if policy == "-" else f"`{policy}`"]
        whole = [found["k8v8", 1, "-"]["bytes"] for found in rows]
        for found, size in zip(rows, whole, strict=True):
            row = found[cache, keep, policy]
            kl = f"{row['kl']:.4f} ± {row['kl_error']:.4f}"
            answers = [f"{100 * row[name]:.0f}%" for name in ("seen", "unseen")]
            cells += [f"{row['bytes'] / size:.2f}", kl, *answers]
        lines.append(cells)
    origins = [source(name, found.values(), "../") for name, found in zip(files, rows, strict=True)]
    return "\n\n".join([markdown(header, lines), "\\\n".join(origins)])


def eviction_speed() -> str:
    """Bytes and times by share and policy."""
    if not (results.RESULTS / "h200_eviction.json").exists():
        return "Times have not been measured yet."
    rows = h200_rows("h200_eviction")
    whole = {row["cache"]: row["attention_ms"] for row in rows if row["keep"] == 1}
    lines = []
    for row in rows:
        cells = [f"`{row['cache']}`", f"{row['keep']:g}"]
        cells += ["" if row["policy"] == "-" else f"`{row['policy']}`"]
        cells += [f"{row['bytes'] / 1e9:.2f} GB", f"{row['smaller_than_bf16']:.1f}x"]
        faster = whole[row["cache"]] / row["attention_ms"]
        cells += [f"{1000 * row['attention_ms']:.0f} us ({faster:.2f}x)"]
        cells += [f"{row['step_ms']:.2f} ms" if "step_ms" in row else ""]
        cells += [f"{row['prompt_ms']:.0f} ms", f"{row['peak_bytes'] / 1e9:.1f} GB"]
        lines.append(cells)
    header = ["cache", "keep", "evict", "pages", "all against bf16", "attention of a layer", "step"]
    header += ["prompt", "most memory of the prompt"]
    origin = source("h200_eviction", rows, "../")
    return f"{markdown(header, lines)}\n\n{origin}"


def hitters_cost() -> str:
    """What eviction while decoding adds to decode steps."""
    if not (results.RESULTS / "h200_heavy_hitters.json").exists():
        return "Times have not been measured yet."
    rows, lines = h200_rows("h200_heavy_hitters"), []
    for row in rows:
        parts = row["parts_ms"]
        cells = [f"{row['sequences']} x {row['budget']:,}", str(row["interval"])]
        cells += [str(row["window"]), f"{row['step_ms']:.2f} ms", f"{row['eviction_ms']:.0f} ms"]
        cells += [f"{100 * row['share']:.1f}%"]
        cells += [f"{parts[name]:.0f} ms" for name in ("mass", "choice", "compact")]
        lines.append(cells)
    header = ["sequences x budget", "interval", "window", "step", "an eviction", "share"]
    header += ["mass", "choice", "compaction"]
    origin = source("h200_heavy_hitters", rows, "../")
    return f"{markdown(header, lines)}\n\n{origin}"
