// Float32 vectors become float16 with a power of two of their own: exact for float16 and bfloat16, rounded once for
// float32.
#pragma once

#include "cuda/codec/codebook.cuh"
#include "cuda/common/device.cuh"

namespace turboquant::cuda::general {

// 2^e, e limited to the exponents of normal float32. (power_of_two of codec/codebook.cuh does not limit e.)
__device__ __forceinline__ float clamped_power_of_two(int e) {
  return __int_as_float((min(max(e, -126), 127) + 127) << 23);
}

// The exponent of a float32 magnitude from its bits, nothing limited: -127 for zero, 128 for infinity and NaN.
__device__ __forceinline__ int exponent_of_bits(uint32_t bits) { return static_cast<int>(bits >> 23) - 127; }

// A vector's exponent e from the bits of its largest magnitude. Times 2^(kHalfExponent - e) it fills the range of
// float16; below 2^-100 it uses less of that range, because the factor must be a normal float32.
constexpr int kHalfExponent = 14;
__device__ __forceinline__ int half_exponent(uint32_t largest) { return max(exponent_of_bits(largest), -100); }

__device__ __forceinline__ uint32_t halves(float low, float high) { return word_of_floats<__half>(low, high); }

}  // namespace turboquant::cuda::general
