// The transform of vectors of any size in shared memory, which qjl_sketch, score and qjl_score share.
#pragma once

#include "format.h"

namespace turboquant::cuda {

// core(y) of docs/format.md section 2 in shared memory, by one warp, in the order of operations that the format says:
// slow, but the same code for every d.
__device__ inline void transform_shared(float* y, format::Split split, int lane) {
  const int m = split.blocks, n = split.block, d = m * n;
#pragma unroll 1
  for (int h = 1; h < n; h *= 2) {
    __syncwarp();
#pragma unroll 2
    for (int i = lane; i < d / 2; i += 32) {
      const int low = 2 * i - (i & (h - 1));
      const float p = y[low], q = y[low + h];
      y[low] = __fadd_rn(p, q), y[low + h] = __fsub_rn(p, q);
    }
  }
  __syncwarp();
  const float norm = __fsqrt_rn(__frcp_rn(static_cast<float>(n)));  // float32(1 / sqrt(n)): 1 / n is exact
#pragma unroll 4
  for (int c = lane; c < d; c += 32) y[c] = __fmul_rn(y[c], norm);
  __syncwarp();
  if (m == 1) return;
#pragma unroll 1
  for (int i = lane; i < n; i += 32) {
    float in[format::kMaxBlocks];
#pragma unroll 1
    for (int j = 0; j < m; ++j) in[j] = y[j * n + i];
#pragma unroll 1
    for (int b = 0; b < m; ++b) {
      float sum = __fmul_rn(format::hartley(m, 0), in[0]);
#pragma unroll 1
      for (int j = 1; j < m; ++j) sum = __fadd_rn(sum, __fmul_rn(format::hartley(m, b * j % m), in[j]));
      y[b * n + i] = sum;
    }
  }
  __syncwarp();
}

}  // namespace turboquant::cuda
