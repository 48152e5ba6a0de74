// The sums of weights times values of a warp's rows, in registers from the first key to the last.
#pragma once

#include "cuda/attention/general/half_scale.cuh"
#include "cuda/attention/general/scores.cuh"

namespace turboquant::cuda::general {

template <typename S>
class ValueSums {
 public:
  __device__ __forceinline__ explicit ValueSums(const BlockContext<S>& block) : block_(block) {}

  // A strip's sums += weights * values of a step, by warpgroups, which issue the products only.
  __device__ __forceinline__ void issue_products(int strip, int step, const typename Scores<S>::Strip& weights) {
    const uint64_t value = operand(block_.shared.values(step), 128 * S::kChannelOctets, 128);
    uint4 p[S::kValueBlocks];
#pragma unroll
    for (int block = 0; block < S::kValueBlocks; ++block) p[block] = fragment(weights + 8 * block);
    begin_products();
#pragma unroll
    for (int block = 0; block < S::kValueBlocks; ++block) {
#pragma unroll
      for (int c = 0; c < S::kDim; c += S::kProductChannels) {
        product_of_registers<S::kProductChannels>(sums_[strip] + c / 2, p[block],
                                                  advance(value, block * 256 * S::kChannelOctets + c * 16));
      }
    }
    commit_products();
  }
  // Until all issued products are in the sums.
  __device__ __forceinline__ void wait() {
    wait_for_products<0>();
#pragma unroll
    for (int i = 0; i < S::kStrips; ++i) receive<S::kDim / 2>(sums_[i]);
  }

  // The same for all strips, without warpgroups.
  __device__ __forceinline__ void multiply(int step, Scores<S>& weights) {
    const uint4* value = block_.shared.values(step) + block_.thread.lane + block_.thread.column_warp * 32;
#pragma unroll
    for (int block = 0; block < S::kValueBlocks; ++block) {
      uint4 p[S::kStrips];
#pragma unroll
      for (int i = 0; i < S::kStrips; ++i) p[i] = fragment(weights.strip(i) + 8 * block);
#pragma unroll
      for (int c = 0; c < S::kWarpSlices; ++c) {
        if (!S::kWhole && 16 * (c * S::kColumnWarps + block_.thread.column_warp) >= block_.x.layout.head_dim) break;
        const uint4 v = value[(block * S::kValueSlices + c * S::kColumnWarps) * 32];
#pragma unroll
        for (int i = 0; i < S::kStrips; ++i) {
          mma_halves(sums_[i] + 8 * c, p[i], v.x, v.y);
          mma_halves(sums_[i] + 8 * c + 4, p[i], v.z, v.w);
        }
      }
    }
  }

  // Row 2 strip + h of the lane.
  __device__ __forceinline__ void scale_row(int strip, int h, float factor) {
#pragma unroll
    for (int c = 0; c < 4 * S::kWarpSlices; ++c) sums_[strip][c / 2 * 4 + 2 * h + c % 2] *= factor;
  }

  // Calls fn(low, high, at) for every pair of neighbouring channels below d that a lane has of a strip; `at` is the
  // pair's place among float32 rows, one strip of every team, `stride` apart.
  template <typename Fn>
  __device__ __forceinline__ void for_each_pair(int strip, float* rows, int stride, Fn&& fn) {
    const Thread<S>& thread = block_.thread;
    const int d = block_.x.layout.head_dim;
#pragma unroll
    for (int i = 0; i < S::kStrips; ++i) {  // with a constant index the sums stay in registers
      if (i != strip) continue;
#pragma unroll
      for (int c = 0; c < 4 * S::kWarpSlices; ++c) {
        const int channel = 16 * (c / 4 * S::kColumnWarps + thread.column_warp) + c / 2 % 2 * 8 + 2 * thread.t;
        float2* at = reinterpret_cast<float2*>(rows + (16 * thread.row_warp + c % 2 * 8 + thread.g) * stride + channel);
        if (channel < d) fn(sums_[i][2 * c], sums_[i][2 * c + 1], at);
      }
    }
  }

 private:
  // The weights of sixteen keys, as operand A.
  static __device__ __forceinline__ uint4 fragment(const float* x) {
    return {halves(x[0], x[1]), halves(x[2], x[3]), halves(x[4], x[5]), halves(x[6], x[7])};
  }

  const BlockContext<S>& block_;
  float sums_[S::kStrips][8 * S::kWarpSlices] = {};  // of eight channels after eight channels, as in Scores::Strip
};

}  // namespace turboquant::cuda::general
