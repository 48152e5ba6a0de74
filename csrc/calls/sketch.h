// The projection of a sketch (docs/format.md section 10), checked: both backends' qjl ops and `score` need it.
//
// There are two kinds, told apart by their shape. Each has a scale of its own; to confuse them silently loses the
// estimate.
//   float32 [m, d], dense Gaussian entries:        estimate = sqrt(pi/2) / m * norm * sum of sign_i * (S q)_i
//   float32 [d], signs of an orthonormal rotation: estimate = sqrt(pi / (2 d)) * norm * sum of sign_i * (R q)_i
#pragma once

#include <cmath>

#include "checks.h"

namespace turboquant {

struct Projection {
  const float* data;  // [rows, d] or [d]
  bool dense;
  int64_t rows;  // m: bits of a sketch
  float factor;  // of the estimate

  // first: the first tensor of the call; d: of the vectors that are sketched
  Projection(const Tensor& t, const Tensor& first, int64_t d) {
    check_vector_dim(d, "the sketched vectors");
    check_defined(t, "projection");
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
  int64_t bytes() const { return rows / 8; }  // of a sketch
};

// Checks the stored sketches of the keys that `shape` describes, `bytes` each. sign_bits: uint8 [..., keys, bytes],
// norm: float32 [..., keys]
inline void check_sketch(const Tensor& sign_bits, const Tensor& norm, const Tensor& q, const ScoreShape& shape,
                         int64_t bytes) {
  check_beside(sign_bits, q, "sign_bits", ScalarType::Byte, 2, {shape.keys, bytes});
  check_beside(norm, q, "the residual norm", ScalarType::Float, 2, {shape.keys});
}

}  // namespace turboquant
