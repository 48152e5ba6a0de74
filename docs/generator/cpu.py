"""Attention and a small model on a CPU: bench_cpu and `make demo`."""

from __future__ import annotations

from pathlib import Path

from common import Row, markdown

from generator import results
from generator.pictures import DEFAULT, grouped_bars, preset_colors
from generator.results import digest
from generator.words import name_of


def cpu_rows() -> list[Row]:
    """Rows of bench_cpu on the processor with AVX-512; a file may hold those of others."""
    found = [row for row in results.read_rows("cpu") if "avx512" in row["levels"].split()]
    return [row for row in found if row["device"] == found[0]["device"]]


def cpu_attention_table() -> str:
    """A row per context: two presets at the best level, and one at the level below it."""
    found = {
        (row["row"].split()[1], row["level"], row["context"], row["batch"]): row
        for row in cpu_rows()
        if row["row"].startswith("attention k")
    }
    lines = []
    for context, batch in ((8192, 1), (32768, 1), (65536, 1), (8192, 4), (32768, 4)):
        line = [f"{context:,} x {batch}"]
        for preset, level in (("k4v4", "avx512"), ("k3v3", "avx512"), ("k4v4", "avx2")):
            row = found[preset, level, context, batch]
            line += [f"{row['ms']:.2f} ms", f"{row['speedup_vs_bf16']:.1f}x"]
            if level == "avx512":
                line.append(f"{row['speedup_vs_float32']:.1f}x")
        lines.append(line)
    header = "context x batch,k4v4,vs bfloat16,vs float32,k3v3,vs bfloat16,vs float32"
    return markdown([*header.split(","), "k4v4, AVX2", "vs bfloat16"], lines)


def cpu_linear_table() -> str:
    """A row per number of tokens: packed weights at two levels, beside PyTorch and a sum."""
    found = {
        (row["row"], row["level"]): row for row in cpu_rows() if row["row"].startswith("linear ")
    }
    lines = []
    for name in dict.fromkeys(name for name, _ in found):
        best, avx2 = found[name, "avx512"], found[name, "avx2"]
        lines.append(
            [
                name.split()[1],
                f"{best['ms']:.2f} ms",
                f"{best['bf16_linear_ms'] / best['ms']:.1f}x",
                f"{best['int4_linear_ms'] / best['ms']:.2f}x",
                f"{best['sum_ms'] / best['ms']:.0%}",
                f"{avx2['ms']:.2f} ms",
                f"{avx2['bf16_linear_ms'] / avx2['ms']:.1f}x",
            ]
        )
    header = "tokens,AVX-512,vs bfloat16,vs torch's int4,speed of a sum,AVX2,vs bfloat16"
    return markdown(header.split(","), lines)


CPU_SHAPES = ((8192, 1), (32768, 1), (65536, 1), (32768, 4))


def cpu_attention_rows() -> dict[tuple[str, int, int], Row]:
    """Attention at the best level of the CPU: (preset, context, batch) -> row."""
    return {
        (row["row"].split()[1], row["context"], row["batch"]): row
        for row in cpu_rows()
        if row["row"].startswith("attention k") and row["level"] == "avx512"
    }


def demo_rows(part: str) -> list[Row]:
    """Rows of `make demo` on a CPU: "speed" or "quality", the uncompressed cache first."""
    found = [row for row in results.read_rows("demo_cpu") if row["part"] == part]
    return [row for row in found if row.get("weight_bits") is None]


def cpu_picture(path: Path) -> None:
    """The CPU: speed-up of attention, and tokens per second of a small model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = cpu_attention_rows()
    colors = preset_colors(["k8v8", DEFAULT, "k4v4"])
    series: dict[str, list[float | None]] = {
        preset: [rows[preset, context, batch]["speedup_vs_bf16"] for context, batch in CPU_SHAPES]
        for preset in colors
    }
    text = [f"{value:.1f}x" for value in series[DEFAULT]]
    speeds = demo_rows("speed")
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(9, 3.6), layout="constrained", width_ratios=(3, 2)
    )
    groups = [name_of((batch, context)) for context, batch in CPU_SHAPES]
    grouped_bars(left, groups, series, colors, text)
    left.axhline(1, color="black", linewidth=0.8)
    left.set_xlabel("sequences x context")
    left.set_ylabel("times as fast as the best bf16 way")
    left.set_title("Attention of a decode step, 32 query heads, 8 KV heads of 128", fontsize=9)
    left.legend(fontsize=8, ncols=3, loc="upper center")
    left.set_ylim(0, 1.3 * left.get_ylim()[1] / 1.1)
    plain = "Dynamic-\nCache"
    names = [plain if r["preset"] == "uncompressed" else r["preset"] for r in speeds]
    shades = {plain: "gray", **preset_colors(names[1:])}
    bars = right.bar(names, [r["tokens_per_second"] for r in speeds], 0.7)
    for bar, name in zip(bars, names, strict=True):
        bar.set_color(shades[name])
    right.bar_label(bars, fmt="%.0f", fontsize=9)
    right.set_ylim(0, 1.12 * max(r["tokens_per_second"] for r in speeds))
    right.set_ylabel("tokens per second, more is better")
    first = speeds[0]
    title = (
        f"{first['model'].removesuffix('-Instruct')}, {first['dtype']}, {first['context']:,} tokens"
    )
    right.set_title(title, fontsize=10)
    threads = {row["threads"] for row in (*rows.values(), *speeds)}
    figure.suptitle(f"{first['device']}, {' or '.join(map(str, sorted(threads)))} threads")
    source = f"{digest('cpu')} {digest('demo_cpu')}"
    figure.savefig(path, dpi=110, metadata={"Software": None, "Source": source})
    pyplot.close(figure)
