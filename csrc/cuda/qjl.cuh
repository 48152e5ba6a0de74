// The projection of a sketch as the qjl and score ops take it (docs/format.md section 10), checked.
//
// Two kinds, told apart by their shape, each with its own scale (confusing them silently loses the estimate):
//   float32 [m, d], dense Gaussian entries:        estimate = sqrt(pi/2) / m * norm * sum of sign_i * (S q)_i
//   float32 [d], signs of an orthonormal rotation: estimate = sqrt(pi / (2 d)) * norm * sum of sign_i * (R q)_i
#pragma once

#include <cmath>

#include "tensors.cuh"

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

}  // namespace turboquant::cuda
