// Bytes as float16, two at a time.
#pragma once

#include <cuda_fp16.h>

#include "cuda/common/mma.cuh"

namespace turboquant::cuda {

// Two bytes, levels + 128, as levels. selector: which, see select_bytes; 4 in its odd places. In the low bits of a
// float16 between 1024 and 2048 they are integers, and what is too much is subtracted.
__device__ __forceinline__ uint32_t byte_levels(uint32_t bytes, uint32_t selector) {
  const uint32_t x = select_bytes(bytes, 0x64646464, selector);
  const __half2 levels = __hsub2(reinterpret_cast<const __half2&>(x), __float2half2_rn(1024 + 128));
  return reinterpret_cast<const uint32_t&>(levels);
}

}  // namespace turboquant::cuda
