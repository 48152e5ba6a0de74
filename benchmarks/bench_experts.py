"""Speed of the packed experts of a mixture-of-experts layer on a GPU, against bf16.

A row is the shape of a model's experts, a format and a number of tokens: both products of a layer,
`gate_up` with the chosen experts of every token and `down` with what they give. Every token chooses
experts at random, as a trained router with balanced load does. Times are medians of CUDA graph
replays, divided by the number of calls in the graph; all contenders take turns. The calls of a
graph have choices of their own, and read more than 256 MB of weights together if the model has
that many, so that the L2 cache rarely holds what the next one reads.

bf16 is torch's grouped_mm, which transformers takes for experts; the tokens are already in the
order of their experts, which transformers and we do in each call, so that its time is too small.
"loop" is a product for each chosen expert by cuBLAS, on tokens in that order, too: the host knows
the choices beforehand, which in a model it would have to wait for. "bmm" copies the weights of
chosen experts for a batched product, which transformers offers for few tokens. "of read" compares
the packed bytes of the distinct experts per second with a sum over 4 GiB.

    python benchmarks/bench_experts.py                  all, into results/h200_experts.json
    python benchmarks/bench_experts.py --only 'qwen'    rows that match, merged into the file
    python benchmarks/bench_experts.py --tiny           tiny sizes on any device: a try
    python benchmarks/bench_experts.py --table          the result file as Markdown
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import common
import torch
from bench_linear import FORMATS
from timing import DEVICE, ROTATED_BYTES, Call, Contest, case_parser, measure_cases, those_that_run
from torch import Tensor

import torch_turboquant as tt
from torch_turboquant.weights import encode_weight

NAME = "h200_experts"
MOST_CALLS = 32  # in a graph
MOST_COPIED = 4 << 30  # bytes of weights that a batched product may copy
BF16 = torch.bfloat16

Row = dict[str, object]


@dataclass(frozen=True)
class Shape:
    """Experts of a layer: `choices` of them for every token."""

    experts: int
    choices: int
    hidden: int
    intermediate: int


MODELS = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
    "deepseek-v3": Shape(256, 8, 7168, 2048),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
FEW = (1, 16, 64, 256, 1024)


@dataclass(frozen=True)
class Case:
    model: str
    tokens: int
    format: str = "4"
    scale: int = 1  # sizes are divided by it

    @property
    def shape(self) -> Shape:
        s = MODELS[self.model]
        if self.scale == 1:
            return s
        experts, rows = s.experts // self.scale, 64 * self.scale
        sizes = [max(64, size // rows * 64) for size in (s.hidden, s.intermediate)]
        return Shape(max(experts, s.choices), s.choices, *sizes)

    def __str__(self) -> str:
        return f"{self.model} {self.format} m {self.tokens}"


def cases() -> Iterator[Case]:
    for model in MODELS:
        for tokens in TOKENS if model == "qwen3-30b-a3b" else FEW:
            yield Case(model, tokens)
    for name in list(FORMATS)[1:]:
        for tokens in (1, 16, 64):
            yield Case("qwen3-30b-a3b", tokens, name)


ALL = tuple(cases())


class Experts:
    """The weights of a case, its activations, and the choices of every call."""

    def __init__(self, case: Case) -> None:
        self.case, self.shape = case, case.shape
        s = self.shape
        self.gate_up = self.random(s.experts, 2 * s.intermediate, s.hidden)
        self.down = self.random(s.experts, s.hidden, s.intermediate)
        self.x = torch.randn(case.tokens, s.hidden, dtype=BF16, device=DEVICE)
        self.pairs = case.tokens * s.choices
        self.h = torch.randn(self.pairs, s.intermediate, dtype=BF16, device=DEVICE)
        size = 0.55 * (self.gate_up[0].numel() + self.down[0].numel())
        read = size * min(self.pairs, s.experts)
        calls = min(MOST_CALLS, math.ceil(ROTATED_BYTES / read))
        self.choices = [
            torch.rand(case.tokens, s.experts, device=DEVICE).topk(s.choices).indices
            for _ in range(calls)
        ]

    def random(self, experts: int, n: int, k: int) -> Tensor:
        w = torch.empty(experts, n, k, dtype=BF16, device=DEVICE)
        for part in w:
            part.normal_().mul_(k**-0.5)
        return w

    def calls(self, call: Callable[[Tensor], object]) -> list[Call]:
        return [lambda chosen=chosen: call(chosen) for chosen in self.choices]

    def distinct(self) -> float:
        """Experts that a call chooses, on average."""
        return sum(len(chosen.unique()) for chosen in self.choices) / len(self.choices)

    # ---- contenders

    def packed(self) -> tuple[list[Call], float]:
        """Calls, and the bytes that each reads."""
        format = FORMATS[self.case.format]
        weights, products = [], []
        for w in (self.gate_up, self.down):
            n, k = w.shape[1:]
            packed = torch.stack([encode_weight(part, format) for part in w])
            group = format.group_of(k)
            reading = format.signs(group, DEVICE), format.levels(group, DEVICE)
            weights.append(packed)
            products.append((packed, reading, n))
        numbers = format.bits, format.sub or 0

        def multiply(i: int, x: Tensor, chosen: Tensor) -> Tensor:
            packed, reading, n = products[i]
            return tt.linear_experts(x, packed, chosen, *reading, n, *numbers)

        def call(chosen: Tensor) -> None:
            multiply(0, self.x, chosen)
            multiply(1, self.h, chosen.view(-1, 1))

        size = sum(packed.nbytes for packed in weights) / self.shape.experts
        return self.calls(call), size * self.distinct()

    def in_order(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, and what gate_up gives, in the order of experts; how many each of these has."""
        flat = chosen.flatten()
        order = flat.argsort()
        counts = flat.bincount(minlength=self.shape.experts)
        return self.x[order // self.shape.choices], self.h[order], counts

    def bf16(self) -> list[Call]:
        def prepared(chosen: Tensor) -> Call:
            x, h, counts = self.in_order(chosen)
            ends = counts.cumsum(0).to(torch.int32)

            def call() -> None:
                torch._grouped_mm(x, self.gate_up.transpose(1, 2), offs=ends)
                torch._grouped_mm(h, self.down.transpose(1, 2), offs=ends)

            return call

        return [prepared(chosen) for chosen in self.choices]

    def loop(self) -> list[Call]:
        def prepared(chosen: Tensor) -> Call:
            x, h, counts = self.in_order(chosen)
            numbers = counts.tolist()
            each = zip(self.gate_up, self.down, x.split(numbers), h.split(numbers), strict=True)
            products = [
                (own, w.t())
                for gate_up, down, own_x, own_h in each
                for own, w in ((own_x, gate_up), (own_h, down))
                if len(own)
            ]
            return lambda: [torch.mm(*product) for product in products]

        return [prepared(chosen) for chosen in self.choices]

    def bmm(self) -> list[Call]:
        copied = 2 * self.pairs * self.gate_up[0].numel()
        if copied > MOST_COPIED:
            raise ValueError(f"it would copy {copied >> 30} GiB of weights")

        def call(chosen: Tensor) -> None:
            flat = chosen.flatten()
            x = self.x.repeat_interleave(self.shape.choices, 0)
            torch.bmm(self.gate_up[flat], x.unsqueeze(-1))
            torch.bmm(self.down[flat], self.h.unsqueeze(-1))

        return self.calls(call)


def measure(case: Case, seconds: float, read: float) -> Row:
    experts = Experts(case)
    ours, size = experts.packed()
    others, missing = those_that_run(
        {"bf16": experts.bf16, "loop": experts.loop, "bmm": experts.bmm}
    )
    times = Contest(seconds).medians({"ours": ours, **others})
    ms = times["ours"][0]
    row: Row = {
        "case": str(case),
        "model": case.model,
        "format": case.format,
        "tokens": case.tokens,
        "distinct_experts": round(experts.distinct(), 1),
        "us": round(1e3 * ms, 2),
        "eager_us": round(1e3 * times["ours"][1], 2),
        "bytes": round(size),
        "of_read": round(size / ms * 1e-9 / read, 3),
        "other_us": {name: round(1e3 * times[name][0], 2) for name in others},
        "other_eager_us": {name: round(1e3 * times[name][1], 2) for name in others},
        "missing": missing,
    }
    if others:
        row["speedup"] = round(min(times[name][0] for name in others) / ms, 3)
        row["eager_speedup"] = round(min(times[name][1] for name in others) / times["ours"][1], 3)
    print(
        f"{case}: {row['us']} us (eager {row['eager_us']}), {row['of_read']:.0%} of read,"
        f" {row.get('speedup')}x, {row['other_us']} (eager {row['other_eager_us']})",
        flush=True,
    )
    return row


def table() -> str:
    """A row per case, against the fastest way in bf16."""
    body = []
    for row in common.read_rows(NAME):
        others = row["other_us"]
        best = min(others, key=others.__getitem__, default=None)
        against = [f"{others[best]:.1f} ({best})", f"{row['speedup']:.2f}x"] if best else ["", ""]
        body.append([row["case"], f"{row['us']:.1f}", f"{row['of_read']:.0%}", *against])
    return common.markdown(["case", "us", "of read", "best bf16, us", "speed-up"], body)


def main() -> None:
    options = case_parser(str(__doc__))
    arguments = options.parse_args()
    if arguments.table:
        print(table())
        return
    chosen = [case for case in ALL if not arguments.only or re.search(arguments.only, str(case))]
    if arguments.tiny:
        chosen = [replace(case, tokens=min(case.tokens, 16), scale=8) for case in chosen[:3]]
    measure_cases(NAME, chosen, measure, arguments, None if arguments.tiny else ALL)


if __name__ == "__main__":
    main()
