// A call of linear_packed as the kernel of tiles sees it, for devices with products of warpgroups.
//
// A thread block computes a tile: 256 outputs of 64 or 128 tokens, or 128 outputs of 192 or 256. Weights stay packed
// until they are operands in registers, float16:
//
//   operand = level * 2^-7 * (scale * M / 32) = 2^-3 * the decoded channel in the rotated space
//
// which is finite for every finite scale, and no less exact than bfloat16 for scales from 2^-13 on. Activations are
// rotated once and rounded to float16, each token with a power of two that brings its largest channel to 2^11 .. 2^12.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "format.h"

namespace turboquant::cuda::linear::tiles {

// Slabs of 16 rows of a tile, each of which has a warp: so many that sums of all lanes fit in registers.
constexpr int slabs_of(int tokens) { return tokens > 128 ? 8 : 16; }
// Floats from a token's sums to the next one's, which avoid bank conflicts.
constexpr int sum_stride(int tokens) { return format::kWeightRows * slabs_of(tokens) + 4; }
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
  int parts;   // thread blocks, a cluster, that share the channels of a tile
  int column_tiles, row_tiles;
  int stages, stage_bytes;  // of the ring in shared memory: a group of channels each
  int bytes;                // of shared memory
  uint8_t* operands;        // [column tiles][k / 64][tokens of a tile][128 bytes], swizzled (common/wgmma_swizzled.cuh)
  float* factors;           // [tokens]: undo the power of two, and kOperandUnit
};

}  // namespace turboquant::cuda::linear::tiles
