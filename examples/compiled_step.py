"""A decode step in torch.compile and in a CUDA graph, replayed while the context grows.

    python examples/compiled_step.py [--device cuda]

The pool's batch keeps its tensors where they are, so one graph serves every step: reserve fills in
new lengths, slots and pages, and the replay reads them on the device. Without a GPU the step is
only compiled (there are no CUDA graphs), and each result is compared with the eager one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

import torch_turboquant as tq

LAYERS, KV_HEADS, Q_HEADS, D, SEQS, STEPS = 2, 2, 8, 64, 4, 40


def captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The step as a CUDA graph; calling it replays the graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # what is allocated once is allocated now
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args(arguments).device)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    torch.manual_seed(0)

    pool = tq.PagedKVPool(
        tq.preset("k4v4u", D),
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        num_pages=64,
        max_seqs=SEQS,
        dtype=dtype,
        max_seq_len=512,
        device=device,
    )
    sequences = [pool.allocate() for _ in range(SEQS)]
    for seq, length in zip(sequences, (5, 100, 33, 250), strict=True):
        prompt = torch.randn(2, LAYERS, length, KV_HEADS, D, device=device, dtype=dtype)
        pool.append([seq], *prompt, new_tokens=length)

    batch = pool.empty_batch(SEQS)  # tensors of fixed addresses, all padding so far
    q = torch.zeros(LAYERS, SEQS, Q_HEADS, D, device=device, dtype=dtype)
    k, v = torch.zeros(2, LAYERS, SEQS, KV_HEADS, D, device=device, dtype=dtype)

    def attention(layer: int) -> Tensor:
        return pool.layers[layer].attend(q[layer], batch)[0]

    def store() -> None:
        for layer in range(LAYERS):
            pool.store(layer, k[layer], v[layer], batch)

    def step() -> Tensor:
        return torch.stack([attention(layer) for layer in range(LAYERS)])

    # on the CPU the interpreter of the traced graph: no C++ compiler is waited for
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if on_gpu else "aot_eager")

    def whole() -> Tensor:
        store()
        return compiled()

    run = captured(whole) if on_gpu else whole
    for number in range(STEPS):
        for tensor in (q, k, v):
            tensor.normal_()
        pool.reserve(sequences, into=batch)
        out = run()
        same = torch.equal(out, step())
        pool.commit(batch)
        if not same:
            raise SystemExit(f"step {number}: the graph gives something else than eager code")
    how = "one CUDA graph of compiled code" if on_gpu else "compiled code (a CPU has no CUDA graph)"
    print(f"{STEPS} steps of {SEQS} sequences by {how}: the same bits as eager code")
    print(f"lengths now: {[seq.length for seq in sequences]}")
    return STEPS


if __name__ == "__main__":
    main()
