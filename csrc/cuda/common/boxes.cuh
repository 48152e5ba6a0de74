// Copies of boxes of a tensor to shared memory by the tensor memory accelerator, from sm_90 on; they do nothing before.
#pragma once

#include <cuda.h>

#include "cuda/common/async_copy.cuh"

namespace turboquant::cuda {

// Starts to copy the box of `map`, a parameter of the kernel, that begins at (x, y, z). The barrier has been told to
// expect the box's bytes; elements outside of the tensor are zeros.
__device__ __forceinline__ void copy_box(uint8_t* to, const CUtensorMap& map, int x, int y, int z, uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(shared_address(to)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
#endif
}

}  // namespace turboquant::cuda
