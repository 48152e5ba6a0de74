"""The numbers of the README."""

from __future__ import annotations

from common import Row, markdown

import torch_turboquant as tq
from generator.attention import LARGE, decode_rows, timed
from generator.cpu import cpu_attention_rows, demo_rows
from generator.generation import GENERATED, token_row
from generator.pictures import DEFAULT
from generator.quality import OTHERS, QUALITY, quality_rows, top1
from generator.results import h200_rows, link, several_runs, source
from generator.vllm import VLLM_PRESETS, engine_base, engine_kind, engine_rows, vllm_rows
from generator.words import half, in_words, microseconds, name_of, paragraph


def headline() -> str:
    """The README's first numbers: memory, speed and quality of the default preset."""
    preset = tq.NAMED_PRESETS["near-lossless"][0]
    quality, step = quality_rows()[preset], decode_rows()[LARGE][preset]
    fp8 = quality_rows()["fp8"]
    plain, ours = (token_row(kind, "graph")["tpot_ms"] for kind in ("unmasked", preset))
    items = [
        f"**Memory: a cache {16 / quality['bits_per_value_8k']:.1f} times smaller**, "
        f"{quality['bits_per_value_8k']:.1f} bits per element instead of 16, scales and exact "
        "tokens included.",
        f"**Speed: attention {step['speedup_vs_bf16']:.1f} times as fast** as the fastest of "
        f"{in_words(len(timed(step)))} bf16 kernels, for a decode step of {LARGE[0]} sequences of "
        f"{LARGE[1]:,} tokens on an H200; **tokens {plain / ours:.1f} times as fast**: a "
        f"Llama-3.1-8B-shaped model generates one for {GENERATED[0]} sequences of "
        f"{GENERATED[1]:,} tokens in {ours:.1f} ms instead of {plain:.1f} ms.",
        "**Quality: the same most likely next token as with an uncompressed cache in "
        f"{top1(quality)} of all positions** (SmolLM2-135M; fp8: {top1(fp8)}).",
    ]
    lines = [paragraph(f"- {item}") for item in items]
    return "\n".join([*lines, "", "(from [result files](#size-speed-quality) of this repository)"])


def overview() -> str:
    """The README's table: size, speed and quality of presets, bf16, fp8 and other ways."""
    quality = quality_rows()
    speed = decode_rows()[LARGE]
    any_row = next(iter(speed.values()))
    fa3 = vllm_rows("attention", {"batch": LARGE[0], "context": LARGE[1]})["fa3 fp8"]
    lines = []
    for cache in ("none", "fp8", "k8v8", "k5v4u", "k4v4u", "k4v4", "k4v2", *OTHERS):
        row = quality[cache]
        label = {"none": "bf16 (quality: float32)"}.get(cache, OTHERS.get(cache, cache))
        cells = [
            f"**{label}**" if row["kind"] == "packed" else label,
            f"{row['bytes_per_token_8k']:,.0f}",
            f"{16 / row['bits_per_value_8k']:.2f}x",
        ]
        bf16 = any_row["best_bf16_ms"]
        if cache == "none":
            cells += [microseconds(bf16), "", f"{row['perplexity']:.2f}", "", ""]
            lines.append(cells)
            continue
        ms = speed.get(cache, {}).get("ours_ms")
        if cache == "fp8":
            ms = min(any_row["fp8_ms"], fa3["ms"])
        cells += [microseconds(ms), f"{bf16 / ms:.1f}x"] if ms else ["", ""]
        change, around = row["perplexity_change"], half(row["perplexity_change_interval"])
        cells += [
            f"{100 * change:+.2f}% ± {100 * around:.2f}",
            f"{row['kl']:.4f} ± {half(row['kl_interval']):.4f}",
            top1(row),
        ]
        lines.append(cells)
    header = "cache,bytes per token,smaller,attention on an H200,faster,perplexity,KL,same top-1"
    untailed = quality["k4v4:sink_tokens=0,recent_window=0"]
    items = [
        f"{link(QUALITY, 'Size and quality')}: SmolLM2-135M, 2,048 tokens of Wikipedia, ± 95% "
        "intervals; sizes at 8,192 tokens. Among the baselines only KIVI keeps recent tokens "
        "exact, which explains most of its lead over the others; k4v4 without exact tokens has a "
        f"KL of {untailed['kl']:.4f} ([more](docs/quality.md)).",
        f"{link('h200_attention', 'Speed')}: attention of a decode step, {name_of(LARGE)} tokens, "
        f"center and exact tail included, against the fastest of {in_words(len(timed(any_row)))} "
        "bf16 kernels, and the faster fp8 of FlashInfer and FlashAttention 3, which was timed in "
        f"{link('h200_vllm_kernels', 'another run')} ([more](docs/performance.md)). Empty cells "
        "were not measured.",
    ]
    notes = "\n".join(paragraph(f"- {item}") for item in items)
    return f"{markdown(header.split(','), lines)}\n\n{notes}"


def generation() -> str:
    """The README's sentences on whole models, and on vLLM's TurboQuant."""
    preset = tq.NAMED_PRESETS["near-lossless"][0]
    rows = {
        name: token_row(*column)
        for name, column in {
            "dynamic": ("dynamic", "eager"),
            "eager": (preset, "eager"),
            "bf16": ("unmasked", "graph"),
            "graph": (preset, "graph"),
        }.items()
    }
    ms = {name: f"{row['tpot_ms']:.1f} ms" for name, row in rows.items()}
    model = paragraph(
        "A Llama-3.1-8B-shaped model with random weights generates a token for "
        f"{GENERATED[0]} sequences of {GENERATED[1]:,} tokens, in CUDA graphs, in {ms['graph']} "
        f"with {preset} and {ms['bf16']} with the fastest bf16 kernel; without graphs in "
        f"{ms['eager']} and {ms['dynamic']} (`DynamicCache` with its fastest kernel). "
        f"({source('h200_generate', rows.values())})"
    )
    engine = engine_sentence(preset)
    large = vllm_rows("attention", {"batch": LARGE[0], "context": LARGE[1]})
    long = vllm_rows("attention", {"batch": 1, "context": 131072})
    store = vllm_rows("store", {"tokens": 65536})
    theirs = VLLM_PRESETS["k4v4"]

    def pair(found: dict[str, Row]) -> str:
        a, b = found[theirs]["ms"], found["k4v4"]["ms"]
        return f"{microseconds(a)} instead of {microseconds(b)} ({a / b:.0f}x)"

    vllm = paragraph(
        f"vLLM's own TurboQuant, Triton kernels of vLLM {large[theirs]['vllm']}, takes for a "
        f"decode step's attention over {name_of(LARGE)} tokens {pair(large)}, over 1 x 131,072 "
        f"{pair(long)}, and to store 65,536 tokens {pair(store)}, with 4-bit keys and values "
        f"([more](docs/measurements/performance_vllm.md); "
        f"{source('h200_vllm_kernels', large.values())})."
    )
    return f"{model}\n\n{engine}\n\n{clients_sentence(preset)}\n\n{vllm}"


def engine_sentence(preset: str) -> str:
    """The README's sentence on vLLM's engine."""
    rows = [row for row in engine_rows() if engine_kind(row)[1:] == ("8b", 1)]
    found = {row["point"]: row for row in rows if row["config"] == preset}

    def times(point: str) -> str:
        ours, bf16 = found[point], engine_base(found[point], rows)
        return f"{ours['tokens_s'] / bf16['tokens_s']:.1f} times"

    return paragraph(
        f"Inside vLLM {rows[0]['vllm']}, with the same memory for every cache, that model "
        f"generates {times('16x32768')} as many tokens per second with {preset} as with bf16 for "
        f"16 sequences of 32,768 tokens, and {times('full8192')} as many with as many sequences "
        f"of 8,192 tokens as fit ([more](docs/vllm.md#speed); "
        f"{link('h200_vllm', 'h200_vllm.json')}: `python benchmarks/bench_vllm.py`)."
    )


def clients_sentence(preset: str) -> str:
    """The README's sentence on clients of SGLang's engine."""
    point = "turns64x16384:256"
    rows = {row["config"]: row for row in h200_rows("h200_sglang") if row["point"] == point}
    ours, bf16, fp8 = (rows[config] for config in (preset, "fa3", "fa3:fp8"))

    def times(other: Row) -> str:
        return f"{ours['requests_s'] / other['requests_s']:.1f} times"

    note = several_runs({preset: [ours], "bf16": [bf16], "fp8": [fp8]})
    return paragraph(
        f"Inside SGLang {ours['sglang']}, {ours['clients']} clients with conversations of "
        f"{ours['context']:,} tokens get {times(bf16)} as many answers with {preset} as with bf16, "
        f"which has no room for all of them, and {times(fp8)} as many as with fp8 "
        f"([more](docs/sglang.md#clients); {link('h200_sglang', 'h200_sglang.json')}: "
        f"`python benchmarks/bench_sglang.py --points {point} --serve 30`). {note}"
    )


def cpu() -> str:
    """The README's sentences on two cores."""
    row = cpu_attention_rows()[DEFAULT, 32768, 1]
    bf16 = row["ms"] * row["speedup_vs_bf16"]
    speed = {row["preset"]: row for row in demo_rows("speed")}
    plain, ours = speed["uncompressed"], speed[DEFAULT]
    return paragraph(
        f"On two CPU cores attention over 32,768 tokens takes {row['ms']:.1f} ms with {DEFAULT} "
        f"and {bf16:.1f} ms with the fastest bf16 way in PyTorch ({link('cpu', 'cpu.json')}). "
        f"SmolLM2-135M generates {ours['tokens_per_second']:.0f} tokens per second behind "
        f"{ours['context']:,} with {DEFAULT} and {plain['tokens_per_second']:.0f} with "
        f"`DynamicCache`, in bfloat16 ({link('demo_cpu', 'demo_cpu.json')}: `make demo` measures "
        "the same)."
    )
