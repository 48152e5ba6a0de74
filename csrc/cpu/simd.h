// The verbs that the CPU kernels are written in, once per instruction set. Intrinsics occur in simd/ only.
//
// Sizes do not depend on the machine: Floats and Ints always have 16 lanes, Shorts 32 and Bytes 64. Every set therefore
// adds the same lanes in the same order, so that all levels agree in every bit of every result.
//
// A set for another processor is a header in simd/ that defines everything that simd/portable.h defines, with the same
// lanes: the vectors (Floats, Ints, Shorts, Bytes, Mask) with loads, stores, arithmetic, comparisons and conversions;
// butterfly, swap_lanes, pair_sums, sum_quads and interleave_pairs between lanes; the tables (Table16, Table32,
// Table128, CodeTable, LevelTable, Boundaries) with their look-ups; BitLayout with store_packed and load_packed;
// Levels, Factors and Products with kLevelBias for integer dot products; kUnroll and kSums. No verb but add_product may
// fuse a multiplication and an addition unless the product is exact. The set is included below, compiled by a file in
// levels/ and offered to processors by common/dispatch.cpp; tests/test_simd.py then compares it with portable.h.
//
// Everything lives in the namespace of the level that includes this file: an inline function compiled for AVX-512 must
// never be the copy that the linker keeps for other machines. Kernels use no standard library for the same reason: its
// templates have one name for all levels.
#pragma once

#include <cstdint>
#include <cstring>

namespace turboquant::cpu::TURBOQUANT_LEVEL {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// For verbs whose arguments must stay in registers.
#define ALWAYS_INLINE [[gnu::always_inline]] inline

// Prefetches the cache lines of [p, p + bytes). Always inlined, because compilers think that the function has no
// effect.
ALWAYS_INLINE void prefetch(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i);
}

constexpr float kInfinity = __builtin_inff();

inline float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

}  // namespace turboquant::cpu::TURBOQUANT_LEVEL

#if defined(TURBOQUANT_AVX512)
#include "cpu/simd/avx512.h"
#elif defined(TURBOQUANT_AVX2)
#include "cpu/simd/avx2.h"
#else  // a set for another processor, such as simd/neon.h, is one more case above
#include "cpu/simd/portable.h"
#endif

#include "cpu/simd/shared.h"
