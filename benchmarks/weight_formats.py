"""Formats of compressed weights as functions from weights to decoded weights: ours, and controls.

They serve bench_weights.py. A weight is float32 [..., N, K] (out, in), with any number of leading
dimensions: the same linear of all layers of a model is quantised at once. Channels are elements of
K. Formats that share a scale among `group` channels take the largest power of two below it for the
channels that remain, so 576 channels are 4 groups of 128 and one of 64.

Everything runs in plain PyTorch on any device. Scales are rounded to the precision in which they
would be stored; bytes are counted, not written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from torch_turboquant.codebook import Codebook
from torch_turboquant.ops.hadamard import hadamard
from torch_turboquant.signs import SignKind, random_signs
from torch_turboquant.weight_calibration import (
    DAMPING,
    NEAREST,
    channel_scales,
    round_by_moments,
)

CHUNK = 1 << 17  # elements that a CPU quantises at once; a GPU takes CHUNK_CUDA
CHUNK_CUDA = 1 << 26
GPTQ_DAMPING = 0.01  # as published
SUB_STEPS = 0.92, 0.95, 0.98, 1.01  # of the nominal step: the candidates of WeightFormat.steps


# ------------------------------------------------------------------------------------- groups


def runs(k: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Start, stop and group size of the parts of k channels in groups of at most `size`."""
    start = 0
    while start < k:
        stop = start + (k - start) // size * size
        if stop > start:
            yield start, stop, size
        start, size = stop, size // 2


def by_group(w: Tensor, size: int, code: Callable[[Tensor], Tensor]) -> Tensor:
    """code() of the groups of every row, in chunks: it takes and gives float32 [n, group]."""
    out = torch.empty_like(w)
    limit = CHUNK_CUDA if w.is_cuda else CHUNK
    for start, stop, group in runs(w.shape[-1], size):
        rows = w[..., start:stop].reshape(-1, group)
        done = torch.cat([code(part) for part in rows.split(max(1, limit // group))])
        out[..., start:stop] = done.view(out[..., start:stop].shape)
    return out


def half(x: Tensor) -> Tensor:
    """x rounded to float16; as float32."""
    return x.clamp(-65504, 65504).half().float()


# ---------------------------------------------------------------------------------- transform


@lru_cache(maxsize=32)
def matrix(size: int, device: torch.device, seed: int = 0) -> Tensor:
    """The signed transform of `size` channels: float32 [size, size], rotated = x @ matrix.

    seed: of the signs; the package's is 0.
    """
    signs = random_signs(size, seed, 0, SignKind.WEIGHTS)
    return hadamard(torch.eye(size), signs).to(device)


def rotate(x: Tensor, block: int | None, inverse: bool = False, seed: int = 0) -> Tensor:
    """x [..., K] after the transform of blocks of channels; block None: unchanged, 0: all of K."""
    if block is None:
        return x
    k = x.shape[-1]
    parts = []
    for start, stop, size in [(0, k, k)] if block == 0 else runs(k, block):
        q = matrix(size, x.device, seed).to(x.dtype)
        part = x[..., start:stop].unflatten(-1, (-1, size))
        parts.append((part @ (q.T if inverse else q)).flatten(-2))
    return torch.cat(parts, -1)


def rotate_moments(h: Tensor, block: int | None, seed: int = 0) -> Tensor:
    """Second moments [..., K, K] of activations after the transform."""
    return rotate(rotate(h, block, seed=seed).mT, block, seed=seed).mT


# -------------------------------------------------------------------------------------- grids


class Grid:
    """The levels of one width, as integers: Lloyd-Max from a table, or evenly spaced."""

    def __init__(self, bits: int, kind: str, group: int) -> None:
        self.book = Codebook.make(group, bits, kind)
        self.bits, self.kind, self.step = bits, kind, self.book.step
        self.tables: dict[torch.device, Tensor] = {}
        if kind == "lloyd":
            levels = torch.tensor(self.book.levels, dtype=torch.float32)
            # levels are integers, so the boundaries between them are multiples of 1/2
            halves = torch.arange(-256, 256) / 2
            ranks = torch.bucketize(halves, (levels[1:] + levels[:-1]) / 2, right=True)
            self.table = levels[ranks]

    def nearest(self, q: Tensor) -> Tensor:
        """The level nearest to q, in units of one level."""
        if self.kind == "uniform" and self.bits == 8:
            return q.round().clamp(-127, 127)
        if self.kind == "uniform":
            top = 2**self.bits - 1
            return ((q * 0.5).floor() * 2 + 1).clamp(-top, top)
        if q.device not in self.tables:
            self.tables[q.device] = self.table.to(q.device)
        at = (q * 2).floor().clamp(-256, 255).to(torch.int32) + 256
        return self.tables[q.device].index_select(0, at.flatten()).view(q.shape)

    def steps(self, count: int) -> list[float]:
        """The candidates of the encoder's search."""
        return list(self.book.candidate_steps(count))


@lru_cache(maxsize=64)
def grid_of(bits: int, kind: str, group: int) -> Grid:
    return Grid(bits, kind, group)


# ----------------------------------------------------------------------------------- our codec


@dataclass(frozen=True)
class Format:
    """A format of ours.

    Attributes:
        bits: of a code.
        grid: "lloyd" or "uniform".
        group: channels that share a float16 scale.
        sub: channels that share a 4-bit multiplier m of that scale, (m + offset) / (offset + 7.5);
            None means no multipliers.
        offset: of the multipliers.
        block: channels of a transform; None means none, 0 all channels of the row.
        search: candidate steps; 4 with multipliers are SUB_STEPS.
        seed: of the transform's signs.
    """

    bits: int = 4
    grid: str = "lloyd"
    group: int = 128
    sub: int | None = None
    offset: int = 12
    block: int | None = 128
    search: int = 8
    seed: int = 0

    def size(self, k: int) -> float:
        """Bits per weight of rows of k channels."""
        scales = sum((stop - start) / group for start, stop, group in runs(k, self.group))
        multipliers = 4 / self.sub if self.sub else 0
        return self.bits + 16 * scales / k + multipliers


def fit(y: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Levels and the size of one level unit of rotated vectors y, float32 [n, group].

    Returns:
        levels float32 [n, group], units float32 [n, group / sub] (or [n, 1]): the vector decodes
        as levels * units.
    """
    grid = grid_of(form.bits, form.grid, y.shape[-1])
    steps = [grid.step * ratio for ratio in SUB_STEPS]
    if not (form.sub and form.search == 4):
        steps = grid.steps(form.search)
    sigma = y.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
    parts = (y / sigma).unflatten(-1, (-1, form.sub or y.shape[-1]))
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for step in steps:
        if form.sub:
            levels, factors = multipliers(parts, grid, step, form.offset)
        else:
            levels = grid.nearest(parts / step)
            factors = levels.new_ones(levels.shape[:-1])
        products = factors * (parts * levels).sum(-1)
        squares = factors.square() * levels.square().sum(-1)
        a, b = products.sum(-1, keepdim=True), squares.sum(-1, keepdim=True).clamp(min=1e-30)
        merit = torch.where(a > 0, a * a / b, 0)
        units = a / b * factors
        if best is None:
            best = merit, levels, units
        else:
            better = merit > best[0]
            best = (
                torch.where(better, merit, best[0]),
                torch.where(better[..., None], levels, best[1]),
                torch.where(better, units, best[2]),
            )
    _, levels, units = best
    mean = sigma * units.amax(-1, keepdim=True)  # float16 keeps 11 bits of any factor of it
    units = units / units.amax(-1, keepdim=True).clamp(min=1e-30) * half(mean * 32) / 32
    return levels.flatten(-2), units


def multipliers(parts: Tensor, grid: Grid, step: float, offset: int) -> tuple[Tensor, Tensor]:
    """Of each part [n, parts, sub]: its levels and factor with the least squared error."""
    best = None
    for m in range(16):
        factor = (m + offset) / (offset + 7.5)
        unit = step * factor
        levels = grid.nearest(parts / unit)
        a, b = (parts * levels).sum(-1), levels.square().sum(-1)
        error = unit * unit * b - 2 * unit * a
        if best is None:
            best = error, levels, torch.full_like(error, factor)
            continue
        better = error < best[0]
        best = (
            torch.where(better, error, best[0]),
            torch.where(better[..., None], levels, best[1]),
            torch.where(better, factor, best[2]),
        )
    return best[1], best[2]


def encode(w: Tensor, form: Format) -> Tensor:
    """Rotated weights [..., N, K], quantised and decoded, still rotated."""

    def code(y: Tensor) -> Tensor:
        levels, units = fit(y, form)
        return levels * units.repeat_interleave(y.shape[-1] // units.shape[-1], -1)

    return by_group(w, form.group, code)


# --------------------------------------------------------------------------- rounding and scales


def scales_of_weights(w: Tensor) -> Tensor:
    """Factors of channels [..., K] without a text: 1 / root mean square of the weights [..., N, K].

    They are those of channel_scales, if channels with small weights have large activations.
    """
    return channel_scales(w, 1 / w.square().mean(-2).clamp(min=1e-20), NEAREST)


def bounds(k: int, group: int) -> list[tuple[int, int]]:
    """First and last channel of the groups of k channels."""
    return [
        (first, first + size)
        for start, stop, size in runs(k, group)
        for first in range(start, stop, size)
    ]


def encode_rounded(w: Tensor, h: Tensor, form: Format, damping: float = DAMPING) -> Tensor:
    """`encode` with second moments h of the rotated input."""

    def prepare(part: Tensor, _: int) -> Callable[[Tensor, int], Tensor]:
        group = part.shape[-1]
        limit = CHUNK_CUDA if part.is_cuda else CHUNK
        pieces = part.reshape(-1, group).split(max(1, limit // group))
        units = torch.cat([fit(piece, form)[1] for piece in pieces])
        units = units.view(*part.shape[:-1], -1).clamp(min=1e-30)
        grid = grid_of(form.bits, form.grid, group)

        def quantise(value: Tensor, i: int) -> Tensor:
            unit = units[..., i * units.shape[-1] // group]
            return grid.nearest(value / unit) * unit

        return quantise

    return round_by_moments(w, h, bounds(w.shape[-1], form.group), prepare, damping)


# ------------------------------------------------------------------------------------ controls


def affine_range(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Step and zero point of min-max int4: the decoded value is (code - zero) * step."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    step = half((high - low) / (2**bits - 1)).clamp(min=1e-8)
    return step, (-low / step).round()


def rtn(w: Tensor, bits: int = 4, group: int = 128) -> Tensor:
    """Round to nearest with a float16 step and a zero point of `bits` per group."""

    def code(x: Tensor) -> Tensor:
        step, zero = affine_range(x, bits)
        return ((x / step).round() + zero).clamp(0, 2**bits - 1).sub(zero) * step

    return by_group(w, group, code)


def gptq(w: Tensor, h: Tensor, bits: int = 4, group: int = 128) -> Tensor:
    """GPTQ: the grid of `rtn`, rounded with second moments h [L, K, K]. Channels in order."""

    def prepare(part: Tensor, _: int) -> Callable[[Tensor, int], Tensor]:
        step, zero = (x[..., 0] for x in affine_range(part, bits))
        top = 2**bits - 1
        return lambda value, i: ((value / step).round() + zero).clamp(0, top).sub(zero) * step

    return round_by_moments(w, h, bounds(w.shape[-1], group), prepare, GPTQ_DAMPING)


def normal_levels(bits: int) -> Tensor:
    """NF4's levels, or those of another width: quantiles of a Gaussian, 0 among them, to 1."""
    count = 2**bits
    last = 1 - (1 / (2 * count) + 1 / (2 * count - 2)) / 2
    halves = [
        torch.special.ndtri(torch.linspace(0.5, last, n, dtype=torch.float64))
        for n in (count // 2, count // 2 + 1)
    ]
    levels = torch.cat([-halves[0].flip(0), halves[1][1:]])
    return (levels / levels[-1]).float()


def nf4(w: Tensor, bits: int = 4, group: int = 64) -> Tensor:
    """NF4 of QLoRA (arXiv:2305.14314): quantiles of a Gaussian times the largest magnitude."""
    table = normal_levels(bits).to(w.device)

    def code(x: Tensor) -> Tensor:
        top = x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        return table[torch.bucketize(x / top, (table[1:] + table[:-1]) / 2)] * top

    return by_group(w, group, code)


def hqq(w: Tensor, bits: int = 4, group: int = 64, rounds: int = 20) -> Tensor:
    """Half-quadratic quantisation as published: p = 0.7, beta = 10, kappa = 1.01.

    The scale is that of min-max, the zero point is fitted. Both are stored as float16.
    """
    top = 2**bits - 1

    def code(x: Tensor) -> Tensor:
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        scale = (top / (high - low).clamp(min=1e-30)).clamp(max=2e4)
        zero = (-low * scale).round()
        beta, best, least = 10.0, zero, None
        for _ in range(rounds):
            codes = (x * scale + zero).round().clamp(0, top)
            rest = x - (codes - zero) / scale
            size = rest.abs().mean()
            if least is not None and size >= least:
                break
            least, best = size, zero
            shrunk = (rest.abs() - rest.abs().clamp(min=1e-12) ** (0.7 - 1) / beta).clamp(min=0)
            error = rest.sign() * shrunk
            zero = (codes - (x - error) * scale).mean(-1, keepdim=True)
            beta *= 1.01
        step, zero = half(1 / scale), half(best)
        return ((x * scale + zero).round().clamp(0, top) - zero) * step

    return by_group(w, group, code)


def q4_k(w: Tensor, energy: Tensor | None = None) -> Tensor:
    """Like Q4_K of llama.cpp, 4.5 bits: steps and minima of 32 channels in 6 bits each.

    The search is llama.cpp's make_qkx2_quants: 21 candidate ranges, then weighted least squares.
    `energy`, mean squares of the channels, serves as its importance matrix.
    """
    return _by_super_group(w, energy, 32, _q4_k_block)


def q6_k(w: Tensor, energy: Tensor | None = None) -> Tensor:
    """Like Q6_K of llama.cpp, 6.5625 bits: steps of 16 channels in 8 bits each, no minima."""
    return _by_super_group(w, energy, 16, partial(_signed_block, top=32, steps=128))


def q3_k(w: Tensor, energy: Tensor | None = None) -> Tensor:
    """Like Q3_K of llama.cpp, 3.4375 bits: steps of 16 channels in 6 bits each, no minima.

    The search is that of make_qx_quants, which llama.cpp uses where it has an importance matrix.
    """
    return _by_super_group(w, energy, 16, partial(_signed_block, top=4, steps=32))


def _by_super_group(
    w: Tensor, energy: Tensor | None, part: int, code: Callable[[Tensor, Tensor | None], Tensor]
) -> Tensor:
    """code() of super-groups of 256 channels as [n, parts, part], with weights of their errors."""
    out = torch.empty_like(w)
    limit = (CHUNK_CUDA if w.is_cuda else CHUNK) // 16
    for start, stop, size in runs(w.shape[-1], 256):
        rows = w[..., start:stop].reshape(-1, size // part, part)
        weights: Tensor | None = None
        if energy is not None:
            # importance * sqrt(mean square of the super-group + x^2), as in quantize_row_q4_K_impl
            mean = 2 * rows.square().mean((-1, -2), keepdim=True)
            shared = energy[..., None, start:stop].expand_as(w[..., start:stop])
            weights = shared.reshape(rows.shape) * (mean + rows.square()).sqrt()
        count = max(1, limit // size)
        parts = [None] * -(-len(rows) // count) if weights is None else weights.split(count)
        done = torch.cat([code(x, y) for x, y in zip(rows.split(count), parts, strict=True)])
        out[..., start:stop] = done.view(out[..., start:stop].shape)
    return out


def _q4_k_block(x: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        weights = x.square().mean(-1, keepdim=True).sqrt() + x.abs()
    low = x.amin(-1, keepdim=True).clamp(max=0)
    high = x.amax(-1, keepdim=True)
    span = (high - low).clamp(min=1e-30)
    total, first = weights.sum(-1, keepdim=True), (weights * x).sum(-1, keepdim=True)

    def codes(inverse: Tensor) -> Tensor:
        return ((x - low) * inverse).round().clamp(0, 15)

    def error(step: Tensor, minimum: Tensor, c: Tensor) -> Tensor:
        return (weights * (step * c + minimum - x).square()).sum(-1, keepdim=True)

    step, minimum = span / 15, low
    best = error(step, minimum, codes(15 / span))
    for i in range(21):
        c = codes((-1 + 0.1 * i + 15) / span)
        one, two = (weights * c).sum(-1, keepdim=True), (weights * c * c).sum(-1, keepdim=True)
        mixed = (weights * c * x).sum(-1, keepdim=True)
        determinant = total * two - one * one
        safe = determinant.clamp(min=1e-30)
        a, b = (total * mixed - first * one) / safe, (two * first - one * mixed) / safe
        above = b > 0
        a, b = torch.where(above, mixed / two.clamp(min=1e-30), a), b.clamp(max=0)
        found = error(a, b, c)
        better = (determinant > 0) & (found < best)
        best = torch.where(better, found, best)
        step, minimum = torch.where(better, a, step), torch.where(better, b, minimum)
    step, minimum = _six_bits(step), _six_bits(-minimum)
    codes4 = ((x + minimum) / step.clamp(min=1e-30)).round().clamp(0, 15)
    return torch.where(step > 0, codes4 * step, 0) - minimum


def _six_bits(x: Tensor) -> Tensor:
    """x [n, parts, 1] >= 0 as 6-bit multiples of one float16 per super-group."""
    unit = half(x.amax(1, keepdim=True) / 63)
    return (x / unit.clamp(min=1e-30)).round().clamp(0, 63) * unit


def _signed_block(x: Tensor, weights: Tensor | None, top: int, steps: int) -> Tensor:
    """Codes from -top, and steps in units from -steps, both to one less than that."""
    weights = x.square() if weights is None else weights
    at = x.abs().argmax(-1, keepdim=True)
    largest = x.gather(-1, at)
    safe = torch.where(largest == 0, 1e-30, largest)
    best = step = None
    for i in range(-9, 10):
        c = (x * (-(top + 0.1 * i) / safe)).round().clamp(-top, top - 1)
        mixed, two = ((weights * c * y).sum(-1, keepdim=True) for y in (x, c))
        merit, a = mixed * mixed / two.clamp(min=1e-30), mixed / two.clamp(min=1e-30)
        if best is None:
            best, step = merit, a
        else:
            better = merit > best
            best, step = torch.where(better, merit, best), torch.where(better, a, step)
    largest = step.gather(1, step.abs().argmax(1, keepdim=True))
    unit = half(-largest / steps)
    unit = torch.where(unit == 0, 1e-30, unit)
    step = (step / unit).round().clamp(-steps, steps - 1) * unit
    codes = (x / torch.where(step == 0, 1e-30, step)).round().clamp(-top, top - 1)
    return torch.where(step == 0, 0, codes * step)


def q4_k_m_has_six_bits(kind: str, layer: int, layers: int) -> bool:
    """Whether Q4_K_M stores this linear as Q6_K: v_proj and down_proj of half of the layers."""
    often = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return often and kind in ("v_proj", "down_proj")


@lru_cache(maxsize=4)
def plane_points(count: int, device: torch.device) -> Tensor:
    """The points of least squared error for pairs of Gaussian values: float32 [count, 2]."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(200_000, 2, generator=generator).to(device)
    points = samples[:count].clone()
    for _ in range(60):
        at = torch.cat([torch.cdist(part, points).argmin(1) for part in samples.split(20_000)])
        sums = torch.zeros_like(points).index_add_(0, at, samples)
        numbers = torch.zeros(count, device=device).index_add_(
            0, at, torch.ones(len(at), device=device)
        )
        points = torch.where(numbers[:, None] > 0, sums / numbers[:, None].clamp(min=1), points)
    return points


def higgs(w: Tensor, bits: int = 4, group: int = 256) -> Tensor:
    """HIGGS (arXiv:2411.17525) with p = 2: rotated weights [..., N, K] as points of a plane.

    A group's float16 scale is its root mean square.
    """
    points = plane_points(4**bits, w.device)
    norms = points.square().sum(-1)

    def code(x: Tensor) -> Tensor:
        scale = half(x.square().mean(-1, keepdim=True).sqrt()).clamp(min=1e-7)
        pairs = (x / scale).reshape(-1, 2)
        found = [points[(norms - 2 * part @ points.T).argmin(-1)] for part in pairs.split(1 << 16)]
        return torch.cat(found).view(x.shape) * scale

    return by_group(w, group, code)
