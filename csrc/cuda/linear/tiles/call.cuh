// A call of linear_packed as the kernels of tiles see it, for devices with products of warpgroups.
//
// Up to 128 tokens, a thread block computes a tile of 256 outputs of 64 or 128 tokens (kernel.cuh). More tokens are
// multiplied in tiles of 128 outputs of 160 to 256 tokens (stream_k.cuh). Weights stay packed until they are operands
// in registers, float16:
//
//   operand = level * 2^-7 * (scale * M / 32) = 2^-3 * the decoded channel in the rotated space
//
// which is finite for every finite scale, and no less exact than bfloat16 for scales from 2^-13 on. Activations are
// rotated once and rounded to float16, each token with a power of two that brings its largest channel to 2^11 .. 2^12.
#pragma once

#include <cstdint>

#include "cuda/common/wgmma.cuh"
#include "cuda/linear/call.cuh"
#include "dtype.h"
#include "format.h"

namespace turboquant::cuda::linear::tiles {

// Whether tiles of so many tokens are those of stream_k.cuh.
constexpr bool in_streams(int tokens) { return tokens > 128; }
// A slab is 16 rows of a tile, which a warp multiplies: so many that sums of all lanes fit in registers.
constexpr int kTileSlabs = 16, kStreamSlabs = 8;
constexpr int slabs_of(int tokens) { return in_streams(tokens) ? kStreamSlabs : kTileSlabs; }
constexpr int kTileThreads = 32 * kTileSlabs;
constexpr int kStreamBlocks = 2;      // thread blocks of a cluster, a worker
constexpr int kStreamWarpgroups = 2;  // that multiply, of a thread block; another one copies
constexpr int kStreamThreads = (kStreamWarpgroups + 1) * kWarpgroup;
constexpr int kStreamQuarters = kStreamBlocks * kStreamWarpgroups;  // of a worker's tile, 64 outputs each
// Floats from a token's sums to the next one's, which avoid bank conflicts.
constexpr int kSumStride = format::kWeightRows * kTileSlabs + 4;
constexpr int kChannels = 64, kRowBytes = 2 * kChannels;  // of an operand's row in shared memory
constexpr int kMostParts = 8;                             // thread blocks of a cluster on every device
constexpr int kMostStages = 16;
constexpr int kHeaderBytes = 1024;  // of shared memory: barriers, and the alignment of operands
constexpr float kOperandUnit = 8;   // of an operand of weights
constexpr int kLog2Largest = 11;    // of activations

struct Call {
  const uint8_t* packed;
  const int8_t* levels;  // [16], aligned to 16 bytes; null for the uniform grid and for codes that are levels
  const void* x;         // [tokens, k]
  int64_t x_stride;
  Dtype dtype;  // of x, bias and y
  const float *signs, *channel_inverse;
  const void* bias;
  void* y;  // [tokens, n]
  int64_t tokens, n;
  int groups;  // of a row
  format::WeightBlock block;
};

struct Plan {
  int tokens;  // of a tile
  int column_tiles, row_tiles;
  int stages, stage_bytes;  // of the ring in shared memory: a group of channels each
  int bytes;                // of shared memory
  int parts;                // thread blocks, a cluster, that share the channels of a tile of kernel.cuh
  int workers;              // of stream_k.cuh
  bool whole_tiles;         // none of them shares a tile
  Share slices;             // of the workers: groups of channels of all tiles
  uint8_t* operands;        // [column tiles][k / 64][tokens of a tile][128 bytes], swizzled (common/wgmma_swizzled.cuh)
  float* factors;           // [column tiles * tokens of a tile]: undo the power of two, and kOperandUnit
  float* partial;           // [workers, 2, kStreamQuarters, sums of a warpgroup]
  uint32_t* arrivals;       // [workers, kStreamQuarters]: at the tile that a worker begins; 0 between launches
};

}  // namespace turboquant::cuda::linear::tiles
