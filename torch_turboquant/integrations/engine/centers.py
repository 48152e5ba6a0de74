"""Centers for engines: the file of a model, and the part of it that a rank's layers need."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_turboquant import centers as files
from torch_turboquant.ops.codec import scaled_center

_FORMER_NAME = "turboquant_centers.safetensors"
_PROJECTIONS = ("k_proj", "query_key_value")
"""Of keys, and of queries, keys and values in one that is none of an engine's own layers for that,
as engines have it in models of transformers (GPT-NeoX)."""


def find_file(model_folder: str | os.PathLike[str], given: str | None) -> Path | None:
    """The file of centers: the one that is given, else the one in the model's folder, else None.

    Args:
        model_folder: of the model's weights; a name on a hub is no folder, and holds no file.
        given: the setting "centers".

    Raises:
        ValueError: there is no such file as is given, or one with the name that it had once.
    """
    if given is not None:
        if not Path(given).is_file():
            raise ValueError(
                f"there is no file of centers {given}: make it with torch_turboquant calibrate "
                f"MODEL TEXT -o {given}, or leave the setting out"
            )
        return Path(given).absolute()
    former = Path(model_folder) / _FORMER_NAME
    if former.is_file():
        raise ValueError(
            f"{former} would be read as weights of the model: rename it to {files.FILE_NAME}"
        )
    beside = Path(model_folder) / files.FILE_NAME
    return beside.absolute() if beside.is_file() else None


def keys_have_bias(attention: torch.nn.Module, packed: type[torch.nn.Module]) -> bool:
    """Whether the keys of an attention module have a bias.

    packed: the engine's projection of queries, keys and values in one.
    """
    return any(
        getattr(module, "bias", None) is not None
        for name, module in attention.named_children()
        if name in _PROJECTIONS or isinstance(module, packed)
    )


def check_biased_keys(layer: int, bits: int, instead: str = "") -> None:
    """Raises ValueError for a layer whose keys have a bias and get no center, unless they have 8
    bits, which carry a bias.

    Args:
        layer: its number.
        bits: of its keys.
        instead: a cure that this engine has besides.
    """
    if bits < 8:
        raise ValueError(
            f"torch_turboquant: the keys of layer {layer} have a bias, which {bits}-bit keys do "
            "not carry without centers: make a file of them with torch_turboquant calibrate MODEL "
            f'TEXT, {instead}choose a preset with 8-bit keys, or set "centers" to "none"'
        )


def heads_of_rank(total: int, rank: int, size: int) -> slice:
    """The KV heads that one tensor-parallel rank holds, of all of a layer's.

    Ranks share a head where there are more of them than heads.

    Raises:
        ValueError: the heads cannot be divided so.
    """
    if total % size and size % total:
        raise ValueError(
            f"{total} KV heads cannot be divided among {size} tensor-parallel ranks: choose a "
            "divisor or a multiple of the heads"
        )
    count = max(1, total // size)
    first = rank * count if total >= size else rank * total // size
    return slice(first, first + count)


class LayerConstants:
    """What a file of centers says of the layers of one tensor-parallel rank."""

    def __init__(self, file: Path, centers: Mapping[int, Tensor], rank: int, size: int) -> None:
        self._file, self._centers, self._rank, self._size = file, centers, rank, size
        self._layers = 1 + max(centers, default=-1)
        self._digest = hashlib.sha256(file.read_bytes()).hexdigest()

    @classmethod
    def of(
        cls, file: str | os.PathLike[str], hf_config: Any, tp_rank: int, tp_size: int
    ) -> LayerConstants:
        """Reads a file of centers (needs safetensors).

        Args:
            file: of find_file.
            hf_config: the configuration of the whole model, or of its language model.
            tp_rank, tp_size: of tensor parallelism.

        Raises:
            ValueError: the file is damaged or of another format, or the centers are those of
                another model; the text says what differs.
            ModuleNotFoundError: safetensors is missing.
        """
        try:
            centers = files.load(file, hf_config)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"reading {file} needs safetensors: pip install safetensors",
                name=error.name,
            ) from error
        except ValueError as error:
            raise ValueError(
                f"{error}. Make centers of this model with torch_turboquant calibrate MODEL TEXT "
                '-o FILE, and name FILE in the setting "centers"'
            ) from error
        return cls(Path(file), centers, tp_rank, tp_size)

    def center(self, index: int, kv_heads: int, head_dim: int) -> Tensor | None:
        """The center of a layer as make_tables takes it, with the scales if there are any.

        Arguments and errors as in for_layer; None for a layer of a draft model.
        """
        center, scale = self.for_layer(index, kv_heads, head_dim)
        return center if center is None or scale is None else scaled_center(center, scale)

    def for_layer(
        self,
        index: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The center of this rank's KV heads and the scales of their channels.

        Args:
            index: of the layer in the model. A layer behind the model's last one belongs to a
                draft model, of which the file knows nothing.
            kv_heads, head_dim: of the layer on this rank.
            device, dtype: of the results.

        Returns:
            Two tensors [kv_heads, head_dim]. The second is None if the file holds no scales; both
            are None for a layer of a draft model.

        Raises:
            ValueError: the file has no center for this layer, or one of another shape.
        """
        if index not in self._centers:
            if index >= self._layers:
                return None, None
            raise ValueError(
                f"{self._file} has no center for layer {index}, which keeps no keys in the model "
                "that was calibrated: calibrate this model"
            )
        center = self._centers[index]
        total, own = center.shape[-2], self._own(center)
        if own.shape[-2:] != (kv_heads, head_dim):
            raise ValueError(
                f"{self._file} has {total} KV heads of {center.shape[-1]} channels for layer "
                f"{index}, {own.shape[-2]} of them on each of {self._size} tensor-parallel ranks, "
                f"but the layer has {kv_heads} of {head_dim} channels: calibrate the whole model"
            )
        parts = [part.to(device, dtype).contiguous() for part in own.view(-1, kv_heads, head_dim)]
        return parts[0], (parts[1] if len(parts) == 3 else None)

    def describe(self) -> str:
        """What the start-up line says of the centers; the digest tells files apart."""
        scaled = any(center.dim() == 3 for center in self._centers.values())
        what = "centers and channel scales" if scaled else "centers"
        return f"{what} from {self._file} (sha256 {self._digest[:12]})"

    def _own(self, center: Tensor) -> Tensor:
        """This rank's heads of a center, as a tensor of their own."""
        heads = heads_of_rank(center.shape[-2], self._rank, self._size)
        return center[..., heads, :].contiguous()
