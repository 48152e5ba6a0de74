// The rotation of rows (docs/format.md section 2) of D channels, a multiple of 64 to which a head_dim is padded.
//
// A warp rotates 16 rows at once, which lie in its registers as tensor cores leave them: element 4 j + 2 i + h of
// thread (g, t) is channel 8 j + 2 t + h of row g + 8 i. The butterflies of 16 neighbouring channels, in which the four
// threads of a row take part, are a product with the Hadamard matrix of 16, which tensor cores compute; those between
// channels further apart stay in a thread. So threads exchange nothing, and queries, which are operands as they are,
// need few instructions, which counts here: to fetch one takes longer than to run it.
//
// Padding lies behind the last block of n channels, so butterflies may include it: they never leave a block. How many
// stages there are and which m x m factor follows is known at run time, so that one kernel serves all head_dims of its
// D. Channels of 16 may stand in any order in which the bits of their numbers have changed places (channel_at): the
// matrix is the same.
#pragma once

#include "cuda/codec/transform.cuh"
#include "cuda/common/mma.cuh"

namespace turboquant::cuda::row_tiles {

template <int D>
class Rotation {
 public:
  // norm: 1 / sqrt(n)
  __device__ __forceinline__ Rotation(format::Split split, float norm, int lane)
      : split_(split), norm_(norm), lane_(lane) {}

  // The butterflies of 16 channels of words x[i][j], two elements of T: exactly.
  template <typename T>
  __device__ __forceinline__ void begin_words(const uint32_t (&x)[2][D / 8], float (&y)[D / 2]) const {
    const uint32_t matrix = matrix_word<T>();
#pragma unroll
    for (int b = 0; b < D / 16; ++b) {
      Sixteen to{};
      to.template add<T>({x[0][2 * b], x[1][2 * b], x[0][2 * b + 1], x[1][2 * b + 1]}, matrix);
      to.store(y + 8 * b);
    }
  }

  // The same in place, of elements rounded to 16 significant bits.
  __device__ __forceinline__ void begin_floats(float (&y)[D / 2]) const {
    const uint32_t matrix = matrix_word<__nv_bfloat16>();
#pragma unroll
    for (int b = 0; b < D / 16; ++b) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float* const x = y + 8 * b + 2 * k;
        high[k] = word_of_floats<__nv_bfloat16>(x[0], x[1]);
        float rounded[2];
        floats_of_words<__nv_bfloat16>({high[k]}, rounded);
        low[k] = word_of_floats<__nv_bfloat16>(x[0] - rounded[0], x[1] - rounded[1]);
      }
      Sixteen to{};
      to.template add<__nv_bfloat16>({high[0], high[1], high[2], high[3]}, matrix);
      to.template add<__nv_bfloat16>({low[0], low[1], low[2], low[3]}, matrix);
      to.store(y + 8 * b);
    }
  }

  // What is left: butterflies of channels 16 and more apart, the norm, and the m x m factor.
  __device__ __forceinline__ void finish(float (&y)[D / 2]) const {
    stages<16>(y);
#pragma unroll
    for (int i = 0; i < D / 2; ++i) y[i] *= norm_;
    mix<3>(y), mix<5>(y), mix<7>(y), mix<9>(y);
  }

 private:
  // Of 16 channels: the thread's part of a product, of each eight channels.
  struct Sixteen {
    float first[4], second[4];

    // The matrix has the same four quarters but for the sign of the last one.
    template <typename T>
    __device__ __forceinline__ void add(const uint4& x, uint32_t matrix) {
      mma_floats<T>(first, x, matrix, matrix);
      mma_floats<T>(second, x, matrix, matrix ^ 0x80008000);
    }
    __device__ __forceinline__ void store(float* y) const {
#pragma unroll
      for (int k = 0; k < 4; ++k) y[k] = first[k], y[4 + k] = second[k];
    }
  };

  // Rows 2 t and 2 t + 1 of column g of the Hadamard matrix of 8.
  template <typename T>
  __device__ __forceinline__ uint32_t matrix_word() const {
    const int g = lane_ / 4, row = 2 * (lane_ % 4);
    const auto sign = [&](int k) { return __popc(k & g) % 2 == 0 ? 1.0f : -1.0f; };
    return word_of_floats<T>(sign(row), sign(row + 1));
  }

  // Channels H apart, where blocks are larger than that.
  template <int H>
  __device__ __forceinline__ void stages(float (&y)[D / 2]) const {
    if constexpr (2 * H <= D) {
      if (split_.block <= H) return;
      lane_butterflies<H / 2, H>(y);
      stages<2 * H>(y);
    }
  }
  // The factor of M, if it is the head_dim's.
  template <int M>
  __device__ __forceinline__ void mix(float (&y)[D / 2]) const {
    constexpr int kEach = block_elements(M);
    if constexpr (kEach > 0) {
      if (split_.blocks == M) mix_blocks<M, kEach, true>(y);
    }
  }
  // A thread's elements of a block, if a head_dim of m blocks is padded to D channels; 0: none is.
  static constexpr int block_elements(int m) {
    for (const int block : {16, 32, 64}) {
      if (m * block <= D && m * block > D - 64) return block / 2;
    }
    return 0;
  }

  const format::Split split_;
  const float norm_;
  const int lane_;
};

}  // namespace turboquant::cuda::row_tiles
