"""Writes the generated blocks and pictures of the documents: `make docs`.

A document has blocks between <!-- name --> and <!-- end -->. Functions of the package generator,
beside this file, write them: the pages of ops from schemas and docstrings, tables and numbers from
benchmarks/results. The rest of a document is written by hand. Pictures are drawn from the same
result files. The program needs no GPU and measures nothing.

    python docs/generate.py            writes blocks and pictures
    python docs/generate.py --check    names documents whose blocks differ; writes nothing
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from generator import (
    attention,
    choices,
    codec,
    common,
    cpu,
    distortion,
    eviction,
    generation,
    latents,
    ops,
    quality,
    quality_tables,
    readme,
    reliability,
    results,
    sglang,
    strategies,
    vllm,
    weight_tables,
    weights,
)
from torch.cuda import is_available as cuda_is_available

PERFORMANCE = "docs/measurements/performance"
BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "headline": readme.headline,
        "overview": readme.overview,
        "generation": readme.generation,
        "cpu": readme.cpu,
    },
    "docs/ops.md": {"ops": ops.ops},
    "docs/design.md": {"kernels": choices.kernels},
    "docs/reliability.md": {"soak": reliability.soak, "fuzz": reliability.fuzz},
    "docs/performance.md": {
        "attention": attention.attention_table,
        "models": generation.models_table,
    },
    f"{PERFORMANCE}_attention.md": {
        "contenders": attention.contenders_table,
        "attention": attention.attention_table,
        "variants": attention.variants_table,
        "rows": attention.query_rows_table,
        "mixed": attention.mixed_table,
        "prefixes": attention.prefixes_table,
        "prompts": attention.prompt_attention_table,
        "ragged": attention.ragged_table,
        "cold": attention.cold_table,
        "dims": attention.dims_table,
        "dims-prompts": attention.dims_prompts_table,
        "dims-rows": attention.dims_rows_table,
        "drawn": attention.drawn_table,
    },
    "docs/latent.md": {
        "latent steps": latents.latent_steps,
        "latent quality": latents.latent_quality,
    },
    "docs/eviction.md": {
        "eviction quality": eviction.eviction_quality,
        "eviction speed": eviction.eviction_speed,
    },
    "docs/vllm.md": {
        "engine presets": vllm.engine_presets,
        "engine latents": vllm.engine_latents,
        "engine quality": vllm.engine_quality,
        "engine speed": vllm.engine_speed,
        "engine clients": vllm.engine_clients,
        "server clients": vllm.server_clients,
    },
    "docs/sglang.md": {
        "sglang speed": sglang.sglang_speed,
        "sglang clients": sglang.sglang_clients,
        "sglang quality": sglang.sglang_quality,
    },
    "docs/pool.md": {"heavy hitters": eviction.hitters_cost},
    "docs/workloads.md": {"strategies": strategies.strategies_rows},
    f"{PERFORMANCE}_mla.md": {"latent speed": latents.latent_speed},
    f"{PERFORMANCE}_linear.md": {
        "linear speed": weights.linear_speed,
        "expert speed": weights.expert_speed,
    },
    f"{PERFORMANCE}_vllm.md": {"vllm": vllm.vllm_table},
    f"{PERFORMANCE}_generation.md": {
        "eager": generation.eager_table,
        "generation": generation.generation_table,
        "prompts": generation.prompts_table,
    },
    f"{PERFORMANCE}_codec.md": {"codec": codec.codec_table},
    f"{PERFORMANCE}_cpu.md": {
        "cpu attention": cpu.cpu_attention_table,
        "cpu linear": cpu.cpu_linear_table,
    },
    **{
        page: {name: quality_tables.TABLES[name] for name in names}
        for page, names in quality_tables.PAGES.items()
    },
    **{
        page: {name: weight_tables.TABLES[name] for name in names}
        for page, names in weight_tables.PAGES.items()
    },
}
BLOCKS["docs/measurements/quality_vectors.md"]["theory"] = distortion.theory_table
BLOCKS["docs/weights.md"] |= {
    "packed model": weights.packed_model_speed,
    "packed model on a cpu": weights.cpu_model_speed,
}
PICTURES: dict[str, Callable[[Path], None]] = {
    "docs/pictures/attention_h200.png": attention.speed_picture,
    "docs/pictures/cpu.png": cpu.cpu_picture,
    "docs/pictures/distortion.png": distortion.theory_picture,
    weight_tables.PICTURE: weight_tables.picture,
    "docs/pictures/strategies.png": strategies.strategies_drawn,
    **{
        f"benchmarks/results/{common.file_name('quality', model)}.png": quality.quality_picture
        for model in quality_tables.MODELS.values()
    },
}


def filled(document: str) -> tuple[str, str]:
    """The text of a document as it is, and with its blocks made anew."""
    old = new = (results.ROOT / document).read_text()
    for name, block in BLOCKS[document].items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        new, count = re.subn(
            pattern, lambda m, b=block: f"{m[1]}{b()}\n{m[2]}", new, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(f"{document} has {count} blocks <!-- {name} -->, expected one")
    return old, new


def outdated() -> Iterator[str]:
    """Documents whose blocks differ from the code and the results."""
    for document in BLOCKS:
        old, new = filled(document)
        if old != new:
            yield document


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        found = list(outdated())
        print("\n".join(f"{document}: run make docs" for document in found) or "all up to date")
        return bool(found)
    for document in BLOCKS:
        old, new = filled(document)
        (results.ROOT / document).write_text(new)
        print(f"{document}: {'as it was' if old == new else 'written'}")
    for picture, draw in PICTURES.items():
        draw(results.ROOT / picture)
        print(f"{picture}: drawn")
    here = {
        common.device_name(kind) for kind in ("cpu", "cuda") if kind == "cpu" or cuda_is_available()
    }
    for path in sorted(results.RESULTS.glob("*.json")):
        for device in sorted({row["device"] for row in results.read_rows(path.stem)} - here):
            print(
                f"{path.stem}: numbers of {device} come from the result file, not from this machine"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
