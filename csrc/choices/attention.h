// Which CUDA kernel takes a call of paged_attention, and why: the one place that knows the conditions. Plain C++
// without torch and CUDA, so that the launch, a test and a report of the machine ask the same function.
#pragma once

#include <cstdint>

#include "choices/device.h"
#include "dtype.h"
#include "format.h"

namespace turboquant {

enum class AttentionKernel {
  kSplitKv,             // few query rows over long caches (cuda/attention/split_kv/kernel.cuh)
  kKeyTiles,            // 9 to 32 query rows (cuda/attention/key_tiles/kernel.cuh)
  kRowTiles,            // many query rows (cuda/attention/row_tiles/kernel.cuh)
  kSplitKvAndKeyTiles,  // sequences of few rows: split-KV, then those of more rows: one of the others
  kSplitKvAndRowTiles,
  kGeneral,  // everything (cuda/attention/general.cu)
};

// What the choice depends on, of a call.
struct AttentionShape {
  int head_dim;
  format::Codes keys, values;
  int64_t kv_heads;
  int64_t group;      // query heads per KV head
  int64_t max_q_len;  // queries of a sequence at most; not more than tokens
  int64_t seqs, tokens;
  int64_t room;    // keys that block_table has pages for in each sequence; the host knows no better bound of lengths
  Dtype dtype;     // of queries, results and exact keys
  bool has_exact;  // exact keys: a tail, or the call's own tokens
};

struct AttentionChoice {
  AttentionKernel kernel;
  const char* reason;            // the condition that decided
  int pair = -1;                 // split-KV and key tiles: the index of the codes in kSplitKvPairs
  int64_t split_kv_queries = 0;  // split-KV takes sequences of at most so many queries; the other kernel the others
  // Those of at most so many queries have a launch of split-KV of their own, with smaller blocks; 0: all have one.
  int64_t few_queries = 0;
};

// The head_dims that the split-KV kernel is compiled for (cuda/attention/instances): all that pages can have up to 256,
// and two larger ones.
constexpr int kSplitKvHeadDims[] = {16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256, 512, 576};

// The pairs of codes that it is compiled for: those of the presets (torch_turboquant/config.py).
struct CodesOfPair {
  format::Codes keys, values;
  constexpr bool operator==(const CodesOfPair&) const = default;
};
namespace choices {
using format::Grid, format::Width;
constexpr format::Codes kByte{Width::k8, Grid::kUniform};
constexpr format::Codes kUniform3{Width::k3, Grid::kUniform}, kUniform4{Width::k4, Grid::kUniform};
constexpr format::Codes kUniform5{Width::k5, Grid::kUniform};
constexpr format::Codes kLevels2{Width::k2, Grid::kLevels}, kLevels3{Width::k3, Grid::kLevels};
constexpr format::Codes kLevels4{Width::k4, Grid::kLevels};
}  // namespace choices
constexpr CodesOfPair kSplitKvPairs[] = {
    {choices::kByte, choices::kByte},         {choices::kByte, choices::kLevels4},
    {choices::kUniform5, choices::kUniform4}, {choices::kUniform5, choices::kUniform3},
    {choices::kUniform4, choices::kUniform4}, {choices::kLevels4, choices::kLevels4},
    {choices::kLevels4, choices::kLevels3},   {choices::kLevels4, choices::kLevels2},
    {choices::kLevels3, choices::kLevels3},   {choices::kLevels3, choices::kLevels2},
    {choices::kLevels2, choices::kLevels2},
};
constexpr int kSplitKvNumPairs = sizeof(kSplitKvPairs) / sizeof(kSplitKvPairs[0]);

// The most rows of a block of the split-KV kernel. A sequence with more of them reads its codes once for each block.
constexpr int split_kv_block_rows(int head_dim) {
  return head_dim == 64 || head_dim == 128 ? 16 : head_dim <= 256 ? 8 : 4;
}

// The rows of its smallest block. Below 64 channels blocks of four rows are not worth their bytes in the library.
constexpr int split_kv_least_rows(int head_dim) { return head_dim < 64 ? 8 : 4; }

// The most rows of a sequence that split-KV takes, in one block or several. row_tiles: whether row tiles can take the
// call. They take as long for one row as for 64, and are faster than two blocks of 16 rows or five of 8. The general
// kernel takes as long as about nine blocks.
constexpr int split_kv_most_rows(int head_dim, bool row_tiles) {
  if (!row_tiles) return head_dim <= 256 ? 64 : 32;
  return split_kv_block_rows(head_dim) == 16 ? 16 : 32;
}

// Its copies end in barriers of shared memory (cuda/common/async_copy.cuh).
constexpr int kSplitKvLeastMajor = 8;

constexpr bool is_split_kv_head_dim(int head_dim) {
  for (const int d : kSplitKvHeadDims) {
    if (d == head_dim) return true;
  }
  return false;
}

// The index of a pair of codes in kSplitKvPairs; -1: it is not there.
constexpr int split_kv_pair(const format::Codes& keys, const format::Codes& values) {
  for (int i = 0; i < kSplitKvNumPairs; ++i) {
    if (kSplitKvPairs[i] == CodesOfPair{keys, values}) return i;
  }
  return -1;
}

// The head_dims that the key-tile kernel is compiled for, and the most rows that its blocks have.
constexpr int kKeyTilesHeadDims[] = {64, 128};
constexpr int kKeyTilesMostRows = 32;
// The rows of its smallest block, of which more than half must exist, and the head_dims that have it. With 64 channels
// split-KV is faster over long contexts, by more than key tiles would gain over short ones.
constexpr int kSmallKeyTilesRows = 16;
constexpr bool has_small_key_tiles(int head_dim) { return head_dim == 128; }
constexpr bool is_key_tiles_head_dim(int head_dim) {
  for (const int d : kKeyTilesHeadDims) {
    if (d == head_dim) return true;
  }
  return false;
}

// The row-tile kernel is compiled for these numbers of channels. It expands any codes but 5-bit ones of a table.
constexpr int kRowTilesChannels[] = {64, 128, 192, 256};
// The number to which it pads the tiles of a head_dim in shared memory; 0: head_dim is too large.
constexpr int row_tiles_channels(int head_dim) {
  for (const int channels : kRowTilesChannels) {
    if (head_dim <= channels) return channels;
  }
  return 0;
}

namespace choices {

// Why a kernel cannot take a call, whatever its rows are; null: it can.
constexpr const char* refusal_of_split_kv(const AttentionShape& shape, const DeviceFacts& device) {
  if (shape.has_exact && shape.dtype == Dtype::kFloat32) return "the exact tail is float32";
  if (!is_split_kv_head_dim(shape.head_dim)) return "the split-KV kernel is not compiled for this head_dim";
  if (split_kv_pair(shape.keys, shape.values) < 0) {
    return "the split-KV kernel is not compiled for this pair of key and value codes";
  }
  if (device.major < kSplitKvLeastMajor) return "compute capability below 8.0";
  return nullptr;
}
constexpr const char* refusal_of_row_tiles(const AttentionShape& shape, const DeviceFacts& device) {
  if (!device.warpgroup_products) return "many query rows per KV head, without products of warpgroups";
  if (shape.dtype == Dtype::kFloat32) return "many query rows per KV head, of float32";
  if (!row_tiles_channels(shape.head_dim)) return "many query rows per KV head, and head_dim is above 256";
  const auto expands = [](const format::Codes& codes) {
    return !format::has_plane(codes.width) || codes.grid == Grid::kUniform;
  };
  if (!expands(shape.keys) || format::has_plane(shape.values.width)) {
    return "many query rows per KV head, and the row-tile kernel does not expand these codes";
  }
  return nullptr;
}

// Whether key tiles can take sequences of so many rows, where row tiles can.
constexpr bool fits_key_tiles(const AttentionShape& shape, int64_t rows) {
  return rows <= kKeyTilesMostRows && is_key_tiles_head_dim(shape.head_dim) &&
         split_kv_pair(shape.keys, shape.values) >= 0;
}

// Whether they take a call whose sequences have up to so many rows from split-KV, where both can take it.
//
// Split-KV needs up to twice as long for 16 rows as for 8, above all where segments begin and end, for exact keys, and
// for keys that take it many instructions. It keeps the calls that have a multiprocessor or more for each KV head of a
// sequence: it divides them better, and if they are short, it attends to them in another way
// (cuda/attention/split_kv/few_units.cuh). It also keeps keys that take it few instructions, where sequences may be
// long. (docs/measurements/performance_key_tiles.md has the times.)
constexpr int64_t kShortRoom = 2048;
constexpr bool prefers_key_tiles(const AttentionShape& shape, const DeviceFacts& device, int64_t rows) {
  const bool fits = 2 * rows > kSmallKeyTilesRows && rows <= kSmallKeyTilesRows && has_small_key_tiles(shape.head_dim);
  const bool slow_keys = shape.keys == kByte || shape.keys == kUniform5 || shape.keys == kLevels4;
  return fits && shape.seqs * shape.kv_heads > device.multiprocessors && (slow_keys || shape.room <= kShortRoom);
}

// The reason that names a limit.
constexpr const char* few_rows(int limit) {
  return limit == 64   ? "at most 64 query rows per KV head"
         : limit == 32 ? "at most 32 query rows per KV head"
                       : "at most 16 query rows per KV head";
}

// The rows of the smallest block that holds a query, if one of `block_rows` rows does.
//
// A block with more rows takes longer for each sequence: one of 16 rows up to twice as long as one of 4. So decode
// steps have the smallest block that holds a query, whatever else is in the call.
constexpr int least_block_rows(const AttentionShape& shape, int block_rows) {
  int rows = split_kv_least_rows(shape.head_dim);
  while (rows < block_rows && rows < shape.group) rows *= 2;
  return rows;
}

// A mixed call: which sequences are split-KV's, in blocks of at most `block_rows` rows.
//
// Sequences of more queries than decode steps, such as drafts, have a second launch, unless all sequences but the
// longest have one query each on average. Several prompts raise that average, too; the second launch then finds
// nothing to do, which takes less time than larger blocks for all or row tiles for drafts.
struct MixedQueries {
  int64_t few, most;  // as few_queries and split_kv_queries of AttentionChoice
};
constexpr MixedQueries split_kv_queries_of_mixed(const AttentionShape& shape, int block_rows) {
  const int rows = least_block_rows(shape, block_rows);
  const int64_t few = rows / shape.group, most = block_rows / shape.group;
  const bool one_query_each = shape.seqs == 1 || shape.tokens - shape.max_q_len <= shape.seqs - 1;
  if (one_query_each) return {0, few};
  const bool same_block = rows >= split_kv_block_rows(shape.head_dim);
  return same_block ? MixedQueries{0, most} : MixedQueries{few, most};
}

// A call that split-KV takes all of: few_queries of AttentionChoice. Decode steps beside drafts have a launch of their
// own where they are at least a quarter of a batch that is not small: blocks of 16 rows take up to twice as long for
// them, one launch more some 4 us. A call of equal sequences has one launch in any case.
constexpr int64_t kLeastApart = 16;  // sequences
constexpr int64_t few_queries_of_steps(const AttentionShape& shape, int block_rows) {
  const int rows = least_block_rows(shape, block_rows);
  const bool same_block = shape.max_q_len * shape.group <= rows || rows >= split_kv_block_rows(shape.head_dim);
  const int64_t drafts = shape.tokens - shape.seqs, most_drafts = shape.seqs * (shape.max_q_len - 1);
  if (same_block || shape.seqs < kLeastApart || 4 * drafts > 3 * most_drafts) return 0;
  return rows / shape.group;
}

}  // namespace choices

// Which kernel takes sequences of how many query rows (max_q_len * group, of a KV head):
//   rows <= limit                split-KV: one launch, with blocks of up to 16, 8 or 4 rows, and one more for decode
//                                steps beside drafts (few_queries_of_steps). Key tiles take the place of blocks of 16
//                                rows in calls of many sequences (prefers_key_tiles)
//   else, and every sequence     key tiles up to 32 rows, else row tiles: one launch. It must be so where tokens =
//   has more than the limit      seqs * max_q_len, or where one query has more rows than the limit
//   else                         split-KV, once or twice (MixedQueries), and one of these: the lengths are on the
//                                device, so all are launched, and each skips the sequences of the others
// Where row tiles cannot take the call, the general kernel takes all that has more rows than the limit; where split-KV
// cannot, row tiles take all, or else the general kernel.
constexpr AttentionChoice choose_attention(const AttentionShape& shape, const DeviceFacts& device) {
  using Kernel = AttentionKernel;
  const char *const no_split_kv = choices::refusal_of_split_kv(shape, device), *const no_row_tiles =
                                                                                   choices::refusal_of_row_tiles(
                                                                                       shape, device);
  const int limit = split_kv_most_rows(shape.head_dim, !no_row_tiles), block = split_kv_block_rows(shape.head_dim);
  const int pair = split_kv_pair(shape.keys, shape.values);
  const int64_t rows = shape.max_q_len * shape.group;
  const bool few = rows <= limit;
  if (!no_row_tiles && !no_split_kv && choices::prefers_key_tiles(shape, device, rows)) {
    const int64_t steps = choices::few_queries_of_steps(shape, block);
    return {steps ? Kernel::kSplitKvAndKeyTiles : Kernel::kKeyTiles, "9 to 16 query rows per KV head, many sequences",
            pair, steps};
  }
  if (few && !no_split_kv) {
    return {Kernel::kSplitKv, choices::few_rows(limit), pair, shape.max_q_len,
            choices::few_queries_of_steps(shape, block)};
  }
  if (no_row_tiles) return {Kernel::kGeneral, few ? no_split_kv : no_row_tiles};
  if (no_split_kv) return {Kernel::kRowTiles, no_split_kv};
  const bool key_tiles = choices::fits_key_tiles(shape, rows);
  if (shape.tokens == shape.seqs * shape.max_q_len || shape.group > limit) {
    if (key_tiles) return {Kernel::kKeyTiles, "17 to 32 query rows per KV head", pair};
    return {Kernel::kRowTiles,
            limit == 16 ? "more than 16 query rows per KV head" : "more than 32 query rows per KV head"};
  }
  const choices::MixedQueries queries = choices::split_kv_queries_of_mixed(shape, shape.group > block ? limit : block);
  return {key_tiles ? Kernel::kSplitKvAndKeyTiles : Kernel::kSplitKvAndRowTiles,
          queries.few ? "few query rows per KV head in some sequences, more in others, and there may be drafts"
                      : "few query rows per KV head in some sequences, more in others",
          pair, queries.most, queries.few};
}

}  // namespace turboquant
