// The 1-bit sketch (quantised Johnson-Lindenstrauss) of a residual and its inner-product estimator, which the qjl ops
// and `score` share. docs/format.md section 10 fixes the bits.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "calls/sketch.h"
#include "cpu/common/torch.h"
#include "cpu/common/vector.h"
#include "cpu/score/queries.h"

namespace turboquant::cpu {

// 2^e for |e| <= 126, exactly.
inline float power_of_two(int e) {
  const uint32_t bits = static_cast<uint32_t>(e + 127) << 23;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The exponent by which a vector is scaled before any sum of squares, so that nothing over- or underflows.
inline int prescale_exponent(float amax) {
  uint32_t bits;
  std::memcpy(&bits, &amax, sizeof bits);
  return std::clamp(static_cast<int>(bits >> 23 & 255) - 127, -100, 100);
}

// max |x|, or infinity when any channel is NaN or infinite.
inline float finite_amax(const float* x, int d) {
  float amax = 0;
  bool finite = true;
  for (int c = 0; c < d; ++c) {
    const float a = std::fabs(x[c]);
    finite &= a <= FLT_MAX;
    amax = a > amax ? a : amax;
  }
  return finite ? amax : INFINITY;
}

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
    const float amax = finite_amax(r, static_cast<int>(d_));
    if (!(amax <= FLT_MAX)) {
      std::memset(bits, 0, bytes());
      return NAN;
    }
    const int e = prescale_exponent(amax);
    const float down = power_of_two(-e);
    for (int64_t c = 0; c < d_; ++c) r[c] *= down;
    project(r, projected);
    kernels().sign_bits(projected, rows(), bits);
    float square;
    kernels().project(r, 1, split_, r, &square);
    return std::sqrt(square) * power_of_two(e);
  }

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
