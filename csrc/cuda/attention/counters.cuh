// Counters that are 0 before every launch, without a launch that clears them, and how blocks count with them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace turboquant::cuda {

// `count` counters for a launch on `stream`, which finds them at 0 and must leave them at 0. own: memory for as many,
// which is cleared and returned if no others are left.
uint32_t* zeroed_counters(int device, cudaStream_t stream, int count, uint32_t* own);

// Counts the arrival of a block; true: it was the last of `count` blocks, and the counter is 0 again. Memory that a
// block has written before its last barrier is visible to the blocks that arrive later.
__device__ __forceinline__ bool count_arrival(uint32_t* counter, int count) {
  const uint32_t last = static_cast<uint32_t>(count - 1);
  uint32_t before;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 700
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
#endif
  return before == last;
}

// Waits until a counter is at least `count`; nobody lowers it meanwhile. What other blocks had written before they set
// it, or counted their arrival, is visible then. From sm_70 on.
__device__ __forceinline__ void wait_for_count(const uint32_t* counter, uint32_t count) {
  uint32_t now = count;
  do {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 700
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
#endif
  } while (now < count);
}
// Sets a counter, for those that wait for it.
__device__ __forceinline__ void set_count(uint32_t* counter, uint32_t count) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 700
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(counter), "r"(count) : "memory");
#endif
}

}  // namespace turboquant::cuda
