"""Soak: random work on a PagedKVPool for minutes, with its results checked.

    python benchmarks/soak.py --minutes 10
    python benchmarks/soak.py --minutes 10 --device cuda

Sequences come, grow by single tokens, drafts and long pieces, are forked, cut, rolled back, copied
out and in, and freed, in random order with random lengths. The pool is too small for all of them,
so running out of pages is part of the work. The program also keeps a plain list of the tokens of
every sequence. Every tenth step it checks

- the pages of a sequence, byte for byte, against the same tokens stored alone;
- the attention of the sequence against float64 attention over those keys and values;
- after a call that must fail, that nothing has changed.

A difference ends the program with an error. Memory is read twenty times; in the end all sequences
are freed, and every page must be free again. The row goes to benchmarks/results/soak.json.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from common import device_name, parser, short_name, write_rows
from torch import Tensor

import torch_turboquant as tq

LAYERS, KV_HEADS, Q_HEADS, HEAD_DIM = 2, 2, 8, 64
PAGE, PAGES, SEQS, MAX_Q_LEN = 16, 160, 12, 4
SINKS, WINDOW = 4, 24
LONGEST = 700  # tokens of a sequence
ROWS = 2048  # different tokens
CHECK_EVERY = 10
# Errors relative to the largest value: queries and weights are rounded to 16 bits, and results to
# their dtype.
TOLERANCE = {torch.float32: 5e-4, torch.bfloat16: 6e-3}


class Soak:
    """A pool, the tokens that each of its sequences must hold, and the random numbers."""

    def __init__(self, preset: str, device: torch.device, seed: int) -> None:
        self.random = random.Random(seed)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        config = tq.preset(
            preset, HEAD_DIM, page_size=PAGE, sink_tokens=SINKS, recent_window=WINDOW
        )
        generator = torch.Generator().manual_seed(seed)
        shape = (2, LAYERS, ROWS, KV_HEADS, HEAD_DIM)
        self.bank = torch.randn(shape, generator=generator).to(device, self.dtype)
        # some keys have a large mean, so that a forgotten center would show
        self.bank[0] += torch.randn(KV_HEADS, HEAD_DIM, generator=generator).to(device, self.dtype)
        # every query attends to a few tokens only, so that one wrong token among hundreds shows
        self.queries = 4 * torch.randn(ROWS, Q_HEADS, HEAD_DIM, generator=generator)
        self.queries = self.queries.to(device, self.dtype)
        self.pool = tq.PagedKVPool(
            config,
            num_layers=LAYERS,
            num_kv_heads=KV_HEADS,
            num_pages=PAGES,
            max_seqs=SEQS,
            dtype=self.dtype,
            max_q_len=MAX_Q_LEN,
            centers=list(self.bank[0].float().mean(1)),
            device=device,
        )
        self.decoded = [self.stored_alone(layer) for layer in range(LAYERS)]
        self.rows: dict[tq.PoolSequence, list[int]] = {}
        self.counts: Counter[str] = Counter()
        self.worst_error = 0.0

    def stored_alone(self, layer: int) -> tuple[Tensor, Tensor]:
        """All tokens of the bank, encoded into a cache of their own and decoded: [row, head, d]."""
        config, tables, device = self.pool.configs[layer], self.pool.tables[layer], self.bank.device
        pages = ROWS // PAGE
        cache = tq.allocate_cache(config, pages, KV_HEADS, device)
        keys, values = self.bank[:, layer]
        tq.cache_store(keys, values, cache, torch.arange(ROWS, device=device), config, tables)
        table = torch.arange(pages, dtype=torch.int32, device=device)[None]
        length = torch.tensor([ROWS], dtype=torch.int32, device=device)
        k, v = tq.cache_load(cache, table, length, config, tables, ROWS, torch.float32)
        return k[0], v[0]

    # ---- the work

    def step(self) -> None:
        """One random operation; those that grow sequences are the most frequent."""
        work = ["arrive", "grow", "grow", "grow", "fork", "cut", "roll_back", "move", "leave"]
        name = self.random.choice(work) if self.rows else "arrive"
        before = {seq: list(rows) for seq, rows in self.rows.items()}
        free = self.pool.free_pages, self.pool.free_seqs
        self.counts["steps"] += 1
        try:
            getattr(self, name)()
            self.counts[name.replace("_", " ")] += 1
        except tq.PoolExhausted:
            self.counts["exhausted"] += 1
            assert (self.pool.free_pages, self.pool.free_seqs) == free
            assert self.rows == before
            self.free(self.any_sequence())
        if self.counts["steps"] % CHECK_EVERY == 0 and self.rows:
            self.check_pages(self.any_sequence())

    def any_sequence(self) -> tq.PoolSequence:
        return self.random.choice(list(self.rows))

    def new_rows(self, seq: tq.PoolSequence, most: int) -> list[int]:
        count = min(self.random.randint(1, most), LONGEST - seq.length)
        return [self.random.randrange(ROWS) for _ in range(count)]

    def arrive(self) -> None:
        """A prompt whose attention was computed elsewhere."""
        seq = self.pool.allocate()
        rows = self.new_rows(seq, self.random.choice((3, 40, 400)))
        try:
            self.pool.append([seq], *(part[:, rows] for part in self.bank), new_tokens=len(rows))
        except tq.PoolExhausted:
            self.pool.free(seq)
            raise
        self.rows[seq] = rows

    def chosen(self) -> list[tuple[tq.PoolSequence, list[int]]]:
        """Some sequences and the new tokens of each: one token, or up to MAX_Q_LEN."""
        sequences = [seq for seq in self.rows if seq.length + MAX_Q_LEN <= LONGEST]
        sequences = self.random.sample(sequences, self.random.randint(0, len(sequences)))
        most = self.random.choice((1, MAX_Q_LEN))
        return [(seq, self.new_rows(seq, most)) for seq in sequences]

    def attend(self, batch: tq.PoolBatch, rows: list[int]) -> list[Tensor]:
        """Stores and attends in all layers: [tokens, q_heads, d] of each."""
        outs = []
        for layer in range(LAYERS):
            keys, values = self.bank[:, layer, rows]
            self.pool.store(layer, keys, values, batch)
            outs.append(self.pool.attend(layer, self.queries[rows], batch)[0])
        return outs

    def grow(self) -> None:
        if not (chosen := self.chosen()):
            return
        counts = [len(rows) for _, rows in chosen]
        flat = [row for _, rows in chosen for row in rows]
        with self.pool.reserve([seq for seq, _ in chosen], counts) as batch:
            outs = self.attend(batch, flat)
        for seq, rows in chosen:
            self.rows[seq] += rows
        self.counts["tokens attended"] += len(flat)
        if self.counts["steps"] % CHECK_EVERY == 0:
            which = self.random.randrange(len(chosen))
            start = sum(counts[:which])
            for layer, out in enumerate(outs):
                part = out[start : start + counts[which]]
                self.check_attention(layer, chosen[which][0], part)

    def roll_back(self) -> None:
        """A batch that is rolled back, whether it was stored or not."""
        if chosen := self.chosen():
            batch = self.pool.reserve([seq for seq, _ in chosen], [len(rows) for _, rows in chosen])
            if self.random.random() < 0.5:
                self.attend(batch, [row for _, rows in chosen for row in rows])
            self.pool.rollback(batch)

    def fork(self) -> None:
        seq = self.any_sequence()
        self.rows[self.pool.fork(seq)] = list(self.rows[seq])

    def cut(self) -> None:
        seq = self.any_sequence()
        most = self.random.choice((MAX_Q_LEN, seq.length))
        length = max(1, seq.length - self.random.randint(0, most))
        self.pool.truncate(seq, length)
        del self.rows[seq][length:]

    def move(self) -> None:
        """A sequence leaves the pool and comes back."""
        seq = self.any_sequence()
        exported, rows = self.pool.export(seq), list(self.rows[seq])
        self.rows[self.pool.adopt(exported)] = rows
        self.free(seq)

    def leave(self) -> None:
        self.free(self.any_sequence())

    def free(self, seq: tq.PoolSequence) -> None:
        self.pool.free(seq)
        del self.rows[seq]

    # ---- the checks

    def check_pages(self, seq: tq.PoolSequence) -> None:
        rows = self.rows[seq]
        assert seq.length == len(rows)
        for layer in range(LAYERS):
            loaded = self.pool.load(layer, seq, torch.float32)
            for got, bank in zip(loaded, self.decoded[layer], strict=True):
                assert torch.equal(got, bank[rows]), f"layer {layer}: other bytes than stored"
        self.counts["pages checked"] += len(self.pool.page_numbers(seq)) * LAYERS

    def check_attention(self, layer: int, seq: tq.PoolSequence, out: Tensor) -> None:
        """Compares with float64 attention over decoded tokens, exact ones within the tail."""
        rows, new = self.rows[seq], out.shape[0]
        length, first = len(rows), self.pool.export(seq).ring_first
        position = torch.arange(length - new, length)[:, None]
        key = torch.arange(length)[None]
        exact = (key < SINKS) | ((position - key < WINDOW) & (key >= first))
        keys, values = (
            torch.where(
                exact[:, :, None, None],
                self.bank[kind, layer][rows].double().cpu(),
                self.decoded[layer][kind][rows].double().cpu(),
            )
            for kind in (0, 1)
        )
        q = self.queries[rows[-new:]].double().cpu().unflatten(1, (KV_HEADS, -1))
        scores = torch.einsum("nhgd,nlhd->nhgl", q, keys) / HEAD_DIM**0.5
        scores = scores.masked_fill((key > position)[:, None, None], -torch.inf)
        wanted = torch.einsum("nhgl,nlhd->nhgd", scores.softmax(-1), values).flatten(1, 2)
        error = ((out.double().cpu() - wanted).abs().max() / values.abs().max()).item()
        assert error < TOLERANCE[self.dtype], f"layer {layer}: attention is off by {error:.1e}"
        self.worst_error = max(self.worst_error, error)
        self.counts["attention checked"] += new

    def finish(self) -> None:
        for seq in list(self.rows):
            self.check_pages(seq)
            self.free(seq)
        assert (self.pool.free_pages, self.pool.free_seqs) == (PAGES, SEQS), "something was lost"


class Memory(NamedTuple):
    """Memory of the process in MiB."""

    process: float
    gpu: float  # its tensors there


def memory(device: torch.device) -> Memory:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    gpu = torch.cuda.memory_allocated(device) / 2**20 if device.type == "cuda" else 0.0
    return Memory(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, gpu)


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> dict:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--steps", type=int, help="stop after so many steps instead")
    options.add_argument("--preset", default="k4v4", choices=tq.PRESETS)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args(arguments)
    device = torch.device(args.device)

    soak = Soak(args.preset, device, args.seed)
    start, samples = time.monotonic(), []
    print("    minutes    steps  sequences  free pages  process MiB    GPU MiB  worst error")
    while True:
        spent = (time.monotonic() - start) / 60
        share = spent / args.minutes if args.steps is None else soak.counts["steps"] / args.steps
        if share * 20 >= len(samples):
            samples.append(memory(device))
            print(
                f"{spent:11.2f}{soak.counts['steps']:9}{len(soak.rows):11}"
                f"{soak.pool.free_pages:12}{samples[-1].process:13.1f}{samples[-1].gpu:11.1f}"
                f"{soak.worst_error:13.1e}",
                flush=True,
            )
        if share >= 1:
            break
        soak.step()
    soak.finish()
    settled = samples[min(2, len(samples) - 1) :]  # the first tenth fills what libraries keep
    row = {
        "minutes": round(spent, 2),
        "preset": args.preset,
        "dtype": short_name(soak.dtype),
        "seed": args.seed,
        "torch": torch.__version__,
        **soak.counts,
        "worst_error": soak.worst_error,
        "tolerance": TOLERANCE[soak.dtype],
        "process_mib": [round(sample.process, 1) for sample in settled],
        "gpu_mib": [round(sample.gpu, 2) for sample in settled],
    }
    print(", ".join(f"{name}: {number:,}" for name, number in soak.counts.items()))
    print(f"{device_name(device)}: nothing lost, nothing different")
    write_rows("soak", [row], args)
    return row


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
