"""The command that packs the weights of a model: a folder of transformers in, another one out.

    torch_turboquant quantize MODEL OUT
    torch_turboquant quantize MODEL OUT --calibrate text.txt --report report.json

Without a text the weights are packed tensor by tensor while they are read, so that memory has the
packed model and one tensor of the original. With a text the whole model is loaded, reads it, and is
packed layer by layer. The new folder appears when it is complete.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch_turboquant._checks import FLOATS_BY_NAME
from torch_turboquant._files import replacing
from torch_turboquant.eval.options import (
    actual_device,
    add_device_argument,
    output_file,
    positive,
    read_text,
)
from torch_turboquant.models import model_class, quant_method, read_config

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_WRITTEN = ("config.json", "generation_config.json")  # by transformers, anew


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `torch_turboquant quantize`."""
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="folder of a transformers model, with weights"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, a new one")
    parser.add_argument("--bits", type=int, metavar="B", help="of a weight, 4 or 8 (default: 4)")
    parser.add_argument(
        "--layer",
        type=layer_bits,
        action="append",
        default=[],
        metavar="NAME=B",
        help="other bits for layers of this name or pattern, such as 'lm_head=8' or "
        "'*.down_proj=8'; the first that fits counts",
    )
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="NAME",
        help="layers of this name or pattern stay as they are",
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="TEXT",
        help="UTF-8 text of the kind that the model will read: scales the channels and rounds the "
        "weights for it; needs memory for the whole model",
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        help="of the text to read; a shorter text is read whole (default: 16384)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="B",
        help="with --calibrate: bits per weight that all layers may take together, such as 4.5; "
        "those whose errors cost most get 8",
    )
    parser.add_argument(
        "--dtype",
        choices=FLOATS_BY_NAME,
        help="of what is not packed, and of activations (default: the model's own)",
    )
    parser.add_argument(
        "--report",
        type=output_file,
        metavar="FILE",
        help="JSON: bits, bytes and error of every packed layer, and why others are not packed",
    )
    add_device_argument(parser)


def layer_bits(text: str) -> tuple[str, int]:
    """The type of --layer.

    Raises:
        argparse.ArgumentTypeError: not NAME=BITS.
    """
    name, _, bits = text.rpartition("=")
    if not name or not bits.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=BITS, such as lm_head=8")
    return name, int(bits)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    started = time.perf_counter()
    try:
        text = checked_text(args)
        with new_folder(args.out) as folder:
            facts = pack(args, text, folder)
            copy_others(args.model, folder)
        facts["seconds"] = round(time.perf_counter() - started, 1)
        if args.report:
            with replacing(args.report.resolve()) as report:  # a link stays one
                report.write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n")
    except (OSError, ValueError) as error:
        print(f"quantize: {error}", file=sys.stderr)
        return 1
    print(summary(args.out, facts))
    return 0


def checked_text(args: argparse.Namespace) -> str | None:
    """The text of --calibrate; what can be refused at once is refused before weights are read.

    Raises:
        ValueError: folders, text or options cannot be used.
    """
    from torch_turboquant.eval import assets

    assets.check_dense(args.model)
    if args.out.exists() or args.out.is_symlink():  # no folder can replace a link to nothing
        raise ValueError(f"{args.out} is there already: name a new folder, or remove it")
    if not args.out.resolve().parent.is_dir():
        raise ValueError(f"{args.out} cannot be written: there is no {args.out.parent}")
    found = quant_method(read_config(args.model))
    if found is not None:
        raise ValueError(
            f"the weights in {args.model} are quantised already ({found}): give the folder of the "
            "original model"
        )
    if args.calibrate is None:
        for name in ("tokens", "budget"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name} belongs to --calibrate")
        return None
    return read_text(args.calibrate)


def pack(args: argparse.Namespace, text: str | None, folder: Path) -> dict[str, Any]:
    """Writes the packed model; returns what the report says.

    Raises:
        ValueError: the model cannot be packed, or the text is too short.
    """
    from safetensors import SafetensorError

    from torch_turboquant.eval import assets
    from torch_turboquant.integrations.transformers.weights import (
        TurboQuantConfig,
        noted_layers,
        quantize,
    )

    config = TurboQuantConfig(
        args.bits, skip=args.skip, layers={name: {"bits": bits} for name, bits in args.layer}
    )
    kind = model_class(read_config(args.model))
    options: dict[str, Any] = {"dtype": args.dtype or "auto"}
    if text is None:
        if args.device not in ("auto", "cpu"):  # a GPU is quicker, and then needs accelerate
            options["device_map"] = {"": args.device}
        with noted_layers() as rows:
            model = assets.load_weights(kind, args.model, quantization_config=config, **options)
    else:
        tokenizer = assets.load_tokenizer(args.model)
        model = assets.load_weights(kind, args.model, **options)
        model.to(actual_device(args.device))
        limits = {n: v for n in ("tokens", "budget") if (v := getattr(args, n)) is not None}
        rows = quantize(model, config, text=text, tokenizer=tokenizer, **limits)
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # a full disk is no OSError to safetensors
        raise OSError(f"{args.out} cannot be written: {error}") from error
    done = model.config.quantization_config
    return {
        "model": str(args.model),
        "class": kind.__name__,
        "calibration": done.calibration,
        "bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "packed_bytes": sum(row.bytes for row in rows),
        "packed_weights": sum(row.weights for row in rows),
        "layers": [{**row._asdict(), "form": asdict(row.form)} for row in rows],
        "left_alone": done.left_alone,
    }


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that gets its name when the block ends, and is removed if it fails."""
    scratch = out.with_name(f".{out.name}.{uuid.uuid4().hex}.tmp")
    scratch.mkdir()
    try:
        yield scratch
        scratch.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def copy_others(source: Path, folder: Path) -> None:
    """Copies what belongs to a model beside weights and configuration: tokenizer, licence, ...

    A folder in it is copied whole, such as that of chat templates, unless it has weights: then it
    holds the model in another form (original, onnx).
    """
    for path in sorted(source.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if not any(_is_weight(inside) for inside in path.rglob("*")):
                shutil.copytree(path, folder / path.name)
        elif path.is_file() and not _is_weight(path) and path.name not in _WRITTEN:
            shutil.copy2(path, folder / path.name)


def _is_weight(path: Path) -> bool:
    return path.name.endswith((*_WEIGHTS, ".index.json"))


def summary(out: Path, facts: dict[str, Any]) -> str:
    """What the command prints at the end."""
    layers, left = facts["layers"], facts["left_alone"]
    bits = 8 * facts["packed_bytes"] / facts["packed_weights"]
    lines = [
        f"{out}: {facts['bytes'] / 1e6:,.1f} MB in {facts['seconds']:.0f} s; {len(layers)} layers "
        f"with {facts['packed_weights'] / 1e6:,.1f} million weights at {bits:.3f} bits"
    ]
    worst = sorted(layers, key=lambda row: -row["error"])[:3]
    said = "outputs" if facts["calibration"] else "weights"
    lines.append(
        f"relative squared error of {said}: {mean([row['error'] for row in layers]):.5f}; largest: "
        + ", ".join(f"{row['name']} {row['error']:.5f}" for row in worst)
    )
    lines += [f"left alone: {name}: {reason}" for name, reason in grouped(left).items()]
    lines.append(
        f"Load it with {facts['class']}.from_pretrained, after import "
        "torch_turboquant.integrations.transformers"
    )
    return "\n".join(lines)


def grouped(left: dict[str, str]) -> dict[str, str]:
    """Names that differ in numbers only as one."""
    from torch_turboquant.integrations.transformers.weights.choice import summary as by_number

    return by_number(left)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
