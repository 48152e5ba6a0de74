// The attention mass of keys: the softmax weights that queries give them, whose denominators are known by now.
//
// Scores are those of attention.h, and nothing is rounded behind them. A key's weights are summed over the queries of a
// call first, in their order, and then added to its mass.
#pragma once

#include "cpu/kernels/attention.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

// exp is exact enough up to here. Greater weights come of a log-sum-exp that is not the queries'.
constexpr float kGreatestExponent = 80;

inline Floats weight_of(Floats logit, float lse) {
  return exp(min(broadcast(kGreatestExponent), logit - broadcast(lse)));  // a NaN stays one
}

// Adds the weights of queries first .. first + QUERIES - 1 to `total`, one lane for each key of a block.
template <Layout KEYS, int QUERIES>
inline void weigh_keys(const AttendedKeys& k, const QueryRows& rows, const MassRows& to, const Block& b,
                       const LevelBytes<looked_up(KEYS)>& keys, const Ahead& ahead, int first,
                       Floats (&total)[kGroups]) {
  Floats logits[QUERIES][kGroups];
  score_block<KEYS, QUERIES>(k, rows, b, keys, ahead, first, logits);
  for (int q = 0; q < QUERIES; ++q) {
    const int row = first + q;
    if (to.lse[row] == -kInfinity) continue;
    const SeenLanes seen(rows.first[row] - b.begin, rows.end[row] - b.begin);
    for (int g = b.first_group; g < b.end_group; ++g) {
      const Floats logit = k.soft_cap > 0 ? soft_capped(logits[q][g], k.soft_cap) : logits[q][g];
      const Floats weight = weight_of(logit, to.lse[row]);
      total[g] = total[g] + select(seen.of_group(g), weight, broadcast(0.0f));
    }
  }
}

// Adds sixteen weights to the masses of the keys from `key` on.
inline void add_mass(const MassRows& to, int64_t key, Floats weights) {
  const int64_t count = to.keys - key;
  if (count <= 0) return;
  store_some<false>(to.mass + key, load_some<false>(to.mass + key, count) + weights, count);
}

template <Layout KEYS>
void mass_of_codes(const PagedBlocks& blocks, int64_t begin, int64_t end, const QueryRows& rows, const MassRows& to) {
  const PagedKeys& paged = blocks.keys;
  const AttendedKeys& k = paged.attended;
  const LevelBytes<looked_up(KEYS)> keys(k.key_levels, 1 << blocks.key_bits());
  const SeenKeys seen = seen_keys(rows, begin, end);
  for (int64_t at = begin; at < seen.end; at += kBlockTokens) {
    if (at + kBlockTokens <= seen.first) continue;
    const Block b =
        find_block<false>(paged, blocks.block_table, blocks.kv_head, at, seen.first, seen.end, blocks.scratch);
    Ahead ahead = blocks.ahead(at + kBlockTokens, seen.end);
    Floats total[kGroups];
    for (int g = 0; g < kGroups; ++g) total[g] = broadcast(0.0f);
    in_fours(rows.count, [&]<int QUERIES>(int q) {
      weigh_keys<KEYS, QUERIES>(k, rows, to, b, keys, ahead, q, total);
      ahead = {};  // it is prefetched once
    });
    for (int g = b.first_group; g < b.end_group; ++g) add_mass(to, at + g * kGroupTokens, total[g]);
  }
}

// Calls mass_of_codes for the layout of keys.
inline void mass_of_pages(const PagedKeys& k, const int32_t* block_table, int64_t kv_head, int64_t begin, int64_t end,
                          const QueryRows& rows, const MassRows& to, void* scratch) {
  const PagedBlocks blocks{k, block_table, kv_head, scratch_of(k, scratch)};
  format::with_width(key_layout(k.record).width, [&](auto key) {
    if constexpr (format::valid_key_width(key.value)) {
      mass_of_codes<Layout{key.value, false}>(blocks, begin, end, rows, to);
    }
  });
}

// ---- Exact keys --------------------------------------------------------------------------------------------------

// The keys that queries attend to exactly in their runs of one kind. scratch: float [16, key_dim]
template <typename T, typename RunOf>
void mass_of_runs(const ExactKeys& e, int count, RunOf&& run_of, float softmax_scale, float soft_cap,
                  const MassRows& to, float* scratch) {
  const int d = static_cast<int>(e.key_dim);
  const auto [begin, end] = span_of_runs(count, run_of);
  for (int64_t first = begin; first < end; first += 16) {
    for (int t = 0; t < 16; ++t) {
      const int64_t p = first + t < end ? first + t : end - 1;  // keys behind the end are not seen
      const T* key = exact_row<T>(e, p).key;
      for (int c = 0; c < d; c += 16) store(scratch + t * d + c, load_float(key + c));
    }
    Floats total = broadcast(0.0f);
    for_same_runs(count, run_of, first, [&]<int QUERIES>(int row, ExactRun run) {
      Floats logits[QUERIES];
      exact_logits<QUERIES>(e, scratch, row, softmax_scale, soft_cap, logits);
      for (int q = 0; q < QUERIES; ++q) {
        if (to.lse[row + q] == -kInfinity) continue;
        const Floats weight = weight_of(logits[q], to.lse[row + q]);
        total = total + select(lanes_of(run), weight, broadcast(0.0f));
      }
    });
    add_mass(to, first, total);
  }
}

inline void mass_of_exact(const ExactKeys& e, int count, float softmax_scale, float soft_cap, const MassRows& to,
                          float* scratch) {
  const auto sinks = [&](int row) { return sink_run(e, row); };
  const auto recent = [&](int row) { return recent_run(e, row); };
  dispatch_dtype<ElementTypes>(e.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    mass_of_runs<T>(e, count, sinks, softmax_scale, soft_cap, to, scratch);
    mass_of_runs<T>(e, count, recent, softmax_scale, soft_cap, to, scratch);
  });
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
