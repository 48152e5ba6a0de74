// Codes of page records (docs/format.md section 8) become their levels as float16, which holds every level exactly.
//
// Words of a record come in, words of eight float16 go out, all in registers. In between a level is a byte that holds 128 + level,
// because one byte permutation and one addition turn two such bytes into float16.
#pragma once

#include "cuda/codec/record.cuh"
#include "cuda/common/mma.cuh"
#include "format.h"

namespace turboquant::cuda::general {

// ---- Tables of levels -------------------------------------------------------------------------------------------------

// What expansion looks up; in shared memory.
struct LevelTables {
  uint4 keys,
      values;         // codes of up to 4 bits: the levels of nibbles 8-15, then minus those of nibbles 0-7, a byte each
  uint8_t fives[32];  // 5-bit keys: 128 + level

  // levels: int8 [2^bits], null for the uniform grid. The caller synchronises.
  __device__ __forceinline__ void fill(int key_bits, const int8_t* key_levels, int value_bits,
                                       const int8_t* value_levels, int thread) {
    if (thread < 16) {
      if (key_bits < 5) fill_nibbles(&keys, key_bits, key_levels, thread);
      if (value_bits < 5) fill_nibbles(&values, value_bits, value_levels, thread);
    }
    if (thread < 32 && key_bits == 5) {
      fives[thread] = static_cast<uint8_t>(128 + format::level_of_code(5, key_levels, thread));
    }
  }

 private:
  // Narrow codes are in the middle of the 16 nibbles (see nibble_offset).
  static __device__ inline void fill_nibbles(uint4* table, int bits, const int8_t* levels, int thread) {
    const int first = 8 - (1 << bits) / 2, code = thread - first;
    const int level = code >= 0 && code < 1 << bits ? format::level_of_code(bits, levels, code) : 0;
    reinterpret_cast<int8_t*>(table)[(thread + 8) % 16] = static_cast<int8_t>(thread < 8 ? -level : level);
  }
};

// ---- Levels as float16 ------------------------------------------------------------------------------------------------

// Added to eight nibbles: codes of 2 and 3 bits are counted from 6 and 4, so that the upper half of them, the positive levels,
// have the highest bit of their nibble, as those of 4 bits do.
__host__ __device__ constexpr uint32_t nibble_offset(int bits) {
  return bits == 2 ? 0x66666666 : bits == 3 ? 0x44444444 : 0;
}

// 128 + level of eight nibbles, in their order. A byte permutation chooses among eight bytes and gives 0 (select_bytes: the
// repeated sign of a small level) for a nibble of 8 and more, so there is one for the positive levels and one for minus the
// negative ones.
__device__ __forceinline__ uint2 level_bytes(uint32_t nibbles, const uint4& table) {
  const uint32_t high = nibbles ^ 0x88888888;
  return {0x80808080 + select_bytes(table.x, table.y, high) - select_bytes(table.z, table.w, nibbles),
          0x80808080 + select_bytes(table.x, table.y, high >> 16) - select_bytes(table.z, table.w, nibbles >> 16)};
}

// Two float16 levels from the bytes of level_bytes that SELECTOR names. The float16 0x64__ is 1024 plus its low byte.
template <uint32_t SELECTOR>
__device__ __forceinline__ uint32_t level_halves(uint32_t bytes) {
  const uint32_t pair = select_bytes(bytes, 0x64646464, SELECTOR), offset = 0xE480E480;  // -(1024 + 128)
  const __half2 level = __hadd2(reinterpret_cast<const __half2&>(pair), reinterpret_cast<const __half2&>(offset));
  return reinterpret_cast<const uint32_t&>(level);
}

// Eight neighbouring channels.
__device__ __forceinline__ uint4 in_order(uint2 bytes) {
  return {level_halves<0x4140>(bytes.x), level_halves<0x4342>(bytes.x), level_halves<0x4140>(bytes.y),
          level_halves<0x4342>(bytes.y)};
}

// ---- Keys -------------------------------------------------------------------------------------------------------------

// Octet `o` of a key: nibbles in x; in y four more bytes of 8-bit codes, or the high bits of 5-bit codes, two in each byte.
// row, plane: the key's words in the record. WHOLE: d is a multiple of 32, so that no plane word is cut (a branch for that would
// make every octet wait for the one before it).
template <int BITS, bool WHOLE>
__device__ __forceinline__ uint2 key_codes(const uint8_t* row, const uint8_t* plane, int octets, int o) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(row);
  if constexpr (BITS == 8) return reinterpret_cast<const uint2*>(row)[o];
  if constexpr (BITS == 4) return {words[o], 0};
  if constexpr (BITS == 3) return {key_octet(words, nullptr, octets, 3, o).low, 0};
  if constexpr (BITS == 2) return {open_nibbles(reinterpret_cast<const uint16_t*>(row)[o], 2), 0};
  const uint32_t* high = reinterpret_cast<const uint32_t*>(plane);
  if (WHOLE || (o | 3) < octets) return {words[o], high[o / 4] >> 2 * (o % 4)};
  const uint32_t b = key_octet(words, high, octets, 5, o).high;
  return {words[o], spread_pairs(b)};
}

// Their levels, in the order of the channels. fives: LevelTables::fives, null for the uniform grid.
template <int BITS>
__device__ __forceinline__ uint4 key_levels(uint2 codes, const uint4& table, const uint8_t* fives) {
  if constexpr (BITS == 8) {
    return in_order({codes.x ^ 0x80808080, codes.y ^ 0x80808080});
  } else if constexpr (BITS == 5) {
    uint32_t even = (codes.x & 0x0F0F0F0F) | (codes.y << 4 & 0x10101010);
    uint32_t odd = (codes.x >> 4 & 0x0F0F0F0F) | (codes.y << 3 & 0x10101010);
    if (fives) {
      const auto look_up = [&](uint32_t codes) {
        return fives[codes & 31] | fives[codes >> 8 & 31] << 8 | fives[codes >> 16 & 31] << 16 |
               static_cast<uint32_t>(fives[codes >> 24]) << 24;
      };
      even = look_up(even), odd = look_up(odd);
    } else {  // 128 + 2 code - 31
      even = 2 * even + 0x61616161, odd = 2 * odd + 0x61616161;
    }
    return in_order({select_bytes(even, odd, 0x5140), select_bytes(even, odd, 0x7362)});
  } else {
    return in_order(level_bytes(codes.x + nibble_offset(BITS), table));
  }
}

// ---- Values -----------------------------------------------------------------------------------------------------------

// The codes of one chunk of 16 channels and of the four tokens that the words of `lane` in a value block hold, a byte per token:
// channel 16 chunk + lane / 4 in the low nibble, the channel eight further on in the high one. 8 bits: a word for each of the two.
template <int BITS>
__device__ __forceinline__ uint2 value_codes(const uint8_t* block, int d, int chunk, int lane) {
  const auto word = [&](int byte) { return *reinterpret_cast<const uint32_t*>(block + byte); };
  if constexpr (BITS == 8) {
    const int quad = chunk / 2, in_quad = min(4, d / 8 - 4 * quad);
    const int at = 512 * quad + 4 * in_quad * lane + 8 * (chunk % 2);
    return {word(at), word(at + 4)};
  } else if constexpr (BITS == 4) {
    const int quad = chunk / 4, in_quad = min(4, d / 16 - 4 * quad);
    return {word(512 * quad + 4 * in_quad * lane + 4 * (chunk % 4)), 0};
  } else if constexpr (BITS == 3) {
    const int set = chunk / 4, j = chunk % 4, rest = d % 64 / 16;
    const int at = 384 * set + (set < d / 64 ? 12 : 4 * rest) * lane;
    if (set == d / 64 || j < 3) return {word(at + 4 * j) & 0x77777777, 0};
    return {(word(at) >> 3 & 0x11111111) | (word(at + 4) >> 2 & 0x22222222) | (word(at + 8) >> 1 & 0x44444444), 0};
  } else {
    const int n = chunk / 2, units = d / 32, quad = n / 4, in_quad = min(4, units - 4 * quad);
    uint32_t pairs;
    if (n < units) {
      pairs = word(512 * quad + 4 * in_quad * lane + 4 * (n % 4)) >> 4 * (chunk % 2);
    } else {
      pairs = word(128 * units + 16 * (lane / 4 % 4) + 4 * (lane % 4)) >> 4 * (lane / 16);
    }
    return {(pairs & 0x03030303) | (pairs << 2 & 0x30303030), 0};
  }
}

// Their levels: the first two tokens of the first channel, its other two tokens, and the same of the second channel.
template <int BITS>
__device__ __forceinline__ uint4 value_levels(uint2 codes, const uint4& table) {
  if constexpr (BITS == 8) return in_order({codes.x ^ 0x80808080, codes.y ^ 0x80808080});
  const uint2 bytes = level_bytes(codes.x + nibble_offset(BITS), table);
  return {level_halves<0x4240>(bytes.x), level_halves<0x4240>(bytes.y), level_halves<0x4341>(bytes.x),
          level_halves<0x4341>(bytes.y)};
}

}  // namespace turboquant::cuda::general
