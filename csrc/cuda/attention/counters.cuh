// Counters that are 0 before every launch, without a launch that clears them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace turboquant::cuda {

// `count` counters for a launch on `stream`, which finds them at 0 and must leave them at 0. own: memory for as many,
// which is cleared and returned if no others are left.
uint32_t* zeroed_counters(int device, cudaStream_t stream, int count, uint32_t* own);

}  // namespace turboquant::cuda
