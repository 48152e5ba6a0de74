// qjl_sketch, qjl_score: sign bits of a projected residual, and inner products with them (the second stage of Algorithm
// 2 of the paper). docs/format.md section 10 fixes the bits.
#include "cpu/common/torch.h"
#include "cpu/score/queries.h"
#include "cpu/score/sketch.h"

namespace turboquant::cpu {
namespace {

// From this many vectors on, estimates gain more than panels of the projection cost.
constexpr int64_t kManyVectors = 16;

// A dense projection in panels, and the sketches of vectors that are estimated with them.
class SketchEstimates {
 public:
  SketchEstimates(const Projection& projection, format::Split split)
      : d_(static_cast<int64_t>(split.blocks) * split.block),
        panel_count_((projection.rows + kPanelRows - 1) / kPanelRows),
        panels_(panel_count_ * kPanelRows * d_ * kFloatBytes), bounds_(panel_count_ * kPanelRows * kFloatBytes),
        of_{projection.data, projection.rows, split, panels_.as<float>(), bounds_.as<float>()} {
    parallel_for(panel_count_, 1, [&](int64_t begin, int64_t end) { kernels().sketch_panels(of_, begin, end); });
  }

  // As many vectors at once as stay in a cache of middle size while the panels pass.
  int64_t vectors_at_once() const {
    constexpr int64_t kCacheBytes = 128 << 10;
    const int64_t fit = kCacheBytes / (d_ * kFloatBytes);
    return std::max<int64_t>(1, fit / kSketchVectors) * kSketchVectors;
  }

  // Vectors [begin, end) of `residual`. bits: [vectors, rows / 8], norm: [vectors]
  void sketch(const Tensor& residual, const Rows& rows, int64_t begin, int64_t end, uint8_t* bits, float* norm) const {
    const int64_t at_once = vectors_at_once();
    std::vector<float> x(at_once * d_), length(at_once);
    for (int64_t first = begin; first < end; first += at_once) {
      const int64_t count = std::min(at_once, end - first);
      for (int64_t i = 0; i < count; ++i) {
        float* vector = x.data() + i * d_;
        to_float(residual, rows(first + i), d_, vector);
        const Prescaled scaled = kernels().prescale(vector, of_.split);
        norm[first + i] = scaled.length * scaled.up;
        length[i] = scaled.length;
      }
      kernels().sketch_signs(of_, x.data(), length.data(), count, bits + first * of_.rows / 8);
    }
  }

 private:
  static constexpr int64_t kFloatBytes = sizeof(float);
  const int64_t d_, panel_count_;
  const Scratch panels_, bounds_;
  const SketchPanels of_;
};

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
  if (sketch.projection().dense && rows.count() >= kManyVectors) {
    const SketchEstimates estimates(sketch.projection(), sketch.split());
    parallel_for(rows.count(), kManyVectors,
                 [&](int64_t begin, int64_t end) { estimates.sketch(residual, rows, begin, end, bits_out, norm_out); });
    return {bits, norm};
  }
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
