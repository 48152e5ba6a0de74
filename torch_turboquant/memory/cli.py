"""The command `torch_turboquant memory`: its options, its table and its JSON."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch_turboquant._checks import FLOATS_BY_NAME, check_positive
from torch_turboquant._extras import MissingPackages
from torch_turboquant.config import PRESETS, CacheConfig
from torch_turboquant.latent import LATENT_PRESETS, latent_preset
from torch_turboquant.layer_choice import layer_configs
from torch_turboquant.memory.layers import (
    AttentionLayer,
    LatentLayer,
    MemoryLayer,
    attention_layers,
)
from torch_turboquant.memory.sizes import CacheMemory, packed_memory, plain_memory
from torch_turboquant.memory.weights import WeightMemory, weight_memory
from torch_turboquant.models import read_config

DTYPE_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
}
_UNITS = {"": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_MOST = 2**63


def parse_size(text: str) -> int:
    """Bytes of a size such as "80" or "80GiB" (2^30 bytes each), "640GB" (10^9 each) or "512MiB".

    Raises:
        ValueError: the text is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?) ?([A-Za-z]*)", text)
    if not match or match[2] not in _UNITS:
        raise ValueError(
            f"{text!r} is no size; write 80 (GiB) or 640GB, with one of {[*_UNITS][1:]}"
        )
    return _integer(text, float(match[1]) * _UNITS[match[2]])


def parse_count(text: str) -> int:
    """A number of parameters such as "1.5B", "135M" or "70e9".

    Raises:
        ValueError: the text is no such number.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)([KMBT]?)", text)
    if not match:
        raise ValueError(f"{text!r} is no number of parameters; write 70B, 135M or 70e9")
    unit = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2]]
    return _integer(text, float(match[1]) * unit)


def parse_tokens(text: str) -> int:
    """A number of tokens such as "131072", "131,072" or "128K" (K is 1,024 and M is 1,024 K).

    Raises:
        ValueError: the text is no such number.
    """
    match = re.fullmatch(r"(\d+(?:[,_]\d{3})*)([KkM]?)", text)
    if not match:
        raise ValueError(f"{text!r} is no number of tokens; write 131072 or 128K (1K is 1,024)")
    units = {"": 1, "k": 2**10, "m": 2**20}
    return _integer(text, int(re.sub("[,_]", "", match[1])) * units[match[2].lower()])


def _integer(text: str, number: float) -> int:
    """Without a fraction. What nothing could ever hold is a slip, and float has no room for it."""
    if number >= _MOST:
        raise ValueError(f"{text} is too large, supported: below 2^63")
    return int(number)


def _argument(parse: Callable[[str], int]) -> Callable[[str], int]:
    """Wraps `parse` for argparse, which shows the text of ArgumentTypeError and of no other."""

    def parsed(text: str) -> int:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    model = parser.add_argument_group("model: a configuration, or three numbers")
    model.add_argument(
        "--config",
        metavar="PATH",
        help="config.json of transformers, or its folder; nothing is downloaded",
    )
    model.add_argument("--layers", type=int, metavar="N", help="layers that keep keys and values")
    model.add_argument(
        "--kv-heads", type=int, metavar="N", help="of a layer; replaces what --config says"
    )
    model.add_argument(
        "--head-dim", type=int, metavar="N", help="of a layer; replaces what --config says"
    )
    model.add_argument(
        "--latent-dim", type=int, metavar="N", help="with --layers: of latent attention (MLA)"
    )
    model.add_argument(
        "--rope-dim", type=int, metavar="N", help="with --latent-dim: channels with RoPE beside it"
    )
    room = parser.add_argument_group("room: sizes are GiB, or have a unit: 640GB, 512MiB")
    room.add_argument(
        "--context",
        type=_argument(parse_tokens),
        required=True,
        metavar="N",
        help="tokens of a request: 131072 or 128K",
    )
    room.add_argument(
        "--gpu-memory", type=_argument(parse_size), metavar="SIZE", help="of all GPUs"
    )
    weights = room.add_mutually_exclusive_group()
    weights.add_argument(
        "--weights", type=_argument(parse_size), metavar="SIZE", help="to subtract"
    )
    weights.add_argument(
        "--parameters", type=_argument(parse_count), metavar="COUNT", help="70B, 135M: to subtract"
    )
    weights.add_argument(
        "--pack-weights",
        type=int,
        metavar="B",
        help="to subtract the model of --config with its linear layers in 4 or 8 bits (needs "
        "transformers)",
    )
    room.add_argument(
        "--parameters-dtype",
        choices=DTYPE_BYTES,
        help="of --parameters, or of what --pack-weights leaves alone; default: bfloat16",
    )
    room.add_argument(
        "--reserve",
        type=_argument(parse_size),
        default=0,
        metavar="SIZE",
        help="for activations and workspaces, to subtract too (default: nothing)",
    )
    cache = parser.add_argument_group("cache")
    cache.add_argument("--key-bits", type=int, metavar="B", help="one more row, with --value-bits")
    cache.add_argument("--value-bits", type=int, metavar="B")
    defaults = CacheConfig(64, 4, 4)
    cache.add_argument(
        "--page-size",
        type=int,
        metavar="N",
        help=f"default: {defaults.page_size}, of latent attention {latent_preset('k4').page_size}",
    )
    for name in ("sink_tokens", "recent_window"):
        value = getattr(defaults, name)
        option = "--" + name.replace("_", "-")
        cache.add_argument(option, type=int, default=value, metavar="N", help=f"default: {value}")
    cache.add_argument(
        "--max-q-len", type=int, default=32, metavar="N", help="tokens per call (default: 32)"
    )
    cache.add_argument("--tail-dtype", choices=FLOATS_BY_NAME, default="bfloat16")
    cache.add_argument("--no-center", action="store_true", help="keys without a center")
    cache.add_argument(
        "--boundary-layers", type=int, default=0, metavar="N", help="at each end, in another preset"
    )
    cache.add_argument("--boundary-preset", choices=PRESETS, default="k8v8", help="default: k8v8")
    cache.add_argument(
        "--whole-sliding",
        action="store_true",
        help="sliding layers keep every token, not only their window as in TurboQuantCache",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def _layers(args: argparse.Namespace) -> list[MemoryLayer | None]:
    """The layers of --config, or of --layers with the options that describe one."""
    latent = args.latent_dim, args.rope_dim
    if latent != (None, None) and (None in latent or args.layers is None):
        raise ValueError("--layers, --latent-dim and --rope-dim come together")
    if args.layers is not None:
        if args.config is not None:
            raise ValueError("--layers describes the model in place of --config: give one of them")
        if None not in latent:
            if args.kv_heads is not None or args.head_dim is not None:
                raise ValueError(
                    "latent attention keeps no heads: leave --kv-heads, --head-dim out"
                )
            check_positive(layers=args.layers, latent_dim=args.latent_dim)
            return [LatentLayer(*latent)] * args.layers
        if args.kv_heads is None or args.head_dim is None:
            raise ValueError("--layers needs --kv-heads and --head-dim")
        check_positive(layers=args.layers, kv_heads=args.kv_heads, head_dim=args.head_dim)
        return [AttentionLayer(args.kv_heads, args.head_dim)] * args.layers
    if args.config is None:
        raise ValueError("give --config, or --layers, --kv-heads and --head-dim")
    config = read_config(args.config)
    given = {"kv_heads": args.kv_heads, "head_dim": args.head_dim}
    check_positive(**{name: n for name, n in given.items() if n is not None})
    layers = attention_layers(config, kv_heads=args.kv_heads, head_dim=args.head_dim)
    if any(given.values()) and not any(isinstance(layer, AttentionLayer) for layer in layers):
        raise ValueError("latent attention keeps no heads: leave --kv-heads, --head-dim out")
    if not any(layers):
        raise ValueError("no layer of this model keeps keys and values")
    return layers


def _packed_weights(args: argparse.Namespace) -> WeightMemory | None:
    """What --pack-weights makes of the model; None without it."""
    if args.pack_weights is None:
        return None
    if args.config is None:
        raise ValueError("--pack-weights needs --config: which layers there are says the model")
    dtype = _parameters_dtype(args)
    if dtype not in FLOATS_BY_NAME:
        raise ValueError(
            "--pack-weights leaves some layers in --parameters-dtype: "
            f"{', '.join(FLOATS_BY_NAME)}, not {dtype}"
        )
    return weight_memory(args.config, args.pack_weights, dtype)


def _parameters_dtype(args: argparse.Namespace) -> str:
    return args.parameters_dtype or "bfloat16"


def _budget(args: argparse.Namespace, packed: WeightMemory | None) -> int | None:
    """Bytes that are left for caches; None without --gpu-memory."""
    if args.parameters_dtype and args.parameters is None and packed is None:
        raise ValueError("--parameters-dtype needs --parameters or --pack-weights")
    if args.gpu_memory is None:
        if args.weights or args.parameters or args.reserve:
            raise ValueError("--weights, --parameters and --reserve need --gpu-memory")
        return None
    weights = args.weights or 0
    if packed is not None:
        weights = packed.packed
    if args.parameters is not None:
        weights = int(args.parameters * DTYPE_BYTES[_parameters_dtype(args)])
    budget: int = args.gpu_memory - weights - args.reserve
    if budget <= 0:
        raise ValueError(
            f"weights and reserve take {_size(weights + args.reserve)}, the memory has "
            f"{_size(args.gpu_memory)}: nothing is left for a cache"
        )
    return budget


def _rows(args: argparse.Namespace, layers: Sequence[MemoryLayer | None]) -> list[CacheMemory]:
    """One row for bf16, fp8, every preset, and for --key-bits with --value-bits if given."""
    configs = _configs(args, layers)  # which checks the page size, for the plain rows as well
    common = {"max_q_len": args.max_q_len, "whole_sliding": args.whole_sliding}
    packed = common | {
        "tail_itemsize": int(DTYPE_BYTES[args.tail_dtype]),
        "center": not args.no_center,
    }
    return [
        *(
            plain_memory(name, layers, itemsize, args.context, page_size=args.page_size, **common)
            for name, itemsize in (("bf16", 2), ("fp8", 1))
        ),
        *(
            packed_memory(name, layers, of_layers, args.context, **packed)
            for name, of_layers in configs.items()
        ),
    ]


def _configs(
    args: argparse.Namespace, layers: Sequence[MemoryLayer | None]
) -> dict[str, Sequence[Any]]:
    """The configurations of all layers, by the name of the row."""
    if (args.key_bits is None) != (args.value_bits is None):
        raise ValueError("--key-bits and --value-bits come together")
    first: Any = next(filter(None, layers))
    own = {name: getattr(args, name) for name in ("page_size", "sink_tokens", "recent_window")}
    if isinstance(first, LatentLayer):
        if args.key_bits is not None or args.boundary_layers:
            raise ValueError(
                "all layers of latent attention have one preset, and no values: leave --key-bits, "
                "--value-bits and --boundary-layers out"
            )
        return {
            name: [latent_preset(name, first.latent_dim, first.rope_dim, **own)] * len(layers)
            for name in LATENT_PRESETS
        }
    kinds = {name: choice._asdict() for name, choice in PRESETS.items()}
    if args.key_bits is not None:
        kinds[f"k{args.key_bits}v{args.value_bits} by hand"] = {
            "key_bits": args.key_bits,
            "value_bits": args.value_bits,
        }
    windows = [None if layer is None else layer.window for layer in layers]
    return {
        name: layer_configs(
            CacheConfig(first.head_dim, **own, **kind),
            windows,
            boundary_layers=args.boundary_layers,
            boundary_preset=args.boundary_preset,
        )
        for name, kind in kinds.items()
    }


def report(args: argparse.Namespace) -> dict[str, Any]:
    """The facts that the command prints, as plain data. Sizes are bytes.

    Raises:
        ValueError: arguments that do not fit together; a model that is not supported; weights that
            do not fit.
    """
    layers, packed = _layers(args), _packed_weights(args)
    budget = _budget(args, packed)
    if args.page_size is None:
        latent = isinstance(next(filter(None, layers)), LatentLayer)
        args.page_size = (
            latent_preset("k4").page_size if latent else CacheConfig(64, 4, 4).page_size
        )
    rows = _rows(args, layers)
    return {
        "layers": [
            {"count": count, **({} if layer is None else layer._asdict())}
            for layer, count in Counter(layers).items()
        ],
        "context": args.context,
        "page_size": args.page_size,
        "sink_tokens": args.sink_tokens,
        "recent_window": args.recent_window,
        "boundary_layers": args.boundary_layers,
        "weights": None if packed is None else packed._asdict(),
        "budget": budget,
        "caches": [
            {
                **asdict(row),
                "request": row.request,
                "against_bf16": rows[0].request / row.request,
                "requests": None if budget is None else row.requests_in(budget),
            }
            for row in rows
        ],
    }


def print_report(facts: dict[str, Any]) -> None:
    """Prints the facts of `report` as a table."""
    for layer in facts["layers"]:
        text = "no keys and values per token"
        if "kv_heads" in layer:
            kind = f"a window of {layer['window']:,}" if layer["window"] else "full attention"
            text = f"{layer['kv_heads']} KV heads of {layer['head_dim']}, {kind}"
        elif "latent_dim" in layer:
            text = f"latent rows of {layer['latent_dim']}, keys with RoPE of {layer['rope_dim']}"
        print(f"{layer['count']} layers: {text}")
    print(
        f"{facts['context']:,} tokens in pages of {facts['page_size']}; exact: first "
        f"{facts['sink_tokens']}, last {facts['recent_window']}"
    )
    if weights := facts["weights"]:
        print(
            f"{_size(weights['packed'])} of weights, {weights['layers']} layers packed; "
            f"{_size(weights['plain'])} as they are"
        )
    if facts["budget"] is not None:
        print(f"{_size(facts['budget'])} for caches")
    print()
    head = ("cache", "bytes/token", "pages/request", "tail/request", "request", "vs bf16", "fit")
    table = [head]
    for row in facts["caches"]:
        table.append(
            (
                row["name"],
                f"{row['bytes_per_token']:,}",
                _size(row["pages"]),
                _size(row["tail"]),
                _size(row["request"]),
                f"{row['against_bf16']:.2f}x",
                "" if row["requests"] is None else f"{row['requests']:,}",
            )
        )
    widths = [max(len(cells[i]) for cells in table) for i in range(len(head))]
    for cells in table:
        name, *numbers = (
            f"{cell:<{width}}" if i == 0 else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        print("  ".join([name, *numbers]).rstrip())


def _size(size: int) -> str:
    if size >= 2**30:
        return f"{size / 2**30:,.2f} GiB"
    return f"{size / 2**20:,.2f} MiB"


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        facts = report(args)
        if args.json:
            print(json.dumps(facts, indent=2))
        else:
            print_report(facts)
    except MissingPackages as error:  # says which command needs them
        print(error, file=sys.stderr)
        return 1
    except (ValueError, OverflowError) as error:  # of products that are too large to be divided
        print(f"memory: {error}", file=sys.stderr)
        return 1
    return 0
