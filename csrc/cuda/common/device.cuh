// Helpers that all kernels share: launches that overlap, division of integers, lanes of a warp, loads and stores of any
// dtype, and rows of a strided tensor. No torch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "dtype.h"

namespace turboquant::cuda {

// ---- Launches that overlap ----------------------------------------------------------------------------------------

// Under programmatic dependent launch (launch_early in torch.cuh) a kernel may begin while the previous kernel of the
// stream is still running. It calls this before it reads or writes shared global state, and reads again what it has
// read earlier. Before sm_90 there is no such launch, and nothing to wait for.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel of the stream begin, if it was launched so.
__device__ __forceinline__ void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// How a kernel runs beside its neighbours in a call of several, each of which has sequences of its own. All of them
// need what was written before the call, and none needs another's results. So the first kernel waits for what came
// before the call and then lets the second begin, which lets the third begin, and each uses what the others leave free
// of the device. The others do not wait. They read what was written before the first one let them begin: the hardware
// makes these writes visible, because the fence reaches the L2 cache first, but CUDA promises it only to kernels that
// wait.
struct Overlap {
  bool with_previous, with_next;

  // At the start. The kernel that follows the call may begin at once, because it waits on its own.
  __device__ __forceinline__ void enter() const {
    if (!with_next) let_next_kernel_begin();
  }
  // In place of wait_for_previous_kernel, by all threads. The fence drops what the L1 cache has from before the call.
  __device__ __forceinline__ void wait() const {
    if (with_previous) {
      __threadfence();
    } else {
      wait_for_previous_kernel();
    }
  }
  // Behind `wait`, by all threads: what the next kernel reads has been written.
  __device__ __forceinline__ void let_next() const {
    if (with_next) let_next_kernel_begin();
  }
  __device__ __forceinline__ void begin() const { wait(), let_next(); }
  // At the end, by at least one thread of each block. Block 0 waits, so that this kernel does not end before those
  // ahead of it, for which nobody else waits. Compute capability 9.0 goes without: whoever waits for a kernel there
  // was found to wait for all ahead of it, too, in streams and in graphs, and this code, which has to be fetched,
  // costs steps over small caches 0.2 to 0.8 us.
  __device__ __forceinline__ void leave() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
    if (with_previous && blockIdx.x == 0) wait_for_previous_kernel();
#endif
  }
};

// A number of which the compiler knows nothing else. What follows from it is computed where this is called, and not
// ahead of a loop around it, which may have no registers for it.
__device__ __forceinline__ int computed_here(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// ---- Division of integers -----------------------------------------------------------------------------------------

// x / y, rounded down or up, for arguments that are not negative, because unsigned division is faster.
__device__ __forceinline__ int quotient(int x, int y) {
  return static_cast<int>(static_cast<unsigned>(x) / static_cast<unsigned>(y));
}
__device__ __forceinline__ int ceil_div(int x, int y) { return quotient(x + y - 1, y); }
// The same for the host, in 64 bits.
constexpr int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }
template <typename N>
__host__ __device__ constexpr N round_up(N n, int multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// The same in half of the instructions, for y > 0 and quotients of less than 2^20. Every step rounds down, and the
// approximate reciprocal, which may be one unit of its last place too large, is made two units smaller. So the estimate
// is never too large, and too small by at most 6 / 2^23 of itself, which is less than 1.
__device__ __forceinline__ int small_quotient(int x, int y) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__uint2float_ru(y)));
  inverse = __int_as_float(__float_as_int(inverse) - 2);
  const int estimate = static_cast<int>(__float2uint_rz(__fmul_rz(__uint2float_rz(x), inverse)));
  return estimate + (static_cast<unsigned>(x - estimate * y) >= static_cast<unsigned>(y) ? 1 : 0);
}

// A divisor that the host knows: a quotient is then a product. Exact for x from 0 to 2^31 - 1, because the reciprocal
// is 2^(31 + shift) / d plus less than one, and d <= 2^shift: x times what is too much is less than 2^(31 + shift) / d,
// so it does not carry a quotient x / d to the next integer.
struct Divisor {
  int value = 1, shift = 0;
  uint32_t reciprocal = uint32_t{1} << 31;

  Divisor() = default;
  // Nobody divides by a divisor that is not positive.
  constexpr explicit Divisor(int d) : value(d) {
    while (int64_t{1} << shift < d) ++shift;
    if (d > 0) reciprocal = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + d - 1) / d);
  }
  __host__ __device__ constexpr operator int() const { return value; }
};
__host__ __device__ constexpr int quotient(int x, const Divisor& d) {
  return static_cast<int>((uint64_t{2} * static_cast<uint32_t>(x) * d.reciprocal >> 32) >> d.shift);
}
__host__ __device__ constexpr int operator%(unsigned x, const Divisor& d) {
  return static_cast<int>(x) - quotient(static_cast<int>(x), d) * d.value;
}

// i times a distance, for i >= 0: a sign would take two instructions more.
__device__ __forceinline__ int64_t offset_of(int i, int64_t stride) { return static_cast<unsigned>(i) * stride; }

constexpr uint32_t kInfinityBits = 0x7F800000;  // of float32

// ---- Threads of a block --------------------------------------------------------------------------------------------

// So many threads of the block, whole warps, meet at a named barrier; number 0 is that of __syncthreads.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// The same; whether `mine` is true for any of them.
__device__ __forceinline__ bool sync_any(int barrier, int threads, bool mine) {
  int any;
  asm volatile(
      "{\n.reg .pred mine, any;\nsetp.ne.s32 mine, %1, 0;\nbar.red.or.pred any, %2, %3, mine;\n"
      "selp.s32 %0, 1, 0, any;\n}"
      : "=r"(any)
      : "r"(static_cast<int>(mine)), "r"(barrier), "r"(threads)
      : "memory");
  return any;
}

// f(0), .., f(N - 1) with compile-time constants, so that arrays which they index certainly stay in registers.
template <int N, int I = 0, typename F>
__device__ __forceinline__ void for_each(F&& f) {
  if constexpr (I < N) {
    f(std::integral_constant<int, I>{});
    for_each<N, I + 1>(f);
  }
}

// ---- Lanes of a warp ----------------------------------------------------------------------------------------------

// Transposes an 8 x 8 matrix of 16-bit elements, of which four lanes hold a row, two neighbours each.
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  uint32_t out = x;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 750
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(x));
#endif
  return out;
}

// Sum and maximum over groups of LANES neighbouring lanes of a warp; every lane gets the result, and all 32 take part.
// From sm_80 on one instruction reduces a whole warp.
template <int LANES = 32, typename T>  // int; of fewer lanes than 32 also float
__device__ __forceinline__ T sum_of_lanes(T x) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (LANES == 32) {
    return __reduce_add_sync(0xffffffff, x);
  } else
#endif
  {
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2) x += __shfl_xor_sync(0xffffffff, x, bit);
    return x;
  }
}
template <int LANES = 32, typename T>  // int or uint32_t; of fewer lanes than 32 also float
__device__ __forceinline__ T max_of_lanes(T x) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (LANES == 32) {
    return __reduce_max_sync(0xffffffff, x);
  } else
#endif
  {
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2) x = max(x, __shfl_xor_sync(0xffffffff, x, bit));
    return x;
  }
}

// Words k = 0 to 3 of lane t of four neighbours become word t of lane k.
template <typename T>
__device__ __forceinline__ void transpose_quad(T (&w)[4], int t) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k & bit) continue;
      T& low = w[k];
      T& high = w[k + bit];
      const T other = __shfl_xor_sync(0xffffffff, t & bit ? low : high, bit);
      (t & bit ? low : high) = other;
    }
  }
}

// The sum over the lanes before this one.
__device__ __forceinline__ int sum_of_lanes_before(int x) {
  int sum = x;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    // The instruction itself knows which lanes have another one `d` below them.
    asm volatile(
        "{\n"
        ".reg .pred some;\n"
        ".reg .b32 other;\n"
        "shfl.sync.up.b32 other|some, %0, %1, 0, 0xffffffff;\n"
        "@some add.s32 %0, %0, other;\n"
        "}"
        : "+r"(sum)
        : "r"(d));
  }
  return sum - x;
}

// ---- Dtypes -------------------------------------------------------------------------------------------------------

// Words of elements of type T as float32.
template <typename T, int WORDS>
__device__ __forceinline__ void floats_of_words(const uint32_t (&word)[WORDS], float* y) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      y[i] = __uint_as_float(word[i]);
    } else if constexpr (std::is_same_v<T, __half>) {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(word[i]));
      y[2 * i] = pair.x, y[2 * i + 1] = pair.y;
    } else {
      y[2 * i] = __uint_as_float(word[i] << 16), y[2 * i + 1] = __uint_as_float(word[i] & 0xFFFF0000);
    }
  }
}

// Two floats as a word of elements of a 16-bit type T, rounded to nearest even.
template <typename T>
__device__ __forceinline__ uint32_t word_of_floats(float x, float y) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(x, y);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

// N neighbouring elements as float32, N even. They move 16 bytes at a time, or all at once where they are fewer; memory
// is aligned to that. Rounding is to nearest even. The same kernel must not write the elements that it loads here. (The
// compiler splits some plain 16-byte accesses; the intrinsics keep them whole.)
constexpr int word_bytes(int n, int element_size) { return n * element_size < 16 ? n * element_size : 16; }

template <int N, typename T>
__device__ __forceinline__ void load_floats(const T* from, float* y) {
  constexpr int kWords = N * sizeof(T) / 4;
  uint32_t word[kWords];
  if constexpr (kWords == 1) {
    word[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
  } else if constexpr (kWords == 2) {
    const uint2 w = __ldg(reinterpret_cast<const uint2*>(from));
    word[0] = w.x, word[1] = w.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 w = __ldg(reinterpret_cast<const uint4*>(from) + i / 4);
      word[i] = w.x, word[i + 1] = w.y, word[i + 2] = w.z, word[i + 3] = w.w;
    }
  }
  floats_of_words<T>(word, y);
}

template <int N, typename T>
__device__ __forceinline__ void store_floats(const float* y, T* to) {
  constexpr int kWords = N * sizeof(T) / 4;
  uint32_t word[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      word[i] = __float_as_uint(y[i]);
    } else {
      word[i] = word_of_floats<T>(y[2 * i], y[2 * i + 1]);
    }
  }
  if constexpr (kWords == 1) {
    __stwb(reinterpret_cast<uint32_t*>(to), word[0]);
  } else if constexpr (kWords == 2) {
    __stwb(reinterpret_cast<uint2*>(to), make_uint2(word[0], word[1]));
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      __stwb(reinterpret_cast<uint4*>(to) + i / 4, make_uint4(word[i], word[i + 1], word[i + 2], word[i + 3]));
    }
  }
}

// The same for a dtype known at run time, `at` elements from the start. Only loads and stores depend on the dtype: that
// is not worth another copy of every kernel.
template <typename Fn>
__device__ __forceinline__ void with_float_type(Dtype dtype, Fn&& fn) {
  if (dtype == Dtype::kBFloat16) {
    fn(Tag<__nv_bfloat16>{});
  } else if (dtype == Dtype::kFloat16) {
    fn(Tag<__half>{});
  } else {
    fn(Tag<float>{});
  }
}

// The same for one of the 16-bit types. (Kernels of row tiles are compiled for one of them, but ask at run time, too:
// so those of both have the same instructions, and compressed together they take little more room than one.)
template <typename Fn>
__device__ __forceinline__ void with_16_bit_type(Dtype dtype, Fn&& fn) {
  if (dtype == Dtype::kFloat16) {
    fn(Tag<__half>{});
  } else {
    fn(Tag<__nv_bfloat16>{});
  }
}

template <int N>
__device__ __forceinline__ void load_floats_as(const void* x, Dtype dtype, int64_t at, float* y) {
  with_float_type(dtype,
                  [&](auto tag) { load_floats<N>(static_cast<const typename decltype(tag)::type*>(x) + at, y); });
}
template <int N>
__device__ __forceinline__ void store_floats_as(const float* y, void* x, Dtype dtype, int64_t at) {
  with_float_type(dtype, [&](auto tag) { store_floats<N>(y, static_cast<typename decltype(tag)::type*>(x) + at); });
}

// A single element.
__device__ __forceinline__ float load_float(const void* x, Dtype dtype, int64_t at) {
  if (dtype == Dtype::kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(x)[at]);
  if (dtype == Dtype::kFloat16) return __half2float(static_cast<const __half*>(x)[at]);
  return static_cast<const float*>(x)[at];
}
__device__ __forceinline__ void store_float(void* x, Dtype dtype, int64_t at, float y) {
  if (dtype == Dtype::kBFloat16) {
    static_cast<__nv_bfloat16*>(x)[at] = __float2bfloat16_rn(y);
  } else if (dtype == Dtype::kFloat16) {
    static_cast<__half*>(x)[at] = __float2half_rn(y);
  } else {
    static_cast<float*>(x)[at] = y;
  }
}

// ---- Rows of a strided tensor -------------------------------------------------------------------------------------

// Offset in elements of row i of the flattened leading dimensions; passed to kernels by value.
struct Rows {
  static constexpr int kMaxDims = 6;
  int64_t size[kMaxDims];  // outermost first; size[0] is not needed to find a row
  int64_t stride[kMaxDims];
  int dims;
  int64_t count;

  __device__ __forceinline__ int64_t operator()(int64_t i) const {
    int64_t offset = 0;
#pragma unroll 1
    for (int k = dims - 1; k > 0; --k) {
      // Divisions of 64 bits are slow, and rarely needed.
      const int64_t next = i <= UINT32_MAX && size[k] <= UINT32_MAX
                               ? static_cast<uint32_t>(i) / static_cast<uint32_t>(size[k])
                               : i / size[k];
      offset += (i - next * size[k]) * stride[k];
      i = next;
    }
    return offset + i * stride[0];
  }
};

}  // namespace turboquant::cuda
