// A call of score: its arguments and their checks, which both backends share.
#pragma once

#include "calls/boxed.h"
#include "checks.h"

namespace turboquant {

// The arguments of score in the order of its schema (csrc/ops.cpp).
struct ScoreCall {
  Tensor q;               // [..., queries, d], stride 1 in d
  Tensor packed;          // uint8 [..., keys, row_bytes]
  Tensor scale;           // float16 [..., keys]
  Tensor signs;           // float32 [d]
  OptionalTensor levels;  // int8 [2^bits]; absent: the uniform grid
  int64_t bits;
  OptionalTensor center;         // float32 [d] or [3, d]
  OptionalTensor sign_bits;      // uint8 [..., keys, m / 8], of the residual's sketch
  OptionalTensor residual_norm;  // float32 [..., keys]
  OptionalTensor projection;     // as in calls/sketch.h

  int64_t d() const { return signs.size(0); }
};

// Checks all but the sketch, without reading values.
inline ScoreShape check_score(const ScoreCall& c) {
  check_codec_bits(c.bits);
  const ScoreShape shape = checked_score_shape(c.q, c.packed, "packed");
  check_device(c.packed, c.q, "packed");
  const int64_t d = check_dense_vectors(c.packed, c.scale, c.signs, c.bits);
  check_levels(c.levels, c.packed, c.bits, "levels");
  STD_TORCH_CHECK(c.q.size(c.q.dim() - 1) == d, "q has shape ", shape_text(c.q), ", expected [..., ", d,
                  "] as signs say");
  check_center(c.center, c.q, d);
  const bool sketched = c.projection.has_value();
  STD_TORCH_CHECK(c.sign_bits.has_value() == sketched && c.residual_norm.has_value() == sketched,
                  "sign_bits, residual_norm and projection come together or not at all");
  return shape;
}

}  // namespace turboquant
