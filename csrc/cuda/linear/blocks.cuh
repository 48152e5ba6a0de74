// Blocks of a weight (docs/format.md section 13) in shared memory, for the ops that write or read codes one by one. A
// thread block takes a block of the weight, and a warp two of its rows.
#pragma once

#include "cuda/codec/generic.cuh"

namespace turboquant::cuda {

constexpr int kBlockWarps = 8, kBlockThreads = 32 * kBlockWarps;
constexpr int kMostGroup = 128, kMostSubs = kMostGroup / format::kSubChannels;
constexpr int kMostBlockBytes = format::WeightBlock{kMostGroup, format::num_bits(Width::k8), 0}.block_bytes();

struct WeightBlocks {
  format::WeightBlock block;
  int64_t n;
  int groups;

  __device__ __forceinline__ int64_t tile() const { return int64_t{blockIdx.x} / groups; }
  __device__ __forceinline__ int group() const { return static_cast<int>(int64_t{blockIdx.x} % groups); }
  // The row of the weight that is a row of this thread block's block; it is n or more in the rest of the last tile.
  __device__ __forceinline__ int64_t row(int inside) const { return tile() * format::kWeightRows + inside; }
  __device__ __forceinline__ int64_t vector(int inside) const { return row(inside) * groups + group(); }
};
// Of a checked call: Shape is the WeightShape of its checks, whose header kernels do not include.
template <typename Shape>
WeightBlocks blocks_of(const Shape& shape) {
  return {shape.block, shape.n, static_cast<int>(shape.groups())};
}

// A block taken apart. Rows that the weight does not have are zero.
struct SharedRows {
  alignas(16) uint8_t codes[format::kWeightRows][kMostGroup];
  uint16_t scale[format::kWeightRows];
  uint8_t multipliers[format::kWeightRows][kMostSubs];
};

__device__ __forceinline__ void clear_rows(SharedRows& rows, int thread) {
  static_assert(sizeof rows % 4 == 0);
  for (int i = thread; i < static_cast<int>(sizeof rows / 4); i += kBlockThreads) {
    reinterpret_cast<uint32_t*>(&rows)[i] = 0;
  }
}

// Puts rows into the bytes of a block, and takes them out. The caller synchronises before and after. Four channels that
// are neighbours share two bytes, or have one each; no two threads write a byte.
__device__ __forceinline__ void put_rows(const SharedRows& rows, const format::WeightBlock& b, uint8_t* bytes,
                                         int thread) {
  const int quads = b.group / 4;
  for (int i = thread; i < format::kWeightRows * quads; i += kBlockThreads) {
    const int row = i / quads, c = 4 * (i % quads);
    const uint8_t* code = rows.codes[row] + c;
    uint8_t* to = bytes + b.code(row, c).piece[0].byte;
    if (format::levels_are_codes(b.width())) {
#pragma unroll
      for (int k = 0; k < 4; ++k) to[k] = code[k];
    } else {
      to[0] = (code[0] & 15) | code[1] << 4, to[1] = (code[2] & 15) | code[3] << 4;
    }
  }
  if (thread >= format::kWeightRows) return;
  uint8_t* scale = bytes + b.scale(thread);
  scale[0] = static_cast<uint8_t>(rows.scale[thread]), scale[1] = static_cast<uint8_t>(rows.scale[thread] >> 8);
  for (int s = 0; s < b.subs(); s += 2) {
    const uint8_t* m = rows.multipliers[thread] + s;
    bytes[b.multiplier_code(thread, s).piece[0].byte] = (m[0] & 15) | m[1] << 4;
  }
}
__device__ __forceinline__ void take_rows(SharedRows& rows, const format::WeightBlock& b, const uint8_t* bytes,
                                          int thread) {
  const int quads = b.group / 4;
  for (int i = thread; i < format::kWeightRows * quads; i += kBlockThreads) {
    const int row = i / quads, c = 4 * (i % quads);
    const uint8_t* from = bytes + b.code(row, c).piece[0].byte;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      rows.codes[row][c + k] = format::levels_are_codes(b.width()) ? from[k] : from[k / 2] >> k % 2 * 4 & 15;
    }
  }
  if (thread >= format::kWeightRows) return;
  const uint8_t* scale = bytes + b.scale(thread);
  rows.scale[thread] = scale[0] | scale[1] << 8;
  for (int s = 0; s < b.subs(); ++s) {
    rows.multipliers[thread][s] = static_cast<uint8_t>(format::read_code(bytes, b.multiplier_code(thread, s)));
  }
}

}  // namespace turboquant::cuda
