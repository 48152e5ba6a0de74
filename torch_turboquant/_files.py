"""Files of tensors in the format of safetensors: nothing in them is executed when they are read.

A file says in its metadata what it is. It is written under another name first, so that its own name
never leads to half of it.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from torch_turboquant._version import __version__


def check_place(path: str | os.PathLike[str]) -> None:
    """Raises an OSError where no file of this name can be written."""
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file")
    if Path(path).exists() and not Path(path).is_file():
        raise OSError(f"{path} is a device, a pipe or a socket; name a file")
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no {Path(path).parent}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Another name in the same folder, for what then takes the place of `path`, whole or not."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    file_format: str,
    metadata: Mapping[str, str],
) -> int:
    """Writes a file, in the place of one that was there (needs safetensors): its bytes.

    Args:
        path: of the file.
        tensors: contiguous, each with memory of its own.
        file_format: what `opened` expects.
        metadata: anything else that the file says.

    Raises:
        OSError: the file cannot be written; nothing has changed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    check_place(path)
    path = Path(path).resolve()  # a link stays one
    said = {**metadata, "format": file_format, "version": __version__}
    try:
        with replacing(path) as temporary:
            save_file(dict(tensors), temporary, metadata=said)
            return temporary.stat().st_size
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


@contextmanager
def opened(path: str | os.PathLike[str], kind: str, file_format: str) -> Iterator[Any]:
    """The open file of safetensors, whose metadata say that it has this format.

    Args:
        path: of the file.
        kind: what the file holds, for errors.
        file_format: name and number, such as "torch_turboquant cache 1".

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or of another kind or another version.
    """
    from safetensors import SafetensorError, safe_open

    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file")
    try:
        with safe_open(path, "pt") as file:
            _check_format(path, kind, file_format, file.metadata() or {})
            yield file
    except SafetensorError as error:
        raise damaged(path, kind, str(error)) from error


def told(
    path: str | os.PathLike[str], kind: str, metadata: Mapping[str, str], name: str
) -> dict[str, Any]:
    """What the metadata of a file say under a name: an object of JSON.

    Raises:
        ValueError: they say nothing there, or something else.
    """
    try:
        found = json.loads(metadata[name])
    except (KeyError, ValueError, RecursionError) as error:
        raise damaged(path, kind, repr(error)) from error
    if not isinstance(found, dict):
        raise damaged(path, kind, f"{name} in its metadata is no object of JSON")
    return found


def damaged(path: str | os.PathLike[str], kind: str, why: str) -> ValueError:
    """The error of a file that does not hold what its format promises."""
    return ValueError(f"{path} is no file of {kind}, or damaged: {why}")


def _check_format(
    path: str | os.PathLike[str], kind: str, expected: str, metadata: Mapping[str, str]
) -> None:
    found = metadata.get("format", "")
    if found == expected:
        return
    if found.startswith(expected.rpartition(" ")[0]):
        raise ValueError(
            f"{path} was written by torch_turboquant {metadata.get('version')} in another format, "
            f"{found!r}; this version reads {expected!r}: save it again with this one"
        )
    raise ValueError(f"{path} is no file of {kind}: its format is {found!r}, expected {expected!r}")
