// Dense rows: d codes of `bits` bits as one little-endian bit string (docs/format.md section 7), 64 codes at once.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

// codes: [d] -> packed: [dense_row_bytes(d, bits)]. Bytes from there up to `end` may be overwritten, but none from `end` on:
// rows are written in order.
inline void pack_row(const uint8_t* codes, uint8_t* packed, int64_t d, int bits, const BitLayout& layout,
                     const uint8_t* end) {
  if (bits == 8) {
    memcpy(packed, codes, d);
    return;
  }
  for (int64_t c = 0; c < d; c += 64, packed += 8 * bits) {
    const int64_t count = d - c < 64 ? d - c : 64;
    uint8_t some[64] = {};
    if (count < 64) memcpy(some, codes + c, count);
    const Bytes x = load(count < 64 ? some : codes + c);
    if (end - packed >= 64) {
      store_packed(packed, layout, bits, x);
    } else {
      uint8_t bytes[64];
      store_packed(bytes, layout, bits, x);
      memcpy(packed, bytes, format::dense_row_bytes(count, bits));
    }
  }
}

// packed: [dense_row_bytes(d, bits)] -> codes: [d rounded up to 64]. Bytes from there up to `end` may be read.
inline void unpack_row(const uint8_t* packed, uint8_t* codes, int64_t d, int bits, const BitLayout& layout,
                       const uint8_t* end) {
  if (bits == 8) {
    memcpy(codes, packed, d);
    return;
  }
  for (int64_t c = 0; c < d; c += 64, packed += 8 * bits) {
    const int64_t left = format::dense_row_bytes(d - c, bits);
    uint8_t bytes[64] = {};
    if (end - packed < 64) memcpy(bytes, packed, left < 8 * bits ? left : 8 * bits);
    store(codes + c, load_packed(end - packed < 64 ? bytes : packed, layout, bits));
  }
}

// Rows after rows. Where rows are whole bytes, all of them are one bit string.
inline void pack(const uint8_t* codes, uint8_t* packed, int64_t rows, int64_t d, int bits) {
  const BitLayout layout(bits);
  if (d * bits % 8 == 0) d *= rows, rows = rows > 0;
  const int64_t row_bytes = format::dense_row_bytes(d, bits);
  const uint8_t* end = packed + rows * row_bytes;
  for (int64_t r = 0; r < rows; ++r) pack_row(codes + r * d, packed + r * row_bytes, d, bits, layout, end);
}
inline void unpack(const uint8_t* packed, uint8_t* codes, int64_t rows, int64_t d, int bits) {
  const BitLayout layout(bits);
  if (d * bits % 8 == 0) d *= rows, rows = rows > 0;
  const int64_t row_bytes = format::dense_row_bytes(d, bits), whole = d / 64 * 64;
  const uint8_t* end = packed + rows * row_bytes;
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* row = packed + r * row_bytes;
    uint8_t* to = codes + r * d;
    unpack_row(row, to, whole, bits, layout, end);
    if (whole < d) {
      uint8_t some[64];
      unpack_row(row + whole / 8 * bits, some, d - whole, bits, layout, end);
      memcpy(to + whole, some, d - whole);
    }
  }
}

// Whether all codes are below 2^bits.
inline bool codes_fit(const uint8_t* codes, int64_t count, int bits) {
  unsigned seen = 0;
  for (int64_t i = 0; i < count; ++i) seen |= codes[i];
  return seen >> bits == 0;
}

// One row of its own.
inline void pack_row(const uint8_t* codes, uint8_t* packed, int64_t d, int bits) { pack(codes, packed, 1, d, bits); }
inline void unpack_row(const uint8_t* packed, uint8_t* codes, int64_t d, int bits) {
  unpack(packed, codes, 1, d, bits);
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
