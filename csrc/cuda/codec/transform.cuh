// The signed orthonormal Walsh-Hadamard transform of one vector, spread over the registers of a few lanes of a warp
// (docs/format.md section 2). All CUDA kernels that rotate vectors in registers call these functions.
//
// Channel bits of one block, low to high: [kVec channels in a lane][lanes][chunks in a lane]. So a lane reads 16 bytes
// of a 16-bit dtype at a time, neighbouring lanes read neighbouring words, and the butterflies still run in their fixed
// order 1, 2, 4, ..: in a lane, by shuffles, in a lane. The m blocks of d = m * n are in the same lane, so that the
// m x m factor needs registers only. Intrinsics keep the compiler from fusing additions with multiplications.
#pragma once

#include <cstdint>

#include "cuda/common/device.cuh"
#include "format.h"

namespace turboquant::cuda {

// M * 2^LOG_N channels over LANES lanes of one warp, VEC neighbours at a time where a block has as many. More lanes
// cost shuffles, fewer cost registers.
template <int M, int LOG_N, int LANES, int VEC = 8>
struct HadamardTraits {
  static constexpr int kBlocks = M;
  static constexpr int kLogBlock = LOG_N;
  static constexpr int kBlock = 1 << LOG_N;
  static constexpr int kDim = M * kBlock;
  static constexpr int kLanes = LANES;
  static constexpr int kVec = kBlock < VEC ? kBlock : VEC;
  static constexpr int kChunks = kBlock / (kVec * kLanes);
  static constexpr int kPerLane = kDim / kLanes;
  static_assert(kChunks * kVec * kLanes == kBlock && kLanes <= 32);

  // First channel of the `kVec` neighbours that are elements [index * kVec, ..) of a lane; index = block * kChunks +
  // chunk.
  static __host__ __device__ constexpr int channel(int lane, int index) {
    return index / kChunks * kBlock + (index % kChunks * kLanes + lane) * kVec;
  }
};

// Loads and stores a lane's part of a vector. Memory is aligned to the words of load_floats.
template <typename Traits, typename T>
__device__ __forceinline__ void load(const T* vector, int lane, float (&y)[Traits::kPerLane]) {
#pragma unroll
  for (int k = 0; k < Traits::kPerLane / Traits::kVec; ++k) {
    load_floats<Traits::kVec>(vector + Traits::channel(lane, k), y + k * Traits::kVec);
  }
}

template <typename Traits, typename T>
__device__ __forceinline__ void store(const float (&y)[Traits::kPerLane], int lane, T* vector) {
#pragma unroll
  for (int k = 0; k < Traits::kPerLane / Traits::kVec; ++k) {
    store_floats<Traits::kVec>(y + k * Traits::kVec, vector + Traits::channel(lane, k));
  }
}

// The same for a dtype known at run time, `at` elements from the start.
template <typename Traits>
__device__ __forceinline__ void load_as(const void* x, Dtype dtype, int64_t at, int lane,
                                        float (&y)[Traits::kPerLane]) {
  with_float_type(dtype,
                  [&](auto tag) { load<Traits>(static_cast<const typename decltype(tag)::type*>(x) + at, lane, y); });
}

template <typename Traits>
__device__ __forceinline__ void store_as(const float (&y)[Traits::kPerLane], int lane, void* x, Dtype dtype,
                                         int64_t at) {
  with_float_type(dtype, [&](auto tag) { store<Traits>(y, lane, static_cast<typename decltype(tag)::type*>(x) + at); });
}

// Lanes for d = m * 2^log_n: at least four where rows are long enough, so that a group reads 64 bytes at a time, and
// about 48 channels in a lane at most.
constexpr int hadamard_lanes(int m, int log_n) {
  const int n = 1 << log_n, most = n >= 256 ? 32 : n >= 8 ? n / 8 : 1;
  int lanes = 4;
  while (m * n / lanes > 48) lanes *= 2;
  return lanes < most ? lanes : most;
}

template <int M, int LOG_N>
using DefaultHadamard = HadamardTraits<M, LOG_N, hadamard_lanes(M, LOG_N)>;

// Calls fn(DefaultHadamard<m, log2(n)>) for every d = m * n that the format knows.
template <int M, int LOG_N, typename Fn>
void dispatch_block(format::Split split, Fn&& fn) {
  if constexpr (M << LOG_N <= format::kMaxVectorDim) {
    if (split.block == 1 << LOG_N) return fn(DefaultHadamard<M, LOG_N>{});
    dispatch_block<M, LOG_N + 1>(split, fn);
  }
}

template <typename Fn>
void dispatch_dim(format::Split split, Fn&& fn) {
  switch (split.blocks) {
    case 1: return dispatch_block<1, 1>(split, fn);
    case 3: return dispatch_block<3, 1>(split, fn);
    case 5: return dispatch_block<5, 1>(split, fn);
    case 7: return dispatch_block<7, 1>(split, fn);
    default: return dispatch_block<9, 1>(split, fn);
  }
}

// float32(1 / sqrt(2^log_n)), the factor that makes the butterflies of a block orthonormal.
constexpr float block_norm(int log_n) {
  double norm = log_n % 2 ? 0.70710678118654752440 : 1.0;
  for (int i = 0; i < log_n / 2; ++i) norm /= 2;
  return static_cast<float>(norm);
}
constexpr float block_norm(format::Split split) { return block_norm(split.log_block()); }

// Butterflies between channels of a lane, for distances FROM, 2 FROM, .. below TO.
template <int FROM, int TO, int N>
__device__ __forceinline__ void lane_butterflies(float (&y)[N]) {
#pragma unroll
  for (int h = FROM; h < TO; h *= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if ((i & h) == 0) {
        const float p = y[i], q = y[i + h];
        y[i] = __fadd_rn(p, q);
        y[i + h] = __fsub_rn(p, q);
      }
    }
  }
}

// The butterflies of every block. y: the part of lane `lane` of the kLanes lanes that share a vector. All 32 lanes of
// the warp take part.
template <typename Traits>
__device__ __forceinline__ void butterflies(float (&y)[Traits::kPerLane], int lane) {
  lane_butterflies<1, Traits::kVec>(y);
#pragma unroll
  for (int bit = 1; bit < Traits::kLanes; bit *= 2) {
    // A lane adds its partner's value to its own, or subtracts its own from it: the two results of the butterfly, bit
    // for bit, since a product with 1 or -1 is exact.
    const float side = lane & bit ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < Traits::kPerLane; ++i) {
      y[i] = __fmaf_rn(side, y[i], __shfl_xor_sync(0xffffffff, y[i], bit));
    }
  }
  lane_butterflies<Traits::kVec, Traits::kVec * Traits::kChunks>(y);
}

// The orthonormal m x m factor: entry k of the result. FUSED: in half of the instructions, where no bytes depend on its
// roundings.
template <int M, bool FUSED = false>
__device__ __forceinline__ float hartley_entry(const float (&in)[M], int k) {
  float sum = __fmul_rn(format::hartley(M, 0), in[0]);
#pragma unroll
  for (int j = 1; j < M; ++j) {
    const float factor = format::hartley(M, k * j % M);
    sum = FUSED ? __fmaf_rn(factor, in[j], sum) : __fadd_rn(sum, __fmul_rn(factor, in[j]));
  }
  return sum;
}

// The same across M blocks, of which a lane holds EACH elements, one block after the other.
template <int M, int EACH, bool FUSED = false, int N>
__device__ __forceinline__ void mix_blocks(float (&y)[N]) {
  static_assert(M * EACH <= N);
  if constexpr (M > 1) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      float in[M];
#pragma unroll
      for (int j = 0; j < M; ++j) in[j] = y[j * EACH + i];
#pragma unroll
      for (int b = 0; b < M; ++b) y[b * EACH + i] = hartley_entry<M, FUSED>(in, b);
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void mix_blocks(float (&y)[Traits::kPerLane]) {
  mix_blocks<Traits::kBlocks, Traits::kVec * Traits::kChunks>(y);
}

// core(y), in place.
template <typename Traits>
__device__ __forceinline__ void transform(float (&y)[Traits::kPerLane], int lane) {
  constexpr float norm = block_norm(Traits::kLogBlock);
  butterflies<Traits>(y, lane);
#pragma unroll
  for (int i = 0; i < Traits::kPerLane; ++i) y[i] = __fmul_rn(y[i], norm);
  mix_blocks<Traits>(y);
}

// Multiplication by the signs, float32 [d], 16-byte aligned: the other half of the rotation.
template <typename Traits>
__device__ __forceinline__ void apply_signs(float (&y)[Traits::kPerLane], const float* signs, int lane) {
  float s[Traits::kPerLane];
  load<Traits>(signs, lane, s);
#pragma unroll
  for (int i = 0; i < Traits::kPerLane; ++i) y[i] = __fmul_rn(y[i], s[i]);
}

// The sum of N floats over neighbouring pairs, in place.
template <int N>
__device__ __forceinline__ float pair_sum(float (&v)[N]) {
#pragma unroll
  for (int n = N / 2; n > 0; n /= 2) {
#pragma unroll
    for (int i = 0; i < n; ++i) v[i] = __fadd_rn(v[2 * i], v[2 * i + 1]);
  }
  return v[0];
}

// Sum of p[d] over neighbouring pairs, then over blocks in order (docs/format.md section 5), known to all lanes of the
// group.
template <typename Traits>
__device__ __forceinline__ float tree_sum(const float (&p)[Traits::kPerLane]) {
  constexpr int vec = Traits::kVec, chunks = Traits::kChunks;
  float total = 0;
#pragma unroll
  for (int b = 0; b < Traits::kBlocks; ++b) {
    float t[chunks];
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      float v[vec];
#pragma unroll
      for (int i = 0; i < vec; ++i) v[i] = p[(b * chunks + c) * vec + i];
      t[c] = pair_sum(v);
#pragma unroll
      for (int bit = 1; bit < Traits::kLanes; bit *= 2) {
        t[c] = __fadd_rn(t[c], __shfl_xor_sync(0xffffffff, t[c], bit));
      }
    }
    const float sum = pair_sum(t);
    total = b ? __fadd_rn(total, sum) : sum;
  }
  return total;
}

}  // namespace turboquant::cuda
