// The warpgroup that sums weighted values: 64 channels x all rows in each product, over the tokens of a unit.
//
// Warp v of the warpgroup has channel units 2 v and 2 v + 1 of a value block, 16 channels each, or unit v of 64
// channels. Lane (g, t) has of each of them channels g and g + 8, and rows 2 t and 2 t + 1 of every eight.
#pragma once

#include "cuda/attention/key_tiles/expansion.cuh"
#include "cuda/attention/key_tiles/ring.cuh"
#include "cuda/common/wgmma_registers.cuh"

namespace turboquant::cuda::key_tiles {

template <class S, class VALUES>
class ValueGroup {
  using Values = VALUES;
  static constexpr int kTiles = S::kRowTiles, kUnits = Values::kProducts;
  // Where elements count from another zero than levels do, sums of rounded weights say what is left out.
  static constexpr bool kOffsets = Values::kOffset != 0;

 public:
  // ring: has begun to copy the segment
  __device__ __forceinline__ ValueGroup(const View& block, Ring& ring)
      : block_(block), ring_(ring), warp_(block.warp - kWarpgroup / 32),
        weights_(operand_word(shared_address(block.weights()), kTiles * 128)) {}

  // `units` units of a segment
  __device__ __forceinline__ void attend(int units, Turn& turn) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) sums_[u][i] = 0;
    }
    if constexpr (kOffsets) {
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) ones_[i] = 0;
    }
#pragma unroll 1
    for (int i = 0; i < units; ++i) {
      attend_unit(turn);
      ring_.pass_on(turn, i, units);
      turn.next(block_.own.stages);
    }
  }

  // The sums of a partial result [ROWS, kPart].
  __device__ __forceinline__ void leave(float* part) const {
    constexpr float kUnit = Values::kStep * format::kLevelUnit / Values::kOne;
    constexpr float kOffset = Values::kOffset * format::kLevelUnit * (1 << 24);  // of sums of ones, 2^-24 each
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      float* to = part + split_kv::kPartHead + 16 * (kUnits * warp_ + u) + block_.g;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float lower = sums_[u][4 * j + h], upper = Values::upper(lower, sums_[u][4 * j + 2 + h]);
          const float less = kOffsets ? ones_[4 * j + h] * kOffset : 0;
          float* row = to + (8 * j + 2 * block_.t + h) * S::kPart;
          row[0] = lower * kUnit - less, row[8] = upper * kUnit - less;
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void attend_unit(const Turn& turn) {
    const int buffer = turn.buffer();
    wait_barrier(block_.arrived(turn.stage), turn.phase);
    const int unit = turn.stage * block_.own.unit_bytes + block_.layout.values;
    uint32_t words[kUnitTokens / 16][Values::kWords];
#pragma unroll
    for (int b = 0; b < kUnitTokens / 16; ++b) {
      Values::load(block_.block_of(unit, b, block_.layout.next_values), warp_, block_.lane, words[b]);
    }
    const typename Values::Table table(Values::kUniform ? nullptr : block_.value_levels<S>());
    wait_barrier(block_.weighed(buffer), turn.buffer_phase());
    const float* factors = block_.factors() + buffer * Plan::factors_of(S::kRows);
    if (factors[S::kRows] != 0) rescale(factors);
    const uint32_t weights = __shfl_sync(0xffffffff, weights_ + buffer * (S::kWeightBytes / 16), 0);
    for_each<kUnitTokens / 16>([&](auto b) {
      constexpr bool kNegative = counts_negatively(b), kNegates = kNegative && !Values::kMasks;
      uint32_t a[kUnits][4];
      for_each<kUnits>([&](auto u) { Values::template expand<u, kNegative>(words[b], table, a[u]); });
      begin_products();
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        add_product<S::kRows, __half, kNegates>(sums_[u], a[u][0], a[u][1], a[u][2], a[u][3],
                                                weights + b * (S::kBlockBytes / 16));
      }
      if constexpr (kOffsets) {
        constexpr uint32_t kOnes = 0x00010001;
        add_product<S::kRows, __half>(ones_, kOnes, kOnes, kOnes, kOnes, weights + b * (S::kBlockBytes / 16));
      }
      commit_products();
      wait_for_products<1>();
    });
    wait_for_products<0>();
    if constexpr (kOffsets) receive<4 * kTiles>(ones_);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) receive<4 * kTiles>(sums_[u]);
    __syncwarp();
    if (block_.lane == 0) arrive(block_.weights_read(buffer));
  }

  __device__ __forceinline__ void rescale(const float* factors) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float by[2] = {factors[8 * j + 2 * block_.t], factors[8 * j + 2 * block_.t + 1]};
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums_[u][4 * j + i] *= by[i % 2];
      }
      if constexpr (kOffsets) {
#pragma unroll
        for (int i = 0; i < 4; ++i) ones_[4 * j + i] *= by[i % 2];
      }
    }
  }

  const View block_;
  Ring& ring_;
  const int warp_;          // of the warpgroup
  const uint32_t weights_;  // the operand of the first buffer
  float sums_[kUnits][4 * kTiles];
  float ones_[kOffsets ? 4 * kTiles : 1];  // sums of rounded weights, as those of a channel whose codes are 1
};

}  // namespace turboquant::cuda::key_tiles
