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

// The larger one; NaN if one is NaN.
__device__ __forceinline__ float max_or_nan(float x, float y) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(x), "f"(y));
  return out;
#else
  return x != x || x > y ? x : y;
#endif
}

// What sums under maximum `part` are multiplied by under maximum `top`; a part without keys counts 0.
__device__ __forceinline__ float weight_of(float part, float top) {
  return part == -INFINITY ? 0 : exp2_fast(part - top);
}

// Adds a sink logit, which is one more score, without a value, to the sum of weights `total` under maximum `top`.
// Returns what sums of values are then multiplied by; 0: nothing counts but the sink, so its logit is the exact lse.
__device__ __forceinline__ float add_sink(float logit, float& top, float& total) {
  const float sink = logit * kLog2E, higher = fmaxf(top, sink);
  if (!(higher > -INFINITY)) return 1;
  const float by = weight_of(top, higher);
  total = total * by + exp2_fast(sink - higher), top = higher;
  return by;
}

// Within 1e-6, absolute.
__device__ __forceinline__ float tanh_fast(float x) { return 1 - __fdividef(2.0f, exp2_fast(2 * kLog2E * x) + 1); }

}  // namespace turboquant::cuda
