// Dense rows: d codes of `bits` bits as one little-endian bit string (docs/format.md section 7), 64 codes at once.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

// codes: [d] -> packed: [dense_row_bytes(d, bits)]. May overwrite the bytes between there and `end`, because rows are
// written in order.
inline void pack_row(const uint8_t* codes, uint8_t* packed, int64_t d, int bits, const BitLayout& layout,
                     const uint8_t* end) {
  if (bits == format::kMaxBits) {  // codes are bytes
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

// packed: [dense_row_bytes(d, bits)] -> codes: [d rounded up to 64]. May read the bytes between the row and `end`.
inline void unpack_row(const uint8_t* packed, uint8_t* codes, int64_t d, int bits, const BitLayout& layout,
                       const uint8_t* end) {
  if (bits == format::kMaxBits) {
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

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
