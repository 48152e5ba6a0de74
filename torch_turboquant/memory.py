"""How much memory a model's KV cache takes: `python -m torch_turboquant memory`.

Everything is counted from the model's configuration: the pages of a request (codes, scales,
padding, the last page rounded up), its exact tail, and once per model the constants of the codec.
Beside the presets stand bf16 and fp8 in pages of the same size. Sizes are bytes; the command prints
binary units (1 GiB = 2^30 bytes).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch_turboquant._checks import check_positive
from torch_turboquant.config import PRESETS, CacheConfig
from torch_turboquant.policy import layer_configs
from torch_turboquant.tail import ring_rows

DTYPE_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
}

# ---- the layers of a model


class AttentionLayer(NamedTuple):
    """What one layer keeps of a token."""

    kv_heads: int
    head_dim: int
    window: int = 0
    """Sliding window in tokens; 0: full attention."""


# Families whose class takes hidden_size / num_attention_heads where the file names no head_dim.
# Others have a default of their own, which only transformers knows: those must name it.
DERIVED_HEAD_DIM = frozenset(
    "apertus arcee cohere cohere2 diffllama flex_olmo granite granite_swa granitemoe "
    "granitemoehybrid granitemoeshared jamba lfm2 llama ministral mistral mixtral olmo olmo2 olmo3 "
    "olmoe phi phi3 phimoe qwen2 qwen2_moe smollm3 stablelm starcoder2".split()
)
_SLIDING_PATTERN = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}  # if none is named
_ALL_SLIDING = frozenset({"mistral", "mixtral", "phi3", "phimoe", "starcoder2"})
_FULL_INTERVAL = {"qwen3_next": 4, "qwen3_5_text": 4, "qwen3_5_moe_text": 4}
_FULL = frozenset({"full_attention", "attention"})
_WITHOUT_CACHE = frozenset(
    {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "mlp", "moe"}
)
_TEXT_CONFIGS = ("text_config", "thinker_config", "llm_config", "language_config")


def read_config(path: str | Path) -> dict[str, Any]:
    """The config.json of a transformers model, given as the file or its folder.

    Raises:
        ValueError: no such file, or not a JSON object.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read the model configuration {path}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no model configuration: expected a JSON object")
    return config


def attention_layers(
    config: Mapping[str, Any], *, kv_heads: int | None = None, head_dim: int | None = None
) -> list[AttentionLayer | None]:
    """The layers of a model; None for one that keeps nothing per token.

    Args:
        config: what config.json of transformers holds; the language model of a nested one.
        kv_heads, head_dim: instead of what the configuration says, or does not say.

    Raises:
        ValueError: a configuration that does not say enough, or an architecture that is not
            supported (latent attention, cross attention, chunked attention).
    """
    for key in _TEXT_CONFIGS:
        if isinstance(config.get(key), Mapping):
            return attention_layers(config[key], kv_heads=kv_heads, head_dim=head_dim)
    kind = config.get("model_type")
    problem = None
    if config.get("is_encoder_decoder") or config.get("add_cross_attention"):
        problem = "cross attention"
    elif config.get("kv_lora_rank"):
        problem = "latent attention (MLA)"
    if problem:
        raise ValueError(f"model type {kind!r} has {problem}; supported: {_SUPPORTED}")
    types = _layer_types(config)
    shared = config.get("num_kv_shared_layers") or 0
    layers: list[AttentionLayer | None] = []
    for index, layer_type in enumerate(types):
        if layer_type in _WITHOUT_CACHE or index >= len(types) - shared:
            layers.append(None)
            continue
        own = _of_layer(config, index, layer_type in _FULL)
        window = 0
        if layer_type not in _FULL:
            window = config.get("sliding_window") or 0
            if not window:
                raise ValueError("the configuration has sliding layers but names no sliding_window")
        layers.append(
            AttentionLayer(
                _kv_heads(own) if kv_heads is None else kv_heads,
                _head_dim(own) if head_dim is None else head_dim,
                window,
            )
        )
    return layers


_SUPPORTED = "decoders with full, sliding-window and linear attention (MHA, GQA, MQA)"


def _number(config: Mapping[str, Any], name: str, option: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"the configuration (model type {config.get('model_type')!r}) has {name} = {value!r}; "
            f"give {option}"
        )
    return value


def _kv_heads(config: Mapping[str, Any]) -> int:
    if "num_key_value_heads" in config and config["num_key_value_heads"] is None:
        return _number(config, "num_attention_heads", "--kv-heads")
    return _number(config, "num_key_value_heads", "--kv-heads")


def _head_dim(config: Mapping[str, Any]) -> int:
    """As named; derived only where the model does so, since many models have another one."""
    if config.get("head_dim") is None and config.get("model_type") in DERIVED_HEAD_DIM:
        hidden = _number(config, "hidden_size", "--head-dim")
        return hidden // _number(config, "num_attention_heads", "--head-dim")
    return _number(config, "head_dim", "--head-dim")


def _of_layer(config: Mapping[str, Any], index: int, full: bool) -> dict[str, Any]:
    """The configuration with what one layer has of its own (Gemma 4: larger full layers)."""
    own = dict(config)
    if full and config.get("global_head_dim"):
        own["head_dim"] = config["global_head_dim"]
        if config.get("attention_k_eq_v", True) and config.get("num_global_key_value_heads"):
            own["num_key_value_heads"] = config["num_global_key_value_heads"]
    for key, changes in (config.get("per_layer_config") or {}).items():
        if int(key) == index:
            own.update(changes)
    return own


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    """One type per layer, from whichever of the keys in use says it."""
    kind: Any = config.get("model_type")
    count = _number(config, "num_hidden_layers", "--layers, --kv-heads and --head-dim")
    window = config.get("sliding_window")
    if config.get("use_sliding_window") is False:
        window = None
    interval = config.get("full_attention_interval") or _FULL_INTERVAL.get(kind)
    pattern = (
        config.get("sliding_window_pattern")
        or config.get("_sliding_window_pattern")
        or _SLIDING_PATTERN.get(kind)
    )
    types = config.get("layer_types") or config.get("layers_block_type")
    if types:
        types = list(types)
    elif interval:
        types = _every(interval, "linear_attention", count)
    elif config.get("attn_layer_indices") is not None:
        attending = set(config["attn_layer_indices"])
        types = ["attention" if i in attending else "mamba" for i in range(count)]
    elif config.get("attn_layer_period"):
        period, offset = config["attn_layer_period"], config.get("attn_layer_offset", 0)
        types = ["attention" if i % period == offset else "mamba" for i in range(count)]
    elif hints := sorted(
        k for k in config if k.startswith(("mamba_", "ssm_", "linear_", "conv_L"))
    ):
        raise ValueError(
            f"the configuration (model type {kind!r}) has {hints[0]} but does not say which layers "
            "attend; give --layers (those that keep keys and values), --kv-heads and --head-dim"
        )
    elif window and pattern:
        types = _every(pattern, "sliding_attention", count)
    elif window and config.get("max_window_layers") is not None:
        first = config["max_window_layers"]
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    elif window and kind not in _ALL_SLIDING:
        raise ValueError(
            f"the configuration (model type {kind!r}) has sliding_window = {window} but does not "
            "say in which layers; add layer_types to it"
        )
    else:
        types = ["sliding_attention" if window else "full_attention"] * count
    unknown = sorted({*types} - _FULL - _WITHOUT_CACHE - {"sliding_attention"})
    if unknown:
        raise ValueError(
            f"model type {kind!r} has layers of type {unknown}; supported: {_SUPPORTED}"
        )
    if len(types) != count:
        raise ValueError(f"the configuration has {len(types)} layer types for {count} layers")
    return types


def _every(period: int, other: str, count: int) -> list[str]:
    return [other if (i + 1) % period else "full_attention" for i in range(count)]


# ---- the memory of a cache


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of one kind of cache, all layers together."""

    name: str
    bytes_per_token: int
    """One token in all layers that keep it."""
    pages: int
    """Of one request: codes, scales and padding, the last page rounded up."""
    tail: int
    """Of one request: the exact first and last tokens."""
    constants: int
    """Once per model: signs, codebooks and centers."""

    @property
    def request(self) -> int:
        """Bytes of one request."""
        return self.pages + self.tail

    def requests_in(self, budget: int) -> int:
        """How many requests fit into `budget` bytes."""
        return max(0, budget - self.constants) // self.request


def packed_memory(
    name: str,
    layers: Sequence[AttentionLayer | None],
    configs: Sequence[CacheConfig],
    context: int,
    *,
    tail_itemsize: int = 2,
    max_q_len: int = 32,
    center: bool = True,
    whole_sliding: bool = False,
) -> CacheMemory:
    """A packed cache.

    Args:
        name: of the row.
        layers: of the model.
        configs: one per layer (policy.layer_configs); their head_dim is the layer's.
        context: tokens of a request.
        tail_itemsize: bytes of an element of the model's dtype.
        max_q_len: new tokens that one attention call takes; the tail holds max_q_len - 1 tokens
            more than its window.
        center: whether keys have a center and scales of channels.
        whole_sliding: sliding layers keep all tokens, not only the pages that max_q_len queries can
            see (as in TurboQuantCache).

    Raises:
        ValueError: context or max_q_len below 1, or a head_dim that packed caches do not have.
    """
    check_positive(context=context, max_q_len=max_q_len)
    per_token = pages = tail = constants = 0
    for layer, config in zip(layers, configs, strict=True):
        if layer is None:
            continue
        config = replace(config, head_dim=layer.head_dim)
        visible = layer.window + max_q_len - 1 if layer.window and not whole_sliding else 0
        held = _pages(context, visible, config.page_size)
        per_token += layer.kv_heads * config.bytes_per_token
        pages += held * layer.kv_heads * config.record_bytes
        if config.has_tail:
            rows = config.sink_tokens + ring_rows(config, max_q_len)
            tail += rows * layer.kv_heads * 2 * layer.head_dim * tail_itemsize
        constants += _constants(config, 3 * layer.kv_heads if center else 0)
    return CacheMemory(name, per_token, pages, tail, constants)


def plain_memory(
    name: str,
    layers: Sequence[AttentionLayer | None],
    itemsize: int,
    context: int,
    *,
    page_size: int = 32,
    max_q_len: int = 32,
    whole_sliding: bool = False,
) -> CacheMemory:
    """A paged cache of plain numbers of `itemsize` bytes; arguments as in packed_memory."""
    check_positive(context=context, max_q_len=max_q_len)
    per_token = pages = 0
    for layer in filter(None, layers):
        token = layer.kv_heads * 2 * layer.head_dim * itemsize
        visible = layer.window + max_q_len - 1 if layer.window and not whole_sliding else 0
        per_token += token
        pages += _pages(context, visible, page_size) * page_size * token
    return CacheMemory(name, per_token, pages, 0, 0)


def _pages(context: int, visible: int, page_size: int) -> int:
    """Pages that hold the last `visible` of `context` tokens wherever they begin; 0: all tokens."""
    whole = -(-context // page_size)
    return min(whole, 1 - (1 - visible) // page_size) if visible else whole


def _constants(config: CacheConfig, center_rows: int) -> int:
    """Bytes of make_tables: signs, candidate steps, levels where the grid has any, the center."""
    size = 2 * 4 * config.head_dim + 2 * 4 * config.search + 4 * center_rows * config.head_dim
    for bits, grid in (
        (config.key_bits, config.key_grid),
        (config.value_bits, config.value_grid),
    ):
        size += 2**bits if grid == "lloyd" else 0
    return size


# ---- the command

_UNITS = {"": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_size(text: str) -> int:
    """Bytes of "80" or "80GiB" (2^30 bytes each), "640GB" (10^9 bytes each), "512MiB", ...

    Raises:
        ValueError: anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?) ?([A-Za-z]*)", text)
    if not match or match[2] not in _UNITS:
        raise ValueError(
            f"{text!r} is no size; write 80 (GiB) or 640GB, with one of {[*_UNITS][1:]}"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def parse_count(text: str) -> int:
    """A number of parameters: "1.5B", "135M" or plain.

    Raises:
        ValueError: anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)([KMBT]?)", text)
    if not match:
        raise ValueError(f"{text!r} is no number of parameters; write 70B, 135M or 70e9")
    return int(float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2]])


def _argument(parse: Callable[[str], int]) -> Callable[[str], int]:
    """`parse` for argparse, which shows the text of this error only."""

    def parsed(text: str) -> int:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model: a configuration, or three numbers")
    model.add_argument(
        "--config", metavar="PATH", help="config.json of transformers, or its folder"
    )
    model.add_argument("--layers", type=int, metavar="N", help="layers that keep keys and values")
    model.add_argument(
        "--kv-heads", type=int, metavar="N", help="of a layer; replaces what --config says"
    )
    model.add_argument(
        "--head-dim", type=int, metavar="N", help="of a layer; replaces what --config says"
    )
    room = parser.add_argument_group("room: sizes are GiB, or have a unit: 640GB, 512MiB")
    room.add_argument("--context", type=int, required=True, metavar="N", help="tokens of a request")
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
    room.add_argument(
        "--parameters-dtype", choices=DTYPE_BYTES, default="bfloat16", help="default: bfloat16"
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
    for name in ("page_size", "sink_tokens", "recent_window"):
        value = getattr(defaults, name)
        option = "--" + name.replace("_", "-")
        cache.add_argument(option, type=int, default=value, metavar="N", help=f"default: {value}")
    cache.add_argument(
        "--max-q-len", type=int, default=32, metavar="N", help="tokens per call (default: 32)"
    )
    cache.add_argument(
        "--tail-dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16"
    )
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


def _layers(args: argparse.Namespace) -> list[AttentionLayer | None]:
    """The layers of --config, or of --layers, --kv-heads and --head-dim."""
    if args.layers is not None:
        if args.config is not None:
            raise ValueError("--layers describes the model in place of --config: give one of them")
        if args.kv_heads is None or args.head_dim is None:
            raise ValueError("--layers needs --kv-heads and --head-dim")
        check_positive(layers=args.layers, kv_heads=args.kv_heads, head_dim=args.head_dim)
        return [AttentionLayer(args.kv_heads, args.head_dim)] * args.layers
    if args.config is None:
        raise ValueError("give --config, or --layers, --kv-heads and --head-dim")
    config = read_config(args.config)
    layers = attention_layers(config, kv_heads=args.kv_heads, head_dim=args.head_dim)
    if not any(layers):
        raise ValueError("no layer of this model keeps keys and values")
    return layers


def _budget(args: argparse.Namespace) -> int | None:
    """Bytes that are left for caches; None without --gpu-memory."""
    if args.gpu_memory is None:
        if args.weights or args.parameters or args.reserve:
            raise ValueError("--weights, --parameters and --reserve need --gpu-memory")
        return None
    weights = args.weights or 0
    if args.parameters is not None:
        weights = int(args.parameters * DTYPE_BYTES[args.parameters_dtype])
    budget: int = args.gpu_memory - weights - args.reserve
    if budget <= 0:
        raise ValueError(
            f"weights and reserve take {_size(weights + args.reserve)}, the memory has "
            f"{_size(args.gpu_memory)}: nothing is left for a cache"
        )
    return budget


def _rows(args: argparse.Namespace, layers: Sequence[AttentionLayer | None]) -> list[CacheMemory]:
    """bf16, fp8, every preset, and --key-bits with --value-bits."""
    if (args.key_bits is None) != (args.value_bits is None):
        raise ValueError("--key-bits and --value-bits come together")
    common = {"max_q_len": args.max_q_len, "whole_sliding": args.whole_sliding}
    rows = [
        plain_memory(name, layers, itemsize, args.context, page_size=args.page_size, **common)
        for name, itemsize in (("bf16", 2), ("fp8", 1))
    ]
    kinds = {name: choice._asdict() for name, choice in PRESETS.items()}
    if args.key_bits is not None:
        kinds[f"k{args.key_bits}v{args.value_bits} by hand"] = {
            "key_bits": args.key_bits,
            "value_bits": args.value_bits,
        }
    windows = [None if layer is None else layer.window for layer in layers]
    first = next(filter(None, layers))
    for name, fields in kinds.items():
        base = CacheConfig(
            first.head_dim,
            page_size=args.page_size,
            sink_tokens=args.sink_tokens,
            recent_window=args.recent_window,
            **fields,
        )
        configs = layer_configs(
            base,
            windows,
            boundary_layers=args.boundary_layers,
            boundary_preset=args.boundary_preset,
        )
        rows.append(
            packed_memory(
                name,
                layers,
                configs,
                args.context,
                tail_itemsize=int(DTYPE_BYTES[args.tail_dtype]),
                center=not args.no_center,
                **common,
            )
        )
    return rows


def report(args: argparse.Namespace) -> dict[str, Any]:
    """What the command prints, from its arguments.

    Raises:
        ValueError: arguments that do not fit together; a model that is not supported; weights that
            do not fit.
    """
    layers, budget = _layers(args), _budget(args)
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
    for layer in facts["layers"]:
        text = "no keys and values per token"
        if "kv_heads" in layer:
            kind = f"a window of {layer['window']:,}" if layer["window"] else "full attention"
            text = f"{layer['kv_heads']} KV heads of {layer['head_dim']}, {kind}"
        print(f"{layer['count']} layers: {text}")
    print(
        f"{facts['context']:,} tokens in pages of {facts['page_size']}; exact: first "
        f"{facts['sink_tokens']}, last {facts['recent_window']}"
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
    try:
        facts = report(args)
    except ValueError as error:
        print(f"memory: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        print_report(facts)
    return 0
