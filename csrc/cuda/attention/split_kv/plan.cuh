// What the host that launches the split-KV kernel and the kernel itself agree on: how a stage of asynchronous copies is
// laid out, where everything of a block lies in shared memory, and what its threads hold.
#pragma once

#include <algorithm>

#include "cuda/attention/operands.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/codec/transform.cuh"

namespace turboquant::cuda::split_kv {

constexpr int kStageTokens = 32;                         // keys of a stage: two value blocks
constexpr int kUnitStages = kUnitTokens / kStageTokens;  // stages of a unit
constexpr int kBarrierBytes = 16;
constexpr int kMaxLevels = 16;  // entries of a table of levels
constexpr int kMaxGrid = 4096;
constexpr int kMaxWarps = 8;

// Tiles are multiples of this many bytes, because they hold 16 or 32 tokens of a multiple of 4 bytes each. Where the
// distance between pages is such a multiple too, 32 bits address 256 GiB of pages in grains of this size; otherwise the
// grain is 32 or 16 bytes.
constexpr uint32_t kMostGrain = 64;

// The exact keys of this kernel are of a 16-bit type.
constexpr int kExactElementBytes = 2;

// Where the parts of a stage are, in bytes from its start. A stage holds 32 tokens: one tile, or two tiles of 16
// tokens; or as many exact keys, up to 8, as fit into the same bytes.
struct StageLayout {
  int bytes, stride;                   // of a stage without and with the barrier behind it
  int copies, copy_shift, copy_bytes;  // copies of a stage, 1 or 2: each copies a tile of 2^copy_shift tokens
  int unit_shift;                      // 2^unit_shift copies make a unit
  int page_shift;                      // a page has 2^page_shift tokens
  uint32_t grain;                      // where tiles start is counted in so many bytes, and so are
  uint32_t page_grains, record_grains, tile_grains;  // the distances between pages, KV heads and tiles
  int exact_keys, exact_bytes, exact_stride;  // exact keys of a stage; bytes of a key with its value; to the next key
  Divisor exact_per_unit;                     // exact keys of a unit
  int planes, values, key_scales, value_scales;          // sections of the first 16 tokens
  int next_keys, next_planes, next_values, next_scales;  // distances from the first 16 tokens to the other 16

  StageLayout(const format::Record& r, int64_t page_stride, int element_bytes)
      : bytes(kStageTokens / r.tile_tokens() * r.tile_bytes()), stride(bytes + kBarrierBytes),
        copies(kStageTokens / r.tile_tokens()), copy_shift(format::log2_of(r.tile_tokens())),
        copy_bytes(r.tile_bytes()), unit_shift(format::log2_of(kUnitTokens / r.tile_tokens())),
        page_shift(format::log2_of(r.page_size)),
        grain(static_cast<uint32_t>(std::min<int64_t>(kMostGrain, page_stride & -page_stride))),
        page_grains(static_cast<uint32_t>(page_stride / grain)), record_grains(r.record_bytes() / grain),
        tile_grains(r.tile_bytes() / grain), exact_keys(0), exact_bytes(2 * r.head_dim * element_bytes),
        exact_stride(exact_bytes + 16),  // so that the rows of eight keys lie in different banks
        planes(r.key_planes()), values(r.value_blocks()), key_scales(r.key_scales()), value_scales(r.value_scales()) {
    exact_keys = std::min(bytes / exact_stride, 8);
    exact_per_unit = Divisor(kUnitStages * exact_keys);
    const bool one_tile = r.tile_tokens() == kStageTokens;
    next_keys = one_tile ? format::kValueGroup * r.key_row_bytes() : r.tile_bytes();
    next_planes = one_tile ? format::kValueGroup * r.key_plane_bytes() : r.tile_bytes();
    next_values = one_tile ? r.value_block_bytes() : r.tile_bytes();
    next_scales = one_tile ? 2 * format::kValueGroup : r.tile_bytes();
  }
};

// What blocks do that run before the previous kernel has ended (programmatic dependent launch).
enum class Early {
  kWait,        // nothing, before Overlap::wait
  kGuess,       // they guess their work, then wait for it
  kBesideStore  // it stores tokens, and everything before it has ended: they wait for it before they read pages
};

// What has code for calls with few units of keys: one architecture with bulk copies, and the most common head_dim,
// because the code costs bytes. It is written for 64 channels, too.
constexpr int kFewUnitsMajor = 9;
constexpr bool takes_few_units(int d) { return d == 128; }
// Whether there are two kernels for blocks of 4 N rows, with that code and without it. Beside it, registers of the
// smallest kernel no longer hold everything, and calls without few units would take 1 to 9% more time.
constexpr bool has_few_units_apart(int d, int n) { return takes_few_units(d) && n == 1; }
// How many groups of four rows a warp takes there, in a block of 4 N rows. More would need longer code and more memory.
constexpr int few_row_groups(int n) { return n == 1 ? 1 : 2; }
// Floats of a row of a warp's state there: sums, maximum, denominator, and padding that spreads rows over the banks.
constexpr int few_row_floats(int d) { return d + 8; }

// How calls with few units of keys are attended (few_units.cuh).
struct FewUnitsPlan {
  int tokens;      // of each sequence at most, for the call to be one of them; 0: no call is
  int team_shift;  // 2^team_shift warps, a team, share a stage: each has other rows
  int slots;       // teams of a block, and so the stages that the block attends to at a time
  int stages;      // of codes, of a slot
  int parts;       // of a segment
  int shares;      // into how many shares the parts are divided when they are joined
  uint32_t segments_reciprocal, heads_reciprocal, slots_reciprocal;  // 2^24 / n, rounded up
};

// The plan of a launch: shared memory of a block, in bytes from its start, and what else all blocks need to know.
struct SplitKvPlan {
  Divisor grid;          // blocks
  int warps, stages;     // warps of a block; stages of each warp's pipeline. The pipelines come first
  int pipeline_bytes;    // of one warp
  int operands, raw;     // queries as operands; queries as they came, [rows, d] of their type
  int signs;             // float [2, d]: signs of keys, signs of values; then int8 [2, kMaxLevels]: their levels
  int states;            // how many warps' states fit into `join` at a time: those of all warps, or of half of them
  int join, result;      // states of the warps; their sum, [rows, part_floats]
  int rows;              // QueryRow [rows]; then one int, see WorkList::flag
  int notes;             // WarpNotes [warps + 1]: of each warp, and those that all begin with
  int bytes;             // all of it
  int group_reciprocal;  // 2^16 / group, rounded up
  CodeFacts codes;       // the codes of the pages
  FewUnitsPlan few;
  Early early;
  Overlap overlap;
  float* parts;        // [grid, 2, rows, part_floats]: partial results
  uint32_t* arrivals;  // [grid], 0 between launches
};

// What a query row needs besides its operands.
struct QueryRow {
  float scale, shift;  // score * log2(e) = scale * integer score + shift
  int zero;            // by how much the integer sums over channels are too large (CodeFacts::twice_zero)
  int first, end;      // keys [first, end) come from codes
};

// What a warp needs to know about the segment whose units it copies.
struct CopySource {
  int first, length, visible;  // the key of number 0 of the list; keys in pages; pages before `visible` may be gone
  int head;                    // the KV head, -1: the units are of exact keys
  const int32_t* table;        // the sequence's row of block_table

  __device__ __forceinline__ bool exact() const { return head < 0; }
};

// What a warp knows about its work. It rarely looks, so the notes are in shared memory and leave registers free.
struct WarpNotes {
  CopySource source;
  int begin, end;            // the block's numbers of the list
  Segment attended, copied;  // the segment that the warp attends to; the segment that it copies next
  ListCut cut;
  int copy_unit, copy_stop;  // Pipeline: where the next batch of copies continues
  int first_block, blocks;   // the blocks that share the attended segment
};
// Larger notes would leave some pipelines fewer stages, or their block fewer warps.
static_assert(sizeof(WarpNotes) == 192);

// How many blocks share a multiprocessor: blocks of eight warps, or of four (attention/split_kv.cu chooses).
constexpr int resident_blocks(int n, int d) { return n * d <= 128 ? 2 : 1; }
constexpr int resident_small_blocks(int n, int d) { return n * d <= 128 ? 4 : n * d <= 256 && d <= 128 ? 3 : 2; }
// The threads that registers have to suffice for.
constexpr int bounding_threads(int n, int d) { return 128 * resident_small_blocks(n, d) / resident_blocks(n, d); }

// How many rows of a block of `rows` a warp rotates together. Blocks of 8 rows gain nothing, but most head_dims have
// them, whose kernels would all be larger.
constexpr int rows_at_once(int rows) { return rows > 8 ? 2 : 1; }

// A partial result of a row: its maximum and its denominator, padding to 16 bytes, and d sums.
constexpr int kPartHead = 4;
constexpr int part_floats(int d) { return kPartHead + d; }

// Sizes of a kernel for head_dim D whose block takes 4 N rows: N products of four rows each.
template <int D, int N>
struct SplitKvTraits {
  using Operands = QueryOperands<D>;
  static constexpr int kRows = 4 * N;
  static constexpr int kFrags = Operands::kChunks * Operands::kFrags;  // products over all channels of a key
  static constexpr int kTiles = D / 16;                                // products over all channels of a value
  static constexpr int kSums = 2 * kTiles * N;                         // sums of weighted values in a lane
  // What a warp leaves for the join: two numbers of each row, then the sums of its lanes, so many at a time.
  static constexpr int kStateHead = 2 * kRows, kState = kStateHead + 32 * kSums;
  static constexpr int kTogether = kTiles % 2 == 0 ? 4 : 2;
  static constexpr int kPart = part_floats(D);
};

}  // namespace turboquant::cuda::split_kv
