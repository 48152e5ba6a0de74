// Levels of codes (docs/format.md section 13) as bytes: what expansions to floats begin with.
#pragma once

#include "cuda/common/mma.cuh"

namespace turboquant::cuda::linear {

// Levels plus 128, four in a word. Codes of 4 bits look them up by byte permutations, whose tables have eight entries.
// So there are two: `plus` has the levels of the upper half of the codes, `minus` the magnitudes of the lower half,
// whose levels are negative. A code of the other half selects the sign of a byte, which is 0.
class LevelBytes {
 public:
  // levels: int8 [16], aligned to 16 bytes; null: the uniform grid, 2 code - 15
  explicit __device__ __forceinline__ LevelBytes(const int8_t* levels)
      : plus_low_(0x07050301), plus_high_(0x0F0D0B09), minus_low_(0x090B0D0F), minus_high_(0x01030507) {
    if (!levels) return;
    const uint4 w = __ldg(reinterpret_cast<const uint4*>(levels));
    plus_low_ = w.z, plus_high_ = w.w, minus_low_ = __vneg4(w.x), minus_high_ = __vneg4(w.y);
  }

  // Of eight codes of 4 bits: the first four, and the others.
  __device__ __forceinline__ uint2 of_nibbles(uint32_t codes) const {
    const uint32_t flipped = codes ^ 0x88888888;
    return make_uint2(look_up(codes, flipped), look_up(codes >> 16, flipped >> 16));
  }
  // Of four codes that are levels.
  static __device__ __forceinline__ uint32_t of_bytes(uint32_t codes) { return codes ^ 0x80808080; }

 private:
  __device__ __forceinline__ uint32_t look_up(uint32_t codes, uint32_t flipped) const {
    return select_bytes(plus_low_, plus_high_, flipped) + 0x80808080 - select_bytes(minus_low_, minus_high_, codes);
  }

  uint32_t plus_low_, plus_high_, minus_low_, minus_high_;
};

}  // namespace turboquant::cuda::linear
