// Products of neighbouring channels with factors that lie in memory, such as signs and scales of channels.
#pragma once

#include <cuda_runtime.h>

namespace turboquant::cuda::linear {

// v[i] *= by[i]; by: aligned to 16 bytes. GLOBAL: in global memory, which this kernel does not write.
template <bool GLOBAL, int N>
__device__ __forceinline__ void multiply_by(const float* by, float (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const auto* const from = reinterpret_cast<const float4*>(by + i);
    const float4 f = GLOBAL ? __ldg(from) : *from;
    v[i] = __fmul_rn(v[i], f.x), v[i + 1] = __fmul_rn(v[i + 1], f.y);
    v[i + 2] = __fmul_rn(v[i + 2], f.z), v[i + 3] = __fmul_rn(v[i + 3], f.w);
  }
}

}  // namespace turboquant::cuda::linear
