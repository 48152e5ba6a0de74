"""Generating text with a model of the shape of Llama-3.1-8B: memory and time by kind of cache.

The model has random weights, which do not change the times. The contestants:

    dynamic      DynamicCache
    static       StaticCache, with the mask that it needs
    unmasked     StaticCache, read to its end without a mask: the tokens are wrong, but no bfloat16
                 cache could be faster
    quanto, hqq  QuantizedCache of transformers, where its backend is installed
    k4v4, ...    TurboQuantCache of that preset

Each runs in these modes, as far as it can:

    eager        the model as it is (TurboQuantCache: the growing form)
    graph        the whole step captured in a CUDA graph (static forms only)
    compile      torch.compile(mode="reduce-overhead", fullgraph=True) (static forms only)

A cache that is not packed attends through scaled_dot_product_attention in every way that gives the
same result: as transformers calls it ("as is"), and by the kernels of cuDNN and of flash attention,
each with enable_gqa and with the query heads of a KV head folded into queries. A few steps of each
way choose the fastest ("way"), which is then timed. "ways_ms" has the times of all of them. The
mode "compile", which takes long to start, has only the way that was the fastest in a graph.

A row of "step" has the time of one more token of a batch after a given context (tpot_ms: the
median decode step, from its input to the next token's id, of the least disturbed window of 8 steps:
eager steps depend on the host, which other work can slow down for seconds), the bytes of the
cache's tensors (cache_bytes), and the peak of all memory meanwhile. The context consists of
random keys and values, written straight into the cache, since their values do not change the times
either ("filled": "random"). A row of "prompt" runs a real prompt through the model. It has the peak
of memory and the time to the first token, once as a new process takes it (ttft_ms: unused memory
was given back to the device, so that it comes from the driver again) and once as later prompts take
it (ttft_kept_ms: torch keeps the memory).

predicted_bytes is the prediction of `torch_turboquant memory`, or two bytes per element.
largest_batch is the number of requests of this context that fit into the device's memory beside the
weights and everything else of this row.

    python benchmarks/bench_generate.py            the whole table, into results/h200_generate.json
    python benchmarks/bench_generate.py --quick    its most important rows, in three minutes
    python benchmarks/bench_generate.py --only 'k4v4.*graph'   rows whose title matches
    python benchmarks/bench_generate.py --weights 4    the model as it is and with packed weights,
                                                   into results/h200_weights.json
    python benchmarks/bench_generate.py --device cpu     a tiny model, only printed: a try

Every row is written as soon as it is measured. Rows of the same device and commit that the result
file already has are not measured again, so that an interrupted run can be continued; rows that are
deleted are measured anew.
"""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import common
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    StaticCache,
)
from transformers.cache_utils import Cache, QuantizedCache

from torch_turboquant.eval.layers import store
from torch_turboquant.integrations.transformers import (
    TurboQuantCache,
    TurboQuantConfig,
    quantize,
)
from torch_turboquant.memory import attention_layers, packed_memory

TINY = common.LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 500,
}
QUANTIZED = ("quanto", "hqq")
STEPS_AHEAD = 64  # room for the tokens that are generated here
WINDOW = 8  # steps of a median
TRIED = WINDOW  # steps of each way, before the fastest is timed
AS_IS = "as is"
KERNELS = {  # way -> the kernel, and whether query heads are folded into queries
    "cudnn": (SDPBackend.CUDNN_ATTENTION, False),
    "cudnn folded": (SDPBackend.CUDNN_ATTENTION, True),
    "flash": (SDPBackend.FLASH_ATTENTION, False),
    "flash folded": (SDPBackend.FLASH_ATTENTION, True),
}
STATIC = ("graph", "compile")
AT_MOST = 10.0  # seconds of timed steps or prompts, beyond the least that a median needs

Identity = tuple[str, str, str, int, int, int]  # part, kind, mode, batch, context, weights


@dataclass(frozen=True)
class Case:
    """One row to measure."""

    part: str  # step, prompt
    kind: str
    mode: str
    batch: int
    context: int
    weights: int = 0  # bits of packed weights; 0: bfloat16

    @property
    def identity(self) -> Identity:
        return self.part, self.kind, self.mode, self.batch, self.context, self.weights

    @property
    def title(self) -> str:
        packed = f" w{self.weights}" if self.weights else ""
        return f"{self.part} {self.kind} {self.mode} {self.batch}x{self.context}{packed}"

    @property
    def packed(self) -> bool:
        return self.kind not in ("dynamic", "static", "unmasked", *QUANTIZED)

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways in which this case can attend."""
        if self.packed or self.kind == "static":  # a mask excludes the kernels
            return (AS_IS,)
        if self.kind in QUANTIZED:  # most of their time goes to decoding the cache
            return AS_IS, "flash folded"
        return tuple(KERNELS) if self.kind == "unmasked" else (AS_IS, *KERNELS)


def whole_table() -> Iterator[Case]:
    presets = ("k5v4u", "k4v4")
    for context in (100, 1024, 8192, 32768, 131072):
        for batch in (1, 8, 16, 32) if context == 32768 else (1, 8, 32):
            quantized = QUANTIZED if batch == 1 else ("quanto",)
            for kind in ("dynamic", *quantized, *presets):
                yield Case("step", kind, "eager", batch, context)
            for kind in ("static", "unmasked", *presets):
                yield Case("step", kind, "graph", batch, context)
    for context, batch in ((1024, 1), (32768, 16), (131072, 1)):
        for kind in ("static", "unmasked", *presets):
            yield Case("step", kind, "compile", batch, context)
    for context in (100, 256, 1024, 8192, 32768, 131072):
        for kind in ("dynamic", *presets):
            yield Case("prompt", kind, "eager", 1, context)
    for kind in ("dynamic", *presets):
        yield Case("prompt", kind, "eager", 8, 8192)


def quick_table() -> Iterator[Case]:
    for context, batch in ((8192, 1), (32768, 16), (131072, 1), (1024, 32)):
        for kind in ("dynamic", "k5v4u"):
            yield Case("step", kind, "eager", batch, context)
        for kind in ("static", "unmasked", "k5v4u"):
            yield Case("step", kind, "graph", batch, context)
    for context in (1024, 8192, 32768):
        for kind in ("dynamic", "k5v4u"):
            yield Case("prompt", kind, "eager", 1, context)
    for kind in ("static", "unmasked", "k5v4u"):
        yield Case("step", kind, "compile", 1, 131072)


def weights_table(bits: int, tiny: bool) -> Iterator[Case]:
    """The model as it is, then with packed weights: alone, and together with a packed cache."""
    points = ((1, 200), (2, 200)) if tiny else ((1, 1024), (16, 1024), (16, 32768))
    for weights in (0, bits):
        for batch, context in points:
            for kind in ("dynamic", "k5v4u"):
                yield Case("step", kind, "eager", batch, context, weights)
            for mode in ("compile",) if tiny else ("graph", "compile"):
                for kind in ("unmasked", "k5v4u"):
                    yield Case("step", kind, mode, batch, context, weights)
        for context in (200,) if tiny else (100, 1024, 8192):
            yield Case("prompt", "dynamic", "eager", 1, context, weights)


def tiny_table() -> Iterator[Case]:
    for kind, mode in (
        ("dynamic", "eager"),
        ("k4v4", "eager"),
        ("static", "compile"),
        ("unmasked", "compile"),
        ("k4v4", "compile"),
    ):
        yield Case("step", kind, mode, 2, 200)
    for kind in ("dynamic", "k4v4"):
        yield Case("prompt", kind, "eager", 2, 200)


# ------------------------------------------------------------------------------------- caches


def attention_of(way: str) -> Callable:
    """Attention of one query to everything that is given, for AttentionInterface."""
    backend, folded = KERNELS[way]

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        batch, heads, _, d = query.shape
        if folded:  # query heads of a KV head are neighbours
            query = query.view(batch, key.shape[1], -1, d)
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, scale=scaling, enable_gqa=not folded
            )
        return out.reshape(batch, 1, heads, d), None

    return attend


def implementation(way: str) -> str:
    """The name under which transformers finds a way. Names with "flash" have a meaning there."""
    return "sdpa" if way == AS_IS else f"unmasked_{list(KERNELS).index(way)}"


for way in KERNELS:
    AttentionInterface.register(implementation(way), attention_of(way))


@contextmanager
def attending(model, way: str) -> Iterator[None]:
    """Lets a model attend in one way."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation(way))
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class Unavailable(Exception):
    """This contestant cannot run here; the text says why."""


@contextmanager
def made(case: Case, model) -> Iterator[Cache]:
    """Makes an empty cache of the case, and detaches it in the end."""
    room = case.context + STEPS_AHEAD
    static = case.mode in STATIC
    if case.kind == "dynamic":
        yield DynamicCache(config=model.config)
    elif case.kind in ("static", "unmasked"):
        yield StaticCache(config=model.config, max_cache_len=room)
    elif case.kind in QUANTIZED:
        try:
            cache = QuantizedCache(case.kind, model.config)
        except (ImportError, ValueError) as error:
            raise Unavailable(str(error).splitlines()[0]) from error
        yield cache
    else:
        with TurboQuantCache.for_model(
            model, case.kind, max_batch_size=case.batch, max_cache_len=room, static=static
        ) as cache:
            yield cache


def fill(cache: Cache, model, case: Case) -> None:
    """Stores random keys and values of `context` tokens in every layer."""
    config = model.config
    generator = torch.Generator(model.device).manual_seed(0)

    def noise(heads: int) -> Tensor:
        shape = case.batch, case.context, heads, config.head_dim
        x = torch.empty(shape, dtype=model.dtype, device=model.device)
        return x.normal_(generator=generator).transpose(1, 2)

    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layers = (
        (noise(heads) if case.packed else None, noise(kv_heads), noise(kv_heads))
        for _ in range(config.num_hidden_layers)
    )
    store(cache, case.batch, case.context, layers)
    if case.packed:
        stored = all(layer.pages[0].any() for layer in cache.packed)
        assert stored, "nothing was stored: this would measure an empty cache"


def tensors_of(held: object) -> list[Tensor]:
    """All tensors that an object's attributes hold; of quantised ones, their parts."""
    if isinstance(held, (list, tuple)):
        return [t for part in held for t in tensors_of(part)]
    if isinstance(held, Tensor) and type(held) is Tensor:
        return [held]
    return [t for part in getattr(held, "__dict__", {}).values() for t in tensors_of(part)]


def bytes_of(cache: Cache, case: Case) -> int:
    """Bytes of the cache's own tensors, each storage counted once."""
    if case.packed:
        return cache.memory_bytes()["total"]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for layer in cache.layers
        for t in tensors_of(layer)
    }
    return sum(storages.values())


def predicted_bytes(model, case: Case) -> int | None:
    """Bytes that the memory planner predicts for the cache of this case; None: not planned."""
    layers = attention_layers(model.config.to_dict())
    room = case.context + STEPS_AHEAD
    if case.packed:
        with TurboQuantCache.for_model(model, case.kind) as cache:
            configs = cache.configs
        memory = packed_memory("", layers, configs, room, tail_itemsize=model.dtype.itemsize)
        return case.batch * memory.request + memory.constants
    if case.kind in QUANTIZED:
        return None
    tokens = room if case.kind in ("static", "unmasked") else case.context
    numbers = sum(2 * layer.kv_heads * layer.head_dim for layer in layers)
    return case.batch * tokens * numbers * model.dtype.itemsize


# --------------------------------------------------------------------------------- measuring


class Device:
    """Clock and memory of the device under test."""

    def __init__(self, name: str) -> None:
        self.cuda = torch.device(name).type == "cuda"

    def clean(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def seconds(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.cuda else 0

    def total(self) -> int:
        return torch.cuda.mem_get_info()[1] if self.cuda else 0


def stepper(case: Case, model, cache: Cache) -> Callable[[Tensor], Tensor]:
    """One decode step: ids [batch, 1] -> the next ids [batch, 1]."""

    def step(ids: Tensor) -> Tensor:
        return model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)

    if case.mode == "eager":
        return step
    if case.mode == "compile":
        cuda = model.device.type == "cuda"
        mode = {"mode": "reduce-overhead"} if cuda else {"backend": "aot_eager"}
        return torch.compile(step, fullgraph=True, dynamic=False, **mode)
    ids = torch.zeros(case.batch, 1, dtype=torch.int64, device=model.device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(ids)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step(ids)

    def replay(given: Tensor) -> Tensor:
        ids.copy_(given)
        graph.replay()
        return result

    return replay


def fastest_steps(case: Case, ways: Sequence[str], model, device: Device, steps: int) -> dict:
    """Times of decode steps after a context, of the fastest way; see the top of this file."""
    tried: dict[str, float] = {}
    absent: dict[str, str] = {}
    for way in ways if len(ways) > 1 else ():
        try:
            tried[way] = steps_of(case, way, model, device, TRIED)["tpot_ms"]
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:  # no kernel for this shape or device
            if case.packed or way == AS_IS:
                raise
            absent[way] = (str(error).splitlines() or [type(error).__name__])[0][:200]
    way = min(tried, key=tried.__getitem__) if tried else ways[0]
    row = steps_of(case, way, model, device, steps)
    if len(case.ways) > 1:
        row |= {"way": way, "ways_ms": tried, "absent": absent}
    return row


def ways_of(case: Case, found: dict[Identity, dict]) -> Sequence[str]:
    """The ways to try: all, or to compile only the one that was the fastest in a graph."""
    graph = found.get(replace(case, mode="graph").identity, {})
    return (graph["way"],) if case.mode == "compile" and "way" in graph else case.ways


def steps_of(case: Case, way: str, model, device: Device, steps: int) -> dict:
    """Times of decode steps after a context in one way, and the memory that they need."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    torch._dynamo.reset()
    device.clean()
    with attending(model, way), made(case, model) as cache:
        fill(cache, model, case)
        held = bytes_of(cache, case)
        device.clean()
        started = device.seconds()
        step = stepper(case, model, cache)
        ids = torch.full((case.batch, 1), 7, dtype=torch.int64, device=model.device)
        for _ in range(3):  # compiles, or captures
            ids = step(ids).clone()
        ready = device.seconds() - started
        times: list[float] = []
        while len(times) < steps and (len(times) < 5 or sum(times) < AT_MOST):
            started = device.seconds()
            ids = step(ids).clone()
            times.append(device.seconds() - started)
        peak = device.peak()
        del step
    row = {
        "tpot_ms": 1e3 * typical(times),
        "tpot_min_ms": 1e3 * min(times),
        "ready_s": ready,
        "cache_bytes": held,
        "predicted_bytes": predicted_bytes(model, case),
        "filled": "random",
    }
    if device.cuda:
        rest = peak - held - weights
        free = device.total() - weights - rest
        row |= {"peak_bytes": peak, "weights_bytes": weights, "everything_else_bytes": rest}
        row["largest_batch"] = int(free // (held / case.batch))
    return row


def typical(times: list[float]) -> float:
    """The lowest median of a window of steps."""
    windows = [times[i : i + WINDOW] for i in range(0, len(times), WINDOW)]
    full = [window for window in windows if len(window) == WINDOW] or windows
    return min(map(statistics.median, full))


def prompt(case: Case, model, device: Device, repeats: int) -> dict:
    """The time from a real prompt to the first token's id, the best of a few attempts.

    Before every other attempt, all unused memory is given back to the device.
    """
    generator = torch.Generator().manual_seed(1)
    shape = case.batch, case.context
    ids = torch.randint(1, model.config.vocab_size, shape, generator=generator).to(model.device)
    times: dict[bool, list[float]] = {True: [], False: []}
    for attempt in range(repeats + 1):
        if sum(times[True]) > AT_MOST:
            break
        for emptied in (True, False):
            with made(case, model) as cache:
                if emptied:
                    device.clean()
                started = device.seconds()
                logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
                logits.argmax(-1).cpu()
                if attempt:  # the first one loads kernels
                    times[emptied].append(device.seconds() - started)
                if emptied:
                    held, peak = bytes_of(cache, case), device.peak()
            del cache, logits
    return {
        "ttft_ms": 1e3 * min(times[True]),
        "ttft_kept_ms": 1e3 * min(times[False]),
        "cache_bytes": held,
        "peak_bytes": peak,
        "filled": "prompt",
    }


def measure(case: Case, ways: Sequence[str], model, device: Device, quick: bool) -> dict:
    """The row of a case. If it cannot run, the row says why."""
    origin = {
        "part": case.part,
        "kind": case.kind,
        "mode": case.mode,
        "batch": case.batch,
        "context": case.context,
    }
    if case.weights:
        origin["weights"] = case.weights
    try:
        if case.part == "step":
            return origin | fastest_steps(case, ways, model, device, 12 if quick else 32)
        return origin | prompt(case, model, device, 4 if quick else 12)
    except Unavailable as error:
        return origin | {"not_run": str(error)}
    except torch.cuda.OutOfMemoryError:
        return origin | {
            "not_run": "out of memory",
            "predicted_bytes": predicted_bytes(model, case),
        }
    except Exception as error:
        if case.kind not in QUANTIZED:  # theirs to run or not; ours must
            raise
        return origin | {"not_run": (str(error).splitlines() or [type(error).__name__])[0]}
    finally:
        torch._dynamo.reset()
        device.clean()


def packed(model, bits: int) -> str:
    """Packs the model's weights; what there is to say of it."""
    before = sum(p.numel() * p.element_size() for p in model.parameters())
    started = time.perf_counter()
    layers = quantize(model, TurboQuantConfig(bits))
    after = sum(p.numel() * p.element_size() for p in model.parameters())
    return (
        f"{len(layers)} layers packed in {time.perf_counter() - started:.1f} s: "
        f"{before / 2**30:.3f} GiB -> {after / 2**30:.3f} GiB"
    )


def describe(row: dict) -> str:
    title = f"{row['part']:6} {row['kind']:8} {row['mode']:7} {row['batch']:3} x {row['context']:6}"
    if "weights" in row:
        title += f" w{row['weights']}"
    if "not_run" in row:
        return f"{title}  {row['not_run'][:60]}"
    if row["part"] == "prompt":
        return (
            f"{title}  first token {row['ttft_ms']:9.2f} ms, with memory kept "
            f"{row['ttft_kept_ms']:9.2f} ms"
        )
    way = f" ({row['way']})" if "way" in row else ""
    text = f"{title}  {row['tpot_ms']:8.3f} ms a token{way}, cache "
    text += f"{row['cache_bytes'] / 2**30:7.3f} GiB"
    if row["predicted_bytes"]:
        text += f" ({100 * (row['cache_bytes'] / row['predicted_bytes'] - 1):+.2f}%)"
    if "largest_batch" in row:
        text += f", else {row['everything_else_bytes'] / 2**30:6.3f}, fits {row['largest_batch']}"
    return text


def identity(row: dict) -> Identity:
    """The identity of the case that a row belongs to."""
    own = tuple(row[key] for key in ("part", "kind", "mode", "batch", "context"))
    return *own, row.get("weights", 0)


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--quick", action="store_true", help="fewer rows, fewer steps")
    options.add_argument("--only", help="regular expression: rows whose title it finds")
    options.add_argument(
        "--weights", type=int, metavar="B", help="the table of packed weights, of 4 or 8 bits"
    )
    options.add_argument("--seconds", type=float, default=1e9, help="start no row after so long")
    arguments = options.parse_args()
    device = Device(arguments.device)
    arguments.dry_run |= not device.cuda
    shape = common.LLAMA_8B if device.cuda else TINY
    table = quick_table() if arguments.quick else whole_table()
    if arguments.weights:
        table = weights_table(arguments.weights, tiny=not device.cuda)
    elif not device.cuda:
        table = tiny_table()
    cases = [c for c in table if not arguments.only or re.search(arguments.only, c.title)]
    name = "h200_weights" if arguments.weights else "h200_generate"
    arguments.commit = arguments.commit or common.commit_name()
    here = common.device_name(arguments.device)
    rows = common.read_rows(name, missing_ok=True)
    found = {identity(row): row for row in rows if row["device"] == here}
    done = {key for key, row in found.items() if row["commit"] == arguments.commit}

    started = time.perf_counter()
    with torch.device(arguments.device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=torch.bfloat16).eval()
    print(f"model in {time.perf_counter() - started:.1f} s", flush=True)
    origin = {"commit": arguments.commit, "command": common.command_line()}
    with torch.no_grad():
        for case in cases:
            if case.identity in done:
                continue
            if time.perf_counter() - started > arguments.seconds:
                print(f"stopped before: {case.title}")
                break
            if case.weights and not hasattr(model, "hf_quantizer"):  # from here on, all are
                print(packed(model, case.weights), flush=True)
            row = measure(case, ways_of(case, found), model, device, arguments.quick)
            print(describe(row), f"[{time.perf_counter() - started:.0f} s]", flush=True)
            found[case.identity] = {**origin, **row}
            common.write_rows(name, list(found.values()), arguments)


if __name__ == "__main__":
    main()
