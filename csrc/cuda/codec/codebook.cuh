// The arithmetic that all encoders and decoders share (docs/format.md sections 4 to 7), however they hold their
// vectors: codec/generic.cuh, codec/lanes.cuh, codec/encode_bulk.cuh and codec/encode_step.cu.
//
// Codes travel as octets: the eight codes of channels 8 o to 8 o + 7 in two registers. The order below is that of the
// format: octets and dense rows, levels, encoding.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/codec/transform.cuh"
#include "cuda/common/mma.cuh"
#include "format.h"

namespace turboquant::cuda {

using format::ScaleMode;
using format::Width;

// ---- Octets and dense rows ------------------------------------------------------------------------------------------

// Up to 5 bits: bits 0 to 3 of code i are nibble i of `low`, its bit 4 is bit i of `high`. 8 bits: each code is a byte,
// codes 0 to 3 in `low`, 4 to 7 in `high`.
struct Octet {
  uint32_t low, high;

  __device__ __forceinline__ unsigned code(Width width, int i) const {
    if (format::levels_are_codes(width)) return (i < 4 ? low >> 8 * i : high >> 8 * (i - 4)) & 255;
    return (low >> 4 * i & 15) | (high >> i & 1) << 4;
  }
  // The code must have been zero.
  __device__ __forceinline__ void set(Width width, int i, unsigned code) {
    if (format::levels_are_codes(width)) {
      (i < 4 ? low : high) |= code << 8 * (i % 4);
    } else {
      low |= (code & 15) << 4 * i;
      high |= code >> 4 << i;
    }
  }
};

// Eight nibbles whose lower `bits` <= 4 bits are codes, closed up to a string of 8 * bits bits; and back, where the
// word may hold anything above the string.
__device__ __forceinline__ uint32_t close_nibbles(uint32_t x, int bits) {
  const int gap = 4 - bits;
  x = (x & 0x0F0F0F0F) | (x & 0xF0F0F0F0) >> gap;
  x = (x & 0x00FF00FF) | (x & 0xFF00FF00) >> 2 * gap;
  return (x & 0x0000FFFF) | (x & 0xFFFF0000) >> 4 * gap;
}
__device__ __forceinline__ uint32_t open_nibbles(uint32_t x, int bits) {
  const int gap = 4 - bits;
  x = select_bits(0x0000FFFF, x, x << 4 * gap);  // bits above the string stay until the last mask
  x = select_bits(0x00FF00FF, x, x << 2 * gap);
  x = select_bits(0x0F0F0F0F, x, x << gap);
  return x & 0x11111111 * ((1u << bits) - 1);
}

// The lowest bits of eight nibbles from bits 0 to 7.
__device__ __forceinline__ uint32_t nibbles_of_bits(uint32_t b) {
  b = (b & 15) | (b & 0xF0) << 12;
  b = (b & 0x00030003) | (b & 0x000C000C) << 6;
  return (b & 0x01010101) | (b & 0x02020202) << 3;
}

// A string of four 5-bit codes from four nibbles and four high bits; and back.
__device__ __forceinline__ uint32_t close_fives(uint32_t nibbles, uint32_t high) {
  uint32_t x = (nibbles & 0x00FF) | (nibbles & 0xFF00) << 2;
  x = (x & 0x03C0F) | (x & 0x3C0F0) << 1;
  return x | ((high << 4 | high << 8 | high << 12 | high << 16) & 0x84210);
}
__device__ __forceinline__ uint32_t open_fives(uint32_t x, uint32_t* high) {
  *high = (x >> 4 & 1) | (x >> 8 & 2) | (x >> 12 & 4) | (x >> 16 & 8);
  x = (x & 0x03C0F) | (x & 0x781E0) >> 1;
  return (x & 0x000FF) | (x & 0x3FC00) >> 2;
}

// An octet as a string of 8 * bits bits (section 7); and back. Codes that are no bytes and no nibbles have 5 bits.
__device__ __forceinline__ uint64_t dense_string(Octet o, Width width) {
  if (format::levels_are_codes(width)) return o.low | uint64_t{o.high} << 32;
  if (format::fits_nibble(width)) return close_nibbles(o.low, format::num_bits(width));
  return close_fives(o.low & 0xFFFF, o.high & 15) | uint64_t{close_fives(o.low >> 16, o.high >> 4)} << 20;
}
__device__ __forceinline__ Octet octet_of_string(uint64_t string, Width width) {
  const uint32_t low = static_cast<uint32_t>(string);
  if (format::levels_are_codes(width)) return {low, static_cast<uint32_t>(string >> 32)};
  if (format::fits_nibble(width)) return {open_nibbles(low, format::num_bits(width)), 0};
  uint32_t high[2];
  const uint32_t first = open_fives(low & 0xFFFFF, high), second = open_fives(string >> 20 & 0xFFFFF, high + 1);
  return {first | second << 16, high[0] | high[1] << 4};
}

// The octet whose string starts at `byte` of `words`. Reads up to 8 bytes past the word of that byte.
__device__ __forceinline__ Octet read_octet(const uint32_t* words, int byte, Width width) {
  const int w = byte / 4, shift = byte % 4 * 8;
  const uint32_t next = words[w + 1];
  uint64_t string = __funnelshift_r(words[w], next, shift);
  if (!format::fits_nibble(width)) string |= uint64_t{__funnelshift_r(next, words[w + 2], shift)} << 32;
  return octet_of_string(string, width);
}

// Copies between global and shared memory, 16 bytes at a time where both sides start at a multiple of 16 bytes.
__device__ __forceinline__ void copy_bytes(const uint8_t* from, uint8_t* to, int64_t bytes, int thread, int threads) {
  int64_t done = 0;
  if ((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % 16 == 0) {
    done = bytes / 16 * 16;
    for (int64_t i = 16 * thread; i < done; i += 16 * threads) {
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    }
  }
  for (int64_t i = done + thread; i < bytes; i += threads) to[i] = from[i];
}

// ---- Levels ---------------------------------------------------------------------------------------------------------

// Writes the level of every code to shared memory, float [2^bits], unless codes are levels; the caller synchronises.
__device__ __forceinline__ void fill_levels(float* table, const int8_t* levels, Width width, int thread, int threads) {
  if (format::levels_are_codes(width)) return;
  for (int code = thread; code < 1 << format::num_bits(width); code += threads) {
    table[code] = static_cast<float>(format::level_of_code(width, levels, code));
  }
}

__device__ __forceinline__ float level_of(Octet o, Width width, int i, const float* table) {
  const unsigned code = o.code(width, i);
  return format::levels_are_codes(width) ? static_cast<float>(static_cast<int8_t>(code)) : table[code];
}

// ---- Encoding -------------------------------------------------------------------------------------------------------

// A codebook as an argument of a kernel.
struct Codebook {
  const int8_t* levels;  // [2^bits], null for the uniform grid
  const float* steps;    // [num_steps]
  Width width;
  int num_steps;
  ScaleMode scale_mode;
};

// The float32 constants of section 5, from sqrt(d) and sqrt(n).
struct EncodeConstants {
  float units;       // 4096 sqrt(d)
  float norm;        // 1 / sqrt(n)
  float over_root;   // 32 / sqrt(d)
  float times_root;  // 32 sqrt(d)

  static constexpr EncodeConstants of_roots(double root_d, double root_n) {
    return {static_cast<float>(format::kUnitsPerSigma * root_d), static_cast<float>(1 / root_n),
            static_cast<float>(32 / root_d), static_cast<float>(32 * root_d)};
  }
  static EncodeConstants of(format::Split split) {
    return of_roots(std::sqrt(static_cast<double>(split.blocks * split.block)),
                    std::sqrt(static_cast<double>(split.block)));
  }
};

// The boundary between two neighbouring levels of a table, in grains (section 4), before it is limited.
__device__ __forceinline__ float table_boundary(int below, int above, float step) {
  const float units = __fmul_rn(step, format::kUnitsPerSigma / 2 / format::kTableGrain);
  return rintf(__fmul_rn(static_cast<float>(below + above), units));
}

// Added to a number that is small beside it, this leaves the nearest integer (ties to even) in the low bits.
constexpr float kInteger = 0x1.8p23f;
__device__ __forceinline__ float nearest_integer(float x) { return __fsub_rn(__fadd_rn(x, kInteger), kInteger); }

// The magnitudes of 8-bit codes under one candidate. A signed byte has too many boundaries to compare with, so they are
// computed. The place of a coordinate u is u + 1/2: its magnitude is that of u, or ~u where u is negative, plus 1/2, so
// that a boundary is either below it or above it.
struct ByteSteps {
  float half;     // half a step, in units of u
  float inverse;  // of a step, too large by 2^-20 of it
  float limit;    // places from here on have the greatest level

  __device__ __forceinline__ explicit ByteSteps(float step) {
    // Beyond these limits all boundaries are 0, or out of reach.
    half = fminf(fmaxf(__fmul_rn(step, format::kUnitsPerSigma / 2), 0x1p-20f), 0x1p20f);
    inverse = __fmul_rn(__fdividef(1, 2 * half), 1 + 0x1p-20f);
    limit = 2 * half * format::kMaxByteLevel;
  }

  // The boundary above magnitude m: the product of 2 m + 1 and `half`, rounded as section 4 says.
  __device__ __forceinline__ float boundary(float m) const { return nearest_integer(__fmaf_rn(m, 2 * half, half)); }

  // The product gives the magnitude or, next to a boundary, one more.
  __device__ __forceinline__ float magnitude(float place) const {
    const float m = nearest_integer(__fmul_rn(fminf(fabsf(place), limit), inverse));
    return boundary(m - 1) > fabsf(place) ? m - 1 : m;
  }
};

// The low bytes of four numbers, to which kInteger was added.
__device__ __forceinline__ uint32_t low_bytes(float a, float b, float c, float d) {
  const auto pair = [](float x, float y) { return select_bytes(__float_as_uint(x), __float_as_uint(y), 0x40); };
  return select_bytes(pair(a, b), pair(c, d), 0x5410);
}

// Levels and boundaries of a codebook in shared memory. Both are symmetric, so the positive half is enough: a
// coordinate u < 0 has the magnitude of ~u = -u - 1, because a coordinate that lies on a boundary belongs to the upper
// code.
struct SharedCodebook {
  static constexpr int kMaxSteps = 64, kMaxHalf = 16;
  int boundary[kMaxSteps][kMaxHalf];  // of tables, in grains: half - 1 of each candidate, increasing
  float step[kMaxSteps];
  int level[kMaxHalf];  // of the magnitudes 0 to half - 1

  // The caller synchronises. Every thread issues its loads together: a short kernel spends most of its time waiting for
  // memory.
  __device__ __forceinline__ void fill(const Codebook& book, int thread, int threads) {
    const int entries = book.num_steps * kMaxHalf;
    fill_entry(book, thread, thread < entries);
    fill_entry(book, thread + threads, thread + threads < entries);
#pragma unroll 1
    for (int i = thread + 2 * threads; i < entries; i += threads) fill_entry(book, i, true);
  }

  // Magnitudes of N coordinates under candidate s: how many positive boundaries are <= u, or <= ~u.
  template <int N>
  __device__ __forceinline__ void magnitudes(Width width, int s, const int* u, int* magnitude) const {
    if (format::levels_are_codes(width)) {
      const ByteSteps steps(step[s]);
#pragma unroll
      for (int i = 0; i < N; ++i) magnitude[i] = static_cast<int>(steps.magnitude(static_cast<float>(u[i]) + 0.5f));
      return;
    }
    int cell[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      cell[i] = static_cast<int>(static_cast<unsigned>(u[i] ^ u[i] >> 31) / format::kTableGrain);
      magnitude[i] = 0;
    }
    for (int stride = 1 << format::num_bits(width) >> 2; stride > 0; stride /= 2) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (boundary[s][magnitude[i] + stride - 1] <= cell[i]) magnitude[i] += stride;
      }
    }
  }

  // Boundary i % 16 of candidate i / 16; the first entries of a candidate write its step, those of candidate 0 levels,
  // too.
  __device__ __forceinline__ void fill_entry(const Codebook& book, int i, bool exists) {
    const int s = i / kMaxHalf, j = i % kMaxHalf;
    const int half = format::levels_are_codes(book.width) ? 0 : 1 << (format::num_bits(book.width) - 1),
              code = half + j;
    const bool has_level = exists && j < half, has_boundary = exists && j + 1 < half;
    const float step_size = exists ? book.steps[s] : 0;
    const int below = has_level ? format::level_of_code(book.width, book.levels, code) : 0;
    const int above = has_boundary ? format::level_of_code(book.width, book.levels, code + 1) : 0;
    if (exists && j == 0) step[s] = step_size;
    if (has_level && s == 0) level[j] = below;
    if (has_boundary) {
      boundary[s][j] = static_cast<int>(fminf(table_boundary(below, above, step_size), format::kMaxBoundary));
    }
  }

  __device__ __forceinline__ int level_of(Width width, int magnitude) const {
    return format::levels_are_codes(width) ? magnitude : level[magnitude];
  }
};

// The levels of magnitudes, a byte each, in four words of shared memory, by the first threads of a block; the caller
// synchronises.
__device__ __forceinline__ void fill_level_bytes(uint32_t* words, const SharedCodebook& book, int thread) {
  if (thread >= 4) return;
  words[thread] = 0;
#pragma unroll
  for (int b = 0; b < 4; ++b) words[thread] |= static_cast<uint32_t>(book.level[4 * thread + b]) << 8 * b;
}

// The levels of the four low nibbles, from the words of fill_level_bytes. WIDE: magnitudes are up to 15, else up to 7;
// bit 3 is 0 then. A nibble with bit 3 makes a permutation repeat the sign bit of a level, which is 0: so each half of
// the levels gives 0 for the magnitudes of the other half.
template <bool WIDE>
__device__ __forceinline__ uint32_t levels_of_nibbles(uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                                      uint32_t nibbles) {
  const uint32_t level = select_bytes(a, b, nibbles);
  return WIDE ? level | select_bytes(c, d, nibbles ^ 0x8888) : level;
}

// LANES neighbouring lanes, a power of two of up to eight, have sums of eight candidates each; `lane` is the number of
// one. Afterwards it has its share of the candidates, 8 / LANES in order, at the front, added up over these lanes.
template <int LANES>
__device__ __forceinline__ void divide_candidates(uint32_t (&dot)[8], uint32_t (&square)[8], int lane) {
#pragma unroll
  for (int bit = LANES / 2, n = 4; bit > 0; bit /= 2, n /= 2) {
    const bool upper = lane & bit;
    const auto add = [&](uint32_t& sum, uint32_t second) {
      const uint32_t other = __shfl_xor_sync(0xffffffff, upper ? sum : second, bit);
      sum = (upper ? second : sum) + other;
    };
#pragma unroll
    for (int s = 0; s < n; ++s) add(dot[s], dot[s + n]), add(square[s], square[s + n]);
  }
}

// The bits of a magnitude: they have the order of the values, with NaN above kInfinityBits.
__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFF; }

// Section 5, step 3: the exponent of a vector from the bits of its largest magnitude, limited to [-100, 100].
__device__ __forceinline__ int prescale_exponent(uint32_t largest) {
  return min(max(static_cast<int>(largest >> 23) - 127, -100), 100);
}

__device__ __forceinline__ float quiet_nan() { return __int_as_float(0x7FC00000); }

// 2^e for |e| <= 126; nothing is limited here.
__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }

// a / b and the root of s, correctly rounded, for arguments from the middle of the range. These are the steps of
// __fdiv_rn and __fsqrt_rn without their first one, which tests that arguments, results and remainders keep clear of
// both ends of the range. Here they always do:
//
// * A vector is scaled to a largest magnitude in [1, 2), or from 2^-49 to 2^28 where the power of two is at its limit,
//   unless the sum of its squares is from 2^-60 to 2^100 without scaling. So a length that divides, or is divided, is
//   from 2^-49 to 2^51.
// * The sums of a fit give a scale only if `a` is positive: then `a` is from 2^-12 to 2^19, and b, which counts a level
//   that is not zero, is an integer below 2^31.
// * Constants are from 2^-4 to 2^20. A scale that float16 cannot hold is limited later, after the power of two has
//   returned.
//
// Callers do not use the result for vectors that are zero or not finite, or whose `a` is not positive: the scale of
// such a vector does not depend on it.
__device__ __forceinline__ float divide(float a, float b) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
  r = __fmaf_rn(r, __fmaf_rn(-b, r, 1), r);
  const float q = __fmul_rn(a, r);
  return __fmaf_rn(r, __fmaf_rn(-b, q, a), q);
}
__device__ __forceinline__ float root(float s) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(s));
  const float q = __fmul_rn(s, r);
  return __fmaf_rn(__fmaf_rn(-q, q, s), __fmul_rn(r, 0.5f), q);
}

// How well a candidate fits a vector: the float32 sums of section 5, step 6, and the candidate's step.
struct Fit {
  float a, b, step;

  static __device__ __forceinline__ Fit of_sums(int dot, int squares, float step) {
    return {__fmul_rn(static_cast<float>(dot), 1 / format::kUnitsPerSigma), static_cast<float>(squares), step};
  }

  // The candidate with the greatest merit has the least error.
  __device__ __forceinline__ float merit() const { return a > 0 ? __fdiv_rn(__fmul_rn(a, a), b) : 0; }

  // Section 5, step 7: the bits of the float16 scale of a vector of length `length` (before the transform's factor)
  // that was multiplied by 2^-e. With t a multiple of the length, the modes are t * step (norm), t / root(b)
  // (preserve), t * (a / b) (mse) and t / a (unbiased). Selections choose the operands of one division, because
  // branches would take longer.
  __device__ __forceinline__ uint16_t scale(ScaleMode mode, float length, int e,
                                            const EncodeConstants& constants) const {
    const bool norm = mode == ScaleMode::kNorm, preserve = mode == ScaleMode::kPreserve, mse = mode == ScaleMode::kMse,
               unbiased = mode == ScaleMode::kUnbiased;
    const float t = __fmul_rn(__fmul_rn(length, constants.norm), preserve   ? 32
                                                                 : unbiased ? constants.times_root
                                                                            : constants.over_root);
    const float quotient = divide(mse ? a : t, preserve ? root(b) : unbiased ? a : b);
    const float scale = norm ? __fmul_rn(t, step) : mse ? __fmul_rn(t, quotient) : quotient;
    const __half rounded = __float2half_rn(fminf(__fmul_rn(scale, power_of_two(e)), format::kMaxHalf));
    return a > 0 ? __half_as_ushort(rounded) : 0;
  }
};

}  // namespace turboquant::cuda
