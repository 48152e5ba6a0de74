// Codes become bytes of levels, for products on tensor cores (common/mma.cuh).
//
// A lane's 32 codes, a bit string of BITS words, become eight words of four bytes each. The order of the bytes
// (channel_of_byte) is the one that makes this cheap.
#pragma once

#include "cuda/common/mma.cuh"
#include "format.h"

namespace turboquant::cuda {

// Up to 4 bits, codes become nibbles, and byte permutations look up the levels of eight nibbles. A permutation has a
// table of eight bytes only, so 4-bit levels come in two parts: `plus`, the positive levels, and `minus`, the negative
// ones with their sign changed. `levels` makes words 2 i and 2 i + 1.
//
// Sums of levels are (kTimes * plus - minus) / 2^kPlace; without kSigned there is no minus. kConstant are the bytes of
// a part that does not depend on codes: all of minus with 5 bits, and with 4 bits what add_minus leaves to be added.
// UNIFORM: the uniform grid, for which 5-bit codes have a shorter way.
template <int BITS, bool UNIFORM = false>
struct Expansion {
  static constexpr format::Width kWidth = format::as_width(BITS);
  static constexpr bool kTwoParts = kWidth == format::Width::k4;  // as many levels as two permutations look up
  static constexpr bool kSigned = kTwoParts, kUnsigned = false, kHasTable = true;
  static constexpr int kTimes = 1, kPlace = 0;
  static constexpr uint32_t kConstant = 0x01010101;
  uint32_t low, high;              // levels 0-3 and 4-7; at 4 bits those of the codes 8-11 and 12-15
  uint32_t minus_low, minus_high;  // at 4 bits: codes 0-3 and 4-7, sign changed

  __device__ __forceinline__ explicit Expansion(const int8_t* table) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(table);
    low = words[kSigned ? 2 : 0], high = words[kSigned ? 3 : 1];
    if constexpr (kSigned) minus_low = __vneg4(words[0]), minus_high = __vneg4(words[1]);
  }

  // Changes `minus` so that it can be added: level - 1 for codes 0-7, and -1 (the sign of those bytes) for the others.
  // The sum of both parts is then the sum of levels, less the sum of the other operand.
  __device__ __forceinline__ void add_minus() {
    if constexpr (kSigned) minus_low = ~minus_low, minus_high = ~minus_high;
  }

  // The eight codes of product i as nibbles, whose unused bits are 0.
  static __device__ __forceinline__ uint32_t nibbles(const uint32_t (&w)[BITS], int i) {
    if constexpr (kWidth == format::Width::k1) return w[0] >> i & 0x11111111;
    if constexpr (kWidth == format::Width::k2) return w[i / 2] >> 2 * (i % 2) & 0x33333333;
    if constexpr (kWidth == format::Width::k4) return w[i];
    if constexpr (format::is_spread(kWidth)) {
      // Runs of ten codes start at bits 0, 30 and 60. In each, codes 0, 4 and 8 lie in nibbles already, codes 1,
      // 5 and 9 after a shift by one bit, 2 and 6 after a shift by two. The remaining codes 3 and 7, and codes 30 and
      // 31, are the fourth word.
      const uint32_t ten[3] = {w[0], __funnelshift_r(w[0], w[1], 30), __funnelshift_r(w[1], w[2], 28)};
      if (i < 3) {
        const uint32_t x = (ten[i] & 0x0FF0FF0F) | (ten[i] << 1 & 0xF00F00F0);
        return ((x & 0xFF0FF0FF) | (ten[i] << 2 & 0x00F00F00)) & 0x77777777;
      }
      return (ten[0] >> 9 & 0x00007007) | (ten[1] >> 5 & 0x00070070) | (ten[2] >> 1 & 0x00700700) |
             (w[2] >> 2 & 0x07000000) | (w[2] >> 1 & 0x70000000);
    }
  }

  __device__ __forceinline__ void levels(const uint32_t (&w)[BITS], int i, uint32_t (&plus)[2],
                                         uint32_t (&minus)[2]) const {
    const uint32_t n = nibbles(w, i);
    if constexpr (kSigned) {
      // Codes of the other half have their highest bit set: they select the sign of a table byte, which is 0.
      const uint32_t p = n ^ 0x88888888;
      plus[0] = select_bytes(low, high, p), plus[1] = select_bytes(low, high, p >> 16);
      minus[0] = select_bytes(minus_low, minus_high, n), minus[1] = select_bytes(minus_low, minus_high, n >> 16);
    } else {
      plus[0] = select_bytes(low, high, n), plus[1] = select_bytes(low, high, n >> 16);
    }
  }
};

// 5 bits: a table of all pairs of codes in shared memory.
template <>
struct Expansion<5> {
  static constexpr bool kTwoParts = false, kSigned = false, kUnsigned = false, kHasTable = true;
  static constexpr int kTimes = 1, kPlace = 0;
  const uint16_t* pairs;  // [1024]

  __device__ __forceinline__ explicit Expansion(const int8_t* table)
      : pairs(reinterpret_cast<const uint16_t*>(table + 32)) {}
  __device__ __forceinline__ void levels(const uint32_t (&w)[5], int i, uint32_t (&plus)[2], uint32_t (&)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t pair[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int bit = 40 * i + 20 * h + 10 * k, word = bit / 32, next = word < 4 ? word + 1 : word;
        pair[k] = pairs[__funnelshift_r(w[word], w[next], bit % 32) & 1023];
      }
      plus[h] = pair[0] | pair[1] << 16;
    }
  }
};

// 5 bits, uniform grid: level = 2 code - 31 needs no table. Take the 160 bits as a circle and, for each k, the word
// whose bit 1 is bit 20 k: it holds the codes 4 k, 4 k + 2, 4 k + 3 and 4 k + 5 whole, one in each byte, and over all
// k it holds every code once. The codes lie 1, 3, 0 and 2 bits above the bottom of their bytes; the other operand has
// the factors that make all of them count 2^3.
template <>
struct Expansion<5, true> {
  static constexpr bool kTwoParts = false, kSigned = true, kUnsigned = true, kHasTable = false;
  static constexpr int kTimes = 2, kPlace = 3;
  static constexpr uint32_t kConstant = 0x7C1FF83E;  // all codes 31

  __device__ __forceinline__ explicit Expansion(const int8_t*) {}
  __device__ __forceinline__ void levels(const uint32_t (&w)[5], int i, uint32_t (&plus)[2],
                                         uint32_t (&minus)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int bit = (20 * (2 * i + h) + 159) % 160;
      plus[h] = __funnelshift_r(w[bit / 32], w[(bit / 32 + 1) % 5], bit % 32) & kConstant;
      minus[h] = kConstant;
    }
  }
  __device__ __forceinline__ void add_minus() {}
};

// 8 bits: codes are levels.
template <>
struct Expansion<8> {
  static constexpr bool kTwoParts = false, kSigned = false, kUnsigned = false, kHasTable = false;
  static constexpr int kTimes = 1, kPlace = 0;
  __device__ __forceinline__ explicit Expansion(const int8_t*) {}
  __device__ __forceinline__ void levels(const uint32_t (&w)[8], int i, uint32_t (&plus)[2], uint32_t (&)[2]) const {
    plus[0] = w[2 * i], plus[1] = w[2 * i + 1];
  }
  __device__ __forceinline__ void add_minus() {}
};

// No codes.
template <>
struct Expansion<0> {
  static constexpr bool kTwoParts = false, kSigned = false, kHasTable = false;
  static constexpr int kTimes = 1, kPlace = 0;
  __device__ __forceinline__ explicit Expansion(const int8_t*) {}
  __device__ __forceinline__ void add_minus() {}
};

constexpr int kTableBytes = 32 + 2048;

// Fills the table that Expansion reads, in shared memory, by all threads of a block; the caller synchronises.
__device__ inline void fill_level_table(int8_t* table, format::Width width, const int8_t* levels) {
  const int c = static_cast<int>(blockDim.x - 1 - threadIdx.x);  // the last warp has the least other work
  if (c < 32) {
    table[c] = c < format::num_levels(width) ? static_cast<int8_t>(format::level_of_code(width, levels, c)) : 0;
  }
  if (format::fits_nibble(width)) return;  // else pairs of codes are looked up
  __syncthreads();
  for (int c = threadIdx.x; c < 1024; c += blockDim.x) {
    table[32 + 2 * c] = table[c % 32], table[33 + 2 * c] = table[c / 32];
  }
}

// Whether codes expand without a table although their levels are not their codes: Expansion<5, true>.
__device__ __forceinline__ constexpr bool is_circle(int bits, bool uniform) {
  return format::has_plane(format::as_width(bits)) && uniform;
}

// The channel, of a lane's 32, that byte `byte` of word `word` belongs to. bits: 0 where a sketch stands alone.
__device__ __forceinline__ int channel_of_byte(int bits, bool uniform, int word, int byte) {
  const int i = word / 2, nibble = word % 2 * 4 + byte;
  if (is_circle(bits, uniform)) return (4 * word + (0x5320 >> 4 * byte & 15)) % 32;
  switch (format::as_width(bits)) {
    case format::Width::k1: return 4 * nibble + i;
    case format::Width::k2: return 16 * (i / 2) + 2 * nibble + i % 2;
    case format::Width::k3:
      if (i < 3) return 10 * i + nibble + nibble / 3;
      return nibble < 6 ? 10 * (nibble % 3) + 3 + 4 * (nibble / 3) : 24 + nibble;
    case format::Width::k4:
    case format::Width::k5:
    case format::Width::k8: break;
  }
  return 4 * word + byte;
}

// The power of two that the other operand has at that byte.
__device__ __forceinline__ int shift_of_byte(int bits, bool uniform, int byte) {
  return is_circle(bits, uniform) ? 0x1302 >> 4 * byte & 15 : 0;
}

// Bits of a sketch: bit k of the four bytes of a lane's word makes a word of bytes 0 or 2^k, so that one operation
// expands four bits. The other operand has the factor 2^(3 - k mod 4), and products of bits 0-3 count 16 times:
// together 2^7.
__device__ __forceinline__ int channel_of_sketch_byte(int word, int byte) { return 8 * byte + word; }
__device__ __forceinline__ int shift_of_sketch_word(int word) { return 3 - word % 4; }

// Loads WORDS words at p + offset, which is a multiple of 4 bytes or of the size of a vector load, with as few loads
// as WORDS allows.
template <int WORDS>
__device__ __forceinline__ void load_aligned_words(const uint8_t* p, uint32_t offset, uint32_t* word) {
  if constexpr (WORDS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      const uint4 w = __ldg(reinterpret_cast<const uint4*>(p + offset) + i / 4);
      word[i] = w.x, word[i + 1] = w.y, word[i + 2] = w.z, word[i + 3] = w.w;
    }
  } else if constexpr (WORDS == 2) {
    const uint2 w = __ldg(reinterpret_cast<const uint2*>(p + offset));
    word[0] = w.x, word[1] = w.y;
  } else {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) word[i] = __ldg(reinterpret_cast<const uint32_t*>(p + offset) + i);
  }
}

// Adds the products of keys 2 h and 2 h + 1; levels: two words for each of a lane's four keys.
template <bool UNSIGNED>
__device__ __forceinline__ void add_levels(int (&sums)[4], const uint32_t (&levels)[4][2], int h, uint2 column) {
  mma_bytes<UNSIGNED>(sums, {levels[2 * h][0], levels[2 * h + 1][0], levels[2 * h][1], levels[2 * h + 1][1]}, column);
}

}  // namespace turboquant::cuda
