// score: attention scores straight from packed standalone vectors. The query is rotated once; keys are never rotated back:
// <q, key> = <R q, scale / 32 * levels> + <q, center>, plus the sketch's estimate of the residual when there is one.
#include <optional>

#include "dense.h"
#include "qjl.h"
#include "queries.h"

namespace turboquant::cpu {
namespace {

DenseRows dense_rows(const DenseVectors& v, const Tensor& packed) {
  DenseRows rows{};
  rows.rows = v.packed;
  rows.row_bytes = v.row_bytes;
  rows.end = v.packed + packed.numel();
  rows.d = static_cast<int>(v.d);
  rows.layout = dense_layout(v.bits);
  for (int code = 0; v.bits < 8 && code < 1 << v.bits; ++code) {
    rows.levels[code] = static_cast<int8_t>(format::level_of_code(v.bits, v.levels, code));
  }
  rows.half_scale = v.scale;
  return rows;
}

// Greatest absolute value of what a code can mean; at 8 bits also of the byte 0x80, which is never written.
int max_level(const DenseRows& rows, int bits) { return bits == 8 ? 128 : rows.levels[(1 << bits) - 1]; }

// One thread's share: the queries at hand, rotated, and projected if there is a sketch.
class Worker {
 public:
  Worker(const Tensor& q, const Rows& rows, const ScoreShape& shape, const DenseVectors& vectors, const DenseRows& keys,
         const float* center, const Sketch* sketch, const DenseRows& signs, float* out)
      : q_(q), rows_(rows), shape_(shape), vectors_(vectors), keys_(keys), center_(center), out_(out),
        integers_(queries_at_once(shape), vectors.d, keys.layout, max_level(keys, vectors.bits)),
        queries_(queries_at_once(shape) * vectors.d), scratch_(16 * keys.row_bytes + 64) {
    if (sketch) sketch_.emplace(*sketch, signs, shape);
  }

  void prepare(int64_t b, int64_t first, int64_t count) {
    const int64_t d = vectors_.d;
    load_queries(q_, rows_, shape_, b, first, count, d, queries_.data());
    for (int64_t i = 0; i < count; ++i) {
      float* query = queries_.data() + i * d;
      const float shift = center_ ? dot(query, center_, d) : 0;
      if (sketch_) sketch_->set(i, query);
      rotate(query, vectors_.signs, vectors_.split);
      integers_.set(i, query, format::kLevelUnit, shift);
    }
  }

  void score(int64_t b, int64_t first, int64_t count, int64_t begin, int64_t end) {
    const int64_t from = b * shape_.keys + begin, to = b * shape_.keys + end;
    kernels().score_rows(keys_, from, to, integers_.first(count), scores_of(shape_, out_, b, first, false),
                         scratch_.data());
    if (sketch_) sketch_->score(count, from, to, scores_of(shape_, out_, b, first, true));
  }

 private:
  const Tensor& q_;
  const Rows& rows_;
  const ScoreShape& shape_;
  const DenseVectors& vectors_;
  const DenseRows& keys_;
  const float* center_;  // [d] or null
  float* out_;           // [batch, queries, keys]
  IntegerQueries integers_;
  std::optional<SketchQueries> sketch_;
  std::vector<float> queries_;  // [queries at once, d]
  std::vector<uint8_t> scratch_;
};

// q: [..., queries, d], packed: uint8 [..., keys, row_bytes], scale: float16 [..., keys], center: float32 [d],
// sign_bits: uint8 [..., keys, m / 8], residual_norm: float32 [..., keys], projection as in qjl.h -> float32 [..., queries, keys]
Tensor score(const Tensor& q, const Tensor& packed, const Tensor& scale, const Tensor& signs,
             const OptionalTensor& levels, int64_t bits, const OptionalTensor& center, const OptionalTensor& sign_bits,
             const OptionalTensor& residual_norm, const OptionalTensor& projection) {
  check_codec_bits(bits);
  const ScoreShape shape = checked_score_shape(q, packed, "packed");
  check_device(packed, q, "packed");
  const DenseVectors keys = checked_dense_vectors(packed, scale, signs, levels, bits);
  const int64_t d = keys.d;
  STD_TORCH_CHECK(q.size(q.dim() - 1) == d, "q has shape ", shape_text(q), ", expected [..., ", d, "] as signs say");
  if (center) check_constant(*center, q, "center", ScalarType::Float, {d});
  const float* mean = center ? static_cast<const float*>(center->data_ptr()) : nullptr;
  const bool sketched = projection.has_value();
  STD_TORCH_CHECK(sign_bits.has_value() == sketched && residual_norm.has_value() == sketched,
                  "sign_bits, residual_norm and projection come together or not at all");
  std::optional<Sketch> sketch;
  DenseRows sign_rows{};
  if (sketched) {
    sketch.emplace(*projection, q, d);
    check_sketch(*sign_bits, *residual_norm, q, shape, sketch->bytes());
    sign_rows = sketch_rows(*sketch, *sign_bits, *residual_norm);
  }

  Tensor out = empty_like_shape(q, shape.out, ScalarType::Float);
  float* to = static_cast<float*>(out.data_ptr());
  const DenseRows rows = dense_rows(keys, packed);
  const Rows query_rows(q);
  for_score_blocks(shape, rows.row_bytes + sign_rows.row_bytes, [&] {
    return Worker(q, query_rows, shape, keys, rows, mean, sketched ? &*sketch : nullptr, sign_rows, to);
  });
  return out;
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) { m.impl("score", TORCH_BOX(&turboquant::cpu::score)); }
