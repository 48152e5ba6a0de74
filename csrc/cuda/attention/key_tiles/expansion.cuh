// From codes to operands in registers. Scores are products of bytes: a word of codes becomes one or two words of bytes.
// Sums of values are products of float16: a code or a level's magnitude in the low bits of a float16, whose other bits
// but the sign are 0, is a subnormal number, code * 2^-24, and tensor cores multiply subnormal numbers exactly.
#pragma once

#include <iterator>

#include "cuda/attention/operands.cuh"
#include "cuda/common/halves.cuh"

namespace turboquant::cuda::key_tiles {

// Keys of one pair of codes. level = kStep * (what a byte counts) - kOffset.
template <int D, class K>
struct KeyBytes : K {
  using typename K::Prepared;
  static constexpr float kStep = K::kMasks ? 2 : 1;
  static constexpr float kOffset = K::kMasks ? format::num_levels(K::kCodes.width) - 1 : 0;
  static constexpr int kProducts = K::Operands::kFrags;  // of 32 channels
  using Table = LevelTable<K::kTwoTables>;

  // The entry of a code in its table: its level. Of two tables, levels of one are positive and those of the other are
  // not; entries of the latter are complements, so that no entry has a sign.
  static __device__ __forceinline__ int8_t table_entry(const int8_t* levels, int code) {
    return static_cast<int8_t>(K::kTwoTables && code < kTableEntries ? ~levels[code] : levels[code]);
  }

  // The operand of product I from the rows of g and h (8 rows further down). All bytes count alike, since one sum takes
  // them.
  template <int I>
  static __device__ __forceinline__ void expand(const Prepared& g, const Prepared& h, const Table& table,
                                                uint32_t (&a)[4]) {
    if constexpr (K::kMasks) {
      constexpr int j = I / 2 * 2;
      a[0] = codes<I % 2, j>(g), a[1] = codes<I % 2, j>(h), a[2] = codes<I % 2, j + 1>(g),
      a[3] = codes<I % 2, j + 1>(h);
    } else if constexpr (K::kTwoTables) {
      look_up(g.w[I], table, a[0], a[2]), look_up(h.w[I], table, a[1], a[3]);
    } else {
      uint32_t minus[4];  // there is none
      K::template expand<I>(g, h, table, a, minus);
    }
  }

 private:
  // The even (SIDE 0) or odd channels of word J.
  template <int SIDE, int J>
  static __device__ __forceinline__ uint32_t codes(const Prepared& x) {
    const uint32_t low = (SIDE ? x.w[J] >> 4 : x.w[J]) & kLowNibbles;
    if constexpr (!K::kPlane) return low;
    return low | (shifted<4 - SIDE - 2 * J>(x.plane) & 0x10101010);
  }

  // The levels of the lower and of the upper four codes of a word. A code of the other half selects the sign of an
  // entry, which is 0. What comes from the table of complements is turned around by the signs of bytes whose top bits
  // are those of the codes.
  static __device__ __forceinline__ void look_up(uint32_t w, const Table& table, uint32_t& low, uint32_t& high) {
    const uint32_t flipped = w ^ 0x88888888, raised = flipped << 4;
    low = (table.plus(flipped) | table.minus(w)) ^ select_bytes(raised, flipped, 0xD9C8);
    high = (table.plus(flipped >> 16) | table.minus(w >> 16)) ^ select_bytes(raised, flipped, 0xFBEA);
  }
};

// Values of one pair of codes: the words of a warp's channels and 16 tokens become the operands of products of 16
// channels, of which a warp has two next to each other, or one of 64 channels. Lane (g, t) has of each channels g and
// g + 8 of tokens 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
// level = kStep * (what an element counts) - kOffset
template <int D, class V>
struct ValueHalves : V {
  using V::kBytes, V::kMasks, V::kNibbles, V::kSpread, V::kPairsOfBits, V::kTwoTables;
  static_assert(V::kUniform ? kBytes || kNibbles || kSpread : kNibbles || kSpread || kPairsOfBits, "no such values");
  static constexpr float kStep = kMasks ? 2 : 1;
  static constexpr float kOffset = kMasks ? format::num_levels(V::kCodes.width) - 1 : 0;
  // The float16 that stands for 1. Most elements are subnormal numbers.
  static constexpr float kOne = kBytes ? 1 : 1.0f / (1 << 24);
  static constexpr int kProducts = D / 64;
  static_assert(kProducts == 1 || kProducts == 2);
  static constexpr int kWords = kPairsOfBits ? 1 : kBytes ? 2 * kProducts : kProducts;
  using Table = LevelTable<kTwoTables>;

  // The entry of a level in its table: its magnitude, and its sign above it. Of two tables, levels of one are positive
  // and those of the other are not, so the code's top bit is the sign.
  static __device__ __forceinline__ int8_t table_entry(int level) {
    const int magnitude = level < 0 ? -level : level;
    return static_cast<int8_t>(kTwoTables || level >= 0 ? magnitude : magnitude | 0x80);
  }

  // block: a value block, 16 tokens. warp: of the four
  static __device__ __forceinline__ void load(const uint8_t* block, int warp, int lane, uint32_t (&w)[kWords]) {
    if constexpr (kSpread) {
      // Of the four words of a set, of 64 channels, the last one is what the three others have room for.
      uint32_t set[format::kSpreadUnits];
      const int first = kProducts * warp % 4;
      read_words(block + format::kSpreadBytes * (kProducts * warp / 4) + 4 * format::kSpreadUnits * lane, set);
      const uint32_t fourth = fourth_spread_word(set[0], set[1], set[2]);
      if constexpr (kProducts == 2) {
        w[0] = (first ? set[2] : set[0]) & 0x77777777, w[1] = first ? fourth : set[1] & 0x77777777;
      } else {
        w[0] = first == 3 ? fourth : (first == 2 ? set[2] : first ? set[1] : set[0]) & 0x77777777;
      }
    } else if constexpr (kPairsOfBits) {  // a word has both products
      read_words(block + 8 * kProducts * lane + 4 * (kProducts * warp / 2), w);
      if constexpr (kProducts == 1) w[0] >>= 4 * (warp % 2);
    } else {
      const int word = kWords * warp;  // of the lane, which has four of each chunk
      read_words(block + format::kChunkBytes * (word / 4) + 16 * lane + 4 * (word % 4), w);
    }
  }

  // The operand of the warp's product U. NEGATIVE: the tokens count negatively (counts_negatively). Flipped codes are
  // the codes of negative levels; where elements are levels, the product takes the sign.
  template <int U, bool NEGATIVE>
  static __device__ __forceinline__ void expand(const uint32_t (&w)[kWords], const Table& table, uint32_t (&a)[4]) {
    if constexpr (kBytes) {
      const uint32_t x = w[2 * U] ^ 0x80808080, y = w[2 * U + 1] ^ 0x80808080;
      a[0] = byte_levels(x, 0x4140), a[1] = byte_levels(y, 0x4140);
      a[2] = byte_levels(x, 0x4342), a[3] = byte_levels(y, 0x4342);
    } else if constexpr (kMasks) {
      // The lower eight channels are rows g. Rows g + 8 hold both: the lower channel, and 16 times the upper one, which
      // `upper` takes apart.
      const uint32_t x = NEGATIVE ? w[U] ^ (kSpread ? 0x77777777 : 0xFFFFFFFF) : w[U];
      a[1] = select_bytes(x, 0, 0x4140), a[3] = select_bytes(x, 0, 0x4342);
      a[0] = a[1] & 0x000F000F, a[2] = a[3] & 0x000F000F;
    } else if constexpr (kTwoTables) {
      // A code of the other half selects the sign of a byte, which is 0.
      const uint32_t flipped = w[U] ^ 0x88888888;
      const uint32_t x = table.plus(flipped) | table.minus(w[U]);
      const uint32_t y = table.plus(flipped >> 16) | table.minus(w[U] >> 16);
      const uint32_t lower = flipped << 4 & 0x80808080, upper = flipped & 0x80808080;  // signs
      a[0] = select_bytes(x, lower, 0x5240), a[1] = select_bytes(x, upper, 0x5341);
      a[2] = select_bytes(y, lower, 0x7260), a[3] = select_bytes(y, upper, 0x7361);
    } else if constexpr (kPairsOfBits) {
      const uint32_t x = w[0] & 0x33333333, y = w[0] >> 2 & 0x33333333;  // of channels g and g + 16, g + 8 and g + 24
      a[0] = halves<U>(table.plus(x)), a[1] = halves<U>(table.plus(y));
      a[2] = halves<U>(table.plus(x >> 16)), a[3] = halves<U>(table.plus(y >> 16));
    } else {
      const uint32_t x = table.plus(w[U]), y = table.plus(w[U] >> 16);
      a[0] = halves<0>(x), a[1] = halves<1>(x), a[2] = halves<0>(y), a[3] = halves<1>(y);
    }
  }
  static __device__ __forceinline__ float upper(float lower, float upper_sum) {
    return kMasks ? (upper_sum - lower) * (1.0f / 16) : upper_sum;
  }

 private:
  // Two of four table entries, the even or the odd ones, as float16.
  template <int ODD>
  static __device__ __forceinline__ uint32_t halves(uint32_t entries) {
    return select_bytes(entries, 0, ODD ? 0x3311 : 0x2200) & 0x807F807F;
  }
};

// The codes of keys and of values that the kernel takes, in any combination.
constexpr format::Codes kKeyCodes[] = {choices::kByte,    choices::kUniform5, choices::kUniform4,
                                       choices::kLevels4, choices::kLevels3,  choices::kLevels2};
constexpr format::Codes kValueCodes[] = {choices::kByte,    choices::kUniform4, choices::kUniform3,
                                         choices::kLevels4, choices::kLevels3,  choices::kLevels2};

template <const auto& LIST>
constexpr int index_of_codes(const format::Codes& codes) {
  for (int i = 0; i < static_cast<int>(std::size(LIST)); ++i) {
    if (LIST[i] == codes) return i;
  }
  return -1;
}

template <int D, int KEYS>
using KeyBytesOf = KeyBytes<D, KeyCodes<D, kKeyCodes[KEYS]>>;
template <int D, int VALUES>
using ValueHalvesOf = ValueHalves<D, ValueCodes<D, kValueCodes[VALUES]>>;

// f(ValueHalvesOf<D, i>{}) for i = index.
template <int D, int I = 0, typename F>
__device__ __forceinline__ void with_value_codes(int index, F&& f) {
  if (I + 1 == std::size(kValueCodes) || index == I) {
    f(ValueHalvesOf<D, I>{});
  } else if constexpr (I + 1 < std::size(kValueCodes)) {
    with_value_codes<D, I + 1>(index, f);
  }
}

}  // namespace turboquant::cuda::key_tiles
