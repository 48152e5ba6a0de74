// qjl_sketch, qjl_score: sign bits of a projected residual, and inner products with them (the second stage of Algorithm
// 2 of the paper). docs/format.md section 10 fixes the bits.
#include "cpu/common/torch.h"
#include "cpu/score/queries.h"
#include "cpu/score/sketch.h"

namespace turboquant::cpu {
namespace {

// residual: [..., d] float, stride 1 in the last dimension -> sign_bits uint8 [..., m / 8], norm float32 [...]
std::tuple<Tensor, Tensor> qjl_sketch(const Tensor& residual, const Tensor& projection) {
  check_float(residual, "residual");
  check_unit_last_stride(residual, "residual");
  const int64_t d = residual.size(residual.dim() - 1);
  const Sketch sketch(projection, residual, d);

  Tensor bits = new_tensor(residual, leading_shape(residual, 1, {sketch.bytes()}), ScalarType::Byte);
  Tensor norm = new_tensor(residual, leading_shape(residual, 1, {}), ScalarType::Float);
  uint8_t* bits_out = data_of<uint8_t>(bits);
  float* norm_out = data_of<float>(norm);
  const Rows rows(residual);
  parallel_for(rows.count(), 8, [&](int64_t begin, int64_t end) {
    std::vector<float> r(d), projected(sketch.rows());
    for (int64_t i = begin; i < end; ++i) {
      to_float(residual, rows(i), d, r.data());
      norm_out[i] = sketch.sketch(r.data(), bits_out + i * sketch.bytes(), projected.data());
    }
  });
  return {bits, norm};
}

// q: [..., queries, d], sign_bits: uint8 [..., keys, m / 8], norm: float32 [..., keys] -> float32 [..., queries, keys]
Tensor qjl_score(const Tensor& q, const Tensor& sign_bits, const Tensor& norm, const Tensor& projection) {
  const ScoreShape shape = checked_score_shape(q, sign_bits, "sign_bits");
  const int64_t d = q.size(q.dim() - 1);
  const Sketch sketch(projection, q, d);
  check_sketch(sign_bits, norm, q, shape, sketch.bytes());

  Tensor out = new_tensor(q, shape.out, ScalarType::Float);
  float* to = data_of<float>(out);
  const DenseRows keys = sketch_rows(sketch, sign_bits, norm);
  const Rows rows(q);
  struct Worker {
    const Tensor& q;
    const Rows& rows;
    const ScoreShape& shape;
    float* out;
    int64_t d;
    SketchQueries integers;
    std::vector<float> plain;

    void prepare(int64_t b, int64_t first, int64_t count) {
      load_queries(q, rows, shape, b, first, count, d, plain.data());
      for (int64_t i = 0; i < count; ++i) integers.set(i, plain.data() + i * d);
    }
    void score(int64_t b, int64_t first, int64_t count, int64_t begin, int64_t end) {
      integers.score(count, b * shape.keys + begin, b * shape.keys + end, scores_of(shape, out, b, first, false));
    }
  };
  for_score_blocks(shape, keys.row_bytes, sketch.query_bytes(), [&] {
    return Worker{
        q, rows, shape, to, d, SketchQueries(sketch, keys, shape), std::vector<float>(queries_at_once(shape) * d)};
  });
  return out;
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) {
  m.impl("qjl_sketch", TORCH_BOX(&turboquant::cpu::qjl_sketch));
  m.impl("qjl_score", TORCH_BOX(&turboquant::cpu::qjl_score));
}
