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

constexpr int kTileColumns = 8;    // of a tensor-core product
constexpr int kMostColumns = 64;   // of a block
constexpr int kHalfChannels = 64;  // half a group of 128

// The activations of one group of channels, for all columns of a block: int8 [group / 64][columns][64] in the order of
// operands; float32 units of the columns; int32 corrections, by which sums over 32 channels or over the group begin: of
// each pair of columns (c, c + 1) four, for the columns c, c + 1, c, c + 1, as accumulators have them.
struct RecordOfColumns {
  int group, columns, corrections;

  // A pair has both of its columns; of several tiles the last one is complete.
  __host__ __device__ constexpr int padded() const {
    const int multiple = columns <= kTileColumns ? 2 : kTileColumns;
    return (columns + multiple - 1) / multiple * multiple;
  }
  __host__ __device__ constexpr int units() const { return group * columns; }
  __host__ __device__ constexpr int corrections_at() const { return units() + (4 * padded() + 15) / 16 * 16; }
  __host__ __device__ constexpr int correction_bytes() const { return 8 * padded(); }  // of one sum
  __host__ __device__ constexpr int bytes() const { return corrections_at() + corrections * correction_bytes(); }
};

struct Call {
  const void* x;  // [columns, k]
  int64_t x_stride;
  Dtype dtype;  // of x, bias and y
  const float *signs, *channel_inverse;
  const int8_t* levels;  // of kLloyd
  const void* bias;
  void* y;  // [columns, n]
  const uint8_t* packed;
  int64_t columns, n;
  int groups, group;  // of a row; channels of each
};

// When a block may read weights that precede the end of the previous kernel.
enum class Early { kNo, kRing, kPrefetch };

struct Plan {
  RecordOfColumns record;  // of a block of columns
  uint8_t* records;        // [blocks of columns, groups, record.bytes()], written by quantise_columns; null: each
                           // block quantises what it needs
  int unit_bytes;
  int per_multiprocessor;  // thread blocks at a time
  int parts;               // thread blocks that share the channels of a row
  int row_blocks;          // thread blocks along the rows; the grid has parts * row_blocks
  int slabs;               // of 16 rows, of the weight
  int warps_k;             // warps that share the channels of a slab within a thread block
  int warps_rows;          // slabs of a thread block at a time
  int chunk, slots;        // units of a copy; copies in flight, of a warp
  int ring, bytes;         // where the rings begin in shared memory, and all of it
  Early early;
  float* partial;      // [parts, slabs, 32 lanes, 4 * tiles of columns]
  uint32_t* arrivals;  // [slabs], 0 between launches
};

constexpr int kMostSlots = 16;                         // of a warp
constexpr int kWarps = 16;                             // of a thread block
constexpr int kHeaderBytes = 8 * kWarps * kMostSlots;  // of shared memory: barriers

// Of the kernel with so many tiles of columns: as many as have the registers that they need.
constexpr int blocks_per_multiprocessor(int tiles) { return tiles == 1 ? 2 : 1; }

constexpr int kQuantiseWarps = 4;  // of a thread block of the kernel that quantises activations

// Warps that quantise a column: 1,024 channels each.
__host__ __device__ constexpr int quantise_spans(int groups, int group) { return (groups * (group / 32) + 31) / 32; }

}  // namespace turboquant::cuda::linear
