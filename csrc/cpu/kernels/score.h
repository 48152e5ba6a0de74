// The op score: queries against dense rows of codes.
#pragma once

#include "cpu/kernels/dot_products.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

inline Floats load_scales(const DenseRows& k, int64_t first, int count) {
  if (count == 16) {
    return k.half_scale ? load_float(reinterpret_cast<const Half*>(k.half_scale) + first) : load(k.scale + first);
  }
  Half half[16] = {};
  float scale[16] = {};
  if (k.half_scale) {
    memcpy(half, k.half_scale + first, count * sizeof(Half));
    return load_float(half);
  }
  memcpy(scale, k.scale + first, count * sizeof(float));
  return load(scale);
}

// Scores of keys [begin, end) for queries from .. from + QUERIES - 1.
template <Layout LAYOUT, int QUERIES>
inline void score_queries(const DenseRows& k, const LevelBytes<LAYOUT>& table, int64_t begin, int64_t end,
                          const ScoreQueries& q, int from, const Scores& out, uint8_t* scratch) {
  const int64_t factor_bytes = query_factor_bytes(k.d, LAYOUT);
  const Factors* factors[QUERIES];
  for (int i = 0; i < QUERIES; ++i) {
    factors[i] = reinterpret_cast<const Factors*>(static_cast<const uint8_t*>(q.factors) + (from + i) * factor_bytes);
  }
  for (int64_t key = begin; key < end; key += 16) {
    const int count = end - key < 16 ? static_cast<int>(end - key) : 16;
    const uint8_t* rows = k.rows + key * k.row_bytes;
    if (k.end - rows < 16 * k.row_bytes + kReadBehind) {  // reads would leave the tensor
      memcpy(scratch, rows, count * k.row_bytes);
      rows = scratch;
    }
    Ints dots[QUERIES];
    dot_sixteen<LAYOUT, QUERIES>({rows, k.row_bytes, nullptr, 0}, k.d, table, factors, dots);
    const Floats scale = load_scales(k, key, count);
    for (int i = 0; i < QUERIES; ++i) {
      const Floats dot = to_floats(dots[i] + broadcast(q.correction[from + i]));
      const Floats score = (dot * broadcast(q.unit[from + i])) * scale + broadcast(q.shift[from + i]);
      float* to = out.scores + (from + i) * out.stride + key;
      if (count == 16) {
        store(to, out.add ? load(to) + score : score);
      } else {
        float lane[16];
        store(lane, score);
        for (int j = 0; j < count; ++j) to[j] = out.add ? to[j] + lane[j] : lane[j];
      }
    }
  }
}

template <Layout LAYOUT>
void score_codes(const DenseRows& k, int64_t begin, int64_t end, const ScoreQueries& q, const Scores& out,
                 uint8_t* scratch) {
  const LevelBytes<LAYOUT> table(k.levels, 1 << format::num_bits(LAYOUT.width));
  in_fours(q.count, [&]<int QUERIES>(int first) {
    score_queries<LAYOUT, QUERIES>(k, table, begin, end, q, first, out, scratch);
  });
}

inline void score_rows(const DenseRows& k, int64_t begin, int64_t end, const ScoreQueries& q, const Scores& out,
                       uint8_t* scratch) {
  format::with_width(k.width,
                     [&](auto width) { score_codes<dense_layout(width.value)>(k, begin, end, q, out, scratch); });
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
