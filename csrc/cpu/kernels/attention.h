// Softmax attention of a group of queries over packed pages, 128 keys at a time.
//
// Scores are integer dot products (dot_products.h). Each block of keys has one maximum and one unit for its weights: a
// weight, softmax numerator times value scale, becomes a 15-bit integer, and values are summed as integers too. Only
// the sums of a block become float32. An integer weight is off by at most 2^-16 of the largest weight in its block of
// 128 keys.
//
// Sums stay in the order of the packed values ("panels", 16 words of four tokens each) until the span of keys is done.
#pragma once

#include "cpu/kernels/dot_products.h"
#include "cpu/kernels/rows.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

constexpr int kGroups = kBlockTokens / kGroupTokens;
constexpr int kQueriesAtOnce = 4;  // they share a look-up (in_fours)
constexpr float kGreatestWeight = kGreatestFactor;

// Writes a spread row of three-bit codes whose last group has 16 channels as a row of nibbles.
inline void expand_row(const uint8_t* row, int d, uint8_t* to) {
  for (int c = 0; c + 32 <= d; c += 32) {
    uint32_t w[4];
    memcpy(w, row + c / 32 * 12, 12);
    w[3] = (w[0] >> 3 & 0x11111111) | (w[1] >> 2 & 0x22222222) | (w[2] >> 1 & 0x44444444);
    memcpy(to + c / 2, w, 16);
  }
  uint64_t words = 0;
  memcpy(&words, row + d / 32 * 12, 6);
  const uint64_t first = words & 0xFFFF, second = words >> 16 & 0xFFFF, third = words >> 32;
  words |= ((first >> 3 & 0x1111) | (second >> 2 & 0x2222) | (third >> 1 & 0x4444)) << 48;
  memcpy(to + d / 32 * 16, &words, 8);
}

// Writes a value block of spread codes as panels of nibbles. In a set of channels, the three words of a lane become
// words of the first, second and third panel, and the bits above their codes a word of the fourth, sixteen lanes at a
// time. The channels behind the last set are nibbles already.
inline void expand_values(const uint8_t* block, int d, uint8_t* to) {
  constexpr int kLane = 4 * format::kSpreadUnits, kSixteen = 16 * kLane;  // bytes
  const int full = d / format::kSpreadChannels * format::kSpreadBytes;
  const int rest = d % format::kSpreadChannels * format::kValueGroup / 2;
  for (int i = 0; i < full; i += kSixteen) {
    Bytes x[4];
    for (int g = 0; g < 4; ++g) x[g] = load_quarters(block + i + kLane * g, 4 * kLane);
    gather_three_bits(x);
    for (int j = 0; j < 4; ++j) store(to + i / 3 * 4 + 64 * j, x[j]);
  }
  memcpy(to + full / 3 * 4, block + full, rest);
}

// Writes the plane of a row whose last group has 16 channels in the order of full groups.
inline void expand_plane(const uint8_t* plane, int d, uint8_t* to) {
  const int full = d / 32 * 4;
  memcpy(to, plane, full);
  for (int k = 0; k < 4; ++k) {
    const int bits = plane[full + k % 2] >> 2 * (k / 2);
    to[full + k] = static_cast<uint8_t>((bits & 3) | (bits >> 4 & 3) << 2);
  }
}

// The addresses of a block's groups of sixteen tokens. Groups that no query sees have none, because their pages may be
// gone.
struct Block {
  int64_t begin;  // its first key
  int first_group, end_group;
  CodeRows keys[kGroups];
  const uint8_t* values[kGroups];
  const Half* key_scales[kGroups];
  const Half* value_scales[kGroups];
  const float* ropes[kGroups];  // [16, rope_dim]
};

struct PagedScratch {
  uint8_t* keys;     // [kBlockTokens, d / 2] + 64: spread keys as nibbles
  uint8_t* planes;   // [kBlockTokens, plane] + 16: planes in full groups
  uint8_t* values;   // [kGroups, 8 d] + 64: spread values as nibbles
  Factors* weights;  // [kQueriesAtOnce, patterns, kGroups]
};

inline int64_t round_up_64(int64_t n) { return (n + 63) / 64 * 64; }
inline int expanded_plane_bytes(int d) { return (d + 31) / 32 * 4; }

inline bool expands_planes(const format::Record& r) { return format::has_plane(r.key_width()) && r.head_dim % 32 != 0; }

inline int64_t scratch_keys(const PagedKeys& k) {
  return in_place(k.record.key_row()) ? 0 : round_up_64(kBlockTokens * k.record.head_dim / 2 + 64);
}
inline int64_t scratch_planes(const PagedKeys& k) {
  const int d = k.record.head_dim;
  return expands_planes(k.record) ? round_up_64(kBlockTokens * expanded_plane_bytes(d) + 16) : 0;
}
inline int64_t scratch_values(const PagedKeys& k) {
  return format::is_spread(k.record.value_width()) ? round_up_64(kGroups * 8 * k.record.head_dim + 64) : 0;
}
inline int64_t weight_bytes(const AttendedKeys& k) {
  return static_cast<int64_t>(kQueriesAtOnce) * k.panels.patterns * kGroups * sizeof(Factors);
}
inline int64_t attend_scratch_bytes(const PagedKeys& k) {
  return scratch_keys(k) + scratch_planes(k) + scratch_values(k) + weight_bytes(k.attended);
}
inline PagedScratch scratch_of(const PagedKeys& k, void* memory) {
  PagedScratch s;
  s.keys = static_cast<uint8_t*>(memory);
  s.planes = s.keys + scratch_keys(k);
  s.values = s.planes + scratch_planes(k);
  s.weights = reinterpret_cast<Factors*>(s.values + scratch_values(k));
  return s;
}

// The address of sixteen tokens of a sequence: their tile, and the number of the first one in it.
struct TokenAddress {
  const uint8_t* tile;
  int in_tile;
};
inline TokenAddress find(const PagedKeys& k, const int32_t* block_table, int64_t kv_head, int64_t key) {
  const format::Record& r = k.record;
  const int token = static_cast<int>(key % r.page_size);
  const int64_t page = block_table[key / r.page_size];
  const int64_t record = format::record_offset<int64_t>(page, kv_head, k.page_stride, r.record_bytes());
  return {k.pages + record + r.tile_of(token), token % r.tile_tokens()};
}

// Where the codes of the next block lie. They are loaded into the cache while this block is computed, because pages lie
// anywhere and the processor cannot guess which comes next. They are asked for a few cache lines at a time: a processor
// drops what it cannot queue.
struct Ahead {
  const uint8_t* keys[kGroups];  // null: nothing to prefetch
  const uint8_t* values[kGroups];
  int64_t key_bytes, value_bytes;
};
inline Ahead find_ahead(const PagedKeys& k, const int32_t* block_table, int64_t kv_head, int64_t begin, int64_t end) {
  const format::Record& r = k.record;
  Ahead a = {};
  a.key_bytes = kGroupTokens * r.key_row_bytes();
  a.value_bytes = r.value_block_bytes();
  for (int g = 0; g < kGroups && begin + g * kGroupTokens < end; ++g) {
    const TokenAddress p = find(k, block_table, kv_head, begin + g * kGroupTokens);
    a.keys[g] = p.tile + p.in_tile * r.key_row_bytes();
    a.values[g] = p.tile + r.value_blocks() + p.in_tile / kGroupTokens * r.value_block_bytes();
  }
  return a;
}
ALWAYS_INLINE void prefetch_keys(const Ahead& a, int g) {
  if (a.keys[g]) prefetch(a.keys[g], a.key_bytes);
}
ALWAYS_INLINE void prefetch_values(const Ahead& a, int line) {
  if (64 * line >= a.value_bytes) return;
  for (int g = 0; g < kGroups; ++g) {
    if (a.values[g]) prefetch(a.values[g] + 64 * line, 1);
  }
}

// The block that starts at key `begin`, [first, end) of which some query sees, without addresses.
inline Block seen_groups(int64_t begin, int64_t first, int64_t end) {
  Block b;
  b.begin = begin;
  b.first_group = first > begin ? static_cast<int>((first - begin) / kGroupTokens) : 0;
  const int64_t last = (end - begin + kGroupTokens - 1) / kGroupTokens;
  b.end_group = last < kGroups ? static_cast<int>(last) : kGroups;
  return b;
}

// Finds the groups of the block that starts at key `begin`, [first, end) of which some query sees. VALUES: those too
template <bool VALUES = true>
inline Block find_block(const PagedKeys& k, const int32_t* block_table, int64_t kv_head, int64_t begin, int64_t first,
                        int64_t end, const PagedScratch& scratch) {
  const format::Record& r = k.record;
  const int d = r.head_dim;
  Block b = seen_groups(begin, first, end);
  for (int g = b.first_group; g < b.end_group; ++g) {
    const auto [tile, in_tile] = find(k, block_table, kv_head, begin + g * kGroupTokens);
    b.key_scales[g] = reinterpret_cast<const Half*>(tile + r.key_scales()) + in_tile;

    const uint8_t* rows = tile + in_tile * r.key_row_bytes();
    const uint8_t* planes = tile + r.key_planes() + in_tile * r.key_plane_bytes();
    b.keys[g] = {rows, r.key_row_bytes(), planes, r.key_plane_bytes()};
    if (!in_place(r.key_row())) {
      uint8_t* to = scratch.keys + g * kGroupTokens * (d / 2);
      for (int t = 0; t < kGroupTokens; ++t) expand_row(rows + t * r.key_row_bytes(), d, to + t * (d / 2));
      b.keys[g].rows = to;
      b.keys[g].row_stride = d / 2;
    }
    if (expands_planes(r)) {
      const int bytes = expanded_plane_bytes(d);
      uint8_t* to = scratch.planes + g * kGroupTokens * bytes;
      for (int t = 0; t < kGroupTokens; ++t) expand_plane(planes + t * r.key_plane_bytes(), d, to + t * bytes);
      b.keys[g].planes = to;
      b.keys[g].plane_stride = bytes;
    }

    if constexpr (VALUES) {
      b.value_scales[g] = reinterpret_cast<const Half*>(tile + r.value_scales()) + in_tile;
      b.values[g] = tile + r.value_blocks() + in_tile / kGroupTokens * r.value_block_bytes();
      if (format::is_spread(r.value_width())) {
        uint8_t* to = scratch.values + g * 8 * d;
        expand_values(b.values[g], d, to);
        b.values[g] = to;
      }
    }
  }
  return b;
}

inline Floats soft_capped(Floats x, float cap) {                        // cap * tanh(x / cap)
  const Floats e = exp(min(broadcast(80.0f), x * broadcast(2 / cap)));  // in this order a NaN stays one
  return broadcast(cap) - broadcast(2 * cap) / (e + broadcast(1.0f));
}

// Lifts a running maximum to `to`. Returns the factor of sums that are relative to the old one.
inline float raise(float* maximum, float to) {
  if (!(to > *maximum)) return 1;
  const float keep = *maximum == -kInfinity ? 0 : first_lane(exp(broadcast(*maximum - to)));
  *maximum = to;
  return keep;
}

// The keys of a block that a query sees, as lanes. first, end: relative to the block
class SeenLanes {
 public:
  SeenLanes(int64_t first, int64_t end) : from_(limited(first)), until_(limited(end)) {}
  Mask of_group(int g) const {
    const Ints key = lane_numbers() + broadcast(int32_t{g * kGroupTokens});
    return (from_ - broadcast(1) < key) & (key < until_);
  }

 private:
  static Ints limited(int64_t n) {
    return broadcast(static_cast<int32_t>(n < 0 ? 0 : n > kBlockTokens ? kBlockTokens : n));
  }
  Ints from_, until_;
};

// The softmax numerators of one query's logits in a block.
struct Weights {
  float keep;  // factor of earlier sums under the new maximum
  float unit;  // value of an integer weight of 1; 0: nothing to add
};

// logits: [kGroups] lanes, which become weights. first, end: the keys that this query sees, relative to the block.
inline Weights weigh(const AttendedKeys& k, const Block& b, Floats* logits, int64_t first, int64_t end, float* row_max,
                     float* row_sum, Factors* to) {
  const int g0 = b.first_group, g1 = b.end_group;
  const bool edge = first > g0 * kGroupTokens || end < g1 * kGroupTokens;
  const SeenLanes seen(first, end);

  Floats top = broadcast(-kInfinity);
  Mask bad = is_nan(top);
  for (int g = g0; g < g1; ++g) {
    if (k.soft_cap > 0) logits[g] = soft_capped(logits[g], k.soft_cap);
    if (edge) logits[g] = select(seen.of_group(g), logits[g], broadcast(-kInfinity));
    top = max(top, logits[g]);
    bad = bad | is_nan(logits[g]);
  }
  if (any(bad)) {  // a NaN makes this query's result NaN, as it should
    *row_sum = __builtin_nanf("");
    return {1, 0};
  }
  const float keep = raise(row_max, greatest(top));
  if (*row_max == -kInfinity) return {1, 0};
  const Floats shift = broadcast(*row_max);

  Floats total = broadcast(0.0f), heaviest = broadcast(0.0f);
  bad = is_nan(total);
  for (int g = g0; g < g1; ++g) {
    const Floats p = exp(logits[g] - shift);
    total = total + p;
    Floats w = p * load_float(b.value_scales[g]);
    if (edge) w = select(seen.of_group(g), w, broadcast(0.0f));  // the scale of a stale token may be anything
    bad = bad | is_nan(w);
    heaviest = max(heaviest, abs(w));
    logits[g] = w;
  }
  *row_sum = *row_sum * keep + sum_lanes(total);
  const float heavy = greatest(heaviest);
  if (heavy == 0 && !any(bad)) return {keep, 0};

  const Floats inverse = broadcast(kGreatestWeight / heavy);
  for (int g = g0; g < g1; ++g) {
    const TokenFactors f = token_factors(round_to_ints(logits[g] * inverse));
    for (int p = 0; p < k.panels.patterns; ++p) to[p * kGroups + g] = spread(f, load(k.panels.quads + 16 * p));
  }
  return {keep, any(bad) ? __builtin_nanf("") : heavy / kGreatestWeight * format::kLevelUnit};
}

// The groups of a block whose values are added. Most blocks of a long sequence are seen as a whole and have a loop that
// is unrolled. A block of few tokens takes no longer than its groups.
struct AllGroups {
  template <typename Fn>
  ALWAYS_INLINE void each(Fn&& fn) const {
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) fn(g);
  }
};
struct SomeGroups {
  int first, end;
  template <typename Fn>
  ALWAYS_INLINE void each(Fn&& fn) const {
    for (int g = first; g < end; ++g) fn(g);
  }
};

// Adds field FIELD of one panel, and field FIELD + 1 unless a byte has one code, for QUERIES queries.
template <Layout LAYOUT, int FIELD, int QUERIES, typename Groups>
inline void add_fields(const AttendedKeys& k, const Block& b, Groups groups, const LevelBytes<LAYOUT>& table, int panel,
                       const Factors* weights, const Ints (&bias)[kMaxPatterns][QUERIES],
                       const Weights (&weight)[QUERIES], float* const (&sums)[QUERIES]) {
  constexpr int kFields = quarter_fields(LAYOUT) == 1 ? 1 : 2;  // at once: more would not fit the registers
  const int pattern = k.panels.pattern[panel], stride = k.panels.patterns * kGroups;
  Products sum[kFields][QUERIES];
  for (int f = 0; f < kFields; ++f) {
    for (int q = 0; q < QUERIES; ++q) sum[f][q] = starting_from(bias[pattern][q]);
  }
  groups.each([&](int g) __attribute__((always_inline)) {
    const Bytes x = load(b.values[g] + 64 * panel);
    const Factors* w = weights + pattern * kGroups + g;
    Levels levels[kFields];
    levels[0] = widen(table.template levels<FIELD>(x));
    if constexpr (kFields == 2) levels[1] = widen(table.template levels<FIELD + 1>(x));
    for (int q = 0; q < QUERIES; ++q) {
      const Factors& f = w[q * stride];
      for (int i = 0; i < kFields; ++i) multiply_add(sum[i][q], levels[i], f);
    }
  });
  for (int f = 0; f < kFields; ++f) {
    for (int q = 0; q < QUERIES; ++q) {
      float* to = sums[q] + 16 * (panel * k.panels.fields + FIELD + f);
      const Floats add = to_floats(total(sum[f][q])) * broadcast(weight[q].unit);
      store(to, load(to) * broadcast(weight[q].keep) + add);
    }
  }
}

template <Layout LAYOUT, int QUERIES, typename Groups>
inline void add_values(const AttendedKeys& k, const Block& b, Groups groups, const LevelBytes<LAYOUT>& table,
                       const Ahead& ahead, const Factors* weights, const Weights (&weight)[QUERIES],
                       float* const (&sums)[QUERIES]) {
  Ints bias[kMaxPatterns][QUERIES];  // minus the products that kLevelBias adds
  const int stride = k.panels.patterns * kGroups;
  for (int p = 0; p < k.panels.patterns; ++p) {
    for (int q = 0; q < QUERIES; ++q) {
      Products sum = no_products();
      if constexpr (kLevelBias != 0) {
        const Levels one = widen(broadcast(static_cast<uint8_t>(kLevelBias)));
        groups.each([&](int g) { multiply_add(sum, one, weights[q * stride + p * kGroups + g]); });
      }
      bias[p][q] = broadcast(0) - total(sum);
    }
  }
  for (int panel = 0; panel < k.panels.panels; ++panel) {
    prefetch_values(ahead, panel);
    add_fields<LAYOUT, 0>(k, b, groups, table, panel, weights, bias, weight, sums);
    if constexpr (quarter_fields(LAYOUT) > 2) {
      add_fields<LAYOUT, 2>(k, b, groups, table, panel, weights, bias, weight, sums);
    }
  }
}

// A span of keys and the queries that attend to it.
struct Span {
  const AttendedKeys& keys;
  int64_t begin, end;
  const QueryRows& rows;
  const PartialRows& out;
  Factors* weights;  // [kQueriesAtOnce, patterns, kGroups]
};

// Each of QUERIES vectors of d floats, `stride` apart, times each of sixteen rows of d floats: lane i of dots[q] is of
// row i. d: a multiple of 16
template <int QUERIES>
inline void dot_rows(const float* x, int64_t stride, const float* rows, int d, Floats (&dots)[QUERIES]) {
  Floats part[QUERIES][16];
  for (int t = 0; t < 16; ++t) {
    Floats sum[QUERIES];
    for (int q = 0; q < QUERIES; ++q) sum[q] = broadcast(0.0f);
    for (int c = 0; c < d; c += 16) {
      const Floats row = load(rows + t * d + c);
      for (int q = 0; q < QUERIES; ++q) sum[q] = sum[q] + load(x + q * stride + c) * row;
    }
    for (int q = 0; q < QUERIES; ++q) part[q][t] = sum[q];
  }
  for (int q = 0; q < QUERIES; ++q) {
    for (int n = 16; n > 1; n /= 2) {
      for (int i = 0; i < n / 2; ++i) part[q][i] = pair_sums(part[q][2 * i], part[q][2 * i + 1]);
    }
    dots[q] = part[q][0];
  }
}

// The logits of queries first .. first + QUERIES - 1 in the groups of a block, before a soft cap.
template <Layout KEYS, int QUERIES>
inline void score_block(const AttendedKeys& k, const QueryRows& rows, const Block& b,
                        const LevelBytes<looked_up(KEYS)>& keys, const Ahead& ahead, int first,
                        Floats (&logits)[QUERIES][kGroups]) {
  const int d = k.head_dim;
  const int64_t factor_bytes = query_factor_bytes(d, KEYS);
  const Factors* factors[QUERIES];
  for (int q = 0; q < QUERIES; ++q) {
    factors[q] =
        reinterpret_cast<const Factors*>(static_cast<const uint8_t*>(rows.factors) + (first + q) * factor_bytes);
  }
  for (int g = b.first_group; g < b.end_group; ++g) {
    prefetch_keys(ahead, g);
    Ints dots[QUERIES];
    dot_sixteen<KEYS, QUERIES>(b.keys[g], d, keys, factors, dots);
    const Floats scale = load_float(b.key_scales[g]);
    for (int q = 0; q < QUERIES; ++q) {
      const Ints dot = dots[q] + broadcast(rows.correction[first + q]);
      logits[q][g] = to_floats(dot) * (scale * broadcast(rows.unit[first + q])) + broadcast(rows.shift[first + q]);
    }
    if (k.rope_dim == 0) continue;
    Floats raw[QUERIES];
    dot_rows<QUERIES>(rows.rope + first * rows.rope_stride, rows.rope_stride, b.ropes[g], k.rope_dim, raw);
    for (int q = 0; q < QUERIES; ++q) logits[q][g] = logits[q][g] + raw[q] * broadcast(k.rope_factor);
  }
}

// Not inlined: blocks of which some groups are seen are few, and this is once for all layouts of keys.
template <Layout LAYOUT, int QUERIES>
[[gnu::noinline]] void add_some_values(const AttendedKeys& k, const Block& b, const LevelBytes<LAYOUT>& table,
                                       const Ahead& ahead, const Factors* weights, const Weights (&weight)[QUERIES],
                                       float* const (&sums)[QUERIES]) {
  add_values<LAYOUT, QUERIES>(k, b, SomeGroups{b.first_group, b.end_group}, table, ahead, weights, weight, sums);
}

// Queries first .. first + QUERIES - 1 of the span attend to one block.
template <Layout KEYS, Layout VALUES, int QUERIES>
inline void attend_block(const Span& span, const Block& b, const LevelBytes<looked_up(KEYS)>& keys,
                         const LevelBytes<VALUES>& values, const Ahead& ahead, int first) {
  const AttendedKeys& k = span.keys;
  const QueryRows& rows = span.rows;
  Floats logits[QUERIES][kGroups];
  score_block<KEYS, QUERIES>(k, rows, b, keys, ahead, first, logits);

  Weights weight[QUERIES];
  float* sums[QUERIES];
  bool useful = false;
  const int stride = k.panels.patterns * kGroups;
  for (int q = 0; q < QUERIES; ++q) {
    const int row = first + q;
    Factors* to = span.weights + q * stride;
    weight[q] = weigh(k, b, logits[q], rows.first[row] - b.begin, rows.end[row] - b.begin, span.out.max + row,
                      span.out.sum + row, to);
    if (weight[q].unit == 0) memset(to, 0, stride * sizeof *to);
    useful |= weight[q].unit != 0 || weight[q].keep != 1;
    sums[q] = span.out.sums + row * span.out.stride;
  }
  if (!useful) return;
  if (b.first_group == 0 && b.end_group == kGroups) {
    add_values<VALUES, QUERIES>(k, b, AllGroups{}, values, ahead, span.weights, weight, sums);
  } else {
    add_some_values<VALUES, QUERIES>(k, b, values, ahead, span.weights, weight, sums);
  }
}

// Keys [first, end) of the span [begin, end) that some query sees; none: first is INT64_MAX.
struct SeenKeys {
  int64_t first, end;
};
inline SeenKeys seen_keys(const QueryRows& rows, int64_t begin, int64_t end) {
  SeenKeys seen{INT64_MAX, begin};
  for (int r = 0; r < rows.count; ++r) {
    if (rows.first[r] >= rows.end[r]) continue;
    seen.first = rows.first[r] < seen.first ? rows.first[r] : seen.first;
    seen.end = rows.end[r] > seen.end ? rows.end[r] : seen.end;
  }
  seen.end = seen.end < end ? seen.end : end;
  return seen;
}

// Blocks: finds the blocks of a span and what to prefetch, as PagedBlocks does.
template <Layout KEYS, Layout VALUES, typename Blocks>
void attend_codes(const Span& span, const Blocks& blocks) {
  const AttendedKeys& k = span.keys;
  const QueryRows& rows = span.rows;
  const LevelBytes<looked_up(KEYS)> keys(k.key_levels, 1 << blocks.key_bits());
  const LevelBytes<VALUES> values(k.value_levels, 1 << blocks.value_bits());
  const auto [first, end] = seen_keys(rows, span.begin, span.end);
  for (int64_t begin = span.begin; begin < end; begin += kBlockTokens) {
    if (begin + kBlockTokens <= first) continue;
    const Block b = blocks.find(begin, first, end);
    Ahead ahead = blocks.ahead(begin + kBlockTokens, end);
    in_fours(rows.count, [&]<int QUERIES>(int q) {
      attend_block<KEYS, VALUES, QUERIES>(span, b, keys, values, ahead, q);
      ahead = {};  // it is prefetched once
    });
  }
}

struct PagedBlocks {
  const PagedKeys& keys;
  const int32_t* block_table;
  int64_t kv_head;
  PagedScratch scratch;

  int key_bits() const { return keys.record.key_bits; }
  int value_bits() const { return keys.record.value_bits; }
  Block find(int64_t begin, int64_t first, int64_t end) const {
    return find_block(keys, block_table, kv_head, begin, first, end, scratch);
  }
  Ahead ahead(int64_t begin, int64_t end) const { return find_ahead(keys, block_table, kv_head, begin, end); }
};

// Calls attend_codes for the layout of keys, and for that of values, whose spread codes are nibbles by now.
inline void attend_pages(const PagedKeys& k, const int32_t* block_table, int64_t kv_head, int64_t begin, int64_t end,
                         const QueryRows& rows, const PartialRows& out, void* scratch) {
  const PagedBlocks blocks{k, block_table, kv_head, scratch_of(k, scratch)};
  const Span span{k.attended, begin, end, rows, out, blocks.scratch.weights};
  format::with_width(key_layout(k.record).width, [&](auto key) {
    format::with_width(looked_up({k.record.value_width(), false}).width, [&](auto value) {
      if constexpr (format::valid_key_width(key.value) && format::valid_value_width(value.value) &&
                    !format::is_spread(value.value)) {
        attend_codes<Layout{key.value, false}, Layout{value.value, false}>(span, blocks);
      }
    });
  });
}

// ---- Exact keys --------------------------------------------------------------------------------------------------

// Keys [begin, end) of the sequence, which a query attends to exactly.
struct ExactRun {
  int64_t begin, end;
};
inline ExactRun sink_run(const ExactKeys& e, int row) {
  const int64_t end = e.position[row] + 1;
  return {e.first[row], e.sinks[row] < end ? e.sinks[row] : end};
}
inline ExactRun recent_run(const ExactKeys& e, int row) {
  return {e.first[row] > e.recent[row] ? e.first[row] : e.recent[row], e.position[row] + 1};
}

// The run's share of sixteen keys, from key `first` on: those numbered [begin, end), and their lanes.
inline ExactRun of_sixteen(ExactRun run, int64_t first) {
  return {run.begin > first ? run.begin - first : 0, run.end - first < 16 ? run.end - first : 16};
}
inline Mask lanes_of(ExactRun share) {
  return (broadcast(static_cast<int32_t>(share.begin - 1)) < lane_numbers()) &
         (lane_numbers() < broadcast(static_cast<int32_t>(share.end)));
}

// Calls fn.operator()<QUERIES>(row, share) for the rows with a share of the sixteen keys from key `first` on.
// Neighbours with the same share come together.
template <typename RunOf, typename Fn>
inline void for_same_runs(int count, RunOf&& run_of, int64_t first, Fn&& fn) {
  for (int row = 0, next; row < count; row = next) {
    const ExactRun share = of_sixteen(run_of(row), first);
    for (next = row + 1; next < count; ++next) {
      const ExactRun other = of_sixteen(run_of(next), first);
      if (other.begin != share.begin || other.end != share.end) break;
    }
    if (share.begin >= share.end) continue;
    in_fours(next - row, [&]<int QUERIES>(int q) { fn.template operator()<QUERIES>(row + q, share); });
  }
}

// key: float32 [16, key_dim]
template <int QUERIES>
inline void exact_logits(const ExactKeys& e, const float* key, int row, float softmax_scale, float soft_cap,
                         Floats (&logits)[QUERIES]) {
  dot_rows<QUERIES>(e.q + row * e.key_dim, e.key_dim, key, static_cast<int>(e.key_dim), logits);
  for (int q = 0; q < QUERIES; ++q) {
    logits[q] = logits[q] * broadcast(softmax_scale);
    if (soft_cap > 0) logits[q] = soft_capped(logits[q], soft_cap);
  }
}

// The softmax numerators of one query's exact logits.
struct ExactWeights {
  float of[16];
  float keep;  // factor of earlier sums under the new maximum
  bool add;    // whether there is something to add
};
inline void weigh_exact(Floats logits, ExactRun share, float* row_max, float* row_sum, ExactWeights& to) {
  to.add = false;
  const Floats logit = select(lanes_of(share), logits, broadcast(-kInfinity));
  if (any(is_nan(logit))) {
    *row_sum = __builtin_nanf("");
    return;
  }
  to.keep = raise(row_max, greatest(logit));
  if (*row_max == -kInfinity) return;
  const Floats p = exp(logit - broadcast(*row_max));
  *row_sum = *row_sum * to.keep + sum_lanes(p);
  store(to.of, p);
  to.add = true;
}

// value: [16, d], sums: of QUERIES rows, `stride` apart
template <int QUERIES>
inline void add_exact(const float* value, int d, ExactRun share, const ExactWeights* weights, float* sums,
                      int64_t stride) {
  for (int c = 0; c < d; c += 16) {
    Floats sum[QUERIES];
    for (int q = 0; q < QUERIES; ++q) sum[q] = load(sums + q * stride + c) * broadcast(weights[q].keep);
    for (int64_t t = share.begin; t < share.end; ++t) {
      const Floats x = load(value + t * d + c);
      for (int q = 0; q < QUERIES; ++q) sum[q] = sum[q] + broadcast(weights[q].of[t]) * x;
    }
    for (int q = 0; q < QUERIES; ++q) store(sums + q * stride + c, sum[q]);
  }
}

// Queries row .. row + QUERIES - 1 attend to their share of sixteen keys. key: float32 [16, key_dim], value: [16,
// value_dim]
template <int QUERIES>
inline void attend_sixteen(const ExactKeys& e, const float* key, const float* value, int row, ExactRun share,
                           float softmax_scale, float soft_cap, const PartialRows& out) {
  const int d = static_cast<int>(e.value_dim);
  Floats logits[QUERIES];
  exact_logits<QUERIES>(e, key, row, softmax_scale, soft_cap, logits);
  ExactWeights weights[QUERIES];
  bool all_add = true;
  for (int q = 0; q < QUERIES; ++q) {
    weigh_exact(logits[q], share, out.max + row + q, out.sum + row + q, weights[q]);
    all_add &= weights[q].add;
  }
  float* sums = out.sums + row * out.stride;
  if (all_add) return add_exact<QUERIES>(value, d, share, weights, sums, out.stride);
  for (int q = 0; q < QUERIES; ++q) {
    if (weights[q].add) add_exact<1>(value, d, share, weights + q, sums + q * out.stride, out.stride);
  }
}

template <typename T>
struct ExactRow {
  const T *key, *value;
};
template <typename T>
inline ExactRow<T> exact_row(const ExactKeys& e, int64_t position) {
  if (position >= e.new_begin) {
    const int64_t i = position - e.new_begin;
    return {static_cast<const T*>(e.new_keys) + i * e.new_key_stride,
            static_cast<const T*>(e.new_values) + i * e.new_value_stride};
  }
  const T* key = static_cast<const T*>(e.tail) + format::tail_row(position, e.sink_tokens, e.ring) * e.tail_row;
  return {key, key + e.tail_value_at};
}

// The keys between the first and the last one of all runs.
template <typename RunOf>
inline ExactRun span_of_runs(int count, RunOf&& run_of) {
  ExactRun all{INT64_MAX, 0};
  for (int r = 0; r < count; ++r) {
    const ExactRun run = run_of(r);
    if (run.begin >= run.end) continue;
    all.begin = run.begin < all.begin ? run.begin : all.begin;
    all.end = run.end > all.end ? run.end : all.end;
  }
  return all;
}

// All queries attend to their runs of one kind.
template <typename T, typename RunOf>
void attend_runs(const ExactKeys& e, int count, RunOf&& run_of, float softmax_scale, float soft_cap,
                 const PartialRows& out, float* scratch) {
  const int key_dim = static_cast<int>(e.key_dim), value_dim = static_cast<int>(e.value_dim);
  const auto [begin, end] = span_of_runs(count, run_of);
  float* key = scratch;
  float* value = scratch + 16 * key_dim;
  for (int64_t first = begin; first < end; first += 16) {
    for (int t = 0; t < 16; ++t) {
      const int64_t p = first + t < end ? first + t : end - 1;  // keys behind the end are not seen
      const ExactRow<T> row = exact_row<T>(e, p);
      for (int c = 0; c < key_dim; c += 16) store(key + t * key_dim + c, load_float(row.key + c));
      for (int c = 0; c < value_dim; c += 16) store(value + t * value_dim + c, load_float(row.value + c));
    }
    for_same_runs(count, run_of, first, [&]<int QUERIES>(int row, ExactRun share) {
      attend_sixteen<QUERIES>(e, key, value, row, share, softmax_scale, soft_cap, out);
    });
  }
}

inline void attend_exact(const ExactKeys& e, int count, float softmax_scale, float soft_cap, const PartialRows& out,
                         float* scratch) {
  const auto sinks = [&](int row) { return sink_run(e, row); };
  const auto recent = [&](int row) { return recent_run(e, row); };
  dispatch_dtype<ElementTypes>(e.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    attend_runs<T>(e, count, sinks, softmax_scale, soft_cap, out, scratch);
    attend_runs<T>(e, count, recent, softmax_scale, soft_cap, out, scratch);
  });
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
