// A call of linear_packed as its kernels see it, and how the thread blocks of a launch share its work.
//
// y[column, row] = sum over groups of unit[column, group] * scale[row, group] * (integer sum over channels of
// activation * level), where a column is a token and a row an output. Activations are rotated, then rounded to 8 bits
// with a unit for each column and group.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "format.h"

namespace turboquant::cuda::linear {

// How codes become the bytes that tensor cores multiply.
enum class Codes {
  kLloyd,    // 4 bits, levels from a table
  kUniform,  // 4 bits, evenly spaced levels
  kBytes     // 8 bits, which are levels
};

// Whether even channels make one operand and odd channels the other: codes in the lower and the upper half of a byte.
__host__ __device__ constexpr bool splits_channels(Codes codes) { return codes == Codes::kUniform; }

// Whether units have multipliers, one for every 32 channels.
enum class Subs {
  kNone,
  kAll,
  kEither  // a unit without has multipliers of 1
};

constexpr int kTileColumns = 8;    // of a tensor-core product
constexpr int kMostColumns = 64;   // of a thread block
constexpr int kHalfChannels = 64;  // half a group of 128

// Tiles of a block of up to kMostColumns columns; there are kernels for these numbers of tiles.
constexpr int tiles_of(int columns) { return columns <= 8 ? 1 : columns <= 16 ? 2 : columns <= 32 ? 4 : 8; }

// The activations of one group of channels, for all columns of a thread block. A pair is two neighbouring columns,
// c and c + 1, which the accumulators of one lane have together.
//
//   float32 [pairs][2]              the units of c and c + 1, then padding to a multiple of kAlignment bytes
//   int8 [group / 64][columns][64]  the integers, in the order of operands
struct RecordOfColumns {
  static constexpr int kPairBytes = 8;
  // Operands begin at a multiple of it, so that the 64 bytes that a warp stores of a column do not cross a line of the
  // L2 cache (with two blocks of eight columns that made a call of 896 x 4864 weights 0.7 us faster).
  static constexpr int kAlignment = kHalfChannels;

  int group, columns, tiles;

  __host__ __device__ constexpr int operands() const {
    return (tiles * (kTileColumns / 2 * kPairBytes) + kAlignment - 1) / kAlignment * kAlignment;
  }
  __host__ __device__ constexpr int bytes() const { return operands() + group * columns; }
};

struct Call {
  const void* x;  // [columns, k]
  int64_t x_stride;
  Dtype dtype;                           // of x, bias and y
  const float *signs, *channel_inverse;  // [group] and [k]; channel_inverse is null where channels have no scales
  const int8_t* levels;                  // [2^bits], of kLloyd
  const void* bias;                      // [n] or null
  void* y;                               // [columns, n]
  const uint8_t* packed;                 // [tiles of rows][groups][bytes of a block]
  int64_t columns, n;
  int groups, group;  // of a row; channels of each
};

// `count` things shared by several, each of whom gets `each` of them, and the first `rest` one more.
struct Share {
  int each, rest;

  Share() = default;
  // Unsigned division is faster.
  __host__ __device__ constexpr Share(int count, int of)
      : each(static_cast<int>(unsigned(count) / unsigned(of))), rest(count - each * of) {}
  __host__ __device__ constexpr int begin(int i) const { return each * i + (i < rest ? i : rest); }
  // Who gets thing i, if everybody gets one.
  __host__ __device__ constexpr int owner(int i) const {
    const int longer = rest * (each + 1);
    return i < longer ? static_cast<int>(unsigned(i) / unsigned(each + 1))
                      : rest + static_cast<int>(unsigned(i - longer) / unsigned(each));
  }
};

// What a thread block may do with weights before the previous kernel has ended.
enum class Early {
  kNo,       // nothing
  kRing,     // copy them into its ring
  kPrefetch  // bring them into the L2 cache, which will also see what the previous kernel writes
};

// How warps stream units (stream.cuh).
struct StreamPlan {
  RecordOfColumns record;  // of a block of columns
  int unit_bytes;
  bool has_subs;     // units have multipliers
  int chunk, slots;  // units of a copy; copies in flight, of a warp
  int ring, bytes;   // where the rings begin in shared memory, and all of it
  int ring_stride;   // bytes from the ring of a warp to that of the next
};

struct Plan : StreamPlan {
  uint8_t* records;  // [blocks of columns, groups, record.bytes()], written by quantise_columns; null: each
                     // block quantises what it needs
  int parts;         // thread blocks that share the channels of a row
  int row_blocks;    // thread blocks along the rows; the grid is [parts, row_blocks, blocks of columns]
  int slabs;         // of 16 rows, of the weight
  Share groups_of_part, slabs_of_block;
  int warps_k;            // warps that share a slab, where shares are not even
  int join, join_stride;  // where in shared memory a warp leaves sums of a slab that another begins; to the next warp
  Early early;
  float* partial;      // [parts, slabs, 32 lanes, 4 * tiles of columns]
  uint32_t* arrivals;  // [slabs], 0 between launches
};

constexpr int kWarps = 16;  // of the thread block that a multiprocessor has

// Registers that a thread may have. 112 leave room on the multiprocessor for a block that quantises activations for the
// next call, which is then there when this one ends; more than two tiles of columns need all.
constexpr int most_registers(int tiles) { return tiles <= 2 ? 112 : 128; }

// Whether warps have equal shares of their block's units, wherever a slab ends. Otherwise each has whole slabs or units
// of one: equal shares take memory for sums beside the rings, which only few columns leave. With four tiles of columns
// only devices with products of warpgroups were measured, which have 227 KB.
__host__ __device__ constexpr bool has_even_shares(int tiles, bool warpgroup_products) {
  return tiles <= (warpgroup_products ? 4 : 2);
}

constexpr int kMostSlots = 16;                         // of a warp
constexpr int kHeaderBytes = 8 * kWarps * kMostSlots;  // of shared memory, for the barriers of all warps

constexpr int kQuantiseWarps = 4;    // of a thread block of the kernel that quantises activations
constexpr int kPieceChannels = 128;  // that a warp quantises at a time
constexpr int kPiecesAtOnce = 2;

__host__ __device__ constexpr int quantise_pieces(int groups, int group) {
  return (groups * group + kPieceChannels - 1) / kPieceChannels;
}

}  // namespace turboquant::cuda::linear
