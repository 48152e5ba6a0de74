// What the host that launches the row-tile kernel (attention/row_tiles/kernel.cuh) and the kernel agree on: how work is
// cut, and where everything of a block lies in shared memory.
//
// A row is one query of one query head; row r of a sequence and KV head is query r / group under head r % group of the
// KV head. A tile of rows is 64 rows for each warpgroup that multiplies; a tile of keys is 64 keys, or 128 (kKeys).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/attention/call.cuh"
#include "cuda/attention/row_tiles/expansion.cuh"
#include "cuda/codec/record.cuh"
#include "cuda/common/wgmma.cuh"

namespace turboquant::cuda::row_tiles {

constexpr int kUnitKeys = 64;      // keys of a raw stage: codes as they come from memory
constexpr int kMaxTileStages = 4;  // tiles of keys, and of values, that are ready or in work
constexpr int kMaxRawStages = 10;
constexpr int kItems = 2;  // items of work that are known ahead
// Long sequences, which the kernel of chunks (chunks.cuh) takes, have so many codes at least, but for those of many
// rows, and there are so many of them at most.
constexpr int kLeastCodes = 3072, kMaxLong = 512;
constexpr int kLongRows = 128, kStateThreads = 2 * kWarpgroup;  // of a tile of rows there, and that multiply for it

// What the tiles of a kernel are made of.
enum class Source {
  kCodes,     // codes, which warps of the block expand, and exact keys (kernel.cuh)
  kOwn,       // the call's own keys and values (prompts.cuh)
  kGathered,  // and before them older tokens that have been gathered (gather.cuh)
  kExpanded,  // codes that some block has expanded for all (chunks.cuh)
};

// D: channels of a tile, to which a head_dim is padded. GROUPS: warpgroups that multiply, 64 rows each. Where tiles are
// only copied, few registers are enough to prepare them, and warps that multiply have room for larger ones.
template <int D, int GROUPS, Source SOURCE = Source::kCodes>
struct Shape {
  static constexpr bool kGathered = SOURCE == Source::kGathered, kPrompts = SOURCE == Source::kOwn || kGathered;
  static constexpr bool kChunks = SOURCE == Source::kExpanded;
  static constexpr bool kCopies = kPrompts || kChunks;
  static_assert(D % 64 == 0 && D <= 256 && (GROUPS == 1 || GROUPS == 2));
  static_assert(!kCopies || GROUPS == 2 || D <= 128);
  static constexpr int kDim = D, kGroups = GROUPS, kRows = 64 * GROUPS, kConsumers = kWarpgroup * GROUPS;
  static constexpr int kKeys = kCopies && GROUPS == 2 && D <= 128 ? 2 * kUnitKeys : kUnitKeys;  // of a tile
  // Warps that prepare keys, and as many that prepare values, a tile each; those that only copy do other things
  static constexpr int kStreamWarps = GROUPS == 2 && D <= 128 && !kCopies ? 4 : 2, kProducers = 2 * kStreamWarps * 32;
  static constexpr int kThreads = kProducers + kWarpgroup * GROUPS;
  // Two blocks of a multiprocessor hide each other's latencies; queries in registers spare shared memory's bandwidth.
  static constexpr int kBlocks = GROUPS == 1 && D <= 128 ? 2 : 1;
  static constexpr bool kQueriesInRegisters = D <= 128;
  // Registers of a thread, out of 65,536 of a multiprocessor; 0: as the compiler has it
  static constexpr int kConsumerRegisters = kCopies       ? (GROUPS == 2 ? 232 : 216)
                                            : D <= 128    ? 184
                                            : GROUPS == 2 ? 208
                                                          : 0;
  static constexpr int kProducerRegisters = kCopies ? 40 : D <= 128 ? 72 : GROUPS == 2 ? 88 : 0;

  static constexpr int kTileBytes = kKeys * D * 2;  // a tile of keys, or of values
  static constexpr int kQueryBytes = kQueriesInRegisters && !kPrompts ? 0 : kRows * D * 2;
  static constexpr int kSums = D / 2;                           // a thread's part of the sums of values: of two rows
  static constexpr int kScores = kKeys / 2;                     // and of the scores
  static constexpr int kPartFloats = (kSums + 4) * kConsumers;  // of a partial result
  // Of what the kernel of chunks keeps of kLongRows rows: also the exponent of sums, and rotated queries with 4 floats
  static constexpr int kStateFloats = (kSums + 5 + D / 4 + 4) * kStateThreads;
  static constexpr int kExpandedAtOnce = kConsumers / 64;  // tiles, two warps each, in the kernel of chunks
  static constexpr int kLeastTiles = 512 / kKeys;  // n tiles are cut into at most n / kLeastTiles parts, rounded up
};

// A piece of work: the keys of tiles [begin, end) for one tile of rows. Tiles of codes come first, then tiles of exact
// keys.
struct Item {
  int sequence, head, block;     // block: number of the tile of rows; sequence < 0: there is no more work
  int part, parts, slot;         // part of how many; slot: the number of the first part's partial result and counter
  int length, queries, rows;     // of the sequence; rows of this tile
  int first_query;               // token of the sequence's first query
  int first, coded_end;          // keys [first, coded_end) hold all that some row reads from codes; first begins a unit
  int sinks, recent, exact;      // exact keys for some row: [0, sinks) and from `recent` on, `exact` in all
  int coded_tiles;               // tiles of codes
  int begin, end;                // the tiles of this part
  int common_begin, common_end;  // tiles of exact keys that all rows see
  int new_begin;                 // exact keys from here on are this call's own tokens

  // Only where older tokens have been gathered (gather.cuh), whose tiles come first.
  struct Older {
    int row, tiles;                 // of tokens that were in codes: the first one's gathered row, and tiles
    int first;                      // its position
    int common_begin, common_end;   // tiles of these that all rows see
    int copies_row, copies_tiles;   // the same of copies of the tail,
    int sinks, copies, tail_begin;  // of which the first `sinks` are sinks; the position of the next
    Attention::Tail tail;
  } older;

  // The position of exact key i.
  __device__ __forceinline__ int exact_key(int i) const { return i < sinks ? i : recent + i - sinks; }
};

// What consumers need to know about a tile of codes.
struct TileInfo {
  float key_factor;    // keys are multiplied by this, a power of two
  int value_exponent;  // values are multiplied by 2^this
  bool special;        // poison and absent count
  // Bit n % 32 of word n / 32: the key at place n has a scale that is not a number; its page does not exist
  uint32_t poison[4], absent[4];
  uint32_t unused;  // bulk copies take multiples of 16 bytes
};
static_assert(sizeof(TileInfo) % 16 == 0);

// What only the kernel of chunks reads.
struct ChunksPlan {
  int least_rows;   // that a long sequence has, in all heads of a group
  int many_rows;    // with which it is long with any number of codes
  int least_tiles;  // of rows, of all long sequences and KV heads; if there are fewer, none is long
  int most_states;  // that there is memory for
  uint8_t* ring;    // [ring_tiles, 2, kTileBytes], tiles of keys and of values, and [ring_tiles] TileInfo
  int ring_tiles;
  uint32_t* counters;  // 0 between launches, see chunks.cuh
};

// What the host decides about older tokens that are gathered.
struct GatherPlan {
  int rows;             // gathered ones that there is memory for, a multiple of 16
  int least_rows;       // query rows of a sequence, in all heads of a group
  float tokens_of_row;  // older tokens for each of them, at most
  int most_tokens;      // and of a sequence
  int* first_rows;      // [seqs] of a sequence; -1: it is not gathered. Null: none is
  uint16_t* absent;     // [rows / 16] bits of rows whose page does not exist
};

// What the host decides about a launch.
struct Plan {
  Overlap overlap;
  RecordLayout layout;
  format::Split split;                     // of the head_dim
  float norm;                              // 1 / sqrt(split.block)
  int raw_stages, raw_stride;              // the ring of codes as they come from memory
  int key_stages, value_stages;            // tiles of keys and of values in shared memory, keys first
  int queries, scales, signs, notes, raw;  // where they start in shared memory, behind the tiles
  int bytes;                               // of shared memory
  Divisor group;                           // query heads of a KV head
  ExpansionKind key_kind, value_kind;
  int least_rows;     // sequences with fewer rows belong to another kernel
  int prompts_apart;  // 1: so do those without older keys, or whose older tokens are gathered
  int clears;         // 1: fills the results of tokens behind the last sequence
  ChunksPlan chunks;
  float* states;       // [tiles of rows, kStateFloats] what the kernel of chunks keeps, see ChunkConsumer::save_state
  int* first_states;   // [seqs] number of a sequence's first one; -1: it is not long. Null: none is
  float* parts;        // [2 grid, kPartFloats]
  uint32_t* counters;  // 0 between launches: arrivals for each slot, [2 grid]; items taken, which is the
                       // only one of prompts
  GatherPlan gather;
};

// Own keys and values as the kernels of prompts and of chunks copy them: boxes of 64 channels of the tokens of a tile,
// of tensors [tokens, kv_heads, channels].
struct OwnMaps {
  CUtensorMap keys, values;
  CUtensorMap older_keys, older_values;  // the same of tokens that have been gathered
};

// What the warps of a block tell each other.
struct Notes {
  uint64_t raw_full[kMaxRawStages], raw_empty[kMaxRawStages];
  uint64_t key_full[kMaxTileStages], key_empty[kMaxTileStages], value_full[kMaxTileStages], value_empty[kMaxTileStages];
  uint64_t item_full[kItems], item_empty[kItems], query_full, query_empty;
  Item items[kItems];
  Item rehearsed;  // nobody's, see Producer::run
  alignas(16) TileInfo info[kMaxTileStages];
  uint8_t present[kMaxRawStages];  // which of a raw stage's tiles of the record exist, at most four
  alignas(16) int8_t key_table[16], value_table[16];
  uint32_t broken[4];  // exact keys of a tile whose values are not finite, see Consumer::guard_values
  int last;            // whether this block has finished the last part of a tile of rows
};

// A long sequence. Tiles of keys are numbered from its position 0 on.
struct LongSequence {
  int sequence;
  int begin, end;                // some row reads codes of these tiles of keys
  int first_stretch, stretches;  // that they are in
  int blocks, state;             // tiles of rows of a KV head; the number of the first one's state
};

// A piece of work of the kernel of chunks: to expand tiles [begin, end), or to attend to them.
struct Task : Item {
  bool expands;
  int slot, uses;     // of the ring, which so many other fillings had before
  bool last_use;      // no filling takes it after this one
  int expand_target;  // tasks that have expanded something there as soon as all of this filling is expanded
  int first_tile;     // of the filling, which is tile ring_tile of the ring
  int ring_tile;
  int blocks;       // tiles of rows that attend to it
  int state;        // number of what is kept of this tile of rows between its stretches
  int turn, turns;  // stretches that the tile of rows attends to before this one, and in all
  // Whether the tile of rows has no codes left after this task, which then attends to its exact keys: first
  // `tail_tiles` tiles of `exact` keys from the tail, then tiles of own ones from `own_first` on, `exact_tiles` in all.
  bool finishes;
  int tail_tiles, own_first, exact_tiles;
};

// What the warps of a block of chunks tell each other, beside Notes.
struct ChunkNotes {
  uint64_t task_full[kItems], task_empty[kItems];
  // All that a task expands, so that tiles can be copied again. One for each task that is known ahead: warps that
  // multiply may be done with the next task before a warp that copies has looked.
  uint64_t expanded[kItems];
  uint64_t copied;  // all tiles of a task, so that the next one can be taken
  bool any;         // whether there are long sequences
  Task tasks[kItems];
  LongSequence sequences[kMaxLong];

  __device__ __forceinline__ int slot_of(const Task& task) const { return static_cast<int>(&task - tasks); }
};

// Fills in where everything is; false: `limit` bytes have no room for the tiles and a raw stage for each warp of a
// kind. Only with more raw stages do copies run ahead (Producer::prepare_codes).
template <class S>
constexpr bool lay_out(Plan& p, int limit) {
  p.queries = (p.key_stages + p.value_stages) * S::kTileBytes;
  // __half [warps that expand, keys of a unit]; of chunks [warps that multiply, keys of a tile]
  p.scales = p.queries + S::kQueryBytes;
  p.signs = p.scales + (S::kPrompts  ? 0
                        : S::kChunks ? S::kConsumers / 32 * S::kKeys * 2
                                     : 2 * S::kStreamWarps * kUnitKeys * 2);
  p.notes = p.signs + (S::kPrompts ? 0 : 2 * S::kDim * 2);  // 16-bit signs of keys and of values
  p.raw = round_up(p.notes + static_cast<int>(sizeof(Notes)), 128);
  if constexpr (S::kCopies) {
    p.raw_stages = 0, p.bytes = p.raw + (S::kChunks ? static_cast<int>(sizeof(ChunkNotes)) : 0);
    return p.bytes <= limit;
  }
  p.raw_stages = limit > p.raw ? (limit - p.raw) / p.raw_stride : 0;
  p.raw_stages = p.raw_stages < kMaxRawStages ? p.raw_stages : kMaxRawStages;
  // A wait by parity must not be two phases ahead of its barrier: a warp that comes to unit u must know that unit
  // u - 2 raw_stages has been read. If it also reads unit u - raw_stages, it knows, because that one was copied later.
  // Else it knows from its last tile, u - kStreamWarps, for which it has waited for room. To release the keys of a
  // tile, consumers have used the values of the tile before. So warps of keys know that all units up to
  // u - kStreamWarps - key_stages - 1 have been read, and warps of values those up to u - kStreamWarps - value_stages.
  const int known = p.key_stages + 1 > p.value_stages ? p.key_stages + 1 : p.value_stages;
  if (2 * p.raw_stages < S::kStreamWarps + known) p.raw_stages -= p.raw_stages % S::kStreamWarps;
  p.bytes = p.raw + p.raw_stages * p.raw_stride;
  return p.raw_stages >= S::kStreamWarps;
}

}  // namespace turboquant::cuda::row_tiles
