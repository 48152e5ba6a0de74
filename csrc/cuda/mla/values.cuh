// A warpgroup that sums weighted latents: 64 channels x all rows in each product, over the tokens of a unit.
//
// Warp w of all value warps has kWarpChunks words of 16 bytes of every token's row; ldmatrix with transposition gives a
// lane the codes of two tokens side by side. Lane (g, t) has of each product channels g and g + 8 of its warp's 16 and
// rows 2 t and 2 t + 1 of every eight.
#pragma once

#include "cuda/common/wgmma_registers.cuh"
#include "cuda/mla/ring.cuh"

namespace turboquant::cuda::mla {

template <class S>
class ValueGroup {
  static constexpr int kTiles = S::kRowTiles, kPairs = kPairsOfWord<S::kKind>;
  static constexpr int kChunkSums = kPairs / 2;  // products that a word of 16 bytes takes part in

 public:
  // ring: has begun to copy the segment
  __device__ __forceinline__ ValueGroup(const BlockView& block, Ring<S>& ring)
      : block_(block), ring_(ring), warp_(block.warp - 4), weights_(operand(block.weights(), kTiles * 128, 128)) {}

  // `units` units of a segment; count: units of the block before it
  __device__ __forceinline__ void attend(int units, int count) {
#pragma unroll
    for (int b = 0; b < S::kSums; ++b) {
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) sums_[b][i] = 0;
    }
    for (int i = 0; i < units; ++i, ++count) {
      const int stage = count % block_.plan.stages;
      attend_unit(stage, count);
      if (i + block_.plan.stages >= units) continue;
      sync_threads(kValuesBarrier, S::kValueThreads);
      ring_.copy(stage);
    }
  }

  // The sums of a partial result [ROWS, kPart].
  __device__ __forceinline__ void leave(float* part) const {
    constexpr float kUnit = S::kMult * format::kLevelUnit;
#pragma unroll
    for (int q = 0; q < S::kWarpChunks; ++q) {
      const int channel = (warp_ * S::kWarpChunks + q) * S::kChunkChannels + kPairs * block_.g;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float x[kPairs];
#pragma unroll
          for (int i = 0; i < kPairs; ++i) {
            x[i] = sums_[q * kChunkSums + i / 2][4 * j + 2 * (i % 2) + h] * (kUnit / unit_of_pair<S::kKind>(i));
          }
          float* to = part + (8 * j + 2 * block_.t + h) * S::kPart + kPartHead + channel;
          if constexpr (kPairs == 4) {
            *reinterpret_cast<float4*>(to) = {x[0], x[1], x[2], x[3]};
          } else {
            *reinterpret_cast<float2*>(to) = {x[0], x[1]};
          }
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void attend_unit(int stage, int count) {
    const int buffer = count % kWeightBuffers;
    wait_barrier(block_.arrived(stage), count / block_.plan.stages & 1);
    wait_barrier(block_.weighed(buffer), count / kWeightBuffers & 1);
    const float* factors = block_.factors() + buffer * (S::kRows + 1);
    if (factors[S::kRows] != 0) rescale(factors);
    const uint8_t* unit = ring_.unit(stage);
#pragma unroll 1
    for (int s = 0; s < kUnitTokens / 16; ++s) {
      const uint8_t* tile = unit + s / 2 * block_.plan.tile_bytes;
      multiply(tile, s % 2 * 16, advance(weights_, buffer * S::kWeightBytes + s * S::kStepBytes));
    }
    wait_for_products<0>();
#pragma unroll
    for (int b = 0; b < S::kSums; ++b) receive<4 * kTiles>(sums_[b]);
    __syncwarp();
    if (block_.lane == 0) arrive(block_.summed(buffer));
  }

  // 16 tokens from `row` of a tile on.
  __device__ __forceinline__ void multiply(const uint8_t* tile, int row, uint64_t weights) {
    const int lane = block_.lane, token = row + lane % 16, first = warp_ * S::kWarpChunks;
    const uint8_t* words = tile + token * S::kRowBytes;
    uint32_t fifth[2][S::kWarpChunks] = {};
    if constexpr (S::kKind == kPlanes) load_fifth(tile, row, fifth);
#pragma unroll
    for (int q = 0; q < S::kWarpChunks; q += 2) {
      const uint4 x = load_transposed(words + code_word(token, first + q + lane / 16));
      uint32_t pair[2][2][kPairs];  // of two words, of tokens 0-7 and 8-15
      expand<S::kKind>(x.x, fifth[0][q], pair[0][0]), expand<S::kKind>(x.y, fifth[1][q], pair[0][1]);
      expand<S::kKind>(x.z, fifth[0][q + 1], pair[1][0]), expand<S::kKind>(x.w, fifth[1][q + 1], pair[1][1]);
      begin_products();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int k = 0; k < kChunkSums; ++k) {
          add_product<S::kRows, __half>(sums_[(q + i) * kChunkSums + k], pair[i][0][2 * k], pair[i][0][2 * k + 1],
                                        pair[i][1][2 * k], pair[i][1][2 * k + 1], weights);
        }
      }
      commit_products();
      if (q + 2 < S::kWarpChunks) wait_for_products<1>();
    }
    wait_for_products<0>();
  }

  // The fifth bits of the lane's channels in each of its words, for tokens 2 t and 2 t + 1, and for those 8 later.
  __device__ __forceinline__ void load_fifth(const uint8_t* tile, int row, uint32_t (&fifth)[2][S::kWarpChunks]) const {
    const uint32_t halves = block_.g % 2 ? 0x7632 : 0x5410;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint8_t* from = tile + block_.plan.planes + (row + 8 * i + 2 * block_.t) * S::kPlaneBytes +
                            warp_ * S::kWarpChunks * 4;
#pragma unroll
      for (int q = 0; q < S::kWarpChunks; q += 2) {
        const uint2 low = *reinterpret_cast<const uint2*>(from + 4 * q);
        const uint2 high = *reinterpret_cast<const uint2*>(from + S::kPlaneBytes + 4 * q);
        fifth[i][q] = align_fifth(select_bytes(low.x, high.x, halves), block_.g / 2);
        fifth[i][q + 1] = align_fifth(select_bytes(low.y, high.y, halves), block_.g / 2);
      }
    }
  }

  __device__ __forceinline__ void rescale(const float* factors) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float by[2] = {factors[8 * j + 2 * block_.t], factors[8 * j + 2 * block_.t + 1]};
#pragma unroll
      for (int b = 0; b < S::kSums; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums_[b][4 * j + i] *= by[i % 2];
      }
    }
  }

  const BlockView block_;
  Ring<S>& ring_;
  const int warp_;  // among the value warps
  const uint64_t weights_;
  float sums_[S::kSums][4 * kTiles];
};

}  // namespace turboquant::cuda::mla
