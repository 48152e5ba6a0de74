// Affine quantisation of groups of channels (docs/format.md section 10).
#pragma once

#include "cpu/kernels/bit_string.h"
#include "cpu/kernels/rows.h"

namespace turboquant::cpu::TURBOQUANT_LEVEL {

constexpr int kLargestGroup = 64;

struct GroupScale {
  uint16_t scale, zero;  // float16
};

// One group of 32 or 64 channels: x -> codes.
template <typename T>
inline GroupScale encode_group(const T* x, uint8_t* codes, int group, int bits) {
  Floats channels[kLargestGroup / 16];
  const int vectors = group / 16;
  Ints size = broadcast(0);
  Floats low = load_float(x), high = low;
  for (int i = 0; i < vectors; ++i) {
    const Floats v = channels[i] = load_float(x + 16 * i);
    size = max(size, as_ints(abs(v)));
    low = min(low, v);
    high = max(high, v);
  }
  memset(codes, 0, group);
  if (greatest(size) >= 0x7F800000) return {format::kNanScale, format::kNanScale};

  const auto half = [](float v) {
    v = v < -format::kMaxHalf ? -format::kMaxHalf : v > format::kMaxHalf ? format::kMaxHalf : v;
    return float_to_half(v);
  };
  const float bottom = least(low) + 0.0f, span = (greatest(high) + 0.0f) - bottom;  // a zero counts as +0
  const float top = static_cast<float>((1 << bits) - 1);
  const GroupScale result = {half(span / top), half(bottom)};
  const float scale = half_to_float(result.scale), zero = half_to_float(result.zero);
  if (!(scale > 0)) return result;
  const Floats inverse = broadcast(1 / scale);
  const auto code = [&](const Floats& v) {
    const Floats rounded = (v - broadcast(zero)) * inverse + broadcast(0.5f);
    return truncate_to_ints(min(max(rounded, broadcast(0.0f)), broadcast(top)));
  };
  for (int i = 0; i < vectors; i += 2) store_bytes(codes + 16 * i, narrow(code(channels[i]), code(channels[i + 1])));
  return result;
}

inline void group_encode(const GroupRows& rows, const void* x, int64_t stride, uint8_t* packed, uint16_t* scale,
                         uint16_t* zero) {
  const int64_t d = rows.d, row_bytes = format::dense_row_bytes(d, rows.bits), count = rows.count;
  const int group = rows.group, bits = rows.bits;
  const uint8_t* end = packed + count * row_bytes;
  const BitLayout layout(bits);
  dispatch_rows(rows.dtype, group, [&](auto tag) {
    const auto* in = static_cast<const typename decltype(tag)::type*>(x);
    for (int64_t r = 0; r < count; ++r, in += stride, packed += row_bytes) {
      // 64 channels at once, whose codes are whole bytes; half of that may be left at the end
      for (int64_t c = 0; c < d; c += 64) {
        const int channels = static_cast<int>(d - c < 64 ? d - c : 64);
        alignas(64) uint8_t codes[64];
        for (int i = 0; i < channels; i += group) {
          const GroupScale g = encode_group(in + c + i, codes + i, group, bits);
          *scale++ = g.scale;
          *zero++ = g.zero;
        }
        pack_row(codes, packed + c / 8 * bits, channels, bits, layout, end);
      }
    }
  });
}

inline void group_decode(const GroupRows& rows, const uint8_t* packed, const uint16_t* scale, const uint16_t* zero,
                         void* out) {
  const int64_t d = rows.d, row_bytes = format::dense_row_bytes(d, rows.bits), count = rows.count;
  const int group = rows.group, bits = rows.bits;
  const uint8_t* end = packed + count * row_bytes;
  const BitLayout layout(bits);
  dispatch_rows(rows.dtype, group, [&](auto tag) {
    auto* to = static_cast<typename decltype(tag)::type*>(out);
    for (int64_t r = 0; r < count; ++r, to += d, packed += row_bytes) {
      for (int64_t c = 0; c < d; c += 64) {
        const int channels = static_cast<int>(d - c < 64 ? d - c : 64);
        alignas(64) uint8_t codes[64];
        unpack_row(packed + c / 8 * bits, codes, channels, bits, layout, end);
        for (int i = 0; i < channels; i += group) {
          const Floats s = broadcast(half_to_float(*scale++)), z = broadcast(half_to_float(*zero++));
          for (int k = i; k < i + group; k += 16) {
            store_float(to + c + k, load_float(reinterpret_cast<const int8_t*>(codes) + k) * s + z);
          }
        }
      }
    }
  });
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL
