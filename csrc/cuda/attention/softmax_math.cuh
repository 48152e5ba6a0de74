// The arithmetic of softmax weights: scores are kept in base 2, because tensor-core kernels have an instruction for
// 2^x.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace turboquant::cuda {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// 2^x, 0 below the normal numbers.
__device__ __forceinline__ float exp2_fast(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// Within 1e-6, absolute.
__device__ __forceinline__ float tanh_fast(float x) { return 1 - __fdividef(2.0f, exp2_fast(2 * kLog2E * x) + 1); }

}  // namespace turboquant::cuda
