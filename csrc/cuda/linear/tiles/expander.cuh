// Weights as left operands of products of warpgroups: packed codes that become float16 in registers.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/wgmma_wide.cuh"
#include "cuda/linear/levels.cuh"
#include "cuda/linear/tiles/call.cuh"

namespace turboquant::cuda::linear::tiles {

// What a lane has of 16 rows and 64 channels: rows g and g + 8, as they lie in memory.
template <bool BYTES>
struct Codes {
  uint4 word[BYTES ? 2 : 1];
};
// Of a group of channels: scales of both rows; codes of multipliers, a byte for 64 channels, those of row g + 8 in the
// upper half.
struct Scales {
  __half2 scale;
  uint32_t multipliers;
};

template <bool BYTES>
class Expander {
  static constexpr int kHalfBytes = format::kWeightRows * kChannels * (BYTES ? 8 : 4) / 8;

 public:
  __device__ __forceinline__ explicit Expander(const Call& a) : levels_(BYTES ? nullptr : a.levels) {
    const int lane = threadIdx.x % 32;
    codes_at_ = 16 * lane;
    scales_at_ = a.block.scales() + lane / 4 * 4;
    each_ = a.block.multiplier_bytes();
    multipliers_at_ = a.block.multipliers() + lane / 4 * 2 * each_;
  }

  // unit: in shared memory
  template <int HALF>
  __device__ __forceinline__ Codes<BYTES> load(const uint8_t* unit) const {
    Codes<BYTES> c;
#pragma unroll
    for (int i = 0; i < (BYTES ? 2 : 1); ++i) {
      c.word[i] = *reinterpret_cast<const uint4*>(unit + codes_at_ + kHalfBytes * HALF + 512 * i);
    }
    return c;
  }
  __device__ __forceinline__ Scales load_scales(const uint8_t* unit) const {
    Scales f;
    f.scale = *reinterpret_cast<const __half2*>(unit + scales_at_);
    f.multipliers = 0x44444444;  // without multipliers M is 16
    if (!BYTES && each_ == 2) {
      f.multipliers = *reinterpret_cast<const uint32_t*>(unit + multipliers_at_);
    } else if (!BYTES && each_ == 1) {
      f.multipliers = select_bytes(*reinterpret_cast<const uint16_t*>(unit + multipliers_at_), 0, 0x4140);
    }
    return f;
  }

  // The fragments of channels 64 HALF + 32 STEP and on: four words for the first 16, four for the others.
  template <int HALF, int STEP>
  __device__ __forceinline__ void expand(const Codes<BYTES>& c, const Scales& f, uint32_t (&to)[8]) const {
    __half2 by;  // scale * M / 32 of rows g and g + 8
    if constexpr (BYTES) {
      by = __hmul2(f.scale, __float2half2_rn(0.5f));
    } else {
      const uint32_t word = (f.multipliers >> (8 * HALF + 4 * STEP) & 0x000F000F) | 0x64006400;  // 1024 + code
      by = __hmul2(f.scale, __hfma2(reinterpret_cast<const __half2&>(word), __float2half2_rn(1.0f / 32),
                                    __float2half2_rn((format::kMultiplierOffset - 1024) / 32.0f)));
    }
    const __half2 upper = __low2half2(by), lower = __high2half2(by);
    if constexpr (BYTES) {
      const uint4 w = c.word[STEP];
      put(LevelBytes::of_bytes(w.x), upper, to[0], to[2]), put(LevelBytes::of_bytes(w.y), lower, to[1], to[3]);
      put(LevelBytes::of_bytes(w.z), upper, to[4], to[6]), put(LevelBytes::of_bytes(w.w), lower, to[5], to[7]);
    } else {
      const uint2 u = levels_.of_nibbles(STEP ? c.word[0].z : c.word[0].x);
      const uint2 v = levels_.of_nibbles(STEP ? c.word[0].w : c.word[0].y);
      put(u.x, upper, to[0], to[2]), put(v.x, lower, to[1], to[3]);
      put(u.y, upper, to[4], to[6]), put(v.y, lower, to[5], to[7]);
    }
  }

 private:
  // levels: of four channels, plus 128
  static __device__ __forceinline__ void put(uint32_t levels, __half2 by, uint32_t& first, uint32_t& second) {
    first = scaled(select_bytes(levels, 0x64646464, 0x4140), by);
    second = scaled(select_bytes(levels, 0x64646464, 0x4342), by);
  }
  // word: two times 1024 + 128 + level, as float16
  static __device__ __forceinline__ uint32_t scaled(uint32_t word, __half2 by) {
    const __half2 level =
        __hfma2(reinterpret_cast<const __half2&>(word), __float2half2_rn(1.0f / 128), __float2half2_rn(-1152.0f / 128));
    const __half2 out = __hmul2(level, by);
    return reinterpret_cast<const uint32_t&>(out);
  }

  LevelBytes levels_;
  int codes_at_, scales_at_, multipliers_at_;
  int each_;  // bytes of a row's multipliers
};

// ---- Their products with activations

// The operand whose low word is given: of rows that are neighbours (common/wgmma_swizzled.cuh).
__device__ __forceinline__ uint64_t operand_of_word(uint32_t low) {
  return uint64_t{0x40000000 | kSwizzleGroup / 16} << 32 | low;
}

// A step of 32 channels, of the warpgroup's 64 rows and all tokens of a tile. d: [TOKENS / 2]. b: the low word of the
// operand of activations.
template <int TOKENS>
__device__ __forceinline__ void multiply_step(float* d, const uint32_t (&operand)[8], uint32_t b, bool add) {
  begin_products();
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint64_t activations = operand_of_word(b + 2 * k);
    if constexpr (TOKENS == 64 || TOKENS == 128) {
      multiply_registers<TOKENS, __half, false>(d, operand + 4 * k, activations, k > 0 || add);
    } else {
      multiply_wide<TOKENS>(d, operand + 4 * k, activations, k > 0 || add);
    }
  }
  commit_products();
}

// The low word of the operand of activations in a stage of the ring, the same in all lanes, as compilers see.
__device__ __forceinline__ uint32_t activations_word(const uint8_t* stage) {
  return __shfl_sync(0xffffffff, shared_address(stage) / 16 | 0x10000, 0);
}

// A group of channels, 64 or, with `two_halves`, 128. unit: the warp's weights in shared memory, of which `first` and
// `scales` have been loaded. b: as above. add: whether d holds sums. On return the last step is still being multiplied;
// `between` is called when all earlier groups have been, and their stage is free.
template <int TOKENS, bool BYTES, typename F>
__device__ __forceinline__ void multiply_group(const Expander<BYTES>& expander, const uint8_t* unit, Codes<BYTES> first,
                                               Scales scales, bool two_halves, uint32_t b, bool add,
                                               uint32_t (&operand)[2][8], float* d, F&& between) {
  Codes<BYTES> second = first;
  if (two_halves) second = expander.template load<1>(unit);
  expander.template expand<0, 0>(first, scales, operand[0]);
  multiply_step<TOKENS>(d, operand[0], b, add);
  wait_for_products<1>();  // for those of the other operand, which is next
  between();
  expander.template expand<0, 1>(first, scales, operand[1]);
  multiply_step<TOKENS>(d, operand[1], b + 4, true);
  wait_for_products<1>();
  if (two_halves) {
    constexpr int kNext = TOKENS * kRowBytes / 16;
    expander.template expand<1, 0>(second, scales, operand[0]);
    multiply_step<TOKENS>(d, operand[0], b + kNext, true);
    wait_for_products<1>();
    expander.template expand<1, 1>(second, scales, operand[1]);
    multiply_step<TOKENS>(d, operand[1], b + kNext + 4, true);
  }
}

}  // namespace turboquant::cuda::linear::tiles
