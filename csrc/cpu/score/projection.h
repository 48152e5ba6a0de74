// The 1-bit sketch (quantised Johnson-Lindenstrauss) of a residual and its inner-product estimator: what both the qjl ops
// and `score` need. docs/format.md section 10 fixes the bits.
//
// Two projections, told apart by their shape, each with its own scale (confusing them silently loses the estimate):
//   float32 [m, d], dense Gaussian entries:      estimate = sqrt(pi/2) / m * norm * sum of sign_i * (S q)_i
//   float32 [d], signs of an orthonormal rotation: estimate = sqrt(pi / (2 d)) * norm * sum of sign_i * (R q)_i
#pragma once

#include "cpu/codec/codebook.h"
#include "cpu/common/torch.h"
#include "cpu/score/queries.h"

namespace turboquant::cpu {

class Sketch {
 public:
  Sketch(const Tensor& projection, const Tensor& first, int64_t d)
      : d_(d), split_(check_vector_dim(d, "the sketched vectors")) {
    const bool dense = projection.dim() == 2;
    STD_TORCH_CHECK(dense || projection.dim() == 1, "projection has shape ", shape_text(projection),
                    ", supported: [m, d] (dense Gaussian) or [d] (signs of a structured one)");
    if (dense) {
      check_constant(projection, first, "projection", ScalarType::Float, {-1, d});
    } else {
      check_constant(projection, first, "projection", ScalarType::Float, {d});
    }
    m_ = projection.size(0);
    STD_TORCH_CHECK(m_ >= 8 && m_ % 8 == 0, "projection has ", m_, " rows, supported: multiples of 8");
    (dense ? matrix_ : signs_) = static_cast<const float*>(projection.data_ptr());
    constexpr double kPi = 3.14159265358979323846;
    factor_ = static_cast<float>(dense ? std::sqrt(kPi / 2) / m_ : std::sqrt(kPi / (2.0 * d)));
  }

  int64_t rows() const { return m_; }
  int64_t bytes() const { return m_ / 8; }
  float factor() const { return factor_; }
  // for_score_blocks' query_bytes
  int64_t query_bytes() const { return 64 * (d_ + m_) + (matrix_ ? m_ * d_ / 2 : 0); }

  // x: [d] -> out: [m]. Each dense row is summed by the fixed tree, so sketches are the same on every device.
  void project(const float* x, float* out) const {
    if (matrix_) return kernels().project(matrix_, m_, split_, x, out);
    std::memcpy(out, x, d_ * sizeof(float));
    rotate(out, signs_, split_);
  }

  // r: [d], destroyed -> bits: [bytes()]; returns the norm. projected: [m], work space.
  float sketch(float* r, uint8_t* bits, float* projected) const {
    const float amax = finite_amax(r, static_cast<int>(d_));
    if (!(amax <= FLT_MAX)) {
      std::memset(bits, 0, bytes());
      return NAN;
    }
    const int e = prescale_exponent(amax);
    const float down = power_of_two(-e);
    for (int64_t c = 0; c < d_; ++c) r[c] *= down;
    project(r, projected);
    kernels().sign_bits(projected, m_, bits);
    float square;
    kernels().project(r, 1, split_, r, &square);
    return std::sqrt(square) * power_of_two(e);
  }

 private:
  const float* matrix_ = nullptr;  // [m, d], dense
  const float* signs_ = nullptr;   // [d], structured
  int64_t m_ = 0, d_;
  format::Split split_;
  float factor_ = 0;
};

// Sign bits as rows of 1-bit codes with the levels -1 and 1 and the lengths as their scales.
inline DenseRows sketch_rows(const Sketch& sketch, const Tensor& sign_bits, const Tensor& norm) {
  DenseRows rows{};
  rows.rows = static_cast<const uint8_t*>(sign_bits.data_ptr());
  rows.row_bytes = sketch.bytes();
  rows.end = rows.rows + sign_bits.numel();
  rows.d = static_cast<int>(sketch.rows());
  rows.layout = dense_layout(1);
  rows.levels[0] = -1;
  rows.levels[1] = 1;
  rows.scale = static_cast<const float*>(norm.data_ptr());
  return rows;
}

// The queries of one thread's work, projected.
class SketchQueries {
 public:
  SketchQueries(const Sketch& sketch, const DenseRows& keys, const ScoreShape& shape)
      : sketch_(sketch), keys_(keys), queries_(queries_at_once(shape), sketch.rows(), keys.layout, 1),
        projected_(sketch.rows()), scratch_(16 * keys.row_bytes + 64) {}

  void set(int64_t i, const float* q) {
    sketch_.project(q, projected_.data());
    queries_.set(i, projected_.data(), sketch_.factor(), 0);
  }
  // The first `count` queries and keys [begin, end), which are counted over all batch entries.
  void score(int64_t count, int64_t begin, int64_t end, const Scores& out) {
    kernels().score_rows(keys_, begin, end, queries_.first(count), out, scratch_.data());
  }

 private:
  const Sketch& sketch_;
  const DenseRows& keys_;
  IntegerQueries queries_;
  std::vector<float> projected_;
  std::vector<uint8_t> scratch_;
};

}  // namespace turboquant::cpu
