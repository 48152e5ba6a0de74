"""A pool of packed pages that many sequences share: the cache of a serving loop.

One pool holds all layers of a model: per layer the pages [num_pages, kv_heads, record_bytes] and
the exact tail [max_seqs, kv_heads, sink_tokens + ring, 2, head_dim]. A sequence is a list of page
numbers, valid in all layers, and an entry of the tails. All memory is taken when the pool is made,
and `PagedKVPool.bytes_needed` says beforehand how much that is.

    pool = PagedKVPool(config, num_layers=32, num_kv_heads=8, num_pages=4096, max_seqs=64,
                       dtype=torch.bfloat16)
    seq = pool.allocate()
    with pool.reserve([seq, ...], 1) as batch:          # pages for one new token each, or nothing
        for layer in range(32):
            pool.store(layer, k, v, batch)              # [tokens, kv_heads, head_dim]
            out, lse = pool.attend(layer, q, batch)     # [tokens, q_heads, head_dim]
            # or both in one call: pool.store_and_attend(layer, q, k, v, batch)
    pool.free(seq)                                      # the tokens counted when `with` was left

Sharing. `fork` makes a second sequence of the same tokens. It copies no page: pages count their
owners. A sequence can only append to its last page, and if that page has several owners, the
sequence gets a copy of it first. Only the entry of the tail is copied at once.

Swapping. `swap_out` moves a sequence to the host's memory or into a file, and `swap_in` brings it
back, byte for byte. Pages count their writes by stamps: one that other sequences own and that still
has the stamp which the swapped sequence knows is shared again.

Compaction. `compact` drops tokens of sequences, other ones for each KV head. The rest moves
together, within pages of which the sequence is the only owner: shared ones are copied first.

Nothing happens by halves. What cannot be done (no page left, a sequence that was freed, pages of
another format) raises before anything has changed. A batch that is rolled back leaves its
sequences as they were.

Threads. Every method may be called from any thread; a lock guards the books. A sequence is in one
open batch at a time, so `store` and `attend` of two batches never meet and run without the lock.
On CUDA, work with one pool from one stream, or order the streams: a page that one sequence frees
is another's next page.

The files, each of which uses only those before it: `batch` (what a caller holds: sequences and
batches), `books` (who owns which page; no tensor), `memory` (the tensors of all layers; no
sequence), `sequences` (what a pool does with sequences and batches, behind its lock), `transfer` (a
sequence out of a pool and into another), `compaction` (sequences that drop tokens), `pool` (the
class that users make).
"""

from torch_turboquant.pool.batch import PoolBatch, PoolSequence
from torch_turboquant.pool.books import PoolExhausted, PoolStatistics
from torch_turboquant.pool.memory import PoolBytes
from torch_turboquant.pool.pool import PagedKVPool
from torch_turboquant.pool.transfer import ExportedSequence, SwappedSequence

__all__ = [
    "ExportedSequence",
    "PagedKVPool",
    "PoolBatch",
    "PoolBytes",
    "PoolExhausted",
    "PoolSequence",
    "PoolStatistics",
    "SwappedSequence",
]
