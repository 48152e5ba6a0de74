"""Variants of the format that were considered, in plain PyTorch, to see whether they would pay.

Every variant keeps the first 4 and the last 64 tokens exact and learns its center from the first
forward, as the packed cache does. "k4v4" is the packed cache's k4v4, and every other variant
differs from it as its name says:

    k4v4/none      no rotation                      k4v4/haar      a random rotation (QR)
    k4v4/block32   one scale per 32 rotated channels (block64: 64)
    k4v4/local32   the same, and a Hadamard transform within the 32 channels only
    k4v4/keyscale  key channels multiplied by (query energy / key variance)^(1/4) before rotation
    k4v4/vcenter   values stored relative to their mean as well
    k2.5v2.5       the quarter of the channels that varies most with 3 bits, the others with 2, each
                   part rotated by itself and with a scale of its own (the paper's 2.5 bits)
    k3.5v3.5       the half that varies most with 4 bits, the other with 3
    q4_0h          blocks of 32 channels after a Hadamard transform, 4 bits (controls.py)

The statistics of channels are learned from the 1,024 tokens that follow the predicted text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import common
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from torch_turboquant import decode, encode, hadamard
from torch_turboquant import eval as evaluation
from torch_turboquant.codebook import Codebook
from torch_turboquant.eval import measure, report, rows
from torch_turboquant.eval.controls import BLOCK, ControlCache, ControlLayer, blocks
from torch_turboquant.eval.predict import text_tokens
from torch_turboquant.integrations.transformers.models import (
    head_dim_of,
    recording,
    text_config,
)
from torch_turboquant.signs import SignKind, random_signs

SINKS, WINDOW, SEARCH = 4, 64, 8  # as in the default CacheConfig
RING = SINKS + WINDOW + 31  # exact rows of the packed cache with its default max_q_len
SPLITS = {"2.5": ((1, 4, 3), (3, 4, 2)), "3.5": ((1, 2, 4), (1, 2, 3))}  # share of channels, bits
MODES = {SignKind.KEYS: "unbiased", SignKind.VALUES: "mse"}
NAMES = "none haar block32 block64 local32 keyscale vcenter".split()
VARIANTS = [
    *(f"{base}{end}" for base in ("k4v4", "k3v2") for end in ("", *(f"/{n}" for n in NAMES))),
    *"k2v2 k2.5v2 k2.5v2.5 k3v3 k3.5v3 k3.5v3.5 k4v3 q4_0h".split(),
]


class Statistics:
    """Statistics of one layer's channels: float32 [kv_heads, head_dim] each."""

    def __init__(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        heads = keys.shape[0]
        self.query_energy = queries.float().square().mean(1).unflatten(0, (heads, -1)).mean(1)
        self.key_variance = keys[:, SINKS:].float().var(1)
        self.value_variance = values[:, SINKS:].float().var(1)


@torch.no_grad()
def statistics(model: Any, ids: Tensor) -> list[Statistics]:
    """The statistics of every layer, from one forward over ids, int64 [n]."""
    found: dict[int, Statistics] = {}

    def note(module, query, key, value, options) -> None:
        found[module.layer_idx] = Statistics(query[0], key[0], value[0])

    with recording(model, note):
        model(ids[None].to(model.device), use_cache=False, logits_to_keep=1)
    return [found[i] for i in range(len(found))]


class Coder:
    """Quantises vectors [kv_heads, n, head_dim] of one kind in one layer."""

    def __init__(self, bits: str, options: set[str], kind: int, layer: int, seen: Statistics):
        self.bits, self.options, self.kind, self.layer = bits, options, kind, layer
        keys = kind == SignKind.KEYS
        self.variance = seen.key_variance if keys else seen.value_variance
        device = self.variance.device
        d = self.variance.shape[-1]
        self.scale = None
        if "keyscale" in options and keys:
            # some channels of some models are always zero
            energy, spread = (
                x + 1e-3 * x.mean(-1, keepdim=True) for x in (seen.query_energy, self.variance)
            )
            self.scale = ((energy / spread) ** 0.25)[:, None]
        if "haar" in options:
            noise = torch.randn(d, d, generator=torch.Generator().manual_seed(2 * layer + kind))
            self.haar = torch.linalg.qr(noise)[0].to(device)
        self.size = next((int(o[5:]) for o in options if o.startswith(("block", "local"))), d)
        if bits in SPLITS:
            self.parts = [(d * a // b, n) for a, b, n in SPLITS[bits]]
            self.order = self.variance.argsort(-1, descending=True)[:, None]
        else:
            self.parts = [(d, int(bits))]

    @property
    def token_bytes(self) -> float:
        """Bytes of one vector."""
        return sum(n * bits / 8 + 2 * max(1, n // self.size) for n, bits in self.parts)

    def signs(self, d: int) -> Tensor:
        return random_signs(d, 0, self.layer, self.kind).to(self.variance.device)

    def rotate(self, x: Tensor, inverse: bool = False) -> Tensor:
        d = x.shape[-1]
        if "none" in self.options:
            return x
        if "haar" in self.options:
            return x @ (self.haar.T if inverse else self.haar)
        if "local32" in self.options:
            parts = x.unflatten(-1, (-1, BLOCK)).contiguous()
            return hadamard(parts, self.signs(BLOCK), inverse=inverse).flatten(-2)
        return hadamard(x.contiguous(), self.signs(d), inverse=inverse)

    def quantise(self, x: Tensor, bits: int) -> Tensor:
        """Codes and decodes x itself: x is rotated back before the codec rotates it."""
        size = min(self.size, x.shape[-1])
        signs, book = self.signs(size), Codebook.make(size, bits, "lloyd")
        levels, steps = book.levels_tensor(x.device), book.steps_tensor(SEARCH, x.device)
        parts = hadamard(x.unflatten(-1, (-1, size)).contiguous(), signs, inverse=True)
        packed, scale = encode(parts, signs, levels, steps, bits, MODES[self.kind])
        return hadamard(decode(packed, scale, signs, levels, bits), signs).flatten(-2)

    def __call__(self, x: Tensor) -> Tensor:
        """The vectors that the codes of x decode to."""
        if self.bits == "q4_0h":
            return self.rotate(blocks(self.rotate(x), 4), inverse=True)
        if self.scale is not None:
            x = x * self.scale
        if len(self.parts) > 1:
            order = self.order.expand(x.shape)
            sorted_x, first, out = x.gather(-1, order), 0, []
            for n, bits in self.parts:
                part = self.rotate(sorted_x[..., first : first + n])
                out.append(self.rotate(self.quantise(part, bits), inverse=True))
                first += n
            y = torch.zeros_like(x).scatter(-1, order, torch.cat(out, -1))
        else:
            y = self.rotate(self.quantise(self.rotate(x), self.parts[0][1]), inverse=True)
        return y if self.scale is None else y / self.scale


class Blocks(Coder):
    """q4_0h: 4-bit blocks of 32 with a scale each."""

    def __init__(self, *args: Any) -> None:
        super().__init__("4", *args)
        self.bits, self.size = "q4_0h", BLOCK


class VariantLayer(ControlLayer):
    """One layer with an exact tail; `keys` and `values` are those that the next query reads."""

    exact_rows = (RING, RING)

    def __init__(self, index: int, coders: tuple[Coder, Coder], value_center: bool) -> None:
        super().__init__(index, 0)
        self.coders, self.value_center = coders, value_center

    def calibrate(self, keys: Tensor, values: Tensor) -> None:
        self.centers = [x[0, :, SINKS:].mean(1, keepdim=True) for x in (keys, values)]
        if not self.value_center:
            self.centers[1] = torch.zeros_like(self.centers[1])
        self.exact = [x[:, :, :0] for x in (keys, values)]
        self.coded = [x[:, :, :0] for x in (keys, values)]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        first = not self.is_initialized
        if first:
            self.lazy_initialization(key_states, value_states)
        seen = []
        for i, new in enumerate((key_states.float(), value_states.float())):
            decoded = self.coders[i](new[0] - self.centers[i]) + self.centers[i]
            self.exact[i] = torch.cat([self.exact[i], new], 2)
            self.coded[i] = torch.cat([self.coded[i], decoded[None]], 2)
            n = self.exact[i].shape[2]
            recent = max(SINKS, n - WINDOW - (0 if first else new.shape[2] - 1))
            parts = (self.exact[i][:, :, :SINKS], self.coded[i][:, :, SINKS:recent])
            seen.append(torch.cat([*parts, self.exact[i][:, :, recent:]], 2).to(self.dtype))
        self.keys, self.values = seen
        return (key_states, value_states) if first else (self.keys, self.values)

    def token_bytes(self) -> float:
        return sum(coder.token_bytes for coder in self.coders)


class VariantCache(ControlCache):
    """A cache of VariantLayers."""

    def __init__(self, made: list[VariantLayer]) -> None:
        Cache.__init__(self, layers=made)


@dataclass(frozen=True)
class Variant:
    """One cache to measure, with the attributes of caches.Choice that rows.evaluate uses."""

    text: str
    seen: tuple[Statistics, ...]
    kind: str = "control"

    def make(self, model: Any) -> VariantCache:
        bits, _, option = self.text.partition("/")
        options = {option} - {""}
        made = []
        for index, seen in enumerate(self.seen):
            if bits == "q4_0h":
                coders = [Blocks(options, kind, index, seen) for kind in MODES]
            else:
                pair = re.fullmatch(r"k(\d(?:\.5)?)v(\d(?:\.5)?)", bits).groups()
                coders = [
                    Coder(n, options, kind, index, seen)
                    for n, kind in zip(pair, MODES, strict=True)
                ]
            made.append(VariantLayer(index, tuple(coders), "vcenter" in options))
        return VariantCache(made)


def main() -> None:
    options = common.parser(__doc__)
    evaluation.add_measure_arguments(options)
    options.set_defaults(segments=2, prefill=512, score_tokens=1536, chunk=16)
    options.add_argument("--variants", nargs="*", default=VARIANTS, metavar="NAME")
    arguments = options.parse_args()
    model, tokenizer, model_name, text = evaluation.load(arguments, arguments.device)
    settings = rows.Settings(
        arguments.segments, arguments.prefill, arguments.score_tokens, arguments.chunk
    )
    length = settings.prefill + settings.scored_tokens
    ids = measure.segments(tokenizer, text, settings.segments, length)
    behind = text_tokens(tokenizer, [text], settings.segments * length + 1024)[-1024:]
    seen = tuple(statistics(model, behind))
    dim = head_dim_of(text_config(model))
    names = [n for n in arguments.variants if not (n.endswith("block64") and dim == 64)]
    name = common.file_name("variants", model_name)
    origin = common.origin(name, arguments)
    old = common.read_rows(name, missing_ok=True)
    done = [row for row in old if row["device"] == origin["device"]]

    def save(new: list[dict[str, Any]]) -> None:
        common.write_rows(name, report.finite(rows.without(done, new) + new), arguments)

    choices = [Variant(n, seen) for n in names]
    measured = rows.evaluate(model, model_name, choices, ids, settings, origin, done, save)
    report.show(measured)


if __name__ == "__main__":
    main()
