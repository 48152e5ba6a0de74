"""The ops themselves, from vectors to attention over pages.

    python examples/raw_ops.py [--device cuda]

Everything goes through torch.ops.turboquant; the functions of torch_turboquant only add checks and
names to the same calls. All constants are tensors, so the calls can be captured in CUDA graphs.
"""

from __future__ import annotations

import argparse

import torch

import torch_turboquant as tq

D, TOKENS, KV_HEADS, Q_HEADS, PAGE = 128, 1000, 2, 8, 32
BITS, UNBIASED, MSE = 4, tq.SCALE_MODES["unbiased"], tq.SCALE_MODES["mse"]


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args(arguments).device
    torch.manual_seed(0)
    ops = torch.ops.turboquant

    # Constants: random signs of the rotation, levels of the codebook, candidate step sizes.
    book = tq.Codebook.make(D, BITS)
    levels, steps = book.levels_tensor(device), book.steps_tensor(search=8, device=device)
    key_signs = tq.random_signs(D, seed=0, kind=tq.SignKind.KEYS).to(device)
    value_signs = tq.random_signs(D, seed=0, kind=tq.SignKind.VALUES).to(device)

    # Vectors: 4 bits per channel and one scale.
    x = torch.randn(TOKENS, D, device=device)
    packed, scale = ops.encode(x, key_signs, levels, steps, BITS, MSE, None)
    decoded = ops.decode(packed, scale, key_signs, levels, BITS, torch.float32, None)
    error = ((decoded - x).square().sum() / x.square().sum()).item()
    size = packed.nbytes + scale.nbytes
    print(f"vectors: {x.nbytes:,} bytes become {size:,}, squared error {100 * error:.2f}%")

    # Scores without decoding: only the query is rotated.
    q = torch.randn(4, D, device=device)
    packed, scale = ops.encode(x, key_signs, levels, steps, BITS, UNBIASED, None)
    scores = ops.score(q, packed, scale, key_signs, levels, BITS, None, None, None, None)
    off = ((scores - q @ x.T).std() / (q @ x.T).std()).item()
    print(f"scores: off by {100 * off:.1f}% of their spread")

    # Pages: keys and values of all heads, and attention over them.
    config = tq.CacheConfig(D, BITS, BITS, page_size=PAGE)
    pages = -(-TOKENS // PAGE)
    cache = torch.zeros(pages, KV_HEADS, config.record_bytes, dtype=torch.uint8, device=device)
    k, v = torch.randn(2, TOKENS, KV_HEADS, D, device=device)
    order = torch.randperm(pages, device=device)  # pages may lie anywhere
    token = torch.arange(TOKENS, device=device)
    slots = order[token // PAGE] * PAGE + token % PAGE
    keys, values = (key_signs, value_signs), (levels, levels)
    ops.cache_store(
        *(k, v, cache, slots, *keys, *values, steps, steps, None),
        *(PAGE, BITS, BITS, UNBIASED, MSE),
    )
    q = torch.randn(1, Q_HEADS, D, device=device)
    length = torch.tensor([TOKENS], dtype=torch.int32, device=device)
    table = order.int()[None]
    out, lse = ops.paged_attention(
        *(q, cache, table, length, *keys, *values, None, PAGE, BITS, BITS, D**-0.5)
    )
    group = Q_HEADS // KV_HEADS
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.transpose(0, 1).repeat_interleave(group, 0),
        v.transpose(0, 1).repeat_interleave(group, 0),
    ).transpose(0, 1)
    attention = ((out - exact).square().sum() / exact.square().sum()).item()
    print(
        f"attention: {k.nbytes + v.nbytes:,} bytes become {cache.nbytes:,}, squared error "
        f"{100 * attention:.2f}%"
    )
    return {"vectors": error, "scores": off, "attention": attention, "lse": lse.max().item()}


if __name__ == "__main__":
    main()
