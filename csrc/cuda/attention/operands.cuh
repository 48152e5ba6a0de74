// From the codes of page records (docs/format.md section 8) to operands of tensor cores (common/mma.cuh), one lane's
// words at a time.
//
// Keys: rows of the product are 16 tokens, k runs over channels. Values: rows are 16 channels, k runs over 32 tokens.
// Either way a code becomes a byte, in one of three ways:
//   masks   of a uniform grid: codes stay where they are in their word, so some bytes count 8 or 16 times as much. The
//           sums leave out the constant of `level = 2 code - top`, which is corrected later: top times the sum of the
//           other operand is subtracted. Keys of 4 bits need half of the masks: a shift brings low nibbles to where
//           high nibbles are, and the bits that come along below them are corrected in the query (kShifts).
//   tables  of Lloyd-Max levels: a byte permutation looks up four codes. Its tables have eight entries, so levels of 4
//           bits need two tables: `plus` for the upper half of the codes, whose levels are positive, and `minus` for
//           the lower half, whose levels are negative. A code of the other half selects the sign of a byte: 0 in
//           `plus` and -1 in `minus`. `minus` therefore holds levels less 1, both products go into one sum, and every
//           code counts its level less 1.
//   none    of 8 bits: codes are levels.
#pragma once

#include <tuple>
#include <utility>

#include "choices/attention.h"
#include "cuda/codec/record.cuh"
#include "cuda/common/mma.cuh"
#include "format.h"

namespace turboquant::cuda {

constexpr uint32_t kLowNibbles = 0x0F0F0F0F, kHighNibbles = 0xF0F0F0F0;

// A shift to the left, or to the right where SHIFT is negative.
template <int SHIFT>
__device__ __forceinline__ uint32_t shifted(uint32_t x) {
  if constexpr (SHIFT >= 0) {
    return x << SHIFT;
  } else {
    return x >> -SHIFT;
  }
}

constexpr int kTableEntries = 8;  // of a byte permutation
constexpr bool needs_two_tables(format::Width w) {
  return format::fits_nibble(w) && format::num_levels(w) > kTableEntries;
}

// The entry of a code in its table: 0 where there is no such code, a level less 1 in `minus`. levels: [2^bits]
__device__ __forceinline__ int8_t level_entry(const int8_t* levels, int bits, int code) {
  if (code >= 1 << bits) return 0;
  const bool two = needs_two_tables(format::as_width(bits));
  return static_cast<int8_t>(levels[code] - (two && code < kTableEntries ? 1 : 0));
}

// Levels by byte permutation. TWO: 16 levels in two tables, else up to 8 in one.
template <bool TWO>
struct LevelTable {
  uint32_t low, high;  // levels of codes 0-3 and 4-7; of two tables those of codes 8-11 and 12-15
  uint32_t minus_low = 0, minus_high = 0;

  // entries: level_entry of 16 codes, aligned to 16 bytes; null if the table is never read.
  explicit __device__ __forceinline__ LevelTable(const int8_t* entries) {
    const uint4 w = entries ? *reinterpret_cast<const uint4*>(entries) : uint4{};
    if constexpr (TWO) {
      minus_low = w.x, minus_high = w.y, low = w.z, high = w.w;
    } else {
      low = w.x, high = w.y;
    }
  }

  // The bytes of the four codes in the low nibbles of `codes`. With two tables, the caller flips the codes' top bits
  // for `plus`.
  __device__ __forceinline__ uint32_t plus(uint32_t codes) const { return select_bytes(low, high, codes); }
  __device__ __forceinline__ uint32_t minus(uint32_t codes) const { return select_bytes(minus_low, minus_high, codes); }
};

// Loads words from shared memory, aligned to 4 bytes, or to 8 or 16 bytes where N is a multiple of 2 or 4.
template <int N>
__device__ __forceinline__ void read_words(const uint8_t* from, uint32_t (&w)[N]) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const uint4 x = reinterpret_cast<const uint4*>(from)[i / 4];
      w[i] = x.x, w[i + 1] = x.y, w[i + 2] = x.z, w[i + 3] = x.w;
    }
  } else if constexpr (N == 2) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    w[0] = x.x, w[1] = x.y;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) w[i] = reinterpret_cast<const uint32_t*>(from)[i];
  }
}

// Loads the first `n` words of a lane. Each lane has `words` words in all, which decides about their alignment.
template <int N>
__device__ __forceinline__ void read_some_words(const uint8_t* from, int n, int words, uint32_t (&w)[N]) {
  if (n == 2 && words % 2 == 0) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    w[0] = x.x, w[1] = x.y;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < n) w[i] = reinterpret_cast<const uint32_t*>(from)[i];
    }
  }
}

// ---- Queries: the other operand of keys ----------------------------------------------------------------------------

// The order in which the channels of a lane's share appear in its words of a key row: in their own order; the even
// channels of a word before its odd ones; or as in a group of 3-bit codes, whose words two lanes share.
enum class CodeOrder { kPlain, kInterleaved, kShared };

// Channels are taken in chunks, a quarter of a chunk by each lane (t = lane % 4). The last chunk may be partly filled:
// lanes without channels read behind the end of a key row, and multiply what they read by zeros of the query.
template <int D>
struct QueryOperands {
  static constexpr int kChunk = D % 128 == 0 ? 128 : 64;
  static constexpr int kChunks = (D + kChunk - 1) / kChunk;
  static constexpr int kFrags = kChunk / 32;          // products over a chunk
  static constexpr int kChannels = kChunks * kChunk;  // padding included
  static constexpr bool kMayShare = kChunk == 64;     // whether CodeOrder::kShared exists
  static constexpr bool kHalfGroup = D % 32 != 0;  // the last group of channels has 16 instead of 32 (docs/format.md)
  static_assert(D % 16 == 0);

  // Where a channel is among the operands: the product, the half of its operand (b.x or b.y), lane % 4 and the byte.
  struct Place {
    int frag, half, t, byte;
  };
  static __device__ __forceinline__ Place place(CodeOrder order, int channel) {
    const int chunk = channel / kChunk, c = channel % kChunk, share = kChunk / 4;
    const int t = c / share, x = c % share;  // x: its number in the lane's share
    const int first = chunk * kFrags;
    if (order == CodeOrder::kInterleaved) return {first + x / 16 * 2 + x % 2, x / 8 % 2, t, x % 8 / 2};
    const bool shared = kMayShare && order == CodeOrder::kShared && channel < (kHalfGroup ? D - 16 : D);
    if (!shared) return {first + x / 8, x / 4 % 2, t, x % 4};
    const int group = c / 32, j = c % 32 / 8, i = c % 8;
    return {first + j / 2, j % 2, 2 * group + i / 4, i % 4};
  }
};

// ---- Keys ----------------------------------------------------------------------------------------------------------

// What the codes of keys and of values have in common.
template <format::Codes CODES>
struct CodeTraits {
  static constexpr format::Codes kCodes = CODES;
  static constexpr int kBits = format::num_bits(CODES.width);
  static constexpr bool kUniform = CODES.grid == format::Grid::kUniform;
  static constexpr bool kBytes = format::levels_are_codes(CODES.width);
  static constexpr bool kSpread = format::is_spread(CODES.width), kPlane = format::has_plane(CODES.width);
  static constexpr bool kNibbles = CODES.width == format::Width::k4, kPairsOfBits = CODES.width == format::Width::k2;
  static constexpr bool kMasks = kUniform && !kBytes, kTwoTables = !kUniform && needs_two_tables(CODES.width);
};

template <int D, format::Codes CODES>
struct KeyCodes : CodeTraits<CODES> {
  using T = CodeTraits<CODES>;
  using T::kBits, T::kBytes, T::kSpread, T::kPlane, T::kNibbles, T::kPairsOfBits, T::kMasks, T::kTwoTables;
  using Operands = QueryOperands<D>;
  // A word holds the codes of channels c to c + 7, c a multiple of 8, in nibbles from the lowest up. Products take its
  // odd channels masked and its even channels shifted, as bytes that count 16 times, so one sum serves both. Below the
  // code of channel 2, 4 or 6 the byte still holds the code of the channel before it, which so counts a sixteenth of
  // this channel's query in addition. Queries::subtract_neighbours takes it off.
  static constexpr bool kShifts = T::kUniform && kNibbles;
  static_assert(T::kUniform ? kBytes || kPlane || kNibbles : format::fits_nibble(CODES.width), "no such keys");

  static constexpr int kChunk = Operands::kChunk;
  static constexpr CodeOrder kOrder = kMasks || kPairsOfBits           ? CodeOrder::kInterleaved
                                      : kSpread && Operands::kMayShare ? CodeOrder::kShared
                                                                       : CodeOrder::kPlain;
  static constexpr int kWords = kSpread ? 3 : format::field_bits(CODES.width) * kChunk / 128;  // of a lane
  static constexpr int kSets = kMasks && !kShifts ? 2 : 1;  // sums: of low and of high nibbles, or one for both

  // sum of q * level = (weighted sums - sum of q * twice_zero / 2) * kUnit (CodeFacts::twice_zero)
  static constexpr int kWeight0 = kPlane ? 8 : 1, kWeight1 = 1;
  static constexpr int kTwiceZero = kShifts ? 15 * 16 : kTwoTables ? -2 : kMasks ? 8 * 31 : 0;
  static constexpr float kUnit = !kMasks ? 1.0f : kNibbles ? 1.0f / 8 : 1.0f / 4;

  struct Words {
    uint32_t w[kWords];
    uint32_t plane;  // the bits of the plane, if there is one
  };

  // row, plane: of one token.
  static __device__ __forceinline__ void load(const uint8_t* row, const uint8_t* plane, int chunk, int t, Words& x) {
    constexpr int kGroups = kChunk / 32;  // of 32 channels
    const int group = chunk * kGroups + t * kGroups / 4;
    const bool half = Operands::kHalfGroup && group == D / 32;
    if constexpr (kSpread) {
      read_words(row + 12 * group, x.w);
      if (half) x.w[2] = x.w[1], x.w[1] = x.w[0] >> 16;  // words of four codes, whose upper halves are never read
    } else {
      read_words(row + 4 * kWords * (4 * chunk + t), x.w);
    }
    if constexpr (kPlane) {
      x.plane = *reinterpret_cast<const uint32_t*>(plane + 4 * group);
      if (half) {  // the bits of four words of four codes become those of two words of eight
        const uint32_t y = (x.plane & 0xFFFF) | (x.plane << 14 & 0xFFFF0000);
        x.plane = (y & 0x03030303) | (y >> 2 & 0x0C0C0C0C);
      } else if constexpr (kChunk == 64) {
        x.plane >>= 4 * (t & 1);
      }
    }
  }

  // What `expand` takes: with tables, a word of nibbles per product or half product; else the words as they were
  // loaded.
  static constexpr int kPrepared = kSpread ? 4 : kPairsOfBits ? 2 * kWords : kWords;
  struct Prepared {
    uint32_t w[kPrepared];
    uint32_t plane;
  };
  static __device__ __forceinline__ void prepare(const Words& x, int t, Prepared& p) {
    p.plane = x.plane;
    if constexpr (kSpread) {
      spread_three_bits(x.w, p.w);
      if constexpr (kChunk == 64) {  // two lanes share a group
#pragma unroll
        for (int j = 0; j < 4; ++j) p.w[j] >>= 16 * (t & 1);
      }
    } else if constexpr (kPairsOfBits) {
#pragma unroll
      for (int j = 0; j < kWords; ++j) p.w[2 * j] = x.w[j] & 0x33333333, p.w[2 * j + 1] = x.w[j] >> 2 & 0x33333333;
    } else {
#pragma unroll
      for (int j = 0; j < kWords; ++j) p.w[j] = x.w[j];
    }
  }

  // The sum that product `i` of a chunk adds to.
  static constexpr __device__ int set_of(int i) { return kSets == 2 ? i % 2 : 0; }

  // The operand of product I of a chunk: from the rows of g and h (8 rows further down). minus: with two tables only.
  template <int I>
  static __device__ __forceinline__ void expand(const Prepared& g, const Prepared& h,
                                                const LevelTable<kTwoTables>& table, uint32_t (&a)[4],
                                                uint32_t (&minus)[4]) {
    if constexpr (kBytes) {
      a[0] = g.w[2 * I], a[1] = h.w[2 * I], a[2] = g.w[2 * I + 1], a[3] = h.w[2 * I + 1];
    } else if constexpr (kShifts) {
      constexpr int j = I / 2 * 2;
      a[0] = to_high<I % 2>(g.w[j]), a[1] = to_high<I % 2>(h.w[j]);
      a[2] = to_high<I % 2>(g.w[j + 1]), a[3] = to_high<I % 2>(h.w[j + 1]);
    } else if constexpr (kPlane) {
      constexpr int j = I / 2 * 2;
      a[0] = five_bits<I % 2, j>(g.w[j], g.plane), a[1] = five_bits<I % 2, j>(h.w[j], h.plane);
      a[2] = five_bits<I % 2, j + 1>(g.w[j + 1], g.plane), a[3] = five_bits<I % 2, j + 1>(h.w[j + 1], h.plane);
    } else if constexpr (kTwoTables) {
      const uint32_t x = g.w[I] ^ 0x88888888, y = h.w[I] ^ 0x88888888;
      a[0] = table.plus(x), a[1] = table.plus(y), a[2] = table.plus(x >> 16), a[3] = table.plus(y >> 16);
      minus[0] = table.minus(g.w[I]), minus[1] = table.minus(h.w[I]);
      minus[2] = table.minus(g.w[I] >> 16), minus[3] = table.minus(h.w[I] >> 16);
    } else if constexpr (kSpread && kChunk == 64) {
      a[0] = table.plus(g.w[2 * I]), a[1] = table.plus(h.w[2 * I]);
      a[2] = table.plus(g.w[2 * I + 1]), a[3] = table.plus(h.w[2 * I + 1]);
    } else {
      a[0] = table.plus(g.w[I]), a[1] = table.plus(h.w[I]), a[2] = table.plus(g.w[I] >> 16),
      a[3] = table.plus(h.w[I] >> 16);
    }
  }

 private:
  // Four codes of 4 bits in the high nibbles: the even channels of a word (SIDE 0; other bits stay below them), or its
  // odd ones.
  template <int SIDE>
  static __device__ __forceinline__ uint32_t to_high(uint32_t w) {
    return SIDE == 0 ? w << 4 : w & kHighNibbles;
  }
  // Four codes of 5 bits: the even (SIDE 0) or odd channels of word J of a group, the odd ones eight times as large.
  template <int SIDE, int J>
  static __device__ __forceinline__ uint32_t five_bits(uint32_t w, uint32_t plane) {
    if constexpr (SIDE == 0) return (w & kLowNibbles) | (shifted<4 - 2 * J>(plane) & 0x10101010);
    return (w >> 1 & 0x78787878) | (shifted<6 - 2 * J>(plane) & 0x80808080);
  }
};

// ---- Values --------------------------------------------------------------------------------------------------------

// The order of a lane's tokens in the bytes of an operand: tokens of the two blocks in turn (mixed), or one block after
// the other.
constexpr bool is_mixed(const format::Codes& values) { return values.grid != format::Grid::kUniform; }

// Channels are taken in groups of 64: four products of 16 channels, or fewer in the last group. A lane's words of two
// value blocks make an operand.
template <int D, format::Codes CODES>
struct ValueCodes : CodeTraits<CODES> {
  using T = CodeTraits<CODES>;
  using T::kBits, T::kBytes, T::kSpread, T::kNibbles, T::kPairsOfBits, T::kMasks, T::kTwoTables;
  static_assert(T::kUniform ? kBytes || kNibbles || kSpread : kNibbles || kSpread || kPairsOfBits, "no such values");

  static constexpr int kGroupChannels = format::kSpreadChannels;
  static constexpr int kGroups = (D + kGroupChannels - 1) / kGroupChannels;
  // Of a lane in a group and block: 64 channels * 4 tokens * kBits / 32 lanes / 32 bits.
  static constexpr int kWords = kBits;
  static constexpr bool kMixed = is_mixed(CODES);

  // level = kStep * (what a code counts) - kTop; the upper eight rows of a product count kUpper times as much.
  static constexpr int kStep = kMasks ? 2 : 1, kTop = kMasks       ? format::num_levels(CODES.width) - 1
                                                      : kTwoTables ? -1
                                                                   : 0;
  static constexpr float kUpper = kMasks ? 16 : 1;

  struct Words {
    uint32_t w[kSpread ? 4 : kWords];
  };

  // block: a value block, 16 tokens
  static __device__ __forceinline__ void load(const uint8_t* block, int group, int lane, Words& x) {
    const int products = min(D - kGroupChannels * group, kGroupChannels) / 16;  // of the group
    x = {};
    if constexpr (kSpread) {
      const uint8_t* set = block + format::kSpreadBytes * group;
      if (products == 4) {
        uint32_t w[format::kSpreadUnits];
        read_words(set + 4 * format::kSpreadUnits * lane, w);
        spread_three_bits(w, x.w);
      } else {  // a shorter set has a word for each product, and nothing is spread
        read_some_words(set + 4 * products * lane, products, products, x.w);
#pragma unroll
        for (int i = 0; i < 3; ++i) x.w[i] &= 0x77777777;
      }
    } else if constexpr (kPairsOfBits) {
      constexpr int kUnits = D / 32;  // each is a word of the lane; a group has two of them
      const int chunk = group / 2, rest = kUnits - format::kChunkUnits * chunk;
      const int words = min(rest, format::kChunkUnits), mine = min(kUnits - 2 * group, 2);
      const uint8_t* from = block + format::kChunkBytes * chunk + 4 * words * lane + 8 * (group % 2);
      read_some_words(from, mine, words, x.w);
      if (products % 2 == 1) {  // the last 16 channels, whose words are shared by two lanes
        const uint32_t both = *reinterpret_cast<const uint32_t*>(block + format::kUnitBytes * kUnits + 4 * (lane % 16));
        x.w[products / 2] = both >> 4 * (lane / 16);
      }
    } else {
      constexpr int kPerProduct = kBits / 4;  // words of the lane
#pragma unroll
      for (int i = 0; i < kPerProduct; ++i) {
        const int words = min(kPerProduct * products - format::kChunkUnits * i, format::kChunkUnits);
        if (words <= 0) continue;
        uint32_t w[4] = {};
        const uint8_t* from = block + format::kChunkBytes * (group * kPerProduct + i) + 4 * words * lane;
        if (words == format::kChunkUnits) {
          read_words(from, w);
        } else {
          read_some_words(from, words, words, w);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) x.w[4 * i + j] = w[j];
      }
    }
  }

  // The operand of product I of a group: channels 16 I to 16 I + 15. a, b: the two blocks.
  template <int I>
  static __device__ __forceinline__ void expand(const Words& a, const Words& b, const LevelTable<kTwoTables>& table,
                                                uint32_t (&plus)[4], uint32_t (&minus)[4]) {
    if constexpr (kBytes) {
      plus[0] = a.w[2 * I], plus[1] = a.w[2 * I + 1], plus[2] = b.w[2 * I], plus[3] = b.w[2 * I + 1];
    } else if constexpr (kMasks) {
      plus[0] = a.w[I] & kLowNibbles, plus[1] = a.w[I] & kHighNibbles;
      plus[2] = b.w[I] & kLowNibbles, plus[3] = b.w[I] & kHighNibbles;
    } else {
      uint32_t x, y;  // codes of the lower and of the upper eight channels, in nibbles of both blocks in turn
      if constexpr (kPairsOfBits) {
        const uint32_t m = I % 2 ? select_bits(kLowNibbles, a.w[I / 2] >> 4, b.w[I / 2])
                                 : select_bits(kLowNibbles, a.w[I / 2], b.w[I / 2] << 4);
        x = m & 0x33333333, y = m >> 2 & 0x33333333;
      } else {
        x = select_bits(kLowNibbles, a.w[I], b.w[I] << 4), y = select_bits(kLowNibbles, a.w[I] >> 4, b.w[I]);
      }
      if constexpr (kTwoTables) {
        minus[0] = table.minus(x), minus[1] = table.minus(y), minus[2] = table.minus(x >> 16),
        minus[3] = table.minus(y >> 16);
        x ^= 0x88888888, y ^= 0x88888888;
      }
      plus[0] = table.plus(x), plus[1] = table.plus(y), plus[2] = table.plus(x >> 16), plus[3] = table.plus(y >> 16);
    }
  }
};

// ---- Pairs ---------------------------------------------------------------------------------------------------------

template <class K, class V>
struct CodePair {
  using Keys = K;
  using Values = V;
};

// The pairs that the choice of a kernel knows, in the same order (choices/attention.h).
template <int D, class Indices = std::make_index_sequence<kSplitKvNumPairs>>
struct CodePairList;
template <int D, size_t... I>
struct CodePairList<D, std::index_sequence<I...>> {
  using Pairs = std::tuple<CodePair<KeyCodes<D, kSplitKvPairs[I].keys>, ValueCodes<D, kSplitKvPairs[I].values>>...>;
};
template <int D>
using CodePairs = typename CodePairList<D>::Pairs;

// The different keys and values of these pairs, for code that exists once for each of them. The order of tokens in the
// operands of values (ValueCodes::kMixed) is part of the keys, because it decides which keys a lane scores.
template <typename T>
struct Different {
  T of[kSplitKvNumPairs];
  int size = 0;

  constexpr int index(const T& x) const {
    int i = 0;
    while (i < size && !(of[i] == x)) ++i;
    return i;
  }
  constexpr void add(const T& x) {
    if (index(x) == size) of[size++] = x;
  }
};
struct KeysOfPair {
  format::Codes codes;
  bool mixed;
  constexpr bool operator==(const KeysOfPair&) const = default;
};
constexpr Different<KeysOfPair> kKeysOfPairs = [] {
  Different<KeysOfPair> found{};
  for (const CodesOfPair& pair : kSplitKvPairs) found.add({pair.keys, is_mixed(pair.values)});
  return found;
}();
constexpr Different<format::Codes> kValuesOfPairs = [] {
  Different<format::Codes> found{};
  for (const CodesOfPair& pair : kSplitKvPairs) found.add(pair.values);
  return found;
}();

// What a pair's codes mean for code that is compiled once for all pairs.
struct CodeFacts {
  int pair;          // its index in CodePairs
  int keys, values;  // indices in kKeysOfPairs and kValuesOfPairs
  bool mixed;        // ValueCodes::kMixed
  CodeOrder order;
  bool shifts;
  int key_twice_zero;
  float key_unit;
  float value_steps[2], value_inverses[2];  // kStep of a product's lower and upper rows; 1 / kStep
  float value_top;

  template <class Pair>
  static constexpr CodeFacts of(int index) {
    using K = typename Pair::Keys;
    using V = typename Pair::Values;
    constexpr float step = V::kStep, upper = step / V::kUpper;
    return {index,
            kKeysOfPairs.index({K::kCodes, V::kMixed}),
            kValuesOfPairs.index(V::kCodes),
            V::kMixed,
            K::kOrder,
            K::kShifts,
            K::kTwiceZero,
            K::kUnit,
            {step, upper},
            {1 / step, 1 / upper},
            V::kTop};
  }
  // With kShifts, channels that have another channel's bits below them count a sixteenth more.
  __device__ __forceinline__ int twice_zero(int channel) const {
    return shifts && channel % 2 == 0 && channel % 8 ? key_twice_zero * 17 / 16 : key_twice_zero;
  }
};

// Calls f(std::integral_constant<int, i>{}) for i = index, which [LOW, HIGH) holds.
template <int LOW, int HIGH, typename F>
__device__ __forceinline__ void with_index(int index, F&& f) {
  constexpr int kMiddle = (LOW + HIGH) / 2;
  if constexpr (HIGH - LOW == 1) {
    f(std::integral_constant<int, LOW>{});
  } else if (index < kMiddle) {
    with_index<LOW, kMiddle>(index, f);
  } else {
    with_index<kMiddle, HIGH>(index, f);
  }
}
// Calls f(std::type_identity<CodePair>{}) for the pair of an index.
template <int D, typename F>
__device__ __forceinline__ void with_pair(int index, F&& f) {
  with_index<0, kSplitKvNumPairs>(index,
                                  [&](auto i) { f(std::type_identity<std::tuple_element_t<i, CodePairs<D>>>{}); });
}

}  // namespace turboquant::cuda
