// The products of a warp's query rows with the keys of a step, in registers. They become scores, and then weights, in
// place (softmax.cuh).
#pragma once

#include "cuda/attention/general/block_context.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/wgmma.cuh"

namespace turboquant::cuda::general {

template <typename S>
class Scores {
 public:
  __device__ __forceinline__ explicit Scores(const BlockContext<S>& block) : block_(block) {}

  // All strips = queries * keys. Warpgroups only issue their products here.
  __device__ __forceinline__ void multiply(int step) {
    if constexpr (S::kHopper) {
      issue_products(step);
    } else {
      multiply_fragments(step);
    }
  }
  // Until a strip is there; strips in order. A warpgroup's later strips are still being multiplied then.
  __device__ __forceinline__ void wait_for(int strip) {
    if constexpr (S::kHopper) {
      wait_for_products<S::kStrips - 1>();
      receive<4 * S::kKeyOctets>(x_[strip]);
    }
  }

  // Of eight keys after eight keys: columns 2t and 2t + 1 of row g, then of row g + 8.
  using Strip = float[4 * S::kKeyOctets];
  __device__ __forceinline__ Strip& strip(int i) { return x_[i]; }

 private:
  __device__ __forceinline__ void issue_products(int step) {
    const uint64_t query = operand(block_.shared.queries() + block_.thread.team_row() * S::kChannelOctets, 1024, 128);
    const uint64_t key = operand(block_.shared.keys(step), 16 * S::kKeys, 128);
    begin_products();
#pragma unroll
    for (int i = 0; i < S::kStrips; ++i) {
#pragma unroll
      for (int k = 0; k < S::kDim / 16; ++k) {
        product_of_operands<S::kKeys>(x_[i], advance(query, i * 128 * S::kDim + k * 2048),
                                      advance(key, k * 32 * S::kKeys), k > 0);
      }
      commit_products();
    }
  }

  __device__ __forceinline__ void multiply_fragments(int step) {
#pragma unroll
    for (int i = 0; i < 4 * S::kKeyOctets * S::kStrips; ++i) x_[i / (4 * S::kKeyOctets)][i % (4 * S::kKeyOctets)] = 0;
    const uint4* key = block_.shared.keys(step) + block_.thread.lane;
    const uint4* query =
        block_.shared.queries() + block_.thread.row_warp * S::kStrips * S::kKeySlices * 64 + block_.thread.lane;
#pragma unroll(S::kWhole ? S::kKeySlices : 1)
    for (int slice = 0; slice < S::kKeySlices; ++slice) {
      if (!S::kWhole && 32 * slice >= block_.x.layout.head_dim) break;
      uint4 q[S::kStrips][2];
#pragma unroll
      for (int i = 0; i < 2 * S::kStrips; ++i) {
        q[i / 2][i % 2] = query[(i / 2 * S::kKeySlices + slice) * 64 + i % 2 * 32];
      }
#pragma unroll
      for (int o = 0; o < S::kKeyOctets; ++o) {
        const uint4 k = key[(slice * S::kKeyOctets + o) * 32];
#pragma unroll
        for (int i = 0; i < S::kStrips; ++i) mma_halves(x_[i] + 4 * o, q[i][0], k.x, k.y);
#pragma unroll
        for (int i = 0; i < S::kStrips; ++i) mma_halves(x_[i] + 4 * o, q[i][1], k.z, k.w);
      }
    }
  }

  const BlockContext<S>& block_;
  float x_[S::kStrips][4 * S::kKeyOctets];
};

}  // namespace turboquant::cuda::general
