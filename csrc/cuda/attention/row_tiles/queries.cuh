// Rows of queries, and signs, as a warp that multiplies reads them.
//
// Four threads share a row. Thread t needs channels 2 t and 2 t + 1 of each octet (8 channels), but it loads whole
// octets, 16 bytes: those of every four neighbouring octets that have its number. The threads then exchange words.
#pragma once

#include "cuda/attention/row_tiles/expansion.cuh"
#include "cuda/attention/row_tiles/shape.cuh"

namespace turboquant::cuda::row_tiles {

// Octets t, t + 4, .. of a row of a 16-bit type; zeros where it has none, and of no row (null).
template <int D>
struct Octets {
  uint4 of[D / 32];

  __device__ __forceinline__ Octets(const void* row, int t, int head_dim) {
#pragma unroll
    for (int m = 0; m < D / 32; ++m) {
      const int first = 8 * (4 * m + t);
      const auto* const from = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(row) + 2 * first);
      of[m] = row && first < head_dim ? *from : uint4{};
    }
  }

  // Their part of the product with a vector of floats.
  template <typename T>
  __device__ __forceinline__ float times(const float* vector, int t, int head_dim) const {
    float sum = 0;
#pragma unroll
    for (int m = 0; m < D / 32; ++m) {
      float x[8], y[8];
      floats_of_words<T>({of[m].x, of[m].y, of[m].z, of[m].w}, x);
      load_floats<8>(vector + min(8 * (4 * m + t), head_dim - 8), y);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = fmaf(x[i], y[i], sum);
    }
    return sum;
  }

  // word[j]: channels 2 t and 2 t + 1 of octet j.
  __device__ __forceinline__ void channels(int t, uint32_t (&word)[D / 8]) const {
#pragma unroll
    for (int m = 0; m < D / 32; ++m) exchange(of[m].x, of[m].y, of[m].z, of[m].w, t, word + 4 * m);
  }
  // word[j]: the channels at places 8 j + 2 t and 8 j + 2 t + 1 of a tile of keys (channel_at).
  __device__ __forceinline__ void places(bool pairs, int t, uint32_t (&word)[D / 8]) const {
    constexpr uint32_t kLow = 0x5410, kHigh = 0x7632;  // both low halves, both high halves
#pragma unroll
    for (int m = 0; m < D / 32; ++m) {
      const uint4& x = of[m];
      uint32_t* const to = word + 4 * m;
      if (pairs) {
        exchange(x.x, x.y, x.z, x.w, t, to);
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
          const uint32_t low = __byte_perm(to[k], to[k + 1], kLow), high = __byte_perm(to[k], to[k + 1], kHigh);
          to[k] = low, to[k + 1] = high;
        }
      } else {
        exchange(__byte_perm(x.x, x.z, kLow), __byte_perm(x.x, x.z, kHigh), __byte_perm(x.y, x.w, kLow),
                 __byte_perm(x.y, x.w, kHigh), t, to);
      }
    }
  }

 private:
  // Words 0 to 3 of this thread for those with its number of the four threads.
  static __device__ __forceinline__ void exchange(uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3, int t,
                                                  uint32_t* to) {
    uint32_t w[4] = {w0, w1, w2, w3};
    transpose_quad(w, t);
#pragma unroll
    for (int k = 0; k < 4; ++k) to[k] = w[k];
  }
};

// Signs in shared memory, as bits that change the sign of a 16-bit element: of keys by places of a tile, [channels],
// and of values.
template <class S>
__device__ __forceinline__ void copy_signs(const Attention& a, const Plan& plan, uint8_t* shared) {
  uint16_t* const to = reinterpret_cast<uint16_t*>(shared + plan.signs);
  const int last = a.record.head_dim - 1;
  const auto bits = [](float sign) { return static_cast<uint16_t>(sign < 0 ? 0x8000 : 0); };
#pragma unroll 1
  for (int p = static_cast<int>(threadIdx.x); p < S::kDim; p += static_cast<int>(blockDim.x)) {
    to[p] = bits(a.key_signs[min(channel_at(plan.key_kind == ExpansionKind::kPairs, p / 8, p % 8 / 2, p % 2), last)]);
    to[S::kDim + p] = bits(a.value_signs[min(p, last)]);
  }
}
// Those of a thread's two channels of octet j.
__device__ __forceinline__ uint32_t signs_of(const uint16_t* signs, int j, int t) {
  return reinterpret_cast<const uint32_t*>(signs)[4 * j + t];
}
__device__ __forceinline__ float change_sign(float x, uint32_t bit) {
  return __uint_as_float(__float_as_uint(x) ^ bit);
}

}  // namespace turboquant::cuda::row_tiles
