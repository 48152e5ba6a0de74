"""What engines' steps are made of, and layers of ours to run them on without an engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# (tokens of a sequence with the new ones, new ones)
STEPS = {
    "few decode steps": [(32, 1), (40, 1)],
    "few prompts": [(32, 8), (40, 8)],
    "few mixed": [(32, 1), (40, 1), (48, 5), (56, 5)],
    "decode steps": [(128, 1), (256, 1), (512, 1), (1024, 1)] * 2,
    "prompts": [(256, 16), (512, 16), (1024, 16)],
    "mixed": [(512, 1), (1024, 1), (512, 7), (1024, 7)],
    "one decode step": [(1024, 1)],
    "one prompt": [(1024, 64)],
    "fresh prompts": [(33, 33), (7, 7), (100, 100)],
    "a hit beside a fresh prompt": [(300, 1), (200, 200), (160, 32)],
    "drafts": [(100, 4), (333, 4), (5, 4)],
    "drafts beside a prompt": [(100, 4), (333, 2), (90, 90)],
}

LONG_STEPS = {
    "a long chunk": [(1200, 600)],
    "beside decode steps": [(70, 1), (333, 1), (900, 520)],
    "beside a fresh prompt and a short chunk": [(1000, 512), (40, 40), (300, 7)],
    "beside a prefix hit": [(9, 1), (700, 640), (1030, 520)],
    "one token is in the cache": [(601, 600)],
    "among short chunks": [(9, 1), (90, 20), (1000, 512), (40, 40), (300, 7), (700, 520), (64, 3)],
}


def asked_of_flash(steps: Any, segment: int, long_chunk: int = 512) -> list[bool]:
    """Whether each call of FlashAttention is causal: of a run's own tokens, then of each segment of
    what its sequences have in the cache."""
    calls = []
    for is_long, run in itertools.groupby(steps, lambda step: step[1] >= long_chunk):
        if is_long:
            old = [total - new for total, new in run]
            calls += [True, *[False] * sum(-(-tokens // segment) for tokens in old)]
    return calls


@contextmanager
def vllm_started(folder: Path, **common: Any) -> Iterator[Any]:
    """What vLLM's workers set up before they make layers; makes configurations of engines.

    folder: of a model; common: arguments of all configurations.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs

    def configure(settings: dict[str, Any], **options: Any) -> Any:
        return EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=2048,
            attention_backend="CUSTOM",
            additional_config={"turboquant": {**common, **settings}},
            **options,
        ).create_engine_config()

    with set_current_vllm_config(configure({})):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield configure
    cleanup_dist_env_and_memory()


def vllm_layer(**attributes: Any) -> torch.nn.Module:
    """A layer of vLLM, as far as backends see it."""
    layer = torch.nn.Module()
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


class Steps:
    """Steps of vLLM over pages [pages, ...] of `page_size` tokens."""

    pages: Tensor
    page_size: int

    def metadata(self, steps: Any, table: Tensor | None = None) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        totals, new = zip(*steps, strict=True)
        starts = torch.tensor([0, *new]).cumsum(0).int()
        lengths = torch.tensor(totals).int()
        table = self.table(len(steps)) if table is None else table
        slots = [self.slots(row, *step) for row, step in zip(table, steps, strict=True)]
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            num_reqs=len(steps),
            num_actual_tokens=sum(new),
            max_query_len=max(new),
            max_seq_len=max(totals),
            block_table_tensor=table,
            slot_mapping=torch.cat(slots),
            seq_lens_cpu_upper_bound=lengths,
        )

    def table(self, sequences: int) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        pages = torch.randperm(len(self.pages), generator=generator).int()
        return pages[: sequences * (len(pages) // sequences)].view(sequences, -1)

    def slots(self, pages: Tensor, total: int, new: int) -> Tensor:
        position = torch.arange(total - new, total)
        return pages[position // self.page_size].long() * self.page_size + position % self.page_size
