// From codes in a raw slot to float16 levels in a tile of the ring, exactly, by tables of levels. All warps that sum do
// it, each for half of the keys of every piece. Eight lanes have a group of 32 channels of eight keys: what they load
// and store at once is in different banks.
#pragma once

#include "cuda/attention/row_tiles/expansion.cuh"
#include "cuda/codec/record.cuh"
#include "cuda/mla/row_tiles/shape.cuh"

namespace turboquant::cuda::mla {

// The byte of a code in its table: its level and, of codes in the lower half, whose levels are negative, 128 more. Of 3
// bits all have 128 more. levels: [2^bits] or null, the uniform grid
__device__ __forceinline__ uint8_t table_byte(const int8_t* levels, format::Width width, int code) {
  const int codes = 1 << format::num_bits(width);
  if (format::levels_are_codes(width) || code >= codes) return 0;
  const int level = levels ? levels[code] : format::uniform_level(width, code);
  return static_cast<uint8_t>(code < max(codes / 2, 8) ? level + 128 : level);
}

// Pairs (i, i + 4), i = 0..3, of eight codes, as levels.
template <RowKind KIND>
class LevelPairs {
  using Pairs = __half2[4];

 public:
  explicit __device__ __forceinline__ LevelPairs(const uint8_t* table)  // aligned to 16 bytes
      : lower_(reinterpret_cast<const int8_t*>(table)), upper_(reinterpret_cast<const int8_t*>(table) + 16) {}

  // w: nibbles. plane: of five bits, the fifth bit of nibble i at 8 (i / 2) + i % 2
  __device__ __forceinline__ void expand(uint32_t w, uint32_t plane, Pairs& to) const {
    namespace shared = cuda::row_tiles;
    if constexpr (KIND == RowKind::kThreeBits) {
      shared::expand<shared::kSpread>(w & 0x77777777, 0, lower_, to);
    } else if constexpr (KIND == RowKind::kFourBits) {
      shared::expand<shared::kLevels>(w, 0, lower_, to);
    } else {
      const uint32_t codes = select_bytes(w, 0, 0x3120);  // nibbles 0 1 4 5 2 3 6 7
      const __half2 added = __float2half2_rn(1152);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t four = i < 2 ? codes : codes >> 16, pair = i % 2 ? 0x5351 : 0x5250;
        const uint32_t low = select_bytes(look_up(lower_, four), shared::kMagic, pair);
        const uint32_t high = select_bytes(look_up(upper_, four), shared::kMagic, pair);
        const uint32_t is_high = (plane >> (i / 2 * 8 + i % 2) & 0x00010001) * 0xFF;
        const uint32_t x = (low & ~is_high) | (high & is_high) | (is_high & 0x00800080);
        to[i] = __hsub2(shared::as_halves(x), added);
      }
    }
  }

 private:
  // The bytes of four nibbles in a table of 16, all below 128: a selector's bit 3 makes zeros of such bytes.
  static __device__ __forceinline__ uint32_t look_up(const cuda::row_tiles::Tables& t, uint32_t codes) {
    return select_bytes(t.low0, t.low1, codes) | select_bytes(t.high0, t.high1, codes ^ 0x8888);
  }

  const cuda::row_tiles::Tables lower_, upper_;
};

template <class S, RowKind KIND>
class Expander {
  static constexpr int kGroups = S::kLatent / 32;  // of 32 channels: four octets. A warp has four of them
  static constexpr int kWords = KIND == RowKind::kThreeBits ? 3 : 4;  // of a group
  static constexpr int kRow = kGroups * kWords * 4, kPlane = S::kLatent / 8;
  static_assert(kGroups / 4 * 2 == S::kSumWarps);

 public:
  // warp: among those that expand. The four of a warpgroup have all keys and the channels that it sums.
  __device__ __forceinline__ Expander(const BlockView& block, int warp)
      : shared_(shared_address(block.shared)), levels_(block.shared + block.plan.tables),
        token_(warp % 4 / 2 * 8 + block.lane % 8), group_((warp / 4 * 2 + warp % 2) * 4 + block.lane / 8) {}

  // Piece `p` of a tile, from a raw slot. exists: it has been copied there; else its levels are 0.
  __device__ __forceinline__ void expand(const uint8_t* from, int tile, int p, bool exists) const {
    const uint32_t raw = shared_address(from), row = raw + (p * kPieceKeys + token_) * kRow;
    uint32_t w[kWords], fifth = 0;
    if constexpr (KIND == RowKind::kThreeBits) {
#pragma unroll
      for (int n = 0; n < 3; ++n) w[n] = load_word(row + format::swapped_byte(kRow, token_, 12 * group_ + 4 * n));
    } else {
      const int word = format::swapped_word(kRow / format::kLatentWord, token_, group_);
      const uint4 x = load_words(row + word * format::kLatentWord);
      w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
    }
    if constexpr (KIND == RowKind::kFiveBits) {
      fifth = load_word(raw + kTileKeys * kRow + (p * kPieceKeys + token_) * kPlane + group_ * 4);
    }
    const uint32_t to = shared_ + tile * (kTileKeys * kSwizzleRow) + group_ / 2 * S::kPanelBytes +
                        p * kPieceKeys * kSwizzleRow + swizzled(token_, group_ % 2 * 64);
#pragma unroll
    for (int o = 0; o < 4; ++o) {  // octets
      __half2 y[4];
      levels_.expand(o < kWords ? w[o] : fourth_spread_word(w[0], w[1], w[2]), fifth >> (2 * o), y);
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i] = exists ? y[i] : __half2{};
      store_words(to ^ (o * 16), y);
    }
  }

 private:
  // Loads and stores in shared memory that stay in their order.
  static __device__ __forceinline__ uint32_t load_word(uint32_t from) {
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from));
    return x;
  }
  static __device__ __forceinline__ uint4 load_words(uint32_t from) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from));
    return x;
  }
  static __device__ __forceinline__ void store_words(uint32_t to, const __half2 (&y)[4]) {
    using cuda::row_tiles::as_word;
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(as_word(y[0])), "r"(as_word(y[1])),
                 "r"(as_word(y[2])), "r"(as_word(y[3]))
                 : "memory");
  }

  const uint32_t shared_;
  const LevelPairs<KIND> levels_;
  const int token_, group_;  // of a piece: the lane's key and group of channels
};

}  // namespace turboquant::cuda::mla
