// Queries as integers against dense rows of codes. `score` and `qjl_score` share this around kernels().score_rows.
#pragma once

#include "cpu/common/torch.h"
#include "cpu/kernels.h"

namespace turboquant::cpu {

// Rotated or projected queries that meet rows of one layout. A thread has its own.
class IntegerQueries {
 public:
  // capacity: queries at once; max_level: greatest absolute value of a level
  IntegerQueries(int64_t capacity, int64_t d, Layout layout, int max_level)
      : d_(static_cast<int>(d)), layout_(layout), max_level_(max_level),
        bytes_(kernels().query_factor_bytes(d_, layout)), factors_(capacity * bytes_), integers_(d + kQueryMargin),
        unit_(capacity), shift_(capacity), correction_(capacity) {}

  // q: [d]; level_unit: the value of a level of 1; shift: added to all its scores
  void set(int64_t i, const float* q, float level_unit, float shift) {
    uint8_t* to = factors_.as<uint8_t>() + i * bytes_;
    const float unit = kernels().query_factors(q, d_, layout_, max_level_, to, &correction_[i], integers_.data());
    unit_[i] = unit * level_unit;
    shift_[i] = shift;
  }
  ScoreQueries first(int64_t count) {
    return {.count = static_cast<int>(count),
            .factors = factors_.as<void>(),
            .unit = unit_.data(),
            .correction = correction_.data(),
            .shift = shift_.data()};
  }

 private:
  int d_;
  Layout layout_;
  int max_level_;
  int64_t bytes_;
  Scratch factors_;  // [capacity, bytes]
  std::vector<int16_t> integers_;
  std::vector<float> unit_, shift_;
  std::vector<int32_t> correction_;
};

// Keys and queries of one unit of work: few enough for the L1 cache, and enough to pay for a call.
constexpr int64_t kScoreKeys = 512;
constexpr int64_t kScoreQueries = 64;
inline int64_t queries_at_once(const ScoreShape& s) { return std::min(s.queries, kScoreQueries); }

// Splits [batch, queries, keys] among threads. make() gives a thread its worker. worker.prepare(b, first query, count)
// comes before worker.score(b, first query, count, first key, end key), once for all key blocks that follow each other.
// row_bytes: the bytes of a key that a query reads; query_bytes: the bytes of keys that could be read in the time that
// it takes to prepare a query.
template <typename Make>
void for_score_blocks(const ScoreShape& s, int64_t row_bytes, int64_t query_bytes, Make&& make) {
  const int64_t tiles = (s.queries + kScoreQueries - 1) / kScoreQueries;
  const int64_t blocks = (s.keys + kScoreKeys - 1) / kScoreKeys;
  // A thread is worth waking for about 10 microseconds: 256 KB of codes.
  const int64_t work = queries_at_once(s) * (std::min(s.keys, kScoreKeys) * row_bytes + query_bytes);
  const int64_t grain = std::max<int64_t>(1, (1 << 18) / std::max<int64_t>(work, 1));
  parallel_for(s.batch * tiles * blocks, grain, [&](int64_t begin, int64_t end) {
    auto worker = make();
    for (int64_t item = begin; item < end; ++item) {
      const int64_t tile = item / blocks, b = tile / tiles, first = tile % tiles * kScoreQueries;
      const int64_t count = std::min(kScoreQueries, s.queries - first), key = item % blocks * kScoreKeys;
      if (item == begin || key == 0) worker.prepare(b, first, count);
      worker.score(b, first, count, key, std::min(key + kScoreKeys, s.keys));
    }
  });
}

// The destination of the scores of batch entry b for queries `first` on. score_rows counts keys over all entries.
inline Scores scores_of(const ScoreShape& s, float* out, int64_t b, int64_t first, bool add) {
  return {out + (b * s.queries + first) * s.keys - b * s.keys, s.keys, add};
}

// Queries first .. first + count - 1 of batch entry b as float32 [count, d].
inline void load_queries(const Tensor& q, const Rows& rows, const ScoreShape& s, int64_t b, int64_t first,
                         int64_t count, int64_t d, float* out) {
  for (int64_t i = 0; i < count; ++i) to_float(q, rows(b * s.queries + first + i), d, out + i * d);
}

}  // namespace turboquant::cpu
