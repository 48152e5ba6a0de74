// The ops pack and unpack: rows of codes as bit strings.
#pragma once

#include "cpu/kernels/bit_string.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

// Rows one after the other. Where rows are whole bytes, all of them are one bit string.
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

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
