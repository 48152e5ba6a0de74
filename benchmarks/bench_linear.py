"""Speed of linear layers with packed weights on a GPU, against bf16 and other 4-bit kernels.

A row is one matrix (or the four of a layer of Llama-3.1-8B, one after the other), one format and
one number of tokens. Times are medians of CUDA graph replays, divided by the number of calls in the
graph; all contenders take turns. A graph cycles through distinct copies of the weights of more than
256 MB in total, so that the L2 cache never holds the next one. Launches follow each other without
a gap, as in a model.

bf16 is torch's linear, which is cuBLAS. Other 4-bit kernels run where they can be imported:
tinygemm (`_weight_int4pack_mm` of torch), bitsandbytes NF4 and GemLite; the row names what cannot.
"of read" compares the packed bytes per second with a sum over 4 GiB. The error is that of outputs
against float64 with the weights before quantisation; beside it stands the error of the same packed
weights, decoded, with activations that are not rounded (W4A16).

    python benchmarks/bench_linear.py                    all, into results/h200_linear.json
    python benchmarks/bench_linear.py --quick            the layer at 1 and 16 tokens, printed only
    python benchmarks/bench_linear.py --only 'layer'     rows that match, merged into the file
    python benchmarks/bench_linear.py --tiny             tiny sizes on any device: a try
    python benchmarks/bench_linear.py --table            the result file as Markdown
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import common
import torch
from timing import (
    DEVICE,
    Call,
    Contest,
    case_parser,
    measure_cases,
    number_of_caches,
    those_that_run,
)
from torch import Tensor

from torch_turboquant.weights import PackedLinear, WeightFormat, encode_weight

NAME = "h200_linear"
LAYER = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
MATRICES = {
    **LAYER,
    "8192": (8192, 8192),
    "lm_head": (128256, 4096),
    "small": (2048, 2048),  # as models of 1B have them, or a GPU of several with a larger one
    "narrow": (896, 4864),
}
TOKENS = (1, 2, 4, 8, 16, 17, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
FORMATS = {
    "4": WeightFormat(bits=4, grid="lloyd", sub=32),
    "4 no sub": WeightFormat(bits=4, grid="lloyd", sub=0),
    "4u": WeightFormat(bits=4, grid="uniform", sub=32),
    "4u no sub": WeightFormat(bits=4, grid="uniform", sub=0),
    "8": WeightFormat(bits=8, sub=0),
}
CHECKED_ROWS = 256  # outputs that are compared with float64
CHECKED_TOKENS = 16

Row = dict[str, object]


@dataclass(frozen=True)
class Case:
    matrix: str  # a name of MATRICES, or "layer"
    tokens: int
    format: str = "4"
    scale: int = 1  # sizes are divided by it

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """[n, k] of every matrix."""
        chosen = list(LAYER.values()) if self.matrix == "layer" else [MATRICES[self.matrix]]
        return [(n // self.scale, k // self.scale) for n, k in chosen]

    def __str__(self) -> str:
        return f"{self.matrix} {self.format} m {self.tokens}"


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        yield Case("layer", tokens)
    for matrix in MATRICES:
        more = (17, 32, 64, 128, 256, 512, 1024) if matrix in ("small", "narrow") else (64,)
        for tokens in (1, 16, *more):
            yield Case(matrix, tokens)
    for name in list(FORMATS)[1:]:
        for tokens in (1, 16, 64):
            yield Case("layer", tokens, name)


ALL = tuple(cases())
QUICK = [case for case in ALL if case.matrix == "layer" and case.tokens in (1, 16)][:2]


class Matrices:
    """The matrices of a case in bf16, and the activations of each."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.weights = [
            torch.randn(n, k, dtype=torch.bfloat16, device=DEVICE).mul_(k**-0.5)
            for n, k in case.shapes
        ]
        self.x = [
            torch.randn(case.tokens, k, dtype=torch.bfloat16, device=DEVICE) for _, k in case.shapes
        ]

    def calls(
        self, size: int, prepare: Callable[[Tensor], Callable[[Tensor], Tensor]]
    ) -> list[Call]:
        """A list of calls over distinct copies of the weights.

        Args:
            size: bytes of one copy of all matrices.
            prepare: copies a weight into the contender's form, and returns its product.
        """

        def call(products: list[Callable[[Tensor], Tensor]]) -> list[Tensor]:
            return [multiply(x) for multiply, x in zip(products, self.x, strict=True)]

        found = []
        for _ in range(number_of_caches(size)):
            products = [prepare(w) for w in self.weights]
            found.append(lambda products=products: call(products))
        return found

    def elements(self) -> int:
        return sum(w.numel() for w in self.weights)

    # ---- contenders

    def bf16(self) -> list[Call]:
        def prepare(w: Tensor) -> Callable[[Tensor], Tensor]:
            own = w.clone()
            return lambda x: torch.nn.functional.linear(x, own)

        return self.calls(2 * self.elements(), prepare)

    def packed(self) -> tuple[list[Call], int]:
        """Calls, and the bytes of one copy."""
        format = FORMATS[self.case.format]
        known = {id(w): encode_weight(w, format) for w in self.weights}

        def prepare(w: Tensor) -> Callable[[Tensor], Tensor]:
            n, k = w.shape
            layer = PackedLinear(k, n, format, dtype=torch.bfloat16, device=DEVICE)
            layer.weight.data = known[id(w)].clone()
            layer.place_constants()
            return layer

        size = sum(packed.nbytes for packed in known.values())
        return self.calls(size, prepare), size

    def tinygemm(self) -> list[Call]:
        def prepare(w: Tensor) -> Callable[[Tensor], Tensor]:
            n, k = w.shape
            codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)
            own = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
            scales = torch.rand(k // 128, n, 2, dtype=torch.bfloat16, device=DEVICE)
            return lambda x: torch.ops.aten._weight_int4pack_mm(x, own, 128, scales)

        return self.calls(self.elements() // 2, prepare)

    def bitsandbytes(self) -> list[Call]:
        import bitsandbytes
        from bitsandbytes.functional import quantize_4bit

        def prepare(w: Tensor) -> Callable[[Tensor], Tensor]:
            own, state = quantize_4bit(w, blocksize=64, quant_type="nf4")
            return lambda x: bitsandbytes.matmul_4bit(x, own.t(), state)

        return self.calls(self.elements() // 2, prepare)

    def gemlite(self) -> list[Call]:
        from gemlite.helper import A16W4_HQQ_INT

        def prepare(w: Tensor) -> Callable[[Tensor], Tensor]:
            n, k = w.shape
            linear = torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device=DEVICE)
            return A16W4_HQQ_INT(device=str(DEVICE), dtype=torch.bfloat16).from_linear(linear)

        return self.calls(self.elements() // 2, prepare)

    # ---- errors

    def errors(self) -> tuple[float, float]:
        """Relative to the norm of exact outputs: ours, and without rounding of activations."""
        format = FORMATS[self.case.format]
        w, x = self.weights[-1][:CHECKED_ROWS], self.x[-1][:CHECKED_TOKENS]
        layer = torch.nn.Linear(w.shape[1], len(w), bias=False, dtype=w.dtype, device=DEVICE)
        layer.weight.data = w.contiguous()
        packed = PackedLinear.from_linear(layer, format)
        exact = x.double() @ w.double().T
        ours, wide = packed(x).double(), x.double() @ packed.decode().double().T
        return tuple(
            float((y - exact).norm() / exact.norm()) for y in (ours, wide.to(x.dtype).double())
        )


def contenders(matrices: Matrices) -> tuple[dict[str, list[Call]], dict[str, str]]:
    """Those that run, and why the others do not. Once is enough for other 4-bit kernels."""
    kinds = {
        "tinygemm": matrices.tinygemm,
        "bitsandbytes": matrices.bitsandbytes,
        "gemlite": matrices.gemlite,
    }
    once = matrices.case.format == "4" and matrices.case.matrix == "layer"
    found, missing = those_that_run(kinds if once else {})
    return {"bf16": matrices.bf16(), **found}, missing


def measure(case: Case, seconds: float, read: float) -> Row:
    matrices = Matrices(case)
    ours, size = matrices.packed()
    others, missing = contenders(matrices)
    times = Contest(seconds).medians({"ours": ours, **others})
    error, wide = matrices.errors()
    ms, bf16 = times["ours"][0], times["bf16"][0]
    row: Row = {
        "case": str(case),
        "matrix": case.matrix,
        "format": case.format,
        "tokens": case.tokens,
        "us": round(1e3 * ms, 2),
        "eager_us": round(1e3 * times["ours"][1], 2),
        "bytes": size,
        "of_read": round(size / ms * 1e-9 / read, 3),
        "speedup": round(bf16 / ms, 3),
        "other_us": {name: round(1e3 * times[name][0], 2) for name in others},
        "eager_speedup": round(times["bf16"][1] / times["ours"][1], 3),
        "missing": missing,
        "error": round(error, 5),
        "w4a16_error": round(wide, 5),
    }
    print(
        f"{case}: {row['us']} us, {row['of_read']:.0%} of read, {row['speedup']:.2f}x bf16,"
        f" {row['other_us']}, error {error:.4f} ({wide:.4f})"
    )
    return row


def table() -> str:
    body = [
        [
            row["case"],
            f"{row['us']:.1f}",
            f"{row['of_read']:.0%}",
            f"{row['other_us']['bf16']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['error']:.4f} ({row['w4a16_error']:.4f})",
        ]
        for row in common.read_rows(NAME)
    ]
    header = ["case", "us", "of read", "bf16, us", "speed-up", "error (W4A16)"]
    return common.markdown(header, body)


def main() -> None:
    options = case_parser(str(__doc__))
    options.add_argument("--quick", action="store_true")
    arguments = options.parse_args()
    if arguments.table:
        print(table())
        return
    chosen = [case for case in ALL if not arguments.only or re.search(arguments.only, str(case))]
    if arguments.quick:
        chosen = QUICK
    if arguments.tiny:
        chosen = [replace(case, tokens=min(case.tokens, 16), scale=8) for case in chosen[:3]]
    kept = not (arguments.quick or arguments.tiny)
    measure_cases(NAME, chosen, measure, arguments, ALL if kept else None)


if __name__ == "__main__":
    main()
