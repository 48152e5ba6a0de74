// score: attention scores straight from packed standalone vectors. The query is rotated once, keys are never rotated
// back: <q, key> = <R q, scale / 32 * levels> + <q, center>, plus the estimate of the residual if there is a sketch.
#include "calls/score.h"

#include <algorithm>
#include <optional>

#include "cpu/codec/codebook.h"
#include "cpu/common/torch.h"
#include "cpu/common/vector.h"
#include "cpu/score/queries.h"
#include "cpu/score/sketch.h"

namespace turboquant::cpu {
namespace {

DenseRows checked_rows(const ScoreCall& c) {
  const format::Width width = format::as_width(c.bits);
  const Levels levels(width, checked_levels(c.levels, c.packed, c.bits, "levels"));
  const auto* packed = data_of<uint8_t>(c.packed);
  DenseRows rows{.rows = packed,
                 .row_bytes = format::dense_row_bytes(c.d(), static_cast<int>(c.bits)),
                 .end = packed + c.packed.numel(),
                 .d = static_cast<int>(c.d()),
                 .width = width,
                 .levels = {},
                 .half_scale = data_of<uint16_t>(c.scale),
                 .scale = nullptr};
  std::copy_n(levels.of, kTableLevels, rows.levels);
  return rows;
}

// One thread's work: some queries at a time, rotated, and projected if there is a sketch.
class Worker {
 public:
  Worker(const Tensor& q, const Rows& rows, const ScoreShape& shape, const DenseRows& keys, const float* signs,
         const format::Channels& channels, const std::optional<Sketch>& sketch, const DenseRows& sketches, float* out)
      : q_(q), rows_(rows), shape_(shape), keys_(keys), signs_(signs), channels_(channels), out_(out),
        integers_(queries_at_once(shape), keys.d, dense_layout(keys.width), greatest_level(keys.width, keys.levels)),
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

// -> float32 [..., queries, keys]
Tensor score(const ScoreCall& c) {
  const ScoreShape shape = check_score(c);
  const DenseRows keys = checked_rows(c);
  const int64_t d = c.d();
  const format::Channels channels = channels_of(c.center, data_of<float>(c.center), 1, d);
  std::optional<Sketch> sketch;
  DenseRows sketches{};
  if (c.projection) {
    sketch.emplace(*c.projection, c.q, d);
    check_sketch(*c.sign_bits, *c.residual_norm, c.q, shape, sketch->bytes());
    sketches = sketch_rows(*sketch, *c.sign_bits, *c.residual_norm);
  }

  Tensor out = new_tensor(c.q, shape.out, ScalarType::Float);
  float* to = data_of<float>(out);
  const float* signs = checked_signs(c.signs, "signs");
  const Rows rows(c.q);
  const int64_t query_bytes = 64 * d + (sketch ? sketch->query_bytes() : 0);
  for_score_blocks(shape, keys.row_bytes + sketches.row_bytes, query_bytes,
                   [&] { return Worker(c.q, rows, shape, keys, signs, channels, sketch, sketches, to); });
  return out;
}

}  // namespace
}  // namespace turboquant::cpu

STABLE_TORCH_LIBRARY_IMPL(turboquant, CPU, m) { m.impl("score", turboquant::boxed<&turboquant::cpu::score>); }
