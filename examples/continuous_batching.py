"""Continuous batching on a PagedKVPool, and proof that it changes no token.

    python examples/continuous_batching.py [--device cuda] [--preset k4v4] [--keep 0.5]

A small random decoder serves 32 requests with prompts and answers of different lengths. Twenty of
them begin with one of three common prefixes ("system prompts"), which are computed once and forked.
Requests arrive while others run and join the next step; the pool has room for a part of them, so
the rest waits until pages come free. Every step feeds all running requests at once: those that
still read their prompt get a piece of it, the others their last token. In the end every request
runs again, alone in a pool of its own, and must give the same tokens.

With --keep below 1 what a sequence begins with (a prefix, or the prompt of a request without one)
is read at once, exactly, and a part of its tokens is never stored. Positions count all tokens, the
pool counts those that it holds.
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import torch_turboquant as tq
from torch_turboquant.eviction import POLICIES

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 64, 4, 2, 32, 128
PAGES, PIECE = 40, 8  # pages of the pool; prompt tokens of one request in one step
SINKS, WINDOW = 2, 12  # tokens that stay exact


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q, k, v): [tokens, heads, HEAD_DIM] each -> the result of attention, like q."""


class Decoder:
    """A Llama-like decoder with random weights: RMS norms, rotary positions, GQA, SwiGLU.

    It computes in float64: the last bits of its matrix products depend on the size of the batch,
    and should not reach the float32 keys and values that are stored.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> Tensor:
            w = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
            return (w * 1.5 / math.sqrt(rows)).to(device)

        q, kv, ffn = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, 2 * HIDDEN
        self.embedding = weight(VOCAB, HIDDEN) * math.sqrt(VOCAB)
        self.layers = [
            {
                "q": weight(HIDDEN, q),
                "k": weight(HIDDEN, kv),
                "v": weight(HIDDEN, kv),
                "o": weight(q, HIDDEN),
                "gate": weight(HIDDEN, ffn),
                "up": weight(HIDDEN, ffn),
                "down": weight(ffn, HIDDEN),
            }
            for _ in range(LAYERS)
        ]
        self.head = weight(HIDDEN, VOCAB)
        self.device = device

    def __call__(self, tokens: list[int], positions: list[int], attend: Attend) -> Tensor:
        """Logits [tokens, VOCAB] of the new tokens of a batch."""
        x = self.embedding[torch.tensor(tokens, device=self.device)]
        angles = rotary_angles(torch.tensor(positions, device=self.device))
        for layer, w in enumerate(self.layers):
            h = rms_norm(x)
            q = rotate((h @ w["q"]).unflatten(1, (HEADS, HEAD_DIM)), angles).float()
            k = rotate((h @ w["k"]).unflatten(1, (KV_HEADS, HEAD_DIM)), angles).float()
            v = (h @ w["v"]).unflatten(1, (KV_HEADS, HEAD_DIM)).float()
            x = x + attend(layer, q, k, v).double().flatten(1) @ w["o"]
            h = rms_norm(x)
            x = x + (torch.nn.functional.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
        return rms_norm(x) @ self.head


def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rotary_angles(positions: Tensor) -> Tensor:
    exponents = torch.arange(0, HEAD_DIM, 2, dtype=torch.float64, device=positions.device)
    return positions.double()[:, None, None] * 1e4 ** (-exponents / HEAD_DIM)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@dataclass
class Request:
    prompt: list[int]  # what follows the prefix
    answer_length: int
    prefix: int | None = None  # which one
    arrival: int = 0  # step
    answer: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)  # tokens to feed
    fed: int = 0  # tokens that the model has read
    seq: tq.PoolSequence | None = None


def run_step(model: Decoder, pool: tq.PagedKVPool, running: list[Request]) -> None:
    """Feeds every request a piece of what is pending; who has fed all gets its next token."""
    pieces = [request.pending[:PIECE] for request in running]
    counts = [len(piece) for piece in pieces]
    positions = [r.fed + i for r, n in zip(running, counts, strict=True) for i in range(n)]
    with pool.reserve([request.seq for request in running], counts) as batch:

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pool.store(layer, k, v, batch)
            return pool.attend(layer, q, batch)[0]

        logits = model([token for piece in pieces for token in piece], positions, attend)
    ends = torch.tensor(counts).cumsum(0) - 1
    chosen = logits[ends.to(logits.device)].argmax(-1).tolist()
    for request, count, token in zip(running, counts, chosen, strict=True):
        note(request, count, token)


def read_at_once(
    model: Decoder, pool: tq.PagedKVPool, request: Request, eviction: tq.Eviction
) -> None:
    """Feeds a new sequence all that is pending, exactly, and stores what stays of it."""
    kept: list[tuple[Tensor, Tensor]] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append(replace(eviction, seed=layer).thin(q, k, v))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    tokens = list(request.pending)
    logits = model(tokens, list(range(len(tokens))), attend)
    keys, values = zip(*kept, strict=True)
    pool.append([request.seq], keys, values, eviction.count(len(tokens)))
    note(request, len(tokens), int(logits[-1].argmax()))


def note(request: Request, count: int, token: int) -> None:
    """The model has read `count` pending tokens of a request, and predicts `token`."""
    del request.pending[:count]
    request.fed += count
    if not request.pending and len(request.answer) < request.answer_length:
        request.answer.append(token)
        if len(request.answer) < request.answer_length:
            request.pending.append(token)


def begin(model: Decoder, pool: tq.PagedKVPool, request: Request, eviction: tq.Eviction) -> None:
    """The first tokens of a new sequence, if a part of them is not to be stored."""
    if eviction.evicts:
        read_at_once(model, pool, request, eviction)


def make_pool(preset: str, pages: int, seqs: int, device: torch.device) -> tq.PagedKVPool:
    return tq.PagedKVPool(
        tq.preset(preset, HEAD_DIM, page_size=16, sink_tokens=SINKS, recent_window=WINDOW),
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        num_pages=pages,
        max_seqs=seqs,
        dtype=torch.float32,
        max_q_len=PIECE,
        max_seq_len=256,
        device=device,
    )


def serve(
    model: Decoder,
    pool: tq.PagedKVPool,
    prefixes: list[list[int]],
    requests: list[Request],
    eviction: tq.Eviction,
) -> dict[str, int]:
    """Continuous batching; fills the requests' answers."""
    roots = [Request(prefix, 0, pending=list(prefix), seq=pool.allocate()) for prefix in prefixes]
    for root in roots:
        begin(model, pool, root, eviction)
    while unread := [root for root in roots if root.pending]:
        run_step(model, pool, unread)

    def pages_of_its_own(request: Request) -> int:
        """At most, to the end of its answer; only full pages of the prefix stay shared."""
        shared = 0 if request.prefix is None else roots[request.prefix].seq.length
        own = len(request.prompt)
        own = eviction.count(own) if request.prefix is None else own
        stored = shared + own + request.answer_length - 1
        return math.ceil(stored / pool.page_size) - shared // pool.page_size

    arriving = deque(sorted(requests, key=lambda request: request.arrival))
    waiting: deque[Request] = deque()
    running: list[Request] = []
    unpromised = pool.free_pages
    seen = {
        "steps": 0,
        "most at a time": 0,
        "steps with requests waiting": 0,
        "fewest pages": 10**9,
    }
    while arriving or waiting or running:
        while arriving and arriving[0].arrival <= seen["steps"]:
            waiting.append(arriving.popleft())
        # admitted only if its pages are there to the end: then no step of it is ever short of one
        while waiting and pool.free_seqs and pages_of_its_own(waiting[0]) <= unpromised:
            request = waiting.popleft()
            unpromised -= pages_of_its_own(request)
            request.pending = list(request.prompt)
            if request.prefix is None:
                request.seq = pool.allocate()
                begin(model, pool, request, eviction)
            else:
                root = roots[request.prefix]
                request.seq, request.fed = pool.fork(root.seq), root.fed
            running.append(request)
        if unfinished := [r for r in running if r.pending]:
            run_step(model, pool, unfinished)
        seen["steps"] += 1
        seen["most at a time"] = max(seen["most at a time"], len(running))
        seen["steps with requests waiting"] += bool(waiting)
        seen["fewest pages"] = min(seen["fewest pages"], pool.free_pages)
        for request in [r for r in running if not r.pending]:
            pool.free(request.seq)
            unpromised += pages_of_its_own(request)
            running.remove(request)
    for root in roots:
        pool.free(root.seq)
    return seen


def answer_alone(
    model: Decoder,
    preset: str,
    prefixes: list[list[int]],
    request: Request,
    eviction: tq.Eviction,
) -> list[int]:
    """The same request in a pool of its own."""
    pool = make_pool(preset, 16, 1, model.device)
    alone = Request(request.prompt, request.answer_length, seq=pool.allocate())
    if request.prefix is not None:
        root = Request([], 0, pending=list(prefixes[request.prefix]), seq=alone.seq)
        begin(model, pool, root, eviction)
        while root.pending:
            run_step(model, pool, [root])
        alone.fed = root.fed
    alone.pending = list(request.prompt)
    if request.prefix is None:
        begin(model, pool, alone, eviction)
    while alone.pending:
        run_step(model, pool, [alone])
    return alone.answer


def make_requests(seed: int) -> tuple[list[list[int]], list[Request]]:
    generator = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    prefixes = [numbers(0, VOCAB, length) for length in (37, 64, 90)]  # two end inside a page
    requests = [
        Request(
            prompt=numbers(0, VOCAB, length),
            answer_length=answer_length,
            prefix=(0, 1, 2, 0, 1, None, None, None)[i % 8],
            arrival=i // 3,
        )
        for i, (length, answer_length) in enumerate(
            zip(numbers(1, 40, 32), numbers(1, 30, 32), strict=True)
        )
    ]
    return prefixes, requests


@torch.no_grad()
def main(arguments: list[str] | None = None) -> tuple[dict[str, int], list[Request]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--preset", default="k4v4", choices=tq.PRESETS)
    parser.add_argument("--keep", default=1.0, type=float, help="share of prompts that is stored")
    parser.add_argument("--evict", default="snapkv", choices=POLICIES)
    options = parser.parse_args(arguments)
    eviction = tq.Eviction(options.keep, options.evict, SINKS, WINDOW)

    model = Decoder(0, torch.device(options.device))
    prefixes, requests = make_requests(1)
    pool = make_pool(options.preset, PAGES, 16, model.device)
    print(pool)
    seen = serve(model, pool, prefixes, requests, eviction)
    print(", ".join(f"{name}: {number}" for name, number in seen.items()))
    assert (pool.free_pages, pool.free_seqs) == (PAGES, 16)

    for i, request in enumerate(requests):
        alone = answer_alone(model, options.preset, prefixes, request, eviction)
        assert request.answer == alone, f"request {i}: {request.answer} instead of {alone}"
    tokens = sum(len(request.answer) for request in requests)
    print(f"{len(requests)} requests, {tokens} tokens: the same as one by one")
    return seen, requests


if __name__ == "__main__":
    main()
