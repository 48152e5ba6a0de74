// The warpgroup that computes scores: products of 64 tokens with all rows, the running softmax, and weights as an
// operand for the value warpgroups.
//
// Warp w has tokens 16 w to 16 w + 15 of a unit. Lane (g, t) has of each tile of eight rows (columns of a product) rows
// 2 t and 2 t + 1 of tokens g and g + 8: element 4 j + 2 i + h of an array is row 8 j + 2 t + h of token g + 8 i.
//
// A weight is 2^(score - reference) times the token's scale, rounded to float16. A row's reference follows the largest
// such product of a unit: it is raised when one is 2^12 above it, and lowered when all are 2^4 below it, so that weights
// keep their digits behind a token that had nearly all weight. Sums are float32 and follow the reference; it is never
// lowered to less than 2^-40 of what it once was, where nothing counts any more.
#pragma once

#include "cuda/common/wgmma_registers.cuh"
#include "cuda/mla/ring.cuh"

namespace turboquant::cuda::mla {

constexpr float kRaise = 12, kLower = 4, kDeepest = 40;
constexpr float kNothing = -1e30f;        // a reference before the first key
constexpr float kLeastScale = 1.0f / (1 << 24);  // of a token in its reference: that of a zero vector is 0

template <class S>
class ScoreGroup {
  static constexpr int kTiles = S::kRowTiles, kColumns = 2 * kTiles;  // of a lane
  static constexpr int kChains = 1;              // sums that products go to in turn

 public:
  explicit __device__ __forceinline__ ScoreGroup(const BlockView& block)
      : block_(block), ring_(block),
        queries_(operand(block.queries(), kTiles * 128, 128)) {}

  // Units [0, units) of a segment, the first of which has `token` as its first; count: units of the block before it.
  __device__ __forceinline__ void attend(int token, int units, int count) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) reference_[c] = top_[c] = kNothing, total_[c] = weights_[c] = 0;
    for (int i = 0; i < units; ++i, ++count) attend_unit(token + i * kUnitTokens, count);
  }

  // The heads of a partial result [ROWS, kPart].
  __device__ __forceinline__ void leave(float* part) const {
    float* sums = block_.exchange();  // [2][4][ROWS], free after the last unit
    sync_threads(kScoresBarrier, kWarpgroup);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float total = total_[c], weights = weights_[c];
#pragma unroll
      for (int bit = 4; bit < 32; bit *= 2) {
        total += __shfl_xor_sync(0xffffffff, total, bit), weights += __shfl_xor_sync(0xffffffff, weights, bit);
      }
      const int row = row_of(c);
      if (block_.g == 0) {
        sums[block_.warp * S::kRows + row] = total, sums[(4 + block_.warp) * S::kRows + row] = weights;
        if (block_.warp == 0) part[row * S::kPart] = reference_[c] == kNothing ? -INFINITY : reference_[c];
      }
    }
    sync_threads(kScoresBarrier, kWarpgroup);
    if (threadIdx.x < S::kRows) {
      const auto sum = [&](int kind) {
        float x = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) x += sums[(4 * kind + w) * S::kRows + threadIdx.x];
        return x;
      };
      float* head = part + threadIdx.x * S::kPart;
      head[1] = sum(0), head[2] = sum(1) * S::kOffset * format::kLevelUnit;
    }
  }

 private:
  __device__ __forceinline__ int row_of(int c) const { return c / 2 * 8 + 2 * block_.t + c % 2; }

  __device__ __forceinline__ void attend_unit(int token, int count) {
    const int stage = count % block_.plan.stages, buffer = count % kWeightBuffers;
    wait_barrier(block_.arrived(stage), count / block_.plan.stages & 1);
    const uint8_t* tile = ring_.unit(stage) + block_.warp / 2 * block_.plan.tile_bytes;
    const int row = block_.warp % 2 * 16;  // of the tile, the warp's first token
    const __half* scales = reinterpret_cast<const __half*>(tile + block_.plan.scales) + row + block_.g;
    const float scale[2] = {__half2float(scales[0]), __half2float(scales[8])};

    float score[4 * kTiles];
    multiply_codes(tile, row, scale, score);
    multiply_ropes(tile, row, score);

    const bool masked = token < block_.notes().first_all || token + kUnitTokens > block_.notes().end_all;
    to_base_2(score, token, masked);
    const bool moved = follow(score, scale, count);
    wait_barrier(block_.summed(buffer), (count / kWeightBuffers & 1) ^ 1);
    if (moved) move_reference(buffer);
    if (threadIdx.x == 0) block_.factors()[buffer * (S::kRows + 1) + S::kRows] = moved ? 1.0f : 0.0f;
    if (masked) {
      weigh<true>(score, scale, buffer);
    } else {
      weigh<false>(score, scale, buffer);
    }
    publish_operands();
    arrive(block_.weighed(buffer));
  }

  // ---- Products

  // score = scale * (query . level): four tiles of eight words, tokens g and g + 8, neighbouring words, at a time.
  __device__ __forceinline__ void multiply_codes(const uint8_t* tile, int row, const float (&scale)[2],
                                                 float (&score)[4 * kTiles]) const {
    const RowConstants* rows = block_.rows();
    float extra[kChains == 2 ? 4 * kTiles : 1];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float start = rows[row_of(c)].start;
      score[c / 2 * 4 + c % 2] = score[c / 2 * 4 + 2 + c % 2] = start;
    }
    if constexpr (kChains == 2) {
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) extra[i] = 0;
    }
    const int lane = block_.lane, token = row + lane % 16;
    const uint8_t* words = tile + token * S::kRowBytes;
    const uint8_t* plane = tile + block_.plan.planes + (row + block_.g) * S::kPlaneBytes;
    constexpr int kWordSteps = kPairsOfWord<S::kKind> / 2;  // products of a word of each token
#pragma unroll
    for (int c = 0; c < S::kChunks; c += 2) {
      const uint4 x = load_tiles(words + code_word(token, c + lane / 16));
      uint4 fifth{};  // of the words of x
      if constexpr (S::kKind == kPlanes) {
        const uint2 low = *reinterpret_cast<const uint2*>(plane + 4 * c);
        const uint2 high = *reinterpret_cast<const uint2*>(plane + 8 * S::kPlaneBytes + 4 * c);
        fifth = {align_fifth(low.x, block_.t), align_fifth(high.x, block_.t), align_fifth(low.y, block_.t),
                 align_fifth(high.y, block_.t)};
      }
      uint32_t low[2][kPairsOfWord<S::kKind>], high[2][kPairsOfWord<S::kKind>];
      expand<S::kKind>(x.x, fifth.x, low[0]), expand<S::kKind>(x.y, fifth.y, high[0]);
      expand<S::kKind>(x.z, fifth.z, low[1]), expand<S::kKind>(x.w, fifth.w, high[1]);
      begin_products();
#pragma unroll
      for (int i = 0; i < 2 * kWordSteps; ++i) {
        const int word = i / kWordSteps, k = i % kWordSteps * 2;
        add_product<S::kRows, __half>(kChains == 2 && i % 2 ? extra : score, low[word][k], high[word][k],
                                      low[word][k + 1], high[word][k + 1],
                                      advance(queries_, (c * kWordSteps + i) * S::kStepBytes));
      }
      commit_products();
      wait_for_products<1>();
    }
    wait_for_products<0>();
    receive<4 * kTiles>(score);
    if constexpr (kChains == 2) {
      receive<4 * kTiles>(extra);
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) score[i] += extra[i];
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float factor = rows[row_of(c)].scale;
      score[c / 2 * 4 + c % 2] *= factor * scale[0];
      score[c / 2 * 4 + 2 + c % 2] *= factor * scale[1];
    }
  }

  // Adds the products of rotary channels.
  __device__ __forceinline__ void multiply_ropes(const uint8_t* tile, int row, float (&score)[4 * kTiles]) const {
    const int rope_dim = block_.call.record.rope_dim;
    const auto multiply = [&](auto dim, auto type) {
      const int lane = block_.lane, token = row + lane % 16;
      const uint8_t* words = tile + block_.plan.ropes + token * dim * 2;
      uint4 x[dim / 16];
#pragma unroll
      for (int s = 0; s < dim / 16; ++s) x[s] = load_tiles(words + rope_word(token, 2 * s + lane / 16, dim / 8));
      begin_products();
#pragma unroll
      for (int s = 0; s < dim / 16; ++s) {
        add_product<S::kRows, typename decltype(type)::type>(score, x[s].x, x[s].y, x[s].z, x[s].w,
                                                             advance(queries_, (S::kSteps + s) * S::kStepBytes));
      }
      commit_products();
      wait_for_products<0>();
      receive<4 * kTiles>(score);
    };
    const auto with_dim = [&](auto type) {
      if (rope_dim == 64) {
        multiply(std::integral_constant<int, 64>{}, type);
      } else if (rope_dim == 32) {
        multiply(std::integral_constant<int, 32>{}, type);
      }
    };
    if (block_.call.rope_dtype == Dtype::kBFloat16) {
      with_dim(Tag<__nv_bfloat16>{});
    } else {
      with_dim(Tag<__half>{});
    }
  }

  // ---- Softmax

  // Scores as powers of two, with the center's; -inf where a row does not see a token.
  __device__ __forceinline__ void to_base_2(float (&score)[4 * kTiles], int token, bool masked) const {
    const RowConstants* rows = block_.rows();
    const float by = block_.call.a.softmax_scale * kLog2E;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float shift = rows[row_of(c)].shift;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = score[c / 2 * 4 + 2 * i + c % 2];
        x = fmaf(x, by, shift);
      }
    }
    if (!masked) return;
    const int first = token + 16 * block_.warp + block_.g;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const RowConstants& row = rows[row_of(c)];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (first + 8 * i < row.first || first + 8 * i >= row.end) score[c / 2 * 4 + 2 * i + c % 2] = -INFINITY;
      }
    }
  }

  // Moves the references; true: one of them has moved. The lane's factors are in factor_ then.
  __device__ __forceinline__ bool follow(const float (&score)[4 * kTiles], const float (&scale)[2], int count) {
    float most[kColumns];
    const float log[2] = {__log2f(fmaxf(scale[0], kLeastScale)), __log2f(fmaxf(scale[1], kLeastScale))};
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      most[c] = fmaxf(score[c / 2 * 4 + c % 2] + log[0], score[c / 2 * 4 + 2 + c % 2] + log[1]);
#pragma unroll
      for (int bit = 4; bit < 32; bit *= 2) most[c] = fmaxf(most[c], __shfl_xor_sync(0xffffffff, most[c], bit));
    }
    float* exchange = block_.exchange() + count % 2 * 4 * S::kRows;  // [4][ROWS], the largest of each warp
    if (block_.g == 0) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        *reinterpret_cast<float2*>(exchange + block_.warp * S::kRows + row_of(2 * j)) = {most[2 * j], most[2 * j + 1]};
      }
    }
    sync_threads(kScoresBarrier, kWarpgroup);
    bool moved = false;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      float2 x{-INFINITY, -INFINITY};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 other = *reinterpret_cast<const float2*>(exchange + w * S::kRows + row_of(2 * j));
        x = {fmaxf(x.x, other.x), fmaxf(x.y, other.y)};
      }
      moved |= follow_row(2 * j, x.x), moved |= follow_row(2 * j + 1, x.y);
    }
    return __any_sync(0xffffffff, moved);
  }
  __device__ __forceinline__ bool follow_row(int c, float most) {
    top_[c] = fmaxf(top_[c], most);
    const float deepest = top_[c] - kDeepest, wanted = fmaxf(most, deepest);
    const bool moves = most > reference_[c] + kRaise || (wanted < reference_[c] - kLower && most > -INFINITY);
    next_[c] = moves ? wanted : reference_[c];
    return moves;
  }

  // Rare: some row's reference moves, and its sums with it.
  __device__ __forceinline__ void move_reference(int buffer) {
    float* factors = block_.factors() + buffer * (S::kRows + 1);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float by = exp2_fast(reference_[c] - next_[c]);
      reference_[c] = next_[c];
      total_[c] *= by, weights_[c] *= by;
      if (block_.warp == 0 && block_.g == 0) factors[row_of(c)] = by;
    }
  }

  // Weights to their buffer.
  template <bool MASKED>
  __device__ __forceinline__ void weigh(const float (&score)[4 * kTiles], const float (&scale)[2], int buffer) {
    const int lane = block_.lane;
    uint8_t* to = block_.weights() + buffer * S::kWeightBytes +
                  ((2 * block_.warp + lane / 8 % 2) * kTiles + lane / 16) * 128 + lane % 8 * 16;
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      uint32_t word[4];  // tokens g and g + 8 of row tile j, then of j + 1
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int tile = j + k / 2, i = k % 2;
        float w[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int c = 2 * tile + h;
          const float x = score[4 * tile + 2 * i + h], p = exp2_fast(x - reference_[c]);
          total_[c] += p;
          w[h] = MASKED && x == -INFINITY ? 0 : p * scale[i];
        }
        word[k] = word_of_floats<__half>(w[0], w[1]);
        const float2 rounded = __half22float2(reinterpret_cast<const __half2&>(word[k]));
        weights_[2 * tile] += rounded.x, weights_[2 * tile + 1] += rounded.y;
      }
      store_transposed(to + j * 128, word);
    }
  }

  // Four 8 x 8 matrices of 16-bit elements, transposed: lane i gives the address of row i % 8 of matrix i / 8.
  static __device__ __forceinline__ void store_transposed(void* row, const uint32_t (&word)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
#endif
  }

  const BlockView block_;
  const Ring<S> ring_;
  const uint64_t queries_;

  // Of the lane's rows: the reference and the next one, the largest product of a weight and a scale so far, the
  // denominator and the sum of rounded weights over the lane's own tokens.
  float reference_[kColumns], next_[kColumns], top_[kColumns], total_[kColumns], weights_[kColumns];
};

}  // namespace turboquant::cuda::mla
