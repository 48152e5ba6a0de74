// The 1-bit sketch (quantised Johnson-Lindenstrauss) of a residual and its inner-product estimator, which the qjl ops
// and `score` share. docs/format.md section 10 fixes the bits.
#pragma once

#include <cmath>
#include <cstring>

#include "calls/sketch.h"
#include "cpu/common/torch.h"
#include "cpu/common/vector.h"
#include "cpu/score/queries.h"

namespace turboquant::cpu {

class Sketch {
 public:
  // As Projection (calls/sketch.h)
  Sketch(const Tensor& projection, const Tensor& first, int64_t d)
      : projection_(projection, first, d), d_(d), split_(format::split_dim(d)) {
    if (!projection_.dense) checked_signs(projection, "projection");
  }

  int64_t rows() const { return projection_.rows; }
  int64_t bytes() const { return projection_.bytes(); }
  float factor() const { return projection_.factor; }
  // As for_score_blocks takes it.
  int64_t query_bytes() const { return 64 * (d_ + rows()) + (projection_.dense ? rows() * d_ / 2 : 0); }

  // x: [d] -> out: [rows]. Each dense row is summed by the fixed tree, so sketches are the same on every device.
  void project(const float* x, float* out) const {
    if (projection_.dense) return kernels().project(projection_.data, rows(), split_, x, out);
    std::memcpy(out, x, d_ * sizeof(float));
    rotate(out, projection_.data, split_);
  }

  // r: [d], destroyed -> bits: [bytes()]. Returns the norm. projected: [rows], work space.
  float sketch(float* r, uint8_t* bits, float* projected) const {
    const Prescaled scaled = kernels().prescale(r, split_);
    if (std::isnan(scaled.length)) {
      std::memset(bits, 0, bytes());
    } else {
      project(r, projected);
      kernels().sign_bits(projected, rows(), bits);
    }
    return scaled.length * scaled.up;
  }

  const Projection& projection() const { return projection_; }
  format::Split split() const { return split_; }

 private:
  Projection projection_;
  int64_t d_;
  format::Split split_;
};

// Sign bits are rows of 1-bit codes, whose levels are -1 and 1 and whose scales are the lengths of the residuals.
inline DenseRows sketch_rows(const Sketch& sketch, const Tensor& sign_bits, const Tensor& norm) {
  const auto* rows = data_of<uint8_t>(sign_bits);
  return {.rows = rows,
          .row_bytes = sketch.bytes(),
          .end = rows + sign_bits.numel(),
          .d = static_cast<int>(sketch.rows()),
          .width = format::Width::k1,
          .levels = {-1, 1},
          .half_scale = nullptr,
          .scale = data_of<float>(norm)};
}

// The projected queries of one thread.
class SketchQueries {
 public:
  SketchQueries(const Sketch& sketch, const DenseRows& keys, const ScoreShape& shape)
      : sketch_(sketch), keys_(keys), queries_(queries_at_once(shape), sketch.rows(), dense_layout(keys.width), 1),
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
