"""Caches of latents that several test files store and attend to, and how far attention may be off.

Pages start full of stale bytes, tails full of NaN: whatever should not be read would show.
"""

from typing import NamedTuple

import torch
from torch import Tensor

import torch_turboquant as tt
from tests.helpers import int32, paged, randn, scales

CENTERS = (None, "center", "scales")


def center_of(kind: str | None, d: int) -> Tensor | None:
    if kind is None:
        return None
    center = randn(d, seed=5)
    if kind == "center":
        return center
    scale = scales(d, seed=6)
    return tt.scaled_center(center, scale)


class Case(NamedTuple):
    """Sequences whose last tokens have queries, stored in a cache."""

    config: tt.LatentConfig
    tables: tt.LatentTables
    lengths: list[int]
    q_lens: list[int]
    latent: Tensor  # of all tokens, sequence after sequence
    rope: Tensor
    cache: Tensor
    block_table: Tensor
    tail: tt.Tail | None

    @property
    def max_q_len(self) -> int:
        return max([*self.q_lens, 1])

    @property
    def cu_seqlens_q(self) -> Tensor:
        return int32(0, *torch.tensor(self.q_lens).cumsum(0).tolist())

    def own(self) -> tuple[Tensor, Tensor]:
        """The latents of the tokens with queries."""
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        rows = [i for end, n in zip(ends, self.q_lens, strict=True) for i in range(end - n, end)]
        return self.latent[rows], self.rope[rows]


def make_case(
    config: tt.LatentConfig,
    lengths: list[int],
    q_lens: list[int],
    *,
    center: str | None = None,
    dtype: torch.dtype = torch.float32,
    tail: bool = False,
    rotated: bool = False,
    layer: int = 1,
) -> Case:
    tables = tt.make_latent_tables(config, layer, center=center_of(center, config.latent_dim))
    num_pages, table, slots = paged(lengths, config.page_size, seed=len(lengths))
    total = sum(lengths)
    latent = randn(total, config.latent_dim, seed=1, dtype=dtype)
    rope = randn(total, config.rope_dim, seed=2, dtype=dtype)
    # stale bytes: NaN as scale and as raw channels of tokens that nobody has stored
    cache = torch.full((num_pages, config.record_bytes), 0x7F, dtype=torch.uint8)
    of_tail = {}
    held = None
    if tail:
        ring = tt.allocate_latent_tail(config, len(lengths) + 1, dtype, max([*q_lens, 1]))
        ring.fill_(torch.nan)
        slots_of_tail = torch.arange(len(lengths)).flip(0)
        slots_of_tail[len(lengths) // 2] = -1  # one sequence has no entry
        held = tt.Tail(ring, torch.stack([slots_of_tail, slots_of_tail + 1], 1)[:, 0])  # a column
        starts = int32(0, *torch.tensor(lengths).cumsum(0).tolist())
        of_tail = {"tail": held, "seq_lens": int32(*lengths), "cu_seqlens_q": starts}
    slot_mapping = torch.cat(slots) if slots else torch.zeros(0, dtype=torch.int64)
    tt.mla_store(latent, rope, cache, slot_mapping, config, tables, rotated=rotated, **of_tail)
    return Case(config, tables, lengths, q_lens, latent, rope, cache, table, held)


def queries(case: Case, heads: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    tokens = sum(case.q_lens)
    q_latent = randn(tokens, heads, case.config.latent_dim, seed=3, dtype=dtype)
    return q_latent, randn(tokens, heads, case.config.rope_dim, seed=4, dtype=dtype)


def attend(case: Case, q: tuple[Tensor, Tensor], function=tt.mla_attention, **options):
    options = {
        "softmax_scale": 0.08,
        "cu_seqlens_q": case.cu_seqlens_q,
        "max_q_len": case.max_q_len,
        "tail": case.tail,
        **options,
    }
    arguments = (case.cache, case.block_table, int32(*case.lengths), case.config, case.tables)
    return function(*q, *arguments, **options)


def assert_close(actual, expected, tolerance=4e-4, of_logarithms=4e-4):
    """Outputs within a share of their length; logarithms within what 16-bit queries cost.

    A rotated query of 512 channels is a multiple of its largest channel / 32639, about 10^-4. Half
    a unit per channel (sigma 0.29 units) times latents of length 23 and the factor 0.08 of scores
    is 6 * 10^-5; the bound is six times that. Zeros and -inf are exact.
    """
    (out, lse), (out64, lse64) = actual, expected
    length = out64.norm(dim=-1)
    assert not out[length == 0].any()
    error = (out.double() - out64).norm(dim=-1)
    assert bool((error <= tolerance * length).all()), (error / length).max()
    empty = lse64 == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert bool(((lse.double() - lse64)[~empty].abs() <= of_logarithms).all())
