// Matrix products of one warp on tensor cores: D = A B + D.
//
// Bytes: A 16 x 32, B 32 x 8, D 16 x 8 (int32). Fragments, with g = lane / 4 and t = lane % 4; the four bytes of a
// word are neighbours in k, the first one lowest:
//   a[0] row g,     k 4t..4t+3       a[2] row g,     k 16+4t..        b[0] column g, k 4t..
//   a[1] row g + 8, k 4t..4t+3       a[3] row g + 8, k 16+4t..        b[1] column g, k 16+4t..
//   d[0], d[1] row g, columns 2t, 2t+1                                d[2], d[3] row g + 8, columns 2t, 2t+1
// Sums over k do not depend on the order of k, so callers may number channels in any way in which A and B agree.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace turboquant::cuda {

// The bytes of A and of B are signed or unsigned.
template <bool UNSIGNED_A = false, bool UNSIGNED_B = false>
__device__ __forceinline__ void mma_bytes(int (&d)[4], const uint32_t (&a)[4], uint2 b) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (UNSIGNED_A && UNSIGNED_B) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
  } else if constexpr (UNSIGNED_A) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
  } else if constexpr (UNSIGNED_B) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
  } else {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
  }
#else  // Turing has 8 x 8 x 16 only, whose fragments are a quarter of these
  static_assert(!UNSIGNED_B);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int* half = d + 2 * (i % 2);
    const uint32_t k = i < 2 ? b.x : b.y;
    if constexpr (UNSIGNED_A) {
      asm("mma.sync.aligned.m8n8k16.row.col.s32.u8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
          : "+r"(half[0]), "+r"(half[1])
          : "r"(a[i]), "r"(k));
    } else {
      asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
          : "+r"(half[0]), "+r"(half[1])
          : "r"(a[i]), "r"(k));
    }
  }
#endif
}

// float16: A 16 x 16, B 16 x 8, D 16 x 8 (float32). The fragments are as above, but a word holds two neighbours in k,
// so that 4t becomes 2t and 16+4t becomes 8+2t.
__device__ __forceinline__ void mma_halves(float* d, const uint4& a, uint32_t b0, uint32_t b1) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
#else  // Turing has 16 x 8 x 8 only
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(b0));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.z), "r"(a.w), "r"(b1));
#endif
}

// The same for a 16-bit T. bfloat16 needs sm_80.
template <typename T>
__device__ __forceinline__ void mma_floats(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    mma_halves(d, a, b0, b1);
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
#endif
  }
}

// Four 8 x 8 matrices of 16-bit elements from shared memory: lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ uint4 load_tiles(const void* row) {
  uint4 x{};
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))));
#endif
  return x;
}

// The same, transposed.
__device__ __forceinline__ uint4 load_transposed(const void* row) {
  uint4 x{};
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))));
#endif
  return x;
}

// Each of the four result bytes is the byte of {low, high} that a nibble of `selector` names. A nibble of 8 or more
// gives the sign of byte (nibble - 8), repeated; __byte_perm would take byte (nibble - 8) itself.
__device__ __forceinline__ uint32_t select_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
  return out;
}

// The bits of x where the mask is set, elsewhere those of y.
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t x, uint32_t y) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(out) : "r"(x), "r"(y), "r"(mask));
  return out;
}

// The smaller magnitudes of two pairs of bfloat16. The signs of the result mean nothing.
__device__ __forceinline__ uint32_t least_magnitudes(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 860
  uint32_t least;
  asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
  return least;
#else
  const auto pair = [](uint32_t x) { return __habs2(reinterpret_cast<const __nv_bfloat162&>(x)); };
  const __nv_bfloat162 least = __hmin2(pair(a), pair(b));
  return reinterpret_cast<const uint32_t&>(least);
#endif
}

}  // namespace turboquant::cuda
