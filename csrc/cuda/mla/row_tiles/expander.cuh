// From codes in a raw slot to float16 levels in a tile of the ring, exactly, by tables of levels. All warps that sum do
// it, each for half of the keys of every piece. Eight lanes have a group of 32 channels of eight keys: what they load
// and store at once is in different banks.
#pragma once

#include "cuda/codec/record.cuh"
#include "cuda/mla/levels.cuh"
#include "cuda/mla/row_tiles/shape.cuh"

namespace turboquant::cuda::mla {

template <class S, LevelKind KIND>
class Expander {
  static constexpr int kGroups = S::kLatent / 32;  // of 32 channels: four octets. A warp has four of them
  static constexpr int kWords = KIND == LevelKind::kThreeBits ? 3 : 4;  // of a group
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
    if constexpr (KIND == LevelKind::kThreeBits) {
#pragma unroll
      for (int n = 0; n < 3; ++n) w[n] = load_word(row + format::swapped_byte(kRow, token_, 12 * group_ + 4 * n));
    } else {
      const int word = format::swapped_word(kRow / format::kLatentWord, token_, group_);
      const uint4 x = load_words(row + word * format::kLatentWord);
      w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
    }
    if constexpr (KIND == LevelKind::kFiveBits) {
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
