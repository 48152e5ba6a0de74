"""Compaction among everything else that a pool does: every head keeps the tokens that it should."""

import random

import pytest
import torch

import torch_turboquant as tt

LAYERS, HEADS, D, PAGE = 2, 2, 32, 16


def vectors(tokens, kind):
    """Keys of random directions, which 8 bits do not confuse: [tokens, HEADS, D]."""
    made = [torch.Generator().manual_seed(7 * token + kind) for token in tokens]
    return torch.stack([torch.randn(HEADS, D, generator=generator) for generator in made])


class Model:
    """A pool, and the numbers of the tokens of its sequences, [LAYERS][HEADS][tokens] each."""

    def __init__(self, seed, sinks, window):
        config = tt.preset("k8v8", D, page_size=PAGE, sink_tokens=sinks, recent_window=window)
        sizes = {"num_layers": LAYERS, "num_kv_heads": HEADS, "num_pages": 24, "max_seqs": 5}
        self.pool = tt.PagedKVPool(config, dtype=torch.float32, max_q_len=3, **sizes)
        self.sinks = sinks
        self.recent = 0 if self.pool.tails is None else self.pool.tails[0].shape[2] - sinks
        self.random, self.made = random.Random(seed), 0
        self.held, self.swapped = {}, []

    def some(self):
        return self.random.sample(list(self.held), self.random.randint(1, len(self.held)))

    def allocate(self):
        self.held[self.pool.allocate()] = [[[] for _ in range(HEADS)] for _ in range(LAYERS)]

    def append(self):
        sequences = self.some()
        counts = [self.random.randint(1, 20) for _ in sequences]
        tokens = list(range(self.made, self.made + sum(counts)))
        keys = [vectors(tokens, layer) for layer in range(LAYERS)]
        self.pool.append(sequences, keys, keys, counts)
        self.made += len(tokens)
        for seq, count in zip(sequences, counts, strict=True):
            mine, tokens = tokens[:count], tokens[count:]
            self.held[seq] = [[head + mine for head in layer] for layer in self.held[seq]]

    def fork(self):
        seq = self.some()[0]
        self.held[self.pool.fork(seq)] = self.held[seq]

    def adopt(self):
        seq = self.some()[0]
        self.held[self.pool.adopt(self.pool.export(seq))] = self.held[seq]

    def truncate(self):
        seq = self.some()[0]
        length = self.random.randint(0, seq.length)
        self.pool.truncate(seq, length)
        self.held[seq] = [[head[:length] for head in layer] for layer in self.held[seq]]

    def swap_out(self):
        seq = self.some()[0]
        self.swapped.append((self.pool.swap_out(seq), self.held.pop(seq)))

    def swap_in(self):
        if self.swapped:
            swapped, tokens = self.random.choice(self.swapped)
            self.held[self.pool.swap_in(swapped)] = tokens

    def compact(self):
        sequences = self.some()
        most = min(seq.length for seq in sequences) - self.recent
        if most < self.sinks:
            return
        count = self.random.randint(self.sinks, most)
        ends = [seq.length - self.recent for seq in sequences]
        first = list(range(self.sinks))
        kept = [
            [
                [
                    first + self.random.sample(range(self.sinks, end), count - self.sinks)
                    for _ in range(HEADS)
                ]
                for end in ends
            ]
            for _ in range(LAYERS)
        ]
        chosen = [torch.tensor(x, dtype=torch.int64).view(len(ends), HEADS, count) for x in kept]
        before = [seq.length + seq.dropped for seq in sequences]
        self.pool.compact(sequences, chosen)
        for i, (seq, end) in enumerate(zip(sequences, ends, strict=True)):
            assert seq.length + seq.dropped == (before[i] if seq.length else 0)
            self.held[seq] = [
                [
                    [head[p] for p in positions] + head[end:]
                    for head, positions in zip(layer, of_layer[i], strict=True)
                ]
                for layer, of_layer in zip(self.held[seq], kept, strict=True)
            ]

    def check(self):
        for seq, tokens in self.held.items():
            exported = self.pool.export(seq)
            exact = [p for p in range(seq.length) if p < self.sinks or p >= exported.ring_first]
            for layer in range(LAYERS):
                found = self.pool.load(layer, seq)[0]
                for head, expected in enumerate(tokens[layer]):
                    assert seq.length == len(expected)
                    if expected:
                        keys = vectors(expected, layer)[:, head]
                        error = (found[:, head] - keys).norm(dim=1) / keys.norm(dim=1)
                        assert error.max() < 0.1  # two tokens' keys differ by more than 0.5
                        if exported.exact:
                            assert torch.equal(exported.exact[layer][head, :, 0], keys[exact])


@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (2, 3), (3, 0), (0, 4)])
def test_any_order_of_calls(sinks, window):
    model = Model(11 * sinks + window, sinks, window)
    calls = [model.allocate, model.append, model.append, model.fork, model.adopt, model.truncate]
    calls += [model.swap_out, model.swap_in, model.compact, model.compact]
    for _ in range(60):
        call = model.random.choice(calls) if model.held else model.allocate
        try:
            call()
        except tt.PoolExhausted:
            model.pool.free(seq := model.some()[0])
            del model.held[seq]
        model.check()
