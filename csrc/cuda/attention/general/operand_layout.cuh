// Where the float16 elements of queries, keys and values are in shared memory: in the order in which tensor cores take
// them.
//
// Without warpgroups (common/mma.cuh) a lane reads 16 bytes at once that hold its part of a fragment. A lane's words
// of a pair of products over channels are 8 neighbouring channels of one key; the products number their channels to
// suit that. Warpgroups (common/wgmma.cuh) read blocks of 128 bytes, 8 rows of 8 neighbouring elements.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/attention/general/shape.cuh"

namespace turboquant::cuda::general {

template <typename S>
struct OperandLayout {
  // Octet o of query row r: `word` has its four pairs of channels.
  static __device__ __forceinline__ void store_query(uint4* queries, int r, int o, const uint4& word) {
    if constexpr (S::kHopper) {
      queries[(r / 64 * S::kChannelOctets + o) * 64 + r % 64] = word;
    } else {
      // Word ((strip * slices + slice) * 2 + i) * 32 + lane holds, of rows g and g + 8, channels 8 t + 4 i and the
      // next one of the slice's 32, then the same of the two channels after these.
      uint32_t* to = reinterpret_cast<uint32_t*>(queries + (r / 16 * S::kKeySlices + o / 4) * 64 + r % 8 * 4 + o % 4);
      to += r % 16 / 8;
      to[0] = word.x, to[2] = word.y, to[128] = word.z, to[130] = word.w;
    }
  }

  // The word of octet o of a key.
  static __device__ __forceinline__ int key_word(int key, int o) {
    if (S::kHopper) return o * S::kKeys + key;
    return (o / 4 * S::kKeyOctets + key / 8) * 32 + key % 8 * 4 + o % 4;
  }

  // The words of a slice of 16 channels of a value block. The slices of a block follow each other.
  static constexpr int kSliceWords = S::kHopper ? 16 : 32;
  static __device__ __forceinline__ int value_slice(int block, int slice) {
    return S::kHopper ? (block * S::kChannelOctets + slice) * 16 : (block * S::kValueSlices + slice) * 32;
  }
  // A lane's part of a slice: `word` as value_levels makes it.
  static __device__ __forceinline__ void store_values(uint4* slice, int lane, const uint4& word) {
    if constexpr (S::kHopper) {
      uint32_t* to = reinterpret_cast<uint32_t*>(slice) + lane;
      to[0] = word.x, to[S::kChannelOctets * 32] = word.y, to[32] = word.z, to[S::kChannelOctets * 32 + 32] = word.w;
    } else {
      slice[lane] = word;
    }
  }
  // Octet o of one value.
  static __device__ __forceinline__ void store_value(uint4* values, int key, int o, const float (&y)[8]) {
    uint4* block = S::kHopper ? values + (key / 8 * S::kChannelOctets + o) * 8
                              : values + (key / 16 * S::kValueSlices + o / 2) * 32 + key % 8 / 2;
    const int half = S::kHopper ? key % 8 : 4 * (o % 2) + 2 * (key % 16 / 8) + key % 2;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      reinterpret_cast<__half*>(block + (S::kHopper ? c : 4 * c))[half] = __float2half_rn(y[c]);
    }
  }
};

}  // namespace turboquant::cuda::general
