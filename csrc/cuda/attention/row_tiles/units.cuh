// From a unit, the codes of 64 tokens of a KV head as they come from memory, to float16 rows of a tile of keys and of
// one of values: levels times scales. One warp does it.
//
// Rows have 128 bytes, with the swizzle of common/wgmma_swizzled.cuh:
//   keys    [channels / 64][keys][64 channels]
//   values  [channels][64 keys]      (a word of a value block holds four tokens of a channel)
// The order of channels and of tokens is the one in which codes leave their words (expansion.cuh): queries and softmax
// weights follow it.
//
// A head_dim that is no multiple of 64 is padded with further channels. Those of keys have some finite levels, which
// meet zeros of the queries; those of values stand for anything, because nobody reads their sums.
#pragma once

#include "cuda/attention/row_tiles/expansion.cuh"
#include "cuda/attention/row_tiles/shape.cuh"
#include "cuda/common/wgmma_swizzled.cuh"

namespace turboquant::cuda::row_tiles {

template <class S>
class UnitExpander {
 protected:
  __device__ __forceinline__ explicit UnitExpander(const Plan& plan) : r_(plan.layout), lane_(threadIdx.x % 32) {
    const bool small = r_.tile_shift == 4;  // a tile of the record has 16 tokens, else 32
    half_bytes_ = small ? 2 * r_.tile_bytes : r_.tile_bytes;
    const int token = token_at(lane_), number = small ? token % 16 : token;
    scale_ = (small && token >= 16 ? r_.tile_bytes : 0) + r_.key_scales + 2 * number;
  }

  // kind: of codes, as the plan has it. scales: __half [64], of the unit's tokens in the order of their places. tile:
  // the row of its first key, or that of channel 0.
  template <bool VALUES>
  __device__ __forceinline__ void expand_unit(ExpansionKind kind, const uint8_t* unit, const __half* scales,
                                              const Tables& tables, uint8_t* tile) const {
    const auto expand_as = [&](auto kind) {
      if (r_.head_dim != S::kDim) {
        expand<VALUES, kind, true>(unit, scales, tables, tile);
      } else {
        expand<VALUES, kind, false>(unit, scales, tables, tile);
      }
    };
    using enum ExpansionKind;
    switch (kind) {
      case kPairs: return expand_as(std::integral_constant<ExpansionKind, kPairs>{});
      case kSpread: return expand_as(std::integral_constant<ExpansionKind, kSpread>{});
      case kNibbles: return expand_as(std::integral_constant<ExpansionKind, kNibbles>{});
      case kPlanes:
        if constexpr (!VALUES) expand_as(std::integral_constant<ExpansionKind, kPlanes>{});
        return;
      case kLevels: return expand_as(std::integral_constant<ExpansionKind, kLevels>{});
      default: return expand_as(std::integral_constant<ExpansionKind, kBytes>{});
    }
  }

  // A float16 with E in its exponent field is below 2^(E - 14).
  static __device__ __forceinline__ int exponent_of(uint32_t most) { return max(static_cast<int>(most >> 10), 1) - 14; }
  static __device__ __forceinline__ float power_of_two(int e) { return __int_as_float((127 + e) << 23); }
  static __device__ __forceinline__ bool not_finite(uint32_t half) { return (half & 0x7C00) == 0x7C00; }

  const RecordLayout& r_;
  const int lane_;
  int half_bytes_;  // of half a unit, 32 tokens
  int scale_;       // where the scale of this lane's key is in 32 tokens

 private:
  // PADDED: there are fewer than S::kDim channels
  template <bool VALUES, ExpansionKind KIND, bool PADDED>
  __device__ __forceinline__ void expand(const uint8_t* unit, const __half* scales, const Tables& tables,
                                         uint8_t* tile) const {
    if constexpr (VALUES) {
      expand_values<KIND, PADDED>(unit, scales, tables, tile);
    } else {
      expand_keys<KIND, PADDED>(unit, scales, tables, tile);
    }
  }

  // The keys of a unit; scales: of its keys, in the order of its places. Eight lanes share a token and expand 64 of its
  // channels at a time, eight each. Behind the last octet of a padded key they expand that one again.
  template <ExpansionKind KIND, bool PADDED>
  __device__ __forceinline__ void expand_keys(const uint8_t* unit, const __half* scales, const Tables& tables,
                                              uint8_t* tile) const {
    // Bits of a code in a row, and octets of channels that share words
    constexpr int kBits = KIND == ExpansionKind::kBytes    ? 8
                          : KIND == ExpansionKind::kPairs  ? 2
                          : KIND == ExpansionKind::kSpread ? 3
                                                           : 4;
    constexpr int kShare = KIND == ExpansionKind::kPairs    ? 2
                           : KIND == ExpansionKind::kSpread ? 4
                                                            : 1,
                  kWords = kShare * kBits / 4;
    constexpr int kChunks = S::kDim / 64;
    const int row = PADDED ? r_.key_row_bytes : S::kDim / 8 * kBits;
    const int plane = PADDED ? r_.key_plane_bytes : S::kDim / 8;
    const int octet = lane_ % 8, x = lane_ / 8;
    const int next_key = r_.tile_shift == 4 ? r_.tile_bytes : 16 * row;  // to the other 16 tokens of half a unit
    const int next_plane = r_.tile_shift == 4 ? r_.tile_bytes : 16 * plane;
    const auto octet_of = [&](int chunk) { return PADDED ? min(8 * chunk + octet, r_.octets - 1) : octet; };
    // Whether an octet is in a last group of two instead of four.
    const auto in_half_group = [&](int o) { return PADDED && r_.octets % 4 != 0 && o >= r_.octets - 2; };
#pragma unroll 1
    for (int quarter = 0; quarter < 4; ++quarter) {  // 16 tokens: 4 i + x
      const int half = quarter / 2, odd = quarter % 2;
      const uint8_t* const of_half = unit + half * half_bytes_;
      const uint8_t* const from = of_half + odd * next_key + x * row;
      const uint8_t* const planes = of_half + r_.key_planes + odd * next_plane + x * plane;
      const __half* const scale_of = scales + 32 * half + x / 2 * 8 + x % 2 * 2;
      // All words are loaded before the first store: the compiler cannot know that loads need not wait for it.
      uint32_t w[4][kChunks][kWords], fifth[4][kChunks] = {};
      uint32_t both[2];  // scales of tokens i and i + 2
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < 2) both[i] = *reinterpret_cast<const uint32_t*>(scale_of + 16 * i + 4 * odd);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          const int o = octet_of(c), before = PADDED ? 0 : c;  // octet, and whole chunks before it
          const uint8_t* const at = from + o / kShare * (kShare * kBits) + 4 * i * row + before * (8 * kBits);
          if constexpr (KIND == ExpansionKind::kBytes) {
            const uint2 two = *reinterpret_cast<const uint2*>(at);
            w[i][c][0] = two.x, w[i][c][1] = two.y;
          } else {
#pragma unroll
            for (int n = 0; n < kWords; ++n) w[i][c][n] = reinterpret_cast<const uint32_t*>(at)[n];
          }
          if constexpr (KIND == ExpansionKind::kPlanes) {
            fifth[i][c] = *reinterpret_cast<const uint32_t*>(planes + o / 4 * 4 + 4 * i * plane + before * 8);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int place = x % 2 * 2 + 4 * odd + i / 2;  // within eight
        const int key = 32 * half + x / 2 * 8 + i % 2 * 16 + place;
        uint8_t* const to = tile + key * kSwizzleRow + (octet ^ place) * 16;
        const __half2 pair = as_halves(both[i % 2]), scale = i < 2 ? __low2half2(pair) : __high2half2(pair);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          const auto& word = w[i][c];
          const int o = octet_of(c);
          __half2 y[4];
          if constexpr (KIND == ExpansionKind::kBytes) {
            expand_bytes(word[0], word[1], y);
          } else if constexpr (KIND == ExpansionKind::kPairs) {
            row_tiles::expand<KIND>(word[0] >> (o % 2 * 2) & 0x33333333, 0, tables, y);
          } else if constexpr (KIND == ExpansionKind::kSpread) {
            const uint32_t codes = in_half_group(o) ? half_spread_word(word[0], word[1], o % 4)
                                                    : spread_word(word[0], word[1], word[2], o % 4);
            row_tiles::expand<KIND>(codes, 0, tables, y);
          } else {
            const uint32_t bits = in_half_group(o) ? half_fifth_bits(fifth[i][c], o % 4) : fifth[i][c] >> (o % 4 * 2);
            row_tiles::expand<KIND>(word[0], bits, tables, y);
          }
          uint4 out;
          out.x = as_word(__hmul2(y[0], scale)), out.y = as_word(__hmul2(y[1], scale));
          out.z = as_word(__hmul2(y[2], scale)), out.w = as_word(__hmul2(y[3], scale));
          *reinterpret_cast<uint4*>(to + c * S::kKeys * kSwizzleRow) = out;
        }
      }
    }
  }

  // Word j of those that spread_three_bits finds.
  static __device__ __forceinline__ uint32_t spread_word(uint32_t w0, uint32_t w1, uint32_t w2, int j) {
    const uint32_t last = fourth_spread_word(w0, w1, w2);
    return (j == 0 ? w0 : j == 1 ? w1 : j == 2 ? w2 : last) & 0x77777777;
  }
  // Octet j of a group of two octets, whose 3-bit codes are in words of four.
  static __device__ __forceinline__ uint32_t half_spread_word(uint32_t w0, uint32_t w1, int j) {
    const uint32_t last = (w0 >> 3 & 0x1111) | (w0 >> 18 & 0x2222) | (w1 >> 1 & 0x4444);
    return j == 0 ? w0 & 0x77777777 : (w1 & 0x7777) | last << 16;
  }
  // Its fifth bits, as `expand` takes them, from the group's word of a plane.
  static __device__ __forceinline__ uint32_t half_fifth_bits(uint32_t plane, int j) {
    return (plane >> 4 * j & 0x0303) | (plane >> (4 * j + 2) & 0x0303) << 16;
  }

  // The values of a unit. A lane expands words of its channels for half of the tokens at a time, of which it has eight:
  // a word of 16 bytes of a row. Lanes with odd g begin with the other half, so that eight lanes that store at once
  // never meet in a bank.
  template <ExpansionKind KIND, bool PADDED>
  __device__ __forceinline__ void expand_values(const uint8_t* unit, const __half* scales, const Tables& tables,
                                                uint8_t* tile) const {
    // The lane's words in a value block, of eight codes (or four bytes) each, that are expanded at once; the channels
    // of a word, which eight lanes share
    constexpr int kWords = 4, kChannels = KIND == ExpansionKind::kBytes ? 8 : 16;
    const int turns = PADDED ? ceil_div(r_.head_dim, kWords * kChannels) : S::kDim / (kWords * kChannels);
    const int g = lane_ / 4, q = lane_ % 4, next = r_.tile_shift == 4 ? r_.tile_bytes : r_.value_block_bytes;
#pragma unroll 1
    for (int step = 0; step < 2 * turns; ++step) {
      const int v = step / 2 * kWords, half = step % 2 ^ (g & 1);
      const uint8_t* const block = unit + half * half_bytes_ + r_.value_blocks;
      uint32_t a[kWords], b[kWords];
      load_words<KIND, PADDED>(block, v, a), load_words<KIND, PADDED>(block + next, v, b);
      const uint4 scale = *reinterpret_cast<const uint4*>(scales + 32 * half + 8 * q);
      uint8_t* const to = tile + (v * kChannels + g) * kSwizzleRow + ((4 * half + q) ^ g) * 16;
      const auto store = [&](int row, __half2 a0, __half2 a1, __half2 b0, __half2 b1) {
        uint4 word;
        word.x = as_word(__hmul2(a0, as_halves(scale.x))), word.y = as_word(__hmul2(a1, as_halves(scale.y)));
        word.z = as_word(__hmul2(b0, as_halves(scale.z))), word.w = as_word(__hmul2(b1, as_halves(scale.w)));
        *reinterpret_cast<uint4*>(to + row * kSwizzleRow) = word;
      };
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if constexpr (KIND == ExpansionKind::kBytes) {
          __half2 x[2], y[2];
          expand_bytes(a[i], x), expand_bytes(b[i], y);
          store(8 * i, x[0], x[1], y[0], y[1]);
        } else {
          __half2 x[4], y[4];
          row_tiles::expand<KIND>(a[i], 0, tables, x), row_tiles::expand<KIND>(b[i], 0, tables, y);
          const int row = KIND == ExpansionKind::kPairs ? i / 2 * 32 + i % 2 * 8 : 16 * i;
          store(row, x[0], x[2], y[0], y[2]);
          store(row + (KIND == ExpansionKind::kPairs ? 16 : 8), x[1], x[3], y[1], y[3]);
        }
      }
    }
  }

  // Words v to v + 3 of the lane in a value block, as eight nibbles (or four bytes) each: a chunk, a set of spread
  // codes, or two words of memory that hold two-bit codes.
  template <ExpansionKind KIND, bool PADDED>
  __device__ __forceinline__ void load_words(const uint8_t* block, int v, uint32_t (&w)[4]) const {
    if constexpr (PADDED) {
      load_some_words<KIND>(block, v, w);
    } else if constexpr (KIND == ExpansionKind::kSpread) {
      const uint32_t* set = reinterpret_cast<const uint32_t*>(block + v / 4 * format::kSpreadBytes + 12 * lane_);
      spread_three_bits({set[0], set[1], set[2]}, w);
    } else if constexpr (KIND == ExpansionKind::kPairs) {
      constexpr int kUnits = S::kDim / 32;  // words of memory
      const int unit = v / 2, chunk = unit / format::kChunkUnits;
      const int words = min(kUnits - format::kChunkUnits * chunk, format::kChunkUnits);
      const uint2 x = *reinterpret_cast<const uint2*>(block + chunk * format::kChunkBytes + 4 * words * lane_ +
                                                      unit % format::kChunkUnits * 4);
      w[0] = x.x & 0x33333333, w[1] = x.x >> 2 & 0x33333333, w[2] = x.y & 0x33333333, w[3] = x.y >> 2 & 0x33333333;
    } else {
      const uint4 x = *reinterpret_cast<const uint4*>(block + v / 4 * format::kChunkBytes + 16 * lane_);
      w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
    }
  }

  // The same where the last words may be missing: they are 0 then.
  template <ExpansionKind KIND>
  __device__ __forceinline__ void load_some_words(const uint8_t* block, int v, uint32_t (&w)[4]) const {
    const int d = r_.head_dim;
    const auto word = [&](int byte) { return *reinterpret_cast<const uint32_t*>(block + byte); };
    if constexpr (KIND == ExpansionKind::kPairs) {
      const int units = d / 32;
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int unit = v / 2 + u, chunk = unit / format::kChunkUnits;
        uint32_t x = 0;
        if (unit < units) {
          const int words = min(units - format::kChunkUnits * chunk, format::kChunkUnits);
          x = word(format::kChunkBytes * chunk + 4 * words * lane_ + unit % format::kChunkUnits * 4);
        } else if (32 * unit < d) {  // 16 channels, four of which share a byte
          const int at = format::kUnitBytes * units + 16 * (lane_ / 4 % 4) + 4 * (lane_ % 4);
          x = word(at) >> 4 * (lane_ / 16) & 0x0F0F0F0F;
        }
        w[2 * u] = x & 0x33333333, w[2 * u + 1] = x >> 2 & 0x33333333;
      }
    } else {
      constexpr int kChannels = KIND == ExpansionKind::kBytes ? 8 : 16;
      const int words = min(d / kChannels - v, 4);
      if (KIND == ExpansionKind::kSpread && words == 4) return load_words<KIND, false>(block, v, w);
      const int first =
          v / 4 * (KIND == ExpansionKind::kSpread ? format::kSpreadBytes : format::kChunkBytes) + 4 * words * lane_;
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = i < words ? word(first + 4 * i) : 0;
      if constexpr (KIND == ExpansionKind::kSpread) {
#pragma unroll
        for (uint32_t& codes : w) codes &= 0x77777777;
      }
    }
  }
};

}  // namespace turboquant::cuda::row_tiles
