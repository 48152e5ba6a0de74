// From codes to float16 levels, exactly: by tables of levels, or for uniform grids by arithmetic.
#pragma once

#include "cuda/attention/row_tiles/expansion.cuh"
#include "cuda/mla/shape.cuh"

namespace turboquant::cuda::mla {

constexpr int kLevelCodes = 32;  // of the largest table

// The byte of a code in its table: its level and, of codes in the lower half, whose levels are negative, 128 more. Of 3
// bits all have 128 more. levels: [2^bits] or null, the uniform grid
__device__ __forceinline__ uint8_t level_table_byte(const int8_t* levels, format::Width width, int code) {
  const int codes = 1 << format::num_bits(width);
  if (format::levels_are_codes(width) || code >= codes) return 0;
  const int level = levels ? levels[code] : format::uniform_level(width, code);
  return static_cast<uint8_t>(code < max(codes / 2, 8) ? level + 128 : level);
}

// What pairs of a kind are multiplied by to be levels.
__device__ __forceinline__ float level_step(LevelKind kind) {
  const bool uniform = kind == LevelKind::kUniformFour || kind == LevelKind::kUniformFive;
  return uniform ? cuda::row_tiles::step_of(cuda::row_tiles::ExpansionKind::kNibbles) : 1;
}

// Pairs (i, i + 4), i = 0..3, of eight codes, as levels divided by level_step.
template <LevelKind KIND>
class LevelPairs {
  using Pairs = __half2[4];

 public:
  explicit __device__ __forceinline__ LevelPairs(const uint8_t* table)  // aligned to 16 bytes
      : lower_(reinterpret_cast<const int8_t*>(table)), upper_(reinterpret_cast<const int8_t*>(table) + 16) {}

  // w: nibbles. plane: of five bits, the fifth bit of nibble i at 8 (i / 2) + i % 2
  __device__ __forceinline__ void expand(uint32_t w, uint32_t plane, Pairs& to) const {
    namespace shared = cuda::row_tiles;
    if constexpr (KIND == LevelKind::kThreeBits) {
      shared::expand<shared::ExpansionKind::kSpread>(w & 0x77777777, 0, lower_, to);
    } else if constexpr (KIND == LevelKind::kFourBits) {
      shared::expand<shared::ExpansionKind::kLevels>(w, 0, lower_, to);
    } else if constexpr (KIND == LevelKind::kUniformFour) {
      shared::expand<shared::ExpansionKind::kNibbles>(w, 0, lower_, to);
    } else if constexpr (KIND == LevelKind::kUniformFive) {
      shared::expand<shared::ExpansionKind::kPlanes>(w, plane, lower_, to);
    } else {
      static_assert(KIND == LevelKind::kFiveBits);
      const uint32_t codes = select_bytes(w, 0, 0x3120);  // nibbles 0 1 4 5 2 3 6 7
      const __half2 added = __float2half2_rn(shared::kMagicOfBytes);
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

}  // namespace turboquant::cuda::mla
