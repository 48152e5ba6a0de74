// What kernels share that attend to exact keys with a whole block (attention/key_tiles, mla): elements of either 16-bit
// type, and the order in which the warps of a block meet.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/device.cuh"
#include "cuda/common/mma.cuh"

namespace turboquant::cuda {

// Elements of the tensors' type. Only these functions ask which one it is, so that all other code exists once.
struct ExactElements {
  Dtype dtype;

  __device__ __forceinline__ bool wide() const { return dtype == Dtype::kBFloat16; }
  __device__ __forceinline__ void multiply(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) const {
    if (wide()) {
      mma_floats<__nv_bfloat16>(d, a, b0, b1);
    } else {
      mma_floats<__half>(d, a, b0, b1);
    }
  }
  __device__ __forceinline__ uint16_t element(float x) const {
    return static_cast<uint16_t>(wide() ? word_of_floats<__nv_bfloat16>(x, 0) : word_of_floats<__half>(x, 0));
  }
  __device__ __forceinline__ float number(uint16_t element) const {
    return wide() ? __uint_as_float(uint32_t{element} << 16) : __half2float(__ushort_as_half(element));
  }
  // The bits that an infinite element or a NaN has all set, and others have not.
  __device__ __forceinline__ uint32_t exponent() const { return wide() ? 0x7F80 : 0x7C00; }
};

// Sets `spoiled` if one of eight elements is infinite or NaN. exponent: of ExactElements.
__device__ __forceinline__ void look_for_spoiled(uint4 x, uint32_t exponent, bool& spoiled) {
  const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    spoiled |= (word[k] & exponent) == exponent || (word[k] >> 16 & exponent) == exponent;
  }
}

// The address that lane `k` of the warp knows.
template <typename T>
__device__ __forceinline__ const T* told(const T* address, int k) {
  return reinterpret_cast<const T*>(__shfl_sync(0xffffffff, reinterpret_cast<unsigned long long>(address), k));
}

// Attends to keys that are being copied, by all warps of the block. Weight 0 times an infinite channel or a NaN is NaN:
// where a value has such a channel, each row adds only the keys that it sees.
template <class Keys>
__device__ __forceinline__ void attend_to_copied(Keys& keys) {
  wait_for_copies();
  const bool spoiled = __syncthreads_or(keys.spoiled_values());
  keys.multiply_keys();
  __syncthreads();
  keys.weigh();
  __syncthreads();
  keys.rescale();
  if (spoiled) {
    keys.sum_seen();
  } else {
    keys.multiply_values();
  }
  __syncthreads();
}

}  // namespace turboquant::cuda
