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
      : block_(block), ring_(ring), warp_(block.warp - 4),
        weights_(operand_word(shared_address(block.weights()), kTiles * 128)) {
    const int token = block.lane % 16;  // rows of 16 tokens later have the same places
#pragma unroll
    for (int q = 0; q < S::kWarpChunks; q += 2) {
      words_[q / 2] = shared_address(block.shared) + token * S::kRowBytes +
                      code_word(token, warp_ * S::kWarpChunks + q + block.lane / 16);
    }
  }

  // `units` units of a segment
  __device__ __forceinline__ void attend(int units, Turn& turn) {
#pragma unroll
    for (int b = 0; b < S::kSums; ++b) {
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) sums_[b][i] = 0;
    }
    for (int i = 0; i < units; ++i) {
      attend_unit(turn);
      const int stage = turn.stage;
      turn.next(block_.plan.stages);
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
  __device__ __forceinline__ void attend_unit(const Turn& turn) {
    const int buffer = turn.buffer();
    wait_barrier(block_.arrived(turn.stage), turn.phase);
    wait_barrier(block_.weighed(buffer), turn.buffer_phase());
    const float* factors = block_.factors() + buffer * (S::kRows + 1);
    if (factors[S::kRows] != 0) rescale(factors);
    const int tile_bytes = block_.plan.tile_bytes;
    uint32_t tile = turn.stage * block_.plan.unit_bytes, weights = __shfl_sync(0xffffffff, weights_ + buffer * (S::kWeightBytes / 16), 0);
#pragma unroll 1
    for (int i = 0; i < kUnitTiles; ++i, tile += tile_bytes, weights += 2 * S::kStepBytes / 16) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        multiply(tile, half, weights + half * (S::kStepBytes / 16));
      }
      wait_for_products<0>();
    }
#pragma unroll
    for (int b = 0; b < S::kSums; ++b) receive<4 * kTiles>(sums_[b]);
    __syncwarp();
    if (block_.lane == 0) arrive(block_.summed(buffer));
  }

  // Tokens 16 half to 16 half + 15 of the tile that is `tile` bytes behind the start of shared memory.
  __device__ __forceinline__ void multiply(uint32_t tile, int half, uint32_t weights) {
    uint32_t fifth[2][S::kWarpChunks] = {};
    if constexpr (S::kKind == kPlanes) load_fifth(block_.shared + tile, 16 * half, fifth);
#pragma unroll
    for (int q = 0; q < S::kWarpChunks; q += 2) {
      const uint4 x = load_matrices<true>(words_[q / 2] + tile + half * 16 * S::kRowBytes);
      uint32_t pair[2][2][kPairs];  // of two words, of tokens 0-7 and 8-15
      expand_pairs<S::kKind>(x.x, fifth[0][q], pair[0][0]), expand_pairs<S::kKind>(x.y, fifth[1][q], pair[0][1]);
      expand_pairs<S::kKind>(x.z, fifth[0][q + 1], pair[1][0]), expand_pairs<S::kKind>(x.w, fifth[1][q + 1], pair[1][1]);
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
      wait_for_products<S::kRows == 64 ? 0 : 1>();  // with 64 rows no registers are left for a second set of operands
    }
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
  const uint32_t weights_;  // the operand of the first buffer
  uint32_t words_[S::kWarpChunks / 2];  // the lane's rows for ldmatrix, in the first tile of the ring
  float sums_[S::kSums][4 * kTiles];
};

}  // namespace turboquant::cuda::mla
