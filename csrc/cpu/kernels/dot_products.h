// Integer dot products of queries with packed rows of levels: what `score` and `paged_attention` are made of.
//
// A query becomes 16-bit integers once; codes become levels by table look-up in registers; products are exact in int32.
// Four rows are read at once, 16 bytes of each ("quarters" of a register), so that a lane's sum belongs to one row and only
// four lanes have to be added in the end.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

// The bits of a code where the dot products meet it: three-bit codes are nibbles by then.
constexpr int nibbles(int bits) { return bits == 3 ? 4 : bits; }

// Layouts are the code widths of pages, and bit strings (kBitString + bits), which dense rows of 1, 3 and 5 bits are. What
// 16 bytes of a bit string hold of whole sets of 16 codes counts as a quarter, and every set as a field.
constexpr bool is_string(int bits) { return bits > kBitString; }
constexpr int quarter_fields(int bits) {  // codes of a byte, or sets of 16 codes
  if (is_string(bits)) return 8 / (bits - kBitString);
  return bits == 2 ? 4 : bits == 8 ? 1 : 2;
}
constexpr int quarter_channels(int bits) { return 16 * quarter_fields(bits); }
constexpr int quarter_bytes(int bits) {
  return is_string(bits) ? quarter_channels(bits) / 8 * (bits - kBitString) : bits == 3 ? 12 : 16;
}
inline int quarters_per_row(int d, int bits) { return (d + quarter_channels(bits) - 1) / quarter_channels(bits); }

inline int64_t query_factor_bytes(int d, int bits) {
  return static_cast<int64_t>(quarters_per_row(d, bits)) * quarter_fields(bits) * sizeof(Factors);
}

// Greatest integer that a query channel may become: 256 * 127 + 127, less where d products would leave int32.
inline int greatest_factor(int d, int max_level) {
  const int64_t fits = 2147483647 / (static_cast<int64_t>(max_level) * d);
  return fits < 32639 ? static_cast<int>(fits) : 32639;
}

// Where a row's channels go: to[i] for the bytes of one quarter and field.
inline void quarter_channels(const int16_t* row, int d, int bits, int quarter, int field, int16_t (&to)[16]) {
  if (bits == 3 && d % 128 == 0) {  // gathered: quarter j of a set holds word j of its four groups of 32 channels
    const int16_t* set = row + quarter / 4 * 128 + quarter % 4 * 8 + field;
    for (int i = 0; i < 16; ++i) to[i] = set[i / 4 * 32 + i % 4 * 2];
    return;
  }
  const int fields = quarter_fields(bits);
  const int16_t* first = row + quarter * quarter_channels(bits);
  for (int i = 0; i < 16; ++i) to[i] = first[is_string(bits) ? 16 * field + i : fields * i + field];
}

// scratch: int16 [d + kQueryMargin]
inline float query_factors(const float* q, int d, int bits, int max_level, void* factors, int32_t* correction,
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

  // integer = x / unit; 2^-e keeps the inverse of a tiny unit finite
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
  for (int quarter = 0; quarter < quarters_per_row(d, bits); ++quarter) {
    for (int field = 0; field < quarter_fields(bits); ++field) {
      int16_t f[16];
      quarter_channels(scratch, d, bits, quarter, field, f);
      make_factors(to++, f);
    }
  }
  *correction = static_cast<int32_t>(0u - static_cast<uint32_t>(kLevelBias) * total);
  return all_finite ? (greatest_channel * down / limit) * power_of_two(e) : __builtin_nanf("");
}

// The bytes that stand for the levels of codes: kLevelBias added.
inline uint8_t level_byte(int level) { return static_cast<uint8_t>(level + kLevelBias); }

// The tables of one call's levels, made once per span. levels: [2^bits]
template <int BITS>
struct LevelBytes {
  Table16 table;
  explicit LevelBytes(const int8_t* levels, int count = 1 << BITS) {
    uint8_t bytes[16];
    for (int i = 0; i < 16; ++i) bytes[i] = level_byte(levels[i % count]);
    table = table16(bytes);
  }
  // x: codes of field FIELD, still in their byte
  template <int FIELD>
  Bytes levels(const Bytes& x) const {
    return lookup(table, field<FIELD * BITS>(x, broadcast(static_cast<uint8_t>((1 << BITS) - 1))));
  }
};
template <>
struct LevelBytes<8> {
  explicit LevelBytes(const int8_t*, int = 0) {}
  template <int FIELD>
  Bytes levels(const Bytes& x) const {
    if constexpr (kLevelBias != 0) return x ^ broadcast(static_cast<uint8_t>(kLevelBias));
    return x;
  }
};
template <>
struct LevelBytes<5> {
  Table32 table;
  explicit LevelBytes(const int8_t* levels, int = 0) {
    uint8_t bytes[32];
    for (int i = 0; i < 32; ++i) bytes[i] = level_byte(levels[i]);
    table = table32(bytes);
  }
};

template <int BITS>
  requires(BITS > kBitString)
struct LevelBytes<BITS> {
  CodeTable<BITS - kBitString> table;
  explicit LevelBytes(const int8_t* levels, int = 0) {
    constexpr int kCount = 1 << (BITS - kBitString);
    uint8_t bytes[kCount];
    for (int i = 0; i < kCount; ++i) bytes[i] = level_byte(levels[i]);
    table = code_table<BITS - kBitString>(bytes);
  }
};

// Sixteen rows of codes. Reading runs up to 15 bytes past a row.
struct CodeRows {
  const uint8_t* rows;
  int64_t row_stride;
  const uint8_t* planes;  // bit 4 of 5-bit codes, four bytes for 16 bytes of a row
  int64_t plane_stride;
};

// The levels of field FIELD of one quarter of four rows. BITS 3 means: nibbles by now.
template <int BITS, int FIELD>
ALWAYS_INLINE Levels quarter_levels(const LevelBytes<nibbles(BITS)>& table, const Bytes& x, const Bytes& planes) {
  if constexpr (is_string(BITS)) {
    return widen(lookup_string<BITS - kBitString, 16 * FIELD>(table.table, x));
  } else if constexpr (BITS == 5) {
    return widen(lookup(table.table, field<4 * FIELD>(x, broadcast(uint8_t{15})) | plane_bits<FIELD>(planes)));
  } else {
    return widen(table.template levels<FIELD>(x));
  }
}

// dots[q]: the products of query q with each of sixteen rows of d channels.
//
// Rows i, 4 + i, 8 + i and 12 + i are read together: lane 4l + i of the sums is then row 4l + i.
template <int BITS, int QUERIES>
inline void dot_sixteen(const CodeRows& codes, int d, const LevelBytes<nibbles(BITS)>& table,
                        const Factors* const (&factors)[QUERIES], Ints (&dots)[QUERIES]) {
  constexpr int kFields = quarter_fields(BITS);
  const int quarters = quarters_per_row(d, BITS);
  const int64_t stride = 4 * codes.row_stride, plane_stride = 4 * codes.plane_stride;
  Ints part[QUERIES][4];
  for (int i = 0; i < 4; ++i) {
    const uint8_t* row = codes.rows + i * codes.row_stride;
    const uint8_t* plane = BITS == 5 ? codes.planes + i * codes.plane_stride : nullptr;
    Products sum[QUERIES];
    for (int q = 0; q < QUERIES; ++q) sum[q] = no_products();
    const auto add_field = [&]<int FIELD>(const Bytes& x, const Bytes& top, int quarter)
                               __attribute__((always_inline)) {
                                 const Levels levels = quarter_levels<BITS, FIELD>(table, x, top);
                                 for (int q = 0; q < QUERIES; ++q)
                                   multiply_add(sum[q], levels, factors[q][quarter * kFields + FIELD]);
                               };
    const auto add = [&](const Bytes& x, int quarter) __attribute__((always_inline)) {
      const Bytes top = BITS == 5 ? load_words(plane + 4 * quarter, plane_stride) : x;
      add_field.template operator()<0>(x, top, quarter);
      if constexpr (kFields > 1) add_field.template operator()<1>(x, top, quarter);
      if constexpr (kFields > 2) add_field.template operator()<2>(x, top, quarter);
      if constexpr (kFields > 2) add_field.template operator()<3>(x, top, quarter);
      if constexpr (kFields > 4) {
        if (d - quarter * quarter_channels(BITS) <= 64) return;
        add_field.template operator()<4>(x, top, quarter);
        add_field.template operator()<5>(x, top, quarter);
        add_field.template operator()<6>(x, top, quarter);
        add_field.template operator()<7>(x, top, quarter);
      }
    };
    int u = 0;  // four quarters at once, then what is left
    const bool in_fours = BITS == 3 ? d % 128 == 0 : quarter_bytes(BITS) == 16;
    for (; u + 4 <= quarters && in_fours; u += 4) {
      Bytes x[4];
      if constexpr (BITS == 3) {
        for (int g = 0; g < 4; ++g) x[g] = load_quarters(row + 12 * (u + g), stride);
        gather_three_bits(x);
      } else {
        load_quarters(row + 16 * u, stride, x);
      }
      for (int j = 0; j < 4; ++j) add(x[j], u + j);
    }
    for (; u < quarters; ++u) {
      Bytes x = load_quarters(row + quarter_bytes(BITS) * u, stride);
      if constexpr (BITS == 3) x = append_three_bits(x);
      add(x, u);
    }
    for (int q = 0; q < QUERIES; ++q) part[q][i] = total(sum[q]);
  }
  for (int q = 0; q < QUERIES; ++q) dots[q] = sum_quads(part[q][0], part[q][1], part[q][2], part[q][3]);
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
