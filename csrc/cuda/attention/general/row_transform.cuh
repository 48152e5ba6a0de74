// The transform of docs/format.md section 2 for float32 rows in shared memory, by one warp. Rows of any d that the
// format allows take this way; where d is a compile-time constant, codec/transform.cuh keeps them in registers.
#pragma once

#include <cuda_runtime.h>

#include "format.h"

namespace turboquant::cuda::general {

// Calls fn(row, word) for all words of all rows; neighbouring lanes have neighbouring words. Where a row has fewer
// words than a warp has lanes, the lanes divide into several rows.
template <typename Fn>
__device__ __forceinline__ void for_each_word(int rows, int words, int lane, Fn&& fn) {
  const int at_once = words < 32 ? 32 / words : 1, first = words < 32 ? lane % words : lane;
  const int row = words < 32 ? lane / words : 0;
  if (row >= at_once) return;
  for (int r = row; r < rows; r += at_once) {
    for (int w = first; w < words; w += 32) fn(r, w);
  }
}

__device__ __forceinline__ void load_shared(const float* x, float (&y)[8]) {
  const float4 low = reinterpret_cast<const float4*>(x)[0], high = reinterpret_cast<const float4*>(x)[1];
  y[0] = low.x, y[1] = low.y, y[2] = low.z, y[3] = low.w, y[4] = high.x, y[5] = high.y, y[6] = high.z, y[7] = high.w;
}
__device__ __forceinline__ void store_shared(const float (&y)[8], float* x) {
  reinterpret_cast<float4*>(x)[0] = make_float4(y[0], y[1], y[2], y[3]);
  reinterpret_cast<float4*>(x)[1] = make_float4(y[4], y[5], y[6], y[7]);
}

// rows: [count, stride]. In place, without signs and without the factor 1 / sqrt(split.block). hartley: row 1 of the
// odd factor's matrix, format::hartley(split.blocks, 0 ..)
__device__ __forceinline__ void transform_rows(float* rows, int stride, int count, format::Split split,
                                               const float* hartley, int lane) {
  const int d = split.blocks * split.block;
  for_each_word(count, d / 8, lane, [&](int r, int o) {
    float y[8];
    load_shared(rows + r * stride + 8 * o, y);
#pragma unroll
    for (int h = 1; h < 8; h *= 2) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if ((i & h) == 0) {
          const float p = y[i], q = y[i + h];
          y[i] = p + q, y[i + h] = p - q;
        }
      }
    }
    store_shared(y, rows + r * stride + 8 * o);
  });
#pragma unroll 1
  for (int h = 2; 4 * h < split.block; h *= 2) {  // in words of four channels
    __syncwarp();
    for_each_word(count, d / 8, lane, [&](int r, int w) {
      float4* low = reinterpret_cast<float4*>(rows + r * stride) + ((w & -h) * 2 + (w & (h - 1)));
      const float4 p = low[0], q = low[h];
      low[0] = make_float4(p.x + q.x, p.y + q.y, p.z + q.z, p.w + q.w);
      low[h] = make_float4(p.x - q.x, p.y - q.y, p.z - q.z, p.w - q.w);
    });
  }
  __syncwarp();
  if (split.blocks == 1) return;
  for_each_word(count, split.block, lane, [&](int r, int i) {
    float* y = rows + r * stride + i;
    float in[format::kMaxBlocks];
#pragma unroll
    for (int j = 0; j < format::kMaxBlocks; ++j) in[j] = j < split.blocks ? y[j * split.block] : 0;
#pragma unroll 1
    for (int b = 0; b < split.blocks; ++b) {
      float sum = 0;
      int entry = 0;
#pragma unroll
      for (int j = 0; j < format::kMaxBlocks; ++j) {
        sum += hartley[entry] * in[j];
        entry += b;
        if (entry >= split.blocks) entry -= split.blocks;
      }
      y[b * split.block] = sum;
    }
  });
  __syncwarp();
}

}  // namespace turboquant::cuda::general
