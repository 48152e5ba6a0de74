// Asynchronous copies from global to shared memory, for pipelines whose stages a warp fills ahead of their use. The
// differences between architectures are here.
//
// Every stage has a barrier in shared memory, whose phase flips when the stage's bytes have arrived. From sm_90 on, one
// instruction of one lane copies a whole block of bytes. On sm_80 to sm_89 all lanes copy 16 bytes at a time. Older
// devices copy synchronously.
#pragma once

#include <cstdint>

namespace turboquant::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes to an address in shared memory.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
  *static_cast<uint4*>(__cvta_shared_to_generic(to)) = *static_cast<const uint4*>(from);
#endif
}

// The same. FIRST_LEVEL: through the L1 cache.
template <bool FIRST_LEVEL = false>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (FIRST_LEVEL) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
    return;
  }
#endif
  copy_async(shared_address(to), from);
}

// The same for bytes that are read once: they are the first to leave the L2 cache.
class CopyOnce {
 public:
  __device__ __forceinline__ CopyOnce() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy_));
#endif
  }
  __device__ __forceinline__ void copy_async(void* to, const void* from) const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "l"(policy_)
                 : "memory");
#else
    *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#endif
  }

 private:
  uint64_t policy_;
};

// Copies 16 bytes, or writes zeros where `copies` is false; `from` is a valid address even there.
__device__ __forceinline__ void copy_or_clear(void* to, const void* from, bool copies) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(copies ? 16 : 0)
               : "memory");
#else
  *static_cast<uint4*>(to) = copies ? *static_cast<const uint4*>(from) : uint4{};
#endif
}

__device__ __forceinline__ void commit_copies() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits for the lane's copies, but for those of the last PENDING commits.
template <int PENDING = 0>
__device__ __forceinline__ void wait_for_committed_copies() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}
// Waits for all asynchronous copies of the lane, those of `copy_blocks` and `fill_slot` before sm_90 included.
__device__ __forceinline__ void wait_for_copies() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kBulkCopies = true;
#else
constexpr bool kBulkCopies = false;
#endif

// Initialises a stage's barrier, to which `lanes` lanes will announce bytes. One lane calls it, before
// `barriers_ready`.
__device__ __forceinline__ void init_barrier(uint64_t* barrier, int lanes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(kBulkCopies ? lanes : 32)
               : "memory");
#endif
}

__device__ __forceinline__ void barriers_ready() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Waits until the phase of a stage has ended.
__device__ __forceinline__ void wait_barrier(uint64_t* barrier, uint32_t phase) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
#elif __CUDA_ARCH__ >= 800
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
#endif
}

// Arrives at a barrier. From sm_80 on, as the next one.
__device__ __forceinline__ void arrive(uint64_t* barrier) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}
// Lets a barrier's phase wait for one arrival more, which comes when all asynchronous copies that the lane has started
// have ended.
__device__ __forceinline__ void arrive_after_copies(uint64_t* barrier) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// Arrives at a barrier and announces `bytes` more, without which its phase does not end. From sm_90 on.
__device__ __forceinline__ void expect(uint64_t* barrier, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
#endif
}

// Copies `bytes` bytes, a multiple of 16 and more than 0, to shared memory. The barrier's phase ends only after they
// have arrived. From sm_90 on.
__device__ __forceinline__ void copy_bulk(uint8_t* to, const uint8_t* from, int bytes, uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}

// Between writes to global memory and bulk copies of it: the writer calls it before it tells others, and who copies
// after it has learned of them. From sm_90 on.
__device__ __forceinline__ void publish_global_memory() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// Prefetches `bytes` bytes, a multiple of 16, into the L2 cache. Does nothing before sm_90.
__device__ __forceinline__ void prefetch_bytes(const uint8_t* from, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// Copies before sm_90: all lanes of the warp call it with the same arguments and share the copy, 16 bytes at a time.
__device__ __forceinline__ void copy_by_lanes(uint8_t* to, const uint8_t* from, int bytes) {
  for (int i = 16 * static_cast<int>(threadIdx.x & 31); i < bytes; i += 512) copy_async(to + i, from + i);
}

// Copies before sm_90: all lanes of the warp call it, each with its own arguments, and the warp makes these copies one
// after the other.
__device__ __forceinline__ void copy_together(uint8_t* to, const uint8_t* from, int bytes) {
  for (unsigned rest = __ballot_sync(0xffffffff, bytes != 0); rest; rest &= rest - 1) {
    const int owner = __ffs(static_cast<int>(rest)) - 1, size = __shfl_sync(0xffffffff, bytes, owner);
    const auto target = reinterpret_cast<uint8_t*>(__shfl_sync(0xffffffff, reinterpret_cast<uint64_t>(to), owner));
    const auto source =
        reinterpret_cast<const uint8_t*>(__shfl_sync(0xffffffff, reinterpret_cast<uint64_t>(from), owner));
    copy_by_lanes(target, source, size);
  }
}

// Fills two stages, whose barriers are `first_barrier` and `second_barrier`; all lanes of the warp call it. A lane
// copies into one of them: `barrier` is that stage's. It copies `bytes` bytes, 0 or a multiple of 16, from `from` to
// `to`, both aligned to 16. It also announces `announced` bytes of that stage, or leaves that to others where
// `announced` is negative. A stage's phase ends when as many lanes as init_barrier was told have
// announced bytes, and all these bytes have arrived.
__device__ __forceinline__ void copy_blocks(uint64_t* first_barrier, uint64_t* second_barrier, uint64_t* barrier,
                                            int announced, uint8_t* to, const uint8_t* from, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (announced >= 0) expect(barrier, announced);
  if (bytes) copy_bulk(to, from, bytes, barrier);
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  copy_together(to, from, bytes);
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(first_barrier)) : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(second_barrier)) : "memory");
#endif
}

// One lane of a warp, the same one every time; compilers know that there is only one.
__device__ __forceinline__ bool elected() {
  uint32_t is = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one;\n}" : "=r"(is));
#endif
  return is != 0;
}

// A copy of `bytes` bytes, a multiple of 16, from `from` to `to`, both aligned to 16.
struct Run {
  uint8_t* to;
  const uint8_t* from;
  int bytes;
};

// Fills a stage that belongs to one warp. All lanes call it with the same runs, some or all of which may be empty, and
// later wait_slot. Every phase of the barrier (init_barrier with one lane) is filled once. Devices before sm_90 use no
// barrier. From sm_90 on one lane copies, because several copying lanes would take one iteration of a loop each.
template <int N>
__device__ __forceinline__ void fill_slot(uint64_t* barrier, const Run (&runs)[N]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (!elected()) return;
  int bytes = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) bytes += runs[i].bytes;
  expect(barrier, bytes);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (runs[i].bytes) copy_bulk(runs[i].to, runs[i].from, runs[i].bytes, barrier);
  }
#else
#pragma unroll
  for (int i = 0; i < N; ++i) copy_by_lanes(runs[i].to, runs[i].from, runs[i].bytes);
#endif
}
__device__ __forceinline__ void wait_slot(uint64_t* barrier, uint32_t phase) {
  if constexpr (kBulkCopies) {
    wait_barrier(barrier, phase);
  } else {
    wait_for_copies();
    __syncwarp();
  }
}

// A place in a ring of stages, and the phase of its barriers.
struct RingPlace {
  int slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance(int slots) {
    if (++slot == slots) slot = 0, phase ^= 1;
  }
  // By any number of steps.
  __device__ __forceinline__ void advance(int slots, int steps) {
    for (slot += steps; slot >= slots; slot -= slots) phase ^= 1;
  }
  // Back by fewer steps than there are slots.
  __device__ __forceinline__ void retreat(int slots, int steps) {
    if ((slot -= steps) < 0) slot += slots, phase ^= 1;
  }
};

}  // namespace turboquant::cuda
