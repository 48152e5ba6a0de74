// Integer dot products of queries with packed rows of levels: what `score` and `paged_attention` are made of.
//
// A query becomes 16-bit integers once; codes become levels by table look-up in registers; products are exact in int32.
// Codes are read in chunks of 64 bytes: 64, 128 or 256 channels of one row, or several short rows at once.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

// How rows of a code width lie in chunks. Three-bit codes are read after spreading to nibbles, so they count as 4 bits.
template <int BITS>
struct Chunk {
  static_assert(BITS == 2 || BITS == 4 || BITS == 5 || BITS == 8);
  static constexpr int kFields = BITS == 2 ? 4 : BITS == 8 ? 1 : 2;  // codes per byte
  static constexpr int kChannels = 64 * kFields;
};
constexpr int chunk_fields(int bits) { return bits == 2 ? 4 : bits == 8 ? 1 : 2; }

// Rows of d channels in one chunk: several where they fill it exactly, else one row takes chunks of its own.
inline int rows_per_chunk(int d, int bits) {
  const int channels = 64 * chunk_fields(bits);
  if (bits == 5 && d % 32 != 0) return 1;  // planes have padding there
  return d < channels && channels % d == 0 ? channels / d : 1;
}
inline int chunks_per_row(int d, int bits) {
  const int channels = 64 * chunk_fields(bits);
  return (d + channels - 1) / channels;
}

inline int64_t query_factor_bytes(int d, int bits) {
  return static_cast<int64_t>(chunks_per_row(d, bits)) * chunk_fields(bits) * sizeof(Factors);
}

// Greatest integer that a query channel may become: 256 * 127 + 127, less where d products would leave int32.
inline int greatest_factor(int d, int max_level) {
  const int64_t fits = 2147483647 / (static_cast<int64_t>(max_level) * d);
  return fits < 32639 ? static_cast<int>(fits) : 32639;
}

inline float query_factors(const float* q, int d, int bits, int max_level, void* factors, int32_t* correction) {
  float greatest = 0;
  bool finite = true;
  for (int c = 0; c < d; ++c) {
    const float a = __builtin_fabsf(q[c]);
    finite &= a < kInfinity;
    greatest = a > greatest ? a : greatest;
  }
  const double unit = finite ? static_cast<double>(greatest) / greatest_factor(d, max_level) : 0;
  const double inverse = unit > 0 ? 1 / unit : 0;
  const auto integer = [&](int c) { return static_cast<int32_t>(__builtin_rint(q[c] * inverse)); };

  const int fields = chunk_fields(bits), channels = 64 * fields, rows = rows_per_chunk(d, bits);
  Factors* to = static_cast<Factors*>(factors);
  uint32_t total = 0;
  for (int chunk = 0; chunk < chunks_per_row(d, bits); ++chunk) {
    for (int field = 0; field < fields; ++field) {
      int16_t f[64];
      for (int i = 0; i < 64; ++i) {
        const int c = chunk * channels + fields * i + field, channel = rows > 1 ? c % d : c;
        f[i] = static_cast<int16_t>(unit > 0 && channel < d ? integer(channel) : 0);
        if (c < d) total += static_cast<uint32_t>(f[i]);
      }
      make_factors(to++, f);
    }
  }
  *correction = static_cast<int32_t>(0u - static_cast<uint32_t>(kLevelBias) * total);
  return finite ? static_cast<float>(unit) : __builtin_nanf("");
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

// Sixteen rows of codes. Reading runs up to 63 bytes past a row (15 past a plane).
struct CodeRows {
  const uint8_t* rows;
  int64_t row_stride;
  const uint8_t* planes;  // bit 4 of 5-bit codes
  int64_t plane_stride;
};

// Adds one chunk's products for the queries of a group.
template <int BITS, int QUERIES>
ALWAYS_INLINE void add_chunk(Products (&sum)[QUERIES], const LevelBytes<BITS>& table, const uint8_t* codes,
                             const uint8_t* plane, const Factors* const (&factors)[QUERIES], int unit) {
  const Bytes x = load(codes);
  const auto add = [&](const Bytes& levels, int field) __attribute__((always_inline)) {
    const Levels l = widen(levels);
    for (int q = 0; q < QUERIES; ++q) multiply_add(sum[q], l, factors[q][unit + field]);
  };
  if constexpr (BITS == 5) {
    const Planes top = spread_planes(plane);
    add(lookup(table.table, field<0>(x, broadcast(uint8_t{15})) | plane_bits<0>(top)), 0);
    add(lookup(table.table, field<4>(x, broadcast(uint8_t{15})) | plane_bits<1>(top)), 1);
  } else {
    add(table.template levels<0>(x), 0);
    if constexpr (BITS < 8) add(table.template levels<1>(x), 1);
    if constexpr (BITS == 2) add(table.template levels<2>(x), 2);
    if constexpr (BITS == 2) add(table.template levels<3>(x), 3);
  }
}

// dots[q]: the products of query q with each of sixteen rows, ROWS of which lie in a chunk, or which take `chunks` each
// (known to the compiler where CHUNKS is not 0).
template <int BITS, int QUERIES, int ROWS, int CHUNKS>
inline void dot_rows(const CodeRows& codes, const LevelBytes<BITS>& table, const Factors* const (&factors)[QUERIES],
                     int chunks, Ints (&dots)[QUERIES]) {
  const auto row = [&](int i, Products(&sum)[QUERIES]) __attribute__((always_inline)) {
    for (int q = 0; q < QUERIES; ++q) sum[q] = no_products();
    const uint8_t* code = codes.rows + i * codes.row_stride;
    const uint8_t* plane = codes.planes + i * codes.plane_stride;
    for (int c = 0; c < (CHUNKS ? CHUNKS : chunks); ++c) {
      add_chunk<BITS, QUERIES>(sum, table, code + 64 * c, plane + 16 * c, factors, c * Chunk<BITS>::kFields);
    }
  };
  if constexpr (ROWS <= 2) {  // four vectors at a time, so that they stay in registers
    Ints quads[QUERIES][4];
    for (int j = 0; j < 4 / ROWS; ++j) {
      Products a[QUERIES], b[QUERIES], c[QUERIES], d[QUERIES];
      row((4 * j) * ROWS, a), row((4 * j + 1) * ROWS, b), row((4 * j + 2) * ROWS, c), row((4 * j + 3) * ROWS, d);
      for (int q = 0; q < QUERIES; ++q) quads[q][j] = sum_quads(total(a[q]), total(b[q]), total(c[q]), total(d[q]));
    }
    for (int q = 0; q < QUERIES; ++q) {
      if constexpr (ROWS == 1) dots[q] = sum_quarters(quads[q][0], quads[q][1], quads[q][2], quads[q][3]);
      if constexpr (ROWS == 2) dots[q] = sum_halves(quads[q][0], quads[q][1]);
    }
  } else {  // short rows: neighbouring lanes, until one lane is left of each
    Ints part[QUERIES][16 / ROWS];
    for (int i = 0; i < 16 / ROWS; ++i) {
      Products sum[QUERIES];
      row(i * ROWS, sum);
      for (int q = 0; q < QUERIES; ++q) part[q][i] = total(sum[q]);
    }
    for (int q = 0; q < QUERIES; ++q) {
      for (int n = 16 / ROWS; n > 1; n /= 2) {
        for (int i = 0; i < n / 2; ++i) part[q][i] = pair_sums(part[q][2 * i], part[q][2 * i + 1]);
      }
      dots[q] = part[q][0];
    }
  }
}

// The same for any number of rows per chunk.
template <int BITS, int QUERIES>
inline void dot_sixteen(const CodeRows& codes, int d, const LevelBytes<BITS>& table,
                        const Factors* const (&factors)[QUERIES], Ints (&dots)[QUERIES]) {
  const int chunks = chunks_per_row(d, BITS);
  switch (rows_per_chunk(d, BITS)) {
    case 16: return dot_rows<BITS, QUERIES, 16, 1>(codes, table, factors, 1, dots);
    case 8: return dot_rows<BITS, QUERIES, 8, 1>(codes, table, factors, 1, dots);
    case 4: return dot_rows<BITS, QUERIES, 4, 1>(codes, table, factors, 1, dots);
    case 2: return dot_rows<BITS, QUERIES, 2, 1>(codes, table, factors, 1, dots);
    default:
      if (chunks == 1) return dot_rows<BITS, QUERIES, 1, 1>(codes, table, factors, 1, dots);
      return dot_rows<BITS, QUERIES, 1, 0>(codes, table, factors, chunks, dots);
  }
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
