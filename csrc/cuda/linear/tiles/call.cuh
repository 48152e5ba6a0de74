// A call of linear_packed as the kernels of tiles see it, for devices with products of warpgroups.
//
// A tile is 32 to 256 tokens by 384 or 256 outputs, of which each of two thread blocks has half. Weights stay packed
// until they are operands in registers, float16:
//
//   operand = level * 2^-7 * (scale * M / 32) = 2^-3 * the decoded channel in the rotated space
//
// which is finite for every finite scale, and no less exact than bfloat16 for scales from 2^-13 on. Activations are
// rotated once and rounded to float16, each token with a power of two that brings its largest channel to 2^11 .. 2^12.
#pragma once

#include <cstdint>

#include "cuda/common/wgmma.cuh"
#include "cuda/linear/call.cuh"
#include "cuda/linear/pieces.cuh"
#include "dtype.h"
#include "format.h"

namespace turboquant::cuda::linear::tiles {

constexpr int kBlocks = 2;  // thread blocks of a cluster, a worker
// Warpgroups of a thread block that multiply tiles of so many tokens, as measured. Another one copies.
constexpr int warpgroups_of(int tokens) { return tokens <= 64 ? 3 : 2; }
constexpr int threads_of(int tokens) { return (warpgroups_of(tokens) + 1) * kWarpgroup; }
// Of a worker's tile: 64 outputs each, which a warpgroup multiplies.
constexpr int pieces_of(int tokens) { return kBlocks * warpgroups_of(tokens); }
// Of a thread block's half of a tile: 16 outputs each, which a warp multiplies.
constexpr int slabs_of(int tokens) { return 4 * warpgroups_of(tokens); }
constexpr int kChannels = 64, kRowBytes = 2 * kChannels;  // of an operand's row in shared memory
// Of the ring. All multiprocessors fill theirs at the same time, so more stages keep each of them waiting for its first
// slice.
constexpr int kMostStages = 5;
constexpr int kHeaderBytes = 1024;  // of shared memory: barriers, and the alignment of operands
constexpr float kOperandUnit = 8;   // of an operand of weights
constexpr int kLog2Largest = 11;    // of activations

struct Call {
  const uint8_t* packed;  // [tiles of rows][groups][bytes of a block]
  const int8_t* levels;   // [16], aligned to 16 bytes; null for the uniform grid and for codes that are levels
  const void* x;          // [tokens, k]
  int64_t x_stride;
  Dtype dtype;                           // of x, bias and y
  const float *signs, *channel_inverse;  // [group] and [k]; channel_inverse is null where channels have no scales
  const void* bias;                      // [n] or null
  void* y;                               // [tokens, n]
  int64_t tokens, n;
  int groups;  // of a row
  format::WeightBlock block;

  // Of linear_experts, whose column tiles are pieces: x is [tokens, k] all the same, y [pairs, n], packed and bias are
  // those of all experts.
  Pairs pairs{};
  Arrangement arranged{};
  int64_t weight_bytes = 0;  // of an expert

  __host__ __device__ bool has_experts() const { return pairs.count > 0; }
};

struct Plan {
  int tokens;                   // of a tile
  int row_tiles, column_tiles;  // of experts: the most column tiles that there are
  int stages, stage_bytes;      // of the ring in shared memory: a group of channels each
  int bytes;                    // of shared memory
  int workers;
  bool whole_tiles;    // none of them shares a tile
  Share slices;        // of the workers: groups of channels of all tiles; those of experts are known on the device
  uint8_t* operands;   // [column tiles][k / 64][tokens of a tile][128 bytes], swizzled (common/wgmma_swizzled.cuh)
  float* factors;      // [column tiles * tokens of a tile]: undo the power of two, and kOperandUnit
  float* partial;      // [workers, 2, pieces, sums of a warpgroup]
  uint32_t* arrivals;  // [workers, pieces]: at the tile that a worker begins; 0 between launches
};

}  // namespace turboquant::cuda::linear::tiles
