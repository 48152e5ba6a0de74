// Matrix products of a warpgroup (four neighbouring warps) on Hopper's tensor cores: D = A B + D of float16 with A 64
// x 16, B 16 x N and D 64 x N (float32), N = 32 or 64. They are asynchronous until wait_for_products.
//
// In shared memory both operands consist of core matrices of 128 bytes: eight rows of A (or columns of B) with 8
// neighbours in k each. The distances to the next core matrix in k and to the next eight rows are free. Warp w of the
// warpgroup holds rows 16 w to 16 w + 15 of A and D, in the fragments of common/mma.cuh.
#pragma once

#include <concepts>
#include <cstdint>

namespace turboquant::cuda {

constexpr int kWarpgroup = 128;  // threads

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kWarpgroupProducts = true;
#else
constexpr bool kWarpgroupProducts = false;  // the functions below do nothing then
#endif

// The threads of a warpgroup get registers that another warpgroup has left, or leave some: each has COUNT then. Nothing
// moves where COUNT is none that a thread can have: 0, or more than 255.
template <int COUNT>
__device__ __forceinline__ void take_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (COUNT > 0 && COUNT < 256) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <int COUNT>
__device__ __forceinline__ void leave_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (COUNT > 0 && COUNT < 256) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

// An operand at `memory`, with distances in bytes. The empty asm keeps the compiler from moving it and its many
// neighbours (see advance) out of a loop, where they would take more registers than there are.
__device__ __forceinline__ uint64_t operand(const void* memory, int next_in_k, int next_rows) {
  uint32_t low = static_cast<uint32_t>(__cvta_generic_to_shared(memory)) / 16 + (next_in_k / 16 << 16);
  asm volatile("" : "+r"(low));
  return low | static_cast<uint64_t>(next_rows / 16) << 32;
}
// The operand that is `bytes` behind another.
__device__ __forceinline__ uint64_t advance(uint64_t operand, int bytes) {
  return (operand & 0xFFFFFFFF00000000) | (static_cast<uint32_t>(operand) + bytes / 16);
}

// To be called between ordinary stores to an operand and the synchronisation before its products.
__device__ __forceinline__ void publish_operands() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// To be called between ordinary writes of registers and the products that read them or add to them.
__device__ __forceinline__ void begin_products() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void commit_products() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until all but the last PENDING commits are done.
template <int PENDING>
__device__ __forceinline__ void wait_for_products() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}
// Keeps the compiler from reading results before this point; to be called behind wait_for_products.
template <int COUNT>
__device__ __forceinline__ void receive(float* d) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int COUNT, std::integral T>
__device__ __forceinline__ void receive(T* d) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// d[N / 2] = a * b, plus d if `add`; both in shared memory.
template <int N>
__device__ __forceinline__ void product_of_operands(float* d, uint64_t a, uint64_t b, bool add) {
  static_assert(N == 32 || N == 64);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (N == 64) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, 0, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
  } else {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, p, 1, 1, 0, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
  }
#endif
}

// d[N / 2] += a * b with a in registers.
template <int N>
__device__ __forceinline__ void product_of_registers(float* d, const uint4& a, uint64_t b) {
  static_assert(N == 32 || N == 64);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (N == 64) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
  } else {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
  }
#endif
}

}  // namespace turboquant::cuda
