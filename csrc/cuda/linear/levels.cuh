// Levels of codes (docs/format.md section 13) as bytes: what expansions begin with.
#pragma once

#include "cuda/common/mma.cuh"

namespace turboquant::cuda::linear {

// The levels of codes of 4 bits, which byte permutations look up, four at a time. Their tables have eight entries, so
// there are two: `plus` has the levels of the upper half of the codes, `minus` the magnitudes of the lower half, whose
// levels are negative. A code of the other half selects the sign of a byte, which is 0.
struct LevelTables {
  uint32_t plus_low = 0, plus_high = 0, minus_low = 0, minus_high = 0;

  // word(i): of the levels, int8 [16]
  template <typename F>
  __device__ __forceinline__ void set(const F& word) {
    minus_low = __vneg4(word(0)), minus_high = __vneg4(word(1));
    plus_low = word(2), plus_high = word(3);
  }

  // flipped: codes whose top bits are flipped
  __device__ __forceinline__ uint32_t plus(uint32_t flipped) const {
    return select_bytes(plus_low, plus_high, flipped);
  }
  __device__ __forceinline__ uint32_t minus(uint32_t codes) const { return select_bytes(minus_low, minus_high, codes); }
  // Levels plus 128: no byte borrows from another.
  __device__ __forceinline__ uint32_t biased(uint32_t codes, uint32_t flipped) const {
    return plus(flipped) + 0x80808080 - minus(codes);
  }
};

// Levels plus 128, four in a word.
class LevelBytes {
 public:
  // levels: int8 [16], aligned to 16 bytes; null: the uniform grid, 2 code - 15
  explicit __device__ __forceinline__ LevelBytes(const int8_t* levels)
      : tables_{0x07050301, 0x0F0D0B09, 0x090B0D0F, 0x01030507} {
    if (!levels) return;
    const uint4 w = __ldg(reinterpret_cast<const uint4*>(levels));
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
    tables_.set([&](int i) { return words[i]; });
  }

  // Of eight codes of 4 bits: the first four, and the others.
  __device__ __forceinline__ uint2 of_nibbles(uint32_t codes) const {
    const uint32_t flipped = codes ^ 0x88888888;
    return make_uint2(tables_.biased(codes, flipped), tables_.biased(codes >> 16, flipped >> 16));
  }
  // Of four codes that are levels.
  static __device__ __forceinline__ uint32_t of_bytes(uint32_t codes) { return codes ^ 0x80808080; }

 private:
  LevelTables tables_;
};

}  // namespace turboquant::cuda::linear
