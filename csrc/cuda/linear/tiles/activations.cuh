// Activations as right operands: rotated, scaled by a power of two of the token, rounded to float16 (those of bfloat16
// to its 8 significant bits).
#pragma once

#include "cuda/codec/transform.cuh"
#include "cuda/common/device.cuh"
#include "cuda/common/wgmma_swizzled.cuh"
#include "cuda/linear/products.cuh"
#include "cuda/linear/tiles/call.cuh"

namespace turboquant::cuda::linear::tiles {

constexpr int kMostRotateWarps = 32;
constexpr int kLaneChannels = 16, kSpanChannels = 32 * kLaneChannels;

// Warps of a thread block that rotates a token: a span of 512 channels each, or several in turn.
inline int rotate_warps(int64_t channels) {
  const int64_t spans = (channels + kSpanChannels - 1) / kSpanChannels;
  return static_cast<int>(spans < kMostRotateWarps ? spans : kMostRotateWarps);
}

// 512 channels of a token in a warp: a lane has 16 neighbours.
class Span {
 public:
  __device__ __forceinline__ Span(const Call& a, int64_t token, int first)
      : a_(a), channel_(first + kLaneChannels * static_cast<int>(threadIdx.x % 32)),
        exists_(channel_ < a.groups * a.block.group) {
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) v_[i] = 0;
    if (!exists_) return;
    load_floats_as<kLaneChannels>(a.x, a.dtype, token * a.x_stride + channel_, v_);
    if (a.channel_inverse) multiply_by<true>(a.channel_inverse + channel_, v_);
    multiply_by<true>(a.signs + (channel_ & (a.block.group - 1)), v_);
  }

  // The bits of the largest magnitude in the warp, which are ordered as magnitudes are, with NaN above infinity.
  __device__ __forceinline__ uint32_t most() const {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) most = max(most, __float_as_uint(v_[i]) & 0x7FFFFFFF);
    return max_of_lanes(most);
  }

  __device__ __forceinline__ void rotate(float scale) {
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) v_[i] *= scale;
    lane_butterflies<1, kLaneChannels>(v_);
#pragma unroll
    for (int bit = 1; bit < 8; bit *= 2) {
      if (kLaneChannels * bit >= a_.block.group) break;
      const float sign = threadIdx.x & bit ? -1.0f : 1.0f;
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) v_[i] = fmaf(v_[i], sign, __shfl_xor_sync(0xffffffff, v_[i], bit));
    }
  }

  // Operands of the lane and its neighbour, as the two of them store them: 16 bytes each at a time, which are 32
  // neighbouring bytes together. Halves of 32 bytes would take as long as all of them.
  struct Words {
    uint4 first, second;
  };
  // All lanes call it. Within 16 channels, channel 4 t + 2 j + i stands at place 8 j + 2 t + i, where lane t of a left
  // operand has the codes of channels 4 t to 4 t + 3.
  __device__ __forceinline__ Words words() const {
    const auto half = [&](const float* v) {
      return make_uint4(operands(v[0], v[1]), operands(v[4], v[5]), operands(v[8], v[9]), operands(v[12], v[13]));
    };
    const uint4 low = half(v_), high = half(v_ + 2);
    const bool odd = threadIdx.x % 2;
    const uint4 given = odd ? low : high;
    const uint4 got = make_uint4(__shfl_xor_sync(0xffffffff, given.x, 1), __shfl_xor_sync(0xffffffff, given.y, 1),
                                 __shfl_xor_sync(0xffffffff, given.z, 1), __shfl_xor_sync(0xffffffff, given.w, 1));
    return {odd ? got : low, odd ? high : got};
  }

  // row: of the token in its tile, 128 bytes for each 64 channels; step: bytes from 64 channels to the next 64
  __device__ __forceinline__ void store(const Words& words, uint8_t* tile, int row, int64_t step) const {
    if (!exists_) return;
    uint8_t* const to = tile + channel_ / kChannels * step;
    const int lane = threadIdx.x % 4, first = 32 * (lane & 2) + 16 * (lane & 1);
    *reinterpret_cast<uint4*>(to + swizzled(row, first)) = words.first;
    *reinterpret_cast<uint4*>(to + swizzled(row, first + 32)) = words.second;
  }

 private:
  // Two channels as float16, rounded to 8 significant bits where the activations are bfloat16, which have no more:
  // tensor cores take less power for operands that end with zeros, and power is what limits large products.
  __device__ __forceinline__ uint32_t operands(float x, float y) const {
    const uint32_t word = word_of_floats<__half>(x, y);
    return a_.dtype == Dtype::kBFloat16 ? (word + 0x00040004) & 0xFFF8FFF8 : word;
  }

  const Call& a_;
  int channel_;  // the first one of the lane
  bool exists_;
  float v_[kLaneChannels];
};

// Where a token's operands go: one place, or one for each of its experts.
class Places {
 public:
  __device__ __forceinline__ Places(const Call& a, const Plan& p, int token) : a_(a), p_(p), token_(token) {}

  // fn(place: column tile * tokens of a tile + row, or -1; pair). All lanes of a warp call it.
  template <typename F>
  __device__ __forceinline__ void for_each(const F& fn) const {
    if (!a_.has_experts()) return fn(token_, 0);
    const int first = token_ * a_.pairs.choices, end = first + a_.pairs.choices, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int from = first; from < end; from += 32) {
      const int slot = from + lane < end ? a_.arranged.slots[from + lane] : 0;
#pragma unroll 1
      for (int i = 0; i < min(32, end - from); ++i) fn(__shfl_sync(0xffffffff, slot, i), from + i);
    }
  }
  __device__ __forceinline__ void store(const Span& span) const {
    const int64_t step = int64_t{p_.tokens} * kRowBytes;
    const Span::Words words = span.words();
    for_each([&](int place, int) {
      if (place < 0) return;
      const int column_tile = quotient(place, p_.tokens), row = place - column_tile * p_.tokens;
      span.store(words, p_.operands + int64_t{column_tile} * (a_.groups * a_.block.group / kChannels) * step, row,
                 step);
    });
  }

 private:
  const Call& a_;
  const Plan& p_;
  const int token_;
};

// A thread block rotates a token.
__global__ void __launch_bounds__(32 * kMostRotateWarps, 1)
    rotate_activations(const __grid_constant__ Call a, const __grid_constant__ Plan p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ uint32_t most_of_warp[kMostRotateWarps];
  wait_for_previous_kernel();
  let_next_kernel_begin();  // not before: it reads weights, which the kernel before this one may have written
  const int token = static_cast<int>(blockIdx.x), channels = a.groups * a.block.group;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  Span own(a, token, kSpanChannels * warp);
  uint32_t most = own.most();
#pragma unroll 1
  for (int first = kSpanChannels * (warp + warps); first < channels; first += kSpanChannels * warps) {
    most = max(most, Span(a, token, first).most());
  }
  if (lane == 0) most_of_warp[warp] = most;
  __syncthreads();
  most = max_of_lanes(lane < warps ? most_of_warp[lane] : 0u);

  // The limit keeps the factor, and what undoes it, normal numbers.
  const int down = min(kLog2Largest + 127 - static_cast<int>(most >> 23), 126);  // -117 .. 126
  const float scale = __int_as_float((127 + down) << 23) * (a.block.group == 128 ? block_norm(7) : block_norm(6));
  const Places places(a, p, token);
  own.rotate(scale);
  places.store(own);
#pragma unroll 1
  for (int first = kSpanChannels * (warp + warps); first < channels; first += kSpanChannels * warps) {
    Span span(a, token, first);
    span.rotate(scale);
    places.store(span);
  }
  const float factor =
      most < 0x7F800000 ? __int_as_float((127 - down) << 23) * kOperandUnit : __uint_as_float(0x7FFFFFFF);
  places.for_each([&](int place, int pair) {
    if (place < 0) {
      clear_results(pair, a.y, a.dtype, a.n);
    } else if (threadIdx.x == 0) {
      p.factors[place] = factor;
    }
  });
#endif
}

}  // namespace turboquant::cuda::linear::tiles
