// Integer dot products of queries with packed rows of codes: `score` and `paged_attention` are made of them.
//
// A query becomes 16-bit integers once, codes become levels by table look-up in registers, and products are exact in
// int32. Four rows are read at once, 16 bytes of each ("quarters" of a vector), so that the sum of a lane belongs to
// one row and only four lanes have to be added in the end. cpu/layout.h says where the codes of a quarter belong.
#pragma once

#include "cpu/kernels.h"
#include "cpu/layout.h"
#include "cpu/simd.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

inline int64_t query_factor_bytes(int d, Layout layout) {
  return static_cast<int64_t>(quarters_per_row(d, layout)) * quarter_fields(layout) * sizeof(Factors);
}

// Spread rows of whole sets of four groups are gathered set by set, the others group by group.
constexpr int kGatheredSet = 128;  // channels
inline bool gathers_sets(int d, Layout layout) {
  return !layout.string && format::is_spread(layout.width) && d % kGatheredSet == 0;
}

// The greatest integer that is two signed bytes, 256 * high + low.
constexpr int kGreatestFactor = 256 * 127 + 127;

// The greatest integer that a query channel may become: less than the above where d products would leave int32.
inline int greatest_factor(int d, int max_level) {
  const int64_t fits = INT32_MAX / (static_cast<int64_t>(max_level) * d);
  return fits < kGreatestFactor ? static_cast<int>(fits) : kGreatestFactor;
}

// The channels of a row that meet the bytes of one quarter and field: to[i] belongs to byte i.
inline void gather_quarter(const int16_t* row, int d, Layout layout, int quarter, int field, int16_t (&to)[16]) {
  if (gathers_sets(d, layout)) {  // quarter j of a set holds word j of its four groups of 32 channels
    const int16_t* set = row + quarter / 4 * kGatheredSet + quarter % 4 * 8 + field;
    for (int i = 0; i < 16; ++i) to[i] = set[i / 4 * 32 + i % 4 * 2];
    return;
  }
  const int fields = quarter_fields(layout);
  const int16_t* first = row + quarter * quarter_channels(layout);
  for (int i = 0; i < 16; ++i) to[i] = first[layout.string ? 16 * field + i : fields * i + field];
}

// scratch: int16 [d + kQueryMargin]
inline float query_factors(const float* q, int d, Layout layout, int max_level, void* factors, int32_t* correction,
                           int16_t* scratch) {
  Floats most = broadcast(0.0f);
  Mask finite = most <= most;
  int c = 0;
  for (; c + 16 <= d; c += 16) {
    const Floats a = abs(load(q + c));
    finite = finite & (a < broadcast(kInfinity));
    most = max(most, a);
  }
  float greatest_channel = greatest(most);
  bool all_finite = all(finite);
  for (; c < d; ++c) {
    const float a = __builtin_fabsf(q[c]);
    all_finite &= a < kInfinity;
    greatest_channel = a > greatest_channel ? a : greatest_channel;
  }
  if (!all_finite) greatest_channel = 0;

  // An integer is x / unit. The factor 2^-e keeps the inverse of a tiny unit finite.
  const int e = scale_exponent(greatest_channel);
  const float down = power_of_two(-e), limit = static_cast<float>(greatest_factor(d, max_level));
  memset(scratch, 0, (d + kQueryMargin) * sizeof *scratch);
  if (greatest_channel > 0) {
    const float inverse = limit / (greatest_channel * down);
    for (c = 0; c + 16 <= d; c += 16) {
      int32_t lane[16];
      store(lane, round_to_ints((load(q + c) * broadcast(down)) * broadcast(inverse)));
      for (int i = 0; i < 16; ++i) scratch[c + i] = static_cast<int16_t>(lane[i]);
    }
    for (; c < d; ++c) scratch[c] = static_cast<int16_t>(__builtin_rintf((q[c] * down) * inverse));
  }

  Factors* to = static_cast<Factors*>(factors);
  uint32_t total = 0;
  for (c = 0; c < d; ++c) total += static_cast<uint32_t>(static_cast<int32_t>(scratch[c]));
  for (int quarter = 0; quarter < quarters_per_row(d, layout); ++quarter) {
    for (int field = 0; field < quarter_fields(layout); ++field) {
      int16_t f[16];
      gather_quarter(scratch, d, layout, quarter, field, f);
      make_factors(to++, f);
    }
  }
  *correction = static_cast<int32_t>(0u - static_cast<uint32_t>(kLevelBias) * total);
  return all_finite ? (greatest_channel * down / limit) * power_of_two(e) : __builtin_nanf("");
}

// The byte that stands for a level: kLevelBias is added.
inline uint8_t level_byte(int level) { return static_cast<uint8_t>(level + kLevelBias); }

// The table of levels of one kind of rows, made once per span. levels: int8 [kTableLevels], of which `count` count
template <Layout LAYOUT>
struct LevelBytes {
  static constexpr int kBits = format::num_bits(LAYOUT.width);
  Table16 table;
  explicit LevelBytes(const int8_t* levels, int count = 1 << kBits) {
    uint8_t bytes[16];
    for (int i = 0; i < 16; ++i) bytes[i] = level_byte(levels[i % count]);
    table = table16(bytes);
  }
  // x: codes of field FIELD, still in their byte
  template <int FIELD>
  Bytes levels(const Bytes& x) const {
    return lookup(table, field<FIELD * kBits>(x, broadcast(static_cast<uint8_t>((1 << kBits) - 1))));
  }
};
template <Layout LAYOUT>
  requires(format::levels_are_codes(LAYOUT.width))
struct LevelBytes<LAYOUT> {
  explicit LevelBytes(const int8_t*, int = 0) {}
  template <int FIELD>
  Bytes levels(const Bytes& x) const {
    if constexpr (kLevelBias != 0) return x ^ broadcast(static_cast<uint8_t>(kLevelBias));
    return x;
  }
};
template <Layout LAYOUT>
  requires(!LAYOUT.string && format::has_plane(LAYOUT.width))
struct LevelBytes<LAYOUT> {
  Table32 table;
  explicit LevelBytes(const int8_t* levels, int = 0) {
    uint8_t bytes[32];
    for (int i = 0; i < 32; ++i) bytes[i] = level_byte(levels[i]);
    table = table32(bytes);
  }
};

template <Layout LAYOUT>
  requires(LAYOUT.string)
struct LevelBytes<LAYOUT> {
  static constexpr int kBits = format::num_bits(LAYOUT.width);
  CodeTable<kBits> table;
  explicit LevelBytes(const int8_t* levels, int = 0) {
    uint8_t bytes[1 << kBits];
    for (int i = 0; i < 1 << kBits; ++i) bytes[i] = level_byte(levels[i]);
    table = code_table<kBits>(bytes);
  }
};

// Calls fn.operator()<N>(first) for `count` queries or tokens, N from `first` on: four at a time, then those left over.
template <typename Fn>
ALWAYS_INLINE void in_fours(int count, Fn&& fn) {
  int first = 0;
  for (; first + 4 <= count; first += 4) fn.template operator()<4>(first);
  switch (count - first) {
    case 3: return fn.template operator()<3>(first);
    case 2: return fn.template operator()<2>(first);
    case 1: return fn.template operator()<1>(first);
  }
}

// Sixteen rows of codes. Up to kReadBehind bytes behind a row are read.
constexpr int kReadBehind = 15;
struct CodeRows {
  const uint8_t* rows;
  int64_t row_stride;
  const uint8_t* planes;  // bit 4 of codes with a plane, four bytes for 16 bytes of a row
  int64_t plane_stride;
};

// The levels of field FIELD of one quarter of four rows. Spread codes are nibbles by now.
template <Layout LAYOUT, int FIELD>
ALWAYS_INLINE Levels quarter_levels(const LevelBytes<looked_up(LAYOUT)>& table, const Bytes& x, const Bytes& planes) {
  if constexpr (LAYOUT.string) {
    return widen(lookup_string<format::num_bits(LAYOUT.width), 16 * FIELD>(table.table, x));
  } else if constexpr (format::has_plane(LAYOUT.width)) {
    return widen(lookup(table.table, field<4 * FIELD>(x, broadcast(uint8_t{15})) | plane_bits<FIELD>(planes)));
  } else {
    return widen(table.template levels<FIELD>(x));
  }
}

// dots[q] becomes the products of query q with each of sixteen rows of d channels.
//
// Rows i, 4 + i, 8 + i and 12 + i are read together, so that lane 4l + i of the sums belongs to row 4l + i.
template <Layout LAYOUT, int QUERIES>
inline void dot_sixteen(const CodeRows& codes, int d, const LevelBytes<looked_up(LAYOUT)>& table,
                        const Factors* const (&factors)[QUERIES], Ints (&dots)[QUERIES]) {
  constexpr int kFields = quarter_fields(LAYOUT), kBytes = quarter_bytes(LAYOUT);
  constexpr bool kSpread = !LAYOUT.string && format::is_spread(LAYOUT.width);
  constexpr bool kPlane = !LAYOUT.string && format::has_plane(LAYOUT.width);
  const int quarters = quarters_per_row(d, LAYOUT);
  const int64_t stride = 4 * codes.row_stride, plane_stride = 4 * codes.plane_stride;
  Ints part[QUERIES][4];
  for (int i = 0; i < 4; ++i) {
    const uint8_t* row = codes.rows + i * codes.row_stride;
    const uint8_t* plane = kPlane ? codes.planes + i * codes.plane_stride : nullptr;
    Products sum[QUERIES];
    for (int q = 0; q < QUERIES; ++q) sum[q] = no_products();
    const auto add_field = [&]<int FIELD>(const Bytes& x, const Bytes& top, int quarter)
                               __attribute__((always_inline)) {
                                 const Levels levels = quarter_levels<LAYOUT, FIELD>(table, x, top);
                                 for (int q = 0; q < QUERIES; ++q)
                                   multiply_add(sum[q], levels, factors[q][quarter * kFields + FIELD]);
                               };
    const auto add = [&](const Bytes& x, int quarter) __attribute__((always_inline)) {
      const Bytes top = kPlane ? load_words(plane + 4 * quarter, plane_stride) : x;
      add_field.template operator()<0>(x, top, quarter);
      if constexpr (kFields > 1) add_field.template operator()<1>(x, top, quarter);
      if constexpr (kFields > 2) add_field.template operator()<2>(x, top, quarter);
      if constexpr (kFields > 2) add_field.template operator()<3>(x, top, quarter);
      if constexpr (kFields > 4) {
        if (d - quarter * quarter_channels(LAYOUT) <= 64) return;
        add_field.template operator()<4>(x, top, quarter);
        add_field.template operator()<5>(x, top, quarter);
        add_field.template operator()<6>(x, top, quarter);
        add_field.template operator()<7>(x, top, quarter);
      }
    };
    int u = 0;  // four quarters at once, then the others
    const bool in_fours = kSpread ? gathers_sets(d, LAYOUT) : kBytes == 16;
    for (; u + 4 <= quarters && in_fours; u += 4) {
      Bytes x[4];
      if constexpr (kSpread) {
        for (int g = 0; g < 4; ++g) x[g] = load_quarters(row + kBytes * (u + g), stride);
        gather_three_bits(x);
      } else {
        load_quarters(row + 16 * u, stride, x);
      }
      for (int j = 0; j < 4; ++j) add(x[j], u + j);
    }
    for (; u < quarters; ++u) {
      Bytes x = load_quarters(row + kBytes * u, stride);
      if constexpr (kSpread) x = append_three_bits(x);
      add(x, u);
    }
    for (int q = 0; q < QUERIES; ++q) part[q][i] = total(sum[q]);
  }
  for (int q = 0; q < QUERIES; ++q) dots[q] = sum_quads(part[q][0], part[q][1], part[q][2], part[q][3]);
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
