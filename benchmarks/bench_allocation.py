"""Bits layer by layer: the divergence of each layer with each preset, and choices by budget.

Layers are measured on the text that follows the one which bench_quality predicts. The program
writes allocation_<model>.json (a row per layer, a row per budget) and <model>-<budget>.json for
bench_quality: `--caches k3v2:layers=<model>-<budget>.json`.
"""

from __future__ import annotations

import json
from pathlib import Path

import common

from torch_turboquant import PRESETS
from torch_turboquant import eval as evaluation
from torch_turboquant.eval import allocation
from torch_turboquant.eval.predict import text_tokens


def main() -> None:
    options = common.parser(__doc__)
    evaluation.add_measure_arguments(options)
    options.set_defaults(segments=1, prefill=256, score_tokens=768, chunk=128)
    options.add_argument(
        "--start", type=int, default=70_000, help="token of the text to begin with"
    )
    options.add_argument("--budgets", type=float, nargs="*", default=[2.7, 3.0, 3.3, 4.0, 4.7])
    options.add_argument("--presets", nargs="*", default=allocation.PRESETS, choices=list(PRESETS))
    options.add_argument("--recent-window", type=int, default=64)
    arguments = options.parse_args()
    model, tokenizer, model_name, text = evaluation.load(arguments, arguments.device)
    length = arguments.prefill + arguments.score_tokens
    ids = text_tokens(tokenizer, [text], arguments.start + arguments.segments * length)
    ids = ids[arguments.start :].view(arguments.segments, length)
    found = allocation.sensitivities(
        model,
        ids,
        arguments.prefill,
        arguments.chunk,
        arguments.presets,
        recent_window=arguments.recent_window,
    )
    sizes = allocation.bits_of(model, arguments.presets)
    rows = [
        {"model": model_name, "layer": layer, **dict(zip(arguments.presets, kl, strict=True))}
        for layer, kl in found.items()
    ]
    short = model_name.split("-")[0]
    for budget in arguments.budgets:
        if budget < min(sizes):
            continue
        chosen = allocation.allocate(found, sizes, budget)
        names = {layer: arguments.presets[number] for layer, number in chosen.items()}
        total = sum(found[layer][number] for layer, number in chosen.items())
        mean = sum(sizes[number] for number in chosen.values()) / len(chosen)
        rows.append(
            {"model": model_name, "budget": budget, "bits": mean, "sum_kl": total, "layers": names}
        )
        print(f"{budget:.2f} bits: {mean:.3f}, sum of KL {total:.5f}: {' '.join(names.values())}")
        Path(f"{short}-{budget}.json").write_text(json.dumps(names))
    common.write_rows(common.file_name("allocation", model_name), rows, arguments)


if __name__ == "__main__":
    main()
