// From codes of page records (docs/format.md section 8) to float16 levels, which hold every level exactly.
//
// Four pairs come from eight codes. A code, or its level, becomes the low bits of a float16 number between 1024 and
// 2048, whose distance to the next one is 1; subtracting what was added leaves the level. The order of the pairs
// follows from the word: nibble i stands beside nibble i + 4, which are 16 bits apart.
#pragma once

#include <cuda_fp16.h>

#include "cuda/common/mma.cuh"
#include "format.h"

namespace turboquant::cuda::row_tiles {

enum class ExpansionKind : int {
  kPairs,    // 2 bits: fields of two bits, which two words of nibbles share
  kSpread,   // 3 bits: nibbles whose spare bits hold every fourth word
  kNibbles,  // 4 bits of a uniform grid
  kPlanes,   // 5 bits of a uniform grid: nibbles, and a plane of fifth bits
  kLevels,   // 4 bits with a table of levels
  kBytes,    // 8 bits
};

constexpr uint32_t kMagic = 0x64006400;            // 1024 twice
constexpr float kMagicOfBytes = 1024.0f + 128.0f;  // and the 128 that bytes of a table, or of signed levels, have more

__device__ __forceinline__ __half2 as_halves(uint32_t x) { return reinterpret_cast<const __half2&>(x); }
__device__ __forceinline__ uint32_t as_word(__half2 x) { return reinterpret_cast<const uint32_t&>(x); }

// The bits of x where the mask is set, and those of y.
template <uint32_t MASK>
__device__ __forceinline__ uint32_t masked_or(uint32_t x, uint32_t y) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(x), "n"(MASK), "r"(y));
  return out;
}
template <uint32_t MASK>
__device__ __forceinline__ uint32_t masked_xor(uint32_t x, uint32_t y) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(out) : "r"(x), "n"(MASK), "r"(y));
  return out;
}

// What a half2 of `expand` is multiplied by to be a level.
constexpr float step_of(ExpansionKind kind) {
  return kind == ExpansionKind::kNibbles || kind == ExpansionKind::kPlanes ? 1.0f / 8 : 1.0f;
}

// Tables as bytes: levels of codes 0-7 plus 128, and of codes 8-15 without it. (Levels of the lower half are negative
// and those of the upper half are not, so that both are below 128.)
struct Tables {
  uint32_t low0, low1, high0, high1;
  explicit __device__ __forceinline__ Tables(const int8_t* table) {  // aligned to 4 bytes
    const uint32_t* w = reinterpret_cast<const uint32_t*>(table);
    low0 = w[0], low1 = w[1], high0 = w[2], high1 = w[3];
  }
};
// The byte of a code in its table; 0 where there is none, because codes are no nibbles or there are fewer of them.
// levels: [2^bits] or null, the uniform grid
__device__ __forceinline__ int8_t nibble_table_byte(const int8_t* levels, format::Width width, int code) {
  const int codes = 1 << format::num_bits(width);
  if (format::levels_are_codes(width) || format::has_fifth_bit(width) || code >= codes) return 0;
  // What format::uniform_level says, whose case of 8 bits the compiler would keep.
  static_assert(format::uniform_level(format::Width::k3, 5) == 2 * 5 - 7);
  static_assert(format::uniform_level(format::Width::k4, 5) == 2 * 5 - 15);
  const int level = levels ? levels[code] : 2 * code - (codes - 1);
  return static_cast<int8_t>(code < 8 ? level + 128 : level);
}

// Pairs (i, i + 4), i = 0..3, of the eight nibbles of `w`, as levels divided by step_of. plane: kPlanes only, the fifth
// bit of nibble i at 8 (i / 2) + i % 2.
template <ExpansionKind KIND>
__device__ __forceinline__ void expand(uint32_t w, uint32_t plane, const Tables& t, __half2 (&to)[4]) {
  uint32_t x[4];
  if constexpr (KIND == ExpansionKind::kNibbles || KIND == ExpansionKind::kPlanes) {
    constexpr uint32_t kMask = 0x00F000F0;
    x[0] = masked_or<kMask>(w << 4, kMagic), x[1] = masked_or<kMask>(w, kMagic);
    x[2] = masked_or<kMask>(w >> 4, kMagic), x[3] = masked_or<kMask>(w >> 8, kMagic);
    if constexpr (KIND == ExpansionKind::kPlanes) {
      constexpr uint32_t kFifth = 0x01000100;
      x[0] = masked_or<kFifth>(plane << 8, x[0]), x[1] = masked_or<kFifth>(plane << 7, x[1]);
      x[2] = masked_or<kFifth>(plane, x[2]), x[3] = masked_or<kFifth>(plane >> 1, x[3]);
    }
  } else {
    const uint32_t codes = select_bytes(w, 0, 0x3120);  // nibbles 0 1 4 5 2 3 6 7
    uint32_t low = select_bytes(t.low0, t.low1, codes), high = select_bytes(t.low0, t.low1, codes >> 16);
    if constexpr (KIND == ExpansionKind::kLevels) {
      const uint32_t upper = codes ^ 0x88888888;
      low |= select_bytes(t.high0, t.high1, upper), high |= select_bytes(t.high0, t.high1, upper >> 16);
    }
    x[0] = select_bytes(low, kMagic, 0x5250), x[1] = select_bytes(low, kMagic, 0x5351);
    x[2] = select_bytes(high, kMagic, 0x5250), x[3] = select_bytes(high, kMagic, 0x5351);
    if constexpr (KIND == ExpansionKind::kLevels) {
      constexpr uint32_t kUpper = 0x00800080;
      x[0] = masked_or<kUpper>(w << 4, x[0]), x[1] = masked_or<kUpper>(w, x[1]);
      x[2] = masked_or<kUpper>(w >> 4, x[2]), x[3] = masked_or<kUpper>(w >> 8, x[3]);
    }
  }
  // 1024 and: 8 * 15, 8 * 31, or the 128 of the tables
  constexpr float kAdded = 1024.0f + (KIND == ExpansionKind::kNibbles  ? 120.0f
                                      : KIND == ExpansionKind::kPlanes ? 248.0f
                                                                       : 128.0f);
  const __half2 added = __float2half2_rn(kAdded);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = __hsub2(as_halves(x[i]), added);
}

// Bytes 0 and 2, and bytes 1 and 3, of a word of signed bytes.
__device__ __forceinline__ void expand_bytes(uint32_t w, __half2 (&to)[2]) {
  const __half2 added = __float2half2_rn(kMagicOfBytes);
  to[0] = __hsub2(as_halves(masked_xor<0x00FF00FF>(w, 0x64806480)), added);
  to[1] = __hsub2(as_halves(masked_xor<0x00FF00FF>(w >> 8, 0x64806480)), added);
}
// Pairs (i, i + 4) of the eight signed bytes of two words.
__device__ __forceinline__ void expand_bytes(uint32_t w0, uint32_t w1, __half2 (&to)[4]) {
  const __half2 added = __float2half2_rn(kMagicOfBytes);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t both = select_bytes(w0, w1, 0x4400 + 0x1111 * i);
    to[i] = __hsub2(as_halves(masked_xor<0x00FF00FF>(both, 0x64806480)), added);
  }
}

// The order of channels in a tile of keys: which channel stands at place 8 j + 2 t + e.
__device__ __forceinline__ int channel_at(bool pairs, int j, int t, int e) {
  return pairs ? 16 * (j / 2) + 2 * t + j % 2 + 8 * e : 8 * j + t + 4 * e;
}

// The order of tokens in a tile of codes, within 32 tokens: which token stands at place n. (Token s stands at place
// s % 8 / 2 * 8 + s / 16 * 4 + s % 2 * 2 + s / 8 % 2.)
__device__ __forceinline__ int token_at(int n) { return n / 4 % 2 * 16 + n / 8 * 2 + n / 2 % 2 + n % 2 * 8; }

}  // namespace turboquant::cuda::row_tiles
