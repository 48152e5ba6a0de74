// score: attention scores straight from packed standalone vectors. The query is rotated once; keys are never rotated back:
// <q, key> = <R q, scale / 32 * levels> + <q, center>, plus the sketch's estimate of the residual when there is one.
#include <optional>

#include "cpu/score/projection.h"
#include "cpu/score/queries.h"

namespace turboquant::cpu {
namespace {

// d is the length of signs.
DenseRows checked_rows(const Tensor& packed, const Tensor& scale, const Tensor& signs, const OptionalTensor& levels,
                       int bits) {
  const int64_t d = check_dense_vectors(packed, scale, signs, bits);
  const int8_t* given = checked_levels(levels, packed, bits, "levels");
  DenseRows rows{};
  rows.rows = static_cast<const uint8_t*>(packed.data_ptr());
  rows.row_bytes = format::dense_row_bytes(d, bits);
  rows.end = rows.rows + packed.numel();
  rows.d = static_cast<int>(d);
  rows.layout = dense_layout(bits);
  for (int code = 0; bits < 8 && code < 1 << bits; ++code) {
    rows.levels[code] = static_cast<int8_t>(format::level_of_code(bits, given, code));
  }
  rows.half_scale = static_cast<const uint16_t*>(scale.data_ptr());
  return rows;
}

// Greatest absolute value of what a code can mean; at 8 bits also of the byte 0x80, which is never written.
int max_level(const DenseRows& rows) { return rows.layout == 8 ? 128 : -rows.levels[0]; }

// One thread's share: the queries at hand, rotated, and projected if there is a sketch.
class Worker {
 public:
  Worker(const Tensor& q, const Rows& rows, const ScoreShape& shape, const DenseRows& keys, const float* signs,
         const format::Channels& channels, const Sketch* sketch, const DenseRows& sketches, float* out)
      : q_(q), rows_(rows), shape_(shape), keys_(keys), signs_(signs), channels_(channels), out_(out),
        integers_(queries_at_once(shape), keys.d, keys.layout, max_level(keys)),
        queries_(queries_at_once(shape) * keys.d), scratch_(16 * keys.row_bytes + 64) {
    if (sketch) sketch_.emplace(*sketch, sketches, shape);
  }

  void prepare(int64_t b, int64_t first, int64_t count) {
    const int64_t d = keys_.d;
    load_queries(q_, rows_, shape_, b, first, count, d, queries_.data());
    for (int64_t i = 0; i < count; ++i) {
      float* query = queries_.data() + i * d;
      const float shift = channels_.center ? dot(query, channels_.center, d) : 0;
      if (sketch_) sketch_->set(i, query);
      if (channels_.inverse) multiply(query, channels_.inverse, d);
      rotate(query, signs_, format::split_dim(d));
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
  const DenseRows& keys_;
  const float* signs_;         // [d]
  format::Channels channels_;  // [d]
  float* out_;                 // [batch, queries, keys]
  IntegerQueries integers_;
  std::optional<SketchQueries> sketch_;
  std::vector<float> queries_;  // [queries at once, d]
  std::vector<uint8_t> scratch_;
};

// q: [..., queries, d], packed: uint8 [..., keys, row_bytes], scale: float16 [..., keys], center: float32 [d] or [3, d],
// sign_bits: uint8 [..., keys, m / 8], residual_norm: float32 [..., keys], projection as in qjl.h -> float32 [..., queries, keys]
Tensor score(const Tensor& q, const Tensor& packed, const Tensor& scale, const Tensor& signs,
             const OptionalTensor& levels, int64_t bits, const OptionalTensor& center, const OptionalTensor& sign_bits,
             const OptionalTensor& residual_norm, const OptionalTensor& projection) {
  check_codec_bits(bits);
  const ScoreShape shape = checked_score_shape(q, packed, "packed");
  check_device(packed, q, "packed");
  const DenseRows keys = checked_rows(packed, scale, signs, levels, static_cast<int>(bits));
  const int64_t d = keys.d;
  STD_TORCH_CHECK(q.size(q.dim() - 1) == d, "q has shape ", shape_text(q), ", expected [..., ", d, "] as signs say");
  check_center(center, q, d);
  const format::Channels channels = channels_of(center, floats_of(center), 1, d);
  const bool sketched = projection.has_value();
  STD_TORCH_CHECK(sign_bits.has_value() == sketched && residual_norm.has_value() == sketched,
                  "sign_bits, residual_norm and projection come together or not at all");
  std::optional<Sketch> sketch;
  DenseRows sketches{};
  if (sketched) {
    sketch.emplace(*projection, q, d);
    check_sketch(*sign_bits, *residual_norm, q, shape, sketch->bytes());
    sketches = sketch_rows(*sketch, *sign_bits, *residual_norm);
  }

  Tensor out = empty_like_shape(q, shape.out, ScalarType::Float);
  float* to = static_cast<float*>(out.data_ptr());
  const float* key_signs = static_cast<const float*>(signs.data_ptr());
  const Rows rows(q);
  const int64_t query_bytes = 64 * d + (sketched ? sketch->query_bytes() : 0);
  for_score_blocks(shape, keys.row_bytes + sketches.row_bytes, query_bytes, [&] {
    return Worker(q, rows, shape, keys, key_signs, channels, sketched ? &*sketch : nullptr, sketches, to);
  });
  return out;
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) { m.impl("score", TORCH_BOX(&turboquant::cpu::score)); }
