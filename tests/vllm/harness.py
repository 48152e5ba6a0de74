"""Small models in folders, and engines of vLLM over them, in this process."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from tests.helpers import tiny_llama

MEMORY = 8 << 20  # bytes of pages
ON_GPU = torch.cuda.is_available()


def save_llama(folder: Path, **changes: Any) -> torch.nn.Module:
    """Writes a small random Llama and returns it."""
    return save(
        randomise(tiny_llama(**{"vocab_size": 128, "num_hidden_layers": 3, **changes})), folder
    )


def save_deepseek(folder: Path, **changes: Any) -> None:
    """Writes a small random model with latent attention, of the shapes that vLLM's own CPU kernel
    of it is compiled for."""
    shape: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": None,
        "first_k_dense_replace": 9,  # layers without experts
        "n_group": 1,
        "topk_group": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = DeepseekV2Config(**{**shape, **changes})
    model = randomise(DeepseekV2ForCausalLM(config))
    with torch.no_grad():  # channels of latents that differ as those of published models do
        for layer in model.model.layers:
            size = torch.logspace(-1.5, 0.5, config.kv_lora_rank)
            layer.self_attn.kv_a_layernorm.weight.copy_(size)
            layer.self_attn.kv_b_proj.weight.div_(size)
    save(model, folder)


def save(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """Writes a model whose weights are the same in 16 bits, which GPUs compute in."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder)
    return model


def randomise(model: torch.nn.Module) -> torch.nn.Module:
    """Weights of a usual size: an untrained model's attention looks at all keys alike."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1.3 / parameter.shape[1] ** 0.5)
    return model.eval()


@contextmanager
def engine(folder: Path, settings: dict[str, Any] | None, **options: Any) -> Iterator[Any]:
    """An LLM with our backend, or with vLLM's own where settings are None."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    chosen: dict[str, Any] = {}
    if settings is not None:
        chosen["attention_backend"] = "CUSTOM"
        chosen["additional_config"] = {"turboquant": settings}
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 512,
        "block_size": 16,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": MEMORY,
        "seed": 0,
        "enforce_eager": True,
    }
    if ON_GPU:  # decode steps and drafts in CUDA graphs, without torch.compile
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        defaults |= {"dtype": "float16", "enforce_eager": False, "compilation_config": graphs}
        defaults["gpu_memory_utilization"] = 0.5  # other tests may run on the same GPU
    try:
        llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            **{**defaults, **chosen, **options},
        )
    except BaseException:
        cleanup_dist_env_and_memory()
        raise
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()  # whoever still holds it: its groups are gone now
        gc.collect()
        cleanup_dist_env_and_memory()


def generate(
    llm: Any, prompts: Sequence[Sequence[int]], tokens: int | Sequence[int]
) -> list[list[int]]:
    """The greedy continuations of prompts that are computed together."""
    return [list(o.outputs[0].token_ids) for o in outputs(llm, prompts, tokens)]


def outputs(llm: Any, prompts: Sequence[Sequence[int]], tokens: int | Sequence[int]) -> list[Any]:
    """vLLM's outputs; tokens: of each prompt, or of all."""
    from vllm import SamplingParams

    counts = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
    params = [
        SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
        for count in counts
    ]
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return llm.generate(given, params, use_tqdm=False)


def prompt(length: int, seed: int, vocabulary: int = 128) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocabulary, (length,), generator=generator).tolist()


def metric(llm: Any, name: str) -> float:
    """The value of a counter of vLLM's, which needs disable_log_stats=False."""
    return sum(found.value for found in llm.get_metrics() if found.name == name)


def pages_of(llm: Any) -> int:
    """How many pages vLLM has allocated."""
    return llm.llm_engine.vllm_config.cache_config.num_gpu_blocks


@contextmanager
def told() -> Iterator[list[str]]:
    """The lines that the plug-in logs."""
    lines: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return True

    logger = logging.getLogger("vllm.torch_turboquant")
    logger.addFilter(note)  # vLLM drops handlers when it starts
    try:
        yield lines
    finally:
        logger.removeFilter(note)
