"""One evaluation: the caches that are left to measure, and the rows of results.

Rows are plain data, one per cache. A row that an earlier run has finished under the same settings
is kept and not measured again. `save` is called after every cache, so that an interrupted run can
be continued.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from torch_turboquant.eval import layers, measure, needle, steps, synthetic, tasks
from torch_turboquant.eval.caches import UNCOMPRESSED, Choice, sizes
from torch_turboquant.eval.report import WEIGHTS
from torch_turboquant.eval.weights import WeightChoice
from torch_turboquant.integrations.transformers.models import (
    head_dim_of,
    kv_heads_of,
    layer_windows,
    text_config,
)
from torch_turboquant.integrations.transformers.saving import weights_digest

Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How the text is read. Only rows with equal settings can be compared."""

    segments: int
    prefill: int  # tokens of the first forward of a segment
    scored_tokens: int  # of every segment, predicted after that
    chunk: int  # tokens of a forward while predicting


def describe(model: Any, name: str, text: Tensor, settings: Settings) -> Row:
    """The entries of a row that describe the run."""
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
        "kv_heads": kv_heads_of(config),
        "head_dim": head_dim_of(config),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weights_digest": weights_digest(model)[:16],
    }


def files_of(choice: str) -> dict[str, str]:
    """Digests of the files that a choice names, such as 4:calibrate=train.txt."""
    paths = {part.partition("=")[2] for part in re.split(r"[:,+]", choice) if "=" in part}
    return {
        path: hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
        for path in sorted(paths)
        if Path(path).is_file()
    }


# What a run is about: a file has one row for each of them and a cache.
_SAME = ("model", "dtype", "device", "text", "segments", "prefill", "scored_tokens", "chunk")


def without(rows: Sequence[Row], replaced: Sequence[Row]) -> list[Row]:
    """Those of `rows` whose run and cache none of `replaced` has."""

    def identity(row: Row) -> tuple:
        return tuple(row.get(key) for key in (*_SAME, "cache"))

    new = {identity(row) for row in replaced}
    return [row for row in rows if identity(row) not in new]


class Extra(NamedTuple):
    """Another measurement that is made for every cache and goes into its row."""

    key: str
    same: Row  # entries that a finished measurement must have to count as the same one
    run: Callable[[Callable[..., Any], str, Row | None], Row]
    """Called with a function that makes a cache, the cache's name, and the measurement of the
    uncompressed cache (None if this is it); returns the entries."""

    def lacks(self, row: Row) -> bool:
        found = row.get(self.key) or {}
        return any(found.get(key) != value for key, value in self.same.items())


def needle_extra(model: Any, tokenizer: Any, text: str, lengths: Sequence[int]) -> Extra:
    """The needle grid of needle.py, as row["needle"]."""

    def run(make: Callable[[], Any], title: str, base: Row | None) -> Row:
        return needle.search(model, tokenizer, text, make, lengths, title=title)

    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    same = {"lengths": list(lengths), "depths": list(needle.DEPTHS), "haystack": digest}
    return Extra("needle", same, run)


def synthetic_extra(model: Any, tokenizer: Any, text: str, length: int, samples: int) -> Extra:
    """Scores of synthetic.py, as row["synthetic"]: of all tasks, and over the uncompressed ones."""
    asked = synthetic.contexts(tokenizer, text, length, samples)

    def run(make: Callable[..., Any], title: str, base: Row | None) -> Row:
        found = synthetic.scores(asked, synthetic.answers(model, tokenizer, make, asked, title))
        seen, unseen = synthetic.relative(found, found if base is None else base["scores"])
        return {"scores": found, "seen": seen, "unseen": unseen}

    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    same = {"version": synthetic.VERSION, "length": length, "samples": samples, "essays": digest}
    return Extra("synthetic", same, run)


def steps_extra(model: Any) -> Extra:
    """Times of steps.py, as row["step"]: of the model's own GPU."""
    times = steps.StepTimes(model)

    def run(make: Callable[[], Any], title: str, base: Row | None) -> Row:
        return {"ms": times.of(Choice.parse(title))}

    same = {"sequences": times.sequences, "context": times.context, "dtype": "bfloat16"}
    return Extra("step", same, run)


def tasks_extra(model: Any, tokenizer: Any) -> Extra:
    """Answers and agreement of tasks.py, as row["tasks"]."""

    def run(make: Callable[[], Any], title: str, base: Row | None) -> Row:
        found = tasks.answers(model, tokenizer, make, title)
        shares = tasks.agreement(tokenizer, found, found if base is None else base["answers"])
        return {**shares, "answers": found}

    return Extra("tasks", {"version": tasks.version()}, run)


def evaluate(
    model: Any,
    name: str,
    choices: Sequence[Choice],
    text: Tensor,
    settings: Settings,
    origin: Row,
    done: Sequence[Row] = (),
    save: Callable[[list[Row]], None] = lambda rows: None,
    extras: Sequence[Extra] = (),
    single_layers: bool = True,
    weights: Sequence[tuple[WeightChoice, Callable[[Any], tuple[Any, Row]]]] = (),
) -> list[Row]:
    """Measures every choice; the uncompressed cache is always measured, and first.

    Args:
        model: a decoder that TurboQuantCache supports.
        name: the model's name in the rows.
        choices: the caches to measure; repeated ones are measured once.
        text: int64 [segments, prefill + scored_tokens] on the CPU (measure.segments).
        origin: the first entries of every row; it names the device.
        done: rows of earlier runs.
        save: called with all finished rows of this run whenever one of them has changed.
        extras: further measurements of every choice, made where its row lacks them.
        single_layers: whether to measure the errors of single layers too (layers.py).
        weights: packed weights, each with the function that makes the packed model of `model`, and
            what its row says; repeated ones are measured once.

    Returns:
        One row per choice in their order, after that of the uncompressed cache; then the weights.

    Raises:
        ValueError: the model has layers without keys and values, or cannot have one of the caches;
            nothing has been measured.
    """
    states = [i for i, window in enumerate(layer_windows(model)) if window is None]
    if states:
        raise ValueError(
            f"layers {states} of {name} keep no keys and values, and the evaluation compares "
            "models all of whose layers do"
        )
    about = {**origin, **describe(model, name, text, settings)}
    others = {c.text: c for c in choices if c.kind != "uncompressed"}  # without repetitions
    choices = [Choice.parse(UNCOMPRESSED), *others.values()]
    weights = list({choice.text: (choice, pack) for choice, pack in weights}.values())
    every: list[Choice | WeightChoice] = [*choices, *(choice for choice, _ in weights)]
    _check_caches(model, [c.cache if isinstance(c, WeightChoice) else c for c in every])
    files = {choice.text: files_of(choice.text) for choice in every}
    finished = {
        row["cache"]: row
        for row in done
        if all(row.get(key) == about[key] for key in (*_SAME, "weights_digest"))
        and row.get("files", {}) == files.get(row["cache"], {})
        and (not single_layers or row.get("kind") == WEIGHTS or _has_layers(row))
    }
    pending = [c for c in every if c.text not in finished]
    if pending:
        readings = _Readings(model, text, settings, single_layers)

    def rows_so_far() -> list[Row]:
        return [finished[c.text] for c in every if c.text in finished]

    for choice in tqdm(choices, "caches", leave=False):
        if choice in pending:
            finished[choice.text] = {
                **about,
                "cache": choice.text,
                "kind": choice.kind,
                **_named(files[choice.text]),
                **readings.measure(choice),
            }
            save(rows_so_far())
        for extra in extras:
            row = finished[choice.text]
            if extra.lacks(row):
                base = None if choice is choices[0] else finished[UNCOMPRESSED][extra.key]
                found = extra.run(partial(choice.make, model), choice.text, base)
                origins = {key: about.get(key) for key in ("commit", "command")}
                finished[choice.text] = {**row, extra.key: {**extra.same, **found, **origins}}
                save(rows_so_far())
    for choice, pack in tqdm(weights, "weights", leave=False):
        if choice in pending:
            found = readings.measure_weights(choice, pack)
            named = _named(files[choice.text])
            row = {**about, "cache": choice.text, "kind": WEIGHTS, **named, **found}
            finished[choice.text] = row
            save(rows_so_far())
    return rows_so_far()


def _check_caches(model: Any, choices: Sequence[Choice]) -> None:
    """Makes every cache once, because a name says little of whether the model can have it."""
    for choice in choices:
        try:
            measure.detach(choice.make(model))
        except ValueError as error:
            raise ValueError(f"this model cannot have the cache {choice.text}: {error}") from error


def _has_layers(row: Row) -> bool:
    """Whether the errors of single layers were measured."""
    return "by_layer" in row or "channel_spread" in row


def _named(files: dict[str, str]) -> Row:
    return {"files": files} if files else {}


class _Readings:
    """Measures caches on one text. It holds the uncompressed readings for all comparisons."""

    def __init__(self, model: Any, text: Tensor, settings: Settings, single_layers: bool) -> None:
        self.model, self.text, self.settings = model, text, settings
        make = partial(Choice.parse(UNCOMPRESSED).make, model)
        self.base, self.logits, self.cache = self._read(make, UNCOMPRESSED, None)
        self.recorded = layers.record(model, text[0]) if single_layers else None

    def _read(self, make: Callable[[], Any], title: str, reference: list[Tensor] | None) -> Any:
        return measure.read(
            self.model,
            make,
            self.text,
            self.settings.prefill,
            self.settings.chunk,
            reference=reference,
            title=title,
        )

    def measure(self, choice: Choice) -> Row:
        """The measured part of a row."""
        head_dim = head_dim_of(text_config(self.model))
        if choice.kind == "uncompressed":
            row = {**sizes(self.cache, self.model, head_dim), **measure.summary(self.base)}
            if self.recorded is not None:
                spread = [layers.channel_spread(i, layer) for i, layer in enumerate(self.recorded)]
                row["channel_spread"] = _columns(spread)
            return row
        make = partial(choice.make, self.model)
        reading, _, cache = self._read(make, choice.text, self.logits)
        row = {**sizes(cache, self.model, head_dim), **measure.summary(reading, self.base)}
        if self.recorded is not None:
            by_layer = _layers(make(), self.recorded, self.settings)
            row |= {f"mean_{key}": _mean(values) for key, values in by_layer.items()}
            row["by_layer"] = by_layer
        return row

    def measure_weights(self, choice: WeightChoice, pack: Callable[[Any], tuple[Any, Row]]) -> Row:
        """The measured part of a row of packed weights."""
        model, row = pack(self.model)
        reading, _, cache = measure.read(
            model,
            partial(choice.cache.make, model),
            self.text,
            self.settings.prefill,
            self.settings.chunk,
            reference=self.logits,
            title=choice.text,
        )
        size = sizes(cache, model, head_dim_of(text_config(model)))
        return {**row, **size, **measure.summary(reading, self.base)}


def _layers(cache: Any, recorded: list[layers.Activations], settings: Settings) -> Row:
    """layers.errors of every layer, one list per quantity."""
    try:
        back = layers.read_back(cache, recorded, settings.prefill, settings.chunk)
        found = [layers.errors(layer, *kv) for layer, kv in zip(recorded, back, strict=True)]
    finally:
        measure.detach(cache)
    return _columns(found)


def _columns(rows: Sequence[Row]) -> Row:
    """Dictionaries as one dictionary of lists, rounded to four digits."""
    digits = [{k: None if v is None else float(f"{v:.4g}") for k, v in row.items()} for row in rows]
    return {key: [row[key] for row in digits] for key in digits[0]}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
