// Codes of page records (docs/format.md section 8) become their levels as float16, which holds every level exactly.
//
// Words of a record come in, words of eight float16 go out, all in registers. In between a level is a byte that holds
// 128 + level, because one byte permutation and one addition turn two such bytes into float16.
#pragma once

#include "cuda/codec/record.cuh"
#include "cuda/common/mma.cuh"
#include "format.h"

namespace turboquant::cuda::general {

// ---- Tables of levels ----------------------------------------------------------------------------------------------

// Codes of fewer than 4 bits are counted from here, in the middle of the 16 nibbles: then the positive levels, the
// upper half of the codes, have the highest bit of their nibble, as they have with 4 bits.
__host__ __device__ constexpr int first_nibble(format::Width width) { return 8 - (1 << format::num_bits(width)) / 2; }

// What expansion looks up, in shared memory.
struct LevelTables {
  static constexpr int kPlaneCodes = 1 << format::num_bits(format::kWidestTable);

  uint4 keys, values;  // codes that fit a nibble: levels of nibbles 8-15, then minus those of 0-7, a byte each
  uint8_t plane_keys[kPlaneCodes];  // codes with a bit plane: 128 + level

  // levels: int8 [2^bits], null for the uniform grid. The caller synchronises.
  __device__ __forceinline__ void fill(const format::Record& record, const int8_t* key_levels,
                                       const int8_t* value_levels, int thread) {
    if (thread < 16) {
      if (format::fits_nibble(record.key_width())) fill_nibbles(&keys, record.key_width(), key_levels, thread);
      if (format::fits_nibble(record.value_width())) fill_nibbles(&values, record.value_width(), value_levels, thread);
    }
    if (thread < kPlaneCodes && format::has_plane(record.key_width())) {
      plane_keys[thread] = static_cast<uint8_t>(128 + format::level_of_code(format::kWidestTable, key_levels, thread));
    }
  }

 private:
  static __device__ __forceinline__ void fill_nibbles(uint4* table, format::Width width, const int8_t* levels,
                                                      int thread) {
    const int codes = 1 << format::num_bits(width), code = thread - first_nibble(width);
    const int level = code >= 0 && code < codes ? format::level_of_code(width, levels, code) : 0;
    reinterpret_cast<int8_t*>(table)[(thread + 8) % 16] = static_cast<int8_t>(thread < 8 ? -level : level);
  }
};

// ---- Levels as float16 ---------------------------------------------------------------------------------------------

// 128 + level of eight nibbles, in their order. A byte permutation chooses among eight bytes, and for a nibble of 8
// and more it repeats the sign of one (select_bytes), which is 0 here. So one permutation finds the positive levels
// and another one minus the negative levels.
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

// ---- Keys ----------------------------------------------------------------------------------------------------------

// Octet `o` of a key: nibbles in x; in y four more bytes where codes are bytes, or the fifth bits of a plane, two in
// each byte. row, plane: the key's words in the record. WHOLE: d is a multiple of 32, so that no plane word is cut (a
// branch for that would make every octet wait for the one before it).
template <format::Width WIDTH, bool WHOLE>
__device__ __forceinline__ uint2 key_codes(const uint8_t* row, const uint8_t* plane, int octets, int o) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(row);
  if constexpr (format::levels_are_codes(WIDTH)) {
    return reinterpret_cast<const uint2*>(row)[o];
  } else if constexpr (format::has_plane(WIDTH)) {
    const uint32_t* high = reinterpret_cast<const uint32_t*>(plane);
    if (WHOLE || (o | 3) < octets) return {words[o], high[o / 4] >> 2 * (o % 4)};
    const uint32_t fifth_bits = plane_key_octet(words, high, octets, o).high;
    return {words[o], spread_pairs(fifth_bits)};
  } else if constexpr (format::is_spread(WIDTH)) {
    return {spread_key_octet(words, octets, o).low, 0};
  } else if constexpr (format::field_bits(WIDTH) < 4) {
    return {open_nibbles(reinterpret_cast<const uint16_t*>(row)[o], format::num_bits(WIDTH)), 0};
  } else {
    return {words[o], 0};
  }
}

// Their levels, in the order of the channels. plane_table: LevelTables::plane_keys, null for the uniform grid
template <format::Width WIDTH>
__device__ __forceinline__ uint4 key_levels(uint2 codes, const uint4& table, const uint8_t* plane_table) {
  if constexpr (format::levels_are_codes(WIDTH)) {
    return in_order({codes.x ^ 0x80808080, codes.y ^ 0x80808080});
  } else if constexpr (format::has_plane(WIDTH)) {
    uint32_t even = (codes.x & 0x0F0F0F0F) | (codes.y << 4 & 0x10101010);
    uint32_t odd = (codes.x >> 4 & 0x0F0F0F0F) | (codes.y << 3 & 0x10101010);
    if (plane_table) {
      const auto look_up = [&](uint32_t codes) {
        return plane_table[codes & 31] | plane_table[codes >> 8 & 31] << 8 | plane_table[codes >> 16 & 31] << 16 |
               static_cast<uint32_t>(plane_table[codes >> 24]) << 24;
      };
      even = look_up(even), odd = look_up(odd);
    } else {  // 128 + 2 code - 31
      even = 2 * even + 0x61616161, odd = 2 * odd + 0x61616161;
    }
    return in_order({select_bytes(even, odd, 0x5140), select_bytes(even, odd, 0x7362)});
  } else {
    return in_order(level_bytes(codes.x + first_nibble(WIDTH) * 0x11111111, table));
  }
}

// ---- Values --------------------------------------------------------------------------------------------------------

// The first byte of what a lane has of a unit in a value block (format::kUnitBytes), of `units` units.
__device__ __forceinline__ int unit_byte(int unit, int units, int lane) {
  const int chunk = unit / format::kChunkUnits, words = min(format::kChunkUnits, units - format::kChunkUnits * chunk);
  return format::kChunkBytes * chunk + 4 * words * lane + 4 * (unit % format::kChunkUnits);
}

// The codes of one slice of 16 channels and of the four tokens that a lane's words in a value block hold, a byte per
// token: channel 16 slice + lane / 4 in the low nibble, the channel eight further on in the high one. Codes of a byte:
// a word for each of the two.
template <format::Width WIDTH>
__device__ __forceinline__ uint2 value_codes(const uint8_t* block, int d, int slice, int lane) {
  const auto word = [&](int byte) { return *reinterpret_cast<const uint32_t*>(block + byte); };
  if constexpr (format::is_spread(WIDTH)) {
    const int sets = d / format::kSpreadChannels, set = slice / 4, j = slice % 4;
    const int words = set < sets ? format::kSpreadUnits : d % format::kSpreadChannels / 16;
    const int at = format::kSpreadBytes * set + 4 * words * lane;
    if (set == sets || j < format::kSpreadUnits) return {word(at + 4 * j) & 0x77777777, 0};
    return {(word(at) >> 3 & 0x11111111) | (word(at + 4) >> 2 & 0x22222222) | (word(at + 8) >> 1 & 0x44444444), 0};
  } else {
    constexpr int kCodesOfByte = 8 / format::num_bits(WIDTH);
    const int units = d / (8 * kCodesOfByte);
    if constexpr (kCodesOfByte == 1) {
      const int at = unit_byte(2 * slice, units, lane);
      return {word(at), word(at + 4)};
    } else if constexpr (kCodesOfByte == 2) {
      return {word(unit_byte(slice, units, lane)), 0};
    } else {
      const int unit = slice / 2;
      uint32_t pairs;
      if (unit < units) {
        pairs = word(unit_byte(unit, units, lane)) >> 4 * (slice % 2);
      } else {  // the last 16 channels share bytes otherwise
        pairs = word(format::kUnitBytes * units + 16 * (lane / 4 % 4) + 4 * (lane % 4)) >> 4 * (lane / 16);
      }
      return {(pairs & 0x03030303) | (pairs << 2 & 0x30303030), 0};
    }
  }
}

// Their levels: the first two tokens of the first channel, its other two tokens, and the same of the second channel.
template <format::Width WIDTH>
__device__ __forceinline__ uint4 value_levels(uint2 codes, const uint4& table) {
  if constexpr (format::levels_are_codes(WIDTH)) {
    return in_order({codes.x ^ 0x80808080, codes.y ^ 0x80808080});
  } else {
    const uint2 bytes = level_bytes(codes.x + first_nibble(WIDTH) * 0x11111111, table);
    return {level_halves<0x4240>(bytes.x), level_halves<0x4240>(bytes.y), level_halves<0x4341>(bytes.x),
            level_halves<0x4341>(bytes.y)};
  }
}

}  // namespace turboquant::cuda::general
