"""One evaluation: which caches are left to measure, in which order, and what a row of results is.

Rows are plain data, one per cache. A row that an earlier run has finished under the same settings
is kept and not measured again; `save` is called after every cache, so an interrupted run goes on
where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from torch_turboquant.eval import layers, measure
from torch_turboquant.eval.caches import UNCOMPRESSED, Choice, sizes
from torch_turboquant.integrations.transformers.models import head_dim_of, text_config

Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How the text is read: what rows must agree on to be compared."""

    segments: int
    prefill: int  # tokens of the first forward of a segment
    scored_tokens: int  # of every segment, predicted after that
    chunk: int  # tokens of a forward while predicting


def describe(model: Any, name: str, text: Tensor, settings: Settings) -> Row:
    """What a row says about the run."""
    config = text_config(model)
    return {
        "model": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "batch": 1,
        "context": text.shape[1],
        "text": hashlib.sha256(text.numpy().tobytes()).hexdigest()[:16],
        **asdict(settings),
        "layers": config.num_hidden_layers,
        "q_heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": head_dim_of(config),
    }


# What a finished row must share with this run to count as done.
_SAME = ("model", "dtype", "device", "text", "segments", "prefill", "scored_tokens", "chunk")


def without(rows: Sequence[Row], replaced: Sequence[Row]) -> list[Row]:
    """The rows that are not of the same run and cache as one of `replaced`."""

    def identity(row: Row) -> tuple:
        return tuple(row.get(key) for key in (*_SAME, "cache"))

    new = {identity(row) for row in replaced}
    return [row for row in rows if identity(row) not in new]


def evaluate(
    model: Any,
    name: str,
    choices: Sequence[Choice],
    text: Tensor,
    settings: Settings,
    origin: Row,
    done: Sequence[Row] = (),
    save: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """Measures every choice; the uncompressed cache is always measured, and first.

    Args:
        model: a decoder that TurboQuantCache supports.
        name: of the model, for the rows.
        text: int64 [segments, prefill + scored_tokens] on the CPU (measure.segments).
        origin: put in front of every row; names the device.
        done: rows of earlier runs.
        save: called with all rows of this run, finished ones first, whenever there is a new one.

    Returns:
        One row per choice, in their order, that of the uncompressed cache in front.
    """
    about = {**origin, **describe(model, name, text, settings)}
    choices = [Choice.parse(UNCOMPRESSED), *(c for c in choices if c.kind != "uncompressed")]
    finished = {
        row["cache"]: row for row in done if all(row.get(key) == about[key] for key in _SAME)
    }
    pending = [c for c in choices if c.text not in finished]
    if not pending:
        return [finished[c.text] for c in choices]

    config = text_config(model)
    read = partial(measure.read, model, text=text, prefill=settings.prefill, chunk=settings.chunk)
    # Its predictions are what the others are compared with, so it runs in any case.
    base, logits, cache = read(make=partial(choices[0].make, model), title=UNCOMPRESSED)
    recorded = layers.record(model, text[0])
    spread = [layers.channel_spread(i, layer) for i, layer in enumerate(recorded)]
    if choices[0] in pending:
        finished[UNCOMPRESSED] = {
            **about,
            "cache": UNCOMPRESSED,
            "kind": "uncompressed",
            **sizes(cache, model, head_dim_of(config)),
            **measure.summary(base),
            "channel_spread": _columns(spread),
        }
        save([finished[c.text] for c in choices if c.text in finished])
    bar = tqdm([c for c in pending if c.kind != "uncompressed"], "caches", leave=False)
    for choice in bar:
        make = partial(choice.make, model)
        reading, _, cache = read(make=make, reference=logits, title=choice.text)
        by_layer = _layers(make(), recorded, settings)
        finished[choice.text] = {
            **about,
            "cache": choice.text,
            "kind": choice.kind,
            **sizes(cache, model, head_dim_of(config)),
            **measure.summary(reading, base),
            **{f"mean_{key}": _mean(values) for key, values in by_layer.items()},
            "by_layer": by_layer,
        }
        save([finished[c.text] for c in choices if c.text in finished])
    return [finished[c.text] for c in choices]


def _layers(cache: Any, recorded: list[layers.Activations], settings: Settings) -> Row:
    """layers.errors of every layer, one list per quantity."""
    try:
        back = layers.read_back(cache, recorded, settings.prefill, settings.chunk)
        found = [layers.errors(layer, *kv) for layer, kv in zip(recorded, back, strict=True)]
    finally:
        measure.detach(cache)
    return _columns(found)


def _columns(rows: Sequence[Row]) -> Row:
    """Dictionaries as one dictionary of lists, four digits each."""
    digits = [{k: None if v is None else float(f"{v:.4g}") for k, v in row.items()} for row in rows]
    return {key: [row[key] for row in digits] for key in digits[0]}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
