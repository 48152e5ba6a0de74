// The projection of a sketch (docs/format.md section 10), checked, and a transform for vectors of any size;
// qjl_sketch, score and qjl_score share them.
//
// The two kinds of projections differ in their shape, and each has its own scale. With the other one's scale the
// estimate would be wrong without any error:
//   float32 [m, d], dense Gaussian entries:        estimate = sqrt(pi/2) / m * norm * sum of sign_i * (S q)_i
//   float32 [d], signs of an orthonormal rotation: estimate = sqrt(pi / (2 d)) * norm * sum of sign_i * (R q)_i
#pragma once

#include <cmath>

#include "cuda/common/torch.cuh"
#include "format.h"

namespace turboquant::cuda {

struct Projection {
  const float* data;  // [m, d] or [d]
  bool dense;
  int64_t rows;  // m: bits of a sketch
  float factor;  // of the estimate

  Projection(const Tensor& t, const Tensor& first, int64_t d) {
    check_vector_dim(d, "the sketched vectors");
    dense = t.dim() == 2;
    STD_TORCH_CHECK(dense || t.dim() == 1, "projection has shape ", shape_text(t),
                    ", supported: [m, d] (dense Gaussian) or [d] (signs of a structured one)");
    if (dense) {
      check_constant(t, first, "projection", ScalarType::Float, {-1, d});
    } else {
      check_constant(t, first, "projection", ScalarType::Float, {d});
    }
    rows = t.size(0);
    STD_TORCH_CHECK(rows >= 8 && rows % 8 == 0, "projection has ", rows, " rows, supported: multiples of 8");
    data = static_cast<const float*>(t.data_ptr());
    constexpr double kPi = 3.14159265358979323846;
    factor = static_cast<float>(dense ? std::sqrt(kPi / 2) / static_cast<double>(rows)
                                      : std::sqrt(kPi / (2.0 * static_cast<double>(d))));
  }
  int64_t bytes() const { return rows / 8; }
};

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
