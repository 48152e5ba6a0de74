// From the codes of a unit of weights (docs/format.md) to left operands of tensor cores: 16 rows, 32 channels at a
// time.
//
//   kLloyd    byte permutations look codes up in two tables (levels.cuh). Either both words are operands, and products
//             with `minus` are subtracted (two operands), or the words are subtracted (one): 2 instructions for each
//             word instead of a second product for each tile of columns.
//   kUniform  level = 2 c - 15. A code in the upper half of a byte, its top bit flipped, with 8 below it is the byte
//             16 (c - 8) + 8 = 8 levels.
//   kBytes    codes are levels.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/linear/call.cuh"
#include "cuda/linear/levels.cuh"

namespace turboquant::cuda::linear {

template <Codes CODES>
struct Traits {
  static constexpr int kBits = CODES == Codes::kBytes ? 8 : 4;
  // What a level counts in sums.
  static constexpr float kWeight = CODES == Codes::kUniform ? 8 : 1;
};

// Upper half of a word, with any upper half, by the pipe of multiplications, which byte permutations leave idle.
__device__ __forceinline__ uint32_t upper_half(uint32_t x) {
  uint32_t out;
  asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(out) : "r"(x), "r"(0x0100), "r"(0));
  return out;
}

// x or 0, by the pipe of multiplications. one: 1 or 0, which the compiler does not know.
__device__ __forceinline__ uint32_t multiplied(uint32_t x, uint32_t one) {
  uint32_t out;
  asm("mul.lo.u32 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(one));
  return out;
}

// OPERANDS: the products of the second are subtracted from those of the first.
template <Codes CODES, int OPERANDS>
struct Expansion {
  static_assert(OPERANDS == 1 || CODES == Codes::kLloyd);

  Expansion() = default;
  // What a lane loads of levels, int8 [16], aligned to 4 bytes: apart from the rest, so that nobody waits for it before
  // it is needed.
  static __device__ __forceinline__ uint32_t load(const int8_t* levels) {
    return CODES == Codes::kLloyd ? __ldg(reinterpret_cast<const uint32_t*>(levels) + threadIdx.x % 4) : 0;
  }
  // word: of `load`. All lanes call it.
  explicit __device__ __forceinline__ Expansion(uint32_t word) {
    if constexpr (CODES == Codes::kLloyd) {
      // By way of neighbouring lanes, which hides from the compiler that all lanes have the same words: it would keep
      // them in uniform registers, and move them into a lane's before every permutation.
      const auto of_lane = [&](int lane) { return __shfl_sync(0xffffffff, word, lane, 4); };
      tables_.set(of_lane);
    }
  }

  // A step of 4-bit codes: the words of rows g and g + 8.
  __device__ __forceinline__ void operator()(uint32_t upper, uint32_t lower, uint32_t (&a)[OPERANDS][4]) const {
    if constexpr (CODES == Codes::kLloyd) {
      const uint32_t x = upper ^ 0x88888888, y = lower ^ 0x88888888;
      look_up<0>(x, upper, a), look_up<1>(y, lower, a);
      look_up<2>(upper_half(x), upper_half(upper), a), look_up<3>(upper_half(y), upper_half(lower), a);
    } else {
      constexpr uint32_t kHigh = 0xF0F0F0F0, kFlip = 0x88888888;
      a[0][0] = (upper << 4 & kHigh) ^ kFlip, a[0][1] = (lower << 4 & kHigh) ^ kFlip;
      a[0][2] = (upper & kHigh) ^ kFlip, a[0][3] = (lower & kHigh) ^ kFlip;
    }
  }

 private:
  // Four codes, as they are and with their top bits flipped.
  template <int I>
  __device__ __forceinline__ void look_up(uint32_t flipped, uint32_t codes, uint32_t (&a)[OPERANDS][4]) const {
    if constexpr (OPERANDS == 2) {
      a[0][I] = tables_.plus(flipped), a[1][I] = tables_.minus(codes);
    } else {
      a[0][I] = tables_.biased(codes, flipped) ^ 0x80808080;
    }
  }

  LevelTables tables_;  // of kLloyd
};

// The multipliers of rows g and g + 8 in one step, from a word of 16 bits of codes for each row.
__device__ __forceinline__ int2 multipliers_of(int step, uint32_t codes) {
  const uint32_t x = codes >> 4 * step;
  return make_int2(format::multiplier(x & 15), format::multiplier(x >> 16 & 15));
}

// Those of four steps.
struct Multipliers {
  uint32_t even, odd;  // bytes: of row g in steps 0 and 2 (1 and 3), of row g + 8 likewise

  explicit __device__ __forceinline__ Multipliers(uint32_t codes) {
    constexpr uint32_t kOffsets = 0x01010101 * format::kMultiplierOffset;
    even = (codes & 0x0F0F0F0F) + kOffsets, odd = (codes >> 4 & 0x0F0F0F0F) + kOffsets;
  }
  // lower: of row g + 8
  __device__ __forceinline__ int operator()(int step, bool lower) const {
    const int byte = 2 * lower + step / 2;
    return static_cast<int>(select_bytes(step % 2 ? odd : even, 0, 0x4440 | byte));
  }
};

}  // namespace turboquant::cuda::linear
