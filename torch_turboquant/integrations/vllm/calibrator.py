"""Centers found by vLLM itself, for models that no single process of transformers can hold.

Every layer sums up what its attention gets while the engine reads a text; the sums of all ranks are
fetched, joined and written to the same file that `torch_turboquant calibrate` makes:

    llm = LLM(model, **engine_options({"tensor_parallel_size": 4}))
    calibrate(llm, [token_ids, ...], "turboquant.centers")

engine_options sets what a calibration needs, and raises an error where its argument says something
else. vLLM computes its warm-up with tokens of no meaning; the sums begin when calibrate says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_turboquant import centers as files
from torch_turboquant.centers import CENTER_TOKENS, SINKS
from torch_turboquant.integrations.engine.centers import heads_of_rank
from torch_turboquant.integrations.engine.settings import KEY
from torch_turboquant.ops.center import channel_scale
from torch_turboquant.ops.codec import scaled_center

Part = dict[str, Any]
"""What a rank has gathered, in plain data, which vLLM can send between processes."""


def engine_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's LLM for a calibration.

    Args:
        given: those of its user; entries of additional_config that are not ours stay.

    Raises:
        ValueError: the user asks for something else in an argument that the calibration needs.
    """
    others = given.get("additional_config") or {}
    needed = {
        "attention_backend": "CUSTOM",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "worker_extension_cls": f"{__name__}.{Calibrator.__name__}",
    }
    wrong = [
        f"{name}={given[name]!r}"
        for name in needed
        if given.get(name, needed[name]) != needed[name]
    ]
    if KEY in others:
        wrong.append(f"{KEY!r} in additional_config")
    if wrong:
        raise ValueError(
            f"a calibration sets these arguments of vLLM itself: leave {', '.join(wrong)} out"
        )
    settings = {"preset": "k8v8", "learn": False, "calibrate": True}
    return {**given, **needed, "additional_config": {**others, KEY: settings}}


class KeySums:
    """Sums over the tokens of one layer on one rank: keys, their squares, the queries' squares."""

    def __init__(self, kv_heads: int, head_dim: int, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(3, kv_heads, head_dim, dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.float64, device=device)

    def clear(self) -> None:
        """Forgets everything."""
        self.sums.zero_()
        self.count.zero_()

    @torch.no_grad()
    def add(self, query: Tensor, key: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> None:
        """Adds the tokens of a step, without the first SINKS of every sequence.

        Args:
            query: [tokens, heads, head_dim], behind RoPE.
            key: [tokens, kv_heads, head_dim], of the same tokens; kv_heads divides heads.
            query_start_loc: int [sequences + 1], where the tokens of each sequence begin; tokens
                behind the last one's are padding.
            seq_lens: int [sequences], tokens of each sequence with those of this step.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "turboquant: a calibration needs every step to run anew: start vLLM with "
                "enforce_eager=True"
            )
        number = torch.arange(len(query), device=query.device)
        ends = query_start_loc[1:].to(query.device, torch.int64)
        sequence = torch.searchsorted(ends, number, right=True)
        known = sequence.clamp(max=len(ends) - 1)
        position = seq_lens.to(query.device, torch.int64)[known] - (ends[known] - number)
        weight = ((sequence < len(ends)) & (position >= SINKS)).double()
        keys, kv_heads = key.double(), key.shape[1]
        energy = query.double().square().unflatten(1, (kv_heads, -1)).mean(2)
        parts = torch.stack([keys, keys.square(), energy])
        self.sums += torch.einsum("n,xnhd->xhd", weight, parts)
        self.count += weight.sum()


class Calibrator:
    """Methods of vLLM's workers, for worker_extension_cls."""

    vllm_config: Any
    get_model: Any

    def turboquant_start(self) -> None:
        """Forgets what warm-up and earlier prompts have left.

        Raises:
            RuntimeError: the engine does not calibrate.
        """
        for _, sums in self._turboquant_sums():
            sums.clear()

    def turboquant_centers(self) -> Part:
        """What this rank has gathered since turboquant_start."""
        from vllm.distributed import get_tensor_model_parallel_rank as rank
        from vllm.distributed import get_tensor_model_parallel_world_size as size

        ropes = {
            (module.head_size, module.rotary_dim, bool(module.is_neox_style))
            for module in self.get_model().modules()
            if hasattr(module, "rotary_dim") and hasattr(module, "is_neox_style")
        }
        layers = {str(index): pack(sums) for index, sums in self._turboquant_sums()}
        return {
            "rank": rank(),
            "size": size(),
            "ropes": [list(rope) for rope in sorted(ropes)],
            "layers": layers,
        }

    def _turboquant_sums(self) -> list[tuple[int, KeySums]]:
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        impls = [getattr(layer, "impl", None) for layer in layers]
        own = [impl for impl in impls if getattr(impl, "key_sums", None)]
        found = {i.index: i.key_sums for i in own}
        if not found:
            raise RuntimeError(
                "turboquant: no layer gathers keys: start vLLM with calibrator.engine_options"
            )
        if len(found) < len(own):
            raise RuntimeError(
                "turboquant: two layers have the same number, as those of a draft model may: "
                "calibrate without speculative decoding"
            )
        return list(found.items())


def pack(sums: KeySums) -> Part:
    """Sums as plain data: count, shape and the bytes of float64 numbers."""
    return {
        "count": int(sums.count),
        "shape": list(sums.sums.shape),
        "sums": sums.sums.cpu().numpy().tobytes(),
    }


def unpack(part: Mapping[str, Any]) -> Tensor:
    """The tensor of `pack`: float64 [3, kv_heads, head_dim]."""
    return torch.frombuffer(bytearray(part["sums"]), dtype=torch.float64).view(part["shape"])


def join(parts: Sequence[Part], hf_config: Any, scaled: bool = True) -> list[Tensor | None]:
    """The centers of all layers of a model from what its ranks have gathered.

    Args:
        parts: of turboquant_centers, of all tensor- and pipeline-parallel ranks of one engine.
        hf_config: the configuration of the whole model.
        scaled: whether scales of channels are wanted.

    Returns:
        As `centers` of torch_turboquant.centers.save.

    Raises:
        ValueError: too few tokens were read, or ranks are missing.
    """
    layers = files.attending_layers(hf_config)
    ropes = {tuple(rope) for part in parts for rope in part["ropes"]}
    found: list[Tensor | None] = [None] * (1 + max(layers, default=-1))
    for index, layer in layers.items():
        own = [(part, part["layers"][str(index)]) for part in parts if str(index) in part["layers"]]
        total = torch.zeros(3, layer.kv_heads, layer.head_dim, dtype=torch.float64)
        times = torch.zeros(layer.kv_heads, 1, dtype=torch.float64)
        for part, packed in own:
            heads = heads_of_rank(layer.kv_heads, part["rank"], part["size"])
            total[:, heads] += unpack(packed)
            times[heads] += 1
        if not times.all():
            raise ValueError(
                f"no rank has gathered all keys of layer {index}: calibrate through the LLM of the "
                "whole model, with data_parallel_size=1"
            )
        count = min(packed["count"] for _, packed in own)
        if count < CENTER_TOKENS:
            raise ValueError(
                f"layer {index} has seen {count} tokens behind the first {SINKS} of every prompt, "
                f"but centers need {CENTER_TOKENS}: give longer prompts, and none that the prefix "
                "cache has already"
            )
        mean, square, energy = total / times / count
        center = mean.float()
        if scaled:
            variance = (square - mean.square()).clamp(min=0)
            partners = rotary_partners(layer.head_dim, ropes)
            scale = channel_scale(mean, variance, energy, count, partners)
            center = scaled_center(center, scale.float())
        found[index] = center
    return found


def rotary_partners(head_dim: int, ropes: Iterable[tuple[Any, ...]]) -> Tensor:
    """The channel with which RoPE mixes each channel of a head: int64 [head_dim].

    A channel that is not rotated is its own partner, and so is every channel if layers of this
    head_dim differ in RoPE.

    Args:
        ropes: (head_dim, channels that are rotated, whether halves are mixed and not neighbours).
    """
    partners = torch.arange(head_dim)
    own = {(int(rotated), bool(halves)) for dim, rotated, halves in ropes if dim == head_dim}
    if len(own) == 1:
        ((rotated, halves),) = own
        channels = torch.arange(rotated)
        partners[:rotated] = channels.roll(rotated // 2) if halves else channels ^ 1
    return partners


def calibrate(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    path: str | os.PathLike[str],
    scaled: bool = True,
) -> int:
    """Lets an engine read prompts and writes the centers of its model to a file.

    Args:
        llm: vLLM's LLM, started with engine_options.
        prompts: token ids; prompts that the engine's prefix cache holds already do not count.
        path: of the file, which LayerConstants and TurboQuantCache read (needs safetensors).
        scaled: whether to write scales of channels too.

    Returns:
        How many tokens the engine has read.

    Raises:
        RuntimeError: the engine does not calibrate.
        ValueError: too few tokens.
    """
    from vllm import SamplingParams

    llm.collective_rpc("turboquant_start")
    inputs = [{"prompt_token_ids": list(ids)} for ids in prompts]
    llm.generate(inputs, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    parts = llm.collective_rpc("turboquant_centers")
    config = llm.llm_engine.model_config.hf_config
    files.save(path, join(parts, config, scaled), config)
    return sum(len(ids) for ids in prompts)
