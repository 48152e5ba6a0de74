// Dense rows: d codes of `bits` bits as one little-endian bit string (docs/format.md section 7).
#pragma once

#include <cstring>

#include "../format.h"

namespace turboquant::cpu {

// codes: [d] -> packed: [dense_row_bytes(d, bits)]
inline void pack_row(const uint8_t* codes, uint8_t* packed, int64_t d, int bits) {
  if (bits == 8) {
    std::memcpy(packed, codes, d);
    return;
  }
  unsigned pending = 0;  // bits not yet written, lowest first
  int held = 0;
  for (int64_t c = 0; c < d; ++c) {
    pending |= static_cast<unsigned>(codes[c]) << held;
    for (held += bits; held >= 8; held -= 8, pending >>= 8) *packed++ = static_cast<uint8_t>(pending);
  }
  if (held) *packed = static_cast<uint8_t>(pending);
}

// packed: [dense_row_bytes(d, bits)] -> codes: [d]
inline void unpack_row(const uint8_t* packed, uint8_t* codes, int64_t d, int bits) {
  if (bits == 8) {
    std::memcpy(codes, packed, d);
    return;
  }
  const unsigned mask = (1u << bits) - 1;
  unsigned pending = 0;
  int held = 0;
  for (int64_t c = 0; c < d; ++c) {
    if (held < bits) {
      pending |= static_cast<unsigned>(*packed++) << held;
      held += 8;
    }
    codes[c] = static_cast<uint8_t>(pending & mask);
    pending >>= bits;
    held -= bits;
  }
}

}  // namespace turboquant::cpu
