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
constexpr int kLaneChannels = 16, kWarpChannels = 32 * kLaneChannels;

// Warps of a thread block that rotates a token: 512 channels each at a time.
inline int rotate_warps(int64_t channels) {
  const int64_t warps = (channels + kWarpChannels - 1) / kWarpChannels;
  return static_cast<int>(warps < kMostRotateWarps ? warps : kMostRotateWarps);
}

// 512 channels of a token in a warp: a lane has 16 neighbours.
class WarpChannels {
 public:
  __device__ __forceinline__ WarpChannels(const Call& a, int64_t token, int first)
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

  // row: of the token in its tile, 128 bytes for each 64 channels; step: bytes from 64 channels to the next 64. Within
  // 16 channels, channel 4 t + 2 j + i stands at place 8 j + 2 t + i, where lane t of a left operand has the codes of
  // channels 4 t to 4 t + 3. Two neighbouring lanes store 16 bytes each of one lane's 32, then of the other's: halves
  // of 32 bytes would take as long as all of them. All lanes call it.
  __device__ __forceinline__ void store(uint8_t* tile, int row, int64_t step) const {
    const auto half = [&](const float* v) {
      return make_uint4(operands(v[0], v[1]), operands(v[4], v[5]), operands(v[8], v[9]), operands(v[12], v[13]));
    };
    const uint4 low = half(v_), high = half(v_ + 2);
    const bool odd = threadIdx.x % 2;
    const uint4 given = odd ? low : high;
    const uint4 got = make_uint4(__shfl_xor_sync(0xffffffff, given.x, 1), __shfl_xor_sync(0xffffffff, given.y, 1),
                                 __shfl_xor_sync(0xffffffff, given.z, 1), __shfl_xor_sync(0xffffffff, given.w, 1));
    if (!exists_) return;
    uint8_t* const to = tile + channel_ / kChannels * step;
    const int lane = threadIdx.x % 4, first = 32 * (lane & 2) + 16 * (lane & 1);
    *reinterpret_cast<uint4*>(to + swizzled(row, first)) = odd ? got : low;
    *reinterpret_cast<uint4*>(to + swizzled(row, first + 32)) = odd ? high : got;
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

// A thread block rotates a token, or one for a pair of it and an expert. Those of an expert are neighbours, as their
// rows in memory are: in the order of tokens they would be written more slowly.
__global__ void __launch_bounds__(32 * kMostRotateWarps, 1)
    rotate_activations(const __grid_constant__ Call a, const __grid_constant__ Plan p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ uint32_t most_of_warp[kMostRotateWarps];
  wait_for_previous_kernel();
  let_next_kernel_begin();  // not before: it reads weights, which the kernel before this one may have written
  const int channels = a.groups * a.block.group;
  int token = static_cast<int>(blockIdx.x), place = token;  // column tile * tokens of a tile + row
  if (a.has_experts()) {
    const int pair = a.arranged.order[token];
    place = a.arranged.slots[token];
    if (place < 0) return clear_results(pair, a.y, a.dtype, a.n);
    token = quotient(pair, a.pairs.choices);
  }
  const int column_tile = quotient(place, p.tokens), row = place - column_tile * p.tokens;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  WarpChannels own(a, token, kWarpChannels * warp);
  uint32_t most = own.most();
#pragma unroll 1
  for (int first = kWarpChannels * (warp + warps); first < channels; first += kWarpChannels * warps) {
    most = max(most, WarpChannels(a, token, first).most());
  }
  if (lane == 0) most_of_warp[warp] = most;
  __syncthreads();
  most = max_of_lanes(lane < warps ? most_of_warp[lane] : 0u);

  // The limit keeps the factor, and what undoes it, normal numbers.
  const int down = min(kLog2Largest + 127 - static_cast<int>(most >> 23), 126);  // -117 .. 126
  const float scale = __int_as_float((127 + down) << 23) * (a.block.group == 128 ? block_norm(7) : block_norm(6));
  const int64_t step = int64_t{p.tokens} * kRowBytes;
  uint8_t* const tile = p.operands + int64_t{column_tile} * (channels / kChannels) * step;
  own.rotate(scale);
  own.store(tile, row, step);
#pragma unroll 1
  for (int first = kWarpChannels * (warp + warps); first < channels; first += kWarpChannels * warps) {
    WarpChannels more(a, token, first);
    more.rotate(scale);
    more.store(tile, row, step);
  }
  if (threadIdx.x == 0) {
    const float factor = __int_as_float((127 - down) << 23) * kOperandUnit;
    p.factors[place] = most < kInfinityBits ? factor : __uint_as_float(0x7FFFFFFF);
  }
#endif
}

}  // namespace turboquant::cuda::linear::tiles
