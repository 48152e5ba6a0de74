// What the kernels of qjl_sketch share: numbers of a vector as the format has them (docs/format.md sections 5 and 10).
#pragma once

#include "codec.cuh"
#include "hadamard.cuh"
#include "qjl.cuh"

namespace turboquant::cuda {

constexpr uint32_t kInfinityBits = 0x7F800000;

// A magnitude as its representation: it orders like the value, NaN above infinity.
__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFF; }

// Exponent of section 5, step 3.
__device__ __forceinline__ int prescale_exponent(uint32_t amax_bits) {
  return min(max(static_cast<int>(amax_bits >> 23) - 127, -100), 100);
}

__device__ __forceinline__ float nan_norm() { return __int_as_float(0x7FC00000); }

// Structured sketches of many vectors, rows of `bits` and `norms` as in qjl_sketch. False where there are too few, or no kernel
// for them.
bool launch_sketch_tiles(const AlignedRows& in, ScalarType dtype, format::Split split, const Constant& signs,
                         uint8_t* bits, float* norms, cudaStream_t stream);

}  // namespace turboquant::cuda
