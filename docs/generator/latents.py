"""Caches of latents: bench_mla, bench_mla_quality and bench_latent_steps."""

from __future__ import annotations

from common import Row, markdown

from generator import results
from generator.results import h200_rows, source

LATENT_CHANNELS = "none", "mean", "norm", "mean norm", "learned"


def latent_quality() -> str:
    """Divergence of every preset for latents, by what was done to their channels."""
    rows = results.read_rows("mla_quality")
    found = {(r["latents"], r["cache"], r["transform"], r["channels"]): r for r in rows}
    sets = list(dict.fromkeys(row["latents"] for row in rows))
    lines = []
    for cache, transform in dict.fromkeys((r["cache"], r["transform"]) for r in rows):
        if cache == "uncompressed":
            continue
        cells = [f"`{cache}`", "yes" if transform else "no"]
        for latents in sets:
            kl = [found[latents, cache, transform, name]["kl"] for name in LATENT_CHANNELS]
            cells += [f"{x:.5f}" for x in kl]
        lines.append(cells)
    header = ["preset", "transform"] + [f"{s}: {name}" for s in sets for name in LATENT_CHANNELS]
    origin = source("mla_quality", rows, "../")
    return f"{markdown(header, lines)}\n\n{origin}"


LATENT_PRESETS = "k4u", "k5u", "k8", "k4", "k3"


def latent_speed() -> str:
    """Times of decode steps over packed latents, a row for each batch and number of heads."""
    rows = h200_rows("h200_mla")
    found: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        names = "batch", "context", "heads", "q_len", "tail", "short"
        key = tuple(row[name] for name in names)
        found.setdefault(key, {})[str(row["preset"])] = row
    lines = []
    for (batch, context, heads, q_len, tail, short), presets in found.items():
        note = f", {q_len} queries" if q_len > 1 else ", exact tail" if tail else ""
        note += f", beside {short} x 200" if short else ""
        best = presets["k4u"]
        cells = [f"{batch} x {context:,}{note}", str(heads)]
        for name in LATENT_PRESETS:
            row = presets.get(name)
            cells.append(f"{1000 * row['ms']:.0f} ({row['speedup']:.2f}x)" if row else "")
        name = {"flashinfer": "FlashInfer", "flashmla": "FlashMLA"}[best["best_bf16"]]
        lines.append([*cells, f"{1000 * best['best_bf16_ms']:.0f}, {name}"])
    header = ["batch x context", "heads", *(f"`{name}`" for name in LATENT_PRESETS), "best bf16"]
    origin = source("h200_mla", rows, "../../")
    return f"{markdown(header, lines)}\n\n{origin}"


LATENT_CACHES = {"dynamic": "transformers' `DynamicCache`", "uncompressed": "`uncompressed`"}


def latent_steps() -> str:
    """Steps of a model by cache: whole, and the part that grows with the context."""
    rows = h200_rows("h200_latent_steps")
    found = {(row["way"], row["mode"]): row for row in rows}
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        size = found[way, "eager"]["bytes_per_layer"] / 1e6
        cells = [LATENT_CACHES.get(way, f"`{way}`"), f"{size:.0f} MB"]
        for mode in ("eager", "graph"):
            row = found.get((way, mode))
            cells += [f"{row['ms']:.1f} ms ({row['faster']:.1f}x)" if row else ""]
            cells += [f"{row['attention_ms']:.2f} ms" if row else ""]
        lines.append(cells)
    header = ["cache", "bytes a layer", "step, eager", "of it for the context"]
    header += ["step, CUDA graph", "of it for the context"]
    origin = source("h200_latent_steps", rows, "../")
    return f"{markdown(header, lines)}\n\n{origin}"
