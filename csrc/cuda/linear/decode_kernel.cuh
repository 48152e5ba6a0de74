// weight_decode: a warp decodes two chunks of 64 channels by 16 rows, which are one block of a group of 128 or two of
// 64. Lanes load codes as they lie in memory, exchange them through shared memory, and have 64 neighbouring channels of
// one row then: all butterflies but the last one of a group of 128 stay in a lane. Results go through shared memory,
// too, and leave as whole lines of 128 bytes.
//
// The order of float operations is that of docs/format.md sections 2 and 13.
#pragma once

#include "cuda/codec/transform.cuh"
#include "cuda/common/device.cuh"
#include "cuda/linear/levels.cuh"
#include "cuda/linear/products.cuh"
#include "format.h"

namespace turboquant::cuda::linear {

struct WeightDecoder {
  const uint8_t* packed;
  const int8_t* levels;          // [16], null for the uniform grid and for codes that are levels
  const float* signs;            // [group]
  const float* channel_inverse;  // [k], or null
  void* out;                     // [n, k]
  Dtype dtype;                   // of the output
  int64_t n;
  uint32_t units;     // of the weight: what the format calls its blocks
  int groups, group;  // of a row; channels of each
  bool sub;           // has multipliers
  // Sizes and places of a unit, computed on the host, because the divisions in them are slow on a device.
  int unit_bytes, scales_at, multipliers_at;
  bool early;  // the previous kernel of the stream does not write `packed`
};

class WarpDecoder {
 public:
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;  // of a thread block
  static constexpr int kChannels = 64;                      // of a chunk
  static constexpr int kLaneBytes = 144;                    // 128 bytes of results, and 16 against bank conflicts

  // Thread blocks that have work.
  static int64_t blocks(const WeightDecoder& w) {
    const int64_t chunks = int64_t{w.units} * (w.group / kChannels);
    return (chunks + 2 * kWarps - 1) / (2 * kWarps);
  }

  struct Shared {
    alignas(16) float factors[2 * kChannels];  // signs times the factor of the transform
    alignas(16) uint8_t rows[kWarps][32 * kLaneBytes];
  };

  __device__ __forceinline__ WarpDecoder(const WeightDecoder& w, Shared& shared)
      : w_(w), factors_(shared.factors), memory_(shared.rows[threadIdx.x / 32]), lane_(threadIdx.x % 32) {
    halves_ = w.group / kChannels;
  }

  // All pairs of chunks of the warp: `first` and every `stride` from there on. The codes of the next one are on their
  // way while a pair is decoded. meanwhile: runs once, with the codes of the first one on their way
  template <bool BYTES, typename F>
  __device__ __forceinline__ void run(int64_t first, int64_t stride, const F& meanwhile) {
    const int64_t pairs = halves_ == 2 ? w_.units : (int64_t{w_.units} + 1) / 2;
    Loaded<BYTES> next{};
    if (first < pairs) next = load<BYTES>(2 * first);
    meanwhile();
#pragma unroll 1
    for (int64_t pair = first; pair < pairs; pair += stride) {
      const Loaded<BYTES> loaded = next;
      if (pair + stride < pairs) next = load<BYTES>(2 * (pair + stride));
      float v[kChannels];
      expand<BYTES>(loaded, v);
      decode(2 * pair, v);
    }
  }

 private:
  // What a lane loads of two chunks: codes as they lie in memory, scale and multipliers of its own row.
  template <bool BYTES>
  struct Loaded {
    uint4 word[2][BYTES ? 2 : 1];
    uint32_t scale, multipliers;
  };
  // 64 channels of a block.
  struct Chunk {
    uint32_t unit;
    int half;  // of a group of 128
    bool exists;
  };
  __device__ __forceinline__ Chunk chunk(int64_t number) const {
    const auto unit = static_cast<uint32_t>(halves_ == 2 ? number / 2 : number);
    return {unit, halves_ == 2 ? static_cast<int>(number % 2) : 0, unit < w_.units};
  }

  // first: of the warp's chunks, even
  template <bool BYTES>
  __device__ __forceinline__ Loaded<BYTES> load(int64_t first) const {
    Loaded<BYTES> x{};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Chunk c = chunk(first + i);
      const uint8_t* const from = w_.packed + int64_t{c.unit} * w_.unit_bytes + c.half * (BYTES ? 1024 : 512);
#pragma unroll
      for (int j = 0; j < (BYTES ? 2 : 1); ++j) {
        if (c.exists) x.word[i][j] = __ldg(reinterpret_cast<const uint4*>(from + 512 * j) + lane_);
      }
    }
    const Chunk own = chunk(first + lane_ % 2);
    if (!own.exists) return x;
    const int order = lane_ / 2;  // 2 g + l, in which scales and multipliers stand
    const uint8_t* const unit = w_.packed + int64_t{own.unit} * w_.unit_bytes;
    x.scale = __ldg(reinterpret_cast<const uint16_t*>(unit + w_.scales_at) + order);
    if (w_.sub) x.multipliers = __ldg(unit + w_.multipliers_at + halves_ * order + own.half);
    return x;
  }

  // Memory has 16 bytes for lane 4 g + t: of rows g and g + 8, and channels 4 t .. 4 t + 3 of every 16. This kernel's
  // lane 4 g + 2 l + c takes row g + 8 l of chunk c.
  template <bool BYTES>
  __device__ __forceinline__ void expand(const Loaded<BYTES>& x, float (&v)[kChannels]) const {
    // [lane][t][step][right] of 8 bits; of 4 bits [lane][t][step], where the upper half of a word is the right one
    constexpr int kEach = BYTES ? 4 : 2, kStride = 4 * kEach + 1;
    auto* const words = reinterpret_cast<uint32_t*>(memory_);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      uint32_t* const to = words + (lane_ / 4 * 4 + c) * kStride + lane_ % 4 * kEach;
#pragma unroll
      for (int i = 0; i < kEach / 2; ++i) {
        // At 8 bits 16 bytes are a step: left, left of row g + 8, right, right of row g + 8; at 4 bits two steps.
        const uint4 w = x.word[c][i];
        to[2 * i] = w.x, to[2 * i + 2 * kStride] = w.y, to[2 * i + 1] = w.z, to[2 * i + 1 + 2 * kStride] = w.w;
      }
    }
    __syncwarp();
    const uint32_t* const word = words + lane_ * kStride;
    const float whole = __fmul_rn(__half2float(__ushort_as_half(static_cast<uint16_t>(x.scale))), format::kLevelUnit);
    const LevelBytes levels(BYTES ? nullptr : w_.levels);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const auto by = static_cast<float>(format::multiplier(static_cast<int>(x.multipliers >> 4 * step & 15)));
      const float unit = w_.sub ? __fmul_rn(whole, __fmul_rn(by, format::kMultiplierUnit)) : whole;
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        float* const to = v + 32 * step + 4 * t;
        if constexpr (BYTES) {
          put(LevelBytes::of_bytes(word[4 * t + 2 * step]), unit, to);
          put(LevelBytes::of_bytes(word[4 * t + 2 * step + 1]), unit, to + 16);
        } else {
          const uint2 u = levels.of_nibbles(word[2 * t + step]);
          put(u.x, unit, to), put(u.y, unit, to + 16);
        }
      }
    }
    __syncwarp();  // before results take the memory
  }
  // levels: of four channels, plus 128. Such a byte below the upper bytes of 2^23 is the float 2^23 + 128 + level.
  static __device__ __forceinline__ void put(uint32_t levels, float unit, float* to) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = __uint_as_float(select_bytes(levels, 0x4B000000, 0x7440 | i));
      to[i] = __fmul_rn(unit, __fadd_rn(x, -8388736.0f));
    }
  }

  __device__ __forceinline__ void decode(int64_t first, float (&v)[kChannels]) const {
    lane_butterflies<1, kChannels>(v);
    if (halves_ == 2) {
      const float side = lane_ % 2 ? -1.0f : 1.0f;
#pragma unroll
      for (int i = 0; i < kChannels; ++i) v[i] = __fmaf_rn(side, v[i], __shfl_xor_sync(0xffffffff, v[i], 1));
    }
    const Chunk own = chunk(first + lane_ % 2);
    multiply_by<false>(factors_ + own.half * kChannels, v);
    if (w_.channel_inverse && own.exists) {
      multiply_by<true>(w_.channel_inverse + own.unit % w_.groups * w_.group + own.half * kChannels, v);
    }
    with_float_type(w_.dtype, [&](auto tag) { store<typename decltype(tag)::type>(first, v); });
  }

  template <typename T>
  __device__ __forceinline__ void store(int64_t first, const float (&v)[kChannels]) const {
    constexpr int kEach = 128 / static_cast<int>(sizeof(T));  // channels of a line
    // In iteration i, eight lanes write the line of the lane 4 i + lane / 8 above.
    const Chunk c = chunk(first + lane_ / 8 % 2);
    const uint32_t groups = static_cast<uint32_t>(w_.groups), tile = c.unit / groups, group = c.unit - tile * groups;
    const int64_t row = int64_t{tile} * format::kWeightRows + lane_ / 16 * 8, k = int64_t{groups} * w_.group;
    const int rows = c.exists ? static_cast<int>(min(w_.n - row, int64_t{8})) : 0;
    T* to = static_cast<T*>(w_.out) + row * k + int64_t{group} * w_.group + c.half * kChannels;
    to += lane_ % 8 * (16 / static_cast<int>(sizeof(T)));
#pragma unroll
    for (int at = 0; at < kChannels; at += kEach) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float* const x = v + at + i * (kEach / 8);
        uint4 word;
        if constexpr (std::is_same_v<T, float>) {
          word = {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
        } else {
          word = {word_of_floats<T>(x[0], x[1]), word_of_floats<T>(x[2], x[3]), word_of_floats<T>(x[4], x[5]),
                  word_of_floats<T>(x[6], x[7])};
        }
        *reinterpret_cast<uint4*>(memory_ + lane_ * kLaneBytes + 16 * i) = word;
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint4 x = *reinterpret_cast<const uint4*>(memory_ + (4 * i + lane_ / 8) * kLaneBytes + 16 * (lane_ % 8));
        if (i < rows) __stwb(reinterpret_cast<uint4*>(to + i * k + at), x);
      }
      __syncwarp();
    }
  }

  const WeightDecoder& w_;
  const float* factors_;
  uint8_t* memory_;
  int lane_, halves_;
};

template <bool BYTES>
__global__ void __launch_bounds__(WarpDecoder::kThreads, 2)
    weight_decode_kernel(const __grid_constant__ WeightDecoder w) {
  __shared__ WarpDecoder::Shared shared;
  if (!w.early) wait_for_previous_kernel();
  // The signs into the L2 cache only: they may be a copy that the previous kernel writes.
  if (w.early && threadIdx.x < w.group / 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(w.signs + 32 * threadIdx.x));
  const auto load_factors = [&] {
    if (w.early) wait_for_previous_kernel();  // it may use the memory of the results
    const float norm = block_norm(w.group == 128 ? 7 : 6);
    for (int i = threadIdx.x; i < w.group; i += WarpDecoder::kThreads) {
      shared.factors[i] = __fmul_rn(norm, __ldg(w.signs + i));
    }
    __syncthreads();
  };
  constexpr int kWarps = WarpDecoder::kWarps;
  const int64_t first = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  WarpDecoder(w, shared).run<BYTES>(first, int64_t{gridDim.x} * kWarps, load_factors);
}

}  // namespace turboquant::cuda::linear
