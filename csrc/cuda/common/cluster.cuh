// Thread blocks of a cluster, which see the shared memory of each other. From sm_90 on; the functions do nothing
// before.
#pragma once

#include "cuda/common/async_copy.cuh"

namespace turboquant::cuda {

// All threads of all thread blocks of the cluster meet; what they wrote to shared memory is visible to all.
__device__ __forceinline__ void synchronise_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Arrives at the barrier at the same address of the shared memory of thread block `rank`.
__device__ __forceinline__ void arrive_in_cluster(uint64_t* here, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(here)),
      "r"(rank)
      : "memory");
#endif
}

// copy_bulk to the same address in all thread blocks of `ranks` (a bit for each); it counts at the barrier at the same
// address of each of them.
__device__ __forceinline__ void copy_to_cluster(uint8_t* to, const uint8_t* from, int bytes, uint64_t* barrier,
                                                uint16_t ranks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "h"(ranks)
      : "memory");
#endif
}

}  // namespace turboquant::cuda
