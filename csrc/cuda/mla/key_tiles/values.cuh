// A warpgroup that sums weighted latents: 64 channels x all rows in each product, over the tokens of a unit.
//
// Warp w of all value warps has as many words of 16 bytes of every token's row; ldmatrix with transposition gives a
// lane the codes of two tokens side by side. Lane (g, t) has of each product channels g and g + 8 of its warp's 16 and
// rows 2 t and 2 t + 1 of every eight.
#pragma once

#include "cuda/common/wgmma_registers.cuh"
#include "cuda/mla/key_tiles/expansion.cuh"
#include "cuda/mla/key_tiles/ring.cuh"

namespace turboquant::cuda::mla {

template <class S>
class ValueGroup {
  static constexpr int kTiles = S::kRowTiles;
  // Words of a warp, and products that a word takes part in.
  template <class C>
  static constexpr int kWarpChunks = C::kChunks / (4 * S::kValueGroups);
  template <class C>
  static constexpr int kChunkSums = kPairsOfWord<C::kKind> / 2;

 public:
  // ring: has begun to copy the segment
  __device__ __forceinline__ ValueGroup(const BlockView& block, Ring& ring)
      : block_(block), ring_(ring), warp_(block.warp - 4),
        weights_(operand_word(shared_address(block.weights()), kTiles * 128)) {}

  // `units` units of a segment
  __device__ __forceinline__ void attend(int units, Turn turn) {
#pragma unroll
    for (int b = 0; b < S::kSums; ++b) {
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) sums_[b][i] = 0;
    }
    for (int i = 0; i < units; ++i) {
      attend_unit(turn);
      ring_.pass_on(turn, i + block_.plan.stages < units);
      turn.next(block_.plan.stages);
    }
  }

  // The sums of a partial result [ROWS, kPart].
  __device__ __forceinline__ void leave(float* part) const {
    if (block_.plan.kind == OperandKind::kBytes) {
      leave_sums<Codes<S::kLatent, OperandKind::kBytes>>(part);
    } else {
      leave_sums<Codes<S::kLatent, OperandKind::kNibbles>>(part);  // planes lie alike
    }
  }

 private:
  template <class C>
  __device__ __forceinline__ void leave_sums(float* part) const {
    constexpr int kPairs = kPairsOfWord<C::kKind>;
    const OperandKind kind = block_.plan.kind;
    const float unit = level_step(kind) * format::kLevelUnit;
    const float by[2] = {unit * inverse_unit(kind, 0), unit * inverse_unit(kind, 1)};
#pragma unroll
    for (int q = 0; q < kWarpChunks<C>; ++q) {
      const int channel = (warp_ * kWarpChunks<C> + q) * C::kChunkChannels + kPairs * block_.g;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float x[kPairs];
#pragma unroll
          for (int i = 0; i < kPairs; ++i) {
            x[i] = sums_[q * kChunkSums<C> + i / 2][4 * j + 2 * (i % 2) + h] * by[i % 2];
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

  __device__ __forceinline__ void attend_unit(const Turn& turn) {
    const int buffer = turn.buffer();
    wait_barrier(block_.arrived(turn.stage), turn.phase);
    wait_barrier(block_.weighed(buffer), turn.buffer_phase());
    const float* factors = block_.factors() + buffer * Plan::factors_of(S::kRows);
    if (factors[S::kRows] != 0) rescale(factors);
    const uint32_t weights = __shfl_sync(0xffffffff, weights_ + buffer * (S::kWeightBytes / 16), 0);
    with_codes<S::kLatent>(block_.plan.kind, [&](auto codes) {
      multiply<decltype(codes)>(turn.stage * block_.plan.unit_bytes, weights);
    });
    __syncwarp();
    if (block_.lane == 0) arrive(block_.weights_read(buffer));
  }

  // The unit that is `unit` bytes behind the start of shared memory.
  template <class C>
  __device__ __forceinline__ void multiply(uint32_t unit, uint32_t weights) {
    constexpr int kOwn = kWarpChunks<C>;
    const int token = block_.lane % 16;  // rows of 16 tokens later have the same places
    uint32_t words[kOwn / 2];
#pragma unroll
    for (int q = 0; q < kOwn; q += 2) {
      words[q / 2] = shared_address(block_.shared) + unit + token * C::kRowBytes +
                     code_word(token, warp_ * kOwn + q + block_.lane / 16);
    }
    // A step is 16 tokens. Its words, two of each token at a time, are loaded while products of others are under way.
    // With 64 rows of 512 channels the sums leave registers for the operands of two words.
    constexpr bool kSingly = S::kRows * S::kLatent > 16384;
    constexpr int kSteps = kUnitTokens / 16, kLast = kOwn - 2;
    const int tile_bytes = block_.plan.tile_bytes;
    const auto load = [&](int step, int q) {
      return load_matrices<true>(words[q / 2] + step / 2 * tile_bytes + step % 2 * 16 * C::kRowBytes);
    };
    uint4 next = load(0, 0);
    for_each<kSteps>([&](auto step) {
      constexpr bool kNegative = counts_negatively(step), kNegates = kNegative && C::kKind == OperandKind::kBytes;
      uint32_t fifth[2][kOwn] = {};
      if constexpr (C::kKind == OperandKind::kPlanes) {
        load_fifth<C>(block_.shared + unit + step / 2 * tile_bytes, step % 2 * 16, fifth);
      }
#pragma unroll
      for (int q = 0; q < kOwn; q += 2) {
        const uint4 x = next;
        if (q < kLast || step + 1 < kSteps) next = load(q < kLast ? step : step + 1, q < kLast ? q + 2 : 0);
        const uint32_t word[2][2] = {{x.x, x.y}, {x.z, x.w}};  // of each, tokens 0-7 and 8-15
        uint32_t pair[2][2][kPairsOfWord<C::kKind>];
        const auto expand = [&](int w) {
          expand_pairs<C::kKind, kNegative>(word[w][0], fifth[0][q + w], pair[w][0]);
          expand_pairs<C::kKind, kNegative>(word[w][1], fifth[1][q + w], pair[w][1]);
        };
        if (!kSingly) expand(0), expand(1);
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          if (kSingly) expand(w);
          if (kSingly || w == 0) begin_products();
#pragma unroll
          for (int k = 0; k < kChunkSums<C>; ++k) {
            add_product<S::kRows, __half, kNegates>(sums_[(q + w) * kChunkSums<C> + k], pair[w][0][2 * k],
                                                    pair[w][0][2 * k + 1], pair[w][1][2 * k], pair[w][1][2 * k + 1],
                                                    weights);
          }
          if (kSingly || w == 1) {
            commit_products();
            wait_for_products<1>();
          }
        }
      }
      weights += S::kStepBytes / 16;
    });
    wait_for_products<0>();
#pragma unroll
    for (int b = 0; b < S::kSums; ++b) receive<4 * kTiles>(sums_[b]);
  }

  // The fifth bits of the lane's channels in each of its words, for tokens 2 t and 2 t + 1, and for those 8 later. row:
  // the first of the 16 tokens
  template <class C>
  __device__ __forceinline__ void load_fifth(const uint8_t* tile, int row, uint32_t (&fifth)[2][kWarpChunks<C>]) const {
    if constexpr (kWarpChunks<C> == 4) {
      // Rows of planes are so short that lanes which read theirs would meet in the same banks. So lane (g, t) gets half
      // g of the warp's 16 bytes in rows 2 t and 2 t + 1, and lanes exchange them: each word has halves for even and
      // odd g.
      const uint2 halves = load_two_matrices(shared_address(tile) + block_.plan.planes +
                                             (row + block_.lane % 16) * C::kPlaneBytes + warp_ * 16);
#pragma unroll
      for (int q = 0; q < kWarpChunks<C>; ++q) {
        const int lane = 4 * (2 * q + block_.g % 2) + block_.t;
        fifth[0][q] = align_fifth(__shfl_sync(0xffffffff, halves.x, lane), block_.g / 2);
        fifth[1][q] = align_fifth(__shfl_sync(0xffffffff, halves.y, lane), block_.g / 2);
      }
    } else {  // where more rows of queries leave fewer registers
      const uint32_t halves = block_.g % 2 ? 0x7632 : 0x5410;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint8_t* from =
            tile + block_.plan.planes + (row + 8 * i + 2 * block_.t) * C::kPlaneBytes + warp_ * kWarpChunks<C> * 4;
#pragma unroll
        for (int q = 0; q < kWarpChunks<C>; q += 2) {
          const uint2 low = *reinterpret_cast<const uint2*>(from + 4 * q);
          const uint2 high = *reinterpret_cast<const uint2*>(from + C::kPlaneBytes + 4 * q);
          fifth[i][q] = align_fifth(select_bytes(low.x, high.x, halves), block_.g / 2);
          fifth[i][q + 1] = align_fifth(select_bytes(low.y, high.y, halves), block_.g / 2);
        }
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
  Ring& ring_;
  const int warp_;          // among the value warps
  const uint32_t weights_;  // the operand of the first buffer
  float sums_[S::kSums][4 * kTiles];
};

}  // namespace turboquant::cuda::mla
