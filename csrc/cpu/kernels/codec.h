// The ops encode and decode: dense rows of codes with a scale each.
#pragma once

#include "cpu/kernels/bit_string.h"
#include "cpu/kernels/vector_codec.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

// Encodes rows of x as dense rows of codes and a scale each.
inline void encode(const EncodeRows& rows, const Quantiser& q, uint8_t* packed, uint16_t* scale) {
  const int d = rows.split.blocks * rows.split.block, bits = format::num_bits(q.width);
  const int64_t row_bytes = format::dense_row_bytes(d, bits);
  const uint8_t* end = packed + rows.count * row_bytes;
  const BitLayout layout(bits);
  EncoderScratch s;
  dispatch_rows(rows.dtype, d, [&](auto tag) {
    const auto* x = static_cast<const typename decltype(tag)::type*>(rows.x);
    for (int64_t r = 0; r < rows.count; ++r, packed += row_bytes) {
      const int32_t greatest = load_row<tag.kWhole>(x + r * rows.stride, rows.channels, d, s.y);
      scale[r] = encode_row(s, rows.split, rows.signs, q, greatest);
      pack_row(s.codes, packed, d, bits, layout, end);
    }
  });
}

// Decodes dense rows of codes and their scales to rows of `out`.
inline void decode(const DecodeRows& rows, void* out) {
  const int d = rows.split.blocks * rows.split.block, bits = format::num_bits(rows.width);
  const int64_t row_bytes = format::dense_row_bytes(d, bits);
  const uint8_t* end = rows.packed + rows.count * row_bytes;
  const BitLayout layout(bits);
  const Table32 levels = table32(reinterpret_cast<const uint8_t*>(rows.levels));
  DecoderScratch s;
  memset(s.codes, 0, (d + 63) / 64 * 64);
  dispatch_rows(rows.dtype, d, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t r = 0; r < rows.count; ++r) {
      unpack_row(rows.packed + r * row_bytes, s.codes, d, bits, layout, end);
      decode_row<T, tag.kWhole>(s, rows.split, rows.signs, rows.channels, rows.width, levels, rows.scale[r],
                                static_cast<T*>(out) + r * d);
    }
  });
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
